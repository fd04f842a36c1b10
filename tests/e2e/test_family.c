/* The family that experiments/e30_family trained, on every device: each committed model gives the bits a byte that the training code gives for the same
 * weights (data/golden/README.md), and its cache has the bytes that its kind of attention asks for. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "../../data/golden/family_answers.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
enum { N_PREDICTED = FAMILY_TOKENS - 1, N_BYTES = 256 };

static double nll_of(const float *logits, int32_t token)
{
    double sum = 0.0;
    const float most = logits[largest_at(logits, N_BYTES)];
    for (int i = 0; i < N_BYTES; i++) sum += exp((double)logits[i] - most);
    return log(sum) + most - logits[token];
}

static void open_member(struct rig *r, size_t i)
{
    char path[256];
    snprintf(path, sizeof path, KVL_ROOT "/data/models/family-%s.gguf", family_answer[i].name);
    *r = rig_load(path);
    assert_int_equal(r->model->dims.n_vocab, N_BYTES);
}

static void models_give_their_bits(void **state)
{
    static float logits[N_PREDICTED * N_BYTES];
    for (size_t i = 0; i < COUNT(family_answer); i += kvl_device_is_slow() ? 3 : 1) {
        struct rig r;
        double nll = 0.0;
        open_member(&r, i);
        rig_session(&r, "f32", (struct kvl_session_config){.n_ctx = N_PREDICTED, .ubatch = N_PREDICTED, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true,
                                                           .max_logits = N_PREDICTED});
        rig_forward(&r, family_token, N_PREDICTED, logits);
        for (int t = 0; t < N_PREDICTED; t++) nll += nll_of(logits + t * N_BYTES, family_token[t + 1]) / N_PREDICTED;
        print_message("    %-14s %.4f bits a byte, %.1e nats from the training code\n", family_answer[i].name, nll / log(2.0), nll - family_answer[i].nll);
        assert_true(fabs(nll - family_answer[i].nll) < 1e-4);
        rig_free(&r);
    }
}

static void caches_have_their_bytes(void **state)
{
    const uint32_t n = kvl_launches_are_dear() ? 16 : N_PREDICTED;
    for (size_t i = 0; i < COUNT(family_answer); i++) {
        struct rig r;
        struct kvl_cache_bytes bytes;
        open_member(&r, i);
        rig_session(&r, "f16", (struct kvl_session_config){.n_ctx = N_PREDICTED, .ubatch = 1, .protocol = KVL_P4_STREAMING});
        assert_ok(kvl_session_fill(r.session, n, 1));
        assert_ok(kvl_session_bytes(r.session, &bytes));
        assert_int_equal(bytes.bytes_per_token, 2 * family_answer[i].elements);
        assert_int_equal(bytes.payload + bytes.scale, n * bytes.bytes_per_token);
        rig_free(&r);
    }
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(models_give_their_bits), cmocka_unit_test(caches_have_their_bytes)};

int main(void) { return KVL_ON_EACH_DEVICE(tests); }
