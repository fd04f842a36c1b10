/* Device body of KVQuant. Layout and arithmetic: card.md; the order of choices is that of kvquant.c. */
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

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    for (uint i = 0; i < 8; i++) {
        const uint word = (c + i) % WORDS, bit = (c + i) / WORDS * KVL_OPT_BITS;
        uint bits = block[BYTE_AT(t, ROW(word, bit / 8))];
        if (bit % 8 + KVL_OPT_BITS > 8) bits |= (uint)block[BYTE_AT(t, ROW(word, bit / 8 + 1))] << 8;
        const uint code = bits >> bit % 8 & (LEVELS - 1);
        o[i] = fma(LEVEL(table, KVL_OPT_READ_AT + code), REACH(PARAM_BASE(block), table, t, c + i), CENTER(PARAM_BASE(block), table, t, c + i));
    }
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
