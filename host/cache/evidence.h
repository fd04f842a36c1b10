/* What scores are computed from, on the host: sums of attention columns and statistics of queries. */
#ifndef KVL_EVIDENCE_H
#define KVL_EVIDENCE_H
#include "kvl_plugin.h"
#include "status.h"

/* column_sum [Hq][T] from in->q, which must hold all queries, and in->k. Causal, scaled by 1 / sqrt(D). */
kvl_status kvl_attention_columns(const struct kvl_score_input *in, float *column_sum);

/* mean [Hq][D] and covariance [Hq][D][D] (divided by their number) of the queries from token `first` on; zeros if there are none.
 * q: [Hq][T][D]. */
kvl_status kvl_query_stats(const float *q, uint32_t n_head, uint32_t n_token, uint32_t head_dim, uint32_t first, float *mean, float *covariance);

#endif
