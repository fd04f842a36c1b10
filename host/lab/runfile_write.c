/* The run file's writer.
 *
 * What makes a killed process leave a readable file, in order of importance:
 *   - all groups and columns exist before the first row; later only rows are appended and existing bytes overwritten;
 *   - a commit writes all rows, flushes, and only then writes the tables' `committed` counters and flushes again;
 *   - what HDF5 writes goes through runfile_driver.c, which orders it so that every state on the way opens;
 *   - the name ends with .part until everything is on disk.
 * After a failed write (disk full) the run file takes no more rows, stays as the last commit left it, and gets status "failed". */
#include "runfile.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "runfile_driver.h"
#include <assert.h>
#include <hdf5_hl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>


/* A table of one column gets as many rows a batch as others have cells, or so. */
enum { BATCH_ROWS = 256, NARROW_BATCH_ROWS = 16 * BATCH_ROWS, CHUNK_ROWS = 1024, TIME_BYTES = 32, NAME_BYTES = 128 };
static const uint64_t batch_ns = 1000000000u;

/* Object headers hold this many attributes or links before HDF5 moves them to a heap of their own, which is more to lose. */
enum { COMPACT_MAX = 1024, COMPACT_MIN = 512 };

static const char *const standard_groups[] = {"/config", "/device", "/memory", "/quality", "/layers", "/kernels", "/steps"};

struct column {
    hid_t dataset;
    enum kvl_column_type type;
    size_t cell_bytes;
    char *name, *batch; /* [batch_rows of the table][cell_bytes] */
};

struct table {
    char *group;
    hid_t axis, committed;
    struct column *columns;
    size_t n_columns, batch_rows, buffered;
    uint64_t rows; /* committed ones */
};

struct kvl_runfile {
    char *path, *part; /* final name; name while writing */
    hid_t file;
    struct table *tables;
    size_t n_tables;
    uint64_t oldest_ns; /* time of the oldest buffered row, 0 = none */
    bool started;
    kvl_status broken; /* of the commit that failed */
};

/* --- types -------------------------------------------------------------------------------------------------------------- */

static hid_t hdf5_type(enum kvl_column_type type)
{
    switch (type) {
    case KVL_COL_U64: return H5T_NATIVE_UINT64;
    case KVL_COL_I64: return H5T_NATIVE_INT64;
    case KVL_COL_F64: return H5T_NATIVE_DOUBLE;
    case KVL_COL_F32: return H5T_NATIVE_FLOAT;
    case KVL_COL_TEXT: return H5T_C_S1;
    }
    return H5I_INVALID_HID;
}

/* What a reader sees in a cell that was never written. Texts: NUL, which is the library's default. */
static const void *fill_value(enum kvl_column_type type)
{
    static const uint64_t none_u64 = UINT64_MAX;
    static const int64_t none_i64 = INT64_MIN;
    static const double none_f64 = NAN;
    static const float none_f32 = NAN;
    static const void *const values[] = {&none_u64, &none_i64, &none_f64, &none_f32, NULL};
    return values[type];
}

/* --- groups, axes, datasets ----------------------------------------------------------------------------------------------- */

static kvl_status order_attributes(const char *path, hid_t plist)
{
    kvl_status status = KVL_OK;
    KVL_H5(path, H5Pset_attr_creation_order(plist, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED), "keep the order of attributes");
    KVL_H5(path, H5Pset_attr_phase_change(plist, COMPACT_MAX, COMPACT_MIN), "keep attributes compact");
done:
    return status;
}

/* Properties of a group, or of the file's root group. */
static kvl_status group_properties(const char *path, hid_t class_id, hid_t *plist)
{
    kvl_status status = KVL_OK;
    KVL_H5(path, *plist = H5Pcreate(class_id), "make group properties");
    KVL_TRY(order_attributes(path, *plist));
    KVL_H5(path, H5Pset_link_creation_order(*plist, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED), "keep the order of links");
    KVL_H5(path, H5Pset_link_phase_change(*plist, COMPACT_MAX, COMPACT_MIN), "keep links compact");
done:
    return status;
}

static kvl_status open_step(const struct kvl_runfile *f, hid_t parent, const char *name, hid_t properties, hid_t *out)
{
    kvl_status status = KVL_OK;
    const htri_t exists = H5Lexists(parent, name, H5P_DEFAULT);
    KVL_H5(f->part, exists, "look up group %s", name);
    if (exists)
        KVL_H5(f->part, *out = H5Gopen2(parent, name, H5P_DEFAULT), "open group %s", name);
    else
        KVL_H5(f->part, *out = H5Gcreate2(parent, name, H5P_DEFAULT, properties, H5P_DEFAULT), "create group %s", name);
done:
    return status;
}

