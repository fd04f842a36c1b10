/* keydiff: keys unlike the mean direction of all keys (Park et al. 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_keydiff_card_md[], kvl_text_compress_score_keydiff_keydiff_cl[];

static void keydiff_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_K; }

static double length(const float *k, uint32_t d) { return fmax(kvl_score_norm(k, d), 1e-12); }

static int keydiff_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const uint32_t d = in->head_dim;
    float *mean = calloc(d, sizeof *mean);
    if (mean == NULL) return -1;
    for (uint32_t h = 0; h < in->n_kv_head; h++) {
        memset(mean, 0, d * sizeof *mean);
        for (uint32_t t = 0; t < in->n_token; t++) {
            const float *k = kvl_score_row(in, in->k, h, t);
            const double scale = 1.0 / (length(k, d) * in->n_token);
            for (uint32_t c = 0; c < d; c++) mean[c] += (float)(k[c] * scale);
        }
        const double anchor = length(mean, d);
        for (uint32_t t = 0; t < in->n_token; t++) {
            const float *k = kvl_score_row(in, in->k, h, t);
            score[(size_t)h * in->n_token + t] = (float)(-kvl_score_dot(k, mean, d) / (length(k, d) * anchor));
        }
    }
    free(mean);
    return 0;
}

static int keydiff_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    out->source = KVL_RUN_KEYS;
    return 0;
}

const struct kvl_score kvl_score_keydiff = {
    .head = {.magic = KVL_PLUGIN_MAGIC, .abi_major = KVL_ABI_MAJOR, .abi_minor = KVL_ABI_MINOR, .struct_size = sizeof(struct kvl_score),
             .kind = KVL_KIND_SCORE, .name = "keydiff", .summary = "keys that point away from the mean direction",
             .citation = "arXiv:2504.15364", .device_source = kvl_text_compress_score_keydiff_keydiff_cl, .card = kvl_text_compress_score_keydiff_card_md},
    .needs = keydiff_needs,
    .ref = keydiff_ref,
    .running = keydiff_running,
};
