/* What an evaluation needs of logits rows, computed on the device: negative log-likelihood, top-1, divergence.
 * Kernels and their error bounds: cl/logprob.cl. */
#ifndef KVL_LOGPROB_H
#define KVL_LOGPROB_H
#include "device.h"
#include "status.h"

struct kvl_row_score {
    float max, sum; /* largest logit; sum of exp(logit - max) */
    float nll;      /* -log p(target), nats */
    int32_t argmax; /* ties: the lower id */
    uint32_t n_bad; /* logits that are infinite or NaN */
};

struct kvl_logprob_shape {
    uint32_t work_group; /* work-items a row, a power of two */
    uint32_t lanes;      /* floats a vector: 4, 8, 16 */
};

struct kvl_logprob; /* kernels and result buffers for up to max_rows rows */
/* shape: NULL = chosen by the device's type. */
kvl_status kvl_logprob_new(struct kvl_device *device, uint32_t n_vocab, uint32_t max_rows, const struct kvl_logprob_shape *shape,
                           struct kvl_logprob **out);
void kvl_logprob_free(struct kvl_logprob **logprob);

/* Scores the first n rows of logits [..][n_vocab] against n targets. Blocks. A row with a value that is infinite or NaN is
 * KVL_E_VERIFY; `scores` is filled nevertheless. */
kvl_status kvl_logprob_score(struct kvl_logprob *logprob, struct kvl_buffer *logits, const int32_t *targets, uint32_t n,
                             struct kvl_row_score *scores);

/* Both sides' scores and KLD(base || other) a row, in nats; exactly 0 for equal rows. Blocks. Errors as above. */
kvl_status kvl_logprob_compare(struct kvl_logprob *logprob, struct kvl_buffer *base, struct kvl_buffer *other,
                               const int32_t *targets, uint32_t n, struct kvl_row_score *base_scores,
                               struct kvl_row_score *other_scores, float *kld);

#endif
