/* Many run files as one table: a row a run with everything a file says in attributes, or the rows of one of their tables. */
#ifndef KVL_RUNTABLE_H
#define KVL_RUNTABLE_H
#include "runfile.h"
#include "text.h"
#include <stdio.h>

/* Run files that words name: files as they are, of a folder all *.h5 in the order of their names. */
struct kvl_run_paths {
    char **path;
    size_t n;
};
kvl_status kvl_run_paths_find(size_t n_words, char *const *words, struct kvl_run_paths *out);
void kvl_run_paths_free(struct kvl_run_paths *paths);

/* kvl_runfile_read, but refuses a file of merged runs. */
kvl_status kvl_run_read(const char *path, size_t most, struct cJSON **tree);

struct kvl_runtable_column {
    char name[96];
    enum kvl_column_type type; /* what all its cells fit into: U64, I64, F64 or TEXT */
    uint32_t width;            /* of the longest text */
};
struct kvl_runtable_row {
    char **cell; /* [n] as text; NULL = the file does not say; columns beyond n neither */
    size_t n;
};
enum { KVL_RUNTABLE_VALUES = 1 << 20 }; /* of a column that are read */
struct kvl_runtable {
    struct kvl_runtable_column *column;
    struct kvl_runtable_row *row;
    size_t n_columns, n_rows;
};

/* Adds one row: "file", the root's attributes by their names, those of groups as "config_kv", "memory_resident_bytes" ... */
kvl_status kvl_runtable_add_run(struct kvl_runtable *table, const char *path, const struct cJSON *tree);
/* Adds the rows of the file's table `group` ("/quality"), each with the number `run` in front. None if it has no such table. */
kvl_status kvl_runtable_add_rows(struct kvl_runtable *table, const char *group, size_t run, const struct cJSON *tree);
void kvl_runtable_free(struct kvl_runtable *table);

/* RFC 4180, a header line and a line a row. Whoever owns `out` checks it for errors. */
void kvl_runtable_csv(const struct kvl_runtable *table, FILE *out);

/* One HDF5 file of columns from many: /runs, a row a run, and /quality, /bench and /kernels, their rows with the number of the run in
 * /runs. A file that cannot be read is named in a warning and left out; *n_bad counts them. Readers of `out` see the old file or the new one. */
kvl_status kvl_runs_merge(const struct kvl_run_paths *paths, const char *out, size_t *n_bad);

#endif
