/* norm.cl: RMS normalization of rows, y = x * kvl_rms_scale(x) * weight, or y += that; and a row added to rows. A row of x may hold several,
 * side by side, that are normalized each for itself (heads): the grid's second dimension. One of these is one work-item's, or a group's where
 * work-items are the lanes of vectors. y may be x. */
#if KVL_VECTORS
kernel void kvl_rms_norm(const global float *x, ulong x_offset, ulong x_stride, const global float *restrict weight, uint n,
                         float eps, global float *y, ulong y_offset, ulong y_stride, uint add)
{
    const uint t = get_global_id(0), whole = n / 16;
    x += x_offset + t * x_stride + (ulong)get_global_id(1) * n;
    y += y_offset + t * y_stride + (ulong)get_global_id(1) * n;
    const float scale = kvl_rms_scale(x, n, eps);
    for (uint i = 0; i < whole; i++) {
        const float16 v = vload16(i, x) * scale * vload16(i, weight);
        vstore16(add ? vload16(i, y) + v : v, i, y);
    }
    for (uint i = whole * 16; i < n; i++) y[i] = (add ? y[i] : 0.0f) + x[i] * scale * weight[i];
}
#else
__attribute__((reqd_work_group_size(KVL_ITEMS, 1, 1)))
kernel void kvl_rms_norm(const global float *x, ulong x_offset, ulong x_stride, const global float *restrict weight, uint n,
                         float eps, global float *y, ulong y_offset, ulong y_stride, uint add)
{
    local float sums[KVL_ITEMS];
    const uint item = get_local_id(0), t = get_group_id(0);
    x += x_offset + t * x_stride + (ulong)get_group_id(1) * n;
    y += y_offset + t * y_stride + (ulong)get_group_id(1) * n;
    const float scale = kvl_rms_scale(x, n, eps, sums, item);
    for (uint i = item; i < n; i += KVL_ITEMS) y[i] = (add ? y[i] : 0.0f) + x[i] * scale * weight[i];
}
#endif

/* y[t] += row, n floats; one work-item an element. */
kernel void kvl_add_row(const global float *restrict row, global float *y, ulong y_offset, ulong y_stride)
{
    y[y_offset + get_global_id(1) * y_stride + get_global_id(0)] += row[get_global_id(0)];
}
