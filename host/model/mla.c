#include "mla.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Matrices of the heads. UP is [kv_rank][content_dim], expanded its transpose; VALUE [value_dim][kv_rank]. */
enum part { CONTENT, POSITION, UP, VALUE, PARTS };

struct kvl_mla {
    struct kvl_buffer *query_norm, *latent_norm; /* query_norm: NULL without W_DQ; latent_norm: NULL if the file has none */
    struct kvl_linear query_down, latent_down;   /* query_down unset without W_DQ */
    struct kvl_linear heads[PARTS];
    struct kvl_linear copy_position, copy_value; /* identities, of the expanded form alone */
};

/* ---- matrices of the file ---- */

/* A piece of a tensor, or a matrix made of one. */
struct matrix {
    struct kvl_gguf_tensor tensor;
    float *made; /* NULL: the tensor's data is the file's */
};

static void matrix_free(struct matrix *m) { kvl_free(&m->made); }

static const struct kvl_gguf_tensor *find(const struct kvl_model *model, int layer, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    return kvl_gguf_tensor_find(model->gguf, full);
}

/* Rows first .. first + n - 1, counted over all of a tensor's matrices. */
static struct matrix rows(const struct kvl_gguf_tensor *tensor, uint64_t first, uint64_t n)
{
    const struct kvl_quant_type *type = kvl_quant_type(tensor->type);
    const uint64_t row_bytes = tensor->dim[0] / type->block * type->bytes;
    struct matrix m = {.tensor = *tensor};
    m.tensor.n_dims = 2;
    m.tensor.dim[1] = n;
    m.tensor.dim[2] = m.tensor.dim[3] = 1;
    m.tensor.n_bytes = n * row_bytes;
    m.tensor.data += first * row_bytes;
    return m;
}

/* A matrix of f32 that is filled by the caller. */
static kvl_status make(uint64_t n_rows, uint64_t columns, struct matrix *out)
{
    *out = (struct matrix){.tensor = {.type = KVL_GGUF_F32, .n_dims = 2, .dim = {columns, n_rows, 1, 1}, .n_bytes = n_rows * columns * sizeof(float)}};
    const kvl_status status = kvl_alloc(&out->made, n_rows * columns, sizeof *out->made);
    out->tensor.data = (const uint8_t *)out->made;
    return status;
}

static kvl_status transpose(struct matrix *m)
{
    kvl_status status = KVL_OK;
    const uint64_t columns = m->tensor.dim[0], n_rows = m->tensor.dim[1];
    const struct kvl_quant_type *type = kvl_quant_type(m->tensor.type);
    struct matrix turned = {0};
    float *values = NULL;
    KVL_TRY(kvl_alloc(&values, n_rows * columns, sizeof *values));
    type->dequantize(m->tensor.data, n_rows * columns / type->block, values);
    KVL_TRY(make(columns, n_rows, &turned));
    for (uint64_t i = 0; i < n_rows; i++)
        for (uint64_t j = 0; j < columns; j++) turned.made[j * n_rows + i] = values[i * columns + j];
    matrix_free(m);
    *m = turned;
    turned = (struct matrix){0};
done:
    matrix_free(&turned);
    kvl_free(&values);
    return status;
}

static kvl_status identity(uint64_t n, struct matrix *out)
{
    const kvl_status status = make(n, n, out);
    for (uint64_t i = 0; status == KVL_OK && i < n; i++) out->made[i * n + i] = 1.0f;
    return status;
}

/* Where a head's matrix is: rows of a tensor, which kvl_model_open has seen, or their transpose. */
struct source {
    const struct kvl_gguf_tensor *tensor;
    uint64_t first, n;
    bool is_transposed;
};

/* W_UK and W_UV of all heads are one tensor, or two, of which the first has each head's matrix transposed. */
static struct source locate(const struct kvl_model *model, int layer, enum part part, uint64_t h)
{
    const struct kvl_mla_dims *d = &model->dims.mla;
    const struct kvl_gguf_tensor *query = find(model, layer, d->q_rank != 0 ? "attn_q_b" : "attn_q"), *joint = find(model, layer, "attn_kv_b");
    const uint64_t at_query = h * (d->content_dim + model->dims.rope_dim), at_joint = h * (d->content_dim + d->value_dim);
    switch (part) {
    case CONTENT: return (struct source){query, at_query, d->content_dim, false};
    case POSITION: return (struct source){query, at_query + d->content_dim, model->dims.rope_dim, false};
    case UP:
        if (joint != NULL) return (struct source){joint, at_joint, d->content_dim, !d->expanded};
        return (struct source){find(model, layer, "attn_k_b"), h * d->kv_rank, d->kv_rank, d->expanded};
    default:
        if (joint != NULL) return (struct source){joint, at_joint + d->content_dim, d->value_dim, false};
        return (struct source){find(model, layer, "attn_v_b"), h * d->value_dim, d->value_dim, false};
    }
}

