#include "sweep.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

const char *const kvl_cell_state_name[KVL_CELL_STATES] = {"waiting", "done before", "running", "done", "failed", "skipped"};

enum { PATH_BYTES = 4096, LEAST_FREE_BYTES = 16 << 20 };

kvl_status kvl_sweep_path(const struct kvl_sweep *sweep, const struct kvl_sweep_cell *cell, const char *suffix, char *path, size_t size)
{
    if (snprintf(path, size, "%s/%s%s", sweep->out, cell->id, suffix) < (int)size) return KVL_OK;
    return kvl_fail(KVL_E_IO, "%s: path too long", sweep->out);
}

static kvl_status has_run_file(const struct kvl_sweep *sweep, const struct kvl_sweep_cell *cell, bool *has)
{
    char path[PATH_BYTES];
    const kvl_status status = kvl_sweep_path(sweep, cell, ".h5", path, sizeof path);
    *has = status == KVL_OK && access(path, F_OK) == 0;
    return status;
}

kvl_status kvl_sweep_look(struct kvl_sweep *sweep)
{
    kvl_status status = KVL_OK;
    char path[PATH_BYTES];
    for (size_t i = 0; i < sweep->n; i++) {
        bool has;
        KVL_TRY(has_run_file(sweep, &sweep->cell[i], &has));
        if (!has) continue;
        sweep->cell[i].state = KVL_CELL_DONE_BEFORE;
        KVL_TRY(kvl_sweep_path(sweep, &sweep->cell[i], ".log", path, sizeof path));
        unlink(path); /* of a cell that outlived its sweep */
    }
done:
    return status;
}

/* ---- one cell ---- */

/* Takes the cell for this process: *taken false if another one runs it, or it is done. */
static kvl_status take(const struct kvl_sweep *sweep, struct kvl_sweep_cell *cell, bool *taken)
{
    kvl_status status = KVL_OK;
    char path[PATH_BYTES];
    bool has = false;
    *taken = false;
    cell->log_fd = -1;
    KVL_TRY(has_run_file(sweep, cell, &has));
    if (!has) {
        KVL_TRY(kvl_sweep_path(sweep, cell, ".log", path, sizeof path));
        cell->log_fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (cell->log_fd < 0) {
            status = kvl_fail(KVL_E_IO, "%s: cannot open: %s", path, strerror(errno));
            goto done;
        }
        if (flock(cell->log_fd, LOCK_EX | LOCK_NB) != 0) goto done;
        KVL_TRY(has_run_file(sweep, cell, &has)); /* who had the lock may have finished meanwhile */
        if (has) unlink(path);
    }
    if (has) cell->state = KVL_CELL_DONE_BEFORE;
    *taken = !has;
done:
    if (!*taken && cell->log_fd >= 0) close(cell->log_fd);
    return status;
}

/* What a process that died has left is in the way of the next one. */
static kvl_status clear(const struct kvl_sweep *sweep, struct kvl_sweep_cell *cell)
{
    kvl_status status = KVL_OK;
    char path[PATH_BYTES];
    KVL_TRY(kvl_sweep_path(sweep, cell, ".h5.part", path, sizeof path));
    if (unlink(path) != 0 && errno != ENOENT) status = kvl_fail(KVL_E_IO, "%s: cannot remove: %s", path, strerror(errno));
    if (ftruncate(cell->log_fd, 0) != 0) status = kvl_fail(KVL_E_IO, "%s: cannot empty its log: %s", path, strerror(errno));
    for (char **word = cell->argv; *word; word++) dprintf(cell->log_fd, "%s%s", *word, word[1] ? " " : "\n");
done:
    return status;
}

/* The child: ends when its parent does, whatever ends that; Ctrl-C is the parent's. Does not return. */
static void become_cell(const struct kvl_sweep_cell *cell, pid_t parent, const sigset_t *signals)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(KVL_EXIT_ERROR);
    setpgid(0, 0);
    sigprocmask(SIG_SETMASK, signals, NULL);
    const int null = open("/dev/null", O_RDONLY);
    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(cell->log_fd, STDOUT_FILENO) < 0 || dup2(cell->log_fd, STDERR_FILENO) < 0)
        _exit(KVL_EXIT_ERROR);
    execvp(cell->argv[0], cell->argv);
    dprintf(STDERR_FILENO, "%s: cannot run: %s\n", cell->argv[0], strerror(errno));
    _exit(KVL_EXIT_ERROR);
}

