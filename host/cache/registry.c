/* The list of plug-ins: built-in ones first, then those of shared objects in the order they were loaded.
 * A head is checked field by field, so that a plug-in made for another kvlab is refused before any of its functions is called. */
#include "registry.h"
#include "mem.h"
#include "text.h"
#include <dlfcn.h>
#include <string.h>

#define KVL_BUILTIN(kind, name) extern const struct kvl_##kind kvl_##kind##_##name;
#include "builtin.def"
#undef KVL_BUILTIN

static const struct kvl_plugin_head *const builtin[] = {
#define KVL_BUILTIN(kind, name) &kvl_##kind##_##name.head,
#include "builtin.def"
#undef KVL_BUILTIN
};
enum { N_BUILTIN = sizeof builtin / sizeof *builtin };

static const struct kvl_plugin_head **loaded;
static size_t n_loaded;

/* Least sizes, those of the minor version that brought a kind: structs grow at their end, so every plug-in of this major has at least these bytes. */
static const struct kind {
    enum kvl_plugin_kind kind;
    const char *name;
    size_t least_size;
} kinds[] = {
    {KVL_KIND_CODEC, "codec", offsetof(struct kvl_codec, reserved2) + sizeof(uint32_t)},
    {KVL_KIND_SCORE, "score", offsetof(struct kvl_score, wrap) + sizeof(void *)},
    {KVL_KIND_BUDGET, "budget", offsetof(struct kvl_budget, split) + sizeof(void *)},
    {KVL_KIND_PROJECTION, "projection", offsetof(struct kvl_projection, ranks) + sizeof(void *)},
};

size_t kvl_registry_count(void) { return N_BUILTIN + n_loaded; }

const struct kvl_plugin_head *kvl_registry_at(size_t i) { return i < N_BUILTIN ? builtin[i] : loaded[i - N_BUILTIN]; }

const struct kvl_plugin_head *kvl_registry_find(enum kvl_plugin_kind kind, const char *name)
{
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        const struct kvl_plugin_head *head = kvl_registry_at(i);
        if (head->kind == kind && strcmp(head->name, name) == 0) return head;
    }
    return NULL;
}

const char *kvl_plugin_kind_name(uint32_t kind)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].kind == kind) return kinds[i].name;
    return NULL;
}

static kvl_status check_abi(const struct kvl_plugin_head *head, const char *origin)
{
    if (head->magic != KVL_PLUGIN_MAGIC)
        return kvl_fail(KVL_E_FORMAT, "%s: not a kvlab plug-in: magic is 0x%08x, kvlab's is 0x%08x", origin, head->magic,
                        KVL_PLUGIN_MAGIC);
    if (head->abi_major != KVL_ABI_MAJOR)
        return kvl_fail(KVL_E_UNSUPPORTED,
                        "%s: plug-in ABI %d.%d, this kvlab has %d.%d: build the plug-in with this kvlab's kvl_plugin.h", origin,
                        head->abi_major, head->abi_minor, KVL_ABI_MAJOR, KVL_ABI_MINOR);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].kind != head->kind) continue;
        if (head->struct_size >= kinds[i].least_size) return KVL_OK;
        return kvl_fail(KVL_E_FORMAT,
                        "%s: the %s's struct_size is %u bytes, ABI %d.0 needs at least %zu: set it to sizeof(struct kvl_%s)",
                        origin, kinds[i].name, head->struct_size, KVL_ABI_MAJOR, kinds[i].least_size, kinds[i].name);
    }
    return kvl_fail(KVL_E_UNSUPPORTED, "%s: plug-in of kind %u, this kvlab has kinds %d (codec), %d (score), %d (budget) and %d (projection)", origin,
                    head->kind, KVL_KIND_CODEC, KVL_KIND_SCORE, KVL_KIND_BUDGET, KVL_KIND_PROJECTION);
}

static kvl_status check_options(const struct kvl_plugin_head *head, const char *origin)
{
    static const size_t size_of_type[] = {
        [KVL_OPTION_INT] = sizeof(int32_t), [KVL_OPTION_FLOAT] = sizeof(double), [KVL_OPTION_CHOICE] = sizeof(int32_t), [KVL_OPTION_SCORE] = 0,
        [KVL_OPTION_NUMBERS] = sizeof(struct kvl_numbers), [KVL_OPTION_CODEC] = 0};
    if (head->n_options > 0 && head->options == NULL) return kvl_fail(KVL_E_FORMAT, "%s: %s: no option table", origin, head->name);
    for (uint32_t i = 0; i < head->n_options; i++) {
        const struct kvl_option *o = &head->options[i];
        if (o->name == NULL || o->help == NULL || o->type < KVL_OPTION_INT || o->type > KVL_OPTION_CODEC ||
            (o->type == KVL_OPTION_CHOICE && o->choices == NULL))
            return kvl_fail(KVL_E_FORMAT, "%s: %s: option %u lacks a name, a help text, a known type or its choices", origin,
                            head->name, i);
        if ((uint64_t)o->offset + size_of_type[o->type] > head->private_size)
            return kvl_fail(KVL_E_FORMAT, "%s: %s: option %s ends at byte %llu of a private struct of %u bytes", origin, head->name,
                            o->name, (unsigned long long)o->offset + size_of_type[o->type], head->private_size);
    }
    return KVL_OK;
}

