/* Matrix products and RMS norm against double precision, on every device: awkward sizes, canaries around outputs, and exact
 * products that do not depend on how many tokens go together. */
#include "weights.h"
#include <math.h>

static struct kvl_linear_kernels *kernels;

/* Kernels know a type by its body only, which test_weight_types tries for all of them: one type of each kind goes through all
 * sizes, the others through few, which saves building hundreds of kernels. */
static bool type_is_thorough(const struct kvl_quant_type *type)
{
    return type->gguf_type == KVL_GGUF_Q4_1 || type->gguf_type == KVL_GGUF_Q6_K ||
           (type->gguf_type == KVL_GGUF_F16 && !kvl_device_is_slow());
}
static bool type_is_tried(const struct kvl_quant_type *type) { return type_is_thorough(type) || !kvl_device_is_slow(); }

/* Products of T tokens; y is [T][linear->rows]. before: what y holds (for add), or NULL. */
static void run(const struct kvl_linear *linear, uint32_t T, const float *x, const float *before, bool exact, float *y)
{
    struct kvl_rows in, out;
    rows_new(T, linear->cols, x, CANARY, &in); /* behind a row, too, where zeros meet it */
    rows_new(T, linear->rows, before, CANARY, &out);
    assert_ok(kvl_linear_run(kernels, linear, T, in, out, before != NULL, exact));
    rows_read(&out, T, linear->rows, CANARY, y);
    kvl_buffer_free(&in.buffer);
    kvl_buffer_free(&out.buffer);
}

/* Product of row w and x, and in *bound what n rounded steps of f32 may be off. */
static double dot(const float *w, const float *x, uint64_t n, double *bound)
{
    double sum = 0.0, size = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        sum += (double)w[i] * x[i];
        size += fabs((double)w[i] * x[i]);
    }
    *bound = (double)(n + 2) * 0x1p-24 * size;
    return sum;
}

static void check_products(const struct test_tensor *t, uint32_t T, const float *x, const float *y, const char *what)
{
    const uint64_t rows = t->tensor.dim[1], cols = t->tensor.dim[0];
    for (uint64_t i = 0; i < T * rows; i++) {
        double bound;
        const double want = dot(t->values + i % rows * cols, x + i / rows * cols, cols, &bound);
        if (!(fabs(y[i] - want) <= bound))
            fail_msg("%s %s %llux%llu: token %llu row %llu is %.9g, wanted %.9g +- %g", kvl_quant_type(t->tensor.type)->name, what,
                     (unsigned long long)rows, (unsigned long long)cols, (unsigned long long)(i / rows),
                     (unsigned long long)(i % rows), y[i], want, bound);
    }
}

static void exact_products(void **state)
{
    static const struct {
        uint64_t rows, cols; /* cols of types with blocks of 256: rounded up */
        uint32_t T;
        bool thorough;
    } sizes[] = {{33, 1536, 1, false}, {48, 96, 13, false}, {7, 32, 1, true},    {93, 96, 5, true},
                 {144, 576, 6, true},  {33, 1536, 7, true}, {16, 576, 13, true}, {48, 96, 64, true},
                 {1, 32, 3, true},     {31, 192, 2, true},  {65, 224, 4, true},  {20, 288, 100, true}};
    for (size_t i = 0; i < kvl_n_quant_types; i++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            const struct kvl_quant_type *type = &kvl_quant_types[i];
            const uint64_t rows = sizes[s].rows, cols = (sizes[s].cols + type->block - 1) / type->block * type->block;
            const uint32_t T = sizes[s].T;
            if (!type_is_tried(type) || (sizes[s].thorough && !type_is_thorough(type))) continue;
            struct test_tensor t;
            struct kvl_linear linear;
            float *x = random_floats(T * cols, 17 + s), *y = NULL;
            tensor_new(type, rows, cols, 100 * i + s, &t);
            load_one(&t, &linear);
            assert_ok(kvl_alloc(&y, T * rows, sizeof *y));
            run(&linear, T, x, NULL, true, y);
            check_products(&t, T, x, y, "exact");
            kvl_linear_free(&linear);
            tensor_free(&t);
            kvl_free(&x);
            kvl_free(&y);
        }
}

