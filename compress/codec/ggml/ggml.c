/* q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl: ggml's blocks of 32 channels, the same scales and codes as its reference quantizers give. Layout
 * and arithmetic: card.md. All float operations are single IEEE ones, so every device gives the same bytes. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdio.h>

extern const char kvl_text_compress_codec_ggml_ggml_cl[], kvl_text_compress_codec_ggml_card_md[];

enum { BLOCK = 32 }; /* channels */

struct format {
    int32_t bits, offset; /* number of a code: code - offset, or its entry in nonlinear_values */
    int32_t has_min, nonlinear;
};

struct ggml_codec {
    const struct format *format;
    const struct kvl_host *host;
};

static const float nonlinear_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static int ggml_init(struct ggml_codec *codec, const struct kvl_host *host, const struct format *format)
{
    codec->host = host;
    codec->format = format;
    return 0;
}

/* ---- shape ---- */

static uint32_t code_bytes(const struct format *f) { return (uint32_t)f->bits * BLOCK / 8; } /* of a block */
static uint32_t param_count(const struct format *f) { return f->has_min ? 2 : 1; }           /* binary16 numbers of a block */

static int ggml_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    const struct ggml_codec *codec = priv;
    const uint32_t n_blocks = dims->head_dim / BLOCK;
    if (dims->head_dim % BLOCK != 0) {
        char text[120];
        snprintf(text, sizeof text, "head_dim %u is not a multiple of %d: use int8, int4, fp8_e4m3 or f16", dims->head_dim, BLOCK);
        codec->host->error(text);
        return 1;
    }
    out->group = out->unit = out->page_multiple = 1;
    out->alignment = 16;
    out->block_bytes = (uint64_t)dims->page_tokens * n_blocks * (code_bytes(codec->format) + 2 * param_count(codec->format));
    out->aux_floats = dims->role == KVL_ROLE_K && codec->format->has_min ? n_blocks : 0;
    return 0;
}

static int ggml_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    const struct format *f = ((const struct ggml_codec *)priv)->format;
    out->payload = n * (dims->head_dim / BLOCK) * code_bytes(f);
    out->scale = n * (dims->head_dim / BLOCK) * 2 * param_count(f);
    return 0;
}

/* ---- arithmetic ---- */

struct block {
    float x[BLOCK];
    uint16_t scale, min; /* binary16 */
    uint8_t code[BLOCK];
};

/* 1 / d; 0 for a d that is 0 or so small that products with 1 / d could overflow. */
static float reciprocal(float d) { return fabsf(d) < 0x1p-100f ? 0.0f : 1.0f / d; }

/* Scales and minima: binary16, but +0 for all that rounds to zero. */
static uint16_t to_param(float x) { return fabsf(x) <= 0x1p-25f ? 0 : kvl_plugin_to_half(x); }

/* The first number of the largest magnitude, with its sign. */
static float extreme(const float *x)
{
    float best = 0.0f;
    for (int i = 0; i < BLOCK; i++)
        if (fabsf(x[i]) > fabsf(best)) best = x[i];
    return best;
}

static void quantize_8(const struct format *f, struct block *b)
{
    const float d = fabsf(extreme(b->x)) / 127.0f, inverse = reciprocal(d);
    b->scale = to_param(d);
    for (int i = 0; i < BLOCK; i++) b->code[i] = (uint8_t)(int8_t)roundf(b->x[i] * inverse);
}

static void quantize_signed(const struct format *f, struct block *b)
{
    const float d = extreme(b->x) / (float)-f->offset, inverse = reciprocal(d);
    b->scale = to_param(d);
    for (int i = 0; i < BLOCK; i++)
        b->code[i] = (uint8_t)fminf(b->x[i] * inverse + ((float)f->offset + 0.5f), (float)(2 * f->offset - 1));
}

static void quantize_from_min(const struct format *f, struct block *b)
{
    float low = b->x[0], high = low;
    for (int i = 1; i < BLOCK; i++) {
        low = fminf(low, b->x[i]);
        high = fmaxf(high, b->x[i]);
    }
    const float top = (float)((1 << f->bits) - 1), d = (high - low) / top, inverse = reciprocal(d);
    b->scale = to_param(d);
    b->min = to_param(low);
    for (int i = 0; i < BLOCK; i++) b->code[i] = (uint8_t)fminf((b->x[i] - low) * inverse + 0.5f, top);
}

