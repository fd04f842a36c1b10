#include "plan.h"
#include "mem.h"
#include "rotation.h"
#include "select.h"
#include <string.h>

const char *const kvl_protocol_name[KVL_PROTOCOLS] = {"p1", "p2", "p3", "p4"};

enum { GONE_ROOM = 1024, PAGE_TOKENS = 64, WINDOW_UBATCH = 64, TILE_ROWS = 16 /* most rows in attend.tune */ };

uint32_t kvl_own_window(const struct kvl_cache_dims *dims, uint32_t l)
{
    return dims->full_every != 0 && (l + 1) % dims->full_every == 0 ? 0 : dims->window;
}

uint32_t kvl_kv_source(const struct kvl_cache_dims *dims, uint32_t l) { return dims->kv_source != NULL ? dims->kv_source[l] : l; }

bool kvl_kv_read_on(const struct kvl_cache_dims *dims, uint32_t l)
{
    return l + 1 < dims->n_layer && kvl_kv_source(dims, l + 1) != l + 1;
}

struct kvl_cache_limits kvl_cache_limits_of(const struct kvl_device *device)
{
    const struct kvl_caps *caps = kvl_device_caps(device);
    return (struct kvl_cache_limits){caps->max_alloc_bytes, caps->compute_units, kvl_device_tuning(device)};
}

static uint64_t round_up(uint64_t x, uint64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

uint32_t kvl_attend_groups(const struct kvl_cache_plan *plan) { return plan->shape.splits * plan->limits.compute_units; }

int kvl_sides(const struct kvl_cache_dims *dims) { return dims->joint_value_dim != 0 ? 1 : KVL_SIDES; }

bool kvl_layer_projects(const struct kvl_layer_plan *layer)
{
    return (layer->side[KVL_SIDE_K].projection != NULL || layer->side[KVL_SIDE_V].projection != NULL) && !kvl_layer_shares(layer);
}

bool kvl_layer_shares(const struct kvl_layer_plan *layer) { return layer->side[KVL_SIDE_K].record.layers > 1; }

uint32_t kvl_stream_queries(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer) { return plan->dims.n_head / layer->n_stream; }

uint32_t kvl_query_dim(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    const struct kvl_stream_record *record = &layer->side[KVL_SIDE_K].record;
    return record->rebuilt ? plan->dims.head_dim : record->channels;
}

uint32_t kvl_output_dim(const struct kvl_cache_dims *dims) { return dims->joint_value_dim != 0 ? dims->joint_value_dim : dims->head_dim; }

uint32_t kvl_sum_dim(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    const struct kvl_stream_record *record = &layer->side[KVL_SIDE_V].record;
    return kvl_sides(&plan->dims) == 1 || record->rebuilt ? kvl_output_dim(&plan->dims) : record->channels;
}

uint32_t kvl_stage_row(const struct kvl_cache_dims *dims) { return (dims->n_head + (uint32_t)kvl_sides(dims) * dims->n_kv_head) * dims->head_dim; }

uint32_t kvl_records_row(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    uint32_t row = plan->dims.n_head * kvl_query_dim(plan, layer);
    for (int s = 0; s < kvl_sides(&plan->dims); s++) row += layer->n_stream * layer->side[s].record.channels;
    return row;
}

uint32_t kvl_joined_row(const struct kvl_layer_plan *layer)
{
    return layer->n_stream * (layer->side[KVL_SIDE_K].record.channels + layer->side[KVL_SIDE_V].record.channels);
}

uint32_t kvl_prefill_tile(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    const uint32_t rows = kvl_stream_queries(plan, layer);
    return rows >= plan->shape.rows ? 1 : plan->shape.rows / rows;
}

static struct kvl_attend_shape attend_shape(const struct kvl_tuning *tuning, bool exact)
{
    return (struct kvl_attend_shape){
        .block = (uint32_t)kvl_tuned(tuning, "attend", "block", exact),
        .rows = (uint32_t)kvl_tuned(tuning, "attend", "rows", exact),
        .splits = (uint32_t)kvl_tuned(tuning, "attend", "splits", exact),
        .group = (uint32_t)kvl_tuned(tuning, "attend", "group", exact),
    };
}

uint32_t kvl_cache_ubatch(const struct kvl_cache_config *config)
{
    const bool windowed = kvl_spec_windowed(config->spec);
    uint32_t u = config->protocol == KVL_P4_STREAMING ? 1 : config->ubatch;
    if (u > config->n_ctx) u = config->n_ctx;
    return config->protocol == KVL_P1_FAKE_QUANT && windowed && u > WINDOW_UBATCH ? WINDOW_UBATCH : u;
}

uint32_t kvl_sealed_after(const struct kvl_cache_plan *plan, const struct kvl_side_plan *side, uint32_t sealed, uint32_t end)
{
    if (end <= sealed) return sealed;
    if (plan->config.protocol == KVL_P1_FAKE_QUANT) return end;
    const uint32_t open = end - sealed;
    return open > side->tail ? sealed + (open - side->tail) / side->shape.unit * side->shape.unit : sealed;
}

uint32_t kvl_sealed_end(const struct kvl_layer_plan *layer, const struct kvl_side_plan *side, uint32_t end)
{
    if (end < layer->sink + side->tail) return layer->sink;
    return layer->sink + (end - layer->sink - side->tail) / side->shape.unit * side->shape.unit;
}

uint64_t kvl_side_held(const struct kvl_side_plan *side, uint64_t body)
{
    const uint64_t room = (uint64_t)side->slots * side->dims.page_tokens;
    return body < room ? body : room;
}

const float *kvl_side_table(const struct kvl_side_plan *side, uint32_t h)
{
    return side->table == NULL || side->shape.table_floats == 0 ? NULL : side->table + (size_t)h * side->shape.table_floats;
}

kvl_status kvl_side_matrices(const struct kvl_cache_dims *dims, const struct kvl_side_plan *side, uint32_t h, float *down, float *up)
{
    const struct kvl_projection *projection = (const struct kvl_projection *)side->projection->plugin;
    const struct kvl_projection_dims of_rows = {sizeof of_rows, side->dims.role, dims->head_dim, side->record.channels};
    if (projection->matrices(side->projection->priv, &of_rows, side->table + (size_t)h * side->record.table_floats, down, up) == 0) return KVL_OK;
    return kvl_fail(KVL_E_VERIFY, "projection %s: no matrices for stream %u", projection->head.name, h);
}

struct kvl_page_count kvl_pages_read(const struct kvl_layer_plan *layer, uint32_t end)
{
    uint32_t past = end > 0 ? end - 1 : 0; /* the query's own token is read in any case */
    for (int s = 0; s < KVL_SIDES; s++) {
        const uint32_t sealed = kvl_sealed_end(layer, &layer->side[s], end);
        past = sealed < past ? sealed : past;
    }
    const uint32_t size = (uint32_t)layer->pages.size, budget = (uint32_t)layer->pages.tokens;
    const uint32_t whole = past > layer->sink ? (past - layer->sink) / size : 0, rest = end - whole * size, fit = budget > rest ? (budget - rest) / size : 0;
    return (struct kvl_page_count){whole, fit < whole ? fit : whole};
}

uint64_t kvl_page_bound_bytes(const struct kvl_layer_plan *layer) { return 2 * layer->side[KVL_SIDE_K].exact_row_bytes; }

uint32_t kvl_read_lag(const struct kvl_cache_plan *plan, const struct kvl_side_plan *side)
{
    return plan->config.protocol == KVL_P1_FAKE_QUANT ? side->tail : 0;
}

struct kvl_query_reads kvl_query_reads(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, const uint32_t sealed[KVL_SIDES], bool choosing,
                                       uint32_t end)
{
    const struct kvl_page_count pages = choosing ? kvl_pages_read(layer, end) : (struct kvl_page_count){0};
    const uint64_t skipped = (uint64_t)(pages.whole - pages.read) * (uint32_t)layer->pages.size;
    const uint32_t slid = layer->window != 0 && end > layer->window ? end - layer->window : 0, start = slid > layer->sink ? slid : layer->sink;
    const uint32_t sinks = layer->sink < end ? layer->sink : end;
    struct kvl_query_reads reads = {.tokens = sinks + (end > start ? end - start : 0) - skipped, .bytes = pages.whole * kvl_page_bound_bytes(layer)};
    for (int s = 0; s < kvl_sides(&plan->dims); s++) {
        const struct kvl_side_plan *side = &layer->side[s];
        const uint32_t lag = kvl_read_lag(plan, side), past = end > lag ? end - lag : 0, coded_end = past < sealed[s] ? past : sealed[s];
        const uint64_t coded = (coded_end > start ? coded_end - start : 0) - skipped;
        reads.bytes += coded * side->token_bytes + (reads.tokens - coded) * side->exact_row_bytes;
    }
    return reads;
}

bool kvl_keeps_tail(const struct kvl_layer_plan *layer) { return layer->side[KVL_SIDE_K].ring != 0 || layer->side[KVL_SIDE_V].ring != 0; }

bool kvl_keeps_exact(const struct kvl_layer_plan *layer) { return layer->sink != 0 || kvl_keeps_tail(layer); }

uint32_t kvl_exact_rows_held(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, int side, uint32_t sealed, uint32_t position)
{
    if (position <= layer->sink) return position;
    const uint32_t tail = layer->side[side].tail, body = position - layer->sink;
    const uint32_t open = plan->config.protocol != KVL_P1_FAKE_QUANT ? position - sealed : body < tail ? body : tail;
    return layer->sink + open;
}

kvl_status kvl_side_bytes(const struct kvl_side_plan *side, uint64_t tokens, struct kvl_codec_bytes *out)
{
    *out = (struct kvl_codec_bytes){0};
    if (side->codec->bytes(side->priv, &side->dims, tokens, out) != 0)
        return kvl_fail(KVL_E_USAGE, "codec %s: cannot state its bytes", side->codec->head.name);
    return KVL_OK;
}

/* Under P1 every query reads what came before it encoded, so a group must have all its tokens when its first one is read. */
static kvl_status check_fake_quant(const struct kvl_cache_config *config, const struct kvl_layer_plan *layer, const struct kvl_side_plan *side)
{
    const uint32_t u = kvl_cache_ubatch(config), group = side->shape.group;
    if (config->protocol != KVL_P1_FAKE_QUANT || u >= config->n_ctx || (u % group == 0 && layer->sink % group == 0)) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "protocol p1 with codec %s needs a window of one ubatch, or ubatch (%u) and sink (%u) multiples of its %u tokens",
                    side->codec->head.name, u, layer->sink, group);
}

