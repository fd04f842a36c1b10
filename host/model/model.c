/* Opening a model: GGUF, architecture, dimensions, tensor shapes, rotary frequencies, tokenizer. */
#include "model.h"
#include "arch.h"
#include "file.h"
#include "mem.h"
#include "quant.h"
#include "text.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- architecture ---- */

static kvl_status unknown_arch(const struct kvl_gguf *gguf, struct kvl_gguf_str name)
{
    struct kvl_text known = {0};
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < kvl_n_archs; i++) KVL_TRY(kvl_text_printf(&known, " %s", kvl_archs[i].name));
    status = kvl_fail(KVL_E_UNSUPPORTED, "%s: architecture \"%s\" is not supported; known:%s", kvl_gguf_path(gguf),
                      kvl_gguf_show(name).text, known.data);
done:
    kvl_text_free(&known);
    return status;
}

static kvl_status find_arch(struct kvl_model *model)
{
    struct kvl_gguf_str name;
    const kvl_status status = kvl_gguf_need_str(model->gguf, "general.architecture", &name);
    if (status != KVL_OK) return status;
    model->arch = kvl_arch_find(name);
    return model->arch != NULL ? KVL_OK : unknown_arch(model->gguf, name);
}

/* ---- layers that read the keys and values of another (cross-layer attention, arXiv:2405.12981) ---- */

static kvl_status read_kv_source(struct kvl_model *model)
{
    static const char key[] = "kvlab.attention.kv_source";
    const struct kvl_gguf *gguf = model->gguf;
    const uint32_t n_layer = model->dims.n_layer;
    const void *values;
    uint64_t n;
    kvl_status status = KVL_OK;
    if (!kvl_gguf_has(gguf, key)) return KVL_OK;
    if (!model->arch->shares)
        return kvl_fail(KVL_E_UNSUPPORTED, "%s: key \"%s\" is for architecture llama, this is %s", kvl_gguf_path(gguf), key, model->arch->name);
    if (!kvl_gguf_get_i32_array(gguf, key, &values, &n) || n != n_layer)
        return kvl_fail(KVL_E_FORMAT, "%s: key \"%s\": wanted an array of %" PRIu32 " integers, one a layer", kvl_gguf_path(gguf), key, n_layer);
    KVL_TRY(kvl_alloc(&model->kv_source, n_layer, sizeof *model->kv_source));
    memcpy(model->kv_source, values, n_layer * sizeof *model->kv_source);
    for (uint32_t l = 0; l < n_layer; l++)
        if (model->kv_source[l] != l && (l == 0 || model->kv_source[l] != model->kv_source[l - 1])) {
            status = kvl_fail(KVL_E_UNSUPPORTED, "%s: key \"%s\": layer %" PRIu32 " reads layer %" PRId32 "; wanted itself or what the layer below reads",
                              kvl_gguf_path(gguf), key, l, (int32_t)model->kv_source[l]);
            goto done;
        }
    model->dims.kv_source = model->kv_source;
done:
    return status;
}

/* ---- tensors ---- */

static kvl_status check_shape(const struct kvl_gguf *gguf, const char *name, const struct kvl_gguf_tensor *tensor, uint64_t row,
                              uint64_t n_rows, uint64_t n_matrices)
{
    if (tensor->dim[0] == row && tensor->dim[1] == n_rows && tensor->dim[2] == n_matrices && tensor->dim[3] == 1) return KVL_OK;
    char matrices[32] = "";
    if (n_matrices != 1) snprintf(matrices, sizeof matrices, ", %" PRIu64, n_matrices);
    return kvl_fail(KVL_E_FORMAT,
                    "%s: tensor \"%s\": wanted [%" PRIu64 ", %" PRIu64 "%s], found [%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64
                    "]",
                    kvl_gguf_path(gguf), name, row, n_rows, matrices, tensor->dim[0], tensor->dim[1], tensor->dim[2], tensor->dim[3]);
}

