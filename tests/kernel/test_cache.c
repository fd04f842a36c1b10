/* The cache on every device against its C specification: random heads and tokens, every codec and side mix, sinks, tails, windows,
 * protocols and ubatch sizes; then that sealed pages are never touched again, and that what is reserved is what was planned. */
#include "cache.h"
#include "mem.h"
#include "reference.h"
#include "rng.h"
#include "test_harness.h"
#include "random_table.h"
#include <math.h>
#include <string.h>

struct setup {
    struct kvl_cache_dims dims;
    struct kvl_cache_config config;
    struct kvl_spec *spec;
    struct kvl_cache *cache;
    struct kvl_cache_plan plan; /* a second one, for the reference */
    struct kvl_buffer *stage, *rotary, *out;
    float *q, *k, *v, *got, *want, *rows, *angles;
    uint32_t n_tokens, rope_dim;
};

static uint32_t row_floats(const struct setup *s) { return kvl_stage_row(&s->dims); }
static uint32_t out_floats(const struct setup *s) { return s->dims.n_head * kvl_output_dim(&s->dims); }

static void fill(struct setup *s)
{
    const size_t q_size = (size_t)s->n_tokens * s->dims.n_head * s->dims.head_dim, kv_size = q_size / s->dims.n_head * s->dims.n_kv_head;
    assert_ok(kvl_alloc(&s->q, q_size, sizeof(float)));
    assert_ok(kvl_alloc(&s->k, kv_size, sizeof(float)));
    assert_ok(kvl_alloc(&s->v, kv_size, sizeof(float)));
    assert_ok(kvl_alloc(&s->got, q_size, sizeof(float)));
    assert_ok(kvl_alloc(&s->want, q_size, sizeof(float)));
    assert_ok(kvl_alloc(&s->rows, (size_t)s->n_tokens * row_floats(s), sizeof(float)));
    assert_ok(kvl_alloc(&s->angles, (size_t)s->n_tokens * s->rope_dim + 2, sizeof(float)));
    for (size_t i = 0; i < (size_t)s->n_tokens * s->rope_dim / 2; i++) {
        const size_t pair = i % (s->rope_dim / 2);
        const double angle = (double)(i / (s->rope_dim / 2)) * pow(10000.0, -2.0 * (double)pair / s->rope_dim);
        s->angles[2 * i] = (float)cos(angle);
        s->angles[2 * i + 1] = (float)sin(angle);
    }
    for (size_t i = 0; i < q_size; i++) s->q[i] = (float)kvl_rng_normal(1, i);
    for (size_t i = 0; i < kv_size; i++) {
        s->k[i] = (float)(2.0 * kvl_rng_normal(2, i) + (double)(i % 5));
        s->v[i] = (float)kvl_rng_normal(3, i);
    }
    const uint32_t d = s->dims.head_dim;
    for (uint32_t t = 0; t < s->n_tokens; t++) {
        float *row = s->rows + (size_t)t * row_floats(s);
        memcpy(row, s->q + (size_t)t * s->dims.n_head * d, s->dims.n_head * d * sizeof(float));
        memcpy(row + s->dims.n_head * d, s->k + (size_t)t * s->dims.n_kv_head * d, s->dims.n_kv_head * d * sizeof(float));
        if (kvl_sides(&s->dims) == 1) continue;
        memcpy(row + (s->dims.n_head + s->dims.n_kv_head) * d, s->v + (size_t)t * s->dims.n_kv_head * d, s->dims.n_kv_head * d * sizeof(float));
    }
}

static void open_setup(struct setup *s, const char *spec)
{
    struct kvl_device *device = kvl_test_device;
    const struct kvl_cache_limits limits = kvl_cache_limits_of(device);
    struct kvl_cache_plan plan;
    assert_ok(kvl_spec_parse(spec, &s->spec));
    assert_ok(kvl_spec_load_tables(s->spec, random_table, &s->dims));
    s->config.spec = s->spec;
    assert_ok(kvl_cache_plan_make(&s->dims, &s->config, &limits, &plan));
    assert_ok(kvl_cache_plan_make(&s->dims, &s->config, &limits, &s->plan));
    assert_ok(kvl_cache_new(device, &plan, &s->cache));
    fill(s);
    const uint64_t u = kvl_cache_ubatch(&s->config);
    kvl_new_float_buffer("stage", u * row_floats(s), NULL, &s->stage);
    kvl_new_float_buffer("rotary", (uint64_t)s->n_tokens * s->rope_dim + 2, s->angles, &s->rotary);
    kvl_new_float_buffer("out", u * out_floats(s), NULL, &s->out);
}

