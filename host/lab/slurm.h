/* A sweep as an array job of Slurm (schedmd.com): each task runs some of the waiting cells with `kvlab sweep --only`. What is done is
 * known from the folder alone, so Slurm may requeue, kill and drain as it likes. */
#ifndef KVL_SLURM_H
#define KVL_SLURM_H
#include "sweep.h"
#include <stdint.h>

struct kvl_slurm {
    const char *grid, *name, *program; /* grid: path; program: kvlab, seen under this path by all nodes */
    const char *const *options;        /* for sbatch */
    size_t n_options;
    uint64_t per_task; /* cells of a task; 0 = as many as keep the array within KVL_SLURM_TASKS */
};
enum { KVL_SLURM_TASKS = 1000 }; /* Slurm's own default for MaxArraySize is 1001 */

/* Writes <out>/slurm-<time>.cells and .sh, hands them to sbatch and prints its job number; nothing waits: nothing is submitted. */
kvl_status kvl_slurm_submit(const struct kvl_slurm *slurm, const struct kvl_sweep *sweep);

#endif
