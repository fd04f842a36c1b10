/* int8, int4, int3, int2: a scale (and a zero point) for every group of channels of one token. kivi: the same numbers, for keys one pair for
 * every channel of a group of tokens. gear: the same over blocks of tokens, with the largest numbers kept sparse and a low-rank part of what is
 * left. Layout and arithmetic: card.md, kivi.md, gear.md. All float operations are single IEEE ones or fma, so every device gives the same bytes. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdio.h>
#include <stdlib.h>

extern const char kvl_text_compress_codec_int_int_cl[], kvl_text_compress_codec_int_card_md[], kvl_text_compress_codec_int_kivi_md[],
    kvl_text_compress_codec_int_gear_md[];

enum { SCHEME_ASYM, SCHEME_SYM };
enum { SCALE_F16, SCALE_E4M3, SCALE_E5M2, SCALE_TYPES };
enum { AXIS_AUTO, AXIS_CHANNEL, AXIS_TOKEN }; /* what a group is: tokens of one channel, or channels of one token; auto: by role */
enum { TOKEN_MULTIPLE = 16 };                 /* of groups along tokens, so that 16 tokens side by side share parameters */
enum { BLOCK_MOST = 256, RANK_MOST = 8, OUTLIERS_MOST = 4 };

struct int_codec {
    int32_t group, scheme;  /* options of intN; group 0 = the whole head */
    int32_t residual, axis; /* options of kivi, as are group and bits */
    int32_t block, rank, outliers; /* options of gear, as is bits; block 0 = none of this */
    double clip;            /* options of both: share of a range that codes span */
    int32_t search, scale;
    int32_t bits;
    int32_t word_bytes; /* bytes that hold a whole number of codes */
    const struct kvl_host *host;
};

#define QUANTIZER_OPTIONS                                                                                                          \
    {"clip", "share of a group's range that codes span, about its middle", KVL_OPTION_FLOAT, offsetof(struct int_codec, clip), 1, 0.1, 1, NULL},      \
    {"search", "steps from 1 down to clip, of which each group takes the one of least squared error; 0: clip itself", KVL_OPTION_INT,                \
     offsetof(struct int_codec, search), 0, 0, 32, NULL},                                                                          \
    {"scale", "type of scales and zero points", KVL_OPTION_CHOICE, offsetof(struct int_codec, scale), SCALE_F16, 0, 0, "f16|e4m3|e5m2"}

static const struct kvl_option int_options[] = {
    {"group", "channels that share a scale; 0 = the whole head", KVL_OPTION_INT, offsetof(struct int_codec, group), 0, 0, 65536,
     NULL},
    {"scheme", "asym: scale and zero point; sym: scale only", KVL_OPTION_CHOICE, offsetof(struct int_codec, scheme), SCHEME_ASYM, 0,
     0, "asym|sym"},
    QUANTIZER_OPTIONS,
};

static const struct kvl_option kivi_options[] = {
    {"bits", "bits a number: 2, 3, 4 or 8", KVL_OPTION_INT, offsetof(struct int_codec, bits), 2, 2, 8, NULL},
    {"group", "numbers that share a scale and a zero point", KVL_OPTION_INT, offsetof(struct int_codec, group), 32, 2, 4096, NULL},
    {"residual", "newest tokens in full precision: by channel up to R - 1, sealed R at once; by token always R", KVL_OPTION_INT,
     offsetof(struct int_codec, residual), 128, 0, 65536, NULL},
    {"axis", "channel: a group is tokens of a channel; token: channels of a token; auto: keys channel, values token",
     KVL_OPTION_CHOICE, offsetof(struct int_codec, axis), AXIS_AUTO, 0, 0, "auto|channel|token"},
    QUANTIZER_OPTIONS,
};

