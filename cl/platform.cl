/* platform.cl: helpers shared by all cache kernels. KVL_VECTORS is 1 where 16 floats fit a register or a few (the device's native vector width is above 1): bodies then work on
 * float16; elsewhere vectors are made of work-items, and scalar twins run. The same text compiles as C11 for sanitizer tests
 * (tests/codec/device_as_c.h supplies the OpenCL words). Scalar code here is IEEE: contraction off, fma() written out where wanted. */
#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT OFF
#define KVL_GLOBAL global
#define KVL_LOCAL local
#define KVL_UNROLL _Pragma("unroll") /* arrays of vectors stay in registers only if the loops over them are unrolled */
#endif

/* what(0) ... what(7), written out: llvmpipe ends a work-item's loops after 65,535 iterations in all. */
#define KVL_EIGHT(what) what(0) what(1) what(2) what(3) what(4) what(5) what(6) what(7)

/* Largest finite binary16: what non-finite and larger inputs are clamped to before they are stored in 16 bits. */
#define KVL_HALF_MAX 65504.0f

float kvl_clamp_half(float x) { return isnan(x) ? 0.0f : fmin(fmax(x, -KVL_HALF_MAX), KVL_HALF_MAX); }

/* Binary16 element i at p (2-byte aligned). */
float kvl_load_half(const KVL_GLOBAL uchar *p, ulong i) { return vload_half(i, (const KVL_GLOBAL half *)p); }
void kvl_store_half(KVL_GLOBAL uchar *p, ulong i, float x) { vstore_half_rte(x, i, (KVL_GLOBAL half *)p); }

/* Number t_from of each of n rows of `row` binary16 numbers becomes number t_to of the same row elsewhere, to the bit. */
void kvl_move_halves(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from, uint n, uint row)
{
    for (uint i = 0; i < n; i++) ((KVL_GLOBAL ushort *)to)[(ulong)i * row + t_to] = ((const KVL_GLOBAL ushort *)from)[(ulong)i * row + t_from];
}

/* a / b correctly rounded, whatever the rounding of the device's division; neither is subnormal nor near it. */
float kvl_divide(float a, float b)
{
    float y = 1.0f / b;
    y = fma(fma(-b, y, 1.0f), y, y);
    y = fma(fma(-b, y, 1.0f), y, y);
    float q = a * y;
    q = fma(fma(-q, b, a), y, q);
    return fma(fma(-q, b, a), y, q);
}

#if KVL_VECTORS
/* A whole-vector store: PoCL's vstore16 makes four, and a load of all of them then waits until they have left the store buffer. */
typedef float16 kvl_float16_unaligned __attribute__((aligned(4)));
#define KVL_STORE16(v, p) (*(kvl_float16_unaligned *)(p) = (v))

/* Codes j of vectors of words, `bits` wide: bytes[k] holds byte k of every word, and a code lies in one byte or two. j is known to the compiler
 * where the loop around it is unrolled. */
#define KVL_SHIFT_OF(j, bits) ((uchar)((j) * (bits) % 8))
#define KVL_IS_SPLIT(j, bits) ((j) * (bits) % 8 + (bits) > 8)
#define KVL_LOW_BYTE(bytes, j, bits) (bytes)[(j) * (bits) / 8]
#define KVL_HIGH_BITS(bytes, j, bits)                                                                                              \
    (KVL_IS_SPLIT(j, bits) ? (bytes)[(j) * (bits) / 8 + KVL_IS_SPLIT(j, bits)] << (uchar)(8 - (j) * (bits) % 8) : (bytes)[0] & (uchar)0)
#define KVL_CODES(bytes, j, bits)                                                                                                  \
    ((KVL_LOW_BYTE(bytes, j, bits) >> KVL_SHIFT_OF(j, bits) | KVL_HIGH_BITS(bytes, j, bits)) & (uchar)((1 << (bits)) - 1))

/* Codes in words of one or more bytes as lanes of a vector, for sums of values.
 *
 * kvl_words: n words (16, 8 or 4) of 1 to 3 bytes as lanes, again and again if they are fewer than 16; byte k of them begins at p + k * stride.
 * kvl_code_at: the bit at which code j of a lane's word begins; of 8 words it is code 2 j, then 2 j + 1, of 4 words 4 j .. 4 j + 3.
 * kvl_code_numbers: the codes there as numbers KVL_CODE_BASE + code * KVL_CODE_STEP. 8 bits are converted, fewer go to the top of the mantissa of 1.0:
 * one rotation and one and-or, where a conversion would wait for the ports of fma. (Scores would lose two bits to the base, which is larger than the
 * codes, and sums of weights do not: they are at most 1.) */
