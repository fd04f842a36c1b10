/* Device body of turboquant: KVL_OPT_BITS a code, level L stands for L |x| / sqrt(M). Layout and arithmetic: card.md. A word is WORD_BYTES bytes
 * that hold WORD_CODES codes, those of channels SPAN apart. Byte row b of a token: K [rows][P], V [P][rows], first the words, then the signs of
 * the sketch; then scale (and the sketch's) per token, binary16. */
#define BITS KVL_OPT_BITS
#define WORD_BYTES (8 % BITS == 0 ? 1 : BITS)
#define WORD_CODES (8 * WORD_BYTES / BITS)
#define SPAN (KVL_D / WORD_CODES) /* words of a token */
#define HALF (1 << (BITS - 1))
#define SIGN_BYTES (KVL_D / 8)
#define SIGN_ROW (SPAN * WORD_BYTES)
#define TOKEN_BYTES (SIGN_ROW + KVL_OPT_SKETCH * SIGN_BYTES)
#define ROW(k, w) ((k)*SPAN + (w)) /* byte k of word w */
#if KVL_IS_K
#define BYTE_AT(t, b) ((ulong)(b) * KVL_P + (t))
#else
#define BYTE_AT(t, b) ((ulong)(t) * TOKEN_BYTES + (b))
#endif
#define SCALES(block) ((block) + (ulong)TOKEN_BYTES * KVL_P)
#define SKETCH_SCALES(block) (SCALES(block) + 2ul * KVL_P)

constant char KVL_FN(levels)[8] = {KVL_OPT_LEVEL0, KVL_OPT_LEVEL1, KVL_OPT_LEVEL2, KVL_OPT_LEVEL3,
                                   KVL_OPT_LEVEL4, KVL_OPT_LEVEL5, KVL_OPT_LEVEL6, KVL_OPT_LEVEL7};
float KVL_FN(level)(uint code)
{
    return code < HALF ? -(float)KVL_FN(levels)[HALF - 1 - code] : (float)KVL_FN(levels)[code - HALF];
}

/* Code of channel c of token t. */
uint KVL_FN(code_at)(const KVL_GLOBAL uchar *block, uint t, uint c)
{
    const uint bit = c / SPAN * BITS, k = bit / 8, w = c % SPAN;
    uint bytes = block[BYTE_AT(t, ROW(k, w))];
#if 8 % BITS != 0
    if (k + 1 < WORD_BYTES) bytes |= (uint)block[BYTE_AT(t, ROW(k + 1, w))] << 8;
#endif
    return bytes >> bit % 8 & ((1 << BITS) - 1);
}

/* The binary16 nearest to sqrt(sum / m), stored: between two of them the exact square of their middle decides. */
void KVL_FN(store_root)(KVL_GLOBAL uchar *scales, uint t, float sum, float m)
{
    KVL_GLOBAL ushort *bits = (KVL_GLOBAL ushort *)scales + t;
    kvl_store_half(scales, t, sqrt(sum / m));
    const ushort h = *bits;
    const float here = kvl_load_half(scales, t);
    *bits = h ? h - 1 : 0;
    const float below = 0.5f * (here + kvl_load_half(scales, t));
    *bits = h + 1;
    const float above = 0.5f * (here + kvl_load_half(scales, t));
    *bits = sum < below * below * m ? h - 1 : sum >= above * above * m ? h + 1 : h;
}

#if KVL_OPT_SKETCH
/* The sketch's rotation: signs, Hadamard, signs, Hadamard; head_dim times an orthogonal matrix. */
#define FLIP(i) x[first + i] = KVL_FN(is_flipped)(round, first + i) ? -x[first + i] : x[first + i];
#define BUTTERFLY(i, near)                                                                                                         \
    {                                                                                                                              \
        const float a = x[first + (i)], b = x[first + (i) + (near)];                                                               \
        x[first + (i)] = a + b;                                                                                                    \
        x[first + (i) + (near)] = a - b;                                                                                           \
    }
#define FAR(i) BUTTERFLY(i, near)
#define SIGN_BIT(j) byte |= (uint)(value[j * SIGN_BYTES + w] >= 0.0f) << j;
bool KVL_FN(is_flipped)(uint round, uint c)
{
    uint h = ((uint)KVL_OPT_SEED * 2u + round) * 0x9e3779b9u + c * 0x85ebca6bu;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h >> 31 != 0;
}

void KVL_FN(flip)(float *x, uint round)
{
    for (uint first = 0; first < KVL_D; first += 8) { KVL_EIGHT(FLIP) }
}

