/* What compositions reserve: tests/limits.csv holds the figures, the plan must give them, and caches made from the plan must hold
 * just these bytes (plan = ledger = sum of CL_MEM_SIZE). KVLAB_WRITE_LIMITS=1 writes the file anew: look at the difference before
 * it is committed. */
#include "kernel/test_harness.h"
#include "cache.h"
#include "file.h"
#include "plan_report.h"
#include "random_table.h"
#include "rng.h"
#include "text.h"
#include <string.h>

static const char limits_csv[] = KVL_ROOT "/tests/limits.csv";

/* ---- the compositions ---- */

static const struct {
    struct kvl_cache_dims dims;
    const char *codec;
    bool exact;
} codecs[] = {
    {{30, 9, 3, 64}, "f32", true},
    {{30, 9, 3, 64}, "f16", false},
    {{30, 9, 3, 64}, "int8", false},
    {{30, 9, 3, 64}, "int4", true},
    {{30, 9, 3, 64}, "k=int8 v=int4(group=32,sym)", false},
    {{30, 9, 3, 64}, "int4 @0-1 kv=f32", true},
    {{2, 8, 2, 128}, "f16", true},
    {{2, 8, 2, 128}, "int8", false},
    {{2, 8, 2, 128}, "int8(sym)", true},
    {{2, 8, 2, 128}, "int4", false},
    {{2, 8, 2, 128}, "k=f16 v=int4(group=64)", false},
    {{2, 8, 2, 128}, "int3", true},
    {{2, 8, 2, 128}, "int2(group=32)", false},
    {{2, 8, 2, 128}, "q8_0", false},
    {{2, 8, 2, 128}, "q5_1", true},
    {{2, 8, 2, 128}, "q5_0", false},
    {{2, 8, 2, 128}, "q4_1", true},
    {{2, 8, 2, 128}, "k=q4_0 v=iq4_nl", false},
    {{2, 8, 2, 128}, "kivi(residual=0)", false},
    {{2, 8, 2, 128}, "k=turboquant(sketch=sign) v=turboquant", false},
    {{30, 9, 3, 64}, "k=fp8_e4m3 v=fp8_e5m2", true},
    {{30, 9, 3, 64}, "q4_0 korder=hf rope=pre", false},
    {{30, 9, 3, 64}, "int4 rot=hadamard @0-1 rot=random @2-3 rot=random(seed=1)", true},
    {{30, 9, 3, 64}, "kvquant rope=pre table=random", false},
    {{2, 8, 2, 128}, "k=kvquant(bits=2,outliers=3) v=kvquant(bits=4,outliers=0) rot=random table=random", true},
    {{2, 8, 2, 96}, "int4 rot=hadamard rope=pre", false},
};
static const char *const rests[] = {"", "sink=4", "ktail=32 vtail=7", "sink=4 tail=20", "window=96", "sink=4 window=96 tail=8"};
static const struct {
    uint32_t n_ctx, ubatch;
    enum kvl_protocol protocol;
} uses[] = {
    {300, 64, KVL_P1_FAKE_QUANT},
    {257, 100, KVL_P2_WRITE_THEN_READ},
    {190, 1, KVL_P4_STREAMING},
    {3, 512, KVL_P1_FAKE_QUANT},
};
/* Settings of papers, as they have them. */
static const struct {
    struct kvl_cache_dims dims;
    const char *kv;
    uint32_t n_ctx;
} settings[] = {
    {{1, 1, 1, 128}, "kivi", 4096},
    {{1, 1, 1, 128}, "kivi(bits=4)", 4096},
    {{1, 1, 1, 128}, "gear", 4096},
    {{1, 1, 1, 128}, "gear(bits=4,block=128,rank=4)", 4096},
    {{1, 1, 1, 128}, "k=think v=f16 table=random", 4096},
    {{1, 1, 1, 128}, "int4(group=32,e4m3)", 4096},
    {{1, 1, 1, 128}, "kivi(e5m2)", 4096},
    {{30, 9, 3, 64}, "latent(rank=32,of=int4) table=random", 4096},
    {{2, 4, 2, 32}, "latent(rank=48,heads=2) rope=pre rot=random sink=4 tail=20 table=random", 300},
    {{27, 16, 1, 576, .joint_value_dim = 512}, "int8 rot=hadamard", 4096}, /* DeepSeek-V2-Lite's rows */
    {{30, 9, 3, 64}, "k=latent(energy=0.99,of=int8) v=latent(rank=48,spread) table=random", 4096},
    {{30, 9, 3, 64}, "latent(rank=160,layers=5,heads=3) rope=pre table=random", 4096},
    {{4, 4, 2, 32}, "latent(rank=48,layers=2,of=int8) rot=random sink=4 ktail=20 vtail=3 table=random", 300},
    {{30, 9, 3, 64}, "read=pages(tokens=1024,size=16,dense=2)", 4096},
    {{30, 9, 3, 64}, "int4 sink=4 tail=20 read=pages(tokens=300,size=32)", 4096},
    {{30, 9, 3, 64}, "int8 keep=h2o budget=uniform(tokens=512) when=full", 4096},
    {{30, 9, 3, 64}, "int8 keep=snapkv(window=32) budget=uniform(tokens=512) when=every:64", 4096},
    {{30, 9, 3, 64}, "int8 keep=snapkv(window=32) budget=ada(tokens=512) when=every:64", 4096},
    {{2, 4, 2, 32}, "f16 sink=4 tail=8 keep=critical(of=expected) budget=ada(kept=0.25,safeguard=0) when=every:10", 300},
};
#define COUNT(list) (sizeof(list) / sizeof *(list))
enum { N_MIXES = COUNT(codecs) * COUNT(rests), N_ROWS = N_MIXES + COUNT(settings) };

