/* cache.cl: the kernels that read and write the cache. They know pages, segments and the read rule, and no codec.
 *
 *   KVL_SLABS          page slabs; KVL_SLAB_PARAMS / KVL_SLAB_ARGS pass them, kvl_page() picks one
 *   KVL_G, KVL_TILE    query heads a kv head; query tokens a tile. KVL_NQ = KVL_G * KVL_TILE query rows share every read
 *   KVL_B              tokens of one attention block, divides both pages; KVL_SLICE divides it
 *   KVL_WG             work-items that share a tile; 1: no barriers, and what they would share is private (PoCL 3.1 needs minutes to
 *                      compile a kernel with barriers under conditions in a loop)
 *   KVL_K_*, KVL_V_*   page tokens, table and aux sizes of the two sides (contract.cl)
 *
 * Body token i of a stream is token sink + i of the sequence; it lies in slot i % (slots * P) (a ring when a window bounds it).
 * Read rule: the query at position p reads token t encoded if t < b(p), else in full precision, where
 * b(p) = min(p + 1 - lag, sealed). lag is the tail under P1 and 0 otherwise; sealed is what has been encoded so far. */

#if KVL_WG == 1
#define KVL_BARRIER
#else
#define KVL_BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#endif

/* Integers of one call, the same for every work-item. */
typedef struct {
    uint p0, n;                /* first position and tokens of the ubatch */
    uint sink, ring, window;   /* sink rows; tail-ring rows; sliding window in tokens, 0 = none */
    uint k_sealed, v_sealed;   /* tokens encoded so far, sinks included */
    uint k_lag, v_lag;
    uint k_slots, v_slots;     /* pages a stream */
    uint n_splits, q_stride;   /* q_stride: floats between tokens of the stage */
} kvl_view;

#define KVL_VIEW_PARAMS                                                                                                \
    uint p0, uint n, uint sink, uint ring, uint window, uint k_sealed, uint v_sealed, uint k_lag, uint v_lag, uint k_slots, \
        uint v_slots, uint n_splits, uint q_stride
#define KVL_VIEW_INIT                                                                                                  \
    {p0, n, sink, ring, window, k_sealed, v_sealed, k_lag, v_lag, k_slots, v_slots, n_splits, q_stride}

#define KVL_QKV_Q(h) ((ulong)(h) * KVL_D)                              /* stage row: H * G query heads, H keys, H values */
#define KVL_QKV_K(h) ((ulong)(KVL_H * KVL_G + (h)) * KVL_D)
#define KVL_QKV_V(h) ((ulong)(KVL_H * KVL_G + KVL_H + (h)) * KVL_D)

/* Page table of a layer: K [H][k_slots] then V [H][v_slots]; an entry is slab << 56 | byte offset. */
ulong kvl_k_entry(uint h, uint i, kvl_view v) { return (ulong)h * v.k_slots + i / KVL_K_P % v.k_slots; }
ulong kvl_v_entry(uint h, uint i, kvl_view v) { return (ulong)KVL_H * v.k_slots + (ulong)h * v.v_slots + i / KVL_V_P % v.v_slots; }

/* Exact rows of a layer: K [H][sink + ring][D], then V. */
ulong kvl_exact_bytes(kvl_view v) { return (ulong)(v.sink + v.ring) * KVL_D * (KVL_EXACT_HALF ? 2 : 4); }

kvl_rows kvl_side_rows(const KVL_GLOBAL float *stage, const KVL_GLOBAL uchar *exact, uint h, bool is_k, kvl_view v, uint first)
{
    kvl_rows rows = {stage + (is_k ? KVL_QKV_K(h) : KVL_QKV_V(h)),
                     exact + (is_k ? (ulong)h : (ulong)KVL_H + h) * kvl_exact_bytes(v), v.q_stride, v.p0, first, v.sink, v.ring};
    return rows;
}

/* First token query position p may see beyond the sinks. */
uint kvl_window_start(kvl_view v, uint p) { return max(v.sink, v.window != 0 && p + 1 > v.window ? p + 1 - v.window : 0u); }
uint kvl_encoded_end(uint p, uint lag, uint sealed) { return min(p + 1 > lag ? p + 1 - lag : 0u, sealed); }

/* ---- RoPE: pairs (2i, 2i+1), position p turns pair i by p * freq[i]; rotary tables [n_ctx][rope_dim/2] (cos, sin) ----
 * One work-item a token and head; queries and keys in place. round_exact: keys and values that may be read in full precision are
 * rounded to what the exact rows hold, so that it does not matter where a row is read from. */
