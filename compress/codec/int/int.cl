/* Device body of the integer codecs (KVL_OPT_BITS 8, 4, 3 or 2). Layout and arithmetic: card.md, kivi.md, gear.md.
 * A word is WORD_BYTES bytes that hold WORD_CODES codes, those of channels SPAN apart in a GROUP. Byte row b of a token: K [rows][P],
 * V [P][rows]; then scale (and zero), binary16 or 8 bits: with TOKENS 1 per group and token, else per channel and TOKENS tokens (GROUP is the head).
 * With BLOCK, for every BLOCK tokens: RANK pairs of factors, then OUTLIERS largest and smallest numbers of each channel or token, then their
 * indices. */
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
    kvl_move_halves(PARAM_BASE(to), t_to, PARAM_BASE(from), t_from, N_GROUPS * PARAMS, KVL_P);
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
            vstore16(x * PARAMS16(params, SCALE_AT(c, t)), 0, scaled + r * KVL_D + c);
            sum = fma(x, PARAMS16(params, ZERO_AT(c, t)), sum);
        }
        base[r] = kvl_sum16(sum);
    }
}
#define FACTOR scaled
#else
#define FACTOR q
#endif

#if BLOCK
/* The low-rank and the sparse share of the scores of RUN tokens from t0 on. */
void KVL_FN(add_to_scores)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *q, KVL_QS float *out)
{
    const uint b = t0 / BLOCK;
    for (uint k = 0; k < RANK; k++) {
        const KVL_GLOBAL half *factor = (const KVL_GLOBAL half *)FACTORS(block) + FACTOR_AT(b, k, 0);
        for (uint r = 0; r < KVL_NQ; r++) {
            float16 sum = 0.0f;
            for (uint c = 0; c < KVL_D; c += 16) sum = fma(vload16(0, q + r * KVL_D + c), vload_half16(0, factor + BLOCK + c), sum);
            const float weight = kvl_sum16(sum);
            for (uint t = 0; t < RUN; t += 16) {
                KVL_QS float *o = out + r * KVL_B + t;
                vstore16(fma(weight, vload_half16(0, factor + t0 % BLOCK + t), vload16(0, o)), 0, o);
            }
        }
    }
    for (uint e = 0; e < SPARSE; e++)
        for (uint v = 0; v < VECTORS; v++) {
            const uint at = INDICES(block)[SPARSE_AT(b, e, v)];
            const uint t = (TOKENS > 1 ? at : v) - t0 % BLOCK, c = TOKENS > 1 ? v : at;
            const float value = kvl_load_half(VALUES(block), SPARSE_AT(b, e, v));
            if (t < RUN)
                for (uint r = 0; r < KVL_NQ; r++) out[r * KVL_B + t] = fma(q[r * KVL_D + c], value, out[r * KVL_B + t]);
        }
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
                const float16 scale = PARAMS16(params, SCALE_AT(g * GROUP, t0 + t + 16 * w));
#if KVL_OPT_ASYM
                const float16 base = PARAMS16(params, ZERO_AT(g * GROUP, t0 + t + 16 * w));
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
#if BLOCK
    for (uint t = 0; t < KVL_SLICE; t += RUN) KVL_FN(add_to_scores)(block, t0 + t, q, out + t);
#endif
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
        const float16 scale = PARAMS16(params, SCALE_AT(g * GROUP, t0 + t));
#if KVL_OPT_ASYM
        const float16 zero = PARAMS16(params, ZERO_AT(g * GROUP, t0 + t));
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

/* Words side by side in a vector: their codes j are neighbouring channels, and where there are few words, so are the codes j + 1 behind them:
 * WORDS words, TOGETHER codes of each, LANES channels. */
#if SPAN % 16 == 0
#define WORDS 16
#define TOGETHER 1
#elif SPAN == 8 && WORD_CODES % 2 == 0
#define WORDS 8
#define TOGETHER 2
#elif SPAN == 4 && WORD_CODES % 4 == 0
#define WORDS 4
#define TOGETHER 4
#elif SPAN % 8 == 0
#define WORDS 8
#define TOGETHER 1
#endif
#ifdef WORDS
#define LANES (WORDS * TOGETHER)
#if WORDS == 16
#define BYTES uchar16
#define LOAD_BYTES vload16
#elif WORDS == 8
#define BYTES uchar8
#define LOAD_BYTES vload8
#else
#define BYTES uchar4
#define LOAD_BYTES vload4
#endif
#if TOGETHER == 1
#define SIDE_BY_SIDE KVL_CODES
#elif TOGETHER == 2
#define SIDE_BY_SIDE KVL_CODES2
#else
#define SIDE_BY_SIDE KVL_CODES4
#endif
#if LANES == 16
#define FLOATS float16
#define TO_FLOATS convert_float16
#define LOAD vload16
#define LOAD_PARAMS PARAMS16
#define STORE vstore16
#else
#define FLOATS float8
#define TO_FLOATS convert_float8
#define LOAD vload8
#define LOAD_PARAMS PARAMS8
#define STORE vstore8
#endif
/* One pass sums vectors of codes j0 .. j0 + AT_ONCE - 1 of WIDE vectors of words: SUMS vectors [WIDE][AT_ONCE][NQ]. */
#define CODE_VECTORS (WORD_CODES / TOGETHER)
#define AT_ONCE (CODE_VECTORS < KVL_WIDE ? CODE_VECTORS : KVL_WIDE)
#define WIDE (SPAN % (WORDS * KVL_WIDE / AT_ONCE) == 0 ? KVL_WIDE / AT_ONCE : 1)
#define SUMS (WIDE * AT_ONCE * KVL_NQ)
#define CHANNEL(i) ((i) / KVL_NQ / AT_ONCE * WORDS + (j0 + (i) / KVL_NQ % AT_ONCE) * TOGETHER * SPAN)
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
#ifdef WORDS
        for (uint b = 0; b < SPAN; b += WORDS * WIDE) {
            KVL_UNROLL for (uint j0 = 0; j0 < CODE_VECTORS; j0 += AT_ONCE)
            {
                FLOATS sum[SUMS];
                KVL_UNROLL for (uint i = 0; i < SUMS; i++)
                    sum[i] = START(LOAD(0, group + i % KVL_NQ * KVL_D + b + CHANNEL(i)), base_sum[i % KVL_NQ]);
                for (uint t = 0; t < RUN; t++) {
                    KVL_UNROLL for (uint w = 0; w < WIDE; w++)
                    {
                        BYTES bytes[WORD_BYTES];
                        KVL_UNROLL for (uint k = 0; k < WORD_BYTES; k++)
                            bytes[k] = LOAD_BYTES(0, block + BYTE_AT(t0 + t, ROW(g, k, b + WORDS * w)));
                        KVL_UNROLL for (uint j = 0; j < AT_ONCE; j++)
                        {
                            const FLOATS v = TO_FLOATS(SIDE_BY_SIDE(bytes, j0 + j, KVL_OPT_BITS));
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
                    sum[i] = fma(sum[i], LOAD_PARAMS(params, SCALE_AT(b + CHANNEL(i), t0)),
                                 fma(base_sum[i % KVL_NQ], LOAD_PARAMS(params, ZERO_AT(b + CHANNEL(i), t0)), LOAD(0, to)));
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
                sum = fma(sum, PARAM(params, SCALE_AT(i, t0)), fma(base_sum[r], PARAM(params, ZERO_AT(i, t0)), *to));
#endif
                *to = sum;
            }
#endif
    }
}
#undef START

#if BLOCK
/* The low-rank and the sparse share of RUN tokens from t0 on. */
void KVL_FN(add_to_values)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
    const uint b = t0 / BLOCK;
    for (uint k = 0; k < RANK; k++) {
        const KVL_GLOBAL half *factor = (const KVL_GLOBAL half *)FACTORS(block) + FACTOR_AT(b, k, 0);
        for (uint r = 0; r < KVL_NQ; r++) {
            float16 sum = 0.0f;
            for (uint t = 0; t < RUN; t += 16) sum = fma(vload16(0, p + r * KVL_B + t), vload_half16(0, factor + t0 % BLOCK + t), sum);
            const float weight = kvl_sum16(sum);
            for (uint c = 0; c < KVL_D; c += 16) {
                KVL_QS float *o = acc + r * KVL_D + c;
                vstore16(fma(weight, vload_half16(0, factor + BLOCK + c), vload16(0, o)), 0, o);
            }
        }
    }
    for (uint e = 0; e < SPARSE; e++)
        for (uint v = 0; v < VECTORS; v++) {
            const uint at = INDICES(block)[SPARSE_AT(b, e, v)];
            const uint t = (TOKENS > 1 ? at : v) - t0 % BLOCK, c = TOKENS > 1 ? v : at;
            const float value = kvl_load_half(VALUES(block), SPARSE_AT(b, e, v));
            if (t < RUN)
                for (uint r = 0; r < KVL_NQ; r++) acc[r * KVL_D + c] = fma(p[r * KVL_B + t], value, acc[r * KVL_D + c]);
        }
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
#undef LANES
#undef LOAD_BYTES
#undef SIDE_BY_SIDE
#undef CODE_VECTORS
#undef FLOATS
#undef BYTES
#undef TO_FLOATS
#undef LOAD
#undef LOAD_PARAMS
#undef STORE
#undef AT_ONCE
#undef WIDE
#undef SUMS
#undef CHANNEL
#endif
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
