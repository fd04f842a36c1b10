/* The logits statistics against a double-precision reference, on every device and with every work-group shape. */
#include "device.h"
#include "logprob.h"
#include "mem.h"
#include "rng.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ROWS = 6 };

static const struct kvl_logprob_shape shapes[] = {{0, 0} /* the device's own */, {1, 16}, {1, 4}, {4, 8}, {64, 4}};
static const uint32_t vocabularies[] = {49152, 1003, 48, 17, 5, 1};

static struct kvl_caps *devices;
static size_t n_devices;

/* ---- the reference ---- */

static double log_sum(const float *x, uint32_t n)
{
    double top = x[0], sum = 0.0;
    for (uint32_t i = 1; i < n; i++) top = fmax(top, x[i]);
    for (uint32_t i = 0; i < n; i++) sum += exp(x[i] - top);
    return top + log(sum);
}

static int32_t first_max(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return (int32_t)best;
}

static double divergence(const float *p, const float *q, uint32_t n)
{
    const double p_sum = log_sum(p, n), q_sum = log_sum(q, n);
    double kld = 0.0;
    for (uint32_t i = 0; i < n; i++) kld += exp(p[i] - p_sum) * ((p[i] - p_sum) - (q[i] - q_sum));
    return kld;
}

/* ---- logits ---- */

/* Row r of a matrix: ordinary, flat with ties, one certain token, wide, far from zero, very wide. */
static void fill_row(float *x, uint32_t n, uint32_t r, uint64_t seed)
{
    static const double spread[ROWS] = {3.0, 1.0, 1.0, 40.0, 2.0, 2000.0}, offset[ROWS] = {0, 0, 0, 0, 5000.0, 0};
    for (uint32_t i = 0; i < n; i++) x[i] = (float)(offset[r] + spread[r] * kvl_rng_normal(seed + r, i));
    for (uint32_t i = 0; r == 1 && i < n; i++) x[i] = (float)((i * 7 + 3) % 5);
    if (r == 2) x[n / 2] = 60.0f;
}

struct matrix {
    float *x;
    struct kvl_buffer *buffer;
};

static void upload(struct kvl_device *device, uint32_t n_vocab, struct matrix *m)
{
    const uint64_t bytes = (uint64_t)ROWS * n_vocab * sizeof(float);
    assert_int_equal(kvl_buffer_new(device, "test logits", -1, KVL_MEM_SCRATCH, bytes, false, &m->buffer), KVL_OK);
    assert_int_equal(kvl_buffer_write(m->buffer, 0, bytes, m->x), KVL_OK);
}

static void release(struct matrix *m)
{
    kvl_buffer_free(&m->buffer);
    kvl_free(&m->x);
}

/* noise: how far the second matrix is from the first; 0 = equal. */
static void make_pair(struct kvl_device *device, uint32_t n_vocab, double noise, struct matrix m[2])
{
    for (int k = 0; k < 2; k++) assert_int_equal(kvl_alloc(&m[k].x, (size_t)ROWS * n_vocab, sizeof(float)), KVL_OK);
    for (uint32_t r = 0; r < ROWS; r++) fill_row(m[0].x + (size_t)r * n_vocab, n_vocab, r, 11);
    for (size_t i = 0; i < (size_t)ROWS * n_vocab; i++) m[1].x[i] = (float)(m[0].x[i] + noise * kvl_rng_normal(99, i));
    for (int k = 0; k < 2; k++) upload(device, n_vocab, &m[k]);
}

/* ---- running a test on everything ---- */

struct bench {
    struct kvl_device *device;
    const struct kvl_logprob_shape *shape; /* NULL = the device's own */
    uint32_t n_vocab;
};

static void on_everything(void (*test)(const struct bench *bench))
{
    for (size_t d = 0; d < n_devices; d++) {
        char choice[24];
        struct bench bench = {0};
        snprintf(choice, sizeof choice, "%zu", d);
        print_message("  %s: %s\n", devices[d].platform, devices[d].name);
        if (kvl_device_open(choice, &bench.device) != KVL_OK) fail_msg("%s", kvl_error_text());
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            if (shapes[s].work_group > devices[d].max_work_group) continue;
            bench.shape = shapes[s].lanes ? &shapes[s] : NULL;
            for (size_t v = 0; v < sizeof vocabularies / sizeof *vocabularies; v++) {
                bench.n_vocab = vocabularies[v];
                test(&bench);
            }
        }
        kvl_device_close(&bench.device);
    }
}

static struct kvl_logprob *open_logprob(const struct bench *bench)
{
    struct kvl_logprob *logprob = NULL;
    if (kvl_logprob_new(bench->device, bench->n_vocab, ROWS, bench->shape, &logprob) != KVL_OK) fail_msg("%s", kvl_error_text());
    return logprob;
}

static void check_near(const char *what, const struct bench *bench, uint32_t row, double found, double wanted, double tolerance)
{
    if (fabs(found - wanted) <= tolerance) return;
    fail_msg("%s: n_vocab %u, group %u, lanes %u, row %u: found %.9g, wanted %.9g, off by %.3g", what, bench->n_vocab,
             bench->shape ? bench->shape->work_group : 0, bench->shape ? bench->shape->lanes : 0, row, found, wanted,
             found - wanted);
}

