/* lagkv: how a token's channels vary when measured by the range of the next partition (Liang et al. 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_lagkv_card_md[];

enum cross { WITHIN, CROSS };

struct lagkv {
    int32_t sink, lag, cross;
};

static void lagkv_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_K | KVL_NEED_V; }

/* Unbiased standard deviation over channels of (x - low) / (high - low). */
static double spread(const float *x, const float *low, const float *high, uint32_t d)
{
    double mean = 0.0, square = 0.0;
    for (uint32_t c = 0; c < d; c++) mean += ((double)x[c] - low[c]) / ((double)high[c] - low[c]) / d;
    for (uint32_t c = 0; c < d; c++) {
        const double off = ((double)x[c] - low[c]) / ((double)high[c] - low[c]) - mean;
        square += off * off;
    }
    return sqrt(square / (d - 1));
}

/* Adds half the softmax over a partition's tokens of their spread to s [lag]; rows: the partition, followed by its reference. */
static void add_partition(const float *rows, uint32_t lag, uint32_t d, float *low, double *x, double *s)
{
    const float *reference = rows + (size_t)lag * d;
    float *high = low + d;
    memcpy(low, reference, d * sizeof *low);
    memcpy(high, reference, d * sizeof *high);
    for (uint32_t t = 1; t < lag; t++)
        for (uint32_t c = 0; c < d; c++) {
            low[c] = fminf(low[c], reference[(size_t)t * d + c]);
            high[c] = fmaxf(high[c], reference[(size_t)t * d + c]);
        }
    for (uint32_t t = 0; t < lag; t++) x[t] = spread(rows + (size_t)t * d, low, high, d);
    kvl_score_softmax(x, lag);
    for (uint32_t t = 0; t < lag; t++) s[t] += 0.5 * x[t];
}

/* Scores of a partition: its own numbers, or their rank in it. Equal ones rank by position. */
static void write_scores(const double *s, uint32_t lag, int cross, float *score)
{
    for (uint32_t t = 0; t < lag; t++) {
        uint32_t below = 0;
        for (uint32_t i = 0; i < lag; i++) below += s[i] < s[t] || (s[i] == s[t] && i < t);
        score[t] = cross == CROSS ? (float)s[t] : (float)below / (float)lag;
    }
}

/* Too short for a partition with a reference: the first tokens, then the newer the better. */
static void by_position(const struct kvl_score_input *in, uint32_t sink, float *score)
{
    kvl_score_fill(in, score, 0, sink, 1.0f);
    for (uint32_t t = sink; t < in->n_token; t++) kvl_score_fill(in, score, t, t + 1, (float)(t - sink) / (float)(in->n_token - sink));
}

static int lagkv_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct lagkv *o = priv;
    const uint32_t n = in->n_token, d = in->head_dim, lag = (uint32_t)o->lag, sink = kvl_score_min((uint32_t)o->sink, n);
    if (n < sink + 2 * (uint64_t)lag) {
        by_position(in, sink, score);
        return 0;
    }
    const uint32_t partitions = (n - sink) / lag;
    float *range = calloc(2 * d, sizeof *range);
    double *x = calloc(2 * lag, sizeof *x), *s = x + lag;
    const int failed = range == NULL || x == NULL;
    if (!failed) kvl_score_fill(in, score, 0, n, 1.0f); /* what no partition follows is kept */
    for (uint32_t h = 0; !failed && h < in->n_kv_head; h++)
        for (uint32_t p = 0; p + 1 < partitions; p++) {
            const uint32_t first = sink + p * lag;
            memset(s, 0, lag * sizeof *s);
            add_partition(kvl_score_row(in, in->k, h, first), lag, d, range, x, s);
            add_partition(kvl_score_row(in, in->v, h, first), lag, d, range, x, s);
            write_scores(s, lag, o->cross, score + (size_t)h * n + first);
        }
    free(range);
    free(x);
    return failed ? -1 : 0;
}

static const struct kvl_option options[] = {
    {"sink", "first tokens, kept", KVL_OPTION_INT, offsetof(struct lagkv, sink), 4, 0, INT32_MAX, NULL},
    {"lag", "tokens of a partition", KVL_OPTION_INT, offsetof(struct lagkv, lag), 128, 1, 1 << 20, NULL},
    {"scoring", "tokens compete within their partition, or with all", KVL_OPTION_CHOICE, offsetof(struct lagkv, cross), WITHIN, 0, 0, "within|cross"},
};

const struct kvl_score kvl_score_lagkv = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "lagkv", "spread of a token's channels in the range of the next partition", "arXiv:2504.04704", options,
                           struct lagkv, kvl_text_compress_score_lagkv_card_md),
    .needs = lagkv_needs,
    .ref = lagkv_ref,
};
