/* KVQuant: non-uniform codes whose levels come from calibration, keys scaled per channel by calibrated ranges, values per token, and the most
 * extreme elements of every token stored apart in binary16. Equations and layout: card.md. All float operations are single IEEE ones or fma, so
 * every device gives the same bytes. */
#include "answers.h"
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"
#include <stdio.h>

extern const char kvl_text_compress_codec_kvquant_kvquant_cl[], kvl_text_compress_codec_kvquant_card_md[];

enum { NORM_NONE, NORM_Q };
enum { MAX_BITS = 4, MAX_LEVELS = 1 << MAX_BITS, MAX_CHANNELS = 256 }; /* an outlier's channel is a byte */

struct kvquant {
    int32_t bits, norm; /* options */
    double outliers;
    const struct kvl_host *host;
};

static const struct kvl_option kvquant_options[] = {
    {"bits", "of a code", KVL_OPTION_INT, offsetof(struct kvquant, bits), 3, 2, MAX_BITS, NULL},
    {"outliers", "percent of a token's elements stored in binary16, rounded up to whole ones", KVL_OPTION_FLOAT, offsetof(struct kvquant, outliers), 1,
     0, 10, NULL},
    {"norm", "levels that codes are read as: none: the fitted ones; qnorm: moved, so that mean and deviation are those of the elements",
     KVL_OPTION_CHOICE, offsetof(struct kvquant, norm), NORM_NONE, 0, 0, "none|qnorm"},
};

static int kvquant_init(void *priv, const struct kvl_host *host)
{
    ((struct kvquant *)priv)->host = host;
    return 0;
}

/* ---- shape ---- */

struct layout {
    uint32_t d, p, bits, levels;
    uint32_t read_at;                  /* where in a table of levels those begin that codes are read as */
    uint32_t word_bytes, codes, words; /* bytes and codes of a word, words of a token */
    uint32_t slots;                    /* outliers of a token */
    int is_key;
    uint64_t param_at, value_at, index_at, bytes; /* parts of a block */
};

static struct layout layout_of(const struct kvquant *codec, const struct kvl_codec_dims *dims)
{
    struct layout l = {.d = dims->head_dim, .p = dims->page_tokens, .bits = (uint32_t)codec->bits, .is_key = dims->role == KVL_ROLE_K};
    l.levels = 1u << l.bits;
    l.read_at = codec->norm == NORM_Q ? l.levels : 0;
    l.word_bytes = l.bits == 3 ? 3 : 1;
    l.codes = 8 * l.word_bytes / l.bits;
    l.words = l.d / l.codes;
    l.slots = (uint32_t)ceil(l.d * codec->outliers / 100.0);
    l.param_at = (uint64_t)l.p * l.words * l.word_bytes;
    l.value_at = l.param_at + (l.is_key ? 0 : 4ull * l.p);
    l.index_at = l.value_at + 2ull * l.slots * l.p;
    l.bytes = l.index_at + (uint64_t)l.slots * l.p;
    return l;
}

static int kvquant_shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    const struct kvquant *codec = priv;
    const struct layout l = layout_of(codec, dims);
    char text[96];
    if (l.d % 8 != 0 || l.d > MAX_CHANNELS) {
        snprintf(text, sizeof text, "head_dim %u: must be a multiple of 8, at most %d", l.d, MAX_CHANNELS);
        codec->host->error(text);
        return 1;
    }
    out->group = out->unit = out->page_multiple = 1;
    out->alignment = 16;
    out->block_bytes = l.bytes;
    out->table_floats = l.read_at + l.levels + (l.is_key ? 2 * l.d : 0);
    return 0;
}

static int kvquant_bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    const struct layout l = layout_of(priv, dims);
    out->payload = n * (l.words * l.word_bytes + 2u * l.slots);
    out->scale = l.is_key ? 0 : 4 * n;
    out->index = n * l.slots;
    return 0;
}

/* ---- the most extreme elements ---- */

/* An element in the total order by value, then channel. */
struct element {
    float value;
    uint32_t channel;
};

static int is_below(struct element a, struct element b) { return a.value < b.value || (a.value == b.value && a.channel < b.channel); }

/* The lowest element above `floor`, or with direction -1 the highest below it. x has such elements. */
static struct element next_after(const float *x, uint32_t d, struct element floor, int direction)
{
    struct element best = {0, d};
    for (uint32_t c = 0; c < d; c++) {
        const struct element e = {x[c], c};
        const int beyond = direction > 0 ? is_below(floor, e) : is_below(e, floor);
        if (beyond && (best.channel == d || (direction > 0 ? is_below(e, best) : is_below(best, e)))) best = e;
    }
    return best;
}

