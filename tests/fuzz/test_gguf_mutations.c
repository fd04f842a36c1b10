/* Seeded damage to a small model file: opening it must end with a reader that stays inside the file or with an error, never with a
 * crash, and never ask for absurd memory. Worth most under -DKVLAB_SANITIZE=ON. KVLAB_FUZZ_RUNS: how many files (default 3000);
 * KVLAB_FUZZ_SEED: another series. A failing file is left in $TMPDIR or /tmp. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "mem.h"
#include "model.h"
#include "quant.h"
#include "rng.h"
#include "small_model.h"

/* The file under damage and a stream of random numbers. */
struct subject {
    char *data;
    size_t size, head, room;
    uint64_t seed, drawn;
};

static uint64_t draw(struct subject *s, uint64_t below) { return below == 0 ? 0 : kvl_rng_u64(s->seed, s->drawn++) % below; }

/* Mostly in the head, where the structure is; the data may hold anything. */
static size_t draw_place(struct subject *s)
{
    const size_t end = draw(s, 16) > 0 && s->head < s->size ? s->head : s->size;
    return (size_t)draw(s, end);
}

static void truncate_file(struct subject *s) { s->size = draw_place(s); }

static void flip_bit(struct subject *s)
{
    if (s->size > 0) s->data[draw_place(s)] ^= (char)(1 << draw(s, 8));
}

static void replace_byte(struct subject *s)
{
    if (s->size > 0) s->data[draw_place(s)] = (char)draw(s, 256);
}

/* Over any 4 or 8 bytes: what a count, size, type or offset should not be. */
static void write_absurd_number(struct subject *s)
{
    static const uint64_t absurd[] = {0,          1,          2,          9,         255,        65536,           1u << 31,
                                      UINT32_MAX, 1ull << 32, 1ull << 61, INT64_MAX, 1ull << 63, UINT64_MAX - 31, UINT64_MAX};
    const size_t width = draw(s, 2) > 0 ? 8 : 4, at = draw_place(s);
    const uint64_t value = absurd[draw(s, sizeof absurd / sizeof *absurd)];
    if (at + width <= s->size) memcpy(s->data + at, &value, width);
}

/* The counts and the first key's size, which random places seldom hit. */
static void change_start(struct subject *s)
{
    const size_t at = 4 * (size_t)draw(s, 8);
    const uint32_t value = (uint32_t)draw(s, 64);
    if (at + sizeof value <= s->size) memcpy(s->data + at, &value, sizeof value);
}

static void copy_piece(struct subject *s)
{
    const size_t from = draw_place(s), to = draw_place(s), n = (size_t)draw(s, 200);
    if (from + n <= s->size && to + n <= s->size) memmove(s->data + to, s->data + from, n);
}

static void delete_piece(struct subject *s)
{
    const size_t at = draw_place(s), n = (size_t)draw(s, 40);
    if (at + n > s->size) return;
    memmove(s->data + at, s->data + at + n, s->size - at - n);
    s->size -= n;
}

static void insert_piece(struct subject *s)
{
    const size_t at = draw_place(s), n = (size_t)draw(s, 40);
    if (s->size + n > s->room) return;
    memmove(s->data + at + n, s->data + at, s->size - at);
    s->size += n;
}

static void (*const damages[])(struct subject *s) = {truncate_file, flip_bit,   replace_byte, write_absurd_number,
                                                     change_start,  copy_piece, delete_piece, insert_piece};

/* ---- reading all that an open file offers ---- */

static uint64_t checksum; /* so that no read can be left out */

static void read_bytes(const void *data, size_t size)
{
    for (size_t i = 0; i < size; i++) checksum += ((const uint8_t *)data)[i];
}

static void read_tensors(const struct kvl_gguf *gguf)
{
    float block[256];
    for (uint64_t i = 0; i < kvl_gguf_n_tensors(gguf); i++) {
        const struct kvl_gguf_tensor *t = kvl_gguf_tensor_at(gguf, i);
        const struct kvl_quant_type *type = kvl_quant_type(t->type);
        assert_true(t->n_bytes >= type->bytes && t->n_bytes % type->bytes == 0);
        type->dequantize(t->data, 1, block);
        type->dequantize(t->data + t->n_bytes - type->bytes, 1, block);
        read_bytes(block, sizeof *block);
        read_bytes(t->name.data, t->name.size);
    }
}