static void close_setup(struct setup *s)
{
    kvl_cache_free(&s->cache);
    kvl_cache_plan_free(&s->plan);
    kvl_buffer_free(&s->stage);
    kvl_buffer_free(&s->rotary);
    kvl_buffer_free(&s->out);
    kvl_spec_free(&s->spec);
    kvl_free(&s->q);
    kvl_free(&s->k);
    kvl_free(&s->v);
    kvl_free(&s->got);
    kvl_free(&s->want);
    kvl_free(&s->rows);
    kvl_free(&s->angles);
}

/* Appends the first n tokens to layer 0 without reading them: no attention kernel needs to be built. */
static void store(struct setup *s, uint32_t n)
{
    assert_ok(kvl_buffer_write(s->stage, 0, (uint64_t)n * row_floats(s) * sizeof(float), s->rows));
    assert_ok(kvl_cache_step(s->cache, 0, n, s->stage, s->rotary, s->rope_dim, NULL));
    kvl_cache_advance(s->cache, n);
}

/* Feeds tokens [from, to) in pieces of u through layer 0; results to got. False: the device ends loops too early, and the cache has said so. */
static bool feed_unless_cut(struct setup *s, uint32_t from, uint32_t to, uint32_t u)
{
    const size_t out_row = out_floats(s);
    for (uint32_t p = from; p < to; p += u) {
        const uint32_t n = to - p < u ? to - p : u;
        assert_ok(kvl_buffer_write(s->stage, 0, (uint64_t)n * row_floats(s) * sizeof(float), s->rows + (size_t)p * row_floats(s)));
        const kvl_status status = kvl_cache_step(s->cache, 0, n, s->stage, s->rotary, s->rope_dim, s->out);
        if (status == KVL_E_UNSUPPORTED && kvl_loops_are_cut(kvl_device_caps(kvl_test_device)) && strstr(kvl_error_text(), "ends long loops") != NULL) return false;
        if (status != KVL_OK) fail_msg("%s", kvl_error_text());
        kvl_cache_advance(s->cache, n);
        assert_ok(kvl_buffer_read(s->out, 0, n * out_row * sizeof(float), s->got + p * out_row));
    }
    return true;
}

static void feed(struct setup *s, uint32_t from, uint32_t to, uint32_t u)
{
    if (!feed_unless_cut(s, from, to, u)) fail_msg("%s", kvl_error_text());
}

static double worst_difference(const struct setup *s)
{
    double worst = 0.0;
    for (size_t i = 0; i < (size_t)s->n_tokens * out_floats(s); i++) {
        const double d = fabs((double)s->got[i] - s->want[i]);
        if (!(d <= worst)) worst = d; /* a NaN counts */
    }
    return worst;
}

static const struct kvl_cache_dims dims_smol = {1, 9, 3, 64}, dims_tiny = {1, 6, 2, 16}, dims_one = {1, 1, 1, 128}, dims_wide = {1, 8, 1, 32},
                                   dims_odd = {1, 4, 2, 24}, dims_forty = {1, 40, 1, 40},
                                   dims_joint = {1, 8, 1, 80, .joint_value_dim = 64, .scale = 0.1f};

