/* The ledger: every buffer of a device, by class, with the size that the driver reports. */
#include "device_internal.h"
#include "log.h"
#include <string.h>

const char *const kvl_mem_class_name[KVL_MEM_CLASSES] = {
    [KVL_MEM_WEIGHTS] = "weights", [KVL_MEM_PAYLOAD] = "payload", [KVL_MEM_SCALE] = "scale",     [KVL_MEM_INDEX] = "index",
    [KVL_MEM_TABLE] = "table",     [KVL_MEM_SLACK] = "slack",     [KVL_MEM_SCRATCH] = "scratch",
};

void kvl_ledger_enter(struct kvl_device *device, struct kvl_buffer *buffer)
{
    struct kvl_ledger *ledger = &device->ledger;
    buffer->device = device;
    buffer->next = device->buffers;
    if (buffer->next) buffer->next->previous = buffer;
    device->buffers = buffer;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) ledger->bytes[c] += buffer->bytes[c];
    ledger->total += buffer->size;
    ledger->n_buffers++;
    if (ledger->total > ledger->peak) ledger->peak = ledger->total;
}

void kvl_ledger_remove(struct kvl_buffer *buffer)
{
    struct kvl_device *device = buffer->device;
    if (buffer->next) buffer->next->previous = buffer->previous;
    if (buffer->previous)
        buffer->previous->next = buffer->next;
    else
        device->buffers = buffer->next;
    for (int c = 0; c < KVL_MEM_CLASSES; c++) device->ledger.bytes[c] -= buffer->bytes[c];
    device->ledger.total -= buffer->size;
    device->ledger.n_buffers--;
    buffer->device = NULL;
}

void kvl_ledger_abandon(struct kvl_device *device)
{
    while (device->buffers) {
        struct kvl_buffer *buffer = device->buffers;
        kvl_warn("%s closed with buffer '%s' (layer %d, %llu bytes) not freed", device->caps.name, buffer->owner, buffer->layer,
                 (unsigned long long)buffer->size);
        kvl_ledger_remove(buffer);
        kvl_buffer_release(buffer);
    }
}

kvl_status kvl_buffer_split(struct kvl_buffer *buffer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    struct kvl_ledger *ledger = &buffer->device->ledger;
    uint64_t sum = 0;
    for (int c = 0; c < KVL_MEM_CLASSES; c++)
        if (__builtin_add_overflow(sum, bytes[c], &sum))
            return kvl_fail(KVL_E_DEVICE_MEM, "buffer '%s': classes overflow", buffer->owner);
    if (sum != buffer->size)
        return kvl_fail(KVL_E_DEVICE_MEM, "buffer '%s': its classes sum to %llu bytes, its size is %llu", buffer->owner,
                        (unsigned long long)sum, (unsigned long long)buffer->size);
    for (int c = 0; c < KVL_MEM_CLASSES; c++) ledger->bytes[c] += bytes[c] - buffer->bytes[c];
    memcpy(buffer->bytes, bytes, sizeof buffer->bytes);
    return KVL_OK;
}

void kvl_ledger_read(const struct kvl_device *device, struct kvl_ledger *out) { *out = device->ledger; }

void kvl_ledger_reset_peak(struct kvl_device *device) { device->ledger.peak = device->ledger.total; }

void kvl_ledger_walk(const struct kvl_device *device,
                     bool (*fn)(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES]), void *context)
{
    for (const struct kvl_buffer *b = device->buffers; b != NULL; b = b->next)
        if (!fn(context, b->owner, b->layer, b->bytes)) return;
}
