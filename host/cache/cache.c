/* Invariants: every buffer is one the plan named, or holds the pages of a layer of a cache that evicts; sealed[layer][side] falls only in reset
 * and rewind; pages are written only by kvl_seal and kvl_append, exact rows only by kvl_keep_exact. */
#include "cache.h"
#include "compose.h"
#include "half.h"
#include "mem.h"
#include "rotation.h"
#include "select.h"
#include <assert.h>
#include <math.h>
#include <string.h>

struct layer_kernels {
    struct kvl_kernel *seal, *keep, *decode_rows;
    struct kvl_kernel *rope, *append, *finish_kept, *project; /* the last of layers with a projection, the others of those without */
    struct kvl_kernel *finish_output;                        /* NULL where attention's sums are outputs */
    struct kvl_kernel *join;                                 /* in place of append where layers share records */
    struct kvl_kernel *attend[2], *merge[2]; /* for one token; for a prefill tile */
    struct kvl_kernel *bound_pages, *score_pages, *pick_pages; /* where queries choose pages */
    struct kvl_kernel *evict, *score_new;    /* where tokens go while others are decoded; the second where scores come when tokens are stored */
    struct kvl_kernel *drop;                 /* where the host says which: evict, with numbers that do not go on */
};

/* Pages of a layer's side that its streams take from. */
struct pool {
    uint64_t *free;  /* [side's pool] of which n_free are */
    uint32_t n_free;
    uint32_t *owned; /* [H] */
};

struct kvl_cache {
    struct kvl_device *device;
    struct kvl_cache_plan plan;
    struct kvl_buffer **slab;            /* [n_slabs], or [L] of a cache that evicts: a layer's pages, NULL before it is filled */
    struct kvl_buffer *table, *tables, *exact, *partial, *status, *index, *raw, *gone; /* the last three NULL unless tokens go while decoding */
    struct kvl_buffer *bounds, *picks;   /* NULL if no layer chooses pages */
    struct kvl_buffer *recent;           /* NULL if nothing asks for queries while tokens are decoded */
    struct pool (*pool)[KVL_SIDES];      /* [L]; unused where a side has none */
    struct kvl_buffer *records, *sums;   /* NULL if no layer projects */
    struct kvl_buffer *joined;           /* NULL if no layers share records: those that layer after layer adds to */
    struct layer_kernels *kernels;       /* [L] */
    uint32_t (*sealed)[KVL_SIDES];       /* [L] tokens encoded, sinks included; not used by a cache that evicts: kvl_sealed_end says it */
    uint32_t *lost, *lost_at_prompt;     /* [L][H] tokens evicted, by streams; at the end of the prompt */
    uint64_t peak_bytes;                 /* resident, with the rows of a prompt that was being compressed */
    uint32_t position, n_prompt, prefill_tile;
    struct kvl_cache_reads reads;        /* both summed over the layers */
    struct kvl_cache_counts prompt_counts; /* of prompts' rows */
};

/* Of which the values' rotation or projection is undone. */
static bool finishes_output(const struct kvl_cache *cache, const struct kvl_layer_plan *layer)
{
    const struct kvl_side_plan *value = &layer->side[kvl_sides(&cache->plan.dims) - 1];
    return (value->rot_m != 0 || value->projection != NULL) && !value->record.rebuilt;
}

/* A layer's kernels are built when they are first needed; layers of the same composition share programs. */
static kvl_status need_store(struct kvl_cache *cache, uint32_t l)
{
    kvl_status status = KVL_OK;
    struct layer_kernels *k = &cache->kernels[l];
    if (k->decode_rows != NULL) return KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct kvl_program *store = NULL;
    KVL_TRY(kvl_compose_program(cache->device, &cache->plan, layer, "store.cl", 1, &store));
    KVL_TRY(kvl_kernel_get(store, "kvl_seal", &k->seal));
    KVL_TRY(kvl_kernel_get(store, "kvl_keep_exact", &k->keep));
    if (kvl_layer_projects(layer)) {
        KVL_TRY(kvl_kernel_get(store, "kvl_project", &k->project));
    } else {
        KVL_TRY(kvl_kernel_get(store, "kvl_rope", &k->rope));
        KVL_TRY(kvl_layer_shares(layer) ? kvl_kernel_get(store, "kvl_join", &k->join) : kvl_kernel_get(store, "kvl_append", &k->append));
        if (cache->plan.evicts) KVL_TRY(kvl_kernel_get(store, "kvl_finish_kept", &k->finish_kept));
    }
    if (finishes_output(cache, layer)) KVL_TRY(kvl_kernel_get(store, "kvl_finish_output", &k->finish_output));
    KVL_TRY(kvl_kernel_get(store, "kvl_decode_rows", &k->decode_rows));
done:
    return status;
}

static uint32_t prefill_tile(const struct kvl_cache *cache, uint32_t l) { return kvl_prefill_tile(&cache->plan, &cache->plan.layer[l]); }

/* which: 0 for one token, 1 for a prefill tile. */
static kvl_status need_attend(struct kvl_cache *cache, uint32_t l, int which)
{
    kvl_status status = KVL_OK;
    struct layer_kernels *k = &cache->kernels[l];
    struct kvl_program *program = NULL;
    if (k->merge[which] != NULL) return KVL_OK;
    KVL_TRY(kvl_compose_program(cache->device, &cache->plan, &cache->plan.layer[l], "attend.cl", which == 0 ? 1 : prefill_tile(cache, l), &program));
    KVL_TRY(kvl_kernel_get(program, "kvl_attend", &k->attend[which]));
    KVL_TRY(kvl_kernel_get(program, "kvl_merge", &k->merge[which]));
done:
    return status;
}

/* Whether tokens get their scores when they are stored. */
static bool scores_once(const struct kvl_layer_plan *layer)
{
    return layer->running.source == KVL_RUN_STORED || layer->running.source == KVL_RUN_POSITION;
}

static kvl_status need_evict(struct kvl_cache *cache, uint32_t l)
{
    kvl_status status = KVL_OK;
    struct layer_kernels *k = &cache->kernels[l];
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct kvl_program *program = NULL;
    if (k->evict != NULL) return KVL_OK;
    KVL_TRY(kvl_compose_program(cache->device, &cache->plan, layer, "evict.cl", 1, &program));
    if (scores_once(layer)) KVL_TRY(kvl_kernel_get(program, "kvl_score_new", &k->score_new));
    KVL_TRY(kvl_kernel_get(program, "kvl_evict", &k->evict));
done:
    return status;
}

static kvl_status need_drop(struct kvl_cache *cache, uint32_t l)
{
    kvl_status status = KVL_OK;
    struct layer_kernels *k = &cache->kernels[l];
    struct kvl_layer_plan layer = cache->plan.layer[l];
    struct kvl_program *program = NULL;
    if (k->drop != NULL) return KVL_OK;
    layer.running = (struct kvl_score_running){0};
    KVL_TRY(kvl_compose_program(cache->device, &cache->plan, &layer, "evict.cl", 1, &program));
    KVL_TRY(kvl_kernel_get(program, "kvl_evict", &k->drop));
done:
    return status;
}

static kvl_status need_pages(struct kvl_cache *cache, uint32_t l)
{
    kvl_status status = KVL_OK;
    struct layer_kernels *k = &cache->kernels[l];
    struct kvl_program *program = NULL;
    if (k->pick_pages != NULL) return KVL_OK;
    KVL_TRY(kvl_compose_program(cache->device, &cache->plan, &cache->plan.layer[l], "pages.cl", 1, &program));
    KVL_TRY(kvl_kernel_get(program, "kvl_bound_pages", &k->bound_pages));
    KVL_TRY(kvl_kernel_get(program, "kvl_score_pages", &k->score_pages));
    KVL_TRY(kvl_kernel_get(program, "kvl_pick_pages", &k->pick_pages));
done:
    return status;
}

static kvl_status copy_table(const struct kvl_side_plan *side, uint32_t n_stream, float *floats)
{
    if (side->projection == NULL && (side->shape.table_floats == 0 || (side->table == NULL && KVL_CODEC_HAS(side->codec, learn)))) return KVL_OK;
    if (side->table == NULL)
        return kvl_fail(KVL_E_USAGE, "%s needs a calibration table: make one with kvlab calibrate -m MODEL -f TEXT --for \"SPEC\" -o table.h5, "
                                     "then add table=table.h5 to the spec",
                        side->projection != NULL ? side->projection->plugin->name : side->codec->head.name);
    if (side->projection == NULL) memcpy(floats + side->table_offset, side->table, (size_t)n_stream * side->shape.table_floats * sizeof *floats);
    return KVL_OK;
}

/* A stream's two matrices as kernels read them, of each of the layers that share them (from `layer` on) its rows: up by rows of the record where it is given
 * records, by rows of the head where it is given queries. */
static void copy_matrices(const struct kvl_layer_plan *layer, int s, uint32_t h, size_t rows, const float *down, const float *up, float *floats)
{
    const struct kvl_stream_record *record = &layer->side[s].record;
    const bool of_queries = s == KVL_SIDE_K && !record->rebuilt;
    const size_t rank = record->channels, n = rows * rank;
    for (const struct kvl_layer_plan *end = layer + record->layers; layer < end; layer++, down += n, up += n) {
        float *own = floats + layer->side[s].projection_offset + 2 * n * h;
        memcpy(own, down, n * sizeof *own);
        for (size_t i = 0; i < rows; i++)
            for (size_t r = 0; r < rank; r++) own[n + (of_queries ? i * rank + r : r * rows + i)] = up[i * rank + r];
    }
}

static kvl_status copy_projection(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, int s, float *floats)
{
    kvl_status status = KVL_OK;
    const struct kvl_side_plan *side = &layer->side[s];
    if (side->projection == NULL || layer != &plan->layer[layer->leader]) return KVL_OK;
    const size_t rows = (size_t)side->record.heads * plan->dims.head_dim, all = side->record.layers * rows * side->record.channels;
    float *down = NULL, *up = NULL;
    KVL_TRY(kvl_alloc(&down, all, sizeof *down));
    KVL_TRY(kvl_alloc(&up, all, sizeof *up));
    for (uint32_t h = 0; h < layer->n_stream; h++) {
        KVL_TRY(kvl_side_matrices(&plan->dims, side, h, down, up));
        copy_matrices(layer, s, h, rows, down, up, floats);
    }
done:
    kvl_free(&down);
    kvl_free(&up);
    return status;
}

