/* ada: the heads of a layer compete for its budget (Ada-KV, Feng et al. 2024). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_budget_ada_card_md[];

struct ada {
    struct kvl_amount amount;
    double safeguard;
};

struct entry {
    float score;
    uint32_t at; /* head * T + token */
};

/* The better first; equal ones in order. */
static int by_score(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return (x->at > y->at) - (x->at < y->at);
}

static void sort_entries(const float *score, size_t n, struct entry *entry)
{
    for (size_t i = 0; i < n; i++) entry[i] = (struct entry){score[i], (uint32_t)i};
    qsort(entry, n, sizeof *entry, by_score);
}

static int ada_split(const void *priv, const struct kvl_budget_input *in, float *score, uint32_t *target)
{
    const struct ada *o = priv;
    const uint32_t n = in->n_token, heads = in->n_kv_head;
    const uint64_t all = (uint64_t)heads * target[0]; /* of the average */
    const uint32_t safe = kvl_score_min(n, (uint32_t)(o->safeguard * target[0]));
    struct entry *entry = calloc((size_t)heads * n, sizeof *entry);
    if (entry == NULL) return -1;
    for (uint32_t h = 0; h < heads; h++) {
        sort_entries(score + (size_t)h * n, n, entry);
        for (uint32_t i = 0; i < safe; i++) score[(size_t)h * n + entry[i].at] = FLT_MAX;
    }
    sort_entries(score, (size_t)heads * n, entry);
    memset(target, 0, heads * sizeof *target);
    for (uint64_t i = 0; i < all && i < (uint64_t)heads * n; i++) target[entry[i].at / n]++;
    free(entry);
    return 0;
}

static const struct kvl_option options[] = {
    KVL_AMOUNT_OPTIONS,
    {"safeguard", "share of the mean budget that every head gets", KVL_OPTION_FLOAT, offsetof(struct ada, safeguard), 0.2, 0, 1, NULL},
};

const struct kvl_budget kvl_budget_ada = {
    .head = KVL_SCORE_HEAD(KVL_KIND_BUDGET, "ada", "the heads of a layer compete for its budget", "arXiv:2407.11550", options, struct ada,
                           kvl_text_compress_budget_ada_card_md),
    .split = ada_split,
};
