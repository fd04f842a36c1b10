#include "runtable.h"
#include "log.h"
#include "mem.h"
#include "runrecord.h"
#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- paths ---- */

static kvl_status add_path(struct kvl_run_paths *paths, const char *folder, const char *name)
{
    kvl_status status = KVL_OK;
    struct kvl_text path = {0};
    KVL_TRY(kvl_text_printf(&path, "%s%s%s", folder ? folder : "", folder ? "/" : "", name));
    KVL_TRY(kvl_realloc(&paths->path, paths->n + 1, sizeof *paths->path));
    paths->path[paths->n++] = path.data;
    path = (struct kvl_text){0};
done:
    kvl_text_free(&path);
    return status;
}

static int is_run_file(const struct dirent *entry)
{
    const char *dot = strrchr(entry->d_name, '.');
    return dot != NULL && dot != entry->d_name && strcmp(dot, ".h5") == 0;
}

static kvl_status add_folder(struct kvl_run_paths *paths, const char *folder)
{
    kvl_status status = KVL_OK;
    struct dirent **entry = NULL;
    const int n = scandir(folder, &entry, is_run_file, alphasort);
    if (n < 0) return kvl_fail(KVL_E_IO, "%s: cannot list: %s", folder, strerror(errno));
    for (int i = 0; i < n && status == KVL_OK; i++) status = add_path(paths, folder, entry[i]->d_name);
    for (int i = 0; i < n; i++) free(entry[i]); /* scandir's */
    free(entry);
    return status;
}

kvl_status kvl_run_paths_find(size_t n_words, char *const *words, struct kvl_run_paths *out)
{
    kvl_status status = KVL_OK;
    struct stat info;
    *out = (struct kvl_run_paths){0};
    for (size_t i = 0; i < n_words; i++)
        KVL_TRY(stat(words[i], &info) == 0 && S_ISDIR(info.st_mode) ? add_folder(out, words[i]) : add_path(out, NULL, words[i]));
    if (out->n == 0) status = kvl_fail(KVL_E_USAGE, "there are no run files (*.h5) %s", n_words ? "in the folders given (folders in them are not searched)" : "given");
done:
    if (status != KVL_OK) kvl_run_paths_free(out);
    return status;
}

void kvl_run_paths_free(struct kvl_run_paths *paths)
{
    for (size_t i = 0; i < paths->n; i++) kvl_free(&paths->path[i]);
    kvl_free(&paths->path);
    paths->n = 0;
}

/* ---- cells ---- */

/* Column `name`, made if new. `expected`: where it was in the row before, so that most calls look once. */
static kvl_status find_column(struct kvl_runtable *t, const char *name, size_t expected, size_t *out)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < t->n_columns; i++) {
        *out = (expected + i) % t->n_columns;
        if (strcmp(t->column[*out].name, name) == 0) return KVL_OK;
    }
    KVL_TRY(kvl_realloc(&t->column, t->n_columns + 1, sizeof *t->column));
    t->column[t->n_columns] = (struct kvl_runtable_column){.type = KVL_COL_U64, .width = 1};
    if (snprintf(t->column[t->n_columns].name, sizeof t->column->name, "%s", name) >= (int)sizeof t->column->name)
        status = kvl_fail(KVL_E_FORMAT, "attribute %s: the name is too long for a column", name);
    else
        *out = t->n_columns++;
done:
    return status;
}

/* An attribute or value as text, and the narrowest type it fits into; false if it is neither number nor text. */
static bool read_value(const cJSON *item, char number[32], const char **text, enum kvl_column_type *type)
{
    *text = item->valuestring;
    *type = KVL_COL_TEXT;
    if (cJSON_IsString(item)) return true;
    if (cJSON_IsRaw(item)) *type = item->valuestring[0] == '-' ? KVL_COL_I64 : KVL_COL_U64;
    if (cJSON_IsNumber(item)) {
        snprintf(number, 32, "%.17g", item->valuedouble);
        *text = number;
        *type = KVL_COL_F64;
    }
    return cJSON_IsRaw(item) || cJSON_IsNumber(item);
}

/* U64 < I64 < F64 < TEXT: a column takes the widest of its cells. */
static enum kvl_column_type wider(enum kvl_column_type a, enum kvl_column_type b) { return a > b ? a : b; }

