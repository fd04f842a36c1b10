/* Device bodies of the weight types against the C references, bit for bit, by way of the embedding kernel. Any NaN equals any NaN,
 * and any zero any zero: Mesa 22.3 moves signs through products. */
#include "weights.h"
#include <math.h>

static struct kvl_linear_kernels *kernels;

static bool same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (a == 0.0f && b == 0.0f) || (isnan(a) && isnan(b));
}

/* Every row of a tensor, in scrambled order. */
static void check_rows(const struct test_tensor *t)
{
    const uint64_t n_rows = t->tensor.dim[1], n_cols = t->tensor.dim[0];
    struct kvl_linear linear;
    struct kvl_buffer *ids = NULL;
    struct kvl_rows y;
    int32_t *id = NULL;
    float *out = NULL;
    assert_ok(kvl_alloc(&id, n_rows, sizeof *id));
    assert_ok(kvl_alloc(&out, n_rows * n_cols, sizeof *out));
    for (uint64_t i = 0; i < n_rows; i++) id[i] = (int32_t)((i * 7 + 3) % n_rows);
    assert_ok(kvl_buffer_new(kvl_test_device, "test ids", -1, KVL_MEM_SCRATCH, n_rows * sizeof *id, false, &ids));
    assert_ok(kvl_buffer_write(ids, 0, n_rows * sizeof *id, id));
    load_one(t, &linear);
    rows_new((uint32_t)n_rows, n_cols, NULL, CANARY, &y);
    assert_ok(kvl_linear_embed(kernels, &linear, (uint32_t)n_rows, ids, 0, 1.0f, y));
    rows_read(&y, (uint32_t)n_rows, n_cols, CANARY, out);
    for (uint64_t i = 0; i < n_rows * n_cols; i++) {
        const float want = t->values[(uint64_t)id[i / n_cols] * n_cols + i % n_cols];
        if (!same_bits(out[i], want))
            fail_msg("%s: row %d column %llu is %a, wanted %a", linear.type->name, id[i / n_cols], (unsigned long long)(i % n_cols),
                     out[i], want);
    }
    kvl_linear_free(&linear);
    kvl_buffer_free(&ids);
    kvl_buffer_free(&y.buffer);
    kvl_free(&id);
    kvl_free(&out);
}

static void rows_are_bit_equal(void **state)
{
    for (size_t i = 0; i < kvl_n_quant_types; i++) {
        struct test_tensor t;
        tensor_new(&kvl_quant_types[i], 37, 512, 11 + i, &t);
        check_rows(&t);
        tensor_free(&t);
    }
}

/* Rows of 40 columns: the last column of 32 is padded. */
static void rows_need_not_fill_a_column(void **state)
{
    for (size_t i = 0; i < kvl_n_quant_types; i++) {
        if (kvl_quant_types[i].block > 1) continue;
        struct test_tensor t;
        tensor_new(&kvl_quant_types[i], 20, 40, 31 + i, &t);
        check_rows(&t);
        tensor_free(&t);
    }
}

/* Every binary16 pattern as a scale and as a minimum: zeros, subnormals, infinities and NaN too. */
static void every_scale_is_bit_equal(void **state)
{
    static const uint32_t types[] = {KVL_GGUF_F16, KVL_GGUF_Q4_1, KVL_GGUF_Q4_K};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const struct kvl_quant_type *type = kvl_quant_type(types[i]);
        struct test_tensor t;
        tensor_new(type, 65536 / 32, 32 * (uint64_t)type->block, 51 + i, &t);
        for (const int *at = half_offsets(type->gguf_type); *at >= 0; at++)
            for (uint32_t b = 0; b < 65536; b++) put_u16(t.bytes + b * type->bytes + *at, (uint16_t)(*at == 2 ? b * 40503u : b));
        tensor_decode(&t);
        check_rows(&t);
        tensor_free(&t);
    }
}

/* Parts: ids of all of them, and none beyond the rows. */
static void rows_of_parts(void **state)
{
    struct test_tensor t;
    tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), 150, 64, 71, &t);
    kvl_linear_limit_part(2 * 16 * 40 * 2);
    check_rows(&t);
    kvl_linear_limit_part(0);
    tensor_free(&t);
}

static void new_kernels(void **state) { assert_ok(kvl_linear_kernels_new(kvl_test_device, &kernels)); }
static void free_kernels(void **state) { kvl_linear_kernels_free(&kernels); }

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(new_kernels),
    cmocka_unit_test(rows_are_bit_equal),
    cmocka_unit_test(rows_need_not_fill_a_column),
    cmocka_unit_test(every_scale_is_bit_equal),
    cmocka_unit_test(rows_of_parts),
    cmocka_unit_test(free_kernels),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
