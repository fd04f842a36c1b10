/* Device body of ggml's block formats: KVL_OPT_BITS 8, 5 or 4; KVL_OPT_OFFSET is subtracted from codes; KVL_OPT_MIN adds a minimum to
 * each block; KVL_OPT_NONLINEAR looks codes up. Layout and arithmetic: card.md. Byte row b of a token: K [rows][P], V [P][rows]; then
 * scale (and minimum) per block and token, binary16. */
#define BLOCK 32
#define N_BLOCKS (KVL_D / BLOCK)
#define CODE_BYTES (BLOCK * KVL_OPT_BITS / 8)
#define LOW_ROW (KVL_OPT_BITS == 5 ? BLOCK / 8 : 0) /* the fifth bits come first */
#define SPAN (KVL_OPT_BITS == 8 ? BLOCK : 16) /* channels of one byte are SPAN apart */
#define TOKEN_BYTES (N_BLOCKS * CODE_BYTES)
#if KVL_IS_K
#define ROW_STRIDE ((ulong)KVL_P)
#define TOKEN_STRIDE 1ul
#else
#define ROW_STRIDE 1ul
#define TOKEN_STRIDE ((ulong)TOKEN_BYTES)
#endif
#define CODES_AT(block, t, k) ((block) + (ulong)(t)*TOKEN_STRIDE + (ulong)(k)*CODE_BYTES * ROW_STRIDE) /* row 0 of block k */
#define PARAMS(block) ((block) + (ulong)TOKEN_BYTES * KVL_P)
#define SCALE_AT(k, t) ((ulong)(k) * (1 + KVL_OPT_MIN) * KVL_P + (t))
#define MIN_AT(k, t) (SCALE_AT(k, t) + KVL_P)

#if KVL_OPT_NONLINEAR
constant char KVL_FN(values)[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#define NUMBER(code) ((float)KVL_FN(values)[code])
#elif KVL_OPT_BITS == 8
#define NUMBER(code) ((float)as_char((uchar)(code)))
#else
#define NUMBER(code) ((float)((int)(code)-KVL_OPT_OFFSET))
#endif

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    const KVL_GLOBAL uchar *at = CODES_AT(block, t, c / BLOCK);
    const float scale = kvl_load_half(PARAMS(block), SCALE_AT(c / BLOCK, t));
    for (uint j = 0; j < 8; j++) {
        const uint i = c % BLOCK + j;
#if KVL_OPT_BITS == 8
        uint code = at[i * ROW_STRIDE];
#else
        uint code = at[(LOW_ROW + i % 16) * ROW_STRIDE] >> i / 16 * 4 & 15;
#endif
#if KVL_OPT_BITS == 5
        code |= (at[i / 8 * ROW_STRIDE] >> i % 8 & 1) << 4;
#endif
#if KVL_OPT_MIN
        o[j] = fma(NUMBER(code), scale, kvl_load_half(PARAMS(block), MIN_AT(c / BLOCK, t)));
#else
        o[j] = NUMBER(code) * scale;
#endif
    }
}

/* 1 / d correctly rounded, whatever the rounding of the device's division: two Newton steps, and the one mantissa they can miss. */
float KVL_FN(reciprocal)(float d)
{
    if (fabs(d) < 0x1p-100f) return 0.0f;
    const uint bits = as_uint(d);
    if ((bits & 0x7fffff) == 0x7fffff) return as_float((bits & 0x80000000) | (253 - (bits >> 23 & 255)) << 23 | 1);
    float y = 1.0f / d;
    y = fma(fma(-d, y, 1.0f), y, y);
    return fma(fma(-d, y, 1.0f), y, y);
}

/* a / b correctly rounded, given the correctly rounded reciprocal of b. */
float KVL_FN(divide)(float a, float b, float inverse)
{
    float q = a * inverse;
    q = fma(fma(-q, b, a), inverse, q);
    return fma(fma(-q, b, a), inverse, q);
}

#if KVL_OPT_NONLINEAR
#define CODE(y) KVL_FN(nearest)(y)
uint KVL_FN(nearest)(float y)
{
    uint code = 0;
    for (uint i = 0; i < 15; i++) code += 2.0f * y >= NUMBER(i) + NUMBER(i + 1);
    return code;
}
#elif KVL_OPT_BITS == 8
#define CODE(y) ((uint)(int)round(y) & 255)
#else
#define CODE_MAX ((float)((1 << KVL_OPT_BITS) - 1))
#define CODE(y) ((uint)fmin((y) + (KVL_OPT_OFFSET + 0.5f), CODE_MAX))
#endif

