/* kvlab sweep: all cells of a grid, each a process of its own with one run file, named by the hash of what the cell resolves to. */
#include "cmd.h"
#include "file.h"
#include "grid.h"
#include "log.h"
#include "mem.h"
#include "plan_report.h"
#include "registry.h"
#include "rundiff.h"
#include "runfile.h"
#include "runrecord.h"
#include "slurm.h"
#include "sweep.h"
#include "text.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct args {
    const char *out, *only;
    int64_t jobs, per_task;
    bool dry_run, slurm, resume, json;
    struct kvl_list sbatch;
};

struct used_file { /* that cells name: a model or a text; looked at once */
    char *path, sha256[65];
    struct kvl_model *model; /* opened for --dry-run */
};

struct plan_bytes { /* NaN: the command does not say */
    double resident, per_token;
};

/* How long a cell may take: the mean of the cells that have ended and were most alike. */
struct estimate {
    const char *value[KVL_AXES]; /* borrowed from the grid */
    double seconds;              /* of `n` cells together */
    unsigned n, alike;
};

struct run {
    const struct args *args;
    const char *grid_path;
    struct kvl_grid *grid;
    const struct kvl_command *command; /* NULL: another program's */
    char self[4096];                   /* path of this program */
    struct kvl_text out;
    struct used_file *file;
    size_t n_files;
    struct kvl_sweep sweep;
    struct plan_bytes *planned; /* [sweep.n] with --dry-run */
    struct estimate *estimate;  /* [sweep.n] */
};

static const struct kvl_opt *own_option(const struct kvl_command *command, const char *name)
{
    for (size_t i = 0; i < command->n_options; i++)
        if (strcmp(command->options[i].name, name) == 0) return &command->options[i];
    return NULL;
}

/* ---- the words of a cell ---- */

struct words {
    char **word;
    size_t n;
};

static kvl_status add_word(struct words *words, const char *text)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_realloc(&words->word, words->n + 2, sizeof *words->word));
    words->word[words->n] = words->word[words->n + 1] = NULL;
    KVL_TRY(kvl_strdup(&words->word[words->n], text));
    words->n++;
done:
    return status;
}

static void free_words(struct words *words)
{
    for (size_t i = 0; i < words->n; i++) kvl_free(&words->word[i]);
    kvl_free(&words->word);
    words->n = 0;
}

static kvl_status add_command(struct words *words, const char *command)
{
    kvl_status status = KVL_OK;
    char word[64];
    for (const char *c = command; *c; c += strspn(c, " ")) {
        const size_t size = strcspn(c, " ");
        snprintf(word, sizeof word, "%.*s", (int)size, c);
        KVL_TRY(add_word(words, word));
        c += size;
    }
done:
    return status;
}

/* The option that takes an axis: tasks call the tokens that they compress --context. */
static const char *axis_option(const struct run *run, int axis)
{
    const bool is_context = axis == KVL_AXIS_CTX && run->command && !own_option(run->command, kvl_axis_option[axis]);
    return is_context && own_option(run->command, "context") ? "context" : kvl_axis_option[axis];
}

/* Program, command, axes, options; without --output. */
static kvl_status cell_words(const struct run *run, const struct kvl_grid_point *cell, struct words *words)
{
    kvl_status status = KVL_OK;
    char option[32];
    KVL_TRY(add_word(words, run->grid->program ? run->grid->program : run->self));
    KVL_TRY(add_command(words, run->grid->command));
    for (int a = 0; a < KVL_AXES; a++) {
        if (cell->value[a] == NULL) continue;
        snprintf(option, sizeof option, "--%s", axis_option(run, a));
        KVL_TRY(add_word(words, option));
        KVL_TRY(add_word(words, cell->value[a]));
    }
    for (unsigned i = 0; i < run->grid->options_count; i++) KVL_TRY(add_word(words, run->grid->options[i]));
    for (unsigned i = 0; cell->listed && i < cell->listed->options_count; i++) KVL_TRY(add_word(words, cell->listed->options[i]));
done:
    return status;
}

