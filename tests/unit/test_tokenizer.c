/* Tokenizer and chat prompts: a small vocabulary written here for the rules; those of arch_*.gguf and SmolLM2's for llama.cpp's answers, the
 * last skipped without. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "../../data/golden/tokenizer_answers.h"
#include "../../data/golden/spm_answers.h"
#include "file.h"
#include "mem.h"
#include "rng.h"
#include "text.h"
#include "tokenizer.h"

/* ---- GGUF files with nothing but a tokenizer ---- */

enum { U32 = 4, I32 = 5, BOOL = 7, STRING = 8, ARRAY = 9 };

struct writer {
    struct kvl_text kv;
    uint64_t n;
};

static void put(struct writer *w, const void *data, size_t size) { assert_int_equal(kvl_text_append(&w->kv, data, size), KVL_OK); }
static void put_u32(struct writer *w, uint32_t x) { put(w, &x, sizeof x); }
static void put_u64(struct writer *w, uint64_t x) { put(w, &x, sizeof x); }

static void put_str(struct writer *w, struct kvl_gguf_str s)
{
    put_u64(w, s.size);
    put(w, s.data, s.size);
}

static struct kvl_gguf_str str(const char *text) { return (struct kvl_gguf_str){text, strlen(text)}; }

static void key(struct writer *w, const char *name, uint32_t type)
{
    put_str(w, str(name));
    put_u32(w, type);
    w->n++;
}

static void key_array(struct writer *w, const char *name, uint32_t type, uint64_t n)
{
    key(w, name, ARRAY);
    put_u32(w, type);
    put_u64(w, n);
}

/* What a tokenizer's metadata say; NULL, 0 and -1 leave a key out. */
struct vocabulary {
    const char *model, *pre, *chat_template;
    const struct kvl_gguf_str *tokens, *merges;
    const int32_t *types;
    uint64_t n_tokens, n_types, n_merges;
    int64_t bos, eos;
    bool adds_bos;
};

static void put_vocabulary(struct writer *w, const struct vocabulary *v)
{
    key(w, "tokenizer.ggml.model", STRING), put_str(w, str(v->model));
    if (v->pre != NULL) key(w, "tokenizer.ggml.pre", STRING), put_str(w, str(v->pre));
    if (v->chat_template != NULL) key(w, "tokenizer.chat_template", STRING), put_str(w, str(v->chat_template));
    if (v->tokens != NULL) key_array(w, "tokenizer.ggml.tokens", STRING, v->n_tokens);
    for (uint64_t i = 0; v->tokens != NULL && i < v->n_tokens; i++) put_str(w, v->tokens[i]);
    if (v->types != NULL)
        key_array(w, "tokenizer.ggml.token_type", I32, v->n_types), put(w, v->types, v->n_types * sizeof *v->types);
    if (v->merges != NULL) key_array(w, "tokenizer.ggml.merges", STRING, v->n_merges);
    for (uint64_t i = 0; v->merges != NULL && i < v->n_merges; i++) put_str(w, v->merges[i]);
    if (v->bos >= 0) key(w, "tokenizer.ggml.bos_token_id", U32), put_u32(w, (uint32_t)v->bos);
    if (v->eos >= 0) key(w, "tokenizer.ggml.eos_token_id", U32), put_u32(w, (uint32_t)v->eos);
    if (v->adds_bos) key(w, "tokenizer.ggml.add_bos_token", BOOL), put(w, "\1", 1);
}

static void write_file(const struct vocabulary *v, char *path)
{
    struct writer body = {0}, file = {0};
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    put_vocabulary(&body, v);
    put(&file, "GGUF\3\0\0\0", 8);
    put_u64(&file, 0);
    put_u64(&file, body.n);
    put(&file, body.kv.data, body.kv.size);
    put(&file, (const char[32]){0}, (32 - file.kv.size % 32) % 32);
    assert_int_equal(write(descriptor, file.kv.data, file.kv.size), (ssize_t)file.kv.size);
    close(descriptor);
    kvl_text_free(&body.kv);
    kvl_text_free(&file.kv);
}

