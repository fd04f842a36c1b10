/* What tuning may not change: products to the bit, unless a tunable reorders sums; exact logits, to the bit, with all of them; and that
 * what is reserved is what was planned, with CLBlast's scratch too. */
#include "plan_report.h"
#include "tune.h"
#include "tuning.h"
#include "weights.h"
#include "session_rig.h"

enum { TOKENS = 140, STEPS = 3, N_CTX = TOKENS + STEPS };

static int32_t tokens[N_CTX];

static void force(const char *kernel_name, const char *text)
{
    const struct kvl_tune_kernel *kernel = kvl_tune_kernel_find(kernel_name);
    struct kvl_setting setting;
    assert_non_null(kernel);
    assert_ok(kvl_setting_parse(kernel, text, &setting));
    kvl_device_tune(kvl_test_device, kernel, &setting, "test");
}

static bool is_legal(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting)
{
    const bool legal = kvl_setting_check(kernel, setting, kvl_device_caps(kvl_test_device)) == KVL_OK;
    kvl_error_clear();
    return legal;
}

/* y [T][rows] of the device's settings, without `exact`. */
static void multiply(const struct kvl_linear *linear, uint32_t T, const float *x, float *y)
{
    struct kvl_linear_kernels *kernels;
    struct kvl_rows in, out;
    assert_ok(kvl_linear_kernels_new(kvl_test_device, &kernels));
    assert_ok(kvl_linear_reserve(kernels, T, linear->cols, false));
    rows_new(T, linear->cols, x, 0.0f, &in);
    rows_new(T, linear->rows, NULL, CANARY, &out);
    assert_ok(kvl_linear_run(kernels, linear, T, in, out, false, false));
    rows_read(&out, T, linear->rows, CANARY, y);
    kvl_buffer_free(&in.buffer);
    kvl_buffer_free(&out.buffer);
    kvl_linear_kernels_free(&kernels);
}

/* Logits after a prefill of TOKENS in ubatches and after STEPS tokens one by one: [1 + STEPS][vocabulary]. */
static void logits_of(struct rig *r, bool exact, float *logits)
{
    const uint32_t vocabulary = r->model->dims.n_vocab;
    const struct kvl_session_config config = {.n_ctx = N_CTX, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = exact};
    rig_session(r, "k=int8 v=int4 sink=2", config);
    assert_ok(kvl_session_forward(r->session, tokens, TOKENS, 1));
    assert_ok(kvl_session_read_logits(r->session, 0, logits));
    for (uint32_t i = 0; i < STEPS; i++) {
        assert_ok(kvl_session_forward(r->session, tokens + TOKENS + i, 1, 1));
        assert_ok(kvl_session_read_logits(r->session, 0, logits + (1 + i) * vocabulary));
    }
}

static struct rig load(float **a, float **b, size_t *n)
{
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < N_CTX; i++) tokens[i] = (int32_t)(kvl_rng_u64(7, i) % r.model->dims.n_vocab);
    *n = (1 + STEPS) * (size_t)r.model->dims.n_vocab;
    assert_ok(kvl_alloc(a, *n, sizeof **a));
    assert_ok(kvl_alloc(b, *n, sizeof **b));
    return r;
}

/* Products of both kinds, each legal value of each tunable that keeps the order of sums. */
static void products_keep_their_bits(void **state)
{
    enum { ROWS = 70, COLS = 608, MANY = 200, FEW = 3 };
    static const char *const kernels[] = {"gemm", "gemv"};
    struct test_tensor t;
    struct kvl_linear linear;
    float *x = random_floats(MANY * COLS, 1), *built_in[2], *tuned = NULL;
    const struct kvl_tuning before = *kvl_device_tuning(kvl_test_device);
    tensor_new(kvl_quant_type(KVL_GGUF_Q4_1), ROWS, COLS, 2, &t);
    load_one(&t, &linear);
    assert_ok(kvl_alloc(&tuned, MANY * ROWS, sizeof *tuned));
    for (int k = 0; k < 2; k++) {
        const struct kvl_tune_kernel *kernel = kvl_tune_kernel_find(kernels[k]);
        const uint32_t T = k == 0 ? MANY : FEW;
        force(kernels[k], "");
        built_in[k] = NULL;
        assert_ok(kvl_alloc(&built_in[k], T * ROWS, sizeof *tuned));
        multiply(&linear, T, x, built_in[k]);
        for (size_t i = 0; i < kernel->n_tunables; i++)
            for (size_t v = 1; v < kernel->tunable[i].n_values && !(kvl_device_is_slow() && v > 1); v++) {
                struct kvl_setting setting = {0};
                setting.choice[i] = (uint8_t)v;
                if (kernel->tunable[i].reorders || !is_legal(kernel, &setting)) continue;
                kvl_device_tune(kvl_test_device, kernel, &setting, "test");
                multiply(&linear, T, x, tuned);
                if (memcmp(tuned, built_in[k], T * ROWS * sizeof *tuned) != 0)
                    fail_msg("%s %s=%s: other bits than the defaults'", kernel->name, kernel->tunable[i].name, kernel->tunable[i].value[v].word);
            }
        kvl_device_restore(kvl_test_device, &before);
        kvl_free(&built_in[k]);
    }
    kvl_linear_free(&linear);
    tensor_free(&t);
    kvl_free(&x);
    kvl_free(&tuned);
}

