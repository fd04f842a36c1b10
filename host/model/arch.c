/* The table of architectures and the readers of their dimensions. */
#include "arch.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Beyond these a file is broken; they keep products of two in 64 bits. */
enum { MAX_LAYERS = 4096, MAX_WIDTH = 1 << 24, MAX_HEADS = 1 << 14, MAX_HEAD_DIM = 1 << 14 };

struct kvl_arch_key kvl_arch_key(const struct kvl_arch *arch, const char *suffix)
{
    struct kvl_arch_key key;
    snprintf(key.text, sizeof key.text, "%s.%s", arch->name, suffix);
    return key;
}

static kvl_status read_count(const struct kvl_arch *arch, const struct kvl_gguf *gguf, const char *suffix, uint32_t max,
                             uint32_t *out)
{
    uint64_t value;
    const kvl_status status = kvl_gguf_need_u64(gguf, kvl_arch_key(arch, suffix).text, 1, max, &value);
    if (status == KVL_OK) *out = (uint32_t)value;
    return status;
}

static kvl_status read_count_or(const struct kvl_arch *arch, const struct kvl_gguf *gguf, const char *suffix, uint32_t max,
                                uint32_t otherwise, uint32_t *out)
{
    *out = otherwise;
    return kvl_gguf_has(gguf, kvl_arch_key(arch, suffix).text) ? read_count(arch, gguf, suffix, max, out) : KVL_OK;
}

static kvl_status read_positive(const struct kvl_arch *arch, const struct kvl_gguf *gguf, const char *suffix, float *out)
{
    const struct kvl_arch_key key = kvl_arch_key(arch, suffix);
    double value;
    const kvl_status status = kvl_gguf_need_f64(gguf, key.text, &value);
    if (status != KVL_OK) return status;
    *out = (float)value;
    if (!(*out > 0) || isinf(*out))
        return kvl_fail(KVL_E_FORMAT, "%s: key \"%s\" is %g, wanted more than 0 and within f32", kvl_gguf_path(gguf), key.text,
                        value);
    return KVL_OK;
}

/* Rows of the token embedding; the key vocab_size, if there, must agree. */
static kvl_status read_vocab(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims)
{
    const struct kvl_gguf_tensor *embedding = kvl_gguf_tensor_find(gguf, "token_embd.weight");
    if (embedding == NULL) return kvl_fail(KVL_E_FORMAT, "%s: tensor \"token_embd.weight\" is missing", kvl_gguf_path(gguf));
    if (embedding->dim[1] > INT32_MAX)
        return kvl_fail(KVL_E_FORMAT, "%s: tensor \"token_embd.weight\" has %" PRIu64 " rows, wanted at most %d",
                        kvl_gguf_path(gguf), embedding->dim[1], INT32_MAX);
    dims->n_vocab = (uint32_t)embedding->dim[1];
    const struct kvl_arch_key key = kvl_arch_key(arch, "vocab_size");
    uint64_t value;
    return kvl_gguf_has(gguf, key.text) ? kvl_gguf_need_u64(gguf, key.text, dims->n_vocab, dims->n_vocab, &value) : KVL_OK;
}

/* ---- decoders with RMS norm, rotary positions, grouped queries and a gated feed-forward ---- */

/* Keys that ask for a computation that no row has, unless they are 0. */
static const char *const unsupported[] = {"expert_count", "attention.clamp_kqv", "logit_scale", "attn_logit_softcapping",
                                          "final_logit_softcapping"};

static kvl_status refuse_unless_zero(const struct kvl_arch *arch, const struct kvl_gguf *gguf, const char *suffix)
{
    const struct kvl_arch_key key = kvl_arch_key(arch, suffix);
    uint64_t integer = 0;
    double real = 0;
    if (!kvl_gguf_has(gguf, key.text)) return KVL_OK;
    const bool is_number = kvl_gguf_get_u64(gguf, key.text, &integer) || kvl_gguf_get_f64(gguf, key.text, &real);
    if (is_number && integer == 0 && real == 0) return KVL_OK;
    return kvl_fail(KVL_E_UNSUPPORTED, "%s: key \"%s\" asks for what kvlab does not compute; wanted 0 or absent", kvl_gguf_path(gguf),
                    key.text);
}

