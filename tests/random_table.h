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

/* context: the struct kvl_cache_dims of the cache. */
static inline kvl_status random_table(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out)
{
    enum { ROWS = 200 };
    const struct kvl_cache_dims *dims = context;
    const size_t n_streams = (size_t)dims->n_layer * dims->n_kv_head, row_floats = (size_t)ROWS * dims->head_dim;
    float *x = NULL;
    *out = (struct kvl_table){.n_layer = dims->n_layer, .n_kv_head = dims->n_kv_head, .sha256 = "random"};
    assert_int_equal(kvl_alloc(&x, row_floats, sizeof *x), KVL_OK);
    for (int side = 0; side < KVL_SIDES; side++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)entry->codec[side].plugin;
        const struct kvl_codec_dims codec_dims = {sizeof codec_dims, side == KVL_SIDE_K ? KVL_ROLE_K : KVL_ROLE_V, dims->head_dim, 0};
        struct kvl_codec_shape shape;
        assert_int_equal(kvl_codec_shape(&entry->codec[side], codec_dims.role, dims->head_dim, 0, &shape), KVL_OK);
        if (shape.table_floats == 0) continue;
        out->n[side] = shape.table_floats;
        assert_int_equal(kvl_alloc(&out->values[side], n_streams * shape.table_floats, sizeof(float)), KVL_OK);
        for (size_t s = 0; s < n_streams; s++) {
            struct random_taker taker = {.values = out->values[side] + s * shape.table_floats};
            const struct kvl_calibration calibration = {sizeof calibration, 0, &taker, random_put};
            if (s > 0 && dims->n_layer > 1) { /* one stream serves for all: only sizes matter there */
                memcpy(taker.values, out->values[side], shape.table_floats * sizeof(float));
                continue;
            }
            for (size_t i = 0; i < row_floats; i++) x[i] = (float)(2.0 * kvl_rng_normal(40 + s, i) + (double)(i % 5));
            if (KVL_CODEC_HAS(codec, learn)) {
                const struct kvl_prompt_rows rows = {sizeof rows, ROWS / 2, 1, ROWS / 2, x, x + row_floats / 2};
                assert_int_equal(codec->learn(entry->codec[side].priv, &codec_dims, &rows, taker.values), 0);
                continue;
            }
            assert_int_equal(codec->calibrate(entry->codec[side].priv, &codec_dims, ROWS, x, &calibration), 0);
            assert_int_equal(taker.n, shape.table_floats);
        }
    }
    kvl_free(&x);
    return KVL_OK;
}

#endif
