/* rms.cl: what RMS normalization multiplies a row with (Zhang, Sennrich 2019): 1 / sqrt(mean(x^2) + eps). The order of the sum is fixed: 16 lanes
 * over blocks of 16, the lanes in a tree, then what is left of the row; or, where work-items are the lanes, those of a group, and a tree. */
#if KVL_VECTORS
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
#else
/* All KVL_ITEMS items of the group call it; sums: room for one value an item. */
float kvl_rms_scale(const global float *x, uint n, float eps, local float *sums, uint item)
{
    float squares = 0.0f;
    for (uint i = item; i < n; i += KVL_ITEMS) squares = fma(x[i], x[i], squares);
    sums[item] = squares;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint items = KVL_ITEMS / 2; items > 0; items /= 2) {
        if (item < items) sums[item] += sums[item + items];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    const float sum = sums[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return 1.0f / sqrt(sum / (float)n + eps);
}
#endif
