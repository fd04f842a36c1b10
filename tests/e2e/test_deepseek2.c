/* Latent attention (deepseek2) with the tiny models of the repository, on every device: against Hugging Face transformers' logits
 * (data/golden/README.md), absorbed against expanded, what it stores and what it never makes. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "mla.h"
#include "../../data/golden/deepseek2_answers.h"

#define MODEL KVL_ROOT "/data/models/arch_deepseek2.gguf"
enum { ALL_LOGITS = DEEPSEEK2_TOKENS * DEEPSEEK2_VOCAB };

static const struct model {
    const char *path;
    const float (*logits)[DEEPSEEK2_VOCAB]; /* [DEEPSEEK2_ROWS] */
    uint32_t n_layer, rank, position;
} models[] = {
    {MODEL, deepseek2_logits, DEEPSEEK2_LAYERS, DEEPSEEK2_RANK, DEEPSEEK2_POSITION},
    /* queries that are projected at once; heads and latents of half a block of columns */
    {KVL_ROOT "/data/models/arch_deepseek2_direct.gguf", deepseek2_direct_logits, DEEPSEEK2_DIRECT_LAYERS, DEEPSEEK2_DIRECT_RANK, DEEPSEEK2_DIRECT_POSITION},
};
enum { N_MODELS = sizeof models / sizeof *models };

static void run_tokens(struct rig *r, const char *spec, enum kvl_protocol protocol, uint32_t ubatch, float *logits)
{
    const struct kvl_session_config config = {
        .n_ctx = DEEPSEEK2_TOKENS, .ubatch = ubatch, .protocol = protocol, .exact = true, .max_logits = DEEPSEEK2_TOKENS};
    rig_session(r, spec, config);
    rig_forward(r, deepseek2_token, DEEPSEEK2_TOKENS, logits);
}

static double answers_difference(const struct model *model, const float *logits)
{
    double worst = 0.0;
    for (size_t i = 0; i < DEEPSEEK2_ROWS; i++)
        worst = larger(worst, largest_difference(logits + deepseek2_row[i] * DEEPSEEK2_VOCAB, model->logits[i], DEEPSEEK2_VOCAB));
    return worst;
}

static void equals_transformers(void **state)
{
    static float logits[ALL_LOGITS];
    for (const struct model *m = models; m < models + N_MODELS; m++) {
        struct rig r = rig_load(m->path);
        run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 64, logits);
        const double whole = answers_difference(m, logits);
        const bool one_by_one = m == models || !kvl_launches_are_dear();
        run_tokens(&r, "f32 rope=pre", one_by_one ? KVL_P4_STREAMING : KVL_P2_WRITE_THEN_READ, one_by_one ? 1 : 7, logits);
        const double streamed = answers_difference(m, logits);
        print_message("    %s: largest difference %.1e, %s with rope=pre %.1e\n", r.model->name, whole, one_by_one ? "token by token" : "few by few",
                      streamed);
        assert_true(whole < 2e-4);
        assert_true(streamed < 2e-4);
        rig_free(&r);
    }
}

static void absorbed_equals_expanded(const struct model *model)
{
    static float absorbed[ALL_LOGITS], expanded[ALL_LOGITS];
    struct rig r = rig_load(model->path), e = {0};
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 33, absorbed);
    assert_ok(kvl_model_open(model->path, &e.model));
    assert_ok(kvl_model_expand(e.model));
    assert_ok(kvl_weights_load(e.model, kvl_test_device, &e.weights));
    run_tokens(&e, "f32", KVL_P2_WRITE_THEN_READ, 33, expanded);
    const double difference = largest_difference(absorbed, expanded, ALL_LOGITS);
    struct kvl_cache_bytes latents, full;
    assert_ok(kvl_session_bytes(r.session, &latents));
    assert_ok(kvl_session_bytes(e.session, &full));
    print_message("    %s: largest difference %.1e; %llu and %llu bytes a token\n", r.model->name, difference, (unsigned long long)latents.bytes_per_token,
                  (unsigned long long)full.bytes_per_token);
    assert_true(difference < 2e-4);
    assert_true(answers_difference(model, expanded) < 2e-4);
    assert_true(full.bytes_per_token > 4 * latents.bytes_per_token);
    rig_free(&e);
    rig_free(&r);
}

static void both_forms_agree(void **state)
{
    for (size_t i = 0; i < N_MODELS; i++) absorbed_equals_expanded(&models[i]);
}

