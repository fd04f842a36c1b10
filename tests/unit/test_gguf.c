/* The GGUF reader on right files, on every way a file can be wrong, and on a real model file where there is one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "gguf.h"
#include "gguf_writer.h"
#include "mem.h"

static struct gw_path path;

static int make_path(void **state)
{
    path = gw_temporary();
    return 0;
}

static int remove_path(void **state)
{
    gw_remove(&path);
    return 0;
}

static struct kvl_gguf *open_good(const struct gguf_writer *w)
{
    size_t head;
    struct kvl_text file = gw_file(w, &head);
    struct kvl_gguf *gguf = NULL;
    gw_write(&path, file.data, file.size);
    kvl_error_clear();
    if (kvl_gguf_open(path.text, &gguf) != KVL_OK) fail_msg("%s", kvl_error_text());
    kvl_text_free(&file);
    return gguf;
}

static void assert_str(struct kvl_gguf_str s, const char *wanted)
{
    assert_int_equal(s.size, strlen(wanted));
    assert_memory_equal(s.data, wanted, s.size);
}

static void assert_error(kvl_status got, kvl_status wanted, const char *needle)
{
    if (got != wanted || strstr(kvl_error_text(), needle) == NULL)
        fail_msg("wanted status %d and \"%s\", found %d and \"%s\"", wanted, needle, got, kvl_error_text());
    kvl_error_clear();
}

/* ---- right files ---- */

static void write_scalars(struct gguf_writer *w)
{
    gw_key(w, "u8", GW_U8, &(uint8_t){200}, 1);
    gw_key(w, "i8", GW_I8, &(int8_t){-100}, 1);
    gw_key(w, "u16", GW_U16, &(uint16_t){60000}, 2);
    gw_key(w, "i16", GW_I16, &(int16_t){30000}, 2);
    gw_key_u32(w, "u32", 4000000000u);
    gw_key(w, "i32", GW_I32, &(int32_t){2000000000}, 4);
    gw_key(w, "u64", GW_U64, &(uint64_t){UINT64_MAX}, 8);
    gw_key(w, "i64", GW_I64, &(int64_t){INT64_MIN}, 8);
    gw_key_f32(w, "f32", 0.5f);
    gw_key(w, "f64", GW_F64, &(double){-1e300}, 8);
    gw_key_f32(w, "inf", (float)(1e300 * 1e10));
    gw_key_bool(w, "yes", 1);
    gw_key_bool(w, "no", 0);
    gw_key_str(w, "text", "words");
    gw_key_str(w, "empty", "");
}

static void scalars_are_read(void **state)
{
    struct gguf_writer w = gw_new();
    write_scalars(&w);
    struct kvl_gguf *g = open_good(&w);
    static const struct {
        const char *key;
        bool given;
        uint64_t value;
    } integers[] = {
        {"u8", true, 200},          {"i8", false},  {"u16", true, 60000},      {"i16", true, 30000}, {"u32", true, 4000000000u},
        {"i32", true, 2000000000u}, {"i64", false}, {"u64", true, UINT64_MAX}, {"f32", false},       {"absent", false}};
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        uint64_t v = 0;
        assert_int_equal(kvl_gguf_get_u64(g, integers[i].key, &v), integers[i].given);
        assert_int_equal(v, integers[i].value);
    }
    double real;
    assert_true(kvl_gguf_get_f64(g, "f32", &real) && real == 0.5);
    assert_true(kvl_gguf_get_f64(g, "f64", &real) && real == -1e300);
    assert_false(kvl_gguf_get_f64(g, "u8", &real));
    bool flag;
    assert_true(kvl_gguf_get_bool(g, "yes", &flag) && flag);
    assert_true(kvl_gguf_get_bool(g, "no", &flag) && !flag);
    assert_false(kvl_gguf_get_bool(g, "u8", &flag));
    struct kvl_gguf_str text;
    assert_true(kvl_gguf_get_str(g, "text", &text));
    assert_str(text, "words");
    assert_true(kvl_gguf_get_str(g, "empty", &text));
    assert_str(text, "");
    assert_true(kvl_gguf_has(g, "i64") && !kvl_gguf_has(g, "i6") && !kvl_gguf_has(g, ""));
    kvl_gguf_close(&g);
    assert_null(g);
    gw_free(&w);
}

