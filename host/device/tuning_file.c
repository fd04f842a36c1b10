/* Entries: text files that say which settings a device gets.
 *
 *   device NAME | DRIVER        whose the lines below are
 *   family NAME                 of data/tune/families
 *   vendor TYPE NAME
 *   KERNEL name=value ...       a setting
 *
 * Files are read as they are found: a wrong line is warned of and skipped. */
#include "tuning.h"
#include "embedded.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "text.h"
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LONGEST_LINE = 512, MOST_WARNINGS = 3, MOST_BYTES = 1 << 20 };

/* Whom a section is for, the most special first. */
enum step { DEVICE, FAMILY, VENDOR, STEPS };
static const char *const step_word[STEPS] = {"device", "family", "vendor"};

/* What a device is called at each step. */
struct names {
    char of[STEPS][300];
};

static const char folder[] = "data/tune/";

/* A copy of the line at `text` without what surrounds its words and with blanks for control characters; the start of the next line. */
static const char *take_line(const char *text, char line[LONGEST_LINE])
{
    const size_t n = strcspn(text, "\n");
    snprintf(line, LONGEST_LINE, "%.*s", (int)(n < LONGEST_LINE ? n : LONGEST_LINE), text);
    for (char *c = line; *c != '\0'; c++)
        if (iscntrl((unsigned char)*c)) *c = ' ';
    size_t end = strlen(line);
    while (end > 0 && isspace((unsigned char)line[end - 1])) line[--end] = '\0';
    const size_t start = strspn(line, " \t");
    memmove(line, line + start, end - start + 1);
    return text + n + (text[n] == '\n');
}

/* The rest of a line that starts with a word and a blank, or NULL. */
static const char *after_word(const char *line, const char *word)
{
    const size_t n = strlen(word);
    return strncmp(line, word, n) == 0 && line[n] == ' ' ? line + n + strspn(line + n, " ") : NULL;
}

/* data/tune/families: NAME and then the start of "PLATFORM / DEVICE"; the longest start that fits. */
static void find_family(const struct kvl_caps *caps, char *family, size_t size)
{
    char whole[sizeof caps->platform + sizeof caps->name + 4], line[LONGEST_LINE];
    size_t longest = 0;
    snprintf(whole, sizeof whole, "%s / %s", caps->platform, caps->name);
    const char *text = kvl_embedded_text("data/tune/families");
    while (text != NULL && *text != '\0') {
        text = take_line(text, line);
        if (*line == '\0' || *line == '#') continue;
        const size_t name = strcspn(line, " "), start = name + strspn(line + name, " "), n = strlen(line + start);
        if (n <= longest || strncmp(whole, line + start, n) != 0) continue;
        longest = n;
        snprintf(family, size, "%.*s", (int)name, line);
    }
}

static struct names names_of(const struct kvl_caps *caps)
{
    struct names names = {0};
    snprintf(names.of[DEVICE], sizeof names.of[DEVICE], "%s | %s", caps->name, caps->driver);
    find_family(caps, names.of[FAMILY], sizeof names.of[FAMILY]);
    snprintf(names.of[VENDOR], sizeof names.of[VENDOR], "%s %s", kvl_device_type_name[caps->type], caps->vendor);
    return names;
}

/* The step of a line that opens a section; STEPS if it opens none. *fits: the section is for this device. */
static enum step open_section(const char *line, const struct names *names, bool *fits)
{
    for (int step = 0; step < STEPS; step++) {
        const char *name = after_word(line, step_word[step]);
        if (name == NULL) continue;
        *fits = strcmp(name, names->of[step]) == 0;
        return (enum step)step;
    }
    return STEPS;
}

/* ---- reading ---- */

struct lookup {
    const struct kvl_caps *caps;
    struct names names;
    struct kvl_tuning *tuning;
    int rank[KVL_TUNE_KERNELS]; /* of the entry that was taken; lower is better */
};

