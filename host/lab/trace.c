#include "trace.h"
#include "cache.h"
#include "log.h"
#include "mem.h"
#include "page.h"
#include "prompt.h"
#include "public_models.h"
#include "runrecord.h"
#include "sample.h"
#include "select.h"
#include "text.h"
#include <math.h>
#include <string.h>

/* Levels of a probability on the page, as characters from '0' on: level = sqrt(p) * LEVELS. */
enum { LEVELS = 63 };

struct trace {
    const struct kvl_rig *rig;
    const struct kvl_trace_config *config;
    struct kvl_session *session;
    int32_t *token;       /* [n_token] prompt, then what was generated */
    uint32_t n_token;
    float *logits;        /* [n_vocab] */
    uint32_t *position;   /* [n_token] of the places of a head */
    char *seen;           /* [n_token] a state each */
    float *row;           /* [n_token] probabilities of a query */
    char *attention;      /* [step][layer][head][position] levels */
    struct kvl_text last; /* the state at work, as the page has it */
    cJSON *states, *steps;
};

static const struct kvl_dims *dims_of(const struct trace *t) { return &t->rig->model->dims; }

static kvl_status no_memory(void) { return kvl_fail(KVL_E_MEMORY, "no memory for the trace"); }

/* Tokens that the cache has behind a step. */
static uint32_t position_of(const struct trace *t, uint32_t step) { return t->config->n_prompt + step; }

/* Where a step's levels begin. */
static size_t levels_before(const struct trace *t, uint32_t step)
{
    const size_t n = step, positions = n * t->config->n_prompt + n * (n - (n > 0)) / 2;
    return positions * dims_of(t)->n_layer * dims_of(t)->n_kv_head;
}

/* ---- what the cache holds ---- */

/* Positions of a head's tokens by place, for t->position. */
static kvl_status read_positions(struct trace *t, uint32_t l, uint32_t h)
{
    const struct kvl_cache *cache = kvl_session_cache(t->session);
    if (kvl_cache_plan(cache)->layer[l].cells != 0) return kvl_cache_positions(kvl_session_cache(t->session), l, h, t->position);
    const struct kvl_selection *kept = kvl_session_kept(t->session, l);
    const uint32_t n_kept = kept != NULL ? kept->offset[h + 1] - kept->offset[h] : 0, places = kvl_cache_places(cache, l, h);
    for (uint32_t i = 0; i < places; i++)
        t->position[i] = i < n_kept ? kept->token[kept->offset[h] + i] : kvl_cache_position(cache) - (places - i);
    return KVL_OK;
}

/* Appends a side's states as runs: "4s60c12t". */
static kvl_status append_side(struct trace *t, uint32_t l, enum kvl_side side, uint32_t h)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache *cache = kvl_session_cache(t->session);
    const struct kvl_cache_plan *plan = kvl_cache_plan(cache);
    const uint32_t n = kvl_cache_position(cache), stream = h / (plan->dims.n_kv_head / plan->layer[kvl_kv_source(&plan->dims, l)].n_stream);
    struct kvl_segments has;
    kvl_cache_segments(cache, l, (int)side < kvl_sides(&plan->dims) ? side : KVL_SIDE_K, stream, &has);
    memset(t->seen, 'x', n);
    for (uint32_t i = 0; i < has.places; i++)
        if (i < has.sink || i >= has.first) t->seen[t->position[i]] = i < has.sink ? 's' : i < has.sealed ? 'c' : 't';
    for (uint32_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && t->seen[end] == t->seen[i];) end++;
        KVL_TRY(kvl_text_printf(&t->last, "%u%c", end - i, t->seen[i]));
    }
done:
    return status;
}

/* The number of the text t->last among the states, where it is put if it is new. */
static kvl_status number_of_state(struct trace *t, int *number)
{
    cJSON *at = t->states->child;
    *number = 0;
    for (; at != NULL && strcmp(at->valuestring, t->last.data) != 0; at = at->next) ++*number;
    if (at != NULL || cJSON_AddItemToArray(t->states, cJSON_CreateString(t->last.data))) return KVL_OK;
    return no_memory();
}

