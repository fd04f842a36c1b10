/* Queries that choose which pages they read, on every device: pages and outputs against the C specification and against answers of numpy; ties, budgets,
 * what is read, bytes, and what is refused. */
#include "decode_bench.h"
#include "page_answers.h"
#include "session_rig.h"

static const struct kvl_cache_dims dims_smol = {1, 9, 3, 64}, dims_tiny = {1, 6, 2, 16}, dims_one = {1, 2, 1, 128}, dims_odd = {1, 4, 2, 24};

enum { MOST_PAGES = 64 };

static const struct row {
    const char *spec;
    const struct kvl_cache_dims *dims;
    uint32_t n_tokens, rope_dim;
    bool rounded; /* exact rows and bounds in binary16 */
    uint32_t prompt; /* tokens that come at once, before any chooses; 0 = 1 */
} rows[] = {
    {"f32 read=pages(tokens=70)", &dims_smol, 300, 64},
    {"f16 read=pages(tokens=64,gqa=sum)", &dims_smol, 200, 64, true},
    {"int8 read=pages(tokens=50)", &dims_tiny, 200, 16, true},
    {"int8 sink=4 tail=20 read=pages(tokens=90)", &dims_tiny, 200, 16},
    {"int4(group=16) sink=3 ktail=5 vtail=40 read=pages(tokens=100,size=32)", &dims_tiny, 220, 16},
    {"k=int4 v=int8 read=pages(tokens=60)", &dims_one, 200, 128},
    {"int4 rot=hadamard korder=hf read=pages(tokens=70)", &dims_smol, 200, 64, true},
    {"k=kivi(bits=4,group=32,residual=32) v=f16 read=pages(tokens=120)", &dims_smol, 260, 64}, /* pages of 32, sealed 32 at once */
    {"k=q8_0 v=q4_0 read=pages(tokens=64,size=48)", &dims_one, 200, 128},
    {"k=fp8_e4m3 v=turboquant read=pages(tokens=40)", &dims_odd, 120, 24},
    {"f32 read=pages(tokens=70)", &dims_smol, 200, 64, false, 130},
    {"int8 sink=4 tail=20 read=pages(tokens=60)", &dims_tiny, 180, 16, false, 101},
    {"f16 read=pages(tokens=1)", &dims_tiny, 60, 16},    /* less than what is always read */
    {"f16 sink=20 read=pages(tokens=9)", &dims_tiny, 60, 16},
    {"f16 read=pages(tokens=59)", &dims_tiny, 60, 16},   /* the last query alone chooses */
    {"f16 read=pages(tokens=60)", &dims_tiny, 60, 16},   /* none does */
    {"f16 read=pages(tokens=20,size=128)", &dims_tiny, 100, 16}, /* there is no whole page */
};

/* The pages that the newest query read are the reference's; compared after each token. */
static void compare_pages(struct bench *b, const char *spec, uint32_t t, const uint32_t *n_read, const uint32_t *page)
{
    uint32_t got[MOST_PAGES], n;
    const uint32_t most = b->plan.layer[0].most_pages;
    for (uint32_t h = 0; h < b->dims.n_kv_head && t + 1 > (uint32_t)b->plan.layer[0].pages.tokens; h++) {
        const uint32_t *want = page + ((size_t)t * b->dims.n_kv_head + h) * most;
        assert_ok(kvl_cache_picked(b->cache, 0, h, got, &n));
        if (n != n_read[t * b->dims.n_kv_head + h]) fail_msg("%s: head %u reads %u pages, not %u", spec, h, n, n_read[t * b->dims.n_kv_head + h]);
        for (uint32_t i = 0; i < n; i++)
            if (got[i] != want[i]) fail_msg("%s: token %u, head %u reads page %u, not %u", spec, t, h, got[i], want[i]);
    }
}

