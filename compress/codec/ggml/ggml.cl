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
#if KVL_OPT_NONLINEAR
float16 KVL_FN(numbers)(uchar16 codes)
{
    return convert_float16(kvl_pick16((char16)(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), codes));
}
#elif KVL_OPT_BITS == 8
float16 KVL_FN(numbers)(uchar16 codes) { return convert_float16(as_char16(codes)); }
#else
float16 KVL_FN(numbers)(uchar16 codes) { return convert_float16(as_char16(codes) - (char)KVL_OPT_OFFSET); }
#endif
/* 16 where a bit is set. */
#define FIFTH(bits) (as_uchar16((bits) != (uchar16)0) & (uchar)16)

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

/* Channel i of 16 tokens from `at` on. */
float16 KVL_FN(column)(const KVL_GLOBAL uchar *at, uint i)
{
#if KVL_OPT_BITS == 8
    return KVL_FN(numbers)(vload16(0, at + i * ROW_STRIDE));
#else
    uchar16 codes = vload16(0, at + (LOW_ROW + i % 16) * ROW_STRIDE) >> (uchar)(i / 16 * 4) & (uchar)15;
#if KVL_OPT_BITS == 5
    codes |= FIFTH(vload16(0, at + i / 8 * ROW_STRIDE) & (uchar)(1 << i % 8));
#endif
    return KVL_FN(numbers)(codes);
#endif
}

#define WIDE (KVL_SLICE % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, KVL_QS float *out)
{
    const KVL_GLOBAL half *params = (const KVL_GLOBAL half *)PARAMS(block);
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
        for (uint k = 0; k < N_BLOCKS; k++) {
            float16 dot[WIDE * KVL_NQ];
            KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
            for (uint i = 0; i < SPAN; i++) {
                KVL_UNROLL for (uint w = 0; w < WIDE; w++)
                {
                    KVL_UNROLL for (uint j = 0; j < BLOCK; j += SPAN)
                    {
                        const float16 column = KVL_FN(column)(CODES_AT(block, t0 + t + 16 * w, k), i + j);
                        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                            dot[w * KVL_NQ + r] = fma(q[r * KVL_D + k * BLOCK + i + j], column, dot[w * KVL_NQ + r]);
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
                    vstore16(fma(dot[w * KVL_NQ + r], scale, sum), 0, o);
                }
            }
        }
    }
}
#undef WIDE
#else
/* Channels i .. i + 15 (i is 0 or 16) of the token at `at`. */
float16 KVL_FN(run)(const KVL_GLOBAL uchar *at, uint i)
{
#if KVL_OPT_BITS == 8
    return KVL_FN(numbers)(vload16(0, at + i));
#else
    uchar16 codes = vload16(0, at + LOW_ROW) >> (uchar)(i / 16 * 4) & (uchar)15;
#if KVL_OPT_BITS == 5
    const uchar16 bit = (uchar16)(1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128);
    codes |= FIFTH((uchar16)((uchar8)(at[i / 8]), (uchar8)(at[i / 8 + 1])) & bit);
#endif
    return KVL_FN(numbers)(codes);
#endif
}

/* p * scale of a block into `scaled` [NQ][SLICE], and the sums of p * minimum. */
void KVL_FN(scale_weights)(const KVL_GLOBAL half *params, uint k, uint t0, const KVL_QS float *p, float *scaled, float *min_sum)
{
    for (uint r = 0; r < KVL_NQ; r++) {
        float16 sum = 0.0f;
        for (uint t = 0; t < KVL_SLICE; t += 16) {
            const float16 weight = vload16(0, p + r * KVL_B + t);
            vstore16(weight * vload_half16(0, params + SCALE_AT(k, t0 + t)), 0, scaled + r * KVL_SLICE + t);
#if KVL_OPT_MIN
            sum = fma(weight, vload_half16(0, params + MIN_AT(k, t0 + t)), sum);
#endif
        }
        min_sum[r] = kvl_sum16(sum);
    }
}

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p,
                        KVL_QS float *acc)
{
    for (uint k = 0; k < N_BLOCKS; k++) {
        float scaled[KVL_NQ * KVL_SLICE], min_sum[KVL_NQ];
        KVL_FN(scale_weights)((const KVL_GLOBAL half *)PARAMS(block), k, t0, p, scaled, min_sum);
        float16 sum[2 * KVL_NQ]; /* [2][NQ]: both halves of the block */
        KVL_UNROLL for (uint i = 0; i < 2 * KVL_NQ; i++)
            sum[i] = vload16(0, acc + i % KVL_NQ * KVL_D + k * BLOCK + i / KVL_NQ * 16) + min_sum[i % KVL_NQ];
        for (uint t = 0; t < KVL_SLICE; t++) {
            KVL_UNROLL for (uint j = 0; j < 2; j++)
            {
                const float16 run = KVL_FN(run)(CODES_AT(block, t0 + t, k), 16 * j);
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                    sum[j * KVL_NQ + r] = fma(scaled[r * KVL_SLICE + t], run, sum[j * KVL_NQ + r]);
            }
        }
        KVL_UNROLL for (uint i = 0; i < 2 * KVL_NQ; i++)
            vstore16(sum[i], 0, acc + i % KVL_NQ * KVL_D + k * BLOCK + i / KVL_NQ * 16);
    }
}
#endif
#undef FIFTH
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
