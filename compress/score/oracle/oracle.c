/* oracle: the attention that the tokens behind the prompt are going to pay; no method that works can know it. */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_oracle_card_md[];

struct oracle {
    int32_t gqa;
};

static void oracle_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_K | KVL_NEED_FOLLOWING; }

static int oracle_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct oracle *o = priv;
    const uint32_t n = in->n_token;
    const struct kvl_witness *w = in->witness; /* FOLLOWING is one */
    double *room = calloc(2 * (size_t)n + w->n, sizeof *room), *mean = room, *p = room + n;
    if (room == NULL) return -1;
    for (uint32_t h = 0; h < in->n_head; h++) {
        memset(mean, 0, n * sizeof *mean);
        for (uint32_t i = 0; i < w->n; i++) {
            kvl_score_witness(in, w, h, i, 0, n, 0, p);
            for (uint32_t t = 0; t < n; t++) mean[t] += p[t] / w->n;
        }
        kvl_score_add_head(in, o->gqa, h, mean, n, score);
    }
    free(room);
    return 0;
}

static const struct kvl_option options[] = {KVL_GROUP_OPTION(struct oracle, gqa)};

const struct kvl_score kvl_score_oracle = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "oracle", "attention that the tokens to be scored are going to pay: a ceiling, not a method", "none", options,
                           struct oracle, kvl_text_compress_score_oracle_card_md),
    .needs = oracle_needs,
    .ref = oracle_ref,
};
