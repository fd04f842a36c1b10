/* kvlab eval stream: a text as one long stream through one cache. */
#include "calibration.h"
#include "cmd.h"
#include "stream.h"
#include <math.h>
#include <stdio.h>

struct args {
    const char *model, *file, *kv, *device, *output;
    int64_t tokens, block;
    bool exact, allow_long, profile, no_run_file, json;
};

static const struct kvl_opt options[] = {
    KVL_OPTION_MODEL(struct args),
    KVL_OPTION_FILE(struct args),
    {.name = "kv", .type = KVL_OPT_TEXT, .offset = offsetof(struct args, kv), .metavar = "SPEC", .help = "cache strategy", .fallback = "streaming-llm"},
    {.name = "tokens", .letter = 'n', .type = KVL_OPT_INT, .offset = offsetof(struct args, tokens), .metavar = "N",
     .help = "length of the stream: the first tokens of the text", .fallback = "32768", .min = 2, .max = 1 << 28},
    {.name = "block", .type = KVL_OPT_INT, .offset = offsetof(struct args, block), .metavar = "N",
     .help = "tokens whose mean nll is a row of the result", .fallback = "256", .min = 1, .max = 4096},
    KVL_OPTION_EXACT(struct args),
    {.name = "allow-long", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, allow_long), .help = "allow positions beyond the trained context"},
    KVL_OPTION_DEVICE(struct args),
    KVL_OPTION_OUTPUT(struct args),
    {.name = "no-run-file", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, no_run_file), .help = "keep no run file"},
    {.name = "profile", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, profile), .help = "time every kernel into the run file (slower)"},
    KVL_OPTION_JSON(struct args),
};

enum { MAX_FACTS = 4 };

static size_t facts_of(const struct kvl_stream_result *r, struct kvl_fact *facts)
{
    const struct kvl_fact all[MAX_FACTS] = {
        {"nll", r->nll}, {"nll_se_block", r->nll_se_block}, {"n_tokens", (double)r->n_token, true}, {"decode_tokens_per_s", r->tokens_per_s}};
    for (size_t i = 0; i < MAX_FACTS; i++) facts[i] = all[i];
    return MAX_FACTS;
}

static void print_table(const struct kvl_record *record, const struct kvl_stream_result *r)
{
    kvl_record_print(record);
    printf("stream    %u tokens predicted, %.1f tokens/s\nnll       %.4f", r->n_token, r->tokens_per_s, r->nll);
    if (!isnan(r->nll_se_block)) printf(" +/- %.4f (blocks)", r->nll_se_block);
    printf("\n%10s %10s %12s\n", "token", "nll", "cache bytes");
    for (uint32_t i = 0; i < r->n_blocks; i++)
        printf("%10u %10.4f %12llu\n", r->block[i].first, r->block[i].nll, (unsigned long long)r->block[i].resident_bytes);
}

static kvl_status print_json(const struct kvl_record *record, const struct kvl_stream_result *r, const struct kvl_fact *facts, size_t n_facts)
{
    kvl_status status = KVL_OK;
    cJSON *object = cJSON_CreateObject();
    KVL_TRY(kvl_record_json(record, object));
    KVL_TRY(kvl_json_facts(object, facts, n_facts));
    cJSON *blocks = cJSON_AddArrayToObject(object, "blocks");
    for (uint32_t i = 0; i < r->n_blocks; i++) {
        const struct kvl_stream_block *b = &r->block[i];
        const struct kvl_fact row[] = {
            {"first", b->first, true}, {"nll", b->nll}, {"n", b->n, true}, {"resident_bytes", (double)b->resident_bytes, true}};
        cJSON *one = cJSON_CreateObject();
        if (!one || !cJSON_AddItemToArray(blocks, one)) {
            status = kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
            goto done;
        }
        KVL_TRY(kvl_json_facts(one, row, sizeof row / sizeof *row));
    }
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static kvl_status measure(const struct args *args, struct kvl_stream *stream, struct kvl_record *record)
{
    kvl_status status = KVL_OK;
    struct kvl_stream_result result = {0};
    struct kvl_fact facts[MAX_FACTS];
    KVL_TRY(kvl_stream_run(stream, record, &result));
    const size_t n_facts = facts_of(&result, facts);
    KVL_TRY(kvl_record_summary(record, facts, n_facts));
    if (args->json) KVL_TRY(print_json(record, &result, facts, n_facts));
    else print_table(record, &result);
done:
    kvl_stream_free(&result);
    return status;
}

static kvl_status run(void *words_args, size_t n_words, char *const *words)
{
    kvl_status status = KVL_OK;
    const struct args *args = words_args;
    struct kvl_rig rig = {0};
    struct kvl_eval_text text = {0};
    struct kvl_spec *spec = NULL;
    struct kvl_stream *stream = NULL;
    struct kvl_record *record = NULL;
    KVL_TRY(kvl_spec_open(args->kv, &spec));
    KVL_TRY(kvl_rig_open(args->model, args->device, &rig));
    KVL_TRY(kvl_eval_text_read(rig.model, args->file, &text));
    const struct kvl_stream_config config = {.spec = spec, .n_token = (uint32_t)args->tokens, .block = (uint32_t)args->block, .exact = args->exact,
                                             .allow_long = args->allow_long};
    KVL_TRY(kvl_stream_open(&rig, &text, &config, &stream));
    const struct kvl_fact settings[] = {{"block", (double)config.block, true}};
    const struct kvl_record_config header = {.command = "eval stream",
                                             .output = args->output,
                                             .no_file = args->no_run_file,
                                             .profile = args->profile,
                                             .device = rig.device,
                                             .model = rig.model,
                                             .spec = spec,
                                             .protocol = KVL_P4_STREAMING,
                                             .ubatch = 1,
                                             .n_ctx = config.n_token,
                                             .exact = args->exact,
                                             .text_sha256 = text.sha256,
                                             .settings = settings,
                                             .n_settings = sizeof settings / sizeof *settings,
                                             .table = &kvl_stream_table};
    KVL_TRY(kvl_record_open(&header, &record));
    status = measure(args, stream, record);
    status = kvl_record_close(&record, status);
done:
    kvl_stream_close(&stream);
    kvl_eval_text_free(&text);
    kvl_rig_close(&rig);
    kvl_spec_free(&spec);
    return status;
}

const struct kvl_command kvl_cmd_eval_stream = {
    .name = "eval stream",
    .summary = "perplexity along one long stream, token by token (protocol p4)",
    .details =
        "The text is one stream: each token is predicted from what the cache holds of all tokens before it, then taken in. A cache that bounds\n"
        "positions (pos=compact) streams beyond the trained context.\n"
        "\n"
        "  kvlab eval stream -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw -n 32768 --kv \"sink=4 window=1020 pos=compact\"",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
