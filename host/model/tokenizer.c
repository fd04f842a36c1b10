/* Two tokenizer models, which have in common that adjacent symbols of a text are merged, the best pair first, until none may be:
 *
 * gpt2, byte-level byte-pair encoding: Sennrich, Haddow, Birch 2016, on bytes as in Radford et al. 2019 (GPT-2). Vocabulary and merges are
 * written in a byte alphabet: printable Latin-1 characters stand for themselves, every other byte for a character from U+0100 on, in order.
 * A word starts as the tokens of its bytes; then the adjacent pair with the lowest merge rank (of equals the leftmost) becomes one token.
 * Ids, not texts, are compared while merging.
 *
 * llama, SentencePiece's merges (Kudo, Richardson 2018): U+2581 stands for a space, and one is put in front if the vocabulary says so. A text
 * starts as its characters; then the adjacent pair whose joined text is the token with the highest score (of equals the leftmost) becomes one.
 * What is no token in the end is written byte by byte.
 *
 * Three differences from llama.cpp, all where it loses text: invalid UTF-8 keeps its bytes (there: U+FFFD), a byte that the
 * vocabulary has no token for is an error (there: dropped), and a merge whose result is no token is not applied. */
#include "tokenizer.h"
#include "file.h"
#include "mem.h"
#include "pretokenizer.h"
#include "rng.h"
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NO_TOKEN = -1, N_BYTES = 256, N_CHARS = 0x144 /* characters of the byte alphabet lie below */, END_IDS_MAX = 16 };
#define NO_SYMBOL UINT32_MAX
#define SPM_SPACE "\xe2\x96\x81" /* U+2581 */

/* Numbers of tokenizer.ggml.token_type; tokens of another type are never matched as a whole and decode to nothing. */
enum token_type { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, BYTE = 6 };

struct token {
    size_t start; /* of its text in `texts` */
    uint32_t size;
    int32_t type;
};

struct merge {
    int32_t left, right, merged;
};

/* Open addressing over indices: a slot holds index + 1, 0 = free. Never more than half full. */
struct table {
    uint32_t *slot;
    size_t mask;
};

struct kvl_tokenizer {
    const struct tokenizer_model *model;
    struct kvl_pretokenizer *pretokenizer; /* gpt2 */
    char *texts, *chat_template;
    struct token *tokens;
    struct merge *merges; /* gpt2; index = rank */
    uint32_t *rank;       /* llama; of a token: 0 = highest score, the same for equal scores */
    int32_t *specials;    /* ids matched in the text, longest text first */
    uint32_t n_tokens, n_merges, n_specials, longest;
    struct table by_text, by_pair;
    int32_t token_of_byte[N_BYTES];
    uint16_t char_of_byte[N_BYTES];
    int16_t byte_of_char[N_CHARS];
    int32_t bos, eos, end_ids[END_IDS_MAX];
    size_t n_end_ids;
    bool adds_bos, adds_space;
    char sha256[65];
};

struct encoder;
struct symbol;
struct candidate;

/* A value of tokenizer.ggml.model. */
struct tokenizer_model {
    const char *name, *about;
    uint32_t most_ids; /* for a byte of text */
    kvl_status (*read)(struct kvl_tokenizer *t, const struct kvl_gguf *gguf, struct kvl_text *identity); /* merges, scores; what tells them apart */
    void (*byte_token_text)(const struct kvl_tokenizer *t, int byte, char text[8]);
    kvl_status (*encode)(struct encoder *e, size_t start, size_t end); /* text without special tokens */
    bool (*find_pair)(const struct encoder *e, const struct symbol *left, const struct symbol *right, struct candidate *out);
    kvl_status (*decode)(const struct kvl_tokenizer *t, const struct token *token, struct kvl_text *out); /* a token that is not special */
};

/* Texts that end a turn or a document: control tokens even where the file types them otherwise. */
static const char *const end_texts[] = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>",    "<|eom_id|>",
                                        "<|end|>",    "<|return|>",    "<end_of_turn>", "<|end_of_text|>"};

/* ---- tables ---- */

static kvl_status table_init(struct table *table, uint32_t n)
{
    size_t room = 16;
    while (room < 2 * (size_t)n) room *= 2;
    table->mask = room - 1;
    return kvl_alloc(&table->slot, room, sizeof *table->slot);
}

/* FNV-1a. */
static uint64_t hash_text(const char *text, size_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001b3u;
    return hash ^ hash >> 32;
}

/* The slot that holds the text's token, or the free one where it belongs. */
static uint32_t *text_slot(const struct kvl_tokenizer *t, const char *text, size_t size)
{
    size_t i = hash_text(text, size) & t->by_text.mask;
    for (; t->by_text.slot[i] != 0; i = (i + 1) & t->by_text.mask) {
        const struct token *token = &t->tokens[t->by_text.slot[i] - 1];
        if (token->size == size && memcmp(t->texts + token->start, text, size) == 0) break;
    }
    return &t->by_text.slot[i];
}

