/* xcheck: what the compilers print is read right, occupancy follows from it, and the table comes back as it was written. */
#include "xcheck.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static const struct kvl_xcheck_target *target(const char *name)
{
    for (size_t i = 0; i < kvl_xcheck_n_targets; i++)
        if (strcmp(kvl_xcheck_targets[i].name, name) == 0) return kvl_xcheck_targets + i;
    fail_msg("no target %s", name);
    return NULL;
}

static void nvidia(void **state)
{
    static const char source[] = "#define WG_SIZE 128\nvoid use_kvl_attend(int kvl_attend);\n/* kvl_attend(x) */\n"
                                 "__attribute__((reqd_work_group_size(64, 1, 1))) kernel void other(int x) { x; }\n"
                                 "kernel __attribute__((reqd_work_group_size(WG_SIZE, 1, 1))) void\nkvl_attend(global int *x) {}\n"
                                 "kernel void kvl_merge(global int *x) {}\n";
    static const char log[] = "ptxas info    : 0 bytes gmem\n"
                              "ptxas info    : Compiling entry function 'kvl_attend' for 'sm_80'\n"
                              "ptxas info    : Function properties for kvl_attend\n"
                              "    2672 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
                              "ptxas info    : Used 255 registers, used 1 barriers, 2672 bytes cumulative stack size, 24576 bytes "
                              "smem, 436 bytes cmem[0]\n"
                              "ptxas info    : Function properties for helper\n"
                              "    16 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads\n"
                              "ptxas info    : Compiling entry function 'kvl_merge' for 'sm_80'\n"
                              "ptxas info    : Function properties for kvl_merge\n"
                              "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
                              "ptxas info    : Used 32 registers, used 0 barriers, 376 bytes cmem[0]\n";
    struct kvl_xcheck_rows rows = {0};
    assert_int_equal(kvl_xcheck_parse_nvidia(target("sm_80"), source, log, &rows), KVL_OK);
    assert_int_equal(rows.n, 2);
    const struct kvl_xcheck_row *attend = rows.row, *merge = rows.row + 1;
    assert_string_equal(attend->kernel, "kvl_attend");
    assert_string_equal(attend->target, "sm_80");
    assert_int_equal(attend->group, 128);
    assert_int_equal(attend->lanes, 32);
    assert_int_equal(attend->registers, 255);
    assert_int_equal(attend->spills, 12); /* 8 + 40 bytes, the helper is the kernel's */
    assert_int_equal(attend->private_bytes, 2688);
    assert_int_equal(attend->local_bytes, 24576);
    assert_int_equal(attend->occupancy, 12); /* 2 waves of 256 registers a SIMD: 2 groups of 4 waves in 64 */
    assert_string_equal(merge->kernel, "kvl_merge");
    assert_int_equal(merge->group, 64); /* assumed */
    assert_int_equal(merge->spills, 0);
    assert_int_equal(merge->occupancy, 100);
    kvl_xcheck_rows_free(&rows);
}

static void amd(void **state)
{
    static const char assembly[] =
        "\t.amdgpu_metadata\n---\namdhsa.kernels:\n"
        "  - .agpr_count:     0\n    .args:\n      - .name:           slab0\n        .size:           8\n"
        "    .group_segment_fixed_size: 9424\n    .name:           kvl_attend\n    .private_segment_fixed_size: 260\n"
        "    .reqd_workgroup_size:\n      - 32\n      - 1\n      - 1\n    .sgpr_spill_count: 25\n"
        "    .vgpr_count:     100\n    .vgpr_spill_count: 7\n    .wavefront_size: 64\n"
        "  - .args:\n      - .name:           x\n    .group_segment_fixed_size: 0\n    .name:           kvl_merge\n"
        "    .private_segment_fixed_size: 0\n    .vgpr_count:     24\n    .vgpr_spill_count: 0\n    .wavefront_size: 64\n"
        "amdhsa.version:\n  - 1\n";
    struct kvl_xcheck_rows rows = {0};
    assert_int_equal(kvl_xcheck_parse_amd(target("gfx906"), assembly, &rows), KVL_OK);
    assert_int_equal(rows.n, 2);
    const struct kvl_xcheck_row *attend = rows.row, *merge = rows.row + 1;
    assert_string_equal(attend->kernel, "kvl_attend");
    assert_int_equal(attend->group, 32);
    assert_int_equal(attend->lanes, 64);
    assert_int_equal(attend->registers, 100);
    assert_int_equal(attend->spills, 7);
    assert_int_equal(attend->private_bytes, 260);
    assert_int_equal(attend->local_bytes, 9424);
    assert_int_equal(attend->occupancy, 7); /* local memory: 6 groups; half of the lanes idle; 6 * 32 of 2560 */
    assert_string_equal(merge->kernel, "kvl_merge");
    assert_int_equal(merge->group, 64);
    assert_int_equal(merge->occupancy, 100);
    kvl_xcheck_rows_free(&rows);

    assert_int_equal(kvl_xcheck_parse_amd(target("gfx906"), "nothing", &rows), KVL_OK);
    assert_int_equal(rows.n, 0);
}

