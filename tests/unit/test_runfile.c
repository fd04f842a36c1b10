/* The run file: round trips, commits, ends, a full disk, failing memory, repair, show.
 * Called with --write FILE it writes the sample run and ends: for the test of foreign readers. */
#include "file.h"
#include "mem.h"
#include "runfile.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#define TRY(call) assert_int_equal_text(call, KVL_OK)

static void assert_int_equal_text(kvl_status got, kvl_status wanted)
{
    if (got != wanted) fail_msg("status %d instead of %d: %s", got, wanted, kvl_error_text());
}

static char folder[] = "/tmp/kvl_runfile_XXXXXX", path[64], part[72];

static const struct kvl_column step_columns[] = {
    {"t_ns", "ns", "wall time since start", KVL_COL_U64, 0},
    {"phase", NULL, "what the step did", KVL_COL_TEXT, 8},
    {"delta", "1", "difference", KVL_COL_I64, 0},
    {"nll", "nat", "negative log-likelihood", KVL_COL_F64, 0},
    {"loss", "1", "loss in single precision", KVL_COL_F32, 0},
};
enum { N_STEP_COLUMNS = sizeof step_columns / sizeof *step_columns };

static kvl_status add_step(struct kvl_runfile *f, int table, uint64_t i)
{
    const union kvl_cell cells[N_STEP_COLUMNS] = {{.u64 = UINT64_MAX - 1 - i},
                                                  {.text = i % 2 ? "pr\xc3\xa9"
                                                                   "fill"
                                                                 : "decode"},
                                                  {.i64 = -(int64_t)i},
                                                  {.f64 = (double)i / 3},
                                                  {.f64 = (double)i / 4}};
    return kvl_runfile_row(f, table, cells);
}

/* The sample run: everything that a run file can hold. Leaves *f open. */
static kvl_status write_sample(const char *file, uint64_t rows, struct kvl_runfile **f)
{
    kvl_status status = KVL_OK;
    static const uint64_t shape[] = {2, 3}, bytes[] = {1, 2, 3, 4, 5, 1ull << 60}, none = 0, layers[] = {0, 1, 2};
    static const double errors[] = {0.5, 0.25, 0.125};
    static const char *const axes[] = {"class", "layer"}, *const layer_axis[] = {"layer"}, *const empty_axis[] = {"kept"};
    static const struct kvl_column chunk_columns[] = {{"nll", "nat", "mean of a chunk", KVL_COL_F64, 0},
                                                      {"n", "1", "tokens", KVL_COL_U64, 0}};
    int steps, chunks;
    KVL_TRY(kvl_runfile_create(file, "kvlab eval ppl -m \"m.gguf\"", f));
    KVL_TRY(kvl_runfile_text(*f, "/", "config_hash", "0123"));
    KVL_TRY(kvl_runfile_text(*f, "/config", "kv", "k=kivi(bits=2) caf\xc3\xa9"));
    KVL_TRY(kvl_runfile_text(*f, "/config", "not_utf8",
                             "a\xff"
                             "b\xc3"));
    KVL_TRY(kvl_runfile_text(*f, "/config/options", "tail", "128"));
    KVL_TRY(kvl_runfile_integer(*f, "/config", "seed", INT64_MIN));
    KVL_TRY(kvl_runfile_array(*f, "/memory/bytes", "byte", "bytes held", KVL_COL_U64, 2, shape, axes, bytes));
    KVL_TRY(kvl_runfile_array(*f, "/layers/layer", "1", "layer number", KVL_COL_U64, 1, shape + 1, layer_axis, layers));
    KVL_TRY(kvl_runfile_array(*f, "/layers/kept_positions", "1", "kept positions", KVL_COL_U64, 1, &none, empty_axis, layers));
    KVL_TRY(kvl_runfile_table(*f, "/steps", step_columns, N_STEP_COLUMNS, &steps));
    KVL_TRY(kvl_runfile_table(*f, "/quality", chunk_columns, 2, &chunks));
    KVL_TRY(kvl_runfile_start(*f));
    for (uint64_t i = 0; i < rows; i++) KVL_TRY(add_step(*f, steps, i));
    for (uint64_t i = 0; i < 3; i++) KVL_TRY(kvl_runfile_row(*f, chunks, (const union kvl_cell[]){{.f64 = 2.5}, {.u64 = 511 + i}}));
    KVL_TRY(kvl_runfile_commit(*f));
    KVL_TRY(kvl_runfile_number(*f, "/quality", "ppl", 12.25));
    KVL_TRY(kvl_runfile_text(*f, "/quality", "verdict", "exploratory"));
    KVL_TRY(kvl_runfile_array(*f, "/layers/error", "1", "error by layer", KVL_COL_F64, 1, shape + 1, layer_axis, errors));
done:
    return status;
}