/* Columns that do not fill a block of 32: only types without blocks have them. */
static void exact_products_of_odd_rows(void **state)
{
    struct test_tensor t;
    struct kvl_linear linear;
    float *x = random_floats(7 * 40, 3), y[7 * 20];
    tensor_new(kvl_quant_type(KVL_GGUF_F16), 20, 40, 4, &t);
    load_one(&t, &linear);
    run(&linear, 7, x, NULL, true, y);
    check_products(&t, 7, x, y, "exact");
    run(&linear, 1, x, NULL, true, y);
    check_products(&t, 1, x, y, "exact");
    kvl_linear_free(&linear);
    tensor_free(&t);
    kvl_free(&x);
}

static void batches_do_not_change_exact_bits(void **state)
{
    enum { ROWS = 40, COLS = 768 };
    static const uint32_t batch[] = {1, 2, 3, 4, 5, 7, 64, 100};
    const uint32_t T = kvl_device_is_slow() ? 30 : 512;
    for (size_t i = 0; i < kvl_n_quant_types; i++) {
        if (!type_is_thorough(&kvl_quant_types[i])) continue;
        struct test_tensor t;
        struct kvl_linear linear;
        float *x = random_floats(T * COLS, 5), *all = NULL, *some = NULL;
        tensor_new(&kvl_quant_types[i], ROWS, COLS, 6, &t);
        load_one(&t, &linear);
        assert_ok(kvl_alloc(&all, T * ROWS, sizeof *all));
        assert_ok(kvl_alloc(&some, T * ROWS, sizeof *some));
        run(&linear, T, x, NULL, true, all);
        for (size_t b = 0; b < sizeof batch / sizeof *batch; b++) {
            const uint32_t first = 3 * (uint32_t)b;
            if (first + batch[b] > T) continue;
            run(&linear, batch[b], x + first * COLS, NULL, true, some);
            if (memcmp(some, all + first * ROWS, batch[b] * ROWS * sizeof *some) != 0)
                fail_msg("%s: %u tokens alone give other bits than among %u", linear.type->name, batch[b], T);
        }
        kvl_linear_free(&linear);
        tensor_free(&t);
        kvl_free(&x);
        kvl_free(&all);
        kvl_free(&some);
    }
}

static void products_are_added(void **state)
{
    enum { ROWS = 40, COLS = 64 };
    struct test_tensor t;
    struct kvl_linear linear;
    tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 7, &t);
    load_one(&t, &linear);
    for (uint32_t T = 1; T <= 8; T++) {
        float *x = random_floats(T * COLS, T), *before = random_floats(T * ROWS, 8), y[8 * ROWS], sum[8 * ROWS];
        run(&linear, T, x, NULL, true, y);
        run(&linear, T, x, before, true, sum);
        for (uint32_t i = 0; i < T * ROWS; i++) assert_true(sum[i] == before[i] + y[i]);
        kvl_free(&x);
        kvl_free(&before);
    }
    kvl_linear_free(&linear);
    tensor_free(&t);
}

static double silu(double x) { return x / (1.0 + exp(-x)); }
static double gelu(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x))); }

static void gate_and_value(enum kvl_gate gate, double (*activation)(double))
{
    enum { ROWS = 41, COLS = 96, MOST = 20 };
    struct test_tensor t[2];
    struct kvl_linear linear;
    const struct kvl_gguf_tensor *const tensors[] = {&t[0].tensor, &t[1].tensor};
    for (int i = 0; i < 2; i++) tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 9 + (uint64_t)i, &t[i]);
    kvl_linear_limit_part(4 * 3 * 20 * 16);
    assert_ok(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 2, (struct kvl_linear_form){.gate = gate}, &linear));
    kvl_linear_limit_part(0);
    assert_int_equal(linear.rows, ROWS);
    assert_int_equal(linear.n_parts, 2);
    for (uint32_t T = 1; T <= MOST; T++) {
        float *x = random_floats(T * COLS, T), y[MOST * ROWS];
        run(&linear, T, x, NULL, true, y);
        for (uint32_t i = 0; i < T * ROWS; i++) {
            double bound[2], product[2];
            for (int k = 0; k < 2; k++) product[k] = dot(t[k].values + i % ROWS * COLS, x + i / ROWS * COLS, COLS, &bound[k]);
            const double factor = activation(product[0]);
            assert_true(fabs(y[i] - factor * product[1]) <=
                        2e-6 * (fabs(product[0]) + fabs(factor)) * fabs(product[1]) + 1.2 * bound[0] * fabs(product[1]) + bound[1] * fabs(factor));
        }
        kvl_free(&x);
    }
    kvl_linear_free(&linear);
    for (int i = 0; i < 2; i++) tensor_free(&t[i]);
}

