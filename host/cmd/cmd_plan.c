/* kvlab plan: what a cache strategy reserves, to the byte, before anything is loaded. */
#include "calibration.h"
#include "cmd.h"
#include "log.h"
#include "mem.h"
#include "plan_report.h"
#include "public_models.h"
#include "runrecord.h"
#include "text.h"
#include <math.h>
#include <stdio.h>
#include <unistd.h>

struct args {
    const char *model, *kv, *device;
    int64_t n_ctx, users, budget, ubatch, layers, kv_heads, head_dim;
    double bandwidth;
    int protocol;
    bool exact, json, models, measure;
};

struct plan {
    const struct args *args;
    struct kvl_public_models publics;
    struct kvl_model *model;        /* NULL for a public one */
    struct kvl_public_model public; /* as changed by --layers ...; name "" for a file */
    const struct kvl_dims *dims;
    const char *name;
    struct kvl_spec *spec;
    struct kvl_text resolved;  /* the spec */
    struct kvl_device *device; /* NULL without --device */
    struct kvl_cache_limits limits;
    struct kvl_session_config config;
    struct kvl_footprint one; /* of one user */
    uint64_t weights, read_weights; /* bytes: all, and those read for a token */
    double bandwidth;               /* GB/s; 0 = not asked for */
};

static bool is_public(const struct plan *plan) { return plan->public.name[0] != '\0'; }

/* ---- what is asked ---- */

static kvl_status no_such_model(const struct plan *plan)
{
    struct kvl_text names = {0};
    const char **name = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&name, plan->publics.n, sizeof *name));
    for (size_t i = 0; i < plan->publics.n; i++) {
        name[i] = plan->publics.model[i].name;
        KVL_TRY(kvl_text_printf(&names, " %s", name[i]));
    }
    const char *closest = kvl_closest(plan->args->model, name, plan->publics.n);
    if (closest)
        status = kvl_fail(KVL_E_USAGE, "\"%s\" is neither a file nor a public model; did you mean \"%s\"? kvlab plan --models lists them", plan->args->model, closest);
    else
        status = kvl_fail(KVL_E_USAGE, "\"%s\" is neither a file nor one of the public models:%s", plan->args->model, names.data);
done:
    kvl_free(&name);
    kvl_text_free(&names);
    return status;
}

/* --layers, --kv-heads, --head-dim: what if the model were built otherwise? */
static kvl_status change_dims(struct plan *plan)
{
    struct kvl_dims *d = &plan->public.dims;
    if (plan->args->layers) d->n_layer = (uint32_t)plan->args->layers;
    if (plan->args->kv_heads) d->n_kv_head = (uint32_t)plan->args->kv_heads;
    if (plan->args->head_dim) d->head_dim = (uint32_t)plan->args->head_dim;
    if (d->n_head % d->n_kv_head != 0)
        return kvl_fail(KVL_E_USAGE, "--kv-heads %u does not divide the %u query heads of %s", d->n_kv_head, d->n_head, plan->name);
    return KVL_OK;
}

static kvl_status open_file(struct plan *plan)
{
    if (access(plan->args->model, F_OK) != 0) return no_such_model(plan);
    if (plan->args->layers || plan->args->kv_heads || plan->args->head_dim)
        return kvl_fail(KVL_E_USAGE, "--layers, --kv-heads and --head-dim change a public model, not a file");
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_model_open(plan->args->model, &plan->model));
    KVL_TRY(kvl_spec_open(plan->args->kv, &plan->spec));
    plan->dims = &plan->model->dims;
    plan->name = plan->model->name;
    plan->weights = kvl_weights_bytes(plan->model);
    plan->read_weights = plan->weights;
done:
    return status;
}

static kvl_status open_public(struct plan *plan, const struct kvl_public_model *public)
{
    kvl_status status = KVL_OK;
    plan->public = *public;
    plan->dims = &plan->public.dims;
    plan->name = plan->public.name;
    KVL_TRY(change_dims(plan));
    KVL_TRY(kvl_public_spec(&plan->public, plan->args->kv, &plan->spec));
    plan->weights = sizeof(uint16_t) * kvl_public_params(&plan->public);
    plan->read_weights = sizeof(uint16_t) * kvl_public_active_params(&plan->public);
done:
    return status;
}