static kvl_status set_cell(struct kvl_runtable *t, struct kvl_runtable_row *row, const char *name, const cJSON *item, size_t *cursor)
{
    kvl_status status = KVL_OK;
    char number[32];
    const char *text;
    enum kvl_column_type type;
    size_t at = 0;
    if (!read_value(item, number, &text, &type)) return KVL_OK;
    KVL_TRY(find_column(t, name, *cursor, &at));
    if (at >= row->n) {
        KVL_TRY(kvl_realloc(&row->cell, t->n_columns, sizeof *row->cell));
        while (row->n < t->n_columns) row->cell[row->n++] = NULL;
    }
    kvl_free(&row->cell[at]);
    KVL_TRY(kvl_strdup(&row->cell[at], text));
    struct kvl_runtable_column *column = &t->column[at];
    column->type = wider(column->type, type);
    if (strlen(text) > column->width) column->width = (uint32_t)strlen(text);
    *cursor = at + 1;
done:
    return status;
}

static kvl_status new_row(struct kvl_runtable *t, struct kvl_runtable_row **out)
{
    const kvl_status status = kvl_realloc(&t->row, t->n_rows + 1, sizeof *t->row);
    if (status != KVL_OK) return status;
    *out = &t->row[t->n_rows++];
    **out = (struct kvl_runtable_row){0};
    return KVL_OK;
}

static kvl_status add_attributes(struct kvl_runtable *t, struct kvl_runtable_row *row, const cJSON *group, size_t *cursor)
{
    kvl_status status = KVL_OK;
    char name[sizeof t->column->name + 1];
    const cJSON *item;
    cJSON_ArrayForEach(item, group)
    {
        snprintf(name, sizeof name, "%s_%s", group->string + 1, item->string);
        KVL_TRY(set_cell(t, row, name, item, cursor));
    }
done:
    return status;
}

kvl_status kvl_runtable_add_run(struct kvl_runtable *t, const char *path, const cJSON *tree)
{
    kvl_status status = KVL_OK;
    struct kvl_runtable_row *row;
    size_t cursor = 0;
    const cJSON *item;
    KVL_TRY(new_row(t, &row));
    cJSON_ArrayForEach(item, tree) /* "file" comes first */
    {
        if (cJSON_IsObject(item))
            KVL_TRY(add_attributes(t, row, item, &cursor));
        else
            KVL_TRY(set_cell(t, row, item->string, item, &cursor));
    }
done:
    return status;
}

static bool is_column(const cJSON *item, const char *axis)
{
    const cJSON *dims = cJSON_GetObjectItem(item, "dims");
    return cJSON_IsObject(item) && cJSON_GetArraySize(dims) == 1 && strcmp(dims->child->string, axis) == 0;
}