static void silu_and_value(void **state) { gate_and_value(KVL_GATE_SILU, silu); }
static void gelu_and_value(void **state) { gate_and_value(KVL_GATE_GELU, gelu); }

/* Two heads of 24 rows, 16 of which RoPE turns, and 5 rows that are no heads': rows 0, 8, 1, 9 ... 7, 15, 16 ... 23 of each head. */
static void halves_become_neighbours(void **state)
{
    enum { HEAD = 24, TURN = 16, ROWS = 2 * HEAD + 5, COLS = 64 };
    struct test_tensor t;
    struct kvl_linear plain, turned;
    const struct kvl_linear_form form = {.turned_rows = 2 * HEAD, .head_dim = HEAD, .rope_dim = TURN};
    float *x = random_floats(COLS, 31), before[ROWS], after[ROWS];
    tensor_new(kvl_quant_type(KVL_GGUF_Q8_0), ROWS, COLS, 32, &t);
    load_one(&t, &plain);
    assert_ok(kvl_linear_load(kvl_test_device, "test weights", 0, (const struct kvl_gguf_tensor *const[]){&t.tensor}, 1, form, &turned));
    run(&plain, 1, x, NULL, true, before);
    run(&turned, 1, x, NULL, true, after);
    for (int i = 0; i < ROWS; i++) {
        const int head = i / HEAD * HEAD, c = i - head;
        const int from = i >= 2 * HEAD || c >= TURN ? i : head + (c % 2 == 0 ? c / 2 : TURN / 2 + c / 2);
        assert_true(after[i] == before[from]);
    }
    kvl_linear_free(&plain);
    kvl_linear_free(&turned);
    tensor_free(&t);
    kvl_free(&x);
}

/* Three tensors as one, cut into parts: the same bits as each alone. */
static void tensors_are_joined(void **state)
{
    enum { COLS = 64, T = 7, MOST = 60 };
    static const uint64_t rows[] = {50, 23, 60};
    struct test_tensor t[3];
    struct kvl_linear joined, one;
    float *x = random_floats(T * COLS, 12), y[T * 133], alone[T * MOST];
    for (int i = 0; i < 3; i++) tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), rows[i], COLS, 13 + (uint64_t)i, &t[i]);
    kvl_linear_limit_part(5 * 2 * 20 * 16); /* five panels: four, by pairs */
    assert_ok(kvl_linear_load(kvl_test_device, "test weights", 0,
                              (const struct kvl_gguf_tensor *const[]){&t[0].tensor, &t[1].tensor, &t[2].tensor}, 3, (struct kvl_linear_form){0},
                              &joined));
    kvl_linear_limit_part(0);
    assert_int_equal(joined.rows, 133);
    assert_int_equal(joined.n_parts, 3);
    for (uint32_t n = 1; n <= T; n += 3) {
        run(&joined, n, x, NULL, true, y);
        for (uint64_t i = 0, first = 0; i < 3; first += rows[i++]) {
            load_one(&t[i], &one);
            run(&one, n, x, NULL, true, alone);
            for (uint32_t k = 0; k < n; k++) assert_memory_equal(y + k * 133 + first, alone + k * rows[i], rows[i] * sizeof *y);
            kvl_linear_free(&one);
        }
    }
    kvl_linear_free(&joined);
    for (int i = 0; i < 3; i++) tensor_free(&t[i]);
    kvl_free(&x);
}

