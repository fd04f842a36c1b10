/* The tiny random llama of the golden folder against the logits, keys and values that kvpress with transformers got from it, on
 * every device. The folder is $KVLAB_GOLDEN, which must then be right, or ../shared/golden if it is there; without one: skipped. */
#include "kernel/test_harness.h"
#include "session_rig.h"
#include <hdf5.h>
#include <unistd.h>

enum { TOKENS = 384, NEXT = 32, ALL = TOKENS + NEXT, VOCAB = 256, LAYERS = 3, KV_HEADS = 2, HEAD_DIM = 16 };

static char model_path[4096];
static int32_t token[ALL];
static float want[ALL * VOCAB], got[ALL * VOCAB];
static float row[LAYERS][KVL_SIDES][KV_HEADS * TOKENS * HEAD_DIM]; /* [head][token][channel], channels in Hugging Face order */

/* ---- the answers ---- */

static bool read_dataset(hid_t file, const char *name, hid_t type, size_t n, void *out)
{
    const hid_t set = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(set);
    const bool right =
        H5Sget_simple_extent_npoints(space) == (hssize_t)n && H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out) >= 0;
    if (!right) fprintf(stderr, "dataset %s of %zu numbers cannot be read\n", name, n);
    H5Sclose(space);
    H5Dclose(set);
    return right;
}

static bool read_answers(const char *path)
{
    static const char side_name[KVL_SIDES] = {[KVL_SIDE_K] = 'k', [KVL_SIDE_V] = 'v'};
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* the messages are ours */
    const hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) return false;
    bool right = read_dataset(file, "tokens", H5T_NATIVE_INT32, TOKENS, token) &&
                 read_dataset(file, "tokens_next", H5T_NATIVE_INT32, NEXT, token + TOKENS) &&
                 read_dataset(file, "logits", H5T_NATIVE_FLOAT, TOKENS * VOCAB, want) &&
                 read_dataset(file, "logits_next", H5T_NATIVE_FLOAT, NEXT * VOCAB, want + TOKENS * VOCAB);
    for (int l = 0; l < LAYERS; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            char name[24];
            snprintf(name, sizeof name, "layer%d/%c", l, side_name[s]);
            right = right && read_dataset(file, name, H5T_NATIVE_FLOAT, KV_HEADS * TOKENS * HEAD_DIM, row[l][s]);
        }
    H5Fclose(file);
    return right;
}

/* ---- tests ---- */

/* The prompt in one call, then one token a call, as a generation does. */
static void run_all_tokens(struct rig *r)
{
    rig_session(r, "f32",
                (struct kvl_session_config){
                    .n_ctx = ALL, .ubatch = TOKENS, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true, .max_logits = TOKENS});
    rig_forward(r, token, TOKENS, got);
    for (int i = TOKENS; i < ALL; i++) rig_forward(r, token + i, 1, got + i * VOCAB);
}

static void logits_are_those_of_transformers(void **state)
{
    struct rig r = rig_load(model_path);
    run_all_tokens(&r);
    const double prompt = largest_difference(got, want, TOKENS * VOCAB);
    const double next = largest_difference(got + TOKENS * VOCAB, want + TOKENS * VOCAB, NEXT * VOCAB);
    print_message("    logits: largest difference %.2e in the prompt, %.2e after it\n", prompt, next);
    assert_true(prompt < 1e-3);
    assert_true(next < 1e-3);
    for (int i = 0; i < ALL; i++) assert_int_equal(largest_at(got + i * VOCAB, VOCAB), largest_at(want + i * VOCAB, VOCAB));
    rig_free(&r);
}

/* Channel c of the Hugging Face order, where RoPE pairs c and c + 8, is channel 2(c % 8) + c / 8 of the GGUF's adjacent pairs. */
static int gguf_channel(int side, int c) { return side == KVL_SIDE_K ? 2 * (c % 8) + c / 8 : c; }

static double rows_difference(const float *cached, const float *golden, int side)
{
    double worst = 0.0;
    for (int i = 0; i < KV_HEADS * TOKENS; i++)
        for (int c = 0; c < HEAD_DIM; c++)
            worst = larger(worst, largest_difference(&cached[i * HEAD_DIM + gguf_channel(side, c)], &golden[i * HEAD_DIM + c], 1));
    return worst;
}

static void cached_keys_and_values_are_those_of_transformers(void **state)
{
    static float cached[KV_HEADS * TOKENS * HEAD_DIM];
    double worst[KVL_SIDES] = {0.0};
    struct rig r = rig_load(model_path);
    run_all_tokens(&r);
    for (int l = 0; l < LAYERS; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            assert_ok(kvl_cache_read_rows(kvl_session_cache(r.session), (uint32_t)l, s, 0, TOKENS, cached));
            worst[s] = larger(worst[s], rows_difference(cached, row[l][s], s));
        }
    print_message("    largest difference %.2e of keys, %.2e of values\n", worst[KVL_SIDE_K], worst[KVL_SIDE_V]);
    assert_true(worst[KVL_SIDE_K] < 1e-4);
    assert_true(worst[KVL_SIDE_V] < 1e-4);
    rig_free(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(logits_are_those_of_transformers),
    cmocka_unit_test(cached_keys_and_values_are_those_of_transformers),
};

int main(void)
{
    const char *named = getenv("KVLAB_GOLDEN"), *folder = named ? named : KVL_ROOT "/../shared/golden";
    char answers[4096];
    snprintf(model_path, sizeof model_path, "%s/tiny-llama.gguf", folder);
    snprintf(answers, sizeof answers, "%s/tiny-llama.h5", folder);
    if (!named && access(model_path, R_OK) != 0) {
        fprintf(stderr, "skipped: no golden folder (%s; KVLAB_GOLDEN names another)\n", folder);
        return 77;
    }
    if (!read_answers(answers)) {
        fprintf(stderr, "%s: not the golden answers%s\n", answers, named ? "; correct KVLAB_GOLDEN or unset it" : "");
        return 1;
    }
    return KVL_ON_EACH_DEVICE(tests);
}
