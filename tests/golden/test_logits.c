/* Logits of the tokens that follow a compressed prompt against kvpress's, for every press and ratio, on every device: the whole path from the
 * model's queries to what attention reads afterwards. A press whose kept set is not determined (ties, random numbers) is compared where both
 * kept the same. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include "golden/golden.h"
#include "select.h"

static char model_path[4096];
static int32_t *token, *token_next;
static uint32_t n_token, n_next;

static void read_tokens(void)
{
    const hid_t file = golden_open("tiny-llama.h5");
    if (file < 0) exit(1);
    n_token = (uint32_t)golden_size(file, "tokens");
    n_next = (uint32_t)golden_size(file, "tokens_next");
    token = golden_read(file, "tokens", H5T_NATIVE_INT32, 0);
    token_next = golden_read(file, "tokens_next", H5T_NATIVE_INT32, 0);
    if (token == NULL || token_next == NULL) exit(1);
    H5Fclose(file);
}

/* Tokens that only one side keeps, over all layers and heads. */
static size_t kept_difference(const struct rig *r, hid_t press, const char *group)
{
    char name[64];
    size_t differing = 0;
    bool *stays = calloc(n_token, sizeof *stays);
    for (uint32_t l = 0; l < r->model->dims.n_layer; l++) {
        const struct kvl_selection *got = kvl_session_kept(r->session, l);
        assert_non_null(got);
        snprintf(name, sizeof name, "%s/layer%u/kept_offsets", group, l);
        int32_t *offset = golden_size(press, name) ? golden_read(press, name, H5T_NATIVE_INT32, got->n_kv_head + 1) : NULL;
        snprintf(name, sizeof name, "%s/layer%u/%s", group, l, offset ? "kept_flat" : "kept");
        const size_t each = golden_size(press, name) / got->n_kv_head;
        int32_t *kept = golden_read(press, name, H5T_NATIVE_INT32, 0);
        for (uint32_t h = 0; h < got->n_kv_head; h++) {
            memset(stays, 0, n_token * sizeof *stays);
            for (size_t i = offset ? (size_t)offset[h] : h * each; i < (offset ? (size_t)offset[h + 1] : (h + 1) * each); i++) stays[kept[i]] ^= true;
            for (size_t i = got->offset[h]; i < got->offset[h + 1]; i++) stays[got->token[i]] ^= true;
            for (uint32_t t = 0; t < n_token; t++) differing += stays[t];
        }
        free(offset), free(kept);
    }
    free(stays);
    return differing;
}

static double logits_difference(struct rig *r, hid_t press, const char *group)
{
    char name[64];
    const uint32_t vocab = r->model->dims.n_vocab;
    snprintf(name, sizeof name, "%s/logits_next_exact_mask", group);
    if (golden_size(press, name) == 0) snprintf(name, sizeof name, "%s/logits_next", group);
    float *wanted = golden_read(press, name, H5T_NATIVE_FLOAT, (size_t)n_next * vocab), *got = calloc(vocab, sizeof *got);
    double worst = 0.0;
    assert_non_null(wanted);
    for (uint32_t i = 0; i < n_next; i++) {
        rig_forward(r, token_next + i, 1, got);
        worst = larger(worst, largest_difference(got, wanted + (size_t)i * vocab, vocab));
    }
    free(wanted), free(got);
    return worst;
}

static void check_press(struct rig *r, const struct golden_press *press)
{
    char file_name[128], spec[600];
    int ratio[16];
    double worst = 0.0;
    int compared = 0;
    snprintf(file_name, sizeof file_name, "press_%s.h5", press->name);
    const hid_t file = golden_open(file_name);
    assert_true(file >= 0);
    golden_ratios(file, ratio);
    for (int i = kvl_device_is_slow() ? ratio[0] : 1; i <= ratio[0]; i++) {
        char group[16];
        snprintf(group, sizeof group, "r%d", ratio[i]);
        memcpy(spec, "f32 ", 4);
        assert_true(golden_spec(file, press, ratio[i] / 100.0, spec + 4, sizeof spec - 4));
        rig_session(r, spec,
                    (struct kvl_session_config){
                        .n_ctx = n_token + n_next, .ubatch = 100, .protocol = KVL_P3_PREFILL_EXACT, .exact = true, .max_logits = 1});
        assert_ok(kvl_session_forward(r->session, token, n_token, 0));
        const size_t differing = kept_difference(r, file, group);
        const double difference = logits_difference(r, file, group);
        if (differing == 0) worst = larger(worst, difference);
        else print_message("    %s %s: %zu tokens that one side alone keeps; logits differ by %.1e, not compared\n", press->name, group, differing, difference);
        compared += differing == 0;
    }
    H5Fclose(file);
    print_message("    %-26s logits within %.1e at %d of %d ratios\n", press->name, worst, compared, ratio[0]);
    assert_true(worst < 1e-3);
    if (strncmp(press->name, "lagkv", 5) != 0 && strcmp(press->name, "leverage") != 0 && !kvl_device_is_slow()) assert_int_equal(compared, ratio[0]);
}

static void logits_are_those_of_kvpress(void **state)
{
    struct rig r = rig_load(model_path);
    for (size_t i = 0; i < GOLDEN_PRESSES; i += kvl_device_is_slow() ? 5 : 1) check_press(&r, &golden_presses[i]);
    rig_free(&r);
}

/* kvpress drops the channels of all the prompt's keys and of no later one: a unit as long as the prompt. */
static void think_logits_are_those_of_kvpress(void **state)
{
    struct rig r = rig_load(model_path);
    const hid_t file = golden_open("press_think.h5");
    int ratio[16];
    assert_true(file >= 0);
    golden_ratios(file, ratio);
    assert_true(ratio[0] > 0);
    for (int i = kvl_launches_are_dear() ? ratio[0] : 1; i <= ratio[0]; i++) {
        char group[16], options[64], spec[128];
        snprintf(group, sizeof group, "r%d", ratio[i]);
        assert_true(golden_expand(file, "ratio={r},window={window_size},recent=0", ratio[i] / 100.0, options, sizeof options));
        for (int order = 0; order < 2; order++) { /* the channels' order does not matter */
            snprintf(spec, sizeof spec, "k=think(%s,unit=%u) v=f32 korder=%s", options, n_token, order ? "hf" : "gguf");
            rig_session(&r, spec,
                        (struct kvl_session_config){
                            .n_ctx = n_token + n_next, .ubatch = 100, .protocol = KVL_P3_PREFILL_EXACT, .exact = true, .max_logits = 1});
            assert_ok(kvl_session_forward(r.session, token, n_token, 0));
            const double difference = logits_difference(&r, file, group);
            print_message("    think %s, korder=%s: logits within %.1e\n", group, order ? "hf" : "gguf", difference);
            assert_true(difference < 4e-3); /* keys are binary16 here, binary32 there */
        }
    }
    H5Fclose(file);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(logits_are_those_of_kvpress), cmocka_unit_test(think_logits_are_those_of_kvpress)};
    if (golden_folder() == NULL) {
        fprintf(stderr, "skipped: no golden folder (KVLAB_GOLDEN names one)\n");
        return 77;
    }
    snprintf(model_path, sizeof model_path, "%s/tiny-llama.gguf", golden_folder());
    read_tokens();
    return KVL_ON_EACH_DEVICE(tests);
}
