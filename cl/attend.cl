/* attend.cl: attention over pages and exact rows, on codes. No buffer holds a dequantized cache.
 *
 * Measured, one layer of 9 query and 3 kv heads of 64 channels behind 4096 tokens, two AVX-512 cores (us, PoCL 3.1 | Intel 2026.2): in the processor's
 * caches f16 58 | 58, int8 62..64 | 60, int4 64 | 61..63, int2 64 | 60..64; from memory f16 at 80 % of the read bandwidth, others 5 more than in the
 * caches. Of these, three fma a vector take 47, the softmax 5 (9 when it waited for each block's maximum); without the softmax int8 takes 57 | 53 on floats
 * that need no conversion, 59 | 55 if codes are only widened: converting integers shares ports with fma. What did not help:
 *   keys' codes as 1 + code / 2^bits, as values' are: 2 less, but scores lose two bits (largest error 3.3e-5 instead of 1e-5)
 *   four tokens' bytes in a lane, taken by rotations: putting the lanes in order costs more than it saves (int8 70 | 68 instead of 65 | 62)
 *   the first 2 to 16 lines of the next pages fetched ahead: nothing; whole pages: f16 132 | 212 instead of 72 | 77
 *   8 splits a compute unit instead of 4: f16 63 | 67 instead of 60 | 61; 2: 76 | 77
 *   two or three vectors side by side (KVL_WIDE) instead of four: int8 98 | 85 and 103 | 89 instead of 91 | 82
 *   codes in pairs, to be multiplied with queries of 16 bits by one pmaddwd: LLVM 15 takes the pairs apart and multiplies each with a zero
 * Keys that only RoPE restores are decoded 16 tokens side by side (columns()) and turned by the angle of their place in a slice, after queries were turned back by the
 * slice's: int4 rope=pre 156 us (PoCL; f16 after RoPE 90), of which keys' decoding 20, waiting for codes 21, turning and multiplying 45, values 63. Token by token it was
 * 2,200. With angles of 16 places, and queries turned back for every 16 tokens: 173; with arrays that do not begin at a line of the processor's cache: 164.
 * Values that are the first channels of keys (latent attention) are summed 16 tokens side by side, the lanes added up once a block and channel. 6 query heads over 8192
 * latents of 64 channels, 48 of them values, a layer (us, PoCL | Intel): f16 117 | 112, int8 114 | 114, 70 % of the measured multiply-adds; eight channels of a token
 * at a time from pages that have keys channel by channel: 196 | 199 and 338 | 339. */

/* How the work-items of a group share a block of tokens. Scores: KVL_SLICE tokens each in turn. Values: without accumulate() an item owns 8
 * channels of one part of the tokens, and acc holds a sum a part; a group of one has one part, and accumulate() takes all channels. */
#define KVL_EIGHTS ((KVL_V_REBUILT ? KVL_ROW : KVL_DA) / 8)
#if KVL_WG == 1
#define KVL_PARTS 1
#else
#define KVL_PARTS_WANTED (KVL_WG / KVL_EIGHTS)
#define KVL_PARTS_FIT (16384 / (KVL_NQ * KVL_DA * 4)) /* 16 KiB of local memory */
#define KVL_PARTS_MIN (KVL_PARTS_WANTED < KVL_PARTS_FIT ? KVL_PARTS_WANTED : KVL_PARTS_FIT)
#define KVL_PARTS (KVL_PARTS_MIN < 1 ? 1 : KVL_PARTS_MIN)
#endif

/* Channels of a restored key or value, those of all heads of a stream, and where among them stand those of the head that query row r reads. */
#define KVL_KEY (KVL_RESTORES ? KVL_ROW : KVL_DK)
#if KVL_LAYERS > 1 /* a record may be longer than what a layer's part of it is */
#define KVL_KEY_ROOM (KVL_DK > KVL_ROW ? KVL_DK : KVL_ROW)
#else
#define KVL_KEY_ROOM KVL_KEY
#endif
#define KVL_HEAD_OF(r) ((r) % KVL_G / (KVL_G / KVL_HEADS))
#define KVL_KEY_AT(r) (KVL_RESTORES ? KVL_HEAD_OF(r) * KVL_HD : 0)

#if KVL_VECTORS && KVL_K_HAS_SCORES
#define KVL_AUX KVL_K_AUX
#else
#define KVL_AUX 0
void kvl_k_prepare_plain(const KVL_QS float *q, KVL_QS float *aux) {}
#define kvl_k_prepare kvl_k_prepare_plain
#endif

/* Where a slice's tokens are: the first one's place, and, to restore keys, the last place that has a token; rows of the block behind it hold zeros. */
#if KVL_RESTORES
typedef struct {
    uint first, last;
} kvl_places;
#define KVL_PLACES(first, last) (kvl_places){first, last}
#else
#define kvl_places uint
#define KVL_PLACES(first, last) first
#endif

/* What RoPE turns the key of the i-th of these tokens by. */
#if KVL_RANKED
#define KVL_TURNED_BY(places, i, rank) (rank)[min((places).first + (i), (places).last)]
#else
#define KVL_TURNED_BY(places, i, rank) min((places).first + (i), (places).last)
#endif