/* Channel i of block k of a row. */
float KVL_FN(input)(kvl_rows x, uint row, uint k, uint i) { return kvl_clamp_half(kvl_row_at(x, row, k * BLOCK + i)); }

/* Scale and, where the format has none, 0 as minimum: codes are CODE((x - low) * reciprocal(scale)). */
float KVL_FN(fit)(kvl_rows x, uint row, uint k, float *low)
{
#if KVL_OPT_MIN
    float high = *low = KVL_FN(input)(x, row, k, 0);
    for (uint i = 1; i < BLOCK; i++) {
        const float value = KVL_FN(input)(x, row, k, i);
        *low = fmin(*low, value);
        high = fmax(high, value);
    }
    return KVL_FN(divide)(high - *low, CODE_MAX, KVL_FN(reciprocal)(CODE_MAX));
#else
    float extreme = 0.0f; /* the first of the largest magnitude */
    for (uint i = 0; i < BLOCK; i++) {
        const float value = KVL_FN(input)(x, row, k, i);
        if (fabs(value) > fabs(extreme)) extreme = value;
    }
    *low = 0.0f;
#if KVL_OPT_BITS == 8
    return KVL_FN(divide)(fabs(extreme), 127.0f, KVL_FN(reciprocal)(127.0f));
#elif KVL_OPT_NONLINEAR
    return KVL_FN(divide)(extreme, -127.0f, KVL_FN(reciprocal)(-127.0f));
#else
    return extreme * (-1.0f / KVL_OPT_OFFSET); /* a power of two */
#endif
#endif
}

void KVL_FN(store_codes)(KVL_GLOBAL uchar *at, const uint *code)
{
#if KVL_OPT_BITS == 8
    for (uint i = 0; i < BLOCK; i++) at[i * ROW_STRIDE] = (uchar)code[i];
#else
    for (uint i = 0; i < 16; i++) at[(LOW_ROW + i) * ROW_STRIDE] = (uchar)((code[i] & 15) | (code[i + 16] & 15) << 4);
#endif
#if KVL_OPT_BITS == 5
    for (uint b = 0; b < BLOCK / 8; b++) {
        uint byte = 0;
        for (uint i = 0; i < 8; i++) byte |= code[b * 8 + i] >> 4 << i;
        at[b * ROW_STRIDE] = (uchar)byte;
    }
#endif
}

/* Binary16, but +0 for all that rounds to zero. */
void KVL_FN(store_param)(KVL_GLOBAL uchar *block, ulong i, float x)
{
    kvl_store_half(PARAMS(block), i, fabs(x) <= 0x1p-25f ? 0.0f : x);
}

void KVL_FN(encode_block)(KVL_GLOBAL uchar *block, uint t, uint k, kvl_rows x, uint row)
{
    float low, scale = KVL_FN(fit)(x, row, k, &low);
    const float inverse = KVL_FN(reciprocal)(scale);
    uint code[BLOCK];
    for (uint i = 0; i < BLOCK; i++) code[i] = CODE((KVL_FN(input)(x, row, k, i) - low) * inverse);
    KVL_FN(store_codes)(CODES_AT(block, t, k), code);
#if KVL_OPT_NONLINEAR
    if (fabs(scale) < 0x1p-28f) {
        scale = 0.0f; /* so would be what fits, whose sums could underflow */
    } else { /* the scale that fits the codes best, weighted by x^2 */
        float xq = 0.0f, qq = 0.0f;
        for (uint i = 0; i < BLOCK; i++) {
            const float value = KVL_FN(input)(x, row, k, i), q = NUMBER(code[i]), wq = value * value * q;
            xq += wq * value;
            qq += wq * q;
        }
        scale = KVL_FN(divide)(xq, qq, KVL_FN(reciprocal)(qq));
    }
#endif
    KVL_FN(store_param)(block, SCALE_AT(k, t), scale);
#if KVL_OPT_MIN
    KVL_FN(store_param)(block, MIN_AT(k, t), low);
#endif
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
    for (uint i = 0; i < n; i++)
        for (uint k = 0; k < N_BLOCKS; k++) KVL_FN(encode_block)(block, t0 + i, k, x, i);
}

