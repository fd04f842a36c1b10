/* Packing of weights and the choice of kernel for a product.
 *
 * Up to KVL_FEW_TOKENS tokens go through a GEMV kernel (compiled for 1, 2 or 4 tokens), more through the GEMM. The 8-bit GEMV keeps
 * the activations' codes in local memory; where they do not fit, the exact one takes over. Devices whose float vectors are one wide get kernels
 * in which the work-items of a group are the lanes; their GEMV adds in another order, so exact products are all the GEMM's. */
#include "linear_internal.h"
#include "embedded.h"
#include "mem.h"
#include <assert.h>
#include <stdio.h>
#include <string.h>

/* ---- packing ---- */

static uint64_t part_limit; /* 0 = the device's */
void kvl_linear_limit_part(uint64_t bytes) { part_limit = bytes; }

/* The tensors that a matrix is packed from. */
struct sources {
    const struct kvl_gguf_tensor *const *tensors;
    size_t n;
    struct kvl_linear_form form;
};

static uint64_t panels_of(uint64_t rows, bool gated) { return round_up(rows, PANEL_ROWS) / PANEL_ROWS * (gated ? 2 : 1); }
static uint64_t head_panels(uint64_t rows) { return round_up(panels_of(rows, false), 2); }

/* Row `row` of the tensors laid end to end, or each filled up to its panels, or of gate and value by turns of 16; NULL for a padding row. */
static const uint8_t *source_row(const struct sources *from, uint64_t row)
{
    const struct kvl_gguf_tensor *const *tensors = from->tensors;
    const size_t n = from->n;
    size_t i = 0;
    if (from->form.heads) {
        const uint64_t padded = head_panels(tensors[0]->dim[1]) * PANEL_ROWS;
        i = row / padded;
        row %= padded;
        if (row >= tensors[i]->dim[1]) return NULL;
    } else if (from->form.gate != KVL_GATE_NONE) {
        i = row / PANEL_ROWS % 2;
        row = row / (2 * PANEL_ROWS) * PANEL_ROWS + row % PANEL_ROWS;
        if (row >= tensors[i]->dim[1]) return NULL;
    } else {
        row = kvl_linear_source_row(&from->form, row);
        while (i < n && row >= tensors[i]->dim[1]) row -= tensors[i++]->dim[1];
        if (i == n) return NULL;
    }
    return tensors[i]->data + row * (tensors[i]->n_bytes / tensors[i]->dim[1]);
}

/* Bytes of one row's part of a block column. */
static uint64_t column_bytes(const struct kvl_quant_type *type)
{
    return type->block < COLUMN ? (uint64_t)COLUMN / type->block * type->bytes : type->bytes;
}

static uint64_t panel_bytes_of(const struct kvl_quant_type *type, uint64_t cols)
{
    return round_up(cols, COLUMN) / (type->block < COLUMN ? COLUMN : type->block) * column_bytes(type) * PANEL_ROWS;
}

uint64_t kvl_linear_bytes(const struct kvl_quant_type *type, uint64_t rows, uint64_t cols, bool gated)
{
    return panels_of(rows, gated) * panel_bytes_of(type, cols);
}

uint64_t kvl_linear_heads_bytes(const struct kvl_quant_type *type, uint64_t n, uint64_t rows, uint64_t cols)
{
    return n * head_panels(rows) * panel_bytes_of(type, cols);
}

/* 16 rows (NULL: zeros) of row_bytes each, interleaved word by word. `panel` is zeroed. */
static void pack_panel(const uint8_t *const rows[PANEL_ROWS], uint64_t row_bytes, uint64_t unit, uint8_t *panel)
{
    for (uint64_t at = 0; at < row_bytes; at += unit) { /* a block column at a time, to stay in cache */
        const uint64_t n = min_u64(unit, row_bytes - at);
        for (int r = 0; r < PANEL_ROWS; r++)
            for (uint64_t i = 0; rows[r] != NULL && i < n; i += 2)
                memcpy(panel + (at + i) * PANEL_ROWS + 2 * r, rows[r] + at + i, 2);
    }
}

