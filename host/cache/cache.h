/* The KV cache on a device: pages, exact rows, and the step that appends, seals and attends.
 * Streams, segments and the read rule: README of this room. */
#ifndef KVL_CACHE_H
#define KVL_CACHE_H
#include "device.h"
#include "plan.h"
#include "status.h"

struct kvl_cache;

/* Takes over *plan (emptied). Pages are zero-filled. */
kvl_status kvl_cache_new(struct kvl_device *device, struct kvl_cache_plan *plan, struct kvl_cache **out);
void kvl_cache_free(struct kvl_cache **cache);
void kvl_cache_reset(struct kvl_cache *cache); /* no tokens; stored bytes stay until they are overwritten */

const struct kvl_cache_plan *kvl_cache_plan(const struct kvl_cache *cache);
uint32_t kvl_cache_position(const struct kvl_cache *cache); /* tokens taken in */
uint32_t kvl_cache_held(const struct kvl_cache *cache);     /* of them not evicted: on average over layers and heads, rounded down */

/* Steps 2 to 8 of the fixed order (README) for one layer and the next n tokens.
 * stage: [n][(H*G + 2*H) * D] f32, a token's q heads, k heads, v heads; made into records in place (cl/record.cl), but for the queries of a token whose append
 * attention takes in.
 * rotary: [n_ctx][rope_dim / 2] pairs (cos, sin). out: [n][H*G*D] f32, NULL = store only, attend to nothing. Enqueues only. */
kvl_status kvl_cache_step(struct kvl_cache *cache, uint32_t layer, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                          uint32_t rope_dim, struct kvl_buffer *out);
/* After the step of the last layer: the n tokens are now part of the cache. */
void kvl_cache_advance(struct kvl_cache *cache, uint32_t n);

/* ---- a prompt that was compressed, layer by layer: caches whose plan evicts (prompt.h drives this) ---- */

/* Layer l is to hold count[h] <= n_token tokens of head h [H]: it gets pages for them and for what may follow. */
/* token: their positions, those of head 0 first; sum: what they got of attention so far, of scores that go on with it (else NULL). */
kvl_status kvl_cache_fill_begin(struct kvl_cache *cache, uint32_t l, uint32_t n_token, const uint32_t *count, const uint32_t *token, const float *sum);
/* What a codec has learned for the streams of a side, [H][table_floats], before the first of its rows. */
kvl_status kvl_cache_fill_table(struct kvl_cache *cache, uint32_t l, enum kvl_side side, const float *table);
/* The next n places of every head, from the stage's rows, whose keys RoPE has turned if they are stored so; heads that are shorter take less. n
 * is at most the ubatch. Enqueues only. */
kvl_status kvl_cache_fill_rows(struct kvl_cache *cache, uint32_t l, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                               uint32_t rope_dim);
/* The layer is full: the cache stands behind a prompt of n_token tokens, of which head h has lost n_token - count[h]. */
kvl_status kvl_cache_fill_end(struct kvl_cache *cache, uint32_t l, uint32_t n_token, const uint32_t *count);

/* ---- tokens that go while others are decoded (when=every:N, when=full): step() and advance() do it, one token at a time ---- */

/* Blocks: positions of the tokens that head h of layer l has, in the order in which it stores them; room for kvl_cache_places. A layer that evicts
 * nothing while decoding: KVL_E_USAGE. */
kvl_status kvl_cache_positions(struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t *position);
/* Blocks: the pages, ascending, that the newest query of head h read in layer l, which must be the last that chose; room for its most_pages; *n = 0 also
 * where it read all. */
kvl_status kvl_cache_picked(struct kvl_cache *cache, uint32_t l, uint32_t h, uint32_t *page, uint32_t *n);
/* Blocks: the tokens that head h of layer l has lost while decoding, in the order in which they went: *n of them, of which the first are in gone, at most the
 * plan's gone_room. */
kvl_status kvl_cache_gone(struct kvl_cache *cache, uint32_t l, uint32_t h, struct kvl_gone *gone, uint32_t *n);
/* ---- where the host says which go (layers by_host of the plan; rescore.h drives this behind advance()) ---- */

