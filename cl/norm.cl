/* norm.cl: RMS normalization of rows, y = x * kvl_rms_scale(x) * weight. A row is one work-item's, or a group's where those are the lanes of
 * vectors. y may be x. */
#if KVL_VECTORS
kernel void kvl_rms_norm(const global float *x, ulong x_offset, ulong x_stride, const global float *restrict weight, uint n,
                         float eps, global float *y, ulong y_offset, ulong y_stride)
{
    const uint t = get_global_id(0), whole = n / 16;
    x += x_offset + t * x_stride;
    y += y_offset + t * y_stride;
    const float scale = kvl_rms_scale(x, n, eps);
    for (uint i = 0; i < whole; i++) vstore16(vload16(i, x) * scale * vload16(i, weight), i, y);
    for (uint i = whole * 16; i < n; i++) y[i] = x[i] * scale * weight[i];
}
#else
__attribute__((reqd_work_group_size(KVL_ITEMS, 1, 1)))
kernel void kvl_rms_norm(const global float *x, ulong x_offset, ulong x_stride, const global float *restrict weight, uint n,
                         float eps, global float *y, ulong y_offset, ulong y_stride)
{
    local float sums[KVL_ITEMS];
    const uint item = get_local_id(0), t = get_group_id(0);
    x += x_offset + t * x_stride;
    y += y_offset + t * y_stride;
    const float scale = kvl_rms_scale(x, n, eps, sums, item);
    for (uint i = item; i < n; i += KVL_ITEMS) y[i] = x[i] * scale * weight[i];
}
#endif