static kvl_status refuse_unsupported(const struct kvl_arch *arch, const struct kvl_gguf *gguf)
{
    kvl_status status = arch->slides ? KVL_OK : refuse_unless_zero(arch, gguf, "attention.sliding_window");
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported && status == KVL_OK; i++)
        status = refuse_unless_zero(arch, gguf, unsupported[i]);
    return status;
}

static kvl_status check_heads(const struct kvl_gguf *gguf, const struct kvl_dims *dims, uint32_t value_length)
{
    const char *path = kvl_gguf_path(gguf);
    if (dims->head_dim == 0)
        return kvl_fail(KVL_E_FORMAT,
                        "%s: embedding length %" PRIu32 " is not a multiple of %" PRIu32 " heads and there is no key_length", path,
                        dims->n_embd, dims->n_head);
    if (dims->n_head % dims->n_kv_head != 0)
        return kvl_fail(KVL_E_FORMAT, "%s: %" PRIu32 " query heads are not a multiple of %" PRIu32 " kv heads", path, dims->n_head,
                        dims->n_kv_head);
    if (dims->rope_dim % 2 != 0 || dims->rope_dim > dims->head_dim)
        return kvl_fail(KVL_E_FORMAT, "%s: rope.dimension_count is %" PRIu32 ", wanted an even number up to the head's %" PRIu32,
                        path, dims->rope_dim, dims->head_dim);
    if (value_length != dims->head_dim)
        return kvl_fail(KVL_E_UNSUPPORTED, "%s: value_length is %" PRIu32 ", wanted key_length %" PRIu32, path, value_length,
                        dims->head_dim);
    return KVL_OK;
}

static kvl_status read_base(const struct kvl_arch *arch, const struct kvl_gguf *gguf, const char *suffix, float otherwise, float *base)
{
    *base = otherwise;
    return kvl_gguf_has(gguf, kvl_arch_key(arch, suffix).text) ? read_positive(arch, gguf, suffix, base) : KVL_OK;
}

/* Rotary bases, and which layers slide. */
static kvl_status read_layers(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims)
{
    kvl_status status = KVL_OK;
    uint64_t window = 0;
    KVL_TRY(read_base(arch, gguf, "rope.freq_base", 10000.0f, &dims->rope_base));
    dims->slide_rope_base = dims->rope_base;
    if (!kvl_gguf_has(gguf, kvl_arch_key(arch, "attention.sliding_window").text)) return KVL_OK;
    KVL_TRY(kvl_gguf_need_u64(gguf, kvl_arch_key(arch, "attention.sliding_window").text, 0, INT32_MAX, &window));
    dims->window = (uint32_t)window;
    if (dims->window == 0) return KVL_OK;
    KVL_TRY(read_count_or(arch, gguf, "attention.sliding_window_pattern", MAX_LAYERS, arch->full_every, &dims->full_every));
    if (arch->slide_rope_base > 0) KVL_TRY(read_base(arch, gguf, "rope.freq_base_swa", arch->slide_rope_base, &dims->slide_rope_base));
done:
    return status;
}

/* What every architecture says. */
static kvl_status read_common_dims(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims)
{
    kvl_status status = KVL_OK;
    KVL_TRY(refuse_unsupported(arch, gguf));
    KVL_TRY(read_count(arch, gguf, "block_count", MAX_LAYERS, &dims->n_layer));
    KVL_TRY(read_count(arch, gguf, "context_length", INT32_MAX, &dims->n_ctx_train));
    KVL_TRY(read_count(arch, gguf, "embedding_length", MAX_WIDTH, &dims->n_embd));
    KVL_TRY(read_count(arch, gguf, "feed_forward_length", MAX_WIDTH, &dims->n_ff));
    KVL_TRY(read_count(arch, gguf, "attention.head_count", MAX_HEADS, &dims->n_head));
done:
    return status;
}