/* A product of each head, in parts of two heads: the same bits as each matrix alone. shared: all heads multiply the same row. */
static void multiply_heads(uint32_t gguf_type, uint64_t rows, bool shared, bool exact)
{
    enum { COLS = 64, HEADS = 5, MOST = 9, MOST_ROWS = 40 };
    const uint64_t width = shared ? COLS : HEADS * COLS;
    struct test_tensor t[HEADS];
    const struct kvl_gguf_tensor *tensors[HEADS];
    struct kvl_linear heads, one;
    struct kvl_rows in, out;
    float *x = random_floats(MOST * width, 40), of_head[MOST * COLS], y[MOST * HEADS * MOST_ROWS], alone[MOST * MOST_ROWS];
    for (int h = 0; h < HEADS; h++) {
        tensor_new(kvl_quant_type(gguf_type), rows, COLS, 41 + (uint64_t)h, &t[h]);
        tensors[h] = &t[h].tensor;
    }
    kvl_linear_limit_part(2 * kvl_linear_heads_bytes(kvl_quant_type(gguf_type), 1, rows, COLS) + 1);
    assert_ok(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, HEADS, (struct kvl_linear_form){.heads = true}, &heads));
    kvl_linear_limit_part(0);
    assert_int_equal(heads.n_parts, 3);
    for (uint32_t T = 1; T <= MOST; T = T < 4 ? 2 * T : T + 5) {
        rows_new(T, width, x, 0.0f, &in);
        rows_new(T, HEADS * rows, NULL, CANARY, &out);
        in.step = shared ? 0 : COLS;
        out.step = rows;
        assert_ok(kvl_linear_run(kernels, &heads, T, in, out, false, exact));
        rows_read(&out, T, HEADS * rows, CANARY, y);
        for (uint64_t h = 0; h < HEADS; h++) {
            for (uint32_t k = 0; k < T; k++) memcpy(of_head + k * COLS, x + k * width + h * in.step, COLS * sizeof *x);
            load_one(&t[h], &one);
            run(&one, T, of_head, NULL, exact, alone);
            for (uint32_t k = 0; k < T; k++) assert_memory_equal(y + (k * HEADS + h) * rows, alone + k * rows, rows * sizeof *y);
            kvl_linear_free(&one);
        }
        kvl_buffer_free(&in.buffer);
        kvl_buffer_free(&out.buffer);
    }
    kvl_linear_free(&heads);
    for (int h = 0; h < HEADS; h++) tensor_free(&t[h]);
    kvl_free(&x);
}

static void heads_multiply_their_own(void **state)
{
    multiply_heads(KVL_GGUF_F32, 24, false, true);
    multiply_heads(KVL_GGUF_Q4_1, 40, false, false);
    multiply_heads(KVL_GGUF_Q4_1, 16, true, false);
}

/* ---- activations of 8 bits ---- */

/* What the device makes of activations: codes times a scale, in blocks of 32. */
static void round_to_8_bits(float *x, uint64_t n)
{
    for (uint64_t b = 0; b < n; b += 32) {
        float largest = 0.0f;
        for (uint64_t i = b; i < b + 32; i++) largest = fmaxf(largest, fabsf(x[i]));
        for (uint64_t i = b; i < b + 32; i++) x[i] = rintf(x[i] * (127.0f / largest)) * (largest / 127.0f);
    }
}

/* A rounded activation is exact in 8 bits again, so that only f32 rounding is left to compare. */
static void products_in_8_bits(void **state)
{
    enum { ROWS = 39, COLS = 768 };
    for (size_t i = 0; i < kvl_n_quant_types; i++) {
        struct test_tensor t;
        struct kvl_linear linear;
        if (!type_is_tried(&kvl_quant_types[i])) continue;
        tensor_new(&kvl_quant_types[i], ROWS, COLS, 200 + i, &t);
        load_one(&t, &linear);
        for (uint32_t T = 1; T <= (type_is_thorough(&kvl_quant_types[i]) ? 5 : 1); T++) {
            float *x = random_floats(T * COLS, T), y[5 * ROWS];
            round_to_8_bits(x, T * COLS);
            run(&linear, T, x, NULL, false, y);
            check_products(&t, T, x, y, "8 bits");
            kvl_free(&x);
        }
        kvl_linear_free(&linear);
        tensor_free(&t);
    }
}

