/* The forward pass of a decoder over a KV cache. Shapes: u ubatch, E n_embd, F n_ff, V n_vocab. */
#include "session.h"
#include "arch.h"
#include "cache.h"
#include "linear.h"
#include "log.h"
#include "mem.h"
#include "mla.h"
#include "prompt.h"
#include "rescore.h"
#include "rng.h"
#include "witness.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- weights ---- */

/* A packed matrix: tensors of equal type, their rows one after the other, or gate and value. */
struct packing {
    const char *owner; /* for the ledger */
    const struct kvl_gguf_tensor *tensor[3];
    size_t n;
    struct kvl_linear_form form;
};

/* The matrices of a layer. Query, key and value matrices may have different types (Q4_K_M and the like): one matrix for each run of
 * equal types, from QKV on. */
enum matrix { ATTN_OUTPUT, GATE_UP, FFN_DOWN, QKV, MOST_MATRICES = QKV + 3 };

/* The vectors of a layer, f32: norms and biases. What the file does not have is NULL, and is not applied. */
enum vector { ATTN_NORM, QKV_BIAS, Q_NORM, K_NORM, ATTN_POST_NORM, FFN_NORM, FFN_POST_NORM, N_VECTORS };

static const struct {
    const char *tensor[3]; /* one after the other */
    bool of_heads;         /* in the order of a head's channels: as its rows, so its elements are turned */
} vectors[N_VECTORS] = {
    [ATTN_NORM] = {{"attn_norm.weight"}},
    [QKV_BIAS] = {{"attn_q.bias", "attn_k.bias", "attn_v.bias"}, .of_heads = true},
    [Q_NORM] = {{"attn_q_norm.weight"}, .of_heads = true},
    [K_NORM] = {{"attn_k_norm.weight"}, .of_heads = true},
    [ATTN_POST_NORM] = {{"post_attention_norm.weight"}},
    [FFN_NORM] = {{"ffn_norm.weight"}},
    [FFN_POST_NORM] = {{"post_ffw_norm.weight"}},
};

struct layer_weights {
    struct kvl_buffer *vector[N_VECTORS];
    struct kvl_linear matrix[MOST_MATRICES];
    size_t n_matrices;
    struct kvl_mla *mla; /* in place of QKV where attention is of latents; else NULL */
};

struct kvl_weights {
    const struct kvl_model *model;
    struct kvl_device *device;
    struct layer_weights *layer; /* [L] */
    struct kvl_buffer *output_norm;
    struct kvl_linear embedding, output; /* output unset if tied */
};

/* Layer < 0: of no layer. NULL if the file has no such tensor. */
static const struct kvl_gguf_tensor *find_tensor(const struct kvl_model *model, int layer, const char *name)
{
    char full[64];
    if (layer >= 0) snprintf(full, sizeof full, "blk.%d.%s", layer, name);
    else snprintf(full, sizeof full, "%s", name);
    return kvl_gguf_tensor_find(model->gguf, full);
}

/* One that kvl_model_open has seen. */
static struct packing pack_one(const struct kvl_model *model, int layer, const char *name)
{
    return (struct packing){.owner = "matrix", .tensor = {find_tensor(model, layer, name)}, .n = 1};
}

/* Rows of queries and keys are brought into the order in which RoPE's pairs are neighbours: the first n_rows of a matrix's. */
static struct kvl_linear_form turned(const struct kvl_model *model, uint64_t n_rows)
{
    const struct kvl_dims *dims = &model->dims;
    return (struct kvl_linear_form){.turned_rows = model->arch->halves ? n_rows : 0, .head_dim = dims->head_dim, .rope_dim = dims->rope_dim};
}

static void pack_layer(const struct kvl_model *model, int layer, struct packing out[MOST_MATRICES], size_t *n)
{
    static const char *const names[3] = {"attn_q.weight", "attn_k.weight", "attn_v.weight"};
    size_t last = QKV;
    out[ATTN_OUTPUT] = pack_one(model, layer, "attn_output.weight");
    out[FFN_DOWN] = pack_one(model, layer, "ffn_down.weight");
    out[GATE_UP] = (struct packing){
        .owner = "gate_up", .tensor = {find_tensor(model, layer, "ffn_gate.weight"), find_tensor(model, layer, "ffn_up.weight")}, .n = 2,
        .form = {.gate = model->arch->gate}};
    *n = QKV;
    if (model->dims.mla.kv_rank != 0) return; /* mla.c has the rest */
    out[QKV] = (struct packing){.owner = "qkv", .form = turned(model, 0)};
    for (int i = 0; i < 3; i++) {
        const struct kvl_gguf_tensor *tensor = find_tensor(model, layer, names[i]);
        if (tensor == NULL) continue; /* of a layer that reads another's keys and values */
        if (i > 0 && tensor->type != out[last].tensor[0]->type) out[++last] = (struct packing){.owner = "qkv", .form = turned(model, 0)};
        out[last].tensor[out[last].n++] = tensor;
        if (i < 2 && model->arch->halves) out[last].form.turned_rows += tensor->dim[1];
    }
    *n = last + 1;
}

static kvl_status load_packed(struct kvl_weights *w, int layer, const struct packing *p, struct kvl_linear *out)
{
    return kvl_linear_load(w->device, p->owner, layer, p->tensor, p->n, p->form, out);
}

static kvl_status load_matrix(struct kvl_weights *w, const char *name, struct kvl_linear *out)
{
    const struct packing packing = pack_one(w->model, -1, name);
    return load_packed(w, -1, &packing, out);
}

/* Elements of a vector; 0 if the file does not have it. */
static uint64_t vector_size(const struct kvl_model *model, int layer, const char *const names[3])
{
    uint64_t n = 0;
    for (int i = 0; i < 3 && names[i] != NULL; i++) {
        const struct kvl_gguf_tensor *tensor = find_tensor(model, layer, names[i]);
        n += tensor != NULL ? tensor->dim[0] : 0;
    }
    return n;
}

static void dequantize(const struct kvl_gguf_tensor *tensor, float *out)
{
    const struct kvl_quant_type *type = kvl_quant_type(tensor->type);
    type->dequantize(tensor->data, tensor->dim[0] * tensor->dim[1] / type->block, out);
}

