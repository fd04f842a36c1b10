/* kvlab completion: scripts that teach a shell the commands and options, generated from the same tables as --help. */
#include "cmd.h"
#include <stdio.h>
#include <string.h>

/* ---- what all shells need ---- */

static size_t first_size(const char *name) { return strcspn(name, " "); }
static bool has_second(const char *name) { return name[first_size(name)] != '\0'; }
static const char *second_of(const char *name) { return name + first_size(name) + 1; }

static bool same_first(const char *a, const char *b) { return first_size(a) == first_size(b) && strncmp(a, b, first_size(a)) == 0; }

/* Is command i the first of those that share its first word? */
static bool opens_family(size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (same_first(kvl_commands[k]->name, kvl_commands[i]->name)) return false;
    return true;
}

static void print_choices(const char *choices)
{
    for (; *choices; choices++) putchar(*choices == '|' ? ' ' : *choices);
}

/* The words of a command if the table lists them ("bash|zsh|fish"), else NULL. */
static const char *listed_words(const struct kvl_command *command)
{
    return command->words && strchr(command->words, '|') ? command->words : NULL;
}

/* Text inside single quotes: `quote` stands for a quote, a backslash goes before each of `special`. */
static void print_quoted(const char *text, const char *quote, const char *special)
{
    for (; *text; text++) {
        if (*text == '\'') {
            fputs(quote, stdout);
            continue;
        }
        if (strchr(special, *text)) putchar('\\');
        putchar(*text);
    }
}

/* ---- bash ---- */

static void bash_options(const struct kvl_command *command)
{
    printf("    \"%s\") options=\"", command->name);
    const struct kvl_opt *option;
    for (size_t i = 0; (option = kvl_cmd_option(command, i)); i++) {
        printf("%s--%s", i ? " " : "", option->name);
        if (option->letter) printf(" -%c", option->letter);
    }
    fputs("\"", stdout);
    if (listed_words(command)) {
        fputs(" words=\"", stdout);
        print_choices(listed_words(command));
        putchar('"');
    }
    puts(" ;;");
}

static void bash_values(const struct kvl_command *command)
{
    const struct kvl_opt *option;
    for (size_t i = 0; (option = kvl_cmd_option(command, i)); i++) {
        if (option->type != KVL_OPT_CHOICE) continue;
        printf("    \"%s --%s\"", command->name, option->name);
        if (option->letter) printf(" | \"%s -%c\"", command->name, option->letter);
        fputs(") words=\"", stdout);
        print_choices(option->choices);
        puts("\" cur_is_value=1 ;;");
    }
}

static void print_bash(void)
{
    puts("# bash completion of kvlab. Use: source <(kvlab completion bash)\n"
         "_kvlab() {\n"
         "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}\n"
         "    local options= words= cur_is_value=\n"
         "    COMPREPLY=()\n"
         "    [[ $prev == = ]] && prev=${COMP_WORDS[COMP_CWORD-2]} # --name=value comes as three words\n"
         "    [[ $cur == = ]] && cur=\n"
         "    if ((COMP_CWORD == 1)); then");
    fputs("        COMPREPLY=($(compgen -W \"--help --version", stdout);
    for (size_t i = 0; i < kvl_n_commands; i++)
        if (opens_family(i)) printf(" %.*s", (int)first_size(kvl_commands[i]->name), kvl_commands[i]->name);
    puts("\" -- \"$cur\"))\n        return\n    fi\n    case $command in");
    for (size_t i = 0; i < kvl_n_commands; i++) {
        const char *name = kvl_commands[i]->name;
        if (!opens_family(i) || !has_second(name)) continue;
        printf("    %.*s)\n        ((COMP_CWORD == 2)) && { COMPREPLY=($(compgen -W \"", (int)first_size(name), name);
        for (size_t k = i; k < kvl_n_commands; k++)
            if (same_first(kvl_commands[k]->name, name)) printf("%s%s", k > i ? " " : "", second_of(kvl_commands[k]->name));
        puts("\" -- \"$cur\")); return; }\n        command+=\" ${COMP_WORDS[2]}\"\n        ;;");
    }
    puts("    esac\n    case $command in");
    for (size_t i = 0; i < kvl_n_commands; i++) bash_options(kvl_commands[i]);
    puts("    esac\n    case \"$command $prev\" in");
    for (size_t i = 0; i < kvl_n_commands; i++) bash_values(kvl_commands[i]);
    puts("    esac\n"
         "    [[ $cur == -* && ! $cur_is_value ]] && words=$options\n"
         "    [[ $words ]] && COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
         "}\n"
         "complete -o bashdefault -o default -F _kvlab kvlab");
}

/* ---- zsh ---- */

static const char zsh_quote[] = "'\\''", zsh_special[] = "[]:\\";

static void zsh_option(const struct kvl_opt *option)
{
    const char *star = option->type == KVL_OPT_LIST ? "*" : "";
    fputs(" \\\n            '", stdout);
    if (option->letter && !*star) printf("(-%c --%s)", option->letter, option->name);
    if (option->letter)
        printf("%s'{-%c,--%s}'[", star, option->letter, option->name);
    else
        printf("%s--%s[", star, option->name);
    print_quoted(option->help, zsh_quote, zsh_special);
    putchar(']');
    if (option->type == KVL_OPT_CHOICE) {
        fputs(":value:(", stdout);
        print_choices(option->choices);
        putchar(')');
    } else if (option->type != KVL_OPT_FLAG) {
        putchar(':');
        print_quoted(option->metavar, zsh_quote, zsh_special);
        fputs(":_files", stdout);
    }
    putchar('\'');
}

