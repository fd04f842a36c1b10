/* Device body of the integer codecs (KVL_OPT_BITS 8, 4, 3 or 2). Layout and arithmetic: card.md, kivi.md.
 * A word is WORD_BYTES bytes that hold WORD_CODES codes, those of channels SPAN apart in a GROUP. Byte row b of a token: K [rows][P],
 * V [P][rows]; then scale (and zero), binary16: with TOKENS 1 per group and token, else per channel and TOKENS tokens (GROUP is the head). */
#define GROUP KVL_OPT_GROUP
#define TOKENS KVL_OPT_TOKENS
#define N_GROUPS (KVL_D / GROUP)
#define WORD_BYTES (8 % KVL_OPT_BITS == 0 ? 1 : KVL_OPT_BITS)
#define WORD_CODES (8 * WORD_BYTES / KVL_OPT_BITS)
#define SPAN (GROUP / WORD_CODES) /* words of a group */
#define TOKEN_BYTES (KVL_D / WORD_CODES * WORD_BYTES)
#define LEVEL_MAX ((1 << KVL_OPT_BITS) - 1)
#define CODE_MASK LEVEL_MAX
#define ROW(g, k, w) (((g)*WORD_BYTES + (k)) * SPAN + (w)) /* byte k of word w of a group */
#if KVL_IS_K
#define BYTE_AT(t, b) ((ulong)(b) * KVL_P + (t))
#else
#define BYTE_AT(t, b) ((ulong)(t) * TOKEN_BYTES + (b))
#endif
#if KVL_OPT_ASYM
#define PARAMS 2
#define OFFSET 0.0f
#define SCALE_STEPS LEVEL_MAX
#else
#define PARAMS 1
#define OFFSET ((float)(1 << (KVL_OPT_BITS - 1)))
#define SCALE_STEPS ((1 << (KVL_OPT_BITS - 1)) - 1)
#endif
#define PARAM_BASE(block) ((block) + (ulong)TOKEN_BYTES * KVL_P)
#if TOKENS == 1
#define SCALE_AT(c, t) ((ulong)((c) / GROUP) * PARAMS * KVL_P + (t)) /* of channel c of token t */
#define ZERO_AT(c, t) (SCALE_AT(c, t) + KVL_P)
#else
#define SCALE_AT(c, t) ((ulong)((t) / TOKENS) * PARAMS * KVL_D + (c))
#define ZERO_AT(c, t) (SCALE_AT(c, t) + KVL_D)
#endif

/* Code of channel i of group g of token t. */
uint KVL_FN(code_at)(const KVL_GLOBAL uchar *block, uint t, uint g, uint i)
{
    const uint bit = i / SPAN * KVL_OPT_BITS, k = bit / 8, w = i % SPAN;
    uint bytes = block[BYTE_AT(t, ROW(g, k, w))];
#if 8 % KVL_OPT_BITS != 0
    if (k + 1 < WORD_BYTES) bytes |= (uint)block[BYTE_AT(t, ROW(g, k + 1, w))] << 8;
#endif
    return bytes >> bit % 8 & CODE_MASK;
}

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
    for (uint i = 0; i < 8; i++) {
        const uint code = KVL_FN(code_at)(block, t, (c + i) / GROUP, (c + i) % GROUP);
        const float scale = kvl_load_half(params, SCALE_AT(c + i, t));
#if KVL_OPT_ASYM
        o[i] = fma((float)code, scale, kvl_load_half(params, ZERO_AT(c + i, t)));
#else
        o[i] = ((float)code - OFFSET) * scale;
#endif
    }
}

/* Nearest integer of the exact quotient d / scale, ties to even, whatever the rounding of the device's division (card.md). */
float KVL_FN(quotient)(float d, float scale)
{
    if (scale == 0.0f) return 0.0f;
    float q = rint(d * (1.0f / scale));
    q = fmin(fmax(q, -512.0f), 512.0f);
    const float rest = fma(-q, scale, d), half_step = 0.5f * scale;
    const int odd = (int)q & 1;
    if (rest > half_step || (rest == half_step && odd)) q += 1.0f;
    else if (rest < -half_step || (rest == -half_step && odd)) q -= 1.0f;
    return q;
}

/* range / SCALE_STEPS, correctly rounded (one Newton step on the reciprocal's product). */
float KVL_FN(step)(float range)
{
    const float n = (float)SCALE_STEPS, inverse = 1.0f / (float)SCALE_STEPS;
    const float t = range * inverse;
    return fabs(fma(fma(-t, n, range), inverse, t)); /* never -0: llvmpipe's fma loses the sign of zero */
}

