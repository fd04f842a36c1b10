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

/* Published tables of the t distribution; df 1 is tan, df 2 has a closed form. */
static void student_t_matches_tables(void **state)
{
    static const struct {
        double q, df, t;
    } rows[] = {
        {0.975, 1, 12.706204736}, {0.975, 2, 4.302652730},  {0.975, 9, 2.262157163},     {0.975, 15, 2.131449546}, {0.975, 19, 2.093024054},
        {0.975, 39, 2.022690920}, {0.95, 30, 1.697260887},  {0.995, 100, 2.625890521},   {0.975, 1e6, 1.959966},   {0.6, 3, 0.276670662},
        {0.5, 7, 0},              {0.025, 9, -2.262157163},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_near(kvl_student_t_quantile(rows[i].q, rows[i].df), rows[i].t, 2e-6);
    assert_near(kvl_student_t_quantile(0.999, 2), 0.998 * sqrt(2.0 / (1.0 - 0.998 * 0.998)), 1e-9);
    assert_true(isnan(kvl_student_t_quantile(1, 5)) && isnan(kvl_student_t_quantile(0.5, 0)));
}

/* 16 values are the fewest that say anything; an interval around 0 says nothing either way. */
static void verdicts(void **state)
{
    static const struct {
        uint64_t n;
        double mean, spread;
        enum kvl_verdict verdict;
    } rows[] = {
        {15, 1, 0.1, KVL_EXPLORATORY}, {16, 1, 0.1, KVL_HIGHER},      {16, -1, 0.1, KVL_LOWER}, {16, 0.1, 1, KVL_NOT_RESOLVED},
        {1, 1, 0, KVL_EXPLORATORY},    {40, 0.4, 1, KVL_HIGHER}, {40, 0.3, 1, KVL_NOT_RESOLVED}, {16, 0, 0, KVL_EQUAL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct kvl_moments m = {.n = rows[i].n, .mean = rows[i].mean, .m2 = rows[i].spread * rows[i].spread * (double)(rows[i].n - 1)};
        const struct kvl_interval interval = kvl_t_interval(&m);
        if (kvl_verdict_of(&interval) != rows[i].verdict)
            fail_msg("row %zu: %s", i, kvl_verdict_name[kvl_verdict_of(&interval)]);
    }
    struct kvl_moments m = {.n = 20, .mean = 3, .m2 = 19 * 4};
    assert_near(kvl_t_interval(&m).high - 3, 2.093024054 * 2 / sqrt(20), 1e-8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moments_match_two_passes),
        cmocka_unit_test(student_t_matches_tables),
        cmocka_unit_test(verdicts),      cmocka_unit_test(few_values_have_no_variance),
        cmocka_unit_test(quantiles_match_numpy),         cmocka_unit_test(quantiles_of_odd_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