static const struct row {
    const char *spec;
    const struct kvl_cache_dims *dims;
    uint32_t n_tokens, ubatch;
    enum kvl_protocol protocol;
    bool exact;
    uint32_t rope_dim;
} rows[] = {
    {"f32", &dims_smol, 150, 64, KVL_P1_FAKE_QUANT, true},
    {"f16", &dims_smol, 150, 7, KVL_P1_FAKE_QUANT, false},
    {"f16", &dims_tiny, 150, 1, KVL_P4_STREAMING, true},
    {"int8", &dims_smol, 150, 150, KVL_P2_WRITE_THEN_READ, true},
    {"int8(group=16)", &dims_tiny, 70, 64, KVL_P1_FAKE_QUANT, true},
    {"int4", &dims_smol, 200, 64, KVL_P1_FAKE_QUANT, true},
    {"int4(group=32)", &dims_one, 90, 33, KVL_P2_WRITE_THEN_READ, true},
    {"int4(group=32,sym)", &dims_wide, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"int4(group=8)", &dims_tiny, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"int8(sym)", &dims_one, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"int3", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"k=int3(sym) v=int2(sym)", &dims_one, 90, 33, KVL_P2_WRITE_THEN_READ, true},
    {"int2(group=32)", &dims_smol, 130, 1, KVL_P4_STREAMING, true},
    {"k=int2 v=int3(group=8)", &dims_tiny, 70, 64, KVL_P1_FAKE_QUANT, true},
    {"q8_0", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"q5_1", &dims_smol, 130, 33, KVL_P2_WRITE_THEN_READ, true},
    {"q5_0", &dims_one, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"q4_1", &dims_one, 90, 1, KVL_P4_STREAMING, true},
    {"q4_0 sink=4 tail=20", &dims_smol, 130, 32, KVL_P1_FAKE_QUANT, false},
    {"iq4_nl", &dims_wide, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"k=q5_1 v=q5_0", &dims_wide, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"fp8_e4m3", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"k=fp8_e5m2 v=fp8_e4m3", &dims_tiny, 90, 7, KVL_P2_WRITE_THEN_READ, true},
    {"k=fp8_e4m3 v=fp8_e5m2", &dims_one, 90, 64, KVL_P1_FAKE_QUANT, true},
    {"kivi(residual=0)", &dims_smol, 150, 64, KVL_P1_FAKE_QUANT, true},
    {"kivi(bits=4,group=16,residual=48)", &dims_tiny, 150, 1, KVL_P4_STREAMING, false},
    {"kivi sink=4", &dims_one, 300, 33, KVL_P2_WRITE_THEN_READ, true},
    {"k=kivi(residual=32) v=int4 window=70", &dims_smol, 300, 13, KVL_P2_WRITE_THEN_READ, true},
    {"k=kivi(bits=3,group=48,residual=0) v=kivi(residual=0,channel)", &dims_smol, 200, 200, KVL_P1_FAKE_QUANT, true},
    {"gear", &dims_smol, 150, 64, KVL_P1_FAKE_QUANT, true},
    {"gear(bits=4,block=16,outliers=2,rank=3)", &dims_tiny, 90, 1, KVL_P4_STREAMING, true},
    {"k=turboquant(bits=4,sketch=sign) v=turboquant", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"turboquant(bits=2)", &dims_odd, 90, 33, KVL_P2_WRITE_THEN_READ, true},
    {"k=int8 v=int4", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"k=f32 v=int4(group=16)", &dims_smol, 130, 1, KVL_P4_STREAMING, true},
    {"int4 sink=4", &dims_smol, 130, 32, KVL_P1_FAKE_QUANT, true},
    {"int4 sink=4 tail=20", &dims_smol, 150, 32, KVL_P1_FAKE_QUANT, true},
    {"int4 sink=4 tail=20", &dims_smol, 150, 32, KVL_P1_FAKE_QUANT, false},
    {"int4 sink=70 ktail=10 vtail=50", &dims_tiny, 200, 48, KVL_P1_FAKE_QUANT, true},
    {"int4 sink=4 tail=20", &dims_tiny, 150, 32, KVL_P2_WRITE_THEN_READ, true},
    {"int8 ktail=40 vtail=3", &dims_tiny, 150, 1, KVL_P4_STREAMING, true},
    {"f16 sink=4 window=40", &dims_smol, 300, 64, KVL_P1_FAKE_QUANT, true},
    {"int8 window=70", &dims_smol, 300, 13, KVL_P1_FAKE_QUANT, true},
    {"int4 sink=3 window=33 tail=8", &dims_tiny, 300, 1, KVL_P4_STREAMING, true},
    {"f16 sink=4 window=40 pos=compact", &dims_smol, 200, 33, KVL_P2_WRITE_THEN_READ, true, 64},
    {"int8 korder=hf rot=hadamard sink=3 window=33 tail=8 pos=compact", &dims_one, 200, 1, KVL_P4_STREAMING, true, 96},
    {"int8 rope=pre rot=hadamard sink=5 window=33 pos=compact", &dims_tiny, 200, 1, KVL_P4_STREAMING, false, 16},
    {"f16 tail=3", &dims_odd, 90, 32, KVL_P1_FAKE_QUANT, true},
    {"int8", &dims_forty, 70, 16, KVL_P1_FAKE_QUANT, true},
    {"f16", &dims_forty, 1100, 1, KVL_P4_STREAMING, false}, /* many query heads a kv head, split */
    {"f16 window=1", &dims_tiny, 100, 16, KVL_P1_FAKE_QUANT, true},
    {"int8", &dims_smol, 90, 32, KVL_P1_FAKE_QUANT, true, 64},
    {"f32 rope=pre", &dims_smol, 150, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"int8 rope=pre sink=5 window=33 pos=compact", &dims_tiny, 200, 1, KVL_P4_STREAMING, false, 16},
    {"f16 rope=pre", &dims_smol, 150, 64, KVL_P2_WRITE_THEN_READ, false, 64},
    {"k=kivi(bits=2,group=16,residual=0) v=f16 rope=pre", &dims_smol, 150, 32, KVL_P1_FAKE_QUANT, true, 64},
    {"k=kivi(bits=3,residual=0) v=f16 rope=pre", &dims_smol, 150, 1, KVL_P4_STREAMING, true, 48},
    {"int4 rope=pre", &dims_smol, 150, 1, KVL_P4_STREAMING, true, 48},
    {"int4 rope=pre sink=4 tail=20", &dims_tiny, 150, 32, KVL_P1_FAKE_QUANT, false, 16},
    {"int8 rope=pre korder=hf sink=4 window=40", &dims_one, 150, 16, KVL_P2_WRITE_THEN_READ, true, 96},
    {"int4 korder=hf", &dims_smol, 90, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"q4_0 korder=hf sink=4 tail=20", &dims_smol, 130, 32, KVL_P1_FAKE_QUANT, false, 64},
    {"int4 rot=hadamard", &dims_smol, 150, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"int4 rot=hadamard", &dims_one, 130, 1, KVL_P4_STREAMING, true, 128},
    {"int8 rot=hadamard sink=4 tail=20", &dims_odd, 130, 32, KVL_P1_FAKE_QUANT, true, 24}, /* 12 x 2 */
    {"int8 rot=hadamard", &dims_forty, 70, 16, KVL_P2_WRITE_THEN_READ, true, 40},           /* 20 x 2 */
    {"int4 rot=random(seed=3) tail=9", &dims_smol, 130, 33, KVL_P2_WRITE_THEN_READ, false, 64},
    {"int4 rope=pre rot=hadamard korder=hf sink=3 tail=8", &dims_smol, 130, 32, KVL_P1_FAKE_QUANT, true, 64},
    {"int8 rope=pre rot=random", &dims_odd, 90, 1, KVL_P4_STREAMING, true, 16},
    {"kvquant rope=pre sink=1 table=random", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"k=kvquant(bits=2) v=kvquant(bits=4,outliers=0) table=random", &dims_smol, 130, 1, KVL_P4_STREAMING, true, 64},
    {"k=kvquant(bits=4,outliers=5) v=int4 rot=hadamard table=random", &dims_one, 90, 33, KVL_P2_WRITE_THEN_READ, true, 64},
    {"k=f16 v=kvquant(outliers=10) tail=7 table=random", &dims_odd, 90, 64, KVL_P1_FAKE_QUANT, false, 24},
    {"kvquant(bits=2,qnorm) table=random", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"int4(group=32,clip=0.5,search=4,e4m3)", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true},
    {"k=int2(sym,clip=0.8,e5m2) v=int3(group=8,e4m3)", &dims_tiny, 90, 33, KVL_P2_WRITE_THEN_READ, true},
    {"kivi(residual=32,e4m3)", &dims_smol, 150, 1, KVL_P4_STREAMING, false},
    {"k=kivi(group=16,residual=0,clip=0.6,search=3) v=kivi(channel,residual=0,e5m2)", &dims_odd, 90, 90, KVL_P1_FAKE_QUANT, true},
    {"k=think(recent=0) v=f32 table=random", &dims_smol, 150, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"k=think(ratio=0.7) v=int4 sink=4 table=random", &dims_odd, 90, 33, KVL_P2_WRITE_THEN_READ, false, 24},
    {"k=think(recent=8,unit=24) v=f16 korder=hf table=random", &dims_tiny, 150, 1, KVL_P4_STREAMING, true, 16},
    /* the reference makes rows again whatever the device does, so both forms are compared with the same */
    {"latent(rank=32,of=f32) table=random", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"latent(rank=32,of=f32,read=rebuilt) table=random", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"latent(rank=64,of=f32) rope=pre table=random", &dims_smol, 130, 1, KVL_P4_STREAMING, true, 64},
    {"k=latent(rank=64,heads=3) v=latent(rank=96,heads=3) sink=4 tail=20 table=random", &dims_smol, 150, 32, KVL_P1_FAKE_QUANT, false, 64},
    {"latent(rank=48,heads=3,of=int8,read=rebuilt) rope=pre rot=hadamard sink=3 tail=8 table=random", &dims_smol, 130, 33, KVL_P2_WRITE_THEN_READ, false, 48},
    {"k=latent(energy=0.99,of=int8) v=latent(rank=48,spread) table=random", &dims_smol, 130, 64, KVL_P2_WRITE_THEN_READ, false, 64},
    {"k=latent(rank=32,of=int4) v=int8 rot=hadamard korder=hf table=random", &dims_smol, 130, 64, KVL_P1_FAKE_QUANT, true, 64},
    {"k=int4 v=latent(rank=16,of=kivi(bits=4,group=16,residual=32)) window=70 table=random", &dims_smol, 150, 13, KVL_P2_WRITE_THEN_READ, true, 64},
    {"latent(rank=8,of=int8) rot=random(seed=2) table=random", &dims_odd, 90, 1, KVL_P4_STREAMING, true, 24},
    {"f32", &dims_joint, 150, 64, KVL_P1_FAKE_QUANT, true, 16},
    {"f16 sink=4 tail=20", &dims_joint, 150, 1, KVL_P4_STREAMING, false, 16},
    {"int4 rot=hadamard sink=2", &dims_joint, 150, 33, KVL_P2_WRITE_THEN_READ, true, 16},
    {"int8 rope=pre korder=hf window=40", &dims_joint, 150, 16, KVL_P1_FAKE_QUANT, true, 16},
};

