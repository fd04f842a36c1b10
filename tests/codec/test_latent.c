/* The projection `latent` without a device: its table against what made the rows, the error that only falls with the rank, and both matrices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "mem.h"
#include "registry.h"
#include "rng.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 2, D = 24, W = HEADS * D, ROWS = 500, PLANTED = 5 };

static float x[ROWS * W], table[W + W * W];
static uint32_t n_table;

static int put(void *context, const char *name, uint32_t n, const float *values)
{
    if (n_table + n > sizeof table / sizeof *table) return 1;
    memcpy(table + n_table, values, n * sizeof *values);
    n_table += n;
    return 0;
}

static const struct kvl_projection *latent(void) { return (const struct kvl_projection *)kvl_registry_find(KVL_KIND_PROJECTION, "latent"); }

static const struct kvl_projection_dims dims = {sizeof dims, KVL_ROLE_K, D, 0};

static struct kvl_instance open_latent(uint32_t rank)
{
    char options[64];
    struct kvl_instance instance;
    snprintf(options, sizeof options, "rank=%u,heads=%d", rank, HEADS);
    assert_int_equal(kvl_instance_new(&latent()->head, options, &instance), KVL_OK);
    return instance;
}

/* Rows in a space of PLANTED directions, of falling size, and a little of everything. */
static void calibrate(double noise)
{
    struct kvl_instance instance = open_latent(8);
    const struct kvl_calibration out = {sizeof out, 0, NULL, put};
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t c = 0; c < W; c++) {
            double sum = noise * kvl_rng_normal(9, (uint64_t)t * W + c);
            for (uint32_t k = 0; k < PLANTED; k++) sum += (PLANTED - k) * kvl_rng_normal(1, (uint64_t)t * PLANTED + k) * kvl_rng_normal(2, k * W + c);
            x[t * W + c] = (float)sum;
        }
    n_table = 0;
    assert_int_equal(latent()->calibrate(instance.priv, &dims, ROWS, x, &out), 0);
    assert_int_equal(n_table, W + W * W);
    kvl_instance_free(&instance);
}

/* Mean |x - y|^2 of the calibration rows at a rank. */
static double error_at(uint32_t rank)
{
    static float down[W * W], up[W * W];
    double sum = 0.0;
    struct kvl_instance instance = open_latent(rank);
    assert_int_equal(latent()->matrices(instance.priv, &dims, table, down, up), 0);
    for (uint32_t t = 0; t < ROWS; t++) {
        double z[W] = {0};
        for (uint32_t i = 0; i < W; i++)
            for (uint32_t r = 0; r < rank; r++) z[r] += (double)x[t * W + i] * down[i * rank + r];
        for (uint32_t i = 0; i < W; i++) {
            double y = 0.0;
            for (uint32_t r = 0; r < rank; r++) y += z[r] * up[i * rank + r];
            sum += (x[t * W + i] - y) * (x[t * W + i] - y);
        }
    }
    kvl_instance_free(&instance);
    return sum / ROWS;
}

static void error_falls_with_rank(void **state)
{
    double last = INFINITY, all = 0.0;
    calibrate(0.3);
    for (uint32_t i = 0; i < W; i++) all += table[i];
    for (uint32_t rank = 8; rank <= W; rank += 8) {
        double tail = 0.0;
        for (uint32_t i = rank; i < W; i++) tail += table[i];
        const double error = error_at(rank);
        assert_true(error <= last * (1 + 1e-12) + 1e-9 * all);
        assert_true(fabs(error - tail) < 1e-5 * all); /* what the directions leave out is the rest of the energy */
        last = error;
    }
    assert_true(last < 1e-9 * all); /* all directions leave nothing out */
}

/* Without noise five directions hold everything. */
static void planted_directions_are_found(void **state)
{
    calibrate(0.0);
    for (uint32_t i = 1; i < W; i++) assert_true(table[i] <= table[i - 1]);
    assert_true(table[PLANTED] < 1e-9 * table[0] && table[PLANTED - 1] > 1e-3 * table[0]);
    assert_true(error_at(8) < 1e-9 * table[0]);
}

static void directions_are_orthonormal(void **state)
{
    calibrate(0.3);
    for (uint32_t a = 0; a < W; a++)
        for (uint32_t b = 0; b <= a; b++) {
            double dot = 0.0;
            for (uint32_t i = 0; i < W; i++) dot += (double)table[W + a * W + i] * table[W + b * W + i];
            assert_true(fabs(dot - (a == b)) < 1e-6);
        }
}

static void ranks_out_of_range_are_refused(void **state)
{
    static const char *const wrong[] = {"rank=56,heads=2", "rank=12", "rank=8,heads=1000"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvl_instance instance;
        struct kvl_projection_shape shape;
        assert_int_equal(kvl_instance_new(&latent()->head, wrong[i], &instance), KVL_OK);
        assert_int_equal(kvl_projection_shape(&instance, KVL_ROLE_V, D, &shape), KVL_E_USAGE);
        kvl_instance_free(&instance);
    }
    kvl_error_clear();
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_falls_with_rank),
        cmocka_unit_test(planted_directions_are_found),
        cmocka_unit_test(directions_are_orthonormal),
        cmocka_unit_test(ranks_out_of_range_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