/* Opens a group by absolute path, making what is missing. */
static kvl_status open_group(const struct kvl_runfile *f, const char *group, hid_t *out)
{
    kvl_status status = KVL_OK;
    hid_t properties = H5I_INVALID_HID, here = H5I_INVALID_HID, next = H5I_INVALID_HID;
    char name[NAME_BYTES];
    assert(group[0] == '/');
    KVL_TRY(group_properties(f->part, H5P_GROUP_CREATE, &properties));
    KVL_H5(f->part, here = H5Gopen2(f->file, "/", H5P_DEFAULT), "open the root group");
    for (const char *at = group + 1; *at != '\0';) {
        const size_t n = strcspn(at, "/");
        if (n == 0 || n >= sizeof name) {
            status = kvl_fail(KVL_E_USAGE, "group %s: each name has 1 to %zu bytes", group, sizeof name - 1);
            goto done;
        }
        memcpy(name, at, n);
        name[n] = '\0';
        KVL_TRY(open_step(f, here, name, properties, &next));
        kvl_h5_close(&here);
        here = next;
        next = H5I_INVALID_HID;
        at += n + (at[n] == '/');
    }
    *out = here;
    here = H5I_INVALID_HID;
done:
    kvl_h5_close(&here);
    kvl_h5_close(&properties);
    return status;
}

/* An axis; length H5S_UNLIMITED = grows from 0. */
struct axis {
    const char *name;
    hsize_t length;
    hid_t scale;
};

static hsize_t first_length(hsize_t length) { return length == H5S_UNLIMITED ? 0 : length; }

/* An axis of that name in the group: its length must agree, axes are shared by the datasets of a group. */
static kvl_status reuse_axis(const struct kvl_runfile *f, hid_t group, struct axis *axis)
{
    kvl_status status = KVL_OK;
    hid_t space = H5I_INVALID_HID;
    hsize_t length[KVL_MAX_RANK] = {0}, limit[KVL_MAX_RANK] = {0};
    KVL_H5(f->part, axis->scale = H5Dopen2(group, axis->name, H5P_DEFAULT), "open axis %s", axis->name);
    KVL_H5(f->part, space = H5Dget_space(axis->scale), "read the length of axis %s", axis->name);
    if (H5DSis_scale(axis->scale) <= 0 || H5Sget_simple_extent_ndims(space) != 1) {
        status = kvl_fail(KVL_E_USAGE, "%s: %s is in the group already and no axis; choose another name", f->part, axis->name);
        goto done;
    }
    KVL_H5(f->part, H5Sget_simple_extent_dims(space, length, limit), "read the length of axis %s", axis->name);
    if (limit[0] != axis->length)
        status = kvl_fail(KVL_E_USAGE, "%s: axis %s has %lld entries, the new array %lld; name the axis differently", f->part,
                          axis->name, (long long)limit[0], (long long)axis->length);
done:
    kvl_h5_close(&space);
    return status;
}

static kvl_status create_dataset(const struct kvl_runfile *f, hid_t group, const char *name, hid_t type, const void *fill,
                                 const struct axis *axes, size_t n_axes, hid_t *out)
{
    kvl_status status = KVL_OK;
    hid_t properties = H5I_INVALID_HID, space = H5I_INVALID_HID;
    hsize_t dims[KVL_MAX_RANK], limits[KVL_MAX_RANK], chunk[KVL_MAX_RANK];
    for (size_t i = 0; i < n_axes; i++) {
        dims[i] = first_length(axes[i].length);
        limits[i] = axes[i].length;
        chunk[i] = axes[i].length == H5S_UNLIMITED ? CHUNK_ROWS : axes[i].length;
    }
    KVL_H5(f->part, properties = H5Pcreate(H5P_DATASET_CREATE), "make properties of %s", name);
    KVL_TRY(order_attributes(f->part, properties));
    if (n_axes > 0 && axes[0].length == H5S_UNLIMITED)
        KVL_H5(f->part, H5Pset_chunk(properties, (int)n_axes, chunk), "set the chunk of %s", name);
    if (n_axes == 0) KVL_H5(f->part, H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY), "reserve room for %s", name);
    if (fill != NULL) KVL_H5(f->part, H5Pset_fill_value(properties, type, fill), "set the fill value of %s", name);
    KVL_H5(f->part, space = n_axes == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple((int)n_axes, dims, limits), "describe %s", name);
    KVL_H5(f->part, *out = H5Dcreate2(group, name, type, space, H5P_DEFAULT, properties, H5P_DEFAULT), "create %s", name);
    if (fill != NULL) KVL_TRY(kvl_h5_set_number(f->part, *out, "_FillValue", type, fill));
