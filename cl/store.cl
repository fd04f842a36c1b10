/* store.cl: what is written to the cache: records in the stage, sealed pages, exact rows. */

#if !KVL_PROJECTS
/* One work-item a head and token. */
kernel void kvl_rope(global float *stage, global const ulong *table, ulong table_offset, KVL_TURN_PARAMS, uint round_exact, KVL_VIEW_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    table += table_offset;
    const uint head = get_global_id(0), token = get_global_id(1);
    kvl_finish_row(stage, turn, p0 + token - KVL_ROPE_SHIFT(head), token, head, q_stride, round_exact);
}

#if KVL_RAGGED
/* The same for the keys and values of a prompt's kept tokens, whose keys RoPE has turned already: at position 0 it leaves them as they are. One
 * work-item a kv head's key or value and token. */
kernel void kvl_finish_kept(global float *stage, KVL_TURN_PARAMS, uint q_stride, uint round_exact)
{
    const kvl_turn turn = KVL_TURN_INIT;
    kvl_finish_row(stage, turn, 0, get_global_id(1), KVL_H * KVL_G + get_global_id(0), q_stride, round_exact);
}
#endif
#else
/* The KVL_DQ channels that scores want of a query head of stream h. */
void kvl_project_query(const global float *row, kvl_turn turn, uint h, uint kv_head, uint position, float *y)
{
    float x[KVL_HD];
    for (uint c = 0; c < KVL_HD; c++) x[c] = row[c];
    kvl_rope_row(x, turn, position);
#if !KVL_RESTORES
    kvl_order_row(x, turn.rope_dim, false);
#endif
#if KVL_K_RANK != 0 && !KVL_RESTORES
    for (uint r = 0; r < KVL_DQ; r++) y[r] = 0.0f;
    kvl_add_product(x, KVL_HD, KVL_UP(turn.k_projection, KVL_K_RANK, h) + kv_head * KVL_HD * KVL_K_RANK, KVL_K_RANK, y);
#else
    for (uint c = 0; c < KVL_HD; c++) y[c] = x[c];
#endif
#if !KVL_RESTORES
    kvl_rotate_key(y, turn);
#endif
}

/* The record of stream h's keys, whose rows begin at row. */
void kvl_project_key(const global float *row, kvl_turn turn, uint h, uint position, float *y)
{
    for (uint r = 0; r < KVL_DK; r++) y[r] = 0.0f;
    for (uint i = 0; i < KVL_HEADS; i++) {
        float x[KVL_HD];
        for (uint c = 0; c < KVL_HD; c++) x[c] = row[i * KVL_HD + c];
#if !KVL_ROPE_PRE
        kvl_rope_row(x, turn, position);
#endif
        kvl_order_row(x, turn.rope_dim, false);
#if KVL_K_RANK != 0
        kvl_add_product(x, KVL_HD, KVL_DOWN(turn.k_projection, KVL_K_RANK, h) + i * KVL_HD * KVL_K_RANK, KVL_K_RANK, y);
#else
        for (uint c = 0; c < KVL_HD; c++) y[i * KVL_HD + c] = x[c];
#endif
    }
    kvl_rotate_key(y, turn);
}

void kvl_project_value(const global float *row, kvl_turn turn, uint h, float *y)
{
    float x[KVL_ROW];
    for (uint c = 0; c < KVL_ROW; c++) x[c] = row[c];
#if KVL_V_RANK != 0
    for (uint r = 0; r < KVL_DV; r++) y[r] = 0.0f;
    kvl_add_product(x, KVL_ROW, KVL_DOWN(turn.v_projection, KVL_V_RANK, h), KVL_V_RANK, y);
#else
    for (uint c = 0; c < KVL_ROW; c++) y[c] = x[c];
#endif
    kvl_rotate_value(y, turn);
}

#define KVL_WIDEST (KVL_DQ > KVL_DK ? (KVL_DQ > KVL_DV ? KVL_DQ : KVL_DV) : (KVL_DK > KVL_DV ? KVL_DK : KVL_DV))

/* From the stage's rows (stride floats a token; query heads, keys, values of KVL_HD channels) to the query rows and records of the streams. kept: the
 * rows are a prompt's, whose keys RoPE has turned as they are stored; at position 0 it leaves them as they are. One work-item a query head, key or
 * value of a stream, and token. */
