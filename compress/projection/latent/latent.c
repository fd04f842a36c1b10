/* latent: keys and values as coordinates in the leading principal directions of calibration rows, as Palu stores them (Chang et al. 2024). */
#include "kvl_plugin.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

extern const char kvl_text_compress_projection_latent_card_md[];

struct latent {
    int32_t rank, heads, read;
    const struct kvl_host *host;
};

static const struct kvl_option options[] = {
    {"rank", "channels of a record, a multiple of 8 up to heads x head_dim", KVL_OPTION_INT, offsetof(struct latent, rank), 32, 8, 65536, NULL},
    {"heads", "kv heads of a layer that share a record", KVL_OPTION_INT, offsetof(struct latent, heads), 1, 1, 1024, NULL},
    {"read", "queries and outputs multiplied with the directions, or each key and value made when it is read", KVL_OPTION_CHOICE,
     offsetof(struct latent, read), 0, 0, 0, "absorbed|rebuilt"},
    {"of", "codec of the record", KVL_OPTION_CODEC, 0, 0, 0, 0, NULL},
};

static int latent_init(void *priv, const struct kvl_host *host)
{
    ((struct latent *)priv)->host = host;
    return 0;
}

/* W: channels of a row. */
static uint32_t row_of(const struct latent *latent, const struct kvl_projection_dims *dims) { return (uint32_t)latent->heads * dims->head_dim; }

static int latent_shape(const void *priv, const struct kvl_projection_dims *dims, struct kvl_projection_shape *out)
{
    const struct latent *latent = priv;
    const uint64_t w = (uint64_t)latent->heads * dims->head_dim;
    if (w > 16384) {
        latent->host->error("heads x head_dim is more than 16384 channels: take fewer heads together");
        return 1;
    }
    out->heads = (uint32_t)latent->heads;
    out->rank = (uint32_t)latent->rank;
    out->rebuilt = latent->read == 1;
    out->table_floats = (uint32_t)(w + w * w);
    return 0;
}

/* A table: energy [W], the mean square of a row's coordinate, falling; then the directions [W][W], orthonormal. It does not depend on the rank. */
static int latent_matrices(const void *priv, const struct kvl_projection_dims *dims, const float *table, float *down, float *up)
{
    const struct latent *latent = priv;
    const uint32_t w = row_of(latent, dims), rank = (uint32_t)latent->rank;
    const float *direction = table + w;
    for (uint32_t i = 0; i < w; i++)
        for (uint32_t r = 0; r < rank; r++) down[(size_t)i * rank + r] = up[(size_t)i * rank + r] = direction[(size_t)r * w + i];
    return 0;
}

/* ---- calibration ---- */

/* m [w][w] = sum of x x^T / n. */
static void second_moments(uint64_t n, const float *x, uint32_t w, double *m)
{
    memset(m, 0, (size_t)w * w * sizeof *m);
    for (uint64_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < w; i++) {
            const double a = x[t * w + i];
            for (uint32_t j = 0; j <= i; j++) m[(size_t)i * w + j] += a * x[t * w + j];
        }
    for (uint32_t i = 0; i < w; i++)
        for (uint32_t j = 0; j <= i; j++) m[(size_t)j * w + i] = m[(size_t)i * w + j] /= (double)n;
}

/* Turns rows p and q of a [w][w] by the angle whose cosine and sine are given. */
static void turn_rows(double *a, uint32_t w, uint32_t p, uint32_t q, double cosine, double sine)
{
    double *x = a + (size_t)p * w, *y = a + (size_t)q * w;
    for (uint32_t i = 0; i < w; i++) {
        const double u = x[i], v = y[i];
        x[i] = cosine * u - sine * v;
        y[i] = sine * u + cosine * v;
    }
}

