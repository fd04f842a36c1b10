/* gemv.cl: Y[T][rows] = X[T][cols] W^T for T <= KVL_GEMV_T tokens; each weight is read once. For devices with vectors in a work-item.
 *
 * kvl_gemv: f32 activations, one fma chain over the columns in order an output, as in gemm.cl: the same bits. Two panels go side by
 * side, so that their chains overlap.
 * kvl_gemv_int8: activations rounded to 8 bits in blocks of 32 by each work-group for itself (a launch of its own costs more),
 * products summed in 16-bit integers. With norm_weight the activations are RMS-normalized on the way, which saves a launch.
 * A work-group goes through a contiguous range of pairs of panels of a head.
 * kvl_gemv_chain: several of these, one after the other, in one launch: what follows a layer's attention, and the next layer's projections.
 *
 * Measured, Q4_1 3072 x 576 from cache, two AVX-512 cores, by processor time on a busy machine (G weights/s, PoCL 3.1 |
 * Intel 2026.2):
 *   T = 1  f32 22 | 28, 8 bits 49 | 72    T = 2  f32 20 | 24, 8 bits 32 | 43    T = 4  f32 15 | 17, 8 bits 17 | 23
 * For 8 tokens no form beat the GEMM. f32 with one panel at a time, in a prototype: 20 instead of 27; with four: 28.
 * With every weight body inlined (KVL_W_INLINE) a decode token's products took PoCL 3.8 ms instead of 5.0; with codes stored as whole
 * vectors (its vstore16 of shorts makes 16 stores) another 1 us a launch less. Intel: 3.0 ms, the output matrix at 44 of 48 GB/s.
 * A layer's four products, 2.2 MB of weights in large pages, busy machine (us, PoCL | Intel): four launches 88 and gaps of some 9 | 90 and gaps
 * of 3; a chain with a share a group 58 to 80 | 60. More shares, taken by turns, were slower, because each begins elsewhere in the weights: two a
 * group 84 | 87, four 90 | 110, eight 110 | 136. Touching the next product's weights while waiting for a turn: nothing (66 to 81 | 66 to 72 with
 * and without). Decode, tokens/s, in pairs: 1.50 | 1.42 times as fast as before chains and large pages. */

/* Tokens: rows beyond T repeat the last one and are not stored. */
#ifndef KVL_GEMV_T
#define KVL_GEMV_T 1
#endif

__attribute__((reqd_work_group_size(1, 1, 1)))
kernel void kvl_gemv(const global ushort *restrict w, uint n_panels, uint n_blocks, uint n_out, const global float *restrict x,
                     ulong x_offset, ulong x_stride, uint T, global float *y, ulong y_offset, ulong y_stride, uint epilogue, ulong x_step, ulong y_step)
{
    const uint n_pairs = (n_panels + 1) / 2;
    const uint end = (ulong)n_pairs * (get_group_id(0) + 1) / get_num_groups(0);
    const ulong panel_words = (ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8);
    const global float *rows[KVL_GEMV_T];
    w += KVL_WORDS_BEFORE(n_panels, panel_words);
    x += x_offset + KVL_ROWS_BEFORE(x_step);
    y += y_offset + KVL_ROWS_BEFORE(y_step);
#pragma unroll
    for (uint t = 0; t < KVL_GEMV_T; t++) rows[t] = x + min(t, T - 1) * x_stride;
    for (uint pair = (ulong)n_pairs * get_group_id(0) / get_num_groups(0); pair < end; pair++) {
        const global ushort *even = w + 2 * pair * panel_words, *odd = w + min(2 * pair + 1, n_panels - 1) * panel_words;
        float16 acc[KVL_GEMV_T][2];
#pragma unroll
        for (uint t = 0; t < KVL_GEMV_T; t++) acc[t][0] = acc[t][1] = 0;
        for (uint b = 0; b < n_blocks; b++) {
            float16 o[2][32];
            w_load32(even, b, o[0]);
            w_load32(odd, b, o[1]);
#pragma unroll
            for (uint k = 0; k < 32; k++)
#pragma unroll
                for (uint t = 0; t < KVL_GEMV_T; t++)
#pragma unroll
                    for (uint h = 0; h < 2; h++) acc[t][h] = fma(o[h][k], (float16)rows[t][b * 32 + k], acc[t][h]);
        }
        for (uint t = 0; t < min((uint)KVL_GEMV_T, T); t++)
            kvl_store_pair(y + t * y_stride, pair, n_out, acc[t][0], acc[t][1], epilogue);
    }
}

#ifdef KVL_W_RUN
/* The largest of 16 magnitudes, compared as integers: any NaN is larger than infinity, which is larger than the rest. */
float kvl_largest16(uint16 bits)
{
    const uint8 a = max(bits.lo, bits.hi);
    const uint4 b = max(a.lo, a.hi);
    const uint2 c = max(b.lo, b.hi);
    return as_float(max(c.x, c.y));
}

