/* The plain C specification of what a cache step returns: the read rule applied to whole arrays, in double precision, with the codecs'
 * ref_encode and ref_decode. The device must equal it; tests and `kvlab check` compare. */
#ifndef KVL_REFERENCE_H
#define KVL_REFERENCE_H
#include "plan.h"
#include "prompt.h"
#include "status.h"

/* RoPE angles: pairs [n_ctx][rope_dim / 2] of (cos, sin). {0}: no RoPE. */
struct kvl_rope {
    const float *rotary;
    uint32_t rope_dim;
};

/* T tokens appended in ubatches of plan->config.ubatch, or one by one. q [T][H*G][D], k and v [T][H][D], all before RoPE; of a joint row v is not read; of a layer
 * that shares records k and v are those of all layers of its group, [T][layers][H][D]. out
 * [T][H*G][kvl_output_dim]. Records are made into rows again one by one, whatever the device does. layer: index into the plan. */
kvl_status kvl_reference_attend(const struct kvl_cache_plan *plan, uint32_t layer, uint32_t n_tokens, const float *q, const float *k,
                                const float *v, struct kvl_rope rope, float *out);

/* The pages that the queries of each token read in a layer that chooses them (cl/pages.cl), tokens appended one by one: n_read [T][H], page
 * [T][H][most_pages], ascending. */
kvl_status kvl_reference_pages(const struct kvl_cache_plan *plan, uint32_t layer, uint32_t n_tokens, const float *q, const float *k, struct kvl_rope rope,
                               uint32_t *n_read, uint32_t *page);

/* The records that a side's codec is given: x [T][layers][H][D] before RoPE -> records [T][streams][channels]; layers 1, or those that share them. What happens
 * to a row and in which order, to the bit: cl/record.cl. */
kvl_status kvl_reference_records(const struct kvl_cache_plan *plan, uint32_t layer, enum kvl_side side, uint32_t n_tokens, const float *x,
                                 struct kvl_rope rope, float *records);
/* What n records of stream h stand for: keys after RoPE (those stored before it are turned to position[i], NULL: left as they are), or values. records is used up; rows
 * [n][heads of the record][D]. */
kvl_status kvl_reference_rows(const struct kvl_cache_plan *plan, uint32_t layer, enum kvl_side side, uint32_t h, uint32_t n, const uint32_t *position,
                              struct kvl_rope rope, float *records, float *rows);
/* Turns a row by RoPE, or back. */
void kvl_reference_turn(float *row, struct kvl_rope rope, uint32_t position, bool back);
/* Records as they are after encode and decode: [T][streams][channels], both (tokens below `sink` are copied). */
kvl_status kvl_reference_decode(const struct kvl_cache_plan *plan, uint32_t layer, enum kvl_side side, uint32_t n_tokens, const float *records,
                                float *decoded);

/* What a step takes in besides: of scores that read the model; of numbers that are found when a token is stored, [T][H]. */
struct kvl_reference_scores {
    const struct kvl_prompt_model *model;
    const float *w_o, *stored;
};
/* The same of a layer that evicts while tokens are decoded (cl/evict.cl, rescore.h): T tokens, the first of which is the prompt. Behind the last token head h has n_held[h]
 * tokens, held[h * T ..] ascending; n_gone[h] have gone, gone[h * T ..] in that order. */
kvl_status kvl_reference_evict(const struct kvl_cache_plan *plan, uint32_t layer, uint32_t n_tokens, const float *q, const float *k, const float *v,
                               struct kvl_rope rope, const struct kvl_reference_scores *scores, float *out, uint32_t *n_held, uint32_t *held, uint32_t *n_gone,
                               struct kvl_gone *gone);

#endif