/* Stores the parameters of rows row .. row+n-1, channels c .. c+width-1 of x: they are tokens t .. of one group. */
void KVL_FN(fit)(KVL_GLOBAL uchar *params, uint t, uint c, kvl_rows x, uint row, uint n, uint width)
{
    float low = kvl_clamp_half(kvl_row_at(x, row, c)), high = low;
    for (uint i = 0; i < n; i++)
        for (uint j = 0; j < width; j++) {
            const float value = kvl_clamp_half(kvl_row_at(x, row + i, c + j));
            low = fmin(low, value);
            high = fmax(high, value);
        }
#if KVL_OPT_ASYM
    kvl_store_half(params, SCALE_AT(c, t), fmin(KVL_FN(step)(high - low), KVL_HALF_MAX));
    kvl_store_half(params, ZERO_AT(c, t), as_uint(low) << 1 == 0 ? 0.0f : low); /* never -0: fmin may give either */
#else
    kvl_store_half(params, SCALE_AT(c, t), KVL_FN(step)(fmax(fabs(low), fabs(high))));
#endif
}

/* Code of value x at channel c of token t, by the stored parameters. */
uint KVL_FN(code_of)(const KVL_GLOBAL uchar *params, uint t, uint c, float x)
{
    const float scale = kvl_load_half(params, SCALE_AT(c, t));
#if KVL_OPT_ASYM
    const float zero = kvl_load_half(params, ZERO_AT(c, t)), lowest = 0.0f, highest = (float)LEVEL_MAX;
#else
    const float zero = 0.0f, lowest = -(float)SCALE_STEPS, highest = (float)SCALE_STEPS;
#endif
    return (uint)(fmin(fmax(KVL_FN(quotient)(kvl_clamp_half(x) - zero, scale), lowest), highest) + OFFSET);
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
    KVL_GLOBAL uchar *params = PARAM_BASE(block);
    for (uint i = 0; i < n; i += TOKENS)
        for (uint c = 0; c < KVL_D; c += TOKENS > 1 ? 1 : GROUP)
            KVL_FN(fit)(params, t0 + i, c, x, i, min(n - i, (uint)TOKENS), TOKENS > 1 ? 1 : GROUP);
    for (uint i = 0; i < n; i++)
        for (uint g = 0; g < N_GROUPS; g++)
            for (uint w = 0; w < SPAN; w++) {
                uint word = 0;
                for (uint j = 0; j < WORD_CODES; j++) {
                    const uint c = g * GROUP + j * SPAN + w;
                    word |= KVL_FN(code_of)(params, t0 + i, c, kvl_row_at(x, i, c)) << (j * KVL_OPT_BITS);
                }
                for (uint k = 0; k < WORD_BYTES; k++) block[BYTE_AT(t0 + i, ROW(g, k, w))] = (uchar)(word >> 8 * k);
            }
}

#if KVL_VECTORS
/* Tokens of a slice that have the same parameters by channel. */
#if TOKENS == 1 || TOKENS % KVL_SLICE == 0
#define RUN KVL_SLICE
#elif KVL_SLICE % TOKENS == 0
#define RUN TOKENS
#else
#define RUN 16
#endif
#if KVL_IS_K
/* aux[g] = sum of q over the group: the zero point's share of every score. */
void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux)
{
#if TOKENS == 1
    for (uint g = 0; g < N_GROUPS; g++) {
        float sum = 0.0f;
        for (uint i = 0; i < GROUP; i++) sum += q[g * GROUP + i];
        aux[g] = sum;
    }
#endif
}

#if TOKENS > 1
/* q * scale of the channels of token t's group into `scaled` [NQ][D], and the zero points' share of every score. */
void KVL_FN(scale_queries)(const KVL_GLOBAL uchar *params, uint t, const KVL_QS float *q, float *scaled, float *base)
{
    for (uint r = 0; r < KVL_NQ; r++) {
        float16 sum = 0.0f;
        for (uint c = 0; c < KVL_D; c += 16) {
            const float16 x = vload16(0, q + r * KVL_D + c);
            vstore16(x * vload_half16(0, (const KVL_GLOBAL half *)params + SCALE_AT(c, t)), 0, scaled + r * KVL_D + c);
            sum = fma(x, vload_half16(0, (const KVL_GLOBAL half *)params + ZERO_AT(c, t)), sum);
        }
        base[r] = kvl_sum16(sum);
    }
}
#define FACTOR scaled
#else
#define FACTOR q
#endif