/* Marks the tensor in listed[]. */
static kvl_status check_tensor(const struct kvl_model *model, const struct kvl_arch_tensor *wanted, uint32_t layer, bool *listed)
{
    const struct kvl_dims *d = &model->dims;
    const uint64_t extents[KVL_N_EXTENTS] = {
        [KVL_ONE] = 1,
        [KVL_EMBD] = d->n_embd,
        [KVL_FF] = d->n_ff,
        [KVL_VOCAB] = d->n_vocab,
        [KVL_QUERY_ROWS] = (uint64_t)d->n_head * d->head_dim,
        [KVL_KV_ROWS] = (uint64_t)d->n_kv_head * d->head_dim,
        [KVL_HEAD] = d->head_dim,
        [KVL_ROPE_PAIRS] = d->rope_dim / 2,
        [KVL_Q_RANK] = d->mla.q_rank,
        [KVL_KV_RANK] = d->mla.kv_rank,
        [KVL_LATENT_ROW] = (uint64_t)d->mla.kv_rank + d->rope_dim,
        [KVL_MLA_QUERY_ROWS] = (uint64_t)d->n_head * (d->mla.content_dim + d->rope_dim),
        [KVL_MLA_UP_ROWS] = (uint64_t)d->n_head * (d->mla.content_dim + d->mla.value_dim),
        [KVL_CONTENT] = d->mla.content_dim,
        [KVL_VALUE] = d->mla.value_dim,
        [KVL_VALUE_ROWS] = (uint64_t)d->n_head * d->mla.value_dim,
        [KVL_HEADS] = d->n_head,
    };
    char name[64];
    if (wanted->in_layer)
        snprintf(name, sizeof name, "blk.%" PRIu32 ".%s", layer, wanted->name);
    else
        snprintf(name, sizeof name, "%s", wanted->name);
    const struct kvl_gguf_tensor *tensor = kvl_gguf_tensor_find(model->gguf, name);
    if (tensor == NULL && wanted->optional) return KVL_OK;
    if (tensor == NULL) return kvl_fail(KVL_E_FORMAT, "%s: tensor \"%s\" is missing", kvl_gguf_path(model->gguf), name);
    listed[tensor - kvl_gguf_tensor_at(model->gguf, 0)] = true;
    return check_shape(model->gguf, name, tensor, extents[wanted->row], extents[wanted->n_rows], extents[wanted->n_matrices]);
}

static kvl_status check_all_listed(const struct kvl_model *model, const bool *listed)
{
    for (uint64_t i = 0; i < kvl_gguf_n_tensors(model->gguf); i++) {
        const struct kvl_gguf_str name = kvl_gguf_tensor_at(model->gguf, i)->name;
        if (!listed[i])
            return kvl_fail(KVL_E_UNSUPPORTED, "%s: tensor \"%s\" has no place in architecture %s with %" PRIu32 " layers",
                            kvl_gguf_path(model->gguf), kvl_gguf_show(name).text, model->arch->name, model->dims.n_layer);
    }
    return KVL_OK;
}

static kvl_status check_tensors(struct kvl_model *model)
{
    kvl_status status = KVL_OK;
    bool *listed = NULL;
    KVL_TRY(kvl_alloc(&listed, kvl_gguf_n_tensors(model->gguf), sizeof *listed));
    for (size_t set = 0; set < KVL_ARCH_SETS; set++)
        for (size_t i = 0; i < model->arch->set[set].n; i++) {
            const struct kvl_arch_tensor *wanted = &model->arch->set[set].tensor[i];
            const uint32_t n = wanted->in_layer ? model->dims.n_layer : 1;
            for (uint32_t layer = 0; layer < n; layer++)
                if (wanted->n_rows != KVL_KV_ROWS || kvl_layer_makes_kv(&model->dims, layer)) KVL_TRY(check_tensor(model, wanted, layer, listed));
        }
    KVL_TRY(check_all_listed(model, listed));
    model->dims.tied_output = kvl_gguf_tensor_find(model->gguf, "output.weight") == NULL;
done:
    kvl_free(&listed);
    return status;
}

