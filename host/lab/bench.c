#include "bench.h"
#include "median.h"
#include "mem.h"
#include "rng.h"
#include <math.h>
#include <stdio.h>

/* A decode's warm-up: kernels are built at their first launch, later tokens are all alike. */
enum { WARM_TOKENS = 4 };

struct kvl_bench {
    const struct kvl_rig *rig;
    const struct kvl_bench_config *config;
    struct kvl_session *session;
    int32_t *token;  /* [n_ctx][sequences] by position */
    uint32_t filled; /* depth the cache was last filled to */
    bool has_memory;
};

static const struct kvl_column columns[] = {
    {"test", "1", "name of the test, also the phase of its steps", KVL_COL_TEXT, KVL_PHASE_BYTES - 1},
    {"n_prompt", "1", "tokens prefilled, 0 in a decode", KVL_COL_U64},
    {"n_gen", "1", "tokens decoded, 0 in a prefill", KVL_COL_U64},
    {"depth", "1", "tokens in the cache before", KVL_COL_U64},
    {"sequences", "1", "in step, each with so many tokens", KVL_COL_U64},
    {"repetitions", "1", "samples", KVL_COL_U64},
    {"tokens_per_s", "s-1", "mean of the samples' rates", KVL_COL_F64},
    {"sd", "s-1", "standard deviation of the samples' rates", KVL_COL_F64},
    {"ns_min", "ns", "shortest sample", KVL_COL_U64},
    {"ns_median", "ns", "median sample", KVL_COL_F64},
    {"wall_ns", "ns", "samples with profiling, 0 without", KVL_COL_U64},
    {"span_ns", "ns", "of them, first start to last end of a kernel, token by token", KVL_COL_U64},
    {"busy_ns", "ns", "of that, time in kernels", KVL_COL_U64},
};
const struct kvl_record_table kvl_bench_table = {"/bench", columns, sizeof columns / sizeof *columns};

/* ---- opening ---- */

static uint32_t n_tokens(const struct kvl_bench_test *test) { return test->n_prompt + test->n_gen; }

uint32_t kvl_bench_n_ctx(const struct kvl_bench_config *config)
{
    uint32_t most = 0;
    for (size_t i = 0; i < config->n_tests; i++) {
        const uint32_t n = config->test[i].depth + n_tokens(&config->test[i]);
        if (n > most) most = n;
    }
    return most;
}

kvl_status kvl_bench_open(const struct kvl_rig *rig, const struct kvl_bench_config *config, struct kvl_bench **out)
{
    kvl_status status = KVL_OK;
    struct kvl_bench *b = NULL;
    const struct kvl_dims *dims = &rig->model->dims;
    const struct kvl_session_config session = {
        .spec = config->spec,
        .n_ctx = kvl_bench_n_ctx(config),
        .ubatch = config->ubatch,
        .n_sequence = config->n_sequence,
        .protocol = KVL_P2_WRITE_THEN_READ,
        .exact = config->exact,
        .allow_long = config->allow_long,
    };
    KVL_TRY(kvl_spec_check_dims(config->spec, dims->n_layer, dims->head_dim));
    KVL_TRY(kvl_alloc(&b, 1, sizeof *b));
    b->rig = rig;
    b->config = config;
    KVL_TRY(kvl_session_new(rig->weights, &session, &b->session));
    const size_t n_token = (size_t)session.n_ctx * config->n_sequence;
    KVL_TRY(kvl_alloc(&b->token, n_token, sizeof *b->token));
    for (size_t i = 0; i < n_token; i++) b->token[i] = (int32_t)(kvl_rng_u64(config->seed, i) % dims->n_vocab);
    *out = b;
    b = NULL;
done:
    kvl_bench_close(&b);
    return status;
}

void kvl_bench_close(struct kvl_bench **bench)
{
    struct kvl_bench *b = *bench;
    if (!b) return;
    kvl_session_free(&b->session);
    kvl_free(&b->token);
    kvl_free(bench);
}

/* ---- one repetition ---- */

/* The next n tokens, `piece` at a time, each waited for. */
static kvl_status advance(struct kvl_bench *b, uint32_t n, uint32_t piece, uint32_t n_logits)
{
    kvl_status status = KVL_OK;
    for (uint32_t done_tokens = 0; done_tokens < n;) {
        const uint32_t count = n - done_tokens < piece ? n - done_tokens : piece;
        KVL_TRY(kvl_session_forward(b->session, b->token + (size_t)kvl_session_position(b->session) * b->config->n_sequence, count, n_logits));
        KVL_TRY(kvl_device_finish(b->rig->device));
        done_tokens += count;
    }
done:
    return status;
}

struct step { /* a stretch of tokens under the clock */
    const char *phase;
    uint32_t n, piece, n_logits;
};

static kvl_status run_step(struct kvl_bench *b, const struct step *step, struct kvl_record *record, uint64_t *ns)
{
    kvl_status status = KVL_OK;
    struct kvl_counters before;
    kvl_session_counters(b->session, &before);
    const uint64_t start = kvl_now_ns();
    KVL_TRY(advance(b, step->n, step->piece, step->n_logits));
    *ns = kvl_now_ns() - start;
    KVL_TRY(kvl_record_step(record, b->session, step->phase, step->n * b->config->n_sequence, *ns, &before));
done:
    return status;
}

