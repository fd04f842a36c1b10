/* Q4_0: f16 d | nibbles [16]        d (code - 8) */
#define KVL_W_COLS 32
#define KVL_W_BYTES 18
#define KVL_W_GROUP 32
#define KVL_W_RUN 32
#define KVL_W_HAS_MIN 0

KVL_W_INLINE void w_codes(const global ushort *p, uint i, w_short *code)
{
    w_nibbles(p + 16, code);
#pragma unroll
    for (uint k = 0; k < 32; k++) code[k] -= (short)8;
}

KVL_W_INLINE w_float w_scale(const global ushort *p, uint g) { return w_half(p, 0); }
