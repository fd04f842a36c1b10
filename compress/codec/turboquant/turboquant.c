/* turboquant: rows that were rotated at random are stored as a norm and Lloyd-Max codes; keys may keep a one-bit sketch of what is left.
 * Layout and arithmetic: card.md. All float operations are single IEEE ones or fma, so every device gives the same bytes. */
#include "answers.h"
#include "codebooks.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdio.h>

extern const char kvl_text_compress_codec_turboquant_turboquant_cl[], kvl_text_compress_codec_turboquant_card_md[];

enum { SKETCH_NONE, SKETCH_SIGN, MOST_DIMS = 256 };

struct turboquant {
    int32_t bits, sketch, seed; /* options */
    const struct kvl_host *host;
};

static const struct kvl_option options[] = {
    {"bits", "bits a channel, the sketch's included", KVL_OPTION_INT, offsetof(struct turboquant, bits), 3, 1, 5, NULL},
    {"sketch", "sign: one of the bits is the sign of a rotated residual, for unbiased scores (keys)", KVL_OPTION_CHOICE,
     offsetof(struct turboquant, sketch), SKETCH_NONE, 0, 0, "none|sign"},
    {"seed", "of the sketch's rotation", KVL_OPTION_INT, offsetof(struct turboquant, seed), 1, 0, 0, NULL},
};

static int turboquant_init(void *priv, const struct kvl_host *host)
{
    struct turboquant *codec = priv;
    codec->host = host;
    const int code_bits = codec->bits - (codec->sketch == SKETCH_SIGN);
    if (code_bits >= 1 && code_bits <= 4) return 0;
    host->error("bits must be 1 to 4, with sketch 2 to 5");
    return 1;
}

/* ---- shape ---- */

struct layout {
    uint32_t bits;        /* of a code */
    uint32_t codes;       /* of a word */
    uint32_t word_bytes;
    uint32_t words;       /* of a token; the channels of one word are `words` apart */
    uint32_t sign_bytes;  /* of a token, behind its words */
    uint32_t token_bytes;
    uint32_t n_params;    /* binary16 numbers of a token: scale, scale of the sketch */
};

static struct layout layout_of(const struct turboquant *codec, const struct kvl_codec_dims *dims)
{
    const uint32_t sketch = codec->sketch == SKETCH_SIGN, bits = (uint32_t)codec->bits - sketch;
    struct layout l = {.bits = bits, .word_bytes = 8 % bits == 0 ? 1 : bits, .n_params = 1 + sketch};
    l.codes = 8 * l.word_bytes / bits;
    l.words = dims->head_dim / l.codes;
    l.sign_bytes = sketch ? dims->head_dim / 8 : 0;
    l.token_bytes = l.words * l.word_bytes + l.sign_bytes;
    return l;
}

static const char *what_is_wrong(const struct turboquant *codec, const struct kvl_codec_dims *dims)
{
    const uint32_t d = dims->head_dim;
    if (d % 8 != 0 || d > MOST_DIMS) return "head_dim must be a multiple of 8 up to 256";
    if (codec->sketch == SKETCH_NONE) return NULL;
    if (dims->role != KVL_ROLE_K) return "sketch serves the scores of keys: give values a turboquant without it";
    return d & (d - 1) ? "sketch needs a head_dim that is a power of two: leave it out" : NULL;
}

static int turboquant_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    const struct turboquant *codec = priv;
    const struct layout l = layout_of(codec, dims);
    const char *wrong = what_is_wrong(codec, dims);
    out->group = out->unit = out->page_multiple = 1;
    out->alignment = 16;
    out->block_bytes = (uint64_t)dims->page_tokens * (l.token_bytes + 2 * l.n_params);
    out->aux_floats = l.sign_bytes != 0 ? 4 * dims->head_dim : 0; /* 16 sums of every four channels */
    if (wrong != NULL) codec->host->error(wrong);
    return wrong != NULL;
}

static int turboquant_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    const struct layout l = layout_of(priv, dims);
    out->payload = n * l.token_bytes;
    out->scale = n * 2 * l.n_params;
    return 0;
}

/* ---- arithmetic ---- */

static float input(float x) { return fabsf(x) < 0x1p-100f ? 0.0f : kvl_plugin_clamp_half(x); }

/* The binary16 nearest to sqrt(sum / m): between two of them the exact square of their middle decides. */
static uint16_t half_root(float sum, float m)
{
    uint16_t h = kvl_plugin_to_half(sqrtf(sum / m));
    const float here = kvl_plugin_from_half(h), below = 0.5f * (here + kvl_plugin_from_half(h ? h - 1 : 0)),
                above = 0.5f * (here + kvl_plugin_from_half(h + 1));
    if (sum < below * below * m) return h - 1;
    return sum >= above * above * m ? h + 1 : h;
}

