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
    uint64_t token_read; /* that the attention of the last token reads: of what each layer holds the rows that its query sees, and the bounds of pages among which it chooses */
    uint64_t peak;     /* the same, with a layer's rows in full precision while the prompt is compressed */
};
kvl_status kvl_footprint_of(const struct kvl_dims *dims, const struct kvl_session_config *config,
                            const struct kvl_cache_limits *limits, struct kvl_footprint *out);


#endif
