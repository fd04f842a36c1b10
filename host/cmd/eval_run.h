/* What the eval commands share: options, opening, closing, and the lines and keys of results. */
#ifndef KVL_EVAL_RUN_H
#define KVL_EVAL_RUN_H
#include "cmd.h"
#include "eval.h"

/* Begins the argument struct of each of them. */
struct eval_args {
    const char *model, *file, *kv, *base, *base_logits, *device, *output;
    int64_t n_ctx, chunks, first_chunk, ubatch, context, score, logits;
    int protocol;
    bool exact, allow_long, loss, layer_errors, profile, no_run_file, json;
};

/* clang-format off */
#define EVAL_AT(member) offsetof(struct eval_args, member)
/* Option rows that come first, that name the base, and that come last. */
#define EVAL_OPTIONS_CACHE                                                                                                           \
    KVL_OPTION_MODEL(struct eval_args),                                                                                              \
    KVL_OPTION_FILE(struct eval_args),                                                                                               \
    {.name = "kv", .type = KVL_OPT_TEXT, .offset = EVAL_AT(kv), .metavar = "SPEC", .help = "cache strategy", .fallback = "f16"}
#define EVAL_OPTION_BASE                                                                                                             \
    {.name = "base", .type = KVL_OPT_TEXT, .offset = EVAL_AT(base), .metavar = "SPEC", .help = "cache to compare with", .fallback = "f16"}
#define EVAL_OPTION_CONTEXT(help_)                                                                                                   \
    {.name = "context", .type = KVL_OPT_INT, .offset = EVAL_AT(context), .metavar = "N", .help = help_, .fallback = "1024", .min = 1, .max = 1 << 24}
#define EVAL_OPTIONS_CHUNKS                                                                                                          \
    {.name = "chunks", .type = KVL_OPT_INT, .offset = EVAL_AT(chunks), .metavar = "N", .help = "windows to run, 0 = all", .fallback = "0",    \
     .min = 0, .max = 1e9},                                                                                                          \
    {.name = "first-chunk", .type = KVL_OPT_INT, .offset = EVAL_AT(first_chunk), .metavar = "I", .help = "window to start with",            \
     .fallback = "0", .min = 0, .max = 1e9}
#define EVAL_OPTION_LOSS                                                                                                             \
    {.name = "loss", .type = KVL_OPT_FLAG, .offset = EVAL_AT(loss),                                                                  \
     .help = "p3: what each eviction costs the scored tokens in attention mass and in the attention's output, into the run file (slow)"}
#define EVAL_OPTIONS_RUN                                                                                                             \
    {.name = "ubatch", .type = KVL_OPT_INT, .offset = EVAL_AT(ubatch), .metavar = "N", .help = "tokens appended at once (p4: always 1)",     \
     .fallback = "512", .min = 1, .max = 1 << 20},                                                                                   \
    KVL_OPTION_EXACT(struct eval_args),                                                                                              \
    {.name = "allow-long", .type = KVL_OPT_FLAG, .offset = EVAL_AT(allow_long), .help = "allow windows longer than the trained context"},   \
    KVL_OPTION_DEVICE(struct eval_args),                                                                                             \
    KVL_OPTION_OUTPUT(struct eval_args),                                                                                             \
    {.name = "no-run-file", .type = KVL_OPT_FLAG, .offset = EVAL_AT(no_run_file), .help = "keep no run file"},                       \
    {.name = "profile", .type = KVL_OPT_FLAG, .offset = EVAL_AT(profile), .help = "time every kernel into the run file (slower)"},   \
    KVL_OPTION_JSON(struct eval_args)
/* clang-format on */

/* Those of eval ppl and eval kld. */
enum { EVAL_PPL_OPTIONS = 20, EVAL_KLD_OPTIONS = EVAL_PPL_OPTIONS + 2 }; /* the last rows are about the base */
extern const struct kvl_opt eval_options[EVAL_KLD_OPTIONS];

/* Runs and prints a measurement; the run file, the sessions and the rest are opened and closed around it. */
struct eval_kind {
    const char *command;
    const struct kvl_record_table *table, *binned_table; /* the second under P3, if there is one */
    kvl_status (*measure)(const struct eval_args *args, struct kvl_eval *eval, struct kvl_record *record);
    const struct kvl_fact *settings; /* the command's own numbers; NULL: those of windows of a text */
    size_t n_settings;
    const struct kvl_word *words; /* and texts */
    size_t n_words;
};
/* config: windows, context and protocol; what args say beyond that is filled in. */
kvl_status eval_run(const struct eval_args *args, const struct eval_kind *kind, const struct kvl_eval_config *config);
/* Windows, context and protocol of eval ppl and eval kld. */
struct kvl_eval_config eval_windows(const struct eval_args *args);

/* The lines that come first in both tables. */
void eval_print_windows(const struct kvl_record *record, const struct kvl_eval *eval, const struct kvl_eval_ppl *result);
/* "label value +/- se (tokens), +/- se_chunk (windows)" with `digits` decimals; NaN: without that error. */
void eval_print_errors(const char *label, double value, double se, double se_chunk, uint64_t n_chunks, int digits);
/* Mean nll by distance from the compression (P3). */
void eval_print_bins(const struct kvl_eval_ppl *result);
/* The common keys and facts of --json. Free with cJSON_Delete. */
kvl_status eval_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts, cJSON **out);
/* Adds an object of facts to an array. */
kvl_status eval_json_row(cJSON *array, const struct kvl_fact *facts, size_t n);
/* The object of --json: these, and a row a window (with its divergence from the base). */
kvl_status eval_print_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts,
                           const struct kvl_eval_ppl *result, bool with_base);

#endif
