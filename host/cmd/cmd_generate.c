/* kvlab generate: text from a prompt, with counts of what the cache saved; --no-cache is the baseline. */
#include "cache.h"
#include "calibration.h"
#include "cmd.h"
#include "eval.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "sample.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

struct args {
    const char *model, *prompt, *file, *kv, *system, *device, *output;
    int64_t n, ubatch, top_k, seed;
    double temp, top_p, min_p;
    int protocol;
    bool chat, no_cache, ignore_eos, ids, exact, allow_long, profile, no_run_file, json;
};

#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    KVL_OPTION_MODEL(struct args),
    {.name = "prompt", .letter = 'p', .type = KVL_OPT_TEXT, .offset = AT(prompt), .metavar = "TEXT", .help = "prompt"},
    {.name = "file", .letter = 'f', .type = KVL_OPT_TEXT, .offset = AT(file), .metavar = "FILE",
     .help = "prompt from a file, read as bytes"},
    {.name = "tokens", .letter = 'n', .type = KVL_OPT_INT, .offset = AT(n), .metavar = "N",
     .help = "most tokens to generate",
     .fallback = "128", .min = 1, .max = 1 << 24},
    {.name = "kv", .type = KVL_OPT_TEXT, .offset = AT(kv), .metavar = "SPEC",
     .help = "cache strategy", .fallback = "f16"},
    {.name = "chat", .type = KVL_OPT_FLAG, .offset = AT(chat),
     .help = "the prompt is a user's message, put into the model's chat template"},
    {.name = "system", .type = KVL_OPT_TEXT, .offset = AT(system), .metavar = "TEXT",
     .help = "system message of --chat"},
    {.name = "temp", .type = KVL_OPT_FLOAT, .offset = AT(temp), .metavar = "T",
     .help = "temperature, 0 = always the most likely token",
     .fallback = "0", .min = 0, .max = 100},
    {.name = "top-k", .type = KVL_OPT_INT, .offset = AT(top_k), .metavar = "K",
     .help = "draw among the K most likely, 0 = all",
     .fallback = "0", .min = 0, .max = 1e9},
    {.name = "top-p", .type = KVL_OPT_FLOAT, .offset = AT(top_p), .metavar = "P",
     .help = "draw among the most likely that sum to P",
     .fallback = "1", .min = 1e-9, .max = 1},
    {.name = "min-p", .type = KVL_OPT_FLOAT, .offset = AT(min_p), .metavar = "P",
     .help = "draw among those of at least P times the highest",
     .fallback = "0", .min = 0, .max = 1},
    {.name = "seed", .type = KVL_OPT_INT, .offset = AT(seed), .metavar = "N",
     .help = "seed of the draws", .fallback = "0", .min = 0, .max = 9e15},
    {.name = "no-cache", .type = KVL_OPT_FLAG, .offset = AT(no_cache),
     .help = "forget keys and values after every token and compute the whole prefix again (the baseline); the same tokens"},
    {.name = "ignore-eos", .type = KVL_OPT_FLAG, .offset = AT(ignore_eos), .help = "go on after an end token"},
    {.name = "ids", .type = KVL_OPT_FLAG, .offset = AT(ids), .help = "print token ids, one a line, instead of text"},
    {.name = "protocol", .type = KVL_OPT_CHOICE, .offset = AT(protocol),
     .help = "how the prompt enters the cache: p2 in ubatches, p4 token by token",
     .fallback = "p2", .choices = "p2|p4"},
    {.name = "ubatch", .type = KVL_OPT_INT, .offset = AT(ubatch), .metavar = "N",
     .help = "prompt tokens appended at once (p4: always 1)",
     .fallback = "512", .min = 1, .max = 1 << 20},
    KVL_OPTION_EXACT(struct args),
    {.name = "allow-long", .type = KVL_OPT_FLAG, .offset = AT(allow_long),
     .help = "allow positions beyond the trained context"},
    KVL_OPTION_DEVICE(struct args),
    KVL_OPTION_OUTPUT(struct args),
    {.name = "no-run-file", .type = KVL_OPT_FLAG, .offset = AT(no_run_file), .help = "keep no run file"},
    {.name = "profile", .type = KVL_OPT_FLAG, .offset = AT(profile),
     .help = "time every kernel into the run file (slower)"},
    KVL_OPTION_JSON(struct args),
};
/* clang-format on */