/* Each rotation's matrices and each stream's calibration to where the plan has them. */
static kvl_status write_tables(struct kvl_cache *cache)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = &cache->plan;
    float *floats = NULL;
    KVL_TRY(kvl_alloc(&floats, plan->n_table_floats, sizeof *floats));
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        const struct kvl_layer_plan *layer = &plan->layer[l];
        for (int s = 0; s < kvl_sides(&plan->dims); s++) {
            const struct kvl_side_plan *side = &layer->side[s];
            if (side->rot_m != 0) KVL_TRY(kvl_rotation_fill(layer->rot, layer->rot_seed, side->rot_d, side->rot_m, floats + side->rotation_offset));
            KVL_TRY(copy_table(side, layer->n_stream, floats));
            KVL_TRY(copy_projection(plan, layer, s, floats));
        }
    }
    KVL_TRY(kvl_buffer_new(cache->device, "tables", -1, KVL_MEM_TABLE, plan->n_table_floats * sizeof *floats, false, &cache->tables));
    KVL_TRY(kvl_buffer_write(cache->tables, 0, plan->n_table_floats * sizeof *floats, floats));
done:
    kvl_free(&floats);
    return status;
}

static uint32_t slab_count(const struct kvl_cache *cache) { return kvl_pages_by_layer(&cache->plan) ? cache->plan.dims.n_layer : cache->plan.n_slabs; }

static kvl_status allocate(struct kvl_cache *cache)
{
    kvl_status status = KVL_OK;
    struct kvl_cache_plan *plan = &cache->plan;
    struct kvl_device *device = cache->device;
    KVL_TRY(kvl_alloc(&cache->slab, slab_count(cache), sizeof *cache->slab));
    for (uint32_t i = 0; i < plan->n_slabs && !kvl_pages_by_layer(plan); i++)
        KVL_TRY(kvl_buffer_new(device, "kv pages", -1, KVL_MEM_SLACK, plan->slab_bytes[i], true, &cache->slab[i]));
    KVL_TRY(kvl_buffer_new(device, "page table", -1, KVL_MEM_INDEX, plan->table_bytes, false, &cache->table));
    KVL_TRY(kvl_buffer_write(cache->table, 0, plan->table_bytes, plan->page_address));
    if (plan->n_table_floats != 0) KVL_TRY(write_tables(cache));
    if (plan->exact_bytes != 0)
        KVL_TRY(kvl_buffer_new(device, "exact rows", -1, KVL_MEM_SLACK, plan->exact_bytes, true, &cache->exact));
    if (plan->index_bytes != 0) {
        KVL_TRY(kvl_buffer_new(device, "token index", -1, KVL_MEM_INDEX, plan->index_bytes, true, &cache->index));
        KVL_TRY(kvl_buffer_new(device, "newest scores", -1, KVL_MEM_SCRATCH, plan->raw_bytes, true, &cache->raw));
        KVL_TRY(kvl_buffer_new(device, "tokens gone", -1, KVL_MEM_SCRATCH, plan->gone_bytes, false, &cache->gone));
    }
    if (plan->recent_bytes != 0) KVL_TRY(kvl_buffer_new(device, "newest queries", -1, KVL_MEM_INDEX, plan->recent_bytes, true, &cache->recent));
    if (plan->bounds_bytes != 0) {
        KVL_TRY(kvl_buffer_new(device, "bounds of pages", -1, KVL_MEM_INDEX, plan->bounds_bytes, false, &cache->bounds));
        KVL_TRY(kvl_buffer_new(device, "pages read", -1, KVL_MEM_SCRATCH, plan->picks_bytes, false, &cache->picks));
    }
    KVL_TRY(kvl_buffer_new(device, "attention partials", -1, KVL_MEM_SCRATCH, plan->partial_bytes, false, &cache->partial));
    KVL_TRY(kvl_buffer_new(device, "status", -1, KVL_MEM_SCRATCH, plan->status_bytes, true, &cache->status));
    if (plan->join_bytes != 0) KVL_TRY(kvl_buffer_new(device, "shared records", -1, KVL_MEM_SCRATCH, plan->join_bytes, false, &cache->joined));
    if (plan->record_bytes == 0) goto done;
    KVL_TRY(kvl_buffer_new(device, "records", -1, KVL_MEM_SCRATCH, plan->record_bytes, false, &cache->records));
    KVL_TRY(kvl_buffer_new(device, "attention sums", -1, KVL_MEM_SCRATCH, plan->sum_bytes, false, &cache->sums));
done:
    return status;
}

static kvl_status make_pools(struct kvl_cache *cache)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = &cache->plan;
    KVL_TRY(kvl_alloc(&cache->pool, plan->dims.n_layer, sizeof *cache->pool));
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            KVL_TRY(kvl_alloc(&cache->pool[l][s].free, plan->layer[l].side[s].pool, sizeof *cache->pool[l][s].free));
            KVL_TRY(kvl_alloc(&cache->pool[l][s].owned, plan->layer[l].n_stream, sizeof *cache->pool[l][s].owned));
        }
done:
    return status;
}

static void free_pools(struct kvl_cache *cache)
{
    for (uint32_t l = 0; cache->pool != NULL && l < cache->plan.dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            kvl_free(&cache->pool[l][s].free);
            kvl_free(&cache->pool[l][s].owned);
        }
    kvl_free(&cache->pool);
}

kvl_status kvl_cache_new(struct kvl_device *device, struct kvl_cache_plan *plan, struct kvl_cache **out)
{
    kvl_status status = KVL_OK;
    struct kvl_cache *cache = NULL;
    KVL_TRY(kvl_alloc(&cache, 1, sizeof *cache));
    cache->device = device;
    cache->plan = *plan;
    *plan = (struct kvl_cache_plan){0};
    KVL_TRY(kvl_alloc(&cache->kernels, cache->plan.dims.n_layer, sizeof *cache->kernels));
    KVL_TRY(kvl_alloc(&cache->sealed, cache->plan.dims.n_layer, sizeof *cache->sealed));
    KVL_TRY(kvl_alloc(&cache->lost, (size_t)cache->plan.dims.n_layer * cache->plan.dims.n_kv_head, sizeof *cache->lost));
    KVL_TRY(kvl_alloc(&cache->lost_at_prompt, (size_t)cache->plan.dims.n_layer * cache->plan.dims.n_kv_head, sizeof *cache->lost_at_prompt));
    KVL_TRY(make_pools(cache));
    KVL_TRY(allocate(cache));
    kvl_cache_reset(cache);
    *out = cache;
    cache = NULL;
done:
    kvl_cache_free(&cache);
    return status;
}

void kvl_cache_free(struct kvl_cache **cache)
{
    struct kvl_cache *c = *cache;
    if (c == NULL) return;
    for (uint32_t i = 0; c->slab != NULL && i < slab_count(c); i++) kvl_buffer_free(&c->slab[i]);
    kvl_free(&c->slab);
    kvl_buffer_free(&c->table);
    kvl_buffer_free(&c->tables);
    kvl_buffer_free(&c->exact);
    kvl_buffer_free(&c->partial);
    kvl_buffer_free(&c->status);
    kvl_buffer_free(&c->records);
    kvl_buffer_free(&c->sums);
    kvl_buffer_free(&c->joined);
    kvl_buffer_free(&c->index);
    kvl_buffer_free(&c->raw);
    kvl_buffer_free(&c->gone);
    kvl_buffer_free(&c->bounds);
    kvl_buffer_free(&c->picks);
    kvl_buffer_free(&c->recent);
    free_pools(c);
    kvl_cache_plan_free(&c->plan);
    kvl_free(&c->kernels);
    kvl_free(&c->sealed);
    kvl_free(&c->lost);
    kvl_free(&c->lost_at_prompt);
    kvl_free(cache);
}

void kvl_cache_reset(struct kvl_cache *cache)
{
    cache->position = 0;
    cache->reads = (struct kvl_cache_reads){0};
    cache->peak_bytes = 0;
    memset(cache->lost, 0, (size_t)cache->plan.dims.n_layer * cache->plan.dims.n_kv_head * sizeof *cache->lost);
    memset(cache->lost_at_prompt, 0, (size_t)cache->plan.dims.n_layer * cache->plan.dims.n_kv_head * sizeof *cache->lost_at_prompt);
    cache->n_prompt = 0;
    for (uint32_t i = 0; kvl_pages_by_layer(&cache->plan) && i < slab_count(cache); i++) kvl_buffer_free(&cache->slab[i]);
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) cache->sealed[l][s] = cache->plan.layer[l].sink;
}

const struct kvl_cache_plan *kvl_cache_plan(const struct kvl_cache *cache) { return &cache->plan; }

uint32_t kvl_cache_position(const struct kvl_cache *cache) { return cache->position; }

/* Tokens of a stream's sequence when `position` tokens have been taken in. */
static uint32_t place_of(const struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t position)
{
    return position - cache->lost[(size_t)l * cache->plan.dims.n_kv_head + h];
}

uint32_t kvl_cache_held(const struct kvl_cache *cache)
{
    uint64_t streams = 0, held = 0;
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++)
        for (uint32_t h = 0; h < cache->plan.layer[l].n_stream; h++, streams++) held += place_of(cache, l, h, cache->position);
    return (uint32_t)(held / streams);
}

/* ---- launches ---- */

enum { VIEW_ARGS = 17, MAX_ARGS = KVL_MAX_SLABS + VIEW_ARGS + 20 };

struct call {
    struct kvl_arg arg[MAX_ARGS];
    size_t n;
};

static void push(struct call *call, struct kvl_arg arg) { call->arg[call->n++] = arg; }

/* The layer whose pages layer l reads. */
static const struct kvl_layer_plan *leader_of(const struct kvl_cache *cache, uint32_t l) { return &cache->plan.layer[cache->plan.layer[l].leader]; }

static void push_slabs(struct call *call, const struct kvl_cache *cache, uint32_t l)
{
    struct kvl_buffer **slab = kvl_pages_by_layer(&cache->plan) ? &cache->slab[cache->plan.layer[l].leader] : cache->slab;
    for (uint32_t i = 0; i < cache->plan.n_slabs; i++) push(call, KVL_BUF(slab[i]));
}

static void push_table(struct call *call, const struct kvl_cache *cache, uint32_t l)
{
    push(call, KVL_BUF(cache->table));
    push(call, KVL_U64(leader_of(cache, l)->table_offset));
}

/* KVL_VIEW_PARAMS of cl/cache_view.cl, of n tokens from `position` on. */
static void push_view_at(struct call *call, const struct kvl_cache *cache, uint32_t l, uint32_t position, uint32_t n, uint32_t n_splits)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const int value = kvl_sides(&cache->plan.dims) - 1; /* the side that values are read of */
    const struct kvl_side_plan *k = &layer->side[KVL_SIDE_K], *v = &layer->side[value], *paged = leader_of(cache, l)->side;
    const uint32_t stride = kvl_layer_projects(layer) ? kvl_records_row(&cache->plan, layer) : kvl_stage_row(&cache->plan.dims);
    const uint32_t view[VIEW_ARGS] = {
        position, n, layer->sink, k->ring, v->ring, layer->window, cache->sealed[l][KVL_SIDE_K], cache->sealed[l][value], kvl_read_lag(&cache->plan, k),
        kvl_read_lag(&cache->plan, v), paged[KVL_SIDE_K].slots, paged[KVL_SIDE_V].slots, n_splits, stride, (uint32_t)k->table_offset, (uint32_t)v->table_offset, 0,
    };
    for (size_t i = 0; i < VIEW_ARGS; i++) push(call, KVL_U32(view[i]));
}

