#include "report.h"
#include "log.h"
#include "page.h"
#include "runrecord.h"
#include "runtable.h"
#include <cjson/cJSON.h>

/* Groups that the page does not show, most of a file. */
static const char *const not_shown[] = {"/steps", "/logits", "/tokens", "/evictions/positions", "/evictions/gone"};
static const char *const not_shown_of_evictions[] = {"eviction", "source", "target", "first"};
/* Values of an array that the page gets: all layers and heads, kernels and chunks of real runs. */
enum { MOST_VALUES = 1 << 16 };

static kvl_status add_run(cJSON *runs, const char *path)
{
    kvl_status status = KVL_OK;
    cJSON *tree = NULL;
    KVL_TRY(kvl_run_read(path, MOST_VALUES, &tree));
    for (size_t i = 0; i < sizeof not_shown / sizeof *not_shown; i++) cJSON_DeleteItemFromObject(tree, not_shown[i]);
    cJSON *evictions = cJSON_GetObjectItem(cJSON_GetObjectItem(tree, "/evictions"), "data");
    for (size_t i = 0; i < sizeof not_shown_of_evictions / sizeof *not_shown_of_evictions; i++)
        cJSON_DeleteItemFromObject(evictions, not_shown_of_evictions[i]);
    if (cJSON_AddItemToArray(runs, tree))
        tree = NULL;
    else
        status = kvl_fail(KVL_E_MEMORY, "no memory for the report");
done:
    cJSON_Delete(tree);
    return status;
}

static kvl_status add_runs(const struct kvl_run_paths *paths, cJSON *runs, size_t *n_bad)
{
    for (size_t i = 0; i < paths->n; i++) {
        const kvl_status status = add_run(runs, paths->path[i]);
        if (status == KVL_E_MEMORY) return status;
        if (status == KVL_OK) continue;
        kvl_warn("left out: %s", kvl_error_text());
        kvl_error_clear();
        ++*n_bad;
    }
    return cJSON_GetArraySize(runs) ? KVL_OK : kvl_fail(KVL_E_FORMAT, "none of the %zu files is a run file", paths->n);
}

kvl_status kvl_report_write(const struct kvl_run_paths *paths, const char *out, size_t *n_bad)
{
    kvl_status status = KVL_OK;
    static const struct kvl_page_part parts[] = {{"@CONTROLS@", "host/lab/report/controls.json"}, {"@CHART@", "host/lab/report/chart.min.js"}, {"@SCRIPT@", "host/lab/report/script.js"}};
    struct kvl_text command = {0};
    cJSON *page = cJSON_CreateObject();
    *n_bad = 0;
    KVL_TRY(kvl_command_line(&command));
    cJSON_AddStringToObject(page, "command", command.data);
    KVL_TRY(add_runs(paths, cJSON_AddArrayToObject(page, "runs"), n_bad));
    KVL_TRY(kvl_page_write(out, "host/lab/report/page.html", page, parts, sizeof parts / sizeof *parts));
done:
    cJSON_Delete(page);
    kvl_text_free(&command);
    return status;
}