static hid_t open_plainly(const char *file)
{
    const hid_t id = H5Fopen(file, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (id < 0) fail_msg("%s does not open", file);
    return id;
}

static uint64_t length_of(hid_t file, const char *name)
{
    hsize_t dims[8] = {0};
    const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(dataset);
    assert_true(H5Sget_simple_extent_dims(space, dims, NULL) >= 0);
    H5Sclose(space);
    H5Dclose(dataset);
    return dims[0];
}

static void read_all(hid_t file, const char *name, hid_t type, void *out)
{
    const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    assert_true(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out) >= 0);
    H5Dclose(dataset);
}

static uint64_t committed_of(hid_t file)
{
    uint64_t rows = 0;
    read_all(file, "/steps/committed", H5T_NATIVE_UINT64, &rows);
    return rows;
}

static void assert_text_attribute(hid_t file, const char *group, const char *name, const char *wanted)
{
    char value[256] = "";
    const hid_t attribute = H5Aopen_by_name(file, group, name, H5P_DEFAULT, H5P_DEFAULT), type = H5Aget_type(attribute);
    assert_true(type >= 0 && H5Tget_size(type) < sizeof value && H5Tis_variable_str(type) == 0);
    assert_true(H5Aread(attribute, type, value) >= 0);
    assert_string_equal(value, wanted);
    H5Tclose(type);
    H5Aclose(attribute);
}

/* All step columns have `rows` rows, and all rows are as add_step made them. */
static void assert_steps(hid_t file, uint64_t rows)
{
    static uint64_t t[4096];
    static int64_t delta[4096];
    static double nll[4096];
    static float loss[4096];
    static char phase[4096][8];
    assert_true(rows <= 4096);
    assert_int_equal(committed_of(file), rows);
    assert_int_equal(length_of(file, "/steps/steps_row"), rows);
    for (int i = 0; i < N_STEP_COLUMNS; i++) {
        char name[64];
        snprintf(name, sizeof name, "/steps/%s", step_columns[i].name);
        assert_int_equal(length_of(file, name), rows);
    }
    read_all(file, "/steps/t_ns", H5T_NATIVE_UINT64, t);
    read_all(file, "/steps/phase", H5T_C_S1, phase);
    read_all(file, "/steps/delta", H5T_NATIVE_INT64, delta);
    read_all(file, "/steps/nll", H5T_NATIVE_DOUBLE, nll);
    read_all(file, "/steps/loss", H5T_NATIVE_FLOAT, loss);
    for (uint64_t i = 0; i < rows; i++) {
        assert_true(t[i] == UINT64_MAX - 1 - i && delta[i] == -(int64_t)i && nll[i] == (double)i / 3 && loss[i] == (float)i / 4);
        assert_memory_equal(phase[i],
                            i % 2 ? "pr\xc3\xa9"
                                    "fill"
                                  : "decode\0\0",
                            8);
    }
}

/* A copy, so that HDF5 does not share the writer's open file. */
static hid_t open_copy(const char *file)
{
    char copy[80], *data = NULL;
    size_t size;
    snprintf(copy, sizeof copy, "%s/copy.h5", folder);
    TRY(kvl_file_read(file, &data, &size));
    TRY(kvl_file_write(copy, data, size));
    kvl_free(&data);
    return open_plainly(copy);
}

