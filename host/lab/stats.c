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

/* ---- Student's t ---- */

/* The continued fraction of the incomplete beta function, by Lentz's method (NIST Handbook of Mathematical Functions, 8.17.22). */
static double beta_fraction(double x, double a, double b)
{
    const double tiny = 1e-300;
    double c = 1.0, d = 1.0 - (a + b) * x / (a + 1.0), f;
    d = 1.0 / (fabs(d) < tiny ? tiny : d);
    f = d;
    for (int m = 1; m < 10000; m++) {
        const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        double step = 1.0;
        for (int i = 0; i < 2; i++) {
            const double term = i == 0 ? even : odd;
            d = 1.0 + term * d;
            c = 1.0 + term / c;
            d = 1.0 / (fabs(d) < tiny ? tiny : d);
            if (fabs(c) < tiny) c = tiny;
            step = c * d;
            f *= step;
        }
        if (fabs(step - 1.0) < 1e-15) break;
    }
    return f;
}

/* Regularized incomplete beta function I_x(a, b). */
static double incomplete_beta(double x, double a, double b)
{
    if (x <= 0.0 || x >= 1.0) return x <= 0.0 ? 0.0 : 1.0;
    const double front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x));
    return x < (a + 1.0) / (a + b + 2.0) ? front * beta_fraction(x, a, b) / a : 1.0 - front * beta_fraction(1.0 - x, b, a) / b;
}

/* P(T > t), t >= 0. */
static double t_tail(double t, double df) { return 0.5 * incomplete_beta(df / (df + t * t), 0.5 * df, 0.5); }

double kvl_student_t_quantile(double q, double df)
{
    if (!(q > 0.0 && q < 1.0) || !(df > 0.0)) return NAN;
    const double tail = q < 0.5 ? q : 1.0 - q;
    double low = 0.0, high = 1.0;
    while (t_tail(high, df) > tail && high < 1e300) high *= 2.0;
    for (int i = 0; i < 200 && high - low > 1e-14 * high; i++) {
        const double middle = 0.5 * (low + high);
        if (t_tail(middle, df) > tail)
            low = middle;
        else
            high = middle;
    }
    return q < 0.5 ? -high : high;
}

struct kvl_interval kvl_t_interval(const struct kvl_moments *m)
{
    struct kvl_interval out = {.n = m->n, .mean = m->mean, .low = NAN, .high = NAN};
    if (m->n < 2) return out;
    const double half = kvl_student_t_quantile(0.975, (double)(m->n - 1)) * kvl_moments_se(m);
    out.low = m->mean - half;
    out.high = m->mean + half;
    return out;
}

const char *const kvl_verdict_name[KVL_VERDICTS] = {"exploratory", "not resolved", "lower", "higher", "equal"};

enum kvl_verdict kvl_verdict_of(const struct kvl_interval *d)
{
    if (d->mean == 0.0 && d->low == d->high) return KVL_EQUAL;
    if (d->n < KVL_ENOUGH_CHUNKS) return KVL_EXPLORATORY;
    if (d->high < 0.0) return KVL_LOWER;
    return d->low > 0.0 ? KVL_HIGHER : KVL_NOT_RESOLVED;
}

/* ---- order ---- */

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
