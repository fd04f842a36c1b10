/* snapkv: the attention that the newest queries pay (Li et al. 2024). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_snapkv_card_md[];

enum pool { POOL_AVG, POOL_MAX };
enum reduce { REDUCE_MEAN, REDUCE_SUM };

struct snapkv {
    int32_t window, kernel, pool, reduce, gqa;
};

static void snapkv_needs(const void *priv, struct kvl_score_needs *out)
{
    out->what = KVL_NEED_K | KVL_NEED_QUERIES;
    out->queries = (uint32_t)((const struct snapkv *)priv)->window;
}

/* Zero-padded, stride 1; an average always divides by the kernel's width. */
static void pool_tokens(const struct snapkv *o, const double *x, uint32_t n, double *pooled)
{
    const int64_t half = o->kernel / 2;
    for (int64_t t = 0; t < n; t++) {
        double sum = 0.0, top = -DBL_MAX;
        for (int64_t i = t - half; i < t - half + o->kernel; i++) {
            if (i < 0 || i >= n) continue;
            sum += x[i];
            top = fmax(top, x[i]);
        }
        pooled[t] = o->pool == POOL_AVG ? sum / o->kernel : top;
    }
}

static int snapkv_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct snapkv *o = priv;
    const uint32_t n = in->n_token, old = n - in->n_query; /* tokens before the window */
    double *room = calloc(3 * (size_t)n, sizeof *room), *p = room, *sum = room + n, *pooled = room + 2 * n;
    if (room == NULL) return -1;
    for (uint32_t h = 0; h < in->n_head; h++) {
        memset(sum, 0, n * sizeof *sum);
        for (uint32_t i = 0; i < in->n_query; i++) {
            kvl_score_attention(in, h, i, p);
            for (uint32_t t = 0; t < old; t++) sum[t] += o->reduce == REDUCE_MEAN ? p[t] / in->n_query : p[t];
        }
        pool_tokens(o, sum, old, pooled);
        kvl_score_add_head(in, o->gqa, h, pooled, old, score);
    }
    kvl_score_fill(in, score, old, n, kvl_score_largest(in, score, 0, old) + 1.0f);
    free(room);
    return 0;
}

static const struct kvl_option options[] = {
    {"window", "newest tokens: their queries score the others, and they are kept", KVL_OPTION_INT, offsetof(struct snapkv, window), 64, 1,
     INT32_MAX, NULL},
    {"kernel", "tokens that are pooled", KVL_OPTION_INT, offsetof(struct snapkv, kernel), 5, 1, 1023, NULL},
    {"pool", "of neighbouring tokens", KVL_OPTION_CHOICE, offsetof(struct snapkv, pool), POOL_AVG, 0, 0, "avg|max"},
    {"reduce", "over the queries of the window", KVL_OPTION_CHOICE, offsetof(struct snapkv, reduce), REDUCE_MEAN, 0, 0, "mean|sum"},
    KVL_GROUP_OPTION(struct snapkv, gqa),
};

const struct kvl_score kvl_score_snapkv = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "snapkv", "attention of the newest queries, pooled", "arXiv:2404.14469", options, struct snapkv,
                           kvl_text_compress_score_snapkv_card_md),
    .needs = snapkv_needs,
    .ref = snapkv_ref,
};
