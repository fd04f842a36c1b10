/* SIGKILL at a random time: every committed row of the .part must be there, by plain HDF5, and repair must finish the file.
 *
 * A child writes two tables without end; the parent kills it at a seeded time. KVLAB_TRIALS sets the number of trials; a TMPDIR
 * in memory makes kills inside HDF5's writes more likely than kills inside fsync. */
#include "mem.h"
#include "rng.h"
#include "runfile.h"
#include <hdf5.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

enum { N_COLUMNS = 12, N_TABLES = 2, SEED = 20 };
static const char *const tables[N_TABLES] = {"/steps", "/quality/tokens"};
static char folder[512], part[544], repaired[576];

static uint64_t value_of(uint64_t row, uint64_t column) { return kvl_rng_u64(column, row); }

/* Never returns; tells the parent by a byte when rows begin. */
static void write_forever(int ready)
{
    char names[N_COLUMNS][8], path[544];
    struct kvl_column columns[N_COLUMNS];
    struct kvl_runfile *f = NULL;
    int table[N_TABLES];
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < N_COLUMNS; i++) {
        snprintf(names[i], sizeof names[i], "c%zu", i);
        columns[i] = (struct kvl_column){names[i], "1", "test", KVL_COL_U64, 0};
    }
    snprintf(path, sizeof path, "%s/run.h5", folder);
    KVL_TRY(kvl_runfile_create(path, "kvlab test", &f));
    for (int t = 0; t < N_TABLES; t++) KVL_TRY(kvl_runfile_table(f, tables[t], columns, N_COLUMNS, &table[t]));
    KVL_TRY(kvl_runfile_start(f));
    if (write(ready, "", 1) != 1) goto done;
    for (uint64_t row = 0;; row++) {
        union kvl_cell cells[N_COLUMNS];
        for (uint64_t i = 0; i < N_COLUMNS; i++) cells[i].u64 = value_of(row, i);
        for (int t = 0; t < N_TABLES; t++) KVL_TRY(kvl_runfile_row(f, table[t], cells));
    }
done:
    fprintf(stderr, "writer: status %d: %s\n", status, kvl_error_text());
    _exit(1);
}

static void kill_a_writer(uint64_t trial)
{
    char byte;
    int ready[2], ended;
    assert_int_equal(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) write_forever(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    usleep((useconds_t)(400000 * kvl_rng_uniform(SEED, trial)));
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
    close(ready[0]);
    close(ready[1]);
}

/* Length of a column; its first `rows` values are compared. */
static uint64_t check_column(hid_t file, const char *table, uint64_t column, uint64_t rows)
{
    char name[64];
    uint64_t *values = NULL;
    hsize_t length = 0;
    const hsize_t start = 0, count = rows;
    snprintf(name, sizeof name, "%s/c%" PRIu64, table, column);
    assert_int_equal(kvl_alloc(&values, rows, sizeof *values), KVL_OK);
    const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT), disk = H5Dget_space(dataset),
                memory = H5Screate_simple(1, &count, NULL);
    assert_true(H5Sget_simple_extent_dims(disk, &length, NULL) >= 0);
    if (length < rows) fail_msg("%s has %llu rows, %" PRIu64 " were committed", name, (unsigned long long)length, rows);
    if (rows > 0) {
        assert_true(H5Sselect_hyperslab(disk, H5S_SELECT_SET, &start, NULL, &count, NULL) >= 0);
        assert_true(H5Dread(dataset, H5T_NATIVE_UINT64, memory, disk, H5P_DEFAULT, values) >= 0);
    }
    for (uint64_t i = 0; i < rows; i++)
        if (values[i] != value_of(i, column)) fail_msg("%s row %" PRIu64 " is damaged", name, i);
    kvl_free(&values);
    H5Sclose(memory);
    H5Sclose(disk);
    H5Dclose(dataset);
    return length;
}

/* Checks all tables; with `exact` no column may have more than the committed rows. Returns the committed rows of all tables. */
static uint64_t check_file(const char *path, bool exact)
{
    uint64_t total = 0;
    const hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) fail_msg("%s does not open", path);
    for (int t = 0; t < N_TABLES; t++) {
        char name[64];
        uint64_t rows = 0;
        snprintf(name, sizeof name, "%s/committed", tables[t]);
        const hid_t counter = H5Dopen2(file, name, H5P_DEFAULT);
        assert_true(H5Dread(counter, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &rows) >= 0);
        H5Dclose(counter);
        for (uint64_t i = 0; i < N_COLUMNS; i++) {
            const uint64_t length = check_column(file, tables[t], i, rows);
            if (exact) assert_int_equal(length, rows);
        }
        total += rows;
    }
    assert_true(H5Fclose(file) >= 0);
    return total;
}

static void killed_writers_lose_nothing_committed(void **state)
{
    const char *wanted = getenv("KVLAB_TRIALS");
    const uint64_t trials = wanted == NULL ? 20 : strtoull(wanted, NULL, 10);
    uint64_t total = 0;
    for (uint64_t trial = 0; trial < trials; trial++) {
        kill_a_writer(trial);
        const uint64_t rows = check_file(part, false);
        if (kvl_runfile_repair(part, repaired, sizeof repaired) != KVL_OK)
            fail_msg("trial %" PRIu64 ": %s", trial, kvl_error_text());
        assert_int_equal(check_file(repaired, true), rows);
        unlink(repaired);
        total += rows;
    }
    print_message("%" PRIu64 " trials (seed %d), %" PRIu64 " committed rows intact\n", trials, SEED, total);
    assert_true(total > 256 * trials / 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed_writers_lose_nothing_committed)};
    const char *temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.480s/kvl_kill_XXXXXX", temporary == NULL ? "/tmp" : temporary);
    if (mkdtemp(folder) == NULL) return 1;
    snprintf(part, sizeof part, "%s/run.h5.part", folder);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (failed == 0)
        rmdir(folder);
    else
        fprintf(stderr, "the file is in %s\n", folder);
    return failed;
}
