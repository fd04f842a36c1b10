/* cache_view.cl: what the cache kernels (store.cl, attend.cl) share: sizes, pages, segments and the read rule. No codec is known here.
 *
 *   KVL_SLABS          page slabs; KVL_SLAB_PARAMS / KVL_SLAB_ARGS pass them, kvl_page() picks one
 *   KVL_H, KVL_HEADS   streams of a layer; kv heads that share the records of one
 *   KVL_G, KVL_TILE    query heads a stream; query tokens a tile. KVL_NQ = KVL_G * KVL_TILE query rows share every read
 *   KVL_HD             channels of a head as the model has it
 *   KVL_LAYERS         layers that share records: above 1 pages are those of all of them, and the stage's and the exact rows the layer's own: KVL_XK, KVL_XV
 *   KVL_PROJECTS       query rows and records have a buffer of their own, made from the stage
 *   KVL_DK, KVL_DV     channels of a key's and of a value's record
 *   KVL_DQ, KVL_DA     channels of a query row and of a sum of values: those of the record, or of a head where rows are rebuilt when they are read
 *   KVL_JOINT          a key's record holds the value, in its first KVL_DV channels: there is one side
 *   KVL_B              tokens of one attention block, divides both pages; KVL_SLICE divides it
 *   KVL_WG             work-items that share a tile; 1: no barriers, and what they would share is private (PoCL 3.1 needs minutes to
 *                      compile a kernel with barriers under conditions in a loop)
 *   KVL_APPENDS        attention of one token can take its append in (host/cache/compose.c)
 *   KVL_JOINS          attention of one token joins its splits itself: work-groups of one item on a processor
 *   KVL_COUNTS         counters in front of a kv head's number of arrived splits in `status`
 *   KVL_PICKS          queries choose which pages they read (cl/pages.cl): whole pages of KVL_PAGE tokens of the body, encoded on both sides. Sinks, and
 *                      what is behind the last of them, are read by all
 *   KVL_K_*, KVL_V_*   page tokens, calibration table and aux sizes of the two sides (contract.cl)
 *
 * Body token i of a stream is token sink + i of the sequence; it lies in slot i % (slots * P) (a ring when a window bounds it).
 * With KVL_RAGGED the heads of a layer may have lost different numbers of tokens. The tokens that a head has kept, and those that came later,
 * are its sequence: everything below works on places in that sequence, and a token at position p stands at place p - lost. KVL_HEAD_VIEW
 * turns the call's integers into a head's. With KVL_COMPACT places are also the positions that RoPE turns by. KVL_SLIDES: the same of a window,
 * where only the sinks' places differ from their positions.
 *
 * Read rule: the query at position p reads token t encoded if t < b(p), else in full precision, where
 * b(p) = min(p + 1 - lag, sealed). lag is the tail under P1 and 0 otherwise; sealed is what has been encoded so far. */

/* Where the items of a group wait for each other, and see what others wrote to local memory; to global memory as well. */
#if KVL_WG == 1
#define KVL_BARRIER
#define KVL_BARRIER_OF_ALL
#else
#define KVL_BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define KVL_BARRIER_OF_ALL barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#endif

#define KVL_PROJECTS ((KVL_K_RANK != 0 || KVL_V_RANK != 0) && KVL_LAYERS == 1)

/* Channels of a row of the stage, and of an exact one. */
#if KVL_LAYERS > 1
#define KVL_XK (KVL_HEADS * KVL_HD)
#define KVL_XV KVL_XK
#else
#define KVL_XK KVL_DK
#define KVL_XV KVL_DV
#endif

#define KVL_JOINS (KVL_DEVICE_CPU && KVL_WG == 1 && KVL_TILE == 1)
#define KVL_COUNTS 4

/* Integers of one call, the same for every work-item. */
typedef struct {
    uint p0, n;                /* first position and tokens of the ubatch */
    uint sink, k_ring, v_ring, window; /* sink rows; tail-ring rows of each side; sliding window in tokens, 0 = none */
    uint k_sealed, v_sealed;   /* tokens encoded so far, sinks included */
    uint k_lag, v_lag;
    uint k_slots, v_slots;     /* pages a stream */
    uint n_splits, q_stride;   /* q_stride: floats between tokens of the stage */
    uint k_table, v_table;     /* of the layer's calibration tables [H][KVL_K_TABLE] in the tables, floats */
    uint spin;                 /* tokens that a head has lost since its tail began: 0 in the call, KVL_HEAD_VIEW sets it */
} kvl_view;