static kvl_status add_step(struct trace *t)
{
    kvl_status status = KVL_OK;
    struct kvl_cache_bytes bytes;
    cJSON *step = cJSON_CreateObject(), *state;
    KVL_TRY(kvl_session_bytes(t->session, &bytes));
    cJSON_AddNumberToObject(step, "position", kvl_session_position(t->session));
    cJSON_AddNumberToObject(step, "resident_bytes", (double)bytes.resident);
    state = cJSON_AddArrayToObject(step, "state");
    for (uint32_t l = 0; l < dims_of(t)->n_layer; l++)
        for (uint32_t h = 0; h < dims_of(t)->n_kv_head; h++) {
            int number;
            t->last.size = 0;
            KVL_TRY(read_positions(t, l, h));
            KVL_TRY(append_side(t, l, KVL_SIDE_K, h));
            KVL_TRY(kvl_text_append(&t->last, "|", 1));
            KVL_TRY(append_side(t, l, KVL_SIDE_V, h));
            KVL_TRY(number_of_state(t, &number));
            if (!cJSON_AddItemToArray(state, cJSON_CreateNumber(number))) status = no_memory();
        }
    if (cJSON_AddItemToArray(t->steps, step))
        step = NULL;
    else
        status = no_memory();
done:
    cJSON_Delete(step);
    return status;
}

static kvl_status run_steps(struct trace *t)
{
    kvl_status status = KVL_OK;
    const struct kvl_trace_config *config = t->config;
    const struct kvl_sampler greedy = {.top_p = 1};
    struct kvl_progress progress;
    kvl_progress_start(&progress, "trace", "tok", t->n_token);
    for (uint32_t step = 0; step <= config->n_steps; step++) {
        const uint32_t n_new = step == 0 ? config->n_prompt : 1, end = position_of(t, step);
        status = kvl_session_forward(t->session, t->token + end - n_new, n_new, 1);
        if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted after %u of %u tokens: no page was written", end, t->n_token);
        KVL_TRY(status);
        KVL_TRY(add_step(t));
        if (step == config->n_steps) break;
        KVL_TRY(kvl_session_read_logits(t->session, 0, t->logits));
        KVL_TRY(kvl_sample(&greedy, t->logits, dims_of(t)->n_vocab, step, &t->token[end]));
        kvl_progress_update(&progress, end);
    }
done:
    kvl_progress_end(&progress);
    return status;
}

/* ---- what the newest queries look at ---- */

/* Adds one query head's probabilities over n keys, divided by `heads`, to row. */
static void add_probabilities(const float *q, const float *k, uint32_t n, uint32_t d, uint32_t heads, float *room, float *row)
{
    float top = -INFINITY;
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        float dot = 0.0f;
        for (uint32_t c = 0; c < d; c++) dot += q[c] * k[(size_t)i * d + c];
        room[i] = dot / sqrtf((float)d);
        top = fmaxf(top, room[i]);
    }
    for (uint32_t i = 0; i < n; i++) sum += exp((double)room[i] - top);
    for (uint32_t i = 0; i < n; i++) row[i] += (float)(exp((double)room[i] - top) / sum / heads);
}

static kvl_status see_layer(void *context, const struct kvl_score_input *in)
{
    struct trace *t = context;
    kvl_status status = KVL_OK;
    const uint32_t d = in->head_dim, group = in->n_head / in->n_kv_head;
    float *room = NULL;
    KVL_TRY(kvl_alloc(&room, in->n_token, sizeof *room));
    for (uint32_t step = 0; step <= t->config->n_steps; step++)
        for (uint32_t h = 0; h < in->n_kv_head; h++) {
            const uint32_t n = position_of(t, step);
            char *level = t->attention + levels_before(t, step) + ((size_t)in->layer * in->n_kv_head + h) * n;
            memset(t->row, 0, n * sizeof *t->row);
            for (uint32_t g = 0; g < group; g++)
                add_probabilities(in->q + ((size_t)(h * group + g) * in->n_query + in->n_query - in->n_token + n - 1) * d, in->k + (size_t)h * in->n_token * d, n,
                                  d, group, room, t->row);
            for (uint32_t i = 0; i < n; i++) level[i] = (char)('0' + lrintf(sqrtf(t->row[i]) * LEVELS));
        }
done:
    kvl_free(&room);
    return status;
}

