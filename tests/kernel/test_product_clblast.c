/* The product of CLBlast, forced where a device's tuning would not choose it: against double precision and beside gemm.cl, without a
 * buffer that the ledger does not know. */
#include "weights.h"
#include "blas.h"
#include <CL/cl.h>
#include <dlfcn.h>
#include <math.h>

/* Stands before the loader's function for the whole program, the library included. */
static unsigned long buffers_made;
cl_mem clCreateBuffer(cl_context context, cl_mem_flags flags, size_t size, void *host, cl_int *code)
{
    static cl_mem (*real)(cl_context, cl_mem_flags, size_t, void *, cl_int *);
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "clCreateBuffer");
    buffers_made++;
    return real(context, flags, size, host, code);
}

static void set(const char *kernel_name, const char *text)
{
    const struct kvl_tune_kernel *kernel = kvl_tune_kernel_find(kernel_name);
    struct kvl_setting setting;
    assert_non_null(kernel);
    assert_ok(kvl_setting_parse(kernel, text, &setting));
    kvl_device_tune(kvl_test_device, kernel, &setting, "test");
}

/* y [T][rows], and how many buffers the product made. */
static unsigned long run(const struct kvl_linear *linear, uint32_t T, const float *x, const float *before, bool exact, float *y)
{
    struct kvl_linear_kernels *kernels;
    struct kvl_rows in, out;
    assert_ok(kvl_linear_kernels_new(kvl_test_device, &kernels));
    assert_ok(kvl_linear_reserve(kernels, T, linear->cols, exact));
    rows_new(T, linear->cols, x, 0.0f, &in);
    rows_new(T, linear->rows, before, CANARY, &out);
    const unsigned long made = buffers_made;
    assert_true(made > 0); /* it does stand before the loader's */
    assert_ok(kvl_linear_run(kernels, linear, T, in, out, before != NULL, exact));
    const unsigned long more = buffers_made - made;
    rows_read(&out, T, linear->rows, CANARY, y);
    kvl_buffer_free(&in.buffer);
    kvl_buffer_free(&out.buffer);
    kvl_linear_kernels_free(&kernels);
    return more;
}

static double bound(const float *w, const float *x, uint64_t n, double *sum)
{
    double size = 0.0;
    *sum = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        *sum += (double)w[i] * x[i];
        size += fabs((double)w[i] * x[i]);
    }
    return (double)(n + 2) * 0x1p-24 * size;
}

/* Both ways against double precision; exact products are gemm.cl's whatever the tuning says. */
static void both_products_are_right(void **state)
{
    static const struct {
        uint32_t type;
        uint64_t rows, cols;
        uint32_t T;
    } sizes[] = {{KVL_GGUF_Q4_1, 93, 96, 5}, {KVL_GGUF_Q4_1, 600, 608, 70}, {KVL_GGUF_Q6_K, 33, 512, 64}, {KVL_GGUF_F16, 20, 40, 7}};
    const size_t n = kvl_device_is_slow() ? 1 : sizeof sizes / sizeof *sizes;
    for (size_t s = 0; s < n; s++) {
        const uint64_t rows = sizes[s].rows, cols = sizes[s].cols;
        const uint32_t T = sizes[s].T;
        struct test_tensor t;
        struct kvl_linear linear;
        float *x = random_floats(T * cols, 30 + s), *own = NULL, *exact = NULL, *blas = NULL;
        tensor_new(kvl_quant_type(sizes[s].type), rows, cols, 40 + s, &t);
        load_one(&t, &linear);
        assert_ok(kvl_alloc(&own, T * rows, sizeof *own));
        assert_ok(kvl_alloc(&exact, T * rows, sizeof *exact));
        assert_ok(kvl_alloc(&blas, T * rows, sizeof *blas));
        set("gemm", "product=own");
        run(&linear, T, x, NULL, false, own);
        set("gemm", "product=clblast");
        run(&linear, T, x, NULL, true, exact);
        assert_memory_equal(exact, own, T * rows * sizeof *own);
        const uint64_t launches = kvl_device_launches(kvl_test_device);
        assert_int_equal(run(&linear, T, x, NULL, false, blas), 0);
        assert_true(kvl_device_launches(kvl_test_device) - launches >= 4); /* columns, unpack, product, finish */
        for (uint64_t i = 0; i < T * rows; i++) {
            double want;
            const double allowed = bound(t.values + i % rows * cols, x + i / rows * cols, cols, &want);
            if (!(fabs(blas[i] - want) <= allowed)) fail_msg("size %zu: element %llu is %.9g, wanted %.9g", s, (unsigned long long)i, blas[i], want);
            assert_true(fabs(own[i] - want) <= allowed);
        }
        kvl_linear_free(&linear);
        tensor_free(&t);
        kvl_free(&x);
        kvl_free(&own);
        kvl_free(&exact);
        kvl_free(&blas);
    }
    set("gemm", "");
}

