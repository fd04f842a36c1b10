/* Tokens that go while others are decoded by what the host says (rescore.h), on every device: against the end of a prompt of the same tokens, against the C specification
 * and answers of numpy for codecs, sinks, tails and heads of different lengths; bytes, edges of budgets, and what is refused. */
#include "kernel/test_harness.h"
#include "decode_bench.h"
#include "rescore_answers.h"
#include "select.h"
#include "session_rig.h"
#include <math.h>

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Head h's tokens of layer l, by age. */
static uint32_t held_of(struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t *position)
{
    const uint32_t n = kvl_cache_places(cache, l, h);
    assert_ok(kvl_cache_positions(cache, l, h, position));
    qsort(position, n, sizeof *position, ascending);
    return n;
}

/* ---- the same tokens at the end of a prompt ---- */

enum { PROMPT = 30, ALL = 50, MOST_VOCAB = 1024 };

static int32_t token[ALL];

static void start(struct rig *r, const char *spec)
{
    for (uint64_t i = 0; i < ALL; i++) token[i] = (int32_t)(kvl_rng_u64(7, i) % r->model->dims.n_vocab);
    rig_session(r, spec, (struct kvl_session_config){.n_ctx = 2 * ALL, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true, .max_logits = 1});
}

/* keep= and the budget without its amount. At 40 tokens nothing goes at the end of a prompt of 30; 20 tokens later 10 of a head are too many. */
static const char *const policies[][2] = {
    {"snapkv(window=8)", "uniform("},
    {"snapkv(window=8,pool=max,gqa=max)", "pyramid(window=8,beta=2,"},
    {"snapkv(window=8)", "ada("},
    {"expected(sink=2)", "uniform("},
    {"expected(nocov,plain)", "ada("},
    {"keydiff", "ada("},
    {"lagkv(sink=2,lag=8)", "uniform("},
    {"lagkv(lag=8,cross)", "ada(safeguard=0.5,"},
    {"cur", "uniform("},
    {"leverage(sketch=8)", "uniform("},
    {"observed", "uniform("},
    {"observed(gqa=sum)", "ada("},
    {"h2o", "ada("},
    {"knorm", "ada("},
    {"random(seed=3,window=6)", "ada("},
    {"critical(of=snapkv(window=8))", "uniform("},
    {"critical(of=expected)", "ada("},
    {"critical(of=h2o(recent=0.1),first=0.25)", "uniform("},
    {"chunk(of=snapkv(window=8),size=5)", "uniform("},
    {"chunk(of=observed,size=10)", "uniform("},
};

static void answers_of_a_prompt(void **state)
{
    static const char *const forms[] = {"f32", "f32 sink=3", "f32 rope=pre pos=compact"};
    uint32_t got[ALL];
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i += kvl_device_is_slow() ? 4 : 1) { /* 4: all forms in turn */
        char text[2][256];
        struct kvl_selection want[16] = {0};
        const char *form = forms[i % 3];
        for (int late = 0; late < 2; late++)
            snprintf(text[late], sizeof text[late], "%s keep=%s budget=%stokens=40)%s", form, policies[i][0], policies[i][1], late ? " when=every:20" : "");
        if (!kvl_row_is_wanted(text[1])) continue;
        start(&r, text[0]);
        assert_ok(kvl_session_forward(r.session, token, ALL, 0));
        const uint32_t n_layer = r.model->dims.n_layer, heads = r.model->dims.n_kv_head;
        for (uint32_t l = 0; l < n_layer; l++) {
            const struct kvl_selection *kept = kvl_session_kept(r.session, l);
            want[l].offset = calloc(heads + 1, sizeof *want[l].offset);
            want[l].token = calloc((size_t)heads * ALL, sizeof *want[l].token);
            memcpy(want[l].offset, kept->offset, (heads + 1) * sizeof *kept->offset);
            memcpy(want[l].token, kept->token, kept->offset[heads] * sizeof *kept->token);
        }
        start(&r, text[1]);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 0));
        assert_int_equal(kvl_cache_places(kvl_session_cache(r.session), 0, 0), PROMPT);
        assert_ok(kvl_session_forward(r.session, token + PROMPT, ALL - PROMPT, 0));
        for (uint32_t l = 0; l < n_layer; l++)
            for (uint32_t h = 0; h < heads; h++) {
                const uint32_t n = held_of(kvl_session_cache(r.session), l, h, got), *kept = want[l].token + want[l].offset[h];
                if (n != want[l].offset[h + 1] - want[l].offset[h]) fail_msg("%s: layer %u head %u has %u tokens, not %u", text[1], l, h, n, want[l].offset[h + 1] - want[l].offset[h]);
                for (uint32_t t = 0; t < n; t++)
                    if (got[t] != kept[t]) fail_msg("%s: layer %u head %u has token %u, not %u", text[1], l, h, got[t], kept[t]);
            }
        for (uint32_t l = 0; l < n_layer; l++) free(want[l].offset), free(want[l].token);
    }
    rig_free(&r);
}

