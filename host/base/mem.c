#include "mem.h"
#include <stdlib.h>
#include <string.h>

static long fail_countdown;

static bool allocation_fails(void) { return fail_countdown > 0 && --fail_countdown == 0; }

void kvl_mem_fail_after(long n) { fail_countdown = n; }

bool kvl_mul_size(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }


kvl_status kvl_alloc(void *out, size_t count, size_t size)
{
    void *block = NULL;
    if (!allocation_fails()) block = count == 0 ? calloc(1, 1) : calloc(count, size);
    memcpy(out, &block, sizeof block);
    if (block == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory: %zu x %zu bytes wanted", count, size);
    return KVL_OK;
}

kvl_status kvl_realloc(void *ptr, size_t count, size_t size)
{
    void *old, *grown = NULL;
    size_t bytes;
    memcpy(&old, ptr, sizeof old);
    if (kvl_mul_size(count, size, &bytes) && !allocation_fails()) grown = realloc(old, bytes == 0 ? 1 : bytes);
    if (grown == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory: %zu x %zu bytes wanted", count, size);
    memcpy(ptr, &grown, sizeof grown);
    return KVL_OK;
}

void kvl_free(void *ptr)
{
    void *block, *none = NULL;
    memcpy(&block, ptr, sizeof block);
    free(block);
    memcpy(ptr, &none, sizeof none);
}

void *kvl_mem_hook(void *context, void *block, size_t size)
{
    if (size == 0)
        kvl_free(&block);
    else if (kvl_realloc(&block, size, 1) != KVL_OK)
        return NULL;
    return block;
}

kvl_status kvl_strdup(char **out, const char *text) { return kvl_strndup(out, text, strlen(text)); }

kvl_status kvl_strndup(char **out, const char *text, size_t n)
{
    kvl_status status = kvl_alloc(out, n + 1, 1);
    if (status == KVL_OK) memcpy(*out, text, n);
    return status;
}
