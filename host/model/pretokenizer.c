/* Pre-tokenizers as sequences of PCRE2 patterns.
 *
 * Each pattern is applied in turn to every piece the one before left; a match is a piece, and so is what lies between two matches.
 * A piece is matched as a text of its own, so a lookahead at its end sees the end of the text. Letters and digits are those of
 * PCRE2's Unicode tables (10.42: Unicode 14).
 *
 * Invalid UTF-8: a byte that starts no valid sequence counts as one character that is neither letter, digit nor space, which is
 * how the usual replacement U+FFFD is classed. Patterns see SUB (0x1a) in its place, of the same class and one byte long, so
 * offsets stay those of the text. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "pretokenizer.h"
#include "mem.h"
#include "text.h"
#include <pcre2.h>
#include <string.h>

/* Unicode White_Space. PCRE2's own \s also has U+180E, which Unicode dropped from the property in 6.3. */
#define SPACE "\\t-\\r\\x{85}\\p{Z}"
#define TRAILING_SPACE "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

/* Radford et al. 2019, the published GPT-2 encoder. */
#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE "\\p{L}\\p{N}]+|" TRAILING_SPACE
/* Llama 3 and Qwen2 differ in how many digits stay together. */
#define NEWLINE_AWARE(digits)                                                                                                      \
    "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?[^" SPACE                    \
    "\\p{L}\\p{N}]+[\\r\\n]*|[" SPACE "]*[\\r\\n]+|" TRAILING_SPACE

enum { PATTERNS_MAX = 4, SUBSTITUTE = 0x1a };

