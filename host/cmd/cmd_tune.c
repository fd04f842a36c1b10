/* kvlab tune: finds faster settings of the kernels' tunables on a device and keeps them in the user's file. */
#include "cmd.h"
#include "runrecord.h"
#include "tune.h"
#include <stdio.h>
#include <string.h>

struct args {
    const char *device, *model, *tune_file;
    int64_t pairs, limit, depth, tokens;
    bool dry_run, json;
};

struct tuning {
    const struct args *args;
    struct kvl_device *device;
    struct kvl_tune_shape shape;
    char path[4096]; /* "" = keep nothing */
    cJSON *rows;     /* NULL: text on stdout */
};

static void print_step(void *context, const struct kvl_tune_step *step)
{
    struct kvl_text setting = {0};
    if (*(const bool *)context || kvl_setting_print(step->kernel, step->setting, &setting) != KVL_OK) return;
    if (step->rejected[0] != '\0')
        printf("  rejected                       %s: %s\n", setting.data, step->rejected);
    else
        printf("  %6.3f of the time %8.1f %-8s %s%s\n", step->ratio, step->metric, step->kernel->metric, setting.data, step->taken ? "  *" : "");
    fflush(stdout);
    kvl_text_free(&setting);
}

static kvl_status add_row(const struct tuning *t, const struct kvl_tune_kernel *kernel, const char *setting, const struct kvl_tune_result *r)
{
    const struct kvl_fact facts[] = {{"ratio", r->ratio, false},           {"best", r->metric, false},
                                     {"default_ratio", r->default_ratio, false}, {"default", r->default_metric, false},
                                     {"tried", r->n_tried, true},          {"rejected", r->n_rejected, true}};
    cJSON *row = cJSON_CreateObject();
    if (row == NULL || !cJSON_AddItemToArray(t->rows, row)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    cJSON_AddStringToObject(row, "kernel", kernel->name);
    cJSON_AddStringToObject(row, "metric", kernel->metric);
    cJSON_AddStringToObject(row, "setting", setting);
    return kvl_json_facts(row, facts, sizeof facts / sizeof *facts);
}

/* A setting that the device has already needs no entry. */
static kvl_status keep(const struct tuning *t, const struct kvl_tune_kernel *kernel, const struct kvl_setting *before,
                       const struct kvl_tune_result *r)
{
    char comment[160];
    if (t->path[0] == '\0' || memcmp(before, &r->setting, sizeof *before) == 0) return KVL_OK;
    snprintf(comment, sizeof comment, "%.4g %s, the defaults %.4g; %s, %u x %u, %u heads of %u", r->metric, kernel->metric, r->default_metric,
             t->shape.type->name, t->shape.n_ff, t->shape.n_embd, t->shape.n_head, t->shape.head_dim);
    return kvl_tuning_save(t->path, kvl_device_caps(t->device), kernel, &r->setting, comment);
}

static kvl_status tune(struct tuning *t, const struct kvl_tune_kernel *kernel)
{
    kvl_status status = KVL_OK;
    bool silent = t->rows != NULL;
    const struct kvl_tune_options options = {.pairs = (uint32_t)t->args->pairs, .limit = (uint32_t)t->args->limit};
    struct kvl_tune_result result;
    struct kvl_text setting = {0};
    size_t n;
    const size_t i = (size_t)(kernel - kvl_tune_kernels(&n));
    const struct kvl_tuning before = *kvl_device_tuning(t->device);
    if (!silent) printf("%s (now: %s)\n", kernel->name, before.source[i]);
    KVL_TRY(kvl_tune_run(t->device, kernel, &t->shape, &options, print_step, &silent, &result));
    KVL_TRY(kvl_setting_print(kernel, &result.setting, &setting));
    KVL_TRY(keep(t, kernel, &before.setting[i], &result));
    if (silent)
        status = add_row(t, kernel, setting.data, &result);
    else
        printf("  best: %s: %.1f %s, the defaults %.1f; %u tried, %u rejected\n", setting.data, result.metric, kernel->metric,
               result.default_metric, result.n_tried, result.n_rejected);
done:
    kvl_text_free(&setting);
    return status;
}

static bool is_wanted(const char *name, size_t n_words, char *const *words)
{
    for (size_t i = 0; i < n_words; i++)
        if (strcmp(words[i], name) == 0) return true;
    return n_words == 0;
}

static kvl_status check_words(size_t n_words, char *const *words)
{
    for (size_t i = 0; i < n_words; i++) {
        char names[160] = "";
        size_t k = 0;
        for (; kvl_tune_nth(k) != NULL && strcmp(kvl_tune_nth(k)->name, words[i]) != 0; k++)
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", k ? ", " : "", kvl_tune_nth(k)->name);
        if (kvl_tune_nth(k) == NULL) return kvl_fail(KVL_E_USAGE, "kernel \"%s\" has no tunables; these have: %s", words[i], names);
    }
    return KVL_OK;
}

static kvl_status find_shape(struct tuning *t)
{
    kvl_status status = KVL_OK;
    struct kvl_model *model = NULL;
    if (t->args->model != NULL) KVL_TRY(kvl_model_open(t->args->model, &model));
    t->shape = kvl_tune_shape_of(model);
    t->shape.depth = (uint32_t)t->args->depth;
    t->shape.tokens = (uint32_t)t->args->tokens;
done:
    kvl_model_close(&model);
    return status;
}

static kvl_status find_path(struct tuning *t)
{
    if (t->args->dry_run) return KVL_OK;
    if (t->args->tune_file == NULL) return kvl_tuning_path(t->path, sizeof t->path);
    if (snprintf(t->path, sizeof t->path, "%s", t->args->tune_file) < (int)sizeof t->path) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "--tune-file: path too long");
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    kvl_status status = KVL_OK;
    struct tuning t = {.args = arguments};
    cJSON *object = cJSON_CreateObject();
    KVL_TRY(check_words(n_words, words));
    KVL_TRY(find_path(&t));
    KVL_TRY(find_shape(&t));
    KVL_TRY(kvl_device_open(t.args->device, &t.device));
    const struct kvl_caps *caps = kvl_device_caps(t.device);
    if (caps->masked) {
        status = kvl_fail(KVL_E_USAGE, "KVLAB_MASK hides features of the device: entries would not be its own; unset it");
        goto done;
    }
    cJSON_AddStringToObject(object, "device", caps->name);
    cJSON_AddStringToObject(object, "driver", caps->driver);
    cJSON_AddStringToObject(object, "tune_file", t.path);
    if (t.args->json) t.rows = cJSON_AddArrayToObject(object, "kernels");
    else printf("device  %s (%s, %s)\nfile    %s\n", caps->name, caps->platform, caps->driver, t.path[0] != '\0' ? t.path : "none");
    for (size_t i = 0; kvl_tune_nth(i) != NULL; i++)
        if (is_wanted(kvl_tune_nth(i)->name, n_words, words)) KVL_TRY(tune(&t, kvl_tune_nth(i)));
    if (t.args->json) status = kvl_json_print(object);
done:
    cJSON_Delete(object);
    kvl_device_close(&t.device);
    return status;
}

