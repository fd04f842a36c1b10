#include "stream.h"
#include "cache.h"
#include "log.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>

static const struct kvl_column columns[] = {
    {"first", "1", "first token of the block in the stream, counted from 0", KVL_COL_U64},
    {"nll", "1", "mean negative log-likelihood of the block's tokens, nats", KVL_COL_F64},
    {"n", "1", "tokens of the block that were predicted", KVL_COL_U64},
    {"resident_bytes", "byte", "bytes of the cache behind the block", KVL_COL_U64},
};
const struct kvl_record_table kvl_stream_table = {"/quality", columns, sizeof columns / sizeof *columns};

struct kvl_stream {
    const struct kvl_rig *rig;
    struct kvl_stream_config config;
    int32_t *token; /* [n_token] */
    struct kvl_session *session;
    struct kvl_logprob *logprob;
    struct kvl_row_score *score; /* [block] */
};

static kvl_status check(const struct kvl_eval_text *text, const struct kvl_stream_config *config)
{
    if (config->n_token < 2) return kvl_fail(KVL_E_USAGE, "a stream of %u tokens predicts nothing: use at least 2", config->n_token);
    if (text->n < config->n_token)
        return kvl_fail(KVL_E_USAGE, "%s has %zu tokens, %u were asked for; use a longer text or a smaller --tokens", text->path, text->n, config->n_token);
    return KVL_OK;
}

kvl_status kvl_stream_open(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_stream_config *config,
                           struct kvl_stream **out)
{
    kvl_status status = KVL_OK;
    struct kvl_stream *s = NULL;
    KVL_TRY(check(text, config));
    KVL_TRY(kvl_spec_check_dims(config->spec, rig->model->dims.n_layer, rig->model->dims.head_dim));
    KVL_TRY(kvl_alloc(&s, 1, sizeof *s));
    s->rig = rig;
    s->config = *config;
    s->token = text->tokens;
    if (s->config.block > config->n_token) s->config.block = config->n_token;
    const struct kvl_session_config session = {.spec = config->spec, .n_ctx = config->n_token, .ubatch = 1, .protocol = KVL_P4_STREAMING,
                                               .exact = config->exact, .max_logits = s->config.block, .allow_long = config->allow_long};
    KVL_TRY(kvl_session_new(rig->weights, &session, &s->session));
    KVL_TRY(kvl_logprob_new(rig->device, rig->model->dims.n_vocab, s->config.block, NULL, &s->logprob));
    KVL_TRY(kvl_alloc(&s->score, s->config.block, sizeof *s->score));
    *out = s;
    s = NULL;
done:
    kvl_stream_close(&s);
    return status;
}

void kvl_stream_close(struct kvl_stream **stream)
{
    struct kvl_stream *s = *stream;
    if (s == NULL) return;
    kvl_session_free(&s->session);
    kvl_logprob_free(&s->logprob);
    kvl_free(&s->score);
    kvl_free(stream);
}

void kvl_stream_free(struct kvl_stream_result *result) { kvl_free(&result->block); }

/* Predicts tokens first .. first + n - 1, of which the last is not taken in. */
static kvl_status run_block(struct kvl_stream *s, uint32_t first, uint32_t n, struct kvl_record *record, uint64_t *ns, struct kvl_moments *tokens,
                            struct kvl_stream_block *out)
{
    kvl_status status = KVL_OK;
    struct kvl_moments block = {0};
    struct kvl_counters before;
    kvl_session_counters(s->session, &before);
    const uint64_t begin = kvl_now_ns();
    KVL_TRY(kvl_session_forward(s->session, s->token + first - 1, n, n));
    KVL_TRY(kvl_device_finish(s->rig->device));
    const uint64_t duration = kvl_now_ns() - begin;
    KVL_TRY(kvl_logprob_score(s->logprob, kvl_session_logits(s->session), s->token + first, n, s->score));
    for (uint32_t i = 0; i < n; i++) {
        kvl_moments_add(&block, s->score[i].nll);
        kvl_moments_add(tokens, s->score[i].nll);
    }
    *ns += duration;
    *out = (struct kvl_stream_block){.first = first, .n = n, .nll = block.mean, .resident_bytes = kvl_cache_resident(kvl_session_cache(s->session))};
    const union kvl_cell cells[] = {{.u64 = first}, {.f64 = block.mean}, {.u64 = n}, {.u64 = out->resident_bytes}};
    KVL_TRY(kvl_record_row(record, cells));
    KVL_TRY(kvl_record_step(record, s->session, "decode", n, duration, &before));
done:
    return status;
}

kvl_status kvl_stream_run(struct kvl_stream *s, struct kvl_record *record, struct kvl_stream_result *out)
{
    kvl_status status = KVL_OK;
    const uint32_t n_token = s->config.n_token, size = s->config.block;
    struct kvl_moments tokens = {0}, blocks = {0};
    struct kvl_progress progress;
    uint64_t ns = 0;
    char label[64] = "eval stream";
    *out = (struct kvl_stream_result){0};
    kvl_progress_start(&progress, label, "tok", n_token);
    KVL_TRY(kvl_alloc(&out->block, n_token / size + 3u, sizeof *out->block));
    KVL_TRY(kvl_session_reset(s->session));
    for (uint32_t first = 1, end; first < n_token; first = end) {
        end = first == 1 ? 2 : (first / size + 1) * size; /* the stream's first token alone is a prompt where the cache evicts; */
        if (end > n_token) end = n_token;                 /* blocks end at multiples of their size */
        struct kvl_stream_block *block = &out->block[out->n_blocks];
        KVL_TRY(run_block(s, first, end - first, record, &ns, &tokens, block));
        out->n_blocks++;
        out->n_token = (uint32_t)tokens.n;
        out->nll = tokens.mean;
        if (block->n == size) kvl_moments_add(&blocks, block->nll);
        out->nll_se_block = blocks.n > 1 ? kvl_moments_se(&blocks) : NAN;
        out->tokens_per_s = (double)tokens.n * 1e9 / (double)ns;
        snprintf(label, sizeof label, "eval stream  nll %.4f", out->nll);
        kvl_progress_update(&progress, end);
    }
    KVL_TRY(kvl_record_running(record, s->session));
    KVL_TRY(kvl_record_memory(record, s->session));
done:
    kvl_progress_end(&progress);
    if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted: %u of %u tokens are committed", out->n_token, n_token);
    return status;
}
