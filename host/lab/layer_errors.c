#include "layer_errors.h"
#include "cache.h"
#include "mem.h"
#include "reference.h"
#include <math.h>
#include <string.h>

/* Rows of one side of `layers` layers from l on, before RoPE, [n][layers][streams][channels]. */
static kvl_status exact_rows(struct kvl_cache *cache, uint32_t l, uint32_t layers, enum kvl_side side, uint32_t n, float **out)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &kvl_cache_plan(cache)->layer[l];
    const size_t streams = layer->n_stream, channels = layer->side[side].record.channels;
    float *by_stream = NULL;
    KVL_TRY(kvl_alloc(&by_stream, streams * n, channels * sizeof *by_stream));
    KVL_TRY(kvl_alloc(out, layers * streams * n, channels * sizeof **out));
    for (uint32_t i = 0; i < layers; i++) {
        KVL_TRY(kvl_cache_read_rows(cache, l + i, side, 0, n, by_stream));
        for (size_t s = 0; s < streams; s++)
            for (size_t t = 0; t < n; t++)
                memcpy(*out + ((t * layers + i) * streams + s) * channels, by_stream + (s * n + t) * channels, channels * sizeof **out);
    }
done:
    kvl_free(&by_stream);
    return status;
}

/* Turning keeps a row's length, and a projection leaves out what its record is shorter than the row: ||decoded - x||^2 = ||x||^2 - ||record||^2 + ||decoded - record||^2. */
static kvl_status add_layer(const struct kvl_cache_plan *plan, uint32_t l, enum kvl_side side, uint32_t n, const float *x, size_t row, struct kvl_rope rope, double *error)
{
    kvl_status status = KVL_OK;
    const struct kvl_layer_plan *layer = &plan->layer[l];
    const size_t streams = layer->n_stream, channels = layer->side[side].record.channels, layers = layer->side[side].record.layers, row_of_stream = row / streams;
    float *records = NULL, *decoded = NULL;
    KVL_TRY(kvl_alloc(&records, n * streams, channels * sizeof *records));
    KVL_TRY(kvl_alloc(&decoded, n * streams, channels * sizeof *decoded));
    KVL_TRY(kvl_reference_records(plan, l, side, n, x, rope, records));
    KVL_TRY(kvl_reference_decode(plan, l, side, n, records, decoded));
    for (size_t s = 0; s < streams; s++) {
        double whole = 0.0, kept = 0.0, changed = 0.0;
        for (size_t t = layer->sink; t < n; t++) {
            const float *record = records + (t * streams + s) * channels, *back = decoded + (t * streams + s) * channels;
            for (size_t i = 0; i < layers; i++) {
                const float *from = x + (t * layers + i) * row + s * row_of_stream;
                for (size_t c = 0; c < row_of_stream; c++) whole += (double)from[c] * from[c];
            }
            for (size_t c = 0; c < channels; c++) {
                kept += (double)record[c] * record[c];
                changed += ((double)back[c] - record[c]) * ((double)back[c] - record[c]);
            }
        }
        error[s] = sqrt(((layer->side[side].projection && whole > kept ? whole - kept : 0.0) + changed) / whole);
    }
done:
    kvl_free(&records);
    kvl_free(&decoded);
    return status;
}

/* Its table is made of the prompt's own rows. */
static bool waits_for_prompt(const struct kvl_side_plan *side) { return side->table == NULL && side->shape.table_floats != 0; }

static kvl_status measure_layers(const struct kvl_eval *eval, struct kvl_session *exact, uint32_t n, struct kvl_layer_errors *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_model *model = eval->rig->model;
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(eval->session[KVL_EVAL_SPEC]));
    const struct kvl_cache_plan *rows_plan = kvl_cache_plan(kvl_session_cache(exact));
    float *rotary = NULL, *slide_rotary = NULL, *x = NULL;
    KVL_TRY(kvl_rope_angles(model->rope_freq, model->dims.rope_dim / 2, n, &rotary));
    if (model->slide_rope_freq != NULL) KVL_TRY(kvl_rope_angles(model->slide_rope_freq, model->dims.rope_dim / 2, n, &slide_rotary));
    for (uint32_t l = 0; l < out->n_layer; l++)
        for (int side = 0; side < KVL_SIDES; side++) {
            const struct kvl_layer_plan *layer = &plan->layer[l];
            if (layer->n_stream == 0 || layer->leader != l || layer->side[side].codec == NULL || waits_for_prompt(&layer->side[side])) continue;
            const size_t row = (size_t)rows_plan->layer[l].n_stream * rows_plan->layer[l].side[side].record.channels;
            const struct kvl_rope rope = {layer->slides && slide_rotary ? slide_rotary : rotary, model->dims.rope_dim};
            kvl_free(&x);
            KVL_TRY(exact_rows(kvl_session_cache(exact), l, layer->side[side].record.layers, side, n, &x));
            KVL_TRY(add_layer(plan, l, side, n, x, row, rope, out->error[side] + (size_t)l * out->n_stream));
        }
done:
    kvl_free(&rotary);
    kvl_free(&slide_rotary);
    kvl_free(&x);
    return status;
}

kvl_status kvl_layer_errors_measure(const struct kvl_eval *eval, uint32_t n, struct kvl_layer_errors *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(eval->session[KVL_EVAL_SPEC]));
    const uint32_t window = eval->rig->model->dims.window;
    struct kvl_spec *spec = NULL;
    struct kvl_session *exact = NULL;
    *out = (struct kvl_layer_errors){.n_layer = plan->dims.n_layer};
    if (window != 0 && n > window) n = window;
    for (uint32_t l = 0; l < out->n_layer; l++)
        if (plan->layer[l].n_stream > out->n_stream) out->n_stream = plan->layer[l].n_stream;
    for (int side = 0; side < KVL_SIDES; side++) {
        KVL_TRY(kvl_alloc(&out->error[side], (size_t)out->n_layer * out->n_stream, sizeof *out->error[side]));
        for (size_t i = 0; i < (size_t)out->n_layer * out->n_stream; i++) out->error[side][i] = NAN;
    }
    KVL_TRY(kvl_spec_parse("kv=f32 rope=pre", &spec));
    const struct kvl_session_config config = {.spec = spec, .n_ctx = n, .ubatch = eval->config.ubatch < n ? eval->config.ubatch : n, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
    KVL_TRY(kvl_session_new(eval->rig->weights, &config, &exact));
    KVL_TRY(kvl_session_forward(exact, eval->window, n, 0));
    KVL_TRY(measure_layers(eval, exact, n, out));
done:
    kvl_session_free(&exact);
    kvl_spec_free(&spec);
    return status;
}

void kvl_layer_errors_free(struct kvl_layer_errors *errors)
{
    for (int side = 0; side < KVL_SIDES; side++) kvl_free(&errors->error[side]);
}