/* Bytes of one more sealed token of one head: a group's share, rounded up. */
static kvl_status token_share(const struct kvl_side_plan *side, uint64_t *bytes, uint64_t *scale)
{
    const uint32_t group = side->shape.group;
    struct kvl_codec_bytes all;
    const kvl_status status = kvl_side_bytes(side, group, &all);
    *bytes = (all.payload + all.scale + group - 1) / group;
    *scale = (all.scale + group - 1) / group;
    return status;
}

/* Page size: the smallest multiple of what the codec asks for that is at least `least`. */
static kvl_status plan_pages(struct kvl_side_plan *side, const struct kvl_instance *instance, uint32_t role, uint32_t least)
{
    const uint32_t channels = side->record.channels;
    side->codec = (const struct kvl_codec *)instance->plugin;
    if (channels % 8 != 0) return kvl_fail(KVL_E_UNSUPPORTED, "head_dim %u: kernels read 8 channels at a time, so it must be a multiple of 8", channels);
    side->priv = instance->priv;
    side->dims = (struct kvl_codec_dims){.struct_size = sizeof side->dims, .role = role, .head_dim = channels};
    for (int pass = 0; pass < 2; pass++) { /* the first asks for the multiple, the second for the size */
        side->shape = (struct kvl_codec_shape){.struct_size = sizeof side->shape};
        if (side->codec->shape(side->priv, &side->dims, &side->shape) != 0)
            return kvl_fail(KVL_E_USAGE, "codec %s does not fit %u channels", side->codec->head.name, channels);
        if (pass == 0) side->dims.page_tokens = (uint32_t)round_up(least, side->shape.page_multiple ? side->shape.page_multiple : 1);
    }
    if (side->shape.stream_bytes != 0)
        return kvl_fail(KVL_E_UNSUPPORTED, "codec %s: stream_bytes is %llu, what belongs to a whole stream must be its table (table_floats)",
                        side->codec->head.name, (unsigned long long)side->shape.stream_bytes);
    side->alignment = side->shape.alignment > 16 ? side->shape.alignment : 16;
    side->page_bytes = round_up(side->shape.block_bytes, side->alignment);
    return KVL_OK;
}