/* Tokens that a head of layer l is to keep on average of what has been taken in; UINT32_MAX: none goes now. */
kvl_status kvl_cache_target(const struct kvl_cache *cache, uint32_t l, uint32_t *target);
/* The queries of n rows of the stage, as the model made them, of tokens from `position` on: of layers that want any, the newest stay. Enqueues only. */
kvl_status kvl_cache_remember(struct kvl_cache *cache, uint32_t l, uint32_t position, struct kvl_buffer *stage, uint32_t row, uint32_t n);
/* Blocks: those of the newest n tokens [n][H*G][D], n at most the layer's `recent`. */
kvl_status kvl_cache_recent(struct kvl_cache *cache, uint32_t l, uint32_t n, float *q);
/* Blocks: the records that heads have, by place, [H][stride][channels], as attention reads them; stride is at least the most places of a head. */
kvl_status kvl_cache_held_rows(struct kvl_cache *cache, uint32_t l, enum kvl_side side, uint32_t stride, float *rows);
/* Numbers of head h's tokens, by place: those that go on, or that say what goes (the smallest first, of equal ones the newest). */
kvl_status kvl_cache_numbers(struct kvl_cache *cache, uint32_t l, uint32_t h, float *number);
kvl_status kvl_cache_set_numbers(struct kvl_cache *cache, uint32_t l, uint32_t h, const float *number);
/* Head h is left with target[h] tokens, or with what cannot go: sinks and the exact tail. */
kvl_status kvl_cache_drop(struct kvl_cache *cache, uint32_t l, const uint32_t *target);

/* Where a head's tokens of a side are, by place (of a cache that evicted nothing: by position): [0, sink) exact, [sink, sealed) encoded, [sealed,
 * places) exact until they are. Of a window, those from sink to before `first` are gone. */
struct kvl_segments {
    uint32_t sink, first, sealed, places;
};
void kvl_cache_segments(const struct kvl_cache *cache, uint32_t l, enum kvl_side side, uint32_t h, struct kvl_segments *out);
/* Tokens that head h of layer l has. */
uint32_t kvl_cache_places(const struct kvl_cache *cache, uint32_t l, uint32_t h);

/* From now on queries of layer l see the newest `window` tokens, 0 = all. For layers that are planned without a window: every token stays. */
void kvl_cache_narrow(struct kvl_cache *cache, uint32_t l, uint32_t window);

/* Forgets the tokens from `position` on. KVL_SKIP where that cannot be: a window has overwritten older tokens, or exact rows. */
kvl_status kvl_cache_rewind(struct kvl_cache *cache, uint32_t position);

/* Tokens and bytes the attention of the last advance() and all before it (since reset) had to read. */
struct kvl_cache_reads {
    uint64_t tokens; /* sum over queries of tokens seen, on average over the layers */
    uint64_t bytes;  /* all layers and heads: sealed and exact rows, once a query, and the bounds of pages among which it chose */
    uint64_t newest_bytes; /* the same of the newest query alone */
};
void kvl_cache_reads(const struct kvl_cache *cache, struct kvl_cache_reads *out);
/* Counts what one layer of a prompt has read elsewhere. */
void kvl_cache_count_prompt(struct kvl_cache *cache, const struct kvl_cache_reads *reads);

/* Bytes by class now; the ledger's entries are brought up to date. Sums to what the cache's buffers hold. */
kvl_status kvl_cache_bytes(struct kvl_cache *cache, uint64_t bytes[KVL_MEM_CLASSES]);

/* What kernels saw since new. */
struct kvl_cache_counts {
    uint32_t nonfinite; /* keys or values that were not finite */
    uint32_t overflow;  /* outliers that found a codec's fixed room taken and were stored as any other element */
    uint32_t cut;       /* work-items whose loops the device ended early: what they made is wrong */
};
/* Blocks. */
kvl_status kvl_cache_counts(struct kvl_cache *cache, struct kvl_cache_counts *out);
/* Adds what was seen before: by the rows of a prompt, which hand over finite numbers. */
void kvl_cache_add_counts(struct kvl_cache *cache, const struct kvl_cache_counts *counts);

/* Launches a kernel that was composed for layer l over (x, y) work-items: its arguments are the slabs, the page table and its offset, `own`, the
 * view (KVL_VIEW_PARAMS). Enqueues only. */
kvl_status kvl_cache_launch(struct kvl_cache *cache, uint32_t l, struct kvl_kernel *kernel, const struct kvl_arg *own, size_t n_own, size_t x,
                            size_t y);

/* Bytes of all buffers but scratch: now, and at most since new or reset; others_bytes: of a prompt's rows that are there as well now. */
uint64_t kvl_cache_resident(const struct kvl_cache *cache);
void kvl_cache_note_peak(struct kvl_cache *cache, uint64_t others_bytes);
uint64_t kvl_cache_peak(const struct kvl_cache *cache);

/* Blocks: the decoded records of tokens [first, first + count) of a side (of heads that have lost tokens: places), [H][count][D]. They must be
 * sealed. Layers that share records have the same. */
kvl_status kvl_cache_read_rows(struct kvl_cache *cache, uint32_t layer, enum kvl_side side, uint32_t first, uint32_t count, float *rows);
/* Blocks: the stored bytes of page `page` of a stream's side, [page_bytes]. */
kvl_status kvl_cache_read_page(struct kvl_cache *cache, uint32_t layer, enum kvl_side side, uint32_t head, uint32_t page, uint8_t *bytes);

#endif
