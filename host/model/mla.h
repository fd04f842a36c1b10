/* Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): keys and values of all heads are made of one latent row a token, and a part of
 * the key that RoPE turns is shared by all heads.
 *
 *   latent    c = norm(W_DKV x) [kv_rank], p = W_KR x [rope_dim]                    q = W_UQ norm(W_DQ x), or W_Q x: content and position of each head
 *   expanded  key of head h = (p | W_UK_h c), value = W_UV_h c
 *   absorbed  score = (W_UK_h^T q_content) . c + q_position . p, output of head h = W_UV_h (sum of weights x c)
 *
 * Absorbed, the cache holds c and p alone (a joint row of kvl_cache_dims) and nothing is ever expanded. The expanded form is the same attention over
 * full keys and values; it is there to be compared with. */
#ifndef KVL_MLA_H
#define KVL_MLA_H
#include "linear.h"
#include "model.h"
#include "plan.h"

/* A layer's matrices, but the output's. */
struct kvl_mla;
kvl_status kvl_mla_load(const struct kvl_model *model, struct kvl_device *device, int layer, struct kvl_mla **out);
void kvl_mla_free(struct kvl_mla **mla);
/* Bytes that the above takes; 0 of other models. */
uint64_t kvl_mla_bytes(const struct kvl_model *model, int layer);

/* What the cache is of: of any model. */
struct kvl_cache_dims kvl_model_cache_dims(const struct kvl_dims *dims);

/* Multiply-adds of a layer's attention matrices for one token, the output's among them. */
uint64_t kvl_mla_products(const struct kvl_dims *dims);

/* Scratch of u tokens: queries of low rank, latent rows, rows of heads. Zeros where a model has no latents. */
enum { KVL_MLA_QUERY, KVL_MLA_LATENT, KVL_MLA_HEADS, KVL_MLA_SCRATCH };
void kvl_mla_scratch(const struct kvl_dims *dims, uint64_t u, uint64_t bytes[KVL_MLA_SCRATCH]);

struct kvl_mla_run {
    struct kvl_linear_kernels *kernels;
    const struct kvl_dims *dims;
    struct kvl_buffer *const *scratch; /* [KVL_MLA_SCRATCH], zeroed when made */
    bool exact;
};
/* The stage's rows of n tokens from their hidden rows: queries and the joint row, or queries, keys and values. */
kvl_status kvl_mla_project(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_rows hidden, const struct kvl_norm *norm,
                           struct kvl_buffer *stage);
/* What the output matrix is multiplied with, [n_head * value_dim] a token, from attention's rows. */
kvl_status kvl_mla_values(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_buffer *attended, struct kvl_rows *values);

#endif
