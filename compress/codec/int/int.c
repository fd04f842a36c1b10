/* int8, int4, int3 and int2: a scale (and a zero point) for every group of channels of one token. Layout and arithmetic: card.md.
 * All float operations are single IEEE ones or fma, so every device gives the same bytes. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdio.h>

extern const char kvl_text_compress_codec_int_int_cl[], kvl_text_compress_codec_int_card_md[];

enum { SCHEME_ASYM, SCHEME_SYM };

struct int_codec {
    int32_t group, scheme; /* options; group 0 = the whole head */
    int32_t bits;
    int32_t word_bytes; /* bytes that hold a whole number of codes */
    const struct kvl_host *host;
};

static const struct kvl_option int_options[] = {
    {"group", "channels that share a scale; 0 = the whole head", KVL_OPTION_INT, offsetof(struct int_codec, group), 0, 0, 65536,
     NULL},
    {"scheme", "asym: scale and zero point; sym: scale only", KVL_OPTION_CHOICE, offsetof(struct int_codec, scheme), SCHEME_ASYM, 0,
     0, "asym|sym"},
};

static int int_init(struct int_codec *codec, const struct kvl_host *host, int32_t bits, int32_t word_bytes)
{
    codec->host = host;
    codec->bits = bits;
    codec->word_bytes = word_bytes;
    return 0;
}

/* ---- shape ---- */

struct layout {
    uint32_t group, n_groups;
    uint32_t codes;       /* of a word */
    uint32_t words;       /* of a group; the channels of one word are `words` apart */
    uint32_t group_bytes; /* code bytes of a group */
    uint32_t n_params;    /* binary16 numbers of a group: scale (zero) */
    uint64_t token_bytes; /* code bytes of a token */
};

static uint32_t codes_of_word(const struct int_codec *codec) { return (uint32_t)(8 * codec->word_bytes / codec->bits); }

static struct layout layout_of(const struct int_codec *codec, const struct kvl_codec_dims *dims)
{
    struct layout l = {.group = codec->group > 0 ? (uint32_t)codec->group : dims->head_dim, .codes = codes_of_word(codec)};
    l.n_groups = dims->head_dim / l.group;
    l.words = l.group / l.codes;
    l.group_bytes = l.words * (uint32_t)codec->word_bytes;
    l.n_params = codec->scheme == SCHEME_ASYM ? 2 : 1;
    l.token_bytes = (uint64_t)l.n_groups * l.group_bytes;
    return l;
}

static int is_legal_group(uint32_t group, uint32_t head_dim, uint32_t codes) { return head_dim % group == 0 && group % codes == 0; }

/* "group must divide head_dim 64: use 16, 32 or 64": the largest three that fit. */
static int refuse_group(const struct int_codec *codec, uint32_t group, uint32_t head_dim)
{
    const uint32_t codes = codes_of_word(codec);
    uint32_t fit[3], n = 0;
    char text[160], names[40] = "another codec";
    for (uint32_t g = head_dim; g >= codes && n < 3; g--)
        if (is_legal_group(g, head_dim, codes)) fit[n++] = g;
    if (n == 1) snprintf(names, sizeof names, "%u", fit[0]);
    if (n == 2) snprintf(names, sizeof names, "%u or %u", fit[1], fit[0]);
    if (n == 3) snprintf(names, sizeof names, "%u, %u or %u", fit[2], fit[1], fit[0]);
    if (head_dim % group != 0)
        snprintf(text, sizeof text, "group must divide head_dim %u: use %s", head_dim, names);
    else
        snprintf(text, sizeof text, "group must be a multiple of %u, for whole bytes: use %s", codes, names);
    codec->host->error(text);
    return 1;
}

static int int_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    const struct int_codec *codec = priv;
    const struct layout l = layout_of(codec, dims);
    if (!is_legal_group(l.group, dims->head_dim, l.codes)) return refuse_group(codec, l.group, dims->head_dim);
    out->group = out->unit = out->page_multiple = 1;
    out->alignment = 16;
    out->block_bytes = dims->page_tokens * (l.token_bytes + 2u * l.n_groups * l.n_params);
    out->aux_floats = dims->role == KVL_ROLE_K ? l.n_groups : 0;
    return 0;
}

