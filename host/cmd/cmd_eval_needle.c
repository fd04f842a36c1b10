/* kvlab eval needle: whether a pass key in a long text is found after a compression. */
#include "eval_run.h"
#include "eval_tasks.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct args {
    struct eval_args eval;
    const char *length, *depth;
    int64_t seeds, seed;
    int question;
};
#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    EVAL_OPTIONS_CACHE,
    EVAL_OPTION_BASE,
    {.name = "question", .type = KVL_OPT_CHOICE, .offset = AT(question), .required = true,
     .help = "seen by the compression, at the end of what it gets, or not: it comes after. Results of the two are not comparable", .choices = "seen|unseen"},
    {.name = "length", .type = KVL_OPT_TEXT, .offset = AT(length), .metavar = "LIST", .help = "tokens that are compressed", .fallback = "512,1024"},
    {.name = "depth", .type = KVL_OPT_TEXT, .offset = AT(depth), .metavar = "LIST",
     .help = "where among them the key stands: 0 at the beginning, 1 at the end", .fallback = "0,0.25,0.5,0.75,1"},
    {.name = "seeds", .type = KVL_OPT_INT, .offset = AT(seeds), .metavar = "N", .help = "sequences of each length and depth", .fallback = "20", .min = 1, .max = 1e6},
    {.name = "seed", .type = KVL_OPT_INT, .offset = AT(seed), .metavar = "N", .help = "seed of the first sequence", .fallback = "0", .min = 0, .max = 1e15},
    EVAL_OPTION_LOSS,
    EVAL_OPTIONS_RUN,
};
/* clang-format on */
enum { SHORTEST = 64 };

struct grid {
    struct kvl_numbers_given length, depth;
    uint32_t length_tokens[64];
};

static struct kvl_needle_config config_of(const struct args *args, const struct grid *grid)
{
    return (struct kvl_needle_config){.length = grid->length_tokens, .depth = grid->depth.value, .n_length = grid->length.n, .n_depth = grid->depth.n,
                                      .seeds = (uint32_t)args->seeds, .seed = (uint64_t)args->seed, .question_seen = args->question == 0};
}

static kvl_status make_grid(const struct args *args, struct grid *grid)
{
    kvl_status status = KVL_OK;
    *grid = (struct grid){0};
    KVL_TRY(kvl_opt_numbers("--length", args->length, SHORTEST, 1 << 24, true, &grid->length));
    KVL_TRY(kvl_opt_numbers("--depth", args->depth, 0, 1, false, &grid->depth));
    for (size_t i = 0; i < grid->length.n; i++) grid->length_tokens[i] = (uint32_t)grid->length.value[i];
done:
    return status;
}

static void print_cells(const struct kvl_record *record, const struct kvl_needle_config *c, const struct kvl_needle_cell *cell)
{
    kvl_record_print(record);
    printf("sequences %u of each length and depth; the question is %s by the compression\n\n", c->seeds, c->question_seen ? "seen" : "not seen");
    printf("| length | depth | exact | exact, base |    nll | nll, base |\n| -----: | ----: | ----: | ----------: | -----: | --------: |\n");
    for (size_t i = 0; i < c->n_length * c->n_depth; i++) {
        printf("| %6u | %5.3g | ", cell[i].length, cell[i].depth);
        if (cell[i].scored) printf("%5.2f", cell[i].exact);
        else printf(" none");
        printf(" | %11.2f | %6.4f | %9.4f |\n", cell[i].exact_base, cell[i].nll, cell[i].nll_base);
    }
    printf("\nnone: not scored, because the base cache answers fewer than %.0f %% of the sequences\n", 100.0 * KVL_NEEDLE_ENOUGH);
}