static const struct kvl_option gear_options[] = {
    {"bits", "bits a number: 2, 3, 4 or 8", KVL_OPTION_INT, offsetof(struct int_codec, bits), 2, 2, 8, NULL},
    {"block", "tokens sealed at once, with one low-rank part", KVL_OPTION_INT, offsetof(struct int_codec, block), 64, 16, BLOCK_MOST, NULL},
    {"rank", "of the low-rank part", KVL_OPTION_INT, offsetof(struct int_codec, rank), 2, 0, RANK_MOST, NULL},
    {"outliers", "largest and smallest numbers of a channel (keys) or token (values) kept sparse, so many of each", KVL_OPTION_INT,
     offsetof(struct int_codec, outliers), 1, 0, OUTLIERS_MOST, NULL},
};

static int set_width(struct int_codec *codec, const struct kvl_host *host, int32_t bits)
{
    codec->host = host;
    codec->bits = bits;
    codec->word_bytes = 8 % bits == 0 ? 1 : bits;
    if (codec->search == 0 || codec->clip < 1.0) return 0;
    host->error("search= tries clips from 1 down to clip=: give one below 1, as clip=0.5");
    return 1;
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

static int gear_init(void *priv, const struct kvl_host *host)
{
    ((struct int_codec *)priv)->clip = 1.0;
    return kivi_init(priv, host);
}

/* ---- shape ---- */

struct layout {
    uint32_t tokens, channels; /* a group: so many tokens x so many channels */
    uint32_t span;             /* channels whose codes share words */
    uint32_t codes;            /* of a word */
    uint32_t words;            /* of a span; the channels of one word are `words` apart */
    uint32_t n_params;         /* of a group: scale (zero) */
    uint32_t param_bytes;
    uint32_t block;            /* tokens of a low-rank part; 0 = none */
    uint32_t factors;          /* binary16 numbers of the low-rank part of a block */
    uint32_t sparse, vectors;  /* of a block: so many numbers of each of so many groups are sparse */
    uint64_t token_bytes;      /* code bytes of a token */
};

static uint32_t codes_of_word(const struct int_codec *codec) { return (uint32_t)(8 * codec->word_bytes / codec->bits); }

static int is_by_channel(const struct int_codec *codec, const struct kvl_codec_dims *dims)
{
    return codec->axis == AXIS_CHANNEL || (codec->axis == AXIS_AUTO && dims->role == KVL_ROLE_K);
}

static struct layout layout_of(const struct int_codec *codec, const struct kvl_codec_dims *dims)
{
    const int by_channel = is_by_channel(codec, dims);
    const uint32_t block = (uint32_t)codec->block, given = by_channel && block ? block : (uint32_t)codec->group;
    const uint32_t group = given > 0 ? given : dims->head_dim;
    struct layout l = {.tokens = 1, .channels = group, .span = group, .codes = codes_of_word(codec)};
    if (by_channel) {
        l.tokens = group;
        l.channels = 1;
        l.span = dims->head_dim;
    }
    l.words = l.span / l.codes;
    l.n_params = codec->scheme == SCHEME_ASYM ? 2 : 1;
    l.param_bytes = codec->scale == SCALE_F16 ? 2 : 1;
    l.token_bytes = (uint64_t)dims->head_dim / l.span * l.words * (uint32_t)codec->word_bytes;
    l.block = block;
    l.factors = (uint32_t)codec->rank * (block + dims->head_dim);
    l.sparse = 2 * (uint32_t)codec->outliers;
    l.vectors = by_channel ? dims->head_dim : block;
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
        snprintf(text, sizeof text, "%s=%u tokens of a channel must be a multiple of %d: use %d or 32", l->block ? "block" : "group", l->tokens,
                 TOKEN_MULTIPLE, TOKEN_MULTIPLE);
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
    out->group = out->unit = out->page_multiple = l.block ? l.block : l.tokens;
    out->alignment = 16;
    out->block_bytes = dims->page_tokens * l.token_bytes + (uint64_t)(dims->page_tokens / l.tokens) * (d / l.channels) * l.n_params * l.param_bytes;
    if (l.block != 0) out->block_bytes += dims->page_tokens / l.block * (2ull * l.factors + 3ull * l.sparse * l.vectors);
    if (l.block != 0 && d > BLOCK_MOST) {
        codec->host->error("head_dim must be at most 256: indices of outliers have 8 bits");
        return 1;
    }
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
    out->scale = (n + l.tokens - 1) / l.tokens * (dims->head_dim / l.channels) * l.param_bytes * l.n_params;
    if (l.block == 0) return 0;
    const uint64_t blocks = (n + l.block - 1) / l.block, sparse = blocks * l.sparse * l.vectors;
    if (dims->role != KVL_ROLE_K) out->scale = blocks * l.block * 2u * l.n_params; /* a short block keeps its place */
    out->payload += 2 * (blocks * l.factors + sparse);
    out->index = sparse;
    return 0;
}

/* ---- arithmetic ---- */

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

/* Types of scales and zero points: binary16, or 8 bits that are rounded outwards, so that no number of the group is left out. */
static const struct param_type {
    int32_t mantissa, bias; /* bits; of the exponent. 0: binary16 */
    uint32_t max;           /* code of the largest number */
} param_types[SCALE_TYPES] = {[SCALE_E4M3] = {3, 7, 0x7e}, [SCALE_E5M2] = {2, 15, 0x7b}};

/* Codes differ from binary16 in the exponent's bias alone, once they are moved to their places. */
static float from_param(const struct int_codec *codec, uint16_t param)
{
    const struct param_type *type = &param_types[codec->scale];
    if (type->mantissa == 0) return kvl_plugin_from_half(param);
    const uint32_t half = (param & 0x80u) << 8 | (param & 0x7fu) << (10 - type->mantissa);
    return kvl_plugin_from_half((uint16_t)half) * ldexpf(1.0f, 15 - type->bias);
}

/* The code next to x, of two the one whose magnitude is larger if is_away, else smaller; the largest one's for what is larger. */
static uint16_t code_beside(const struct param_type *type, float x, int is_away)
{
    const float magnitude = fabsf(x);
    const int shift = 23 - type->mantissa;
    uint32_t code;
    memcpy(&code, &magnitude, sizeof code);
    if (magnitude < 0x1p-100f) return 0;
    if (magnitude < ldexpf(1.0f, 1 - type->bias)) { /* subnormal */
        const float units = ldexpf(magnitude, type->bias - 1 + type->mantissa);
        code = (uint32_t)(is_away ? ceilf(units) : floorf(units));
    } else {
        code = ((code + (is_away ? (1u << shift) - 1 : 0)) >> shift) - ((uint32_t)(127 - type->bias) << type->mantissa);
    }
    if (code > type->max) code = type->max;
    return (uint16_t)(code == 0 ? 0 : code | (x < 0.0f ? 0x80u : 0u));
}

static uint16_t to_param(const struct int_codec *codec, float x, int is_away)
{
    return codec->scale == SCALE_F16 ? kvl_plugin_to_half(x) : code_beside(&param_types[codec->scale], x, is_away);
}

/* How codes of one group map to numbers: x' = (code - offset) * scale + zero. */
struct quantizer {
    uint16_t param[2];                   /* as stored: scale, zero */
    float scale, zero, offset, min, max; /* min, max: of code - offset */
};

static struct quantizer quantizer_of(const struct int_codec *codec, uint16_t scale, uint16_t zero)
{
    struct quantizer q = {.param = {scale, zero}, .scale = from_param(codec, scale), .zero = from_param(codec, zero)};
    if (codec->scheme == SCHEME_ASYM) {
        q.max = (float)((1 << codec->bits) - 1);
    } else {
        q.offset = (float)(1 << (codec->bits - 1));
        q.max = q.offset - 1.0f;
        q.min = -q.max;
    }
    return q;
}

/* Numbers x[0], x[stride], ... that share parameters. */
struct group {
    const float *x;
    uint32_t n, stride;
};

static float number(const struct group *g, uint32_t i) { return kvl_plugin_clamp_half(g->x[(size_t)i * g->stride]); }

static int is_listed(const uint8_t *index, uint32_t n, uint32_t i)
{
    for (uint32_t k = 0; k < n; k++)
        if (index[k] == i) return 1;
    return 0;
}

/* Indices of the `each` largest numbers, then of as many smallest, the first of equal ones; fewer of a group that has not so many. */
static uint32_t find_outliers(const struct group *g, uint32_t each, uint8_t index[2 * OUTLIERS_MOST])
{
    const uint32_t most = (g->n - 1) / 2, n = 2 * (each < most ? each : most);
    for (uint32_t k = 0; k < n; k++) {
        const float sign = k < n / 2 ? 1.0f : -1.0f;
        uint32_t best = g->n;
        for (uint32_t i = 0; i < g->n; i++)
            if (!is_listed(index, k, i) && (best == g->n || sign * number(g, i) > sign * number(g, best))) best = i;
        index[k] = (uint8_t)best;
    }
    return n;
}

static uint32_t code_of(const struct quantizer *q, float x)
{
    return (uint32_t)(fminf(fmaxf(quotient(kvl_plugin_clamp_half(x) - q->zero, q->scale), q->min), q->max) + q->offset);
}

static float value_of(const struct quantizer *q, uint32_t code) { return fmaf((float)code - q->offset, q->scale, q->zero); }

/* For numbers from low to high, of which codes span `clip` about the middle. */
static struct quantizer span_range(const struct int_codec *codec, float low, float high, float clip)
{
    const float steps = quantizer_of(codec, 0, 0).max, cut = 0.5f * (1.0f - clip), range = high - low;
    if (codec->scheme == SCHEME_SYM) return quantizer_of(codec, to_param(codec, clip * fmaxf(fabsf(low), fabsf(high)) / steps, 1), 0);
    /* + 0 makes a minimum of -0 a plain 0: fmin may return either. */
    const float from = fmaf(cut, range, low) + 0.0f, to = fmaf(-cut, range, high);
    const uint16_t zero = to_param(codec, from, from < 0.0f);
    const float start = codec->scale == SCALE_F16 ? from : from_param(codec, zero);
    return quantizer_of(codec, to_param(codec, fabsf(fmaxf(to - start, 0.0f) / steps), 1), zero);
}

static float squared_error(const struct quantizer *q, const struct group *g)
{
    float sum = 0.0f;
    for (uint32_t i = 0; i < g->n; i++) {
        const float rest = number(g, i) - value_of(q, code_of(q, number(g, i)));
        sum = fmaf(rest, rest, sum);
    }
    return sum;
}

/* Clips are 1 - i * clip_step, i from 0 to `search`; without a search the one of i = 1. */
static float clip_step(const struct int_codec *codec) { return (float)((1.0 - codec->clip) / (codec->search > 0 ? codec->search : 1)); }

static struct quantizer search_clip(const struct int_codec *codec, const struct group *g, float low, float high)
{
    const float step = clip_step(codec);
    if (codec->search == 0) return span_range(codec, low, high, 1.0f - step);
    struct quantizer best = span_range(codec, low, high, 1.0f);
    float least = squared_error(&best, g);
    for (int32_t i = 1; i <= codec->search; i++) {
        const struct quantizer q = span_range(codec, low, high, fmaf(-(float)i, step, 1.0f));
        const float error = squared_error(&q, g);
        if (error < least) {
            best = q;
            least = error;
        }
    }
    return best;
}

/* For the numbers of a group that are no outliers. */
static struct quantizer fit_quantizer(const struct int_codec *codec, const struct group *g)
{
    uint8_t index[2 * OUTLIERS_MOST];
    const uint32_t n_outliers = find_outliers(g, (uint32_t)codec->outliers, index);
    float low = INFINITY, high = -INFINITY;
    for (uint32_t i = 0; i < g->n; i++) {
        if (is_listed(index, n_outliers, i)) continue;
        low = fminf(low, number(g, i));
        high = fmaxf(high, number(g, i));
    }
    return search_clip(codec, g, low, high);
}

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
    if (l->tokens > 1) return codes + l->param_bytes * (((uint64_t)(t / l->tokens) * l->n_params + p) * dims->head_dim + c);
    return codes + l->param_bytes * (((uint64_t)(c / l->channels) * l->n_params + p) * dims->page_tokens + t);
}

