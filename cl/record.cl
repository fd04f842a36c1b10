/* record.cl: from a projected row to the record that a codec stores, and back.
 *
 *   key     RoPE if KVL_ROPE_PRE is 0, then halves if KVL_ORDER_HALVES (channels of a pair half of rope_dim apart, as Hugging Face has them,
 *           instead of neighbours, as GGUF has them), then the projection of KVL_K_RANK (all heads of the stream together), then the rotation
 *           of KVL_K_ROT_M
 *   value   the projection of KVL_V_RANK, then the rotation of KVL_V_ROT_M
 *   query   always RoPE; then whatever leaves its scores with stored keys as they are: what keys undergo, and for a projection its other half.
 *           Where keys are restored when they are read (KVL_RESTORES), nothing
 *
 * So keys stored after RoPE are read as they are; keys stored before RoPE are restored one by one when they are read, and so are those whose
 * projection asks for it (KVL_K_REBUILT). Values' rotation and projection are undone on attention's output, or one by one (KVL_V_REBUILT). Exact
 * rows (sinks, tail, stage) hold records too.
 *
 * Where layers share records (KVL_LAYERS) a layer's rows stay as they are but for RoPE and order, and a record is the sum of what the layers' projections
 * make of them (kvl_join of store.cl): then it is rotated. Such records are always made into rows again.
 *
 *   KVL_K_ROT_M    0: no rotation; else R = M (x) S with a dense M of this size and S Sylvester's matrix of size KVL_K_ROT_D / KVL_K_ROT_M. It
 *                  turns the record's first KVL_K_ROT_D channels. KVL_V_ROT_* are the value's
 *   KVL_K_RANK     0: no projection; else the channels of the record that stands for the KVL_ROW channels of the stream's heads
 *   KVL_ROPE_FIRST the first channel that RoPE turns
 *   KVL_TURN_PARAMS  what the functions need of the layer's tables: M and its transpose, the projections [H][2][KVL_ROW * rank] (down, then up),
 *                    and the RoPE table [n_ctx][rope_dim / 2] of (cos, sin) */
#define KVL_TURN_PARAMS                                                                                                \
    global const float *tables, ulong k_rotation, ulong v_rotation, ulong k_projection, ulong v_projection, global const float2 *rotary, uint rope_dim
#define KVL_TURN_INIT {tables + k_rotation, tables + v_rotation, tables + k_projection, tables + v_projection, rotary, rope_dim}

typedef struct {
    const global float *k_matrix, *v_matrix; /* M, then its transpose */
    const global float *k_projection, *v_projection;
    const global float2 *rotary;
    uint rope_dim;
} kvl_turn;

#define KVL_ROW (KVL_HEADS * KVL_HD)
#define KVL_RESTORES (KVL_ROPE_PRE || KVL_K_REBUILT)

/* RoPE turns pairs (2i, 2i+1) of x, the channels from KVL_ROPE_FIRST on of a head, at position p. */
void kvl_rope_row(float *x, kvl_turn turn, uint position)
{
    const global float2 *angle = turn.rotary + (ulong)position * (turn.rope_dim / 2);
    for (uint i = 0; i < turn.rope_dim / 2; i++) {
        const float a = x[KVL_ROPE_FIRST + 2 * i], b = x[KVL_ROPE_FIRST + 2 * i + 1];
        x[KVL_ROPE_FIRST + 2 * i] = fma(a, angle[i].x, -(b * angle[i].y));
        x[KVL_ROPE_FIRST + 2 * i + 1] = fma(a, angle[i].y, b * angle[i].x);
    }
}

#if KVL_ORDER_HALVES
/* Pairs to halves, or back. */
void kvl_order_row(float *x, uint rope_dim, bool back)
{
    float y[KVL_HD];
    x += KVL_ROPE_FIRST;
    for (uint c = 0; c < rope_dim; c++) y[c] = x[c];
    for (uint i = 0; i < rope_dim / 2; i++)
        for (uint part = 0; part < 2; part++) {
            const uint pair = 2 * i + part, halves = i + part * (rope_dim / 2);
            x[back ? pair : halves] = y[back ? halves : pair];
        }
}
#else
#define kvl_order_row(x, rope_dim, back)
#endif