static float sum_of_squares(const float *x, uint32_t n)
{
    float sum = 0.0f;
    for (uint32_t c = 0; c < n; c++) sum = fmaf(x[c], x[c], sum);
    return sum;
}

static const struct codebook *codebook_of(const struct layout *l, const struct kvl_codec_dims *dims)
{
    return &codebooks[dims->head_dim / 8 - 1][l->bits - 1];
}

static int level_of(const struct codebook *book, uint32_t bits, uint32_t code)
{
    const uint32_t half = 1u << (bits - 1);
    return code < half ? -book->level[half - 1 - code] : book->level[code - half];
}

/* The nearest level: middles between levels times the scale are exact. */
static uint32_t code_of(const struct codebook *book, uint32_t bits, float x, float scale)
{
    uint32_t code = 0;
    for (uint32_t k = 1; scale != 0.0f && k < 1u << bits; k++)
        code += 2.0f * x > (float)(level_of(book, bits, k - 1) + level_of(book, bits, k)) * scale;
    return code;
}

/* ---- the sketch's rotation: signs, Hadamard, signs, Hadamard; head_dim times an orthogonal matrix ---- */

static float sign_of(uint32_t seed, uint32_t round, uint32_t c)
{
    uint32_t h = (seed * 2 + round) * 0x9e3779b9u + c * 0x85ebca6bu;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h >> 31 ? -1.0f : 1.0f;
}

static void flip(float *x, uint32_t n, uint32_t seed, uint32_t round)
{
    for (uint32_t c = 0; c < n; c++) x[c] *= sign_of(seed, round, c);
}

static void hadamard(float *x, uint32_t n)
{
    for (uint32_t near = 1; near < n; near *= 2)
        for (uint32_t i = 0; i < n; i++)
            if ((i & near) == 0) {
                const float a = x[i], b = x[i + near];
                x[i] = a + b;
                x[i + near] = a - b;
            }
}

static void spin(float *x, uint32_t n, uint32_t seed)
{
    for (uint32_t round = 0; round < 2; round++) {
        flip(x, n, seed, round);
        hadamard(x, n);
    }
}

static void spin_back(float *x, uint32_t n, uint32_t seed)
{
    for (uint32_t round = 2; round-- > 0;) {
        hadamard(x, n);
        flip(x, n, seed, round);
    }
}

/* The sketch's scale is |r| / sqrt(this): 1 / (n^2 E|u|), u a coordinate of a random direction, makes scores unbiased. */
static float residual_m(uint32_t n)
{
    const double mean = exp(lgamma(0.5 * n) - lgamma(0.5 * n + 0.5)) / sqrt(acos(-1.0)), root = (double)n * n * mean;
    return (float)rint(root * root);
}

/* ---- bytes of a block ---- */

static uint64_t row_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t row)
{
    return dims->role == KVL_ROLE_K ? (uint64_t)row * dims->page_tokens + t : (uint64_t)t * l->token_bytes + row;
}

static uint64_t param_at(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t p)
{
    return (uint64_t)dims->page_tokens * l->token_bytes + 2 * ((uint64_t)p * dims->page_tokens + t);
}

static float read_param(const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, uint32_t p, const uint8_t *block)
{
    uint16_t half;
    memcpy(&half, block + param_at(l, dims, t, p), 2);
    return kvl_plugin_from_half(half);
}

/* Signs of the spun residual, and its scale. */
static void encode_sketch(const struct turboquant *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t, float *residual,
                          uint8_t *block)
{
    const uint32_t d = dims->head_dim;
    const uint16_t scale = half_root(sum_of_squares(residual, d), residual_m(d));
    memcpy(block + param_at(l, dims, t, 1), &scale, 2);
    spin(residual, d, (uint32_t)codec->seed);
    for (uint32_t w = 0; w < l->sign_bytes; w++) {
        uint32_t byte = 0;
        for (uint32_t j = 0; j < 8; j++) byte |= (uint32_t)(residual[j * l->sign_bytes + w] >= 0.0f) << j;
        block[row_at(l, dims, t, l->words * l->word_bytes + w)] = (uint8_t)byte;
    }
}