static struct quantizer read_quantizer(const struct int_codec *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t,
                                       uint32_t c, const uint8_t *block)
{
    uint16_t param[2] = {0, 0};
    for (uint32_t p = 0; p < l->n_params; p++) memcpy(&param[p], block + param_at(l, dims, t, c, p), l->param_bytes);
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

/* The n tokens x channels of the group that starts at x [.][head_dim]: one of the two is 1. */
static struct group group_at(const struct layout *l, uint32_t head_dim, uint32_t n, const float *x)
{
    return l->tokens > 1 ? (struct group){x, n < l->tokens ? n : l->tokens, head_dim} : (struct group){x, l->channels, 1};
}

static int int_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const float *x, uint8_t *block)
{
    const struct layout l = layout_of(priv, dims);
    const uint32_t d = dims->head_dim;
    for (uint32_t t = 0; t < n; t += l.tokens)
        for (uint32_t c = 0; c < d; c += l.channels) {
            const struct group group = group_at(&l, d, n - t, x + (size_t)t * d + c);
            const struct quantizer q = fit_quantizer(priv, &group);
            for (uint32_t p = 0; p < l.n_params; p++) memcpy(block + param_at(&l, dims, t0 + t, c, p), &q.param[p], l.param_bytes);
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

/* ---- gear: blocks with a low-rank part and sparse numbers behind the codes and parameters ---- */

/* Number i of factor pair k of block b: `block` of tokens, then head_dim of channels. */
static uint64_t factor_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t b, uint32_t k, uint32_t i)
{
    const uint64_t params = 2ull * (dims->page_tokens / l->tokens) * (dims->head_dim / l->channels) * l->n_params;
    return l->token_bytes * dims->page_tokens + params + 2ull * (b * l->factors + k * (l->block + dims->head_dim) + i);
}

/* Sparse number e of group v of block b: its value, binary16, and its index in the group, a byte. */
static uint64_t value_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t b, uint32_t e, uint32_t v)
{
    return factor_at(l, dims, dims->page_tokens / l->block, 0, 0) + 2ull * ((b * l->sparse + e) * l->vectors + v);
}

