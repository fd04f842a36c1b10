/* f32 and f16: numbers as they are. K [D][P], V [P][D], each element binary32 or binary16. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"

extern const char kvl_text_compress_codec_float_float_cl[], kvl_text_compress_codec_float_card_md[];

struct float_codec {
    int32_t element_bytes;
};

static int float_init(void *priv, int32_t element_bytes)
{
    ((struct float_codec *)priv)->element_bytes = element_bytes;
    return 0;
}

static int f32_init(void *priv, const struct kvl_host *host) { return float_init(priv, 4); }

static int f16_init(void *priv, const struct kvl_host *host) { return float_init(priv, 2); }

static uint64_t token_bytes(const void *priv, const struct kvl_codec_dims *dims)
{
    return (uint64_t)dims->head_dim * (uint64_t)((const struct float_codec *)priv)->element_bytes;
}

static int float_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    out->group = out->unit = out->page_multiple = 1;
    out->alignment = 16;
    out->block_bytes = dims->page_tokens * token_bytes(priv, dims);
    return 0;
}

static int float_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    out->payload = n * token_bytes(priv, dims);
    return 0;
}

/* Index of channel c of token t. */
static uint64_t element(const struct kvl_codec_dims *dims, uint32_t t, uint32_t c)
{
    return dims->role == KVL_ROLE_K ? (uint64_t)c * dims->page_tokens + t : (uint64_t)t * dims->head_dim + c;
}

static int f32_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const float *x, uint8_t *block)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) memcpy(block + 4 * element(dims, t0 + t, c), x++, 4);
    return 0;
}

static int f32_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) memcpy(x++, block + 4 * element(dims, t0 + t, c), 4);
    return 0;
}

static int f16_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const float *x, uint8_t *block)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            const uint16_t half = kvl_plugin_to_half(kvl_plugin_clamp_half(*x++));
            memcpy(block + 2 * element(dims, t0 + t, c), &half, 2);
        }
    return 0;
}

static int f16_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            uint16_t half;
            memcpy(&half, block + 2 * element(dims, t0 + t, c), 2);
            *x++ = kvl_plugin_from_half(half);
        }
    return 0;
}

static void float_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    define(context, "HALF", ((const struct float_codec *)priv)->element_bytes == 2);
}

#define FLOAT_CODEC(name_, summary_)                                                                                               \
    const struct kvl_codec kvl_codec_##name_ = {                                                                                   \
        .head = {.magic = KVL_PLUGIN_MAGIC,                                                                                        \
                 .abi_major = KVL_ABI_MAJOR,                                                                                       \
                 .abi_minor = KVL_ABI_MINOR,                                                                                       \
                 .struct_size = sizeof(struct kvl_codec),                                                                          \
                 .kind = KVL_KIND_CODEC,                                                                                           \
                 .name = #name_,                                                                                                   \
                 .summary = summary_,                                                                                              \
                 .citation = "IEEE 754-2008",                                                                                      \
                 .byte_version = 1,                                                                                                \
                 .private_size = sizeof(struct float_codec),                                                                       \
                 .device_source = kvl_text_compress_codec_float_float_cl,                                                          \
                 .card = kvl_text_compress_codec_float_card_md,                                                                    \
                 .init = name_##_init},                                                                                            \
        .roles = KVL_ROLE_K | KVL_ROLE_V,                                                                                          \
        .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,                                                                               \
        .flags = KVL_CODEC_MOVABLE | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_COLUMNS | KVL_CODEC_HAS_ACCUMULATE,                                              \
        .shape = float_shape,                                                                                                      \
        .bytes = float_bytes,                                                                                                      \
        .ref_encode = name_##_encode,                                                                                              \
        .ref_decode = name_##_decode,                                                                                              \
        .defines = float_defines,                                                                                                  \
        .known_answers = name_##_answers,                                                                                          \
        .n_known_answers = sizeof name_##_answers / sizeof *name_##_answers,                                                       \
    }

FLOAT_CODEC(f32, "32-bit floats, exact");
FLOAT_CODEC(f16, "16-bit floats, the uncompressed cache");
