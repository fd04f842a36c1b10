#include "select.h"
#include "mem.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

kvl_status kvl_amount_resolve(const struct kvl_amount *amount, uint32_t n_token, uint64_t token_bytes, uint32_t *target, double *fraction)
{
    const double n = n_token;
    const int given = (amount->kept >= 0) + (amount->removed >= 0) + (amount->tokens >= 0) + (amount->bytes >= 0);
    if (given != 1) return kvl_fail(KVL_E_USAGE, "a budget wants exactly one of kept=, removed=, tokens=, bytes=; %d are given", given);
    const bool is_share = amount->kept >= 0 || amount->removed >= 0;
    double tokens = amount->tokens;
    if (amount->bytes >= 0) tokens = floor(amount->bytes / (double)token_bytes);
    *fraction = amount->kept >= 0 ? amount->kept : amount->removed >= 0 ? 1.0 - amount->removed : tokens < n ? tokens / n : 1.0;
    const double wanted = is_share ? fmax(1.0, floor(n * *fraction)) : fmin(floor(tokens), n);
    *target = n_token == 0 ? 0 : (uint32_t)wanted;
    return KVL_OK;
}

/* ---- the best ---- */

static int better_first(const void *a, const void *b)
{
    const struct kvl_ranked *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return (x->at > y->at) - (x->at < y->at);
}

