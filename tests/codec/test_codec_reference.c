/* The C specification of the built-in codecs: known answers, byte layout, error bounds, special values, exact bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "codec/ggml_blocks.h"
#include "half.h"
#include "kvl_plugin_half.h"
#include "mem.h"
#include "registry.h"
#include "rng.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const uint32_t roles[] = {KVL_ROLE_K, KVL_ROLE_V};

/* A codec with options, and one block of it between canaries. */
struct bench {
    struct kvl_instance instance;
    const struct kvl_codec *codec;
    struct kvl_codec_dims dims;
    struct kvl_codec_shape shape;
    uint8_t *memory, *block;
    const float *table; /* calibration; NULL for codecs without */
};

enum { CANARY = 64, CANARY_BYTE = 0xa5 };

static struct bench bench_new(const char *name, const char *options, uint32_t role, uint32_t head_dim, uint32_t page_tokens)
{
    struct bench b = {.dims = {sizeof b.dims, role, head_dim, page_tokens}};
    kvl_error_clear();
    if (kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, name), options, &b.instance) != KVL_OK) fail_msg("%s", kvl_error_text());
    if (kvl_codec_shape(&b.instance, role, head_dim, page_tokens, &b.shape) != KVL_OK) fail_msg("%s", kvl_error_text());
    b.codec = (const struct kvl_codec *)b.instance.plugin;
    assert_int_equal(kvl_alloc(&b.memory, b.shape.block_bytes + 2 * CANARY, 1), KVL_OK);
    memset(b.memory, CANARY_BYTE, b.shape.block_bytes + 2 * CANARY);
    b.block = b.memory + CANARY;
    return b;
}

static void bench_free(struct bench *b)
{
    for (size_t i = 0; i < CANARY; i++) {
        assert_int_equal(b->memory[i], CANARY_BYTE);
        assert_int_equal(b->block[b->shape.block_bytes + i], CANARY_BYTE);
    }
    kvl_free(&b->memory);
    kvl_instance_free(&b->instance);
}

static void encode(struct bench *b, uint32_t t0, uint32_t n, const float *x)
{
    assert_int_equal(b->codec->ref_encode(b->instance.priv, &b->dims, b->table, t0, n, x, b->block), 0);
}

static void decode(struct bench *b, uint32_t t0, uint32_t n, float *x)
{
    assert_int_equal(b->codec->ref_decode(b->instance.priv, &b->dims, b->table, t0, n, b->block, x), 0);
}

static void fill_normal(float *x, size_t n, uint64_t seed, float scale)
{
    for (size_t i = 0; i < n; i++) x[i] = scale * (float)kvl_rng_normal(seed, i);
}

struct variant {
    const char *name, *options;
    int bits; /* 0: float */
    bool sym;
    uint32_t group;
};
static const struct variant variants[] = {
    {"f32", ""},
    {"f16", ""},
    {"int8", "", 8, false, 0},
    {"int8", "group=16", 8, false, 16},
    {"int8", "group=1", 8, false, 1},
    {"int8", "sym", 8, true, 0},
    {"int8", "sym,group=32", 8, true, 32},
    {"int4", "", 4, false, 0},
    {"int4", "group=16", 4, false, 16},
    {"int4", "group=2", 4, false, 2},
    {"int4", "sym", 4, true, 0},
    {"int4", "sym,group=32", 4, true, 32},
    {"int3", "", 3, false, 0},
    {"int3", "group=8", 3, false, 8},
    {"int3", "sym,group=32", 3, true, 32},
    {"int2", "", 2, false, 0},
    {"int2", "group=4", 2, false, 4},
    {"int2", "sym,group=32", 2, true, 32},
};
enum { N_VARIANTS = sizeof variants / sizeof *variants };

/* Codecs without a bit-by-bit model here, for what holds of all. */
static const struct variant others[] = {{"q8_0"}, {"q5_1"}, {"q5_0"}, {"q4_1"}, {"q4_0"}, {"iq4_nl"}, {"fp8_e4m3"}, {"fp8_e5m2"}};
/* Codecs of which one coordinate's error has no bound but the row's, and whose groups are single tokens. */
static const struct variant rotated[] = {{"turboquant", ""}, {"turboquant", "bits=4"}, {"turboquant", "bits=1"}};
/* Codecs whose groups span tokens. */
static const struct variant grouped[] = {{"kivi", "residual=0"}, {"kivi", "bits=4,group=16,channel"}, {"kivi", "bits=3,group=64,residual=64"},
                                         {"gear", ""}, {"gear", "bits=4,block=32,rank=1,outliers=3"}};
enum {
    N_OTHERS = sizeof others / sizeof *others,
    N_ROTATED = sizeof rotated / sizeof *rotated,
    N_PER_TOKEN = N_VARIANTS + N_OTHERS,
    N_GROUPED = sizeof grouped / sizeof *grouped,
    N_CODECS = N_PER_TOKEN + N_GROUPED + N_ROTATED
};

static const struct variant *codec_at(size_t i)
{
    return i < N_VARIANTS               ? &variants[i]
           : i < N_PER_TOKEN             ? &others[i - N_VARIANTS]
           : i < N_PER_TOKEN + N_GROUPED ? &grouped[i - N_PER_TOKEN]
                                         : &rotated[i - N_PER_TOKEN - N_GROUPED];
}

static void meets_known_answers(void **state)
{
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)kvl_registry_at(i);
        if (codec->head.kind != KVL_KIND_CODEC) continue;
        assert_true(codec->n_known_answers > 0);
        for (uint32_t k = 0; k < codec->n_known_answers; k++) {
            const struct kvl_known_answer *a = &codec->known_answers[k];
            struct bench b = bench_new(codec->head.name, a->options, a->role, a->head_dim, 64);
            float decoded[512];
            assert_true(a->n * a->head_dim <= 512);
            if (KVL_CODEC_HAS(codec, known_tables)) b.table = codec->known_tables[k];
            const uint32_t t0 = b.shape.group == 1 ? 3 : b.shape.group;
            encode(&b, t0, a->n, a->x);
            decode(&b, t0, a->n, decoded);
            for (uint32_t j = 0; j < a->n * a->head_dim; j++)
                if (!(fabsf(decoded[j] - a->decoded[j]) <= a->tolerance))
                    fail_msg("%s(%s) answer %u, value %u: %a, wanted %a", codec->head.name, a->options, k, j, decoded[j],
                             a->decoded[j]);
            bench_free(&b);
        }
    }
}