static void intel(void **state)
{
    static const char binary[] =
        "ELF\0\1version: '1.19'\nkernels:\n"
        "  - name:            kvl_attend\n    execution_env:\n      grf_count:       128\n"
        "      required_work_group_size: [ 64, 1, 1 ]\n      simd_size:       8\n      slm_size:        70000\n"
        "    payload_arguments:\n      - arg_type:        arg_bypointer\n        offset:          0\n        size:            8\n"
        "    per_thread_memory_buffers:\n      - type:            scratch\n        usage:           single_space\n"
        "        size:            4096\n      - type:            global\n        usage:           private_space\n"
        "        size:            300\n        is_simt_thread:  true\n"
        "  - name:            kvl_merge\n    execution_env:\n      grf_count:       128\n      simd_size:       32\n"
        "kernels_misc_info:\n  - name:            kvl_attend\n  - name:            kvl_merge\n";
    static const char log[] =
        "\nwarning: kernel kvl_merge  compiled SIMD32 allocated 128 regs and spilled around 62\n\nBuild succeeded.\n";
    struct kvl_xcheck_rows rows = {0};
    assert_int_equal(kvl_xcheck_parse_intel(target("pvc"), binary, sizeof binary - 1, log, &rows), KVL_OK);
    assert_int_equal(rows.n, 2);
    const struct kvl_xcheck_row *attend = rows.row, *merge = rows.row + 1;
    assert_string_equal(attend->kernel, "kvl_attend");
    assert_int_equal(attend->lanes, 8);
    assert_int_equal(attend->group, 64);
    assert_int_equal(attend->private_bytes, 4096 / 8 + 300);
    assert_int_equal(attend->spills, 0);
    assert_true(attend->failed); /* more local memory than a group gets */
    assert_int_equal(merge->spills, 62);
    assert_int_equal(merge->private_bytes, 0);
    assert_false(merge->failed);
    kvl_xcheck_rows_free(&rows);

    assert_int_equal(kvl_xcheck_parse_intel(target("pvc"), "ELF", 3, "", &rows), KVL_OK);
    assert_int_equal(rows.n, 0);
}

static void table(void **state)
{
    char path[] = "/tmp/kvlab-test-xcheck-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    const struct kvl_xcheck_row built = {.program = "attend.cl int4 d64 x1",
                                         .digest = "0123456789abcdef",
                                         .target = "gfx906",
                                         .kernel = "kvl_attend",
                                         .group = 64,
                                         .lanes = 32,
                                         .registers = 119,
                                         .spills = 3,
                                         .private_bytes = 1ull << 33,
                                         .local_bytes = 9412,
                                         .occupancy = 25};
    const struct kvl_xcheck_row refused = {.program = "gemm.cl", .digest = "f", .target = "sm_75", .failed = true};
    struct kvl_xcheck_table written = {.version = {"clang 15; ptxas 13", "", "ocloc 22"}}, read;
    assert_int_equal(kvl_xcheck_rows_add(&written.rows, &built), KVL_OK);
    assert_int_equal(kvl_xcheck_rows_add(&written.rows, &refused), KVL_OK);
    assert_int_equal(kvl_xcheck_table_write(path, &written), KVL_OK);
    assert_int_equal(kvl_xcheck_table_read(path, &read), KVL_OK);
    for (int v = 0; v < KVL_XCHECK_VENDORS; v++) assert_string_equal(read.version[v], written.version[v]);
    assert_int_equal(read.rows.n, 2);
    assert_memory_equal(read.rows.row, written.rows.row, 2 * sizeof built);
    kvl_xcheck_table_free(&read);
    kvl_xcheck_table_free(&written);

    static const char *const damaged[] = {"a,b",
                                          "p,d,gfx906,k,fine,64,32,1,0,0,0,5",
                                          "p,d,gfx906,k,ok,64,32,-1,0,0,0,5",
                                          "p,d,gfx906,k,ok,64,32,1,0,0,0,5,6",
                                          "p,d,a target with a name that is too long,k,ok,64,32,1,0,0,0,5",
                                          "p,d,gfx906,k,ok,64,32,4294967296,0,0,0,5"};
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        FILE *file = fopen(path, "w");
        fprintf(file, "# amd: x\n%s\n", damaged[i]);
        fclose(file);
        assert_int_equal(kvl_xcheck_table_read(path, &read), KVL_E_FORMAT);
        assert_non_null(strstr(kvl_error_text(), "line 2"));
        kvl_error_clear();
    }
    unlink(path);
    assert_int_equal(kvl_xcheck_table_read(path, &read), KVL_OK); /* no file: an empty table */
    assert_int_equal(read.rows.n, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(nvidia), cmocka_unit_test(amd), cmocka_unit_test(intel),
                                       cmocka_unit_test(table)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