kernel void kvl_rope(global float *stage, global const float2 *rotary, uint p0, uint q_stride, uint rope_dim, uint round_exact)
{
    const uint token = get_global_id(1), head = get_global_id(0);
    global float *row = stage + (ulong)token * q_stride + (ulong)head * KVL_D;
    const bool is_value = head >= KVL_H * (KVL_G + 1);
    if (!is_value) {
        global const float2 *turn = rotary + (ulong)(p0 + token) * (rope_dim / 2);
        for (uint i = 0; i < rope_dim / 2; i++) {
            const float a = row[2 * i], b = row[2 * i + 1];
            row[2 * i] = fma(a, turn[i].x, -(b * turn[i].y));
            row[2 * i + 1] = fma(a, turn[i].y, b * turn[i].x);
        }
    }
#if KVL_EXACT_HALF
    if (round_exact && head >= KVL_H * KVL_G)
        for (uint c = 0; c < KVL_D; c++) {
            ushort bits;
            vstore_half_rte(row[c], 0, (half *)&bits);
            row[c] = vload_half(0, (const half *)&bits);
        }
#endif
}

/* ---- seal: encode tokens [first, end) of one side, one work-item a page and kv head ----
 * status[0] counts non-finite inputs. */
kernel void kvl_seal(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global const float *stage,
                     global const uchar *exact, ulong exact_offset, uint k_first,
                     uint v_first, global uint *status, KVL_VIEW_PARAMS)
{
    const kvl_view view = KVL_VIEW_INIT;
    table += table_offset;
    exact += exact_offset;
    const uint h = get_global_id(0), is_k = get_global_id(2) == 0;
    const uint side_first = is_k ? k_first : v_first, side_end = is_k ? k_sealed : v_sealed, page_tokens = is_k ? KVL_K_P : KVL_V_P;
    if (side_first >= side_end) return;
    const uint page = (side_first - sink) / page_tokens + get_global_id(1);
    const uint first = max(side_first, sink + page * page_tokens), end = min(side_end, sink + (page + 1) * page_tokens);
    if (first >= end) return;
    const kvl_rows rows = kvl_side_rows(stage, exact, h, is_k, view, first);
    uint bad = 0;
    for (uint i = 0; i < end - first; i++)
        for (uint c = 0; c < KVL_D; c++) bad += !isfinite(kvl_row_at(rows, i, c));
    if (bad != 0) atomic_add(status, bad);
    const uint slot = first - sink;
    global uchar *block = kvl_page(KVL_SLAB_ARGS, table[is_k ? kvl_k_entry(h, slot, view) : kvl_v_entry(h, slot, view)]);
    if (is_k) kvl_k_encode(block, 0, slot % KVL_K_P, end - first, rows);
    else kvl_v_encode(block, 0, slot % KVL_V_P, end - first, rows);
}

/* ---- keep exact: copy the rows that stay in full precision (sinks, newest tail) from the stage; one work-item a row and head ---- */
kernel void kvl_keep_exact(global const float *stage, global uchar *exact, ulong exact_offset, KVL_VIEW_PARAMS)
{
    const kvl_view view = KVL_VIEW_INIT;
    const uint h = get_global_id(0), token = p0 + get_global_id(1), is_k = get_global_id(2) == 0;
    if (token >= sink && token + ring < p0 + n) return; /* not a sink and older than the newest `ring` */
    if (token >= sink && ring == 0) return;
    const kvl_rows rows = kvl_side_rows(stage, exact, h, is_k, view, token);
    global uchar *base = exact + exact_offset + (is_k ? (ulong)h : (ulong)KVL_H + h) * kvl_exact_bytes(view);
    const ulong at = (ulong)kvl_exact_index(rows, token) * KVL_D;
    for (uint c = 0; c < KVL_D; c++) {
        const float value = kvl_row_at(rows, 0, c);
#if KVL_EXACT_HALF
        kvl_store_half(base, at + c, value);
#else
        ((global float *)base)[at + c] = value;
#endif
    }
}

/* ---- attention ---- */