/* Without a device: buffers of any size, and as many compute units as this machine has processors. */
static kvl_status find_limits(struct plan *plan)
{
    kvl_status status = KVL_OK;
    struct kvl_peaks peaks;
    plan->limits = (struct kvl_cache_limits){1ull << 48, (uint32_t)sysconf(_SC_NPROCESSORS_ONLN)};
    plan->bandwidth = plan->args->bandwidth;
    if (plan->args->measure && plan->args->device == NULL)
        return kvl_fail(KVL_E_USAGE, "--measure needs a device to measure: --device D; or state --bandwidth");
    if (plan->args->device == NULL) return KVL_OK;
    KVL_TRY(kvl_device_open(plan->args->device, &plan->device));
    plan->limits = kvl_cache_limits_of(plan->device);
    if (plan->args->measure) {
        KVL_TRY(kvl_device_measure(plan->device, &peaks));
        plan->bandwidth = peaks.read_gbps;
    }
done:
    return status;
}

static struct kvl_session_config session_config(const struct args *args, const struct kvl_spec *spec)
{
    static const enum kvl_protocol protocols[] = {KVL_P1_FAKE_QUANT, KVL_P2_WRITE_THEN_READ, KVL_P3_PREFILL_EXACT, KVL_P4_STREAMING, KVL_P3_PREFILL_EXACT};
    const int64_t ubatch = protocols[args->protocol] == KVL_P4_STREAMING ? 1 : args->ubatch;
    return (struct kvl_session_config){
        .spec = spec,
        .n_ctx = (uint32_t)args->n_ctx,
        .ubatch = (uint32_t)(ubatch < args->n_ctx ? ubatch : args->n_ctx),
        .protocol = protocols[args->protocol],
        .exact = args->exact,
    };
}

/* A joint record is planned as two equal sides, of which one is there. */
static void keep_one_side(struct kvl_footprint *one)
{
    for (int c = 0; c < KVL_MEM_CLASSES; c++)
        if (c != KVL_MEM_SCRATCH) one->bytes[c] /= KVL_SIDES;
    one->bytes_per_token /= KVL_SIDES;
    one->resident /= KVL_SIDES;
    one->peak /= KVL_SIDES;
    one->token_read /= KVL_SIDES;
}

static kvl_status make(struct plan *plan)
{
    const struct args *args = plan->args;
    kvl_status status = KVL_OK;
    const struct kvl_public_model *public = kvl_public_models_find(&plan->publics, args->model);
    KVL_TRY(public ? open_public(plan, public) : open_file(plan));
    KVL_TRY(kvl_spec_resolved(plan->spec, &plan->resolved));
    KVL_TRY(find_limits(plan));
    plan->config = session_config(args, plan->spec);
    KVL_TRY(kvl_footprint_of(plan->dims, &plan->config, &plan->limits, &plan->one));
    if (plan->public.joint) keep_one_side(&plan->one);
    if (plan->config.n_ctx > plan->dims->n_ctx_train)
        kvl_warn("%s was trained for %u positions, the plan is for %u", plan->name, plan->dims->n_ctx_train, plan->config.n_ctx);
done:
    return status;
}

/* ---- what it comes to ---- */

/* Weights are there once; every user has a session of their own. */
static uint64_t class_bytes(const struct plan *plan, int cls, uint64_t users)
{
    return cls == KVL_MEM_WEIGHTS ? plan->weights : plan->one.bytes[cls] * users;
}

static uint64_t all_bytes(const struct plan *plan, uint64_t users)
{
    uint64_t sum = 0;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) sum += class_bytes(plan, c, users);
    return sum;
}

/* Of the cache of one user, all but what is reserved and not filled, and the page table. */
static uint64_t filled_bytes(const struct plan *plan)
{
    return plan->one.bytes[KVL_MEM_PAYLOAD] + plan->one.bytes[KVL_MEM_SCALE];
}