#if KVL_K_ROT_M != 0
#define KVL_ROT_LARGEST (KVL_K_ROT_D > KVL_V_ROT_D ? KVL_K_ROT_D : KVL_V_ROT_D)
/* Of d channels, m of them dense. The order of operations is the specification: host/cache/rotation.c. */
void kvl_rotate_by(float *x, const global float *matrix, uint d, uint m)
{
    const uint s = d / m;
    for (uint span = 1; span < s; span *= 2)
        for (uint i = 0; i < d; i += 2 * span)
            for (uint j = i; j < i + span; j++) {
                const float a = x[j], b = x[j + span];
                x[j] = a + b;
                x[j + span] = a - b;
            }
    float y[KVL_ROT_LARGEST];
    for (uint i = 0; i < d; i++) y[i] = 0.0f;
    for (uint a = 0; a < m; a++)
        for (uint i = 0; i < d; i += 8)
            KVL_UNROLL for (uint j = 0; j < 8; j++) y[i + j] = fma(x[a * s + (i + j) % s], matrix[a * m + (i + j) / s], y[i + j]);
    for (uint i = 0; i < d; i++) x[i] = y[i];
}
#define kvl_rotate_key(x, turn) kvl_rotate_by(x, (turn).k_matrix, KVL_K_ROT_D, KVL_K_ROT_M)
#define kvl_unrotate_key(x, turn) kvl_rotate_by(x, (turn).k_matrix + KVL_K_ROT_M * KVL_K_ROT_M, KVL_K_ROT_D, KVL_K_ROT_M)
#define kvl_rotate_value(x, turn) kvl_rotate_by(x, (turn).v_matrix, KVL_V_ROT_D, KVL_V_ROT_M)
#define kvl_unrotate_value(x, turn) kvl_rotate_by(x, (turn).v_matrix + KVL_V_ROT_M * KVL_V_ROT_M, KVL_V_ROT_D, KVL_V_ROT_M)
#else
#define kvl_rotate_key(x, turn)
#define kvl_unrotate_key(x, turn)
#define kvl_rotate_value(x, turn)
#define kvl_unrotate_value(x, turn)
#endif

/* y[r] += sum over c of x[c] * matrix[c][r], c < n, r < columns (a multiple of 8), in the order of c. */
void kvl_add_product(const float *x, uint n, const global float *matrix, uint columns, float *y)
{
    for (uint c = 0; c < n; c++)
        for (uint r = 0; r < columns; r += 8)
            KVL_UNROLL for (uint i = 0; i < 8; i++) y[r + i] = fma(x[c], matrix[c * columns + r + i], y[r + i]);
}

/* Of stream h: the matrix that rows are multiplied with, [KVL_ROW][rank], and that of records, [rank][KVL_ROW], or as queries want it,
 * [KVL_ROW][rank]. */
#define KVL_DOWN(projection, rank, h) ((projection) + (ulong)(h) * (2 * KVL_ROW * (rank)))
#define KVL_UP(projection, rank, h) (KVL_DOWN(projection, rank, h) + KVL_ROW * (rank))

/* A key's record x [KVL_DK] of stream h becomes the keys of its heads [KVL_ROW], after RoPE and in GGUF order. Where layers share it: of this layer. */
void kvl_restore_key(float *x, kvl_turn turn, uint h, uint position)
{
    kvl_unrotate_key(x, turn);
#if KVL_K_RANK != 0
    float record[KVL_K_RANK];
    for (uint r = 0; r < KVL_K_RANK; r++) record[r] = x[r];
    for (uint c = 0; c < KVL_ROW; c++) x[c] = 0.0f;
    kvl_add_product(record, KVL_K_RANK, KVL_UP(turn.k_projection, KVL_K_RANK, h), KVL_ROW, x);
#endif
    for (uint i = 0; i < KVL_HEADS; i++) {
        kvl_order_row(x + i * KVL_HD, turn.rope_dim, true);
#if KVL_ROPE_PRE
        kvl_rope_row(x + i * KVL_HD, turn, position);
#endif
    }
}

#if KVL_LAYERS > 1
/* The same of an exact row, which holds the layer's own keys. */
void kvl_restore_exact(float *x, kvl_turn turn, uint h, uint position)
{
    for (uint i = 0; i < KVL_HEADS; i++) {
        kvl_order_row(x + i * KVL_HD, turn.rope_dim, true);
#if KVL_ROPE_PRE
        kvl_rope_row(x + i * KVL_HD, turn, position);
#endif
    }
}
#else
#define kvl_restore_exact kvl_restore_key
#endif

#if KVL_SLIDES /* of layers without a projection */
/* A sink of a window that has slid `by` tokens past it, as the query sees it: at the place it has behind the window, not at its position. */
void kvl_slide_key(float *x, kvl_turn turn, uint position, uint by)
{
#if KVL_ROPE_PRE
    kvl_restore_key(x, turn, 0, position + by);
#else
    if (by == 0) return;
    kvl_unrotate_key(x, turn);
    kvl_order_row(x, turn.rope_dim, true);
    kvl_rope_row(x, turn, by);
    kvl_order_row(x, turn.rope_dim, false);
    kvl_rotate_key(x, turn);
#endif
}
#endif
