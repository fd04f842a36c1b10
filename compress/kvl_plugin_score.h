/* kvl_plugin_score.h: small helpers for scores; optional. Sums are in double: the references are specifications. */
#ifndef KVL_PLUGIN_SCORE_H
#define KVL_PLUGIN_SCORE_H
#include "kvl_plugin.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The head of a score or budget: its last arguments are the card and, if there are more, further members of it. */
#define KVL_SCORE_HEAD(kind_, name_, summary_, citation_, options_, type_, ...)                                                    \
    {                                                                                                                              \
        .magic = KVL_PLUGIN_MAGIC, .abi_major = KVL_ABI_MAJOR, .abi_minor = KVL_ABI_MINOR,                                         \
        .struct_size = (kind_) == KVL_KIND_SCORE ? sizeof(struct kvl_score) : sizeof(struct kvl_budget), .kind = (kind_),          \
        .name = (name_), .summary = (summary_), .citation = (citation_), .n_options = sizeof(options_) / sizeof *(options_),       \
        .options = (options_), .private_size = sizeof(type_), .card = __VA_ARGS__                                                  \
    }

/* How the scores of the query heads of a kv head become one. */
enum kvl_score_group { KVL_GROUP_MEAN, KVL_GROUP_MAX, KVL_GROUP_SUM };
#define KVL_GROUP_OPTION(type, member)                                                                                             \
    {"gqa", "the score of a kv head from those of its query heads", KVL_OPTION_CHOICE, offsetof(type, member), KVL_GROUP_MEAN, 0, 0, "mean|max|sum"}

static inline double kvl_score_dot(const float *a, const float *b, uint32_t n)
{
    float part[8] = {0}; /* independent sums, so that the compiler can make vectors of them; an index of 32 bits may wrap and prevents it */
    double sum = 0.0;
    size_t c = 0;
    for (; c + 8 <= n; c += 8)
        for (size_t i = 0; i < 8; i++) part[i] += a[c + i] * b[c + i];
    for (size_t i = 0; i < 8; i++) sum += part[i];
    for (; c < n; c++) sum += a[c] * b[c];
    return sum;
}

static inline void kvl_score_softmax(double *x, uint32_t n)
{
    double top = -DBL_MAX, sum = 0.0;
    for (uint32_t i = 0; i < n; i++) top = fmax(top, x[i]);
    for (uint32_t i = 0; i < n; i++) sum += x[i] = exp(x[i] - top);
    for (uint32_t i = 0; i < n; i++) x[i] /= sum;
}

/* Token t's row of a kv head in k, k_pre or v. */
static inline const float *kvl_score_row(const struct kvl_score_input *in, const float *rows, uint32_t kv_head, uint32_t t)
{
    return rows + ((size_t)kv_head * in->n_token + t) * in->head_dim;
}

/* Whether the host says where tokens stand: since it calls ref() while tokens are decoded. */
static inline int kvl_score_has_positions(const struct kvl_score_input *in)
{
    return in->struct_size >= offsetof(struct kvl_score_input, next) + sizeof in->next && in->position != NULL;
}

/* Queries that have seen token t of a kv head, its own among them. */
static inline uint32_t kvl_score_seen_by(const struct kvl_score_input *in, uint32_t kv_head, uint32_t t)
{
    return kvl_score_has_positions(in) ? in->n_seen - in->position[(size_t)kv_head * in->n_token + t] : in->n_token - t;
}

static inline uint32_t kvl_score_next(const struct kvl_score_input *in) { return kvl_score_has_positions(in) ? in->next : in->n_token; }

/* Probabilities that query i of query head h gives to the tokens it sees; their number. p has room for T. */
static inline uint32_t kvl_score_attention(const struct kvl_score_input *in, uint32_t h, uint32_t i, double *p)
{
    const uint32_t seen = in->n_token - in->n_query + i + 1, kv_head = h / (in->n_head / in->n_kv_head);
    const float *q = in->q + ((size_t)h * in->n_query + i) * in->head_dim;
    for (uint32_t t = 0; t < seen; t++) p[t] = kvl_score_dot(q, kvl_score_row(in, in->k, kv_head, t), in->head_dim) / sqrt(in->head_dim);
    kvl_score_softmax(p, seen);
    return seen;
}

