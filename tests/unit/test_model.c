/* Opening models: a small one written here, changed in one place at a time, and real files where there are some. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include "arch.h"
#include "file.h"
#include "small_model.h"
#include "mem.h"
#include "model.h"

static struct gw_path path;

static int make_path(void **state)
{
    path = gw_temporary();
    return 0;
}

static int remove_path(void **state)
{
    gw_remove(&path);
    return 0;
}

static kvl_status open_changed(const struct small_change *change, struct kvl_model **model)
{
    size_t head;
    struct kvl_text file = small_model(change, &head);
    gw_write(&path, file.data, file.size);
    kvl_text_free(&file);
    *model = NULL;
    kvl_error_clear();
    return kvl_model_open(path.text, model);
}

static struct kvl_model *open_good(const struct small_change *change)
{
    struct kvl_model *model;
    if (open_changed(change, &model) != KVL_OK) fail_msg("%s", kvl_error_text());
    return model;
}

/* ---- right models ---- */

static void dimensions_are_read(void **state)
{
    struct kvl_model *model = open_good(&(struct small_change){0});
    const struct kvl_dims *d = &model->dims;
    assert_string_equal(model->arch->name, "llama");
    assert_int_equal(d->n_layer, SMALL_LAYERS);
    assert_int_equal(d->n_embd, SMALL_EMBD);
    assert_int_equal(d->n_head, SMALL_HEADS);
    assert_int_equal(d->n_kv_head, SMALL_KV_HEADS);
    assert_int_equal(d->head_dim, 8);
    assert_int_equal(d->n_ff, SMALL_FF);
    assert_int_equal(d->n_vocab, SMALL_VOCAB);
    assert_int_equal(d->n_ctx_train, 128);
    assert_int_equal(d->rope_dim, 8);
    assert_true(d->rms_eps == 1e-5f && d->rope_base == 10000.0f);
    assert_false(d->tied_output);
    assert_int_equal(kvl_tokenizer_n_vocab(model->tokenizer), SMALL_VOCAB);
    kvl_model_close(&model);
    assert_null(model);
    kvl_model_close(&model);
}

static void heads_may_be_wider_than_their_share(void **state)
{
    struct kvl_model *model =
        open_good(&(struct small_change){.key_length = 16, .u32_key = "llama.rope.dimension_count", .u32 = 12});
    assert_int_equal(model->dims.head_dim, 16);
    assert_int_equal(model->dims.rope_dim, 12);
    kvl_model_close(&model);
}

static void output_may_be_tied(void **state)
{
    struct kvl_model *model = open_good(&(struct small_change){.omit = "output.weight"});
    assert_true(model->dims.tied_output);
    kvl_model_close(&model);
}

static void layers_may_share_keys_and_values(void **state)
{
    struct kvl_model *model = open_good(&(struct small_change){.kv_source = (const int32_t[]){0, 0}});
    assert_true(kvl_layer_makes_kv(&model->dims, 0) && !kvl_layer_makes_kv(&model->dims, 1));
    kvl_model_close(&model);
    model = open_good(&(struct small_change){0});
    assert_true(kvl_layer_makes_kv(&model->dims, 1));
    kvl_model_close(&model);
}

static void names_are_made_presentable(void **state)
{
    char long_name[200];
    memset(long_name, 'a', 126);
    strcpy(long_name + 126, "\xc3\xa4\xc3\xa4");
    struct kvl_model *model = open_good(&(struct small_change){0});
    assert_string_equal(model->name, "small");
    kvl_model_close(&model);
    model = open_good(&(struct small_change){.omit = "general.name"});
    assert_string_equal(model->name, strrchr(path.text, '/') + 1);
    kvl_model_close(&model);
    model = open_good(&(struct small_change){.omit = "general.name", .str_key = "general.name", .str = "a\033b"});
    assert_string_equal(model->name, "a?b");
    kvl_model_close(&model);
    model = open_good(&(struct small_change){.omit = "general.name", .str_key = "general.name", .str = long_name});
    long_name[126] = '\0';
    assert_string_equal(model->name, long_name);
    kvl_model_close(&model);
}

static void digest_is_the_file_s(void **state)
{
    struct kvl_model *model = open_good(&(struct small_change){0});
    char *data, hex[65];
    size_t size;
    assert_int_equal(kvl_file_read(path.text, &data, &size), KVL_OK);
    assert_int_equal(kvl_sha256(data, size, hex), KVL_OK);
    assert_string_equal(model->sha256, hex);
    kvl_free(&data);
    kvl_model_close(&model);
}

