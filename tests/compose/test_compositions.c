/* Legal and illegal mixes. Every pair of codecs with every other key: the spec parses, its resolved text is a fixed point that means the same, it fits
 * common head dimensions, and a full page holds exactly the bytes that are charged to its tokens. What does not go together is refused before anything
 * runs, with what to do instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "registry.h"
#include "spec.h"
#include <stdio.h>
#include <string.h>

static const char *const codecs[] = {"f32",           "f16", "int8", "int8(sym)", "int8(group=16)", "int4", "int4(group=32,sym)",
                                     "int4(group=16)", "int3(group=8)", "int2", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "fp8_e4m3", "fp8_e5m2",
                                     "kivi(residual=0)", "kivi(bits=4,group=16,residual=0,e4m3)", "gear", "kvquant", "turboquant(bits=2)"};
static const char *const rests[] = {
    "",
    "sink=4",
    "tail=128",
    "ktail=64 vtail=0",
    "window=256 sink=4",
    "rope=post rot=none korder=gguf pos=keep",
    "@0-1 kv=f16",
    "keep=snapkv(window=32) budget=ada(removed=0.5) pos=compact",
    "sink=4 keep=chunk(of=knorm) budget=pyramid(kept=0.25) @2-3 keep=none budget=none",
    "rope=pre korder=hf sink=1",
    "table=runs/t-1.h5 @2-3 table=none @4-5 table=u.h5",
    "rot=hadamard @2-3 rot=random(seed=5) rope=pre",
    "tail=32 @3-7 v=f32 window=64 @8-8 k=int4 ktail=codec",
    "read=pages(tokens=512,size=32,gqa=sum) @0-1 read=all",
    "sink=4 tail=128 keep=snapkv budget=ada(removed=0.5) read=pages(tokens=256,dense=3)",
};
/* Tokens go alone, which codecs of groups do not let them. */
static const char *const decode_rests[] = {
    "keep=expected budget=ada(tokens=300) when=every:32 @2-3 when=full keep=critical(of=observed)",
    "sink=4 tail=40 keep=chunk(of=snapkv,size=8) budget=layers(kept=0.5,share=1:2) when=full",
    "rope=pre pos=compact keep=keydiff budget=ada(kept=0.25) when=every:7",
};
/* Codecs of keys alone, which take neither a rotation nor keys before RoPE. */
static const char *const key_codecs[] = {"think", "think(ratio=0.7,recent=0)"};
/* Refused by the parser, or, where head_dim is given, once the model is known. */
static const struct {
    const char *kv;
    uint32_t head_dim;
    const char *fix;
} illegal[] = {
    {"think", 0, "choose another codec for this side"},
    {"k=int4 v=think", 0, "choose another codec for this side"},
    {"k=think rot=hadamard", 0, "use rot=none"},
    {"k=think v=int4 rope=pre", 0, "use rope=post"},
    {"int4 @3-5 k=think rot=random", 0, "use rot=none"},
    {"latent(of=kvquant)", 0, "use a codec without a table"},
    {"k=latent(rank=16) v=kvquant", 0, "use a codec without a table"},
    {"k=latent(rank=16,of=think) v=f16", 0, "use a codec without a table"},
    {"int4 window=64 keep=knorm budget=uniform(kept=0.5)", 0, "use one of them"},
    {"int4 window=64 read=pages(tokens=64)", 0, "use one of them"},
    {"int4 rope=pre keep=knorm budget=uniform(kept=0.5)", 0, "add pos=compact, or use rope=post"},
    {"int4 rope=pre read=pages(tokens=64)", 0, "use rope=post"},
    {"latent(of=int4) read=pages(tokens=64)", 0, "use a codec alone, or read=all"},
    {"kivi keep=h2o budget=uniform(tokens=64) when=full", 0, "use one that encodes single tokens"},
    {"k=int4 v=gear keep=tova budget=uniform(tokens=64) when=every:16", 0, "use one that encodes single tokens"},
    {"int4 ktail=8 keep=h2o budget=uniform(tokens=64) when=full", 0, "use tail="},
    {"int4 keep=h2o budget=uniform(tokens=64) when=full pos=compact", 0, "add rope=pre"},
    {"int4 keep=kvzip budget=ada(tokens=64) when=every:8", 0, "use when=prefill, or another score"},
    {"int4 keep=noncausal budget=uniform(tokens=64) when=full", 0, "use when=prefill, or another score"},
    {"int4 keep=oracle budget=uniform(tokens=64) when=every:8", 0, "use when=prefill, or another score"},
    {"int4 keep=observed(gqa=max) budget=uniform(tokens=64) when=full", 0, "change them, or use when=prefill"},
    {"int4 keep=tova budget=ada(tokens=64) when=every:8", 0, "use keep=tova with budget=uniform, or when=prefill"},
    {"int4 keep=critical(of=tova) budget=uniform(tokens=64) when=every:8", 0, "use keep=tova with budget=uniform, or when=prefill"},
    {"gear keep=snapkv budget=ada(tokens=64) when=every:8", 0, "use one that encodes single tokens"},
    {"int4 keep=snapkv budget=ada(tokens=64) when=every:8 read=pages(tokens=64)", 0, "use when=prefill, or read=all"},
    {"int4 read=pages", 0, "write read=pages(tokens=N)"},
    {"int4 read=pages(tokens=64,size=8)", 0, "from 16 to 4096"},
    {"int4 read=pages(tokens=64,gqa=mean)", 0, "max sum"},
    {"int4 read=some", 0, "all pages"},
    {"int4 keep=h2o budget=uniform(tokens=64) when=full read=pages(tokens=64)", 0, "use when=prefill, or read=all"},
    {"int4 pos=compact", 0, "add keep= and budget=, or window="},
    {"int4 when=full", 0, "add keep= and budget="},
    {"kivi tail=64", 64, "use at least 128, or leave it out"},
    {"k=think(recent=16) v=int4 tail=8", 64, "use at least 16, or leave it out"},
    {"int4(group=48)", 64, "use 16, 32 or 64"},
    {"k=kivi(token,group=48)", 64, "use 16, 32 or 64"},
    {"kivi(residual=100)", 64, "use 32 or 128"},
    {"v=q4_0", 80, "use int8, int4, fp8_e4m3 or f16"},
    {"k=int8 v=turboquant(sketch=sign)", 64, "give values a turboquant without it"},
    {"kvquant", 320, "must be a multiple of 8, at most 256"},
    {"int4 rot=hadamard", 184, "use rot=random"},
};
#define COUNT(list) (sizeof(list) / sizeof *(list))