struct composition {
    struct kvl_cache_dims dims;
    struct kvl_cache_config config;
    char text[160];
    struct kvl_spec *spec;
};

static void composition_open(size_t i, struct composition *c)
{
    if (i < N_MIXES) {
        const size_t codec = i / COUNT(rests), rest = i % COUNT(rests), use = (codec + rest) % COUNT(uses);
        c->dims = codecs[codec].dims;
        snprintf(c->text, sizeof c->text, "%s%s%s", rests[rest], *rests[rest] ? " " : "", codecs[codec].codec);
        c->config = (struct kvl_cache_config){NULL, uses[use].n_ctx, uses[use].ubatch, uses[use].protocol, codecs[codec].exact};
    } else {
        c->dims = settings[i - N_MIXES].dims;
        snprintf(c->text, sizeof c->text, "%s", settings[i - N_MIXES].kv);
        c->config = (struct kvl_cache_config){NULL, settings[i - N_MIXES].n_ctx, 1, KVL_P4_STREAMING, false};
    }
    assert_ok(kvl_spec_parse(c->text, &c->spec));
    assert_ok(kvl_spec_load_tables(c->spec, random_table, &c->dims));
    c->config.spec = c->spec;
}

static void make_plan(const struct composition *c, const struct kvl_cache_limits *limits, struct kvl_cache_plan *plan)
{
    if (kvl_cache_plan_make(&c->dims, &c->config, limits, plan) != KVL_OK) fail_msg("\"%s\": %s", c->text, kvl_error_text());
}

/* ---- the file ---- */

static const struct kvl_cache_limits csv_limits = {1ull << 32, 2};

static uint64_t page_bytes(const struct kvl_cache_plan *plan)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < plan->n_slabs; i++) sum += plan->slab_bytes[i];
    return sum;
}