/* Finds the streams of layer l in the spec's table. */
static kvl_status plan_table(const struct kvl_cache_dims *dims, const struct kvl_layer_spec *spec, uint32_t l, int s, uint32_t n_stream,
                             struct kvl_side_plan *side)
{
    const struct kvl_table *table = &spec->table;
    const uint32_t n = side->projection != NULL ? side->record.table_floats : side->shape.table_floats, n_group = dims->n_layer / side->record.layers;
    if (n == 0 || table->values[s] == NULL) return KVL_OK;
    if (table->n_layer != n_group || table->n_stream != n_stream || table->n[s] != n)
        return kvl_fail(KVL_E_USAGE, "table %s is of %u layers (or groups) of %u streams with %u numbers each; %s wants %u, %u and %u here: calibrate with this model",
                        spec->table_path, table->n_layer, table->n_stream, table->n[s],
                        side->projection != NULL ? side->projection->plugin->name : side->codec->head.name, n_group, n_stream, n);
    side->table = table->values[s] + (size_t)(l / side->record.layers) * n_stream * n;
    return KVL_OK;
}

/* Which tokens a query sees: by the spec, or by the model's rule; by both where a layer that slides is not left out of the spec. */
static kvl_status plan_window(const struct kvl_cache_plan *plan, const struct kvl_layer_spec *spec, struct kvl_layer_plan *layer)
{
    const uint32_t own = kvl_own_window(&plan->dims, (uint32_t)(layer - plan->layer)), n_ctx = plan->config.n_ctx;
    layer->slides = own != 0 && !spec->all_layers;
    layer->sink = layer->slides ? 0 : spec->sink < n_ctx ? spec->sink : n_ctx;
    layer->window = layer->slides || (own != 0 && (spec->window == 0 || spec->window > own)) ? own : spec->window;
    if (own == 0 || layer->slides || !plan->evicts) return KVL_OK;
    return kvl_fail(KVL_E_UNSUPPORTED, "all_layers: a prompt that is compressed at its end cannot evict from layers that slide by themselves: "
                                       "leave all_layers out");
}

/* Who shares records with whom: layers that do must all hold the same tokens, and hold them in the same way. */
static kvl_status plan_sharing(const struct kvl_cache_plan *plan, const struct kvl_layer_spec *spec, struct kvl_layer_plan *layer)
{
    const struct kvl_cache_dims *dims = &plan->dims;
    const uint32_t l = (uint32_t)(layer - plan->layer), layers = layer->side[KVL_SIDE_K].record.layers;
    layer->leader = l / layers * layers;
    if (kvl_sides(dims) != 1 && layers != layer->side[KVL_SIDE_V].record.layers)
        return kvl_fail(KVL_E_USAGE, "keys of %u layers and values of %u share records: give both sides the same number of layers", layers,
                        layer->side[KVL_SIDE_V].record.layers);
    if (layers == 1) return KVL_OK;
    if (dims->n_layer % layers != 0)
        return kvl_fail(KVL_E_USAGE, "%u layers are to share records, and the model has %u: use a divisor", layers, dims->n_layer);
    if (spec->n_keep != 0) return kvl_fail(KVL_E_UNSUPPORTED, "keep= chooses tokens in each layer, and here %u layers share records: use layers=1", layers);
    for (uint32_t i = layer->leader; i < layer->leader + layers; i++) {
        if (kvl_spec_layer(plan->config.spec, i) != spec)
            return kvl_fail(KVL_E_USAGE, "layers %u to %u share records: give all of them in one @a-b, or none", layer->leader, layer->leader + layers - 1);
        if (kvl_own_window(dims, i) != 0)
            return kvl_fail(KVL_E_UNSUPPORTED, "layers %u to %u are to share records, and layer %u slides by itself: use layers=1, or @a-b of others",
                            layer->leader, layer->leader + layers - 1, i);
    }
    return KVL_OK;
}

/* What records are made of; both sides take the same heads together. */
static kvl_status plan_records(const struct kvl_cache_plan *plan, const struct kvl_layer_spec *spec, struct kvl_layer_plan *layer)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_dims *dims = &plan->dims;
    const bool joint = kvl_sides(dims) == 1;
    if (joint && kvl_spec_projects(spec))
        return kvl_fail(KVL_E_UNSUPPORTED, "the model stores one latent row for keys and values already: give its codec without a projection");
    for (int s = 0; s < kvl_sides(dims); s++) {
        struct kvl_side_plan *side = &layer->side[s];
        side->projection = spec->projection[s].plugin != NULL ? &spec->projection[s] : NULL;
        KVL_TRY(kvl_spec_stream_record(spec, s, (uint32_t)(layer - plan->layer), dims->head_dim, &side->record));
        side->rot_d = joint ? dims->joint_value_dim : side->record.channels;
        KVL_TRY(kvl_rotation_size(spec->rot, side->rot_d, &side->rot_m));
        side->exact_row_bytes = (uint64_t)(side->record.layers > 1 ? side->record.heads * dims->head_dim : side->record.channels) * (plan->config.exact ? 4 : 2);
    }
    const uint32_t heads = layer->side[KVL_SIDE_K].record.heads;
    if (!joint && heads != layer->side[KVL_SIDE_V].record.heads)
        return kvl_fail(KVL_E_USAGE, "keys of %u heads and values of %u share records: give both sides the same number of heads", heads,
                        layer->side[KVL_SIDE_V].record.heads);
    if (dims->n_kv_head % heads != 0)
        return kvl_fail(KVL_E_USAGE, "%u heads are to share records, and the model has %u kv heads: use a divisor", heads, dims->n_kv_head);
    KVL_TRY(plan_sharing(plan, spec, layer));
    if (heads > 1 && spec->n_keep != 0)
        return kvl_fail(KVL_E_UNSUPPORTED, "keep= chooses tokens for each kv head, and here %u heads share records: use one head", heads);
    if ((joint || kvl_layer_projects(layer)) && (layer->score != NULL || (spec->pos == KVL_POS_COMPACT && spec->window != 0)))
        return kvl_fail(KVL_E_UNSUPPORTED, "when=every:N, when=full and window= with pos=compact need keys as the model made them, and here latents are "
                                           "stored: use when=prefill, or pos=keep");
    layer->n_stream = dims->n_kv_head / heads;