/* Values: `slots` times the end goes whose going leaves the smaller range; the upper one if both do. Returns the ends that stay. */
static void trim_ends(const float *x, uint32_t d, uint32_t slots, uint32_t *channel, struct element end[2])
{
    struct element low = next_after(x, d, (struct element){-INFINITY, 0}, 1), high = next_after(x, d, (struct element){INFINITY, d}, -1);
    for (uint32_t s = 0; s < slots; s++) {
        const struct element above = next_after(x, d, low, 1), below = next_after(x, d, high, -1);
        if (high.value - above.value < below.value - low.value) {
            channel[s] = low.channel;
            low = above;
        } else {
            channel[s] = high.channel;
            high = below;
        }
    }
    end[0] = low;
    end[1] = high;
}

/* Keys: the `slots` elements farthest outside their channel's range (or nearest to its ends), the lower channel first of two. */
static void farthest_outside(const float *excess, uint32_t d, uint32_t slots, uint32_t *channel)
{
    float last = INFINITY;
    uint32_t last_channel = 0;
    for (uint32_t s = 0; s < slots; s++) {
        uint32_t best = d;
        for (uint32_t c = 0; c < d; c++) {
            const int is_next = excess[c] < last || (excess[c] == last && c > last_channel);
            if (is_next && (best == d || excess[c] > excess[best])) best = c;
        }
        channel[s] = best;
        last = excess[best];
        last_channel = best;
    }
}

/* ---- codes ---- */

/* Tables: K center [D], reach [D], levels; V levels. With qnorm the levels that codes are read as follow. */
static const float *levels_of(const struct layout *l, const float *table) { return table + (l->is_key ? 2 * l->d : 0); }

/* The level nearest to (x - center) / reach; of two, the lower: the midpoints that reach * midpoint + center leaves below x are counted. */
static uint32_t code_of(const struct layout *l, const float *level, float x, float center, float reach)
{
    uint32_t code = 0;
    for (uint32_t i = 1; i < l->levels; i++) code += x > fmaf(reach, 0.5f * (level[i - 1] + level[i]), center);
    return code;
}

/* Byte k of word w of token t; codes of one word are those of channels `words` apart, the first in the lowest bits. */
static uint64_t code_at(const struct layout *l, uint32_t t, uint32_t w, uint32_t k)
{
    const uint64_t row = (uint64_t)k * l->words + w;
    return l->is_key ? row * l->p + t : (uint64_t)t * l->words * l->word_bytes + row;
}

static float half_at(const uint8_t *at)
{
    uint16_t bits;
    memcpy(&bits, at, 2);
    return kvl_plugin_from_half(bits);
}

static void put_half(uint8_t *at, float x)
{
    const uint16_t bits = kvl_plugin_to_half(x);
    memcpy(at, &bits, 2);
}

static void encode_token(const struct layout *l, const float *table, uint32_t t, const float *row, uint8_t *block)
{
    float x[MAX_CHANNELS], excess[MAX_CHANNELS];
    uint32_t outlier[MAX_CHANNELS];
    const float *level = levels_of(l, table);
    uint8_t *center_at = block + l->param_at + 2 * t, *reach_at = center_at + 2 * l->p;
    for (uint32_t c = 0; c < l->d; c++) x[c] = kvl_plugin_clamp_half(row[c]);
    if (l->is_key) {
        for (uint32_t c = 0; c < l->d; c++) excess[c] = fabsf(x[c] - table[c]) - table[l->d + c];
        farthest_outside(excess, l->d, l->slots, outlier);
    } else {
        struct element end[2];
        trim_ends(x, l->d, l->slots, outlier, end);
        put_half(center_at, 0.5f * (end[1].value + end[0].value) + 0.0f); /* + 0: never -0 */
        put_half(reach_at, 0.5f * (end[1].value - end[0].value));
    }
    for (uint32_t w = 0; w < l->words; w++) {
        uint32_t word = 0;
        for (uint32_t j = 0; j < l->codes; j++) {
            const uint32_t c = j * l->words + w;
            const float center = l->is_key ? table[c] : half_at(center_at), reach = l->is_key ? table[l->d + c] : half_at(reach_at);
            word |= code_of(l, level, x[c], center, reach) << (j * l->bits);
        }
        for (uint32_t k = 0; k < l->word_bytes; k++) block[code_at(l, t, w, k)] = (uint8_t)(word >> 8 * k);
    }
    for (uint32_t s = 0; s < l->slots; s++) {
        put_half(block + l->value_at + 2 * ((uint64_t)s * l->p + t), x[outlier[s]]);
        block[l->index_at + (uint64_t)s * l->p + t] = (uint8_t)outlier[s];
    }
}