static struct kvl_spec *parsed(const char *text)
{
    struct kvl_spec *spec = NULL;
    kvl_error_clear();
    if (kvl_spec_parse(text, &spec) != KVL_OK) fail_msg("\"%s\": %s", text, kvl_error_text());
    return spec;
}

static void assert_same_entry(const struct kvl_layer_spec *a, const struct kvl_layer_spec *b)
{
    for (int side = 0; side < KVL_SIDES; side++) {
        struct kvl_text one = {0}, other = {0};
        assert_int_equal(kvl_instance_print(&a->codec[side], true, &one), KVL_OK);
        assert_int_equal(kvl_instance_print(&b->codec[side], true, &other), KVL_OK);
        assert_string_equal(one.data, other.data);
        assert_int_equal(a->tail[side], b->tail[side]);
        kvl_text_free(&one);
        kvl_text_free(&other);
    }
    assert_true(a->rope == b->rope && a->rot == b->rot && a->rot_seed == b->rot_seed && a->korder == b->korder &&
                a->sink == b->sink && a->window == b->window && a->pos == b->pos && a->n_keep == b->n_keep &&
                a->budget.plugin == b->budget.plugin && a->when == b->when && a->every == b->every && a->read == b->read && a->pages.tokens == b->pages.tokens &&
                a->pages.size == b->pages.size && a->pages.gqa == b->pages.gqa && a->pages.dense == b->pages.dense);
}

static void assert_exact_pages(const struct kvl_layer_spec *entry, uint32_t head_dim)
{
    for (int side = 0; side < KVL_SIDES; side++) {
        const uint32_t role = side == KVL_SIDE_K ? KVL_ROLE_K : KVL_ROLE_V;
        for (uint32_t page = 64; page <= 256; page *= 2) {
            struct kvl_codec_shape shape;
            struct kvl_codec_bytes bytes;
            assert_int_equal(kvl_codec_shape(&entry->codec[side], role, head_dim, page, &shape), KVL_OK);
            assert_int_equal(kvl_codec_bytes(&entry->codec[side], role, head_dim, page, &bytes), KVL_OK);
            assert_int_equal(page % shape.page_multiple, 0);
            assert_int_equal(shape.block_bytes % shape.alignment, 0);
            assert_int_equal(bytes.payload + bytes.scale + bytes.index, shape.block_bytes);
        }
    }
}

