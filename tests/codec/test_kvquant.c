/* KVQuant beyond its known answers: calibration against an exact k-means made elsewhere, special values, bytes, independence of pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "codec/kvquant_sample.h"
#include "mem.h"
#include "registry.h"
#include "rng.h"
#include <math.h>
#include <string.h>

enum { D = 16, SAMPLE = sizeof kvquant_sample / sizeof *kvquant_sample / D, MOST_FLOATS = 2 * 256 + 16, P = 64 };
static const uint32_t roles[] = {KVL_ROLE_K, KVL_ROLE_V};

static const struct kvl_codec *codec(void) { return (const struct kvl_codec *)kvl_registry_find(KVL_KIND_CODEC, "kvquant"); }

struct taken {
    float values[MOST_FLOATS];
    uint32_t n, stop_at; /* stop_at: the call of put() that says stop; 0 = never */
    uint32_t calls;
};

static int take(void *context, const char *name, uint32_t n, const float *values)
{
    struct taken *t = context;
    if (++t->calls == t->stop_at) return 7;
    assert_true(*name != '\0' && t->n + n <= MOST_FLOATS);
    memcpy(t->values + t->n, values, n * sizeof *values);
    t->n += n;
    return 0;
}

static int calibrate(const struct kvl_instance *instance, uint32_t role, uint32_t d, uint64_t n, const float *x, struct taken *taken)
{
    const struct kvl_codec_dims dims = {sizeof dims, role, d, 0};
    const struct kvl_calibration out = {sizeof out, 0, taken, take};
    return codec()->calibrate(instance->priv, &dims, n, x, &out);
}

static struct kvl_instance instance_of(const char *options)
{
    struct kvl_instance instance;
    assert_int_equal(kvl_instance_new(&codec()->head, options, &instance), KVL_OK);
    return instance;
}

static double squared_error(const struct kvl_instance *instance, uint32_t role, const float *table)
{
    const struct kvl_codec_dims dims = {sizeof dims, role, D, P};
    double sum = 0.0;
    for (uint32_t t = 0; t < SAMPLE; t++) {
        uint8_t block[P * 64] = {0};
        float decoded[D];
        assert_int_equal(codec()->ref_encode(instance->priv, &dims, table, 0, 1, kvquant_sample + t * D, block), 0);
        assert_int_equal(codec()->ref_decode(instance->priv, &dims, table, 0, 1, block, decoded), 0);
        for (uint32_t c = 0; c < D; c++) sum += pow((double)decoded[c] - kvquant_sample[t * D + c], 2);
    }
    return sum;
}

/* Ranges are order statistics, so exact. Levels may stop elsewhere on k-means' flat ground, but no worse. */
static void tables_equal_exact_k_means(void **state)
{
    for (uint32_t a = 0; a < codec()->n_known_answers; a++) {
        const struct kvl_known_answer *answer = &codec()->known_answers[a];
        struct kvl_instance instance = instance_of(answer->options);
        struct kvl_codec_shape shape;
        struct taken taken = {.n = 0};
        const float *want = codec()->known_tables[a];
        assert_int_equal(kvl_codec_shape(&instance, answer->role, D, 0, &shape), KVL_OK);
        assert_int_equal(calibrate(&instance, answer->role, D, SAMPLE, kvquant_sample, &taken), 0);
        assert_int_equal(taken.n, shape.table_floats);
        const uint32_t ranges = answer->role == KVL_ROLE_K ? 2 * D : 0;
        assert_memory_equal(taken.values, want, ranges * sizeof *want);
        for (uint32_t i = ranges; i < taken.n; i++)
            if (!(fabsf(taken.values[i] - want[i]) < 0.02f))
                fail_msg("%s, level %u: %g, wanted %g", answer->options, i - ranges, (double)taken.values[i], (double)want[i]);
        const double ours = squared_error(&instance, answer->role, taken.values), theirs = squared_error(&instance, answer->role, want);
        print_message("    %s: squared error %.4f, of exact k-means %.4f\n", answer->options, ours, theirs);
        assert_true(ours < 1.005 * theirs);
        kvl_instance_free(&instance);
    }
}