static void read_keys(const struct kvl_gguf *gguf)
{
    static const char *const keys[] = {"general.architecture",      "general.name",          "llama.block_count",
                                       "llama.vocab_size",          "tokenizer.ggml.tokens", "tokenizer.ggml.merges",
                                       "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.bos_token_id"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        struct kvl_gguf_str text, *texts;
        const void *numbers;
        uint64_t n;
        if (kvl_gguf_get_str(gguf, keys[i], &text)) read_bytes(text.data, text.size);
        if (kvl_gguf_get_i32_array(gguf, keys[i], &numbers, &n)) read_bytes(numbers, 4 * n);
        if (kvl_gguf_get_f32_array(gguf, keys[i], &numbers, &n)) read_bytes(numbers, 4 * n);
        if (kvl_gguf_need_str_array(gguf, keys[i], &texts, &n) != KVL_OK) continue;
        for (uint64_t k = 0; k < n; k++) read_bytes(texts[k].data, texts[k].size);
        kvl_free(&texts);
    }
}

static void use_tokenizer(const struct kvl_tokenizer *t)
{
    static const char text[] = "The cat \xff sat\n12";
    int32_t *ids = NULL;
    size_t n = 0;
    struct kvl_text back = {0};
    if (kvl_tokenizer_encode(t, text, sizeof text - 1, true, &ids, &n) == KVL_OK)
        for (size_t i = 0; i < n; i++) kvl_tokenizer_decode(t, ids[i], true, &back);
    read_bytes(back.data, back.size);
    kvl_text_free(&back);
    kvl_free(&ids);
}

/* ---- */

static void assert_honest_error(uint64_t run, kvl_status status)
{
    if (status != KVL_E_FORMAT && status != KVL_E_UNSUPPORTED)
        fail_msg("run %d: status %d: %s", (int)run, status, kvl_error_text());
    if (kvl_error_text()[0] == '\0') fail_msg("run %d: no message", (int)run);
    kvl_error_clear();
}

static bool open_gguf(uint64_t run, const struct gw_path *path)
{
    struct kvl_gguf *gguf = NULL;
    kvl_error_clear();
    const kvl_status status = kvl_gguf_open(path->text, &gguf);
    if (status != KVL_OK) {
        assert_honest_error(run, status);
        return false;
    }
    read_tensors(gguf);
    read_keys(gguf);
    kvl_gguf_close(&gguf);
    return true;
}

static bool open_model(uint64_t run, const struct gw_path *path)
{
    struct kvl_model *model = NULL;
    const kvl_status status = kvl_model_open(path->text, &model);
    if (status != KVL_OK) {
        assert_honest_error(run, status);
        return false;
    }
    use_tokenizer(model->tokenizer);
    kvl_model_close(&model);
    return true;
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

static void damaged_models_do_no_harm(void **state)
{
    const uint64_t runs = setting("KVLAB_FUZZ_RUNS", 3000), seed = setting("KVLAB_FUZZ_SEED", 1);
    const struct gw_path path = gw_temporary();
    uint64_t n_gguf = 0, n_models = 0;
    size_t head;
    struct kvl_text original = small_model(&(struct small_change){0}, &head);
    struct subject subject = {.head = head, .room = original.size + 1024};
    assert_int_equal(kvl_alloc(&subject.data, subject.room, 1), KVL_OK);
    for (uint64_t run = 0; run < runs; run++) {
        subject.seed = kvl_rng_u64(seed, run);
        subject.drawn = 0;
        subject.size = original.size;
        memcpy(subject.data, original.data, original.size);
        for (uint64_t n = 1 + draw(&subject, 2); n > 0; n--) damages[draw(&subject, sizeof damages / sizeof *damages)](&subject);
        gw_write(&path, subject.data, subject.size);
        n_gguf += open_gguf(run, &path);
        n_models += open_model(run, &path);
    }
    print_message("%d files: %d readable, %d of them models\n", (int)runs, (int)n_gguf, (int)n_models);
    if (runs >= 1000)
        assert_true(n_models > 0 && n_gguf > n_models && n_gguf < runs); /* else the damage is too weak or too strong */
    kvl_free(&subject.data);
    kvl_text_free(&original);
    gw_remove(&path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(damaged_models_do_no_harm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