done:
    kvl_h5_close(&space);
    kvl_h5_close(&properties);
    return status;
}

/* Opens or makes the axis. One made here has no values, which its NAME tells readers as the netCDF library does. */
static kvl_status open_axis(const struct kvl_runfile *f, hid_t group, struct axis *axis)
{
    kvl_status status = KVL_OK;
    char phony[96];
    const htri_t exists = H5Lexists(group, axis->name, H5P_DEFAULT);
    KVL_H5(f->part, exists, "look up axis %s", axis->name);
    if (exists) return reuse_axis(f, group, axis);
    KVL_TRY(create_dataset(f, group, axis->name, H5T_NATIVE_FLOAT, NULL, axis, 1, &axis->scale));
    snprintf(phony, sizeof phony, KVL_PHONY_AXIS "%10d", (int)first_length(axis->length));
    KVL_H5(f->part, H5DSset_scale(axis->scale, phony), "make %s an axis", axis->name);
done:
    return status;
}

/* Creates a dataset with its axes, units and title. The one axis of a dataset that bears its own name is the dataset itself. */
static kvl_status create_described(const struct kvl_runfile *f, hid_t group, const char *name, const char *units,
                                   const char *long_name, enum kvl_column_type type, const void *fill, struct axis *axes,
                                   size_t n_axes, hid_t *out)
{
    kvl_status status = KVL_OK;
    const bool own_axis = n_axes == 1 && strcmp(axes[0].name, name) == 0;
    for (size_t i = 0; i < n_axes && !own_axis; i++) KVL_TRY(open_axis(f, group, &axes[i]));
    KVL_TRY(create_dataset(f, group, name, hdf5_type(type), fill, axes, n_axes, out));
    if (own_axis) KVL_H5(f->part, H5DSset_scale(*out, name), "make %s an axis", name);
    for (size_t i = 0; i < n_axes && !own_axis; i++)
        KVL_H5(f->part, H5DSattach_scale(*out, axes[i].scale, (unsigned)i), "attach axis %s to %s", axes[i].name, name);
    if (units != NULL && *units != '\0') KVL_TRY(kvl_h5_set_text(f->part, *out, "units", units, 0));
    if (long_name != NULL && *long_name != '\0') KVL_TRY(kvl_h5_set_text(f->part, *out, "long_name", long_name, 0));
    if (type == KVL_COL_TEXT) KVL_TRY(kvl_h5_set_text(f->part, *out, "_Encoding", "utf-8", 0));
done:
    for (size_t i = 0; i < n_axes; i++) kvl_h5_close(&axes[i].scale);
    return status;
}

/* --- create and describe -------------------------------------------------------------------------------------------------- */

static void utc_now(char text[TIME_BYTES])
{
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    strftime(text, TIME_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts);
}

static kvl_status describe_root(struct kvl_runfile *f, const char *command_line)
{
    kvl_status status = KVL_OK;
    char host[256] = "unknown", now[TIME_BYTES];
    if (gethostname(host, sizeof host - 1) != 0) snprintf(host, sizeof host, "unknown");
    utc_now(now);
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "Conventions", "CF-1.8", 0));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "title", "kvlab run", 0));
    KVL_TRY(kvl_runfile_integer(f, "/", "schema_version", KVL_SCHEMA_VERSION));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "command_line", command_line, 0));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "git", kvl_revision, 0));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "host", host, 0));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "status", "running", KVL_STATUS_BYTES));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "start", now, TIME_BYTES));
    KVL_TRY(kvl_h5_set_text(f->part, f->file, "end", "", TIME_BYTES));
done:
    return status;
}

static kvl_status make_standard_groups(const struct kvl_runfile *f)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < sizeof standard_groups / sizeof *standard_groups; i++) {
        hid_t group = H5I_INVALID_HID;
        KVL_TRY(open_group(f, standard_groups[i], &group));
        kvl_h5_close(&group);
    }
