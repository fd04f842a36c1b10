#include "report.h"
#include "embedded.h"
#include "file.h"
#include "log.h"
#include "runrecord.h"
#include <cjson/cJSON.h>
#include <string.h>

/* Values of an array that the page gets: all layers and heads, kernels and chunks of real runs. */
enum { MOST_VALUES = 1 << 16 };

static kvl_status add_run(cJSON *runs, const char *path)
{
    kvl_status status = KVL_OK;
    cJSON *tree = NULL;
    KVL_TRY(kvl_runfile_read(path, MOST_VALUES, &tree));
    cJSON_DeleteItemFromObject(tree, "/steps"); /* the page shows no steps, and they are most of a file */
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

/* JSON inside a script element: "</" would end it, "<!--" change how it is read. */
static kvl_status append_json(struct kvl_text *out, const char *json)
{
    kvl_status status = KVL_OK;
    for (const char *c = json; *c;) {
        const size_t plain = strcspn(c, "<");
        KVL_TRY(kvl_text_append(out, c, plain));
        c += plain;
        if (*c == '\0') break;
        KVL_TRY(kvl_text_append(out, "\\u003c", 6));
        c++;
    }
done:
    return status;
}

/* The page with @DATA@, @CHART@ and @SCRIPT@ replaced, which come in this order. */
static kvl_status fill_page(const char *json, struct kvl_text *out)
{
    static const char *const marks[] = {"@DATA@", "@CHART@", "@SCRIPT@"};
    const char *const parts[] = {json, kvl_embedded_text("host/lab/report/chart.min.js"), kvl_embedded_text("host/lab/report/script.js")};
    kvl_status status = KVL_OK;
    const char *rest = kvl_embedded_text("host/lab/report/page.html");
    for (int i = 0; i < 3; i++) {
        const char *mark = strstr(rest, marks[i]);
        KVL_TRY(kvl_text_append(out, rest, (size_t)(mark - rest)));
        KVL_TRY(i == 0 ? append_json(out, parts[i]) : kvl_text_append(out, parts[i], strlen(parts[i])));
        rest = mark + strlen(marks[i]);
    }
    KVL_TRY(kvl_text_append(out, rest, strlen(rest)));
done:
    return status;
}

kvl_status kvl_report_write(const struct kvl_run_paths *paths, const char *out, size_t *n_bad)
{
    kvl_status status = KVL_OK;
    struct kvl_text command = {0}, html = {0};
    char *json = NULL;
    cJSON *page = cJSON_CreateObject();
    *n_bad = 0;
    KVL_TRY(kvl_command_line(&command));
    cJSON_AddStringToObject(page, "command", command.data);
    KVL_TRY(add_runs(paths, cJSON_AddArrayToObject(page, "runs"), n_bad));
    json = cJSON_PrintUnformatted(page);
    if (json == NULL) {
        status = kvl_fail(KVL_E_MEMORY, "no memory for the report");
        goto done;
    }
    KVL_TRY(fill_page(json, &html));
    KVL_TRY(kvl_file_write(out, html.data, html.size));
done:
    cJSON_free(json);
    cJSON_Delete(page);
    kvl_text_free(&html);
    kvl_text_free(&command);
    return status;
}