static void push_view(struct call *call, const struct kvl_cache *cache, uint32_t l, uint32_t n, uint32_t n_splits)
{
    push_view_at(call, cache, l, cache->position, n, n_splits);
}

/* KVL_TURN_PARAMS of cl/record.cl. */
static void push_turn(struct call *call, const struct kvl_cache *cache, uint32_t l, struct kvl_buffer *rotary, uint32_t rope_dim)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const struct kvl_side_plan *k = &layer->side[KVL_SIDE_K], *v = &layer->side[kvl_sides(&cache->plan.dims) - 1];
    push(call, KVL_BUF(cache->tables));
    push(call, KVL_U64(k->rotation_offset));
    push(call, KVL_U64(v->rotation_offset));
    push(call, KVL_U64(k->projection_offset));
    push(call, KVL_U64(v->projection_offset));
    push(call, KVL_BUF(rotary));
    push(call, KVL_U32(rope_dim));
}

static kvl_status launch(struct kvl_cache *cache, struct kvl_kernel *kernel, size_t x, size_t y, size_t z, size_t group, struct kvl_work work,
                         const struct call *call)
{
    return kvl_launch(cache->device, kernel, (const size_t[3]){x, y, z}, (const size_t[3]){group, 1, 1}, work, call->arg, call->n);
}

/* Query heads, keys and values: of the stage, or of a layer's streams. */
static uint32_t stage_heads(const struct kvl_cache *cache, const struct kvl_layer_plan *layer)
{
    return cache->plan.dims.n_head + (uint32_t)kvl_sides(&cache->plan.dims) * layer->n_stream * (kvl_layer_shares(layer) ? layer->side[KVL_SIDE_K].record.heads : 1);
}

/* Of the first `heads` of them. */
static kvl_status finish(struct kvl_cache *cache, uint32_t l, uint32_t heads, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                         uint32_t rope_dim)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct call call = {0};
    push(&call, KVL_BUF(stage));
    push_table(&call, cache, l);
    push_turn(&call, cache, l, rotary, rope_dim);
    push(&call, KVL_U32(kvl_keeps_exact(layer)));
    push_view(&call, cache, l, n, 1);
    const struct kvl_work work = {.bytes = 2 * sizeof(float) * n * kvl_stage_row(&cache->plan.dims)};
    return launch(cache, cache->kernels[l].rope, heads, n, 1, 1, work, &call);
}

/* The same of a layer with a projection, whose query rows and records have a buffer of their own. kept: of a prompt's rows. */
static kvl_status project(struct kvl_cache *cache, uint32_t l, uint32_t heads, uint32_t n, bool kept, struct kvl_buffer *stage,
                          struct kvl_buffer *rotary, uint32_t rope_dim)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint64_t stage_row = kvl_stage_row(&cache->plan.dims), record_row = kvl_records_row(&cache->plan, layer);
    struct call call = {0};
    push(&call, KVL_BUF(stage));
    push(&call, KVL_U64(stage_row));
    push(&call, KVL_BUF(cache->records));
    push_table(&call, cache, l);
    push_turn(&call, cache, l, rotary, rope_dim);
    push(&call, KVL_U32(kept));
    push(&call, KVL_U32(kvl_keeps_exact(layer)));
    push_view(&call, cache, l, n, 1);
    const struct kvl_work work = {.bytes = sizeof(float) * n * (stage_row + record_row)};
    return launch(cache, cache->kernels[l].project, heads, n, 1, 1, work, &call);
}

/* Pages that tokens [first, end) of a side touch. */
static uint32_t pages_touched(const struct kvl_layer_plan *layer, int s, uint32_t first, uint32_t end)
{
    const uint32_t page_tokens = layer->side[s].dims.page_tokens;
    return end <= first ? 0 : (end - 1 - layer->sink) / page_tokens - (first - layer->sink) / page_tokens + 1;
}

/* The same at most, for n new tokens wherever a head's sequence stands: with what a unit had left open. */
static uint32_t ragged_pages(const struct kvl_side_plan *side, uint32_t n)
{
    return (n + side->shape.unit - 2) / side->dims.page_tokens + 2;
}

static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* How many of a stream's tokens are encoded. */
static uint32_t sealed_of(const struct kvl_cache *cache, uint32_t l, int s, uint32_t h)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    return cache->plan.evicts ? kvl_sealed_end(layer, &layer->side[s], place_of(cache, l, h, cache->position)) : cache->sealed[l][s];
}

/* Of a cache that evicts: whether every head's next n tokens are sealed at once, and nothing else is. */
static bool appends_whole(const struct kvl_cache *cache, uint32_t l)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    bool whole = true;
    for (int s = 0; s < kvl_sides(&cache->plan.dims); s++) whole = whole && layer->side[s].tail == 0 && layer->side[s].shape.unit == 1;
    for (uint32_t h = 0; h < layer->n_stream; h++) whole = whole && place_of(cache, l, h, cache->position) >= layer->sink;
    return whole;
}

/* Of records that layers share, which the stage then is, first says of which token the first one is. */
static kvl_status seal(struct kvl_cache *cache, uint32_t l, uint32_t n, const uint32_t first[KVL_SIDES], struct kvl_buffer *stage)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    uint32_t pages = 0;
    for (int s = 0; s < kvl_sides(&cache->plan.dims); s++)
        pages = max_u32(pages, cache->plan.evicts ? ragged_pages(&layer->side[s], n) : pages_touched(layer, s, first[s], cache->sealed[l][s]));
    if (pages == 0) return KVL_OK;
    struct call call = {0};
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    push(&call, KVL_BUF(stage));
    push(&call, KVL_BUF(cache->exact));
    push(&call, KVL_U64(layer->exact_offset));
    push(&call, KVL_U32(first[KVL_SIDE_K]));
    push(&call, KVL_U32(first[KVL_SIDE_V]));
    push(&call, KVL_BUF(cache->tables));
    push(&call, KVL_BUF(cache->status));
    push_view(&call, cache, l, n, 1);
    const struct kvl_work work = {.bytes = n * layer->token_bytes};
    return launch(cache, cache->kernels[l].seal, layer->n_stream, pages, (size_t)kvl_sides(&cache->plan.dims), 1, work, &call);
}

/* Tokens of each side, and that of the first record of cache->joined. */
struct joining {
    uint32_t first[KVL_SIDES], end[KVL_SIDES], base[KVL_SIDES];
};

/* Adds layer l's part to the records of these tokens, which are in the stage or have left it for the exact rows. */
static kvl_status join(struct kvl_cache *cache, uint32_t l, const struct joining *tokens, struct kvl_buffer *stage, struct kvl_buffer *rotary, uint32_t rope_dim)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t *const sides[] = {tokens->first, tokens->end, tokens->base}, number = l - layer->leader;
    const uint32_t n = max_u32(tokens->end[KVL_SIDE_K] - tokens->first[KVL_SIDE_K], tokens->end[KVL_SIDE_V] - tokens->first[KVL_SIDE_V]);
    struct call call = {0};
    push(&call, KVL_BUF(stage));
    push(&call, KVL_BUF(cache->exact));
    push(&call, KVL_U64(layer->exact_offset));
    push(&call, KVL_BUF(cache->joined));
    push_turn(&call, cache, l, rotary, rope_dim);
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++)
        for (int s = 0; s < KVL_SIDES; s++) push(&call, KVL_U32(sides[i][s]));
    push(&call, KVL_U32(number == 0));
    push(&call, KVL_U32(number + 1 == layer->side[KVL_SIDE_K].record.layers));
    push_view(&call, cache, l, 1, 1);
    const uint64_t row = kvl_joined_row(layer);
    const struct kvl_work work = {.bytes = n * row * 2 * sizeof(float), .flops = 2 * n * row * layer->side[KVL_SIDE_K].record.heads * cache->plan.dims.head_dim};
    return launch(cache, cache->kernels[l].join, layer->n_stream, n, KVL_SIDES, 1, work, &call);
}

/* What leaves the tails of layers that share records becomes one: their first layer's step finds all its rows in the exact ones. */
static kvl_status join_and_seal(struct kvl_cache *cache, uint32_t l, struct kvl_buffer *stage, struct kvl_buffer *rotary, uint32_t rope_dim)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct joining due;
    bool some = false;
    if (layer->leader != l) return KVL_OK;
    for (int s = 0; s < KVL_SIDES; s++) {
        due.first[s] = due.base[s] = kvl_sealed_end(layer, &layer->side[s], cache->position);
        due.end[s] = kvl_sealed_end(layer, &layer->side[s], cache->position + 1);
        some = some || due.end[s] > due.first[s];
    }
    for (uint32_t i = l; some && i < l + layer->side[KVL_SIDE_K].record.layers; i++) {
        KVL_TRY(need_store(cache, i));
        KVL_TRY(join(cache, i, &due, stage, rotary, rope_dim));
    }
    if (some) KVL_TRY(seal(cache, l, 1, due.base, cache->joined));
done:
    return status;
}

static kvl_status finish_and_seal(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                                  uint32_t rope_dim)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t first = cache->position, end = first + n;
    uint32_t pages = 0;
    for (int s = 0; s < kvl_sides(&cache->plan.dims); s++)
        pages = max_u32(pages, cache->plan.evicts ? ragged_pages(&layer->side[s], n) : pages_touched(layer, s, first, end));
    struct call call = {0};
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    push(&call, KVL_BUF(stage));
    push_turn(&call, cache, l, rotary, rope_dim);
    push(&call, KVL_U32(kvl_keeps_exact(layer)));
    push(&call, KVL_BUF(cache->status));
    push_view(&call, cache, l, n, 1);
    const struct kvl_work work = {.bytes = n * (layer->token_bytes + 2 * sizeof(float) * kvl_stage_row(&cache->plan.dims))};
    return launch(cache, cache->kernels[l].append, stage_heads(cache, layer), pages, 1, 1, work, &call);
}

/* Of a layer that reads what layer `owner` has appended: its own query rows; the records are where that step left them. */
static kvl_status turn_queries(struct kvl_cache *cache, uint32_t owner, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, uint32_t rope_dim,
                               struct kvl_buffer **rows)
{
    const uint32_t heads = cache->plan.dims.n_head;
    const bool projects = kvl_layer_projects(&cache->plan.layer[owner]);
    *rows = projects ? cache->records : stage;
    return projects ? project(cache, owner, heads, n, false, stage, rotary, rope_dim) : finish(cache, owner, heads, n, stage, rotary, rope_dim);
}

/* Steps 2 to 4: no launch if attention can take them in, one if the ubatch, and nothing else, is sealed at once; two if some of it or something older
 * is. *rows: where attention finds query rows and records. */
