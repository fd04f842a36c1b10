/* cur: leverage of keys and values, approximated by their norms (CurDKV, Sengupta et al. 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_cur_card_md[];

enum leverage { KV_PRODUCT, KV_AVG, KEY, VALUE };

struct cur {
    int32_t sink, window, leverage;
};

static void cur_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_K | KVL_NEED_V; }

/* Squared norms, each divided by the sum of its window of w tokens (0: not divided). */
static void local_norms(const struct kvl_score_input *in, const float *rows, uint32_t h, uint32_t w, double *out)
{
    const uint32_t n = in->n_token;
    for (uint32_t t = 0; t < n; t++) {
        const float *x = kvl_score_row(in, rows, h, t);
        out[t] = kvl_score_dot(x, x, in->head_dim);
    }
    for (uint32_t from = 0; w != 0 && from < n; from += w) {
        const uint32_t to = kvl_score_min(n, from + w);
        double sum = 0.0;
        for (uint32_t t = from; t < to; t++) sum += out[t];
        for (uint32_t t = from; t < to && sum > 0.0; t++) out[t] /= sum;
    }
}

static double combine(int how, double k, double v)
{
    return how == KV_PRODUCT ? k * v : how == KV_AVG ? (k + v) / 2.0 : how == KEY ? k : v;
}

static int cur_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct cur *o = priv;
    const uint32_t n = in->n_token;
    double *k = calloc(2 * (size_t)n, sizeof *k), *v = k + n;
    if (k == NULL) return -1;
    for (uint32_t h = 0; h < in->n_kv_head; h++) {
        double sum = 0.0;
        local_norms(in, in->k, h, (uint32_t)o->window, k);
        local_norms(in, in->v, h, (uint32_t)o->window, v);
        for (uint32_t t = 0; t < n; t++) sum += k[t] = combine(o->leverage, k[t], v[t]);
        for (uint32_t t = 0; t < n; t++) score[(size_t)h * n + t] = (float)(sum > 0.0 ? k[t] / sum : 0.0);
    }
    kvl_score_fill(in, score, 0, kvl_score_min((uint32_t)o->sink, n), 1.0f);
    free(k);
    return 0;
}

static const struct kvl_option options[] = {
    {"sink", "first tokens, kept", KVL_OPTION_INT, offsetof(struct cur, sink), 4, 0, INT32_MAX, NULL},
    {"window", "tokens that norms are compared with; 0: all", KVL_OPTION_INT, offsetof(struct cur, window), 16, 0, INT32_MAX, NULL},
    {"leverage", "of keys, of values or of both", KVL_OPTION_CHOICE, offsetof(struct cur, leverage), KV_PRODUCT, 0, 0, "kv_product|kv_avg|key|value"},
};

const struct kvl_score kvl_score_cur = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "cur", "norms of key and value among their neighbours", "arXiv:2509.15038", options, struct cur,
                           kvl_text_compress_score_cur_card_md),
    .needs = cur_needs,
    .ref = cur_ref,
};
