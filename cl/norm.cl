/* norm.cl: RMS normalization of rows (Zhang, Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight. A work-item makes one row; the
 * order of its sum is fixed: 16 lanes over blocks of 16, the lanes in a tree, then what is left of the row. */
kernel void kvl_rms_norm(const global float *x, ulong x_offset, ulong x_stride, const global float *restrict weight, uint n, float eps,
                         global float *y, ulong y_offset, ulong y_stride)
{
    const uint t = get_global_id(0), whole = n / 16;
    float16 squares = 0;
    x += x_offset + t * x_stride;
    y += y_offset + t * y_stride;
    for (uint i = 0; i < whole; i++) {
        const float16 v = vload16(i, x);
        squares = fma(v, v, squares);
    }
    float sum = kvl_sum16(squares);
    for (uint i = whole * 16; i < n; i++) sum = fma(x[i], x[i], sum);
    const float scale = 1.0f / sqrt(sum / (float)n + eps);
    for (uint i = 0; i < whole; i++) vstore16(vload16(i, x) * scale * vload16(i, weight), i, y);
    for (uint i = whole * 16; i < n; i++) y[i] = x[i] * scale * weight[i];
}