/* ---- one layer, fed token by token ---- */

static const struct kvl_cache_dims dims_smol = {1, 9, 3, 64}, dims_tiny = {1, 6, 2, 16}, dims_one = {1, 2, 1, 128}, dims_odd = {1, 4, 2, 24};

static const struct row {
    const char *spec;
    const struct kvl_cache_dims *dims;
    uint32_t n_tokens, rope_dim;
    bool rounded; /* sinks and tail in binary16 */
} rows[] = {
    {"f32 keep=snapkv(window=8) budget=uniform(tokens=30) when=every:10", &dims_smol, 100, 64},
    {"f16 keep=snapkv(window=8) budget=ada(tokens=30) when=every:10", &dims_smol, 120, 64},
    {"int8 sink=4 tail=9 keep=snapkv(window=6,pool=max) budget=ada(tokens=30,safeguard=0.1) when=every:7", &dims_tiny, 150, 16},
    {"int4(group=16) sink=5 tail=11 keep=expected budget=ada(tokens=30) when=every:9", &dims_tiny, 120, 16, true},
    {"int4(group=16) sink=3 keep=expected(sink=2) budget=uniform(kept=0.4) when=every:16", &dims_tiny, 120, 16},
    {"q8_0 keep=keydiff budget=ada(tokens=24) when=full", &dims_smol, 60, 64},
    {"k=q5_1 v=q4_0 tail=5 keep=lagkv(sink=2,lag=6) budget=uniform(tokens=30) when=every:12", &dims_smol, 100, 64},
    {"k=int8 v=int4 rot=hadamard korder=hf keep=cur budget=ada(tokens=30) when=every:10", &dims_one, 90, 128},
    {"int8 rope=pre rot=hadamard korder=hf sink=3 tail=7 pos=compact keep=keydiff budget=uniform(tokens=40) when=every:5", &dims_tiny, 120, 16},
    {"f16 rope=pre pos=compact keep=snapkv(window=5) budget=ada(tokens=20) when=every:6", &dims_tiny, 90, 16},
    {"k=fp8_e4m3 v=fp8_e5m2 keep=leverage(sketch=6) budget=uniform(tokens=40) when=every:20", &dims_odd, 90, 24},
    {"int8 keep=h2o budget=ada(tokens=30) when=every:8", &dims_tiny, 120, 16},
    {"f16 keep=observed budget=uniform(tokens=30) when=full", &dims_tiny, 60, 16},
    {"turboquant(bits=2) rot=random keep=critical(of=snapkv(window=4)) budget=uniform(tokens=30) when=every:15", &dims_smol, 90, 64},
    {"int8 keep=critical(of=h2o) budget=ada(tokens=30) when=every:9", &dims_tiny, 120, 16},
    {"f16 keep=chunk(of=snapkv(window=4),size=6) budget=uniform(tokens=31) when=every:10", &dims_tiny, 120, 16},
    {"f16 keep=snapkv budget=ada(tokens=1) when=full", &dims_tiny, 40, 16},
    {"f16 keep=snapkv budget=uniform(tokens=0) when=full", &dims_tiny, 40, 16}, /* a head that keeps nothing: each query sees its own token */
    {"f16 keep=expected budget=ada(tokens=0,safeguard=0) when=every:3", &dims_tiny, 40, 16},
    {"f16 keep=chunk(of=cur,size=7) budget=uniform(tokens=2) when=every:4", &dims_tiny, 40, 16},
    {"f16 sink=4 tail=9 keep=keydiff budget=ada(tokens=3) when=full", &dims_tiny, 60, 16}, /* what cannot go stays */
    {"f16 keep=snapkv budget=ada(tokens=500) when=every:1000", &dims_tiny, 60, 16},        /* fewer tokens than the budget, and no step at which any is due */
    {"f16 sink=70 keep=lagkv budget=ada(tokens=30) when=every:5", &dims_tiny, 60, 16},     /* more sinks than tokens */
};

