#include "reference.h"
#include "half.h"
#include "mem.h"
#include "rescore.h"
#include "rotation.h"
#include "select.h"
#include <float.h>
#include <math.h>
#include <string.h>

/* What a full-precision row holds: f32 with --exact or if nothing is ever read in full precision, else rounded to binary16. */
static float exact_value(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, float x)
{
    return plan->config.exact || !kvl_keeps_exact(layer) ? x : kvl_half_to_float(kvl_float_to_half(x));
}

/* ---- records ---- */

static void rope_row(float *x, struct kvl_rope rope, uint32_t position)
{
    const float *angle = rope.rotary + (size_t)position * rope.rope_dim;
    for (uint32_t i = 0; i < rope.rope_dim; i += 2) {
        const float a = x[i], b = x[i + 1];
        x[i] = fmaf(a, angle[i], -(b * angle[i + 1]));
        x[i + 1] = fmaf(a, angle[i + 1], b * angle[i]);
    }
}

void kvl_reference_turn(float *row, struct kvl_rope rope, uint32_t position, bool back)
{
    const float *angle = rope.rotary + (size_t)position * rope.rope_dim;
    if (!back) rope_row(row, rope, position);
    for (uint32_t i = 0; back && i < rope.rope_dim; i += 2) {
        const float a = row[i], b = row[i + 1];
        row[i] = fmaf(a, angle[i], b * angle[i + 1]);
        row[i + 1] = fmaf(b, angle[i], -(a * angle[i + 1]));
    }
}

/* How rows of one side become records, and back. */
struct form {
    const struct kvl_cache_plan *plan;
    const struct kvl_layer_plan *layer;
    const struct kvl_side_plan *side;
    uint32_t head_dim, heads, rope_first; /* a row: `heads` heads of head_dim channels, of all layers that share the record */
    uint32_t own;      /* of these heads, where the layer's own begin */
    bool is_key;
    struct kvl_rope rope;
    float *matrix;     /* the rotation's and its transpose; NULL without one */
    float *down, *up;  /* [streams][heads * D][rank]; NULL without a projection */
    float *row;        /* [heads * D], that which becomes a record */
    float *room;       /* [D] */
};

static size_t row_size(const struct form *form) { return (size_t)form->heads * form->head_dim; }
static size_t matrix_size(const struct form *form) { return row_size(form) * form->side->record.channels; }

static kvl_status form_open(const struct kvl_cache_plan *plan, uint32_t l, enum kvl_side s, struct kvl_rope rope, struct form *form)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &plan->layer[l];
    const struct kvl_side_plan *side = &layer->side[s];
    const size_t m = side->rot_m;
    *form = (struct form){.plan = plan,
                          .layer = layer,
                          .side = side,
                          .head_dim = plan->dims.head_dim,
                          .heads = side->record.layers * side->record.heads,
                          .own = (l - layer->leader) * side->record.heads,
                          .rope_first = plan->dims.joint_value_dim,
                          .is_key = s == KVL_SIDE_K,
                          .rope = rope};
    KVL_TRY(kvl_alloc(&form->row, row_size(form), sizeof *form->row));
    KVL_TRY(kvl_alloc(&form->room, form->head_dim, sizeof *form->room));
    if (m != 0) {
        KVL_TRY(kvl_alloc(&form->matrix, 2 * m * m, sizeof *form->matrix));
        KVL_TRY(kvl_rotation_fill(layer->rot, layer->rot_seed, side->rot_d, side->rot_m, form->matrix));
    }
    if (side->projection == NULL) goto done;
    KVL_TRY(kvl_alloc(&form->down, layer->n_stream * matrix_size(form), sizeof *form->down));
    KVL_TRY(kvl_alloc(&form->up, layer->n_stream * matrix_size(form), sizeof *form->up));
    for (uint32_t h = 0; h < layer->n_stream; h++)
        KVL_TRY(kvl_side_matrices(&plan->dims, side, h, form->down + h * matrix_size(form), form->up + h * matrix_size(form)));
done:
    return status;
}

static void form_close(struct form *form)
{
    kvl_free(&form->matrix);
    kvl_free(&form->down);
    kvl_free(&form->up);
    kvl_free(&form->row);
    kvl_free(&form->room);
}

/* form->row of stream h, through its matrix, to record. */
static void project(const struct form *form, uint32_t h, float *record)
{
    const uint32_t rank = form->side->record.channels;
    const float *down = form->down + h * matrix_size(form);
    for (uint32_t r = 0; r < rank; r++) {
        record[r] = 0.0f;
        for (size_t i = 0; i < row_size(form); i++) record[r] = fmaf(form->row[i], down[i * rank + r], record[r]);
    }
}

static void unproject(const struct form *form, uint32_t h, const float *record, float *row)
{
    const uint32_t rank = form->side->record.channels;
    const float *up = form->up + h * matrix_size(form);
    for (size_t i = 0; i < row_size(form); i++) {
        row[i] = 0.0f;
        for (uint32_t r = 0; r < rank; r++) row[i] = fmaf(record[r], up[i * rank + r], row[i]);
    }
}

