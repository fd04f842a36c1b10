/* Divergence of a cache strategy from a base cache: both sessions see the same window, side by side. */
#include "eval.h"
#include "log.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>

static const struct kvl_column columns[] = {
    {"chunk", "1", "window of the text, counted from 0", KVL_COL_U64},
    {"nll", "1", "mean negative log-likelihood of the scored tokens, nats", KVL_COL_F64},
    {"n", "1", "scored tokens", KVL_COL_U64},
    {"nll_base", "1", "the same with the base cache, nats", KVL_COL_F64},
    {"kld", "1", "mean KLD(base || strategy), nats", KVL_COL_F64},
    {"same_top1", "1", "fraction of tokens whose most likely next token is the base's", KVL_COL_F64},
    {"nll_1_16", "1", "nll of the 1st to 16th token after the compression", KVL_COL_F64},
    {"nll_17_64", "1", "of the 17th to 64th", KVL_COL_F64},
    {"nll_65_256", "1", "of the 65th to 256th", KVL_COL_F64},
    {"kld_1_16", "1", "KLD(base || strategy) of the 1st to 16th token after the compression", KVL_COL_F64},
    {"kld_17_64", "1", "of the 17th to 64th", KVL_COL_F64},
    {"kld_65_256", "1", "of the 65th to 256th", KVL_COL_F64},
    {"same_top1_1_16", "1", "fraction of equal top tokens among the 1st to 16th token after the compression", KVL_COL_F64},
    {"same_top1_17_64", "1", "of the 17th to 64th", KVL_COL_F64},
    {"same_top1_65_256", "1", "of the 65th to 256th", KVL_COL_F64},
};
enum { N_COLUMNS = sizeof columns / sizeof *columns, N_PLAIN = N_COLUMNS - KVL_EVAL_BIN_FACTS };
const struct kvl_record_table kvl_eval_kld_table = {"/quality", columns, N_PLAIN};
const struct kvl_record_table kvl_eval_kld_binned_table = {"/quality", columns, N_COLUMNS};

struct token_sums {
    struct kvl_moments nll, nll_base, ratio, kld, same, dp2; /* ratio: nll - nll_base; dp2: squared change of p(correct) */
};

static void add_token(struct token_sums *s, const struct kvl_row_score *spec, const struct kvl_row_score *base, float kld)
{
    const double dp = exp(-(double)spec->nll) - exp(-(double)base->nll);
    kvl_moments_add(&s->nll, spec->nll);
    kvl_moments_add(&s->nll_base, base->nll);
    kvl_moments_add(&s->ratio, (double)spec->nll - (double)base->nll);
    kvl_moments_add(&s->kld, kld);
    kvl_moments_add(&s->same, spec->argmax == base->argmax);
    kvl_moments_add(&s->dp2, dp * dp);
}

static kvl_status score_window(struct kvl_eval *e, uint64_t chunk, struct kvl_record *record, struct token_sums *all, float *kld,
                               struct kvl_eval_chunk *out)
{
    kvl_status status = KVL_OK;
    struct token_sums window = {0};
    KVL_TRY(kvl_eval_window(e, chunk, record));
    for (uint32_t i = 0; i < e->layout.n_scored; i++) {
        add_token(&window, &e->score[KVL_EVAL_SPEC][i], &e->score[KVL_EVAL_BASE][i], e->kld[i]);
        add_token(all, &e->score[KVL_EVAL_SPEC][i], &e->score[KVL_EVAL_BASE][i], e->kld[i]);
        kld[i] = e->kld[i];
    }
    *out = (struct kvl_eval_chunk){chunk, e->layout.n_scored, window.nll.mean, window.nll_base.mean, window.kld.mean, window.same.mean};
    kvl_eval_bin_window(e, out);
    union kvl_cell cells[N_COLUMNS] = {{.u64 = chunk},         {.f64 = out->nll}, {.u64 = out->n},
                                    {.f64 = out->nll_base}, {.f64 = out->kld}, {.f64 = out->same_top1}};
    kvl_eval_bin_cells(e, out, cells + N_PLAIN);
    KVL_TRY(kvl_record_row(record, cells));
done:
    return status;
}