static void check_gone(struct bench *b, const char *spec, uint32_t h, uint32_t n_gone, const struct kvl_gone *want)
{
    struct kvl_gone *got = calloc(b->plan.gone_room + 1, sizeof *got);
    uint32_t n;
    assert_ok(kvl_cache_gone(b->cache, 0, h, got, &n));
    assert_int_equal(n, n_gone);
    for (uint32_t i = 0; i < n; i++)
        if (got[i].seen != want[i].seen || got[i].position != want[i].position || !isnan(got[i].mass))
            fail_msg("%s: head %u, token %u to go: %u behind %u, not %u behind %u", spec, h, i, got[i].position, got[i].seen, want[i].position, want[i].seen);
    free(got);
}

/* Reserved = plan = sum of classes = ledger, and what is counted as tokens' bytes is what the heads have. */
static void check_bytes(struct bench *b)
{
    uint64_t bytes[KVL_MEM_CLASSES], total = 0, tokens = 0;
    struct kvl_ledger ledger;
    const struct kvl_layer_plan *layer = &b->plan.layer[0];
    assert_ok(kvl_cache_bytes(b->cache, bytes));
    for (int c = 0; c < KVL_MEM_CLASSES; c++) total += bytes[c];
    assert_int_equal(total, b->plan.resident_bytes + b->plan.scratch_bytes);
    kvl_ledger_read(kvl_test_device, &ledger);
    assert_int_equal(ledger.total, total + kvl_buffer_bytes(b->stage) + kvl_buffer_bytes(b->rotary) + kvl_buffer_bytes(b->out));
    assert_int_equal(bytes[KVL_MEM_INDEX], b->plan.table_bytes + b->plan.index_bytes + (uint64_t)layer->recent * q_row(b) * sizeof(float));
    for (uint32_t h = 0; h < b->dims.n_kv_head; h++)
        for (int s = 0; s < KVL_SIDES; s++) {
            struct kvl_segments at;
            struct kvl_codec_bytes used;
            kvl_cache_segments(b->cache, 0, s, h, &at);
            assert_ok(kvl_side_bytes(&layer->side[s], at.sealed - at.sink, &used));
            tokens += used.payload + used.scale + (at.sink + at.places - at.sealed) * layer->side[s].exact_row_bytes;
        }
    assert_int_equal(bytes[KVL_MEM_PAYLOAD] + bytes[KVL_MEM_SCALE], tokens);
}

static void check_row(const struct row *row)
{
    struct bench b = {.dims = *row->dims, .n_tokens = row->n_tokens, .rope_dim = row->rope_dim, .rounded = row->rounded};
    uint32_t n_held[8], n_gone[8], *held = calloc((size_t)row->dims->n_kv_head * row->n_tokens, sizeof *held), *got = calloc(row->n_tokens, sizeof *got);
    struct kvl_gone *gone = calloc((size_t)row->dims->n_kv_head * row->n_tokens, sizeof *gone);
    open_bench(&b, row->spec);
    random_rows(&b);
    feed(&b);
    const struct kvl_reference_scores scores = {&b.model, b.w_o, NULL};
    assert_ok(kvl_reference_evict(&b.plan, 0, b.n_tokens, b.q, b.k, b.v, (struct kvl_rope){b.angles, b.rope_dim}, &scores, b.want, n_held, held, n_gone, gone));
    for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
        if (held_of(b.cache, 0, h, got) != n_held[h]) fail_msg("%s: head %u has %u tokens, not %u", row->spec, h, kvl_cache_places(b.cache, 0, h), n_held[h]);
        for (uint32_t i = 0; i < n_held[h]; i++)
            if (got[i] != held[(size_t)h * b.n_tokens + i]) fail_msg("%s: head %u has token %u, not %u", row->spec, h, got[i], held[(size_t)h * b.n_tokens + i]);
        check_gone(&b, row->spec, h, n_gone[h], gone + (size_t)h * b.n_tokens);
    }
    const double worst = largest_difference(b.got + q_row(&b), b.want + q_row(&b), (b.n_tokens - 1) * q_row(&b));
    print_message("    %-105s largest difference %.2e\n", row->spec, worst);
    assert_true(worst < 3e-5);
    check_bytes(&b);
    close_bench(&b);
    free(held), free(got), free(gone);
}

