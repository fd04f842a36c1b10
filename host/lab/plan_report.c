#include "plan_report.h"
#include <string.h>

/* ---- the cache of a session, its context full ---- */

/* What a layer reads again of the records that it shares and another holds. */
static kvl_status shared_bytes(const struct kvl_cache_plan *plan, uint32_t l, uint64_t *bytes)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &plan->layer[plan->layer[l].leader];
    for (int s = 0; s < kvl_sides(&plan->dims) && plan->layer[l].leader != l; s++) {
        const struct kvl_side_plan *side = &layer->side[s];
        struct kvl_codec_bytes used;
        KVL_TRY(kvl_side_bytes(side, kvl_sealed_after(plan, side, layer->sink, layer->kept) - layer->sink, &used));
        *bytes += layer->n_stream * (used.payload + used.scale);
    }
done:
    return status;
}

static kvl_status add_streams(const struct kvl_cache_plan *plan, uint64_t bytes[KVL_MEM_CLASSES])
{
    kvl_status status = KVL_OK;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int s = 0; s < kvl_sides(&plan->dims); s++) {
            const struct kvl_layer_plan *layer = &plan->layer[l];
            if (layer->n_stream == 0) continue;
            const uint32_t held = plan->evicts ? layer->kept : plan->config.n_ctx;
            const uint32_t sealed = kvl_sealed_after(plan, &layer->side[s], layer->sink, held);
            struct kvl_codec_bytes used;
            KVL_TRY(kvl_side_bytes(&layer->side[s], kvl_side_held(&layer->side[s], sealed - layer->sink), &used));
            used.payload += kvl_exact_rows_held(plan, layer, s, sealed, held) * layer->side[s].exact_row_bytes;
            bytes[KVL_MEM_PAYLOAD] += used.payload * layer->n_stream;
            bytes[KVL_MEM_SCALE] += used.scale * layer->n_stream;
            bytes[KVL_MEM_INDEX] += used.index * layer->n_stream;
        }
done:
    return status;
}

/* What a layer's last query leaves out of the pages that are there, less the bounds that it reads for it. */
static uint64_t bytes_not_read(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    const uint32_t held = plan->evicts ? layer->kept : plan->config.n_ctx;
    if (layer->pages.tokens == 0 || held <= (uint32_t)layer->pages.tokens) return 0;
    const struct kvl_page_count pages = kvl_pages_read(layer, held);
    return (uint64_t)(pages.whole - pages.read) * (uint32_t)layer->pages.size * layer->token_bytes -
           layer->n_stream * pages.whole * kvl_page_bound_bytes(layer);
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
    out->token_read = bytes[KVL_MEM_PAYLOAD] + bytes[KVL_MEM_SCALE];
    for (uint32_t l = 0; l < plan.dims.n_layer; l++) {
        out->token_read -= bytes_not_read(&plan, &plan.layer[l]);
        KVL_TRY(shared_bytes(&plan, l, &out->token_read));
    }
    bytes[KVL_MEM_INDEX] += kvl_plan_index_bytes(&plan);
    bytes[KVL_MEM_TABLE] = plan.n_table_floats * sizeof(float);
    bytes[KVL_MEM_SLACK] = plan.resident_bytes;
    for (int c = KVL_MEM_PAYLOAD; c <= KVL_MEM_TABLE; c++) bytes[KVL_MEM_SLACK] -= bytes[c];
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
