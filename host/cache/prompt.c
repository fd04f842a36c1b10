#include "prompt.h"
#include "compose.h"
#include "evidence.h"
#include "mem.h"
#include "rng.h"
#include <string.h>

struct witness {
    uint32_t kind;         /* KVL_NEED_* */
    bool measure;
    struct kvl_witness is; /* q and k: those below */
    float *q, *k;          /* NULL where nothing asks for them */
};

/* Evidence of one layer, on the host. */
struct evidence {
    struct kvl_score_needs needs;
    float *q_pre, *k_pre; /* [Hq][T][D], [H][T][D] before RoPE */
    float *q;             /* [Hq][n_query][D] the newest that scores and codecs ask for */
    float *score_q;       /* [Hq][needs.queries][D], if scores ask for less of them */
    float *k, *v;         /* [H][T][D] */
    float *mean, *covariance, *column_sum, *normal;
    uint32_t n_query;
    struct witness *witness;
    struct kvl_witness *wanted; /* those that the scores get */
    uint32_t n_witness, n_wanted;
};

struct kvl_prompt {
    struct kvl_device *device;
    struct kvl_cache *cache, *rows; /* rows: one layer, full precision */
    struct kvl_spec *rows_spec;
    struct kvl_prompt_model model;
    struct kvl_buffer *kept;        /* offsets [H + 1], tokens [H * T] */
    struct kvl_kernel *gather;
    uint32_t n_token, layer;
    struct evidence evidence;
    const struct kvl_prompt_observer *observer; /* NULL: nobody looks */
    float *piece;                   /* [ubatch][q_stride] a stage read back */
};

static const struct kvl_cache_dims *dims_of(const struct kvl_prompt *p) { return &kvl_cache_plan(p->cache)->dims; }

static const struct kvl_layer_spec *spec_of(const struct kvl_prompt *p, uint32_t l)
{
    return kvl_spec_layer(kvl_cache_plan(p->cache)->config.spec, l);
}

static const struct kvl_layer_plan *layer_of(const struct kvl_prompt *p, uint32_t l) { return &kvl_cache_plan(p->cache)->layer[l]; }

static uint32_t stride_of(const struct kvl_prompt *p)
{
    return kvl_stage_row(dims_of(p));
}

static kvl_status new_rows(struct kvl_prompt *p, uint32_t n_row)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = kvl_cache_plan(p->cache);
    struct kvl_cache_plan rows = {0};
    struct kvl_cache_dims dims = plan->dims;
    dims.n_layer = 1;
    dims.window = 0; /* all rows stay: kvl_cache_narrow says what queries see of them */
    KVL_TRY(kvl_spec_parse(plan->config.exact ? "f32" : "f16", &p->rows_spec));
    const struct kvl_cache_config config = {.spec = p->rows_spec, .n_ctx = n_row, .ubatch = kvl_cache_ubatch(&plan->config),
                                            .protocol = KVL_P2_WRITE_THEN_READ, .exact = plan->config.exact, .reads_stage = true}; /* evidence */
    KVL_TRY(kvl_cache_plan_make(&dims, &config, &plan->limits, &rows));
    KVL_TRY(kvl_cache_new(p->device, &rows, &p->rows));
done:
    kvl_cache_plan_free(&rows);
    return status;
}

kvl_status kvl_prompt_new(struct kvl_device *device, struct kvl_cache *cache, uint32_t n_token, uint32_t n_witness, const struct kvl_prompt_model *model,
                          struct kvl_prompt **out)
{
    kvl_status status = KVL_OK;
    struct kvl_prompt *p = NULL;
    struct kvl_program *program = NULL;
    KVL_TRY(kvl_alloc(&p, 1, sizeof *p));
    p->device = device;
    p->cache = cache;
    p->n_token = n_token;
    p->model = *model;
    const uint32_t heads = dims_of(p)->n_kv_head;
    KVL_TRY(new_rows(p, n_token + n_witness));
    KVL_TRY(kvl_buffer_new(device, "kept tokens", -1, KVL_MEM_SCRATCH, (heads + 1 + (uint64_t)heads * n_token) * sizeof(uint32_t), false, &p->kept));
    KVL_TRY(kvl_alloc(&p->piece, (size_t)kvl_cache_ubatch(&kvl_cache_plan(cache)->config) * stride_of(p), sizeof *p->piece));
    KVL_TRY(kvl_compose_program(device, kvl_cache_plan(p->rows), kvl_cache_plan(p->rows)->layer, "gather.cl", 1, &program));
    KVL_TRY(kvl_kernel_get(program, "kvl_gather", &p->gather));
    *out = p;
    p = NULL;
done:
    kvl_prompt_free(&p);
    return status;
}

