/* panel.cl: the packed layout of weights and what its bodies share.
 *
 * Rows of a matrix are taken 16 at a time: a panel, padded with zero rows. A row is a chain of the file's native blocks; in a panel
 * the 16 blocks of one block column lie interleaved in units of 2 bytes, so that one 16-wide load gives the same 2 bytes of each:
 *
 *   block column:  word 0 of rows 0..15 | word 1 of rows 0..15 | ...        (word: ushort, little-endian)
 *   panel:         block column 0 | block column 1 | ...
 *
 * Types without blocks (F32, F16, BF16) are cut into columns of 32 elements, padded with zeros. Nothing else changes: a weight
 * takes as many bytes as in the file. A body, cl/weight/<type>.cl, defines
 *
 *   KVL_W_COLS, KVL_W_BYTES    columns and bytes of a row's part of a block column
 *
 * and, if a weight is code * scale (+ min) with small integers as codes,
 *
 *   void w_codes(p, i, w_short *code)          codes of columns 32 i .. 32 i + 31 of the block column at p
 *   KVL_W_GROUP, w_float w_scale(p, g)         columns with one scale (32 or 16); that of columns GROUP g .. GROUP (g + 1) - 1
 *   KVL_W_HAS_MIN, w_float w_min(p, g)         1 and the minimum, else 0
 *   KVL_W_RUN                                  products with 8-bit activations that fit in 16 bits: RUN * max |code| * 127 < 32768
 *
 * else w_load32 (codes.cl) itself. All are written over w_float, w_short ...: with KVL_W_LANES = 16 those are vectors of the panel's 16 rows,
 * with 1 scalars of the row whose number was added to the panel's address. */
#ifndef KVL_W_LANES
#define KVL_W_LANES 16
#endif
#if KVL_W_LANES == 16
#define W_FORM(name) name##16
#define w_as_short(x) as_short16(x)
#else
#define W_FORM(name) name
#define w_as_short(x) ((short)(x)) /* small integers become int when they are computed with */
#endif
typedef W_FORM(float) w_float;
typedef W_FORM(short) w_short;
typedef W_FORM(ushort) w_ushort;
typedef W_FORM(uint) w_uint;

/* Convert binary16 with vload_half16 (1) or with integer operations, exact too (0). PoCL's vload_half16 is scalar code on AVX2; on AVX-512 the native
 * one is 25 % faster from cache, which is what counts there since weights lie in large pages. */
#ifndef KVL_W_HALF_NATIVE
#ifdef __AVX512F__
#define KVL_W_HALF_NATIVE 1
#else
#define KVL_W_HALF_NATIVE (KVL_HAS_FP16 || !KVL_DEVICE_CPU)
#endif
#endif

/* PoCL 3.1 leaves a function of this size with two call sites as a call and its result in memory: f32 GEMV of Q8_0 21 instead of 32
 * G weights/s. */
#define KVL_W_INLINE __attribute__((always_inline))

#define KVL_W_COLUMN(panel, block) ((panel) + (ulong)(block) * (KVL_W_BYTES * 8))

/* Word j. */
#if KVL_W_LANES == 16
KVL_W_INLINE w_ushort w_word(const global ushort *p, uint j) { return vload16(j, p); }
#else
KVL_W_INLINE w_ushort w_word(const global ushort *p, uint j) { return p[16 * j]; }
#endif

/* Byte i. */
KVL_W_INLINE w_ushort w_byte(const global ushort *p, uint i) { return w_word(p, i / 2) >> (ushort)(i % 2 * 8) & (ushort)255; }

/* Word j as binary16. The integer form: exponent and mantissa in binary32's place, rebased by a power of two. */
KVL_W_INLINE w_float w_half(const global ushort *p, uint j)
{
#if KVL_W_HALF_NATIVE
#if KVL_W_LANES == 16
    return vload_half16(j, (const global half *)p);
#else
    return vload_half(16 * j, (const global half *)p);
#endif
#else
    const w_uint u = W_FORM(convert_uint)(w_word(p, j));
    const w_float magnitude = W_FORM(as_float)((u & 0x7fffu) << 13) * 0x1p112f;
    const w_uint infinity = select((w_uint)0, (w_uint)0x7f800000u, magnitude >= 65536.0f);
    return W_FORM(as_float)(W_FORM(as_uint)(magnitude) | infinity | (u & 0x8000u) << 16);
#endif
}

/* ---- codes: what is stored for 32 columns, as w_short each ---- */

/* 16 bytes: code i is the low nibble of byte i, code 16 + i its high nibble. */
KVL_W_INLINE void w_nibbles(const global ushort *p, w_short *code)
{
#pragma unroll
    for (uint j = 0; j < 8; j++) {
        const w_ushort u = w_word(p, j);
        code[2 * j] = w_as_short(u & (ushort)15);
        code[2 * j + 1] = w_as_short(u >> (ushort)8 & (ushort)15);
        code[2 * j + 16] = w_as_short(u >> (ushort)4 & (ushort)15);
        code[2 * j + 17] = w_as_short(u >> (ushort)12);
    }
}

/* 32 bits: bit i is the fifth bit of code i. */
KVL_W_INLINE void w_fifth_bits(const global ushort *p, w_short *code)
{
    const w_ushort low = w_word(p, 0), high = w_word(p, 1);
#pragma unroll
    for (uint i = 0; i < 16; i++) {
        code[i] |= w_as_short((low >> (ushort)i & (ushort)1) << (ushort)4);
        code[i + 16] |= w_as_short((high >> (ushort)i & (ushort)1) << (ushort)4);
    }
}

/* 32 bytes: `mask` of byte i shifted right is code i. */
KVL_W_INLINE void w_bit_fields(const global ushort *p, uint shift, ushort mask, w_short *code)
{
#pragma unroll
    for (uint j = 0; j < 16; j++) {
        const w_ushort u = w_word(p, j) >> (ushort)shift;
        code[2 * j] = w_as_short(u & mask);
        code[2 * j + 1] = w_as_short(u >> (ushort)8 & mask);
    }
}

/* ---- scales of Q4_K and Q5_K: f16 d | f16 dmin | 12 bytes with 6-bit scales and minima of 8 groups of 32 ----
 * Bytes 0..3 hold scales 0..3, bytes 4..7 minima 0..3, their two high bits those of groups 4..7; bytes 8..11 hold the low nibbles
 * of the others: scale low, minimum high. */

KVL_W_INLINE w_float w_k_scale(const global ushort *p, uint group)
{
    const global ushort *packed = p + 2 * 16;
    const w_ushort s = group < 4 ? w_byte(packed, group) & (ushort)63
                                 : (w_byte(packed, group + 4) & (ushort)15) | w_byte(packed, group - 4) >> (ushort)6 << (ushort)4;
    return w_half(p, 0) * W_FORM(convert_float)(W_FORM(convert_int)(s));
}

KVL_W_INLINE w_float w_k_min(const global ushort *p, uint group)
{
    const global ushort *packed = p + 2 * 16;
    const w_ushort m = group < 4 ? w_byte(packed, group + 4) & (ushort)63
                                 : w_byte(packed, group + 4) >> (ushort)4 | w_byte(packed, group) >> (ushort)6 << (ushort)4;
    return -w_half(p, 1) * W_FORM(convert_float)(W_FORM(convert_int)(m));
}
