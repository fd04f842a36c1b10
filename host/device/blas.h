/* Single-precision matrix product by CLBlast, on the device's queue, with the parameters of cl/clblast.tune.
 *
 * Sizes and layouts are those for which CLBlast's Xgemm kernel (C. Nugteren, "CLBlast: A Tuned OpenCL BLAS Library", IWOCL 2018) reads
 * and writes the buffers as they are: it makes no buffers of its own, which would be missing in the ledger. */
#ifndef KVL_BLAS_H
#define KVL_BLAS_H
#include "device.h"
#include "tuning.h"

/* What the sizes of a product must be multiples of. */
struct kvl_blas_unit {
    uint32_t m, n, k;
};
struct kvl_blas_unit kvl_blas_unit(const struct kvl_tuning *tuning);

/* c[n][m] = sum over k of a[k][m] * b[k][n], f32; m, n, k are multiples of the unit in use. Enqueues; the first call with new
 * parameters compiles. */
kvl_status kvl_blas_product(struct kvl_device *device, uint32_t m, uint32_t n, uint32_t k, struct kvl_buffer *a, struct kvl_buffer *b,
                            struct kvl_buffer *c);

#endif