static void free_evidence(struct evidence *e)
{
    float **all[] = {&e->q_pre, &e->k_pre, &e->q, &e->score_q, &e->k, &e->v, &e->mean, &e->covariance, &e->column_sum, &e->normal};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) kvl_free(all[i]);
    for (uint32_t i = 0; i < e->n_witness; i++) {
        kvl_free(&e->witness[i].q);
        kvl_free(&e->witness[i].k);
    }
    kvl_free(&e->witness);
    kvl_free(&e->wanted);
    *e = (struct evidence){0};
}

void kvl_prompt_free(struct kvl_prompt **prompt)
{
    struct kvl_prompt *p = *prompt;
    if (p == NULL) return;
    free_evidence(&p->evidence);
    kvl_cache_free(&p->rows);
    kvl_spec_free(&p->rows_spec);
    kvl_buffer_free(&p->kept);
    kvl_free(&p->piece);
    kvl_free(prompt);
}

void kvl_prompt_observe(struct kvl_prompt *p, const struct kvl_prompt_observer *observer) { p->observer = observer; }

/* NULL: the side's codec does not learn its table from the prompt. */
static const struct kvl_side_plan *learner(const struct kvl_prompt *p, int side)
{
    const struct kvl_side_plan *plan = &layer_of(p, p->layer)->side[side];
    return side < kvl_sides(dims_of(p)) && plan->table == NULL && KVL_CODEC_HAS(plan->codec, learn) ? plan : NULL;
}

/* A layer that slides by itself has no scores. */
static struct kvl_score_needs needs_of(const struct kvl_prompt *p, uint32_t l)
{
    struct kvl_score_needs needs = {.struct_size = sizeof needs};
    if (!layer_of(p, l)->slides) kvl_keep_needs(spec_of(p, l), &needs);
    return needs;
}

bool kvl_prompt_needs_output(const struct kvl_prompt *p, uint32_t l) { return needs_of(p, l).what & KVL_NEED_OUTPUT; }

/* ---- evidence ---- */

static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

static uint32_t learned_queries(const struct kvl_prompt *p, int side)
{
    const uint32_t asked = learner(p, side)->shape.learn_queries;
    return asked < p->n_token ? asked : p->n_token;
}

static bool wants(const struct evidence *e, uint32_t what) { return e->needs.what & what; }

kvl_status kvl_prompt_layer(struct kvl_prompt *p, uint32_t l)
{
    kvl_status status = KVL_OK;
    const size_t d = dims_of(p)->head_dim, q_heads = dims_of(p)->n_head, kv_heads = dims_of(p)->n_kv_head, n = p->n_token;
    struct evidence *e = &p->evidence;
    free_evidence(e);
    kvl_cache_reset(p->rows);
    kvl_cache_narrow(p->rows, 0, kvl_own_window(dims_of(p), l));
    p->layer = l;
    e->needs = needs_of(p, l);
    if (layer_of(p, l)->running.source == KVL_RUN_SUM) e->needs.what |= KVL_NEED_COLUMN_SUMS;
    if (p->observer != NULL) e->needs.what |= KVL_NEED_QUERIES;
    if (p->observer != NULL || wants(e, KVL_NEED_COLUMN_SUMS)) e->needs.queries = UINT32_MAX; /* the sums are made from all queries and keys */
    if (e->needs.queries > n) e->needs.queries = (uint32_t)n;
    e->n_query = e->needs.queries;
    for (int s = 0; s < KVL_SIDES; s++) {
        if (learner(p, s) == NULL) continue;
        e->needs.what |= s == KVL_SIDE_K ? KVL_NEED_QUERIES : KVL_NEED_QUERIES | KVL_NEED_V;
        e->n_query = max_u32(e->n_query, learned_queries(p, s));
    }
    KVL_TRY(kvl_alloc(&e->q, q_heads * e->n_query * d, sizeof(float)));
    if (wants(e, KVL_NEED_QUERY_STATS)) KVL_TRY(kvl_alloc(&e->q_pre, q_heads * n * d, sizeof(float)));
    if (wants(e, KVL_NEED_K)) KVL_TRY(kvl_alloc(&e->k_pre, kv_heads * n * d, sizeof(float)));
done:
    return status;
}