/* Users that a budget holds: as kvlab reserves, and with neither slack nor page tables, which no program can beat. */
static uint64_t max_users(const struct plan *plan) { return (uint64_t)plan->args->budget / plan->one.resident; }
static uint64_t users_bound(const struct plan *plan) { return (uint64_t)plan->args->budget / filled_bytes(plan); }

/* One token for each user: the weights are read once and of every cache what a query reads. No program on this memory is faster. */
static uint64_t read_bytes(const struct plan *plan)
{
    return plan->read_weights + (uint64_t)plan->args->users * plan->one.token_read;
}
static double floor_ns(const struct plan *plan) { return (double)read_bytes(plan) / plan->bandwidth; }

static kvl_status print_json(const struct plan *plan)
{
    const uint64_t users = (uint64_t)plan->args->users;
    const struct {
        const char *name, *value;
    } texts[] = {{"kv", plan->resolved.data},
                 {"device", plan->device ? kvl_device_caps(plan->device)->name : NULL},
                 {"model", plan->name},
                 {"protocol", kvl_protocol_name[plan->config.protocol]}};
    const struct kvl_fact facts[] = {
        {"ubatch", plan->config.ubatch, true},
        {"n_ctx", plan->config.n_ctx, true},
        {"bytes_per_token", (double)plan->one.bytes_per_token, true},
        {"payload_bytes", (double)class_bytes(plan, KVL_MEM_PAYLOAD, users), true},
        {"resident_bytes", (double)(plan->one.resident * users), true},
        {"peak_bytes", (double)(plan->one.peak * users), true},
        {"users", (double)users, true},
    };
    struct kvl_fact classes[KVL_MEM_CLASSES];
    kvl_status status = KVL_OK;
    cJSON *object = cJSON_CreateObject();
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        cJSON_AddItemToObject(object, texts[i].name, texts[i].value ? cJSON_CreateString(texts[i].value) : cJSON_CreateNull());
    KVL_TRY(kvl_json_facts(object, facts, sizeof facts / sizeof *facts));
    const struct kvl_fact answers[] = {
        {"max_users", plan->args->budget ? (double)max_users(plan) : NAN, true},
        {"max_users_bound", plan->args->budget ? (double)users_bound(plan) : NAN, true},
        {"read_bytes", (double)read_bytes(plan), true},
        {"bandwidth_gbps", plan->bandwidth != 0.0 ? plan->bandwidth : NAN},
        {"floor_ns", plan->bandwidth != 0.0 ? floor_ns(plan) : NAN},
    };
    KVL_TRY(kvl_json_facts(object, answers, sizeof answers / sizeof *answers));
    cJSON_AddBoolToObject(object, "weights_estimated", is_public(plan) || plan->device == NULL);
    for (int c = 0; c < KVL_MEM_CLASSES; c++)
        classes[c] = (struct kvl_fact){kvl_mem_class_name[c], (double)class_bytes(plan, c, users), true};
    KVL_TRY(kvl_json_facts(cJSON_AddObjectToObject(object, "bytes"), classes, KVL_MEM_CLASSES));
    cJSON_AddNullToObject(object, "run_file");
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static void print_row(const char *label, uint64_t one, uint64_t all, const char *note)
{
    printf("%-9s %20llu %20llu %14.3f  %s\n", label, (unsigned long long)one, (unsigned long long)all, (double)all / (1 << 20),
           note);
}

static void print_table(const struct plan *plan)
{
    static const char *const notes[KVL_MEM_CLASSES] = {[KVL_MEM_PAYLOAD] = "codes, sinks and tail, the context full",
                                                       [KVL_MEM_SCALE] = "scales and zero points",
                                                       [KVL_MEM_INDEX] = "page table; positions, scores, queries and bounds of pages that choosing takes",
                                                       [KVL_MEM_TABLE] = "calibration and rotation, shared by all tokens",
                                                       [KVL_MEM_SLACK] = "reserved and never filled",
                                                       [KVL_MEM_SCRATCH] = "forward pass and attention"};
    const struct kvl_dims *d = plan->dims;
    const uint64_t users = (uint64_t)plan->args->users;
    const char *weights = is_public(plan) ? "estimated: parameters in binary16"
                          : plan->device ? "packed"
                                         : "estimated: packing is the device's choice";
    printf("model     %s: %u layers, %u query and %u key-value heads of %u\n", plan->name, d->n_layer, d->n_head, d->n_kv_head,
           d->head_dim);
    if (is_public(plan)) printf("source    %s\n", plan->public.source);
    if (plan->device)
        printf("device    %s, buffers up to %llu bytes\n", kvl_device_caps(plan->device)->name,
               (unsigned long long)plan->limits.max_alloc_bytes);
    else
        printf("device    none, buffers of any size\n");
    printf("kv        %s\n", plan->resolved.data);
    printf("protocol  %s, ubatch %u%s\n", kvl_protocol_name[plan->config.protocol], plan->config.ubatch,
           plan->config.exact ? ", exact" : "");
    printf("context   %u tokens of %llu bytes, %llu user%s\n\n", plan->config.n_ctx, (unsigned long long)plan->one.bytes_per_token,
           (unsigned long long)users, users == 1 ? "" : "s");
    printf("%-9s %20s %20s %14s\n", "bytes", "one user", "all users", "MiB");
    for (int c = 0; c < KVL_MEM_CLASSES; c++)
        print_row(kvl_mem_class_name[c], class_bytes(plan, c, 1), class_bytes(plan, c, users),
                  c == KVL_MEM_WEIGHTS ? weights : notes[c]);
    print_row("resident", plan->one.resident, plan->one.resident * users, "the cache: all but weights and scratch");
    if (plan->one.peak != plan->one.resident)
        print_row("peak", plan->one.peak, plan->one.peak * users, "with a layer's rows in full precision, while a prompt is compressed");
    print_row("total", all_bytes(plan, 1), all_bytes(plan, users), "");
    if (plan->args->budget)
        printf("\n%lld bytes hold the caches of %llu users; without slack and page tables %llu\n", (long long)plan->args->budget,
               (unsigned long long)max_users(plan), (unsigned long long)users_bound(plan));
    if (plan->bandwidth != 0.0)
        printf("\na token for %s reads %llu bytes: at %.1f GB/s at least %.3f ms, at most %.1f tokens/s\n",
               users == 1 ? "the user" : "each user", (unsigned long long)read_bytes(plan), plan->bandwidth, floor_ns(plan) * 1e-6,
               (double)users * 1e9 / floor_ns(plan));
}

static void print_models(const struct kvl_public_models *models)
{
    printf("%-16s %6s %11s %8s %8s %7s %8s  %s\n", "name", "layers", "query heads", "kv heads", "head dim", "context", "window", "source");
    for (size_t i = 0; i < models->n; i++) {
        const struct kvl_public_model *m = &models->model[i];
        char window[32] = "";
        if (m->dims.window) snprintf(window, sizeof window, "%u", m->dims.window);
        printf("%-16s %6u %11u %8u %8u %7u %8s  %s\n", m->name, m->dims.n_layer, m->dims.n_head, m->dims.n_kv_head, m->dims.head_dim,
               m->dims.n_ctx_train, m->joint ? "joint" : window, m->source);
    }
}

static kvl_status run_plan(struct plan *plan)
{
    kvl_status status = KVL_OK;
    if (plan->args->model == NULL) return kvl_fail(KVL_E_USAGE, "kvlab plan needs --model MODEL (--models lists the public ones)");
    if (plan->args->n_ctx == 0) return kvl_fail(KVL_E_USAGE, "kvlab plan needs --ctx N (positions reserved for each user)");
    KVL_TRY(make(plan));
    if (plan->args->json)
        KVL_TRY(print_json(plan));
    else
        print_table(plan);
done:
    return status;
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    struct plan plan = {.args = arguments};
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_public_models_load(&plan.publics));
    if (plan.args->models)
        print_models(&plan.publics);
    else
        KVL_TRY(run_plan(&plan));
done:
    kvl_device_close(&plan.device);
    kvl_model_close(&plan.model);
    kvl_text_free(&plan.resolved);
    kvl_spec_free(&plan.spec);
    kvl_public_models_free(&plan.publics);
    return status;
}