/* rope_freq[i] = base^(-2i / 8) / divisor, to float's rounding. */
static void assert_rope(const struct small_change *change, double base, double divisor)
{
    struct kvl_model *model = open_good(change);
    for (int i = 0; i < 4; i++) {
        const double wanted = pow(base, -0.25 * i) / divisor;
        if (fabs(model->rope_freq[i] - wanted) > 1e-7 * wanted)
            fail_msg("rope_freq[%d] is %.9g, wanted %.9g", i, model->rope_freq[i], wanted);
    }
    kvl_model_close(&model);
}

static void rotary_frequencies_are_scaled(void **state)
{
    assert_rope(&(struct small_change){0}, 10000, 1);
    assert_rope(&(struct small_change){.f32_key = "llama.rope.freq_base", .f32 = 5e5f}, 5e5, 1);
    assert_rope(&(struct small_change){.f32_key = "llama.rope.scaling.factor", .f32 = 4}, 10000, 4);
    assert_rope(&(struct small_change){.f32_key = "llama.rope.scale_linear", .f32 = 2}, 10000, 2);
    assert_rope(&(struct small_change){.f32_key = "llama.rope.scaling.factor", .f32 = 0}, 10000, 1);
    assert_rope(
        &(struct small_change){
            .f32_key = "llama.rope.scaling.factor", .f32 = 4, .str_key = "llama.rope.scaling.type", .str = "linear"},
        10000, 4);
    assert_rope(
        &(struct small_change){
            .f32_key = "llama.rope.scaling.factor", .f32 = 4, .str_key = "llama.rope.scaling.type", .str = "none"},
        10000, 1);
    const struct small_change factors = {
        .tensor = "rope_freqs.weight", .dim = {4, 1}, .fill = 8, .f32_key = "llama.rope.scaling.factor", .f32 = 2};
    assert_rope(&factors, 10000, 16);
}

/* ---- wrong models ---- */

