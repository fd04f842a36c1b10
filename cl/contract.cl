/* contract.cl: what a codec's device body is given and must define. It is included once per role, with
 *
 *   KVL_FN(name)      the role's name of a function              KVL_IS_K  1 in the key role, 0 in the value role
 *   KVL_D             channels of its record                     KVL_P     tokens of a page (= of a block)
 *   KVL_OPT_<X>       what the codec's defines() gave
 *   KVL_NQ            query rows that share a read (query heads a kv head x query tokens of a tile)
 *   KVL_SLICE         tokens of one scores()/accumulate() call: a multiple of 16 where KVL_VECTORS is 1, else 1; t0 is a multiple of it
 *   KVL_QS            address space of q, aux, p, out, acc
 *
 * required  void  KVL_FN(load8)(block, table, t, c, float *o)       channels c .. c+7 (c a multiple of 8) of token t
 *           void  KVL_FN(encode)(block, table, t0, n, kvl_rows x)   tokens t0 .. t0+n-1 from rows 0 .. n-1 of x: whole groups, t0 a multiple
 *                                                                   of the codec's group (a stream's last group may be short under p1)
 * optional  void  KVL_FN(move)(to, t_to, from, t_from)            token t_from of one block becomes token t_to of another, to the bit
 *                                                                   (KVL_CODEC_MOVABLE; one token is a group)
 * optional, on devices with KVL_VECTORS (KVL_CODEC_HAS_SCORES)
 *           void  KVL_FN(prepare)(q, aux)                           KVL_AUX floats of one query row, once a query
 *           void  KVL_FN(scores)(block, table, t0, q, aux, out)     out[r * KVL_B + i] = q row r . token t0 + i, i < KVL_SLICE
 * optional, on devices with KVL_VECTORS (KVL_CODEC_HAS_COLUMNS)
 *           void  KVL_FN(columns)(block, table, t0, float *x)       x[c * 16 + i] = channel c of token t0 + i, all channels of 16 tokens (t0 a multiple of
 *                                                                   16): for keys that are restored before they are multiplied, and instead of scores()
 * optional, on devices with KVL_VECTORS (KVL_CODEC_HAS_ACCUMULATE)
 *           void  KVL_FN(accumulate)(block, table, t0, p, acc)      acc[r * KVL_D + c] += sum_i p[r * KVL_B + i] * token t0 + i
 *
 * block points to a page of this role, 16-byte aligned at least as its shape() asked; slots never written hold zeros.
 * table is the stream's calibration table; it points nowhere for codecs whose shape() asks for none. A body undefines the macros it defines.
 * encode() tells the core with kvl_count_overflow() how many elements it had no room for in a part of fixed capacity.
 * Non-finite inputs are replaced with kvl_clamp_half() by codecs that store 16-bit or narrower numbers. */

/* Vectors that one pass of scores() or accumulate() works on side by side: enough independent sums to hide the latency of fma, few enough to
 * stay in registers. */
#if KVL_NQ <= 3
#define KVL_WIDE 4
#elif KVL_NQ <= 6
#define KVL_WIDE 2
#else
#define KVL_WIDE 1
#endif

#if KVL_VECTORS
/* Sums of values whose codes lie in words (platform.cl): vectors of codes in n_words words of `codes` codes, and how many of them a pass sums. */
#define KVL_CODE_VECTORS(n_words, codes) ((codes) / KVL_CODES_ABREAST(n_words, codes))
#define KVL_CODES_AT_ONCE(n_words, codes) (KVL_CODE_VECTORS(n_words, codes) < KVL_WIDE ? KVL_CODE_VECTORS(n_words, codes) : KVL_WIDE)

/* Row r of sum [NQ] gains factor[r * stride] * v. */
void kvl_add_to_rows(float16 *sum, const float *factor, uint stride, float16 v)
{
    KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) sum[r] = fma(factor[r * stride], v, sum[r]);
}
#endif

/* Full-precision rows that encode() reads: tokens first, first + 1, ... of a stream, wherever they are. */
typedef struct {
    const KVL_GLOBAL float *stage; /* this side of the ubatch, row stride stage_stride floats, tokens from stage_token on */
    const KVL_GLOBAL uchar *exact; /* sink rows, then the ring of tail rows; KVL_EXACT_HALF: binary16, else binary32 */
    ulong stage_stride;
    uint width;                          /* channels of a row */
    uint stage_token, first, sink, ring; /* ring: tail rows */
    uint spin;                           /* rows that the ring is ahead of the tokens' places */
    KVL_GLOBAL uint *status;             /* counts of non-finite inputs and of overflow; null when rows are only read */
} kvl_rows;

void kvl_count_overflow(kvl_rows x, uint count)
{
    if (count != 0) atomic_add(x.status + 1, count);
}

/* Row index in `exact` of a token that is not in the stage. */
uint kvl_exact_index(kvl_rows x, uint token) { return token < x.sink ? token : x.sink + (token + x.spin) % x.ring; }

/* Channel c of row i. */
float kvl_row_at(kvl_rows x, uint i, uint c)
{
    const uint token = x.first + i;
    if (token >= x.stage_token) return x.stage[(ulong)(token - x.stage_token) * x.stage_stride + c];
    const ulong at = (ulong)kvl_exact_index(x, token) * x.width + c;
#if KVL_EXACT_HALF
    return kvl_load_half(x.exact, at);
#else
    return ((const KVL_GLOBAL float *)x.exact)[at];
#endif
}

#if KVL_VECTORS
/* Channels c .. c + 15 of row 0. */
float16 kvl_row_vector(kvl_rows x, uint c)
{
    if (x.first >= x.stage_token) return vload16(0, x.stage + (ulong)(x.first - x.stage_token) * x.stage_stride + c);
    const ulong at = (ulong)kvl_exact_index(x, x.first) * x.width + c;
#if KVL_EXACT_HALF
    return vload_half16(0, (const KVL_GLOBAL half *)x.exact + at);
#else
    return vload16(0, (const KVL_GLOBAL float *)x.exact + at);
#endif
}
#endif

/* The first n channels of row 0. */
void kvl_read_row(kvl_rows x, uint n, float *o)
{
#if KVL_VECTORS
    for (uint c = 0; c < n; c += 16) KVL_STORE16(kvl_row_vector(x, c), o + c);
#else
    for (uint c = 0; c < n; c++) o[c] = kvl_row_at(x, 0, c);
#endif
}