static kvl_status print_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts, const struct kvl_needle_config *c,
                             const struct kvl_needle_cell *cell)
{
    kvl_status status = KVL_OK;
    cJSON *object = NULL;
    KVL_TRY(eval_json(record, facts, n_facts, &object));
    cJSON_AddStringToObject(object, "question", c->question_seen ? "seen" : "unseen");
    cJSON *cells = cJSON_AddArrayToObject(object, "cells");
    for (size_t i = 0; i < c->n_length * c->n_depth; i++) {
        const struct kvl_fact all[] = {{"length", cell[i].length},         {"depth", cell[i].depth}, {"exact", cell[i].scored ? cell[i].exact : NAN},
                                       {"exact_base", cell[i].exact_base}, {"nll", cell[i].nll},     {"nll_base", cell[i].nll_base},
                                       {"n", c->seeds}};
        KVL_TRY(eval_json_row(cells, all, sizeof all / sizeof *all));
    }
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}

static kvl_status measure(const struct eval_args *eval_args, struct kvl_eval *eval, struct kvl_record *record)
{
    kvl_status status = KVL_OK;
    const struct args *args = (const struct args *)eval_args;
    struct grid grid;
    struct kvl_needle_cell *cell = NULL;
    KVL_TRY(make_grid(args, &grid));
    const struct kvl_needle_config config = config_of(args, &grid);
    const size_t n = config.n_length * config.n_depth;
    double exact = 0.0, nll = 0.0, nll_base = 0.0, scored = 0.0;
    KVL_TRY(kvl_alloc(&cell, n, sizeof *cell));
    KVL_TRY(kvl_eval_needle(eval, &config, record, cell));
    for (size_t i = 0; i < n; i++) {
        if (!cell[i].scored) continue;
        scored += 1.0;
        exact += cell[i].exact;
        nll += cell[i].nll;
        nll_base += cell[i].nll_base;
    }
    const double share = scored > 0.0 ? exact / scored : NAN;
    const struct kvl_fact facts[] = {{"needle_exact", share},
                                     {"needle_exact_se", sqrt(share * (1.0 - share) / (scored * config.seeds))},
                                     {"needle_nll", scored > 0.0 ? nll / scored : NAN},
                                     {"needle_nll_base", scored > 0.0 ? nll_base / scored : NAN},
                                     {"n_cells", (double)n, true},
                                     {"n_cells_scored", scored, true}};
    KVL_TRY(kvl_record_summary(record, facts, sizeof facts / sizeof *facts));
    if (args->eval.json) KVL_TRY(print_json(record, facts, sizeof facts / sizeof *facts, &config, cell));
    else print_cells(record, &config, cell);
done:
    kvl_free(&cell);
    return status;
}

static kvl_status run(void *given, size_t n_words, char *const *words)
{
    kvl_status status = KVL_OK;
    const struct args *args = given;
    struct grid grid;
    const struct kvl_fact settings[] = {{"seeds", (double)args->seeds, true}, {"seed", (double)args->seed, true}};
    const struct kvl_word lists[] = {{"question", args->question == 0 ? "seen" : "unseen"}, {"length", args->length}, {"depth", args->depth}};
    uint32_t longest = 0;
    KVL_TRY(make_grid(args, &grid));
    for (size_t i = 0; i < grid.length.n; i++) longest = grid.length_tokens[i] > longest ? grid.length_tokens[i] : longest;
    const struct eval_kind kind = {.command = "eval needle", .table = &kvl_needle_table, .measure = measure, .settings = settings,
                                   .n_settings = sizeof settings / sizeof *settings, .words = lists, .n_words = sizeof lists / sizeof *lists};
    const struct kvl_eval_config windows = {.n_ctx = longest + KVL_NEEDLE_TEXT, .context = longest, .chunks = 1, .protocol = KVL_P3_PREFILL_EXACT};
    KVL_TRY(eval_run(&args->eval, &kind, &windows));
done:
    return status;
}

const struct kvl_command kvl_cmd_eval_needle = {
    .name = "eval needle",
    .summary = "whether a pass key in a text is still found after a compression",
    .details =
        "A sentence with five digits stands at a depth of text from FILE, all of it is compressed, and the digits are asked for. exact: greedy decoding\n"
        "gives all five; nll: mean of the digits. A cell is scored only if the base cache, which has lost nothing, answers 90 % of its sequences.\n"
        "\n"
        "  kvlab eval needle -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --question unseen --kv snapkv",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
