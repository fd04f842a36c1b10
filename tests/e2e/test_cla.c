/* Layers that read the keys and values of another, on every device: against a float64 forward pass written elsewhere (data/golden/README.md), whatever
 * segment a row is read from; what they reserve; what is refused. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "random_table.h"
#include "../../data/golden/cla_answers.h"
#include "plan_report.h"

#define MODEL KVL_ROOT "/data/models/arch_cla.gguf"
#define COUNT(array) (sizeof(array) / sizeof *(array))
enum { ALL_LOGITS = CLA_TOKENS * CLA_VOCAB };

static void make_session(struct rig *r, const char *spec, enum kvl_protocol protocol, uint32_t ubatch)
{
    struct kvl_cache_dims dims = {CLA_LAYERS, r->model->dims.n_head, CLA_KV_HEADS, CLA_HEAD_DIM};
    kvl_session_free(&r->session);
    kvl_spec_free(&r->spec);
    assert_ok(kvl_spec_parse(spec, &r->spec));
    assert_ok(kvl_spec_load_tables(r->spec, random_table, &dims));
    const struct kvl_session_config config = {
        .spec = r->spec, .n_ctx = CLA_TOKENS, .ubatch = ubatch, .protocol = protocol, .exact = true, .max_logits = CLA_TOKENS};
    assert_ok(kvl_session_new(r->weights, &config, &r->session));
}

static double rows_difference(const float *logits, const uint32_t *row, size_t n, const float (*want)[CLA_VOCAB])
{
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) worst = larger(worst, largest_difference(logits + row[i] * CLA_VOCAB, want[i], CLA_VOCAB));
    return worst;
}

/* What is stored in full precision changes no logit, whether it is read encoded, from the stage, as a sink or from the tail. */
static void logits_equal_float64(void **state)
{
    static float logits[ALL_LOGITS];
    static const struct {
        const char *spec;
        enum kvl_protocol protocol;
        uint32_t ubatch;
    } rows[] = {
        {"f32", KVL_P2_WRITE_THEN_READ, 100},
        {"f32", KVL_P4_STREAMING, 1},
        {"f32 sink=3 tail=20", KVL_P1_FAKE_QUANT, 32},
        {"f32 sink=3 tail=20", KVL_P2_WRITE_THEN_READ, 7},
        {"f32 tail=5", KVL_P4_STREAMING, 1},
        {"f32 rope=pre rot=hadamard", KVL_P2_WRITE_THEN_READ, 33},
        {"latent(rank=64,heads=2,of=f32) tail=9 table=random", KVL_P2_WRITE_THEN_READ, 33},
    };
    struct rig r = rig_load(MODEL);
    for (size_t i = 0; i < COUNT(rows); i += kvl_device_is_slow() ? 2 : 1) {
        make_session(&r, rows[i].spec, rows[i].protocol, rows[i].ubatch);
        rig_forward(&r, cla_token, CLA_TOKENS, logits);
        const double difference = rows_difference(logits, cla_row, COUNT(cla_row), cla_logits);
        print_message("    %-55s %s, ubatch %3u: %.1e\n", rows[i].spec, kvl_protocol_name[rows[i].protocol], rows[i].ubatch, difference);
        assert_true(difference < 5e-4);
    }
    make_session(&r, "f32 " CLA_WINDOW, KVL_P2_WRITE_THEN_READ, 41);
    rig_forward(&r, cla_token, CLA_TOKENS, logits);
    assert_true(rows_difference(logits, cla_window_row, COUNT(cla_window_row), cla_window_logits) < 5e-4);
    rig_free(&r);
}

/* Both layers of a group read the same codes. */
static void codes_are_shared(void **state)
{
    static float logits[ALL_LOGITS];
    struct rig r = rig_load(MODEL);
    make_session(&r, "int4", KVL_P1_FAKE_QUANT, 100);
    rig_forward(&r, cla_token, CLA_TOKENS, logits);
    const double difference = rows_difference(logits, cla_int4_row, COUNT(cla_int4_row), cla_int4_logits);
    print_message("    int4: %.1e\n", difference);
    assert_true(difference < 0.3); /* a code at the edge of two may flip; int4 itself moves these logits by up to 12 */
    rig_free(&r);
}

static bool add_bytes(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    uint64_t *sums = context;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) sums[c] += bytes[c];
    return true;
}