static kvl_status append(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, uint32_t rope_dim,
                         bool *left_to_attend, struct kvl_buffer **rows)
{
    kvl_status status = KVL_OK;
    const bool projects = kvl_layer_projects(&cache->plan.layer[l]);
    const uint32_t heads = stage_heads(cache, &cache->plan.layer[l]);
    uint32_t first[KVL_SIDES];
    bool whole = true;
    *rows = projects ? cache->records : stage;
    for (int s = 0; s < kvl_sides(&cache->plan.dims); s++) {
        first[s] = cache->sealed[l][s];
        cache->sealed[l][s] = kvl_sealed_after(&cache->plan, &cache->plan.layer[l].side[s], first[s], cache->position + n);
        whole = whole && first[s] == cache->position && cache->sealed[l][s] == cache->position + n;
    }
    if (cache->plan.evicts) whole = appends_whole(cache, l);
    *left_to_attend = *left_to_attend && whole &&
                      kvl_compose_appends(&cache->plan, &cache->plan.layer[l], n, kvl_compose_target_of(kvl_device_caps(cache->device)));
    if (*left_to_attend) return KVL_OK;
    if (whole && !projects && cache->plan.layer[l].side[KVL_SIDE_K].rot_m == 0) /* a dense rotation of a page's rows is too much for one work-item */
        return finish_and_seal(cache, l, n, stage, rotary, rope_dim);
    KVL_TRY(projects ? project(cache, l, heads, n, false, stage, rotary, rope_dim) : finish(cache, l, heads, n, stage, rotary, rope_dim));
    KVL_TRY(kvl_layer_shares(&cache->plan.layer[l]) ? join_and_seal(cache, l, stage, rotary, rope_dim) : seal(cache, l, n, first, *rows));
done:
    return status;
}

/* Tokens of the longest sequence among a layer's heads. */
static uint32_t longest(const struct kvl_cache *cache, const struct kvl_layer_plan *layer)
{
    uint32_t tokens = 0;
    for (uint32_t h = 0; h < layer->n_stream; h++)
        tokens = max_u32(tokens, place_of(cache, (uint32_t)(layer - cache->plan.layer), h, cache->position));
    return tokens;
}

/* Whether queries of this step do not read all: where it would be more than the layer's budget. */
static bool chooses(const struct kvl_cache *cache, const struct kvl_layer_plan *layer)
{
    return layer->pages.tokens != 0 && longest(cache, layer) + 1 > (uint32_t)layer->pages.tokens;
}

/* What the attention of one layer's next n tokens reads of one head, summed over the queries. */
static struct kvl_cache_reads head_reads(const struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t n)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t first = place_of(cache, l, h, cache->position);
    struct kvl_cache_reads reads = {0};
    uint32_t sealed[KVL_SIDES] = {0};
    for (int s = 0; s < kvl_sides(&cache->plan.dims); s++)
        sealed[s] = cache->plan.evicts ? kvl_sealed_end(layer, &layer->side[s], first + n) : cache->sealed[l][s];
    const bool choosing = chooses(cache, layer);
    for (uint32_t p = first; p < first + n; p++) {
        const struct kvl_query_reads one = kvl_query_reads(&cache->plan, layer, sealed, choosing, p + 1);
        reads.tokens += one.tokens;
        reads.bytes += one.bytes;
        reads.newest_bytes = one.bytes;
    }
    return reads;
}

/* The same of a layer: tokens on average over its heads, bytes of all of them. */
static struct kvl_cache_reads layer_reads(const struct kvl_cache *cache, uint32_t l, uint32_t n)
{
    const uint32_t heads = cache->plan.layer[l].n_stream;
    struct kvl_cache_reads reads = head_reads(cache, l, 0, n);
    if (!cache->plan.evicts) return (struct kvl_cache_reads){reads.tokens, reads.bytes * heads, reads.newest_bytes * heads};
    for (uint32_t h = 1; h < heads; h++) {
        const struct kvl_cache_reads one = head_reads(cache, l, h, n);
        reads.tokens += one.tokens;
        reads.bytes += one.bytes;
        reads.newest_bytes += one.newest_bytes;
    }
    reads.tokens /= heads;
    return reads;
}

/* Splits of a step: enough work-groups for the device, at least four blocks each; one in exact mode, where the order of sums is fixed. */
static uint32_t split_count(const struct kvl_cache *cache, const struct kvl_layer_plan *layer, uint32_t n, uint32_t n_tiles)
{
    const uint32_t groups = n_tiles * layer->n_stream, wanted = kvl_attend_groups(&cache->plan);
    uint32_t tokens = longest(cache, layer) + n;
    if (layer->window != 0 && tokens > layer->sink + layer->window + n) tokens = layer->sink + layer->window + n;
    if (chooses(cache, layer)) tokens = (uint32_t)layer->pages.tokens;
    const uint32_t most = tokens / 256;
    if (cache->plan.config.exact || groups >= wanted || most < 2) return 1;
    const uint32_t splits = wanted / groups;
    return splits < most ? splits : most;
}

/* Whether attention of one token joins its splits itself: KVL_JOINS of cl/cache_view.cl. */
static bool joins_splits(const struct kvl_cache *cache, uint32_t tile)
{
    const struct kvl_caps *caps = kvl_device_caps(cache->device);
    return tile == 1 && caps->type == KVL_DEVICE_CPU && !kvl_compose_target_of(caps).grouped;
}

/* ---- pages that queries choose: cl/pages.cl ---- */

static void push_picks(struct call *call, const struct kvl_cache *cache, const struct kvl_layer_plan *layer)
{
    push(call, KVL_BUF(cache->picks));
    push(call, KVL_U32(layer->most_pages));
    push(call, KVL_U32((uint32_t)layer->pages.tokens));
}

static void push_bounds(struct call *call, const struct kvl_cache *cache, const struct kvl_layer_plan *layer)
{
    push(call, KVL_BUF(cache->bounds));
    push(call, KVL_U64(layer->bounds_offset));
    push(call, KVL_U32(layer->most_pages));
}

/* Bounds of the pages that the next n tokens have made whole. */
static kvl_status bound_pages(struct kvl_cache *cache, uint32_t l, uint32_t n)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t channels = layer->side[KVL_SIDE_K].record.channels;
    uint32_t new = 0;
    for (uint32_t h = 0; h < layer->n_stream && layer->pages.tokens != 0; h++) {
        const uint32_t first = place_of(cache, l, h, cache->position);
        new = max_u32(new, kvl_pages_read(layer, first + n).whole - kvl_pages_read(layer, first).whole);
    }
    if (new == 0) return KVL_OK;
    struct call call = {0};
    KVL_TRY(need_pages(cache, l));
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    push(&call, KVL_BUF(cache->tables));
    push_bounds(&call, cache, layer);
    push_view(&call, cache, l, n, 1);
    const struct kvl_work work = {.bytes = new * layer->n_stream * (uint64_t)layer->pages.size * layer->side[KVL_SIDE_K].token_bytes};
    KVL_TRY(launch(cache, cache->kernels[l].bound_pages, layer->n_stream, new, channels / 8, 1, work, &call));
done:
    return status;
}

/* Which pages the query in rows reads. */
static kvl_status pick_pages(struct kvl_cache *cache, uint32_t l, struct kvl_buffer *rows)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const size_t group = kvl_compose_group(&cache->plan, kvl_compose_target_of(kvl_device_caps(cache->device)));
    const uint32_t whole = chooses(cache, layer) ? kvl_pages_read(layer, longest(cache, layer) + 1).whole : 0;
    struct call score = {0}, pick = {0};
    if (whole == 0) return KVL_OK;
    KVL_TRY(need_pages(cache, l));
    push_table(&score, cache, l);
    push(&score, KVL_BUF(rows));
    push_bounds(&score, cache, layer);
    push(&score, KVL_BUF(cache->picks));
    push_view(&score, cache, l, 1, 1);
    const struct kvl_work scored = {.bytes = (uint64_t)whole * layer->n_stream * kvl_page_bound_bytes(layer),
                                    .flops = 3ull * whole * cache->plan.dims.n_head * layer->side[KVL_SIDE_K].record.channels};
    KVL_TRY(launch(cache, cache->kernels[l].score_pages, kvl_compose_page_items(whole, group), layer->n_stream, 1, group, scored, &score));
    push_table(&pick, cache, l);
    push_picks(&pick, cache, layer);
    push_view(&pick, cache, l, 1, 1);
    const struct kvl_work picked = {.bytes = (uint64_t)whole * layer->n_stream * sizeof(uint32_t)};
    KVL_TRY(launch(cache, cache->kernels[l].pick_pages, layer->n_stream * group, 1, 1, group, picked, &pick));
done:
    return status;
}

/* Blocks, where there is something to check. */
static kvl_status check_loops(struct kvl_cache *cache, uint32_t l, uint32_t n)
{
    struct kvl_cache_counts counts = {0};
    const struct kvl_caps *caps = kvl_device_caps(cache->device);
    const kvl_status status = kvl_loops_are_cut(caps) ? kvl_cache_counts(cache, &counts) : KVL_OK;
    if (status != KVL_OK || counts.cut == 0) return status;
    return kvl_fail(KVL_E_UNSUPPORTED, "%s ends long loops early, and %u tokens of this cache take longer ones: use another device or fewer tokens", caps->name,
                    longest(cache, &cache->plan.layer[l]) + n);
}

static kvl_status attend(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *rows, struct kvl_buffer *rotary, uint32_t rope_dim,
                         bool with_append, struct kvl_buffer *sums)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_dims *dims = &cache->plan.dims;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t tile = n == 1 ? 1 : prefill_tile(cache, l), n_tiles = (n + tile - 1) / tile;
    const uint32_t n_splits = split_count(cache, layer, n, n_tiles), sum_dim = kvl_sum_dim(&cache->plan, layer);
    const struct kvl_cache_reads reads = layer_reads(cache, l, n);
    const struct kvl_work work = {.bytes = reads.bytes / tile,
                                  .flops = 2 * reads.tokens * dims->n_head * (kvl_query_dim(&cache->plan, layer) + sum_dim)};
    const size_t group = kvl_compose_group(&cache->plan, kvl_compose_target_of(kvl_device_caps(cache->device)));
    struct call call = {0};
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    push(&call, KVL_BUF(rows));
    push(&call, KVL_BUF(cache->exact));
    push(&call, KVL_U64(layer->exact_offset));
    push_turn(&call, cache, l, rotary, rope_dim);
    push(&call, KVL_F32(dims->scale != 0.0f ? dims->scale : 1.0f / sqrtf((float)dims->head_dim)));
    push(&call, KVL_BUF(sums));
    push(&call, KVL_BUF(cache->partial));
    push(&call, KVL_U32(with_append));
    push(&call, KVL_BUF(cache->status));
    if (layer->cells != 0) {
        push(&call, KVL_BUF(cache->index));
        push(&call, KVL_U64(layer->index_offset + 2ull * layer->n_stream * layer->cells));
        push(&call, KVL_U32(layer->cells));
        push(&call, KVL_BUF(cache->raw));
        push(&call, KVL_U64(layer->raw_offset));
    }
    if (layer->pages.tokens != 0) push_picks(&call, cache, layer);
    push_view(&call, cache, l, n, n_splits);
    const int which = tile == 1 ? 0 : 1;
    KVL_TRY(need_attend(cache, l, which));
    KVL_TRY(launch(cache, cache->kernels[l].attend[which], (size_t)n_tiles * layer->n_stream * n_splits * group, 1, 1, group, work, &call));
    if (n_splits > 1 && !joins_splits(cache, tile)) {
        const uint32_t n_rows = n * dims->n_head;
        const struct kvl_arg args[] = {KVL_BUF(cache->partial), KVL_BUF(sums), KVL_U32(n_rows), KVL_U32(n_splits)};
        const struct kvl_work merged = {.bytes = (n_splits + 1ull) * n_rows * sum_dim * sizeof(float)};
        KVL_TRY(kvl_launch(cache->device, cache->kernels[l].merge[which], (const size_t[3]){n_rows * group, 1, 1}, (const size_t[3]){group, 1, 1},
                           merged, args, sizeof args / sizeof args[0]));
    }
    KVL_TRY(check_loops(cache, l, n));