static void complete_run_reads_back(void **state)
{
    struct kvl_runfile *f = NULL;
    uint64_t bytes[6], layers[3];
    TRY(write_sample(path, 1000, &f));
    assert_string_equal(kvl_runfile_path(f), path);
    assert_int_not_equal(access(path, F_OK), 0);
    TRY(kvl_runfile_close(&f, "complete"));
    assert_null(f);
    assert_int_not_equal(access(part, F_OK), 0);
    const hid_t file = open_plainly(path);
    assert_steps(file, 1000);
    assert_int_equal(length_of(file, "/quality/n"), 3);
    read_all(file, "/memory/bytes", H5T_NATIVE_UINT64, bytes);
    read_all(file, "/layers/layer", H5T_NATIVE_UINT64, layers);
    assert_true(bytes[0] == 1 && bytes[5] == 1ull << 60 && layers[2] == 2);
    assert_int_equal(length_of(file, "/layers/kept_positions"), 0);
    assert_text_attribute(file, "/", "status", "complete");
    assert_text_attribute(file, "/", "command_line", "kvlab eval ppl -m \"m.gguf\"");
    assert_text_attribute(file, "/config", "kv", "k=kivi(bits=2) caf\xc3\xa9");
    assert_text_attribute(file, "/config", "not_utf8", "a?b?");
    assert_text_attribute(file, "/config/options", "tail", "128");
    assert_text_attribute(file, "/steps/t_ns", "units", "ns");
    assert_text_attribute(file, "/steps/steps_row", "NAME", "This is a netCDF dimension but not a netCDF variable.         0");
    assert_text_attribute(file, "/layers/layer", "NAME", "layer");
    H5Fclose(file);
}

static void empty_tables_are_fine(void **state)
{
    struct kvl_runfile *f = NULL;
    TRY(write_sample(path, 0, &f));
    TRY(kvl_runfile_close(&f, "complete"));
    const hid_t file = open_plainly(path);
    assert_steps(file, 0);
    H5Fclose(file);
}

static struct kvl_runfile *start_steps(int *table)
{
    struct kvl_runfile *f = NULL;
    TRY(kvl_runfile_create(path, "kvlab test", &f));
    TRY(kvl_runfile_table(f, "/steps", step_columns, N_STEP_COLUMNS, table));
    TRY(kvl_runfile_start(f));
    return f;
}

static void batches_are_committed(void **state)
{
    int table;
    struct kvl_runfile *f = start_steps(&table);
    for (uint64_t i = 0; i < 600; i++) TRY(add_step(f, table, i));
    hid_t file = open_copy(part);
    assert_steps(file, 512);
    assert_text_attribute(file, "/", "status", "running");
    H5Fclose(file);
    usleep(1050000);
    TRY(add_step(f, table, 600)); /* older than a second: committed without filling a batch */
    file = open_copy(part);
    assert_steps(file, 601);
    H5Fclose(file);
    TRY(kvl_runfile_close(&f, "failed"));
}

static void unfinished_runs_keep_their_part(void **state)
{
    int table;
    char new_path[128];
    struct kvl_runfile *f = start_steps(&table);
    for (uint64_t i = 0; i < 300; i++) TRY(add_step(f, table, i));
    TRY(kvl_runfile_close(&f, "interrupted"));
    assert_int_not_equal(access(path, F_OK), 0);
    hid_t file = open_plainly(part);
    assert_steps(file, 300);
    assert_text_attribute(file, "/", "status", "interrupted");
    H5Fclose(file);
    TRY(kvl_runfile_repair(part, new_path, sizeof new_path));
    assert_true(strstr(new_path, "/run.partial.h5") != NULL);
    file = open_plainly(new_path);
    assert_steps(file, 300);
    assert_text_attribute(file, "/", "status", "partial");
    H5Fclose(file);
}

static void repair_finishes_a_missing_rename(void **state)
{
    int table;
    char new_path[128];
    struct kvl_runfile *f = start_steps(&table);
    TRY(add_step(f, table, 0));
    TRY(kvl_file_write(path, "x", 1)); /* somebody took the name during the run: kept, and so is the run */
    assert_int_equal(kvl_runfile_close(&f, "complete"), KVL_E_IO);
    kvl_error_clear();
    unlink(path);
    TRY(kvl_runfile_repair(part, new_path, sizeof new_path));
    assert_string_equal(new_path, path);
    const hid_t file = open_plainly(path);
    assert_steps(file, 1);
    assert_text_attribute(file, "/", "status", "complete");
    H5Fclose(file);
}

static void cut_ragged_column(const char *name, hsize_t rows)
{
    const hid_t file = H5Fopen(part, H5F_ACC_RDWR, H5P_DEFAULT), dataset = H5Dopen2(file, name, H5P_DEFAULT);
    assert_true(H5Dset_extent(dataset, &rows) >= 0);
    H5Dclose(dataset);
    H5Fclose(file);
}