/* ---- loading ---- */

static kvl_status load_vector(const struct kvl_model *model, struct kvl_device *device, int layer, const char *name, struct kvl_buffer **out)
{
    kvl_status status = KVL_OK;
    const struct kvl_gguf_tensor *tensor = find(model, layer, name);
    float *values = NULL;
    if (tensor == NULL) return KVL_OK;
    const struct kvl_quant_type *type = kvl_quant_type(tensor->type);
    KVL_TRY(kvl_alloc(&values, tensor->dim[0], sizeof *values));
    type->dequantize(tensor->data, tensor->dim[0] / type->block, values);
    KVL_TRY(kvl_buffer_new(device, "norm", layer, KVL_MEM_WEIGHTS, tensor->dim[0] * sizeof *values, false, out));
    KVL_TRY(kvl_buffer_write(*out, 0, tensor->dim[0] * sizeof *values, values));
done:
    kvl_free(&values);
    return status;
}

static kvl_status load_matrix(struct kvl_device *device, int layer, const struct kvl_gguf_tensor *tensor, struct kvl_linear *out)
{
    return kvl_linear_load(device, "latent attention", layer, &tensor, 1, (struct kvl_linear_form){0}, out);
}

/* Makes a head's matrix of the file's. */
typedef kvl_status (*head_maker)(const struct kvl_model *model, int layer, enum part part, uint32_t h, struct matrix *out);

static kvl_status read_head(const struct kvl_model *model, int layer, enum part part, uint32_t h, struct matrix *out)
{
    const struct source source = locate(model, layer, part, h);
    *out = rows(source.tensor, source.first, source.n);
    return source.is_transposed ? transpose(out) : KVL_OK;
}

/* What copies a position (POSITION) or a value (VALUE). */
static kvl_status make_identity(const struct kvl_model *model, int layer, enum part part, uint32_t h, struct matrix *out)
{
    return identity(part == POSITION ? model->dims.rope_dim : model->dims.mla.value_dim, out);
}

static kvl_status load_heads(const struct kvl_model *model, struct kvl_device *device, int layer, enum part part, head_maker make_head, struct kvl_linear *out)
{
    kvl_status status = KVL_OK;
    const uint32_t n = model->dims.n_head;
    struct matrix *head = NULL;
    const struct kvl_gguf_tensor **tensor = NULL;
    KVL_TRY(kvl_alloc(&head, n, sizeof *head));
    KVL_TRY(kvl_alloc(&tensor, n, sizeof *tensor));
    for (uint32_t h = 0; h < n; h++) {
        KVL_TRY(make_head(model, layer, part, h, &head[h]));
        tensor[h] = &head[h].tensor;
    }
    status = kvl_linear_load(device, "latent attention", layer, tensor, n, (struct kvl_linear_form){.heads = true}, out);
done:
    for (uint32_t h = 0; head != NULL && h < n; h++) matrix_free(&head[h]);
    kvl_free(&head);
    kvl_free(&tensor);
    return status;
}

static kvl_status load_matrices(const struct kvl_model *model, struct kvl_device *device, int layer, struct kvl_mla *mla)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = &model->dims;
    if (dims->mla.q_rank != 0) KVL_TRY(load_matrix(device, layer, find(model, layer, "attn_q_a"), &mla->query_down));
    KVL_TRY(load_matrix(device, layer, find(model, layer, "attn_kv_a_mqa"), &mla->latent_down));
    for (int part = 0; part < PARTS; part++) KVL_TRY(load_heads(model, device, layer, part, read_head, &mla->heads[part]));
    if (!dims->mla.expanded) goto done;
    KVL_TRY(load_heads(model, device, layer, POSITION, make_identity, &mla->copy_position));
    KVL_TRY(load_heads(model, device, layer, VALUE, make_identity, &mla->copy_value));
done:
    return status;
}

kvl_status kvl_mla_load(const struct kvl_model *model, struct kvl_device *device, int layer, struct kvl_mla **out)
{
    kvl_status status = KVL_OK;
    struct kvl_mla *mla = NULL;
    KVL_TRY(kvl_alloc(&mla, 1, sizeof *mla));
    KVL_TRY(load_vector(model, device, layer, "attn_q_a_norm", &mla->query_norm));
    KVL_TRY(load_vector(model, device, layer, "attn_kv_a_norm", &mla->latent_norm));
    KVL_TRY(load_matrices(model, device, layer, mla));
    *out = mla;
    mla = NULL;
done:
    kvl_mla_free(&mla);
    return status;
}

