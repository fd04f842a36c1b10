/* kvlab xcheck: compiles all kernels for GPUs that are not here and compares what the compilers say with the committed table. */
#include "cmd.h"
#include "xcheck.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

struct args {
    int only;
    const char *match, *table;
    bool fresh, update, json;
};

enum { EVERY_VENDOR }; /* index in the choices of --only; a vendor's is one more than its own */

/* ---- text ---- */

static void print_row(const struct kvl_xcheck_row *r)
{
    printf("%-44s %-8s ", r->program, r->target);
    if (r->failed)
        printf("%-16s FAILED  %s\n", r->kernel, r->note[0] ? r->note : "as in the table");
    else
        printf("%-16s %5u %5u %6u %7u %8llu %7llu %5u %%\n", r->kernel, r->group, r->lanes, r->registers, r->spills,
               (unsigned long long)r->private_bytes, (unsigned long long)r->local_bytes, r->occupancy);
}

static void print_rows(const struct kvl_xcheck_rows *rows)
{
    bool has_head = false;
    for (size_t i = 0; i < rows->n; i++) {
        if (!rows->row[i].is_new) continue;
        if (!has_head)
            printf("%-44s %-8s %-16s %5s %5s %6s %7s %8s %7s %7s\n", "program", "target", "kernel", "group", "lanes", "regs",
                   "spills", "private", "local", "busy");
        has_head = true;
        print_row(rows->row + i);
    }
    if (has_head) printf("\n");
}

struct counts {
    size_t kernels, is_new, failed, spilling, worse;
};

static struct counts count(const struct kvl_xcheck_rows *rows, const char *target)
{
    struct counts c = {0};
    for (size_t i = 0; i < rows->n; i++) {
        const struct kvl_xcheck_row *r = rows->row + i;
        if (strcmp(r->target, target) != 0) continue;
        c.kernels += !r->failed;
        c.is_new += r->is_new;
        c.failed += r->failed;
        c.spilling += r->spills > 0;
        c.worse += r->verdict == KVL_XCHECK_WORSE;
    }
    return c;
}

static const char *why_skipped(const struct kvl_xcheck_compiler *compiler)
{
    return compiler->missing[0] != '\0' ? compiler->missing : compiler->ptx_only;
}

static void print_targets(const struct kvl_xcheck_report *report)
{
    for (size_t i = 0; i < kvl_xcheck_n_targets; i++) {
        const struct kvl_xcheck_target *t = kvl_xcheck_targets + i;
        const struct counts c = count(&report->rows, t->name);
        if (!report->is_wanted[t->vendor]) continue;
        printf("%-8s ", t->name);
        if (why_skipped(report->compiler + t->vendor)[0] != '\0')
            printf("skipped (%s)%s", why_skipped(report->compiler + t->vendor), c.failed ? "; failures: see above" : "");
        else
            printf("%4zu kernels, %zu of them compiled now, %zu spill, %zu failures, %zu worse than the table", c.kernels, c.is_new,
                   c.spilling, c.failed, c.worse);
        printf("%s\n", report->other_compiler[t->vendor] ? " (made with another compiler: spills not compared)" : "");
    }
}

static void print_worse(const struct kvl_xcheck_rows *rows)
{
    for (size_t i = 0; i < rows->n; i++) {
        const struct kvl_xcheck_row *r = rows->row + i;
        if (r->verdict != KVL_XCHECK_WORSE) continue;
        printf("worse: %s, %s: ", r->program, r->target);
        if (r->failed)
            printf("%s\n", r->note);
        else
            printf("%s spills %u, in the table %u\n", r->kernel, r->spills, r->table_spills);
    }
}

/* ---- JSON ---- */

static cJSON *row_json(const struct kvl_xcheck_row *r)
{
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"group", r->group},
                   {"lanes", r->lanes},
                   {"registers", r->registers},
                   {"spills", r->spills},
                   {"table_spills", r->table_spills},
                   {"private_bytes", (double)r->private_bytes},
                   {"local_bytes", (double)r->local_bytes},
                   {"occupancy", r->occupancy}};
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "program", r->program);
    cJSON_AddStringToObject(object, "target", r->target);
    cJSON_AddStringToObject(object, "kernel", r->kernel);
    cJSON_AddStringToObject(object, "result", r->failed ? "failed" : "ok");
    cJSON_AddStringToObject(object, "verdict", kvl_xcheck_verdict_name[r->verdict]);
    cJSON_AddBoolToObject(object, "compiled_now", r->is_new);
    for (size_t i = 0; !r->failed && i < sizeof numbers / sizeof *numbers; i++)
        cJSON_AddNumberToObject(object, numbers[i].name, numbers[i].value);
    if (r->note[0] != '\0') cJSON_AddStringToObject(object, "note", r->note);
    return object;
}