done:
    return status;
}

static kvl_status make_parent_folder(const char *path)
{
    kvl_status status = KVL_OK;
    char *folder = NULL;
    const char *slash = strrchr(path, '/');
    if (slash == NULL || slash == path) return KVL_OK;
    KVL_TRY(kvl_strndup(&folder, path, (size_t)(slash - path)));
    KVL_TRY(kvl_dir_make(folder));
done:
    kvl_free(&folder);
    return status;
}

/* Never over an existing file, and never a second writer on one. */
static kvl_status create_part(struct kvl_runfile *f)
{
    kvl_status status = KVL_OK;
    hid_t creation = H5I_INVALID_HID, access_list = H5I_INVALID_HID;
    if (access(f->path, F_OK) == 0)
        return kvl_fail(KVL_E_IO, "%s: exists already; choose another name with -o, or remove it", f->path);
    if (access(f->part, F_OK) == 0)
        return kvl_fail(KVL_E_IO,
                        "%s: exists already: a run is writing it, or one died; keep its rows with `kvlab log repair`, or remove it",
                        f->part);
    KVL_TRY(group_properties(f->part, H5P_FILE_CREATE, &creation));
    KVL_TRY(kvl_driver_creation(f->part, creation));
    KVL_TRY(kvl_driver_access(f->part, &access_list));
    KVL_H5(f->part, f->file = H5Fcreate(f->part, H5F_ACC_EXCL, creation, access_list), "create the run file");
done:
    kvl_h5_close(&access_list);
    kvl_h5_close(&creation);
    return status;
}

/* A file-size limit must arrive as an error of write(), not as a signal that kills the run. */
static void ignore_size_signal(void)
{
    struct sigaction action;
    if (sigaction(SIGXFSZ, NULL, &action) == 0 && action.sa_handler == SIG_DFL) signal(SIGXFSZ, SIG_IGN);
}

static void close_table(struct table *t)
{
    for (size_t i = 0; i < t->n_columns; i++) {
        kvl_h5_close(&t->columns[i].dataset);
        kvl_free(&t->columns[i].name);
        kvl_free(&t->columns[i].batch);
    }
    kvl_free(&t->columns);
    kvl_free(&t->group);
    kvl_h5_close(&t->axis);
    kvl_h5_close(&t->committed);
}

static kvl_status close_file(struct kvl_runfile *f)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < f->n_tables; i++) close_table(&f->tables[i]);
    f->n_tables = 0;
    if (f->file < 0) return KVL_OK;
    const hid_t file = f->file;
    f->file = H5I_INVALID_HID;
    KVL_H5(f->part, H5Fclose(file), "close the run file");
done:
    return status;
}

static void free_runfile(struct kvl_runfile **f)
{
    kvl_free(&(*f)->tables);
    kvl_free(&(*f)->path);
    kvl_free(&(*f)->part);
    kvl_free(f);
}

kvl_status kvl_runfile_create(const char *path, const char *command_line, struct kvl_runfile **out)
{
    kvl_status status = KVL_OK;
    struct kvl_runfile *f = NULL;
    kvl_h5_quiet();
    ignore_size_signal();
    *out = NULL;
    if (strlen(path) + sizeof KVL_PART > KVL_PATH_MAX) return kvl_fail(KVL_E_IO, "%s: path too long", path);
    KVL_TRY(kvl_alloc(&f, 1, sizeof *f));
    f->file = H5I_INVALID_HID;
    KVL_TRY(kvl_strdup(&f->path, path));
    KVL_TRY(kvl_alloc(&f->part, strlen(path) + sizeof KVL_PART, 1));
    snprintf(f->part, strlen(path) + sizeof KVL_PART, "%s" KVL_PART, path);
    KVL_TRY(make_parent_folder(path));
    KVL_TRY(create_part(f));
    KVL_TRY(describe_root(f, command_line));
    KVL_TRY(make_standard_groups(f));
    *out = f;
    f = NULL;
done:
    if (f != NULL) {
        const bool created = f->file >= 0;
        close_file(f);
        if (created) unlink(f->part);
        free_runfile(&f);
    }
    return status;
}

const char *kvl_runfile_path(const struct kvl_runfile *f) { return f->path; }

