/* kvl_cmd_parse on a table with every type of option: values, defaults, refusals and their words. */
#include "../../host/cmd/parse.c"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

struct args {
    bool json;
    const char *model, *note;
    int64_t chunks;
    double scale;
    struct kvl_list kv;
    int mode;
};

static const struct kvl_opt options[] = {
    {.name = "json", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, json), .help = "flag"},
    {.name = "model",
     .letter = 'm',
     .type = KVL_OPT_TEXT,
     .offset = offsetof(struct args, model),
     .metavar = "FILE",
     .help = "text",
     .required = true},
    {.name = "note", .type = KVL_OPT_TEXT, .offset = offsetof(struct args, note), .metavar = "TEXT", .help = "text"},
    {.name = "chunks",
     .letter = 'c',
     .type = KVL_OPT_INT,
     .offset = offsetof(struct args, chunks),
     .metavar = "N",
     .help = "integer",
     .fallback = "16",
     .min = -1,
     .max = 100},
    {.name = "scale",
     .type = KVL_OPT_FLOAT,
     .offset = offsetof(struct args, scale),
     .metavar = "X",
     .help = "number",
     .fallback = "0.5"},
    {.name = "kv", .type = KVL_OPT_LIST, .offset = offsetof(struct args, kv), .metavar = "SPEC", .help = "list"},
    {.name = "mode",
     .type = KVL_OPT_CHOICE,
     .offset = offsetof(struct args, mode),
     .help = "choice",
     .choices = "p1|p10|p2",
     .fallback = "p2"},
};
static const struct kvl_command with_words = {
    .name = "sample", .words = "FILE...", .options = options, .n_options = sizeof options / sizeof *options};
static const struct kvl_command without_words = {
    .name = "sample", .options = options, .n_options = sizeof options / sizeof *options};

static struct args args;
static struct kvl_common common;
static size_t n_words;
static char **words;

/* The line is split at blanks; "~" stands for an empty word. */
static kvl_status parse_as(const struct kvl_command *command, const char *line)
{
    static char copy[2048];
    static char *argv[256];
    int argc = 0;
    snprintf(copy, sizeof copy, "%s", line);
    argv[argc++] = copy + strlen(copy);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = strcmp(word, "~") ? word : word + 1;
    argv[argc] = NULL;
    args = (struct args){0};
    common = (struct kvl_common){0};
    kvl_error_clear();
    return kvl_cmd_parse(command, argc, argv, &args, &common, &n_words, &words);
}

static void accepts(const char *line) { assert_int_equal(parse_as(&with_words, line), KVL_OK); }

static void refuses(const char *line, const char *part)
{
    assert_int_equal(parse_as(&with_words, line), KVL_E_USAGE);
    if (!strstr(kvl_error_text(), part)) fail_msg("\"%s\": the message \"%s\" lacks \"%s\"", line, kvl_error_text(), part);
}

static void test_defaults(void **state)
{
    accepts("-m a");
    assert_string_equal(args.model, "a");
    assert_null(args.note);
    assert_int_equal(args.chunks, 16);
    assert_true(args.scale == 0.5);
    assert_int_equal(args.mode, 2);
    assert_int_equal(args.kv.n, 0);
    assert_false(args.json || common.help || common.quiet);
    assert_int_equal(n_words, 0);
}

static void test_values(void **state)
{
    accepts("one --json -c -1 --model=b two --scale -1e-3 --kv x --mode p10 --kv y --quiet --plugin z.so --note ~ -- --kv -c");
    assert_true(args.json && common.quiet);
    assert_string_equal(args.model, "b");
    assert_string_equal(args.note, "");
    assert_int_equal(args.chunks, -1);
    assert_true(args.scale == -1e-3);
    assert_int_equal(args.mode, 1);
    assert_int_equal(args.kv.n, 2);
    assert_string_equal(args.kv.item[1], "y");
    assert_int_equal(common.plugins.n, 1);
    assert_int_equal(n_words, 4);
    assert_string_equal(words[0], "one");
    assert_string_equal(words[1], "two");
    assert_string_equal(words[2], "--kv");
    assert_string_equal(words[3], "-c");
    accepts("-mfile -c100 -h");
    assert_int_equal(args.chunks, 100);
    assert_true(common.help);
}

