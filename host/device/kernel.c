/* Kernels of a program, and their launches. */
#include "device_internal.h"
#include "mem.h"
#include <string.h>

static kvl_status kernel_new(struct kvl_program *program, const char *name, struct kvl_kernel **out)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel = NULL;
    cl_int code;
    KVL_TRY(kvl_alloc(&kernel, 1, sizeof *kernel));
    kernel->program = program;
    KVL_TRY(kvl_strdup(&kernel->name, name));
    kernel->kernel = clCreateKernel(program->program, name, &code);
    if (code == CL_INVALID_KERNEL_NAME) {
        status = kvl_fail(KVL_E_DEVICE, "%s has no kernel '%s'", program->names, name);
        goto done;
    }
    KVL_TRY(kvl_cl_check(code, "clCreateKernel", name));
    KVL_TRY(kvl_cl_check(clGetKernelInfo(kernel->kernel, CL_KERNEL_NUM_ARGS, sizeof kernel->n_args, &kernel->n_args, NULL),
                         "clGetKernelInfo", name));
    KVL_TRY(kvl_alloc(&kernel->set, kernel->n_args, sizeof *kernel->set));
    *out = kernel;
    kernel = NULL;
done:
    kvl_kernel_free(&kernel);
    return status;
}

void kvl_kernel_free(struct kvl_kernel **pointer)
{
    struct kvl_kernel *kernel = *pointer;
    if (kernel == NULL) return;
    if (kernel->kernel) clReleaseKernel(kernel->kernel);
    for (cl_uint i = 0; kernel->set != NULL && i < kernel->n_args; i++) kvl_free(&kernel->set[i].bytes);
    kvl_free(&kernel->set);
    kvl_free(&kernel->name);
    kvl_free(pointer);
}

kvl_status kvl_kernel_get(struct kvl_program *program, const char *name, struct kvl_kernel **out)
{
    struct kvl_kernel **link = &program->kernels;
    while (*link != NULL && strcmp((*link)->name, name) != 0) link = &(*link)->next;
    kvl_status status = *link ? KVL_OK : kernel_new(program, name, link);
    if (status == KVL_OK) *out = *link;
    return status;
}

kvl_status kvl_kernel_info(struct kvl_kernel *kernel, uint64_t *private_bytes, uint64_t *local_bytes, uint64_t *multiple)
{
    kvl_status status = KVL_OK;
    const struct {
        cl_kernel_work_group_info what;
        uint64_t *out;
    } rows[] = {{CL_KERNEL_PRIVATE_MEM_SIZE, private_bytes},
                {CL_KERNEL_LOCAL_MEM_SIZE, local_bytes},
                {CL_KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE, multiple}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        *rows[i].out = 0;
        KVL_TRY(kvl_cl_check(clGetKernelWorkGroupInfo(kernel->kernel, kernel->program->device->id, rows[i].what, sizeof(uint64_t),
                                                      rows[i].out, NULL),
                             "clGetKernelWorkGroupInfo", kernel->name));
    }
done:
    return status;
}

static uint64_t serial_of(const struct kvl_arg *arg) { return arg->kind == KVL_ARG_BUFFER && arg->buffer ? arg->buffer->serial : 0; }

static bool is_set(const struct kvl_set_arg *set, const struct kvl_arg *arg)
{
    if (!set->known || set->arg.size != arg->size || set->arg.kind != arg->kind) return false;
    switch (arg->kind) {
    case KVL_ARG_BUFFER: return set->serial == serial_of(arg);
    case KVL_ARG_VALUE: return memcmp(&set->arg.value, &arg->value, arg->size) == 0;
    case KVL_ARG_STRUCT: return memcmp(set->bytes, arg->value.pointer, arg->size) == 0;
    case KVL_ARG_LOCAL: return true;
    }
    return false;
}

static kvl_status remember(struct kvl_set_arg *set, const struct kvl_arg *arg)
{
    kvl_free(&set->bytes);
    *set = (struct kvl_set_arg){.known = true, .arg = *arg, .serial = serial_of(arg)};
    if (arg->kind != KVL_ARG_STRUCT) return KVL_OK;
    const kvl_status status = kvl_alloc(&set->bytes, arg->size, 1);
    if (status == KVL_OK) memcpy(set->bytes, arg->value.pointer, arg->size);
    return status;
}

/* Most arguments are those of the launch before: between the layers of a token a few change, and some drivers allocate memory for each. */
static kvl_status set_arg(struct kvl_kernel *kernel, cl_uint index, const struct kvl_arg *arg)
{
    const cl_mem memory = arg->kind == KVL_ARG_BUFFER && arg->buffer ? arg->buffer->memory : NULL;
    cl_int code = CL_INVALID_VALUE;
    if (is_set(&kernel->set[index], arg)) return KVL_OK;
    switch (arg->kind) {
    case KVL_ARG_BUFFER: code = clSetKernelArg(kernel->kernel, index, sizeof memory, &memory); break;
    case KVL_ARG_VALUE: code = clSetKernelArg(kernel->kernel, index, arg->size, &arg->value); break;
    case KVL_ARG_STRUCT: code = clSetKernelArg(kernel->kernel, index, arg->size, arg->value.pointer); break;
    case KVL_ARG_LOCAL: code = clSetKernelArg(kernel->kernel, index, arg->size, NULL); break;
    }
    if (code == CL_SUCCESS) return remember(&kernel->set[index], arg);
    return kvl_fail(KVL_E_DEVICE, "kernel %s: argument %u (of %u, counted from 0) not accepted: %s (%d)", kernel->name,
                    (unsigned)index, (unsigned)kernel->n_args, kvl_cl_error_name(code), (int)code);
}

static kvl_status fail_launch(const struct kvl_kernel *kernel, const size_t global[3], const size_t local[3], kvl_status status,
                              const char *why)
{
    return kvl_fail(status, "kernel %s over %zu x %zu x %zu in groups of %zu x %zu x %zu: %s", kernel->name, global[0], global[1],
                    global[2], local[0], local[1], local[2], why);
}

static bool sizes_fit(const size_t global[3], const size_t local[3])
{
    for (int d = 0; d < 3; d++)
        if (global[d] == 0 || local[d] == 0 || global[d] % local[d] != 0) return false;
    return true;
}

kvl_status kvl_launch(struct kvl_device *device, struct kvl_kernel *kernel, const size_t global[3], const size_t local[3],
                      struct kvl_work work, const struct kvl_arg *args, size_t n_args)
{
    kvl_status status = KVL_OK;
    cl_event *event = NULL;
    if (n_args != kernel->n_args)
        return kvl_fail(KVL_E_DEVICE, "kernel %s takes %u arguments, %zu given", kernel->name, (unsigned)kernel->n_args, n_args);
    if (!sizes_fit(global, local))
        return fail_launch(kernel, global, local, KVL_E_DEVICE, "sizes must be multiples of the group's, and not 0");
    for (size_t i = 0; i < n_args; i++) KVL_TRY(set_arg(kernel, (cl_uint)i, args + i));
    if (device->profiling) KVL_TRY(kvl_profile_slot(device, kernel->name, work, &event));
    const cl_int code = clEnqueueNDRangeKernel(device->queue, kernel->kernel, 3, NULL, global, local, 0, NULL, event);
    if (code != CL_SUCCESS) return fail_launch(kernel, global, local, kvl_cl_status(code), kvl_cl_error_name(code));
    device->launches++;
    if (event) device->n_pending++;
done:
    return status;
}

uint64_t kvl_device_launches(const struct kvl_device *device) { return device->launches; }