/* Reserved = plan = sum of classes = ledger; the bytes that the last query read are those of the tokens that it read, and of the bounds. */
static void check_bytes(struct bench *b)
{
    const struct kvl_layer_plan *layer = &b->plan.layer[0];
    uint64_t bytes[KVL_MEM_CLASSES], total = 0, read = 0;
    struct kvl_ledger ledger;
    struct kvl_cache_reads reads;
    assert_ok(kvl_cache_bytes(b->cache, bytes));
    for (int c = 0; c < KVL_MEM_CLASSES; c++) total += bytes[c];
    const uint64_t planned = b->plan.resident_bytes + b->plan.scratch_bytes;
    assert_true(kvl_keeps_tail(layer) ? total <= planned : total == planned); /* a prompt's pages are bounded as if it had no tail */
    kvl_ledger_read(kvl_test_device, &ledger);
    assert_int_equal(ledger.total, total + kvl_buffer_bytes(b->stage) + kvl_buffer_bytes(b->rotary) + kvl_buffer_bytes(b->out));
    kvl_cache_reads(b->cache, &reads);
    for (int s = 0; s < KVL_SIDES; s++) {
        const bool chooses = layer->pages.tokens != 0;
        const struct kvl_page_count pages = chooses ? kvl_pages_read(layer, b->n_tokens) : (struct kvl_page_count){0};
        const uint32_t left_out = (pages.whole - pages.read) * (uint32_t)layer->pages.size;
        const uint32_t coded = kvl_sealed_end(layer, &layer->side[s], b->n_tokens) - layer->sink - left_out;
        read += coded * layer->side[s].token_bytes + (b->n_tokens - left_out - coded) * layer->side[s].exact_row_bytes;
        if (s == 0) read += pages.whole * kvl_page_bound_bytes(layer);
    }
    assert_int_equal(reads.newest_bytes, read * b->dims.n_kv_head);
}

/* The first n tokens, whose keys RoPE has turned, as a prompt leaves them. */
static void prompt_of(struct bench *b, uint32_t n)
{
    const uint32_t heads = b->dims.n_kv_head, d = b->dims.head_dim;
    uint32_t count[8], *token = calloc((size_t)heads * n, sizeof *token);
    float *k = calloc(kv_row(b), sizeof *k);
    for (uint32_t i = 0; i < heads * n; i++) token[i] = i % n;
    for (uint32_t h = 0; h < heads; h++) count[h] = n;
    assert_ok(kvl_cache_fill_begin(b->cache, 0, n, count, token, NULL));
    for (uint32_t t = 0; t < n; t++) {
        write_stage(b, t);
        memcpy(k, b->k + t * kv_row(b), kv_row(b) * sizeof *k);
        for (uint32_t h = 0; h < heads; h++) kvl_reference_turn(k + (size_t)h * d, (struct kvl_rope){b->angles, b->rope_dim}, t, false);
        assert_ok(kvl_buffer_write(b->stage, q_row(b) * sizeof *k, kv_row(b) * sizeof *k, k));
        assert_ok(kvl_cache_fill_rows(b->cache, 0, 1, b->stage, b->rotary, b->rope_dim));
    }
    assert_ok(kvl_cache_fill_end(b->cache, 0, n, count));
    free(token), free(k);
}

