/* Finds the devices of all platforms and asks each what it can do. A platform or device that answers with an error is
 * left out with a warning: it must not hide the others. */
#include "device_internal.h"
#include "log.h"
#include "mem.h"
#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* Of later versions than the OpenCL 1.2 headers name. */
enum {
    DEVICE_MAX_NUM_SUB_GROUPS = 0x105C,
    DEVICE_INTEGER_DOT_PRODUCT_CAPABILITIES = 0x1073,
    INTEGER_DOT_PRODUCT_INPUT_4X8BIT_PACKED = 1
};
enum { PLATFORM_NOT_FOUND = -1001 }; /* cl_khr_icd: what the loader says when it knows no platform */

static const struct {
    cl_device_info what;
    const char *name;
    size_t offset, size;
} texts[] = {
#define ROW(what, member) {what, #what, offsetof(struct kvl_caps, member), sizeof((struct kvl_caps *)0)->member}
    ROW(CL_DEVICE_NAME, name),
    ROW(CL_DEVICE_VENDOR, vendor),
    ROW(CL_DRIVER_VERSION, driver),
    ROW(CL_DEVICE_VERSION, version),
    ROW(CL_DEVICE_OPENCL_C_VERSION, c_version),
};

static const struct {
    cl_device_info what;
    const char *name;
    size_t offset, size;
} numbers[] = {
    ROW(CL_DEVICE_MAX_COMPUTE_UNITS, compute_units),
    ROW(CL_DEVICE_MAX_WORK_GROUP_SIZE, max_work_group),
    ROW(CL_DEVICE_MAX_CLOCK_FREQUENCY, clock_mhz),
    ROW(CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT, float_width),
    ROW(CL_DEVICE_GLOBAL_MEM_SIZE, global_bytes),
    ROW(CL_DEVICE_MAX_MEM_ALLOC_SIZE, max_alloc_bytes),
    ROW(CL_DEVICE_LOCAL_MEM_SIZE, local_bytes),
    ROW(CL_DEVICE_MAX_CONSTANT_BUFFER_SIZE, constant_bytes),
#undef ROW
};

/* Copies without the blanks that some drivers pad names with, cut to the room there is. */
static void copy_trimmed(char *out, size_t room, const char *text)
{
    while (isspace((unsigned char)*text)) text++;
    size_t n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1])) n--;
    snprintf(out, room, "%.*s", (int)n, text);
}

static kvl_status query_text(cl_device_id id, cl_device_info what, const char *name, char **out)
{
    kvl_status status = KVL_OK;
    size_t size = 0;
    char *text = NULL;
    KVL_TRY(kvl_cl_check(clGetDeviceInfo(id, what, 0, NULL, &size), "clGetDeviceInfo", name));
    KVL_TRY(kvl_alloc(&text, size + 1, 1));
    KVL_TRY(kvl_cl_check(clGetDeviceInfo(id, what, size, text, NULL), "clGetDeviceInfo", name));
    *out = text;
    text = NULL;
done:
    kvl_free(&text);
    return status;
}

/* Integers of 4 or 8 bytes, on a little-endian host. */
static kvl_status query_number(cl_device_id id, cl_device_info what, const char *name, uint64_t *out)
{
    *out = 0;
    return kvl_cl_check(clGetDeviceInfo(id, what, sizeof *out, out, NULL), "clGetDeviceInfo", name);
}

/* 0 where the driver does not know the question. */
static uint64_t query_optional(cl_device_id id, cl_device_info what)
{
    uint64_t value = 0;
    return clGetDeviceInfo(id, what, sizeof value, &value, NULL) == CL_SUCCESS ? value : 0;
}

static bool has_word(const char *list, const char *word)
{
    const size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += n)
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0')) return true;
    return false;
}

static kvl_status query_extensions(cl_device_id id, struct kvl_caps *caps)
{
    char *list = NULL;
    kvl_status status = query_text(id, CL_DEVICE_EXTENSIONS, "CL_DEVICE_EXTENSIONS", &list);
    if (status != KVL_OK) return status;
    caps->fp16 = has_word(list, "cl_khr_fp16");
    caps->fp64 = has_word(list, "cl_khr_fp64");
    caps->subgroups = has_word(list, "cl_khr_subgroups") || has_word(list, "cl_intel_subgroups") ||
                      query_optional(id, DEVICE_MAX_NUM_SUB_GROUPS) > 0;
    caps->int_dot = has_word(list, "cl_khr_integer_dot_product") &&
                    (query_optional(id, DEVICE_INTEGER_DOT_PRODUCT_CAPABILITIES) & INTEGER_DOT_PRODUCT_INPUT_4X8BIT_PACKED);
    kvl_free(&list);
    return KVL_OK;
}

static kvl_status query_kinds(cl_device_id id, struct kvl_caps *caps)
{
    kvl_status status = KVL_OK;
    uint64_t type, local_type, unified;
    KVL_TRY(query_number(id, CL_DEVICE_TYPE, "CL_DEVICE_TYPE", &type));
    KVL_TRY(query_number(id, CL_DEVICE_LOCAL_MEM_TYPE, "CL_DEVICE_LOCAL_MEM_TYPE", &local_type));
    KVL_TRY(query_number(id, CL_DEVICE_HOST_UNIFIED_MEMORY, "CL_DEVICE_HOST_UNIFIED_MEMORY", &unified));
    caps->type = type & CL_DEVICE_TYPE_GPU ? KVL_DEVICE_GPU : type & CL_DEVICE_TYPE_CPU ? KVL_DEVICE_CPU : KVL_DEVICE_OTHER;
    caps->local_is_dedicated = local_type == CL_LOCAL;
    caps->unified_memory = unified != 0;
done:
    return status;
}

