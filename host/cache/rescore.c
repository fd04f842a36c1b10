#include "rescore.h"
#include "evidence.h"
#include "mem.h"
#include "rng.h"
#include <float.h>
#include <stdlib.h>
#include <string.h>

static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

static const struct kvl_layer_spec *spec_of(const struct kvl_cache_plan *plan, uint32_t l) { return kvl_spec_layer(plan->config.spec, l); }

/* Whether a token's number is its score: it was found when the token was stored. */
static bool number_is_score(const struct kvl_layer_plan *layer)
{
    return layer->running.source == KVL_RUN_STORED || layer->running.source == KVL_RUN_POSITION;
}

/* ---- what scores read ---- */

/* Inputs of scores: one of all heads, or one of each. */
struct inputs {
    const struct kvl_cache_plan *plan;
    const struct kvl_layer_plan *layer;
    const struct kvl_held_layer *held;
    const struct kvl_prompt_model *model;
    struct kvl_rope rope;
    struct kvl_score_needs needs;
    uint32_t n_in, heads, group, d; /* heads: of one input */
    struct kvl_score_input *in;     /* [n_in] */
    float *k_pre, *q, *by_head, *mean, *covariance, *sum, *normal, *w_o, *number;
};

static bool wants(const struct inputs *x, uint32_t what) { return x->needs.what & what; }

/* Where RoPE has turned head h's i-th token. */
static uint32_t turned_to(const struct inputs *x, uint32_t h, uint32_t i)
{
    return x->layer->pos == KVL_POS_COMPACT ? i : x->held->position[(size_t)h * x->held->stride + i];
}

static kvl_status turn_keys_back(struct inputs *x)
{
    kvl_status status = KVL_OK;
    const size_t n = (size_t)x->plan->dims.n_kv_head * x->held->stride * x->d;
    KVL_TRY(kvl_alloc(&x->k_pre, n, sizeof *x->k_pre));
    memcpy(x->k_pre, x->held->k, n * sizeof *x->k_pre);
    for (uint32_t h = 0; h < x->plan->dims.n_kv_head; h++)
        for (uint32_t i = 0; i < x->held->count[h]; i++) kvl_reference_turn(x->k_pre + ((size_t)h * x->held->stride + i) * x->d, x->rope, turned_to(x, h, i), true);
done:
    return status;
}

/* Of the newest `most` tokens, those that every head from h on has: their queries see what is older and is still there. */
static uint32_t queries_held(const struct inputs *x, uint32_t first, uint32_t most)
{
    for (uint32_t h = first; h < first + x->heads; h++) {
        const uint32_t *position = x->held->position + (size_t)h * x->held->stride, count = x->held->count[h];
        uint32_t n = 0;
        while (n < most && n < count && position[count - 1 - n] == x->held->seen - 1 - n) n++;
        most = n;
    }
    return most;
}

/* Queries of the n newest tokens as attention sees them, of the heads of input i, to q [heads * group][n][D]. */
static void turn_queries(const struct inputs *x, uint32_t i, uint32_t n, float *q)
{
    for (uint32_t r = 0; r < x->heads * x->group; r++)
        for (uint32_t t = 0; t < n; t++, q += x->d) {
            const uint32_t head = i * x->heads * x->group + r, h = head / x->group;
            memcpy(q, x->held->q + ((size_t)(x->held->n_query - n + t) * x->plan->dims.n_head + head) * x->d, x->d * sizeof *q);
            kvl_reference_turn(q, x->rope, turned_to(x, h, x->held->count[h] - n + t), false);
        }
}

static kvl_status query_statistics(struct inputs *x)
{
    kvl_status status = KVL_OK;
    const uint32_t heads = x->plan->dims.n_head, n = min_u32(x->needs.recent_queries, x->held->n_query), before = x->held->seen - n;
    const uint32_t first = x->needs.first_query > before ? x->needs.first_query - before : 0;
    KVL_TRY(kvl_alloc(&x->by_head, (size_t)heads * n * x->d, sizeof(float)));
    KVL_TRY(kvl_alloc(&x->mean, (size_t)heads * x->d, sizeof(float)));
    KVL_TRY(kvl_alloc(&x->covariance, (size_t)heads * x->d * x->d, sizeof(float)));
    for (uint32_t r = 0; r < heads; r++)
        for (uint32_t t = 0; t < n; t++)
            memcpy(x->by_head + ((size_t)r * n + t) * x->d, x->held->q + ((size_t)(x->held->n_query - n + t) * heads + r) * x->d, x->d * sizeof(float));
    KVL_TRY(kvl_query_stats(x->by_head, heads, n, x->d, first, x->mean, x->covariance));
done:
    return status;
}

