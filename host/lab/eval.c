#include "eval.h"
#include "cache.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include <math.h>
#include <string.h>

/* ---- rig and text ---- */

kvl_status kvl_rig_open(const char *model_path, const char *device, struct kvl_rig *out)
{
    kvl_status status = KVL_OK;
    struct kvl_rig rig = {0};
    KVL_TRY(kvl_model_open(model_path, &rig.model));
    KVL_TRY(kvl_device_open(device, &rig.device));
    KVL_TRY(kvl_weights_load(rig.model, rig.device, &rig.weights));
    *out = rig;
    rig = (struct kvl_rig){0};
done:
    kvl_rig_close(&rig);
    return status;
}

void kvl_rig_close(struct kvl_rig *rig)
{
    if (rig->weights) kvl_weights_free(&rig->weights);
    if (rig->device) kvl_device_close(&rig->device);
    if (rig->model) kvl_model_close(&rig->model);
}

kvl_status kvl_eval_text_read(const struct kvl_model *model, const char *path, struct kvl_eval_text *out)
{
    kvl_status status = KVL_OK;
    struct kvl_eval_text text = {.path = path};
    char *bytes = NULL;
    size_t size = 0;
    KVL_TRY(kvl_file_read(path, &bytes, &size));
    if (size == 0) {
        status = kvl_fail(KVL_E_USAGE, "%s: the text is empty; -f wants a text of at least one window of tokens", path);
        goto done;
    }
    KVL_TRY(kvl_sha256(bytes, size, text.sha256));
    KVL_TRY(kvl_tokenizer_encode_stream(model->tokenizer, bytes, size, false, &text.tokens, &text.n));
    *out = text;
    text.tokens = NULL;
done:
    kvl_free(&bytes);
    kvl_free(&text.tokens);
    return status;
}

void kvl_eval_text_free(struct kvl_eval_text *text) { kvl_free(&text->tokens); }

/* ---- windows ---- */

/* What decides which kernels a device gets, and in which order they add. */
static kvl_status print_kernels_of(const struct kvl_device *device, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_caps *caps = kvl_device_caps(device);
    size_t n;
    const struct kvl_tune_kernel *kernel = kvl_tune_kernels(&n);
    KVL_TRY(kvl_text_printf(out, "device=%s %s %s %s\ncapabilities=%d %d %d %u %u\n", caps->platform, caps->name, caps->driver, caps->version, caps->fp16, caps->subgroups,
                            caps->int_dot, caps->float_width, caps->compute_units));
    for (size_t i = 0; i < n; i++) {
        KVL_TRY(kvl_text_printf(out, "%s ", kernel[i].name));
        KVL_TRY(kvl_setting_print(&kernel[i], &kvl_device_tuning(device)->setting[i], out));
        KVL_TRY(kvl_text_append(out, "\n", 1));
    }
done:
    return status;
}

/* What a base's logits depend on besides program and tokens. */
static kvl_status base_depends_on(const struct kvl_eval *e, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_eval_config *c = &e->config;
    struct kvl_text base = {0}, tables = {0};
    KVL_TRY(print_kernels_of(e->rig->device, out));
    KVL_TRY(kvl_spec_resolved(c->base, &base));
    KVL_TRY(kvl_spec_tables_sha256(c->base, &tables));
    KVL_TRY(kvl_text_printf(out, "model=%s\nbase=%s\ntables=%s\nprotocol=%s\nexact=%d\nubatch=%u\nn_ctx=%u\ncontext=%u\nfirst_scored=%u\n", e->rig->model->sha256, base.data,
                            tables.size ? tables.data : "", kvl_protocol_name[c->protocol], c->exact, c->ubatch, c->n_ctx, e->layout.context, e->layout.first_scored));
done:
    kvl_text_free(&base);
    kvl_text_free(&tables);
    return status;
}

static kvl_status open_kept(struct kvl_eval *e)
{
    kvl_status status = KVL_OK;
    struct kvl_text depends_on = {0};
    KVL_TRY(base_depends_on(e, &depends_on));
    KVL_TRY(kvl_base_logits_open(e->config.base_logits, depends_on.data, e->layout.n_scored, e->rig->model->dims.n_vocab, &e->kept));
done:
    kvl_text_free(&depends_on);
    return status;
}

/* The forward pass gets a window in pieces of whole ubatches, so that the logits of a long window need not fit at once. */
enum { PIECE_TOKENS = 512 };

static uint32_t piece_tokens(const struct kvl_eval_config *c)
{
    return c->ubatch >= PIECE_TOKENS ? c->ubatch : PIECE_TOKENS / c->ubatch * c->ubatch;
}

