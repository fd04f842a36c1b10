/* kvlab check: does a device compute what the C references say? */
#include "cmd.h"
#include "runrecord.h"
#include "selfcheck.h"
#include <stdio.h>

struct args {
    const char *device;
    bool json;
};

struct results {
    cJSON *rows; /* NULL: a line each on stdout */
    uint32_t n;
    kvl_status status;
};

static kvl_status add_row(cJSON *rows, const struct kvl_check *check)
{
    const struct kvl_fact facts[] = {{"difference", check->difference, false}, {"allowed", check->allowed, false}};
    cJSON *row = cJSON_CreateObject();
    if (!row || !cJSON_AddItemToArray(rows, row)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    if (!cJSON_AddStringToObject(row, "name", check->name) || !cJSON_AddBoolToObject(row, "ok", check->ok))
        return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    return kvl_json_facts(row, facts, sizeof facts / sizeof *facts);
}

static void take(void *context, const struct kvl_check *check)
{
    struct results *results = context;
    results->n++;
    if (results->rows == NULL)
        printf("%-6s  %9.2e  (at most %.2e)  %s\n", check->ok ? "ok" : "FAILED", check->difference, check->allowed, check->name);
    else if (results->status == KVL_OK)
        results->status = add_row(results->rows, check);
    fflush(stdout);
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    const struct args *args = arguments;
    kvl_status status = KVL_OK;
    struct kvl_device *device = NULL;
    struct results results = {0};
    cJSON *object = cJSON_CreateObject();
    KVL_TRY(kvl_device_open(args->device, &device));
    const struct kvl_caps *caps = kvl_device_caps(device);
    cJSON_AddStringToObject(object, "device", caps->name);
    cJSON_AddStringToObject(object, "driver", caps->driver);
    if (args->json)
        results.rows = cJSON_AddArrayToObject(object, "checks");
    else
        printf("device  %s (%s, %s)\n", caps->name, caps->platform, caps->driver);
    status = kvl_selfcheck(device, n_words, words, take, &results);
    if (status != KVL_OK && status != KVL_E_VERIFY) goto done;
    if (args->json) {
        KVL_TRY(results.status);
        const kvl_status printed = kvl_json_print(object);
        if (printed != KVL_OK) status = printed;
    } else if (status == KVL_OK) {
        printf("all %u checks passed\n", results.n);
    }
done:
    cJSON_Delete(object);
    kvl_device_close(&device);
    return status;
}

static const struct kvl_opt options[] = {
    KVL_OPTION_DEVICE(struct args),
    KVL_OPTION_JSON(struct args),
};

const struct kvl_command kvl_cmd_check = {
    .name = "check",
    .summary = "compare a device with the C references: codecs, attention, weights",
    .words = "[CODEC...]",
    .details = "With names only these codecs are checked. Each line: verdict, largest difference found and allowed, what was compared. Exit code 3 if anything differs.\n"
               "Kernels are compiled once and then taken from $KVLAB_CACHE_DIR.\n"
               "\n"
               "  kvlab check --device gpu\n"
               "  kvlab check --plugin ./bf16.so bf16",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