/* What each token has got from all queries since it came: the device has it of a kv head, each of whose query heads is said to have given the same. */
static kvl_status attention_sums(struct inputs *x)
{
    kvl_status status = KVL_OK;
    const uint32_t heads = x->plan->dims.n_kv_head;
    KVL_TRY(kvl_alloc(&x->sum, (size_t)heads * x->group * x->held->stride, sizeof(float)));
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t g = 0; g < x->group; g++)
            for (uint32_t t = 0; t < x->held->count[h]; t++)
                x->sum[(size_t)h * x->group * x->held->stride + (size_t)g * x->held->count[h] + t] = x->held->number[(size_t)h * x->held->stride + t] / (float)x->group;
done:
    return status;
}

static kvl_status normal_numbers(struct inputs *x, uint32_t l)
{
    const uint64_t n = (uint64_t)x->plan->dims.n_kv_head * x->d * x->needs.normals;
    const kvl_status status = kvl_alloc(&x->normal, n, sizeof *x->normal);
    for (uint64_t i = 0; status == KVL_OK && i < n; i++) x->normal[i] = (float)kvl_rng_normal(l, i);
    return status;
}

/* The output matrix's columns for each input's heads, [n_in][E][heads * group * D]. */
static kvl_status output_columns(struct inputs *x)
{
    const size_t width = (size_t)x->heads * x->group * x->d, row = x->n_in * width;
    const kvl_status status = kvl_alloc(&x->w_o, x->model->n_embd * row, sizeof *x->w_o);
    for (uint32_t i = 0; status == KVL_OK && i < x->n_in; i++)
        for (uint32_t e = 0; e < x->model->n_embd; e++)
            memcpy(x->w_o + ((size_t)i * x->model->n_embd + e) * width, x->held->w_o + e * row + i * width, width * sizeof *x->w_o);
    return status;
}

/* NULL stays NULL. */
static const float *behind(const float *x, size_t n) { return x != NULL ? x + n : NULL; }

static void fill_input(const struct inputs *x, uint32_t i)
{
    const struct kvl_held_layer *held = x->held;
    const uint32_t h = i * x->heads, heads = x->heads * x->group, n_query = wants(x, KVL_NEED_QUERIES) ? queries_held(x, h, min_u32(x->needs.queries, held->n_query)) : 0;
    const size_t at = (size_t)h * held->stride * x->d, d = x->d;
    float *q = x->q + (size_t)h * x->group * held->n_query * d;
    turn_queries(x, i, n_query, q);
    x->in[i] = (struct kvl_score_input){
        .struct_size = sizeof *x->in, .layer = x->layer->rank, .n_layer = x->plan->n_budgeted, .n_token = held->count[h], .n_head = heads, .n_kv_head = x->heads, .head_dim = x->d,
        .n_embd = x->model->n_embd, .rope_dim = x->model->rope_dim, .n_query = n_query, .k = behind(held->k, at), .k_pre = behind(x->k_pre, at), .v = behind(held->v, at), .q = q,
        .q_mean = behind(x->mean, h * x->group * d), .q_cov = behind(x->covariance, h * x->group * d * d),
        .column_sum = behind(x->sum, (size_t)h * x->group * held->stride), .w_o = behind(x->w_o, i * x->model->n_embd * heads * d),
        .normal = behind(x->normal, h * d * x->needs.normals), .rope_freq = x->model->rope_freq, .position = held->position + (size_t)h * held->stride, .n_seen = held->seen,
        .next = x->layer->pos == KVL_POS_COMPACT ? held->count[h] : held->seen};
}