kvl_status kvl_eval_check(const struct kvl_rig *rig, const struct kvl_eval_text *text, struct kvl_eval_config *c)
{
    const uint32_t limit = rig->model->dims.n_ctx_train;
    if (c->protocol == KVL_P3_PREFILL_EXACT && (c->context == 0 || c->context + 1 >= c->n_ctx))
        return kvl_fail(KVL_E_USAGE, "compress-then-score of %u tokens of context and %d scored: it wants at least 1 and 2", c->context,
                        (int)(c->n_ctx - c->context));
    if (c->measure_loss && (c->protocol != KVL_P3_PREFILL_EXACT || !kvl_spec_evicts(c->spec)))
        return kvl_fail(KVL_E_USAGE, "--loss measures what evictions cost, and this run has none: it wants keep= in --kv and --protocol compress-then-score");
    if (c->n_ctx < KVL_EVAL_MIN_CTX)
        return kvl_fail(KVL_E_USAGE, "-c %u: a window needs at least %d tokens", c->n_ctx, KVL_EVAL_MIN_CTX);
    if (c->n_ctx > limit && !c->allow_long && !kvl_spec_compact(c->spec)) /* of a compact cache the session knows its positions */
        return kvl_fail(KVL_E_USAGE, "-c %u: the model was trained on %u positions; use -c %u or less, or --allow-long", c->n_ctx,
                        limit, limit);
    const uint64_t found = text->n / c->n_ctx;
    if (found == 0)
        return kvl_fail(KVL_E_USAGE, "%s: %zu tokens are less than one window of %u; use a longer text or a smaller -c", text->path,
                        text->n, c->n_ctx);
    if (c->first_chunk >= found)
        return kvl_fail(KVL_E_USAGE, "--first-chunk %llu: %s has windows 0 to %llu of %u tokens",
                        (unsigned long long)c->first_chunk, text->path, (unsigned long long)(found - 1), c->n_ctx);
    const uint64_t left = found - c->first_chunk;
    if (c->chunks > left)
        return kvl_fail(
            KVL_E_USAGE, "--chunks %llu: %s has %llu windows of %u tokens from --first-chunk %llu on; --chunks 0 takes them all",
            (unsigned long long)c->chunks, text->path, (unsigned long long)left, c->n_ctx, (unsigned long long)c->first_chunk);
    if (c->chunks == 0) c->chunks = left;
    if (c->ubatch > c->n_ctx) c->ubatch = c->n_ctx;
    if (c->protocol == KVL_P4_STREAMING) c->ubatch = 1;
    return KVL_OK;
}

/* Where the piece that begins at `start` ends: under P3 the context is one piece. */
static uint32_t piece_end(const struct kvl_eval *e, const struct kvl_eval_layout *l, uint32_t start)
{
    const uint32_t piece = l->context > 0 && start == 0 ? l->context : piece_tokens(&e->config);
    return l->n_ctx - start > piece ? start + piece : l->n_ctx;
}

/* A cache that begins with a prompt answers it before anything is evicted or encoded, so what is scored must come behind it. Its last token may predict the first. */
static kvl_status check_prompt(const struct kvl_eval *e, int role)
{
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(e->session[role]));
    const uint32_t prompt = piece_end(e, &e->layout, 0);
    if (!plan->evicts || prompt <= e->layout.first_scored) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "%s: this cache begins with a prompt that attends in full precision, under %s the first %u tokens of a window, and tokens from %u on are scored: "
                                 "use --protocol compress-then-score, or -c %d or more with --ubatch %d or less",
                    kvl_spec_given(plan->config.spec), kvl_protocol_name[e->config.protocol], prompt, e->layout.first_scored, 2 * PIECE_TOKENS, PIECE_TOKENS);
}

kvl_status kvl_eval_open(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_eval_config *config,
                         struct kvl_eval **out)
{
    kvl_status status = KVL_OK;
    struct kvl_eval *e = NULL;
    KVL_TRY(kvl_alloc(&e, 1, sizeof *e));
    e->rig = rig;
    e->text = text;
    e->config = *config;
    KVL_TRY(kvl_eval_check(rig, text, &e->config));
    const struct kvl_eval_config *c = &e->config;
    const struct kvl_spec *spec[KVL_EVAL_ROLES] = {c->spec, c->base};