/* Takes stream h's row of token t from x [T][layers][H][D] and gives it the form of what is stored. Of a record that layers share, which is made of rows as exact
 * rows hold them, each channel is rounded as there. */
static void take_row(const struct form *form, const float *x, uint32_t t, uint32_t h, uint32_t position)
{
    const struct kvl_layer_plan *layer = form->layer;
    const uint32_t d = form->head_dim, first = form->rope_first, heads = form->side->record.heads, layers = form->side->record.layers;
    const size_t layer_row = (size_t)layer->n_stream * heads * d;
    for (uint32_t i = 0; i < layers; i++)
        memcpy(form->row + (size_t)i * heads * d, x + ((size_t)t * layers + i) * layer_row + (size_t)h * heads * d, (size_t)heads * d * sizeof *x);
    for (uint32_t i = 0; form->is_key && i < form->heads; i++) {
        float *head = form->row + (size_t)i * d;
        if (layer->rope == KVL_STORE_POST_ROPE) rope_row(head + first, form->rope, position);
        memcpy(form->room, head, d * sizeof *x);
        for (uint32_t c = first; c < d; c++) head[c] = form->room[first + kvl_key_channel(layer->korder, form->rope.rope_dim, c - first)];
    }
    for (size_t i = 0; kvl_layer_shares(layer) && i < row_size(form); i++) form->row[i] = exact_value(form->plan, layer, form->row[i]);
}

/* A row in the form of what is stored becomes one of keys after RoPE, or of values. */
static void give_row(const struct form *form, uint32_t position, float *row)
{
    const struct kvl_layer_plan *layer = form->layer;
    const uint32_t d = form->head_dim, first = form->rope_first;
    for (uint32_t i = 0; form->is_key && i < form->heads; i++) {
        float *head = row + (size_t)i * d;
        memcpy(form->room, head, d * sizeof *row);
        for (uint32_t c = first; c < d; c++) head[first + kvl_key_channel(layer->korder, form->rope.rope_dim, c - first)] = form->room[c];
        if (layer->rope == KVL_STORE_PRE_ROPE) rope_row(head + first, form->rope, position);
    }
}

/* The record of stream h's row of token t. */
static kvl_status to_record(const struct form *form, const float *x, uint32_t t, uint32_t h, uint32_t position, float *record)
{
    take_row(form, x, t, h, position);
    if (form->down != NULL) project(form, h, record);
    else memcpy(record, form->row, row_size(form) * sizeof *x);
    return form->matrix ? kvl_rotate(form->matrix, form->side->rot_m, form->side->rot_d, record) : KVL_OK;
}

/* The keys after RoPE, or the values, that a record stands for; record is used up. */
static kvl_status from_record(const struct form *form, uint32_t h, uint32_t position, float *record, float *row)
{
    kvl_status status = KVL_OK;
    const size_t m = form->side->rot_m;
    if (form->matrix != NULL) KVL_TRY(kvl_rotate(form->matrix + m * m, form->side->rot_m, form->side->rot_d, record));
    if (form->up != NULL) unproject(form, h, record, row);
    else memcpy(row, record, row_size(form) * sizeof *row);
    give_row(form, position, row);
done:
    return status;
}

kvl_status kvl_reference_records(const struct kvl_cache_plan *plan, uint32_t l, enum kvl_side side, uint32_t n_tokens, const float *x,
                                 struct kvl_rope rope, float *records)
{
    kvl_status status = KVL_OK;
    const uint32_t streams = plan->layer[l].n_stream;
    struct form form;
    float *record = NULL;
    KVL_TRY(form_open(plan, l, side, rope, &form));
    const size_t channels = form.side->record.channels;
    KVL_TRY(kvl_alloc(&record, channels, sizeof *record));
    for (size_t i = 0; i < (size_t)n_tokens * streams; i++) {
        KVL_TRY(to_record(&form, x, (uint32_t)(i / streams), (uint32_t)(i % streams), (uint32_t)(i / streams), record));
        memcpy(records + i * channels, record, channels * sizeof *record);
    }
done:
    kvl_free(&record);
    form_close(&form);
    return status;
}

kvl_status kvl_reference_rows(const struct kvl_cache_plan *plan, uint32_t l, enum kvl_side side, uint32_t h, uint32_t n, const uint32_t *position,
                              struct kvl_rope rope, float *records, float *rows)
{
    kvl_status status = KVL_OK;
    struct form form;
    KVL_TRY(form_open(plan, l, side, rope, &form));
    for (uint32_t i = 0; i < n; i++) /* RoPE leaves position 0 as it is */
        KVL_TRY(from_record(&form, h, position != NULL ? position[i] : 0, records + (size_t)i * form.side->record.channels, rows + (size_t)i * row_size(&form)));
done:
    form_close(&form);
    return status;
}

/* ---- codes ---- */