static kvl_status make_inputs(struct inputs *x, uint32_t l)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&x->in, x->n_in, sizeof *x->in));
    KVL_TRY(kvl_alloc(&x->q, (size_t)x->plan->dims.n_head * x->held->n_query * x->d, sizeof *x->q));
    if (wants(x, KVL_NEED_K)) KVL_TRY(turn_keys_back(x));
    if (wants(x, KVL_NEED_QUERY_STATS)) KVL_TRY(query_statistics(x));
    if (wants(x, KVL_NEED_COLUMN_SUMS)) KVL_TRY(attention_sums(x));
    if (wants(x, KVL_NEED_NORMALS)) KVL_TRY(normal_numbers(x, l));
    if (wants(x, KVL_NEED_OUTPUT)) KVL_TRY(output_columns(x));
    for (uint32_t i = 0; i < x->n_in; i++) fill_input(x, i);
done:
    return status;
}

static void free_inputs(struct inputs *x)
{
    float **all[] = {&x->k_pre, &x->q, &x->by_head, &x->mean, &x->covariance, &x->sum, &x->normal, &x->w_o, &x->number};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) kvl_free(all[i]);
    kvl_free(&x->in);
}

/* Numbers as scores, where first and newest tokens are not to go. */
static kvl_status numbers_as_scores(struct inputs *x, const struct kvl_layer_spec *spec, uint32_t target)
{
    kvl_status status = KVL_OK;
    const struct kvl_held_layer *held = x->held;
    struct kvl_score_running running;
    KVL_TRY(kvl_keep_running(spec, target, &running));
    KVL_TRY(kvl_alloc(&x->number, (size_t)x->plan->dims.n_kv_head * held->stride, sizeof *x->number));
    for (uint32_t h = 0; h < x->plan->dims.n_kv_head; h++)
        for (size_t i = (size_t)h * held->stride; i < (size_t)h * held->stride + held->count[h]; i++)
            x->number[i] = held->position[i] < running.first || (uint64_t)held->position[i] + running.newest >= held->seen ? FLT_MAX : held->number[i];
done:
    return status;
}

kvl_status kvl_rescore_numbers(const struct kvl_cache_plan *plan, uint32_t l, const struct kvl_held_layer *held, const struct kvl_prompt_model *model, struct kvl_rope rope,
                               uint32_t layer_target, float *number, uint32_t *target)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_spec *spec = spec_of(plan, l);
    const uint32_t n_in = kvl_keep_splits(spec) ? plan->dims.n_kv_head : 1;
    struct inputs x = {.plan = plan, .layer = &plan->layer[l], .held = held, .model = model, .rope = rope, .n_in = n_in, .heads = plan->dims.n_kv_head / n_in,
                       .group = plan->dims.n_head / plan->dims.n_kv_head, .d = plan->dims.head_dim};
    kvl_keep_needs(spec, &x.needs);
    KVL_TRY(make_inputs(&x, l));
    if (number_is_score(x.layer)) KVL_TRY(numbers_as_scores(&x, spec, layer_target));
    const struct kvl_held tokens = {x.in, n_in, plan->dims.n_kv_head, held->stride, held->count, held->stays, x.number};
    KVL_TRY(kvl_select_held(spec, &tokens, layer_target, number, target));
done:
    free_inputs(&x);
    return status;
}

/* ---- from the cache, and back ---- */

struct ordered {
    uint32_t position, place;
};

static int by_age(const void *a, const void *b)
{
    const struct ordered *x = a, *y = b;
    return (x->position > y->position) - (x->position < y->position);
}

/* A layer's heads as the cache has them. */
struct layer_state {
    struct kvl_cache *cache;
    const struct kvl_layer_plan *layer;
    uint32_t l, heads, stride;
    struct kvl_rope rope;
    uint32_t *count, *position;
    struct ordered *order; /* [H][stride] */
    bool *stays;
    float *k, *v, *number, *q;
};

