/* Tunables: declarations, settings, entries and their steps, the user's file. No device is needed. */
#include "embedded.h"
#include "file.h"
#include "mem.h"
#include "rng.h"
#include "kernel/test_harness.h"
#include "text.h"
#include "tuning.h"
#include <string.h>
#include <unistd.h>

static char path[64];

static const struct kvl_caps pocl = {.platform = "Portable Computing Language",
                                     .name = "pthread-testbridge",
                                     .vendor = "AuthenticAMD",
                                     .driver = "3.1+test",
                                     .type = KVL_DEVICE_CPU,
                                     .local_bytes = 1 << 20};

static int64_t got(const struct kvl_caps *caps, const char *kernel, const char *tunable, const char **source)
{
    static struct kvl_tuning tuning;
    size_t n;
    assert_ok(kvl_tuning_lookup(caps, &tuning));
    if (source != NULL) *source = tuning.source[kvl_tune_kernel_find(kernel) - kvl_tune_kernels(&n)];
    return kvl_tuned(&tuning, kernel, tunable, false);
}

static void write_file(const char *text) { assert_ok(kvl_file_write(path, text, strlen(text))); }

/* A lookup with stderr in a file: its text, kvl_free. */
static char *warnings_of(const struct kvl_caps *caps, struct kvl_tuning *tuning)
{
    char name[] = "/tmp/kvl_tuning_XXXXXX", *text = NULL;
    size_t size;
    fflush(stderr);
    const int kept = dup(STDERR_FILENO), fd = mkstemp(name);
    assert_true(kept >= 0 && fd >= 0 && dup2(fd, STDERR_FILENO) >= 0);
    assert_ok(kvl_tuning_lookup(caps, tuning));
    fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(fd);
    close(kept);
    assert_ok(kvl_file_read(name, &text, &size));
    unlink(name);
    return text;
}

static void declarations(void **state)
{
    static const char *const names[] = {"attend", "clblast", "gemm", "gemv"};
    const struct kvl_setting defaults = {0};
    const struct kvl_caps least = {.local_bytes = 32 << 10, .max_work_group = 64};
    size_t n;
    const struct kvl_tune_kernel *kernel = kvl_tune_kernels(&n);
    assert_int_equal(n, sizeof names / sizeof *names);
    for (size_t i = 0; i < n; i++) {
        struct kvl_setting setting;
        assert_string_equal(kernel[i].name, names[i]);
        assert_true(kernel[i].n_tunables > 0 && kernel[i].metric[0] != '\0');
        assert_ok(kvl_setting_check(&kernel[i], &defaults, &least)); /* the defaults run on the smallest device known */
        for (size_t k = 0; k < kernel[i].n_attempts; k++) assert_ok(kvl_setting_parse(&kernel[i], kernel[i].attempt[k], &setting));
    }
    assert_int_equal(kvl_tuned(NULL, "gemm", "tile", false), kvl_tune_kernel_find("gemm")->tunable[3].value[0].number);
    assert_int_equal(kvl_tuned(NULL, "gemm", "product", false), 0);
}

static void settings(void **state)
{
    const struct kvl_tune_kernel *gemm = kvl_tune_kernel_find("gemm");
    struct kvl_setting setting, again;
    struct kvl_text text = {0};
    assert_ok(kvl_setting_parse(gemm, " tile=4  cols=96 # why\n", &setting));
    assert_int_equal(kvl_setting_value(gemm, &setting, "tile"), 4);
    assert_int_equal(kvl_setting_value(gemm, &setting, "cols"), 96);
    assert_int_equal(kvl_setting_value(gemm, &setting, "tokens"), 96);
    assert_false(kvl_setting_reorders(gemm, &setting));
    assert_ok(kvl_setting_print(gemm, &setting, &text));
    assert_string_equal(text.data, "product=own cols=96 tokens=96 tile=4");
    assert_ok(kvl_setting_parse(gemm, text.data, &again));
    assert_memory_equal(&setting, &again, sizeof setting);
    kvl_text_free(&text);
    assert_ok(kvl_setting_parse(gemm, "product=clblast", &setting));
    assert_int_equal(kvl_setting_value(gemm, &setting, "product"), 1);
    assert_true(kvl_setting_reorders(gemm, &setting));
    static const char *const wrong[] = {"tile=5",  "tile", "tile=",          "height=2",       "=4", "tile=4=4", "tile=6 tokens",
                                        "tile=-4", "TILE=4", "tokens=24 tile=12 cols", "tile=4444444444444444444444444444444444444444"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(kvl_setting_parse(gemm, wrong[i], &setting), KVL_E_FORMAT);
        assert_true(kvl_error_text()[0] != '\0');
        kvl_error_clear();
    }
}

