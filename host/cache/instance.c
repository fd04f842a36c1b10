/* Plug-ins with their options: text to private struct by the option table, and back. */
#include "registry.h"
#include "mem.h"
#include "slice.h"
#include "text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void plugin_error(const char *text) { kvl_fail(KVL_E_USAGE, "%s", text); }

const struct kvl_host kvl_plugin_host = {.struct_size = sizeof kvl_plugin_host, .error = plugin_error};

/* ---- options from text ---- */

static void store_int(const struct kvl_option *o, void *priv, int32_t value)
{
    memcpy((char *)priv + o->offset, &value, sizeof value);
}

static void store_double(const struct kvl_option *o, void *priv, double value)
{
    memcpy((char *)priv + o->offset, &value, sizeof value);
}

static int32_t load_int(const struct kvl_option *o, const void *priv)
{
    int32_t value;
    memcpy(&value, (const char *)priv + o->offset, sizeof value);
    return value;
}

static double load_double(const struct kvl_option *o, const void *priv)
{
    double value;
    memcpy(&value, (const char *)priv + o->offset, sizeof value);
    return value;
}

static void set_default(const struct kvl_option *o, void *priv)
{
    if (kvl_option_wraps(o) || o->type == KVL_OPTION_NUMBERS) return; /* priv is zeroed */
    if (o->type == KVL_OPTION_FLOAT)
        store_double(o, priv, o->fallback);
    else
        store_int(o, priv, (int32_t)o->fallback);
}

static const struct kvl_option *find_option(const struct kvl_option *options, uint32_t n, const struct kvl_slice *name)
{
    for (uint32_t i = 0; i < n; i++)
        if (kvl_slice_is(name, options[i].name)) return &options[i];
    return NULL;
}

/* The option that a bare word belongs to: the first with this word among its choices. */
static const struct kvl_option *find_choice(const struct kvl_option *options, uint32_t n, const struct kvl_slice *word)
{
    for (uint32_t i = 0; i < n; i++)
        if (options[i].type == KVL_OPTION_CHOICE && kvl_words_find(options[i].choices, word) >= 0) return &options[i];
    return NULL;
}

static kvl_status fail_unknown_option(const char *owner, const struct kvl_option *options, uint32_t n, const struct kvl_slice *word)
{
    kvl_status status = KVL_OK;
    struct kvl_text legal = {0}, what = {0};
    KVL_TRY(kvl_text_printf(&what, "%s option", owner));
    KVL_TRY(kvl_text_append(&legal, "", 0));
    for (uint32_t i = 0; i < n; i++) KVL_TRY(kvl_text_printf(&legal, "%s%s", i ? "|" : "", options[i].name));
    for (uint32_t i = 0; i < n; i++)
        if (options[i].type == KVL_OPTION_CHOICE) KVL_TRY(kvl_text_printf(&legal, "|%s", options[i].choices));
    status = kvl_fail_unknown(word, what.data, legal.data);
done:
    kvl_text_free(&legal);
    kvl_text_free(&what);
    return status;
}

static kvl_status set_choice(const struct kvl_option *o, void *priv, const struct kvl_slice *value)
{
    const int choice = kvl_words_find(o->choices, value);
    if (choice < 0) return kvl_fail_unknown(value, o->name, o->choices);
    store_int(o, priv, choice);
    return KVL_OK;
}

static kvl_status set_number(const struct kvl_option *o, void *priv, const struct kvl_slice *value)
{
    const bool whole = o->type == KVL_OPTION_INT, ranged = o->min < o->max;
    const double min = ranged ? o->min : whole ? INT32_MIN : -1.7e308, max = ranged ? o->max : whole ? INT32_MAX : 1.7e308;
    char legal[96];
    int64_t i = 0;
    double x = 0;
    const bool parsed = whole ? kvl_slice_i64(value, &i) : kvl_slice_f64(value, &x);
    if (whole) x = (double)i;
    snprintf(legal, sizeof legal, "legal is a%s number from %.10g to %.10g", whole ? " whole" : "", min, max);
    if (!parsed || x < min || x > max)
        return kvl_fail_at(value, legal, "%s=%.*s is out of range", o->name, (int)value->n, value->text + value->at);
    if (whole)
        store_int(o, priv, (int32_t)i);
    else
        store_double(o, priv, x);
    return KVL_OK;
}

