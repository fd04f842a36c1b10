/* Pieces of the user's text and the messages that point into it. */
#include "slice.h"
#include "mem.h"
#include "text.h"
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { WORDS_MAX = 128, NUMBER_MAX = 64 };

struct kvl_slice kvl_slice_of(const char *who, const char *text)
{
    return (struct kvl_slice){.who = who, .text = text, .n = strlen(text)};
}

struct kvl_slice kvl_slice_trim(struct kvl_slice s)
{
    while (s.n > 0 && isspace((unsigned char)s.text[s.at])) s.at++, s.n--;
    while (s.n > 0 && isspace((unsigned char)s.text[s.at + s.n - 1])) s.n--;
    return s;
}

struct kvl_slice kvl_slice_take(struct kvl_slice *rest, size_t n)
{
    struct kvl_slice taken = *rest;
    taken.n = n;
    rest->at += n;
    rest->n -= n;
    return taken;
}

char kvl_slice_first(const struct kvl_slice *s) { return s->n > 0 ? s->text[s->at] : '\0'; }

bool kvl_slice_is(const struct kvl_slice *s, const char *word)
{
    return strlen(word) == s->n && memcmp(word, s->text + s->at, s->n) == 0;
}

static bool number_text(const struct kvl_slice *s, char text[NUMBER_MAX])
{
    if (s->n >= NUMBER_MAX) return false;
    memcpy(text, s->text + s->at, s->n);
    text[s->n] = '\0';
    return true;
}

bool kvl_slice_i64(const struct kvl_slice *s, int64_t *out)
{
    char text[NUMBER_MAX];
    return number_text(s, text) && kvl_parse_i64(text, out);
}

bool kvl_slice_f64(const struct kvl_slice *s, double *out)
{
    char text[NUMBER_MAX];
    return number_text(s, text) && kvl_parse_f64(text, out);
}

const char *kvl_words_at(const char *words, size_t i, size_t *n)
{
    for (; i > 0; i--) {
        words = strchr(words, '|');
        if (words == NULL) return NULL;
        words++;
    }
    *n = strcspn(words, "|");
    return words;
}

int kvl_words_find(const char *words, const struct kvl_slice *s)
{
    size_t n;
    for (size_t i = 0;; i++) {
        const char *word = kvl_words_at(words, i, &n);
        if (word == NULL) return -1;
        if (n == s->n && memcmp(word, s->text + s->at, n) == 0) return (int)i;
    }
}

kvl_status kvl_fail_at(const struct kvl_slice *s, const char *remedy, const char *format, ...)
{
    char problem[256];
    va_list args;
    va_start(args, format);
    vsnprintf(problem, sizeof problem, format, args);
    va_end(args);
    return kvl_fail(KVL_E_USAGE, "%s: %s at character %zu of \"%s\": %s", s->who, problem, s->at + 1, s->text, remedy);
}

/* "legal are a b c (did you mean a?)" */
static kvl_status legal_words(const char *word, const char *words, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const char *name[WORDS_MAX];
    size_t n = 0;
    char *copy = NULL;
    if (*words == '\0') return kvl_text_printf(out, "there are none");
    KVL_TRY(kvl_strdup(&copy, words));
    for (char *next = copy; next != NULL && n < WORDS_MAX;) name[n++] = strsep(&next, "|");
    KVL_TRY(kvl_text_printf(out, "legal are"));
    for (size_t i = 0; i < n; i++) KVL_TRY(kvl_text_printf(out, " %s", name[i]));
    const char *closest = kvl_closest(word, name, n);
    if (closest != NULL) KVL_TRY(kvl_text_printf(out, " (did you mean %s?)", closest));
done:
    kvl_free(&copy);
    return status;
}

kvl_status kvl_fail_unknown(const struct kvl_slice *s, const char *what, const char *words)
{
    kvl_status status = KVL_OK;
    struct kvl_text remedy = {0};
    char *word = NULL;
    KVL_TRY(kvl_strndup(&word, s->text + s->at, s->n));
    KVL_TRY(legal_words(word, words, &remedy));
    status = kvl_fail_at(s, remedy.data, "unknown %s '%s'", what, word);
done:
    kvl_text_free(&remedy);
    kvl_free(&word);
    return status;
}
