#include "evidence.h"
#include "mem.h"
#include <math.h>
#include <string.h>

static float dot(const float *a, const float *b, uint32_t n)
{
    float part[16] = {0}, sum = 0.0f; /* independent sums, so that the compiler can make vectors of them; an index of 32 bits may wrap and prevents it */
    size_t c = 0;
    for (; c + 16 <= n; c += 16)
        for (size_t i = 0; i < 16; i++) part[i] += a[c + i] * b[c + i];
    for (size_t i = 0; i < 16; i++) sum += part[i];
    for (; c < n; c++) sum += a[c] * b[c];
    return sum;
}

/* Adds the probabilities of one query to the tokens 0 .. n-1 that it sees. */
static void add_row(const float *q, const float *k, uint32_t n, uint32_t d, float *p, double *sum)
{
    const float scale = 1.0f / sqrtf((float)d);
    float top = -INFINITY;
    double total = 0.0;
    for (uint32_t t = 0; t < n; t++) top = fmaxf(top, p[t] = dot(q, k + (size_t)t * d, d) * scale);
    for (uint32_t t = 0; t < n; t++) total += p[t] = expf(p[t] - top);
    for (uint32_t t = 0; t < n; t++) sum[t] += p[t] / total;
}

kvl_status kvl_attention_columns(const struct kvl_score_input *in, float *column_sum)
{
    kvl_status status = KVL_OK;
    const uint32_t n = in->n_token, d = in->head_dim, group = in->n_head / in->n_kv_head;
    float *p = NULL;
    double *sum = NULL;
    KVL_TRY(kvl_alloc(&p, n, sizeof *p));
    KVL_TRY(kvl_alloc(&sum, n, sizeof *sum));
    for (uint32_t h = 0; h < in->n_head; h++) {
        const float *q = in->q + (size_t)h * n * d, *k = in->k + (size_t)(h / group) * n * d;
        memset(sum, 0, n * sizeof *sum);
        for (uint32_t i = 0; i < n; i++) add_row(q + (size_t)i * d, k, i + 1, d, p, sum);
        for (uint32_t t = 0; t < n; t++) column_sum[(size_t)h * n + t] = (float)sum[t];
    }
done:
    kvl_free(&p);
    kvl_free(&sum);
    return status;
}

static void head_stats(const float *q, uint32_t n, uint32_t d, double *sum, float *mean, float *covariance)
{
    double *square = sum + d;
    memset(sum, 0, ((size_t)d + (size_t)d * d) * sizeof *sum);
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < d; c++) sum[c] += q[(size_t)t * d + c] / (double)n;
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < d; i++) {
            const double x = (q[(size_t)t * d + i] - sum[i]) / (double)n;
            for (uint32_t j = 0; j <= i; j++) square[(size_t)i * d + j] += x * (q[(size_t)t * d + j] - sum[j]);
        }
    for (uint32_t i = 0; i < d; i++) {
        mean[i] = (float)sum[i];
        for (uint32_t j = 0; j <= i; j++) covariance[(size_t)i * d + j] = covariance[(size_t)j * d + i] = (float)square[(size_t)i * d + j];
    }
}

kvl_status kvl_query_stats(const float *q, uint32_t n_head, uint32_t n_token, uint32_t head_dim, uint32_t first, float *mean, float *covariance)
{
    kvl_status status = KVL_OK;
    const uint32_t n = n_token > first ? n_token - first : 0;
    double *sum = NULL;
    KVL_TRY(kvl_alloc(&sum, (size_t)head_dim * (head_dim + 1u), sizeof *sum));
    for (uint32_t h = 0; h < n_head; h++)
        head_stats(q + ((size_t)h * n_token + n_token - n) * head_dim, n, head_dim, sum, mean + (size_t)h * head_dim,
                   covariance + (size_t)h * head_dim * head_dim);
done:
    kvl_free(&sum);
    return status;
}

/* ---- what an eviction costs ---- */

struct loss {
    double lost, wrong, whole; /* sums: attention to evicted tokens; squares of the output's change and of the output */
};

/* One query, which sees the first `seen` tokens of k and v [..][D]; stays [T]: which of the prompt's do. p, two [2][D]: room. */
static void add_loss(const float *q, const float *k, const float *v, uint32_t seen, uint32_t d, const bool *stays, uint32_t n_token, float *p, float *two,
                     struct loss *loss)
{
    const float scale = 1.0f / sqrtf((float)d);
    float top = -INFINITY;
    double mass[2] = {0}; /* of evicted tokens, of kept and later ones */
    memset(two, 0, 2 * (size_t)d * sizeof *two);
    for (uint32_t t = 0; t < seen; t++) top = fmaxf(top, p[t] = dot(q, k + (size_t)t * d, d) * scale);
    for (uint32_t t = 0; t < seen; t++) {
        const bool there = t >= n_token || stays[t];
        const float weight = expf(p[t] - top), *value = v + (size_t)t * d;
        float *sum = two + (there ? d : 0);
        mass[there] += weight;
        for (uint32_t c = 0; c < d; c++) sum[c] += weight * value[c];
    }
    loss->lost += mass[0] / (mass[0] + mass[1]);
    for (uint32_t c = 0; c < d; c++) {
        const double whole = ((double)two[c] + two[d + c]) / (mass[0] + mass[1]), kept = two[d + c] / mass[1];
        loss->wrong += (kept - whole) * (kept - whole);
        loss->whole += whole * whole;
    }
}

kvl_status kvl_eviction_loss(const struct kvl_selection *kept, uint32_t n_head, uint32_t head_dim, uint32_t n, const float *q, const float *k,
                             const float *v, float *mass_lost, float *output_error)
{
    kvl_status status = KVL_OK;
    const uint32_t group = n_head / kept->n_kv_head, n_all = kept->n_token + n;
    bool *stays = NULL;
    float *p = NULL, *two = NULL;
    KVL_TRY(kvl_alloc(&stays, kept->n_token, sizeof *stays));
    KVL_TRY(kvl_alloc(&p, n_all, sizeof *p));
    KVL_TRY(kvl_alloc(&two, 2 * (size_t)head_dim, sizeof *two));
    for (uint32_t h = 0; h < kept->n_kv_head; h++) {
        struct loss loss = {0};
        const size_t rows = (size_t)h * n_all * head_dim;
        memset(stays, 0, kept->n_token * sizeof *stays);
        for (uint32_t i = kept->offset[h]; i < kept->offset[h + 1]; i++) stays[kept->token[i]] = true;
        for (uint32_t row = 0; row < group * n; row++)
            add_loss(q + ((size_t)h * group * n + row) * head_dim, k + rows, v + rows, kept->n_token + row % n + 1, head_dim, stays, kept->n_token, p,
                     two, &loss);
        mass_lost[h] = (float)(loss.lost / (group * n));
        output_error[h] = (float)sqrt(loss.wrong / loss.whole);
    }
done:
    kvl_free(&stays);
    kvl_free(&p);
    kvl_free(&two);
    return status;
}