static kvl_status read_decoder_dims(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims)
{
    kvl_status status = KVL_OK;
    uint32_t value_length;
    KVL_TRY(read_common_dims(arch, gguf, dims));
    KVL_TRY(read_count_or(arch, gguf, "attention.head_count_kv", MAX_HEADS, dims->n_head, &dims->n_kv_head));
    const uint32_t shared = dims->n_embd % dims->n_head == 0 ? dims->n_embd / dims->n_head : 0;
    KVL_TRY(read_count_or(arch, gguf, "attention.key_length", MAX_HEAD_DIM, shared, &dims->head_dim));
    KVL_TRY(read_count_or(arch, gguf, "attention.value_length", MAX_HEAD_DIM, dims->head_dim, &value_length));
    KVL_TRY(read_count_or(arch, gguf, "rope.dimension_count", MAX_HEAD_DIM, dims->head_dim, &dims->rope_dim));
    KVL_TRY(check_heads(gguf, dims, value_length));
    KVL_TRY(read_positive(arch, gguf, "attention.layer_norm_rms_epsilon", &dims->rms_eps));
    KVL_TRY(read_layers(arch, gguf, dims));
    dims->query_gain = 1.0f;
    KVL_TRY(read_vocab(arch, gguf, dims));
done:
    return status;
}

/* Scores are divided by sqrt(head_dim) in all rows; another scale goes into the queries' norm. */
static kvl_status read_gemma3_dims(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims)
{
    enum { LAYERS_OF_27B = 62 }; /* the one size whose scale is that of the embedding's share of a head, which no key says */
    kvl_status status = KVL_OK;
    float scale;
    KVL_TRY(read_decoder_dims(arch, gguf, dims));
    const uint32_t divisor = dims->n_layer == LAYERS_OF_27B ? dims->n_embd / dims->n_head : dims->head_dim;
    scale = 1.0f / sqrtf((float)divisor);
    if (kvl_gguf_has(gguf, kvl_arch_key(arch, "attention.scale").text)) KVL_TRY(read_positive(arch, gguf, "attention.scale", &scale));
    dims->query_gain = scale * sqrtf((float)dims->head_dim);
done:
    return status;
}

static const struct kvl_arch_tensor decoder_tensors[] = {
    {"token_embd.weight", KVL_EMBD, KVL_VOCAB},
    {"output_norm.weight", KVL_EMBD, KVL_ONE},
    {"output.weight", KVL_EMBD, KVL_VOCAB, .optional = true}, /* absent: the token embedding is used */
    {"rope_freqs.weight", KVL_ROPE_PAIRS, KVL_ONE, .optional = true},
    {"attn_norm.weight", KVL_EMBD, KVL_ONE, .in_layer = true},
    {"attn_q.weight", KVL_EMBD, KVL_QUERY_ROWS, .in_layer = true},
    {"attn_k.weight", KVL_EMBD, KVL_KV_ROWS, .in_layer = true},
    {"attn_v.weight", KVL_EMBD, KVL_KV_ROWS, .in_layer = true},
    {"attn_output.weight", KVL_QUERY_ROWS, KVL_EMBD, .in_layer = true},
    {"ffn_norm.weight", KVL_EMBD, KVL_ONE, .in_layer = true},
    {"ffn_gate.weight", KVL_EMBD, KVL_FF, .in_layer = true},
    {"ffn_up.weight", KVL_EMBD, KVL_FF, .in_layer = true},
    {"ffn_down.weight", KVL_FF, KVL_EMBD, .in_layer = true},
};
static const struct kvl_arch_tensor qkv_biases[] = {
    {"attn_q.bias", KVL_QUERY_ROWS, KVL_ONE, .in_layer = true},
    {"attn_k.bias", KVL_KV_ROWS, KVL_ONE, .in_layer = true},
    {"attn_v.bias", KVL_KV_ROWS, KVL_ONE, .in_layer = true},
};
static const struct kvl_arch_tensor head_norms[] = {
    {"attn_q_norm.weight", KVL_HEAD, KVL_ONE, .in_layer = true},
    {"attn_k_norm.weight", KVL_HEAD, KVL_ONE, .in_layer = true},
};
static const struct kvl_arch_tensor post_norms[] = {
    {"post_attention_norm.weight", KVL_EMBD, KVL_ONE, .in_layer = true},
    {"post_ffw_norm.weight", KVL_EMBD, KVL_ONE, .in_layer = true},
};

/* ---- deepseek2: latent attention (mla.h), else as llama; without experts ---- */

