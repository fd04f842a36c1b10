/* BF16: a column is 32 words, each the high half of a binary32. */
#define KVL_W_COLS 32
#define KVL_W_BYTES 64

KVL_W_INLINE void w_load32(const global ushort *panel, ulong b, w_float *o)
{
    const global ushort *p = KVL_W_COLUMN(panel, b);
#pragma unroll
    for (uint i = 0; i < 32; i++) o[i] = W_FORM(as_float)(W_FORM(convert_uint)(w_word(p, i)) << 16);
}