#if !KVL_K_HAS_SCORES
void kvl_k_prepare(const KVL_QS float *q, KVL_QS float *aux) {}
void kvl_k_scores(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q, const KVL_QS float *aux,
                  KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t++) {
        float dot[KVL_NQ], k[8];
        for (uint r = 0; r < KVL_NQ; r++) dot[r] = 0.0f;
        for (uint c = 0; c < KVL_D; c += 8) {
            kvl_k_load8(block, table, t0 + t, c, k);
            for (uint r = 0; r < KVL_NQ; r++)
                for (uint i = 0; i < 8; i++) dot[r] = fma(q[r * KVL_D + c + i], k[i], dot[r]);
        }
        for (uint r = 0; r < KVL_NQ; r++) out[r * KVL_B + t] = dot[r];
    }
}
#endif
#if !KVL_V_HAS_ACCUMULATE
void kvl_v_accumulate(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
    for (uint t = 0; t < KVL_SLICE; t++)
        for (uint c = 0; c < KVL_D; c += 8) {
            float v[8];
            kvl_v_load8(block, table, t0 + t, c, v);
            for (uint r = 0; r < KVL_NQ; r++)
                for (uint i = 0; i < 8; i++) acc[r * KVL_D + c + i] = fma(p[r * KVL_B + t], v[i], acc[r * KVL_D + c + i]);
        }
}
#endif

/* Scores of full-precision tokens [from, to) of a block at `base`, where a row sees them in full precision. */
void kvl_exact_scores(kvl_rows rows, uint base, uint from, uint to, const uint *start, const KVL_QS float *q, KVL_QS float *out, uint item)
{
    for (uint t = from + item; t < to; t += KVL_WG) {
        rows.first = t;
        for (uint r = 0; r < KVL_NQ; r++) {
            if (t < start[r]) continue;
            float dot = 0.0f;
            for (uint c = 0; c < KVL_D; c++) dot = fma(q[r * KVL_D + c], kvl_row_at(rows, 0, c), dot);
            out[r * KVL_B + t - base] = dot;
        }
    }
}

void kvl_exact_accumulate(kvl_rows rows, uint base, uint from, uint to, const uint *start, const KVL_QS float *p, KVL_QS float *acc, uint item)
{
    for (uint c = item; c < KVL_D; c += KVL_WG)
        for (uint t = from; t < to; t++) {
            rows.first = t;
            const float value = kvl_row_at(rows, 0, c);
            for (uint r = 0; r < KVL_NQ; r++)
                if (t >= start[r]) acc[r * KVL_D + c] = fma(p[r * KVL_B + t - base], value, acc[r * KVL_D + c]);
        }
}

/* Online softmax (Milakov, Gimelshein 2018) of one row's block: scores become weights, m and l move on; the factor for what was summed before. */
float kvl_softmax_block(KVL_QS float *s, float *m, float *l)
{
    float16 best = vload16(0, s);
    for (uint i = 16; i < KVL_B; i += 16) best = fmax(best, vload16(0, s + i));
    const float top = fmax(*m, kvl_max16(best));
    if (top == -FLT_MAX) { /* nothing seen yet, nothing seen here */
        for (uint i = 0; i < KVL_B; i += 16) vstore16((float16)0.0f, 0, s + i);
        return 1.0f;
    }
    float16 sum = 0.0f;
    for (uint i = 0; i < KVL_B; i += 16) {
        const float16 x = vload16(0, s + i);
        const float16 weight = select(exp(x - top), (float16)0.0f, x == -FLT_MAX);
        vstore16(weight, 0, s + i);
        sum += weight;
    }
    const float keep = *m == top ? 1.0f : exp(*m - top);
    *l = fma(*l, keep, kvl_sum16(sum));
    *m = top;
    return keep;
}

/* One work-group a (query tile, kv head, split). With one split the normalized output goes to out [n][H * G][D]; with more, each split
 * leaves (m, l, sum) in partial [n_splits][n][H * G][D + 2] for kvl_merge. Blocks are aligned to the stream, not to the tile or ubatch, so a
 * query's result does not depend on which others were computed with it. */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void
