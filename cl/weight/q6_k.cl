/* Q6_K: nibbles [128] | bit pairs [64] | i8 s [16] | f16 d        (d s) (code - 32), one s a group of 16
 * A half of 128 codes has 64 bytes of nibbles and 32 of pairs; its quarter r has its nibbles at byte 32 (r % 2), the low ones for
 * r < 2, and its pairs 2 r bits up. */
#define KVL_W_COLS 256
#define KVL_W_BYTES 210
#define KVL_W_GROUP 16
#define KVL_W_RUN 8
#define KVL_W_HAS_MIN 0

KVL_W_INLINE void w_codes(const global ushort *p, uint i, w_short *code)
{
    const uint part = i / 4, quarter = i % 4;
    w_short high[32];
    w_bit_fields(p + (part * 32 + quarter % 2 * 16) * 16, quarter / 2 * 4, 15, code);
    w_bit_fields(p + (64 + part * 16) * 16, quarter * 2, 3, high);
#pragma unroll
    for (uint k = 0; k < 32; k++) code[k] = (code[k] | high[k] << (short)4) - (short)32;
}

KVL_W_INLINE w_float w_scale(const global ushort *p, uint g)
{
    const w_short s = w_as_short(w_byte(p + 96 * 16, g) << (ushort)8) >> (short)8;
    return w_half(p, 104) * W_FORM(convert_float)(W_FORM(convert_int)(s));
}