static kvl_status read_piece(struct kvl_prompt *p, uint32_t n, struct kvl_buffer *stage)
{
    return kvl_buffer_read(stage, 0, (uint64_t)n * stride_of(p) * sizeof(float), p->piece);
}

/* Copies the rows that n tokens of the piece have of `heads` heads, the first of which begins at float `at`, into to [heads][n_rows][D],
 * where the piece's token `from` is row `row`. */
static void copy_heads(const struct kvl_prompt *p, uint32_t heads, size_t at, uint32_t from, uint32_t n, float *to, uint32_t n_rows, uint32_t row)
{
    const size_t d = dims_of(p)->head_dim;
    for (uint32_t t = from; t < n; t++)
        for (uint32_t h = 0; h < heads; h++)
            memcpy(to + ((size_t)h * n_rows + row + t - from) * d, p->piece + t * (size_t)stride_of(p) + at + h * d, d * sizeof *to);
}

/* Tokens of the witness that was begun last. */
static kvl_status witness_step(struct kvl_prompt *p, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, struct kvl_buffer *out)
{
    kvl_status status = KVL_OK;
    const struct witness *w = &p->evidence.witness[p->evidence.n_witness - 1];
    KVL_TRY(kvl_cache_step(p->rows, 0, n, stage, rotary, p->model.rope_dim, out));
    if (w->q != NULL) {
        KVL_TRY(read_piece(p, n, stage));
        copy_heads(p, dims_of(p)->n_head, 0, 0, n, w->q, w->is.n, kvl_cache_position(p->rows) - p->n_token);
    }
    kvl_cache_advance(p->rows, n);
done:
    return status;
}

/* Of the prompt's n tokens from `first` on: queries that the cache wants to have when tokens are decoded. */
static kvl_status remember(struct kvl_prompt *p, uint32_t first, uint32_t n, struct kvl_buffer *stage)
{
    const uint32_t recent = layer_of(p, p->layer)->recent, oldest = p->n_token > recent ? p->n_token - recent : 0, row = oldest > first ? oldest - first : 0;
    return row < n ? kvl_cache_remember(p->cache, p->layer, first + row, stage, row, n - row) : KVL_OK;
}

kvl_status kvl_prompt_step(struct kvl_prompt *p, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, struct kvl_buffer *out)
{
    kvl_status status = KVL_OK;
    struct evidence *e = &p->evidence;
    if (e->n_witness != 0) return witness_step(p, n, stage, rotary, out);
    const uint32_t first = kvl_cache_position(p->rows), q_heads = dims_of(p)->n_head, kv_heads = dims_of(p)->n_kv_head, d = dims_of(p)->head_dim;
    const uint32_t first_query = p->n_token - e->n_query, from = first_query > first ? first_query - first : 0;
    if (e->q_pre != NULL || e->k_pre != NULL) {
        KVL_TRY(read_piece(p, n, stage));
        if (e->q_pre != NULL) copy_heads(p, q_heads, 0, 0, n, e->q_pre, p->n_token, first);
        if (e->k_pre != NULL) copy_heads(p, kv_heads, (size_t)q_heads * d, 0, n, e->k_pre, p->n_token, first);
    }
    KVL_TRY(remember(p, first, n, stage));
    KVL_TRY(kvl_cache_step(p->rows, 0, n, stage, rotary, p->model.rope_dim, out));
    if (from < n) {
        KVL_TRY(read_piece(p, n, stage));
        copy_heads(p, q_heads, 0, from, n, e->q, e->n_query, first + from - first_query);
    }
    kvl_cache_advance(p->rows, n);
done:
    return status;
}

