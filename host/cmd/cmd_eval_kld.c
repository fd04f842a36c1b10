/* kvlab eval kld: how far a cache strategy moves the model's predictions from those with a base cache. */
#include "eval_run.h"
#include <math.h>
#include <stdio.h>

static void print_table(const struct kvl_record *record, const struct kvl_eval *eval, const struct kvl_eval_kld *r)
{
    const struct kvl_fact quantiles[] = {{"max", r->kld_max},  {"99.9 %", r->kld_p999}, {"99 %", r->kld_p99},
                                         {"95 %", r->kld_p95}, {"90 %", r->kld_p90},    {"median", r->kld_median},
                                         {"10 %", r->kld_p10}, {"5 %", r->kld_p5},      {"1 %", r->kld_p1}};
    eval_print_windows(record, eval, &r->spec);
    eval_print_errors("ppl", r->spec.ppl, r->spec.ppl_se, r->spec.ppl_se_chunk, r->spec.n_chunks, 4);
    printf("ppl base  %.4f\n", r->ppl_base);
    printf("ratio     %.6f +/- %.6f (tokens)\n", r->ppl_ratio, r->ppl_ratio_se);
    eval_print_errors("kld", r->kld_mean, r->kld_se, r->kld_se_chunk, r->spec.n_chunks, 6);
    for (size_t i = 0; i < sizeof quantiles / sizeof *quantiles; i++)
        printf("  %-7s %.6f\n", quantiles[i].name, quantiles[i].value);
    printf("same top1 %.3f +/- %.3f %%\n", 100.0 * r->same_top1, 100.0 * r->same_top1_se);
    printf("rms dp    %.3f %%\n", 100.0 * r->rms_dp);
    eval_print_bins(&r->spec);
    printf("prefill   %.1f tokens/s, base ", r->spec.tokens_per_s);
    if (isnan(r->base_tokens_per_s)) puts("read from --base-logits");
    else printf("%.1f\n", r->base_tokens_per_s);
}

static kvl_status measure(const struct eval_args *args, struct kvl_eval *eval, struct kvl_record *record)
{
    kvl_status status = KVL_OK;
    struct kvl_eval_kld result = {0};
    struct kvl_fact facts[KVL_EVAL_FACTS];
    KVL_TRY(kvl_eval_kld(eval, record, &result));
    const size_t n_facts = kvl_eval_kld_facts(&result, facts);
    KVL_TRY(kvl_record_summary(record, facts, n_facts));
    if (args->json)
        KVL_TRY(eval_print_json(record, facts, n_facts, &result.spec, true));
    else
        print_table(record, eval, &result);
done:
    kvl_eval_kld_free(&result);
    return status;
}

static kvl_status run(void *args, size_t n_words, char *const *words)
{
    const struct eval_kind kind = {"eval kld", &kvl_eval_kld_table, &kvl_eval_kld_binned_table, measure};
    const struct kvl_eval_config windows = eval_windows(args);
    return eval_run(args, &kind, &windows);
}

const struct kvl_command kvl_cmd_eval_kld = {
    .name = "eval kld",
    .summary = "divergence of a cache strategy's predictions from a base cache's",
    .details =
        "Both caches see the same windows, side by side in one process, and every scored token's whole distribution is compared:\n"
        "KLD(base || strategy) in nats, the share of equal top tokens, the change of the correct token's probability.\n"
        "\n"
        "  kvlab eval kld -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --chunks 20 --kv \"k=q8_0 "
        "v=q4_0\"",
    .options = eval_options,
    .n_options = EVAL_KLD_OPTIONS,
    .args_size = sizeof(struct eval_args),
    .run = run,
};