static int by_position(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

uint32_t kvl_select_top(const float *score, uint32_t n, uint32_t k, struct kvl_ranked *room, uint32_t *kept)
{
    const uint32_t n_kept = k < n ? k : n;
    for (uint32_t i = 0; i < n; i++) room[i] = (struct kvl_ranked){isnan(score[i]) ? -INFINITY : score[i], i};
    qsort(room, n, sizeof *room, better_first);
    for (uint32_t i = 0; i < n_kept; i++) kept[i] = room[i].at;
    qsort(kept, n_kept, sizeof *kept, by_position);
    return n_kept;
}

/* ---- one layer ---- */

void kvl_selection_free(struct kvl_selection *selection)
{
    kvl_free(&selection->offset);
    kvl_free(&selection->token);
    kvl_free(&selection->score);
    kvl_free(&selection->mass_lost);
    kvl_free(&selection->output_error);
}

static const struct kvl_score *score_of(const struct kvl_instance *instance) { return (const struct kvl_score *)instance->plugin; }

void kvl_keep_needs(const struct kvl_layer_spec *spec, struct kvl_score_needs *out)
{
    *out = (struct kvl_score_needs){.struct_size = sizeof *out};
    for (uint32_t i = 0; i < spec->n_keep; i++) {
        struct kvl_score_needs one = {.struct_size = sizeof one};
        const struct kvl_score *score = score_of(&spec->keep[i]);
        if (score->needs != NULL) score->needs(spec->keep[i].priv, &one);
        out->what |= one.what;
        if (one.queries > out->queries) out->queries = one.queries;
        if (one.first_query > out->first_query) out->first_query = one.first_query;
        if (one.normals > out->normals) out->normals = one.normals;
        if (one.recent_queries > out->recent_queries) out->recent_queries = one.recent_queries;
        if (one.what & KVL_NEED_REPETITION) {
            out->repeat_tokens = one.repeat_tokens;
            out->repeat_lead = one.repeat_lead;
            out->repeat_first = one.repeat_first;
            out->repeat_later = one.repeat_later;
            out->repeat_tail = one.repeat_tail;
        }
    }
}

uint32_t kvl_repetition_bound(const struct kvl_score_needs *needs, uint32_t n_token)
{
    if (!(needs->what & KVL_NEED_REPETITION)) return 0;
    const size_t first = strlen(needs->repeat_first), later = strlen(needs->repeat_later) + needs->repeat_lead;
    const size_t request = (first > later ? first : later) + strlen(needs->repeat_tail);
    return (uint32_t)request + (needs->repeat_tokens < n_token ? needs->repeat_tokens : n_token);
}

bool kvl_score_runs(const struct kvl_score *score)
{
    return score->head.struct_size >= offsetof(struct kvl_score, running) + sizeof score->running && score->running != NULL;
}

bool kvl_keep_splits(const struct kvl_layer_spec *spec)
{
    return spec->n_keep != 0 && ((const struct kvl_budget *)spec->budget.plugin)->split != NULL;
}

kvl_status kvl_keep_running(const struct kvl_layer_spec *spec, uint32_t target, struct kvl_score_running *out)
{
    const struct kvl_score *score = score_of(&spec->keep[0]);
    *out = (struct kvl_score_running){.struct_size = sizeof *out};
    return kvl_score_runs(score) && score->running(spec->keep[0].priv, target, out) != 0 ? KVL_E_UNSUPPORTED : KVL_OK;
}

bool kvl_keep_by_host(const struct kvl_layer_spec *spec)
{
    struct kvl_score_running running;
    if (spec->n_keep == 0 || spec->when == KVL_WHEN_PREFILL) return false;
    return kvl_keep_running(spec, 1, &running) != KVL_OK || spec->n_keep > 1 || kvl_keep_splits(spec) || running.source == 0 || running.by_ref != 0 ||
           (running.source == KVL_RUN_KEYS && spec->rope == KVL_STORE_PRE_ROPE);
}

uint32_t kvl_keep_recent(const struct kvl_layer_spec *spec)
{
    struct kvl_score_needs needs;
    if (!kvl_keep_by_host(spec)) return 0;
    kvl_keep_needs(spec, &needs);
    const uint32_t queries = needs.what & KVL_NEED_QUERIES ? needs.queries : 0, stats = needs.what & KVL_NEED_QUERY_STATS ? needs.recent_queries : 0;
    return queries > stats ? queries : stats;
}

/* A plug-in returned non-zero: its reason, if it gave one. */
static kvl_status failed(const struct kvl_plugin_head *plugin)
{
    if (*kvl_error_text() != '\0') return KVL_E_USAGE;
    return kvl_fail(KVL_E_VERIFY, "%s: the plug-in failed without a reason", plugin->name);
}

static kvl_status layer_target(const struct kvl_layer_spec *spec, const struct kvl_budget_input *in, uint32_t *target)
{
    const struct kvl_budget *budget = (const struct kvl_budget *)spec->budget.plugin;
    *target = in->target;
    if (budget->layer_target != NULL && budget->layer_target(spec->budget.priv, in, target) != 0) return failed(spec->budget.plugin);
    if (*target > in->n_token) *target = in->n_token;
    return KVL_OK;
}

kvl_status kvl_layer_target(const struct kvl_layer_spec *spec, uint32_t layer, uint32_t n_layer, uint32_t n_token, uint32_t n_kv_head,
                            uint64_t token_bytes, uint32_t *target)
{
    struct kvl_budget_input in = {.struct_size = sizeof in, .layer = layer, .n_layer = n_layer, .n_token = n_token, .n_kv_head = n_kv_head};
    *target = n_token;
    if (spec->n_keep == 0) return KVL_OK;
    const kvl_status status = kvl_amount_resolve(spec->budget.priv, n_token, token_bytes, &in.target, &in.fraction);
    return status == KVL_OK ? layer_target(spec, &in, target) : status;
}

/* Sinks stay whatever they score. */
static void protect_sinks(const struct kvl_layer_spec *spec, const struct kvl_score_input *in, float *score)
{
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = 0; t < spec->sink && t < in->n_token; t++) score[(size_t)h * in->n_token + t] = FLT_MAX;
}

static kvl_status run_base(const struct kvl_layer_spec *spec, const struct kvl_score_input *in, float *score)
{
    return score_of(&spec->keep[0])->ref(spec->keep[0].priv, in, score) != 0 ? failed(spec->keep[0].plugin) : KVL_OK;
}

