/* kvlab eval ppl: perplexity of a text with a cache strategy. */
#include "eval_run.h"
#include <stdio.h>

static void print_table(const struct kvl_record *record, const struct kvl_eval *eval, const struct kvl_eval_ppl *r)
{
    eval_print_windows(record, eval, r);
    eval_print_errors("ppl", r->ppl, r->ppl_se, r->ppl_se_chunk, r->n_chunks, 4);
    printf("nll       %.6f\n", r->nll);
    eval_print_bins(r);
    printf("prefill   %.1f tokens/s\n", r->tokens_per_s);
}

static kvl_status measure(const struct eval_args *args, struct kvl_eval *eval, struct kvl_record *record)
{
    kvl_status status = KVL_OK;
    struct kvl_eval_ppl result = {0};
    struct kvl_fact facts[KVL_EVAL_FACTS];
    KVL_TRY(kvl_eval_ppl(eval, record, &result));
    const size_t n_facts = kvl_eval_ppl_facts(&result, facts);
    KVL_TRY(kvl_record_summary(record, facts, n_facts));
    if (args->json)
        KVL_TRY(eval_print_json(record, facts, n_facts, &result, false));
    else
        print_table(record, eval, &result);
done:
    kvl_eval_ppl_free(&result);
    return status;
}

static kvl_status run(void *args, size_t n_words, char *const *words)
{
    const struct eval_kind kind = {"eval ppl", &kvl_eval_ppl_table, &kvl_eval_ppl_binned_table, measure};
    const struct kvl_eval_config windows = eval_windows(args);
    return eval_run(args, &kind, &windows);
}

const struct kvl_command kvl_cmd_eval_ppl = {
    .name = "eval ppl",
    .summary = "perplexity of a text with a cache strategy",
    .details =
        "The text is cut into consecutive windows, as llama-perplexity does; tokens c/2+1 .. c-1 of each window are predicted.\n"
        "\n"
        "  kvlab eval ppl -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --chunks 20 --kv q4_0",
    .options = eval_options,
    .n_options = EVAL_PPL_OPTIONS,
    .args_size = sizeof(struct eval_args),
    .run = run,
};
