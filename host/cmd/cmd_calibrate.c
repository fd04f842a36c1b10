/* kvlab calibrate: the table of a codec that learns from a text before it is used. */
#include "calibration.h"
#include "cmd.h"
#include <stdio.h>

struct args {
    const char *model, *file, *purpose, *output, *device;
    int64_t n_ctx, chunks, first_chunk, ubatch;
    bool json;
};

#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    KVL_OPTION_MODEL(struct args),
    KVL_OPTION_FILE(struct args),
    {.name = "for", .type = KVL_OPT_TEXT, .offset = AT(purpose), .metavar = "SPEC", .required = true,
     .help = "cache strategy that the table is for"},
    {.name = "output", .letter = 'o', .type = KVL_OPT_TEXT, .offset = AT(output), .metavar = "FILE.h5", .required = true,
     .help = "table to write"},
    {.name = "ctx", .letter = 'c', .type = KVL_OPT_INT, .offset = AT(n_ctx), .metavar = "N",
     .help = "tokens a window", .fallback = "2048", .min = KVL_EVAL_MIN_CTX, .max = 1 << 24},
    {.name = "chunks", .type = KVL_OPT_INT, .offset = AT(chunks), .metavar = "N",
     .help = "windows to run, 0 = all; their keys and values are held in memory", .fallback = "4", .min = 0, .max = 1e9},
    {.name = "first-chunk", .type = KVL_OPT_INT, .offset = AT(first_chunk), .metavar = "I",
     .help = "window to start with", .fallback = "0", .min = 0, .max = 1e9},
    {.name = "ubatch", .type = KVL_OPT_INT, .offset = AT(ubatch), .metavar = "N",
     .help = "tokens computed at once", .fallback = "512", .min = 1, .max = 1 << 20},
    KVL_OPTION_DEVICE(struct args),
    KVL_OPTION_JSON(struct args),
};
/* clang-format on */

static kvl_status print_json(const struct args *args, const struct kvl_calibrate_result *r)
{
    const struct kvl_fact facts[] = {
        {"n_tokens", (double)r->n_tokens}, {"k_floats", r->n[KVL_SIDE_K]}, {"v_floats", r->n[KVL_SIDE_V]}};
    kvl_status status = KVL_OK;
    cJSON *object = cJSON_CreateObject();
    if (!object || !cJSON_AddStringToObject(object, "table", args->output) || !cJSON_AddStringToObject(object, "sha256", r->sha256))
        KVL_TRY(kvl_fail(KVL_E_MEMORY, "no memory for the JSON result"));
    KVL_TRY(kvl_json_facts(object, facts, sizeof facts / sizeof *facts));
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    const struct args *args = arguments;
    kvl_status status = KVL_OK;
    struct kvl_rig rig = {0};
    struct kvl_eval_text text = {0};
    struct kvl_spec *spec = NULL;
    struct kvl_calibrate_result result;
    KVL_TRY(kvl_spec_parse(args->purpose, &spec));
    KVL_TRY(kvl_rig_open(args->model, args->device, &rig));
    KVL_TRY(kvl_eval_text_read(rig.model, args->file, &text));
    const struct kvl_calibrate_config config = {.spec = spec,
                                                .n_ctx = (uint32_t)args->n_ctx,
                                                .ubatch = (uint32_t)args->ubatch,
                                                .first_chunk = (uint64_t)args->first_chunk,
                                                .chunks = (uint64_t)args->chunks,
                                                .output = args->output};
    KVL_TRY(kvl_calibrate(&rig, &text, &config, &result));
    if (args->json)
        KVL_TRY(print_json(args, &result));
    else
        printf("%s: %llu tokens, %u floats a key stream, %u a value stream, sha256 %s\nuse it with --kv \"%s table=%s\"\n", args->output,
               (unsigned long long)result.n_tokens, result.n[KVL_SIDE_K], result.n[KVL_SIDE_V], result.sha256, args->purpose, args->output);
done:
    kvl_eval_text_free(&text);
    kvl_rig_close(&rig);
    kvl_spec_free(&spec);
    return status;
}

const struct kvl_command kvl_cmd_calibrate = {
    .name = "calibrate",
    .summary = "make the table of a codec that learns from a text",
    .details = "Runs windows of the text with an exact cache and gives every stream's keys or values, before or after RoPE as the strategy\n"
               "stores them and without its sinks, to the codec. Use another part of the text than the one that is scored.\n"
               "\n"
               "  kvlab calibrate -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --first-chunk 140 \\\n"
               "      --for \"kvquant(bits=3) rope=pre sink=1\" -o kvquant3.h5",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
