/* Structs of the device room, and what its files share. Nothing outside host/device includes this.
 *
 * Ownership: a device owns its programs, a program its kernels; buffers belong to whoever made them and are linked into the
 * device's ledger until they are freed. Programs and kernels are kept in order of first use. */
#ifndef KVL_DEVICE_INTERNAL_H
#define KVL_DEVICE_INTERNAL_H
#include "device.h"
#include "tuning.h"
#include <CL/cl.h>

/* A device as found on a platform, before it is opened. */
struct kvl_found {
    cl_platform_id platform;
    cl_device_id id;
    struct kvl_caps caps;
};
kvl_status kvl_find_devices(struct kvl_found **list, size_t *n); /* free with kvl_free */

/* A launch whose event is kept for profiling. */
struct kvl_pending {
    cl_event event;
    const char *kernel;
    struct kvl_work work;
    uint64_t batch;
};

struct kvl_device {
    cl_device_id id;
    cl_context context;
    cl_command_queue queue;
    struct kvl_caps caps;
    char platform_version[256]; /* names the compiler's version on some */
    struct kvl_buffer *buffers; /* newest first */
    struct kvl_region *regions; /* that hold them on a CPU */
    struct kvl_ledger ledger;
    struct kvl_program *programs;
    struct kvl_tuning tuning;
    uint64_t launches, builds; /* kernels enqueued; programs compiled from source */
    uint64_t serial;           /* of the last buffer */
    uint64_t waits; /* for the queue to be empty */
    char staging[1 << 16]; /* of small writes since the last wait */
    uint64_t staged;       /* bytes of it in use */
    bool profiling;
    struct kvl_pending *pending;
    size_t n_pending, pending_room;
};

struct kvl_buffer {
    struct kvl_device *device; /* NULL once the device was closed */
    struct kvl_buffer *next, *previous;
    cl_mem memory;
    struct kvl_region *region; /* NULL: the driver's own memory */
    const char *owner;
    int layer;
    uint64_t serial; /* from 1 on, never the same twice: handles are used again */
    uint64_t size, bytes[KVL_MEM_CLASSES];
};

struct kvl_program {
    struct kvl_device *device;
    struct kvl_program *next;
    struct kvl_kernel *kernels;
    cl_program program;
    char sha256[65]; /* of text and build options */
    char *names;     /* of its parts, for messages */
};

/* The argument that a kernel has. */
struct kvl_set_arg {
    bool known;
    struct kvl_arg arg;
    uint64_t serial; /* of the buffer, 0 = none */
    void *bytes;     /* STRUCT: a copy */
};

struct kvl_kernel {
    struct kvl_program *program;
    struct kvl_kernel *next;
    cl_kernel kernel;
    char *name;
    cl_uint n_args;
    struct kvl_set_arg *set; /* [n_args] */
};

/* KVL_OK, or the error of an OpenCL call on `object` ("buffer 'kv pages'"). */
kvl_status kvl_cl_check(cl_int code, const char *call, const char *object);
kvl_status kvl_cl_status(cl_int code);
const char *kvl_cl_error_name(cl_int code);

void kvl_buffer_release(struct kvl_buffer *buffer); /* its memory; blocks where that is a region's, until no command uses it */

void kvl_device_waited(struct kvl_device *device); /* nothing is in the queue any more */

void kvl_ledger_enter(struct kvl_device *device, struct kvl_buffer *buffer);
void kvl_ledger_remove(struct kvl_buffer *buffer);
void kvl_ledger_abandon(struct kvl_device *device); /* at close: warns of each buffer and releases its memory */

/* Memory for a buffer of a CPU device; NULL on others, and where none is to be had: let the driver find some. */
void *kvl_region_take(struct kvl_device *device, uint64_t bytes, struct kvl_region **region);
void kvl_region_finish(const struct kvl_region *region); /* waits until no command uses it */
void kvl_region_give_back(struct kvl_region *region);      /* of one buffer, released */

/* The program cache on disk. A miss, a damaged entry and a failed write are not errors. */
/* Whether entries are kept for this device: not if $KVLAB_NO_PROGRAM_CACHE is 1 or a part of its platform's name. */
bool kvl_program_cache_serves(const struct kvl_caps *caps);
bool kvl_program_cache_load(const char *key, char **binary, size_t *size); /* free with kvl_free */
void kvl_program_cache_store(const char *key, const void *binary, size_t size);

void kvl_blas_forget(struct kvl_device *device); /* drops what CLBlast keeps for it */

void kvl_program_forget(struct kvl_program *program); /* takes it out of its device and frees it */

void kvl_kernel_free(struct kvl_kernel **kernel);

/* Room for the event of the next launch; it counts when the caller adds 1 to n_pending. */
kvl_status kvl_profile_slot(struct kvl_device *device, const char *kernel, struct kvl_work work, cl_event **event);
void kvl_profile_drop(struct kvl_device *device); /* releases all kept events */

#endif