static kvl_status check_tensors(const struct kvl_gguf_tensor *const *tensors, size_t n, struct kvl_linear_form form)
{
    const struct kvl_gguf_tensor *first = tensors[0];
    const struct kvl_quant_type *type = kvl_quant_type(first->type);
    if (type == NULL)
        return kvl_fail(KVL_E_UNSUPPORTED, "tensor %.*s: no kernel for tensor type %u", (int)first->name.size, first->name.data,
                        first->type);
    const bool gated = form.gate != KVL_GATE_NONE, equal_rows = gated || form.heads;
    assert(!gated || (n == 2 && !form.heads));
    for (size_t i = 0; i < n; i++) {
        const struct kvl_gguf_tensor *t = tensors[i];
        if (t->type != first->type || t->dim[0] != first->dim[0] || (equal_rows && t->dim[1] != first->dim[1]))
            return kvl_fail(KVL_E_FORMAT, "tensor %.*s (type %u, %llu x %llu) does not go with %.*s (type %u, %llu x %llu)",
                            (int)t->name.size, t->name.data, t->type, (unsigned long long)t->dim[1], (unsigned long long)t->dim[0],
                            (int)first->name.size, first->name.data, first->type, (unsigned long long)first->dim[1],
                            (unsigned long long)first->dim[0]);
        if (t->n_dims > 2 || t->dim[0] == 0 || t->dim[1] == 0 || t->dim[0] % type->block != 0 || t->dim[0] > INT32_MAX ||
            t->dim[1] > INT32_MAX || t->n_bytes != t->dim[0] / type->block * type->bytes * t->dim[1])
            return kvl_fail(KVL_E_FORMAT, "tensor %.*s: a matrix of %s blocks of %u wanted, found %llu x %llu in %llu bytes",
                            (int)t->name.size, t->name.data, type->name, type->block, (unsigned long long)t->dim[1],
                            (unsigned long long)t->dim[0], (unsigned long long)t->n_bytes);
    }
    return KVL_OK;
}

/* Packs and writes the panels of one part, some at a time through `staging`. */
static kvl_status upload_part(const struct kvl_linear *linear, const struct kvl_linear_part *part, const struct sources *from,
                              uint8_t *staging, uint64_t staging_panels)
{
    kvl_status status = KVL_OK;
    const uint64_t row_bytes = from->tensors[0]->n_bytes / from->tensors[0]->dim[1], unit = column_bytes(linear->type);
    for (uint64_t done = 0; done < part->n_panels; done += staging_panels) {
        const uint64_t count = min_u64(staging_panels, part->n_panels - done);
        memset(staging, 0, count * linear->panel_bytes);
        for (uint64_t p = 0; p < count; p++) {
            const uint8_t *rows[PANEL_ROWS];
            for (int r = 0; r < PANEL_ROWS; r++)
                rows[r] = source_row(from, (part->first_panel + done + p) * PANEL_ROWS + r);
            pack_panel(rows, row_bytes, unit, staging + p * linear->panel_bytes);
        }
        KVL_TRY(kvl_buffer_write(part->buffer, done * linear->panel_bytes, count * linear->panel_bytes, staging));
    }
done:
    return status;
}