done:
    return status;
}

/* A joint row has one codec. */
static kvl_status check_joint(const struct kvl_cache_plan *plan, const struct kvl_layer_spec *spec)
{
    kvl_status status = KVL_OK;
    struct kvl_text k = {0}, v = {0};
    if (kvl_sides(&plan->dims) == KVL_SIDES) return KVL_OK;
    KVL_TRY(kvl_instance_print(&spec->codec[KVL_SIDE_K], true, &k));
    KVL_TRY(kvl_instance_print(&spec->codec[KVL_SIDE_V], true, &v));
    if (strcmp(k.data, v.data) != 0 || spec->tail[KVL_SIDE_K] != spec->tail[KVL_SIDE_V])
        status = kvl_fail(KVL_E_USAGE, "the model keeps one row of %u channels for keys and values: give kv= and tail=, not one side's", plan->dims.head_dim);
    else if (spec->n_keep != 0)
        status = kvl_fail(KVL_E_UNSUPPORTED, "keep= scores keys and values of heads, and the model keeps one latent row for them: leave keep= and budget= out");
    else if (spec->read == KVL_READ_PAGES)
        status = kvl_fail(KVL_E_UNSUPPORTED, "read=pages bounds scores by keys of heads, and the model keeps one latent row for them: use read=all");
done:
    kvl_text_free(&k);
    kvl_text_free(&v);
    return status;
}

uint32_t kvl_common_tokens(uint32_t a, uint32_t b) { return b == 0 ? a : kvl_common_tokens(b, a % b); }

/* Whether queries of the layer may have to choose pages. */
static bool picks(const struct kvl_cache_plan *plan, const struct kvl_layer_spec *spec, const struct kvl_layer_plan *layer)
{
    const uint32_t l = (uint32_t)(layer - plan->layer);
    return spec->read == KVL_READ_PAGES && !layer->slides && l >= (uint32_t)spec->pages.dense && (uint32_t)spec->pages.tokens < plan->config.n_ctx;
}

/* What is read together: whole pages of both sides. */
static void plan_reading(const struct kvl_cache_plan *plan, struct kvl_layer_plan *layer)
{
    if (layer->pages.tokens == 0) return;
    const uint32_t k = layer->side[KVL_SIDE_K].dims.page_tokens, v = layer->side[KVL_SIDE_V].dims.page_tokens;
    layer->pages.size = (int32_t)(k / kvl_common_tokens(k, v) * v);
    layer->most_pages = (plan->config.n_ctx - layer->sink) / (uint32_t)layer->pages.size;
    if (layer->most_pages == 0) layer->pages.tokens = 0; /* not one: there is nothing to choose */
}

static kvl_status plan_layer(const struct kvl_cache_plan *plan, const struct kvl_layer_spec *spec, struct kvl_layer_plan *layer)
{
    const struct kvl_cache_config *config = &plan->config;
    const uint32_t roles[KVL_SIDES] = {KVL_ROLE_K, KVL_ROLE_V};
    kvl_status status = KVL_OK;
    KVL_TRY(plan_window(plan, spec, layer));
    layer->pos = spec->pos;
    layer->rope = spec->rope;
    layer->korder = spec->korder;
    layer->rot = spec->rot;
    layer->rot_seed = spec->rot_seed;
    if (spec->n_keep != 0 && !layer->slides && spec->when != KVL_WHEN_PREFILL) layer->score = (const struct kvl_score *)spec->keep[0].plugin;
    KVL_TRY(check_joint(plan, spec));
    KVL_TRY(plan_records(plan, spec, layer));
    if (picks(plan, spec, layer)) layer->pages = spec->pages;
    for (int s = 0; s < kvl_sides(&plan->dims); s++) {
        struct kvl_side_plan *side = &layer->side[s];
        uint64_t scale_bytes;
        KVL_TRY(plan_pages(side, &spec->codec[s], roles[s], layer->pages.tokens != 0 ? (uint32_t)layer->pages.size : PAGE_TOKENS));
        KVL_TRY(plan_table(&plan->dims, spec, (uint32_t)(layer - plan->layer), s, layer->n_stream, side));
        const uint32_t least = kvl_layer_shares(layer) && side->shape.tail_min == 0 ? 1 : side->shape.tail_min; /* a query's own token has no record yet */
        side->tail = spec->tail[s] >= 0 ? (uint32_t)spec->tail[s] : least;
        if (side->tail < least)
            return kvl_fail(KVL_E_USAGE, "tail=%u is less than codec %s needs%s: at least %u", side->tail, side->codec->head.name,
                            kvl_layer_shares(layer) ? " behind records that layers share" : "", least);
        if (layer->window != 0 && side->tail > layer->window) side->tail = layer->window; /* older ones are never read */
        const uint32_t kept = side->tail + (config->protocol == KVL_P1_FAKE_QUANT ? 0 : side->shape.unit - 1);
        side->ring = kept < config->n_ctx - layer->sink ? kept : config->n_ctx - layer->sink;
        KVL_TRY(check_fake_quant(config, layer, side));
        KVL_TRY(token_share(side, &side->token_bytes, &scale_bytes));
        if (layer->leader != (uint32_t)(layer - plan->layer)) continue;
        layer->token_bytes += side->token_bytes * layer->n_stream;
        layer->token_scale_bytes += scale_bytes * layer->n_stream;
    }
    plan_reading(plan, layer);
done:
    return status;
}

