/* kvlab report: run files as one page to look at and to share. */
#include "cmd.h"
#include "report.h"
#include <stdio.h>

struct args {
    const char *output;
};

static kvl_status run(void *data, size_t n_words, char *const *words)
{
    const struct args *args = data;
    kvl_status status = KVL_OK;
    struct kvl_run_paths paths = {0};
    size_t n_bad = 0;
    KVL_TRY(kvl_run_paths_find(n_words, words, &paths));
    KVL_TRY(kvl_report_write(&paths, args->output, &n_bad));
    printf("%s: %zu %s\n", args->output, paths.n - n_bad, paths.n - n_bad == 1 ? "run" : "runs");
    if (n_bad) status = kvl_fail(KVL_E_FORMAT, "%zu of %zu files could not be read", n_bad, paths.n);
done:
    kvl_run_paths_free(&paths);
    return status;
}

static const struct kvl_opt options[] = {
    {.name = "output", .letter = 'o', .type = KVL_OPT_TEXT, .offset = offsetof(struct args, output), .metavar = "FILE.html",
     .help = "the page", .fallback = "report.html"},
};

const struct kvl_command kvl_cmd_report = {
    .name = "report",
    .summary = "one HTML page from run files, to look at and to share",
    .words = "FILE|FOLDER...",
    .details = "Memory against quality with error bars, speed against context, heat maps of layers, a roofline of kernels (from runs with\n"
               "--profile or bench --kernels), sortable tables, and for each run its command and configuration. The page loads nothing:\n"
               "data and script (Chart.js, MIT licence) are inside.\n\n"
               "    kvlab report runs/e03_kivi -o e03.html",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