/* The card's formulas in double; the codes' rounding by comparing both neighbours. */
static void group_by_formula(const struct variant *v, const float *x, uint32_t n, float *scale, float *zero, uint32_t *codes)
{
    float low = x[0], high = x[0];
    for (uint32_t i = 1; i < n; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    const int steps = v->sym ? (1 << (v->bits - 1)) - 1 : (1 << v->bits) - 1;
    const float range = v->sym ? fmaxf(fabsf(low), fabsf(high)) : high - low;
    *scale = kvl_half_to_float(kvl_float_to_half(range / (float)steps));
    *zero = v->sym ? 0.0f : kvl_half_to_float(kvl_float_to_half(low));
    for (uint32_t i = 0; i < n; i++) {
        const double d = (double)(x[i] - *zero);
        double q = *scale == 0 ? 0 : floor(d / (double)*scale);
        const double below = d - q * (double)*scale, above = (q + 1) * (double)*scale - d; /* exact: few bits each */
        if (*scale != 0 && (above < below || (above == below && fmod(q, 2) != 0))) q += 1;
        q = fmin(fmax(q, v->sym ? -steps : 0), steps);
        codes[i] = (uint32_t)(q + (v->sym ? 1 << (v->bits - 1) : 0));
    }
}

/* Reads codes and parameters where the card's diagram says they are. */
static void check_bytes(const struct bench *b, const struct variant *v, uint32_t t, const float *x)
{
    const uint32_t d = b->dims.head_dim, p = b->dims.page_tokens, group = v->group ? v->group : d, bits = (uint32_t)v->bits;
    const uint32_t word_bytes = bits == 3 ? 3 : 1, rows = d * bits / 8, span = group * bits / 8 / word_bytes,
                   n_params = v->sym ? 1 : 2;
    for (uint32_t g = 0; g < d / group; g++) {
        float scale, zero;
        uint32_t codes[256];
        uint16_t half;
        group_by_formula(v, x + g * group, group, &scale, &zero, codes);
        const uint8_t *params = b->block + (size_t)rows * p + 2 * ((size_t)g * n_params * p + t);
        memcpy(&half, params, 2);
        assert_true(kvl_half_to_float(half) == scale);
        if (!v->sym) {
            memcpy(&half, params + 2 * (size_t)p, 2);
            assert_true(kvl_half_to_float(half) == zero);
        }
        for (uint32_t i = 0; i < group; i++) {
            uint32_t word = 0;
            for (uint32_t j = 0; j < word_bytes; j++) {
                const uint32_t row = (g * word_bytes + j) * span + i % span;
                word |= (uint32_t)b->block[b->dims.role == KVL_ROLE_K ? (size_t)row * p + t : (size_t)t * rows + row] << 8 * j;
            }
            assert_int_equal(word >> (i / span * bits) & ((1u << bits) - 1), codes[i]);
        }
    }
}

static void integers_follow_the_card(void **state)
{
    enum { D = 64, N = 64 };
    static const float magnitude[] = {1e-7f, 1e-3f, 1.0f, 37.0f, 2e4f};
    static float x[N * D];
    for (size_t i = 0; i < N_VARIANTS; i++)
        for (size_t m = 0; variants[i].bits && m < sizeof magnitude / sizeof *magnitude; m++)
            for (size_t r = 0; r < 2; r++) {
                struct bench b = bench_new(variants[i].name, variants[i].options, roles[r], D, 128);
                fill_normal(x, N * D, 100 * i + m, magnitude[m]);
                for (size_t k = 0; k < N * D; k++) x[k] = kvl_plugin_clamp_half(x[k]);
                encode(&b, 37, N, x);
                for (uint32_t t = 0; t < N; t++) check_bytes(&b, &variants[i], 37 + t, x + t * D);
                bench_free(&b);
            }
}

/* Values exactly between two codes go to the even one. */
static void ties_go_to_even(void **state)
{
    enum { D = 16 };
    const float x[D] = {0, 15, 0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f, 8.5f, 9.5f, 10.5f, 11.5f, 12.5f, 14.5f};
    const float wanted[D] = {0, 15, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14};
    struct bench b = bench_new("int4", "", KVL_ROLE_K, D, 64);
    float decoded[D];
    encode(&b, 0, 1, x);
    decode(&b, 0, 1, decoded);
    for (int i = 0; i < D; i++) assert_true(decoded[i] == wanted[i]);
    bench_free(&b);
}

/* Every scale of binary16, every midpoint between two codes and both its neighbours: where the product with a rounded 1/s is on the
 * wrong side, the correction must put it right. */
static void quotients_are_exact(void **state)
{
    enum { D = 256 };
    struct bench b = bench_new("int8", "", KVL_ROLE_V, D, 1);
    float x[D] = {0};
    for (int m = 1024; m < 2048; m++)
        for (int side = -1; side <= 1; side++) {
            const float scale = (float)m * 0x1p-5f;
            for (int k = 1; k < 255; k++) {
                const float middle = ((float)k + 0.5f) * scale;
                x[k] = side == 0 ? middle : nextafterf(middle, side < 0 ? 0.0f : 1e30f);
            }
            x[255] = 255.0f * scale;
            encode(&b, 0, 1, x);
            for (int k = 1; k < 255; k++) assert_int_equal(b.block[k], k + (side > 0 || (side == 0 && k % 2)));
        }
    bench_free(&b);
}

static void floats_follow_the_card(void **state)
{
    enum { D = 32, P = 64, T = 5 };
    static float x[D];
    fill_normal(x, D, 11, 1.0f);
    for (size_t i = 0; i < 2; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench b = bench_new(variants[i].name, "", roles[r], D, P);
            encode(&b, T, 1, x);
            for (size_t c = 0; c < D; c++) {
                const size_t at = roles[r] == KVL_ROLE_K ? c * P + T : T * D + c;
                const uint16_t half = kvl_float_to_half(x[c]);
                if (i == 0)
                    assert_memory_equal(b.block + 4 * at, &x[c], 4);
                else
                    assert_memory_equal(b.block + 2 * at, &half, 2);
            }
            bench_free(&b);
        }
}

static void round_trip_errs_by_half_a_step(void **state)
{
    enum { D = 128, N = 64 };
    static float x[N * D], decoded[N * D];
    for (size_t i = 0; i < N_VARIANTS; i++) {
        const struct variant *v = &variants[i];
        const uint32_t group = v->group ? v->group : D;
        struct bench b = bench_new(v->name, v->options, roles[i % 2], D, 64);
        fill_normal(x, N * D, 7 + i, 3.0f);
        encode(&b, 0, N, x);
        decode(&b, 0, N, decoded);
        for (uint32_t k = 0; k < N * D; k += group) {
            float low = x[k], high = x[k];
            for (uint32_t j = 1; j < group; j++) {
                low = fminf(low, x[k + j]);
                high = fmaxf(high, x[k + j]);
            }
            const int steps = v->sym ? (1 << (v->bits - 1)) - 1 : (1 << v->bits) - 1;
            const float reach = fmaxf(fabsf(low), fabsf(high));
            const float step = v->bits ? (v->sym ? reach : high - low) / (float)steps : 0;
            /* rounding s and z to 11 bits moves the ends by 2^-12 of the range and of the minimum at most */
            const float parameters = v->bits ? reach * 0x1p-10f : 0;
            for (uint32_t j = 0; j < group; j++) {
                const float bound = v->bits ? 0.5005f * step + parameters : strcmp(v->name, "f16") ? 0 : fabsf(x[k + j]) * 0x1p-11f;
                if (fabsf(decoded[k + j] - x[k + j]) > bound)
                    fail_msg("%s(%s): %g became %g, bound %g", v->name, v->options, (double)x[k + j], (double)decoded[k + j],
                             (double)bound);
            }
        }
        bench_free(&b);
    }
}

static double error_of_group(const float *x, const float *decoded, uint32_t n)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) sum += ((double)x[i] - decoded[i]) * ((double)x[i] - decoded[i]);
    return sum;
}

/* 8-bit scales and zero points are rounded outwards: the error stays under half of a step that is an eighth (e4m3) or a quarter (e5m2) larger at most,
 * and a step more of the zero point's own. They take a byte. */
