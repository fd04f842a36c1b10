/* probe: kivi's numbers in the streams that a table names, binary16 in all others. One head of a layer can so be coded alone, which --kv cannot say:
 * its overrides are of layers. A measuring device and no way to save memory: every number is kept as binary16, coded or not.
 *
 *     cc -std=c11 -O2 -shared -fPIC -I compress experiments/e06_sensitivity/probe.c -o runs/e06_tables/probe.so -lm
 *     kvlab check --plugin runs/e06_tables/probe.so probe
 *
 * The table of a stream is one number: 0 leaves it exact, anything else codes it. kvlab calibrate writes one that codes all; sensitivity.py changes it. */
#include "kvl_plugin.h"
#include "kvl_plugin_half.h"

enum { GROUP = 32 };

struct probe {
    int32_t bits;
};

static const struct kvl_option options[] = {
    {"bits", "of the codes", KVL_OPTION_INT, offsetof(struct probe, bits), 2, 2, 8, NULL},
};

static int shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out)
{
    out->group = out->unit = out->page_multiple = dims->role == KVL_ROLE_K ? GROUP : 1;
    out->alignment = 16;
    out->block_bytes = 2ull * dims->page_tokens * dims->head_dim;
    out->table_floats = 1;
    return dims->head_dim % GROUP != 0;
}

static int bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out)
{
    out->payload = 2 * n * dims->head_dim;
    return 0;
}

/* ---- reference: a group is up to 32 tokens of a channel of keys, 32 channels of a token of values ---- */

static uint8_t *at(const struct kvl_codec_dims *dims, const uint8_t *block, uint32_t t, uint32_t c)
{
    return (uint8_t *)block + 2 * (dims->role == KVL_ROLE_K ? (uint64_t)c * dims->page_tokens + t : (uint64_t)t * dims->head_dim + c);
}

static float to_half(float x) { return kvl_plugin_from_half(kvl_plugin_to_half(kvl_plugin_clamp_half(x))); }

/* n numbers, each replaced by what its code stands for. */
static void code_group(float *x, uint32_t n, float top)
{
    float low = INFINITY, high = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvl_plugin_clamp_half(x[i]);
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    const float zero = to_half(low), scale = to_half((high - low) / top);
    for (uint32_t i = 0; i < n; i++) {
        const float code = scale > 0.0f ? fminf(fmaxf(rintf((x[i] - zero) / scale), 0.0f), top) : 0.0f;
        x[i] = fmaf(code, scale, zero);
    }
}

static int encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x, uint8_t *block)
{
    const float top = (float)((1 << ((const struct probe *)priv)->bits) - 1);
    const uint32_t d = dims->head_dim, by_channel = dims->role == KVL_ROLE_K;
    const uint32_t tokens = by_channel ? GROUP : 1, channels = by_channel ? 1 : GROUP;
    for (uint32_t t = 0; t < n; t += tokens)
        for (uint32_t c = 0; c < d; c += channels) {
            float group[GROUP];
            const uint32_t m = by_channel && n - t < GROUP ? n - t : GROUP;
            for (uint32_t i = 0; i < m; i++) group[i] = x[by_channel ? (t + i) * d + c : t * d + c + i];
            if (*table != 0.0f) code_group(group, m, top);
            for (uint32_t i = 0; i < m; i++) {
                const uint16_t half = kvl_plugin_to_half(kvl_plugin_clamp_half(group[i]));
                memcpy(at(dims, block, t0 + t + (by_channel ? i : 0), c + (by_channel ? 0 : i)), &half, sizeof half);
            }
        }
    return 0;
}

static int decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const uint8_t *block, float *x)
{
    for (uint32_t t = t0; t < t0 + n; t++)
        for (uint32_t c = 0; c < dims->head_dim; c++) {
            uint16_t half;
            memcpy(&half, at(dims, block, t, c), sizeof half);
            *x++ = kvl_plugin_from_half(half);
        }
    return 0;
}

/* ---- the same for devices ---- */

