/* Programs: text from parts, built once, shared, and kept on disk as the driver's binary.
 *
 * A program's text is a few 0/1 facts about the device followed by its parts, each after its own #line, so that a compiler's
 * message names the file. There are no include paths: the text is all there is, and its digest is the cache key.
 * No fast-math flag is ever passed: -cl-finite-math-only turns a fully masked softmax into NaN. */
#include "device_internal.h"
#include "embedded.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "text.h"
#include <stdio.h>
#include <string.h>

const char *kvl_source_text(const char *name)
{
    char path[256];
    if (snprintf(path, sizeof path, "cl/%s", name) >= (int)sizeof path) return NULL;
    return kvl_embedded_text(path);
}

kvl_status kvl_program_text(const struct kvl_caps *caps, const struct kvl_source *parts, size_t n_parts, struct kvl_text *text)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_text_printf(text,
                            "#define KVL_HAS_FP16 %d\n#define KVL_HAS_SUBGROUPS %d\n#define KVL_HAS_INT_DOT %d\n"
                            "#define KVL_DEVICE_CPU %d\n",
                            caps->fp16, caps->subgroups, caps->int_dot, caps->type == KVL_DEVICE_CPU));
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].text == NULL)
            return kvl_fail(KVL_E_UNSUPPORTED, "program part '%s' has no text: not embedded?", parts[i].name);
        KVL_TRY(kvl_text_printf(text, "#line 1 \"%s\"\n%s\n", parts[i].name, parts[i].text));
    }
done:
    return status;
}

/* OpenCL C 1.2, which every device has, unless a capability in use is only visible at a later level: integer dot product on
 * Intel's CPU runtime wants 3.0, subgroups on drivers without cl_intel_subgroups 2.0. */
static const char *language(const struct kvl_caps *caps)
{
    const char *level = strpbrk(caps->c_version, "123456789");
    if (level == NULL || *level == '1' || !(caps->subgroups || caps->int_dot)) return "CL1.2";
    return *level == '2' ? "CL2.0" : "CL3.0";
}

/* NUL bytes keep neighbours apart: "a" "bc" is not "ab" "c". */
static kvl_status digest(const char *const *words, size_t n, char hex[65])
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    for (size_t i = 0; i < n; i++) KVL_TRY(kvl_text_append(&text, words[i], strlen(words[i]) + 1));
    KVL_TRY(kvl_sha256(text.data, text.size, hex));
done:
    kvl_text_free(&text);
    return status;
}

static kvl_status cache_key(const struct kvl_program *program, char hex[65])
{
    const struct kvl_caps *caps = &program->device->caps;
    const char *const words[] = {program->sha256, caps->platform, program->device->platform_version, caps->name, caps->driver,
                                 caps->version,   caps->c_version};
    return digest(words, sizeof words / sizeof *words, hex);
}

static kvl_status fail_build(const struct kvl_program *program, cl_int code)
{
    enum { LOG_SHOWN = 800 }; /* its first lines: the rest follows from them */
    kvl_status status = KVL_OK;
    size_t size = 0;
    char *log = NULL;
    clGetProgramBuildInfo(program->program, program->device->id, CL_PROGRAM_BUILD_LOG, 0, NULL, &size);
    KVL_TRY(kvl_alloc(&log, size + 1, 1));
    clGetProgramBuildInfo(program->program, program->device->id, CL_PROGRAM_BUILD_LOG, size, log, NULL);
    if (kvl_interrupted()) status = kvl_fail(KVL_E_INTERRUPTED, "interrupted while kernels were compiled"); /* PoCL's compiler drops its files at Ctrl-C */
    else status = kvl_fail(KVL_E_DEVICE, "building %s for %s: %s\n%.*s", program->names, program->device->caps.name,
                      kvl_cl_error_name(code), LOG_SHOWN, log);
done:
    kvl_free(&log);
    return status;
}

static void release(struct kvl_program *program)
{
    if (program->program) clReleaseProgram(program->program);
    program->program = NULL;
}

static bool build_from_binary(struct kvl_program *program, const char *key, const char *flags)
{
    struct kvl_device *device = program->device;
    char *binary = NULL;
    size_t size = 0;
    cl_int code, accepted = CL_SUCCESS;
    if (!kvl_program_cache_load(key, &binary, &size)) return false;
    program->program =
        clCreateProgramWithBinary(device->context, 1, &device->id, &size, (const unsigned char **)&binary, &accepted, &code);
    kvl_free(&binary);
    if (code == CL_SUCCESS && accepted == CL_SUCCESS &&
        clBuildProgram(program->program, 1, &device->id, flags, NULL, NULL) == CL_SUCCESS)
        return true;
    release(program);
    return false;
}

