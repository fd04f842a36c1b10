/* kvlab eval continuation: how long greedy decoding goes the base cache's way after a compression. */
#include "eval_run.h"
#include "eval_tasks.h"
#include <math.h>
#include <stdio.h>

struct args {
    struct eval_args eval;
    int64_t n;
};

/* clang-format off */
static const struct kvl_opt options[] = {
    EVAL_OPTIONS_CACHE,
    EVAL_OPTION_BASE,
    EVAL_OPTIONS_CHUNKS,
    EVAL_OPTION_CONTEXT("tokens that are prefilled, then compressed"),
    {.name = "n-tokens", .letter = 'n', .type = KVL_OPT_INT, .offset = offsetof(struct args, n), .metavar = "N",
     .help = "tokens that the base goes on with", .fallback = "128", .min = 2, .max = 1 << 20},
    EVAL_OPTION_LOSS,
    EVAL_OPTIONS_RUN,
};
/* clang-format on */

static void print_result(const struct kvl_record *record, const struct kvl_eval *eval, const struct kvl_continuation *r)
{
    kvl_record_print(record);
    printf("windows   %llu of %u tokens from number %llu on, each with the %u tokens that the base goes on with\n", (unsigned long long)r->n_chunks,
           eval->config.context, (unsigned long long)eval->config.first_chunk, r->n_tokens);
    printf("in common %u%s tokens before the first other one (median); %llu of %llu windows leave the base's way\n", r->first_median,
           r->first_median == r->n_tokens ? " or more" : "", (unsigned long long)r->n_diverged, (unsigned long long)r->n_chunks);
    eval_print_errors("same top1", r->same_top1, NAN, r->same_top1_se, r->n_chunks, 5);
    eval_print_errors("kld", r->kld, NAN, r->kld_se, r->n_chunks, 6);
}

static kvl_status measure(const struct eval_args *args, struct kvl_eval *eval, struct kvl_record *record)
{
    kvl_status status = KVL_OK;
    struct kvl_continuation result;
    cJSON *object = NULL;
    KVL_TRY(kvl_eval_continuation(eval, record, &result));
    const bool censored = result.first_median == result.n_tokens;
    const struct kvl_fact facts[] = {{"first_median", result.first_median, true},
                                     {"first_median_censored", censored, true},
                                     {"n_diverged", (double)result.n_diverged, true},
                                     {"n_chunks", (double)result.n_chunks, true},
                                     {"n_tokens", (double)result.n_tokens, true},
                                     {"same_top1", result.same_top1},
                                     {"same_top1_se_chunk", result.same_top1_se},
                                     {"kld_mean", result.kld},
                                     {"kld_se_chunk", result.kld_se}};
    KVL_TRY(kvl_record_summary(record, facts, sizeof facts / sizeof *facts));
    if (!args->json) {
        print_result(record, eval, &result);
        goto done;
    }
    KVL_TRY(eval_json(record, facts, sizeof facts / sizeof *facts, &object));
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static kvl_status run(void *given, size_t n_words, char *const *words)
{
    const struct args *args = given;
    const struct eval_kind kind = {.command = "eval continuation", .table = &kvl_continuation_table, .measure = measure};
    const struct kvl_eval_config windows = {.n_ctx = (uint32_t)(args->eval.context + args->n), .context = (uint32_t)args->eval.context,
                                            .first_chunk = (uint64_t)args->eval.first_chunk, .chunks = (uint64_t)args->eval.chunks,
                                            .protocol = KVL_P3_PREFILL_EXACT};
    return eval_run(&args->eval, &kind, &windows);
}

const struct kvl_command kvl_cmd_eval_continuation = {
    .name = "eval continuation",
    .summary = "how long greedy decoding goes the base cache's way after a compression",
    .details =
        "The base cache reads a context and goes on greedily. The strategy reads the context, compresses it, and is fed with the same tokens: where its\n"
        "most likely token first differs, its own greedy decoding would leave the base's way (windows that never do are counted as N or more), and\n"
        "same top1 is the share of equal ones. --ubatch 1 feeds token by token, as generate does; more is faster.\n"
        "\n"
        "  kvlab eval continuation -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --kv snapkv --chunks 16",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