kvl_status kvl_linear_load(struct kvl_device *device, const char *owner, int layer, const struct kvl_gguf_tensor *const *tensors,
                           size_t n, struct kvl_linear_form form, struct kvl_linear *out)
{
    enum { STAGING_BYTES = 1 << 20 };
    kvl_status status = KVL_OK;
    const struct sources from = {tensors, n, form};
    const bool gated = form.gate != KVL_GATE_NONE;
    struct kvl_linear linear = {0};
    uint8_t *staging = NULL;
    KVL_TRY(check_tensors(tensors, n, form));
    linear.type = kvl_quant_type(tensors[0]->type);
    linear.gate = form.gate;
    linear.cols = tensors[0]->dim[0];
    linear.n_heads = form.heads ? n : 1;
    for (size_t i = 0; i < n; i++) linear.rows += tensors[i]->dim[1];
    linear.rows /= gated ? 2 : linear.n_heads;
    linear.n_panels = form.heads ? n * head_panels(linear.rows) : panels_of(linear.rows, gated);
    linear.panel_bytes = panel_bytes_of(linear.type, linear.cols);

    uint64_t limit = kvl_device_caps(device)->max_alloc_bytes;
    if (part_limit != 0) limit = min_u64(limit, part_limit);
    const uint64_t unit = form.heads ? head_panels(linear.rows) : 2; /* panels that stay together */
    const uint64_t part_panels = limit / linear.panel_bytes / unit * unit, staging_panels = STAGING_BYTES / linear.panel_bytes + 1;
    if (part_panels == 0) {
        status = kvl_fail(KVL_E_DEVICE_MEM, "%s: %llu rows take %llu bytes, the device allocates at most %llu at once", owner,
                          (unsigned long long)(unit * PANEL_ROWS), (unsigned long long)(unit * linear.panel_bytes), (unsigned long long)limit);
        goto done;
    }
    linear.n_parts = round_up(linear.n_panels, part_panels) / part_panels;
    KVL_TRY(kvl_alloc(&linear.parts, linear.n_parts, sizeof *linear.parts));
    KVL_TRY(kvl_alloc(&staging, staging_panels, linear.panel_bytes));
    for (uint64_t i = 0; i < linear.n_parts; i++) {
        struct kvl_linear_part *part = &linear.parts[i];
        part->first_panel = i * part_panels;
        part->n_panels = min_u64(part_panels, linear.n_panels - part->first_panel);
        KVL_TRY(kvl_buffer_new(device, owner, layer, KVL_MEM_WEIGHTS, part->n_panels * linear.panel_bytes, false, &part->buffer));
        KVL_TRY(upload_part(&linear, part, &from, staging, staging_panels));
    }
    *out = linear;
    linear = (struct kvl_linear){0};
done:
    kvl_free(&staging);
    kvl_linear_free(&linear);
    return status;
}

void kvl_linear_free(struct kvl_linear *linear)
{
    for (uint64_t i = 0; linear->parts != NULL && i < linear->n_parts; i++) kvl_buffer_free(&linear->parts[i].buffer);
    kvl_free(&linear->parts);
    *linear = (struct kvl_linear){0};
}

/* ---- kernels ---- */

/* Helpers on float16 in platform.cl; work-items that share what a vector would hold. */
#define VECTORS "-DKVL_VECTORS=1"
#define ITEMS "-DKVL_W_LANES=1 -DKVL_ITEMS=256"
enum { GROUP_ITEMS = 256, EMBED_ITEMS = 64, ADD_ITEMS = 8, TILE = 64 /* rows and tokens, gemm_items.cl */ };