/* Nearest integers (ties to even) of values in -2^22 .. 2^22, as the low bits of value + 1.5 * 2^23. */
int16 kvl_round16(float16 v) { return as_int16(v + 0x1.8p23f) - as_int(0x1.8p23f); }

/* 32 activations, a and then b, to codes in -127..127; returns (scale, sum of codes). The scale is not finite if one of them is not. */
float2 kvl_quantize32(float16 a, float16 b, local short16 *code)
{
    const float largest = kvl_largest16(max(as_uint16(a) & 0x7fffffffu, as_uint16(b) & 0x7fffffffu));
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    const int16 low = kvl_round16(a * inverse), high = kvl_round16(b * inverse);
    code[0] = convert_short16(low);
    code[1] = convert_short16(high);
    return (float2)(largest * (1.0f / 127.0f), kvl_sum16(convert_float16(low + high)));
}

/* Sum of code[k] * x[k] over one scale group, in runs that fit in 16 bits. */
KVL_W_INLINE float16 kvl_dot(const short16 *code, const local short *x)
{
    int16 sum = 0;
#pragma unroll
    for (uint i = 0; i < KVL_W_GROUP; i += KVL_W_RUN) {
        short16 part = 0;
#pragma unroll
        for (uint k = 0; k < KVL_W_RUN; k++) part += code[i + k] * x[i + k];
        sum += convert_int16(part);
    }
    return convert_float16(sum);
}

/* acc[t] += block b of a panel times block b of token t. */
KVL_W_INLINE void kvl_dot32(const global ushort *panel, uint b, uint n_blocks, const local short *x, const local float2 *s, float16 *acc)
{
    const global ushort *p = KVL_W_COLUMN(panel, b * 32 / KVL_W_COLS);
    const uint i = b % (KVL_W_COLS / 32);
    short16 code[32];
    w_codes(p, i, code);
#pragma unroll
    for (uint g = 0; g < 32 / KVL_W_GROUP; g++) {
        const float16 scale = w_scale(p, i * (32 / KVL_W_GROUP) + g);
#if KVL_W_HAS_MIN
        const float16 min = w_min(p, i * (32 / KVL_W_GROUP) + g);
#endif
#pragma unroll
        for (uint t = 0; t < KVL_GEMV_T; t++) {
            const uint at = t * n_blocks + b;
#if KVL_W_HAS_MIN
            acc[t] = fma(min, (float16)(s[at].x * s[at].y), acc[t]);
#endif
            acc[t] = fma(kvl_dot(code + g * KVL_W_GROUP, x + at * 32 + g * KVL_W_GROUP), scale * s[at].x, acc[t]);
        }
    }
}

/* A token's activations as codes, RMS-normalized on the way if the norm's weight is given. */
KVL_W_INLINE void kvl_quantize_row(const global float *row, uint n_blocks, const global float *norm_weight, uint n_cols, float eps,
                                   local short16 *code, local float2 *scale)
{
    const float rms = norm_weight ? kvl_rms_scale(row, n_cols, eps) : 1.0f;
    for (uint b = 0; b < n_blocks; b++) {
        float16 low = vload16(2 * b, row), high = vload16(2 * b + 1, row);
        if (norm_weight) {
            low = low * rms * vload16(2 * b, norm_weight);
            high = high * rms * vload16(2 * b + 1, norm_weight);
        }
        scale[b] = kvl_quantize32(low, high, code + b * 2);
    }
}

/* Pairs first .. end - 1 of a matrix's panels times the tokens' codes. */
KVL_W_INLINE void kvl_multiply_pairs(const global ushort *w, uint first, uint end, uint n_panels, uint n_blocks, uint n_out, uint T,
                                     const local short16 *code, const local float2 *scale, global float *y, ulong y_stride, uint epilogue)
{
    const ulong panel_words = (ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8);
    for (uint pair = first; pair < end; pair++) {
        float16 acc[2][KVL_GEMV_T];
        for (uint h = 0; h < 2; h++) {
            const global ushort *panel = w + min(2 * pair + h, n_panels - 1) * panel_words;
#pragma unroll
            for (uint t = 0; t < KVL_GEMV_T; t++) acc[h][t] = 0;
            for (uint b = 0; b < n_blocks; b++) kvl_dot32(panel, b, n_blocks, (const local short *)code, scale, acc[h]);
        }
#pragma unroll
        for (uint t = 0; t < KVL_GEMV_T; t++)
            if (t < T) kvl_store_pair(y + t * y_stride, pair, n_out, acc[0][t], acc[1][t], epilogue);
    }
}