static const struct kvl_opt options[] = {
    KVL_OPTION_DEVICE(struct args),
    {.name = "model",
     .letter = 'm',
     .type = KVL_OPT_TEXT,
     .offset = offsetof(struct args, model),
     .metavar = "FILE",
     .help = "tune for the sizes and the weight type of a model (without it: SmolLM2-135M, Q4_1)"},
    {.name = "tune-file",
     .type = KVL_OPT_TEXT,
     .offset = offsetof(struct args, tune_file),
     .metavar = "FILE",
     .help = "where entries go (without it: $KVLAB_TUNE_FILE, else $XDG_CONFIG_HOME/kvlab/tune.txt, else ~/.config/kvlab/tune.txt)"},
    {.name = "dry-run", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, dry_run), .help = "measure, write nothing"},
    {.name = "pairs",
     .type = KVL_OPT_INT,
     .offset = offsetof(struct args, pairs),
     .metavar = "N",
     .help = "timings of a candidate, each beside one of the defaults; medians count",
     .fallback = "5",
     .min = 1,
     .max = KVL_TUNE_PAIRS},
    {.name = "limit",
     .type = KVL_OPT_INT,
     .offset = offsetof(struct args, limit),
     .metavar = "N",
     .help = "most candidates of a kernel, the defaults included",
     .fallback = "60",
     .min = 1,
     .max = 10000},
    {.name = "depth",
     .type = KVL_OPT_INT,
     .offset = offsetof(struct args, depth),
     .metavar = "N",
     .help = "tokens in the cache that attention reads",
     .fallback = "4096",
     .min = 64,
     .max = 1048576},
    {.name = "tokens",
     .type = KVL_OPT_INT,
     .offset = offsetof(struct args, tokens),
     .metavar = "N",
     .help = "tokens of a prefill product",
     .fallback = "512",
     .min = 5,
     .max = 65536},
    KVL_OPTION_JSON(struct args),
};

const struct kvl_command kvl_cmd_tune = {
    .name = "tune",
    .summary = "find the fastest settings of the kernels on a device",
    .words = "clblast|gemm|gemv|attend",
    .details = "Kernels: one or several; without them all. Builds each candidate, compares its results with the C reference (bit by bit with\n"
               "the defaults', unless the tunable is one that reorders sums), then times it by turns with the defaults. A line a candidate:\n"
               "its part of their time, the metric, the setting; * = the best so far, by 5 % or more. What is better goes to the tune file\n"
               "and is used from the next command on; results with --exact stay the same to the bit.\n"
               "\n"
               "  kvlab tune --device gpu gemm attend",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