/* ---- rotary frequencies ---- */

/* What positions are divided by: rope.scaling.* or its older name; 1 without them. As llama.cpp reads them, type defaults to linear
 * and factor 0 means none. */
static kvl_status read_rope_factor(const struct kvl_model *model, double *factor)
{
    const struct kvl_gguf *gguf = model->gguf;
    const struct kvl_arch_key type_key = kvl_arch_key(model->arch, "rope.scaling.type"),
                              new_key = kvl_arch_key(model->arch, "rope.scaling.factor"),
                              old_key = kvl_arch_key(model->arch, "rope.scale_linear");
    const char *factor_key = kvl_gguf_has(gguf, new_key.text) ? new_key.text : old_key.text;
    struct kvl_gguf_str type = {"linear", 6};
    kvl_status status = KVL_OK;
    *factor = 1;
    if (kvl_gguf_has(gguf, type_key.text)) KVL_TRY(kvl_gguf_need_str(gguf, type_key.text, &type));
    if (type.size == 4 && memcmp(type.data, "none", 4) == 0) return KVL_OK;
    if (type.size != 6 || memcmp(type.data, "linear", 6) != 0)
        return kvl_fail(KVL_E_UNSUPPORTED, "%s: %s is \"%s\", kvlab knows: none linear", kvl_gguf_path(gguf), type_key.text,
                        kvl_gguf_show(type).text);
    if (!kvl_gguf_has(gguf, factor_key)) return KVL_OK;
    KVL_TRY(kvl_gguf_need_f64(gguf, factor_key, factor));
    if (*factor < 0) return kvl_fail(KVL_E_FORMAT, "%s: %s is %g, wanted 0 or more", kvl_gguf_path(gguf), factor_key, *factor);
    if (*factor == 0) *factor = 1;
done:
    return status;
}

/* Divides by the factors that long-context llama 3 models carry as a tensor, one a pair. */
static kvl_status apply_rope_factors(struct kvl_model *model)
{
    const struct kvl_gguf_tensor *tensor = kvl_gguf_tensor_find(model->gguf, "rope_freqs.weight");
    if (tensor == NULL) return KVL_OK;
    const struct kvl_quant_type *type = kvl_quant_type(tensor->type);
    float *divisor = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&divisor, tensor->dim[0], sizeof *divisor));
    type->dequantize(tensor->data, tensor->dim[0] / type->block, divisor);
    for (uint32_t i = 0; i < model->dims.rope_dim / 2; i++) {
        if (!(divisor[i] > 0) || !isfinite(divisor[i])) {
            status = kvl_fail(KVL_E_FORMAT, "%s: rope_freqs.weight[%" PRIu32 "] is %g, wanted more than 0",
                              kvl_gguf_path(model->gguf), i, divisor[i]);
            goto done;
        }
        model->rope_freq[i] /= divisor[i];
    }
done:
    kvl_free(&divisor);
    return status;
}

/* Pair i turns by base^(-2i / rope_dim) a position (Su et al. 2021), over factor. */
static kvl_status make_freq(const struct kvl_dims *dims, double base, double factor, float **out)
{
    const uint32_t n = dims->rope_dim / 2;
    const kvl_status status = kvl_alloc(out, n, sizeof **out);
    for (uint32_t i = 0; i < n && status == KVL_OK; i++) (*out)[i] = (float)(pow(base, -2.0 * i / dims->rope_dim) / factor);
    return status;
}

