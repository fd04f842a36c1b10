/* Latents that neighbouring layers share, on every device: outputs and codes against the C specification, outputs against answers of numpy, bytes, what a
 * query reads, and what is refused. */
#include "test_harness.h"
#include "cache.h"
#include "random_table.h"
#include "reference.h"
#include "rng.h"
#include "shared_latent_answers.h"
#include <math.h>
#include <string.h>

/* All layers of a cache: a prompt, then token by token. */
struct bench {
    struct kvl_cache_dims dims;
    struct kvl_cache_config config;
    struct kvl_spec *spec;
    struct kvl_cache *cache;
    struct kvl_cache_plan plan; /* a second one, for the reference */
    struct kvl_buffer *stage, *rotary, *out;
    float *angles, *q, *k, *v, *got; /* q, got [L][T][H*G][D], k, v [L][T][H][D] */
    uint32_t n_tokens, rope_dim;
};

static size_t q_row(const struct bench *b) { return (size_t)b->dims.n_head * b->dims.head_dim; }
static size_t kv_row(const struct bench *b) { return (size_t)b->dims.n_kv_head * b->dims.head_dim; }
static struct kvl_rope rope_of(const struct bench *b) { return (struct kvl_rope){b->angles, b->rope_dim}; }

static void open_bench(struct bench *b, const char *spec, kvl_table_loader table)
{
    const struct kvl_cache_limits limits = kvl_cache_limits_of(kvl_test_device);
    const size_t rows = (size_t)b->dims.n_layer * b->n_tokens, angles = (size_t)b->n_tokens * b->rope_dim + 2;
    const uint64_t u = b->config.ubatch;
    struct kvl_cache_plan plan;
    assert_ok(kvl_alloc(&b->q, rows * q_row(b), sizeof *b->q));
    assert_ok(kvl_alloc(&b->got, rows * q_row(b), sizeof *b->got));
    assert_ok(kvl_alloc(&b->k, rows * kv_row(b), sizeof *b->k));
    assert_ok(kvl_alloc(&b->v, rows * kv_row(b), sizeof *b->v));
    assert_ok(kvl_alloc(&b->angles, angles, sizeof *b->angles));
    for (size_t i = 0; i < (size_t)b->n_tokens * b->rope_dim / 2; i++) {
        const double angle = (double)(i / (b->rope_dim / 2)) * pow(10000.0, -2.0 * (double)(i % (b->rope_dim / 2)) / b->rope_dim);
        b->angles[2 * i] = (float)cos(angle);
        b->angles[2 * i + 1] = (float)sin(angle);
    }
    for (size_t i = 0; i < rows * q_row(b); i++) b->q[i] = (float)kvl_rng_normal(1, i);
    for (size_t i = 0; i < rows * kv_row(b); i++) {
        b->k[i] = (float)(2.0 * kvl_rng_normal(2, i) + (double)(i % 5));
        b->v[i] = (float)kvl_rng_normal(3, i);
    }
    if (kvl_spec_parse(spec, &b->spec) != KVL_OK) fail_msg("%s", kvl_error_text());
    assert_ok(kvl_spec_load_tables(b->spec, table, &b->dims));
    b->config.spec = b->spec;
    b->config.n_ctx = b->n_tokens;
    assert_ok(kvl_cache_plan_make(&b->dims, &b->config, &limits, &plan));
    assert_ok(kvl_cache_plan_make(&b->dims, &b->config, &limits, &b->plan));
    assert_ok(kvl_cache_new(kvl_test_device, &plan, &b->cache));
    kvl_new_float_buffer("stage", u * (q_row(b) + 2 * kv_row(b)), NULL, &b->stage);
    kvl_new_float_buffer("rotary", angles, b->angles, &b->rotary);
    kvl_new_float_buffer("out", q_row(b), NULL, &b->out);
}

static void close_bench(struct bench *b)
{
    kvl_cache_free(&b->cache);
    kvl_cache_plan_free(&b->plan);
    kvl_buffer_free(&b->stage);
    kvl_buffer_free(&b->rotary);
    kvl_buffer_free(&b->out);
    kvl_spec_free(&b->spec);
    kvl_free(&b->angles), kvl_free(&b->q), kvl_free(&b->k), kvl_free(&b->v), kvl_free(&b->got);
}