static int32_t find_token(const struct kvl_tokenizer *t, const char *text, size_t size)
{
    return (int32_t)*text_slot(t, text, size) - 1;
}

static uint32_t *pair_slot(const struct kvl_tokenizer *t, int32_t left, int32_t right)
{
    size_t i = kvl_rng_u64((uint64_t)left, (uint64_t)right) & t->by_pair.mask;
    for (; t->by_pair.slot[i] != 0; i = (i + 1) & t->by_pair.mask) {
        const struct merge *merge = &t->merges[t->by_pair.slot[i] - 1];
        if (merge->left == left && merge->right == right) break;
    }
    return &t->by_pair.slot[i];
}

/* ---- byte alphabet ---- */

static size_t put_char(uint16_t c, char out[2])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xc0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3f));
    return 2;
}

static void make_alphabet(struct kvl_tokenizer *t)
{
    uint16_t next = 0x100;
    memset(t->byte_of_char, 0xff, sizeof t->byte_of_char); /* -1 */
    for (int b = 0; b < N_BYTES; b++) {
        const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        t->char_of_byte[b] = printable ? (uint16_t)b : next++;
        t->byte_of_char[t->char_of_byte[b]] = (int16_t)b;
    }
}

static void bpe_byte_text(const struct kvl_tokenizer *t, int byte, char text[8]) { text[put_char(t->char_of_byte[byte], text)] = '\0'; }

static void spm_byte_text(const struct kvl_tokenizer *t, int byte, char text[8]) { snprintf(text, 8, "<0x%02X>", (unsigned)byte); }

static void find_byte_tokens(struct kvl_tokenizer *t)
{
    char text[8];
    for (int b = 0; b < N_BYTES; b++) {
        t->model->byte_token_text(t, b, text);
        t->token_of_byte[b] = find_token(t, text, strlen(text));
    }
}

/* ---- from the file ---- */

static kvl_status need_str_array(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str **out, uint32_t *n)
{
    uint64_t count;
    const kvl_status status = kvl_gguf_need_str_array(gguf, key, out, &count);
    if (status != KVL_OK) return status;
    if (count > INT32_MAX)
        return kvl_fail(KVL_E_FORMAT, "%s: %s has %llu entries", kvl_gguf_path(gguf), key, (unsigned long long)count);
    *n = (uint32_t)count;
    return KVL_OK;
}

static kvl_status read_texts(struct kvl_tokenizer *t, const struct kvl_gguf *gguf, const struct kvl_gguf_str *texts)
{
    kvl_status status = KVL_OK;
    size_t total = 0;
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        if (texts[i].size > INT32_MAX)
            return kvl_fail(KVL_E_FORMAT, "%s: token %u has %zu bytes", kvl_gguf_path(gguf), i, texts[i].size);
        total += texts[i].size; /* no overflow: they lie in a file */
    }
    KVL_TRY(kvl_alloc(&t->texts, total, 1));
    KVL_TRY(kvl_alloc(&t->tokens, t->n_tokens, sizeof *t->tokens));
    KVL_TRY(table_init(&t->by_text, t->n_tokens));
    total = 0;
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        t->tokens[i] = (struct token){.start = total, .size = (uint32_t)texts[i].size, .type = NORMAL};
        memcpy(t->texts + total, texts[i].data, texts[i].size);
        total += texts[i].size;
        if (texts[i].size > t->longest) t->longest = (uint32_t)texts[i].size;
        uint32_t *slot = text_slot(t, texts[i].data, texts[i].size);
        if (texts[i].size == 0) continue; /* a hole in the vocabulary */
        if (*slot != 0) return kvl_fail(KVL_E_FORMAT, "%s: tokens %u and %u have the same text", kvl_gguf_path(gguf), *slot - 1, i);
        *slot = i + 1;
    }
done:
    return status;
}

static kvl_status read_types(struct kvl_tokenizer *t, const struct kvl_gguf *gguf)
{
    const void *types;
    uint64_t n;
    if (!kvl_gguf_get_i32_array(gguf, "tokenizer.ggml.token_type", &types, &n)) return KVL_OK; /* all normal */
    if (n != t->n_tokens)
        return kvl_fail(KVL_E_FORMAT, "%s: tokenizer.ggml.token_type has %llu entries for %u tokens", kvl_gguf_path(gguf),
                        (unsigned long long)n, t->n_tokens);
    for (uint32_t i = 0; i < t->n_tokens; i++) memcpy(&t->tokens[i].type, (const char *)types + 4 * (size_t)i, 4);
    return KVL_OK;
}

