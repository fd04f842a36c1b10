/* Compilers for GPUs that are not here, run as programs: clang and ptxas for NVIDIA, clang for AMD, ocloc for Intel.
 * clang is given what an OpenCL runtime would give it: the built-in functions' header and library, and __OPENCL_VERSION__. */
#include "file.h"
#include "log.h"
#include "mem.h"
#include "text.h"
#include "xcheck.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* Processor time of one compiler run. A driver that needs longer for a kernel is as good as one that refuses it. */
enum { MOST_SECONDS = 40 };

const char *const kvl_xcheck_vendor_name[KVL_XCHECK_VENDORS] = {"nvidia", "amd", "intel"};

/* Sources: NVIDIA, CUDA C++ Programming Guide, "Features and Technical Specifications" (a partition's register file is 16384 x 4
 * bytes, 512 a lane). AMD, ISA documents of Vega, MI200 and RDNA2 and LLVM's "User Guide for AMDGPU Backend". Intel, oneAPI GPU
 * Optimization Guide (threads a vector engine; registers are fixed a thread). */
const struct kvl_xcheck_target kvl_xcheck_targets[] = {
    {"sm_75", "sm_75", KVL_XCHECK_NVIDIA, 4, 8, 512, 8, 16, 64 << 10, 48 << 10},
    {"sm_80", "sm_80", KVL_XCHECK_NVIDIA, 4, 16, 512, 8, 32, 164 << 10, 48 << 10},
    {"sm_90", "sm_90", KVL_XCHECK_NVIDIA, 4, 16, 512, 8, 32, 228 << 10, 48 << 10},
    {"gfx906", "gfx906", KVL_XCHECK_AMD, 4, 10, 256, 4, 40, 64 << 10, 64 << 10},
    {"gfx90a", "gfx90a", KVL_XCHECK_AMD, 4, 8, 512, 8, 32, 64 << 10, 64 << 10},
    {"gfx1030", "gfx1030", KVL_XCHECK_AMD, 2, 16, 1024, 16, 32, 64 << 10, 64 << 10},
    {"gen9", "skl", KVL_XCHECK_INTEL, 8, 7, 0, 0, 16, 64 << 10, 64 << 10},
    {"dg2", "dg2", KVL_XCHECK_INTEL, 16, 8, 0, 0, 64, 128 << 10, 64 << 10},
    {"pvc", "pvc", KVL_XCHECK_INTEL, 8, 8, 0, 0, 64, 128 << 10, 64 << 10},
};
const size_t kvl_xcheck_n_targets = sizeof kvl_xcheck_targets / sizeof *kvl_xcheck_targets;

/* ---- running a program ---- */

enum outcome { BUILT, REFUSED, TOO_SLOW };

static void become(char *const *argv, const char *dir, const char *log)
{
    const struct rlimit seconds = {MOST_SECONDS, MOST_SECONDS}; /* killed at once: LLVM outlives a SIGXCPU, half cleaned up */
    const int out = chdir(dir) == 0 ? open(log, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1, in = open("/dev/null", O_RDONLY);
    if (out < 0 || in < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0 || setrlimit(RLIMIT_CPU, &seconds) != 0)
        _exit(127);
    execv(argv[0], argv);
    _exit(127);
}

/* Runs argv (ends with NULL; argv[0] is a path) in dir; what it prints goes to dir/log and into *printed. */
static kvl_status run(const char *const *argv, const char *dir, const char *log, enum outcome *outcome, char **printed)
{
    int result;
    size_t size;
    char path[512];
    const pid_t pid = fork();
    if (pid < 0) return kvl_fail(KVL_E_IO, "cannot start %s: %s", argv[0], strerror(errno));
    if (pid == 0) become((char *const *)argv, dir, log);
    struct rusage used;
    while (wait4(pid, &result, 0, &used) < 0)
        if (errno != EINTR) return kvl_fail(KVL_E_IO, "waiting for %s: %s", argv[0], strerror(errno));
    const bool is_slow = WIFSIGNALED(result) && used.ru_utime.tv_sec + used.ru_stime.tv_sec + 2 > MOST_SECONDS;
    *outcome = is_slow ? TOO_SLOW : WIFEXITED(result) && WEXITSTATUS(result) == 0 ? BUILT : REFUSED;
    snprintf(path, sizeof path, "%s/%s", dir, log);
    return kvl_file_read(path, printed, &size);
}

static kvl_status read_output(const char *dir, const char *name, char **data, size_t *size)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return kvl_file_read(path, data, size);
}

