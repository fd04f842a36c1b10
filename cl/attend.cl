/* attend.cl: attention over pages and exact rows, on codes. No buffer holds a dequantized cache.
 *
 * Measured, one layer of 9 query and 3 kv heads of 64 channels behind 4096 tokens, two AVX-512 cores with other work beside (us, PoCL 3.1 |
 * Intel 2026.2): f16 75..78 | 73..75, int8 86..92 | 80..83, int4 84..88 | 74..78. f16 moves at 80 % of the read bandwidth; int8 and int4 are
 * bound by the three fma a vector (47 us) and its conversion, which share ports. What did not help:
 *   the next block's pages fetched ahead, a line an instruction: 113 | 113 instead of 91 | 82 (int8): they wait where the sums would
 *   two or three vectors side by side (KVL_WIDE) instead of four: int8 98 | 85 and 103 | 89
 *   codes in pairs, to be multiplied with queries of 16 bits by one pmaddwd: LLVM 15 takes the pairs apart and multiplies each with a zero */

#if KVL_WG == 1
#define KVL_BARRIER
#else
#define KVL_BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#endif

/* How the work-items of a group share a block of tokens. Scores: KVL_SLICE tokens each in turn. Values: without accumulate() an item owns 8
 * channels of one part of the tokens, and acc holds a sum a part; a group of one has one part, and accumulate() takes all channels. */
#define KVL_EIGHTS (KVL_D / 8)
#if KVL_WG == 1
#define KVL_PARTS 1
#else
#define KVL_PARTS_WANTED (KVL_WG / KVL_EIGHTS)
#define KVL_PARTS_FIT (16384 / (KVL_NQ * KVL_D * 4)) /* 16 KiB of local memory */
#define KVL_PARTS_MIN (KVL_PARTS_WANTED < KVL_PARTS_FIT ? KVL_PARTS_WANTED : KVL_PARTS_FIT)
#define KVL_PARTS (KVL_PARTS_MIN < 1 ? 1 : KVL_PARTS_MIN)
#endif

#if KVL_VECTORS && KVL_K_HAS_SCORES
#define KVL_AUX KVL_K_AUX
#else
#define KVL_AUX 0
void kvl_k_prepare_plain(const KVL_QS float *q, KVL_QS float *aux) {}
#define kvl_k_prepare kvl_k_prepare_plain
#endif

#if KVL_ROPE_PRE
/* The key of token t of a block as a query sees it; position: the key's. */
void kvl_read_key(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, kvl_turn turn, uint position, float *k)
{
    for (uint c = 0; c < KVL_D; c += 8) kvl_k_load8(block, table, t, c, k + c);
    kvl_restore_key(k, turn, position);
}
#endif

/* Scores of KVL_SLICE tokens from t0 on, the first of which has position `position`. */
#if KVL_VECTORS && KVL_K_HAS_SCORES
#define kvl_key_scores(block, table, t0, q, aux, turn, position, out) kvl_k_scores(block, table, t0, q, aux, out)
#elif KVL_VECTORS && KVL_ROPE_PRE
/* 16 keys side by side, channel by channel. */
void kvl_key_scores(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q, const KVL_QS float *aux,
                    kvl_turn turn, uint position, KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t += 16) {
        float k[KVL_D], keys[KVL_D * 16];
        for (uint i = 0; i < 16; i++) {
            kvl_read_key(block, table, t0 + t + i, turn, position + t + i, k);
            for (uint c = 0; c < KVL_D; c++) keys[c * 16 + i] = k[c];
        }
        float16 dot[KVL_NQ];
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) dot[r] = 0.0f;
        for (uint c = 0; c < KVL_D; c++) {
            const float16 key = vload16(c, keys);
            KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) dot[r] = fma(q[r * KVL_D + c], key, dot[r]);
        }
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) vstore16(dot[r], 0, out + r * KVL_B + t);
    }
}
#else
void kvl_key_scores(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q, const KVL_QS float *aux,
                    kvl_turn turn, uint position, KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t++) {
        float dot[KVL_NQ];
        for (uint r = 0; r < KVL_NQ; r++) dot[r] = 0.0f;
#if KVL_ROPE_PRE
        float k[KVL_D];
        kvl_read_key(block, table, t0 + t, turn, position + t, k);
        for (uint c = 0; c < KVL_D; c++)
            for (uint r = 0; r < KVL_NQ; r++) dot[r] = fma(q[r * KVL_D + c], k[c], dot[r]);
#else
        float k[8];
        for (uint c = 0; c < KVL_D; c += 8) {
            kvl_k_load8(block, table, t0 + t, c, k);
            for (uint r = 0; r < KVL_NQ; r++)
                for (uint i = 0; i < 8; i++) dot[r] = fma(q[r * KVL_D + c + i], k[i], dot[r]);
        }
#endif
        for (uint r = 0; r < KVL_NQ; r++) out[r * KVL_B + t] = dot[r];
    }
}
#endif

