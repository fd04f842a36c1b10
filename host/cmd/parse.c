/* The command line against a table of options: getopt_long finds them, the table says what is legal. */
#include "cmd.h"
#include "mem.h"
#include "text.h"
#include <ctype.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LONG_CODE = 256 }; /* getopt's code of option i is LONG_CODE + i: above all letters */

static const struct kvl_opt common_options[] = {
    {.name = "help",
     .letter = 'h',
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct kvl_common, help),
     .help = "print this and stop"},
    {.name = "quiet",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct kvl_common, quiet),
     .help = "no progress and no notes on stderr"},
    {.name = "plugin",
     .type = KVL_OPT_LIST,
     .offset = offsetof(struct kvl_common, plugins),
     .metavar = "FILE.so",
     .help = "load the plug-ins of a shared object; may be given several times"},
};

static size_t count_own(const struct kvl_command *command) { return command ? command->n_options : 0; }

const struct kvl_opt *kvl_cmd_option(const struct kvl_command *command, size_t i)
{
    const size_t n_own = count_own(command), n_common = sizeof common_options / sizeof *common_options;
    if (i < n_own) return &command->options[i];
    return i < n_own + n_common ? &common_options[i - n_own] : NULL;
}

static size_t count_options(const struct kvl_command *command)
{
    size_t n = 0;
    while (kvl_cmd_option(command, n)) n++;
    return n;
}

static bool has_range(const struct kvl_opt *option) { return option->min != 0.0 || option->max != 0.0; }

void kvl_opt_range(const struct kvl_opt *option, char *out, size_t size)
{
    const double open = 1e15; /* limits beyond this are no limits */
    out[0] = '\0';
    if (!has_range(option)) return;
    if (option->max >= open)
        snprintf(out, size, "at least %.15g", option->min);
    else if (option->min <= -open)
        snprintf(out, size, "at most %.15g", option->max);
    else
        snprintf(out, size, "%.15g to %.15g", option->min, option->max);
}

/* ---- one value by its type ---- */

static kvl_status bad_value(const struct kvl_opt *option, const char *wanted, const char *found)
{
    char range[64];
    kvl_opt_range(option, range, sizeof range);
    return kvl_fail(KVL_E_USAGE, "option --%s: wanted %s%s%s, found \"%s\"", option->name, wanted, range[0] ? ", " : "", range,
                    found);
}

static bool in_range(const struct kvl_opt *option, double value)
{
    return !has_range(option) || (value >= option->min && value <= option->max);
}

static bool starts_blank(const char *text) { return isspace((unsigned char)text[0]); }

static kvl_status set_flag(const struct kvl_opt *option, void *place, const char *text)
{
    *(bool *)place = true;
    return KVL_OK;
}

static kvl_status set_text(const struct kvl_opt *option, void *place, const char *text)
{
    *(const char **)place = text;
    return KVL_OK;
}

static kvl_status set_int(const struct kvl_opt *option, void *place, const char *text)
{
    int64_t value;
    if (starts_blank(text) || !kvl_parse_i64(text, &value) || !in_range(option, (double)value))
        return bad_value(option, "an integer", text);
    *(int64_t *)place = value;
    return KVL_OK;
}

static kvl_status set_float(const struct kvl_opt *option, void *place, const char *text)
{
    double value;
    if (starts_blank(text) || !kvl_parse_f64(text, &value) || !in_range(option, value)) return bad_value(option, "a number", text);
    *(double *)place = value;
    return KVL_OK;
}

static kvl_status set_list(const struct kvl_opt *option, void *place, const char *text)
{
    struct kvl_list *list = place;
    const size_t most = sizeof list->item / sizeof *list->item;
    if (list->n == most) return kvl_fail(KVL_E_USAGE, "option --%s may be given at most %zu times", option->name, most);
    list->item[list->n++] = text;
    return KVL_OK;
}

static kvl_status set_choice(const struct kvl_opt *option, void *place, const char *text)
{
    const size_t wanted = strlen(text);
    const char *name = option->choices;
    for (int i = 0;; i++) {
        const size_t size = strcspn(name, "|");
        if (size == wanted && memcmp(name, text, size) == 0) {
            *(int *)place = i;
            return KVL_OK;
        }
        if (name[size] == '\0') return bad_value(option, option->choices, text);
        name += size + 1;
    }
}

static kvl_status (*const set_by_type[])(const struct kvl_opt *, void *, const char *) = {
    [KVL_OPT_FLAG] = set_flag,   [KVL_OPT_TEXT] = set_text, [KVL_OPT_INT] = set_int,
    [KVL_OPT_FLOAT] = set_float, [KVL_OPT_LIST] = set_list, [KVL_OPT_CHOICE] = set_choice,
};

/* ---- the whole line ---- */

struct parser {
    const struct kvl_command *command;
    size_t n;   /* options */
    void *args; /* of the command */
    struct kvl_common *common;
    struct option *longs; /* [n + 1] for getopt_long */
    char *letters;        /* ":" then "x" or "x:" for each letter */
    bool *seen;           /* [n] */
    const char **names;   /* [n] */
};

static kvl_status set_option(const struct parser *p, size_t i, const char *text)
{
    const struct kvl_opt *option = kvl_cmd_option(p->command, i);
    char *base = i < count_own(p->command) ? p->args : (void *)p->common;
    return set_by_type[option->type](option, base + option->offset, text);
}

