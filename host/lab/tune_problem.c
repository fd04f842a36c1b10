#include "tune_problem.h"
#include "linear.h"
#include "mem.h"
#include "probe.h"
#include "reference.h"
#include "rng.h"
#include <math.h>
#include <string.h>

static kvl_status keep_bits(float **kept, const float *now, size_t n)
{
    const kvl_status status = kvl_alloc(kept, n, sizeof **kept);
    if (status == KVL_OK) memcpy(*kept, now, n * sizeof **kept);
    return status;
}

/* ---- products ---- */

struct product {
    struct kvl_device *device;
    struct kvl_linear linear;
    struct kvl_buffer *x_buffer, *y_buffer;
    uint32_t T;
    float *x, *w, *y, *kept; /* [T][cols], [rows][cols], [T][rows] */
    bool exact_too;          /* few tokens: the kernels of exact and of 8-bit products differ */
};

static void product_close(void **self)
{
    struct product *p = *self;
    if (p == NULL) return;
    kvl_linear_free(&p->linear);
    kvl_buffer_free(&p->x_buffer);
    kvl_buffer_free(&p->y_buffer);
    kvl_free(&p->x);
    kvl_free(&p->w);
    kvl_free(&p->y);
    kvl_free(&p->kept);
    kvl_free(self);
}

static kvl_status product_load(struct product *p, const struct kvl_tune_shape *shape)
{
    kvl_status status = KVL_OK;
    const uint64_t cols = shape->n_embd / shape->type->block * shape->type->block, rows = shape->n_ff;
    const size_t n_blocks = rows * cols / shape->type->block;
    struct kvl_gguf_tensor tensor = {.name = {"tune", 4}, .type = shape->type->gguf_type, .n_dims = 2, .dim = {cols, rows, 1, 1}};
    const struct kvl_gguf_tensor *const tensors[] = {&tensor};
    uint8_t *bytes = NULL;
    tensor.n_bytes = n_blocks * shape->type->bytes;
    KVL_TRY(kvl_alloc(&bytes, tensor.n_bytes, 1));
    KVL_TRY(kvl_alloc(&p->w, rows * cols, sizeof *p->w));
    kvl_probe_weights(shape->type, 1, n_blocks, bytes, p->w);
    tensor.data = bytes;
    status = kvl_linear_load(p->device, "tune weights", -1, tensors, 1, (struct kvl_linear_form){0}, &p->linear);
done:
    kvl_free(&bytes);
    return status;
}

static uint64_t padded_cols(const struct product *p) { return (p->linear.cols + 31) / 32 * 32; }

static kvl_status product_rows(struct product *p)
{
    kvl_status status = KVL_OK;
    const uint64_t stride = padded_cols(p);
    KVL_TRY(kvl_alloc(&p->x, p->T * stride, sizeof *p->x));
    KVL_TRY(kvl_alloc(&p->y, p->T * p->linear.rows, sizeof *p->y));
    for (uint32_t t = 0; t < p->T; t++)
        for (uint64_t i = 0; i < p->linear.cols; i++) p->x[t * stride + i] = (float)kvl_rng_normal(2, t * stride + i);
    KVL_TRY(kvl_buffer_new(p->device, "tune rows", -1, KVL_MEM_SCRATCH, p->T * stride * sizeof *p->x, false, &p->x_buffer));
    KVL_TRY(kvl_buffer_new(p->device, "tune products", -1, KVL_MEM_SCRATCH, p->T * p->linear.rows * sizeof *p->y, true, &p->y_buffer));
    KVL_TRY(kvl_buffer_write(p->x_buffer, 0, p->T * stride * sizeof *p->x, p->x));
done:
    return status;
}