static uint64_t index_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t b, uint32_t e, uint32_t v)
{
    return value_at(l, dims, dims->page_tokens / l->block, 0, 0) + (b * l->sparse + e) * l->vectors + v;
}

static float load_half(const uint8_t *at)
{
    uint16_t half;
    memcpy(&half, at, 2);
    return kvl_plugin_from_half(half);
}

/* What x becomes; a zero of either sign is stored as +0. */
static float store_half(uint8_t *at, float x)
{
    const uint16_t half = kvl_plugin_to_half(kvl_plugin_clamp_half(x) + 0.0f);
    memcpy(at, &half, 2);
    return kvl_plugin_from_half(half);
}

/* Powers of two off, so that the largest magnitude is in [1, 2); next to nothing becomes 0. */
static void normalize(float *x, uint32_t n)
{
    float reach = 0.0f;
    int exponent;
    for (uint32_t i = 0; i < n; i++) reach = fmaxf(reach, fabsf(x[i]));
    frexpf(reach, &exponent);
    for (uint32_t i = 0; i < n; i++) x[i] = reach < 0x1p-100f ? 0.0f : ldexpf(x[i], 1 - exponent);
}

/* token[t] = sum over c of r[t][c] channel[c]; and the other way. */
static void times(const float *r, uint32_t n, uint32_t d, const float *channel, float *token)
{
    for (uint32_t t = 0; t < n; t++) {
        token[t] = 0.0f;
        for (uint32_t c = 0; c < d; c++) token[t] = fmaf(r[t * d + c], channel[c], token[t]);
    }
}