/* One stream: encodes tokens sink .. T-1 page by page and decodes them again. x and decoded have `stride` floats a token. */
static kvl_status round_trip_stream(const struct kvl_side_plan *side, const float *table, uint32_t n_tokens, size_t stride, const float *x, float *decoded,
                                  uint8_t *block, float *rows)
{
    const uint32_t page = side->dims.page_tokens, d = side->dims.head_dim;
    for (uint32_t t0 = 0; t0 < n_tokens; t0 += page) {
        const uint32_t n = n_tokens - t0 < page ? n_tokens - t0 : page;
        for (uint32_t i = 0; i < n; i++) memcpy(rows + (size_t)i * d, x + (t0 + i) * stride, d * sizeof(float));
        memset(block, 0, side->page_bytes);
        if (side->codec->ref_encode(side->priv, &side->dims, table, 0, n, rows, block) != 0 ||
            side->codec->ref_decode(side->priv, &side->dims, table, 0, n, block, rows) != 0)
            return kvl_fail(KVL_E_VERIFY, "codec %s: its reference failed", side->codec->head.name);
        for (uint32_t i = 0; i < n; i++) memcpy(decoded + (t0 + i) * stride, rows + (size_t)i * d, d * sizeof(float));
    }
    return KVL_OK;
}

kvl_status kvl_reference_decode(const struct kvl_cache_plan *plan, uint32_t l, enum kvl_side s, uint32_t n_tokens, const float *records,
                                float *decoded)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &plan->layer[l];
    const struct kvl_side_plan *side = &layer->side[s];
    const uint32_t channels = side->record.channels, sink = layer->sink < n_tokens ? layer->sink : n_tokens;
    const size_t stride = (size_t)layer->n_stream * channels;
    uint8_t *block = NULL;
    float *rows = NULL;
    KVL_TRY(kvl_alloc(&block, side->page_bytes, 1));
    KVL_TRY(kvl_alloc(&rows, (size_t)side->dims.page_tokens * channels, sizeof *rows));
    memcpy(decoded, records, n_tokens * stride * sizeof *decoded);
    for (uint32_t h = 0; h < layer->n_stream; h++) {
        float *stream = decoded + sink * stride + (size_t)h * channels;
        KVL_TRY(round_trip_stream(side, kvl_side_table(side, h), n_tokens - sink, stride, stream, stream, block, rows));
    }
done:
    kvl_free(&block);
    kvl_free(&rows);
    return status;
}

/* What queries of layer l read of one side in full precision and as decoded, [T][H][D]; x [T][layers][H][D]. turned: keys stored before RoPE are turned by it. */
static kvl_status read_side(const struct kvl_cache_plan *plan, uint32_t l, enum kvl_side side, bool turned, uint32_t n_tokens, const float *x,
                            struct kvl_rope rope, float *exact, float *coded)
{
    kvl_status status = KVL_OK;
    const uint32_t streams = plan->layer[l].n_stream;
    const bool shares = kvl_layer_shares(&plan->layer[l]);
    struct form form;
    float *records = NULL, *decoded = NULL, *row = NULL;
    KVL_TRY(form_open(plan, l, side, rope, &form));
    const size_t channels = form.side->record.channels, n_records = (size_t)n_tokens * streams, own_size = (size_t)form.side->record.heads * form.head_dim;
    KVL_TRY(kvl_alloc(&records, n_records * channels, sizeof *records));
    KVL_TRY(kvl_alloc(&decoded, n_records * channels, sizeof *decoded));
    KVL_TRY(kvl_alloc(&row, row_size(&form), sizeof *row));
    const float *own = row + (size_t)form.own * form.head_dim;
    KVL_TRY(kvl_reference_records(plan, l, side, n_tokens, x, rope, records));
    for (size_t i = 0; !shares && i < n_records * channels; i++) records[i] = exact_value(plan, &plan->layer[l], records[i]);
    KVL_TRY(kvl_reference_decode(plan, l, side, n_tokens, records, decoded));
    for (size_t i = 0; i < n_records; i++) {
        const uint32_t h = (uint32_t)(i % streams), t = (uint32_t)(i / streams), position = turned ? t : 0; /* RoPE leaves position 0 as it is */
        if (shares) {
            take_row(&form, x, t, h, t);
            memcpy(row, form.row, row_size(&form) * sizeof *row);
            give_row(&form, position, row);
        } else {
            KVL_TRY(from_record(&form, h, position, records + i * channels, row));
        }
        memcpy(exact + i * own_size, own, own_size * sizeof *row);
        KVL_TRY(from_record(&form, h, position, decoded + i * channels, row));
        memcpy(coded + i * own_size, own, own_size * sizeof *row);
    }
done:
    kvl_free(&records);
    kvl_free(&decoded);
    kvl_free(&row);
    form_close(&form);
    return status;
}