static cJSON *target_json(const struct kvl_xcheck_report *report, const struct kvl_xcheck_target *t)
{
    const struct kvl_xcheck_compiler *compiler = report->compiler + t->vendor;
    const struct counts c = count(&report->rows, t->name);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "target", t->name);
    cJSON_AddStringToObject(object, "vendor", kvl_xcheck_vendor_name[t->vendor]);
    cJSON_AddStringToObject(object, "compiler", compiler->version);
    cJSON_AddStringToObject(object, "skipped", why_skipped(compiler));
    cJSON_AddBoolToObject(object, "other_compiler", report->other_compiler[t->vendor]);
    cJSON_AddNumberToObject(object, "kernels", (double)c.kernels);
    cJSON_AddNumberToObject(object, "compiled_now", (double)c.is_new);
    cJSON_AddNumberToObject(object, "spilling", (double)c.spilling);
    cJSON_AddNumberToObject(object, "failures", (double)c.failed);
    cJSON_AddNumberToObject(object, "worse", (double)c.worse);
    return object;
}

static kvl_status print_json(const struct kvl_xcheck_report *report)
{
    kvl_status status = KVL_OK;
    cJSON *root = cJSON_CreateObject(), *targets = cJSON_AddArrayToObject(root, "targets"),
          *rows = cJSON_AddArrayToObject(root, "rows");
    cJSON_AddNumberToObject(root, "programs", (double)report->n_programs);
    cJSON_AddNumberToObject(root, "worse", (double)report->n_worse);
    for (size_t i = 0; i < kvl_xcheck_n_targets; i++)
        if (report->is_wanted[kvl_xcheck_targets[i].vendor])
            cJSON_AddItemToArray(targets, target_json(report, kvl_xcheck_targets + i));
    for (size_t i = 0; i < report->rows.n; i++) cJSON_AddItemToArray(rows, row_json(report->rows.row + i));
    char *text = cJSON_Print(root);
    if (text != NULL)
        puts(text);
    else
        status = kvl_fail(KVL_E_MEMORY, "out of host memory for the JSON text");
    cJSON_free(text);
    cJSON_Delete(root);
    return status;
}

/* ---- the command ---- */

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    const struct args *args = arguments;
    const struct kvl_xcheck_options options = {.vendor = args->only == EVERY_VENDOR ? -1 : args->only - 1,
                                               .match = args->match,
                                               .table = args->table,
                                               .fresh = args->fresh,
                                               .update = args->update};
    struct kvl_xcheck_report report;
    kvl_status status = kvl_xcheck_run(&options, &report);
    if (status != KVL_OK) return status;
    if (args->json) {
        status = print_json(&report);
    } else {
        print_rows(&report.rows);
        print_targets(&report);
        print_worse(&report.rows);
    }
    if (status == KVL_OK && report.n_worse > 0 && !args->update)
        status = kvl_fail(KVL_E_VERIFY, "%zu new build failures or spills; mend the kernels, or accept them with --update (%s)",
                          report.n_worse, args->table);
    kvl_xcheck_report_free(&report);
    return status;
}

static const struct kvl_opt options[] = {
    {.name = "only",
     .type = KVL_OPT_CHOICE,
     .offset = offsetof(struct args, only),
     .metavar = "VENDOR",
     .help = "targets of one vendor",
     .fallback = "all",
     .choices = "all|nvidia|amd|intel"},
    {.name = "match",
     .type = KVL_OPT_TEXT,
     .offset = offsetof(struct args, match),
     .metavar = "TEXT",
     .help = "only programs whose name contains TEXT, as in \"attend.cl int4\""},
    {.name = "table",
     .type = KVL_OPT_TEXT,
     .offset = offsetof(struct args, table),
     .metavar = "FILE",
     .help = "the table to compare with",
     .fallback = "data/xcheck.csv"},
    {.name = "fresh",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct args, fresh),
     .help = "compile again what has not changed since the table was written"},
    {.name = "update",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct args, update),
     .help = "write the table; accepts new failures and spills"},
    KVL_OPTION_JSON(struct args),
};

const struct kvl_command kvl_cmd_xcheck = {
    .name = "xcheck",
    .summary = "compile the kernels for GPUs that are not here",
    .details =
        "Builds every kernel with every codec for NVIDIA (sm_75, sm_80, sm_90), AMD (gfx906, gfx90a, gfx1030) and Intel (gen9, "
        "dg2, pvc),\n"
        "with clang-15, ptxas and ocloc, and shows registers, spills, private and local bytes and an estimate of how busy a\n"
        "compute unit can be. Programs whose text, as cc -E leaves it for GPUs, and compiler are those of the table are not\n"
        "compiled again.\n"
        "A build failure or spill that the table does not have ends with exit code 3; a vendor without compiler is skipped.\n\n"
        "    kvlab xcheck --only amd --match \"attend.cl int4\"\n"
        "    kvlab xcheck --update",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
