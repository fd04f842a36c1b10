/* Eviction while tokens are decoded, on every device: against the C specification for every codec whose tokens can move, against answers of numpy, against
 * recomputation with positions from 0 on; bytes, edges of budgets, and what is refused. */
#include "kernel/test_harness.h"
#include "decode_answers.h"
#include "decode_bench.h"
#include "select.h"
#include "session_rig.h"
#include <math.h>

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Head h's tokens, by age. */
static uint32_t held_of(struct bench *b, uint32_t h, uint32_t *position)
{
    const uint32_t n = kvl_cache_places(b->cache, 0, h);
    assert_ok(kvl_cache_positions(b->cache, 0, h, position));
    qsort(position, n, sizeof *position, ascending);
    return n;
}

/* Reserved = plan = sum of classes = ledger; what is counted as a token's bytes is what the heads have. */
static void check_bytes(struct bench *b)
{
    uint64_t bytes[KVL_MEM_CLASSES], total = 0, tokens = 0;
    struct kvl_ledger ledger;
    assert_ok(kvl_cache_bytes(b->cache, bytes));
    for (int c = 0; c < KVL_MEM_CLASSES; c++) total += bytes[c];
    assert_int_equal(total, b->plan.resident_bytes + b->plan.scratch_bytes);
    kvl_ledger_read(kvl_test_device, &ledger);
    assert_int_equal(ledger.total, total + kvl_buffer_bytes(b->stage) + kvl_buffer_bytes(b->rotary) + kvl_buffer_bytes(b->out));
    const struct kvl_layer_plan *layer = &b->plan.layer[0];
    for (uint32_t h = 0; h < b->dims.n_kv_head; h++)
        for (int s = 0; s < KVL_SIDES; s++) {
            const uint32_t held = kvl_cache_places(b->cache, 0, h), sealed = kvl_sealed_end(layer, &layer->side[s], held);
            struct kvl_codec_bytes used;
            assert_ok(kvl_side_bytes(&layer->side[s], sealed > layer->sink ? sealed - layer->sink : 0, &used));
            tokens += used.payload + used.scale + (held < layer->sink ? held : held - sealed + layer->sink) * layer->side[s].exact_row_bytes;
        }
    assert_int_equal(bytes[KVL_MEM_PAYLOAD] + bytes[KVL_MEM_SCALE], tokens);
}

static const struct kvl_cache_dims dims_smol = {1, 9, 3, 64}, dims_tiny = {1, 6, 2, 16}, dims_one = {1, 2, 1, 128}, dims_odd = {1, 4, 2, 24};