static void zsh_description(const char *name, const char *text)
{
    printf(" '%s:", name);
    print_quoted(text, zsh_quote, zsh_special);
    putchar('\'');
}

static void zsh_family(size_t first)
{
    const char *name = kvl_commands[first]->name;
    printf("    %.*s)\n        if ((CURRENT == 3)); then\n            names=(", (int)first_size(name), name);
    for (size_t i = first; i < kvl_n_commands; i++)
        if (same_first(kvl_commands[i]->name, name)) zsh_description(second_of(kvl_commands[i]->name), kvl_commands[i]->summary);
    puts(" )\n            _describe command names\n            return\n        fi\n"
         "        command+=\" $words[3]\"\n        shift words\n        ((CURRENT--))\n        ;;");
}

static void print_zsh(void)
{
    puts("#compdef kvlab\n"
         "# zsh completion of kvlab. Use: kvlab completion zsh >_kvlab, in a folder of $fpath; or source it after compinit\n"
         "_kvlab() {\n"
         "    local command=$words[2]\n"
         "    local -a names\n"
         "    if ((CURRENT == 2)); then");
    fputs("        names=(", stdout);
    for (size_t i = 0; i < kvl_n_commands; i++) {
        const char *name = kvl_commands[i]->name;
        if (!opens_family(i)) continue;
        if (has_second(name))
            printf(" '%.*s'", (int)first_size(name), name);
        else
            zsh_description(name, kvl_commands[i]->summary);
    }
    puts(" )\n        _describe command names\n        return\n    fi\n    case $command in");
    for (size_t i = 0; i < kvl_n_commands; i++)
        if (opens_family(i) && has_second(kvl_commands[i]->name)) zsh_family(i);
    puts("    esac\n    shift words\n    ((CURRENT--))\n    case $command in");
    for (size_t i = 0; i < kvl_n_commands; i++) {
        const struct kvl_command *command = kvl_commands[i];
        printf("    '%s')\n        _arguments", command->name);
        for (size_t k = 0; kvl_cmd_option(command, k); k++) zsh_option(kvl_cmd_option(command, k));
        if (listed_words(command)) {
            fputs(" \\\n            '*:word:(", stdout);
            print_choices(listed_words(command));
            fputs(")'", stdout);
        } else if (command->words) {
            fputs(" \\\n            '*:file:_files'", stdout);
        }
        puts("\n        ;;");
    }
    puts("    esac\n"
         "}\n"
         "if [[ $funcstack[1] == _kvlab ]]; then _kvlab \"$@\"; else compdef _kvlab kvlab; fi");
}

/* ---- fish ---- */

static const char fish_quote[] = "\\'", fish_special[] = "\\";

static void fish_description(const char *text)
{
    fputs(" -d '", stdout);
    print_quoted(text, fish_quote, fish_special);
    puts("'");
}

static void fish_option(const struct kvl_command *command, const struct kvl_opt *option)
{
    printf("complete -c kvlab -n '__kvlab_is %s' -l %s", command->name, option->name);
    if (option->letter) printf(" -s %c", option->letter);
    if (option->type == KVL_OPT_CHOICE) {
        fputs(" -x -a '", stdout);
        print_choices(option->choices);
        putchar('\'');
    } else if (option->type != KVL_OPT_FLAG) {
        fputs(" -r", stdout);
    }
    fish_description(option->help);
}

static void print_fish(void)
{
    puts("# fish completion of kvlab. Use: kvlab completion fish >~/.config/fish/completions/kvlab.fish\n"
         "function __kvlab_is\n"
         "    string match -q -- \"* $argv *\" (commandline -opc | string join ' ')' '\n"
         "end\n"
         "function __kvlab_after\n"
         "    string match -q -- \"* $argv\" (commandline -opc | string join ' ')\n"
         "end");
    for (size_t i = 0; i < kvl_n_commands; i++) {
        const struct kvl_command *command = kvl_commands[i];
        const int size = (int)first_size(command->name);
        if (has_second(command->name)) {
            if (opens_family(i)) printf("complete -c kvlab -f -n __fish_use_subcommand -a %.*s\n", size, command->name);
            printf("complete -c kvlab -f -n '__kvlab_after %.*s' -a %s", size, command->name, second_of(command->name));
        } else {
            printf("complete -c kvlab -f -n __fish_use_subcommand -a %s", command->name);
        }
        fish_description(command->summary);
        for (size_t k = 0; kvl_cmd_option(command, k); k++) fish_option(command, kvl_cmd_option(command, k));
        if (listed_words(command)) {
            printf("complete -c kvlab -f -n '__kvlab_is %s' -a '", command->name);
            print_choices(listed_words(command));
            puts("'");
        }
    }
}

/* ---- the command ---- */

static const struct {
    const char *name;
    void (*print)(void);
} shells[] = {{"bash", print_bash}, {"zsh", print_zsh}, {"fish", print_fish}};

static kvl_status run(void *args, size_t n_words, char *const *words)
{
    for (size_t i = 0; n_words == 1 && i < sizeof shells / sizeof *shells; i++) {
        if (strcmp(words[0], shells[i].name) != 0) continue;
        shells[i].print();
        return KVL_OK;
    }
    return kvl_fail(KVL_E_USAGE, "kvlab completion: wanted one shell, bash, zsh or fish, found %s",
                    n_words == 1 ? words[0] : "no or several words");
}

const struct kvl_command kvl_cmd_completion = {
    .name = "completion",
    .summary = "print a completion script for a shell",
    .words = "bash|zsh|fish",
    .details = "example: source <(kvlab completion bash)",
    .run = run,
};