/* The tensors' elements one after the other, in the form's order and times gain. */
static kvl_status load_vector(struct kvl_weights *w, int layer, const char *const names[3], const struct kvl_linear_form *form, float gain,
                              struct kvl_buffer **out)
{
    kvl_status status = KVL_OK;
    const uint64_t n = vector_size(w->model, layer, names);
    float *read = NULL, *values = NULL;
    if (n == 0) return KVL_OK;
    KVL_TRY(kvl_alloc(&read, n, sizeof *read));
    KVL_TRY(kvl_alloc(&values, n, sizeof *values));
    for (uint64_t i = 0, at = 0; i < 3 && names[i] != NULL; i++) {
        const struct kvl_gguf_tensor *tensor = find_tensor(w->model, layer, names[i]);
        dequantize(tensor, read + at);
        at += tensor->dim[0];
    }
    for (uint64_t i = 0; i < n; i++) values[i] = read[kvl_linear_source_row(form, i)] * gain;
    KVL_TRY(kvl_buffer_new(w->device, "vector", layer, KVL_MEM_WEIGHTS, n * sizeof *values, false, out));
    KVL_TRY(kvl_buffer_write(*out, 0, n * sizeof *values, values));
done:
    kvl_free(&read);
    kvl_free(&values);
    return status;
}

static kvl_status load_layer(struct kvl_weights *w, int layer, struct layer_weights *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &w->model->dims;
    struct packing packing[MOST_MATRICES];
    size_t n;
    for (int v = 0; v < N_VECTORS; v++) {
        const uint64_t of_heads = (uint64_t)(v == QKV_BIAS ? dims->n_head + dims->n_kv_head : 1) * dims->head_dim;
        const struct kvl_linear_form form = turned(w->model, vectors[v].of_heads ? of_heads : 0);
        KVL_TRY(load_vector(w, layer, vectors[v].tensor, &form, v == Q_NORM ? dims->query_gain : 1.0f, &out->vector[v]));
    }
    if (dims->mla.kv_rank != 0) KVL_TRY(kvl_mla_load(w->model, w->device, layer, &out->mla));
    pack_layer(w->model, layer, packing, &n);
    while (out->n_matrices < n) {
        const size_t i = out->n_matrices++;
        KVL_TRY(load_packed(w, layer, &packing[i], &out->matrix[i]));
    }
done:
    return status;
}

static const char *const output_norm[3] = {"output_norm.weight"};

kvl_status kvl_weights_load(const struct kvl_model *model, struct kvl_device *device, struct kvl_weights **out)
{
    kvl_status status = KVL_OK;
    struct kvl_weights *w = NULL;
    KVL_TRY(kvl_alloc(&w, 1, sizeof *w));
    w->model = model;
    w->device = device;
    KVL_TRY(kvl_alloc(&w->layer, model->dims.n_layer, sizeof *w->layer));
    KVL_TRY(load_matrix(w, "token_embd.weight", &w->embedding));
    KVL_TRY(load_vector(w, -1, output_norm, &(struct kvl_linear_form){0}, 1.0f, &w->output_norm));
    if (!model->dims.tied_output) KVL_TRY(load_matrix(w, "output.weight", &w->output));
    for (uint32_t l = 0; l < model->dims.n_layer; l++) KVL_TRY(load_layer(w, (int)l, &w->layer[l]));
    *out = w;
    w = NULL;
done:
    kvl_weights_free(&w);
    return status;
}

void kvl_weights_free(struct kvl_weights **weights)
{
    struct kvl_weights *w = *weights;
    if (w == NULL) return;
    for (uint32_t l = 0; w->layer != NULL && l < w->model->dims.n_layer; l++) {
        struct layer_weights *layer = &w->layer[l];
        for (int v = 0; v < N_VECTORS; v++) kvl_buffer_free(&layer->vector[v]);
        for (size_t i = 0; i < layer->n_matrices; i++) kvl_linear_free(&layer->matrix[i]);
        kvl_mla_free(&layer->mla);
    }
    kvl_free(&w->layer);
    kvl_buffer_free(&w->output_norm);
    kvl_linear_free(&w->embedding);
    kvl_linear_free(&w->output);
    kvl_free(weights);
}

static uint64_t packed_bytes(const struct packing *p)
{
    const bool gated = p->form.gate != KVL_GATE_NONE;
    uint64_t rows = 0;
    for (size_t i = 0; i < (gated ? 1 : p->n); i++) rows += p->tensor[i]->dim[1];
    return kvl_linear_bytes(kvl_quant_type(p->tensor[0]->type), rows, p->tensor[0]->dim[0], gated);
}

uint64_t kvl_weights_bytes(const struct kvl_model *model)
{
    const char *const of_model[] = {"token_embd.weight", "output.weight"};
    uint64_t bytes = vector_size(model, -1, output_norm) * sizeof(float);
    for (size_t i = 0; i < (model->dims.tied_output ? 1 : 2); i++) {
        const struct packing packing = pack_one(model, -1, of_model[i]);
        bytes += packed_bytes(&packing);
    }
    for (uint32_t l = 0; l < model->dims.n_layer; l++) {
        struct packing packing[MOST_MATRICES];
        size_t n;
        pack_layer(model, (int)l, packing, &n);
        for (size_t i = 0; i < n; i++) bytes += packed_bytes(&packing[i]);
        for (int v = 0; v < N_VECTORS; v++) bytes += vector_size(model, (int)l, vectors[v].tensor) * sizeof(float);
        bytes += kvl_mla_bytes(model, (int)l);
    }
    return bytes;
}

/* ---- scratch of the forward pass ---- */

enum scratch { IDS, HIDDEN, NORMED, STAGE, ATTENDED, FEED_FORWARD, LOGITS, ROTARY, SLIDE_ROTARY, LATENT, N_SCRATCH = LATENT + KVL_MLA_SCRATCH };
_Static_assert((int)N_SCRATCH + KVL_LINEAR_SCRATCH == (int)KVL_SESSION_SCRATCH, "session.h");
static const char *const scratch_name[N_SCRATCH] = {"token ids", "hidden", "normed", "qkv stage", "attended", "feed forward", "logits", "rotary",
                                                    "rotary of layers that slide", "queries of low rank", "latent rows", "rows of heads"};