static void expected_csv(struct kvl_text *out)
{
    assert_ok(kvl_text_printf(out,
                              "n_layer,n_head,n_kv_head,head_dim,kv,n_ctx,ubatch,protocol,exact,page_bytes,exact_bytes,table_bytes,"
                              "tables_bytes,scratch_bytes,bytes_per_token,resident_bytes\n"));
    for (size_t i = 0; i < N_ROWS; i++) {
        struct composition c;
        struct kvl_cache_plan p;
        composition_open(i, &c);
        make_plan(&c, &csv_limits, &p);
        assert_ok(kvl_text_printf(
            out, "%u,%u,%u,%u,\"%s\",%u,%u,%s,%d,%llu,%llu,%llu,%llu,%llu,%llu,%llu\n", c.dims.n_layer, c.dims.n_head, c.dims.n_kv_head,
            c.dims.head_dim, c.text, c.config.n_ctx, c.config.ubatch, kvl_protocol_name[c.config.protocol], c.config.exact,
            (unsigned long long)page_bytes(&p), (unsigned long long)p.exact_bytes, (unsigned long long)p.table_bytes,
            (unsigned long long)(p.n_table_floats * sizeof(float)), (unsigned long long)p.scratch_bytes, (unsigned long long)p.bytes_per_token, (unsigned long long)p.resident_bytes));
        kvl_cache_plan_free(&p);
        kvl_spec_free(&c.spec);
    }
}

/* The first line in which two texts differ. */
static void fail_at_difference(const char *planned, const char *held)
{
    size_t line = 1;
    while (strcspn(planned, "\n") == strcspn(held, "\n") && strncmp(planned, held, strcspn(held, "\n")) == 0) {
        planned += strcspn(planned, "\n") + 1;
        held += strcspn(held, "\n") + 1;
        line++;
    }
    fail_msg("%s:%zu:\n  file %.*s\n  plan %.*s", limits_csv, line, (int)strcspn(held, "\n"), held, (int)strcspn(planned, "\n"),
             planned);
}

static void plan_equals_file(void **state)
{
    struct kvl_text planned = {0};
    char *held = NULL;
    size_t size;
    expected_csv(&planned);
    if (getenv("KVLAB_WRITE_LIMITS")) assert_ok(kvl_file_write(limits_csv, planned.data, planned.size));
    assert_ok(kvl_file_read(limits_csv, &held, &size));
    if (strcmp(planned.data, held) != 0) fail_at_difference(planned.data, held);
    kvl_text_free(&planned);
    kvl_free(&held);
}

/* ---- a device ---- */

static bool add_entry(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    uint64_t *sums = context;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) sums[c] += bytes[c];
    return true;
}

/* Nothing else is allocated on the device, so its ledger is the cache's. */
static void caches_hold_what_was_planned(void **state)
{
    const struct kvl_cache_limits limits = kvl_cache_limits_of(kvl_test_device);
    for (size_t i = 0; i < N_ROWS; i++) {
        struct composition c;
        struct kvl_cache_plan plan, taken;
        struct kvl_cache *cache = NULL;
        struct kvl_ledger ledger;
        uint64_t walked[KVL_MEM_CLASSES] = {0}, stated[KVL_MEM_CLASSES], sum = 0;
        composition_open(i, &c);
        make_plan(&c, &limits, &plan);
        make_plan(&c, &limits, &taken);
        if (kvl_cache_new(kvl_test_device, &taken, &cache) != KVL_OK) fail_msg("\"%s\": %s", c.text, kvl_error_text());
        assert_ok(kvl_cache_bytes(cache, stated));
        kvl_ledger_walk(kvl_test_device, add_entry, walked);
        kvl_ledger_read(kvl_test_device, &ledger);
        for (int k = 0; k < KVL_MEM_CLASSES; k++) {
            if (walked[k] != stated[k]) fail_msg("\"%s\": %s", c.text, kvl_mem_class_name[k]);
            sum += walked[k];
        }
        assert_int_equal(walked[KVL_MEM_SCRATCH], plan.scratch_bytes);
        if (kvl_pages_by_layer(&plan)) assert_true(sum < plan.resident_bytes + plan.scratch_bytes); /* pages come with the prompt */
        else assert_int_equal(sum, plan.resident_bytes + plan.scratch_bytes);
        assert_int_equal(sum, ledger.total);
        kvl_cache_free(&cache);
        kvl_cache_plan_free(&plan);
        kvl_spec_free(&c.spec);
    }
}

