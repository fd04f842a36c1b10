/* Launches, their errors, profiling samples and measured peaks, on every device. */
#include "kernel/test_harness.h"
#include <math.h>
#include <string.h>

static const struct kvl_source source = {
    "launch.cl", "kernel void add(global int *x, int term, uint scale, float f, ulong big, local int *room)\n"
                 "{\n"
                 "    const size_t i = get_global_id(0) + get_global_size(0) * get_global_id(1);\n"
                 "    room[get_local_id(0)] = term * (int)scale + (int)f + (int)(big >> 32);\n"
                 "    barrier(CLK_LOCAL_MEM_FENCE);\n"
                 "    x[i] += room[get_local_size(0) - 1 - get_local_id(0)];\n"
                 "}\n"
                 "kernel void is_null(global int *x, global int *maybe) { x[0] = maybe == 0; }\n"
                 "typedef struct { int a, b[3]; } four;\n"
                 "kernel void put(global int *x, int value, four many) { x[0] = value * 1000 + many.a * 100 + many.b[2]; }\n"};

enum { N = 64, BYTES = N * 4 };
static const size_t global[3] = {16, 4, 1}, local[3] = {8, 1, 1};
static const struct kvl_work work = {.bytes = 2 * BYTES, .flops = N};

static struct kvl_kernel *kernel_named(const char *name)
{
    struct kvl_program *program = NULL;
    struct kvl_kernel *kernel = NULL;
    assert_ok(kvl_program_get(kvl_test_device, &source, 1, NULL, &program));
    assert_ok(kvl_kernel_get(program, name, &kernel));
    return kernel;
}

static struct kvl_buffer *zeros(void)
{
    struct kvl_buffer *x = NULL;
    assert_ok(kvl_buffer_new(kvl_test_device, "x", -1, KVL_MEM_SCRATCH, BYTES, true, &x));
    return x;
}

/* Adds 3 * 10 + 2 + 1 = 33 to each element. */
static kvl_status launch_add(struct kvl_buffer *x)
{
    return KVL_LAUNCH(kvl_test_device, kernel_named("add"), global, local, work, KVL_BUF(x), KVL_I32(3), KVL_U32(10), KVL_F32(2.5f),
                      KVL_U64((uint64_t)1 << 32), KVL_LOCAL(8 * 4));
}

static void arguments_of_all_kinds_arrive_and_launches_are_in_order(void **state)
{
    struct kvl_buffer *x = zeros();
    int values[N];
    const uint64_t before = kvl_device_launches(kvl_test_device);
    for (int i = 0; i < 5; i++) assert_ok(launch_add(x));
    assert_int_equal(kvl_device_launches(kvl_test_device) - before, 5);
    assert_ok(kvl_device_finish(kvl_test_device));
    assert_ok(kvl_buffer_read(x, 0, BYTES, values));
    for (int i = 0; i < N; i++) assert_int_equal(values[i], 5 * 33);
    kvl_buffer_free(&x);
}

static void a_null_buffer_is_a_null_pointer(void **state)
{
    static const size_t one[3] = {1, 1, 1};
    struct kvl_buffer *x = zeros();
    int value = -1;
    assert_ok(KVL_LAUNCH(kvl_test_device, kernel_named("is_null"), one, one, work, KVL_BUF(x), KVL_BUF(NULL)));
    assert_ok(kvl_buffer_read(x, 0, 4, &value));
    assert_int_equal(value, 1);
    assert_ok(KVL_LAUNCH(kvl_test_device, kernel_named("is_null"), one, one, work, KVL_BUF(x), KVL_BUF(x)));
    assert_ok(kvl_buffer_read(x, 0, 4, &value));
    assert_int_equal(value, 0);
    kvl_buffer_free(&x);
}

/* Arguments that are those of the launch before are not set again; each that differs is, a new buffer at an old one's place among them. */
static void changed_arguments_arrive(void **state)
{
    static const size_t one[3] = {1, 1, 1};
    struct {
        int32_t a, b[3];
    } many = {1, {2, 3, 4}};
    static const struct {
        int value, a, last, new_buffer;
    } turns[] = {{1, 1, 4, 0}, {1, 1, 4, 0}, {2, 1, 4, 0}, {2, 1, 5, 0}, {2, 3, 5, 1}, {2, 3, 5, 1}, {1, 1, 4, 1}};
    struct kvl_buffer *x = zeros();
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        int got = -1;
        if (turns[i].new_buffer) {
            kvl_buffer_free(&x);
            x = zeros();
        }
        many.a = turns[i].a;
        many.b[2] = turns[i].last;
        assert_ok(KVL_LAUNCH(kvl_test_device, kernel_named("put"), one, one, work, KVL_BUF(x), KVL_I32(turns[i].value), KVL_STRUCT(many)));
        assert_ok(kvl_buffer_read(x, 0, 4, &got));
        assert_int_equal(got, turns[i].value * 1000 + turns[i].a * 100 + turns[i].last);
    }
    kvl_buffer_free(&x);
}

static void assert_refused(kvl_status status, const char *message)
{
    assert_int_equal(status, KVL_E_DEVICE);
    if (strstr(kvl_error_text(), message) == NULL) fail_msg("'%s' is not in '%s'", message, kvl_error_text());
    kvl_error_clear();
}

