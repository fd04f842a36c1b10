/* Random tensors of every weight type, and rows of activations on the device with a canary around them. */
#ifndef KVL_TEST_WEIGHTS_H
#define KVL_TEST_WEIGHTS_H
#include "half.h"
#include "linear.h"
#include "mem.h"
#include "quant.h"
#include "rng.h"
#include "test_harness.h"
#include <string.h>

/* ---- tensors ---- */

/* Byte offsets of a block's binary16 numbers; -1 = none. */
static inline const int *half_offsets(uint32_t gguf_type)
{
    static const int first[] = {0, -1}, first_two[] = {0, 2, -1}, last_q6_k[] = {208, -1}, none[] = {-1};
    switch (gguf_type) {
    case KVL_GGUF_F16:
    case KVL_GGUF_Q4_0:
    case KVL_GGUF_Q5_0:
    case KVL_GGUF_Q8_0: return first;
    case KVL_GGUF_Q4_1:
    case KVL_GGUF_Q5_1:
    case KVL_GGUF_Q4_K:
    case KVL_GGUF_Q5_K: return first_two;
    case KVL_GGUF_Q6_K: return last_q6_k;
    default: return none;
    }
}

static inline void put_u16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

/* One block with random codes and scales around 0.05, both signs. */
static inline void random_block(const struct kvl_quant_type *type, uint64_t seed, uint8_t *block)
{
    for (uint32_t i = 0; i < type->bytes; i++) block[i] = (uint8_t)kvl_rng_u64(seed, i);
    for (const int *at = half_offsets(type->gguf_type); *at >= 0; at++)
        put_u16(block + *at, kvl_float_to_half((float)(0.05 * kvl_rng_normal(seed, 1000 + (uint64_t)*at))));
    const float x = (float)kvl_rng_normal(seed, 2000);
    if (type->gguf_type == KVL_GGUF_F32) memcpy(block, &x, sizeof x);
    if (type->gguf_type == KVL_GGUF_BF16) memcpy(block, (const uint8_t *)&x + 2, 2);
}

struct test_tensor {
    struct kvl_gguf_tensor tensor;
    uint8_t *bytes;
    float *values; /* [rows][cols], by the reference */
};

static inline void tensor_decode(struct test_tensor *t)
{
    const struct kvl_quant_type *type = kvl_quant_type(t->tensor.type);
    type->dequantize(t->bytes, t->tensor.n_bytes / type->bytes, t->values);
}

static inline void tensor_new(const struct kvl_quant_type *type, uint64_t rows, uint64_t cols, uint64_t seed, struct test_tensor *t)
{
    const uint64_t n_blocks = rows * cols / type->block;
    assert_int_equal(cols % type->block, 0);
    *t = (struct test_tensor){.tensor = {.name = {"test", 4}, .type = type->gguf_type, .n_dims = 2, .dim = {cols, rows, 1, 1}}};
    t->tensor.n_bytes = n_blocks * type->bytes;
    assert_ok(kvl_alloc(&t->bytes, t->tensor.n_bytes, 1));
    assert_ok(kvl_alloc(&t->values, rows * cols, sizeof *t->values));
    for (uint64_t i = 0; i < n_blocks; i++) random_block(type, kvl_rng_u64(seed, i), t->bytes + i * type->bytes);
    t->tensor.data = t->bytes;
    tensor_decode(t);
}

static inline void tensor_free(struct test_tensor *t)
{
    kvl_free(&t->bytes);
    kvl_free(&t->values);
}

static inline void load_one(const struct test_tensor *t, struct kvl_linear *linear)
{
    assert_ok(
        kvl_linear_load(kvl_test_device, "test weights", 0, (const struct kvl_gguf_tensor *const[]){&t->tensor}, 1, (struct kvl_linear_form){0}, linear));
}

/* ---- rows of floats ---- */

enum { ROWS_OFFSET = 5, ROWS_GAP = 7 /* between rows and behind the last */ };
#define CANARY (-123456.75f)

/* T rows of n floats in a buffer whose other floats are `fill`. */
static inline void rows_new(uint32_t T, uint64_t n, const float *x, float fill, struct kvl_rows *rows)
{
    const uint64_t stride = (n + 31) / 32 * 32 + ROWS_GAP, total = ROWS_OFFSET + T * stride;
    float *all = NULL;
    assert_ok(kvl_alloc(&all, total, sizeof *all));
    for (uint64_t i = 0; i < total; i++) all[i] = fill;
    for (uint32_t t = 0; x != NULL && t < T; t++) memcpy(all + ROWS_OFFSET + t * stride, x + t * n, n * sizeof *x);
    *rows = (struct kvl_rows){.offset = ROWS_OFFSET, .stride = stride};
    assert_ok(kvl_buffer_new(kvl_test_device, "test rows", -1, KVL_MEM_SCRATCH, total * sizeof *all, false, &rows->buffer));
    assert_ok(kvl_buffer_write(rows->buffer, 0, total * sizeof *all, all));
    kvl_free(&all);
}

/* Reads T rows of n floats and checks that all other floats are still `fill`. */
static inline void rows_read(const struct kvl_rows *rows, uint32_t T, uint64_t n, float fill, float *out)
{
    const uint64_t total = ROWS_OFFSET + T * rows->stride;
    float *all = NULL;
    assert_ok(kvl_alloc(&all, total, sizeof *all));
    assert_ok(kvl_buffer_read(rows->buffer, 0, total * sizeof *all, all));
    for (uint64_t i = 0; i < total; i++) {
        const uint64_t t = i < ROWS_OFFSET ? T : (i - ROWS_OFFSET) / rows->stride,
                       c = t == T ? n : (i - ROWS_OFFSET) % rows->stride;
        if (c < n)
            out[t * n + c] = all[i];
        else if (all[i] != fill)
            fail_msg("float %llu outside the rows became %g", (unsigned long long)i, all[i]);
    }
    kvl_free(&all);
}

static inline float *random_floats(uint64_t n, uint64_t seed)
{
    float *x = NULL;
    assert_ok(kvl_alloc(&x, n, sizeof *x));
    for (uint64_t i = 0; i < n; i++) x[i] = (float)kvl_rng_normal(seed, i);
    return x;
}

#endif
