/* kvlab log show: reads a run file into one JSON tree, and prints the tree as JSON or for people.
 *
 * Tree: the root's attributes, then an object per group under its path ("/steps"): its attributes, and "data" with its arrays and
 * columns {dims, units, long_name, values}. Values are at most `most` of an array; dims say how many there are.
 * The file may come from anywhere: sizes are bounded, types checked, only hard links followed, control characters not printed. */
#include "runfile.h"
#include "mem.h"
#include "runfile_hdf5.h"
#include <cjson/cJSON.h>
#include <hdf5_hl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN_VALUES = 4096, MAX_TEXT = 1 << 20, MAX_DEPTH = 8, NAME_MAX_BYTES = 256 };

/* --- tree ------------------------------------------------------------------------------------------------------------------ */

/* Adds an item that may be NULL because memory ran out. Names are as little trusted as values. */
static kvl_status add(cJSON *to, const char *name, cJSON *item)
{
    char clean[KVL_PATH_MAX] = "";
    const size_t n = name == NULL ? 0 : strnlen(name, sizeof clean - 1);
    if (name != NULL) kvl_utf8_copy(clean, name, n);
    const bool added = item != NULL && (name == NULL ? cJSON_AddItemToArray(to, item) : cJSON_AddItemToObject(to, clean, item));
    if (added) return KVL_OK;
    cJSON_Delete(item);
    return kvl_fail(KVL_E_MEMORY, "out of host memory");
}

/* Integers go as they are: a double would round the large ones. */
static cJSON *number_item(bool is_float, bool is_signed, const void *value)
{
    char digits[32];
    double number;
    int64_t integer;
    uint64_t natural;
    if (is_float) {
        memcpy(&number, value, sizeof number);
        return cJSON_CreateNumber(number);
    }
    memcpy(&integer, value, sizeof integer);
    memcpy(&natural, value, sizeof natural);
    if (is_signed)
        snprintf(digits, sizeof digits, "%" PRId64, integer);
    else
        snprintf(digits, sizeof digits, "%" PRIu64, natural);
    return cJSON_CreateRaw(digits);
}

static kvl_status text_item(const char *bytes, size_t n, cJSON **item)
{
    kvl_status status = KVL_OK;
    char *text = NULL;
    const size_t length = strnlen(bytes, n);
    KVL_TRY(kvl_alloc(&text, length + 1, 1));
    kvl_utf8_copy(text, bytes, length);
    *item = cJSON_CreateString(text);
done:
    kvl_free(&text);
    return status;
}

/* --- reading --------------------------------------------------------------------------------------------------------------- */

/* How the elements of a dataset or attribute are read: as 8-byte numbers, or as texts of `bytes` bytes. */
struct element {
    bool is_text, is_float, is_signed;
    size_t bytes;
    hid_t memory_type;
};

/* False for types that a run file does not have (compound, references, variable length ...). */
static bool element_of(hid_t type, struct element *e)
{
    const H5T_class_t class = H5Tget_class(type);
    *e = (struct element){.bytes = H5Tget_size(type), .memory_type = H5I_INVALID_HID};
    if (class == H5T_STRING) {
        e->is_text = true;
        e->memory_type = H5Tcopy(type);
        return H5Tis_variable_str(type) == 0 && e->bytes > 0 && e->bytes <= MAX_TEXT;
    }
    if (class != H5T_INTEGER && class != H5T_FLOAT) return false;
    e->is_float = class == H5T_FLOAT;
    e->is_signed = class == H5T_INTEGER && H5Tget_sign(type) != H5T_SGN_NONE;
    e->memory_type = H5Tcopy(e->is_float ? H5T_NATIVE_DOUBLE : e->is_signed ? H5T_NATIVE_INT64 : H5T_NATIVE_UINT64);
    e->bytes = 8;
    return e->memory_type >= 0;
}

