/* Buffers, transfers and the ledger, on every device. */
#include "kernel/test_harness.h"
#include <string.h>

static struct kvl_ledger ledger(void)
{
    struct kvl_ledger now;
    kvl_ledger_read(kvl_test_device, &now);
    return now;
}

static struct kvl_buffer *buffer_of(enum kvl_mem_class cls, uint64_t bytes)
{
    struct kvl_buffer *buffer = NULL;
    assert_ok(kvl_buffer_new(kvl_test_device, "test", 3, cls, bytes, true, &buffer));
    return buffer;
}

static void total_is_the_sum_of_sizes(void **state)
{
    struct kvl_buffer *buffers[20];
    uint64_t sum = 0, by_class[KVL_MEM_CLASSES] = {0};
    for (unsigned i = 0; i < 20; i++) {
        const enum kvl_mem_class cls = i % KVL_MEM_CLASSES;
        buffers[i] = buffer_of(cls, 1 + 777 * i);
        assert_true(kvl_buffer_bytes(buffers[i]) >= 1 + 777 * i);
        sum += kvl_buffer_bytes(buffers[i]);
        by_class[cls] += kvl_buffer_bytes(buffers[i]);
    }
    assert_int_equal(ledger().total, sum);
    assert_int_equal(ledger().n_buffers, 20);
    assert_memory_equal(ledger().bytes, by_class, sizeof by_class);
    static const unsigned order[] = {7, 0, 19, 18, 1}; /* the middle, both ends, and beside a hole */
    for (unsigned i = 0; i < 5; i++) {
        sum -= kvl_buffer_bytes(buffers[order[i]]);
        kvl_buffer_free(&buffers[order[i]]);
        assert_null(buffers[order[i]]);
        assert_int_equal(ledger().total, sum);
    }
    for (unsigned i = 0; i < 20; i++) kvl_buffer_free(&buffers[i]);
    assert_int_equal(ledger().total, 0);
    assert_int_equal(ledger().n_buffers, 0);
    for (int c = 0; c < KVL_MEM_CLASSES; c++) assert_int_equal(ledger().bytes[c], 0);
}

static void peak_stays_until_reset(void **state)
{
    kvl_ledger_reset_peak(kvl_test_device);
    struct kvl_buffer *a = buffer_of(KVL_MEM_SCRATCH, 1000), *b = buffer_of(KVL_MEM_SCRATCH, 2000);
    kvl_buffer_free(&b);
    assert_int_equal(ledger().peak, 3000);
    assert_int_equal(ledger().total, 1000);
    kvl_ledger_reset_peak(kvl_test_device);
    assert_int_equal(ledger().peak, 1000);
    kvl_buffer_free(&a);
}

static void split_must_sum(void **state)
{
    struct kvl_buffer *slab = buffer_of(KVL_MEM_SLACK, 4096);
    uint64_t bytes[KVL_MEM_CLASSES] = {[KVL_MEM_PAYLOAD] = 3000, [KVL_MEM_SCALE] = 1000, [KVL_MEM_SLACK] = 96};
    assert_ok(kvl_buffer_split(slab, bytes));
    assert_memory_equal(ledger().bytes, bytes, sizeof bytes);
    uint64_t wrong[KVL_MEM_CLASSES] = {[KVL_MEM_PAYLOAD] = 4097};
    assert_int_equal(kvl_buffer_split(slab, wrong), KVL_E_DEVICE_MEM);
    assert_non_null(strstr(kvl_error_text(), "4097"));
    wrong[KVL_MEM_SLACK] = UINT64_MAX;
    assert_int_equal(kvl_buffer_split(slab, wrong), KVL_E_DEVICE_MEM);
    assert_memory_equal(ledger().bytes, bytes, sizeof bytes);
    assert_int_equal(ledger().total, 4096);
    kvl_error_clear();
    kvl_buffer_free(&slab);
    for (int c = 0; c < KVL_MEM_CLASSES; c++) assert_int_equal(ledger().bytes[c], 0);
}

static bool count_owners(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    unsigned *seen = context;
    assert_string_equal(owner, "test");
    assert_int_equal(layer, 3);
    assert_int_equal(bytes[KVL_MEM_TABLE], 64);
    return ++*seen < 2;
}

static void walk_visits_until_told_to_stop(void **state)
{
    struct kvl_buffer *buffers[3];
    unsigned seen = 0;
    for (int i = 0; i < 3; i++) buffers[i] = buffer_of(KVL_MEM_TABLE, 64);
    kvl_ledger_walk(kvl_test_device, count_owners, &seen);
    assert_int_equal(seen, 2);
    for (int i = 0; i < 3; i++) kvl_buffer_free(&buffers[i]);
}

static void too_large_is_a_clean_error(void **state)
{
    const struct kvl_caps *caps = kvl_device_caps(kvl_test_device);
    struct kvl_buffer *buffer = NULL;
    char limit[24];
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)caps->max_alloc_bytes);
    const uint64_t sizes[] = {caps->max_alloc_bytes + 1, UINT64_MAX, 0};
    for (int i = 0; i < 3; i++) {
        kvl_error_clear();
        assert_int_equal(kvl_buffer_new(kvl_test_device, "giant", 7, KVL_MEM_PAYLOAD, sizes[i], false, &buffer), KVL_E_DEVICE_MEM);
        assert_null(buffer);
        assert_non_null(strstr(kvl_error_text(), "'giant' (layer 7)"));
        if (sizes[i] > 0) assert_non_null(strstr(kvl_error_text(), limit));
    }
    kvl_error_clear();
    assert_int_equal(ledger().total, 0);
}

