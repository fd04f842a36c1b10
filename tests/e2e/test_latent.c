/* Latents in a whole model, on every device: all directions change no logit, whatever the group of heads and the form they are read in; fewer change
 * them alike in both forms; bytes are tokens x layers x groups x rank x element. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "random_table.h"
#include "../../data/golden/tiny_answers.h"

enum { ALL_LOGITS = TINY_TOKENS * TINY_VOCAB };

static void run_tokens(struct rig *r, const char *spec, enum kvl_protocol protocol, uint32_t ubatch, float *logits)
{
    struct kvl_cache_dims dims = {TINY_LAYERS, 6, TINY_KV_HEADS, TINY_HEAD_DIM};
    kvl_session_free(&r->session);
    kvl_spec_free(&r->spec);
    assert_ok(kvl_spec_parse(spec, &r->spec));
    assert_ok(kvl_spec_load_tables(r->spec, random_table, &dims));
    const struct kvl_session_config config = {
        .spec = r->spec, .n_ctx = TINY_TOKENS, .ubatch = ubatch, .protocol = protocol, .exact = true, .max_logits = TINY_TOKENS};
    assert_ok(kvl_session_new(r->weights, &config, &r->session));
    rig_forward(r, tiny_token, TINY_TOKENS, logits);
}

static void all_directions_change_nothing(void **state)
{
    static float exact[ALL_LOGITS], logits[ALL_LOGITS];
    static const struct {
        const char *spec;
        enum kvl_protocol protocol;
        uint32_t ubatch;
    } rows[] = {
        {"latent(rank=32,of=f32) table=random", KVL_P1_FAKE_QUANT, 100},
        {"latent(rank=32,of=f32,read=rebuilt) table=random", KVL_P2_WRITE_THEN_READ, 33},
        {"latent(rank=64,heads=2,of=f32) rope=pre table=random", KVL_P4_STREAMING, 1},
        {"latent(rank=64,heads=2,of=f32) sink=4 tail=20 rot=hadamard table=random", KVL_P2_WRITE_THEN_READ, 64},
    };
    struct rig r = rig_load(TINY_MODEL);
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 100, exact);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i += kvl_device_is_slow() ? 3 : 1) {
        run_tokens(&r, rows[i].spec, rows[i].protocol, rows[i].ubatch, logits);
        const double difference = largest_difference(exact, logits, ALL_LOGITS);
        print_message("    %-70s %.1e\n", rows[i].spec, difference);
        assert_true(difference < 2e-4);
    }
    rig_free(&r);
}

static void both_forms_agree(void **state)
{
    static float absorbed[ALL_LOGITS], rebuilt[ALL_LOGITS], exact[ALL_LOGITS];
    struct rig r = rig_load(TINY_MODEL);
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 100, exact);
    run_tokens(&r, "latent(rank=40,heads=2,of=f32) table=random", KVL_P1_FAKE_QUANT, 100, absorbed);
    run_tokens(&r, "latent(rank=40,heads=2,of=f32,read=rebuilt) table=random", KVL_P1_FAKE_QUANT, 100, rebuilt);
    const double forms = largest_difference(absorbed, rebuilt, ALL_LOGITS), lost = largest_difference(absorbed, exact, ALL_LOGITS);
    print_message("    forms differ by %.1e, what the directions leave out moves logits by %.1f\n", forms, lost);
    assert_true(forms < 2e-4 && lost > 0.1);
    rig_free(&r);
}

static void bytes_are_those_of_records(void **state)
{
    static const struct {
        const char *spec;
        uint32_t bytes; /* of a token, one layer */
    } rows[] = {{"latent(rank=16) table=random", 2 * 2 * 16 * 2},
                {"latent(rank=24,heads=2,of=f32) table=random", 2 * 24 * 4},
                {"latent(rank=32,heads=2,of=int4) rot=hadamard table=random", 2 * (32 / 2 + 4)},
                {"k=latent(rank=16,of=int8) v=int3(group=32) table=random", 2 * (16 + 4) + 2 * (32 * 3 / 8 + 4)}};
    static float logits[ALL_LOGITS];
    struct rig r = rig_load(TINY_MODEL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct kvl_cache_bytes bytes;
        run_tokens(&r, rows[i].spec, KVL_P2_WRITE_THEN_READ, 100, logits);
        assert_ok(kvl_session_bytes(r.session, &bytes));
        assert_int_equal(bytes.bytes_per_token, TINY_LAYERS * rows[i].bytes);
        assert_int_equal(bytes.payload + bytes.scale, (uint64_t)TINY_TOKENS * TINY_LAYERS * rows[i].bytes);
    }
    rig_free(&r);
}