static kvl_status add_elements(cJSON *array, const struct element *e, const char *values, size_t n)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < n; i++) {
        cJSON *item = NULL;
        const char *at = values + i * e->bytes;
        if (e->is_text)
            KVL_TRY(text_item(at, e->bytes, &item));
        else
            item = number_item(e->is_float, e->is_signed, at);
        KVL_TRY(add(array, NULL, item));
    }
done:
    return status;
}

static bool is_machinery(const char *name)
{
    static const char *const names[] = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_FillValue", "_Encoding"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

/* One scalar attribute into the object; others are passed over. */
static kvl_status read_attribute(const char *path, hid_t object, const char *name, cJSON *into)
{
    kvl_status status = KVL_OK;
    hid_t attribute = H5I_INVALID_HID, type = H5I_INVALID_HID, space = H5I_INVALID_HID;
    struct element e = {.memory_type = H5I_INVALID_HID};
    char *value = NULL;
    cJSON *item = NULL;
    KVL_H5(path, attribute = H5Aopen(object, name, H5P_DEFAULT), "open attribute %s", name);
    KVL_H5(path, type = H5Aget_type(attribute), "read attribute %s", name);
    KVL_H5(path, space = H5Aget_space(attribute), "read attribute %s", name);
    if (H5Sget_simple_extent_npoints(space) != 1 || !element_of(type, &e)) goto done;
    KVL_TRY(kvl_alloc(&value, e.bytes + 1, 1));
    KVL_H5(path, H5Aread(attribute, e.memory_type, value), "read attribute %s", name);
    if (e.is_text)
        KVL_TRY(text_item(value, e.bytes, &item));
    else
        item = number_item(e.is_float, e.is_signed, value);
    KVL_TRY(add(into, name, item));
done:
    kvl_free(&value);
    kvl_h5_close(&e.memory_type);
    kvl_h5_close(&space);
    kvl_h5_close(&type);
    kvl_h5_close(&attribute);
    return status;
}

struct visit {
    const char *path;
    cJSON *into;
    kvl_status status;
};

static herr_t visit_attribute(hid_t object, const char *name, const H5A_info_t *info, void *data)
{
    struct visit *visit = data;
    if (is_machinery(name)) return 0;
    visit->status = read_attribute(visit->path, object, name, visit->into);
    return visit->status == KVL_OK ? 0 : -1;
}

static kvl_status read_attributes(const char *path, hid_t object, cJSON *into)
{
    struct visit visit = {.path = path, .into = into};
    hsize_t at = 0;
    if (H5Aiterate2(object, H5_INDEX_CRT_ORDER, H5_ITER_INC, &at, visit_attribute, &visit) >= 0) return KVL_OK;
    if (visit.status != KVL_OK) return visit.status;
    H5Eclear2(H5E_DEFAULT); /* a file that does not keep the order */
    at = 0;
    if (H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &at, visit_attribute, &visit) >= 0) return KVL_OK;
    return visit.status != KVL_OK ? visit.status : kvl_h5_fail(path, "list attributes");
}

static herr_t take_axis_name(hid_t dataset, unsigned axis, hid_t scale, void *data)
{
    char full[KVL_PATH_MAX] = "";
    if (H5Iget_name(scale, full, sizeof full) <= 0) return 0;
    const char *slash = strrchr(full, '/');
    snprintf(data, NAME_MAX_BYTES, "%.*s", NAME_MAX_BYTES - 1, slash == NULL ? full : slash + 1);
    return 1;
}

/* A dataset on the way into the tree. */
struct array {
    int rank;
    hsize_t dims[KVL_MAX_RANK];
    struct element element;
    bool characters; /* the last axis holds the bytes of a text */
};

