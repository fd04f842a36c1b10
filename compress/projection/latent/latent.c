/* latent: keys and values as coordinates in the leading principal directions of calibration rows, as Palu stores them (Chang et al. 2024). */
#include "kvl_plugin.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

extern const char kvl_text_compress_projection_latent_card_md[];

struct latent {
    int32_t rank, spread, heads, read;
    double energy;
    const struct kvl_host *host;
};

enum { RANK_STEP = 16 /* of ranks that layers get by their tables: kernels read so many channels at once */ };

static const struct kvl_option options[] = {
    {"rank", "channels of a record, a multiple of 8 up to heads x head_dim", KVL_OPTION_INT, offsetof(struct latent, rank), 32, 8, 65536, NULL},
    {"ranks", "each layer has `rank`, or they have it on average and lose the least share of energy", KVL_OPTION_CHOICE, offsetof(struct latent, spread), 0, 0,
     0, "equal|spread"},
    {"energy", "in place of rank: share of a layer's energy that its records hold; 0: not given", KVL_OPTION_FLOAT, offsetof(struct latent, energy), 0, 0, 1,
     NULL},
    {"heads", "kv heads of a layer that share a record", KVL_OPTION_INT, offsetof(struct latent, heads), 1, 1, 1024, NULL},
    {"read", "queries and outputs multiplied with the directions, or each key and value made when it is read", KVL_OPTION_CHOICE,
     offsetof(struct latent, read), 0, 0, 0, "absorbed|rebuilt"},
    {"of", "codec of the record", KVL_OPTION_CODEC, 0, 0, 0, 0, NULL},
};

static int latent_init(void *priv, const struct kvl_host *host)
{
    struct latent *latent = priv;
    latent->host = host;
    if (latent->energy == 0.0 || !latent->spread) return 0;
    host->error("latent: energy= says each layer's rank, ranks=spread shares out the rank that is given: use one of them");
    return 1;
}

static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

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
    if (latent->spread && ((uint32_t)latent->rank > w || (uint32_t)latent->rank < min_u32(RANK_STEP, (uint32_t)w))) {
        latent->host->error("ranks=spread gives each layer 16 channels up to heads x head_dim: rank is their mean");
        return 1;
    }
    out->rank = latent->spread || latent->energy > 0.0 ? 0 : (uint32_t)latent->rank;
    out->rebuilt = latent->read == 1;
    out->table_floats = (uint32_t)(w + w * w);
    return 0;
}

/* A table: energy [W], the mean square of a row's coordinate, falling; then the directions [W][W], orthonormal. It does not depend on the rank. */
static int latent_matrices(const void *priv, const struct kvl_projection_dims *dims, const float *table, float *down, float *up)
{
    const struct latent *latent = priv;
    const uint32_t w = row_of(latent, dims), rank = dims->rank;
    const float *direction = table + w;
    for (uint32_t i = 0; i < w; i++)
        for (uint32_t r = 0; r < rank; r++) down[(size_t)i * rank + r] = up[(size_t)i * rank + r] = direction[(size_t)r * w + i];
    return 0;
}

/* ---- ranks by the tables ---- */

/* Energy of directions [first, end) of all streams of layer l. */
static double energy_of(const struct kvl_projection_tables *in, uint32_t l, uint32_t first, uint32_t end)
{
    double sum = 0.0;
    for (uint32_t s = 0; s < in->n_stream; s++) {
        const float *energy = in->values + ((size_t)l * in->n_stream + s) * in->table_floats;
        for (uint32_t r = first; r < end; r++) sum += energy[r];
    }
    return sum;
}

/* The least rank whose directions hold the share. */
static uint32_t rank_of_energy(const struct kvl_projection_tables *in, uint32_t l, uint32_t w, double share)
{
    const double all = energy_of(in, l, 0, w);
    uint32_t rank = min_u32(RANK_STEP, w);
    while (rank < w && energy_of(in, l, 0, rank) < share * all) rank = min_u32(rank + RANK_STEP, w);
    return rank;
}

/* A layer whose rank grows. */
struct growing {
    double all, gain; /* its energy, and the share of it that the next step holds */
    uint32_t step;    /* directions; 0: it has all */
};

static void look_ahead(const struct kvl_projection_tables *in, uint32_t l, uint32_t w, uint32_t rank, struct growing *layer)
{
    layer->step = min_u32(RANK_STEP, w - rank);
    layer->gain = layer->all > 0.0 ? energy_of(in, l, rank, rank + layer->step) / layer->all : 0.0;
}

/* The layer that gains most by a step of at most `budget` directions; n if there is none. */
static uint32_t neediest(const struct growing *layer, uint32_t n, uint64_t budget)
{
    uint32_t best = n;
    for (uint32_t l = 0; l < n; l++)
        if (layer[l].step != 0 && layer[l].step <= budget && (best == n || layer[l].gain > layer[best].gain)) best = l;
    return best;
}

/* Directions go step by step to the layer that gains most by them; as energies fall, no other choice of as many loses less. */
static int spread_ranks(const struct kvl_projection_tables *in, uint32_t w, uint64_t budget, uint32_t *rank)
{
    struct growing *layer = malloc(in->n_layer * sizeof *layer);
    if (layer == NULL) return 1;
    for (uint32_t l = 0; l < in->n_layer; l++) {
        budget -= rank[l] = min_u32(RANK_STEP, w);
        layer[l].all = energy_of(in, l, 0, w);
        look_ahead(in, l, w, rank[l], &layer[l]);
    }
    for (uint32_t l; (l = neediest(layer, in->n_layer, budget)) < in->n_layer;) {
        budget -= layer[l].step;
        rank[l] += layer[l].step;
        look_ahead(in, l, w, rank[l], &layer[l]);
    }
    free(layer);
    return 0;
}

static int latent_ranks(const void *priv, const struct kvl_projection_dims *dims, const struct kvl_projection_tables *in, uint32_t *rank)
{
    const struct latent *latent = priv;
    const uint32_t w = row_of(latent, dims);
    if (latent->spread) return spread_ranks(in, w, (uint64_t)in->n_layer * (uint32_t)latent->rank, rank);
    for (uint32_t l = 0; l < in->n_layer; l++) rank[l] = rank_of_energy(in, l, w, latent->energy);
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
    .ranks = latent_ranks,
};
