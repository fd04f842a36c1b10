/* rms.cl: what RMS normalization multiplies a row with (Zhang, Sennrich 2019): 1 / sqrt(mean(x^2) + eps). The order of the sum is fixed: 16 lanes
 * over blocks of 16, the lanes in a tree, then what is left of the row. */
float kvl_rms_scale(const global float *x, uint n, float eps)
{
    const uint whole = n / 16;
    float16 squares = 0;
    for (uint i = 0; i < whole; i++) {
        const float16 v = vload16(i, x);
        squares = fma(v, v, squares);
    }
    float sum = kvl_sum16(squares);
    for (uint i = whole * 16; i < n; i++) sum = fma(x[i], x[i], sum);
    return 1.0f / sqrt(sum / (float)n + eps);
}
