/* bf16: a codec to start from. It is a plug-in built outside kvlab, from kvl_plugin.h alone:
 *
 *     cc -std=c11 -O2 -shared -fPIC -I compress compress/template/bf16.c -o bf16.so -lm
 *     kvlab check --plugin ./bf16.so bf16
 *     kvlab eval kld -m M.gguf -f text --plugin ./bf16.so --kv "k=bf16 v=int8" --base f16
 *
 * The order of a codec's file: options, shape, bytes, reference, device body, known answers, the table last. README.md of this folder goes
 * through it; cl/contract.cl says what a device body is given. */
#include "kvl_plugin.h"
#include <math.h>
#include <string.h>

/* ---- options: a private struct that the host allocates and fills from the table, before init() ---- */

enum { ROUND_NEAREST, ROUND_DOWN };

struct bf16 {
    int32_t round;
};

static const struct kvl_option options[] = {
    {"round", "nearest: to nearest even; zero: toward zero", KVL_OPTION_CHOICE, offsetof(struct bf16, round), ROUND_NEAREST, 0, 0,
     "nearest|zero"},
};

/* ---- shape and bytes: what a page of P tokens takes ---- */

enum { BYTES_A_CHANNEL = 2 };

static int shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    out->group = out->unit = out->page_multiple = 1; /* tokens stand for themselves, and none must wait */
    out->alignment = 16;
    out->block_bytes = (uint64_t)dims->page_tokens * dims->head_dim * BYTES_A_CHANNEL;
    return 0; /* non-zero, after host->error(text), refuses the dims */
}

static int bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    out->payload = n * dims->head_dim * BYTES_A_CHANNEL; /* scale and index stay 0 */
    return 0;
}

/* ---- the reference in C: the specification the device is held to, bit for bit ---- */

#define LARGEST 0x1.fep127f /* finite number of 8 bits of significand */

/* The upper half of a binary32. Like every codec's, the input is made finite first; the host counts what was not. */
static uint16_t code_of(const struct bf16 *codec, float x)
{
    const float finite = isnan(x) ? 0.0f : fminf(fmaxf(x, -LARGEST), LARGEST);
    uint32_t bits;
    memcpy(&bits, &finite, sizeof bits);
    if (codec->round == ROUND_NEAREST) bits += 0x7fffu + (bits >> 16 & 1u);
    return (uint16_t)(bits >> 16);
}

static float value_of(uint16_t code)
{
    const uint32_t bits = (uint32_t)code << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Keys lie channel by channel, values token by token: attention reads keys over tokens, values over channels. */
static uint64_t byte_at(const struct kvl_codec_dims *dims, uint32_t t, uint32_t c)
{
    const uint64_t i = dims->role == KVL_ROLE_K ? (uint64_t)c * dims->page_tokens + t : (uint64_t)t * dims->head_dim + c;
    return i * BYTES_A_CHANNEL;
}

static int encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                  uint8_t *block)
{
    for (uint32_t t = t0; t < t0 + n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            const uint16_t code = code_of(priv, *x++);
            memcpy(block + byte_at(dims, t, c), &code, sizeof code);
        }
    return 0;
}

static int decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const uint8_t *block,
                  float *x)
{
    for (uint32_t t = t0; t < t0 + n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            uint16_t code;
            memcpy(&code, block + byte_at(dims, t, c), sizeof code);
            *x++ = value_of(code);
        }
    return 0;
}

/* ---- the same for devices: OpenCL C 1.2, included once as K and once as V ---- */

static const char device_source[] =
    "#if KVL_IS_K\n"
    "#define AT(t, c) ((ulong)(c) * KVL_P + (t))\n"
    "#else\n"
    "#define AT(t, c) ((ulong)(t) * KVL_D + (c))\n"
    "#endif\n"
    "void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)\n"
    "{\n"
    "    for (uint i = 0; i < 8; i++) o[i] = as_float((uint)((const KVL_GLOBAL ushort *)block)[AT(t, c + i)] << 16);\n"
    "}\n"
    "uint KVL_FN(code)(float x)\n"
    "{\n"
    "    const uint bits = as_uint(isnan(x) ? 0.0f : fmin(fmax(x, -0x1.fep127f), 0x1.fep127f));\n"
    "    return (KVL_OPT_NEAREST ? bits + 0x7fffu + (bits >> 16 & 1u) : bits) >> 16;\n"
    "}\n"
    "void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)\n"
    "{\n"
    "    for (uint i = 0; i < n; i++)\n"
    "        for (uint c = 0; c < KVL_D; c++)\n"
    "            ((KVL_GLOBAL ushort *)block)[AT(t0 + i, c)] = (ushort)KVL_FN(code)(kvl_row_at(x, i, c));\n"
    "}\n"
    "#undef AT\n";

/* Options that the device body needs, as KVL_OPT_<name>. */
static void defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    const struct bf16 *codec = priv;
    define(context, "NEAREST", codec->round == ROUND_NEAREST);
}

/* ---- known answers: worked out without this file; `kvlab check` holds every device to them ---- */

static const float x[16] = {0, -0.0f, 1, -1, 1.00390625f, 1.01171875f, 3.14159274f, -2.71828175f,
                            65504, 1e30f, -1e-30f, 0.1f, 255.5f, 256.5f, 0.333333343f, -7};
static const float nearest[16] = {0, -0.0f, 1, -1, 1, 1.015625f, 3.140625f, -2.71875f,
                                  65536, 0x1.94p+99f, -0x1.44p-100f, 0x1.9ap-4f, 256, 256, 0x1.56p-2f, -7};
static const float toward_zero[16] = {0, -0.0f, 1, -1, 1, 1.0078125f, 3.140625f, -2.703125f,
                                      65280, 0x1.92p+99f, -0x1.44p-100f, 0x1.98p-4f, 255, 256, 0x1.54p-2f, -7};

static const struct kvl_known_answer answers[] = {
    {"", KVL_ROLE_K, 16, 1, 0, x, nearest, 0},
    {"", KVL_ROLE_V, 16, 1, 0, x, nearest, 0},
    {"round=zero", KVL_ROLE_K, 16, 1, 0, x, toward_zero, 0},
    {"round=zero", KVL_ROLE_V, 16, 1, 0, x, toward_zero, 0},
};

/* ---- the table, and the one symbol the host looks for ---- */

static const struct kvl_codec bf16 = {
    .head = {.magic = KVL_PLUGIN_MAGIC,
             .abi_major = KVL_ABI_MAJOR,
             .abi_minor = KVL_ABI_MINOR,
             .struct_size = sizeof(struct kvl_codec),
             .kind = KVL_KIND_CODEC,
             .name = "bf16",
             .summary = "the upper half of 32-bit floats",
             .citation = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322",
             .byte_version = 1,
             .n_options = sizeof options / sizeof *options,
             .options = options,
             .private_size = sizeof(struct bf16),
             .device_source = device_source,
             .card = "# bf16: the upper half of 32-bit floats\n\nx' = x rounded to 8 bits of significand, 2 bytes a channel, K [D][P], V [P][D].\n"},
    .roles = KVL_ROLE_K | KVL_ROLE_V,
    .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,
    .shape = shape,
    .bytes = bytes,
    .ref_encode = encode,
    .ref_decode = decode,
    .defines = defines,
    .known_answers = answers,
    .n_known_answers = sizeof answers / sizeof *answers,
};

extern const struct kvl_plugin_head *const kvl_plugins[];
const struct kvl_plugin_head *const kvl_plugins[] = {&bf16.head, NULL};