/* "A:B*n": numbers, B n times. */
static kvl_status set_numbers(const struct kvl_option *o, void *priv, const struct kvl_slice *value)
{
    struct kvl_numbers *numbers = (struct kvl_numbers *)((char *)priv + o->offset);
    struct kvl_slice rest = *value;
    for (bool more = true; more;) {
        const char *colon = memchr(rest.text + rest.at, ':', rest.n);
        struct kvl_slice item = kvl_slice_take(&rest, colon ? (size_t)(colon - rest.text) - rest.at : rest.n), number = item;
        const char *star = memchr(item.text + item.at, '*', item.n);
        int64_t times = 1;
        double x;
        if (star != NULL) {
            number = kvl_slice_take(&item, (size_t)(star - item.text) - item.at);
            kvl_slice_take(&item, 1);
        }
        if ((star != NULL && !kvl_slice_i64(&item, &times)) || times < 1 || times > KVL_MOST_NUMBERS - (int64_t)numbers->n || !kvl_slice_f64(&number, &x) ||
            !(x >= o->min && x <= o->max))
            return kvl_fail_at(&number, "legal are A:B:C..., or 16*14 for 14 times 16, at most 256", "%s: a number from %.10g to %.10g is wanted", o->name, o->min,
                               o->max);
        while (times-- > 0) numbers->value[numbers->n++] = x;
        more = colon != NULL;
        if (more) kvl_slice_take(&rest, 1);
    }
    return KVL_OK;
}

/* Characters up to the next comma that is outside parentheses. */
static size_t piece_length(const struct kvl_slice *rest)
{
    const char *c = rest->text + rest->at;
    size_t i = 0;
    for (int depth = 0; i < rest->n && (depth > 0 || c[i] != ','); i++) depth += (c[i] == '(') - (c[i] == ')');
    return i;
}

static kvl_status set_piece(const char *owner, const struct kvl_option *options, uint32_t n, void *priv, bool *given,
                            struct kvl_slice piece)
{
    const char *equals = memchr(piece.text + piece.at, '=', piece.n);
    struct kvl_slice value = piece, name = piece;
    if (equals != NULL) {
        name = kvl_slice_trim(kvl_slice_take(&value, (size_t)(equals - piece.text) - piece.at));
        kvl_slice_take(&value, 1);
        value = kvl_slice_trim(value);
    }
    const struct kvl_option *o = equals ? find_option(options, n, &name) : find_choice(options, n, &name);
    if (o == NULL) return fail_unknown_option(owner, options, n, &name);
    if (given[o - options]) return kvl_fail_at(&name, "give it once", "%s option %s is given twice", owner, o->name);
    given[o - options] = true;
    if (kvl_option_wraps(o)) return KVL_OK; /* the spec's: spec.c */
    return o->type == KVL_OPTION_CHOICE    ? set_choice(o, priv, &value)
           : o->type == KVL_OPTION_NUMBERS ? set_numbers(o, priv, &value)
                                           : set_number(o, priv, &value);
}

bool kvl_options_find(const struct kvl_slice *text, const char *name, struct kvl_slice *value)
{
    struct kvl_slice rest = kvl_slice_trim(*text);
    while (rest.n > 0) {
        struct kvl_slice piece = kvl_slice_trim(kvl_slice_take(&rest, piece_length(&rest)));
        if (rest.n > 0) kvl_slice_take(&rest, 1);
        const char *equals = memchr(piece.text + piece.at, '=', piece.n);
        if (equals == NULL) continue;
        const struct kvl_slice key = kvl_slice_trim(kvl_slice_take(&piece, (size_t)(equals - piece.text) - piece.at));
        kvl_slice_take(&piece, 1);
        *value = kvl_slice_trim(piece);
        if (kvl_slice_is(&key, name)) return true;
    }
    return false;
}

kvl_status kvl_options_set(const char *owner, const struct kvl_option *options, uint32_t n, void *priv,
                           const struct kvl_slice *text)
{
    kvl_status status = KVL_OK;
    bool *given = NULL;
    KVL_TRY(kvl_alloc(&given, n, sizeof *given));
    for (uint32_t i = 0; i < n; i++) set_default(&options[i], priv);
    struct kvl_slice rest = kvl_slice_trim(*text);
    for (bool more = rest.n > 0; more;) {
        const struct kvl_slice piece = kvl_slice_trim(kvl_slice_take(&rest, piece_length(&rest)));
        KVL_TRY(set_piece(owner, options, n, priv, given, piece));
        more = rest.n > 0;
        if (more) kvl_slice_take(&rest, 1);
    }
done:
    kvl_free(&given);
    return status;
}

/* ---- instances ---- */

