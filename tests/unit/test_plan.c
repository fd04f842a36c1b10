/* The byte planner without a device: published sizes, windows, slabs and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "plan_report.h"
#include "public_models.h"
#include <string.h>

static const struct kvl_cache_dims smollm2 = {30, 9, 3, 64}, wide = {1, 1, 1, 128};
static const struct kvl_cache_limits roomy = {1ull << 32, 4};

/* Plans `spec`; the caller frees the plan. The spec is freed here: a plan's figures do not need it. */
static kvl_status try_plan(const char *text, const struct kvl_cache_dims *dims, struct kvl_cache_config config,
                           const struct kvl_cache_limits *limits, struct kvl_cache_plan *out)
{
    struct kvl_spec *spec = NULL;
    kvl_error_clear();
    if (kvl_spec_parse(text, &spec) != KVL_OK) fail_msg("\"%s\": %s", text, kvl_error_text());
    config.spec = spec;
    const kvl_status status = kvl_cache_plan_make(dims, &config, limits, out);
    kvl_spec_free(&spec);
    return status;
}

static struct kvl_cache_plan plan_of(const char *text, const struct kvl_cache_dims *dims, struct kvl_cache_config config,
                                     const struct kvl_cache_limits *limits)
{
    struct kvl_cache_plan plan;
    if (try_plan(text, dims, config, limits, &plan) != KVL_OK) fail_msg("\"%s\": %s", text, kvl_error_text());
    return plan;
}

static struct kvl_cache_config context(uint32_t n_ctx, enum kvl_protocol protocol)
{
    return (struct kvl_cache_config){.n_ctx = n_ctx, .ubatch = 64, .protocol = protocol};
}

static void bytes_per_token(void **state)
{
    static const struct {
        const char *spec;
        const struct kvl_cache_dims *dims;
        uint64_t bytes;
    } rows[] = {
        {"f32", &smollm2, 46080},
        {"f16", &smollm2, 23040},
        {"int8", &smollm2, 12240},
        {"int4", &smollm2, 6480},
        {"f16 sink=4 tail=64", &smollm2, 23040}, /* exact rows are not counted: their number does not grow */
        {"@0-14 int4 @15-29 int8", &smollm2, (12240 + 6480) / 2},
        {"f16", &wide, 2 * 256},
        {"int8", &wide, 2 * 132},
        {"int8(sym)", &wide, 2 * 130},
        {"int4", &wide, 2 * 68},
        {"int4(group=64)", &wide, 2 * 72},
        {"int4(group=32)", &wide, 2 * 80},
        {"k=int8 v=int4", &wide, 132 + 68},
        {"kivi(residual=0)", &wide, 48 + 48},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct kvl_cache_plan plan = plan_of(rows[i].spec, rows[i].dims, context(100, KVL_P1_FAKE_QUANT), &roomy);
        if (plan.bytes_per_token != rows[i].bytes)
            fail_msg("%s: %llu bytes a token, wanted %llu", rows[i].spec, (unsigned long long)plan.bytes_per_token,
                     (unsigned long long)rows[i].bytes);
        kvl_cache_plan_free(&plan);
    }
}

static void public_models(void **state)
{
    static const struct {
        const char *name;
        uint64_t bytes_per_token, billions; /* of weights' bytes, rounded */
    } rows[] = {
        {"llama-3-70b", 327680, 141}, {"llama-3-8b", 131072, 16}, {"llama-2-7b", 524288, 13}, {"llama-3.2-1b", 32768, 2},
        {"tinyllama-1.1b", 22528, 2}, {"qwen2.5-0.5b", 12288, 1}, {"smollm2-135m", 23040, 0}, {"opt-13b", 819200, 26},
    };
    struct kvl_public_models models;
    struct kvl_spec *spec = NULL;
    assert_int_equal(kvl_public_models_load(&models), KVL_OK);
    assert_int_equal(kvl_spec_parse("f16", &spec), KVL_OK);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct kvl_public_model *model = kvl_public_models_find(&models, rows[i].name);
        const struct kvl_session_config config = {.spec = spec, .n_ctx = 2048, .ubatch = 64, .protocol = KVL_P4_STREAMING};
        struct kvl_footprint one;
        assert_non_null(model);
        assert_int_equal(kvl_footprint_of(&model->dims, &config, &roomy, &one), KVL_OK);
        assert_int_equal(one.bytes_per_token, rows[i].bytes_per_token);
        assert_int_equal(one.bytes[KVL_MEM_PAYLOAD], 2048 * rows[i].bytes_per_token);
        assert_int_equal((2 * kvl_public_params(model) + 500000000) / 1000000000, rows[i].billions);
    }
    assert_null(kvl_public_models_find(&models, "llama"));
    kvl_spec_free(&spec);
    kvl_public_models_free(&models);
}