/* llvmpipe's fma loses the sign of zero, which a projected row's zero point may be. */
static bool is_sign_of_zero(const char *spec, uint8_t got, uint8_t want)
{
    return kvl_device_is_slow() && strncmp(spec, "latent", 6) == 0 && got == 0 && want == 0x80;
}

static void run_row(const struct row *row)
{
    struct setup s = {.dims = *row->dims, .n_tokens = row->n_tokens, .rope_dim = row->rope_dim};
    s.config = (struct kvl_cache_config){.n_ctx = row->n_tokens, .ubatch = row->ubatch, .protocol = row->protocol, .exact = row->exact};
    open_setup(&s, row->spec);
    if (!feed_unless_cut(&s, 0, s.n_tokens, kvl_cache_ubatch(&s.config))) {
        print_message("    %-50s refused: %s\n", row->spec, kvl_error_text());
        close_setup(&s);
        return;
    }
    assert_ok(kvl_reference_attend(&s.plan, 0, s.n_tokens, s.q, s.k, s.v, (struct kvl_rope){s.angles, s.rope_dim}, s.want));
    const double worst = worst_difference(&s);
    print_message("    %-50s %s u=%-3u largest difference %.2e\n", row->spec, kvl_protocol_name[row->protocol], row->ubatch, worst);
    assert_true(worst < 2e-5);

    uint64_t bytes[KVL_MEM_CLASSES], total = 0;
    assert_ok(kvl_cache_bytes(s.cache, bytes));
    for (int c = 0; c < KVL_MEM_CLASSES; c++) total += bytes[c];
    struct kvl_ledger ledger;
    kvl_ledger_read(kvl_test_device, &ledger);
    const uint64_t own = kvl_buffer_bytes(s.stage) + kvl_buffer_bytes(s.rotary) + kvl_buffer_bytes(s.out);
    assert_int_equal(total, s.plan.resident_bytes + s.plan.scratch_bytes);
    assert_int_equal(ledger.total, total + own);
    close_setup(&s);
}

