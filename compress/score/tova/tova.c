/* tova: the attention of the newest query, the same for all heads (Oren et al. 2024). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_tova_card_md[];

static void tova_needs(const void *priv, struct kvl_score_needs *out)
{
    out->what = KVL_NEED_K | KVL_NEED_QUERIES;
    out->queries = 1;
}

static int tova_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const uint32_t n = in->n_token, old = n - in->n_query;
    double *p = calloc(2 * (size_t)n, sizeof *p), *mean = p + n;
    if (p == NULL) return -1;
    for (uint32_t h = 0; h < in->n_head; h++) {
        kvl_score_attention(in, h, 0, p);
        for (uint32_t t = 0; t < old; t++) mean[t] += p[t] / in->n_head;
    }
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = 0; t < old; t++) score[(size_t)h * n + t] = (float)mean[t];
    kvl_score_fill(in, score, old, n, kvl_score_largest(in, score, 0, old) + 1.0f);
    free(p);
    return 0;
}

static int tova_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    out->source = KVL_RUN_NEWEST;
    out->is_shared = 1;
    out->newest = 1;
    return 0;
}

const struct kvl_score kvl_score_tova = {
    .head = {.magic = KVL_PLUGIN_MAGIC, .abi_major = KVL_ABI_MAJOR, .abi_minor = KVL_ABI_MINOR, .struct_size = sizeof(struct kvl_score),
             .kind = KVL_KIND_SCORE, .name = "tova", .summary = "attention of the newest query, mean over all heads",
             .citation = "arXiv:2401.06104", .card = kvl_text_compress_score_tova_card_md},
    .needs = tova_needs,
    .ref = tova_ref,
    .running = tova_running,
};