static const struct kvl_column token_columns[] = {
    {"position", "1", "position of the token, the prompt's first is 0", KVL_COL_U64},
    {"id", "1", "token id", KVL_COL_I64},
};
static const struct kvl_record_table token_table = {"/tokens", token_columns, sizeof token_columns / sizeof *token_columns};

struct generation {
    const struct args *args;
    struct kvl_rig rig;
    struct kvl_spec *spec;
    struct kvl_session *session;
    struct kvl_record *record;
    char prompt_sha256[65];
    int32_t *token;             /* [n_prompt + args->n] prompt, then what was generated */
    uint32_t n_prompt, n;       /* n: tokens known */
    uint32_t n_steps;           /* forward passes, one more than n - n_prompt if an end token stopped them */
    uint32_t n_cached;          /* of them in the cache */
    float *logits;              /* [n_vocab] for the token after the last */
    struct kvl_counters total;  /* over all resets */
    uint64_t first_ns, rest_ns; /* to the first token; the others */
    struct kvl_text text;       /* of the generated tokens */
    size_t shown;               /* bytes of it printed */
};

/* ---- the prompt ---- */

static kvl_status read_prompt(const struct args *args, char **prompt, size_t *size)
{
    if (!args->prompt == !args->file)
        return kvl_fail(KVL_E_USAGE, "the prompt comes from either -p TEXT or -f FILE: give one of them");
    if (args->system && !args->chat) return kvl_fail(KVL_E_USAGE, "--system is a message of the chat template: it needs --chat");
    kvl_status status = args->file ? kvl_file_read(args->file, prompt, size) : kvl_strdup(prompt, args->prompt);
    if (status != KVL_OK) return status;
    if (args->prompt) *size = strlen(*prompt);
    return *size > 0
               ? KVL_OK
               : kvl_fail(KVL_E_USAGE, "the prompt is empty: %s wants at least one character", args->file ? args->file : "-p");
}

static kvl_status format_chat(const struct generation *g, const char *message, struct kvl_text *out)
{
    struct kvl_chat_message messages[2];
    size_t n = 0;
    if (g->args->system) messages[n++] = (struct kvl_chat_message){"system", g->args->system};
    messages[n++] = (struct kvl_chat_message){"user", message};
    return kvl_chat_format(g->rig.model->tokenizer, messages, n, out);
}

/* The last token generated is never an input, so it needs no position. */
static kvl_status check_length(const struct generation *g, size_t n_prompt)
{
    const uint64_t limit = g->rig.model->dims.n_ctx_train, wanted = n_prompt + (uint64_t)g->args->n - 1;
    if (wanted > UINT32_MAX / 2)
        return kvl_fail(KVL_E_USAGE, "%llu tokens are more than a session can hold", (unsigned long long)wanted);
    if (wanted <= limit || g->args->allow_long || kvl_spec_compact(g->spec)) return KVL_OK; /* of a compact cache the session knows its positions */
    return kvl_fail(
        KVL_E_USAGE,
        "the prompt's %zu tokens and -n %lld need %llu positions, the model was trained on %llu; shorten one of them, or "
        "give --allow-long",
        n_prompt, (long long)g->args->n, (unsigned long long)wanted, (unsigned long long)limit);
}

/* The prompt's ids into g->token, with room for what is generated. */
static kvl_status tokenize_prompt(struct generation *g, const char *prompt, size_t size)
{
    kvl_status status = KVL_OK;
    const struct kvl_tokenizer *t = g->rig.model->tokenizer;
    struct kvl_text chat = {0};
    int32_t *ids = NULL;
    size_t n = 0;
    if (g->args->chat) {
        KVL_TRY(format_chat(g, prompt, &chat));
        prompt = chat.data;
        size = chat.size;
    }
    KVL_TRY(kvl_tokenizer_encode_stream(t, prompt, size, g->args->chat, &ids, &n));
    KVL_TRY(check_length(g, n));
    KVL_TRY(kvl_alloc(&g->token, n + (size_t)g->args->n, sizeof *g->token));
    memcpy(g->token, ids, n * sizeof *ids);
    g->n = g->n_prompt = (uint32_t)n;
done:
    kvl_free(&ids);
    kvl_text_free(&chat);
    return status;
}

/* ---- output ---- */

