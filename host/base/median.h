/* The median of timings: the middle one, or the mean of the two in the middle. */
#ifndef KVL_MEDIAN_H
#define KVL_MEDIAN_H
#include <stddef.h>

/* Sorts `values` ascending; n > 0. So values[0] is the least and values[n - 1] the largest afterwards. */
double kvl_median(double *values, size_t n);

#endif