    const bool compresses = c->protocol == KVL_P3_PREFILL_EXACT;
    e->layout = (struct kvl_eval_layout){.n_ctx = c->n_ctx, .context = compresses ? c->context : 0, .first_scored = compresses ? c->context : c->n_ctx / 2 + 1};
    e->layout.n_scored = c->n_ctx - e->layout.first_scored;
    if (c->keep_logits > e->layout.n_scored) {
        status = kvl_fail(KVL_E_USAGE, "--logits %u: of a window of %u tokens %u are scored", c->keep_logits, c->n_ctx, e->layout.n_scored);
        goto done;
    }
    const uint32_t late_rows = piece_tokens(c) < e->layout.n_scored + 1 ? piece_tokens(c) : e->layout.n_scored + 1;
    const uint32_t max_rows = c->early > late_rows ? c->early : late_rows;
    KVL_TRY(kvl_alloc(&e->window, c->n_ctx, sizeof *e->window));
    KVL_TRY(kvl_alloc(&e->kld, e->layout.n_scored, sizeof *e->kld));
    KVL_TRY(kvl_alloc(&e->early, c->early, sizeof *e->early));
    KVL_TRY(kvl_alloc(&e->logits, (size_t)c->keep_logits * rig->model->dims.n_vocab, sizeof *e->logits));
    for (int role = 0; role < KVL_EVAL_ROLES; role++) {
        if (!spec[role]) continue;
        const struct kvl_session_config session = {.spec = spec[role],
                                                   .n_ctx = c->n_ctx,
                                                   .ubatch = c->ubatch,
                                                   .protocol = c->protocol,
                                                   .exact = c->exact,
                                                   .max_logits = max_rows,
                                                   .allow_long = c->allow_long,
                                                   .measure_loss = c->measure_loss && role == KVL_EVAL_SPEC};
        KVL_TRY(kvl_spec_check_dims(spec[role], rig->model->dims.n_layer, rig->model->dims.head_dim));
        KVL_TRY(kvl_session_new(rig->weights, &session, &e->session[role]));
        KVL_TRY(check_prompt(e, role));
        KVL_TRY(kvl_alloc(&e->score[role], e->layout.n_scored, sizeof *e->score[role]));
    }
    KVL_TRY(kvl_logprob_new(rig->device, rig->model->dims.n_vocab, max_rows, NULL, &e->logprob));
    if (c->base && c->base_logits) KVL_TRY(open_kept(e));
    *out = e;
    e = NULL;
done:
    kvl_eval_close(&e);
    return status;
}

void kvl_eval_close(struct kvl_eval **eval)
{
    struct kvl_eval *e = *eval;
    if (!e) return;
    kvl_logprob_free(&e->logprob);
    kvl_base_logits_close(&e->kept);
    for (int role = 0; role < KVL_EVAL_ROLES; role++) {
        if (e->session[role]) kvl_session_free(&e->session[role]);
        kvl_free(&e->score[role]);
    }
    kvl_free(&e->kld);
    kvl_free(&e->early);
    kvl_free(&e->logits);
    kvl_free(&e->window);
    kvl_free(eval);
}

/* Logits of n rows against the tokens that follow, the first of which is the at-th scored one. */
static kvl_status score_rows(struct kvl_eval *e, const int32_t *targets, uint32_t at, uint32_t n)
{
    struct kvl_buffer *logits = kvl_session_logits(e->session[KVL_EVAL_SPEC]);
    if (!e->session[KVL_EVAL_BASE]) return kvl_logprob_score(e->logprob, logits, targets, n, e->score[KVL_EVAL_SPEC] + at);
    return kvl_logprob_compare(e->logprob, kvl_session_logits(e->session[KVL_EVAL_BASE]), logits, targets, n,
                               e->score[KVL_EVAL_BASE] + at, e->score[KVL_EVAL_SPEC] + at, e->kld + at);
}

/* The logits of n rows, the at-th scored one first, as far as they are wanted: those of the first window. */
static kvl_status keep_logits(struct kvl_eval *e, uint32_t at, uint32_t n)
{
    const uint64_t row = e->rig->model->dims.n_vocab, wanted = e->config.keep_logits;
    if (at != e->n_logits || at >= wanted) return KVL_OK;
    if (n > wanted - at) n = (uint32_t)(wanted - at);
    e->n_logits += n;
    return kvl_buffer_read(kvl_session_logits(e->session[KVL_EVAL_SPEC]), 0, n * row * sizeof *e->logits, e->logits + at * row);
}

/* Whether this window's logits of the base are read instead of computed. */
static bool base_known(const struct kvl_eval *e) { return e->kept && kvl_base_logits_known(e->kept); }

static bool computes(const struct kvl_eval *e, int role) { return e->session[role] && !(role == KVL_EVAL_BASE && base_known(e)); }

