/* Raw profiling samples. Events are kept only while profiling is on; a launch writes into the slot after the last kept one,
 * which counts once the launch was accepted. */
#include "device_internal.h"
#include "mem.h"

kvl_status kvl_profile_slot(struct kvl_device *device, const char *kernel, struct kvl_work work, cl_event **event)
{
    kvl_status status = KVL_OK;
    if (device->n_pending == device->pending_room) {
        const size_t room = device->pending_room ? 2 * device->pending_room : 256;
        KVL_TRY(kvl_realloc(&device->pending, room, sizeof *device->pending));
        device->pending_room = room;
    }
    device->pending[device->n_pending] = (struct kvl_pending){.kernel = kernel, .work = work, .batch = device->waits};
    *event = &device->pending[device->n_pending].event;
done:
    return status;
}

void kvl_profile_drop(struct kvl_device *device)
{
    for (size_t i = 0; i < device->n_pending; i++) clReleaseEvent(device->pending[i].event);
    kvl_free(&device->pending);
    device->n_pending = device->pending_room = 0;
}

void kvl_profile_on(struct kvl_device *device, bool on) { device->profiling = on; }

static kvl_status read_sample(const struct kvl_pending *pending, struct kvl_sample *sample)
{
    static const cl_profiling_info whats[] = {CL_PROFILING_COMMAND_QUEUED, CL_PROFILING_COMMAND_SUBMIT, CL_PROFILING_COMMAND_START,
                                              CL_PROFILING_COMMAND_END};
    kvl_status status = KVL_OK;
    cl_ulong t[4];
    for (size_t i = 0; i < 4; i++)
        KVL_TRY(kvl_cl_check(clGetEventProfilingInfo(pending->event, whats[i], sizeof t[i], &t[i], NULL), "clGetEventProfilingInfo",
                             pending->kernel));
    *sample = (struct kvl_sample){
        .kernel = pending->kernel, .work = pending->work, .batch = pending->batch, .queued_ns = t[0], .submit_ns = t[1], .start_ns = t[2], .end_ns = t[3]};
done:
    return status;
}

kvl_status kvl_profile_take(struct kvl_device *device, struct kvl_sample **samples, size_t *n)
{
    kvl_status status = KVL_OK;
    struct kvl_sample *list = NULL;
    KVL_TRY(kvl_device_finish(device));
    KVL_TRY(kvl_alloc(&list, device->n_pending, sizeof *list));
    for (size_t i = 0; i < device->n_pending; i++) KVL_TRY(read_sample(device->pending + i, list + i));
    *samples = list;
    *n = device->n_pending;
    list = NULL;
done:
    kvl_free(&list);
    kvl_profile_drop(device);
    return status;
}
