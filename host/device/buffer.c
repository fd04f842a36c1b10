/* Buffers and transfers. Every range is checked here, so that a wrong offset is a message and not a driver's mood. */
#include "device_internal.h"
#include "mem.h"
#include <string.h>

/* Refuses before the driver does: many drivers overcommit and fail much later, in a launch. */
static kvl_status check_limits(const struct kvl_device *device, const char *owner, int layer, uint64_t bytes)
{
    const struct kvl_caps *caps = &device->caps;
    const unsigned long long wanted = bytes, limit = caps->max_alloc_bytes, held = device->ledger.total, all = caps->global_bytes;
    if (bytes == 0) return kvl_fail(KVL_E_DEVICE_MEM, "buffer '%s' (layer %d): 0 bytes wanted", owner, layer);
    if (wanted > limit)
        return kvl_fail(KVL_E_DEVICE_MEM,
                        "buffer '%s' (layer %d): %llu bytes wanted, one buffer of %s is at most %llu; "
                        "use a smaller context, or split it over several buffers",
                        owner, layer, wanted, caps->name, limit);
    if (held > all || wanted > all - held)
        return kvl_fail(KVL_E_DEVICE_MEM,
                        "buffer '%s' (layer %d): %llu bytes wanted, %llu of the %llu bytes of %s are in use; "
                        "use a smaller context or model, or a stronger compression",
                        owner, layer, wanted, held, all, caps->name);
    return KVL_OK;
}

kvl_status kvl_buffer_new(struct kvl_device *device, const char *owner, int layer, enum kvl_mem_class cls, uint64_t bytes,
                          bool zero, struct kvl_buffer **out)
{
    kvl_status status = KVL_OK;
    struct kvl_buffer *buffer = NULL;
    size_t size = 0;
    cl_int code;
    KVL_TRY(check_limits(device, owner, layer, bytes));
    KVL_TRY(kvl_alloc(&buffer, 1, sizeof *buffer));
    buffer->owner = owner;
    buffer->layer = layer;
    buffer->serial = ++device->serial;
    void *address = kvl_region_take(device, bytes, &buffer->region);
    buffer->memory = clCreateBuffer(device->context, CL_MEM_READ_WRITE | (address != NULL ? CL_MEM_USE_HOST_PTR : 0), (size_t)bytes, address, &code);
    KVL_TRY(kvl_cl_check(code, "clCreateBuffer", owner));
    KVL_TRY(kvl_cl_check(clGetMemObjectInfo(buffer->memory, CL_MEM_SIZE, sizeof size, &size, NULL), "clGetMemObjectInfo", owner));
    buffer->size = buffer->bytes[cls] = size;
    kvl_ledger_enter(device, buffer);
    if (zero) KVL_TRY(kvl_buffer_fill_zero(buffer, 0, size));
    *out = buffer;
    buffer = NULL;
done:
    kvl_buffer_free(&buffer);
    return status;
}

void kvl_buffer_release(struct kvl_buffer *buffer)
{
    if (buffer->region != NULL) kvl_region_finish(buffer->region);
    if (buffer->memory != NULL) clReleaseMemObject(buffer->memory);
    if (buffer->region != NULL) kvl_region_give_back(buffer->region);
    buffer->memory = NULL;
    buffer->region = NULL;
}

void kvl_buffer_free(struct kvl_buffer **pointer)
{
    struct kvl_buffer *buffer = *pointer;
    if (buffer == NULL) return;
    if (buffer->device) kvl_ledger_remove(buffer);
    kvl_buffer_release(buffer);
    kvl_free(pointer);
}

uint64_t kvl_buffer_bytes(const struct kvl_buffer *buffer) { return buffer->size; }

static kvl_status check_range(const struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes, const char *verb)
{
    if (offset <= buffer->size && bytes <= buffer->size - offset) return KVL_OK;
    return kvl_fail(KVL_E_DEVICE, "%s of %llu bytes at %llu reaches beyond buffer '%s' of %llu bytes", verb,
                    (unsigned long long)bytes, (unsigned long long)offset, buffer->owner, (unsigned long long)buffer->size);
}

/* A copy that lives until the host next waits for the queue; NULL for what is not small, and when there is no more room. */
static const void *stage(struct kvl_device *device, const void *data, uint64_t bytes)
{
    enum { SMALL = 4096 };
    if (bytes > SMALL || bytes > sizeof device->staging - device->staged) return NULL;
    void *copy = memcpy(device->staging + device->staged, data, bytes);
    device->staged += bytes;
    return copy;
}

kvl_status kvl_buffer_write(struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes, const void *data)
{
    const kvl_status status = check_range(buffer, offset, bytes, "write");
    if (status != KVL_OK || bytes == 0) return status;
    const void *copy = stage(buffer->device, data, bytes);
    return kvl_cl_check(clEnqueueWriteBuffer(buffer->device->queue, buffer->memory, copy == NULL, offset, bytes, copy != NULL ? copy : data, 0, NULL, NULL),
                        "clEnqueueWriteBuffer", buffer->owner);
}

kvl_status kvl_buffer_read(struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes, void *data)
{
    const kvl_status status = check_range(buffer, offset, bytes, "read");
    if (status != KVL_OK || bytes == 0) return status;
    const kvl_status read = kvl_cl_check(clEnqueueReadBuffer(buffer->device->queue, buffer->memory, CL_TRUE, offset, bytes, data, 0, NULL, NULL),
                                         "clEnqueueReadBuffer", buffer->owner);
    if (read == KVL_OK) kvl_device_waited(buffer->device);
    return read;
}

kvl_status kvl_buffer_copy(struct kvl_buffer *from, uint64_t from_offset, struct kvl_buffer *to, uint64_t to_offset, uint64_t bytes)
{
    kvl_status status = KVL_OK;
    KVL_TRY(check_range(from, from_offset, bytes, "copy"));
    KVL_TRY(check_range(to, to_offset, bytes, "copy"));
    if (bytes == 0) return KVL_OK;
    KVL_TRY(kvl_cl_check(
        clEnqueueCopyBuffer(from->device->queue, from->memory, to->memory, from_offset, to_offset, bytes, 0, NULL, NULL),
        "clEnqueueCopyBuffer", to->owner));
done:
    return status;
}

/* The widest pattern that the range allows: drivers store one pattern at a time. */
kvl_status kvl_buffer_fill_zero(struct kvl_buffer *buffer, uint64_t offset, uint64_t bytes)
{
    static const char zeros[64];
    size_t width = sizeof zeros;
    const kvl_status status = check_range(buffer, offset, bytes, "fill");
    if (status != KVL_OK || bytes == 0) return status;
    while ((offset | bytes) % width != 0) width /= 2;
    return kvl_cl_check(clEnqueueFillBuffer(buffer->device->queue, buffer->memory, zeros, width, offset, bytes, 0, NULL, NULL),
                        "clEnqueueFillBuffer", buffer->owner);
}
