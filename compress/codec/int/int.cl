/* Device body of the integer codecs (KVL_OPT_BITS 8, 4, 3 or 2). Layout and arithmetic: card.md, kivi.md, gear.md.
 * A word is WORD_BYTES bytes that hold WORD_CODES codes, those of channels SPAN apart in a GROUP. Byte row b of a token: K [rows][P],
 * V [P][rows]; then scale (and zero), binary16 or 8 bits: with TOKENS 1 per group and token, else per channel and TOKENS tokens (GROUP is the head).
 * With BLOCK, for every BLOCK tokens: RANK pairs of factors, then OUTLIERS largest and smallest numbers of each channel or token, then their
 * indices.
 *
 * Outliers are added to all query rows at once (add_outliers; PoCL, 4096 tokens, us of a layer's attention): one by one 145, at once 97, with sums put
 * back in order by shuffles 93. Two or four sets of sums, so that stores and loads of one place are farther apart, 104 and 111 instead of 98. */
#define GROUP KVL_OPT_GROUP
#define TOKENS KVL_OPT_TOKENS
#define BLOCK KVL_OPT_BLOCK
#define RANK KVL_OPT_RANK
#define SPARSE (2 * KVL_OPT_OUTLIERS)
#define N_GROUPS (KVL_D / GROUP)
#define WORD_BYTES (8 % KVL_OPT_BITS == 0 ? 1 : KVL_OPT_BITS)
#define WORD_CODES (8 * WORD_BYTES / KVL_OPT_BITS)
#define SPAN (GROUP / WORD_CODES) /* words of a group */
#define TOKEN_BYTES (KVL_D / WORD_CODES * WORD_BYTES)
#define LEVEL_MAX ((1 << KVL_OPT_BITS) - 1)
#define CODE_MASK LEVEL_MAX
#define CLIP_STEP as_float((uint)KVL_OPT_CLIP_STEP)
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

/* Scales and zero points at index i of params: binary16, or 8 bits that differ from it in the exponent's bias alone, once they are moved to
 * their places. */
#define PARAM_MANTISSA KVL_OPT_PARAM_MANTISSA
#if PARAM_MANTISSA == 0
#define PARAM(params, i) kvl_load_half(params, i)
#define PARAMS16(params, i) vload_half16(0, (const KVL_GLOBAL half *)(params) + (i))
#define PARAMS8(params, i) vload_half8(0, (const KVL_GLOBAL half *)(params) + (i))
#else
#define PARAM_UNIT ((float)(1 << (15 - KVL_OPT_PARAM_BIAS)))
#define PARAM(params, i) KVL_FN(param)((params)[i])
#define PARAMS16(params, i) KVL_FN(params16)(vload16(0, (params) + (i)))
#define PARAMS8(params, i) KVL_FN(params16)((uchar16)(vload8(0, (params) + (i)), (uchar8)0)).lo

float KVL_FN(param)(uint code)
{
    const ushort bits = (ushort)((code & 0x80) << 8 | (code & 0x7f) << (10 - PARAM_MANTISSA));
    return vload_half(0, (const half *)&bits) * PARAM_UNIT;
}

/* The code next to x, of two the one whose magnitude is larger if is_away, else smaller; the largest one's for what is larger. */
uint KVL_FN(code_beside)(float x, bool is_away)
{
    const float magnitude = fabs(x);
    const int shift = 23 - PARAM_MANTISSA;
    uint code = as_uint(magnitude);
    if (magnitude < 0x1p-100f) return 0;
    if (magnitude < as_float((uint)(128 - KVL_OPT_PARAM_BIAS) << 23)) { /* subnormal */
        const float units = magnitude * as_float((uint)(126 + KVL_OPT_PARAM_BIAS + PARAM_MANTISSA) << 23);
        code = (uint)(is_away ? ceil(units) : floor(units));
    } else {
        code = ((code + (is_away ? (1u << shift) - 1 : 0)) >> shift) - ((uint)(127 - KVL_OPT_PARAM_BIAS) << PARAM_MANTISSA);
    }
    code = min(code, (uint)KVL_OPT_PARAM_MAX);
    return code == 0 ? 0 : code | (x < 0.0f ? 0x80 : 0);
}

#if KVL_VECTORS
float16 KVL_FN(params16)(uchar16 codes)
{
    const ushort16 bits = convert_ushort16(codes & (uchar)0x80) << (ushort)8 | convert_ushort16(codes & (uchar)0x7f) << (ushort)(10 - PARAM_MANTISSA);
    return vload_half16(0, (const half *)&bits) * PARAM_UNIT;
}
#endif
#endif

