/* The C specification of the built-in codecs: known answers, byte layout, error bounds, special values, exact bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
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
    assert_int_equal(b->codec->ref_encode(b->instance.priv, &b->dims, NULL, t0, n, x, b->block), 0);
}

static void decode(struct bench *b, uint32_t t0, uint32_t n, float *x)
{
    assert_int_equal(b->codec->ref_decode(b->instance.priv, &b->dims, NULL, t0, n, b->block, x), 0);
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
};
enum { N_VARIANTS = sizeof variants / sizeof *variants };

static void meets_known_answers(void **state)
{
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)kvl_registry_at(i);
        assert_true(codec->n_known_answers > 0);
        for (uint32_t k = 0; k < codec->n_known_answers; k++) {
            const struct kvl_known_answer *a = &codec->known_answers[k];
            struct bench b = bench_new(codec->head.name, a->options, a->role, a->head_dim, 64);
            float decoded[512];
            assert_true(a->n * a->head_dim <= 512);
            encode(&b, 3, a->n, a->x);
            decode(&b, 3, a->n, decoded);
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
    const uint32_t d = b->dims.head_dim, p = b->dims.page_tokens, group = v->group ? v->group : d,
                   per_byte = 8u / (uint32_t)v->bits;
    const uint32_t rows = d / per_byte, span = group / per_byte, n_params = v->sym ? 1 : 2;
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
            const uint32_t row = g * span + i % span;
            const size_t at = b->dims.role == KVL_ROLE_K ? (size_t)row * p + t : (size_t)t * rows + row;
            assert_int_equal(b->block[at] >> (i / span * (uint32_t)v->bits) & ((1u << v->bits) - 1), codes[i]);
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
            assert_true(sym ? at[4 * D] == 0 : at[4 * D] == 0x1p-24f);
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
    for (size_t i = 0; i < N_VARIANTS; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench a = bench_new(variants[i].name, variants[i].options, roles[r], D, P);
            struct bench b = bench_new(variants[i].name, variants[i].options, roles[r], D, P);
            encode(&a, 0, P, x);
            for (uint32_t t = 0, n = 1; t < P; t += n, n = 1 + (n * 5 + t) % 13) encode(&b, t, t + n > P ? P - t : n, x + t * D);
            assert_memory_equal(a.block, b.block, a.shape.block_bytes);
            decode(&a, 0, P, whole);
            for (uint32_t t = 0; t < P; t++) decode(&b, t, 1, part + t * D);
            assert_memory_equal(whole, part, sizeof whole);
            bench_free(&a);
            bench_free(&b);
        }
}

/* Encoding some tokens of a block leaves the others as they were. */
static void writes_only_its_tokens(void **state)
{
    enum { D = 64, P = 64, T0 = 20, N = 5 };
    static float x[P * D], before[P * D], after[P * D];
    fill_normal(x, P * D, 6, 1.0f);
    for (size_t i = 0; i < N_VARIANTS; i++)
        for (size_t r = 0; r < 2; r++) {
            struct bench b = bench_new(variants[i].name, variants[i].options, roles[r], D, P);
            encode(&b, 0, P, x);
            decode(&b, 0, P, before);
            encode(&b, T0, N, x); /* other values */
            decode(&b, 0, P, after);
            assert_memory_equal(before, after, T0 * D * sizeof(float));
            assert_memory_equal(before + (T0 + N) * D, after + (T0 + N) * D, (P - T0 - N) * D * sizeof(float));
            assert_memory_equal(before, after + T0 * D, N * D * sizeof(float));
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
    } wanted[] = {{"f32", 46080}, {"f16", 23040}, {"int8", 12240}, {"int4", 6480}};
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
    char text[128];
};

static void note_define(void *context, const char *name, int64_t value)
{
    struct defined *d = context;
    const size_t n = strlen(d->text);
    snprintf(d->text + n, sizeof d->text - n, "%s=%lld ", name, (long long)value);
}

static void defines_say_the_options(void **state)
{
    static const struct {
        const char *name, *options, *text;
    } wanted[] = {
        {"f32", "", "HALF=0 "},
        {"f16", "", "HALF=1 "},
        {"int8", "", "BITS=8 GROUP=64 ASYM=1 "},
        {"int4", "group=16,sym", "BITS=4 GROUP=16 ASYM=0 "},
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
        cmocka_unit_test(meets_known_answers),     cmocka_unit_test(integers_follow_the_card),
        cmocka_unit_test(ties_go_to_even),         cmocka_unit_test(quotients_are_exact),
        cmocka_unit_test(floats_follow_the_card),  cmocka_unit_test(round_trip_errs_by_half_a_step),
        cmocka_unit_test(special_values),          cmocka_unit_test(zeros_have_one_encoding),
        cmocka_unit_test(parts_equal_the_whole),   cmocka_unit_test(writes_only_its_tokens),
        cmocka_unit_test(bytes_are_exact),         cmocka_unit_test(bytes_per_token_of_a_model),
        cmocka_unit_test(defines_say_the_options), cmocka_unit_test(plugin_half_equals_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
