/* Strings: a bounded builder and strict number parsing. */
#ifndef KVL_TEXT_H
#define KVL_TEXT_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Growing string. Zero-initialise, append, kvl_text_free. Grows up to 64 MiB. */
struct kvl_text {
    char *data; /* NUL-terminated once something was appended */
    size_t size, room;
};
kvl_status kvl_text_append(struct kvl_text *t, const char *data, size_t size);
kvl_status kvl_text_printf(struct kvl_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Bytes with U+FFFD for each that is not part of valid UTF-8, and for NUL: JSON texts end there. */
kvl_status kvl_text_append_utf8(struct kvl_text *t, const char *data, size_t size);
void kvl_text_free(struct kvl_text *t);

/* Length of the UTF-8 sequence that the byte starts; 1 for bytes that start none. */
size_t kvl_utf8_bytes(unsigned char lead);

/* The whole of `text` as a number; false if anything is left over, or out of range. */
bool kvl_parse_i64(const char *text, int64_t *out);
bool kvl_parse_f64(const char *text, double *out); /* finite only */

/* The entry of `names` closest to `word` by edit distance, or NULL: for "did you mean". At most 2 edits, 1 in a word of 3 or 4 letters,
 * none in a shorter one. */
const char *kvl_closest(const char *word, const char *const *names, size_t n);

#endif
