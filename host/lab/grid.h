/* A grid: the YAML file of a sweep, and the cells it stands for.
 *
 *     name: e03_kivi                            # results go to runs/<name>
 *     command: eval kld
 *     models: [data/models/a.gguf]              # axes: models texts kv ctx seeds devices
 *     texts: [data/text/wiki.test.raw]
 *     kv: [f16, int4, "k=int8 v=int4"]
 *     ctx: [512, 1024]
 *     options: [--chunks=16, --exact]           # given to every cell, as on the command line
 *     cells:                                    # without it: the product of all axes
 *       - {kv: int2 tail=64, options: [--ubatch=64]}
 *
 * A listed cell fixes some values; it stands for the product of the axes whose value it leaves out, `{}` for all of them. */
#ifndef KVL_GRID_H
#define KVL_GRID_H
#include "status.h"
#include <stddef.h>

enum kvl_grid_axis { KVL_AXIS_MODEL, KVL_AXIS_TEXT, KVL_AXIS_KV, KVL_AXIS_CTX, KVL_AXIS_SEED, KVL_AXIS_DEVICE, KVL_AXES };
extern const char *const kvl_axis_name[KVL_AXES];   /* "model" ...: the key in a listed cell */
extern const char *const kvl_axis_option[KVL_AXES]; /* "model", "file" ...: the long option */

struct kvl_grid_values {
    char **value;
    unsigned value_count;
};

struct kvl_grid_cell { /* as listed */
    char *fixed[KVL_AXES]; /* NULL = the axis */
    char **options;
    unsigned options_count;
};

struct kvl_grid {
    char *name, *command;
    char *program; /* NULL = this one */
    char *out;     /* folder of the run files; NULL = runs/<name> */
    struct kvl_grid_values axis[KVL_AXES];
    char **options;
    unsigned options_count;
    struct kvl_grid_cell *cells;
    unsigned cells_count;
};

/* Errors of the schema name file, line and key. Free with kvl_grid_free. */
kvl_status kvl_grid_load(const char *path, struct kvl_grid **out);
void kvl_grid_free(struct kvl_grid **grid);

/* One cell: a value of each axis (NULL: the axis is empty), and the listed cell it is from. All borrowed from the grid. */
struct kvl_grid_point {
    const char *value[KVL_AXES];
    const struct kvl_grid_cell *listed; /* NULL = none */
};
/* All of them, in order: listed cells one after the other, the last axis fastest. Free *cells with kvl_free. */
kvl_status kvl_grid_cells(const struct kvl_grid *grid, struct kvl_grid_point **cells, size_t *n);

#endif
