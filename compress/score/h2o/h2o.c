/* h2o: heavy hitters, the sum of all attention a token got, and the newest tokens (Zhang et al. 2023). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_h2o_card_md[];

struct h2o {
    double recent;
    int32_t gqa;
};

static void h2o_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_COLUMN_SUMS; }

static int h2o_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct h2o *o = priv;
    const uint32_t n = in->n_token, recent = kvl_score_min((uint32_t)(o->recent * in->target), n);
    double *sum = calloc(n, sizeof *sum);
    if (sum == NULL) return -1;
    for (uint32_t h = 0; h < in->n_head; h++) {
        for (uint32_t t = 0; t < n; t++) sum[t] = in->column_sum[(size_t)h * n + t];
        kvl_score_add_head(in, o->gqa, h, sum, n, score);
    }
    kvl_score_fill(in, score, n - recent, n, FLT_MAX);
    free(sum);
    return 0;
}

/* Of the heads' scores mean and sum say the same; the largest would want a number a query head. */
static int h2o_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    const struct h2o *o = priv;
    if (o->gqa == KVL_GROUP_MAX) return -1;
    out->source = KVL_RUN_SUM;
    out->newest = (uint32_t)(o->recent * target);
    return 0;
}

static const struct kvl_option options[] = {
    {"recent", "share of the budget for the newest tokens", KVL_OPTION_FLOAT, offsetof(struct h2o, recent), 0.5, 0, 1, NULL},
    KVL_GROUP_OPTION(struct h2o, gqa),
};

const struct kvl_score kvl_score_h2o = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "h2o", "sum of the attention a token got, and the newest tokens", "arXiv:2306.14048", options,
                           struct h2o, kvl_text_compress_score_h2o_card_md),
    .needs = h2o_needs,
    .ref = h2o_ref,
    .running = h2o_running,
};