done:
    return status;
}

/* Values were rotated and projected for storage: so is what attention made of them. */
static kvl_status finish_output(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *rotary, uint32_t rope_dim, struct kvl_buffer *sums,
                                struct kvl_buffer *out)
{
    if (cache->kernels[l].finish_output == NULL) return KVL_OK;
    struct call call = {0};
    push(&call, KVL_BUF(sums));
    push(&call, KVL_BUF(out));
    push_turn(&call, cache, l, rotary, rope_dim);
    return launch(cache, cache->kernels[l].finish_output, cache->plan.dims.n_head, n, 1, 1, (struct kvl_work){0}, &call);
}

static kvl_status keep_exact(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    bool past_sinks = true;
    for (uint32_t h = 0; h < layer->n_stream; h++) past_sinks = past_sinks && place_of(cache, l, h, cache->position) >= layer->sink;
    if (!kvl_keeps_tail(layer) && past_sinks) return KVL_OK;
    struct call call = {0};
    push_table(&call, cache, l);
    push(&call, KVL_BUF(stage));
    push(&call, KVL_BUF(cache->exact));
    push(&call, KVL_U64(layer->exact_offset));
    push_view(&call, cache, l, n, 1);
    const int sides = kvl_sides(&cache->plan.dims);
    struct kvl_work work = {0};
    for (int s = 0; s < sides; s++)
        work.bytes += (uint64_t)n * layer->n_stream * (layer->side[s].record.channels * sizeof(float) + layer->side[s].exact_row_bytes);
    return launch(cache, cache->kernels[l].keep, layer->n_stream, n, (size_t)sides, 1, work, &call);
}

/* Under P1 a step that begins within a group would need what the group's first tokens were: plan.c, check_fake_quant. */
static kvl_status check_groups(const struct kvl_cache *cache, uint32_t l)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    if (cache->plan.config.protocol != KVL_P1_FAKE_QUANT || cache->position <= layer->sink) return KVL_OK;
    for (int s = 0; s < kvl_sides(&cache->plan.dims); s++)
        if ((cache->position - layer->sink) % layer->side[s].shape.group != 0)
            return kvl_fail(KVL_E_USAGE, "protocol p1: a step at position %u would split a group of %u tokens of codec %s; feed whole windows",
                            cache->position, layer->side[s].shape.group, layer->side[s].codec->head.name);
    return KVL_OK;
}

/* Tokens that head h loses when `position` tokens have been seen. */
static uint32_t lost_behind(const struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t position, uint32_t target)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t end = place_of(cache, l, h, position), sealed = kvl_sealed_end(layer, &layer->side[KVL_SIDE_K], end);
    return min_u32(end > target ? end - target : 0, sealed - layer->sink);
}

/* Scores that the next n tokens of each head get as they are stored; a position's alone comes with the eviction of a step. */
static kvl_status score_new(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct call call = {0};
    if (!scores_once(layer) || (cache->n_prompt != 0 && layer->running.source == KVL_RUN_POSITION)) return KVL_OK;
    KVL_TRY(need_evict(cache, l));
    push_table(&call, cache, l);
    push(&call, KVL_BUF(cache->index));
    push(&call, KVL_U64(layer->index_offset));
    push(&call, KVL_U32(layer->cells));
    push(&call, KVL_BUF(stage));
    push(&call, KVL_U32(l));
    push(&call, KVL_U32(layer->running.parameter));
    push_view(&call, cache, l, n, 1);
    KVL_TRY(launch(cache, cache->kernels[l].score_new, layer->n_stream, n, 1, 1, (struct kvl_work){0}, &call));
done:
    return status;
}

/* What a layer is to do at this step; layers that do the same share a launch. */
struct eviction {
    struct kvl_kernel *kernel; /* NULL: nothing */
    uint32_t target, first, newest, parameter, cells, slots[KVL_SIDES];
};

static kvl_status eviction_of(struct kvl_cache *cache, uint32_t l, struct eviction *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct kvl_score_running running = {.struct_size = sizeof running};
    *out = (struct eviction){0};
    if (layer->cells == 0) return KVL_OK;
    KVL_TRY(need_evict(cache, l));
    *out = (struct eviction){.kernel = cache->kernels[l].evict, .target = UINT32_MAX, .cells = layer->cells,
                             .slots = {layer->side[KVL_SIDE_K].slots, layer->side[KVL_SIDE_V].slots}};
    if (!layer->by_host) KVL_TRY(kvl_decode_target(&cache->plan, l, cache->position + 1, cache->n_prompt, &out->target));
    if (kvl_keep_running(kvl_spec_layer(cache->plan.config.spec, l), out->target, &running) != KVL_OK)
        return kvl_fail(KVL_E_VERIFY, "%s: the plug-in failed without a reason", layer->score->head.name);
    out->first = running.first;
    out->newest = running.newest;
    out->parameter = running.parameter;
done:
    return status;
}

static bool same_eviction(const struct eviction *a, const struct eviction *b)
{
    return a->kernel == b->kernel && a->target == b->target && a->first == b->first && a->newest == b->newest && a->parameter == b->parameter &&
           a->cells == b->cells && memcmp(a->slots, b->slots, sizeof a->slots) == 0;
}

/* Layers l .. l + n - 1, behind the token at `position`: scores go on, and what is too much goes. The heads' own counts follow in advance(). */
static kvl_status evict_layers(struct kvl_cache *cache, uint32_t l, uint32_t n, const struct eviction *what, uint32_t position)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const size_t group = kvl_compose_group(&cache->plan, kvl_compose_target_of(kvl_device_caps(cache->device)));
    const uint32_t groups = layer->running.is_shared ? 1 : layer->n_stream;
    struct call call = {0};
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    push(&call, KVL_BUF(cache->index));
    push(&call, KVL_U64(layer->index_offset));
    push(&call, KVL_U32(layer->cells));
    push(&call, KVL_BUF(cache->raw));
    push(&call, KVL_U64(layer->raw_offset));
    push(&call, KVL_BUF(cache->gone));
    push(&call, KVL_U64(layer->gone_offset));
    push(&call, KVL_U32(cache->plan.gone_room));
    push(&call, KVL_U32(l));
    push(&call, KVL_U32(what->target));
    push(&call, KVL_U32(what->first));
    push(&call, KVL_U32(what->newest));
    push(&call, KVL_U32(what->parameter));
    if (layer->running.source == KVL_RUN_KEYS) {
        push(&call, KVL_BUF(cache->tables));
        push(&call, KVL_BUF(cache->exact));
        push(&call, KVL_U64(layer->exact_offset));
        push(&call, KVL_U64(n > 1 ? layer[1].exact_offset - layer->exact_offset : 0));
    }
    push_view_at(&call, cache, l, position, 1, 1);
    const struct kvl_work work = {.bytes = (uint64_t)n * longest(cache, layer) * (groups + cache->plan.dims.n_head) * sizeof(float)};
    return launch(cache, what->kernel, groups * group, n, 1, group, work, &call);
}

/* Behind the last layer. */
static kvl_status evict_all(struct kvl_cache *cache)
{
    kvl_status status = KVL_OK;
    struct eviction what, next;
    if (!cache->plan.evicts_decoding) return KVL_OK;
    KVL_TRY(eviction_of(cache, 0, &what));
    for (uint32_t l = 0, end = 1; l < cache->plan.dims.n_layer; l = end++, what = next) {
        next = (struct eviction){0};
        for (; end < cache->plan.dims.n_layer; end++) {
            KVL_TRY(eviction_of(cache, end, &next));
            if (!same_eviction(&what, &next)) break;
        }
        if (what.kernel != NULL) KVL_TRY(evict_layers(cache, l, end - l, &what, cache->position));
    }
done:
    return status;
}

kvl_status kvl_cache_step(struct kvl_cache *cache, uint32_t layer, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                          uint32_t rope_dim, struct kvl_buffer *out)
{
    kvl_status status = KVL_OK;
    const uint32_t sealed[KVL_SIDES] = {cache->sealed[layer][KVL_SIDE_K], cache->sealed[layer][KVL_SIDE_V]};
    const uint32_t owner = kvl_kv_source(&cache->plan.dims, layer);
    struct kvl_buffer *rows;
    bool left_to_attend = out != NULL && owner == layer;
    assert(n == 1 || !cache->plan.one_by_one);
    if (n == 0 || n > kvl_cache_ubatch(&cache->plan.config) || cache->position + n > cache->plan.config.n_ctx)
        return kvl_fail(KVL_E_USAGE, "%u tokens at position %u: the cache was reserved for %u positions, %u at once", n, cache->position,
                        cache->plan.config.n_ctx, kvl_cache_ubatch(&cache->plan.config));
    if (cache->plan.evicts && cache->n_prompt == 0)
        return kvl_fail(KVL_E_USAGE, "a cache that evicts begins with a prompt, and there was none yet");
    KVL_TRY(check_groups(cache, owner));
    KVL_TRY(need_store(cache, owner));
    KVL_TRY(kvl_cache_remember(cache, layer, cache->position, stage, 0, n));
    KVL_TRY(owner == layer ? append(cache, layer, n, stage, rotary, rope_dim, &left_to_attend, &rows) /* 2 records; 3 they are the newest part of the stream; 4 seal what is due */
                           : turn_queries(cache, owner, n, stage, rotary, rope_dim, &rows));
    if (owner == layer) KVL_TRY(bound_pages(cache, layer, n));
    if (out != NULL) {
        struct kvl_buffer *sums = kvl_layer_projects(&cache->plan.layer[owner]) && cache->kernels[owner].finish_output != NULL ? cache->sums : out;
        KVL_TRY(pick_pages(cache, owner, rows));
        KVL_TRY(attend(cache, owner, n, rows, rotary, rope_dim, left_to_attend, sums)); /* 5; 6 and 7 belong to a prompt's eviction */
        KVL_TRY(finish_output(cache, owner, n, rotary, rope_dim, sums, out));
    }
    if (!kvl_kv_read_on(&cache->plan.dims, layer)) KVL_TRY(keep_exact(cache, owner, n, rows)); /* 8 what stays exact leaves the stage: behind the last reader */
    KVL_TRY(score_new(cache, owner, n, stage)); /* 6, 7 of tokens that go while others are decoded */
    if (layer + 1 == cache->plan.dims.n_layer) KVL_TRY(evict_all(cache));
done:
    if (status != KVL_OK) memcpy(cache->sealed[layer], sealed, sizeof sealed);
    return status;
}