static void calibration_stops_when_told(void **state)
{
    struct kvl_instance instance = instance_of("");
    for (uint32_t stop = 1; stop <= 3; stop++) {
        struct taken taken = {.stop_at = stop};
        assert_int_not_equal(calibrate(&instance, KVL_ROLE_K, D, SAMPLE, kvquant_sample, &taken), 0);
        assert_int_equal(taken.calls, stop);
    }
    struct taken taken = {.n = 0};
    assert_int_not_equal(calibrate(&instance, KVL_ROLE_V, D, 0, kvquant_sample, &taken), 0);
    kvl_instance_free(&instance);
}

/* Constant, zero, subnormal and non-finite rows, calibrated and encoded: finite tables, finite numbers, constants met to binary16. */
static void special_values(void **state)
{
    enum { N = 8 };
    float x[N][D], decoded[N][D];
    for (int c = 0; c < D; c++) {
        x[0][c] = 0.0f;
        x[1][c] = c % 2 ? -0.0f : 0.0f;
        x[2][c] = 0.75f;
        x[3][c] = 1e-40f * (float)c;
        x[4][c] = NAN;
        x[5][c] = c % 2 ? INFINITY : -INFINITY;
        x[6][c] = 3e38f;
        x[7][c] = (float)c - 8.0f;
    }
    for (int r = 0; r < 2; r++)
        for (int constant = 0; constant < 2; constant++) { /* constant: every calibration row is the third */
            struct kvl_instance instance = instance_of("bits=2,outliers=10");
            const struct kvl_codec_dims dims = {sizeof dims, roles[r], D, P};
            uint8_t block[P * 64] = {0};
            struct taken taken = {.n = 0};
            float same[N][D];
            for (int t = 0; t < N; t++) memcpy(same[t], x[2], sizeof same[t]);
            assert_int_equal(calibrate(&instance, roles[r], D, N, constant ? same[0] : x[0], &taken), 0);
            for (uint32_t i = 0; i < taken.n; i++) assert_true(isfinite(taken.values[i]));
            assert_int_equal(codec()->ref_encode(instance.priv, &dims, taken.values, 5, N, x[0], block), 0);
            assert_int_equal(codec()->ref_decode(instance.priv, &dims, taken.values, 5, N, block, decoded[0]), 0);
            for (int t = 0; t < N; t++)
                for (int c = 0; c < D; c++) assert_true(isfinite(decoded[t][c]));
            for (int c = 0; c < D && (roles[r] == KVL_ROLE_V || constant); c++) assert_true(decoded[2][c] == 0.75f);
            for (int c = 0; c < D && roles[r] == KVL_ROLE_V; c++) assert_true(decoded[0][c] == 0 && decoded[1][c] == 0 && decoded[4][c] == 0);
            assert_int_equal(codec()->ref_encode(instance.priv, &dims, NULL, 5, N, x[0], block), 1); /* no table */
            kvl_instance_free(&instance);
        }
}

