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
    CHAIN,                                                   /* vectors again */
    EMBED, UNPACK, COLUMNS, FINISH, VARIANTS
};
enum { KVL_FEW_TOKENS = 4 };

/* cl/gemm.tune, cl/gemv.tune */
struct kvl_linear_sizes {
    uint32_t tokens, tile, pairs, groups;
};

/* Scratch: of linear_blas.c, and the counters of kvl_gemv_chain. */
enum { WEIGHTS, ACTIVATIONS, PRODUCTS, BLAS_SCRATCH, TURNS = BLAS_SCRATCH, TURNS_BYTES = 384 };
_Static_assert((int)TURNS + 1 == (int)KVL_LINEAR_SCRATCH, "linear.h");

struct kvl_linear_kernels {
    struct kvl_device *device;
    struct kvl_linear_sizes sizes;
    struct kvl_kernel *norm, *add_row;
    struct kvl_kernel *(*of_type)[VARIANTS]; /* [kvl_n_quant_types] */
    struct kvl_buffer *scratch[KVL_LINEAR_SCRATCH]; /* NULL: CLBlast, or chains, have no part in this */
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

/* Which kernel multiplies T tokens. */
enum variant kvl_linear_variant(const struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, bool exact);

/* Local memory of the 8-bit GEMV: codes (i16) and (scale, sum) a block. */
static inline uint64_t codes_bytes(uint32_t tokens, uint64_t n_blocks) { return tokens * n_blocks * COLUMN * 2; }
static inline uint64_t scales_bytes(uint32_t tokens, uint64_t n_blocks) { return tokens * n_blocks * 8; }

void kvl_linear_blas_scratch(const struct kvl_tuning *tuning, uint32_t most_tokens, uint64_t most_cols, bool exact, uint64_t bytes[BLAS_SCRATCH]);
bool kvl_linear_goes_to_blas(const struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, bool exact);
kvl_status kvl_linear_run_blas(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                               struct kvl_rows y, bool add);

#endif
