/* Device body of KVQuant. Layout and arithmetic: card.md; the order of choices is that of kvquant.c.
 *
 * Measured (PoCL, 4096 tokens, us of a layer's attention, f16 90 to 130): kvquant3 200, kvquant(bits=3) after RoPE 178. Keys by scores() on codes and outliers added one by
 * one to all rows: 189 after RoPE, 900 before it, where keys were restored token by token. Values' outliers: each added alone to every row 214 to 218, to four rows at once
 * 205; with weights put in order first 213. What an outlier is more than its code for 16 tokens at once instead of one: 36 to 15. */
#define LEVELS (1 << KVL_OPT_BITS)
#define WORD_BYTES (KVL_OPT_BITS == 3 ? 3 : 1)
#define WORD_CODES (8 * WORD_BYTES / KVL_OPT_BITS)
#define WORDS (KVL_D / WORD_CODES)
#define TOKEN_BYTES (WORDS * WORD_BYTES)
#define ROW(w, k) ((k) * WORDS + (w)) /* byte k of word w */
#if KVL_IS_K
#define BYTE_AT(t, b) ((ulong)(b) * KVL_P + (t))
#define LEVEL(table, i) (table)[2 * KVL_D + (i)]
#define CENTER(params, table, t, c) (table)[c]
#define REACH(params, table, t, c) (table)[KVL_D + (c)]
#define VALUE_BASE(block) ((block) + (ulong)KVL_P * TOKEN_BYTES)
#else
#define BYTE_AT(t, b) ((ulong)(t) * TOKEN_BYTES + (b))
#define LEVEL(table, i) (table)[i]
#define CENTER(params, table, t, c) kvl_load_half(params, t)
#define REACH(params, table, t, c) kvl_load_half(params, KVL_P + (t))
#define VALUE_BASE(block) ((block) + (ulong)KVL_P * (TOKEN_BYTES + 4))
#endif
#define PARAM_BASE(block) ((block) + (ulong)KVL_P * TOKEN_BYTES)
#define INDEX_BASE(block) (VALUE_BASE(block) + 2ul * KVL_OPT_SLOTS * KVL_P)

/* Channel c of token t by its code. */
float KVL_FN(dense)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c)
{
    const uint word = c % WORDS, bit = c / WORDS * KVL_OPT_BITS;
    uint bits = block[BYTE_AT(t, ROW(word, bit / 8))];
    if (bit % 8 + KVL_OPT_BITS > 8) bits |= (uint)block[BYTE_AT(t, ROW(word, bit / 8 + 1))] << 8;
    const uint code = bits >> bit % 8 & (LEVELS - 1);
    return fma(LEVEL(table, KVL_OPT_READ_AT + code), REACH(PARAM_BASE(block), table, t, c), CENTER(PARAM_BASE(block), table, t, c));
}

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    for (uint i = 0; i < 8; i++) o[i] = KVL_FN(dense)(block, table, t, c + i);
#if KVL_OPT_SLOTS > 0
    for (uint s = 0; s < KVL_OPT_SLOTS; s++) {
        const uint at = INDEX_BASE(block)[s * KVL_P + t] - c;
        if (at < 8) o[at] = kvl_load_half(VALUE_BASE(block), s * KVL_P + t);
    }
#endif
}

