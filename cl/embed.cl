/* embed.cl: rows of a packed matrix by token id, dequantized and scaled. ids outside first_row .. first_row + n_rows - 1 are another part's.
 * Grid: KVL_ITEMS work-items that share a row, block of 32 columns by block; tokens. */
__attribute__((reqd_work_group_size(KVL_ITEMS, 1, 1)))
kernel void kvl_embed(const global ushort *restrict w, uint n_blocks, uint n_cols, uint first_row, uint n_rows,
                      const global int *ids, ulong ids_offset, float scale, global float *y, ulong y_offset, ulong y_stride)
{
    const uint t = get_global_id(1), row = (uint)ids[ids_offset + t] - first_row;
    if (row >= n_rows) return;
    const global ushort *panel = w + row / 16 * ((ulong)(n_blocks * 32 / KVL_W_COLS) * (KVL_W_BYTES * 8)) + row % 16;
    y += y_offset + t * y_stride;
    for (uint b = get_local_id(0); b < n_blocks; b += KVL_ITEMS) {
        float o[32];
        w_load32(panel, b, o);
#pragma unroll
        for (uint k = 0; k < 32; k++)
            if (b * 32 + k < n_cols) y[b * 32 + k] = o[k] * scale;
    }
}