#if BLOCK
#define VECTORS (TOKENS > 1 ? KVL_D : BLOCK) /* channels or tokens that have outliers of their own */
#define BLOCKS (KVL_P / BLOCK)
#define FACTORS(block) (PARAM_BASE(block) + 2ul * PARAMS * (TOKENS > 1 ? (ulong)KVL_P / TOKENS * KVL_D : (ulong)KVL_P * N_GROUPS))
#define FACTOR_AT(b, k, i) (((ulong)(b)*RANK + (k)) * (BLOCK + KVL_D) + (i)) /* i: tokens, then channels */
#define VALUES(block) (FACTORS(block) + 2 * FACTOR_AT(BLOCKS, 0, 0))
#define SPARSE_AT(b, e, v) (((ulong)(b)*SPARSE + (e)) * VECTORS + (v))
#define INDICES(block) (VALUES(block) + 2 * SPARSE_AT(BLOCKS, 0, 0))
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

/* Channel c of token t by its code. */
float KVL_FN(dense)(const KVL_GLOBAL uchar *block, uint t, uint c)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
    const uint code = KVL_FN(code_at)(block, t, c / GROUP, c % GROUP);
    const float scale = PARAM(params, SCALE_AT(c, t));
#if KVL_OPT_ASYM
    return fma((float)code, scale, PARAM(params, ZERO_AT(c, t)));
#else
    return ((float)code - OFFSET) * scale;
#endif
}

#if BLOCK
/* The code's number and the low-rank part. */
float KVL_FN(smooth)(const KVL_GLOBAL uchar *block, uint t, uint c)
{
    float x = KVL_FN(dense)(block, t, c);
    for (uint k = 0; k < RANK; k++)
        x = fma(kvl_load_half(FACTORS(block), FACTOR_AT(t / BLOCK, k, t % BLOCK)),
                kvl_load_half(FACTORS(block), FACTOR_AT(t / BLOCK, k, BLOCK + c)), x);
    return x;
}
#endif

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
#if BLOCK
    for (uint i = 0; i < 8; i++) {
        const uint vector = TOKENS > 1 ? c + i : t % BLOCK, at = TOKENS > 1 ? t % BLOCK : c + i;
        o[i] = KVL_FN(smooth)(block, t, c + i);
        for (uint e = 0; e < SPARSE; e++)
            if (INDICES(block)[SPARSE_AT(t / BLOCK, e, vector)] == at) o[i] += kvl_load_half(VALUES(block), SPARSE_AT(t / BLOCK, e, vector));
    }
#else
    for (uint i = 0; i < 8; i++) o[i] = KVL_FN(dense)(block, t, c + i);
#endif
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

/* range / SCALE_STEPS, never -0: llvmpipe's fma loses the sign of zero. */
float KVL_FN(step)(float range) { return fabs(kvl_divide(range, (float)SCALE_STEPS)); }

/* Number i of the group that starts at row `row` and channel c of x. */
float KVL_FN(number)(kvl_rows x, uint row, uint c, uint i)
{
    return kvl_clamp_half(TOKENS > 1 ? kvl_row_at(x, row + i, c) : kvl_row_at(x, row, c + i));
}

#if BLOCK
/* Outliers of a group of n numbers, of each kind. */
uint KVL_FN(outliers_of)(uint n) { return min((uint)(SPARSE / 2), (n - 1) / 2); }

bool KVL_FN(is_listed)(const KVL_GLOBAL uchar *index, uint n, uint i)
{
#define IS_AT(e) || ((e) < SPARSE && (e) < n && index[(e) * VECTORS] == i)
    return false KVL_EIGHT(IS_AT);
#undef IS_AT
}

/* Indices of the largest numbers, then of as many smallest, the first of equal ones, VECTORS apart; those there are not are 0. */
void KVL_FN(find_outliers)(KVL_GLOBAL uchar *index, kvl_rows x, uint row, uint c, uint n)
{
    const uint each = KVL_FN(outliers_of)(n);
    for (uint e = 0; e < 2 * each; e++) {
        const float sign = e < each ? 1.0f : -1.0f;
        uint best = n;
        float top = 0.0f;
#define PICK(j)                                                                                                                    \
    if (i + j < n && (best == n || sign * KVL_FN(number)(x, row, c, i + j) > top) && !KVL_FN(is_listed)(index, e, i + j)) {        \
        best = i + j;                                                                                                              \
        top = sign * KVL_FN(number)(x, row, c, i + j);                                                                             \
    }
        for (uint i = 0; i < n; i += 8) { KVL_EIGHT(PICK) }
#undef PICK
        index[e * VECTORS] = (uchar)best;
    }
    for (uint e = 2 * each; e < SPARSE; e++) index[e * VECTORS] = 0;
}
#endif

/* Code of value x at channel c of token t, by the stored parameters. */
uint KVL_FN(code_of)(const KVL_GLOBAL uchar *params, uint t, uint c, float x)
{
    const float scale = PARAM(params, SCALE_AT(c, t));
#if KVL_OPT_ASYM
    const float zero = PARAM(params, ZERO_AT(c, t)), lowest = 0.0f, highest = (float)LEVEL_MAX;
#else
    const float zero = 0.0f, lowest = -(float)SCALE_STEPS, highest = (float)SCALE_STEPS;
#endif
    return (uint)(fmin(fmax(KVL_FN(quotient)(kvl_clamp_half(x) - zero, scale), lowest), highest) + OFFSET);
}

