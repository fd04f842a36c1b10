/* Eviction on the device: real bytes of ragged heads, the peak while a prompt is compressed, what is stored, and the edges of budgets and prompts.
 * The scores' and the logits' answers are kvpress's: tests/golden. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "prompt.h"
#include "rng.h"
#include "select.h"

enum { PROMPT = 150, NEXT = 6, ALL = PROMPT + NEXT, MOST_VOCAB = 1024 };

static int32_t token[ALL];

static void make_tokens(const struct rig *r)
{
    for (uint64_t i = 0; i < ALL; i++) token[i] = (int32_t)(kvl_rng_u64(7, i) % r->model->dims.n_vocab);
}

static void start(struct rig *r, const char *spec, bool exact)
{
    rig_session(r, spec, (struct kvl_session_config){.n_ctx = ALL, .ubatch = 64, .protocol = KVL_P3_PREFILL_EXACT, .exact = exact, .max_logits = 1});
}

/* The prompt, then some tokens one by one; logits of the last, which must be finite. */
static void run(struct rig *r, uint32_t prompt, float *logits)
{
    assert_ok(kvl_session_forward(r->session, token, prompt, 1));
    for (uint32_t i = 0; i < NEXT; i++) rig_forward(r, token + prompt + i, 1, logits);
    for (uint32_t i = 0; i < r->model->dims.n_vocab; i++) assert_true(isfinite(logits[i]));
}

/* Payload and scales are those of the tokens each head has, no more; resident is what the buffers hold. */
static void check_bytes(struct rig *r, uint32_t later)
{
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(r->session));
    struct kvl_cache_bytes bytes;
    uint64_t wanted = 0;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
        const struct kvl_selection *kept = kvl_session_kept(r->session, l);
        for (uint32_t h = 0; h < plan->dims.n_kv_head; h++)
            for (int s = 0; s < KVL_SIDES; s++) {
                const struct kvl_layer_plan *layer = &plan->layer[l];
                const uint32_t held = kept->offset[h + 1] - kept->offset[h] + later, sealed = kvl_sealed_end(layer, &layer->side[s], held);
                struct kvl_codec_bytes used;
                assert_ok(kvl_side_bytes(&layer->side[s], sealed - layer->sink, &used));
                wanted += used.payload + used.scale + (held < layer->sink ? held : held - sealed + layer->sink) * layer->side[s].exact_row_bytes;
            }
    }
    assert_ok(kvl_session_bytes(r->session, &bytes));
    assert_int_equal(bytes.payload + bytes.scale, wanted);
    assert_int_equal(bytes.payload + bytes.scale + bytes.index + bytes.table + bytes.slack, bytes.resident);
    assert_int_equal(bytes.resident, kvl_cache_resident(kvl_session_cache(r->session)));
    assert_true(bytes.peak <= bytes.resident + plan->prompt_bytes); /* one layer in full precision and the compressed rest */
}

/* The plan's bound is for a prompt that takes all positions; this one nearly does. */
static void check_bound(struct rig *r)
{
    const struct kvl_cache *cache = kvl_session_cache(r->session);
    assert_true(kvl_cache_resident(cache) <= kvl_cache_plan(cache)->resident_bytes);
}

/* The prompt's queries read all tokens before them, later ones what is left: the mean over the layers. */
static void check_counters(struct rig *r)
{
    struct kvl_counters counters;
    const uint32_t n_layer = r->model->dims.n_layer;
    uint64_t wanted = (uint64_t)n_layer * PROMPT * (PROMPT + 1) / 2;
    kvl_session_counters(r->session, &counters);
    for (uint32_t l = 0; l < n_layer; l++) {
        const struct kvl_selection *layer = kvl_session_kept(r->session, l);
        for (uint64_t i = 0; i < NEXT; i++) wanted += layer->offset[layer->n_kv_head] / layer->n_kv_head + i + 1;
    }
    assert_int_equal(counters.kv_tokens_read, wanted / n_layer);
    assert_int_equal(counters.tokens, PROMPT + NEXT);
}