static void wrong_launches_are_refused(void **state)
{
    struct kvl_buffer *x = zeros();
    struct kvl_kernel *add = kernel_named("add"), *is_null = kernel_named("is_null");
    static const size_t odd[3] = {17, 4, 1}, none[3] = {0, 1, 1}, huge[3] = {1 << 20, 1, 1};
    const uint64_t before = kvl_device_launches(kvl_test_device);
    kvl_error_clear();
    assert_refused(KVL_LAUNCH(kvl_test_device, add, global, local, work, KVL_BUF(x)), "add takes 6 arguments, 1 given");
    assert_refused(KVL_LAUNCH(kvl_test_device, is_null, global, local, work, KVL_BUF(x), KVL_BUF(x), KVL_I32(1)),
                   "is_null takes 2 arguments, 3 given");
    assert_refused(KVL_LAUNCH(kvl_test_device, is_null, odd, local, work, KVL_BUF(x), KVL_BUF(x)), "is_null over 17 x 4 x 1");
    assert_refused(KVL_LAUNCH(kvl_test_device, is_null, none, local, work, KVL_BUF(x), KVL_BUF(x)), "not 0");
    assert_refused(KVL_LAUNCH(kvl_test_device, is_null, huge, huge, work, KVL_BUF(x), KVL_BUF(x)), "is_null over 1048576");
    assert_int_equal(kvl_device_launches(kvl_test_device), before);
    kvl_buffer_free(&x);
}

static void wrong_argument_size_names_the_argument(void **state)
{
    struct kvl_buffer *x = zeros();
    kvl_error_clear();
    assert_refused(KVL_LAUNCH(kvl_test_device, kernel_named("add"), global, local, work, KVL_BUF(x), KVL_U64(3), KVL_U32(10),
                              KVL_F32(2.5f), KVL_U64(1), KVL_LOCAL(32)),
                   "add: argument 1");
    kvl_buffer_free(&x);
}

static void samples_are_taken_once_and_in_order(void **state)
{
    struct kvl_sample *samples = NULL;
    struct kvl_buffer *x = zeros();
    size_t n = 99;
    assert_ok(launch_add(x));
    kvl_profile_on(kvl_test_device, true);
    for (int i = 0; i < 600; i++) { /* beyond the first room for events */
        if (i == 400) assert_ok(kvl_device_finish(kvl_test_device));
        assert_ok(launch_add(x));
    }
    kvl_profile_on(kvl_test_device, false);
    assert_ok(launch_add(x));
    assert_ok(kvl_profile_take(kvl_test_device, &samples, &n));
    assert_int_equal(n, 600);
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(samples[i].kernel, "add");
        assert_int_equal(samples[i].work.bytes, work.bytes);
        assert_int_equal(samples[i].work.flops, work.flops);
        assert_true(samples[i].queued_ns <= samples[i].submit_ns);
        assert_true(samples[i].submit_ns <= samples[i].start_ns);
        assert_true(samples[i].start_ns <= samples[i].end_ns);
        if (i > 0) assert_true(samples[i - 1].start_ns <= samples[i].start_ns);
        if (i > 0) assert_int_equal(samples[i].batch != samples[i - 1].batch, i == 400);
    }
    assert_true(samples[0].start_ns > 0);
    kvl_free(&samples);
    assert_ok(kvl_profile_take(kvl_test_device, &samples, &n));
    assert_int_equal(n, 0);
    kvl_free(&samples);
    kvl_profile_on(kvl_test_device, true); /* left for close to drop */
    assert_ok(launch_add(x));
    kvl_profile_on(kvl_test_device, false);
    kvl_buffer_free(&x);
}

static void a_refused_launch_leaves_no_sample(void **state)
{
    static const size_t huge[3] = {1 << 20, 1, 1};
    struct kvl_sample *samples = NULL;
    struct kvl_buffer *x = zeros();
    size_t n = 99;
    assert_ok(kvl_profile_take(kvl_test_device, &samples, &n));
    kvl_free(&samples);
    kvl_profile_on(kvl_test_device, true);
    assert_refused(KVL_LAUNCH(kvl_test_device, kernel_named("is_null"), huge, huge, work, KVL_BUF(x), KVL_BUF(x)), "is_null");
    kvl_profile_on(kvl_test_device, false);
    assert_ok(kvl_profile_take(kvl_test_device, &samples, &n));
    assert_int_equal(n, 0);
    kvl_free(&samples);
    kvl_buffer_free(&x);
}

static void kernel_info_is_answered(void **state)
{
    uint64_t private_bytes, local_bytes, multiple;
    assert_ok(kvl_kernel_info(kernel_named("add"), &private_bytes, &local_bytes, &multiple));
    assert_true(multiple >= 1);
}

static void measured_peaks_are_positive_and_leave_nothing_behind(void **state)
{
    if (strcmp(kvl_device_caps(kvl_test_device)->platform, "Oclgrind") == 0) skip(); /* a simulator: minutes */
    struct kvl_peaks peaks = {0};
    char before[65], after[65];
    assert_ok(kvl_device_source_sha256(kvl_test_device, before));
    assert_ok(kvl_device_measure(kvl_test_device, &peaks));
    assert_ok(kvl_device_source_sha256(kvl_test_device, after));
    assert_string_equal(before, after);
    const double values[] = {peaks.read_gbps, peaks.copy_gbps, peaks.fma_gflops, peaks.launch_us};
    for (int i = 0; i < 4; i++) assert_true(isfinite(values[i]) && values[i] > 0.0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(arguments_of_all_kinds_arrive_and_launches_are_in_order),
        cmocka_unit_test(a_null_buffer_is_a_null_pointer),
        cmocka_unit_test(changed_arguments_arrive),
        cmocka_unit_test(wrong_launches_are_refused),
        cmocka_unit_test(wrong_argument_size_names_the_argument),
        cmocka_unit_test(samples_are_taken_once_and_in_order),
        cmocka_unit_test(a_refused_launch_leaves_no_sample),
        cmocka_unit_test(kernel_info_is_answered),
        cmocka_unit_test(measured_peaks_are_positive_and_leave_nothing_behind),
    };
    return KVL_ON_EACH_DEVICE(tests);
}