static kvl_status product_open(struct kvl_device *device, const struct kvl_tune_shape *shape, uint32_t T, void **self)
{
    kvl_status status = KVL_OK;
    struct product *p = NULL;
    KVL_TRY(kvl_alloc(&p, 1, sizeof *p));
    *self = p;
    p->device = device;
    p->T = T;
    KVL_TRY(product_load(p, shape));
    KVL_TRY(product_rows(p));
done:
    if (status != KVL_OK) product_close(self);
    return status;
}

static kvl_status many_open(struct kvl_device *device, const struct kvl_tune_shape *shape, void **self)
{
    return product_open(device, shape, shape->tokens, self);
}

static const uint32_t few[] = {1, 4}; /* tokens of gemv's parts */

static kvl_status few_open(struct kvl_device *device, const struct kvl_tune_shape *shape, void **self)
{
    const kvl_status status = product_open(device, shape, few[1], self);
    if (status == KVL_OK) ((struct product *)*self)->exact_too = true;
    return status;
}

static kvl_status product_make(void *self, void **made)
{
    kvl_status status = KVL_OK;
    const struct product *p = self;
    struct kvl_linear_kernels *kernels = NULL;
    KVL_TRY(kvl_linear_kernels_new(p->device, &kernels));
    KVL_TRY(kvl_linear_reserve(kernels, p->T, p->linear.cols, false));
    *made = kernels;
    kernels = NULL;
done:
    kvl_linear_kernels_free(&kernels);
    return status;
}

/* With other settings of gemm for a moment. */
static kvl_status product_make_as(void *self, const char *gemm_setting, void **made)
{
    kvl_status status = KVL_OK;
    const struct product *p = self;
    const struct kvl_tune_kernel *gemm = kvl_tune_kernel_find("gemm");
    const struct kvl_tuning before = *kvl_device_tuning(p->device);
    struct kvl_setting setting;
    KVL_TRY(kvl_setting_parse(gemm, gemm_setting, &setting));
    kvl_device_tune(p->device, gemm, &setting, "tune");
    status = product_make(self, made);
    kvl_device_restore(p->device, &before);
done:
    return status;
}

static kvl_status clblast_make(void *self, void **made) { return product_make_as(self, "product=clblast", made); }
static kvl_status own_make(void *self, void **made) { return product_make_as(self, "", made); }

static void product_drop(void **made)
{
    struct kvl_linear_kernels *kernels = *made;
    kvl_linear_kernels_free(&kernels);
    *made = NULL;
}

static kvl_status product_run(struct product *p, void *made, uint32_t T, bool exact)
{
    const struct kvl_rows x = {p->x_buffer, 0, padded_cols(p)}, y = {p->y_buffer, 0, p->linear.rows};
    return kvl_linear_run(made, &p->linear, T, x, y, false, exact);
}

/* Tokens 0, T / 2 and T - 1 against double precision: an f32 sum of n terms may be off by (n + 2) / 2^24 of their sizes' sum. */
static kvl_status compare_products(const struct product *p)
{
    const uint64_t rows = p->linear.rows, cols = p->linear.cols, stride = padded_cols(p);
    const uint32_t tokens[] = {0, p->T / 2, p->T - 1};
    for (size_t i = 0; i < 3; i++)
        for (uint64_t r = 0; r < rows; r++) {
            const float *w = p->w + r * cols, *x = p->x + tokens[i] * stride;
            double sum = 0.0, size = 0.0;
            for (uint64_t c = 0; c < cols; c++) {
                sum += (double)w[c] * x[c];
                size += fabs((double)w[c] * x[c]);
            }
            const float y = p->y[tokens[i] * rows + r];
            if (!(fabs(y - sum) <= (double)(cols + 2) * 0x1p-24 * size))
                return kvl_fail(KVL_E_VERIFY, "token %u, row %llu is %.9g, the reference %.9g", tokens[i], (unsigned long long)r, y, sum);
        }
    return KVL_OK;
}

