/* The OpenCL device: the only room that knows CL/cl.h.
 *
 * One opened device = one context and one in-order queue with profiling. Work is enqueued and never waited for inside
 * this room, except where a function says "blocks". Buffers are entered in the ledger, so that
 * sum of CL_MEM_SIZE = kvl_ledger total, always. Every OpenCL call is checked; a failure names the call, the code and the object. */
#ifndef KVL_DEVICE_H
#define KVL_DEVICE_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- devices and capabilities (all queried, nothing guessed from a name) ---- */

enum kvl_device_type { KVL_DEVICE_CPU, KVL_DEVICE_GPU, KVL_DEVICE_OTHER, KVL_DEVICE_TYPES };
extern const char *const kvl_device_type_name[KVL_DEVICE_TYPES]; /* "cpu", "gpu", "other" */

struct kvl_caps {
    char platform[64], name[128], vendor[128], driver[128], version[128], c_version[64];
    enum kvl_device_type type;
    uint32_t compute_units, max_work_group, clock_mhz;
    uint32_t float_width; /* CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT: 1 = vectors are work-items, more = SIMD registers, 0 = masked */
    uint64_t global_bytes, max_alloc_bytes, local_bytes, constant_bytes;
    bool local_is_dedicated; /* CL_LOCAL rather than CL_GLOBAL */
    bool fp16;               /* cl_khr_fp16 */
    bool fp64;
    bool subgroups;          /* cl_khr_subgroups, cl_intel_subgroups or OpenCL 3 sub-groups with a non-zero maximum */
    bool int_dot;            /* cl_khr_integer_dot_product, packed 4x8 */
    bool unified_memory;
    bool masked;             /* $KVLAB_MASK hides something */
};

/* Whether it silently ends all loops of a work-item after 65,535 iterations in sum, as Mesa's llvmpipe does (rusticl, 22.3.6). */
bool kvl_loops_are_cut(const struct kvl_caps *caps);

/* All devices of all platforms, in platform order, into *list (free with kvl_free). *n may be 0. */
kvl_status kvl_device_list(struct kvl_caps **list, size_t *n);

struct kvl_device;

/* Opens a device. choice: an index of kvl_device_list ("0"), a type ("cpu", "gpu"), or a part of name or platform
 * (case-insensitive); NULL = $KVLAB_DEVICE, and if that is unset the first GPU, else the first CPU.
 * No match: KVL_E_USAGE with the list of devices. Caps named in $KVLAB_MASK (comma list of fp16, subgroups, int_dot, vectors) are cleared: for tests. */
kvl_status kvl_device_open(const char *choice, struct kvl_device **out);
void kvl_device_close(struct kvl_device **device); /* blocks; warns about buffers still in the ledger */
const struct kvl_caps *kvl_device_caps(const struct kvl_device *device);
kvl_status kvl_device_finish(struct kvl_device *device); /* blocks */

/* ---- ledger and buffers ---- */

enum kvl_mem_class {
    KVL_MEM_WEIGHTS, KVL_MEM_PAYLOAD, KVL_MEM_SCALE, KVL_MEM_INDEX, KVL_MEM_TABLE, KVL_MEM_SLACK, KVL_MEM_SCRATCH,
    KVL_MEM_CLASSES
};
extern const char *const kvl_mem_class_name[KVL_MEM_CLASSES];

struct kvl_buffer; /* one cl_mem with its ledger entry */

/* bytes > max_alloc: KVL_E_DEVICE_MEM with wanted, limit and what to change. owner: static text ("kv pages").
 * layer: -1 if none. zero: filled with 0 on the device. */
kvl_status kvl_buffer_new(struct kvl_device *device, const char *owner, int layer, enum kvl_mem_class cls, uint64_t bytes, bool zero,
                          struct kvl_buffer **out);
void kvl_buffer_free(struct kvl_buffer **buffer);
uint64_t kvl_buffer_bytes(const struct kvl_buffer *buffer); /* CL_MEM_SIZE as the driver reports it */

/* A buffer that holds several classes (a page slab: payload, scale, slack): bytes by class, which must sum to its size. */
kvl_status kvl_buffer_split(struct kvl_buffer *buffer, const uint64_t bytes[KVL_MEM_CLASSES]);

kvl_status kvl_buffer_write(struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes, const void *data); /* blocks until `data` is free to reuse: at once for a few KiB */
kvl_status kvl_buffer_read(struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes, void *data);        /* blocks */
kvl_status kvl_buffer_copy(struct kvl_buffer *from, uint64_t from_offset, struct kvl_buffer *to, uint64_t to_offset, uint64_t bytes);
kvl_status kvl_buffer_fill_zero(struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes);

struct kvl_ledger {
    uint64_t bytes[KVL_MEM_CLASSES]; /* now */
    uint64_t total, peak;            /* sum of CL_MEM_SIZE now, and its maximum since open or kvl_ledger_reset_peak */
    uint64_t n_buffers;
};
void kvl_ledger_read(const struct kvl_device *device, struct kvl_ledger *out);
void kvl_ledger_reset_peak(struct kvl_device *device);
/* One entry a buffer: for plan == ledger tests and the run file. fn may stop the walk by returning false. */
void kvl_ledger_walk(const struct kvl_device *device,
                     bool (*fn)(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES]), void *context);

/* ---- programs ---- */