static void run_row(const struct row *row)
{
    const uint32_t first = row->prompt > 1 ? row->prompt : 1;
    struct bench b = {.dims = *row->dims, .n_tokens = row->n_tokens, .rope_dim = row->rope_dim, .rounded = row->rounded};
    open_bench(&b, row->spec);
    random_rows(&b);
    const uint32_t most = b.plan.layer[0].most_pages, heads = b.dims.n_kv_head;
    uint32_t *n_read = calloc((size_t)b.n_tokens * heads, sizeof *n_read), *page = calloc((size_t)b.n_tokens * heads * most + 1, sizeof *page);
    const struct kvl_rope rope = {b.angles, b.rope_dim};
    assert_true(most <= MOST_PAGES);
    if (b.plan.layer[0].pages.tokens != 0) assert_ok(kvl_reference_pages(&b.plan, 0, b.n_tokens, b.q, b.k, rope, n_read, page));
    if (row->prompt > 1) prompt_of(&b, row->prompt);
    else prompt_of_one(&b);
    for (uint32_t t = first; t < b.n_tokens; t++) {
        feed_one(&b, t);
        if (b.plan.layer[0].pages.tokens != 0) compare_pages(&b, row->spec, t, n_read, page);
    }
    assert_ok(kvl_reference_attend(&b.plan, 0, b.n_tokens, b.q, b.k, b.v, rope, b.want));
    const double worst = largest_difference(b.got + first * q_row(&b), b.want + first * q_row(&b), (b.n_tokens - first) * q_row(&b));
    print_message("    %-80s largest difference %.2e\n", row->spec, worst);
    assert_true(worst < 3e-5);
    check_bytes(&b);
    close_bench(&b);
    free(n_read), free(page);
}

static void device_equals_reference(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i += kvl_row_step(4))
        if (kvl_row_is_wanted(rows[i].spec)) run_row(&rows[i]);
}

/* Pages and outputs of scripts/make_page_answers.py, which shares no code with kvlab. */
static void numpy_agrees(void **state)
{
    uint32_t got[MOST_PAGES], n;
    for (size_t i = 0; i < sizeof page_answers / sizeof *page_answers; i++) {
        const struct page_answer *a = &page_answers[i];
        struct bench b = {.dims = {1, PAGE_HEADS * PAGE_GROUP, PAGE_HEADS, PAGE_DIM}, .n_tokens = PAGE_TOKENS, .rope_dim = PAGE_DIM};
        open_bench(&b, a->spec);
        answer_rows(&b);
        feed(&b);
        for (uint32_t h = 0; h < PAGE_HEADS; h++) {
            assert_ok(kvl_cache_picked(b.cache, 0, h, got, &n));
            assert_int_equal(n, a->n_pages);
            for (uint32_t j = 0; j < n; j++) assert_int_equal(got[j], a->page[h][j]);
        }
        const double worst = largest_difference(b.got + (b.n_tokens - 1) * q_row(&b), a->out, q_row(&b));
        print_message("    %-40s largest difference of the last outputs %.2e\n", a->spec, worst);
        assert_true(worst < 2e-5);
        close_bench(&b);
    }
}

/* Pages of equal keys: those in front; and one that stands out is among them. */
static void equal_pages_go_by_place(void **state)
{
    struct bench b = {.dims = dims_tiny, .n_tokens = 200, .rope_dim = 0};
    uint32_t got[MOST_PAGES], n;
    open_bench(&b, "f16 read=pages(tokens=60)");
    for (size_t i = 0; i < b.n_tokens * q_row(&b); i++) b.q[i] = 1.0f;
    for (size_t i = 0; i < b.n_tokens * kv_row(&b); i++) b.k[i] = i / kv_row(&b) == 150 ? 3.0f : -1.0f; /* token 150 is of page 9 */
    feed(&b);
    for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
        assert_ok(kvl_cache_picked(b.cache, 0, h, got, &n));
        assert_int_equal(n, 3); /* 8 tokens behind 12 whole pages, and 48 */
        assert_true(got[0] == 0 && got[1] == 1 && got[2] == 9);
    }
    close_bench(&b);
}

/* Keys that are not finite take no part in the order. */
static void nan_is_the_least(void **state)
{
    struct bench b = {.dims = dims_tiny, .n_tokens = 100, .rope_dim = 0};
    uint32_t got[MOST_PAGES], n;
    open_bench(&b, "f32 read=pages(tokens=60)");
    random_rows(&b);
    for (uint32_t t = 16; t < 32; t++)
        for (size_t c = 0; c < kv_row(&b); c++) b.k[t * kv_row(&b) + c] = NAN;
    feed(&b);
    for (uint32_t h = 0; h < b.dims.n_kv_head; h++) {
        assert_ok(kvl_cache_picked(b.cache, 0, h, got, &n));
        assert_int_equal(n, 3);
        for (uint32_t i = 0; i < n; i++) assert_int_not_equal(got[i], 1);
    }
    close_bench(&b);
}