static void cache_equals_reference(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i += kvl_row_step(3))
        if (kvl_row_is_wanted(rows[i].spec)) run_row(&rows[i]);
}

/* One query's result does not depend on how many tokens are computed with it, for per-token codecs (to 1e-6: the programs for one token and for
 * a tile may order a sum differently). */
static void chunk_size_does_not_matter(void **state)
{
    static const uint32_t chunks[] = {1, 7, 64, 512};
    const uint32_t n_tokens = kvl_device_is_slow() ? 128 : 512;
    float *first = NULL;
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
        struct setup s = {.dims = dims_smol, .n_tokens = n_tokens};
        s.config = (struct kvl_cache_config){.n_ctx = n_tokens, .ubatch = chunks[i], .protocol = KVL_P1_FAKE_QUANT, .exact = true};
        open_setup(&s, "int4 sink=4 tail=9");
        feed(&s, 0, s.n_tokens, chunks[i]);
        const size_t size = (size_t)n_tokens * dims_smol.n_head * dims_smol.head_dim;
        if (first == NULL) {
            assert_ok(kvl_alloc(&first, size, sizeof *first));
            memcpy(first, s.got, size * sizeof *first);
        }
        for (size_t j = 0; j < size; j++) assert_true(fabsf(first[j] - s.got[j]) <= 1e-6f);
        close_setup(&s);
    }
    kvl_free(&first);
}