/* Makes m[p][q] zero by a turn of rows and columns, which v collects in its rows. Returns its square. */
static double annihilate(double *m, double *v, uint32_t w, uint32_t p, uint32_t q)
{
    const double off = m[(size_t)p * w + q];
    if (off == 0.0) return 0.0;
    const double slope = (m[(size_t)q * w + q] - m[(size_t)p * w + p]) / (2.0 * off);
    const double tangent = (slope < 0.0 ? -1.0 : 1.0) / (fabs(slope) + sqrt(slope * slope + 1.0));
    const double cosine = 1.0 / sqrt(tangent * tangent + 1.0), sine = tangent * cosine;
    turn_rows(m, w, p, q, cosine, sine);
    for (uint32_t i = 0; i < w; i++) { /* columns */
        double *row = m + (size_t)i * w;
        const double a = row[p], b = row[q];
        row[p] = cosine * a - sine * b;
        row[q] = sine * a + cosine * b;
    }
    turn_rows(v, w, p, q, cosine, sine);
    return off * off;
}

/* Jacobi's method, cyclic (Golub and Van Loan, Matrix Computations, 8.5): m becomes diagonal, and the rows of v its eigenvectors. */
static void diagonalize(double *m, double *v, uint32_t w)
{
    double trace = 0.0, off = INFINITY;
    for (uint32_t i = 0; i < w; i++) {
        trace += m[(size_t)i * w + i];
        for (uint32_t j = 0; j < w; j++) v[(size_t)i * w + j] = i == j;
    }
    for (int sweep = 0; sweep < 50 && sqrt(off) > 1e-14 * trace; sweep++) {
        off = 0.0;
        for (uint32_t p = 0; p < w; p++)
            for (uint32_t q = p + 1; q < w; q++) off += annihilate(m, v, w, p, q);
    }
}

struct direction {
    double energy;
    uint32_t row; /* of the eigenvectors */
};

static int by_falling_energy(const void *a, const void *b)
{
    const struct direction *x = a, *y = b;
    return x->energy != y->energy ? (x->energy < y->energy) - (x->energy > y->energy) : (x->row > y->row) - (x->row < y->row);
}

/* Eigenvalues on the diagonal of m, eigenvectors the rows of v. */
static void write_table(const double *m, const double *v, uint32_t w, struct direction *order, float *table)
{
    for (uint32_t i = 0; i < w; i++) order[i] = (struct direction){fmax(m[(size_t)i * w + i], 0.0), i};
    qsort(order, w, sizeof *order, by_falling_energy);
    for (uint32_t r = 0; r < w; r++) {
        table[r] = (float)order[r].energy;
        for (uint32_t i = 0; i < w; i++) table[w + (size_t)r * w + i] = (float)v[(size_t)order[r].row * w + i];
    }
}

static int latent_calibrate(const void *priv, const struct kvl_projection_dims *dims, uint64_t n, const float *x, const struct kvl_calibration *out)
{
    const struct latent *latent = priv;
    const uint32_t w = row_of(latent, dims);
    const size_t square = (size_t)w * w;
    double *m = malloc(2 * square * sizeof *m);
    float *table = malloc((w + square) * sizeof *table);
    struct direction *order = malloc(w * sizeof *order);
    int failed = m == NULL || table == NULL || order == NULL || n == 0;
    if (!failed) {
        second_moments(n, x, w, m);
        diagonalize(m, m + square, w);
        write_table(m, m + square, w, order, table);
        failed = out->put(out->context, "energy", w, table) || out->put(out->context, "directions", (uint32_t)square, table + w);
    }
    free(m);
    free(table);
    free(order);
    return failed;
}

const struct kvl_projection kvl_projection_latent = {
    .head = {.magic = KVL_PLUGIN_MAGIC,
             .abi_major = KVL_ABI_MAJOR,
             .abi_minor = KVL_ABI_MINOR,
             .struct_size = sizeof(struct kvl_projection),
             .kind = KVL_KIND_PROJECTION,
             .name = "latent",
             .summary = "coordinates of one or several heads' keys or values in the leading principal directions of a text's",
             .citation = "arXiv:2407.21118",
             .n_options = sizeof options / sizeof *options,
             .options = options,
             .private_size = sizeof(struct latent),
             .card = kvl_text_compress_projection_latent_card_md,
             .init = latent_init},
    .roles = KVL_ROLE_K | KVL_ROLE_V,
    .shape = latent_shape,
    .matrices = latent_matrices,
    .calibrate = latent_calibrate,
};
