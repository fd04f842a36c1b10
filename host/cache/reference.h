/* The plain C specification of what a cache step returns: the read rule applied to whole arrays, in double precision, with the codecs'
 * ref_encode and ref_decode. The device must equal it; tests and `kvlab check` compare. */
#ifndef KVL_REFERENCE_H
#define KVL_REFERENCE_H
#include "plan.h"
#include "status.h"

/* T tokens appended in ubatches of plan->config.ubatch. q [T][H*G][D], k and v [T][H][D], all after RoPE. out [T][H*G][D].
 * layer: index into the plan. */
kvl_status kvl_reference_attend(const struct kvl_cache_plan *plan, uint32_t layer, uint32_t n_tokens, const float *q, const float *k,
                                const float *v, float *out);

/* Rows as they are after encode and decode: x [T][H][D] -> decoded [T][H][D] (tokens below `sink` are copied). */
kvl_status kvl_reference_decode(const struct kvl_cache_plan *plan, uint32_t layer, enum kvl_side side, uint32_t n_tokens, const float *x,
                                float *decoded);

#endif
