/* The run file: one HDF5 file a run. The only room with hdf5.h.
 *
 * Fixed schema made before step 0, columns that only grow, batches of 256 rows, flush, then the `committed` counter;
 * <path>.part until kvl_runfile_close(complete) renames it. Every axis is a dimension scale, every dataset has units:
 * h5py, xarray, ncdump and h5dump read it as it is. Layout: README of this room, section "Layout". */
#ifndef KVL_RUNFILE_H
#define KVL_RUNFILE_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvl_runfile;

enum kvl_column_type { KVL_COL_U64, KVL_COL_I64, KVL_COL_F64, KVL_COL_F32, KVL_COL_TEXT /* fixed length, UTF-8 */ };

/* A growing column of a table (= HDF5 group; all its columns share one row axis named <table>_row). */
struct kvl_column {
    const char *name, *units, *long_name; /* units: UDUNITS ("ns", "byte", "1") */
    enum kvl_column_type type;
    uint32_t width;                       /* bytes a value of a TEXT column; else 0 */
};

/* A value of one cell, by the column's type (U64/I64/F64+F32/TEXT). */
union kvl_cell {
    uint64_t u64;
    int64_t i64;
    double f64;
    const char *text;
};

extern const char kvl_revision[]; /* of this program: what run files say as git; by scripts/revision.cmake */

/* Creates <path>.part with root attributes schema_version, command_line, git, host, status="running", start (ISO 8601 UTC). Folders are made. */
kvl_status kvl_runfile_create(const char *path, const char *command_line, struct kvl_runfile **out);

/* Before kvl_runfile_start: describe everything. Group paths are like "/config"; made on demand. */
kvl_status kvl_runfile_text(struct kvl_runfile *f, const char *group, const char *name, const char *value);
kvl_status kvl_runfile_number(struct kvl_runfile *f, const char *group, const char *name, double value);
kvl_status kvl_runfile_integer(struct kvl_runfile *f, const char *group, const char *name, int64_t value);
/* Table with its columns, e.g. "/steps". Returns its number in *table. */
kvl_status kvl_runfile_table(struct kvl_runfile *f, const char *group, const struct kvl_column *columns, size_t n, int *table);
/* Flush + fsync; rows may come from now on, tables no more. Attributes may still be set (root and /quality summaries at the end). */
kvl_status kvl_runfile_start(struct kvl_runfile *f);

/* One row (a cell a column). Buffered; committed every 256 rows or second, whichever comes first. */
kvl_status kvl_runfile_row(struct kvl_runfile *f, int table, const union kvl_cell *cells);
/* Writes out all buffered rows and commits them. */
kvl_status kvl_runfile_commit(struct kvl_runfile *f);

/* A fixed array written at once (before or after start): dims named by dim_names, data float64 or uint64 by type. */
kvl_status kvl_runfile_array(struct kvl_runfile *f, const char *path, const char *units, const char *long_name, enum kvl_column_type type,
                             size_t n_dims, const uint64_t *dims, const char *const *dim_names, const void *data);

/* status text "complete" | "interrupted" | "failed"; sets end; complete: trim to committed, rename to path and fsync the folder.
 * Otherwise the .part stays, readable. *f becomes NULL in any case. */
kvl_status kvl_runfile_close(struct kvl_runfile **f, const char *status_text);

const char *kvl_runfile_path(const struct kvl_runfile *f); /* final path */

/* Prints a file as people read it: provenance, configuration, memory, quality, tables' heads. (kvlab log show) */
kvl_status kvl_runfile_show(const char *path, bool json);
/* The file as one tree: the root's attributes, then an object per group under its path ("/steps"): its attributes, and "data" with its
 * arrays and columns {dims, units, long_name, values}, of each at most `most` values; 0: attributes only. Integers are raw text in the
 * tree. Free with cJSON_Delete. */
struct cJSON;
kvl_status kvl_runfile_read(const char *path, size_t most, struct cJSON **tree);
/* Trims a .part to its committed rows, sets status "partial", renames to <id>.partial.h5. (kvlab log repair) */
kvl_status kvl_runfile_repair(const char *path, char *new_path, size_t size);

#endif