static kvl_status product_check(void *self, void *made, bool first, bool same_bits)
{
    kvl_status status = KVL_OK;
    struct product *p = self;
    const uint64_t n = p->T * p->linear.rows;
    KVL_TRY(product_run(p, made, p->T, p->exact_too));
    KVL_TRY(kvl_buffer_read(p->y_buffer, 0, n * sizeof *p->y, p->y));
    KVL_TRY(compare_products(p));
    if (p->exact_too) { /* the products that are timed round their activations: only their bits can be compared */
        KVL_TRY(product_run(p, made, p->T, false));
        KVL_TRY(kvl_buffer_read(p->y_buffer, 0, n * sizeof *p->y, p->y));
    }
    if (first) KVL_TRY(keep_bits(&p->kept, p->y, n));
    if (same_bits && memcmp(p->y, p->kept, n * sizeof *p->y) != 0)
        status = kvl_fail(KVL_E_VERIFY, "other bits than the defaults'");
done:
    return status;
}

static kvl_status many_run(void *self, void *made, size_t part)
{
    struct product *p = self;
    return product_run(p, made, p->T, false);
}

static double many_work(void *self, size_t part)
{
    const struct product *p = self;
    return 2e-9 * (double)p->T * (double)p->linear.rows * (double)p->linear.cols;
}

static kvl_status few_run(void *self, void *made, size_t part) { return product_run(self, made, few[part], false); }

static double few_work(void *self, size_t part)
{
    const struct product *p = self;
    return 1e-9 * (double)p->linear.n_panels * (double)p->linear.panel_bytes;
}

/* ---- attention ---- */

static const char *const attend_specs[] = {"f16", "int4"};
enum { SPECS = sizeof attend_specs / sizeof *attend_specs, PHASES = 2 /* decode, prefill */, UBATCH = 64, CHECKED = 600 };

struct attend {
    struct kvl_device *device;
    struct kvl_cache_dims dims;
    uint32_t depth;
    float *want[SPECS][PHASES]; /* of CHECKED tokens: one by one, in ubatches */
};

struct attend_made {
    struct kvl_probe deep[SPECS], checked[SPECS][PHASES];
};

static const uint32_t phase_tokens[PHASES] = {1, UBATCH};

static void attend_drop(void **made)
{
    struct attend_made *m = *made;
    for (int s = 0; m != NULL && s < SPECS; s++) {
        kvl_probe_close(&m->deep[s]);
        for (int phase = 0; phase < PHASES; phase++) kvl_probe_close(&m->checked[s][phase]);
    }
    kvl_free(made);
}

static void attend_close(void **self)
{
    struct attend *a = *self;
    for (int i = 0; a != NULL && i < SPECS * PHASES; i++) kvl_free(&a->want[i / PHASES][i % PHASES]);
    kvl_free(self);
}

static kvl_status attend_open(struct kvl_device *device, const struct kvl_tune_shape *shape, void **self)
{
    kvl_status status = KVL_OK;
    struct attend *a = NULL;
    KVL_TRY(kvl_alloc(&a, 1, sizeof *a));
    a->device = device;
    a->dims = (struct kvl_cache_dims){1, shape->n_head, shape->n_kv_head, shape->head_dim};
    a->depth = shape->depth;
    *self = a;
done:
    return status;
}

static kvl_status fill_deep(struct kvl_probe *b, uint32_t depth)
{
    kvl_status status = KVL_OK;
    for (uint32_t p = 0; p < depth; p += UBATCH) {
        const uint32_t n = depth - p < UBATCH ? depth - p : UBATCH;
        KVL_TRY(kvl_probe_stage(b, p, n));
        KVL_TRY(kvl_cache_step(b->cache, 0, n, b->stage, b->rotary, 0, NULL));
        kvl_cache_advance(b->cache, n);
    }
    status = kvl_probe_stage(b, depth, UBATCH);
done:
    return status;
}

