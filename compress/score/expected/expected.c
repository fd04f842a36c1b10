/* expected: the attention that future queries are expected to pay, from the statistics of those seen (Devoto, Jeblick, Jegou 2025). */
#include "kvl_plugin_score.h"
#include <stdbool.h>

extern const char kvl_text_compress_score_expected_card_md[];

enum { RECENT_QUERIES = 256 }; /* while tokens are decoded: kvpress keeps so many */
enum covariance { COV, NOCOV };
enum value_norm { VNORM, NO_VNORM };

struct expected {
    int32_t future, sink, covariance, value_norm, gqa;
    double epsilon;
};

static void expected_needs(const void *priv, struct kvl_score_needs *out)
{
    out->what = KVL_NEED_K | KVL_NEED_V | KVL_NEED_QUERY_STATS;
    out->first_query = (uint32_t)((const struct expected *)priv)->sink;
    out->recent_queries = RECENT_QUERIES;
}

/* The mean rotation of a channel pair over the next `future` positions. */
struct turn {
    double cos, sin;
};

static void mean_turns(const struct expected *o, const struct kvl_score_input *in, struct turn *turn)
{
    for (uint32_t i = 0; i < in->head_dim / 2; i++) {
        const bool turns = i < in->rope_dim / 2;
        turn[i] = (struct turn){turns ? 0.0 : 1.0, 0.0};
        for (int32_t p = 0; turns && p < o->future; p++) {
            const double angle = ((double)kvl_score_next(in) + p) * in->rope_freq[i];
            turn[i].cos += cos(angle) / o->future;
            turn[i].sin += sin(angle) / o->future;
        }
    }
}

/* Rotates the pairs of x, whose channels are `stride` apart. */
static void rotate(const struct turn *turn, uint32_t d, double *x, size_t stride)
{
    for (uint32_t i = 0; i < d / 2; i++) {
        const double a = x[2 * i * stride], b = x[(2 * i + 1) * stride];
        x[2 * i * stride] = a * turn[i].cos - b * turn[i].sin;
        x[(2 * i + 1) * stride] = a * turn[i].sin + b * turn[i].cos;
    }
}

/* R mu and R Sigma R^T of query head h, and what a key gets of them: k mu / sqrt(d) + k Sigma k / (2 d). */
static void rotate_statistics(const struct kvl_score_input *in, const struct turn *turn, uint32_t h, double *mu, double *sigma)
{
    const uint32_t d = in->head_dim;
    for (uint32_t c = 0; c < d; c++) mu[c] = in->q_mean[(size_t)h * d + c];
    for (uint32_t c = 0; c < d * d; c++) sigma[c] = in->q_cov[(size_t)h * d * d + c];
    rotate(turn, d, mu, 1);
    for (uint32_t c = 0; c < d; c++) rotate(turn, d, sigma + c, d); /* columns, then rows */
    for (uint32_t c = 0; c < d; c++) rotate(turn, d, sigma + (size_t)c * d, 1);
}

static double expected_logit(const struct expected *o, const float *k, const double *mu, const double *sigma, uint32_t d)
{
    double mean = 0.0, square = 0.0;
    for (uint32_t c = 0; c < d; c++) mean += k[c] * mu[c];
    if (o->covariance == NOCOV) return mean / sqrt(d);
    for (uint32_t c = 0; c < d; c++) {
        double row = 0.0;
        for (uint32_t j = 0; j < d; j++) row += sigma[(size_t)c * d + j] * k[j];
        square += k[c] * row;
    }
    return mean / sqrt(d) + square / (2.0 * d);
}

static int expected_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct expected *o = priv;
    const uint32_t n = in->n_token, d = in->head_dim, sink = kvl_score_min((uint32_t)o->sink, n), group = in->n_head / in->n_kv_head;
    double *room = calloc(n + d + (size_t)d * d, sizeof *room), *p = room, *mu = room + n, *sigma = mu + d;
    struct turn *turn = calloc(d / 2, sizeof *turn);
    const bool ok = room != NULL && turn != NULL;
    if (ok) mean_turns(o, in, turn);
    for (uint32_t h = 0; ok && h < in->n_head; h++) {
        rotate_statistics(in, turn, h, mu, sigma);
        for (uint32_t t = sink; t < n; t++) p[t] = expected_logit(o, kvl_score_row(in, in->k, h / group, t), mu, sigma, d);
        kvl_score_softmax(p + sink, n - sink);
        kvl_score_add_head(in, o->gqa, h, p, n, score);
    }
    for (uint32_t h = 0; ok && o->value_norm == VNORM && h < in->n_kv_head; h++)
        for (uint32_t t = sink; t < n; t++) {
            float *s = &score[(size_t)h * n + t];
            *s = (float)((*s + o->epsilon) * kvl_score_norm(kvl_score_row(in, in->v, h, t), d));
        }
    if (ok) kvl_score_fill(in, score, 0, sink, kvl_score_largest(in, score, sink, n) + 1.0f);
    free(room);
    free(turn);
    return ok ? 0 : -1;
}

static const struct kvl_option options[] = {
    {"future", "positions that queries are expected at", KVL_OPTION_INT, offsetof(struct expected, future), 512, 1, 1 << 20, NULL},
    {"sink", "first tokens: kept, and not counted", KVL_OPTION_INT, offsetof(struct expected, sink), 4, 0, INT32_MAX, NULL},
    {"covariance", "of the queries", KVL_OPTION_CHOICE, offsetof(struct expected, covariance), COV, 0, 0, "cov|nocov"},
    {"value", "weight by the norm of the value", KVL_OPTION_CHOICE, offsetof(struct expected, value_norm), VNORM, 0, 0, "vnorm|plain"},
    {"epsilon", "added before weighting", KVL_OPTION_FLOAT, offsetof(struct expected, epsilon), 0, 0, 1, NULL},
    KVL_GROUP_OPTION(struct expected, gqa),
};

const struct kvl_score kvl_score_expected = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "expected", "attention that future queries are expected to pay", "arXiv:2510.00636", options,
                           struct expected, kvl_text_compress_score_expected_card_md),
    .needs = expected_needs,
    .ref = expected_ref,
};