struct kvl_session {
    struct kvl_weights *weights;
    struct kvl_session_config config;
    struct kvl_linear_kernels *kernels;
    struct kvl_cache *cache;
    struct kvl_buffer *scratch[N_SCRATCH];
    struct kvl_selection *kept;  /* [L] what the last eviction left */
    const int32_t *following;    /* [n_following] what comes behind the next prompt, borrowed */
    uint32_t n_following;
    float *angles;               /* of ROTARY, where the host says which tokens go while others are decoded; else NULL */
    struct kvl_counters counters;
    uint64_t launches_before;
};

static uint64_t padded(uint64_t columns) { return (columns + 31) / 32 * 32; }

/* The widest matrix that tokens go through. */
static uint64_t most_columns(const struct kvl_dims *dims)
{
    const struct kvl_cache_dims cache = kvl_model_cache_dims(dims);
    const uint64_t heads = (uint64_t)dims->n_head * kvl_output_dim(&cache), least = heads > dims->n_embd ? heads : dims->n_embd;
    return dims->n_ff > least ? dims->n_ff : least;
}

static uint32_t sequences(const struct kvl_session_config *config) { return config->n_sequence > 1 ? config->n_sequence : 1; }

/* Of heads that are multiplied each for itself, the last one is read up to a multiple of 32 columns. */
static uint64_t attended_room(const struct kvl_cache_dims *dims) { return padded(dims->joint_value_dim) - dims->joint_value_dim; }

void kvl_session_scratch(const struct kvl_dims *dims, const struct kvl_session_config *config, const struct kvl_tuning *tuning,
                         uint64_t bytes[KVL_SESSION_SCRATCH])
{
    const struct kvl_cache_config cache = {config->spec, config->n_ctx, config->ubatch, config->protocol, config->exact};
    const struct kvl_cache_dims cache_dims = kvl_model_cache_dims(dims);
    const uint64_t s = sequences(config), u = kvl_cache_ubatch(&cache) * s;
    bytes[IDS] = u * sizeof(int32_t);
    bytes[HIDDEN] = u * dims->n_embd * sizeof(float);
    bytes[NORMED] = u * padded(dims->n_embd) * sizeof(float);
    bytes[STAGE] = u * kvl_stage_row(&cache_dims) * sizeof(float);
    bytes[ATTENDED] = (u * padded((uint64_t)dims->n_head * kvl_output_dim(&cache_dims)) + attended_room(&cache_dims)) * sizeof(float);
    bytes[FEED_FORWARD] = u * padded(dims->n_ff) * sizeof(float);
    bytes[LOGITS] = (config->max_logits ? config->max_logits : 1ull) * s * dims->n_vocab * sizeof(float);
    bytes[ROTARY] = (uint64_t)kvl_rope_positions(config->spec, dims->n_layer, config->n_ctx) * (dims->rope_dim ? dims->rope_dim : 2) * sizeof(float);
    bytes[SLIDE_ROTARY] = dims->slide_rope_base != dims->rope_base ? bytes[ROTARY] : 0;
    kvl_mla_scratch(dims, u, bytes + LATENT);
    kvl_linear_scratch(tuning, (uint32_t)u, most_columns(dims), config->exact, bytes + N_SCRATCH);
}

kvl_status kvl_rope_angles(const float *freq, uint32_t pairs, uint32_t positions, float **out)
{
    const kvl_status status = kvl_alloc(out, (size_t)positions * pairs * 2, sizeof **out);
    for (size_t i = 0; status == KVL_OK && i < (size_t)positions * pairs; i++) {
        const double angle = (double)(i / pairs) * freq[i % pairs];
        (*out)[2 * i] = (float)cos(angle);
        (*out)[2 * i + 1] = (float)sin(angle);
    }
    return status;
}

/* kept: NULL, or where the angles stay. */
static kvl_status write_rotary(struct kvl_session *s, const float *freq, struct kvl_buffer *out, float **kept)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &s->weights->model->dims;
    const uint32_t pairs = dims->rope_dim / 2, positions = kvl_rope_positions(s->config.spec, dims->n_layer, s->config.n_ctx);
    float *angles = NULL;
    KVL_TRY(kvl_rope_angles(freq, pairs, positions, &angles));
    KVL_TRY(kvl_buffer_write(out, 0, (uint64_t)positions * pairs * 2 * sizeof *angles, angles));
    if (kept != NULL) {
        *kept = angles;
        angles = NULL;
    }
done:
    kvl_free(&angles);
    return status;
}

static bool chooses_by_host(const struct kvl_cache_plan *plan)
{
    bool some = false;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) some = some || plan->layer[l].by_host;
    return some;
}

kvl_status kvl_session_cache_plan(const struct kvl_dims *dims, const struct kvl_session_config *config, const struct kvl_cache_limits *limits,
                                  struct kvl_cache_plan *out)
{
    struct kvl_cache_dims cache_dims = kvl_model_cache_dims(dims);
    const struct kvl_cache_config cache = {config->spec, config->n_ctx, config->ubatch, config->protocol, config->exact};
    cache_dims.n_sequence = sequences(config);
    cache_dims.n_head *= cache_dims.n_sequence;
    cache_dims.n_kv_head *= cache_dims.n_sequence;
    return kvl_cache_plan_make(&cache_dims, &cache, limits, out);
}

/* Sequences in step are one with more heads, and nothing may depend on which head it is. */
static kvl_status check_sequences(const struct kvl_session_config *config, const struct kvl_cache_plan *plan)
{
    bool of_heads = plan->evicts || kvl_sides(&plan->dims) == 1;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (int i = 0; i < kvl_sides(&plan->dims); i++) of_heads = of_heads || plan->layer[l].side[i].projection != NULL || plan->layer[l].side[i].shape.table_floats != 0;
    if (sequences(config) == 1 || !of_heads) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "%u sequences in step: only caches that treat all heads alike; leave out keep=, read=pages, codecs that learn, tables and latents, or time one sequence",
                    config->n_sequence);
}