/* Codes and activations at their limits with all signs equal: the 16-bit sums are as large as they can be. */
static void sums_of_8_bits_do_not_overflow(void **state)
{
    enum { ROWS = 16, COLS = 256 };
    static const uint8_t byte[] = {0x00, 0x7f, 0x80, 0xff};
    for (size_t i = 0; i < kvl_n_quant_types; i++)
        for (size_t b = 0; b < sizeof byte; b++)
            for (int sign = -1; sign <= 1; sign += 2) {
                const struct kvl_quant_type *type = &kvl_quant_types[i];
                if (type->block == 1 || !type_is_tried(type)) continue;
                struct test_tensor t;
                struct kvl_linear linear;
                float x[COLS], y[ROWS];
                tensor_new(type, ROWS, COLS, 300 + i, &t);
                for (uint64_t at = 0; at < t.tensor.n_bytes; at += type->bytes) {
                    memset(t.bytes + at, byte[b], type->bytes);
                    for (const int *h = half_offsets(type->gguf_type); *h >= 0; h++) put_u16(t.bytes + at + *h, 0x2c00);
                }
                tensor_decode(&t);
                for (int c = 0; c < COLS; c++) x[c] = (float)sign;
                load_one(&t, &linear);
                run(&linear, 1, x, NULL, false, y);
                check_products(&t, 1, x, y, "8 bits, limits");
                kvl_linear_free(&linear);
                tensor_free(&t);
            }
}

/* Zeros stay zeros; a NaN or an infinity is not rounded away. */
static void special_activations(void **state)
{
    enum { ROWS = 16, COLS = 64 };
    struct test_tensor t;
    struct kvl_linear linear;
    float x[COLS] = {0}, y[ROWS];
    tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 400, &t);
    load_one(&t, &linear);
    run(&linear, 1, x, NULL, false, y);
    for (int i = 0; i < ROWS; i++) assert_true(y[i] == 0.0f);
    for (int infinite = 0; infinite < 2; infinite++) {
        x[40] = infinite ? INFINITY : NAN;
        run(&linear, 1, x, NULL, false, y);
        for (int i = 0; i < ROWS; i++) assert_false(isfinite(y[i]));
    }
    kvl_linear_free(&linear);
    tensor_free(&t);
}

/* ---- chains ---- */

enum { HEADS = 576, EMBD = 320, FF = 1536, PROJECTED = 933, LINKS = 4 }; /* large enough for several groups to be at work */

struct chain {
    struct test_tensor t[5]; /* output, gate, up, down, projections */
    struct kvl_linear linear[LINKS];
    struct kvl_rows attended, hidden, ff, stage;
    struct kvl_norm norm;
    struct kvl_product product[LINKS];
};