static void decode_token(const struct layout *l, const float *table, uint32_t t, const uint8_t *block, float *x)
{
    const float *level = levels_of(l, table) + l->read_at;
    const uint8_t *center_at = block + l->param_at + 2 * t, *reach_at = center_at + 2 * l->p;
    for (uint32_t w = 0; w < l->words; w++) {
        uint32_t word = 0;
        for (uint32_t k = 0; k < l->word_bytes; k++) word |= (uint32_t)block[code_at(l, t, w, k)] << 8 * k;
        for (uint32_t j = 0; j < l->codes; j++) {
            const uint32_t c = j * l->words + w, code = word >> (j * l->bits) & (l->levels - 1);
            x[c] = fmaf(level[code], l->is_key ? table[l->d + c] : half_at(reach_at), l->is_key ? table[c] : half_at(center_at));
        }
    }
    for (uint32_t s = 0; s < l->slots; s++)
        x[block[l->index_at + (uint64_t)s * l->p + t] % l->d] = half_at(block + l->value_at + 2 * ((uint64_t)s * l->p + t));
}

static int kvquant_encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                          uint8_t *block)
{
    const struct layout l = layout_of(priv, dims);
    if (table == NULL) return 1;
    for (uint32_t i = 0; i < n; i++) encode_token(&l, table, t0 + i, x + (size_t)i * l.d, block);
    return 0;
}

static int kvquant_decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const uint8_t *block,
                          float *x)
{
    const struct layout l = layout_of(priv, dims);
    if (table == NULL) return 1;
    for (uint32_t i = 0; i < n; i++) decode_token(&l, table, t0 + i, block, x + (size_t)i * l.d);
    return 0;
}

static void kvquant_defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct layout l = layout_of(priv, dims);
    define(context, "BITS", l.bits);
    define(context, "SLOTS", l.slots);
    define(context, "READ_AT", l.read_at);
}

/* ---- calibration ---- */

enum { BINS = 4096, ROUNDS = 200 };

/* Normalized elements in [-1, 1], counted in equal bins. */
struct histogram {
    double count[BINS], total;
};

static double bin_center(uint32_t bin) { return (2.0 * bin + 1.0) / BINS - 1.0; }

static void count_element(struct histogram *h, float x, float center, float reach)
{
    const double u = reach > 0.0f ? ((double)x - center) / reach : 0.0;
    if (u < -1.0 || u > 1.0) return; /* an outlier */
    const int bin = (int)((u + 1.0) * (BINS / 2));
    h->count[bin < BINS ? bin : BINS - 1] += 1.0;
    h->total += 1.0;
}

/* One step of Lloyd's algorithm: each level moves to the mean of what is nearest to it. Returns whether one moved. */
static int move_levels(const struct histogram *h, uint32_t n, double *level)
{
    double sum[MAX_LEVELS] = {0}, count[MAX_LEVELS] = {0};
    int moved = 0;
    for (uint32_t bin = 0, i = 0; bin < BINS; bin++) {
        while (i + 1 < n && bin_center(bin) > 0.5 * (level[i] + level[i + 1])) i++;
        sum[i] += h->count[bin] * bin_center(bin);
        count[i] += h->count[bin];
    }
    for (uint32_t i = 0; i < n; i++) {
        if (count[i] == 0.0) continue;
        moved |= fabs(sum[i] / count[i] - level[i]) > 1e-9;
        level[i] = sum[i] / count[i];
    }
    return moved;
}

/* k-means on the counted elements, from levels at equal shares of them. */
static void fit_levels(const struct histogram *h, uint32_t n, float *out)
{
    double level[MAX_LEVELS], passed = 0.0;
    uint32_t i = 0;
    for (uint32_t bin = 0; bin < BINS; bin++) {
        passed += h->count[bin];
        for (; i < n && passed > h->total * (i + 0.5) / n; i++) level[i] = bin_center(bin);
    }
    for (; i < n; i++) level[i] = 1.0;
    for (int round = 0; round < ROUNDS && move_levels(h, n, level); round++)
        ;
    for (i = 0; i < n; i++) out[i] = (float)level[i];
}

/* Q-Norm: the levels, moved so that the elements read as them have the mean and the deviation they had. */
static void normalize_levels(const struct histogram *h, uint32_t n, const float *level, float *out)
{
    double mean = 0.0, square = 0.0, read_mean = 0.0, read_square = 0.0;
    for (uint32_t bin = 0, i = 0; bin < BINS; bin++) {
        while (i + 1 < n && bin_center(bin) > 0.5 * ((double)level[i] + level[i + 1])) i++;
        const double share = h->total > 0.0 ? h->count[bin] / h->total : 0.0, u = bin_center(bin), read = level[i];
        mean += share * u;
        square += share * u * u;
        read_mean += share * read;
        read_square += share * read * read;
    }
    const double variance = square - mean * mean, read_variance = read_square - read_mean * read_mean;
    const double stretch = read_variance > 1e-12 && variance > 0.0 ? sqrt(variance / read_variance) : 1.0;
    for (uint32_t i = 0; i < n; i++) out[i] = (float)((level[i] - read_mean) * stretch + mean);
}