/* A cache of `depth` tokens: the last repetition's, rewound, if it can be; else emptied and filled again. */
static kvl_status fill_to(struct kvl_bench *b, uint32_t depth, struct kvl_record *record, uint64_t *ns)
{
    kvl_status status = KVL_OK;
    const struct step fill = {"fill", depth, b->config->ubatch, 0};
    if (depth != 0 && kvl_session_position(b->session) > depth && b->filled == depth && kvl_session_rewind(b->session, depth) == KVL_OK) goto done;
    kvl_error_clear();
    KVL_TRY(kvl_session_reset(b->session));
    b->filled = depth;
    if (depth != 0 && b->config->synthetic) KVL_TRY(kvl_session_fill(b->session, depth, b->config->seed));
    else if (depth != 0) KVL_TRY(run_step(b, &fill, record, ns));
    KVL_TRY(kvl_device_finish(b->rig->device));
done:
    return status;
}

/* Fills the cache to the test's depth, then takes the time of `step`. */
static kvl_status repeat(struct kvl_bench *b, const struct kvl_bench_test *test, const struct step *step, bool profile,
                         struct kvl_record *record, uint64_t *ns)
{
    kvl_status status = KVL_OK;
    kvl_profile_on(b->rig->device, false);
    KVL_TRY(fill_to(b, test->depth, record, ns));
    kvl_profile_on(b->rig->device, profile);
    KVL_TRY(run_step(b, step, record, ns));
done:
    if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted: the repetition is not finished");
    return status;
}

/* ---- a test ---- */

static void name_test(const struct kvl_bench_test *test, uint32_t n_sequence, char name[KVL_PHASE_BYTES])
{
    int n = snprintf(name, KVL_PHASE_BYTES, "%s%u", test->n_prompt ? "pp" : "tg", n_tokens(test));
    if (n_sequence > 1) n += snprintf(name + n, KVL_PHASE_BYTES - (size_t)n, "x%u", n_sequence);
    if (test->depth) snprintf(name + n, KVL_PHASE_BYTES - (size_t)n, "@d%u", test->depth);
}

static kvl_status least_and_median_ns(const struct kvl_bench_result *r, double *least, double *median)
{
    double *ns = NULL;
    const kvl_status status = kvl_alloc(&ns, r->n_samples, sizeof *ns);
    if (status != KVL_OK) return status;
    for (size_t i = 0; i < r->n_samples; i++) ns[i] = (double)r->sample_ns[i];
    *median = kvl_median(ns, r->n_samples); /* sorts */
    *least = ns[0];
    kvl_free(&ns);
    return KVL_OK;
}

static void summarize(struct kvl_bench_result *r, uint32_t n_sequence)
{
    struct kvl_moments rate = {0};
    for (size_t i = 0; i < r->n_samples; i++) kvl_moments_add(&rate, (double)n_tokens(&r->test) * n_sequence * 1e9 / (double)r->sample_ns[i]);
    r->tokens_per_s = rate.mean;
    r->sd = r->n_samples > 1 ? sqrt(kvl_moments_var(&rate)) : NAN;
}

static kvl_status put_row(const struct kvl_bench_result *r, uint32_t n_sequence, struct kvl_record *record)
{
    static const struct kvl_phase_times none = {0};
    const struct kvl_phase_times *phase = kvl_profile_phase(kvl_record_profile(record), r->name);
    double least, median;
    const kvl_status status = least_and_median_ns(r, &least, &median);
    if (status != KVL_OK) return status;
    if (!phase) phase = &none;
    const union kvl_cell cells[sizeof columns / sizeof *columns] = {
        {.text = r->name},     {.u64 = r->test.n_prompt}, {.u64 = r->test.n_gen},  {.u64 = r->test.depth}, {.u64 = n_sequence},
        {.u64 = r->n_samples}, {.f64 = r->tokens_per_s},  {.f64 = r->sd},          {.u64 = (uint64_t)least},
        {.f64 = median},       {.u64 = phase->wall_ns},   {.u64 = phase->span_ns}, {.u64 = phase->busy_ns},
    };
    return kvl_record_row(record, cells);
}

/* The run's memory is that of the fullest cache. */
static kvl_status note_memory(struct kvl_bench *b, struct kvl_record *record, struct kvl_cache_bytes *bytes)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_session_bytes(b->session, bytes));
    if (b->has_memory || kvl_session_position(b->session) < kvl_bench_n_ctx(b->config)) return KVL_OK;
    KVL_TRY(kvl_record_memory(record, b->session));
    b->has_memory = true;
done:
    return status;
}

kvl_status kvl_bench_run(struct kvl_bench *b, size_t index, struct kvl_record *record, struct kvl_bench_result *result)
{
    kvl_status status = KVL_OK;
    const struct kvl_bench_config *c = b->config;
    struct kvl_bench_result r = {.test = c->test[index]};
    struct kvl_progress progress;
    name_test(&r.test, c->n_sequence, r.name);
    const bool decode = r.test.n_gen > 0;
    const struct step timed = {r.name, n_tokens(&r.test), decode ? 1 : r.test.n_prompt, 1};
    const struct step warm = {"warm-up", decode && timed.n > WARM_TOKENS ? WARM_TOKENS : timed.n, timed.piece, 1};
    KVL_TRY(kvl_alloc(&r.sample_ns, c->repetitions, sizeof *r.sample_ns));
    kvl_progress_start(&progress, r.name, "repetitions", c->warmup + c->repetitions);
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        uint64_t ns;
        const bool is_timed = i >= c->warmup;
        KVL_TRY(repeat(b, &r.test, is_timed ? &timed : &warm, is_timed && c->kernels, record, &ns));
        if (is_timed) r.sample_ns[r.n_samples++] = ns;
        kvl_progress_update(&progress, i + 1);
    }
    kvl_progress_end(&progress);
    summarize(&r, c->n_sequence);
    KVL_TRY(note_memory(b, record, &r.bytes));
    KVL_TRY(put_row(&r, c->n_sequence, record));
    *result = r;
    r.sample_ns = NULL;
done:
    kvl_free(&r.sample_ns);
    return status;
}