/* Token t of layer l to row i of the stage; turned: its keys by RoPE, as a prompt hands them over. */
static void write_stage(struct bench *b, uint32_t l, uint32_t t, uint32_t i, bool turned)
{
    const uint64_t q = q_row(b) * sizeof(float), kv = kv_row(b) * sizeof(float), at = i * (q + 2 * kv), row = (uint64_t)l * b->n_tokens + t;
    float k[512];
    memcpy(k, b->k + row * kv_row(b), kv);
    for (uint32_t h = 0; h < b->dims.n_kv_head && turned; h++) kvl_reference_turn(k + (size_t)h * b->dims.head_dim, rope_of(b), t, false);
    assert_ok(kvl_buffer_write(b->stage, at, q, b->q + row * q_row(b)));
    assert_ok(kvl_buffer_write(b->stage, at + q, kv, k));
    assert_ok(kvl_buffer_write(b->stage, at + q + kv, kv, b->v + row * kv_row(b)));
}

static void prompt(struct bench *b, uint32_t n)
{
    uint32_t count[8], *token = NULL;
    assert_ok(kvl_alloc(&token, (size_t)b->dims.n_kv_head * n, sizeof *token));
    for (uint32_t i = 0; i < b->dims.n_kv_head * n; i++) token[i] = i % n;
    for (uint32_t h = 0; h < b->dims.n_kv_head; h++) count[h] = n;
    for (uint32_t l = 0; l < b->dims.n_layer; l++) {
        assert_ok(kvl_cache_fill_begin(b->cache, l, n, count, token, NULL));
        for (uint32_t first = 0; first < n; first += b->config.ubatch) {
            const uint32_t rows = n - first < b->config.ubatch ? n - first : b->config.ubatch;
            for (uint32_t i = 0; i < rows; i++) write_stage(b, l, first + i, i, b->plan.layer[l].rope == KVL_STORE_POST_ROPE);
            assert_ok(kvl_cache_fill_rows(b->cache, l, rows, b->stage, b->rotary, b->rope_dim));
        }
        assert_ok(kvl_cache_fill_end(b->cache, l, n, count));
    }
    kvl_free(&token);
}

static void decode(struct bench *b, uint32_t first)
{
    for (uint32_t t = first; t < b->n_tokens; t++) {
        for (uint32_t l = 0; l < b->dims.n_layer; l++) {
            write_stage(b, l, t, 0, false);
            assert_ok(kvl_cache_step(b->cache, l, 1, b->stage, b->rotary, b->rope_dim, b->out));
            assert_ok(kvl_buffer_read(b->out, 0, q_row(b) * sizeof(float), b->got + ((size_t)l * b->n_tokens + t) * q_row(b)));
        }
        kvl_cache_advance(b->cache, 1);
    }
}

/* Rows of a layer's group as the reference wants them, [T][layers][H][D]. Free with kvl_free. */
static float *rows_of_group(const struct bench *b, uint32_t l, const float *x)
{
    const struct kvl_layer_plan *layer = &b->plan.layer[l];
    const uint32_t layers = layer->side[KVL_SIDE_K].record.layers;
    float *rows = NULL;
    assert_ok(kvl_alloc(&rows, (size_t)b->n_tokens * layers * kv_row(b), sizeof *rows));
    for (uint32_t t = 0; t < b->n_tokens; t++)
        for (uint32_t i = 0; i < layers; i++)
            memcpy(rows + ((size_t)t * layers + i) * kv_row(b), x + ((size_t)(layer->leader + i) * b->n_tokens + t) * kv_row(b), kv_row(b) * sizeof *rows);
    return rows;
}

static double layer_difference(const struct bench *b, uint32_t l, uint32_t first)
{
    const size_t from = (size_t)first * q_row(b), end = (size_t)b->n_tokens * q_row(b);
    float *k = rows_of_group(b, l, b->k), *v = rows_of_group(b, l, b->v), *want = NULL;
    double worst = 0.0;
    assert_ok(kvl_alloc(&want, end, sizeof *want));
    assert_ok(kvl_reference_attend(&b->plan, l, b->n_tokens, b->q + l * end, k, v, rope_of(b), want));
    for (size_t i = from; i < end; i++) {
        const double d = fabs((double)b->got[l * end + i] - want[i]);
        if (!(d <= worst)) worst = d;
    }
    kvl_free(&k), kvl_free(&v), kvl_free(&want);
    return worst;
}