void kvl_mla_free(struct kvl_mla **mla)
{
    struct kvl_mla *m = *mla;
    if (m == NULL) return;
    kvl_buffer_free(&m->query_norm);
    kvl_buffer_free(&m->latent_norm);
    kvl_linear_free(&m->query_down);
    kvl_linear_free(&m->latent_down);
    for (int part = 0; part < PARTS; part++) kvl_linear_free(&m->heads[part]);
    kvl_linear_free(&m->copy_position);
    kvl_linear_free(&m->copy_value);
    kvl_free(mla);
}

static uint64_t whole_bytes(const struct kvl_gguf_tensor *tensor) { return kvl_linear_bytes(kvl_quant_type(tensor->type), tensor->dim[1], tensor->dim[0], false); }

static uint64_t heads_bytes(const struct kvl_model *model, uint32_t type, uint64_t n_rows, uint64_t columns)
{
    return kvl_linear_heads_bytes(kvl_quant_type(type), model->dims.n_head, n_rows, columns);
}

static uint64_t part_bytes(const struct kvl_model *model, int layer, enum part part)
{
    const struct source s = locate(model, layer, part, 0);
    return s.is_transposed ? heads_bytes(model, KVL_GGUF_F32, s.tensor->dim[0], s.n) : heads_bytes(model, s.tensor->type, s.n, s.tensor->dim[0]);
}

uint64_t kvl_mla_bytes(const struct kvl_model *model, int layer)
{
    const struct kvl_dims *dims = &model->dims;
    const struct kvl_mla_dims *d = &dims->mla;
    if (d->kv_rank == 0) return 0;
    const uint64_t norms = d->q_rank + (find(model, layer, "attn_kv_a_norm") != NULL ? d->kv_rank : 0ull);
    uint64_t bytes = norms * sizeof(float) + whole_bytes(find(model, layer, "attn_kv_a_mqa"));
    if (d->q_rank != 0) bytes += whole_bytes(find(model, layer, "attn_q_a"));
    for (int part = 0; part < PARTS; part++) bytes += part_bytes(model, layer, part);
    if (d->expanded) bytes += heads_bytes(model, KVL_GGUF_F32, dims->rope_dim, dims->rope_dim) + heads_bytes(model, KVL_GGUF_F32, d->value_dim, d->value_dim);
    return bytes;
}

/* ---- sizes ---- */

struct kvl_cache_dims kvl_model_cache_dims(const struct kvl_dims *dims)
{
    struct kvl_cache_dims cache = {.n_layer = dims->n_layer, .n_head = dims->n_head, .n_kv_head = dims->n_kv_head, .head_dim = dims->head_dim,
                                   .window = dims->window, .full_every = dims->full_every, .kv_source = dims->kv_source};
    if (dims->mla.kv_rank == 0) return cache;
    cache.joint_value_dim = dims->mla.expanded ? 0 : dims->mla.kv_rank;
    cache.scale = 1.0f / sqrtf((float)(dims->mla.content_dim + dims->rope_dim));
    return cache;
}

uint64_t kvl_mla_products(const struct kvl_dims *dims)
{
    const struct kvl_mla_dims *d = &dims->mla;
    const uint64_t queries = (uint64_t)dims->n_head * (d->content_dim + dims->rope_dim), values = (uint64_t)dims->n_head * d->value_dim;
    const uint64_t down = (uint64_t)dims->n_embd * (d->q_rank + d->kv_rank + dims->rope_dim), up = (dims->n_head * (uint64_t)d->content_dim + values) * d->kv_rank;
    return down + queries * (d->q_rank != 0 ? d->q_rank : dims->n_embd) + up + values * dims->n_embd;
}

enum { COLUMNS = 32 }; /* that products read at once: behind the last row, too */

static uint64_t padded(uint64_t columns) { return (columns + COLUMNS - 1) / COLUMNS * COLUMNS; }

/* Of all heads: their contents, or their values. */
static uint64_t heads_row(const struct kvl_dims *dims)
{
    const uint64_t value = dims->mla.value_dim, content = dims->mla.content_dim;
    return padded(dims->n_head * (value > content ? value : content));
}

void kvl_mla_scratch(const struct kvl_dims *dims, uint64_t u, uint64_t bytes[KVL_MLA_SCRATCH])
{
    const bool used = dims->mla.kv_rank != 0;
    bytes[KVL_MLA_QUERY] = used ? u * padded(dims->mla.q_rank != 0 ? dims->mla.q_rank : 1) * sizeof(float) : 0;
    bytes[KVL_MLA_LATENT] = used ? (u * padded((uint64_t)dims->mla.kv_rank + dims->rope_dim) + COLUMNS) * sizeof(float) : 0;
    bytes[KVL_MLA_HEADS] = used ? (u * heads_row(dims) + COLUMNS) * sizeof(float) : 0;
}

/* ---- the forward pass ---- */

static struct kvl_rows at(struct kvl_rows rows, uint64_t offset)
{
    rows.offset += offset;
    return rows;
}

