/* Products that follow each other, in as few launches as the device allows. */
#include "linear_internal.h"

enum { MOST_LINKS = 4 }; /* KVL_CHAIN of gemv.cl */

/* kvl_link of gemv.cl. */
struct link {
    uint64_t x_offset, y_offset;
    uint32_t n_panels, n_blocks, n_out, n_cols, epilogue;
    float eps;
};

static uint32_t blocks_of(const struct kvl_linear *linear) { return (uint32_t)(round_up(linear->cols, COLUMN) / COLUMN); }

/* Whether a product may be part of a chain. */
static bool chains(const struct kvl_linear_kernels *kernels, const struct kvl_product *p, uint32_t T, bool exact)
{
    return T == 1 && kvl_device_caps(kernels->device)->type == KVL_DEVICE_CPU && kernels->scratch[TURNS] != NULL && kvl_linear_variant(kernels, p->linear, T, exact) == INT8_1 && p->linear->n_parts == 1 && p->linear->n_heads == 1 &&
           (p->norm == NULL || p->linear->cols % COLUMN == 0); /* whole blocks of the norm's weight are read */
}

/* Of the n products: how many from the first on go together. */
static size_t chain_length(const struct kvl_linear_kernels *kernels, const struct kvl_product *p, size_t n, uint32_t T, bool exact)
{
    size_t length = 0;
    while (length < n && length < MOST_LINKS && p[length].linear->type == p[0].linear->type && chains(kernels, &p[length], T, exact)) length++;
    return length;
}

static kvl_status run_alone(struct kvl_linear_kernels *kernels, const struct kvl_product *p, uint32_t T, bool exact)
{
    if (p->norm != NULL) return kvl_linear_run_normed(kernels, p->linear, T, p->x, p->norm, p->y, exact);
    return kvl_linear_run(kernels, p->linear, T, p->x, p->y, p->add, exact);
}

static kvl_status run_together(struct kvl_linear_kernels *kernels, const struct kvl_product *p, size_t n)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel;
    const uint32_t units = kvl_device_caps(kernels->device)->compute_units;
    const size_t global[3] = {units, 1, 1}, local[3] = {1, 1, 1};
    struct link link[MOST_LINKS] = {0};
    struct kvl_arg w[MOST_LINKS], x[MOST_LINKS], y[MOST_LINKS], norm[MOST_LINKS];
    struct kvl_work work = {0};
    uint32_t most_blocks = 0;
    for (size_t i = 0; i < MOST_LINKS; i++) {
        const struct kvl_product *q = i < n ? &p[i] : &p[0]; /* buffers behind the last are never read */
        const struct kvl_linear *linear = q->linear;
        w[i] = KVL_BUF(linear->parts[0].buffer);
        x[i] = KVL_BUF(q->x.buffer);
        y[i] = KVL_BUF(q->y.buffer);
        norm[i] = KVL_BUF(q->norm != NULL ? q->norm->weight : NULL);
        if (i >= n) continue;
        link[i] = (struct link){q->x.offset, q->y.offset, (uint32_t)linear->n_panels, blocks_of(linear), (uint32_t)linear->rows,
                                (uint32_t)linear->cols, kvl_linear_epilogue(linear, q->add), q->norm != NULL ? q->norm->eps : 0.0f};
        most_blocks = (uint32_t)max_u64(most_blocks, link[i].n_blocks);
        work.bytes += linear->n_panels * linear->panel_bytes + (linear->cols + linear->rows) * sizeof(float);
        work.flops += 2 * linear->n_panels * PANEL_ROWS * linear->cols;
    }
    KVL_TRY(kvl_linear_kernel(kernels, p->linear->type, CHAIN, &kernel));
    status = KVL_LAUNCH(kernels->device, kernel, global, local, work, KVL_STRUCT(link), KVL_U32((uint32_t)n), KVL_U32(units), w[0], w[1],
                        w[2], w[3], x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3], norm[0], norm[1], norm[2], norm[3],
                        KVL_BUF(kernels->scratch[TURNS]), KVL_LOCAL(codes_bytes(1, most_blocks)), KVL_LOCAL(scales_bytes(1, most_blocks)));
done:
    return status;
}

kvl_status kvl_linear_run_chain(struct kvl_linear_kernels *kernels, const struct kvl_product *product, size_t n, uint32_t T, bool exact)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < n;) {
        const size_t length = chain_length(kernels, product + i, n - i, T, exact);
        if (length > 1) KVL_TRY(run_together(kernels, product + i, length));
        else KVL_TRY(run_alone(kernels, product + i, T, exact));
        i += length > 1 ? length : 1;
    }
done:
    return status;
}