static kvl_status query_caps(cl_device_id id, const char *platform, struct kvl_caps *caps)
{
    kvl_status status = KVL_OK;
    *caps = (struct kvl_caps){0};
    snprintf(caps->platform, sizeof caps->platform, "%s", platform);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char *text = NULL;
        KVL_TRY(query_text(id, texts[i].what, texts[i].name, &text));
        copy_trimmed((char *)caps + texts[i].offset, texts[i].size, text);
        kvl_free(&text);
    }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uint64_t value;
        KVL_TRY(query_number(id, numbers[i].what, numbers[i].name, &value));
        memcpy((char *)caps + numbers[i].offset, &value, numbers[i].size);
    }
    KVL_TRY(query_kinds(id, caps));
    KVL_TRY(query_extensions(id, caps));
done:
    return status;
}

/* A device that is switched off or cannot compile OpenCL C is of no use here. */
static bool usable(cl_device_id id)
{
    return query_optional(id, CL_DEVICE_AVAILABLE) != 0 && query_optional(id, CL_DEVICE_COMPILER_AVAILABLE) != 0;
}

/* Warns with the stored message and drops it, so that the search goes on. */
static void warn_left_out(const char *what)
{
    kvl_warn("%s left out: %s", what, kvl_error_text());
    kvl_error_clear();
}

static kvl_status add_devices(cl_platform_id platform, struct kvl_found **list, size_t *n)
{
    kvl_status status = KVL_OK;
    cl_device_id *ids = NULL;
    cl_uint n_ids = 0;
    char name[256] = "", trimmed[sizeof((struct kvl_caps *)0)->platform];
    clGetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof name - 1, name, NULL);
    copy_trimmed(trimmed, sizeof trimmed, name);
    const cl_int code = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, NULL, &n_ids);
    if (code == CL_DEVICE_NOT_FOUND || n_ids == 0) return KVL_OK;
    KVL_TRY(kvl_cl_check(code, "clGetDeviceIDs", trimmed));
    KVL_TRY(kvl_alloc(&ids, n_ids, sizeof *ids));
    KVL_TRY(kvl_cl_check(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, n_ids, ids, NULL), "clGetDeviceIDs", trimmed));
    KVL_TRY(kvl_realloc(list, *n + n_ids, sizeof **list));
    for (cl_uint i = 0; i < n_ids; i++) {
        struct kvl_found *found = *list + *n;
        if (!usable(ids[i])) continue;
        *found = (struct kvl_found){.platform = platform, .id = ids[i]};
        status = query_caps(ids[i], trimmed, &found->caps);
        if (status == KVL_E_MEMORY) goto done;
        if (status == KVL_OK) ++*n;
        else warn_left_out("device");
        status = KVL_OK;
    }
done:
    kvl_free(&ids);
    return status;
}

bool kvl_loops_are_cut(const struct kvl_caps *caps) { return caps->type == KVL_DEVICE_CPU && caps->float_width == 1; }

kvl_status kvl_find_devices(struct kvl_found **list, size_t *n)
{
    kvl_status status = KVL_OK;
    cl_platform_id *platforms = NULL;
    struct kvl_found *found = NULL;
    size_t n_found = 0;
    cl_uint n_platforms = 0;
    cl_int code = clGetPlatformIDs(0, NULL, &n_platforms);
    if (code != PLATFORM_NOT_FOUND) KVL_TRY(kvl_cl_check(code, "clGetPlatformIDs", "the OpenCL loader"));
    KVL_TRY(kvl_alloc(&platforms, n_platforms, sizeof *platforms));
    KVL_TRY(kvl_alloc(&found, 0, sizeof *found));
    if (n_platforms > 0)
        KVL_TRY(kvl_cl_check(clGetPlatformIDs(n_platforms, platforms, NULL), "clGetPlatformIDs", "the OpenCL loader"));
    for (cl_uint i = 0; i < n_platforms; i++) {
        status = add_devices(platforms[i], &found, &n_found);
        if (status == KVL_E_MEMORY) goto done;
        if (status != KVL_OK) warn_left_out("platform");
        status = KVL_OK;
    }
    *list = found;
    *n = n_found;
    found = NULL;
done:
    kvl_free(&platforms);
    kvl_free(&found);
    return status;
}

kvl_status kvl_device_list(struct kvl_caps **list, size_t *n)
{
    kvl_status status = KVL_OK;
    struct kvl_found *found = NULL;
    size_t n_found = 0;
    KVL_TRY(kvl_find_devices(&found, &n_found));
    KVL_TRY(kvl_alloc(list, n_found, sizeof **list));
    for (size_t i = 0; i < n_found; i++) (*list)[i] = found[i].caps;
    *n = n_found;
done:
    kvl_free(&found);
    return status;
}