#define KVL_VIEW_PARAMS                                                                                                \
    uint p0, uint n, uint sink, uint k_ring, uint v_ring, uint window, uint k_sealed, uint v_sealed, uint k_lag, uint v_lag, uint k_slots, \
        uint v_slots, uint n_splits, uint q_stride, uint k_table, uint v_table, uint spin
#define KVL_VIEW_INIT                                                                                                  \
    {p0, n, sink, k_ring, v_ring, window, k_sealed, v_sealed, k_lag, v_lag, k_slots, v_slots, n_splits, q_stride, k_table, v_table, spin}

/* First token of a head's sequence of `end` that is not encoded. */
uint kvl_sealed_end(uint end, uint sink, uint tail, uint unit) { return end < sink + tail ? sink : sink + (end - sink - tail) / unit * unit; }

/* Behind the page table of a layer stands, for each head, lost | limit << 32: tokens it has lost, and the length at which its sequence ends
 * (while a prompt of longer and shorter heads is stored). p0, n, k_sealed and v_sealed are changed in place; view is made after it. */
/* Behind those, where tokens go while others are decoded (KVL_EVICTS), how many have gone in this way: the tail's ring does not move with places. */
#if KVL_EVICTS
#define KVL_HEAD_SPIN(h) table[(ulong)KVL_H * (k_slots + v_slots + 1) + (h)]
#else
#define KVL_HEAD_SPIN(h) 0
#endif
#if KVL_RAGGED
#define KVL_HEAD_SHIFT(h) table[(ulong)KVL_H * (k_slots + v_slots) + (h)]
#define KVL_HEAD_VIEW(h)                                                                                               \
    {                                                                                                                  \
        const uint lost = (uint)KVL_HEAD_SHIFT(h), limit = (uint)(KVL_HEAD_SHIFT(h) >> 32), end = min(p0 + n - lost, limit); \
        p0 = min(p0 - lost, limit);                                                                                    \
        spin = (uint)KVL_HEAD_SPIN(h);                                                                                 \
        n = end - p0;                                                                                                  \
        k_sealed = kvl_sealed_end(end, sink, KVL_K_TAIL, KVL_K_UNIT);                                                  \
        v_sealed = kvl_sealed_end(end, sink, KVL_V_TAIL, KVL_V_UNIT);                                                  \
    }
#else
#define KVL_HEAD_VIEW(h)
#endif

#if KVL_EVICTS
#define KVL_D KVL_HD /* for a score's body: evict.cl */
#endif

#if KVL_PICKS
/* Whole pages of a stream before a query that sees `end` tokens, and those of them that it reads, which reads at most `budget` (host twin:
 * kvl_pages_read). */
uint kvl_whole_pages(uint k_sealed, uint v_sealed, uint end, uint sink)
{
    const uint past = min(min(k_sealed, v_sealed), end - min(end, 1u)); /* the query's own token is read in any case */
    return past > sink ? (past - sink) / KVL_PAGE : 0u;
}
uint kvl_pages_read(uint whole, uint end, uint budget)
{
    const uint rest = end - whole * KVL_PAGE;
    return min(whole, budget > rest ? (budget - rest) / KVL_PAGE : 0u);
}
/* Of stream h in `picks`: the order of its pages' scores, then the pages that the newest query reads, ascending. */
#define KVL_PAGE_SCORES(picks, h, most) ((picks) + (ulong)(h) * 2 * (most))
#define KVL_PICKED(picks, h, most) ((picks) + ((ulong)(h) * 2 + 1) * (most))
#endif

/* A token's row of the stage: H * G query heads, H keys, H values. Sequences in step have such a row each, one after the other, of their share of the
 * heads. */
