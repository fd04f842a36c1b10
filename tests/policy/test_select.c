/* Selection and budgets on the host: amounts, ties, edges, the heads' shares, and every score on inputs that have nothing to say. */
#include "mem.h"
#include "select.h"
#include "text.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { HEADS = 2, GROUP = 3, D = 8, MOST = 96 };

static void amounts(void **state)
{
    const struct {
        struct kvl_amount amount;
        uint32_t n, target;
    } cases[] = {
        {{-1, 0.9, -1, -1}, 1000, 99}, /* 1 - 0.9 is less than 0.1 in double: kvpress keeps 99 as well */
        {{0.1, -1, -1, -1}, 1000, 100}, {{-1, 0.5, -1, -1}, 385, 192}, {{0.001, -1, -1, -1}, 10, 1},  {{-1, 1, -1, -1}, 10, 1},
        {{1, -1, -1, -1}, 10, 10},      {{-1, -1, 64, -1}, 1000, 64},  {{-1, -1, 64, -1}, 10, 10},    {{-1, -1, 0, -1}, 10, 0},
        {{-1, -1, 1, -1}, 10, 1},       {{-1, -1, -1, 4095}, 100, 40}, {{-1, -1, -1, 1e9}, 100, 100}, {{0.5, -1, -1, -1}, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t target;
        double fraction;
        assert_int_equal(kvl_amount_resolve(&cases[i].amount, cases[i].n, 100, &target, &fraction), KVL_OK);
        assert_int_equal(target, cases[i].target);
        assert_true(fraction >= 0.0 && fraction <= 1.0);
    }
}

static void the_best_and_ties(void **state)
{
    const float score[] = {1, 3, 3, NAN, 3, 0, FLT_MAX, 1};
    struct kvl_ranked room[8];
    uint32_t kept[8];
    assert_int_equal(kvl_select_top(score, 8, 3, room, kept), 3);
    assert_true(kept[0] == 1 && kept[1] == 2 && kept[2] == 6); /* of three equal ones the first two */
    assert_int_equal(kvl_select_top(score, 8, 0, room, kept), 0);
    assert_int_equal(kvl_select_top(score, 8, 99, room, kept), 8);
    assert_int_equal(kvl_select_top(score, 8, 7, room, kept), 7);
    for (int i = 0; i < 7; i++) assert_true(kept[i] != 3); /* not a number goes first */
}

/* A layer's evidence: `level` is what all numbers are, or a different one for each if it is NAN. */
struct layer {
    float k[HEADS * MOST * D], v[HEADS * MOST * D], q[HEADS * GROUP * MOST * D], columns[HEADS * GROUP * MOST];
    float mean[HEADS * GROUP * D], covariance[HEADS * GROUP * D * D], w_o[D * HEADS * GROUP * D], normal[HEADS * D * 48], freq[D / 2];
    struct kvl_witness witness[MOST];
    uint32_t n_witness;
};

static void fill(float *x, size_t n, float level)
{
    for (size_t i = 0; i < n; i++) x[i] = isnan(level) ? sinf((float)(i * i % 1009)) : level;
}

/* Short witnesses of what the score wants, whose queries and keys are the layer's. */
static void add_witnesses(struct layer *layer, const struct kvl_score_needs *needs, uint32_t n)
{
    const uint32_t part = needs->what & KVL_NEED_REPETITION ? needs->repeat_tokens : needs->what & KVL_NEED_FOLLOWING ? n : 0;
    layer->n_witness = 0;
    for (uint32_t first = 0; part > 0 && first < n; first += part)
        layer->witness[layer->n_witness++] =
            (struct kvl_witness){.n = 3, .first = first, .end = n - first < part ? n : first + part, .q = layer->q, .k = layer->k};
}

static struct kvl_score_input input_of(struct layer *layer, const struct kvl_layer_spec *spec, uint32_t n, float level)
{
    struct kvl_score_needs needs;
    kvl_keep_needs(spec, &needs);
    float *all[] = {layer->k, layer->v, layer->q, layer->columns, layer->mean, layer->covariance, layer->w_o, layer->normal, layer->freq};
    const size_t sizes[] = {sizeof layer->k, sizeof layer->v, sizeof layer->q, sizeof layer->columns, sizeof layer->mean,
                            sizeof layer->covariance, sizeof layer->w_o, sizeof layer->normal, sizeof layer->freq};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fill(all[i], sizes[i] / sizeof(float), level);
    add_witnesses(layer, &needs, n);
    return (struct kvl_score_input){.struct_size = sizeof(struct kvl_score_input), .n_layer = 4, .n_token = n, .n_head = HEADS * GROUP,
                                    .n_kv_head = HEADS, .head_dim = D, .n_embd = D, .rope_dim = D,
                                    .n_query = needs.queries < n ? needs.queries : n, .k = layer->k, .k_pre = layer->k, .v = layer->v, .q = layer->q,
                                    .q_mean = layer->mean, .q_cov = layer->covariance, .column_sum = layer->columns, .w_o = layer->w_o,
                                    .normal = layer->normal, .rope_freq = layer->freq, .witness = layer->witness, .n_witness = layer->n_witness};
}

static void check_selection(const char *text, uint32_t n, float level)
{
    static struct layer layer;
    struct kvl_spec *spec;
    struct kvl_selection got;
    if (kvl_spec_parse(text, &spec) != KVL_OK) fail_msg("%s: %s", text, kvl_error_text());
    const struct kvl_layer_spec *entry = kvl_spec_layer(spec, 0);
    struct kvl_score_input in = input_of(&layer, entry, n, level);
    if (kvl_select_layer(entry, &in, 100, &got) != KVL_OK) fail_msg("%s, %u tokens: %s", text, n, kvl_error_text());
    assert_int_equal(got.offset[0], 0);
    for (uint32_t h = 0; h < HEADS; h++) {
        assert_true(got.offset[h + 1] - got.offset[h] <= n);
        for (uint32_t i = got.offset[h]; i < got.offset[h + 1]; i++) {
            assert_true(got.token[i] < n);
            if (i > got.offset[h]) assert_true(got.token[i] > got.token[i - 1]);
        }
    }
    if (strstr(text, "chunk(") == NULL) assert_int_equal(got.offset[HEADS], HEADS * got.target);
    kvl_selection_free(&got);
    kvl_spec_free(&spec);
}

static void every_score_and_budget_at_the_edges(void **state)
{
    const char *scores[] = {"random", "random_raw", "knorm", "streaming", "snapkv(window=32)", "snapkv(window=32,pool=max,kernel=4,reduce=sum,gqa=max)",
                            "tova", "h2o", "h2o(recent=1,gqa=sum)", "observed", "expected", "expected(nocov,plain)", "keydiff", "lagkv(lag=16)",
                            "lagkv(lag=16,cross)", "cur", "cur(window=0,leverage=key)", "leverage(sketch=16)", "noncausal(chunk=16)",
                            "noncausal(chunk=20,mask)", "oracle", "oracle(gqa=max)", "kvzip", "kvzip(chunk=7,sink=0)", "critical(of=snapkv(window=32))", "chunk(of=knorm,size=20)",
                            "critical(of=chunk(of=tova,size=7))", "critical(of=oracle)"};
    const char *budgets[] = {"uniform(kept=0.5)", "uniform(tokens=0)", "uniform(tokens=1)", "uniform(tokens=500)", "pyramid(kept=0.25,window=4)",
                             "ada(kept=0.3)",     "ada(tokens=1)",     "ada(tokens=0)",     "ada(kept=1)",         "ada(kept=0.5,safeguard=0)",
                             "layers(kept=0.5,share=2:1:1:0)", "layers(tokens=1,share=0:1*3)"};
    const uint32_t lengths[] = {1, 2, 5, 33, MOST};
    const float levels[] = {NAN, 0.0f, 1.0f};
    char text[256];
    for (size_t s = 0; s < sizeof scores / sizeof *scores; s++)
        for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++)
            for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++)
                for (size_t l = 0; l < sizeof levels / sizeof *levels; l++) {
                    snprintf(text, sizeof text, "sink=%d keep=%s budget=%s", (int)(n % 2), scores[s], budgets[b]);
                    check_selection(text, lengths[n], levels[l]);
                }
}