kvl_status kvl_instance_new(const struct kvl_plugin_head *plugin, const char *options, struct kvl_instance *out)
{
    const struct kvl_slice all = kvl_slice_of(plugin->name, options ? options : "");
    return kvl_instance_new_at(plugin, &all, out);
}

kvl_status kvl_instance_new_at(const struct kvl_plugin_head *plugin, const struct kvl_slice *options, struct kvl_instance *out)
{
    kvl_status status = KVL_OK;
    *out = (struct kvl_instance){.plugin = plugin};
    KVL_TRY(kvl_alloc(&out->priv, 1, plugin->private_size ? plugin->private_size : 1));
    KVL_TRY(kvl_options_set(plugin->name, plugin->options, plugin->n_options, out->priv, options));
    out->init_called = true;
    if (plugin->init != NULL && plugin->init(out->priv, &kvl_plugin_host) != 0)
        status = kvl_fail(KVL_E_USAGE, "%s: the plug-in refused its options without a reason", plugin->name);
done:
    if (status != KVL_OK) kvl_instance_free(out);
    return status;
}

void kvl_instance_free(struct kvl_instance *instance)
{
    if (instance->init_called && instance->plugin->fini != NULL) instance->plugin->fini(instance->priv);
    kvl_free(&instance->priv);
    *instance = (struct kvl_instance){0};
}

/* ---- options to text ---- */

/* The shortest digits that give the same double. */
static kvl_status print_double(double x, struct kvl_text *out)
{
    char digits[40];
    for (int precision = 6; precision <= 17; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, x);
        if (strtod(digits, NULL) == x) break;
    }
    return kvl_text_printf(out, "%s", digits);
}

static kvl_status print_choice(const struct kvl_plugin_head *plugin, const struct kvl_option *o, int32_t value,
                               struct kvl_text *out)
{
    size_t n;
    const char *text = kvl_words_at(o->choices, (size_t)value, &n);
    const struct kvl_slice word = {.text = text, .n = n};
    const bool bare = find_choice(plugin->options, plugin->n_options, &word) == o;
    return kvl_text_printf(out, "%s%s%.*s", bare ? "" : o->name, bare ? "" : "=", (int)n, text);
}

static kvl_status print_numbers(const struct kvl_option *o, const struct kvl_numbers *numbers, struct kvl_text *out)
{
    kvl_status status = kvl_text_printf(out, "%s=", o->name);
    for (uint32_t i = 0, same; i < numbers->n && status == KVL_OK; i += same) {
        for (same = 1; i + same < numbers->n && numbers->value[i + same] == numbers->value[i];) same++;
        if (i > 0) status = kvl_text_printf(out, ":");
        if (status == KVL_OK) status = print_double(numbers->value[i], out);
        if (status == KVL_OK && same > 1) status = kvl_text_printf(out, "*%u", same);
    }
    return status;
}

static kvl_status print_option(const struct kvl_instance *instance, const struct kvl_option *o, struct kvl_text *out)
{
    if (o->type == KVL_OPTION_CHOICE) return print_choice(instance->plugin, o, load_int(o, instance->priv), out);
    if (o->type == KVL_OPTION_INT) return kvl_text_printf(out, "%s=%d", o->name, load_int(o, instance->priv));
    if (o->type == KVL_OPTION_NUMBERS) return print_numbers(o, (const struct kvl_numbers *)((const char *)instance->priv + o->offset), out);
    kvl_status status = kvl_text_printf(out, "%s=", o->name);
    return status == KVL_OK ? print_double(load_double(o, instance->priv), out) : status;
}

static bool is_default(const struct kvl_instance *instance, const struct kvl_option *o)
{
    if (kvl_option_wraps(o)) return false;
    if (o->type == KVL_OPTION_NUMBERS) return ((const struct kvl_numbers *)((const char *)instance->priv + o->offset))->n == 0;
    return o->type == KVL_OPTION_FLOAT ? load_double(o, instance->priv) == o->fallback
                                       : load_int(o, instance->priv) == (int32_t)o->fallback;
}

kvl_status kvl_instance_print(const struct kvl_instance *instance, bool all, struct kvl_text *out)
{
    return kvl_instance_print_around(instance, all, "?", out);
}

kvl_status kvl_instance_print_around(const struct kvl_instance *instance, bool all, const char *of, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_plugin_head *plugin = instance->plugin;
    uint32_t printed = 0;
    KVL_TRY(kvl_text_printf(out, "%s", plugin->name));
    for (uint32_t i = 0; i < plugin->n_options; i++) {
        const struct kvl_option *o = &plugin->options[i];
        if (!all && is_default(instance, o)) continue;
        KVL_TRY(kvl_text_printf(out, "%s", printed++ ? "," : "("));
        KVL_TRY(kvl_option_wraps(o) ? kvl_text_printf(out, "%s=%s", o->name, of) : print_option(instance, o, out));
    }
    if (printed > 0) KVL_TRY(kvl_text_printf(out, ")"));
done:
    return status;
}