/* Attention of random tokens over a cache whose buffers are at most max_alloc bytes. */
static void attend_random(const struct composition *c, uint64_t max_alloc, uint32_t *n_slabs, float *out)
{
    const uint32_t n = c->config.n_ctx, row = (c->dims.n_head + 2 * c->dims.n_kv_head) * c->dims.head_dim;
    const uint64_t out_bytes = (uint64_t)n * c->dims.n_head * c->dims.head_dim * sizeof(float);
    struct kvl_cache_limits limits = kvl_cache_limits_of(kvl_test_device);
    struct kvl_cache_plan plan;
    struct kvl_cache *cache = NULL;
    struct kvl_buffer *stage = NULL, *rotary = NULL, *result = NULL;
    float *x = NULL;
    limits.max_alloc_bytes = max_alloc < limits.max_alloc_bytes ? max_alloc : limits.max_alloc_bytes;
    make_plan(c, &limits, &plan);
    *n_slabs = plan.n_slabs;
    assert_ok(kvl_cache_new(kvl_test_device, &plan, &cache));
    assert_ok(kvl_alloc(&x, (size_t)n * row, sizeof *x));
    for (size_t i = 0; i < (size_t)n * row; i++) x[i] = (float)kvl_rng_normal(1, i);
    assert_ok(kvl_buffer_new(kvl_test_device, "stage", -1, KVL_MEM_SCRATCH, (uint64_t)n * row * sizeof *x, false, &stage));
    assert_ok(kvl_buffer_new(kvl_test_device, "rotary", -1, KVL_MEM_SCRATCH, 64, true, &rotary));
    assert_ok(kvl_buffer_new(kvl_test_device, "out", -1, KVL_MEM_SCRATCH, out_bytes, true, &result));
    assert_ok(kvl_buffer_write(stage, 0, (uint64_t)n * row * sizeof *x, x));
    for (uint32_t l = 0; l < c->dims.n_layer; l++) assert_ok(kvl_cache_step(cache, l, n, stage, rotary, 0, result));
    assert_ok(kvl_buffer_read(result, 0, out_bytes, out));
    kvl_cache_free(&cache);
    kvl_buffer_free(&stage);
    kvl_buffer_free(&rotary);
    kvl_buffer_free(&result);
    kvl_free(&x);
}

/* The bits do not depend on where pages lie. */
static void slabs_do_not_matter(void **state)
{
    enum { TOKENS = 200, OUT = TOKENS * 9 * 64 };
    static const uint64_t max_alloc[] = {~0ull, 50000, 9000};
    static const uint32_t wanted[] = {1, 2, 12}; /* 12 pages of 8192 bytes and 12 of 2304 */
    struct composition c = {.dims = {1, 9, 3, 64}, .text = "k=f16 v=int4"};
    float *out[2] = {NULL};
    assert_ok(kvl_spec_parse(c.text, &c.spec));
    c.config = (struct kvl_cache_config){c.spec, TOKENS, TOKENS, KVL_P2_WRITE_THEN_READ, true};
    for (size_t i = 0; i < 2; i++) assert_ok(kvl_alloc(&out[i], OUT, sizeof *out[i]));
    for (size_t i = 0; i < COUNT(max_alloc); i++) {
        uint32_t n_slabs;
        attend_random(&c, max_alloc[i], &n_slabs, out[i > 0]);
        print_message("    %u slabs\n", n_slabs);
        assert_true(n_slabs >= wanted[i]);
        if (i > 0) assert_memory_equal(out[0], out[1], OUT * sizeof *out[0]);
    }
    for (size_t i = 0; i < 2; i++) kvl_free(&out[i]);
    kvl_spec_free(&c.spec);
}