/* The tokens once more as one prompt that nothing compresses. */
static kvl_status watch_attention(struct trace *t)
{
    kvl_status status = KVL_OK;
    const struct kvl_prompt_observer observer = {see_layer, t};
    struct kvl_spec *spec = NULL;
    struct kvl_session *session = NULL;
    KVL_TRY(kvl_spec_parse("f32", &spec));
    const struct kvl_session_config config = {.spec = spec, .n_ctx = t->n_token, .ubatch = t->n_token, .protocol = KVL_P3_PREFILL_EXACT,
                                              .exact = true, .allow_long = t->config->allow_long, .observer = &observer};
    KVL_TRY(kvl_session_new(t->rig->weights, &config, &session));
    KVL_TRY(kvl_session_forward(session, t->token, t->n_token, 0));
done:
    kvl_session_free(&session);
    kvl_spec_free(&spec);
    return status;
}

/* ---- the page's data ---- */

static kvl_status add_tokens(const struct trace *t, cJSON *page)
{
    kvl_status status = KVL_OK;
    struct kvl_text bytes = {0}, text = {0};
    cJSON *tokens = cJSON_AddArrayToObject(page, "tokens");
    for (uint32_t i = 0; i < t->n_token; i++) {
        cJSON *token = cJSON_CreateObject();
        bytes.size = text.size = 0;
        KVL_TRY(kvl_tokenizer_decode(t->rig->model->tokenizer, t->token[i], true, &bytes));
        KVL_TRY(kvl_text_append_utf8(&text, bytes.data != NULL ? bytes.data : "", bytes.size));
        cJSON_AddNumberToObject(token, "id", t->token[i]);
        cJSON_AddStringToObject(token, "text", text.data);
        cJSON_AddItemToArray(tokens, token);
    }
done:
    kvl_text_free(&bytes);
    kvl_text_free(&text);
    return status;
}

static void add_shape(cJSON *to, const char *name, const struct kvl_dims *dims)
{
    cJSON_AddStringToObject(to, "name", name);
    cJSON_AddNumberToObject(to, "n_layer", dims->n_layer);
    cJSON_AddNumberToObject(to, "n_head", dims->n_head);
    cJSON_AddNumberToObject(to, "n_kv_head", dims->n_kv_head);
    const bool latent = dims->mla.kv_rank != 0;
    cJSON_AddNumberToObject(to, "key_dim", latent ? dims->mla.content_dim + dims->rope_dim : dims->head_dim);
    cJSON_AddNumberToObject(to, "value_dim", latent ? dims->mla.value_dim : dims->head_dim);
    cJSON_AddNumberToObject(to, "joint", latent ? dims->mla.kv_rank + dims->rope_dim : 0); /* elements of a record that is key and value of all heads */
}

/* This model and some that people know, for the sizes of the schemes. */
static kvl_status add_shapes(const struct trace *t, cJSON *page)
{
    static const char *const known[] = {"llama-2-7b", "llama-3-8b", "llama-3-70b"};
    kvl_status status = KVL_OK;
    struct kvl_public_models models = {0};
    cJSON *shapes = cJSON_AddArrayToObject(page, "shapes"), *shape = cJSON_CreateObject();
    add_shape(cJSON_AddObjectToObject(page, "shape"), "this model", dims_of(t));
    add_shape(shape, "this model", dims_of(t));
    cJSON_AddItemToArray(shapes, shape);
    KVL_TRY(kvl_public_models_load(&models));
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const struct kvl_public_model *model = kvl_public_models_find(&models, known[i]);
        if (model == NULL) continue;
        shape = cJSON_CreateObject();
        add_shape(shape, known[i], &model->dims);
        cJSON_AddItemToArray(shapes, shape);
    }
