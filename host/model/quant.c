/* Weight formats: layouts as in ggml's block structs (ggml-common.h), values as its dequantize_row functions define them.
 *
 * A value is computed in f32 with one rounding a step, in the order written here: scale times code first, then plus or minus the
 * minimum. Numbers of more than one byte are little-endian; blocks lie at any alignment. In the diagrams [n] counts bytes. */
#include "quant.h"
#include "gguf.h"
#include "half.h"
#include <string.h>

static uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t load_u32(const uint8_t *p) { return load_u16(p) | (uint32_t)load_u16(p + 2) << 16; }
static float load_half(const uint8_t *p) { return kvl_half_to_float(load_u16(p)); }

static void dequantize_f32(const uint8_t *in, size_t n_blocks, float *out) { memcpy(out, in, n_blocks * sizeof *out); }

static void dequantize_f16(const uint8_t *in, size_t n_blocks, float *out)
{
    for (size_t i = 0; i < n_blocks; i++) out[i] = load_half(in + 2 * i);
}

static void dequantize_bf16(const uint8_t *in, size_t n_blocks, float *out)
{
    for (size_t i = 0; i < n_blocks; i++) out[i] = kvl_bf16_to_float(load_u16(in + 2 * i));
}

/* ---- blocks of 32 ---- */

/* Code i is the low nibble of byte i, code 16 + i its high nibble; bit j of `high` is the fifth bit of code j. */
static void codes_32(const uint8_t *nibbles, uint32_t high, int code[32])
{
    for (int i = 0; i < 16; i++) {
        code[i] = (nibbles[i] & 15) | (int)(high >> i & 1) << 4;
        code[16 + i] = nibbles[i] >> 4 | (int)(high >> (16 + i) & 1) << 4;
    }
}

/* f16 d [2] | nibbles [16]        x = d (code - 8) */
static void dequantize_q4_0(const uint8_t *in, size_t n_blocks, float *out)
{
    int code[32];
    for (; n_blocks > 0; n_blocks--, in += 18, out += 32) {
        const float d = load_half(in);
        codes_32(in + 2, 0, code);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(code[i] - 8);
    }
}

/* f16 d [2] | f16 m [2] | nibbles [16]        x = d code + m */
static void dequantize_q4_1(const uint8_t *in, size_t n_blocks, float *out)
{
    int code[32];
    for (; n_blocks > 0; n_blocks--, in += 20, out += 32) {
        const float d = load_half(in), m = load_half(in + 2);
        codes_32(in + 4, 0, code);
        for (int i = 0; i < 32; i++) out[i] = d * (float)code[i] + m;
    }
}

/* f16 d [2] | u32 high bits [4] | nibbles [16]        x = d (code - 16) */
static void dequantize_q5_0(const uint8_t *in, size_t n_blocks, float *out)
{
    int code[32];
    for (; n_blocks > 0; n_blocks--, in += 22, out += 32) {
        const float d = load_half(in);
        codes_32(in + 6, load_u32(in + 2), code);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(code[i] - 16);
    }
}

/* f16 d [2] | f16 m [2] | u32 high bits [4] | nibbles [16]        x = d code + m */
static void dequantize_q5_1(const uint8_t *in, size_t n_blocks, float *out)
{
    int code[32];
    for (; n_blocks > 0; n_blocks--, in += 24, out += 32) {
        const float d = load_half(in), m = load_half(in + 2);
        codes_32(in + 8, load_u32(in + 4), code);
        for (int i = 0; i < 32; i++) out[i] = d * (float)code[i] + m;
    }
}

/* f16 d [2] | i8 code [32]        x = d code */
static void dequantize_q8_0(const uint8_t *in, size_t n_blocks, float *out)
{
    for (; n_blocks > 0; n_blocks--, in += 34, out += 32) {
        const float d = load_half(in);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)in[2 + i];
    }
}

/* ---- blocks of 256 ---- */

/* The 12 bytes of Q4_K and Q5_K that hold a 6-bit scale s and minimum m for each of the 8 groups of 32:
 *   byte 0..3   s[0..3], above it the two high bits of s[4..7]
 *   byte 4..7   m[0..3], above it the two high bits of m[4..7]
 *   byte 8..11  low nibble: low four bits of s[4..7], high nibble: those of m[4..7] */
static void scale_and_min(const uint8_t *packed, int group, int *scale, int *min)
{
    if (group < 4) {
        *scale = packed[group] & 63;
        *min = packed[4 + group] & 63;
    } else {
        *scale = (packed[4 + group] & 15) | packed[group - 4] >> 6 << 4;
        *min = packed[4 + group] >> 4 | packed[group] >> 6 << 4;
    }
}

