/* Statistics of log-likelihoods, as defined in the room's README. */
#ifndef KVL_STATS_H
#define KVL_STATS_H
#include <stddef.h>
#include <stdint.h>

/* Streaming mean and variance (Welford). */
struct kvl_moments {
    uint64_t n;
    double mean, m2;
};
void kvl_moments_add(struct kvl_moments *m, double x);
double kvl_moments_var(const struct kvl_moments *m); /* unbiased; 0 for n < 2 */
double kvl_moments_se(const struct kvl_moments *m);  /* sqrt(var / n) */

/* q-quantile (0..1) of Student's t distribution with df > 0 degrees of freedom. */
double kvl_student_t_quantile(double q, double df);

/* The mean of a sample, and its 95 % t-interval. */
struct kvl_interval {
    uint64_t n;
    double mean, low, high; /* low and high NaN for n < 2 */
};
struct kvl_interval kvl_t_interval(const struct kvl_moments *m);

/* What an interval of differences says: fewer than KVL_ENOUGH_CHUNKS values say nothing yet, and one around 0 nothing either way. */
enum { KVL_ENOUGH_CHUNKS = 16 };
enum kvl_verdict { KVL_EXPLORATORY, KVL_NOT_RESOLVED, KVL_LOWER, KVL_HIGHER, KVL_EQUAL, KVL_VERDICTS };
extern const char *const kvl_verdict_name[KVL_VERDICTS]; /* "exploratory", "not resolved", "lower", "higher", "equal" */
enum kvl_verdict kvl_verdict_of(const struct kvl_interval *difference);

/* q-quantile (0..1) of n values with linear interpolation between order statistics (type 7); sorts `values`. NaN if n == 0. */
double kvl_quantile(float *values, size_t n, double q);

#endif