static void repair_cuts_ragged_columns_and_refuses_short_ones(void **state)
{
    int table;
    char new_path[128];
    struct kvl_runfile *f = start_steps(&table);
    for (uint64_t i = 0; i < 5; i++) TRY(add_step(f, table, i));
    TRY(kvl_runfile_close(&f, "failed"));
    cut_ragged_column("/steps/nll", 4);
    assert_int_equal(kvl_runfile_repair(part, new_path, sizeof new_path), KVL_E_FORMAT);
    assert_non_null(strstr(kvl_error_text(), "nll has 4 rows, 5 were committed"));
    kvl_error_clear();
    unlink(part);
    f = start_steps(&table);
    for (uint64_t i = 0; i < 5; i++) TRY(add_step(f, table, i));
    TRY(kvl_runfile_close(&f, "failed"));
    cut_ragged_column("/steps/nll", 2000);
    cut_ragged_column("/steps/steps_row", 7);
    TRY(kvl_runfile_repair(part, new_path, sizeof new_path));
    const hid_t file = open_plainly(new_path);
    assert_steps(file, 5);
    H5Fclose(file);
}

static void assert_refused(kvl_status got, kvl_status wanted, const char *text)
{
    assert_int_equal_text(got, wanted);
    if (strstr(kvl_error_text(), text) == NULL) fail_msg("\"%s\" does not say \"%s\"", kvl_error_text(), text);
    kvl_error_clear();
}

static void misuse_is_explained(void **state)
{
    static const uint64_t two = 2, three = 3, data[3] = {0};
    static const char *const axis[] = {"layer"};
    struct kvl_runfile *f = NULL, *other = NULL;
    char new_path[128];
    int table;
    TRY(kvl_runfile_create(path, "kvlab test", &f));
    assert_refused(kvl_runfile_create(path, "kvlab test", &other), KVL_E_IO, "a run is writing it, or one died");
    TRY(kvl_runfile_array(f, "/memory/a", "byte", "a", KVL_COL_U64, 1, &two, axis, data));
    assert_refused(kvl_runfile_array(f, "/memory/a", "byte", "a", KVL_COL_U64, 1, &two, axis, data), KVL_E_USAGE, "written once");
    assert_refused(kvl_runfile_array(f, "/memory/b", "byte", "b", KVL_COL_U64, 1, &three, axis, data), KVL_E_USAGE,
                   "axis layer has 2 entries");
    TRY(kvl_runfile_table(f, "/steps", step_columns, N_STEP_COLUMNS, &table));
    TRY(kvl_runfile_start(f));
    assert_refused(kvl_runfile_row(f, table, (const union kvl_cell[N_STEP_COLUMNS]){{0}, {.text = "nine char"}}), KVL_E_USAGE,
                   "phase holds texts of 8");
    TRY(kvl_runfile_close(&f, "complete"));
    assert_refused(kvl_runfile_create(path, "kvlab test", &f), KVL_E_IO, "exists already; choose another name");
    assert_refused(kvl_runfile_repair(path, new_path, sizeof new_path), KVL_E_USAGE, "nothing to repair");
    assert_refused(kvl_runfile_create("/proc/nowhere/run.h5", "kvlab test", &f), KVL_E_IO, "/proc/nowhere");
}

/* Rows until the disk says no; then what was committed must be there, in a file that opens. */
static void fill_disk(bool limit_size, const char *wanted_text)
{
    int table;
    uint64_t rows = 0;
    kvl_status status = KVL_OK;
    struct kvl_runfile *f = start_steps(&table);
    struct rlimit old, small;
    struct stat info;
    assert_true(stat(part, &info) == 0 && getrlimit(RLIMIT_FSIZE, &old) == 0);
    small = (struct rlimit){(rlim_t)info.st_size + 300000, old.rlim_max};
    if (limit_size) setrlimit(RLIMIT_FSIZE, &small);
    while (status == KVL_OK && rows < 200000) status = add_step(f, table, rows++);
    assert_refused(status, KVL_E_IO, wanted_text);
    assert_int_equal(add_step(f, table, 0), KVL_E_IO);
    assert_int_equal(kvl_runfile_close(&f, "complete"), KVL_E_IO);
    setrlimit(RLIMIT_FSIZE, &old);
    kvl_error_clear();
    const hid_t file = open_plainly(part);
    assert_text_attribute(file, "/", "status", "failed");
    const uint64_t committed = committed_of(file);
    assert_true(committed > 0 && rows - committed <= 256);
    assert_int_equal(length_of(file, "/steps/nll"), committed);
    H5Fclose(file);
}