static void transposed_times(const float *r, uint32_t n, uint32_t d, const float *token, float *channel)
{
    for (uint32_t c = 0; c < d; c++) {
        channel[c] = 0.0f;
        for (uint32_t t = 0; t < n; t++) channel[c] = fmaf(r[t * d + c], token[t], channel[c]);
    }
}

enum { POWER_ITERATIONS = 3 };

/* Takes the strongest direction of r [n][d] off it and stores the two factors. */
static void take_factor(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t b, uint32_t k, float *r, uint32_t n, uint8_t *block)
{
    const uint32_t d = dims->head_dim;
    float token[BLOCK_MOST] = {0}, channel[BLOCK_MOST], square = 0.0f;
    for (uint32_t c = 0; c < d; c++) channel[c] = (c + 1) * 0x9e3779b9u >> 31 ? -1.0f : 1.0f;
    for (int i = 0; i < POWER_ITERATIONS; i++) {
        times(r, n, d, channel, token);
        normalize(token, n);
        transposed_times(r, n, d, token, channel);
        normalize(channel, d);
    }
    for (uint32_t c = 0; c < d; c++) {
        channel[c] = store_half(block + factor_at(l, dims, b, k, l->block + c), channel[c]);
        square = fmaf(channel[c], channel[c], square);
    }
    times(r, n, d, channel, token);
    for (uint32_t t = 0; t < l->block; t++) {
        const int is_nothing = t >= n || square == 0.0f || fabsf(token[t]) < 0x1p-100f;
        token[t] = store_half(block + factor_at(l, dims, b, k, t), is_nothing ? 0.0f : token[t] / square);
    }
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < d; c++) r[t * d + c] = fmaf(-token[t], channel[c], r[t * d + c]);
}