/* "left right": neither holds a space, which the byte alphabet has no need of. */
static kvl_status read_merge(struct kvl_tokenizer *t, const struct kvl_gguf *gguf, struct kvl_gguf_str line, uint32_t rank)
{
    const char *space = memchr(line.data, ' ', line.size);
    const char *right = space == NULL ? NULL : space + 1;
    const size_t left_size = space == NULL ? 0 : (size_t)(space - line.data),
                 right_size = space == NULL ? 0 : line.size - left_size - 1;
    const int shown = line.size < 64 ? (int)line.size : 64;
    if (left_size == 0 || right_size == 0 || memchr(right, ' ', right_size) != NULL)
        return kvl_fail(KVL_E_FORMAT, "%s: merge %u is '%.*s', wanted two tokens and a space between", kvl_gguf_path(gguf), rank,
                        shown, line.data);
    char *joined = NULL;
    kvl_status status = kvl_alloc(&joined, left_size + right_size, 1);
    if (status != KVL_OK) return status;
    memcpy(joined, line.data, left_size);
    memcpy(joined + left_size, right, right_size);
    struct merge *merge = &t->merges[rank];
    merge->left = find_token(t, line.data, left_size);
    merge->right = find_token(t, right, right_size);
    merge->merged = find_token(t, joined, left_size + right_size);
    kvl_free(&joined);
    if (merge->left == NO_TOKEN || merge->right == NO_TOKEN)
        return kvl_fail(KVL_E_FORMAT, "%s: merge %u '%.*s' names a token that is not in the vocabulary", kvl_gguf_path(gguf), rank,
                        shown, line.data);
    uint32_t *slot = pair_slot(t, merge->left, merge->right);
    if (*slot == 0 && merge->merged != NO_TOKEN) *slot = rank + 1; /* of equal merges the first counts */
    return KVL_OK;
}

static kvl_status append_counted(struct kvl_text *text, const void *data, uint64_t size)
{
    kvl_status status = kvl_text_append(text, (const char *)&size, sizeof size);
    return status == KVL_OK ? kvl_text_append(text, data, (size_t)size) : status;
}

static kvl_status bpe_read(struct kvl_tokenizer *t, const struct kvl_gguf *gguf, struct kvl_text *identity)
{
    kvl_status status = KVL_OK;
    struct kvl_gguf_str *lines = NULL, pre = {.data = "default", .size = strlen("default")};
    kvl_gguf_get_str(gguf, "tokenizer.ggml.pre", &pre);
    KVL_TRY(kvl_pretokenizer_new(pre, &t->pretokenizer));
    t->adds_bos = kvl_pretokenizer_adds_bos(t->pretokenizer);
    KVL_TRY(need_str_array(gguf, "tokenizer.ggml.merges", &lines, &t->n_merges));
    KVL_TRY(kvl_alloc(&t->merges, t->n_merges, sizeof *t->merges));
    KVL_TRY(table_init(&t->by_pair, t->n_merges));
    for (uint32_t rank = 0; rank < t->n_merges; rank++) {
        KVL_TRY(read_merge(t, gguf, lines[rank], rank));
        KVL_TRY(append_counted(identity, lines[rank].data, lines[rank].size));
    }
done:
    kvl_free(&lines);
    return status;
}

struct by_score {
    float score;
    uint32_t id;
};

static int highest_first(const void *a, const void *b)
{
    const struct by_score *x = a, *y = b;
    return (x->score < y->score) - (x->score > y->score);
}

static kvl_status spm_read(struct kvl_tokenizer *t, const struct kvl_gguf *gguf, struct kvl_text *identity)
{
    kvl_status status = KVL_OK;
    struct by_score *sorted = NULL;
    const void *scores;
    uint64_t n = 0;
    t->adds_bos = t->adds_space = true;
    kvl_gguf_get_bool(gguf, "tokenizer.ggml.add_space_prefix", &t->adds_space);
    if (!kvl_gguf_get_f32_array(gguf, "tokenizer.ggml.scores", &scores, &n) || n != t->n_tokens)
        return kvl_fail(KVL_E_FORMAT, "%s: tokenizer.ggml.scores has %llu floats for %u tokens", kvl_gguf_path(gguf), (unsigned long long)n,
                        t->n_tokens);
    KVL_TRY(kvl_alloc(&sorted, n, sizeof *sorted));
    KVL_TRY(kvl_alloc(&t->rank, n, sizeof *t->rank));
    for (uint32_t i = 0; i < n; i++) {
        sorted[i].id = i;
        memcpy(&sorted[i].score, (const char *)scores + 4 * (size_t)i, 4);
        if (isnan(sorted[i].score)) {
            status = kvl_fail(KVL_E_FORMAT, "%s: the score of token %u is not a number", kvl_gguf_path(gguf), i);
            goto done;
        }
    }
    qsort(sorted, n, sizeof *sorted, highest_first);
    for (uint32_t i = 0, rank = 0; i < n; i++) {
        if (i > 0 && sorted[i].score != sorted[i - 1].score) rank = i;
        t->rank[sorted[i].id] = rank;
    }
    KVL_TRY(append_counted(identity, scores, 4 * n));
    KVL_TRY(append_counted(identity, &t->adds_space, sizeof t->adds_space));
done:
    kvl_free(&sorted);
    return status;
}

