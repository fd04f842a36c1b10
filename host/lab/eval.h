/* Quality of a cache strategy on a text, window by window (the protocol of llama-perplexity).
 *
 * The text's tokens are cut into consecutive windows of n_ctx tokens; positions restart at 0 in each; a short last window is
 * dropped. If the model wants a BOS, the stream starts with one and the first token of every window is replaced by it. The logits
 * at i = n_ctx/2 .. n_ctx-2 predict token i+1, so the second half of a window is scored with at least n_ctx/2 tokens of context.
 * Under P3 (compress-then-score) a window is `context` tokens, which are prefilled and then compressed, and the tokens behind them, all of which
 * are scored; the first is predicted by the prefill itself, so it is the same for every strategy. */
#ifndef KVL_EVAL_H
#define KVL_EVAL_H
#include "base_logits.h"
#include "logprob.h"
#include "runrecord.h"
#include "session.h"
#include "stats.h"

/* ---- what a run works with: device, model, weights, text ---- */

struct kvl_rig {
    struct kvl_device *device;
    struct kvl_model *model;
    struct kvl_weights *weights;
};
kvl_status kvl_rig_open(const char *model_path, const char *device, struct kvl_rig *out);
void kvl_rig_close(struct kvl_rig *rig);

struct kvl_eval_text {
    int32_t *tokens; /* BOS first if the model wants one */
    size_t n;
    const char *path; /* borrowed */
    char sha256[65];
};
kvl_status kvl_eval_text_read(const struct kvl_model *model, const char *path, struct kvl_eval_text *out);
void kvl_eval_text_free(struct kvl_eval_text *text);

/* ---- windows ---- */

enum { KVL_EVAL_MIN_CTX = 8 };

/* Scored tokens by their distance from the compression: bin i holds the from-th to the to-th of them (P3). */
enum { KVL_EVAL_BINS = 3 };
struct kvl_eval_bin {
    const char *nll, *kld, *same_top1; /* names of its means: "nll_1_16" */
    uint32_t from, to;
};
extern const struct kvl_eval_bin kvl_eval_bins[KVL_EVAL_BINS];
struct kvl_eval_binned { /* means by distance: NaN where there is none, and the last two without a base */
    double nll[KVL_EVAL_BINS], kld[KVL_EVAL_BINS], same_top1[KVL_EVAL_BINS];
};

struct kvl_eval_config {
    const struct kvl_spec *spec, *base; /* base: NULL, or the cache that `spec` is compared with */
    uint32_t n_ctx, ubatch;             /* ubatch: 1 under P4 whatever is asked */
    uint32_t context;                   /* P3: tokens of a window that are prefilled and compressed; the rest is scored */
    uint64_t first_chunk, chunks;       /* chunks 0 = all from first_chunk on */
    enum kvl_protocol protocol;
    uint32_t keep_logits;               /* scored tokens of the first window whose logits go into the run file */
    uint32_t early;                     /* P3: most tokens of a context that are scored before the compression (kvl_eval_layout) */
    const char *base_logits;            /* borrowed; folder in which the base's logits are kept for later runs (base_logits.h); NULL: none */
    bool measure_loss;                  /* P3: what evictions cost the scored tokens, into the run file */
    bool exact, allow_long;
};

/* How a sequence of tokens is run. Token t is scored by the logits after token t - 1. */
struct kvl_eval_layout {
    uint32_t n_ctx;                  /* its tokens; at most the config's */
    uint32_t context;                /* P3: those that are prefilled, then compressed; else 0 */
    uint32_t first_early, n_early;   /* P3: tokens of the context that are scored on the way; with any, first_early > 0 and first_scored > context */
    uint32_t first_scored, n_scored; /* tokens that are scored */
};

enum kvl_eval_role { KVL_EVAL_SPEC, KVL_EVAL_BASE, KVL_EVAL_ROLES };

struct kvl_eval {
    const struct kvl_rig *rig;
    const struct kvl_eval_text *text;
    struct kvl_eval_config config; /* chunks resolved, ubatch as used */
    struct kvl_session *session[KVL_EVAL_ROLES];
    struct kvl_base_logits *kept;                   /* NULL without config.base_logits */
    struct kvl_logprob *logprob;
    struct kvl_eval_layout layout;                  /* of a window of the text */
    int32_t *window;                                /* [n_ctx] the tokens of the window at work */
    struct kvl_row_score *score[KVL_EVAL_ROLES];    /* [n_scored] of the last window */
    float *kld;                                     /* [n_scored] of the last window, with a base */
    struct kvl_row_score *early;                    /* [config.early] the same before the compression, so for every cache alike */
    float *logits;                                  /* [config.keep_logits][n_vocab] of the first scored tokens, `spec`'s */
    uint32_t n_logits;                              /* of them there so far */
    uint64_t n_forward;                             /* tokens of the windows done */
    uint64_t forward_ns[KVL_EVAL_ROLES], n_timed[KVL_EVAL_ROLES]; /* time in the forward passes, tokens through them: none where base logits were read */
};

