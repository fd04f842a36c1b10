/* A pass key in a text is asked for (Mohtashami and Jaggi 2023, arXiv:2305.16300; the grid of lengths and depths is Kamradt's). */
#include "eval_tasks.h"
#include "log.h"
#include "mem.h"
#include "rng.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct kvl_column columns[] = {
    {"length", "1", "tokens that were compressed", KVL_COL_U64},
    {"depth", "1", "where the needle stands among them, 0 to 1", KVL_COL_F64},
    {"seed", "1", "seed of the sequence", KVL_COL_U64},
    {"exact", "1", "1: the answer is right when decoded greedily", KVL_COL_U64},
    {"exact_base", "1", "the same with the base cache", KVL_COL_U64},
    {"nll", "1", "mean nll of the answer's tokens, nats", KVL_COL_F64},
    {"nll_base", "1", "the same with the base cache", KVL_COL_F64},
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };
const struct kvl_record_table kvl_needle_table = {"/quality", columns, N_COLUMNS};

/* The quotation mark keeps the key's digits from merging with what stands before them. */
static const char head_text[] = "A pass key is hidden in the following text. Memorize it.\n\n";
static const char needle_text[] = "\nThe pass key is \"%s\". Remember it: \"%s\" is the pass key.\n";
static const char question_text[] = "\n\nWhat is the pass key? The pass key is \"";

enum { KEY_DIGITS = 5 };

struct piece {
    int32_t *token;
    size_t n;
};

static kvl_status encode(const struct kvl_eval *e, const char *text, struct piece *out)
{
    return kvl_tokenizer_encode(e->rig->model->tokenizer, text, strlen(text), false, &out->token, &out->n);
}

struct sequence {
    struct piece head, needle, question, answer;
};

static void free_sequence(struct sequence *s)
{
    struct piece *const all[] = {&s->head, &s->needle, &s->question, &s->answer};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        kvl_free(&all[i]->token);
        all[i]->n = 0;
    }
}

static kvl_status make_texts(const struct kvl_eval *e, uint64_t seed, struct sequence *s)
{
    kvl_status status = KVL_OK;
    char key[KEY_DIGITS + 1], needle[sizeof needle_text + 2 * KEY_DIGITS];
    for (int i = 0; i < KEY_DIGITS; i++) key[i] = (char)('0' + kvl_rng_u64(seed, (uint64_t)i + 1) % 10);
    key[KEY_DIGITS] = '\0';
    snprintf(needle, sizeof needle, needle_text, key, key);
    KVL_TRY(encode(e, head_text, &s->head));
    KVL_TRY(encode(e, needle, &s->needle));
    KVL_TRY(encode(e, question_text, &s->question));
    KVL_TRY(encode(e, key, &s->answer));
done:
    return status;
}

static uint32_t put(int32_t *window, uint32_t at, const int32_t *token, size_t n)
{
    memcpy(window + at, token, n * sizeof *token);
    return at + (uint32_t)n;
}

/* [BOS] head, text with the needle in it, question, answer: the first `length` tokens are compressed, and all of the answer comes after that. */
static kvl_status make_window(struct kvl_eval *e, const struct kvl_needle_config *c, const struct kvl_needle_cell *cell, uint64_t seed,
                              const struct sequence *s, struct kvl_eval_layout *layout)
{
    const struct kvl_tokenizer *tokenizer = e->rig->model->tokenizer;
    const uint32_t bos = kvl_tokenizer_adds_bos(tokenizer), seen = c->question_seen ? (uint32_t)s->question.n - 1 : 0;
    const uint64_t fixed = bos + s->head.n + s->needle.n + seen;
    if (fixed >= cell->length)
        return kvl_fail(KVL_E_USAGE, "--length %u: head, needle%s alone have %llu tokens", cell->length, seen ? " and question" : "",
                        (unsigned long long)fixed);
    if (s->question.n + s->answer.n > KVL_NEEDLE_TEXT)
        return kvl_fail(KVL_E_UNSUPPORTED, "question and answer have %zu tokens with this model's tokenizer, there is room for %d", s->question.n + s->answer.n,
                        KVL_NEEDLE_TEXT);
    const uint32_t filler = cell->length - (uint32_t)fixed, before = (uint32_t)lround(cell->depth * filler);
    const int32_t *text = e->text->tokens + kvl_rng_u64(seed, 0) % (e->text->n - filler + 1);
    uint32_t at = 0;
    if (bos) e->window[at++] = kvl_tokenizer_bos(tokenizer);
    at = put(e->window, at, s->head.token, s->head.n);
    at = put(e->window, at, text, before);
    at = put(e->window, at, s->needle.token, s->needle.n);
    at = put(e->window, at, text + before, filler - before);
    at = put(e->window, at, s->question.token, s->question.n);
    *layout = (struct kvl_eval_layout){.context = cell->length, .first_scored = at, .n_scored = (uint32_t)s->answer.n};
    layout->n_ctx = put(e->window, at, s->answer.token, s->answer.n);
    return KVL_OK;
}

