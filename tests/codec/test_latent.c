/* The projection `latent` without a device: its table against what made the rows and against Palu's whitened SVD (data/golden/README.md), the error
 * that only falls with the rank, both matrices, and the ranks that layers get. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "mem.h"
#include "registry.h"
#include "rng.h"
#include "../../data/golden/latent_answers.h"
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

static struct kvl_instance open_options(const char *form, double number)
{
    char options[64];
    struct kvl_instance instance;
    snprintf(options, sizeof options, form, number);
    assert_int_equal(kvl_instance_new(&latent()->head, options, &instance), KVL_OK);
    return instance;
}

static struct kvl_instance open_latent(uint32_t rank) { return open_options("rank=%g,heads=2", rank); }

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
    const struct kvl_projection_dims of_layer = {sizeof of_layer, KVL_ROLE_K, D, rank};
    assert_int_equal(latent()->matrices(instance.priv, &of_layer, table, down, up), 0);
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

/* What the SVD of the key matrix gives when the hidden rows have whitened it, the rows' own directions give. */
static void equals_palu(void **state)
{
    static float down[PALU_WIDTH * PALU_RANK], up[PALU_WIDTH * PALU_RANK];
    const struct kvl_projection_dims row = {sizeof row, KVL_ROLE_K, PALU_WIDTH / 2, PALU_RANK};
    struct kvl_instance instance = open_latent(PALU_RANK);
    const struct kvl_calibration out = {sizeof out, 0, NULL, put};
    double worst = 0.0;
    n_table = 0;
    assert_int_equal(latent()->calibrate(instance.priv, &row, PALU_ROWS, palu_key, &out), 0);
    assert_int_equal(latent()->matrices(instance.priv, &row, table, down, up), 0);
    for (uint32_t i = 0; i < PALU_WIDTH; i++) assert_true(fabs(table[i] - palu_energy[i]) <= 1e-5 * palu_energy[i]);
    for (uint32_t t = 0; t < PALU_ROWS; t++)
        for (uint32_t i = 0; i < PALU_WIDTH; i++) {
            double y = 0.0;
            for (uint32_t r = 0; r < PALU_RANK; r++)
                for (uint32_t j = 0; j < PALU_WIDTH; j++) y += (double)palu_key[t * PALU_WIDTH + j] * down[j * PALU_RANK + r] * up[i * PALU_RANK + r];
            worst = fmax(worst, fabs(y - palu_again[t * PALU_WIDTH + i]));
        }
    print_message("    keys made again differ by %.1e of %.1f\n", worst, sqrt(palu_energy[0]));
    assert_true(worst < 1e-5 * sqrt(palu_energy[0]));
    kvl_instance_free(&instance);
}

/* A table for each stream, of which only the energies matter here. */
static void layers_get_their_ranks(void **state)
{
    enum { TABLE = RANKED_W + RANKED_W * RANKED_W, ROW_HEADS = 2 };
    static float tables[RANKED_LAYERS * RANKED_STREAMS * TABLE];
    for (size_t s = 0; s < RANKED_LAYERS * RANKED_STREAMS; s++) memcpy(tables + s * TABLE, ranked_energy + s * RANKED_W, RANKED_W * sizeof *tables);
    const struct kvl_projection_tables in = {sizeof in, RANKED_LAYERS, RANKED_STREAMS, TABLE, tables};
    for (uint32_t i = 0; i < RANKED_SHARES + RANKED_MEANS; i++) {
        const bool by_share = i < RANKED_SHARES;
        const uint32_t m = by_share ? i : i - RANKED_SHARES, *wanted = (by_share ? ranked_by_share : ranked_by_mean) + m * RANKED_LAYERS;
        struct kvl_instance instance =
            by_share ? open_options("energy=%.9g,heads=2", ranked_share[m]) : open_options("rank=%g,ranks=spread,heads=2", ranked_mean[m]);
        for (uint32_t l = 0; l < RANKED_LAYERS; l++) {
            uint32_t rank = 0;
            assert_int_equal(kvl_projection_rank(&instance, KVL_ROLE_V, RANKED_W / ROW_HEADS, &in, l, &rank), KVL_OK);
            assert_int_equal(rank, wanted[l]);
        }
        kvl_instance_free(&instance);
    }
}

static void ranks_out_of_range_are_refused(void **state)
{
    static const char *const wrong[] = {"rank=56,heads=2", "rank=12", "rank=8,heads=1000", "rank=8,layers=700", "rank=80,layers=3", "rank=8,spread", "rank=32,spread"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvl_instance instance;
        struct kvl_projection_shape shape;
        assert_int_equal(kvl_instance_new(&latent()->head, wrong[i], &instance), KVL_OK);
        assert_int_equal(kvl_projection_shape(&instance, KVL_ROLE_V, D, &shape), KVL_E_USAGE);
        kvl_instance_free(&instance);
    }
    kvl_error_clear();
}

static int shape_without_layers(const void *priv, const struct kvl_projection_dims *d, struct kvl_projection_shape *out)
{
    const int failed = latent()->shape(priv, d, out);
    out->layers = 0;
    return failed;
}

/* A group of layers has one table of all their heads; a plug-in that does not say how many shares nothing between them. */
static void layers_share_a_row(void **state)
{
    struct kvl_projection older = *latent();
    struct kvl_projection_shape shape;
    struct kvl_instance instance = open_options("rank=%g,heads=2,layers=3", 3 * W);
    assert_int_equal(kvl_projection_shape(&instance, KVL_ROLE_V, D, &shape), KVL_OK);
    assert_int_equal(shape.layers, 3);
    assert_int_equal(shape.table_floats, 3 * W + 9 * W * W);
    assert_int_equal(shape.rebuilt, 1);
    older.shape = shape_without_layers;
    instance.plugin = &older.head;
    assert_int_equal(kvl_projection_shape(&instance, KVL_ROLE_V, D, &shape), KVL_E_USAGE); /* the rank of three layers is too much for one */
    kvl_instance_free(&instance);
    instance = open_options("rank=%g,heads=2", 8);
    instance.plugin = &older.head;
    assert_int_equal(kvl_projection_shape(&instance, KVL_ROLE_V, D, &shape), KVL_OK);
    assert_int_equal(shape.layers, 1);
    kvl_instance_free(&instance);
    kvl_error_clear();
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_falls_with_rank),
        cmocka_unit_test(planted_directions_are_found),
        cmocka_unit_test(directions_are_orthonormal),
        cmocka_unit_test(equals_palu),
        cmocka_unit_test(layers_get_their_ranks),
        cmocka_unit_test(ranks_out_of_range_are_refused),
        cmocka_unit_test(layers_share_a_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