kernel void kvl_project(global const float *stage, ulong stride, global float *records, global const ulong *table, ulong table_offset,
                        KVL_TURN_PARAMS, uint kept, uint round_exact, KVL_VIEW_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    table += table_offset;
    const uint head = get_global_id(0), token = get_global_id(1), h = kvl_kv_head(head), n_query = KVL_H * KVL_G;
    const uint position = kept ? 0 : p0 + token - KVL_ROPE_SHIFT(head);
    const bool is_query = head < n_query, is_value = head >= n_query + KVL_H;
    const global float *row = stage + token * stride;
    global float *to = records + (ulong)token * q_stride;
    float y[KVL_WIDEST];
    uint width = is_query ? KVL_DQ : is_value ? KVL_DV : KVL_DK;
    if (is_query) {
        kvl_project_query(row + (ulong)head * KVL_HD, turn, h, head % KVL_G / (KVL_G / KVL_HEADS), position, y);
        to += KVL_QKV_Q(head);
    } else if (is_value) {
        kvl_project_value(row + (ulong)(n_query * KVL_HD + (KVL_H + h) * KVL_ROW), turn, h, y);
        to += KVL_QKV_V(h);
    } else {
        kvl_project_key(row + (ulong)(n_query * KVL_HD + h * KVL_ROW), turn, h, position, y);
        to += KVL_QKV_K(h);
    }
    if (KVL_EXACT_HALF && round_exact && !is_query) kvl_round_row(y, width);
    for (uint c = 0; c < width; c++) to[c] = y[c];
}
#endif

#if (KVL_V_RANK != 0 || KVL_V_ROT_M != 0) && !KVL_V_REBUILT
/* Undoes the values' rotation and projection of attention's sums [n][H * G][KVL_DA]; out: [n][H * G][channels of a head], may be the same. One
 * work-item a query head and token. */
kernel void kvl_finish_output(global const float *sums, global float *out, KVL_TURN_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    const ulong head = get_global_id(0), row = get_global_id(1) * (KVL_H * KVL_G) + head;
    float x[KVL_DA];
    for (uint c = 0; c < KVL_DA; c++) x[c] = sums[row * KVL_DA + c];
    kvl_unrotate_value(x, turn);
#if KVL_V_RANK != 0
    const uint first = head % KVL_G / (KVL_G / KVL_HEADS) * KVL_HD;
    const global float *up = KVL_UP(turn.v_projection, KVL_V_RANK, head / KVL_G) + first;
    float y[KVL_HD];
    for (uint c = 0; c < KVL_HD; c++) y[c] = 0.0f;
    for (uint r = 0; r < KVL_V_RANK; r++)
        for (uint c = 0; c < KVL_HD; c += 8)
            KVL_UNROLL for (uint i = 0; i < 8; i++) y[c + i] = fma(x[r], up[r * KVL_ROW + c + i], y[c + i]);
    for (uint c = 0; c < KVL_HD; c++) out[row * KVL_HD + c] = y[c];
#else
    for (uint c = 0; c < KVL_DA; c++) out[row * KVL_DA + c] = x[c];
#endif
}
#endif

/* Seals tokens [first, sealed) of both sides; one work-item a kv head, page and side. */
kernel void kvl_seal(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global const float *stage, global const uchar *exact,
                     ulong exact_offset, uint k_first, uint v_first, global const float *tables, global uint *status, KVL_VIEW_PARAMS)
{
    table += table_offset;
    const uint h = get_global_id(0);
    const bool is_k = get_global_id(2) == 0;
    KVL_HEAD_VIEW(h)
#if KVL_LAYERS > 1
    const uint base = is_k ? k_first : v_first; /* the stage is records that layers have joined, from this token on */
#endif
#if KVL_RAGGED
    k_first = kvl_sealed_end(p0, sink, KVL_K_TAIL, KVL_K_UNIT);
    v_first = kvl_sealed_end(p0, sink, KVL_V_TAIL, KVL_V_UNIT);
#endif
    const kvl_view view = KVL_VIEW_INIT;
    const uint side_first = is_k ? k_first : v_first, side_end = is_k ? k_sealed : v_sealed, page_tokens = is_k ? KVL_K_P : KVL_V_P;
    if (side_first >= side_end) return;
    const uint page = (side_first - sink) / page_tokens + get_global_id(1);
    const uint first = max(side_first, sink + page * page_tokens), end = min(side_end, sink + (page + 1) * page_tokens);
    if (first >= end) return;
#if KVL_LAYERS > 1
    kvl_encode_range(KVL_SLAB_ARGS, table, tables, kvl_joined_rows(stage, h, is_k, base, first), h, is_k, first, end, view, status);
#else
    kvl_encode_range(KVL_SLAB_ARGS, table, tables, kvl_side_rows(stage, exact + exact_offset, h, is_k, view, first), h, is_k, first, end, view,
                     status);
#endif
    KVL_COUNT_CUT(status, n)
}

#if KVL_LAYERS > 1
/* Adds what this layer's rows are to the records that it shares: those of tokens [first, end) of each side, from the stage or, where they have left it, from the
 * exact rows. joined: kvl_joined_rows, keys' from token k_base on. begins, ends: it is the first, the last of these layers. One work-item a stream, token and side. */