static kvl_status read_setting(const struct kvl_caps *caps, const char *line, const struct kvl_tune_kernel **kernel, struct kvl_setting *setting)
{
    char name[LONGEST_LINE];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(line, " "), line);
    *kernel = kvl_tune_kernel_find(name);
    if (*kernel == NULL) return kvl_fail(KVL_E_FORMAT, "\"%.40s\" is neither a kernel with tunables nor device, family or vendor", name);
    const kvl_status status = kvl_setting_parse(*kernel, line + strlen(name), setting);
    return status == KVL_OK ? kvl_setting_check(*kernel, setting, caps) : status;
}

static void take_setting(struct lookup *lookup, const char *path, enum step step, bool is_users, const struct kvl_tune_kernel *kernel,
                         const struct kvl_setting *setting)
{
    size_t n;
    const size_t i = (size_t)(kernel - kvl_tune_kernels(&n));
    const int rank = 2 * (int)step + !is_users;
    if (rank > lookup->rank[i]) return;
    lookup->rank[i] = rank;
    lookup->tuning->setting[i] = *setting;
    snprintf(lookup->tuning->source[i], sizeof lookup->tuning->source[i], "%s %.299s, %.80s", step_word[step],
             step == FAMILY ? lookup->names.of[FAMILY] : "entry", path);
}

static void warn_line(const char *path, size_t number, size_t *warnings)
{
    if (*warnings < MOST_WARNINGS) kvl_warn("%s, line %zu ignored: %s", path, number, kvl_error_text());
    if ((*warnings)++ == MOST_WARNINGS) kvl_warn("%s: more lines ignored", path);
    kvl_error_clear();
}

static void read_entries(struct lookup *lookup, const char *path, const char *text, bool is_users)
{
    char line[LONGEST_LINE];
    enum step step = STEPS;
    bool fits = false;
    size_t warnings = 0;
    for (size_t number = 1; *text != '\0'; number++) {
        const struct kvl_tune_kernel *kernel;
        struct kvl_setting setting;
        text = take_line(text, line);
        if (*line == '\0' || *line == '#') continue;
        const enum step opened = open_section(line, &lookup->names, &fits);
        if (opened != STEPS) {
            step = opened;
            continue;
        }
        /* Entries for others are checked too, but not against this device's limits: they are not theirs. */
        kvl_status status = read_setting(fits ? lookup->caps : NULL, line, &kernel, &setting);
        if (status == KVL_OK && step == STEPS) status = kvl_fail(KVL_E_FORMAT, "a setting before any device, family or vendor");
        if (status != KVL_OK) warn_line(path, number, &warnings);
        else if (fits) take_setting(lookup, path, step, is_users, kernel, &setting);
    }
}

/* The user's file; one that can't be read is no reason to stop. */
static kvl_status read_users_file(struct lookup *lookup)
{
    kvl_status status = KVL_OK;
    char path[4096], *text = NULL;
    size_t size = 0;
    KVL_TRY(kvl_tuning_path(path, sizeof path));
    if (*path == '\0' || access(path, F_OK) != 0) goto done;
    if (kvl_file_read(path, &text, &size) != KVL_OK) {
        kvl_warn("tuning entries not used: %s", kvl_error_text());
        kvl_error_clear();
    } else if (size > MOST_BYTES || strlen(text) != size) {
        kvl_warn("tuning entries not used: %s is no text of at most %d bytes", path, MOST_BYTES);
    } else {
        read_entries(lookup, path, text, true);
    }
done:
    kvl_free(&text);
    return status;
}

static bool has_ending(const char *text, const char *ending)
{
    const size_t n = strlen(text), m = strlen(ending);
    return n >= m && strcmp(text + n - m, ending) == 0;
}

