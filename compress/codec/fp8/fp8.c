/* fp8_e4m3 and fp8_e5m2: OCP 8-bit floats with a binary16 scale for each token. Layout and arithmetic: card.md.
 * All float operations are single IEEE ones, so every device gives the same bytes. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"

extern const char kvl_text_compress_codec_fp8_fp8_cl[], kvl_text_compress_codec_fp8_card_md[];

struct fp8_codec {
    int32_t mantissa, bias; /* bits; of the exponent */
    int32_t max;            /* largest finite number */
};

static int fp8_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    out->group = out->unit = out->page_multiple = 1;
    out->alignment = 16;
    out->block_bytes = (uint64_t)dims->page_tokens * (dims->head_dim + 2u);
    return 0;
}

static int fp8_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    out->payload = n * dims->head_dim;
    out->scale = n * 2;
    return 0;
}

/* ---- arithmetic ---- */

/* The smallest binary16 that takes the largest magnitude to no more than the format's; 0 for rows of next to nothing. */
static uint16_t fit_scale(const struct fp8_codec *codec, const float *x, uint32_t n)
{
    float reach = 0.0f;
    for (uint32_t i = 0; i < n; i++) reach = fmaxf(reach, fabsf(kvl_plugin_clamp_half(x[i])));
    if (reach < 0x1p-100f) return 0;
    const float wanted = reach / (float)codec->max;
    const uint16_t scale = kvl_plugin_to_half(wanted);
    return kvl_plugin_from_half(scale) < wanted ? scale + 1 : scale;
}

/* y rounded to nearest even; |y| is in range. Zero has one code. */
static uint8_t code_of(const struct fp8_codec *codec, float y)
{
    const float magnitude = fabsf(y);
    const int shift = 23 - codec->mantissa;
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    if (magnitude < ldexpf(1.0f, 1 - codec->bias))
        bits = (uint32_t)rintf(ldexpf(magnitude, codec->bias - 1 + codec->mantissa)); /* subnormal */
    else
        bits =
            ((bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift) - ((uint32_t)(127 - codec->bias) << codec->mantissa);
    return (uint8_t)(bits == 0 ? 0 : bits | (y < 0.0f ? 0x80u : 0u));
}

static float value_of(const struct fp8_codec *codec, uint8_t code)
{
    const int exponent = (code & 0x7f) >> codec->mantissa, fraction = code & ((1 << codec->mantissa) - 1),
              one = 1 << codec->mantissa;
    const float magnitude = exponent == 0 ? ldexpf((float)fraction, 1 - codec->bias - codec->mantissa)
                                          : ldexpf((float)(one + fraction), exponent - codec->bias - codec->mantissa);
    return code & 0x80 ? -magnitude : magnitude;
}

/* ---- bytes ---- */

static uint64_t code_at(const struct kvl_codec_dims *dims, uint32_t t, uint32_t c)
{
    return dims->role == KVL_ROLE_K ? (uint64_t)c * dims->page_tokens + t : (uint64_t)t * dims->head_dim + c;
}

static uint64_t scale_at(const struct kvl_codec_dims *dims, uint32_t t)
{
    return (uint64_t)dims->page_tokens * dims->head_dim + 2u * t;
}

static int fp8_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const float *x, uint8_t *block)
{
    for (uint32_t t = t0; t < t0 + n; t++, x += dims->head_dim) {
        const uint16_t scale = fit_scale(priv, x, dims->head_dim);
        memcpy(block + scale_at(dims, t), &scale, 2);
        for (uint32_t c = 0; c < dims->head_dim; c++)
            block[code_at(dims, t, c)] = scale == 0 ? 0 : code_of(priv, kvl_plugin_clamp_half(x[c]) / kvl_plugin_from_half(scale));
    }
    return 0;
}

static int fp8_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x)
{
    for (uint32_t t = t0; t < t0 + n; t++) {
        uint16_t scale;
        memcpy(&scale, block + scale_at(dims, t), 2);
        for (uint32_t c = 0; c < dims->head_dim; c++)
            *x++ = value_of(priv, block[code_at(dims, t, c)]) * kvl_plugin_from_half(scale);
    }
    return 0;
}

static void fp8_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct fp8_codec *codec = priv;
    define(context, "MANTISSA", codec->mantissa);
    define(context, "BIAS", codec->bias);
    define(context, "MAX", codec->max);
}

#define FP8_CODEC(name_, summary_, ...)                                                                                            \
    static int name_##_init(void *priv, const struct kvl_host *host)                                                               \
    {                                                                                                                              \
        *(struct fp8_codec *)priv = (struct fp8_codec){__VA_ARGS__};                                                               \
        return 0;                                                                                                                  \
    }                                                                                                                              \
    const struct kvl_codec kvl_codec_##name_ = {                                                                                   \
        .head = {.magic = KVL_PLUGIN_MAGIC,                                                                                        \
                 .abi_major = KVL_ABI_MAJOR,                                                                                       \
                 .abi_minor = KVL_ABI_MINOR,                                                                                       \
                 .struct_size = sizeof(struct kvl_codec),                                                                          \
                 .kind = KVL_KIND_CODEC,                                                                                           \
                 .name = #name_,                                                                                                   \
                 .summary = summary_,                                                                                              \
                 .citation = "OCP 8-bit Floating Point Specification (OFP8), revision 1.0; Micikevicius et al., arXiv:2209.05433", \
                 .byte_version = 1,                                                                                                \
                 .private_size = sizeof(struct fp8_codec),                                                                         \
                 .device_source = kvl_text_compress_codec_fp8_fp8_cl,                                                              \
                 .card = kvl_text_compress_codec_fp8_card_md,                                                                      \
                 .init = name_##_init},                                                                                            \
        .roles = KVL_ROLE_K | KVL_ROLE_V,                                                                                          \
        .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,                                                                               \
        .flags = KVL_CODEC_MOVABLE | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_ACCUMULATE,                                              \
        .shape = fp8_shape,                                                                                                        \
        .bytes = fp8_bytes,                                                                                                        \
        .ref_encode = fp8_encode,                                                                                                  \
        .ref_decode = fp8_decode,                                                                                                  \
        .defines = fp8_defines,                                                                                                    \
        .known_answers = name_##_answers,                                                                                          \
        .n_known_answers = sizeof name_##_answers / sizeof *name_##_answers,                                                       \
    }

FP8_CODEC(fp8_e4m3, "8-bit floats with 3 bits of mantissa, a scale for each token", .mantissa = 3, .bias = 7, .max = 448);
FP8_CODEC(fp8_e5m2, "8-bit floats with 2 bits of mantissa, a scale for each token", .mantissa = 2, .bias = 15, .max = 57344);
