/* One layer of a cache on the test's device, fed token by token. */
#ifndef KVL_DECODE_BENCH_H
#define KVL_DECODE_BENCH_H
#include "kernel/test_harness.h"
#include "cache.h"
#include "random_table.h"
#include "reference.h"
#include "rescore.h"
#include "rng.h"
#include <math.h>
#include <string.h>

struct bench {
    struct kvl_cache_dims dims;
    struct kvl_cache_config config;
    struct kvl_spec *spec;
    struct kvl_cache *cache;
    struct kvl_cache_plan plan; /* a second one, for the reference */
    struct kvl_buffer *stage, *rotary, *out;
    float *q, *k, *v, *got, *want, *angles;
    uint32_t n_tokens, rope_dim;
    bool rounded; /* exact rows in binary16 */
    float *rope_freq, *w_o;          /* what scores read of a model: [BENCH_EMBD][H*G*D] */
    struct kvl_prompt_model model;
};
enum { BENCH_EMBD = 8 };

static size_t q_row(const struct bench *b) { return (size_t)b->dims.n_head * b->dims.head_dim; }
static size_t kv_row(const struct bench *b) { return (size_t)b->dims.n_kv_head * b->dims.head_dim; }

static void open_bench(struct bench *b, const char *spec)
{
    const struct kvl_cache_limits limits = kvl_cache_limits_of(kvl_test_device);
    struct kvl_cache_plan plan;
    b->q = calloc(b->n_tokens * q_row(b), sizeof *b->q);
    b->k = calloc(b->n_tokens * kv_row(b), sizeof *b->k);
    b->v = calloc(b->n_tokens * kv_row(b), sizeof *b->v);
    b->got = calloc(b->n_tokens * q_row(b), sizeof *b->got);
    b->want = calloc(b->n_tokens * q_row(b), sizeof *b->want);
    b->angles = calloc((size_t)b->n_tokens * b->rope_dim + 2, sizeof *b->angles);
    for (size_t i = 0; i < (size_t)b->n_tokens * b->rope_dim / 2; i++) {
        const double angle = (double)(i / (b->rope_dim / 2)) * pow(10000.0, -2.0 * (double)(i % (b->rope_dim / 2)) / b->rope_dim);
        b->angles[2 * i] = (float)cos(angle);
        b->angles[2 * i + 1] = (float)sin(angle);
    }
    b->rope_freq = calloc(b->rope_dim / 2 + 1, sizeof *b->rope_freq);
    b->w_o = calloc(BENCH_EMBD * q_row(b), sizeof *b->w_o);
    for (uint32_t i = 0; i < b->rope_dim / 2; i++) b->rope_freq[i] = (float)pow(10000.0, -2.0 * (double)i / b->rope_dim);
    for (size_t i = 0; i < BENCH_EMBD * q_row(b); i++) b->w_o[i] = (float)sin(0.29 * (double)i + 0.2);
    b->model = (struct kvl_prompt_model){BENCH_EMBD, b->rope_dim, b->rope_freq};
    b->config = (struct kvl_cache_config){.n_ctx = b->n_tokens, .ubatch = 1, .protocol = KVL_P4_STREAMING, .exact = !b->rounded};
    if (kvl_spec_parse(spec, &b->spec) != KVL_OK) fail_msg("%s", kvl_error_text());
    assert_ok(kvl_spec_load_tables(b->spec, random_table, &b->dims));
    b->config.spec = b->spec;
    assert_ok(kvl_cache_plan_make(&b->dims, &b->config, &limits, &plan));
    assert_ok(kvl_cache_plan_make(&b->dims, &b->config, &limits, &b->plan));
    assert_ok(kvl_cache_new(kvl_test_device, &plan, &b->cache));
    kvl_new_float_buffer("stage", q_row(b) + 2 * kv_row(b), NULL, &b->stage);
    kvl_new_float_buffer("rotary", (uint64_t)b->n_tokens * b->rope_dim + 2, b->angles, &b->rotary);
    kvl_new_float_buffer("out", q_row(b), NULL, &b->out);
}

