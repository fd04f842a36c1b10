/* The words of --kv: what they mean, what is refused and how, and that the resolved text means the same. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "mem.h"
#include "presets.h"
#include "rng.h"
#include "spec.h"
#include <string.h>

static struct kvl_spec *parsed(const char *text)
{
    struct kvl_spec *spec = NULL;
    kvl_error_clear();
    if (kvl_spec_parse(text, &spec) != KVL_OK) fail_msg("\"%s\": %s", text ? text : "(null)", kvl_error_text());
    return spec;
}

static void assert_resolved(const char *text, const char *wanted)
{
    struct kvl_spec *spec = parsed(text);
    struct kvl_text resolved = {0};
    assert_int_equal(kvl_spec_resolved(spec, &resolved), KVL_OK);
    assert_string_equal(resolved.data, wanted);
    kvl_spec_free(&spec);
    spec = parsed(wanted);
    resolved.size = 0;
    assert_int_equal(kvl_spec_resolved(spec, &resolved), KVL_OK);
    assert_string_equal(resolved.data, wanted);
    kvl_text_free(&resolved);
    kvl_spec_free(&spec);
}

/* message: "..." in it stands for a list that grows with the plug-ins and presets. */
static void assert_refused(const char *text, const char *message)
{
    struct kvl_spec *spec = NULL;
    const char *gap = strstr(message, "...");
    kvl_error_clear();
    assert_int_equal(kvl_spec_parse(text, &spec), KVL_E_USAGE);
    assert_null(spec);
    const char *found = kvl_error_text();
    if (gap == NULL) {
        assert_string_equal(found, message);
    } else {
        const size_t head = (size_t)(gap - message), tail = strlen(gap + 3);
        assert_true(strlen(found) > head + tail);
        assert_memory_equal(found, message, head);
        assert_string_equal(found + strlen(found) - tail, gap + 3);
    }
    kvl_error_clear();
}

#define REST " rope=post rot=none korder=gguf"
#define INT8 "int8(group=0,asym,clip=1,search=0,f16)"
#define INT4 "int4(group=0,asym,clip=1,search=0,f16)"
#define INT4_8 "int4(group=8,asym,clip=1,search=0,f16)"
#define PLAIN "k=f16 v=f16" REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep"