/* A prompt that attends to itself in full precision, and is projected at its end; with scores for each head too. */
static void prompts_are_compressed(void **state)
{
    static float logits[ALL_LOGITS], exact[ALL_LOGITS];
    static const char *const specs[] = {"latent(rank=64,heads=2,of=f32) table=random",
                                        "latent(rank=32,of=f32) rope=pre keep=knorm budget=uniform(kept=1) pos=compact table=random"};
    struct kvl_cache_dims dims = {TINY_LAYERS, 6, TINY_KV_HEADS, TINY_HEAD_DIM};
    struct rig r = rig_load(TINY_MODEL);
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 100, exact);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        kvl_session_free(&r.session);
        kvl_spec_free(&r.spec);
        assert_ok(kvl_spec_parse(specs[i], &r.spec));
        assert_ok(kvl_spec_load_tables(r.spec, random_table, &dims));
        const struct kvl_session_config config = {.spec = r.spec, .n_ctx = TINY_TOKENS, .ubatch = 50, .protocol = KVL_P3_PREFILL_EXACT, .exact = true};
        assert_ok(kvl_session_new(r.weights, &config, &r.session));
        assert_ok(kvl_session_forward(r.session, tiny_token, TINY_TOKENS - 1, 0));
        rig_forward(&r, tiny_token + TINY_TOKENS - 1, 1, logits);
        const double difference = largest_difference(exact + (TINY_TOKENS - 1) * TINY_VOCAB, logits, TINY_VOCAB);
        print_message("    %-70s %.1e\n", specs[i], difference);
        assert_true(difference < 2e-4);
    }
    rig_free(&r);
}

/* Layers that share records: a prompt that attends to itself in full precision, then token by token. */
static void layers_share_records(void **state)
{
    enum { PROMPT = 40 };
    static float logits[ALL_LOGITS], exact[ALL_LOGITS];
    static const struct {
        const char *spec;
        enum kvl_protocol protocol;
        uint32_t prompt, bytes; /* of a token, all layers: both sides of one group */
        double most;            /* difference of logits; 0: they move */
    } rows[] = {
        {"latent(rank=192,layers=3,heads=2,of=f32) table=random", KVL_P4_STREAMING, 1, 2 * 192 * 4, 2e-4},
        {"latent(rank=96,layers=3,of=f32) rope=pre sink=3 tail=7 table=random", KVL_P3_PREFILL_EXACT, PROMPT, 2 * 2 * 96 * 4, 2e-4},
        {"latent(rank=40,layers=3,heads=2,of=f32) rope=pre table=random", KVL_P3_PREFILL_EXACT, PROMPT, 2 * 40 * 4, 0},
        {"latent(rank=32,layers=3,heads=2,of=int4) rot=hadamard table=random", KVL_P3_PREFILL_EXACT, PROMPT, 2 * (32 / 2 + 4), 0},
    };
    struct kvl_cache_dims dims = {TINY_LAYERS, 6, TINY_KV_HEADS, TINY_HEAD_DIM};
    struct rig r = rig_load(TINY_MODEL);
    run_tokens(&r, "f32", KVL_P2_WRITE_THEN_READ, 100, exact);
    const bool slow = kvl_device_is_slow();
    for (size_t i = slow ? 3 : 0; i < sizeof rows / sizeof *rows; i++) {
        const uint32_t n = slow ? 10 : TINY_TOKENS - rows[i].prompt;
        struct kvl_cache_bytes bytes;
        kvl_session_free(&r.session);
        kvl_spec_free(&r.spec);
        assert_ok(kvl_spec_parse(rows[i].spec, &r.spec));
        assert_ok(kvl_spec_load_tables(r.spec, random_table, &dims));
        const struct kvl_session_config config = {
            .spec = r.spec, .n_ctx = TINY_TOKENS, .ubatch = 16, .protocol = rows[i].protocol, .exact = true, .max_logits = TINY_TOKENS};
        assert_ok(kvl_session_new(r.weights, &config, &r.session));
        for (int again = 0; again < 2; again++) { /* the second time over what the first has left */
            assert_ok(kvl_session_reset(r.session));
            assert_ok(kvl_session_forward(r.session, tiny_token, rows[i].prompt, 0));
            rig_forward(&r, tiny_token + rows[i].prompt, n, logits);
        }
        const double difference = largest_difference(exact + (size_t)rows[i].prompt * TINY_VOCAB, logits, (size_t)n * TINY_VOCAB);
        print_message("    %-75s %.1e\n", rows[i].spec, difference);
        assert_true(rows[i].most > 0 ? difference < rows[i].most : difference > 0.1);
        assert_ok(kvl_session_bytes(r.session, &bytes));
        assert_int_equal(bytes.bytes_per_token, rows[i].bytes);
    }
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(all_directions_change_nothing), cmocka_unit_test(both_forms_agree),
                                          cmocka_unit_test(bytes_are_those_of_records), cmocka_unit_test(prompts_are_compressed),
                                          cmocka_unit_test(layers_share_records)};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