#if KVL_IS_K
/* Writes the slots with the elements farthest outside their channel's range, the lower channel first of two. */
void KVL_FN(store_outliers)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, const float *x, kvl_rows rows)
{
#if KVL_OPT_SLOTS > 0
    float last = INFINITY;
    uint last_channel = 0, outside = 0;
    for (uint s = 0; s < KVL_OPT_SLOTS; s++) {
        float most = -INFINITY;
        uint best = KVL_D;
        for (uint c8 = 0; c8 < KVL_D; c8 += 8)
            KVL_UNROLL for (uint i = 0; i < 8; i++)
            {
                const uint c = c8 + i;
                const float excess = fabs(x[c] - table[c]) - table[KVL_D + c];
                const bool is_next = excess < last || (excess == last && c > last_channel);
                outside += s == 0 && excess > 0.0f;
                if (is_next && (best == KVL_D || excess > most)) {
                    best = c;
                    most = excess;
                }
            }
        kvl_store_half(VALUE_BASE(block), s * KVL_P + t, x[best]);
        INDEX_BASE(block)[s * KVL_P + t] = (uchar)best;
        last = most;
        last_channel = best;
    }
    kvl_count_overflow(rows, outside > KVL_OPT_SLOTS ? outside - KVL_OPT_SLOTS : 0);
#endif
}
#else
/* The channel next to (value, channel) in the order by value, then channel: above it (direction 1) or below (-1). */
uint KVL_FN(next)(const float *x, float value, uint channel, int direction)
{
    uint best = KVL_D;
    for (uint c8 = 0; c8 < KVL_D; c8 += 8)
        KVL_UNROLL for (uint i = 0; i < 8; i++)
        {
            const uint c = c8 + i;
            const bool above = x[c] > value || (x[c] == value && c > channel), below = x[c] < value || (x[c] == value && c < channel);
            const bool nearer = best == KVL_D || (direction > 0 ? x[c] < x[min(best, KVL_D - 1u)] : x[c] >= x[min(best, KVL_D - 1u)]);
            if ((direction > 0 ? above : below) && nearer) best = c;
        }
    return best;
}

/* Fills the slots with the ends whose going leaves the smaller range, the upper one if both do; then the token's center and reach. */
void KVL_FN(store_outliers)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, const float *x, kvl_rows rows)
{
    uint low = KVL_FN(next)(x, -INFINITY, 0, 1), high = KVL_FN(next)(x, INFINITY, KVL_D, -1);
    for (uint s = 0; s < KVL_OPT_SLOTS; s++) {
        const uint above = KVL_FN(next)(x, x[low], low, 1), below = KVL_FN(next)(x, x[high], high, -1);
        const bool is_low = x[high] - x[above] < x[below] - x[low];
        const uint gone = is_low ? low : high;
        kvl_store_half(VALUE_BASE(block), s * KVL_P + t, x[gone]);
        INDEX_BASE(block)[s * KVL_P + t] = (uchar)gone;
        if (is_low) low = above;
        else high = below;
    }
    kvl_store_half(PARAM_BASE(block), t, 0.5f * (x[high] + x[low]) + 0.0f);
    kvl_store_half(PARAM_BASE(block), KVL_P + t, 0.5f * (x[high] - x[low]));
}
#endif

/* One step of halving: edges rise, so the code is found from its highest bit on. */
#define HALVE(step)                                                                                                    \
    if ((step) < LEVELS && x > fma(reach, 0.5f * (LEVEL(table, code + (step)-1) + LEVEL(table, code + (step))), center)) code += (step)

uint KVL_FN(code_of)(const KVL_GLOBAL float *table, float x, float center, float reach)
{
    uint code = 0;
    HALVE(8);
    HALVE(4);
    HALVE(2);
    HALVE(1);
    return code;
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows rows)
{
    for (uint t = t0; t < t0 + n; t++) {
        float x[KVL_D];
        for (uint c = 0; c < KVL_D; c += 8)
            KVL_UNROLL for (uint i = 0; i < 8; i++) x[c + i] = kvl_clamp_half(kvl_row_at(rows, t - t0, c + i));
        KVL_FN(store_outliers)(block, table, t, x, rows);
        for (uint w = 0; w < WORDS; w++) {
            uint word = 0;
            KVL_UNROLL for (uint j = 0; j < WORD_CODES; j++)
            {
                const uint c = j * WORDS + w;
                const float center = CENTER(PARAM_BASE(block), table, t, c), reach = REACH(PARAM_BASE(block), table, t, c);
                word |= KVL_FN(code_of)(table, x[c], center, reach) << (j * KVL_OPT_BITS);
            }
            for (uint k = 0; k < WORD_BYTES; k++) block[BYTE_AT(t, ROW(w, k))] = (uchar)(word >> 8 * k);
        }
    }
}

void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    for (uint b = 0; b < TOKEN_BYTES; b++) to[BYTE_AT(t_to, b)] = from[BYTE_AT(t_from, b)];
#if !KVL_IS_K
    kvl_move_halves(PARAM_BASE(to), t_to, PARAM_BASE(from), t_from, 2, KVL_P);
