/* int8, int4, int3, int2: a scale (and a zero point) for every group of channels of one token. kivi: the same numbers, for keys one pair for
 * every channel of a group of tokens. Layout and arithmetic: card.md, kivi.md. All float operations are single IEEE ones or fma, so every
 * device gives the same bytes. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdio.h>

extern const char kvl_text_compress_codec_int_int_cl[], kvl_text_compress_codec_int_card_md[], kvl_text_compress_codec_int_kivi_md[];

enum { SCHEME_ASYM, SCHEME_SYM };
enum { AXIS_AUTO, AXIS_CHANNEL, AXIS_TOKEN }; /* what a group is: tokens of one channel, or channels of one token; auto: by role */
enum { TOKEN_MULTIPLE = 16 };                 /* of groups along tokens, so that 16 tokens side by side share parameters */

struct int_codec {
    int32_t group, scheme;  /* options of intN; group 0 = the whole head */
    int32_t residual, axis; /* options of kivi, as are group and bits */
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

static const struct kvl_option kivi_options[] = {
    {"bits", "bits a number: 2, 3, 4 or 8", KVL_OPTION_INT, offsetof(struct int_codec, bits), 2, 2, 8, NULL},
    {"group", "numbers that share a scale and a zero point", KVL_OPTION_INT, offsetof(struct int_codec, group), 32, 2, 4096, NULL},
    {"residual", "newest tokens in full precision: by channel up to R - 1, sealed R at once; by token always R", KVL_OPTION_INT,
     offsetof(struct int_codec, residual), 128, 0, 65536, NULL},
    {"axis", "channel: a group is tokens of a channel; token: channels of a token; auto: keys channel, values token",
     KVL_OPTION_CHOICE, offsetof(struct int_codec, axis), AXIS_AUTO, 0, 0, "auto|channel|token"},
};

static int set_width(struct int_codec *codec, const struct kvl_host *host, int32_t bits)
{
    codec->host = host;
    codec->bits = bits;
    codec->word_bytes = 8 % bits == 0 ? 1 : bits;
    return 0;
}

static int int_init(struct int_codec *codec, const struct kvl_host *host, int32_t bits)
{
    codec->axis = AXIS_TOKEN;
    return set_width(codec, host, bits);
}

static int kivi_init(void *priv, const struct kvl_host *host)
{
    struct int_codec *codec = priv;
    if (codec->bits == 3 || 8 % codec->bits == 0) return set_width(codec, host, codec->bits);
    host->error("bits must be 2, 3, 4 or 8");
    return 1;
}

/* ---- shape ---- */

struct layout {
    uint32_t tokens, channels; /* a group: so many tokens x so many channels */
    uint32_t span;             /* channels whose codes share words */
    uint32_t codes;            /* of a word */
    uint32_t words;            /* of a span; the channels of one word are `words` apart */
    uint32_t n_params;         /* binary16 numbers of a group: scale (zero) */
    uint64_t token_bytes;      /* code bytes of a token */
};

static uint32_t codes_of_word(const struct int_codec *codec) { return (uint32_t)(8 * codec->word_bytes / codec->bits); }

static int is_by_channel(const struct int_codec *codec, const struct kvl_codec_dims *dims)
{
    return codec->axis == AXIS_CHANNEL || (codec->axis == AXIS_AUTO && dims->role == KVL_ROLE_K);
}

static struct layout layout_of(const struct int_codec *codec, const struct kvl_codec_dims *dims)
{
    const uint32_t group = codec->group > 0 ? (uint32_t)codec->group : dims->head_dim;
    struct layout l = {.tokens = 1, .channels = group, .span = group, .codes = codes_of_word(codec)};
    if (is_by_channel(codec, dims)) {
        l.tokens = group;
        l.channels = 1;
        l.span = dims->head_dim;
    }
    l.words = l.span / l.codes;
    l.n_params = codec->scheme == SCHEME_ASYM ? 2 : 1;
    l.token_bytes = (uint64_t)dims->head_dim / l.span * l.words * (uint32_t)codec->word_bytes;
    return l;
}

static int is_legal_span(uint32_t span, uint32_t head_dim, uint32_t codes) { return head_dim % span == 0 && span % codes == 0; }

/* "group must divide head_dim 64: use 16, 32 or 64": the largest three that fit. */
static int refuse_group(const struct int_codec *codec, uint32_t group, uint32_t head_dim)
{
    const uint32_t codes = codes_of_word(codec);
    uint32_t fit[3], n = 0;
    char text[160], names[40] = "another codec";
    for (uint32_t g = head_dim; g >= codes && n < 3; g--)
        if (is_legal_span(g, head_dim, codes)) fit[n++] = g;
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

/* Keys by channel and the like: what is wrong with group and residual, or 0. */
static int refuse_tokens(const struct int_codec *codec, const struct layout *l, uint32_t head_dim)
{
    char text[160] = "";
    if (head_dim % l->codes != 0)
        snprintf(text, sizeof text, "head_dim %u is not a multiple of %u, for whole bytes: use other bits", head_dim, l->codes);
    else if (l->tokens % TOKEN_MULTIPLE != 0)
        snprintf(text, sizeof text, "group=%u tokens of a channel must be a multiple of %d: use %d or 32", l->tokens, TOKEN_MULTIPLE,
                 TOKEN_MULTIPLE);
    else if ((uint32_t)codec->residual % l->tokens != 0)
        snprintf(text, sizeof text, "residual=%d must be a multiple of group=%u: use %u or %u", codec->residual, l->tokens, l->tokens,
                 4 * l->tokens);
    if (*text != '\0') codec->host->error(text);
    return *text != '\0';
}

static int int_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    const struct int_codec *codec = priv;
    const struct layout l = layout_of(codec, dims);
    const uint32_t d = dims->head_dim, residual = (uint32_t)codec->residual;
    out->group = out->unit = out->page_multiple = l.tokens;
    out->alignment = 16;
    out->block_bytes = dims->page_tokens * l.token_bytes + 2ull * (dims->page_tokens / l.tokens) * (d / l.channels) * l.n_params;
    if (is_by_channel(codec, dims)) {
        if (residual != 0) out->unit = residual;
        return refuse_tokens(codec, &l, d);
    }
    out->tail_min = residual;
    out->aux_floats = dims->role == KVL_ROLE_K ? d / l.channels : 0;
    return is_legal_span(l.span, d, l.codes) ? 0 : refuse_group(codec, l.span, d);
}

static int int_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    const struct layout l = layout_of(priv, dims);
    out->payload = n * l.token_bytes;
    out->scale = (n + l.tokens - 1) / l.tokens * (dims->head_dim / l.channels) * 2u * l.n_params;
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

static struct quantizer quantizer_of(const struct int_codec *codec, uint16_t scale, uint16_t zero)
{
    struct quantizer q = {.param = {scale, zero}, .scale = kvl_plugin_from_half(scale), .zero = kvl_plugin_from_half(zero)};
    if (codec->scheme == SCHEME_ASYM) {
        q.max = (float)((1 << codec->bits) - 1);
    } else {
        q.offset = (float)(1 << (codec->bits - 1));
        q.max = q.offset - 1.0f;
        q.min = -q.max;
    }
    return q;
}

/* For the n tokens x l->channels that start at x [.][head_dim]. */
static struct quantizer fit_quantizer(const struct int_codec *codec, const struct layout *l, uint32_t head_dim, uint32_t n, const float *x)
{
    float low = kvl_plugin_clamp_half(x[0]), high = low;
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < l->channels; c++) {
            const float value = kvl_plugin_clamp_half(x[(size_t)t * head_dim + c]);
            low = fminf(low, value);
            high = fmaxf(high, value);
        }
    const float steps = quantizer_of(codec, 0, 0).max;
    if (codec->scheme == SCHEME_SYM) return quantizer_of(codec, kvl_plugin_to_half(divide(fmaxf(fabsf(low), fabsf(high)), steps)), 0);
    /* + 0 makes a minimum of -0 a plain 0: fmin may return either. */
    return quantizer_of(codec, kvl_plugin_to_half(divide(high - low, steps)), kvl_plugin_to_half(low + 0.0f));
}