/* tokens: how many the kernel is compiled for (GEMV). tuned: the kernel whose tunables the text takes. */
static const struct {
    const char *file, *kernel, *options, *tuned;
    uint32_t tokens;
} variants[VARIANTS] = {
    [GEMM] = {"gemm.cl", "kvl_gemm", VECTORS, "gemm", 0},
    [GEMV_1] = {"gemv.cl", "kvl_gemv", VECTORS " -DKVL_GEMV_T=1", NULL, 1},
    [GEMV_2] = {"gemv.cl", "kvl_gemv", VECTORS " -DKVL_GEMV_T=2", NULL, 2},
    [GEMV_4] = {"gemv.cl", "kvl_gemv", VECTORS " -DKVL_GEMV_T=4", NULL, 4},
    [INT8_1] = {"gemv.cl", "kvl_gemv_int8", VECTORS " -DKVL_GEMV_T=1", NULL, 1},
    [INT8_2] = {"gemv.cl", "kvl_gemv_int8", VECTORS " -DKVL_GEMV_T=2", NULL, 2},
    [INT8_4] = {"gemv.cl", "kvl_gemv_int8", VECTORS " -DKVL_GEMV_T=4", NULL, 4},
    [GEMM_ITEMS] = {"gemm_items.cl", "kvl_gemm_items", ITEMS, NULL, 0},
    [GEMV_ITEMS_1] = {"gemv_items.cl", "kvl_gemv_items", ITEMS " -DKVL_GEMV_T=1", NULL, 1},
    [GEMV_ITEMS_2] = {"gemv_items.cl", "kvl_gemv_items", ITEMS " -DKVL_GEMV_T=2", NULL, 2},
    [GEMV_ITEMS_4] = {"gemv_items.cl", "kvl_gemv_items", ITEMS " -DKVL_GEMV_T=4", NULL, 4},
    [CHAIN] = {"gemv.cl", "kvl_gemv_chain", VECTORS " -DKVL_GEMV_T=1", NULL, 1},
    [EMBED] = {"embed.cl", "kvl_embed", "-DKVL_W_LANES=1 -DKVL_ITEMS=64", NULL, 0},
    [UNPACK] = {"blas.cl", "kvl_unpack", "-DKVL_W_LANES=1 -DKVL_ITEMS=16", NULL, 0},
    [COLUMNS] = {"blas.cl", "kvl_columns", VECTORS, NULL, 0},
    [FINISH] = {"blas.cl", "kvl_finish", VECTORS, NULL, 0},
};

static bool items_are_lanes(const struct kvl_caps *caps) { return caps->float_width == 1; }

/* Where loops are cut: a block of 32 columns takes some 150 iterations. */
enum { CUT_MOST_COLS = 6144 };

static struct kvl_linear_sizes sizes_of(const struct kvl_tuning *tuning)
{
    return (struct kvl_linear_sizes){
        .tokens = (uint32_t)kvl_tuned(tuning, "gemm", "tokens", false),
        .tile = (uint32_t)kvl_tuned(tuning, "gemm", "tile", false),
        .pairs = (uint32_t)kvl_tuned(tuning, "gemv", "pairs", false),
        .groups = (uint32_t)kvl_tuned(tuning, "gemv", "groups", false),
    };
}

kvl_status kvl_linear_kernels_new(struct kvl_device *device, struct kvl_linear_kernels **out)
{
    kvl_status status = KVL_OK;
    struct kvl_linear_kernels *kernels = NULL;
    KVL_TRY(kvl_alloc(&kernels, 1, sizeof *kernels));
    KVL_TRY(kvl_alloc(&kernels->of_type, kvl_n_quant_types, sizeof *kernels->of_type));
    kernels->device = device;
    kernels->sizes = sizes_of(kvl_device_tuning(device));
    *out = kernels;
    kernels = NULL;
done:
    kvl_linear_kernels_free(&kernels);
    return status;
}

void kvl_linear_kernels_free(struct kvl_linear_kernels **kernels)
{
    if (*kernels == NULL) return;
    for (int i = 0; i < KVL_LINEAR_SCRATCH; i++) kvl_buffer_free(&(*kernels)->scratch[i]);
    kvl_free(&(*kernels)->of_type);
    kvl_free(kernels);
}

void kvl_linear_scratch(const struct kvl_tuning *tuning, uint32_t most_tokens, uint64_t most_cols, bool exact,
                        uint64_t bytes[KVL_LINEAR_SCRATCH])
{
    kvl_linear_blas_scratch(tuning, most_tokens, most_cols, exact, bytes);
    bytes[TURNS] = exact ? 0 : TURNS_BYTES;
}

