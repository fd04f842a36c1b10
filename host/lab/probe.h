/* Small problems with known inputs, for checking a device and for timing its kernels: a cache of one layer, and random weights. */
#ifndef KVL_PROBE_H
#define KVL_PROBE_H
#include "cache.h"
#include "device.h"
#include "quant.h"

/* A cache of one layer and random rows for it. Set dims (n_layer 1), n_tokens, ubatch, protocol, exact; then open. */
struct kvl_probe {
    struct kvl_cache_dims dims;
    uint32_t n_tokens, ubatch;
    enum kvl_protocol protocol;
    bool exact;
    struct kvl_spec *spec;
    struct kvl_cache_plan plan; /* for the reference; the cache has its own */
    struct kvl_cache *cache;
    struct kvl_buffer *stage, *rotary, *out;
    float *q, *k, *v, *got, *want; /* [T][heads][D]; got and want are the caller's results */
};

/* Floats of a token: its query heads, its key or value heads, both and keys as the projections leave them. */
static inline size_t kvl_probe_q_row(const struct kvl_probe *b) { return (size_t)b->dims.n_head * b->dims.head_dim; }
static inline size_t kvl_probe_kv_row(const struct kvl_probe *b) { return (size_t)b->dims.n_kv_head * b->dims.head_dim; }
static inline size_t kvl_probe_stage_row(const struct kvl_probe *b) { return kvl_probe_q_row(b) + 2 * kvl_probe_kv_row(b); }

/* load: for specs with table=, else NULL. kvl_probe_close also after a failure. */
kvl_status kvl_probe_open(struct kvl_device *device, const char *spec, kvl_table_loader load, void *context, struct kvl_probe *b);
void kvl_probe_close(struct kvl_probe *b);
/* Blocks: tokens [first, first + n) to the stage. */
kvl_status kvl_probe_stage(struct kvl_probe *b, uint32_t first, uint32_t n);
/* Blocks: all tokens through the cache, attention's results to got. */
kvl_status kvl_probe_feed(struct kvl_probe *b);

/* n blocks of random bytes whose values are neither tiny nor huge, and these values: every code occurs, whatever the format. */
void kvl_probe_weights(const struct kvl_quant_type *type, uint64_t seed, size_t n_blocks, uint8_t *bytes, float *values);

/* The larger one; NaN wins. */
double kvl_probe_worse(double a, double b);
double kvl_probe_difference(const float *a, const float *b, size_t n); /* the largest */

#endif
