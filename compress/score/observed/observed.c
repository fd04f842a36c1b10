/* observed: mean attention that a token got from the queries that see it. */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_observed_card_md[];

struct observed {
    int32_t gqa;
};

static void observed_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_COLUMN_SUMS; }

static int observed_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct observed *o = priv;
    const uint32_t n = in->n_token;
    double *mean = calloc(n, sizeof *mean);
    if (mean == NULL) return -1;
    for (uint32_t h = 0; h < in->n_head; h++) {
        for (uint32_t t = 0; t < n; t++) mean[t] = in->column_sum[(size_t)h * n + t] / (double)kvl_score_seen_by(in, h / (in->n_head / in->n_kv_head), t);
        kvl_score_add_head(in, o->gqa, h, mean, n, score);
    }
    free(mean);
    return 0;
}

/* Sums of the query heads of a kv head are one: of its mean and sum ref() makes the same, the largest would want a number a query head. */
static int observed_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    if (((const struct observed *)priv)->gqa == KVL_GROUP_MAX) return -1;
    out->source = KVL_RUN_SUM;
    out->by_ref = 1;
    return 0;
}

static const struct kvl_option options[] = {KVL_GROUP_OPTION(struct observed, gqa)};

const struct kvl_score kvl_score_observed = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "observed", "mean attention from the queries that see a token", "arXiv:2306.14048", options,
                           struct observed, kvl_text_compress_score_observed_card_md),
    .needs = observed_needs,
    .ref = observed_ref,
    .running = observed_running,
};