static kvl_status build_from_source(struct kvl_program *program, const struct kvl_text *text, const char *flags)
{
    kvl_status status = KVL_OK;
    struct kvl_device *device = program->device;
    const char *source = text->data;
    cl_int code;
    program->program = clCreateProgramWithSource(device->context, 1, &source, &text->size, &code);
    KVL_TRY(kvl_cl_check(code, "clCreateProgramWithSource", program->names));
    code = clBuildProgram(program->program, 1, &device->id, flags, NULL, NULL);
    if (code != CL_SUCCESS) status = fail_build(program, code);
done:
    return status;
}

static kvl_status keep_binary(const struct kvl_program *program, const char *key)
{
    kvl_status status = KVL_OK;
    unsigned char *binary = NULL;
    size_t size = 0;
    KVL_TRY(kvl_cl_check(clGetProgramInfo(program->program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, NULL), "clGetProgramInfo",
                         program->names));
    if (size == 0) return KVL_OK; /* a driver without binaries */
    KVL_TRY(kvl_alloc(&binary, size, 1));
    KVL_TRY(kvl_cl_check(clGetProgramInfo(program->program, CL_PROGRAM_BINARIES, sizeof binary, &binary, NULL), "clGetProgramInfo",
                         program->names));
    kvl_program_cache_store(key, binary, size);
done:
    kvl_free(&binary);
    return status;
}

static kvl_status build(struct kvl_program *program, const struct kvl_text *text, const char *flags)
{
    kvl_status status = KVL_OK;
    const bool cached = kvl_program_cache_serves(&program->device->caps);
    char key[65];
    if (cached) {
        KVL_TRY(cache_key(program, key));
        if (build_from_binary(program, key, flags)) return KVL_OK;
    }
    KVL_TRY(build_from_source(program, text, flags));
    program->device->builds++;
    if (cached) KVL_TRY(keep_binary(program, key));
done:
    return status;
}

static kvl_status join_names(const struct kvl_source *parts, size_t n_parts, char **out)
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    for (size_t i = 0; i < n_parts; i++) KVL_TRY(kvl_text_printf(&text, "%s%s", i ? " + " : "", parts[i].name));
    KVL_TRY(kvl_strdup(out, text.data ? text.data : ""));
done:
    kvl_text_free(&text);
    return status;
}

/* The place where the program is linked in: that of the one with this digest, or the end. */
static struct kvl_program **find(struct kvl_device *device, const char *sha256)
{
    struct kvl_program **link = &device->programs;
    while (*link != NULL && strcmp((*link)->sha256, sha256) != 0) link = &(*link)->next;
    return link;
}

static void program_free(struct kvl_program **pointer)
{
    struct kvl_program *program = *pointer;
    if (program == NULL) return;
    while (program->kernels) {
        struct kvl_kernel *kernel = program->kernels;
        program->kernels = kernel->next;
        kvl_kernel_free(&kernel);
    }
    release(program);
    kvl_free(&program->names);
    kvl_free(pointer);
}

void kvl_program_forget(struct kvl_program *program)
{
    *find(program->device, program->sha256) = program->next;
    program_free(&program);
}

kvl_status kvl_program_get(struct kvl_device *device, const struct kvl_source *parts, size_t n_parts, const char *options,
                           struct kvl_program **out)
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0}, flags = {0};
    struct kvl_program *program = NULL, **link;
    char sha256[65];
    KVL_TRY(kvl_program_text(&device->caps, parts, n_parts, &text));
    KVL_TRY(kvl_text_printf(&flags, "-cl-std=%s %s", language(&device->caps), options ? options : ""));
    KVL_TRY(digest((const char *const[]){text.data, flags.data}, 2, sha256));
    link = find(device, sha256);
    if (*link == NULL) {
        KVL_TRY(kvl_alloc(&program, 1, sizeof *program));
        program->device = device;
        memcpy(program->sha256, sha256, sizeof sha256);
        KVL_TRY(join_names(parts, n_parts, &program->names));
        KVL_TRY(build(program, &text, flags.data));
        *link = program;
        program = NULL;
    }
    *out = *link;
done:
    program_free(&program);
    kvl_text_free(&text);
    kvl_text_free(&flags);
    return status;
}

kvl_status kvl_device_source_sha256(const struct kvl_device *device, char hex[65])
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    for (const struct kvl_program *p = device->programs; p != NULL; p = p->next) KVL_TRY(kvl_text_printf(&text, "%s\n", p->sha256));
    KVL_TRY(kvl_sha256(text.data ? text.data : "", text.size, hex));
done:
    kvl_text_free(&text);
    return status;
}
