/* Scores that look back at the prompt, the tokens they keep and what evictions cost, on the device against an independent float64 pass. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "select.h"
#include "../../data/golden/tiny_witness_answers.h"

enum { PROMPT = WITNESS_PROMPT, NEXT = WITNESS_TOKENS - 1 - WITNESS_PROMPT };

static void start(struct rig *r, const char *keep, uint32_t ubatch)
{
    char spec[256];
    snprintf(spec, sizeof spec, "f32 keep=%s budget=uniform(tokens=%d)", keep, WITNESS_KEPT);
    rig_session(r, spec, (struct kvl_session_config){.n_ctx = WITNESS_TOKENS, .ubatch = ubatch, .protocol = KVL_P3_PREFILL_EXACT, .exact = true,
                                                     .measure_loss = true});
}

static void check(struct rig *r, const float *score, const uint32_t *kept, const float *mass_lost, const float *output_error)
{
    const uint32_t heads = r->model->dims.n_kv_head;
    for (uint32_t stream = 0; stream < WITNESS_STREAMS; stream++) {
        const uint32_t h = stream % heads;
        const struct kvl_selection *got = kvl_session_kept(r->session, stream / heads);
        assert_true(largest_difference(got->score + (size_t)h * PROMPT, score + (size_t)stream * PROMPT, PROMPT) < 1e-5);
        assert_int_equal(got->offset[h + 1] - got->offset[h], WITNESS_KEPT);
        assert_memory_equal(got->token + got->offset[h], kept + (size_t)stream * WITNESS_KEPT, WITNESS_KEPT * sizeof *kept);
        assert_true(fabs(got->mass_lost[h] - mass_lost[stream]) < 1e-5);
        assert_true(fabs(got->output_error[h] - output_error[stream]) < 1e-5);
    }
}

/* Witnesses that are longer than a ubatch, and shorter ones. */
static void scores_kept_tokens_and_losses_are_those_of_the_independent_pass(void **state)
{
    struct rig r = rig_load(TINY_MODEL);
    for (uint32_t ubatch = kvl_device_is_slow() ? 64 : 16; ubatch <= 64; ubatch *= 4) {
        start(&r, "oracle", ubatch);
        kvl_session_following(r.session, witness_token + PROMPT, NEXT);
        assert_ok(kvl_session_forward(r.session, witness_token, PROMPT, 1));
        check(&r, oracle_score[0], oracle_kept[0], oracle_mass_lost, oracle_output_error);
        start(&r, WITNESS_KVZIP, ubatch);
        kvl_session_following(r.session, witness_token + PROMPT, NEXT);
        assert_ok(kvl_session_forward(r.session, witness_token, PROMPT, 1));
        check(&r, kvzip_score[0], kvzip_kept[0], kvzip_mass_lost, kvzip_output_error);
    }
    rig_free(&r);
}

/* Witnesses leave nothing: the logits of the prompt and of what follows it are the same without them. */
static void witnesses_leave_nothing(void **state)
{
    static float with[2 * WITNESS_TOKENS * 8], without[2 * WITNESS_TOKENS * 8];
    struct rig r = rig_load(TINY_MODEL);
    for (int measured = 0; measured < 2; measured++) {
        float *logits = measured ? with : without;
        rig_session(&r, "int8 keep=knorm budget=uniform(kept=0.5)",
                    (struct kvl_session_config){.n_ctx = WITNESS_TOKENS, .ubatch = 64, .protocol = KVL_P3_PREFILL_EXACT, .exact = true,
                                                .measure_loss = measured});
        kvl_session_following(r.session, witness_token + PROMPT, NEXT);
        assert_ok(kvl_session_forward(r.session, witness_token, PROMPT, 1));
        assert_ok(kvl_session_read_logits(r.session, 0, logits));
        assert_ok(kvl_session_forward(r.session, witness_token + PROMPT, NEXT, 1));
        assert_ok(kvl_session_read_logits(r.session, 0, logits + r.model->dims.n_vocab));
        assert_true((kvl_session_kept(r.session, 0)->mass_lost != NULL) == measured);
    }
    assert_memory_equal(with, without, 2 * r.model->dims.n_vocab * sizeof *with);
    rig_free(&r);
}