/* Tokens that a head of layer l keeps of n_token on average. */
static kvl_status layer_target(const struct kvl_cache_plan *plan, uint32_t l, uint32_t n_token, uint32_t *target)
{
    const struct kvl_layer_plan *layer = &plan->layer[l];
    *target = layer->window < n_token ? layer->window : n_token;
    if (layer->slides) return KVL_OK;
    return kvl_layer_target(kvl_spec_layer(plan->config.spec, l), layer->rank, plan->n_budgeted, n_token, plan->dims.n_kv_head,
                            plan->budgeted_token_bytes, target);
}

uint32_t kvl_decode_step(const struct kvl_cache_plan *plan, uint32_t l)
{
    const struct kvl_layer_spec *spec = kvl_spec_layer(plan->config.spec, l);
    const uint32_t step = spec->when == KVL_WHEN_EVERY ? spec->every : 1;
    return step < plan->config.n_ctx ? step : plan->config.n_ctx;
}

/* The largest target of a layer, whatever has been seen. */
static kvl_status most_target(const struct kvl_cache_plan *plan, uint32_t l, uint32_t *most)
{
    *most = 0;
    for (uint32_t n = 1; n <= plan->config.n_ctx; n++) {
        uint32_t target;
        const kvl_status status = layer_target(plan, l, n, &target);
        if (status != KVL_OK) return status;
        if (target > *most) *most = target;
    }
    return KVL_OK;
}

/* Most tokens that a layer has while tokens go as others come: a head's target, what has come since, and what cannot go. Of one head, which may have got what others
 * gave up, and of all of them. */
static kvl_status most_tokens(const struct kvl_cache_plan *plan, uint32_t l, uint32_t *of_head, uint64_t *of_all)
{
    const struct kvl_layer_plan *layer = &plan->layer[l];
    const struct kvl_layer_spec *spec = kvl_spec_layer(plan->config.spec, l);
    const uint32_t n_ctx = plan->config.n_ctx, least = layer->sink + layer->side[KVL_SIDE_K].tail;
    const uint64_t heads = plan->dims.n_kv_head, step = kvl_decode_step(plan, l);
    uint32_t target;
    const kvl_status status = most_target(plan, l, &target);
    const bool splits = kvl_keep_splits(spec);
    const uint64_t share = splits ? heads * target : target, most = (share > least ? share : least) + step;
    *of_head = most < n_ctx ? (uint32_t)most : n_ctx;
    *of_all = splits ? heads * ((uint64_t)target + least + step) : heads * *of_head;
    if (*of_all > heads * *of_head) *of_all = heads * *of_head;
    return status;
}

/* Pages a stream, and places where tokens go while others are decoded. */
static kvl_status size_layer(const struct kvl_cache_plan *plan, uint32_t l, struct kvl_layer_plan *layer)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_config *config = &plan->config;
    uint32_t tokens = config->n_ctx, sliding = layer->window + kvl_cache_ubatch(config) - 1;
    uint64_t all_tokens = 0;
    if (layer->n_stream == 0 || layer->leader != l) return KVL_OK;
    if (layer->score != NULL) KVL_TRY(most_tokens(plan, l, &tokens, &all_tokens));
    for (int s = 0; s < kvl_sides(&plan->dims); s++) {
        struct kvl_side_plan *side = &layer->side[s];
        uint32_t body = tokens - layer->sink;
        if (layer->window != 0 && body > sliding) body = sliding;
        else if (config->protocol != KVL_P1_FAKE_QUANT) body -= side->tail < body ? side->tail : body;
        if (body == 0) body = 1; /* a stream has at least one page, so that kernels have a slab */
        side->slots = (body + side->dims.page_tokens - 1) / side->dims.page_tokens;
        const uint64_t places = round_up(layer->sink + (uint64_t)side->slots * side->dims.page_tokens + side->tail, 16);
        if (layer->score != NULL && places > layer->cells) layer->cells = (uint32_t)places;
        const uint64_t pool = (all_tokens + side->dims.page_tokens - 1) / side->dims.page_tokens + layer->n_stream;
        if (layer->score != NULL && kvl_keep_splits(kvl_spec_layer(config->spec, l)) && pool < (uint64_t)layer->n_stream * side->slots) side->pool = (uint32_t)pool;
    }
    if (layer->score == NULL) goto done;
    const struct kvl_layer_spec *spec = kvl_spec_layer(config->spec, l);
    const uint32_t recent = kvl_keep_recent(spec);
    layer->by_host = kvl_keep_by_host(spec);
    layer->recent = recent < config->n_ctx ? recent : config->n_ctx;
    if (kvl_keep_running(spec, tokens, &layer->running) != KVL_OK)
        status = kvl_fail(KVL_E_USAGE, "score %s does not go on while tokens are decoded", layer->score->head.name);
    if (layer->by_host && layer->running.source == KVL_RUN_KEYS) layer->running.source = 0; /* nothing goes on: the host reads the keys */
done:
    return status;
}

kvl_status kvl_decode_target(const struct kvl_cache_plan *plan, uint32_t l, uint32_t n_token, uint32_t n_prompt, uint32_t *target)
{
    const struct kvl_layer_spec *spec = kvl_spec_layer(plan->config.spec, l);
    const struct kvl_amount *amount = spec->budget.priv;
    const bool is_share = amount->kept >= 0 || amount->removed >= 0;
    *target = UINT32_MAX;
    if (spec->when == KVL_WHEN_EVERY && (n_token - n_prompt) % spec->every != 0) return KVL_OK;
    const uint32_t stream = spec->when == KVL_WHEN_FULL && is_share ? n_prompt : n_token; /* a share of the prompt is a budget that stays */
    return layer_target(plan, l, stream, target);
}