kvl_status kvl_runtable_add_rows(struct kvl_runtable *t, const char *group, size_t run, const cJSON *tree)
{
    kvl_status status = KVL_OK;
    const cJSON *data = cJSON_GetObjectItem(cJSON_GetObjectItem(tree, group), "data"), *item;
    const size_t start = t->n_rows;
    size_t cursor = 0, rows = 0;
    char axis[128], number[32];
    snprintf(number, sizeof number, "%zu", run);
    cJSON *run_item = cJSON_CreateRaw(number);
    if (run_item == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory");
    snprintf(axis, sizeof axis, "%s_row", group + 1);
    cJSON_ArrayForEach(item, data)
    {
        const cJSON *value = is_column(item, axis) ? cJSON_GetObjectItem(item, "values")->child : NULL;
        for (size_t i = 0; value != NULL; value = value->next, i++) {
            struct kvl_runtable_row *row;
            if (i == rows) {
                KVL_TRY(new_row(t, &row));
                cursor = 0;
                KVL_TRY(set_cell(t, row, "run", run_item, &cursor));
                rows++;
            }
            KVL_TRY(set_cell(t, &t->row[start + i], item->string, value, &cursor));
            cursor--; /* the next cell is of the same column */
        }
    }
done:
    cJSON_Delete(run_item);
    return status;
}

void kvl_runtable_free(struct kvl_runtable *t)
{
    for (size_t r = 0; r < t->n_rows; r++) {
        for (size_t i = 0; i < t->row[r].n; i++) kvl_free(&t->row[r].cell[i]);
        kvl_free(&t->row[r].cell);
    }
    kvl_free(&t->row);
    kvl_free(&t->column);
    *t = (struct kvl_runtable){0};
}

static const char *cell_of(const struct kvl_runtable_row *row, size_t column) { return column < row->n ? row->cell[column] : NULL; }

/* ---- CSV ---- */

static void csv_cell(FILE *out, const char *text)
{
    if (strpbrk(text, ",\"\r\n") == NULL) {
        fputs(text, out);
        return;
    }
    putc('"', out);
    for (const char *c = text; *c; c++) {
        if (*c == '"') putc('"', out);
        putc(*c, out);
    }
    putc('"', out);
}

void kvl_runtable_csv(const struct kvl_runtable *t, FILE *out)
{
    for (size_t c = 0; c < t->n_columns; c++) {
        if (c > 0) putc(',', out);
        csv_cell(out, t->column[c].name);
    }
    for (size_t r = 0; r < t->n_rows; r++)
        for (size_t c = 0; c < t->n_columns; c++) {
            putc(c == 0 ? '\n' : ',', out);
            const char *text = cell_of(&t->row[r], c);
            if (text != NULL) csv_cell(out, text);
        }
    putc('\n', out);
}

/* ---- merging ---- */

static const char *units_of(const struct kvl_runtable_column *column)
{
    static const struct {
        const char *ending, *units;
    } known[] = {{"_bytes", "byte"}, {"bytes_per_token", "byte"}, {"_ns", "ns"}, {"tokens_per_s", "s-1"}, {"_gbps", "GB s-1"}};
    const size_t n = strlen(column->name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const size_t size = strlen(known[i].ending);
        if (n >= size && strcmp(column->name + n - size, known[i].ending) == 0) return known[i].units;
    }
    return "1";
}

/* A column that some rows lack is of floats, which have NaN. */
static void widen_gaps(struct kvl_runtable *t)
{
    for (size_t c = 0; c < t->n_columns; c++)
        for (size_t r = 0; r < t->n_rows; r++)
            if (cell_of(&t->row[r], c) == NULL) t->column[c].type = wider(t->column[c].type, KVL_COL_F64);
}

static kvl_status make_table(struct kvl_runfile *file, const char *group, struct kvl_runtable *t, int *number)
{
    kvl_status status = KVL_OK;
    struct kvl_column *column = NULL;
    *number = -1;
    if (t->n_columns == 0) return KVL_OK;
    widen_gaps(t);
    KVL_TRY(kvl_alloc(&column, t->n_columns, sizeof *column));
    for (size_t c = 0; c < t->n_columns; c++) {
        const struct kvl_runtable_column *from = &t->column[c];
        column[c] = (struct kvl_column){from->name, units_of(from), from->name, from->type, from->type == KVL_COL_TEXT ? from->width : 0};
    }
    KVL_TRY(kvl_runfile_table(file, group, column, t->n_columns, number));
done:
    kvl_free(&column);
    return status;
}

static union kvl_cell cell_value(enum kvl_column_type type, const char *text)
{
    switch (type) {
    case KVL_COL_U64: return (union kvl_cell){.u64 = strtoull(text, NULL, 10)};
    case KVL_COL_I64: return (union kvl_cell){.i64 = strtoll(text, NULL, 10)};
    case KVL_COL_TEXT: return (union kvl_cell){.text = text ? text : ""};
    default: return (union kvl_cell){.f64 = text ? strtod(text, NULL) : (double)NAN};
    }
}

static kvl_status put_rows(struct kvl_runfile *file, int number, const struct kvl_runtable *t)
{
    kvl_status status = KVL_OK;
    union kvl_cell *cell = NULL;
    KVL_TRY(kvl_alloc(&cell, t->n_columns, sizeof *cell));
    for (size_t r = 0; r < t->n_rows; r++) {
        for (size_t c = 0; c < t->n_columns; c++) cell[c] = cell_value(t->column[c].type, cell_of(&t->row[r], c));
        KVL_TRY(kvl_runfile_row(file, number, cell));
    }
done:
    kvl_free(&cell);
    return status;
}

static const char *const merged_groups[] = {"/runs", "/quality", "/bench", "/kernels"};
enum { RUNS, N_MERGED = 4 };

static bool is_merged(const cJSON *tree) { return cJSON_GetObjectItem(tree, merged_groups[RUNS]) != NULL; }

kvl_status kvl_run_read(const char *path, size_t most, cJSON **tree)
{
    const kvl_status status = kvl_runfile_read(path, most, tree);
    if (status != KVL_OK || !is_merged(*tree)) return status;
    cJSON_Delete(*tree);
    *tree = NULL;
    return kvl_fail(KVL_E_FORMAT, "%s: it holds merged runs; give the run files themselves", path);
}

/* Nobody's run file may be lost by a slip in -o. */
static kvl_status check_replaced(const char *out)
{
    struct stat info;
    cJSON *tree = NULL;
    if (stat(out, &info) != 0) return KVL_OK;
    const bool merged = kvl_runfile_read(out, 1, &tree) == KVL_OK && is_merged(tree);
    cJSON_Delete(tree);
    kvl_error_clear();
    return merged ? KVL_OK : kvl_fail(KVL_E_USAGE, "%s is there and no merged file: log merge replaces only its own; choose another name", out);
}

static kvl_status add_file(struct kvl_runtable table[N_MERGED], const char *path)
{
    kvl_status status = KVL_OK;
    cJSON *tree = NULL;
    const size_t run = table[RUNS].n_rows;
    KVL_TRY(kvl_run_read(path, KVL_RUNTABLE_VALUES, &tree));
    KVL_TRY(kvl_runtable_add_run(&table[RUNS], path, tree));
    for (int g = RUNS + 1; g < N_MERGED; g++) KVL_TRY(kvl_runtable_add_rows(&table[g], merged_groups[g], run, tree));
done:
    cJSON_Delete(tree);
    return status;
}

static kvl_status write_merged(struct kvl_runtable table[N_MERGED], const char *path)
{
    kvl_status status = KVL_OK;
    struct kvl_text command = {0};
    struct kvl_runfile *file = NULL;
    int number[N_MERGED];
    KVL_TRY(kvl_command_line(&command));
    KVL_TRY(kvl_runfile_create(path, command.data, &file));
    KVL_TRY(kvl_runfile_text(file, "/", "title", "kvlab runs, merged"));
    for (int g = 0; g < N_MERGED; g++) KVL_TRY(make_table(file, merged_groups[g], &table[g], &number[g]));
    KVL_TRY(kvl_runfile_start(file));
    for (int g = 0; g < N_MERGED; g++)
        if (number[g] >= 0) KVL_TRY(put_rows(file, number[g], &table[g]));
    KVL_TRY(kvl_runfile_close(&file, "complete"));
done:
    if (file) kvl_runfile_close(&file, "failed");
    kvl_text_free(&command);
    return status;
}

kvl_status kvl_runs_merge(const struct kvl_run_paths *paths, const char *out, size_t *n_bad)
{
    kvl_status status = KVL_OK;
    struct kvl_runtable table[N_MERGED] = {{0}};
    struct kvl_text fresh = {0};
    *n_bad = 0;
    KVL_TRY(check_replaced(out));
    for (size_t i = 0; i < paths->n; i++) {
        status = add_file(table, paths->path[i]);
        if (status == KVL_E_MEMORY) goto done;
        if (status == KVL_OK) continue;
        kvl_warn("left out: %s", kvl_error_text());
        kvl_error_clear();
        ++*n_bad;
    }
    status = KVL_OK;
    if (table[RUNS].n_rows == 0) {
        status = kvl_fail(KVL_E_FORMAT, "none of the %zu files is a run file", paths->n);
        goto done;
    }
    KVL_TRY(kvl_text_printf(&fresh, "%s.new", out));
    remove(fresh.data);
    KVL_TRY(write_merged(table, fresh.data));
    if (rename(fresh.data, out) != 0) status = kvl_fail(KVL_E_IO, "%s: cannot rename %s to it: %s", out, fresh.data, strerror(errno));
done:
    kvl_text_free(&fresh);
    for (int g = 0; g < N_MERGED; g++) kvl_runtable_free(&table[g]);
    return status;
}