static kvl_status cell_label(const struct kvl_grid_point *cell, struct kvl_text *label)
{
    kvl_status status = KVL_OK;
    for (int a = 0; a < KVL_AXES; a++) {
        const bool is_path = a == KVL_AXIS_MODEL || a == KVL_AXIS_TEXT;
        const char *value = cell->value[a], *slash = value && is_path ? strrchr(value, '/') : NULL;
        if (value == NULL) continue;
        KVL_TRY(kvl_text_printf(label, "%s%s=%s", label->size ? ", " : "", kvl_axis_name[a], slash ? slash + 1 : value));
    }
    for (unsigned i = 0; cell->listed && i < cell->listed->options_count; i++)
        KVL_TRY(kvl_text_printf(label, "%s%s", label->size ? ", " : "", cell->listed->options[i]));
    if (label->size == 0) KVL_TRY(kvl_text_printf(label, "the only cell"));
done:
    return status;
}

/* ---- what a cell resolves to: every option's value, defaults included, files by their content, specs in full ---- */

static kvl_status look_at(struct run *run, const char *path, struct used_file **out)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < run->n_files; i++)
        if (strcmp(run->file[i].path, path) == 0) {
            *out = &run->file[i];
            return KVL_OK;
        }
    struct used_file file = {0};
    KVL_TRY(kvl_sha256_file(path, file.sha256));
    KVL_TRY(kvl_realloc(&run->file, run->n_files + 1, sizeof *run->file));
    KVL_TRY(kvl_strdup(&file.path, path));
    run->file[run->n_files] = file;
    *out = &run->file[run->n_files++];
done:
    return status;
}

static kvl_status resolve_text(struct run *run, const struct kvl_opt *option, const char *value, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    struct used_file *file;
    struct kvl_spec *spec = NULL;
    struct kvl_text resolved = {0};
    if (strcmp(option->name, "device") == 0 && value == NULL) value = getenv("KVLAB_DEVICE");
    if (value == NULL) return KVL_OK;
    if (strncmp(option->metavar, "FILE", 4) == 0) {
        KVL_TRY(look_at(run, value, &file));
        value = file->sha256;
    } else if (strcmp(option->metavar, "SPEC") == 0) {
        KVL_TRY(kvl_spec_parse(value, &spec));
        KVL_TRY(kvl_spec_resolved(spec, &resolved));
        value = resolved.data;
    }
    KVL_TRY(kvl_text_printf(out, "%s=%s\n", option->name, value));
done:
    kvl_text_free(&resolved);
    kvl_spec_free(&spec);
    return status;
}

static kvl_status resolve_option(struct run *run, const struct kvl_opt *option, const void *place, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_list *list = place;
    switch (option->type) {
    case KVL_OPT_FLAG: return kvl_text_printf(out, "%s=%d\n", option->name, *(const bool *)place);
    case KVL_OPT_INT: return kvl_text_printf(out, "%s=%lld\n", option->name, (long long)*(const int64_t *)place);
    case KVL_OPT_FLOAT: return kvl_text_printf(out, "%s=%.17g\n", option->name, *(const double *)place);
    case KVL_OPT_CHOICE: return kvl_text_printf(out, "%s=%d\n", option->name, *(const int *)place);
    case KVL_OPT_TEXT: return resolve_text(run, option, *(const char *const *)place, out);
    case KVL_OPT_LIST:
        for (size_t i = 0; i < list->n; i++) KVL_TRY(resolve_text(run, option, list->item[i], out));
    }
done:
    return status;
}