/* Codes and low-rank part together. */
static void decode_smooth(const void *priv, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t0, uint32_t n,
                          const uint8_t *block, float *x)
{
    const uint32_t d = dims->head_dim, rank = l->factors / (l->block + d);
    int_decode(priv, dims, NULL, t0, n, block, x);
    for (uint32_t i = 0; i < n; i++, x += d)
        for (uint32_t c = 0; c < d; c++)
            for (uint32_t k = 0; k < rank; k++) {
                const uint32_t b = (t0 + i) / l->block, t = (t0 + i) % l->block;
                x[c] = fmaf(load_half(block + factor_at(l, dims, b, k, t)), load_half(block + factor_at(l, dims, b, k, l->block + c)), x[c]);
            }
}

/* Group v of n tokens x [n][head_dim] of a block. */
static struct group vector_at(const struct layout *l, uint32_t head_dim, uint32_t n, const float *x, uint32_t v)
{
    return group_at(l, head_dim, n, l->tokens > 1 ? x + v : x + (size_t)v * head_dim);
}

/* One block of n tokens; scratch [2][n][head_dim]. */
static void gear_encode_block(const struct int_codec *codec, const struct kvl_codec_dims *dims, uint32_t t0, uint32_t n, const float *x,
                              float *scratch, uint8_t *block)
{
    const struct layout l = layout_of(codec, dims);
    const uint32_t d = dims->head_dim, b = t0 / l.block, vectors = l.tokens > 1 ? d : n;
    float *smooth = scratch, *rest = scratch + (size_t)n * d;
    uint8_t index[2 * OUTLIERS_MOST];
    int_encode(codec, dims, NULL, t0, n, x, block);
    int_decode(codec, dims, NULL, t0, n, block, rest);
    for (uint32_t i = 0; i < n * d; i++) rest[i] = kvl_plugin_clamp_half(x[i]) - rest[i];
    for (uint32_t v = 0; v < vectors; v++) {
        const struct group g = vector_at(&l, d, n, x, v), r = vector_at(&l, d, n, rest, v);
        const uint32_t n_outliers = find_outliers(&g, l.sparse / 2, index);
        for (uint32_t e = 0; e < n_outliers; e++) rest[(r.x - rest) + (size_t)index[e] * r.stride] = 0.0f;
    }
    for (uint32_t k = 0; k < (uint32_t)codec->rank; k++) take_factor(&l, dims, b, k, rest, n, block);
    decode_smooth(codec, &l, dims, t0, n, block, smooth);
    for (uint32_t v = 0; v < l.vectors; v++) {
        const struct group g = vector_at(&l, d, n, x, v), s = vector_at(&l, d, n, smooth, v);
        const uint32_t n_outliers = v < vectors ? find_outliers(&g, l.sparse / 2, index) : 0;
        for (uint32_t e = 0; e < l.sparse; e++) {
            const uint32_t i = e < n_outliers ? index[e] : 0;
            block[index_at(&l, dims, b, e, v)] = (uint8_t)i;
            store_half(block + value_at(&l, dims, b, e, v), e < n_outliers ? number(&g, i) - s.x[(size_t)i * s.stride] : 0.0f);
        }
    }
}