static kvl_status read_order(struct layer_state *s)
{
    kvl_status status = KVL_OK;
    uint32_t *position = NULL;
    KVL_TRY(kvl_alloc(&position, s->stride, sizeof *position));
    for (uint32_t h = 0; h < s->heads; h++) {
        struct ordered *order = s->order + (size_t)h * s->stride;
        struct kvl_segments at;
        kvl_cache_segments(s->cache, s->l, KVL_SIDE_K, h, &at);
        KVL_TRY(kvl_cache_positions(s->cache, s->l, h, position));
        for (uint32_t i = 0; i < at.places; i++) order[i] = (struct ordered){position[i], i};
        qsort(order, at.places, sizeof *order, by_age);
        for (uint32_t i = 0; i < at.places; i++) {
            s->position[(size_t)h * s->stride + i] = order[i].position;
            s->stays[(size_t)h * s->stride + i] = order[i].place < at.sink || order[i].place >= at.sealed;
        }
    }
done:
    kvl_free(&position);
    return status;
}

/* Rows of a side, by age. */
static kvl_status read_side(struct layer_state *s, enum kvl_side side, float **out)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = kvl_cache_plan(s->cache);
    const size_t d = plan->dims.head_dim;
    float *records = NULL, *aged = NULL;
    uint32_t *rank = NULL;
    KVL_TRY(kvl_alloc(&records, (size_t)s->heads * s->stride * d, sizeof *records));
    KVL_TRY(kvl_alloc(&aged, s->stride * d, sizeof *aged));
    KVL_TRY(kvl_alloc(out, (size_t)s->heads * s->stride * d, sizeof **out));
    KVL_TRY(kvl_alloc(&rank, s->stride, sizeof *rank));
    for (uint32_t i = 0; i < s->stride; i++) rank[i] = i; /* keys stored before RoPE are turned by it: pos=compact */
    KVL_TRY(kvl_cache_held_rows(s->cache, s->l, side, s->stride, records));
    for (uint32_t h = 0; h < s->heads; h++) {
        const size_t first = (size_t)h * s->stride;
        for (uint32_t i = 0; i < s->count[h]; i++) memcpy(aged + i * d, records + (first + s->order[first + i].place) * d, d * sizeof *aged);
        KVL_TRY(kvl_reference_rows(plan, s->l, side, h, s->count[h], rank, s->rope, aged, *out + first * d));
    }
done:
    kvl_free(&records);
    kvl_free(&aged);
    kvl_free(&rank);
    return status;
}

/* by_place: from numbers by place to s->number, or back into the cache. */
static kvl_status move_numbers(struct layer_state *s, float *number, bool into_cache)
{
    kvl_status status = KVL_OK;
    float *by_place = NULL;
    KVL_TRY(kvl_alloc(&by_place, s->stride, sizeof *by_place));
    for (uint32_t h = 0; h < s->heads; h++) {
        const struct ordered *order = s->order + (size_t)h * s->stride;
        float *own = number + (size_t)h * s->stride;
        if (!into_cache) KVL_TRY(kvl_cache_numbers(s->cache, s->l, h, by_place));
        for (uint32_t i = 0; i < s->count[h]; i++)
            if (into_cache) by_place[order[i].place] = own[i];
            else own[i] = by_place[order[i].place];
        if (into_cache) KVL_TRY(kvl_cache_set_numbers(s->cache, s->l, h, by_place));
    }
done:
    kvl_free(&by_place);
    return status;
}

static kvl_status read_state(struct layer_state *s)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = kvl_cache_plan(s->cache);
    struct kvl_score_needs needs;
    kvl_keep_needs(spec_of(plan, s->l), &needs);
    const size_t n = (size_t)s->heads * s->stride;
    KVL_TRY(kvl_alloc(&s->position, n, sizeof *s->position));
    KVL_TRY(kvl_alloc(&s->order, n, sizeof *s->order));
    KVL_TRY(kvl_alloc(&s->stays, n, sizeof *s->stays));
    KVL_TRY(read_order(s));
    if (needs.what & (KVL_NEED_K | KVL_NEED_QUERIES)) KVL_TRY(read_side(s, KVL_SIDE_K, &s->k));
    if (needs.what & KVL_NEED_V) KVL_TRY(read_side(s, KVL_SIDE_V, &s->v));
    if (s->layer->running.source != 0) {
        KVL_TRY(kvl_alloc(&s->number, n, sizeof *s->number));
        KVL_TRY(move_numbers(s, s->number, false));
    }
    const uint32_t n_query = min_u32(s->layer->recent, kvl_cache_position(s->cache));
    KVL_TRY(kvl_alloc(&s->q, (size_t)n_query * plan->dims.n_head * plan->dims.head_dim, sizeof *s->q));
    KVL_TRY(kvl_cache_recent(s->cache, s->l, n_query, s->q));