/* Options that change where the results go or what is kept beside them, and not what they are. */
static bool is_about_output(const char *name)
{
    static const char *const names[] = {"output", "json", "no-run-file", "csv", "md", "logits", "layer-errors", "base-logits"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

/* Where a cell's results go is the sweep's to say. */
static kvl_status check_output(const struct run *run, const void *args)
{
    const struct kvl_opt *output = own_option(run->command, "output"), *none = own_option(run->command, "no-run-file");
    if (*(const char *const *)((const char *)args + output->offset) == NULL && !(none && *(const bool *)((const char *)args + none->offset))) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "options: --output and --no-run-file are the sweep's, which names the run files; say out: FOLDER in the grid, or sweep -o FOLDER");
}

static kvl_status load_plugins(struct run *run, const struct kvl_list *plugins, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    struct used_file *file;
    for (size_t i = 0; i < plugins->n; i++) {
        const size_t before = run->n_files;
        KVL_TRY(look_at(run, plugins->item[i], &file));
        if (run->n_files > before) KVL_TRY(kvl_registry_load(plugins->item[i]));
        KVL_TRY(kvl_text_printf(out, "plugin=%s\n", file->sha256));
    }
done:
    return status;
}

/* Parses the words as the cell's process will. args: of the command, zeroed. Texts in it point into the words. */
static kvl_status parse_cell(struct run *run, const struct words *words, void *args, struct kvl_text *resolved)
{
    kvl_status status = KVL_OK;
    struct kvl_common common = {0};
    int n_name;
    size_t n_left;
    char **order = NULL, **left; /* getopt moves words about */
    KVL_TRY(kvl_alloc(&order, words->n + 1, sizeof *order));
    memcpy(order, words->word, words->n * sizeof *order);
    kvl_cmd_find((int)words->n - 1, order + 1, &n_name);
    KVL_TRY(kvl_cmd_parse(run->command, (int)words->n - n_name, order + n_name, args, &common, &n_left, &left));
    KVL_TRY(check_output(run, args));
    KVL_TRY(load_plugins(run, &common.plugins, resolved));
    for (size_t i = 0; i < n_left; i++) KVL_TRY(kvl_text_printf(resolved, "word=%s\n", left[i]));
    for (size_t i = 0; i < run->command->n_options; i++) {
        const struct kvl_opt *option = &run->command->options[i];
        if (!is_about_output(option->name)) KVL_TRY(resolve_option(run, option, (char *)args + option->offset, resolved));
    }
done:
    kvl_free(&order);
    return status;
}

/* Another program's options are not known here: its words as they are, and the content of model and text. */
static kvl_status resolve_foreign(struct run *run, const struct kvl_grid_point *cell, const struct words *words, struct kvl_text *resolved)
{
    kvl_status status = KVL_OK;
    struct used_file *file;
    for (size_t i = 0; i < words->n; i++) KVL_TRY(kvl_text_printf(resolved, "word=%s\n", words->word[i]));
    for (int a = KVL_AXIS_MODEL; a <= KVL_AXIS_TEXT; a++) {
        if (cell->value[a] == NULL || access(cell->value[a], R_OK) != 0) continue;
        KVL_TRY(look_at(run, cell->value[a], &file));
        KVL_TRY(kvl_text_printf(resolved, "%s=%s\n", kvl_axis_name[a], file->sha256));
    }
done:
    return status;
}

/* ---- planned bytes ---- */

static const void *option_value(const struct run *run, const void *args, const char *name, enum kvl_opt_type type)
{
    const struct kvl_opt *option = own_option(run->command, name);
    return option && option->type == type ? (const char *)args + option->offset : NULL;
}

static enum kvl_protocol protocol_of(const struct run *run, const void *args)
{
    const struct kvl_opt *option = own_option(run->command, "protocol");
    const int *choice = option_value(run, args, "protocol", KVL_OPT_CHOICE);
    const char *name = option ? option->choices : "";
    for (int i = 0; choice && i < *choice; i++) name += strcspn(name, "|") + 1;
    for (int p = 0; p < KVL_PROTOCOLS; p++)
        if (choice && strncmp(name, kvl_protocol_name[p], strlen(kvl_protocol_name[p])) == 0) return p;
    return KVL_P4_STREAMING;
}

static kvl_status plan_cell(struct run *run, const void *args, struct plan_bytes *out)
{
    kvl_status status = KVL_OK;
    struct kvl_spec *spec = NULL;
    struct used_file *file;
    struct kvl_footprint one;
    const char *const *path = option_value(run, args, "model", KVL_OPT_TEXT), *const *kv = option_value(run, args, "kv", KVL_OPT_TEXT);
    const int64_t *ctx = option_value(run, args, "ctx", KVL_OPT_INT), *ubatch = option_value(run, args, "ubatch", KVL_OPT_INT);
    const bool *exact = option_value(run, args, "exact", KVL_OPT_FLAG);
    *out = (struct plan_bytes){NAN, NAN};
    if (!path || !kv || !ctx || !ubatch || *ctx == 0) return KVL_OK;
    KVL_TRY(look_at(run, *path, &file));
    if (file->model == NULL) KVL_TRY(kvl_model_open(*path, &file->model));
    KVL_TRY(kvl_spec_parse(*kv, &spec));
    const enum kvl_protocol protocol = protocol_of(run, args);
    const struct kvl_session_config config = {
        .spec = spec,
        .n_ctx = (uint32_t)*ctx,
        .ubatch = protocol == KVL_P4_STREAMING ? 1 : (uint32_t)(*ubatch < *ctx ? *ubatch : *ctx),
        .protocol = protocol,
        .exact = exact && *exact,
    };
    const struct kvl_cache_limits limits = {1ull << 48, 1};
    KVL_TRY(kvl_footprint_of(&file->model->dims, &config, &limits, &one));
    *out = (struct plan_bytes){(double)one.resident, (double)one.bytes_per_token};
done:
    kvl_spec_free(&spec);
    return status;
}

/* ---- cells ---- */

/* An error of a cell says which one; the first message is kept, so it is taken out and told anew. */
static kvl_status blame(const struct run *run, const struct kvl_grid_point *cell, kvl_status status)
{
    struct kvl_text label = {0}, error = {0};
    if (kvl_text_printf(&error, "%s", kvl_error_text()) == KVL_OK && cell_label(cell, &label) == KVL_OK) {
        kvl_error_clear();
        kvl_fail(status, "%s: cell %s: %s", run->grid_path, label.data, error.data);
    }
    kvl_text_free(&label);
    kvl_text_free(&error);
    return status;
}

static kvl_status make_cell(struct run *run, const struct kvl_grid_point *cell, size_t i)
{
    kvl_status status = KVL_OK;
    struct kvl_sweep_cell *out = &run->sweep.cell[i];
    struct words words = {0};
    struct kvl_text resolved = {0}, label = {0};
    void *args = NULL;
    char hex[65], path[4096];
    KVL_TRY(cell_words(run, cell, &words));
    if (run->command) {
        KVL_TRY(kvl_text_printf(&resolved, "command=%s\n", run->command->name));
        KVL_TRY(kvl_alloc(&args, 1, run->command->args_size));
        KVL_TRY(parse_cell(run, &words, args, &resolved));
        if (run->planned && plan_cell(run, args, &run->planned[i]) != KVL_OK) { /* so it will fail, alone */
            snprintf(out->error, sizeof out->error, "%s", kvl_error_text());
            kvl_error_clear();
        }
    } else {
        KVL_TRY(resolve_foreign(run, cell, &words, &resolved));
        if (run->planned) run->planned[i] = (struct plan_bytes){NAN, NAN};
    }
    KVL_TRY(kvl_sha256(resolved.data, resolved.size, hex));
    snprintf(out->id, sizeof out->id, "%.*s", KVL_CELL_ID, hex);
    KVL_TRY(kvl_sweep_path(&run->sweep, out, ".h5", path, sizeof path));
    KVL_TRY(add_word(&words, "--output"));
    KVL_TRY(add_word(&words, path));
    KVL_TRY(cell_label(cell, &label));
    out->device = cell->value[KVL_AXIS_DEVICE];
    memcpy(run->estimate[i].value, cell->value, sizeof cell->value);
    out->label = label.data;
    label = (struct kvl_text){0};
    out->argv = words.word;
    words = (struct words){0};
done:
    if (status != KVL_OK) status = blame(run, cell, status);
    free_words(&words);
    kvl_text_free(&label);
    kvl_text_free(&resolved);
    kvl_free(&args);
    return status;
}

/* --only: is the id's beginning one of the comma list? */
static bool is_named(const char *only, const char *id)
{
    for (const char *name = only; name != NULL && *name; name += *name == ',') {
        const size_t size = strcspn(name, ",");
        if (size > 0 && strncmp(id, name, size) == 0) return true;
        name += size;
    }
    return only == NULL;
}

/* Two cells that resolve to the same are one. */
static bool is_wanted(const struct run *run, size_t i, size_t n_before)
{
    const char *id = run->sweep.cell[i].id;
    if (!is_named(run->args->only, id)) return false;
    for (size_t k = 0; k < n_before; k++)
        if (strcmp(run->sweep.cell[k].id, id) == 0) return false;
    return true;
}

static kvl_status drop_unwanted(struct run *run)
{
    struct kvl_sweep *sweep = &run->sweep;
    size_t n = 0;
    for (size_t i = 0; i < sweep->n; i++) {
        if (!is_wanted(run, i, n)) {
            kvl_sweep_cell_free(&sweep->cell[i]);
            continue;
        }
        if (run->planned) run->planned[n] = run->planned[i];
        run->estimate[n] = run->estimate[i];
        sweep->cell[n++] = sweep->cell[i];
    }
    sweep->n = n;
    return n ? KVL_OK : kvl_fail(KVL_E_USAGE, "%s: no cell's id starts with %s", run->grid_path, run->args->only);
}

static kvl_status make_cells(struct run *run)
{
    kvl_status status = KVL_OK;
    struct kvl_grid_point *cells = NULL;
    size_t n = 0;
    KVL_TRY(kvl_grid_cells(run->grid, &cells, &n));
    KVL_TRY(kvl_alloc(&run->sweep.cell, n, sizeof *run->sweep.cell));
    KVL_TRY(kvl_alloc(&run->estimate, n, sizeof *run->estimate));
    if (run->args->dry_run) KVL_TRY(kvl_alloc(&run->planned, n, sizeof *run->planned));
    run->sweep.n = n;
    for (size_t i = 0; i < n; i++) KVL_TRY(make_cell(run, &cells[i], i));
    KVL_TRY(drop_unwanted(run));
done:
    kvl_free(&cells);
    return status;
}

/* ---- before the first cell ---- */

static kvl_status find_command(struct run *run)
{
    kvl_status status = KVL_OK;
    struct words words = {0};
    int n_name;
    const ssize_t n = readlink("/proc/self/exe", run->self, sizeof run->self - 1);
    if (n < 0) return kvl_fail(KVL_E_IO, "/proc/self/exe: cannot find this program");
    run->self[n] = '\0';
    if (run->grid->program) return KVL_OK;
    KVL_TRY(add_command(&words, run->grid->command));
    run->command = kvl_cmd_find((int)words.n, words.word, &n_name);
    if (run->command == NULL || (size_t)n_name != words.n || own_option(run->command, "output") == NULL) {
        kvl_error_clear();
        status = kvl_fail(KVL_E_USAGE, "%s: command \"%s\": wanted a command that leaves a run file: eval ppl, eval kld, bench ...",
                          run->grid_path, run->grid->command);
    }
done:
    free_words(&words);
    return status;
}

static kvl_status find_folder(struct run *run)
{
    if (run->args->out) return kvl_text_printf(&run->out, "%s", run->args->out);
    if (run->grid->out) return kvl_text_printf(&run->out, "%s", run->grid->out);
    return kvl_text_printf(&run->out, "runs/%s", run->grid->name);
}

static kvl_status prepare(struct run *run)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_grid_load(run->grid_path, &run->grid));
    KVL_TRY(find_command(run));
    KVL_TRY(find_folder(run));
    run->sweep.out = run->out.data;
    KVL_TRY(make_cells(run));
    KVL_TRY(kvl_sweep_look(&run->sweep));
    if (run->args->resume && kvl_sweep_count(&run->sweep, KVL_CELL_DONE_BEFORE) == 0)
        status = kvl_fail(KVL_E_USAGE, "--resume: %s has none of this grid's %zu cells: another folder (-o), or the grid, a model or a text has changed; without "
                          "--resume the sweep begins anew", run->sweep.out, run->sweep.n);