/* Keys that nothing but RoPE restores, and those of codecs without scores(): 16 tokens side by side, channel by channel. */
#define KVL_SIDE_BY_SIDE \
    (KVL_VECTORS && KVL_K_HAS_COLUMNS && !KVL_K_HAS_SCORES && (!KVL_RESTORES || (KVL_K_RANK == 0 && KVL_K_ROT_M == 0 && !KVL_RANKED)))
#define KVL_ABREAST (KVL_NQ <= 3 && KVL_SLICE % 32 == 0 ? 2 : 1)
#if KVL_SIDE_BY_SIDE && KVL_ROPE_PRE
#define KVL_LANES (KVL_SLICE * KVL_HD)
#if KVL_ORDER_HALVES
#define KVL_PAIR(i, part) (KVL_ROPE_FIRST + (i) + (part) * (turn.rope_dim / 2))
#else
#define KVL_PAIR(i, part) (KVL_ROPE_FIRST + 2 * (i) + (part))
#endif

/* RoPE's cosines and sines of positions 0 .. KVL_SLICE - 1, [pairs][2][KVL_SLICE]; last: the last position there is. */
void kvl_lane_angles(kvl_turn turn, uint last, float *lanes)
{
    const uint pairs = turn.rope_dim / 2;
    for (uint t = 0; t < KVL_SLICE; t++)
        for (uint i = 0; i < pairs; i++) {
            const float2 angle = turn.rotary[(ulong)min(t, last) * pairs + i];
            lanes[i * 2 * KVL_SLICE + t] = angle.x;
            lanes[(i * 2 + 1) * KVL_SLICE + t] = angle.y;
        }
}

/* Queries turned back by `position`, first and second channels of the pairs apart: back [NQ][2][HD / 2]. */
void kvl_turn_back(const float *q, kvl_turn turn, uint position, float *back)
{
    const uint pairs = turn.rope_dim / 2, whole = pairs / 16 * 16;
    const global float *angle = (const global float *)(turn.rotary + (ulong)position * pairs);
    for (uint i = 0; i < whole; i += 16) {
        const float16 low = vload16(0, angle + 2 * i), high = vload16(1, angle + 2 * i);
        const float16 c = (float16)(low.even, high.even), s = (float16)(low.odd, high.odd);
        for (uint r = 0; r < KVL_NQ; r++) {
            const float16 first = vload16(0, q + r * KVL_DQ + KVL_ROPE_FIRST + 2 * i), second = vload16(1, q + r * KVL_DQ + KVL_ROPE_FIRST + 2 * i);
            const float16 a = (float16)(first.even, second.even), b = (float16)(first.odd, second.odd);
            KVL_STORE16(fma(a, c, b * s), back + r * KVL_HD + i);
            KVL_STORE16(fma(b, c, -(a * s)), back + r * KVL_HD + KVL_HD / 2 + i);
        }
    }
    for (uint i = whole; i < pairs; i++)
        for (uint r = 0; r < KVL_NQ; r++) {
            const float c = angle[2 * i], s = angle[2 * i + 1], a = q[r * KVL_DQ + KVL_ROPE_FIRST + 2 * i], b = q[r * KVL_DQ + KVL_ROPE_FIRST + 2 * i + 1];
            back[r * KVL_HD + i] = fma(a, c, b * s);
            back[r * KVL_HD + KVL_HD / 2 + i] = fma(b, c, -(a * s));
        }
}
#define KVL_PREPARED lanes
#else
#define KVL_LANES 0
#define KVL_PREPARED aux
#endif

#if KVL_RESTORES && !KVL_SIDE_BY_SIDE
/* The keys [KVL_KEY] of token t of a block of stream h as queries see them; position: the token's. */
void kvl_read_key(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint h, uint t, kvl_turn turn, uint position, float *k)
{
    for (uint c = 0; c < KVL_DK; c += 8) kvl_k_load8(block, table, t, c, k + c);
    kvl_restore_key(k, turn, h, position);
}
#endif

