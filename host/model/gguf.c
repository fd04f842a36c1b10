/* GGUF reader. Format: docs/gguf.md of the ggml project, versions 2 and 3 (they differ in nothing a little-endian reader sees).
 *
 *   "GGUF" | u32 version | u64 n_tensors | u64 n_keys | n_keys x (str key, u32 type, value) |
 *   n_tensors x (str name, u32 n_dims, u64 dim[n_dims], u32 type, u64 offset) | padding to the alignment | tensor data
 *   str = u64 size, bytes.   array value = u32 element type, u64 n, elements.
 *
 * A cursor walks the head once at open and is the only code that moves through unchecked bytes: take() compares each size with what
 * is left of the file before anything is read. Counts are checked against the smallest size of what they count before memory is
 * reserved for them. Keys and tensors are found through sorted tables, whose sorting also finds duplicates. */
#include "gguf.h"
#include "mem.h"
#include "quant.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers in the map are read as they lie there");

enum { MIN_KEY_BYTES = 8 + 4 + 1, MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8, DEFAULT_ALIGNMENT = 32, MAX_ALIGNMENT = 1 << 30 };

enum value_type { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, N_VALUE_TYPES };

static const struct {
    const char *name;
    uint32_t bytes; /* 0 = no fixed size */
    bool is_integer, is_signed;
} value_types[N_VALUE_TYPES] = {
    [U8] = {"u8", 1, true, false},
    [I8] = {"i8", 1, true, true},
    [U16] = {"u16", 2, true, false},
    [I16] = {"i16", 2, true, true},
    [U32] = {"u32", 4, true, false},
    [I32] = {"i32", 4, true, true},
    [F32] = {"f32", 4},
    [BOOL] = {"bool", 1},
    [STRING] = {"string", 0},
    [ARRAY] = {"array", 0},
    [U64] = {"u64", 8, true, false},
    [I64] = {"i64", 8, true, true},
    [F64] = {"f64", 8},
};

struct value {
    uint32_t type, element; /* element: of an array */
    uint64_t n;             /* elements of an array, else 1 */
    const uint8_t *data;    /* the first element */
};

/* A row of a sorted table: place of a name in the unsorted one. */
struct named {
    struct kvl_gguf_str name;
    uint64_t i;
};

struct kvl_gguf {
    char *path;
    const uint8_t *map;
    uint64_t size, alignment;
    uint64_t n_keys, n_tensors;
    struct value *values;            /* [n_keys] */
    struct kvl_gguf_tensor *tensors; /* [n_tensors] in the file's order */
    struct named *key_index, *tensor_index;
};

/* ---- walking the head ---- */

struct cursor {
    const struct kvl_gguf *gguf;
    uint64_t at; /* <= gguf->size */
};