#endif
    kvl_move_halves(VALUE_BASE(to), t_to, VALUE_BASE(from), t_from, KVL_OPT_SLOTS, KVL_P);
    for (uint s = 0; s < KVL_OPT_SLOTS; s++) INDEX_BASE(to)[s * KVL_P + t_to] = INDEX_BASE(from)[s * KVL_P + t_from];
}

#if KVL_VECTORS
/* All levels as they are read, for codes of 16 lanes. */
float16 KVL_FN(levels)(const KVL_GLOBAL float *table)
{
    float level[16];
    KVL_UNROLL for (uint i = 0; i < 16; i++) level[i] = i < LEVELS ? LEVEL(table, KVL_OPT_READ_AT + i) : 0.0f;
    return vload16(0, level);
}

#if KVL_IS_K
void KVL_FN(columns)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, float *x)
{
    const float16 levels = KVL_FN(levels)(table);
    for (uint w = 0; w < WORDS; w++) {
        const uint16 words = kvl_words(block + BYTE_AT(t0, ROW(w, 0)), (ulong)WORDS * KVL_P, WORD_BYTES, 16);
        KVL_UNROLL for (uint j = 0; j < WORD_CODES; j++)
        {
            const uint c = j * WORDS + w;
            KVL_STORE16(fma(kvl_pick_floats(levels, words >> j * KVL_OPT_BITS & LEVELS - 1u), (float16)table[KVL_D + c], (float16)table[c]), x + c * 16);
        }
    }
#if KVL_OPT_SLOTS > 0
    for (uint s = 0; s < KVL_OPT_SLOTS; s++)
        for (uint i = 0; i < 16; i++) x[INDEX_BASE(block)[s * KVL_P + t0 + i] * 16 + i] = kvl_load_half(VALUE_BASE(block), s * KVL_P + t0 + i);
#endif
}
#else
#define ABREAST KVL_WORDS_ABREAST(WORDS, WORD_CODES)
#define TOGETHER KVL_CODES_ABREAST(WORDS, WORD_CODES)
#define AT_ONCE KVL_CODES_AT_ONCE(WORDS, WORD_CODES)
#define SUMS (AT_ONCE * KVL_NQ) /* vectors [AT_ONCE][NQ] */
#define CHANNEL(i) ((j0 + (i) / KVL_NQ) * TOGETHER * WORDS)

#if KVL_OPT_SLOTS > 0
/* What outliers s of 16 tokens are more than their codes. */
float16 KVL_FN(excess)(const KVL_GLOBAL uchar *block, float16 levels, uint t0, uint s)
{
    const KVL_GLOBAL uchar *index = INDEX_BASE(block) + s * KVL_P + t0;
    const KVL_GLOBAL half *params = (const KVL_GLOBAL half *)PARAM_BASE(block) + t0, *values = (const KVL_GLOBAL half *)VALUE_BASE(block) + s * KVL_P + t0;
    uint code[16];
    KVL_UNROLL for (uint i = 0; i < 16; i++)
    {
        const KVL_GLOBAL uchar *word = block + BYTE_AT(t0 + i, index[i] % WORDS);
        uint bits = word[0];
        if (WORD_BYTES == 3) bits |= (uint)word[WORDS] << 8 | (uint)word[2 * WORDS] << 16;
        code[i] = bits >> (index[i] / WORDS * KVL_OPT_BITS) & (LEVELS - 1);
    }
    return vload_half16(0, values) - fma(kvl_pick_floats(levels, vload16(0, code)), vload_half16(0, params + KVL_P), vload_half16(0, params));
}

