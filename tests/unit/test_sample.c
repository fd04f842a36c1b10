/* Sampler: kept sets and frequencies of small distributions, agreement with a plain sort, refused input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "rng.h"
#include "sample.h"

static const struct kvl_sampler off = {.temperature = 1, .top_p = 1, .seed = 7};

static int32_t sample(const struct kvl_sampler *s, const float *logits, size_t n, uint64_t step)
{
    int32_t token = -1;
    assert_int_equal(kvl_sample(s, logits, n, step, &token), KVL_OK);
    assert_in_range(token, 0, n - 1);
    return token;
}

/* Frequencies over many steps lie within 5 standard deviations of p; what has p = 0 is never drawn. */
static void expect_distribution(const struct kvl_sampler *s, const double *odds, size_t n, const double *p)
{
    enum { DRAWS = 40000, N_MAX = 8 };
    float logits[N_MAX];
    size_t count[N_MAX] = {0};
    for (size_t i = 0; i < n; i++) logits[i] = (float)log(odds[i]);
    for (uint64_t step = 0; step < DRAWS; step++) count[sample(s, logits, n, step)]++;
    for (size_t i = 0; i < n; i++) {
        if (fabs((double)count[i] - DRAWS * p[i]) > 5 * sqrt(DRAWS * p[i] * (1 - p[i])))
            fail_msg("token %zu: %zu of %d, p %g", i, count[i], DRAWS, p[i]);
    }
}
#define EXPECT(sampler, odds, ...) expect_distribution(sampler, odds, sizeof odds / sizeof *odds, (const double[]){__VA_ARGS__})

static void test_greedy(void **state)
{
    const float logits[] = {-1, 3, 2.5f, 3, -INFINITY};
    struct kvl_sampler s = {.temperature = 0, .top_k = 1, .top_p = 0.1, .min_p = 1, .seed = 3};
    for (uint64_t step = 0; step < 50; step++) assert_int_equal(sample(&s, logits, 5, step), 1);
}

static void test_temperature(void **state)
{
    const double odds[] = {1, 4, 0, 3, 2};
    struct kvl_sampler s = off;
    EXPECT(&s, odds, 0.1, 0.4, 0, 0.3, 0.2);
    s.temperature = 0.5; /* odds squared */
    EXPECT(&s, odds, 1. / 30, 16. / 30, 0, 9. / 30, 4. / 30);
    s.temperature = 1e-6;
    EXPECT(&s, odds, 0, 1, 0, 0, 0);
}

static void test_top_k(void **state)
{
    const double odds[] = {1, 4, 3, 2}, equal[] = {2, 2, 2, 2};
    struct kvl_sampler s = off;
    s.top_k = 2;
    EXPECT(&s, odds, 0, 4. / 7, 3. / 7, 0);
    EXPECT(&s, equal, 0.5, 0.5, 0, 0); /* ties go to the lower id */
    s.top_k = 100;
    EXPECT(&s, odds, 0.1, 0.4, 0.3, 0.2);
}

static void test_top_p(void **state)
{
    const double odds[] = {0.15, 0.5, 0.05, 0.3};
    struct kvl_sampler s = off;
    s.top_p = 0.7;
    EXPECT(&s, odds, 0, 0.625, 0, 0.375);
    s.top_p = 1e-9;
    EXPECT(&s, odds, 0, 1, 0, 0);
}

static void test_min_p(void **state)
{
    const double odds[] = {0.15, 0.5, 0.05, 0.3};
    struct kvl_sampler s = off;
    s.min_p = 0.2;
    EXPECT(&s, odds, 0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95);
    s.min_p = 1;
    EXPECT(&s, odds, 0, 1, 0, 0);
}

static void test_order_of_filters(void **state)
{
    const double odds[] = {0.4, 0.3, 0.2, 0.1};
    struct kvl_sampler s = off;
    s.top_k = 2, s.top_p = 0.5; /* of the two kept the first has 4/7 already */
    EXPECT(&s, odds, 1, 0, 0, 0);
    s.top_k = 0, s.temperature = 2; /* top-p looks before temperature flattens: 0.4 + 0.3 */
    EXPECT(&s, odds, sqrt(0.4) / (sqrt(0.4) + sqrt(0.3)), sqrt(0.3) / (sqrt(0.4) + sqrt(0.3)), 0, 0);
    s.top_p = 1, s.min_p = 0.6; /* so does min-p: 0.24 */
    EXPECT(&s, odds, sqrt(0.4) / (sqrt(0.4) + sqrt(0.3)), sqrt(0.3) / (sqrt(0.4) + sqrt(0.3)), 0, 0);
}

/* ---- against a plain sort ---- */

struct ranked {
    double logit;
    int32_t id;
};

static int falling(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id - y->id;
}

