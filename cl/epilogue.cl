/* epilogue.cl: where the products of a head are, and what becomes of those of a pair of panels.
 *
 * A grid's third axis counts heads: matrices of one shape, each in whole pairs of panels, whose rows lie x_step and y_step floats apart. */
#define KVL_WORDS_BEFORE(n_panels, panel_words) ((ulong)get_group_id(2) * (((n_panels) + 1) / 2 * 2) * (panel_words))
#define KVL_ROWS_BEFORE(step) ((ulong)get_group_id(2) * (step))

#define KVL_STORE 0
#define KVL_ADD 1    /* y += product: the residual */
#define KVL_GATED 2  /* and more: even panels are gates, odd ones values: y = f(gate) * value, half as many outputs */
#define KVL_GELU 3   /* f: silu, or gelu by its approximation with tanh (Hendrycks, Gimpel 2016) */

w_float kvl_gate(w_float x, uint epilogue)
{
    const w_float slope = epilogue == KVL_GELU ? 1.5957691216057308f * fma(0.044715f * x * x, x, x) : x; /* 2 sqrt(2 / pi) */
    return x / (1.0f + exp(-slope));
}

#if KVL_W_LANES == 16
/* The first min(n, 16) lanes. */
void kvl_store_lanes(global float *y, uint n, float16 v, bool add)
{
    if (n >= 16) {
        vstore16(add ? vload16(0, y) + v : v, 0, y);
        return;
    }
    float lane[16];
    vstore16(v, 0, lane);
    for (uint i = 0; i < n; i++) y[i] = add ? y[i] + lane[i] : lane[i];
}

/* Panels 2 pair and 2 pair + 1 (which may be missing) of n outputs in all. */
void kvl_store_pair(global float *y, uint pair, uint n, float16 even, float16 odd, uint epilogue)
{
    if (epilogue >= KVL_GATED) {
        kvl_store_lanes(y + pair * 16, n - pair * 16, kvl_gate(even, epilogue) * odd, false);
        return;
    }
    kvl_store_lanes(y + pair * 32, n - pair * 32, even, epilogue == KVL_ADD);
    if (n > pair * 32 + 16) kvl_store_lanes(y + pair * 32 + 16, n - pair * 32 - 16, odd, epilogue == KVL_ADD);
}
#else
void kvl_store(global float *y, uint i, uint n, float v, bool add)
{
    if (i < n) y[i] = add ? y[i] + v : v;
}

/* Row `row` of both panels. */
void kvl_store_pair(global float *y, uint pair, uint row, uint n, float even, float odd, uint epilogue)
{
    if (epilogue >= KVL_GATED) {
        kvl_store(y, pair * 16 + row, n, kvl_gate(even, epilogue) * odd, false);
        return;
    }
    kvl_store(y, pair * 32 + row, n, even, epilogue == KVL_ADD);
    kvl_store(y, pair * 32 + 16 + row, n, odd, epilogue == KVL_ADD);
}
#endif