/* "FILE: byte N: text" */
static kvl_status bad(kvl_status code, const struct kvl_gguf *gguf, uint64_t at, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static kvl_status bad(kvl_status code, const struct kvl_gguf *gguf, uint64_t at, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return kvl_fail(code, "%s: byte %" PRIu64 ": %s", gguf->path, at, text);
}

static uint64_t offset_of(const struct kvl_gguf *gguf, const void *data) { return (uint64_t)((const uint8_t *)data - gguf->map); }

struct kvl_gguf_shown kvl_gguf_show(struct kvl_gguf_str s)
{
    struct kvl_gguf_shown shown;
    size_t n = 0;
    for (; n < s.size && n < sizeof shown.text - 1; n++) shown.text[n] = s.data[n] >= ' ' && s.data[n] <= '~' ? s.data[n] : '?';
    shown.text[n] = '\0';
    return shown;
}

static kvl_status take(struct cursor *c, uint64_t size, const char *what, const uint8_t **out)
{
    const uint64_t left = c->gguf->size - c->at;
    if (size > left)
        return bad(KVL_E_FORMAT, c->gguf, c->at, "%s wants %" PRIu64 " bytes, the file has %" PRIu64 " left", what, size, left);
    *out = c->gguf->map + c->at;
    c->at += size;
    return KVL_OK;
}

static kvl_status take_number(struct cursor *c, void *out, size_t size, const char *what)
{
    const uint8_t *data = NULL;
    const kvl_status status = take(c, size, what, &data);
    if (status == KVL_OK) memcpy(out, data, size);
    return status;
}

static kvl_status take_str(struct cursor *c, const char *what, struct kvl_gguf_str *out)
{
    uint64_t size;
    const uint8_t *data = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(take_number(c, &size, sizeof size, what));
    KVL_TRY(take(c, size, what, &data));
    *out = (struct kvl_gguf_str){(const char *)data, size};
done:
    return status;
}

static kvl_status take_name(struct cursor *c, const char *what, struct kvl_gguf_str *out)
{
    const uint64_t at = c->at;
    const kvl_status status = take_str(c, what, out);
    if (status == KVL_OK && out->size == 0) return bad(KVL_E_FORMAT, c->gguf, at, "%s is empty", what);
    return status;
}

/* A count of things of at least `min_bytes` each. */
static kvl_status take_count(struct cursor *c, uint64_t min_bytes, const char *what, uint64_t *out)
{
    const uint64_t at = c->at;
    const kvl_status status = take_number(c, out, sizeof *out, what);
    if (status != KVL_OK) return status;
    const uint64_t most = (c->gguf->size - c->at) / min_bytes;
    if (*out > most)
        return bad(KVL_E_FORMAT, c->gguf, at, "%s is %" PRIu64 ", the rest of the file has room for %" PRIu64, what, *out, most);
    return KVL_OK;
}

static kvl_status take_value_type(struct cursor *c, const char *what, uint32_t *out)
{
    const uint64_t at = c->at;
    const kvl_status status = take_number(c, out, sizeof *out, what);
    if (status == KVL_OK && *out >= N_VALUE_TYPES)
        return bad(KVL_E_FORMAT, c->gguf, at, "%s is %" PRIu32 ", wanted 0 to %d", what, *out, N_VALUE_TYPES - 1);
    return status;
}

static kvl_status take_elements(struct cursor *c, uint32_t type, uint64_t n)
{
    kvl_status status = KVL_OK;
    const uint8_t *data = NULL;
    struct kvl_gguf_str text;
    if (value_types[type].bytes > 0) return take(c, n * value_types[type].bytes, "value", &data);
    for (uint64_t i = 0; i < n; i++) KVL_TRY(take_str(c, "string value", &text));
done:
    return status;
}

static kvl_status take_value(struct cursor *c, struct value *value)
{
    kvl_status status = KVL_OK;
    KVL_TRY(take_value_type(c, "value type", &value->type));
    uint32_t element = value->type;
    value->n = 1;
    if (value->type == ARRAY) {
        const uint64_t at = c->at;
        KVL_TRY(take_value_type(c, "array element type", &element));
        if (element == ARRAY)
            return bad(KVL_E_UNSUPPORTED, c->gguf, at, "an array of arrays; wanted an array of numbers or strings");
        const uint64_t min_bytes = element == STRING ? sizeof(uint64_t) : value_types[element].bytes;
        KVL_TRY(take_count(c, min_bytes, "array size", &value->n));
    }
    value->element = element;
    value->data = c->gguf->map + c->at;
    KVL_TRY(take_elements(c, element, value->n));
    if (value->type == BOOL && *value->data > 1)
        status = bad(KVL_E_FORMAT, c->gguf, c->at - 1, "a bool is %u, wanted 0 or 1", *value->data);
done:
    return status;
}

/* ---- sorted tables ---- */

static int compare_str(struct kvl_gguf_str a, struct kvl_gguf_str b)
{
    const int order = memcmp(a.data, b.data, a.size < b.size ? a.size : b.size);
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

static int compare_named(const void *a, const void *b)
{
    return compare_str(((const struct named *)a)->name, ((const struct named *)b)->name);
}

static kvl_status index_sort(const struct kvl_gguf *gguf, struct named *index, uint64_t n, const char *what)
{
    qsort(index, n, sizeof *index, compare_named);
    for (uint64_t i = 1; i < n; i++) {
        const struct kvl_gguf_str a = index[i - 1].name, b = index[i].name;
        if (compare_str(a, b) == 0)
            return bad(KVL_E_FORMAT, gguf, offset_of(gguf, a.data > b.data ? a.data : b.data),
                       "%s \"%s\" is there twice (also at byte %" PRIu64 ")", what, kvl_gguf_show(a).text,
                       offset_of(gguf, a.data < b.data ? a.data : b.data));
    }
    return KVL_OK;
}

static const struct named *index_find(const struct named *index, uint64_t n, const char *name)
{
    const struct named wanted = {{name, strlen(name)}, 0};
    return n == 0 ? NULL : bsearch(&wanted, index, n, sizeof *index, compare_named);
}

static const struct value *find_value(const struct kvl_gguf *gguf, const char *key)
{
    const struct named *row = index_find(gguf->key_index, gguf->n_keys, key);
    return row == NULL ? NULL : &gguf->values[row->i];
}

/* ---- opening ---- */

static kvl_status map_file(struct kvl_gguf *gguf)
{
    kvl_status status = KVL_OK;
    struct stat info;
    const int fd = open(gguf->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return kvl_fail(KVL_E_IO, "%s: cannot open for reading: %s", gguf->path, strerror(errno));
    if (fstat(fd, &info) != 0) {
        status = kvl_fail(KVL_E_IO, "%s: fstat failed: %s", gguf->path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        status = kvl_fail(KVL_E_IO, "%s: not a regular file", gguf->path);
    } else if (info.st_size == 0) {
        status = kvl_fail(KVL_E_FORMAT, "%s: byte 0: the file is empty, wanted a GGUF file", gguf->path);
    } else {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            status = kvl_fail(KVL_E_IO, "%s: mmap failed: %s", gguf->path, strerror(errno));
        } else {
            gguf->map = map;
            gguf->size = (uint64_t)info.st_size;
        }
    }
    close(fd);
    return status;
}

static kvl_status read_start(struct cursor *c)
{
    kvl_status status = KVL_OK;
    const uint8_t *magic = NULL;
    uint32_t version;
    KVL_TRY(take(c, 4, "the magic \"GGUF\"", &magic));
    if (memcmp(magic, "GGUF", 4) != 0)
        return bad(KVL_E_FORMAT, c->gguf, 0, "wanted \"GGUF\", found bytes %02x %02x %02x %02x", magic[0], magic[1], magic[2],
                   magic[3]);
    KVL_TRY(take_number(c, &version, sizeof version, "the version"));
    if (version != 2 && version != 3)
        return bad(KVL_E_UNSUPPORTED, c->gguf, 4, "GGUF version is %" PRIu32 ", wanted 2 or 3%s", version,
                   (version & 0xffff) == 0 && version != 0 ? " (a big-endian file? convert it to little-endian)" : "");
done:
    return status;
}

static kvl_status read_keys(struct kvl_gguf *gguf, struct cursor *c)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&gguf->values, gguf->n_keys, sizeof *gguf->values));
    KVL_TRY(kvl_alloc(&gguf->key_index, gguf->n_keys, sizeof *gguf->key_index));
    for (uint64_t i = 0; i < gguf->n_keys; i++) {
        gguf->key_index[i].i = i;
        KVL_TRY(take_name(c, "key", &gguf->key_index[i].name));
        KVL_TRY(take_value(c, &gguf->values[i]));
    }
    KVL_TRY(index_sort(gguf, gguf->key_index, gguf->n_keys, "key"));
done:
    return status;
}

