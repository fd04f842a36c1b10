/* kvlab trace: a short run as a page to step through. */
#include "calibration.h"
#include "cmd.h"
#include "mem.h"
#include "trace.h"
#include <stdio.h>
#include <string.h>

struct args {
    const char *model, *prompt, *kv, *device, *output;
    int64_t n;
    bool exact, allow_long;
};

static const struct kvl_opt options[] = {
    KVL_OPTION_MODEL(struct args),
    {.name = "prompt", .letter = 'p', .type = KVL_OPT_TEXT, .offset = offsetof(struct args, prompt), .metavar = "TEXT", .help = "prompt",
     .fallback = "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps. The quick brown fox"},
    {.name = "tokens", .letter = 'n', .type = KVL_OPT_INT, .offset = offsetof(struct args, n), .metavar = "N",
     .help = "steps: tokens to generate, the most likely ones", .fallback = "32", .min = 1, .max = KVL_TRACE_MOST_TOKENS},
    {.name = "kv", .type = KVL_OPT_TEXT, .offset = offsetof(struct args, kv), .metavar = "SPEC", .help = "cache strategy", .fallback = "int4 sink=4 tail=8"},
    KVL_OPTION_EXACT(struct args),
    {.name = "allow-long", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, allow_long), .help = "allow positions beyond the trained context"},
    KVL_OPTION_DEVICE(struct args),
    {.name = "output", .letter = 'o', .type = KVL_OPT_TEXT, .offset = offsetof(struct args, output), .metavar = "FILE.html", .help = "the page",
     .fallback = "trace.html"},
};

static kvl_status run(void *data, size_t n_words, char *const *words)
{
    const struct args *args = data;
    kvl_status status = KVL_OK;
    struct kvl_rig rig = {0};
    struct kvl_spec *spec = NULL;
    int32_t *prompt = NULL;
    size_t n = 0;
    KVL_TRY(kvl_spec_open(args->kv, &spec));
    KVL_TRY(kvl_rig_open(args->model, args->device, &rig));
    if (*args->prompt == '\0') KVL_TRY(kvl_fail(KVL_E_USAGE, "the prompt is empty: -p wants at least one character"));
    KVL_TRY(kvl_tokenizer_encode_stream(rig.model->tokenizer, args->prompt, strlen(args->prompt), false, &prompt, &n));
    if (n > KVL_TRACE_MOST_TOKENS) {
        status = kvl_fail(KVL_E_USAGE, "the prompt has %zu tokens, a page holds %d: use a shorter one", n, KVL_TRACE_MOST_TOKENS);
        goto done;
    }
    const struct kvl_trace_config config = {spec, args->kv, prompt, (uint32_t)n, (uint32_t)args->n, args->exact, args->allow_long};
    KVL_TRY(kvl_trace_write(&rig, &config, args->output));
    printf("%s: %zu tokens of prompt, %lld steps\n", args->output, n, (long long)args->n);
done:
    kvl_free(&prompt);
    kvl_rig_close(&rig);
    kvl_spec_free(&spec);
    return status;
}

const struct kvl_command kvl_cmd_trace = {
    .name = "trace",
    .summary = "a short run as a page to step through: what the cache keeps, computes and reads",
    .details = "One HTML file that loads nothing: the work with a cache and without, what heads that share a key save, and the run itself, token by\n"
               "token: which tokens each layer and head has stored, keeps exact, or has evicted, and how much attention they would get.\n\n"
               "    kvlab trace -m M.gguf -p \"Once upon a time\" --kv \"int4 keep=h2o budget=uniform(tokens=16) when=full\" -o h2o.html",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