static void device_equals_reference(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i += kvl_row_step(4))
        if (kvl_row_is_wanted(rows[i].spec)) check_row(&rows[i]);
}

static const char *pick(uint64_t *state, const char *const *list, size_t n) { return list[kvl_rng_u64(11, (*state)++) % n]; }

/* Whatever is put together: the C specification's. */
static void random_policies(void **state)
{
    static const char *const scores[] = {"snapkv(window=1)", "snapkv(window=50,kernel=2)", "snapkv(window=5,gqa=max)", "expected(sink=0)", "expected(sink=30,gqa=sum)", "keydiff",
                                         "lagkv(lag=3,sink=1)", "cur(window=4)", "leverage(sketch=2)", "observed", "h2o(recent=0)", "h2o(recent=1)"};
    static const char *const wrappers[] = {"%s", "%s", "critical(of=%s)", "chunk(of=%s,size=1)", "chunk(of=%s,size=4)", "critical(of=%s,first=1)"};
    static const char *const budgets[] = {"uniform(%s)", "ada(%s)", "ada(%s,safeguard=0)", "ada(%s,safeguard=1)", "pyramid(%s)"};
    static const char *const amounts[] = {"tokens=0", "tokens=1", "tokens=3", "tokens=12", "tokens=500", "kept=0.01", "kept=0.4", "removed=0.1", "bytes=900"};
    static const char *const times[] = {"full", "every:1", "every:2", "every:7", "every:1000"};
    static const char *const forms[] = {"f32", "f32 sink=2", "f32 sink=3 tail=5", "f32 rope=pre pos=compact"};
    uint64_t draw = 0;
#define PICK(list) pick(&draw, list, sizeof list / sizeof *list)
    const int slow = getenv("KVLAB_SLOW") != NULL, n = slow ? 60 : 24; /* each is programs of its own */
    for (int i = 0; i < n / (int)kvl_row_step(6); i++) {
        char keep[96], budget[64], spec[320];
        struct row row = {spec, &dims_tiny, 40, 16, false};
        snprintf(keep, sizeof keep, PICK(wrappers), PICK(scores));
        snprintf(budget, sizeof budget, PICK(budgets), PICK(amounts));
        snprintf(spec, sizeof spec, "%s keep=%s budget=%s when=%s", PICK(forms), keep, budget, PICK(times));
        struct kvl_spec *parsed = NULL;
        assert_ok(kvl_spec_parse(spec, &parsed));
        const bool by_host = kvl_keep_by_host(kvl_spec_layer(parsed, 0));
        kvl_spec_free(&parsed);
        if (by_host && kvl_row_is_wanted(spec)) check_row(&row);
    }
#undef PICK
}

/* Kept sets and outputs of scripts/make_rescore_answers.py, which shares no code with kvlab. */
static void numpy_agrees(void **state)
{
    uint32_t got[RESCORE_TOKENS];
    for (size_t i = 0; i < sizeof rescore_answers / sizeof *rescore_answers; i++) {
        const struct rescore_answer *a = &rescore_answers[i];
        struct bench b = {.dims = {1, RESCORE_HEADS * RESCORE_GROUP, RESCORE_HEADS, RESCORE_DIM}, .n_tokens = RESCORE_TOKENS, .rope_dim = RESCORE_DIM};
        if (!kvl_row_is_wanted(a->spec)) continue;
        open_bench(&b, a->spec);
        answer_rows(&b);
        feed(&b);
        for (uint32_t h = 0; h < RESCORE_HEADS; h++) {
            if (held_of(b.cache, 0, h, got) != a->n_held[h]) fail_msg("%s: head %u has %u tokens, not %u", a->spec, h, kvl_cache_places(b.cache, 0, h), a->n_held[h]);
            for (uint32_t j = 0; j < a->n_held[h]; j++)
                if (got[j] != a->held[h][j]) fail_msg("%s: head %u has token %u, not %u", a->spec, h, got[j], a->held[h][j]);
        }
        const double worst = largest_difference(b.got + (b.n_tokens - 1) * q_row(&b), a->out, q_row(&b));
        print_message("    %-90s largest difference of the last outputs %.2e\n", a->spec, worst);
        assert_true(worst < 2e-5);
        close_bench(&b);
    }
}

