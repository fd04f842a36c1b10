/* Each codec is checked where it is used: a cache takes in one context, and then its pages, its decoded rows and the attention over
 * it are compared. Programs are few, because compiling them is most of the time. */
#include "selfcheck.h"
#include "probe.h"
#include "linear.h"
#include "mem.h"
#include "quant.h"
#include "reference.h"
#include "registry.h"
#include "rng.h"
#include "text.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct checker {
    struct kvl_device *device;
    kvl_check_fn fn;
    void *context;
    uint32_t n, n_failed;
    char first_failed[96];
};

static void report(struct checker *c, double difference, double allowed, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void report(struct checker *c, double difference, double allowed, const char *format, ...)
{
    struct kvl_check check = {.difference = difference, .allowed = allowed, .ok = difference <= allowed};
    va_list args;
    va_start(args, format);
    vsnprintf(check.name, sizeof check.name, format, args);
    va_end(args);
    c->n++;
    if (!check.ok && c->n_failed++ == 0) memcpy(c->first_failed, check.name, sizeof check.name);
    c->fn(c->context, &check);
}

/* ---- attention ---- */

/* Differences of the query heads that read the last `kv_heads` key-value heads. */
static kvl_status check_attention(struct checker *c, struct kvl_probe *b, const char *name, uint32_t kv_heads)
{
    const double allowed = 2e-5;
    const size_t compared = kvl_probe_q_row(b) / b->dims.n_kv_head * kv_heads, first = kvl_probe_q_row(b) - compared;
    double largest = 0.0;
    const kvl_status status = kvl_reference_attend(&b->plan, 0, b->n_tokens, b->q, b->k, b->v, (struct kvl_rope){0}, b->want);
    if (status != KVL_OK) return status;
    for (uint32_t t = 0; t < b->n_tokens; t++) {
        const size_t at = t * kvl_probe_q_row(b) + first;
        largest = kvl_probe_worse(kvl_probe_difference(b->got + at, b->want + at, compared), largest);
    }
    report(c, largest, allowed, "attention %s, %s", name, kvl_protocol_name[b->protocol]);
    return KVL_OK;
}

static kvl_status check_compositions(struct checker *c)
{
    static const struct {
        const char *spec;
        struct kvl_cache_dims dims;
        uint32_t n_tokens, ubatch;
        enum kvl_protocol protocol;
        bool exact;
    } rows[] = {
        {"k=int8 v=int4", {1, 9, 3, 64}, 130, 64, KVL_P2_WRITE_THEN_READ, true},
        {"k=int8 v=int4 sink=4 tail=20", {1, 9, 3, 64}, 150, 32, KVL_P1_FAKE_QUANT, true},
        {"k=int8 v=int4 sink=3 window=33 tail=8", {1, 9, 3, 64}, 130, 1, KVL_P4_STREAMING, true},
        {"f16 sink=4 window=40", {1, 8, 2, 128}, 150, 64, KVL_P1_FAKE_QUANT, false},
    };
    kvl_status status = KVL_OK;
    struct kvl_probe b = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        b = (struct kvl_probe){.dims = rows[i].dims,
                           .n_tokens = rows[i].n_tokens,
                           .ubatch = rows[i].ubatch,
                           .protocol = rows[i].protocol,
                           .exact = rows[i].exact};
        KVL_TRY(kvl_probe_open(c->device, rows[i].spec, NULL, NULL, &b));
        KVL_TRY(kvl_probe_feed(&b));
        KVL_TRY(check_attention(c, &b, rows[i].spec, b.dims.n_kv_head));
        kvl_probe_close(&b);
    }
done:
    kvl_probe_close(&b);
    return status;
}

/* ---- codecs ---- */

/* Two kv heads: the first begins with the known answers and rows that hurt, the second is random and attended. 12 query heads for
 * each make a decode step and a prefill tile the same program. CODEC_TOKENS leaves a page full also behind a tail of 128 tokens. */
enum { CODEC_HEADS = 24, CODEC_KV_HEADS = 2, CODEC_TOKENS = 256, CODEC_UBATCH = 64 };

static const uint32_t role_of[KVL_SIDES] = {KVL_ROLE_K, KVL_ROLE_V};
static const char side_letter[KVL_SIDES] = {'k', 'v'};

static float *side_rows(const struct kvl_probe *b, int side) { return side == KVL_SIDE_K ? b->k : b->v; }

static const float *row_of(const struct kvl_probe *b, int side, uint32_t token, uint32_t head)
{
    return side_rows(b, side) + token * kvl_probe_kv_row(b) + (size_t)head * b->dims.head_dim;
}