kvl_status kvl_session_new(struct kvl_weights *weights, const struct kvl_session_config *config, struct kvl_session **out)
{
    kvl_status status = KVL_OK;
    struct kvl_session *s = NULL;
    struct kvl_cache_plan plan = {0};
    const struct kvl_dims *dims = &weights->model->dims;
    const struct kvl_cache_limits limits = kvl_cache_limits_of(weights->device);
    uint64_t bytes[KVL_SESSION_SCRATCH];
    if ((uint64_t)dims->n_head * dims->head_dim % 32 != 0)
        return kvl_fail(KVL_E_UNSUPPORTED, "%s: %u heads of %u channels; their product must be a multiple of 32", weights->model->name,
                        dims->n_head, dims->head_dim);
    KVL_TRY(kvl_session_cache_plan(dims, config, &limits, &plan));
    KVL_TRY(check_sequences(config, &plan));
    if (plan.n_position > dims->n_ctx_train && !config->allow_long) {
        status = kvl_fail(KVL_E_USAGE, "%u positions wanted, %s was trained for %u: use fewer, a cache that bounds them (pos=compact), or --allow-long",
                          plan.n_position, weights->model->name, dims->n_ctx_train);
        goto done;
    }
    KVL_TRY(kvl_alloc(&s, 1, sizeof *s));
    s->weights = weights;
    s->config = *config;
    KVL_TRY(kvl_alloc(&s->kept, dims->n_layer, sizeof *s->kept));
    KVL_TRY(kvl_cache_new(weights->device, &plan, &s->cache));
    kvl_session_scratch(dims, config, limits.tuning, bytes);
    for (int i = 0; i < N_SCRATCH; i++)
        if (bytes[i] != 0) KVL_TRY(kvl_buffer_new(weights->device, scratch_name[i], -1, KVL_MEM_SCRATCH, bytes[i], true, &s->scratch[i]));
    KVL_TRY(kvl_linear_kernels_new(weights->device, &s->kernels));
    KVL_TRY(kvl_linear_reserve(s->kernels, kvl_cache_ubatch(&kvl_cache_plan(s->cache)->config) * sequences(config), most_columns(dims), config->exact));
    KVL_TRY(write_rotary(s, weights->model->rope_freq, s->scratch[ROTARY], chooses_by_host(kvl_cache_plan(s->cache)) ? &s->angles : NULL));
    if (s->scratch[SLIDE_ROTARY] != NULL) KVL_TRY(write_rotary(s, weights->model->slide_rope_freq, s->scratch[SLIDE_ROTARY], NULL));
    KVL_TRY(kvl_session_reset(s));
    *out = s;
    s = NULL;
done:
    kvl_session_free(&s);
    kvl_cache_plan_free(&plan);
    return status;
}

void kvl_session_free(struct kvl_session **session)
{
    struct kvl_session *s = *session;
    if (s == NULL) return;
    for (size_t i = 0; i < N_SCRATCH; i++) kvl_buffer_free(&s->scratch[i]);
    for (uint32_t l = 0; s->kept != NULL && l < s->weights->model->dims.n_layer; l++) kvl_selection_free(&s->kept[l]);
    kvl_free(&s->kept);
    kvl_free(&s->angles);
    kvl_linear_kernels_free(&s->kernels);
    kvl_cache_free(&s->cache);
    kvl_free(session);
}

kvl_status kvl_session_reset(struct kvl_session *s)
{
    kvl_cache_reset(s->cache);
    for (uint32_t l = 0; l < s->weights->model->dims.n_layer; l++) kvl_selection_free(&s->kept[l]);
    s->counters = (struct kvl_counters){0};
    s->launches_before = kvl_device_launches(s->weights->device);
    return KVL_OK;
}

kvl_status kvl_session_rewind(struct kvl_session *s, uint32_t position) { return kvl_cache_rewind(s->cache, position); }

uint32_t kvl_session_position(const struct kvl_session *s) { return kvl_cache_position(s->cache); }
struct kvl_cache *kvl_session_cache(const struct kvl_session *s) { return s->cache; }

/* ---- forward ---- */

static struct kvl_rows rows_of(struct kvl_session *s, enum scratch which, uint64_t row, uint64_t stride)
{
    return (struct kvl_rows){s->scratch[which], row * stride, stride};
}

static struct kvl_norm norm_of(struct kvl_session *s, struct kvl_buffer *weight)
{
    const struct kvl_dims *dims = &s->weights->model->dims;
    return (struct kvl_norm){weight, dims->rms_eps, rows_of(s, NORMED, 0, padded(dims->n_embd))};
}

/* The table that layer l's positions are looked up in. */
static struct kvl_buffer *rotary_of(const struct kvl_session *s, uint32_t l)
{
    const bool own = s->scratch[SLIDE_ROTARY] != NULL && kvl_own_window(&kvl_cache_plan(s->cache)->dims, l) != 0;
    return s->scratch[own ? SLIDE_ROTARY : ROTARY];
}

static struct kvl_mla_run mla_run(struct kvl_session *s)
{
    return (struct kvl_mla_run){s->kernels, &s->weights->model->dims, s->scratch + LATENT, s->config.exact};
}

/* Products that wait to be run together (kvl_linear_run_chain). */
struct products {
    struct kvl_product item[2 * MOST_MATRICES];
    size_t n;
};

static kvl_status run_products(struct kvl_session *s, struct products *p, uint32_t n)
{
    const kvl_status status = p->n == 0 ? KVL_OK : kvl_linear_run_chain(s->kernels, p->item, p->n, n, s->config.exact);
    p->n = 0;
    return status;
}

/* Query, key and value rows in the stage are made of hidden rows: a product for each matrix. */
static void list_qkv(struct kvl_session *s, const struct layer_weights *layer, struct kvl_rows hidden, const struct kvl_norm *norm, struct products *p)
{
    struct kvl_rows y = rows_of(s, STAGE, 0, kvl_stage_row(&kvl_cache_plan(s->cache)->dims) / sequences(&s->config));
    for (size_t i = QKV; i < layer->n_matrices; i++) {
        p->item[p->n++] = (struct kvl_product){&layer->matrix[i], hidden, y, norm, false};
        y.offset += layer->matrix[i].rows;
    }
}