/* The first page of the last stream is what the reference encodes, bit for bit. */
static void compare_codes(const struct bench *b, uint32_t l, int side, const char *spec)
{
    enum { MOST = 1 << 16 };
    static uint8_t got[MOST], want[MOST];
    const struct kvl_layer_plan *layer = &b->plan.layer[l];
    const struct kvl_side_plan *s = &layer->side[side];
    const uint32_t last = layer->n_stream - 1, channels = s->record.channels, sealed = kvl_sealed_end(layer, s, b->n_tokens) - layer->sink;
    const uint32_t n = sealed < s->dims.page_tokens ? sealed : s->dims.page_tokens;
    float *x = rows_of_group(b, l, side == KVL_SIDE_K ? b->k : b->v), *records = NULL, *rows = NULL;
    assert_true(n > 0 && s->page_bytes <= MOST);
    assert_ok(kvl_alloc(&records, (size_t)b->n_tokens * layer->n_stream * channels, sizeof *records));
    assert_ok(kvl_alloc(&rows, (size_t)n * channels, sizeof *rows));
    assert_ok(kvl_reference_records(&b->plan, l, side, b->n_tokens, x, rope_of(b), records));
    for (uint32_t i = 0; i < n; i++) memcpy(rows + (size_t)i * channels, records + ((size_t)(layer->sink + i) * layer->n_stream + last) * channels, channels * sizeof *rows);
    memset(want, 0, sizeof want);
    assert_int_equal(s->codec->ref_encode(s->priv, &s->dims, NULL, 0, n, rows, want), 0);
    assert_ok(kvl_cache_read_page(b->cache, l, side, last, 0, got));
    for (uint64_t i = 0; i < s->page_bytes; i++)
        if (got[i] != want[i] && !(kvl_device_is_slow() && (got[i] ^ want[i]) == 0x80)) /* whose fma loses the sign of zero */
            fail_msg("%s: layer %u, side %d, byte %llu: device %u, reference %u", spec, l, side, (unsigned long long)i, got[i], want[i]);
    kvl_free(&x), kvl_free(&records), kvl_free(&rows);
}

/* Classes = ledger = plan, or less where a last group of tokens stays open or nothing leaves the tail; the newest query of each layer reads all records of its group. */
static void check_bytes(struct bench *b)
{
    uint64_t bytes[KVL_MEM_CLASSES], total = 0, read = 0, exact = 0, body = 0;
    struct kvl_ledger ledger;
    struct kvl_cache_reads reads;
    assert_ok(kvl_cache_bytes(b->cache, bytes));
    for (int c = 0; c < KVL_MEM_CLASSES; c++) total += bytes[c];
    const uint64_t planned = b->plan.resident_bytes + b->plan.scratch_bytes;
    const struct kvl_side_plan *k = &b->plan.layer[0].side[KVL_SIDE_K];
    assert_true(k->shape.unit > 1 || k->tail >= b->n_tokens ? total <= planned : total == planned);
    assert_int_equal(bytes[KVL_MEM_SCRATCH], b->plan.scratch_bytes);
    kvl_ledger_read(kvl_test_device, &ledger);
    assert_int_equal(ledger.total, total + kvl_buffer_bytes(b->stage) + kvl_buffer_bytes(b->rotary) + kvl_buffer_bytes(b->out));
    for (uint32_t l = 0; l < b->dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            const struct kvl_layer_plan *layer = &b->plan.layer[l];
            const struct kvl_side_plan *side = &layer->side[s];
            const uint32_t sealed = kvl_sealed_end(layer, side, b->n_tokens) - layer->sink;
            const uint64_t all = layer->n_stream * sealed * side->token_bytes, rows = layer->n_stream * (b->n_tokens - sealed) * side->exact_row_bytes;
            read += all + rows;
            exact += rows;
            body += layer->leader == l ? all : 0;
        }
    kvl_cache_reads(b->cache, &reads);
    assert_int_equal(reads.newest_bytes, read);
    assert_int_equal(bytes[KVL_MEM_PAYLOAD] + bytes[KVL_MEM_SCALE], body + exact);
}