/* Known answers, which may be NULL, and hard rows behind them. */
static void place_rows(struct kvl_probe *b, int side, const struct kvl_known_answer *answer)
{
    /* zeros, constants, tiny, huge, one outlier, ties, subnormal */
    static const float hard[][2] = {{0, 0}, {1.5f, 1.5f}, {1e-7f, -1e-7f}, {60000.f, -60000.f}, {0, 1}, {-7.5f, 7.5f}, {1e-41f, 0}};
    const uint32_t d = b->dims.head_dim, n = answer != NULL ? answer->n : 0;
    float *row = side_rows(b, side);
    for (uint32_t t = 0; t < n; t++, row += kvl_probe_kv_row(b)) memcpy(row, answer->x + (size_t)t * d, d * sizeof *row);
    for (uint32_t t = 0; t < sizeof hard / sizeof *hard; t++, row += kvl_probe_kv_row(b))
        for (uint32_t i = 0; i < d; i++) row[i] = hard[t][i % 2];
}

static bool same_cache(const struct kvl_known_answer *a, const struct kvl_known_answer *b)
{
    return a->head_dim == b->head_dim && strcmp(a->options, b->options) == 0;
}

/* What of a side's first page and its rows differs from the reference. */
static kvl_status check_side(struct checker *c, const struct kvl_probe *b, int side, const char *name)
{
    const struct kvl_side_plan *plan = &b->plan.layer[0].side[side];
    const uint32_t page = plan->dims.page_tokens, d = b->dims.head_dim;
    uint8_t *got = NULL, *want = NULL;
    float *x = NULL, *decoded = NULL, *rows = NULL;
    double bytes = 0.0, difference = 0.0;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&got, plan->page_bytes, 1));
    KVL_TRY(kvl_alloc(&want, plan->page_bytes, 1));
    KVL_TRY(kvl_alloc(&x, (size_t)page * d, sizeof *x));
    KVL_TRY(kvl_alloc(&decoded, (size_t)page * d, sizeof *decoded));
    KVL_TRY(kvl_alloc(&rows, (size_t)CODEC_KV_HEADS * page * d, sizeof *rows));
    KVL_TRY(kvl_cache_read_rows(b->cache, 0, side, 0, page, rows));
    for (uint32_t h = 0; h < CODEC_KV_HEADS; h++) {
        for (uint32_t t = 0; t < page; t++) memcpy(x + (size_t)t * d, row_of(b, side, t, h), d * sizeof *x);
        memset(want, 0, plan->page_bytes);
        if (plan->codec->ref_encode(plan->priv, &plan->dims, kvl_side_table(plan, h), 0, page, x, want) != 0 ||
            plan->codec->ref_decode(plan->priv, &plan->dims, kvl_side_table(plan, h), 0, page, want, decoded) != 0) {
            status = kvl_fail(KVL_E_VERIFY, "codec %s: its reference failed", name);
            goto done;
        }
        KVL_TRY(kvl_cache_read_page(b->cache, 0, side, h, 0, got));
        for (uint64_t i = 0; i < plan->page_bytes; i++) bytes += got[i] != want[i];
        difference = kvl_probe_worse(kvl_probe_difference(rows + (size_t)h * page * d, decoded, (size_t)page * d), difference);
    }
    report(c, bytes, 0.0, "codec %c=%s: bytes of a page that differ", side_letter[side], name);
    report(c, difference, 0.0, "codec %c=%s: decoded rows", side_letter[side], name);
done:
    kvl_free(&got);
    kvl_free(&want);
    kvl_free(&x);
    kvl_free(&decoded);
    kvl_free(&rows);
    return status;
}

static kvl_status check_answer(struct checker *c, const struct kvl_probe *b, int side, const struct kvl_known_answer *a,
                               const char *name)
{
    const size_t size = (size_t)a->n * a->head_dim;
    float *rows = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&rows, CODEC_KV_HEADS * size, sizeof *rows));
    KVL_TRY(kvl_cache_read_rows(b->cache, 0, side, 0, a->n, rows));
    report(c, kvl_probe_difference(rows, a->decoded, size), a->tolerance, "codec %c=%s: known answer", side_letter[side], name);
done:
    kvl_free(&rows);
    return status;
}

/* The tables of known answers, for every head. */
struct known_table {
    const struct kvl_codec *codec;
    const struct kvl_known_answer *const *of_side; /* [KVL_SIDES] */
};