/* What the device has done in this step, in numbers that depend on nothing but counts. */
static void count_lost(struct kvl_cache *cache, uint32_t l)
{
    uint32_t target;
    if (cache->plan.layer[l].cells == 0 || cache->plan.layer[l].by_host || kvl_decode_target(&cache->plan, l, cache->position + 1, cache->n_prompt, &target) != KVL_OK) return;
    for (uint32_t h = 0; h < cache->plan.layer[l].n_stream; h++)
        cache->lost[(size_t)l * cache->plan.dims.n_kv_head + h] += lost_behind(cache, l, h, cache->position + 1, target);
}

void kvl_cache_advance(struct kvl_cache *cache, uint32_t n)
{
    cache->reads.newest_bytes = 0;
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++) {
        const struct kvl_cache_reads reads = layer_reads(cache, kvl_kv_source(&cache->plan.dims, l), n);
        cache->reads.tokens += reads.tokens;
        cache->reads.bytes += reads.bytes;
        cache->reads.newest_bytes += reads.newest_bytes;
    }
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++) count_lost(cache, l);
    cache->position += n;
}

/* Whether a window's ring of pages is shorter than the context. */
static bool forgets(const struct kvl_cache *cache, uint32_t l)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    bool ring = false;
    for (int s = 0; s < KVL_SIDES; s++)
        ring = ring || (uint64_t)layer->side[s].slots * layer->side[s].dims.page_tokens < cache->plan.config.n_ctx - layer->sink;
    return layer->window != 0 && ring;
}

void kvl_cache_narrow(struct kvl_cache *cache, uint32_t l, uint32_t window)
{
    assert(!forgets(cache, l));
    cache->plan.layer[l].window = window;
}

kvl_status kvl_cache_rewind(struct kvl_cache *cache, uint32_t position)
{
    assert(position <= cache->position);
    if (cache->plan.evicts) return kvl_fail(KVL_SKIP, "a cache that has evicted tokens cannot be rewound");
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++) {
        const struct kvl_layer_plan *layer = &cache->plan.layer[l];
        if (forgets(cache, l) || kvl_keeps_tail(layer)) return kvl_fail(KVL_SKIP, "a cache with a window or a tail cannot be rewound");
    }
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++)
            if (cache->sealed[l][s] > position) cache->sealed[l][s] = max_u32(position, cache->plan.layer[l].sink);
    cache->position = position;
    return KVL_OK;
}

kvl_status kvl_cache_launch(struct kvl_cache *cache, uint32_t l, struct kvl_kernel *kernel, const struct kvl_arg *own, size_t n_own, size_t x,
                            size_t y)
{
    struct call call = {0};
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    for (size_t i = 0; i < n_own; i++) push(&call, own[i]);
    push_view(&call, cache, l, 1, 1);
    return launch(cache, kernel, x, y, 1, 1, (struct kvl_work){0}, &call);
}

/* A layer's part of the page table, and of what stands behind it the first `more` numbers of each head. */
static kvl_status write_entries(struct kvl_cache *cache, uint32_t l, uint32_t more)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint64_t entries = layer->n_stream * ((uint64_t)layer->side[KVL_SIDE_K].slots + layer->side[KVL_SIDE_V].slots + more);
    return kvl_buffer_write(cache->table, layer->table_offset * sizeof(uint64_t), entries * sizeof(uint64_t), cache->plan.page_address + layer->table_offset);
}

/* ---- tokens that go by what the host says: rescore.h ---- */

kvl_status kvl_cache_target(const struct kvl_cache *cache, uint32_t l, uint32_t *target)
{
    return kvl_decode_target(&cache->plan, l, cache->position, cache->n_prompt, target);
}

kvl_status kvl_cache_remember(struct kvl_cache *cache, uint32_t l, uint32_t position, struct kvl_buffer *stage, uint32_t row, uint32_t n)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint64_t bytes = (uint64_t)cache->plan.dims.n_head * cache->plan.dims.head_dim * sizeof(float);
    for (uint32_t i = n > layer->recent ? n - layer->recent : 0; i < n; i++) {
        const uint64_t from = (uint64_t)(row + i) * kvl_stage_row(&cache->plan.dims) * sizeof(float), slot = (position + i) % layer->recent;
        const kvl_status status = kvl_buffer_copy(stage, from, cache->recent, layer->recent_offset * sizeof(float) + slot * bytes, bytes);
        if (status != KVL_OK) return status;
    }
    return KVL_OK;
}

kvl_status kvl_cache_recent(struct kvl_cache *cache, uint32_t l, uint32_t n, float *q)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint64_t row = (uint64_t)cache->plan.dims.n_head * cache->plan.dims.head_dim;
    for (uint32_t i = 0, slot, run; i < n; i += run) {
        slot = (cache->position - n + i) % layer->recent;
        run = min_u32(n - i, layer->recent - slot);
        KVL_TRY(kvl_buffer_read(cache->recent, (layer->recent_offset + slot * row) * sizeof *q, run * row * sizeof *q, q + i * row));
    }
done:
    return status;
}

static uint64_t numbers_at(const struct kvl_layer_plan *layer, uint32_t h)
{
    return (layer->index_offset + ((uint64_t)layer->n_stream + h) * layer->cells) * sizeof(float);
}

kvl_status kvl_cache_numbers(struct kvl_cache *cache, uint32_t l, uint32_t h, float *number)
{
    return kvl_buffer_read(cache->index, numbers_at(&cache->plan.layer[l], h), kvl_cache_places(cache, l, h) * sizeof *number, number);
}

kvl_status kvl_cache_set_numbers(struct kvl_cache *cache, uint32_t l, uint32_t h, const float *number)
{
    return kvl_buffer_write(cache->index, numbers_at(&cache->plan.layer[l], h), kvl_cache_places(cache, l, h) * sizeof *number, number);
}

/* Pages for `count` tokens of each head and those that come before the next eviction. */
static kvl_status share_pages(struct kvl_cache *cache, uint32_t l, const uint32_t *count)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    uint64_t *entry = cache->plan.page_address + layer->table_offset;
    for (int s = 0; s < kvl_sides(&cache->plan.dims); entry += (uint64_t)layer->n_stream * layer->side[s++].slots) {
        const struct kvl_side_plan *side = &layer->side[s];
        struct pool *pool = &cache->pool[l][s];
        for (int pass = 0; pass < 2 && side->pool != 0; pass++) /* give back, then take */
            for (uint32_t h = 0; h < layer->n_stream; h++) {
                const uint32_t end = kvl_sealed_end(layer, side, count[h] + kvl_decode_step(&cache->plan, l)) - layer->sink, p = side->dims.page_tokens;
                const uint32_t wanted = min_u32((end + p - 1) / p, side->slots);
                uint64_t *own = entry + (uint64_t)h * side->slots;
                while (pass == 0 && pool->owned[h] > wanted) pool->free[pool->n_free++] = own[--pool->owned[h]];
                if (pass == 1 && wanted > pool->owned[h] + pool->n_free)
                    return kvl_fail(KVL_E_VERIFY, "layer %u: head %u wants %u pages of %s, and of %u none is left", l, h, wanted, side->codec->head.name, side->pool);
                while (pass == 1 && pool->owned[h] < wanted) own[pool->owned[h]++] = pool->free[--pool->n_free];
            }
    }
    return KVL_OK;
}

/* Before a prompt: nobody has any. */
static void empty_pools(struct kvl_cache *cache, uint32_t l)
{
    for (int s = 0; s < KVL_SIDES; s++) {
        const struct kvl_side_plan *side = &cache->plan.layer[l].side[s];
        struct pool *pool = &cache->pool[l][s];
        memset(pool->owned, 0, cache->plan.layer[l].n_stream * sizeof *pool->owned);
        for (pool->n_free = 0; pool->n_free < side->pool; pool->n_free++) pool->free[pool->n_free] = cache->plan.pool_address[side->pool_at + side->pool - 1 - pool->n_free];
    }
}

/* The page table, and behind it what each head has lost; what counts along on the device stays. hides [H]: heads of which the next launch sees the sinks alone, as if
 * nothing were new and nothing could go. */
static kvl_status write_heads(struct kvl_cache *cache, uint32_t l, const bool *hides)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    uint64_t *entry = cache->plan.page_address + layer->table_offset + layer->n_stream * ((uint64_t)layer->side[KVL_SIDE_K].slots + layer->side[KVL_SIDE_V].slots);
    for (uint32_t h = 0; h < layer->n_stream; h++)
        entry[h] = hides[h] ? (uint64_t)layer->sink << 32 : cache->lost[(size_t)l * cache->plan.dims.n_kv_head + h] | (uint64_t)UINT32_MAX << 32;
    return write_entries(cache, l, 1);
}

kvl_status kvl_cache_drop(struct kvl_cache *cache, uint32_t l, const uint32_t *target)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t heads = layer->n_stream;
    uint32_t *count = NULL, *lost = cache->lost + (size_t)l * cache->plan.dims.n_kv_head;
    bool *hides = NULL;
    KVL_TRY(kvl_alloc(&count, heads, sizeof *count));
    KVL_TRY(kvl_alloc(&hides, heads, sizeof *hides));
    KVL_TRY(need_drop(cache, l));
    for (uint32_t first = 0; first < heads; first++) { /* heads of equal target share a launch */
        const struct eviction what = {.kernel = cache->kernels[l].drop, .target = target[first]};
        if (lost_behind(cache, l, first, cache->position, target[first]) == 0) continue;
        for (uint32_t h = 0; h < heads; h++) hides[h] = target[h] != target[first];
        KVL_TRY(write_heads(cache, l, hides));
        KVL_TRY(evict_layers(cache, l, 1, &what, cache->position - 1));
        for (uint32_t h = 0; h < heads; h++) lost[h] += hides[h] ? 0 : lost_behind(cache, l, h, cache->position, target[h]);
    }
    for (uint32_t h = 0; h < heads; h++) count[h] = kvl_cache_places(cache, l, h);
    KVL_TRY(share_pages(cache, l, count));
    memset(hides, 0, heads * sizeof *hides);
    KVL_TRY(write_heads(cache, l, hides));
done:
    kvl_free(&count);
    kvl_free(&hides);
    return status;
}

/* ---- a prompt that was compressed ---- */