/* Adds this item's share of a block's weighted values to acc [KVL_PARTS][KVL_NQ][KVL_D]. slot: of the block's first token in its page. */
void kvl_add_values(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint slot, const KVL_QS float *p, KVL_QS float *acc, uint item)
{
#if KVL_VECTORS && KVL_V_HAS_ACCUMULATE
    if (item == 0)
        for (uint t0 = 0; t0 < KVL_B; t0 += KVL_SLICE) kvl_v_accumulate(block, table, slot + t0, p + t0, acc);
#else
    for (uint share = item; share < KVL_EIGHTS * KVL_PARTS; share += KVL_WG) {
        const uint c = share % KVL_EIGHTS * 8, part = share / KVL_EIGHTS;
        KVL_QS float *sum = acc + part * KVL_NQ * KVL_D + c;
        for (uint t = part; t < KVL_B; t += KVL_PARTS) {
            float v[8];
            kvl_v_load8(block, table, slot + t, c, v);
            for (uint r = 0; r < KVL_NQ; r++)
                for (uint i = 0; i < 8; i++) sum[r * KVL_D + i] = fma(p[r * KVL_B + t], v[i], sum[r * KVL_D + i]);
        }
    }
#endif
}

#define KVL_EXACT_WIDE (KVL_D % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

/* Scores of full-precision tokens [from, to) of a block at `base`, where a row sees them in full precision. */
void kvl_exact_scores(kvl_rows rows, uint base, uint from, uint to, const uint *start, const KVL_QS float *q, kvl_turn turn, KVL_QS float *out,
                      uint item)
{
    for (uint t = from + item; t < to; t += KVL_WG) {
        rows.first = t;
#if KVL_VECTORS || KVL_ROPE_PRE
        float k[KVL_D];
        kvl_read_row(rows, k);
#define KEY_AT(c) k[c]
#else
#define KEY_AT(c) kvl_row_at(rows, 0, c) /* an array of a row spills on GPUs */
#endif
#if KVL_ROPE_PRE
        kvl_restore_key(k, turn, t);
#endif
        for (uint r = 0; r < KVL_NQ; r++) {
            if (t < start[r]) continue;
#if KVL_VECTORS
            float16 dots = 0.0f;
            for (uint c = 0; c < KVL_D; c += 16) dots = fma(vload16(0, q + r * KVL_D + c), vload16(0, k + c), dots);
            const float dot = kvl_sum16(dots);
#else
            float dot = 0.0f;
            for (uint c = 0; c < KVL_D; c++) dot = fma(q[r * KVL_D + c], KEY_AT(c), dot);
#endif
            out[r * KVL_B + t - base] = dot;
        }
    }
}