/* ---- finding compilers ---- */

/* An executable in $PATH, or at `other` if that is not NULL. */
static bool find_program(const char *name, const char *other, char path[256])
{
    const char *search = getenv("PATH");
    for (const char *at = search ? search : ""; *at != '\0';) {
        const int n = (int)strcspn(at, ":");
        if (snprintf(path, 256, "%.*s/%s", n, at, name) < 256 && access(path, X_OK) == 0) return true;
        at += n + (at[n] == ':');
    }
    return other != NULL && access(other, X_OK) == 0 && snprintf(path, 256, "%s", other) < 256;
}

static bool find_path(const char *const *paths, char path[256])
{
    for (; *paths != NULL; paths++)
        if (access(*paths, R_OK) == 0) return snprintf(path, 256, "%s", *paths) < 256;
    return false;
}

/* Appends the line of a program's answer that contains `word`, without commas. */
static kvl_status append_version(const char *const *argv, const char *word, const char *dir, char version[160])
{
    kvl_status status = KVL_OK;
    char *printed = NULL;
    enum outcome outcome;
    KVL_TRY(run(argv, dir, "version", &outcome, &printed));
    const char *line = outcome == BUILT ? strstr(printed, word) : NULL;
    while (line != NULL && line > printed && line[-1] != '\n') line--;
    const size_t n = strlen(version);
    snprintf(version + n, 160 - n, "%s%.*s", n ? "; " : "", line ? (int)strcspn(line, "\r\n") : 7, line ? line : "unknown");
    for (char *c = version; *c != '\0'; c++)
        if (*c == ',') *c = ' ';
done:
    kvl_free(&printed);
    return status;
}

/* The libraries of built-in functions are bitcode of this version. */
static const char clang[] = "clang-15";

static kvl_status find_nvidia(const char *dir, struct kvl_xcheck_compiler *c)
{
    static const char *const libraries[] = {"/usr/lib/clc/nvptx64--nvidiacl.bc", "/usr/share/clc/nvptx64--nvidiacl.bc", NULL};
    kvl_status status = KVL_OK;
    if (!find_program(clang, NULL, c->clang) || !find_path(libraries, c->library)) {
        snprintf(c->missing, sizeof c->missing, "no clang-15 with libclc-15");
        return KVL_OK;
    }
    KVL_TRY(append_version((const char *const[]){c->clang, "--version", NULL}, "version", dir, c->version));
    if (find_program("ptxas", "/usr/local/cuda/bin/ptxas", c->assembler))
        KVL_TRY(append_version((const char *const[]){c->assembler, "--version", NULL}, "release", dir, c->version));
    else
        snprintf(c->ptx_only, sizeof c->ptx_only, "no ptxas of the CUDA toolkit; compiled to PTX only");
done:
    return status;
}

static kvl_status find_amd(const char *dir, struct kvl_xcheck_compiler *c)
{
    static const char *const libraries[] = {"/usr/lib/x86_64-linux-gnu/amdgcn/bitcode", "/usr/lib/aarch64-linux-gnu/amdgcn/bitcode",
                                            "/usr/lib/amdgcn/bitcode", NULL};
    if (!find_program(clang, NULL, c->clang) || !find_path(libraries, c->library)) {
        snprintf(c->missing, sizeof c->missing, "no clang-15 with rocm-device-libs");
        return KVL_OK;
    }
    return append_version((const char *const[]){c->clang, "--version", NULL}, "version", dir, c->version);
}

