/* evict.cl: a decode step's eviction, behind its last layer: scores go on, the tokens of the smallest go, and the last token of the body moves
 * into each hole. One launch for all layers that are alike.
 *
 * A stream that evicts while tokens are decoded (KVL_EVICTS) has, for each of its `cells` places, a position, a score and, with KVL_RANKED
 * (pos=compact), a rank: how many of the tokens it still has are older. Layout in `index`: [H][cells] positions, [H][cells] scores, [H][cells] ranks. Places of
 * the body are in no order; sinks and the exact tail are, so there, and in places that are free, ranks are places. `raw` [L][H * G][cells]
 * holds the newest query's scores, which attention left there. The first `room` tokens that a head loses are entered in `gone` [L][H][room]: tokens seen,
 * position, share of the newest query's attention (struct kvl_gone).
 *
 *   KVL_RUN      KVL_RUN_* of kvl_plugin.h: where scores come from        KVL_SHARED   all heads keep the same tokens, by head 0's scores */

#define KVL_POSITIONS(h) (index + (ulong)(h)*cells)
#define KVL_SCORES(h) ((global float *)index + (ulong)(KVL_H + (h)) * cells)
#define KVL_RANKS(h) (index + (ulong)(2 * KVL_H + (h)) * cells)

#if KVL_RUN == 1 || KVL_RUN == 4
/* Scores that tokens get when they are stored, from their rows in the stage or from their positions; one work-item a kv head and token. */
kernel void kvl_score_new(global const ulong *table, ulong table_offset, global uint *index, ulong index_offset, uint cells, global const float *stage,
                          uint layer, uint parameter, KVL_VIEW_PARAMS)
{
    table += table_offset;
    index += index_offset;
    const uint h = get_global_id(0), i = get_global_id(1);
    KVL_HEAD_VIEW(h)
    if (i >= n) return;
#if KVL_RUN == 1
    const global float *row = stage + (ulong)i * q_stride;
    KVL_SCORES(h)[p0 + i] = kvl_score_stored(row + KVL_QKV_K(h), row + KVL_QKV_V(h));
#else
    KVL_SCORES(h)[p0 + i] = kvl_score_position(KVL_POSITIONS(h)[p0 + i], (ulong)layer * KVL_H + h, parameter);
#endif
}
#endif

#if KVL_RUN == 2 || KVL_RUN == 3
/* One row of raw scores of `end` tokens becomes weights; their sum's inverse makes probabilities of them. part: a number a work-item. */
float kvl_weigh(global float *raw, uint end, KVL_QS float *part, uint item)
{
    float top = -FLT_MAX, sum = 0.0f;
#if KVL_VECTORS
    const uint whole = end / 16 * 16;
    float16 tops = -FLT_MAX, sums = 0.0f;
    for (uint i = 0; i < whole; i += 16) tops = kvl_larger(tops, vload16(0, raw + i));
    top = kvl_max16(tops);
    for (uint i = whole; i < end; i++) top = fmax(top, raw[i]);
    for (uint i = 0; i < whole; i += 16) {
        const float16 weight = kvl_exp_negative(vload16(0, raw + i) - top);
        vstore16(weight, 0, raw + i);
        sums += weight;
    }
    sum = kvl_sum16(sums);
    for (uint i = whole; i < end; i++) sum += raw[i] = exp(raw[i] - top);
    return 1.0f / sum;
#else
    for (uint i = item; i < end; i += KVL_WG) top = fmax(top, raw[i]);
    part[item] = top;
    KVL_BARRIER_OF_ALL;
    for (uint i = 0; i < KVL_WG; i++) top = fmax(top, part[i]);
    KVL_BARRIER_OF_ALL;
    for (uint i = item; i < end; i += KVL_WG) sum += raw[i] = exp(raw[i] - top);
    part[item] = sum;
    KVL_BARRIER_OF_ALL;
    float total = 0.0f;
    for (uint i = 0; i < KVL_WG; i++) total += part[i];
    KVL_BARRIER_OF_ALL;
    return 1.0f / total;
#endif
}