static void small_scales_leave_nothing_out(void **state)
{
    enum { D = 128, N = 64, GROUP = 32 };
    static const struct {
        const char *options;
        bool sym;
        double wider;
    } types[] = {{"group=32,e4m3", false, 0.125}, {"group=32,e5m2", false, 0.25}, {"group=32,sym,e4m3", true, 0.125}, {"group=32,sym,e5m2", true, 0.25}};
    static float x[N * D], decoded[N * D];
    fill_normal(x, N * D, 91, 3.0f);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct bench b = bench_new("int4", types[i].options, roles[i % 2], D, N);
        struct kvl_codec_bytes bytes;
        encode(&b, 0, N, x);
        decode(&b, 0, N, decoded);
        for (uint32_t k = 0; k < N * D; k += GROUP) {
            double low = x[k], high = x[k];
            for (uint32_t j = 1; j < GROUP; j++) {
                low = fmin(low, x[k + j]);
                high = fmax(high, x[k + j]);
            }
            const double range = types[i].sym ? fmax(fabs(low), fabs(high)) : high - low + fabs(low) * types[i].wider;
            const double bound = 0.5001 * range * (1.0 + types[i].wider) / (types[i].sym ? 7 : 15);
            for (uint32_t j = 0; j < GROUP; j++) assert_true(fabs((double)x[k + j] - decoded[k + j]) <= bound);
        }
        assert_int_equal(kvl_codec_bytes(&b.instance, roles[i % 2], D, 1, &bytes), KVL_OK);
        assert_int_equal(bytes.payload, D / 2);
        assert_int_equal(bytes.scale, D / GROUP * (types[i].sym ? 1 : 2));
        bench_free(&b);
    }
}

/* The clip that is found is never worse than none, and at 2 bits of normal numbers much better; the one that is given is what codes span. */
static void clips_are_searched(void **state)
{
    enum { D = 128, N = 64, GROUP = 32 };
    static float x[N * D], plain[N * D], found[N * D], cut[N * D];
    double sum[2] = {0.0, 0.0};
    fill_normal(x, N * D, 92, 2.0f);
    struct bench b[3] = {bench_new("int2", "group=32", KVL_ROLE_V, D, N), bench_new("int2", "group=32,clip=0.4,search=12", KVL_ROLE_V, D, N),
                         bench_new("int2", "group=32,clip=0.75", KVL_ROLE_V, D, N)};
    float *decoded[] = {plain, found, cut};
    for (int i = 0; i < 3; i++) {
        encode(&b[i], 0, N, x);
        decode(&b[i], 0, N, decoded[i]);
        bench_free(&b[i]);
    }
    for (uint32_t k = 0; k < N * D; k += GROUP) {
        const double before = error_of_group(x + k, plain + k, GROUP), after = error_of_group(x + k, found + k, GROUP);
        assert_true(after <= before);
        sum[0] += before;
        sum[1] += after;
        float low = x[k], high = x[k], least = cut[k], most = cut[k];
        for (uint32_t j = 1; j < GROUP; j++) {
            low = fminf(low, x[k + j]), high = fmaxf(high, x[k + j]);
            least = fminf(least, cut[k + j]), most = fmaxf(most, cut[k + j]);
        }
        assert_true(fabsf((most - least) / (high - low) - 0.75f) < 0.002f);
        assert_true(fabsf((most + least) - (high + low)) < 0.01f);
    }
    print_message("    squared error %.1f without, %.1f with a search\n", sum[0], sum[1]);
    assert_true(sum[1] < 0.8 * sum[0]);
}

static void special_values(void **state)
{
    enum { D = 64, N = 8 };
    static float x[N * D], decoded[N * D];
    for (size_t i = 0; i < N_VARIANTS; i++) {
        if (strcmp(variants[i].name, "f32") == 0) continue;
        struct bench b = bench_new(variants[i].name, variants[i].options, roles[i % 2], D, 64);
        for (int c = 0; c < D; c++) {
            x[0 * D + c] = 0.0f;
            x[1 * D + c] = c % 2 ? -0.0f : 0.0f;
            x[2 * D + c] = 0.75f;             /* constant, exact in binary16 */
            x[3 * D + c] = 1e-40f * (float)c; /* subnormal binary32 */
            x[4 * D + c] = 0x1p-24f;          /* the smallest binary16 */
            x[5 * D + c] = NAN;
            x[6 * D + c] = c % 2 ? INFINITY : -INFINITY;
            x[7 * D + c] = c % 2 ? 3e38f : 65504.0f;
        }
        encode(&b, 0, N, x);
        decode(&b, 0, N, decoded);
        const bool sym = variants[i].sym;
        for (int c = 0; c < D; c++) {
            const float *at = decoded + c;
            assert_true(at[0] == 0 && at[D] == 0);
            assert_true(sym ? fabsf(at[2 * D] - 0.75f) <= 0.75f * 0x1p-11f : at[2 * D] == 0.75f);
            assert_true(at[3 * D] == 0);
            assert_true(at[4 * D] == (sym && variants[i].bits > 2 ? 0.0f : 0x1p-24f)); /* one step of 2 bits, sym */
            assert_true(at[5 * D] == 0);
            const float infinite = c % 2 ? 65504.0f : -65504.0f;
            assert_true(fabsf(at[6 * D] - infinite) <= 65504.0f * 0x1p-10f);
            assert_true(fabsf(at[7 * D] - 65504.0f) <= 65504.0f * 0x1p-10f);
        }
        bench_free(&b);
    }
}

/* Signs of zeros leave no trace in the bytes: fmin and fmax of a device may return either zero. */
static void zeros_have_one_encoding(void **state)
{
    enum { D = 16 };
    float x[3][D] = {{0}};
    for (int c = 0; c < D; c++) {
        x[0][c] = c % 3 ? 0.0f : (float)c;
        x[1][c] = c % 3 ? -0.0f : (float)c;
        x[2][c] = c % 3 ? (c % 2 ? -0.0f : 0.0f) : (float)c;
    }
    for (size_t i = 0; i < N_VARIANTS; i++) {
        if (!variants[i].bits || variants[i].group > D) continue;
        struct bench b = bench_new(variants[i].name, variants[i].options, KVL_ROLE_V, D, 1);
        uint8_t first[256];
        assert_true(b.shape.block_bytes <= sizeof first);
        encode(&b, 0, 1, x[0]);
        memcpy(first, b.block, b.shape.block_bytes);
        for (int k = 1; k < 3; k++) {
            encode(&b, 0, 1, x[k]);
            assert_memory_equal(first, b.block, b.shape.block_bytes);
        }
        bench_free(&b);
    }
}

static void parts_equal_the_whole(void **state)
{
    enum { D = 64, P = 64 };
    static float x[P * D], whole[P * D], part[P * D];
    fill_normal(x, P * D, 5, 1.0f);
    for (size_t i = 0; i < N_CODECS; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench a = bench_new(codec_at(i)->name, codec_at(i)->options, roles[r], D, P);
            struct bench b = bench_new(codec_at(i)->name, codec_at(i)->options, roles[r], D, P);
            encode(&a, 0, P, x);
            const uint32_t group = b.shape.group;
            for (uint32_t t = 0, n = group; t < P; t += n, n = group * (1 + (n * 5 + t) % 13)) encode(&b, t, t + n > P ? P - t : n, x + t * D);
            assert_memory_equal(a.block, b.block, a.shape.block_bytes);
            decode(&a, 0, P, whole);
            for (uint32_t t = 0; t < P; t++) decode(&b, t, 1, part + t * D);
            assert_memory_equal(whole, part, sizeof whole);
            bench_free(&a);
            bench_free(&b);
        }
}