static void resolves(void **state)
{
    assert_resolved(NULL, PLAIN);
    assert_resolved("", PLAIN);
    assert_resolved("  f16 ", PLAIN);
    assert_resolved("int8", "k=" INT8 " v=" INT8 REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("kv=int4(group=32)",
                    "k=int4(group=32,asym,clip=1,search=0,f16) v=int4(group=32,asym,clip=1,search=0,f16)" REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("int4( group = 32 , sym )",
                    "k=int4(group=32,sym,clip=1,search=0,f16) v=int4(group=32,sym,clip=1,search=0,f16)" REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("k=int4(scheme=sym) v=f32()",
                    "k=int4(group=0,sym,clip=1,search=0,f16) v=f32" REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("v=int4 kv=int8", "k=" INT8 " v=" INT4 REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("vtail=7 tail=128 sink=4 window=1020", "k=f16 v=f16" REST " sink=4 ktail=128 vtail=7 window=1020 keep=none budget=none when=prefill pos=keep");
    assert_resolved("streaming-llm", "k=f16 v=f16" REST " sink=4 ktail=codec vtail=codec window=1020 keep=none budget=none when=prefill pos=compact");
    assert_resolved("streaming-llm int8", "k=" INT8 " v=" INT8 REST " sink=4 ktail=codec vtail=codec window=1020 keep=none budget=none when=prefill pos=compact");
    assert_resolved("quarot4 sink=4", "k=int4(group=0,asym,clip=0.95,search=0,f16) v=int4(group=0,asym,clip=0.95,search=0,f16) rope=post rot=hadamard korder=gguf sink=4 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("rope=pre korder=hf rot=hadamard", "k=f16 v=f16 rope=pre rot=hadamard korder=hf sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("rot=random @1-1 rot=random(seed=9) @2-2 rot=none", "k=f16 v=f16 rope=post rot=random(seed=0) korder=gguf sink=0 ktail=codec"
                                                                        " vtail=codec window=0 keep=none budget=none when=prefill pos=keep @1-1 rot=random(seed=9) @2-2 rot=none");
}

static void resolves_overrides(void **state)
{
    assert_resolved("int8 @2-5 k=f16 sink=3 @0-0 tail=2",
                    "k=" INT8 " v=" INT8 REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep"
                    " @0-0 ktail=2 vtail=2 @2-5 k=f16 sink=3");
    assert_resolved("k=f16 v=int8 @1-1 kv=int4", "k=f16 v=" INT8 REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep"
                                                 " @1-1 k=" INT4 " v=" INT4);
    assert_resolved("int8 @2-5 int8", "k=" INT8 " v=" INT8 REST " sink=0 ktail=codec vtail=codec window=0 keep=none budget=none when=prefill pos=keep");
    assert_resolved("@2-5 streaming-llm", PLAIN " @2-5 sink=4 window=1020 pos=compact");
    assert_resolved("window=8 all_layers", "k=f16 v=f16" REST " sink=0 ktail=codec vtail=codec window=8 keep=none budget=none when=prefill pos=keep all_layers=yes");
    assert_resolved("all_layers @2-2 all_layers=no", PLAIN " all_layers=yes @2-2 all_layers=no");
    assert_resolved("tail=9 @2-5 ktail=codec", "k=f16 v=f16" REST " sink=0 ktail=9 vtail=9 window=0 keep=none budget=none when=prefill pos=keep @2-5 ktail=codec");
}

static void answers_by_layer(void **state)
{
    struct kvl_spec *spec = parsed("int8 tail=64 @2-5 v=int4 @7-7 f32 tail=0");
    const struct kvl_layer_spec *l = kvl_spec_layer(spec, 1);
    assert_string_equal(l->codec[KVL_SIDE_V].plugin->name, "int8");
    assert_int_equal(l->tail[KVL_SIDE_K], 64);
    for (uint32_t layer = 2; layer <= 5; layer++) {
        l = kvl_spec_layer(spec, layer);
        assert_string_equal(l->codec[KVL_SIDE_K].plugin->name, "int8");
        assert_string_equal(l->codec[KVL_SIDE_V].plugin->name, "int4");
        assert_int_equal(l->tail[KVL_SIDE_V], 64);
    }
    assert_string_equal(kvl_spec_layer(spec, 6)->codec[KVL_SIDE_V].plugin->name, "int8");
    assert_string_equal(kvl_spec_layer(spec, 7)->codec[KVL_SIDE_K].plugin->name, "f32");
    assert_int_equal(kvl_spec_layer(spec, 7)->tail[KVL_SIDE_K], 0);
    assert_string_equal(kvl_spec_given(spec), "int8 tail=64 @2-5 v=int4 @7-7 f32 tail=0");
    assert_int_equal(kvl_spec_check_layers(spec, 8), KVL_OK);
    assert_int_equal(kvl_spec_check_layers(spec, 7), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "--kv: @7-7 names layer 7, the model has layers 0 to 6");
    kvl_spec_free(&spec);
    kvl_spec_free(&spec);
}

#define FORM ": items are WORD, key=value, value=name(option=value,...) or @a-b, with spaces between"
#define CODECS "f32 f16 ..."

static void refuses_bad_words(void **state)
{
    assert_refused("kv=int5",
                   "--kv: unknown codec 'int5' at character 4 of \"kv=int5\": legal are " CODECS " (did you mean int8?)");
    assert_refused("sink=4 zzzzzz", "--kv: unknown codec or preset 'zzzzzz' at character 8 of \"sink=4 zzzzzz\": legal are " CODECS);
    assert_refused("streming-llm",
                   "--kv: unknown codec or preset 'streming-llm' at character 1 of \"streming-llm\": legal are " CODECS " (did you mean streaming-llm?)");
    assert_refused("f16 snik=4",
                   "--kv: unknown key 'snik' at character 5 of \"f16 snik=4\": legal are kv k v rope rot korder sink tail ktail"
                   " vtail window keep budget when pos read table all_layers (did you mean sink?)");
    assert_refused("korder=ggfu",
                   "--kv: unknown value of korder= 'ggfu' at character 8 of \"korder=ggfu\": legal are gguf hf (did you mean gguf?)");
    assert_refused("sink=4 sink=5", "--kv: sink= is given twice at character 8 of \"sink=4 sink=5\": keep one");
    assert_refused("int8 f16", "--kv: kv= is given twice at character 6 of \"int8 f16\": keep one");
    assert_refused("streaming-llm sink=8",
                   "--kv: sink= is given twice at character 15 of \"streaming-llm sink=8\": write the preset out and"
                   " change it: sink=4 window=1020 pos=compact");
    assert_refused("streaming-llm(3)",
                   "--kv: preset streaming-llm takes no options at character 15 of \"streaming-llm(3)\": remove the parentheses");
}

static void refuses_bad_form(void **state)
{
    assert_refused("kv=", "--kv: no value after 'kv=' at character 4 of \"kv=\": write key=value without spaces");
    assert_refused("kv=int8)", "--kv: unexpected ')' at character 8 of \"kv=int8)\"" FORM);
    assert_refused("int8,sink=4", "--kv: unexpected ',' at character 5 of \"int8,sink=4\"" FORM);
    assert_refused("int8(group=32", "--kv: '(' is never closed at character 5 of \"int8(group=32\": add ')'");
    assert_refused("=3", "--kv: unexpected '=' at character 1 of \"=3\"" FORM);
    assert_refused("sink=4(2)", "--kv: sink= takes no options at character 8 of \"sink=4(2)\": remove the parentheses");
    assert_refused("f16 sink=-1",
                   "--kv: sink=-1 is not a number of tokens at character 10 of \"f16 sink=-1\": legal is a whole number from 0 to"
                   " 2147483647");
    assert_refused("window=3000000000",
                   "--kv: window=3000000000 is not a number of tokens at character 8 of \"window=3000000000\": legal is a"
                   " whole number from 0 to 2147483647");
#define RANGE ": write @a-b, layers from 0, a <= b, both included: @2-5, or @3-3 for one"
    assert_refused("@5-2 f16", "--kv: bad range of layers at character 1 of \"@5-2 f16\"" RANGE);
    assert_refused("f16 @3", "--kv: bad range of layers at character 5 of \"f16 @3\"" RANGE);
    assert_refused("@-1-2", "--kv: bad range of layers at character 1 of \"@-1-2\"" RANGE);
    assert_refused("@0-4294967296", "--kv: bad range of layers at character 1 of \"@0-4294967296\"" RANGE);
    assert_refused("@2-5 f32 @5-9 int8",
                   "--kv: layer 5 is in two ranges at character 10 of \"@2-5 f32 @5-9 int8\": make the ranges disjoint");
}

static void refuses_bad_options(void **state)
{
    assert_refused("k=int4(grop=2)",
                   "--kv: unknown int4 option 'grop' at character 8 of \"k=int4(grop=2)\": legal are group scheme clip search scale asym sym f16 e4m3 e5m2"
                   " (did you mean group?)");
    assert_refused("int4(symm)",
                   "--kv: unknown int4 option 'symm' at character 6 of \"int4(symm)\": legal are group scheme clip search scale asym sym f16 e4m3 e5m2"
                   " (did you mean sym?)");
    assert_refused("int4(group=2,group=2)",
                   "--kv: int4 option group is given twice at character 14 of \"int4(group=2,group=2)\": give it once");
    assert_refused("int4(sym,asym)", "--kv: int4 option scheme is given twice at character 10 of \"int4(sym,asym)\": give it once");
    assert_refused("int4(group=x)",
                   "--kv: group=x is out of range at character 12 of \"int4(group=x)\": legal is a whole number from 0 to 65536");
    assert_refused("int4(group=-1)",
                   "--kv: group=-1 is out of range at character 12 of \"int4(group=-1)\": legal is a whole number from 0 to 65536");
    assert_refused("all_layers all_layers=no", "--kv: all_layers= is given twice at character 12 of \"all_layers all_layers=no\": keep one");
    assert_refused("all_layers(1)", "--kv: all_layers= takes no options at character 12 of \"all_layers(1)\": remove the parentheses");
    assert_refused("int4(search=4)", "search= tries clips from 1 down to clip=: give one below 1, as clip=0.5");
    assert_refused("int4(clip=0)", "--kv: clip=0 is out of range at character 11 of \"int4(clip=0)\": legal is a number from 0.1 to 1");
    assert_refused("keep=knorm budget=uniform(removed=2)",
                   "--kv: removed=2 is out of range at character 35 of \"keep=knorm budget=uniform(removed=2)\": legal is a number from 0 to 1");
    assert_refused("keep=knorm budget=uniform(kept=0.5,removed=-1)", /* that it is not given is for nobody to say */
                   "--kv: removed=-1 is out of range at character 44 of \"keep=knorm budget=uniform(kept=0.5,removed=-1)\": legal is a number from 0 to 1");
    assert_refused("int4(scheme=up)", "--kv: unknown scheme 'up' at character 13 of \"int4(scheme=up)\": legal are asym sym");
    assert_refused("f16(group=2)", "--kv: unknown f16 option 'group' at character 5 of \"f16(group=2)\": there are none");
}

/* Codecs that do not go with everything. */
static void refuses_mixes(void **state)
{
    assert_refused("think", "--kv: codec think does not store values at character 1 of \"think\": choose another codec for this side");
    assert_refused("v=think", "--kv: codec think does not store values at character 3 of \"v=think\": choose another codec for this side");
    assert_refused("k=think rot=hadamard", "--kv: codec think tells channels apart, which a rotation mixes: use rot=none");
    assert_refused("k=think rope=pre", "--kv: codec think does not store keys before RoPE: use rope=post");
    assert_refused("k=think(ratio=1)", "--kv: ratio=1 is out of range at character 15 of \"k=think(ratio=1)\": legal is a number from 0 to 0.99");
    assert_refused("k=think(window=0)", "--kv: window=0 is out of range at character 16 of \"k=think(window=0)\": legal is a whole number from 1 to 4096");
}

/* A projection and the codec behind it. */
static void projections_name_their_codec(void **state)
{
    assert_resolved("latent(rank=16,of=int4(group=8)) v=f16",
                    "k=latent(rank=16,equal,energy=0,heads=1,layers=1,auto,of=" INT4_8 ") v=f16 rope=post rot=none korder=gguf sink=0 ktail=codec vtail=codec window=0 "
                    "keep=none budget=none when=prefill pos=keep");
    assert_refused("latent(rank=4)", "--kv: rank=4 is out of range at character 13 of \"latent(rank=4)\": legal is a whole number from 8 to 65536");
    assert_refused("latent(energy=0.9,spread)", "latent: energy= says each layer's rank, ranks=spread shares out the rank that is given: use one of them");
    assert_refused("latent(of=latent)", "--kv: unknown codec 'latent' at character 11 of \"latent(of=latent)\": legal are " CODECS " think");
    assert_refused("latent(of=int4", "--kv: '(' is never closed at character 7 of \"latent(of=int4\": add ')'");
    assert_refused("latent(of=)", "--kv: unexpected ')' at character 11 of \"latent(of=)\": items are WORD, key=value, value=name(option=value,...) or @a-b,"
                                  " with spaces between");
    assert_refused("latent(of=kvquant)", "--kv: codec kvquant learns from rows as they are stored, which cannot be done behind or beside a projection yet: use a codec without a table");
    assert_refused("k=latent v=kvquant", "--kv: codec kvquant learns from rows as they are stored, which cannot be done behind or beside a projection yet: use a codec without a table");
}

#define SNAPKV "snapkv(window=32,kernel=5,avg,mean,gqa=mean)"

static void reads_evictions(void **state)
{
    assert_resolved("keep=snapkv(window=32) budget=ada(removed=0.5)", "k=f16 v=f16" REST " sink=0 ktail=codec vtail=codec window=0 keep=" SNAPKV
                                                                    " budget=ada(removed=0.5) when=prefill pos=keep");
    assert_resolved("keep=critical(of=chunk( size=20, of=snapkv(window=32) ),first=0.25) budget=uniform(tokens=64) pos=compact",
                    "k=f16 v=f16" REST " sink=0 ktail=codec vtail=codec window=0 keep=critical(of=chunk(of=" SNAPKV
                    ",size=20),epsilon=0.0001,first=0.25) budget=uniform(tokens=64) when=prefill pos=compact");
    assert_resolved("keep=knorm budget=uniform(kept=0.5) @1-2 keep=none budget=none @4-4 budget=uniform(kept=0.25)",
                    "k=f16 v=f16" REST " sink=0 ktail=codec vtail=codec window=0 keep=knorm budget=uniform(kept=0.5) when=prefill pos=keep"
                    " @1-2 keep=none budget=none @4-4 budget=uniform(kept=0.25)");
    assert_resolved("keep=h2o budget=uniform(tokens=9) when=every:16 @0-0 when=full",
                    "k=f16 v=f16" REST " sink=0 ktail=codec vtail=codec window=0 keep=h2o(recent=0.5,mean) budget=uniform(tokens=9) when=every:16 pos=keep"
                    " @0-0 when=full");
    assert_refused("keep=knorm", "--kv: keep=knorm without a budget: add budget=uniform(kept=0.5) or another");
    assert_refused("budget=ada(kept=0.5)", "--kv: budget=ada without a score: add keep=, or leave it out");
    assert_refused("keep=knorm budget=uniform", "a budget wants exactly one of kept=, removed=, tokens=, bytes=; 0 are given");
    assert_refused("keep=knorm budget=uniform(kept=0.5,tokens=3)",
                   "a budget wants exactly one of kept=, removed=, tokens=, bytes=; 2 are given");
    assert_refused("keep=knorm budget=uniform(kept=0.5) window=64", "--kv: window= and keep= both say which tokens stay: use one of them");
    assert_refused("keep=chunk(size=20) budget=uniform(kept=1)",
                   "--kv: chunk changes another score, and none is named at character 6 of \"keep=chunk(size=20) budget=uniform(kept=1)\": "
                   "write of=SCORE among its options");
    assert_refused("keep=snapkw budget=uniform(kept=1)",
                   "--kv: unknown score 'snapkw' at character 6 of \"keep=snapkw budget=uniform(kept=1)\": legal are random random_raw knorm "
                   "streaming snapkv tova h2o observed expected keydiff lagkv cur leverage noncausal kvzip oracle critical chunk none (did you mean snapkv?)");
    assert_refused("pos=compact", "--kv: pos=compact renumbers what eviction or a window leaves: add keep= and budget=, or window=");
}

static void checks_dims(void **state)
{
    struct kvl_spec *spec = parsed("int8 @1-1 v=int4(group=48)");
    assert_int_equal(kvl_spec_check_dims(spec, 30, 96), KVL_OK);
    assert_int_equal(kvl_spec_check_dims(spec, 30, 64), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "int4(group=48): group must divide head_dim 64: use 16, 32 or 64");
    kvl_error_clear();
    assert_int_equal(kvl_spec_check_dims(spec, 1, 64), KVL_E_USAGE); /* layer 1 of one */
    kvl_error_clear();
    kvl_spec_free(&spec);
    spec = parsed("int8 rot=hadamard");
    assert_int_equal(kvl_spec_check_dims(spec, 1, 576), KVL_OK);
    assert_int_equal(kvl_spec_check_dims(spec, 1, 88), KVL_OK);
    assert_int_equal(kvl_spec_check_dims(spec, 1, 184), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "--kv: rot=hadamard: no Hadamard matrix for head_dim 184 (sizes are powers of two times 1, 12, 20, 28, 36"
                                          " ...): use rot=random");
    kvl_error_clear();
    kvl_spec_free(&spec);
    spec = parsed("k=int4(group=1)");
    assert_int_equal(kvl_spec_check_dims(spec, 1, 64), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "int4(group=1): group must be a multiple of 2, for whole bytes: use 16, 32 or 64");
    kvl_error_clear();
    kvl_spec_free(&spec);
    spec = parsed("int8(group=128)");
    assert_int_equal(kvl_spec_check_dims(spec, 1, 64), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "int8(group=128): group must divide head_dim 64: use 16, 32 or 64");
    kvl_error_clear();
    kvl_spec_free(&spec);
}

static void presets_are_usable(void **state)
{
    struct kvl_presets presets;
    assert_int_equal(kvl_presets_load(&presets), KVL_OK);
    assert_true(presets.n > 0);
    for (unsigned i = 0; i < presets.n; i++) {
        struct kvl_spec *spec = parsed(presets.preset[i].name);
        assert_int_equal(kvl_spec_check_dims(spec, 4, 64), KVL_OK);
        kvl_spec_free(&spec);
    }
    kvl_presets_free(&presets);
}

/* Every allocation may fail: the parser says so and leaks nothing (the sanitizer build would see it). */
static void survives_failing_allocations(void **state)
{
    for (long n = 1;; n++) {
        struct kvl_spec *spec = NULL;
        kvl_error_clear();
        kvl_mem_fail_after(n);
        const kvl_status status = kvl_spec_parse("streaming-llm k=int4(group=32) @1-2 v=int8 tail=3", &spec);
        kvl_mem_fail_after(0);
        kvl_error_clear();
        kvl_spec_free(&spec);
        if (status == KVL_E_MEMORY) continue;
        assert_int_equal(status, KVL_OK);
        assert_true(n > 10);
        break;
    }
}

/* Words of the grammar in random order: never anything but a spec or a usage error with a text. */
static void random_words_never_crash(void **state)
{
    static const char *const piece[] = {
        "k=", "v=",  "kv=",   "int8",  "int4",    "f16",           "(",     ")", ",", "group=", "32",        "sym", " ", " ", " ",
        "@",  "0-3", "sink=", "tail=", "window=", "streaming-llm", "codec", "=", "-", "keep=", "chunk", "of=", "budget=", "uniform",  "rope=post", "\t", "rope=pre", "rot=random", "korder=hf"};
    for (uint64_t round = 0; round < 20000; round++) {
        char text[256] = "";
        for (uint64_t i = 0; i < 1 + kvl_rng_u64(round, 0) % 10; i++)
            strcat(text, piece[kvl_rng_u64(round, 1 + i) % (sizeof piece / sizeof *piece)]);
        struct kvl_spec *spec = NULL;
        kvl_error_clear();
        const kvl_status status = kvl_spec_parse(text, &spec);
        assert_true(status == KVL_OK ? spec != NULL : status == KVL_E_USAGE && *kvl_error_text() != '\0' && spec == NULL);
        kvl_spec_free(&spec);
    }
    kvl_error_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(resolves),
        cmocka_unit_test(resolves_overrides),
        cmocka_unit_test(answers_by_layer),
        cmocka_unit_test(refuses_bad_words),
        cmocka_unit_test(refuses_bad_form),
        cmocka_unit_test(refuses_bad_options),
        cmocka_unit_test(refuses_mixes),
        cmocka_unit_test(projections_name_their_codec),
        cmocka_unit_test(reads_evictions), cmocka_unit_test(checks_dims),
        cmocka_unit_test(presets_are_usable),
        cmocka_unit_test(survives_failing_allocations),
        cmocka_unit_test(random_words_never_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
