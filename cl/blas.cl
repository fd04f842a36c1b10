/* blas.cl: what stands around CLBlast's product, where it is chosen for many tokens: Y[T][rows] = X[T][cols] W^T by blocks of rows.
 *
 *   kvl_unpack   packed panels to w[k][m] f32, a block of rows at a time: scratch of a fixed size, never the whole matrix
 *   kvl_columns  activations to x[k][n]: column k of all tokens
 *   kvl_finish   products c[n][m] of a block to y, with the epilogue of gemm.cl
 *
 * Sizes m, n, k are padded to CLBlast's tiles, with zeros in w and x. */

#if KVL_W_LANES == 1
/* Grid: rows of the block (padding included), KVL_ITEMS a group; blocks of 32 columns (padding included). A row a work-item: 16 rows as vectors spill on every GPU. */
__attribute__((reqd_work_group_size(KVL_ITEMS, 1, 1)))
kernel void kvl_unpack(const global ushort *restrict w, uint first_panel, uint n_panels, uint n_blocks, global float *restrict out)
{
    const uint row = get_global_id(0), b = get_global_id(1), m = get_global_size(0), panel = first_panel + row / 16;
    float o[32];
#pragma unroll
    for (uint k = 0; k < 32; k++) o[k] = 0;
    if (panel < n_panels && b < n_blocks) w_load32(w + panel * ((ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8)) + row % 16, b, o);
    out += (ulong)b * 32 * m + row;
#pragma unroll
    for (uint k = 0; k < 32; k++) out[(ulong)k * m] = o[k];
}
#else
/* Grid: tokens by 16 (padding included), columns (padding included). Rows of x have n_blocks * 32 floats. */
kernel void kvl_columns(const global float *restrict x, ulong x_offset, ulong x_stride, uint T, uint n_blocks, global float *restrict out)
{
    const uint t0 = get_global_id(0) * 16, k = get_global_id(1), n = get_global_size(0) * 16;
    float lane[16];
    for (uint i = 0; i < 16; i++) lane[i] = t0 + i < T && k < n_blocks * 32 ? x[x_offset + (ulong)(t0 + i) * x_stride + k] : 0.0f;
    vstore16(vload16(0, lane), 0, out + (ulong)k * n + t0);
}

/* Grid: pairs of panels of the block, tokens. m: row length of c. */
kernel void kvl_finish(const global float *restrict c, uint m, uint first_pair, uint n_out, global float *y, ulong y_offset, ulong y_stride,
                       uint epilogue)
{
    const uint pair = get_global_id(0), t = get_global_id(1);
    const global float *row = c + (ulong)t * m + pair * 32;
    kvl_store_pair(y + y_offset + t * y_stride, first_pair + pair, n_out, vload16(0, row), vload16(1, row), epilogue);
}
#endif