static int int_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    const struct layout l = layout_of(priv, dims);
    out->payload = n * l.token_bytes;
    out->scale = n * 2u * l.n_groups * l.n_params;
    return 0;
}

/* ---- arithmetic ---- */

/* range / n, correctly rounded: one Newton step on the product with the reciprocal. */
static float divide(float range, float n)
{
    const float inverse = 1.0f / n, t = range * inverse;
    return fmaf(fmaf(-t, n, range), inverse, t);
}

/* Nearest integer of the exact quotient d / scale, ties to even, however 1 / scale was rounded. */
static float quotient(float d, float scale)
{
    if (scale == 0.0f) return 0.0f;
    const float q = rintf(d * (1.0f / scale)), rest = fmaf(-q, scale, d), half_step = 0.5f * scale;
    const int odd = fmodf(q, 2.0f) != 0.0f;
    if (rest > half_step || (rest == half_step && odd)) return q + 1.0f;
    if (rest < -half_step || (rest == -half_step && odd)) return q - 1.0f;
    return q;
}

/* How codes of one group map to numbers: x' = (code - offset) * scale + zero. */
struct quantizer {
    uint16_t param[2];                   /* binary16: scale, zero */
    float scale, zero, offset, min, max; /* min, max: of code - offset */
};

static struct quantizer read_quantizer(const struct int_codec *codec, const uint16_t param[2])
{
    struct quantizer q = {
        .param = {param[0], param[1]}, .scale = kvl_plugin_from_half(param[0]), .zero = kvl_plugin_from_half(param[1])};
    if (codec->scheme == SCHEME_ASYM) {
        q.max = (float)((1 << codec->bits) - 1);
    } else {
        q.offset = (float)(1 << (codec->bits - 1));
        q.max = q.offset - 1.0f;
        q.min = -q.max;
    }
    return q;
}

static struct quantizer fit_quantizer(const struct int_codec *codec, const float *x, uint32_t n)
{
    float low = kvl_plugin_clamp_half(x[0]), high = low;
    for (uint32_t i = 1; i < n; i++) {
        low = fminf(low, kvl_plugin_clamp_half(x[i]));
        high = fmaxf(high, kvl_plugin_clamp_half(x[i]));
    }
    const float steps = read_quantizer(codec, (uint16_t[2]){0, 0}).max;
    if (codec->scheme == SCHEME_SYM)
        return read_quantizer(codec, (uint16_t[2]){kvl_plugin_to_half(divide(fmaxf(fabsf(low), fabsf(high)), steps)), 0});
    /* + 0 makes a minimum of -0 a plain 0: fmin may return either. */
    return read_quantizer(codec, (uint16_t[2]){kvl_plugin_to_half(divide(high - low, steps)), kvl_plugin_to_half(low + 0.0f)});
}

static uint32_t code_of(const struct quantizer *q, float x)
{
    return (uint32_t)(fminf(fmaxf(quotient(kvl_plugin_clamp_half(x) - q->zero, q->scale), q->min), q->max) + q->offset);
}

static float value_of(const struct quantizer *q, uint32_t code) { return fmaf((float)code - q->offset, q->scale, q->zero); }

/* ---- bytes of a block ---- */

/* Byte k of word w of group g of token t: a word's bytes lie l.words rows apart. */
static uint64_t code_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t g, uint32_t w, uint32_t k)
{
    const uint64_t row = (uint64_t)g * l->group_bytes + (uint64_t)k * l->words + w;
    return dims->role == KVL_ROLE_K ? row * dims->page_tokens + t : t * l->token_bytes + row;
}

static uint64_t param_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t g, uint32_t p)
{
    return l->token_bytes * dims->page_tokens + 2 * (((uint64_t)g * l->n_params + p) * dims->page_tokens + t);
}