static int turboquant_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                             uint8_t *block)
{
    const struct layout l = layout_of(priv, dims);
    const struct codebook *book = codebook_of(&l, dims);
    float row[MOST_DIMS];
    for (uint32_t t = t0; t < t0 + n; t++, x += dims->head_dim) {
        for (uint32_t c = 0; c < dims->head_dim; c++) row[c] = input(x[c]);
        const uint16_t half = half_root(sum_of_squares(row, dims->head_dim), (float)book->m);
        const float scale = kvl_plugin_from_half(half);
        memcpy(block + param_at(&l, dims, t, 0), &half, 2);
        for (uint32_t w = 0; w < l.words; w++) {
            uint32_t word = 0;
            for (uint32_t j = 0; j < l.codes; j++) {
                float *value = &row[j * l.words + w];
                const uint32_t code = code_of(book, l.bits, *value, scale);
                *value -= (float)level_of(book, l.bits, code) * scale;
                word |= code << j * l.bits;
            }
            for (uint32_t k = 0; k < l.word_bytes; k++) block[row_at(&l, dims, t, k * l.words + w)] = (uint8_t)(word >> 8 * k);
        }
        if (l.sign_bytes != 0) encode_sketch(priv, &l, dims, t, row, block);
    }
    return 0;
}

static void decode_sketch(const struct turboquant *codec, const struct layout *l, const struct kvl_codec_dims *dims, uint32_t t,
                          const uint8_t *block, float *x)
{
    const uint32_t d = dims->head_dim;
    const float scale = read_param(l, dims, t, 1, block);
    float sign[MOST_DIMS];
    for (uint32_t c = 0; c < d; c++)
        sign[c] = block[row_at(l, dims, t, l->words * l->word_bytes + c % l->sign_bytes)] >> c / l->sign_bytes & 1 ? 1.0f : -1.0f;
    spin_back(sign, d, (uint32_t)codec->seed);
    for (uint32_t c = 0; c < d; c++) x[c] = fmaf(sign[c], scale, x[c]);
}

static int turboquant_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                             const uint8_t *block, float *x)
{
    const struct layout l = layout_of(priv, dims);
    const struct codebook *book = codebook_of(&l, dims);
    for (uint32_t t = t0; t < t0 + n; t++, x += dims->head_dim) {
        const float scale = read_param(&l, dims, t, 0, block);
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            uint32_t word = 0;
            for (uint32_t k = 0; k < l.word_bytes; k++) word |= (uint32_t)block[row_at(&l, dims, t, k * l.words + c % l.words)] << 8 * k;
            x[c] = (float)level_of(book, l.bits, word >> c / l.words * l.bits & ((1u << l.bits) - 1)) * scale;
        }
        if (l.sign_bytes != 0) decode_sketch(priv, &l, dims, t, block, x);
    }
    return 0;
}

static void turboquant_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct turboquant *codec = priv;
    const struct layout l = layout_of(codec, dims);
    const struct codebook *book = codebook_of(&l, dims);
    define(context, "BITS", l.bits);
    define(context, "M", book->m);
    for (uint32_t i = 0; i < 8; i++) {
        const char name[] = {'L', 'E', 'V', 'E', 'L', (char)('0' + i), '\0'};
        define(context, name, book->level[i]);
    }
    define(context, "SKETCH", codec->sketch);
    define(context, "SEED", (uint32_t)codec->seed);
    define(context, "RESIDUAL_M", (int64_t)residual_m(dims->head_dim));
}

const struct kvl_codec kvl_codec_turboquant = {
    .head = {.magic = KVL_PLUGIN_MAGIC,
             .abi_major = KVL_ABI_MAJOR,
             .abi_minor = KVL_ABI_MINOR,
             .struct_size = sizeof(struct kvl_codec),
             .kind = KVL_KIND_CODEC,
             .name = "turboquant",
             .summary = "a norm and Lloyd-Max codes of a row rotated at random (with rot=random), keys with a sketch of the rest",
             .citation = "Zandieh et al., TurboQuant, arXiv:2504.19874; sketch: QJL, arXiv:2406.03482",
             .byte_version = 1,
             .n_options = sizeof options / sizeof *options,
             .options = options,
             .private_size = sizeof(struct turboquant),
             .device_source = kvl_text_compress_codec_turboquant_turboquant_cl,
             .card = kvl_text_compress_codec_turboquant_card_md,
             .init = turboquant_init},
    .roles = KVL_ROLE_K | KVL_ROLE_V,
    .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,
    .flags = KVL_CODEC_MOVABLE | KVL_CODEC_HAS_SCORES | KVL_CODEC_HAS_ACCUMULATE,
    .shape = turboquant_shape,
    .bytes = turboquant_bytes,
    .ref_encode = turboquant_encode,
    .ref_decode = turboquant_decode,
    .defines = turboquant_defines,
    .known_answers = turboquant_answers,
    .n_known_answers = sizeof turboquant_answers / sizeof *turboquant_answers,
};
