/* Messages for people, on stderr. Results go to stdout by their command; nothing else does. */
#ifndef KVL_LOG_H
#define KVL_LOG_H
#include <stdbool.h>
#include <stdint.h>

void kvl_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void kvl_info(const char *format, ...) __attribute__((format(printf, 1, 2))); /* silent with --quiet */
void kvl_log_quiet(bool quiet);

/* Monotonic time in nanoseconds. */
uint64_t kvl_now_ns(void);

/* Progress line "label 37 %  412 tok/s  ETA 12 s", redrawn at most 5 times a second, only if stderr is a terminal. */
struct kvl_progress {
    const char *label, *unit; /* borrowed */
    uint64_t total, start_ns, drawn_ns;
};
void kvl_progress_start(struct kvl_progress *p, const char *label, const char *unit, uint64_t total);
void kvl_progress_update(struct kvl_progress *p, uint64_t done);
void kvl_progress_end(struct kvl_progress *p); /* wipes the line */

/* Ctrl-C: the first SIGINT sets a flag that long loops poll and turn into KVL_E_INTERRUPTED; the second kills. */
void kvl_interrupt_install(void);
bool kvl_interrupted(void);

#endif
