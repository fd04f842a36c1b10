/* Scores and kept sets against kvpress's, from its queries, keys and values of the tiny random llama: every press and ratio; the channels that think drops. */
#include "evidence.h"
#include "golden/golden.h"
#include "mem.h"
#include "model.h"
#include "quant.h"
#include "select.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static struct {
    struct kvl_model *model;
    uint32_t T, L, Hq, H, D;
    float **k, **k_pre, **v, **q, **q_pre, **w_o; /* [L], heads first, channels as kvlab has them */
} tiny;

#define assert_ok(call) assert_int_equal(call, KVL_OK)

/* Channel c of the Hugging Face order, where RoPE pairs c and c + D/2, in the order of adjacent pairs. */
static uint32_t adjacent(uint32_t c) { return 2 * (c % (tiny.D / 2)) + c / (tiny.D / 2); }

static void reorder(float *rows, size_t n)
{
    float row[1024];
    for (size_t i = 0; i < n; i++) {
        for (uint32_t c = 0; c < tiny.D; c++) row[adjacent(c)] = rows[i * tiny.D + c];
        memcpy(rows + i * tiny.D, row, tiny.D * sizeof *row);
    }
}

/* A copy of rows [heads][T][D] turned by direction * position. Angles are rounded to float, as those that turned the golden keys were. */
static float *rotated(const float *rows, uint32_t heads, int direction)
{
    float *out = malloc((size_t)heads * tiny.T * tiny.D * sizeof *out);
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t t = 0; t < tiny.T; t++)
            for (uint32_t i = 0; i < tiny.D / 2; i++) {
                const size_t at = ((size_t)h * tiny.T + t) * tiny.D + 2 * i;
                const double angle = (float)t * tiny.model->rope_freq[i] * (float)direction, a = rows[at], b = rows[at + 1];
                out[at] = (float)(a * cos(angle) - b * sin(angle));
                out[at + 1] = (float)(a * sin(angle) + b * cos(angle));
            }
    return out;
}

static float *output_matrix(uint32_t layer)
{
    char name[64];
    snprintf(name, sizeof name, "blk.%u.attn_output.weight", layer);
    const struct kvl_gguf_tensor *tensor = kvl_gguf_tensor_find(tiny.model->gguf, name);
    const struct kvl_quant_type *type = kvl_quant_type(tensor->type);
    const size_t n = tensor->dim[0] * tensor->dim[1];
    float *out = malloc(n * sizeof *out);
    type->dequantize(tensor->data, n / type->block, out);
    return out;
}

static bool load_tiny(void)
{
    char path[4096];
    const hid_t file = golden_open("tiny-llama.h5");
    snprintf(path, sizeof path, "%s/tiny-llama.gguf", golden_folder());
    if (file < 0 || kvl_model_open(path, &tiny.model) != KVL_OK) return false;
    const struct kvl_dims *dims = &tiny.model->dims;
    tiny.T = (uint32_t)golden_size(file, "tokens");
    tiny.L = dims->n_layer, tiny.Hq = dims->n_head, tiny.H = dims->n_kv_head, tiny.D = dims->head_dim;
    float ***all[] = {&tiny.k, &tiny.k_pre, &tiny.v, &tiny.q, &tiny.q_pre, &tiny.w_o};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] = calloc(tiny.L, sizeof **all[i]);
    for (uint32_t l = 0; l < tiny.L; l++) {
        char name[64];
        const size_t rows = (size_t)tiny.T * tiny.D;
        snprintf(name, sizeof name, "layer%u/k", l);
        tiny.k[l] = golden_read(file, name, H5T_NATIVE_FLOAT, tiny.H * rows);
        snprintf(name, sizeof name, "layer%u/v", l);
        tiny.v[l] = golden_read(file, name, H5T_NATIVE_FLOAT, tiny.H * rows);
        snprintf(name, sizeof name, "layer%u/q_prerope", l);
        tiny.q_pre[l] = golden_read(file, name, H5T_NATIVE_FLOAT, tiny.Hq * rows);
        if (!tiny.k[l] || !tiny.v[l] || !tiny.q_pre[l]) return false;
        reorder(tiny.k[l], (size_t)tiny.H * tiny.T);
        reorder(tiny.q_pre[l], (size_t)tiny.Hq * tiny.T);
        tiny.k_pre[l] = rotated(tiny.k[l], tiny.H, -1);
        tiny.q[l] = rotated(tiny.q_pre[l], tiny.Hq, 1);
        tiny.w_o[l] = output_matrix(l);
    }
    H5Fclose(file);
    return true;
}