/* x = (d s) code - (dmin m). Groups 2j and 2j+1 are the low and the high nibbles of the 32 bytes at 32 j;
 * bit g of high[i] is the fifth bit of code i of group g. */
static void groups_of_32(const uint8_t *head, const uint8_t *high, const uint8_t *nibbles, float *out)
{
    const float d = load_half(head), d_min = load_half(head + 2);
    for (int group = 0; group < 8; group++) {
        int s, m;
        scale_and_min(head + 4, group, &s, &m);
        const float scale = d * (float)s, min = d_min * (float)m;
        for (int i = 0; i < 32; i++) {
            int code = nibbles[group / 2 * 32 + i] >> group % 2 * 4 & 15;
            if (high != NULL) code |= (high[i] >> group & 1) << 4;
            out[group * 32 + i] = scale * (float)code - min;
        }
    }
}

/* f16 d [2] | f16 dmin [2] | scales and minima [12] | nibbles [128] */
static void dequantize_q4_k(const uint8_t *in, size_t n_blocks, float *out)
{
    for (; n_blocks > 0; n_blocks--, in += 144, out += 256) groups_of_32(in, NULL, in + 16, out);
}

/* f16 d [2] | f16 dmin [2] | scales and minima [12] | high bits [32] | nibbles [128] */
static void dequantize_q5_k(const uint8_t *in, size_t n_blocks, float *out)
{
    for (; n_blocks > 0; n_blocks--, in += 176, out += 256) groups_of_32(in, in + 16, in + 48, out);
}

/* nibbles [128] | bit pairs [64] | i8 s [16] | f16 d [2]        x = (d s) (code - 32), one s a group of 16
 * Each half of 128 codes has 64 bytes of nibbles and 32 of pairs. Its quarter r of 32: nibbles at byte 32 (r % 2), the low ones for
 * r < 2; the pair 2 r bits up. */
static void dequantize_q6_k(const uint8_t *in, size_t n_blocks, float *out)
{
    for (; n_blocks > 0; n_blocks--, in += 210, out += 256) {
        const float d = load_half(in + 208);
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, quarter = i / 32 % 4, lane = i % 32;
            const int nibble = in[half * 64 + quarter % 2 * 32 + lane] >> quarter / 2 * 4 & 15;
            const int pair = in[128 + half * 32 + lane] >> 2 * quarter & 3;
            const float scale = d * (float)(int8_t)in[192 + i / 16];
            out[i] = scale * (float)((nibble | pair << 4) - 32);
        }
    }
}

/* clang-format off */
const struct kvl_quant_type kvl_quant_types[] = {
    /* name   type        block bytes  reference        device */
    {"F32",  KVL_GGUF_F32,    1,   4, dequantize_f32,  "cl/weight/f32.cl"},
    {"F16",  KVL_GGUF_F16,    1,   2, dequantize_f16,  "cl/weight/f16.cl"},
    {"BF16", KVL_GGUF_BF16,   1,   2, dequantize_bf16, "cl/weight/bf16.cl"},
    {"Q4_0", KVL_GGUF_Q4_0,  32,  18, dequantize_q4_0, "cl/weight/q4_0.cl"},
    {"Q4_1", KVL_GGUF_Q4_1,  32,  20, dequantize_q4_1, "cl/weight/q4_1.cl"},
    {"Q5_0", KVL_GGUF_Q5_0,  32,  22, dequantize_q5_0, "cl/weight/q5_0.cl"},
    {"Q5_1", KVL_GGUF_Q5_1,  32,  24, dequantize_q5_1, "cl/weight/q5_1.cl"},
    {"Q8_0", KVL_GGUF_Q8_0,  32,  34, dequantize_q8_0, "cl/weight/q8_0.cl"},
    {"Q4_K", KVL_GGUF_Q4_K, 256, 144, dequantize_q4_k, "cl/weight/q4_k.cl"},
    {"Q5_K", KVL_GGUF_Q5_K, 256, 176, dequantize_q5_k, "cl/weight/q5_k.cl"},
    {"Q6_K", KVL_GGUF_Q6_K, 256, 210, dequantize_q6_k, "cl/weight/q6_k.cl"},
};
/* clang-format on */
const size_t kvl_n_quant_types = sizeof kvl_quant_types / sizeof kvl_quant_types[0];

const struct kvl_quant_type *kvl_quant_type(uint32_t gguf_type)
{
    for (size_t i = 0; i < kvl_n_quant_types; i++)
        if (kvl_quant_types[i].gguf_type == gguf_type) return &kvl_quant_types[i];
    return NULL;
}