/* Greedy decoding gives the answer if every one of its tokens is the most likely one behind those before it. */
static bool is_exact(const struct kvl_row_score *score, const struct piece *answer)
{
    for (size_t i = 0; i < answer->n; i++)
        if (score[i].argmax != answer->token[i]) return false;
    return true;
}

static kvl_status run_sequence(struct kvl_eval *e, const struct kvl_needle_config *c, uint64_t seed, struct kvl_record *record, struct kvl_needle_cell *cell)
{
    kvl_status status = KVL_OK;
    struct sequence s = {0};
    struct kvl_eval_layout layout;
    KVL_TRY(make_texts(e, seed, &s));
    KVL_TRY(make_window(e, c, cell, seed, &s, &layout));
    KVL_TRY(kvl_eval_run(e, &layout, record));
    const struct kvl_row_score *spec = e->score[KVL_EVAL_SPEC], *base = e->score[KVL_EVAL_BASE];
    const bool exact = is_exact(spec, &s.answer), exact_base = is_exact(base, &s.answer);
    const double nll = kvl_eval_mean_nll(spec, s.answer.n), nll_base = kvl_eval_mean_nll(base, s.answer.n);
    const union kvl_cell cells[N_COLUMNS] = {{.u64 = cell->length}, {.f64 = cell->depth}, {.u64 = seed},    {.u64 = exact},
                                             {.u64 = exact_base},   {.f64 = nll},         {.f64 = nll_base}};
    KVL_TRY(kvl_record_row(record, cells));
    cell->exact += (double)exact / c->seeds;
    cell->exact_base += (double)exact_base / c->seeds;
    cell->nll += nll / c->seeds;
    cell->nll_base += nll_base / c->seeds;
done:
    free_sequence(&s);
    return status;
}

kvl_status kvl_eval_needle(struct kvl_eval *e, const struct kvl_needle_config *c, struct kvl_record *record, struct kvl_needle_cell *cell)
{
    kvl_status status = KVL_OK;
    struct kvl_progress progress;
    uint64_t tokens = 0;
    for (size_t i = 0; i < c->n_length; i++) tokens += c->n_depth * c->seeds * (uint64_t)c->length[i];
    kvl_progress_start(&progress, "eval needle", "tok", tokens);
    for (size_t i = 0; i < c->n_length * c->n_depth; i++) {
        cell[i] = (struct kvl_needle_cell){.length = c->length[i / c->n_depth], .depth = c->depth[i % c->n_depth]};
        for (uint32_t seed = 0; seed < c->seeds; seed++) {
            KVL_TRY(run_sequence(e, c, c->seed + seed, record, &cell[i]));
            kvl_progress_update(&progress, e->n_forward < tokens ? e->n_forward : tokens);
        }
        cell[i].scored = cell[i].exact_base >= KVL_NEEDLE_ENOUGH - 1e-9;
    }
    KVL_TRY(kvl_record_memory(record, e->session[KVL_EVAL_SPEC]));
done:
    kvl_progress_end(&progress);
    if (status == KVL_E_INTERRUPTED) kvl_fail(status, "interrupted: the sequences that were run are in the run file");
    return status;
}
