/* kvlab log merge, log export: many run files as one table. */
#include "cmd.h"
#include "log.h"
#include "runtable.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

struct merge_args {
    const char *output;
};

static kvl_status run_merge(void *data, size_t n_words, char *const *words)
{
    const struct merge_args *args = data;
    kvl_status status = KVL_OK;
    struct kvl_run_paths paths;
    size_t n_bad = 0;
    KVL_TRY(kvl_run_paths_find(n_words, words, &paths));
    status = kvl_runs_merge(&paths, args->output, &n_bad);
    if (status == KVL_OK) printf("%s: %zu %s\n", args->output, paths.n - n_bad, paths.n - n_bad == 1 ? "run" : "runs");
    if (status == KVL_OK && n_bad) status = kvl_fail(KVL_E_FORMAT, "%zu of %zu files could not be read", n_bad, paths.n);
    kvl_run_paths_free(&paths);
done:
    return status;
}

static const struct kvl_opt merge_options[] = {
    {.name = "output", .letter = 'o', .type = KVL_OPT_TEXT, .offset = offsetof(struct merge_args, output), .metavar = "FILE.h5",
     .help = "the merged file; an old merged file is replaced once the new one is whole", .required = true},
};

const struct kvl_command kvl_cmd_log_merge = {
    .name = "log merge",
    .summary = "one file of columns from many run files",
    .words = "FILE|FOLDER...",
    .details = "/runs has a row a run with everything its file says (config_kv, memory_resident_bytes, quality_ppl ...); /quality,\n"
               "/bench and /kernels have the rows of all runs, with the number of the run. Works on a sweep's folder while it runs.\n\n"
               "    kvlab log merge runs/e03_kivi -o e03.h5\n\n"
               "and as a data frame or parquet, in Python (pip install xarray h5netcdf h5py pyarrow):\n\n"
               "    import xarray\n"
               "    runs = xarray.open_dataset(\"e03.h5\", group=\"runs\", engine=\"h5netcdf\").to_dataframe()\n"
               "    runs.to_parquet(\"e03.parquet\")",
    .options = merge_options,
    .n_options = sizeof merge_options / sizeof *merge_options,
    .args_size = sizeof(struct merge_args),
    .run = run_merge,
};

struct export_args {
    bool csv;
    const char *table;
};

static kvl_status add_file(struct kvl_runtable *table, const char *path, const char *group, size_t run)
{
    kvl_status status = KVL_OK;
    cJSON *tree = NULL;
    KVL_TRY(kvl_run_read(path, group ? KVL_RUNTABLE_VALUES : 0, &tree));
    KVL_TRY(group ? kvl_runtable_add_rows(table, group, run, tree) : kvl_runtable_add_run(table, path, tree));
done:
    cJSON_Delete(tree);
    return status;
}

static kvl_status run_export(void *data, size_t n_words, char *const *words)
{
    const struct export_args *args = data;
    kvl_status status = KVL_OK;
    struct kvl_run_paths paths = {0};
    struct kvl_runtable table = {0};
    struct kvl_text group = {0};
    if (!args->csv) return kvl_fail(KVL_E_USAGE, "log export needs --csv; for parquet see kvlab log merge --help");
    if (args->table) KVL_TRY(kvl_text_printf(&group, "/%s", args->table));
    KVL_TRY(kvl_run_paths_find(n_words, words, &paths));
    for (size_t i = 0; i < paths.n; i++) KVL_TRY(add_file(&table, paths.path[i], group.data, i));
    if (table.n_rows == 0) {
        status = kvl_fail(KVL_E_USAGE, "no file has a table /%s; kvlab log show prints what is there", args->table);
        goto done;
    }
    kvl_runtable_csv(&table, stdout);
done:
    kvl_text_free(&group);
    kvl_runtable_free(&table);
    kvl_run_paths_free(&paths);
    return status;
}

static const struct kvl_opt export_options[] = {
    {.name = "csv", .type = KVL_OPT_FLAG, .offset = offsetof(struct export_args, csv), .help = "comma-separated values (RFC 4180) on stdout"},
    {.name = "table", .type = KVL_OPT_TEXT, .offset = offsetof(struct export_args, table), .metavar = "NAME",
     .help = "the rows of this table, steps, quality, bench or kernels, instead of a row a run"},
};

const struct kvl_command kvl_cmd_log_export = {
    .name = "log export",
    .summary = "run files as text for other programs",
    .words = "FILE|FOLDER...",
    .details = "    kvlab log export --csv runs/e03_kivi >e03.csv\n"
               "    kvlab log export --csv --table quality runs/e03_kivi >chunks.csv",
    .options = export_options,
    .n_options = sizeof export_options / sizeof *export_options,
    .args_size = sizeof(struct export_args),
    .run = run_export,
};