static kvl_status read_id(const struct kvl_tokenizer *t, const struct kvl_gguf *gguf, const char *key, int32_t *id)
{
    uint64_t number;
    *id = NO_TOKEN;
    if (!kvl_gguf_get_u64(gguf, key, &number)) return KVL_OK;
    kvl_status status = kvl_gguf_need_u64(gguf, key, 0, (uint64_t)t->n_tokens - 1, &number);
    if (status == KVL_OK) *id = (int32_t)number;
    return status;
}

static void add_end(struct kvl_tokenizer *t, int32_t id)
{
    if (id != NO_TOKEN && !kvl_tokenizer_is_end(t, id)) t->end_ids[t->n_end_ids++] = id;
}

static kvl_status read_special_ids(struct kvl_tokenizer *t, const struct kvl_gguf *gguf)
{
    static const char *const end_keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                           "tokenizer.ggml.eom_token_id"};
    _Static_assert(sizeof end_keys / sizeof *end_keys + sizeof end_texts / sizeof *end_texts <= END_IDS_MAX,
                   "room for all end tokens");
    kvl_status status = KVL_OK;
    KVL_TRY(read_id(t, gguf, "tokenizer.ggml.bos_token_id", &t->bos));
    KVL_TRY(read_id(t, gguf, end_keys[0], &t->eos));
    for (size_t i = 0; i < sizeof end_keys / sizeof *end_keys; i++) {
        int32_t id;
        KVL_TRY(read_id(t, gguf, end_keys[i], &id));
        add_end(t, id);
    }
    for (size_t i = 0; i < sizeof end_texts / sizeof *end_texts; i++) {
        const int32_t id = find_token(t, end_texts[i], strlen(end_texts[i]));
        if (id != NO_TOKEN) t->tokens[id].type = CONTROL;
        add_end(t, id);
    }
    kvl_gguf_get_bool(gguf, "tokenizer.ggml.add_bos_token", &t->adds_bos);
    if (t->adds_bos && t->bos == NO_TOKEN)
        status = kvl_fail(KVL_E_FORMAT, "%s: the tokenizer adds a BOS token, but tokenizer.ggml.bos_token_id is missing",
                          kvl_gguf_path(gguf));
done:
    return status;
}

static bool is_control(const struct token *token) { return token->type == CONTROL || token->type == UNKNOWN; }

struct by_size {
    uint32_t size;
    int32_t id;
};

static int longest_first(const void *a, const void *b)
{
    const struct by_size *x = a, *y = b;
    if (x->size != y->size) return x->size < y->size ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

static kvl_status list_specials(struct kvl_tokenizer *t)
{
    kvl_status status = KVL_OK;
    struct by_size *found = NULL;
    KVL_TRY(kvl_alloc(&found, t->n_tokens, sizeof *found));
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        const struct token *token = &t->tokens[i];
        if (token->size > 0 && (is_control(token) || token->type == USER_DEFINED))
            found[t->n_specials++] = (struct by_size){token->size, (int32_t)i};
    }
    qsort(found, t->n_specials, sizeof *found, longest_first);
    KVL_TRY(kvl_alloc(&t->specials, t->n_specials, sizeof *t->specials));
    for (uint32_t i = 0; i < t->n_specials; i++) t->specials[i] = found[i].id;
done:
    kvl_free(&found);
    return status;
}

/* Over the name of the patterns or of the model, token texts, token types and what the model read, each with its size before it. */
static kvl_status identify(struct kvl_tokenizer *t, const struct kvl_gguf_str *texts, const struct kvl_text *read)
{
    kvl_status status = KVL_OK;
    struct kvl_text all = {0};
    const char *name = t->pretokenizer != NULL ? kvl_pretokenizer_name(t->pretokenizer) : t->model->name;
    KVL_TRY(append_counted(&all, name, strlen(name)));
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        KVL_TRY(append_counted(&all, texts[i].data, texts[i].size));
        KVL_TRY(append_counted(&all, &t->tokens[i].type, sizeof t->tokens[i].type));
    }
    KVL_TRY(kvl_text_append(&all, read->data, read->size));
    KVL_TRY(kvl_sha256(all.data, all.size, t->sha256));
done:
    kvl_text_free(&all);
    return status;
}