kvl_attend(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global const float *stage, global const uchar *exact,
           ulong exact_offset, float scale, global float *out, global float *partial, KVL_VIEW_PARAMS)
{
    const kvl_view view = KVL_VIEW_INIT;
    table += table_offset;
    exact += exact_offset;
    const uint item = get_local_id(0), split = get_group_id(0) % n_splits, h = get_group_id(0) / n_splits % KVL_H;
    const uint n_tiles = (n + KVL_TILE - 1) / KVL_TILE, tile = n_tiles - 1 - get_group_id(0) / n_splits / KVL_H; /* the longest first */
    KVL_QS float q[KVL_NQ * KVL_D], s[KVL_NQ * KVL_B], acc[KVL_NQ * KVL_D], aux[KVL_NQ * KVL_K_AUX + 1], row_keep[KVL_NQ];
    KVL_QS float row_m[KVL_NQ], row_l[KVL_NQ];

    uint end[KVL_NQ], start[KVL_NQ], k_end[KVL_NQ], v_end[KVL_NQ]; /* tokens a row sees; first exact token of K and of V */
    uint all_start = UINT_MAX, all_end = 0, k_all_end = UINT_MAX, v_all_end = UINT_MAX, k_any = 0, v_any = 0;
    for (uint r = 0; r < KVL_NQ; r++) {
        const uint token = min(tile * KVL_TILE + r / KVL_G, n - 1), p = p0 + token;
        end[r] = p + 1;
        start[r] = kvl_window_start(view, p);
        k_end[r] = kvl_encoded_end(p, k_lag, k_sealed);
        v_end[r] = kvl_encoded_end(p, v_lag, v_sealed);
        all_start = min(all_start, start[r]);
        all_end = max(all_end, end[r]);
        k_all_end = min(k_all_end, k_end[r]);
        v_all_end = min(v_all_end, v_end[r]);
        k_any = max(k_any, k_end[r]);
        v_any = max(v_any, v_end[r]);
        const global float *source = stage + (ulong)token * q_stride + KVL_QKV_Q(h * KVL_G + r % KVL_G);
        for (uint c = item; c < KVL_D; c += KVL_WG) {
            q[r * KVL_D + c] = source[c] * scale;
            acc[r * KVL_D + c] = 0.0f;
        }
        if (item == 0) {
            row_m[r] = -FLT_MAX;
            row_l[r] = 0.0f;
        }
    }
    KVL_BARRIER;
    for (uint r = item; r < KVL_NQ; r += KVL_WG) kvl_k_prepare(q + r * KVL_D, aux + r * KVL_K_AUX);
    KVL_BARRIER;

    /* Blocks: first those of the sink rows, then those of the body and whatever follows it in full precision. */
    const uint sink_seen = min(sink, all_end), sink_blocks = (sink_seen + KVL_B - 1) / KVL_B;
    const uint body_from = (all_start - sink) / KVL_B, body_to = all_end > sink ? (all_end - sink + KVL_B - 1) / KVL_B : body_from;
    const uint n_blocks = sink_blocks + (body_to > body_from ? body_to - body_from : 0);
    const uint from = (uint)((ulong)n_blocks * split / n_splits), to = (uint)((ulong)n_blocks * (split + 1) / n_splits);
    const kvl_rows k_rows = kvl_side_rows(stage, exact, h, true, view, 0), v_rows = kvl_side_rows(stage, exact, h, false, view, 0);

    for (uint b = from; b < to; b++) {
        const bool is_sink = b < sink_blocks;
        const uint index = is_sink ? 0 : (body_from + b - sink_blocks) * KVL_B; /* body index of the block */
        const uint base = is_sink ? b * KVL_B : sink + index, limit = min(base + KVL_B, is_sink ? sink_seen : all_end);
        const bool k_encoded = !is_sink && base < k_any, v_encoded = !is_sink && base < v_any;
        if (k_encoded) {
            const global uchar *block = kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, index, view)]);
            for (uint t0 = item * KVL_SLICE; t0 < KVL_B; t0 += KVL_WG * KVL_SLICE)
                kvl_k_scores(block, 0, index % KVL_K_P + t0, q, aux, s + t0);
        }
        KVL_BARRIER;
        if (is_sink || k_all_end < limit) {
            uint exact_from[KVL_NQ];
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? 0 : k_end[r];
            kvl_exact_scores(k_rows, base, is_sink ? base : max(base, k_all_end), limit, exact_from, q, s, item);
            KVL_BARRIER;
        }
        for (uint r = item; r < KVL_NQ; r += KVL_WG) {
            const uint see_from = is_sink ? 0 : start[r], see_to = min(end[r], limit);
            if (see_from > base || see_to < base + KVL_B)
                for (uint i = 0; i < KVL_B; i++)
                    if (base + i < see_from || base + i >= see_to) s[r * KVL_B + i] = -FLT_MAX;
            float m = row_m[r], l = row_l[r];
            row_keep[r] = kvl_softmax_block(s + r * KVL_B, &m, &l);
            row_m[r] = m;
            row_l[r] = l;
        }
        KVL_BARRIER;
        for (uint r = 0; r < KVL_NQ; r++)
            if (row_keep[r] != 1.0f)
                for (uint c = item; c < KVL_D; c += KVL_WG) acc[r * KVL_D + c] *= row_keep[r];
        if (is_sink || v_all_end < limit) {
            uint exact_from[KVL_NQ];
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? 0 : v_end[r];
            kvl_exact_accumulate(v_rows, base, is_sink ? base : max(base, v_all_end), limit, exact_from, s, acc, item);
            KVL_BARRIER;
            for (uint r = item; r < KVL_NQ; r += KVL_WG) /* the encoded values must not count these again */
                for (uint t = max(base, exact_from[r]); t < base + KVL_B; t++) s[r * KVL_B + t - base] = 0.0f;
        }
        KVL_BARRIER;
        if (v_encoded && item == 0) {
            const global uchar *block = kvl_page(KVL_SLAB_ARGS, table[kvl_v_entry(h, index, view)]);
            for (uint t0 = 0; t0 < KVL_B; t0 += KVL_SLICE) kvl_v_accumulate(block, 0, index % KVL_V_P + t0, s + t0, acc);
        }
        KVL_BARRIER;
    }

    for (uint r = 0; r < KVL_NQ; r++) {
        const uint token = tile * KVL_TILE + r / KVL_G;
        if (token >= n) break;
        const ulong row = (ulong)token * (KVL_H * KVL_G) + h * KVL_G + r % KVL_G;
        if (n_splits == 1) {
            const float inverse = row_l[r] > 0.0f ? 1.0f / row_l[r] : 0.0f;
            for (uint c = item; c < KVL_D; c += KVL_WG) out[row * KVL_D + c] = acc[r * KVL_D + c] * inverse;
        } else {
            global float *p = partial + ((ulong)split * n * (KVL_H * KVL_G) + row) * (KVL_D + 2);
            for (uint c = item; c < KVL_D; c += KVL_WG) p[c] = acc[r * KVL_D + c];
            if (item == 0) {
                p[KVL_D] = row_m[r];
                p[KVL_D + 1] = row_l[r];
            }
        }
    }
}

