/* compress-then-score on the real model and text against kvpress's numbers, chunk by chunk: context, scored tokens, chunks, presses and ratios are
 * those of the golden files. One chunk and one ratio a press unless KVLAB_SLOW=1, which takes an hour or two and also checks the means;
 * KVLAB_GOLDEN_PRESS names one press alone. */
#include "kernel/test_harness.h"
#include "golden/golden.h"
#include "eval.h"
#include <math.h>

#define MODEL KVL_ROOT "/data/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define TEXT KVL_ROOT "/data/text/wiki.test.raw"

enum { CHUNK_TOLERANCE_MICRO = 8000, MEAN_TOLERANCE_MICRO = 3000, MOST_CHUNKS = 64 };

/* Defaults of kvpress at these names. */
static const struct {
    const char *press, *keep, *budget;
    const char *codec; /* NULL: f32 */
} presses[] = {
    {"none", NULL, NULL},
    {"snapkv", "snapkv", "uniform"},
    {"pyramidkv", "snapkv", "pyramid"},
    {"adakv_snapkv", "snapkv", "ada"},
    {"tova", "tova", "uniform"},
    {"knorm", "knorm", "uniform"},
    {"streamingllm", "streaming", "uniform"},
    {"observed_attention", "observed", "uniform"},
    {"expected_attention", "expected", "uniform"},
    {"adakv_expected_attention", "expected(epsilon=0.01)", "ada"},
    {"keydiff", "keydiff", "uniform"},
    {"lagkv", "lagkv", "uniform"},
    {"think", NULL, NULL, "k=think(ratio={r},recent=0,unit={context}) v=f32"}, /* kvpress: all the prompt's keys, and no later one */
};

static struct kvl_rig rig;
static struct kvl_eval_text text;
static uint32_t context, scored, n_chunks;

/* Rows that the golden README calls not reproducible: cuts inside equal scores. */
static bool is_determined(const char *press, double ratio) { return strcmp(press, "lagkv") != 0 || ratio == 0.75; }

/* nll of every chunk under a press at a ratio as the file has them, [n_chunks] means. */
static void golden_nll(hid_t file, const char *press, const char *group, double *nll)
{
    char name[128];
    snprintf(name, sizeof name, "%s/%s/nll", press, group);
    float *all = golden_read(file, name, H5T_NATIVE_FLOAT, (size_t)n_chunks * scored);
    assert_non_null(all);
    for (uint32_t c = 0; c < n_chunks; c++) {
        nll[c] = 0.0;
        for (uint32_t i = 0; i < scored; i++) nll[c] += all[(size_t)c * scored + i] / scored;
    }
    free(all);
}

static void check(hid_t file, size_t p, const char *group, double ratio, bool every_chunk)
{
    char spec_text[256];
    struct kvl_spec *spec;
    struct kvl_eval *eval;
    struct kvl_record *record;
    double wanted[MOST_CHUNKS], got_sum = 0.0, wanted_sum = 0.0, worst = 0.0;
    if (presses[p].keep == NULL) assert_true(golden_expand(file, presses[p].codec ? presses[p].codec : "f32", ratio, spec_text, sizeof spec_text));
    else snprintf(spec_text, sizeof spec_text, "f32 keep=%s budget=%s(removed=%.17g)", presses[p].keep, presses[p].budget, ratio);
    golden_nll(file, presses[p].press, group, wanted);
    if (kvl_spec_parse(spec_text, &spec) != KVL_OK) fail_msg("%s", kvl_error_text());
    const struct kvl_eval_config config = {.spec = spec, .n_ctx = context + scored, .ubatch = 512, .context = context, .chunks = n_chunks,
                                           .protocol = KVL_P3_PREFILL_EXACT, .exact = true};
    assert_ok(kvl_eval_open(&rig, &text, &config, &eval));
    const struct kvl_record_config no_file = {.command = "test", .no_file = true, .device = rig.device, .model = rig.model, .spec = spec,
                                              .protocol = KVL_P3_PREFILL_EXACT, .ubatch = 512, .n_ctx = context + scored, .exact = true,
                                              .table = &kvl_eval_ppl_binned_table};
    assert_ok(kvl_record_open(&no_file, &record));
    const uint32_t count = every_chunk ? n_chunks : 1;
    for (uint32_t c = 0; c < count; c++) {
        double nll = 0.0;
        assert_ok(kvl_eval_window(eval, c, record));
        for (uint32_t i = 0; i < scored; i++) nll += (double)eval->score[KVL_EVAL_SPEC][i].nll / scored;
        got_sum += nll;
        wanted_sum += wanted[c];
        worst = fmax(worst, fabs(nll - wanted[c]));
    }
    assert_ok(kvl_record_close(&record, KVL_OK));
    kvl_eval_close(&eval);
    kvl_spec_free(&spec);
    const double mean = fabs(got_sum - wanted_sum) / count;
    print_message("    %-25s %s  nll %.6f, kvpress %.6f; %u chunks: mean differs by %.6f, a chunk by at most %.6f%s\n", presses[p].press, group,
                  got_sum / count, wanted_sum / count, count, mean, worst, is_determined(presses[p].press, ratio) ? "" : " (ties, not compared)");
    fflush(stdout);
    if (!is_determined(presses[p].press, ratio)) return;
    assert_true(worst * 1e6 < CHUNK_TOLERANCE_MICRO);
    assert_true(!every_chunk || mean * 1e6 < MEAN_TOLERANCE_MICRO);
}

