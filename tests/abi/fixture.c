/* A plug-in with as many faults as the test asks for by -D. Its functions abort: a refused plug-in must not have run any. */
#include "kvl_plugin.h"
#include <stdlib.h>
#include <string.h>

#ifndef MAGIC
#define MAGIC KVL_PLUGIN_MAGIC
#endif
#ifndef MAJOR
#define MAJOR KVL_ABI_MAJOR
#endif
#ifndef MINOR
#define MINOR KVL_ABI_MINOR
#endif
#ifndef KIND
#define KIND KVL_KIND_CODEC
#endif
#ifndef NAME
#define NAME "fixture"
#endif
#ifndef PRIVATE_SIZE
#define PRIVATE_SIZE sizeof(struct options)
#endif
#ifndef STRUCT_SIZE
#define STRUCT_SIZE sizeof(struct grown_codec)
#endif
#ifndef SHAPE
#define SHAPE shape
#endif

#ifndef LEARN
#define LEARN NULL
#endif

struct options {
    int32_t whole, mode, fail, unused;
    double ratio;
};

static const struct kvl_option options[] = {
    {"whole", "a whole number", KVL_OPTION_INT, offsetof(struct options, whole), 3, -5, 5, NULL},
    {"mode", "a choice", KVL_OPTION_CHOICE, offsetof(struct options, mode), 1, 0, 0, "slow|fast"},
    {"ratio", "a number", KVL_OPTION_FLOAT, offsetof(struct options, ratio), 0.1, 0, 1, NULL},
    {"fail", "makes init fail: 1 with a reason, 2 without", KVL_OPTION_INT, offsetof(struct options, fail), 0, 0, 2, NULL},
};

extern int init_calls, fini_calls;
int init_calls, fini_calls;

static int init(void *priv, const struct kvl_host *host)
{
    const struct options *o = priv;
    init_calls++;
    if (o->fail == 1) host->error("fail=1 was asked for");
    return o->fail;
}

static void fini(void *priv) { fini_calls++; }

static int shape(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out) { abort(); }

static int bytes(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out) { abort(); }

static int encode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                  uint8_t *block)
{
    abort();
}

static int decode(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                  const uint8_t *block, float *x)
{
    abort();
}

static int learn(const void *priv, const struct kvl_codec_dims *dims, const struct kvl_prompt_rows *in, float *table) { abort(); }

/* With GROWN, what a codec of a later minor version looks like. */
struct grown_codec {
    struct kvl_codec codec;
#ifdef GROWN
    void (*later)(void);
    uint64_t more[8];
#endif
};

static const struct grown_codec plugin = {.codec = {.head = {.magic = MAGIC,
                                                             .abi_major = MAJOR,
                                                             .abi_minor = MINOR,
                                                             .struct_size = STRUCT_SIZE,
                                                             .kind = KIND,
                                                             .name = NAME,
                                                             .summary = "for tests",
                                                             .n_options = 4,
                                                             .options = options,
                                                             .private_size = PRIVATE_SIZE,
                                                             .device_source = "",
                                                             .init = init,
                                                             .fini = fini},
                                                    .roles = KVL_ROLE_V,
                                                    .rope_stages = KVL_ROPE_POST,
                                                    .shape = SHAPE,
                                                    .bytes = bytes,
                                                    .ref_encode = encode,
                                                    .ref_decode = decode,
                                                    .learn = LEARN}};

#ifndef NO_SYMBOL
extern const struct kvl_plugin_head *const kvl_plugins[];
const struct kvl_plugin_head *const kvl_plugins[] = {
#ifndef EMPTY
    &plugin.codec.head,
#endif
#ifdef TWICE
    &plugin.codec.head,
#endif
    NULL};
#endif
