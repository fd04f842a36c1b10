/* kvlab log repair: makes a finished file of what a dead run left.
 *
 * Rows behind the tables' `committed` counters are cut off; nothing else changes. A file whose run had ended well and only
 * missed its last rename just gets that rename. Every step may be interrupted and repeated. */
#include "runfile.h"
#include "mem.h"
#include "runfile_driver.h"
#include <stdio.h>
#include <string.h>

/* A table on the way through the file. */
struct trim {
    const char *path;
    hid_t group;
    uint64_t rows;
    kvl_status status;
};

static bool grows(hid_t dataset)
{
    hsize_t dims[KVL_MAX_RANK], limits[KVL_MAX_RANK] = {0};
    hid_t space = H5Dget_space(dataset);
    const int rank = space < 0 ? 0 : H5Sget_simple_extent_ndims(space);
    const bool yes =
        rank >= 1 && rank <= KVL_MAX_RANK && H5Sget_simple_extent_dims(space, dims, limits) >= 0 && limits[0] == H5S_UNLIMITED;
    kvl_h5_close(&space);
    return yes;
}

static kvl_status rows_of(const char *path, hid_t dataset, const char *name, uint64_t *rows)
{
    kvl_status status = KVL_OK;
    hsize_t dims[KVL_MAX_RANK];
    hid_t space = H5I_INVALID_HID;
    KVL_H5(path, space = H5Dget_space(dataset), "read the length of %s", name);
    KVL_H5(path, H5Sget_simple_extent_dims(space, dims, NULL), "read the length of %s", name);
    *rows = dims[0];
done:
    kvl_h5_close(&space);
    return status;
}

static herr_t trim_column(hid_t group, const char *name, const H5L_info_t *link, void *data)
{
    struct trim *trim = data;
    kvl_status status = KVL_OK;
    hid_t dataset = H5I_INVALID_HID;
    uint64_t rows = 0;
    H5O_info_t info;
    if (link->type != H5L_TYPE_HARD) return 0;
    KVL_H5(trim->path, H5Oget_info_by_name2(group, name, &info, H5O_INFO_BASIC, H5P_DEFAULT), "read %s", name);
    if (info.type != H5O_TYPE_DATASET) return 0;
    KVL_H5(trim->path, dataset = H5Dopen2(group, name, H5P_DEFAULT), "open %s", name);
    if (!grows(dataset)) goto done;
    KVL_TRY(rows_of(trim->path, dataset, name, &rows));
    if (rows < trim->rows) {
        status = kvl_fail(KVL_E_FORMAT, "%s: column %s has %llu rows, %llu were committed: the file is damaged", trim->path, name,
                          (unsigned long long)rows, (unsigned long long)trim->rows);
        goto done;
    }
    KVL_TRY(kvl_h5_set_rows(trim->path, dataset, name, trim->rows));
done:
    kvl_h5_close(&dataset);
    trim->status = status;
    return status == KVL_OK ? 0 : -1;
}

static kvl_status trim_table(const char *path, hid_t file, const char *counter_name)
{
    kvl_status status = KVL_OK;
    struct trim trim = {.path = path, .group = H5I_INVALID_HID};
    hid_t counter = H5I_INVALID_HID, space = H5I_INVALID_HID;
    char group[KVL_PATH_MAX];
    KVL_H5(path, counter = H5Dopen2(file, counter_name, H5P_DEFAULT), "open %s", counter_name);
    KVL_H5(path, space = H5Dget_space(counter), "read the shape of %s", counter_name);
    if (H5Sget_simple_extent_type(space) != H5S_SCALAR) goto done; /* somebody's column of that name */
    KVL_H5(path, H5Dread(counter, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &trim.rows), "read %s", counter_name);
    snprintf(group, sizeof group, "%.*s", (int)(strlen(counter_name) - strlen(KVL_COMMITTED)), counter_name);
    KVL_H5(path, trim.group = H5Gopen2(file, group, H5P_DEFAULT), "open group %s", group);
    if (H5Literate(trim.group, H5_INDEX_NAME, H5_ITER_NATIVE, NULL, trim_column, &trim) < 0)
        status = trim.status != KVL_OK ? trim.status : kvl_h5_fail(path, "list group %s", group);
done:
    kvl_h5_close(&trim.group);
    kvl_h5_close(&space);
    kvl_h5_close(&counter);
    return status;
}