/* Index of the value next to y; the upper one of two that are equally far. */
static uint8_t nearest_nonlinear(float y)
{
    uint8_t code = 0;
    for (int i = 0; i < 15; i++) code += 2.0f * y >= nonlinear_values[i] + nonlinear_values[i + 1];
    return code;
}

/* Codes from the extreme at -127, then the scale that fits them best, weighted by x^2. */
static void quantize_nonlinear(const struct format *f, struct block *b)
{
    const float d = extreme(b->x) / nonlinear_values[0], inverse = reciprocal(d);
    float xq = 0.0f, qq = 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        b->code[i] = nearest_nonlinear(b->x[i] * inverse);
        const float q = nonlinear_values[b->code[i]], wq = b->x[i] * b->x[i] * q;
        xq += wq * b->x[i];
        qq += wq * q;
    }
    b->scale = fabsf(d) < 0x1p-28f ? 0 : to_param(xq / qq);
}

static void quantize(const struct format *f, struct block *b)
{
    if (f->nonlinear)
        quantize_nonlinear(f, b);
    else if (f->has_min)
        quantize_from_min(f, b);
    else if (f->bits == 8)
        quantize_8(f, b);
    else
        quantize_signed(f, b);
}

static float number_of(const struct format *f, uint8_t code)
{
    if (f->nonlinear) return nonlinear_values[code];
    return f->bits == 8 ? (float)(int8_t)code : (float)(code - f->offset);
}

/* ---- bytes ---- */

/* The code bytes of a block in ggml's order: the fifth bits, then the low ones. */
static void pack(const struct format *f, const uint8_t code[BLOCK], uint8_t *bytes)
{
    uint8_t *low = bytes + (f->bits == 5 ? BLOCK / 8 : 0);
    memset(bytes, 0, code_bytes(f));
    for (int i = 0; i < BLOCK; i++) {
        if (f->bits == 8)
            low[i] = code[i];
        else
            low[i % 16] |= (uint8_t)((code[i] & 15) << i / 16 * 4);
        if (f->bits == 5) bytes[i / 8] |= (uint8_t)((code[i] >> 4) << i % 8);
    }
}

static void unpack(const struct format *f, const uint8_t *bytes, uint8_t code[BLOCK])
{
    const uint8_t *low = bytes + (f->bits == 5 ? BLOCK / 8 : 0);
    for (int i = 0; i < BLOCK; i++) {
        code[i] = f->bits == 8 ? low[i] : low[i % 16] >> i / 16 * 4 & 15;
        if (f->bits == 5) code[i] |= (uint8_t)((bytes[i / 8] >> i % 8 & 1) << 4);
    }
}

/* Code byte r of block k of token t. */
static uint64_t code_at(const struct format *f, const struct kvl_codec_dims *dims, uint32_t t, uint32_t k, uint32_t r)
{
    const uint64_t row = (uint64_t)k * code_bytes(f) + r;
    return dims->role == KVL_ROLE_K ? row * dims->page_tokens + t : (uint64_t)t * (dims->head_dim / BLOCK) * code_bytes(f) + row;
}

/* Binary16 number p (0 scale, 1 minimum) of block k of token t. */
static uint64_t param_at(const struct format *f, const struct kvl_codec_dims *dims, uint32_t t, uint32_t k, uint32_t p)
{
    const uint64_t codes = (uint64_t)dims->page_tokens * (dims->head_dim / BLOCK) * code_bytes(f);
    return codes + 2 * (((uint64_t)k * param_count(f) + p) * dims->page_tokens + t);
}

static int ggml_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                       const float *x, uint8_t *page)
{
    const struct format *f = ((const struct ggml_codec *)priv)->format;
    for (uint32_t t = t0; t < t0 + n; t++)
        for (uint32_t k = 0; k < dims->head_dim / BLOCK; k++) {
            struct block b = {0};
            uint8_t bytes[BLOCK];
            for (int i = 0; i < BLOCK; i++) b.x[i] = kvl_plugin_clamp_half(*x++);
            quantize(f, &b);
            pack(f, b.code, bytes);
            for (uint32_t r = 0; r < code_bytes(f); r++) page[code_at(f, dims, t, k, r)] = bytes[r];
            memcpy(page + param_at(f, dims, t, k, 0), &b.scale, 2);
            if (f->has_min) memcpy(page + param_at(f, dims, t, k, 1), &b.min, 2);
        }
    return 0;
}

