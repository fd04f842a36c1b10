/* Measures what a device reaches at best, so that every kernel can report its share of it. Times are wall times of many
 * launches and one wait: they need no trust in a device's event clock, and the wait's cost is spread thin. */
#include "device_internal.h"
#include "log.h"
#include "median.h"
#include <stdio.h>

enum {
    TRIES = 5,
    TRY_NS = 40000000, /* a try is repeated to last about this long */
    MOST_REPEATS = 2000,
    CHAIN_LINKS = 300,
    LEAST_SHARE = 64
};

/* How the work is spread, by kind of device. */
struct spread {
    size_t width, local, groups_per_unit;
    unsigned rounds; /* multiply-adds of one chain in a launch: many, or the launch is what is timed; llvmpipe does no more than 65,535 */
    uint64_t buffer_bytes;
};
static const struct spread cpu_spread = {.width = 16, .local = 1, .groups_per_unit = 4, .rounds = 32768, .buffer_bytes = (uint64_t)256 << 20};
static const struct spread gpu_spread = {.width = 4, .local = 256, .groups_per_unit = 16, .rounds = 4096, .buffer_bytes = (uint64_t)1 << 30};

struct bench {
    struct kvl_device *device;
    struct kvl_program *program;
    struct kvl_buffer *x, *y;
    size_t global[3], local[3];
    struct spread spread;
    uint64_t share, bytes; /* vectors a work-item; bytes of all */
};

/* One thing to time: a kernel and its arguments, launched back to back. */
struct series {
    struct kvl_kernel *kernel;
    const struct kvl_arg *args;
    size_t n_args, repeats; /* repeats of a try; 0 = as many as fill TRY_NS */
    double hopeless_ns;     /* one launch this slow is not measured any further; 0 = measure all */
};

static kvl_status time_launches(const struct bench *b, const struct series *s, size_t repeats, double *ns)
{
    kvl_status status = KVL_OK;
    const uint64_t start = kvl_now_ns();
    for (size_t i = 0; i < repeats; i++)
        KVL_TRY(kvl_launch(b->device, s->kernel, b->global, b->local, (struct kvl_work){0}, s->args, s->n_args));
    KVL_TRY(kvl_device_finish(b->device));
    *ns = (double)(kvl_now_ns() - start) / (double)repeats;
done:
    return status;
}

static size_t repeats_for(double once_ns)
{
    const double wanted = TRY_NS / (once_ns > 1.0 ? once_ns : 1.0);
    return wanted < 1.0 ? 1 : wanted > MOST_REPEATS ? MOST_REPEATS : (size_t)wanted;
}

/* Median nanoseconds a launch. */
static kvl_status time_series(const struct bench *b, const struct series *s, double *ns)
{
    kvl_status status = KVL_OK;
    double once, tries[TRIES];
    KVL_TRY(time_launches(b, s, 1, &once)); /* the driver may compile here */
    KVL_TRY(time_launches(b, s, 1, &once));
    if (s->hopeless_ns > 0.0 && once > s->hopeless_ns) return *ns = once, KVL_OK;
    for (int i = 0; i < TRIES; i++) KVL_TRY(time_launches(b, s, s->repeats ? s->repeats : repeats_for(once), tries + i));
    *ns = kvl_median(tries, TRIES);
done:
    return status;
}

static void plan(struct bench *b)
{
    const struct kvl_caps *caps = &b->device->caps;
    b->spread = caps->type == KVL_DEVICE_CPU ? cpu_spread : gpu_spread;
    if (b->spread.local > caps->max_work_group) b->spread.local = caps->max_work_group;
    const size_t items = b->spread.local * b->spread.groups_per_unit * (caps->compute_units ? caps->compute_units : 1);
    uint64_t bytes = b->spread.buffer_bytes;
    if (bytes > caps->max_alloc_bytes) bytes = caps->max_alloc_bytes;
    if (bytes > caps->global_bytes / 8) bytes = caps->global_bytes / 8;
    const uint64_t vector_bytes = 4 * b->spread.width;
    b->share = bytes / vector_bytes / items / LEAST_SHARE * LEAST_SHARE;
    if (b->share == 0) b->share = LEAST_SHARE;
    b->bytes = b->share * vector_bytes * items;
    b->global[0] = items, b->local[0] = b->spread.local;
    for (int d = 1; d < 3; d++) b->global[d] = b->local[d] = 1;
}