static void transfers_move_the_right_bytes(void **state)
{
    enum { N = 1000 };
    uint8_t data[N], back[N], zeros[N] = {0};
    for (int i = 0; i < N; i++) data[i] = (uint8_t)(i * 7 + 1);
    struct kvl_buffer *a = buffer_of(KVL_MEM_SCRATCH, N), *b = buffer_of(KVL_MEM_SCRATCH, N);
    assert_ok(kvl_buffer_read(a, 0, N, back));
    assert_memory_equal(back, zeros, N);
    assert_ok(kvl_buffer_write(a, 0, N, data));
    assert_ok(kvl_buffer_copy(a, 13, b, 101, 500));
    assert_ok(kvl_buffer_read(b, 0, N, back));
    assert_memory_equal(back, zeros, 101);
    assert_memory_equal(back + 101, data + 13, 500);
    assert_memory_equal(back + 601, zeros, N - 601);
    assert_ok(kvl_buffer_write(a, 3, 5, zeros));
    for (uint64_t bytes = 1; bytes <= 65; bytes += 8) /* odd, even and whole patterns */
        assert_ok(kvl_buffer_fill_zero(a, 128, bytes));
    assert_ok(kvl_buffer_fill_zero(a, 301, 7));
    assert_ok(kvl_buffer_read(a, 0, N, back));
    memset(data + 3, 0, 5);
    memset(data + 128, 0, 65);
    memset(data + 301, 0, 7);
    assert_memory_equal(back, data, N);
    assert_ok(kvl_buffer_read(a, 700, 100, back));
    assert_memory_equal(back, data + 700, 100);
    kvl_buffer_free(&a);
    kvl_buffer_free(&b);
}

static void ranges_are_checked(void **state)
{
    uint8_t data[64] = {0};
    struct kvl_buffer *a = buffer_of(KVL_MEM_SCRATCH, 64);
    assert_int_equal(kvl_buffer_write(a, 1, 64, data), KVL_E_DEVICE);
    assert_non_null(strstr(kvl_error_text(), "'test' of 64 bytes"));
    assert_int_equal(kvl_buffer_read(a, 65, 0, data), KVL_E_DEVICE);
    assert_int_equal(kvl_buffer_read(a, UINT64_MAX, 2, data), KVL_E_DEVICE);
    assert_int_equal(kvl_buffer_copy(a, 0, a, 60, 8), KVL_E_DEVICE);
    assert_int_equal(kvl_buffer_fill_zero(a, 32, 33), KVL_E_DEVICE);
    assert_ok(kvl_buffer_write(a, 64, 0, data));
    assert_ok(kvl_buffer_copy(a, 0, a, 0, 0));
    kvl_error_clear();
    kvl_buffer_free(&a);
}

/* On a CPU buffers lie one behind the other in memory of ours: none touches another, whichever go first. */
static void buffers_do_not_overlap(void **state)
{
    enum { N = 24, ROUNDS = 3 };
    struct kvl_buffer *buffers[N];
    static char bytes[N * 40000];
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < N; i++) {
            buffers[i] = buffer_of(KVL_MEM_SCRATCH, 1 + i % 7 * 39997);
            memset(bytes, (int)(i + 100 * round), sizeof bytes);
            assert_ok(kvl_buffer_write(buffers[i], 0, 1 + i % 7 * 39997, bytes));
            if (i % 3 == round) kvl_buffer_free(&buffers[i]);
        }
        for (unsigned i = 0; i < N; i++) {
            if (buffers[i] == NULL) continue;
            assert_ok(kvl_buffer_read(buffers[i], 0, 1 + i % 7 * 39997, bytes));
            for (unsigned b = 0; b < 1 + i % 7 * 39997; b++) assert_int_equal(bytes[b], (char)(i + 100 * round));
            kvl_buffer_free(&buffers[i]);
        }
    }
    struct kvl_buffer *large = buffer_of(KVL_MEM_SCRATCH, 70 << 20); /* more than a region usually has */
    assert_int_equal(kvl_buffer_bytes(large), 70 << 20);
    kvl_buffer_free(&large);
}

static void a_buffer_may_outlive_its_device(void **state)
{
    struct kvl_device *device = NULL;
    struct kvl_buffer *buffer = NULL;
    assert_ok(kvl_device_open("0", &device));
    assert_ok(kvl_buffer_new(device, "left behind on purpose", -1, KVL_MEM_SCRATCH, 16, false, &buffer));
    kvl_device_close(&device);
    kvl_buffer_free(&buffer);
    assert_null(buffer);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(total_is_the_sum_of_sizes),
        cmocka_unit_test(peak_stays_until_reset),
        cmocka_unit_test(split_must_sum),
        cmocka_unit_test(walk_visits_until_told_to_stop),
        cmocka_unit_test(too_large_is_a_clean_error),
        cmocka_unit_test(transfers_move_the_right_bytes),
        cmocka_unit_test(ranges_are_checked),
        cmocka_unit_test(buffers_do_not_overlap),
        cmocka_unit_test(a_buffer_may_outlive_its_device),
    };
    return KVL_ON_EACH_DEVICE(tests);
}
