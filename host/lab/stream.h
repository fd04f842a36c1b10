/* A text as one stream (P4): token by token through one cache, every token predicted from what the cache holds of those before it. */
#ifndef KVL_STREAM_H
#define KVL_STREAM_H
#include "eval.h"

struct kvl_stream_config {
    const struct kvl_spec *spec;
    uint32_t n_token;     /* the first tokens of the text */
    uint32_t block;       /* tokens a row of the result: at least 1 */
    bool exact, allow_long;
};

/* Tokens first .. first + n - 1 of the stream, predicted. */
struct kvl_stream_block {
    uint32_t first, n;
    double nll;              /* mean, nats */
    uint64_t resident_bytes; /* of the cache behind them */
};

struct kvl_stream_result {
    struct kvl_stream_block *block; /* [n_blocks] */
    uint32_t n_blocks, n_token;     /* tokens predicted: all but the first */
    double nll, nll_se_block;       /* mean over tokens; its error from the blocks of full size, NaN for fewer than two */
    double tokens_per_s;
};

/* Columns of a run file's rows: one a block. */
extern const struct kvl_record_table kvl_stream_table;

/* `record` gets a row a block and the summary's memory. KVL_E_INTERRUPTED after Ctrl-C: *out holds the blocks done so far. */
struct kvl_stream;
kvl_status kvl_stream_open(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_stream_config *config,
                           struct kvl_stream **out);
kvl_status kvl_stream_run(struct kvl_stream *stream, struct kvl_record *record, struct kvl_stream_result *out);
void kvl_stream_close(struct kvl_stream **stream);
void kvl_stream_free(struct kvl_stream_result *result);

#endif