/* One head's scores are all above the other's: without a safeguard it gets everything, and the other keeps nothing. */
static void a_head_may_keep_nothing(void **state)
{
    static struct layer layer;
    struct kvl_spec *spec;
    struct kvl_selection got;
    assert_int_equal(kvl_spec_parse("keep=knorm budget=ada(kept=0.5,safeguard=0)", &spec), KVL_OK);
    struct kvl_score_input in = input_of(&layer, kvl_spec_layer(spec, 0), 40, NAN);
    for (size_t i = 0; i < 40 * D; i++) layer.k[40 * D + i] = 100.0f;
    assert_int_equal(kvl_select_layer(kvl_spec_layer(spec, 0), &in, 1, &got), KVL_OK);
    assert_int_equal(got.offset[1], 40);
    assert_int_equal(got.offset[2], 40);
    kvl_selection_free(&got);
    kvl_spec_free(&spec);
}

/* A pyramid's layers sum to the uniform budget but for rounding, fall from layer to layer, and fall back where the least would be too small. */
static void pyramid_targets(void **state)
{
    struct kvl_spec *spec;
    uint32_t target[30], sum = 0, uniform;
    assert_int_equal(kvl_spec_parse("keep=snapkv budget=pyramid(removed=0.25)", &spec), KVL_OK);
    for (uint32_t l = 0; l < 30; l++) {
        assert_int_equal(kvl_layer_target(kvl_spec_layer(spec, l), l, 30, 1024, 3, 1, &target[l]), KVL_OK);
        if (l > 0) assert_true(target[l] < target[l - 1]);
        sum += target[l];
    }
    assert_true(abs((int)sum - 30 * 768) <= 30);
    kvl_spec_free(&spec);
    assert_int_equal(kvl_spec_parse("keep=snapkv budget=pyramid(removed=0.9)", &spec), KVL_OK);
    for (uint32_t l = 0; l < 30; l++) {
        assert_int_equal(kvl_layer_target(kvl_spec_layer(spec, l), l, 30, 1024, 3, 1, &uniform), KVL_OK);
        assert_int_equal(uniform, 102);
    }
    kvl_spec_free(&spec);
}

