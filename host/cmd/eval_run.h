/* What the commands eval ppl and eval kld share: options, opening, closing, and the lines and keys of both results. */
#ifndef KVL_EVAL_RUN_H
#define KVL_EVAL_RUN_H
#include "cmd.h"
#include "eval.h"

struct eval_args {
    const char *model, *file, *kv, *base, *device, *output;
    int64_t n_ctx, chunks, first_chunk, ubatch, context, score;
    int protocol;
    bool exact, allow_long, loss, profile, no_run_file, json;
};
enum { EVAL_PPL_OPTIONS = 18, EVAL_KLD_OPTIONS = EVAL_PPL_OPTIONS + 1 }; /* the last row is --base */
extern const struct kvl_opt eval_options[EVAL_KLD_OPTIONS];

/* Runs and prints a measurement; the run file, the sessions and the rest are opened and closed around it. */
struct eval_kind {
    const char *command;
    const struct kvl_record_table *table, *binned_table; /* the second under P3 */
    kvl_status (*measure)(const struct eval_args *args, struct kvl_eval *eval, struct kvl_record *record);
};
kvl_status eval_run(const struct eval_args *args, const struct eval_kind *kind);

/* The lines that come first in both tables. */
void eval_print_windows(const struct kvl_record *record, const struct kvl_eval *eval, const struct kvl_eval_ppl *result);
/* "label value +/- se (tokens), +/- se_chunk (windows)" with `digits` decimals. */
void eval_print_errors(const char *label, double value, double se, double se_chunk, uint64_t n_chunks, int digits);
/* Mean nll by distance from the compression (P3). */
void eval_print_bins(const struct kvl_eval_ppl *result);
/* The object of --json: common keys, facts, a row a window (with its divergence from the base). */
kvl_status eval_print_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts,
                           const struct kvl_eval_ppl *result, bool with_base);

#endif
