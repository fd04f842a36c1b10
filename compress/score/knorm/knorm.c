/* knorm: keys of small norm get much attention (Devoto et al. 2024). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_knorm_card_md[], kvl_text_compress_score_knorm_knorm_cl[];

static void knorm_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_K; }

static int knorm_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = 0; t < in->n_token; t++)
            score[(size_t)h * in->n_token + t] = (float)-kvl_score_norm(kvl_score_row(in, in->k, h, t), in->head_dim);
    return 0;
}

static int knorm_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    out->source = KVL_RUN_STORED;
    return 0;
}

const struct kvl_score kvl_score_knorm = {
    .head = {.magic = KVL_PLUGIN_MAGIC, .abi_major = KVL_ABI_MAJOR, .abi_minor = KVL_ABI_MINOR, .struct_size = sizeof(struct kvl_score),
             .kind = KVL_KIND_SCORE, .name = "knorm", .summary = "minus the norm of the key", .citation = "arXiv:2406.11430",
             .device_source = kvl_text_compress_score_knorm_knorm_cl, .card = kvl_text_compress_score_knorm_card_md},
    .needs = knorm_needs,
    .ref = knorm_ref,
    .running = knorm_running,
};