static kvl_status read_alignment(struct kvl_gguf *gguf)
{
    static const char key[] = "general.alignment";
    gguf->alignment = DEFAULT_ALIGNMENT;
    if (!kvl_gguf_has(gguf, key)) return KVL_OK;
    const kvl_status status = kvl_gguf_need_u64(gguf, key, 8, MAX_ALIGNMENT, &gguf->alignment);
    if (status == KVL_OK && (gguf->alignment & (gguf->alignment - 1)) != 0)
        return bad(KVL_E_FORMAT, gguf, offset_of(gguf, find_value(gguf, key)->data), "%s is %" PRIu64 ", wanted a power of two",
                   key, gguf->alignment);
    return status;
}

/* Where a tensor's data lie, counted from the first byte of the data; checked when that byte is known. */
struct place {
    uint64_t offset, field_at; /* field_at: byte of the offset field */
};

static kvl_status unknown_type(const struct cursor *c, uint64_t at, const struct kvl_gguf_tensor *t)
{
    char known[256];
    size_t used = 0;
    for (size_t i = 0; i < kvl_n_quant_types && used < sizeof known; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, " %s", kvl_quant_types[i].name);
    return bad(KVL_E_UNSUPPORTED, c->gguf, at, "tensor \"%s\" has type %" PRIu32 ", kvlab reads%s", kvl_gguf_show(t->name).text,
               t->type, known);
}

