#include "rotation.h"
#include "mem.h"
#include "rng.h"
#include <math.h>
#include <string.h>

/* ---- Hadamard matrices ---- */

static bool is_power_of_two(uint32_t n) { return n != 0 && (n & (n - 1)) == 0; }

static bool is_prime(uint32_t n)
{
    if (n < 2) return false;
    for (uint32_t i = 2; (uint64_t)i * i <= n; i++)
        if (n % i == 0) return false;
    return true;
}

/* Paley's constructions over the field of q elements, q prime: I gives q + 1 if q = 3 mod 4, II gives 2 (q + 1) if q = 1 mod 4. */
static bool is_paley_one(uint32_t m) { return m > 2 && is_prime(m - 1) && (m - 1) % 4 == 3; }
static bool is_paley_two(uint32_t m) { return m % 4 == 0 && is_prime(m / 2 - 1) && (m / 2 - 1) % 4 == 1; }

/* 1, -1 or 0: whether a is a square other than 0 in the field of q elements. */
static int quadratic_character(int64_t a, uint32_t q)
{
    const uint32_t r = (uint32_t)((a % q + q) % q);
    if (r == 0) return 0;
    for (uint64_t x = 1; x <= q / 2; x++)
        if (x * x % q == r) return 1;
    return -1;
}

/* Entry of Paley's conference matrix of size q + 1: a border of ones around the characters of i - j. */
static int conference(uint32_t i, uint32_t j, uint32_t q)
{
    if (i == j) return 0;
    if (i == 0) return 1;
    if (j == 0) return q % 4 == 1 ? 1 : -1;
    return quadratic_character((int64_t)i - j, q);
}

static int paley_one(uint32_t i, uint32_t j, uint32_t m) { return i == j ? 1 : conference(i, j, m - 1); }

/* Every entry of the conference matrix becomes a 2 x 2 block. */
static int paley_two(uint32_t i, uint32_t j, uint32_t m)
{
    static const int of_zero[2][2] = {{1, -1}, {-1, -1}}, of_one[2][2] = {{1, 1}, {1, -1}};
    const int entry = conference(i / 2, j / 2, m / 2 - 1);
    return entry == 0 ? of_zero[i % 2][j % 2] : entry * of_one[i % 2][j % 2];
}

kvl_status kvl_rotation_size(enum kvl_rotation kind, uint32_t head_dim, uint32_t *m)
{
    *m = kind == KVL_ROT_NONE ? 0 : kind == KVL_ROT_RANDOM || !is_power_of_two(head_dim) ? head_dim : 1;
    if (kind != KVL_ROT_HADAMARD || *m == 1) return KVL_OK;
    uint32_t odd = head_dim;
    while (odd % 2 == 0) odd /= 2;
    for (*m = 4 * odd; *m <= head_dim; *m *= 2)
        if (head_dim % *m == 0 && (is_paley_one(*m) || is_paley_two(*m))) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "--kv: rot=hadamard: no Hadamard matrix for head_dim %u (sizes are powers of two times 1, 12, 20, 28, 36 ...): "
                                 "use rot=random", head_dim);
}

static void fill_hadamard(uint32_t head_dim, uint32_t m, float *matrix)
{
    const double scale = 1.0 / sqrt((double)head_dim);
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < m; j++)
            matrix[(size_t)i * m + j] = (float)(scale * (m == 1 ? 1 : is_paley_one(m) ? paley_one(i, j, m) : paley_two(i, j, m)));
}

/* ---- random ---- */

static double dot(const double *a, const double *b, uint32_t n)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Gram-Schmidt, twice for orthogonality to rounding. */
static kvl_status fill_random(uint64_t seed, uint32_t m, float *matrix)
{
    kvl_status status = KVL_OK;
    double *row = NULL;
    KVL_TRY(kvl_alloc(&row, (size_t)m * m, sizeof *row));
    for (size_t i = 0; i < (size_t)m * m; i++) row[i] = kvl_rng_normal(seed, i);
    for (uint32_t i = 0; i < m; i++) {
        double *x = row + (size_t)i * m;
        for (int pass = 0; pass < 2; pass++)
            for (uint32_t j = 0; j < i; j++) {
                const double *y = row + (size_t)j * m, along = dot(x, y, m);
                for (uint32_t c = 0; c < m; c++) x[c] -= along * y[c];
            }
        const double length = sqrt(dot(x, x, m));
        for (uint32_t c = 0; c < m; c++) x[c] /= length;
    }
    for (size_t i = 0; i < (size_t)m * m; i++) matrix[i] = (float)row[i];
done:
    kvl_free(&row);
    return status;
}

kvl_status kvl_rotation_fill(enum kvl_rotation kind, uint64_t seed, uint32_t head_dim, uint32_t m, float *matrix)
{
    kvl_status status = KVL_OK;
    if (kind == KVL_ROT_RANDOM) status = fill_random(seed, m, matrix);
    else fill_hadamard(head_dim, m, matrix);
    if (status != KVL_OK) return status;
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < m; j++) matrix[((size_t)m + j) * m + i] = matrix[(size_t)i * m + j];
    return KVL_OK;
}

kvl_status kvl_rotate(const float *matrix, uint32_t m, uint32_t head_dim, float *x)
{
    const uint32_t s = head_dim / m;
    kvl_status status = KVL_OK;
    float *y = NULL;
    KVL_TRY(kvl_alloc(&y, head_dim, sizeof *y));
    for (uint32_t half = 1; half < s; half *= 2)
        for (uint32_t i = 0; i < head_dim; i += 2 * half)
            for (uint32_t j = i; j < i + half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    for (uint32_t a = 0; a < m; a++)
        for (uint32_t i = 0; i < head_dim; i++) y[i] = fmaf(x[a * s + i % s], matrix[(size_t)a * m + i / s], y[i]);
    memcpy(x, y, head_dim * sizeof *x);
done:
    kvl_free(&y);
    return status;
}
