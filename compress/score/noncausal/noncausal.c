/* noncausal: attention inside chunks without a causal mask (Compactor, Chari and Van Durme 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_noncausal_card_md[];

enum pad { PAD_KEEP, PAD_MASK };

struct noncausal {
    int32_t chunk, pad, gqa;
};

static void noncausal_needs(const void *priv, struct kvl_score_needs *out)
{
    out->what = KVL_NEED_K | KVL_NEED_V | KVL_NEED_QUERIES;
    out->queries = UINT32_MAX;
}

/* Sums over the queries of the chunk at `from` of the probability of each key, into sum [chunk]. Rows behind the last token are zeros that
 * take part (keep) or do not (mask). */
static void add_chunk(const struct noncausal *o, const struct kvl_score_input *in, uint32_t h, uint32_t from, double *p, double *sum)
{
    const uint32_t chunk = (uint32_t)o->chunk, real = kvl_score_min(chunk, in->n_token - from), rows = o->pad == PAD_KEEP ? chunk : real;
    const uint32_t d = in->head_dim, kv_head = h / (in->n_head / in->n_kv_head);
    memset(sum, 0, chunk * sizeof *sum);
    for (uint32_t i = 0; i < rows; i++) {
        const float *q = in->q + ((size_t)h * in->n_query + from + i) * d;
        for (uint32_t t = 0; t < rows; t++) p[t] = i < real && t < real ? kvl_score_dot(q, kvl_score_row(in, in->k, kv_head, from + t), d) : 0.0;
        kvl_score_softmax(p, rows);
        for (uint32_t t = 0; t < real; t++) sum[t] += p[t];
    }
}

static void weigh_and_pool(const struct kvl_score_input *in, double *weighed, float *score)
{
    const uint32_t n = in->n_token;
    for (uint32_t h = 0; h < in->n_kv_head; h++) {
        float *row = score + (size_t)h * n;
        for (uint32_t t = 0; t < n; t++) weighed[t] = row[t] * kvl_score_norm(kvl_score_row(in, in->v, h, t), in->head_dim);
        for (uint32_t t = 0; t < n; t++)
            row[t] = (float)(((t > 0 ? weighed[t - 1] : 0.0) + weighed[t] + (t + 1 < n ? weighed[t + 1] : 0.0)) / 3.0);
    }
}

static int noncausal_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct noncausal *o = priv;
    const uint32_t n = in->n_token, chunk = (uint32_t)o->chunk;
    double *room = calloc((size_t)n + 2 * (size_t)chunk, sizeof *room), *p = room, *sum = p + chunk; /* sums may run over the last token */
    if (room == NULL) return -1;
    double *all = calloc((size_t)n + chunk, sizeof *all);
    for (uint32_t h = 0; all != NULL && h < in->n_head; h++) {
        for (uint32_t from = 0; from < n; from += chunk) {
            add_chunk(o, in, h, from, p, sum);
            memcpy(all + from, sum, chunk * sizeof *sum);
        }
        kvl_score_add_head(in, o->gqa, h, all, n, score);
    }
    if (all != NULL) weigh_and_pool(in, all, score);
    if (all != NULL) kvl_score_z_norm(in, score);
    const int failed = all == NULL;
    free(room);
    free(all);
    return failed ? -1 : 0;
}

static const struct kvl_option options[] = {
    {"chunk", "tokens that attend to each other", KVL_OPTION_INT, offsetof(struct noncausal, chunk), 256, 1, 1 << 20, NULL},
    {"pad", "rows behind the last token: zeros that take part, or do not", KVL_OPTION_CHOICE, offsetof(struct noncausal, pad), PAD_KEEP, 0, 0,
     "keep|mask"},
    KVL_GROUP_OPTION(struct noncausal, gqa),
};

const struct kvl_score kvl_score_noncausal = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "noncausal", "attention inside chunks without a causal mask, times the norm of the value",
                           "arXiv:2507.08143", options, struct noncausal, kvl_text_compress_score_noncausal_card_md),
    .needs = noncausal_needs,
    .ref = noncausal_ref,
};