/* ---- with a model ---- */

enum { MOST_VOCAB = 1024, STREAM = 400, PROMPT = 150 };

static int32_t token[STREAM];

static void start(struct rig *r, const char *spec, enum kvl_protocol protocol, bool exact)
{
    for (uint64_t i = 0; i < STREAM; i++) token[i] = (int32_t)(kvl_rng_u64(7, i) % r->model->dims.n_vocab);
    rig_session(r, spec, (struct kvl_session_config){.n_ctx = STREAM, .ubatch = 64, .protocol = protocol, .exact = exact, .max_logits = 1});
}

/* A budget of the whole context is a cache that reads all, to the bit; one of what is there, to rounding. */
static void reading_all_is_dense(void **state)
{
    float want[MOST_VOCAB], got[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    for (int exact = 0; exact < 2; exact++) {
        start(&r, "int8", KVL_P3_PREFILL_EXACT, exact);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
        for (uint32_t t = PROMPT; t < PROMPT + 20; t++) rig_forward(&r, token + t, 1, want);
        start(&r, "int8 read=pages(tokens=400)", KVL_P3_PREFILL_EXACT, exact);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
        for (uint32_t t = PROMPT; t < PROMPT + 20; t++) rig_forward(&r, token + t, 1, got);
        assert_memory_equal(want, got, r.model->dims.n_vocab * sizeof *want);
        start(&r, "int8 read=pages(tokens=200)", KVL_P3_PREFILL_EXACT, exact);
        assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
        for (uint32_t t = PROMPT; t < PROMPT + 20; t++) rig_forward(&r, token + t, 1, got);
        assert_true(largest_difference(want, got, r.model->dims.n_vocab) < 1e-3);
    }
    rig_free(&r);
}

/* Tokens behind the prompt go one by one however many are handed over at once; dense layers read all. */
static void handing_over_many_changes_nothing(void **state)
{
    float one[MOST_VOCAB], many[MOST_VOCAB];
    struct rig r = rig_load(TINY_MODEL);
    start(&r, "int8 read=pages(tokens=64,dense=1)", KVL_P2_WRITE_THEN_READ, true);
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(r.session));
    assert_int_equal(plan->layer[0].pages.tokens, 0);
    assert_int_equal(plan->layer[1].pages.tokens, 64);
    assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
    for (uint32_t t = PROMPT; t < PROMPT + 30; t++) rig_forward(&r, token + t, 1, one);
    assert_ok(kvl_session_reset(r.session));
    assert_ok(kvl_session_forward(r.session, token, PROMPT, 1));
    assert_ok(kvl_session_forward(r.session, token + PROMPT, 30, 1));
    assert_ok(kvl_session_read_logits(r.session, 0, many));
    assert_memory_equal(one, many, r.model->dims.n_vocab * sizeof *one);
    rig_free(&r);
}

