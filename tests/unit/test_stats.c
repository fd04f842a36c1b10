/* Statistics: against direct formulas and values computed with numpy. */
#include "rng.h"
#include "stats.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

static void assert_near(double got, double wanted, double tolerance)
{
    if (!(fabs(got - wanted) <= tolerance)) fail_msg("got %.17g, wanted %.17g within %g", got, wanted, tolerance);
}

static void moments_match_two_passes(void **state)
{
    enum { N = 1000 };
    const double offset = 1e6; /* large mean: the naive sum of squares loses 12 digits here */
    struct kvl_moments m = {0};
    double mean = 0, squares = 0;
    for (uint64_t i = 0; i < N; i++) mean += (offset + kvl_rng_normal(1, i)) / N;
    for (uint64_t i = 0; i < N; i++) squares += pow(offset + kvl_rng_normal(1, i) - mean, 2);
    for (uint64_t i = 0; i < N; i++) kvl_moments_add(&m, offset + kvl_rng_normal(1, i));
    assert_int_equal(m.n, N);
    assert_near(m.mean, mean, 1e-8);
    assert_near(kvl_moments_var(&m), squares / (N - 1), 1e-8);
    assert_near(kvl_moments_se(&m), sqrt(squares / (N - 1) / N), 1e-9);
}

static void few_values_have_no_variance(void **state)
{
    struct kvl_moments m = {0};
    assert_near(kvl_moments_var(&m), 0, 0);
    assert_near(kvl_moments_se(&m), 0, 0);
    kvl_moments_add(&m, 5);
    assert_near(m.mean, 5, 0);
    assert_near(kvl_moments_var(&m), 0, 0);
}

/* numpy.quantile([3.5, -1, 2, 8, 0.25, 2, 7], q) */
static void quantiles_match_numpy(void **state)
{
    static const struct {
        double q, wanted;
    } cases[] = {{0.0, -1.0}, {0.01, -0.925}, {0.1, -0.25},   {0.25, 1.125}, {0.5, 2.0},
                 {0.9, 7.4},  {0.95, 7.7},    {0.999, 7.994}, {1.0, 8.0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float values[] = {3.5f, -1.0f, 2.0f, 8.0f, 0.25f, 2.0f, 7.0f};
        assert_near(kvl_quantile(values, 7, cases[i].q), cases[i].wanted, 1e-12);
    }
}

static void quantiles_of_odd_inputs(void **state)
{
    float one[] = {4.0f}, with_nan[] = {NAN, 1.0f, 2.0f, 3.0f}, infinite[] = {INFINITY, 1.0f, 2.0f};
    assert_true(isnan(kvl_quantile(one, 0, 0.5)));
    assert_near(kvl_quantile(one, 1, 0.3), 4, 0);
    assert_true(isnan(kvl_quantile(with_nan, 4, 1.0)));
    assert_near(kvl_quantile(with_nan, 4, 0.0), 1, 0);
    assert_near(kvl_quantile(infinite, 3, 0.5), 2, 0);
    assert_true(kvl_quantile(infinite, 3, 2.0) == INFINITY); /* q is clamped */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moments_match_two_passes),      cmocka_unit_test(few_values_have_no_variance),
        cmocka_unit_test(quantiles_match_numpy),         cmocka_unit_test(quantiles_of_odd_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
