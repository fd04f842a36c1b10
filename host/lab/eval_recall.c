/* Recall of a span that comes again: a model that still has the tokens predicts their repeat, whatever they say (Olsson et al. 2022, arXiv:2209.11895). */
#include "eval_tasks.h"
#include "log.h"
#include "mem.h"
#include "rng.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct kvl_column columns[] = {
    {"depth", "1", "where the span stands in the context, 0 to 1", KVL_COL_F64},
    {"gap", "1", "tokens between the compression and the repeat", KVL_COL_U64},
    {"seed", "1", "seed of the sequence", KVL_COL_U64},
    {"nll_first", "1", "mean nll of the span's tokens when it comes first, nats", KVL_COL_F64},
    {"nll_repeat", "1", "the same when it comes again, with the strategy", KVL_COL_F64},
    {"nll_repeat_base", "1", "with the base cache", KVL_COL_F64},
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };
const struct kvl_record_table kvl_recall_table = {"/quality", columns, N_COLUMNS};

/* Sums of a cell over its sequences; `off` needs the ratio of the means and so comes from the values. */
struct cell_values {
    double *gain, *gain_base; /* [seeds] */
};

/* n tokens of the text from a random place, which does not meet the `used` tokens from `taken` on. */
static uint64_t draw_place(const struct kvl_eval_text *text, uint64_t seed, uint64_t *draw, uint32_t n, uint64_t taken, uint32_t used)
{
    for (;;) {
        const uint64_t place = kvl_rng_u64(seed, (*draw)++) % (text->n - n + 1);
        if (place + n <= taken || taken + used <= place) return place;
    }
}

/* Context of the text with the span in it, the gap, the span again. The layout says what of it is scored. */
static void make_sequence(struct kvl_eval *e, const struct kvl_recall_config *c, double depth, uint32_t gap, uint64_t seed,
                          struct kvl_eval_layout *layout)
{
    const struct kvl_tokenizer *tokenizer = e->rig->model->tokenizer;
    const uint32_t bos = kvl_tokenizer_adds_bos(tokenizer), filler = c->context - c->span + gap;
    const uint32_t at = bos + (uint32_t)lround(depth * (c->context - c->span - bos)), before = at;
    uint64_t draw = 0;
    const uint64_t span = draw_place(e->text, seed, &draw, c->span, 0, 0), text = draw_place(e->text, seed, &draw, filler, span, c->span);
    const int32_t *from = e->text->tokens;
    memcpy(e->window, from + text, before * sizeof *from);
    memcpy(e->window + at, from + span, c->span * sizeof *from);
    memcpy(e->window + at + c->span, from + text + before, (filler - before) * sizeof *from);
    memcpy(e->window + c->context + gap, from + span, c->span * sizeof *from);
    if (bos) e->window[0] = kvl_tokenizer_bos(tokenizer);
    *layout = (struct kvl_eval_layout){.n_ctx = c->context + gap + c->span,
                                       .context = c->context,
                                       .first_early = at + 1, /* a span's first token has nothing in front of it that says so */
                                       .n_early = c->span - 1,
                                       .first_scored = c->context + gap + 1,
                                       .n_scored = c->span - 1};
}

static void summarize(const struct cell_values *values, uint32_t n, struct kvl_recall_cell *cell)
{
    struct kvl_moments gain = {0}, base = {0}, off = {0};
    for (uint32_t i = 0; i < n; i++) {
        kvl_moments_add(&gain, values->gain[i]);
        kvl_moments_add(&base, values->gain_base[i]);
    }
    const struct kvl_interval interval = kvl_t_interval(&base);
    cell->gain = gain.mean;
    cell->gain_base = base.mean;
    cell->scored = interval.low > 0.0;
    cell->kept = cell->kept_se = NAN;
    if (!cell->scored) return;
    cell->kept = gain.mean / base.mean;
    for (uint32_t i = 0; i < n; i++) kvl_moments_add(&off, values->gain[i] - cell->kept * values->gain_base[i]);
    cell->kept_se = kvl_moments_se(&off) / base.mean;
}

static kvl_status run_cell(struct kvl_eval *e, const struct kvl_recall_config *c, struct kvl_record *record, struct cell_values *values,
                           struct kvl_progress *progress, struct kvl_recall_cell *cell)
{
    kvl_status status = KVL_OK;
    struct kvl_moments first = {0};
    for (uint32_t i = 0; i < c->seeds; i++) {
        struct kvl_eval_layout layout;
        make_sequence(e, c, cell->depth, cell->gap, c->seed + i, &layout);
        KVL_TRY(kvl_eval_run(e, &layout, record));
        const double nll = kvl_eval_mean_nll(e->early, layout.n_early), again = kvl_eval_mean_nll(e->score[KVL_EVAL_SPEC], layout.n_scored);
        const double base = kvl_eval_mean_nll(e->score[KVL_EVAL_BASE], layout.n_scored);
        const union kvl_cell cells[N_COLUMNS] = {{.f64 = cell->depth}, {.u64 = cell->gap}, {.u64 = c->seed + i}, {.f64 = nll}, {.f64 = again}, {.f64 = base}};
        KVL_TRY(kvl_record_row(record, cells));
        kvl_moments_add(&first, nll);
        values->gain[i] = nll - again;
        values->gain_base[i] = nll - base;
        kvl_progress_update(progress, e->n_forward);
    }
    cell->nll_first = first.mean;
    summarize(values, c->seeds, cell);
done:
    return status;
}

static kvl_status check(const struct kvl_eval *e, const struct kvl_recall_config *c)
{
    const uint64_t wanted = 2ull * (e->config.n_ctx + c->span); /* so that a place is found soon */
    if (c->span >= c->context) return kvl_fail(KVL_E_USAGE, "--span %u: a context of %u tokens has no room for it", c->span, c->context);
    if (e->text->n >= wanted) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "%s: %zu tokens; sequences are cut from at least %llu", e->text->path, e->text->n, (unsigned long long)wanted);
}

kvl_status kvl_eval_recall(struct kvl_eval *e, const struct kvl_recall_config *c, struct kvl_record *record, struct kvl_recall_cell *cell)
{
    kvl_status status = KVL_OK;
    struct cell_values values = {0};
    struct kvl_progress progress;
    uint64_t tokens = 0;
    for (size_t g = 0; g < c->n_gap; g++) tokens += c->n_depth * c->seeds * (uint64_t)(c->context + c->gap[g] + c->span);
    kvl_progress_start(&progress, "eval recall", "tok", tokens);
    KVL_TRY(check(e, c));
    KVL_TRY(kvl_alloc(&values.gain, c->seeds, sizeof *values.gain));
    KVL_TRY(kvl_alloc(&values.gain_base, c->seeds, sizeof *values.gain_base));
    for (size_t i = 0; i < c->n_depth * c->n_gap; i++) {
        cell[i] = (struct kvl_recall_cell){.depth = c->depth[i / c->n_gap], .gap = c->gap[i % c->n_gap]};
        KVL_TRY(run_cell(e, c, record, &values, &progress, &cell[i]));
    }
    KVL_TRY(kvl_record_memory(record, e->session[KVL_EVAL_SPEC]));
done:
    kvl_progress_end(&progress);
    kvl_free(&values.gain);
    kvl_free(&values.gain_base);
    if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted: the sequences that were run are in the run file");
    return status;
}