void kvl_exact_accumulate(kvl_rows rows, uint base, uint from, uint to, const uint *start, const KVL_QS float *p, KVL_QS float *acc, uint item)
{
#if KVL_VECTORS
    for (uint c = 0; c < KVL_D; c += 16 * KVL_EXACT_WIDE) {
        float16 sum[KVL_EXACT_WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < KVL_EXACT_WIDE * KVL_NQ; i++) sum[i] = vload16(0, acc + i % KVL_NQ * KVL_D + c + i / KVL_NQ * 16);
        for (uint t = from; t < to; t++) {
            rows.first = t;
            KVL_UNROLL for (uint w = 0; w < KVL_EXACT_WIDE; w++)
            {
                const float16 v = kvl_row_vector(rows, c + 16 * w);
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                    if (t >= start[r]) sum[w * KVL_NQ + r] = fma(p[r * KVL_B + t - base], v, sum[w * KVL_NQ + r]);
            }
        }
        KVL_UNROLL for (uint i = 0; i < KVL_EXACT_WIDE * KVL_NQ; i++) KVL_STORE16(sum[i], acc + i % KVL_NQ * KVL_D + c + i / KVL_NQ * 16);
    }
#else
    for (uint c = item; c < KVL_D; c += KVL_WG)
        for (uint t = from; t < to; t++) {
            rows.first = t;
            const float value = kvl_row_at(rows, 0, c);
            for (uint r = 0; r < KVL_NQ; r++)
                if (t >= start[r]) acc[r * KVL_D + c] = fma(p[r * KVL_B + t - base], value, acc[r * KVL_D + c]);
        }
#endif
}

/* Online softmax (Milakov, Gimelshein 2018) of one row's block: scores become weights, m and l move on; the factor for what was summed before.
 * A block whose largest score is below m, as most are, does not wait for it: the branch is predicted. */
float kvl_softmax_block(KVL_QS float *s, float *m, float *l)
{
    float keep = 1.0f;
#if KVL_VECTORS
    float16 best = -FLT_MAX;
    for (uint i = 0; i < KVL_B; i += 16) best = kvl_larger(best, vload16(0, s + i));
    const float top = kvl_larger1(*m, kvl_max16(best));
#else
    float top = *m;
    for (uint i = 0; i < KVL_B; i++) top = fmax(top, s[i]);
#endif
    if (top > *m) {
        keep = exp(*m - top);
        *m = top;
    }
    if (*m == -FLT_MAX) { /* nothing seen yet, nothing seen here */
        for (uint i = 0; i < KVL_B; i++) s[i] = 0.0f;
        return 1.0f;
    }
#if KVL_VECTORS
    float16 sums = 0.0f;
    for (uint i = 0; i < KVL_B; i += 16) {
        const float16 weight = kvl_exp_negative(vload16(0, s + i) - *m);
        KVL_STORE16(weight, s + i);
        sums += weight;
    }
    const float sum = kvl_sum16(sums);
#else
    float sum = 0.0f;
    for (uint i = 0; i < KVL_B; i++) {
        s[i] = s[i] == -FLT_MAX ? 0.0f : exp(s[i] - *m);
        sum += s[i];
    }
#endif
    *l = fma(*l, keep, sum);
    return keep;
}

/* One work-group a (query tile, kv head, split). With one split the normalized output goes to out [n][H * G][D]; with more, each split
 * leaves (m, l, sum) in partial [n_splits][n][H * G][D + 2] for kvl_merge. Blocks are aligned to the stream, not to the tile or ubatch, so a
 * query's result does not depend on which others were computed with it. */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void