static void bytes_are_those_of_the_kept_tokens(void **state)
{
    static const char *const specs[] = {"f16", "int8 keep=knorm budget=ada(removed=0.5)", "k=int4 v=f16 keep=snapkv(window=16) budget=ada(kept=0.2)",
                                        "int8 sink=4 tail=8 keep=tova budget=uniform(kept=0.25)", "kivi keep=keydiff budget=ada(kept=0.6)",
                                        "int8 keep=knorm budget=uniform(kept=0.5) @1-1 keep=none budget=none"};
    float logits[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    make_tokens(&r);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        struct kvl_ledger ledger;
        struct kvl_cache_bytes bytes;
        start(&r, specs[i], false);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
        check_bytes(&r, 0);
        check_bound(&r);
        assert_ok(kvl_session_reset(r.session));
        run(&r, PROMPT, logits);
        check_counters(&r);
        check_bytes(&r, NEXT);
        kvl_ledger_read(kvl_test_device, &ledger);
        assert_ok(kvl_session_bytes(r.session, &bytes));
        assert_int_equal(ledger.bytes[KVL_MEM_PAYLOAD], bytes.payload); /* the ledger fell for real */
        assert_int_equal(ledger.bytes[KVL_MEM_SLACK], bytes.slack);
    }
    rig_free(&r);
}

/* By hand, for heads that keep different numbers: the ledger's payload and scales are the kept tokens' rows, and page slack comes on top. */
static void the_ledger_is_the_sum_over_heads(void **state)
{
    static const struct {
        const char *spec;
        uint32_t payload_row, scale_row; /* bytes of a token of one head, both sides, for 32 channels */
    } cases[] = {{"f16 keep=knorm budget=ada(kept=0.5,safeguard=0)", 2 * 64, 0}, {"int8 keep=snapkv(window=16) budget=ada(removed=0.7)", 2 * 32, 2 * 4},
                 {"k=int4 v=int8 keep=keydiff budget=ada(kept=0.3)", 16 + 32, 2 * 4}};
    struct rig r = rig_load(TINY_MODEL);
    make_tokens(&r);
    assert_int_equal(r.model->dims.head_dim, 32);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kvl_ledger ledger;
        uint64_t kept = 0, unequal = 0, whole_pages = 0;
        start(&r, cases[i].spec, false);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 0));
        const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(r.session));
        for (uint32_t l = 0; l < r.model->dims.n_layer; l++) {
            const uint32_t *offset = kvl_session_kept(r.session, l)->offset;
            for (uint32_t h = 0; h < r.model->dims.n_kv_head; h++) {
                const uint32_t n = offset[h + 1] - offset[h];
                kept += n;
                unequal += n != offset[1];
                for (int s = 0; s < KVL_SIDES; s++) {
                    const struct kvl_side_plan *side = &plan->layer[l].side[s];
                    whole_pages += (n + side->dims.page_tokens - 1) / side->dims.page_tokens * side->page_bytes;
                }
            }
        }
        assert_true(unequal > 0);
        kvl_ledger_read(kvl_test_device, &ledger);
        struct kvl_cache_bytes bytes;
        assert_ok(kvl_session_bytes(r.session, &bytes));
        kvl_ledger_read(kvl_test_device, &ledger);
        assert_int_equal(ledger.bytes[KVL_MEM_PAYLOAD], kept * cases[i].payload_row);
        assert_int_equal(ledger.bytes[KVL_MEM_SCALE], kept * cases[i].scale_row);
        assert_true(ledger.bytes[KVL_MEM_SLACK] + kept * (cases[i].payload_row + cases[i].scale_row) >= whole_pages);
    }
    rig_free(&r);
}

/* A prompt of 8192 tokens: while it is compressed there is never more than one layer's rows in full precision beside what layers have kept. */
static void the_peak_of_a_long_prompt(void **state)
{
    enum { LONG = 8192 };
    struct rig r = rig_load(TINY_MODEL);
    const struct kvl_dims *dims = &r.model->dims;
    struct kvl_cache_bytes bytes;
    int32_t *tokens = calloc(LONG, sizeof *tokens);
    if (kvl_device_is_slow()) goto done;
    for (uint64_t i = 0; i < LONG; i++) tokens[i] = (int32_t)(kvl_rng_u64(9, i) % dims->n_vocab);
    rig_session(&r, "int8 keep=snapkv budget=ada(removed=0.75)",
                (struct kvl_session_config){.n_ctx = LONG + 64, .ubatch = 512, .protocol = KVL_P3_PREFILL_EXACT, .allow_long = true});
    assert_ok(kvl_session_forward(r.session, tokens, LONG, 1));
    assert_ok(kvl_session_bytes(r.session, &bytes));
    const uint64_t rows = (uint64_t)KVL_SIDES * dims->n_kv_head * LONG, layer_rows = rows * (dims->head_dim * 2 + 0ull);
    const uint64_t page_entries = rows / 64 * sizeof(uint64_t);
    print_message("    peak %llu bytes: a layer's rows are %llu, the compressed cache %llu\n", (unsigned long long)bytes.peak,
                  (unsigned long long)layer_rows, (unsigned long long)bytes.resident);
    assert_true(bytes.peak <= layer_rows + page_entries + bytes.resident);
    assert_true(bytes.peak >= layer_rows); /* the rows were counted */
    assert_true(bytes.payload + bytes.scale < dims->n_layer * layer_rows / 4); /* a quarter of the tokens at half the bytes, and scales */
done:
    free(tokens);
    rig_free(&r);
}

