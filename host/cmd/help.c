/* --help, all of it from the tables: columns aligned, long lines broken between words. */
#include "cmd.h"
#include <stdio.h>
#include <string.h>

enum { PAGE_WIDTH = 100, WIDEST_LEFT = 30 };

static const char *const exit_codes[][2] = {
    {"0", "done"},
    {"1", "error"},
    {"2", "usage: an option, a spec or a command that is not legal"},
    {"3", "verification failed: a result differs from its reference"},
    {"4", "device lost, or out of its memory"},
    {"77", "skipped: not applicable on this device or machine"},
};

static const char *const environment[][2] = {
    {"KVLAB_DEVICE", "device when --device is not given: index, part of its name, cpu or gpu"},
    {"KVLAB_CACHE_DIR", "folder of compiled kernels (default: $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab)"},
    {"KVLAB_NO_PROGRAM_CACHE", "1: compile all kernels anew; a part of a platform's name: those of that platform"},
    {"KVLAB_TUNE_FILE", "settings found by kvlab tune (default: $XDG_CONFIG_HOME/kvlab/tune.txt, else ~/.config/kvlab/tune.txt; "
                        "empty: none)"},
    {"KVLAB_MASK", "device features to hide, a comma list of fp16, subgroups, int_dot, vectors: for tests; tune files are not used"},
};

/* Prints text from the current column on, at most to PAGE_WIDTH; further lines start at `indent`. Ends the line. */
static void print_wrapped(const char *text, int indent)
{
    int column = indent;
    while (*text) {
        const int size = (int)strcspn(text, " ");
        if (column > indent && column + 1 + size > PAGE_WIDTH) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            putchar(' ');
            column++;
        }
        printf("%.*s", size, text);
        column += size;
        text += size;
        text += strspn(text, " ");
    }
    putchar('\n');
}

/* "  left   text"; a left side that is too wide gets a line of its own. */
static void print_row(const char *left, int width, const char *text)
{
    const int indent = 2 + width + 2;
    if ((int)strlen(left) > width)
        printf("  %s\n%*s", left, indent, "");
    else
        printf("  %-*s  ", width, left);
    print_wrapped(text, indent);
}

static void print_pairs(const char *title, const char *const (*pairs)[2], size_t n)
{
    int width = 0;
    for (size_t i = 0; i < n; i++)
        if ((int)strlen(pairs[i][0]) > width) width = (int)strlen(pairs[i][0]);
    printf("\n%s:\n", title);
    for (size_t i = 0; i < n; i++) print_row(pairs[i][0], width, pairs[i][1]);
}

static const char *value_name(const struct kvl_opt *option)
{
    return option->metavar ? option->metavar : option->choices ? option->choices : "";
}

static void option_left(const struct kvl_opt *option, char *out, size_t size)
{
    const char letter[] = {'-', option->letter, ',', '\0'};
    snprintf(out, size, "%3s --%s %s", option->letter ? letter : "", option->name, value_name(option));
    size_t end = strlen(out);
    while (end > 0 && out[end - 1] == ' ') out[--end] = '\0';
}

/* The help line with what the table knows besides: choices, range, default, required. */
static void option_text(const struct kvl_opt *option, char *out, size_t size)
{
    char range[64];
    kvl_opt_range(option, range, sizeof range);
    const bool name_choices = option->choices && option->metavar;
    const struct {
        bool used;
        const char *before, *text;
    } notes[] = {
        {name_choices, "one of ", option->choices},
        {range[0] != '\0', "", range},
        {option->fallback != NULL, "default ", option->fallback},
        {option->required, "", "required"},
    };
    int used = snprintf(out, size, "%s", option->help);
    const char *separator = " (";
    for (size_t i = 0; i < sizeof notes / sizeof *notes && used < (int)size; i++) {
        if (!notes[i].used) continue;
        used += snprintf(out + used, size - (size_t)used, "%s%s%s", separator, notes[i].before, notes[i].text);
        separator = "; ";
    }
    if (separator[0] == ';' && used < (int)size) snprintf(out + used, size - (size_t)used, ")");
}

/* Options from number `first` on. */
static void print_options(const struct kvl_command *command, size_t first)
{
    char left[128], text[1024];
    int width = 0;
    for (size_t i = 0; kvl_cmd_option(command, i); i++) {
        option_left(kvl_cmd_option(command, i), left, sizeof left);
        const int size = (int)strlen(left);
        if (size > width && size <= WIDEST_LEFT) width = size;
    }
    for (size_t i = first; kvl_cmd_option(command, i); i++) {
        option_left(kvl_cmd_option(command, i), left, sizeof left);
        option_text(kvl_cmd_option(command, i), text, sizeof text);
        print_row(left, width, text);
    }
}

void kvl_help_command(const struct kvl_command *command)
{
    printf("kvlab %s: %s\n\nusage: kvlab %s", command->name, command->summary, command->name);
    for (size_t i = 0; i < command->n_options; i++)
        if (command->options[i].required) printf(" --%s %s", command->options[i].name, value_name(&command->options[i]));
    printf(" [options]%s%s\n\noptions:\n", command->words ? " " : "", command->words ? command->words : "");
    print_options(command, 0);
    if (command->details) printf("\n%s%s", command->details, command->details[strlen(command->details) - 1] == '\n' ? "" : "\n");
}

void kvl_help_overview(void)
{
    enum { NAME_WIDTH = 12 };
    puts("kvlab " KVLAB_VERSION ": laboratory bench for the KV cache of language models\n\n"
         "usage: kvlab COMMAND [options] [words]\n\ncommands (kvlab COMMAND --help says more):");
    for (size_t i = 0; i < kvl_n_commands; i++) print_row(kvl_commands[i]->name, NAME_WIDTH, kvl_commands[i]->summary);
    puts("\noptions of every command:");
    print_options(NULL, 0);
    print_pairs("exit codes", exit_codes, sizeof exit_codes / sizeof *exit_codes);
    print_pairs("environment", environment, sizeof environment / sizeof *environment);
}

bool kvl_help_family(const char *first)
{
    const size_t size = strlen(first);
    size_t n = 0;
    int width = 0;
    for (size_t i = 0; i < kvl_n_commands; i++) {
        const char *name = kvl_commands[i]->name;
        if (strncmp(name, first, size) == 0 && name[size] == ' ' && (int)strlen(name) > width) width = (int)strlen(name);
    }
    for (size_t i = 0; width > 0 && i < kvl_n_commands; i++) {
        const char *name = kvl_commands[i]->name;
        if (strncmp(name, first, size) != 0 || name[size] != ' ') continue;
        if (n++ == 0) printf("kvlab %s is several commands (each --help says more):\n", first);
        print_row(name, width, kvl_commands[i]->summary);
    }
    return n > 0;
}

static kvl_status run_help(void *args, size_t n_words, char *const *words)
{
    if (n_words == 0) {
        kvl_help_overview();
        return KVL_OK;
    }
    if (n_words == 1 && kvl_help_family(words[0])) return KVL_OK;
    int n_used;
    const struct kvl_command *command = kvl_cmd_find((int)n_words, words, &n_used);
    if (command) kvl_help_command(command);
    return command ? KVL_OK : KVL_E_USAGE;
}

const struct kvl_command kvl_cmd_help = {
    .name = "help",
    .summary = "print what kvlab, or one command, can do",
    .words = "[COMMAND]",
    .run = run_help,
};