/* One piece of program text. `name` appears in compiler messages through #line 1 "name". */
struct kvl_source {
    const char *name, *text;
};

/* An embedded file of cl/ by its path below cl/ ("attend.cl", "weight/q4_1.cl"); NULL if there is none. */
const char *kvl_source_text(const char *name);

struct kvl_program;

/* Concatenates the parts and builds them. Options are integer -D only. Prepended by the room: KVL_HAS_FP16, KVL_HAS_SUBGROUPS,
 * KVL_HAS_INT_DOT as 0/1 and KVL_DEVICE_CPU 0/1. Binaries are cached under kvl_cache_dir() by
 * sha256(final text, options, platform, device, driver, version); a damaged cache entry is rebuilt. $KVLAB_NO_PROGRAM_CACHE=1 disables
 * it, a part of a platform's name for that platform.
 * Programs are owned by the device and shared: the same text and options give the same program. */
kvl_status kvl_program_get(struct kvl_device *device, const struct kvl_source *parts, size_t n_parts, const char *options,
                           struct kvl_program **out);
/* The text that kvl_program_get would build on a device with these caps; appends. Needs no device. */
struct kvl_text;
kvl_status kvl_program_text(const struct kvl_caps *caps, const struct kvl_source *parts, size_t n_parts, struct kvl_text *text);
/* sha256 over all programs built so far in order of first use (the "final CL source" of a run). */
kvl_status kvl_device_source_sha256(const struct kvl_device *device, char hex[65]);

struct kvl_kernel;
/* Kernel of a program, owned by it; the same name gives the same object. */
kvl_status kvl_kernel_get(struct kvl_program *program, const char *name, struct kvl_kernel **out);
/* Private-memory (spill) bytes and preferred work-group multiple as the driver reports them. */
kvl_status kvl_kernel_info(struct kvl_kernel *kernel, uint64_t *private_bytes, uint64_t *local_bytes, uint64_t *multiple);

/* ---- launches ---- */

enum kvl_arg_kind { KVL_ARG_BUFFER, KVL_ARG_VALUE, KVL_ARG_STRUCT, KVL_ARG_LOCAL };
struct kvl_arg {
    enum kvl_arg_kind kind;
    size_t size;               /* VALUE, STRUCT, LOCAL: bytes */
    struct kvl_buffer *buffer; /* BUFFER; NULL is a legal null pointer argument */
    union { uint32_t u32; int32_t i32; uint64_t u64; float f32; const void *pointer; } value; /* pointer: STRUCT, read during the launch call */
};
#define KVL_BUF(b) ((struct kvl_arg){.kind = KVL_ARG_BUFFER, .buffer = (b)})
#define KVL_U32(x) ((struct kvl_arg){.kind = KVL_ARG_VALUE, .size = 4, .value.u32 = (x)})
#define KVL_I32(x) ((struct kvl_arg){.kind = KVL_ARG_VALUE, .size = 4, .value.i32 = (x)})
#define KVL_U64(x) ((struct kvl_arg){.kind = KVL_ARG_VALUE, .size = 8, .value.u64 = (x)})
#define KVL_F32(x) ((struct kvl_arg){.kind = KVL_ARG_VALUE, .size = 4, .value.f32 = (x)})
#define KVL_STRUCT(x) ((struct kvl_arg){.kind = KVL_ARG_STRUCT, .size = sizeof(x), .value.pointer = &(x)})
#define KVL_LOCAL(bytes) ((struct kvl_arg){.kind = KVL_ARG_LOCAL, .size = (bytes)})

/* What a launch works through, for roofline figures; 0 = not stated. */
struct kvl_work {
    uint64_t bytes, flops;
};

/* Enqueues kernel over global[0..2] work-items in groups of local[0..2] (global is a multiple of local; unused dimensions 1).
 * n_args must equal the kernel's argument count. Never blocks. */
kvl_status kvl_launch(struct kvl_device *device, struct kvl_kernel *kernel, const size_t global[3], const size_t local[3],
                      struct kvl_work work, const struct kvl_arg *args, size_t n_args);
#define KVL_LAUNCH(device, kernel, global, local, work, ...)                                                           \
    kvl_launch(device, kernel, global, local, work, (const struct kvl_arg[]){__VA_ARGS__},                             \
               sizeof((const struct kvl_arg[]){__VA_ARGS__}) / sizeof(struct kvl_arg))

uint64_t kvl_device_launches(const struct kvl_device *device); /* kernels enqueued since open */

/* ---- profiling: raw samples, one a launch ---- */

struct kvl_sample {
    const char *kernel;                              /* owned by its program */
    uint64_t queued_ns, submit_ns, start_ns, end_ns; /* the device's clock */
    uint64_t batch; /* the same for launches between which the host waited for nothing: a token's */
    struct kvl_work work;
};
/* While on, launches keep their events; samples are collected (blocks) by kvl_profile_take, which appends nothing twice. */
void kvl_profile_on(struct kvl_device *device, bool on);
kvl_status kvl_profile_take(struct kvl_device *device, struct kvl_sample **samples, size_t *n); /* free with kvl_free */

/* ---- measured peaks ---- */

struct kvl_peaks {
    double read_gbps, copy_gbps, fma_gflops, launch_us; /* medians of several tries */
};
kvl_status kvl_device_measure(struct kvl_device *device, struct kvl_peaks *out); /* about two seconds; blocks */

#endif