void KVL_FN(hadamard)(float *x)
{
    for (uint first = 0; first < KVL_D; first += 8) {
        BUTTERFLY(0, 1) BUTTERFLY(2, 1) BUTTERFLY(4, 1) BUTTERFLY(6, 1)
        BUTTERFLY(0, 2) BUTTERFLY(1, 2) BUTTERFLY(4, 2) BUTTERFLY(5, 2)
        BUTTERFLY(0, 4) BUTTERFLY(1, 4) BUTTERFLY(2, 4) BUTTERFLY(3, 4)
    }
    for (uint near = 8; near < KVL_D; near *= 2)
        for (uint first = 0; first < KVL_D; first += 8)
            if ((first & near) == 0) { KVL_EIGHT(FAR) }
}

void KVL_FN(spin)(float *x)
{
    for (uint round = 0; round < 2; round++) {
        KVL_FN(flip)(x, round);
        KVL_FN(hadamard)(x);
    }
}

void KVL_FN(spin_back)(float *x)
{
    for (uint round = 2; round-- > 0;) {
        KVL_FN(hadamard)(x);
        KVL_FN(flip)(x, round);
    }
}
#endif

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    const float scale = kvl_load_half(SCALES(block), t);
    for (uint i = 0; i < 8; i++) o[i] = KVL_FN(level)(KVL_FN(code_at)(block, t, c + i)) * scale;
#if KVL_OPT_SKETCH
    float sign[KVL_D];
    for (uint i = 0; i < KVL_D; i++)
        sign[i] = block[BYTE_AT(t, SIGN_ROW + i % SIGN_BYTES)] >> i / SIGN_BYTES & 1 ? 1.0f : -1.0f;
    KVL_FN(spin_back)(sign);
    for (uint i = 0; i < 8; i++) o[i] = fma(sign[c + i], kvl_load_half(SKETCH_SCALES(block), t), o[i]);
#endif
}

float KVL_FN(input)(kvl_rows x, uint row, uint c)
{
    const float value = kvl_row_at(x, row, c);
    return fabs(value) < 0x1p-100f ? 0.0f : kvl_clamp_half(value);
}

/* The nearest level: middles between levels times the scale are exact. */
uint KVL_FN(nearest)(float x, float scale)
{
    const float twice = 2.0f * fabs(x);
    uint above = 0; /* levels of the positive half that the magnitude leaves behind; from a middle the code goes down */
    for (uint k = 1; k < HALF; k++) {
        const float middle = (float)(KVL_FN(levels)[k - 1] + KVL_FN(levels)[k]) * scale;
        above += x > 0.0f ? twice > middle : twice >= middle;
    }
    if (scale == 0.0f) return 0;
    return x > 0.0f ? HALF + above : HALF - 1 - above;
}

void KVL_FN(encode_row)(KVL_GLOBAL uchar *block, uint t, kvl_rows x, uint row)
{
    float value[KVL_D], sum = 0.0f;
    for (uint c = 0; c < KVL_D; c++) {
        value[c] = KVL_FN(input)(x, row, c);
        sum = fma(value[c], value[c], sum);
    }
    KVL_FN(store_root)(SCALES(block), t, sum, (float)KVL_OPT_M);
    const float scale = kvl_load_half(SCALES(block), t);
    sum = 0.0f;
    for (uint w = 0; w < SPAN; w++) {
        uint word = 0;
        for (uint j = 0; j < WORD_CODES; j++) {
            const uint c = j * SPAN + w, code = KVL_FN(nearest)(value[c], scale);
            value[c] -= KVL_FN(level)(code) * scale;
            word |= code << (j * BITS);
        }
        for (uint k = 0; k < WORD_BYTES; k++) block[BYTE_AT(t, ROW(k, w))] = (uchar)(word >> 8 * k);
    }
#if KVL_OPT_SKETCH
    for (uint c = 0; c < KVL_D; c++) sum = fma(value[c], value[c], sum);
    KVL_FN(store_root)(SKETCH_SCALES(block), t, sum, (float)KVL_OPT_RESIDUAL_M);
    KVL_FN(spin)(value);
    for (uint w = 0; w < SIGN_BYTES; w++) {
        uint byte = 0;
        KVL_EIGHT(SIGN_BIT)
        block[BYTE_AT(t, SIGN_ROW + w)] = (uchar)byte;
    }
#endif
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
    for (uint i = 0; i < n; i++) KVL_FN(encode_row)(block, t0 + i, x, i);
}