static const struct row {
    const char *spec;
    const struct kvl_cache_dims *dims;
    uint32_t n_tokens, rope_dim;
} rows[] = {
    {"f32 keep=h2o budget=uniform(tokens=70) when=full", &dims_smol, 150, 64},
    {"f16 keep=tova budget=uniform(tokens=33) when=full", &dims_smol, 120, 64},
    {"int8 keep=h2o budget=uniform(tokens=40) when=full", &dims_tiny, 120, 16},
    {"int4(group=16) sink=4 tail=20 keep=h2o budget=uniform(tokens=50) when=full", &dims_tiny, 150, 16},
    {"k=int3 v=int2(sym) sink=2 keep=tova budget=uniform(tokens=30) when=every:7", &dims_smol, 90, 64},
    {"q8_0 keep=h2o(recent=0.2) budget=uniform(kept=0.3) when=every:16", &dims_smol, 130, 64},
    {"k=q5_1 v=q5_0 keep=h2o budget=uniform(tokens=40) when=full", &dims_smol, 90, 64},
    {"k=q4_1 v=iq4_nl tail=5 keep=h2o budget=uniform(tokens=40) when=full", &dims_one, 90, 128},
    {"q4_0 keep=h2o budget=uniform(tokens=40) when=full", &dims_one, 90, 128},
    {"k=fp8_e4m3 v=fp8_e5m2 keep=tova budget=uniform(tokens=40) when=full", &dims_odd, 90, 24},
    {"turboquant(bits=2) rot=random keep=h2o budget=uniform(tokens=40) when=full", &dims_smol, 90, 64},
    {"k=turboquant(bits=4,sketch=sign) v=turboquant keep=h2o budget=uniform(tokens=40) when=full", &dims_smol, 90, 64},
    {"kvquant(outliers=5) table=random keep=h2o budget=uniform(tokens=40) when=full", &dims_smol, 90, 64},
    {"int4(group=16,e4m3) keep=h2o budget=uniform(tokens=40) when=full", &dims_tiny, 90, 16},
    {"k=think(recent=0) v=f32 table=random keep=h2o budget=uniform(tokens=40) when=full", &dims_smol, 90, 64},
    {"f32 rope=pre pos=compact keep=h2o budget=uniform(tokens=40) when=full", &dims_smol, 120, 64},
    {"int8 rope=pre rot=hadamard korder=hf sink=3 tail=7 pos=compact keep=tova budget=uniform(tokens=40) when=every:5", &dims_tiny, 120, 16},
    {"f16 keep=keydiff budget=uniform(tokens=33) when=full", &dims_smol, 120, 64},
    {"int4(group=16) sink=4 tail=20 keep=keydiff budget=uniform(tokens=50) when=every:16", &dims_tiny, 150, 16},
    {"k=int8 v=int4 rot=hadamard korder=hf keep=keydiff budget=uniform(kept=0.4) when=every:10", &dims_one, 110, 128},
    {"f16 keep=h2o budget=uniform(tokens=1) when=full", &dims_tiny, 40, 16},
    {"f16 keep=h2o budget=uniform(tokens=0) when=full", &dims_tiny, 40, 16}, /* a head that keeps nothing: each query sees its own token */
    {"f16 sink=4 tail=9 keep=h2o budget=uniform(tokens=3) when=full", &dims_tiny, 60, 16}, /* what cannot go stays */
    {"f16 keep=tova budget=uniform(tokens=500) when=full", &dims_tiny, 60, 16},            /* fewer tokens than the budget */
};

/* Which tokens have gone, and when, and what of the newest query's attention they got. */
static void compare_gone(struct bench *b, const char *spec, uint32_t h, uint32_t n_gone, const struct kvl_gone *want)
{
    struct kvl_gone *got = calloc(b->plan.gone_room + 1, sizeof *got);
    uint32_t n;
    assert_ok(kvl_cache_gone(b->cache, 0, h, got, &n));
    assert_int_equal(n, n_gone);
    for (uint32_t i = 0; i < n; i++)
        if (got[i].seen != want[i].seen || got[i].position != want[i].position || !(isnan(want[i].mass) ? isnan(got[i].mass) : fabs(got[i].mass - want[i].mass) < 1e-5))
            fail_msg("%s: head %u, token %u to go: %u behind %u with %g, not %u behind %u with %g", spec, h, i, got[i].position, got[i].seen, got[i].mass,
                     want[i].position, want[i].seen, want[i].mass);
    free(got);
}

static void run_row(const struct row *row)
{
    struct bench b = {.dims = *row->dims, .n_tokens = row->n_tokens, .rope_dim = row->rope_dim};
    uint32_t n_held[8], n_gone[8], *held = calloc((size_t)row->dims->n_kv_head * row->n_tokens, sizeof *held), *got = calloc(row->n_tokens, sizeof *got);
    struct kvl_gone *gone = calloc((size_t)row->dims->n_kv_head * row->n_tokens, sizeof *gone);
    open_bench(&b, row->spec);
    random_rows(&b);
    feed(&b);
    const struct kvl_reference_scores scores = {&b.model, b.w_o, NULL};
    assert_ok(kvl_reference_evict(&b.plan, 0, b.n_tokens, b.q, b.k, b.v, (struct kvl_rope){b.angles, b.rope_dim}, &scores, b.want, n_held, held, n_gone, gone));
    const double worst = largest_difference(b.got + q_row(&b), b.want + q_row(&b), (b.n_tokens - 1) * q_row(&b));
    print_message("    %-100s largest difference %.2e\n", row->spec, worst);
    for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
        assert_int_equal(held_of(&b, h, got), n_held[h]);
        for (uint32_t i = 0; i < n_held[h]; i++)
            if (got[i] != held[(size_t)h * b.n_tokens + i]) fail_msg("%s: head %u has token %u, not %u", row->spec, h, got[i], held[(size_t)h * b.n_tokens + i]);
    }
    assert_true(worst < 3e-5);
    for (uint32_t h = 0; h < b.dims.n_kv_head; h++) compare_gone(&b, row->spec, h, n_gone[h], gone + (size_t)h * b.n_tokens);
    check_bytes(&b);
    close_bench(&b);
    free(held), free(got), free(gone);
}