static kvl_status load_known_table(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out)
{
    const struct known_table *known = context;
    kvl_status status = KVL_OK;
    *out = (struct kvl_table){.n_layer = 1, .n_stream = CODEC_KV_HEADS};
    for (int s = 0; s < KVL_SIDES; s++) {
        const struct kvl_known_answer *answer = known->of_side[s];
        struct kvl_codec_shape shape;
        if (answer == NULL || !KVL_CODEC_HAS(known->codec, known_tables)) continue;
        KVL_TRY(kvl_codec_shape(&entry->codec[s], role_of[s], answer->head_dim, 0, &shape));
        out->n[s] = shape.table_floats;
        KVL_TRY(kvl_alloc(&out->values[s], CODEC_KV_HEADS, out->n[s] * sizeof(float)));
        for (size_t h = 0; h < CODEC_KV_HEADS; h++)
            memcpy(out->values[s] + h * out->n[s], known->codec->known_tables[answer - known->codec->known_answers], out->n[s] * sizeof(float));
    }
done:
    return status;
}

/* All answers of a codec that share options and head_dim with its answer `first`. */
static kvl_status check_answers(struct checker *c, const struct kvl_codec *codec, uint32_t first)
{
    const struct kvl_known_answer *answers = codec->known_answers, *of_side[KVL_SIDES] = {NULL};
    struct kvl_probe b = {.dims = {1, CODEC_HEADS, CODEC_KV_HEADS, answers[first].head_dim},
                      .n_tokens = CODEC_TOKENS,
                      .ubatch = CODEC_UBATCH,
                      .protocol = KVL_P2_WRITE_THEN_READ,
                      .exact = true};
    struct kvl_text name = {0}, spec = {0};
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_text_printf(&name, *answers[first].options ? "%s(%s)" : "%s", codec->head.name, answers[first].options));
    for (uint32_t i = first; i < codec->n_known_answers; i++)
        for (int s = 0; s < KVL_SIDES; s++)
            if (answers[i].role == role_of[s] && same_cache(&answers[i], &answers[first])) of_side[s] = &answers[i];
    for (int s = 0; s < KVL_SIDES; s++) /* a side without an answer may not be able to have these options */
        KVL_TRY(kvl_text_printf(&spec, "%s%c=%s", s ? " " : "", side_letter[s], of_side[s] != NULL ? name.data : "f32"));
    if (KVL_CODEC_HAS(codec, known_tables)) KVL_TRY(kvl_text_printf(&spec, " table=known"));
    KVL_TRY(kvl_probe_open(c->device, spec.data, load_known_table, &(struct known_table){codec, of_side}, &b));
    for (int s = 0; s < KVL_SIDES; s++) place_rows(&b, s, of_side[s]);
    KVL_TRY(kvl_probe_feed(&b));
    for (int s = 0; s < KVL_SIDES; s++) {
        if (of_side[s] == NULL) continue;
        KVL_TRY(check_side(c, &b, s, name.data));
        KVL_TRY(check_answer(c, &b, s, of_side[s], name.data));
    }
    KVL_TRY(check_attention(c, &b, spec.data, 1));
done:
    kvl_probe_close(&b);
    kvl_text_free(&name);
    kvl_text_free(&spec);
    return status;
}

static kvl_status check_codec(struct checker *c, const struct kvl_codec *codec)
{
    kvl_status status = KVL_OK;
    for (uint32_t a = 0; a < codec->n_known_answers; a++) {
        uint32_t same = 0;
        while (!same_cache(&codec->known_answers[same], &codec->known_answers[a])) same++;
        if (same == a) KVL_TRY(check_answers(c, codec, a));
    }
done:
    return status;
}

static kvl_status check_codecs(struct checker *c)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        const struct kvl_plugin_head *head = kvl_registry_at(i);
        if (head->kind == KVL_KIND_CODEC) KVL_TRY(check_codec(c, (const struct kvl_codec *)head));
    }
done:
    return status;
}

static kvl_status check_named(struct checker *c, size_t n, char *const *names)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < n; i++) {
        const struct kvl_plugin_head *head = kvl_registry_find(KVL_KIND_CODEC, names[i]);
        if (head == NULL) return kvl_fail(KVL_E_USAGE, "there is no codec '%s': kvlab plugins lists them", names[i]);
        KVL_TRY(check_codec(c, (const struct kvl_codec *)head));
    }
done:
    return status;
}

/* ---- rotation ---- */

/* Pairs (2i, 2i + 1) of the first rope_dim channels of `heads` heads. */
static void rotate_rows(float *x, uint32_t heads, uint32_t head_dim, uint32_t rope_dim, const float *rotary)
{
    for (uint32_t h = 0; h < heads; h++, x += head_dim)
        for (uint32_t i = 0; i < rope_dim; i += 2) {
            const double a = x[i], b = x[i + 1], cosine = rotary[i], sine = rotary[i + 1];
            x[i] = (float)(a * cosine - b * sine);
            x[i + 1] = (float)(a * sine + b * cosine);
        }
}

