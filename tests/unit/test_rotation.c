/* Rotations: orthogonal, Hadamard entries +-1, random ones by seed, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "mem.h"
#include "rotation.h"
#include <math.h>
#include <string.h>

/* R of head_dim channels by turning unit vectors: [D][D]. */
static float *whole(enum kvl_rotation kind, uint64_t seed, uint32_t d, bool inverse)
{
    uint32_t m;
    float *matrix = NULL, *rows = NULL;
    assert_int_equal(kvl_rotation_size(kind, d, &m), KVL_OK);
    assert_int_equal(d % m, 0);
    assert_int_equal(kvl_alloc(&matrix, 2 * (size_t)m * m, sizeof *matrix), KVL_OK);
    assert_int_equal(kvl_alloc(&rows, (size_t)d * d, sizeof *rows), KVL_OK);
    assert_int_equal(kvl_rotation_fill(kind, seed, d, m, matrix), KVL_OK);
    for (uint32_t i = 0; i < d; i++) {
        rows[(size_t)i * d + i] = 1.0f;
        assert_int_equal(kvl_rotate(matrix + (inverse ? (size_t)m * m : 0), m, d, rows + (size_t)i * d), KVL_OK);
    }
    kvl_free(&matrix);
    return rows;
}

static void assert_orthogonal(const float *r, uint32_t d)
{
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++) {
            double sum = 0.0;
            for (uint32_t c = 0; c < d; c++) sum += (double)r[(size_t)i * d + c] * r[(size_t)j * d + c];
            assert_true(fabs(sum - (i == j)) < 1e-6);
        }
}

static void check(enum kvl_rotation kind, uint32_t d)
{
    float *r = whole(kind, 7, d, false), *back = whole(kind, 7, d, true);
    assert_orthogonal(r, d);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++) {
            assert_true(fabsf(r[(size_t)i * d + j] - back[(size_t)j * d + i]) < 1e-7f);
            if (kind == KVL_ROT_HADAMARD) assert_true(fabs(fabs(r[(size_t)i * d + j]) * sqrt(d) - 1.0) < 1e-6);
        }
    kvl_free(&r);
    kvl_free(&back);
}

static void rotations_are_orthogonal(void **state)
{
    static const uint32_t sizes[] = {8, 16, 64, 128, 24, 40, 56, 72, 80, 88, 96, 112, 120, 192};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) check(KVL_ROT_HADAMARD, sizes[i]);
    check(KVL_ROT_RANDOM, 8);
    check(KVL_ROT_RANDOM, 64);
    check(KVL_ROT_RANDOM, 184);
}

/* Sylvester's sign is the parity of the common bits of row and column. */
static void powers_of_two_are_sylvesters(void **state)
{
    float *r = whole(KVL_ROT_HADAMARD, 0, 64, false);
    for (uint32_t i = 0; i < 64; i++)
        for (uint32_t j = 0; j < 64; j++) assert_true(r[i * 64 + j] == (__builtin_popcount(i & j) % 2 ? -0.125f : 0.125f));
    kvl_free(&r);
}

static void seeds_differ(void **state)
{
    float *a = whole(KVL_ROT_RANDOM, 1, 32, false), *b = whole(KVL_ROT_RANDOM, 2, 32, false), *c = whole(KVL_ROT_RANDOM, 1, 32, false);
    assert_memory_equal(a, c, 32 * 32 * sizeof *a);
    assert_memory_not_equal(a, b, 32 * 32 * sizeof *a);
    kvl_free(&a);
    kvl_free(&b);
    kvl_free(&c);
}

static void unknown_sizes_are_refused(void **state)
{
    uint32_t m;
    assert_int_equal(kvl_rotation_size(KVL_ROT_NONE, 184, &m), KVL_OK);
    assert_int_equal(m, 0);
    kvl_error_clear();
    assert_int_equal(kvl_rotation_size(KVL_ROT_HADAMARD, 184, &m), KVL_E_USAGE);
    assert_non_null(strstr(kvl_error_text(), "use rot=random"));
    kvl_error_clear();
    assert_int_equal(kvl_rotation_size(KVL_ROT_RANDOM, 184, &m), KVL_OK);
    assert_int_equal(m, 184);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rotations_are_orthogonal),
        cmocka_unit_test(powers_of_two_are_sylvesters),
        cmocka_unit_test(seeds_differ),
        cmocka_unit_test(unknown_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