/* n_bytes from type and dimensions. */
static kvl_status measure_tensor(const struct cursor *c, uint64_t dims_at, uint64_t type_at, struct kvl_gguf_tensor *t)
{
    const struct kvl_quant_type *type = kvl_quant_type(t->type);
    if (type == NULL) return unknown_type(c, type_at, t);
    if (t->dim[0] % type->block != 0)
        return bad(KVL_E_FORMAT, c->gguf, dims_at,
                   "tensor \"%s\": a row has %" PRIu64 " elements, wanted a multiple of %" PRIu32 " (one block of %s)",
                   kvl_gguf_show(t->name).text, t->dim[0], type->block, type->name);
    size_t bytes = t->dim[0] / type->block;
    bool fits = kvl_mul_size(bytes, type->bytes, &bytes);
    for (uint32_t d = 1; d < 4 && fits; d++) fits = kvl_mul_size(bytes, t->dim[d], &bytes);
    if (!fits || bytes > c->gguf->size)
        return bad(KVL_E_FORMAT, c->gguf, dims_at,
                   "tensor \"%s\": [%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64 "] of %s is larger than the file",
                   kvl_gguf_show(t->name).text, t->dim[0], t->dim[1], t->dim[2], t->dim[3], type->name);
    t->n_bytes = bytes;
    return KVL_OK;
}

static kvl_status read_tensor(struct cursor *c, struct kvl_gguf_tensor *t, struct place *place)
{
    kvl_status status = KVL_OK;
    KVL_TRY(take_name(c, "tensor name", &t->name));
    const uint64_t n_dims_at = c->at, dims_at = n_dims_at + sizeof t->n_dims;
    KVL_TRY(take_number(c, &t->n_dims, sizeof t->n_dims, "number of dimensions"));
    if (t->n_dims < 1 || t->n_dims > 4)
        return bad(KVL_E_FORMAT, c->gguf, n_dims_at, "tensor \"%s\" has %" PRIu32 " dimensions, wanted 1 to 4",
                   kvl_gguf_show(t->name).text, t->n_dims);
    for (uint32_t d = 0; d < 4; d++) {
        t->dim[d] = 1;
        if (d < t->n_dims) KVL_TRY(take_number(c, &t->dim[d], sizeof t->dim[d], "tensor dimension"));
        if (t->dim[d] == 0)
            return bad(KVL_E_FORMAT, c->gguf, c->at - sizeof t->dim[d], "tensor \"%s\": dimension %" PRIu32 " is 0",
                       kvl_gguf_show(t->name).text, d);
    }
    const uint64_t type_at = c->at;
    KVL_TRY(take_number(c, &t->type, sizeof t->type, "tensor type"));
    KVL_TRY(measure_tensor(c, dims_at, type_at, t));
    place->field_at = c->at;
    KVL_TRY(take_number(c, &place->offset, sizeof place->offset, "tensor offset"));
done:
    return status;
}

static kvl_status place_tensor(const struct kvl_gguf *gguf, uint64_t data_at, const struct place *place, struct kvl_gguf_tensor *t)
{
    if (place->offset % gguf->alignment != 0)
        return bad(KVL_E_FORMAT, gguf, place->field_at,
                   "tensor \"%s\": offset %" PRIu64 " is not a multiple of the alignment %" PRIu64, kvl_gguf_show(t->name).text,
                   place->offset, gguf->alignment);
    const uint64_t room = gguf->size > data_at ? gguf->size - data_at : 0;
    if (place->offset > room || t->n_bytes > room - place->offset)
        return bad(KVL_E_FORMAT, gguf, place->field_at,
                   "tensor \"%s\" wants %" PRIu64 " bytes at %" PRIu64 " of the data (byte %" PRIu64 "), the data have %" PRIu64
                   " bytes; is the file complete?",
                   kvl_gguf_show(t->name).text, t->n_bytes, place->offset, data_at, room);
    t->data = gguf->map + data_at + place->offset;
    return KVL_OK;
}