/* Classes sum to what is reserved, whatever is left over in the last page. */
static void classes_sum_to_resident(void **state)
{
    static const char *const specs[] = {"f16", "int4 sink=4 tail=20", "int8 window=70", "k=f32 v=int4(group=16) ktail=9"};
    static const struct kvl_dims dims = {.n_layer = 30, .n_embd = 576, .n_head = 9, .n_kv_head = 3, .head_dim = 64, .n_ff = 1536, .n_vocab = 49152};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        for (uint32_t n_ctx = 1; n_ctx <= 200; n_ctx += 33) {
            struct kvl_spec *spec = NULL;
            struct kvl_footprint one;
            uint64_t sum = 0;
            assert_int_equal(kvl_spec_parse(specs[i], &spec), KVL_OK);
            const struct kvl_session_config config = {
                .spec = spec, .n_ctx = n_ctx, .ubatch = 16, .protocol = KVL_P2_WRITE_THEN_READ};
            assert_int_equal(kvl_footprint_of(&dims, &config, &roomy, &one), KVL_OK);
            for (int c = 0; c < KVL_MEM_CLASSES; c++) sum += c == KVL_MEM_WEIGHTS || c == KVL_MEM_SCRATCH ? 0 : one.bytes[c];
            assert_int_equal(sum, one.resident);
            assert_true(one.bytes[KVL_MEM_SLACK] < one.resident); /* no wrap below zero */
            kvl_spec_free(&spec);
        }
}

/* A window's memory does not depend on the context; without one it grows. */
static void windows_do_not_grow(void **state)
{
    static const enum kvl_protocol protocols[] = {KVL_P1_FAKE_QUANT, KVL_P2_WRITE_THEN_READ, KVL_P4_STREAMING};
    for (size_t i = 0; i < sizeof protocols / sizeof *protocols; i++) {
        uint64_t resident[2][2];
        for (int windowed = 0; windowed < 2; windowed++)
            for (int longer = 0; longer < 2; longer++) {
                struct kvl_cache_plan plan = plan_of(windowed ? "int4 sink=4 tail=8 window=256" : "int4 sink=4 tail=8", &smollm2,
                                                     context(longer ? 1 << 20 : 1024, protocols[i]), &roomy);
                resident[windowed][longer] = plan.resident_bytes;
                kvl_cache_plan_free(&plan);
            }
        assert_int_equal(resident[1][0], resident[1][1]);
        assert_true(resident[0][0] < resident[0][1]);
        assert_true(resident[1][0] < resident[0][0]);
    }
}

/* KIVI-2 at 4096 tokens, d 128 (methods.md section 8): bytes a head holds, codes, parameters and exact rows; V reserves just that. */
static void kivi_holds_what_the_paper_says(void **state)
{
    static const uint64_t wanted[KVL_SIDES] = {196608, 223232};
    struct kvl_cache_config config = context(4096, KVL_P4_STREAMING);
    struct kvl_spec *spec = NULL;
    struct kvl_cache_plan plan;
    assert_int_equal(kvl_spec_parse("kivi", &spec), KVL_OK);
    config.spec = spec;
    assert_int_equal(kvl_cache_plan_make(&wide, &config, &roomy, &plan), KVL_OK);
    const struct kvl_layer_plan *layer = &plan.layer[0];
    for (int s = 0; s < KVL_SIDES; s++) {
        const uint32_t sealed = kvl_sealed_after(&plan, &layer->side[s], 0, 4096);
        struct kvl_codec_bytes used;
        assert_int_equal(kvl_side_bytes(&layer->side[s], sealed, &used), KVL_OK);
        const uint64_t rows = kvl_exact_rows_held(&plan, layer, s, sealed, 4096) * layer->side[s].exact_row_bytes;
        assert_int_equal(used.payload + used.scale + rows, wanted[s]);
        assert_int_equal(layer->side[s].slots * layer->side[s].page_bytes + rows, wanted[s]);
    }
    kvl_cache_plan_free(&plan);
    kvl_spec_free(&spec);
}

/* ---- slabs ---- */