void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    for (uint b = 0; b < TOKEN_BYTES; b++) to[BYTE_AT(t_to, b)] = from[BYTE_AT(t_from, b)];
    kvl_move_halves(SCALES(to), t_to, SCALES(from), t_from, 1 + KVL_OPT_SKETCH, KVL_P);
}

#if KVL_VECTORS
/* Levels of a vector of codes: one byte shuffle where the compiler knows it. */
#define LEVEL(i) (char)((i) < HALF ? -LEVELS(HALF - 1 - (i)) : LEVELS((i)-HALF))
#define LEVELS(i) ((i) == 0 ? KVL_OPT_LEVEL0 : (i) == 1 ? KVL_OPT_LEVEL1 : (i) == 2 ? KVL_OPT_LEVEL2 : (i) == 3 ? KVL_OPT_LEVEL3 : (i) == 4 ? KVL_OPT_LEVEL4 : (i) == 5 ? KVL_OPT_LEVEL5 : (i) == 6 ? KVL_OPT_LEVEL6 : KVL_OPT_LEVEL7)
#define LEVEL_TABLE                                                                                                                \
    (char16)(LEVEL(0), LEVEL(1), LEVEL(2), LEVEL(3), LEVEL(4), LEVEL(5), LEVEL(6), LEVEL(7), LEVEL(8), LEVEL(9), LEVEL(10), LEVEL(11), \
             LEVEL(12), LEVEL(13), LEVEL(14), LEVEL(15))
#if KVL_IS_K
void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux)
{
#if KVL_OPT_SKETCH
    /* aux [D / 4][16]: what four signs of the sketch, the bits of half a byte, add to a score: of the lower half of byte 0, its upper half ... */
    const float16 bit0 = (float16)((float8)((float4)(-1, 1, -1, 1), (float4)(-1, 1, -1, 1)), (float8)((float4)(-1, 1, -1, 1), (float4)(-1, 1, -1, 1)));
    const float16 bit1 = (float16)((float4)(-1, -1, 1, 1), (float4)(-1, -1, 1, 1), (float4)(-1, -1, 1, 1), (float4)(-1, -1, 1, 1));
    const float16 bit2 = (float16)((float4)-1, (float4)1, (float4)-1, (float4)1), bit3 = (float16)((float8)-1, (float8)1);
    float spun[KVL_D];
    for (uint c = 0; c < KVL_D; c++) spun[c] = q[c];
    KVL_FN(spin)(spun);
    for (uint i = 0; i < KVL_D / 4; i++) {
        const float *x = spun + i % 2 * 4 * SIGN_BYTES + i / 2;
        KVL_STORE16(x[0] * bit0 + x[SIGN_BYTES] * bit1 + x[2 * SIGN_BYTES] * bit2 + x[3 * SIGN_BYTES] * bit3, aux + 16 * i);
    }
#endif
}

#define WIDE (KVL_SLICE % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

#if KVL_OPT_SKETCH
/* Adds the sketch's share of the scores of 16 * WIDE tokens. */
void KVL_FN(add_sketch)(const KVL_GLOBAL uchar *block, uint t0, const KVL_QS float *aux, KVL_QS float *out)
{
    float16 dot[WIDE * KVL_NQ];
    KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
    for (uint b = 0; b < SIGN_BYTES; b++) {
        KVL_UNROLL for (uint w = 0; w < WIDE; w++)
        {
            const uint16 bytes = convert_uint16(vload16(0, block + BYTE_AT(t0 + 16 * w, SIGN_ROW + b)));
            KVL_UNROLL for (uint half_byte = 0; half_byte < 2; half_byte++)
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                    dot[w * KVL_NQ + r] += kvl_pick_floats(vload16(2 * b + half_byte, aux + r * 4 * KVL_D), bytes >> 4 * half_byte & 15u);
        }
    }
    KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++)
    {
        KVL_QS float *o = out + i % KVL_NQ * KVL_B + i / KVL_NQ * 16;
        const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)SKETCH_SCALES(block) + t0 + i / KVL_NQ * 16);
        KVL_STORE16(fma(dot[i], scale, vload16(0, o)), o);
    }
}
#endif

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, KVL_QS float *out)
{
    const char16 levels = LEVEL_TABLE;
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
        float16 dot[WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
        for (uint b = 0; b < SPAN; b++) {
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                uchar16 bytes[WORD_BYTES];
                KVL_UNROLL for (uint k = 0; k < WORD_BYTES; k++) bytes[k] = vload16(0, block + BYTE_AT(t0 + t + 16 * w, ROW(k, b)));
                KVL_UNROLL for (uint j = 0; j < WORD_CODES; j++)
                    kvl_add_to_rows(dot + w * KVL_NQ, q + j * SPAN + b, KVL_D, convert_float16(kvl_pick16(levels, KVL_CODES(bytes, j, BITS))));
            }
        }
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++)
        {
            const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)SCALES(block) + t0 + t + i / KVL_NQ * 16);
            KVL_STORE16(dot[i] * scale, out + i % KVL_NQ * KVL_B + t + i / KVL_NQ * 16);
        }