/* Stores the parameters of numbers from low to high, of which codes span `clip` about the middle. */
void KVL_FN(span_range)(KVL_GLOBAL uchar *params, uint t, uint c, float low, float high, float clip)
{
#if KVL_OPT_ASYM
    const float cut = 0.5f * (1.0f - clip), range = high - low, from = fma(cut, range, low), to = fma(-cut, range, high);
#if PARAM_MANTISSA == 0
    kvl_store_half(params, SCALE_AT(c, t), fmin(KVL_FN(step)(to - from), KVL_HALF_MAX));
    kvl_store_half(params, ZERO_AT(c, t), as_uint(from) << 1 == 0 ? 0.0f : from); /* never -0: fmin may give either */
#else
    params[ZERO_AT(c, t)] = (uchar)KVL_FN(code_beside)(from, from < 0.0f);
    params[SCALE_AT(c, t)] = (uchar)KVL_FN(code_beside)(KVL_FN(step)(fmax(to - PARAM(params, ZERO_AT(c, t)), 0.0f)), true);
#endif
#elif PARAM_MANTISSA == 0
    kvl_store_half(params, SCALE_AT(c, t), KVL_FN(step)(clip * fmax(fabs(low), fabs(high))));
#else
    params[SCALE_AT(c, t)] = (uchar)KVL_FN(code_beside)(KVL_FN(step)(clip * fmax(fabs(low), fabs(high))), true);
#endif
}

#if KVL_OPT_SEARCH
/* Squared error of the group's n numbers with the parameters that are stored. */
float KVL_FN(squared_error)(const KVL_GLOBAL uchar *params, uint t, uint c, kvl_rows x, uint row, uint n)
{
    const float scale = PARAM(params, SCALE_AT(c, t)), zero = KVL_OPT_ASYM ? PARAM(params, ZERO_AT(c, t)) : 0.0f;
    float sum = 0.0f;
#define ADD(j)                                                                                                                     \
    if (i + j < n) {                                                                                                               \
        const float value = KVL_FN(number)(x, row, c, i + j);                                                                      \
        const float rest = value - fma((float)KVL_FN(code_of)(params, t, c, value) - OFFSET, scale, zero);                         \
        sum = fma(rest, rest, sum);                                                                                                \
    }
    for (uint i = 0; i < n; i += 8) { KVL_EIGHT(ADD) }
#undef ADD
    return sum;
}

/* Of clips 1 - i * CLIP_STEP the one of least squared error, of equal ones the first. */
void KVL_FN(search_clip)(KVL_GLOBAL uchar *params, uint t, uint c, kvl_rows x, uint row, uint n, float low, float high)
{
    float least = 0.0f, best = 1.0f;
    for (uint i = 0; i <= KVL_OPT_SEARCH; i++) {
        const float clip = fma(-(float)i, CLIP_STEP, 1.0f);
        KVL_FN(span_range)(params, t, c, low, high, clip);
        const float error = KVL_FN(squared_error)(params, t, c, x, row, n);
        if (i > 0 && !(error < least)) continue;
        least = error;
        best = clip;
    }
    KVL_FN(span_range)(params, t, c, low, high, best);
}
#endif

/* Stores the parameters of the n numbers from row `row` and channel c of x on: their token is t. */
void KVL_FN(fit)(KVL_GLOBAL uchar *block, uint t, uint c, kvl_rows x, uint row, uint n)
{
    KVL_GLOBAL uchar *params = PARAM_BASE(block);
    float low = FLT_MAX, high = -FLT_MAX;
#if BLOCK
    KVL_GLOBAL uchar *index = INDICES(block) + SPARSE_AT(t / BLOCK, 0, TOKENS > 1 ? c : t % BLOCK);
    KVL_FN(find_outliers)(index, x, row, c, n);
#endif
    for (uint i = 0; i < n; i++) {
        const float value = KVL_FN(number)(x, row, c, i);
#if BLOCK
        if (KVL_FN(is_listed)(index, 2 * KVL_FN(outliers_of)(n), i)) continue;
#endif
        low = fmin(low, value);
        high = fmax(high, value);
    }
#if KVL_OPT_SEARCH
    KVL_FN(search_clip)(params, t, c, x, row, n, low, high);
#else
    KVL_FN(span_range)(params, t, c, low, high, 1.0f - CLIP_STEP);
#endif
}