static const struct {
    struct small_change change;
    kvl_status code;
    const char *needle;
} wrong[] = {
    {{.omit = "general.architecture"}, KVL_E_FORMAT, "key \"general.architecture\" is missing"},
    {{.omit = "general.architecture", .u32_key = "general.architecture"}, KVL_E_FORMAT, "wanted a string, found u32"},
    {{.omit = "general.architecture", .str_key = "general.architecture", .str = "mamba"},
     KVL_E_UNSUPPORTED,
     "architecture \"mamba\" is not supported; known: llama"},
    {{.omit = "llama.block_count"}, KVL_E_FORMAT, "key \"llama.block_count\" is missing"},
    {{.omit = "llama.block_count", .u32_key = "llama.block_count", .u32 = 0}, KVL_E_FORMAT, "wanted 1 to 4096"},
    {{.omit = "llama.block_count", .u32_key = "llama.block_count", .u32 = 3},
     KVL_E_FORMAT,
     "tensor \"blk.2.attn_norm.weight\" is missing"},
    {{.omit = "llama.block_count", .u32_key = "llama.block_count", .u32 = 1},
     KVL_E_UNSUPPORTED,
     "tensor \"blk.1.attn_norm.weight\" has no place in architecture llama with 1 layers"},
    {{.omit = "llama.embedding_length", .str_key = "llama.embedding_length", .str = "32"}, KVL_E_FORMAT, "found string"},
    {{.omit = "llama.embedding_length", .f32_key = "llama.embedding_length", .f32 = 32}, KVL_E_FORMAT, "found f32"},
    {{.omit = "llama.embedding_length", .u32_key = "llama.embedding_length", .u32 = 64},
     KVL_E_FORMAT,
     "tensor \"token_embd.weight\": wanted [64, 257], found [32, 257, 1, 1]"},
    {{.omit = "llama.embedding_length", .u32_key = "llama.embedding_length", .u32 = 33},
     KVL_E_FORMAT,
     "33 is not a multiple of 4 heads"},
    {{.omit = "llama.context_length"}, KVL_E_FORMAT, "key \"llama.context_length\" is missing"},
    {{.omit = "llama.feed_forward_length", .u32_key = "llama.feed_forward_length", .u32 = 65},
     KVL_E_FORMAT,
     "tensor \"blk.0.ffn_gate.weight\": wanted [32, 65], found [32, 64, 1, 1]"},
    {{.omit = "llama.attention.head_count", .u32_key = "llama.attention.head_count", .u32 = 0}, KVL_E_FORMAT, "wanted 1 to"},
    {{.omit = "llama.attention.head_count_kv", .u32_key = "llama.attention.head_count_kv", .u32 = 3},
     KVL_E_FORMAT,
     "4 query heads are not a multiple of 3 kv heads"},
    {{.omit = "llama.attention.head_count_kv"},
     KVL_E_FORMAT,
     "tensor \"blk.0.attn_k.weight\": wanted [32, 32], found [32, 16, 1, 1]"},
    {{.u32_key = "llama.attention.value_length", .u32 = 4}, KVL_E_UNSUPPORTED, "value_length is 4, wanted key_length 8"},
    {{.u32_key = "llama.rope.dimension_count", .u32 = 7},
     KVL_E_FORMAT,
     "rope.dimension_count is 7, wanted an even number up to the head's 8"},
    {{.u32_key = "llama.rope.dimension_count", .u32 = 10}, KVL_E_FORMAT, "rope.dimension_count is 10"},
    {{.omit = "llama.attention.layer_norm_rms_epsilon"}, KVL_E_FORMAT, "layer_norm_rms_epsilon\" is missing"},
    {{.omit = "llama.attention.layer_norm_rms_epsilon", .f32_key = "llama.attention.layer_norm_rms_epsilon", .f32 = 0},
     KVL_E_FORMAT,
     "wanted more than 0"},
    {{.omit = "llama.attention.layer_norm_rms_epsilon", .f32_key = "llama.attention.layer_norm_rms_epsilon", .f32 = NAN},
     KVL_E_FORMAT,
     "finite"},
    {{.f32_key = "llama.rope.freq_base", .f32 = -1}, KVL_E_FORMAT, "\"llama.rope.freq_base\" is -1, wanted more than 0"},
    {{.f32_key = "llama.rope.scaling.factor", .f32 = -2}, KVL_E_FORMAT, "llama.rope.scaling.factor is -2, wanted 0 or more"},
    {{.str_key = "llama.rope.scaling.type", .str = "yarn"},
     KVL_E_UNSUPPORTED,
     "llama.rope.scaling.type is \"yarn\", kvlab knows: none linear"},
    {{.u32_key = "llama.expert_count", .u32 = 8}, KVL_E_UNSUPPORTED, "\"llama.expert_count\" asks for what kvlab does not compute"},
    {{.f32_key = "llama.logit_scale", .f32 = 0.5f}, KVL_E_UNSUPPORTED, "llama.logit_scale"},
    {{.u32_key = "llama.vocab_size", .u32 = 255}, KVL_E_FORMAT, "\"llama.vocab_size\" is 255, wanted 257 to 257"},
    {{.omit = "token_embd.weight"}, KVL_E_FORMAT, "tensor \"token_embd.weight\" is missing"},
    {{.omit = "blk.1.ffn_up.weight"}, KVL_E_FORMAT, "tensor \"blk.1.ffn_up.weight\" is missing"},
    {{.omit = "blk.1.attn_q.weight", .tensor = "blk.1.attn_q.weight", .dim = {32, 16}},
     KVL_E_FORMAT,
     "tensor \"blk.1.attn_q.weight\": wanted [32, 32], found [32, 16, 1, 1]"},
    {{.omit = "output_norm.weight", .tensor = "output_norm.weight", .dim = {16, 2}},
     KVL_E_FORMAT,
     "wanted [32, 1], found [16, 2, 1, 1]"},
    {{.tensor = "blk.0.attn_q.bias", .dim = {32, 1}},
     KVL_E_UNSUPPORTED,
     "tensor \"blk.0.attn_q.bias\" has no place in architecture llama"},
    {{.tensor = "rope_freqs.weight", .dim = {8, 1}, .fill = 1}, KVL_E_FORMAT, "tensor \"rope_freqs.weight\": wanted [4, 1]"},
    {{.tensor = "rope_freqs.weight", .dim = {4, 1}, .fill = 0}, KVL_E_FORMAT, "rope_freqs.weight[0] is 0, wanted more than 0"},
    {{.omit = "output.weight", .tensor = "output.weight", .dim = {32, 255}},
     KVL_E_FORMAT,
     "tensor \"output.weight\": wanted [32, 257]"},
    {{.kv_source = (const int32_t[]){0, 0, 0}, .n_kv_source = 3}, KVL_E_FORMAT, "kv_source\": wanted an array of 2 integers, one a layer"},
    {{.u32_key = "kvlab.attention.kv_source"}, KVL_E_FORMAT, "wanted an array of 2 integers"},
    {{.kv_source = (const int32_t[]){1, 1}}, KVL_E_UNSUPPORTED, "layer 0 reads layer 1; wanted itself or what the layer below reads"},
    {{.kv_source = (const int32_t[]){0, -1}}, KVL_E_UNSUPPORTED, "layer 1 reads layer -1"},
    {{.kv_source = (const int32_t[]){0, 0}, .tensor = "blk.1.attn_k.weight", .dim = {32, 16}},
     KVL_E_UNSUPPORTED,
     "tensor \"blk.1.attn_k.weight\" has no place in architecture llama"},
    {{.kv_source = (const int32_t[]){0, 1}, .omit = "blk.1.attn_v.weight"}, KVL_E_FORMAT, "tensor \"blk.1.attn_v.weight\" is missing"},
};

