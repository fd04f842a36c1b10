/* gemm_items.cl: gemm.cl where work-items are the lanes of vectors: Y[T][rows] = X[T][cols] W^T, f32 activations.
 *
 * A work-group makes a tile of 64 rows (two pairs of panels) x 64 tokens: of every block of 32 columns the first 64 items dequantize one row
 * each into local memory, the others fetch activations; then every item adds to its 4 x 4 outputs: row r of each panel, tokens
 * q, q + 16, q + 32, q + 48. An output is one fma chain over the columns in order, as in gemm.cl. */
#define KVL_ROWS 64
#define KVL_TOKENS 64
#define KVL_PITCH (KVL_TOKENS + 1) /* activations are written by columns, which would all fall into one bank */

/* Grid: tiles of rows x 256 items, tiles of tokens, heads. Activation rows are n_blocks * 32 floats, zero beyond the matrix's columns. */
__attribute__((reqd_work_group_size(KVL_ITEMS, 1, 1)))
kernel void kvl_gemm_items(const global ushort *restrict w, uint n_panels, uint n_blocks, uint n_out, const global float *restrict x,
                           ulong x_offset, ulong x_stride, uint T, global float *y, ulong y_offset, ulong y_stride, uint epilogue,
                           ulong x_step, ulong y_step)
{
    local float weights[32 * KVL_ROWS], staged[32 * KVL_PITCH];
    const uint item = get_local_id(0), r = item % 16, q = item / 16, tile = get_group_id(0), first = get_group_id(1) * KVL_TOKENS;
    const ulong panel_words = (ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8);
    const global ushort *panel = w + KVL_WORDS_BEFORE(n_panels, panel_words) + min(tile * 4 + q % 4, n_panels - 1) * panel_words + r;
    x += x_offset + KVL_ROWS_BEFORE(x_step);
    y += y_offset + KVL_ROWS_BEFORE(y_step);
    float4 acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}; /* [token][panel] */
    for (uint b = 0; b < n_blocks; b++) {
        if (item < KVL_ROWS) {
            float o[32];
            w_load32(panel, b, o);
#pragma unroll
            for (uint k = 0; k < 32; k++) weights[k * KVL_ROWS + item] = o[k];
        } else {
            for (uint i = item - KVL_ROWS; i < 32 * KVL_TOKENS; i += KVL_ITEMS - KVL_ROWS)
                staged[i % 32 * KVL_PITCH + i / 32] = x[min(first + i / 32, T - 1) * x_stride + b * 32 + i % 32];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint k = 0; k < 32; k++) {
            const local float *wk = weights + k * KVL_ROWS + r, *xk = staged + k * KVL_PITCH + q;
            const float4 rows = (float4)(wk[0], wk[16], wk[32], wk[48]);
            acc[0] = fma(rows, (float4)xk[0], acc[0]);
            acc[1] = fma(rows, (float4)xk[16], acc[1]);
            acc[2] = fma(rows, (float4)xk[32], acc[2]);
            acc[3] = fma(rows, (float4)xk[48], acc[3]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const uint t = first + q + 16 * i;
        if (t >= T) continue;
        kvl_store_pair(y + t * y_stride, tile * 2, r, n_out, acc[i].s0, acc[i].s1, epilogue);
        if (tile * 4 + 2 < n_panels)
            kvl_store_pair(y + t * y_stride, tile * 2 + 1, r, n_out, acc[i].s2, acc[i].s3, epilogue);
    }
}
