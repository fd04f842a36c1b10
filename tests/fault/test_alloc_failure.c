/* Opens the tiny model, loads its weights, makes a session and runs tokens, again and again: in the n-th try the n-th allocation of
 * host memory fails, until there is no n-th. Every try must succeed without that memory or end in KVL_E_MEMORY with its message,
 * and all device buffers must be gone. Build with KVLAB_SANITIZE=ON and host memory that a failed try forgets is reported as well.
 */
#include "kernel/test_harness.h"
#include "log.h"
#include "session_rig.h"

static kvl_status run_session(struct kvl_weights *weights)
{
    static const int32_t tokens[] = {10, 20, 30, 40, 50};
    static float logits[512];
    kvl_status status = KVL_OK;
    struct kvl_spec *spec = NULL;
    struct kvl_session *session = NULL;
    KVL_TRY(kvl_spec_parse("k=int8 v=int4(group=16) sink=1 tail=2", &spec));
    const struct kvl_session_config config = {.spec = spec, .n_ctx = 16, .ubatch = 4, .protocol = KVL_P2_WRITE_THEN_READ};
    KVL_TRY(kvl_session_new(weights, &config, &session));
    KVL_TRY(kvl_session_forward(session, tokens, sizeof tokens / sizeof *tokens, 1));
    KVL_TRY(kvl_session_read_logits(session, 0, logits));
done:
    kvl_session_free(&session);
    kvl_spec_free(&spec);
    return status;
}

/* All of it on a device of its own, if `device` is NULL. */
static kvl_status run_all(struct kvl_device *device)
{
    kvl_status status = KVL_OK;
    struct kvl_device *own = NULL;
    struct kvl_model *model = NULL;
    struct kvl_weights *weights = NULL;
    if (device == NULL) {
        KVL_TRY(kvl_device_open(NULL, &own));
        device = own;
    }
    KVL_TRY(kvl_model_open(TINY_MODEL, &model));
    KVL_TRY(kvl_weights_load(model, device, &weights));
    KVL_TRY(run_session(weights));
done:
    kvl_weights_free(&weights);
    kvl_model_close(&model);
    kvl_device_close(&own);
    return status;
}

/* The failure ordered for the n-th allocation has not happened yet. */
static bool failure_is_left(long n)
{
    void *block;
    for (long i = 0; i < n; i++) {
        const kvl_status status = kvl_alloc(&block, 1, 1);
        kvl_free(&block);
        if (status != KVL_OK) return true;
    }
    return false;
}

static void check_try(struct kvl_device *device, long n, kvl_status status)
{
    struct kvl_ledger left = {0};
    if (status != KVL_OK && (status != KVL_E_MEMORY || strstr(kvl_error_text(), "out of host memory") == NULL))
        fail_msg("allocation %ld: status %d, \"%s\"", n, status, kvl_error_text());
    if (device != NULL) kvl_ledger_read(device, &left);
    if (left.n_buffers != 0) fail_msg("allocation %ld: %lu device buffers are left", n, (unsigned long)left.n_buffers);
}

static void try_all(struct kvl_device *device, long stride)
{
    const uint64_t start_ns = kvl_now_ns();
    long n = 1, survived = 0, failed = 0;
    for (bool reached = true; reached; n += stride) {
        kvl_error_clear();
        kvl_mem_fail_after(n);
        const kvl_status status = run_all(device);
        reached = !failure_is_left(n);
        kvl_mem_fail_after(0);
        check_try(device, n, status);
        if (reached) *(status == KVL_OK ? &survived : &failed) += 1;
    }
    print_message("    %ld tries ended in the error, %ld could do without the memory, %.1f s\n", failed, survived,
                  (double)(kvl_now_ns() - start_ns) * 1e-9);
    assert_true(failed > 10);
}

static void every_allocation_may_fail(void **state)
{
    assert_ok(run_all(kvl_test_device)); /* programs are built once and then shared */
    try_all(kvl_test_device, 1);
}

/* Programs are built, or taken from the cache on disk, in every try. */
static void a_new_device_may_fail(void **state) { try_all(NULL, 29); }

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_allocation_may_fail),
    cmocka_unit_test(a_new_device_may_fail),
};

/* One device: what is tested is host code. */
int main(void)
{
    struct kvl_caps *list = NULL;
    size_t n = 0;
    const kvl_status status = kvl_device_list(&list, &n);
    kvl_free(&list);
    if (status != KVL_OK || n == 0) {
        fprintf(stderr, "skipped: no OpenCL device\n");
        return 77;
    }
    return kvl_on_device(NULL, tests, sizeof tests / sizeof *tests);
}
