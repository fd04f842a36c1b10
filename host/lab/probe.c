#include "probe.h"
#include "mem.h"
#include "rng.h"
#include <math.h>
#include <string.h>

double kvl_probe_worse(double a, double b) { return isnan(a) || a > b ? a : b; }

double kvl_probe_difference(const float *a, const float *b, size_t n)
{
    double largest = 0.0;
    for (size_t i = 0; i < n; i++) largest = kvl_probe_worse(fabs((double)a[i] - b[i]), largest);
    return largest;
}

static kvl_status fill_random(struct kvl_probe *b)
{
    const size_t q_size = b->n_tokens * kvl_probe_q_row(b), kv_size = b->n_tokens * kvl_probe_kv_row(b);
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&b->q, q_size, sizeof(float)));
    KVL_TRY(kvl_alloc(&b->k, kv_size, sizeof(float)));
    KVL_TRY(kvl_alloc(&b->v, kv_size, sizeof(float)));
    KVL_TRY(kvl_alloc(&b->got, q_size, sizeof(float)));
    KVL_TRY(kvl_alloc(&b->want, q_size, sizeof(float)));
    for (size_t i = 0; i < q_size; i++) b->q[i] = (float)kvl_rng_normal(1, i);
    for (size_t i = 0; i < kv_size; i++) {
        b->k[i] = (float)(2.0 * kvl_rng_normal(2, i) + (double)(i % 5));
        b->v[i] = (float)kvl_rng_normal(3, i);
    }
done:
    return status;
}

kvl_status kvl_probe_open(struct kvl_device *device, const char *spec, kvl_table_loader load, void *context, struct kvl_probe *b)
{
    const struct kvl_cache_limits limits = kvl_cache_limits_of(device);
    const uint64_t u = b->ubatch, rotary_bytes = (uint64_t)b->n_tokens * b->dims.head_dim * sizeof(float);
    struct kvl_cache_plan plan = {0};
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_spec_parse(spec, &b->spec));
    if (load != NULL) KVL_TRY(kvl_spec_load_tables(b->spec, load, context));
    const struct kvl_cache_config config = {b->spec, b->n_tokens, b->ubatch, b->protocol, b->exact};
    KVL_TRY(kvl_cache_plan_make(&b->dims, &config, &limits, &b->plan));
    KVL_TRY(kvl_cache_plan_make(&b->dims, &config, &limits, &plan));
    KVL_TRY(kvl_cache_new(device, &plan, &b->cache));
    KVL_TRY(kvl_buffer_new(device, "check stage", -1, KVL_MEM_SCRATCH, u * kvl_probe_stage_row(b) * sizeof(float), true, &b->stage));
    KVL_TRY(kvl_buffer_new(device, "check rotary", -1, KVL_MEM_SCRATCH, rotary_bytes, true, &b->rotary));
    KVL_TRY(kvl_buffer_new(device, "check output", -1, KVL_MEM_SCRATCH, u * kvl_probe_q_row(b) * sizeof(float), true, &b->out));
    KVL_TRY(fill_random(b));
done:
    kvl_cache_plan_free(&plan);
    return status;
}

void kvl_probe_close(struct kvl_probe *b)
{
    kvl_cache_free(&b->cache);
    kvl_cache_plan_free(&b->plan);
    kvl_buffer_free(&b->stage);
    kvl_buffer_free(&b->rotary);
    kvl_buffer_free(&b->out);
    kvl_spec_free(&b->spec);
    kvl_free(&b->q);
    kvl_free(&b->k);
    kvl_free(&b->v);
    kvl_free(&b->got);
    kvl_free(&b->want);
}

/* Tokens [first, first + n) as the projections leave them: a token's q heads, k heads, v heads. */
kvl_status kvl_probe_stage(struct kvl_probe *b, uint32_t first, uint32_t n)
{
    const size_t parts[] = {kvl_probe_q_row(b), kvl_probe_kv_row(b), kvl_probe_kv_row(b)};
    const float *const from[] = {b->q, b->k, b->v};
    float *rows = NULL, *at;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&rows, n * kvl_probe_stage_row(b), sizeof *rows));
    at = rows;
    for (uint32_t t = first; t < first + n; t++)
        for (size_t i = 0; i < 3; at += parts[i++]) memcpy(at, from[i] + t * parts[i], parts[i] * sizeof *at);
    KVL_TRY(kvl_buffer_write(b->stage, 0, n * kvl_probe_stage_row(b) * sizeof *rows, rows));
done:
    kvl_free(&rows);
    return status;
}

kvl_status kvl_probe_feed(struct kvl_probe *b)
{
    const uint32_t u = kvl_cache_ubatch(&b->plan.config);
    kvl_status status = KVL_OK;
    for (uint32_t p = 0; p < b->n_tokens; p += u) {
        const uint32_t n = b->n_tokens - p < u ? b->n_tokens - p : u;
        KVL_TRY(kvl_probe_stage(b, p, n));
        KVL_TRY(kvl_cache_step(b->cache, 0, n, b->stage, b->rotary, 0, b->out));
        kvl_cache_advance(b->cache, n);
        KVL_TRY(kvl_buffer_read(b->out, 0, n * kvl_probe_q_row(b) * sizeof(float), b->got + p * kvl_probe_q_row(b)));
    }
done:
    return status;
}

enum { LARGEST_BLOCK = 256 };

static void random_block(const struct kvl_quant_type *type, uint64_t seed, uint8_t *block)
{
    float values[LARGEST_BLOCK];
    double largest;
    do {
        largest = 0.0;
        for (uint32_t i = 0; i < type->bytes; i++) block[i] = (uint8_t)kvl_rng_u64(seed, i);
        type->dequantize(block, 1, values);
        for (uint32_t i = 0; i < type->block; i++) largest = kvl_probe_worse(fabs(values[i]), largest);
        seed = kvl_rng_u64(seed, type->bytes);
    } while (!(largest > 1e-3 && largest < 100.0));
}

void kvl_probe_weights(const struct kvl_quant_type *type, uint64_t seed, size_t n_blocks, uint8_t *bytes, float *values)
{
    for (size_t i = 0; i < n_blocks; i++) random_block(type, kvl_rng_u64(seed, i), bytes + i * type->bytes);
    type->dequantize(bytes, n_blocks, values);
}