/* Encoding some tokens of a block leaves the others as they were; of groups, whole ones and a short last one. */
static void writes_only_its_tokens(void **state)
{
    enum { D = 64, P = 128, MOST = 128 };
    static float x[P * D], before[P * D], after[P * D];
    fill_normal(x, P * D, 6, 1.0f);
    for (size_t i = 0; i < N_CODECS; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench b = bench_new(codec_at(i)->name, codec_at(i)->options, roles[r], D, P);
            encode(&b, 0, P, x);
            decode(&b, 0, P, before);
            const uint32_t group = b.shape.group, t0 = group == 1 ? 20 : P - group, n = group == 1 ? 5 : group;
            encode(&b, t0, n, x); /* other values */
            decode(&b, 0, P, after);
            assert_memory_equal(before, after, t0 * D * sizeof(float));
            assert_memory_equal(before + (t0 + n) * D, after + (t0 + n) * D, (P - t0 - n) * D * sizeof(float));
            assert_memory_equal(before, after + t0 * D, n * D * sizeof(float));
            bench_free(&b);
        }
}

/* ---- ggml's blocks ---- */

static const struct {
    const char *name;
    const uint8_t *blocks;  /* of the known answers' input, as ggml has them */
    uint32_t bytes, params; /* of a block; binary16 numbers at its start */
    double step;            /* of codes, in units of a block's range */
} ggml_types[] = {
    {"q8_0", q8_0_blocks, 34, 1, 1 / 254.0}, {"q5_1", q5_1_blocks, 24, 2, 1 / 31.0}, {"q5_0", q5_0_blocks, 22, 1, 1 / 16.0},
    {"q4_1", q4_1_blocks, 20, 2, 1 / 15.0},  {"q4_0", q4_0_blocks, 18, 1, 1 / 8.0},  {"iq4_nl", iq4_nl_blocks, 18, 1, 0},
};
enum { N_GGML = sizeof ggml_types / sizeof *ggml_types };

/* A page's bytes, put together as the card says, are ggml's blocks. */
static void pages_hold_ggml_blocks(void **state)
{
    enum { P = 64, T0 = 5 };
    for (size_t i = 0; i < N_GGML; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench b = bench_new(ggml_types[i].name, "", roles[r], 64, P);
            const struct kvl_known_answer *a = &b.codec->known_answers[0];
            const uint32_t params = ggml_types[i].params, codes = ggml_types[i].bytes - 2 * params, n_blocks = a->head_dim / 32;
            const uint8_t *want = ggml_types[i].blocks;
            encode(&b, T0, a->n, a->x);
            for (uint32_t t = T0; t < T0 + a->n; t++)
                for (uint32_t k = 0; k < n_blocks; k++) {
                    for (uint32_t p = 0; p < params; p++, want += 2)
                        assert_memory_equal(b.block + (size_t)P * n_blocks * codes + 2 * ((size_t)(k * params + p) * P + t), want,
                                            2);
                    for (uint32_t j = 0; j < codes; j++, want++) {
                        const uint32_t row = k * codes + j;
                        assert_int_equal(b.block[roles[r] == KVL_ROLE_K ? (size_t)row * P + t : (size_t)t * n_blocks * codes + row],
                                         *want);
                    }
                }
            bench_free(&b);
        }
}

/* ---- groups along tokens ---- */

/* Half a step of the group's range, whichever way it lies; a constant group is exact to binary16; a short last group stands for itself. */
static void kivi_errs_by_half_a_step(void **state)
{
    enum { D = 64, N = 72, P = 128 };
    static float x[N * D], decoded[N * D];
    static const int bits[] = {2, 3, 4, 8};
    fill_normal(x, N * D, 41, 2.0f);
    for (uint32_t t = 0; t < N; t++) x[t * D + 7] = 0.3f;
    for (size_t i = 0; i < 4; i++)
        for (size_t r = 0; r < 2; r++) {
            char options[64];
            snprintf(options, sizeof options, "bits=%d,group=32,residual=0,channel", bits[i]);
            struct bench b = bench_new("kivi", options, roles[r], D, P);
            encode(&b, 0, N, x);
            decode(&b, 0, N, decoded);
            for (uint32_t c = 0; c < D; c++)
                for (uint32_t t0 = 0; t0 < N; t0 += 32) {
                    const uint32_t end = t0 + 32 < N ? t0 + 32 : N;
                    float low = INFINITY, high = -INFINITY;
                    for (uint32_t t = t0; t < end; t++) {
                        low = fminf(low, x[t * D + c]);
                        high = fmaxf(high, x[t * D + c]);
                    }
                    const double bound = 0.5005 * (high - low) / ((1 << bits[i]) - 1) + fmax(fabs(low), fabs(high)) * 0x1p-10;
                    for (uint32_t t = t0; t < end; t++)
                        if (fabs(decoded[t * D + c] - x[t * D + c]) > bound)
                            fail_msg("kivi(%s): %g became %g, bound %g", options, x[t * D + c], decoded[t * D + c], bound);
                    if (c == 7) assert_true(decoded[t0 * D + c] == kvl_half_to_float(kvl_float_to_half(0.3f)));
                }
            bench_free(&b);
        }
}

/* The authors' flush rules, and the bytes of KIVI-2 at 4096 tokens, d 128: methods.md section 8. */
static void kivi_shape_is_the_papers(void **state)
{
    struct bench k = bench_new("kivi", "", KVL_ROLE_K, 128, 64), v = bench_new("kivi", "", KVL_ROLE_V, 128, 64);
    struct kvl_codec_bytes bytes;
    assert_true(k.shape.tail_min == 0 && k.shape.unit == 128 && k.shape.group == 32);
    assert_true(v.shape.tail_min == 128 && v.shape.unit == 1 && v.shape.group == 1);
    assert_int_equal(kvl_codec_bytes(&k.instance, KVL_ROLE_K, 128, 4096, &bytes), KVL_OK);
    assert_int_equal(bytes.payload + bytes.scale, 196608);
    assert_int_equal(bytes.payload, 4096 * 32);
    assert_int_equal(kvl_codec_bytes(&v.instance, KVL_ROLE_V, 128, 4096 - 128, &bytes), KVL_OK);
    assert_int_equal(bytes.payload + bytes.scale + 128 * 128 * 2, 223232);
    assert_int_equal(kvl_codec_bytes(&k.instance, KVL_ROLE_K, 128, 33, &bytes), KVL_OK); /* a short group has all its parameters */
    assert_int_equal(bytes.scale, 2 * 128 * 4);
    bench_free(&k);
    bench_free(&v);
}

/* Outliers come back as they are (to binary16), the low-rank part lowers the error of what has one, and bytes are counted. */
static void gear_keeps_outliers_and_directions(void **state)
{
    enum { D = 64, B = 64 };
    static float x[B * D], decoded[B * D];
    double error[2] = {0, 0};
    for (size_t r = 0; r < 2; r++) {
        for (int rank = 0; rank <= 3; rank += 3) {
            char options[40];
            struct kvl_codec_bytes bytes;
            fill_normal(x, B * D, 51, 0.1f);
            for (uint32_t t = 0; t < B; t++) /* three directions that groups do not see */
                for (uint32_t c = 0; c < D; c++)
                    for (uint64_t k = 0; k < 3; k++) x[t * D + c] += (float)(kvl_rng_normal(60 + k, t) * kvl_rng_normal(70 + k, c));
            for (uint32_t t = 0; t < B; t++) x[t * D + (t * 7) % D] = t % 2 ? 40.0f : -40.0f; /* one a token, one a channel */
            snprintf(options, sizeof options, "rank=%d", rank);
            struct bench b = bench_new("gear", options, roles[r], D, B);
            encode(&b, 0, B, x);
            decode(&b, 0, B, decoded);
            double sum = 0.0;
            for (uint32_t i = 0; i < B * D; i++) sum += (double)(decoded[i] - x[i]) * (decoded[i] - x[i]);
            error[rank > 0] = sum;
            for (uint32_t t = 0; t < B; t++) {
                const uint32_t i = t * D + (t * 7) % D;
                assert_true(fabsf(decoded[i] - x[i]) <= 40.0f * 0x1p-11f);
            }
            assert_int_equal(kvl_codec_bytes(&b.instance, roles[r], D, B, &bytes), KVL_OK);
            assert_int_equal(bytes.payload, B * D / 4 + 2 * rank * (B + D) + 2 * 2 * 64);
            assert_int_equal(bytes.scale, 64 * 4);
            assert_int_equal(bytes.index, 2 * 64);
            assert_int_equal(bytes.payload + bytes.scale + bytes.index, b.shape.block_bytes);
            assert_true(b.shape.unit == B && b.shape.group == B && b.shape.tail_min == 0);
            bench_free(&b);
        }
        print_message("    squared error %.2f without, %.2f with three directions\n", error[0], error[1]);
        assert_true(error[1] < 0.9 * error[0]);
    }
}