/* Rows row .. row+n-1 of x as tokens t0 ... */
void KVL_FN(encode_codes)(KVL_GLOBAL uchar *block, uint t0, uint n, kvl_rows x, uint row)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
    for (uint i = 0; i < n; i += TOKENS)
        for (uint c = 0; c < KVL_D; c += TOKENS > 1 ? 1 : GROUP)
            KVL_FN(fit)(block, t0 + i, c, x, row + i, TOKENS > 1 ? min(n - i, (uint)TOKENS) : GROUP);
    for (uint i = 0; i < n; i++)
        for (uint g = 0; g < N_GROUPS; g++)
            for (uint w = 0; w < SPAN; w++) {
                uint word = 0;
                for (uint j = 0; j < WORD_CODES; j++) {
                    const uint c = g * GROUP + j * SPAN + w;
                    word |= KVL_FN(code_of)(params, t0 + i, c, kvl_row_at(x, row + i, c)) << (j * KVL_OPT_BITS);
                }
                for (uint k = 0; k < WORD_BYTES; k++) block[BYTE_AT(t0 + i, ROW(g, k, w))] = (uchar)(word >> 8 * k);
            }
}

#if BLOCK
/* Stores half(x), a zero as +0; what it becomes. */
float KVL_FN(store)(KVL_GLOBAL uchar *at, ulong i, float x)
{
    const float value = kvl_clamp_half(x);
    kvl_store_half(at, i, as_uint(value) << 1 == 0 ? 0.0f : value);
    return kvl_load_half(at, i);
}

/* Powers of two off, so that the largest magnitude is in [1, 2); next to nothing becomes 0. */
void KVL_FN(normalize)(float *x, uint n)
{
    float reach = 0.0f;
    for (uint i = 0; i < n; i++) reach = fmax(reach, fabs(x[i]));
    const float scale = reach < 0x1p-100f ? 0.0f : as_float((254u - (as_uint(reach) >> 23)) << 23);
    for (uint i = 0; i < n; i++) x[i] = scale == 0.0f ? 0.0f : x[i] * scale;
}

void KVL_FN(times)(const float *r, uint n, const float *channel, float *token)
{
#define ADD(i) sum = fma(r[t * KVL_D + c + i], channel[c + i], sum);
    for (uint t = 0; t < n; t++) {
        float sum = 0.0f;
        for (uint c = 0; c < KVL_D; c += 8) { KVL_EIGHT(ADD) }
        token[t] = sum;
    }
#undef ADD
}

void KVL_FN(transposed_times)(const float *r, uint n, const float *token, float *channel)
{
#define ADD(i) channel[c + i] = fma(r[t * KVL_D + c + i], token[t], channel[c + i]);
    for (uint c = 0; c < KVL_D; c++) channel[c] = 0.0f;
    for (uint t = 0; t < n; t++)
        for (uint c = 0; c < KVL_D; c += 8) { KVL_EIGHT(ADD) }
#undef ADD
}

/* Takes the strongest direction of r [n][D] off it and stores the two factors: gear.md. */
void KVL_FN(take_factor)(KVL_GLOBAL uchar *factors, uint b, uint k, float *r, uint n)
{
    float token[BLOCK], channel[KVL_D], square = 0.0f;
    for (uint c = 0; c < KVL_D; c++) channel[c] = (c + 1) * 0x9e3779b9u >> 31 ? -1.0f : 1.0f;
    for (uint i = 0; i < 3; i++) {
        KVL_FN(times)(r, n, channel, token);
        KVL_FN(normalize)(token, n);
        KVL_FN(transposed_times)(r, n, token, channel);
        KVL_FN(normalize)(channel, KVL_D);
    }
    for (uint c = 0; c < KVL_D; c++) {
        channel[c] = KVL_FN(store)(factors, FACTOR_AT(b, k, BLOCK + c), channel[c]);
        square = fma(channel[c], channel[c], square);
    }
    KVL_FN(times)(r, n, channel, token);
    for (uint t = 0; t < BLOCK; t++) {
        const bool is_nothing = t >= n || square == 0.0f || fabs(token[t]) < 0x1p-100f;
        token[t] = KVL_FN(store)(factors, FACTOR_AT(b, k, t), is_nothing ? 0.0f : kvl_divide(token[t], square));
    }
#define TAKE(i) r[t * KVL_D + c + i] = fma(-token[t], channel[c + i], r[t * KVL_D + c + i]);
    for (uint t = 0; t < n; t++)
        for (uint c = 0; c < KVL_D; c += 8) { KVL_EIGHT(TAKE) }
#undef TAKE
}

