/* Statistics of logits rows [n][n_vocab] (float32), so that no row has to leave the device. One work-group a row.
 *
 *   KVL_WG     work-items a row, a power of two (1 on CPUs)
 *   KVL_LANES  floats a vector: 4, 8 or 16
 *
 * Every sum is compensated a vector lane (Kahan 1965), then added pairwise. The divergence is summed as
 *   KLD(p || q) = sum p (e^d - 1 - d),  d = log q - log p,
 * which equals the usual -sum p d because sum p e^d = sum q = 1. All its terms are positive, so nothing cancels, an error in the
 * normalizers enters in second order only, and equal rows give exactly 0. */
#pragma OPENCL FP_CONTRACT OFF
#ifndef KVL_WG
#define KVL_WG 1
#endif
#ifndef KVL_LANES
#define KVL_LANES 16
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define VEC JOIN(float, KVL_LANES)
#define IVEC JOIN(int, KVL_LANES)
#define VLOAD JOIN(vload, KVL_LANES)
#define VSTORE JOIN(vstore, KVL_LANES)

struct row_score { /* struct kvl_row_score of host/lab/logprob.h */
    float max, sum, nll;
    int argmax;
    uint n_bad;
};

/* Vector v of a row; lanes behind its end hold -FLT_MAX: finite, never the maximum, probability 0. */
VEC load_logits(const __global float *row, uint v, uint n_vocab)
{
    if ((v + 1) * KVL_LANES <= n_vocab) return VLOAD(v, row);
    float lane[KVL_LANES];
    for (uint i = 0; i < KVL_LANES; i++) lane[i] = v * KVL_LANES + i < n_vocab ? row[v * KVL_LANES + i] : -FLT_MAX;
    return VLOAD(0, lane);
}

struct running_sum {
    VEC total, lost;
};

void sum_add(struct running_sum *s, VEC x)
{
    const VEC y = x - s->lost, total = s->total + y;
    s->lost = (total - s->total) - y;
    s->total = total;
}

float sum_lanes(const struct running_sum *s)
{
    float lane[KVL_LANES];
    VSTORE(s->total - s->lost, 0, lane);
    for (uint width = KVL_LANES / 2; width > 0; width /= 2)
        for (uint i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

/* Sum over the work-group, known to every work-item. */
float sum_group(float x, __local float *shared)
{
    const uint item = get_local_id(0);
    shared[item] = x;
    for (uint width = KVL_WG / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < width) shared[item] += shared[item + width];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return shared[0];
}

bool is_better(float x, int id, float best, int best_id) { return x > best || (x == best && id < best_id); }

/* The largest logit of the row and its id (ties: the lower id) in best[0], best_id[0]; counts values that are not finite. */
void find_max(const __global float *row, uint n_vocab, __local float *best, __local int *best_id, __local uint *n_bad)
{
    const uint item = get_local_id(0), n_vectors = (n_vocab + KVL_LANES - 1) / KVL_LANES;
    VEC top = -FLT_MAX;
    IVEC top_vector = (int)item, bad = 0;
    for (uint v = item; v < n_vectors; v += KVL_WG) {
        const VEC x = load_logits(row, v, n_vocab);
        const IVEC higher = x > top;
        top = select(top, x, higher);
        top_vector = select(top_vector, (IVEC)((int)v), higher);
        bad += isfinite(x) + 1;
    }
    float top_lane[KVL_LANES];
    int vector_lane[KVL_LANES], bad_lane[KVL_LANES];
    VSTORE(top, 0, top_lane);
    VSTORE(top_vector, 0, vector_lane);
    VSTORE(bad, 0, bad_lane);
    best[item] = -FLT_MAX;
    best_id[item] = INT_MAX;
    n_bad[item] = 0;
    for (uint i = 0; i < KVL_LANES; i++) {
        const int id = vector_lane[i] * KVL_LANES + (int)i;
        if (is_better(top_lane[i], id, best[item], best_id[item])) {
            best[item] = top_lane[i];
            best_id[item] = id;
        }
        n_bad[item] += (uint)bad_lane[i];
    }
    for (uint width = KVL_WG / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < width) {
            if (is_better(best[item + width], best_id[item + width], best[item], best_id[item])) {
                best[item] = best[item + width];
                best_id[item] = best_id[item + width];
            }
            n_bad[item] += n_bad[item + width];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

__kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1)))
void logprob_score(const __global float *logits, const __global int *targets, uint n_vocab, __global struct row_score *out)
{
    __local float best[KVL_WG], shared[KVL_WG];
    __local int best_id[KVL_WG];
    __local uint n_bad[KVL_WG];
    const uint r = get_group_id(0), item = get_local_id(0), n_vectors = (n_vocab + KVL_LANES - 1) / KVL_LANES;
    const __global float *row = logits + (ulong)r * n_vocab;

    find_max(row, n_vocab, best, best_id, n_bad);
    const float top = best[0];
    struct running_sum lanes = {0.0f, 0.0f};
    for (uint v = item; v < n_vectors; v += KVL_WG) sum_add(&lanes, exp(load_logits(row, v, n_vocab) - top));
    const float sum = sum_group(sum_lanes(&lanes), shared);

    if (item == 0) {
        out[r].max = top;
        out[r].sum = sum;
        out[r].nll = log(sum) + (top - row[targets[r]]);
        out[r].argmax = best_id[0];
        out[r].n_bad = n_bad[0];
    }
}

/* e^d - 1 - d for |d| < 1 by its series: relative error below 1e-7. */
VEC exp_rest(VEC d)
{
    VEC s = 1.0f + d * (1.0f / 11.0f);
    s = 1.0f + d * (1.0f / 10.0f) * s;
    s = 1.0f + d * (1.0f / 9.0f) * s;
    s = 1.0f + d * (1.0f / 8.0f) * s;
    s = 1.0f + d * (1.0f / 7.0f) * s;
    s = 1.0f + d * (1.0f / 6.0f) * s;
    s = 1.0f + d * (1.0f / 5.0f) * s;
    s = 1.0f + d * (1.0f / 4.0f) * s;
    s = 1.0f + d * (1.0f / 3.0f) * s;
    return 0.5f * d * d * s;
}

/* out[r] = KLD(base || other) of row r in nats; the scores are those of logprob_score. */
__kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1)))
void logprob_kld(const __global float *base, const __global float *other, const __global struct row_score *base_score,
                 const __global struct row_score *other_score, uint n_vocab, __global float *out)
{
    __local float shared[KVL_WG];
    const uint r = get_group_id(0), item = get_local_id(0), n_vectors = (n_vocab + KVL_LANES - 1) / KVL_LANES;
    const __global float *base_row = base + (ulong)r * n_vocab, *other_row = other + (ulong)r * n_vocab;
    const struct row_score b = base_score[r], o = other_score[r];
    const float shift = (o.max - b.max) + log(o.sum / b.sum);

    struct running_sum lanes = {0.0f, 0.0f};
    for (uint v = item; v < n_vectors; v += KVL_WG) {
        const VEC x = load_logits(base_row, v, n_vocab), y = load_logits(other_row, v, n_vocab);
        const VEC p = exp(x - b.max) / b.sum, q = exp(y - o.max) / o.sum, d = (y - x) - shift;
        const VEC far = select(q - p * (1.0f + d), q, p == 0.0f);
        sum_add(&lanes, select(far, p * exp_rest(d), fabs(d) < 1.0f));
    }
    const float kld = sum_group(sum_lanes(&lanes), shared);
    if (item == 0) out[r] = kld;
}
