/* The engine of a sweep: runs cells, each a process of its own that leaves one run file named by the cell's id.
 *
 * Nothing but the folder knows what is done: <id>.h5 is a finished cell; <id>.log, locked (flock) as long as its process lives, a
 * running one; <id>.log that nobody locks, one that failed or died, with what it said. So any number of sweeps, on any machines that
 * share the folder, work on one grid together, and a kill at any moment loses the cells that were running, no more. */
#ifndef KVL_SWEEP_H
#define KVL_SWEEP_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>

enum { KVL_CELL_ID = 16 /* hex digits */, KVL_SWEEP_JOBS = 256 /* cells at once */ };

enum kvl_cell_state {
    KVL_CELL_WAITS,
    KVL_CELL_DONE_BEFORE, /* its run file was there */
    KVL_CELL_RUNS,
    KVL_CELL_DONE,
    KVL_CELL_FAILED,
    KVL_CELL_SKIPPED, /* exit code 77: does not apply here */
    KVL_CELL_STATES
};
extern const char *const kvl_cell_state_name[KVL_CELL_STATES];

struct kvl_sweep_cell {
    char id[KVL_CELL_ID + 1];
    char *label;        /* for people; owned */
    char **argv;        /* of its process, ends with NULL; owned */
    const char *device; /* cells of one device never run at once; NULL = the default one; borrowed */
    enum kvl_cell_state state;
    double seconds;
    char error[512]; /* failed or skipped: what it said last */
    int pid, log_fd; /* while it runs */
};

struct kvl_sweep {
    const char *out; /* folder */
    struct kvl_sweep_cell *cell;
    size_t n;
    /* Called after each cell that this process ran; may be NULL. */
    void (*report)(void *context, const struct kvl_sweep *sweep, const struct kvl_sweep_cell *cell);
    void *context;
};

/* "<out>/<id><suffix>" */
kvl_status kvl_sweep_path(const struct kvl_sweep *sweep, const struct kvl_sweep_cell *cell, const char *suffix, char *path, size_t size);

/* Marks the cells whose run files are there. */
kvl_status kvl_sweep_look(struct kvl_sweep *sweep);
/* Runs all that wait, at most `jobs` at once, until each has an end; cells that another sweep runs are waited for. A failing cell does
 * not stop the others. After Ctrl-C running cells are told to end, and KVL_E_INTERRUPTED is returned. */
kvl_status kvl_sweep_run(struct kvl_sweep *sweep, unsigned jobs);

size_t kvl_sweep_count(const struct kvl_sweep *sweep, enum kvl_cell_state state);
void kvl_sweep_cell_free(struct kvl_sweep_cell *cell);
void kvl_sweep_free(struct kvl_sweep *sweep);

#endif
