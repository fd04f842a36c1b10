/* codes.cl: w_load32 of the types whose weights are codes: columns 32 b .. 32 b + 31 of a panel's 16 rows, bit-equal to the C
 * reference. A product scale * code has at most 24 significant bits: it is exact, and the fma rounds once,
 * like the reference. */
#ifdef KVL_W_RUN
KVL_W_INLINE void w_load32(const global ushort *panel, ulong b, w_float *o)
{
    const global ushort *p = KVL_W_COLUMN(panel, b * 32 / KVL_W_COLS);
    const uint i = b % (KVL_W_COLS / 32);
    w_short code[32];
    w_codes(p, i, code);
#pragma unroll
    for (uint g = 0; g < 32 / KVL_W_GROUP; g++) {
        const w_float scale = w_scale(p, i * (32 / KVL_W_GROUP) + g);
#if KVL_W_HAS_MIN
        const w_float min = w_min(p, i * (32 / KVL_W_GROUP) + g);
#endif
#pragma unroll
        for (uint k = g * KVL_W_GROUP; k < (g + 1) * KVL_W_GROUP; k++)
#if KVL_W_HAS_MIN
            o[k] = fma(W_FORM(convert_float)(W_FORM(convert_int)(code[k])), scale, min);
#else
            o[k] = W_FORM(convert_float)(W_FORM(convert_int)(code[k])) * scale;
#endif
    }
}
#endif