/* Appends n pages of a side; a page never crosses a slab. */
static kvl_status place_pages(struct kvl_cache_plan *plan, const struct kvl_side_plan *side, uint32_t n, uint64_t *address)
{
    for (uint32_t i = 0; i < n; i++, plan->n_pages++) {
        if (side->page_bytes > plan->limits.max_alloc_bytes)
            return kvl_fail(KVL_E_DEVICE_MEM, "a page of %s has %llu bytes, more than the device allocates at once (%llu)",
                            side->codec->head.name, (unsigned long long)side->page_bytes, (unsigned long long)plan->limits.max_alloc_bytes);
        if (plan->n_slabs != 0) plan->slab_bytes[plan->n_slabs - 1] = round_up(plan->slab_bytes[plan->n_slabs - 1], side->alignment);
        if (plan->n_slabs == 0 || plan->slab_bytes[plan->n_slabs - 1] + side->page_bytes > plan->limits.max_alloc_bytes) {
            if (plan->n_slabs == KVL_MAX_SLABS)
                return kvl_fail(KVL_E_DEVICE_MEM, "the cache needs more than %d buffers of %llu bytes; use a shorter context, fewer sequences or a smaller codec",
                                KVL_MAX_SLABS, (unsigned long long)plan->limits.max_alloc_bytes);
            plan->n_slabs++;
        }
        uint64_t *used = &plan->slab_bytes[plan->n_slabs - 1];
        address[i] = (uint64_t)(plan->n_slabs - 1) << 56 | *used;
        *used += side->page_bytes;
    }
    return KVL_OK;
}

/* Of a side that has a pool the slots' pages are those of no stream yet. */
static kvl_status place_side(struct kvl_cache_plan *plan, struct kvl_side_plan *side, uint32_t n_stream, uint64_t *entry)
{
    const uint32_t slots = n_stream * side->slots;
    uint64_t *pool = plan->pool_address + side->pool_at;
    if (side->pool == 0) return place_pages(plan, side, slots, entry);
    const kvl_status status = place_pages(plan, side, side->pool, pool);
    for (uint32_t i = 0; i < slots; i++) entry[i] = pool[i % side->pool];
    return status;
}

static kvl_status place_all(struct kvl_cache_plan *plan)
{
    kvl_status status = KVL_OK;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        struct kvl_layer_plan *layer = &plan->layer[l];
        layer->table_offset = plan->n_entries;
        for (int s = 0; s < kvl_sides(&plan->dims); s++) {
            plan->n_entries += (uint64_t)layer->side[s].slots * layer->n_stream;
            layer->side[s].pool_at = plan->n_pool;
            plan->n_pool += layer->side[s].pool;
        }
        if (plan->evicts) plan->n_entries += layer->n_stream;
        if (layer->cells != 0) plan->n_entries += layer->n_stream;
    }
    KVL_TRY(kvl_alloc(&plan->page_address, plan->n_entries, sizeof *plan->page_address));
    KVL_TRY(kvl_alloc(&plan->pool_address, plan->n_pool, sizeof *plan->pool_address));
    plan->n_slabs = kvl_pages_by_layer(plan); /* a layer's kernels get the layer's own pages */
    if (kvl_pages_by_layer(plan)) goto done;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        struct kvl_layer_plan *layer = &plan->layer[l];
        uint64_t *entry = plan->page_address + layer->table_offset;
        for (int s = 0; s < kvl_sides(&plan->dims); entry += (uint64_t)layer->n_stream * layer->side[s++].slots)
            KVL_TRY(place_side(plan, &layer->side[s], layer->n_stream, entry));
    }
done:
    return status;
}

/* Positions and scores, with pos=compact ranks: cl/evict.cl. */
static void place_index(struct kvl_cache_plan *plan)
{
    uint64_t numbers = 0, scores = 0, gone = 0, recent = 0;
    plan->gone_room = plan->config.n_ctx < GONE_ROOM ? plan->config.n_ctx : GONE_ROOM;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        struct kvl_layer_plan *layer = &plan->layer[l];
        layer->index_offset = numbers;
        numbers += (layer->pos == KVL_POS_COMPACT ? 3ull : 2ull) * layer->n_stream * layer->cells;
        layer->raw_offset = scores;
        scores += (uint64_t)plan->dims.n_head * layer->cells;
        layer->recent_offset = recent;
        recent += (uint64_t)layer->recent * plan->dims.n_head * plan->dims.head_dim;
        layer->gone_offset = gone;
        gone += layer->cells != 0 ? (uint64_t)layer->n_stream * plan->gone_room : 0;
    }
    plan->evicts_decoding = scores != 0;
    plan->one_by_one = plan->one_by_one || scores != 0;
    plan->index_bytes = numbers * sizeof(uint32_t);
    plan->raw_bytes = scores * sizeof(float);
    plan->gone_bytes = gone * sizeof(struct kvl_gone);
    plan->recent_bytes = recent * sizeof(float);
}

/* Bounds of pages, a stream's one behind the other. */
static void place_bounds(struct kvl_cache_plan *plan)
{
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        struct kvl_layer_plan *layer = &plan->layer[l];
        const uint64_t pages = (uint64_t)layer->n_stream * layer->most_pages, picks = 2 * pages * sizeof(uint32_t);
        layer->bounds_offset = plan->bounds_bytes;
        plan->bounds_bytes += pages * kvl_page_bound_bytes(layer);
        if (picks > plan->picks_bytes) plan->picks_bytes = picks; /* layers take turns */
        plan->one_by_one = plan->one_by_one || layer->pages.tokens != 0;
    }
}

/* The side before (layer l, side s) with the same rotation; itself if there is none. */
static struct kvl_side_plan *first_rotated(struct kvl_cache_plan *plan, uint32_t l, int s)
{
    const struct kvl_layer_plan *layer = &plan->layer[l];
    for (uint32_t i = 0; i <= l; i++)
        for (int t = 0; t < (i < l ? kvl_sides(&plan->dims) : s); t++) {
            const struct kvl_layer_plan *other = &plan->layer[i];
            if (other->rot == layer->rot && other->rot_seed == layer->rot_seed && other->side[t].rot_d == layer->side[s].rot_d) return &plan->layer[i].side[t];
        }
    return &plan->layer[l].side[s];
}

