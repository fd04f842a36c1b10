/* pyramid: lower layers keep more (PyramidKV, Cai et al. 2024). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_budget_pyramid_card_md[];

struct pyramid {
    struct kvl_amount amount;
    double beta;
    int32_t window;
};

/* An arithmetic sequence over the layers with the wanted mean; uniform where its least would fall below the window. Halves round to even. */
static int pyramid_target(const void *priv, const struct kvl_budget_input *in, uint32_t *target)
{
    const struct pyramid *o = priv;
    const double n = in->n_token, w = o->window, body = (w + n * in->fraction) - w;
    double least = body / o->beta, most = body * 2.0 - least;
    if (most >= n - w) {
        most = n - w;
        least = body * 2.0 - most;
    }
    const int fits = n >= most && most >= least && least >= w && in->n_layer > 1;
    const double wanted = fits ? rint(most - in->layer * ((most - least) / (in->n_layer - 1))) : rint(n * in->fraction);
    *target = wanted < 0.0 ? 0 : (uint32_t)wanted;
    return 0;
}

static const struct kvl_option options[] = {
    KVL_AMOUNT_OPTIONS,
    {"beta", "how steep: the least layer keeps 1/beta of the mean", KVL_OPTION_FLOAT, offsetof(struct pyramid, beta), 20, 1, 1e6, NULL},
    {"window", "the score's window, which every layer keeps", KVL_OPTION_INT, offsetof(struct pyramid, window), 64, 0, INT32_MAX, NULL},
};

const struct kvl_budget kvl_budget_pyramid = {
    .head = KVL_SCORE_HEAD(KVL_KIND_BUDGET, "pyramid", "lower layers keep more", "arXiv:2406.02069", options, struct pyramid,
                           kvl_text_compress_budget_pyramid_card_md),
    .layer_target = pyramid_target,
};
