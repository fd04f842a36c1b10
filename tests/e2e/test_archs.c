/* Each architecture's small model with random weights against the logits that Hugging Face transformers gives for it (data/golden/README.md), and
 * what layers that slide by themselves hold. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "../../data/golden/arch_answers.h"
#include "arch.h"
#include "select.h"
#include "mem.h"

#define MODEL(name) KVL_ROOT "/data/models/arch_" name ".gguf"
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const struct model {
    const char *path;
    const float *logits; /* [ARCH_ROWS][n_vocab] */
    size_t n;
} models[] = {
    {MODEL("qwen2"), arch_qwen2[0], sizeof arch_qwen2 / sizeof(float)},
    {MODEL("qwen3"), arch_qwen3[0], sizeof arch_qwen3 / sizeof(float)},
    {MODEL("gemma3"), arch_gemma3[0], sizeof arch_gemma3 / sizeof(float)},
    {MODEL("mistral"), arch_mistral[0], sizeof arch_mistral / sizeof(float)},
};

/* Logits of all tokens, in one session. */
static float *run(struct rig *r, const char *spec, struct kvl_session_config config)
{
    float *logits = NULL;
    config.n_ctx = ARCH_TOKENS;
    config.max_logits = ARCH_TOKENS;
    rig_session(r, spec, config);
    assert_ok(kvl_alloc(&logits, (size_t)ARCH_TOKENS * r->model->dims.n_vocab, sizeof *logits));
    rig_forward(r, arch_token, ARCH_TOKENS, logits);
    return logits;
}

static double difference(const struct model *m, const float *logits)
{
    const size_t n_vocab = m->n / ARCH_ROWS;
    double worst = 0.0;
    for (size_t i = 0; i < ARCH_ROWS; i++)
        worst = larger(worst, largest_difference(logits + arch_row[i] * n_vocab, m->logits + i * n_vocab, n_vocab));
    return worst;
}

static void logits_equal_transformers(void **state)
{
    for (size_t i = 0; i < COUNT(models); i++) {
        struct rig r = rig_load(models[i].path);
        assert_int_equal(r.model->dims.n_vocab * ARCH_ROWS, models[i].n);
        for (uint32_t ubatch = 7; ubatch <= ARCH_TOKENS; ubatch += 73) {
            float *logits = run(&r, "f32", (struct kvl_session_config){.ubatch = ubatch, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true});
            const double worst = difference(&models[i], logits);
            print_message("    %s, ubatch %u: largest difference %.1e\n", r.model->arch->name, ubatch, worst);
            assert_true(worst < 1e-3);
            kvl_free(&logits);
        }
        rig_free(&r);
    }
}

/* A prompt that is compressed at its end, of which nothing is lost: layers that slide keep what may still be seen. The second half of the
 * tokens comes one by one, beyond every window. */
static void prompts_keep_what_a_window_may_see(void **state)
{
    const uint32_t prompt = kvl_launches_are_dear() ? ARCH_TOKENS - 8 : ARCH_TOKENS / 2;
    static const char *const specs[] = {"f32", "f32 keep=knorm budget=uniform(kept=1)", "f32 pos=compact keep=knorm budget=uniform(kept=1)",
                                        "f32 rope=pre pos=compact keep=knorm budget=uniform(kept=1)"};
    struct rig r = rig_load(MODEL("gemma3"));
    const uint32_t n_vocab = r.model->dims.n_vocab;
    const struct kvl_session_config config = {
        .n_ctx = ARCH_TOKENS, .ubatch = 16, .protocol = KVL_P3_PREFILL_EXACT, .exact = true, .max_logits = prompt};
    for (size_t i = 0; i < COUNT(specs); i++) {
        static float logits[ARCH_TOKENS * 512];
        assert_true(n_vocab <= 512);
        rig_session(&r, specs[i], config);
        rig_forward(&r, arch_token, prompt, logits);
        for (uint32_t t = prompt; t < ARCH_TOKENS; t++) rig_forward(&r, arch_token + t, 1, logits + t * n_vocab);
        const double worst = difference(&models[2], logits);
        print_message("    %s: largest difference %.1e\n", specs[i], worst);
        assert_true(worst < 1e-3);
    }
    rig_free(&r);
}

/* A window or an eviction that the user asks for leaves layers alone that slide by themselves, unless all_layers says otherwise. */
static void users_windows_are_for_full_layers(void **state)
{
    struct rig r = rig_load(MODEL("gemma3"));
    const struct kvl_session_config config = {.n_ctx = ARCH_TOKENS, .ubatch = 16, .protocol = KVL_P2_WRITE_THEN_READ};
    static const struct {
        const char *spec;
        uint32_t window, sink, full_window, full_sink;
    } cases[] = {
        {"f16", 24, 0, 0, 0},
        {"f16 window=10 sink=2", 24, 0, 10, 2},
        {"f16 window=10 sink=2 all_layers", 10, 2, 10, 2},
        {"f16 window=50 sink=2 all_layers=yes", 24, 2, 50, 2},
        {"f16 all_layers", 24, 0, 0, 0},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        rig_session(&r, cases[i].spec, config);
        const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(r.session));
        for (uint32_t l = 0; l < plan->dims.n_layer; l++) {
            const bool full = l == 5;
            assert_int_equal(plan->layer[l].window, full ? cases[i].full_window : cases[i].window);
            assert_int_equal(plan->layer[l].sink, full ? cases[i].full_sink : cases[i].sink);
        }
    }
    rig_session(&r, "f16 keep=knorm budget=uniform(tokens=8)", config);
    assert_ok(kvl_session_forward(r.session, arch_token, 60, 1));
    for (uint32_t l = 0; l < 7; l++) {
        const struct kvl_selection *kept = kvl_session_kept(r.session, l);
        assert_int_equal(kept->offset[1], l == 5 ? 8 : 24);
        assert_true(l == 5 || kept->token[0] == 60 - 24);
    }
    rig_free(&r);
}

/* Layers that slide hold the same bytes whatever the context. */
static void sliding_layers_are_flat(void **state)
{
    uint64_t pages[2];
    struct rig r = rig_load(MODEL("gemma3"));
    for (int longer = 0; longer < 2; longer++) {
        rig_session(&r, "f16", (struct kvl_session_config){.n_ctx = longer ? 256 : 128, .ubatch = 8, .protocol = KVL_P2_WRITE_THEN_READ});
        const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(r.session));
        assert_int_equal(plan->layer[0].side[KVL_SIDE_K].slots, 1); /* 24 + 8 - 1 tokens in pages of 64 */
        assert_int_equal(plan->layer[5].side[KVL_SIDE_K].slots, longer ? 4 : 2);
        pages[longer] = plan->n_pages;
    }
    assert_int_equal(pages[1] - pages[0], 2 * 2); /* of the one full layer's keys and values */
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(logits_equal_transformers),
    cmocka_unit_test(prompts_keep_what_a_window_may_see),
    cmocka_unit_test(users_windows_are_for_full_layers),
    cmocka_unit_test(sliding_layers_are_flat),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
