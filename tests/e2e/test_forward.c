/* The forward pass and its cache with the tiny model of the repository, on every device: against a float64 forward pass written
 * elsewhere (data/golden/README.md), protocols and ubatch sizes against each other, the cache against recomputation. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "../../data/golden/tiny_answers.h"

enum { ALL_LOGITS = TINY_TOKENS * TINY_VOCAB };

/* Exact mode: logits of all tokens, fed in one call that the session cuts into ubatches. */
static void run_tokens(struct rig *r, const char *spec, enum kvl_protocol protocol, uint32_t ubatch, float *logits)
{
    const struct kvl_session_config config = {
        .n_ctx = TINY_TOKENS, .ubatch = ubatch, .protocol = protocol, .exact = true, .max_logits = TINY_TOKENS};
    rig_session(r, spec, config);
    rig_forward(r, tiny_token, TINY_TOKENS, logits);
}

static double rows_difference(const float *logits, const uint32_t *row, size_t n, const float (*want)[TINY_VOCAB])
{
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) worst = larger(worst, largest_difference(logits + row[i] * TINY_VOCAB, want[i], TINY_VOCAB));
    return worst;
}
#define ROWS_DIFFERENCE(logits, row, want) rows_difference(logits, row, sizeof(row) / sizeof *(row), want)

/* ---- against the independent forward pass ---- */

static void exact_mode_equals_float64(void **state)
{
    static float logits[ALL_LOGITS];
    struct rig r = rig_load(TINY_MODEL);
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 100, logits);
    const double full = ROWS_DIFFERENCE(logits, tiny_row, tiny_logits);

    float key[TINY_KV_HEADS * TINY_HEAD_DIM], value[TINY_KV_HEADS * TINY_HEAD_DIM];
    double rows = 0.0;
    for (uint32_t l = 0; l < TINY_LAYERS; l++) {
        assert_ok(kvl_cache_read_rows(kvl_session_cache(r.session), l, KVL_SIDE_K, TINY_TOKENS - 1, 1, key));
        assert_ok(kvl_cache_read_rows(kvl_session_cache(r.session), l, KVL_SIDE_V, TINY_TOKENS - 1, 1, value));
        rows = larger(rows, largest_difference(key, tiny_key[l], TINY_KV_HEADS * TINY_HEAD_DIM));
        rows = larger(rows, largest_difference(value, tiny_value[l], TINY_KV_HEADS * TINY_HEAD_DIM));
    }

    run_tokens(&r, "f32 " TINY_WINDOW, KVL_P2_WRITE_THEN_READ, 100, logits);
    const double window = ROWS_DIFFERENCE(logits, tiny_window_row, tiny_window_logits);
    run_tokens(&r, "int4", KVL_P1_FAKE_QUANT, 100, logits);
    const double int4 = ROWS_DIFFERENCE(logits, tiny_int4_row, tiny_int4_logits);
    print_message("    largest differences: logits %.1e, keys and values %.1e, window %.1e, int4 %.1e\n", full, rows, window, int4);
    assert_true(full < 2e-4);
    assert_true(rows < 2e-5);
    assert_true(window < 2e-4);
    assert_true(int4 < 0.3); /* a code at the edge of two may flip; int4 itself moves these logits by up to 5 */
    rig_free(&r);
}

/* A slow device compares itself with the independent forward pass and leaves the comparisons of kvlab with itself to the others. */
#define SKIP_IF_SLOW()                                                                                                             \
    if (kvl_device_is_slow()) {                                                                                                        \
        print_message("    skipped: this device is slow\n");                                                                       \
        skip();                                                                                                                    \
    }