void kvl_tokenizer_free(struct kvl_tokenizer **tokenizer)
{
    struct kvl_tokenizer *t = *tokenizer;
    if (t == NULL) return;
    kvl_pretokenizer_free(&t->pretokenizer);
    kvl_free(&t->texts);
    kvl_free(&t->chat_template);
    kvl_free(&t->tokens);
    kvl_free(&t->merges);
    kvl_free(&t->rank);
    kvl_free(&t->specials);
    kvl_free(&t->by_text.slot);
    kvl_free(&t->by_pair.slot);
    kvl_free(tokenizer);
}

uint32_t kvl_tokenizer_n_vocab(const struct kvl_tokenizer *t) { return t->n_tokens; }
int32_t kvl_tokenizer_bos(const struct kvl_tokenizer *t) { return t->bos; }
bool kvl_tokenizer_adds_bos(const struct kvl_tokenizer *t) { return t->adds_bos; }
const char *kvl_tokenizer_sha256(const struct kvl_tokenizer *t) { return t->sha256; }
const char *kvl_tokenizer_chat_template(const struct kvl_tokenizer *t) { return t->chat_template; }

bool kvl_tokenizer_is_end(const struct kvl_tokenizer *t, int32_t id)
{
    for (size_t i = 0; i < t->n_end_ids; i++) {
        if (t->end_ids[i] == id) return true;
    }
    return false;
}

/* ---- encode ---- */

/* Tokens of the text being merged, a doubly linked list; a symbol merged into its left neighbour has size 0. */
struct symbol {
    int32_t id; /* NO_TOKEN: its text is none */
    uint32_t start, size; /* of its text, in the text being merged */
    uint32_t prev, next;
};

/* A pair that may be merged: the symbol `left` and the one after it, together of `size` bytes. */
struct candidate {
    uint32_t rank, left, size;
    int32_t merged;
};

struct encoder {
    const struct kvl_tokenizer *t;
    const char *text;
    struct symbol *symbols;
    struct candidate *heap; /* binary heap, best on top */
    size_t n_heap, room;
    struct kvl_text word; /* in the vocabulary's alphabet */
    int32_t *ids;
    size_t n_ids;
};

static bool better(struct candidate a, struct candidate b) { return a.rank != b.rank ? a.rank < b.rank : a.left < b.left; }

static void push(struct encoder *e, struct candidate candidate)
{
    size_t i = e->n_heap++;
    for (; i > 0 && better(candidate, e->heap[(i - 1) / 2]); i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = candidate;
}

static struct candidate pop(struct encoder *e)
{
    const struct candidate top = e->heap[0], last = e->heap[--e->n_heap];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= e->n_heap) break;
        if (child + 1 < e->n_heap && better(e->heap[child + 1], e->heap[child])) child++;
        if (!better(e->heap[child], last)) break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = last;
    return top;
}

static bool bpe_find_pair(const struct encoder *e, const struct symbol *left, const struct symbol *right, struct candidate *out)
{
    const uint32_t slot = *pair_slot(e->t, left->id, right->id);
    if (slot == 0) return false;
    out->rank = slot - 1;
    out->merged = e->t->merges[out->rank].merged;
    return true;
}

static bool spm_find_pair(const struct encoder *e, const struct symbol *left, const struct symbol *right, struct candidate *out)
{
    if (out->size > e->t->longest) return false;
    out->merged = find_token(e->t, e->word.data + left->start, out->size);
    if (out->merged == NO_TOKEN) return false;
    out->rank = e->t->rank[out->merged];
    return true;
}

static void push_pair(struct encoder *e, uint32_t left)
{
    if (left == NO_SYMBOL || e->symbols[left].next == NO_SYMBOL) return;
    const struct symbol *l = &e->symbols[left], *r = &e->symbols[l->next];
    struct candidate candidate = {.left = left, .size = l->size + r->size};
    if (e->t->model->find_pair(e, l, r, &candidate)) push(e, candidate);
}

/* A candidate is stale when one of its two symbols was merged since: sizes only grow, but to 0. */
static void merge_candidate(struct encoder *e, struct candidate candidate)
{
    struct symbol *left = &e->symbols[candidate.left];
    if (left->size == 0 || left->next == NO_SYMBOL || left->size + e->symbols[left->next].size != candidate.size) return;
    struct symbol *right = &e->symbols[left->next];
    left->id = candidate.merged;
    left->size = candidate.size;
    left->next = right->next;
    right->size = 0;
    if (left->next != NO_SYMBOL) e->symbols[left->next].prev = candidate.left;
    push_pair(e, left->prev);
    push_pair(e, candidate.left);
}

/* Of n symbols in a row. */
static void merge_symbols(struct encoder *e, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        e->symbols[i].prev = i == 0 ? NO_SYMBOL : i - 1;
        e->symbols[i].next = i + 1 == n ? NO_SYMBOL : i + 1;
    }
    for (uint32_t i = 0; i < n; i++) push_pair(e, i);
    while (e->n_heap > 0) merge_candidate(e, pop(e));
}