kvl_status kvl_prompt_witness(struct kvl_prompt *p, uint32_t kind, uint32_t n, uint32_t first, uint32_t end, bool measure)
{
    kvl_status status = KVL_OK;
    struct evidence *e = &p->evidence;
    KVL_TRY(kvl_realloc(&e->witness, e->n_witness + 1u, sizeof *e->witness));
    struct witness *w = &e->witness[e->n_witness++];
    *w = (struct witness){.kind = kind, .measure = measure, .is = {.n = n, .first = first, .end = end}};
    if (measure || wants(e, kind)) KVL_TRY(kvl_alloc(&w->q, (size_t)dims_of(p)->n_head * n * dims_of(p)->head_dim, sizeof *w->q));
done:
    return status;
}

kvl_status kvl_prompt_witness_end(struct kvl_prompt *p)
{
    kvl_status status = KVL_OK;
    struct evidence *e = &p->evidence;
    struct witness *w = &e->witness[e->n_witness - 1];
    if (wants(e, w->kind)) {
        KVL_TRY(kvl_alloc(&w->k, (size_t)dims_of(p)->n_kv_head * w->is.n * dims_of(p)->head_dim, sizeof *w->k));
        KVL_TRY(kvl_cache_read_rows(p->rows, 0, KVL_SIDE_K, p->n_token, w->is.n, w->k));
    }
    w->is.q = w->q;
    w->is.k = w->k;
    if (!w->measure) KVL_TRY(kvl_cache_rewind(p->rows, p->n_token));
done:
    return status;
}

/* The witnesses that scores get, one after the other. */
static kvl_status gather_witnesses(struct evidence *e, struct kvl_score_input *in)
{
    const kvl_status status = kvl_alloc(&e->wanted, e->n_witness, sizeof *e->wanted);
    if (status != KVL_OK) return status;
    for (uint32_t i = 0; i < e->n_witness; i++)
        if (wants(e, e->witness[i].kind)) e->wanted[e->n_wanted++] = e->witness[i].is;
    in->witness = e->wanted;
    in->n_witness = e->n_wanted;
    return KVL_OK;
}

/* What the tokens of a measured witness lose; the rows still end with it. */
static kvl_status measure_loss(struct kvl_prompt *p, const struct witness *w, struct kvl_selection *selection)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_dims *dims = dims_of(p);
    const uint32_t n_all = p->n_token + w->is.n;
    const size_t size = (size_t)dims->n_kv_head * n_all * dims->head_dim;
    float *k = NULL, *v = NULL;
    if (kvl_sides(dims) != KVL_SIDES) return kvl_fail(KVL_E_UNSUPPORTED, "the loss of an eviction is measured on keys and values, and here one row is both");
    KVL_TRY(kvl_alloc(&k, size, sizeof *k));
    KVL_TRY(kvl_alloc(&v, size, sizeof *v));
    KVL_TRY(kvl_alloc(&selection->mass_lost, dims->n_kv_head, sizeof *selection->mass_lost));
    KVL_TRY(kvl_alloc(&selection->output_error, dims->n_kv_head, sizeof *selection->output_error));
    KVL_TRY(kvl_cache_read_rows(p->rows, 0, KVL_SIDE_K, 0, n_all, k));
    KVL_TRY(kvl_cache_read_rows(p->rows, 0, KVL_SIDE_V, 0, n_all, v));
    KVL_TRY(kvl_eviction_loss(selection, dims->n_head, dims->head_dim, w->is.n, w->q, k, v, selection->mass_lost, selection->output_error));
done:
    kvl_free(&k);
    kvl_free(&v);
    return status;
}

