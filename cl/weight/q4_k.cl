/* Q4_K: f16 d | f16 dmin | scales and minima [12] | nibbles [128]        (d s) code - (dmin m)
 * Groups 2 j and 2 j + 1 are the low and the high nibbles of the 32 bytes at 32 j. */
#define KVL_W_COLS 256
#define KVL_W_BYTES 144
#define KVL_W_GROUP 32
#define KVL_W_RUN 16
#define KVL_W_HAS_MIN 1

KVL_W_INLINE void w_codes(const global ushort *p, uint i, w_short *code)
{
    w_bit_fields(p + (8 + i / 2 * 16) * 16, i % 2 * 4, 15, code);
}

KVL_W_INLINE w_float w_scale(const global ushort *p, uint g) { return w_k_scale(p, g); }
KVL_W_INLINE w_float w_min(const global ushort *p, uint g) { return w_k_min(p, g); }