static kvl_status start(const struct kvl_sweep *sweep, struct kvl_sweep_cell *cell, const sigset_t *signals, bool *started)
{
    kvl_status status = KVL_OK;
    KVL_TRY(take(sweep, cell, started));
    if (!*started) return KVL_OK;
    KVL_TRY(clear(sweep, cell));
    const pid_t parent = getpid();
    cell->pid = fork();
    if (cell->pid == 0) become_cell(cell, parent, signals);
    if (cell->pid < 0) {
        status = kvl_fail(KVL_E_IO, "cannot start a process: %s", strerror(errno));
        goto done;
    }
    cell->state = KVL_CELL_RUNS;
    cell->seconds = (double)kvl_now_ns() * 1e-9;
done:
    if (status != KVL_OK && *started) close(cell->log_fd);
    return status;
}

/* The last line of the log that says something, without the program's name. */
static void read_error(struct kvl_sweep_cell *cell)
{
    char tail[4096] = "";
    const off_t size = lseek(cell->log_fd, 0, SEEK_END), from = size > (off_t)sizeof tail - 1 ? size - (off_t)sizeof tail + 1 : 0;
    const ssize_t n = pread(cell->log_fd, tail, sizeof tail - 1, from);
    tail[n < 0 ? 0 : n] = '\0';
    const char *last = "";
    for (char *rest = tail, *line; (line = strsep(&rest, "\n")) != NULL;)
        if (line[0] != '\0') last = line;
    const char *prefixes[] = {"kvlab: error: ", "kvlab: skipped: "};
    for (size_t i = 0; i < 2; i++)
        if (strncmp(last, prefixes[i], strlen(prefixes[i])) == 0) last += strlen(prefixes[i]);
    snprintf(cell->error, sizeof cell->error, "%.*s", (int)sizeof cell->error - 1, last);
}

/* The process has ended: what does it leave? */
static kvl_status finish(const struct kvl_sweep *sweep, struct kvl_sweep_cell *cell, int result)
{
    kvl_status status = KVL_OK;
    char path[PATH_BYTES];
    bool has = false;
    const int code = WIFEXITED(result) ? WEXITSTATUS(result) : -1;
    cell->seconds = (double)kvl_now_ns() * 1e-9 - cell->seconds;
    KVL_TRY(has_run_file(sweep, cell, &has));
    cell->state = code == 0 && has ? KVL_CELL_DONE : code == KVL_EXIT_SKIP ? KVL_CELL_SKIPPED : KVL_CELL_FAILED;
    if (cell->state == KVL_CELL_DONE) {
        KVL_TRY(kvl_sweep_path(sweep, cell, ".log", path, sizeof path));
        unlink(path);
        goto done;
    }
    if (WIFSIGNALED(result)) dprintf(cell->log_fd, "killed by signal %d (%s)\n", WTERMSIG(result), strsignal(WTERMSIG(result)));
    if (code == 0) dprintf(cell->log_fd, "ended well and left no run file\n");
    read_error(cell);
done:
    close(cell->log_fd);
    return status;
}

/* ---- all cells ---- */

struct runner {
    struct kvl_sweep *sweep;
    struct kvl_sweep_cell *running[KVL_SWEEP_JOBS];
    unsigned jobs, n_running;
    sigset_t child, before; /* SIGCHLD is blocked while cells run, and waited for */
};

static bool device_is_free(const struct runner *r, const struct kvl_sweep_cell *cell)
{
    for (unsigned i = 0; i < r->n_running; i++) {
        const char *a = cell->device ? cell->device : "", *b = r->running[i]->device ? r->running[i]->device : "";
        if (strcmp(a, b) == 0) return false;
    }
    return true;
}

