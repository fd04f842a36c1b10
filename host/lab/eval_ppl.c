/* Perplexity of a cache strategy. */
#include "eval.h"
#include "log.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>

static const struct kvl_column columns[] = {
    {"chunk", "1", "window of the text, counted from 0", KVL_COL_U64},
    {"nll", "1", "mean negative log-likelihood of the scored tokens, nats", KVL_COL_F64},
    {"n", "1", "scored tokens", KVL_COL_U64},
    {"nll_1_16", "1", "the same of the 1st to 16th token after the compression", KVL_COL_F64},
    {"nll_17_64", "1", "of the 17th to 64th", KVL_COL_F64},
    {"nll_65_256", "1", "of the 65th to 256th", KVL_COL_F64},
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };
const struct kvl_record_table kvl_eval_ppl_table = {"/quality", columns, N_COLUMNS - KVL_EVAL_BINS};
const struct kvl_record_table kvl_eval_ppl_binned_table = {"/quality", columns, N_COLUMNS};

static kvl_status score_window(struct kvl_eval *e, uint64_t chunk, struct kvl_record *record, struct kvl_moments *tokens,
                               struct kvl_eval_chunk *out)
{
    kvl_status status = KVL_OK;
    struct kvl_moments window = {0};
    KVL_TRY(kvl_eval_window(e, chunk, record));
    for (uint32_t i = 0; i < e->layout.n_scored; i++) {
        kvl_moments_add(&window, e->score[KVL_EVAL_SPEC][i].nll);
        kvl_moments_add(tokens, e->score[KVL_EVAL_SPEC][i].nll);
    }
    *out = (struct kvl_eval_chunk){.chunk = chunk, .n = e->layout.n_scored, .nll = window.mean};
    kvl_eval_bin_window(e, out);
    union kvl_cell cells[N_COLUMNS] = {{.u64 = chunk}, {.f64 = window.mean}, {.u64 = e->layout.n_scored}};
    kvl_eval_bin_cells(e, out, cells + N_COLUMNS - KVL_EVAL_BINS);
    KVL_TRY(kvl_record_row(record, cells));
done:
    return status;
}

kvl_status kvl_eval_ppl(struct kvl_eval *e, struct kvl_record *record, struct kvl_eval_ppl *out)
{
    kvl_status status = KVL_OK;
    const uint64_t chunks = e->config.chunks;
    struct kvl_moments tokens = {0}, windows = {0};
    struct kvl_progress progress;
    char label[64] = "eval ppl";
    *out = (struct kvl_eval_ppl){0};
    kvl_progress_start(&progress, label, "tok", chunks * e->config.n_ctx);
    KVL_TRY(kvl_alloc(&out->chunk, chunks, sizeof *out->chunk));
    for (uint64_t i = 0; i < chunks; i++) {
        KVL_TRY(score_window(e, e->config.first_chunk + i, record, &tokens, &out->chunk[i]));
        kvl_moments_add(&windows, out->chunk[i].nll);
        out->n_chunks = windows.n;
        out->n_tokens = tokens.n;
        out->nll = tokens.mean;
        out->ppl = exp(tokens.mean);
        out->ppl_se = out->ppl * kvl_moments_se(&tokens);
        out->ppl_se_chunk = windows.n > 1 ? out->ppl * kvl_moments_se(&windows) : NAN;
        out->tokens_per_s = kvl_eval_tokens_per_s(e, KVL_EVAL_SPEC);
        kvl_eval_bin_means(out);
        snprintf(label, sizeof label, "eval ppl  %.4f +/- %.4f", out->ppl, out->ppl_se);
        kvl_progress_update(&progress, e->n_forward);
    }
    KVL_TRY(kvl_record_memory(record, e->session[KVL_EVAL_SPEC]));
done:
    kvl_progress_end(&progress);
    return status;
}

void kvl_eval_ppl_free(struct kvl_eval_ppl *result) { kvl_free(&result->chunk); }

size_t kvl_eval_ppl_facts(const struct kvl_eval_ppl *r, struct kvl_fact *facts)
{
    size_t n = 0;
    facts[n++] = (struct kvl_fact){"ppl", r->ppl};
    facts[n++] = (struct kvl_fact){"ppl_se", r->ppl_se};
    facts[n++] = (struct kvl_fact){"ppl_se_chunk", r->ppl_se_chunk};
    facts[n++] = (struct kvl_fact){"nll", r->nll};
    facts[n++] = (struct kvl_fact){"n_tokens", (double)r->n_tokens, true};
    facts[n++] = (struct kvl_fact){"n_chunks", (double)r->n_chunks, true};
    facts[n++] = (struct kvl_fact){"prefill_tokens_per_s", r->tokens_per_s};
    return n + kvl_eval_bin_facts(&r->bin, facts + n);
}
