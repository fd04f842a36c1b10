#include "blas.h"
#include "device_internal.h"
#include <clblast_c.h>
#include <string.h>

static const char tuned[] = "clblast";

struct kvl_blas_unit kvl_blas_unit(const struct kvl_tuning *tuning)
{
    return (struct kvl_blas_unit){.m = (uint32_t)kvl_tuned(tuning, tuned, "MWG", false),
                                  .n = (uint32_t)kvl_tuned(tuning, tuned, "NWG", false),
                                  .k = (uint32_t)kvl_tuned(tuning, tuned, "KWG", false)};
}

/* Parameters in use: CLBlast keeps one set a device for the process. */
static cl_device_id user;
static struct kvl_setting used;

void kvl_blas_forget(struct kvl_device *device)
{
    if (user != device->id) return;
    user = NULL;
    CLBlastClearCache();
}

static kvl_status override(struct kvl_device *device, const char *kernel, size_t n, const char **names, const size_t *values)
{
    return kvl_cl_check((cl_int)CLBlastOverrideParameters(device->id, kernel, CLBlastPrecisionSingle, n, names, values),
                        "CLBlastOverrideParameters", kernel);
}

static kvl_status use_parameters(struct kvl_device *device)
{
    kvl_status status = KVL_OK;
    size_t n_kernels;
    const struct kvl_tune_kernel *kernel = kvl_tune_kernel_find(tuned);
    const struct kvl_setting *setting = &device->tuning.setting[kernel - kvl_tune_kernels(&n_kernels)];
    if (user == device->id && memcmp(&used, setting, sizeof used) == 0) return KVL_OK;
    /* GEMMK 0: the kernel with work-group tiles. XGEMM_MIN_INDIRECT_SIZE 1: always this kernel, however small the product. */
    const char *names[KVL_TUNE_TUNABLES + 2] = {"GEMMK", "KREG"}, *routine[] = {"XGEMM_MIN_INDIRECT_SIZE"};
    size_t values[KVL_TUNE_TUNABLES + 2] = {0, 1}, n = 2;
    const size_t least[] = {1};
    for (size_t i = 0; i < kernel->n_tunables; i++, n++) {
        names[n] = kernel->tunable[i].name;
        values[n] = (size_t)kernel->tunable[i].value[setting->choice[i]].number;
    }
    user = NULL;
    KVL_TRY(override(device, "Xgemm", n, names, values));
    KVL_TRY(override(device, "GemmRoutine", 1, routine, least));
    user = device->id;
    used = *setting;
done:
    return status;
}

kvl_status kvl_blas_product(struct kvl_device *device, uint32_t m, uint32_t n, uint32_t k, struct kvl_buffer *a, struct kvl_buffer *b,
                            struct kvl_buffer *c)
{
    kvl_status status = KVL_OK;
    cl_event *event = NULL;
    const struct kvl_work work = {.bytes = 4 * ((uint64_t)m * k + (uint64_t)n * k + (uint64_t)m * n), .flops = 2ull * m * n * k};
    KVL_TRY(use_parameters(device));
    if (device->profiling) KVL_TRY(kvl_profile_slot(device, "clblast_sgemm", work, &event));
    KVL_TRY(kvl_cl_check((cl_int)CLBlastSgemm(CLBlastLayoutColMajor, CLBlastTransposeNo, CLBlastTransposeYes, m, n, k, 1.0f, a->memory, 0, m,
                                              b->memory, 0, n, 0.0f, c->memory, 0, m, &device->queue, event),
                         "CLBlastSgemm", device->caps.name));
    device->launches++;
    if (event != NULL) device->n_pending++;
done:
    return status;
}
