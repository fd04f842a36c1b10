/* The program: finds the command that the first words name, parses its options, runs it, and turns its status into an exit code.
 * Results go to stdout; an error is one line on stderr. */
#include "cmd.h"
#include "log.h"
#include "mem.h"
#include "registry.h"
#include "text.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

/* In the order of --help. */
#define KVL_COMMANDS(X) \
    X(devices) \
    X(check) \
    X(plan) \
    X(plugins) \
    X(tokenize) \
    X(calibrate) \
    X(generate) \
    X(eval_ppl) \
    X(eval_kld) \
    X(eval_recall) \
    X(eval_needle) \
    X(eval_continuation) \
    X(eval_stream) \
    X(bench) \
    X(tune) \
    X(xcheck) \
    X(sweep) \
    X(report) \
    X(trace) \
    X(log_show) \
    X(log_repair) \
    X(log_diff) \
    X(log_merge) \
    X(log_export) \
    X(completion) \
    X(help)
#define DECLARE(name) extern const struct kvl_command kvl_cmd_##name;
#define LIST(name) &kvl_cmd_##name,
KVL_COMMANDS(DECLARE)
const struct kvl_command *const kvl_commands[] = {KVL_COMMANDS(LIST)};
const size_t kvl_n_commands = sizeof kvl_commands / sizeof *kvl_commands;

/* The number of words of `name` if words start with exactly them, else 0. */
static int match_name(const char *name, int n_words, char *const *words)
{
    for (int i = 0; i < n_words; i++) {
        const size_t size = strlen(words[i]);
        if (strncmp(name, words[i], size) != 0) return 0;
        if (name[size] == '\0') return i + 1;
        if (name[size] != ' ') return 0;
        name += size + 1;
    }
    return 0;
}

/* Says what is legal after a first word that starts several names ("eval"), or what was meant. */
static kvl_status unknown_command(int n_words, char *const *words)
{
    enum { COMMANDS = sizeof kvl_commands / sizeof *kvl_commands, LONGEST = 32 };
    char first[COMMANDS][LONGEST], typed[2 * LONGEST];
    const char *names[2 * COMMANDS]; /* whole names, then first words */
    kvl_status status = KVL_OK;
    struct kvl_text family = {0};
    for (size_t i = 0; i < COMMANDS; i++) {
        const char *name = kvl_commands[i]->name;
        snprintf(first[i], LONGEST, "%.*s", (int)strcspn(name, " "), name);
        names[i] = name;
        names[COMMANDS + i] = first[i];
        if (strcmp(first[i], words[0]) == 0) KVL_TRY(kvl_text_printf(&family, "%s%s", family.size ? ", " : "", name));
    }
    if (family.size) {
        status = kvl_fail(KVL_E_USAGE, "kvlab %s is one of several commands: %s", words[0], family.data);
        goto done;
    }
    snprintf(typed, sizeof typed, "%s %s", words[0], n_words > 1 ? words[1] : "");
    const char *closest = kvl_closest(typed, names, COMMANDS);
    if (!closest) closest = kvl_closest(words[0], names, 2 * COMMANDS);
    status = closest ? kvl_fail(KVL_E_USAGE, "unknown command \"%s\"; did you mean \"%s\"?", words[0], closest)
                     : kvl_fail(KVL_E_USAGE, "unknown command \"%s\"; kvlab --help lists them", words[0]);
done:
    kvl_text_free(&family);
    return status;
}

const struct kvl_command *kvl_cmd_find(int argc, char *const *argv, int *n_words)
{
    const struct kvl_command *found = NULL;
    *n_words = 0;
    for (size_t i = 0; i < kvl_n_commands; i++) {
        const int n = match_name(kvl_commands[i]->name, argc, argv);
        if (n > *n_words) {
            found = kvl_commands[i];
            *n_words = n;
        }
    }
    if (!found) unknown_command(argc, argv);
    return found;
}

/* argv[0] is the last word of the command. */
static kvl_status run_command(const struct kvl_command *command, int argc, char **argv)
{
    kvl_status status = KVL_OK;
    struct kvl_common common = {0};
    size_t n_words;
    char **words;
    void *args = NULL;
    KVL_TRY(kvl_alloc(&args, 1, command->args_size));
    KVL_TRY(kvl_cmd_parse(command, argc, argv, args, &common, &n_words, &words));
    if (common.help) {
        kvl_help_command(command);
        goto done;
    }
    kvl_log_quiet(common.quiet);
    for (size_t i = 0; i < common.plugins.n; i++) KVL_TRY(kvl_registry_load(common.plugins.item[i]));
    status = command->run(args, n_words, words);
done:
    kvl_free(&args);
    return status;
}

static bool is_one_of(const char *word, const char *a, const char *b) { return strcmp(word, a) == 0 || strcmp(word, b) == 0; }

static kvl_status run(int argc, char **argv)
{
    if (argc < 2) return kvl_fail(KVL_E_USAGE, "a command is missing; kvlab --help lists them");
    if (is_one_of(argv[1], "--help", "-h")) {
        kvl_help_overview();
        return KVL_OK;
    }
    if (is_one_of(argv[1], "--version", "-V")) {
        puts("kvlab " KVLAB_VERSION);
        return KVL_OK;
    }
    if (argv[1][0] == '-') return kvl_fail(KVL_E_USAGE, "the command comes first, then its options: kvlab COMMAND %s", argv[1]);
    if (argc == 3 && is_one_of(argv[2], "--help", "-h") && kvl_help_family(argv[1])) return KVL_OK;
    int n_words;
    const struct kvl_command *command = kvl_cmd_find(argc - 1, argv + 1, &n_words);
    return command ? run_command(command, argc - n_words, argv + n_words) : KVL_E_USAGE;
}

/* What could not be written must not look like a success. */
static kvl_status flush_results(void)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return KVL_OK;
    return kvl_fail(KVL_E_IO, "cannot write the results to stdout: %s", errno ? strerror(errno) : "an earlier write failed");
}

int main(int argc, char **argv)
{
    kvl_interrupt_install();
    /* A closed pipe or a file-size limit is an error of that write; the run file must still be completed. */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);

    kvl_status status = run(argc, argv);
    const kvl_status flushed = flush_results();
    if (status == KVL_OK) status = flushed;
    if (status != KVL_OK)
        fprintf(stderr, "kvlab: %s: %s\n", status > 0 ? "skipped" : "error",
                kvl_error_text()[0] ? kvl_error_text() : "no reason given");
    return kvl_exit_code(status);
}