static void device_equals_reference(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i += kvl_row_step(4))
        if (kvl_row_is_wanted(rows[i].spec)) run_row(&rows[i]);
}

/* Scores that are found when a token is stored: which tokens are left follows from the scores' C references. */
static void stored_scores_are_the_references(void **state)
{
    static const char *const specs[] = {"knorm", "streaming(sink=3)", "random(seed=5,sink=2,window=9)", "random_raw(seed=1)"};
    uint32_t got[90];
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        struct bench b = {.dims = dims_tiny, .n_tokens = 90, .rope_dim = 16};
        char spec[128];
        struct kvl_selection selection;
        snprintf(spec, sizeof spec, "f16 keep=%s budget=uniform(tokens=30) when=full", specs[i]);
        open_bench(&b, spec);
        random_rows(&b);
        feed(&b);
        float *k = calloc(b.n_tokens * kv_row(&b), sizeof *k); /* [H][T][D]; RoPE does not change norms */
        for (uint32_t t = 0; t < b.n_tokens; t++)
            for (uint32_t h = 0; h < b.dims.n_kv_head; h++)
                memcpy(k + ((size_t)h * b.n_tokens + t) * b.dims.head_dim, b.k + t * kv_row(&b) + (size_t)h * b.dims.head_dim, b.dims.head_dim * sizeof *k);
        struct kvl_score_input in = {.struct_size = sizeof in, .n_layer = 1, .n_token = b.n_tokens, .n_head = b.dims.n_head, .n_kv_head = b.dims.n_kv_head,
                                     .head_dim = b.dims.head_dim, .k = k};
        assert_ok(kvl_select_layer(kvl_spec_layer(b.spec, 0), &in, b.plan.bytes_per_token, &selection));
        for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
            assert_int_equal(held_of(&b, h, got), 30);
            for (uint32_t j = 0; j < 30; j++)
                if (got[j] != selection.token[selection.offset[h] + j])
                    fail_msg("%s: head %u has token %u, not %u", specs[i], h, got[j], selection.token[selection.offset[h] + j]);
        }
        kvl_selection_free(&selection);
        free(k);
        close_bench(&b);
    }
}

/* Kept sets and outputs of scripts/make_decode_answers.py, which shares no code with kvlab. */
static void numpy_agrees(void **state)
{
    uint32_t got[DECODE_TOKENS];
    for (size_t i = 0; i < sizeof decode_answers / sizeof *decode_answers; i++) {
        const struct decode_answer *a = &decode_answers[i];
        struct bench b = {.dims = {1, DECODE_HEADS * DECODE_GROUP, DECODE_HEADS, DECODE_DIM}, .n_tokens = DECODE_TOKENS, .rope_dim = DECODE_DIM};
        open_bench(&b, a->spec);
        answer_rows(&b);
        feed(&b);
        for (uint32_t h = 0; h < DECODE_HEADS; h++) {
            assert_int_equal(held_of(&b, h, got), a->n_held);
            for (uint32_t j = 0; j < a->n_held; j++) assert_int_equal(got[j], a->held[h][j]);
        }
        for (uint32_t h = 0; h < DECODE_HEADS; h++) {
            struct kvl_gone gone[DECODE_TOKENS];
            uint32_t n;
            assert_ok(kvl_cache_gone(b.cache, 0, h, gone, &n));
            assert_int_equal(n, a->n_gone);
            for (uint32_t j = 0; j < DECODE_GONE; j++) {
                const struct kvl_gone *last = &gone[n - DECODE_GONE + j];
                assert_true(last->seen == a->gone[h][j].seen && last->position == a->gone[h][j].position);
                assert_true(isnan(a->gone[h][j].mass) ? isnan(last->mass) : fabs(last->mass - a->gone[h][j].mass) < 1e-6);
            }
        }
        const double worst = largest_difference(b.got + (b.n_tokens - 1) * q_row(&b), a->out, q_row(&b));
        print_message("    %-70s largest difference of the last outputs %.2e\n", a->spec, worst);
        assert_true(worst < 2e-5);
        close_bench(&b);
    }
}

