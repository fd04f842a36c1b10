/* Device body of f32 and f16 (KVL_OPT_HALF). Keys channel-major [D][P], so that 16 tokens of one channel are one load;
 * values token-major [P][D], so that 16 channels of one token are. */
#if KVL_IS_K
#define AT(t, c) ((ulong)(c) * KVL_P + (t))
#else
#define AT(t, c) ((ulong)(t) * KVL_D + (c))
#endif
#if KVL_OPT_HALF
#define LOAD(block, i) kvl_load_half(block, i)
#define LOAD16(block, i) vload_half16(0, (const KVL_GLOBAL half *)(block) + (i))
#else
#define LOAD(block, i) ((const KVL_GLOBAL float *)(block))[i]
#define LOAD16(block, i) vload16(0, (const KVL_GLOBAL float *)(block) + (i))
#endif

void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)
{
    for (uint i = 0; i < 8; i++) o[i] = LOAD(block, AT(t, c + i));
}

void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)
{
    for (uint i = 0; i < n; i++)
        for (uint c = 0; c < KVL_D; c++) {
            const float value = kvl_row_at(x, i, c);
#if KVL_OPT_HALF
            kvl_store_half(block, AT(t0 + i, c), kvl_clamp_half(value));
#else
            ((KVL_GLOBAL float *)block)[AT(t0 + i, c)] = value;
#endif
        }
}

void KVL_FN(move)(KVL_GLOBAL uchar *to, uint t_to, const KVL_GLOBAL uchar *from, uint t_from)
{
    for (uint c = 0; c < KVL_D; c++)
#if KVL_OPT_HALF
        ((KVL_GLOBAL ushort *)to)[AT(t_to, c)] = ((const KVL_GLOBAL ushort *)from)[AT(t_from, c)];
#else
        ((KVL_GLOBAL uint *)to)[AT(t_to, c)] = ((const KVL_GLOBAL uint *)from)[AT(t_from, c)];
#endif
}

#if KVL_VECTORS
#if KVL_IS_K
void KVL_FN(columns)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, float *x)
{
    for (uint c = 0; c < KVL_D; c++) KVL_STORE16(LOAD16(block, AT(t0, c)), x + c * 16);
}

#define WIDE (KVL_SLICE % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(prepare)(const KVL_QS float *q, KVL_QS float *aux) {}

void KVL_FN(scores)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *q,
                    const KVL_QS float *aux, KVL_QS float *out)
{
    for (uint t = 0; t < KVL_SLICE; t += 16 * WIDE) {
        float16 dot[WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) dot[i] = 0.0f;
        for (uint c = 0; c < KVL_D; c++) {
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 k = LOAD16(block, AT(t0 + t + 16 * w, c));
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) dot[w * KVL_NQ + r] = fma(q[r * KVL_D + c], k, dot[w * KVL_NQ + r]);
            }
        }
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) KVL_STORE16(dot[i], out + i % KVL_NQ * KVL_B + t + i / KVL_NQ * 16);
    }
}
#else
#define WIDE (KVL_D % (16 * KVL_WIDE) == 0 ? KVL_WIDE : 1)

void KVL_FN(accumulate)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, const KVL_QS float *p, KVL_QS float *acc)
{
    for (uint c = 0; c < KVL_D; c += 16 * WIDE) {
        float16 sum[WIDE * KVL_NQ];
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) sum[i] = vload16(0, acc + i % KVL_NQ * KVL_D + c + i / KVL_NQ * 16);
        for (uint t = 0; t < KVL_SLICE; t++) {
            KVL_UNROLL for (uint w = 0; w < WIDE; w++)
            {
                const float16 v = LOAD16(block, AT(t0 + t, c + 16 * w));
                KVL_UNROLL for (uint r = 0; r < KVL_NQ; r++) sum[w * KVL_NQ + r] = fma(p[r * KVL_B + t], v, sum[w * KVL_NQ + r]);
            }
        }
        KVL_UNROLL for (uint i = 0; i < WIDE * KVL_NQ; i++) KVL_STORE16(sum[i], acc + i % KVL_NQ * KVL_D + c + i / KVL_NQ * 16);
    }
}
#endif
#undef WIDE
#endif
#undef AT
#undef LOAD
#undef LOAD16