static kvl_status run_split(const struct kvl_layer_spec *spec, const struct kvl_budget_input *in, float *score, uint32_t *target)
{
    const struct kvl_budget *budget = (const struct kvl_budget *)spec->budget.plugin;
    return budget->split != NULL && budget->split(spec->budget.priv, in, score, target) != 0 ? failed(spec->budget.plugin) : KVL_OK;
}

static kvl_status run_wrappers(const struct kvl_layer_spec *spec, const struct kvl_score_input *in, float *score, uint32_t *target)
{
    for (uint32_t i = 1; i < spec->n_keep; i++)
        if (score_of(&spec->keep[i])->wrap(spec->keep[i].priv, in, score, target) != 0) return failed(spec->keep[i].plugin);
    return KVL_OK;
}

/* A wrapper's whole chunks may be more than a head's share; while tokens are decoded that is what there is room for. */
static void limit_to_shares(const uint32_t *share, uint32_t heads, uint32_t *target)
{
    for (uint32_t h = 0; h < heads; h++) target[h] = target[h] < share[h] ? target[h] : share[h];
}

/* Base score, head split, wrappers: score [H][T] and target [H] are then what each head is to be cut by. */
static kvl_status run_scores(const struct kvl_layer_spec *spec, const struct kvl_score_input *in, const struct kvl_budget_input *budget_in,
                             float *score, float *base, uint32_t *target, uint32_t *share)
{
    kvl_status status = KVL_OK;
    KVL_TRY(run_base(spec, in, score));
    memcpy(base, score, (size_t)in->n_kv_head * in->n_token * sizeof *score);
    protect_sinks(spec, in, score);
    KVL_TRY(run_split(spec, budget_in, score, target));
    memcpy(share, target, in->n_kv_head * sizeof *share);
    KVL_TRY(run_wrappers(spec, in, score, target));
    if (spec->n_keep > 1) protect_sinks(spec, in, score);
    if (spec->when != KVL_WHEN_PREFILL) limit_to_shares(share, in->n_kv_head, target);
done:
    return status;
}

kvl_status kvl_select_newest(const struct kvl_score_input *in, uint32_t n, struct kvl_selection *out)
{
    kvl_status status = KVL_OK;
    const uint32_t count = n < in->n_token ? n : in->n_token, heads = in->n_kv_head;
    *out = (struct kvl_selection){.n_token = in->n_token, .n_kv_head = heads, .target = count};
    KVL_TRY(kvl_alloc(&out->offset, heads + 1u, sizeof *out->offset));
    KVL_TRY(kvl_alloc(&out->token, (size_t)heads * count, sizeof *out->token));
    for (uint32_t h = 0; h < heads; h++) {
        out->offset[h + 1] = (h + 1) * count;
        for (uint32_t i = 0; i < count; i++) out->token[(size_t)h * count + i] = in->n_token - count + i;
    }
done:
    if (status != KVL_OK) kvl_selection_free(out);
    return status;
}

kvl_status kvl_select_layer(const struct kvl_layer_spec *spec, struct kvl_score_input *in, uint64_t token_bytes, struct kvl_selection *out)
{
    kvl_status status = KVL_OK;
    const uint32_t n = in->n_token, heads = in->n_kv_head;
    struct kvl_ranked *room = NULL;
    float *score = NULL;
    uint32_t *target = NULL; /* [2][H]: and shares before wrappers */
    if (spec->n_keep == 0) return kvl_select_newest(in, n, out);
    *out = (struct kvl_selection){.n_token = n, .n_kv_head = heads};
    KVL_TRY(kvl_alloc(&out->offset, heads + 1u, sizeof *out->offset));
    struct kvl_budget_input budget = {
        .struct_size = sizeof budget, .layer = in->layer, .n_layer = in->n_layer, .n_token = n, .n_kv_head = heads};
    KVL_TRY(kvl_amount_resolve(spec->budget.priv, n, token_bytes, &budget.target, &budget.fraction));
    KVL_TRY(layer_target(spec, &budget, &out->target));
    in->target = out->target;
    in->fraction = budget.fraction;
    KVL_TRY(kvl_alloc(&score, (size_t)heads * n, sizeof *score));
    KVL_TRY(kvl_alloc(&out->score, (size_t)heads * n, sizeof *out->score));
    KVL_TRY(kvl_alloc(&target, 2 * (size_t)heads, sizeof *target));
    KVL_TRY(kvl_alloc(&room, n, sizeof *room));
    KVL_TRY(kvl_alloc(&out->token, (size_t)heads * n, sizeof *out->token));
    for (uint32_t h = 0; h < heads; h++) target[h] = out->target;
    KVL_TRY(run_scores(spec, in, &budget, score, out->score, target, target + heads));
    for (uint32_t h = 0; h < heads; h++)
        out->offset[h + 1] = out->offset[h] + kvl_select_top(score + (size_t)h * n, n, target[h], room, out->token + out->offset[h]);
done:
    kvl_free(&room);
    kvl_free(&score);
    kvl_free(&target);
    if (status != KVL_OK) kvl_selection_free(out);
    return status;
}

