/* How long a cache strategy goes the base cache's way: where greedy decoding first leaves it, and how often they agree when it is led back. */
#include "eval_tasks.h"
#include "log.h"
#include "mem.h"
#include "sample.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct kvl_column columns[] = {
    {"chunk", "1", "window of the text, counted from 0", KVL_COL_U64},
    {"n", "1", "tokens of the base's continuation", KVL_COL_U64},
    {"first", "1", "tokens in common before the first other one; n: there is none", KVL_COL_U64},
    {"same_top1", "1", "fraction of equal top tokens, fed with the base's tokens", KVL_COL_F64},
    {"kld", "1", "mean KLD(base || strategy) of these predictions, nats", KVL_COL_F64},
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };
const struct kvl_record_table kvl_continuation_table = {"/quality", columns, N_COLUMNS};

/* The text's context into the window, and what the base goes on with. */
static kvl_status decode(struct kvl_eval *e, uint64_t chunk, float *logits)
{
    kvl_status status = KVL_OK;
    const struct kvl_tokenizer *tokenizer = e->rig->model->tokenizer;
    const struct kvl_sampler greedy = {.top_p = 1};
    const uint32_t n_ctx = e->config.n_ctx, context = e->config.context;
    struct kvl_session *base = e->session[KVL_EVAL_BASE];
    memcpy(e->window, e->text->tokens + chunk * n_ctx, context * sizeof *e->window);
    if (kvl_tokenizer_adds_bos(tokenizer)) e->window[0] = kvl_tokenizer_bos(tokenizer);
    KVL_TRY(kvl_session_reset(base));
    KVL_TRY(kvl_session_forward(base, e->window, context, 1));
    for (uint32_t t = context; t < n_ctx; t++) {
        KVL_TRY(kvl_session_read_logits(base, 0, logits));
        KVL_TRY(kvl_sample(&greedy, logits, e->rig->model->dims.n_vocab, t, &e->window[t]));
        if (t + 1 < n_ctx) KVL_TRY(kvl_session_forward(base, e->window + t, 1, 1));
    }
done:
    return status;
}

/* Fed with the same tokens, the strategy's greedy decoding leaves the base's where their top tokens first differ. */
static kvl_status compare(struct kvl_eval *e, uint64_t chunk, struct kvl_record *record, uint32_t *first, double *same_top1, double *kld)
{
    kvl_status status = KVL_OK;
    const uint32_t n = e->layout.n_scored;
    struct kvl_moments same = {0}, divergence = {0};
    KVL_TRY(kvl_eval_run(e, &e->layout, record));
    *first = n;
    for (uint32_t i = 0; i < n; i++) {
        const bool equal = e->score[KVL_EVAL_SPEC][i].argmax == e->score[KVL_EVAL_BASE][i].argmax;
        if (!equal && *first == n) *first = i;
        kvl_moments_add(&same, equal);
        kvl_moments_add(&divergence, e->kld[i]);
    }
    *same_top1 = same.mean;
    *kld = divergence.mean;
    const union kvl_cell cells[N_COLUMNS] = {{.u64 = chunk}, {.u64 = n}, {.u64 = *first}, {.f64 = same.mean}, {.f64 = divergence.mean}};
    KVL_TRY(kvl_record_row(record, cells));
done:
    return status;
}

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

kvl_status kvl_eval_continuation(struct kvl_eval *e, struct kvl_record *record, struct kvl_continuation *out)
{
    kvl_status status = KVL_OK;
    const uint64_t chunks = e->config.chunks;
    struct kvl_moments same = {0}, kld = {0};
    struct kvl_progress progress;
    float *logits = NULL;
    uint32_t *first = NULL; /* [chunks] */
    *out = (struct kvl_continuation){.n_tokens = e->layout.n_scored};
    kvl_progress_start(&progress, "eval continuation", "tok", chunks * e->config.n_ctx);
    KVL_TRY(kvl_alloc(&logits, e->rig->model->dims.n_vocab, sizeof *logits));
    KVL_TRY(kvl_alloc(&first, chunks, sizeof *first));
    for (uint64_t i = 0; i < chunks; i++) {
        double share, divergence;
        KVL_TRY(decode(e, e->config.first_chunk + i, logits));
        KVL_TRY(compare(e, e->config.first_chunk + i, record, &first[i], &share, &divergence));
        kvl_moments_add(&same, share);
        kvl_moments_add(&kld, divergence);
        out->n_diverged += first[i] < out->n_tokens;
        kvl_progress_update(&progress, e->n_forward);
    }
    qsort(first, chunks, sizeof *first, by_number);
    out->n_chunks = chunks;
    out->first_median = first[(chunks - 1) / 2]; /* half the windows have left the base's way by then; those that have not count as n_tokens */
    out->same_top1 = same.mean;
    out->same_top1_se = chunks > 1 ? kvl_moments_se(&same) : NAN;
    out->kld = kld.mean;
    out->kld_se = chunks > 1 ? kvl_moments_se(&kld) : NAN;
    KVL_TRY(kvl_record_memory(record, e->session[KVL_EVAL_SPEC]));
done:
    kvl_progress_end(&progress);
    kvl_free(&logits);
    kvl_free(&first);
    if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted: the windows that were run are in the run file");
    return status;
}
