/* random: noise, the floor that a score must beat; random_raw: without protected tokens, as kvpress has it. */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_random_card_md[], kvl_text_compress_score_random_random_cl[];

struct random_score {
    int32_t seed, sink, window, raw;
};

/* splitmix64 of the index: the i-th number does not depend on those before it. */
static double uniform(uint64_t seed, uint64_t i)
{
    uint64_t z = seed * 0xd1342543de82ef95u + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static int random_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct random_score *o = priv;
    const uint32_t n = in->n_token, sink = o->raw ? 0 : kvl_score_min((uint32_t)o->sink, n), window = o->raw ? 0 : kvl_score_min((uint32_t)o->window, n);
    for (uint32_t h = 0; h < in->n_kv_head; h++)
        for (uint32_t t = 0; t < n; t++)
            score[(size_t)h * n + t] = (float)uniform((uint64_t)o->seed, ((uint64_t)in->layer * in->n_kv_head + h) << 32 | t);
    kvl_score_fill(in, score, 0, sink, 2.0f);
    kvl_score_fill(in, score, n - window, n, 2.0f);
    return 0;
}

static int random_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    const struct random_score *o = priv;
    out->source = KVL_RUN_POSITION;
    out->first = o->raw ? 0 : (uint32_t)o->sink;
    out->newest = o->raw ? 0 : (uint32_t)o->window;
    out->parameter = (uint32_t)o->seed;
    return 0;
}

static int raw_init(void *priv, const struct kvl_host *host)
{
    ((struct random_score *)priv)->raw = 1;
    return 0;
}

static const struct kvl_option options[] = {
    {"seed", "of the noise", KVL_OPTION_INT, offsetof(struct random_score, seed), 0, 0, INT32_MAX, NULL},
    {"sink", "first tokens, always kept", KVL_OPTION_INT, offsetof(struct random_score, sink), 4, 0, INT32_MAX, NULL},
    {"window", "newest tokens, always kept", KVL_OPTION_INT, offsetof(struct random_score, window), 64, 0, INT32_MAX, NULL},
};
static const struct kvl_option raw_options[] = {
    {"seed", "of the noise", KVL_OPTION_INT, offsetof(struct random_score, seed), 0, 0, INT32_MAX, NULL},
};

const struct kvl_score kvl_score_random = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "random", "noise; sinks and the newest tokens are kept", "none", options, struct random_score,
                           kvl_text_compress_score_random_card_md, .device_source = kvl_text_compress_score_random_random_cl),
    .ref = random_ref,
    .running = random_running,
};

const struct kvl_score kvl_score_random_raw = {
    .head = {.magic = KVL_PLUGIN_MAGIC, .abi_major = KVL_ABI_MAJOR, .abi_minor = KVL_ABI_MINOR, .struct_size = sizeof(struct kvl_score),
             .kind = KVL_KIND_SCORE, .name = "random_raw", .summary = "noise alone, no token is protected", .citation = "none",
             .n_options = sizeof raw_options / sizeof *raw_options, .options = raw_options, .private_size = sizeof(struct random_score),
             .device_source = kvl_text_compress_score_random_random_cl, .card = kvl_text_compress_score_random_card_md, .init = raw_init},
    .ref = random_ref,
    .running = random_running,
};