/* What some models do to these rows; those of latents make them here. */
static kvl_status finish_qkv(struct kvl_session *s, const struct layer_weights *layer, uint32_t n, struct kvl_rows hidden)
{
    kvl_status status = KVL_OK;
    const struct kvl_mla_run run = mla_run(s);
    const struct kvl_norm norm = norm_of(s, layer->vector[ATTN_NORM]);
    if (layer->mla != NULL) return kvl_mla_project(layer->mla, &run, n, hidden, &norm, s->scratch[STAGE]);
    const struct kvl_dims *dims = &s->weights->model->dims;
    const uint32_t heads = dims->n_head + 2 * dims->n_kv_head, d = dims->head_dim;
    const struct kvl_rows queries = rows_of(s, STAGE, 0, (uint64_t)heads * d);
    const struct kvl_rows keys = {queries.buffer, (uint64_t)dims->n_head * d, queries.stride};
    struct kvl_buffer *const *vector = layer->vector;
    if (vector[QKV_BIAS] != NULL) KVL_TRY(kvl_add_row_run(s->kernels, n, heads * d, vector[QKV_BIAS], queries));
    if (vector[Q_NORM] != NULL) KVL_TRY(kvl_rms_norm_heads_run(s->kernels, n, dims->n_head, d, dims->rms_eps, vector[Q_NORM], queries));
    if (vector[K_NORM] != NULL) KVL_TRY(kvl_rms_norm_heads_run(s->kernels, n, dims->n_kv_head, d, dims->rms_eps, vector[K_NORM], keys));
done:
    return status;
}

static kvl_status project_qkv(struct kvl_session *s, uint32_t l, uint32_t n, struct kvl_rows hidden)
{
    kvl_status status = KVL_OK;
    const struct layer_weights *layer = &s->weights->layer[l];
    const struct kvl_norm norm = norm_of(s, layer->vector[ATTN_NORM]);
    struct products products = {.n = 0};
    list_qkv(s, layer, hidden, &norm, &products);
    KVL_TRY(run_products(s, &products, n));
    KVL_TRY(finish_qkv(s, layer, n, hidden));
done:
    return status;
}

/* hidden += W x, normalized before if there is a norm for it. */
static kvl_status add_product(struct kvl_session *s, struct products *p, const struct kvl_linear *matrix, struct kvl_buffer *post_norm, uint32_t n,
                              struct kvl_rows x, struct kvl_rows hidden)
{
    kvl_status status = KVL_OK;
    const struct kvl_norm norm = norm_of(s, post_norm);
    p->item[p->n++] = (struct kvl_product){matrix, x, post_norm == NULL ? hidden : norm.normed, NULL, post_norm == NULL};
    if (post_norm == NULL) return KVL_OK;
    KVL_TRY(run_products(s, p, n));
    KVL_TRY(kvl_rms_norm_add_run(s->kernels, n, (uint32_t)matrix->rows, norm.eps, post_norm, norm.normed, hidden));
done:
    return status;
}

/* What the output matrix is multiplied with. */
static kvl_status attended_rows(struct kvl_session *s, const struct layer_weights *layer, uint32_t n, struct kvl_rows *out)
{
    const struct kvl_dims *dims = &s->weights->model->dims;
    const struct kvl_mla_run run = mla_run(s);
    *out = rows_of(s, ATTENDED, 0, padded((uint64_t)dims->n_head * dims->head_dim));
    return layer->mla == NULL ? KVL_OK : kvl_mla_values(layer->mla, &run, n, s->scratch[ATTENDED], out);
}

/* What follows a layer's attention; next: the layer whose query, key and value rows are made of the result, or NULL. */
static kvl_status finish_layer(struct kvl_session *s, uint32_t l, uint32_t n, struct kvl_rows hidden, const struct layer_weights *next)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &s->weights->model->dims;
    const struct layer_weights *layer = &s->weights->layer[l];
    const struct kvl_norm ffn_norm = norm_of(s, layer->vector[FFN_NORM]), attn_norm = norm_of(s, next != NULL ? next->vector[ATTN_NORM] : NULL);
    const struct kvl_rows ff = rows_of(s, FEED_FORWARD, 0, padded(dims->n_ff));
    struct products products = {.n = 0};
    struct kvl_rows attended;
    KVL_TRY(attended_rows(s, layer, n, &attended));
    KVL_TRY(add_product(s, &products, &layer->matrix[ATTN_OUTPUT], layer->vector[ATTN_POST_NORM], n, attended, hidden));
    products.item[products.n++] = (struct kvl_product){&layer->matrix[GATE_UP], hidden, ff, &ffn_norm, false};
    KVL_TRY(add_product(s, &products, &layer->matrix[FFN_DOWN], layer->vector[FFN_POST_NORM], n, ff, hidden));
    if (next != NULL) list_qkv(s, next, hidden, &attn_norm, &products);
    KVL_TRY(run_products(s, &products, n));
    if (next != NULL) KVL_TRY(finish_qkv(s, next, n, hidden));
done:
    return status;
}

/* One layer for n tokens of a prompt that passes through the layers one at a time. */
static kvl_status forward_prompt_layer(struct kvl_session *s, uint32_t l, uint32_t n, struct kvl_rows hidden, struct kvl_prompt *prompt)
{
    kvl_status status = KVL_OK;
    KVL_TRY(project_qkv(s, l, n, hidden));
    KVL_TRY(kvl_prompt_step(prompt, n, s->scratch[STAGE], rotary_of(s, l), s->scratch[ATTENDED]));
    KVL_TRY(finish_layer(s, l, n, hidden, NULL));
done:
    return status;
}

/* All layers for n tokens (of each sequence) whose hidden rows are given. */
static kvl_status forward_layers(struct kvl_session *s, uint32_t n, struct kvl_rows hidden)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &s->weights->model->dims;
    const uint32_t n_rows = n * sequences(&s->config);
    KVL_TRY(project_qkv(s, 0, n_rows, hidden)); /* step 1 of the cache's order; 2 to 8: */
    for (uint32_t l = 0; l < dims->n_layer; l++) {
        KVL_TRY(kvl_cache_step(s->cache, l, n, s->scratch[STAGE], rotary_of(s, l), dims->rope_dim, s->scratch[ATTENDED]));
        KVL_TRY(finish_layer(s, l, n_rows, hidden, l + 1 < dims->n_layer ? &s->weights->layer[l + 1] : NULL));
    }
done:
    return status;
}

/* Logits of `count` tokens, whose hidden rows are given, into logits rows from `first_row` on. */
static kvl_status project_logits(struct kvl_session *s, struct kvl_rows hidden, uint32_t count, uint32_t first_row)
{
    kvl_status status = KVL_OK;
    const struct kvl_weights *w = s->weights;
    const struct kvl_dims *dims = &w->model->dims;
    const struct kvl_norm norm = norm_of(s, w->output_norm);
    const struct kvl_linear *output = dims->tied_output ? &w->embedding : &w->output;
    KVL_TRY(kvl_linear_run_normed(s->kernels, output, count, hidden, &norm,
                                  rows_of(s, LOGITS, first_row, dims->n_vocab), s->config.exact));
done:
    return status;
}