/* Of equal scores the newest goes first; where heads compete, the first of them wins what is not the others' safeguard. */
static void equal_scores_keep_the_oldest(void **state)
{
    static const struct {
        const char *spec;
        uint32_t kept[2], since; /* tokens that came behind the last eviction */
    } cases[] = {
        {"f32 keep=knorm budget=ada(tokens=20) when=full", {36, 4}, 0},
        {"f32 keep=keydiff budget=ada(tokens=20) when=every:10", {36, 4}, 9},
        {"f32 keep=knorm budget=ada(tokens=20,safeguard=0) when=every:7", {40, 0}, 0}, /* a head that keeps nothing */
        {"f32 keep=critical(of=knorm) budget=uniform(tokens=20) when=every:5", {20, 20}, 4},
    };
    uint32_t got[50];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bench b = {.dims = dims_tiny, .n_tokens = 50};
        open_bench(&b, cases[i].spec);
        for (size_t j = 0; j < b.n_tokens * kv_row(&b); j++) b.k[j] = b.v[j] = 1.0f;
        feed(&b);
        for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
            assert_int_equal(held_of(b.cache, 0, h, got), cases[i].kept[h] + cases[i].since);
            for (uint32_t j = 0; j < cases[i].kept[h]; j++) assert_int_equal(got[j], j);
        }
        check_bytes(&b);
        close_bench(&b);
    }
}

/* One head wins the whole budget of both, then the other: the pages of the first must come back. */
static void heads_take_turns(void **state)
{
    enum { TURN = 200 };
    struct bench b = {.dims = dims_tiny, .n_tokens = 2 * TURN, .rope_dim = 16};
    static const float size[2][2] = {{0.5f, 2.0f}, {3.0f, 0.1f}}; /* of keys: in each half, of each head */
    uint32_t n_held[2], n_gone[2], held[2][2 * TURN], got[2 * TURN];
    static struct kvl_gone gone[2][2 * TURN];
    static float stored[2 * TURN][2];
    open_bench(&b, "int8 keep=knorm budget=ada(tokens=100,safeguard=0) when=every:10");
    random_rows(&b);
    for (uint32_t t = 0; t < b.n_tokens; t++)
        for (uint32_t h = 0; h < 2; h++) {
            float *k = b.k + t * kv_row(&b) + (size_t)h * b.dims.head_dim;
            double square = 0.0;
            for (uint32_t c = 0; c < b.dims.head_dim; c++) k[c] = size[t >= TURN][h] * (1.0f + 0.001f * (float)kvl_rng_uniform(5, t * 100 + h * 50 + c));
            for (uint32_t c = 0; c < b.dims.head_dim; c++) square += (double)k[c] * k[c];
            stored[t][h] = (float)-sqrt(square);
        }
    feed(&b);
    const struct kvl_reference_scores scores = {&b.model, b.w_o, &stored[0][0]};
    assert_ok(kvl_reference_evict(&b.plan, 0, b.n_tokens, b.q, b.k, b.v, (struct kvl_rope){b.angles, b.rope_dim}, &scores, b.want, n_held, held[0], n_gone, gone[0]));
    assert_true(n_held[1] > 190 && n_held[0] < 20);
    for (uint32_t h = 0; h < 2; h++) {
        assert_int_equal(held_of(b.cache, 0, h, got), n_held[h]);
        for (uint32_t i = 0; i < n_held[h]; i++) assert_int_equal(got[i], held[h][i]);
    }
    assert_true(largest_difference(b.got + q_row(&b), b.want + q_row(&b), (b.n_tokens - 1) * q_row(&b)) < 3e-5);
    check_bytes(&b);
    close_bench(&b);
}

/* ---- with a model ---- */

