/* Declarations of tunables (cl/<kernel>.tune), settings, and the settings of a device. */
#include "tuning.h"
#include "device_internal.h"
#include "embedded.h"
#include "text.h"
#include <assert.h>
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- declarations: part of the program, so a mistake in one is a programmer's ---- */

static struct kvl_tune_kernel kernels[KVL_TUNE_KERNELS];
static size_t n_kernels;

/* The next word of a line into out; false at its end. */
static bool next_word(const char **line, char *out, size_t size)
{
    *line += strspn(*line, " \t");
    const size_t n = strcspn(*line, " \t\r\n");
    if (n == 0) return false;
    snprintf(out, size, "%.*s", (int)n, *line);
    const bool whole = strlen(out) == n;
    *line += n;
    return whole;
}

static struct kvl_tunable *find_tunable(struct kvl_tune_kernel *kernel, const char *name)
{
    for (size_t i = 0; i < kernel->n_tunables; i++)
        if (strcmp(kernel->tunable[i].name, name) == 0) return &kernel->tunable[i];
    return NULL;
}

static void declare_tunable(struct kvl_tune_kernel *kernel, const char *line)
{
    assert(kernel->n_tunables < KVL_TUNE_TUNABLES);
    struct kvl_tunable *tunable = &kernel->tunable[kernel->n_tunables++];
    next_word(&line, tunable->name, sizeof tunable->name);
    char word[sizeof tunable->value->word];
    while (next_word(&line, word, sizeof word)) {
        const size_t i = tunable->n_values++;
        assert(i < KVL_TUNE_VALUES);
        strcpy(tunable->value[i].word, word);
        if (kvl_parse_i64(word, &tunable->value[i].number)) continue;
        tunable->value[i].number = (int64_t)i;
        tunable->is_word = true;
    }
    assert(tunable->n_values > 0);
}

static void declare_reorders(struct kvl_tune_kernel *kernel, const char *line)
{
    char name[sizeof kernel->tunable->name];
    while (next_word(&line, name, sizeof name)) {
        struct kvl_tunable *tunable = find_tunable(kernel, name);
        assert(tunable != NULL);
        tunable->reorders = true;
    }
}

static void declare_rule(struct kvl_tune_kernel *kernel, const char *line, enum kvl_tune_limit limit)
{
    assert(kernel->n_rules < KVL_TUNE_RULES);
    struct kvl_tune_rule *rule = &kernel->rule[kernel->n_rules++];
    rule->limit = limit;
    while (rule->n_terms < sizeof rule->term / sizeof *rule->term && next_word(&line, rule->term[rule->n_terms], sizeof *rule->term))
        rule->n_terms++;
    assert(rule->n_terms > 0 && (limit != KVL_TUNE_MULTIPLE || rule->n_terms == 2));
}

static void declare_line(struct kvl_tune_kernel *kernel, const char *line)
{
    char word[16];
    if (!next_word(&line, word, sizeof word) || *word == '#') return;
    if (strcmp(word, "metric") == 0) next_word(&line, kernel->metric, sizeof kernel->metric);
    else if (strcmp(word, "tunable") == 0) declare_tunable(kernel, line);
    else if (strcmp(word, "reorders") == 0) declare_reorders(kernel, line);
    else if (strcmp(word, "multiple") == 0) declare_rule(kernel, line, KVL_TUNE_MULTIPLE);
    else if (strcmp(word, "local") == 0) declare_rule(kernel, line, KVL_TUNE_LOCAL);
    else if (strcmp(word, "items") == 0) declare_rule(kernel, line, KVL_TUNE_ITEMS);
    else if (strcmp(word, "try") == 0) {
        assert(kernel->n_attempts < KVL_TUNE_TRIES);
        kernel->attempt[kernel->n_attempts++] = line;
    } else assert(!"a word that a .tune file does not know");
}

/* The name between "cl/" and ".tune" if a path is of this form. */
static bool kernel_name(const char *path, char *name, size_t size)
{
    static const char folder[] = "cl/", ending[] = ".tune";
    const size_t length = strlen(path), both = sizeof folder - 1 + sizeof ending - 1;
    if (length <= both || strncmp(path, folder, sizeof folder - 1) != 0) return false;
    if (strcmp(path + length - (sizeof ending - 1), ending) != 0) return false;
    snprintf(name, size, "%.*s", (int)(length - both), path + sizeof folder - 1);
    return true;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct kvl_tune_kernel *)a)->name, ((const struct kvl_tune_kernel *)b)->name);
}

