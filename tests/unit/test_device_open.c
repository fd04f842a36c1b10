/* Listing, choosing and opening devices. */
#include "kernel/test_harness.h"
#include <ctype.h>
#include <string.h>

static struct kvl_caps *list;
static size_t n_list;

/* What a choice opens; the environment's own choice does not matter here. */
static void assert_opens(const char *choice, const struct kvl_caps *wanted)
{
    struct kvl_device *device = NULL;
    assert_ok(kvl_device_open(choice, &device));
    assert_string_equal(kvl_device_caps(device)->name, wanted->name);
    assert_string_equal(kvl_device_caps(device)->platform, wanted->platform);
    kvl_device_close(&device);
    assert_null(device);
}

static void lists_plausible_facts(void **state)
{
    for (size_t i = 0; i < n_list; i++) {
        const struct kvl_caps *c = list + i;
        assert_true(c->name[0] != '\0' && c->platform[0] != '\0' && c->version[0] != '\0' && c->driver[0] != '\0');
        assert_non_null(strstr(c->version, "OpenCL "));
        assert_true(c->compute_units > 0 && c->max_work_group > 0);
        assert_true(c->max_alloc_bytes > 0 && c->max_alloc_bytes <= c->global_bytes);
        assert_true(c->local_bytes >= 32 << 10);
    }
}

static void opens_by_index(void **state)
{
    char choice[24];
    for (size_t i = 0; i < n_list; i++) {
        snprintf(choice, sizeof choice, "%zu", i);
        assert_opens(choice, list + i);
    }
}

static void opens_by_part_of_the_platform_in_any_case(void **state)
{
    char choice[sizeof list->platform];
    for (size_t i = 0; i < n_list; i++) {
        for (size_t c = 0; c < sizeof choice; c++) choice[c] = (char)toupper((unsigned char)list[i].platform[c]);
        choice[strlen(choice) - 1] = '\0';
        assert_opens(choice, list + i);
    }
}

static void opens_by_type(void **state)
{
    for (size_t i = 0; i < n_list; i++) {
        size_t first = 0;
        while (list[first].type != list[i].type) first++;
        assert_opens(kvl_device_type_name[list[i].type], list + first);
    }
}

static void environment_chooses_when_the_caller_does_not(void **state)
{
    char choice[24];
    snprintf(choice, sizeof choice, "%zu", n_list - 1);
    setenv("KVLAB_DEVICE", choice, 1);
    assert_opens(NULL, list + n_list - 1);
    assert_opens("0", list);
    setenv("KVLAB_DEVICE", "", 1);
    size_t first = 0;
    for (size_t i = n_list; i-- > 0;)
        if (list[i].type == KVL_DEVICE_GPU || (list[i].type == KVL_DEVICE_CPU && list[first].type != KVL_DEVICE_GPU)) first = i;
    assert_opens(NULL, list + first);
    unsetenv("KVLAB_DEVICE");
}

static void no_match_lists_what_there_is(void **state)
{
    static const char *const wrong[] = {"no such device", "999", "-1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvl_device *device = NULL;
        kvl_error_clear();
        assert_int_equal(kvl_device_open(wrong[i], &device), KVL_E_USAGE);
        assert_null(device);
        assert_non_null(strstr(kvl_error_text(), wrong[i]));
        for (size_t d = 0; d < n_list; d++) assert_non_null(strstr(kvl_error_text(), list[d].name));
    }
    kvl_error_clear();
}

static void mask_clears_capabilities(void **state)
{
    char choice[24];
    setenv("KVLAB_MASK", "fp16,subgroups,int_dot", 1);
    for (size_t i = 0; i < n_list; i++) {
        struct kvl_device *device = NULL;
        snprintf(choice, sizeof choice, "%zu", i);
        assert_ok(kvl_device_open(choice, &device));
        const struct kvl_caps *c = kvl_device_caps(device);
        assert_false(c->fp16 || c->subgroups || c->int_dot);
        assert_int_equal(c->fp64, list[i].fp64);
        kvl_device_close(&device);
    }
    setenv("KVLAB_MASK", "subgroups", 1);
    struct kvl_device *device = NULL;
    assert_ok(kvl_device_open("0", &device));
    assert_int_equal(kvl_device_caps(device)->fp16, list->fp16);
    kvl_device_close(&device);
    setenv("KVLAB_MASK", "fp16,warp", 1);
    assert_int_equal(kvl_device_open("0", &device), KVL_E_USAGE);
    assert_non_null(strstr(kvl_error_text(), "'warp'"));
    kvl_error_clear();
    unsetenv("KVLAB_MASK");
}

static void running_out_of_host_memory_is_clean(void **state)
{
    for (long n = 1;; n++) {
        struct kvl_device *device = NULL;
        kvl_mem_fail_after(n);
        const kvl_status status = kvl_device_open("0", &device);
        kvl_mem_fail_after(0);
        kvl_error_clear();
        if (status == KVL_OK) {
            kvl_device_close(&device);
            assert_true(n > 5);
            return;
        }
        assert_int_equal(status, KVL_E_MEMORY);
        assert_null(device);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_plausible_facts),
        cmocka_unit_test(opens_by_index),
        cmocka_unit_test(opens_by_part_of_the_platform_in_any_case),
        cmocka_unit_test(opens_by_type),
        cmocka_unit_test(environment_chooses_when_the_caller_does_not),
        cmocka_unit_test(no_match_lists_what_there_is),
        cmocka_unit_test(mask_clears_capabilities),
        cmocka_unit_test(running_out_of_host_memory_is_clean),
    };
    unsetenv("KVLAB_DEVICE");
    unsetenv("KVLAB_MASK");
    if (kvl_device_list(&list, &n_list) != KVL_OK) return fprintf(stderr, "%s\n", kvl_error_text()), 1;
    const int result = n_list == 0 ? 77 : cmocka_run_group_tests(tests, NULL, NULL);
    kvl_free(&list);
    return result;
}
