/* gemv_items.cl: gemv.cl where work-items are the lanes of vectors: Y[T][rows] = X[T][cols] W^T for T <= KVL_GEMV_T tokens, f32 activations.
 *
 * A work-group owns a pair of panels: item 32 s + r has row r of the 32, so that neighbours read neighbouring words, and of every KVL_STRIPS
 * blocks of columns block s. Activations go through local memory, KVL_STAGED columns at a time, RMS-normalized on the way if norm_weight is
 * given; the strips' sums are added in a tree. */
#define KVL_STRIPS (KVL_ITEMS / 32)
#define KVL_STAGED (KVL_STRIPS * 32 * 4)

/* Grid: pairs of panels, 1, heads. n_blocks: blocks of 32 columns; activation rows are n_blocks * 32 floats, zero beyond n_cols. */
__attribute__((reqd_work_group_size(KVL_ITEMS, 1, 1)))
kernel void kvl_gemv_items(const global ushort *restrict w, uint n_panels, uint n_blocks, uint n_out, const global float *restrict x,
                           ulong x_offset, ulong x_stride, uint T, global float *y, ulong y_offset, ulong y_stride, uint epilogue,
                           ulong x_step, ulong y_step, const global float *restrict norm_weight, uint n_cols, float eps)
{
    local float staged[KVL_GEMV_T * KVL_STAGED], sums[KVL_ITEMS];
    const uint item = get_local_id(0), row = item % 16, strip = item / 32, pair = get_group_id(0);
    const ulong panel_words = (ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8);
    const global ushort *panel = w + KVL_WORDS_BEFORE(n_panels, panel_words) + min(2 * pair + item / 16 % 2, n_panels - 1) * panel_words + row;
    x += x_offset + KVL_ROWS_BEFORE(x_step);
    y += y_offset + KVL_ROWS_BEFORE(y_step);
    float acc[KVL_GEMV_T], rms[KVL_GEMV_T];
    for (uint t = 0; t < KVL_GEMV_T; t++) {
        acc[t] = 0.0f;
        rms[t] = 1.0f;
    }
    if (norm_weight)
        for (uint t = 0; t < KVL_GEMV_T; t++) rms[t] = kvl_rms_scale(x + min(t, T - 1) * x_stride, n_cols, eps, sums, item);
    for (uint first = 0; first < n_blocks * 32; first += KVL_STAGED) {
        const uint n = min((uint)KVL_STAGED, n_blocks * 32 - first);
        for (uint i = item; i < n; i += KVL_ITEMS) {
            const float factor = norm_weight ? norm_weight[first + i] : 1.0f;
            for (uint t = 0; t < KVL_GEMV_T; t++)
                staged[t * KVL_STAGED + i] = x[min(t, T - 1) * x_stride + first + i] * rms[t] * factor;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint b = strip; b < n / 32; b += KVL_STRIPS) {
            float o[32];
            w_load32(panel, first / 32 + b, o);
#pragma unroll
            for (uint k = 0; k < 32; k++)
#pragma unroll
                for (uint t = 0; t < KVL_GEMV_T; t++) acc[t] = fma(o[k], staged[t * KVL_STAGED + b * 32 + k], acc[t]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (uint t = 0; t < KVL_GEMV_T; t++) {
        sums[item] = acc[t];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint strips = KVL_STRIPS / 2; strips > 0; strips /= 2) {
            if (strip < strips) sums[item] += sums[item + strips * 32];
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (item < 16 && t < T) kvl_store_pair(y + t * y_stride, pair, row, n_out, sums[item], sums[item + 16], epilogue);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
