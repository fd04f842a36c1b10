/* kvlab log diff: two runs, or one strategy on several devices, side by side. */
#include "cmd.h"
#include "log.h"
#include "mem.h"
#include "rundiff.h"
#include "runrecord.h"
#include "runtable.h"
#include "text.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

struct args {
    bool devices, json;
};

/* ---- two runs ---- */

static void print_numbers(const char *title, const struct kvl_diff_numbers *list)
{
    if (list->n == 0) return;
    printf("\n%-16s %-9s %16s %16s %9s  %s\n", title, "unit", "A", "B", "B / A", "B - A, 95 % interval");
    for (size_t i = 0; i < list->n; i++) {
        const struct kvl_diff_number *x = &list->item[i];
        printf("%-16s %-9s %16.10g %16.10g", x->name, x->unit, x->a, x->b);
        if (x->a != 0.0)
            printf(" %9.4f", x->b / x->a);
        else
            printf(" %9s", "-");
        if (x->tested && !isnan(x->difference.low))
            printf("  %+.6g [%+.6g, %+.6g], n %llu: %s", x->difference.mean, x->difference.low, x->difference.high,
                   (unsigned long long)x->difference.n, kvl_verdict_name[x->verdict]);
        else if (x->tested)
            printf("  %+.6g, n %llu: %s", x->difference.mean, (unsigned long long)x->difference.n, kvl_verdict_name[x->verdict]);
        putchar('\n');
    }
}

static void print_diff(const char *path_a, const char *path_b, const struct kvl_diff *diff)
{
    printf("A  %s\nB  %s\n\n", path_a, path_b);
    if (diff->n_settings == 0) printf("configurations are the same\n");
    for (size_t i = 0; i < diff->n_settings; i++) {
        const struct kvl_diff_setting *s = &diff->setting[i];
        printf("%-16s A  %s\n%-16s B  %s\n", s->name, s->a ? s->a : "-", "", s->b ? s->b : "-");
    }
    print_numbers("bytes", &diff->bytes);
    print_numbers("quality", &diff->quality);
    if (diff->not_paired[0]) printf("\nquality is not compared: %s\n", diff->not_paired);
    for (size_t i = 0; i < diff->quality.n; i++) {
        const struct kvl_interval *d = &diff->quality.item[i].difference;
        if (strcmp(diff->quality.item[i].name, "nll") == 0)
            printf("perplexity ratio B / A %.6f [%.6f, %.6f]\n", exp(d->mean), exp(d->low), exp(d->high));
    }
    if (diff->n_logits > 0) printf("largest difference of %zu logits %.3e\n", diff->n_logits, diff->largest_logit);
    print_numbers("speed", &diff->speed);
}

static kvl_status numbers_json(cJSON *object, const struct kvl_diff_numbers *list)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < list->n; i++) {
        const struct kvl_diff_number *x = &list->item[i];
        const struct kvl_fact facts[] = {{"a", x->a},
                                         {"b", x->b},
                                         {"difference", x->difference.mean},
                                         {"low", x->difference.low},
                                         {"high", x->difference.high},
                                         {"n", (double)x->difference.n, true}};
        cJSON *item = cJSON_AddObjectToObject(object, x->name);
        KVL_TRY(kvl_json_facts(item, facts, x->tested ? 6 : 2));
        cJSON_AddItemToObject(item, "verdict", x->tested ? cJSON_CreateString(kvl_verdict_name[x->verdict]) : cJSON_CreateNull());
    }
done:
    return status;
}