#define PATH_PATTERN "/tmp/kvlab_tokenizer_XXXXXX"

static kvl_status read_file(const char *path, struct kvl_tokenizer **out)
{
    struct kvl_gguf *gguf = NULL;
    kvl_error_clear();
    kvl_status status = kvl_gguf_open(path, &gguf);
    if (status == KVL_OK) status = kvl_tokenizer_new(gguf, out);
    kvl_gguf_close(&gguf);
    return status;
}

static kvl_status load(const struct vocabulary *v, struct kvl_tokenizer **out)
{
    char path[] = PATH_PATTERN;
    write_file(v, path);
    const kvl_status status = read_file(path, out);
    unlink(path);
    return status;
}

/* ---- a small vocabulary: id b = byte b; merged and special tokens from 256 on ---- */

static const char *const extra_tokens[] = {"bc",    "ab",           "aa",         "aaaa",   "12",      "\303\203b", "\304\242b",
                                           "whole", "<|im_start|>", "<|im_end|>", "<tool>", "<tool>s", ""};
static const int32_t extra_types[] = {1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 4, 4, 1};
static const char *const small_merges[] = {"b c", "a b", "a a", "aa aa", "1 2", "\303\203 b", "\304\242 b"};
enum {
    BC = 256,
    AB,
    AA,
    AAAA,
    ONE_TWO,
    BYTE_C3_B,
    BYTE_80_B,
    WHOLE,
    IM_START,
    IM_END,
    TOOL,
    TOOLS,
    HOLE,
    N_TOKENS,
    N_MERGES = sizeof small_merges / sizeof *small_merges
};

static struct {
    char text[256][3];
    struct kvl_gguf_str tokens[N_TOKENS], merges[N_MERGES];
    int32_t types[N_TOKENS];
} small;

static struct vocabulary small_vocabulary(const char *pre)
{
    unsigned next = 256;
    for (unsigned b = 0; b < 256; b++) {
        const bool itself = (b > 32 && b < 127) || (b > 160 && b != 173);
        const unsigned c = itself ? b : next++;
        snprintf(small.text[b], sizeof small.text[b], c < 128 ? "%c" : "%c%c", c < 128 ? (int)c : (int)(0xc0 | c >> 6),
                 (int)(0x80 | (c & 63)));
        small.tokens[b] = str(small.text[b]);
        small.types[b] = 1;
    }
    for (unsigned i = 256; i < N_TOKENS; i++) {
        small.tokens[i] = str(extra_tokens[i - 256]);
        small.types[i] = extra_types[i - 256];
    }
    for (unsigned i = 0; i < N_MERGES; i++) small.merges[i] = str(small_merges[i]);
    return (struct vocabulary){.model = "gpt2",
                               .pre = pre,
                               .tokens = small.tokens,
                               .merges = small.merges,
                               .types = small.types,
                               .n_tokens = N_TOKENS,
                               .n_types = N_TOKENS,
                               .n_merges = N_MERGES,
                               .bos = IM_START,
                               .eos = IM_END};
}

static struct kvl_tokenizer *small_tokenizer(const char *pre)
{
    struct kvl_tokenizer *t = NULL;
    const struct vocabulary v = small_vocabulary(pre);
    assert_int_equal(load(&v, &t), KVL_OK);
    return t;
}

/* ---- checks ---- */