static const char device_source[] =
    "#if KVL_IS_K\n"
    "#define AT(t, c) ((ulong)(c) * KVL_P + (t))\n"
    "#define TOKENS 32\n"
    "#define CHANNELS 1\n"
    "#else\n"
    "#define AT(t, c) ((ulong)(t) * KVL_D + (c))\n"
    "#define TOKENS 1\n"
    "#define CHANNELS 32\n"
    "#endif\n"
    "#define TOP ((float)((1 << KVL_OPT_BITS) - 1))\n"
    "void KVL_FN(load8)(const KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t, uint c, float *o)\n"
    "{\n"
    "    for (uint i = 0; i < 8; i++) o[i] = kvl_load_half(block, AT(t, c + i));\n"
    "}\n"
    "float KVL_FN(number)(kvl_rows x, uint t, uint c, uint i)\n"
    "{\n"
    "    return kvl_clamp_half(KVL_IS_K ? kvl_row_at(x, t + i, c) : kvl_row_at(x, t, c + i));\n"
    "}\n"
    "void KVL_FN(encode)(KVL_GLOBAL uchar *block, const KVL_GLOBAL float *table, uint t0, uint n, kvl_rows x)\n"
    "{\n"
    "    for (uint t = 0; t < n; t += TOKENS)\n"
    "        for (uint c = 0; c < KVL_D; c += CHANNELS) {\n"
    "            const uint m = KVL_IS_K ? min(n - t, 32u) : 32u;\n"
    "            float low = INFINITY, high = -INFINITY;\n"
    "            for (uint i = 0; i < m; i++) {\n"
    "                low = fmin(low, KVL_FN(number)(x, t, c, i));\n"
    "                high = fmax(high, KVL_FN(number)(x, t, c, i));\n"
    "            }\n"
    "            const ulong first = AT(t0 + t, c);\n" /* the numbers of a group lie side by side, so the first place holds zero and scale in turn */
    "            kvl_store_half(block, first, low);\n"
    "            const float zero = kvl_load_half(block, first);\n"
    "            kvl_store_half(block, first, kvl_divide(high - low, TOP));\n"
    "            const float scale = kvl_load_half(block, first);\n"
    "            for (uint i = 0; i < m; i++) {\n"
    "                const float v = KVL_FN(number)(x, t, c, i);\n"
    "                const float code = scale > 0.0f ? fmin(fmax(rint(kvl_divide(v - zero, scale)), 0.0f), TOP) : 0.0f;\n"
    "                kvl_store_half(block, first + i, kvl_clamp_half(table[0] != 0.0f ? fma(code, scale, zero) : v));\n"
    "            }\n"
    "        }\n"
    "}\n"
    "#undef AT\n"
    "#undef TOKENS\n"
    "#undef CHANNELS\n"
    "#undef TOP\n";

static void defines(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context)
{
    define(context, "BITS", ((const struct probe *)priv)->bits);
}

static int calibrate(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, const float *x, const struct kvl_calibration *out)
{
    const float all = 1.0f;
    return out->put(out->context, "coded", 1, &all);
}

/* Numbers 0, 1, 2, 9 in a group (a token's channels, or four tokens of a channel) at 2 bits: scale 3, zero 0. With a table of 0 they are exact. */
#define EIGHT(a, b, c, d) a, b, c, d, a, b, c, d
#define ROW(a, b, c, d) EIGHT(a, b, c, d), EIGHT(a, b, c, d), EIGHT(a, b, c, d), EIGHT(a, b, c, d)
static const float value[32] = {ROW(0, 1, 2, 9)}, coded_value[32] = {ROW(0, 0, 3, 9)};
static const float keys[128] = {ROW(0, 0, 0, 0), ROW(1, 1, 1, 1), ROW(2, 2, 2, 2), ROW(9, 9, 9, 9)};
static const float coded_keys[128] = {ROW(0, 0, 0, 0), ROW(0, 0, 0, 0), ROW(3, 3, 3, 3), ROW(9, 9, 9, 9)};
static const float on = 1.0f, off = 0.0f;
static const float *const tables[] = {&on, &off, &on, &off};
static const struct kvl_known_answer answers[] = {
    {"", KVL_ROLE_V, 32, 1, 0, value, coded_value, 0},
    {"", KVL_ROLE_V, 32, 1, 0, value, value, 0},
    {"", KVL_ROLE_K, 32, 4, 0, keys, coded_keys, 0},
    {"", KVL_ROLE_K, 32, 4, 0, keys, keys, 0},
};

static const struct kvl_codec probe = {
    .head = {.magic = KVL_PLUGIN_MAGIC,
             .abi_major = KVL_ABI_MAJOR,
             .abi_minor = KVL_ABI_MINOR,
             .struct_size = sizeof(struct kvl_codec),
             .kind = KVL_KIND_CODEC,
             .name = "probe",
             .summary = "kivi's numbers in chosen streams, binary16 in the others, to measure one head",
             .citation = "quantizer: Liu et al., KIVI, arXiv:2402.02750",
             .byte_version = 1,
             .n_options = sizeof options / sizeof *options,
             .options = options,
             .private_size = sizeof(struct probe),
             .device_source = device_source,
             .card = "# probe: chosen streams coded\n\nGroups of 32: tokens of a channel (keys), channels of a token (values). Stored as binary16 numbers.\n"},
    .roles = KVL_ROLE_K | KVL_ROLE_V,
    .rope_stages = KVL_ROPE_POST | KVL_ROPE_PRE,
    .flags = KVL_CODEC_NEEDS_TABLE,
    .shape = shape,
    .bytes = bytes,
    .ref_encode = encode,
    .ref_decode = decode,
    .defines = defines,
    .calibrate = calibrate,
    .known_answers = answers,
    .n_known_answers = sizeof answers / sizeof *answers,
    .known_tables = tables,
};

extern const struct kvl_plugin_head *const kvl_plugins[];
const struct kvl_plugin_head *const kvl_plugins[] = {&probe.head, NULL};