/* q and k of one ubatch, rotated in their stage; v and the channels beyond rope_dim stay. */
static kvl_status check_rope(struct checker *c)
{
    enum { TOKENS = 16, ROPE_DIM = 12 };
    struct kvl_probe b = {.dims = {1, CODEC_HEADS, CODEC_KV_HEADS, 16},
                      .n_tokens = TOKENS,
                      .ubatch = TOKENS,
                      .protocol = KVL_P2_WRITE_THEN_READ,
                      .exact = true};
    float rotary[TOKENS][ROPE_DIM], *want = NULL, *got = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_probe_open(c->device, "f32", NULL, NULL, &b));
    const size_t size = TOKENS * kvl_probe_stage_row(&b);
    KVL_TRY(kvl_alloc(&want, size, sizeof *want));
    KVL_TRY(kvl_alloc(&got, size, sizeof *got));
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < ROPE_DIM; i += 2) {
            const double angle = t * pow(10000.0, -(double)i / ROPE_DIM);
            rotary[t][i] = (float)cos(angle);
            rotary[t][i + 1] = (float)sin(angle);
        }
    KVL_TRY(kvl_buffer_write(b.rotary, 0, sizeof rotary, rotary));
    KVL_TRY(kvl_probe_stage(&b, 0, TOKENS));
    KVL_TRY(kvl_buffer_read(b.stage, 0, size * sizeof *want, want));
    for (uint32_t t = 0; t < TOKENS; t++)
        rotate_rows(want + t * kvl_probe_stage_row(&b), CODEC_HEADS + CODEC_KV_HEADS, 16, ROPE_DIM, rotary[t]);
    KVL_TRY(kvl_cache_step(b.cache, 0, TOKENS, b.stage, b.rotary, ROPE_DIM, b.out));
    KVL_TRY(kvl_buffer_read(b.stage, 0, size * sizeof *got, got));
    report(c, kvl_probe_difference(got, want, size), 2e-6, "rope");
done:
    kvl_probe_close(&b);
    kvl_free(&want);
    kvl_free(&got);
    return status;
}

/* ---- weights ---- */

enum { ROWS = 40, COLS = 256, MOST_TOKENS = 7 };

/* Largest difference of products, as a part of the sum of their terms' sizes. */
static double product_difference(const float *w, const float *x, const float *y, uint32_t tokens)
{
    double largest = 0.0;
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t r = 0; r < ROWS; r++) {
            double sum = 0.0, size = 0.0;
            for (uint32_t i = 0; i < COLS; i++) {
                const double term = (double)w[r * COLS + i] * x[t * COLS + i];
                sum += term;
                size += fabs(term);
            }
            largest = kvl_probe_worse(fabs(y[t * ROWS + r] - sum) / size, largest);
        }
    return largest;
}

struct product_bench {
    struct kvl_linear_kernels *kernels;
    struct kvl_buffer *x_buffer, *y_buffer;
    float x[MOST_TOKENS * COLS], y[MOST_TOKENS * ROWS], w[ROWS * COLS];
};

static kvl_status check_products(struct checker *c, struct product_bench *b, const struct kvl_linear *linear)
{
    static const struct {
        uint32_t tokens;
        bool exact;
        const char *name;
    } variants[] = {{1, true, "1 token"}, {1, false, "1 token, activations of 8 bits"}, {MOST_TOKENS, true, "7 tokens"}};
    const double allowed = (COLS + 2) * 0x1p-24; /* rounded sums of COLS terms */
    const struct kvl_rows x = {b->x_buffer, 0, COLS}, y = {b->y_buffer, 0, ROWS};
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        const uint32_t tokens = variants[i].tokens;
        if (!variants[i].exact && linear->type->block == 1) continue; /* the same kernel */
        KVL_TRY(kvl_linear_run(b->kernels, linear, tokens, x, y, false, variants[i].exact));
        KVL_TRY(kvl_buffer_read(b->y_buffer, 0, (uint64_t)tokens * ROWS * sizeof(float), b->y));
        report(c, product_difference(b->w, b->x, b->y, tokens), allowed, "weights %s, %s", linear->type->name, variants[i].name);
    }
done:
    return status;
}