/* The largest buffer that holds no weights and is none of the caches' pages. */
static bool look_at(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    uint64_t *largest = context, sum = 0;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) sum += bytes[c];
    if (bytes[KVL_MEM_WEIGHTS] == 0 && strcmp(owner, "kv pages") != 0 && sum > *largest) *largest = sum;
    return true;
}

/* A long cache that is read token by token: its bytes are layers x (rank + position) x element, and nothing else grows with it. */
static void stores_latents_alone(void **state)
{
    static const struct {
        const char *spec;
        double element, scale; /* bytes of an element and of a row beside them */
    } rows[] = {{"f32", 4, 0}, {"f16", 2, 0}, {"int8", 1, 4}, {"int4 rot=hadamard", 0.5, 4}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows * N_MODELS; i++) {
        const struct model *m = &models[i % N_MODELS];
        struct rig r = rig_load(m->path);
        float logits[DEEPSEEK2_VOCAB];
        struct kvl_session_config config = {.n_ctx = 512, .ubatch = 1, .protocol = KVL_P4_STREAMING};
        struct kvl_cache_bytes bytes;
        uint64_t largest = 0;
        if (kvl_launches_are_dear()) config.ubatch = 64, config.protocol = KVL_P2_WRITE_THEN_READ;
        rig_session(&r, rows[i / N_MODELS].spec, config);
        assert_ok(kvl_session_fill(r.session, 511, 1));
        rig_forward(&r, deepseek2_token, 1, logits);
        assert_ok(kvl_session_bytes(r.session, &bytes));
        const uint64_t a_token = m->n_layer * (uint64_t)((m->rank + m->position) * rows[i / N_MODELS].element + rows[i / N_MODELS].scale);
        assert_int_equal(bytes.bytes_per_token, a_token);
        assert_int_equal(bytes.payload + bytes.scale, 512 * a_token);
        kvl_ledger_walk(kvl_test_device, look_at, &largest);
        const uint64_t expanded = 512ull * r.model->dims.n_head * r.model->dims.mla.value_dim * sizeof(float); /* the values of one layer */
        assert_true(largest < expanded && bytes.resident < 512 * a_token + expanded);
        rig_free(&r);
    }
}

static void a_prompt_is_compressed(void **state)
{
    static float exact[ALL_LOGITS], compressed[ALL_LOGITS];
    struct rig r = rig_load(MODEL);
    const struct kvl_session_config config = {.n_ctx = DEEPSEEK2_TOKENS, .ubatch = 32, .protocol = KVL_P3_PREFILL_EXACT, .exact = true, .max_logits = 1};
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 33, exact);
    rig_session(&r, "f32", config);
    assert_ok(kvl_session_forward(r.session, deepseek2_token, DEEPSEEK2_TOKENS - 1, 0));
    rig_forward(&r, deepseek2_token + DEEPSEEK2_TOKENS - 1, 1, compressed);
    assert_true(largest_difference(exact + (DEEPSEEK2_TOKENS - 1) * DEEPSEEK2_VOCAB, compressed, DEEPSEEK2_VOCAB) < 2e-4);
    rig_free(&r);
}

static void refuses_what_has_no_meaning(void **state)
{
    static const struct {
        const char *spec, *part;
    } rows[] = {{"k=int8 v=int4", "one row of 80 channels"},
                {"tail=0 vtail=4", "one row of 80 channels"},
                {"latent", "one latent row for keys and values already"},
                {"keep=knorm budget=uniform(kept=0.5)", "one latent row"}};
    struct rig r = rig_load(MODEL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct kvl_spec *spec = NULL;
        struct kvl_session *session = NULL;
        assert_ok(kvl_spec_parse(rows[i].spec, &spec));
        const struct kvl_session_config config = {.spec = spec, .n_ctx = 64, .ubatch = 32, .protocol = KVL_P2_WRITE_THEN_READ};
        assert_int_not_equal(kvl_session_new(r.weights, &config, &session), KVL_OK);
        if (strstr(kvl_error_text(), rows[i].part) == NULL) fail_msg("%s: %s", rows[i].spec, kvl_error_text());
        kvl_error_clear();
        kvl_spec_free(&spec);
    }
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(equals_transformers),    cmocka_unit_test(both_forms_agree), cmocka_unit_test(stores_latents_alone),
    cmocka_unit_test(a_prompt_is_compressed), cmocka_unit_test(refuses_what_has_no_meaning),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