/* First token of a side that the query at p reads in full precision, when the ubatch ends before `end`. */
static uint32_t encoded_end(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, const struct kvl_side_plan *side, uint32_t p,
                            uint32_t end)
{
    if (plan->config.protocol == KVL_P1_FAKE_QUANT) return p + 1 > side->tail ? p + 1 - side->tail : 0;
    if (end < layer->sink + side->tail) return layer->sink;
    return layer->sink + (end - layer->sink - side->tail) / side->shape.unit * side->shape.unit;
}

struct sources {
    const float *exact, *coded; /* [T][H][D] */
};

static const float *row_of(const struct sources *source, const struct kvl_layer_plan *layer, uint32_t t, uint32_t coded_end, size_t at)
{
    return (t < layer->sink || t >= coded_end ? source->exact : source->coded) + at;
}

/* q . k. slid: tokens that a window has slid past the key, if its place counts and not its position (pos=compact). */
static double product(const float *q, const float *k, uint32_t d, struct kvl_rope rope, uint32_t slid, float *room)
{
    double dot = 0.0;
    memcpy(room, k, d * sizeof *k);
    if (slid != 0) rope_row(room, rope, slid);
    for (uint32_t c = 0; c < d; c++) dot += (double)q[c] * room[c];
    return dot;
}

/* ---- pages that queries choose ---- */

/* The most that a query record can score on keys `first` .. `first` + n - 1 of a stream, records [..][stride]. */
static double bound_of(const struct kvl_cache_plan *plan, const float *q, const float *keys, size_t stride, uint32_t first, uint32_t n, uint32_t channels)
{
    double sum = 0.0;
    for (uint32_t c = 0; c < channels; c++) {
        float least = keys[first * stride + c], largest = least;
        for (uint32_t t = first + 1; t < first + n; t++) {
            least = fminf(least, keys[t * stride + c]);
            largest = fmaxf(largest, keys[t * stride + c]);
        }
        if (!plan->config.exact) {
            least = kvl_half_to_float(kvl_float_to_half(least));
            largest = kvl_half_to_float(kvl_float_to_half(largest));
        }
        sum += fmax((double)q[c] * least, (double)q[c] * largest);
    }
    return sum;
}

kvl_status kvl_reference_pages(const struct kvl_cache_plan *plan, uint32_t l, uint32_t n_tokens, const float *q, const float *k, struct kvl_rope rope,
                               uint32_t *n_read, uint32_t *page)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &plan->layer[l];
    const uint32_t d = plan->dims.head_dim, heads = plan->dims.n_kv_head, group = plan->dims.n_head / heads, size = (uint32_t)layer->pages.size;
    const size_t n = (size_t)n_tokens * heads * d;
    struct form form;
    struct kvl_ranked *room = NULL;
    float *records = NULL, *decoded = NULL, *query = NULL, *score = NULL;
    KVL_TRY(form_open(plan, l, KVL_SIDE_K, rope, &form));
    KVL_TRY(kvl_alloc(&records, n, sizeof *records));
    KVL_TRY(kvl_alloc(&decoded, n, sizeof *decoded));
    KVL_TRY(kvl_alloc(&query, d, sizeof *query));
    KVL_TRY(kvl_alloc(&score, layer->most_pages, sizeof *score));
    KVL_TRY(kvl_alloc(&room, layer->most_pages, sizeof *room));
    KVL_TRY(kvl_reference_records(plan, l, KVL_SIDE_K, n_tokens, k, rope, records));
    for (size_t i = 0; i < n; i++) records[i] = exact_value(plan, layer, records[i]);
    KVL_TRY(kvl_reference_decode(plan, l, KVL_SIDE_K, n_tokens, records, decoded));
    for (uint32_t p = 0; p < n_tokens; p++) {
        const struct kvl_page_count count = kvl_pages_read(layer, p + 1);
        for (uint32_t h = 0; h < heads; h++, n_read++, page += layer->most_pages) {
            for (uint32_t i = 0; i < count.whole; i++) score[i] = 0.0f;
            for (uint32_t g = 0; g < group; g++) {
                KVL_TRY(to_record(&form, q + (((size_t)p * heads + h) * group + g) * d, 0, 0, p, query));
                for (uint32_t i = 0; i < count.whole; i++) {
                    const float bound = (float)bound_of(plan, query, decoded + (size_t)h * d, (size_t)heads * d, layer->sink + i * size, size, d);
                    score[i] = layer->pages.gqa == KVL_BOUND_SUM ? score[i] + bound : g == 0 ? bound : fmaxf(score[i], bound);
                }
            }
            *n_read = kvl_select_top(score, count.whole, count.read, room, page);
        }
    }
done:
    form_close(&form);
    kvl_free(&room);
    kvl_free(&records);
    kvl_free(&decoded);
    kvl_free(&query);
    kvl_free(&score);
    return status;
}