static uint32_t code_of(const struct quantizer *q, float x)
{
    return (uint32_t)(fminf(fmaxf(quotient(kvl_plugin_clamp_half(x) - q->zero, q->scale), q->min), q->max) + q->offset);
}

static float value_of(const struct quantizer *q, uint32_t code) { return fmaf((float)code - q->offset, q->scale, q->zero); }

/* ---- bytes of a block ---- */

/* Byte k of the word that holds channel c of token t: a word's bytes lie l->words rows apart. */
static uint64_t code_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t c, uint32_t k)
{
    const uint64_t span_bytes = l->token_bytes * l->span / dims->head_dim;
    const uint64_t row = c / l->span * span_bytes + (uint64_t)k * l->words + c % l->span % l->words;
    return dims->role == KVL_ROLE_K ? row * dims->page_tokens + t : t * l->token_bytes + row;
}

/* Parameter p of the group that channel c of token t belongs to. */
static uint64_t param_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t c, uint32_t p)
{
    const uint64_t codes = l->token_bytes * dims->page_tokens;
    if (l->tokens > 1) return codes + 2 * (((uint64_t)(t / l->tokens) * l->n_params + p) * dims->head_dim + c);
    return codes + 2 * (((uint64_t)(c / l->channels) * l->n_params + p) * dims->page_tokens + t);
}

static struct quantizer read_quantizer(const struct int_codec *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t,
                                       uint32_t c, const uint8_t *block)
{
    uint16_t param[2] = {0, 0};
    for (uint32_t p = 0; p < l->n_params; p++) memcpy(&param[p], block + param_at(l, dims, t, c, p), 2);
    return quantizer_of(codec, param[0], param[1]);
}

