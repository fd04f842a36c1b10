/* critical: half the budget by a score, the rest by that score times what the value does to the output (CriticalKV, Feng et al. 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_critical_card_md[];

struct critical {
    double epsilon, first;
};

static void critical_needs(const void *priv, struct kvl_score_needs *out) { out->what = KVL_NEED_V | KVL_NEED_OUTPUT; }

/* Mean over a kv head's query heads of |W_O v|_1; column [E]. */
static double output_norm(const struct kvl_score_input *in, uint32_t kv_head, const float *v)
{
    const uint32_t d = in->head_dim, group = in->n_head / in->n_kv_head;
    double norm = 0.0;
    for (uint32_t g = 0; g < group; g++)
        for (uint32_t e = 0; e < in->n_embd; e++)
            norm += fabs(kvl_score_dot(in->w_o + (size_t)e * in->n_head * d + (size_t)(kv_head * group + g) * d, v, d));
    return norm / group;
}

/* The `count` best tokens of a head become protected; equal ones by position. */
static void protect(float *row, uint32_t n, uint32_t count, float *room)
{
    if (count == 0) return;
    const float edge = kvl_score_kth(row, n, count, room);
    uint32_t left = count;
    for (uint32_t t = 0; t < n; t++) left -= row[t] > edge;
    for (uint32_t t = 0; t < n; t++) {
        const int equal = row[t] == edge && left > 0;
        left -= (uint32_t)equal;
        if (row[t] > edge || equal) row[t] = FLT_MAX;
    }
}

static int critical_wrap(const void *priv, const struct kvl_score_input *in, float *score, uint32_t *target)
{
    const struct critical *o = priv;
    const uint32_t n = in->n_token;
    float *room = calloc(n, sizeof *room);
    if (room == NULL) return -1;
    for (uint32_t h = 0; h < in->n_kv_head; h++) {
        float *row = score + (size_t)h * n;
        protect(row, n, kvl_score_min(n, (uint32_t)(o->first * target[h])), room);
        for (uint32_t t = 0; t < n; t++)
            if (row[t] != FLT_MAX) row[t] = (float)((row[t] + o->epsilon) * output_norm(in, h, kvl_score_row(in, in->v, h, t)));
    }
    free(room);
    return 0;
}

static const struct kvl_option options[] = {
    {"of", "the score that is changed", KVL_OPTION_SCORE, 0, 0, 0, 0, NULL},
    {"epsilon", "added to the score", KVL_OPTION_FLOAT, offsetof(struct critical, epsilon), 1e-4, 0, 1, NULL},
    {"first", "share of the budget that the score alone decides", KVL_OPTION_FLOAT, offsetof(struct critical, first), 0.5, 0, 1, NULL},
};

const struct kvl_score kvl_score_critical = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "critical", "half by a score, the rest by score times the norm of W_O v", "arXiv:2502.03805", options,
                           struct critical, kvl_text_compress_score_critical_card_md),
    .needs = critical_needs,
    .wrap = critical_wrap,
};