/* A list's mean is the budget, its ratios are the list's, no layer keeps more than there is, and it must fit the model. */
static void layers_targets(void **state)
{
    static const uint32_t wanted[] = {400, 200, 200, 0}, capped[] = {1000, 0, 0, 0};
    struct kvl_spec *spec;
    uint32_t target;
    struct kvl_text text = {0};
    assert_int_equal(kvl_spec_parse("keep=knorm budget=layers(removed=0.8,share=2:1*2:0)", &spec), KVL_OK);
    for (uint32_t l = 0; l < 4; l++) {
        assert_int_equal(kvl_layer_target(kvl_spec_layer(spec, l), l, 4, 1000, 3, 1, &target), KVL_OK);
        assert_int_equal(target, wanted[l]);
    }
    assert_int_equal(kvl_layer_target(kvl_spec_layer(spec, 0), 0, 5, 1000, 3, 1, &target), KVL_E_USAGE);
    assert_non_null(strstr(kvl_error_text(), "has 4 numbers, the model 5 layers"));
    kvl_error_clear();
    assert_int_equal(kvl_spec_resolved(spec, &text), KVL_OK);
    assert_non_null(strstr(text.data, "budget=layers(removed=0.8,share=2:1*2:0)"));
    kvl_text_free(&text);
    kvl_spec_free(&spec);
    assert_int_equal(kvl_spec_parse("keep=knorm budget=layers(kept=0.5,share=1:0*3)", &spec), KVL_OK);
    for (uint32_t l = 0; l < 4; l++) {
        assert_int_equal(kvl_layer_target(kvl_spec_layer(spec, l), l, 4, 1000, 3, 1, &target), KVL_OK);
        assert_int_equal(target, capped[l]);
    }
    kvl_spec_free(&spec);
    static const char *const wrong[] = {"", ",share=", ",share=1:", ",share=a", ",share=1*0", ",share=1*300", ",share=-1", ",share=0:0", ",share=1*", ",share=nan"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char spec_text[96];
        snprintf(spec_text, sizeof spec_text, "keep=knorm budget=layers(kept=0.5%s)", wrong[i]);
        assert_int_equal(kvl_spec_parse(spec_text, &spec), KVL_E_USAGE);
        kvl_error_clear();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(amounts),
        cmocka_unit_test(the_best_and_ties),
        cmocka_unit_test(every_score_and_budget_at_the_edges),
        cmocka_unit_test(a_head_may_keep_nothing),
        cmocka_unit_test(pyramid_targets),
        cmocka_unit_test(layers_targets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