/* ---- tokens that heads have while others are decoded ---- */

static void protect_held(const struct kvl_held *held, float *number)
{
    for (uint32_t h = 0; h < held->n_kv_head; h++)
        for (uint32_t t = 0; t < held->count[h]; t++)
            if (held->stays[(size_t)h * held->stride + t]) number[(size_t)h * held->stride + t] = FLT_MAX;
}

/* The i-th input's first head. */
static uint32_t head_of(const struct kvl_held *held, uint32_t i) { return i * (held->n_kv_head / held->n_in); }

/* Behind a shorter head's tokens stand some that none would keep. */
static kvl_status held_bases(const struct kvl_layer_spec *spec, const struct kvl_held *held, float *number)
{
    kvl_status status = KVL_OK;
    if (held->number != NULL) memcpy(number, held->number, (size_t)held->n_kv_head * held->stride * sizeof *number);
    for (uint32_t i = 0; i < held->n_in && held->number == NULL; i++) KVL_TRY(run_base(spec, &held->in[i], number + (size_t)head_of(held, i) * held->stride));
    for (uint32_t h = 0; h < held->n_kv_head; h++)
        for (uint32_t t = held->count[h]; t < held->stride; t++) number[(size_t)h * held->stride + t] = -INFINITY;
done:
    return status;
}

kvl_status kvl_select_held(const struct kvl_layer_spec *spec, const struct kvl_held *held, uint32_t layer_target, float *number, uint32_t *target)
{
    kvl_status status = KVL_OK;
    const uint32_t heads = held->n_kv_head;
    const double fraction = layer_target < held->stride ? (double)layer_target / held->stride : 1.0;
    const struct kvl_budget_input budget = {.struct_size = sizeof budget, .layer = held->in->layer, .n_layer = held->in->n_layer, .n_token = held->stride,
                                            .n_kv_head = heads, .target = layer_target, .fraction = fraction};
    uint32_t *share = NULL;
    KVL_TRY(kvl_alloc(&share, heads, sizeof *share));
    for (uint32_t i = 0; i < held->n_in; i++) held->in[i].target = layer_target;
    for (uint32_t i = 0; i < held->n_in; i++) held->in[i].fraction = fraction;
    for (uint32_t h = 0; h < heads; h++) target[h] = layer_target;
    KVL_TRY(held_bases(spec, held, number));
    protect_held(held, number);
    KVL_TRY(run_split(spec, &budget, number, target));
    for (uint32_t h = 0; h < heads; h++) share[h] = target[h] = target[h] < held->count[h] ? target[h] : held->count[h];
    for (uint32_t i = 0; i < held->n_in; i++) {
        const uint32_t h = head_of(held, i);
        if (kvl_keep_splits(spec)) held->in[i].fraction = (double)share[h] / held->count[h];
        KVL_TRY(run_wrappers(spec, &held->in[i], number + (size_t)h * held->stride, target + h));
    }
    limit_to_shares(share, heads, target);
    protect_held(held, number);
done:
    kvl_free(&share);
    return status;
}