done:
    return status;
}

/* ---- how long the rest takes ---- */

static bool same_value(const char *a, const char *b) { return a && b ? strcmp(a, b) == 0 : a == b; }

static bool is_left(const struct kvl_sweep_cell *cell) { return cell->state == KVL_CELL_WAITS || cell->state == KVL_CELL_RUNS; }

static unsigned alike(const struct estimate *a, const struct estimate *b)
{
    static const unsigned weight[KVL_AXES] = {[KVL_AXIS_MODEL] = 8, [KVL_AXIS_CTX] = 8, [KVL_AXIS_DEVICE] = 8, [KVL_AXIS_KV] = 4, [KVL_AXIS_TEXT] = 1, [KVL_AXIS_SEED] = 1};
    unsigned sum = 0;
    for (int x = 0; x < KVL_AXES; x++) sum += same_value(a->value[x], b->value[x]) ? weight[x] : 0;
    return sum;
}

static void learn(struct run *run, size_t ended)
{
    for (size_t i = 0; i < run->sweep.n; i++) {
        struct estimate *e = &run->estimate[i];
        if (!is_left(&run->sweep.cell[i])) continue;
        const unsigned now = alike(e, &run->estimate[ended]);
        if (e->n && now < e->alike) continue;
        if (e->n == 0 || now > e->alike) {
            e->alike = now;
            e->seconds = 0.0;
            e->n = 0;
        }
        e->seconds += run->sweep.cell[ended].seconds;
        e->n++;
    }
}