static void declare_all(void)
{
    for (const struct kvl_embedded *file = kvl_embedded; file->path != NULL; file++) {
        char name[sizeof kernels->name];
        if (!kernel_name(file->path, name, sizeof name)) continue;
        assert(n_kernels < KVL_TUNE_KERNELS);
        struct kvl_tune_kernel *kernel = &kernels[n_kernels++];
        strcpy(kernel->name, name);
        for (const char *line = file->text; *line != '\0'; line += strcspn(line, "\n"), line += *line == '\n') declare_line(kernel, line);
    }
    qsort(kernels, n_kernels, sizeof *kernels, by_name);
}

const struct kvl_tune_kernel *kvl_tune_kernels(size_t *n)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, declare_all);
    *n = n_kernels;
    return kernels;
}

const struct kvl_tune_kernel *kvl_tune_kernel_find(const char *name)
{
    size_t n;
    const struct kvl_tune_kernel *list = kvl_tune_kernels(&n);
    for (size_t i = 0; i < n; i++)
        if (strcmp(list[i].name, name) == 0) return &list[i];
    return NULL;
}

/* ---- settings ---- */

static size_t tunable_index(const struct kvl_tune_kernel *kernel, const char *name)
{
    size_t i = 0;
    while (i < kernel->n_tunables && strcmp(kernel->tunable[i].name, name) != 0) i++;
    return i;
}

static kvl_status fail_value(const struct kvl_tune_kernel *kernel, const struct kvl_tunable *tunable, const char *value)
{
    char legal[KVL_TUNE_VALUES * 16] = "";
    for (size_t i = 0; i < tunable->n_values; i++) {
        strcat(legal, i ? ", " : "");
        strcat(legal, tunable->value[i].word);
    }
    return kvl_fail(KVL_E_FORMAT, "%s: %s=%s is not legal; one of %s is", kernel->name, tunable->name, value, legal);
}

static kvl_status parse_choice(const struct kvl_tune_kernel *kernel, char *word, struct kvl_setting *out)
{
    char *value = strchr(word, '=');
    if (value != NULL) *value++ = '\0';
    const size_t i = tunable_index(kernel, word);
    if (value == NULL || i == kernel->n_tunables)
        return kvl_fail(KVL_E_FORMAT, "%s: \"%s\" is not name=value of a tunable in cl/%s.tune", kernel->name, word, kernel->name);
    const struct kvl_tunable *tunable = &kernel->tunable[i];
    for (size_t choice = 0; choice < tunable->n_values; choice++)
        if (strcmp(tunable->value[choice].word, value) == 0) {
            out->choice[i] = (uint8_t)choice;
            return KVL_OK;
        }
    return fail_value(kernel, tunable, value);
}

kvl_status kvl_setting_parse(const struct kvl_tune_kernel *kernel, const char *text, struct kvl_setting *out)
{
    kvl_status status = KVL_OK;
    struct kvl_setting setting = {0};
    char word[32];
    while (*(text += strspn(text, " \t")) != '\0' && *text != '\n' && *text != '\r' && *text != '#') {
        if (!next_word(&text, word, sizeof word)) return kvl_fail(KVL_E_FORMAT, "%s: \"%s...\" is too long", kernel->name, word);
        KVL_TRY(parse_choice(kernel, word, &setting));
    }
    KVL_TRY(kvl_setting_check(kernel, &setting, NULL));
    *out = setting;
done:
    return status;
}

kvl_status kvl_setting_print(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, struct kvl_text *text)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < kernel->n_tunables; i++)
        KVL_TRY(kvl_text_printf(text, "%s%s=%s", i ? " " : "", kernel->tunable[i].name, kernel->tunable[i].value[setting->choice[i]].word));
done:
    return status;
}

int64_t kvl_setting_value(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const char *tunable)
{
    const size_t i = tunable_index(kernel, tunable);
    assert(i < kernel->n_tunables);
    return kernel->tunable[i].value[setting->choice[i]].number;
}

bool kvl_setting_reorders(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting)
{
    for (size_t i = 0; i < kernel->n_tunables; i++)
        if (kernel->tunable[i].reorders && setting->choice[i] != 0) return true;
    return false;
}

