/* Reads a grid with libcyaml, and multiplies it out. */
#include "grid.h"
#include "file.h"
#include "mem.h"
#include "text.h"
#include <cyaml/cyaml.h>
#include <stdio.h>
#include <string.h>

const char *const kvl_axis_name[KVL_AXES] = {"model", "text", "kv", "ctx", "seed", "device"};
const char *const kvl_axis_option[KVL_AXES] = {"model", "file", "kv", "ctx", "seed", "device"};

/* ---- schema ---- */

static const cyaml_schema_value_t word = {CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char *, 0, CYAML_UNLIMITED)};

#define OPTIONAL (CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL)
#define FIXED(axis) CYAML_FIELD_STRING_PTR(key_##axis, OPTIONAL, struct kvl_grid_cell, fixed[KVL_AXIS_##axis], 1, CYAML_UNLIMITED)
#define AXIS(key, axis_) CYAML_FIELD_SEQUENCE(key, OPTIONAL, struct kvl_grid, axis[KVL_AXIS_##axis_].value, &word, 1, CYAML_UNLIMITED)
#define key_MODEL "model"
#define key_TEXT "text"
#define key_KV "kv"
#define key_CTX "ctx"
#define key_SEED "seed"
#define key_DEVICE "device"

static const cyaml_schema_field_t cell_fields[] = {
    FIXED(MODEL),
    FIXED(TEXT),
    FIXED(KV),
    FIXED(CTX),
    FIXED(SEED),
    FIXED(DEVICE),
    CYAML_FIELD_SEQUENCE("options", OPTIONAL, struct kvl_grid_cell, options, &word, 0, CYAML_UNLIMITED),
    CYAML_FIELD_END,
};
static const cyaml_schema_value_t cell_schema = {CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, struct kvl_grid_cell, cell_fields)};

static const cyaml_schema_field_t grid_fields[] = {
    CYAML_FIELD_STRING_PTR("name", CYAML_FLAG_POINTER, struct kvl_grid, name, 1, 64),
    CYAML_FIELD_STRING_PTR("command", CYAML_FLAG_POINTER, struct kvl_grid, command, 1, 64),
    CYAML_FIELD_STRING_PTR("program", OPTIONAL, struct kvl_grid, program, 1, CYAML_UNLIMITED),
    CYAML_FIELD_STRING_PTR("out", OPTIONAL, struct kvl_grid, out, 1, CYAML_UNLIMITED),
    AXIS("models", MODEL),
    AXIS("texts", TEXT),
    AXIS("kv", KV),
    AXIS("ctx", CTX),
    AXIS("seeds", SEED),
    AXIS("devices", DEVICE),
    CYAML_FIELD_SEQUENCE("options", OPTIONAL, struct kvl_grid, options, &word, 0, CYAML_UNLIMITED),
    CYAML_FIELD_SEQUENCE("cells", OPTIONAL, struct kvl_grid, cells, &cell_schema, 1, CYAML_UNLIMITED),
    CYAML_FIELD_END,
};
static const cyaml_schema_value_t grid_schema = {CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct kvl_grid, grid_fields)};

/* ---- reading ---- */

/* libcyaml says what is wrong, and where, in several lines of a log: "Load: Unexpected key: kvs", "  in mapping (line: 3, column: 1)". */
static void collect(cyaml_log_t level, void *context, const char *format, va_list args)
{
    struct kvl_text *log = context;
    char line[512];
    if (level < CYAML_LOG_ERROR) return;
    vsnprintf(line, sizeof line, format, args);
    line[strcspn(line, "\n")] = '\0';
    const char *text = line + strspn(line, " ");
    if (strncmp(text, "Load: ", 6) == 0) text += 6;
    if (strcmp(text, "Backtrace:") == 0) return;
    kvl_text_printf(log, "%s%s", log->size ? "; " : "", text);
}

static size_t line_of(const char *text, const char *place)
{
    size_t line = 1;
    for (; text < place; text++) line += *text == '\n';
    return line;
}

static bool in_comment(const char *text, const char *place)
{
    while (place > text && place[-1] != '\n' && *place != '#') place--;
    return *place == '#';
}

/* The first "<key>:" of the text that is a key. */
static const char *find_key(const char *text, const char *key)
{
    const size_t size = strlen(key);
    for (const char *at = text; (at = strstr(at, key)) != NULL; at += size)
        if ((at == text || strchr(" \t\n{,-\"'", at[-1])) && at[size + strspn(at + size, " \"'")] == ':' && !in_comment(text, at)) return at;
    return NULL;
}

/* libcyaml names an unknown key and the line of what stands before it; said here: its own line, and which keys there are. */
static kvl_status unknown_key(const char *path, const char *text, const char *log)
{
    enum { MOST_KEYS = 16 };
    kvl_status status = KVL_OK;
    char key[64];
    const char *said = strstr(log, "Unexpected key: "), *known[MOST_KEYS];
    const char *place = said && sscanf(said, "Unexpected key: %63[^; ]", key) == 1 ? find_key(text, key) : NULL;
    struct kvl_text list = {0};
    size_t n = 0;
    if (place == NULL) return KVL_OK;
    for (const cyaml_schema_field_t *field = strstr(log, "'cells'") ? cell_fields : grid_fields; field->key && n < MOST_KEYS; field++) {
        known[n++] = field->key;
        KVL_TRY(kvl_text_printf(&list, " %s", field->key));
    }
    const char *closest = kvl_closest(key, known, n);
    status = kvl_fail(KVL_E_USAGE, "%s: line %zu: Unexpected key: %s%s%s; legal are%s", path, line_of(text, place), key, closest ? "; did you mean " : "",
                      closest ? closest : "", list.data);
done:
    kvl_text_free(&list);
    return status;
}

