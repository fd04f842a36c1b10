/* Speed of a cache strategy: prefill of P tokens ("pp512") and decode of N tokens ("tg128"), behind d tokens of context ("@d4096"),
 * of one sequence or of several in step ("tg128x32").
 *
 * The session runs under P2: a prompt in ubatches, and a decoded token, one at a time, is sealed before it attends, which is P4.
 * A repetition starts from an empty cache: the depth is filled by prefill, then the clock runs. Every token of a decode computes
 * its logits and is waited for, as sampling would; the logits stay on the device. Tokens are random but for the seed. */
#ifndef KVL_BENCH_H
#define KVL_BENCH_H
#include "eval.h"
#include "log.h"

struct kvl_bench_test {
    uint32_t n_prompt, n_gen; /* one of them is 0 */
    uint32_t depth;
};

struct kvl_bench_config {
    const struct kvl_spec *spec;
    const struct kvl_bench_test *test; /* [n_tests] */
    size_t n_tests;
    uint32_t ubatch, repetitions, warmup;
    uint32_t n_sequence; /* sequences in step; rates count the tokens of all */
    uint64_t seed;
    bool synthetic; /* depths are reached with random keys and values (kvl_session_fill) */
    bool exact, allow_long;
    bool kernels; /* the repetitions, not warm-up and fill, run with profiling on; the record needs profile = true */
};

struct kvl_bench_result {
    char name[KVL_PHASE_BYTES];
    struct kvl_bench_test test;
    uint64_t *sample_ns; /* [n_samples] in the order they were taken */
    size_t n_samples;
    double tokens_per_s, sd;      /* of the samples' rates; sd NaN for one sample */
    struct kvl_cache_bytes bytes; /* after the last repetition */
};

/* Positions the cache is reserved for: those of the largest test. */
uint32_t kvl_bench_n_ctx(const struct kvl_bench_config *config);

/* A row a test. The samples are rows of /steps whose phase is the test's name. */
extern const struct kvl_record_table kvl_bench_table;

struct kvl_bench;
/* config and rig are borrowed. */
kvl_status kvl_bench_open(const struct kvl_rig *rig, const struct kvl_bench_config *config, struct kvl_bench **out);
void kvl_bench_close(struct kvl_bench **bench);

/* Test number `index`; the first of the largest ones also records /memory. Blocks. KVL_E_INTERRUPTED after Ctrl-C.
 * Free result->sample_ns with kvl_free. */
kvl_status kvl_bench_run(struct kvl_bench *bench, size_t index, struct kvl_record *record, struct kvl_bench_result *result);

#endif