/* The base's logits of n rows, the at-th scored one first: to where a forward pass would leave them, or from there. */
static kvl_status exchange_kept(struct kvl_eval *e, uint32_t at, uint32_t n)
{
    const size_t size = (size_t)n * e->rig->model->dims.n_vocab * sizeof(float);
    struct kvl_buffer *logits = kvl_session_logits(e->session[KVL_EVAL_BASE]);
    float *rows = kvl_base_logits_rows(e->kept, at);
    return base_known(e) ? kvl_buffer_write(logits, 0, size, rows) : kvl_buffer_read(logits, 0, size, rows);
}

/* Tokens start .. end - 1 through all sessions, with the logits of n tokens from `first` on. */
static kvl_status forward_piece(struct kvl_eval *e, uint32_t start, uint32_t end, uint32_t first, uint32_t n, uint64_t ns[KVL_EVAL_ROLES])
{
    kvl_status status = KVL_OK;
    for (int role = 0; role < KVL_EVAL_ROLES; role++) {
        if (!computes(e, role)) continue;
        const uint64_t begin = kvl_now_ns();
        KVL_TRY(kvl_session_forward_at(e->session[role], e->window + start, end - start, first - start, n));
        KVL_TRY(kvl_device_finish(e->rig->device));
        ns[role] += kvl_now_ns() - begin;
    }
done:
    return status;
}

/* Tokens start .. end - 1, and the scores of the tokens that these predict: early ones in the context, else those scored. */
static kvl_status run_piece(struct kvl_eval *e, const struct kvl_eval_layout *l, uint32_t start, uint32_t end, uint64_t ns[KVL_EVAL_ROLES])
{
    kvl_status status = KVL_OK;
    if (end <= l->context && l->n_early > 0) {
        KVL_TRY(forward_piece(e, start, end, l->first_early - 1, l->n_early, ns));
        KVL_TRY(kvl_logprob_score(e->logprob, kvl_session_logits(e->session[KVL_EVAL_SPEC]), e->window + l->first_early, l->n_early, e->early));
        goto done;
    }
    const uint32_t before = l->first_scored - 1, past = before + l->n_scored; /* rows that predict a scored token */
    const uint32_t first = start > before ? start : before, last = end < past ? end : past, n = last > first ? last - first : 0;
    KVL_TRY(forward_piece(e, start, end, n > 0 ? first : start, n, ns));
    if (n == 0) goto done;
    if (e->kept) KVL_TRY(exchange_kept(e, first - before, n));
    KVL_TRY(score_rows(e, e->window + first + 1, first - before, n));
    KVL_TRY(keep_logits(e, first - before, n));
done:
    return status;
}

kvl_status kvl_eval_run(struct kvl_eval *e, const struct kvl_eval_layout *l, struct kvl_record *record)
{
    static const char *const phase[KVL_EVAL_ROLES] = {"window", "base window"};
    kvl_status status = KVL_OK;
    uint64_t ns[KVL_EVAL_ROLES] = {0};
    if (e->kept) KVL_TRY(kvl_base_logits_begin(e->kept, e->window, l->n_ctx));
    for (int role = 0; role < KVL_EVAL_ROLES; role++) {
        if (!e->session[role]) continue;
        KVL_TRY(kvl_session_reset(e->session[role]));
        if (l->context > 0) kvl_session_following(e->session[role], e->window + l->context, l->n_ctx - l->context - 1); /* the last one asks nothing */
    }
    for (uint32_t start = 0, end; start < l->n_ctx; start = end) {
        end = piece_end(e, l, start);
        KVL_TRY(run_piece(e, l, start, end, ns));
        if (start == 0) KVL_TRY(kvl_record_eviction(record, e->session[KVL_EVAL_SPEC]));
    }
    KVL_TRY(kvl_record_running(record, e->session[KVL_EVAL_SPEC]));
    if (e->kept) KVL_TRY(kvl_base_logits_end(e->kept));
    for (int role = 0; role < KVL_EVAL_ROLES; role++) {
        if (!computes(e, role)) continue;
        KVL_TRY(kvl_record_step(record, e->session[role], phase[role], l->n_ctx, ns[role], NULL));
        e->forward_ns[role] += ns[role];
        e->n_timed[role] += l->n_ctx;
    }
    e->n_forward += l->n_ctx;
done:
    return status;
}

