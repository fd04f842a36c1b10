#include "log.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static bool quiet_mode;
static volatile sig_atomic_t interrupt_flag;

void kvl_log_quiet(bool quiet) { quiet_mode = quiet; }

static void say(const char *prefix, const char *format, va_list args)
{
    fputs(prefix, stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void kvl_warn(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say("kvlab: warning: ", format, args);
    va_end(args);
}

void kvl_info(const char *format, ...)
{
    if (quiet_mode) return;
    va_list args;
    va_start(args, format);
    say("", format, args);
    va_end(args);
}

uint64_t kvl_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool progress_visible(void) { return !quiet_mode && isatty(STDERR_FILENO); }

void kvl_progress_start(struct kvl_progress *p, const char *label, const char *unit, uint64_t total)
{
    *p = (struct kvl_progress){.label = label, .unit = unit, .total = total, .start_ns = kvl_now_ns()};
}

void kvl_progress_update(struct kvl_progress *p, uint64_t done)
{
    const uint64_t now = kvl_now_ns(), period_ns = 200000000;
    if (!progress_visible() || now - p->drawn_ns < period_ns || done == 0) return;
    p->drawn_ns = now;
    const double seconds = (double)(now - p->start_ns) * 1e-9, rate = (double)done / seconds;
    const double left = p->total > done ? (double)(p->total - done) / rate : 0.0;
    fprintf(stderr, "\r\033[K%s %3.0f %%  %.1f %s/s  ETA %.0f s", p->label,
            p->total ? 100.0 * (double)done / (double)p->total : 0.0, rate, p->unit, left);
    fflush(stderr);
}

void kvl_progress_end(struct kvl_progress *p)
{
    if (p->drawn_ns != 0) fputs("\r\033[K", stderr);
    p->drawn_ns = 0;
}

static void on_sigint(int signal_number)
{
    if (interrupt_flag) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    }
    interrupt_flag = 1;
}

void kvl_interrupt_install(void)
{
    struct sigaction action = {.sa_handler = on_sigint};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool kvl_interrupted(void) { return interrupt_flag != 0; }