/* Joins the splits of one row; a split that saw nothing has l = 0. One work-item a row. */
kernel void kvl_merge(global const float *partial, global float *out, uint n_rows, uint n_splits)
{
    const ulong row = get_global_id(0);
    float top = -FLT_MAX, total = 0.0f;
    for (uint i = 0; i < n_splits; i++) {
        global const float *p = partial + ((ulong)i * n_rows + row) * (KVL_D + 2);
        if (p[KVL_D + 1] > 0.0f) top = fmax(top, p[KVL_D]);
    }
    float acc[KVL_D];
    for (uint c = 0; c < KVL_D; c++) acc[c] = 0.0f;
    for (uint i = 0; i < n_splits; i++) {
        global const float *p = partial + ((ulong)i * n_rows + row) * (KVL_D + 2);
        if (!(p[KVL_D + 1] > 0.0f)) continue;
        const float weight = exp(p[KVL_D] - top);
        total = fma(weight, p[KVL_D + 1], total);
        for (uint c = 0; c < KVL_D; c++) acc[c] = fma(weight, p[c], acc[c]);
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (uint c = 0; c < KVL_D; c++) out[row * KVL_D + c] = acc[c] * inverse;
}

/* ---- for checks: decodes tokens [first, first + count) of one side to out [H][count][D]; one work-item a token and head ---- */
kernel void kvl_decode_rows(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, uint first, uint count, uint is_k,
                            global float *out, KVL_VIEW_PARAMS)
{
    const kvl_view view = KVL_VIEW_INIT;
    table += table_offset;
    const uint h = get_global_id(0), i = get_global_id(1), slot = first + i - sink;
    global float *row = out + ((ulong)h * count + i) * KVL_D;
    const global uchar *block = kvl_page(KVL_SLAB_ARGS, table[is_k ? kvl_k_entry(h, slot, view) : kvl_v_entry(h, slot, view)]);
    for (uint c = 0; c < KVL_D; c += 8) {
        float o[8];
        if (is_k) kvl_k_load8(block, 0, slot % KVL_K_P, c, o);
        else kvl_v_load8(block, 0, slot % KVL_V_P, c, o);
        for (uint j = 0; j < 8; j++) row[c + j] = o[j];
    }
}