/* Names of all counters: collected first, because the file must not change while it is visited. */
struct counters {
    char **names;
    size_t n;
    kvl_status status;
};

static herr_t find_counter(hid_t file, const char *name, const H5O_info_t *info, void *data)
{
    struct counters *counters = data;
    const char *slash = strrchr(name, '/');
    if (info->type != H5O_TYPE_DATASET || slash == NULL || strcmp(slash + 1, KVL_COMMITTED) != 0 || strlen(name) + 2 > KVL_PATH_MAX)
        return 0;
    counters->status = kvl_realloc(&counters->names, counters->n + 1, sizeof *counters->names);
    if (counters->status == KVL_OK) counters->status = kvl_strdup(&counters->names[counters->n], name);
    if (counters->status != KVL_OK) return -1;
    counters->n++;
    return 0;
}

static kvl_status trim_tables(const char *path, hid_t file)
{
    kvl_status status = KVL_OK;
    struct counters counters = {0};
    if (H5Ovisit2(file, H5_INDEX_NAME, H5_ITER_NATIVE, find_counter, &counters, H5O_INFO_BASIC) < 0) {
        status = counters.status != KVL_OK ? counters.status : kvl_h5_fail(path, "list the tables");
        goto done;
    }
    for (size_t i = 0; i < counters.n; i++) KVL_TRY(trim_table(path, file, counters.names[i]));
done:
    for (size_t i = 0; i < counters.n; i++) kvl_free(&counters.names[i]);
    kvl_free(&counters.names);
    return status;
}

static bool ends_with(const char *text, size_t n, const char *suffix)
{
    const size_t m = strlen(suffix);
    return n > m && memcmp(text + n - m, suffix, m) == 0;
}

/* runs/a.h5.part becomes runs/a.partial.h5, or runs/a.h5 if its run was complete. */
static kvl_status finished_name(const char *path, bool complete, char *name, size_t size)
{
    size_t n = strlen(path);
    if (!ends_with(path, n, KVL_PART))
        return kvl_fail(KVL_E_USAGE, "%s: nothing to repair; repair takes the " KVL_PART " file of a run that died", path);
    n -= strlen(KVL_PART);
    if (!complete && ends_with(path, n, ".h5")) n -= strlen(".h5");
    if (snprintf(name, size, "%.*s%s", (int)n, path, complete ? "" : ".partial.h5") >= (int)size)
        return kvl_fail(KVL_E_IO, "%s: path too long", path);
    return KVL_OK;
}

kvl_status kvl_runfile_repair(const char *path, char *new_path, size_t size)
{
    kvl_status status = KVL_OK;
    hid_t file = H5I_INVALID_HID;
    char state[KVL_STATUS_BYTES + 1];
    kvl_h5_quiet();
    KVL_TRY(finished_name(path, false, new_path, size));
    KVL_TRY(kvl_driver_open(path, &file));
    KVL_TRY(kvl_h5_get_text(path, file, "status", state, sizeof state));
    const bool complete = strcmp(state, "complete") == 0;
    KVL_TRY(finished_name(path, complete, new_path, size));
    KVL_TRY(trim_tables(path, file));
    if (!complete) KVL_TRY(kvl_h5_set_text(path, file, "status", "partial", KVL_STATUS_BYTES));
    KVL_TRY(kvl_driver_sync(path, file));
    KVL_H5(path, H5Fclose(file), "close the run file");
    file = H5I_INVALID_HID;
    KVL_TRY(kvl_file_publish(path, new_path));
done:
    if (file >= 0) H5Fclose(file);
    return status;
}