/* The newest n queries of the layer's heads first .. first + heads - 1, [heads][n][D]. */
static void newest_queries(const struct kvl_prompt *p, uint32_t first, uint32_t heads, uint32_t n, float *out)
{
    const size_t d = dims_of(p)->head_dim, have = p->evidence.n_query;
    for (uint32_t h = 0; h < heads; h++) memcpy(out + h * n * d, p->evidence.q + ((first + h) * have + have - n) * d, n * d * sizeof *out);
}

/* The rest of the evidence: from the rows, and from what was collected. */
static kvl_status complete(struct kvl_prompt *p, const float *w_o, struct kvl_score_input *in)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_dims *dims = dims_of(p);
    const size_t d = dims->head_dim, n = p->n_token, rows = dims->n_kv_head * n * d;
    struct evidence *e = &p->evidence;
    if (wants(e, KVL_NEED_K | KVL_NEED_QUERIES | KVL_NEED_COLUMN_SUMS)) {
        KVL_TRY(kvl_alloc(&e->k, rows, sizeof(float)));
        KVL_TRY(kvl_cache_read_rows(p->rows, 0, KVL_SIDE_K, 0, (uint32_t)n, e->k));
    }
    if (wants(e, KVL_NEED_V)) {
        KVL_TRY(kvl_alloc(&e->v, rows, sizeof(float)));
        KVL_TRY(kvl_cache_read_rows(p->rows, 0, KVL_SIDE_V, 0, (uint32_t)n, e->v));
    }
    if (wants(e, KVL_NEED_QUERY_STATS)) {
        KVL_TRY(kvl_alloc(&e->mean, dims->n_head * d, sizeof(float)));
        KVL_TRY(kvl_alloc(&e->covariance, dims->n_head * d * d, sizeof(float)));
        KVL_TRY(kvl_query_stats(e->q_pre, dims->n_head, (uint32_t)n, (uint32_t)d, e->needs.first_query, e->mean, e->covariance));
    }
    if (wants(e, KVL_NEED_NORMALS)) {
        const uint64_t count = dims->n_kv_head * d * e->needs.normals;
        KVL_TRY(kvl_alloc(&e->normal, count, sizeof(float)));
        for (uint64_t i = 0; i < count; i++) e->normal[i] = (float)kvl_rng_normal(p->layer, i);
    }
    if (e->needs.queries < e->n_query) {
        KVL_TRY(kvl_alloc(&e->score_q, dims->n_head * e->needs.queries * d, sizeof(float)));
        newest_queries(p, 0, dims->n_head, e->needs.queries, e->score_q);
    }
    *in = (struct kvl_score_input){
        .struct_size = sizeof *in, .layer = layer_of(p, p->layer)->rank, .n_layer = kvl_cache_plan(p->cache)->n_budgeted, .n_token = (uint32_t)n, .n_head = dims->n_head,
        .n_kv_head = dims->n_kv_head, .head_dim = (uint32_t)d, .n_embd = p->model.n_embd, .rope_dim = p->model.rope_dim, .n_query = e->needs.queries,
        .k = e->k, .k_pre = e->k_pre, .v = e->v, .q = e->score_q != NULL ? e->score_q : e->q, .q_mean = e->mean, .q_cov = e->covariance, .w_o = w_o, .normal = e->normal,
        .rope_freq = p->model.rope_freq};
    KVL_TRY(gather_witnesses(e, in));
    if (wants(e, KVL_NEED_COLUMN_SUMS)) {
        KVL_TRY(kvl_alloc(&e->column_sum, dims->n_head * n, sizeof(float)));
        KVL_TRY(kvl_attention_columns(in, e->column_sum));
        in->column_sum = e->column_sum;
    }
done:
    return status;
}

/* ---- what codecs learn ---- */

/* n rows of keys in the order of the record's channels. */
static void order_keys(const struct kvl_prompt *p, float *row, size_t n, float *room)
{
    const enum kvl_key_order order = spec_of(p, p->layer)->korder;
    const uint32_t d = dims_of(p)->head_dim;
    for (size_t i = 0; order != KVL_KORDER_GGUF && i < n; i++, row += d) {
        memcpy(room, row, d * sizeof *row);
        for (uint32_t c = 0; c < d; c++) row[c] = room[kvl_key_channel(order, p->model.rope_dim, c)];
    }
}