/* What stands in a compact cache, put into an empty one at positions 0, 1, ...: the newest query's output is the same. */
static void compact_is_recomputation(void **state)
{
    static const char *const specs[] = {"f32 rope=pre pos=compact keep=streaming(sink=4) budget=uniform(tokens=40) when=full", "f32 sink=4 window=37 pos=compact",
                                        "f32 rope=pre sink=4 tail=6 pos=compact keep=streaming(sink=4) budget=uniform(tokens=40) when=full"};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        struct bench stream = {.dims = dims_smol, .n_tokens = 200, .rope_dim = 64}, fresh = {.dims = dims_smol, .n_tokens = 41, .rope_dim = 64};
        open_bench(&stream, specs[i]);
        random_rows(&stream);
        feed(&stream);
        open_bench(&fresh, "f32");
        for (uint32_t t = 0; t < fresh.n_tokens; t++) { /* 4 sinks, 36 others, and the newest, which sees them */
            const uint32_t from = t < 4 ? t : stream.n_tokens - fresh.n_tokens + t;
            memcpy(fresh.q + t * q_row(&fresh), stream.q + from * q_row(&stream), q_row(&stream) * sizeof(float));
            memcpy(fresh.k + t * kv_row(&fresh), stream.k + from * kv_row(&stream), kv_row(&stream) * sizeof(float));
            memcpy(fresh.v + t * kv_row(&fresh), stream.v + from * kv_row(&stream), kv_row(&stream) * sizeof(float));
        }
        feed(&fresh);
        const double worst = largest_difference(stream.got + 199 * q_row(&stream), fresh.got + 40 * q_row(&fresh), q_row(&fresh));
        print_message("    %-90s from recomputation %.2e\n", specs[i], worst);
        assert_true(worst < 3e-5);
        close_bench(&stream);
        close_bench(&fresh);
    }
}

/* Of equal scores the newest goes first; equal keys give every token the same attention. */
static void equal_scores_keep_the_oldest(void **state)
{
    uint32_t got[50];
    struct bench b = {.dims = dims_tiny, .n_tokens = 50};
    open_bench(&b, "f32 keep=tova budget=uniform(tokens=20) when=full");
    for (size_t i = 0; i < b.n_tokens * kv_row(&b); i++) b.v[i] = (float)kvl_rng_normal(3, i);
    feed(&b);
    for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
        assert_int_equal(held_of(&b, h, got), 20);
        for (uint32_t i = 0; i < 19; i++) assert_int_equal(got[i], i);
        assert_int_equal(got[19], 49); /* tova never drops the newest */
    }
    close_bench(&b);
}

/* ---- with a model ---- */

enum { MOST_VOCAB = 1024, STREAM = 200 };

static int32_t token[STREAM];

static void start(struct rig *r, const char *spec, uint32_t n_ctx)
{
    for (uint64_t i = 0; i < STREAM; i++) token[i] = (int32_t)(kvl_rng_u64(7, i) % r->model->dims.n_vocab);
    rig_session(r, spec, (struct kvl_session_config){.n_ctx = n_ctx, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true, .max_logits = 1});
}

