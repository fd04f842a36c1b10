/* Every pair of codecs with every other key: the spec parses, its resolved text is a fixed point that means the same, it fits
 * common head dimensions, and a full page holds exactly the bytes that are charged to its tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "spec.h"
#include <stdio.h>
#include <string.h>

static const char *const codecs[] = {"f32",           "f16", "int8", "int8(sym)", "int8(group=16)", "int4", "int4(group=32,sym)",
                                     "int4(group=16)", "int3(group=8)", "int2", "q8_0", "q5_1", "q4_0", "fp8_e4m3"};
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
    "keep=expected budget=ada(tokens=300) when=every:32 @2-3 when=full keep=critical(of=observed)",
    "sink=4 tail=40 keep=chunk(of=snapkv,size=8) budget=layers(kept=0.5,share=1:2) when=full",
    "rope=pre pos=compact keep=keydiff budget=ada(kept=0.25) when=every:7",
    "read=pages(tokens=512,size=32,gqa=sum) @0-1 read=all",
    "sink=4 tail=40 keep=snapkv budget=ada(removed=0.5) read=pages(tokens=256,dense=3)",
};
/* Codecs of keys alone, which take neither a rotation nor keys before RoPE. */
static const char *const key_codecs[] = {"think", "think(ratio=0.7,recent=0)"};
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

static void every_composition(void **state)
{
    for (size_t k = 0; k < COUNT(codecs); k++)
        for (size_t v = 0; v < COUNT(codecs); v++)
            for (size_t r = 0; r < COUNT(rests); r++) check_composition(codecs[k], codecs[v], rests[r]);
}

static void key_codecs_and_their_refusals(void **state)
{
    for (size_t k = 0; k < COUNT(key_codecs); k++)
        for (size_t r = 0; r < COUNT(rests); r++) {
            char text[256];
            struct kvl_spec *spec = NULL;
            if (strstr(rests[r], "rope=pre") == NULL && strstr(rests[r], "rot=hadamard") == NULL) {
                check_composition(key_codecs[k], "int4", rests[r]);
                continue;
            }
            snprintf(text, sizeof text, "k=%s v=int4 %s", key_codecs[k], rests[r]);
            assert_int_equal(kvl_spec_parse(text, &spec), KVL_E_USAGE);
            if (strstr(kvl_error_text(), "use rope=post") == NULL && strstr(kvl_error_text(), "use rot=none") == NULL)
                fail_msg("\"%s\": %s", text, kvl_error_text());
        }
}

/* What a strategy does not go together with is said, and what to write instead. */
static void refusals_name_the_way_out(void **state)
{
    static const struct {
        const char *text, *way_out;
    } cases[] = {
        {"read=pages(tokens=64) window=64", "use one of them"},
        {"read=pages(tokens=64) rope=pre", "use rope=post"},
        {"read=pages(tokens=64) keep=h2o budget=uniform(tokens=9) when=full", "use when=prefill, or read=all"},
        {"read=pages(tokens=64) keep=snapkv budget=ada(tokens=9) when=every:8", "use when=prefill, or read=all"},
        {"latent(rank=32,of=int4) read=pages(tokens=64)", "a codec alone"},
        {"read=pages", "write read=pages(tokens=N)"},
        {"read=pages(tokens=0)", "tokens"},
        {"read=pages(tokens=64,size=0)", "size"},
        {"read=pages(tokens=64,gqa=mean)", "max sum"},
        {"read=some", "all pages"},
        {"keep=kvzip budget=ada(tokens=9) when=every:8", "use when=prefill"},
        {"keep=tova budget=ada(tokens=9) when=every:8", "budget=uniform"},
        {"gear keep=snapkv budget=ada(tokens=9) when=every:8", "movable"},
        {"keep=snapkv when=every:8", "budget="},
        {"window=64 keep=snapkv budget=ada(tokens=9) when=every:8", "use one of them"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct kvl_spec *spec = NULL;
        if (kvl_spec_parse(cases[i].text, &spec) == KVL_OK) fail_msg("\"%s\" is taken", cases[i].text);
        if (strstr(kvl_error_text(), cases[i].way_out) == NULL) fail_msg("\"%s\": %s", cases[i].text, kvl_error_text());
        kvl_error_clear();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_composition), cmocka_unit_test(key_codecs_and_their_refusals), cmocka_unit_test(refusals_name_the_way_out)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