/* Scores of KVL_SLICE tokens from t0 on. rank: the head's ranks by place, with KVL_RANKED. */
#if KVL_VECTORS && KVL_K_HAS_SCORES
#define kvl_key_scores(block, table, h, t0, q, aux, turn, position, rank, out) kvl_k_scores(block, table, t0, q, aux, out)
#elif KVL_SIDE_BY_SIDE
/* RoPE's turn by p + i is that by p, which queries are turned back by once for a slice, and that by i: (R(p) R(i) k) . q = (R(i) k) . (R(-p) q). */
void kvl_key_scores(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint h, uint t0, const float *q, const float *lanes, kvl_turn turn, kvl_places position,
                    const global uint *rank, float *out)
{
#if KVL_ROPE_PRE
    float back[KVL_NQ * KVL_HD];
    kvl_turn_back(q, turn, min(position.first, position.last), back);
#endif
    for (uint t = 0; t < KVL_SLICE; t += 16 * KVL_ABREAST) {
        float keys[KVL_ABREAST][KVL_DK * 16] __attribute__((aligned(64)));
        float16 dot[KVL_ABREAST * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < KVL_ABREAST * KVL_NQ; i++) dot[i] = 0.0f;
        KVL_UNROLL for (uint w = 0; w < KVL_ABREAST; w++) kvl_k_columns(block, table, t0 + t + 16 * w, keys[w]);
#if KVL_ROPE_PRE
        for (uint i = 0; i < turn.rope_dim / 2; i++) {
            KVL_UNROLL for (uint w = 0; w < KVL_ABREAST; w++)
            {
                const float *angles = lanes + i * 2 * KVL_SLICE + t + 16 * w;
                const float16 a = vload16(KVL_PAIR(i, 0), keys[w]), b = vload16(KVL_PAIR(i, 1), keys[w]), c = vload16(0, angles), s = vload16(0, angles + KVL_SLICE);
                kvl_add_to_rows(dot + w * KVL_NQ, back + i, KVL_HD, fma(a, c, -(b * s)));
                kvl_add_to_rows(dot + w * KVL_NQ, back + KVL_HD / 2 + i, KVL_HD, fma(a, s, b * c));
            }
        }
#endif
        for (uint c = 0; c < KVL_DQ; c++) {
#if KVL_ROPE_PRE
            if (c == KVL_ROPE_FIRST) c += turn.rope_dim;
            if (c >= KVL_DQ) break;
#endif
            KVL_UNROLL for (uint w = 0; w < KVL_ABREAST; w++) kvl_add_to_rows(dot + w * KVL_NQ, q + c, KVL_DQ, vload16(c, keys[w]));
        }
        KVL_UNROLL for (uint i = 0; i < KVL_ABREAST * KVL_NQ; i++) KVL_STORE16(dot[i], out + i % KVL_NQ * KVL_B + t + i / KVL_NQ * 16);
    }
}
#elif KVL_VECTORS && KVL_RESTORES
/* 16 keys side by side, channel by channel. */
void kvl_key_scores(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint h, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, kvl_turn turn, kvl_places position, const global uint *rank, KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t += 16) {
        float k[KVL_KEY_ROOM], keys[KVL_KEY * 16];
        for (uint i = 0; i < 16; i++) {
            kvl_read_key(block, table, h, t0 + t + i, turn, KVL_TURNED_BY(position, t + i, rank), k);
            for (uint c = 0; c < KVL_KEY; c++) keys[c * 16 + i] = k[c];
        }
        float16 dot[KVL_NQ];
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) dot[r] = 0.0f;
        for (uint c = 0; c < KVL_DQ; c++)
            KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) dot[r] = fma(q[r * KVL_DQ + c], vload16(KVL_KEY_AT(r) + c, keys), dot[r]);
        KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) vstore16(dot[r], 0, out + r * KVL_B + t);
    }
}
#else
void kvl_key_scores(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint h, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, kvl_turn turn, kvl_places position, const global uint *rank, KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t++) {
        float dot[KVL_NQ];
        for (uint r = 0; r < KVL_NQ; r++) dot[r] = 0.0f;
#if KVL_RESTORES
        float k[KVL_KEY_ROOM];
        kvl_read_key(block, table, h, t0 + t, turn, KVL_TURNED_BY(position, t, rank), k);
        for (uint c = 0; c < KVL_DQ; c++)
            for (uint r = 0; r < KVL_NQ; r++) dot[r] = fma(q[r * KVL_DQ + c], k[KVL_KEY_AT(r) + c], dot[r]);
#else
        float k[8];
        for (uint c = 0; c < KVL_DK; c += 8) {
            kvl_k_load8(block, table, t0 + t, c, k);
            for (uint r = 0; r < KVL_NQ; r++)
                for (uint i = 0; i < 8; i++) dot[r] = fma(q[r * KVL_DQ + c + i], k[i], dot[r]);
        }
#endif
        for (uint r = 0; r < KVL_NQ; r++) out[r * KVL_B + t] = dot[r];
    }
}
#endif

#if KVL_V_REBUILT
/* Adds weight p[r * KVL_B] times channels c .. c+7 of the values that token t's record of stream h stands for to the sums of the query rows that
 * read them, if t is not before their start. record [KVL_DV], unrotated. */
void kvl_add_rebuilt(const float *record, kvl_turn turn, uint h, uint c, uint t, const uint *start, const KVL_QS float *p, KVL_QS float *acc)
{
    const global float *up = KVL_UP(turn.v_projection, KVL_V_RANK, h) + c;
    float v[8];
    for (uint i = 0; i < 8; i++) v[i] = 0.0f;
    for (uint k = 0; k < KVL_V_RANK; k++)
        KVL_UNROLL for (uint i = 0; i < 8; i++) v[i] = fma(record[k], up[k * KVL_ROW + i], v[i]);
    for (uint r = 0; r < KVL_NQ; r++)
        if (KVL_HEAD_OF(r) == c / KVL_HD && t >= start[r])
            for (uint i = 0; i < 8; i++) {
                KVL_QS float *sum = acc + r * KVL_DA + c % KVL_HD + i;
                *sum = fma(p[r * KVL_B], v[i], *sum);
            }
}
#endif

#if KVL_VECTORS && KVL_JOINT && KVL_K_HAS_COLUMNS
float16 kvl_add_neighbours(float16 a, float16 b) { return (float16)(a.even, b.even) + (float16)(a.odd, b.odd); }