static double seconds_left(const struct run *run, size_t i)
{
    const struct kvl_sweep_cell *cell = &run->sweep.cell[i];
    const struct estimate *e = &run->estimate[i];
    if (!is_left(cell)) return 0.0;
    const double expected = e->n ? e->seconds / e->n : (double)NAN;
    return cell->state == KVL_CELL_RUNS ? fmax(expected - ((double)kvl_now_ns() * 1e-9 - cell->seconds), 0.0) : expected;
}

/* Cells of one device wait for each other, and there are so many jobs. NaN before the first cell has ended well. */
static double time_left(const struct run *run)
{
    enum { MOST_DEVICES = KVL_SWEEP_JOBS };
    struct {
        const char *name;
        double seconds;
    } device[MOST_DEVICES];
    size_t n = 0;
    double all = 0.0, longest = 0.0;
    for (size_t i = 0; i < run->sweep.n; i++) {
        const double seconds = seconds_left(run, i);
        size_t d = 0;
        while (d < n && !same_value(device[d].name, run->sweep.cell[i].device)) d++;
        if (d == MOST_DEVICES) d--;
        if (d == n) device[n++].name = run->sweep.cell[i].device, device[d].seconds = 0.0;
        device[d].seconds += seconds;
        longest = device[d].seconds > longest ? device[d].seconds : longest;
        all += seconds;
    }
    return isnan(all) ? all : fmax(longest, all / (double)run->args->jobs);
}