static void check_composition(const char *k, const char *v, const char *rest)
{
    char text[256];
    struct kvl_text resolved = {0}, again = {0};
    snprintf(text, sizeof text, "k=%s v=%s %s", k, v, rest);
    struct kvl_spec *spec = parsed(text);
    assert_int_equal(kvl_spec_resolved(spec, &resolved), KVL_OK);
    struct kvl_spec *second = parsed(resolved.data);
    assert_int_equal(kvl_spec_resolved(second, &again), KVL_OK);
    assert_string_equal(resolved.data, again.data);
    for (uint32_t layer = 0; layer < 12; layer++) {
        assert_same_entry(kvl_spec_layer(spec, layer), kvl_spec_layer(second, layer));
        for (uint32_t d = 32; d <= 256; d *= 2) assert_exact_pages(kvl_spec_layer(spec, layer), d);
    }
    for (uint32_t d = 32; d <= 256; d *= 2) assert_int_equal(kvl_spec_check_dims(spec, 12, d), KVL_OK);
    kvl_text_free(&resolved);
    kvl_text_free(&again);
    kvl_spec_free(&spec);
    kvl_spec_free(&second);
}

static bool lists(const char *const *list, size_t count, const char *name)
{
    const size_t n = strlen(name);
    for (size_t i = 0; i < count; i++)
        if (strncmp(list[i], name, n) == 0 && (list[i][n] == '\0' || list[i][n] == '(')) return true;
    return false;
}

static void every_codec_is_here(void **state)
{
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        const struct kvl_plugin_head *head = kvl_registry_at(i);
        if (head->kind == KVL_KIND_CODEC && !lists(codecs, COUNT(codecs), head->name) && !lists(key_codecs, COUNT(key_codecs), head->name))
            fail_msg("no composition with %s", head->name);
    }
}

static void every_composition(void **state)
{
    for (size_t k = 0; k < COUNT(codecs); k++)
        for (size_t v = 0; v < COUNT(codecs); v++)
            for (size_t r = 0; r < COUNT(rests); r++) check_composition(codecs[k], codecs[v], rests[r]);
}

static bool tokens_go_alone(const char *codec)
{
    struct kvl_spec *spec = parsed(codec);
    const bool movable = ((const struct kvl_codec *)kvl_spec_layer(spec, 0)->codec[KVL_SIDE_K].plugin)->flags & KVL_CODEC_MOVABLE;
    kvl_spec_free(&spec);
    return movable;
}

static void compositions_that_evict_while_decoding(void **state)
{
    for (size_t k = 0; k < COUNT(codecs); k++)
        for (size_t v = 0; v < COUNT(codecs); v++)
            for (size_t r = 0; r < COUNT(decode_rests) && tokens_go_alone(codecs[k]) && tokens_go_alone(codecs[v]); r++)
                check_composition(codecs[k], codecs[v], decode_rests[r]);
}

static void compositions_of_key_codecs(void **state)
{
    for (size_t k = 0; k < COUNT(key_codecs); k++)
        for (size_t r = 0; r < COUNT(rests); r++)
            if (strstr(rests[r], "rope=pre") == NULL && strstr(rests[r], "rot=hadamard") == NULL) check_composition(key_codecs[k], "int4", rests[r]);
}

static void illegal_mixes_name_the_fix(void **state)
{
    for (size_t i = 0; i < COUNT(illegal); i++) {
        struct kvl_spec *spec = NULL;
        kvl_error_clear();
        kvl_status status = kvl_spec_parse(illegal[i].kv, &spec);
        if (illegal[i].head_dim != 0) {
            if (status != KVL_OK) fail_msg("\"%s\": %s", illegal[i].kv, kvl_error_text());
            status = kvl_spec_check_dims(spec, 12, illegal[i].head_dim);
        }
        if ((status != KVL_E_USAGE && status != KVL_E_UNSUPPORTED) || strstr(kvl_error_text(), illegal[i].fix) == NULL)
            fail_msg("\"%s\": wanted \"%s\", got \"%s\"", illegal[i].kv, illegal[i].fix, kvl_error_text());
        kvl_error_clear();
        kvl_spec_free(&spec);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_codec_is_here), cmocka_unit_test(every_composition), cmocka_unit_test(compositions_that_evict_while_decoding),
                                       cmocka_unit_test(compositions_of_key_codecs), cmocka_unit_test(illegal_mixes_name_the_fix)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