/* n symbols start with n - 1 candidates; each of their at most n - 1 merges brings two more. */
static kvl_status make_room(struct encoder *e, size_t n)
{
    kvl_status status = KVL_OK;
    if (n <= e->room) return KVL_OK;
    KVL_TRY(kvl_realloc(&e->symbols, n, sizeof *e->symbols));
    KVL_TRY(kvl_realloc(&e->heap, 3 * n, sizeof *e->heap));
    e->room = n;
done:
    return status;
}

static kvl_status fail_byte(unsigned char byte, size_t start)
{
    return kvl_fail(KVL_E_UNSUPPORTED, "byte 0x%02x at offset %zu of the text has no token in this vocabulary; remove it", byte, start);
}

static kvl_status merge_word(struct encoder *e, size_t start, size_t end)
{
    const uint32_t n = (uint32_t)(end - start);
    kvl_status status = make_room(e, n);
    if (status != KVL_OK) return status;
    for (uint32_t i = 0; i < n; i++) {
        const unsigned char byte = (unsigned char)e->text[start + i];
        e->symbols[i] = (struct symbol){.id = e->t->token_of_byte[byte], .start = i, .size = 1};
        if (e->symbols[i].id == NO_TOKEN) return fail_byte(byte, start + i);
    }
    merge_symbols(e, n);
    for (uint32_t i = 0; i != NO_SYMBOL; i = e->symbols[i].next) e->ids[e->n_ids++] = e->symbols[i].id;
    return KVL_OK;
}

/* The token that is the whole word, if there is one. */
static kvl_status find_word(struct encoder *e, size_t start, size_t end, int32_t *id)
{
    kvl_status status = KVL_OK;
    *id = NO_TOKEN;
    if (end - start > e->t->longest) return KVL_OK;
    e->word.size = 0;
    for (size_t i = start; i < end; i++) {
        char text[2];
        const size_t size = put_char(e->t->char_of_byte[(unsigned char)e->text[i]], text);
        KVL_TRY(kvl_text_append(&e->word, text, size));
    }
    *id = find_token(e->t, e->word.data, e->word.size);
done:
    return status;
}

static kvl_status encode_word(struct encoder *e, size_t start, size_t end)
{
    int32_t id = NO_TOKEN;
    if (kvl_pretokenizer_whole_words(e->t->pretokenizer)) {
        kvl_status status = find_word(e, start, end, &id);
        if (status != KVL_OK) return status;
    }
    if (id == NO_TOKEN) return merge_word(e, start, end);
    e->ids[e->n_ids++] = id;
    return KVL_OK;
}

static kvl_status bpe_encode(struct encoder *e, size_t start, size_t end)
{
    kvl_status status = KVL_OK;
    size_t *ends = NULL, n = 0;
    KVL_TRY(kvl_pretokenizer_split(e->t->pretokenizer, e->text + start, end - start, &ends, &n));
    for (size_t i = 0; i < n; i++) KVL_TRY(encode_word(e, start + (i == 0 ? 0 : ends[i - 1]), start + ends[i]));
done:
    kvl_free(&ends);
    return status;
}

/* The text in the vocabulary's alphabet. */
static kvl_status spm_word(struct encoder *e, size_t start, size_t end)
{
    kvl_status status = KVL_OK;
    e->word.size = 0;
    if (e->t->adds_space) KVL_TRY(kvl_text_append(&e->word, SPM_SPACE, strlen(SPM_SPACE)));
    for (size_t i = start; i < end; i++) {
        const bool space = e->text[i] == ' ';
        KVL_TRY(kvl_text_append(&e->word, space ? SPM_SPACE : e->text + i, space ? strlen(SPM_SPACE) : 1));
    }
    if (e->word.size > INT32_MAX) status = kvl_fail(KVL_E_UNSUPPORTED, "text of %zu bytes: too long to be tokenized at once", end - start);
done:
    return status;
}

/* Where byte `at` of the word comes from in the text. */
static size_t spm_origin(const struct encoder *e, size_t start, size_t at)
{
    for (size_t i = e->t->adds_space ? strlen(SPM_SPACE) : 0; i < at; start++) i += e->text[start] == ' ' ? strlen(SPM_SPACE) : 1;
    return start;
}

/* Bytes of the UTF-8 character that text begins with; 1 if it is cut. */
static uint32_t char_size(const char *text, size_t left)
{
    const unsigned char lead = (unsigned char)text[0];
    const uint32_t size = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    uint32_t n = 1;
    while (n < size && n < left && ((unsigned char)text[n] & 0xc0) == 0x80) n++;
    return n == size ? size : 1;
}