/* Everything that any score may ask for. */
struct evidence {
    float *q, *mean, *cov, *columns, *normal;
};

static struct kvl_score_input evidence_of(uint32_t l, const struct kvl_layer_spec *spec, hid_t press, const char *group, struct evidence *e)
{
    struct kvl_score_needs needs;
    const size_t d = tiny.D;
    kvl_keep_needs(spec, &needs);
    struct kvl_score_input in = {
        .struct_size = sizeof in, .layer = l, .n_layer = tiny.L, .n_token = tiny.T, .n_head = tiny.Hq, .n_kv_head = tiny.H, .head_dim = tiny.D,
        .n_embd = tiny.model->dims.n_embd, .rope_dim = tiny.model->dims.rope_dim, .rope_freq = tiny.model->rope_freq,
        .k = tiny.k[l], .k_pre = tiny.k_pre[l], .v = tiny.v[l], .w_o = tiny.w_o[l], .q = tiny.q[l], .n_query = tiny.T};
    e->mean = calloc(tiny.Hq * d, sizeof(float));
    e->cov = calloc(tiny.Hq * d * d, sizeof(float));
    e->columns = calloc((size_t)tiny.Hq * tiny.T, sizeof(float));
    assert_ok(kvl_attention_columns(&in, e->columns));
    assert_ok(kvl_query_stats(tiny.q_pre[l], tiny.Hq, tiny.T, tiny.D, needs.first_query, e->mean, e->cov));
    in.q_mean = e->mean, in.q_cov = e->cov, in.column_sum = e->columns;

    const uint32_t n = needs.queries < tiny.T ? needs.queries : tiny.T; /* the newest only */
    e->q = calloc((size_t)tiny.Hq * n * d + 1, sizeof(float));
    for (uint32_t h = 0; h < tiny.Hq; h++) memcpy(e->q + h * n * d, tiny.q[l] + ((size_t)h * tiny.T + tiny.T - n) * d, n * d * sizeof(float));
    in.q = e->q, in.n_query = n;

    if (needs.what & KVL_NEED_NORMALS) { /* kvpress's own sketch: its numbers have standard deviation 1, whatever the folder's README says */
        char name[64];
        snprintf(name, sizeof name, "%s/layer%u/sketch", group, l);
        float *sketch = golden_read(press, name, H5T_NATIVE_FLOAT, tiny.H * d * needs.normals);
        assert_non_null(sketch);
        e->normal = calloc(tiny.H * d * needs.normals, sizeof(float));
        for (uint32_t h = 0; h < tiny.H; h++)
            for (uint32_t c = 0; c < d; c++)
                for (uint32_t j = 0; j < needs.normals; j++)
                    e->normal[(h * d + adjacent(c)) * needs.normals + j] = sketch[(h * d + c) * needs.normals + j];
        in.normal = e->normal;
        free(sketch);
    }
    return in;
}

static void evidence_free(struct evidence *e)
{
    free(e->q), free(e->mean), free(e->cov), free(e->columns), free(e->normal);
    *e = (struct evidence){0};
}