/* Heads' entries behind the page table while a prompt's tokens are stored. */
static void limit_heads(struct kvl_cache *cache, uint32_t l, const uint32_t *count)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t heads = layer->n_stream;
    uint64_t *entry = cache->plan.page_address + layer->table_offset + (uint64_t)heads * (layer->side[KVL_SIDE_K].slots + layer->side[KVL_SIDE_V].slots);
    for (uint32_t h = 0; h < heads; h++) {
        entry[h] = (uint64_t)count[h] << 32;
        if (layer->cells != 0) entry[heads + h] = 0;
    }
}

/* Pages for the tokens that heads keep and those that may follow, one after the other in a buffer of their own. */
static kvl_status place_layer(struct kvl_cache *cache, uint32_t l, const uint32_t *count, uint32_t room)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = &cache->plan;
    const struct kvl_layer_plan *layer = &plan->layer[l];
    uint64_t *entry = plan->page_address + layer->table_offset, bytes = 0;
    for (int s = 0; s < kvl_sides(&plan->dims); s++)
        for (uint32_t h = 0; h < layer->n_stream; h++, entry += layer->side[s].slots) {
            const struct kvl_side_plan *side = &layer->side[s];
            const uint32_t body = kvl_sealed_end(layer, side, count[h] + room) - layer->sink;
            const uint32_t pages = (body + side->dims.page_tokens - 1) / side->dims.page_tokens;
            bytes = (bytes + side->alignment - 1) / side->alignment * side->alignment;
            for (uint32_t i = 0; i < side->slots; i++) {
                entry[i] = i < pages ? bytes : 0;
                bytes += i < pages ? side->page_bytes : 0;
            }
        }
    if (bytes == 0) bytes = layer->side[KVL_SIDE_K].page_bytes; /* kernels get a buffer in any case */
    kvl_buffer_free(&cache->slab[l]);
    KVL_TRY(kvl_buffer_new(cache->device, "kv pages", (int)l, KVL_MEM_SLACK, bytes, true, &cache->slab[l]));
done:
    return status;
}

static kvl_status write_table(struct kvl_cache *cache, uint32_t l)
{
    return write_entries(cache, l, 1 + (cache->plan.layer[l].cells != 0));
}

/* Positions and ranks of the tokens that stay, and the scores they have. */
static kvl_status write_index(struct kvl_cache *cache, uint32_t l, const uint32_t *count, const uint32_t *token, const float *sum)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t heads = layer->n_stream, parts = layer->pos == KVL_POS_COMPACT ? 3 : 2;
    const size_t cells = layer->cells, numbers = (size_t)parts * heads * cells;
    uint32_t *index = NULL;
    if (layer->cells == 0) return KVL_OK;
    KVL_TRY(kvl_alloc(&index, numbers, sizeof *index));
    for (uint32_t h = 0; h < heads; token += count[h], sum += sum != NULL ? count[h] : 0, h++) {
        assert(count[h] <= cells);
        memcpy(index + h * cells, token, count[h] * sizeof *index);
        if (sum != NULL) memcpy(index + (heads + h) * cells, sum, count[h] * sizeof *sum);
        for (uint32_t i = 0; parts == 3 && i < cells; i++) index[(2 * heads + h) * cells + i] = i;
    }
    KVL_TRY(kvl_buffer_write(cache->index, layer->index_offset * sizeof *index, numbers * sizeof *index, index));
done:
    kvl_free(&index);
    return status;
}

kvl_status kvl_cache_fill_begin(struct kvl_cache *cache, uint32_t l, uint32_t n_token, const uint32_t *count, const uint32_t *token, const float *sum)
{
    kvl_status status = KVL_OK;
    assert(cache->plan.evicts && n_token <= cache->plan.config.n_ctx);
    cache->position = cache->n_prompt = 0;
    memset(cache->lost + (size_t)l * cache->plan.dims.n_kv_head, 0, cache->plan.dims.n_kv_head * sizeof *cache->lost);
    KVL_TRY(need_store(cache, l));
    if (kvl_pages_by_layer(&cache->plan) && cache->plan.layer[l].leader == l) KVL_TRY(place_layer(cache, l, count, cache->plan.config.n_ctx - n_token));
    empty_pools(cache, l);
    KVL_TRY(share_pages(cache, l, count));
    limit_heads(cache, l, count);
    KVL_TRY(write_table(cache, l));
    KVL_TRY(write_index(cache, l, count, token, sum));
done:
    return status;
}

kvl_status kvl_cache_fill_table(struct kvl_cache *cache, uint32_t l, enum kvl_side s, const float *table)
{
    const struct kvl_side_plan *side = &cache->plan.layer[l].side[s];
    return kvl_buffer_write(cache->tables, side->table_offset * sizeof *table,
                            (uint64_t)cache->plan.dims.n_kv_head * side->shape.table_floats * sizeof *table, table);
}

/* Rows of the stage become records. */
static kvl_status finish_kept(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, uint32_t rope_dim)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    struct call call = {0};
    if (kvl_layer_projects(layer)) return project(cache, l, stage_heads(cache, layer), n, true, stage, rotary, rope_dim);
    if (layer->side[KVL_SIDE_K].rot_m == 0 && layer->korder == KVL_KORDER_GGUF && !kvl_layer_shares(layer)) return KVL_OK;
    push(&call, KVL_BUF(stage));
    push_turn(&call, cache, l, rotary, rope_dim);
    push(&call, KVL_U32(kvl_stage_row(&cache->plan.dims)));
    push(&call, KVL_U32(kvl_keeps_exact(layer)));
    return launch(cache, cache->kernels[l].finish_kept, stage_heads(cache, layer) - cache->plan.dims.n_head, n, 1, 1, (struct kvl_work){0}, &call);
}

/* A prompt's next rows of layer l: their part of the records, which are complete behind the last of the layers that share them. */
static kvl_status join_kept(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, uint32_t rope_dim)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t first = cache->position, end = first + n;
    const struct joining kept = {.first = {first, first}, .end = {end, end}};
    KVL_TRY(join(cache, l, &kept, stage, rotary, rope_dim));
    if (l + 1 == layer->leader + layer->side[KVL_SIDE_K].record.layers) KVL_TRY(seal(cache, l, n, kept.base, cache->joined));
done:
    return status;
}

kvl_status kvl_cache_fill_rows(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                               uint32_t rope_dim)
{
    kvl_status status = KVL_OK;
    const uint32_t none[KVL_SIDES] = {0};
    struct kvl_buffer *rows = kvl_layer_projects(&cache->plan.layer[l]) ? cache->records : stage;
    KVL_TRY(finish_kept(cache, l, n, stage, rotary, rope_dim));
    KVL_TRY(kvl_layer_shares(&cache->plan.layer[l]) ? join_kept(cache, l, n, stage, rotary, rope_dim) : seal(cache, l, n, none, rows));
    KVL_TRY(bound_pages(cache, l, n));
    KVL_TRY(keep_exact(cache, l, n, rows));
    KVL_TRY(score_new(cache, l, n, stage));
    cache->position += n;
done:
    return status;
}

kvl_status kvl_cache_fill_end(struct kvl_cache *cache, uint32_t l, uint32_t n_token, const uint32_t *count)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t heads = layer->n_stream;
    const uint64_t slots = (uint64_t)heads * (layer->side[KVL_SIDE_K].slots + layer->side[KVL_SIDE_V].slots);
    for (uint32_t h = 0; h < heads; h++) {
        const size_t stream = (size_t)l * cache->plan.dims.n_kv_head + h;
        cache->lost[stream] = cache->lost_at_prompt[stream] = n_token - count[h];
        cache->plan.page_address[layer->table_offset + slots + h] = (n_token - count[h]) | (uint64_t)UINT32_MAX << 32;
    }
    cache->position = cache->n_prompt = n_token;
    return write_table(cache, l);
}

void kvl_cache_reads(const struct kvl_cache *cache, struct kvl_cache_reads *out)
{
    *out = cache->reads;
    out->tokens /= cache->plan.dims.n_layer;
}

void kvl_cache_count_prompt(struct kvl_cache *cache, const struct kvl_cache_reads *reads)
{
    cache->reads.tokens += reads->tokens;
    cache->reads.bytes += reads->bytes;
}

/* ---- accounting ---- */

static kvl_status page_classes(const struct kvl_cache *cache, uint64_t *bytes)
{
    kvl_status status = KVL_OK;
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++)
        for (int s = 0; s < kvl_sides(&cache->plan.dims); s++) {
            const struct kvl_layer_plan *layer = &cache->plan.layer[l];
            for (uint32_t h = 0; h < layer->n_stream; h++) {
                struct kvl_codec_bytes used;
                KVL_TRY(kvl_side_bytes(&layer->side[s], kvl_side_held(&layer->side[s], sealed_of(cache, l, s, h) - layer->sink), &used));
                bytes[KVL_MEM_PAYLOAD] += used.payload;
                bytes[KVL_MEM_SCALE] += used.scale;
                bytes[KVL_MEM_INDEX] += used.index;
            }
        }
done:
    return status;
}

static uint64_t exact_used(const struct kvl_cache *cache)
{
    uint64_t used = 0;
    for (uint32_t l = 0; l < cache->plan.dims.n_layer; l++) {
        const struct kvl_layer_plan *layer = &cache->plan.layer[l];
        for (int s = 0; s < kvl_sides(&cache->plan.dims); s++)
            for (uint32_t h = 0; h < layer->n_stream; h++)
                used += layer->side[s].exact_row_bytes *
                        kvl_exact_rows_held(&cache->plan, layer, s, sealed_of(cache, l, s, h), place_of(cache, l, h, cache->position));
    }
    return used;
}

/* Splits a class's bytes over the slabs in order; each slab's rest is slack. */
static kvl_status split_slabs(struct kvl_cache *cache, const uint64_t used[KVL_MEM_CLASSES])
{
    kvl_status status = KVL_OK;
    uint64_t left[KVL_MEM_CLASSES];
    memcpy(left, used, sizeof left);
    for (uint32_t i = 0; i < slab_count(cache); i++) {
        if (cache->slab[i] == NULL) continue;
        uint64_t part[KVL_MEM_CLASSES] = {0}, room = kvl_buffer_bytes(cache->slab[i]);
        for (int c = 0; c < KVL_MEM_CLASSES; c++) {
            part[c] = left[c] < room ? left[c] : room;
            left[c] -= part[c];
            room -= part[c];
        }
        part[KVL_MEM_SLACK] += room;
        KVL_TRY(kvl_buffer_split(cache->slab[i], part));
    }
done:
    return status;
}

uint64_t kvl_cache_resident(const struct kvl_cache *cache)
{
    uint64_t bytes = cache->plan.exact_bytes + kvl_plan_index_bytes(&cache->plan) + cache->plan.n_table_floats * sizeof(float);
    for (uint32_t i = 0; i < slab_count(cache); i++) bytes += cache->slab[i] != NULL ? kvl_buffer_bytes(cache->slab[i]) : 0;
    return bytes;
}