/* More context makes no more to read; what is resident is as without choosing, and the bounds. Also of what an eviction has left. */
static void reads_stay_and_memory_is_full(void **state)
{
    static const char *const specs[] = {"int8", "int8 read=pages(tokens=64)", "int8 read=pages(tokens=64) keep=knorm budget=ada(kept=0.8)"};
    const uint32_t prompt = kvl_launches_are_dear() ? STREAM - 10 : PROMPT;
    uint64_t read[3], resident[3], payload[3];
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < 3; i++) {
        struct kvl_cache_bytes bytes;
        start(&r, specs[i], KVL_P3_PREFILL_EXACT, false);
        assert_ok(kvl_session_forward(r.session, token, prompt, 0));
        assert_ok(kvl_session_forward(r.session, token + prompt, STREAM - prompt, 1));
        assert_ok(kvl_session_bytes(r.session, &bytes));
        read[i] = bytes.token_read;
        resident[i] = bytes.resident;
        payload[i] = bytes.payload;
        if (i == 1) assert_int_equal(bytes.index, kvl_cache_plan(kvl_session_cache(r.session))->table_bytes + kvl_cache_plan(kvl_session_cache(r.session))->bounds_bytes);
    }
    assert_int_equal(payload[0], payload[1]);
    assert_true(resident[1] >= resident[0] && resident[2] < resident[1]);
    assert_true(read[1] < read[0] / 2 && read[2] < read[1]); /* fewer pages have fewer bounds */
    rig_free(&r);
}

static void what_cannot_be_is_refused(void **state)
{
    static const struct {
        const char *spec, *text;
    } cases[] = {
        {"read=pages", "write read=pages(tokens=N)"},
        {"read=pages(size=16)", "does not say how many tokens"},
        {"read=pages(tokens=64,size=20)", "use a multiple of 16"},
        {"read=pages(tokens=64,size=8)", "from 16 to"},
        {"read=pages(tokens=-3)", "from 0 to"},
        {"read=pages(tokens=64,gqa=mean)", "max sum"},
        {"read=pages(budget=64)", "tokens size gqa dense"},
        {"read=all(tokens=3)", "takes no options"},
        {"read=some", "all pages"},
        {"read=pages(tokens=64) window=100", "use one of them"},
        {"read=pages(tokens=64) keep=h2o budget=uniform(tokens=99) when=full", "use when=prefill"},
        {"read=pages(tokens=64) rope=pre", "use rope=post"},
        {"read=pages(tokens=64) kv=latent(rank=16)", "latents are stored"},
        {"read=pages(tokens=64) read=all", "given twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kvl_spec *spec = NULL;
        assert_int_not_equal(kvl_spec_parse(cases[i].spec, &spec), KVL_OK);
        if (strstr(kvl_error_text(), cases[i].text) == NULL) fail_msg("%s: %s", cases[i].spec, kvl_error_text());
        kvl_error_clear();
    }
}

/* By the plan: a protocol without a prompt, a model whose rows are latents. */
static void what_cannot_be_planned_is_refused(void **state)
{
    static const struct {
        struct kvl_cache_dims dims;
        enum kvl_protocol protocol;
        const char *text;
    } cases[] = {{{1, 6, 2, 16}, KVL_P1_FAKE_QUANT, "p1 has no prompt"}, {{1, 8, 1, 80, .joint_value_dim = 64}, KVL_P4_STREAMING, "one latent row"}};
    const struct kvl_cache_limits limits = {1ull << 30, 2};
    struct kvl_spec *spec = NULL;
    assert_ok(kvl_spec_parse("read=pages(tokens=64)", &spec));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct kvl_cache_config config = {.spec = spec, .n_ctx = 200, .ubatch = 64, .protocol = cases[i].protocol};
        struct kvl_cache_plan plan;
        assert_int_not_equal(kvl_cache_plan_make(&cases[i].dims, &config, &limits, &plan), KVL_OK);
        if (strstr(kvl_error_text(), cases[i].text) == NULL) fail_msg("%s", kvl_error_text());
        kvl_error_clear();
    }
    kvl_spec_free(&spec);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(device_equals_reference), cmocka_unit_test(numpy_agrees),
    cmocka_unit_test(equal_pages_go_by_place), cmocka_unit_test(nan_is_the_least),
    cmocka_unit_test(reading_all_is_dense),    cmocka_unit_test(handing_over_many_changes_nothing),
    cmocka_unit_test(reads_stay_and_memory_is_full), cmocka_unit_test(what_cannot_be_is_refused),
    cmocka_unit_test(what_cannot_be_planned_is_refused),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