/* Forms of the multiply-add kernel. Which is fastest depends on the compiler: the peak is that of the best. */
struct form {
    unsigned chains, fma;
};
static const struct form forms[] = {{4, 0}, {12, 0}, {4, 1}, {12, 1}};

static kvl_status program_for(struct bench *b, const struct form *form)
{
    char options[64];
    const struct kvl_source source = {"measure.cl", kvl_source_text("measure.cl")};
    snprintf(options, sizeof options, "-DKVL_WIDTH=%zu -DKVL_CHAINS=%u -DKVL_FMA=%u", b->spread.width, form->chains, form->fma);
    if (b->program) kvl_program_forget(b->program);
    b->program = NULL;
    return kvl_program_get(b->device, &source, 1, options, &b->program);
}

static kvl_status measure_bandwidth(const struct bench *b, const char *kernel, unsigned passes, double *gbps)
{
    kvl_status status = KVL_OK;
    double ns;
    const struct kvl_arg args[] = {KVL_BUF(b->x), KVL_BUF(b->y), KVL_U64(b->share)};
    struct series series = {.args = args, .n_args = 3};
    KVL_TRY(kvl_kernel_get(b->program, kernel, &series.kernel));
    KVL_TRY(time_series(b, &series, &ns));
    *gbps = passes * (double)b->bytes / ns;
done:
    return status;
}

static kvl_status measure_fma(const struct bench *b, unsigned chains, double *best_gflops)
{
    kvl_status status = KVL_OK;
    double ns;
    const struct kvl_arg args[] = {KVL_BUF(b->y), KVL_F32(0.5f), KVL_F32(1.0f), KVL_U32(b->spread.rounds)};
    const double flops = 2.0 * b->spread.rounds * chains * (double)b->spread.width * (double)b->global[0];
    struct series series = {.args = args, .n_args = 4, .hopeless_ns = *best_gflops > 0.0 ? 2.0 * flops / *best_gflops : 0.0};
    KVL_TRY(kvl_kernel_get(b->program, "kvl_measure_fma", &series.kernel));
    KVL_TRY(time_series(b, &series, &ns));
    if (flops / ns > *best_gflops) *best_gflops = flops / ns;
done:
    return status;
}

static kvl_status measure_launch(struct bench b, double *us)
{
    kvl_status status = KVL_OK;
    double ns;
    const struct kvl_arg args[] = {KVL_BUF(b.y)};
    struct series series = {.args = args, .n_args = 1, .repeats = CHAIN_LINKS};
    b.global[0] = b.local[0];
    KVL_TRY(kvl_kernel_get(b.program, "kvl_measure_link", &series.kernel));
    KVL_TRY(time_series(&b, &series, &ns));
    *us = ns * 1e-3;
done:
    return status;
}

kvl_status kvl_device_measure(struct kvl_device *device, struct kvl_peaks *out)
{
    kvl_status status = KVL_OK;
    struct bench b = {.device = device};
    struct kvl_peaks peaks = {0};
    plan(&b);
    KVL_TRY(kvl_buffer_new(device, "measure", -1, KVL_MEM_SCRATCH, b.bytes, true, &b.x));
    KVL_TRY(kvl_buffer_new(device, "measure", -1, KVL_MEM_SCRATCH, b.bytes, true, &b.y));
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        KVL_TRY(program_for(&b, forms + i));
        KVL_TRY(measure_fma(&b, forms[i].chains, &peaks.fma_gflops));
    }
    KVL_TRY(measure_bandwidth(&b, "kvl_measure_read", 1, &peaks.read_gbps));
    KVL_TRY(measure_bandwidth(&b, "kvl_measure_copy", 2, &peaks.copy_gbps));
    KVL_TRY(measure_launch(b, &peaks.launch_us));
    *out = peaks;
done:
    if (b.program) kvl_program_forget(b.program);
    kvl_buffer_free(&b.x);
    kvl_buffer_free(&b.y);
    return status;
}
