/* Checked host memory. All host allocations of kvlab go through these, so that a test can fail the n-th one. */
#ifndef KVL_MEM_H
#define KVL_MEM_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>

/* Zeroed array of `count` elements of `size` bytes into *out (a T **). KVL_E_MEMORY on failure or overflow. count 0 gives one byte. */
kvl_status kvl_alloc(void *out, size_t count, size_t size);

/* Grows *ptr (a T **) to `count` elements of `size` bytes; contents kept, new bytes undefined. On failure *ptr is unchanged. */
kvl_status kvl_realloc(void *ptr, size_t count, size_t size);

/* Frees *ptr (a T **) and writes NULL there. NULL inside is fine. */
void kvl_free(void *ptr);

/* The two above in the shape that libraries ask for: resizes `block` (NULL = new), frees it for size 0. NULL on failure. */
void *kvl_mem_hook(void *context, void *block, size_t size);

/* Copy of a string into *out; free with kvl_free. */
kvl_status kvl_strdup(char **out, const char *text);
kvl_status kvl_strndup(char **out, const char *text, size_t n);

/* Test hook: the n-th allocation from now fails (1 = the next); 0 switches it off. */
void kvl_mem_fail_after(long n);

/* a * b into *out; false on overflow. */
bool kvl_mul_size(size_t a, size_t b, size_t *out);

#endif
