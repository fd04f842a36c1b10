/* Runs a group of cmocka tests on every OpenCL device there is.
 *
 *   static const struct CMUnitTest tests[] = {cmocka_unit_test(adds), ...};   each test uses kvl_test_device
 *   int main(void) { return KVL_ON_EACH_DEVICE(tests); }
 *
 * The devices are those of the installed drivers (OCL_ICD_VENDORS, RUSTICL_ENABLE); $KVLAB_TEST_DEVICE narrows them to one. No device:
 * exit code 77, skipped. $KVLAB_TEST_FILTER runs the tests whose names match ("codes*"). A test that leaves a buffer in the ledger fails its device. */
#ifndef KVL_TEST_HARNESS_H
#define KVL_TEST_HARNESS_H
#include "device.h"
#include "mem.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Fails with the stored message if a call did not succeed. */
#define assert_ok(call)                                                                                                            \
    do {                                                                                                                           \
        if ((call) != KVL_OK) fail_msg("%s: %s", #call, kvl_error_text());                                                         \
    } while (0)

static struct kvl_device *kvl_test_device;

/* An emulated GPU (llvmpipe): minutes for what takes other devices seconds. Tests do a part of their rows there. */
static inline bool kvl_device_is_slow(void)
{
    return kvl_loops_are_cut(kvl_device_caps(kvl_test_device));
}

/* Mesa's rusticl makes a kernel's code anew at each launch, 5 to 12 ms of processor time: on such a device, tests of thousands of launches take fewer
 * tokens one by one, unless KVLAB_SLOW=1 asks for all. */
static inline bool kvl_launches_are_dear(void) { return kvl_device_is_slow() && getenv("KVLAB_SLOW") == NULL; }

/* Which rows of a long table a device does: each one on the first that is tried, every second one on further ones and with masked features unless KVLAB_SLOW=1,
 * each `slow`-th on llvmpipe. Most of the time goes to drivers, which compile each row's programs, and all of them get the same text. */
static unsigned kvl_devices_done; /* without llvmpipe */
static inline size_t kvl_row_step(size_t slow)
{
    if (kvl_device_is_slow()) return slow;
    const bool again = kvl_devices_done > 0 || getenv("KVLAB_MASK") != NULL;
    return again && getenv("KVLAB_SLOW") == NULL ? 2 : 1;
}

/* n floats, those of `values` or zeros. The caller frees it: kvl_buffer_free. */
static inline void kvl_new_float_buffer(const char *owner, uint64_t n, const float *values, struct kvl_buffer **out)
{
    assert_ok(kvl_buffer_new(kvl_test_device, owner, -1, KVL_MEM_SCRATCH, n * sizeof(float), true, out));
    if (values != NULL) assert_ok(kvl_buffer_write(*out, 0, n * sizeof(float), values));
}

/* Rows of a test's table to run: those whose text has $KVLAB_TEST_ROWS in it; all if it is unset. */
static inline bool kvl_row_is_wanted(const char *text)
{
    const char *wanted = getenv("KVLAB_TEST_ROWS");
    return wanted == NULL || strstr(text, wanted) != NULL;
}

static inline int kvl_on_device(const char *choice, const struct CMUnitTest *tests, size_t n_tests)
{
    struct kvl_ledger left;
    if (kvl_device_open(choice, &kvl_test_device) != KVL_OK) {
        fprintf(stderr, "%s\n", kvl_error_text());
        return 1;
    }
    const struct kvl_caps *caps = kvl_device_caps(kvl_test_device);
    char group[sizeof caps->name + sizeof caps->platform + 16];
    snprintf(group, sizeof group, "on %s (%s)", caps->name, caps->platform);
    if (getenv("KVLAB_TEST_FILTER")) cmocka_set_test_filter(getenv("KVLAB_TEST_FILTER"));
    int failed = _cmocka_run_group_tests(group, tests, n_tests, NULL, NULL);
    kvl_ledger_read(kvl_test_device, &left);
    if (left.n_buffers > 0) failed++;
    kvl_devices_done += !kvl_device_is_slow();
    kvl_device_close(&kvl_test_device);
    return failed;
}

static inline int kvl_on_each_device(const struct CMUnitTest *tests, size_t n_tests)
{
    struct kvl_caps *list = NULL;
    size_t n = 0;
    int failed = 0;
    char choice[24];
    if (getenv("KVLAB_TEST_DEVICE")) return kvl_on_device(getenv("KVLAB_TEST_DEVICE"), tests, n_tests);
    if (kvl_device_list(&list, &n) != KVL_OK) fprintf(stderr, "%s\n", kvl_error_text());
    kvl_free(&list);
    if (n == 0) {
        fprintf(stderr, "skipped: no OpenCL device\n");
        return 77;
    }
    for (size_t i = 0; i < n; i++) {
        snprintf(choice, sizeof choice, "%zu", i);
        failed += kvl_on_device(choice, tests, n_tests);
    }
    return failed > 0;
}
#define KVL_ON_EACH_DEVICE(tests) kvl_on_each_device(tests, sizeof(tests) / sizeof *(tests))

#endif
