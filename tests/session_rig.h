/* A model on the device under test with one session over it. Include after test_harness.h. */
#ifndef KVL_TEST_SESSION_RIG_H
#define KVL_TEST_SESSION_RIG_H
#include "cache.h"
#include "session.h"
#include <math.h>
#include <string.h>

#define TINY_MODEL KVL_ROOT "/data/models/tiny.gguf" /* in the repository; its answers: data/golden/tiny_answers.h */

struct rig {
    struct kvl_model *model;
    struct kvl_weights *weights;
    struct kvl_spec *spec;
    struct kvl_session *session;
};

static inline struct rig rig_load(const char *model_path)
{
    struct rig r = {0};
    assert_ok(kvl_model_open(model_path, &r.model));
    assert_ok(kvl_weights_load(r.model, kvl_test_device, &r.weights));
    return r;
}

/* Replaces the session. config.spec is taken from the text. */
static inline void rig_session(struct rig *r, const char *spec, struct kvl_session_config config)
{
    kvl_session_free(&r->session);
    kvl_spec_free(&r->spec);
    assert_ok(kvl_spec_parse(spec, &r->spec));
    config.spec = r->spec;
    assert_ok(kvl_session_new(r->weights, &config, &r->session));
}

static inline void rig_free(struct rig *r)
{
    kvl_session_free(&r->session);
    kvl_spec_free(&r->spec);
    kvl_weights_free(&r->weights);
    kvl_model_close(&r->model);
}

/* Runs n tokens; their logits to logits [n][n_vocab]. The session has room for n rows. */
static inline void rig_forward(struct rig *r, const int32_t *tokens, uint32_t n, float *logits)
{
    assert_ok(kvl_session_forward(r->session, tokens, n, n));
    for (uint32_t i = 0; i < n; i++) assert_ok(kvl_session_read_logits(r->session, i, logits + (size_t)i * r->model->dims.n_vocab));
}

static inline double larger(double a, double b) { return b <= a || a != a ? a : b; } /* NaN if one is */

static inline double largest_difference(const float *a, const float *b, size_t n)
{
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) worst = larger(worst, fabs((double)a[i] - b[i]));
    return worst;
}

static inline int32_t largest_at(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

#endif
