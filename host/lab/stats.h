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

/* q-quantile (0..1) of n values with linear interpolation between order statistics (type 7); sorts `values`. NaN if n == 0. */
double kvl_quantile(float *values, size_t n, double q);

#endif