#define KVL_WORDS_ABREAST(n_words, codes) ((n_words) % 16 == 0 ? 16 : (n_words) == 4 && (codes) % 4 == 0 ? 4 : (n_words) % 8 == 0 ? 8 : 0)
#define KVL_CODES_ABREAST(n_words, codes) ((n_words) == 8 && (codes) % 2 == 0 ? 2 : (n_words) == 4 && (codes) % 4 == 0 ? 4 : 1)
#define KVL_CODE_STEP(bits) ((bits) == 8 ? 1.0f : 1.0f / (1 << (bits)))
#define KVL_CODE_BASE(bits) ((bits) == 8 ? 0.0f : 1.0f)

#define KVL_WORDS(n) (convert_uint##n(vload##n(0, p)) | (bytes > 1 ? convert_uint##n(vload##n(0, p + stride)) << 8 : (uint##n)0) | \
                      (bytes > 2 ? convert_uint##n(vload##n(0, p + 2 * stride)) << 16 : (uint##n)0))
uint16 kvl_words(const KVL_GLOBAL uchar *p, ulong stride, uint bytes, uint n)
{
    if (n == 16) return KVL_WORDS(16);
    if (n == 8) return (uint16)(KVL_WORDS(8), KVL_WORDS(8));
    return (uint16)(KVL_WORDS(4), KVL_WORDS(4), KVL_WORDS(4), KVL_WORDS(4));
}

uint16 kvl_code_at(uint j, uint bits, uint codes_abreast)
{
    if (codes_abreast == 4) return bits * (4 * j + (uint16)((uint4)0, (uint4)1, (uint4)2, (uint4)3));
    if (codes_abreast == 2) return bits * (2 * j + (uint16)((uint8)0, (uint8)1));
    return bits * j;
}

float16 kvl_code_numbers(uint16 words, uint16 at, uint bits)
{
    if (bits == 8) return convert_float16(as_int16(words));
    return as_float16((rotate(words, (23 - bits - at) & 31) & ((1u << bits) - 1) << (23 - bits)) | 0x3f800000u);
}

/* What is at p gains v, or its first 8 lanes. */
void kvl_add_lanes(float *p, float16 v, uint lanes)
{
    if (lanes == 16) KVL_STORE16(vload16(0, p) + v, p);
    else vstore8(vload8(0, p) + v.lo, 0, p);
}

/* table[code] of codes below 16. */
#ifdef __clang__ /* one instruction where shuffle() may be a loop */
#define KVL_PICK(i) table[codes.s##i]
#define KVL_PICK16(type)                                                                                                           \
    (type)(KVL_PICK(0), KVL_PICK(1), KVL_PICK(2), KVL_PICK(3), KVL_PICK(4), KVL_PICK(5), KVL_PICK(6), KVL_PICK(7), KVL_PICK(8),    \
           KVL_PICK(9), KVL_PICK(a), KVL_PICK(b), KVL_PICK(c), KVL_PICK(d), KVL_PICK(e), KVL_PICK(f))
#else
#define KVL_PICK16(type) shuffle(table, codes)
#endif
char16 kvl_pick16(char16 table, uchar16 codes) { return KVL_PICK16(char16); }
float16 kvl_pick_floats(float16 table, uint16 codes) { return KVL_PICK16(float16); }

float kvl_sum16(float16 v)
{
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    const float2 c = b.lo + b.hi;
    return c.x + c.y;
}
/* The larger one, in one instruction, unlike fmax(); a NaN of b is left out. */
float16 kvl_larger(float16 a, float16 b) { return select(a, b, b > a); }
float kvl_larger1(float a, float b) { return b > a ? b : a; }
float kvl_max16(float16 v)
{
    const float8 a = select(v.lo, v.hi, v.hi > v.lo);
    const float4 b = select(a.lo, a.hi, a.hi > a.lo);
    return kvl_larger1(kvl_larger1(b.x, b.y), kvl_larger1(b.z, b.w));
}

/* exp of x <= 0: within 1.5 * 2^-24 of it for x > -10, 5 * 2^-24 for x > -87, then 0. Half the instructions of PoCL's exp. x = n ln 2 + f, exp(f) by
 * its minimax polynomial on +-ln(2) / 2, and n goes into the exponent. NaN stays NaN. */
float16 kvl_exp_negative(float16 x)
{
    const float16 shifted = fma(x, (float16)0x1.715476p0f, (float16)0x1.8p23f), n = shifted - 0x1.8p23f;
    const float16 f = fma(n, (float16)-0x1.62e43p-1f, x);
    float16 p = fma(f, (float16)0x1.6a2436p-10f, (float16)0x1.1239e2p-7f);
    p = fma(p, f, (float16)0x1.5558f2p-5f);
    p = fma(p, f, (float16)0x1.555492p-3f);
    p = fma(p, f, (float16)0x1.fffffcp-2f);
    p = fma(p, f, (float16)1.0f);
    p = fma(p, f, (float16)1.0f);
    return select(as_float16(as_int16(p) + (as_int16(shifted) << 23)), (float16)0.0f, x < -87.0f);
}
#endif