static kvl_status read_tensors(struct kvl_gguf *gguf, struct cursor *c)
{
    kvl_status status = KVL_OK;
    struct place *places = NULL;
    KVL_TRY(kvl_alloc(&gguf->tensors, gguf->n_tensors, sizeof *gguf->tensors));
    KVL_TRY(kvl_alloc(&gguf->tensor_index, gguf->n_tensors, sizeof *gguf->tensor_index));
    KVL_TRY(kvl_alloc(&places, gguf->n_tensors, sizeof *places));
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        KVL_TRY(read_tensor(c, &gguf->tensors[i], &places[i]));
        gguf->tensor_index[i] = (struct named){gguf->tensors[i].name, i};
    }
    const uint64_t data_at = (c->at + gguf->alignment - 1) & ~(gguf->alignment - 1);
    for (uint64_t i = 0; i < gguf->n_tensors; i++) KVL_TRY(place_tensor(gguf, data_at, &places[i], &gguf->tensors[i]));
    KVL_TRY(index_sort(gguf, gguf->tensor_index, gguf->n_tensors, "tensor"));
done:
    kvl_free(&places);
    return status;
}

kvl_status kvl_gguf_open(const char *path, struct kvl_gguf **out)
{
    kvl_status status = KVL_OK;
    struct kvl_gguf *gguf = NULL;
    KVL_TRY(kvl_alloc(&gguf, 1, sizeof *gguf));
    KVL_TRY(kvl_strdup(&gguf->path, path));
    KVL_TRY(map_file(gguf));
    struct cursor cursor = {gguf, 0};
    uint64_t n_tensors;
    KVL_TRY(read_start(&cursor));
    KVL_TRY(take_count(&cursor, MIN_TENSOR_BYTES, "the number of tensors", &n_tensors));
    KVL_TRY(take_count(&cursor, MIN_KEY_BYTES, "the number of keys", &gguf->n_keys));
    KVL_TRY(read_keys(gguf, &cursor));
    KVL_TRY(read_alignment(gguf));
    gguf->n_tensors = n_tensors;
    KVL_TRY(read_tensors(gguf, &cursor));
    *out = gguf;
    gguf = NULL;
done:
    kvl_gguf_close(&gguf);
    return status;
}

void kvl_gguf_close(struct kvl_gguf **gguf)
{
    struct kvl_gguf *g = *gguf;
    if (g == NULL) return;
    if (g->map != NULL) munmap((void *)(uintptr_t)g->map, g->size);
    kvl_free(&g->values);
    kvl_free(&g->tensors);
    kvl_free(&g->key_index);
    kvl_free(&g->tensor_index);
    kvl_free(&g->path);
    kvl_free(gguf);
}

const char *kvl_gguf_path(const struct kvl_gguf *gguf) { return gguf->path; }

/* ---- metadata ---- */

static struct kvl_gguf_str str_at(const uint8_t *data)
{
    uint64_t size;
    memcpy(&size, data, sizeof size);
    return (struct kvl_gguf_str){(const char *)data + sizeof size, size};
}

static const struct value *find_scalar(const struct kvl_gguf *gguf, const char *key, uint32_t type)
{
    const struct value *value = find_value(gguf, key);
    return value != NULL && value->type == type ? value : NULL;
}

bool kvl_gguf_has(const struct kvl_gguf *gguf, const char *key) { return find_value(gguf, key) != NULL; }

bool kvl_gguf_get_u64(const struct kvl_gguf *gguf, const char *key, uint64_t *out)
{
    const struct value *value = find_value(gguf, key);
    if (value == NULL || !value_types[value->type].is_integer) return false;
    const uint32_t bytes = value_types[value->type].bytes;
    uint64_t number = 0;
    memcpy(&number, value->data, bytes);
    if (value_types[value->type].is_signed && number >> (8 * bytes - 1) != 0) return false;
    *out = number;
    return true;
}

bool kvl_gguf_get_f64(const struct kvl_gguf *gguf, const char *key, double *out)
{
    const struct value *value = find_value(gguf, key);
    if (value == NULL || (value->type != F32 && value->type != F64)) return false;
    float single;
    if (value->type == F64) {
        memcpy(out, value->data, sizeof *out);
    } else {
        memcpy(&single, value->data, sizeof single);
        *out = single;
    }
    return true;
}

bool kvl_gguf_get_bool(const struct kvl_gguf *gguf, const char *key, bool *out)
{
    const struct value *value = find_scalar(gguf, key, BOOL);
    if (value == NULL) return false;
    *out = *value->data != 0;
    return true;
}

