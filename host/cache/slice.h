/* A piece of a text the user typed. It remembers the whole text, so that an error can name the character it points at. */
#ifndef KVL_SLICE_H
#define KVL_SLICE_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvl_slice {
    const char *who, *text; /* who said it ("--kv"), and the whole text; both borrowed */
    size_t at, n;           /* the piece: text[at] .. text[at + n - 1] */
};

struct kvl_slice kvl_slice_of(const char *who, const char *text);  /* all of text */
struct kvl_slice kvl_slice_trim(struct kvl_slice s);               /* without the white space around it */
struct kvl_slice kvl_slice_take(struct kvl_slice *rest, size_t n); /* the first n characters, which leave rest */
char kvl_slice_first(const struct kvl_slice *s);                   /* NUL if empty */
bool kvl_slice_is(const struct kvl_slice *s, const char *word);
bool kvl_slice_i64(const struct kvl_slice *s, int64_t *out);
bool kvl_slice_f64(const struct kvl_slice *s, double *out);

/* Lists of words are written "a|b|c". Index of the word that s is, or -1; and the i-th word (n = its length), NULL behind the last.
 */
int kvl_words_find(const char *words, const struct kvl_slice *s);
const char *kvl_words_at(const char *words, size_t i, size_t *n);

/* KVL_E_USAGE with: who: <format...> at character N of "text": remedy */
kvl_status kvl_fail_at(const struct kvl_slice *s, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* unknown <what> 'word' ...: legal are <words> (did you mean <the closest>?) */
kvl_status kvl_fail_unknown(const struct kvl_slice *s, const char *what, const char *words);

#endif
