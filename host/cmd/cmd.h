/* Commands: each is one file with a const table of options; parsing, range checks, --help and shell completion come from the table. */
#ifndef KVL_CMD_H
#define KVL_CMD_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kvl_opt_type {
    KVL_OPT_FLAG,   /* bool */
    KVL_OPT_TEXT,   /* const char *, NULL if absent and without default */
    KVL_OPT_INT,    /* int64_t */
    KVL_OPT_FLOAT,  /* double */
    KVL_OPT_LIST,   /* struct kvl_list: the option may be given several times */
    KVL_OPT_CHOICE  /* int: index in `choices` ("a|b|c") */
};

struct kvl_list {
    const char *item[64];
    size_t n;
};

struct kvl_opt {
    const char *name;    /* long name without dashes; a one-letter alias is `letter` */
    char letter;         /* 0 if none */
    enum kvl_opt_type type;
    size_t offset;       /* in the command's argument struct */
    const char *metavar; /* NULL for flags */
    const char *help;    /* one line; the default is appended by --help */
    const char *fallback; /* default as text; NULL = none (and then required if `required`) */
    double min, max;     /* INT, FLOAT; both 0 = any */
    const char *choices; /* CHOICE */
    bool required;
};

struct kvl_command {
    const char *name;    /* "devices", or two words: "eval ppl" */
    const char *summary; /* one line */
    const char *words;   /* usage of positional words, e.g. "FILE..."; NULL = none allowed */
    const char *details; /* paragraphs after the options, with an example; may be NULL */
    const struct kvl_opt *options;
    size_t n_options, args_size;
    kvl_status (*run)(void *args, size_t n_words, char *const *words);
};

/* Rows shared by commands whose argument struct T has the member. */
#define KVL_OPTION_DEVICE(T)                                                                                           \
    {.name = "device", .type = KVL_OPT_TEXT, .offset = offsetof(T, device), .metavar = "D",                            \
     .help = "device: index, part of its name, or cpu|gpu (see kvlab devices); also $KVLAB_DEVICE"}
#define KVL_OPTION_MODEL(T)                                                                                            \
    {.name = "model", .letter = 'm', .type = KVL_OPT_TEXT, .offset = offsetof(T, model), .metavar = "FILE",            \
     .help = "model, a GGUF file", .required = true}
#define KVL_OPTION_FILE(T)                                                                                             \
    {.name = "file", .letter = 'f', .type = KVL_OPT_TEXT, .offset = offsetof(T, file), .metavar = "FILE", .help = "text, read as bytes", \
     .required = true}
#define KVL_OPTION_JSON(T) {.name = "json", .type = KVL_OPT_FLAG, .offset = offsetof(T, json), .help = "print one JSON object on stdout"}
#define KVL_OPTION_EXACT(T)                                                                                            \
    {.name = "exact", .type = KVL_OPT_FLAG, .offset = offsetof(T, exact),                                              \
     .help = "float32 activations and accumulation everywhere (for comparisons); without it activations may be rounded to 8 bits"}
#define KVL_OPTION_OUTPUT(T)                                                                                           \
    {.name = "output", .letter = 'o', .type = KVL_OPT_TEXT, .offset = offsetof(T, output), .metavar = "FILE.h5",       \
     .help = "run file; missing folders are made (default: runs/<command>-<time>-<hash>.h5)"}

/* An option's text that is a list, "0,0.5,1". */
struct kvl_numbers_given {
    double value[64];
    size_t n;
};
/* Numbers from min to max; whole ones if they must be. `option` is named in errors, as the user writes it. */
kvl_status kvl_opt_numbers(const char *option, const char *text, double min, double max, bool whole, struct kvl_numbers_given *out);

extern const struct kvl_command *const kvl_commands[];
extern const size_t kvl_n_commands;

/* ---- what main.c, parse.c, help.c and completion.c share; commands need nothing below ---- */

/* Values of the options that every command takes. */
struct kvl_common {
    bool help, quiet;
    struct kvl_list plugins;
};

/* The i-th option of a command: its own, then the common ones; NULL after the last. command NULL: only the common ones. */
const struct kvl_opt *kvl_cmd_option(const struct kvl_command *command, size_t i);

/* Parses argv by the table into args (zeroed, args_size bytes) and common. argv[0] is skipped: it is the command's last word.
 * *words points into argv, whose order changes. With --help nothing is required. */
kvl_status kvl_cmd_parse(const struct kvl_command *command, int argc, char **argv, void *args, struct kvl_common *common, size_t *n_words,
                         char ***words);

/* The numbers an option takes, "1 to 64", "at least 0", or "" for any. */
void kvl_opt_range(const struct kvl_opt *option, char *out, size_t size);

/* The command that argv[0], argv[1] name and the number of its words; the longest match wins. NULL with a usage error if there is none. */
const struct kvl_command *kvl_cmd_find(int argc, char *const *argv, int *n_words);

/* On stdout: one command, or all of them with exit codes and environment. */
void kvl_help_command(const struct kvl_command *command);
void kvl_help_overview(void);
/* The commands whose first word is `first` and who have a second; false if there are none. */
bool kvl_help_family(const char *first);

#endif