/* Adds the newest query's probabilities, rows from .. to - 1 of weights, to the scores of `end` tokens, or replaces these. */
void kvl_add_attention(const global float *raw, uint cells, const KVL_QS float *inverse, uint from, uint to, uint end, global float *score, bool replace,
                       uint item)
{
    const float keep = replace ? 0.0f : 1.0f;
    uint first = item;
#if KVL_VECTORS
    for (first = 0; first + 16 <= end; first += 16) {
        float16 sum = keep * vload16(0, score + first);
        for (uint r = from; r < to; r++) sum = fma(vload16(0, raw + (ulong)r * cells + first), inverse[r], sum);
        vstore16(sum, 0, score + first);
    }
#endif
    for (uint i = first; i < end; i += KVL_WG) {
        float sum = keep * score[i];
        for (uint r = from; r < to; r++) sum = fma(raw[(ulong)r * cells + i], inverse[r], sum);
        score[i] = sum;
    }
    KVL_BARRIER_OF_ALL;
}

/* Share of the newest query's attention that the token at place `hole` of head h got; the one at place `last` takes its place. */
float kvl_take_mass(global float *raw, uint cells, const KVL_QS float *inverse, uint h, uint hole, uint last)
{
    float mass = 0.0f;
    for (uint r = h * KVL_G; r < (h + 1) * KVL_G; r++) {
        global float *row = raw + (ulong)r * cells;
        mass = fma(row[hole], inverse[r], mass);
        row[hole] = row[last];
    }
    return mass / KVL_G;
}
#endif

#if KVL_RUN == 5
#define KVL_KEYS_PARAMS global const float *tables, global const uchar *exact, ulong exact_offset, ulong exact_stride,

/* The key [KVL_DK] at place i of stream h: rows holds those in full precision. */
void kvl_read_place(KVL_SLAB_PARAMS, global const ulong *table, const global float *key_table, kvl_rows rows, uint h, uint i, kvl_view view, float *k)
{
    const uint slot = i - view.sink;
    rows.first = i;
    if (i < view.sink || i >= view.k_sealed) kvl_read_row(rows, KVL_DK, k);
    else
        for (uint c = 0; c < KVL_DK; c += 8) kvl_k_load8(kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, slot, view)]), key_table, slot % KVL_K_P, c, k + c);
}

/* Scores of the body's tokens from all `end` keys that stream h has. mean: room for a key. */
void kvl_score_keys(KVL_SLAB_PARAMS, global const ulong *table, const global float *key_table, kvl_rows rows, uint h, uint end, kvl_view view,
                    global float *score, KVL_QS float *mean, uint item)
{
    float own[KVL_DK], k[KVL_DK];
    for (uint c = 0; c < KVL_DK; c++) own[c] = 0.0f;
    for (uint i = item; i < end; i += KVL_WG) {
        kvl_read_place(KVL_SLAB_ARGS, table, key_table, rows, h, i, view, k);
        const float weight = kvl_score_weight(k);
        for (uint c = 0; c < KVL_DK; c++) own[c] = fma(weight, k[c], own[c]);
    }
    for (uint turn = 0; turn < KVL_WG; turn++) {
        for (uint c = 0; c < KVL_DK && turn == item; c++) mean[c] = turn == 0 ? own[c] : mean[c] + own[c];
        KVL_BARRIER_OF_ALL;
    }
    for (uint i = view.sink + item; i < view.k_sealed; i += KVL_WG) {
        kvl_read_place(KVL_SLAB_ARGS, table, key_table, rows, h, i, view, k);
        score[i] = kvl_score_key(k, mean);
    }
    KVL_BARRIER_OF_ALL;
}
#else
#define KVL_KEYS_PARAMS
#endif

/* Whether the token at place a goes before the one at place b. */
bool kvl_goes_first(float score_a, float score_b, uint position_a, uint position_b)
{
    return score_a < score_b || (score_a == score_b && position_a > position_b);
}

