/* The cross check: what to compile, two compilers at a time, and the comparison with the table. */
#include "xcheck.h"
#include "log.h"
#include "mem.h"
#include <errno.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WORKERS = 2 };

const char *const kvl_xcheck_verdict_name[KVL_XCHECK_VERDICTS] = {"fine", "known failure", "worse"};

/* ---- temporary folder ---- */

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *ftw) { return remove(path); }

static void remove_folder(const char *path)
{
    if (path[0] != '\0') nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static kvl_status make_folder(char path[256])
{
    const char *parent = getenv("TMPDIR");
    if (snprintf(path, 256, "%s/kvlab-xcheck-XXXXXX", parent && parent[0] ? parent : "/tmp") >= 256 || mkdtemp(path) == NULL) {
        path[0] = '\0';
        return kvl_fail(KVL_E_IO, "cannot make a temporary folder in %s: %s; set TMPDIR", parent ? parent : "/tmp",
                        strerror(errno));
    }
    return KVL_OK;
}

/* ---- the table's rows ---- */

static enum kvl_xcheck_vendor vendor_of(const char *target)
{
    for (size_t i = 0; i < kvl_xcheck_n_targets; i++)
        if (strcmp(kvl_xcheck_targets[i].name, target) == 0) return kvl_xcheck_targets[i].vendor;
    return KVL_XCHECK_VENDORS;
}

static const struct kvl_xcheck_row *find_row(const struct kvl_xcheck_rows *rows, const struct kvl_xcheck_row *like,
                                             const char *kernel)
{
    for (size_t i = 0; i < rows->n; i++) {
        const struct kvl_xcheck_row *row = rows->row + i;
        if (strcmp(row->target, like->target) == 0 && strcmp(row->kernel, kernel) == 0 && strcmp(row->program, like->program) == 0)
            return row;
    }
    return NULL;
}

/* Takes over what the table says about a program and vendor. False if it has nothing, or something for another text. */
static kvl_status reuse(const struct kvl_xcheck_table *table, const struct kvl_xcheck_program *program,
                        enum kvl_xcheck_vendor vendor, struct kvl_xcheck_rows *rows, bool *found)
{
    kvl_status status = KVL_OK;
    *found = false;
    for (size_t i = 0; i < table->rows.n; i++) {
        const struct kvl_xcheck_row *row = table->rows.row + i;
        if (vendor_of(row->target) != vendor || strcmp(row->program, program->name) != 0) continue;
        if (strcmp(row->digest, program->digest) != 0) return KVL_OK;
        *found = true;
        KVL_TRY(kvl_xcheck_rows_add(rows, row));
    }
done:
    return status;
}

/* Whatever builds is better than a failure in the table. */
static void judge(struct kvl_xcheck_row *row, const struct kvl_xcheck_table *table, bool other_compiler)
{
    const struct kvl_xcheck_row *old = find_row(&table->rows, row, row->kernel);
    const bool had_failed = find_row(&table->rows, row, "") != NULL || (old != NULL && old->failed);
    row->table_spills = old ? old->spills : 0;
    if (row->failed)
        row->verdict = had_failed ? KVL_XCHECK_KNOWN_FAILURE : KVL_XCHECK_WORSE;
    else if (!had_failed && !other_compiler && row->spills > row->table_spills)
        row->verdict = KVL_XCHECK_WORSE;
}

/* ---- workers ---- */

struct unit {
    const struct kvl_xcheck_program *program;
    enum kvl_xcheck_vendor vendor;
};

struct work {
    const struct kvl_xcheck_options *options;
    struct kvl_xcheck_report *report;
    const char *folder;
    struct unit *unit;
    size_t n, next, n_done;
    struct kvl_progress progress;
    kvl_status status; /* the first failure, and its text */
    char error[512];
    pthread_mutex_t lock; /* of everything that changes above, and the report's rows */
};

static kvl_status compile_unit(struct work *work, size_t i, struct kvl_xcheck_rows *rows)
{
    char dir[300];
    kvl_status status = KVL_OK;
    const struct unit *unit = work->unit + i;
    snprintf(dir, sizeof dir, "%s/%zu", work->folder, i);
    if (mkdir(dir, 0700) != 0) return kvl_fail(KVL_E_IO, "%s: cannot make the folder: %s", dir, strerror(errno));
    status = kvl_xcheck_compile(unit->program, unit->vendor, work->report->compiler + unit->vendor, dir, rows);
    remove_folder(dir);
    if (status == KVL_OK && kvl_interrupted()) status = kvl_fail(KVL_E_INTERRUPTED, "interrupted: the table is as it was");
    return status;
}

static void finish_unit(struct work *work, kvl_status status, const struct kvl_xcheck_rows *rows)
{
    for (size_t i = 0; status == KVL_OK && i < rows->n; i++) status = kvl_xcheck_rows_add(&work->report->rows, rows->row + i);
    if (status != KVL_OK && work->status == KVL_OK) {
        work->status = status;
        snprintf(work->error, sizeof work->error, "%s", kvl_error_text());
    }
    kvl_progress_update(&work->progress, ++work->n_done);
}

static void *worker(void *argument)
{
    struct work *work = argument;
    pthread_mutex_lock(&work->lock);
    while (work->next < work->n && work->status == KVL_OK) {
        struct kvl_xcheck_rows rows = {0};
        const size_t i = work->next++;
        pthread_mutex_unlock(&work->lock);
        const kvl_status status = compile_unit(work, i, &rows);
        pthread_mutex_lock(&work->lock);
        finish_unit(work, status, &rows);
        kvl_xcheck_rows_free(&rows);
    }
    pthread_mutex_unlock(&work->lock);
    return NULL;
}

static kvl_status compile_all(struct work *work)
{
    pthread_t thread[WORKERS - 1];
    int n = 0;
    pthread_mutex_init(&work->lock, NULL);
    kvl_progress_start(&work->progress, "compiling", "program", work->n);
    while (n < WORKERS - 1 && pthread_create(&thread[n], NULL, worker, work) == 0) n++;
    worker(work);
    while (n > 0) pthread_join(thread[--n], NULL);
    kvl_progress_end(&work->progress);
    pthread_mutex_destroy(&work->lock);
    return work->status == KVL_OK ? KVL_OK : kvl_fail(work->status, "%s", work->error);
}

/* ---- the check ---- */

static bool is_chosen(const struct kvl_xcheck_options *options, const char *program)
{
    return options->match == NULL || strstr(program, options->match) != NULL;
}

/* Unchanged programs come from the table, the others become units. */
static kvl_status collect(const struct kvl_xcheck_options *options, const struct kvl_xcheck_program *programs, size_t n,
                          const struct kvl_xcheck_table *table, struct work *work)
{
    kvl_status status = KVL_OK;
    struct kvl_xcheck_report *report = work->report;
    KVL_TRY(kvl_alloc(&work->unit, n * KVL_XCHECK_VENDORS, sizeof *work->unit));
    for (size_t i = 0; i < n; i++) {
        if (!is_chosen(options, programs[i].name)) continue;
        report->n_programs++;
        for (int v = 0; v < KVL_XCHECK_VENDORS; v++) {
            bool found = false;
            if (!report->is_wanted[v] || report->compiler[v].missing[0] != '\0') continue;
            if (!options->fresh && !report->other_compiler[v])
                KVL_TRY(reuse(table, programs + i, (enum kvl_xcheck_vendor)v, &report->rows, &found));
            if (!found) work->unit[work->n++] = (struct unit){programs + i, (enum kvl_xcheck_vendor)v};
        }
    }
    if (report->n_programs == 0)
        status = kvl_fail(KVL_E_USAGE, "no program's name contains \"%s\"; %s lists them", options->match, options->table);
done:
    return status;
}

static kvl_status find_compilers(const struct kvl_xcheck_options *options, const struct kvl_xcheck_table *table, const char *folder,
                                 struct kvl_xcheck_report *report)
{
    kvl_status status = KVL_OK;
    int n_found = 0;
    for (int v = 0; v < KVL_XCHECK_VENDORS; v++) {
        struct kvl_xcheck_compiler *compiler = report->compiler + v;
        report->is_wanted[v] = options->vendor < 0 || options->vendor == v;
        if (!report->is_wanted[v]) continue;
        KVL_TRY(kvl_xcheck_find_compiler((enum kvl_xcheck_vendor)v, folder, compiler));
        report->other_compiler[v] = table->version[v][0] != '\0' && strcmp(table->version[v], compiler->version) != 0;
        n_found += compiler->missing[0] == '\0';
    }
    if (n_found == 0) {
        const int v = options->vendor < 0 ? 0 : options->vendor;
        status = kvl_fail(KVL_SKIP, "no compiler is here: %s: %s (scripts/setup.sh test installs them on Debian)",
                          kvl_xcheck_vendor_name[v], report->compiler[v].missing);
    }
done:
    return status;
}

static bool was_compiled(const struct kvl_xcheck_report *report, enum kvl_xcheck_vendor v)
{
    return report->is_wanted[v] && report->compiler[v].missing[0] == '\0' && report->compiler[v].ptx_only[0] == '\0';
}

static size_t target_index(const char *name)
{
    size_t i = 0;
    while (i < kvl_xcheck_n_targets && strcmp(kvl_xcheck_targets[i].name, name) != 0) i++;
    return i;
}

static int by_place(const void *a, const void *b)
{
    const struct kvl_xcheck_row *x = a, *y = b;
    const int program = strcmp(x->program, y->program);
    const size_t i = target_index(x->target), j = target_index(y->target);
    return program != 0 ? program : i != j ? (i > j) - (i < j) : strcmp(x->kernel, y->kernel);
}

static void sort_rows(struct kvl_xcheck_rows *rows)
{
    if (rows->n > 0) qsort(rows->row, rows->n, sizeof *rows->row, by_place);
}

/* Old rows that this run says nothing about stay. */
static kvl_status update(const struct kvl_xcheck_options *options, const struct kvl_xcheck_report *report,
                         struct kvl_xcheck_table *table)
{
    kvl_status status = KVL_OK;
    struct kvl_xcheck_table merged = {0};
    for (int v = 0; v < KVL_XCHECK_VENDORS; v++) {
        const bool is_new = was_compiled(report, (enum kvl_xcheck_vendor)v);
        if (is_new && report->other_compiler[v] && options->match != NULL) {
            status = kvl_fail(KVL_E_USAGE, "%s was made with %s, here is %s: update the table without --match", options->table,
                              table->version[v], report->compiler[v].version);
            goto done;
        }
        snprintf(merged.version[v], sizeof merged.version[v], "%s", is_new ? report->compiler[v].version : table->version[v]);
    }
    for (size_t i = 0; i < table->rows.n; i++) {
        const struct kvl_xcheck_row *row = table->rows.row + i;
        const enum kvl_xcheck_vendor v = vendor_of(row->target);
        if (v == KVL_XCHECK_VENDORS || (was_compiled(report, v) && is_chosen(options, row->program))) continue;
        KVL_TRY(kvl_xcheck_rows_add(&merged.rows, row));
    }
    for (size_t i = 0; i < report->rows.n; i++)
        if (was_compiled(report, vendor_of(report->rows.row[i].target)))
            KVL_TRY(kvl_xcheck_rows_add(&merged.rows, report->rows.row + i));
    sort_rows(&merged.rows);
    KVL_TRY(kvl_xcheck_table_write(options->table, &merged));
done:
    kvl_xcheck_table_free(&merged);
    return status;
}

kvl_status kvl_xcheck_run(const struct kvl_xcheck_options *options, struct kvl_xcheck_report *out)
{
    kvl_status status = KVL_OK;
    char folder[256] = "";
    size_t n = 0;
    struct kvl_xcheck_program *programs = NULL;
    struct kvl_xcheck_table table = {0};
    struct work work = {.options = options, .report = out, .folder = folder};
    *out = (struct kvl_xcheck_report){0};
    KVL_TRY(kvl_xcheck_table_read(options->table, &table));
    KVL_TRY(make_folder(folder));
    KVL_TRY(find_compilers(options, &table, folder, out));
    KVL_TRY(kvl_xcheck_programs(&programs, &n));
    KVL_TRY(collect(options, programs, n, &table, &work));
    KVL_TRY(compile_all(&work));
    for (size_t i = 0; i < out->rows.n; i++) {
        struct kvl_xcheck_row *row = out->rows.row + i;
        judge(row, &table, out->other_compiler[vendor_of(row->target)]);
        out->n_worse += row->verdict == KVL_XCHECK_WORSE;
    }
    sort_rows(&out->rows);
    if (options->update) KVL_TRY(update(options, out, &table));
done:
    remove_folder(folder);
    kvl_free(&work.unit);
    kvl_xcheck_programs_free(&programs, n);
    kvl_xcheck_table_free(&table);
    if (status != KVL_OK) kvl_xcheck_report_free(out);
    return status;
}

void kvl_xcheck_report_free(struct kvl_xcheck_report *report)
{
    kvl_xcheck_rows_free(&report->rows);
    *report = (struct kvl_xcheck_report){0};
}