/* Rows row .. row+n-1 of x as the tokens of block b. */
void KVL_FN(encode_block)(KVL_GLOBAL uchar *block, uint b, uint n, kvl_rows x, uint row)
{
    float rest[BLOCK * KVL_D];
    const uint vectors = TOKENS > 1 ? KVL_D : n, each = KVL_FN(outliers_of)(TOKENS > 1 ? n : KVL_D);
    KVL_FN(encode_codes)(block, b * BLOCK, n, x, row);
    for (uint t = 0; t < n; t++)
#define REST(i) rest[t * KVL_D + c + i] = kvl_clamp_half(kvl_row_at(x, row + t, c + i)) - KVL_FN(dense)(block, b * BLOCK + t, c + i);
        for (uint c = 0; c < KVL_D; c += 8) { KVL_EIGHT(REST) }
#undef REST
    for (uint v = 0; v < vectors; v++)
        for (uint e = 0; e < 2 * each; e++) {
            const uint at = INDICES(block)[SPARSE_AT(b, e, v)];
            rest[TOKENS > 1 ? at * KVL_D + v : v * KVL_D + at] = 0.0f;
        }
    for (uint k = 0; k < RANK; k++) KVL_FN(take_factor)(FACTORS(block), b, k, rest, n);
    for (uint v = 0; v < VECTORS; v++)
        for (uint e = 0; e < SPARSE; e++) {
            float left = 0.0f;
            if (v < vectors && e < 2 * each) {
                const uint at = INDICES(block)[SPARSE_AT(b, e, v)], t = TOKENS > 1 ? at : v, c = TOKENS > 1 ? v : at;
                left = kvl_clamp_half(kvl_row_at(x, row + t, c)) - KVL_FN(smooth)(block, b * BLOCK + t, c);
            } else {
                INDICES(block)[SPARSE_AT(b, e, v)] = 0;
            }
            KVL_FN(store)(VALUES(block), SPARSE_AT(b, e, v), left);
        }
}
#endif

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
#if BLOCK
    for (uint i = 0; i < n; i += BLOCK) KVL_FN(encode_block)(block, (t0 + i) / BLOCK, min(n - i, (uint)BLOCK), x, i);
#else
    KVL_FN(encode_codes)(block, t0, n, x, 0);
#endif
}

#if TOKENS == 1 && BLOCK == 0
void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    for (uint b = 0; b < TOKEN_BYTES; b++) to[BYTE_AT(t_to, b)] = from[BYTE_AT(t_from, b)];
#if PARAM_MANTISSA == 0
    kvl_move_halves(PARAM_BASE(to), t_to, PARAM_BASE(from), t_from, N_GROUPS * PARAMS, KVL_P);
#else
    for (uint i = 0; i < N_GROUPS * PARAMS; i++) PARAM_BASE(to)[i * KVL_P + t_to] = PARAM_BASE(from)[i * KVL_P + t_from];
#endif
}
#endif

#if KVL_VECTORS
/* Tokens of a slice that have the same parameters by channel, and the same block. */
#define SHARED (TOKENS > 1 ? TOKENS : BLOCK)
#if SHARED == 0 || SHARED % KVL_SLICE == 0
#define RUN KVL_SLICE
#elif KVL_SLICE % SHARED == 0
#define RUN SHARED
#else
#define RUN 16
#endif
#if KVL_OPT_ASYM
#define ZERO16(params, scale, c, t) PARAMS16(params, ZERO_AT(c, t))
#else
#define ZERO16(params, scale, c, t) (-OFFSET * (scale))
#endif

#if BLOCK
#if SPARSE
#define REACH (KVL_IS_K ? RUN : KVL_D) /* tokens or channels that outliers of a run may be at */

/* Up to four rows, `stride` apart, gain the outliers of the n channels or tokens from `first` on, times these rows' factors; index_from: the token or
 * channel that rows begin at. The rows' numbers are side by side meanwhile, so that an outlier is added to all at once. */
void KVL_FN(add_outliers)(const KVL_GLOBAL uchar *block, uint b, uint first, uint n, uint index_from, const float *factor, uint factor_stride,
                          uint n_rows, float *rows, uint stride)
{
    const KVL_GLOBAL uchar *index = INDICES(block) + SPARSE_AT(b, 0, first);
    float16 sums[REACH / 4];
    float value[SPARSE * VECTORS], *sum = (float *)sums;
    for (uint i = 0; i < REACH / 4; i++) sums[i] = 0.0f;
    for (uint e = 0; e < SPARSE; e++)
        for (uint v = 0; v < n; v += 16)
            KVL_STORE16(vload_half16(0, (const KVL_GLOBAL half *)VALUES(block) + SPARSE_AT(b, e, first + v)), value + e * VECTORS + v);
    for (uint v = 0; v < n; v++) {
        const float4 all = (float4)(factor[v], n_rows > 1 ? factor[factor_stride + v] : 0.0f, n_rows > 2 ? factor[2 * factor_stride + v] : 0.0f,
                                    n_rows > 3 ? factor[3 * factor_stride + v] : 0.0f);
        KVL_UNROLL for (uint e = 0; e < SPARSE; e++)
        {
            const uint at = index[e * VECTORS + v] - index_from;
            if (BLOCK > RUN && at >= REACH) continue; /* of another run */
            vstore4(fma(all, value[e * VECTORS + v], vload4(at, sum)), at, sum);
        }
    }
    for (uint i = 0; i < REACH; i += 16) {
        const float16 *of_four = (const float16 *)(sum + 4 * i), low_even = (float16)(of_four[0].even, of_four[1].even),
                      low_odd = (float16)(of_four[0].odd, of_four[1].odd), high_even = (float16)(of_four[2].even, of_four[3].even),
                      high_odd = (float16)(of_four[2].odd, of_four[3].odd);
        const float16 gain[4] = {(float16)(low_even.even, high_even.even), (float16)(low_odd.even, high_odd.even),
                                 (float16)(low_even.odd, high_even.odd), (float16)(low_odd.odd, high_odd.odd)};
        KVL_UNROLL for (uint r = 0; r < 4; r++)
            if (r < n_rows) KVL_STORE16(vload16(0, rows + r * stride + i) + gain[r], rows + r * stride + i);
    }
}
#endif

