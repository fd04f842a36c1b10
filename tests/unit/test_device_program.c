/* Programs on every device: composition, sharing, the cache on disk, messages. Counts builds through the room's own struct. */
#include "kernel/test_harness.h"
#include "device_internal.h"
#include "file.h"
#include <dirent.h>
#include <ftw.h>
#include <string.h>
#include <unistd.h>

static char cache_folder[] = "/tmp/kvlab-test-XXXXXX";

/* A kernel that stores `value`. */
static struct kvl_source stores(const char *value)
{
    static char text[256];
    snprintf(text, sizeof text, "kernel void store(global int *out) { out[0] = %s; }\n", value);
    return (struct kvl_source){"store.cl", text};
}

static int run_store(struct kvl_device *device, const struct kvl_source *source, const char *options)
{
    static const size_t one[3] = {1, 1, 1};
    struct kvl_program *program = NULL;
    struct kvl_kernel *kernel = NULL;
    struct kvl_buffer *out = NULL;
    int value = 0;
    assert_ok(kvl_buffer_new(device, "out", -1, KVL_MEM_SCRATCH, 4, true, &out));
    assert_ok(kvl_program_get(device, source, 1, options, &program));
    assert_ok(kvl_kernel_get(program, "store", &kernel));
    assert_ok(KVL_LAUNCH(device, kernel, one, one, (struct kvl_work){0}, KVL_BUF(out)));
    assert_ok(kvl_buffer_read(out, 0, 4, &value));
    kvl_buffer_free(&out);
    return value;
}

static int file_count;
static char last_file[4096];

static int note_file(const char *path, const struct stat *info, int type, struct FTW *at)
{
    if (type != FTW_F) return 0;
    file_count++;
    snprintf(last_file, sizeof last_file, "%s", path);
    return 0;
}

static int delete_entry(const char *path, const struct stat *info, int type, struct FTW *at) { return remove(path); }

static int count_cache_files(void)
{
    file_count = 0;
    nftw(cache_folder, note_file, 8, FTW_PHYS);
    return file_count;
}

/* Every test starts with an empty cache folder. */
static int empty_cache(void **state)
{
    nftw(cache_folder, delete_entry, 8, FTW_DEPTH | FTW_PHYS);
    return 0;
}

/* A second device object for the same device: it shares nothing with the first in memory. */
static struct kvl_device *reopen(void)
{
    struct kvl_caps *list = NULL;
    struct kvl_device *device = NULL;
    size_t n = 0;
    char choice[24];
    const struct kvl_caps *mine = kvl_device_caps(kvl_test_device);
    assert_ok(kvl_device_list(&list, &n));
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i].name, mine->name) != 0 || strcmp(list[i].platform, mine->platform) != 0) continue;
        snprintf(choice, sizeof choice, "%zu", i);
        assert_ok(kvl_device_open(choice, &device));
        break;
    }
    kvl_free(&list);
    assert_non_null(device);
    return device;
}

/* Runs a store kernel on a fresh device; returns how often it was compiled. */
static uint64_t builds_for(const char *value, int wanted)
{
    struct kvl_device *device = reopen();
    const struct kvl_source source = stores(value);
    assert_int_equal(run_store(device, &source, NULL), wanted);
    const uint64_t builds = device->builds;
    kvl_device_close(&device);
    return builds;
}

static void second_open_loads_the_binary(void **state)
{
    assert_int_equal(builds_for("41", 41), 1);
    assert_int_equal(count_cache_files(), 1);
    assert_int_equal(builds_for("41", 41), 0);
    assert_int_equal(count_cache_files(), 1);
}

static void changed_text_gives_new_output(void **state)
{
    assert_int_equal(builds_for("1", 1), 1);
    assert_int_equal(builds_for("2", 2), 1);
    assert_int_equal(builds_for("1", 1), 0);
}

static void spoil(void (*how)(char *data, size_t *size))
{
    char *data = NULL;
    size_t size = 0;
    assert_int_equal(count_cache_files(), 1);
    assert_ok(kvl_file_read(last_file, &data, &size));
    how(data, &size);
    assert_ok(kvl_file_write(last_file, data, size));
    kvl_free(&data);
}

static void flip_last_byte(char *data, size_t *size) { data[*size - 1] ^= 1; }
static void flip_middle(char *data, size_t *size) { data[*size / 2] ^= 0x40; }
static void flip_first_byte(char *data, size_t *size) { data[0] ^= 1; }
static void cut_in_half(char *data, size_t *size) { *size /= 2; }
static void cut_to_header(char *data, size_t *size) { *size = 74; }
static void cut_to_nothing(char *data, size_t *size) { *size = 0; }

