/* What ptxas, clang for AMD and ocloc say about kernels.
 *
 * nvidia  ptxas -v, a block of lines a kernel; work-group size from the source, since clang 15 does not hand it on
 * amd     the metadata at the end of the assembly (amdhsa.kernels, see "User Guide for AMDGPU Backend" of LLVM)
 * intel   .ze_info of the "zebin" ELF file, YAML; spills from the warnings of the compiler */
#include "xcheck.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ASSUMED_GROUP = 64 };

/* ---- occupancy ---- */

static uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

/* Work-items that a compute unit holds of those it has room for, in percent. Groups are whole; a wave counts its lanes that do
 * work. */
static uint32_t occupancy_of(const struct kvl_xcheck_target *t, const struct kvl_xcheck_row *row)
{
    const uint32_t waves_a_group = ceil_div(row->group, row->lanes);
    uint32_t waves = t->waves_a_simd;
    if (t->simd_registers != 0 && row->registers != 0) {
        const uint32_t by_registers = t->simd_registers / (ceil_div(row->registers, t->granule) * t->granule);
        if (by_registers < waves) waves = by_registers;
    }
    uint64_t groups = (uint64_t)waves * t->simds / waves_a_group;
    if (groups > t->groups) groups = t->groups;
    if (row->local_bytes != 0 && groups > t->local_bytes / row->local_bytes) groups = t->local_bytes / row->local_bytes;
    return (uint32_t)(100 * groups * row->group / ((uint64_t)t->simds * t->waves_a_simd * row->lanes));
}

/* What the target cannot run, and what follows from the numbers. */
static void complete(const struct kvl_xcheck_target *target, struct kvl_xcheck_row *row)
{
    if (row->group == 0) row->group = ASSUMED_GROUP;
    row->occupancy = occupancy_of(target, row);
    row->failed = row->local_bytes > target->group_local_bytes;
    if (row->failed)
        snprintf(row->note, sizeof row->note, "needs %llu bytes of local memory, a group has %llu",
                 (unsigned long long)row->local_bytes, (unsigned long long)target->group_local_bytes);
}

static struct kvl_xcheck_row new_row(const struct kvl_xcheck_target *target, uint32_t lanes)
{
    struct kvl_xcheck_row row = {.lanes = lanes};
    snprintf(row.target, sizeof row.target, "%s", target->name);
    return row;
}

/* ---- lines ---- */

/* The next line of *text, without its end, in `line`; false after the last. */
static bool next_line(const char **text, char line[512])
{
    if (**text == '\0') return false;
    const size_t n = strcspn(*text, "\n");
    snprintf(line, 512, "%.*s", (int)(n < 511 ? n : 511), *text);
    *text += n + ((*text)[n] == '\n');
    return true;
}

/* "key: value" with exactly this beginning: the value, else NULL. */
static const char *value_of(const char *line, const char *key)
{
    const size_t n = strlen(key);
    if (strncmp(line, key, n) != 0 || line[n] != ':') return NULL;
    return line + n + 1 + strspn(line + n + 1, " ");
}

static uint64_t number(const char *text) { return strtoull(text, NULL, 10); }

/* ---- nvidia ---- */