/* Rows [NQ] of n numbers, `stride` apart, gain the run's low-rank part: the product of the rows of `from` with n_from numbers of one factor of a
 * pair, times n numbers of the other. */
void KVL_FN(add_low_rank)(const KVL_GLOBAL half *in, const float *from, uint from_stride, uint n_from, const KVL_GLOBAL half *out, float *rows,
                          uint stride, uint n)
{
    float16 weight[RANK * KVL_NQ + 1];
    KVL_UNROLL for (uint i = 0; i < RANK * KVL_NQ; i++) weight[i] = 0.0f;
    for (uint i = 0; i < n_from; i += 16)
        KVL_UNROLL for (uint k = 0; k < RANK; k++)
        {
            const float16 x = vload_half16(0, in + FACTOR_AT(0, k, i));
            KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                weight[k * KVL_NQ + r] = fma(vload16(0, from + r * from_stride + i), x, weight[k * KVL_NQ + r]);
        }
    KVL_UNROLL for (uint i = 0; i < RANK * KVL_NQ; i++) weight[i] = kvl_sum16(weight[i]);
    for (uint i = 0; i < n; i += 16)
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
        {
            float16 sum = vload16(0, rows + r * stride + i);
            KVL_UNROLL for (uint k = 0; k < RANK; k++) sum = fma(weight[k * KVL_NQ + r], vload_half16(0, out + FACTOR_AT(0, k, i)), sum);
            KVL_STORE16(sum, rows + r * stride + i);
        }
}
#endif

#if KVL_IS_K
#if !BLOCK
void KVL_FN(columns)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, float *x)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
    for (uint g = 0; g < N_GROUPS; g++) {
#if TOKENS == 1
        const float16 scale = PARAMS16(params, SCALE_AT(g * GROUP, t0)), zero = ZERO16(params, scale, g * GROUP, t0);
#endif
        for (uint b = 0; b < SPAN; b++) {
            uchar16 bytes[WORD_BYTES];
            KVL_UNROLL for (uint k = 0; k < WORD_BYTES; k++) bytes[k] = vload16(0, block + BYTE_AT(t0, ROW(g, k, b)));
            KVL_UNROLL for (uint j = 0; j < WORD_CODES; j++)
            {
                const uint c = g * GROUP + j * SPAN + b;
#if TOKENS > 1
                const float scale = PARAM(params, SCALE_AT(c, t0));
#if KVL_OPT_ASYM
                const float zero = PARAM(params, ZERO_AT(c, t0));
#else
                const float zero = -OFFSET * scale;
#endif
#endif
                KVL_STORE16(fma(convert_float16(KVL_CODES(bytes, j, KVL_OPT_BITS)), (float16)scale, (float16)zero), x + c * 16);
            }
        }
    }
}
#endif

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
    float16 sum[KVL_NQ];
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) sum[r] = 0.0f;
    for (uint c = 0; c < KVL_D; c += 16) {
        const float16 scale = PARAMS16(params, SCALE_AT(c, t)), zero = ZERO16(params, scale, c, t);
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
        {
            const float16 x = vload16(0, q + r * KVL_D + c);
            KVL_STORE16(x * scale, scaled + r * KVL_D + c);
            sum[r] = fma(x, zero, sum[r]);
        }
    }
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) base[r] = kvl_sum16(sum[r]);
}
#define FACTOR scaled
#else
#define FACTOR q
#endif

#if BLOCK
/* The low-rank and the sparse share of the scores of RUN tokens from t0 on. */
void KVL_FN(add_to_scores)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *q, KVL_QS float *out)
{
    const KVL_GLOBAL half *factors = (const KVL_GLOBAL half *)FACTORS(block) + FACTOR_AT(t0 / BLOCK, 0, 0);
    KVL_FN(add_low_rank)(factors + BLOCK, q, KVL_D, KVL_D, factors + t0 % BLOCK, out, KVL_B, RUN);
#if SPARSE
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r += 4)
        KVL_FN(add_outliers)(block, t0 / BLOCK, 0, KVL_D, t0 % BLOCK, q + r * KVL_D, KVL_D, KVL_NQ - r < 4 ? KVL_NQ - r : 4, out + r * KVL_B, KVL_B);