#if KVL_OPT_SKETCH
        KVL_FN(add_sketch)(block, t0 + t, aux, out + t);
#endif
    }
}
#undef WIDE
#else
/* Words and codes that are neighbouring channels side by side in a vector. One pass sums vectors of codes j0 .. j0 + AT_ONCE - 1 of a vector of
 * words: SUMS vectors [AT_ONCE][NQ]. */
#define WORDS KVL_WORDS_ABREAST(SPAN, WORD_CODES)
#define TOGETHER KVL_CODES_ABREAST(SPAN, WORD_CODES)
#define AT_ONCE KVL_CODES_AT_ONCE(SPAN, WORD_CODES)
#define SUMS (AT_ONCE * KVL_NQ)
#define CHANNEL(i) ((j0 + (i) / KVL_NQ) * TOGETHER * SPAN)

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p,
                        KVL_QS float *acc)
{
    float scaled[KVL_NQ * KVL_SLICE]; /* p * scale */
    for (uint i = 0; i < KVL_NQ * KVL_SLICE; i += 16) {
        const float16 scale = vload_half16(0, (const KVL_GLOBAL half *)SCALES(block) + t0 + i % KVL_SLICE);
        KVL_STORE16(scale * vload16(0, p + i / KVL_SLICE * KVL_B + i % KVL_SLICE), scaled + i);
    }
#if KVL_WORDS_ABREAST(SPAN, WORD_CODES)
    const float16 levels = convert_float16(LEVEL_TABLE);
    for (uint b = 0; b < SPAN; b += WORDS) {
        KVL_UNROLL for (uint j0 = 0; j0 < KVL_CODE_VECTORS(SPAN, WORD_CODES); j0 += AT_ONCE)
        {
            float16 sum[SUMS];
            KVL_UNROLL for (uint i = 0; i < SUMS; i++) sum[i] = 0.0f;
            for (uint t = 0; t < KVL_SLICE; t++) {
                const uint16 words = kvl_words(block + BYTE_AT(t0 + t, ROW(0, b)), SPAN, WORD_BYTES, WORDS);
                KVL_UNROLL for (uint j = 0; j < AT_ONCE; j++)
                    kvl_add_to_rows(sum + j * KVL_NQ, scaled + t, KVL_SLICE,
                                    kvl_pick_floats(levels, words >> kvl_code_at(j0 + j, BITS, TOGETHER) & (1u << BITS) - 1));
            }
            KVL_UNROLL for (uint i = 0; i < SUMS; i++) kvl_add_lanes(acc + i % KVL_NQ * KVL_D + b + CHANNEL(i), sum[i], WORDS * TOGETHER);
        }
    }
#else
    for (uint r = 0; r < KVL_NQ; r++)
        for (uint c = 0; c < KVL_D; c++) {
            float sum = acc[r * KVL_D + c];
            for (uint t = 0; t < KVL_SLICE; t++)
                sum = fma(scaled[r * KVL_SLICE + t], KVL_FN(level)(KVL_FN(code_at)(block, t0 + t, c)), sum);
            acc[r * KVL_D + c] = sum;
        }
#endif
}
#undef WORDS
#undef TOGETHER
#undef AT_ONCE
#undef SUMS
#undef CHANNEL
#endif
#undef LEVEL
#undef LEVELS
#undef LEVEL_TABLE
#endif
#undef BITS
#undef WORD_BYTES
#undef WORD_CODES
#undef SPAN
#undef HALF
#undef SIGN_BYTES
#undef SIGN_ROW
#undef TOKEN_BYTES
#undef ROW
#undef BYTE_AT
#undef SCALES
#undef SKETCH_SCALES
#undef FLIP
#undef BUTTERFLY
#undef FAR
#undef SIGN_BIT
