/* Launch times by phase of a run ("prefill", "tg128@d4096") and kernel: /kernels of the run file, and `bench --kernels`. */
#ifndef KVL_KERNELTIMES_H
#define KVL_KERNELTIMES_H
#include "device.h"

enum { KVL_PHASE_BYTES = 24 }; /* longest name of a phase, and its NUL */

/* One kernel in one phase. All launch times are kept, because the median needs them. */
struct kvl_kernel_times {
    const char *kernel; /* owned by its program */
    size_t phase;
    double *ns; /* [n] */
    size_t n, room;
    struct kvl_work work; /* sums */
};

/* Sums over the steps of a phase. span: from the first start to the last end of a kernel, token by token (batch by batch: struct kvl_sample). The queue
 * is in order, so span - busy is time between kernels, and wall - span is the host's: before a token's first kernel starts and after its last one
 * has ended. */
struct kvl_phase_times {
    char name[KVL_PHASE_BYTES];
    uint64_t steps, wall_ns, span_ns, busy_ns;
};

struct kvl_profile {                 /* zero-initialise */
    struct kvl_kernel_times *kernel; /* in order of first launch */
    struct kvl_phase_times *phase;
    size_t n_kernels, n_phases;
    struct kvl_peaks peaks; /* set by the caller; 0 = not measured */
};

/* A step of `phase` that took wall_ns and launched the n samples. No samples, no entry. */
kvl_status kvl_profile_add(struct kvl_profile *profile, const char *phase, uint64_t wall_ns, const struct kvl_sample *samples,
                           size_t n);
const struct kvl_phase_times *kvl_profile_phase(const struct kvl_profile *profile, const char *name); /* NULL if there is none */
void kvl_profile_free(struct kvl_profile *profile);

struct kvl_kernel_summary {
    double ns_min, ns_median, ns_max, ns_sum;
    double gbps, gflops;          /* 0 if the launches did not state their work */
    double read_share, fma_share; /* of the measured peaks; NaN if those are not known */
    double peak_share;            /* the larger one: the peak that limits the kernel */
};
/* Sorts the kernel's times. */
void kvl_kernel_summarize(const struct kvl_profile *profile, struct kvl_kernel_times *times, struct kvl_kernel_summary *out);

#endif
