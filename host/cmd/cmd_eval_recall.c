/* kvlab eval recall: whether a span that comes again behind the compression is still recognized. */
#include "eval_run.h"
#include "eval_tasks.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct args {
    struct eval_args eval;
    const char *depth, *gap;
    int64_t span, seeds, seed;
};
#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    EVAL_OPTIONS_CACHE,
    EVAL_OPTION_BASE,
    EVAL_OPTION_CONTEXT("tokens that are prefilled, then compressed"),
    {.name = "depth", .type = KVL_OPT_TEXT, .offset = AT(depth), .metavar = "LIST",
     .help = "where in the context the span stands: 0 its beginning, 1 its end", .fallback = "0,0.5,1"},
    {.name = "gap", .type = KVL_OPT_TEXT, .offset = AT(gap), .metavar = "LIST",
     .help = "tokens of the text between the compression and the repeat", .fallback = "0"},
    {.name = "span", .type = KVL_OPT_INT, .offset = AT(span), .metavar = "N", .help = "tokens that come again", .fallback = "64", .min = 2, .max = 1 << 16},
    {.name = "seeds", .type = KVL_OPT_INT, .offset = AT(seeds), .metavar = "N", .help = "sequences of each depth and gap", .fallback = "50", .min = 1, .max = 1e6},
    {.name = "seed", .type = KVL_OPT_INT, .offset = AT(seed), .metavar = "N", .help = "seed of the first sequence", .fallback = "0", .min = 0, .max = 1e15},
    EVAL_OPTION_LOSS,
    EVAL_OPTIONS_RUN,
};
/* clang-format on */

/* What the run measures: the grid, made of the arguments' lists. */
struct grid {
    struct kvl_numbers_given depth, gap;
    uint32_t gap_tokens[64];
};

static struct kvl_recall_config config_of(const struct args *args, const struct grid *grid)
{
    return (struct kvl_recall_config){.context = (uint32_t)args->eval.context, .span = (uint32_t)args->span, .seeds = (uint32_t)args->seeds,
                                      .seed = (uint64_t)args->seed, .depth = grid->depth.value, .gap = grid->gap_tokens, .n_depth = grid->depth.n,
                                      .n_gap = grid->gap.n};
}

static kvl_status make_grid(const struct args *args, struct grid *grid)
{
    kvl_status status = KVL_OK;
    *grid = (struct grid){0};
    KVL_TRY(kvl_opt_numbers("--depth", args->depth, 0, 1, false, &grid->depth));
    KVL_TRY(kvl_opt_numbers("--gap", args->gap, 0, 1 << 24, true, &grid->gap));
    for (size_t i = 0; i < grid->gap.n; i++) grid->gap_tokens[i] = (uint32_t)grid->gap.value[i];
done:
    return status;
}

static void print_cells(const struct kvl_record *record, const struct kvl_recall_config *c, const struct kvl_recall_cell *cell)
{
    kvl_record_print(record);
    printf("sequences %u of each depth and gap: %u tokens compressed, a span of %u that comes again\n\n", c->seeds, c->context, c->span);
    printf("| depth |   gap | nll first |  gain | gain, base |            kept |\n| ----: | ----: | --------: | ----: | ---------: | --------------: |\n");
    for (size_t i = 0; i < c->n_depth * c->n_gap; i++) {
        printf("| %5.3g | %5u | %9.4f | %5.3f | %10.3f | ", cell[i].depth, cell[i].gap, cell[i].nll_first, cell[i].gain, cell[i].gain_base);
        if (cell[i].scored) printf("%5.3f +/- %.3f |\n", cell[i].kept, cell[i].kept_se);
        else puts("base has none   |");
    }
}

static kvl_status print_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts, const struct kvl_recall_config *c,
                             const struct kvl_recall_cell *cell)
{
    kvl_status status = KVL_OK;
    cJSON *object = NULL;
    KVL_TRY(eval_json(record, facts, n_facts, &object));
    cJSON *cells = cJSON_AddArrayToObject(object, "cells");
    for (size_t i = 0; i < c->n_depth * c->n_gap; i++) {
        const struct kvl_fact all[] = {{"depth", cell[i].depth},         {"gap", cell[i].gap},   {"nll_first", cell[i].nll_first}, {"gain", cell[i].gain},
                                       {"gain_base", cell[i].gain_base}, {"kept", cell[i].kept}, {"kept_se", cell[i].kept_se},     {"n", c->seeds}};
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
    struct kvl_recall_cell *cell = NULL;
    KVL_TRY(make_grid(args, &grid));
    const struct kvl_recall_config config = config_of(args, &grid);
    const size_t n = config.n_depth * config.n_gap;
    double gain = 0.0, base = 0.0, error2 = 0.0, scored = 0.0;
    KVL_TRY(kvl_alloc(&cell, n, sizeof *cell));
    KVL_TRY(kvl_eval_recall(eval, &config, record, cell));
    for (size_t i = 0; i < n; i++) {
        scored += cell[i].scored;
        gain += cell[i].scored ? cell[i].gain : 0.0;
        base += cell[i].scored ? cell[i].gain_base : 0.0;
        error2 += cell[i].scored ? pow(cell[i].kept_se * cell[i].gain_base, 2.0) : 0.0;
    }
    const struct kvl_fact facts[] = {{"recall_kept", scored > 0.0 ? gain / base : NAN}, {"recall_kept_se", scored > 0.0 ? sqrt(error2) / base : NAN}, {"n_cells", (double)n, true}, {"n_cells_scored", scored, true}};
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
    const struct kvl_fact settings[] = {{"span", (double)args->span, true}, {"seeds", (double)args->seeds, true}, {"seed", (double)args->seed, true}};
    const struct kvl_word lists[] = {{"depth", args->depth}, {"gap", args->gap}};
    uint32_t longest = 0;
    KVL_TRY(make_grid(args, &grid));
    for (size_t i = 0; i < grid.gap.n; i++) longest = grid.gap_tokens[i] > longest ? grid.gap_tokens[i] : longest;
    const struct eval_kind kind = {.command = "eval recall", .table = &kvl_recall_table, .measure = measure, .settings = settings,
                                   .n_settings = sizeof settings / sizeof *settings, .words = lists, .n_words = sizeof lists / sizeof *lists};
    const struct kvl_eval_config windows = {.n_ctx = (uint32_t)(args->eval.context + args->span) + longest, .context = (uint32_t)args->eval.context,
                                            .early = (uint32_t)args->span - 1, .chunks = 1, .protocol = KVL_P3_PREFILL_EXACT};
    KVL_TRY(eval_run(&args->eval, &kind, &windows));
done:
    return status;
}

const struct kvl_command kvl_cmd_eval_recall = {
    .name = "eval recall",
    .summary = "whether a span that comes again after a compression is still recognized",
    .details =
        "A sequence is text with a span of other text at a depth of the context; the context is compressed; then come `gap` more tokens and the\n"
        "span again. gain = nll of the span's tokens at first - nll when they come again; kept = the strategy's gain as a share of the base's, which\n"
        "has lost nothing. Cells in which the base gains nothing say so. Works with small models, because repeating is what they learn first.\n"
        "\n"
        "  kvlab eval recall -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --kv snapkv --depth 0,0.5,0.9",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