/* Well-formed for us, nonsense for the driver: it has to refuse. Mesa's rusticl 22.3 ends the process instead. */
static void replace_by_other_bytes(char *data, size_t *size)
{
    char hex[65];
    *size = 74 + 4;
    memcpy(data + 74, "none", 4);
    assert_ok(kvl_sha256(data + 74, 4, hex));
    memcpy(data + 9, hex, 64);
}

static void damaged_entries_are_rebuilt(void **state)
{
    void (*const ways[])(char *, size_t *) = {flip_last_byte, flip_middle,    flip_first_byte,       cut_in_half,
                                              cut_to_header,  cut_to_nothing, replace_by_other_bytes};
    const bool refuses = strcmp(kvl_device_caps(kvl_test_device)->platform, "rusticl") != 0;
    assert_int_equal(builds_for("7", 7), 1);
    for (size_t i = 0; i < sizeof ways / sizeof *ways - !refuses; i++) {
        spoil(ways[i]);
        kvl_error_clear();
        assert_int_equal(builds_for("7", 7), 1);
        assert_string_equal(kvl_error_text(), "");
        assert_int_equal(builds_for("7", 7), 0);
    }
}

static void cache_can_be_switched_off(void **state)
{
    setenv("KVLAB_NO_PROGRAM_CACHE", "1", 1);
    assert_int_equal(builds_for("5", 5), 1);
    assert_int_equal(builds_for("5", 5), 1);
    assert_int_equal(count_cache_files(), 0);
    setenv("KVLAB_NO_PROGRAM_CACHE", "nobody's platform", 1);
    assert_int_equal(builds_for("5", 5), 1);
    assert_int_equal(builds_for("5", 5), 0);
    setenv("KVLAB_NO_PROGRAM_CACHE", kvl_device_caps(kvl_test_device)->platform, 1);
    assert_int_equal(builds_for("5", 5), 1);
    unsetenv("KVLAB_NO_PROGRAM_CACHE");
}

static void unwritable_cache_is_no_error(void **state)
{
    setenv("KVLAB_CACHE_DIR", "/proc/nowhere", 1);
    kvl_error_clear();
    assert_int_equal(builds_for("6", 6), 1);
    assert_string_equal(kvl_error_text(), "");
    setenv("KVLAB_CACHE_DIR", cache_folder, 1);
}

static void same_text_and_options_share_a_program(void **state)
{
    const struct kvl_source source = stores("N");
    struct kvl_program *a, *b, *c;
    struct kvl_kernel *k, *same;
    struct kvl_device *device = reopen();
    assert_ok(kvl_program_get(device, &source, 1, "-DN=1", &a));
    assert_ok(kvl_program_get(device, &source, 1, "-DN=1", &b));
    assert_ok(kvl_program_get(device, &source, 1, "-DN=2", &c));
    assert_ptr_equal(a, b);
    assert_ptr_not_equal(a, c);
    assert_int_equal(device->builds, 2);
    assert_ok(kvl_kernel_get(a, "store", &k));
    assert_ok(kvl_kernel_get(b, "store", &same));
    assert_ptr_equal(k, same);
    assert_int_equal(run_store(device, &source, "-DN=1"), 1);
    assert_int_equal(run_store(device, &source, "-DN=2"), 2);
    kvl_device_close(&device);
}

static void source_digest_follows_text_options_and_order(void **state)
{
    const struct kvl_source source = stores("N");
    static const char *const options[][2] = {{"-DN=1", "-DN=2"}, {"-DN=2", "-DN=1"}, {"-DN=1", "-DN=2"}};
    char hex[3][65], none[65];
    struct kvl_program *program;
    for (int i = 0; i < 3; i++) {
        struct kvl_device *device = reopen();
        assert_ok(kvl_device_source_sha256(device, none));
        for (int j = 0; j < 2; j++) assert_ok(kvl_program_get(device, &source, 1, options[i][j], &program));
        assert_ok(kvl_device_source_sha256(device, hex[i]));
        kvl_device_close(&device);
    }
    assert_string_not_equal(hex[0], hex[1]);
    assert_string_equal(hex[0], hex[2]);
    assert_string_not_equal(hex[0], none);
}

static void parts_see_the_facts_and_each_other(void **state)
{
    const struct kvl_caps *caps = kvl_device_caps(kvl_test_device);
    const struct kvl_source source = stores("KVL_HAS_FP16 + 2 * KVL_HAS_SUBGROUPS + 4 * KVL_HAS_INT_DOT + 8 * KVL_DEVICE_CPU");
    assert_int_equal(run_store(kvl_test_device, &source, ""),
                     caps->fp16 + 2 * caps->subgroups + 4 * caps->int_dot + 8 * (caps->type == KVL_DEVICE_CPU));
    const struct kvl_source parts[] = {{"first.cl", "#define ANSWER 42"},
                                       {"second.cl", "kernel void k(global int *x) { *x = ANSWER; }"}};
    struct kvl_program *program;
    assert_ok(kvl_program_get(kvl_test_device, parts, 2, NULL, &program));
}