#define KVL_H_EACH (KVL_H / KVL_SEQUENCES)
#if KVL_SEQUENCES == 1
#define KVL_SEQUENCE_AT(h) 0UL
#define KVL_OF_SEQUENCE(head, heads) (head)
#else
#define KVL_SEQUENCE_AT(h) ((ulong)((h) / KVL_H_EACH) * KVL_H_EACH * (KVL_G * KVL_DQ + KVL_XK + KVL_XV))
#define KVL_OF_SEQUENCE(head, heads) ((head) % (heads))
#endif
#define KVL_QKV_Q(head) (KVL_SEQUENCE_AT((head) / KVL_G) + KVL_OF_SEQUENCE(head, KVL_H_EACH * KVL_G) * KVL_DQ)
#define KVL_QKV_K(h) (KVL_SEQUENCE_AT(h) + KVL_H_EACH * KVL_G * KVL_DQ + KVL_OF_SEQUENCE(h, KVL_H_EACH) * KVL_XK)
#if KVL_JOINT
#define KVL_QKV_V(h) KVL_QKV_K(h)
#else
#define KVL_QKV_V(h) (KVL_SEQUENCE_AT(h) + KVL_H_EACH * (KVL_G * KVL_DQ + KVL_XK) + KVL_OF_SEQUENCE(h, KVL_H_EACH) * KVL_XV)
#endif

/* Page table of a layer: K [H][k_slots] then V [H][v_slots]; an entry is slab << 56 | byte offset. */
ulong kvl_k_entry(uint h, uint i, kvl_view v) { return (ulong)h * v.k_slots + i / KVL_K_P % v.k_slots; }
#if KVL_JOINT
#define kvl_v_entry kvl_k_entry
#define kvl_v_table kvl_k_table
#define kvl_v_load8 kvl_k_load8
#define kvl_v_encode kvl_k_encode
#else
ulong kvl_v_entry(uint h, uint i, kvl_view v) { return (ulong)KVL_H * v.k_slots + (ulong)h * v.v_slots + i / KVL_V_P % v.v_slots; }
#endif

/* Calibration table of a stream's side. */
const KVL_GLOBAL float *kvl_k_table(const KVL_GLOBAL float *tables, uint h, kvl_view v) { return tables + v.k_table + (ulong)h * KVL_K_TABLE; }
#if !KVL_JOINT
const KVL_GLOBAL float *kvl_v_table(const KVL_GLOBAL float *tables, uint h, kvl_view v) { return tables + v.v_table + (ulong)h * KVL_V_TABLE; }
#endif

/* Exact rows of a layer: K [H][sink + k_ring][XK], then V [H][sink + v_ring][XV]: where those of stream h begin. */
ulong kvl_exact_at(uint h, bool is_k, kvl_view v)
{
    const ulong k_row = (ulong)KVL_XK * (v.sink + v.k_ring), v_row = (ulong)KVL_XV * (v.sink + v.v_ring);
    return (is_k || KVL_JOINT ? h * k_row : KVL_H * k_row + h * v_row) * (KVL_EXACT_HALF ? 2 : 4);
}

kvl_rows kvl_side_rows(const KVL_GLOBAL float *stage, const KVL_GLOBAL uchar *exact, uint h, bool is_k, kvl_view v, uint first)
{
    const bool reads_k = is_k || KVL_JOINT;
    kvl_rows rows = {stage + (is_k ? KVL_QKV_K(h) : KVL_QKV_V(h)), exact + kvl_exact_at(h, is_k, v), v.q_stride, reads_k ? KVL_XK : KVL_XV, v.p0,
                     first, v.sink, reads_k ? v.k_ring : v.v_ring, v.spin, 0};
    return rows;
}

#if KVL_LAYERS > 1
/* The records that layers have joined: rows [..][K of the streams, V of the streams], the first of which is token `base`. */
#define KVL_JOINED_ROW (KVL_H * (KVL_DK + KVL_DV))
#define KVL_JOINED_AT(h, is_k) ((is_k) ? (h) * KVL_DK : KVL_H * KVL_DK + (h) * KVL_DV)
kvl_rows kvl_joined_rows(const KVL_GLOBAL float *joined, uint h, bool is_k, uint base, uint first)
{
    kvl_rows rows = {joined + KVL_JOINED_AT(h, is_k), 0, KVL_JOINED_ROW, is_k ? KVL_DK : KVL_DV, base, first, 0, 0, 0, 0};
    return rows;
}
#endif

/* First token query position p may see beyond the sinks. */
uint kvl_window_start(kvl_view v, uint p) { return max(v.sink, v.window != 0 && p + 1 > v.window ? p + 1 - v.window : 0u); }
uint kvl_encoded_end(uint p, uint lag, uint sealed) { return min(p + 1 > lag ? p + 1 - lag : 0u, sealed); }