/* Rotations, each once, calibration tables and projections. */
static void place_tables(struct kvl_cache_plan *plan)
{
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int s = 0; s < kvl_sides(&plan->dims); s++) {
            const uint64_t streams = plan->layer[l].n_stream;
            struct kvl_side_plan *side = &plan->layer[l].side[s], *same = first_rotated(plan, l, s);
            side->rotation_offset = same != side ? same->rotation_offset : plan->n_table_floats;
            if (same == side) plan->n_table_floats += 2ull * side->rot_m * side->rot_m;
            side->table_offset = plan->n_table_floats;
            plan->n_table_floats += streams * side->shape.table_floats;
            side->projection_offset = plan->n_table_floats;
            if (side->projection != NULL) plan->n_table_floats += streams * 2 * side->record.heads * plan->dims.head_dim * side->record.channels;
        }
}

/* Scratch of attention and of projections; layers take turns. */
static void plan_scratch(struct kvl_cache_plan *plan)
{
    const uint64_t u = kvl_cache_ubatch(&plan->config);
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        const struct kvl_layer_plan *layer = &plan->layer[l];
        if (layer->n_stream == 0) continue;
        const uint32_t group = kvl_stream_queries(plan, layer), sum_dim = kvl_sum_dim(plan, layer); /* splits x rows of a tile: cache.c, split_count */
        const uint64_t rows = (uint64_t)kvl_attend_groups(plan) * (group > TILE_ROWS ? group : TILE_ROWS);
        const uint64_t joined = kvl_layer_shares(layer) ? (uint64_t)plan->config.n_ctx * kvl_joined_row(layer) * sizeof(float) : 0;
        const uint64_t partial = rows * (sum_dim + 2) * sizeof(float), records = u * kvl_records_row(plan, layer) * sizeof(float),
                       sums = u * plan->dims.n_head * sum_dim * sizeof(float);
        if (partial > plan->partial_bytes) plan->partial_bytes = partial;
        if (joined > plan->join_bytes) plan->join_bytes = joined;
        if (!kvl_layer_projects(layer)) continue;
        if (records > plan->record_bytes) plan->record_bytes = records;
        if (sums > plan->sum_bytes) plan->sum_bytes = sums;
    }
    plan->status_bytes = 16 + plan->dims.n_kv_head * sizeof(uint32_t); /* struct kvl_cache_counts; splits that have arrived */
    plan->scratch_bytes = plan->partial_bytes + plan->status_bytes + plan->raw_bytes + plan->gone_bytes + plan->picks_bytes + plan->record_bytes + plan->sum_bytes +
                          plan->join_bytes;
}

static void sum_bytes(struct kvl_cache_plan *plan)
{
    for (uint32_t i = 0; i < plan->n_slabs; i++) plan->resident_bytes += plan->slab_bytes[i];
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        struct kvl_layer_plan *layer = &plan->layer[l];
        layer->exact_offset = plan->exact_bytes;
        for (int s = 0; s < kvl_sides(&plan->dims); s++)
            plan->exact_bytes += (uint64_t)layer->n_stream * (layer->sink + layer->side[s].ring) * layer->side[s].exact_row_bytes;
    }
    plan->table_bytes = plan->n_entries * sizeof(uint64_t);
    plan->resident_bytes += plan->exact_bytes + kvl_plan_index_bytes(plan) + plan->n_table_floats * sizeof(float);
    plan_scratch(plan);
}

uint64_t kvl_plan_index_bytes(const struct kvl_cache_plan *plan) { return plan->table_bytes + plan->index_bytes + plan->bounds_bytes + plan->recent_bytes; }

bool kvl_pages_by_layer(const struct kvl_cache_plan *plan) { return plan->evicts && !plan->evicts_decoding; }

uint32_t kvl_rope_positions(const struct kvl_spec *spec, uint32_t n_layer, uint32_t n_ctx)
{
    uint32_t most = 0;
    for (uint32_t l = 0; l < n_layer; l++) {
        struct kvl_score_needs needs;
        kvl_keep_needs(kvl_spec_layer(spec, l), &needs);
        const uint32_t bound = kvl_repetition_bound(&needs, n_ctx);
        most = bound > most ? bound : most;
    }
    return n_ctx + most;
}

/* An evicting cache, whose prompt takes all positions: at most the pages of each head's target, and as heads may differ, one more a head. */
static kvl_status bound_pages(struct kvl_cache_plan *plan)
{
    const struct kvl_cache_dims *dims = &plan->dims;
    for (uint32_t l = 0; l < dims->n_layer; l++) {
        struct kvl_layer_plan *layer = &plan->layer[l];
        const struct kvl_layer_spec *spec = kvl_spec_layer(plan->config.spec, l);
        const kvl_status status = layer_target(plan, l, plan->config.n_ctx, &layer->kept);
        if (status != KVL_OK) return status;
        for (int s = 0; s < kvl_sides(dims); s++) {
            const struct kvl_side_plan *side = &layer->side[s];
            const uint64_t pages =
                round_up(layer->kept, side->dims.page_tokens) / side->dims.page_tokens + (spec->n_keep != 0 && !layer->slides);
            if (kvl_pages_by_layer(plan)) plan->resident_bytes += layer->n_stream * (pages < side->slots ? pages : side->slots) * side->page_bytes;
        }
    }
    const uint32_t most = kvl_rope_positions(plan->config.spec, dims->n_layer, plan->config.n_ctx);
    const uint64_t pages = (uint64_t)kvl_sides(dims) * dims->n_kv_head * (round_up(most, PAGE_TOKENS) / PAGE_TOKENS);
    plan->prompt_bytes = pages * (PAGE_TOKENS * dims->head_dim * (plan->config.exact ? 4ull : 2ull) + sizeof(uint64_t));
    return KVL_OK;
}

/* A layer that reads another's keys and values is asked for nothing that the other is not. */
static kvl_status check_shared(const struct kvl_cache_plan *plan)
{
    const struct kvl_cache_dims *dims = &plan->dims;
    for (uint32_t l = 0; l < dims->n_layer; l++) {
        const uint32_t source = kvl_kv_source(dims, l);
        if (source == l) continue;
        if (plan->evicts)
            return kvl_fail(KVL_E_UNSUPPORTED, "layer %u reads the keys and values of layer %u, and a prompt that is compressed at its end (keep=, codecs that "
                                               "learn, p3) passes through layers that have their own: use p1, p2 or p4 and nothing that evicts", l, source);
        if (kvl_spec_layer(plan->config.spec, l) != kvl_spec_layer(plan->config.spec, source))
            return kvl_fail(KVL_E_USAGE, "layer %u reads the keys and values of layer %u: give both in one @%u-%u, or neither", l, source, source, l);
        if (kvl_own_window(dims, l) != kvl_own_window(dims, source))
            return kvl_fail(KVL_E_UNSUPPORTED, "layer %u reads the keys and values of layer %u, and of the two one slides by itself", l, source);
    }
    return KVL_OK;
}

