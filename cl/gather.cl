/* gather.cl: the tokens that stay leave a prompt's full-precision rows for the stage, from where they are stored like any others. */

/* What becomes of keys that RoPE has turned by their positions: nothing, turned on to their places, or turned back. */
enum { KVL_GATHER_AS_THEY_ARE, KVL_GATHER_TO_PLACES, KVL_GATHER_UNTURNED };

/* Each head's kept tokens at places first, first + 1, ... kept: offsets [H + 1], then positions, ascending in a head. One work-item a head and
 * place. */
kernel void kvl_gather(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global const uint *kept, uint first, uint turn,
                       global const float2 *rotary, uint rope_dim, global float *stage, KVL_VIEW_PARAMS)
{
    const kvl_view view = KVL_VIEW_INIT;
    table += table_offset;
    const uint h = get_global_id(0), i = get_global_id(1), place = first + i;
    if (place >= kept[h + 1] - kept[h]) return;
    const uint token = kept[KVL_H + 1 + kept[h] + place];
    const global uchar *k_block = kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, token, view)]);
    const global uchar *v_block = kvl_page(KVL_SLAB_ARGS, table[kvl_v_entry(h, token, view)]);
    global float *k = stage + (ulong)i * q_stride + KVL_QKV_K(h), *v = stage + (ulong)i * q_stride + KVL_QKV_V(h);
    for (uint c = 0; c < KVL_HD; c += 8) {
        float o[8];
        kvl_k_load8(k_block, 0, token % KVL_K_P, c, o);
        for (uint j = 0; j < 8; j++) k[c + j] = o[j];
#if !KVL_JOINT
        kvl_v_load8(v_block, 0, token % KVL_V_P, c, o);
        for (uint j = 0; j < 8; j++) v[c + j] = o[j];
#endif
    }
    if (turn == KVL_GATHER_AS_THEY_ARE) return;
    k += KVL_ROPE_FIRST;
    global const float2 *from = rotary + (ulong)token * (rope_dim / 2), *to = rotary + (ulong)place * (rope_dim / 2);
    for (uint c = 0; c < rope_dim / 2; c++) {
        const float a = fma(k[2 * c], from[c].x, k[2 * c + 1] * from[c].y), b = fma(k[2 * c + 1], from[c].x, -(k[2 * c] * from[c].y));
        k[2 * c] = turn == KVL_GATHER_UNTURNED ? a : fma(a, to[c].x, -(b * to[c].y));
        k[2 * c + 1] = turn == KVL_GATHER_UNTURNED ? b : fma(a, to[c].y, b * to[c].x);
    }
}
