/* append.cl: from a row of the stage to a page. */

/* Keys and values that may be read in full precision are rounded to what the exact rows hold, so that it does not matter where a row is read
 * from. */
void kvl_round_row(float *x, uint n)
{
    for (uint c = 0; c < n; c++) {
        ushort bits;
        vstore_half_rte(x[c], 0, (half *)&bits);
        x[c] = vload_half(0, (const half *)&bits);
    }
}

/* The kv head that a head of the stage belongs to; of a layer without projections that is the stream. */
uint kvl_kv_head(uint head) { return head < KVL_H * KVL_G ? head / KVL_G : (head - KVL_H * KVL_G) % KVL_H; }

/* What RoPE's angle lags behind the position. */
#if KVL_RAGGED && KVL_COMPACT
#define KVL_ROPE_SHIFT(head) ((uint)KVL_HEAD_SHIFT(kvl_kv_head(head)))
#else
#define KVL_ROPE_SHIFT(head) 0u
#endif

#if KVL_K_RANK == 0 && KVL_V_RANK == 0
/* Makes a projected row what attention and the codec want of it: record.cl. */
void kvl_finish(float *x, kvl_turn turn, uint position, bool is_query, bool is_value, bool is_rounded)
{
    const bool is_record = KVL_ROPE_PRE ? !is_query : true; /* a query undergoes what stored keys do, unless these are restored when read */
    if (KVL_ROPE_PRE ? is_query : !is_value) kvl_rope_row(x, turn, position);
    if (!is_value && is_record) kvl_order_row(x, turn.rope_dim, false);
    if (is_record) kvl_rotate_key(x, turn); /* values are as wide as keys here, and so have the same rotation */
    if (is_rounded) kvl_round_row(x, KVL_HD);
}

/* The same for a row of the stage, in place. round_exact: see kvl_round_row. head counts query heads, then keys, then values. */
void kvl_finish_row(global float *stage, kvl_turn turn, uint position, uint token, uint head, uint q_stride, uint round_exact)
{
    const bool is_query = head < KVL_H * KVL_G, is_value = head >= KVL_H * (KVL_G + 1);
    const bool is_rounded = KVL_EXACT_HALF && round_exact && !is_query;
#if KVL_K_ROT_M == 0
    if (is_value && !is_rounded) return;
#endif
    const uint h = kvl_kv_head(head);
    global float *row = stage + (ulong)token * q_stride + (is_query ? KVL_QKV_Q(head) : is_value ? KVL_QKV_V(h) : KVL_QKV_K(h));
    float x[KVL_HD];
    for (uint c = 0; c < KVL_HD; c++) x[c] = row[c];
    kvl_finish(x, turn, position, is_query, is_value, is_rounded);
    for (uint c = 0; c < KVL_HD; c++) row[c] = x[c];
}
#elif KVL_LAYERS > 1
/* The same where layers share records: RoPE and order alone. head counts query heads, the keys of all kv heads, their values. */
void kvl_finish_row(global float *stage, kvl_turn turn, uint position, uint token, uint head, uint q_stride, uint round_exact)
{
    const bool is_query = head < KVL_H * KVL_G, is_value = head >= KVL_H * (KVL_G + KVL_HEADS);
    global float *row = stage + (ulong)token * q_stride + head * KVL_HD;
    float x[KVL_HD];
    for (uint c = 0; c < KVL_HD; c++) x[c] = row[c];
    if (KVL_ROPE_PRE ? is_query : !is_value) kvl_rope_row(x, turn, position);
    if (!is_query && !is_value) kvl_order_row(x, turn.rope_dim, false);
    if (KVL_EXACT_HALF && round_exact && !is_query) kvl_round_row(x, KVL_HD);
    for (uint c = 0; c < KVL_HD; c++) row[c] = x[c];
}
#endif

/* llvmpipe ends all loops of a work-item after 65,535 iterations in sum, and says nothing; one that should go round twice then does so once. status[2] counts
 * such work-items; rounds: 2, which the compiler must not know. At the end of a kernel. */
#if KVL_DEVICE_CPU && !KVL_VECTORS
void kvl_count_cut(global uint *status, uint rounds)
{
    uint i = 0;
    while (i < rounds) i++;
    if (i != rounds) atomic_inc(status + 2);
}
#define KVL_COUNT_CUT(status, n) kvl_count_cut(status, 1 + min(n, 1u));
#else
#define KVL_COUNT_CUT(status, n)
#endif

/* Encodes tokens [first, end), which lie in one page of head h's keys or values. status[0] counts non-finite inputs. */
void kvl_encode_range(KVL_SLAB_PARAMS, global const ulong *table, global const float *tables, kvl_rows rows, uint h, bool is_k, uint first, uint end,
                      kvl_view view, global uint *status)
{
    uint bad = 0;
    for (uint i = 0; i < end - first; i++)
        for (uint c = 0; c < rows.width; c += 8)
            KVL_UNROLL for (uint j = 0; j < 8; j++) bad += !isfinite(kvl_row_at(rows, i, c + j));
    if (bad != 0) atomic_add(status, bad);
    rows.status = status;
    const uint slot = first - view.sink;
    global uchar *block = kvl_page(KVL_SLAB_ARGS, table[is_k ? kvl_k_entry(h, slot, view) : kvl_v_entry(h, slot, view)]);
    if (is_k) kvl_k_encode(block, kvl_k_table(tables, h, view), slot % KVL_K_P, end - first, rows);
    else kvl_v_encode(block, kvl_v_table(tables, h, view), slot % KVL_V_P, end - first, rows);
}