/* Sequences in step leave each other alone: the logits of each are those it has by itself, in every shape of append and attention. */
static void sequences_in_step_equal_one(void **state)
{
    SKIP_IF_SLOW();
    enum { EACH = 12, SEQUENCES = 3 };
    static const char *const specs[] = {"f32", "int4(group=16)", "int8 sink=2 tail=4", "f16 window=6", "int4(group=16) rope=pre", "int4(group=16) rot=hadamard"};
    static float alone[SEQUENCES][EACH * TINY_VOCAB], together[EACH * SEQUENCES * TINY_VOCAB];
    int32_t token[EACH * SEQUENCES];
    struct rig r = rig_load(TINY_MODEL);
    for (int i = 0; i < EACH; i++)
        for (int s = 0; s < SEQUENCES; s++) token[i * SEQUENCES + s] = tiny_token[s * EACH + i];
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++) {
        struct kvl_session_config config = {.n_ctx = EACH, .ubatch = EACH - 2, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true, .max_logits = EACH};
        struct kvl_cache_bytes one, all;
        for (int s = 0; s < SEQUENCES; s++) {
            rig_session(&r, specs[k], config);
            for (uint32_t i = 0, n; i < EACH; i += n) { /* a prompt of a ubatch, then tokens one by one */
                n = i == 0 ? EACH - 2 : 1;
                rig_forward(&r, tiny_token + s * EACH + i, n, alone[s] + (size_t)i * TINY_VOCAB);
            }
        }
        assert_ok(kvl_session_bytes(r.session, &one));
        config.n_sequence = SEQUENCES;
        rig_session(&r, specs[k], config);
        for (uint32_t i = 0, n; i < EACH; i += n) {
            n = i == 0 ? EACH - 2 : 1;
            assert_ok(kvl_session_forward(r.session, token + i * SEQUENCES, n, n));
            for (uint32_t row = 0; row < n * SEQUENCES; row++)
                assert_ok(kvl_session_read_logits(r.session, row, together + (size_t)(i * SEQUENCES + row) * TINY_VOCAB));
        }
        assert_ok(kvl_session_bytes(r.session, &all));
        assert_int_equal(all.payload + all.scale, SEQUENCES * (one.payload + one.scale));
        assert_int_equal(all.bytes_per_token, one.bytes_per_token);
        double worst = 0.0;
        for (int i = 0; i < EACH; i++)
            for (int s = 0; s < SEQUENCES; s++)
                worst = larger(worst, largest_difference(together + (size_t)(i * SEQUENCES + s) * TINY_VOCAB, alone[s] + (size_t)i * TINY_VOCAB, TINY_VOCAB));
        print_message("    %s: %.1e\n", specs[k], worst);
        assert_true(worst < 2e-4); /* one row is a GEMV, several are a GEMM: they may sum in another order */
    }
    rig_free(&r);
}

/* Without --exact, the activations of a decode step may be rounded to 8 bits and attention is split over work-groups. */
static void fast_mode_stays_close(void **state)
{
    SKIP_IF_SLOW();
    enum { STEPS = 12 };
    static float exact[STEPS * TINY_VOCAB], fast[STEPS * TINY_VOCAB];
    const uint32_t rounds = 4; /* enough tokens for several splits */
    double squares = 0.0, error = 0.0;
    struct rig r = rig_load(TINY_MODEL);
    for (int mode = 0; mode < 2; mode++) {
        const struct kvl_session_config config = {
            .n_ctx = rounds * TINY_TOKENS + STEPS, .ubatch = TINY_TOKENS, .protocol = KVL_P2_WRITE_THEN_READ, .exact = mode == 0};
        rig_session(&r, "f16", config);
        for (uint32_t i = 0; i < rounds; i++) assert_ok(kvl_session_forward(r.session, tiny_token, TINY_TOKENS, 0));
        for (int i = 0; i < STEPS; i++) rig_forward(&r, tiny_token + i, 1, (mode == 0 ? exact : fast) + i * TINY_VOCAB);
    }
    for (int i = 0; i < STEPS * TINY_VOCAB; i++) {
        squares += (double)exact[i] * exact[i];
        error += ((double)fast[i] - exact[i]) * ((double)fast[i] - exact[i]);
    }
    print_message("    rms error %.1e of the logits' rms\n", sqrt(error / squares));
    assert_true(sqrt(error / squares) < 0.05);
    rig_free(&r);
}

/* ---- how tokens are batched must not matter ---- */

/* Kernels for one token and for many add in the same order: where a work-item is a vector the logits are equal to the bit.
 * Elsewhere compilers contract each kernel in their own way, and a code may flip. */
static void expect_same(const float *a, const float *b, double bound)
{
    const double worst = largest_difference(a, b, ALL_LOGITS);
    print_message("    largest difference %.1e\n", worst);
    assert_true(worst <= (kvl_device_caps(kvl_test_device)->float_width > 1 ? 0.0 : bound));
}