/* Lengths of a head's key and value, as the file that says them for latents (key_length is then the latent's) or the older one has them. */
static kvl_status read_head_lengths(const struct kvl_arch *arch, const struct kvl_gguf *gguf, uint32_t *key, uint32_t *value)
{
    const bool of_latents = kvl_gguf_has(gguf, kvl_arch_key(arch, "attention.key_length_mla").text);
    kvl_status status = read_count(arch, gguf, of_latents ? "attention.key_length_mla" : "attention.key_length", MAX_HEAD_DIM, key);
    if (status == KVL_OK) status = read_count(arch, gguf, of_latents ? "attention.value_length_mla" : "attention.value_length", MAX_HEAD_DIM, value);
    return status;
}

static kvl_status check_latents(const struct kvl_gguf *gguf, const struct kvl_dims *dims, uint32_t key)
{
    const struct kvl_mla_dims *d = &dims->mla;
    if (dims->rope_dim % 8 != 0 || dims->rope_dim >= key)
        return kvl_fail(KVL_E_UNSUPPORTED, "%s: rope.dimension_count is %" PRIu32 ", wanted a multiple of 8 below the key's %" PRIu32, kvl_gguf_path(gguf),
                        dims->rope_dim, key);
    if (d->content_dim % 8 != 0 || d->value_dim % 8 != 0 || d->kv_rank % 8 != 0)
        return kvl_fail(KVL_E_UNSUPPORTED,
                        "%s: heads of %" PRIu32 " channels of content and %" PRIu32 " of value, latents of %" PRIu32 ": wanted multiples of 8",
                        kvl_gguf_path(gguf), d->content_dim, d->value_dim, d->kv_rank);
    return KVL_OK;
}

static kvl_status need_in_layer(const struct kvl_gguf *gguf, uint32_t layer, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "blk.%" PRIu32 ".%s", layer, name);
    return kvl_gguf_tensor_find(gguf, full) != NULL ? KVL_OK : kvl_fail(KVL_E_FORMAT, "%s: tensor \"%s\" is missing", kvl_gguf_path(gguf), full);
}

/* Queries of low rank or not; what makes keys and values of latents in one tensor or in two. */
static kvl_status check_layer_tensors(const struct kvl_gguf *gguf, const struct kvl_dims *dims, uint32_t layer)
{
    static const char *const low_rank[] = {"attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight"}, *const up[] = {"attn_k_b.weight", "attn_v_b.weight"};
    kvl_status status = KVL_OK;
    char joint[64];
    snprintf(joint, sizeof joint, "blk.%" PRIu32 ".attn_kv_b.weight", layer);
    if (dims->mla.q_rank == 0) KVL_TRY(need_in_layer(gguf, layer, "attn_q.weight"));
    for (size_t i = 0; dims->mla.q_rank != 0 && i < sizeof low_rank / sizeof *low_rank; i++) KVL_TRY(need_in_layer(gguf, layer, low_rank[i]));
    for (size_t i = 0; kvl_gguf_tensor_find(gguf, joint) == NULL && i < sizeof up / sizeof *up; i++) KVL_TRY(need_in_layer(gguf, layer, up[i]));
done:
    return status;
}

static kvl_status read_deepseek2_dims(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims)
{
    kvl_status status = KVL_OK;
    uint32_t key;
    KVL_TRY(read_common_dims(arch, gguf, dims));
    KVL_TRY(read_count(arch, gguf, "attention.kv_lora_rank", MAX_HEAD_DIM, &dims->mla.kv_rank));
    KVL_TRY(read_count_or(arch, gguf, "attention.q_lora_rank", MAX_WIDTH, 0, &dims->mla.q_rank));
    KVL_TRY(read_count(arch, gguf, "rope.dimension_count", MAX_HEAD_DIM, &dims->rope_dim));
    KVL_TRY(read_head_lengths(arch, gguf, &key, &dims->mla.value_dim));
    dims->mla.content_dim = key > dims->rope_dim ? key - dims->rope_dim : 0;
    KVL_TRY(check_latents(gguf, dims, key));
    dims->n_kv_head = 1;
    dims->head_dim = dims->mla.kv_rank + dims->rope_dim;
    KVL_TRY(read_positive(arch, gguf, "attention.layer_norm_rms_epsilon", &dims->rms_eps));
    KVL_TRY(read_layers(arch, gguf, dims));
    dims->query_gain = 1.0f;
    KVL_TRY(read_vocab(arch, gguf, dims));
    for (uint32_t l = 0; l < dims->n_layer; l++) KVL_TRY(check_layer_tensors(gguf, dims, l));
done:
    return status;
}

