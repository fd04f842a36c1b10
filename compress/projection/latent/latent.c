/* latent: keys and values as coordinates in the leading principal directions of calibration rows, as Palu stores them (Chang et al. 2024), or xKV, where
 * layers share them (Chang et al. 2025). */
#include "kvl_plugin.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

extern const char kvl_text_compress_projection_latent_card_md[];

struct latent {
    int32_t rank, spread, heads, layers, read;
    double energy;
    const struct kvl_host *host;
};

enum { READ_AUTO, READ_ABSORBED, READ_REBUILT }; /* auto: absorbed where that can be */
enum { RANK_STEP = 16 /* of ranks that layers get by their tables: kernels read so many channels at once */ };

static const struct kvl_option options[] = {
    {"rank", "channels of a record, a multiple of 8 up to layers x heads x head_dim", KVL_OPTION_INT, offsetof(struct latent, rank), 32, 8, 65536, NULL},
    {"ranks", "each layer has `rank`, or they have it on average and lose the least share of energy", KVL_OPTION_CHOICE, offsetof(struct latent, spread), 0, 0,
     0, "equal|spread"},
    {"energy", "in place of rank: share of a layer's energy that its records hold; 0: not given", KVL_OPTION_FLOAT, offsetof(struct latent, energy), 0, 0, 1,
     NULL},
    {"heads", "kv heads of a layer that share a record", KVL_OPTION_INT, offsetof(struct latent, heads), 1, 1, 1024, NULL},
    {"layers", "neighbouring layers that share a record, which is made into rows again when it is read", KVL_OPTION_INT, offsetof(struct latent, layers), 1, 1,
     1024, NULL},
    {"read", "queries and outputs multiplied with the directions, or each key and value made when it is read", KVL_OPTION_CHOICE,
     offsetof(struct latent, read), 0, 0, 0, "auto|absorbed|rebuilt"},
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
static uint64_t row_of(const struct latent *latent, const struct kvl_projection_dims *dims)
{
    return (uint64_t)latent->layers * (uint32_t)latent->heads * dims->head_dim;
}

static int latent_shape(const void *priv, const struct kvl_projection_dims *dims, struct kvl_projection_shape *out)
{
    const struct latent *latent = priv;
    const uint64_t w = row_of(latent, dims);
    if (w > 16384) {
        latent->host->error("layers x heads x head_dim is more than 16384 channels: take fewer together");
        return 1;
    }
    if (latent->layers > 1 && latent->read == READ_ABSORBED) {
        latent->host->error("what layers share is made into each one's rows when it is read: leave read=absorbed out");
        return 1;
    }
    out->heads = (uint32_t)latent->heads;
    out->layers = (uint32_t)latent->layers;
    if (latent->spread && ((uint32_t)latent->rank > w || (uint32_t)latent->rank < min_u32(RANK_STEP, (uint32_t)w))) {
        latent->host->error("ranks=spread gives each layer, or group of them, 16 channels up to layers x heads x head_dim: rank is their mean");
        return 1;
    }
    out->rank = latent->spread || latent->energy > 0.0 ? 0 : (uint32_t)latent->rank;
    out->rebuilt = latent->read == READ_REBUILT;
    out->table_floats = (uint32_t)(w + w * w);
    return 0;
}

/* A table: energy [W], the mean square of a row's coordinate, falling; then the directions [W][W], orthonormal. It does not depend on the rank. */
static int latent_matrices(const void *priv, const struct kvl_projection_dims *dims, const float *table, float *down, float *up)
{
    const struct latent *latent = priv;
    const uint32_t w = (uint32_t)row_of(latent, dims), rank = dims->rank;
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
    const uint32_t w = (uint32_t)row_of(latent, dims);
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

/* Householder's reduction (Golub and Van Loan, Matrix Computations, 8.3.1): m [w][w] symmetric, becomes v^T t v with a tridiagonal t, d its diagonal and e beside it,
 * and v orthogonal. room [2 * w]. m is used up. */
static void tridiagonalize(double *m, uint32_t w, double *v, double *d, double *e, double *room)
{
    double *p = room, *beta = room + w;
    for (uint32_t k = 0; k < w; k++) {
        const uint32_t first = k + 1;
        double *u = m + (size_t)k * w, sum = 0.0, up = 0.0; /* what is beside the diagonal becomes the vector of the reflection that takes it away */
        for (uint32_t i = first; i < w; i++) sum += u[i] * u[i];
        d[k] = u[k];
        e[k] = first == w ? 0.0 : u[first] > 0.0 ? -sqrt(sum) : sqrt(sum);
        beta[k] = sum == 0.0 ? 0.0 : 1.0 / (sum - e[k] * u[first]);
        if (beta[k] == 0.0) continue;
        u[first] -= e[k];
        memset(p, 0, w * sizeof *p);
        for (uint32_t i = first; i < w; i++)
            for (uint32_t j = first; j < w; j++) p[j] += u[i] * m[(size_t)i * w + j];
        for (uint32_t i = first; i < w; i++) up += u[i] * (p[i] *= beta[k]);
        for (uint32_t i = first; i < w; i++) p[i] -= 0.5 * beta[k] * up * u[i];
        for (uint32_t i = first; i < w; i++)
            for (uint32_t j = first; j < w; j++) m[(size_t)i * w + j] -= u[i] * p[j] + p[i] * u[j];
    }
    for (uint32_t i = 0; i < w; i++)
        for (uint32_t j = 0; j < w; j++) v[(size_t)i * w + j] = i == j;
    for (uint32_t k = w; k-- > 0;) /* the last reflection first: those before it leave the rows in front alone */
        for (uint32_t i = k + 1; i < w; i++) {
            const double *u = m + (size_t)k * w;
            double *row = v + (size_t)i * w, dot = 0.0;
            for (uint32_t j = k + 1; j < w; j++) dot += row[j] * u[j];
            for (uint32_t j = k + 1; j < w; j++) row[j] -= beta[k] * dot * u[j];
        }
}

/* One implicit QL step on rows first .. last of t, which nothing couples to row last + 1 (the same, 8.3.5, from the other end). */
static void ql_step(uint32_t w, double *v, double *d, double *e, uint32_t first, uint32_t last)
{
    const double half = (d[first + 1] - d[first]) / (2.0 * e[first]);
    double bulge = d[last] - d[first] + e[first] / (half + copysign(hypot(half, 1.0), half)), sine = 1.0, cosine = 1.0, shift = 0.0;
    for (uint32_t i = last; i-- > first;) {
        const double f = sine * e[i], b = cosine * e[i], r = hypot(f, bulge);
        e[i + 1] = r;
        if (r == 0.0) { /* falls apart here */
            d[i + 1] -= shift;
            e[last] = 0.0;
            return;
        }
        sine = f / r;
        cosine = bulge / r;
        const double g = d[i + 1] - shift, h = (d[i] - g) * sine + 2.0 * cosine * b;
        shift = sine * h;
        d[i + 1] = g + shift;
        bulge = cosine * h - b;
        turn_rows(v, w, i, i + 1, cosine, sine);
    }
    d[first] -= shift;
    e[first] = bulge;
    e[last] = 0.0;
}

/* m becomes v^T diag(d) v: eigenvalues, and eigenvectors as rows. room [3 * w]. Non-zero: it did not converge. */
static int diagonalize(double *m, uint32_t w, double *v, double *d, double *room)
{
    enum { MOST_STEPS = 60 }; /* two are usual */
    double *e = room, largest = 0.0;
    tridiagonalize(m, w, v, d, e, room + w);
    for (uint32_t i = 0; i < w; i++) largest = fmax(largest, fabs(d[i]) + fabs(e[i]));
    for (uint32_t first = 0; first < w; first++)
        for (uint32_t steps = 0;; steps++) {
            uint32_t last = first;
            while (last + 1 < w && fabs(e[last]) > 1e-16 * largest) last++;
            if (last == first) break;
            if (steps == MOST_STEPS) return 1;
            ql_step(w, v, d, e, first, last);
        }
    return 0;
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

/* d: eigenvalues, the rows of v their eigenvectors. */
static void write_table(const double *d, const double *v, uint32_t w, struct direction *order, float *table)
{
    for (uint32_t i = 0; i < w; i++) order[i] = (struct direction){fmax(d[i], 0.0), i};
    qsort(order, w, sizeof *order, by_falling_energy);
    for (uint32_t r = 0; r < w; r++) {
        table[r] = (float)order[r].energy;
        for (uint32_t i = 0; i < w; i++) table[w + (size_t)r * w + i] = (float)v[(size_t)order[r].row * w + i];
    }
}

static int latent_calibrate(const void *priv, const struct kvl_projection_dims *dims, uint64_t n, const float *x, const struct kvl_calibration *out)
{
    const struct latent *latent = priv;
    const uint32_t w = (uint32_t)row_of(latent, dims);
    const size_t square = (size_t)w * w;
    double *m = malloc((2 * square + 4 * (size_t)w) * sizeof *m);
    float *table = malloc((w + square) * sizeof *table);
    struct direction *order = malloc(w * sizeof *order);
    int failed = m == NULL || table == NULL || order == NULL || n == 0;
    if (!failed) {
        double *v = m + square, *d = v + square;
        second_moments(n, x, w, m);
        failed = diagonalize(m, w, v, d, d + w);
        write_table(d, v, w, order, table);
        failed = failed || out->put(out->context, "energy", w, table) || out->put(out->context, "directions", (uint32_t)square, table + w);
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
             .summary = "coordinates of the keys or values of one or several heads, and layers, in the leading principal directions of a text's",
             .citation = "arXiv:2407.21118, arXiv:2503.18893",
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