/* Bytes of s that do not end inside a UTF-8 sequence. */
static size_t complete_bytes(const char *s, size_t n)
{
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        const unsigned char c = (unsigned char)s[n - back];
        if ((c & 0xc0) != 0x80) return kvl_utf8_bytes(c) > back ? n - back : n;
    }
    return n;
}

/* Prints the text up to byte `end` that is not printed yet. */
static kvl_status show_text(struct generation *g, size_t end)
{
    if (end > g->shown) fwrite(g->text.data + g->shown, 1, end - g->shown, stdout);
    g->shown = end;
    if (fflush(stdout) == 0 && !ferror(stdout)) return KVL_OK;
    return kvl_fail(KVL_E_IO, "cannot write to stdout: %s", strerror(errno));
}

static kvl_status emit(struct generation *g, int32_t id)
{
    const kvl_status status = kvl_tokenizer_decode(g->rig.model->tokenizer, id, false, &g->text);
    if (status != KVL_OK || g->args->json) return status;
    if (!g->args->ids) return show_text(g, complete_bytes(g->text.data, g->text.size));
    printf("%d\n", id);
    return show_text(g, g->shown);
}

/* ---- the loop ---- */

static void add_counters(struct kvl_counters *sum, const struct kvl_counters *x)
{
    sum->tokens += x->tokens;
    sum->kv_computed += x->kv_computed;
    sum->kv_tokens_read += x->kv_tokens_read;
    sum->kv_bytes_read += x->kv_bytes_read;
    sum->flops += x->flops;
    sum->launches += x->launches;
    sum->rescored += x->rescored;
    sum->rescore_ns += x->rescore_ns;
}

/* Whether a prefix computed in one piece gives the bits of one that grew token by token: products must be exact, and no token may be read
 * in full precision or not by how far its ubatch reached (a tail). */
static bool piece_size_is_free(const struct generation *g)
{
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(g->session));
    bool tail = false;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) tail = tail || kvl_keeps_tail(&plan->layer[l]);
    return g->args->exact && !tail;
}

/* The n_new newest tokens; a prefix computed again goes through the same pieces as it grew in where that matters. */
static kvl_status forward_tokens(struct generation *g, uint32_t n_new)
{
    kvl_status status = KVL_OK;
    uint32_t at = g->n - n_new;
    if (n_new > g->n_prompt && !piece_size_is_free(g)) {
        KVL_TRY(kvl_session_forward(g->session, g->token, g->n_prompt, 0));
        for (at = g->n_prompt; at + 1 < g->n; at++) KVL_TRY(kvl_session_forward(g->session, g->token + at, 1, 0));
    }
    KVL_TRY(kvl_session_forward(g->session, g->token + at, g->n - at, 1));
done:
    return status;
}

/* Logits for the token after the last known one. */
static kvl_status forward(struct generation *g)
{
    kvl_status status = KVL_OK;
    struct kvl_counters before = {0};
    const uint64_t begin = kvl_now_ns();
    if (g->args->no_cache) {
        KVL_TRY(kvl_session_reset(g->session));
        g->n_cached = 0;
    } else {
        kvl_session_counters(g->session, &before);
    }
    const uint32_t n_new = g->n - g->n_cached;
    KVL_TRY(forward_tokens(g, n_new));
    KVL_TRY(kvl_session_read_logits(g->session, 0, g->logits));
    g->n_cached = g->n;
    g->n_steps++;
    KVL_TRY(
        kvl_record_step(g->record, g->session, g->n == g->n_prompt ? "prefill" : "decode", n_new, kvl_now_ns() - begin, &before));
    if (g->n == g->n_prompt) KVL_TRY(kvl_record_eviction(g->record, g->session));
    struct kvl_counters now;
    kvl_session_counters(g->session, &now);
    if (g->args->no_cache)
        add_counters(&g->total, &now);
    else
        g->total = now;
done:
    return status;
}

static kvl_status take_token(struct generation *g, int32_t id)
{
    const union kvl_cell cells[] = {{.u64 = g->n}, {.i64 = id}};
    g->token[g->n++] = id;
    const kvl_status status = kvl_record_row(g->record, cells);
    return status == KVL_OK ? emit(g, id) : status;
}

