#include "rng.h"
#include <math.h>

uint64_t kvl_rng_u64(uint64_t seed, uint64_t index)
{
    uint64_t z = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double kvl_rng_uniform(uint64_t seed, uint64_t index) { return (double)(kvl_rng_u64(seed, index) >> 11) * 0x1p-53; }

double kvl_rng_normal(uint64_t seed, uint64_t index)
{
    const double u = 1.0 - kvl_rng_uniform(seed, 2 * index), v = kvl_rng_uniform(seed, 2 * index + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