static const char *time_text(double seconds, char text[32])
{
    const unsigned minutes = isnan(seconds) ? 0 : (unsigned)(seconds / 60.0 + 0.5);
    if (isnan(seconds)) return "unknown";
    if (seconds < 120.0) snprintf(text, 32, "%.0f s", seconds);
    else if (minutes < 120) snprintf(text, 32, "%u min", minutes);
    else snprintf(text, 32, "%u h %02u min", minutes / 60, minutes % 60);
    return text;
}

/* ---- results ---- */

static void report(void *context, const struct kvl_sweep *sweep, const struct kvl_sweep_cell *cell)
{
    struct run *run = context;
    char eta[32];
    const size_t left = kvl_sweep_count(sweep, KVL_CELL_WAITS) + kvl_sweep_count(sweep, KVL_CELL_RUNS);
    if (cell->state == KVL_CELL_DONE) learn(run, (size_t)(cell - sweep->cell));
    kvl_info("[%zu/%zu] %s  %s  %.1f s  %s%s%s  ETA %s", sweep->n - left, sweep->n, cell->id, kvl_cell_state_name[cell->state],
             cell->seconds, cell->label, cell->error[0] ? ": " : "", cell->error, time_text(time_left(run), eta));
}

static kvl_status cell_json(const struct run *run, size_t i, cJSON *list)
{
    kvl_status status = KVL_OK;
    const struct kvl_sweep_cell *cell = &run->sweep.cell[i];
    char path[4096];
    cJSON *object = cJSON_CreateObject();
    if (object == NULL || !cJSON_AddItemToArray(list, object)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    const bool done = cell->state == KVL_CELL_DONE || cell->state == KVL_CELL_DONE_BEFORE;
    KVL_TRY(kvl_sweep_path(&run->sweep, cell, ".h5", path, sizeof path));
    cJSON_AddStringToObject(object, "id", cell->id);
    cJSON_AddStringToObject(object, "cell", cell->label);
    cJSON_AddStringToObject(object, "status", kvl_cell_state_name[cell->state]);
    cJSON_AddItemToObject(object, "run_file", done ? cJSON_CreateString(path) : cJSON_CreateNull());
    if (cell->error[0]) cJSON_AddStringToObject(object, "error", cell->error);
    if (run->planned) {
        const struct kvl_fact facts[] = {{"bytes_per_token", run->planned[i].per_token, true},
                                         {"resident_bytes", run->planned[i].resident, true}};
        KVL_TRY(kvl_json_facts(object, facts, 2));
    }
done:
    return status;
}

static kvl_status print_json(const struct run *run)
{
    kvl_status status = KVL_OK;
    const struct kvl_fact facts[] = {
        {"n_cells", (double)run->sweep.n, true},
        {"done_before", (double)kvl_sweep_count(&run->sweep, KVL_CELL_DONE_BEFORE), true},
        {"done", (double)kvl_sweep_count(&run->sweep, KVL_CELL_DONE), true},
        {"failed", (double)kvl_sweep_count(&run->sweep, KVL_CELL_FAILED), true},
        {"skipped", (double)kvl_sweep_count(&run->sweep, KVL_CELL_SKIPPED), true},
        {"waiting", (double)kvl_sweep_count(&run->sweep, KVL_CELL_WAITS), true},
    };
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "name", run->grid->name);
    cJSON_AddStringToObject(object, "folder", run->sweep.out);
    KVL_TRY(kvl_json_facts(object, facts, sizeof facts / sizeof *facts));
    cJSON *list = cJSON_AddArrayToObject(object, "cells");
    for (size_t i = 0; i < run->sweep.n; i++) KVL_TRY(cell_json(run, i, list));
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static void print_planned(const struct run *run)
{
    printf("%-16s  %-11s  %11s  %14s  %s\n", "id", "status", "bytes/token", "resident bytes", "cell");
    for (size_t i = 0; i < run->sweep.n; i++) {
        const struct kvl_sweep_cell *cell = &run->sweep.cell[i];
        const struct plan_bytes *b = &run->planned[i];
        printf("%s  %-11s  ", cell->id, kvl_cell_state_name[cell->state]);
        if (isnan(b->resident))
            printf("%11s  %14s  %s\n", "-", "-", cell->label);
        else
            printf("%11.0f  %14.0f  %s\n", b->per_token, b->resident, cell->label);
    }
}

static void print_counts(const struct run *run)
{
    printf("%s: %zu cells", run->sweep.out, run->sweep.n);
    for (int s = 0; s < KVL_CELL_STATES; s++) {
        const size_t n = kvl_sweep_count(&run->sweep, s);
        if (n) printf(", %zu %s", n, kvl_cell_state_name[s]);
    }
    putchar('\n');
    for (size_t i = 0; i < run->sweep.n; i++) {
        const struct kvl_sweep_cell *cell = &run->sweep.cell[i];
        if (cell->error[0]) printf("  %s  %s  %s: %s\n", cell->id, kvl_cell_state_name[cell->state], cell->label, cell->error);
    }
}

static kvl_status print_result(const struct run *run)
{
    if (run->args->json) return print_json(run);
    if (run->planned) print_planned(run);
    print_counts(run);
    return KVL_OK;
}

/* ---- the command ---- */

static kvl_status submit(struct run *run)
{
    const struct kvl_slurm slurm = {
        .grid = run->grid_path,
        .name = run->grid->name,
        .program = run->self,
        .options = run->args->sbatch.item,
        .n_options = run->args->sbatch.n,
        .per_task = (uint64_t)run->args->per_task,
    };
    return kvl_slurm_submit(&slurm, &run->sweep);
}

static kvl_status run_waiting(struct run *run)
{
    kvl_status status = KVL_OK;
    run->sweep.report = report;
    run->sweep.context = run;
    KVL_TRY(kvl_sweep_run(&run->sweep, (unsigned)run->args->jobs));
done:
    return status;
}

/* A cell is done whatever program did it. Some cells, spread over the grid, tell whether that was this one. */
static void note_other_programs(const struct run *run)
{
    enum { MOST_LOOKED_AT = 16 };
    const size_t step = run->sweep.n / MOST_LOOKED_AT + 1;
    for (size_t i = 0; i < run->sweep.n && run->command; i += step) {
        char path[4096];
        cJSON *tree = NULL;
        if (run->sweep.cell[i].state != KVL_CELL_DONE_BEFORE || kvl_sweep_path(&run->sweep, &run->sweep.cell[i], ".h5", path, sizeof path) != KVL_OK) continue;
        const char *revision = kvl_runfile_read(path, 0, &tree) == KVL_OK ? kvl_run_text(tree, "", "git") : NULL;
        const bool other = revision && strcmp(revision, kvl_revision) != 0;
        if (other) kvl_warn("%s is of revision %s, this program is %s: cells that are done are not run again for that; remove their run files for it", path, revision, kvl_revision);
        kvl_error_clear();
        cJSON_Delete(tree);
        if (other) return;
    }
}

static kvl_status run_grid(struct run *run)
{
    kvl_status status = KVL_OK;
    KVL_TRY(prepare(run));
    note_other_programs(run);
    if (run->args->slurm && !run->args->dry_run) return submit(run);
    if (!run->args->dry_run) status = run_waiting(run);
    const kvl_status printed = print_result(run);
    if (status == KVL_OK) status = printed;
    const size_t failed = kvl_sweep_count(&run->sweep, KVL_CELL_FAILED);
    if (status == KVL_OK && failed) status = kvl_fail(KVL_E_VERIFY, "%zu of %zu cells failed; %s/<id>.log says why", failed, run->sweep.n, run->sweep.out);
done:
    return status;
}

static kvl_status run_sweep(void *args, size_t n_words, char *const *words)
{
    struct run run = {.args = args};
    if (n_words != 1) return kvl_fail(KVL_E_USAGE, "sweep: give one GRID.yaml");
    run.grid_path = words[0];
    const kvl_status status = run_grid(&run);
    for (size_t i = 0; i < run.n_files; i++) {
        kvl_model_close(&run.file[i].model);
        kvl_free(&run.file[i].path);
    }
    kvl_free(&run.file);
    kvl_free(&run.planned);
    kvl_free(&run.estimate);
    kvl_sweep_free(&run.sweep);
    kvl_text_free(&run.out);
    kvl_grid_free(&run.grid);
    return status;
}

#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    {.name = "dry-run", .type = KVL_OPT_FLAG, .offset = AT(dry_run), .help = "print the cells, what is done and the bytes each plans; run nothing"},
    {.name = "jobs", .letter = 'j', .type = KVL_OPT_INT, .offset = AT(jobs), .metavar = "N",
     .help = "cells at once, but never two on one device", .fallback = "1", .min = 1, .max = KVL_SWEEP_JOBS},
    {.name = "only", .type = KVL_OPT_TEXT, .offset = AT(only), .metavar = "ID[,ID...]", .help = "run just the cells whose ids start so"},
    {.name = "output", .letter = 'o', .type = KVL_OPT_TEXT, .offset = AT(out), .metavar = "FOLDER",
     .help = "folder of the run files (default: the grid's out, else runs/<name>)"},
    {.name = "resume", .type = KVL_OPT_FLAG, .offset = AT(resume),
     .help = "go on with a sweep; every call does, this one refuses to begin anew if the folder has no cell of the grid"},
    {.name = "slurm", .type = KVL_OPT_FLAG, .offset = AT(slurm), .help = "submit what waits to Slurm as an array job, and return"},
    {.name = "sbatch", .type = KVL_OPT_LIST, .offset = AT(sbatch), .metavar = "OPTION",
     .help = "option for sbatch, as in --sbatch=--partition=gpu; may be repeated"},
    {.name = "per-task", .type = KVL_OPT_INT, .offset = AT(per_task), .metavar = "N",
     .help = "cells of one array task; 0: as many as keep the array within 1000 tasks", .fallback = "0", .min = 0, .max = 1e6},
    KVL_OPTION_JSON(struct args),
};
/* clang-format on */

