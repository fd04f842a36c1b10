/* Matrix products with packed weights, and the small kernels that stand beside them (embedding rows, norms).
 *
 * Weights stay in their file's format on the device, packed in panels of 16 rows (cl/weight/panel.cl); they are dequantized 32
 * columns at a time inside the kernels, never as a whole. Every call enqueues and returns.
 *
 * Activations are rows of f32 (struct kvl_rows). A row that is multiplied is read up to a multiple of 32 columns; what stands there is multiplied with
 * zeros, so it must be finite. Exact products do not depend on how many tokens are passed at once: the same bits for a token alone and in a batch.
 */
#ifndef KVL_LINEAR_H
#define KVL_LINEAR_H
#include "device.h"
#include "gguf.h"
#include "quant.h"
#include "status.h"
#include "text.h"
#include "tuning.h"

/* Rows of f32 in a buffer: row t begins at float offset + t * stride, that of head h, where a matrix has heads, h * step behind it. */
struct kvl_rows {
    struct kvl_buffer *buffer;
    uint64_t offset, stride, step;
};

/* ---- weights ---- */

struct kvl_linear_part { /* whole pairs of panels, or all of some heads, in a buffer below the device's largest allocation */
    struct kvl_buffer *buffer;
    uint64_t first_panel, n_panels;
};

/* What becomes of a product of gate and value. */
enum kvl_gate { KVL_GATE_NONE, KVL_GATE_SILU, KVL_GATE_GELU };

/* What is made of tensors' rows. */
struct kvl_linear_form {
    enum kvl_gate gate;          /* not none: the two tensors are gate and value, of equal shape */
    uint64_t turned_rows;        /* of the first ones, heads of head_dim rows: rows i and i + rope_dim / 2 of a head become neighbours */
    uint32_t head_dim, rope_dim;
    bool heads;                  /* each tensor is the matrix of a head, of equal shape: a product is one for each of them */
};
/* The row of the tensors that becomes row `row`. */
static inline uint64_t kvl_linear_source_row(const struct kvl_linear_form *form, uint64_t row)
{
    const uint64_t c = row < form->turned_rows ? row % form->head_dim : form->rope_dim;
    return c < form->rope_dim ? row - c + c / 2 + c % 2 * (form->rope_dim / 2) : row;
}

struct kvl_linear {
    const struct kvl_quant_type *type;
    uint64_t rows, cols; /* outputs of a product, columns of the tensors */
    uint64_t n_heads;    /* rows and cols are those of one */
    enum kvl_gate gate;  /* not none: panels alternate gate, value, and a product is f(gate) * value */
    uint64_t panel_bytes, n_panels, n_parts; /* panels of all heads, each in whole pairs */
    struct kvl_linear_part *parts;
};

/* Packs n tensors of equal type and columns, their rows one after the other, and uploads them (blocks). owner, layer: for the ledger. */
kvl_status kvl_linear_load(struct kvl_device *device, const char *owner, int layer, const struct kvl_gguf_tensor *const *tensors,
                           size_t n, struct kvl_linear_form form, struct kvl_linear *out);
void kvl_linear_free(struct kvl_linear *linear);

/* Bytes that a packed matrix of these rows and columns takes; gated: of gate and value together, `rows` each. */
uint64_t kvl_linear_bytes(const struct kvl_quant_type *type, uint64_t rows, uint64_t cols, bool gated);
/* The same of the matrices of n heads. */
uint64_t kvl_linear_heads_bytes(const struct kvl_quant_type *type, uint64_t n, uint64_t rows, uint64_t cols);

/* Test hook: a part holds at most this many bytes, if that is less than the device's limit; 0 switches it off. */
void kvl_linear_limit_part(uint64_t bytes);

/* ---- products ---- */

/* Kernels of a device with the settings it has now, built when first used. */
struct kvl_linear_kernels;
kvl_status kvl_linear_kernels_new(struct kvl_device *device, struct kvl_linear_kernels **out);
void kvl_linear_kernels_free(struct kvl_linear_kernels **kernels);

