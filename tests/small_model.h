/* A llama of 2 layers, 256 byte tokens and one merged token as a GGUF file in memory, changed in one place at a time. Include after
 * cmocka.h. */
#ifndef KVL_TEST_SMALL_MODEL_H
#define KVL_TEST_SMALL_MODEL_H
#include "gguf.h"
#include "gguf_writer.h"

/* One change to the small model; empty = none. */
struct small_change {
    const char *omit; /* key or tensor left out */
    const char *u32_key, *f32_key, *str_key, *tensor;
    uint32_t u32;
    float f32;
    const char *str;
    uint64_t dim[2];
    float fill;          /* of the added tensor */
    uint32_t key_length; /* of the heads, 0 = no such key */
    uint32_t vocab;      /* rows of the embedding, 0 = SMALL_VOCAB */
    const int32_t *kv_source; /* kvlab.attention.kv_source, NULL = no such key; layers that read another have no attn_k and attn_v */
    uint32_t n_kv_source;     /* its elements, 0 = SMALL_LAYERS */
};

enum {
    SMALL_LAYERS = 2,
    SMALL_EMBD = 32,
    SMALL_HEADS = 4,
    SMALL_KV_HEADS = 2,
    SMALL_FF = 64,
    SMALL_VOCAB = 257,
    SMALL_MAX_ELEMENTS = 300 * SMALL_EMBD
};

static inline bool small_keeps(const struct small_change *change, const char *name)
{
    return change->omit == NULL || strcmp(change->omit, name) != 0;
}

static inline void small_add_tensor(struct gguf_writer *w, const char *name, uint64_t row, uint64_t n_rows, float fill)
{
    static float data[SMALL_MAX_ELEMENTS];
    const size_t n = (size_t)(row * n_rows);
    assert_true(n <= SMALL_MAX_ELEMENTS);
    for (size_t i = 0; i < n; i++) data[i] = fill;
    gw_tensor(w, name, KVL_GGUF_F32, n_rows == 1 ? 1 : 2, (uint64_t[]){row, n_rows}, data, n * sizeof *data);
}

/* Bytes 0 and 1 make the one merge. */
#define SMALL_MERGE_LEFT "\xc4\x80"
#define SMALL_MERGE_RIGHT "\xc4\x81"

/* The printable stand-ins of bytes in byte-level vocabularies: a visible Latin-1 character is itself, the others follow from
 * U+0100. */
static inline void small_add_tokens(struct gguf_writer *w)
{
    uint32_t next = 256;
    gw_key_array(w, "tokenizer.ggml.tokens", GW_STRING, SMALL_VOCAB);
    for (uint32_t byte = 0; byte < 256; byte++) {
        const bool visible = (byte >= '!' && byte <= '~') || (byte >= 161 && byte != 173);
        const uint32_t c = visible ? byte : next++;
        const char utf8[3] = {(char)(c < 128 ? c : 0xc0 | c >> 6), (char)(c < 128 ? 0 : 0x80 | (c & 63)), 0};
        gw_str(&w->keys, utf8);
    }
    gw_str(&w->keys, SMALL_MERGE_LEFT SMALL_MERGE_RIGHT);
}

static inline void small_add_tokenizer(struct gguf_writer *w)
{
    gw_key_str(w, "tokenizer.ggml.model", "gpt2");
    gw_key_str(w, "tokenizer.ggml.pre", "gpt-2");
    small_add_tokens(w);
    gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, SMALL_VOCAB);
    for (int i = 0; i < SMALL_VOCAB; i++) gw_u32(&w->keys, 1);
    gw_key_array(w, "tokenizer.ggml.merges", GW_STRING, 1);
    gw_str(&w->keys, SMALL_MERGE_LEFT " " SMALL_MERGE_RIGHT);
    gw_key_u32(w, "tokenizer.ggml.bos_token_id", 0);
    gw_key_u32(w, "tokenizer.ggml.eos_token_id", 0);
    gw_key_bool(w, "tokenizer.ggml.add_bos_token", 0);
}

