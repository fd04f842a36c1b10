/* kvlab plan: what a cache strategy reserves, to the byte, before anything is loaded. */
#include "cmd.h"
#include "log.h"
#include "plan_report.h"
#include "runrecord.h"
#include "text.h"
#include <stdio.h>
#include <unistd.h>

struct args {
    const char *model, *kv, *device;
    int64_t n_ctx, users, budget, ubatch;
    int protocol;
    bool exact, json;
};

struct plan {
    const struct args *args;
    struct kvl_model *model;               /* NULL for a public one */
    const struct kvl_public_model *public; /* NULL for a file */
    const struct kvl_dims *dims;
    const char *name;
    struct kvl_spec *spec;
    struct kvl_text resolved;  /* the spec */
    struct kvl_device *device; /* NULL without --device */
    struct kvl_cache_limits limits;
    struct kvl_session_config config;
    struct kvl_footprint one; /* of one user */
    uint64_t weights;
};

/* ---- what is asked ---- */

static kvl_status no_such_model(const char *name)
{
    struct kvl_text names = {0};
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < kvl_n_public_models; i++) KVL_TRY(kvl_text_printf(&names, " %s", kvl_public_models[i].name));
    status = kvl_fail(KVL_E_USAGE, "\"%s\" is neither a file nor one of the public models:%s", name, names.data);
done:
    kvl_text_free(&names);
    return status;
}

static kvl_status open_model(struct plan *plan)
{
    plan->public = kvl_public_model_find(plan->args->model);
    if (plan->public != NULL) {
        plan->dims = &plan->public->dims;
        plan->name = plan->public->name;
        plan->weights = kvl_public_weights_bytes(plan->public);
        return KVL_OK;
    }
    if (access(plan->args->model, F_OK) != 0) return no_such_model(plan->args->model);
    const kvl_status status = kvl_model_open(plan->args->model, &plan->model);
    if (status != KVL_OK) return status;
    plan->dims = &plan->model->dims;
    plan->name = plan->model->name;
    return kvl_weights_bytes(plan->model, &plan->weights);
}

/* Without a device: buffers of at most 4 GiB, and as many compute units as this machine has processors. */
static kvl_status find_limits(struct plan *plan)
{
    plan->limits = (struct kvl_cache_limits){1ull << 32, (uint32_t)sysconf(_SC_NPROCESSORS_ONLN)};
    if (plan->args->device == NULL) return KVL_OK;
    const kvl_status status = kvl_device_open(plan->args->device, &plan->device);
    if (status != KVL_OK) return status;
    const struct kvl_caps *caps = kvl_device_caps(plan->device);
    plan->limits = (struct kvl_cache_limits){caps->max_alloc_bytes, caps->compute_units, kvl_device_tuning(plan->device)};
    return KVL_OK;
}

static struct kvl_session_config session_config(const struct args *args, const struct kvl_spec *spec)
{
    static const enum kvl_protocol protocols[] = {KVL_P1_FAKE_QUANT, KVL_P2_WRITE_THEN_READ, KVL_P3_PREFILL_EXACT, KVL_P4_STREAMING};
    const int64_t ubatch = protocols[args->protocol] == KVL_P4_STREAMING ? 1 : args->ubatch;
    return (struct kvl_session_config){
        .spec = spec,
        .n_ctx = (uint32_t)args->n_ctx,
        .ubatch = (uint32_t)(ubatch < args->n_ctx ? ubatch : args->n_ctx),
        .protocol = protocols[args->protocol],
        .exact = args->exact,
    };
}

static kvl_status make(struct plan *plan)
{
    const struct args *args = plan->args;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_spec_parse(args->kv, &plan->spec));
    KVL_TRY(kvl_spec_resolved(plan->spec, &plan->resolved));
    KVL_TRY(open_model(plan));
    KVL_TRY(find_limits(plan));
    plan->config = session_config(args, plan->spec);
    KVL_TRY(kvl_footprint_of(plan->dims, &plan->config, &plan->limits, &plan->one));
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