/* ---- tests ---- */

static void choose_targets(int32_t targets[ROWS], uint32_t n_vocab)
{
    for (uint32_t r = 0; r < ROWS; r++) targets[r] = (int32_t)(kvl_rng_u64(5, r) % n_vocab);
    targets[2] = (int32_t)(n_vocab / 2); /* the certain token */
    targets[3] = (int32_t)(n_vocab - 1);
}

static void check_pair(const struct bench *bench, double noise)
{
    struct kvl_logprob *logprob = open_logprob(bench);
    struct matrix m[2] = {0};
    struct kvl_row_score score[2][ROWS];
    float kld[ROWS];
    int32_t targets[ROWS];
    const uint32_t n = bench->n_vocab;
    choose_targets(targets, n);
    make_pair(bench->device, n, noise, m);
    assert_int_equal(kvl_logprob_compare(logprob, m[0].buffer, m[1].buffer, targets, ROWS, score[0], score[1], kld), KVL_OK);
    for (uint32_t r = 0; r < ROWS; r++) {
        const float *row[2] = {m[0].x + (size_t)r * n, m[1].x + (size_t)r * n};
        for (int k = 0; k < 2; k++) {
            const double nll = log_sum(row[k], n) - row[k][targets[r]];
            check_near("nll", bench, r, score[k][r].nll, nll, 1e-6 * fmax(1.0, nll));
            assert_int_equal(score[k][r].argmax, first_max(row[k], n));
            assert_int_equal(score[k][r].n_bad, 0);
        }
        const double wanted = divergence(row[0], row[1], n);
        if (noise == 0.0)
            assert_true(kld[r] == 0.0f);
        else
            check_near("kld", bench, r, kld[r], wanted, 2e-6 * wanted + 1e-13);
    }
    release(&m[0]);
    release(&m[1]);
    kvl_logprob_free(&logprob);
}

static void check_noise(const struct bench *bench)
{
    check_pair(bench, 1e-3);
    check_pair(bench, 0.3);
    check_pair(bench, 5.0);
}
static void check_equal(const struct bench *bench) { check_pair(bench, 0.0); }

static void check_bad(const struct bench *bench)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct kvl_logprob *logprob = open_logprob(bench);
    struct kvl_row_score score[2][ROWS];
    float kld[ROWS];
    const int32_t targets[ROWS] = {0};
    const uint32_t n = bench->n_vocab;
    for (int b = 0; b < 3; b++) {
        struct matrix m[2] = {0};
        make_pair(bench->device, n, 0.1, m);
        m[1].x[3 * (size_t)n + n - 1] = bad[b];
        m[1].x[3 * (size_t)n + n / 3] = bad[b];
        assert_int_equal(kvl_buffer_write(m[1].buffer, 0, (uint64_t)ROWS * n * sizeof(float), m[1].x), KVL_OK);
        assert_int_equal(kvl_logprob_score(logprob, m[0].buffer, targets, ROWS, score[0]), KVL_OK);
        assert_int_equal(kvl_logprob_score(logprob, m[1].buffer, targets, ROWS, score[1]), KVL_E_VERIFY);
        assert_non_null(strstr(kvl_error_text(), "row 3"));
        kvl_error_clear();
        assert_int_equal(score[1][3].n_bad, n / 3 == n - 1 ? 1 : 2);
        assert_int_equal(kvl_logprob_compare(logprob, m[0].buffer, m[1].buffer, targets, ROWS, score[0], score[1], kld),
                         KVL_E_VERIFY);
        kvl_error_clear();
        release(&m[0]);
        release(&m[1]);
    }
    kvl_logprob_free(&logprob);
}

static void check_targets(const struct bench *bench)
{
    struct kvl_logprob *logprob = open_logprob(bench);
    struct matrix m[2] = {0};
    struct kvl_row_score score[ROWS];
    const int32_t beyond[ROWS] = {0, (int32_t)bench->n_vocab}, below[ROWS] = {-1};
    make_pair(bench->device, bench->n_vocab, 0.0, m);
    assert_int_equal(kvl_logprob_score(logprob, m[0].buffer, beyond, 2, score), KVL_E_FORMAT);
    kvl_error_clear();
    assert_int_equal(kvl_logprob_score(logprob, m[0].buffer, below, 1, score), KVL_E_FORMAT);
    kvl_error_clear();
    release(&m[0]);
    release(&m[1]);
    kvl_logprob_free(&logprob);
}

static void test_against_reference(void **state) { on_everything(check_noise); }
static void test_equal_rows_give_zero(void **state) { on_everything(check_equal); }
static void test_bad_values_are_errors(void **state) { on_everything(check_bad); }
static void test_targets_are_checked(void **state) { on_everything(check_targets); }

int main(void)
{
    if (kvl_device_list(&devices, &n_devices) != KVL_OK || n_devices == 0) {
        fprintf(stderr, "skipped: no OpenCL device\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_reference),
        cmocka_unit_test(test_equal_rows_give_zero),
        cmocka_unit_test(test_bad_values_are_errors),
        cmocka_unit_test(test_targets_are_checked),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvl_free(&devices);
    return failed;
}