/* Weights, cache and scratch of a whole session with a full context, by class. */
static void sessions_hold_what_was_planned(void **state)
{
    static const char *const specs[] = {"int4 sink=4 tail=20", "int8 window=40", "k=think(recent=9) v=int4 sink=4", "int8 read=pages(tokens=70,size=16)"};
    enum { N_CTX = 100 };
    const struct kvl_cache_limits limits = kvl_cache_limits_of(kvl_test_device);
    struct kvl_model *model = NULL;
    struct kvl_weights *weights = NULL;
    int32_t tokens[N_CTX];
    assert_ok(kvl_model_open(KVL_ROOT "/data/models/tiny.gguf", &model));
    assert_ok(kvl_weights_load(model, kvl_test_device, &weights));
    for (int i = 0; i < N_CTX; i++) tokens[i] = i % 100;
    for (size_t i = 0; i < COUNT(specs); i++)
        for (enum kvl_protocol p = KVL_P1_FAKE_QUANT; p <= KVL_P4_STREAMING; p++) {
            struct kvl_spec *spec = NULL;
            struct kvl_session *session = NULL;
            struct kvl_footprint one;
            struct kvl_cache_bytes bytes;
            uint64_t walked[KVL_MEM_CLASSES] = {0};
            if (p == KVL_P3_PREFILL_EXACT) continue;
            assert_ok(kvl_spec_parse(specs[i], &spec));
            if (p == KVL_P1_FAKE_QUANT && (kvl_spec_learner(spec) != NULL || kvl_spec_picks(spec))) {
                kvl_spec_free(&spec);
                continue;
            }
            const struct kvl_session_config config = {.spec = spec, .n_ctx = N_CTX, .ubatch = 32, .protocol = p};
            assert_ok(kvl_footprint_of(&model->dims, &config, &limits, &one));
            one.bytes[KVL_MEM_WEIGHTS] = kvl_weights_bytes(model);
            assert_ok(kvl_session_new(weights, &config, &session));
            assert_ok(kvl_session_forward(session, tokens, N_CTX, 0));
            assert_ok(kvl_session_bytes(session, &bytes));
            kvl_ledger_walk(kvl_test_device, add_entry, walked);
            for (int k = 0; k < KVL_MEM_CLASSES; k++)
                if (walked[k] != one.bytes[k])
                    fail_msg("%s %s, class %s: %llu bytes held, %llu planned", specs[i], kvl_protocol_name[p],
                             kvl_mem_class_name[k], (unsigned long long)walked[k], (unsigned long long)one.bytes[k]);
            assert_int_equal(bytes.resident, one.resident);
            kvl_session_free(&session);
            kvl_spec_free(&spec);
        }
    kvl_weights_free(&weights);
    kvl_model_close(&model);
}

int main(void)
{
    static const struct CMUnitTest on_host[] = {cmocka_unit_test(plan_equals_file)};
    static const struct CMUnitTest on_device[] = {
        cmocka_unit_test(caches_hold_what_was_planned),
        cmocka_unit_test(slabs_do_not_matter),
        cmocka_unit_test(sessions_hold_what_was_planned),
    };
    struct kvl_caps *list = NULL;
    size_t n = 0;
    const int failed = cmocka_run_group_tests(on_host, NULL, NULL);
    if (kvl_device_list(&list, &n) != KVL_OK) fprintf(stderr, "%s\n", kvl_error_text());
    kvl_free(&list);
    if (n == 0) fprintf(stderr, "no OpenCL device: caches not checked\n");
    return failed + (n == 0 ? 0 : kvl_on_device(NULL, on_device, COUNT(on_device)));
}