/* Lane i: the sum of all lanes of x[i]. */
float16 kvl_sums_of_lanes(float16 *x)
{
    KVL_UNROLL for (uint n = 8; n > 0; n /= 2)
        KVL_UNROLL for (uint i = 0; i < n; i++) x[i] = kvl_add_neighbours(x[2 * i], x[2 * i + 1]);
    return x[0];
}
#endif

/* Adds this item's share of a block's weighted values to acc [KVL_PARTS][KVL_NQ][KVL_DA]. slot: of the block's first token in its page. */
void kvl_add_values(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, kvl_turn turn, uint h, uint slot, const KVL_QS float *p,
                    KVL_QS float *acc, uint item)
{
#if KVL_VECTORS && KVL_JOINT && KVL_K_HAS_COLUMNS
    float columns[KVL_B / 16][KVL_DK * 16] __attribute__((aligned(64)));
    for (uint w = 0; w < KVL_B / 16; w++) kvl_k_columns(block, table, slot + 16 * w, columns[w]);
    for (uint c = 0; c < KVL_DA; c += 16)
        for (uint r = 0; r < KVL_NQ; r++) {
            float16 sum[16];
            KVL_UNROLL for (uint i = 0; i < 16; i++) sum[i] = 0.0f;
            for (uint w = 0; w < KVL_B / 16; w++) {
                const float16 weight = vload16(w, p + r * KVL_B);
                KVL_UNROLL for (uint i = 0; i < 16; i++) sum[i] = fma(weight, vload16(c + i, columns[w]), sum[i]);
            }
            KVL_STORE16(vload16(0, acc + r * KVL_DA + c) + kvl_sums_of_lanes(sum), acc + r * KVL_DA + c);
        }
#elif KVL_VECTORS && KVL_V_HAS_ACCUMULATE
    if (item == 0)
        for (uint t0 = 0; t0 < KVL_B; t0 += KVL_SLICE) kvl_v_accumulate(block, table, slot + t0, p + t0, acc);
#elif KVL_V_REBUILT
    float record[KVL_DV];
    uint start[KVL_NQ];
    for (uint r = 0; r < KVL_NQ; r++) start[r] = 0;
    for (uint part = item / KVL_EIGHTS; part < KVL_PARTS; part += max(KVL_WG / KVL_EIGHTS, 1))
        for (uint t = part; t < KVL_B; t += KVL_PARTS) {
            for (uint c = 0; c < KVL_DV; c += 8) kvl_v_load8(block, table, slot + t, c, record + c);
            kvl_unrotate_value(record, turn);
            for (uint c = item % KVL_EIGHTS; c < KVL_EIGHTS; c += min(KVL_WG, KVL_EIGHTS))
                kvl_add_rebuilt(record, turn, h, 8 * c, t, start, p + t, acc + part * KVL_NQ * KVL_DA);
        }
#else
    for (uint share = item; share < KVL_EIGHTS * KVL_PARTS; share += KVL_WG) {
        const uint c = share % KVL_EIGHTS * 8, part = share / KVL_EIGHTS;
        KVL_QS float *sum = acc + part * KVL_NQ * KVL_DA + c;
        for (uint t = part; t < KVL_B; t += KVL_PARTS) {
            float v[8];
            kvl_v_load8(block, table, slot + t, c, v);
            for (uint r = 0; r < KVL_NQ; r++)
                for (uint i = 0; i < 8; i++) sum[r * KVL_DA + i] = fma(p[r * KVL_B + t], v[i], sum[r * KVL_DA + i]);
        }
    }
#endif
}

#define KVL_EXACT_WIDE (KVL_DA % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

/* Scores of full-precision tokens [from, to) of a block at `base`, where a row sees them in full precision. */
void kvl_exact_scores(kvl_rows rows, uint h, uint base, uint from, uint to, const uint *start, const KVL_QS float *q, kvl_turn turn,
                      KVL_QS float *out, uint item)
{
    for (uint t = from + item; t < to; t += KVL_WG) {
        rows.first = t;
#if KVL_VECTORS || KVL_RESTORES
        float k[KVL_KEY];
        kvl_read_row(rows, KVL_XK, k);
#define KEY_AT(c) k[c]
#else
#define KEY_AT(c) kvl_row_at(rows, 0, c) /* an array of a row spills on GPUs */
#endif
#if KVL_RESTORES
        kvl_restore_exact(k, turn, h, t);
#endif
        for (uint r = 0; r < KVL_NQ; r++) {
            if (t < start[r]) continue;
#if KVL_VECTORS
            float16 dots = 0.0f;
            for (uint c = 0; c < KVL_DQ; c += 16) dots = fma(vload16(0, q + r * KVL_DQ + c), vload16(0, k + KVL_KEY_AT(r) + c), dots);
            const float dot = kvl_sum16(dots);
#else
            float dot = 0.0f;
            for (uint c = 0; c < KVL_DQ; c++) dot = fma(q[r * KVL_DQ + c], KEY_AT(KVL_KEY_AT(r) + c), dot);
#endif
            out[r * KVL_B + t - base] = dot;
        }
    }
}