/* The place in [from, to) whose token goes first: tokens before position `first` and from `newest_from` on go last. */
uint kvl_find_victim(const global float *score, const global uint *position, uint from, uint to, uint first, uint newest_from, KVL_QS float *part,
                     KVL_QS uint *at, uint item)
{
    float worst = 0.0f;
    uint found = to;
#if KVL_VECTORS
    uint16 found16 = to, position16 = 0;
    float16 worst16 = INFINITY;
    const uint16 lane = (uint16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; from + 16 <= to; from += 16) {
        const uint16 p = vload16(0, position + from);
        float16 s = vload16(0, score + from);
        s = select(s, (float16)-INFINITY, isnan(s));
        s = select(s, (float16)FLT_MAX, p < first || p >= newest_from);
        const int16 sooner = s < worst16 || (s == worst16 && p > position16);
        worst16 = select(worst16, s, sooner);
        position16 = select(position16, p, sooner);
        found16 = select(found16, from + lane, sooner);
    }
    float best[16];
    uint at16[16];
    vstore16(worst16, 0, best);
    vstore16(found16, 0, at16);
    for (uint i = 0; i < 16; i++) {
        if (at16[i] == to || (found != to && !kvl_goes_first(best[i], worst, position[at16[i]], position[found]))) continue;
        found = at16[i];
        worst = best[i];
    }
#endif
    for (uint i = from + item; i < to; i += KVL_WG) {
        const bool stays = position[i] < first || position[i] >= newest_from;
        const float s = stays ? FLT_MAX : isnan(score[i]) ? -INFINITY : score[i];
        if (found != to && !kvl_goes_first(s, worst, position[i], position[found])) continue;
        found = i;
        worst = s;
    }
#if KVL_WG > 1
    part[item] = worst;
    at[item] = found;
    KVL_BARRIER_OF_ALL;
    for (uint i = 0; i < KVL_WG; i++) {
        const uint other = at[i];
        if (other == to || (found != to && !kvl_goes_first(part[i], worst, position[other], position[found]))) continue;
        found = other;
        worst = part[i];
    }
    KVL_BARRIER_OF_ALL;
#endif
    return found;
}

/* The token at place `from` of the body takes place `to`: keys by one work-item, values by another. */
void kvl_move_token(KVL_SLAB_PARAMS, global const ulong *table, uint h, uint to, uint from, kvl_view view, uint item)
{
    const uint a = to - view.sink, b = from - view.sink;
    if (item == 0)
        kvl_k_move(kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, a, view)]), a % KVL_K_P, kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, b, view)]),
                   b % KVL_K_P);
    if (item == KVL_WG - 1)
        kvl_v_move(kvl_page(KVL_SLAB_ARGS, table[kvl_v_entry(h, a, view)]), a % KVL_V_P, kvl_page(KVL_SLAB_ARGS, table[kvl_v_entry(h, b, view)]),
                   b % KVL_V_P);
}

/* Steps 6 and 7 after the newest token, at position p0, has been attended by, of layers from `layer` on: one work-group a layer and kv head, or one a
 * layer where the heads share. Heads are left with `target` tokens, or what cannot go: sinks and the exact tail. */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void