static kvl_status diff_json(const char *path_a, const char *path_b, const struct kvl_diff *diff)
{
    kvl_status status = KVL_OK;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "a", path_a);
    cJSON_AddStringToObject(object, "b", path_b);
    cJSON *config = cJSON_AddObjectToObject(object, "config");
    for (size_t i = 0; i < diff->n_settings; i++) {
        const char *const values[] = {diff->setting[i].a, diff->setting[i].b};
        cJSON *pair = cJSON_AddArrayToObject(config, diff->setting[i].name);
        for (int k = 0; k < 2; k++) cJSON_AddItemToArray(pair, values[k] ? cJSON_CreateString(values[k]) : cJSON_CreateNull());
    }
    KVL_TRY(numbers_json(cJSON_AddObjectToObject(object, "bytes"), &diff->bytes));
    KVL_TRY(numbers_json(cJSON_AddObjectToObject(object, "quality"), &diff->quality));
    const struct kvl_fact logits[] = {{"largest_logit_difference", diff->largest_logit}};
    KVL_TRY(kvl_json_facts(object, logits, 1));
    cJSON_AddItemToObject(object, "not_paired", diff->not_paired[0] ? cJSON_CreateString(diff->not_paired) : cJSON_CreateNull());
    KVL_TRY(numbers_json(cJSON_AddObjectToObject(object, "speed"), &diff->speed));
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static kvl_status diff_two(const char *path_a, const char *path_b, bool json)
{
    kvl_status status = KVL_OK;
    cJSON *a = NULL, *b = NULL;
    struct kvl_diff diff = {0};
    KVL_TRY(kvl_runfile_read(path_a, KVL_RUNTABLE_VALUES, &a));
    KVL_TRY(kvl_runfile_read(path_b, KVL_RUNTABLE_VALUES, &b));
    KVL_TRY(kvl_runs_diff(a, b, &diff));
    if (json)
        KVL_TRY(diff_json(path_a, path_b, &diff));
    else
        print_diff(path_a, path_b, &diff);
done:
    kvl_diff_free(&diff);
    cJSON_Delete(a);
    cJSON_Delete(b);
    return status;
}

/* ---- one strategy, several devices ---- */

struct run {
    const char *path;
    cJSON *tree;
    struct kvl_text strategy;
    bool printed;
};

enum { DEVICE_FACTS = 11 };
/* A run against the first one of its strategy: `nll` is tested on the same chunks. */
static kvl_status device_facts(const struct run *first, const struct run *run, struct kvl_fact facts[DEVICE_FACTS], const char **verdict)
{
    struct kvl_diff diff;
    const kvl_status status = kvl_runs_diff(first->tree, run->tree, &diff);
    if (status != KVL_OK) return status;
    const struct kvl_diff_number none = {.difference = {.mean = NAN, .low = NAN, .high = NAN}, .largest = NAN};
    const struct kvl_diff_number *nll = diff.quality.n ? &diff.quality.item[0] : &none;
    const struct kvl_fact all[DEVICE_FACTS] = {
        {"bytes_per_token", kvl_run_number(run->tree, "/memory", "bytes_per_token"), true},
        {"resident_bytes", kvl_run_number(run->tree, "/memory", "resident_bytes"), true},
        {"nll", kvl_run_number(run->tree, "/quality", "nll")},
        {"nll_difference", nll->difference.mean},
        {"nll_low", nll->difference.low},
        {"nll_high", nll->difference.high},
        {"nll_largest", nll->largest},
        {"logit_largest", diff.largest_logit},
        {"kld_mean", kvl_run_number(run->tree, "/quality", "kld_mean")},
        {"same_top1", kvl_run_number(run->tree, "/quality", "same_top1")},
        {"tokens_per_s", kvl_run_tokens_per_s(run->tree, NULL)},
    };
    memcpy(facts, all, sizeof all);
    *verdict = nll->tested ? kvl_verdict_name[nll->verdict] : NULL;
    kvl_diff_free(&diff);
    return KVL_OK;
}