/* The table of each head's stream of a side, from the rows that the head keeps and from the newest queries. */
static kvl_status learn_side(const struct kvl_prompt *p, int s, const struct kvl_selection *kept)
{
    kvl_status status = KVL_OK;
    const struct kvl_side_plan *side = learner(p, s);
    const struct kvl_cache_dims *dims = dims_of(p);
    const uint32_t group = dims->n_head / dims->n_kv_head, n_query = learned_queries(p, s);
    const size_t d = dims->head_dim;
    const float *rows = s == KVL_SIDE_K ? p->evidence.k : p->evidence.v;
    float *table = NULL, *x = NULL, *q = NULL, *room = NULL;
    KVL_TRY(kvl_alloc(&table, (size_t)dims->n_kv_head * side->shape.table_floats, sizeof *table));
    KVL_TRY(kvl_alloc(&x, p->n_token * d, sizeof *x));
    KVL_TRY(kvl_alloc(&q, group * n_query * d, sizeof *q));
    KVL_TRY(kvl_alloc(&room, d, sizeof *room));
    for (uint32_t h = 0; h < dims->n_kv_head; h++) {
        const uint32_t *token = kept->token + kept->offset[h], n = kept->offset[h + 1] - kept->offset[h];
        for (uint32_t i = 0; i < n; i++) memcpy(x + i * d, rows + ((size_t)h * p->n_token + token[i]) * d, d * sizeof *x);
        newest_queries(p, h * group, group, n_query, q);
        if (s == KVL_SIDE_K) {
            order_keys(p, x, n, room);
            order_keys(p, q, (size_t)group * n_query, room);
        }
        const struct kvl_prompt_rows in = {sizeof in, n, group, n_query, x, q};
        if (side->codec->learn(side->priv, &side->dims, &in, table + (size_t)h * side->shape.table_floats) != 0) {
            status = kvl_fail(KVL_E_VERIFY, "codec %s: cannot learn from the prompt", side->codec->head.name);
            goto done;
        }
    }
    KVL_TRY(kvl_cache_fill_table(p->cache, p->layer, s, table));
done:
    kvl_free(&table);
    kvl_free(&x);
    kvl_free(&q);
    kvl_free(&room);
    return status;
}

/* ---- what stays ---- */

/* What becomes of the keys' RoPE: KVL_GATHER_* of cl/gather.cl. */
enum { GATHER_AS_THEY_ARE, GATHER_TO_PLACES, GATHER_UNTURNED };

/* Places first .. first + n - 1 of every head, from the rows into the stage. */
static kvl_status gather(struct kvl_prompt *p, uint32_t first, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary)
{
    const struct kvl_layer_spec *spec = spec_of(p, p->layer);
    const uint32_t turn = spec->rope == KVL_STORE_PRE_ROPE ? GATHER_UNTURNED : spec->pos == KVL_POS_COMPACT ? GATHER_TO_PLACES : GATHER_AS_THEY_ARE;
    const struct kvl_arg own[] = {KVL_BUF(p->kept), KVL_U32(first), KVL_U32(turn), KVL_BUF(rotary), KVL_U32(p->model.rope_dim), KVL_BUF(stage)};
    return kvl_cache_launch(p->rows, 0, p->gather, own, sizeof own / sizeof *own, dims_of(p)->n_kv_head, n);
}

/* What each token that stays has got of attention, summed over its kv head's query heads. */
static void attention_so_far(const struct kvl_prompt *p, const struct kvl_selection *selection, float *sum)
{
    const uint32_t heads = dims_of(p)->n_kv_head, group = dims_of(p)->n_head / heads;
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t i = selection->offset[h]; i < selection->offset[h + 1]; i++) {
            double all = 0.0;
            for (uint32_t g = 0; g < group; g++) all += p->evidence.column_sum[(size_t)(h * group + g) * p->n_token + selection->token[i]];
            sum[i] = (float)all;
        }
}