static void encode_word(const struct int_codec *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t c,
                        const float *x, uint8_t *block)
{
    uint32_t word = 0;
    for (uint32_t j = 0; j < l->codes; j++) {
        const struct quantizer q = read_quantizer(codec, l, dims, t, c + j * l->words, block);
        word |= code_of(&q, x[c + j * l->words]) << (j * (uint32_t)codec->bits);
    }
    for (uint32_t k = 0; k < (uint32_t)codec->word_bytes; k++) block[code_at(l, dims, t, c, k)] = (uint8_t)(word >> 8 * k);
}

static int int_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const float *x, uint8_t *block)
{
    const struct layout l = layout_of(priv, dims);
    const uint32_t d = dims->head_dim;
    for (uint32_t t = 0; t < n; t += l.tokens)
        for (uint32_t c = 0; c < d; c += l.channels) {
            const struct quantizer q = fit_quantizer(priv, &l, d, n - t < l.tokens ? n - t : l.tokens, x + (size_t)t * d + c);
            for (uint32_t p = 0; p < l.n_params; p++) memcpy(block + param_at(&l, dims, t0 + t, c, p), &q.param[p], 2);
        }
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t span = 0; span < d; span += l.span)
            for (uint32_t w = 0; w < l.words; w++) encode_word(priv, &l, dims, t0 + t, span + w, x + (size_t)t * d, block);
    return 0;
}

static int int_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x)
{
    const struct int_codec *codec = priv;
    const struct layout l = layout_of(codec, dims);
    const uint32_t mask = (1u << codec->bits) - 1;
    for (uint32_t t = t0; t < t0 + n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            const struct quantizer q = read_quantizer(codec, &l, dims, t, c, block);
            uint32_t word = 0;
            for (uint32_t k = 0; k < (uint32_t)codec->word_bytes; k++) word |= (uint32_t)block[code_at(&l, dims, t, c, k)] << 8 * k;
            *x++ = value_of(&q, word >> (c % l.span / l.words * (uint32_t)codec->bits) & mask);
        }
    return 0;
}

static void int_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct int_codec *codec = priv;
    const struct layout l = layout_of(codec, dims);
    define(context, "BITS", codec->bits);
    define(context, "GROUP", l.span);
    define(context, "ASYM", codec->scheme == SCHEME_ASYM);
    define(context, "TOKENS", l.tokens);
}

#define COUNT(list) (sizeof(list) / sizeof *(list))
/* What all members of the family share. */
#define HEAD(name_, summary_, citation_, options_, card_, init_)                                                                   \
    {.magic = KVL_PLUGIN_MAGIC,                                                                                                    \
     .abi_major = KVL_ABI_MAJOR,                                                                                                   \
     .abi_minor = KVL_ABI_MINOR,                                                                                                   \
     .struct_size = sizeof(struct kvl_codec),                                                                                      \
     .kind = KVL_KIND_CODEC,                                                                                                       \
     .name = name_,                                                                                                                \
     .summary = summary_,                                                                                                          \
     .citation = citation_,                                                                                                        \
     .byte_version = 1,                                                                                                            \
     .n_options = COUNT(options_),                                                                                                 \
     .options = options_,                                                                                                          \
     .private_size = sizeof(struct int_codec),                                                                                     \
     .device_source = kvl_text_compress_codec_int_int_cl,                                                                          \
     .card = card_,                                                                                                                \
     .init = init_}
#define CODEC(head_, movable_, answers_)                                                                                           \
    {                                                                                                                              \
        .head = head_, .roles = KVL_ROLE_K | KVL_ROLE_V, .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,                              \
        .flags = (movable_) | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_ACCUMULATE, .shape = int_shape, .bytes = int_bytes,             \
        .ref_encode = int_encode, .ref_decode = int_decode, .defines = int_defines, .known_answers = answers_,                     \
        .n_known_answers = COUNT(answers_),                                                                                        \
    }

#define INT_CODEC(bits_)                                                                                                           \
    static int int##bits_##_init(void *priv, const struct kvl_host *host) { return int_init(priv, host, bits_); }                  \
    const struct kvl_codec kvl_codec_int##bits_ = CODEC(                                                                           \
        HEAD("int" #bits_, #bits_ "-bit integers, a scale and a zero point for each token and group of channels",                  \
             "round to nearest, per token and head; quantizer as in arXiv:2402.02750", int_options,                                \
             kvl_text_compress_codec_int_card_md, int##bits_##_init),                                                              \
        KVL_CODEC_MOVABLE, int##bits_##_answers)

INT_CODEC(8);
INT_CODEC(4);
INT_CODEC(3);
INT_CODEC(2);

const struct kvl_codec kvl_codec_kivi =
    CODEC(HEAD("kivi", "few-bit integers, keys scaled by channel over groups of tokens, values by token, newest tokens exact",
               "Liu et al., KIVI, ICML 2024, arXiv:2402.02750", kivi_options, kvl_text_compress_codec_int_kivi_md, kivi_init),
          0, kivi_answers);