static kvl_status check_type(struct checker *c, struct product_bench *b, const struct kvl_quant_type *type)
{
    const size_t n_blocks = (size_t)ROWS * COLS / type->block;
    struct kvl_gguf_tensor tensor = {
        .name = {"check", 5}, .type = type->gguf_type, .n_dims = 2, .dim = {COLS, ROWS, 1, 1}, .n_bytes = n_blocks * type->bytes};
    const struct kvl_gguf_tensor *const tensors[] = {&tensor};
    struct kvl_linear linear = {0};
    uint8_t *bytes = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&bytes, tensor.n_bytes, 1));
    kvl_probe_weights(type, type->gguf_type, n_blocks, bytes, b->w);
    tensor.data = bytes;
    KVL_TRY(kvl_linear_load(c->device, "check weights", -1, tensors, 1, (struct kvl_linear_form){0}, &linear));
    KVL_TRY(check_products(c, b, &linear));
done:
    kvl_linear_free(&linear);
    kvl_free(&bytes);
    return status;
}

static kvl_status check_norm(struct checker *c, struct product_bench *b)
{
    const float eps = 1e-5f;
    const struct kvl_rows x = {b->x_buffer, 0, COLS};
    struct kvl_buffer *weight = NULL;
    float *y = NULL;
    double largest = 0.0;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&y, sizeof b->x / sizeof *b->x, sizeof *y));
    for (uint32_t i = 0; i < COLS; i++) b->w[i] = (float)kvl_rng_normal(5, i);
    KVL_TRY(kvl_buffer_new(c->device, "check norm", -1, KVL_MEM_SCRATCH, COLS * sizeof(float), false, &weight));
    KVL_TRY(kvl_buffer_write(weight, 0, COLS * sizeof(float), b->w));
    KVL_TRY(kvl_rms_norm_run(b->kernels, MOST_TOKENS, COLS, eps, weight, x, x));
    KVL_TRY(kvl_buffer_read(b->x_buffer, 0, sizeof b->x, y));
    for (uint32_t t = 0; t < MOST_TOKENS; t++) {
        const float *in = b->x + t * COLS;
        double squares = 0.0;
        for (uint32_t i = 0; i < COLS; i++) squares += (double)in[i] * in[i];
        for (uint32_t i = 0; i < COLS; i++)
            largest = kvl_probe_worse(fabs(y[t * COLS + i] - in[i] / sqrt(squares / COLS + eps) * b->w[i]), largest);
    }
    report(c, largest, 1e-5, "rms norm");
done:
    kvl_buffer_free(&weight);
    kvl_free(&y);
    return status;
}

/* Activations are whole numbers up to 127, and 127 occurs in every block of 32: rounding them to 8 bits changes nothing. */
static kvl_status check_weights(struct checker *c)
{
    struct product_bench *b = NULL;
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_alloc(&b, 1, sizeof *b));
    for (uint32_t i = 0; i < MOST_TOKENS * COLS; i++) b->x[i] = i % 32 == 0 ? 127.0f : (float)(kvl_rng_u64(4, i) % 255) - 127.0f;
    KVL_TRY(kvl_linear_kernels_new(c->device, &b->kernels));
    KVL_TRY(kvl_buffer_new(c->device, "check rows", -1, KVL_MEM_SCRATCH, sizeof b->x, false, &b->x_buffer));
    KVL_TRY(kvl_buffer_new(c->device, "check products", -1, KVL_MEM_SCRATCH, sizeof b->y, true, &b->y_buffer));
    KVL_TRY(kvl_buffer_write(b->x_buffer, 0, sizeof b->x, b->x));
    for (size_t i = 0; i < kvl_n_quant_types; i++) KVL_TRY(check_type(c, b, &kvl_quant_types[i]));
    KVL_TRY(check_norm(c, b));
done:
    if (b != NULL) {
        kvl_buffer_free(&b->x_buffer);
        kvl_buffer_free(&b->y_buffer);
        kvl_linear_kernels_free(&b->kernels);
    }
    kvl_free(&b);
    return status;
}

static kvl_status check_all(struct checker *c)
{
    kvl_status status = KVL_OK;
    KVL_TRY(check_codecs(c));
    KVL_TRY(check_compositions(c));
    KVL_TRY(check_rope(c));
    KVL_TRY(check_weights(c));
done:
    return status;
}

kvl_status kvl_selfcheck(struct kvl_device *device, size_t n_codecs, char *const *codecs, kvl_check_fn fn, void *context)
{
    struct checker c = {.device = device, .fn = fn, .context = context};
    kvl_status status = KVL_OK;
    KVL_TRY(n_codecs == 0 ? check_all(&c) : check_named(&c, n_codecs, codecs));
    if (c.n_failed > 0) status = kvl_fail(KVL_E_VERIFY, "%u of %u checks failed, the first: %s", c.n_failed, c.n, c.first_failed);
done:
    return status;
}
