/* Q8_0: f16 d | i8 code [32]        d code */
#define KVL_W_COLS 32
#define KVL_W_BYTES 34
#define KVL_W_GROUP 32
#define KVL_W_RUN 2
#define KVL_W_HAS_MIN 0

KVL_W_INLINE void w_codes(const global ushort *p, uint i, short16 *code)
{
#pragma unroll
    for (uint j = 0; j < 16; j++) {
        const short16 u = as_short16(w_word(p, j + 1));
        code[2 * j] = u << (short)8 >> (short)8;
        code[2 * j + 1] = u >> (short)8;
    }
}

KVL_W_INLINE float16 w_scale(const global ushort *p, uint g) { return w_half(p, 0); }