/* ---- codec and projection calls ---- */

/* Puts the instance's text in front of the reason that the plug-in gave. */
static kvl_status refused(const struct kvl_instance *instance)
{
    char reason[512];
    struct kvl_text name = {0};
    snprintf(reason, sizeof reason, "%s", *kvl_error_text() ? kvl_error_text() : "refused without a reason");
    kvl_error_clear();
    kvl_status status = kvl_instance_print(instance, false, &name);
    if (status == KVL_OK) status = kvl_fail(KVL_E_USAGE, "%s: %s", name.data, reason);
    kvl_text_free(&name);
    return status;
}

kvl_status kvl_codec_shape(const struct kvl_instance *codec, uint32_t role, uint32_t head_dim, uint32_t page_tokens,
                           struct kvl_codec_shape *out)
{
    const struct kvl_codec *plugin = (const struct kvl_codec *)codec->plugin;
    const struct kvl_codec_dims dims = {sizeof dims, role, head_dim, page_tokens};
    *out = (struct kvl_codec_shape){.struct_size = sizeof *out};
    kvl_error_clear();
    return plugin->shape(codec->priv, &dims, out) == 0 ? KVL_OK : refused(codec);
}

kvl_status kvl_codec_bytes(const struct kvl_instance *codec, uint32_t role, uint32_t head_dim, uint64_t n,
                           struct kvl_codec_bytes *out)
{
    const struct kvl_codec *plugin = (const struct kvl_codec *)codec->plugin;
    const struct kvl_codec_dims dims = {sizeof dims, role, head_dim, 0};
    *out = (struct kvl_codec_bytes){0};
    kvl_error_clear();
    return plugin->bytes(codec->priv, &dims, n, out) == 0 ? KVL_OK : refused(codec);
}

/* Of a layer, or of a group of them. */
static kvl_status check_rank(const struct kvl_instance *projection, uint32_t rank, const struct kvl_projection_shape *shape, uint32_t head_dim)
{
    const uint64_t heads = (uint64_t)shape->layers * shape->heads;
    if (heads != 0 && rank >= 8 && rank % 8 == 0 && rank <= heads * head_dim) return KVL_OK;
    kvl_fail(KVL_E_USAGE, "rank %u of %u layers x %u heads x %u channels: wanted a multiple of 8 up to their product", rank, shape->layers, shape->heads, head_dim);
    return refused(projection);
}

kvl_status kvl_projection_shape(const struct kvl_instance *projection, uint32_t role, uint32_t head_dim, struct kvl_projection_shape *out)
{
    const struct kvl_projection *plugin = (const struct kvl_projection *)projection->plugin;
    const struct kvl_projection_dims dims = {.struct_size = sizeof dims, .role = role, .head_dim = head_dim};
    *out = (struct kvl_projection_shape){.struct_size = sizeof *out};
    kvl_error_clear();
    if (plugin->shape(projection->priv, &dims, out) != 0) return refused(projection);
    if (out->layers == 0) out->layers = 1;
    if (out->layers > 1) out->rebuilt = 1;
    const bool by_table = out->rank == 0 && out->heads != 0 && plugin->ranks != NULL;
    return by_table ? KVL_OK : check_rank(projection, out->rank, out, head_dim);
}

kvl_status kvl_projection_rank(const struct kvl_instance *projection, uint32_t role, uint32_t head_dim, const struct kvl_projection_tables *tables,
                               uint32_t layer, uint32_t *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_projection *plugin = (const struct kvl_projection *)projection->plugin;
    const struct kvl_projection_dims dims = {.struct_size = sizeof dims, .role = role, .head_dim = head_dim};
    struct kvl_projection_shape shape;
    uint32_t *rank = NULL;
    KVL_TRY(kvl_projection_shape(projection, role, head_dim, &shape));
    KVL_TRY(kvl_alloc(&rank, tables->n_layer, sizeof *rank));
    kvl_error_clear();
    if (plugin->ranks(projection->priv, &dims, tables, rank) != 0) KVL_TRY(refused(projection));
    *out = rank[layer];
    status = check_rank(projection, *out, &shape, head_dim);
done:
    kvl_free(&rank);
    return status;
}