static void nll_is_that_of_kvpress(void **state)
{
    const char *only = getenv("KVLAB_GOLDEN_PRESS");
    const char *slow = getenv("KVLAB_SLOW");
    const bool all = slow != NULL && strcmp(slow, "1") == 0;
    const hid_t file = golden_open("kvpress_smollm2_nll.h5");
    assert_true(file >= 0);
    for (size_t p = 0; p < sizeof presses / sizeof *presses; p++) {
        int ratio[16];
        if (only != NULL && strcmp(only, presses[p].press) != 0) continue;
        const hid_t press = H5Gopen2(file, presses[p].press, H5P_DEFAULT);
        assert_true(press >= 0);
        golden_ratios(press, ratio);
        H5Gclose(press);
        assert_true(ratio[0] > 0);
        for (int i = 1; i <= ratio[0]; i++) {
            char group[16];
            snprintf(group, sizeof group, "r%02d", ratio[i]);
            if (all || i == ratio[0] - (ratio[0] > 1)) check(file, p, group, ratio[i] / 100.0, all);
        }
    }
    H5Fclose(file);
}

static bool open_all(void)
{
    double attribute;
    const hid_t file = golden_open("kvpress_smollm2_nll.h5");
    if (file < 0) return false;
    context = golden_attribute(file, "context", &attribute) ? (uint32_t)attribute : 0;
    scored = golden_attribute(file, "scored", &attribute) ? (uint32_t)attribute : 0;
    if (context == 0 || scored == 0) return false;
    n_chunks = (uint32_t)(golden_size(file, "tokens") / (context + scored));
    int32_t *token = golden_read(file, "tokens", H5T_NATIVE_INT32, 0);
    if (token == NULL || n_chunks == 0 || n_chunks > MOST_CHUNKS) return false;
    if (kvl_rig_open(MODEL, getenv("KVLAB_TEST_DEVICE"), &rig) != KVL_OK || kvl_eval_text_read(rig.model, TEXT, &text) != KVL_OK) {
        fprintf(stderr, "%s\n", kvl_error_text());
        return false;
    }
    const bool same = text.n >= (size_t)n_chunks * (context + scored) && memcmp(token, text.tokens, (size_t)n_chunks * (context + scored) * sizeof *token) == 0;
    if (!same) fprintf(stderr, "%s: other tokens than the golden ones\n", TEXT);
    free(token);
    H5Fclose(file);
    return same;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(nll_is_that_of_kvpress)};
    if (golden_folder() == NULL || access(MODEL, R_OK) != 0 || access(TEXT, R_OK) != 0) {
        fprintf(stderr, "skipped: no golden folder (KVLAB_GOLDEN names one), or no model or text (scripts/fetch_model.sh)\n");
        return 77;
    }
    if (!open_all()) return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvl_eval_text_free(&text);
    kvl_rig_close(&rig);
    return failed;
}