static const cyaml_config_t yaml_config = {.log_fn = collect, .mem_fn = kvl_mem_hook, .log_level = CYAML_LOG_ERROR};

kvl_status kvl_grid_load(const char *path, struct kvl_grid **out)
{
    kvl_status status = KVL_OK;
    struct kvl_text log = {0};
    cyaml_config_t config = yaml_config;
    char *text = NULL;
    size_t size;
    cyaml_data_t *grid = NULL;
    KVL_TRY(kvl_file_read(path, &text, &size));
    config.log_ctx = &log;
    const cyaml_err_t error = cyaml_load_data((const uint8_t *)text, size, &config, &grid_schema, &grid, NULL);
    if (error != CYAML_OK) {
        KVL_TRY(log.size ? unknown_key(path, text, log.data) : KVL_OK);
        const char *why = cyaml_strerror(error);
        const bool said = log.size && strncmp(log.data, why, strlen(why)) == 0; /* the log begins with the same words */
        status = kvl_fail(error == CYAML_ERR_OOM ? KVL_E_MEMORY : KVL_E_USAGE, "%s: %s%s%s", path, said ? "" : why, said ? "" : ": ",
                          log.size ? log.data : "no line known");
        goto done;
    }
    if (grid == NULL) {
        status = kvl_fail(KVL_E_USAGE, "%s: the file holds nothing; wanted a grid, of which kvlab sweep --help shows one", path);
        goto done;
    }
    *out = grid;
    if (strspn((*out)->name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") != strlen((*out)->name)) {
        status = kvl_fail(KVL_E_USAGE, "%s: name \"%s\": wanted letters, digits and _ . -, as it names a folder", path, (*out)->name);
        kvl_grid_free(out);
    }
done:
    kvl_text_free(&log);
    kvl_free(&text);
    return status;
}

void kvl_grid_free(struct kvl_grid **grid)
{
    struct kvl_text log = {0};
    cyaml_config_t config = yaml_config;
    config.log_ctx = &log;
    if (*grid) cyaml_free(&config, &grid_schema, *grid, 0);
    kvl_text_free(&log);
    *grid = NULL;
}

/* ---- cells ---- */

/* Number of values an axis has in a listed cell: one if fixed, or if the axis is empty (then NULL). */
static size_t axis_size(const struct kvl_grid *grid, const struct kvl_grid_cell *listed, int axis)
{
    const size_t n = grid->axis[axis].value_count;
    return (listed && listed->fixed[axis]) || n == 0 ? 1 : n;
}

static const char *axis_value(const struct kvl_grid *grid, const struct kvl_grid_cell *listed, int axis, size_t i)
{
    if (listed && listed->fixed[axis]) return listed->fixed[axis];
    return grid->axis[axis].value_count ? grid->axis[axis].value[i] : NULL;
}

static size_t product(const struct kvl_grid *grid, const struct kvl_grid_cell *listed)
{
    size_t n = 1;
    for (int a = 0; a < KVL_AXES; a++)
        if (!kvl_mul_size(n, axis_size(grid, listed, a), &n)) return SIZE_MAX;
    return n;
}

/* Cell number i of a product: its digits, the last axis first. */
static struct kvl_grid_point cell_number(const struct kvl_grid *grid, const struct kvl_grid_cell *listed, size_t i)
{
    struct kvl_grid_point cell = {.listed = listed};
    for (int a = KVL_AXES - 1; a >= 0; a--) {
        const size_t size = axis_size(grid, listed, a);
        cell.value[a] = axis_value(grid, listed, a, i % size);
        i /= size;
    }
    return cell;
}

kvl_status kvl_grid_cells(const struct kvl_grid *grid, struct kvl_grid_point **cells, size_t *n)
{
    enum { MOST_CELLS = 1000000 };
    kvl_status status = KVL_OK;
    struct kvl_grid_point *all = NULL;
    size_t used = 0;
    const unsigned n_listed = grid->cells_count ? grid->cells_count : 1;
    for (unsigned i = 0; i < n_listed; i++) {
        const struct kvl_grid_cell *listed = grid->cells_count ? &grid->cells[i] : NULL;
        const size_t more = product(grid, listed);
        if (more > MOST_CELLS - used) {
            status = kvl_fail(KVL_E_USAGE, "grid %s has more than %d cells", grid->name, MOST_CELLS);
            goto done;
        }
        KVL_TRY(kvl_realloc(&all, used + more, sizeof *all));
        for (size_t k = 0; k < more; k++) all[used++] = cell_number(grid, listed, k);
    }
    *cells = all;
    *n = used;
    all = NULL;
done:
    kvl_free(&all);
    return status;
}