static void assert_kivi_refused(const char *options, const char *text)
{
    struct kvl_instance instance;
    struct kvl_codec_shape shape;
    kvl_error_clear();
    if (kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "kivi"), options, &instance) == KVL_OK) {
        assert_int_not_equal(kvl_codec_shape(&instance, KVL_ROLE_K, 64, 64, &shape), KVL_OK);
        kvl_instance_free(&instance);
    }
    if (strstr(kvl_error_text(), text) == NULL) fail_msg("\"%s\", wanted \"%s\"", kvl_error_text(), text);
}

static void kivi_refuses_with_the_fix(void **state)
{
    assert_kivi_refused("bits=5", "bits must be 2, 3, 4 or 8");
    assert_kivi_refused("group=24", "group=24 tokens of a channel must be a multiple of 16");
    assert_kivi_refused("residual=100", "residual=100 must be a multiple of group=32: use 32 or 128");
    assert_kivi_refused("token,group=48", "group must divide head_dim 64: use 16, 32 or 64");
}

static void ggml_bytes_are_exact(void **state)
{
    for (size_t i = 0; i < N_GGML; i++)
        for (uint32_t d = 32; d <= 256; d += 32) {
            struct bench b = bench_new(ggml_types[i].name, "", roles[i % 2], d, 128);
            struct kvl_codec_bytes bytes;
            assert_int_equal(kvl_codec_bytes(&b.instance, roles[i % 2], d, 128, &bytes), KVL_OK);
            assert_int_equal(bytes.payload + bytes.scale, 128 * d / 32 * ggml_types[i].bytes);
            assert_int_equal(bytes.scale, 128 * d / 32 * 2 * ggml_types[i].params);
            assert_int_equal(bytes.payload + bytes.scale, b.shape.block_bytes);
            assert_int_equal(b.shape.aux_floats, roles[i % 2] == KVL_ROLE_K && ggml_types[i].params == 2 ? d / 32 : 0);
            bench_free(&b);
        }
}

static void ggml_refuses_other_head_dims(void **state)
{
    struct kvl_instance instance;
    struct kvl_codec_shape shape;
    assert_int_equal(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "q4_0"), "", &instance), KVL_OK);
    kvl_error_clear();
    assert_int_not_equal(kvl_codec_shape(&instance, KVL_ROLE_K, 80, 64, &shape), KVL_OK);
    assert_non_null(strstr(kvl_error_text(), "head_dim 80 is not a multiple of 32: use int8, int4, fp8_e4m3 or f16"));
    kvl_instance_free(&instance);
}

/* Half a step, of the range or of twice the largest magnitude; a whole one at the end that 8 or 16 steps do not reach. */
static void ggml_errs_by_half_a_step(void **state)
{
    enum { D = 64, N = 64 };
    static float x[N * D], decoded[N * D];
    fill_normal(x, N * D, 21, 3.0f);
    for (size_t i = 0; i < N_GGML; i++) {
        struct bench b = bench_new(ggml_types[i].name, "", roles[i % 2], D, N);
        encode(&b, 0, N, x);
        decode(&b, 0, N, decoded);
        for (uint32_t k = 0; k < N * D; k += 32) {
            float low = x[k], high = x[k];
            for (uint32_t j = 1; j < 32; j++) {
                low = fminf(low, x[k + j]);
                high = fmaxf(high, x[k + j]);
            }
            const double reach = fmax(fabs(low), fabs(high)), range = ggml_types[i].params == 2 ? high - low
                                                                      : i == 0                  ? 2 * reach
                                                                                                : reach;
            const bool lopsided = ggml_types[i].params == 1 && i > 0; /* codes reach from -8 to 7 */
            for (uint32_t j = 0; j < 32; j++) {
                const double bound =
                    ggml_types[i].step == 0
                        ? 0.2 * reach
                        : (lopsided && x[k + j] * (reach == high ? 1 : -1) < -0.9 * reach ? 1.0 : 0.5) * ggml_types[i].step * range;
                if (fabs(decoded[k + j] - x[k + j]) > bound * 1.001 + reach * 0x1p-10)
                    fail_msg("%s: %g became %g, bound %g", ggml_types[i].name, x[k + j], decoded[k + j], bound);
            }
        }
        bench_free(&b);
    }
}

/* With d = 1: halves go away from zero in q8_0 and up in q4_0, and to the upper value of iq4_nl's table. */
static void ggml_breaks_ties_its_way(void **state)
{
    static const struct {
        const char *name;
        float x[6]; /* the first sets the scale */
        uint8_t code[6];
    } ties[] = {
        {"q8_0", {-127, 0.5f, -0.5f, 1.5f, -2.5f, 126.5f}, {129, 1, 255, 2, 253, 127}},
        {"q4_0", {-8, 0.5f, -0.5f, 1.5f, -2.5f, -7.5f}, {0, 9, 8, 10, 6, 1}},
        {"iq4_nl", {-127, -115.5f, -4.5f, 7, 19, 101}, {0, 1, 8, 9, 10, 15}},
    };
    for (size_t i = 0; i < sizeof ties / sizeof *ties; i++) {
        struct bench b = bench_new(ties[i].name, "", KVL_ROLE_V, 32, 1);
        float x[32] = {0};
        memcpy(x, ties[i].x, sizeof ties[i].x);
        encode(&b, 0, 1, x);
        for (int k = 0; k < 6; k++) assert_int_equal(i == 0 ? b.block[k] : b.block[k] & 15, ties[i].code[k]);
        bench_free(&b);
    }
}

/* ---- 8-bit floats ---- */

/* All codes in turn are values that come back, and what lies between two goes to the nearer, from a tie to the even one. */
static void fp8_rounds_to_nearest_even(void **state)
{
    static const struct {
        const char *name;
        uint32_t largest, mantissa, bias;
        float max;
    } formats[] = {{"fp8_e4m3", 0x7e, 3, 7, 448.0f}, {"fp8_e5m2", 0x7b, 2, 15, 57344.0f}};
    enum { D = 256 };
    for (size_t f = 0; f < 2; f++)
        for (int side = -1; side <= 1; side++) {
            struct bench b = bench_new(formats[f].name, "", KVL_ROLE_V, D, 1);
            float x[D] = {0}, decoded[D], number[128];
            for (uint32_t code = 0; code <= formats[f].largest; code++) {
                const uint32_t exponent = code >> formats[f].mantissa, one = 1u << formats[f].mantissa, fraction = code % one;
                number[code] = ldexpf((float)(fraction + (exponent ? one : 0)),
                                      (int)(exponent ? exponent : 1) - (int)formats[f].bias - (int)formats[f].mantissa);
            }
            assert_true(number[formats[f].largest] == formats[f].max);
            for (uint32_t code = 0; code < formats[f].largest; code++) {
                const float middle = 0.5f * (number[code] + number[code + 1]);
                x[code] = side == 0 ? middle : nextafterf(middle, side < 0 ? 0.0f : 1e30f);
                x[code + 128] = -x[code];
            }
            x[127] = formats[f].max; /* scale 1 */
            encode(&b, 0, 1, x);
            decode(&b, 0, 1, decoded);
            for (uint32_t code = 0; code < formats[f].largest; code++) {
                const uint32_t want = code + (side > 0 || (side == 0 && code % 2));
                assert_int_equal(b.block[code], want);
                assert_int_equal(b.block[code + 128], want ? want | 0x80 : 0);
                assert_true(decoded[code] == number[want] && decoded[code + 128] == -number[want]);
            }
            bench_free(&b);
        }
}