static void ubatch_does_not_matter_under_p1(void **state)
{
    SKIP_IF_SLOW();
    static const struct {
        const char *spec;
        double bound;
    } cases[] = {{"f32", 1e-4}, {"int8", 0.1}, {"int4 sink=4 tail=20", 1.0}};
    static const uint32_t ubatch[] = {7, 64, 512};
    static float one[ALL_LOGITS], many[ALL_LOGITS];
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_tokens(&r, cases[i].spec, KVL_P1_FAKE_QUANT, 1, one);
        for (size_t u = 0; u < sizeof ubatch / sizeof *ubatch; u++) {
            run_tokens(&r, cases[i].spec, KVL_P1_FAKE_QUANT, ubatch[u], many);
            expect_same(one, many, cases[i].bound);
        }
    }
    rig_free(&r);
}

/* Per-token codecs without a tail: everything up to a query is sealed when it reads. P4 is P2 one token at a time. */
static void protocols_agree_where_they_must(void **state)
{
    SKIP_IF_SLOW();
    static const char *const specs[] = {"f16", "int8", "int4"};
    static float p1[ALL_LOGITS], p2[ALL_LOGITS];
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        for (uint32_t u = 64; u <= 512; u += 448) {
            run_tokens(&r, specs[i], KVL_P1_FAKE_QUANT, u, p1);
            run_tokens(&r, specs[i], KVL_P2_WRITE_THEN_READ, u, p2);
            assert_memory_equal(p1, p2, sizeof p1);
        }
    run_tokens(&r, "int4 sink=4 tail=20", KVL_P2_WRITE_THEN_READ, 1, p1);
    run_tokens(&r, "int4 sink=4 tail=20", KVL_P4_STREAMING, 1, p2);
    assert_memory_equal(p1, p2, sizeof p1);
    run_tokens(&r, "int4 sink=4 tail=20", KVL_P1_FAKE_QUANT, 64, p1);
    expect_same(p1, p2, 1.0); /* with a unit of one token, p1's b(p) is what p4 has sealed */
    rig_free(&r);
}

/* ---- the cache against recomputation ---- */

/* Greedy continuation of the prompt to n tokens in all but the last one's forward pass; counts over the whole of it. */
static void generate(struct rig *r, bool cached, const int32_t *prompt, uint32_t n_prompt, int32_t *token, uint32_t n,
                     uint64_t *kv_computed)
{
    static float logits[TINY_VOCAB];
    struct kvl_counters counters;
    assert_ok(kvl_session_reset(r->session));
    memcpy(token, prompt, n_prompt * sizeof *token);
    *kv_computed = 0;
    for (uint32_t known = n_prompt; known < n; known++) {
        if (!cached) assert_ok(kvl_session_reset(r->session));
        const uint32_t position = kvl_session_position(r->session);
        assert_ok(kvl_session_forward(r->session, token + position, known - position, 1));
        assert_ok(kvl_session_read_logits(r->session, 0, logits));
        token[known] = largest_at(logits, TINY_VOCAB);
        kvl_session_counters(r->session, &counters);
        *kv_computed = cached ? counters.kv_computed : *kv_computed + counters.kv_computed;
    }
}

static void cache_and_recomputation_generate_the_same(void **state)
{
    SKIP_IF_SLOW();
    static const struct {
        const char *spec;
        enum kvl_protocol protocol;
        uint32_t ubatch, n_forward;
    } cases[] = {
        {"f32", KVL_P2_WRITE_THEN_READ, 128, 6},
        {"f32", KVL_P2_WRITE_THEN_READ, 128, 100},
        {"int4 sink=4 tail=20", KVL_P4_STREAMING, 1, 40},
    };
    int32_t with[101], without[101];
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint64_t n = cases[i].n_forward;
        uint64_t computed, recomputed;
        const struct kvl_session_config config = {
            .n_ctx = 100, .ubatch = cases[i].ubatch, .protocol = cases[i].protocol, .exact = true};
        rig_session(&r, cases[i].spec, config);
        generate(&r, true, tiny_token, 1, with, cases[i].n_forward + 1, &computed);
        generate(&r, false, tiny_token, 1, without, cases[i].n_forward + 1, &recomputed);
        assert_memory_equal(with, without, (n + 1) * sizeof *with);
        assert_int_equal(computed, n);
        assert_int_equal(recomputed, n * (n + 1) / 2);
    }
    rig_free(&r);
}