/* code, scale: local room for KVL_GEMV_T * n_blocks blocks. */
__attribute__((reqd_work_group_size(1, 1, 1)))
kernel void kvl_gemv_int8(const global ushort *restrict w, uint n_panels, uint n_blocks, uint n_out, const global float *restrict x,
                          ulong x_offset, ulong x_stride, uint T, global float *y, ulong y_offset, ulong y_stride, uint epilogue,
                          ulong x_step, ulong y_step, const global float *restrict norm_weight, uint n_cols, float eps, local short16 *code, local float2 *scale)
{
    const uint n_pairs = (n_panels + 1) / 2;
    const uint first = (ulong)n_pairs * get_group_id(0) / get_num_groups(0), end = (ulong)n_pairs * (get_group_id(0) + 1) / get_num_groups(0);
    w += KVL_WORDS_BEFORE(n_panels, (ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8));
    x += x_offset + KVL_ROWS_BEFORE(x_step);
    y += y_offset + KVL_ROWS_BEFORE(y_step);
    for (uint t = 0; t < KVL_GEMV_T; t++)
        kvl_quantize_row(x + min(t, T - 1) * x_stride, n_blocks, norm_weight, n_cols, eps, code + t * n_blocks * 2,
                         scale + t * n_blocks);
    kvl_multiply_pairs(w, first, end, n_panels, n_blocks, n_out, T, code, scale, y, y_stride, epilogue);
}

#if KVL_GEMV_T == 1
/* One product of a chain. */
typedef struct {
    ulong x_offset, y_offset;
    uint n_panels, n_blocks, n_out, n_cols, epilogue;
    float eps;
} kvl_link;

#define KVL_CHAIN 4
typedef struct {
    kvl_link link[KVL_CHAIN];
} kvl_chain;

/* turn[]: counters a cache line apart, 0 between launches: shares done of all products, groups that have left, shares taken of product i. */
#define KVL_DONE 0
#define KVL_LEFT 16
#define KVL_TAKEN(i) (32 + 16 * (i))
/* Looks at a counter before a group leaves: some 30 us, longer than any share takes a processor that is not taken from it. */
#define KVL_PATIENCE 65536

/* Products of one token one after the other in one launch, each of which may read what those before it wrote. The pairs of a product are cut into
 * `shares`; groups take shares of a product once all before it are done. A group that waits too long leaves the rest to the others: whoever finishes
 * a product's last share never waits, so that all is done however few groups run at a time and however long one is held up. (OpenCL 1.2 promises
 * no order of memory between groups; processors that have coherent caches keep it with the fences below, and only those get this kernel.) */
__attribute__((reqd_work_group_size(1, 1, 1)))
kernel void kvl_gemv_chain(kvl_chain chain, uint n_links, uint shares, const global ushort *w0, const global ushort *w1,
                           const global ushort *w2, const global ushort *w3, global float *x0, global float *x1, global float *x2,
                           global float *x3, global float *y0, global float *y1, global float *y2, global float *y3,
                           const global float *norm0, const global float *norm1, const global float *norm2, const global float *norm3,
                           volatile global uint *turn, local short16 *code, local float2 *scale)
{
    const global ushort *w[KVL_CHAIN] = {w0, w1, w2, w3};
    const global float *x[KVL_CHAIN] = {x0, x1, x2, x3}, *norm[KVL_CHAIN] = {norm0, norm1, norm2, norm3};
    global float *y[KVL_CHAIN] = {y0, y1, y2, y3};
    uint before = 0; /* shares of the products before */
    for (uint i = 0; i < n_links; i++) {
        const kvl_link link = chain.link[i];
        const uint n_pairs = (link.n_panels + 1) / 2, n_shares = min(n_pairs, shares);
        uint looks = 0;
        while (turn[KVL_DONE] < before && looks < KVL_PATIENCE) looks++;
        if (looks == KVL_PATIENCE) break;
        mem_fence(CLK_GLOBAL_MEM_FENCE);
        uint share = atomic_inc(turn + KVL_TAKEN(i));
        if (share < n_shares) kvl_quantize_row(x[i] + link.x_offset, link.n_blocks, norm[i], link.n_cols, link.eps, code, scale);
        for (; share < n_shares; share = atomic_inc(turn + KVL_TAKEN(i))) {
            kvl_multiply_pairs(w[i], n_pairs * share / n_shares, n_pairs * (share + 1) / n_shares, link.n_panels, link.n_blocks, link.n_out, 1, code,
                               scale, y[i] + link.y_offset, 0, link.epilogue);
            mem_fence(CLK_GLOBAL_MEM_FENCE);
            atomic_inc(turn + KVL_DONE);
        }
        before += n_shares;
    }
    if (atomic_inc(turn + KVL_LEFT) != get_num_groups(0) - 1) return;
    turn[KVL_DONE] = turn[KVL_LEFT] = 0;
    for (uint i = 0; i < KVL_CHAIN; i++) turn[KVL_TAKEN(i)] = 0;
}
#endif
#endif