/* Layers without keys and values of their own reserve nothing; plan and ledger agree. */
static void only_own_layers_have_bytes(void **state)
{
    static const struct {
        const char *spec;
        uint32_t element_bits, scale_bytes; /* of a head's key or value */
    } rows[] = {{"f32", 32, 0}, {"f16 sink=2 tail=8", 16, 0}, {"int8", 8, 4}, {"int4 rot=hadamard", 4, 4}, {"@0-2 f32 @3-4 f32", 32, 0}};
    struct rig r = rig_load(MODEL);
    const struct kvl_caps *caps = kvl_device_caps(kvl_test_device);
    const struct kvl_cache_limits limits = {caps->max_alloc_bytes, caps->compute_units, kvl_device_tuning(kvl_test_device)};
    for (size_t i = 0; i < COUNT(rows); i++) {
        static float logits[ALL_LOGITS];
        const uint64_t a_token = (uint64_t)CLA_OWN_LAYERS * CLA_KV_HEADS * KVL_SIDES * (CLA_HEAD_DIM * rows[i].element_bits / 8 + rows[i].scale_bytes);
        uint64_t held[KVL_MEM_CLASSES] = {0};
        struct kvl_cache_bytes bytes;
        struct kvl_footprint plan;
        make_session(&r, rows[i].spec, KVL_P2_WRITE_THEN_READ, 50);
        rig_forward(&r, cla_token, CLA_TOKENS, logits);
        const struct kvl_session_config config = {.spec = r.spec, .n_ctx = CLA_TOKENS, .ubatch = 50, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true,
                                                  .max_logits = CLA_TOKENS};
        assert_ok(kvl_footprint_of(&r.model->dims, &config, &limits, &plan));
        plan.bytes[KVL_MEM_WEIGHTS] = kvl_weights_bytes(r.model);
        assert_ok(kvl_session_bytes(r.session, &bytes));
        assert_int_equal(bytes.bytes_per_token, a_token);
        assert_int_equal(plan.bytes_per_token, a_token);
        if (strstr(rows[i].spec, "tail") == NULL) assert_int_equal(bytes.payload + bytes.scale, CLA_TOKENS * a_token);
        kvl_ledger_walk(kvl_test_device, add_bytes, held);
        for (int c = 0; c < KVL_MEM_CLASSES; c++) assert_int_equal(held[c], plan.bytes[c]);
    }
    rig_free(&r);
}

/* Every layer reads: what attention had to read is counted for all of them. */
static void reads_are_those_of_all_layers(void **state)
{
    static float logits[ALL_LOGITS];
    struct kvl_counters counters;
    struct rig r = rig_load(MODEL);
    make_session(&r, "f32", KVL_P2_WRITE_THEN_READ, 100);
    rig_forward(&r, cla_token, CLA_TOKENS, logits);
    kvl_session_counters(r.session, &counters);
    const uint64_t seen = (uint64_t)CLA_TOKENS * (CLA_TOKENS + 1) / 2, row = (uint64_t)CLA_KV_HEADS * KVL_SIDES * CLA_HEAD_DIM * sizeof(float);
    assert_int_equal(counters.kv_tokens_read, seen);
    assert_int_equal(counters.kv_bytes_read, CLA_LAYERS * seen * row);
    for (uint32_t l = 0; l < CLA_LAYERS; l++) {
        float own[CLA_KV_HEADS * CLA_HEAD_DIM], read[CLA_KV_HEADS * CLA_HEAD_DIM];
        assert_ok(kvl_cache_read_rows(kvl_session_cache(r.session), l, KVL_SIDE_K, 50, 1, read));
        assert_ok(kvl_cache_read_rows(kvl_session_cache(r.session), cla_kv_source[l], KVL_SIDE_K, 50, 1, own));
        assert_memory_equal(own, read, sizeof own);
    }
    rig_free(&r);
}

static void what_cannot_be_shared_is_refused(void **state)
{
    static const struct {
        const char *spec;
        enum kvl_protocol protocol;
        const char *says;
    } rows[] = {
        {"f16 @1-1 int8", KVL_P2_WRITE_THEN_READ, "layer 1 reads the keys and values of layer 0: give both in one @0-1"},
        {"f16 @3-3 int8", KVL_P2_WRITE_THEN_READ, "layer 4 reads the keys and values of layer 3"},
        {"f16 keep=knorm budget=uniform(tokens=8)", KVL_P2_WRITE_THEN_READ, "use p1, p2 or p4 and nothing that evicts"},
        {"f16", KVL_P3_PREFILL_EXACT, "use p1, p2 or p4 and nothing that evicts"},
    };
    struct rig r = rig_load(MODEL);
    for (size_t i = 0; i < COUNT(rows); i++) {
        kvl_error_clear();
        kvl_spec_free(&r.spec);
        assert_ok(kvl_spec_parse(rows[i].spec, &r.spec));
        const struct kvl_session_config config = {.spec = r.spec, .n_ctx = CLA_TOKENS, .ubatch = 8, .protocol = rows[i].protocol};
        assert_int_not_equal(kvl_session_new(r.weights, &config, &r.session), KVL_OK);
        if (strstr(kvl_error_text(), rows[i].says) == NULL) fail_msg("\"%s\" says \"%s\"", rows[i].spec, kvl_error_text());
    }
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(logits_equal_float64),          cmocka_unit_test(codes_are_shared),
    cmocka_unit_test(only_own_layers_have_bytes),    cmocka_unit_test(reads_are_those_of_all_layers),
    cmocka_unit_test(what_cannot_be_shared_is_refused),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