kvl_status kvl_linear_reserve(struct kvl_linear_kernels *kernels, uint32_t most_tokens, uint64_t most_cols, bool exact)
{
    static const char *const names[KVL_LINEAR_SCRATCH] = {"unpacked weights", "activations by columns", "products", "turns of products"};
    kvl_status status = KVL_OK;
    uint64_t bytes[KVL_LINEAR_SCRATCH];
    kvl_linear_scratch(kvl_device_tuning(kernels->device), most_tokens, most_cols, exact, bytes);
    for (int i = 0; i < KVL_LINEAR_SCRATCH; i++)
        if (bytes[i] != 0)
            KVL_TRY(kvl_buffer_new(kernels->device, names[i], -1, KVL_MEM_SCRATCH, bytes[i], i == TURNS, &kernels->scratch[i]));
    kernels->most_tokens = most_tokens;
    kernels->most_cols = most_cols;
done:
    return status;
}

uint64_t kvl_linear_reserved(const struct kvl_linear_kernels *kernels)
{
    uint64_t bytes = 0;
    for (int i = 0; i < KVL_LINEAR_SCRATCH; i++)
        if (kernels->scratch[i] != NULL) bytes += kvl_buffer_bytes(kernels->scratch[i]);
    return bytes;
}

static struct kvl_source cl_file(const char *name) { return (struct kvl_source){name, kvl_source_text(name)}; }

kvl_status kvl_linear_program(const struct kvl_tuning *tuning, const struct kvl_quant_type *type, size_t i, struct kvl_linear_program *out)
{
    kvl_status status = KVL_OK;
    if (i >= VARIANTS) return KVL_SKIP;
    *out = (struct kvl_linear_program){.kernel = variants[i].kernel,
                                       .variant = variants[i].options,
                                       .vectors_only = i <= INT8_4 || i == CHAIN,
                                       .parts = {cl_file("platform.cl"),
                                                 cl_file("weight/panel.cl"),
                                                 {type->device_source, kvl_embedded_text(type->device_source)},
                                                 cl_file("weight/codes.cl"),
                                                 cl_file("rms.cl"),
                                                 cl_file("epilogue.cl"),
                                                 cl_file(variants[i].file)}};
    KVL_TRY(kvl_text_printf(&out->options, "%s", variants[i].options));
    if (variants[i].tuned != NULL) KVL_TRY(kvl_tuned_defines(tuning, variants[i].tuned, false, &out->options));
done:
    if (status != KVL_OK) kvl_text_free(&out->options);
    return status;
}

kvl_status kvl_linear_kernel(struct kvl_linear_kernels *kernels, const struct kvl_quant_type *type, enum variant v,
                             struct kvl_kernel **out)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel **kernel = &kernels->of_type[type - kvl_quant_types][v];
    struct kvl_linear_program text = {0};
    if (*kernel == NULL) {
        struct kvl_program *program;
        KVL_TRY(kvl_linear_program(kvl_device_tuning(kernels->device), type, v, &text));
        KVL_TRY(kvl_program_get(kernels->device, text.parts, KVL_LINEAR_PARTS, text.options.data, &program));
        KVL_TRY(kvl_kernel_get(program, text.kernel, kernel));
    }
    *out = *kernel;
done:
    kvl_text_free(&text.options);
    return status;
}

enum variant kvl_linear_variant(const struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, bool exact)
{
    const struct kvl_caps *caps = kvl_device_caps(kernels->device);
    const int size = T == 1 ? 0 : T == 2 ? 1 : 2;
    if (items_are_lanes(caps)) return exact || T > KVL_FEW_TOKENS ? GEMM_ITEMS : GEMV_ITEMS_1 + size;
    if (T > KVL_FEW_TOKENS) return GEMM;
    const uint64_t n_blocks = round_up(linear->cols, COLUMN) / COLUMN;
    const uint32_t tokens = variants[INT8_1 + size].tokens;
    const bool fits = codes_bytes(tokens, n_blocks) + scales_bytes(tokens, n_blocks) <= caps->local_bytes;
    return (!exact && linear->type->block > 1 && fits ? INT8_1 : GEMV_1) + size;
}

static bool is_int8(enum variant v) { return v >= INT8_1 && v <= INT8_4; }
static bool norms_on_the_way(enum variant v) { return is_int8(v) || (v >= GEMV_ITEMS_1 && v <= GEMV_ITEMS_4); }

