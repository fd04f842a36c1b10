/* A run to step through: what a cache holds of each token, in every layer and head, behind every step, and what attention the newest query pays.
 * Page and script are in trace/. */
#ifndef KVL_TRACE_H
#define KVL_TRACE_H
#include "eval.h"

/* A page of more tokens cannot be read, and its numbers grow with their square. */
enum { KVL_TRACE_MOST_TOKENS = 512 };

struct kvl_trace_config {
    const struct kvl_spec *spec;
    const char *kv; /* as given */
    const int32_t *prompt;
    uint32_t n_prompt, n_steps; /* n_steps: the most likely tokens that are generated behind it, and taken in */
    bool exact, allow_long;
};

/* Runs twice: with the cache asked for (P2, then a token at a time), and the same tokens without compression for the attention. Writes the page;
 * whoever reads `path` meanwhile sees the old one. KVL_E_INTERRUPTED with a message after Ctrl-C. */
kvl_status kvl_trace_write(const struct kvl_rig *rig, const struct kvl_trace_config *config, const char *path);

#endif