static kvl_status find_intel(const char *dir, struct kvl_xcheck_compiler *c)
{
    if (!find_program("ocloc", NULL, c->clang)) {
        snprintf(c->missing, sizeof c->missing, "no ocloc (Debian: intel-opencl-icd)");
        return KVL_OK;
    }
    kvl_status status = KVL_OK;
    char *printed = NULL, *version = NULL;
    size_t size;
    enum outcome outcome;
    KVL_TRY(run((const char *const[]){c->clang, "query", "OCL_DRIVER_VERSION", NULL}, dir, "version", &outcome, &printed));
    const bool is_known = outcome == BUILT && read_output(dir, "OCL_DRIVER_VERSION", &version, &size) == KVL_OK;
    kvl_error_clear();
    snprintf(c->version, sizeof c->version, "ocloc %.*s", is_known ? (int)strcspn(version, ", \r\n") : 7,
             is_known ? version : "unknown");
done:
    kvl_free(&printed);
    kvl_free(&version);
    return status;
}

kvl_status kvl_xcheck_find_compiler(enum kvl_xcheck_vendor vendor, const char *dir, struct kvl_xcheck_compiler *out)
{
    static kvl_status (*const find[KVL_XCHECK_VENDORS])(const char *, struct kvl_xcheck_compiler *) = {find_nvidia, find_amd,
                                                                                                       find_intel};
    *out = (struct kvl_xcheck_compiler){0};
    return find[vendor](dir, out);
}

/* ---- compiling ---- */

static kvl_status add_failure(const struct kvl_xcheck_target *target, enum outcome outcome, const char *printed,
                              struct kvl_xcheck_rows *rows)
{
    struct kvl_xcheck_row row = {.failed = true};
    snprintf(row.target, sizeof row.target, "%s", target->name);
    if (outcome == TOO_SLOW) {
        snprintf(row.note, sizeof row.note, "the compiler needs more than %d s of processor time", MOST_SECONDS);
    } else {
        const char *line = strstr(printed, "error"), *fatal = strstr(printed, "fatal");
        if (line == NULL) line = fatal ? fatal : printed;
        while (line > printed && line[-1] != '\n') line--;
        line += strspn(line, "\n");
        if (*line == '\0') line = "the compiler failed without a word";
        snprintf(row.note, sizeof row.note, "%.*s", (int)strcspn(line, "\n"), line);
    }
    return kvl_xcheck_rows_add(rows, &row);
}

/* A build that says nothing about any kernel would pass unseen. */
static kvl_status check_rows(const struct kvl_xcheck_target *target, size_t before, const char *who, struct kvl_xcheck_rows *rows)
{
    return rows->n > before ? KVL_OK : add_failure(target, REFUSED, who, rows);
}

#define CLANG_FOR(clang, ...)                                                                                                      \
    (clang), "-x", "cl", "-cl-std=CL1.2", "-D__OPENCL_VERSION__=120", "-Xclang", "-finclude-default-header", "-O3", "-S", "p.cl",  \
        __VA_ARGS__, NULL

static kvl_status assemble_nvidia(const struct kvl_xcheck_target *target, const struct kvl_xcheck_compiler *c, const char *dir,
                                  const char *source, struct kvl_xcheck_rows *rows)
{
    kvl_status status = KVL_OK;
    char *printed = NULL;
    enum outcome outcome;
    const size_t before = rows->n;
    KVL_TRY(run((const char *const[]){c->assembler, "-v", "-arch", target->machine, "p.ptx", "-o", "p.cubin", NULL}, dir,
                "ptxas.log", &outcome, &printed));
    if (outcome != BUILT)
        status = add_failure(target, outcome, printed, rows);
    else if ((status = kvl_xcheck_parse_nvidia(target, source, printed, rows)) == KVL_OK)
        status = check_rows(target, before, "ptxas says nothing about a kernel", rows);
done:
    kvl_free(&printed);
    return status;
}

/* One PTX text serves all targets. */
static kvl_status compile_nvidia(const struct kvl_xcheck_target *targets, size_t n, const struct kvl_xcheck_compiler *c,
                                 const char *dir, const char *source, struct kvl_xcheck_rows *rows)
{
    kvl_status status = KVL_OK;
    char *printed = NULL;
    enum outcome outcome;
    const char *const argv[] = {CLANG_FOR(c->clang, "-target", "nvptx64-nvidia-nvcl", "-Xclang", "-target-cpu", "-Xclang",
                                          targets[0].machine, "-Xclang", "-mlink-bitcode-file", "-Xclang", c->library, "-o",
                                          "p.ptx")};
    KVL_TRY(run(argv, dir, "clang.log", &outcome, &printed));
    for (size_t i = 0; i < n; i++)
        if (outcome != BUILT)
            KVL_TRY(add_failure(targets + i, outcome, printed, rows));
        else if (c->ptx_only[0] == '\0')
            KVL_TRY(assemble_nvidia(targets + i, c, dir, source, rows));
done:
    kvl_free(&printed);
    return status;
}