static void exact_logits_do_not_change(void **state)
{
    static const char *const settings[][4] = {
        /* gemm, gemv, attend, clblast */
        {"product=clblast cols=32 tokens=24 tile=4", "pairs=4 groups=8", "block=16 rows=6 splits=8 group=32", "MWG=32"},
        {"product=clblast tokens=24 tile=12", "pairs=32", "block=32 rows=16 splits=1 group=128", ""},
        {"", "", "rows=8 splits=2", ""},
    };
    static const char *const names[] = {"gemm", "gemv", "attend", "clblast"};
    float *built_in, *tuned;
    size_t n;
    struct rig r = load(&built_in, &tuned, &n);
    const struct kvl_tuning before = *kvl_device_tuning(kvl_test_device);
    for (size_t k = 0; k < 4; k++) force(names[k], "");
    logits_of(&r, true, built_in);
    for (size_t i = 0; i < (kvl_device_is_slow() ? 1 : sizeof settings / sizeof *settings); i++) {
        for (size_t k = 0; k < 4; k++) force(names[k], settings[i][k]);
        logits_of(&r, true, tuned);
        if (memcmp(tuned, built_in, n * sizeof *tuned) != 0) fail_msg("setting %zu: other exact logits than the defaults'", i);
    }
    kvl_device_restore(kvl_test_device, &before);
    rig_free(&r);
    kvl_free(&built_in);
    kvl_free(&tuned);
}

static bool add_bytes(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    uint64_t *sums = context;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) sums[c] += bytes[c];
    return true;
}

/* Without `exact` settings count: results stay near, and the plan knows what they reserve. */
static void other_settings_are_planned(void **state)
{
    static const char *const settings[][2] = {{"gemm", "product=clblast"}, {"attend", "splits=8 block=32 rows=6"}, {"attend", "splits=1"}};
    float *built_in, *tuned;
    size_t n;
    if (kvl_device_is_slow()) skip();
    struct rig r = load(&built_in, &tuned, &n);
    const struct kvl_tuning before = *kvl_device_tuning(kvl_test_device);
    const struct kvl_cache_limits limits = kvl_cache_limits_of(kvl_test_device);
    uint64_t scratch_before = 0;
    for (size_t i = 0; i < 1 + sizeof settings / sizeof *settings; i++) {
        struct kvl_footprint plan;
        struct kvl_cache_bytes bytes;
        uint64_t held[KVL_MEM_CLASSES] = {0};
        if (i > 0) force(settings[i - 1][0], settings[i - 1][1]);
        logits_of(&r, false, i == 0 ? built_in : tuned);
        const struct kvl_session_config config = {.spec = r.spec, .n_ctx = N_CTX, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ};
        assert_ok(kvl_footprint_of(&r.model->dims, &config, &limits, &plan));
        plan.bytes[KVL_MEM_WEIGHTS] = kvl_weights_bytes(r.model);
        assert_ok(kvl_session_bytes(r.session, &bytes));
        kvl_ledger_walk(kvl_test_device, add_bytes, held);
        for (int c = 0; c < KVL_MEM_CLASSES; c++)
            if (held[c] != plan.bytes[c])
                fail_msg("setting %zu, class %s: %llu bytes held, %llu planned", i, kvl_mem_class_name[c], (unsigned long long)held[c],
                         (unsigned long long)plan.bytes[c]);
        assert_int_equal(bytes.scratch, plan.bytes[KVL_MEM_SCRATCH]);
        if (i == 0) scratch_before = bytes.scratch;
        if (i == 1) assert_true(bytes.scratch > scratch_before);
        if (i > 0) assert_true(largest_difference(tuned, built_in, n) < 0.5); /* codes of 4 bits may flip */
        kvl_device_restore(kvl_test_device, &before);
    }
    rig_free(&r);
    kvl_free(&built_in);
    kvl_free(&tuned);
}

struct seen {
    size_t n, n_rejected;
};

static void count(void *context, const struct kvl_tune_step *step)
{
    struct seen *seen = context;
    assert_ok(kvl_setting_check(step->kernel, step->setting, kvl_device_caps(kvl_test_device)));
    assert_true(step->rejected[0] != '\0' ? step->ratio == 0.0 : step->ratio > 0.0);
    seen->n++;
    seen->n_rejected += step->rejected[0] != '\0';
}

/* A tiny problem: legal settings come out, the device is as before but for them, and nothing is left in the ledger (harness). */
static void tuning_ends_in_a_legal_setting(void **state)
{
    if (kvl_device_is_slow()) skip();
    struct kvl_tune_shape shape = kvl_tune_shape_of(NULL);
    shape.n_ff = 96;
    shape.n_embd = 64;
    shape.tokens = 24;
    shape.depth = 128;
    const struct kvl_tune_options options = {.pairs = 1, .limit = 3};
    for (size_t i = 0; kvl_tune_nth(i) != NULL; i++) {
        const struct kvl_tune_kernel *kernel = kvl_tune_nth(i);
        struct kvl_tune_result result;
        struct seen seen = {0};
        const struct kvl_tuning before = *kvl_device_tuning(kvl_test_device);
        size_t n;
        assert_ok(kvl_tune_run(kvl_test_device, kernel, &shape, &options, count, &seen, &result));
        assert_int_equal(seen.n, result.n_tried);
        assert_int_equal(seen.n_rejected, result.n_rejected);
        assert_true(result.n_tried >= 1 && result.n_tried <= 3 && result.metric > 0.0);
        assert_ok(kvl_setting_check(kernel, &result.setting, kvl_device_caps(kvl_test_device)));
        const struct kvl_setting *now = &kvl_device_tuning(kvl_test_device)->setting[kernel - kvl_tune_kernels(&n)];
        assert_memory_equal(now, &result.setting, sizeof *now);
        kvl_device_restore(kvl_test_device, &before);
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(products_keep_their_bits),
    cmocka_unit_test(exact_logits_do_not_change),
    cmocka_unit_test(other_settings_are_planned),
    cmocka_unit_test(tuning_ends_in_a_legal_setting),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
