/* pages.cl: which pages of a stream the newest query reads (Tang et al. 2024, Quest, arXiv:2406.10774). Of each whole page the least and the largest
 * value of every channel of its keys are kept, as the codec gives them back. A query q cannot score a key of the page higher than
 *
 *   sum over channels c of max(q[c] least[c], q[c] largest[c])
 *
 * The query heads that share a page take the largest of their bounds, or (KVL_BOUND_SUM) their sum; the pages with the highest are read, of equal ones those
 * in front. Bounds lie in `bounds` [H][most][2][KVL_DK], binary16 with KVL_EXACT_HALF, else binary32.
 *
 *   KVL_PAGES_EACH   pages that a work-item scores: more than one where it is a group of its own */

#define KVL_BOUND_AT(h, page, is_largest) ((((ulong)(h) * most + (page)) * 2 + (is_largest)) * KVL_DK)

/* Bounds of the pages that the next n tokens have made whole; one work-item a stream, such a page and eight channels. */
kernel void kvl_bound_pages(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global const float *tables, global uchar *bounds,
                            ulong bounds_offset, uint most, KVL_VIEW_PARAMS)
{
    table += table_offset;
    bounds += bounds_offset;
    const uint h = get_global_id(0), c = get_global_id(2) * 8;
    KVL_HEAD_VIEW(h)
    const kvl_view view = KVL_VIEW_INIT;
    const uint k_before = kvl_sealed_end(p0, sink, KVL_K_TAIL, KVL_K_UNIT), v_before = kvl_sealed_end(p0, sink, KVL_V_TAIL, KVL_V_UNIT);
    const uint page = kvl_whole_pages(k_before, v_before, p0, sink) + get_global_id(1);
    if (page >= kvl_whole_pages(k_sealed, v_sealed, p0 + n, sink)) return;
    float least[8], largest[8];
    for (uint t = 0; t < KVL_PAGE; t++) {
        const uint slot = page * KVL_PAGE + t;
        float k[8];
        kvl_k_load8(kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, slot, view)]), kvl_k_table(tables, h, view), slot % KVL_K_P, c, k);
        for (uint i = 0; i < 8; i++) {
            least[i] = t == 0 ? k[i] : fmin(least[i], k[i]);
            largest[i] = t == 0 ? k[i] : fmax(largest[i], k[i]);
        }
    }
    for (uint i = 0; i < 8; i++) {
#if KVL_EXACT_HALF
        kvl_store_half(bounds, KVL_BOUND_AT(h, page, 0) + c + i, least[i]);
        kvl_store_half(bounds, KVL_BOUND_AT(h, page, 1) + c + i, largest[i]);
#else
        ((global float *)bounds)[KVL_BOUND_AT(h, page, 0) + c + i] = least[i];
        ((global float *)bounds)[KVL_BOUND_AT(h, page, 1) + c + i] = largest[i];
#endif
    }
}

/* The most that query row q can score on the page whose bounds begin at `at`. */
float kvl_score_bound(const global float *q, const global uchar *bounds, ulong at)
{
#if KVL_VECTORS
    float16 sums = 0.0f;
    for (uint c = 0; c < KVL_DK; c += 16) {
        const float16 x = vload16(0, q + c);
#if KVL_EXACT_HALF
        sums += kvl_larger(x * vload_half16(0, (const global half *)bounds + at + c), x * vload_half16(0, (const global half *)bounds + at + KVL_DK + c));
#else
        sums += kvl_larger(x * vload16(0, (const global float *)bounds + at + c), x * vload16(0, (const global float *)bounds + at + KVL_DK + c));
#endif
    }
    return kvl_sum16(sums);
#else
    float sum = 0.0f;
    for (uint c = 0; c < KVL_DK; c++) {
#if KVL_EXACT_HALF
        sum += fmax(q[c] * kvl_load_half(bounds, at + c), q[c] * kvl_load_half(bounds, at + KVL_DK + c));
#else
        sum += fmax(q[c] * ((const global float *)bounds)[at + c], q[c] * ((const global float *)bounds)[at + KVL_DK + c]);
#endif
    }
    return sum;
#endif
}