/* "default" is what llama.cpp falls back to for models without a name. */
static const struct rules {
    const char *name;
    bool whole_words, adds_bos;
    const char *pattern[PATTERNS_MAX];
} known[] = {
    {.name = "smollm", .pattern = {"\\p{N}", GPT2}},
    {.name = "gpt-2", .pattern = {GPT2}},
    {.name = "llama-bpe", .whole_words = true, .adds_bos = true, .pattern = {NEWLINE_AWARE("\\p{N}{1,3}")}},
    {.name = "qwen2", .pattern = {NEWLINE_AWARE("\\p{N}")}},
    {.name = "default", .pattern = {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
};
enum { N_KNOWN = sizeof known / sizeof *known };

struct kvl_pretokenizer {
    const struct rules *rules;
    pcre2_code *code[PATTERNS_MAX];
    size_t n;
};

struct ends {
    size_t *end, n, room;
};

static kvl_status append_end(struct ends *ends, size_t end)
{
    if (ends->n == ends->room) {
        const size_t room = ends->room < 64 ? 64 : 2 * ends->room;
        kvl_status status = kvl_realloc(&ends->end, room, sizeof *ends->end);
        if (status != KVL_OK) return status;
        ends->room = room;
    }
    ends->end[ends->n++] = end;
    return KVL_OK;
}

static kvl_status regex_fail(const char *what, int code)
{
    char message[128] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
    return kvl_fail(KVL_E_UNSUPPORTED, "%s: %s", what, message);
}

static kvl_status unknown_name(struct kvl_gguf_str name)
{
    struct kvl_text list = {0};
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < N_KNOWN; i++) KVL_TRY(kvl_text_printf(&list, "%s%s", i == 0 ? "" : ", ", known[i].name));
    status = kvl_fail(KVL_E_UNSUPPORTED, "pre-tokenizer '%.*s' is not known; known: %s", (int)(name.size < 64 ? name.size : 64),
                      name.data, list.data);
done:
    kvl_text_free(&list);
    return status;
}

static const struct rules *find_rules(struct kvl_gguf_str name)
{
    for (size_t i = 0; i < N_KNOWN; i++) {
        if (strlen(known[i].name) == name.size && memcmp(known[i].name, name.data, name.size) == 0) return &known[i];
    }
    return NULL;
}

kvl_status kvl_pretokenizer_new(struct kvl_gguf_str name, struct kvl_pretokenizer **out)
{
    kvl_status status = KVL_OK;
    struct kvl_pretokenizer *p = NULL;
    const struct rules *rules = find_rules(name);
    if (rules == NULL) return unknown_name(name);
    KVL_TRY(kvl_alloc(&p, 1, sizeof *p));
    p->rules = rules;
    for (; p->n < PATTERNS_MAX && rules->pattern[p->n] != NULL; p->n++) {
        int error = 0;
        PCRE2_SIZE offset = 0;
        p->code[p->n] =
            pcre2_compile((PCRE2_SPTR)rules->pattern[p->n], PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &offset, NULL);
        if (p->code[p->n] == NULL) KVL_TRY(regex_fail("PCRE2 (built with Unicode?) rejects a pre-tokenizer pattern", error));
        pcre2_jit_compile(p->code[p->n], PCRE2_JIT_COMPLETE); /* where it fails, the interpreter does the work */
    }
    *out = p;
    p = NULL;
done:
    kvl_pretokenizer_free(&p);
    return status;
}

void kvl_pretokenizer_free(struct kvl_pretokenizer **p)
{
    if (*p == NULL) return;
    for (size_t i = 0; i < PATTERNS_MAX; i++) pcre2_code_free((*p)->code[i]);
    kvl_free(p);
}

const char *kvl_pretokenizer_name(const struct kvl_pretokenizer *p) { return p->rules->name; }
bool kvl_pretokenizer_whole_words(const struct kvl_pretokenizer *p) { return p->rules->whole_words; }
bool kvl_pretokenizer_adds_bos(const struct kvl_pretokenizer *p) { return p->rules->adds_bos; }

/* Bytes of the valid UTF-8 sequence at s, 0 if there is none (RFC 3629: shortest form, no surrogates, at most U+10FFFF). */
static size_t utf8_sequence(const unsigned char *s, size_t left)
{
    static const struct {
        unsigned char first, last, low, high; /* range of the lead byte, of the second byte */
        size_t size;
    } forms[] = {{0x00, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
                 {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
                 {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (s[0] < forms[i].first || s[0] > forms[i].last) continue;
        if (forms[i].size > left) return 0;
        if (forms[i].size > 1 && (s[1] < forms[i].low || s[1] > forms[i].high)) return 0;
        for (size_t k = 2; k < forms[i].size; k++) {
            if ((s[k] & 0xc0) != 0x80) return 0;
        }
        return forms[i].size;
    }
    return 0;
}

/* Copy of the text that is valid UTF-8, byte for byte in place. */
static kvl_status valid_copy(const char *text, size_t size, char **out)
{
    kvl_status status = kvl_alloc(out, size, 1);
    if (status != KVL_OK) return status;
    memcpy(*out, text, size);
    for (size_t i = 0; i < size;) {
        const size_t sequence = utf8_sequence((const unsigned char *)*out + i, size - i);
        if (sequence == 0) (*out)[i] = SUBSTITUTE;
        i += sequence == 0 ? 1 : sequence;
    }
    return KVL_OK;
}

/* Pieces of the one piece text[start, end). */
static kvl_status split_piece(const pcre2_code *code, pcre2_match_data *match, const char *text, size_t start, size_t end,
                              struct ends *out)
{
    kvl_status status = KVL_OK;
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
    const size_t size = end - start;
    size_t at = 0;
    while (at < size) {
        const int found = pcre2_match(code, (PCRE2_SPTR)text + start, size, at, PCRE2_NO_UTF_CHECK, match, NULL);
        if (found == PCRE2_ERROR_NOMATCH) break;
        if (found < 0) return regex_fail("pre-tokenizer pattern cannot be matched", found);
        if (range[0] > at) KVL_TRY(append_end(out, start + range[0]));
        KVL_TRY(append_end(out, start + range[1]));
        at = range[1];
    }
    if (at < size) KVL_TRY(append_end(out, end));
done:
    return status;
}

kvl_status kvl_pretokenizer_split(const struct kvl_pretokenizer *p, const char *text, size_t size, size_t **ends, size_t *n)
{
    kvl_status status = KVL_OK;
    char *valid = NULL;
    struct ends pieces = {0}, finer = {0};
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (match == NULL) KVL_TRY(kvl_fail(KVL_E_MEMORY, "out of host memory for a pattern match"));
    KVL_TRY(valid_copy(text, size, &valid));
    if (size > 0) KVL_TRY(append_end(&pieces, size));
    for (size_t i = 0; i < p->n; i++) {
        finer.n = 0;
        for (size_t k = 0; k < pieces.n; k++) {
            KVL_TRY(split_piece(p->code[i], match, valid, k == 0 ? 0 : pieces.end[k - 1], pieces.end[k], &finer));
        }
        const struct ends coarser = pieces;
        pieces = finer;
        finer = coarser;
    }
    *n = pieces.n;
    *ends = pieces.end;
    pieces.end = NULL;
done:
    kvl_free(&pieces.end);
    kvl_free(&finer.end);
    kvl_free(&valid);
    pcre2_match_data_free(match);
    return status;
}