#endif
}
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
                    KVL_UNROLL for (uint k = 0; k < WORD_BYTES; k++) bytes[k] = vload16(0, block + BYTE_AT(t0 + t + 16 * w, ROW(g, k, b)));
                    KVL_UNROLL for (uint j = 0; j < WORD_CODES; j++)
                        kvl_add_to_rows(dot + w * KVL_NQ, FACTOR + g * GROUP + j * SPAN + b, KVL_D,
                                        convert_float16(KVL_CODES(bytes, j, KVL_OPT_BITS)));
                }
            }
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
#if TOKENS > 1
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) KVL_STORE16(dot[w * KVL_NQ + r] + base[r], out + r * KVL_B + t + 16 * w);
#else
                const float16 scale = PARAMS16(params, SCALE_AT(g * GROUP, t0 + t + 16 * w));
                const float16 zero = ZERO16(params, scale, g * GROUP, t0 + t + 16 * w);
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                {
                    KVL_QS float *o = out + r * KVL_B + t + 16 * w;
                    const float16 before = g == 0 ? (float16)0.0f : vload16(0, o);
                    KVL_STORE16(fma(dot[w * KVL_NQ + r], scale, fma(aux[r * N_GROUPS + g], zero, before)), o);
                }
#endif
            }
        }
    }
#if BLOCK
    for (uint t = 0; t < KVL_SLICE; t += RUN) KVL_FN(add_to_scores)(block, t0 + t, q, out + t);
#endif
}
#undef WIDE
#undef FACTOR
#else
/* Sums of values run over kvl_code_numbers(): number * UNIT(scale) + REST(scale, zero) is code * scale + zero. */
#define UNIT(scale) ((scale) * (1.0f / KVL_CODE_STEP(KVL_OPT_BITS)))
#define REST(scale, zero) fma((scale), -KVL_CODE_BASE(KVL_OPT_BITS) / KVL_CODE_STEP(KVL_OPT_BITS), zero)

/* What numbers of a run of tokens are multiplied by, into `scaled` [NQ][RUN]: p, or p * scale of group g; and the sum of p * zero point, or, where
 * parameters are by channel, of p. */
void KVL_FN(scale_weights)(const KVL_GLOBAL uchar *params, uint g, uint t0, const KVL_QS float *p, float *scaled, float *base_sum)
{
    float16 sum[KVL_NQ];
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) sum[r] = 0.0f;
    for (uint t = 0; t < RUN; t += 16) {
#if TOKENS > 1
        const float16 unit = 1.0f, rest = 1.0f;
#else
        const float16 scale = PARAMS16(params, SCALE_AT(g * GROUP, t0 + t)), unit = UNIT(scale);
        const float16 rest = REST(scale, ZERO16(params, scale, g * GROUP, t0 + t));
#endif
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
        {
            const float16 weight = vload16(0, p + r * KVL_B + t);
            KVL_STORE16(weight * unit, scaled + r * RUN + t);
            sum[r] = fma(weight, rest, sum[r]);
        }
    }
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) base_sum[r] = kvl_sum16(sum[r]);
}

/* Words and codes that are neighbouring channels side by side in a vector. One pass sums vectors of codes j0 .. j0 + AT_ONCE - 1 of WIDE vectors of
 * words: SUMS vectors [WIDE][AT_ONCE][NQ]. */
#define WORDS KVL_WORDS_ABREAST(SPAN, WORD_CODES)
#define TOGETHER KVL_CODES_ABREAST(SPAN, WORD_CODES)
#define AT_ONCE KVL_CODES_AT_ONCE(SPAN, WORD_CODES)
#define WIDE (WORDS != 0 && SPAN % (WORDS * KVL_WIDE / AT_ONCE) == 0 ? KVL_WIDE / AT_ONCE : 1)
#define SUMS (WIDE * AT_ONCE * KVL_NQ)
#define CHANNEL(i) ((i) / KVL_NQ / AT_ONCE * WORDS + (j0 + (i) / KVL_NQ % AT_ONCE) * TOGETHER * SPAN)

#if KVL_WORDS_ABREAST(SPAN, WORD_CODES) * KVL_CODES_ABREAST(SPAN, WORD_CODES) == 8
#define LANE_PARAMS(params, i) (float16)(PARAMS8(params, i), (float8)0.0f)
#else
#define LANE_PARAMS PARAMS16
#endif