static const struct row {
    const char *spec;
    struct kvl_cache_dims dims;
    uint32_t n_tokens, n_prompt, rope_dim;
    bool rounded; /* exact rows in binary16 */
} rows[] = {
    {"latent(rank=16,layers=2,of=f32) table=random", {4, 6, 2, 16}, 90, 1, 16},
    {"latent(rank=64,layers=4,heads=2,of=f32) rope=pre sink=3 tail=5 table=random", {4, 6, 2, 16}, 90, 41, 16},
    {"latent(rank=40,layers=2,heads=3,of=int8) rope=pre rot=hadamard sink=4 tail=20 table=random", {2, 9, 3, 64}, 100, 70, 48, true},
    {"latent(rank=256,layers=2,heads=3,of=int4) rope=pre table=random", {2, 9, 3, 64}, 80, 50, 64, true}, /* more than a layer's row */
    {"k=latent(rank=16,layers=2) v=latent(rank=24,layers=2,of=int4) ktail=3 vtail=9 korder=hf table=random", {4, 6, 2, 16}, 90, 20, 16, true},
    {"latent(rank=32,layers=2,of=kivi(bits=4,group=16,residual=32)) table=random", {2, 6, 2, 16}, 130, 70, 16},
    {"latent(rank=24,layers=3,of=int8) tail=2 table=random @3-5 int4 tail=0 table=none", {6, 4, 2, 24}, 80, 33, 24},
    {"latent(energy=0.99,layers=2,heads=2) tail=200 table=random", {4, 4, 2, 32}, 60, 1, 32}, /* nothing leaves the tail */
};

static void run_row(const struct row *row)
{
    struct bench b = {.dims = row->dims, .n_tokens = row->n_tokens, .rope_dim = row->rope_dim};
    double worst = 0.0;
    b.config = (struct kvl_cache_config){.ubatch = 16, .protocol = KVL_P3_PREFILL_EXACT, .exact = !row->rounded};
    open_bench(&b, row->spec, random_table);
    prompt(&b, row->n_prompt);
    decode(&b, row->n_prompt);
    for (uint32_t l = 0; l < b.dims.n_layer; l++) worst = fmax(worst, layer_difference(&b, l, row->n_prompt));
    print_message("    %-100s largest difference %.2e\n", row->spec, worst);
    assert_true(worst < 3e-5);
    for (uint32_t l = 0; l < b.dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++)
            if (b.plan.layer[l].leader == l && b.plan.layer[l].side[s].tail < b.n_tokens) compare_codes(&b, l, s, row->spec);
    check_bytes(&b);
    close_bench(&b);
}

/* llvmpipe ends a work-item's loops after 65535 iterations in all, and making keys of many channels again takes more. */
static bool loops_are_cut(const struct row *row) { return kvl_device_is_slow() && row->dims.head_dim == 64; }

static void device_equals_reference(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (kvl_row_is_wanted(rows[i].spec) && !loops_are_cut(&rows[i])) run_row(&rows[i]);
}

/* ---- answers of numpy ---- */

/* The directions of scripts/make_shared_latent_answers.py: of each group, stream and side others. */
static kvl_status answer_table(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out)
{
    const struct kvl_cache_dims *dims = context;
    *out = (struct kvl_table){.sha256 = "answers"};
    for (int side = 0; side < KVL_SIDES; side++) {
        struct kvl_stream_record record;
        assert_ok(kvl_spec_stream_record(entry, side, 0, dims->head_dim, &record));
        const uint32_t w = record.layers * record.heads * dims->head_dim;
        out->n_layer = dims->n_layer / record.layers;
        out->n_stream = dims->n_kv_head / record.heads;
        out->n[side] = w + w * w;
        assert_ok(kvl_alloc(&out->values[side], (size_t)out->n_layer * out->n_stream * out->n[side], sizeof(float)));
        for (uint32_t s = 0; s < out->n_layer * out->n_stream; s++)
            for (uint32_t i = 0; i < w * w; i++)
                out->values[side][(size_t)s * out->n[side] + w + i] = (float)(0.3 * sin(0.11 * i + 0.7 * s + 1.9 * side));
    }
    return KVL_OK;
}