struct shape {
    size_t global[3], local[3];
};

/* chunk: tokens that a work-item of gemm.cl handles. */
static struct shape shape_of(const struct kvl_linear_kernels *kernels, enum variant v, uint64_t n_panels, uint64_t n_heads, uint32_t T, uint32_t chunk)
{
    const uint64_t n_pairs = (n_panels + 1) / 2, units = kvl_device_caps(kernels->device)->compute_units;
    switch (v) {
    case GEMM: return (struct shape){{n_pairs, (T + chunk - 1) / chunk, n_heads}, {1, 1, 1}};
    case GEMM_ITEMS: return (struct shape){{round_up(n_panels * PANEL_ROWS, TILE) / TILE * GROUP_ITEMS, (T + TILE - 1) / TILE, n_heads}, {GROUP_ITEMS, 1, 1}};
    case GEMV_ITEMS_1:
    case GEMV_ITEMS_2:
    case GEMV_ITEMS_4: return (struct shape){{n_pairs * GROUP_ITEMS, 1, n_heads}, {GROUP_ITEMS, 1, 1}};
    default: return (struct shape){{max_u64(n_pairs / kernels->sizes.pairs, min_u64(n_pairs, units * kernels->sizes.groups)), 1, n_heads}, {1, 1, 1}};
    }
}

static kvl_status run_part(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, const struct kvl_linear_part *part,
                           enum variant v, uint32_t T, struct kvl_rows x, const struct kvl_norm *norm, struct kvl_rows y, bool add)
{
    enum { NORM_ARGS = 3, INT8_ARGS = 2 }; /* at the end of the list */
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel;
    struct kvl_device *device = kernels->device;
    const bool heads = linear->n_heads > 1;
    const uint64_t each = head_panels(linear->rows), n_heads = heads ? part->n_panels / each : 1, first_head = heads ? part->first_panel / each : 0;
    const uint64_t n_panels = heads ? panels_of(linear->rows, false) : part->n_panels; /* of a head */
    const uint64_t first_row = heads ? 0 : part->first_panel * PANEL_ROWS / (linear->gate ? 2 : 1);
    const uint32_t n_blocks = (uint32_t)(round_up(linear->cols, COLUMN) / COLUMN), n_out = (uint32_t)(linear->rows - first_row);
    const uint32_t n_chunks = (T + kernels->sizes.tokens - 1) / kernels->sizes.tokens;
    const uint32_t chunk = (uint32_t)round_up((T + n_chunks - 1) / n_chunks, kernels->sizes.tile);
    const struct shape shape = shape_of(kernels, v, n_panels, n_heads, T, chunk);
    const struct kvl_work work = {.bytes = part->n_panels * linear->panel_bytes + n_heads * T * (linear->cols + n_out) * 4,
                                  .flops = 2 * part->n_panels * PANEL_ROWS * linear->cols * T};
    const struct kvl_arg w = KVL_BUF(part->buffer), panels = KVL_U32((uint32_t)n_panels), x_offset = KVL_U64(x.offset + first_head * x.step),
                         y_offset = KVL_U64(y.offset + first_head * y.step + first_row);
    KVL_TRY(kvl_linear_kernel(kernels, linear->type, v, &kernel));
    if (v == GEMM)
        return KVL_LAUNCH(device, kernel, shape.global, shape.local, work, w, panels, KVL_U32(n_blocks), KVL_U32(n_out), KVL_BUF(x.buffer),
                          x_offset, KVL_U64(x.stride), KVL_U32(T), KVL_U32(chunk), KVL_BUF(y.buffer), y_offset,
                          KVL_U64(y.stride), KVL_U32(kvl_linear_epilogue(linear, add)), KVL_U64(x.step), KVL_U64(y.step));
    const struct kvl_arg args[] = {w,
                                   panels,
                                   KVL_U32(n_blocks),
                                   KVL_U32(n_out),
                                   KVL_BUF(x.buffer),
                                   x_offset,
                                   KVL_U64(x.stride),
                                   KVL_U32(T),
                                   KVL_BUF(y.buffer),
                                   y_offset,
                                   KVL_U64(y.stride),
                                   KVL_U32(kvl_linear_epilogue(linear, add)),
                                   KVL_U64(x.step),
                                   KVL_U64(y.step),
                                   KVL_BUF(norm != NULL ? norm->weight : NULL),
                                   KVL_U32((uint32_t)linear->cols),
                                   KVL_F32(norm != NULL ? norm->eps : 0.0f),
                                   KVL_LOCAL(codes_bytes(variants[v].tokens, n_blocks)),
                                   KVL_LOCAL(scales_bytes(variants[v].tokens, n_blocks))};
    const size_t n_args = sizeof args / sizeof *args - (is_int8(v) ? 0 : norms_on_the_way(v) ? INT8_ARGS : INT8_ARGS + NORM_ARGS);
    status = kvl_launch(device, kernel, shape.global, shape.local, work, args, n_args);
done:
    return status;
}

