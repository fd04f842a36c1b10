/* Choosing the next token from logits: greedy, or temperature / top-k / top-p / min-p with a seed (counter-based: step i is reproducible). */
#ifndef KVL_SAMPLE_H
#define KVL_SAMPLE_H
#include "status.h"
#include <stddef.h>
#include <stdint.h>

struct kvl_sampler {
    double temperature; /* 0 = greedy */
    int64_t top_k;      /* 0 = off */
    double top_p;       /* 1 = off; Holtzman et al. 2020 */
    double min_p;       /* 0 = off: keep p >= min_p * max p */
    uint64_t seed;
};
/* step: index of the drawn token, the counter of the random number. Ties go to the lower id. */
kvl_status kvl_sample(const struct kvl_sampler *sampler, const float *logits, size_t n_vocab, uint64_t step, int32_t *token);

#endif