static void constraints(void **state)
{
    const struct kvl_tune_kernel *gemm = kvl_tune_kernel_find("gemm"), *clblast = kvl_tune_kernel_find("clblast"),
                                 *attend = kvl_tune_kernel_find("attend");
    struct kvl_setting setting;
    assert_ok(kvl_setting_parse(gemm, "cols=576 tokens=192", &setting));
    struct kvl_caps caps = {.local_bytes = 61440, .max_work_group = 128}; /* 64 * 576 + 128 * 192 */
    assert_ok(kvl_setting_check(gemm, &setting, &caps));
    caps.local_bytes--;
    assert_int_equal(kvl_setting_check(gemm, &setting, &caps), KVL_E_FORMAT);
    kvl_error_clear();
    assert_ok(kvl_setting_parse(attend, "group=128", &setting));
    assert_ok(kvl_setting_check(attend, &setting, &caps));
    assert_ok(kvl_setting_parse(attend, "group=256", &setting));
    assert_int_equal(kvl_setting_check(attend, &setting, &caps), KVL_E_FORMAT);
    assert_non_null(strstr(kvl_error_text(), "256 work-items in a group, the device has 128"));
    kvl_error_clear();
    assert_int_equal(kvl_setting_parse(clblast, "MWG=16", &setting), KVL_E_FORMAT); /* not a multiple of 8 x 4 */
    assert_non_null(strstr(kvl_error_text(), "MDIMC*VWM"));
    kvl_error_clear();
}

static void exact_sessions_keep_the_order_of_sums(void **state)
{
    struct kvl_text text = {0};
    struct kvl_tuning tuning;
    write_file("family pocl\ngemm product=clblast tile=4\nattend block=32 splits=8\n");
    assert_ok(kvl_tuning_lookup(&pocl, &tuning));
    assert_int_equal(kvl_tuned(&tuning, "gemm", "product", false), 1);
    assert_int_equal(kvl_tuned(&tuning, "gemm", "product", true), 0);
    assert_int_equal(kvl_tuned(&tuning, "gemm", "tile", true), 4);
    assert_int_equal(kvl_tuned(&tuning, "attend", "block", true), 64);
    assert_int_equal(kvl_tuned(&tuning, "attend", "splits", true), 4);
    assert_ok(kvl_tuned_defines(&tuning, "gemm", true, &text));
    assert_non_null(strstr(text.data, " -DKVL_GEMM_TILE=4"));
    assert_null(strstr(text.data, "PRODUCT")); /* a word: not for the text */
    kvl_text_free(&text);
}