static void chain_new(struct chain *c, uint32_t down_type)
{
    static const uint64_t rows[5] = {EMBD, FF, FF, EMBD, PROJECTED}, cols[5] = {HEADS, EMBD, EMBD, FF, EMBD};
    float *x = random_floats(EMBD, 700), *weight = random_floats(EMBD, 701), *in = random_floats(HEADS, 702);
    for (int i = 0; i < 5; i++) tensor_new(kvl_quant_type(i == 3 ? down_type : KVL_GGUF_Q4_1), rows[i], cols[i], 710 + (uint64_t)i, &c->t[i]);
    const struct kvl_gguf_tensor *const gate_up[] = {&c->t[1].tensor, &c->t[2].tensor};
    load_one(&c->t[0], &c->linear[0]);
    assert_ok(kvl_linear_load(kvl_test_device, "test weights", 0, gate_up, 2, (struct kvl_linear_form){.gate = KVL_GATE_SILU}, &c->linear[1]));
    load_one(&c->t[3], &c->linear[2]);
    load_one(&c->t[4], &c->linear[3]);
    rows_new(1, HEADS, in, 0.0f, &c->attended);
    rows_new(1, EMBD, x, 0.0f, &c->hidden);
    rows_new(1, FF, NULL, 0.0f, &c->ff);
    rows_new(1, PROJECTED, NULL, CANARY, &c->stage);
    c->norm = (struct kvl_norm){.eps = 1e-5f};
    assert_ok(kvl_buffer_new(kvl_test_device, "test norm", -1, KVL_MEM_SCRATCH, EMBD * sizeof(float), false, &c->norm.weight));
    assert_ok(kvl_buffer_write(c->norm.weight, 0, EMBD * sizeof(float), weight));
    rows_new(1, EMBD, NULL, 0.0f, &c->norm.normed);
    const struct kvl_product product[LINKS] = {{&c->linear[0], c->attended, c->hidden, NULL, true},
                                               {&c->linear[1], c->hidden, c->ff, &c->norm, false},
                                               {&c->linear[2], c->ff, c->hidden, NULL, true},
                                               {&c->linear[3], c->hidden, c->stage, &c->norm, false}};
    memcpy(c->product, product, sizeof product);
    kvl_free(&x);
    kvl_free(&weight);
    kvl_free(&in);
}

static void chain_free(struct chain *c)
{
    for (int i = 0; i < 5; i++) tensor_free(&c->t[i]);
    for (int i = 0; i < LINKS; i++) kvl_linear_free(&c->linear[i]);
    struct kvl_buffer **const buffer[] = {&c->attended.buffer, &c->hidden.buffer, &c->ff.buffer, &c->stage.buffer, &c->norm.weight, &c->norm.normed.buffer};
    for (size_t i = 0; i < sizeof buffer / sizeof *buffer; i++) kvl_buffer_free(buffer[i]);
}

/* `rounds` times the chain, whose products feed each other: hidden grows from round to round. step: products a call. */
static uint64_t chain_run(uint32_t down_type, size_t step, int rounds, bool exact, float hidden[EMBD], float stage[PROJECTED])
{
    struct chain c;
    chain_new(&c, down_type);
    const uint64_t before = kvl_device_launches(kvl_test_device);
    for (int round = 0; round < rounds; round++)
        for (size_t i = 0; i < LINKS; i += step) assert_ok(kvl_linear_run_chain(kernels, c.product + i, step, 1, exact));
    const uint64_t launches = kvl_device_launches(kvl_test_device) - before;
    rows_read(&c.hidden, 1, EMBD, 0.0f, hidden);
    rows_read(&c.stage, 1, PROJECTED, CANARY, stage);
    chain_free(&c);
    return launches;
}

/* A chain gives the bits of its products one at a time, in fewer launches where a work-item has vectors and weights have one type. */
static void chains_change_no_bits(void **state)
{
    const struct kvl_caps *caps = kvl_device_caps(kvl_test_device);
    const bool chains = caps->type == KVL_DEVICE_CPU && caps->float_width != 1;
    const int rounds = kvl_device_is_slow() ? 2 : 200;
    static const uint32_t down_type[] = {KVL_GGUF_Q4_1, KVL_GGUF_Q8_0};
    assert_ok(kvl_linear_reserve(kernels, 1, FF, false));
    for (size_t i = 0; i < 2; i++)
        for (int exact = 0; exact < 2; exact++) {
            float hidden[2][EMBD], stage[2][PROJECTED];
            const uint64_t alone = chain_run(down_type[i], 1, rounds, exact, hidden[0], stage[0]);
            const uint64_t together = chain_run(down_type[i], LINKS, rounds, exact, hidden[1], stage[1]);
            assert_memory_equal(hidden[0], hidden[1], sizeof hidden[0]);
            assert_memory_equal(stage[0], stage[1], sizeof stage[0]);
            for (int c = 0; c < PROJECTED; c++) assert_true(isfinite(stage[0][c]));
            if (chains && !exact) assert_int_equal(together, (uint64_t)rounds * (i == 0 ? 1 : 3));
            else assert_int_equal(together, alone);
        }
}