/* Largest difference of the base scores; numbers of kvpress that mean "protected" are skipped. */
static double score_difference(hid_t press, const char *group, uint32_t l, const struct kvl_selection *got)
{
    char name[64];
    double worst = 0.0;
    snprintf(name, sizeof name, "%s/layer%u/scores_inner", group, l);
    if (golden_size(press, name) == 0) snprintf(name, sizeof name, "%s/layer%u/scores", group, l);
    float *wanted = golden_read(press, name, H5T_NATIVE_FLOAT, (size_t)tiny.H * tiny.T);
    assert_non_null(wanted);
    for (size_t i = 0; i < (size_t)tiny.H * tiny.T; i++) worst = fmax(worst, fabs((double)wanted[i] - got->score[i]));
    free(wanted);
    return worst;
}

/* Kept sets, rectangular or ragged: tokens that only one side keeps. ties: of these, how many have the score at which the head is cut. */
static size_t kept_difference(hid_t press, const char *group, uint32_t l, const struct kvl_selection *got, size_t *ties)
{
    char name[64];
    size_t differing = 0;
    bool *in_wanted = calloc(tiny.T, sizeof *in_wanted), *in_got = calloc(tiny.T, sizeof *in_got);
    snprintf(name, sizeof name, "%s/layer%u/kept_offsets", group, l);
    int32_t *offset = golden_size(press, name) ? golden_read(press, name, H5T_NATIVE_INT32, tiny.H + 1) : NULL;
    snprintf(name, sizeof name, "%s/layer%u/%s", group, l, offset ? "kept_flat" : "kept");
    const size_t each = golden_size(press, name) / tiny.H;
    int32_t *kept = golden_read(press, name, H5T_NATIVE_INT32, 0);
    assert_non_null(kept);
    for (uint32_t h = 0; h < tiny.H; h++) {
        const size_t from = offset ? (size_t)offset[h] : h * each, to = offset ? (size_t)offset[h + 1] : from + each;
        float edge = INFINITY;
        memset(in_wanted, 0, tiny.T * sizeof *in_wanted);
        memset(in_got, 0, tiny.T * sizeof *in_got);
        for (size_t i = from; i < to; i++) in_wanted[kept[i]] = true;
        for (size_t i = got->offset[h]; i < got->offset[h + 1]; i++) in_got[got->token[i]] = true;
        for (size_t i = got->offset[h]; i < got->offset[h + 1]; i++) edge = fminf(edge, got->score[(size_t)h * tiny.T + got->token[i]]);
        for (uint32_t t = 0; t < tiny.T; t++) {
            differing += in_wanted[t] != in_got[t];
            *ties += in_wanted[t] != in_got[t] && got->score[(size_t)h * tiny.T + t] == edge;
        }
        assert_int_equal(to - from, got->offset[h + 1] - got->offset[h]);
    }
    free(in_wanted), free(in_got), free(kept), free(offset);
    return differing;
}

static void check_press(const struct golden_press *press)
{
    char file_name[128], text[512], group[16];
    int ratio[16];
    double worst = 0.0;
    size_t differing = 0, ties = 0, cuts = 0;
    snprintf(file_name, sizeof file_name, "press_%s.h5", press->name);
    const hid_t file = golden_open(file_name);
    assert_true(file >= 0);
    golden_ratios(file, ratio);
    assert_true(ratio[0] > 0);
    for (int i = 1; i <= ratio[0]; i++) {
        struct kvl_spec *spec;
        snprintf(group, sizeof group, "r%d", ratio[i]);
        assert_true(golden_spec(file, press, ratio[i] / 100.0, text, sizeof text));
        if (kvl_spec_parse(text, &spec) != KVL_OK) fail_msg("%s", kvl_error_text());
        for (uint32_t l = 0; l < tiny.L; l++, cuts += tiny.H) {
            struct evidence e = {0};
            struct kvl_selection got;
            struct kvl_score_input in = evidence_of(l, kvl_spec_layer(spec, l), file, group, &e);
            assert_ok(kvl_select_layer(kvl_spec_layer(spec, l), &in, 1, &got));
            worst = fmax(worst, score_difference(file, group, l, &got));
            differing += kept_difference(file, group, l, &got, &ties);
            kvl_selection_free(&got);
            evidence_free(&e);
        }
        kvl_spec_free(&spec);
    }
    print_message("    %-26s scores within %.1e; of %zu cuts, tokens that one side alone keeps: %zu, of them at a tie: %zu\n", press->name, worst, cuts,
                  differing, ties);
    H5Fclose(file);
    assert_true(worst < 1e-4);
    assert_int_equal(differing, ties); /* any of equal scores is a right answer */
}