static inline void small_add_keys(struct gguf_writer *w, const struct small_change *change)
{
    static const struct {
        const char *key;
        uint32_t value;
    } integers[] = {
        {"llama.block_count", SMALL_LAYERS},         {"llama.context_length", 128},
        {"llama.embedding_length", SMALL_EMBD},      {"llama.feed_forward_length", SMALL_FF},
        {"llama.attention.head_count", SMALL_HEADS}, {"llama.attention.head_count_kv", SMALL_KV_HEADS},
    };
    if (small_keeps(change, "general.architecture")) gw_key_str(w, "general.architecture", "llama");
    if (small_keeps(change, "general.name")) gw_key_str(w, "general.name", "small");
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (small_keeps(change, integers[i].key)) gw_key_u32(w, integers[i].key, integers[i].value);
    if (small_keeps(change, "llama.attention.layer_norm_rms_epsilon"))
        gw_key_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    if (change->key_length > 0) gw_key_u32(w, "llama.attention.key_length", change->key_length);
    if (change->u32_key != NULL) gw_key_u32(w, change->u32_key, change->u32);
    if (change->f32_key != NULL) gw_key_f32(w, change->f32_key, change->f32);
    if (change->str_key != NULL) gw_key_str(w, change->str_key, change->str);
    if (change->kv_source == NULL) return;
    const uint32_t n = change->n_kv_source > 0 ? change->n_kv_source : SMALL_LAYERS;
    gw_key_array(w, "kvlab.attention.kv_source", GW_I32, n);
    gw_bytes(&w->keys, change->kv_source, n * sizeof *change->kv_source);
}

static inline bool small_reads_another(const struct small_change *change, int layer)
{
    return change->kv_source != NULL && change->kv_source[layer] != layer;
}

static inline void small_add_tensors(struct gguf_writer *w, const struct small_change *change)
{
    const uint64_t head_dim = change->key_length > 0 ? change->key_length : SMALL_EMBD / SMALL_HEADS;
    const struct {
        const char *name;
        uint64_t row, n_rows;
    } of_layer[] = {
        {"attn_norm", SMALL_EMBD, 1},
        {"attn_q", SMALL_EMBD, SMALL_HEADS * head_dim},
        {"attn_k", SMALL_EMBD, SMALL_KV_HEADS * head_dim},
        {"attn_v", SMALL_EMBD, SMALL_KV_HEADS * head_dim},
        {"attn_output", SMALL_HEADS * head_dim, SMALL_EMBD},
        {"ffn_norm", SMALL_EMBD, 1},
        {"ffn_gate", SMALL_EMBD, SMALL_FF},
        {"ffn_up", SMALL_EMBD, SMALL_FF},
        {"ffn_down", SMALL_FF, SMALL_EMBD},
    };
    const uint64_t vocab = change->vocab > 0 ? change->vocab : SMALL_VOCAB;
    if (small_keeps(change, "token_embd.weight")) small_add_tensor(w, "token_embd.weight", SMALL_EMBD, vocab, 1);
    if (small_keeps(change, "output_norm.weight")) small_add_tensor(w, "output_norm.weight", SMALL_EMBD, 1, 1);
    if (small_keeps(change, "output.weight")) small_add_tensor(w, "output.weight", SMALL_EMBD, vocab, 1);
    for (int layer = 0; layer < SMALL_LAYERS; layer++)
        for (size_t i = 0; i < sizeof of_layer / sizeof *of_layer; i++) {
            char name[64];
            snprintf(name, sizeof name, "blk.%d.%s.weight", layer, of_layer[i].name);
            if (small_reads_another(change, layer) && (strcmp(of_layer[i].name, "attn_k") == 0 || strcmp(of_layer[i].name, "attn_v") == 0)) continue;
            if (small_keeps(change, name)) small_add_tensor(w, name, of_layer[i].row, of_layer[i].n_rows, 1);
        }
    if (change->tensor != NULL) small_add_tensor(w, change->tensor, change->dim[0], change->dim[1], change->fill);
}

/* The file's bytes; kvl_text_free. *head: where the tensors' data begin. */
static inline struct kvl_text small_model(const struct small_change *change, size_t *head)
{
    struct gguf_writer w = gw_new();
    small_add_keys(&w, change);
    small_add_tokenizer(&w);
    small_add_tensors(&w, change);
    const struct kvl_text file = gw_file(&w, head);
    gw_free(&w);
    return file;
}

#endif