kvl_status kvl_runfile_text(struct kvl_runfile *f, const char *group, const char *name, const char *value)
{
    kvl_status status = KVL_OK;
    hid_t object = H5I_INVALID_HID;
    KVL_TRY(open_group(f, group, &object));
    KVL_TRY(kvl_h5_set_text(f->part, object, name, value, 0));
done:
    kvl_h5_close(&object);
    return status;
}

static kvl_status set_number(struct kvl_runfile *f, const char *group, const char *name, hid_t type, const void *value)
{
    kvl_status status = KVL_OK;
    hid_t object = H5I_INVALID_HID;
    KVL_TRY(open_group(f, group, &object));
    KVL_TRY(kvl_h5_set_number(f->part, object, name, type, value));
done:
    kvl_h5_close(&object);
    return status;
}

kvl_status kvl_runfile_number(struct kvl_runfile *f, const char *group, const char *name, double value)
{
    return set_number(f, group, name, H5T_NATIVE_DOUBLE, &value);
}

kvl_status kvl_runfile_integer(struct kvl_runfile *f, const char *group, const char *name, int64_t value)
{
    return set_number(f, group, name, H5T_NATIVE_INT64, &value);
}

/* --- tables ---------------------------------------------------------------------------------------------------------------- */

static kvl_status write_rows(const struct kvl_runfile *f, const struct column *c, uint64_t first, size_t n)
{
    kvl_status status = KVL_OK;
    hid_t memory = H5I_INVALID_HID, disk = H5I_INVALID_HID;
    const hsize_t start[2] = {first, 0}, count[2] = {n, c->cell_bytes};
    const int rank = c->type == KVL_COL_TEXT ? 2 : 1;
    KVL_TRY(kvl_h5_set_rows(f->part, c->dataset, c->name, first + n));
    KVL_H5(f->part, memory = H5Screate_simple(rank, count, NULL), "describe rows of %s", c->name);
    KVL_H5(f->part, disk = H5Dget_space(c->dataset), "describe rows of %s", c->name);
    KVL_H5(f->part, H5Sselect_hyperslab(disk, H5S_SELECT_SET, start, NULL, count, NULL), "select rows of %s", c->name);
    KVL_H5(f->part, H5Dwrite(c->dataset, hdf5_type(c->type), memory, disk, H5P_DEFAULT, c->batch), "write rows of %s", c->name);
done:
    kvl_h5_close(&disk);
    kvl_h5_close(&memory);
    return status;
}

static kvl_status create_column(const struct kvl_runfile *f, hid_t group, const char *axis_name, size_t batch_rows, const struct kvl_column *wanted,
                                struct column *c)
{
    kvl_status status = KVL_OK;
    char text_axis[32];
    const bool text = wanted->type == KVL_COL_TEXT;
    struct axis axes[2] = {{axis_name, H5S_UNLIMITED, H5I_INVALID_HID}, {text_axis, wanted->width, H5I_INVALID_HID}};
    c->type = wanted->type;
    c->dataset = H5I_INVALID_HID;
    c->cell_bytes = text ? wanted->width : H5Tget_size(hdf5_type(wanted->type));
    assert(c->cell_bytes > 0);
    snprintf(text_axis, sizeof text_axis, "text%u", wanted->width);
    KVL_TRY(kvl_strdup(&c->name, wanted->name));
    KVL_TRY(kvl_alloc(&c->batch, batch_rows, c->cell_bytes));
    KVL_TRY(create_described(f, group, wanted->name, wanted->units, wanted->long_name, wanted->type, fill_value(wanted->type), axes,
                             text ? 2 : 1, &c->dataset));
done:
    return status;
}

static kvl_status create_counter(const struct kvl_runfile *f, hid_t group, struct table *t)
{
    kvl_status status = KVL_OK;
    KVL_TRY(create_described(f, group, KVL_COMMITTED, "1", "rows that are complete in all columns", KVL_COL_U64, NULL, NULL, 0,
                             &t->committed));
    KVL_H5(f->part, H5Dwrite(t->committed, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &t->rows), "write the counter of %s",
           t->group);
done:
    return status;
}