static void unknown_architectures_get_the_list(void **state)
{
    struct kvl_model *model;
    assert_int_equal(open_changed(&(struct small_change){.omit = "general.architecture", .str_key = "general.architecture", .str = "mamba"}, &model),
                     KVL_E_UNSUPPORTED);
    for (size_t i = 0; i < kvl_n_archs; i++) assert_non_null(strstr(kvl_error_text(), kvl_archs[i].name));
    assert_null(strchr(kvl_error_text(), '\n'));
}

static void wrong_models_are_refused(void **state)
{
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct kvl_model *model;
        const kvl_status status = open_changed(&wrong[i].change, &model);
        if (status != wrong[i].code || strstr(kvl_error_text(), wrong[i].needle) == NULL)
            fail_msg("case %zu: wanted status %d and \"%s\", found %d and \"%s\"", i, wrong[i].code, wrong[i].needle, status,
                     kvl_error_text());
        assert_null(strchr(kvl_error_text(), '\n'));
        assert_null(model);
    }
}

static void tokenizer_must_fit_the_embedding(void **state)
{
    struct kvl_model *model;
    assert_int_equal(open_changed(&(struct small_change){.vocab = 300}, &model), KVL_E_FORMAT);
    assert_non_null(strstr(kvl_error_text(), "the tokenizer has 257 tokens, token_embd.weight 300 rows"));
}

static void every_failed_allocation_is_survived(void **state)
{
    struct kvl_model *model = open_good(&(struct small_change){0});
    kvl_model_close(&model);
    kvl_status status = KVL_E_MEMORY;
    long n = 0;
    while (status != KVL_OK) {
        kvl_error_clear();
        kvl_mem_fail_after(++n);
        status = kvl_model_open(path.text, &model);
        kvl_mem_fail_after(0);
        if (status != KVL_OK && strstr(kvl_error_text(), "out of host memory") == NULL)
            fail_msg("allocation %ld: %s", n, kvl_error_text());
    }
    assert_true(n > 10);
    kvl_model_close(&model);
}

/* ---- real models ---- */

static struct kvl_model *open_real(const char *file)
{
    struct kvl_model *model;
    if (access(file, R_OK) != 0) {
        print_message("%s is not there: skipped\n", file);
        skip();
    }
    kvl_error_clear();
    if (kvl_model_open(file, &model) != KVL_OK) fail_msg("%s", kvl_error_text());
    return model;
}

static void tiny_model_opens(void **state)
{
    struct kvl_model *model = open_real(KVL_ROOT "/data/models/tiny.gguf");
    const struct kvl_dims *d = &model->dims;
    assert_true(d->n_layer == 3 && d->n_embd == 96 && d->n_head == 6 && d->n_kv_head == 2 && d->head_dim == 32 && d->n_ff == 160);
    assert_true(d->n_vocab == 257 && d->n_ctx_train == 2048 && d->rope_dim == 32 && d->tied_output);
    assert_string_equal(model->name, "tiny");
    kvl_model_close(&model);
}

static void smollm2_opens(void **state)
{
    const char *file = getenv("KVLAB_MODEL");
    struct kvl_model *model = open_real(file != NULL ? file : KVL_ROOT "/data/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    const struct kvl_dims *d = &model->dims;
    assert_true(d->n_layer == 30 && d->n_embd == 576 && d->n_head == 9 && d->n_kv_head == 3 && d->head_dim == 64 &&
                d->n_ff == 1536);
    assert_true(d->n_vocab == 49152 && d->n_ctx_train == 8192 && d->rope_dim == 64 && d->rope_base == 100000 && d->tied_output);
    assert_string_equal(model->sha256, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53");
    kvl_model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dimensions_are_read),
        cmocka_unit_test(heads_may_be_wider_than_their_share),
        cmocka_unit_test(output_may_be_tied),
        cmocka_unit_test(layers_may_share_keys_and_values),
        cmocka_unit_test(names_are_made_presentable),
        cmocka_unit_test(digest_is_the_file_s),
        cmocka_unit_test(rotary_frequencies_are_scaled),
        cmocka_unit_test(unknown_architectures_get_the_list),
        cmocka_unit_test(wrong_models_are_refused),
        cmocka_unit_test(tokenizer_must_fit_the_embedding),
        cmocka_unit_test(every_failed_allocation_is_survived),
        cmocka_unit_test(tiny_model_opens),
        cmocka_unit_test(smollm2_opens),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