/* Refuses texts, windows and protocols that would measure nothing; the message says what to change. Resolves chunks and ubatch. */
kvl_status kvl_eval_check(const struct kvl_rig *rig, const struct kvl_eval_text *text, struct kvl_eval_config *config);

kvl_status kvl_eval_open(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_eval_config *config,
                         struct kvl_eval **out);
void kvl_eval_close(struct kvl_eval **eval);

/* Runs window `chunk` through all sessions and fills score and kld. Blocks. KVL_E_INTERRUPTED after Ctrl-C. */
kvl_status kvl_eval_window(struct kvl_eval *eval, uint64_t chunk, struct kvl_record *record);
/* The same for tokens that the caller has put into eval->window. KVL_E_INTERRUPTED without a message. */
kvl_status kvl_eval_run(struct kvl_eval *eval, const struct kvl_eval_layout *layout, struct kvl_record *record);

/* Mean of n tokens' nll. */
double kvl_eval_mean_nll(const struct kvl_row_score *score, size_t n);
/* Of the forward passes; NaN if there were none. */
double kvl_eval_tokens_per_s(const struct kvl_eval *eval, enum kvl_eval_role role);

/* ---- results; every nll is a mean in nats a token, every fraction a fraction ---- */

struct kvl_eval_chunk {
    uint64_t chunk;
    uint32_t n;
    double nll, nll_base, kld, same_top1; /* the last three: eval kld only */
    struct kvl_eval_binned bin;           /* P3 */
};

struct kvl_eval_ppl {
    struct kvl_eval_chunk *chunk; /* [n_chunks] */
    uint64_t n_chunks, n_tokens;
    double nll, ppl, ppl_se, ppl_se_chunk; /* se: over tokens; se_chunk: over windows, NaN for one window */
    double tokens_per_s;                   /* forward pass of a window */
    struct kvl_eval_binned bin;            /* P3 */
};
/* `record` gets a row a window in its table (`binned` under P3), and the summary. On an error *out holds the windows done so far. */
extern const struct kvl_record_table kvl_eval_ppl_table, kvl_eval_ppl_binned_table;
kvl_status kvl_eval_ppl(struct kvl_eval *eval, struct kvl_record *record, struct kvl_eval_ppl *out);
void kvl_eval_ppl_free(struct kvl_eval_ppl *result);

struct kvl_eval_kld {
    struct kvl_eval_ppl spec;
    double nll_base, ppl_base, base_tokens_per_s;
    double ppl_ratio, ppl_ratio_se; /* exp(mean of nll - nll_base) and its error over tokens, which is the paired one */
    double kld_mean, kld_se, kld_se_chunk;
    double kld_max, kld_p999, kld_p99, kld_p95, kld_p90, kld_median, kld_p10, kld_p5, kld_p1;
    double same_top1, same_top1_se;
    double rms_dp; /* root mean square of p(correct token) - p_base(correct token) */
};
extern const struct kvl_record_table kvl_eval_kld_table, kvl_eval_kld_binned_table;
kvl_status kvl_eval_kld(struct kvl_eval *eval, struct kvl_record *record, struct kvl_eval_kld *out);
void kvl_eval_kld_free(struct kvl_eval_kld *result);

/* The bins of the last window, under P3. */
void kvl_eval_bin_window(const struct kvl_eval *eval, struct kvl_eval_chunk *out);
/* The bins' cells behind a row's other cells, none unless P3: those of nll, and with a base of kld and same_top1. */
void kvl_eval_bin_cells(const struct kvl_eval *eval, const struct kvl_eval_chunk *chunk, union kvl_cell *cells);
/* Those that are defined as facts; their number, at most KVL_EVAL_BIN_FACTS. */
enum { KVL_EVAL_BIN_FACTS = 3 * KVL_EVAL_BINS };
size_t kvl_eval_bin_facts(const struct kvl_eval_binned *bin, struct kvl_fact *facts);
/* Means of the bins over windows of equal size. */
void kvl_eval_bin_means(struct kvl_eval_ppl *result);

/* The results as the named numbers of the run file and of --json. `facts` has room for KVL_EVAL_FACTS. Return their number. */
enum { KVL_EVAL_FACTS = 48 };
size_t kvl_eval_ppl_facts(const struct kvl_eval_ppl *result, struct kvl_fact *facts);
size_t kvl_eval_kld_facts(const struct kvl_eval_kld *result, struct kvl_fact *facts);

#endif
