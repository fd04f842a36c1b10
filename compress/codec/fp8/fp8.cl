/* Device body of 8-bit floats: KVL_OPT_MANTISSA bits, exponent bias KVL_OPT_BIAS, largest number KVL_OPT_MAX. Layout and arithmetic:
 * card.md. Codes K [D][P], V [P][D]; then a scale per token, binary16. */
#if KVL_IS_K
#define AT(t, c) ((ulong)(c) * KVL_P + (t))
#else
#define AT(t, c) ((ulong)(t) * KVL_D + (c))
#endif
#define SCALES(block) ((block) + (ulong)KVL_P * KVL_D)
#define SHIFT (23 - KVL_OPT_MANTISSA)
#define POWER(e) as_float((uint)(127 + (e)) << 23) /* of 2 */

float KVL_FN(value)(uint code)
{
    const uint bits = code & 0x7f;
    const float subnormal = (float)bits * POWER(1 - KVL_OPT_BIAS - KVL_OPT_MANTISSA);
    const float magnitude = bits >> KVL_OPT_MANTISSA == 0 ? subnormal : as_float((bits << SHIFT) + ((127 - KVL_OPT_BIAS) << 23));
    return code & 0x80 ? -magnitude : magnitude;
}

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    const float scale = kvl_load_half(SCALES(block), t);
    for (uint i = 0; i < 8; i++) o[i] = KVL_FN(value)(block[AT(t, c + i)]) * scale;
}

/* y rounded to nearest even; |y| is in range. Zero has one code. */
uint KVL_FN(code)(float y)
{
    const float magnitude = fabs(y);
    uint bits = as_uint(magnitude);
    if (magnitude < POWER(1 - KVL_OPT_BIAS)) /* subnormal */
        bits = (uint)rint(magnitude * POWER(KVL_OPT_BIAS - 1 + KVL_OPT_MANTISSA));
    else
        bits = ((bits + (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1)) >> SHIFT) - ((127 - KVL_OPT_BIAS) << KVL_OPT_MANTISSA);
    return bits == 0 ? 0 : bits | (y < 0.0f ? 0x80 : 0);
}

void KVL_FN(encode_row)(KVL_GLOBAL uchar *block, uint t, kvl_rows x, uint row)
{
    float reach = 0.0f;
    for (uint c = 0; c < KVL_D; c++) reach = fmax(reach, fabs(kvl_clamp_half(kvl_row_at(x, row, c))));
    const float wanted = reach < 0x1p-100f ? 0.0f : kvl_divide(reach, (float)KVL_OPT_MAX);
    kvl_store_half(SCALES(block), t, wanted);
    /* rounded up, so that nothing is out of range */
    if (kvl_load_half(SCALES(block), t) < wanted) ((KVL_GLOBAL ushort *)SCALES(block))[t] += 1;
    const float scale = kvl_load_half(SCALES(block), t);
    for (uint c = 0; c < KVL_D; c++)
        block[AT(t, c)] = scale == 0.0f ? 0 : (uchar)KVL_FN(code)(kvl_divide(kvl_clamp_half(kvl_row_at(x, row, c)), scale));
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
    for (uint i = 0; i < n; i++) KVL_FN(encode_row)(block, t0 + i, x, i);
}

void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    for (uint c = 0; c < KVL_D; c++) to[AT(t_to, c)] = from[AT(t_from, c)];
    kvl_move_halves(SCALES(to), t_to, SCALES(from), t_from, 1, KVL_P);
}

#if KVL_VECTORS
/* Codes times a power of two: sign, exponent and mantissa move to their places in a binary32, whose exponent is then off by the difference of the
 * biases, for normal and subnormal codes alike. UNIT makes a factor of such numbers one of the codes' numbers. */
#define UNIT(scale) ((scale) * POWER(127 - KVL_OPT_BIAS))
float16 KVL_FN(unscaled)(uchar16 codes)
{
    return as_float16(convert_int16(as_char16(codes)) << SHIFT & (int)(0x80000000u | 0x7fu << SHIFT));
}

#if KVL_IS_K
#define WIDE (KVL_SLICE % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux) {}

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
        float16 dot[WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
        for (uint c = 0; c < KVL_D; c++) {
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 k = KVL_FN(unscaled)(vload16(0, block + AT(t0 + t + 16 * w, c)));
                kvl_add_to_rows(dot + w * KVL_NQ, q + c, KVL_D, k);
            }
        }
        KVL_UNROLL for (uint w = 0; w < WIDE; w++)
        {
            const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)SCALES(block) + t0 + t + 16 * w);
            KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) KVL_STORE16(dot[w * KVL_NQ + r] * UNIT(scale), out + r * KVL_B + t + 16 * w);
        }
    }
}
#else
#define WIDE (KVL_D % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p,
                        KVL_QS float *acc)
{
    float scaled[KVL_NQ * KVL_SLICE]; /* p * scale */
    for (uint i = 0; i < KVL_NQ * KVL_SLICE; i += 16) {
        const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)SCALES(block) + t0 + i % KVL_SLICE);
        KVL_STORE16(UNIT(scale) * vload16(0, p + i / KVL_SLICE * KVL_B + i % KVL_SLICE), scaled + i);
    }
    for (uint c = 0; c < KVL_D; c += 16 * WIDE) {
        float16 sum[WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) sum[i] = vload16(0, acc + i % KVL_NQ * KVL_D + c + i / KVL_NQ * 16);
        for (uint t = 0; t < KVL_SLICE; t++) {
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 v = KVL_FN(unscaled)(vload16(0, block + AT(t0 + t, c + 16 * w)));
                kvl_add_to_rows(sum + w * KVL_NQ, scaled + t, KVL_SLICE, v);
            }
        }
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) KVL_STORE16(sum[i], acc + i % KVL_NQ * KVL_D + c + i / KVL_NQ * 16);
    }
}
#endif
#undef WIDE
#undef UNIT
#endif
#undef AT
#undef SCALES
#undef SHIFT
#undef POWER