static kvl_status device_json(const struct run *run, const struct kvl_fact facts[DEVICE_FACTS], const char *verdict, cJSON *list)
{
    cJSON *item = cJSON_CreateObject();
    if (!item || !cJSON_AddItemToArray(list, item)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    cJSON_AddStringToObject(item, "run_file", run->path);
    cJSON_AddStringToObject(item, "device", kvl_run_text(run->tree, "/config", "device"));
    cJSON_AddItemToObject(item, "verdict", verdict ? cJSON_CreateString(verdict) : cJSON_CreateNull());
    return kvl_json_facts(item, facts, DEVICE_FACTS);
}

static void device_line(const struct run *run, const struct kvl_fact *f, const char *verdict)
{
    const char *device = kvl_run_text(run->tree, "/config", "device");
    printf("  %-32.32s %11.0f %14.0f %10.6f %+10.2e [%+.2e, %+.2e] %-12s %9.2e %9.2e %10.6f %9.4f %9.1f\n", device ? device : "-", f[0].value,
           f[1].value, f[2].value, f[3].value, f[4].value, f[5].value, verdict ? verdict : "-", f[6].value, f[7].value, f[8].value,
           f[9].value, f[10].value);
}

/* All runs of the strategy of run `at`, the first one as the reference; *most grows to their number. */
static kvl_status compare_group(struct run *run, size_t n, size_t at, cJSON *groups, size_t *most)
{
    kvl_status status = KVL_OK;
    size_t n_runs = 0;
    cJSON *list = NULL;
    if (groups) {
        cJSON *group = cJSON_CreateObject();
        cJSON_AddItemToArray(groups, group);
        cJSON_AddStringToObject(group, "kv", kvl_run_text(run[at].tree, "/config", "kv"));
        list = cJSON_AddArrayToObject(group, "devices");
    } else {
        const char *kv = kvl_run_text(run[at].tree, "/config", "kv");
        printf("%s%s\n  %-32s %11s %14s %10s %10s %-22s %-12s %9s %9s %10s %9s %9s\n", at ? "\n" : "", kv ? kv : "-", "device", "bytes/token",
               "resident", "nll", "difference", "95 % interval", "verdict", "largest", "logit", "kld", "same top1", "tokens/s");
    }
    for (size_t i = at; i < n; i++) {
        struct kvl_fact facts[DEVICE_FACTS];
        const char *verdict;
        if (strcmp(run[i].strategy.data, run[at].strategy.data) != 0) continue;
        KVL_TRY(device_facts(&run[at], &run[i], facts, &verdict));
        if (list)
            KVL_TRY(device_json(&run[i], facts, verdict, list));
        else
            device_line(&run[i], facts, i == at ? "reference" : verdict);
        run[i].printed = true;
        n_runs++;
    }
    if (n_runs > *most) *most = n_runs;
done:
    return status;
}

static kvl_status compare_devices(size_t n_words, char *const *words, bool json)
{
    kvl_status status = KVL_OK;
    struct kvl_run_paths paths = {0};
    struct run *run = NULL;
    size_t most = 0;
    cJSON *groups = json ? cJSON_CreateArray() : NULL;
    KVL_TRY(kvl_run_paths_find(n_words, words, &paths));
    KVL_TRY(kvl_alloc(&run, paths.n, sizeof *run));
    for (size_t i = 0; i < paths.n; i++) {
        run[i].path = paths.path[i];
        KVL_TRY(kvl_runfile_read(paths.path[i], KVL_RUNTABLE_VALUES, &run[i].tree));
        KVL_TRY(kvl_run_strategy(run[i].tree, &run[i].strategy));
        KVL_TRY(kvl_text_append(&run[i].strategy, "", 0));
    }
    for (size_t i = 0; i < paths.n; i++)
        if (!run[i].printed) KVL_TRY(compare_group(run, paths.n, i, groups, &most));
    if (most < 2) kvl_warn("nothing to compare: no two of these %zu runs differ in nothing but the device", paths.n);
    if (json) KVL_TRY(kvl_json_print(groups));
done:
    for (size_t i = 0; run && i < paths.n; i++) {
        cJSON_Delete(run[i].tree);
        kvl_text_free(&run[i].strategy);
    }
    kvl_free(&run);
    cJSON_Delete(groups);
    kvl_run_paths_free(&paths);
    return status;
}

/* ---- the command ---- */

static kvl_status run_diff(void *data, size_t n_words, char *const *words)
{
    const struct args *args = data;
    if (args->devices) return compare_devices(n_words, words, args->json);
    if (n_words != 2) return kvl_fail(KVL_E_USAGE, "log diff: give two run files, A and B; or --devices and any number");
    return diff_two(words[0], words[1], args->json);
}

static const struct kvl_opt options[] = {
    {.name = "devices", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, devices),
     .help = "compare the devices that ran the same strategy: bytes, quality on the same chunks, speed"},
    KVL_OPTION_JSON(struct args),
};

const struct kvl_command kvl_cmd_log_diff = {
    .name = "log diff",
    .summary = "compare two runs, or the devices of many",
    .words = "FILE...",
    .details = "Configuration, bytes and speed side by side; quality as the mean of paired differences B - A on the same chunks with its\n"
               "95 % t-interval. Under 16 chunks the verdict is \"exploratory\", with 0 inside the interval \"not resolved\". Speeds of\n"
               "benches: Welch's t-interval over the repetitions. Runs with --logits: the largest difference of a logit.\n\n"
               "    kvlab log diff runs/f16.h5 runs/int4.h5\n"
               "    kvlab log diff --devices runs/e04_devices",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run_diff,
};