/* A claimed capability must be usable in a program as it is built. */
static void capabilities_compile(void **state)
{
    static const struct kvl_source source = {
        "caps.cl", "#if KVL_HAS_FP16\n"
                   "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n"
                   "kernel void h(global half *x) { x[0] = x[1] * x[2]; }\n"
                   "#endif\n"
                   "#if KVL_HAS_SUBGROUPS\n"
                   "kernel void s(global float *x) { x[get_global_id(0)] = sub_group_reduce_add(x[get_global_id(0)]); }\n"
                   "#endif\n"
                   "#if KVL_HAS_INT_DOT\n"
                   "kernel void d(global uint *x, global int *y) { y[0] = dot_4x8packed_ss_int(x[0], x[1]); }\n"
                   "#endif\n"
                   "kernel void nothing(global int *x) { x[0] = 0; }\n"};
    struct kvl_program *program;
    assert_ok(kvl_program_get(kvl_test_device, &source, 1, NULL, &program));
}

static void build_errors_name_file_and_line(void **state)
{
    const struct kvl_source parts[] = {{"good.cl", "#define GOOD 1\n"},
                                       {"bad.cl", "kernel void k(global int *x)\n{\n    x[0] = missing_name;\n}\n"}};
    struct kvl_program *program = NULL;
    kvl_error_clear();
    assert_int_equal(kvl_program_get(kvl_test_device, parts, 2, NULL, &program), KVL_E_DEVICE);
    assert_non_null(strstr(kvl_error_text(), "good.cl + bad.cl"));
    assert_non_null(strstr(kvl_error_text(), "missing_name"));
    if (strcmp(kvl_device_caps(kvl_test_device)->platform, "Oclgrind") != 0) /* it does not follow #line */
        assert_non_null(strstr(kvl_error_text(), ":3:"));
    assert_int_equal(count_cache_files(), 0);
    kvl_error_clear();
}

static void missing_texts_and_kernels_are_errors(void **state)
{
    const struct kvl_source none = {"none.cl", kvl_source_text("none.cl")}, source = stores("3");
    struct kvl_program *program = NULL;
    struct kvl_kernel *kernel = NULL;
    assert_null(none.text);
    assert_non_null(kvl_source_text("measure.cl"));
    assert_int_equal(kvl_program_get(kvl_test_device, &none, 1, NULL, &program), KVL_E_UNSUPPORTED);
    assert_non_null(strstr(kvl_error_text(), "none.cl"));
    kvl_error_clear();
    assert_ok(kvl_program_get(kvl_test_device, &source, 1, NULL, &program));
    assert_int_equal(kvl_kernel_get(program, "absent", &kernel), KVL_E_DEVICE);
    assert_non_null(strstr(kvl_error_text(), "store.cl has no kernel 'absent'"));
    kvl_error_clear();
}

static void running_out_of_host_memory_is_clean(void **state)
{
    struct kvl_device *device = reopen();
    const struct kvl_source source = stores("9");
    for (long n = 1;; n++) {
        struct kvl_program *program = NULL;
        struct kvl_kernel *kernel = NULL;
        kvl_mem_fail_after(n);
        kvl_status status = kvl_program_get(device, &source, 1, NULL, &program);
        if (status == KVL_OK) status = kvl_kernel_get(program, "store", &kernel);
        kvl_mem_fail_after(0);
        kvl_error_clear();
        if (status == KVL_OK && n > 30) break;
        if (status != KVL_OK) assert_int_equal(status, KVL_E_MEMORY);
    }
    kvl_device_close(&device);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup(f, empty_cache)
    static const struct CMUnitTest tests[] = {
        TEST(second_open_loads_the_binary),
        TEST(changed_text_gives_new_output),
        TEST(damaged_entries_are_rebuilt),
        TEST(cache_can_be_switched_off),
        TEST(unwritable_cache_is_no_error),
        TEST(same_text_and_options_share_a_program),
        TEST(source_digest_follows_text_options_and_order),
        TEST(parts_see_the_facts_and_each_other),
        TEST(capabilities_compile),
        TEST(build_errors_name_file_and_line),
        TEST(missing_texts_and_kernels_are_errors),
        TEST(running_out_of_host_memory_is_clean),
    };
    if (mkdtemp(cache_folder) == NULL) return 1;
    setenv("KVLAB_CACHE_DIR", cache_folder, 1);
    unsetenv("KVLAB_NO_PROGRAM_CACHE");
    const int result = KVL_ON_EACH_DEVICE(tests);
    empty_cache(NULL);
    return result;
}