static void needed_keys_say_what_is_wrong(void **state)
{
    struct gguf_writer w = gw_new();
    write_scalars(&w);
    gw_key_array(&w, "array", GW_U8, 0);
    struct kvl_gguf *g = open_good(&w);
    uint64_t n;
    double real;
    struct kvl_gguf_str text;
    assert_int_equal(kvl_gguf_need_u64(g, "u8", 200, 200, &n), KVL_OK);
    assert_error(kvl_gguf_need_u64(g, "u8", 0, 199, &n), KVL_E_FORMAT, "key \"u8\" is 200, wanted 0 to 199");
    assert_error(kvl_gguf_need_u64(g, "u8", 201, 300, &n), KVL_E_FORMAT, "wanted 201 to 300");
    assert_error(kvl_gguf_need_u64(g, "none", 0, 9, &n), KVL_E_FORMAT, "key \"none\" is missing");
    assert_error(kvl_gguf_need_u64(g, "text", 0, 9, &n), KVL_E_FORMAT, "found string");
    assert_error(kvl_gguf_need_u64(g, "i8", 0, 9, &n), KVL_E_FORMAT, "wanted an integer that is not negative, found i8");
    assert_error(kvl_gguf_need_u64(g, "array", 0, 9, &n), KVL_E_FORMAT, "an array of u8");
    assert_int_equal(kvl_gguf_need_f64(g, "f64", &real), KVL_OK);
    assert_error(kvl_gguf_need_f64(g, "u8", &real), KVL_E_FORMAT, "wanted f32 or f64, found u8");
    assert_error(kvl_gguf_need_f64(g, "inf", &real), KVL_E_FORMAT, "finite");
    assert_int_equal(kvl_gguf_need_str(g, "text", &text), KVL_OK);
    assert_error(kvl_gguf_need_str(g, "yes", &text), KVL_E_FORMAT, "found bool");
    kvl_gguf_close(&g);
    gw_free(&w);
}

static void arrays_are_read(void **state)
{
    enum { N = 50000 };
    struct gguf_writer w = gw_new();
    gw_key_array(&w, "strings", GW_STRING, N);
    char word[16];
    for (int i = 0; i < N; i++) {
        snprintf(word, sizeof word, "%.*d", i % 7, i);
        gw_str(&w.keys, word);
    }
    gw_key_array(&w, "i32", GW_I32, 2);
    gw_bytes(&w.keys, (int32_t[]){-1, 7}, 8);
    gw_key_array(&w, "u32", GW_U32, 0);
    gw_key_array(&w, "f32", GW_F32, 1);
    gw_bytes(&w.keys, (float[]){1.5f}, 4);
    struct kvl_gguf *g = open_good(&w);
    struct kvl_gguf_str *strings;
    const void *data;
    uint64_t n;
    assert_int_equal(kvl_gguf_need_str_array(g, "strings", &strings, &n), KVL_OK);
    assert_int_equal(n, N);
    for (int i = 0; i < N; i++) {
        snprintf(word, sizeof word, "%.*d", i % 7, i);
        assert_str(strings[i], word);
    }
    kvl_free(&strings);
    assert_true(kvl_gguf_get_i32_array(g, "i32", &data, &n) && n == 2);
    assert_memory_equal(data, ((int32_t[]){-1, 7}), 8);
    assert_true(kvl_gguf_get_i32_array(g, "u32", &data, &n) && n == 0);
    assert_true(kvl_gguf_get_f32_array(g, "f32", &data, &n) && n == 1);
    assert_memory_equal(data, &(float){1.5f}, 4);
    assert_false(kvl_gguf_get_f32_array(g, "i32", &data, &n));
    assert_false(kvl_gguf_get_i32_array(g, "f32", &data, &n));
    assert_int_equal(kvl_gguf_need_str_array(g, "i32", &strings, &n), KVL_E_FORMAT);
    assert_int_equal(kvl_gguf_need_str_array(g, "absent", &strings, &n), KVL_E_FORMAT);
    kvl_gguf_close(&g);
    gw_free(&w);
}