static void expect_ids(const struct kvl_tokenizer *t, const char *text, size_t size, bool special, const int32_t *wanted,
                       size_t n_wanted)
{
    int32_t *ids = NULL;
    size_t n = 0;
    assert_int_equal(kvl_tokenizer_encode(t, text, size, special, &ids, &n), KVL_OK);
    assert_int_equal(n, n_wanted);
    assert_memory_equal(ids, wanted, n * sizeof *ids);
    kvl_free(&ids);
}
#define EXPECT(t, text, special, ...)                                                                                              \
    expect_ids(t, text, sizeof(text) - 1, special, (const int32_t[]){__VA_ARGS__},                                                 \
               sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void expect_round_trip(const struct kvl_tokenizer *t, const char *text, size_t size)
{
    int32_t *ids = NULL;
    size_t n = 0;
    struct kvl_text back = {0};
    assert_int_equal(kvl_tokenizer_encode(t, text, size, true, &ids, &n), KVL_OK);
    for (size_t i = 0; i < n; i++) assert_int_equal(kvl_tokenizer_decode(t, ids[i], true, &back), KVL_OK);
    assert_int_equal(back.size, size);
    if (size > 0) assert_memory_equal(back.data, text, size);
    kvl_text_free(&back);
    kvl_free(&ids);
}

static const char *const all_pre[] = {"smollm", "gpt-2", "llama-bpe", "qwen2", "default"};
enum { N_PRE = sizeof all_pre / sizeof *all_pre };

/* ---- tests with the small vocabulary ---- */

static void test_merges_follow_rank(void **state)
{
    struct kvl_tokenizer *t = small_tokenizer("smollm");
    EXPECT(t, "abc", false, 'a', BC); /* "b c" ranks before "a b", though "a b" stands first */
    EXPECT(t, "ab", false, AB);
    EXPECT(t, "aaa", false, AA, 'a');
    EXPECT(t, "aaaaaa", false, AAAA, AA);
    EXPECT(t, "aaabc", false, AA, 'a', BC);
    expect_ids(t, "", 0, false, NULL, 0);
    kvl_tokenizer_free(&t);
}

static void test_words_bound_merges(void **state)
{
    struct kvl_tokenizer *t = small_tokenizer("smollm");
    EXPECT(t, "12", false, '1', '2');     /* each digit is a word */
    EXPECT(t, "\303b", false, 0xc3, 'b'); /* an invalid byte is no letter */
    EXPECT(t, "whole", false, 'w', 'h', 'o', 'l', 'e');
    kvl_tokenizer_free(&t);
    t = small_tokenizer("gpt-2");
    EXPECT(t, "12", false, ONE_TWO);
    kvl_tokenizer_free(&t);
    t = small_tokenizer("qwen2");
    EXPECT(t, "12", false, '1', '2');
    EXPECT(t, "\303b", false, BYTE_C3_B); /* one character that is no letter joins the letters behind it */
    EXPECT(t,
           "\xe2\x80\x80"
           "b",
           false, 0xe2, 0x80, BYTE_80_B); /* so does a space of three bytes, */
    EXPECT(t,
           "\xed\xa0\x80"
           "b",
           false, 0xed, 0xa0, 0x80, 'b'); /* but not the last of three bytes of a surrogate, */
    EXPECT(t,
           "\xc1\x80"
           "b",
           false, 0xc1, 0x80, 'b'); /* of a longer form than needed */
    EXPECT(t,
           "\xe2\x80"
           "b",
           false, 0xe2, 0x80, 'b'); /* or of a cut sequence */
    EXPECT(t,
           "\xf4\x90\x80\x80"
           "b",
           false, 0xf4, 0x90, 0x80, 0x80, 'b'); /* or beyond Unicode */
    EXPECT(t, "whole", false, 'w', 'h', 'o', 'l', 'e');
    kvl_tokenizer_free(&t);
    t = small_tokenizer("llama-bpe");
    EXPECT(t, "1212", false, ONE_TWO, '1', '2'); /* digits in threes */
    EXPECT(t, "whole", false, WHOLE);
    kvl_tokenizer_free(&t);
}

static void test_special_tokens(void **state)
{
    struct kvl_tokenizer *t = small_tokenizer("smollm");
    struct kvl_text text = {0};
    EXPECT(t, "a<|im_end|>b<|im_end|>", true, 'a', IM_END, 'b', IM_END);
    EXPECT(t, "<|im_end", true, '<', '|', 'i', 'm', '_', 'e', 'n', 'd');
    EXPECT(t, "<|im_end|>", false, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
    EXPECT(t, "<tool>a<tool>s<tool>", false, TOOL, 'a', TOOLS, TOOL); /* user-defined: always, the longer first */
    assert_int_equal(kvl_tokenizer_decode(t, IM_END, false, &text), KVL_OK);
    assert_int_equal(kvl_tokenizer_decode(t, HOLE, true, &text), KVL_OK);
    assert_int_equal(text.size, 0);
    assert_int_equal(kvl_tokenizer_decode(t, IM_END, true, &text), KVL_OK);
    assert_int_equal(kvl_tokenizer_decode(t, TOOL, false, &text), KVL_OK);
    assert_string_equal(text.data, "<|im_end|><tool>");
    assert_int_equal(kvl_tokenizer_decode(t, N_TOKENS, true, &text), KVL_E_USAGE);
    assert_int_equal(kvl_tokenizer_decode(t, -1, true, &text), KVL_E_USAGE);
    assert_true(kvl_tokenizer_is_end(t, IM_END));
    assert_false(kvl_tokenizer_is_end(t, IM_START));
    assert_int_equal(kvl_tokenizer_bos(t), IM_START);
    assert_int_equal(kvl_tokenizer_n_vocab(t), N_TOKENS);
    assert_false(kvl_tokenizer_adds_bos(t));
    kvl_text_free(&text);
    kvl_tokenizer_free(&t);
    t = small_tokenizer("llama-bpe");
    assert_true(kvl_tokenizer_adds_bos(t));
    kvl_tokenizer_free(&t);
}

/* Bytes from alphabets that make valid, cut and wrong sequences, spaces, digits and specials likely. */
static void test_any_bytes_come_back(void **state)
{
    static const char *const alphabet[] = {NULL, " \n\t\r'stab12", "\xe2\x80\xa8\xc3\xa9\xf0\x9f\x98\x80\xed\xa0\xc0 a",
                                           "<|im_end>tool"};
    enum { N_TEXTS = 600, LONGEST = 40 };
    for (size_t p = 0; p < N_PRE; p++) {
        struct kvl_tokenizer *t = small_tokenizer(all_pre[p]);
        for (uint64_t i = 0; i < N_TEXTS; i++) {
            char text[LONGEST];
            const char *from = alphabet[i % 4];
            const size_t size = kvl_rng_u64(1, i) % LONGEST;
            for (size_t k = 0; k < size; k++) {
                const uint64_t r = kvl_rng_u64(2 + i, k);
                text[k] = from == NULL ? (char)r : from[r % strlen(from)];
            }
            expect_round_trip(t, text, size);
        }
        kvl_tokenizer_free(&t);
    }
}

/* ---- SentencePiece ---- */

static struct kvl_tokenizer *spm_tokenizer(const char *arch)
{
    struct kvl_tokenizer *t = NULL;
    char path[512];
    snprintf(path, sizeof path, KVL_ROOT "/data/models/arch_%s.gguf", arch);
    assert_int_equal(read_file(path, &t), KVL_OK);
    return t;
}

static void test_spm_answers_of_llama_cpp(void **state)
{
    for (size_t i = 0; i < sizeof spm_answers / sizeof *spm_answers; i++) {
        const struct spm_answer *a = &spm_answers[i];
        struct kvl_tokenizer *t = spm_tokenizer(a->arch);
        assert_true(kvl_tokenizer_adds_bos(t));
        expect_ids(t, a->text, a->size, a->special, a->ids, a->n);
        kvl_tokenizer_free(&t);
    }
}

/* Any bytes: those that are no character, and spaces written out, too. */
static void test_spm_bytes_come_back(void **state)
{
    enum { N_TEXTS = 400, LONGEST = 40 };
    static const char alphabet[] = " the and\n\xe6\x97\xa5\xe6\x9c\xac\xc3\xa9\xff<b>  ";
    struct kvl_tokenizer *t = spm_tokenizer("gemma3");
    for (uint64_t i = 0; i < N_TEXTS; i++) {
        char text[LONGEST];
        const size_t size = kvl_rng_u64(1, i) % LONGEST;
        for (size_t k = 0; k < size; k++) {
            const uint64_t r = kvl_rng_u64(2 + i, k);
            text[k] = i % 2 == 0 ? (char)r : alphabet[r % (sizeof alphabet - 1)];
        }
        expect_round_trip(t, text, size);
    }
    kvl_tokenizer_free(&t);
}

static void test_spm_refusals(void **state)
{
    static const struct kvl_gguf_str tokens[] = {{"a", 1}, {"b", 1}};
    struct kvl_tokenizer *t = NULL;
    const struct vocabulary no_scores = {.model = "llama", .tokens = tokens, .n_tokens = 2, .bos = 0, .eos = -1};
    assert_int_equal(load(&no_scores, &t), KVL_E_FORMAT);
    assert_non_null(strstr(kvl_error_text(), "tokenizer.ggml.scores has 0 floats for 2 tokens"));
    const struct vocabulary unknown = {.model = "bert", .tokens = tokens, .n_tokens = 2, .bos = 0, .eos = -1};
    assert_int_equal(load(&unknown, &t), KVL_E_UNSUPPORTED);
    assert_non_null(strstr(kvl_error_text(), "tokenizer model 'bert' is not known; known: gpt2 (byte-level BPE), llama (SentencePiece)"));
}

static void test_long_words(void **state)
{
    enum { N = 400000 };
    struct kvl_tokenizer *t = small_tokenizer("llama-bpe");
    char *text = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    assert_int_equal(kvl_alloc(&text, N, 1), KVL_OK);
    memset(text, 'a', N);
    assert_int_equal(kvl_tokenizer_encode(t, text, N, true, &ids, &n), KVL_OK);
    assert_int_equal(n, N / 4);
    memset(text, ' ', N);
    assert_int_equal(kvl_tokenizer_encode(t, text, N, true, &ids, &n), KVL_OK); /* the same array again */
    assert_int_equal(n, N);
    kvl_free(&ids);
    kvl_free(&text);
    kvl_tokenizer_free(&t);
}

static void test_byte_without_token(void **state)
{
    struct vocabulary v = small_vocabulary("smollm");
    struct kvl_tokenizer *t = NULL;
    int32_t *ids = NULL;
    size_t n;
    small.tokens[4] = str("four");
    assert_int_equal(load(&v, &t), KVL_OK);
    assert_int_equal(kvl_tokenizer_encode(t, "ab\4", 3, false, &ids, &n), KVL_E_UNSUPPORTED);
    assert_non_null(strstr(kvl_error_text(), "0x04 at offset 2"));
    kvl_free(&ids);
    kvl_tokenizer_free(&t);
}

static void test_merge_without_token(void **state)
{
    struct vocabulary v = small_vocabulary("smollm");
    struct kvl_tokenizer *t = NULL;
    small.merges[0] = str("a c");
    assert_int_equal(load(&v, &t), KVL_OK);
    EXPECT(t, "ac", false, 'a', 'c');
    EXPECT(t, "ab", false, AB);
    kvl_tokenizer_free(&t);
}

static void expect_error(const struct vocabulary *v, kvl_status wanted, const char *in_text)
{
    struct kvl_tokenizer *t = NULL;
    assert_int_equal(load(v, &t), wanted);
    assert_null(t);
    if (strstr(kvl_error_text(), in_text) == NULL) fail_msg("'%s' does not say '%s'", kvl_error_text(), in_text);
}

static void test_hostile_metadata(void **state)
{
    const struct vocabulary good = small_vocabulary("smollm");
    struct vocabulary v = good;
    v.model = "wordpiece", expect_error(&v, KVL_E_UNSUPPORTED, "gpt2");
    v = good, v.pre = "smollm2", expect_error(&v, KVL_E_UNSUPPORTED, "smollm, gpt-2, llama-bpe, qwen2");
    v = good, v.tokens = NULL, expect_error(&v, KVL_E_FORMAT, "tokenizer.ggml.tokens");
    v = good, v.merges = NULL, expect_error(&v, KVL_E_FORMAT, "tokenizer.ggml.merges");
    v = good, v.n_tokens = 0, expect_error(&v, KVL_E_FORMAT, "empty");
    v = good, v.n_types--, expect_error(&v, KVL_E_FORMAT, "token_type");
    v = good, v.bos = N_TOKENS, expect_error(&v, KVL_E_FORMAT, "bos_token_id");
    v = good, v.eos = UINT32_MAX, expect_error(&v, KVL_E_FORMAT, "eos_token_id");
    v = good, v.bos = -1, v.adds_bos = true, expect_error(&v, KVL_E_FORMAT, "bos_token_id is missing");
    static const char *const bad_merges[] = {"", " ", "a", "a ", " a", "a b c", "a zz", "zz a"};
    for (size_t i = 0; i < sizeof bad_merges / sizeof *bad_merges; i++) {
        small.merges[2] = str(bad_merges[i]);
        expect_error(&good, KVL_E_FORMAT, "merge 2");
    }
    small_vocabulary("smollm");
    small.tokens[BC] = str("ab");
    expect_error(&good, KVL_E_FORMAT, "tokens 256 and 257 have the same text");
}

static void test_identity(void **state)
{
    struct vocabulary v = small_vocabulary("smollm");
    struct kvl_tokenizer *t[5] = {0};
    assert_int_equal(load(&v, &t[0]), KVL_OK);
    assert_int_equal(load(&v, &t[1]), KVL_OK);
    v.n_merges--;
    assert_int_equal(load(&v, &t[2]), KVL_OK);
    v.n_merges++, v.pre = NULL;
    assert_int_equal(load(&v, &t[3]), KVL_OK);
    v.pre = "default";
    assert_int_equal(load(&v, &t[4]), KVL_OK);
    assert_int_equal(strlen(kvl_tokenizer_sha256(t[0])), 64);
    assert_string_equal(kvl_tokenizer_sha256(t[0]), kvl_tokenizer_sha256(t[1]));
    assert_string_not_equal(kvl_tokenizer_sha256(t[0]), kvl_tokenizer_sha256(t[2]));
    assert_string_not_equal(kvl_tokenizer_sha256(t[0]), kvl_tokenizer_sha256(t[3]));
    assert_string_equal(kvl_tokenizer_sha256(t[3]), kvl_tokenizer_sha256(t[4])); /* no name means "default" */
    for (size_t i = 0; i < 5; i++) kvl_tokenizer_free(&t[i]);
}

static kvl_status read_and_encode(const char *path)
{
    struct kvl_tokenizer *t = NULL;
    int32_t *ids = NULL;
    size_t n;
    kvl_status status = read_file(path, &t);
    if (status == KVL_OK) status = kvl_tokenizer_encode(t, "whole aaaa <tool>", 17, true, &ids, &n);
    kvl_free(&ids);
    kvl_tokenizer_free(&t);
    return status;
}

/* Every allocation of loading and encoding fails once; nothing may leak (sanitizer builds) or pass for success. */
static void test_allocation_failures(void **state)
{
    const struct vocabulary v = small_vocabulary("llama-bpe");
    char path[] = PATH_PATTERN;
    kvl_status status;
    long n = 0;
    write_file(&v, path);
    do {
        kvl_mem_fail_after(++n);
        status = read_and_encode(path);
    } while (status != KVL_OK && n < 10000);
    kvl_mem_fail_after(0);
    unlink(path);
    assert_int_equal(status, KVL_OK);
    assert_true(n > 20);
}

static struct kvl_tokenizer *with_template(const char *text)
{
    struct vocabulary v = small_vocabulary("smollm");
    struct kvl_tokenizer *t = NULL;
    v.chat_template = text;
    assert_int_equal(load(&v, &t), KVL_OK);
    return t;
}

static void expect_chat(const char *template, const struct kvl_chat_message *messages, size_t n, const char *wanted)
{
    struct kvl_tokenizer *t = with_template(template);
    struct kvl_text text = {0};
    assert_int_equal(kvl_chat_format(t, messages, n, &text), KVL_OK);
    assert_string_equal(text.data, wanted);
    kvl_text_free(&text);
    kvl_tokenizer_free(&t);
}

static void test_chat(void **state)
{
    static const struct kvl_chat_message talk[] = {{"system", "S"}, {"user", "U"}};
    static const char plain[] = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n";
    expect_chat("{{ '<|im_start|>' + role }}", &talk[1], 1, plain);
    expect_chat("{{ '<|im_start|>system\\n' + content + '<|im_end|>' }}", &talk[1], 1, plain);
    expect_chat("{{ '<|im_start|>system\\n' + x }}{{ \"<|im_start|>system\\nIt's \\\"D\\\"<|im_end|>\\n\" }}", &talk[1], 1,
                "<|im_start|>system\nIt's \"D\"<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n");
    expect_chat("{{ '<|im_start|>system\nD<|im_end|>\n' }}", talk, 2,
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n");
    expect_chat("{{ '<|im_start|>system\nD<|im_end|>\n' }}", NULL, 0, "<|im_start|>assistant\n");
}

static void test_unknown_chat(void **state)
{
    static const char *const templates[] = {NULL, "[INST] {{ content }} [/INST]"};
    static const struct kvl_chat_message message = {"user", "U"};
    for (size_t i = 0; i < 2; i++) {
        struct kvl_tokenizer *t = with_template(templates[i]);
        struct kvl_text text = {0};
        assert_int_equal(kvl_chat_format(t, &message, 1, &text), KVL_E_UNSUPPORTED);
        kvl_tokenizer_free(&t);
    }
}

/* ---- tests with SmolLM2 ---- */

static const char *model_path(void)
{
    const char *path = getenv("KVLAB_MODEL");
    return path != NULL ? path : KVL_ROOT "/data/models/SmolLM2-135M-Instruct.Q4_1.gguf";
}

static struct kvl_gguf *open_model(void)
{
    struct kvl_gguf *gguf = NULL;
    if (access(model_path(), R_OK) != 0) {
        print_message("no model at %s (or name one in KVLAB_MODEL)\n", model_path());
        skip();
    }
    assert_int_equal(kvl_gguf_open(model_path(), &gguf), KVL_OK);
    return gguf;
}

/* The model's vocabulary under another pre-tokenizer. */
static struct kvl_tokenizer *model_tokenizer(const struct kvl_gguf *gguf, const char *pre)
{
    struct kvl_gguf_str *tokens = NULL, *merges = NULL;
    struct vocabulary v = {.model = "gpt2", .pre = pre, .bos = 1, .eos = 2};
    struct kvl_tokenizer *t = NULL;
    const void *types;
    int32_t *aligned = NULL;
    assert_int_equal(kvl_gguf_need_str_array(gguf, "tokenizer.ggml.tokens", &tokens, &v.n_tokens), KVL_OK);
    assert_int_equal(kvl_gguf_need_str_array(gguf, "tokenizer.ggml.merges", &merges, &v.n_merges), KVL_OK);
    assert_true(kvl_gguf_get_i32_array(gguf, "tokenizer.ggml.token_type", &types, &v.n_types));
    assert_int_equal(kvl_alloc(&aligned, v.n_types, sizeof *aligned), KVL_OK);
    memcpy(aligned, types, v.n_types * sizeof *aligned);
    v.tokens = tokens, v.merges = merges, v.types = aligned;
    assert_int_equal(load(&v, &t), KVL_OK);
    kvl_free(&tokens);
    kvl_free(&merges);
    kvl_free(&aligned);
    return t;
}

static void test_llamacpp_answers(void **state)
{
    struct kvl_gguf *gguf = open_model();
    size_t seen = 0;
    for (size_t p = 0; p < N_PRE; p++) {
        struct kvl_tokenizer *t = model_tokenizer(gguf, all_pre[p]);
        for (size_t i = 0; i < sizeof token_answers / sizeof *token_answers; i++) {
            const struct token_answer *a = &token_answers[i];
            if (strcmp(a->pre, all_pre[p]) != 0) continue;
            expect_ids(t, a->text, a->size, a->special, a->ids, a->n);
            expect_round_trip(t, a->text, a->size);
            seen++;
        }
        kvl_tokenizer_free(&t);
    }
    assert_int_equal(seen, sizeof token_answers / sizeof *token_answers);
    kvl_gguf_close(&gguf);
}

static void test_chat_answers(void **state)
{
    struct kvl_gguf *gguf = open_model();
    struct kvl_tokenizer *t = NULL;
    assert_int_equal(kvl_tokenizer_new(gguf, &t), KVL_OK);
    kvl_gguf_close(&gguf);
    for (size_t i = 0; i < sizeof chat_answers / sizeof *chat_answers; i++) {
        struct kvl_text text = {0};
        assert_int_equal(kvl_chat_format(t, chat_answers[i].messages, chat_answers[i].n, &text), KVL_OK);
        assert_string_equal(text.data, chat_answers[i].text);
        kvl_text_free(&text);
    }
    kvl_tokenizer_free(&t);
}

static void test_wikitext(void **state)
{
    static const char path[] = KVL_ROOT "/data/text/wiki.test.raw";
    struct kvl_gguf *gguf = open_model();
    struct kvl_tokenizer *t = NULL;
    struct kvl_text lines = {0};
    char *text = NULL, digest[65];
    int32_t *ids = NULL;
    size_t size, n;
    if (access(path, R_OK) != 0) {
        print_message("no text at %s\n", path);
        kvl_gguf_close(&gguf);
        skip();
    }
    assert_int_equal(kvl_file_read(path, &text, &size), KVL_OK);
    assert_int_equal(kvl_tokenizer_new(gguf, &t), KVL_OK);
    kvl_gguf_close(&gguf);
    assert_int_equal(kvl_tokenizer_encode(t, text, size, false, &ids, &n), KVL_OK);
    assert_int_equal(n, 304830);
    for (size_t i = 0; i < n; i++) assert_int_equal(kvl_text_printf(&lines, "%d\n", ids[i]), KVL_OK);
    assert_int_equal(kvl_sha256(lines.data, lines.size, digest), KVL_OK);
    assert_string_equal(digest, "49427bb2df20fd546a48b560325d33975db12c9e9c3fd3f904e1ca264cb21709");
    kvl_text_free(&lines);
    kvl_free(&ids);
    kvl_free(&text);
    kvl_tokenizer_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges_follow_rank),
        cmocka_unit_test(test_words_bound_merges),
        cmocka_unit_test(test_special_tokens),
        cmocka_unit_test(test_any_bytes_come_back),
        cmocka_unit_test(test_long_words),
        cmocka_unit_test(test_spm_answers_of_llama_cpp),
        cmocka_unit_test(test_spm_bytes_come_back),
        cmocka_unit_test(test_spm_refusals),
        cmocka_unit_test(test_byte_without_token),
        cmocka_unit_test(test_merge_without_token),
        cmocka_unit_test(test_hostile_metadata),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_unknown_chat),
        cmocka_unit_test(test_llamacpp_answers),
        cmocka_unit_test(test_chat_answers),
        cmocka_unit_test(test_wikitext),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