/* Heads take from one pool of pages: bytes never change, and are about those of as many tokens as the heads keep together. */
static void heads_share_one_pool(void **state)
{
    enum { STREAM = 400 };
    static int32_t stream[STREAM];
    const uint32_t end = kvl_device_is_slow() ? 240 : STREAM;
    float logits[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    for (uint64_t i = 0; i < STREAM; i++) stream[i] = (int32_t)(kvl_rng_u64(9, i) % r.model->dims.n_vocab);
    rig_session(&r, "int8 keep=snapkv(window=8) budget=ada(tokens=100,safeguard=0) when=every:16",
                (struct kvl_session_config){.n_ctx = STREAM, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true, .max_logits = 1});
    assert_ok(kvl_session_forward(r.session, stream, 200, 0));
    struct kvl_cache *cache = kvl_session_cache(r.session);
    const struct kvl_layer_plan *layer = &kvl_cache_plan(cache)->layer[0];
    const uint64_t resident = kvl_cache_resident(cache);
    const uint32_t heads = r.model->dims.n_kv_head;
    bool ragged = false;
    assert_true(layer->side[0].pool > 0 && layer->side[0].pool < heads * layer->side[0].slots);
    for (uint32_t t = 200; t < end; t++) {
        uint32_t all = 0;
        rig_forward(&r, stream + t, 1, logits);
        for (uint32_t h = 0; h < heads; h++) {
            all += kvl_cache_places(cache, 0, h);
            ragged = ragged || kvl_cache_places(cache, 0, h) != kvl_cache_places(cache, 0, 0);
        }
        assert_int_equal(all, heads * (100 + (t + 1 - 200) % 16));
        assert_int_equal(kvl_cache_resident(cache), resident);
        for (uint32_t v = 0; v < r.model->dims.n_vocab; v++) assert_true(isfinite(logits[v]));
    }
    assert_true(ragged);
    struct kvl_cache_bytes bytes;
    struct kvl_ledger ledger;
    assert_ok(kvl_session_bytes(r.session, &bytes));
    kvl_ledger_read(kvl_test_device, &ledger);
    assert_int_equal(ledger.bytes[KVL_MEM_PAYLOAD], bytes.payload);
    assert_int_equal(ledger.bytes[KVL_MEM_INDEX], bytes.index);
    assert_int_equal(bytes.payload + bytes.scale + bytes.index + bytes.table + bytes.slack, bytes.resident);
    struct kvl_counters counters;
    kvl_session_counters(r.session, &counters);
    assert_int_equal(counters.rescored, (end - 200) / 16);
    assert_true(counters.rescore_ns > 0);
    rig_free(&r);
}

/* However many tokens are handed over at once; the second time on what the first has left. */
static void handing_over_many_changes_nothing(void **state)
{
    float one[MOST_VOCAB], many[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    start(&r, "int8 keep=critical(of=expected) budget=ada(tokens=20) when=every:4 @1-1 keep=h2o budget=uniform(tokens=20) when=full "
              "@2-2 keep=chunk(of=lagkv(lag=4),size=3) budget=layers(kept=0.5,share=3:2:1) when=full");
    assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
    for (uint32_t t = PROMPT; t < ALL; t++) rig_forward(&r, token + t, 1, one);
    assert_ok(kvl_session_reset(r.session));
    assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
    assert_ok(kvl_session_forward(r.session, token + PROMPT, ALL - PROMPT, 1));
    assert_ok(kvl_session_read_logits(r.session, 0, many));
    assert_memory_equal(one, many, r.model->dims.n_vocab * sizeof *one);
    rig_free(&r);
}

static void what_cannot_be_is_refused(void **state)
{
    static const struct {
        const char *spec, *text;
    } cases[] = {
        {"keep=kvzip budget=uniform(tokens=9) when=full", "repeat a prompt"},
        {"keep=oracle budget=uniform(tokens=9) when=every:4", "follow a prompt"},
        {"keep=noncausal budget=uniform(tokens=9) when=every:4", "all queries"},
        {"keep=critical(of=noncausal) budget=uniform(tokens=9) when=every:4", "all queries"},
        {"keep=observed(gqa=max) budget=uniform(tokens=9) when=full", "kvlab plugins observed says why"},
        {"keep=h2o(gqa=max) budget=ada(tokens=9) when=full", "kvlab plugins h2o says why"},
        {"keep=tova budget=ada(tokens=9) when=full", "ada changes that"},
        {"keep=critical(of=tova) budget=uniform(tokens=9) when=full", "critical changes that"},
        {"kivi keep=snapkv budget=ada(tokens=9) when=every:4", "encodes tokens in groups"},
        {"keep=snapkv budget=ada(tokens=9) when=every:4 pos=compact", "add rope=pre"},
        {"keep=snapkv budget=ada(tokens=9) when=every:4 ktail=3", "use tail="},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_refused(cases[i].spec, cases[i].text);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(answers_of_a_prompt),  cmocka_unit_test(device_equals_reference),
    cmocka_unit_test(random_policies),
    cmocka_unit_test(numpy_agrees),         cmocka_unit_test(equal_scores_keep_the_oldest),
    cmocka_unit_test(heads_take_turns),
    cmocka_unit_test(heads_share_one_pool), cmocka_unit_test(handing_over_many_changes_nothing),
    cmocka_unit_test(what_cannot_be_is_refused),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