/* skips [T]: tokens that the query at p does not read. */
static void skip_pages(const struct kvl_layer_plan *layer, uint32_t p, uint32_t n_read, const uint32_t *page, bool *skips)
{
    const uint32_t size = (uint32_t)layer->pages.size, whole = kvl_pages_read(layer, p + 1).whole;
    for (uint32_t t = 0; t <= p; t++) skips[t] = t >= layer->sink && t < layer->sink + whole * size;
    for (uint32_t i = 0; i < n_read; i++)
        for (uint32_t t = 0; t < size; t++) skips[layer->sink + page[i] * size + t] = false;
}

static void attend_one(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, uint32_t p, uint32_t end, uint32_t h, const float *q,
                       const struct sources *k, const struct sources *v, struct kvl_rope rope, const bool *skips, float *room, double *weight, float *out)
{
    const uint32_t d = plan->dims.head_dim, heads = plan->dims.n_kv_head;
    const double scale = plan->dims.scale != 0.0f ? plan->dims.scale : 1.0 / sqrt((double)d);
    const uint32_t k_end = encoded_end(plan, layer, &layer->side[KVL_SIDE_K], p, end);
    const uint32_t v_end = encoded_end(plan, layer, &layer->side[kvl_sides(&plan->dims) - 1], p, end);
    const uint32_t start = layer->window != 0 && p + 1 > layer->window ? p + 1 - layer->window : 0;
    double top = -INFINITY, total = 0.0;
    for (uint32_t t = 0; t <= p; t++) {
        const uint32_t slid = layer->pos == KVL_POS_COMPACT && t < layer->sink && start > layer->sink ? start - layer->sink : 0;
        const double dot = product(q, row_of(k, layer, t, k_end, ((size_t)t * heads + h) * d), d, rope, slid, room);
        weight[t] = (t >= layer->sink && t < start) || skips[t] ? -INFINITY : dot * scale;
        top = fmax(top, weight[t]);
    }
    for (uint32_t t = 0; t <= p; t++) total += weight[t] = exp(weight[t] - top);
    for (uint32_t c = 0; c < kvl_output_dim(&plan->dims); c++) {
        double sum = 0.0;
        for (uint32_t t = 0; t <= p; t++) sum += weight[t] * row_of(v, layer, t, v_end, ((size_t)t * heads + h) * d)[c];
        out[c] = (float)(sum / total);
    }
}

kvl_status kvl_reference_attend(const struct kvl_cache_plan *plan, uint32_t l, uint32_t n_tokens, const float *q, const float *k, const float *v,
                                struct kvl_rope rope, float *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &plan->layer[l];
    const uint32_t d = plan->dims.head_dim, g = plan->dims.n_head / plan->dims.n_kv_head, u = plan->one_by_one ? 1 : kvl_cache_ubatch(&plan->config);
    const bool joint = kvl_sides(&plan->dims) == 1;
    const size_t size = (size_t)n_tokens * plan->dims.n_kv_head * d;
    float *buffer = NULL, *query = NULL;
    double *weight = NULL;
    bool *skips = NULL;
    uint32_t *n_read = NULL, *page = NULL; /* [T][H], [T][H][most_pages] */
    KVL_TRY(kvl_alloc(&skips, n_tokens, sizeof *skips));
    if (layer->pages.tokens != 0) {
        KVL_TRY(kvl_alloc(&n_read, (size_t)n_tokens * plan->dims.n_kv_head, sizeof *n_read));
        KVL_TRY(kvl_alloc(&page, (size_t)n_tokens * plan->dims.n_kv_head * layer->most_pages, sizeof *page));
        KVL_TRY(kvl_reference_pages(plan, l, n_tokens, q, k, rope, n_read, page));
    }
    KVL_TRY(kvl_alloc(&buffer, 4 * size, sizeof *buffer));
    KVL_TRY(kvl_alloc(&query, 2 * (size_t)d, sizeof *query));
    KVL_TRY(kvl_alloc(&weight, n_tokens, sizeof *weight));
    const struct sources keys = {buffer, buffer + 2 * size}, values = joint ? keys : (struct sources){buffer + size, buffer + 3 * size};
    KVL_TRY(read_side(plan, l, KVL_SIDE_K, true, n_tokens, k, rope, buffer, buffer + 2 * size));
    if (!joint) KVL_TRY(read_side(plan, l, KVL_SIDE_V, true, n_tokens, v, rope, buffer + size, buffer + 3 * size));
    for (uint32_t p = 0; p < n_tokens; p++) {
        uint32_t end = (p / u + 1) * u;
        if (end > n_tokens) end = n_tokens;
        for (uint32_t h = 0; h < plan->dims.n_head; h++) {
            const size_t row = (size_t)p * plan->dims.n_head + h, stream = (size_t)p * plan->dims.n_kv_head + h / g;
            if (n_read != NULL) skip_pages(layer, p, n_read[stream], page + stream * layer->most_pages, skips);
            memcpy(query, q + row * d, d * sizeof *query);
            rope_row(query + plan->dims.joint_value_dim, rope, p);
            attend_one(plan, layer, p, end, h / g, query, &keys, &values, rope, skips, query + d, weight, out + row * kvl_output_dim(&plan->dims));
        }
    }
done:
    kvl_free(&skips);
    kvl_free(&n_read);
    kvl_free(&page);
    kvl_free(&buffer);
    kvl_free(&query);
    kvl_free(&weight);
    return status;
}

