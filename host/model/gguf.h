/* GGUF v2/v3 reader: read-only, memory-mapped, safe on hostile files.
 *
 * Every count, offset, length and type is checked against the file size (overflow-safe) at open; afterwards all accessors
 * return views into the map that lie inside it. An error names the file, the byte offset, what was wanted and found. */
#ifndef KVL_GGUF_H
#define KVL_GGUF_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers are the file's. Only these tensor types are accepted by kvlab (others: KVL_E_UNSUPPORTED, naming the tensor). */
enum kvl_gguf_tensor_type {
    KVL_GGUF_F32 = 0, KVL_GGUF_F16 = 1, KVL_GGUF_Q4_0 = 2, KVL_GGUF_Q4_1 = 3, KVL_GGUF_Q5_0 = 6, KVL_GGUF_Q5_1 = 7, KVL_GGUF_Q8_0 = 8,
    KVL_GGUF_Q4_K = 12, KVL_GGUF_Q5_K = 13, KVL_GGUF_Q6_K = 14, KVL_GGUF_BF16 = 30
};

struct kvl_gguf_str {
    const char *data; /* not NUL-terminated, in the map */
    size_t size;
};

/* A string of the file for a message: shortened, no control bytes. */
struct kvl_gguf_shown {
    char text[80];
};
struct kvl_gguf_shown kvl_gguf_show(struct kvl_gguf_str s);

struct kvl_gguf_tensor {
    struct kvl_gguf_str name;
    uint32_t type, n_dims;
    uint64_t dim[4];   /* dim[0] = elements of a row (contiguous); unused ones are 1 */
    uint64_t n_bytes;
    const uint8_t *data; /* in the map, at a multiple of 8 */
};

struct kvl_gguf;
kvl_status kvl_gguf_open(const char *path, struct kvl_gguf **out);
void kvl_gguf_close(struct kvl_gguf **gguf);
const char *kvl_gguf_path(const struct kvl_gguf *gguf);

/* Metadata. get_*: false if the key is absent; a present key of another type is KVL_E_FORMAT through kvl_gguf_need_*.
 * Any integer type that fits is accepted where an integer is wanted, f32 and f64 where a float is. */
bool kvl_gguf_has(const struct kvl_gguf *gguf, const char *key);
bool kvl_gguf_get_u64(const struct kvl_gguf *gguf, const char *key, uint64_t *out);
bool kvl_gguf_get_f64(const struct kvl_gguf *gguf, const char *key, double *out);
bool kvl_gguf_get_bool(const struct kvl_gguf *gguf, const char *key, bool *out);
bool kvl_gguf_get_str(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str *out);
kvl_status kvl_gguf_need_u64(const struct kvl_gguf *gguf, const char *key, uint64_t min, uint64_t max, uint64_t *out);
kvl_status kvl_gguf_need_f64(const struct kvl_gguf *gguf, const char *key, double *out);
kvl_status kvl_gguf_need_str(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str *out);

/* Arrays. n elements; false if absent or of another element type. Strings are walked once into a table (free with kvl_free). */
kvl_status kvl_gguf_need_str_array(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str **out, uint64_t *n);
bool kvl_gguf_get_i32_array(const struct kvl_gguf *gguf, const char *key, const void **unaligned_i32, uint64_t *n); /* u32 accepted */
bool kvl_gguf_get_f32_array(const struct kvl_gguf *gguf, const char *key, const void **unaligned_f32, uint64_t *n);

uint64_t kvl_gguf_n_tensors(const struct kvl_gguf *gguf);
const struct kvl_gguf_tensor *kvl_gguf_tensor_at(const struct kvl_gguf *gguf, uint64_t i);
/* NULL if absent. */
const struct kvl_gguf_tensor *kvl_gguf_tensor_find(const struct kvl_gguf *gguf, const char *name);

#endif