kernel void kvl_join(global const float *stage, global const uchar *exact, ulong exact_offset, global float *joined, KVL_TURN_PARAMS, uint k_first, uint v_first,
                     uint k_end, uint v_end, uint k_base, uint v_base, uint begins, uint ends, KVL_VIEW_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    const kvl_view view = KVL_VIEW_INIT;
    const uint h = get_global_id(0);
    const bool is_k = get_global_id(2) == 0;
    const uint token = (is_k ? k_first : v_first) + get_global_id(1), rank = is_k ? KVL_DK : KVL_DV;
    if (token >= (is_k ? k_end : v_end)) return;
    global float *to = joined + (ulong)(token - (is_k ? k_base : v_base)) * KVL_JOINED_ROW + KVL_JOINED_AT(h, is_k);
    float x[KVL_ROW], y[KVL_DK > KVL_DV ? KVL_DK : KVL_DV];
    kvl_read_row(kvl_side_rows(stage, exact + exact_offset, h, is_k, view, token), KVL_ROW, x);
    for (uint r = 0; r < rank; r++) y[r] = begins ? 0.0f : to[r];
    if (is_k) kvl_add_product(x, KVL_ROW, KVL_DOWN(turn.k_projection, KVL_DK, h), KVL_DK, y);
    else kvl_add_product(x, KVL_ROW, KVL_DOWN(turn.v_projection, KVL_DV, h), KVL_DV, y);
#if KVL_K_ROT_M != 0
    if (ends && is_k) kvl_rotate_key(y, turn);
    if (ends && !is_k) kvl_rotate_value(y, turn);
#endif
    for (uint r = 0; r < rank; r++) to[r] = y[r];
}
#endif

#if KVL_K_RANK == 0 && KVL_V_RANK == 0
/* Records and seal in one launch, for ubatches that are sealed whole as soon as they come: one work-item a head (queries, keys, values) and page
 * of it; it finishes its rows and then encodes them. */
kernel void kvl_append(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global float *stage, KVL_TURN_PARAMS, uint round_exact,
                       global uint *status, KVL_VIEW_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    table += table_offset;
    const uint head = get_global_id(0), h = kvl_kv_head(head);
    const bool is_value = head >= KVL_H * (KVL_G + 1), is_query = head < KVL_H * KVL_G;
    const uint position = p0 - KVL_ROPE_SHIFT(head);
    KVL_HEAD_VIEW(h)
    const kvl_view view = KVL_VIEW_INIT;
    const uint page_tokens = is_value ? KVL_V_P : KVL_K_P, page = (p0 - sink) / page_tokens + get_global_id(1);
    const uint first = max(p0, sink + page * page_tokens), end = min(p0 + n, sink + (page + 1) * page_tokens);
    if (first >= end) return;
    for (uint t = first; t < end; t++) kvl_finish_row(stage, turn, position + t - p0, t - p0, head, q_stride, round_exact);
    if (is_query) return;
    kvl_encode_range(KVL_SLAB_ARGS, table, tables, kvl_side_rows(stage, 0, h, !is_value, view, first), h, !is_value, first, end, view,
                     status);
    KVL_COUNT_CUT(status, n)
}
#endif

/* Copies the rows that stay in full precision (sinks, newest tail) from the stage; one work-item a kv head, token and side. */
kernel void kvl_keep_exact(global const ulong *table, ulong table_offset, global const float *stage, global uchar *exact, ulong exact_offset,
                           KVL_VIEW_PARAMS)
{
    table += table_offset;
    const uint h = get_global_id(0), is_k = get_global_id(2) == 0, ring = is_k ? k_ring : v_ring;
    KVL_HEAD_VIEW(h)
    const kvl_view view = KVL_VIEW_INIT;
    const uint token = p0 + get_global_id(1);
    if (token >= p0 + n) return; /* of a head whose sequence ends before */
    if (token >= sink && token + ring < p0 + n) return; /* not a sink and older than the newest `ring` */
    if (token >= sink && ring == 0) return;
    const kvl_rows rows = kvl_side_rows(stage, exact, h, is_k, view, token);
    global uchar *base = exact + exact_offset + kvl_exact_at(h, is_k, view);
    const ulong at = (ulong)kvl_exact_index(rows, token) * rows.width;
    for (uint c = 0; c < rows.width; c++) {
        const float value = kvl_row_at(rows, 0, c);
#if KVL_EXACT_HALF
        kvl_store_half(base, at + c, value);
#else
        ((global float *)base)[at + c] = value;
#endif
    }
}

/* For checks: decodes tokens [first, first + count) of one side to out [H][count][DK or DV]; one work-item a kv head and token. */
kernel void kvl_decode_rows(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, uint first, uint count, uint is_k,
                            global const float *tables, global float *out, KVL_VIEW_PARAMS)
{
    const kvl_view view = KVL_VIEW_INIT;
    table += table_offset;
    const uint h = get_global_id(0), i = get_global_id(1), slot = first + i - sink;
    const uint width = is_k ? KVL_DK : KVL_DV;
    global float *row = out + ((ulong)h * count + i) * width;
    const global uchar *block = kvl_page(KVL_SLAB_ARGS, table[is_k ? kvl_k_entry(h, slot, view) : kvl_v_entry(h, slot, view)]);
    for (uint c = 0; c < width; c += 8) {
        float o[8];
        if (is_k) kvl_k_load8(block, kvl_k_table(tables, h, view), slot % KVL_K_P, c, o);
        else kvl_v_load8(block, kvl_v_table(tables, h, view), slot % KVL_V_P, c, o);
        for (uint j = 0; j < 8; j++) row[c + j] = o[j];
    }
}
