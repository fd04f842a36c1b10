#include "text.h"
#include "mem.h"
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = 64 << 20 };

static kvl_status reserve(struct kvl_text *t, size_t extra)
{
    const size_t wanted = t->size + extra + 1;
    if (wanted > TEXT_MAX) return kvl_fail(KVL_E_MEMORY, "text grows beyond %d bytes", TEXT_MAX);
    if (wanted <= t->room) return KVL_OK;
    const size_t room = wanted < 256 ? 256 : wanted + wanted / 2;
    kvl_status status = kvl_realloc(&t->data, room, 1);
    if (status == KVL_OK) t->room = room;
    return status;
}

kvl_status kvl_text_append(struct kvl_text *t, const char *data, size_t size)
{
    kvl_status status = reserve(t, size);
    if (status != KVL_OK) return status;
    memcpy(t->data + t->size, data, size);
    t->size += size;
    t->data[t->size] = '\0';
    return KVL_OK;
}

kvl_status kvl_text_printf(struct kvl_text *t, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    const int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    kvl_status status = n < 0 ? kvl_fail(KVL_E_USAGE, "bad format") : reserve(t, (size_t)n);
    if (status == KVL_OK) {
        vsnprintf(t->data + t->size, (size_t)n + 1, format, again);
        t->size += (size_t)n;
    }
    va_end(again);
    return status;
}

void kvl_text_free(struct kvl_text *t)
{
    kvl_free(&t->data);
    t->size = t->room = 0;
}

bool kvl_parse_i64(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0) return false;
    *out = value;
    return true;
}

bool kvl_parse_f64(const char *text, double *out)
{
    char *end;
    errno = 0;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value)) return false;
    *out = value;
    return true;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Letters inserted, removed, replaced, or swapped with their neighbour (optimal string alignment). */
static size_t edit_distance(const char *a, const char *b)
{
    enum { LONGEST = 63 };
    uint8_t d[LONGEST + 1][LONGEST + 1]; /* [i][j]: of the first i letters of a and j of b */
    const size_t na = strlen(a), nb = strlen(b);
    if (na > LONGEST || nb > LONGEST) return LONGEST;
    for (size_t i = 0; i <= na; i++)
        for (size_t j = 0; j <= nb; j++) {
            size_t edits = i + j; /* right in the first row and column */
            if (i > 0 && j > 0) edits = least(least(d[i - 1][j], d[i][j - 1]) + 1, d[i - 1][j - 1] + (size_t)(a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) edits = least(edits, d[i - 2][j - 2] + 1u);
            d[i][j] = (uint8_t)edits;
        }
    return d[na][nb];
}

const char *kvl_closest(const char *word, const char *const *names, size_t n)
{
    const char *best = NULL;
    const size_t letters = strlen(word);
    size_t best_distance = letters >= 5 ? 3 : letters >= 3 ? 2 : 0; /* more edits leave too little of the word */
    for (size_t i = 0; i < n; i++) {
        const size_t d = edit_distance(word, names[i]);
        if (d < best_distance) {
            best_distance = d;
            best = names[i];
        }
    }
    return best;
}

size_t kvl_utf8_bytes(unsigned char lead) { return lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1; }

/* Bytes of the valid UTF-8 sequence at s (RFC 3629), 0 if there is none. NUL counts as none: JSON texts end there. */
static size_t valid_sequence(const unsigned char *s, size_t n)
{
    const size_t want = kvl_utf8_bytes(s[0]);
    if (want == 1) return s[0] != 0 && s[0] < 0x80 ? 1 : 0;
    if (want > n) return 0;
    uint32_t code = s[0] & (0x7fu >> want);
    for (size_t i = 1; i < want; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (s[i] & 0x3f);
    }
    const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    return code >= least[want] && code <= 0x10ffff && !surrogate ? want : 0;
}

kvl_status kvl_text_append_utf8(struct kvl_text *t, const char *data, size_t size)
{
    kvl_status status = kvl_text_append(t, "", 0);
    for (size_t i = 0; i < size && status == KVL_OK;) {
        const size_t n = valid_sequence((const unsigned char *)data + i, size - i);
        status = n ? kvl_text_append(t, data + i, n) : kvl_text_append(t, "\xef\xbf\xbd", 3);
        i += n ? n : 1;
    }
    return status;
}