static int gear_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                       uint8_t *block)
{
    const struct int_codec *codec = priv;
    const uint32_t most = (uint32_t)codec->block;
    float *scratch = malloc(2 * sizeof *scratch * most * dims->head_dim);
    if (scratch == NULL) return 1;
    for (uint32_t t = 0; t < n; t += most)
        gear_encode_block(codec, dims, t0 + t, n - t < most ? n - t : most, x + (size_t)t * dims->head_dim, scratch, block);
    free(scratch);
    return 0;
}

static int gear_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const uint8_t *block,
                       float *x)
{
    const struct layout l = layout_of(priv, dims);
    const uint32_t d = dims->head_dim;
    decode_smooth(priv, &l, dims, t0, n, block, x);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < d; c++)
            for (uint32_t e = 0; e < l.sparse; e++) {
                const uint32_t b = (t0 + i) / l.block, t = (t0 + i) % l.block, v = l.tokens > 1 ? c : t, at = l.tokens > 1 ? t : c;
                if (block[index_at(&l, dims, b, e, v)] == at) x[(size_t)i * d + c] += load_half(block + value_at(&l, dims, b, e, v));
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
    define(context, "BLOCK", l.block);
    define(context, "RANK", codec->rank);
    define(context, "OUTLIERS", codec->outliers);
    define(context, "PARAM_MANTISSA", param_types[codec->scale].mantissa);
    define(context, "PARAM_BIAS", param_types[codec->scale].bias);
    define(context, "PARAM_MAX", param_types[codec->scale].max);
    define(context, "SEARCH", codec->search);
    const float step = clip_step(codec);
    uint32_t bits;
    memcpy(&bits, &step, sizeof bits);
    define(context, "CLIP_STEP", bits);
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
#define CODEC(head_, flags_, encode_, decode_, answers_)                                                                                           \
    {                                                                                                                              \
        .head = head_, .roles = KVL_ROLE_K | KVL_ROLE_V, .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,                              \
        .flags = (flags_) | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_ACCUMULATE, .shape = int_shape, .bytes = int_bytes,               \
        .ref_encode = encode_, .ref_decode = decode_, .defines = int_defines, .known_answers = answers_,                     \
        .n_known_answers = COUNT(answers_),                                                                                        \
    }

#define INT_CODEC(bits_)                                                                                                           \
    static int int##bits_##_init(void *priv, const struct kvl_host *host) { return int_init(priv, host, bits_); }                  \
    const struct kvl_codec kvl_codec_int##bits_ = CODEC(                                                                           \
        HEAD("int" #bits_, #bits_ "-bit integers, a scale and a zero point for each token and group of channels",                  \
             "round to nearest, per token and head; quantizer as in arXiv:2402.02750", int_options,                                \
             kvl_text_compress_codec_int_card_md, int##bits_##_init),                                                              \
        KVL_CODEC_MOVABLE | KVL_CODEC_HAS_COLUMNS, int_encode, int_decode, int##bits_##_answers)

INT_CODEC(8);
INT_CODEC(4);
INT_CODEC(3);
INT_CODEC(2);

const struct kvl_codec kvl_codec_kivi =
    CODEC(HEAD("kivi", "few-bit integers, keys scaled by channel over groups of tokens, values by token, newest tokens exact",
               "Liu et al., KIVI, ICML 2024, arXiv:2402.02750", kivi_options, kvl_text_compress_codec_int_kivi_md, kivi_init),
          KVL_CODEC_HAS_COLUMNS, int_encode, int_decode, kivi_answers);

const struct kvl_codec kvl_codec_gear =
    CODEC(HEAD("gear", "few-bit integers by channel (keys) or token, a low-rank part of the error and sparse outliers, blocks of tokens",
               "Kang et al., GEAR, arXiv:2403.05527", gear_options, kvl_text_compress_codec_int_gear_md, gear_init),
          0, gear_encode, gear_decode, gear_answers);