static kvl_status make_rope_freq(struct kvl_model *model)
{
    kvl_status status = KVL_OK;
    double factor;
    KVL_TRY(read_rope_factor(model, &factor));
    KVL_TRY(make_freq(&model->dims, model->dims.rope_base, factor, &model->rope_freq));
    KVL_TRY(apply_rope_factors(model));
    if (model->dims.slide_rope_base != model->dims.rope_base)
        KVL_TRY(make_freq(&model->dims, model->dims.slide_rope_base, 1, &model->slide_rope_freq));
done:
    return status;
}

/* ---- the whole ---- */

static kvl_status make_tokenizer(struct kvl_model *model)
{
    const kvl_status status = kvl_tokenizer_new(model->gguf, &model->tokenizer);
    if (status != KVL_OK) return status;
    const uint32_t n = kvl_tokenizer_n_vocab(model->tokenizer);
    if (n != model->dims.n_vocab)
        return kvl_fail(KVL_E_FORMAT, "%s: the tokenizer has %" PRIu32 " tokens, token_embd.weight %" PRIu32 " rows",
                        kvl_gguf_path(model->gguf), n, model->dims.n_vocab);
    return KVL_OK;
}

/* general.name, else the file's name; cut between characters, no control bytes. */
static void make_name(struct kvl_model *model)
{
    const char *path = kvl_gguf_path(model->gguf), *slash = strrchr(path, '/');
    const char *file = slash != NULL ? slash + 1 : path;
    struct kvl_gguf_str name = {file, strlen(file)};
    kvl_gguf_get_str(model->gguf, "general.name", &name);
    size_t n = name.size;
    if (n >= sizeof model->name)
        for (n = sizeof model->name - 1; n > 0 && ((uint8_t)name.data[n] & 0xc0) == 0x80;) n--;
    for (size_t i = 0; i < n; i++) model->name[i] = (uint8_t)name.data[i] < ' ' || name.data[i] == 127 ? '?' : name.data[i];
    model->name[n] = '\0';
}

kvl_status kvl_model_open(const char *path, struct kvl_model **out)
{
    kvl_status status = KVL_OK;
    struct kvl_model *model = NULL;
    KVL_TRY(kvl_alloc(&model, 1, sizeof *model));
    KVL_TRY(kvl_gguf_open(path, &model->gguf));
    KVL_TRY(find_arch(model));
    KVL_TRY(model->arch->read_dims(model->arch, model->gguf, &model->dims));
    KVL_TRY(read_kv_source(model));
    KVL_TRY(check_tensors(model));
    KVL_TRY(make_rope_freq(model));
    KVL_TRY(make_tokenizer(model));
    KVL_TRY(kvl_sha256_file(path, model->sha256));
    make_name(model);
    *out = model;
    model = NULL;
done:
    kvl_model_close(&model);
    return status;
}

bool kvl_layer_makes_kv(const struct kvl_dims *dims, uint32_t layer) { return dims->kv_source == NULL || dims->kv_source[layer] == layer; }

kvl_status kvl_model_expand(struct kvl_model *model)
{
    struct kvl_dims *d = &model->dims;
    if (d->mla.kv_rank == 0) return kvl_fail(KVL_E_UNSUPPORTED, "%s has no latent attention that could be expanded", model->name);
    if (d->mla.value_dim > d->mla.content_dim + d->rope_dim)
        return kvl_fail(KVL_E_UNSUPPORTED, "%s: values of %u channels do not fit rows of %u", model->name, d->mla.value_dim, d->mla.content_dim + d->rope_dim);
    d->mla.expanded = true;
    d->n_kv_head = d->n_head;
    d->head_dim = d->mla.content_dim + d->rope_dim;
    return KVL_OK;
}

void kvl_model_close(struct kvl_model **model)
{
    struct kvl_model *m = *model;
    if (m == NULL) return;
    kvl_tokenizer_free(&m->tokenizer);
    kvl_gguf_close(&m->gguf);
    kvl_free(&m->rope_freq);
    kvl_free(&m->slide_rope_freq);
    kvl_free(&m->kv_source);
    kvl_free(model);
}