static void test_numbers_are_strict(void **state)
{
    static const char *const bad[] = {"101", "-2", "5x", "x", "1.5", "~", "0x10", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char line[64];
        snprintf(line, sizeof line, "-m a -c %s", bad[i]);
        refuses(line, "option --chunks: wanted an integer, -1 to 100, found \"");
    }
    refuses("-m a --scale nan", "option --scale: wanted a number, found \"nan\"");
    refuses("-m a --scale inf", "wanted a number");
    refuses("-m a --scale 1e999", "wanted a number");
    refuses("-m a --scale 1,5", "wanted a number");
    assert_int_equal(set_int(&options[3], &args.chunks, " 5"), KVL_E_USAGE);
}

static void test_choices(void **state)
{
    refuses("-m a --mode p", "option --mode: wanted p1|p10|p2, found \"p\"");
    refuses("-m a --mode p1|p10", "wanted p1|p10|p2");
    refuses("-m a --mode ~", "wanted p1|p10|p2");
}

static void test_refusals(void **state)
{
    refuses("", "kvlab sample needs --model FILE");
    refuses("-m", "option --model needs a value: FILE");
    refuses("-m a --mode", "option --mode needs a value: p1|p10|p2");
    refuses("-m a --json=1", "option --json takes no value");
    refuses("-m a -m b", "option --model is given twice");
    refuses("-m a --json --json", "option --json is given twice");
    refuses("-m a --chunsk 1", "did you mean --chunks?");
    refuses("-m a --nonesuch", "unknown option --nonesuch; kvlab sample --help");
    refuses("-m a --mo p1", "option --mo may mean --mod"); /* mode or model */
    refuses("-m a -x", "unknown option -x");
    assert_int_equal(parse_as(&without_words, "-m a word"), KVL_E_USAGE);
    assert_non_null(strstr(kvl_error_text(), "takes only options, found \"word\""));
}

static void test_help_needs_nothing(void **state)
{
    assert_int_equal(parse_as(&without_words, "--help word"), KVL_OK);
    assert_true(common.help);
}

static void test_list_is_bounded(void **state)
{
    char line[1024] = "-m a";
    for (int i = 0; i < 64; i++) strcat(line, " --kv x");
    accepts(line);
    assert_int_equal(args.kv.n, 64);
    strcat(line, " --kv x");
    refuses(line, "option --kv may be given at most 64 times");
}

static void test_memory_failures(void **state)
{
    for (long n = 1; n <= 4; n++) {
        kvl_mem_fail_after(n);
        assert_int_equal(parse_as(&with_words, "-m a"), KVL_E_MEMORY);
        kvl_mem_fail_after(0);
    }
}

static void test_ranges(void **state)
{
    static const struct {
        double min, max;
        const char *text;
    } cases[] = {{0, 0, ""}, {0, 1, "0 to 1"}, {1, 1e9, "1 to 1000000000"}, {0.5, 1e18, "at least 0.5"}, {-1e300, 4, "at most 4"}};
    char out[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvl_opt_range(&(struct kvl_opt){.min = cases[i].min, .max = cases[i].max}, out, sizeof out);
        assert_string_equal(out, cases[i].text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),        cmocka_unit_test(test_values),   cmocka_unit_test(test_numbers_are_strict),
        cmocka_unit_test(test_choices),         cmocka_unit_test(test_refusals), cmocka_unit_test(test_help_needs_nothing),
        cmocka_unit_test(test_list_is_bounded), cmocka_unit_test(test_ranges),   cmocka_unit_test(test_memory_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
