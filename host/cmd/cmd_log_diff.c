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
#include <stdlib.h>
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
        if (strcmp(diff->quality.item[i].name, "nll") != 0) continue;
        printf("perplexity ratio B / A %.6f", exp(d->mean));
        if (!isnan(d->low)) printf(" [%.6f, %.6f]", exp(d->low), exp(d->high));
        putchar('\n');
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
    KVL_TRY(kvl_run_read(path_a, KVL_RUNTABLE_VALUES, &a));
    KVL_TRY(kvl_run_read(path_b, KVL_RUNTABLE_VALUES, &b));
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
    size_t group, device; /* the first run of the strategy, the first on the device */
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

/* A column of the table: title, width, and how a value is printed; what is not known is "-". */
static const struct {
    const char *title, *format;
    int width;
} device_column[DEVICE_FACTS] = {
    {"bytes/token", "%11.0f", 11}, {"resident", "%14.0f", 14}, {"nll", "%10.6f", 10}, {"difference", "%+10.2e", 10}, {"95 % from", "%+10.2e", 10}, {"to", "%+10.2e", 10},
    {"largest", "%9.2e", 9}, {"logit", "%9.2e", 9}, {"kld", "%10.6f", 10}, {"same top1", "%9.4f", 9}, {"tokens/s", "%9.1f", 9},
};

static void device_line(const struct run *run, const struct kvl_fact *f, const char *verdict)
{
    const char *device = kvl_run_text(run->tree, "/config", "device");
    printf("  %-32.32s %-12s", device ? device : "-", verdict ? verdict : "-");
    for (int i = 0; i < DEVICE_FACTS; i++) {
        putchar(' ');
        if (isnan(f[i].value)) printf("%*s", device_column[i].width, "-");
        else printf(device_column[i].format, f[i].value);
    }
    putchar('\n');
}

/* What all runs of a group are of, so that groups of one strategy are told apart. */
enum { GROUP_WORDS = 4 };
static const char *const group_word[GROUP_WORDS] = {"command", "model", "text_sha256", "kv"};

static void print_group_head(const struct run *run, bool first)
{
    const char *word[GROUP_WORDS];
    for (int i = 0; i < GROUP_WORDS; i++) {
        const char *text = kvl_run_text(run->tree, "/config", group_word[i]);
        word[i] = text ? text : "-";
    }
    const double n_ctx = kvl_run_number(run->tree, "/config", "n_ctx");
    printf("%s%s, %s, text %.8s, context %.0f: %s\n  %-32s %-12s", first ? "" : "\n", word[0], word[1], word[2], n_ctx, word[3], "device", "verdict");
    for (int i = 0; i < DEVICE_FACTS; i++) printf(" %*s", device_column[i].width, device_column[i].title);
    putchar('\n');
}

static kvl_status add_group(const struct run *run, cJSON *groups, cJSON **list)
{
    cJSON *group = cJSON_CreateObject();
    if (!group || !cJSON_AddItemToArray(groups, group)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    for (int i = 0; i < GROUP_WORDS; i++) {
        const char *text = kvl_run_text(run->tree, "/config", group_word[i]);
        cJSON_AddItemToObject(group, group_word[i], text ? cJSON_CreateString(text) : cJSON_CreateNull());
    }
    const struct kvl_fact facts[] = {{"n_ctx", kvl_run_number(run->tree, "/config", "n_ctx"), true}};
    *list = cJSON_AddArrayToObject(group, "devices");
    return kvl_json_facts(group, facts, 1);
}

/* n runs of one strategy, the first one as the reference. */
static kvl_status compare_group(const struct run *run, size_t n, cJSON *groups, bool first)
{
    kvl_status status = KVL_OK;
    cJSON *list = NULL;
    if (groups)
        KVL_TRY(add_group(run, groups, &list));
    else
        print_group_head(run, first);
    for (size_t i = 0; i < n; i++) {
        struct kvl_fact facts[DEVICE_FACTS];
        const char *verdict;
        KVL_TRY(device_facts(run, &run[i], facts, &verdict));
        if (list)
            KVL_TRY(device_json(&run[i], facts, verdict, list));
        else
            device_line(&run[i], facts, i == 0 ? "reference" : verdict);
    }
done:
    return status;
}

static int by_group_and_device(const void *a, const void *b)
{
    const struct run *x = a, *y = b;
    if (x->group != y->group) return x->group < y->group ? -1 : 1;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    return strcmp(x->path, y->path);
}

static bool on_one_device(const struct run *a, const struct run *b)
{
    const char *x = kvl_run_text(a->tree, "/config", "device"), *y = kvl_run_text(b->tree, "/config", "device");
    return x && y ? strcmp(x, y) == 0 : x == y;
}

/* Runs of one strategy beside each other, the device that occurs first in front: the reference is the same one in all groups that have it. */
static void sort_runs(struct run *run, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        while (strcmp(run[run[i].group].strategy.data, run[i].strategy.data) != 0) run[i].group++;
        while (!on_one_device(&run[run[i].device], &run[i])) run[i].device++;
    }
    qsort(run, n, sizeof *run, by_group_and_device);
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
        KVL_TRY(kvl_run_read(paths.path[i], KVL_RUNTABLE_VALUES, &run[i].tree));
        KVL_TRY(kvl_run_strategy(run[i].tree, &run[i].strategy));
        KVL_TRY(kvl_text_append(&run[i].strategy, "", 0));
    }
    sort_runs(run, paths.n);
    for (size_t at = 0, n; at < paths.n; at += n) {
        for (n = 1; at + n < paths.n && run[at + n].group == run[at].group; n++) {}
        KVL_TRY(compare_group(&run[at], n, groups, at == 0));
        most = n > most ? n : most;
    }
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
               "benches: Welch's t-interval over the repetitions. Runs with --logits: the largest difference of a logit.\n"
               "--devices: a table for each strategy, model, text and context; its reference is the device that occurs first.\n\n"
               "    kvlab log diff runs/f16.h5 runs/int4.h5\n"
               "    kvlab log diff --devices runs/e04_devices",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run_diff,
};