static void greedy_tokens_are_those_of_float64(void **state)
{
    SKIP_IF_SLOW();
    int32_t token[TINY_PROMPT + TINY_GREEDY];
    uint64_t computed;
    struct rig r = rig_load(TINY_MODEL);
    const struct kvl_session_config config = {.n_ctx = 64, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
    rig_session(&r, "f32", config);
    generate(&r, true, tiny_token, TINY_PROMPT, token, TINY_PROMPT + TINY_GREEDY, &computed);
    assert_memory_equal(token + TINY_PROMPT, tiny_greedy, sizeof tiny_greedy);
    rig_free(&r);
}

/* ---- what is stored is never touched again ---- */

/* FNV-1a over every sealed slot as attention reads it and over the bytes of every full page. */
static uint64_t hash_sealed(struct rig *r, uint32_t n_sealed)
{
    static float rows[TINY_KV_HEADS * TINY_TOKENS * TINY_HEAD_DIM];
    static uint8_t page_bytes[1 << 16];
    uint64_t hash = 0xcbf29ce484222325u;
    struct kvl_cache *cache = kvl_session_cache(r->session);
    for (uint32_t l = 0; l < TINY_LAYERS; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            const struct kvl_layer_plan *layer = &kvl_cache_plan(cache)->layer[l];
            const uint32_t n_rows = n_sealed - layer->sink, n_pages = n_rows / layer->side[s].dims.page_tokens;
            assert_ok(kvl_cache_read_rows(cache, l, s, layer->sink, n_rows, rows));
            for (size_t i = 0; i < n_rows * sizeof *rows * TINY_KV_HEADS * TINY_HEAD_DIM; i++)
                hash = (hash ^ ((const uint8_t *)rows)[i]) * 0x100000001b3u;
            assert_true(layer->side[s].page_bytes <= sizeof page_bytes);
            for (uint32_t h = 0; h < TINY_KV_HEADS; h++)
                for (uint32_t p = 0; p < n_pages; p++) {
                    assert_ok(kvl_cache_read_page(cache, l, s, h, p, page_bytes));
                    for (uint64_t i = 0; i < layer->side[s].page_bytes; i++) hash = (hash ^ page_bytes[i]) * 0x100000001b3u;
                }
        }
    return hash;
}

static void sealed_rows_are_never_touched_again(void **state)
{
    SKIP_IF_SLOW();
    static const struct {
        const char *spec;
        enum kvl_protocol protocol;
        uint32_t ubatch, tail;
    } cases[] = {
        {"f32", KVL_P2_WRITE_THEN_READ, 24, 0},
        {"f16", KVL_P1_FAKE_QUANT, 24, 0},
        {"int8", KVL_P4_STREAMING, 1, 0},
        {"int4 sink=4 tail=20", KVL_P2_WRITE_THEN_READ, 24, 20},
        {"int4 sink=4 tail=20", KVL_P1_FAKE_QUANT, 7, 0},
    };
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint32_t first = 96, n_sealed = first - cases[i].tail;
        const struct kvl_session_config config = {
            .n_ctx = TINY_TOKENS, .ubatch = cases[i].ubatch, .protocol = cases[i].protocol, .exact = true};
        rig_session(&r, cases[i].spec, config);
        assert_ok(kvl_session_forward(r.session, tiny_token, first, 0));
        const uint64_t before = hash_sealed(&r, n_sealed);
        assert_ok(kvl_session_forward(r.session, tiny_token + first, 24, 0));
        assert_int_equal(hash_sealed(&r, n_sealed), before);
        for (uint32_t p = first + 24; p < TINY_TOKENS; p++) assert_ok(kvl_session_forward(r.session, tiny_token + p, 1, 0));
        assert_int_equal(hash_sealed(&r, n_sealed), before);
        assert_int_not_equal(hash_sealed(&r, n_sealed - 1), before);
    }
    rig_free(&r);
}

/* ---- memory and limits ---- */