/* On a full disk each cell would compute and then fail. */
static kvl_status check_room(const struct kvl_sweep *sweep)
{
    struct statvfs fs;
    if (statvfs(sweep->out, &fs) != 0) return KVL_OK; /* the cell will say */
    const uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (free_bytes >= LEAST_FREE_BYTES) return KVL_OK;
    return kvl_fail(KVL_E_IO, "%s: %llu MiB are free there, a run file may take %d; make room, and the same command goes on", sweep->out,
                    (unsigned long long)(free_bytes >> 20), LEAST_FREE_BYTES >> 20);
}

static kvl_status start_some(struct runner *r)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < r->sweep->n && r->n_running < r->jobs; i++) {
        struct kvl_sweep_cell *cell = &r->sweep->cell[i];
        bool started = false;
        if (cell->state != KVL_CELL_WAITS || !device_is_free(r, cell)) continue;
        KVL_TRY(check_room(r->sweep));
        KVL_TRY(start(r->sweep, cell, &r->before, &started));
        if (started) r->running[r->n_running++] = cell;
    }
done:
    return status;
}

static kvl_status reap(struct runner *r)
{
    kvl_status status = KVL_OK;
    for (unsigned i = 0; i < r->n_running;) {
        struct kvl_sweep_cell *cell = r->running[i];
        int result;
        if (waitpid(cell->pid, &result, WNOHANG) != cell->pid) {
            i++;
            continue;
        }
        r->running[i] = r->running[--r->n_running];
        KVL_TRY(finish(r->sweep, cell, result));
        if (r->sweep->report) r->sweep->report(r->sweep->context, r->sweep, cell);
    }
done:
    return status;
}

static void wait_for_child(const struct runner *r)
{
    const struct timespec period = {.tv_nsec = 200000000}; /* also to see Ctrl-C, and the ends of cells that run elsewhere */
    sigtimedwait(&r->child, NULL, &period);
}

/* Tells the running cells to end and waits until they did. */
static void stop_all(struct runner *r)
{
    for (unsigned i = 0; i < r->n_running; i++) kill(r->running[i]->pid, SIGTERM);
    r->sweep->report = NULL;
    while (r->n_running > 0) {
        wait_for_child(r);
        reap(r);
    }
}

static kvl_status run_all(struct runner *r)
{
    kvl_status status = KVL_OK;
    for (;;) {
        KVL_TRY(start_some(r));
        if (r->n_running == 0 && kvl_sweep_count(r->sweep, KVL_CELL_WAITS) == 0) return KVL_OK;
        wait_for_child(r);
        KVL_TRY(reap(r));
        if (kvl_interrupted())
            return kvl_fail(KVL_E_INTERRUPTED, "interrupted: %zu of %zu cells are done; the same command goes on",
                            kvl_sweep_count(r->sweep, KVL_CELL_DONE) + kvl_sweep_count(r->sweep, KVL_CELL_DONE_BEFORE), r->sweep->n);
    }
done:
    return status;
}

kvl_status kvl_sweep_run(struct kvl_sweep *sweep, unsigned jobs)
{
    struct runner r = {.sweep = sweep, .jobs = jobs < KVL_SWEEP_JOBS ? jobs : KVL_SWEEP_JOBS};
    kvl_status status = kvl_dir_make(sweep->out);
    if (status != KVL_OK) return status;
    sigemptyset(&r.child);
    sigaddset(&r.child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &r.child, &r.before);
    status = run_all(&r);
    stop_all(&r);
    sigprocmask(SIG_SETMASK, &r.before, NULL);
    return status;
}

size_t kvl_sweep_count(const struct kvl_sweep *sweep, enum kvl_cell_state state)
{
    size_t n = 0;
    for (size_t i = 0; i < sweep->n; i++) n += sweep->cell[i].state == state;
    return n;
}

void kvl_sweep_cell_free(struct kvl_sweep_cell *cell)
{
    for (char **word = cell->argv; word && *word; word++) kvl_free(word);
    kvl_free(&cell->argv);
    kvl_free(&cell->label);
}

void kvl_sweep_free(struct kvl_sweep *sweep)
{
    for (size_t i = 0; i < sweep->n; i++) kvl_sweep_cell_free(&sweep->cell[i]);
    kvl_free(&sweep->cell);
    sweep->n = 0;
}