static bool is_word(char c) { return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* A number, or a macro that the text defines as one. */
static uint32_t number_or_macro(const char *source, const char *word)
{
    char define[96];
    size_t n = 0;
    while (is_word(word[n])) n++;
    snprintf(define, sizeof define, "#define %.*s ", (int)n, word);
    const char *at = strstr(source, define);
    return (uint32_t)number(at ? at + strlen(define) : word);
}

/* reqd_work_group_size(X, 1, 1) in what stands between the end of the last statement and the kernel's name; 0 if there is none. */
static uint32_t source_group(const char *source, const char *kernel)
{
    static const char attribute[] = "reqd_work_group_size(";
    const size_t n = strlen(kernel);
    for (const char *name = strstr(source, kernel); name != NULL; name = strstr(name + n, kernel)) {
        const char *start = name;
        while (start > source && start[-1] != ';' && start[-1] != '}') start--;
        const char *group = memmem(start, (size_t)(name - start), attribute, strlen(attribute));
        if (name[n] == '(' && !is_word(name[-1]) && group != NULL) return number_or_macro(source, group + strlen(attribute));
    }
    return 0;
}

/* The number before a word: "24576 bytes smem" in a longer line. */
static uint64_t number_before(const char *line, const char *word)
{
    const char *at = strstr(line, word);
    if (at == NULL) return 0;
    while (at > line && at[-1] == ' ') at--;
    while (at > line && at[-1] >= '0' && at[-1] <= '9') at--;
    return number(at);
}

kvl_status kvl_xcheck_parse_nvidia(const struct kvl_xcheck_target *target, const char *source, const char *log,
                                   struct kvl_xcheck_rows *rows)
{
    enum { WARP = 32, REGISTER_BYTES = 4 };
    kvl_status status = KVL_OK;
    struct kvl_xcheck_row row = new_row(target, WARP);
    char line[512];
    bool more;
    do { /* functions that are not inlined follow their kernel: their stack and spills are its own */
        char kernel[64];
        more = next_line(&log, line);
        const bool is_next = more && sscanf(line, "ptxas info : Compiling entry function '%63[^']'", kernel) == 1;
        if ((is_next || !more) && row.kernel[0] != '\0') {
            complete(target, &row);
            KVL_TRY(kvl_xcheck_rows_add(rows, &row));
        }
        if (is_next) {
            row = new_row(target, WARP);
            snprintf(row.kernel, sizeof row.kernel, "%s", kernel);
            row.group = source_group(source, kernel);
        }
        if (!more) break;
        row.private_bytes += number_before(line, "bytes stack frame");
        row.spills += (uint32_t)(number_before(line, "bytes spill stores") / REGISTER_BYTES);
        if (strstr(line, ": Used ") != NULL) {
            row.registers = (uint32_t)number_before(line, "registers");
            row.local_bytes = number_before(line, "bytes smem");
        }
    } while (more);
done:
    return status;
}

/* ---- amd ---- */

kvl_status kvl_xcheck_parse_amd(const struct kvl_xcheck_target *target, const char *assembly, struct kvl_xcheck_rows *rows)
{
    kvl_status status = KVL_OK;
    const char *text = strstr(assembly, "\namdhsa.kernels:\n");
    struct kvl_xcheck_row row = new_row(target, 0);
    char line[512];
    bool is_group = false;
    if (text == NULL) goto done;
    text += strlen("\namdhsa.kernels:\n");
    while (next_line(&text, line)) {
        const char *value;
        const bool is_end = strncmp(line, "  ", 2) != 0;
        if ((is_end || strncmp(line, "  - ", 4) == 0) && row.kernel[0] != '\0') {
            complete(target, &row);
            KVL_TRY(kvl_xcheck_rows_add(rows, &row));
            row = new_row(target, 0);
        }
        if (is_end) break;
        if (is_group && row.group == 0) row.group = (uint32_t)number(line + strspn(line, " -")); /* the list's first item */
        is_group = false;
        const char *key = line + 4;
        if ((value = value_of(key, ".name"))) snprintf(row.kernel, sizeof row.kernel, "%s", value);
        if ((value = value_of(key, ".wavefront_size"))) row.lanes = (uint32_t)number(value);
        if ((value = value_of(key, ".vgpr_count"))) row.registers = (uint32_t)number(value);
        if ((value = value_of(key, ".vgpr_spill_count"))) row.spills = (uint32_t)number(value);
        if ((value = value_of(key, ".group_segment_fixed_size"))) row.local_bytes = number(value);
        if ((value = value_of(key, ".private_segment_fixed_size"))) row.private_bytes = number(value);
        if (value_of(key, ".reqd_workgroup_size")) is_group = true;
    }
done:
    return status;
}

/* ---- intel ---- */

static uint32_t intel_spills(const char *log, const char *kernel)
{
    char line[512], name[64];
    unsigned simd, registers, spills;
    while (next_line(&log, line))
        if (sscanf(line, "warning: kernel %63s compiled SIMD%u allocated %u regs and spilled around %u", name, &simd, &registers,
                   &spills) == 4 &&
            strcmp(name, kernel) == 0)
            return spills;
    return 0;
}

static kvl_status add_intel(const struct kvl_xcheck_target *target, const char *log, uint64_t thread_bytes,
                            struct kvl_xcheck_row *row, struct kvl_xcheck_rows *rows)
{
    if (row->kernel[0] == '\0' || row->lanes == 0) return KVL_OK;
    row->private_bytes += thread_bytes / row->lanes;
    row->spills = intel_spills(log, row->kernel);
    complete(target, row);
    return kvl_xcheck_rows_add(rows, row);
}

/* .ze_info is found by its beginning and ends with its section. */
kvl_status kvl_xcheck_parse_intel(const struct kvl_xcheck_target *target, const char *binary, size_t size, const char *log,
                                  struct kvl_xcheck_rows *rows)
{
    static const char start[] = "\nkernels:", end[] = "\nkernels_misc_info:";
    kvl_status status = KVL_OK;
    const char *text = memmem(binary, size, start, strlen(start));
    struct kvl_xcheck_row row = new_row(target, 0);
    uint64_t thread_bytes = 0, last = 0; /* last: size of the buffer being read */
    bool is_buffers = false;
    char line[512];
    if (text == NULL) goto done;
    text += 1;
    const char *stop = memmem(text, size - (size_t)(text - binary), end, strlen(end));
    if (stop == NULL) stop = binary + size;
    while (text < stop && next_line(&text, line)) {
        const char *value;
        if ((value = value_of(line, "  - name"))) {
            KVL_TRY(add_intel(target, log, thread_bytes, &row, rows));
            row = new_row(target, 0);
            thread_bytes = 0;
            snprintf(row.kernel, sizeof row.kernel, "%s", value);
        }
        if (strncmp(line, "    ", 4) == 0 && line[4] != ' ') is_buffers = value_of(line, "    per_thread_memory_buffers") != NULL;
        if ((value = value_of(line, "      grf_count"))) row.registers = (uint32_t)number(value);
        if ((value = value_of(line, "      simd_size"))) row.lanes = (uint32_t)number(value);
        if ((value = value_of(line, "      slm_size"))) row.local_bytes = number(value);
        if ((value = value_of(line, "      required_work_group_size"))) row.group = (uint32_t)number(value + strspn(value, "[ "));
        if (is_buffers && (value = value_of(line, "        size"))) thread_bytes += last = number(value);
        if (is_buffers && value_of(line, "        is_simt_thread")) { /* that size is a work-item's */
            thread_bytes -= last;
            row.private_bytes += last;
        }
    }
    KVL_TRY(add_intel(target, log, thread_bytes, &row, rows));
done:
    return status;
}