static kvl_status check_codec(const struct kvl_codec *codec, const char *origin)
{
    if (codec->flags & KVL_CODEC_NEEDS_TABLE && !KVL_CODEC_HAS(codec, calibrate))
        return kvl_fail(KVL_E_FORMAT, "%s: codec %s needs a table and has no calibrate()", origin, codec->head.name);
    if (KVL_CODEC_HAS(codec, learn) &&
        (codec->rope_stages != KVL_ROPE_POST || (codec->flags & (KVL_CODEC_NO_ROTATION | KVL_CODEC_NEEDS_TABLE)) != KVL_CODEC_NO_ROTATION))
        return kvl_fail(KVL_E_FORMAT, "%s: codec %s has learn(): it must be for keys after RoPE alone, with KVL_CODEC_NO_ROTATION and without "
                                      "KVL_CODEC_NEEDS_TABLE", origin, codec->head.name);
    if (codec->roles != 0 && codec->rope_stages != 0 && codec->shape && codec->bytes && codec->ref_encode && codec->ref_decode &&
        codec->head.device_source != NULL)
        return KVL_OK;
    return kvl_fail(KVL_E_FORMAT,
                    "%s: codec %s lacks one of: roles, rope_stages, shape, bytes, ref_encode, ref_decode, device_source", origin,
                    codec->head.name);
}

static kvl_status check_score(const struct kvl_score *score, const char *origin)
{
    if ((score->ref != NULL) != (score->wrap != NULL)) return KVL_OK;
    return kvl_fail(KVL_E_FORMAT, "%s: score %s needs ref, or wrap if it changes another score, and not both", origin, score->head.name);
}

/* Every budget begins with an amount, so that the host can resolve it. */
static kvl_status check_budget(const struct kvl_budget *budget, const char *origin)
{
    static const struct kvl_option amount[] = {KVL_AMOUNT_OPTIONS};
    const uint32_t n = sizeof amount / sizeof *amount;
    bool starts = budget->head.n_options >= n;
    for (uint32_t i = 0; starts && i < n; i++)
        starts = strcmp(budget->head.options[i].name, amount[i].name) == 0 && budget->head.options[i].offset == amount[i].offset &&
                 budget->head.options[i].type == amount[i].type;
    return starts ? KVL_OK : kvl_fail(KVL_E_FORMAT, "%s: budget %s: its options must begin with KVL_AMOUNT_OPTIONS", origin, budget->head.name);
}

static kvl_status check_projection(const struct kvl_projection *projection, const char *origin)
{
    const struct kvl_plugin_head *head = &projection->head;
    bool names_codec = false;
    for (uint32_t i = 0; i < head->n_options; i++) names_codec = names_codec || head->options[i].type == KVL_OPTION_CODEC;
    if (projection->roles != 0 && projection->shape && projection->matrices && projection->calibrate && names_codec) return KVL_OK;
    return kvl_fail(KVL_E_FORMAT, "%s: projection %s lacks one of: roles, shape, matrices, calibrate, an option that names a codec", origin, head->name);
}

static kvl_status check_head(const struct kvl_plugin_head *head, const char *origin)
{
    kvl_status status = check_abi(head, origin);
    if (status != KVL_OK) return status;
    if (head->name == NULL || *head->name == '\0' || head->summary == NULL)
        return kvl_fail(KVL_E_FORMAT, "%s: a plug-in without name or summary", origin);
    if ((status = check_options(head, origin)) != KVL_OK) return status;
    switch (head->kind) {
    case KVL_KIND_SCORE: return check_score((const struct kvl_score *)head, origin);
    case KVL_KIND_BUDGET: return check_budget((const struct kvl_budget *)head, origin);
    case KVL_KIND_PROJECTION: return check_projection((const struct kvl_projection *)head, origin);
    default: return check_codec((const struct kvl_codec *)head, origin);
    }
}

kvl_status kvl_registry_check(const struct kvl_plugin_head *head) { return check_head(head, "plug-in"); }

static kvl_status add(const struct kvl_plugin_head *head, const char *origin)
{
    kvl_status status = check_head(head, origin);
    if (status != KVL_OK) return status;
    if (kvl_registry_find(head->kind, head->name) != NULL)
        return kvl_fail(KVL_E_USAGE, "%s: there is a %s '%s' already: rename the one in the plug-in", origin,
                        kvl_plugin_kind_name(head->kind), head->name);
    if ((status = kvl_realloc(&loaded, n_loaded + 1, sizeof *loaded)) != KVL_OK) return status;
    loaded[n_loaded++] = head;
    return KVL_OK;
}

kvl_status kvl_registry_load(const char *path)
{
    kvl_status status = KVL_OK;
    const size_t n_before = n_loaded;
    struct kvl_text file = {0};
    void *object = NULL;
    /* Without a slash dlopen would search the system's library folders. */
    KVL_TRY(kvl_text_printf(&file, "%s%s", strchr(path, '/') ? "" : "./", path));
    object = dlopen(file.data, RTLD_NOW | RTLD_LOCAL);
    if (object == NULL) {
        status = kvl_fail(KVL_E_IO, "%s: cannot load the plug-in: %s", path, dlerror());
        goto done;
    }
    const struct kvl_plugin_head *const *plugins = dlsym(object, "kvl_plugins");
    if (plugins == NULL || *plugins == NULL) {
        status =
            kvl_fail(KVL_E_FORMAT, "%s: %s: a plug-in exports `const struct kvl_plugin_head *const kvl_plugins[]`, NULL at its end",
                     path, plugins ? "kvl_plugins is empty" : "no symbol kvl_plugins");
        goto done;
    }
    for (; *plugins != NULL; plugins++) KVL_TRY(add(*plugins, path));
    object = NULL; /* stays loaded: the registry points into it */
done:
    if (status != KVL_OK) n_loaded = n_before;
    if (object != NULL) dlclose(object);
    kvl_text_free(&file);
    return status;
}