#define WIDE (RUN % (16 * KVL_WIDE) == 0 ? KVL_WIDE : RUN % 32 == 0 && KVL_WIDE > 2 ? 2 : 1)

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, KVL_QS float *out)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
#if TOKENS > 1
    float scaled[KVL_NQ * KVL_D], base[KVL_NQ];
#endif
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
#if TOKENS > 1
        if (t % RUN == 0) KVL_FN(scale_queries)(params, t0 + t, q, scaled, base);
#endif
        for (uint g = 0; g < N_GROUPS; g++) {
            float16 dot[WIDE * KVL_NQ];
            KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
            for (uint b = 0; b < SPAN; b++) {
                KVL_UNROLL for (uint w = 0; w < WIDE; w++)
                {
                    uchar16 bytes[WORD_BYTES];
                    KVL_UNROLL for (uint k = 0; k < WORD_BYTES; k++)
                        bytes[k] = vload16(0, block + BYTE_AT(t0 + t + 16 * w, ROW(g, k, b)));
                    KVL_UNROLL for (uint j = 0; j < WORD_CODES; j++)
                    {
                        const float16 k = convert_float16(KVL_CODES(bytes, j, KVL_OPT_BITS));
                        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                            dot[w * KVL_NQ + r] = fma(FACTOR[r * KVL_D + g * GROUP + j * SPAN + b], k, dot[w * KVL_NQ + r]);
                    }
                }
            }
#if TOKENS > 1
            KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++)
                vstore16(dot[i] + base[i % KVL_NQ], 0, out + i % KVL_NQ * KVL_B + t + i / KVL_NQ * 16);
#else
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)params + SCALE_AT(g * GROUP, t0 + t + 16 * w));
#if KVL_OPT_ASYM
                const float16 base = vload_half16(0, (const KVL_GLOBAL half *)params + ZERO_AT(g * GROUP, t0 + t + 16 * w));
#else
                const float16 base = -OFFSET * scale;
#endif
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                {
                    KVL_QS float *o = out + r * KVL_B + t + 16 * w;
                    const float16 before = g == 0 ? (float16)0.0f : vload16(0, o);
                    vstore16(fma(dot[w * KVL_NQ + r], scale, fma(aux[r * N_GROUPS + g], base, before)), 0, o);
                }
            }
#endif
        }
    }
}
#undef WIDE
#undef FACTOR
#else
/* What codes of a run of tokens are multiplied by, into `scaled` [NQ][RUN]: p, or p * scale of group g; and the sum of p * zero point, which
 * is left to the end where parameters are by channel. */
void KVL_FN(scale_weights)(const KVL_GLOBAL uchar *params, uint g, uint t0, const KVL_QS float *p, float16 *scaled, float *base_sum)
{
    float16 sum[KVL_NQ];
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) sum[r] = 0.0f;
    for (uint t = 0; t < RUN; t += 16) {
#if TOKENS > 1
        const float16 scale = 1.0f, zero = 1.0f;
#else
        const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)params + SCALE_AT(g * GROUP, t0 + t));
#if KVL_OPT_ASYM
        const float16 zero = vload_half16(0, (const KVL_GLOBAL half *)params + ZERO_AT(g * GROUP, t0 + t));
#else
        const float16 zero = -OFFSET * scale;
#endif
#endif
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
        {
            const float16 weight = vload16(0, p + r * KVL_B + t);
            scaled[(r * RUN + t) / 16] = weight * scale;
            sum[r] = fma(weight, zero, sum[r]);
        }
    }
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) base_sum[r] = kvl_sum16(sum[r]);
}

/* Words side by side in a vector: their codes j are neighbouring channels. */
#if SPAN % 16 == 0
#define LANES 16
#define FLOATS float16
#define BYTES uchar16
#define TO_FLOATS convert_float16
#define LOAD vload16
#define LOAD_HALF vload_half16
#define STORE vstore16
#elif SPAN % 8 == 0
#define LANES 8
#define FLOATS float8
#define BYTES uchar8
#define TO_FLOATS convert_float8
#define LOAD vload8
#define LOAD_HALF vload_half8
#define STORE vstore8
#endif
#ifdef LANES
/* One pass sums codes j0 .. j0 + AT_ONCE - 1 of WIDE vectors of words: SUMS vectors [WIDE][AT_ONCE][NQ]. */
#define AT_ONCE (WORD_CODES < KVL_WIDE ? WORD_CODES : KVL_WIDE)
#define WIDE (SPAN % (LANES * KVL_WIDE / AT_ONCE) == 0 ? KVL_WIDE / AT_ONCE : 1)
#define SUMS (WIDE * AT_ONCE * KVL_NQ)
#define CHANNEL(i) ((i) / KVL_NQ / AT_ONCE * LANES + (j0 + (i) / KVL_NQ % AT_ONCE) * SPAN)
#endif

