/* leverage: statistical leverage of the keys before RoPE, by a Gaussian sketch (Compactor, Chari and Van Durme 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_leverage_card_md[];

enum { TRIES = 5 };

struct leverage {
    int32_t sketch;
};

static void leverage_needs(const void *priv, struct kvl_score_needs *out)
{
    out->what = KVL_NEED_K | KVL_NEED_NORMALS;
    out->normals = (uint32_t)((const struct leverage *)priv)->sketch;
}

/* Lower factor of a + jitter I, in place. False if that is not positive definite. */
static int cholesky(double *a, uint32_t n, double jitter)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j <= i; j++) {
            double sum = a[(size_t)i * n + j] + (i == j ? jitter : 0.0);
            for (uint32_t c = 0; c < j; c++) sum -= a[(size_t)i * n + c] * a[(size_t)j * n + c];
            if (i == j && !(sum > 0.0)) return 0;
            a[(size_t)i * n + j] = i == j ? sqrt(sum) : sum / a[(size_t)j * n + j];
        }
    return 1;
}

/* |L^-1 x|^2. */
static double solved_square(const double *l, uint32_t n, const double *x, double *y)
{
    double square = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        double sum = x[i];
        for (uint32_t j = 0; j < i; j++) sum -= l[(size_t)i * n + j] * y[j];
        y[i] = sum / l[(size_t)i * n + i];
        square += y[i] * y[i];
    }
    return square;
}

/* x [T][s]: keys of a head, less their mean, times the sketch [D][s]. */
static void sketch_keys(const struct kvl_score_input *in, uint32_t h, uint32_t s, double *mean, double *x)
{
    const uint32_t d = in->head_dim, n = in->n_token;
    const float *sketch = in->normal + (size_t)h * d * s;
    for (uint32_t c = 0; c < d; c++) {
        mean[c] = 0.0;
        for (uint32_t t = 0; t < n; t++) mean[c] += kvl_score_row(in, in->k_pre, h, t)[c] / (double)n;
    }
    for (uint32_t t = 0; t < n; t++) {
        const float *k = kvl_score_row(in, in->k_pre, h, t);
        for (uint32_t j = 0; j < s; j++) x[(size_t)t * s + j] = 0.0;
        for (uint32_t c = 0; c < d; c++)
            for (uint32_t j = 0; j < s; j++) x[(size_t)t * s + j] += (k[c] - mean[c]) * sketch[(size_t)c * s + j] / sqrt(s);
    }
}

static void gram(const double *x, uint32_t n, uint32_t s, double *g)
{
    memset(g, 0, (size_t)s * s * sizeof *g);
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < s; i++)
            for (uint32_t j = 0; j <= i; j++) g[(size_t)i * s + j] += x[(size_t)t * s + i] * x[(size_t)t * s + j];
}

static int leverage_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct leverage *o = priv;
    const uint32_t s = (uint32_t)o->sketch, n = in->n_token;
    double *room = calloc((size_t)n * s + 2 * (size_t)s * s + in->head_dim + s, sizeof *room);
    double *x = room, *g = x + (size_t)n * s, *l = g + (size_t)s * s, *mean = l + (size_t)s * s, *y = mean + in->head_dim;
    int solved = room != NULL;
    for (uint32_t h = 0; solved && h < in->n_kv_head; h++) {
        double jitter = 1e-2;
        sketch_keys(in, h, s, mean, x);
        gram(x, n, s, g);
        solved = 0;
        for (int try = 0; !solved && try < TRIES; try++, jitter *= 10.0) {
            memcpy(l, g, (size_t)s * s * sizeof *l);
            solved = cholesky(l, s, jitter);
        }
        for (uint32_t t = 0; solved && t < n; t++) score[(size_t)h * n + t] = (float)solved_square(l, s, x + (size_t)t * s, y);
    }
    if (solved) kvl_score_z_norm(in, score);
    free(room);
    return solved ? 0 : -1;
}

static const struct kvl_option options[] = {
    {"sketch", "columns of the Gaussian sketch", KVL_OPTION_INT, offsetof(struct leverage, sketch), 48, 1, 1024, NULL},
};

const struct kvl_score kvl_score_leverage = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "leverage", "statistical leverage of the keys before RoPE", "arXiv:2507.08143", options, struct leverage,
                           kvl_text_compress_score_leverage_card_md),
    .needs = leverage_needs,
    .ref = leverage_ref,
};
