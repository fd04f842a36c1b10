/* Statistics of log-likelihoods: see stats.h and the room's README. */
#include "stats.h"
#include <math.h>
#include <stdlib.h>

void kvl_moments_add(struct kvl_moments *m, double x)
{
    const double delta = x - m->mean;
    m->n++;
    m->mean += delta / (double)m->n;
    m->m2 += delta * (x - m->mean);
}

double kvl_moments_var(const struct kvl_moments *m) { return m->n < 2 ? 0.0 : m->m2 / (double)(m->n - 1); }

double kvl_moments_se(const struct kvl_moments *m) { return m->n == 0 ? 0.0 : sqrt(kvl_moments_var(m) / (double)m->n); }

/* NaN last, so that it shows in the upper quantiles instead of shuffling the order. */
static int compare_floats(const void *left, const void *right)
{
    const float a = *(const float *)left, b = *(const float *)right;
    if (isnan(a) || isnan(b)) return !!isnan(a) - !!isnan(b);
    return (a > b) - (a < b);
}

double kvl_quantile(float *values, size_t n, double q)
{
    if (n == 0 || isnan(q)) return NAN;
    qsort(values, n, sizeof *values, compare_floats);
    const double at = fmin(fmax(q, 0.0), 1.0) * (double)(n - 1);
    const size_t below = (size_t)at;
    const double weight = at - (double)below;
    if (weight == 0.0) return values[below]; /* also keeps 0 * infinity out */
    return (1.0 - weight) * values[below] + weight * values[below + 1];
}
