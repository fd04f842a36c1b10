/* Rotations in front of a codec: x -> x R with R orthogonal, D x D, for every head alike.
 *
 * R = M (x) S: M is a dense m x m matrix, S Sylvester's +-1 Hadamard matrix of size D / m, a power of two; what makes R orthonormal is in M.
 *   hadamard  D a power of two: m = 1 (Sylvester, as QuaRot, arXiv:2404.00456). Else M is a Hadamard matrix of Paley's constructions I or II
 *             (Paley 1933) of the smallest size m for which D / m is a power of two
 *   random    m = D: Gram-Schmidt on a seeded Gaussian matrix, uniform over rotations (the Pi of TurboQuant, arXiv:2504.19874) */
#ifndef KVL_ROTATION_H
#define KVL_ROTATION_H
#include "spec.h"
#include "status.h"

/* Size m of the dense factor, 0 for KVL_ROT_NONE. KVL_E_USAGE with the fix if there is no such rotation of head_dim channels. */
kvl_status kvl_rotation_size(enum kvl_rotation kind, uint32_t head_dim, uint32_t *m);
/* M, then its transpose: [2][m][m]. */
kvl_status kvl_rotation_fill(enum kvl_rotation kind, uint64_t seed, uint32_t head_dim, uint32_t m, float *matrix);
/* The specification of a turn by R (or, with the transposed matrix, of its inverse), in place: butterflies of S, then M, each sum a chain of
 * fma in the order of the channels, so that devices get the same bits. */
kvl_status kvl_rotate(const float *matrix, uint32_t m, uint32_t head_dim, float *x);

#endif
