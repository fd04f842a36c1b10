#include "plan_report.h"
#include <string.h>

/* ---- the cache of a session, its context full ---- */

static kvl_status add_streams(const struct kvl_cache_plan *plan, uint64_t bytes[KVL_MEM_CLASSES])
{
    kvl_status status = KVL_OK;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            const struct kvl_layer_plan *layer = &plan->layer[l];
            const uint32_t held = plan->evicts ? layer->kept : plan->config.n_ctx;
            const uint32_t sealed = kvl_sealed_after(plan, &layer->side[s], layer->sink, held);
            struct kvl_codec_bytes used;
            KVL_TRY(kvl_side_bytes(&layer->side[s], kvl_side_held(&layer->side[s], sealed - layer->sink), &used));
            used.payload += kvl_exact_rows_held(plan, layer, s, sealed, held) * layer->exact_row_bytes;
            bytes[KVL_MEM_PAYLOAD] += used.payload * plan->dims.n_kv_head;
            bytes[KVL_MEM_SCALE] += used.scale * plan->dims.n_kv_head;
            bytes[KVL_MEM_INDEX] += used.index * plan->dims.n_kv_head;
        }
done:
    return status;
}

kvl_status kvl_footprint_of(const struct kvl_dims *dims, const struct kvl_session_config *config,
                            const struct kvl_cache_limits *limits, struct kvl_footprint *out)
{
    kvl_status status = KVL_OK;
    struct kvl_cache_plan plan = {0};
    uint64_t scratch[KVL_SESSION_SCRATCH], *bytes = out->bytes;
    *out = (struct kvl_footprint){0};
    KVL_TRY(kvl_session_cache_plan(dims, config, limits, &plan));
    KVL_TRY(add_streams(&plan, bytes));
    bytes[KVL_MEM_INDEX] += plan.table_bytes;
    bytes[KVL_MEM_SLACK] = plan.resident_bytes - bytes[KVL_MEM_PAYLOAD] - bytes[KVL_MEM_SCALE] - bytes[KVL_MEM_INDEX];
    bytes[KVL_MEM_SCRATCH] = plan.scratch_bytes;
    kvl_session_scratch(dims, config, limits->tuning, scratch);
    for (int i = 0; i < KVL_SESSION_SCRATCH; i++) bytes[KVL_MEM_SCRATCH] += scratch[i];
    out->bytes_per_token = plan.bytes_per_token;
    out->resident = plan.resident_bytes;
    out->peak = plan.resident_bytes + plan.prompt_bytes;
done:
    kvl_cache_plan_free(&plan);
    return status;
}

/* ---- public models ---- */

#define MODEL(name_, layers, embd, heads, kv_heads, dim, ff, vocab, trained, tied, ffn)                                            \
    {                                                                                                                              \
        .name = name_,                                                                                                             \
        .dims = {.n_layer = layers,                                                                                                \
                 .n_embd = embd,                                                                                                   \
                 .n_head = heads,                                                                                                  \
                 .n_kv_head = kv_heads,                                                                                            \
                 .head_dim = dim,                                                                                                  \
                 .n_ff = ff,                                                                                                       \
                 .n_vocab = vocab,                                                                                                 \
                 .n_ctx_train = trained,                                                                                           \
                 .rope_dim = dim,                                                                                                  \
                 .tied_output = tied},                                                                                             \
        .ffn_matrices = ffn                                                                                                        \
    }

/* From the config.json that each model was published with: num_hidden_layers, hidden_size, num_attention_heads,
 * num_key_value_heads, head_dim (else hidden_size / heads), intermediate_size (OPT: ffn_dim), vocab_size, max_position_embeddings,
 * tie_word_embeddings. */
const struct kvl_public_model kvl_public_models[] = {
    MODEL("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, false, 3),
    MODEL("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096, false, 3),
    MODEL("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096, false, 3),
    MODEL("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, false, 3),
    MODEL("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, false, 3),
    MODEL("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 131072, true, 3),
    MODEL("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, false, 3),
    MODEL("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, 32768, true, 3),
    MODEL("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000, 2048, false, 3),
    MODEL("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, true, 3),
    MODEL("opt-13b", 40, 5120, 40, 40, 128, 20480, 50272, 2048, true, 2),
};
const size_t kvl_n_public_models = sizeof kvl_public_models / sizeof *kvl_public_models;

const struct kvl_public_model *kvl_public_model_find(const char *name)
{
    for (size_t i = 0; i < kvl_n_public_models; i++)
        if (strcmp(kvl_public_models[i].name, name) == 0) return &kvl_public_models[i];
    return NULL;
}

uint64_t kvl_public_weights_bytes(const struct kvl_public_model *model)
{
    const struct kvl_dims *d = &model->dims;
    const uint64_t embd = d->n_embd,
                   heads = 2ull * (d->n_head + d->n_kv_head) * d->head_dim; /* rows of q, k, v and columns of the output */
    const uint64_t layer = embd * (heads + (uint64_t)model->ffn_matrices * d->n_ff);
    return 2 * (d->n_layer * layer + embd * d->n_vocab * (d->tied_output ? 1 : 2));
}