/* ---- tokens that go while others are decoded ---- */

/* What a head has: tokens by age, each with its number. */
struct held {
    uint32_t n, *token; /* [T] */
    double *score;      /* [T] */
    double *mass;       /* [T] share of the newest query's attention, summed over the query heads */
    uint32_t n_gone;
    struct kvl_gone *gone; /* [T] */
};

struct evict_work {
    const struct kvl_cache_plan *plan;
    const struct kvl_layer_plan *layer;
    struct sources side[KVL_SIDES];
    struct kvl_rope rope;
    struct held *held;    /* [H] */
    double *weight;       /* [T] */
    float *query, *key;   /* [D] */
    float *rows;          /* [T][D + 1] */
    const float *q;       /* [T][H*G][D] */
    const struct kvl_reference_scores *scores;
};

/* The place's row of a side: sinks and the newest tokens in full precision. */
static const float *held_row(const struct evict_work *w, enum kvl_side side, uint32_t h, uint32_t place)
{
    const struct held *held = &w->held[h];
    const uint32_t sealed = kvl_sealed_end(w->layer, &w->layer->side[side], held->n), heads = w->plan->dims.n_kv_head, d = w->plan->dims.head_dim;
    const bool is_exact = place < w->layer->sink || place >= sealed;
    return (is_exact ? w->side[side].exact : w->side[side].coded) + ((size_t)held->token[place] * heads + h) * d;
}

/* Query head r of kv head h over all that it has: out [D], and the probabilities into w->weight. */
static void attend_held(struct evict_work *w, uint32_t h, uint32_t position, const float *q, float *out)
{
    const struct held *held = &w->held[h];
    const uint32_t d = w->plan->dims.head_dim;
    const bool compact = w->layer->pos == KVL_POS_COMPACT;
    double top = -INFINITY, total = 0.0;
    memcpy(w->query, q, d * sizeof *q);
    rope_row(w->query, w->rope, compact ? held->n - 1 : position);
    for (uint32_t i = 0; i < held->n; i++) {
        w->weight[i] = product(w->query, held_row(w, KVL_SIDE_K, h, i), d, w->rope, compact ? i : 0, w->key) / sqrt((double)d);
        top = fmax(top, w->weight[i]);
    }
    for (uint32_t i = 0; i < held->n; i++) total += w->weight[i] = exp(w->weight[i] - top);
    for (uint32_t i = 0; i < held->n; i++) w->weight[i] /= total;
    for (uint32_t c = 0; c < d; c++) {
        double sum = 0.0;
        for (uint32_t i = 0; i < held->n; i++) sum += w->weight[i] * held_row(w, KVL_SIDE_V, h, i)[c];
        out[c] = (float)sum;
    }
}

/* Of places [sink, sealed) the one that goes first. */
static uint32_t first_to_go(const struct held *held, const struct kvl_score_running *running, uint32_t sink, uint32_t sealed, uint32_t position)
{
    uint32_t found = sink;
    double worst = INFINITY;
    for (uint32_t i = sink; i < sealed; i++) {
        const bool stays = held->token[i] < running->first || (uint64_t)held->token[i] + running->newest > position;
        const double number = stays ? FLT_MAX : held->score[i];
        if (number > worst) continue; /* of equal ones the newest */
        worst = number;
        found = i;
    }
    return found;
}

/* Scores of all tokens of head h by the plug-in's specification, from the keys that it has. rows: room for them. */
static kvl_status score_keys(struct evict_work *w, const struct kvl_instance *keep, uint32_t h, float *rows, float *scores)
{
    struct held *held = &w->held[h];
    const uint32_t d = w->plan->dims.head_dim;
    const struct kvl_score_input in = {.struct_size = sizeof in, .n_layer = 1, .n_token = held->n, .n_head = 1, .n_kv_head = 1, .head_dim = d, .k = rows};
    for (uint32_t i = 0; i < held->n; i++) memcpy(rows + (size_t)i * d, held_row(w, KVL_SIDE_K, h, i), d * sizeof *rows);
    if (((const struct kvl_score *)keep->plugin)->ref(keep->priv, &in, scores) != 0) return kvl_fail(KVL_E_VERIFY, "score %s: its reference failed", keep->plugin->name);
    for (uint32_t i = 0; i < held->n; i++) held->score[i] = scores[i];
    return KVL_OK;
}

/* Place `gone` of a head is free; the newest query gave it `mass`. */
static void let_go(struct held *held, uint32_t gone, uint32_t position, float mass)
{
    const uint32_t behind = held->n - gone - 1;
    held->gone[held->n_gone++] = (struct kvl_gone){position + 1, held->token[gone], mass};
    memmove(held->mass + gone, held->mass + gone + 1, behind * sizeof *held->mass);
    memmove(held->token + gone, held->token + gone + 1, behind * sizeof *held->token);
    memmove(held->score + gone, held->score + gone + 1, behind * sizeof *held->score);
    held->n--;
}