static kvl_status attend_make(void *self, void **made)
{
    kvl_status status = KVL_OK;
    const struct attend *a = self;
    struct attend_made *m = NULL;
    KVL_TRY(kvl_alloc(&m, 1, sizeof *m));
    for (int s = 0; s < SPECS; s++) {
        m->deep[s] = (struct kvl_probe){.dims = a->dims, .n_tokens = a->depth + UBATCH, .ubatch = UBATCH, .protocol = KVL_P2_WRITE_THEN_READ};
        KVL_TRY(kvl_probe_open(a->device, attend_specs[s], NULL, NULL, &m->deep[s]));
        KVL_TRY(fill_deep(&m->deep[s], a->depth));
        for (int phase = 0; phase < PHASES; phase++) {
            m->checked[s][phase] = (struct kvl_probe){
                .dims = a->dims, .n_tokens = CHECKED, .ubatch = phase_tokens[phase], .protocol = KVL_P2_WRITE_THEN_READ};
            KVL_TRY(kvl_probe_open(a->device, attend_specs[s], NULL, NULL, &m->checked[s][phase]));
        }
    }
    *made = m;
    m = NULL;
done:
    attend_drop((void **)&m);
    return status;
}

static kvl_status attend_check(void *self, void *made, bool first, bool same_bits)
{
    const double allowed = 2e-5;
    kvl_status status = KVL_OK;
    struct attend *a = self;
    struct attend_made *m = made;
    for (int i = 0; i < SPECS * PHASES; i++) {
        struct kvl_probe *b = &m->checked[i / PHASES][i % PHASES];
        float **want = &a->want[i / PHASES][i % PHASES];
        const size_t n = b->n_tokens * kvl_probe_q_row(b);
        if (first) {
            KVL_TRY(kvl_alloc(want, n, sizeof **want));
            KVL_TRY(kvl_reference_attend(&b->plan, 0, b->n_tokens, b->q, b->k, b->v, (struct kvl_rope){0}, *want));
        }
        KVL_TRY(kvl_tune_poll());
        kvl_cache_reset(b->cache);
        KVL_TRY(kvl_probe_feed(b));
        const double difference = kvl_probe_difference(b->got, *want, n);
        if (!(difference <= allowed)) {
            status = kvl_fail(KVL_E_VERIFY, "attention %s differs from the reference by %.2e", attend_specs[i / PHASES], difference);
            break;
        }
    }
done:
    return status;
}

/* Part: spec, phase. The cache forgets the tokens again, so that each run is the same. */
static kvl_status attend_run(void *self, void *made, size_t part)
{
    kvl_status status = KVL_OK;
    const struct attend *a = self;
    struct kvl_probe *b = &((struct attend_made *)made)->deep[part / PHASES];
    const uint32_t n = phase_tokens[part % PHASES];
    KVL_TRY(kvl_cache_step(b->cache, 0, n, b->stage, b->rotary, 0, b->out));
    kvl_cache_advance(b->cache, n);
    KVL_TRY(kvl_cache_rewind(b->cache, a->depth));
done:
    return status;
}

/* Bytes of the cache, read once a query. */
static double attend_work(void *self, size_t part)
{
    const struct attend *a = self;
    const double bytes_of_value[SPECS] = {2.0, 0.5};
    return 1e-9 * 2.0 * a->depth * a->dims.n_kv_head * a->dims.head_dim * bytes_of_value[part / PHASES] * phase_tokens[part % PHASES];
}

/* ---- the table ---- */

const struct kvl_tune_problem kvl_tune_problems[] = {
    {"clblast", 1, many_open, product_close, clblast_make, own_make, product_drop, product_check, many_run, many_work},
    {"gemm", 1, many_open, product_close, product_make, product_make, product_drop, product_check, many_run, many_work},
    {"gemv", 2, few_open, product_close, product_make, product_make, product_drop, product_check, few_run, few_work},
    {"attend", SPECS * PHASES, attend_open, attend_close, attend_make, attend_make, attend_drop, attend_check, attend_run, attend_work},
};
const size_t kvl_n_tune_problems = sizeof kvl_tune_problems / sizeof *kvl_tune_problems;
