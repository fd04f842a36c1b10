/* Writes GGUF files, right and wrong ones, for tests: every field is the caller's. Include after cmocka.h. */
#ifndef KVL_TEST_GGUF_WRITER_H
#define KVL_TEST_GGUF_WRITER_H
#include "text.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GW_U8, GW_I8, GW_U16, GW_I16, GW_U32, GW_I32, GW_F32, GW_BOOL, GW_STRING, GW_ARRAY, GW_U64, GW_I64, GW_F64 };

struct gguf_writer {
    uint32_t version;
    uint64_t n_keys, n_tensors, alignment;
    struct kvl_text keys, tensors, data;
};

static inline void gw_bytes(struct kvl_text *t, const void *data, size_t size)
{
    if (size > 0) assert_int_equal(kvl_text_append(t, data, size), KVL_OK);
}
static inline void gw_u32(struct kvl_text *t, uint32_t v) { gw_bytes(t, &v, sizeof v); }
static inline void gw_u64(struct kvl_text *t, uint64_t v) { gw_bytes(t, &v, sizeof v); }
static inline void gw_str(struct kvl_text *t, const char *s)
{
    gw_u64(t, strlen(s));
    gw_bytes(t, s, strlen(s));
}

static inline struct gguf_writer gw_new(void) { return (struct gguf_writer){.version = 3, .alignment = 32}; }

static inline void gw_free(struct gguf_writer *w)
{
    kvl_text_free(&w->keys);
    kvl_text_free(&w->tensors);
    kvl_text_free(&w->data);
}

/* A key whose value's bytes are given. */
static inline void gw_key(struct gguf_writer *w, const char *key, uint32_t type, const void *value, size_t size)
{
    gw_str(&w->keys, key);
    gw_u32(&w->keys, type);
    gw_bytes(&w->keys, value, size);
    w->n_keys++;
}
static inline void gw_key_u32(struct gguf_writer *w, const char *key, uint32_t v) { gw_key(w, key, GW_U32, &v, sizeof v); }
static inline void gw_key_f32(struct gguf_writer *w, const char *key, float v) { gw_key(w, key, GW_F32, &v, sizeof v); }
static inline void gw_key_bool(struct gguf_writer *w, const char *key, uint8_t v) { gw_key(w, key, GW_BOOL, &v, sizeof v); }
static inline void gw_key_str(struct gguf_writer *w, const char *key, const char *v)
{
    gw_key(w, key, GW_STRING, NULL, 0);
    gw_str(&w->keys, v);
}
/* The head of an array; the caller appends the elements to w->keys. */
static inline void gw_key_array(struct gguf_writer *w, const char *key, uint32_t element, uint64_t n)
{
    gw_key(w, key, GW_ARRAY, &element, sizeof element);
    gw_u64(&w->keys, n);
}

/* A tensor entry with any offset. */
static inline void gw_tensor_at(struct gguf_writer *w, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims,
                                uint64_t offset)
{
    gw_str(&w->tensors, name);
    gw_u32(&w->tensors, n_dims);
    for (uint32_t d = 0; d < n_dims; d++) gw_u64(&w->tensors, dims[d]);
    gw_u32(&w->tensors, type);
    gw_u64(&w->tensors, offset);
    w->n_tensors++;
}

static inline void gw_pad(struct kvl_text *t, size_t start, uint64_t alignment)
{
    while ((start + t->size) % alignment != 0) gw_bytes(t, "", 1);
}

/* A tensor with its data: n_bytes at `data`. */
static inline void gw_tensor(struct gguf_writer *w, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims,
                             const void *data, size_t n_bytes)
{
    gw_pad(&w->data, 0, w->alignment);
    gw_tensor_at(w, name, type, n_dims, dims, w->data.size);
    gw_bytes(&w->data, data, n_bytes);
}

/* The file's bytes. *head: where the data begin. */
static inline struct kvl_text gw_file(const struct gguf_writer *w, size_t *head)
{
    struct kvl_text file = {0};
    gw_bytes(&file, "GGUF", 4);
    gw_u32(&file, w->version);
    gw_u64(&file, w->n_tensors);
    gw_u64(&file, w->n_keys);
    gw_bytes(&file, w->keys.data, w->keys.size);
    gw_bytes(&file, w->tensors.data, w->tensors.size);
    if (w->n_tensors > 0) gw_pad(&file, 0, w->alignment);
    *head = file.size;
    gw_bytes(&file, w->data.data, w->data.size);
    return file;
}

/* A file of its own in $TMPDIR or /tmp, made by gw_temporary, gone after gw_remove. */
struct gw_path {
    char text[256];
};
static inline struct gw_path gw_temporary(void)
{
    struct gw_path path;
    const char *folder = getenv("TMPDIR");
    snprintf(path.text, sizeof path.text, "%s/kvlab-test-XXXXXX", folder != NULL ? folder : "/tmp");
    const int fd = mkstemp(path.text);
    assert_true(fd >= 0);
    close(fd);
    return path;
}
static inline void gw_write(const struct gw_path *path, const void *data, size_t size)
{
    const int fd = open(path->text, O_WRONLY); /* not O_TRUNC: ext4 then flushes to the disk at close */
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, size), size);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(close(fd), 0);
}
static inline void gw_remove(const struct gw_path *path) { unlink(path->text); }

#endif
