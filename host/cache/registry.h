/* Plug-in registry: built-in ones (compress/builtin.def) and shared objects (--plugin ./x.so).
 * magic, ABI major, kind and struct_size are checked before any code of a plug-in runs. */
#ifndef KVL_REGISTRY_H
#define KVL_REGISTRY_H
#include "kvl_plugin.h"
#include "status.h"
#include <stdbool.h>

/* Adds the plug-ins of a shared object. Refusals name both sides (plug-in ABI and host ABI, sizes). The object stays loaded. */
kvl_status kvl_registry_load(const char *path);

/* All plug-ins, built-in first. */
const struct kvl_plugin_head *kvl_registry_at(size_t i);
size_t kvl_registry_count(void);
/* NULL if there is none of this kind and name. */
const struct kvl_plugin_head *kvl_registry_find(enum kvl_plugin_kind kind, const char *name);

/* "codec"; NULL for a kind that this build does not know. */
const char *kvl_plugin_kind_name(uint32_t kind);

/* Checks one head and struct without running its code; used by load and by tests. */
kvl_status kvl_registry_check(const struct kvl_plugin_head *head);

/* A plug-in with its options set (private struct allocated, defaults, values, init called). */
struct kvl_instance {
    const struct kvl_plugin_head *plugin;
    void *priv;
    bool init_called;
};
/* options: "bits=2,group=32" or NULL/"". A bare word sets the CHOICE option that has it ("sym"). Errors name the option, its legal
 * values and the plug-in. */
kvl_status kvl_instance_new(const struct kvl_plugin_head *plugin, const char *options, struct kvl_instance *out);
/* The same for a piece of a longer text: errors point into that text. */
struct kvl_slice;
kvl_status kvl_instance_new_at(const struct kvl_plugin_head *plugin, const struct kvl_slice *options, struct kvl_instance *out);
void kvl_instance_free(struct kvl_instance *instance);
/* "int8(group=32,sym)"; only options that differ from their defaults, unless `all`. Appends. */
struct kvl_text;
kvl_status kvl_instance_print(const struct kvl_instance *instance, bool all, struct kvl_text *out);
/* Whether an option names another plug-in, which is the spec's matter. */
static inline bool kvl_option_wraps(const struct kvl_option *o) { return o->type == KVL_OPTION_SCORE || o->type == KVL_OPTION_CODEC; }
/* The same for one that wraps another plug-in, whose text is `of`. */
kvl_status kvl_instance_print_around(const struct kvl_instance *instance, bool all, const char *of, struct kvl_text *out);
/* The value that an options text gives option `name`; false if it gives none. */
bool kvl_options_find(const struct kvl_slice *text, const char *name, struct kvl_slice *value);

/* Defaults, then the values of `text`, into priv by a table; `owner` is named in errors. The parser behind kvl_instance_new. */
kvl_status kvl_options_set(const char *owner, const struct kvl_option *options, uint32_t n, void *priv, const struct kvl_slice *text);

/* shape() and bytes() of a codec instance; refusals start with the instance's text: "int4(group=48): group must divide ...". */
kvl_status kvl_codec_shape(const struct kvl_instance *codec, uint32_t role, uint32_t head_dim, uint32_t page_tokens,
                           struct kvl_codec_shape *out);
kvl_status kvl_codec_bytes(const struct kvl_instance *codec, uint32_t role, uint32_t head_dim, uint64_t n, struct kvl_codec_bytes *out);

/* shape() of a projection, refused in the same way, also if its rank is none: 8 to W, a multiple of 8. */
kvl_status kvl_projection_shape(const struct kvl_instance *projection, uint32_t role, uint32_t head_dim, struct kvl_projection_shape *out);
/* R of a layer, or of a group of them, whose shape leaves it to the tables. */
kvl_status kvl_projection_rank(const struct kvl_instance *projection, uint32_t role, uint32_t head_dim, const struct kvl_projection_tables *tables,
                               uint32_t layer, uint32_t *out);

/* Whether the codec has `member`, which ABI 1.0 did not have: its struct reaches so far. */
#define KVL_CODEC_HAS(codec, member) \
    ((codec)->head.struct_size >= offsetof(struct kvl_codec, member) + sizeof((codec)->member) && (codec)->member != NULL)

/* kvl_host handed to plug-ins; an error text becomes the kvl_fail message. */
extern const struct kvl_host kvl_plugin_host;

#endif