static uint64_t max_users(const struct plan *plan) { return (uint64_t)plan->args->budget / plan->one.resident; }

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
    cJSON_AddItemToObject(object, "max_users",
                          plan->args->budget ? cJSON_CreateNumber((double)max_users(plan)) : cJSON_CreateNull());
    cJSON_AddBoolToObject(object, "weights_estimated", plan->public != NULL || plan->device == NULL);
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
                                                       [KVL_MEM_INDEX] = "page table",
                                                       [KVL_MEM_TABLE] = "calibration",
                                                       [KVL_MEM_SLACK] = "reserved and never filled",
                                                       [KVL_MEM_SCRATCH] = "forward pass and attention"};
    const struct kvl_dims *d = plan->dims;
    const uint64_t users = (uint64_t)plan->args->users;
    const char *weights = plan->public   ? "estimated: matrices in binary16"
                          : plan->device ? "packed"
                                         : "estimated: packing is the device's choice";
    printf("model     %s: %u layers, %u query and %u key-value heads of %u\n", plan->name, d->n_layer, d->n_head, d->n_kv_head,
           d->head_dim);
    printf("device    %s, buffers up to %llu bytes\n", plan->device ? kvl_device_caps(plan->device)->name : "none",
           (unsigned long long)plan->limits.max_alloc_bytes);
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
        printf("\n%lld bytes hold the caches of %llu users\n", (long long)plan->args->budget, (unsigned long long)max_users(plan));
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    struct plan plan = {.args = arguments};
    kvl_status status = make(&plan);
    if (status == KVL_OK && plan.args->json)
        status = print_json(&plan);
    else if (status == KVL_OK)
        print_table(&plan);
    kvl_device_close(&plan.device);
    kvl_model_close(&plan.model);
    kvl_text_free(&plan.resolved);
    kvl_spec_free(&plan.spec);
    return status;
}

#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    {.name = "model", .letter = 'm', .type = KVL_OPT_TEXT, .offset = AT(model), .metavar = "MODEL",
     .help = "a GGUF file, or the name of a public model (below)", .required = true},
    {.name = "kv", .type = KVL_OPT_TEXT, .offset = AT(kv), .metavar = "SPEC", .help = "cache strategy", .fallback = "f16"},
    {.name = "ctx", .letter = 'c', .type = KVL_OPT_INT, .offset = AT(n_ctx), .metavar = "N",
     .help = "positions reserved for each user", .min = 1, .max = 1 << 24, .required = true},
    {.name = "users", .type = KVL_OPT_INT, .offset = AT(users), .metavar = "N", .help = "sequences held at once", .fallback = "1", .min = 1,
     .max = 1 << 20},
    {.name = "budget-bytes", .type = KVL_OPT_INT, .offset = AT(budget), .metavar = "B",
     .help = "bytes for caches (not weights, not scratch): how many users fit?", .min = 1, .max = 1e15},
    {.name = "ubatch", .type = KVL_OPT_INT, .offset = AT(ubatch), .metavar = "N", .help = "tokens appended at once (p4: always 1)",
     .fallback = "512", .min = 1, .max = 1 << 20},
    {.name = "protocol", .type = KVL_OPT_CHOICE, .offset = AT(protocol),
     .help = "what a query reads encoded: p1 everything, p2 what was sealed when its ubatch was written, p3 a prompt that was "
             "compressed after it had been read, p4 what was sealed when its token was written",
     .fallback = "p2", .choices = "p1|p2|p3|p4"},
    KVL_OPTION_EXACT(struct args),
    {.name = "device", .type = KVL_OPT_TEXT, .offset = AT(device), .metavar = "D",
     .help = "plan for this device's limits: index, part of its name, or cpu|gpu (see kvlab devices); without it no device is opened"},
    KVL_OPTION_JSON(struct args),
};
/* clang-format on */

const struct kvl_command kvl_cmd_plan = {
    .name = "plan",
    .summary = "bytes that a cache strategy reserves, before anything is loaded",
    .details = "public models: llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.2-1b mistral-7b\n"
               "  qwen2.5-0.5b tinyllama-1.1b smollm2-135m opt-13b\n"
               "\n"
               "  kvlab plan --model llama-3-70b --ctx 8192 --users 10 --kv int4\n"
               "  kvlab plan -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf --ctx 2048 --kv \"int4 sink=4 tail=64\" --device 0",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