/* After the prompt and after each step every head has what the budget says; bytes follow and do not grow. */
static void counts_follow_the_budget(void **state)
{
    static const struct {
        const char *spec;
        uint32_t prompt, held[3]; /* behind the prompt, 1 and 20 tokens later */
    } cases[] = {
        {"int8 keep=h2o budget=uniform(tokens=50) when=full", 100, {50, 50, 50}},
        {"int8 keep=h2o budget=uniform(tokens=50) when=full", 40, {40, 41, 50}},
        {"int8 keep=h2o budget=uniform(kept=0.2) when=full", 100, {20, 20, 20}},
        {"int8 keep=h2o budget=uniform(kept=0.2) when=every:1", 100, {20, 20, 24}},
        {"int8 keep=tova budget=uniform(tokens=30) when=every:8", 100, {30, 31, 34}},
        {"int4 sink=4 tail=8 keep=knorm budget=uniform(removed=0.5) when=every:20", 100, {50, 51, 60}},
        {"int4 keep=random budget=pyramid(kept=0.5) when=full", 100, {0, 0, 0}}, /* layers differ: only that counts stay */
    };
    struct rig r = rig_load(TINY_MODEL);
    float logits[MOST_VOCAB];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += kvl_device_is_slow() ? 3 : 1) {
        start(&r, cases[i].spec, STREAM);
        assert_ok(kvl_session_forward(r.session, token, cases[i].prompt, 1));
        struct kvl_cache *cache = kvl_session_cache(r.session);
        const uint64_t resident = kvl_cache_resident(cache);
        uint32_t before = kvl_cache_places(cache, 0, 0);
        assert_true(cases[i].held[0] == 0 || before == cases[i].held[0]);
        for (uint32_t t = 1; t <= 20; t++) {
            rig_forward(&r, token + cases[i].prompt + t - 1, 1, logits);
            const uint32_t held = kvl_cache_places(cache, 0, 1);
            if (cases[i].held[0] == 0) assert_int_equal(held, before);
            else if (t == 1) assert_int_equal(held, cases[i].held[1]);
        }
        if (cases[i].held[0] != 0 && kvl_cache_places(cache, 1, 0) != cases[i].held[2])
            fail_msg("%s: %u tokens, not %u", cases[i].spec, kvl_cache_places(cache, 1, 0), cases[i].held[2]);
        for (uint32_t v = 0; v < r.model->dims.n_vocab; v++) assert_true(isfinite(logits[v]));
        assert_int_equal(kvl_cache_resident(cache), resident);
        assert_true(resident <= kvl_cache_plan(cache)->resident_bytes);
        struct kvl_cache_bytes bytes;
        struct kvl_ledger ledger;
        assert_ok(kvl_session_bytes(r.session, &bytes));
        kvl_ledger_read(kvl_test_device, &ledger);
        assert_int_equal(ledger.bytes[KVL_MEM_PAYLOAD], bytes.payload);
        assert_int_equal(ledger.bytes[KVL_MEM_INDEX], bytes.index);
        assert_int_equal(bytes.payload + bytes.scale + bytes.index + bytes.table + bytes.slack, bytes.resident);
    }
    rig_free(&r);
}