#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    {.name = "model", .letter = 'm', .type = KVL_OPT_TEXT, .offset = AT(model), .metavar = "MODEL",
     .help = "a GGUF file, or a public model by its name or source (see --models)"},
    {.name = "models", .type = KVL_OPT_FLAG, .offset = AT(models), .help = "list the public models and where their dimensions are from"},
    {.name = "kv", .type = KVL_OPT_TEXT, .offset = AT(kv), .metavar = "SPEC", .help = "cache strategy", .fallback = "f16"},
    {.name = "ctx", .letter = 'c', .type = KVL_OPT_INT, .offset = AT(n_ctx), .metavar = "N",
     .help = "positions reserved for each user", .min = 1, .max = 1 << 24},
    {.name = "users", .type = KVL_OPT_INT, .offset = AT(users), .metavar = "N", .help = "sequences held at once", .fallback = "1", .min = 1,
     .max = 1 << 20},
    {.name = "budget-bytes", .type = KVL_OPT_INT, .offset = AT(budget), .metavar = "B",
     .help = "bytes for caches (not weights, not scratch): how many users fit?", .min = 1, .max = 1e15},
    {.name = "bandwidth", .type = KVL_OPT_FLOAT, .offset = AT(bandwidth), .metavar = "GB/S",
     .help = "memory bandwidth, 10^9 bytes a second: how fast can a token be at best?", .min = 1e-3, .max = 1e9},
    {.name = "measure", .type = KVL_OPT_FLAG, .offset = AT(measure), .help = "the same with the bandwidth measured on --device"},
    {.name = "layers", .type = KVL_OPT_INT, .offset = AT(layers), .metavar = "N", .help = "what if the public model had N layers",
     .min = 1, .max = 1 << 16},
    {.name = "kv-heads", .type = KVL_OPT_INT, .offset = AT(kv_heads), .metavar = "N",
     .help = "what if it had N key-value heads: as many as query heads is MHA, 1 is MQA", .min = 1, .max = 1 << 16},
    {.name = "head-dim", .type = KVL_OPT_INT, .offset = AT(head_dim), .metavar = "N", .help = "what if its heads had N channels", .min = 1,
     .max = 1 << 16},
    {.name = "ubatch", .type = KVL_OPT_INT, .offset = AT(ubatch), .metavar = "N", .help = "tokens appended at once (p4: always 1)",
     .fallback = "512", .min = 1, .max = 1 << 20},
    {.name = "protocol", .type = KVL_OPT_CHOICE, .offset = AT(protocol),
     .help = "what a query reads encoded: p1 everything, p2 what was sealed when its ubatch was written, p3 = compress-then-score a "
             "prompt that was compressed after it had been read, p4 what was sealed when its token was written",
     .fallback = "p2", .choices = "p1|p2|p3|p4|compress-then-score"},
    KVL_OPTION_EXACT(struct args),
    {.name = "device", .type = KVL_OPT_TEXT, .offset = AT(device), .metavar = "D",
     .help = "plan for this device's limits: index, part of its name, or cpu|gpu (see kvlab devices); without it no device is opened"},
    KVL_OPTION_JSON(struct args),
};
/* clang-format on */

const struct kvl_command kvl_cmd_plan = {
    .name = "plan",
    .summary = "bytes that a cache strategy reserves, before anything is loaded",
    .details =
        "Layers that slide by themselves (gemma) get their window, joint records (deepseek) are planned as one side. Weights of\n"
        "public models count as binary16; of a mixture of experts, a token reads the active ones.\n"
        "\n"
        "  kvlab plan --model llama-3-70b --ctx 8192 --users 10 --kv int4 --budget-bytes 24000000000 --bandwidth 3350\n"
        "  kvlab plan --model llama-3-70b --ctx 131072 --kv-heads 64\n"
        "  kvlab plan -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf --ctx 2048 --kv \"int4 sink=4 tail=64\" --device 0",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