/* Multiply-adds of the matrices of one token, without the output matrix. */
static uint64_t layer_products(const struct kvl_dims *dims)
{
    const uint64_t q = (uint64_t)dims->n_head * dims->head_dim, kv = (uint64_t)dims->n_kv_head * dims->head_dim;
    uint64_t products = 3ull * dims->n_layer * dims->n_embd * dims->n_ff;
    for (uint32_t l = 0; l < dims->n_layer; l++)
        products += dims->mla.kv_rank != 0 ? kvl_mla_products(dims) : (uint64_t)dims->n_embd * (2 * q + (kvl_layer_makes_kv(dims, l) ? 2 * kv : 0));
    return products;
}

static void count_forward(struct kvl_session *s, uint32_t n, uint32_t n_logits)
{
    const struct kvl_dims *dims = &s->weights->model->dims;
    s->counters.tokens += n;
    s->counters.kv_computed += n;
    s->counters.flops += 2 * (n * layer_products(dims) + (uint64_t)n_logits * dims->n_embd * dims->n_vocab);
}

/* Hidden rows of n tokens, at most a ubatch. */
static kvl_status embed(struct kvl_session *s, const int32_t *tokens, uint32_t n, struct kvl_rows hidden)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &s->weights->model->dims;
    if (kvl_interrupted()) return KVL_E_INTERRUPTED;
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= dims->n_vocab)
            return kvl_fail(KVL_E_USAGE, "token %d: the vocabulary has 0 to %u", tokens[i], dims->n_vocab - 1);
    KVL_TRY(kvl_buffer_write(s->scratch[IDS], 0, n * sizeof *tokens, tokens));
    const float scale = s->weights->model->arch->scales_embedding ? sqrtf((float)dims->n_embd) : 1.0f;
    KVL_TRY(kvl_linear_embed(s->kernels, &s->weights->embedding, n, s->scratch[IDS], 0, scale, hidden));
done:
    return status;
}

/* The attention's output matrix of layer l, [E][Hq * D]. Free with kvl_free. */
static kvl_status read_output_matrix(const struct kvl_session *s, uint32_t l, float **out)
{
    const struct kvl_gguf_tensor *tensor = find_tensor(s->weights->model, (int)l, "attn_output.weight");
    const kvl_status status = kvl_alloc(out, tensor->dim[0] * tensor->dim[1], sizeof **out);
    if (status == KVL_OK) dequantize(tensor, *out);
    return status;
}

static struct kvl_prompt_model model_for_scores(const struct kvl_session *s)
{
    const struct kvl_model *model = s->weights->model;
    return (struct kvl_prompt_model){model->dims.n_embd, model->dims.rope_dim, model->rope_freq};
}

/* Tokens of layer l that go by what the host says. */
static kvl_status rescore_layer(struct kvl_session *s, uint32_t l)
{
    kvl_status status = KVL_OK;
    const struct kvl_prompt_model model = model_for_scores(s);
    struct kvl_score_needs needs;
    float *w_o = NULL;
    kvl_keep_needs(kvl_spec_layer(s->config.spec, l), &needs);
    if (needs.what & KVL_NEED_OUTPUT) KVL_TRY(read_output_matrix(s, l, &w_o));
    KVL_TRY(kvl_rescore_layer(s->cache, l, &model, (struct kvl_rope){s->angles, model.rope_dim}, w_o));
done:
    kvl_free(&w_o);
    return status;
}

/* Behind a token that was decoded. */
static kvl_status rescore(struct kvl_session *s)
{
    kvl_status status = KVL_OK;
    uint64_t start_ns = 0;
    for (uint32_t l = 0; s->angles != NULL && l < s->weights->model->dims.n_layer; l++) {
        if (!kvl_rescore_due(s->cache, l)) continue;
        if (start_ns == 0) KVL_TRY(kvl_device_finish(s->weights->device)); /* so that the step's own work is not counted */
        start_ns = start_ns != 0 ? start_ns : kvl_now_ns();
        KVL_TRY(rescore_layer(s, l));
    }
    if (start_ns == 0) goto done;
    KVL_TRY(kvl_device_finish(s->weights->device));
    s->counters.rescored++;
    s->counters.rescore_ns += kvl_now_ns() - start_ns;
done:
    return status;
}

/* n tokens (of each sequence); logits of n_logits of them from the first_logit-th on, into rows from first_row on. */
static kvl_status forward_piece(struct kvl_session *s, const int32_t *tokens, uint32_t n, uint32_t first_logit, uint32_t n_logits, uint32_t first_row)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &s->weights->model->dims;
    const struct kvl_rows hidden = rows_of(s, HIDDEN, 0, dims->n_embd);
    const uint32_t each = sequences(&s->config);
    KVL_TRY(embed(s, tokens, n * each, hidden));
    KVL_TRY(forward_layers(s, n, hidden));
    if (n_logits != 0) KVL_TRY(project_logits(s, rows_of(s, HIDDEN, (uint64_t)first_logit * each, dims->n_embd), n_logits * each, first_row * each));
    kvl_cache_advance(s->cache, n);
    KVL_TRY(rescore(s));
    count_forward(s, n * each, n_logits * each);
done:
    return status;
}

/* ---- a prompt that is compressed at its end ---- */

/* The first tokens of a session whose cache evicts are its prompt. */
static bool begins_with_prompt(const struct kvl_session *s) { return kvl_cache_plan(s->cache)->evicts && kvl_session_position(s) == 0; }

/* Most tokens of a step behind the prompt. */
static uint32_t step_tokens(const struct kvl_session *s)
{
    const struct kvl_cache_plan *plan = kvl_cache_plan(s->cache);
    return plan->one_by_one ? 1 : kvl_cache_ubatch(&plan->config);
}

struct piece {
    uint32_t first, n;
};