/* Nothing evicted: the same logits as without any of this. */
static void keeping_all_changes_nothing(void **state)
{
    static const char *const specs[] = {"keep=knorm budget=uniform(kept=1)", "keep=snapkv(window=8) budget=ada(tokens=100000)", "",
                                        "sink=4 tail=30 keep=tova budget=pyramid(kept=1)", "keep=streaming budget=uniform(kept=1) pos=compact",
                                        "rope=pre keep=streaming budget=uniform(kept=1) pos=compact", "rot=hadamard korder=hf keep=knorm budget=uniform(kept=1)"};
    float wanted[MOST_VOCAB], got[MOST_VOCAB];
    char spec[256];
    struct rig r = rig_load(TINY_MODEL);
    make_tokens(&r);
    rig_session(&r, "f32", (struct kvl_session_config){.n_ctx = ALL, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true, .max_logits = 1});
    run(&r, PROMPT, wanted);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        snprintf(spec, sizeof spec, "f32 %s", specs[i]);
        start(&r, spec, true);
        run(&r, PROMPT, got);
        const double difference = largest_difference(got, wanted, r.model->dims.n_vocab);
        if (difference > 1e-4) fail_msg("%s: logits differ by %g", spec, difference);
    }
    rig_free(&r);
}

/* Rows of a side that a full cache holds, [H][PROMPT][D], in full precision. */
static float *exact_rows(struct rig *r, uint32_t l, enum kvl_side side)
{
    const struct kvl_dims *dims = &r->model->dims;
    float *rows = calloc((size_t)dims->n_kv_head * PROMPT * dims->head_dim, sizeof *rows);
    assert_ok(kvl_cache_read_rows(kvl_session_cache(r->session), l, side, 0, PROMPT, rows));
    return rows;
}

/* x and decoded [n][H][D]: what the codec's C reference makes of rows, page by page. */
static void encode_decode(const struct kvl_side_plan *side, uint32_t n, uint32_t heads, const float *x, float *decoded)
{
    const uint32_t d = side->dims.head_dim, page = side->dims.page_tokens;
    uint8_t *block = malloc(side->page_bytes);
    float *rows = calloc((size_t)page * d, sizeof *rows);
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t t0 = 0; t0 < n; t0 += page) {
            const uint32_t count = n - t0 < page ? n - t0 : page;
            for (uint32_t i = 0; i < count; i++) memcpy(rows + (size_t)i * d, x + ((size_t)(t0 + i) * heads + h) * d, d * sizeof *rows);
            memset(block, 0, side->page_bytes);
            assert_int_equal(side->codec->ref_encode(side->priv, &side->dims, NULL, 0, count, rows, block), 0);
            assert_int_equal(side->codec->ref_decode(side->priv, &side->dims, NULL, 0, count, block, rows), 0);
            for (uint32_t i = 0; i < count; i++) memcpy(decoded + ((size_t)(t0 + i) * heads + h) * d, rows + (size_t)i * d, d * sizeof *rows);
        }
    free(block), free(rows);
}