kvl_status kvl_linear_run(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                          struct kvl_rows y, bool add, bool exact)
{
    kvl_status status = KVL_OK;
    assert(T > 0 && !(add && linear->gate));
    const struct kvl_caps *caps = kvl_device_caps(kernels->device);
    if (kvl_loops_are_cut(caps) && linear->cols > CUT_MOST_COLS)
        return kvl_fail(KVL_E_UNSUPPORTED,
                        "%s ends long loops early: it multiplies matrices of at most %d columns, found %llu; use another device",
                        caps->name, CUT_MOST_COLS, (unsigned long long)linear->cols);
    if (kvl_linear_goes_to_blas(kernels, linear, T, exact)) return kvl_linear_run_blas(kernels, linear, T, x, y, add);
    const enum variant v = kvl_linear_variant(kernels, linear, T, exact);
    for (uint64_t i = 0; i < linear->n_parts; i++) KVL_TRY(run_part(kernels, linear, &linear->parts[i], v, T, x, NULL, y, add));
done:
    return status;
}

kvl_status kvl_linear_run_normed(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_rows x,
                                 const struct kvl_norm *norm, struct kvl_rows y, bool exact)
{
    kvl_status status = KVL_OK;
    const enum variant v = kvl_linear_variant(kernels, linear, T, exact);
    if (norms_on_the_way(v) && linear->cols % COLUMN == 0) { /* whole blocks of x and of the norm's weight are read */
        for (uint64_t i = 0; i < linear->n_parts; i++)
            KVL_TRY(run_part(kernels, linear, &linear->parts[i], v, T, x, norm, y, false));
    } else {
        KVL_TRY(kvl_rms_norm_run(kernels, T, (uint32_t)linear->cols, norm->eps, norm->weight, x, norm->normed));
        KVL_TRY(kvl_linear_run(kernels, linear, T, norm->normed, y, false, exact));
    }
done:
    return status;
}

kvl_status kvl_linear_embed(struct kvl_linear_kernels *kernels, const struct kvl_linear *linear, uint32_t T, struct kvl_buffer *ids,
                            uint64_t first_id, float scale, struct kvl_rows y)
{
    kvl_status status = KVL_OK;
    struct kvl_kernel *kernel;
    const uint32_t n_blocks = (uint32_t)(round_up(linear->cols, COLUMN) / COLUMN);
    const size_t global[3] = {EMBED_ITEMS, T, 1}, local[3] = {EMBED_ITEMS, 1, 1};
    const struct kvl_work work = {.bytes = (uint64_t)T * (linear->panel_bytes / PANEL_ROWS + linear->cols * 4)};
    assert(!linear->gate && linear->n_heads == 1);
    KVL_TRY(kvl_linear_kernel(kernels, linear->type, EMBED, &kernel));
    for (uint64_t i = 0; i < linear->n_parts; i++) {
        const struct kvl_linear_part *part = &linear->parts[i];
        const uint64_t first_row = part->first_panel * PANEL_ROWS,
                       n_rows = min_u64(part->n_panels * PANEL_ROWS, linear->rows - first_row);
        KVL_TRY(KVL_LAUNCH(kernels->device, kernel, global, local, work, KVL_BUF(part->buffer), KVL_U32(n_blocks),
                           KVL_U32((uint32_t)linear->cols), KVL_U32((uint32_t)first_row), KVL_U32((uint32_t)n_rows), KVL_BUF(ids),
                           KVL_U64(first_id), KVL_F32(scale), KVL_BUF(y.buffer), KVL_U64(y.offset), KVL_U64(y.stride)));
    }
done:
    return status;
}