/* Whole numbers in the order of floats; NaN is the least. A sum is never -0. */
uint kvl_order_of(float x)
{
    const uint bits = as_uint(x);
    return isnan(x) ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The order of all whole pages' scores for the queries in the stage. KVL_PAGES_EACH pages a work-item, one stream a row. */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void
kvl_score_pages(global const ulong *table, ulong table_offset, global const float *stage, global const uchar *bounds, ulong bounds_offset, uint most,
                global uint *picks, KVL_VIEW_PARAMS)
{
    table += table_offset;
    bounds += bounds_offset;
    const uint h = get_global_id(1), first = get_global_id(0) * KVL_PAGES_EACH;
    KVL_HEAD_VIEW(h)
    const uint to = min(first + KVL_PAGES_EACH, kvl_whole_pages(k_sealed, v_sealed, p0 + n, sink));
    for (uint page = first; page < to; page++) {
        float score = 0.0f;
        for (uint r = 0; r < KVL_G; r++) {
            const float bound = kvl_score_bound(stage + KVL_QKV_Q(h * KVL_G + r), bounds, KVL_BOUND_AT(h, page, 0));
#if KVL_BOUND_SUM
            score += bound;
#else
            score = r == 0 ? bound : fmax(score, bound);
#endif
        }
        KVL_PAGE_SCORES(picks, h, most)[page] = kvl_order_of(score);
    }
}

uint kvl_sum_of_group(uint x, KVL_QS uint *part, uint item)
{
    uint sum = 0;
    part[item] = x;
    KVL_BARRIER;
    for (uint i = 0; i < KVL_WG; i++) sum += part[i];
    KVL_BARRIER;
    return sum;
}

/* The pages with the highest scores, ascending: bit by bit the largest score that so many pages reach, then those above it and the first of those that
 * are it. One work-group a stream, whose items look at consecutive pages each. */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void kvl_pick_pages(global const ulong *table, ulong table_offset, global uint *picks,
                                                                               uint most, uint budget, KVL_VIEW_PARAMS)
{
    table += table_offset;
    const uint h = get_group_id(0), item = get_local_id(0);
    KVL_HEAD_VIEW(h)
    const uint whole = kvl_whole_pages(k_sealed, v_sealed, p0 + n, sink), read = kvl_pages_read(whole, p0 + n, budget);
    const uint share = (whole + KVL_WG - 1) / KVL_WG, from = min(item * share, whole), to = min(from + share, whole);
    const global uint *score = KVL_PAGE_SCORES(picks, h, most);
    global uint *out = KVL_PICKED(picks, h, most);
    KVL_QS uint part[KVL_WG], equals[KVL_WG];
    uint edge = 0, above = 0, equal = 0;
    for (uint bit = 0x80000000u; bit != 0; bit >>= 1) {
        uint reach = 0;
        for (uint i = from; i < to; i++) reach += score[i] >= (edge | bit);
        if (kvl_sum_of_group(reach, part, item) >= read) edge |= bit;
    }
    for (uint i = from; i < to; i++) {
        above += score[i] > edge;
        equal += score[i] == edge;
    }
    const uint wanted = read - kvl_sum_of_group(above, part, item); /* of those at the edge */
    part[item] = above;
    equals[item] = equal;
    KVL_BARRIER;
    uint at = 0, passed = 0; /* pages above the edge, and at it, of the items before */
    for (uint i = 0; i < item; i++) {
        at += part[i];
        passed += equals[i];
    }
    at += min(passed, wanted);
    for (uint i = from; i < to; i++) {
        const bool is_edge = score[i] == edge;
        if (score[i] > edge || (is_edge && passed < wanted)) out[at++] = i;
        passed += is_edge;
    }
}
