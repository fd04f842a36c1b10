/* Finds settings of tunables (tuning.h) that are faster than the defaults on a device.
 *
 * A candidate is built, its results are compared with the C reference and, unless it reorders sums, bit by bit with those of the
 * defaults, and only then it is timed, by turns with the defaults. The search begins with the defaults and the kernel's `try` lines and
 * then changes one tunable at a time, keeping what is MARGIN faster, and faster in three quarters of the timings. */
#ifndef KVL_TUNE_H
#define KVL_TUNE_H
#include "model.h"
#include "quant.h"
#include "tuning.h"

#define KVL_TUNE_MARGIN 0.05 /* a setting must be this much faster */

/* Sizes to tune for. */
struct kvl_tune_shape {
    const struct kvl_quant_type *type; /* of the weights */
    uint32_t n_embd, n_ff, n_head, n_kv_head, head_dim;
    uint32_t tokens; /* of a prefill product */
    uint32_t depth;  /* tokens in the cache that attention reads */
};
/* The model's shape, or that of SmolLM2-135M in Q4_1 if model is NULL. */
struct kvl_tune_shape kvl_tune_shape_of(const struct kvl_model *model);

enum { KVL_TUNE_PAIRS = 64 };
struct kvl_tune_options {
    uint32_t pairs; /* of timings, at most KVL_TUNE_PAIRS */
    uint32_t limit; /* most candidates */
};

/* What became of a candidate. */
struct kvl_tune_step {
    const struct kvl_tune_kernel *kernel;
    const struct kvl_setting *setting;
    double ratio;         /* its time to that of the defaults (clblast: of gemm.cl), geometric mean over what was timed; 0 = rejected */
    double quartile;      /* the same of the upper quartiles over the pairs, where `ratio` has the medians */
    double metric;        /* in the kernel's unit */
    bool taken;           /* the best so far */
    const char *rejected; /* why it was not timed; "" if it was */
};
typedef void (*kvl_tune_fn)(void *context, const struct kvl_tune_step *step);

struct kvl_tune_result {
    struct kvl_setting setting; /* the defaults if nothing was faster */
    double ratio, metric, default_ratio, default_metric;
    uint32_t n_tried, n_rejected;
};

/* The i-th kernel in the order of tuning (one builds on what was found for those before it); NULL after the last. */
const struct kvl_tune_kernel *kvl_tune_nth(size_t i);

/* Blocks. The device has the best setting afterwards. KVL_E_VERIFY if the defaults themselves are wrong. */
kvl_status kvl_tune_run(struct kvl_device *device, const struct kvl_tune_kernel *kernel, const struct kvl_tune_shape *shape,
                        const struct kvl_tune_options *options, kvl_tune_fn fn, void *context, struct kvl_tune_result *out);

#endif