/* ---- the rest ---- */

/* Long chains: a driver that ends long loops early is not noticed at small sizes. */
static void many_columns(void **state)
{
    enum { ROWS = 80, COLS = 6144, T = 2 };
    struct test_tensor t;
    struct kvl_linear linear;
    float *x = random_floats(T * COLS, 600), y[T * ROWS];
    tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 601, &t);
    load_one(&t, &linear);
    run(&linear, T, x, NULL, true, y);
    check_products(&t, T, x, y, "exact");
    kvl_linear_free(&linear);
    tensor_free(&t);
    kvl_free(&x);
}

static void tensors_that_do_not_fit_are_refused(void **state)
{
    struct test_tensor t[2];
    struct kvl_linear linear;
    const struct kvl_gguf_tensor *const tensors[] = {&t[0].tensor, &t[1].tensor};
    tensor_new(kvl_quant_type(KVL_GGUF_Q8_0), 32, 64, 500, &t[0]);
    tensor_new(kvl_quant_type(KVL_GGUF_Q8_0), 48, 64, 501, &t[1]);
    assert_int_equal(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 2, (struct kvl_linear_form){.gate = KVL_GATE_SILU}, &linear),
                     KVL_E_FORMAT); /* gate and value */
    kvl_error_clear();
    t[1].tensor.dim[0] = 96;
    assert_int_equal(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 2, (struct kvl_linear_form){0}, &linear), KVL_E_FORMAT);
    kvl_error_clear();
    t[1].tensor.dim[0] = 64;
    t[1].tensor.type = KVL_GGUF_Q4_0;
    assert_int_equal(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 2, (struct kvl_linear_form){0}, &linear), KVL_E_FORMAT);
    kvl_error_clear();
    t[0].tensor.type = 77;
    assert_int_equal(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 1, (struct kvl_linear_form){0}, &linear), KVL_E_UNSUPPORTED);
    kvl_error_clear();
    t[0].tensor.type = KVL_GGUF_Q8_0;
    kvl_linear_limit_part(100);
    assert_int_equal(kvl_linear_load(kvl_test_device, "test weights", 0, tensors, 1, (struct kvl_linear_form){0}, &linear), KVL_E_DEVICE_MEM);
    kvl_error_clear();
    kvl_linear_limit_part(0);
    for (int i = 0; i < 2; i++) tensor_free(&t[i]);
}

static void rms_norm(void **state)
{
    static const uint32_t sizes[] = {576, 32, 7, 100};
    const float eps = 1e-5f;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const uint32_t n = sizes[s], T = 5;
        struct kvl_rows x, y;
        struct kvl_buffer *weight = NULL;
        float *in = random_floats(T * n, 21), *w = random_floats(n, 22), *out = NULL, *again = NULL;
        assert_ok(kvl_alloc(&out, T * n, sizeof *out));
        assert_ok(kvl_alloc(&again, T * n, sizeof *again));
        for (uint32_t i = 0; i < n; i++) in[n + i] = 0.0f; /* a row of zeros */
        assert_ok(kvl_buffer_new(kvl_test_device, "test norm", -1, KVL_MEM_WEIGHTS, n * sizeof *w, false, &weight));
        assert_ok(kvl_buffer_write(weight, 0, n * sizeof *w, w));
        rows_new(T, n, in, CANARY, &x);
        rows_new(T, n, NULL, CANARY, &y);
        assert_ok(kvl_rms_norm_run(kernels, T, n, eps, weight, x, y));
        rows_read(&y, T, n, CANARY, out);
        for (uint32_t t = 0; t < T; t++) {
            double squares = 0.0;
            for (uint32_t i = 0; i < n; i++) squares += (double)in[t * n + i] * in[t * n + i];
            for (uint32_t i = 0; i < n; i++) {
                const double want = in[t * n + i] / sqrt(squares / n + eps) * w[i];
                assert_true(fabs(out[t * n + i] - want) <= 2e-6 * fabs(want));
            }
        }
        assert_ok(kvl_rms_norm_run(kernels, T, n, eps, weight, x, x));
        rows_read(&x, T, n, CANARY, again);
        assert_memory_equal(out, again, T * n * sizeof *out);
        kvl_buffer_free(&weight);
        kvl_buffer_free(&x.buffer);
        kvl_buffer_free(&y.buffer);
        kvl_free(&in);
        kvl_free(&w);
        kvl_free(&out);
        kvl_free(&again);
    }
}