/* Leaves a head with `target` tokens: those of its body, behind `first` places, go by their numbers, of equal ones the newest. */
static void drop_smallest(struct held *held, uint32_t target, uint32_t first, uint32_t body, uint32_t position, float *number)
{
    for (; held->n > target && body > 0; body--) {
        uint32_t gone = first;
        for (uint32_t i = first; i < first + body; i++)
            if ((isnan(number[i]) ? -INFINITY : number[i]) <= (isnan(number[gone]) ? -INFINITY : number[gone])) gone = i;
        memmove(number + gone, number + gone + 1, (held->n - gone - 1) * sizeof *number);
        let_go(held, gone, position, NAN);
    }
}

/* What the heads have, as kvl_rescore_numbers wants it: k and v [H][stride][D], position and stays [H][stride]. */
static void list_held(const struct evict_work *w, uint32_t stride, float *k, float *v, float *number, uint32_t *position, bool *stays)
{
    const uint32_t d = w->plan->dims.head_dim;
    for (uint32_t h = 0; h < w->plan->dims.n_kv_head; h++) {
        const struct held *held = &w->held[h];
        const uint32_t sealed = kvl_sealed_end(w->layer, &w->layer->side[KVL_SIDE_K], held->n);
        for (uint32_t i = 0; i < held->n; i++) {
            const size_t at = (size_t)h * stride + i;
            memcpy(k + at * d, held_row(w, KVL_SIDE_K, h, i), d * sizeof *k);
            if (w->layer->rope == KVL_STORE_PRE_ROPE) rope_row(k + at * d, w->rope, i);
            memcpy(v + at * d, held_row(w, KVL_SIDE_V, h, i), d * sizeof *v);
            number[at] = (float)held->score[i];
            position[at] = held->token[i];
            stays[at] = i < w->layer->sink || i >= sealed;
        }
    }
}

static kvl_status rescore_after(struct evict_work *w, uint32_t l, uint32_t position, uint32_t layer_target)
{
    kvl_status status = KVL_OK;
    const uint32_t heads = w->plan->dims.n_kv_head, d = w->plan->dims.head_dim;
    uint32_t *count = NULL, *at = NULL, stride = 0;
    uint64_t all = 0;
    float *rows = NULL;
    bool *stays = NULL;
    for (uint32_t h = 0; h < heads; h++) {
        all += w->held[h].n;
        stride = w->held[h].n > stride ? w->held[h].n : stride;
    }
    if (all <= (uint64_t)heads * layer_target) return KVL_OK;
    const size_t n = (size_t)heads * stride;
    KVL_TRY(kvl_alloc(&count, 2 * (size_t)heads, sizeof *count));
    KVL_TRY(kvl_alloc(&at, n, sizeof *at));
    KVL_TRY(kvl_alloc(&rows, n * (2 * d + 2), sizeof *rows));
    KVL_TRY(kvl_alloc(&stays, n, sizeof *stays));
    float *v = rows + n * d, *running = v + n * d, *number = running + n;
    uint32_t *target = count + heads;
    for (uint32_t h = 0; h < heads; h++) count[h] = w->held[h].n;
    list_held(w, stride, rows, v, running, at, stays);
    const uint32_t seen = position + 1, n_query = w->layer->recent < seen ? w->layer->recent : seen;
    const struct kvl_held_layer held = {seen, stride, count, at, stays, rows, v, running, w->q + (size_t)(seen - n_query) * w->plan->dims.n_head * d, n_query, w->scores->w_o};
    KVL_TRY(kvl_rescore_numbers(w->plan, l, &held, w->scores->model, w->rope, layer_target, number, target));
    for (uint32_t h = 0; h < heads; h++)
        drop_smallest(&w->held[h], target[h], w->layer->sink, kvl_sealed_end(w->layer, &w->layer->side[KVL_SIDE_K], count[h]) - w->layer->sink, position,
                      number + (size_t)h * stride);
done:
    kvl_free(&count);
    kvl_free(&at);
    kvl_free(&rows);
    kvl_free(&stays);
    return status;
}