/* Kept tokens are encoded once, after selection: what is stored is the reference's encoding of the exact rows that stayed, in their order. */
static void stored_rows_are_the_kept_ones(void **state)
{
    static const char *const codecs[] = {"int8", "int4(group=16)", "q4_0", "fp8_e4m3"};
    struct rig full = rig_load(TINY_MODEL), r = rig_load(TINY_MODEL);
    const uint32_t d = r.model->dims.head_dim, heads = r.model->dims.n_kv_head;
    char spec[128];
    make_tokens(&r);
    start(&full, "f32", true);
    assert_ok(kvl_session_forward(full.session, token, PROMPT, 0));
    for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++) {
        snprintf(spec, sizeof spec, "%s keep=keydiff budget=uniform(removed=0.4)", codecs[c]);
        start(&r, spec, true);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 0));
        struct kvl_cache *cache = kvl_session_cache(r.session);
        for (uint32_t l = 0; l < r.model->dims.n_layer; l++)
            for (int s = 0; s < KVL_SIDES; s++) {
                const struct kvl_selection *kept = kvl_session_kept(r.session, l);
                const uint32_t n = kept->offset[1];
                float *exact = exact_rows(&full, l, s), *chosen = calloc((size_t)n * heads * d, sizeof *chosen);
                float *wanted = calloc((size_t)n * heads * d, sizeof *wanted), *got = calloc((size_t)n * heads * d, sizeof *got);
                for (uint32_t h = 0; h < heads; h++)
                    for (uint32_t i = 0; i < n; i++)
                        memcpy(chosen + ((size_t)i * heads + h) * d, exact + ((size_t)h * PROMPT + kept->token[kept->offset[h] + i]) * d, d * sizeof *chosen);
                encode_decode(&kvl_cache_plan(cache)->layer[l].side[s], n, heads, chosen, wanted); /* [n][H][D] */
                assert_ok(kvl_cache_read_rows(cache, l, s, 0, n, got));                          /* [H][n][D] */
                for (uint32_t h = 0; h < heads; h++)
                    for (uint32_t i = 0; i < n; i++)
                        for (uint32_t j = 0; j < d; j++) assert_true(got[((size_t)h * n + i) * d + j] == wanted[((size_t)i * heads + h) * d + j]);
                free(exact), free(chosen), free(wanted), free(got);
            }
    }
    rig_free(&full);
    rig_free(&r);
}

static void edges_of_budgets_and_prompts(void **state)
{
    static const char *const policies[] = {
        "keep=knorm budget=uniform(tokens=0)",  "keep=knorm budget=uniform(tokens=1)",      "keep=knorm budget=uniform(tokens=9999)",
        "keep=snapkv(window=1000) budget=uniform(kept=0.5)", "keep=tova budget=ada(kept=0.1,safeguard=0)", "sink=4 keep=random budget=uniform(tokens=2)",
        "sink=4 tail=16 keep=h2o budget=uniform(tokens=3)",  "keep=streaming(sink=0) budget=uniform(tokens=5) pos=compact",
        "keep=chunk(of=snapkv(window=4),size=64) budget=uniform(kept=0.1)", "keep=critical(of=knorm) budget=ada(kept=0.5)"};
    static const uint32_t prompts[] = {1, 2, 65, PROMPT};
    float logits[MOST_VOCAB];
    char spec[256];
    struct rig r = rig_load(TINY_MODEL);
    make_tokens(&r);
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i += kvl_device_is_slow() ? 4 : 1) {
        snprintf(spec, sizeof spec, "int8 %s", policies[i]);
        start(&r, spec, false);
        for (size_t p = 0; p < sizeof prompts / sizeof *prompts; p++) {
            if (kvl_device_is_slow() && p % 2 == 0) continue;
            assert_ok(kvl_session_reset(r.session));
            run(&r, prompts[p], logits);
            check_bytes(&r, NEXT);
        }
    }
    rig_free(&r);
}

static void what_cannot_be_is_refused(void **state)
{
    struct rig r = rig_load(TINY_MODEL);
    struct kvl_spec *spec;
    struct kvl_session *session = NULL;
    assert_ok(kvl_spec_parse("keep=knorm budget=uniform(kept=0.5)", &spec));
    struct kvl_session_config config = {.spec = spec, .n_ctx = ALL, .ubatch = 64, .protocol = KVL_P1_FAKE_QUANT};
    assert_int_equal(kvl_session_new(r.weights, &config, &session), KVL_E_USAGE);
    assert_non_null(strstr(kvl_error_text(), "compress-then-score"));
    kvl_error_clear();
    kvl_spec_free(&spec);
    start(&r, "keep=knorm budget=uniform(kept=0.5)", false);
    make_tokens(&r);
    assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
    assert_int_equal(kvl_session_rewind(r.session, 3), KVL_SKIP);
    kvl_error_clear();
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(the_ledger_is_the_sum_over_heads),   cmocka_unit_test(the_peak_of_a_long_prompt),
    cmocka_unit_test(bytes_are_those_of_the_kept_tokens), cmocka_unit_test(keeping_all_changes_nothing),
    cmocka_unit_test(stored_rows_are_the_kept_ones),      cmocka_unit_test(edges_of_budgets_and_prompts),
    cmocka_unit_test(what_cannot_be_is_refused),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