static int ggml_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                       const uint8_t *page, float *x)
{
    const struct format *f = ((const struct ggml_codec *)priv)->format;
    for (uint32_t t = t0; t < t0 + n; t++)
        for (uint32_t k = 0; k < dims->head_dim / BLOCK; k++) {
            struct block b = {0};
            uint8_t bytes[BLOCK];
            for (uint32_t r = 0; r < code_bytes(f); r++) bytes[r] = page[code_at(f, dims, t, k, r)];
            memcpy(&b.scale, page + param_at(f, dims, t, k, 0), 2);
            if (f->has_min) memcpy(&b.min, page + param_at(f, dims, t, k, 1), 2);
            unpack(f, bytes, b.code);
            for (int i = 0; i < BLOCK; i++)
                *x++ = fmaf(number_of(f, b.code[i]), kvl_plugin_from_half(b.scale), kvl_plugin_from_half(b.min));
        }
    return 0;
}

static void ggml_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct format *f = ((const struct ggml_codec *)priv)->format;
    define(context, "BITS", f->bits);
    define(context, "OFFSET", f->offset);
    define(context, "MIN", f->has_min);
    define(context, "NONLINEAR", f->nonlinear);
}

#define GGML_CODEC(name_, summary_, ...)                                                                                           \
    static int name_##_init(void *priv, const struct kvl_host *host)                                                               \
    {                                                                                                                              \
        static const struct format format = {__VA_ARGS__};                                                                         \
        return ggml_init(priv, host, &format);                                                                                     \
    }                                                                                                                              \
    const struct kvl_codec kvl_codec_##name_ = {                                                                                   \
        .head = {.magic = KVL_PLUGIN_MAGIC,                                                                                        \
                 .abi_major = KVL_ABI_MAJOR,                                                                                       \
                 .abi_minor = KVL_ABI_MINOR,                                                                                       \
                 .struct_size = sizeof(struct kvl_codec),                                                                          \
                 .kind = KVL_KIND_CODEC,                                                                                           \
                 .name = #name_,                                                                                                   \
                 .summary = summary_,                                                                                              \
                 .citation = "ggml, block formats and reference quantizers (ggml-quants.c)",                                       \
                 .byte_version = 1,                                                                                                \
                 .private_size = sizeof(struct ggml_codec),                                                                        \
                 .device_source = kvl_text_compress_codec_ggml_ggml_cl,                                                            \
                 .card = kvl_text_compress_codec_ggml_card_md,                                                                     \
                 .init = name_##_init},                                                                                            \
        .roles = KVL_ROLE_K | KVL_ROLE_V,                                                                                          \
        .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,                                                                               \
        .flags = KVL_CODEC_MOVABLE | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_ACCUMULATE,                                              \
        .shape = ggml_shape,                                                                                                       \
        .bytes = ggml_bytes,                                                                                                       \
        .ref_encode = ggml_encode,                                                                                                 \
        .ref_decode = ggml_decode,                                                                                                 \
        .defines = ggml_defines,                                                                                                   \
        .known_answers = name_##_answers,                                                                                          \
        .n_known_answers = sizeof name_##_answers / sizeof *name_##_answers,                                                       \
    }

GGML_CODEC(q8_0, "ggml's Q8_0: 8-bit integers, a scale for each 32 channels", .bits = 8);
GGML_CODEC(q5_1, "ggml's Q5_1: 5-bit integers, a scale and a minimum for each 32 channels", .bits = 5, .has_min = 1);
GGML_CODEC(q5_0, "ggml's Q5_0: 5-bit integers, a scale for each 32 channels", .bits = 5, .offset = 16);
GGML_CODEC(q4_1, "ggml's Q4_1: 4-bit integers, a scale and a minimum for each 32 channels", .bits = 4, .has_min = 1);
GGML_CODEC(q4_0, "ggml's Q4_0: 4-bit integers, a scale for each 32 channels", .bits = 4, .offset = 8);
GGML_CODEC(iq4_nl, "ggml's IQ4_NL: 4-bit codes of a fixed non-linear table, a scale for each 32 channels", .bits = 4,
           .nonlinear = 1);