kvl_status kvl_runfile_table(struct kvl_runfile *f, const char *group, const struct kvl_column *columns, size_t n, int *table)
{
    kvl_status status = KVL_OK;
    hid_t object = H5I_INVALID_HID;
    struct table t = {.axis = H5I_INVALID_HID, .committed = H5I_INVALID_HID, .batch_rows = n == 1 ? NARROW_BATCH_ROWS : BATCH_ROWS};
    char axis_name[NAME_BYTES + 8];
    assert(!f->started && n > 0 && strrchr(group, '/') != NULL);
    snprintf(axis_name, sizeof axis_name, "%s_row", strrchr(group, '/') + 1);
    struct axis axis = {axis_name, H5S_UNLIMITED, H5I_INVALID_HID};
    KVL_TRY(kvl_realloc(&f->tables, f->n_tables + 1, sizeof *f->tables));
    KVL_TRY(kvl_strdup(&t.group, group));
    KVL_TRY(kvl_alloc(&t.columns, n, sizeof *t.columns));
    KVL_TRY(open_group(f, group, &object));
    KVL_TRY(open_axis(f, object, &axis));
    t.axis = axis.scale;
    for (size_t i = 0; i < n; i++) {
        t.n_columns = i + 1;
        KVL_TRY(create_column(f, object, axis_name, t.batch_rows, &columns[i], &t.columns[i]));
    }
    KVL_TRY(create_counter(f, object, &t));
    *table = (int)f->n_tables;
    f->tables[f->n_tables++] = t;
    t = (struct table){.axis = H5I_INVALID_HID, .committed = H5I_INVALID_HID};
done:
    close_table(&t);
    kvl_h5_close(&object);
    return status;
}

kvl_status kvl_runfile_start(struct kvl_runfile *f)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_driver_sync(f->part, f->file));
    KVL_TRY(kvl_folder_sync(f->part));
    f->started = true;
done:
    return status;
}

/* --- rows ------------------------------------------------------------------------------------------------------------------ */

static kvl_status store_cell(const struct kvl_runfile *f, const struct column *c, size_t row, const union kvl_cell *cell)
{
    char *to = c->batch + row * c->cell_bytes;
    const float narrow = (float)cell->f64;
    if (c->type == KVL_COL_F32) {
        memcpy(to, &narrow, sizeof narrow);
    } else if (c->type == KVL_COL_TEXT) {
        const char *text = cell->text == NULL ? "" : cell->text;
        const size_t n = strlen(text);
        if (n > c->cell_bytes)
            return kvl_fail(KVL_E_USAGE, "%s: column %s holds texts of %zu bytes, this one has %zu: \"%.40s...\"", f->part, c->name,
                            c->cell_bytes, n, text);
        memset(to, 0, c->cell_bytes);
        kvl_utf8_copy(to, text, n);
    } else {
        memcpy(to, cell, c->cell_bytes);
    }
    return KVL_OK;
}

kvl_status kvl_runfile_row(struct kvl_runfile *f, int table, const union kvl_cell *cells)
{
    kvl_status status = KVL_OK;
    assert(f->started && table >= 0 && (size_t)table < f->n_tables);
    struct table *t = &f->tables[table];
    if (f->broken != KVL_OK) return kvl_fail(f->broken, "%s: takes no more rows, an earlier write failed", f->part);
    for (size_t i = 0; i < t->n_columns; i++) KVL_TRY(store_cell(f, &t->columns[i], t->buffered, &cells[i]));
    const uint64_t now = kvl_now_ns();
    if (f->oldest_ns == 0) f->oldest_ns = now;
    if (++t->buffered == t->batch_rows || now - f->oldest_ns >= batch_ns) KVL_TRY(kvl_runfile_commit(f));
done:
    return status;
}

static kvl_status append_rows(const struct kvl_runfile *f, const struct table *t)
{
    kvl_status status = KVL_OK;
    if (t->buffered == 0) return KVL_OK;
    KVL_TRY(kvl_h5_set_rows(f->part, t->axis, t->group, t->rows + t->buffered));
    for (size_t i = 0; i < t->n_columns; i++) KVL_TRY(write_rows(f, &t->columns[i], t->rows, t->buffered));
done:
    return status;
}

static kvl_status write_counter(const struct kvl_runfile *f, const struct table *t, uint64_t rows)
{
    kvl_status status = KVL_OK;
    KVL_H5(f->part, H5Dwrite(t->committed, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &rows), "write the counter of %s",
           t->group);
done:
    return status;
}

