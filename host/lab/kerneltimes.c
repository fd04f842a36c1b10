#include "kerneltimes.h"
#include "median.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

const struct kvl_phase_times *kvl_profile_phase(const struct kvl_profile *p, const char *name)
{
    for (size_t i = 0; i < p->n_phases; i++)
        if (strcmp(p->phase[i].name, name) == 0) return &p->phase[i];
    return NULL;
}

static kvl_status find_phase(struct kvl_profile *p, const char *name, size_t *out)
{
    const struct kvl_phase_times *found = kvl_profile_phase(p, name);
    if (found) return *out = (size_t)(found - p->phase), KVL_OK;
    if (strlen(name) >= KVL_PHASE_BYTES)
        return kvl_fail(KVL_E_USAGE, "phase \"%s\": its name has %d bytes at most", name, KVL_PHASE_BYTES - 1);
    const kvl_status status = kvl_realloc(&p->phase, p->n_phases + 1, sizeof *p->phase);
    if (status != KVL_OK) return status;
    *out = p->n_phases++;
    p->phase[*out] = (struct kvl_phase_times){0};
    snprintf(p->phase[*out].name, KVL_PHASE_BYTES, "%s", name);
    return KVL_OK;
}

static kvl_status find_kernel(struct kvl_profile *p, const char *name, size_t phase, struct kvl_kernel_times **out)
{
    for (size_t i = 0; i < p->n_kernels; i++) {
        *out = &p->kernel[i];
        if (p->kernel[i].phase == phase && strcmp(p->kernel[i].kernel, name) == 0) return KVL_OK;
    }
    const kvl_status status = kvl_realloc(&p->kernel, p->n_kernels + 1, sizeof *p->kernel);
    if (status != KVL_OK) return status;
    *out = &p->kernel[p->n_kernels++];
    **out = (struct kvl_kernel_times){.kernel = name, .phase = phase};
    return KVL_OK;
}

static kvl_status add_launch(struct kvl_kernel_times *k, const struct kvl_sample *sample)
{
    if (k->n == k->room) {
        const size_t room = k->room ? 2 * k->room : 64;
        const kvl_status status = kvl_realloc(&k->ns, room, sizeof *k->ns);
        if (status != KVL_OK) return status;
        k->room = room;
    }
    k->ns[k->n++] = (double)(sample->end_ns - sample->start_ns);
    k->work.bytes += sample->work.bytes;
    k->work.flops += sample->work.flops;
    return KVL_OK;
}

kvl_status kvl_profile_add(struct kvl_profile *p, const char *phase, uint64_t wall_ns, const struct kvl_sample *samples, size_t n)
{
    kvl_status status = KVL_OK;
    size_t index = 0;
    if (n == 0) return KVL_OK;
    KVL_TRY(find_phase(p, phase, &index));
    struct kvl_phase_times *times = &p->phase[index];
    uint64_t batch_start_ns = samples[0].start_ns;
    for (size_t i = 0; i < n; i++) {
        struct kvl_kernel_times *k = NULL;
        KVL_TRY(find_kernel(p, samples[i].kernel, index, &k));
        KVL_TRY(add_launch(k, &samples[i]));
        times->busy_ns += samples[i].end_ns - samples[i].start_ns;
        if (i + 1 < n && samples[i + 1].batch == samples[i].batch) continue;
        times->span_ns += samples[i].end_ns - batch_start_ns;
        if (i + 1 < n) batch_start_ns = samples[i + 1].start_ns;
    }
    times->wall_ns += wall_ns;
    times->steps++;
done:
    return status;
}

void kvl_profile_free(struct kvl_profile *p)
{
    for (size_t i = 0; i < p->n_kernels; i++) kvl_free(&p->kernel[i].ns);
    kvl_free(&p->kernel);
    kvl_free(&p->phase);
    *p = (struct kvl_profile){0};
}

void kvl_kernel_summarize(const struct kvl_profile *p, struct kvl_kernel_times *k, struct kvl_kernel_summary *out)
{
    double sum = 0.0;
    for (size_t i = 0; i < k->n; i++) sum += k->ns[i];
    const double median = kvl_median(k->ns, k->n); /* sorts */
    *out = (struct kvl_kernel_summary){
        .ns_min = k->ns[0],
        .ns_median = median,
        .ns_max = k->ns[k->n - 1],
        .ns_sum = sum,
        .gbps = sum > 0.0 ? (double)k->work.bytes / sum : 0.0,
        .gflops = sum > 0.0 ? (double)k->work.flops / sum : 0.0,
    };
    out->read_share = p->peaks.read_gbps > 0.0 ? out->gbps / p->peaks.read_gbps : NAN;
    out->fma_share = p->peaks.fma_gflops > 0.0 ? out->gflops / p->peaks.fma_gflops : NAN;
    out->peak_share = fmax(out->read_share, out->fma_share);
}