static kvl_status generate(struct generation *g)
{
    kvl_status status = KVL_OK;
    const struct args *args = g->args;
    const struct kvl_sampler sampler = {args->temp, args->top_k, args->top_p, args->min_p, (uint64_t)args->seed};
    const struct kvl_model *model = g->rig.model;
    const uint64_t start = kvl_now_ns();
    for (int64_t i = 0; i < args->n; i++) {
        int32_t id;
        status = forward(g);
        if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted: %lld of %lld tokens are generated", (long long)i, (long long)args->n);
        KVL_TRY(status);
        KVL_TRY(kvl_sample(&sampler, g->logits, model->dims.n_vocab, (uint64_t)i, &id));
        if (i == 0) g->first_ns = kvl_now_ns() - start;
        if (kvl_tokenizer_is_end(model->tokenizer, id) && !args->ignore_eos) break;
        KVL_TRY(take_token(g, id));
    }
    g->rest_ns = kvl_now_ns() - start - g->first_ns;
    KVL_TRY(kvl_record_running(g->record, g->session));
    KVL_TRY(kvl_record_memory(g->record, g->session));
done:
    if (!args->json && !args->ids) {
        const kvl_status shown = show_text(g, g->text.size); /* an incomplete sequence at the end, too */
        if (status == KVL_OK) status = shown;
        putchar('\n');
        fflush(stdout);
    }
    return status;
}

/* ---- results ---- */

enum { GENERATE_FACTS = 12 };

static size_t generate_facts(const struct generation *g, struct kvl_fact facts[GENERATE_FACTS])
{
    const double rest_s = (double)g->rest_ns * 1e-9, n_rest = g->n_steps - 1.0;
    const struct kvl_fact all[] = {
        {"n_prompt", g->n_prompt, true},
        {"n_generated", g->n - g->n_prompt, true},
        {"first_token_ms", (double)g->first_ns * 1e-6},
        {"ms_per_token", n_rest > 0 ? 1e3 * rest_s / n_rest : NAN},
        {"tokens_per_s", n_rest > 0 && rest_s > 0 ? n_rest / rest_s : NAN},
        {"tokens_forwarded", (double)g->total.tokens, true},
        {"kv_computed", (double)g->total.kv_computed, true},
        {"kv_tokens_read", (double)g->total.kv_tokens_read, true},
        {"kv_bytes_read", (double)g->total.kv_bytes_read, true},
        {"flops", (double)g->total.flops, true},
        {"launches", (double)g->total.launches, true},
    };
    memcpy(facts, all, sizeof all);
    return sizeof all / sizeof *all;
}

static void print_report(const struct generation *g, const struct kvl_fact *facts, size_t n)
{
    static const struct {
        const char *name, *label, *unit;
    } lines[] = {
        {"n_prompt", "prompt", "tokens"},
        {"n_generated", "generated", "tokens"},
        {"first_token_ms", "time to first token", "ms"},
        {"ms_per_token", "time a further token", "ms"},
        {"tokens_per_s", "speed after the first", "tokens/s"},
        {"kv_computed", "keys and values computed", "tokens"},
        {"kv_tokens_read", "keys and values read", "tokens"},
        {"kv_bytes_read", "cache bytes read", "bytes"},
        {"flops", "operations", "FLOP"},
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        for (size_t k = 0; k < n; k++)
            if (strcmp(facts[k].name, lines[i].name) == 0 && !isnan(facts[k].value))
                kvl_info("%-24s %.*f %s", lines[i].label, facts[k].is_count ? 0 : 2, facts[k].value, lines[i].unit);
}

static kvl_status print_json(const struct generation *g, const struct kvl_fact *facts, size_t n)
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    cJSON *object = cJSON_CreateObject();
    KVL_TRY(kvl_record_json(g->record, object));
    KVL_TRY(kvl_json_facts(object, facts, n));
    KVL_TRY(kvl_text_append_utf8(&text, g->text.data, g->text.size));
    cJSON *ids = cJSON_CreateIntArray(g->token + g->n_prompt, (int)(g->n - g->n_prompt));
    if (!ids || !cJSON_AddItemToObject(object, "ids", ids) || !cJSON_AddStringToObject(object, "text", text.data)) {
        status = kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
        goto done;
    }
    KVL_TRY(kvl_json_print(object));
done:
    kvl_text_free(&text);
    cJSON_Delete(object);
    return status;
}

