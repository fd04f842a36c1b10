/* The committed table: CSV after three comment lines that name the compilers. */
#include "file.h"
#include "mem.h"
#include "text.h"
#include "xcheck.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char columns[] =
    "program,digest,target,kernel,result,group,lanes,registers,spills,private_bytes,local_bytes,occupancy";
enum { N_COLUMNS = 12 };

kvl_status kvl_xcheck_rows_add(struct kvl_xcheck_rows *rows, const struct kvl_xcheck_row *row)
{
    if (rows->n == rows->room) {
        const size_t room = rows->room ? 2 * rows->room : 64;
        const kvl_status status = kvl_realloc(&rows->row, room, sizeof *row);
        if (status != KVL_OK) return status;
        rows->room = room;
    }
    rows->row[rows->n++] = *row;
    return KVL_OK;
}

void kvl_xcheck_rows_free(struct kvl_xcheck_rows *rows)
{
    kvl_free(&rows->row);
    *rows = (struct kvl_xcheck_rows){0};
}

void kvl_xcheck_table_free(struct kvl_xcheck_table *table)
{
    kvl_xcheck_rows_free(&table->rows);
    *table = (struct kvl_xcheck_table){0};
}

static bool copy_text(char *out, size_t size, const char *cell) { return snprintf(out, size, "%s", cell) < (int)size; }

static bool copy_u32(uint32_t *out, const char *cell)
{
    int64_t value;
    if (!kvl_parse_i64(cell, &value) || value < 0 || value > UINT32_MAX) return false;
    *out = (uint32_t)value;
    return true;
}

static bool copy_u64(uint64_t *out, const char *cell)
{
    int64_t value;
    if (!kvl_parse_i64(cell, &value) || value < 0) return false;
    *out = (uint64_t)value;
    return true;
}

/* line is cut into its cells. */
static bool parse_row(char *line, struct kvl_xcheck_row *row)
{
    char *cell[N_COLUMNS], *rest = line;
    for (int i = 0; i < N_COLUMNS; i++)
        if ((cell[i] = strsep(&rest, ",")) == NULL) return false;
    if (rest != NULL) return false;
    row->failed = strcmp(cell[4], "failed") == 0;
    return (row->failed || strcmp(cell[4], "ok") == 0) && copy_text(row->program, sizeof row->program, cell[0]) &&
           copy_text(row->digest, sizeof row->digest, cell[1]) && copy_text(row->target, sizeof row->target, cell[2]) &&
           copy_text(row->kernel, sizeof row->kernel, cell[3]) && copy_u32(&row->group, cell[5]) &&
           copy_u32(&row->lanes, cell[6]) && copy_u32(&row->registers, cell[7]) && copy_u32(&row->spills, cell[8]) &&
           copy_u64(&row->private_bytes, cell[9]) && copy_u64(&row->local_bytes, cell[10]) && copy_u32(&row->occupancy, cell[11]);
}

/* "# nvidia: ..." */
static void parse_comment(const char *line, struct kvl_xcheck_table *table)
{
    for (int v = 0; v < KVL_XCHECK_VENDORS; v++) {
        const size_t n = strlen(kvl_xcheck_vendor_name[v]);
        if (strncmp(line + 2, kvl_xcheck_vendor_name[v], n) == 0 && strncmp(line + 2 + n, ": ", 2) == 0)
            snprintf(table->version[v], sizeof table->version[v], "%s", line + 2 + n + 2);
    }
}

kvl_status kvl_xcheck_table_read(const char *path, struct kvl_xcheck_table *out)
{
    kvl_status status = KVL_OK;
    char *data = NULL;
    size_t size, n_lines = 0;
    *out = (struct kvl_xcheck_table){0};
    if (access(path, F_OK) != 0) return KVL_OK;
    KVL_TRY(kvl_file_read(path, &data, &size));
    for (char *rest = data, *line; (line = strsep(&rest, "\n")) != NULL;) {
        struct kvl_xcheck_row row = {0};
        n_lines++;
        if (line[0] == '\0' || strcmp(line, columns) == 0) continue;
        if (strncmp(line, "# ", 2) == 0) {
            parse_comment(line, out);
            continue;
        }
        if (!parse_row(line, &row)) {
            status =
                kvl_fail(KVL_E_FORMAT, "%s, line %zu: not a row of %s; write the table anew with kvlab xcheck --fresh --update",
                         path, n_lines, columns);
            goto done;
        }
        KVL_TRY(kvl_xcheck_rows_add(&out->rows, &row));
    }
done:
    kvl_free(&data);
    if (status != KVL_OK) kvl_xcheck_table_free(out);
    return status;
}

kvl_status kvl_xcheck_table_write(const char *path, const struct kvl_xcheck_table *table)
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    for (int v = 0; v < KVL_XCHECK_VENDORS; v++)
        if (table->version[v][0] != '\0')
            KVL_TRY(kvl_text_printf(&text, "# %s: %s\n", kvl_xcheck_vendor_name[v], table->version[v]));
    KVL_TRY(kvl_text_printf(&text, "%s\n", columns));
    for (size_t i = 0; i < table->rows.n; i++) {
        const struct kvl_xcheck_row *r = table->rows.row + i;
        KVL_TRY(kvl_text_printf(&text, "%s,%s,%s,%s,%s,%u,%u,%u,%u,%llu,%llu,%u\n", r->program, r->digest, r->target, r->kernel,
                                r->failed ? "failed" : "ok", r->group, r->lanes, r->registers, r->spills,
                                (unsigned long long)r->private_bytes, (unsigned long long)r->local_bytes, r->occupancy));
    }
    KVL_TRY(kvl_file_write(path, text.data, text.size));
done:
    kvl_text_free(&text);
    return status;
}