void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    for (uint b = 0; b < TOKEN_BYTES; b++) CODES_AT(to, t_to, 0)[b * ROW_STRIDE] = CODES_AT(from, t_from, 0)[b * ROW_STRIDE];
    kvl_move_halves(PARAMS(to), t_to, PARAMS(from), t_from, N_BLOCKS * (1 + KVL_OPT_MIN), KVL_P);
}

#if KVL_VECTORS
#define HALVES (BLOCK / SPAN) /* codes of a byte */
#if KVL_OPT_NONLINEAR
#define VALUES16 ((char16)(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
float16 KVL_FN(numbers)(uchar16 codes) { return convert_float16(kvl_pick16(VALUES16, codes)); }
#elif KVL_OPT_BITS == 8
float16 KVL_FN(numbers)(uchar16 codes) { return convert_float16(as_char16(codes)); }
#else
float16 KVL_FN(numbers)(uchar16 codes) { return convert_float16(as_char16(codes) - (char)KVL_OPT_OFFSET); }
#endif

#if KVL_IS_K
#if KVL_OPT_MIN
/* aux[k] = sum of q over the block: the minimum's share of every score. */
void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux)
{
    for (uint k = 0; k < N_BLOCKS; k++) {
        float sum = 0.0f;
        for (uint i = 0; i < BLOCK; i++) sum += q[k * BLOCK + i];
        aux[k] = sum;
    }
}
#else
void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux) {}
#endif

/* Half h of 16 tokens' bytes of a channel, with bit i of `fifth` above it. */
uchar16 KVL_FN(column)(uchar16 bytes, uint h, uchar16 fifth, uint i)
{
#if KVL_OPT_BITS == 8
    return bytes;
#else
    const uchar16 codes = bytes >> (uchar)(4 * h) & (uchar)15;
#if KVL_OPT_BITS == 5
    return codes | ((i < 4 ? fifth << (uchar)(4 - i) : fifth >> (uchar)(i - 4)) & (uchar)16);
#else
    return codes;
#endif
#endif
}

#define WIDE (KVL_SLICE % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, KVL_QS float *out)
{
    const KVL_GLOBAL half *params = (const KVL_GLOBAL half *)PARAMS(block);
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
        for (uint k = 0; k < N_BLOCKS; k++) {
            const KVL_GLOBAL uchar *at = CODES_AT(block, t0 + t, k);
            float16 dot[WIDE * KVL_NQ];
            KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
            for (uint i8 = 0; i8 < SPAN; i8 += 8) {
                uchar16 fifth[WIDE * HALVES]; /* of 8 channels */
                KVL_UNROLL for (uint i = 0; i < WIDE * HALVES; i++)
                    fifth[i] = LOW_ROW > 0 ? vload16(0, at + (i8 + i % HALVES * SPAN) / 8 * ROW_STRIDE + i / HALVES * 16) : (uchar16)0;
                KVL_UNROLL for (uint i = 0; i < 8; i++)
                {
                    KVL_UNROLL for (uint w = 0; w < WIDE; w++)
                    {
                        const uchar16 bytes = vload16(0, at + (LOW_ROW + i8 + i) * ROW_STRIDE + 16 * w);
                        KVL_UNROLL for (uint h = 0; h < HALVES; h++)
                            kvl_add_to_rows(dot + w * KVL_NQ, q + k * BLOCK + h * SPAN + i8 + i, KVL_D,
                                            KVL_FN(numbers)(KVL_FN(column)(bytes, h, fifth[w * HALVES + h], i)));
                    }
                }
            }
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 scale = vload_half16(0, params + SCALE_AT(k, t0 + t + 16 * w));
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                {
                    KVL_QS float *o = out + r * KVL_B + t + 16 * w;
                    float16 sum = k == 0 ? (float16)0.0f : vload16(0, o);
#if KVL_OPT_MIN
                    sum = fma(aux[r * N_BLOCKS + k], vload_half16(0, params + MIN_AT(k, t0 + t + 16 * w)), sum);
#endif
                    KVL_STORE16(fma(dot[w * KVL_NQ + r], scale, sum), o);
                }
            }
        }
    }
}
#undef WIDE
#else
/* Sums of values run over numbers BASE + (code - OFFSET) * STEP, whose codes need no conversion (platform.cl). */
#if KVL_OPT_NONLINEAR || KVL_OPT_BITS == 8
#define STEP 1.0f
#define BASE 0.0f
#else
#define STEP (1.0f / (1 << KVL_OPT_BITS))
#define BASE (1.0f + KVL_OPT_OFFSET * STEP)
#endif

