/* F32: a column is 32 floats, each as its low and its high word. */
#define KVL_W_COLS 32
#define KVL_W_BYTES 128

KVL_W_INLINE void w_load32(const global ushort *panel, ulong b, w_float *o)
{
    const global ushort *p = KVL_W_COLUMN(panel, b);
#pragma unroll
    for (uint i = 0; i < 32; i++)
        o[i] = W_FORM(as_float)(W_FORM(convert_uint)(w_word(p, 2 * i)) | W_FORM(convert_uint)(w_word(p, 2 * i + 1)) << 16);
}