static void steps_of_the_lookup(void **state)
{
    struct kvl_caps caps = pocl;
    const char *source;
    write_file("# a comment\n\nvendor cpu AuthenticAMD\ngemv pairs=4\ngemm tile=4\n"
               "device pthread-testbridge | 3.1+test\ngemv pairs=32 # measured\n"
               "family pocl\n  gemv pairs=8  \n"
               "device pthread-other | 3.1+test\ngemv groups=8\n");
    const int64_t default_pairs = kvl_tuned(NULL, "gemv", "pairs", false);
    assert_int_equal(got(&caps, "gemv", "pairs", &source), 32);
    assert_non_null(strstr(source, "device entry, "));
    assert_int_equal(got(&caps, "gemm", "tile", &source), 4); /* kernel by kernel */
    assert_non_null(strstr(source, "vendor"));
    assert_int_equal(got(&caps, "attend", "block", &source), 64);
    strcpy(caps.driver, "3.2"); /* another driver is another device */
    assert_int_equal(got(&caps, "gemv", "pairs", &source), 8);
    assert_non_null(strstr(source, "family pocl"));
    strcpy(caps.platform, "Another");
    assert_int_equal(got(&caps, "gemv", "pairs", NULL), 4);
    caps.type = KVL_DEVICE_GPU;
    assert_int_equal(got(&caps, "gemv", "pairs", &source), default_pairs);
    assert_string_equal(source, "built-in");
    caps = pocl;
    caps.masked = true; /* KVLAB_MASK: other kernels than those that were measured */
    assert_int_equal(got(&caps, "gemv", "pairs", &source), default_pairs);
    assert_string_equal(source, "built-in");
}

static void unknown_devices_are_untuned(void **state)
{
    const struct kvl_caps nothing = {0};
    const char *source;
    unlink(path);
    assert_int_equal(got(&nothing, "gemm", "cols", &source), 192);
    assert_string_equal(source, "built-in");
    setenv("KVLAB_TUNE_FILE", "", 1);
    assert_int_equal(got(&nothing, "gemm", "cols", NULL), 192);
    setenv("KVLAB_TUNE_FILE", path, 1);
}

/* Each wrong line is named and ignored; what is right around it counts. */
static void wrong_lines(void **state)
{
    char *text;
    struct kvl_tuning tuning;
    write_file("gemv pairs=8\nfamily pocl\ngemv pairs=5\ngemm cols=576 tokens=192 tile=4\nconv tile=3\n");
    struct kvl_caps small = pocl;
    small.local_bytes = 32 << 10;
    text = warnings_of(&small, &tuning);
    assert_non_null(strstr(text, "line 1 ignored: a setting before"));
    assert_non_null(strstr(text, "line 3 ignored: gemv: pairs=5 is not legal; one of "));
    assert_non_null(strstr(text, "line 4 ignored: gemm: 61440 bytes of local memory"));
    assert_non_null(strstr(text, "more lines ignored"));
    kvl_free(&text);
    assert_int_equal(kvl_tuned(&tuning, "gemv", "pairs", false), kvl_tuned(NULL, "gemv", "pairs", false));
    assert_int_equal(kvl_tuned(&tuning, "gemm", "tile", false), kvl_tuned(NULL, "gemm", "tile", false));
    text = warnings_of(&pocl, &tuning);
    assert_int_equal(kvl_tuned(&tuning, "gemm", "tile", false), 4);
    kvl_free(&text);
    assert_int_equal(kvl_error_text()[0], '\0');
}

static void damaged_files(void **state)
{
    static const char good[] = "device pthread-testbridge | 3.1+test\ngemm product=clblast cols=96 tokens=48 tile=4\nclblast MWG=32\nfamily pocl\n"
                               "attend block=32 rows=6\nvendor cpu AuthenticAMD\ngemv pairs=8 groups=1\n";
    struct kvl_tuning tuning;
    char bytes[4 * sizeof good];
    print_message("seed 1\n");
    for (uint64_t round = 0; round < 400; round++) {
        size_t n = sizeof good - 1;
        memcpy(bytes, good, n);
        if (round % 4 == 0) n = kvl_rng_u64(1, round) % n; /* cut off */
        for (uint64_t k = 0; k < round % 7; k++) bytes[kvl_rng_u64(2, 100 * round + k) % (n + 1)] = (char)kvl_rng_u64(3, 100 * round + k);
        if (round % 5 == 0)
            for (; n < sizeof bytes; n++) bytes[n] = (char)(1 + kvl_rng_u64(4, n + round) % 255); /* a long last line */
        assert_ok(kvl_file_write(path, bytes, n));
        char *warnings = warnings_of(&pocl, &tuning);
        kvl_free(&warnings);
        size_t n_kernels;
        const struct kvl_tune_kernel *kernel = kvl_tune_kernels(&n_kernels);
        for (size_t i = 0; i < n_kernels; i++) assert_ok(kvl_setting_check(&kernel[i], &tuning.setting[i], &pocl));
    }
}