/* The i-th ubatch of n tokens. */
static struct piece piece_of(const struct kvl_session *s, uint32_t n, uint32_t i)
{
    const uint32_t u = kvl_cache_ubatch(&kvl_cache_plan(s->cache)->config), first = i * u;
    return (struct piece){first, n - first < u ? n - first : u};
}
static uint32_t pieces_of(const struct kvl_session *s, uint32_t n)
{
    const uint32_t u = kvl_cache_ubatch(&kvl_cache_plan(s->cache)->config);
    return (n + u - 1) / u;
}

/* Tokens that go through a layer together: the prompt's, or a witness's. Rows of all of them lie one behind the other. */
struct run {
    const int32_t *token;
    uint32_t n;
    uint64_t row; /* of its first hidden state */
};

/* A prompt on its way, and who looks back at it. */
struct passage {
    struct kvl_prompt *prompt;
    struct kvl_witness_list witnesses;
    struct kvl_buffer *hidden; /* [n + tokens of the witnesses][E]; NULL: the stage's rows as they are stand for keys and values */
    struct run run;            /* the prompt */
};

static void passage_free(struct passage *p)
{
    kvl_prompt_free(&p->prompt);
    kvl_witness_list_free(&p->witnesses);
    kvl_buffer_free(&p->hidden);
}

static kvl_status passage_new(struct kvl_session *s, const int32_t *tokens, uint32_t n, struct passage *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_model *model = s->weights->model;
    const struct kvl_prompt_model for_scores = model_for_scores(s);
    *out = (struct passage){.run = {tokens, n, 0}};
    KVL_TRY(kvl_witness_list_make(s->config.spec, model->dims.n_layer, model->tokenizer, tokens, n, s->following, s->n_following, s->config.measure_loss,
                                  &out->witnesses));
    KVL_TRY(kvl_prompt_new(s->weights->device, s->cache, n, out->witnesses.longest, &for_scores, &out->prompt));
    kvl_prompt_observe(out->prompt, s->config.observer);
    if (tokens != NULL)
        KVL_TRY(kvl_buffer_new(s->weights->device, "prompt hidden", -1, KVL_MEM_SCRATCH,
                               (n + out->witnesses.tokens) * model->dims.n_embd * sizeof(float), false, &out->hidden));
done:
    s->n_following = 0;
    if (status != KVL_OK) passage_free(out);
    return status;
}

static struct kvl_rows hidden_rows(const struct kvl_session *s, const struct passage *p, uint64_t row)
{
    const uint64_t width = s->weights->model->dims.n_embd;
    return (struct kvl_rows){p->hidden, row * width, width};
}

static struct run witness_run(const struct passage *p, uint32_t i)
{
    const struct kvl_witness_tokens *w = &p->witnesses.item[i];
    uint64_t row = p->run.n;
    for (uint32_t before = 0; before < i; before++) row += p->witnesses.item[before].n;
    return (struct run){w->token, w->n, row};
}

static kvl_status embed_run(struct kvl_session *s, const struct passage *p, const struct run *run)
{
    for (uint32_t i = 0; i < pieces_of(s, run->n); i++) {
        const struct piece piece = piece_of(s, run->n, i);
        const kvl_status status = embed(s, run->token + piece.first, piece.n, hidden_rows(s, p, run->row + piece.first));
        if (status != KVL_OK) return status;
    }
    return KVL_OK;
}

static kvl_status layer_of_run(struct kvl_session *s, const struct passage *p, uint32_t l, const struct run *run)
{
    for (uint32_t i = 0; i < pieces_of(s, run->n); i++) {
        const struct piece piece = piece_of(s, run->n, i);
        const kvl_status status = p->hidden != NULL
                                      ? forward_prompt_layer(s, l, piece.n, hidden_rows(s, p, run->row + piece.first), p->prompt)
                                      : kvl_prompt_step(p->prompt, piece.n, s->scratch[STAGE], rotary_of(s, l), NULL);
        if (status != KVL_OK) return status;
    }
    return KVL_OK;
}

/* Layer l of the prompt and of its witnesses, then what the layer keeps. */
static kvl_status prompt_layer(struct kvl_session *s, struct passage *p, uint32_t l)
{
    kvl_status status = KVL_OK;
    float *w_o = NULL;
    if (kvl_prompt_needs_output(p->prompt, l)) KVL_TRY(read_output_matrix(s, l, &w_o));
    KVL_TRY(kvl_prompt_layer(p->prompt, l));
    KVL_TRY(layer_of_run(s, p, l, &p->run));
    for (uint32_t i = 0; i < p->witnesses.n; i++) {
        const struct kvl_witness_tokens *w = &p->witnesses.item[i];
        const struct run run = witness_run(p, i);
        KVL_TRY(kvl_prompt_witness(p->prompt, w->kind, w->n, w->first, w->end, w->measure));
        KVL_TRY(layer_of_run(s, p, l, &run));
        KVL_TRY(kvl_prompt_witness_end(p->prompt));
    }
    kvl_selection_free(&s->kept[l]);
    KVL_TRY(kvl_prompt_compress(p->prompt, w_o, s->scratch[STAGE], rotary_of(s, l), &s->kept[l]));
done:
    kvl_free(&w_o);
    return status;
}

/* All layers, one after the other, each for the whole prompt: hidden states of all tokens are scratch. */
static kvl_status forward_prompt(struct kvl_session *s, const int32_t *tokens, uint32_t n, uint32_t first_logit, uint32_t n_logits)
{
    kvl_status status = KVL_OK;
    struct passage p = {0};
    KVL_TRY(passage_new(s, tokens, n, &p));
    KVL_TRY(embed_run(s, &p, &p.run));
    for (uint32_t i = 0; i < p.witnesses.n; i++) {
        const struct run run = witness_run(&p, i);
        KVL_TRY(embed_run(s, &p, &run));
    }
    for (uint32_t l = 0; l < s->weights->model->dims.n_layer; l++) KVL_TRY(prompt_layer(s, &p, l));
    for (uint32_t i = 0; i < pieces_of(s, n_logits); i++) {
        const struct piece piece = piece_of(s, n_logits, i);
        KVL_TRY(project_logits(s, hidden_rows(s, &p, first_logit + piece.first), piece.n, piece.first));
    }
    count_forward(s, n + (uint32_t)p.witnesses.tokens, n_logits);
done:
    passage_free(&p);
    return status;
}

void kvl_session_following(struct kvl_session *s, const int32_t *tokens, uint32_t n)
{
    s->following = tokens;
    s->n_following = n;
}