static kvl_status prepare(struct parser *p)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&p->longs, p->n + 1, sizeof *p->longs));
    KVL_TRY(kvl_alloc(&p->letters, 2 * p->n + 2, 1));
    KVL_TRY(kvl_alloc(&p->seen, p->n, sizeof *p->seen));
    KVL_TRY(kvl_alloc(&p->names, p->n, sizeof *p->names));
    char *letter = p->letters;
    *letter++ = ':'; /* a missing value is reported as ':' and not as '?' */
    for (size_t i = 0; i < p->n; i++) {
        const struct kvl_opt *option = kvl_cmd_option(p->command, i);
        const bool has_value = option->type != KVL_OPT_FLAG;
        p->names[i] = option->name;
        p->longs[i] = (struct option){option->name, has_value ? required_argument : no_argument, NULL, LONG_CODE + (int)i};
        if (option->letter) *letter++ = option->letter;
        if (option->letter && has_value) *letter++ = ':';
        if (option->fallback) KVL_TRY(set_option(p, i, option->fallback));
    }
done:
    return status;
}

/* getopt's code to the number of the option; p->n if it is none. */
static size_t option_of_code(const struct parser *p, int code)
{
    if (code >= LONG_CODE) return (size_t)(code - LONG_CODE);
    for (size_t i = 0; i < p->n; i++)
        if (kvl_cmd_option(p->command, i)->letter == code) return i;
    return p->n;
}

/* getopt answered '?': a letter or a name it does not know, the start of several names, or a flag with a value. */
static kvl_status refuse(const struct parser *p, const char *spelled)
{
    const char *command = p->command->name;
    const size_t i = optopt ? option_of_code(p, optopt) : p->n;
    if (i < p->n) return kvl_fail(KVL_E_USAGE, "option --%s takes no value", p->names[i]);
    if (optopt) return kvl_fail(KVL_E_USAGE, "unknown option -%c; kvlab %s --help lists them", optopt, command);

    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(spelled + 2, "="), spelled + 2);
    for (size_t k = 0; k < p->n; k++)
        if (name[0] && strncmp(p->names[k], name, strlen(name)) == 0)
            return kvl_fail(KVL_E_USAGE, "option --%s may mean --%s or another; write it in full", name, p->names[k]);
    const char *closest = kvl_closest(name, p->names, p->n);
    if (closest) return kvl_fail(KVL_E_USAGE, "unknown option --%s; did you mean --%s?", name, closest);
    return kvl_fail(KVL_E_USAGE, "unknown option --%s; kvlab %s --help lists them", name, command);
}

static kvl_status take(struct parser *p, int code, const char *spelled)
{
    if (code == '?') return refuse(p, spelled);
    const size_t i = option_of_code(p, code == ':' ? optopt : code);
    const struct kvl_opt *option = kvl_cmd_option(p->command, i);
    if (code == ':')
        return kvl_fail(KVL_E_USAGE, "option --%s needs a value: %s", option->name,
                        option->metavar ? option->metavar : option->choices);
    if (p->seen[i] && option->type != KVL_OPT_LIST) return kvl_fail(KVL_E_USAGE, "option --%s is given twice", option->name);
    p->seen[i] = true;
    return set_option(p, i, optarg);
}

static kvl_status check_complete(const struct parser *p, size_t n_words, char *const *words)
{
    if (n_words > 0 && p->command->words == NULL)
        return kvl_fail(KVL_E_USAGE, "kvlab %s takes only options, found \"%s\"", p->command->name, words[0]);
    for (size_t i = 0; i < p->n; i++) {
        const struct kvl_opt *option = kvl_cmd_option(p->command, i);
        if (option->required && !p->seen[i])
            return kvl_fail(KVL_E_USAGE, "kvlab %s needs --%s %s (%s)", p->command->name, option->name,
                            option->metavar ? option->metavar : option->choices, option->help);
    }
    return KVL_OK;
}

kvl_status kvl_cmd_parse(const struct kvl_command *command, int argc, char **argv, void *args, struct kvl_common *common,
                         size_t *n_words, char ***words)
{
    kvl_status status = KVL_OK;
    struct parser p = {.command = command, .n = count_options(command), .args = args, .common = common};
    KVL_TRY(prepare(&p));
    optind = 0; /* GNU: start over */
    opterr = 0;
    for (int code; (code = getopt_long(argc, argv, p.letters, p.longs, NULL)) != -1;) KVL_TRY(take(&p, code, argv[optind - 1]));
    *n_words = (size_t)(argc - optind);
    *words = argv + optind;
    if (!common->help) KVL_TRY(check_complete(&p, *n_words, *words));
done:
    kvl_free(&p.names);
    kvl_free(&p.seen);
    kvl_free(&p.letters);
    kvl_free(&p.longs);
    return status;
}

kvl_status kvl_opt_numbers(const char *option, const char *text, double min, double max, bool whole, struct kvl_numbers_given *out)
{
    const size_t most = sizeof out->value / sizeof *out->value;
    for (const char *at = text;;) {
        const size_t size = strcspn(at, ",");
        char word[32];
        double value;
        snprintf(word, sizeof word, "%.*s", (int)(size < sizeof word ? size : sizeof word - 1), at);
        if (size >= sizeof word || !kvl_parse_f64(word, &value) || value < min || value > max || (whole && value != floor(value)))
            return kvl_fail(KVL_E_USAGE, "%s %s: \"%.*s\" is not a%s number from %.10g to %.10g; a list is like %.10g,%.10g", option, text, (int)size, at,
                            whole ? " whole" : "", min, max, min, fmin(max, 512));
        if (out->n == most) return kvl_fail(KVL_E_USAGE, "%s: a list has %zu numbers at most", option, most);
        out->value[out->n++] = value;
        if (at[size] == '\0') return KVL_OK;
        at += size + 1;
    }
}