static void close_bench(struct bench *b)
{
    kvl_cache_free(&b->cache);
    kvl_cache_plan_free(&b->plan);
    kvl_buffer_free(&b->stage);
    kvl_buffer_free(&b->rotary);
    kvl_buffer_free(&b->out);
    kvl_spec_free(&b->spec);
    free(b->q), free(b->k), free(b->v), free(b->got), free(b->want), free(b->angles), free(b->rope_freq), free(b->w_o);
}

static void random_rows(struct bench *b)
{
    for (size_t i = 0; i < b->n_tokens * q_row(b); i++) b->q[i] = (float)kvl_rng_normal(1, i);
    for (size_t i = 0; i < b->n_tokens * kv_row(b); i++) {
        b->k[i] = (float)(2.0 * kvl_rng_normal(2, i) + (double)(i % 5));
        b->v[i] = (float)kvl_rng_normal(3, i);
    }
}

/* What the scripts of tests/policy/decode_answers.h compute from. */
static inline void answer_rows(struct bench *b)
{
    for (size_t j = 0; j < b->n_tokens * q_row(b); j++) b->q[j] = (float)(3.0 * sin(0.37 * (double)j + 0.1));
    for (size_t j = 0; j < b->n_tokens * kv_row(b); j++) {
        b->k[j] = (float)(2.0 * sin(0.73 * (double)j * (1.0 + 0.001 * (double)(j % 7))));
        b->v[j] = (float)cos(0.51 * (double)j);
    }
}

static void write_stage(struct bench *b, uint32_t t)
{
    const uint64_t q = q_row(b) * sizeof(float), kv = kv_row(b) * sizeof(float);
    assert_ok(kvl_buffer_write(b->stage, 0, q, b->q + t * q_row(b)));
    assert_ok(kvl_buffer_write(b->stage, q, kv, b->k + t * kv_row(b)));
    assert_ok(kvl_buffer_write(b->stage, q + kv, kv, b->v + t * kv_row(b)));
}

/* The first token as a prompt of one, at position 0, where RoPE turns nothing. */
static void prompt_of_one(struct bench *b)
{
    const uint32_t heads = b->dims.n_kv_head, group = b->dims.n_head / heads;
    uint32_t count[8], token[8] = {0};
    float sum[8];
    for (uint32_t h = 0; h < heads; h++) {
        count[h] = 1;
        sum[h] = (float)group; /* each of its queries has given it all */
    }
    write_stage(b, 0);
    assert_ok(kvl_cache_fill_begin(b->cache, 0, 1, count, token, sum));
    assert_ok(kvl_cache_remember(b->cache, 0, 0, b->stage, 0, 1));
    assert_ok(kvl_cache_fill_rows(b->cache, 0, 1, b->stage, b->rotary, b->rope_dim));
    assert_ok(kvl_cache_fill_end(b->cache, 0, 1, count));
    for (uint32_t r = 0; r < b->dims.n_head; r++) /* a query that sees one token returns its value */
        memcpy(b->got + r * b->dims.head_dim, b->v + r / group * b->dims.head_dim, b->dims.head_dim * sizeof(float));
}

static void feed_one(struct bench *b, uint32_t t)
{
    write_stage(b, t);
    assert_ok(kvl_cache_step(b->cache, 0, 1, b->stage, b->rotary, b->rope_dim, b->out));
    kvl_cache_advance(b->cache, 1);
    if (kvl_rescore_due(b->cache, 0)) assert_ok(kvl_rescore_layer(b->cache, 0, &b->model, (struct kvl_rope){b->angles, b->rope_dim}, b->w_o));
    assert_ok(kvl_buffer_read(b->out, 0, q_row(b) * sizeof(float), b->got + t * q_row(b)));
}

static void feed(struct bench *b)
{
    const bool evicts = b->plan.evicts;
    if (evicts) prompt_of_one(b);
    for (uint32_t t = evicts; t < b->n_tokens; t++) feed_one(b, t);
}

/* A spec that is refused with these words. */
static inline void expect_refused(const char *text, const char *words)
{
    struct kvl_spec *spec = NULL;
    assert_int_not_equal(kvl_spec_parse(text, &spec), KVL_OK);
    if (strstr(kvl_error_text(), words) == NULL) fail_msg("%s: %s", text, kvl_error_text());
    kvl_error_clear();
}

#endif
