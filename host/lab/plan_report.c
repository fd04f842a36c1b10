#include "plan_report.h"
#include "linear.h"
#include "quant.h"
#include <stdio.h>
#include <string.h>

/* ---- the cache of a session, its context full ---- */

static kvl_status add_pages(const struct kvl_cache_plan *plan, uint64_t bytes[KVL_MEM_CLASSES])
{
    kvl_status status = KVL_OK;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            const struct kvl_layer_plan *layer = &plan->layer[l];
            const uint32_t sealed = kvl_sealed_after(plan, &layer->side[s], layer->sink, plan->config.n_ctx);
            struct kvl_codec_bytes used;
            KVL_TRY(kvl_side_bytes(&layer->side[s], kvl_side_held(&layer->side[s], sealed - layer->sink), &used));
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
    KVL_TRY(add_pages(&plan, bytes));
    bytes[KVL_MEM_PAYLOAD] += plan.exact_bytes; /* a full context fills the rows of sinks and tail */
    bytes[KVL_MEM_INDEX] += plan.table_bytes;
    bytes[KVL_MEM_SLACK] = plan.resident_bytes - bytes[KVL_MEM_PAYLOAD] - bytes[KVL_MEM_SCALE] - bytes[KVL_MEM_INDEX];
    bytes[KVL_MEM_SCRATCH] = plan.scratch_bytes;
    kvl_session_scratch(dims, config, scratch);
    for (int i = 0; i < KVL_SESSION_SCRATCH; i++) bytes[KVL_MEM_SCRATCH] += scratch[i];
    out->bytes_per_token = plan.bytes_per_token;
    out->resident = plan.resident_bytes;
done:
    kvl_cache_plan_free(&plan);
    return status;
}

/* ---- weights of a file ---- */

static const struct kvl_gguf_tensor *weight(const struct kvl_model *model, int layer, const char *name)
{
    char full[64];
    if (layer < 0)
        snprintf(full, sizeof full, "%s.weight", name);
    else
        snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    return kvl_gguf_tensor_find(model->gguf, full);
}

static uint64_t matrix_bytes(const struct kvl_gguf_tensor *t, uint64_t rows, bool swiglu)
{
    return kvl_linear_bytes(kvl_quant_type(t->type), rows, t->dim[0], swiglu);
}

static uint64_t whole_bytes(const struct kvl_model *model, int layer, const char *name)
{
    const struct kvl_gguf_tensor *t = weight(model, layer, name);
    return matrix_bytes(t, t->dim[1], false);
}

/* Query, key and value matrices of equal type are packed as one. */
static uint64_t qkv_bytes(const struct kvl_model *model, int layer)
{
    static const char *const names[] = {"attn_q", "attn_k", "attn_v"};
    const struct kvl_gguf_tensor *before = NULL;
    uint64_t total = 0, rows = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct kvl_gguf_tensor *t = weight(model, layer, names[i]);
        if (before != NULL && t->type != before->type) {
            total += matrix_bytes(before, rows, false);
            rows = 0;
        }
        rows += t->dim[1];
        before = t;
    }
    return total + matrix_bytes(before, rows, false);
}

uint64_t kvl_weights_bytes(const struct kvl_model *model)
{
    const struct kvl_dims *dims = &model->dims;
    const uint64_t norm = dims->n_embd * sizeof(float);
    uint64_t total = whole_bytes(model, -1, "token_embd") + norm;
    if (!dims->tied_output) total += whole_bytes(model, -1, "output");
    for (int l = 0; l < (int)dims->n_layer; l++)
        total += 2 * norm + qkv_bytes(model, l) + whole_bytes(model, l, "attn_output") +
                 matrix_bytes(weight(model, l, "ffn_gate"), dims->n_ff, true) + whole_bytes(model, l, "ffn_down");
    return total;
}