/* Three tensors, not in the order of their names. */
static struct gguf_writer three_tensors(uint64_t alignment)
{
    struct gguf_writer w = gw_new();
    w.alignment = alignment;
    gw_key_u32(&w, "general.alignment", (uint32_t)alignment);
    uint8_t data[96];
    for (int i = 0; i < 96; i++) data[i] = (uint8_t)i;
    gw_tensor(&w, "z", KVL_GGUF_F32, 2, (uint64_t[]){3, 2}, data, 24);
    gw_tensor(&w, "b", KVL_GGUF_Q4_1, 4, (uint64_t[]){32, 1, 2, 1}, data + 24, 40);
    gw_tensor(&w, "bb", KVL_GGUF_F16, 1, (uint64_t[]){5}, data + 64, 10);
    return w;
}

static void tensors_are_found(void **state)
{
    for (uint32_t version = 2; version <= 3; version++)
        for (uint64_t alignment = 8; alignment <= 4096; alignment *= 8) {
            struct gguf_writer w = three_tensors(alignment);
            w.version = version;
            struct kvl_gguf *g = open_good(&w);
            assert_int_equal(kvl_gguf_n_tensors(g), 3);
            const struct kvl_gguf_tensor *z = kvl_gguf_tensor_at(g, 0), *b = kvl_gguf_tensor_find(g, "b"),
                                         *bb = kvl_gguf_tensor_find(g, "bb");
            assert_ptr_equal(z, kvl_gguf_tensor_find(g, "z"));
            assert_ptr_equal(b, kvl_gguf_tensor_at(g, 1));
            assert_ptr_equal(bb, kvl_gguf_tensor_at(g, 2));
            assert_null(kvl_gguf_tensor_at(g, 3));
            assert_null(kvl_gguf_tensor_find(g, "bbb"));
            assert_null(kvl_gguf_tensor_find(g, ""));
            assert_str(z->name, "z");
            assert_int_equal(z->n_bytes, 24);
            assert_int_equal(b->n_bytes, 40);
            assert_int_equal(b->n_dims, 4);
            assert_int_equal(b->dim[2], 2);
            assert_int_equal(bb->n_bytes, 10);
            assert_int_equal(bb->dim[0], 5);
            assert_int_equal(bb->dim[1] * bb->dim[2] * bb->dim[3], 1);
            assert_int_equal(z->data[23], 23);
            assert_int_equal(b->data[0], 24);
            assert_int_equal(bb->data[9], 73);
            kvl_gguf_close(&g);
            gw_free(&w);
        }
}

static void a_file_may_hold_nothing(void **state)
{
    const struct gguf_writer w = gw_new();
    struct kvl_gguf *g = open_good(&w);
    assert_int_equal(kvl_gguf_n_tensors(g), 0);
    assert_null(kvl_gguf_tensor_find(g, "x"));
    assert_false(kvl_gguf_has(g, "x"));
    kvl_gguf_close(&g);
    kvl_gguf_close(&g);
}

/* ---- wrong files ---- */

static void assert_refused(const void *data, size_t size, kvl_status code, const char *needle)
{
    struct kvl_gguf *gguf = NULL;
    gw_write(&path, data, size);
    assert_error(kvl_gguf_open(path.text, &gguf), code, needle);
    assert_null(gguf);
}

static void every_truncation_is_refused(void **state)
{
    struct gguf_writer w = three_tensors(32);
    write_scalars(&w);
    gw_key_array(&w, "strings", GW_STRING, 2);
    gw_str(&w.keys, "one");
    gw_str(&w.keys, "two");
    size_t head;
    struct kvl_text file = gw_file(&w, &head);
    for (size_t size = 0; size < file.size; size++) assert_refused(file.data, size, KVL_E_FORMAT, "byte ");
    kvl_text_free(&file);
    gw_free(&w);
}