kvl_status kvl_tuning_lookup(const struct kvl_caps *caps, struct kvl_tuning *out)
{
    kvl_status status = KVL_OK;
    struct lookup lookup = {.caps = caps, .names = names_of(caps), .tuning = out};
    *out = (struct kvl_tuning){0};
    for (size_t i = 0; i < KVL_TUNE_KERNELS; i++) {
        lookup.rank[i] = 2 * STEPS;
        strcpy(out->source[i], "built-in");
    }
    if (caps->masked) goto done;
    KVL_TRY(read_users_file(&lookup));
    for (const struct kvl_embedded *file = kvl_embedded; file->path != NULL; file++)
        if (strncmp(file->path, folder, sizeof folder - 1) == 0 && has_ending(file->path, ".txt"))
            read_entries(&lookup, file->path, file->text, false);
done:
    return status;
}

/* ---- the user's file ---- */

kvl_status kvl_tuning_path(char *path, size_t size)
{
    const char *own = getenv("KVLAB_TUNE_FILE"), *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    int n;
    if (own != NULL) n = snprintf(path, size, "%s", own);
    else if (xdg != NULL && *xdg != '\0') n = snprintf(path, size, "%s/kvlab/tune.txt", xdg);
    else n = snprintf(path, size, "%s/.config/kvlab/tune.txt", home != NULL ? home : "");
    return n >= 0 && (size_t)n < size ? KVL_OK : kvl_fail(KVL_E_IO, "tuning file: path too long");
}

/* All lines of a file but the settings of `kernel` for this device. */
static kvl_status copy_others(const char *text, const struct names *names, const char *kernel, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    bool fits = false;
    while (*text != '\0') {
        char line[LONGEST_LINE];
        const char *next = take_line(text, line);
        const enum step opened = open_section(line, names, &fits);
        if (opened != STEPS && opened != DEVICE) fits = false;
        const bool replaced = opened == STEPS && fits && (after_word(line, kernel) != NULL || strcmp(line, kernel) == 0);
        if (!replaced) KVL_TRY(kvl_text_append(out, text, (size_t)(next - text)));
        text = next;
    }
    if (out->size > 0 && out->data[out->size - 1] != '\n') KVL_TRY(kvl_text_append(out, "\n", 1));
done:
    return status;
}

/* A line that opens this device's section, unless the text ends within it. */
static kvl_status open_last_section(struct kvl_text *text, const struct names *names)
{
    bool fits = false;
    char line[LONGEST_LINE];
    for (const char *at = text->data; at != NULL && *at != '\0';) {
        at = take_line(at, line);
        const enum step opened = open_section(line, names, &fits);
        if (opened != STEPS && opened != DEVICE) fits = false;
    }
    return fits ? KVL_OK : kvl_text_printf(text, "device %s\n", names->of[DEVICE]);
}

static kvl_status make_parent(const char *path)
{
    char parent[4096];
    const char *slash = strrchr(path, '/');
    if (slash == NULL || slash == path) return KVL_OK;
    snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
    return kvl_dir_make(parent);
}

kvl_status kvl_tuning_save(const char *path, const struct kvl_caps *caps, const struct kvl_tune_kernel *kernel,
                           const struct kvl_setting *setting, const char *comment)
{
    kvl_status status = KVL_OK;
    const struct names names = names_of(caps);
    struct kvl_text text = {0};
    char *old = NULL;
    size_t size;
    if (access(path, F_OK) == 0) {
        KVL_TRY(kvl_file_read(path, &old, &size));
        KVL_TRY(copy_others(old, &names, kernel->name, &text));
    }
    KVL_TRY(open_last_section(&text, &names));
    KVL_TRY(kvl_text_printf(&text, "%s ", kernel->name));
    KVL_TRY(kvl_setting_print(kernel, setting, &text));
    KVL_TRY(kvl_text_printf(&text, "%s%s\n", *comment != '\0' ? "  # " : "", comment));
    KVL_TRY(make_parent(path));
    KVL_TRY(kvl_file_write(path, text.data, text.size));
done:
    kvl_text_free(&text);
    kvl_free(&old);
    return status;
}