/* Up to four rows' sums are side by side meanwhile, so that an outlier is added to all of them at once. */
void KVL_FN(add_outliers)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p, uint rows, KVL_QS float *acc)
{
    const float16 levels = KVL_FN(levels)(table);
    float sum[4 * KVL_D], excess[16];
    for (uint i = 0; i < 4 * KVL_D; i++) sum[i] = 0.0f;
    for (uint t = 0; t < KVL_SLICE; t += 16)
        for (uint s = 0; s < KVL_OPT_SLOTS; s++) {
            KVL_STORE16(KVL_FN(excess)(block, levels, t0 + t, s), excess);
            for (uint i = 0; i < 16; i++) {
                const KVL_QS float *weight = p + t + i;
                const float4 all = (float4)(weight[0], rows > 1 ? weight[KVL_B] : 0.0f, rows > 2 ? weight[2 * KVL_B] : 0.0f, rows > 3 ? weight[3 * KVL_B] : 0.0f);
                const uint c = INDEX_BASE(block)[s * KVL_P + t0 + t + i];
                vstore4(fma(all, excess[i], vload4(c, sum)), c, sum);
            }
        }
    for (uint r = 0; r < rows; r++)
        for (uint c = 0; c < KVL_D; c++) acc[r * KVL_D + c] += sum[4 * c + r];
}
#endif

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
#if KVL_WORDS_ABREAST(WORDS, WORD_CODES)
    const float16 levels = KVL_FN(levels)(table);
    const KVL_GLOBAL half *params = (const KVL_GLOBAL half *)PARAM_BASE(block) + t0;
    float scaled[KVL_NQ * KVL_SLICE], base[KVL_NQ]; /* p * reach, and the sums of p * center */
    for (uint r = 0; r < KVL_NQ; r++) {
        float16 sum = 0.0f;
        for (uint t = 0; t < KVL_SLICE; t += 16) {
            const float16 weight = vload16(0, p + r * KVL_B + t);
            KVL_STORE16(weight * vload_half16(0, params + KVL_P + t), scaled + r * KVL_SLICE + t);
            sum = fma(weight, vload_half16(0, params + t), sum);
        }
        base[r] = kvl_sum16(sum);
    }
    for (uint b = 0; b < WORDS; b += ABREAST) {
        KVL_UNROLL for (uint j0 = 0; j0 < KVL_CODE_VECTORS(WORDS, WORD_CODES); j0 += AT_ONCE)
        {
            float16 sum[SUMS];
            KVL_UNROLL for (uint i = 0; i < SUMS; i++) sum[i] = 0.0f;
            for (uint t = 0; t < KVL_SLICE; t++) {
                const uint16 words = kvl_words(block + BYTE_AT(t0 + t, ROW(b, 0)), WORDS, WORD_BYTES, ABREAST);
                KVL_UNROLL for (uint j = 0; j < AT_ONCE; j++)
                    kvl_add_to_rows(sum + j * KVL_NQ, scaled + t, KVL_SLICE,
                                    kvl_pick_floats(levels, words >> kvl_code_at(j0 + j, KVL_OPT_BITS, TOGETHER) & LEVELS - 1u));
            }
            KVL_UNROLL for (uint i = 0; i < SUMS; i++)
                kvl_add_lanes(acc + i % KVL_NQ * KVL_D + b + CHANNEL(i), sum[i] + base[i % KVL_NQ], ABREAST * TOGETHER);
        }
    }
#else
    for (uint t = 0; t < KVL_SLICE; t++)
        for (uint c = 0; c < KVL_D; c++) {
            const float v = KVL_FN(dense)(block, table, t0 + t, c);
            KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) acc[r * KVL_D + c] = fma(p[r * KVL_B + t], v, acc[r * KVL_D + c]);
        }
#endif
#if KVL_OPT_SLOTS > 0
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r += 4) KVL_FN(add_outliers)(block, table, t0, p + r * KVL_B, KVL_NQ - r < 4 ? KVL_NQ - r : 4, acc + r * KVL_D);
#endif
}
#undef ABREAST
#undef TOGETHER
#undef AT_ONCE
#undef SUMS
#undef CHANNEL
#endif
#endif
#undef HALVE
#undef LEVELS
#undef WORD_BYTES
#undef WORD_CODES
#undef WORDS
#undef TOKEN_BYTES
#undef ROW
#undef BYTE_AT
#undef LEVEL
#undef CENTER
#undef REACH
#undef VALUE_BASE
#undef PARAM_BASE
#undef INDEX_BASE