kvl_status kvl_eval_window(struct kvl_eval *e, uint64_t chunk, struct kvl_record *record)
{
    const uint32_t n_ctx = e->config.n_ctx;
    const struct kvl_tokenizer *tokenizer = e->rig->model->tokenizer;
    memcpy(e->window, e->text->tokens + chunk * n_ctx, n_ctx * sizeof *e->window);
    if (kvl_tokenizer_adds_bos(tokenizer)) e->window[0] = kvl_tokenizer_bos(tokenizer);
    kvl_status status = kvl_eval_run(e, &e->layout, record);
    if (status == KVL_OK && e->n_logits > 0 && chunk == e->config.first_chunk)
        status = kvl_record_logits(record, chunk, e->n_logits, e->rig->model->dims.n_vocab, e->logits);
    if (status == KVL_E_INTERRUPTED)
        kvl_fail(status, "interrupted: %llu of %llu windows are committed", (unsigned long long)(chunk - e->config.first_chunk),
                 (unsigned long long)e->config.chunks);
    return status;
}

double kvl_eval_mean_nll(const struct kvl_row_score *score, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) sum += score[i].nll;
    return sum / (double)n;
}

double kvl_eval_tokens_per_s(const struct kvl_eval *e, enum kvl_eval_role role)
{
    return e->n_timed[role] ? (double)e->n_timed[role] * 1e9 / (double)e->forward_ns[role] : NAN;
}

/* ---- bins ---- */

const struct kvl_eval_bin kvl_eval_bins[KVL_EVAL_BINS] = {{"nll_1_16", "kld_1_16", "same_top1_1_16", 1, 16},
                                                          {"nll_17_64", "kld_17_64", "same_top1_17_64", 17, 64},
                                                          {"nll_65_256", "kld_65_256", "same_top1_65_256", 65, 256}};

static double mean_or_nan(const struct kvl_moments *m) { return m->n > 0 ? m->mean : NAN; }

void kvl_eval_bin_window(const struct kvl_eval *e, struct kvl_eval_chunk *out)
{
    const struct kvl_row_score *spec = e->score[KVL_EVAL_SPEC], *base = e->score[KVL_EVAL_BASE];
    const uint32_t n = e->config.protocol == KVL_P3_PREFILL_EXACT ? e->layout.n_scored : 0;
    for (int i = 0; i < KVL_EVAL_BINS; i++) {
        struct kvl_moments nll = {0}, kld = {0}, same = {0};
        for (uint32_t t = kvl_eval_bins[i].from - 1; t < kvl_eval_bins[i].to && t < n; t++) {
            kvl_moments_add(&nll, spec[t].nll);
            if (base == NULL) continue;
            kvl_moments_add(&kld, e->kld[t]);
            kvl_moments_add(&same, spec[t].argmax == base[t].argmax);
        }
        out->bin.nll[i] = mean_or_nan(&nll);
        out->bin.kld[i] = mean_or_nan(&kld);
        out->bin.same_top1[i] = mean_or_nan(&same);
    }
}

void kvl_eval_bin_cells(const struct kvl_eval *e, const struct kvl_eval_chunk *chunk, union kvl_cell *cells)
{
    const double *const measure[] = {chunk->bin.nll, chunk->bin.kld, chunk->bin.same_top1};
    if (e->config.protocol != KVL_P3_PREFILL_EXACT) return;
    for (int m = 0; m < (e->config.base != NULL ? 3 : 1); m++)
        for (int i = 0; i < KVL_EVAL_BINS; i++) cells[m * KVL_EVAL_BINS + i].f64 = measure[m][i];
}

void kvl_eval_bin_means(struct kvl_eval_ppl *result)
{
    result->bin = (struct kvl_eval_binned){0};
    for (uint64_t c = 0; c < result->n_chunks; c++)
        for (int i = 0; i < KVL_EVAL_BINS; i++) {
            result->bin.nll[i] += result->chunk[c].bin.nll[i] / (double)result->n_chunks;
            result->bin.kld[i] += result->chunk[c].bin.kld[i] / (double)result->n_chunks;
            result->bin.same_top1[i] += result->chunk[c].bin.same_top1[i] / (double)result->n_chunks;
        }
}

size_t kvl_eval_bin_facts(const struct kvl_eval_binned *bin, struct kvl_fact *facts)
{
    size_t n = 0;
    for (int i = 0; i < KVL_EVAL_BINS; i++) {
        const struct kvl_fact all[] = {{kvl_eval_bins[i].nll, bin->nll[i]}, {kvl_eval_bins[i].kld, bin->kld[i]}, {kvl_eval_bins[i].same_top1, bin->same_top1[i]}};
        for (size_t m = 0; m < sizeof all / sizeof *all; m++)
            if (!isnan(all[m].value)) facts[n++] = all[m];
    }
    return n;
}