#if KVL_SLIDES
/* Scores of sinks [from, to) with pos=compact. by: tokens that the window of each row's query has slid. */
void kvl_sink_scores(kvl_rows rows, uint base, uint from, uint to, const uint *by, const KVL_QS float *q, kvl_turn turn, KVL_QS float *out, uint item)
{
    for (uint t = from + item; t < to; t += KVL_WG) {
        float k[KVL_DK];
        rows.first = t;
        for (uint r = 0; r < KVL_NQ; r++) {
            float dot = 0.0f;
            if (r % KVL_G == 0) { /* another query token */
                kvl_read_row(rows, KVL_DK, k);
                kvl_slide_key(k, turn, t, by[r]);
            }
            for (uint c = 0; c < KVL_DQ; c++) dot = fma(q[r * KVL_DQ + c], k[c], dot);
            out[r * KVL_B + t - base] = dot;
        }
    }
}
#endif

void kvl_exact_accumulate(kvl_rows rows, uint h, uint base, uint from, uint to, const uint *start, const KVL_QS float *p, kvl_turn turn,
                          KVL_QS float *acc, uint item)
{
#if KVL_LAYERS > 1
    for (uint t = from; t < to; t++)
        for (uint c = item; c < KVL_ROW; c += KVL_WG) {
            rows.first = t;
            const float value = kvl_row_at(rows, 0, c);
            for (uint r = 0; r < KVL_NQ; r++)
                if (KVL_HEAD_OF(r) == c / KVL_HD && t >= start[r]) acc[r * KVL_DA + c % KVL_HD] = fma(p[r * KVL_B + t - base], value, acc[r * KVL_DA + c % KVL_HD]);
        }
#elif KVL_V_REBUILT
    for (uint t = from; t < to; t++) {
        float record[KVL_DV];
        rows.first = t;
        kvl_read_row(rows, KVL_DV, record);
        kvl_unrotate_value(record, turn);
        for (uint c = item; c < KVL_EIGHTS; c += KVL_WG) kvl_add_rebuilt(record, turn, h, 8 * c, t, start, p + t - base, acc);
    }
#elif KVL_VECTORS
    for (uint c = 0; c < KVL_DA; c += 16 * KVL_EXACT_WIDE) {
        float16 sum[KVL_EXACT_WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < KVL_EXACT_WIDE * KVL_NQ; i++) sum[i] = vload16(0, acc + i % KVL_NQ * KVL_DA + c + i / KVL_NQ * 16);
        for (uint t = from; t < to; t++) {
            rows.first = t;
            KVL_UNROLL for (uint w = 0; w < KVL_EXACT_WIDE; w++)
            {
                const float16 v = kvl_row_vector(rows, c + 16 * w);
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++)
                    if (t >= start[r]) sum[w * KVL_NQ + r] = fma(p[r * KVL_B + t - base], v, sum[w * KVL_NQ + r]);
            }
        }
        KVL_UNROLL for (uint i = 0; i < KVL_EXACT_WIDE * KVL_NQ; i++) KVL_STORE16(sum[i], acc + i % KVL_NQ * KVL_DA + c + i / KVL_NQ * 16);
    }
#else
    for (uint c = item; c < KVL_DA; c += KVL_WG)
        for (uint t = from; t < to; t++) {
            rows.first = t;
            const float value = kvl_row_at(rows, 0, c);
            for (uint r = 0; r < KVL_NQ; r++)
                if (t >= start[r]) acc[r * KVL_DA + c] = fma(p[r * KVL_B + t - base], value, acc[r * KVL_DA + c]);
        }
#endif
}

/* Online softmax (Milakov, Gimelshein 2018) of one row's block: scores become weights, m and l move on; the factor for what was summed before.
 * A block whose largest score is below m, as most are, does not wait for it: the branch is predicted. */
float kvl_softmax_block(KVL_QS float *s, float *m, float *l)
{
    float keep = 1.0f;
#if KVL_VECTORS
    float16 best = -FLT_MAX;
    for (uint i = 0; i < KVL_B; i += 16) best = kvl_larger(best, vload16(0, s + i));
    const float top = kvl_larger1(*m, kvl_max16(best));
#else
    float top = *m;
    for (uint i = 0; i < KVL_B; i++) top = fmax(top, s[i]);
#endif
    if (top > *m) {
        keep = exp(*m - top);
        *m = top;
    }
    if (*m == -FLT_MAX) { /* nothing seen yet, nothing seen here */
        for (uint i = 0; i < KVL_B; i++) s[i] = 0.0f;
        return 1.0f;
    }
#if KVL_VECTORS
    float16 sums = 0.0f;
    for (uint i = 0; i < KVL_B; i += 16) {
        const float16 weight = kvl_exp_negative(vload16(0, s + i) - *m);
        KVL_STORE16(weight, s + i);
        sums += weight;
    }
    const float sum = kvl_sum16(sums);
#else
    float sum = 0.0f;
    for (uint i = 0; i < KVL_B; i++) {
        s[i] = s[i] == -FLT_MAX ? 0.0f : exp(s[i] - *m);
        sum += s[i];
    }
#endif
    *l = fma(*l, keep, sum);
    return keep;
}