static void fixed_fields_are_checked(void **state)
{
    static const struct {
        size_t at, size;
        uint64_t value;
        kvl_status code;
        const char *needle;
    } patches[] = {
        {0, 4, 0x47554747, KVL_E_FORMAT, "byte 0: wanted \"GGUF\", found bytes 47 47 55 47"},
        {4, 4, 1, KVL_E_UNSUPPORTED, "byte 4: GGUF version is 1, wanted 2 or 3"},
        {4, 4, 4, KVL_E_UNSUPPORTED, "version is 4"},
        {4, 4, 0x03000000, KVL_E_UNSUPPORTED, "big-endian"},
        {8, 8, 1u << 20, KVL_E_FORMAT, "byte 8: the number of tensors is 1048576"},
        {8, 8, UINT64_MAX, KVL_E_FORMAT, "the number of tensors"},
        {16, 8, 1ull << 63, KVL_E_FORMAT, "byte 16: the number of keys"},
        {24, 8, 1ull << 63, KVL_E_FORMAT, "byte 32: key wants 9223372036854775808 bytes"},
        {24, 8, UINT64_MAX, KVL_E_FORMAT, "key wants"},
        {24, 8, 0, KVL_E_FORMAT, "byte 24: key is empty"},
        {33, 4, 13, KVL_E_FORMAT, "byte 33: value type is 13, wanted 0 to 12"},
        {33, 4, UINT32_MAX, KVL_E_FORMAT, "value type"},
    };
    struct gguf_writer w = gw_new();
    gw_key_u32(&w, "k", 5);
    size_t head;
    struct kvl_text file = gw_file(&w, &head);
    for (size_t i = 0; i < sizeof patches / sizeof *patches; i++) {
        char copy[64];
        assert_true(file.size <= sizeof copy);
        memcpy(copy, file.data, file.size);
        memcpy(copy + patches[i].at, &patches[i].value, patches[i].size);
        assert_refused(copy, file.size, patches[i].code, patches[i].needle);
    }
    kvl_text_free(&file);
    gw_free(&w);
}

static void bool_2(struct gguf_writer *w) { gw_key_bool(w, "k", 2); }
static void key_twice(struct gguf_writer *w)
{
    gw_key_u32(w, "k", 1);
    gw_key_u32(w, "j", 1);
    gw_key_f32(w, "k", 1);
}
static void long_string(struct gguf_writer *w) { gw_key(w, "k", GW_STRING, &(uint64_t){1ull << 63}, 8); }
static void long_array(struct gguf_writer *w) { gw_key_array(w, "k", GW_U64, 1ull << 61); }
static void long_string_array(struct gguf_writer *w) { gw_key_array(w, "k", GW_STRING, UINT64_MAX); }
static void long_string_in_array(struct gguf_writer *w)
{
    gw_key_array(w, "k", GW_STRING, 1);
    gw_u64(&w->keys, UINT64_MAX);
}
static void nested_array(struct gguf_writer *w)
{
    gw_key_array(w, "k", GW_ARRAY, 1);
    gw_u64(&w->keys, 0);
    gw_u64(&w->keys, 0);
}
static void array_of_nothing_known(struct gguf_writer *w) { gw_key_array(w, "k", 99, 0); }
static void control_bytes_in_key(struct gguf_writer *w)
{
    gw_key_u32(w, "\033[2J", 1);
    gw_key_u32(w, "\033[2J", 1);
}

static void alignment_0(struct gguf_writer *w) { gw_key_u32(w, "general.alignment", 0); }
static void alignment_24(struct gguf_writer *w) { gw_key_u32(w, "general.alignment", 24); }
static void alignment_2_31(struct gguf_writer *w) { gw_key_u32(w, "general.alignment", 1u << 31); }
static void alignment_text(struct gguf_writer *w) { gw_key_str(w, "general.alignment", "32"); }