static kvl_status spm_encode(struct encoder *e, size_t start, size_t end)
{
    kvl_status status = KVL_OK;
    uint32_t n = 0;
    KVL_TRY(spm_word(e, start, end));
    KVL_TRY(make_room(e, e->word.size));
    for (uint32_t at = 0, size; at < e->word.size; at += size) {
        size = char_size(e->word.data + at, e->word.size - at);
        e->symbols[n++] = (struct symbol){.id = find_token(e->t, e->word.data + at, size), .start = at, .size = size};
    }
    merge_symbols(e, n);
    for (uint32_t i = 0; i != NO_SYMBOL; i = e->symbols[i].next) {
        const struct symbol *symbol = &e->symbols[i];
        for (uint32_t b = 0; b < (symbol->id == NO_TOKEN ? symbol->size : 1); b++) {
            const unsigned char byte = (unsigned char)e->word.data[symbol->start + b];
            const int32_t id = symbol->id == NO_TOKEN ? e->t->token_of_byte[byte] : symbol->id;
            if (id == NO_TOKEN) return fail_byte(byte, spm_origin(e, start, symbol->start + b));
            e->ids[e->n_ids++] = id;
        }
    }
done:
    return status;
}

static kvl_status encode_plain(struct encoder *e, size_t start, size_t end)
{
    return start == end ? KVL_OK : e->t->model->encode(e, start, end);
}

/* Marks per byte of the text: id + 1 where a special token starts, -1 inside it, 0 elsewhere. Longer tokens choose first. */
static void mark_special(const struct kvl_tokenizer *t, int32_t id, const char *text, size_t size, int32_t *marks)
{
    const size_t length = t->tokens[id].size;
    const char *wanted = t->texts + t->tokens[id].start, *found;
    for (size_t at = 0; (found = memmem(text + at, size - at, wanted, length)) != NULL;) {
        const size_t start = (size_t)(found - text);
        size_t taken = 0;
        while (taken < length && marks[start + taken] == 0) taken++;
        at = start + 1;
        if (taken < length) continue;
        for (size_t i = 0; i < length; i++) marks[start + i] = i == 0 ? id + 1 : -1;
        at = start + length;
    }
}

static kvl_status encode_marked(struct encoder *e, size_t size, const int32_t *marks)
{
    kvl_status status = KVL_OK;
    size_t plain = 0; /* start of the text not yet encoded */
    for (size_t i = 0; i < size; i++) {
        if (marks[i] <= 0) continue;
        KVL_TRY(encode_plain(e, plain, i));
        e->ids[e->n_ids++] = marks[i] - 1;
        plain = i + e->t->tokens[marks[i] - 1].size;
    }
    KVL_TRY(encode_plain(e, plain, size));
done:
    return status;
}

kvl_status kvl_tokenizer_encode(const struct kvl_tokenizer *t, const char *text, size_t size, bool special, int32_t **ids,
                                size_t *n)
{
    kvl_status status = KVL_OK;
    struct encoder e = {.t = t, .text = text};
    int32_t *marks = NULL;
    if (size > INT32_MAX)
        return kvl_fail(KVL_E_UNSUPPORTED, "text of %zu bytes: at most %d can be tokenized at once", size, INT32_MAX);
    KVL_TRY(kvl_realloc(ids, size * t->model->most_ids, sizeof **ids));
    e.ids = *ids;
    KVL_TRY(kvl_alloc(&marks, size, sizeof *marks));
    for (uint32_t i = 0; i < t->n_specials; i++) {
        if (special || !is_control(&t->tokens[t->specials[i]])) mark_special(t, t->specials[i], text, size, marks);
    }
    KVL_TRY(encode_marked(&e, size, marks));
    *n = e.n_ids;
    KVL_TRY(kvl_realloc(ids, e.n_ids, sizeof **ids));
done:
    kvl_free(&marks);
    kvl_free(&e.symbols);
    kvl_free(&e.heap);
    kvl_text_free(&e.word);
    return status;
}

/* ---- decode ---- */

/* The byte that the character at text stands for and the character's size; NO_TOKEN if it stands for none. */
static int byte_at(const struct kvl_tokenizer *t, const char *text, size_t left, size_t *size)
{
    const unsigned char lead = (unsigned char)text[0], next = left > 1 ? (unsigned char)text[1] : 0;
    const bool pair = lead >= 0xc2 && lead <= 0xdf && (next & 0xc0) == 0x80;
    const unsigned c = pair ? (lead & 0x1fu) << 6 | (next & 0x3fu) : lead;
    *size = pair ? 2 : 1;
    return (pair || lead < 0x80) && c < N_CHARS ? t->byte_of_char[c] : NO_TOKEN;
}

/* A character outside the byte alphabet stands for itself. */
static kvl_status bpe_decode(const struct kvl_tokenizer *t, const struct token *token, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const char *text = t->texts + token->start;
    for (size_t i = 0, step; token->type == NORMAL && i < token->size; i += step) {
        const int byte = byte_at(t, text + i, token->size - i, &step);
        const char c = (char)byte;
        KVL_TRY(kvl_text_append(out, byte < 0 ? text + i : &c, byte < 0 ? step : 1));
    }
done:
    return status;
}