/* The scale is rounded up, so the error is that of the format for all sizes of rows, also where the scale is subnormal. */
static void fp8_errors_are_relative(void **state)
{
    enum { D = 64 };
    static const double half_step[] = {0x1p-4, 0x1p-3}, smallest[] = {0x1p-10, 0x1p-17};
    for (size_t i = 0; i < 2; i++)
        for (float magnitude = 1e-6f; magnitude < 2e4f; magnitude *= 1.7f) {
            struct bench b = bench_new(i ? "fp8_e5m2" : "fp8_e4m3", "", KVL_ROLE_V, D, 1);
            float x[D], decoded[D];
            uint16_t half;
            fill_normal(x, D, 31, magnitude);
            encode(&b, 0, 1, x);
            decode(&b, 0, 1, decoded);
            memcpy(&half, b.block + D, 2);
            for (int c = 0; c < D; c++)
                assert_true(fabs(decoded[c] - x[c]) <=
                            1.00001 * fmax(half_step[i] * fabs(x[c]), smallest[i] * kvl_half_to_float(half)));
            bench_free(&b);
        }
}

/* Zeros, next to nothing, NaN, infinity: of ggml's and the 8-bit floats. */
static void special_values_of_the_others(void **state)
{
    enum { D = 64, N = 6 };
    static float x[N * D], decoded[N * D];
    for (size_t i = 0; i < N_OTHERS; i++) {
        struct bench b = bench_new(others[i].name, "", roles[i % 2], D, 64);
        for (int c = 0; c < D; c++) {
            x[0 * D + c] = c % 2 ? -0.0f : 0.0f;
            x[1 * D + c] = 1e-40f * (float)c; /* subnormal binary32 */
            x[2 * D + c] = NAN;
            x[3 * D + c] = c % 2 ? INFINITY : -INFINITY;
            x[4 * D + c] = c % 2 ? 3e38f : 65504.0f;
            x[5 * D + c] = 0.75f;
        }
        encode(&b, 0, N, x);
        decode(&b, 0, N, decoded);
        for (int c = 0; c < D; c++) {
            assert_true(decoded[c] == 0 && decoded[D + c] == 0 && decoded[2 * D + c] == 0);
            /* -8 to 7 and -127 to 113: one end is out of reach */
            assert_true(fabsf(decoded[3 * D + c] - (c % 2 ? 65504.0f : -65504.0f)) <= 65504.0f * 0.126f);
            assert_true(fabsf(decoded[4 * D + c] - 65504.0f) <= 65504.0f * 0.002f);
            assert_true(fabsf(decoded[5 * D + c] - 0.75f) <= 0.75f * 0x1p-7f);
        }
        bench_free(&b);
    }
}

/* The same in whole blocks of codecs whose groups span tokens, and all of them in one block: nothing that is not finite comes back. */
static void special_values_of_groups(void **state)
{
    enum { D = 64, P = 64 };
    static const struct {
        float even, odd, wanted_even, wanted_odd, within;
    } values[] = {{0.0f, -0.0f, 0, 0, 0},           {0.75f, 0.75f, 0.75f, 0.75f, 0},
                  {1e-40f, -1e-40f, 0, 0, 0},       {NAN, NAN, 0, 0, 0},
                  {-INFINITY, INFINITY, -65504.0f, 65504.0f, 65504.0f * 0x1p-10f}, {3e38f, 65504.0f, 65504.0f, 65504.0f, 0}};
    enum { N_VALUES = sizeof values / sizeof *values };
    static float x[P * D], decoded[P * D];
    for (size_t i = 0; i < N_GROUPED; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench b = bench_new(grouped[i].name, grouped[i].options, roles[r], D, P);
            for (size_t v = 0; v < N_VALUES; v++) {
                for (int k = 0; k < P * D; k++) x[k] = k % 2 ? values[v].odd : values[v].even;
                encode(&b, 0, P, x);
                decode(&b, 0, P, decoded);
                for (int k = 0; k < P * D; k++) {
                    const float wanted = k % 2 ? values[v].wanted_odd : values[v].wanted_even;
                    if (!(fabsf(decoded[k] - wanted) <= values[v].within))
                        fail_msg("%s(%s) of %g: %g, wanted %g", grouped[i].name, grouped[i].options, x[k], decoded[k], wanted);
                }
            }
            for (int k = 0; k < P * D; k++) {
                const size_t v = (size_t)(k / D) % N_VALUES;
                x[k] = k % 2 ? values[v].odd : values[v].even;
            }
            encode(&b, 0, P, x);
            decode(&b, 0, P, decoded);
            for (int k = 0; k < P * D; k++) assert_true(isfinite(decoded[k]));
            bench_free(&b);
        }
}

/* Dropped channels come back as 0, kept ones as f16 has them: finite, whatever came. */
static void think_keeps_its_channels(void **state)
{
    enum { D = 64, N = 3 };
    float x[N * D], decoded[N * D], slots[D];
    struct bench b = bench_new("think", "ratio=0.5", KVL_ROLE_K, D, 64);
    for (int c = 0; c < D; c++) {
        slots[c] = c % 2 ? (float)(c / 2) : -1.0f;
        x[c] = c % 4 == 1 ? NAN : 0.3f;
        x[D + c] = c % 4 == 1 ? INFINITY : -3e38f;
        x[2 * D + c] = 1e-40f;
    }
    b.table = slots;
    encode(&b, 5, N, x);
    decode(&b, 5, N, decoded);
    for (int c = 0; c < D; c++) {
        assert_true(decoded[c] == (c % 4 == 3 ? kvl_half_to_float(kvl_float_to_half(0.3f)) : 0));
        assert_true(decoded[D + c] == (c % 2 ? c % 4 == 1 ? 65504.0f : -65504.0f : 0));
        assert_true(decoded[2 * D + c] == 0);
    }
    bench_free(&b);
}

/* ---- TurboQuant ---- */

/* A random direction times a random length. */
static void random_direction(float *x, uint32_t d, uint64_t seed)
{
    fill_normal(x, d, seed, (float)exp(kvl_rng_normal(seed, d)));
}

static double dot(const float *a, const float *b, uint32_t d)
{
    double sum = 0.0;
    for (uint32_t c = 0; c < d; c++) sum += (double)a[c] * b[c];
    return sum;
}