/* Rows of all heads, `step` floats apart. */
static struct kvl_rows each(struct kvl_rows rows, uint64_t step)
{
    rows.step = step;
    return rows;
}

static struct kvl_rows scratch_rows(const struct kvl_mla_run *run, int which)
{
    const struct kvl_dims *dims = run->dims;
    const uint64_t stride[KVL_MLA_SCRATCH] = {padded(dims->mla.q_rank), padded((uint64_t)dims->mla.kv_rank + dims->rope_dim), heads_row(dims)};
    return (struct kvl_rows){run->scratch[which], 0, stride[which], 0};
}

static kvl_status product(const struct kvl_mla_run *run, const struct kvl_linear *matrix, uint32_t n, struct kvl_rows x, struct kvl_rows y)
{
    return kvl_linear_run(run->kernels, matrix, n, x, y, false, run->exact);
}

/* The latent, and behind it the position part. */
static kvl_status make_latents(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_rows x, struct kvl_rows latent)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = run->dims;
    KVL_TRY(product(run, &mla->latent_down, n, x, latent));
    if (mla->latent_norm != NULL) KVL_TRY(kvl_rms_norm_run(run->kernels, n, dims->mla.kv_rank, dims->rms_eps, mla->latent_norm, latent, latent));
done:
    return status;
}

/* Queries and the joint row: content that W_UK has been moved into, then position. */
static kvl_status project_absorbed(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_rows query, struct kvl_rows x,
                                   struct kvl_rows stage)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = run->dims;
    const struct kvl_rows content = each(scratch_rows(run, KVL_MLA_HEADS), dims->mla.content_dim), rows = each(stage, dims->head_dim);
    KVL_TRY(product(run, &mla->heads[CONTENT], n, query, content));
    KVL_TRY(product(run, &mla->heads[UP], n, content, rows));
    KVL_TRY(product(run, &mla->heads[POSITION], n, query, at(rows, dims->mla.kv_rank)));
    KVL_TRY(make_latents(mla, run, n, x, at(stage, (uint64_t)dims->n_head * dims->head_dim)));
done:
    return status;
}

/* Queries, keys and values as any attention has them: position, then content; a value's row is filled up with the zeros that it was made with. */
static kvl_status project_expanded(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_rows query, struct kvl_rows x,
                                   struct kvl_rows stage)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = run->dims;
    const uint64_t d = dims->head_dim, side = dims->n_head * d;
    const struct kvl_rows latent = scratch_rows(run, KVL_MLA_LATENT), rows = each(stage, d), keys = at(rows, side), values = at(keys, side);
    KVL_TRY(make_latents(mla, run, n, x, latent));
    KVL_TRY(product(run, &mla->heads[POSITION], n, query, rows));
    KVL_TRY(product(run, &mla->heads[CONTENT], n, query, at(rows, dims->rope_dim)));
    KVL_TRY(product(run, &mla->copy_position, n, at(latent, dims->mla.kv_rank), keys));
    KVL_TRY(product(run, &mla->heads[UP], n, latent, at(keys, dims->rope_dim)));
    KVL_TRY(product(run, &mla->heads[VALUE], n, latent, values));
done:
    return status;
}

kvl_status kvl_mla_project(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_rows hidden, const struct kvl_norm *norm,
                           struct kvl_buffer *stage)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *dims = run->dims;
    const struct kvl_cache_dims cache = kvl_model_cache_dims(dims);
    const struct kvl_rows rows = {stage, 0, kvl_stage_row(&cache), 0};
    struct kvl_rows query = norm->normed;
    KVL_TRY(kvl_rms_norm_run(run->kernels, n, dims->n_embd, norm->eps, norm->weight, hidden, norm->normed));
    if (dims->mla.q_rank != 0) {
        query = scratch_rows(run, KVL_MLA_QUERY);
        KVL_TRY(product(run, &mla->query_down, n, norm->normed, query));
        KVL_TRY(kvl_rms_norm_run(run->kernels, n, dims->mla.q_rank, dims->rms_eps, mla->query_norm, query, query));
    }
    KVL_TRY((dims->mla.expanded ? project_expanded : project_absorbed)(mla, run, n, query, norm->normed, rows));
done:
    return status;
}

kvl_status kvl_mla_values(const struct kvl_mla *mla, const struct kvl_mla_run *run, uint32_t n, struct kvl_buffer *attended, struct kvl_rows *values)
{
    const struct kvl_cache_dims cache = kvl_model_cache_dims(run->dims);
    const uint64_t d = kvl_output_dim(&cache);
    *values = each(scratch_rows(run, KVL_MLA_HEADS), run->dims->mla.value_dim);
    return product(run, run->dims->mla.expanded ? &mla->copy_value : &mla->heads[VALUE], n, (struct kvl_rows){attended, 0, d * run->dims->n_head, d}, *values);
}