/* Every codec, with options that change how bytes are made. */
static const char *const stored[] = {
    "f16", "int8", "int4", "int4(group=16)", "int8(sym)", "int4(sym)", "int3", "int3(group=8,sym)", "int2(group=32)", "int2(sym)", "q8_0", "q5_1",
    "q5_0", "q4_1", "q4_0", "iq4_nl", "fp8_e4m3", "fp8_e5m2", "kivi(residual=0)", "k=kivi(residual=0,bits=3) v=kivi(residual=0,channel,bits=4)",
    "turboquant", "k=turboquant(bits=4,sketch=sign) v=turboquant(bits=1)", "kvquant table=random",
    "kvquant(bits=2,outliers=4) rope=pre table=random", "kvquant(bits=4,outliers=0) table=random", "gear",
    "gear(bits=3,block=32,outliers=3,rank=1)", "k=think(recent=0) v=f16 table=random", "int4(clip=0.95)", "int2(group=32,clip=0.4,search=6)",
    "k=int3(sym,clip=0.5,search=5,e4m3) v=int4(group=16,e4m3)", "int8(e5m2)", "kivi(residual=0,clip=0.6,search=4,e4m3)",
    "k=kivi(token,residual=0,e5m2) v=kivi(channel,residual=0,bits=4,clip=0.9)", "latent(rank=48,of=int4) rot=hadamard table=random",
    "latent(rank=32,heads=3,of=int8) rope=pre table=random",
};
enum { N_STORED = sizeof stored / sizeof *stored };

