/* A host of an earlier plug-in ABI (v1_0/kvl_plugin.h, v1_1/kvl_plugin.h, frozen) that meets a plug-in of today: its known answers must come out of the structs as they
 * were. Called with the shared object and a codec's name. */
#include "kvl_plugin.h"
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void error(const char *text) { fprintf(stderr, "plug-in: %s\n", text); }
static const struct kvl_host host = {.struct_size = sizeof host, .error = error};

static int fail(const char *what)
{
    fprintf(stderr, "old host: %s\n", what);
    return 1;
}

/* Defaults of an option table, choices by their word alone. */
static void *options_of(const struct kvl_plugin_head *head, const char *text)
{
    char *priv = calloc(1, head->private_size ? head->private_size : 1);
    for (uint32_t i = 0; i < head->n_options; i++) {
        const struct kvl_option *o = &head->options[i];
        int32_t value = (int32_t)o->fallback;
        if (o->type == KVL_OPTION_CHOICE && strncmp(text, o->name, strlen(o->name)) == 0) {
            const char *word = text + strlen(o->name) + 1, *at = o->choices;
            for (value = 0; strncmp(at, word, strlen(word)) != 0; value++) at = strchr(at, '|') + 1;
        }
        memcpy(priv + o->offset, &value, sizeof value);
    }
    return priv;
}

static int answer_is_met(const struct kvl_codec *codec, const struct kvl_known_answer *a)
{
    const struct kvl_codec_dims dims = {sizeof dims, a->role, a->head_dim, 64};
    struct kvl_codec_shape shape = {.struct_size = sizeof shape};
    struct kvl_codec_bytes bytes = {0};
    void *priv = options_of(&codec->head, a->options);
    if (codec->head.init != NULL && codec->head.init(priv, &host) != 0) return fail("init");
    if (codec->shape(priv, &dims, &shape) != 0 || codec->bytes(priv, &dims, 64, &bytes) != 0) return fail("shape or bytes");
    if (bytes.payload + bytes.scale + bytes.index > shape.block_bytes) return fail("bytes do not fit the block");
    uint8_t *block = calloc(shape.block_bytes, 1);
    float *x = malloc(a->n * a->head_dim * sizeof *x);
    if (codec->ref_encode(priv, &dims, NULL, 0, a->n, a->x, block) != 0 || codec->ref_decode(priv, &dims, NULL, 0, a->n, block, x) != 0)
        return fail("encode or decode");
    for (uint32_t i = 0; i < a->n * a->head_dim; i++)
        if (!(fabsf(x[i] - a->decoded[i]) <= a->tolerance)) return fail("known answer");
    free(x);
    free(block);
    free(priv);
    return 0;
}

int main(int argc, char **argv)
{
    void *object = dlopen(argv[1], RTLD_NOW);
    if (object == NULL) return fail(dlerror());
    const struct kvl_plugin_head *const *plugins = dlsym(object, "kvl_plugins");
    for (; plugins != NULL && *plugins != NULL; plugins++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)*plugins;
        if ((*plugins)->magic != KVL_PLUGIN_MAGIC || (*plugins)->abi_major != KVL_ABI_MAJOR || strcmp((*plugins)->name, argv[2]) != 0) continue;
        if ((*plugins)->struct_size < sizeof *codec || codec->n_known_answers == 0) return fail("struct_size");
        for (uint32_t i = 0; i < codec->n_known_answers; i++)
            if (answer_is_met(codec, &codec->known_answers[i]) != 0) return 1;
        printf("old host: %u answers met\n", codec->n_known_answers);
        return 0;
    }
    return fail("no such codec");
}