/* Heads side by side are as rows of their own; a norm that is added, and a row that is, are sums. */
static void norms_of_heads_and_sums(void **state)
{
    enum { T = 3, N_HEAD = 4, N = 40, WIDE = N_HEAD * N + 8, ALL = T * WIDE };
    const float eps = 1e-5f;
    struct kvl_rows x, y;
    struct kvl_buffer *weight = NULL;
    float *in = random_floats(ALL, 41), *w = random_floats(N, 42), out[ALL], one[N], sum[ALL];
    assert_ok(kvl_buffer_new(kvl_test_device, "test norm", -1, KVL_MEM_WEIGHTS, N * sizeof *w, false, &weight));
    assert_ok(kvl_buffer_write(weight, 0, N * sizeof *w, w));
    rows_new(T, WIDE, in, CANARY, &x);
    assert_ok(kvl_rms_norm_heads_run(kernels, T, N_HEAD, N, eps, weight, x));
    rows_read(&x, T, WIDE, CANARY, out);
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t h = 0; h < N_HEAD; h++) {
            rows_new(1, N, in + t * WIDE + h * N, CANARY, &y);
            assert_ok(kvl_rms_norm_run(kernels, 1, N, eps, weight, y, y));
            rows_read(&y, 1, N, CANARY, one);
            assert_memory_equal(out + t * WIDE + h * N, one, sizeof one);
            kvl_buffer_free(&y.buffer);
        }
        assert_memory_equal(out + t * WIDE + N_HEAD * N, in + t * WIDE + N_HEAD * N, 8 * sizeof *out); /* what lies behind the heads */
    }
    rows_new(T, WIDE, in, CANARY, &y);
    assert_ok(kvl_rms_norm_add_run(kernels, T, N, eps, weight, y, x)); /* the first head's rows once more, to the normalized ones */
    rows_read(&x, T, WIDE, CANARY, sum);
    for (uint32_t i = 0; i < ALL; i++) assert_true(sum[i] == (i % WIDE < N ? 2 * out[i] : out[i]));
    assert_ok(kvl_add_row_run(kernels, T, N, weight, x));
    rows_read(&x, T, WIDE, CANARY, out);
    for (uint32_t i = 0; i < ALL; i++) assert_true(out[i] == (i % WIDE < N ? sum[i] + w[i % WIDE] : sum[i]));
    kvl_buffer_free(&weight);
    kvl_buffer_free(&x.buffer);
    kvl_buffer_free(&y.buffer);
    kvl_free(&in);
    kvl_free(&w);
}

static void new_kernels(void **state) { assert_ok(kvl_linear_kernels_new(kvl_test_device, &kernels)); }
static void free_kernels(void **state) { kvl_linear_kernels_free(&kernels); }

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(new_kernels),
    cmocka_unit_test(exact_products),
    cmocka_unit_test(exact_products_of_odd_rows),
    cmocka_unit_test(batches_do_not_change_exact_bits),
    cmocka_unit_test(products_are_added),
    cmocka_unit_test(silu_and_value),
    cmocka_unit_test(gelu_and_value),
    cmocka_unit_test(halves_become_neighbours),
    cmocka_unit_test(norms_of_heads_and_sums),
    cmocka_unit_test(tensors_are_joined),
    cmocka_unit_test(heads_multiply_their_own),
    cmocka_unit_test(products_in_8_bits),
    cmocka_unit_test(sums_of_8_bits_do_not_overflow),
    cmocka_unit_test(chains_change_no_bits),
    cmocka_unit_test(special_activations),
    cmocka_unit_test(many_columns),
    cmocka_unit_test(tensors_that_do_not_fit_are_refused),
    cmocka_unit_test(rms_norm),
    cmocka_unit_test(free_kernels),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
