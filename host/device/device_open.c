/* Chooses a device, opens it (one context, one in-order queue) and closes it. */
#include "device_internal.h"
#include "log.h"
#include "mem.h"
#include "text.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

const char *const kvl_device_type_name[KVL_DEVICE_TYPES] = {
    [KVL_DEVICE_CPU] = "cpu", [KVL_DEVICE_GPU] = "gpu", [KVL_DEVICE_OTHER] = "other"};

static bool contains(const char *text, const char *part)
{
    const size_t n = strlen(part);
    for (; *text != '\0'; text++)
        if (strncasecmp(text, part, n) == 0) return true;
    return false;
}

static const struct kvl_found *first_of_type(const struct kvl_found *list, size_t n, enum kvl_device_type type)
{
    for (size_t i = 0; i < n; i++)
        if (list[i].caps.type == type) return list + i;
    return NULL;
}

static const struct kvl_found *first_by_default(const struct kvl_found *list, size_t n)
{
    static const enum kvl_device_type order[] = {KVL_DEVICE_GPU, KVL_DEVICE_CPU, KVL_DEVICE_OTHER};
    const struct kvl_found *found = NULL;
    for (size_t i = 0; i < 3 && found == NULL; i++) found = first_of_type(list, n, order[i]);
    return found;
}

static const struct kvl_found *match(const struct kvl_found *list, size_t n, const char *choice)
{
    int64_t index;
    if (kvl_parse_i64(choice, &index) && index >= 0 && (uint64_t)index < n) return list + index;
    for (size_t type = 0; type < KVL_DEVICE_TYPES; type++)
        if (strcasecmp(choice, kvl_device_type_name[type]) == 0) return first_of_type(list, n, (enum kvl_device_type)type);
    for (size_t i = 0; i < n; i++)
        if (contains(list[i].caps.name, choice) || contains(list[i].caps.platform, choice)) return list + i;
    return NULL;
}

static kvl_status fail_no_match(const struct kvl_found *list, size_t n, const char *choice)
{
    struct kvl_text text = {0};
    for (size_t i = 0; i < n; i++)
        if (kvl_text_printf(&text, "%s %zu = %s (%s, %s)", i ? "," : "", i, list[i].caps.name, list[i].caps.platform,
                            kvl_device_type_name[list[i].caps.type]) != KVL_OK)
            break;
    const kvl_status status =
        kvl_fail(KVL_E_USAGE, "no device matches '%s'; there %s%s", choice,
                 n == 0 ? "is none" : "are (give a number, cpu, gpu or a part of a name)", text.data ? text.data : "");
    kvl_text_free(&text);
    return status;
}

static kvl_status choose(const struct kvl_found *list, size_t n, const char *choice, const struct kvl_found **out)
{
    if (choice == NULL) choice = getenv("KVLAB_DEVICE");
    const bool unset = choice == NULL || *choice == '\0';
    if (unset && n == 0) return kvl_fail(KVL_E_DEVICE, "no OpenCL device found; install a driver (for the CPU: pocl-opencl-icd)");
    *out = unset ? first_by_default(list, n) : match(list, n, choice);
    return *out == NULL ? fail_no_match(list, n, choice) : KVL_OK;
}

static kvl_status mask_one(struct kvl_caps *caps, const char *word)
{
    static const char *const names[] = {"fp16", "subgroups", "int_dot"};
    bool *const members[] = {&caps->fp16, &caps->subgroups, &caps->int_dot};
    if (strcmp(word, "vectors") == 0) return caps->float_width = 0, KVL_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(word, names[i]) == 0) return *members[i] = false, KVL_OK;
    return kvl_fail(KVL_E_USAGE, "KVLAB_MASK: '%s' is not a capability; use a comma list of fp16, subgroups, int_dot, vectors", word);
}

static kvl_status mask_caps(struct kvl_caps *caps)
{
    kvl_status status = KVL_OK;
    char *words = NULL, *rest = NULL;
    const char *list = getenv("KVLAB_MASK");
    if (list == NULL) return KVL_OK;
    KVL_TRY(kvl_strdup(&words, list));
    caps->masked = *words != '\0';
    for (char *word = strtok_r(words, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) KVL_TRY(mask_one(caps, word));
done:
    kvl_free(&words);
    return status;
}

static kvl_status open_found(struct kvl_device *device, const struct kvl_found *found)
{
    kvl_status status = KVL_OK;
    cl_int code;
    const cl_context_properties properties[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)found->platform, 0};
    device->id = found->id;
    device->caps = found->caps;
    KVL_TRY(mask_caps(&device->caps));
    KVL_TRY(kvl_tuning_lookup(&device->caps, &device->tuning));
    KVL_TRY(kvl_cl_check(clGetPlatformInfo(found->platform, CL_PLATFORM_VERSION, sizeof device->platform_version - 1,
                                           device->platform_version, NULL),
                         "clGetPlatformInfo", device->caps.platform));
    device->context = clCreateContext(properties, 1, &device->id, NULL, NULL, &code);
    KVL_TRY(kvl_cl_check(code, "clCreateContext", device->caps.name));
    device->queue = clCreateCommandQueue(device->context, device->id, CL_QUEUE_PROFILING_ENABLE, &code);
    KVL_TRY(kvl_cl_check(code, "clCreateCommandQueue", device->caps.name));
done:
    return status;
}

kvl_status kvl_device_open(const char *choice, struct kvl_device **out)
{
    kvl_status status = KVL_OK;
    struct kvl_found *list = NULL;
    const struct kvl_found *found = NULL;
    struct kvl_device *device = NULL;
    size_t n = 0;
    KVL_TRY(kvl_find_devices(&list, &n));
    KVL_TRY(choose(list, n, choice, &found));
    KVL_TRY(kvl_alloc(&device, 1, sizeof *device));
    KVL_TRY(open_found(device, found));
    *out = device;
    device = NULL;
done:
    kvl_free(&list);
    kvl_device_close(&device);
    return status;
}

void kvl_device_close(struct kvl_device **pointer)
{
    struct kvl_device *device = *pointer;
    if (device == NULL) return;
    if (device->queue) clFinish(device->queue);
    kvl_profile_drop(device);
    kvl_ledger_abandon(device);
    kvl_blas_forget(device);
    while (device->programs) kvl_program_forget(device->programs);
    if (device->queue) clReleaseCommandQueue(device->queue);
    if (device->context) clReleaseContext(device->context);
    kvl_free(pointer);
}

const struct kvl_caps *kvl_device_caps(const struct kvl_device *device) { return &device->caps; }

kvl_status kvl_device_finish(struct kvl_device *device)
{
    const kvl_status status = kvl_cl_check(clFinish(device->queue), "clFinish", device->caps.name);
    if (status == KVL_OK) kvl_device_waited(device);
    return status;
}

void kvl_device_waited(struct kvl_device *device)
{
    device->waits++;
    device->staged = 0;
}