/* acc, at channel c of its row, gains a run's sums of numbers; sum_p: base_sum of scale_weights(). */
void KVL_FN(add_sums)(const KVL_GLOBAL uchar *params, uint t0, uint c, float16 sum, float sum_p, KVL_QS float *acc)
{
    float16 gain = sum + sum_p;
#if TOKENS > 1
    const float16 scale = LANE_PARAMS(params, SCALE_AT(c, t0));
#if KVL_OPT_ASYM
    const float16 zero = LANE_PARAMS(params, ZERO_AT(c, t0));
#else
    const float16 zero = -OFFSET * scale;
#endif
    gain = fma(sum, UNIT(scale), sum_p * REST(scale, zero));
#endif
    kvl_add_lanes(acc + c, gain, WORDS * TOGETHER);
}

void KVL_FN(accumulate_run)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
    const KVL_GLOBAL uchar *params = PARAM_BASE(block);
    for (uint g = 0; g < N_GROUPS; g++) {
        float scaled[KVL_NQ * RUN], base_sum[KVL_NQ];
        KVL_FN(scale_weights)(params, g, t0, p, scaled, base_sum);
#if KVL_WORDS_ABREAST(SPAN, WORD_CODES)
        for (uint b = 0; b < SPAN; b += WORDS * WIDE) {
            KVL_UNROLL for (uint j0 = 0; j0 < KVL_CODE_VECTORS(SPAN, WORD_CODES); j0 += AT_ONCE)
            {
                float16 sum[SUMS];
                KVL_UNROLL for (uint i = 0; i < SUMS; i++) sum[i] = 0.0f;
                for (uint t = 0; t < RUN; t++) {
                    KVL_UNROLL for (uint w = 0; w < WIDE; w++)
                    {
                        const uint16 words = kvl_words(block + BYTE_AT(t0 + t, ROW(g, 0, b + WORDS * w)), SPAN, WORD_BYTES, WORDS);
                        KVL_UNROLL for (uint j = 0; j < AT_ONCE; j++)
                            kvl_add_to_rows(sum + (w * AT_ONCE + j) * KVL_NQ, scaled + t, RUN,
                                            kvl_code_numbers(words, kvl_code_at(j0 + j, KVL_OPT_BITS, TOGETHER), KVL_OPT_BITS));
                    }
                }
                KVL_UNROLL for (uint i = 0; i < SUMS; i++)
                    KVL_FN(add_sums)(params, t0, g * GROUP + b + CHANNEL(i), sum[i], base_sum[i % KVL_NQ], acc + i % KVL_NQ * KVL_D);
            }
        }
#else
        for (uint r = 0; r < KVL_NQ; r++)
            for (uint i = 0; i < GROUP; i++) {
                const uint c = g * GROUP + i;
                float sum = 0.0f;
                for (uint t = 0; t < RUN; t++) sum = fma(p[r * KVL_B + t], KVL_FN(dense)(block, t0 + t, c), sum);
                acc[r * KVL_D + c] += sum;
            }
#endif
    }
}

#if BLOCK
/* The low-rank and the sparse share of RUN tokens from t0 on. */
void KVL_FN(add_to_values)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
    const KVL_GLOBAL half *factors = (const KVL_GLOBAL half *)FACTORS(block) + FACTOR_AT(t0 / BLOCK, 0, 0);
    KVL_FN(add_low_rank)(factors + t0 % BLOCK, p, KVL_B, RUN, factors + BLOCK, acc, KVL_D, KVL_D);
#if SPARSE
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r += 4)
        KVL_FN(add_outliers)(block, t0 / BLOCK, t0 % BLOCK, RUN, 0, p + r * KVL_B, KVL_B, KVL_NQ - r < 4 ? KVL_NQ - r : 4, acc + r * KVL_D, KVL_D);
#endif
}
#endif

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p,
                        KVL_QS float *acc)
{
    for (uint t = 0; t < KVL_SLICE; t += RUN) {
        KVL_FN(accumulate_run)(block, t0 + t, p + t, acc);
#if BLOCK
        KVL_FN(add_to_values)(block, t0 + t, p + t, acc);
#endif
    }
}
#undef WORDS
#undef TOGETHER
#undef AT_ONCE
#undef WIDE
#undef SUMS
#undef CHANNEL
#undef LANE_PARAMS
#undef UNIT
#undef REST
#endif
#undef REACH
#undef ZERO16
#undef RUN
#undef SHARED
#endif
#undef GROUP
#undef TOKENS
#undef BLOCK
#undef RANK
#undef SPARSE
#undef VECTORS
#undef BLOCKS
#undef FACTORS
#undef FACTOR_AT
#undef VALUES
#undef SPARSE_AT
#undef INDICES
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
#undef PARAM_MANTISSA
#undef PARAM
#undef PARAMS16
#undef PARAMS8
#undef PARAM_UNIT
#undef CLIP_STEP
#undef OFFSET
#undef SCALE_STEPS
#undef PARAM_BASE
#undef SCALE_AT
#undef ZERO_AT