static void numpy_agrees(void **state)
{
    for (size_t i = 0; i < sizeof shared_answers / sizeof *shared_answers; i++) {
        const struct shared_answer *a = &shared_answers[i];
        struct bench b = {.dims = {SHARED_LAYERS, SHARED_HEADS * SHARED_GROUP, SHARED_HEADS, SHARED_DIM}, .n_tokens = SHARED_TOKENS, .rope_dim = SHARED_DIM};
        b.config = (struct kvl_cache_config){.ubatch = 16, .protocol = KVL_P3_PREFILL_EXACT, .exact = true};
        open_bench(&b, a->spec, answer_table);
        const size_t queries = (size_t)SHARED_LAYERS * b.n_tokens * q_row(&b), rows_all = (size_t)SHARED_LAYERS * b.n_tokens * kv_row(&b), last = (size_t)(b.n_tokens - 1) * q_row(&b);
        for (size_t j = 0; j < queries; j++) b.q[j] = (float)(3.0 * sin(0.37 * (double)j + 0.1));
        for (size_t j = 0; j < rows_all; j++) {
            b.k[j] = (float)(2.0 * sin(0.73 * (double)j * (1.0 + 0.001 * (double)(j % 7))));
            b.v[j] = (float)cos(0.51 * (double)j);
        }
        prompt(&b, a->n_prompt);
        decode(&b, a->n_prompt);
        double worst = 0.0;
        for (uint32_t l = 0; l < SHARED_LAYERS; l++)
            for (size_t c = 0; c < q_row(&b); c++) {
                const double d = fabs((double)b.got[l * (size_t)b.n_tokens * q_row(&b) + last + c] - a->out[l * q_row(&b) + c]);
                if (!(d <= worst)) worst = d;
            }
        print_message("    %-100s differs from numpy by %.2e\n", a->spec, worst);
        assert_true(worst < 1e-4);
        close_bench(&b);
    }
}

/* ---- what is refused ---- */

static void what_cannot_be_shared_is_refused(void **state)
{
    static const uint32_t sources[] = {0, 0, 2, 2};
    static const struct {
        const char *spec;
        struct kvl_cache_dims dims;
        enum kvl_protocol protocol;
        const char *says;
    } wrong[] = {
        {"latent(layers=2)", {4, 6, 2, 32}, KVL_P1_FAKE_QUANT, "p1 reads a token's own: use --protocol compress-then-score"},
        {"latent(layers=3)", {4, 6, 2, 32}, KVL_P4_STREAMING, "3 layers are to share records, and the model has 4: use a divisor"},
        {"latent(layers=2) tail=0", {4, 6, 2, 32}, KVL_P4_STREAMING, "behind records that layers share: at least 1"},
        {"latent(layers=2) window=64", {4, 6, 2, 32}, KVL_P4_STREAMING, "use layers=1"},
        {"latent(layers=2) keep=knorm budget=uniform(kept=0.5)", {4, 6, 2, 32}, KVL_P3_PREFILL_EXACT, "keep= chooses tokens in each layer"},
        {"latent(layers=2) @1-2 f16", {4, 6, 2, 32}, KVL_P4_STREAMING, "layers 0 to 1 share records: give all of them in one @a-b, or none"},
        {"f16 @1-2 latent(layers=2)", {4, 6, 2, 32}, KVL_P4_STREAMING, "layers 0 to 1 share records: give all of them in one @a-b, or none"},
        {"k=latent(layers=2) v=f16", {4, 6, 2, 32}, KVL_P4_STREAMING, "keys of 2 layers and values of 1 share records"},
        {"k=latent(layers=2) v=latent(layers=4)", {4, 6, 2, 32}, KVL_P4_STREAMING, "keys of 2 layers and values of 4 share records"},
        {"latent(layers=2,rank=72)", {4, 6, 2, 32}, KVL_P4_STREAMING, "rank 72 of 2 layers x 1 heads x 32 channels"},
        {"latent(layers=2)", {4, 6, 2, 32, .window = 64, .full_every = 4}, KVL_P4_STREAMING, "layer 0 slides by itself"},
        {"latent(layers=2)", {4, 6, 2, 32, .kv_source = sources}, KVL_P4_STREAMING, "layers that read the keys and values of others"},
        {"latent(layers=2)", {4, 6, 1, 80, .joint_value_dim = 64}, KVL_P4_STREAMING, "give its codec without a projection"},
    };
    const struct kvl_cache_limits limits = {1ull << 30, 2};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvl_spec *spec = NULL;
        struct kvl_cache_plan plan = {0};
        kvl_error_clear();
        assert_ok(kvl_spec_parse(wrong[i].spec, &spec));
        const struct kvl_cache_config config = {.spec = spec, .n_ctx = 128, .ubatch = 16, .protocol = wrong[i].protocol};
        assert_int_not_equal(kvl_cache_plan_make(&wrong[i].dims, &config, &limits, &plan), KVL_OK);
        if (strstr(kvl_error_text(), wrong[i].says) == NULL) fail_msg("\"%s\": wanted \"%s\", got \"%s\"", wrong[i].spec, wrong[i].says, kvl_error_text());
        kvl_spec_free(&spec);
    }
    kvl_error_clear();
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(device_equals_reference), cmocka_unit_test(numpy_agrees),
                                          cmocka_unit_test(what_cannot_be_shared_is_refused)};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