const struct kvl_command kvl_cmd_sweep = {
    .name = "sweep",
    .summary = "run all cells of a grid, each into a run file of its own",
    .words = "GRID.yaml",
    .details =
        "  name: e03_kivi                       # run files go to runs/<name>\n"
        "  command: eval kld\n"
        "  models: [data/models/a.gguf]         # axes: models texts kv ctx seeds devices; paths as on the command line\n"
        "  texts: [data/text/wiki.test.raw]\n"
        "  kv: [f16, int4, \"k=int8 v=int4\"]\n"
        "  options: [--chunks=16, --exact]      # given to every cell\n"
        "  cells:                               # without it: the product of all axes\n"
        "    - {kv: int2 tail=64, ctx: 1024}    # fixes two values, stands for the product of the rest; {} is the whole product\n"
        "\n"
        "Also: out: FOLDER for the run files; program: ./other, run in place of kvlab with the same words and --output FILE.h5;\n"
        "options in a listed cell. ctx of eval recall, needle and continuation is their --context.\n"
        "\n"
        "A cell's run file is named by the hash of what the cell resolves to: every option, defaults included, models and texts\n"
        "by their content. So a second call runs only what is missing, failed or changed (of done cells that another revision of\n"
        "the program made it warns); a kill loses the running cell, no more; and any number of sweeps may work on one folder\n"
        "together. <id>.log of a failed cell says why.\n"
        "\n"
        "  kvlab sweep experiments/e03_kivi/grid.yaml --dry-run\n"
        "  kvlab sweep experiments/e03_kivi/grid.yaml --jobs 2\n"
        "  kvlab sweep experiments/e03_kivi/grid.yaml --resume\n"
        "  kvlab sweep experiments/e03_kivi/grid.yaml --slurm --sbatch=--partition=gpu --sbatch=--gres=gpu:1",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run_sweep,
};