void kvl_cache_note_peak(struct kvl_cache *cache, uint64_t others_bytes)
{
    const uint64_t now = kvl_cache_resident(cache) + others_bytes;
    if (now > cache->peak_bytes) cache->peak_bytes = now;
}

uint64_t kvl_cache_peak(const struct kvl_cache *cache)
{
    const uint64_t now = kvl_cache_resident(cache);
    return now > cache->peak_bytes ? now : cache->peak_bytes;
}

kvl_status kvl_cache_bytes(struct kvl_cache *cache, uint64_t bytes[KVL_MEM_CLASSES])
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = &cache->plan;
    memset(bytes, 0, KVL_MEM_CLASSES * sizeof *bytes);
    KVL_TRY(page_classes(cache, bytes));
    KVL_TRY(split_slabs(cache, bytes));
    if (cache->exact != NULL) {
        uint64_t exact[KVL_MEM_CLASSES] = {0};
        exact[KVL_MEM_PAYLOAD] = exact_used(cache);
        exact[KVL_MEM_SLACK] = plan->exact_bytes - exact[KVL_MEM_PAYLOAD];
        KVL_TRY(kvl_buffer_split(cache->exact, exact));
        bytes[KVL_MEM_PAYLOAD] += exact[KVL_MEM_PAYLOAD];
    }
    bytes[KVL_MEM_INDEX] += kvl_plan_index_bytes(plan);
    bytes[KVL_MEM_TABLE] = plan->n_table_floats * sizeof(float);
    bytes[KVL_MEM_SLACK] = kvl_cache_resident(cache);
    for (int c = KVL_MEM_PAYLOAD; c <= KVL_MEM_TABLE; c++) bytes[KVL_MEM_SLACK] -= bytes[c];
    bytes[KVL_MEM_SCRATCH] = plan->scratch_bytes;
done:
    return status;
}

kvl_status kvl_cache_counts(struct kvl_cache *cache, struct kvl_cache_counts *out)
{
    const kvl_status status = kvl_buffer_read(cache->status, 0, sizeof *out, out);
    out->nonfinite += cache->prompt_counts.nonfinite;
    out->overflow += cache->prompt_counts.overflow;
    return status;
}

void kvl_cache_add_counts(struct kvl_cache *cache, const struct kvl_cache_counts *counts)
{
    cache->prompt_counts.nonfinite += counts->nonfinite;
    cache->prompt_counts.overflow += counts->overflow;
}

uint32_t kvl_cache_places(const struct kvl_cache *cache, uint32_t l, uint32_t h) { return place_of(cache, l, h, cache->position); }

void kvl_cache_segments(const struct kvl_cache *cache, uint32_t l, enum kvl_side side, uint32_t h, struct kvl_segments *out)
{
    l = kvl_kv_source(&cache->plan.dims, l);
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t places = kvl_cache_places(cache, l, h), sink = min_u32(layer->sink, places);
    const uint32_t slid = layer->window != 0 && places > layer->window ? places - layer->window : 0;
    *out = (struct kvl_segments){sink, max_u32(sink, slid), max_u32(sink, min_u32(sealed_of(cache, l, side, h), places)), places};
}

kvl_status kvl_cache_positions(struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t *position)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t places = kvl_cache_places(cache, l, h), sealed = min_u32(sealed_of(cache, l, KVL_SIDE_K, h), places);
    if (layer->cells == 0) return kvl_fail(KVL_E_USAGE, "layer %u evicts nothing while tokens are decoded: its prompt's selection says what it has", l);
    for (uint32_t i = sealed; i < places; i++) position[i] = cache->position - (places - i); /* the tail: the newest, one after the other */
    const uint32_t stored = max_u32(sealed, min_u32(places, layer->sink));
    return stored == 0 ? KVL_OK
                       : kvl_buffer_read(cache->index, (layer->index_offset + (uint64_t)h * layer->cells) * sizeof *position, stored * sizeof *position, position);
}

kvl_status kvl_cache_gone(struct kvl_cache *cache, uint32_t l, uint32_t h, struct kvl_gone *gone, uint32_t *n)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const size_t stream = (size_t)l * cache->plan.dims.n_kv_head + h;
    *n = layer->cells != 0 ? cache->lost[stream] - cache->lost_at_prompt[stream] : 0;
    const uint64_t known = min_u32(*n, cache->plan.gone_room), first = layer->gone_offset + (uint64_t)h * cache->plan.gone_room;
    return known == 0 ? KVL_OK : kvl_buffer_read(cache->gone, first * sizeof *gone, known * sizeof *gone, gone);
}

kvl_status kvl_cache_picked(struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t *page, uint32_t *n)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t end = kvl_cache_places(cache, l, h);
    *n = layer->pages.tokens != 0 && end > (uint32_t)layer->pages.tokens ? kvl_pages_read(layer, end).read : 0;
    return *n == 0 ? KVL_OK : kvl_buffer_read(cache->picks, (2ull * h + 1) * layer->most_pages * sizeof *page, *n * sizeof *page, page);
}

/* ---- for checks ---- */

/* Places first .. first + count - 1 of every stream, decoded, [streams][count][channels]. */
static kvl_status decode_rows(struct kvl_cache *cache, uint32_t l, enum kvl_side side, uint32_t first, uint32_t count, float *rows)
{
    kvl_status status = KVL_OK;
    struct kvl_buffer *out = NULL;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint64_t bytes = (uint64_t)layer->n_stream * count * layer->side[side].record.channels * sizeof(float);
    KVL_TRY(need_store(cache, l));
    KVL_TRY(kvl_buffer_new(cache->device, "decoded rows", -1, KVL_MEM_SCRATCH, bytes, false, &out));
    struct call call = {0};
    push_slabs(&call, cache, l);
    push_table(&call, cache, l);
    push(&call, KVL_U32(first));
    push(&call, KVL_U32(count));
    push(&call, KVL_U32(side == KVL_SIDE_K));
    push(&call, KVL_BUF(cache->tables));
    push(&call, KVL_BUF(out));
    push_view(&call, cache, l, 1, 1);
    KVL_TRY(launch(cache, cache->kernels[l].decode_rows, layer->n_stream, count, 1, 1, (struct kvl_work){0}, &call));
    KVL_TRY(kvl_buffer_read(out, 0, bytes, rows));
done:
    kvl_buffer_free(&out);
    return status;
}

kvl_status kvl_cache_read_rows(struct kvl_cache *cache, uint32_t l, enum kvl_side side, uint32_t first, uint32_t count, float *rows)
{
    l = cache->plan.layer[kvl_kv_source(&cache->plan.dims, l)].leader;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    for (uint32_t h = 0; h < layer->n_stream; h++)
        if (first < layer->sink || first + count > sealed_of(cache, l, side, h))
            return kvl_fail(KVL_E_USAGE, "tokens %u..%u are not sealed (%u of head %u are)", first, first + count, sealed_of(cache, l, side, h), h);
    return decode_rows(cache, l, side, first, count, rows);
}

/* Places of stream h that are in full precision, from the layer's exact rows of the side. */
static void copy_exact(const struct kvl_cache *cache, uint32_t l, enum kvl_side s, uint32_t h, const uint8_t *exact, float *rows)
{
    const struct kvl_side_plan *side = &cache->plan.layer[l].side[s];
    const size_t stream = (size_t)l * cache->plan.dims.n_kv_head + h, channels = side->record.channels;
    const uint32_t spin = cache->lost[stream] - cache->lost_at_prompt[stream];
    struct kvl_segments at;
    kvl_cache_segments(cache, l, s, h, &at);
    exact += (uint64_t)h * (cache->plan.layer[l].sink + side->ring) * side->exact_row_bytes;
    for (uint32_t i = 0; i < at.places; i++) {
        if (i >= at.sink && i < at.sealed) continue;
        const uint8_t *row = exact + (i < at.sink ? i : cache->plan.layer[l].sink + (i + spin) % side->ring) * side->exact_row_bytes;
        if (cache->plan.config.exact) memcpy(rows + i * channels, row, channels * sizeof *rows);
        for (size_t c = 0; c < channels && !cache->plan.config.exact; c++) {
            uint16_t half;
            memcpy(&half, row + c * sizeof half, sizeof half);
            rows[i * channels + c] = kvl_half_to_float(half);
        }
    }
}

kvl_status kvl_cache_held_rows(struct kvl_cache *cache, uint32_t l, enum kvl_side s, uint32_t stride, float *rows)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const struct kvl_side_plan *side = &layer->side[s];
    const size_t channels = side->record.channels, exact_bytes = layer->n_stream * (uint64_t)(layer->sink + side->ring) * side->exact_row_bytes;
    const uint64_t exact_at = layer->exact_offset + (s == KVL_SIDE_K ? 0 : layer->n_stream * (uint64_t)(layer->sink + layer->side[KVL_SIDE_K].ring) * layer->side[KVL_SIDE_K].exact_row_bytes);
    uint32_t sealed = layer->sink;
    float *body = NULL;
    uint8_t *exact = NULL;
    for (uint32_t h = 0; h < layer->n_stream; h++) sealed = max_u32(sealed, sealed_of(cache, l, s, h));
    KVL_TRY(kvl_alloc(&body, layer->n_stream * (size_t)(sealed - layer->sink) * channels, sizeof *body));
    KVL_TRY(kvl_alloc(&exact, exact_bytes, 1));
    if (sealed > layer->sink) KVL_TRY(decode_rows(cache, l, s, layer->sink, sealed - layer->sink, body));
    if (exact_bytes != 0) KVL_TRY(kvl_buffer_read(cache->exact, exact_at, exact_bytes, exact));
    for (uint32_t h = 0; h < layer->n_stream; h++) {
        float *own = rows + (size_t)h * stride * channels;
        struct kvl_segments at;
        kvl_cache_segments(cache, l, s, h, &at);
        if (at.sealed > at.sink) memcpy(own + at.sink * channels, body + (size_t)h * (sealed - layer->sink) * channels, (at.sealed - at.sink) * channels * sizeof *own);
        copy_exact(cache, l, s, h, exact, own);
    }
done:
    kvl_free(&body);
    kvl_free(&exact);
    return status;
}

kvl_status kvl_cache_read_page(struct kvl_cache *cache, uint32_t l, enum kvl_side side, uint32_t head, uint32_t page, uint8_t *bytes)
{
    const struct kvl_layer_plan *layer = &cache->plan.layer[l];
    const uint32_t k_slots = layer->side[KVL_SIDE_K].slots, slots = layer->side[side].slots;
    if (page >= slots || head >= layer->n_stream) return kvl_fail(KVL_E_USAGE, "page %u of head %u: there are %u pages", page, head, slots);
    const uint64_t before = side == KVL_SIDE_K ? 0 : (uint64_t)layer->n_stream * k_slots;
    const uint64_t address = cache->plan.page_address[layer->table_offset + before + (uint64_t)head * slots + page];
    return kvl_buffer_read(cache->slab[kvl_pages_by_layer(&cache->plan) ? l : address >> 56], address & 0xffffffffffffffu, layer->side[side].page_bytes, bytes);
}
