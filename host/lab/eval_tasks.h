/* Evaluations on sequences of tokens made for them. Each is compress-then-score (P3) of two caches side by side, the strategy and its base,
 * which is the full cache unless the user says otherwise. Every row of the table is one sequence. */
#ifndef KVL_EVAL_TASKS_H
#define KVL_EVAL_TASKS_H
#include "eval.h"

enum { KVL_TASK_MOST_CELLS = 4096 };

/* ---- recall: a span of the text comes again behind the compression ---- */

struct kvl_recall_config {
    uint32_t context, span, seeds; /* tokens that are compressed; of the span, at least 2; sequences a cell */
    uint64_t seed;                 /* of the first sequence; the others follow */
    const double *depth;           /* [n_depth] where the span stands in the context: 0 its beginning, 1 its end */
    const uint32_t *gap;           /* [n_gap] tokens of the text between the compression and the repeat */
    size_t n_depth, n_gap;
};
struct kvl_recall_cell {
    double depth;
    uint32_t gap;
    bool scored;            /* the full cache recalls: the 95 % interval of its gain lies above 0 */
    double nll_first;       /* mean nll of the span's tokens but its first one, when it comes first; nats */
    double gain, gain_base; /* nll_first - nll of the same tokens when they come again */
    double kept, kept_se;   /* gain / gain_base, and its error over sequences, which are paired; NaN if not scored */
};
extern const struct kvl_record_table kvl_recall_table;
/* cell [n_depth * n_gap], gaps innermost. The eval's context is config->context, n_ctx context + largest gap + span, early at least span - 1. */
kvl_status kvl_eval_recall(struct kvl_eval *eval, const struct kvl_recall_config *config, struct kvl_record *record, struct kvl_recall_cell *cell);

/* ---- needle: a number in the text is asked for ---- */

struct kvl_needle_config {
    const uint32_t *length;  /* [n_length] tokens that are compressed */
    const double *depth;     /* [n_depth] where the needle stands among them */
    size_t n_length, n_depth;
    uint32_t seeds;
    uint64_t seed;
    bool question_seen;      /* by the compression: it stands at the end of these tokens (but its last one) or follows them */
};
enum { KVL_NEEDLE_TEXT = 64 }; /* tokens behind the compression at most */
struct kvl_needle_cell {
    uint32_t length;
    double depth;
    bool scored;              /* the full cache answers at least KVL_NEEDLE_ENOUGH of the sequences */
    double exact, exact_base; /* share of sequences whose answer is right when decoded greedily */
    double nll, nll_base;     /* mean of the answer's tokens, nats */
};
#define KVL_NEEDLE_ENOUGH 0.9
extern const struct kvl_record_table kvl_needle_table;
/* cell [n_length * n_depth], depths innermost. The eval's n_ctx is the largest length + KVL_NEEDLE_TEXT. */
kvl_status kvl_eval_needle(struct kvl_eval *eval, const struct kvl_needle_config *config, struct kvl_record *record, struct kvl_needle_cell *cell);

/* ---- continuation: what the base would go on with ---- */

struct kvl_continuation {
    uint64_t n_chunks, n_diverged;      /* windows; of them those that leave the base's way within the tokens looked at */
    uint32_t n_tokens, first_median;    /* tokens looked at; tokens in common before the first other one, median: n_tokens = that many or more */
    double same_top1, same_top1_se;     /* fed with the base's tokens: share of equal top tokens, error over windows (NaN for one) */
    double kld, kld_se;                 /* mean divergence of these predictions */
};
extern const struct kvl_record_table kvl_continuation_table;
/* Windows of the text as the eval has them: its context, and in place of what the text goes on with the base's greedy continuation. */
kvl_status kvl_eval_continuation(struct kvl_eval *eval, struct kvl_record *record, struct kvl_continuation *out);

#endif