/* A continuation that nobody told of is refused with the way out; so are two ways of repeating in one cache. */
static void what_cannot_be_known_is_refused(void **state)
{
    struct rig r = rig_load(TINY_MODEL);
    start(&r, "oracle", 64);
    assert_int_equal(kvl_session_forward(r.session, witness_token, PROMPT, 1), KVL_E_USAGE);
    assert_non_null(strstr(kvl_error_text(), "compress-then-score"));
    kvl_error_clear();
    rig_session(&r, "keep=kvzip budget=uniform(kept=0.5) @1-1 keep=kvzip(chunk=20)",
                (struct kvl_session_config){.n_ctx = WITNESS_TOKENS, .ubatch = 64, .protocol = KVL_P3_PREFILL_EXACT});
    assert_int_equal(kvl_session_forward(r.session, witness_token, PROMPT, 1), KVL_E_UNSUPPORTED);
    assert_non_null(strstr(kvl_error_text(), "layer 1"));
    kvl_error_clear();
    rig_free(&r);
}

/* A repetition stands behind the prompt: positions and rows beyond the context are in the plan, and so is the peak. */
static void the_plan_has_room_for_a_repetition(void **state)
{
    struct rig r = rig_load(TINY_MODEL);
    struct kvl_cache_bytes bytes;
    rig_session(&r, "int8 keep=kvzip budget=uniform(kept=0.5)",
                (struct kvl_session_config){.n_ctx = WITNESS_TOKENS, .ubatch = 64, .protocol = KVL_P3_PREFILL_EXACT});
    assert_ok(kvl_session_forward(r.session, witness_token, WITNESS_TOKENS, 1));
    assert_ok(kvl_session_bytes(r.session, &bytes));
    assert_true(bytes.peak <= bytes.resident + kvl_cache_plan(kvl_session_cache(r.session))->prompt_bytes);
    assert_ok(kvl_session_reset(r.session));
    assert_ok(kvl_session_fill(r.session, PROMPT, 1)); /* the same of a cheap cache */
    assert_int_equal(kvl_session_position(r.session), PROMPT);
    rig_free(&r);
}

/* Logits of tokens in the middle are those that a call for all of them gives, of a prompt in one piece and of ubatches. */
static void logits_of_any_tokens(void **state)
{
    enum { FIRST = 30, COUNT = 50 };
    static const enum kvl_protocol protocols[] = {KVL_P3_PREFILL_EXACT, KVL_P2_WRITE_THEN_READ};
    struct rig r = rig_load(TINY_MODEL);
    const size_t n_vocab = r.model->dims.n_vocab;
    float *all = calloc(PROMPT * n_vocab, sizeof *all), *some = calloc(COUNT * n_vocab, sizeof *some);
    for (size_t p = 0; p < (kvl_device_is_slow() ? 1 : sizeof protocols / sizeof *protocols); p++) {
        rig_session(&r, "f32", (struct kvl_session_config){.n_ctx = PROMPT, .ubatch = 16, .protocol = protocols[p], .exact = true, .max_logits = PROMPT});
        rig_forward(&r, witness_token, PROMPT, all);
        assert_ok(kvl_session_reset(r.session));
        assert_ok(kvl_session_forward_at(r.session, witness_token, PROMPT, FIRST, COUNT));
        for (uint32_t i = 0; i < COUNT; i++) assert_ok(kvl_session_read_logits(r.session, i, some + i * n_vocab));
        assert_true(largest_difference(some, all + FIRST * n_vocab, COUNT * n_vocab) < 1e-4);
        assert_ok(kvl_session_reset(r.session));
        assert_int_equal(kvl_session_forward_at(r.session, witness_token, PROMPT, PROMPT - 3, 4), KVL_E_USAGE);
        kvl_error_clear();
    }
    free(all), free(some);
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(logits_of_any_tokens),
    cmocka_unit_test(scores_kept_tokens_and_losses_are_those_of_the_independent_pass),
    cmocka_unit_test(witnesses_leave_nothing),
    cmocka_unit_test(what_cannot_be_known_is_refused),
    cmocka_unit_test(the_plan_has_room_for_a_repetition),
};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
