/* Q5_0: f16 d | high bits [4] | nibbles [16]        d (code - 16) */
#define KVL_W_COLS 32
#define KVL_W_BYTES 22
#define KVL_W_GROUP 32
#define KVL_W_RUN 16
#define KVL_W_HAS_MIN 0

KVL_W_INLINE void w_codes(const global ushort *p, uint i, w_short *code)
{
    w_nibbles(p + 3 * 16, code);
    w_fifth_bits(p + 16, code);
#pragma unroll
    for (uint k = 0; k < 32; k++) code[k] -= (short)16;
}

KVL_W_INLINE w_float w_scale(const global ushort *p, uint g) { return w_half(p, 0); }