static void summarize(const struct token_sums *all, struct kvl_eval_kld *r)
{
    struct kvl_moments nll = {0}, kld = {0};
    for (uint64_t i = 0; i < r->spec.n_chunks; i++) {
        kvl_moments_add(&nll, r->spec.chunk[i].nll);
        kvl_moments_add(&kld, r->spec.chunk[i].kld);
    }
    const bool several = r->spec.n_chunks > 1;
    kvl_eval_bin_means(&r->spec);
    r->spec.n_tokens = all->nll.n;
    r->spec.nll = all->nll.mean;
    r->spec.ppl = exp(all->nll.mean);
    r->spec.ppl_se = r->spec.ppl * kvl_moments_se(&all->nll);
    r->spec.ppl_se_chunk = several ? r->spec.ppl * kvl_moments_se(&nll) : NAN;
    r->nll_base = all->nll_base.mean;
    r->ppl_base = exp(all->nll_base.mean);
    r->ppl_ratio = exp(all->ratio.mean);
    r->ppl_ratio_se = r->ppl_ratio * kvl_moments_se(&all->ratio);
    r->kld_mean = all->kld.mean;
    r->kld_se = kvl_moments_se(&all->kld);
    r->kld_se_chunk = several ? kvl_moments_se(&kld) : NAN;
    r->same_top1 = all->same.mean;
    r->same_top1_se = kvl_moments_se(&all->same);
    r->rms_dp = sqrt(all->dp2.mean);
}

static void quantiles(float *kld, size_t n, struct kvl_eval_kld *r)
{
    r->kld_max = kvl_quantile(kld, n, 1.0);
    r->kld_p999 = kvl_quantile(kld, n, 0.999);
    r->kld_p99 = kvl_quantile(kld, n, 0.99);
    r->kld_p95 = kvl_quantile(kld, n, 0.95);
    r->kld_p90 = kvl_quantile(kld, n, 0.90);
    r->kld_median = kvl_quantile(kld, n, 0.50);
    r->kld_p10 = kvl_quantile(kld, n, 0.10);
    r->kld_p5 = kvl_quantile(kld, n, 0.05);
    r->kld_p1 = kvl_quantile(kld, n, 0.01);
}

kvl_status kvl_eval_kld(struct kvl_eval *e, struct kvl_record *record, struct kvl_eval_kld *out)
{
    kvl_status status = KVL_OK;
    const uint64_t chunks = e->config.chunks;
    struct token_sums all = {0};
    struct kvl_progress progress;
    char label[64] = "eval kld";
    float *kld = NULL; /* [chunks * n_scored] */
    *out = (struct kvl_eval_kld){0};
    kvl_progress_start(&progress, label, "tok", chunks * e->config.n_ctx);
    KVL_TRY(kvl_alloc(&out->spec.chunk, chunks, sizeof *out->spec.chunk));
    KVL_TRY(kvl_alloc(&kld, chunks * e->layout.n_scored, sizeof *kld));
    for (uint64_t i = 0; i < chunks; i++) {
        KVL_TRY(score_window(e, e->config.first_chunk + i, record, &all, kld + i * e->layout.n_scored, &out->spec.chunk[i]));
        out->spec.n_chunks = i + 1;
        summarize(&all, out);
        snprintf(label, sizeof label, "eval kld  %.6f +/- %.6f", out->kld_mean, out->kld_se);
        kvl_progress_update(&progress, e->n_forward);
    }
    out->spec.tokens_per_s = kvl_eval_tokens_per_s(e, KVL_EVAL_SPEC);
    out->base_tokens_per_s = kvl_eval_tokens_per_s(e, KVL_EVAL_BASE);
    quantiles(kld, chunks * e->layout.n_scored, out);
    KVL_TRY(kvl_record_memory(record, e->session[KVL_EVAL_SPEC]));
done:
    kvl_progress_end(&progress);
    kvl_free(&kld);
    return status;
}

void kvl_eval_kld_free(struct kvl_eval_kld *result) { kvl_eval_ppl_free(&result->spec); }

size_t kvl_eval_kld_facts(const struct kvl_eval_kld *r, struct kvl_fact *facts)
{
    const struct kvl_fact own[] = {
        {"nll_base", r->nll_base},
        {"ppl_base", r->ppl_base},
        {"ppl_ratio", r->ppl_ratio},
        {"ppl_ratio_se", r->ppl_ratio_se},
        {"kld_mean", r->kld_mean},
        {"kld_se", r->kld_se},
        {"kld_se_chunk", r->kld_se_chunk},
        {"kld_max", r->kld_max},
        {"kld_p999", r->kld_p999},
        {"kld_p99", r->kld_p99},
        {"kld_p95", r->kld_p95},
        {"kld_p90", r->kld_p90},
        {"kld_median", r->kld_median},
        {"kld_p10", r->kld_p10},
        {"kld_p5", r->kld_p5},
        {"kld_p1", r->kld_p1},
        {"same_top1", r->same_top1},
        {"same_top1_se", r->same_top1_se},
        {"rms_dp", r->rms_dp},
        {"base_prefill_tokens_per_s", r->base_tokens_per_s},
    };
    size_t n = kvl_eval_ppl_facts(&r->spec, facts);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) facts[n++] = own[i];
    return n;
}