static kvl_status spm_decode(const struct kvl_tokenizer *t, const struct token *token, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const char *text = t->texts + token->start;
    const size_t space = strlen(SPM_SPACE);
    for (int b = 0; b < N_BYTES && token->type == BYTE; b++) {
        const char c = (char)b;
        if (t->token_of_byte[b] == token - t->tokens) return kvl_text_append(out, &c, 1);
    }
    for (size_t i = 0, step; token->type == NORMAL && i < token->size; i += step) {
        const bool is_space = token->size - i >= space && memcmp(text + i, SPM_SPACE, space) == 0;
        step = is_space ? space : 1;
        KVL_TRY(kvl_text_append(out, is_space ? " " : text + i, 1));
    }
done:
    return status;
}

kvl_status kvl_tokenizer_encode_stream(const struct kvl_tokenizer *t, const char *text, size_t size, bool special, int32_t **ids, size_t *n)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_tokenizer_encode(t, text, size, special, ids, n));
    if (!kvl_tokenizer_adds_bos(t)) return KVL_OK;
    KVL_TRY(kvl_realloc(ids, *n + 1, sizeof **ids));
    memmove(*ids + 1, *ids, (*n)++ * sizeof **ids);
    (*ids)[0] = kvl_tokenizer_bos(t);
done:
    return status;
}

kvl_status kvl_tokenizer_decode(const struct kvl_tokenizer *t, int32_t id, bool special, struct kvl_text *out)
{
    if (id < 0 || (uint32_t)id >= t->n_tokens)
        return kvl_fail(KVL_E_USAGE, "token id %d is not in the vocabulary (0 to %u)", id, t->n_tokens - 1);
    const struct token *token = &t->tokens[id];
    if (token->type == USER_DEFINED || (special && is_control(token))) return kvl_text_append(out, t->texts + token->start, token->size);
    return t->model->decode(t, token, out);
}

static const struct tokenizer_model models[] = {
    {"gpt2", "byte-level BPE", 1, bpe_read, bpe_byte_text, bpe_encode, bpe_find_pair, bpe_decode},
    {"llama", "SentencePiece", 6, spm_read, spm_byte_text, spm_encode, spm_find_pair, spm_decode}, /* a space may be 3 byte tokens, and put in front */
};

/* ---- the whole ---- */

static kvl_status find_model(struct kvl_tokenizer *t, const struct kvl_gguf *gguf)
{
    kvl_status status = KVL_OK;
    struct kvl_gguf_str name, template;
    struct kvl_text known = {0};
    KVL_TRY(kvl_gguf_need_str(gguf, "tokenizer.ggml.model", &name));
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        if (strlen(models[i].name) == name.size && memcmp(models[i].name, name.data, name.size) == 0) t->model = &models[i];
        KVL_TRY(kvl_text_printf(&known, "%s%s (%s)", i == 0 ? "" : ", ", models[i].name, models[i].about));
    }
    if (t->model == NULL)
        KVL_TRY(kvl_fail(KVL_E_UNSUPPORTED, "%s: tokenizer model '%s' is not known; known: %s", kvl_gguf_path(gguf), kvl_gguf_show(name).text,
                         known.data));
    if (kvl_gguf_get_str(gguf, "tokenizer.chat_template", &template))
        KVL_TRY(kvl_strndup(&t->chat_template, template.data, template.size));
done:
    kvl_text_free(&known);
    return status;
}

kvl_status kvl_tokenizer_new(const struct kvl_gguf *gguf, struct kvl_tokenizer **out)
{
    kvl_status status = KVL_OK;
    struct kvl_tokenizer *t = NULL;
    struct kvl_gguf_str *texts = NULL;
    struct kvl_text identity = {0};
    KVL_TRY(kvl_alloc(&t, 1, sizeof *t));
    KVL_TRY(find_model(t, gguf));
    KVL_TRY(need_str_array(gguf, "tokenizer.ggml.tokens", &texts, &t->n_tokens));
    if (t->n_tokens == 0) KVL_TRY(kvl_fail(KVL_E_FORMAT, "%s: the vocabulary is empty", kvl_gguf_path(gguf)));
    KVL_TRY(read_texts(t, gguf, texts));
    KVL_TRY(read_types(t, gguf));
    KVL_TRY(t->model->read(t, gguf, &identity));
    KVL_TRY(read_special_ids(t, gguf));
    KVL_TRY(list_specials(t));
    make_alphabet(t);
    find_byte_tokens(t);
    KVL_TRY(identify(t, texts, &identity));
    *out = t;
    t = NULL;
done:
    kvl_free(&texts);
    kvl_text_free(&identity);
    kvl_tokenizer_free(&t);
    return status;
}