/* Probabilities that query i of a witness gives to the prompt's tokens from .. to - 1, when it sees these, the first `sinks` tokens and those of
 * the witness up to itself. p has room for sinks + to - from + w->n and begins with the wanted ones. */
static inline void kvl_score_witness(const struct kvl_score_input *in, const struct kvl_witness *w, uint32_t h, uint32_t i, uint32_t from, uint32_t to,
                                     uint32_t sinks, double *p)
{
    const uint32_t kv_head = h / (in->n_head / in->n_kv_head), d = in->head_dim;
    const float *q = w->q + ((size_t)h * w->n + i) * d, *own = w->k + (size_t)kv_head * w->n * d;
    uint32_t n = 0;
    for (uint32_t t = from; t < to; t++) p[n++] = kvl_score_dot(q, kvl_score_row(in, in->k, kv_head, t), d) / sqrt(d);
    for (uint32_t t = 0; t < sinks; t++) p[n++] = kvl_score_dot(q, kvl_score_row(in, in->k, kv_head, t), d) / sqrt(d);
    for (uint32_t t = 0; t <= i; t++) p[n++] = kvl_score_dot(q, own + (size_t)t * d, d) / sqrt(d);
    kvl_score_softmax(p, n);
}

/* Adds query head h's scores x [n] of tokens 0 .. n-1 to its kv head's. The first head of a group starts it. */
static inline void kvl_score_add_head(const struct kvl_score_input *in, int how, uint32_t h, const double *x, uint32_t n, float *score)
{
    const uint32_t group = in->n_head / in->n_kv_head;
    float *row = score + (size_t)(h / group) * in->n_token;
    for (uint32_t t = 0; t < n; t++) {
        const double before = h % group == 0 ? 0.0 : row[t];
        if (how == KVL_GROUP_MAX) row[t] = h % group == 0 ? (float)x[t] : fmaxf(row[t], (float)x[t]);
        else row[t] = (float)(before + (how == KVL_GROUP_MEAN ? x[t] / group : x[t]));
    }
}

static inline double kvl_score_norm(const float *x, uint32_t n) { return sqrt(kvl_score_dot(x, x, n)); }

/* Largest of tokens [from, to) over all kv heads; 0 if there are none. */
static inline float kvl_score_largest(const struct kvl_score_input *in, const float *score, uint32_t from, uint32_t to)
{
    float top = from < to ? -FLT_MAX : 0.0f;
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = from; t < to; t++) top = fmaxf(top, score[(size_t)h * in->n_token + t]);
    return top;
}

static inline void kvl_score_fill(const struct kvl_score_input *in, float *score, uint32_t from, uint32_t to, float value)
{
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = from; t < to; t++) score[(size_t)h * in->n_token + t] = value;
}

/* (x - mean) / unbiased standard deviation over all heads and tokens. */
static inline void kvl_score_z_norm(const struct kvl_score_input *in, float *score)
{
    const size_t n = (size_t)in->n_kv_head * in->n_token;
    double mean = 0.0, square = 0.0;
    for (size_t i = 0; i < n; i++) mean += score[i] / (double)n;
    for (size_t i = 0; i < n; i++) square += (score[i] - mean) * (score[i] - mean);
    const double deviation = fmax(n > 1 ? sqrt(square / (double)(n - 1)) : 0.0, 1e-6);
    for (size_t i = 0; i < n; i++) score[i] = (float)((score[i] - mean) / deviation);
}

static inline uint32_t kvl_score_min(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The k-th largest of n numbers, 1 <= k <= n. A copy of them is made in `room` [n]. */
static inline int kvl_score_descending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}
static inline float kvl_score_kth(const float *x, uint32_t n, uint32_t k, float *room)
{
    memcpy(room, x, n * sizeof *room);
    qsort(room, n, sizeof *room, kvl_score_descending);
    return room[k - 1];
}

#endif
