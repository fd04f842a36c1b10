/* chunk: tokens stay or go in chunks, by the mean of a score (ChunkKV, Liu et al. 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_chunk_card_md[];

struct chunk {
    int32_t size;
};

static double chunk_score(const struct kvl_score_input *in, const float *score, uint32_t from, uint32_t to)
{
    double sum = 0.0;
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = from; t < to; t++) sum += score[(size_t)h * in->n_token + t];
    return sum / (to - from);
}

/* The best chunks' tokens become protected in every head, and are all that is kept; equal chunks by position. */
static int chunk_wrap(const void *priv, const struct kvl_score_input *in, float *score, uint32_t *target)
{
    const uint32_t n = in->n_token, size = (uint32_t)((const struct chunk *)priv)->size, n_chunks = (n + size - 1) / size;
    const uint32_t wanted = (uint32_t)(n_chunks * in->fraction);
    if (n < size) return 0; /* not one whole chunk: the score decides token by token */
    double *mean = calloc(n_chunks, sizeof *mean);
    if (mean == NULL) return -1;
    for (uint32_t i = 0; i < n_chunks; i++) mean[i] = chunk_score(in, score, i * size, kvl_score_min(n, (i + 1) * size));
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n_chunks; i++) {
        const uint32_t from = i * size, to = kvl_score_min(n, from + size);
        uint32_t better = 0;
        for (uint32_t j = 0; j < n_chunks; j++) better += mean[j] > mean[i] || (mean[j] == mean[i] && j < i);
        const int stays = better < (wanted > 1 ? wanted : 1);
        kvl_score_fill(in, score, from, to, stays ? FLT_MAX : -FLT_MAX);
        if (stays) kept += to - from;
    }
    for (uint32_t h = 0; h < in->n_kv_head; h++) target[h] = kept;
    free(mean);
    return 0;
}

static const struct kvl_option options[] = {
    {"of", "the score that is changed", KVL_OPTION_SCORE, 0, 0, 0, 0, NULL},
    {"size", "tokens of a chunk", KVL_OPTION_INT, offsetof(struct chunk, size), 20, 1, 1 << 20, NULL},
};

const struct kvl_score kvl_score_chunk = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "chunk", "whole chunks, by the mean of a score over tokens and heads", "arXiv:2502.00299", options,
                           struct chunk, kvl_text_compress_score_chunk_card_md),
    .wrap = chunk_wrap,
};
