/* What scores are computed from, on the host: sums of attention columns and statistics of queries. And what later queries lose by an eviction. */
#ifndef KVL_EVIDENCE_H
#define KVL_EVIDENCE_H
#include "kvl_plugin.h"
#include "select.h"
#include "status.h"

/* column_sum [Hq][T] from in->q, which must hold all queries, and in->k. Causal, scaled by 1 / sqrt(D). */
kvl_status kvl_attention_columns(const struct kvl_score_input *in, float *column_sum);

/* mean [Hq][D] and covariance [Hq][D][D] (divided by their number) of the queries from token `first` on; zeros if there are none.
 * q: [Hq][T][D]. */
kvl_status kvl_query_stats(const float *q, uint32_t n_head, uint32_t n_token, uint32_t head_dim, uint32_t first, float *mean, float *covariance);

/* Queries of n tokens behind a prompt of kept->n_token = T, q [Hq][n][D], and all keys and values k, v [H][T + n][D] in full precision. Of each kv
 * head, over these queries and its query heads:
 *   mass_lost     mean of the attention that goes to evicted tokens when all are there
 *   output_error  |o' - o| / |o|, root of the sums of squares, o the attention's output with all tokens and o' with the kept ones (before W_O) */
kvl_status kvl_eviction_loss(const struct kvl_selection *kept, uint32_t n_head, uint32_t head_dim, uint32_t n, const float *q, const float *k,
                             const float *v, float *mass_lost, float *output_error);

#endif