static kvl_status evict_after(struct evict_work *w, uint32_t l, uint32_t position)
{
    struct kvl_score_running running = {.struct_size = sizeof running};
    const struct kvl_layer_plan *layer = w->layer;
    const uint32_t group = w->plan->dims.n_head / w->plan->dims.n_kv_head;
    uint32_t target;
    const kvl_status status = kvl_decode_target(w->plan, l, position + 1, 1, &target);
    if (status != KVL_OK) return status;
    if (layer->by_host) return target == UINT32_MAX ? KVL_OK : rescore_after(w, l, position, target);
    layer->score->running(kvl_spec_layer(w->plan->config.spec, l)->keep[0].priv, target, &running);
    for (uint32_t h = 0; h < w->plan->dims.n_kv_head; h++) {
        struct held *held = &w->held[h];
        if (running.source == KVL_RUN_KEYS && held->n > target) {
            const kvl_status scored = score_keys(w, &kvl_spec_layer(w->plan->config.spec, l)->keep[0], h, w->rows, w->rows + (size_t)held->n * w->plan->dims.head_dim);
            if (scored != KVL_OK) return scored;
        }
        while (held->n > target) {
            const uint32_t sealed = kvl_sealed_end(layer, &layer->side[KVL_SIDE_K], held->n);
            if (sealed == layer->sink) break;
            const uint32_t gone = first_to_go(held, &running, layer->sink, sealed, position);
            const bool attends = running.source == KVL_RUN_SUM || running.source == KVL_RUN_NEWEST;
            let_go(held, gone, position, attends ? (float)(held->mass[gone] / group) : NAN);
        }
    }
    return KVL_OK;
}

/* Appends the token at `position`, attends and lets scores go on. */
static void take_in(struct evict_work *w, uint32_t position, const float *q, const float *stored, float *out)
{
    const struct kvl_cache_dims *dims = &w->plan->dims;
    const uint32_t group = dims->n_head / dims->n_kv_head;
    const struct kvl_score_running *running = &w->layer->running;
    for (uint32_t h = 0; h < dims->n_kv_head; h++) {
        struct held *held = &w->held[h];
        held->token[held->n] = position;
        held->score[held->n++] = stored != NULL ? stored[h] : 0.0;
        for (uint32_t i = 0; i < held->n; i++) held->mass[i] = 0.0;
        for (uint32_t i = 0; i < held->n && running->source == KVL_RUN_NEWEST; i++) held->score[i] = 0.0;
    }
    for (uint32_t r = 0; r < dims->n_head; r++) {
        attend_held(w, r / group, position, q + (size_t)r * dims->head_dim, out + (size_t)r * dims->head_dim);
        for (uint32_t i = 0; i < w->held[r / group].n; i++) w->held[r / group].mass[i] += w->weight[i];
        if (running->source == KVL_RUN_STORED) continue;
        for (uint32_t h = 0; h < dims->n_kv_head; h++)
            for (uint32_t i = 0; i < w->held[h].n && (running->is_shared || h == r / group); i++) w->held[h].score[i] += w->weight[i];
    }
}

kvl_status kvl_reference_evict(const struct kvl_cache_plan *plan, uint32_t l, uint32_t n_tokens, const float *q, const float *k, const float *v,
                               struct kvl_rope rope, const struct kvl_reference_scores *from, float *out, uint32_t *n_held, uint32_t *held, uint32_t *n_gone,
                               struct kvl_gone *gone)
{
    kvl_status status = KVL_OK;
    const uint32_t d = plan->dims.head_dim, heads = plan->dims.n_kv_head;
    const size_t size = (size_t)n_tokens * heads * d, q_row = (size_t)plan->dims.n_head * d;
    struct evict_work w = {.plan = plan, .layer = &plan->layer[l], .rope = rope, .q = q, .scores = from};
    const float *stored = from != NULL ? from->stored : NULL;
    float *rows = NULL;
    double *scores = NULL;
    KVL_TRY(kvl_alloc(&rows, 4 * size + 2 * (size_t)d + (size_t)n_tokens * (d + 1), sizeof *rows));
    KVL_TRY(kvl_alloc(&scores, (2 * (size_t)heads + 1) * n_tokens, sizeof *scores));
    KVL_TRY(kvl_alloc(&w.held, heads, sizeof *w.held));
    w.weight = scores + 2 * (size_t)heads * n_tokens;
    w.query = rows + 4 * size;
    w.key = w.query + d;
    w.rows = w.key + d;
    for (int s = 0; s < KVL_SIDES; s++) {
        w.side[s] = (struct sources){rows + s * 2 * size, rows + (s * 2 + 1) * size};
        KVL_TRY(read_side(plan, l, s, false, n_tokens, s == KVL_SIDE_K ? k : v, rope, rows + s * 2 * size, rows + (s * 2 + 1) * size));
    }
    for (uint32_t h = 0; h < heads; h++) {
        const size_t first = (size_t)h * n_tokens;
        w.held[h] = (struct held){.token = held + first, .score = scores + first, .mass = scores + (size_t)heads * n_tokens + first, .gone = gone + first};
    }
    for (uint32_t p = 0; p < n_tokens; p++) {
        take_in(&w, p, q + p * q_row, stored != NULL ? stored + (size_t)p * heads : NULL, out + p * q_row);
        if (p > 0) KVL_TRY(evict_after(&w, l, p)); /* the prompt's eviction is another: here it keeps its token */
    }
    for (uint32_t h = 0; h < heads; h++) {
        n_held[h] = w.held[h].n;
        n_gone[h] = w.held[h].n_gone;
    }
done:
    kvl_free(&w.held);
    kvl_free(&scores);
    kvl_free(&rows);
    return status;
}
