/* Calibration tables made of random rows, for kvl_spec_load_tables: specs say table=random. Include after cmocka.h. */
#ifndef KVL_TEST_RANDOM_TABLE_H
#define KVL_TEST_RANDOM_TABLE_H
#include "mem.h"
#include "plan.h"
#include "rng.h"
#include <string.h>

struct random_taker {
    float *values;
    uint32_t n;
};

static inline int random_put(void *context, const char *name, uint32_t n, const float *values)
{
    struct random_taker *taker = context;
    memcpy(taker->values + taker->n, values, n * sizeof *values);
    taker->n += n;
    return 0;
}

/* Table of a stream from rows x [n][layers * heads * D]. */
static inline void random_stream(const struct kvl_layer_spec *entry, int side, uint32_t head_dim, uint64_t n, const float *x, uint32_t n_floats,
                                 struct random_taker *taker)
{
    const struct kvl_projection *projection = (const struct kvl_projection *)entry->projection[side].plugin;
    const struct kvl_codec *codec = (const struct kvl_codec *)entry->codec[side].plugin;
    const uint32_t role = side == KVL_SIDE_K ? KVL_ROLE_K : KVL_ROLE_V;
    const struct kvl_projection_dims of_rows = {sizeof of_rows, role, head_dim, 0};
    const struct kvl_codec_dims of_records = {sizeof of_records, role, head_dim, 0};
    const struct kvl_calibration calibration = {sizeof calibration, 0, taker, random_put};
    if (projection == NULL && KVL_CODEC_HAS(codec, learn)) {
        const struct kvl_prompt_rows rows = {sizeof rows, (uint32_t)n / 2, 1, (uint32_t)n / 2, x, x + n * head_dim / 2};
        assert_int_equal(codec->learn(entry->codec[side].priv, &of_records, &rows, taker->values), 0);
        taker->n = n_floats;
        return;
    }
    assert_int_equal(projection != NULL ? projection->calibrate(entry->projection[side].priv, &of_rows, n, x, &calibration)
                                        : codec->calibrate(entry->codec[side].priv, &of_records, n, x, &calibration), 0);
}

/* context: the struct kvl_cache_dims of the cache. */
static inline kvl_status random_table(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out)
{
    enum { ROWS = 200 };
    const struct kvl_cache_dims *dims = context;
    *out = (struct kvl_table){.sha256 = "random"};
    for (int side = 0; side < KVL_SIDES; side++) {
        struct kvl_stream_record record;
        struct kvl_codec_shape shape;
        assert_int_equal(kvl_spec_stream_record(entry, side, 0, dims->head_dim, &record), KVL_OK);
        assert_int_equal(kvl_codec_shape(&entry->codec[side], side == KVL_SIDE_K ? KVL_ROLE_K : KVL_ROLE_V, record.channels, 0, &shape), KVL_OK);
        const uint32_t n = record.table_floats != 0 ? record.table_floats : shape.table_floats;
        const size_t row_floats = (size_t)ROWS * record.layers * record.heads * dims->head_dim;
        float *x = NULL;
        out->n_layer = dims->n_layer / record.layers;
        out->n_stream = dims->n_kv_head / record.heads;
        if (n == 0) continue;
        const size_t n_streams = (size_t)out->n_layer * out->n_stream;
        out->n[side] = n;
        assert_int_equal(kvl_alloc(&out->values[side], n_streams * n, sizeof(float)), KVL_OK);
        assert_int_equal(kvl_alloc(&x, row_floats, sizeof *x), KVL_OK);
        for (size_t s = 0; s < n_streams; s++) {
            struct random_taker taker = {.values = out->values[side] + s * n};
            if (s > 0 && out->n_layer > 1) { /* one stream serves for all: only sizes matter there */
                memcpy(taker.values, out->values[side], n * sizeof(float));
                continue;
            }
            for (size_t i = 0; i < row_floats; i++) x[i] = (float)(2.0 * kvl_rng_normal(40 + s, i) + (double)(i % 5));
            random_stream(entry, side, dims->head_dim, ROWS, x, n, &taker);
            assert_int_equal(taker.n, n);
        }
        kvl_free(&x);
    }
    return KVL_OK;
}

#endif