/* The query row of channel 0 at source as attention wants it, times scale; raw: it is still as it was projected. */
void kvl_read_query(const global float *source, bool raw, kvl_turn turn, uint position, float scale, KVL_QS float *q, uint item)
{
#if KVL_APPENDS
    if (raw) {
        float x[KVL_DQ];
        for (uint c = 0; c < KVL_DQ; c++) x[c] = source[c];
        kvl_finish(x, turn, position, true, false, false);
        for (uint c = 0; c < KVL_DQ; c++) q[c] = x[c] * scale;
        return;
    }
#endif
    for (uint c = item; c < KVL_DQ; c += KVL_WG) q[c] = source[c] * scale;
}

/* Joins the splits of one row; a split that saw nothing has l = 0. The group's items look at a split each, then add up a channel each (in turns of
 * KVL_WG). tops, weights, sums: room for KVL_WG. */
void kvl_merge_row(global const float *partial, global float *out, ulong row, uint n_rows, uint n_splits, uint item, KVL_QS float *tops,
                   KVL_QS float *weights, KVL_QS float *sums)
{
    const ulong step = (ulong)n_rows * (KVL_DA + 2);
    float top = -FLT_MAX, total = 0.0f, acc[(KVL_DA + KVL_WG - 1) / KVL_WG];
    for (uint c = item; c < KVL_DA; c += KVL_WG) acc[c / KVL_WG] = 0.0f;
    for (uint first = 0; first < n_splits; first += KVL_WG) {
        global const float *p = partial + first * step + row * (KVL_DA + 2);
        const bool seen = first + item < n_splits && p[item * step + KVL_DA + 1] > 0.0f;
        tops[item] = seen ? p[item * step + KVL_DA] : -FLT_MAX;
        sums[item] = seen ? p[item * step + KVL_DA + 1] : 0.0f;
        KVL_BARRIER;
        float best = top;
        for (uint i = 0; i < KVL_WG; i++) best = fmax(best, tops[i]);
        weights[item] = seen ? exp(tops[item] - best) : 0.0f;
        KVL_BARRIER;
        const float keep = top == best ? 1.0f : exp(top - best);
        total *= keep;
        for (uint c = item; c < KVL_DA; c += KVL_WG) acc[c / KVL_WG] *= keep;
        for (uint i = 0; i < min((uint)KVL_WG, n_splits - first); i++) {
            total = fma(weights[i], sums[i], total);
            for (uint c = item; c < KVL_DA; c += KVL_WG) acc[c / KVL_WG] = fma(weights[i], p[i * step + c], acc[c / KVL_WG]);
        }
        top = best;
        KVL_BARRIER;
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (uint c = item; c < KVL_DA; c += KVL_WG) out[row * KVL_DA + c] = acc[c / KVL_WG] * inverse;
}

/* Where tokens go while others are decoded: cl/evict.cl. Each query is then a tile, and leaves its scores in raw [H * G][cells]. */
#if KVL_EVICTS
#define KVL_INDEX_PARAMS global const uint *index_of_layers, ulong ranks_at, uint cells, global float *raw, ulong raw_offset,
#else
#define KVL_INDEX_PARAMS
#endif
/* Where queries choose pages: cl/pages.cl. Each query is then a tile too. */
#if KVL_PICKS
#define KVL_PICK_PARAMS global const uint *picks, uint most_pages, uint budget,
#else
#define KVL_PICK_PARAMS
#endif
#if KVL_RANKED
#define KVL_RANKS_OF(h) (index_of_layers + ranks_at + (ulong)(h)*cells)
#else
#define KVL_RANKS_OF(h) 0
#endif

/* One work-group a (query tile, stream, split). With one split the normalized output goes to out [n][H * G][DA]; with more, each split
 * leaves (m, l, sum) in partial [n_splits][n][H * G][DA + 2] for kvl_merge. Blocks are aligned to the stream, not to the tile or ubatch, so a
 * query's result does not depend on which others were computed with it.
 * With KVL_APPENDS and `append`, the one token's row in the stage is as it was projected: every group turns its own queries, and the one with the
 * newest block makes records of key and value and encodes them before it reads that block. With KVL_JOINS the last group of a kv head to arrive
 * joins its splits; arrived[h] is 0 between launches. (OpenCL 1.2 promises no order of memory between groups; processors that have coherent
 * caches keep it with the fences below.) */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void
kvl_attend(KVL_SLAB_PARAMS, global const ulong *table, ulong table_offset, global float *stage, global const uchar *exact,
           ulong exact_offset, KVL_TURN_PARAMS, float scale, global float *out, global float *partial, uint append, global uint *status,
           KVL_INDEX_PARAMS KVL_PICK_PARAMS KVL_VIEW_PARAMS)
{
    const kvl_turn turn = KVL_TURN_INIT;
    table += table_offset;
    exact += exact_offset;
    const uint item = get_local_id(0), split = get_group_id(0) % n_splits, h = get_group_id(0) / n_splits % KVL_H;
    KVL_HEAD_VIEW(h)
    const kvl_view view = KVL_VIEW_INIT;
    const uint n_tiles = (n + KVL_TILE - 1) / KVL_TILE, tile = n_tiles - 1 - get_group_id(0) / n_splits / KVL_H; /* the longest first */
    KVL_QS float q[KVL_NQ * KVL_DQ], s[KVL_NQ * KVL_B], acc[KVL_PARTS * KVL_NQ * KVL_DA], aux[KVL_NQ * KVL_AUX + 1], row_keep[KVL_NQ];
    KVL_QS float row_m[KVL_NQ], row_l[KVL_NQ];

    uint end[KVL_NQ], start[KVL_NQ], k_end[KVL_NQ], v_end[KVL_NQ]; /* tokens a row sees; first exact token of K and of V */
    uint all_start = UINT_MAX, all_end = 0, k_all_end = UINT_MAX, v_all_end = UINT_MAX, k_any = 0, v_any = 0;
    for (uint r = 0; r < KVL_NQ; r++) {
        const uint token = min(tile * KVL_TILE + r / KVL_G, n - 1), p = p0 + token;
        end[r] = p + 1;
        start[r] = kvl_window_start(view, p);
        k_end[r] = kvl_encoded_end(p, k_lag, k_sealed);
        v_end[r] = kvl_encoded_end(p, v_lag, v_sealed);
        all_start = min(all_start, start[r]);
        all_end = max(all_end, end[r]);
        k_all_end = min(k_all_end, k_end[r]);
        v_all_end = min(v_all_end, v_end[r]);
        k_any = max(k_any, k_end[r]);
        v_any = max(v_any, v_end[r]);
        const global float *source = stage + (ulong)token * q_stride + KVL_QKV_Q(h * KVL_G + r % KVL_G);
        kvl_read_query(source, append, turn, p, scale, q + r * KVL_DQ, item);
        if (item == 0) {
            row_m[r] = -FLT_MAX;
            row_l[r] = 0.0f;
        }
    }
#if KVL_APPENDS
    if (append && split == n_splits - 1)
        for (uint is_k = 0; is_k < 2; is_k++) {
            kvl_finish_row(stage, turn, p0, 0, KVL_H * (is_k ? KVL_G : KVL_G + 1) + h, q_stride, sink != 0);
            kvl_encode_range(KVL_SLAB_ARGS, table, tables, kvl_side_rows(stage, exact, h, is_k, view, p0), h, is_k, p0, p0 + 1, view, status);
        }
#endif
    for (uint i = item; i < KVL_PARTS * KVL_NQ * KVL_DA; i += KVL_WG) acc[i] = 0.0f;
    KVL_BARRIER;
    for (uint r = item; r < KVL_NQ; r += KVL_WG) kvl_k_prepare(q + r * KVL_DQ, aux + r * KVL_AUX);
#if KVL_LANES
    float lanes[KVL_LANES] __attribute__((aligned(64)));
    kvl_lane_angles(turn, all_end - 1, lanes);
#endif
    KVL_BARRIER;

    /* Blocks: first those of the sink rows, then those of the body and whatever follows it in full precision. */
    const uint sink_seen = min(sink, all_end), sink_blocks = (sink_seen + KVL_B - 1) / KVL_B;
    const uint body_from = (all_start - sink) / KVL_B, body_to = all_end > sink ? (all_end - sink + KVL_B - 1) / KVL_B : body_from;
#if KVL_PICKS
    const uint whole = kvl_whole_pages(k_sealed, v_sealed, all_end, sink), read = kvl_pages_read(whole, all_end, budget);
    const uint picked_blocks = read * (KVL_PAGE / KVL_B), skipped_blocks = (whole - read) * (KVL_PAGE / KVL_B);
    picks = KVL_PICKED(picks, h, most_pages);
#else
    const uint skipped_blocks = 0;
#endif
    const uint n_blocks = sink_blocks + (body_to > body_from ? body_to - body_from - skipped_blocks : 0);
    const uint from = (uint)((ulong)n_blocks * split / n_splits), to = (uint)((ulong)n_blocks * (split + 1) / n_splits);
    const kvl_rows k_rows = kvl_side_rows(stage, exact, h, true, view, 0), v_rows = kvl_side_rows(stage, exact, h, false, view, 0);

    for (uint b = from; b < to; b++) {
        const bool is_sink = b < sink_blocks;
        uint index = is_sink ? 0 : (body_from + b - sink_blocks) * KVL_B; /* body index of the block */
#if KVL_PICKS
        if (!is_sink && skipped_blocks != 0)
            index = b - sink_blocks < picked_blocks ? picks[index / KVL_PAGE] * KVL_PAGE + index % KVL_PAGE : index + skipped_blocks * KVL_B;
#endif
        const uint base = is_sink ? b * KVL_B : sink + index, limit = min(base + KVL_B, is_sink ? sink_seen : all_end);
        const bool k_encoded = !is_sink && base < k_any, v_encoded = !is_sink && base < v_any;
        if (k_encoded) {
            const global uchar *block = kvl_page(KVL_SLAB_ARGS, table[kvl_k_entry(h, index, view)]);
            for (uint t0 = item * KVL_SLICE; t0 < KVL_B; t0 += KVL_WG * KVL_SLICE)
                kvl_key_scores(block, kvl_k_table(tables, h, view), h, index % KVL_K_P + t0, q, KVL_PREPARED, turn, KVL_PLACES(base + t0, all_end - 1), KVL_RANKS_OF(h), s + t0);
        }
        KVL_BARRIER;
        if (is_sink || k_all_end < limit) {
            uint exact_from[KVL_NQ];
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? 0 : k_end[r];
#if KVL_SLIDES
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? start[r] - sink : exact_from[r];
            if (is_sink) kvl_sink_scores(k_rows, base, base, limit, exact_from, q, turn, s, item);
            else
#endif
            kvl_exact_scores(k_rows, h, base, is_sink ? base : max(base, k_all_end), limit, exact_from, q, turn, s, item);
            KVL_BARRIER;
        }
#if KVL_RUN == 2 || KVL_RUN == 3
        for (uint r = item; r < KVL_NQ; r += KVL_WG)
            for (uint i = 0; i < limit - base; i++) raw[raw_offset + (ulong)(h * KVL_G + r) * cells + base + i] = s[r * KVL_B + i];
#endif
        for (uint r = item; r < KVL_NQ; r += KVL_WG) {
            const uint see_from = is_sink ? 0 : start[r], see_to = min(end[r], limit);
            if (see_from > base || see_to < base + KVL_B)
                for (uint i = 0; i < KVL_B; i++)
                    if (base + i < see_from || base + i >= see_to) s[r * KVL_B + i] = -FLT_MAX;
            float m = row_m[r], l = row_l[r];
            row_keep[r] = kvl_softmax_block(s + r * KVL_B, &m, &l);
            row_m[r] = m;
            row_l[r] = l;
        }
        KVL_BARRIER;
        for (uint part = 0; part < KVL_PARTS; part++)
            for (uint r = 0; r < KVL_NQ; r++)
                if (row_keep[r] != 1.0f)
                    for (uint c = item; c < KVL_DA; c += KVL_WG) acc[(part * KVL_NQ + r) * KVL_DA + c] *= row_keep[r];
        if (is_sink || v_all_end < limit) {
            uint exact_from[KVL_NQ];
            for (uint r = 0; r < KVL_NQ; r++) exact_from[r] = is_sink ? 0 : v_end[r];
            kvl_exact_accumulate(v_rows, h, base, is_sink ? base : max(base, v_all_end), limit, exact_from, s, turn, acc, item);
            KVL_BARRIER;
            for (uint r = item; r < KVL_NQ; r += KVL_WG) /* the encoded values must not count these again */
                for (uint t = max(base, exact_from[r]); t < base + KVL_B; t++) s[r * KVL_B + t - base] = 0.0f;
        }
        KVL_BARRIER;
        if (v_encoded)
            kvl_add_values(kvl_page(KVL_SLAB_ARGS, table[kvl_v_entry(h, index, view)]), kvl_v_table(tables, h, view), turn, h, index % KVL_V_P, s,
                           acc, item);
        KVL_BARRIER;
    }
#if KVL_PARTS > 1
    for (uint i = item; i < KVL_NQ * KVL_DA; i += KVL_WG)
        for (uint part = 1; part < KVL_PARTS; part++) acc[i] += acc[part * KVL_NQ * KVL_DA + i];
    KVL_BARRIER;
#endif

    for (uint r = 0; r < KVL_NQ; r++) {
        const uint token = tile * KVL_TILE + r / KVL_G;
        if (token >= n) break;
        const ulong row = (ulong)token * (KVL_H * KVL_G) + h * KVL_G + r % KVL_G;
        if (n_splits == 1) {
            const float inverse = row_l[r] > 0.0f ? 1.0f / row_l[r] : 0.0f;
            for (uint c = item; c < KVL_DA; c += KVL_WG) out[row * KVL_DA + c] = acc[r * KVL_DA + c] * inverse;
        } else {
            global float *p = partial + ((ulong)split * n * (KVL_H * KVL_G) + row) * (KVL_DA + 2);
            for (uint c = item; c < KVL_DA; c += KVL_WG) p[c] = acc[r * KVL_DA + c];
            if (item == 0) {
                p[KVL_DA] = row_m[r];
                p[KVL_DA + 1] = row_l[r];
            }
        }
    }
    KVL_COUNT_CUT(status, n)
#if KVL_JOINS
    if (n_splits == 1) return;
    global uint *arrived = status + KVL_COUNTS + h;
    mem_fence(CLK_GLOBAL_MEM_FENCE);
    if (atomic_inc(arrived) != n_splits - 1) return;
    mem_fence(CLK_GLOBAL_MEM_FENCE);
    *arrived = 0;
    for (uint r = 0; r < KVL_NQ; r++) {
        float tops[1], weights[1], sums[1];
        kvl_merge_row(partial, out, h * KVL_G + r, KVL_H * KVL_G, n_splits, 0, tops, weights, sums);
    }
#endif
}

/* The splits of one row; one work-group a row. */
kernel __attribute__((reqd_work_group_size(KVL_WG, 1, 1))) void kvl_merge(global const float *partial, global float *out, uint n_rows,
                                                                          uint n_splits)
{
    KVL_QS float tops[KVL_WG], weights[KVL_WG], sums[KVL_WG];
    kvl_merge_row(partial, out, get_group_id(0), n_rows, n_splits, get_local_id(0), tops, weights, sums);
}
