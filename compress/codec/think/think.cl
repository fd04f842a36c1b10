/* Device body of think: KVL_OPT_KEPT channels [slot][P], binary16. table[c]: the slot of channel c, negative if it is dropped. */
#define AT(t, slot) ((ulong)(slot) * KVL_P + (t))

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    for (uint i = 0; i < 8; i++) o[i] = table[c + i] < 0.0f ? 0.0f : kvl_load_half(block, AT(t, (uint)table[c + i]));
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
    for (uint c = 0; c < KVL_D; c++) {
        if (table[c] < 0.0f) continue;
        for (uint i = 0; i < n; i++) kvl_store_half(block, AT(t0 + i, (uint)table[c]), kvl_clamp_half(kvl_row_at(x, i, c)));
    }
}

void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    kvl_move_halves(to, t_to, from, t_from, KVL_OPT_KEPT, KVL_P);
}

#if KVL_VECTORS
#define WIDE (KVL_SLICE % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux) {}

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q, const KVL_QS float *aux,
                    KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
        float16 dot[WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
        for (uint c = 0; c < KVL_D; c++) {
            if (table[c] < 0.0f) continue;
            const KVL_GLOBAL half *keys = (const KVL_GLOBAL half *)block + AT(t0 + t, (uint)table[c]);
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 k = vload_half16(w, keys);
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) dot[w * KVL_NQ + r] = fma(q[r * KVL_D + c], k, dot[w * KVL_NQ + r]);
            }
        }
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) vstore16(dot[i], 0, out + i % KVL_NQ * KVL_B + t + i / KVL_NQ * 16);
    }
}
#undef WIDE
#endif
#undef AT