static kvl_status compile_amd(const struct kvl_xcheck_target *target, const struct kvl_xcheck_compiler *c, const char *dir,
                              struct kvl_xcheck_rows *rows)
{
    kvl_status status = KVL_OK;
    char *printed = NULL, *assembly = NULL, machine[64], library[300];
    size_t size;
    enum outcome outcome;
    const size_t before = rows->n;
    snprintf(machine, sizeof machine, "-mcpu=%s", target->machine);
    snprintf(library, sizeof library, "--rocm-device-lib-path=%s", c->library);
    const char *const argv[] = {CLANG_FOR(c->clang, "-target", "amdgcn-amd-amdhsa", machine, library, "-o", "p.s")};
    KVL_TRY(run(argv, dir, "clang.log", &outcome, &printed));
    if (outcome != BUILT) {
        status = add_failure(target, outcome, printed, rows);
        goto done;
    }
    KVL_TRY(read_output(dir, "p.s", &assembly, &size));
    KVL_TRY(kvl_xcheck_parse_amd(target, assembly, rows));
    KVL_TRY(check_rows(target, before, "the assembly has no kernel metadata", rows));
done:
    kvl_free(&printed);
    kvl_free(&assembly);
    return status;
}

static kvl_status compile_intel(const struct kvl_xcheck_target *target, const struct kvl_xcheck_compiler *c, const char *dir,
                                struct kvl_xcheck_rows *rows)
{
    kvl_status status = KVL_OK;
    char *printed = NULL, *binary = NULL;
    size_t size;
    enum outcome outcome;
    const size_t before = rows->n;
    KVL_TRY(run((const char *const[]){c->clang, "compile", "-file", "p.cl", "-device", target->machine, "--format", "zebin",
                                      "-options", "-cl-std=CL1.2", "-exclude_ir", "-output", "k.bin", "-output_no_suffix", NULL},
                dir, "ocloc.log", &outcome, &printed));
    if (outcome != BUILT) {
        status = add_failure(target, outcome, printed, rows);
        goto done;
    }
    KVL_TRY(read_output(dir, "k.bin", &binary, &size));
    KVL_TRY(kvl_xcheck_parse_intel(target, binary, size, printed, rows));
    KVL_TRY(check_rows(target, before, "the binary describes no kernel", rows));
done:
    kvl_free(&printed);
    kvl_free(&binary);
    return status;
}

kvl_status kvl_xcheck_compile(const struct kvl_xcheck_program *program, enum kvl_xcheck_vendor vendor,
                              const struct kvl_xcheck_compiler *compiler, const char *dir, struct kvl_xcheck_rows *rows)
{
    kvl_status status = KVL_OK;
    char path[512];
    const size_t before = rows->n;
    size_t first = 0, n = 0; /* a vendor's targets stand together */
    while (kvl_xcheck_targets[first].vendor != vendor) first++;
    while (first + n < kvl_xcheck_n_targets && kvl_xcheck_targets[first + n].vendor == vendor) n++;
    snprintf(path, sizeof path, "%s/p.cl", dir);
    KVL_TRY(kvl_file_write(path, program->text, strlen(program->text)));
    if (vendor == KVL_XCHECK_NVIDIA) KVL_TRY(compile_nvidia(kvl_xcheck_targets + first, n, compiler, dir, program->text, rows));
    for (size_t i = 0; i < n && vendor != KVL_XCHECK_NVIDIA && !kvl_interrupted(); i++)
        KVL_TRY((vendor == KVL_XCHECK_AMD ? compile_amd : compile_intel)(kvl_xcheck_targets + first + i, compiler, dir, rows));
    for (size_t i = before; i < rows->n; i++) {
        snprintf(rows->row[i].program, sizeof rows->row[i].program, "%s", program->name);
        snprintf(rows->row[i].digest, sizeof rows->row[i].digest, "%s", program->digest);
        rows->row[i].is_new = true;
    }
done:
    return status;
}