/* Tokens behind the prompt go one by one however many are handed over at once; a prompt of a layer that keeps all is not touched. */
static void handing_over_many_changes_nothing(void **state)
{
    float one[MOST_VOCAB], many[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    start(&r, "int8 keep=h2o budget=uniform(tokens=50) when=full @1-1 keep=none budget=none", STREAM);
    assert_ok(kvl_session_forward(r.session, token, 100, 1));
    for (uint32_t t = 100; t < 130; t++) rig_forward(&r, token + t, 1, one);
    assert_int_equal(kvl_cache_places(kvl_session_cache(r.session), 1, 0), 130);
    assert_ok(kvl_session_reset(r.session));
    assert_ok(kvl_session_forward(r.session, token, 100, 1));
    assert_ok(kvl_session_forward(r.session, token + 100, 30, 1));
    assert_ok(kvl_session_read_logits(r.session, 0, many));
    assert_memory_equal(one, many, r.model->dims.n_vocab * sizeof *one);
    rig_free(&r);
}

/* A budget that nothing exceeds, in a model of several layers: the logits of a cache that evicts nothing. */
static void evicting_nothing_changes_nothing(void **state)
{
    static const char *const specs[] = {"f32 keep=h2o budget=uniform(tokens=190) when=full", "f32 rope=pre pos=compact keep=streaming budget=uniform(tokens=190) when=full",
                                        "f32 sink=4 tail=8 keep=tova budget=uniform(tokens=190) when=every:3 @1-1 keep=knorm"};
    float wanted[MOST_VOCAB], got[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    start(&r, "f32", STREAM);
    assert_ok(kvl_session_forward(r.session, token, 100, 0));
    for (uint32_t t = 100; t < 110; t++) rig_forward(&r, token + t, 1, wanted);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        start(&r, specs[i], STREAM);
        assert_ok(kvl_session_forward(r.session, token, 100, 0));
        for (uint32_t t = 100; t < 110; t++) rig_forward(&r, token + t, 1, got);
        const double difference = largest_difference(got, wanted, r.model->dims.n_vocab);
        if (!(difference < 1e-4)) fail_msg("%s: logits differ by %g", specs[i], difference);
    }
    rig_free(&r);
}

/* A stream far longer than the cache: memory is that of the cache, whatever n_ctx is. */
static void memory_is_flat(void **state)
{
    static const char *const specs[] = {"f16 rope=pre pos=compact keep=streaming(sink=4) budget=uniform(tokens=60) when=full", "f16 sink=4 window=56 pos=compact"};
    const uint32_t n = kvl_launches_are_dear() ? 70 : STREAM; /* more than the 60 that stay */
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        uint64_t resident[2];
        for (int longer = 0; longer < 2; longer++) {
            start(&r, specs[i], longer ? 100 * r.model->dims.n_ctx_train : STREAM); /* more positions than were trained: places are bounded */
            assert_ok(kvl_session_forward(r.session, token, 1, 1));
            assert_ok(kvl_session_forward(r.session, token + 1, n - 1, 1));
            resident[longer] = kvl_cache_resident(kvl_session_cache(r.session));
        }
        assert_int_equal(resident[0], resident[1]);
    }
    rig_free(&r);
}

static void what_cannot_be_is_refused(void **state)
{
    static const struct {
        const char *spec, *text;
    } cases[] = {
        {"kivi keep=h2o budget=uniform(tokens=9) when=full", "encodes tokens in groups"},
        {"v=gear keep=tova budget=uniform(tokens=9) when=every:4", "codec gear"},
        {"keep=h2o(gqa=max) budget=uniform(tokens=9) when=full", "kvlab plugins h2o says why"},
        {"keep=h2o budget=uniform(tokens=9) when=full ktail=4", "use tail="},
        {"keep=h2o budget=uniform(tokens=9) when=full pos=compact", "add rope=pre"},
        {"keep=h2o budget=uniform(tokens=9) when=every:0", "is never"},
        {"keep=h2o budget=uniform(tokens=9) when=every:x", "not a number of tokens"},
        {"keep=h2o budget=uniform(tokens=9) when=always", "prefill every:N full"},
        {"when=full", "add keep= and budget="},
        {"pos=compact", "or window="},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_refused(cases[i].spec, cases[i].text);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(device_equals_reference),      cmocka_unit_test(stored_scores_are_the_references),
    cmocka_unit_test(numpy_agrees),                 cmocka_unit_test(compact_is_recomputation),
    cmocka_unit_test(equal_scores_keep_the_oldest), cmocka_unit_test(counts_follow_the_budget),
    cmocka_unit_test(handing_over_many_changes_nothing), cmocka_unit_test(memory_is_flat),
    cmocka_unit_test(evicting_nothing_changes_nothing),
    cmocka_unit_test(what_cannot_be_is_refused),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