/* The value of "4*cols*tile". */
static int64_t term_value(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const char *term)
{
    char words[sizeof kernel->rule->term[0]], *rest = NULL;
    int64_t product = 1, number;
    strcpy(words, term);
    for (char *word = strtok_r(words, "*", &rest); word != NULL; word = strtok_r(NULL, "*", &rest))
        product *= kvl_parse_i64(word, &number) ? number : kvl_setting_value(kernel, setting, word);
    return product;
}

static kvl_status check_rule(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const struct kvl_tune_rule *rule,
                             const struct kvl_caps *caps)
{
    int64_t value[sizeof rule->term / sizeof *rule->term], sum = 0;
    for (size_t i = 0; i < rule->n_terms; i++) sum += value[i] = term_value(kernel, setting, rule->term[i]);
    const uint64_t most = caps == NULL ? 0 : rule->limit == KVL_TUNE_LOCAL ? caps->local_bytes : caps->max_work_group;
    if (rule->limit == KVL_TUNE_MULTIPLE && value[0] % value[1] != 0)
        return kvl_fail(KVL_E_FORMAT, "%s: %s must be a multiple of %s", kernel->name, rule->term[0], rule->term[1]);
    if (rule->limit == KVL_TUNE_MULTIPLE || most == 0 || (uint64_t)sum <= most) return KVL_OK;
    return kvl_fail(KVL_E_FORMAT, "%s: %lld %s, the device has %llu", kernel->name, (long long)sum,
                    rule->limit == KVL_TUNE_LOCAL ? "bytes of local memory" : "work-items in a group", (unsigned long long)most);
}

kvl_status kvl_setting_check(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const struct kvl_caps *caps)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < kernel->n_rules && status == KVL_OK; i++) status = check_rule(kernel, setting, &kernel->rule[i], caps);
    return status;
}

/* ---- the settings of a device ---- */

static const struct kvl_setting defaults;

static const struct kvl_setting *setting_of(const struct kvl_tuning *tuning, const struct kvl_tune_kernel *kernel)
{
    return tuning != NULL ? &tuning->setting[kernel - kernels] : &defaults;
}

static int64_t value_of(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, size_t i, bool exact)
{
    const struct kvl_tunable *tunable = &kernel->tunable[i];
    return tunable->value[exact && tunable->reorders ? 0 : setting->choice[i]].number;
}

int64_t kvl_tuned(const struct kvl_tuning *tuning, const char *kernel_name_, const char *tunable, bool exact)
{
    const struct kvl_tune_kernel *kernel = kvl_tune_kernel_find(kernel_name_);
    assert(kernel != NULL);
    const size_t i = tunable_index(kernel, tunable);
    assert(i < kernel->n_tunables);
    return value_of(kernel, setting_of(tuning, kernel), i, exact);
}

static void put_capitals(const char *from, char *to)
{
    do *to++ = (char)toupper((unsigned char)*from);
    while (*from++ != '\0');
}

kvl_status kvl_tuned_defines(const struct kvl_tuning *tuning, const char *kernel_name_, bool exact, struct kvl_text *text)
{
    kvl_status status = KVL_OK;
    const struct kvl_tune_kernel *kernel = kvl_tune_kernel_find(kernel_name_);
    assert(kernel != NULL);
    char prefix[sizeof kernel->name], name[sizeof kernel->tunable->name];
    put_capitals(kernel->name, prefix);
    for (size_t i = 0; i < kernel->n_tunables; i++) {
        if (kernel->tunable[i].is_word) continue;
        put_capitals(kernel->tunable[i].name, name);
        KVL_TRY(kvl_text_printf(text, " -DKVL_%s_%s=%lld", prefix, name, (long long)value_of(kernel, setting_of(tuning, kernel), i, exact)));
    }
done:
    return status;
}

const struct kvl_tuning *kvl_device_tuning(const struct kvl_device *device) { return &device->tuning; }

void kvl_device_tune(struct kvl_device *device, const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const char *source)
{
    const size_t i = (size_t)(kernel - kernels);
    device->tuning.setting[i] = *setting;
    snprintf(device->tuning.source[i], sizeof device->tuning.source[i], "%s", source);
}

void kvl_device_restore(struct kvl_device *device, const struct kvl_tuning *tuning) { device->tuning = *tuning; }