/* ---- norms ---- */

static kvl_status norm_kernel(struct kvl_linear_kernels *kernels, const char *name, struct kvl_kernel **kernel)
{
    kvl_status status = KVL_OK;
    struct kvl_program *program;
    const struct kvl_source parts[] = {cl_file("platform.cl"), cl_file("rms.cl"), cl_file("norm.cl")};
    if (*kernel != NULL) return KVL_OK;
    KVL_TRY(kvl_program_get(kernels->device, parts, sizeof parts / sizeof *parts,
                            items_are_lanes(kvl_device_caps(kernels->device)) ? ITEMS : VECTORS, &program));
    KVL_TRY(kvl_kernel_get(program, name, kernel));
done:
    return status;
}

static kvl_status run_norm(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t heads, uint32_t n, float eps, struct kvl_buffer *weight,
                           struct kvl_rows x, struct kvl_rows y, bool add)
{
    kvl_status status = KVL_OK;
    const size_t group = items_are_lanes(kvl_device_caps(kernels->device)) ? GROUP_ITEMS : 1;
    const size_t global[3] = {T * group, heads, 1}, local[3] = {group, 1, 1};
    const struct kvl_work work = {.bytes = (uint64_t)T * heads * n * (add ? 12 : 8), .flops = (uint64_t)T * heads * n * 4};
    KVL_TRY(norm_kernel(kernels, "kvl_rms_norm", &kernels->norm));
    status = KVL_LAUNCH(kernels->device, kernels->norm, global, local, work, KVL_BUF(x.buffer), KVL_U64(x.offset), KVL_U64(x.stride),
                        KVL_BUF(weight), KVL_U32(n), KVL_F32(eps), KVL_BUF(y.buffer), KVL_U64(y.offset), KVL_U64(y.stride), KVL_U32(add));
done:
    return status;
}

kvl_status kvl_rms_norm_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t n, float eps, struct kvl_buffer *weight,
                            struct kvl_rows x, struct kvl_rows y)
{
    return run_norm(kernels, T, 1, n, eps, weight, x, y, false);
}

kvl_status kvl_rms_norm_add_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t n, float eps, struct kvl_buffer *weight,
                                struct kvl_rows x, struct kvl_rows y)
{
    return run_norm(kernels, T, 1, n, eps, weight, x, y, true);
}

kvl_status kvl_rms_norm_heads_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t heads, uint32_t n, float eps,
                                  struct kvl_buffer *weight, struct kvl_rows x)
{
    return run_norm(kernels, T, heads, n, eps, weight, x, x, false);
}

kvl_status kvl_add_row_run(struct kvl_linear_kernels *kernels, uint32_t T, uint32_t n, struct kvl_buffer *row, struct kvl_rows y)
{
    kvl_status status = KVL_OK;
    const size_t global[3] = {n, T, 1}, local[3] = {ADD_ITEMS, 1, 1};
    assert(n % ADD_ITEMS == 0);
    const struct kvl_work work = {.bytes = (uint64_t)T * n * 8};
    KVL_TRY(norm_kernel(kernels, "kvl_add_row", &kernels->add_row));
    status = KVL_LAUNCH(kernels->device, kernels->add_row, global, local, work, KVL_BUF(row), KVL_BUF(y.buffer), KVL_U64(y.offset),
                        KVL_U64(y.stride));
done:
    return status;
}