/* The relative squared error on 200,000 random directions is the published one: arXiv:2504.19874 and methods.md. */
static void turboquant_errs_as_published(void **state)
{
    enum { ROWS = 200000 };
    static const double wanted[3][4] = {{.3585, .1147, .0334, .0092}, {.3610, .1161, .0340, .0093}, {.3622, .1168, .0343, .0094}};
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t bits = 1; bits <= 4; bits++) {
            const uint32_t d = 64u << i;
            char options[16];
            float x[256], decoded[256];
            double sum = 0.0;
            snprintf(options, sizeof options, "bits=%u", bits);
            struct bench b = bench_new("turboquant", options, KVL_ROLE_V, d, 1);
            for (uint32_t row = 0; row < ROWS; row++) {
                random_direction(x, d, row);
                encode(&b, 0, 1, x);
                decode(&b, 0, 1, decoded);
                for (uint32_t c = 0; c < d; c++) decoded[c] -= x[c];
                sum += dot(decoded, decoded, d) / dot(x, x, d);
            }
            print_message("    D %u, %u bits: %.5f\n", d, bits, sum / ROWS);
            if (fabs(sum / ROWS / wanted[i][bits - 1] - 1.0) > 0.007) fail_msg("wanted %.4f", wanted[i][bits - 1]);
            bench_free(&b);
        }
}

/* Inner products with the sketch: over directions and sketch seeds, est = 1 * true within three standard errors (the slope; seeds are the
 * samples), where the codes alone shrink them. */
static void turboquant_scores_are_unbiased(void **state)
{
    enum { D = 64, SEEDS = 60, ROWS = 200 };
    for (int bits = 2; bits <= 4; bits++) {
        double mean = 0.0, squares = 0.0, plain = 0.0;
        for (int seed = 0; seed < SEEDS; seed++) {
            char options[48];
            float x[D], q[D], decoded[D];
            double product = 0.0, truth = 0.0, codes = 0.0;
            snprintf(options, sizeof options, "bits=%d,sketch=sign,seed=%d", bits, seed);
            struct bench b = bench_new("turboquant", options, KVL_ROLE_K, D, 1);
            snprintf(options, sizeof options, "bits=%d", bits - 1);
            struct bench c = bench_new("turboquant", options, KVL_ROLE_K, D, 1);
            for (int row = 0; row < ROWS; row++) {
                fill_normal(x, D, 1000 + (uint64_t)seed * ROWS + row, 1.0f);
                fill_normal(q, D, 77000 + (uint64_t)seed * ROWS + row, 1.0f);
                for (int i = 0; i < D; i++) q[i] += x[i]; /* so that products do not vanish on average */
                encode(&b, 0, 1, x);
                decode(&b, 0, 1, decoded);
                product += dot(q, decoded, D) * dot(q, x, D);
                truth += dot(q, x, D) * dot(q, x, D);
                encode(&c, 0, 1, x);
                decode(&c, 0, 1, decoded);
                codes += dot(q, decoded, D) * dot(q, x, D);
            }
            mean += product / truth / SEEDS;
            squares += product / truth * product / truth / SEEDS;
            plain += codes / truth / SEEDS;
            bench_free(&b);
            bench_free(&c);
        }
        const double se = sqrt((squares - mean * mean) / (SEEDS - 1));
        print_message("    %d bits: slope %.5f, standard error %.5f; codes alone %.5f\n", bits, mean, se, plain);
        assert_true(fabs(mean - 1.0) <= 3.0 * se);
        assert_true(plain < 1.0 - 3.0 * se);
    }
}

static void turboquant_refuses_with_the_fix(void **state)
{
    struct kvl_instance instance;
    struct kvl_codec_shape shape;
    kvl_error_clear();
    assert_int_not_equal(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "turboquant"), "bits=5", &instance), KVL_OK);
    assert_non_null(strstr(kvl_error_text(), "bits must be 1 to 4, with sketch 2 to 5"));
    kvl_error_clear();
    assert_int_equal(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "turboquant"), "sketch=sign", &instance), KVL_OK);
    assert_int_not_equal(kvl_codec_shape(&instance, KVL_ROLE_V, 64, 64, &shape), KVL_OK);
    assert_non_null(strstr(kvl_error_text(), "give values a turboquant without it"));
    kvl_error_clear();
    assert_int_not_equal(kvl_codec_shape(&instance, KVL_ROLE_K, 80, 64, &shape), KVL_OK);
    assert_non_null(strstr(kvl_error_text(), "a power of two"));
    kvl_error_clear();
    kvl_instance_free(&instance);
}

static void turboquant_special_values(void **state)
{
    enum { D = 64, N = 5 };
    float x[N * D], decoded[N * D];
    for (int c = 0; c < D; c++) {
        x[c] = c % 2 ? -0.0f : 0.0f;
        x[D + c] = 1e-40f * (float)c;
        x[2 * D + c] = NAN;
        x[3 * D + c] = c % 2 ? INFINITY : -INFINITY;
        x[4 * D + c] = 0.75f;
    }
    for (int sketch = 0; sketch < 2; sketch++) {
        struct bench b = bench_new("turboquant", sketch ? "bits=5,sketch=sign" : "bits=4", KVL_ROLE_K, D, 64);
        encode(&b, 0, N, x);
        decode(&b, 0, N, decoded);
        for (int c = 0; c < D; c++) {
            assert_true(decoded[c] == 0 && decoded[D + c] == 0 && decoded[2 * D + c] == 0);
            assert_true(fabsf(decoded[3 * D + c] - (c % 2 ? 65504.0f : -65504.0f)) <= 65504.0f * 0.3f);
            assert_true(fabsf(decoded[4 * D + c] - 0.75f) <= 0.75f * 0.3f);
        }
        bench_free(&b);
    }
}

/* A row of one head of 128 channels, keys or values, as issue and papers count it: codes and parameters of one token. */
static void rows_of_128_channels(void **state)
{
    static const struct {
        const char *name, *options;
        uint64_t bytes;
    } rows[] = {{"f16", "", 256},  {"q8_0", "", 136}, {"q5_1", "", 96},   {"q5_0", "", 88},           {"q4_1", "", 80},
                {"q4_0", "", 72},  {"iq4_nl", "", 72}, {"int8", "", 132}, {"int4", "", 68},           {"int4", "group=64", 72},
                {"int4", "group=32", 80}, {"int2", "group=32", 48}, {"int4", "group=32,e4m3", 72}, {"int2", "group=32,e5m2", 40}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench b = bench_new(rows[i].name, rows[i].options, roles[r], 128, 64);
            struct kvl_codec_bytes bytes;
            assert_int_equal(kvl_codec_bytes(&b.instance, roles[r], 128, 1, &bytes), KVL_OK);
            assert_int_equal(bytes.payload + bytes.scale + bytes.index, rows[i].bytes);
            bench_free(&b);
        }
    struct kvl_codec_bytes bytes; /* 77 of 128 channels */
    struct bench think = bench_new("think", "", KVL_ROLE_K, 128, 64);
    assert_int_equal(kvl_codec_bytes(&think.instance, KVL_ROLE_K, 128, 1, &bytes), KVL_OK);
    assert_int_equal(bytes.payload, 2 * 77);
    assert_int_equal(think.shape.tail_min, 32);
    assert_int_equal(think.shape.learn_queries, 32);
    bench_free(&think);
}

static void fp8_bytes_are_exact(void **state)
{
    for (size_t i = 0; i < 2; i++)
        for (uint32_t d = 16; d <= 256; d *= 2) {
            struct bench b = bench_new(i ? "fp8_e5m2" : "fp8_e4m3", "", roles[i], d, 64);
            struct kvl_codec_bytes bytes;
            assert_int_equal(kvl_codec_bytes(&b.instance, roles[i], d, 64, &bytes), KVL_OK);
            assert_int_equal(bytes.payload, 64 * d);
            assert_int_equal(bytes.scale, 64 * 2);
            assert_int_equal(b.shape.block_bytes, 64 * (d + 2));
            bench_free(&b);
        }
}