static void one_tensor(struct gguf_writer *w, uint32_t type, uint32_t n_dims, const uint64_t *dims, uint64_t offset)
{
    static const char data[64] = {0};
    gw_tensor_at(w, "t", type, n_dims, dims, offset);
    gw_bytes(&w->data, data, sizeof data);
}
static void dims_0(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 0, NULL, 0); }
static void dims_5(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 5, (uint64_t[]){1, 1, 1, 1, 1}, 0); }
static void dim_is_0(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 2, (uint64_t[]){4, 0}, 0); }
static void type_q2_k(struct gguf_writer *w) { one_tensor(w, 10, 1, (uint64_t[]){256}, 0); }
static void type_max(struct gguf_writer *w) { one_tensor(w, UINT32_MAX, 1, (uint64_t[]){256}, 0); }
static void half_block(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_Q4_0, 1, (uint64_t[]){48}, 0); }
static void half_super_block(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_Q6_K, 2, (uint64_t[]){128, 2}, 0); }
static void row_overflows(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){1ull << 62}, 0); }
static void product_overflows(struct gguf_writer *w)
{
    one_tensor(w, KVL_GGUF_F32, 4, (uint64_t[]){1 << 16, 1 << 16, 1 << 16, 1 << 16}, 0);
}
static void product_wraps_to_small(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F16, 2, (uint64_t[]){(1ull << 63) + 1, 4}, 0); }
static void larger_than_file(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){1000}, 0); }
static void one_past_end(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){17}, 0); }
static void offset_past_end(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){1}, 64); }
static void offset_wraps(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){8}, UINT64_MAX - 31); }
static void offset_misaligned(struct gguf_writer *w) { one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){1}, 4); }
static void tensor_twice(struct gguf_writer *w)
{
    one_tensor(w, KVL_GGUF_F32, 1, (uint64_t[]){1}, 0);
    one_tensor(w, KVL_GGUF_F16, 1, (uint64_t[]){2}, 32);
}
static void tensor_without_name(struct gguf_writer *w) { gw_tensor_at(w, "", KVL_GGUF_F32, 1, (uint64_t[]){1}, 0); }