static void window_memory_is_flat(void **state)
{
    SKIP_IF_SLOW();
    enum { SHORT = 256, LONG = 1024, PIECE = 128 };
    struct kvl_cache_bytes first, now, resident[2];
    struct rig r = rig_load(TINY_MODEL);
    for (uint32_t n_ctx = SHORT; n_ctx <= LONG; n_ctx += LONG - SHORT) {
        const struct kvl_session_config config = {.n_ctx = n_ctx, .ubatch = 32, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
        rig_session(&r, "f32 " TINY_WINDOW, config);
        for (uint32_t p = 0; p < n_ctx; p += PIECE) {
            assert_ok(kvl_session_forward(r.session, tiny_token, PIECE, 0));
            assert_ok(kvl_session_bytes(r.session, &now));
            if (p == 0) continue; /* the ring of pages is not full yet */
            if (p == PIECE && n_ctx == SHORT) first = now;
            assert_int_equal(now.payload, first.payload);
            assert_int_equal(now.resident, first.resident);
        }

        rig_session(&r, "f32", config);
        assert_ok(kvl_session_bytes(r.session, &resident[n_ctx == LONG]));
    }
    assert_int_equal(resident[1].resident, LONG / SHORT * resident[0].resident); /* without the window */
    rig_free(&r);
}

static void expect_usage(kvl_status status, const char *words)
{
    assert_int_equal(status, KVL_E_USAGE);
    if (strstr(kvl_error_text(), words) == NULL) fail_msg("\"%s\" lacks \"%s\"", kvl_error_text(), words);
    kvl_error_clear();
}

/* A refused call says why and leaves the session as it was. */
static void refusals_are_clean(void **state)
{
    static float logits[TINY_VOCAB], again[TINY_VOCAB];
    const int32_t too_large = TINY_VOCAB, negative = -1;
    struct rig r = rig_load(TINY_MODEL);
    struct kvl_session *session = NULL;
    rig_session(&r, "f16",
                (struct kvl_session_config){.n_ctx = 100, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true});
    rig_forward(&r, tiny_token, 1, again);
    assert_ok(kvl_session_forward(r.session, tiny_token + 1, 89, 1));
    expect_usage(kvl_session_forward(r.session, tiny_token, 11, 1), "100");
    expect_usage(kvl_session_forward(r.session, tiny_token, 2, 2), "logits");
    expect_usage(kvl_session_forward(r.session, &too_large, 1, 1), "257");
    expect_usage(kvl_session_forward(r.session, &negative, 1, 1), "-1");
    assert_int_equal(kvl_session_position(r.session), 90);
    assert_ok(kvl_session_forward(r.session, tiny_token + 90, 10, 1));
    assert_ok(kvl_session_read_logits(r.session, 0, logits));
    assert_int_equal(kvl_session_position(r.session), 100);
    expect_usage(kvl_session_forward(r.session, tiny_token, 1, 0), "100");

    rig_session(&r, "f16",
                (struct kvl_session_config){.n_ctx = 100, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true});
    assert_ok(kvl_session_forward(r.session, tiny_token, 90, 1));
    assert_ok(kvl_session_forward(r.session, tiny_token + 90, 10, 1));
    assert_ok(kvl_session_read_logits(r.session, 0, again));
    assert_true(largest_difference(logits, again, TINY_VOCAB) < 1e-4);

    struct kvl_session_config config = {.spec = r.spec, .n_ctx = r.model->dims.n_ctx_train + 1, .ubatch = 64, .exact = true};
    expect_usage(kvl_session_new(r.weights, &config, &session), "2048");
    config.allow_long = true;
    assert_ok(kvl_session_new(r.weights, &config, &session));
    kvl_session_free(&session);
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(exact_mode_equals_float64),
    cmocka_unit_test(sequences_in_step_equal_one),
    cmocka_unit_test(fast_mode_stays_close),
    cmocka_unit_test(ubatch_does_not_matter_under_p1),
    cmocka_unit_test(protocols_agree_where_they_must),
    cmocka_unit_test(cache_and_recomputation_generate_the_same),
    cmocka_unit_test(greedy_tokens_are_those_of_float64),
    cmocka_unit_test(sealed_rows_are_never_touched_again),
    cmocka_unit_test(window_memory_is_flat),
    cmocka_unit_test(refusals_are_clean),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