/* What is stored as an outlier comes back as its binary16; the rest errs by no more than the widest gap between levels. */
static void errors_are_bounded(void **state)
{
    enum { N = 64 };
    struct kvl_instance instance = instance_of("bits=4,outliers=5");
    for (int r = 0; r < 2; r++) {
        const struct kvl_codec_dims dims = {sizeof dims, roles[r], D, P};
        uint8_t block[P * 64] = {0};
        float decoded[N][D];
        struct taken taken = {.n = 0};
        assert_int_equal(calibrate(&instance, roles[r], D, SAMPLE, kvquant_sample, &taken), 0);
        assert_int_equal(codec()->ref_encode(instance.priv, &dims, taken.values, 0, N, kvquant_sample, block), 0);
        assert_int_equal(codec()->ref_decode(instance.priv, &dims, taken.values, 0, N, block, decoded[0]), 0);
        const float *level = taken.values + taken.n - 16;
        float gap = fmaxf(1.0f + level[0], 1.0f - level[15]);
        for (int i = 1; i < 16; i++) gap = fmaxf(gap, 0.5f * (level[i] - level[i - 1]));
        uint32_t exact = 0;
        for (int t = 0; t < N; t++) {
            const float *x = kvquant_sample + t * D;
            float low = x[0], high = x[0];
            for (int c = 1; c < D; c++) {
                low = fminf(low, x[c]);
                high = fmaxf(high, x[c]);
            }
            for (int c = 0; c < D; c++) {
                const float error = fabsf(decoded[t][c] - x[c]), reach = roles[r] == KVL_ROLE_K ? taken.values[D + c] : 0.5f * (high - low);
                const float outside = roles[r] == KVL_ROLE_K ? fmaxf(fabsf(x[c] - taken.values[c]) - reach, 0.0f) : 0.0f;
                exact += error <= fabsf(x[c]) * 0x1p-11f;
                assert_true(error <= 1.01f * gap * reach + outside + 0.01f);
            }
        }
        assert_true(exact >= N); /* one slot a token of 16 */
    }
    kvl_instance_free(&instance);
}

static void bytes_are_exact(void **state)
{
    static const struct {
        const char *options;
        uint32_t d, k_payload, slots;
    } rows[] = {{"", 64, 24 + 2, 1}, {"bits=2", 128, 32 + 4, 2}, {"bits=4,outliers=0", 64, 32, 0}, {"bits=3,outliers=10", 256, 96 + 52, 26}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int r = 0; r < 2; r++) {
            struct kvl_instance instance = instance_of(rows[i].options);
            struct kvl_codec_shape shape;
            struct kvl_codec_bytes bytes;
            assert_int_equal(kvl_codec_shape(&instance, roles[r], rows[i].d, P, &shape), KVL_OK);
            assert_int_equal(kvl_codec_bytes(&instance, roles[r], rows[i].d, P, &bytes), KVL_OK);
            assert_int_equal(bytes.payload, P * rows[i].k_payload);
            assert_int_equal(bytes.scale, roles[r] == KVL_ROLE_K ? 0 : P * 4);
            assert_int_equal(bytes.index, P * rows[i].slots);
            assert_int_equal(bytes.payload + bytes.scale + bytes.index, shape.block_bytes);
            kvl_instance_free(&instance);
        }
    struct kvl_instance instance = instance_of("");
    struct kvl_codec_shape shape;
    assert_int_equal(kvl_codec_shape(&instance, KVL_ROLE_K, 320, P, &shape), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "kvquant: head_dim 320: must be a multiple of 8, at most 256");
    kvl_error_clear();
    kvl_instance_free(&instance);
}

/* The bytes are those of the block encoded at once, whatever the pieces. */
static void pieces_equal_the_whole(void **state)
{
    struct kvl_instance instance = instance_of("bits=3,outliers=8");
    for (int r = 0; r < 2; r++) {
        const struct kvl_codec_dims dims = {sizeof dims, roles[r], D, P};
        uint8_t whole[P * 64] = {0}, pieces[P * 64] = {0};
        struct taken taken = {.n = 0};
        assert_int_equal(calibrate(&instance, roles[r], D, SAMPLE, kvquant_sample, &taken), 0);
        assert_int_equal(codec()->ref_encode(instance.priv, &dims, taken.values, 0, P, kvquant_sample, whole), 0);
        for (uint32_t t = 0, n = 1; t < P; t += n, n = 1 + (n * 5 + t) % 13)
            assert_int_equal(codec()->ref_encode(instance.priv, &dims, taken.values, t, t + n > P ? P - t : n, kvquant_sample + t * D, pieces), 0);
        assert_memory_equal(whole, pieces, sizeof whole);
    }
    kvl_instance_free(&instance);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_equal_exact_k_means), cmocka_unit_test(calibration_stops_when_told), cmocka_unit_test(special_values),
        cmocka_unit_test(errors_are_bounded),         cmocka_unit_test(bytes_are_exact),             cmocka_unit_test(pieces_equal_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