static void file_size_limit_is_survived(void **state) { fill_disk(true, "the file-size limit is reached"); }

/* On a file system of 3 MB of its own, in a child that has its own mounts. */
static void full_disk_is_survived(void **state)
{
    int ended;
    enum { NO_MOUNT = 77 };
    const pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) _exit(NO_MOUNT);
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
        if (mount("tmpfs", folder, "tmpfs", 0, "size=3m") != 0) _exit(NO_MOUNT);
        fill_disk(false, "the disk is full");
        _exit(0);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    if (WIFEXITED(ended) && WEXITSTATUS(ended) == NO_MOUNT) {
        print_message("skipped: no right to mount a small file system\n");
        skip();
    }
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
}

static void every_allocation_may_fail(void **state)
{
    struct kvl_runfile *f = NULL;
    kvl_status status = KVL_E_MEMORY;
    long n = 0;
    while (status != KVL_OK) {
        unlink(path);
        unlink(part);
        kvl_error_clear();
        kvl_mem_fail_after(++n);
        status = write_sample(path, 300, &f);
        const kvl_status closed = kvl_runfile_close(&f, status == KVL_OK ? "complete" : "failed");
        kvl_mem_fail_after(0);
        if (status == KVL_OK) status = closed;
        if (status != KVL_OK) assert_refused(status, KVL_E_MEMORY, "out of host memory");
        assert_null(f);
        assert_int_equal(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL), 0);
    }
    assert_true(n > 50);
}

/* stdout of kvl_runfile_show; free with kvl_free. */
static kvl_status show(const char *file, bool json, char **text)
{
    char name[80];
    size_t size;
    snprintf(name, sizeof name, "%s/stdout", folder);
    fflush(stdout);
    const int old = dup(STDOUT_FILENO), new = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(new, STDOUT_FILENO);
    const kvl_status status = kvl_runfile_show(file, json);
    fflush(stdout);
    dup2(old, STDOUT_FILENO);
    close(old);
    close(new);
    assert_int_equal(kvl_file_read(name, text, &size), KVL_OK);
    return status;
}

/* A writer in another process holds the file. */
static void running_run_can_be_shown_but_not_repaired(void **state)
{
    char new_path[128], byte = 0, *text = NULL;
    int ready[2], stop[2], table;
    assert_true(pipe(ready) == 0 && pipe(stop) == 0);
    const pid_t child = fork();
    if (child == 0) {
        struct kvl_runfile *f = start_steps(&table);
        for (uint64_t i = 0; i < 300; i++) add_step(f, table, i);
        if (write(ready[1], &byte, 1) == 1 && read(stop[0], &byte, 1) == 1) kvl_runfile_close(&f, "interrupted");
        _exit(0);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_refused(kvl_runfile_repair(part, new_path, sizeof new_path), KVL_E_IO, "another process has it open");
    TRY(show(part, false, &text));
    assert_non_null(strstr(text, "256 rows"));
    kvl_free(&text);
    assert_int_equal(write(stop[1], &byte, 1), 1);
    assert_int_equal(waitpid(child, NULL, 0), child);
    TRY(kvl_runfile_repair(part, new_path, sizeof new_path));
}

static void show_prints_what_people_want(void **state)
{
    static const char *const wanted[] = {"complete",
                                         "/config",
                                         "k=kivi(bits=2) caf\xc3\xa9",
                                         "bytes [class 2, layer 3] byte: bytes held",
                                         "1152921504606846976",
                                         "1000 rows",
                                         "18446744073709551614",
                                         "12.25",
                                         "exploratory"};
    struct kvl_runfile *f = NULL;
    char *text = NULL;
    TRY(write_sample(path, 1000, &f));
    TRY(kvl_runfile_text(f, "/config", "escape", "a\033[2Jb"));
    TRY(kvl_runfile_close(&f, "complete"));
    TRY(show(path, false, &text));
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (strstr(text, wanted[i]) == NULL) fail_msg("\"%s\" is not in:\n%s", wanted[i], text);
    assert_null(strchr(text, '\033'));
    kvl_free(&text);
}

static void show_prints_json(void **state)
{
    struct kvl_runfile *f = NULL;
    char *text = NULL;
    TRY(write_sample(path, 300, &f));
    TRY(kvl_runfile_close(&f, "complete"));
    TRY(show(path, true, &text));
    cJSON *tree = cJSON_Parse(text);
    assert_non_null(tree);
    const cJSON *data = cJSON_GetObjectItem(cJSON_GetObjectItem(tree, "/steps"), "data");
    assert_int_equal(cJSON_GetNumberValue(cJSON_GetObjectItem(data, "committed")), 300);
    const cJSON *phase = cJSON_GetObjectItem(cJSON_GetObjectItem(data, "phase"), "values");
    assert_int_equal(cJSON_GetArraySize(phase), 300);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetArrayItem(phase, 1)), "pr\xc3\xa9"
                                                                            "fill");
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(cJSON_GetObjectItem(tree, "/quality"), "ppl")) == 12.25);
    cJSON_Delete(tree);
    kvl_free(&text);
}

