/* What a session would reserve, without loading anything: weights, cache and scratch by class, for a model file or for the
 * dimensions of a public model. */
#ifndef KVL_PLAN_REPORT_H
#define KVL_PLAN_REPORT_H
#include "device.h"
#include "session.h"

struct kvl_footprint {               /* of one session */
    uint64_t bytes[KVL_MEM_CLASSES]; /* when n_ctx tokens were taken in; weights 0 */
    uint64_t bytes_per_token;
    uint64_t resident; /* all classes but weights and scratch; of a cache that evicts a bound, for a prompt that takes all positions */
    uint64_t peak;     /* the same, with a layer's rows in full precision while the prompt is compressed */
};
kvl_status kvl_footprint_of(const struct kvl_dims *dims, const struct kvl_session_config *config,
                            const struct kvl_cache_limits *limits, struct kvl_footprint *out);

/* Dimensions of a model that need not be at hand. */
struct kvl_public_model {
    const char *name;
    struct kvl_dims dims;
    uint32_t ffn_matrices; /* of a layer: 3 with a gate, else 2 */
};
extern const struct kvl_public_model kvl_public_models[];
extern const size_t kvl_n_public_models;
const struct kvl_public_model *kvl_public_model_find(const char *name); /* NULL if there is none */
/* All matrices in binary16. */
uint64_t kvl_public_weights_bytes(const struct kvl_public_model *model);

#endif