static void bytes_are_exact(void **state)
{
    for (size_t i = 0; i < N_VARIANTS; i++)
        for (size_t r = 0; r < 2; r++)
            for (uint32_t d = 32; d <= 256; d *= 2) {
                const struct variant *v = &variants[i];
                struct bench b = bench_new(v->name, v->options, roles[r], d, 192);
                struct kvl_codec_bytes bytes;
                assert_int_equal(kvl_codec_bytes(&b.instance, roles[r], d, 192, &bytes), KVL_OK);
                const uint64_t code_bits = v->bits ? (uint64_t)v->bits : strcmp(v->name, "f16") ? 32 : 16;
                const uint64_t groups = v->bits ? d / (v->group ? v->group : d) : 0;
                assert_int_equal(bytes.payload, 192 * d * code_bits / 8);
                assert_int_equal(bytes.scale, 192 * groups * (v->sym ? 2 : 4));
                assert_int_equal(bytes.index, 0);
                assert_int_equal(bytes.payload + bytes.scale, b.shape.block_bytes);
                assert_int_equal(b.shape.group, 1);
                assert_int_equal(b.shape.unit, 1);
                assert_int_equal(b.shape.tail_min, 0);
                assert_int_equal(b.shape.aux_floats, roles[r] == KVL_ROLE_K ? groups : 0);
                bench_free(&b);
            }
}

/* SmolLM2-135M: 30 layers, 3 kv heads, head_dim 64. */
static void bytes_per_token_of_a_model(void **state)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } wanted[] = {{"f32", 46080}, {"f16", 23040},   {"int8", 12240},    {"int4", 6480}, {"int3", 5040},
                  {"int2", 3600}, {"q8_0", 12240},  {"q5_1", 8640},     {"q5_0", 7920}, {"q4_1", 7200},
                  {"q4_0", 6480}, {"iq4_nl", 6480}, {"fp8_e4m3", 11880}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct kvl_instance instance;
        uint64_t sum = 0;
        assert_int_equal(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, wanted[i].name), NULL, &instance), KVL_OK);
        for (int stream = 0; stream < 30 * 3; stream++)
            for (size_t r = 0; r < 2; r++) {
                struct kvl_codec_bytes bytes;
                assert_int_equal(kvl_codec_bytes(&instance, roles[r], 64, 1, &bytes), KVL_OK);
                sum += bytes.payload + bytes.scale;
            }
        assert_int_equal(sum, wanted[i].bytes);
        kvl_instance_free(&instance);
    }
}

struct defined {
    char text[256];
};

static void note_define(void *context, const char *name, int64_t value)
{
    struct defined *d = context;
    const size_t n = strlen(d->text);
    snprintf(d->text + n, sizeof d->text - n, "%s=%lld ", name, (long long)value);
}

#define PLAIN "PARAM_MANTISSA=0 PARAM_BIAS=0 PARAM_MAX=0 SEARCH=0 CLIP_STEP=0 "

static void defines_say_the_options(void **state)
{
    static const struct {
        const char *name, *options, *text;
    } wanted[] = {
        {"f32", "", "HALF=0 "},
        {"f16", "", "HALF=1 "},
        {"int8", "", "BITS=8 GROUP=64 ASYM=1 TOKENS=1 BLOCK=0 RANK=0 OUTLIERS=0 " PLAIN},
        {"int4", "group=16,sym", "BITS=4 GROUP=16 ASYM=0 TOKENS=1 BLOCK=0 RANK=0 OUTLIERS=0 " PLAIN},
        {"int3", "", "BITS=3 GROUP=64 ASYM=1 TOKENS=1 BLOCK=0 RANK=0 OUTLIERS=0 " PLAIN},
        {"int3", "clip=0.5,search=4,e4m3", "BITS=3 GROUP=64 ASYM=1 TOKENS=1 BLOCK=0 RANK=0 OUTLIERS=0 PARAM_MANTISSA=3 PARAM_BIAS=7 PARAM_MAX=126 SEARCH=4 "
                                           "CLIP_STEP=1040187392 "}, /* 0.125 */
        {"kivi", "", "BITS=2 GROUP=64 ASYM=1 TOKENS=32 BLOCK=0 RANK=0 OUTLIERS=0 " PLAIN},
        {"q5_1", "", "BITS=5 OFFSET=0 MIN=1 NONLINEAR=0 "},
        {"iq4_nl", "", "BITS=4 OFFSET=0 MIN=0 NONLINEAR=1 "},
        {"fp8_e5m2", "", "MANTISSA=2 BIAS=15 MAX=57344 "},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct bench b = bench_new(wanted[i].name, wanted[i].options, KVL_ROLE_K, 64, 64);
        struct defined d = {""};
        b.codec->defines(b.instance.priv, &b.dims, note_define, &d);
        assert_string_equal(d.text, wanted[i].text);
        bench_free(&b);
    }
}

/* The plug-ins' binary16 against the host's: all 65536 from, and all finite to with their neighbours and midpoints. */
static void plugin_half_equals_the_host(void **state)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        if ((h >> 10 & 31) == 31) continue;
        const float x = kvl_half_to_float((uint16_t)h);
        const float around[] = {x, nextafterf(x, 1e30f), nextafterf(x, -1e30f),
                                x + 0.5f * (kvl_half_to_float((uint16_t)(h ^ 1)) - x)};
        assert_true(kvl_plugin_from_half((uint16_t)h) == x && signbit(kvl_plugin_from_half((uint16_t)h)) == signbit(x));
        for (int i = 0; i < 4; i++)
            if (fabsf(around[i]) <= 65504.0f) assert_int_equal(kvl_plugin_to_half(around[i]), kvl_float_to_half(around[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(meets_known_answers),
        cmocka_unit_test(integers_follow_the_card),
        cmocka_unit_test(ties_go_to_even),
        cmocka_unit_test(quotients_are_exact),
        cmocka_unit_test(floats_follow_the_card),
        cmocka_unit_test(round_trip_errs_by_half_a_step),
        cmocka_unit_test(small_scales_leave_nothing_out), cmocka_unit_test(clips_are_searched), cmocka_unit_test(special_values),
        cmocka_unit_test(zeros_have_one_encoding),
        cmocka_unit_test(parts_equal_the_whole),
        cmocka_unit_test(writes_only_its_tokens),
        cmocka_unit_test(bytes_are_exact),
        cmocka_unit_test(bytes_per_token_of_a_model),
        cmocka_unit_test(defines_say_the_options),
        cmocka_unit_test(plugin_half_equals_the_host),
        cmocka_unit_test(pages_hold_ggml_blocks),
        cmocka_unit_test(kivi_errs_by_half_a_step),
        cmocka_unit_test(kivi_shape_is_the_papers),
        cmocka_unit_test(kivi_refuses_with_the_fix),
        cmocka_unit_test(gear_keeps_outliers_and_directions),
        cmocka_unit_test(ggml_bytes_are_exact),
        cmocka_unit_test(ggml_refuses_other_head_dims),
        cmocka_unit_test(ggml_errs_by_half_a_step),
        cmocka_unit_test(ggml_breaks_ties_its_way),
        cmocka_unit_test(fp8_rounds_to_nearest_even),
        cmocka_unit_test(fp8_errors_are_relative),
        cmocka_unit_test(special_values_of_the_others), cmocka_unit_test(special_values_of_groups), cmocka_unit_test(think_keeps_its_channels),
        cmocka_unit_test(rows_of_128_channels), cmocka_unit_test(fp8_bytes_are_exact),
        cmocka_unit_test(turboquant_errs_as_published),
        cmocka_unit_test(turboquant_scores_are_unbiased),
        cmocka_unit_test(turboquant_refuses_with_the_fix),
        cmocka_unit_test(turboquant_special_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