static void show_refuses_what_is_no_run_file(void **state)
{
    struct kvl_runfile *f = NULL;
    char *text = NULL, *data = NULL;
    size_t size;
    TRY(kvl_file_write(path, "no HDF5 at all", 14));
    assert_refused(show(path, false, &text), KVL_E_HDF5, "file signature not found");
    kvl_free(&text);
    unlink(path);
    assert_refused(show(path, false, &text), KVL_E_IO, "No such file");
    kvl_free(&text);
    TRY(write_sample(path, 300, &f));
    TRY(kvl_runfile_close(&f, "complete"));
    TRY(kvl_file_read(path, &data, &size));
    for (int i = 0; i < 20; i++) {
        TRY(kvl_file_write(part, data, size * (size_t)i / 20));
        if (show(part, false, &text) == KVL_OK) fail_msg("a file cut to %d/20 was shown", i);
        kvl_error_clear();
        kvl_free(&text);
    }
    kvl_free(&data);
}

static int make_folder(void **state)
{
    snprintf(folder, sizeof folder, "/tmp/kvl_runfile_XXXXXX");
    if (mkdtemp(folder) == NULL) return -1;
    snprintf(path, sizeof path, "%s/run.h5", folder);
    snprintf(part, sizeof part, "%s.part", path);
    kvl_error_clear();
    return 0;
}

static int remove_folder(void **state)
{
    static const char *const names[] = {"run.h5", "run.h5.part", "run.partial.h5", "copy.h5", "stdout"};
    char name[80];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(name, sizeof name, "%s/%s", folder, names[i]);
        unlink(name);
    }
    return rmdir(folder) == 0 && H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL) == 0 ? 0 : -1;
}

static int write_only(const char *file)
{
    struct kvl_runfile *f = NULL;
    kvl_status status = write_sample(file, 1000, &f);
    const kvl_status closed = kvl_runfile_close(&f, status == KVL_OK ? "complete" : "failed");
    if (status == KVL_OK) status = closed;
    if (status != KVL_OK) fprintf(stderr, "%s\n", kvl_error_text());
    return kvl_exit_code(status);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0) return write_only(argv[2]);
    const struct CMUnitTest tests[] = {
        IN_FOLDER(complete_run_reads_back),
        IN_FOLDER(empty_tables_are_fine),
        IN_FOLDER(batches_are_committed),
        IN_FOLDER(unfinished_runs_keep_their_part),
        IN_FOLDER(repair_finishes_a_missing_rename),
        IN_FOLDER(repair_cuts_ragged_columns_and_refuses_short_ones),
        IN_FOLDER(misuse_is_explained),
        IN_FOLDER(file_size_limit_is_survived),
        IN_FOLDER(full_disk_is_survived),
        IN_FOLDER(every_allocation_may_fail),
        IN_FOLDER(running_run_can_be_shown_but_not_repaired),
        IN_FOLDER(show_prints_what_people_want),
        IN_FOLDER(show_prints_json),
        IN_FOLDER(show_refuses_what_is_no_run_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