/* A sealed page keeps its bytes while more tokens come. */
static void seal_and_go_on(const char *spec)
{
    enum { MOST = 1 << 16 };
    struct setup s = {.dims = dims_smol, .n_tokens = 288};
    static uint8_t before[KVL_SIDES][MOST], after[MOST];
    s.config = (struct kvl_cache_config){.n_ctx = 288, .ubatch = 96, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
    open_setup(&s, spec);
    const uint32_t last = s.plan.layer[0].n_stream - 1;
    for (int piece = 0; piece < 3; piece++) {
        store(&s, 96);
        for (int side = 0; side < KVL_SIDES; side++) {
            const uint64_t bytes = s.plan.layer[0].side[side].page_bytes;
            uint32_t nonzero = 0;
            assert_true(bytes <= MOST);
            assert_ok(kvl_cache_read_page(s.cache, 0, side, last, 0, piece == 0 ? before[side] : after));
            for (uint64_t i = 0; piece == 0 && i < bytes; i++) nonzero += before[side][i] != 0;
            assert_true(piece > 0 || nonzero > bytes / 4);
            if (piece > 0) assert_memory_equal(before[side], after, bytes);
        }
    }
    close_setup(&s);
}

static void sealed_stays_sealed(void **state)
{
    if (kvl_row_is_wanted("kivi(residual=32)")) seal_and_go_on("kivi(residual=32)");
    for (size_t i = 0; i < N_STORED; i += kvl_row_step(5))
        if (kvl_row_is_wanted(stored[i])) seal_and_go_on(stored[i]);
}

/* Codes written on the device are those of the C reference, bit for bit. */
static void codes_equal_reference(void **state)
{
    for (size_t i = 0; i < N_STORED; i++) {
        if (!kvl_row_is_wanted(stored[i])) continue;
        struct setup s = {.dims = dims_smol, .n_tokens = 64};
        s.config = (struct kvl_cache_config){.n_ctx = 64, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
        open_setup(&s, stored[i]);
        for (uint32_t t = 0; t < 9; t++) { /* rows that hurt: zeros, constants, tiny, huge, one outlier, ties, a scale whose reciprocal is hard */
            float *k = s.rows + (size_t)t * row_floats(&s) + (size_t)s.dims.n_head * s.dims.head_dim;
            static const float hard[9][2] = {{0, 0},        {1.5f, 1.5f}, {1e-7f, -1e-7f}, {60000.f, -60000.f},                {0, 1},
                                             {-7.5f, 7.5f}, {1e-41f, 0},  {255, 0},        {-0x1.fffffep+0f, 0x1.ffffdep-4f}};
            for (uint32_t c = 0; c < s.dims.n_kv_head * s.dims.head_dim; c++) {
                k[c] = t == 7 ? (float)(c % 64) * 4.5f : hard[t][c % 2];
                s.k[(size_t)t * s.dims.n_kv_head * s.dims.head_dim + c] = k[c];
            }
        }
        store(&s, 64);
        for (int side = 0; side < KVL_SIDES; side++) {
            const struct kvl_side_plan *plan = &s.plan.layer[0].side[side];
            const uint32_t streams = s.plan.layer[0].n_stream, last = streams - 1, channels = plan->record.channels;
            uint8_t got[1 << 16] = {0}, want[1 << 16] = {0};
            float x[64 * 64], records[64 * 3 * 64];
            assert_ok(kvl_reference_records(&s.plan, 0, side, 64, side == KVL_SIDE_K ? s.k : s.v, (struct kvl_rope){0}, records));
            for (uint32_t t = 0; t < 64; t++)
                memcpy(x + (size_t)t * channels, records + ((size_t)t * streams + last) * channels, channels * sizeof(float));
            assert_int_equal(plan->codec->ref_encode(plan->priv, &plan->dims, kvl_side_table(plan, last), 0, 64, x, want), 0);
            assert_ok(kvl_cache_read_page(s.cache, 0, side, last, 0, got));
            for (uint64_t b = 0; b < plan->page_bytes; b++)
                if (got[b] != want[b] && !is_sign_of_zero(stored[i], got[b], want[b]))
                    fail_msg("%s side %d byte %llu: device %u, reference %u", stored[i], side, (unsigned long long)b, got[b], want[b]);
        }
        close_setup(&s);
    }
}

static void nonfinite_input_is_counted(void **state)
{
    struct setup s = {.dims = dims_smol, .n_tokens = 64};
    struct kvl_cache_counts counts = {99, 99};
    s.config = (struct kvl_cache_config){.n_ctx = 64, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
    open_setup(&s, "int4");
    float *first_k = s.rows + (size_t)s.dims.n_head * s.dims.head_dim;
    first_k[3] = NAN;
    first_k[5] = INFINITY;
    feed(&s, 0, 64, 64);
    assert_ok(kvl_cache_counts(s.cache, &counts));
    assert_int_equal(counts.nonfinite, 2);
    assert_int_equal(counts.overflow, 0);
    for (uint32_t c = 0; c < s.dims.head_dim; c++) assert_true(isfinite(s.got[c]));
    close_setup(&s);
}

/* Keys and values of three heads that are made again one by one take longer loops than llvmpipe goes through. */
static void loops_that_a_device_cuts_are_refused(void **state)
{
    if (!kvl_loops_are_cut(kvl_device_caps(kvl_test_device))) skip();
    struct setup s = {.dims = dims_smol, .n_tokens = 600, .rope_dim = 48};
    s.config = (struct kvl_cache_config){.n_ctx = 600, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ};
    open_setup(&s, "latent(rank=48,heads=3,read=rebuilt) rope=pre table=random");
    for (uint32_t p = 0; p < 576; p += 64) store(&s, 64); /* the same rows again: only how many they are matters */
    assert_false(feed_unless_cut(&s, 576, 600, 24));
    assert_non_null(strstr(kvl_error_text(), "600 tokens"));
    kvl_error_clear();
    close_setup(&s);
}

/* A codec that learns is refused without its table, with the way to make one. */
static void missing_table_is_refused(void **state)
{
    struct kvl_cache_plan plan = {0};
    struct kvl_cache *cache = NULL;
    struct kvl_spec *spec = NULL;
    const struct kvl_cache_dims dims = dims_smol;
    const struct kvl_cache_limits limits = {1ull << 30, 2};
    static const char *const specs[] = {"kvquant", "latent(of=int4)"};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        assert_ok(kvl_spec_parse(specs[i], &spec));
        const struct kvl_cache_config config = {.spec = spec, .n_ctx = 64, .ubatch = 64};
        assert_ok(kvl_cache_plan_make(&dims, &config, &limits, &plan));
        assert_int_equal(kvl_cache_new(kvl_test_device, &plan, &cache), KVL_E_USAGE);
        assert_non_null(strstr(kvl_error_text(), "kvlab calibrate"));
        kvl_error_clear();
        kvl_spec_free(&spec);
    }
}

/* Elements outside a key channel's range that find no slot are counted. */
static void overflow_is_counted(void **state)
{
    struct setup s = {.dims = dims_smol, .n_tokens = 64};
    struct kvl_cache_counts counts = {99, 99};
    s.config = (struct kvl_cache_config){.n_ctx = 64, .ubatch = 64, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
    open_setup(&s, "kvquant table=random");
    float *k = s.rows + (size_t)3 * row_floats(&s) + (size_t)s.dims.n_head * s.dims.head_dim;
    store(&s, 64);
    assert_ok(kvl_cache_counts(s.cache, &counts));
    const uint32_t before = counts.overflow;
    kvl_cache_reset(s.cache);
    for (uint32_t c = 0; c < s.dims.head_dim; c++) k[c] = 1000.0f; /* 64 outside, one slot */
    store(&s, 64);
    assert_ok(kvl_cache_counts(s.cache, &counts));
    print_message("    %u, then %u\n", before, counts.overflow - before);
    assert_true(counts.overflow - before <= before + 63 && counts.overflow - before > before + 50);
    assert_int_equal(counts.nonfinite, 0);
    close_setup(&s);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(loops_that_a_device_cuts_are_refused), cmocka_unit_test(missing_table_is_refused), cmocka_unit_test(overflow_is_counted),
    cmocka_unit_test(cache_equals_reference), cmocka_unit_test(chunk_size_does_not_matter), cmocka_unit_test(sealed_stays_sealed),
    cmocka_unit_test(codes_equal_reference),  cmocka_unit_test(nonfinite_input_is_counted),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