/* The i-th program of a weight type with the settings of `tuning` (NULL: built-in), for compiling it without a device; KVL_SKIP behind
 * the last. Several may share their text and options. */
enum { KVL_LINEAR_PARTS = 7 };
struct kvl_linear_program {
    const char *kernel, *variant; /* variant: options without tunables */
    bool vectors_only;            /* no device whose float vectors are one wide runs it */
    struct kvl_text options;      /* all of them; owned: kvl_text_free */
    struct kvl_source parts[KVL_LINEAR_PARTS];
};
kvl_status kvl_linear_program(const struct kvl_tuning *tuning, const struct kvl_quant_type *type, size_t i, struct kvl_linear_program *out);

/* Bytes of scratch. Where a device's tuning gives products of many tokens to CLBlast, for most_tokens tokens and matrices of most_cols columns:
 * a block of rows unpacked, activations by columns, products (zeros where gemm.cl makes them: other tunings, few tokens, `exact`). Without
 * `exact`, the counters of chains. */
enum { KVL_LINEAR_SCRATCH = 4 };
void kvl_linear_scratch(const struct kvl_tuning *tuning, uint32_t most_tokens, uint64_t most_cols, bool exact,
                        uint64_t bytes[KVL_LINEAR_SCRATCH]);
/* Makes this scratch. Products for which there is none are made by gemm.cl, chains one product at a time. */
kvl_status kvl_linear_reserve(struct kvl_linear_kernels *kernels, uint32_t most_tokens, uint64_t most_cols, bool exact);
uint64_t kvl_linear_reserved(const struct kvl_linear_kernels *kernels); /* bytes of it */

/* y[t] = W x[t], or y[t] += W x[t] with `add` (not if gated), for T tokens; of all heads where the matrix has some. x and y do not overlap.
 * Without `exact`, products of few tokens with quantized weights round the activations to 8 bits in blocks of 32 where a work-item has
 * vectors, and products of many tokens may be CLBlast's. */
kvl_status kvl_linear_run(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                          struct kvl_rows y, bool add, bool exact);

/* RMS norm in front of a product. normed: room for T rows, used where the norm needs a launch of its own. */
struct kvl_norm {
    struct kvl_buffer *weight; /* [cols] f32 */
    float eps;
    struct kvl_rows normed;
};
/* y[t] = W norm(x[t]). */
kvl_status kvl_linear_run_normed(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                                 const struct kvl_norm *norm, struct kvl_rows y, bool exact);

/* One product of a chain: W x, W norm(x) where a norm is given, added to y with `add`. */
struct kvl_product {
    const struct kvl_linear *linear;
    struct kvl_rows x, y;
    const struct kvl_norm *norm;
    bool add;
};
/* n products one after the other: each may read what those before it wrote. The same bits as one at a time; where a work-item has vectors, neighbours
 * of a weight type are one launch for one token. */
kvl_status kvl_linear_run_chain(struct kvl_linear_kernels *kernels, const struct kvl_product *product, size_t n, uint32_t T, bool exact);

/* y[t] = row ids[t] of the matrix times scale, for T ids (i32) from element first_id of the buffer. Ids beyond the rows leave y[t] as it is. */
kvl_status kvl_linear_embed(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_buffer *ids,
                            uint64_t first_id, float scale, struct kvl_rows y);

/* y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, n floats each. y may be x. */
kvl_status kvl_rms_norm_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t n, float eps, struct kvl_buffer *weight,
                            struct kvl_rows x, struct kvl_rows y);
/* y[t] += the same. */
kvl_status kvl_rms_norm_add_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t n, float eps, struct kvl_buffer *weight,
                                struct kvl_rows x, struct kvl_rows y);
/* Each of the `heads` heads of n floats that lie side by side at the begin of x[t] is normalized in place. */
kvl_status kvl_rms_norm_heads_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t heads, uint32_t n, float eps,
                                  struct kvl_buffer *weight, struct kvl_rows x);
/* y[t] += row, n floats, a multiple of 8. */
kvl_status kvl_add_row_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t n, struct kvl_buffer *row, struct kvl_rows y);

#endif
