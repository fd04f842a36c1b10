/* Q4_1: f16 d | f16 m | nibbles [16]        d code + m */
#define KVL_W_COLS 32
#define KVL_W_BYTES 20
#define KVL_W_GROUP 32
#define KVL_W_RUN 16
#define KVL_W_HAS_MIN 1

KVL_W_INLINE void w_codes(const global ushort *p, uint i, w_short *code)
{
    w_nibbles(p + 2 * 16, code);
}

KVL_W_INLINE w_float w_scale(const global ushort *p, uint g) { return w_half(p, 0); }
KVL_W_INLINE w_float w_min(const global ushort *p, uint g) { return w_half(p, 1); }