static double sum_of(const struct ranked *r, size_t n, double temperature)
{
    double sum = 0;
    for (size_t i = n; i-- > 0;) sum += exp((r[i].logit - r[0].logit) / temperature);
    return sum;
}

enum { VOCABULARY = 500 };

static int32_t sorted_sample(const struct kvl_sampler *s, const float *logits, uint64_t step)
{
    struct ranked r[VOCABULARY];
    size_t n = VOCABULARY, i;
    double sum = 0;
    for (i = 0; i < n; i++) r[i] = (struct ranked){(double)logits[i], (int32_t)i};
    qsort(r, n, sizeof *r, falling);
    if (s->top_k > 0 && s->top_k < VOCABULARY) n = (size_t)s->top_k;
    const double top = s->top_p * sum_of(r, n, 1);
    for (i = 0; s->top_p < 1 && i < n && sum < top; i++) sum += exp(r[i].logit - r[0].logit);
    if (i > 0 && s->top_p < 1) n = i;
    while (n > 1 && exp(r[n - 1].logit - r[0].logit) < s->min_p) n--;
    const double wanted = kvl_rng_uniform(s->seed, step) * sum_of(r, n, s->temperature);
    for (i = 0, sum = 0; i < n; i++) {
        sum += exp((r[i].logit - r[0].logit) / s->temperature);
        if (sum > wanted) break;
    }
    return r[i].id;
}

static void test_against_sort(void **state)
{
    float logits[VOCABULARY];
    for (uint64_t step = 0; step < 2000; step++) {
        const struct kvl_sampler s = {.temperature = 0.2 + 2 * kvl_rng_uniform(1, step),
                                      .top_k = step % 3 == 0 ? 0 : (int64_t)(step % 600),
                                      .top_p = step % 5 == 0 ? 1 : 1 - kvl_rng_uniform(2, step),
                                      .min_p = step % 2 == 0 ? 0 : 0.1,
                                      .seed = step};
        for (uint64_t i = 0; i < VOCABULARY; i++)
            logits[i] = roundf(16 * (float)kvl_rng_normal(3 + step, i)) / 8; /* with many ties */
        assert_int_equal(sample(&s, logits, VOCABULARY, step), sorted_sample(&s, logits, step));
    }
}

static void test_steps_are_reproducible(void **state)
{
    enum { N = 64 };
    float logits[N];
    int32_t forward[N];
    struct kvl_sampler s = off, other = off;
    size_t differ = 0;
    other.seed++;
    for (uint64_t i = 0; i < N; i++) logits[i] = (float)kvl_rng_normal(1, i);
    for (uint64_t step = 0; step < N; step++) forward[step] = sample(&s, logits, N, step);
    for (uint64_t step = N; step-- > 0;) {
        assert_int_equal(sample(&s, logits, N, step), forward[step]);
        differ += sample(&other, logits, N, step) != forward[step];
    }
    assert_true(differ > N / 2);
}

static void expect_refused(const struct kvl_sampler *s, const float *logits, size_t n, kvl_status wanted)
{
    int32_t token;
    kvl_error_clear();
    assert_int_equal(kvl_sample(s, logits, n, 0, &token), wanted);
    assert_string_not_equal(kvl_error_text(), "");
}

static void test_refused_input(void **state)
{
    const float good[] = {1, 2}, not_a_number[] = {1, NAN}, infinite[] = {INFINITY, 1}, none[] = {-INFINITY, -INFINITY};
    struct kvl_sampler s = off;
    expect_refused(&s, good, 0, KVL_E_USAGE);
    expect_refused(&s, not_a_number, 2, KVL_E_VERIFY);
    expect_refused(&s, infinite, 2, KVL_E_VERIFY);
    expect_refused(&s, none, 2, KVL_E_VERIFY);
    s.temperature = 0, expect_refused(&s, not_a_number, 2, KVL_E_VERIFY);
    s.temperature = -1, expect_refused(&s, good, 2, KVL_E_USAGE);
    s.temperature = NAN, expect_refused(&s, good, 2, KVL_E_USAGE);
    s = off, s.top_k = -1, expect_refused(&s, good, 2, KVL_E_USAGE);
    s = off, s.top_p = 0, expect_refused(&s, good, 2, KVL_E_USAGE);
    s = off, s.top_p = 1.5, expect_refused(&s, good, 2, KVL_E_USAGE);
    s = off, s.min_p = -0.1, expect_refused(&s, good, 2, KVL_E_USAGE);
    s = off, s.min_p = NAN, expect_refused(&s, good, 2, KVL_E_USAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),        cmocka_unit_test(test_temperature),
        cmocka_unit_test(test_top_k),         cmocka_unit_test(test_top_p),
        cmocka_unit_test(test_min_p),         cmocka_unit_test(test_order_of_filters),
        cmocka_unit_test(test_against_sort),  cmocka_unit_test(test_steps_are_reproducible),
        cmocka_unit_test(test_refused_input),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