static kvl_status report(const struct generation *g)
{
    struct kvl_fact facts[GENERATE_FACTS];
    const size_t n = generate_facts(g, facts);
    const kvl_status status = kvl_record_summary(g->record, facts, n);
    if (status != KVL_OK) return status;
    print_report(g, facts, n);
    return g->args->json ? print_json(g, facts, n) : KVL_OK;
}

/* ---- opening ---- */

static enum kvl_protocol chosen_protocol(const struct args *args)
{
    return args->protocol ? KVL_P4_STREAMING : KVL_P2_WRITE_THEN_READ;
}

static uint32_t used_ctx(const struct generation *g) { return g->n_prompt + (uint32_t)g->args->n - 1; }

static uint32_t used_ubatch(const struct generation *g)
{
    const uint32_t n_ctx = used_ctx(g);
    if (chosen_protocol(g->args) == KVL_P4_STREAMING) return 1;
    return g->args->ubatch < n_ctx ? (uint32_t)g->args->ubatch : n_ctx;
}

static kvl_status open_session(struct generation *g)
{
    kvl_status status = KVL_OK;
    const struct kvl_session_config config = {
        .spec = g->spec,
        .n_ctx = used_ctx(g),
        .ubatch = used_ubatch(g),
        .protocol = chosen_protocol(g->args),
        .exact = g->args->exact,
        .allow_long = g->args->allow_long,
    };
    KVL_TRY(kvl_spec_check_dims(g->spec, g->rig.model->dims.n_layer, g->rig.model->dims.head_dim));
    KVL_TRY(kvl_session_new(g->rig.weights, &config, &g->session));
    KVL_TRY(kvl_alloc(&g->logits, g->rig.model->dims.n_vocab, sizeof *g->logits));
done:
    return status;
}

static kvl_status open_record(struct generation *g)
{
    const struct args *args = g->args;
    const struct kvl_fact settings[] = {
        {"n", (double)args->n, true},
        {"temp", args->temp},
        {"top_k", (double)args->top_k, true},
        {"top_p", args->top_p},
        {"min_p", args->min_p},
        {"seed", (double)args->seed, true},
        {"no_cache", args->no_cache, true},
        {"ignore_eos", args->ignore_eos, true},
    };
    const struct kvl_record_config config = {
        .command = "generate",
        .output = args->output,
        .no_file = args->no_run_file,
        .profile = args->profile,
        .device = g->rig.device,
        .model = g->rig.model,
        .spec = g->spec,
        .protocol = chosen_protocol(args),
        .ubatch = used_ubatch(g),
        .n_ctx = used_ctx(g),
        .exact = args->exact,
        .text_sha256 = g->prompt_sha256,
        .settings = settings,
        .n_settings = sizeof settings / sizeof *settings,
        .table = &token_table,
    };
    return kvl_record_open(&config, &g->record);
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    kvl_status status = KVL_OK;
    struct generation g = {.args = arguments};
    char *prompt = NULL;
    size_t size = 0;
    KVL_TRY(read_prompt(g.args, &prompt, &size));
    KVL_TRY(kvl_spec_open(g.args->kv, &g.spec));
    KVL_TRY(kvl_rig_open(g.args->model, g.args->device, &g.rig));
    KVL_TRY(tokenize_prompt(&g, prompt, size));
    KVL_TRY(kvl_sha256(prompt, size, g.prompt_sha256));
    KVL_TRY(open_session(&g));
    KVL_TRY(open_record(&g));
    KVL_TRY(generate(&g));
    KVL_TRY(report(&g));
done:
    status = kvl_record_close(&g.record, status);
    kvl_text_free(&g.text);
    kvl_free(&g.logits);
    kvl_free(&g.token);
    if (g.session) kvl_session_free(&g.session);
    kvl_rig_close(&g.rig);
    kvl_spec_free(&g.spec);
    kvl_free(&prompt);
    return status;
}

const struct kvl_command kvl_cmd_generate = {
    .name = "generate",
    .summary = "text from a prompt, and what the cache saved",
    .details = "The text streams to stdout, times and counters follow on stderr. --no-cache computes the whole prefix again for "
               "every token:\n"
               "the same tokens, T(T+1)/2 keys and values where the cache needs T.\n"
               "\n"
               "  kvlab generate -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf --chat -p \"Who was Euler?\" -n 128 --kv q8_0",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
