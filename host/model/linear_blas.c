/* Products of many tokens by CLBlast: blocks of rows are unpacked into scratch and multiplied, so that no matrix is ever dequantized as a
 * whole. Chosen by the tunable `product` of gemm; kernels around it: cl/blas.cl. */
#include "blas.h"
#include "linear_internal.h"

enum { BLOCK_ROWS = 512 };

/* A product's sizes, padded to CLBlast's tiles and to what cl/blas.cl goes through at once. */
struct padded {
    uint32_t m, n, k;
};
static struct padded pad(const struct kvl_tuning *tuning, uint64_t rows, uint64_t tokens, uint64_t cols)
{
    const struct kvl_blas_unit unit = kvl_blas_unit(tuning);
    return (struct padded){.m = (uint32_t)round_up(rows, max_u64(unit.m, 2 * PANEL_ROWS)),
                           .n = (uint32_t)round_up(tokens, unit.n),
                           .k = (uint32_t)round_up(cols, max_u64(unit.k, COLUMN))};
}

static bool is_chosen(const struct kvl_tuning *tuning, bool exact)
{
    enum { OWN, CLBLAST }; /* the legal values in gemm.tune */
    return kvl_tuned(tuning, "gemm", "product", exact) == CLBLAST;
}

void kvl_linear_blas_scratch(const struct kvl_tuning *tuning, uint32_t most_tokens, uint64_t most_cols, bool exact, uint64_t bytes[BLAS_SCRATCH])
{
    const struct padded most = pad(tuning, BLOCK_ROWS, most_tokens, most_cols);
    const uint64_t size = most_tokens > KVL_FEW_TOKENS && is_chosen(tuning, exact) ? sizeof(float) : 0;
    bytes[WEIGHTS] = size * most.m * most.k;
    bytes[ACTIVATIONS] = size * most.n * most.k;
    bytes[PRODUCTS] = size * most.m * most.n;
}

bool kvl_linear_goes_to_blas(const struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, bool exact)
{
    return !exact && T > KVL_FEW_TOKENS && linear->n_heads == 1 && kernels->scratch[PRODUCTS] != NULL && T <= kernels->most_tokens &&
           linear->cols <= kernels->most_cols;
}

/* Groups of one work-item: any grid is legal. */
static const size_t alone[3] = {1, 1, 1};

static kvl_status gather_columns(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                                 struct padded size)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel;
    const size_t global[3] = {size.n / PANEL_ROWS, size.k, 1};
    const uint32_t n_blocks = (uint32_t)(round_up(linear->cols, COLUMN) / COLUMN);
    const struct kvl_work work = {.bytes = (uint64_t)(T + size.n) * size.k * sizeof(float)};
    KVL_TRY(kvl_linear_kernel(kernels, linear->type, COLUMNS, &kernel));
    status = KVL_LAUNCH(kernels->device, kernel, global, alone, work, KVL_BUF(x.buffer), KVL_U64(x.offset), KVL_U64(x.stride), KVL_U32(T),
                        KVL_U32(n_blocks), KVL_BUF(kernels->scratch[ACTIVATIONS]));
done:
    return status;
}

static kvl_status unpack(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, const struct kvl_linear_part *part,
                         uint64_t first_panel, struct padded size)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel;
    const size_t global[3] = {size.m, size.k / COLUMN, 1}, local[3] = {PANEL_ROWS, 1, 1};
    const uint32_t n_blocks = (uint32_t)(round_up(linear->cols, COLUMN) / COLUMN);
    const struct kvl_work work = {.bytes = size.m / PANEL_ROWS * (linear->panel_bytes + (uint64_t)PANEL_ROWS * size.k * sizeof(float))};
    KVL_TRY(kvl_linear_kernel(kernels, linear->type, UNPACK, &kernel));
    status = KVL_LAUNCH(kernels->device, kernel, global, local, work, KVL_BUF(part->buffer), KVL_U32((uint32_t)first_panel),
                        KVL_U32((uint32_t)part->n_panels), KVL_U32(n_blocks), KVL_BUF(kernels->scratch[WEIGHTS]));
done:
    return status;
}

static kvl_status finish(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, const struct kvl_linear_part *part,
                         uint64_t first_panel, uint32_t T, struct padded size, struct kvl_rows y, bool add)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel;
    const uint64_t first_row = part->first_panel * PANEL_ROWS / (linear->gate ? 2 : 1);
    const uint64_t n_panels = min_u64(part->n_panels - first_panel, BLOCK_ROWS / PANEL_ROWS);
    const size_t global[3] = {(n_panels + 1) / 2, T, 1};
    const struct kvl_work work = {.bytes = 2 * n_panels * PANEL_ROWS * T * sizeof(float)};
    KVL_TRY(kvl_linear_kernel(kernels, linear->type, FINISH, &kernel));
    status = KVL_LAUNCH(kernels->device, kernel, global, alone, work, KVL_BUF(kernels->scratch[PRODUCTS]), KVL_U32(size.m),
                        KVL_U32((uint32_t)(first_panel / 2)), KVL_U32((uint32_t)(linear->rows - first_row)), KVL_BUF(y.buffer),
                        KVL_U64(y.offset + first_row), KVL_U64(y.stride), KVL_U32(kvl_linear_epilogue(linear, add)));
done:
    return status;
}

kvl_status kvl_linear_run_blas(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                               struct kvl_rows y, bool add)
{
    kvl_status status = KVL_OK;
    const struct kvl_tuning *tuning = kvl_device_tuning(kernels->device);
    struct padded size = pad(tuning, 1, T, linear->cols);
    KVL_TRY(gather_columns(kernels, linear, T, x, size));
    for (uint64_t i = 0; i < linear->n_parts; i++) {
        const struct kvl_linear_part *part = &linear->parts[i];
        for (uint64_t panel = 0; panel < part->n_panels; panel += BLOCK_ROWS / PANEL_ROWS) {
            size.m = pad(tuning, min_u64((part->n_panels - panel) * PANEL_ROWS, BLOCK_ROWS), T, linear->cols).m;
            KVL_TRY(unpack(kernels, linear, part, panel, size));
            KVL_TRY(kvl_blas_product(kernels->device, size.m, size.n, size.k, kernels->scratch[WEIGHTS], kernels->scratch[ACTIVATIONS],
                                     kernels->scratch[PRODUCTS]));
            KVL_TRY(finish(kernels, linear, part, panel, T, size, y, add));
        }
    }
done:
    return status;
}
