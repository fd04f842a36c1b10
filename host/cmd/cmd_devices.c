/* kvlab devices: the OpenCL devices, what each can do and, with --measure, what it reaches. */
#include "cmd.h"
#include "device.h"
#include "log.h"
#include "mem.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>

struct devices_args {
    bool measure, json;
};

static kvl_status measure(size_t index, struct kvl_peaks *peaks)
{
    kvl_status status = KVL_OK;
    struct kvl_device *device = NULL;
    char choice[24];
    snprintf(choice, sizeof choice, "%zu", index);
    KVL_TRY(kvl_device_open(choice, &device));
    KVL_TRY(kvl_device_measure(device, peaks));
done:
    kvl_device_close(&device);
    return status;
}

static const char *yes_no(bool value) { return value ? "yes" : "no"; }

static double mib(uint64_t bytes) { return (double)bytes / (1 << 20); }

static void print_device(size_t index, const struct kvl_caps *c, const struct kvl_peaks *peaks)
{
    printf("%zu  %s\n", index, c->name);
    printf("   platform    %s\n   vendor      %s\n   driver      %s, %s, %s\n", c->platform, c->vendor, c->driver, c->version,
           c->c_version);
    printf("   type        %s, %u compute units, %u MHz, work-groups up to %u\n", kvl_device_type_name[c->type], c->compute_units,
           c->clock_mhz, c->max_work_group);
    printf("   memory      %.0f MiB, one buffer up to %.0f MiB, local %.0f KiB (%s)%s\n", mib(c->global_bytes),
           mib(c->max_alloc_bytes), (double)c->local_bytes / 1024, c->local_is_dedicated ? "dedicated" : "in global memory",
           c->unified_memory ? ", shared with the host" : "");
    printf("   can         fp16 %s, fp64 %s, subgroups %s, integer dot product %s\n", yes_no(c->fp16), yes_no(c->fp64),
           yes_no(c->subgroups), yes_no(c->int_dot));
    if (peaks)
        printf("   measured    read %.1f GB/s, copy %.1f GB/s, multiply-add %.1f GFLOP/s, launch %.2f us\n", peaks->read_gbps,
               peaks->copy_gbps, peaks->fma_gflops, peaks->launch_us);
}

/* cJSON answers NULL when memory is short; a number added to NULL is ignored, so the caller checks the result's text. */
static cJSON *device_json(size_t index, const struct kvl_caps *c, const struct kvl_peaks *peaks)
{
    const struct {
        const char *name, *value;
    } texts[] = {{"name", c->name},
                 {"platform", c->platform},
                 {"vendor", c->vendor},
                 {"driver", c->driver},
                 {"version", c->version},
                 {"c_version", c->c_version},
                 {"type", kvl_device_type_name[c->type]}};
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"compute_units", c->compute_units},
                   {"max_work_group", c->max_work_group},
                   {"clock_mhz", c->clock_mhz},
                   {"float_width", c->float_width},
                   {"global_bytes", (double)c->global_bytes},
                   {"max_alloc_bytes", (double)c->max_alloc_bytes},
                   {"local_bytes", (double)c->local_bytes},
                   {"constant_bytes", (double)c->constant_bytes}};
    const struct {
        const char *name;
        bool value;
    } flags[] = {{"local_is_dedicated", c->local_is_dedicated},
                 {"fp16", c->fp16},
                 {"fp64", c->fp64},
                 {"subgroups", c->subgroups},
                 {"int_dot", c->int_dot},
                 {"unified_memory", c->unified_memory}};
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "index", (double)index);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) cJSON_AddStringToObject(object, texts[i].name, texts[i].value);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        cJSON_AddNumberToObject(object, numbers[i].name, numbers[i].value);
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) cJSON_AddBoolToObject(object, flags[i].name, flags[i].value);
    if (peaks) {
        cJSON_AddNumberToObject(object, "read_gbps", peaks->read_gbps);
        cJSON_AddNumberToObject(object, "copy_gbps", peaks->copy_gbps);
        cJSON_AddNumberToObject(object, "fma_gflops", peaks->fma_gflops);
        cJSON_AddNumberToObject(object, "launch_us", peaks->launch_us);
    }
    return object;
}

static kvl_status print_json(const cJSON *root)
{
    char *text = cJSON_Print(root);
    if (text == NULL) return kvl_fail(KVL_E_MEMORY, "out of host memory for the JSON text");
    puts(text);
    cJSON_free(text);
    return KVL_OK;
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    const struct devices_args *args = arguments;
    kvl_status status = KVL_OK;
    struct kvl_caps *list = NULL;
    size_t n = 0;
    cJSON *root = cJSON_CreateObject(), *array = cJSON_AddArrayToObject(root, "devices");
    KVL_TRY(kvl_device_list(&list, &n));
    for (size_t i = 0; i < n; i++) {
        struct kvl_peaks peaks;
        if (args->measure) KVL_TRY(measure(i, &peaks));
        if (args->json)
            cJSON_AddItemToArray(array, device_json(i, list + i, args->measure ? &peaks : NULL));
        else
            print_device(i, list + i, args->measure ? &peaks : NULL);
    }
    if (args->json)
        status = print_json(root);
    else if (n == 0)
        puts("no OpenCL device found; install a driver (for the CPU: pocl-opencl-icd)");
done:
    cJSON_Delete(root);
    kvl_free(&list);
    return status;
}

static const struct kvl_opt options[] = {
    {.name = "measure",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct devices_args, measure),
     .help = "measure read and copy bandwidth, multiply-add rate and launch time (some seconds a device)"},
    KVL_OPTION_JSON(struct devices_args),
};

const struct kvl_command kvl_cmd_devices = {
    .name = "devices",
    .summary = "list the OpenCL devices and what they can do",
    .details = "The number in front of a device, its type (cpu, gpu) or a part of its name or platform is what --device and\n"
               "$KVLAB_DEVICE take.\n\n"
               "  kvlab devices --measure --json",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct devices_args),
    .run = run,
};