static kvl_status hand_over(struct kvl_prompt *p, const struct kvl_selection *selection, struct kvl_buffer *stage, struct kvl_buffer *rotary)
{
    kvl_status status = KVL_OK;
    const uint32_t heads = dims_of(p)->n_kv_head, u = kvl_cache_ubatch(&kvl_cache_plan(p->cache)->config);
    uint32_t *count = NULL, most = 0;
    float *sum = NULL;
    KVL_TRY(kvl_alloc(&count, heads, sizeof *count));
    for (uint32_t h = 0; h < heads; h++) {
        count[h] = selection->offset[h + 1] - selection->offset[h];
        most = count[h] > most ? count[h] : most;
    }
    KVL_TRY(kvl_buffer_write(p->kept, 0, (heads + 1) * sizeof(uint32_t), selection->offset));
    if (selection->offset[heads] != 0)
        KVL_TRY(kvl_buffer_write(p->kept, (heads + 1) * sizeof(uint32_t), selection->offset[heads] * sizeof(uint32_t), selection->token));
    KVL_TRY(kvl_alloc(&sum, selection->offset[heads] + 1u, sizeof *sum));
    const bool has_sums = layer_of(p, p->layer)->running.source == KVL_RUN_SUM;
    if (has_sums) attention_so_far(p, selection, sum);
    KVL_TRY(kvl_cache_fill_begin(p->cache, p->layer, p->n_token, count, selection->token, has_sums ? sum : NULL));
    kvl_cache_note_peak(p->cache, kvl_cache_resident(p->rows));
    for (uint32_t first = 0; first < most; first += u) {
        const uint32_t n = most - first < u ? most - first : u;
        KVL_TRY(gather(p, first, n, stage, rotary));
        KVL_TRY(kvl_cache_fill_rows(p->cache, p->layer, n, stage, rotary, p->model.rope_dim));
    }
    KVL_TRY(kvl_cache_fill_end(p->cache, p->layer, p->n_token, count));
done:
    kvl_free(&count);
    kvl_free(&sum);
    return status;
}

/* After the last layer: what rows of binary16 saw and replaced, the cache will not see. */
static kvl_status pass_on_counts(const struct kvl_prompt *p)
{
    kvl_status status = KVL_OK;
    struct kvl_cache_counts counts;
    if (p->layer + 1 < dims_of(p)->n_layer || kvl_cache_plan(p->cache)->config.exact) return KVL_OK;
    KVL_TRY(kvl_cache_counts(p->rows, &counts));
    kvl_cache_add_counts(p->cache, &counts);
done:
    return status;
}

kvl_status kvl_prompt_compress(struct kvl_prompt *p, const float *w_o, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                               struct kvl_selection *selection)
{
    kvl_status status = KVL_OK;
    struct kvl_score_input in;
    struct kvl_cache_reads reads;
    *selection = (struct kvl_selection){0};
    kvl_cache_reads(p->rows, &reads);
    kvl_cache_count_prompt(p->cache, &reads);
    KVL_TRY(complete(p, w_o, &in));
    if (p->observer != NULL) KVL_TRY(p->observer->layer(p->observer->context, &in));
    const struct kvl_layer_plan *layer = layer_of(p, p->layer);
    if (layer->slides) KVL_TRY(kvl_select_newest(&in, layer->window, selection));
    else KVL_TRY(kvl_select_layer(spec_of(p, p->layer), &in, kvl_cache_plan(p->cache)->budgeted_token_bytes, selection));
    const struct evidence *e = &p->evidence;
    if (!layer->slides && e->n_witness > 0 && e->witness[e->n_witness - 1].measure) KVL_TRY(measure_loss(p, &e->witness[e->n_witness - 1], selection));
    for (int s = 0; s < KVL_SIDES; s++)
        if (learner(p, s) != NULL) KVL_TRY(learn_side(p, s, selection));
    KVL_TRY(hand_over(p, selection, stage, rotary));
    KVL_TRY(pass_on_counts(p));
done:
    if (status != KVL_OK) kvl_selection_free(selection);
    return status;
}