kvl_attend(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global const float *stage, global const uchar *exact,
           ulong exact_offset, KVL_TURN_PARAMS, float scale, global float *out, global float *partial, KVL_VIEW_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    table += table_offset;
    exact += exact_offset;
    const uint item = get_local_id(0), split = get_group_id(0) % n_splits, h = get_group_id(0) / n_splits % KVL_H;
    KVL_HEAD_VIEW(h)
    const kvl_view view = KVL_VIEW_INIT;
    const uint n_tiles = (n + KVL_TILE - 1) / KVL_TILE, tile = n_tiles - 1 - get_group_id(0) / n_splits / KVL_H; /* the longest first */
    KVL_QS float q[KVL_NQ * KVL_D], s[KVL_NQ * KVL_B], acc[KVL_PARTS * KVL_NQ * KVL_D], aux[KVL_NQ * KVL_AUX + 1], row_keep[KVL_NQ];
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
        for (uint c = item; c < KVL_D; c += KVL_WG) q[r * KVL_D + c] = source[c] * scale;
        if (item == 0) {
            row_m[r] = -FLT_MAX;
            row_l[r] = 0.0f;
        }
    }
    for (uint i = item; i < KVL_PARTS * KVL_NQ * KVL_D; i += KVL_WG) acc[i] = 0.0f;
    KVL_BARRIER;
    for (uint r = item; r < KVL_NQ; r += KVL_WG) kvl_k_prepare(q + r * KVL_D, aux + r * KVL_AUX);
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
                kvl_key_scores(block, kvl_k_table(tables, h, view), index % KVL_K_P + t0, q, aux, turn, base + t0, s + t0);
        }
        KVL_BARRIER;
        if (is_sink || k_all_end < limit) {
            uint exact_from[KVL_NQ];
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? 0 : k_end[r];
            kvl_exact_scores(k_rows, base, is_sink ? base : max(base, k_all_end), limit, exact_from, q, turn, s, item);
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
        for (uint part = 0; part < KVL_PARTS; part++)
            for (uint r = 0; r < KVL_NQ; r++)
                if (row_keep[r] != 1.0f)
                    for (uint c = item; c < KVL_D; c += KVL_WG) acc[(part * KVL_NQ + r) * KVL_D + c] *= row_keep[r];
        if (is_sink || v_all_end < limit) {
            uint exact_from[KVL_NQ];
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? 0 : v_end[r];
            kvl_exact_accumulate(v_rows, base, is_sink ? base : max(base, v_all_end), limit, exact_from, s, acc, item);
            KVL_BARRIER;
            for (uint r = item; r < KVL_NQ; r += KVL_WG) /* the encoded values must not count these again */
                for (uint t = max(base, exact_from[r]); t < base + KVL_B; t++) s[r * KVL_B + t - base] = 0.0f;
        }
        KVL_BARRIER;
        if (v_encoded)
            kvl_add_values(kvl_page(KVL_SLAB_ARGS, table[kvl_v_entry(h, index, view)]), kvl_v_table(tables, h, view), index % KVL_V_P, s, acc,
                           item);
        KVL_BARRIER;
    }
#if KVL_PARTS > 1
    for (uint i = item; i < KVL_NQ * KVL_D; i += KVL_WG)
        for (uint part = 1; part < KVL_PARTS; part++) acc[i] += acc[part * KVL_NQ * KVL_D + i];
    KVL_BARRIER;
#endif

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

/* Joins the splits of one row; a split that saw nothing has l = 0. One work-group a row: its items look at a split each, then add up a channel
 * each (in turns of KVL_WG). */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void kvl_merge(global const float *partial, global float *out, uint n_rows,
                                                                          uint n_splits)
{
    const uint item = get_local_id(0);
    const ulong row = get_group_id(0), step = (ulong)n_rows * (KVL_D + 2);
    KVL_QS float tops[KVL_WG], weights[KVL_WG], sums[KVL_WG];
    float top = -FLT_MAX, total = 0.0f, acc[(KVL_D + KVL_WG - 1) / KVL_WG];
    for (uint c = item; c < KVL_D; c += KVL_WG) acc[c / KVL_WG] = 0.0f;
    for (uint first = 0; first < n_splits; first += KVL_WG) {
        global const float *p = partial + first * step + row * (KVL_D + 2);
        const bool seen = first + item < n_splits && p[item * step + KVL_D + 1] > 0.0f;
        tops[item] = seen ? p[item * step + KVL_D] : -FLT_MAX;
        sums[item] = seen ? p[item * step + KVL_D + 1] : 0.0f;
        KVL_BARRIER;
        float best = top;
        for (uint i = 0; i < KVL_WG; i++) best = fmax(best, tops[i]);
        weights[item] = seen ? exp(tops[item] - best) : 0.0f;
        KVL_BARRIER;
        const float keep = top == best ? 1.0f : exp(top - best);
        total *= keep;
        for (uint c = item; c < KVL_D; c += KVL_WG) acc[c / KVL_WG] *= keep;
        for (uint i = 0; i < min((uint)KVL_WG, n_splits - first); i++) {
            total = fma(weights[i], sums[i], total);
            for (uint c = item; c < KVL_D; c += KVL_WG) acc[c / KVL_WG] = fma(weights[i], p[i * step + c], acc[c / KVL_WG]);
        }
        top = best;
        KVL_BARRIER;
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (uint c = item; c < KVL_D; c += KVL_WG) out[row * KVL_D + c] = acc[c / KVL_WG] * inverse;
}
