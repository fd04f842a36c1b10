/* kvlab tokenize: the token ids of a text file. Needs the model's vocabulary only, no device. */
#include "cmd.h"
#include "file.h"
#include "gguf.h"
#include "mem.h"
#include "tokenizer.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

struct args {
    const char *model, *file;
    bool count, special, bos, json;
};

static const struct kvl_opt options[] = {
    KVL_OPTION_MODEL(struct args),
    KVL_OPTION_FILE(struct args),
    {.name = "count", .type = KVL_OPT_FLAG, .offset = offsetof(struct args, count), .help = "print only the number of tokens"},
    {.name = "special",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct args, special),
     .help = "control tokens written in the text (\"<|im_end|>\") become their ids"},
    {.name = "bos",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct args, bos),
     .help = "put the BOS token in front if the model wants one, as eval and generate do"},
    KVL_OPTION_JSON(struct args),
};

static void print_json(const struct kvl_tokenizer *t, const int32_t *ids, size_t n, bool count)
{
    printf("{\"n_tokens\": %zu, \"tokenizer_sha256\": \"%s\"", n, kvl_tokenizer_sha256(t));
    if (!count) {
        printf(", \"ids\": [");
        for (size_t i = 0; i < n; i++) printf("%s%d", i == 0 ? "" : ", ", ids[i]);
        printf("]");
    }
    printf("}\n");
}

static void print_lines(const int32_t *ids, size_t n, bool count)
{
    if (count) printf("%zu\n", n);
    for (size_t i = 0; i < n && !count; i++) printf("%d\n", ids[i]);
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    const struct args *args = arguments;
    kvl_status status = KVL_OK;
    struct kvl_gguf *gguf = NULL;
    struct kvl_tokenizer *tokenizer = NULL;
    char *text = NULL;
    int32_t *ids = NULL;
    size_t size, n;
    KVL_TRY(kvl_file_read(args->file, &text, &size));
    if (size == 0) KVL_TRY(kvl_fail(KVL_E_USAGE, "%s is empty: nothing to tokenize", args->file));
    KVL_TRY(kvl_gguf_open(args->model, &gguf));
    KVL_TRY(kvl_tokenizer_new(gguf, &tokenizer));
    KVL_TRY((args->bos ? kvl_tokenizer_encode_stream : kvl_tokenizer_encode)(tokenizer, text, size, args->special, &ids, &n));
    if (args->json)
        print_json(tokenizer, ids, n, args->count);
    else
        print_lines(ids, n, args->count);
    if (fflush(stdout) != 0 || ferror(stdout)) status = kvl_fail(KVL_E_IO, "cannot write the ids to stdout: %s", strerror(errno));
done:
    kvl_free(&ids);
    kvl_free(&text);
    kvl_tokenizer_free(&tokenizer);
    kvl_gguf_close(&gguf);
    return status;
}

const struct kvl_command kvl_cmd_tokenize = {
    .name = "tokenize",
    .summary = "print the token ids of a text, one a line",
    .details = "The file is read as bytes. An invalid UTF-8 byte is kept as it is.\n"
               "\n"
               "  kvlab tokenize -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --count",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