bool kvl_gguf_get_str(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str *out)
{
    const struct value *value = find_scalar(gguf, key, STRING);
    if (value == NULL) return false;
    *out = str_at(value->data);
    return true;
}

/* A wanted value that the get_ function did not give: absent, or of another type. */
static kvl_status not_given(const struct kvl_gguf *gguf, const char *key, const char *wanted)
{
    const struct value *value = find_value(gguf, key);
    if (value == NULL) return kvl_fail(KVL_E_FORMAT, "%s: key \"%s\" is missing, wanted %s", gguf->path, key, wanted);
    return bad(KVL_E_FORMAT, gguf, offset_of(gguf, value->data), "key \"%s\": wanted %s, found %s%s", key, wanted,
               value->type == ARRAY ? "an array of " : "", value_types[value->element].name);
}

kvl_status kvl_gguf_need_u64(const struct kvl_gguf *gguf, const char *key, uint64_t min, uint64_t max, uint64_t *out)
{
    uint64_t number;
    if (!kvl_gguf_get_u64(gguf, key, &number)) return not_given(gguf, key, "an integer that is not negative");
    if (number < min || number > max)
        return bad(KVL_E_FORMAT, gguf, offset_of(gguf, find_value(gguf, key)->data),
                   "key \"%s\" is %" PRIu64 ", wanted %" PRIu64 " to %" PRIu64, key, number, min, max);
    *out = number;
    return KVL_OK;
}

kvl_status kvl_gguf_need_f64(const struct kvl_gguf *gguf, const char *key, double *out)
{
    double number;
    if (!kvl_gguf_get_f64(gguf, key, &number)) return not_given(gguf, key, "f32 or f64");
    if (!isfinite(number))
        return bad(KVL_E_FORMAT, gguf, offset_of(gguf, find_value(gguf, key)->data), "key \"%s\" is %g, wanted a finite number",
                   key, number);
    *out = number;
    return KVL_OK;
}

kvl_status kvl_gguf_need_str(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str *out)
{
    return kvl_gguf_get_str(gguf, key, out) ? KVL_OK : not_given(gguf, key, "a string");
}

static const struct value *find_array(const struct kvl_gguf *gguf, const char *key, uint32_t element)
{
    const struct value *value = find_scalar(gguf, key, ARRAY);
    return value != NULL && value->element == element ? value : NULL;
}

kvl_status kvl_gguf_need_str_array(const struct kvl_gguf *gguf, const char *key, struct kvl_gguf_str **out, uint64_t *n)
{
    const struct value *value = find_array(gguf, key, STRING);
    if (value == NULL) return not_given(gguf, key, "an array of strings");
    const kvl_status status = kvl_alloc(out, value->n, sizeof **out);
    if (status != KVL_OK) return status;
    const uint8_t *at = value->data;
    for (uint64_t i = 0; i < value->n; i++) {
        (*out)[i] = str_at(at);
        at += sizeof(uint64_t) + (*out)[i].size;
    }
    *n = value->n;
    return KVL_OK;
}

static bool give_array(const struct value *value, const void **data, uint64_t *n)
{
    if (value == NULL) return false;
    *data = value->data;
    *n = value->n;
    return true;
}

bool kvl_gguf_get_i32_array(const struct kvl_gguf *gguf, const char *key, const void **unaligned_i32, uint64_t *n)
{
    const struct value *value = find_array(gguf, key, I32);
    return give_array(value != NULL ? value : find_array(gguf, key, U32), unaligned_i32, n);
}

bool kvl_gguf_get_f32_array(const struct kvl_gguf *gguf, const char *key, const void **unaligned_f32, uint64_t *n)
{
    return give_array(find_array(gguf, key, F32), unaligned_f32, n);
}

/* ---- tensors ---- */

uint64_t kvl_gguf_n_tensors(const struct kvl_gguf *gguf) { return gguf->n_tensors; }

const struct kvl_gguf_tensor *kvl_gguf_tensor_at(const struct kvl_gguf *gguf, uint64_t i)
{
    return i < gguf->n_tensors ? &gguf->tensors[i] : NULL;
}

const struct kvl_gguf_tensor *kvl_gguf_tensor_find(const struct kvl_gguf *gguf, const char *name)
{
    const struct named *row = index_find(gguf->tensor_index, gguf->n_tensors, name);
    return row == NULL ? NULL : &gguf->tensors[row->i];
}