kvl_status kvl_session_forward(struct kvl_session *s, const int32_t *tokens, uint32_t n, uint32_t n_logits)
{
    return kvl_session_forward_at(s, tokens, n, n - n_logits, n_logits);
}

kvl_status kvl_session_forward_at(struct kvl_session *s, const int32_t *tokens, uint32_t n, uint32_t first_logit, uint32_t n_logits)
{
    kvl_status status = KVL_OK;
    const uint32_t each = sequences(&s->config), u = step_tokens(s), most = s->config.max_logits ? s->config.max_logits : 1, last_logit = first_logit + n_logits;
    if (n_logits > n || n_logits > most || last_logit > n)
        return kvl_fail(KVL_E_USAGE, "%u rows of logits wanted of %u tokens; the session has room for %u", n_logits, n, most);
    if (n > s->config.n_ctx - kvl_session_position(s))
        return kvl_fail(KVL_E_USAGE, "%u tokens at position %u: the session has room for %u positions", n, kvl_session_position(s), s->config.n_ctx);
    if (begins_with_prompt(s)) return n == 0 ? KVL_OK : forward_prompt(s, tokens, n, first_logit, n_logits);
    for (uint32_t begin = 0; begin < n;) {
        const uint32_t end = n - begin < u ? n : begin + u, from = first_logit > begin ? first_logit : begin, to = last_logit < end ? last_logit : end;
        KVL_TRY(to > from ? forward_piece(s, tokens + (size_t)begin * each, end - begin, from - begin, to - from, from - first_logit)
                          : forward_piece(s, tokens + (size_t)begin * each, end - begin, 0, 0, 0));
        begin = end;
    }
done:
    return status;
}

kvl_status kvl_session_fill(struct kvl_session *s, uint32_t n, uint64_t seed)
{
    kvl_status status = KVL_OK;
    const uint32_t u = step_tokens(s);
    const uint64_t stage_bytes = kvl_buffer_bytes(s->scratch[STAGE]);
    struct passage p = {0};
    float *rows = NULL;
    KVL_TRY(kvl_alloc(&rows, stage_bytes / sizeof *rows, sizeof *rows));
    for (uint64_t i = 0; i < stage_bytes / sizeof *rows; i++) rows[i] = (float)kvl_rng_normal(seed, i);
    KVL_TRY(kvl_buffer_write(s->scratch[STAGE], 0, stage_bytes, rows));
    if (begins_with_prompt(s) && n > 0) {
        KVL_TRY(passage_new(s, NULL, n, &p));
        for (uint32_t l = 0; l < s->weights->model->dims.n_layer; l++) {
            KVL_TRY(kvl_buffer_write(s->scratch[STAGE], 0, stage_bytes, rows)); /* the stage is overwritten when a layer is compressed */
            KVL_TRY(prompt_layer(s, &p, l));
        }
        goto done;
    }
    for (uint32_t done_tokens = 0; done_tokens < n;) {
        const uint32_t piece = n - done_tokens < u ? n - done_tokens : u;
        if (kvl_interrupted()) {
            status = KVL_E_INTERRUPTED;
            goto done;
        }
        for (uint32_t l = 0; l < s->weights->model->dims.n_layer; l++)
            KVL_TRY(kvl_cache_step(s->cache, l, piece, s->scratch[STAGE], rotary_of(s, l), s->weights->model->dims.rope_dim, NULL));
        kvl_cache_advance(s->cache, piece);
        KVL_TRY(rescore(s));
        done_tokens += piece;
    }
done:
    passage_free(&p);
    kvl_free(&rows);
    return status;
}

const struct kvl_selection *kvl_session_kept(const struct kvl_session *s, uint32_t l)
{
    return s->kept[l].offset != NULL ? &s->kept[l] : NULL;
}

struct kvl_buffer *kvl_session_logits(const struct kvl_session *s) { return s->scratch[LOGITS]; }

kvl_status kvl_session_read_logits(struct kvl_session *s, uint32_t row, float *logits)
{
    const uint64_t bytes = (uint64_t)s->weights->model->dims.n_vocab * sizeof *logits;
    return kvl_buffer_read(s->scratch[LOGITS], row * bytes, bytes, logits);
}

/* ---- accounting ---- */

void kvl_session_counters(const struct kvl_session *s, struct kvl_counters *out)
{
    const struct kvl_dims *dims = &s->weights->model->dims;
    struct kvl_cache_reads reads;
    kvl_cache_reads(s->cache, &reads);
    *out = s->counters;
    reads.tokens *= sequences(&s->config);
    out->kv_tokens_read = reads.tokens;
    out->kv_bytes_read = reads.bytes;
    const struct kvl_cache_dims cache = kvl_model_cache_dims(dims);
    out->flops += 2 * reads.tokens * dims->n_layer * dims->n_head * (dims->head_dim + kvl_output_dim(&cache));
    out->launches = kvl_device_launches(s->weights->device) - s->launches_before;
}

kvl_status kvl_session_bytes(struct kvl_session *s, struct kvl_cache_bytes *out)
{
    uint64_t bytes[KVL_MEM_CLASSES];
    kvl_status status = kvl_cache_bytes(s->cache, bytes);
    if (status != KVL_OK) return status;
    const struct kvl_cache_plan *plan = kvl_cache_plan(s->cache);
    struct kvl_cache_reads reads;
    kvl_cache_reads(s->cache, &reads);
    for (int i = 0; i < N_SCRATCH; i++) bytes[KVL_MEM_SCRATCH] += s->scratch[i] != NULL ? kvl_buffer_bytes(s->scratch[i]) : 0;
    bytes[KVL_MEM_SCRATCH] += kvl_linear_reserved(s->kernels);
    *out = (struct kvl_cache_bytes){
        .bytes_per_token = plan->bytes_per_token,
        .payload = bytes[KVL_MEM_PAYLOAD],
        .scale = bytes[KVL_MEM_SCALE],
        .index = bytes[KVL_MEM_INDEX],
        .table = bytes[KVL_MEM_TABLE],
        .slack = bytes[KVL_MEM_SLACK],
        .scratch = bytes[KVL_MEM_SCRATCH],
        .resident = kvl_cache_resident(s->cache),
        .peak = kvl_cache_peak(s->cache),
        .token_read = reads.newest_bytes,
    };
    return KVL_OK;
}
