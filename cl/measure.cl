/* Peaks of a device: read and copy bandwidth, multiply-add rate, and the cost of one small launch.
 *
 *   KVL_WIDTH   floats a vector: 16 on CPUs (one AVX-512 register, two AVX), 4 elsewhere
 *   KVL_CHAINS  independent multiply-adds in flight a work-item
 *   KVL_FMA     1: fma(), slow without hardware for it; 0: mad(), which a compiler may leave as two instructions */
#ifndef KVL_WIDTH
#define KVL_WIDTH 16
#endif
#ifndef KVL_CHAINS
#define KVL_CHAINS 8
#endif
#ifndef KVL_FMA
#define KVL_FMA 0
#endif

#define KVL_JOIN_(a, b) a##b
#define KVL_JOIN(a, b) KVL_JOIN_(a, b)
#define KVL_VECTOR KVL_JOIN(float, KVL_WIDTH)

#if KVL_FMA
#define KVL_MULTIPLY_ADD fma
#else
#define KVL_MULTIPLY_ADD mad
#endif

/* A CPU core streams a piece of its own; GPU neighbours read neighbours. */
#if KVL_DEVICE_CPU
#define KVL_FIRST(share) (get_global_id(0) * (share))
#define KVL_STEP 1
#else
#define KVL_FIRST(share) get_global_id(0)
#define KVL_STEP get_global_size(0)
#endif

/* share: vectors a work-item, a multiple of 4. */
kernel void kvl_measure_read(global const KVL_VECTOR *x, global KVL_VECTOR *sums, ulong share)
{
    global const KVL_VECTOR *mine = x + KVL_FIRST(share);
    const size_t step = KVL_STEP;
    KVL_VECTOR a = 0, b = 0, c = 0, d = 0;
    for (ulong i = 0; i < share; i += 4, mine += 4 * step) {
        a += mine[0];
        b += mine[step];
        c += mine[2 * step];
        d += mine[3 * step];
    }
    sums[get_global_id(0)] = (a + b) + (c + d);
}

kernel void kvl_measure_copy(global const KVL_VECTOR *x, global KVL_VECTOR *y, ulong share)
{
    const size_t first = KVL_FIRST(share), step = KVL_STEP;
    for (ulong i = 0; i < share; i++) y[first + i * step] = x[first + i * step];
}

kernel void kvl_measure_fma(global KVL_VECTOR *out, float factor, float term, uint rounds)
{
    KVL_VECTOR acc[KVL_CHAINS];
    for (int c = 0; c < KVL_CHAINS; c++) acc[c] = (KVL_VECTOR)(get_global_id(0) + c);
    for (uint r = 0; r < rounds; r++) {
#pragma unroll
        for (int c = 0; c < KVL_CHAINS; c++) acc[c] = KVL_MULTIPLY_ADD(acc[c], (KVL_VECTOR)factor, (KVL_VECTOR)term);
    }
    KVL_VECTOR sum = acc[0];
    for (int c = 1; c < KVL_CHAINS; c++) sum += acc[c];
    out[get_global_id(0)] = sum;
}

/* One link of a chain: each launch needs the last one's result. */
kernel void kvl_measure_link(global float *x) { x[get_global_id(0)] += 1.0f; }