/* Every page lies in one slab, behind the page before it, and the slabs are as full as whole pages make them. */
static void pages_do_not_cross_slabs(void **state)
{
    const struct kvl_cache_limits tight = {10 * 8192 + 100, 4}; /* pages of f16 have 8192 bytes here */
    struct kvl_cache_plan plan =
        plan_of("k=f16 v=int4", &(struct kvl_cache_dims){2, 9, 3, 64}, context(640, KVL_P1_FAKE_QUANT), &tight);
    uint64_t end = 0, entry = 0, total = 0;
    uint32_t slab = 0;
    assert_in_range(plan.n_slabs, 3, KVL_MAX_SLABS);
    for (uint32_t l = 0; l < plan.dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++)
            for (uint32_t i = 0; i < plan.layer[l].side[s].slots * plan.dims.n_kv_head; i++) {
                const uint64_t address = plan.page_address[entry++], bytes = plan.layer[l].side[s].page_bytes;
                if (address >> 56 != slab) {
                    assert_int_equal(plan.slab_bytes[slab], end);
                    assert_true(end + bytes > tight.max_alloc_bytes);
                    slab++;
                    end = 0;
                }
                assert_int_equal(address, (uint64_t)slab << 56 | end);
                end += bytes;
                total += bytes;
                assert_true(end <= tight.max_alloc_bytes);
            }
    assert_int_equal(entry, plan.n_entries);
    assert_int_equal(slab + 1, plan.n_slabs);
    assert_int_equal(plan.resident_bytes, total + plan.table_bytes + plan.exact_bytes);
    kvl_cache_plan_free(&plan);
}

static void assert_refused(const char *spec, struct kvl_cache_config config, const struct kvl_cache_limits *limits,
                           kvl_status status, const char *words)
{
    struct kvl_cache_plan plan;
    assert_int_equal(try_plan(spec, &smollm2, config, limits, &plan), status);
    if (strstr(kvl_error_text(), words) == NULL) fail_msg("%s: \"%s\" lacks \"%s\"", spec, kvl_error_text(), words);
    kvl_error_clear();
}

static void what_does_not_fit_is_refused(void **state)
{
    const struct kvl_cache_limits tight = {1 << 20, 4}, tiny = {4096, 4};
    struct kvl_cache_plan plan = plan_of("f16", &smollm2, context(640, KVL_P1_FAKE_QUANT), &tight);
    assert_int_equal(plan.n_slabs, 15);
    kvl_cache_plan_free(&plan);
    assert_refused("f16", context(768, KVL_P1_FAKE_QUANT), &tight, KVL_E_DEVICE_MEM, "more than 16 buffers of 1048576 bytes");
    assert_refused("f16", context(64, KVL_P1_FAKE_QUANT), &tiny, KVL_E_DEVICE_MEM, "more than the device allocates at once (4096)");
    assert_refused("f16", context(0, KVL_P1_FAKE_QUANT), &roomy, KVL_E_USAGE, "at least 1");
    assert_refused("int4 @30-30 f16", context(64, KVL_P1_FAKE_QUANT), &roomy, KVL_E_USAGE, "layer");
    assert_refused("int4(group=48)", context(64, KVL_P1_FAKE_QUANT), &roomy, KVL_E_USAGE, "group");
    assert_refused("kivi sink=4", context(128, KVL_P1_FAKE_QUANT), &roomy, KVL_E_USAGE, "a window of one ubatch, or ubatch (64) and sink (4)");
    assert_refused("k=think", context(64, KVL_P1_FAKE_QUANT), &roomy, KVL_E_USAGE,
                   "think learns at the end of a prompt, and p1 has none: use --protocol compress-then-score, or p4");
    assert_refused("keep=knorm budget=uniform(kept=0.5)", context(64, KVL_P1_FAKE_QUANT), &roomy, KVL_E_USAGE, "keep= evicts at the end of a prompt");
    assert_refused("k=think window=32", context(64, KVL_P4_STREAMING), &roomy, KVL_E_UNSUPPORTED, "window= slides from the first token on");
    assert_refused("k=think tail=7", context(64, KVL_P4_STREAMING), &roomy, KVL_E_USAGE, "tail=7 is less than codec think needs: at least 32");
    assert_refused("kivi tail=7", context(128, KVL_P4_STREAMING), &roomy, KVL_E_USAGE, "at least 128");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_per_token),          cmocka_unit_test(public_models),
        cmocka_unit_test(classes_sum_to_resident),  cmocka_unit_test(windows_do_not_grow),
        cmocka_unit_test(kivi_holds_what_the_paper_says),
        cmocka_unit_test(pages_do_not_cross_slabs), cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
