/* Kernel times by phase: what the kernels took, what lay between them, and what the host had for itself. */
#include "kerneltimes.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

static struct kvl_sample launch(const char *kernel, uint64_t batch, uint64_t start_ns, uint64_t end_ns)
{
    return (struct kvl_sample){.kernel = kernel, .start_ns = start_ns, .end_ns = end_ns, .batch = batch, .work = {.bytes = 100, .flops = 10}};
}

static void a_span_ends_where_the_host_waits(void **state)
{
    struct kvl_profile profile = {0};
    const struct kvl_sample tokens[] = {launch("a", 7, 10, 20), launch("b", 7, 22, 30), launch("a", 8, 100, 110), launch("b", 9, 150, 160)};
    assert_int_equal(kvl_profile_add(&profile, "tg3", 200, tokens, 4), KVL_OK);
    const struct kvl_phase_times *phase = kvl_profile_phase(&profile, "tg3");
    assert_non_null(phase);
    assert_int_equal(phase->busy_ns, 10 + 8 + 10 + 10);
    assert_int_equal(phase->span_ns, 20 + 10 + 10);
    assert_int_equal(phase->wall_ns, 200);
    const struct kvl_sample more[] = {launch("a", 10, 300, 305), launch("a", 10, 310, 320)};
    assert_int_equal(kvl_profile_add(&profile, "tg3", 50, more, 2), KVL_OK);
    phase = kvl_profile_phase(&profile, "tg3");
    assert_int_equal(phase->busy_ns, 38 + 15);
    assert_int_equal(phase->span_ns, 40 + 20);
    assert_int_equal(phase->steps, 2);
    kvl_profile_free(&profile);
}

static void kernels_are_summed_by_phase(void **state)
{
    struct kvl_profile profile = {.peaks = {.read_gbps = 10.0}};
    struct kvl_kernel_summary sum;
    const struct kvl_sample launches[] = {launch("a", 1, 0, 10), launch("b", 1, 20, 21), launch("a", 1, 30, 60)};
    assert_int_equal(kvl_profile_add(&profile, "pp8", 100, launches, 3), KVL_OK);
    assert_int_equal(kvl_profile_add(&profile, "tg1", 100, launches, 1), KVL_OK);
    assert_int_equal(profile.n_kernels, 3);
    kvl_kernel_summarize(&profile, &profile.kernel[0], &sum);
    assert_true(sum.ns_min == 10.0 && sum.ns_median == 20.0 && sum.ns_max == 30.0 && sum.ns_sum == 40.0);
    assert_true(sum.gbps == 5.0 && sum.read_share == 0.5 && isnan(sum.fma_share) && sum.peak_share == 0.5);
    assert_int_equal(kvl_profile_add(&profile, "nothing", 100, launches, 0), KVL_OK);
    assert_null(kvl_profile_phase(&profile, "nothing"));
    kvl_profile_free(&profile);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_span_ends_where_the_host_waits),
        cmocka_unit_test(kernels_are_summed_by_phase),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