static kvl_status add_dims(const char *path, hid_t dataset, const struct array *a, cJSON *into)
{
    kvl_status status = KVL_OK;
    cJSON *dims = cJSON_CreateObject();
    for (int i = 0; dims != NULL && i < a->rank - a->characters; i++) {
        char name[NAME_MAX_BYTES];
        const uint64_t length = a->dims[i];
        snprintf(name, sizeof name, "axis%d", i);
        H5DSiterate_scales(dataset, (unsigned)i, NULL, take_axis_name, name);
        KVL_TRY(add(dims, name, number_item(false, false, &length)));
    }
    status = add(into, "dims", dims);
    dims = NULL;
done:
    cJSON_Delete(dims);
    return status;
}

/* Reads as many entries of the first axis as `most` values allow. */
static kvl_status add_values(const char *path, hid_t dataset, const struct array *a, size_t most, cJSON *into)
{
    kvl_status status = KVL_OK;
    hid_t disk = H5I_INVALID_HID, memory = H5I_INVALID_HID;
    hsize_t start[KVL_MAX_RANK] = {0}, count[KVL_MAX_RANK];
    struct element e = a->element;
    size_t per_entry = 1, bytes_per_entry = 1;
    char *values = NULL;
    cJSON *array = cJSON_CreateArray();
    if (array == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory");
    if (a->characters) e.bytes = a->dims[a->rank - 1];
    for (int i = 1; i < a->rank - a->characters; i++)
        if (!kvl_mul_size(per_entry, a->dims[i], &per_entry)) per_entry = SIZE_MAX;
    const bool fits =
        e.bytes <= MAX_TEXT && per_entry > 0 && per_entry <= most && kvl_mul_size(per_entry, e.bytes, &bytes_per_entry);
    const size_t limit = fits ? most / per_entry : 0;
    memcpy(count, a->dims, sizeof count);
    if (count[0] > limit) count[0] = limit;
    while (bytes_per_entry > 0 && count[0] > (64u << 20) / bytes_per_entry) count[0] /= 2;
    if (count[0] > 0) {
        KVL_TRY(kvl_alloc(&values, count[0], bytes_per_entry));
        KVL_H5(path, disk = H5Dget_space(dataset), "read values");
        KVL_H5(path, memory = H5Screate_simple(a->rank, count, NULL), "read values");
        KVL_H5(path, H5Sselect_hyperslab(disk, H5S_SELECT_SET, start, NULL, count, NULL), "read values");
        KVL_H5(path, H5Dread(dataset, e.memory_type, memory, disk, H5P_DEFAULT, values), "read values");
        KVL_TRY(add_elements(array, &e, values, count[0] * per_entry));
    }
    status = add(into, "values", array);
    array = NULL;
done:
    cJSON_Delete(array);
    kvl_free(&values);
    kvl_h5_close(&memory);
    kvl_h5_close(&disk);
    return status;
}

static kvl_status add_scalar(const char *path, hid_t dataset, const char *name, const struct array *a, cJSON *into)
{
    kvl_status status = KVL_OK;
    char value[8];
    if (a->element.is_text) return KVL_OK;
    KVL_H5(path, H5Dread(dataset, a->element.memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, value), "read %s", name);
    KVL_TRY(add(into, name, number_item(a->element.is_float, a->element.is_signed, value)));
done:
    return status;
}

static bool is_phony_axis(hid_t dataset)
{
    char name[96] = "";
    return H5DSis_scale(dataset) > 0 && H5DSget_scale_name(dataset, name, sizeof name) > 0 &&
           strncmp(name, KVL_PHONY_AXIS, strlen(KVL_PHONY_AXIS)) == 0;
}

static kvl_status shape_of(const char *path, hid_t dataset, const char *name, struct array *a, bool *readable)
{
    kvl_status status = KVL_OK;
    hid_t type = H5I_INVALID_HID, space = H5I_INVALID_HID;
    KVL_H5(path, type = H5Dget_type(dataset), "read the type of %s", name);
    KVL_H5(path, space = H5Dget_space(dataset), "read the shape of %s", name);
    a->rank = H5Sget_simple_extent_ndims(space);
    *readable = a->rank >= 0 && a->rank <= KVL_MAX_RANK && element_of(type, &a->element);
    if (*readable) KVL_H5(path, H5Sget_simple_extent_dims(space, a->dims, NULL), "read the shape of %s", name);
    a->characters = *readable && a->element.is_text && a->element.bytes == 1 && a->rank > 1;
done:
    kvl_h5_close(&space);
    kvl_h5_close(&type);
    return status;
}

/* A dataset as {dims, units, long_name, ..., values}; a scalar as its value. `rows`: what of a table's columns counts. */
static kvl_status read_dataset(const char *path, hid_t dataset, const char *name, uint64_t rows, size_t most, cJSON *into)
{
    kvl_status status = KVL_OK;
    struct array a = {.element.memory_type = H5I_INVALID_HID};
    cJSON *item = NULL;
    bool readable = false;
    if (is_phony_axis(dataset)) return KVL_OK;
    KVL_TRY(shape_of(path, dataset, name, &a, &readable));
    if (!readable) goto done;
    if (a.rank == 0) {
        KVL_TRY(add_scalar(path, dataset, name, &a, into));
        goto done;
    }
    if (a.dims[0] > rows) a.dims[0] = rows;
    item = cJSON_CreateObject();
    if (item != NULL) {
        KVL_TRY(add_dims(path, dataset, &a, item));
        KVL_TRY(read_attributes(path, dataset, item));
        KVL_TRY(add_values(path, dataset, &a, most, item));
    }
    status = add(into, name, item);
    item = NULL;
done:
    cJSON_Delete(item);
    kvl_h5_close(&a.element.memory_type);
    return status;
}

/* Rows that count in a group's columns. */
static uint64_t committed_rows(hid_t group)
{
    uint64_t rows = UINT64_MAX;
    hid_t dataset =
        H5Lexists(group, KVL_COMMITTED, H5P_DEFAULT) > 0 ? H5Dopen2(group, KVL_COMMITTED, H5P_DEFAULT) : H5I_INVALID_HID;
    hid_t space = dataset < 0 ? H5I_INVALID_HID : H5Dget_space(dataset);
    if (space >= 0 && H5Sget_simple_extent_type(space) == H5S_SCALAR)
        H5Dread(dataset, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &rows);
    kvl_h5_close(&space);
    kvl_h5_close(&dataset);
    return rows;
}

static kvl_status read_group(const char *path, hid_t group, const char *name, int depth, size_t most, cJSON *root);

/* A member of a group: a dataset goes into its "data", a group becomes an object of the root. */
static kvl_status read_member(const char *path, hid_t parent, const char *parent_name, hsize_t at, H5_index_t index, uint64_t rows,
                              int depth, size_t most, cJSON *root, cJSON *data)
{
    kvl_status status = KVL_OK;
    hid_t object = H5I_INVALID_HID;
    H5L_info_t link;
    char name[NAME_MAX_BYTES], full[KVL_PATH_MAX];
    KVL_H5(path, H5Lget_info_by_idx(parent, ".", index, H5_ITER_INC, at, &link, H5P_DEFAULT), "list group %s", parent_name);
    const ssize_t n = H5Lget_name_by_idx(parent, ".", index, H5_ITER_INC, at, name, sizeof name, H5P_DEFAULT);
    if (link.type != H5L_TYPE_HARD || n <= 0 || n >= (ssize_t)sizeof name) goto done;
    if (snprintf(full, sizeof full, "%s/%s", strcmp(parent_name, "/") == 0 ? "" : parent_name, name) >= (int)sizeof full) goto done;
    KVL_H5(path, object = H5Oopen(parent, name, H5P_DEFAULT), "open %s", full);
    if (H5Iget_type(object) == H5I_DATASET && most > 0) KVL_TRY(read_dataset(path, object, name, rows, most, data));
    if (H5Iget_type(object) == H5I_GROUP && depth < MAX_DEPTH) KVL_TRY(read_group(path, object, full, depth + 1, most, root));
done:
    kvl_h5_close(&object);
    return status;
}

static kvl_status read_group(const char *path, hid_t group, const char *name, int depth, size_t most, cJSON *root)
{
    kvl_status status = KVL_OK;
    H5G_info_t info;
    H5L_info_t link;
    cJSON *data = cJSON_CreateObject(), *into = root;
    if (depth > 0) KVL_TRY(add(root, name, into = cJSON_CreateObject()));
    KVL_TRY(read_attributes(path, group, into));
    KVL_H5(path, H5Gget_info(group, &info), "list group %s", name);
    const uint64_t rows = committed_rows(group);
    H5_index_t index = H5_INDEX_CRT_ORDER;
    if (info.nlinks > 0 && H5Lget_info_by_idx(group, ".", index, H5_ITER_INC, 0, &link, H5P_DEFAULT) < 0) index = H5_INDEX_NAME;
    H5Eclear2(H5E_DEFAULT);
    for (hsize_t i = 0; i < info.nlinks; i++) KVL_TRY(read_member(path, group, name, i, index, rows, depth, most, root, data));
    if (data == NULL || cJSON_GetArraySize(data) > 0) {
        cJSON *filled = data;
        data = NULL;
        KVL_TRY(add(into, "data", filled));
    }
done:
    cJSON_Delete(data);
    return status;
}

/* A layout of a later program may look like this one and mean something else. */
static kvl_status check_schema(const char *path, const cJSON *tree)
{
    const cJSON *version = cJSON_GetObjectItem(tree, "schema_version");
    if (!cJSON_IsRaw(version) || strtoll(version->valuestring, NULL, 10) <= KVL_SCHEMA_VERSION) return KVL_OK;
    return kvl_fail(KVL_E_FORMAT, "%s: its schema version is %s, this program reads up to %d; use a newer one", path, version->valuestring, KVL_SCHEMA_VERSION);
}

kvl_status kvl_runfile_read(const char *path, size_t most, cJSON **tree)
{
    kvl_status status = KVL_OK;
    kvl_h5_quiet();
    hid_t access_list = H5I_INVALID_HID, file = H5I_INVALID_HID, root = H5I_INVALID_HID;
    char state[KVL_STATUS_BYTES + 1];
    *tree = cJSON_CreateObject();
    if (*tree == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory");
    KVL_H5(path, access_list = H5Pcreate(H5P_FILE_ACCESS), "make file properties");
    KVL_H5(path, H5Pset_file_locking(access_list, false, true), "look without a lock"); /* the run may be going on */
    KVL_H5(path, file = H5Fopen(path, H5F_ACC_RDONLY, access_list), "open the run file");
    KVL_H5(path, root = H5Gopen2(file, "/", H5P_DEFAULT), "open the root group");
    KVL_TRY(kvl_h5_get_text(path, file, "status", state, sizeof state));
    KVL_TRY(add(*tree, "file", cJSON_CreateString(path)));
    KVL_TRY(read_group(path, root, "/", 0, most, *tree));
    KVL_TRY(check_schema(path, *tree));
done:
    kvl_h5_close(&root);
    kvl_h5_close(&file);
    kvl_h5_close(&access_list);
    return status;
}

/* --- printing for people ---------------------------------------------------------------------------------------------------- */

enum { LINE_WIDTH = 110, HEAD_ROWS = 5, HEAD_VALUES = 8, CELL_BYTES = 64 };

/* What a file says must not drive the terminal. */
static void blank_controls(char *text)
{
    for (; text != NULL && *text != '\0'; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f) *text = ' ';
}

static void make_printable(cJSON *tree)
{
    cJSON *item;
    cJSON_ArrayForEach(item, tree)
    {
        blank_controls(item->string);
        blank_controls(item->valuestring);
        make_printable(item);
    }
}

static const char *value_text(const cJSON *item, char *text, size_t size)
{
    if (cJSON_IsString(item) || cJSON_IsRaw(item))
        snprintf(text, size, "%s", item->valuestring);
    else if (cJSON_IsNumber(item))
        snprintf(text, size, "%.6g", item->valuedouble);
    else
        snprintf(text, size, "-");
    return text;
}

/* Characters, not bytes, so that columns with accents line up. */
static int text_width(const char *text)
{
    int n = 0;
    for (; *text != '\0'; text++) n += (*text & 0xc0) != 0x80;
    return n;
}

static void print_cell(const char *text, int width, bool left)
{
    const int gap = width - text_width(text);
    if (left)
        printf("%s%*s", text, gap, "");
    else
        printf("%*s%s", gap, "", text);
}

static bool is_section(const cJSON *item) { return item->string[0] == '/' || strcmp(item->string, "data") == 0; }

static void print_attributes(const cJSON *object)
{
    char text[4096];
    int width = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, object) if (!is_section(item) && text_width(item->string) > width) width = text_width(item->string);
    cJSON_ArrayForEach(item, object)
    {
        if (is_section(item)) continue;
        printf("  ");
        print_cell(item->string, width, true);
        printf("  %s\n", value_text(item, text, sizeof text));
    }
}

static size_t length_of(const cJSON *dim) { return (size_t)strtoull(dim->valuestring, NULL, 10); }

/* Entries of the first axis that a line stands for, and values in a line: the last axis. */
static void print_array_lines(const cJSON *dims, const cJSON *values)
{
    char text[CELL_BYTES];
    const int n_dims = cJSON_GetArraySize(dims);
    const cJSON *last = cJSON_GetArrayItem(dims, n_dims - 1), *value = values->child;
    const size_t per_line = length_of(last), n = (size_t)cJSON_GetArraySize(values), lines = per_line == 0 ? 0 : n / per_line;
    for (size_t line = 0; line < lines; line++) {
        const bool shown = line < HEAD_VALUES;
        if (shown) printf("    ");
        for (size_t i = 0; i < per_line; i++, value = value->next) {
            if (shown && (i < HEAD_VALUES || i + 1 == per_line)) printf(" %s", value_text(value, text, sizeof text));
            if (shown && i == HEAD_VALUES && i + 1 < per_line) printf(" ...");
        }
        if (shown) printf("\n");
    }
    if (lines > HEAD_VALUES || n == 0) printf("     ...\n");
}

static void print_array(const cJSON *array)
{
    char text[CELL_BYTES], title[256];
    const cJSON *dims = cJSON_GetObjectItem(array, "dims"), *dim;
    const char *separator = "";
    printf("  %s [", array->string);
    cJSON_ArrayForEach(dim, dims)
    {
        printf("%s%s %s", separator, dim->string, value_text(dim, text, sizeof text));
        separator = ", ";
    }
    printf("] %s: %s\n", value_text(cJSON_GetObjectItem(array, "units"), text, sizeof text),
           value_text(cJSON_GetObjectItem(array, "long_name"), title, sizeof title));
    print_array_lines(dims, cJSON_GetObjectItem(array, "values"));
}

/* Lines of a table's head: name, units, rows. */
static const char *cell_text(const cJSON *column, int line, char text[CELL_BYTES])
{
    if (line == 0) return snprintf(text, CELL_BYTES, "%.*s", CELL_BYTES - 1, column->string), text;
    if (line > 1) return value_text(cJSON_GetArrayItem(cJSON_GetObjectItem(column, "values"), line - 2), text, CELL_BYTES);
    const cJSON *units = cJSON_GetObjectItem(column, "units");
    return units == NULL ? "" : value_text(units, text, CELL_BYTES);
}

static int column_width(const cJSON *column, int lines)
{
    char text[CELL_BYTES];
    int width = 0;
    for (int line = 0; line < lines; line++) {
        const int n = text_width(cell_text(column, line, text));
        if (n > width) width = n;
    }
    return width;
}

/* Columns that fit into a line, from `column` on; returns the first that did not. */
static const cJSON *print_table_part(const cJSON *column, int lines)
{
    char text[CELL_BYTES];
    const cJSON *end = column;
    for (int used = 2; end != NULL; end = end->next) {
        if (!cJSON_IsObject(end)) continue;
        used += column_width(end, lines) + 2;
        if (end != column && used > LINE_WIDTH) break;
    }
    for (int line = 0; line < lines; line++) {
        for (const cJSON *c = column; c != end; c = c->next) {
            if (!cJSON_IsObject(c)) continue;
            printf("  ");
            print_cell(cell_text(c, line, text), column_width(c, lines), cJSON_IsString(cJSON_GetObjectItem(c, "values")->child));
        }
        printf("\n");
    }
    return end;
}

static bool is_column(const cJSON *item, const char *table_axis)
{
    const cJSON *dims = cJSON_GetObjectItem(item, "dims");
    return cJSON_IsObject(item) && cJSON_GetArraySize(dims) == 1 && strcmp(dims->child->string, table_axis) == 0;
}

/* Moves the columns of a group's table out of its data, so that arrays and table print one after the other. */
static cJSON *detach_columns(cJSON *data, const char *group)
{
    char axis[NAME_MAX_BYTES + 8];
    cJSON *columns = cJSON_CreateObject();
    snprintf(axis, sizeof axis, "%.*s_row", NAME_MAX_BYTES, strrchr(group, '/') + 1);
    for (cJSON *item = data->child, *next; columns != NULL && item != NULL; item = next) {
        next = item->next;
        if (is_column(item, axis)) cJSON_AddItemToArray(columns, cJSON_DetachItemViaPointer(data, item));
    }
    return columns;
}

static void print_data(cJSON *data, const char *group)
{
    char text[CELL_BYTES];
    const cJSON *rows = cJSON_GetObjectItem(data, KVL_COMMITTED), *item;
    cJSON *columns = detach_columns(data, group);
    cJSON_ArrayForEach(item, data) if (cJSON_IsObject(item)) print_array(item);
    if (columns != NULL && columns->child != NULL && rows != NULL) {
        const size_t n = strtoull(value_text(rows, text, sizeof text), NULL, 10);
        const int head = n < HEAD_ROWS ? (int)n : HEAD_ROWS;
        printf("  %s rows%s\n", text, n > HEAD_ROWS ? ", the first ones:" : n > 0 ? ":" : "");
        for (const cJSON *column = columns->child; column != NULL;) column = print_table_part(column, head + 2);
    }
    cJSON_Delete(columns);
}

static void print_section(cJSON *section, const char *name)
{
    cJSON *data = cJSON_GetObjectItem(section, "data");
    if (name[0] == '/') printf("\n%s%s\n", name, section->child == NULL ? "  (empty)" : "");
    print_attributes(section);
    if (data != NULL) print_data(data, name[0] == '/' ? name : "/");
}

static void print_tree(cJSON *tree)
{
    cJSON *item;
    make_printable(tree);
    print_section(tree, "");
    cJSON_ArrayForEach(item, tree) if (item->string[0] == '/') print_section(item, item->string);
}

static kvl_status print_json(const cJSON *tree)
{
    char *text = cJSON_Print(tree);
    if (text == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory");
    puts(text);
    cJSON_free(text);
    return KVL_OK;
}

kvl_status kvl_runfile_show(const char *path, bool json)
{
    kvl_status status = KVL_OK;
    cJSON *tree = NULL;
    KVL_TRY(kvl_runfile_read(path, SHOWN_VALUES, &tree));
    if (json)
        KVL_TRY(print_json(tree));
    else
        print_tree(tree);
done:
    cJSON_Delete(tree);
    return status;
}
