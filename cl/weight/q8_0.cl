/* Q8_0: f16 d | i8 code [32]        d code */
#define KVL_W_COLS 32
#define KVL_W_BYTES 34
#define KVL_W_GROUP 32
#define KVL_W_RUN 2
#define KVL_W_HAS_MIN 0

KVL_W_INLINE void w_codes(const global ushort *p, uint i, w_short *code)
{
#pragma unroll
    for (uint j = 0; j < 16; j++) {
        const w_ushort u = w_word(p, j + 1);
        code[2 * j] = w_as_short(u << (ushort)8) >> (short)8;
        code[2 * j + 1] = w_as_short(u) >> (short)8;
    }
}

KVL_W_INLINE w_float w_scale(const global ushort *p, uint g) { return w_half(p, 0); }