static void wrong_content_is_refused(void **state)
{
    static const struct {
        void (*build)(struct gguf_writer *w);
        kvl_status code;
        const char *needle;
    } cases[] = {
        {bool_2, KVL_E_FORMAT, "a bool is 2, wanted 0 or 1"},
        {key_twice, KVL_E_FORMAT, "byte 66: key \"k\" is there twice (also at byte 32)"},
        {long_string, KVL_E_FORMAT, "string value wants 9223372036854775808 bytes"},
        {long_array, KVL_E_FORMAT, "array size is 2305843009213693952, the rest of the file has room for 0"},
        {long_string_array, KVL_E_FORMAT, "array size is 18446744073709551615"},
        {long_string_in_array, KVL_E_FORMAT, "string value wants"},
        {nested_array, KVL_E_UNSUPPORTED, "an array of arrays"},
        {array_of_nothing_known, KVL_E_FORMAT, "array element type is 99"},
        {control_bytes_in_key, KVL_E_FORMAT, "key \"?[2J\" is there twice"},
        {alignment_0, KVL_E_FORMAT, "\"general.alignment\" is 0, wanted 8 to"},
        {alignment_24, KVL_E_FORMAT, "general.alignment is 24, wanted a power of two"},
        {alignment_2_31, KVL_E_FORMAT, "\"general.alignment\" is 2147483648"},
        {alignment_text, KVL_E_FORMAT, "found string"},
        {dims_0, KVL_E_FORMAT, "tensor \"t\" has 0 dimensions, wanted 1 to 4"},
        {dims_5, KVL_E_FORMAT, "has 5 dimensions"},
        {dim_is_0, KVL_E_FORMAT, "dimension 1 is 0"},
        {type_q2_k, KVL_E_UNSUPPORTED, "tensor \"t\" has type 10, kvlab reads F32 F16 BF16 Q4_0"},
        {type_max, KVL_E_UNSUPPORTED, "has type 4294967295"},
        {half_block, KVL_E_FORMAT, "a row has 48 elements, wanted a multiple of 32 (one block of Q4_0)"},
        {half_super_block, KVL_E_FORMAT, "wanted a multiple of 256"},
        {row_overflows, KVL_E_FORMAT, "larger than the file"},
        {product_overflows, KVL_E_FORMAT, "larger than the file"},
        {product_wraps_to_small, KVL_E_FORMAT, "larger than the file"},
        {larger_than_file, KVL_E_FORMAT, "larger than the file"},
        {one_past_end, KVL_E_FORMAT, "tensor \"t\" wants 68 bytes at 0 of the data (byte 64), the data have 64 bytes"},
        {offset_past_end, KVL_E_FORMAT, "wants 4 bytes at 64"},
        {offset_wraps, KVL_E_FORMAT, "wants 32 bytes at 18446744073709551584"},
        {offset_misaligned, KVL_E_FORMAT, "offset 4 is not a multiple of the alignment 32"},
        {tensor_twice, KVL_E_FORMAT, "tensor \"t\" is there twice"},
        {tensor_without_name, KVL_E_FORMAT, "tensor name is empty"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct gguf_writer w = gw_new();
        cases[i].build(&w);
        size_t head;
        struct kvl_text file = gw_file(&w, &head);
        assert_refused(file.data, file.size, cases[i].code, cases[i].needle);
        kvl_text_free(&file);
        gw_free(&w);
    }
}

static void what_is_not_a_file_is_refused(void **state)
{
    struct kvl_gguf *gguf = NULL;
    assert_error(kvl_gguf_open("/nonexistent/x.gguf", &gguf), KVL_E_IO, "/nonexistent/x.gguf: cannot open");
    assert_error(kvl_gguf_open("/", &gguf), KVL_E_IO, "not a regular file");
    assert_refused("", 0, KVL_E_FORMAT, "the file is empty");
}

static void every_failed_allocation_is_reported(void **state)
{
    struct gguf_writer w = three_tensors(32);
    struct kvl_gguf *gguf = NULL;
    size_t head;
    struct kvl_text file = gw_file(&w, &head);
    gw_write(&path, file.data, file.size);
    kvl_status status = KVL_E_MEMORY;
    long n = 0;
    while (status != KVL_OK) {
        kvl_mem_fail_after(++n);
        status = kvl_gguf_open(path.text, &gguf);
        kvl_mem_fail_after(0);
        if (status != KVL_OK) assert_error(status, KVL_E_MEMORY, "out of host memory");
    }
    assert_true(n > 5);
    kvl_gguf_close(&gguf);
    kvl_text_free(&file);
    gw_free(&w);
}

/* ---- a real file ---- */

static void tiny_model_is_read(void **state)
{
    struct kvl_gguf *g;
    if (kvl_gguf_open(KVL_ROOT "/data/models/tiny.gguf", &g) != KVL_OK) fail_msg("%s", kvl_error_text());
    struct kvl_gguf_str text, *tokens;
    uint64_t n;
    assert_int_equal(kvl_gguf_n_tensors(g), 29);
    assert_int_equal(kvl_gguf_need_str(g, "general.architecture", &text), KVL_OK);
    assert_str(text, "llama");
    assert_int_equal(kvl_gguf_need_u64(g, "llama.context_length", 2048, 2048, &n), KVL_OK);
    assert_int_equal(kvl_gguf_need_str_array(g, "tokenizer.ggml.tokens", &tokens, &n), KVL_OK);
    assert_int_equal(n, 257);
    assert_str(tokens['A'], "A");
    kvl_free(&tokens);
    const struct kvl_gguf_tensor *down = kvl_gguf_tensor_find(g, "blk.2.ffn_down.weight");
    assert_non_null(down);
    assert_int_equal(down->dim[0], 160);
    assert_int_equal(down->dim[1], 96);
    assert_int_equal(down->n_bytes, 160 * 96 * 4);
    kvl_gguf_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scalars_are_read),
        cmocka_unit_test(needed_keys_say_what_is_wrong),
        cmocka_unit_test(arrays_are_read),
        cmocka_unit_test(tensors_are_found),
        cmocka_unit_test(a_file_may_hold_nothing),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(fixed_fields_are_checked),
        cmocka_unit_test(wrong_content_is_refused),
        cmocka_unit_test(what_is_not_a_file_is_refused),
        cmocka_unit_test(every_failed_allocation_is_reported),
        cmocka_unit_test(tiny_model_is_read),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
