/* What linear.c and linear_blas.c share. */
#ifndef KVL_LINEAR_INTERNAL_H
#define KVL_LINEAR_INTERNAL_H
#include "linear.h"

enum { PANEL_ROWS = 16, COLUMN = 32 /* least columns packed and multiplied together */ };

static inline uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }
static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

enum variant {
    GEMM, GEMV_1, GEMV_2, GEMV_4, INT8_1, INT8_2, INT8_4,    /* vectors in a work-item */
    GEMM_ITEMS, GEMV_ITEMS_1, GEMV_ITEMS_2, GEMV_ITEMS_4,    /* work-items as lanes */
    EMBED, UNPACK, COLUMNS, FINISH, VARIANTS
};
enum { KVL_FEW_TOKENS = 4 };

/* cl/gemm.tune, cl/gemv.tune */
struct kvl_linear_sizes {
    uint32_t tokens, tile, pairs, groups;
};

struct kvl_linear_kernels {
    struct kvl_device *device;
    struct kvl_linear_sizes sizes;
    struct kvl_kernel *norm, *add_row;
    struct kvl_kernel *(*of_type)[VARIANTS]; /* [kvl_n_quant_types] */
    struct kvl_buffer *scratch[KVL_LINEAR_SCRATCH]; /* CLBlast's; NULL = it has no part in this */
    uint32_t most_tokens;
    uint64_t most_cols;
};

kvl_status kvl_linear_kernel(struct kvl_linear_kernels *kernels, const struct kvl_quant_type *type, enum variant v,
                             struct kvl_kernel **out);

/* The number that epilogue.cl has for what becomes of a product. */
static inline uint32_t kvl_linear_epilogue(const struct kvl_linear *linear, bool add)
{
    enum { STORE, ADD, GATED };
    return linear->gate != KVL_GATE_NONE ? GATED + (uint32_t)linear->gate - 1 : add ? ADD : STORE;
}

bool kvl_linear_goes_to_blas(const struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, bool exact);
kvl_status kvl_linear_run_blas(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                               struct kvl_rows y, bool add);

#endif