static void encode_group(const struct int_codec *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t,
                         uint32_t g, const float *x, uint8_t *block)
{
    const struct quantizer q = fit_quantizer(codec, x, l->group);
    for (uint32_t p = 0; p < l->n_params; p++) memcpy(block + param_at(l, dims, t, g, p), &q.param[p], 2);
    for (uint32_t w = 0; w < l->words; w++) {
        uint32_t word = 0;
        for (uint32_t j = 0; j < l->codes; j++) word |= code_of(&q, x[j * l->words + w]) << (j * (uint32_t)codec->bits);
        for (uint32_t k = 0; k < (uint32_t)codec->word_bytes; k++) block[code_at(l, dims, t, g, w, k)] = (uint8_t)(word >> 8 * k);
    }
}

static void decode_group(const struct int_codec *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t,
                         uint32_t g, const uint8_t *block, float *x)
{
    uint16_t param[2] = {0, 0};
    for (uint32_t p = 0; p < l->n_params; p++) memcpy(&param[p], block + param_at(l, dims, t, g, p), 2);
    const struct quantizer q = read_quantizer(codec, param);
    const uint32_t mask = (1u << codec->bits) - 1;
    for (uint32_t w = 0; w < l->words; w++) {
        uint32_t word = 0;
        for (uint32_t k = 0; k < (uint32_t)codec->word_bytes; k++) word |= (uint32_t)block[code_at(l, dims, t, g, w, k)] << 8 * k;
        for (uint32_t j = 0; j < l->codes; j++) x[j * l->words + w] = value_of(&q, word >> (j * (uint32_t)codec->bits) & mask);
    }
}

static int int_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const float *x, uint8_t *block)
{
    const struct layout l = layout_of(priv, dims);
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t g = 0; g < l.n_groups; g++, x += l.group) encode_group(priv, &l, dims, t0 + t, g, x, block);
    return 0;
}

static int int_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x)
{
    const struct layout l = layout_of(priv, dims);
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t g = 0; g < l.n_groups; g++, x += l.group) decode_group(priv, &l, dims, t0 + t, g, block, x);
    return 0;
}

static void int_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct int_codec *codec = priv;
    define(context, "BITS", codec->bits);
    define(context, "GROUP", layout_of(codec, dims).group);
    define(context, "ASYM", codec->scheme == SCHEME_ASYM);
}

/* One row a width: bits, and the bytes of a code word. */
#define INT_CODEC(bits_, word_bytes_)                                                                                              \
    static int int##bits_##_init(void *priv, const struct kvl_host *host) { return int_init(priv, host, bits_, word_bytes_); }     \
    const struct kvl_codec kvl_codec_int##bits_ = {                                                                                \
        .head = {.magic = KVL_PLUGIN_MAGIC,                                                                                        \
                 .abi_major = KVL_ABI_MAJOR,                                                                                       \
                 .abi_minor = KVL_ABI_MINOR,                                                                                       \
                 .struct_size = sizeof(struct kvl_codec),                                                                          \
                 .kind = KVL_KIND_CODEC,                                                                                           \
                 .name = "int" #bits_,                                                                                             \
                 .summary = #bits_ "-bit integers, a scale and a zero point for each token and group of channels",                 \
                 .citation = "round to nearest, per token and head; quantizer as in arXiv:2402.02750",                             \
                 .byte_version = 1,                                                                                                \
                 .n_options = sizeof int_options / sizeof *int_options,                                                            \
                 .options = int_options,                                                                                           \
                 .private_size = sizeof(struct int_codec),                                                                         \
                 .device_source = kvl_text_compress_codec_int_int_cl,                                                              \
                 .card = kvl_text_compress_codec_int_card_md,                                                                      \
                 .init = int##bits_##_init},                                                                                       \
        .roles = KVL_ROLE_K | KVL_ROLE_V,                                                                                          \
        .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,                                                                               \
        .flags = KVL_CODEC_MOVABLE | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_ACCUMULATE,                                              \
        .shape = int_shape,                                                                                                        \
        .bytes = int_bytes,                                                                                                        \
        .ref_encode = int_encode,                                                                                                  \
        .ref_decode = int_decode,                                                                                                  \
        .defines = int_defines,                                                                                                    \
        .known_answers = int##bits_##_answers,                                                                                     \
        .n_known_answers = sizeof int##bits_##_answers / sizeof *int##bits_##_answers,                                             \
    }

INT_CODEC(8, 1);
INT_CODEC(4, 1);
INT_CODEC(3, 3);
INT_CODEC(2, 1);