static void scores_and_kept_sets_are_those_of_kvpress(void **state)
{
    for (size_t i = 0; i < GOLDEN_PRESSES; i++) check_press(&golden_presses[i]);
}

/* Channels of one layer that one side alone drops. */
static uint32_t dropped_difference(hid_t press, const char *group, uint32_t l, const struct kvl_instance *think)
{
    const struct kvl_codec *codec = (const struct kvl_codec *)think->plugin;
    const struct kvl_codec_dims dims = {sizeof dims, KVL_ROLE_K, tiny.D, 64};
    const uint32_t each = tiny.Hq / tiny.H;
    struct kvl_codec_shape shape;
    char name[64];
    uint32_t differing = 0;
    snprintf(name, sizeof name, "%s/layer%u/pruned_channels", group, l);
    const size_t n = golden_size(press, name) / tiny.H;
    int32_t *wanted = golden_read(press, name, H5T_NATIVE_INT32, 0);
    assert_non_null(wanted);
    assert_ok(kvl_codec_shape(think, KVL_ROLE_K, tiny.D, 64, &shape));
    float *q = calloc((size_t)each * shape.learn_queries * tiny.D, sizeof *q), *table = calloc(shape.table_floats, sizeof *table);
    for (uint32_t h = 0; h < tiny.H; h++) {
        const size_t window = (size_t)shape.learn_queries * tiny.D, all = (size_t)tiny.T * tiny.D;
        for (uint32_t g = 0; g < each; g++) memcpy(q + g * window, tiny.q[l] + (h * each + g + 1) * all - window, window * sizeof *q);
        const struct kvl_prompt_rows in = {sizeof in, tiny.T, each, shape.learn_queries, tiny.k[l] + h * all, q};
        assert_int_equal(codec->learn(think->priv, &dims, &in, table), 0);
        bool drops[256] = {false};
        for (size_t i = 0; i < n; i++) drops[adjacent((uint32_t)wanted[h * n + i])] = true;
        for (uint32_t c = 0; c < tiny.D; c++) differing += drops[c] != (table[c] < 0.0f);
    }
    free(q), free(table), free(wanted);
    return differing;
}

static void think_drops_the_channels_of_kvpress(void **state)
{
    const hid_t file = golden_open("press_think.h5");
    int ratio[16];
    assert_true(file >= 0);
    golden_ratios(file, ratio);
    assert_true(ratio[0] > 0);
    for (int i = 1; i <= ratio[0]; i++) {
        char group[16], options[64];
        struct kvl_instance think;
        snprintf(group, sizeof group, "r%d", ratio[i]);
        assert_true(golden_expand(file, "ratio={r},window={window_size}", ratio[i] / 100.0, options, sizeof options));
        assert_ok(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "think"), options, &think));
        for (uint32_t l = 0; l < tiny.L; l++) assert_int_equal(dropped_difference(file, group, l, &think), 0);
        kvl_instance_free(&think);
    }
    H5Fclose(file);
}

int main(void)
{
    if (golden_folder() == NULL) {
        fprintf(stderr, "skipped: no golden folder (KVLAB_GOLDEN names one)\n");
        return 77;
    }
    if (!load_tiny()) return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(scores_and_kept_sets_are_those_of_kvpress), cmocka_unit_test(think_drops_the_channels_of_kvpress)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