kvl_status kvl_runfile_commit(struct kvl_runfile *f)
{
    kvl_status status = KVL_OK;
    if (f->broken != KVL_OK) return kvl_fail(f->broken, "%s: takes no more rows, an earlier write failed", f->part);
    for (size_t i = 0; i < f->n_tables; i++) KVL_TRY(append_rows(f, &f->tables[i]));
    KVL_TRY(kvl_driver_apply(f->part, f->file)); /* rows before counters */
    for (size_t i = 0; i < f->n_tables; i++) KVL_TRY(write_counter(f, &f->tables[i], f->tables[i].rows + f->tables[i].buffered));
    KVL_TRY(kvl_driver_apply(f->part, f->file));
    for (size_t i = 0; i < f->n_tables; i++) {
        f->tables[i].rows += f->tables[i].buffered;
        f->tables[i].buffered = 0;
    }
    f->oldest_ns = 0;
done:
    f->broken = status;
    return status;
}

/* --- arrays ---------------------------------------------------------------------------------------------------------------- */

/* Splits "/a/b/name" into the group "/a/b" (to free) and the name inside `path`. */
static kvl_status split_path(const char *path, char **group, const char **name)
{
    const char *slash = strrchr(path, '/');
    assert(path[0] == '/' && slash[1] != '\0');
    *name = slash + 1;
    return kvl_strndup(group, path, slash == path ? 1 : (size_t)(slash - path));
}

kvl_status kvl_runfile_array(struct kvl_runfile *f, const char *path, const char *units, const char *long_name,
                             enum kvl_column_type type, size_t n_dims, const uint64_t *dims, const char *const *dim_names,
                             const void *data)
{
    kvl_status status = KVL_OK;
    hid_t object = H5I_INVALID_HID, dataset = H5I_INVALID_HID;
    struct axis axes[KVL_MAX_RANK];
    char *group = NULL;
    const char *name;
    assert(n_dims <= KVL_MAX_RANK && type != KVL_COL_TEXT);
    for (size_t i = 0; i < n_dims; i++) axes[i] = (struct axis){dim_names[i], dims[i], H5I_INVALID_HID};
    KVL_TRY(split_path(path, &group, &name));
    KVL_TRY(open_group(f, group, &object));
    if (H5Lexists(object, name, H5P_DEFAULT) > 0) {
        status = kvl_fail(KVL_E_USAGE, "%s: %s is there already; an array is written once", f->part, path);
        goto done;
    }
    status = create_described(f, object, name, units, long_name, type, NULL, axes, n_dims, &dataset);
    if (status == KVL_OK && H5Dwrite(dataset, hdf5_type(type), H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0)
        status = kvl_h5_fail(f->part, "write %s", path);
    if (status == KVL_OK && f->started) status = f->broken = kvl_driver_apply(f->part, f->file);
    if (status != KVL_OK && dataset >= 0) H5Ldelete(object, name, H5P_DEFAULT); /* half an array would look like a whole one */
done:
    kvl_h5_close(&dataset);
    kvl_h5_close(&object);
    kvl_free(&group);
    return status;
}

/* --- close ----------------------------------------------------------------------------------------------------------------- */

static kvl_status write_end(const char *path, hid_t file, const char *status_text)
{
    kvl_status status = KVL_OK;
    char now[TIME_BYTES];
    utc_now(now);
    KVL_TRY(kvl_h5_set_text(path, file, "status", status_text, KVL_STATUS_BYTES));
    KVL_TRY(kvl_h5_set_text(path, file, "end", now, TIME_BYTES));
    KVL_TRY(kvl_driver_sync(path, file));
done:
    return status;
}

/* After a failed write: opens what is on the disk once more and overwrites the status, for which no space is needed. */
static void mark_failed(const struct kvl_runfile *f)
{
    hid_t file = H5I_INVALID_HID;
    if (kvl_driver_open(f->part, &file) != KVL_OK || write_end(f->part, file, "failed") != KVL_OK)
        kvl_warn("%s: its status could not be set to \"failed\"", f->part);
    kvl_h5_close(&file);
}

kvl_status kvl_runfile_close(struct kvl_runfile **file, const char *status_text)
{
    struct kvl_runfile *f = *file;
    if (f == NULL) return KVL_OK;
    assert(strlen(status_text) < KVL_STATUS_BYTES);
    kvl_status status = kvl_runfile_commit(f);
    if (status == KVL_OK) status = write_end(f->part, f->file, status_text);
    const kvl_status closed = close_file(f);
    if (status != KVL_OK)
        mark_failed(f);
    else
        status = closed;
    if (status == KVL_OK && strcmp(status_text, "complete") == 0) status = kvl_file_publish(f->part, f->path);
    free_runfile(file);
    return status;
}
