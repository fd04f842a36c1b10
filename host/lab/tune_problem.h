/* What is computed and timed when a kernel is tuned: one row of kvl_tune_problems a kernel. */
#ifndef KVL_TUNE_PROBLEM_H
#define KVL_TUNE_PROBLEM_H
#include "tune.h"

struct kvl_tune_problem {
    const char *kernel;
    size_t n_parts; /* timed one by one */
    /* Inputs, and what the reference makes of them. */
    kvl_status (*open)(struct kvl_device *device, const struct kvl_tune_shape *shape, void **self);
    void (*close)(void **self);
    /* What runs with the settings that the device has now; and what it is timed against, made with the defaults. */
    kvl_status (*make)(void *self, void **made);
    kvl_status (*make_yardstick)(void *self, void **made);
    void (*drop)(void **made);
    /* KVL_E_VERIFY if results differ from the reference. first: keep their bits; same_bits: they must be the kept ones. */
    kvl_status (*check)(void *self, void *made, bool first, bool same_bits);
    kvl_status (*run)(void *self, void *made, size_t part); /* enqueues */
    double (*work)(void *self, size_t part);                /* of a run, in billions of the metric's unit times seconds */
};

extern const struct kvl_tune_problem kvl_tune_problems[]; /* in the order in which they should be tuned */
extern const size_t kvl_n_tune_problems;

/* KVL_E_INTERRUPTED once the user wants to stop. */
kvl_status kvl_tune_poll(void);

#endif
