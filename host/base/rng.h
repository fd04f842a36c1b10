/* Counter-based random numbers: the i-th number of a seed does not depend on how many were drawn before.
 * splitmix64 finalizer on (seed, index); see Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014). */
#ifndef KVL_RNG_H
#define KVL_RNG_H
#include <stdint.h>

uint64_t kvl_rng_u64(uint64_t seed, uint64_t index);
double kvl_rng_uniform(uint64_t seed, uint64_t index); /* [0, 1), 53 bits */
double kvl_rng_normal(uint64_t seed, uint64_t index);  /* Box-Muller on the pair (2 index, 2 index + 1) */

#endif