static void entries_of_this_repository(void **state)
{
    for (const struct kvl_embedded *file = kvl_embedded; file->path != NULL; file++) {
        if (strncmp(file->path, "data/tune/", 10) != 0 || strstr(file->path, ".txt") == NULL) continue;
        write_file(file->text);
        struct kvl_tuning tuning;
        char *text = warnings_of(&pocl, &tuning);
        if (*text != '\0') fail_msg("%s: %s", file->path, text);
        kvl_free(&text);
    }
}

static char *content(void)
{
    char *text = NULL;
    size_t size;
    assert_ok(kvl_file_read(path, &text, &size));
    return text;
}

static void saved_entries(void **state)
{
    const struct kvl_tune_kernel *gemv = kvl_tune_kernel_find("gemv"), *gemm = kvl_tune_kernel_find("gemm");
    struct kvl_setting setting;
    char *first, *text;
    unlink(path);
    assert_ok(kvl_setting_parse(gemv, "pairs=8 groups=2", &setting));
    assert_ok(kvl_tuning_save(path, &pocl, gemv, &setting, "12 GB/s"));
    assert_int_equal(got(&pocl, "gemv", "pairs", NULL), 8);
    first = content();
    assert_string_equal(first, "device pthread-testbridge | 3.1+test\ngemv pairs=8 groups=2  # 12 GB/s\n");
    assert_ok(kvl_tuning_save(path, &pocl, gemv, &setting, "12 GB/s")); /* in place of itself */
    text = content();
    assert_string_equal(text, first);
    kvl_free(&text);
    kvl_free(&first);

    /* lines of others, comments and nonsense stay; an older entry for the same kernel goes, wherever it is */
    write_file("# mine\ndevice pthread-testbridge | 3.1+test\ngemv pairs=4\ngemm tile=4\nnonsense\nfamily pocl\ngemv pairs=32\n"
               "device pthread-testbridge | 3.1+test\ngemv groups=8");
    assert_ok(kvl_tuning_save(path, &pocl, gemv, &setting, ""));
    text = content();
    assert_string_equal(text, "# mine\ndevice pthread-testbridge | 3.1+test\ngemm tile=4\nnonsense\nfamily pocl\ngemv pairs=32\n"
                              "device pthread-testbridge | 3.1+test\ngemv pairs=8 groups=2\n");
    kvl_free(&text);
    assert_ok(kvl_setting_parse(gemm, "tile=8", &setting));
    write_file("family pocl\ngemv pairs=32");
    assert_ok(kvl_tuning_save(path, &pocl, gemm, &setting, ""));
    assert_int_equal(got(&pocl, "gemv", "pairs", NULL), 32);
    assert_int_equal(got(&pocl, "gemm", "tile", NULL), 8);
    assert_int_equal(kvl_tuning_save("/proc/kvl/tune.txt", &pocl, gemm, &setting, ""), KVL_E_IO);
    kvl_error_clear();
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(declarations),
        cmocka_unit_test(settings),
        cmocka_unit_test(constraints),
        cmocka_unit_test(exact_sessions_keep_the_order_of_sums),
        cmocka_unit_test(steps_of_the_lookup),
        cmocka_unit_test(unknown_devices_are_untuned),
        cmocka_unit_test(wrong_lines),
        cmocka_unit_test(damaged_files),
        cmocka_unit_test(entries_of_this_repository),
        cmocka_unit_test(saved_entries),
    };
    snprintf(path, sizeof path, "/tmp/kvl_tune_%ld.txt", (long)getpid());
    setenv("KVLAB_TUNE_FILE", path, 1);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
