/* record.cl: from a projected row to the record that a codec stores, and back.
 *
 *   key     RoPE if KVL_ROPE_PRE is 0, then halves if KVL_ORDER_HALVES (channels of a pair half of rope_dim apart, as Hugging Face has them,
 *           instead of neighbours, as GGUF has them), then the rotation of KVL_ROT_M
 *   value   the rotation
 *   query   always RoPE; then, if keys are stored after RoPE, whatever keys undergo, which leaves scores as they are
 *
 * So keys stored after RoPE are read as they are; keys stored before RoPE are restored one by one when they are read. Values' rotation is
 * undone on attention's output. Exact rows (sinks, tail, stage) hold records too.
 *
 *   KVL_ROT_M      0: no rotation; else R = M (x) S with a dense M of this size and S Sylvester's matrix of size KVL_D / KVL_ROT_M
 *   KVL_TURN_PARAMS  what the functions need of the layer's tables: M and its transpose, and the RoPE table [n_ctx][rope_dim / 2] of (cos, sin) */
#define KVL_TURN_PARAMS global const float *tables, ulong rotation_offset, global const float2 *rotary, uint rope_dim
#define KVL_TURN_INIT {tables + rotation_offset, rotary, rope_dim}

typedef struct {
    const global float *matrix; /* M, then its transpose */
    const global float2 *rotary;
    uint rope_dim;
} kvl_turn;

/* RoPE turns pairs (2i, 2i+1) of x at position p. */
void kvl_rope_row(float *x, kvl_turn turn, uint position)
{
    const global float2 *angle = turn.rotary + (ulong)position * (turn.rope_dim / 2);
    for (uint i = 0; i < turn.rope_dim / 2; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = fma(a, angle[i].x, -(b * angle[i].y));
        x[2 * i + 1] = fma(a, angle[i].y, b * angle[i].x);
    }
}

#if KVL_ORDER_HALVES
/* Pairs to halves, or back. */
void kvl_order_row(float *x, uint rope_dim, bool back)
{
    float y[KVL_D];
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

#if KVL_ROT_M != 0
#define KVL_ROT_S (KVL_D / KVL_ROT_M)
/* The order of operations is the specification: host/cache/rotation.c. */
void kvl_rotate_by(float *x, const global float *matrix)
{
    for (uint span = 1; span < KVL_ROT_S; span *= 2)
        for (uint i = 0; i < KVL_D; i += 2 * span)
            for (uint j = i; j < i + span; j++) {
                const float a = x[j], b = x[j + span];
                x[j] = a + b;
                x[j + span] = a - b;
            }
    float y[KVL_D];
    for (uint i = 0; i < KVL_D; i++) y[i] = 0.0f;
    for (uint a = 0; a < KVL_ROT_M; a++)
        for (uint i = 0; i < KVL_D; i += 8)
            KVL_UNROLL for (uint j = 0; j < 8; j++)
                y[i + j] = fma(x[a * KVL_ROT_S + (i + j) % KVL_ROT_S], matrix[a * KVL_ROT_M + (i + j) / KVL_ROT_S], y[i + j]);
    for (uint i = 0; i < KVL_D; i++) x[i] = y[i];
}
#define kvl_rotate(x, turn) kvl_rotate_by(x, (turn).matrix)
#define kvl_unrotate(x, turn) kvl_rotate_by(x, (turn).matrix + KVL_ROT_M * KVL_ROT_M)
#else
#define kvl_rotate(x, turn)
#define kvl_unrotate(x, turn)
#endif

/* The key of a record, after RoPE and in GGUF order. */
void kvl_restore_key(float *x, kvl_turn turn, uint position)
{
    kvl_unrotate(x, turn);
    kvl_order_row(x, turn.rope_dim, true);
    kvl_rope_row(x, turn, position);
}

#if KVL_SLIDES
/* A sink of a window that has slid `by` tokens past it, as the query sees it: at the place it has behind the window, not at its position. */
void kvl_slide_key(float *x, kvl_turn turn, uint position, uint by)
{
#if KVL_ROPE_PRE
    kvl_restore_key(x, turn, position + by);
#else
    if (by == 0) return;
    kvl_unrotate(x, turn);
    kvl_order_row(x, turn.rope_dim, true);
    kvl_rope_row(x, turn, by);
    kvl_order_row(x, turn.rope_dim, false);
    kvl_rotate(x, turn);
#endif
}
#endif
