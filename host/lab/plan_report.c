#include "plan_report.h"
#include <string.h>

/* ---- the cache of a session, its context full ---- */

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

/* What attention of the last token reads: of each layer what its query sees, which for a window is less than what is held for a whole ubatch, and
 * for layers that share is read by each. */
static uint64_t token_reads(const struct kvl_cache_plan *plan)
{
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        const struct kvl_layer_plan *layer = &plan->layer[kvl_kv_source(&plan->dims, l)];
        const uint32_t held = plan->evicts ? layer->kept : plan->config.n_ctx;
        uint32_t sealed[KVL_SIDES] = {0};
        for (int s = 0; s < kvl_sides(&plan->dims); s++) sealed[s] = kvl_sealed_after(plan, &layer->side[s], layer->sink, held);
        const bool choosing = layer->pages.tokens != 0 && held > (uint32_t)layer->pages.tokens;
        bytes += layer->n_stream * kvl_query_reads(plan, layer, sealed, choosing, held).bytes;
    }
    return bytes;
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
    out->token_read = token_reads(&plan);
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