kvl_evict(KVL_SLAB_PARAMS, global ulong *table, ulong table_offset, global uint *index, ulong index_offset, uint cells, global float *raw,
          ulong raw_offset, global uint *gone, ulong gone_offset, uint room, uint layer, uint target, uint first, uint newest, uint parameter, KVL_KEYS_PARAMS KVL_VIEW_PARAMS)
{
    const uint l = get_global_id(1);
    table += table_offset + (ulong)l * KVL_H * (k_slots + v_slots + 2);
    index += index_offset + (ulong)l * (2 + KVL_RANKED) * KVL_H * cells;
    raw += raw_offset + (ulong)l * KVL_H * KVL_G * cells;
    gone += 3 * (gone_offset + (ulong)l * KVL_H * room);
    const uint item = get_local_id(0), h0 = KVL_SHARED ? 0 : get_group_id(0), h1 = KVL_SHARED ? KVL_H : h0 + 1, newest_position = p0;
    KVL_QS float part[KVL_WG];
    KVL_QS uint at[KVL_WG];
    KVL_HEAD_VIEW(h0)
    const kvl_view view = KVL_VIEW_INIT;
    const uint end = p0 + n, was_sealed = kvl_sealed_end(p0, sink, KVL_K_TAIL, KVL_K_UNIT);
    global float *score = KVL_SCORES(h0);

    /* The newest token, and the one that was encoded with it: those behind that are the newest ones, one after the other. */
    if (item == 0) {
        for (uint h = h0; h < h1; h++) {
            if (p0 < sink) KVL_POSITIONS(h)[p0] = newest_position;
            if (k_sealed > was_sealed) KVL_POSITIONS(h)[k_sealed - 1] = newest_position - (end - k_sealed);
        }
#if KVL_RUN == 2
        score[p0] = 0.0f;
#elif KVL_RUN == 4
        score[p0] = kvl_score_position(newest_position, (ulong)(layer + l) * KVL_H + h0, parameter);
#endif
    }
    KVL_BARRIER_OF_ALL;
#if KVL_RUN == 2 || KVL_RUN == 3
    KVL_QS float inverse[KVL_H * KVL_G];
    for (uint r = h0 * KVL_G; r < h1 * KVL_G; r++) {
        const float x = kvl_weigh(raw + (ulong)r * cells, end, part, item);
        if (item == 0) inverse[r] = x;
    }
    KVL_BARRIER_OF_ALL;
    kvl_add_attention(raw, cells, inverse, h0 * KVL_G, h1 * KVL_G, end, score, KVL_RUN == 3, item);
#endif

    const uint excess = min(end > target ? end - target : 0, k_sealed - sink), newest_from = newest_position + 1 > newest ? newest_position + 1 - newest : 0;
#if KVL_RUN == 5
    KVL_QS float mean[KVL_DK];
    kvl_rows rows = kvl_side_rows(0, exact + exact_offset + l * exact_stride, h0, true, view, 0);
    rows.stage_token = UINT_MAX; /* the newest token has left the stage */
    if (excess > 0) kvl_score_keys(KVL_SLAB_ARGS, table, kvl_k_table(tables, h0, view), rows, h0, end, view, score, mean, item);
#endif
    for (uint left = 0; left < excess; left++) {
        const uint sealed = k_sealed - left, last = sealed - 1;
        const uint hole = kvl_find_victim(score, KVL_POSITIONS(h0), sink, sealed, first, newest_from, part, at, item);
#if KVL_RANKED
        for (uint h = h0; h < h1; h++) {
            const uint rank = KVL_RANKS(h)[hole];
            KVL_BARRIER_OF_ALL;
            for (uint i = sink + item; i < sealed; i += KVL_WG) KVL_RANKS(h)[i] -= KVL_RANKS(h)[i] > rank;
        }
        KVL_BARRIER_OF_ALL;
#endif
        for (uint h = h0; h < h1; h++)
            if (hole != last) kvl_move_token(KVL_SLAB_ARGS, table, h, hole, last, view, item);
        if (item == 0) {
            for (uint h = h0; h < h1; h++) {
                const uint nth = KVL_HEAD_SPIN(h) + left;
#if KVL_RUN == 2 || KVL_RUN == 3
                const float mass = kvl_take_mass(raw, cells, inverse, h, hole, last);
#else
                const float mass = NAN;
#endif
                if (nth < room) vstore3((uint3)(newest_position + 1, KVL_POSITIONS(h)[hole], as_uint(mass)), (ulong)h * room + nth, gone);
                KVL_POSITIONS(h)[hole] = KVL_POSITIONS(h)[last];
#if KVL_RANKED
                KVL_RANKS(h)[hole] = KVL_RANKS(h)[last];
                KVL_RANKS(h)[last] = last;
#endif
            }
            score[hole] = score[last];
            for (uint i = sealed; i < end - left; i++) score[i - 1] = score[i]; /* the tail is one place nearer */
        }
        KVL_BARRIER_OF_ALL;
    }
    if (item == 0)
        for (uint h = h0; h < h1; h++) {
            KVL_HEAD_SHIFT(h) += excess;
            KVL_HEAD_SPIN(h) += excess;
        }
}
