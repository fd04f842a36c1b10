/* gemm.cl: Y[T][rows] = X[T][cols] W^T for many tokens, f32 activations.
 *
 * One work-item owns a pair of panels and a chunk of tokens. A panel is dequantized once a chunk into local memory, KVL_GEMM_COLS
 * columns at a time, and multiplied with KVL_GEMM_TILE tokens in registers. An output is one fma chain over the columns in order,
 * wherever the chunks end: the same bits as kvl_gemv, for any number of tokens.
 *
 * Measured, Q4_1 1536 x 576, T = 512, two AVX-512 cores, best of several (GFLOP/s, PoCL 3.1 | Intel 2026.2), by panels x tokens in
 * registers:
 *   1 x 6  215 | 218    1 x 8  203 | 219    1 x 12  215 | 213    2 x 4  191 | 211    2 x 6  203 | 213    2 x 8  196 | 216
 *   2 x 12  151 | 204    4 x 4  195 | 208    4 x 6  197 | 213
 * and with 2 x 6 by columns x tokens a work-item: 96 x 96  197 | 208    288 x 96  209 | 209    576 x 192  216 | 221 (98 KB of local
 * memory). Without the unroll hints PoCL gives 71. */

/* Tunables, in gemm.tune: KVL_GEMM_COLS columns dequantized at once, KVL_GEMM_TOKENS tokens a work-item handles, KVL_GEMM_TILE tokens
 * in registers. */

/* acc[i][row] += sum_k w[k][row] * x[i][k] */
void kvl_gemm_tile(const local float16 *w, const global float *const *x, uint n, local float16 *acc)
{
    float16 a[KVL_GEMM_TILE];
#pragma unroll
    for (uint i = 0; i < KVL_GEMM_TILE; i++) a[i] = acc[i];
    for (uint k = 0; k < n; k++)
#pragma unroll
        for (uint i = 0; i < KVL_GEMM_TILE; i++) a[i] = fma(w[k], (float16)x[i][k], a[i]);
#pragma unroll
    for (uint i = 0; i < KVL_GEMM_TILE; i++) acc[i] = a[i];
}

/* Grid: pairs of panels, token chunks, heads. n_blocks: blocks of 32 columns. n_out: outputs of these panels. chunk: tokens a work-item.
 * Activation rows are n_blocks * 32 floats, zero beyond the matrix's columns. */
__attribute__((reqd_work_group_size(1, 1, 1)))
kernel void kvl_gemm(const global ushort *restrict w, uint n_panels, uint n_blocks, uint n_out, const global float *restrict x,
                     ulong x_offset, ulong x_stride, uint T, uint chunk, global float *y, ulong y_offset, ulong y_stride,
                     uint epilogue, ulong x_step, ulong y_step)
{
    local float16 weights[KVL_GEMM_COLS], acc[2][KVL_GEMM_TOKENS];
    const uint pair = get_group_id(0), first = get_group_id(1) * chunk, n_tokens = min(chunk, T - first);
    const uint n_cols = n_blocks * 32;
    const ulong panel_words = (ulong)(n_cols / KVL_W_COLS) * (KVL_W_BYTES * 8);
    w += KVL_WORDS_BEFORE(n_panels, panel_words);
    x += x_offset + KVL_ROWS_BEFORE(x_step) + first * x_stride;
    y += y_offset + KVL_ROWS_BEFORE(y_step);
    for (uint h = 0; h < 2 && pair * 2 + h < n_panels; h++) {
        const global ushort *panel = w + (pair * 2 + h) * panel_words;
        for (uint t = 0; t < chunk; t++) acc[h][t] = 0;
        for (uint c = 0; c < n_cols; c += KVL_GEMM_COLS) {
            const uint n = min((uint)KVL_GEMM_COLS, n_cols - c);
            for (uint b = 0; b < n / 32; b++) {
                float16 o[32];
                w_load32(panel, c / 32 + b, o);
#pragma unroll
                for (uint k = 0; k < 32; k++) weights[b * 32 + k] = o[k];
            }
            for (uint t = 0; t < n_tokens; t += KVL_GEMM_TILE) {
                const global float *rows[KVL_GEMM_TILE];
#pragma unroll
                for (uint i = 0; i < KVL_GEMM_TILE; i++) rows[i] = x + min(t + i, n_tokens - 1) * x_stride + c;
                kvl_gemm_tile(weights, rows, n, acc[h] + t);
            }
        }
    }
    for (uint t = 0; t < n_tokens; t++)
        kvl_store_pair(y + (first + t) * y_stride, pair, n_out, acc[0][t], acc[1][t], epilogue);
}