#if TOKENS > 1
#define START(before, base) 0.0f /* scaled and added to what was there at the end */
#else
#define START(before, base) ((before) + (base))
#endif

void KVL_FN(accumulate_run)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
    for (uint g = 0; g < N_GROUPS; g++) {
        float16 vectors[KVL_NQ * RUN / 16];
        float base_sum[KVL_NQ];
        const float *scaled = (const float *)vectors;
        KVL_FN(scale_weights)(params, g, t0, p, vectors, base_sum);
        KVL_QS float *group = acc + g * GROUP;
#ifdef LANES
        for (uint b = 0; b < SPAN; b += LANES * WIDE) {
            KVL_UNROLL for (uint j0 = 0; j0 < WORD_CODES; j0 += AT_ONCE)
            {
                FLOATS sum[SUMS];
                KVL_UNROLL for (uint i = 0; i < SUMS; i++)
                    sum[i] = START(LOAD(0, group + i % KVL_NQ * KVL_D + b + CHANNEL(i)), base_sum[i % KVL_NQ]);
                for (uint t = 0; t < RUN; t++) {
                    KVL_UNROLL for (uint w = 0; w < WIDE; w++)
                    {
                        BYTES bytes[WORD_BYTES];
                        KVL_UNROLL for (uint k = 0; k < WORD_BYTES; k++)
                            bytes[k] = LOAD(0, block + BYTE_AT(t0 + t, ROW(g, k, b + LANES * w)));
                        KVL_UNROLL for (uint j = 0; j < AT_ONCE; j++)
                        {
                            const FLOATS v = TO_FLOATS(KVL_CODES(bytes, j0 + j, KVL_OPT_BITS));
                            KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                            {
                                FLOATS *s = sum + (w * AT_ONCE + j) * KVL_NQ + r;
                                *s = fma(scaled[r * RUN + t], v, *s);
                            }
                        }
                    }
                }
                KVL_UNROLL for (uint i = 0; i < SUMS; i++)
                {
                    KVL_QS float *to = group + i % KVL_NQ * KVL_D + b + CHANNEL(i);
#if TOKENS > 1
                    const KVL_GLOBAL half *by_channel = (const KVL_GLOBAL half *)params + b + CHANNEL(i);
                    sum[i] = fma(sum[i], LOAD_HALF(0, by_channel + SCALE_AT(0, t0)),
                                 fma(base_sum[i % KVL_NQ], LOAD_HALF(0, by_channel + ZERO_AT(0, t0)), LOAD(0, to)));
#endif
                    STORE(sum[i], 0, to);
                }
            }
        }
#else
        for (uint r = 0; r < KVL_NQ; r++)
            for (uint i = 0; i < GROUP; i++) {
                KVL_QS float *to = group + r * KVL_D + i;
                float sum = START(*to, base_sum[r]);
                for (uint t = 0; t < RUN; t++) sum = fma(scaled[r * RUN + t], (float)KVL_FN(code_at)(block, t0 + t, g, i), sum);
#if TOKENS > 1
                sum = fma(sum, kvl_load_half(params, SCALE_AT(i, t0)), fma(base_sum[r], kvl_load_half(params, ZERO_AT(i, t0)), *to));
#endif
                *to = sum;
            }
#endif
    }
}
#undef START

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p,
                        KVL_QS float *acc)
{
    for (uint t = 0; t < KVL_SLICE; t += RUN) KVL_FN(accumulate_run)(block, t0 + t, p + t, acc);
}
#undef LANES
#undef FLOATS
#undef BYTES
#undef TO_FLOATS
#undef LOAD
#undef LOAD_HALF
#undef STORE
#undef AT_ONCE
#undef WIDE
#undef SUMS
#undef CHANNEL
#endif
#undef RUN
#endif
#undef GROUP
#undef TOKENS
#undef N_GROUPS
#undef WORD_BYTES
#undef WORD_CODES
#undef SPAN
#undef TOKEN_BYTES
#undef LEVEL_MAX
#undef CODE_MASK
#undef ROW
#undef BYTE_AT
#undef PARAMS
#undef OFFSET
#undef SCALE_STEPS
#undef PARAM_BASE
#undef SCALE_AT
#undef ZERO_AT