done:
    kvl_public_models_free(&models);
    return status;
}

static kvl_status write_page(struct trace *t, const char *path)
{
    static const struct kvl_page_part parts[] = {{"@SCRIPT@", "host/lab/trace/script.js"}};
    kvl_status status = KVL_OK;
    struct kvl_text command = {0};
    cJSON *page = cJSON_CreateObject();
    KVL_TRY(kvl_command_line(&command));
    cJSON_AddStringToObject(page, "command", command.data);
    cJSON_AddStringToObject(page, "kv", t->config->kv);
    cJSON_AddStringToObject(page, "model", t->rig->model->name);
    cJSON_AddStringToObject(page, "device", kvl_device_caps(t->rig->device)->name);
    cJSON_AddNumberToObject(page, "n_prompt", t->config->n_prompt);
    KVL_TRY(add_shapes(t, page));
    KVL_TRY(add_tokens(t, page));
    cJSON_AddItemToObject(page, "states", t->states);
    cJSON_AddItemToObject(page, "steps", t->steps);
    t->states = t->steps = NULL;
    if (!cJSON_AddStringToObject(page, "attention", t->attention)) {
        status = no_memory();
        goto done;
    }
    KVL_TRY(kvl_page_write(path, "host/lab/trace/page.html", page, parts, sizeof parts / sizeof *parts));
done:
    cJSON_Delete(page);
    kvl_text_free(&command);
    return status;
}

static kvl_status open_trace(struct trace *t)
{
    kvl_status status = KVL_OK;
    const struct kvl_trace_config *config = t->config;
    t->n_token = config->n_prompt + config->n_steps;
    if (t->n_token > KVL_TRACE_MOST_TOKENS)
        return kvl_fail(KVL_E_USAGE, "%u tokens of prompt and %u steps: a page holds %u; shorten one of them", config->n_prompt, config->n_steps,
                        KVL_TRACE_MOST_TOKENS);
    const struct kvl_session_config session = {.spec = config->spec, .n_ctx = t->n_token, .ubatch = t->n_token, .protocol = KVL_P2_WRITE_THEN_READ,
                                               .exact = config->exact, .allow_long = config->allow_long};
    KVL_TRY(kvl_spec_check_dims(config->spec, dims_of(t)->n_layer, dims_of(t)->head_dim));
    KVL_TRY(kvl_session_new(t->rig->weights, &session, &t->session));
    KVL_TRY(kvl_alloc(&t->token, t->n_token, sizeof *t->token));
    KVL_TRY(kvl_alloc(&t->position, t->n_token, sizeof *t->position));
    KVL_TRY(kvl_alloc(&t->seen, t->n_token, 1));
    KVL_TRY(kvl_alloc(&t->row, t->n_token, sizeof *t->row));
    KVL_TRY(kvl_alloc(&t->logits, dims_of(t)->n_vocab, sizeof *t->logits));
    KVL_TRY(kvl_alloc(&t->attention, levels_before(t, config->n_steps + 1) + 1, 1)); /* ends with a NUL */
    memcpy(t->token, config->prompt, config->n_prompt * sizeof *t->token);
    t->states = cJSON_CreateArray();
    t->steps = cJSON_CreateArray();
done:
    return status;
}

kvl_status kvl_trace_write(const struct kvl_rig *rig, const struct kvl_trace_config *config, const char *path)
{
    struct trace t = {.rig = rig, .config = config};
    kvl_status status = KVL_OK;
    KVL_TRY(open_trace(&t));
    KVL_TRY(run_steps(&t));
    KVL_TRY(watch_attention(&t));
    KVL_TRY(write_page(&t, path));
done:
    kvl_session_free(&t.session);
    kvl_text_free(&t.last);
    kvl_free(&t.token);
    kvl_free(&t.position);
    kvl_free(&t.seen);
    kvl_free(&t.row);
    kvl_free(&t.logits);
    kvl_free(&t.attention);
    cJSON_Delete(t.states);
    cJSON_Delete(t.steps);
    return status;
}