done:
    return status;
}

/* Numbers that go on, back to the tokens that have stayed: their places are others now. */
static kvl_status restore_numbers(struct layer_state *s)
{
    kvl_status status = KVL_OK;
    uint32_t *position = NULL;
    float *number = NULL;
    if (s->number == NULL) return KVL_OK;
    KVL_TRY(kvl_alloc(&position, s->stride, sizeof *position));
    KVL_TRY(kvl_alloc(&number, s->stride, sizeof *number));
    for (uint32_t h = 0; h < s->heads; h++) {
        KVL_TRY(kvl_cache_positions(s->cache, s->l, h, position));
        for (uint32_t i = 0; i < kvl_cache_places(s->cache, s->l, h); i++) {
            const struct ordered key = {position[i], 0};
            const struct ordered *first = s->order + (size_t)h * s->stride, *found = bsearch(&key, first, s->count[h], sizeof key, by_age);
            number[i] = s->number[(size_t)h * s->stride + (size_t)(found - first)];
        }
        KVL_TRY(kvl_cache_set_numbers(s->cache, s->l, h, number));
    }
done:
    kvl_free(&position);
    kvl_free(&number);
    return status;
}

static void free_state(struct layer_state *s)
{
    kvl_free(&s->count);
    kvl_free(&s->position);
    kvl_free(&s->order);
    kvl_free(&s->stays);
    kvl_free(&s->k);
    kvl_free(&s->v);
    kvl_free(&s->number);
    kvl_free(&s->q);
}

static kvl_status rescore(struct layer_state *s, const struct kvl_prompt_model *model, const float *w_o, uint32_t layer_target, uint32_t *target)
{
    kvl_status status = KVL_OK;
    float *number = NULL;
    KVL_TRY(read_state(s));
    const struct kvl_held_layer held = {kvl_cache_position(s->cache), s->stride, s->count, s->position, s->stays, s->k, s->v, s->number, s->q,
                                        min_u32(s->layer->recent, kvl_cache_position(s->cache)), w_o};
    KVL_TRY(kvl_alloc(&number, (size_t)s->heads * s->stride, sizeof *number));
    KVL_TRY(kvl_rescore_numbers(kvl_cache_plan(s->cache), s->l, &held, model, s->rope, layer_target, number, target));
    KVL_TRY(move_numbers(s, number, true));
done:
    kvl_free(&number);
    return status;
}

bool kvl_rescore_due(const struct kvl_cache *cache, uint32_t l)
{
    uint32_t target;
    return kvl_cache_plan(cache)->layer[l].by_host && kvl_cache_target(cache, l, &target) == KVL_OK && target != UINT32_MAX;
}

kvl_status kvl_rescore_layer(struct kvl_cache *cache, uint32_t l, const struct kvl_prompt_model *model, struct kvl_rope rope, const float *w_o)
{
    kvl_status status = KVL_OK;
    struct layer_state s = {.cache = cache, .layer = &kvl_cache_plan(cache)->layer[l], .l = l, .heads = kvl_cache_plan(cache)->dims.n_kv_head, .rope = rope};
    uint32_t layer_target, *target = NULL;
    uint64_t all = 0;
    KVL_TRY(kvl_alloc(&s.count, s.heads, sizeof *s.count));
    KVL_TRY(kvl_alloc(&target, s.heads, sizeof *target));
    KVL_TRY(kvl_cache_target(cache, l, &layer_target));
    for (uint32_t h = 0; h < s.heads; h++) {
        all += target[h] = s.count[h] = kvl_cache_places(cache, l, h);
        s.stride = s.count[h] > s.stride ? s.count[h] : s.stride;
    }
    const bool fits = all <= (uint64_t)s.heads * layer_target;
    if (!fits) KVL_TRY(rescore(&s, model, w_o, layer_target, target));
    KVL_TRY(kvl_cache_drop(cache, l, target));
    if (!fits) KVL_TRY(restore_numbers(&s));
done:
    free_state(&s);
    kvl_free(&target);
    return status;
}