/* Residual and SwiGLU, over parts and row blocks. */
static void epilogues(void **state)
{
    enum { ROWS = 300, COLS = 96, T = 9 };
    struct test_tensor t[2];
    struct kvl_linear one, both;
    const struct kvl_gguf_tensor *const tensors[] = {&t[0].tensor, &t[1].tensor};
    float *x = random_floats(T * COLS, 50), *before = random_floats(T * ROWS, 51), y[T * ROWS], sum[T * ROWS], wanted[T * ROWS];
    if (kvl_device_is_slow()) skip();
    for (int i = 0; i < 2; i++) tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 52 + (uint64_t)i, &t[i]);
    load_one(&t[0], &one);
    kvl_linear_limit_part(34ull * 3 * 20 * 16); /* 34 panels: 32 in a block, and 2 */
    assert_ok(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 2, (struct kvl_linear_form){.gate = KVL_GATE_SILU}, &both));
    kvl_linear_limit_part(0);
    assert_true(both.n_parts > 1);
    run(&both, T, x, NULL, false, wanted);
    set("gemm", "product=clblast");
    run(&one, T, x, NULL, false, y);
    run(&one, T, x, before, false, sum);
    for (int i = 0; i < T * ROWS; i++) assert_true(sum[i] == before[i] + y[i]);
    run(&both, T, x, NULL, false, y);
    for (int i = 0; i < T * ROWS; i++) assert_true(fabsf(y[i] - wanted[i]) <= 1e-4f * (1.0f + fabsf(wanted[i])));
    set("gemm", "");
    kvl_linear_free(&one);
    kvl_linear_free(&both);
    for (int i = 0; i < 2; i++) tensor_free(&t[i]);
    kvl_free(&x);
    kvl_free(&before);
}

/* Other parameters than the defaults, given to CLBlast in the middle of a process. */
static void other_parameters(void **state)
{
    enum { ROWS = 70, COLS = 64, T = 40 };
    struct test_tensor t;
    struct kvl_linear linear;
    float *x = random_floats(T * COLS, 60), y[2][T * ROWS];
    if (kvl_device_is_slow()) skip();
    tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 61, &t);
    load_one(&t, &linear);
    set("gemm", "product=clblast");
    run(&linear, T, x, NULL, false, y[0]);
    set("clblast", "MWG=16 NWG=32 KWG=16 MDIMC=2 NDIMC=4 MDIMA=2 NDIMB=4 VWM=8 VWN=2 SA=0 SB=0");
    assert_int_equal(kvl_blas_unit(kvl_device_tuning(kvl_test_device)).m, 16);
    assert_int_equal(run(&linear, T, x, NULL, false, y[1]), 0);
    for (int i = 0; i < T * ROWS; i++) assert_true(fabsf(y[0][i] - y[1][i]) <= 1e-4f * (1.0f + fabsf(y[0][i])));
    set("clblast", "");
    set("gemm", "");
    kvl_linear_free(&linear);
    tensor_free(&t);
    kvl_free(&x);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(both_products_are_right),
    cmocka_unit_test(epilogues),
    cmocka_unit_test(other_parameters),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