/* Which of the optional ones a layer needs: check_layer_tensors. */
static const struct kvl_arch_tensor deepseek2_tensors[] = {
    {"token_embd.weight", KVL_EMBD, KVL_VOCAB},
    {"output_norm.weight", KVL_EMBD, KVL_ONE},
    {"output.weight", KVL_EMBD, KVL_VOCAB, .optional = true},
    {"rope_freqs.weight", KVL_ROPE_PAIRS, KVL_ONE, .optional = true},
    {"attn_norm.weight", KVL_EMBD, KVL_ONE, .in_layer = true},
    {"attn_q.weight", KVL_EMBD, KVL_MLA_QUERY_ROWS, .in_layer = true, .optional = true},
    {"attn_q_a.weight", KVL_EMBD, KVL_Q_RANK, .in_layer = true, .optional = true},
    {"attn_q_a_norm.weight", KVL_Q_RANK, KVL_ONE, .in_layer = true, .optional = true},
    {"attn_q_b.weight", KVL_Q_RANK, KVL_MLA_QUERY_ROWS, .in_layer = true, .optional = true},
    {"attn_kv_a_mqa.weight", KVL_EMBD, KVL_LATENT_ROW, .in_layer = true},
    {"attn_kv_a_norm.weight", KVL_KV_RANK, KVL_ONE, .in_layer = true, .optional = true}, /* absent: latents are as they are, in converted models */
    {"attn_kv_b.weight", KVL_KV_RANK, KVL_MLA_UP_ROWS, .in_layer = true, .optional = true},
    {"attn_k_b.weight", KVL_CONTENT, KVL_KV_RANK, .in_layer = true, .optional = true, .n_matrices = KVL_HEADS},
    {"attn_v_b.weight", KVL_KV_RANK, KVL_VALUE, .in_layer = true, .optional = true, .n_matrices = KVL_HEADS},
    {"attn_output.weight", KVL_VALUE_ROWS, KVL_EMBD, .in_layer = true},
    {"ffn_norm.weight", KVL_EMBD, KVL_ONE, .in_layer = true},
    {"ffn_gate.weight", KVL_EMBD, KVL_FF, .in_layer = true},
    {"ffn_up.weight", KVL_EMBD, KVL_FF, .in_layer = true},
    {"ffn_down.weight", KVL_FF, KVL_EMBD, .in_layer = true},
};

#define SET(tensors) {tensors, sizeof tensors / sizeof *tensors}
const struct kvl_arch kvl_archs[] = {
    {"llama", {SET(decoder_tensors)}, read_decoder_dims, .gate = KVL_GATE_SILU, .slides = true, .shares = true},
    {"mistral", {SET(decoder_tensors)}, read_decoder_dims, .gate = KVL_GATE_SILU, .slides = true},
    {"qwen2", {SET(decoder_tensors), SET(qkv_biases)}, read_decoder_dims, .gate = KVL_GATE_SILU, .halves = true},
    {"qwen3", {SET(decoder_tensors), SET(head_norms)}, read_decoder_dims, .gate = KVL_GATE_SILU, .halves = true},
    {"gemma3", {SET(decoder_tensors), SET(head_norms), SET(post_norms)}, read_gemma3_dims, .gate = KVL_GATE_GELU, .halves = true,
     .scales_embedding = true, .slides = true, .full_every = 6, .slide_rope_base = 10000.0f},
    {"deepseek2", {SET(deepseek2_tensors)}, read_deepseek2_dims, .gate = KVL_GATE_SILU},
};
const size_t kvl_n_archs = sizeof kvl_archs / sizeof *kvl_archs;

const struct kvl_arch *kvl_arch_find(struct kvl_gguf_str name)
{
    for (size_t i = 0; i < kvl_n_archs; i++)
        if (strlen(kvl_archs[i].name) == name.size && memcmp(kvl_archs[i].name, name.data, name.size) == 0) return &kvl_archs[i];
    return NULL;
}