/* Floats in the order of unsigned integers. */
static uint32_t to_ordered(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static float from_ordered(uint32_t bits)
{
    float x;
    bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The element of channel c that `rank` others are below: by halving the range of its bits. */
static float order_statistic(const float *x, uint64_t n, uint32_t d, uint32_t c, uint64_t rank)
{
    uint32_t low = to_ordered(-KVL_PLUGIN_HALF_MAX), high = to_ordered(KVL_PLUGIN_HALF_MAX);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        uint64_t below = 0;
        for (uint64_t i = 0; i < n; i++) below += to_ordered(kvl_plugin_clamp_half(x[i * d + c])) <= middle;
        if (below > rank) high = middle;
        else low = middle + 1;
    }
    return from_ordered(low);
}

/* Every channel's range without the outliers at both ends. */
static void calibrate_ranges(const struct kvquant *codec, const struct layout *l, uint64_t n, const float *x, float *center, float *reach)
{
    const uint64_t cut = (uint64_t)((double)n * codec->outliers / 200.0);
    for (uint32_t c = 0; c < l->d; c++) {
        const float low = order_statistic(x, n, l->d, c, cut), high = order_statistic(x, n, l->d, c, n - 1 - cut);
        center[c] = 0.5f * (high + low);
        reach[c] = 0.5f * (high - low);
    }
}

static void count_value(const struct layout *l, const float *row, struct histogram *h)
{
    float x[MAX_CHANNELS];
    uint32_t outlier[MAX_CHANNELS];
    struct element end[2];
    for (uint32_t c = 0; c < l->d; c++) x[c] = kvl_plugin_clamp_half(row[c]);
    trim_ends(x, l->d, l->slots, outlier, end);
    for (uint32_t c = 0; c < l->d; c++) count_element(h, x[c], 0.5f * (end[1].value + end[0].value), 0.5f * (end[1].value - end[0].value));
}

static int kvquant_calibrate(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, const float *x, const struct kvl_calibration *out)
{
    const struct layout l = layout_of(priv, dims);
    struct histogram h = {.total = 0.0};
    float center[MAX_CHANNELS], reach[MAX_CHANNELS], level[MAX_LEVELS], read[MAX_LEVELS];
    if (n == 0) return 1;
    if (l.is_key) calibrate_ranges(priv, &l, n, x, center, reach);
    for (uint64_t i = 0; i < n; i++) {
        if (!l.is_key) count_value(&l, x + i * l.d, &h);
        for (uint32_t c = 0; l.is_key && c < l.d; c++) count_element(&h, kvl_plugin_clamp_half(x[i * l.d + c]), center[c], reach[c]);
    }
    fit_levels(&h, l.levels, level);
    normalize_levels(&h, l.levels, level, read);
    return (l.is_key && (out->put(out->context, "center", l.d, center) || out->put(out->context, "reach", l.d, reach))) ||
           out->put(out->context, "levels", l.levels, level) || (l.read_at != 0 && out->put(out->context, "read_levels", l.levels, read));
}

const struct kvl_codec kvl_codec_kvquant = {
    .head = {.magic = KVL_PLUGIN_MAGIC,
             .abi_major = KVL_ABI_MAJOR,
             .abi_minor = KVL_ABI_MINOR,
             .struct_size = sizeof(struct kvl_codec),
             .kind = KVL_KIND_CODEC,
             .name = "kvquant",
             .summary = "non-uniform codes of calibrated levels, keys per channel, values per token, outliers in binary16",
             .citation = "arXiv:2401.18079",
             .byte_version = 1,
             .n_options = sizeof kvquant_options / sizeof *kvquant_options,
             .options = kvquant_options,
             .private_size = sizeof(struct kvquant),
             .device_source = kvl_text_compress_codec_kvquant_kvquant_cl,
             .card = kvl_text_compress_codec_kvquant_card_md,
             .init = kvquant_init},
    .roles = KVL_ROLE_K | KVL_ROLE_V,
    .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,
    .flags = KVL_CODEC_MOVABLE | KVL_CODEC_NEEDS_TABLE | KVL_CODEC_HAS_COLUMNS | KVL_CODEC_HAS_ACCUMULATE,
    .shape = kvquant_shape,
    .bytes = kvquant_bytes,
    .ref_encode = kvquant_encode,
    .ref_decode = kvquant_decode,
    .defines = kvquant_defines,
    .known_answers = kvquant_answers,
    .n_known_answers = sizeof kvquant_answers / sizeof *kvquant_answers,
    .calibrate = kvquant_calibrate,
    .known_tables = kvquant_tables,
};
