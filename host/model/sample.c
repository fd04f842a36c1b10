/* Filters in llama.cpp's default order: top-k, top-p, min-p, temperature.
 *
 * Each filter keeps a prefix of the tokens in falling order of logit (ties: the lower id first). top-p and min-p see
 * probabilities at temperature 1, top-p those of the tokens that top-k kept; temperature shapes only the final draw. The draw walks
 * the same order until the cumulated probability passes the step's random number.
 *
 * Few tokens of a vocabulary are looked at, so it is kept as a heap and put in order only as far as someone asks. */
#include "sample.h"
#include "mem.h"
#include "rng.h"
#include <math.h>
#include <stdbool.h>

struct candidate {
    float logit;
    int32_t id;
};

/* Heap in item[0, unsorted), best on top; behind it the tokens taken from it, the first of the order at item[n - 1]. */
struct order {
    struct candidate *item;
    size_t n, unsorted;
};

static bool before(struct candidate a, struct candidate b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

static void sift_down(struct order *o, size_t i)
{
    const struct candidate moved = o->item[i];
    for (size_t child; (child = 2 * i + 1) < o->unsorted; i = child) {
        if (child + 1 < o->unsorted && before(o->item[child + 1], o->item[child])) child++;
        if (!before(o->item[child], moved)) break;
        o->item[i] = o->item[child];
    }
    o->item[i] = moved;
}

static kvl_status order_new(struct order *o, const float *logits, size_t n)
{
    kvl_status status = kvl_alloc(&o->item, n, sizeof *o->item);
    if (status != KVL_OK) return status;
    o->n = o->unsorted = n;
    for (size_t i = 0; i < n; i++) o->item[i] = (struct candidate){logits[i], (int32_t)i};
    for (size_t i = n / 2; i-- > 0;) sift_down(o, i);
    return KVL_OK;
}

static struct candidate order_at(struct order *o, size_t i)
{
    while (o->n - o->unsorted <= i) {
        const struct candidate best = o->item[0];
        o->item[0] = o->item[--o->unsorted];
        o->item[o->unsorted] = best;
        sift_down(o, 0);
    }
    return o->item[o->n - 1 - i];
}

/* Probability relative to the best token. */
static double weight(struct order *o, struct candidate c, double temperature)
{
    return exp(((double)c.logit - (double)order_at(o, 0).logit) / temperature);
}

static double total_weight(struct order *o, size_t kept, double temperature)
{
    double sum = 0;
    order_at(o, kept < o->n ? kept - 1 : 0); /* all of them need no order */
    for (size_t i = o->n - kept; i < o->n; i++) sum += weight(o, o->item[i], temperature);
    return sum;
}

static size_t keep_top_p(struct order *o, size_t kept, double top_p)
{
    const double wanted = top_p * total_weight(o, kept, 1);
    double sum = 0;
    for (size_t i = 0; i < kept; i++) {
        sum += weight(o, order_at(o, i), 1);
        if (sum >= wanted) return i + 1;
    }
    return kept;
}

static size_t keep_min_p(struct order *o, size_t kept, double min_p)
{
    size_t i = 1;
    while (i < kept && weight(o, order_at(o, i), 1) >= min_p) i++;
    return i;
}

static int32_t draw(struct order *o, size_t kept, double temperature, double uniform)
{
    const double wanted = uniform * total_weight(o, kept, temperature);
    int32_t last = order_at(o, 0).id;
    double sum = 0;
    for (size_t i = 0; i < kept; i++) {
        const struct candidate c = order_at(o, i);
        const double w = weight(o, c, temperature);
        if (w == 0) break; /* only where rounding kept the sum below */
        last = c.id;
        sum += w;
        if (sum > wanted) break;
    }
    return last;
}

static kvl_status check_settings(const struct kvl_sampler *s)
{
    if (!(s->temperature >= 0 && isfinite(s->temperature)))
        return kvl_fail(KVL_E_USAGE, "temperature %g: wanted 0 (greedy) or more", s->temperature);
    if (s->top_k < 0) return kvl_fail(KVL_E_USAGE, "top-k %lld: wanted 0 (off) or more", (long long)s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1)) return kvl_fail(KVL_E_USAGE, "top-p %g: wanted above 0, at most 1 (off)", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1)) return kvl_fail(KVL_E_USAGE, "min-p %g: wanted 0 (off) to 1", s->min_p);
    return KVL_OK;
}

/* A logit of -inf is a token that cannot be drawn. */
static kvl_status find_best(const float *logits, size_t n, int32_t *best)
{
    size_t top = 0;
    for (size_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return kvl_fail(KVL_E_VERIFY, "logit of token %zu is %g, wanted a finite number", i, (double)logits[i]);
        if (logits[i] > logits[top]) top = i;
    }
    if (logits[top] == -INFINITY) return kvl_fail(KVL_E_VERIFY, "all logits are -inf: no token can be drawn");
    *best = (int32_t)top;
    return KVL_OK;
}

kvl_status kvl_sample(const struct kvl_sampler *sampler, const float *logits, size_t n_vocab, uint64_t step, int32_t *token)
{
    kvl_status status = KVL_OK;
    struct order order = {0};
    size_t kept = n_vocab;
    if (n_vocab == 0 || n_vocab > INT32_MAX) return kvl_fail(KVL_E_USAGE, "%zu logits: wanted 1 to %d", n_vocab, INT32_MAX);
    KVL_TRY(check_settings(sampler));
    KVL_TRY(find_best(logits, n_vocab, token));
    if (sampler->temperature == 0) return KVL_OK;
    KVL_TRY(order_new(&order, logits, n_vocab));
    if (sampler->top_k > 0 && (uint64_t)sampler->top_k < kept) kept = (size_t)sampler->top_k;
    if (sampler->top_p < 1) kept = keep_top_p(&order, kept, sampler->top_p);
    if (sampler->min_p > 0) kept = keep_min_p(&order, kept, sampler->min_p);
    *token = draw(&order, kept, sampler->temperature, kvl_rng_uniform(sampler->seed, step));
done:
    kvl_free(&order.item);
    return status;
}