/* Numbers of channels 16 h .. 16 h + 15 of the block of a token at `at`. */
float16 KVL_FN(run)(const KVL_GLOBAL uchar *at, uint h)
{
#if KVL_OPT_BITS == 8
    return KVL_FN(numbers)(vload16(h, at));
#else
    const uint16 words = kvl_words(at + LOW_ROW, 0, 1, 16);
#if KVL_OPT_NONLINEAR
    return kvl_pick_floats(convert_float16(VALUES16), words >> 4 * h & 15u);
#elif KVL_OPT_BITS == 5
    const uint16 fifth = /* goes to the highest bit of the mantissa */
        rotate((uint16)as_uint(vload4(0, at)), (22u - 16 * h - (uint16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) & 31u);
    return as_float16(bitselect(as_uint16(kvl_code_numbers(words, 4 * h, 5)), fifth, (uint16)0x400000u));
#else
    return kvl_code_numbers(words, 4 * h, 4);
#endif
#endif
}

/* p * scale of a block into `scaled` [NQ][SLICE], for sums of numbers, and the sums of p times what is left. */
void KVL_FN(scale_weights)(const KVL_GLOBAL half *params, uint k, uint t0, const KVL_QS float *p, float *scaled, float *rest_sum)
{
    float16 sum[KVL_NQ];
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) sum[r] = 0.0f;
    for (uint t = 0; t < KVL_SLICE; t += 16) {
        const float16 scale = vload_half16(0, params + SCALE_AT(k, t0 + t));
#if KVL_OPT_MIN
        const float16 rest = fma(scale, -BASE / STEP, vload_half16(0, params + MIN_AT(k, t0 + t)));
#else
        const float16 rest = scale * (-BASE / STEP);
#endif
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
        {
            const float16 weight = vload16(0, p + r * KVL_B + t);
            KVL_STORE16(weight * (scale * (1.0f / STEP)), scaled + r * KVL_SLICE + t);
            sum[r] = fma(weight, rest, sum[r]);
        }
    }
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) rest_sum[r] = kvl_sum16(sum[r]);
}

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p,
                        KVL_QS float *acc)
{
    for (uint k = 0; k < N_BLOCKS; k++) {
        float scaled[KVL_NQ * KVL_SLICE], rest_sum[KVL_NQ];
        KVL_FN(scale_weights)((const KVL_GLOBAL half *)PARAMS(block), k, t0, p, scaled, rest_sum);
        float16 sum[2 * KVL_NQ]; /* [2][NQ]: both halves of the block */
        KVL_UNROLL for (uint i = 0; i < 2 * KVL_NQ; i++) sum[i] = 0.0f;
        for (uint t = 0; t < KVL_SLICE; t++) {
            KVL_UNROLL for (uint h = 0; h < 2; h++)
                kvl_add_to_rows(sum + h * KVL_NQ, scaled + t, KVL_SLICE, KVL_FN(run)(CODES_AT(block, t0 + t, k), h));
        }
        KVL_UNROLL for (uint i = 0; i < 2 * KVL_NQ; i++)
        {
            KVL_QS float *o = acc + i % KVL_NQ * KVL_D + k * BLOCK + i / KVL_NQ * 16;
            KVL_STORE16(sum[i] + (vload16(0, o) + rest_sum[i % KVL_NQ]), o);
        }
    }
}
#undef STEP
#undef BASE
#endif
#undef HALVES
#undef VALUES16
#endif
#undef BLOCK
#undef N_BLOCKS
#undef CODE_BYTES
#undef LOW_ROW
#undef SPAN
#undef TOKEN_BYTES
#undef ROW_STRIDE
#undef TOKEN_STRIDE
#undef CODES_AT
#undef PARAMS
#undef SCALE_AT
#undef MIN_AT
#undef NUMBER
#undef CODE
#undef CODE_MAX