/* Of one layer, n_position. */
static uint32_t positions_of(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    const uint32_t n_ctx = plan->config.n_ctx;
    if (layer->pos == KVL_POS_COMPACT && layer->cells != 0) return layer->cells < n_ctx ? layer->cells : n_ctx;
    if (layer->pos != KVL_POS_COMPACT || layer->window == 0) return n_ctx;
    return n_ctx - layer->sink > layer->window ? layer->sink + layer->window : n_ctx;
}

static kvl_status check_exact_rows(const struct kvl_cache_plan *plan)
{
    if (plan->exact_bytes <= plan->limits.max_alloc_bytes) return KVL_OK;
    return kvl_fail(KVL_E_DEVICE_MEM, "sink and tail rows need %llu bytes in one buffer, the device allocates at most %llu at once; keep fewer",
                    (unsigned long long)plan->exact_bytes, (unsigned long long)plan->limits.max_alloc_bytes);
}

/* Whether in some layers records are of several. */
static kvl_status some_share(const struct kvl_cache_plan *plan, bool *shares)
{
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int s = 0; s < kvl_sides(&plan->dims); s++) {
            struct kvl_stream_record record;
            const kvl_status status = kvl_spec_stream_record(kvl_spec_layer(plan->config.spec, l), s, l, plan->dims.head_dim, &record);
            if (status != KVL_OK) return status;
            *shares = *shares || record.layers > 1;
        }
    return KVL_OK;
}

kvl_status kvl_cache_plan_make(const struct kvl_cache_dims *dims, const struct kvl_cache_config *config, const struct kvl_cache_limits *limits,
                               struct kvl_cache_plan *out)
{
    kvl_status status = KVL_OK;
    *out = (struct kvl_cache_plan){
        .dims = *dims, .config = *config, .limits = *limits, .shape = attend_shape(limits->tuning, config->exact)};
    if (dims->n_sequence == 0) out->dims.n_sequence = 1;
    out->limits.tuning = NULL;
    if (config->n_ctx == 0 || config->ubatch == 0) return kvl_fail(KVL_E_USAGE, "context and ubatch must be at least 1");
    const char *learner = kvl_spec_learner(config->spec);
    bool shares = false;
    KVL_TRY(some_share(out, &shares));
    out->one_by_one = shares;
    out->evicts = shares || config->protocol == KVL_P3_PREFILL_EXACT || kvl_spec_evicts(config->spec) || kvl_spec_picks(config->spec) || learner != NULL;
    if (shares && config->protocol == KVL_P1_FAKE_QUANT)
        return kvl_fail(KVL_E_USAGE, "records that layers share are there when a token has passed all of them, and p1 reads a token's own: use --protocol "
                                     "compress-then-score");
    if (shares && kvl_spec_windowed(config->spec))
        return kvl_fail(KVL_E_UNSUPPORTED, "window= slides from the first token on, and records that layers share begin with a prompt: use layers=1");
    if (shares && dims->kv_source != NULL)
        return kvl_fail(KVL_E_UNSUPPORTED, "the model has layers that read the keys and values of others, which cannot share records besides: use layers=1");
    if (kvl_spec_picks(config->spec) && config->protocol == KVL_P1_FAKE_QUANT)
        return kvl_fail(KVL_E_USAGE, "read=pages chooses for each token behind a prompt, and p1 has no prompt: use --protocol compress-then-score");
    if (out->evicts && config->protocol == KVL_P1_FAKE_QUANT)
        return kvl_fail(KVL_E_USAGE, "%s %s at the end of a prompt, and p1 has none: use --protocol compress-then-score, or p4",
                        learner != NULL ? learner : "keep=", learner != NULL ? "learns" : "evicts");
    if (out->evicts && kvl_spec_windowed(config->spec))
        return kvl_fail(KVL_E_UNSUPPORTED, "window= slides from the first token on, and here the whole prompt attends before it is compressed: "
                                           "use keep=streaming with a budget, or another protocol");
    KVL_TRY(kvl_spec_check_layers(config->spec, dims->n_layer));
    KVL_TRY(check_shared(out));
    KVL_TRY(kvl_alloc(&out->layer, dims->n_layer, sizeof *out->layer));
    for (uint32_t l = 0; l < dims->n_layer; l++) {
        out->layer[l].leader = l;
        if (kvl_kv_source(dims, l) != l) continue;
        KVL_TRY(plan_layer(out, kvl_spec_layer(config->spec, l), &out->layer[l]));
        out->bytes_per_token += out->layer[l].token_bytes / out->dims.n_sequence;
        out->layer[l].rank = out->n_budgeted;
        if (out->layer[l].slides) continue;
        out->n_budgeted++;
        out->budgeted_token_bytes += out->layer[l].token_bytes;
    }
    for (uint32_t l = 0; l < dims->n_layer; l++) KVL_TRY(size_layer(out, l, &out->layer[l]));
    for (uint32_t l = 0; l < dims->n_layer; l++) {
        const uint32_t n = positions_of(out, &out->layer[l]);
        if (n > out->n_position) out->n_position = n;
    }
    place_index(out);
    place_bounds(out);
    KVL_TRY(place_all(out));
    place_tables(out);
    sum_bytes(out);
    if (out->evicts) KVL_TRY(bound_pages(out));
    KVL_TRY(check_exact_rows(out));
done:
    if (status != KVL_OK) kvl_cache_plan_free(out);
    return status;
}

void kvl_cache_plan_free(struct kvl_cache_plan *plan)
{
    kvl_free(&plan->layer);
    kvl_free(&plan->page_address);
    kvl_free(&plan->pool_address);
}
