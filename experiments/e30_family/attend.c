/* Causal attention of short heads, forward and back, for train.py: q [B][T][H][DK], k [B][T][HK][DK], v [B][T][HK][16], T a multiple of 16.
 * Sixteen queries of a head are the lanes of a vector, so that softmax needs no sum across lanes; nothing of size T x T is stored.
 * One thread. Backward recomputes the probabilities from the logarithm of each query's sum (arXiv:2205.14135). */
#include <math.h>
#include <string.h>

enum { LANES = 16, DV = 16, DK_MAX = 32, T_MAX = 4096 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int bits __attribute__((vector_size(4 * LANES)));

struct shape {
    long batch, t, n_head, n_kv_head;
};

static inline lanes load(const float *x)
{
    lanes y;
    memcpy(&y, x, sizeof(y));
    return y;
}

static inline lanes larger(lanes a, lanes b)
{
    bits mask = a > b;
    return (lanes)((mask & (bits)a) | (~mask & (bits)b));
}

static inline lanes fill(float x)
{
    return x - (lanes){0};
}

/* e^x for x <= 0 as 2^n 2^f; f in [-1/2, 1/2], Taylor's polynomial of 2^f, relative error below 3e-7. */
static inline lanes exponential(lanes x)
{
    const lanes shift = fill(12582912.0f);
    lanes power = larger(x, fill(-86.0f)) * 1.44269504f;
    lanes whole = power + shift;
    lanes f = power - (whole - shift);
    lanes sum = f * 1.54035304e-4f + 1.33335581e-3f;
    sum = sum * f + 9.61812911e-3f;
    sum = sum * f + 5.55041087e-2f;
    sum = sum * f + 2.40226507e-1f;
    sum = sum * f + 6.93147181e-1f;
    sum = sum * f + 1.0f;
    return (lanes)((bits)sum + (((bits)whole - (bits)shift) << 23));
}

/* x [LANES rows, each `stride` after the last][n] times scale -> out [n] of lanes */
static inline void transpose(const float *x, long stride, int n, float scale, lanes *out)
{
    for (int c = 0; c < n; c++) {
        for (int row = 0; row < LANES; row++) {
            out[c][row] = x[row * stride + c] * scale;
        }
    }
}

/* Products of the 16 queries `columns` [n] with four rows of x. */
static inline void four_products(const lanes *columns, const float *x, long stride, int n, lanes *out)
{
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (int i = 0; i < n; i++) {
        a += columns[i] * x[i];
        b += columns[i] * x[stride + i];
        c += columns[i] * x[2 * stride + i];
        d += columns[i] * x[3 * stride + i];
    }
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}

/* Key `ahead` of the first of 16 queries is hidden from those before it. */
static inline lanes hide(lanes score, long ahead)
{
    const bits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    bits hidden = lane < (int)ahead - (bits){0};
    return (lanes)((hidden & (bits)fill(-1e30f)) | (~hidden & (bits)score));
}

static inline void tile_forward(long first, int dk, float scale, const float *q, long q_stride, const float *k, long k_stride, const float *v,
                                long v_stride, float *out, long out_stride, float *log_sum)
{
    lanes columns[DK_MAX], score[T_MAX], sums[DV] = {0}, sum = {0}, most = fill(-1e30f);
    transpose(q, q_stride, dk, scale, columns);
    for (long j = 0; j < first + LANES; j += 4) {
        four_products(columns, k + j * k_stride, k_stride, dk, score + j);
        for (int i = 0; i < 4; i++) {
            score[j + i] = j >= first ? hide(score[j + i], j + i - first) : score[j + i];
            most = larger(most, score[j + i]);
        }
    }
    for (long j = 0; j < first + LANES; j++) {
        lanes mass = exponential(score[j] - most);
        sum += mass;
        for (int c = 0; c < DV; c++) {
            sums[c] += mass * v[j * v_stride + c];
        }
    }
    for (int row = 0; row < LANES; row++) {
        log_sum[row] = most[row] + logf(sum[row]);
        for (int c = 0; c < DV; c++) {
            out[row * out_stride + c] = sums[c][row] / sum[row];
        }
    }
}

/* Adds to four rows of out [4][n]: the sum over 16 lanes of weights[4] times the lanes' rows of x. */
static inline void add_four_rows(const lanes *weights, const float *x, long x_stride, float scale, int n, float *out, long out_stride)
{
    for (int c = 0; c < n; c += LANES) {
        lanes a = {0}, b = {0}, d = {0}, e = {0};
        for (int row = 0; row < LANES; row++) {
            lanes values = load(x + row * x_stride + c);
            a += weights[0][row] * values;
            b += weights[1][row] * values;
            d += weights[2][row] * values;
            e += weights[3][row] * values;
        }
        lanes added[4] = {a, b, d, e};
        for (int i = 0; i < 4; i++) {
            lanes sum = load(out + i * out_stride + c) + added[i] * scale;
            memcpy(out + i * out_stride + c, &sum, sizeof(sum));
        }
    }
}

static inline void tile_backward(long first, int dk, float scale, const float *q, float *q_grad, long q_stride, const float *k, float *k_grad, long k_stride,
                                 const float *v, float *v_grad, long v_stride, const float *out, const float *out_grad, long out_stride,
                                 const float *log_sum)
{
    lanes columns[DK_MAX], grad_columns[DV], out_columns[DV], q_sums[DK_MAX] = {0}, delta = {0}, norm = load(log_sum);
    transpose(q, q_stride, dk, scale, columns);
    transpose(out_grad, out_stride, DV, 1.0f, grad_columns);
    transpose(out, out_stride, DV, 1.0f, out_columns);
    for (int c = 0; c < DV; c++) {
        delta += grad_columns[c] * out_columns[c];
    }
    for (long j = 0; j < first + LANES; j += 4) {
        lanes score[4], mass[4], change[4];
        four_products(columns, k + j * k_stride, k_stride, dk, score);
        four_products(grad_columns, v + j * v_stride, v_stride, DV, change);
        for (int i = 0; i < 4; i++) {
            mass[i] = exponential((j >= first ? hide(score[i], j + i - first) : score[i]) - norm);
            change[i] = mass[i] * (change[i] - delta);
        }
        for (int c = 0; c < dk; c++) {
            q_sums[c] += change[0] * k[j * k_stride + c] + change[1] * k[(j + 1) * k_stride + c] + change[2] * k[(j + 2) * k_stride + c] +
                         change[3] * k[(j + 3) * k_stride + c];
        }
        add_four_rows(change, q, q_stride, scale, dk, k_grad + j * k_stride, k_stride);
        add_four_rows(mass, out_grad, out_stride, 1.0f, DV, v_grad + j * v_stride, v_stride);
    }
    for (int c = 0; c < dk; c++) {
        for (int row = 0; row < LANES; row++) {
            q_grad[row * q_stride + c] = q_sums[c][row] * scale;
        }
    }
}

static inline void forward(struct shape s, int dk, const float *q, const float *k, const float *v, float *out, float *log_sum)
{
    long q_stride = s.n_head * dk, k_stride = s.n_kv_head * dk, v_stride = s.n_kv_head * DV, out_stride = s.n_head * DV;
    for (long b = 0; b < s.batch; b++) {
        for (long h = 0; h < s.n_head; h++) {
            long kv_head = h / (s.n_head / s.n_kv_head);
            const float *keys = k + b * s.t * k_stride + kv_head * dk, *values = v + b * s.t * v_stride + kv_head * DV;
            for (long t = 0; t < s.t; t += LANES) {
                tile_forward(t, dk, 1.0f / sqrtf((float)dk), q + (b * s.t + t) * q_stride + h * dk, q_stride, keys, k_stride, values, v_stride,
                             out + (b * s.t + t) * out_stride + h * DV, out_stride, log_sum + (b * s.n_head + h) * s.t + t);
            }
        }
    }
}

static inline void backward(struct shape s, int dk, const float *q, const float *k, const float *v, const float *out, const float *log_sum,
                            const float *out_grad, float *q_grad, float *k_grad, float *v_grad)
{
    long q_stride = s.n_head * dk, k_stride = s.n_kv_head * dk, v_stride = s.n_kv_head * DV, out_stride = s.n_head * DV;
    memset(k_grad, 0, sizeof(float) * (size_t)(s.batch * s.t * k_stride));
    memset(v_grad, 0, sizeof(float) * (size_t)(s.batch * s.t * v_stride));
    for (long b = 0; b < s.batch; b++) {
        for (long h = 0; h < s.n_head; h++) {
            long kv_head = h / (s.n_head / s.n_kv_head), key_at = b * s.t * k_stride + kv_head * dk, value_at = b * s.t * v_stride + kv_head * DV;
            for (long t = 0; t < s.t; t += LANES) {
                long q_at = (b * s.t + t) * q_stride + h * dk, out_at = (b * s.t + t) * out_stride + h * DV;
                tile_backward(t, dk, 1.0f / sqrtf((float)dk), q + q_at, q_grad + q_at, q_stride, k + key_at, k_grad + key_at, k_stride, v + value_at,
                              v_grad + value_at, v_stride, out + out_at, out_grad + out_at, out_stride, log_sum + (b * s.n_head + h) * s.t + t);
            }
        }
    }
}

void attend(long batch, long t, long n_head, long n_kv_head, long dk, const float *q, const float *k, const float *v, float *out, float *log_sum)
{
    struct shape s = {batch, t, n_head, n_kv_head};
    if (dk == 16) {
        forward(s, 16, q, k, v, out, log_sum);
    } else {
        forward(s, 32, q, k, v, out, log_sum);
    }
}

void attend_backward(long batch, long t, long n_head, long n_kv_head, long dk, const float *q, const float *k, const float *v, const float *out,
                     const float *log_sum, const float *out_grad, float *q_grad, float *k_grad, float *v_grad)
{
    struct shape s = {batch, t, n_head, n_kv_head};
    if (dk == 16) {
        backward(s, 16, q, k, v, out, log_sum, out_grad, q_grad, k_grad, v_grad);
    } else {
        backward(s, 32, q, k, v, out, log_sum, out_grad, q_grad, k_grad, v_grad);
    }
}
