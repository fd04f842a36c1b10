/* think: keys without the channels that matter least to the prompt's newest queries. Layout, scores and deviations: card.md. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdlib.h>

extern const char kvl_text_compress_codec_think_think_cl[], kvl_text_compress_codec_think_card_md[];

struct think {
    double ratio;
    int32_t window, recent, unit;
};

static const struct kvl_option options[] = {
    {"ratio", "share of a key's channels that are dropped", KVL_OPTION_FLOAT, offsetof(struct think, ratio), 0.4, 0, 0.99, NULL},
    {"window", "newest queries of the prompt that weigh the channels", KVL_OPTION_INT, offsetof(struct think, window), 32, 1, 4096, NULL},
    {"recent", "newest keys that keep all channels", KVL_OPTION_INT, offsetof(struct think, recent), 32, 0, 65536, NULL},
    {"unit", "keys sealed at once; as many as the prompt seals: those that follow it keep all channels", KVL_OPTION_INT,
     offsetof(struct think, unit), 1, 1, 1 << 20, NULL},
};

static uint32_t kept_channels(const struct think *o, const struct kvl_codec_dims *dims)
{
    return dims->head_dim - (uint32_t)(dims->head_dim * o->ratio);
}

static int think_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    const struct think *o = priv;
    out->group = out->page_multiple = 1;
    out->unit = (uint32_t)o->unit;
    out->tail_min = (uint32_t)o->recent;
    out->alignment = 16;
    out->block_bytes = 2ull * dims->page_tokens * kept_channels(o, dims);
    out->table_floats = dims->head_dim;
    out->learn_queries = (uint32_t)o->window;
    return 0;
}

static int think_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    out->payload = 2 * n * kept_channels(priv, dims);
    return 0;
}

/* score [D]: the sum of the squares of a channel's queries times that of its keys. */
static void weigh_channels(const struct kvl_prompt_rows *in, uint32_t head_dim, double *score)
{
    const size_t queries = (size_t)in->n_head * in->n_query;
    for (uint32_t c = 0; c < head_dim; c++) {
        double query = 0.0, key = 0.0;
        for (size_t i = 0; i < queries; i++) {
            const double q = kvl_plugin_clamp_half(in->q[i * head_dim + c]);
            query += q * q;
        }
        for (size_t t = 0; t < in->n_row; t++) {
            const double k = kvl_plugin_clamp_half(in->x[t * head_dim + c]);
            key += k * k;
        }
        score[c] = query * key;
    }
}

static int think_learn(const void *priv, const struct kvl_codec_dims *dims, const struct kvl_prompt_rows *in, float *table)
{
    const uint32_t d = dims->head_dim, dropped = d - kept_channels(priv, dims);
    double *score = calloc(d, sizeof *score);
    if (score == NULL) return 1;
    weigh_channels(in, d, score);
    for (uint32_t c = 0; c < d; c++) table[c] = 0.0f;
    for (uint32_t i = 0; i < dropped; i++) { /* the least there is; of equal ones the last */
        uint32_t least = 0;
        while (table[least] < 0.0f) least++;
        for (uint32_t c = least + 1; c < d; c++)
            if (table[c] >= 0.0f && score[c] <= score[least]) least = c;
        table[least] = -1.0f;
    }
    for (uint32_t c = 0, slot = 0; c < d; c++)
        if (table[c] >= 0.0f) table[c] = (float)slot++;
    free(score);
    return 0;
}

static int think_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                        uint8_t *block)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++, x++) {
            if (table[c] < 0.0f) continue;
            const uint16_t half = kvl_plugin_to_half(kvl_plugin_clamp_half(*x));
            memcpy(block + 2 * ((uint64_t)table[c] * dims->page_tokens + t0 + t), &half, 2);
        }
    return 0;
}

static int think_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const uint8_t *block,
                        float *x)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            uint16_t half = 0;
            if (table[c] >= 0.0f) memcpy(&half, block + 2 * ((uint64_t)table[c] * dims->page_tokens + t0 + t), 2);
            *x++ = kvl_plugin_from_half(half);
        }
    return 0;
}

static void think_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    define(context, "KEPT", kept_channels(priv, dims));
}

const struct kvl_codec kvl_codec_think = {
    .head = {.magic = KVL_PLUGIN_MAGIC,
             .abi_major = KVL_ABI_MAJOR,
             .abi_minor = KVL_ABI_MINOR,
             .struct_size = sizeof(struct kvl_codec),
             .kind = KVL_KIND_CODEC,
             .name = "think",
             .summary = "16-bit keys without the channels that matter least to the prompt's newest queries",
             .citation = "Xu et al., ThinK, ICLR 2025, arXiv:2407.21018",
             .byte_version = 1,
             .n_options = sizeof options / sizeof *options,
             .options = options,
             .private_size = sizeof(struct think),
             .device_source = kvl_text_compress_codec_think_think_cl,
             .card = kvl_text_compress_codec_think_card_md},
    .roles = KVL_ROLE_K,
    .rope_stages = KVL_ROPE_POST,
    .flags = KVL_CODEC_MOVABLE | KVL_CODEC_HAS_SCORES | KVL_CODEC_NO_ROTATION,
    .shape = think_shape,
    .bytes = think_bytes,
    .ref_encode = think_encode,
    .ref_decode = think_decode,
    .defines = think_defines,
    .known_answers = think_answers,
    .n_known_answers = sizeof think_answers / sizeof *think_answers,
    .known_tables = think_tables,
    .learn = think_learn,
};
