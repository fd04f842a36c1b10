/* The words of --kv. Text is cut into items, items are collected by scope (the base, then one scope an @a-b), and each layer entry
 * is made by applying the base's items and then its override's, in the order of the table of keys. */
#include "spec.h"
#include "mem.h"
#include "presets.h"
#include "rotation.h"
#include "select.h"
#include "slice.h"
#include <ctype.h>
#include <stddef.h>
#include <string.h>

/* ---- items ---- */

struct value {
    struct kvl_slice key, name, args; /* key=name(args); key is empty for a bare word */
    bool has_args;
};

struct key {
    const char *name;
    kvl_status (*set)(const struct key *key, const struct value *value, struct kvl_layer_spec *entry);
    kvl_status (*print)(const struct key *key, const struct kvl_layer_spec *entry,
                        struct kvl_text *out); /* NULL: says the same as other keys */
    uint32_t sides;                            /* codecs and tails: 1 << side */
    size_t offset;                             /* others: of the field */
    const char *choices;                       /* words of a choice */
    const char *silent;                        /* the default, if it is left out of resolved texts */
    const char *alone;                         /* the value of the key written as a bare word */
};

static kvl_status no_args(const struct key *key, const struct value *value)
{
    return value->has_args ? kvl_fail_at(&value->args, "remove the parentheses", "%s= takes no options", key->name) : KVL_OK;
}

static kvl_status plugin_words(enum kvl_plugin_kind kind, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < kvl_registry_count(); i++)
        if (kvl_registry_at(i)->kind == kind)
            KVL_TRY(kvl_text_printf(out, "%s%s", out->size ? "|" : "", kvl_registry_at(i)->name));
done:
    return status;
}

/* ---- setters and printers, one pair a kind of key ---- */

static const struct kvl_plugin_head *find_plugin(enum kvl_plugin_kind kind, const struct kvl_slice *name)
{
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        const struct kvl_plugin_head *head = kvl_registry_at(i);
        if (head->kind == kind && kvl_slice_is(name, head->name)) return head;
    }
    return NULL;
}

static const struct kvl_plugin_head *find_codec(const struct kvl_slice *name) { return find_plugin(KVL_KIND_CODEC, name); }

/* What may stand behind kv=, or behind a projection's of=. */
static kvl_status codec_words(bool behind_projection, struct kvl_text *out)
{
    const kvl_status status = plugin_words(KVL_KIND_CODEC, out);
    return status == KVL_OK && !behind_projection ? plugin_words(KVL_KIND_PROJECTION, out) : status;
}

static kvl_status fail_no_codec(const struct value *value, bool behind_projection)
{
    kvl_status status = KVL_OK;
    struct kvl_text words = {0};
    KVL_TRY(codec_words(behind_projection, &words));
    status = kvl_fail_unknown(&value->name, "codec", words.data);
done:
    kvl_text_free(&words);
    return status;
}

static kvl_status fail_role(const struct value *value, const char *kind, uint32_t side)
{
    return kvl_fail_at(&value->name, "choose another codec for this side", "%s %.*s does not store %s", kind, (int)value->name.n,
                       value->name.text + value->name.at, side == KVL_SIDE_K ? "keys" : "values");
}

static uint32_t role_of(uint32_t side) { return side == KVL_SIDE_K ? KVL_ROLE_K : KVL_ROLE_V; }

static kvl_status set_stored(const struct value *value, uint32_t side, struct kvl_layer_spec *entry)
{
    const struct kvl_plugin_head *plugin = find_codec(&value->name);
    if (plugin == NULL) return fail_no_codec(value, entry->projection[side].plugin != NULL);
    if (!(((const struct kvl_codec *)plugin)->roles & role_of(side))) return fail_role(value, "codec", side);
    kvl_instance_free(&entry->codec[side]);
    return kvl_instance_new_at(plugin, &value->args, &entry->codec[side]);
}

static kvl_status scan_value(struct kvl_slice *rest, struct value *out);

/* A projection and the codec that one of its options names, else f16. */
static kvl_status set_projected(const struct kvl_projection *projection, const struct value *value, uint32_t side, struct kvl_layer_spec *entry)
{
    kvl_status status = KVL_OK;
    struct kvl_slice of = kvl_slice_of("of", "f16"), given;
    struct value inner;
    if (!(projection->roles & role_of(side))) return fail_role(value, "projection", side);
    for (uint32_t i = 0; i < projection->head.n_options; i++)
        if (projection->head.options[i].type == KVL_OPTION_CODEC && kvl_options_find(&value->args, projection->head.options[i].name, &given)) of = given;
    KVL_TRY(kvl_instance_new_at(&projection->head, &value->args, &entry->projection[side]));
    KVL_TRY(scan_value(&of, &inner));
    KVL_TRY(set_stored(&inner, side, entry));
done:
    return status;
}

static kvl_status set_codec(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    kvl_status status = KVL_OK;
    const struct kvl_plugin_head *projection = find_plugin(KVL_KIND_PROJECTION, &value->name);
    for (uint32_t side = 0; side < KVL_SIDES && status == KVL_OK; side++) {
        if (!(key->sides & 1u << side)) continue;
        kvl_instance_free(&entry->projection[side]);
        if (projection != NULL) status = set_projected((const struct kvl_projection *)projection, value, side, entry);
        else status = set_stored(value, side, entry);
    }
    return status;
}

/* Of a key that stands for one side. */
static enum kvl_side side_of(const struct key *key) { return key->sides == 1u << KVL_SIDE_K ? KVL_SIDE_K : KVL_SIDE_V; }

static kvl_status print_codec(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const int side = side_of(key);
    struct kvl_text codec = {0};
    if (entry->projection[side].plugin == NULL) return kvl_instance_print(&entry->codec[side], true, out);
    KVL_TRY(kvl_instance_print(&entry->codec[side], true, &codec));
    KVL_TRY(kvl_instance_print_around(&entry->projection[side], true, codec.data, out));
done:
    kvl_text_free(&codec);
    return status;
}

/* Choices are stored in enums, whose values are the words' indices. */
static kvl_status set_choice_word(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    const int choice = kvl_words_find(key->choices, &value->name);
    if (choice >= 0) {
        memcpy((char *)entry + key->offset, &choice, sizeof choice);
        return KVL_OK;
    }
    kvl_status status = KVL_OK;
    struct kvl_text what = {0};
    KVL_TRY(kvl_text_printf(&what, "value of %s=", key->name));
    status = kvl_fail_unknown(&value->name, what.data, key->choices);
done:
    kvl_text_free(&what);
    return status;
}

static kvl_status set_choice(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    kvl_status status = no_args(key, value);
    return status == KVL_OK ? set_choice_word(key, value, entry) : status;
}

static kvl_status print_choice(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    unsigned choice;
    size_t n;
    memcpy(&choice, (const char *)entry + key->offset, sizeof choice);
    const char *word = kvl_words_at(key->choices, choice, &n);
    return kvl_text_append(out, word, n);
}

struct rotation_options {
    int32_t seed;
};
static const struct kvl_option rotation_options[] = {
    {"seed", "of the random rotation", KVL_OPTION_INT, offsetof(struct rotation_options, seed), 0, 0, INT32_MAX, NULL}};

static kvl_status set_rotation(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    struct rotation_options options;
    kvl_status status = set_choice_word(key, value, entry);
    if (status != KVL_OK || entry->rot != KVL_ROT_RANDOM) return status == KVL_OK ? no_args(key, value) : status;
    status = kvl_options_set("rot=random", rotation_options, 1, &options, &value->args);
    entry->rot_seed = status == KVL_OK ? (uint64_t)options.seed : 0;
    return status;
}

static kvl_status print_rotation(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    kvl_status status = print_choice(key, entry, out);
    if (status != KVL_OK || entry->rot != KVL_ROT_RANDOM) return status;
    return kvl_text_printf(out, "(seed=%llu)", (unsigned long long)entry->rot_seed);
}

static kvl_status parse_count(const struct key *key, const struct value *value, int64_t *out)
{
    kvl_status status = no_args(key, value);
    if (status != KVL_OK) return status;
    if (!kvl_slice_i64(&value->name, out) || *out < 0 || *out > INT32_MAX)
        return kvl_fail_at(&value->name, "legal is a whole number from 0 to 2147483647", "%s=%.*s is not a number of tokens",
                           key->name, (int)value->name.n, value->name.text + value->name.at);
    return KVL_OK;
}

static kvl_status set_count(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    int64_t count;
    kvl_status status = parse_count(key, value, &count);
    const uint32_t tokens = status == KVL_OK ? (uint32_t)count : 0;
    memcpy((char *)entry + key->offset, &tokens, sizeof tokens);
    return status;
}

static kvl_status print_count(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    uint32_t tokens;
    memcpy(&tokens, (const char *)entry + key->offset, sizeof tokens);
    return kvl_text_printf(out, "%u", tokens);
}

static kvl_status set_tail(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    int64_t count = -1;
    kvl_status status = kvl_slice_is(&value->name, "codec") ? no_args(key, value) : parse_count(key, value, &count);
    for (uint32_t side = 0; side < KVL_SIDES && status == KVL_OK; side++)
        if (key->sides & 1u << side) entry->tail[side] = count;
    return status;
}

static kvl_status print_tail(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    const int64_t tail = entry->tail[side_of(key)];
    return tail < 0 ? kvl_text_printf(out, "codec") : kvl_text_printf(out, "%lld", (long long)tail);
}

/* A path without spaces and the grammar's own characters. */
static kvl_status set_table(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    kvl_status status = no_args(key, value);
    kvl_free(&entry->table_path);
    if (status != KVL_OK || kvl_slice_is(&value->name, "none")) return status;
    return kvl_strndup(&entry->table_path, value->name.text + value->name.at, value->name.n);
}

static kvl_status print_table(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    return kvl_text_printf(out, "%s", entry->table_path ? entry->table_path : "none");
}

/* ---- eviction ---- */

static void free_keep(struct kvl_layer_spec *entry)
{
    for (uint32_t i = 0; i < entry->n_keep; i++) kvl_instance_free(&entry->keep[i]);
    entry->n_keep = 0;
}

static kvl_status fail_no_plugin(enum kvl_plugin_kind kind, const struct kvl_slice *name)
{
    kvl_status status = KVL_OK;
    struct kvl_text words = {0};
    KVL_TRY(plugin_words(kind, &words));
    KVL_TRY(kvl_text_printf(&words, "|none"));
    status = kvl_fail_unknown(name, kvl_plugin_kind_name(kind), words.data);
done:
    kvl_text_free(&words);
    return status;
}

/* A score, after the one it wraps if it does. */
static kvl_status add_score(const struct value *value, struct kvl_layer_spec *entry)
{
    kvl_status status = KVL_OK;
    const struct kvl_plugin_head *plugin = find_plugin(KVL_KIND_SCORE, &value->name);
    struct kvl_slice of;
    if (plugin == NULL) return fail_no_plugin(KVL_KIND_SCORE, &value->name);
    if (((const struct kvl_score *)plugin)->wrap != NULL) {
        struct value inner;
        if (!kvl_options_find(&value->args, "of", &of))
            return kvl_fail_at(&value->name, "write of=SCORE among its options", "%s changes another score, and none is named", plugin->name);
        KVL_TRY(scan_value(&of, &inner));
        KVL_TRY(add_score(&inner, entry));
    }
    if (entry->n_keep == KVL_MAX_KEEP) return kvl_fail_at(&value->name, "wrap fewer", "scores are nested more than %d deep", KVL_MAX_KEEP);
    KVL_TRY(kvl_instance_new_at(plugin, &value->args, &entry->keep[entry->n_keep]));
    entry->n_keep++;
done:
    return status;
}

static kvl_status set_keep(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    free_keep(entry);
    return kvl_slice_is(&value->name, "none") ? no_args(key, value) : add_score(value, entry);
}

static kvl_status print_keep(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    struct kvl_text inner = {0}, outer = {0};
    KVL_TRY(kvl_text_printf(&inner, "none"));
    for (uint32_t i = 0; i < entry->n_keep; i++) {
        outer.size = 0;
        KVL_TRY(kvl_instance_print_around(&entry->keep[i], true, inner.data, &outer));
        inner.size = 0;
        KVL_TRY(kvl_text_append(&inner, outer.data, outer.size));
    }
    KVL_TRY(kvl_text_append(out, inner.data, inner.size));
done:
    kvl_text_free(&inner);
    kvl_text_free(&outer);
    return status;
}

static kvl_status set_budget(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    kvl_instance_free(&entry->budget);
    if (kvl_slice_is(&value->name, "none")) return no_args(key, value);
    const struct kvl_plugin_head *plugin = find_plugin(KVL_KIND_BUDGET, &value->name);
    if (plugin == NULL) return fail_no_plugin(KVL_KIND_BUDGET, &value->name);
    return kvl_instance_new_at(plugin, &value->args, &entry->budget);
}

/* Only what differs from the defaults: three of the four amounts are not given. */
static kvl_status print_budget(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    return entry->budget.plugin == NULL ? kvl_text_printf(out, "none") : kvl_instance_print(&entry->budget, false, out);
}

/* prefill, full, or every:N. */
static kvl_status set_when(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    static const char every[] = "every:";
    const size_t n = sizeof every - 1;
    struct value word = *value;
    int64_t count = 0;
    entry->every = 0;
    if (word.name.n <= n || strncmp(word.name.text + word.name.at, every, n) != 0) return set_choice(key, value, entry);
    kvl_slice_take(&word.name, n);
    const kvl_status status = parse_count(key, &word, &count);
    if (status != KVL_OK) return status;
    if (count == 0) return kvl_fail_at(&word.name, "every:1 evicts after each token", "when=every:0 is never");
    entry->when = KVL_WHEN_EVERY;
    entry->every = (uint32_t)count;
    return KVL_OK;
}

static kvl_status print_when(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    return entry->when == KVL_WHEN_EVERY ? kvl_text_printf(out, "every:%u", entry->every) : print_choice(key, entry, out);
}

/* ---- what is read ---- */

static const struct kvl_option page_options[] = {
    {"tokens", "that a query reads at most", KVL_OPTION_INT, offsetof(struct kvl_page_reading, tokens), 0, 0, INT32_MAX, NULL},
    {"size", "tokens of a page", KVL_OPTION_INT, offsetof(struct kvl_page_reading, size), 16, 16, 4096, NULL},
    {"gqa", "how the query heads of a kv head agree", KVL_OPTION_CHOICE, offsetof(struct kvl_page_reading, gqa), KVL_BOUND_MAX, 0, 0, "max|sum"},
    {"dense", "first layers that read all", KVL_OPTION_INT, offsetof(struct kvl_page_reading, dense), 0, 0, INT32_MAX, NULL},
};
static const struct kvl_plugin_head page_reading = {.name = "pages", .options = page_options, .n_options = sizeof page_options / sizeof *page_options};

static kvl_status set_read(const struct key *key, const struct value *value, struct kvl_layer_spec *entry)
{
    kvl_status status = set_choice_word(key, value, entry);
    if (status != KVL_OK || entry->read == KVL_READ_ALL) return status == KVL_OK ? no_args(key, value) : status;
    status = kvl_options_set("read=pages", page_options, page_reading.n_options, &entry->pages, &value->args);
    if (status == KVL_OK && entry->pages.tokens == 0)
        return kvl_fail_at(&value->name, "write read=pages(tokens=N)", "read=pages does not say how many tokens a query reads");
    if (status == KVL_OK && entry->pages.size % 16 != 0)
        return kvl_fail_at(&value->args, "use a multiple of 16", "size=%d: kernels read 16 tokens at a time", entry->pages.size);
    return status;
}

static kvl_status print_read(const struct key *key, const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    struct kvl_page_reading pages = entry->pages;
    const struct kvl_instance instance = {.plugin = &page_reading, .priv = &pages};
    return entry->read == KVL_READ_ALL ? print_choice(key, entry, out) : kvl_instance_print(&instance, true, out);
}

enum { SIDE_K = 1 << KVL_SIDE_K, SIDE_V = 1 << KVL_SIDE_V, BOTH = SIDE_K | SIDE_V };
#define FIELD(name) offsetof(struct kvl_layer_spec, name)
_Static_assert(sizeof(enum kvl_rope_stage) == sizeof(int) && sizeof(enum kvl_rotation) == sizeof(int) &&
                   sizeof(enum kvl_key_order) == sizeof(int) && sizeof(enum kvl_positions) == sizeof(int) && sizeof(enum kvl_when) == sizeof(int) &&
                   sizeof(enum kvl_scope) == sizeof(int) && sizeof(enum kvl_reading) == sizeof(int) && sizeof(enum kvl_page_bound) == sizeof(int),
               "choices are stored as int");

/* Applied in this order: the keys of one side come after those of both and so beat them. */
static const struct key keys[] = {
    {"kv", set_codec, NULL, BOTH},
    {"k", set_codec, print_codec, SIDE_K},
    {"v", set_codec, print_codec, SIDE_V},
    {"rope", set_choice, print_choice, 0, FIELD(rope), "post|pre"},
    {"rot", set_rotation, print_rotation, 0, FIELD(rot), "none|hadamard|random"},
    {"korder", set_choice, print_choice, 0, FIELD(korder), "gguf|hf"},
    {"sink", set_count, print_count, 0, FIELD(sink)},
    {"tail", set_tail, NULL, BOTH},
    {"ktail", set_tail, print_tail, SIDE_K},
    {"vtail", set_tail, print_tail, SIDE_V},
    {"window", set_count, print_count, 0, FIELD(window)},
    {"keep", set_keep, print_keep},
    {"budget", set_budget, print_budget},
    {"when", set_when, print_when, 0, FIELD(when), "prefill|every:N|full"},
    {"pos", set_choice, print_choice, 0, FIELD(pos), "keep|compact"},
    {"read", set_read, print_read, 0, FIELD(read), "all|pages", .silent = "all"},
    {"table", set_table, print_table, .silent = "none"},
    {"all_layers", set_choice, print_choice, 0, FIELD(all_layers), "no|yes", .silent = "no", .alone = "yes"},
};
enum { N_KEYS = sizeof keys / sizeof *keys, KEY_KV = 0 };

static kvl_status key_words(struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < N_KEYS; i++) KVL_TRY(kvl_text_printf(out, "%s%s", out->size ? "|" : "", keys[i].name));
done:
    return status;
}

/* ---- scanning ---- */

struct scope {
    uint32_t first, last; /* layers; the base has none */
    struct kvl_slice range;
    struct value value[N_KEYS];
    bool given[N_KEYS];
};

struct parser {
    struct kvl_presets presets;
    struct scope *scope; /* [0] is the base */
    size_t n_scopes;
};

static size_t word_length(const struct kvl_slice *rest)
{
    size_t n = 0;
    while (n < rest->n && !isspace((unsigned char)rest->text[rest->at + n]) && strchr("(),=@", rest->text[rest->at + n]) == NULL)
        n++;
    return n;
}

/* Length of a parenthesis with all it holds, 0 if it is never closed. */
static size_t parenthesis_length(const struct kvl_slice *rest)
{
    int depth = 0;
    for (size_t i = 0; i < rest->n; i++) {
        const char c = rest->text[rest->at + i];
        depth += (c == '(') - (c == ')');
        if (depth == 0) return i + 1;
    }
    return 0;
}

static kvl_status fail_unexpected(struct kvl_slice rest)
{
    const struct kvl_slice one = kvl_slice_take(&rest, 1);
    return kvl_fail_at(&one, "items are WORD, key=value, value=name(option=value,...) or @a-b, with spaces between",
                       "unexpected '%c'", kvl_slice_first(&one));
}

static kvl_status scan_args(struct kvl_slice *rest, struct value *out)
{
    out->args = *rest;
    out->args.n = 0;
    out->has_args = kvl_slice_first(rest) == '(';
    if (!out->has_args) return KVL_OK;
    const size_t n = parenthesis_length(rest);
    if (n == 0) return kvl_fail_at(rest, "add ')'", "'(' is never closed");
    out->args = kvl_slice_take(rest, n);
    out->args.at++;
    out->args.n -= 2;
    return KVL_OK;
}

/* name(args), and nothing behind it. */
static kvl_status scan_value(struct kvl_slice *rest, struct value *out)
{
    *out = (struct value){.key = kvl_slice_take(rest, 0), .name = kvl_slice_take(rest, word_length(rest))};
    if (out->name.n == 0) return fail_unexpected(*rest);
    const kvl_status status = scan_args(rest, out);
    return status == KVL_OK && rest->n > 0 ? fail_unexpected(*rest) : status;
}

static kvl_status scan_item(struct kvl_slice *rest, struct value *out)
{
    *out = (struct value){.key = kvl_slice_take(rest, 0), .name = kvl_slice_take(rest, word_length(rest))};
    if (out->name.n == 0) return fail_unexpected(*rest);
    if (kvl_slice_first(rest) == '=') {
        out->key = out->name;
        kvl_slice_take(rest, 1);
        out->name = kvl_slice_take(rest, word_length(rest));
        if (out->name.n == 0)
            return kvl_fail_at(rest, "write key=value without spaces", "no value after '%.*s='", (int)out->key.n,
                               out->key.text + out->key.at);
    }
    kvl_status status = scan_args(rest, out);
    if (status == KVL_OK && rest->n > 0 && !isspace((unsigned char)kvl_slice_first(rest))) status = fail_unexpected(*rest);
    return status;
}

static bool scan_layer(struct kvl_slice *rest, uint32_t *out)
{
    size_t n = 0;
    int64_t layer;
    while (n < rest->n && isdigit((unsigned char)rest->text[rest->at + n])) n++;
    const struct kvl_slice digits = kvl_slice_take(rest, n);
    if (!kvl_slice_i64(&digits, &layer) || layer > UINT32_MAX) return false;
    *out = (uint32_t)layer;
    return true;
}

/* "@a-b" opens a scope. */
static kvl_status scan_range(struct parser *p, struct kvl_slice *rest)
{
    struct scope scope = {0};
    size_t n = 0;
    while (n < rest->n && !isspace((unsigned char)rest->text[rest->at + n])) n++;
    scope.range = kvl_slice_take(rest, n);
    struct kvl_slice inside = scope.range;
    kvl_slice_take(&inside, 1);
    bool legal = scan_layer(&inside, &scope.first) && kvl_slice_first(&inside) == '-';
    if (legal) {
        kvl_slice_take(&inside, 1);
        legal = scan_layer(&inside, &scope.last) && inside.n == 0 && scope.first <= scope.last;
    }
    if (!legal)
        return kvl_fail_at(&scope.range, "write @a-b, layers from 0, a <= b, both included: @2-5, or @3-3 for one",
                           "bad range of layers");
    for (size_t i = 1; i < p->n_scopes; i++)
        if (scope.first <= p->scope[i].last && p->scope[i].first <= scope.last)
            return kvl_fail_at(&scope.range, "make the ranges disjoint", "layer %u is in two ranges",
                               scope.first > p->scope[i].first ? scope.first : p->scope[i].first);
    kvl_status status = kvl_realloc(&p->scope, p->n_scopes + 1, sizeof *p->scope);
    if (status == KVL_OK) p->scope[p->n_scopes++] = scope;
    return status;
}

/* ---- collecting ---- */

static kvl_status fail_twice(const struct value *old, const struct value *new, const char *key)
{
    kvl_status status = KVL_OK;
    struct kvl_text remedy = {0};
    const struct kvl_slice *preset = strcmp(old->name.who, "--kv") != 0 ? &old->name : &new->name;
    if (strcmp(old->name.who, new->name.who) == 0)
        KVL_TRY(kvl_text_printf(&remedy, "keep one"));
    else
        KVL_TRY(kvl_text_printf(&remedy, "write the %s out and change it: %s", preset->who, preset->text));
    status = kvl_fail_at(new->key.n > 0 ? &new->key : &new->name, remedy.data, "%s= is given twice", key);
done:
    kvl_text_free(&remedy);
    return status;
}

static kvl_status collect(struct parser *p, size_t key, const struct value *value)
{
    struct scope *scope = &p->scope[p->n_scopes - 1];
    if (scope->given[key]) return fail_twice(&scope->value[key], value, keys[key].name);
    scope->given[key] = true;
    scope->value[key] = *value;
    return KVL_OK;
}

static kvl_status collect_pair(struct parser *p, const struct value *value)
{
    for (size_t i = 0; i < N_KEYS; i++)
        if (kvl_slice_is(&value->key, keys[i].name)) return collect(p, i, value);
    kvl_status status = KVL_OK;
    struct kvl_text words = {0};
    KVL_TRY(key_words(&words));
    status = kvl_fail_unknown(&value->key, "key", words.data);
done:
    kvl_text_free(&words);
    return status;
}

static kvl_status fail_unknown_word(const struct parser *p, const struct kvl_slice *word)
{
    kvl_status status = KVL_OK;
    struct kvl_text words = {0};
    KVL_TRY(codec_words(false, &words));
    for (unsigned i = 0; i < p->presets.n; i++) KVL_TRY(kvl_text_printf(&words, "|%s", p->presets.preset[i].name));
    status = kvl_fail_unknown(word, "codec or preset", words.data);
done:
    kvl_text_free(&words);
    return status;
}

/* The items of a preset go into the scope where its name stands; ranges and further presets are not for presets. */
static kvl_status collect_preset(struct parser *p, const struct kvl_preset *preset, const struct value *word)
{
    if (word->has_args) return kvl_fail_at(&word->args, "remove the parentheses", "preset %s takes no options", preset->name);
    struct kvl_slice rest = kvl_slice_trim(kvl_slice_of("preset", preset->kv));
    while (rest.n > 0) {
        struct value value;
        kvl_status status = scan_item(&rest, &value);
        if (status == KVL_OK) status = value.key.n > 0 ? collect_pair(p, &value) : collect(p, KEY_KV, &value);
        if (status != KVL_OK) return status;
        rest = kvl_slice_trim(rest);
    }
    return KVL_OK;
}

static kvl_status collect_word(struct parser *p, const struct value *word)
{
    const struct kvl_preset *preset = kvl_presets_find(&p->presets, &word->name);
    for (size_t i = 0; i < N_KEYS; i++)
        if (keys[i].alone != NULL && kvl_slice_is(&word->name, keys[i].name)) {
            struct value value = *word;
            value.key = word->name;
            value.name = kvl_slice_of("--kv", keys[i].alone);
            return collect(p, i, &value);
        }
    if (preset != NULL) return collect_preset(p, preset, word);
    if (find_codec(&word->name) != NULL || find_plugin(KVL_KIND_PROJECTION, &word->name) != NULL)
        return collect(p, KEY_KV, word);
    return fail_unknown_word(p, &word->name);
}

static kvl_status collect_all(struct parser *p, struct kvl_slice rest)
{
    for (rest = kvl_slice_trim(rest); rest.n > 0; rest = kvl_slice_trim(rest)) {
        struct value value;
        kvl_status status = KVL_OK;
        if (kvl_slice_first(&rest) == '@') {
            status = scan_range(p, &rest);
        } else {
            status = scan_item(&rest, &value);
            if (status == KVL_OK) status = value.key.n > 0 ? collect_pair(p, &value) : collect_word(p, &value);
        }
        if (status != KVL_OK) return status;
    }
    return KVL_OK;
}

/* ---- entries ---- */

struct override {
    uint32_t first, last;
    struct kvl_layer_spec entry;
};

struct kvl_spec {
    char *given;
    struct kvl_layer_spec base;
    struct override *override; /* by first layer, disjoint */
    size_t n_overrides;
};

static void free_entry(struct kvl_layer_spec *entry)
{
    for (int side = 0; side < KVL_SIDES; side++) {
        kvl_instance_free(&entry->codec[side]);
        kvl_instance_free(&entry->projection[side]);
    }
    free_keep(entry);
    kvl_instance_free(&entry->budget);
    kvl_free(&entry->table_path);
    kvl_table_free(&entry->table);
}

void kvl_table_free(struct kvl_table *table)
{
    for (int side = 0; side < KVL_SIDES; side++) kvl_free(&table->values[side]);
}

static kvl_status apply(const struct scope *scope, struct kvl_layer_spec *entry)
{
    for (size_t i = 0; i < N_KEYS; i++) {
        const kvl_status status = scope->given[i] ? keys[i].set(&keys[i], &scope->value[i], entry) : KVL_OK;
        if (status != KVL_OK) return status;
    }
    return KVL_OK;
}

static kvl_status check_rope_stage(const struct kvl_layer_spec *entry)
{
    const struct kvl_codec *codec = (const struct kvl_codec *)entry->codec[KVL_SIDE_K].plugin;
    const bool pre = entry->rope == KVL_STORE_PRE_ROPE;
    if (codec->rope_stages & (pre ? KVL_ROPE_PRE : KVL_ROPE_POST)) return KVL_OK;
    return kvl_fail(KVL_E_USAGE, "--kv: codec %s does not store keys %s RoPE: use rope=%s", codec->head.name,
                    pre ? "before" : "after", pre ? "post" : "pre");
}

/* A score that is computed anew must find what it reads. */
static kvl_status check_held_evidence(const struct kvl_layer_spec *entry)
{
    static const struct {
        uint32_t what;
        const char *why;
    } of_prompts[] = {
        {KVL_NEED_FOLLOWING, "reads the tokens that follow a prompt"},
        {KVL_NEED_REPETITION, "lets the model repeat a prompt"},
        {KVL_NEED_COLUMN_SUMS, "reads sums of attention and does not say how they go on"},
    };
    const struct kvl_score *score = (const struct kvl_score *)entry->keep[0].plugin;
    struct kvl_score_needs needs;
    const char *why = NULL;
    kvl_keep_needs(entry, &needs);
    for (size_t i = 0; i < sizeof of_prompts / sizeof *of_prompts && !kvl_score_runs(score); i++)
        if (needs.what & of_prompts[i].what) why = of_prompts[i].why;
    if (needs.what & KVL_NEED_QUERIES && needs.queries == UINT32_MAX) why = "reads all queries of a text, and those of tokens that are gone stand for nothing";
    return why == NULL ? KVL_OK
                       : kvl_fail(KVL_E_UNSUPPORTED, "--kv: score %s %s: while tokens are decoded it cannot say which of them go; use when=prefill, or another score",
                                  score->head.name, why);
}

/* What eviction while decoding asks of the rest: a score that knows what to say, tokens that can go alone. */
static kvl_status check_decode_eviction(const struct kvl_layer_spec *entry)
{
    kvl_status status = KVL_OK;
    const struct kvl_score *score = (const struct kvl_score *)entry->keep[0].plugin;
    struct kvl_score_running running;
    if (kvl_keep_running(entry, 1, &running) != KVL_OK)
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: score %s does not go on while tokens are decoded with these options (kvlab plugins %s says why): change"
                                           " them, or use when=prefill", score->head.name, score->head.name);
    if (kvl_keep_by_host(entry) && running.is_shared)
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: score %s lets all heads keep the same tokens, and %s changes that: while tokens are decoded use keep=%s with"
                                           " budget=uniform, or when=prefill",
                        score->head.name, entry->n_keep > 1 ? entry->keep[1].plugin->name : entry->budget.plugin->name, score->head.name);
    KVL_TRY(check_held_evidence(entry));
    for (int side = 0; side < KVL_SIDES; side++)
        if (!(((const struct kvl_codec *)entry->codec[side].plugin)->flags & KVL_CODEC_MOVABLE))
            return kvl_fail(KVL_E_UNSUPPORTED, "--kv: codec %s encodes tokens in groups, from which none can go alone: with when=every:N or full use one"
                                               " that encodes single tokens (movable in kvlab plugins: f16, int4, q4_0 ...), or when=prefill",
                            entry->codec[side].plugin->name);
    if (entry->tail[KVL_SIDE_K] != entry->tail[KVL_SIDE_V] && (entry->tail[KVL_SIDE_K] > 0 || entry->tail[KVL_SIDE_V] > 0))
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: ktail and vtail differ: while tokens are decoded key and value of one go together, so use tail=");
    if (entry->pos == KVL_POS_COMPACT && entry->rope == KVL_STORE_POST_ROPE)
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: pos=compact with when=every:N or full turns stored keys anew after each eviction: add rope=pre (or write"
                                           " sink=S window=W pos=compact for sinks and the newest tokens, or when=prefill)");
done:
    return status;
}

/* A score and a budget belong together, and a window already says what goes. */
static kvl_status check_eviction(const struct kvl_layer_spec *entry)
{
    const struct kvl_plugin_head *score = entry->keep[0].plugin, *budget = entry->budget.plugin;
    uint32_t target;
    double fraction;
    if (entry->n_keep == 0 && budget == NULL)
        return entry->pos == KVL_POS_KEEP || entry->window != 0
                   ? KVL_OK
                   : kvl_fail(KVL_E_USAGE, "--kv: pos=compact renumbers what eviction or a window leaves: add keep= and budget=, or window=");
    if (entry->n_keep == 0) return kvl_fail(KVL_E_USAGE, "--kv: budget=%s without a score: add keep=, or leave it out", budget->name);
    if (budget == NULL) return kvl_fail(KVL_E_USAGE, "--kv: keep=%s without a budget: add budget=uniform(kept=0.5) or another", score->name);
    if (entry->window != 0) return kvl_fail(KVL_E_USAGE, "--kv: window= and keep= both say which tokens stay: use one of them");
    if (entry->rope == KVL_STORE_PRE_ROPE && entry->pos == KVL_POS_KEEP)
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: rope=pre turns kept keys by their places: add pos=compact, or use rope=post");
    const kvl_status status = kvl_amount_resolve(entry->budget.priv, 1, 1, &target, &fraction);
    return status == KVL_OK && entry->when != KVL_WHEN_PREFILL ? check_decode_eviction(entry) : status;
}

/* Bounds of a page's keys hold for keys as queries meet them, and as long as tokens stay where they are. */
static kvl_status check_reading(const struct kvl_layer_spec *entry)
{
    if (entry->read == KVL_READ_ALL) return KVL_OK;
    if (entry->window != 0) return kvl_fail(KVL_E_USAGE, "--kv: window= and read=pages both say what is read: use one of them");
    if (entry->when != KVL_WHEN_PREFILL)
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: when=every:N and full move tokens from page to page, whose bounds read=pages reads: use when=prefill, or "
                                           "read=all");
    if (entry->rope == KVL_STORE_PRE_ROPE)
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: read=pages bounds scores by stored keys, and rope=pre turns these when they are read: use rope=post");
    if (kvl_spec_projects(entry))
        return kvl_fail(KVL_E_UNSUPPORTED, "--kv: read=pages bounds scores by keys, and here latents are stored: use a codec alone, or read=all");
    return KVL_OK;
}

/* A rotation mixes channels, and some codecs treat each by what it holds. */
static kvl_status check_rotation(const struct kvl_layer_spec *entry)
{
    for (int side = 0; side < KVL_SIDES; side++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)entry->codec[side].plugin;
        if (entry->rot != KVL_ROT_NONE && codec->flags & KVL_CODEC_NO_ROTATION)
            return kvl_fail(KVL_E_USAGE, "--kv: codec %s tells channels apart, which a rotation mixes: use rot=none", codec->head.name);
    }
    return KVL_OK;
}

/* A table is a projection's or a codec's: its file says which for each side, and its rows are given before a rotation, or behind it. */
static kvl_status check_projections(const struct kvl_layer_spec *entry)
{
    for (int side = 0; side < KVL_SIDES; side++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)entry->codec[side].plugin;
        if (kvl_spec_projects(entry) && (codec->flags & KVL_CODEC_NEEDS_TABLE || KVL_CODEC_HAS(codec, learn)))
            return kvl_fail(KVL_E_USAGE, "--kv: codec %s learns from rows as they are stored, which cannot be done behind or beside a projection yet: "
                                               "use a codec without a table", codec->head.name);
    }
    return KVL_OK;
}

bool kvl_spec_projects(const struct kvl_layer_spec *entry)
{
    return entry->projection[KVL_SIDE_K].plugin != NULL || entry->projection[KVL_SIDE_V].plugin != NULL;
}

/* The defaults, then the scopes' items. */
static kvl_status make_entry(const struct scope *base, const struct scope *override, struct kvl_layer_spec *entry)
{
    kvl_status status = KVL_OK;
    *entry = (struct kvl_layer_spec){.tail = {-1, -1}};
    for (int side = 0; side < KVL_SIDES; side++)
        KVL_TRY(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "f16"), NULL, &entry->codec[side]));
    KVL_TRY(apply(base, entry));
    if (override != NULL) KVL_TRY(apply(override, entry));
    KVL_TRY(check_rope_stage(entry));
    KVL_TRY(check_eviction(entry));
    KVL_TRY(check_rotation(entry));
    KVL_TRY(check_projections(entry));
    KVL_TRY(check_reading(entry));
done:
    return status;
}

static void insert_sorted(struct kvl_spec *spec, struct override override)
{
    size_t i = spec->n_overrides++;
    for (; i > 0 && spec->override[i - 1].first > override.first; i--) spec->override[i] = spec->override[i - 1];
    spec->override[i] = override;
}

static kvl_status make_entries(const struct parser *p, struct kvl_spec *spec)
{
    kvl_status status = KVL_OK;
    KVL_TRY(make_entry(&p->scope[0], NULL, &spec->base));
    KVL_TRY(kvl_alloc(&spec->override, p->n_scopes, sizeof *spec->override));
    for (size_t i = 1; i < p->n_scopes; i++) {
        struct override override = {.first = p->scope[i].first, .last = p->scope[i].last};
        status = make_entry(&p->scope[0], &p->scope[i], &override.entry);
        insert_sorted(spec, override);
        if (status != KVL_OK) goto done;
    }
done:
    return status;
}

/* ---- the spec ---- */

kvl_status kvl_spec_parse(const char *text, struct kvl_spec **out)
{
    kvl_status status = KVL_OK;
    struct kvl_spec *spec = NULL;
    struct parser p = {0};
    KVL_TRY(kvl_alloc(&spec, 1, sizeof *spec));
    KVL_TRY(kvl_strdup(&spec->given, text ? text : ""));
    KVL_TRY(kvl_presets_load(&p.presets));
    KVL_TRY(kvl_alloc(&p.scope, 1, sizeof *p.scope));
    p.n_scopes = 1;
    KVL_TRY(collect_all(&p, kvl_slice_of("--kv", spec->given)));
    KVL_TRY(make_entries(&p, spec));
    if (spec->base.when != KVL_WHEN_PREFILL && !kvl_spec_evicts(spec)) {
        status = kvl_fail(KVL_E_USAGE, "--kv: when= says when tokens go, and nothing says which: add keep= and budget=");
        goto done;
    }
    *out = spec;
    spec = NULL;
done:
    kvl_spec_free(&spec);
    kvl_free(&p.scope);
    kvl_presets_free(&p.presets);
    return status;
}

void kvl_spec_free(struct kvl_spec **spec)
{
    if (*spec == NULL) return;
    free_entry(&(*spec)->base);
    for (size_t i = 0; i < (*spec)->n_overrides; i++) free_entry(&(*spec)->override[i].entry);
    kvl_free(&(*spec)->override);
    kvl_free(&(*spec)->given);
    kvl_free(spec);
}

const struct kvl_layer_spec *kvl_spec_layer(const struct kvl_spec *spec, uint32_t layer)
{
    for (size_t i = 0; i < spec->n_overrides; i++)
        if (spec->override[i].first <= layer && layer <= spec->override[i].last) return &spec->override[i].entry;
    return &spec->base;
}

/* A layer's rank where the table says it. A table that does not fit is refused when a plan is made of it. */
static kvl_status rank_by_table(const struct kvl_layer_spec *entry, enum kvl_side side, uint32_t layer, uint32_t head_dim, struct kvl_projection_shape *shape)
{
    const struct kvl_table *table = &entry->table;
    const uint32_t group = layer / shape->layers;
    shape->rank = shape->layers * shape->heads * head_dim;
    if (table->values[side] == NULL || table->n[side] != shape->table_floats || group >= table->n_layer) return KVL_OK;
    const struct kvl_projection_tables tables = {sizeof tables, table->n_layer, table->n_stream, shape->table_floats, table->values[side]};
    return kvl_projection_rank(&entry->projection[side], role_of(side), head_dim, &tables, group, &shape->rank);
}

kvl_status kvl_spec_stream_record(const struct kvl_layer_spec *entry, enum kvl_side side, uint32_t layer, uint32_t head_dim, struct kvl_stream_record *out)
{
    kvl_status status = KVL_OK;
    struct kvl_projection_shape shape;
    *out = (struct kvl_stream_record){.heads = 1, .layers = 1, .channels = head_dim};
    if (entry->projection[side].plugin == NULL) return KVL_OK;
    KVL_TRY(kvl_projection_shape(&entry->projection[side], role_of(side), head_dim, &shape));
    if (shape.rank == 0) KVL_TRY(rank_by_table(entry, side, layer, head_dim, &shape));
    *out = (struct kvl_stream_record){.heads = shape.heads,
                                      .layers = shape.layers,
                                      .channels = shape.rank,
                                      .rebuilt = shape.rebuilt || (side == KVL_SIDE_K && entry->rope == KVL_STORE_PRE_ROPE),
                                      .table_floats = shape.table_floats};
done:
    return status;
}

kvl_status kvl_spec_check_layers(const struct kvl_spec *spec, uint32_t n_layers)
{
    for (size_t i = 0; i < spec->n_overrides; i++) {
        const struct override *o = &spec->override[i];
        if (o->last >= n_layers)
            return kvl_fail(KVL_E_USAGE, "--kv: @%u-%u names layer %u, the model has layers 0 to %u", o->first, o->last, o->last,
                            n_layers - 1);
    }
    return KVL_OK;
}

static kvl_status check_side(const struct kvl_layer_spec *entry, int side, uint32_t layer, uint32_t head_dim)
{
    struct kvl_stream_record record;
    struct kvl_codec_shape shape;
    uint32_t size;
    kvl_status status = kvl_spec_stream_record(entry, side, layer, head_dim, &record);
    if (status == KVL_OK) status = kvl_rotation_size(entry->rot, record.channels, &size);
    if (status == KVL_OK) status = kvl_codec_shape(&entry->codec[side], role_of(side), record.channels, 0, &shape);
    if (status != KVL_OK || entry->tail[side] < 0 || entry->tail[side] >= shape.tail_min) return status;
    return kvl_fail(KVL_E_USAGE,
                    "--kv: %ctail=%lld: codec %s keeps the newest %u tokens in full precision: use at least %u, or leave it out",
                    side == KVL_SIDE_K ? 'k' : 'v', (long long)entry->tail[side], entry->codec[side].plugin->name, shape.tail_min,
                    shape.tail_min);
}

kvl_status kvl_spec_check_dims(const struct kvl_spec *spec, uint32_t n_layers, uint32_t head_dim)
{
    kvl_status status = kvl_spec_check_layers(spec, n_layers);
    for (uint32_t layer = 0; layer < n_layers && status == KVL_OK; layer++) {
        const struct kvl_layer_spec *entry = kvl_spec_layer(spec, layer);
        for (int side = 0; side < KVL_SIDES && status == KVL_OK; side++) status = check_side(entry, side, layer, head_dim);
    }
    return status;
}

/* ---- tables ---- */

static kvl_status load_table(struct kvl_layer_spec *entry, kvl_table_loader load, void *context)
{
    if (entry->table_path == NULL) return KVL_OK;
    kvl_table_free(&entry->table);
    return load(context, entry, &entry->table);
}

kvl_status kvl_spec_load_tables(struct kvl_spec *spec, kvl_table_loader load, void *context)
{
    kvl_status status = load_table(&spec->base, load, context);
    for (size_t i = 0; i < spec->n_overrides && status == KVL_OK; i++) status = load_table(&spec->override[i].entry, load, context);
    return status;
}

static kvl_status print_digest(const struct kvl_table *table, struct kvl_text *out)
{
    return *table->sha256 ? kvl_text_printf(out, "%s%s", out->size ? " " : "", table->sha256) : KVL_OK;
}

kvl_status kvl_spec_tables_sha256(const struct kvl_spec *spec, struct kvl_text *out)
{
    kvl_status status = print_digest(&spec->base.table, out);
    for (size_t i = 0; i < spec->n_overrides && status == KVL_OK; i++) status = print_digest(&spec->override[i].entry.table, out);
    return status;
}

bool kvl_spec_uniform(const struct kvl_spec *spec) { return spec->n_overrides == 0; }

const char *kvl_spec_given(const struct kvl_spec *spec) { return spec->given; }

kvl_status kvl_spec_form(const struct kvl_layer_spec *entry, struct kvl_text *out)
{
    static const char *const form[] = {"rope", "rot", "korder"};
    kvl_status status = KVL_OK;
    struct kvl_layer_spec before = *entry; /* borrows all it owns */
    if (kvl_spec_projects(entry)) before.rot = KVL_ROT_NONE;
    for (size_t i = 0; i < N_KEYS; i++)
        for (size_t f = 0; f < sizeof form / sizeof *form; f++) {
            if (strcmp(keys[i].name, form[f]) != 0) continue;
            KVL_TRY(kvl_text_printf(out, "%s%s=", out->size ? " " : "", form[f]));
            KVL_TRY(keys[i].print(&keys[i], &before, out));
        }
done:
    return status;
}

/* "key=value" for all keys of an entry; with `base`, only for those that differ from it. */
static kvl_status print_entry(const struct kvl_layer_spec *entry, const struct kvl_layer_spec *base, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    struct kvl_text value = {0}, base_value = {0};
    for (size_t i = 0; i < N_KEYS; i++) {
        if (keys[i].print == NULL) continue;
        value.size = base_value.size = 0;
        KVL_TRY(keys[i].print(&keys[i], entry, &value));
        if (base != NULL) KVL_TRY(keys[i].print(&keys[i], base, &base_value));
        if (base != NULL && strcmp(value.data, base_value.data) == 0) continue;
        if (base == NULL && keys[i].silent != NULL && strcmp(value.data, keys[i].silent) == 0) continue;
        KVL_TRY(kvl_text_printf(out, "%s%s=%s", out->size ? " " : "", keys[i].name, value.data));
    }
done:
    kvl_text_free(&value);
    kvl_text_free(&base_value);
    return status;
}

kvl_status kvl_spec_resolved(const struct kvl_spec *spec, struct kvl_text *out)
{
    kvl_status status = print_entry(&spec->base, NULL, out);
    struct kvl_text items = {0};
    for (size_t i = 0; i < spec->n_overrides && status == KVL_OK; i++) {
        const struct override *o = &spec->override[i];
        items.size = 0;
        status = print_entry(&o->entry, &spec->base, &items);
        if (status == KVL_OK && items.size > 0) status = kvl_text_printf(out, " @%u-%u %s", o->first, o->last, items.data);
    }
    kvl_text_free(&items);
    return status;
}

bool kvl_spec_compact(const struct kvl_spec *spec)
{
    bool compact = spec->base.pos == KVL_POS_COMPACT;
    for (size_t i = 0; i < spec->n_overrides; i++) compact = compact && spec->override[i].entry.pos == KVL_POS_COMPACT;
    return compact;
}

bool kvl_spec_windowed(const struct kvl_spec *spec)
{
    bool windowed = spec->base.window != 0;
    for (size_t i = 0; i < spec->n_overrides; i++) windowed = windowed || spec->override[i].entry.window != 0;
    return windowed;
}

bool kvl_spec_evicts(const struct kvl_spec *spec)
{
    bool evicts = spec->base.n_keep != 0;
    for (size_t i = 0; i < spec->n_overrides; i++) evicts = evicts || spec->override[i].entry.n_keep != 0;
    return evicts;
}

bool kvl_spec_picks(const struct kvl_spec *spec)
{
    bool picks = spec->base.read == KVL_READ_PAGES;
    for (size_t i = 0; i < spec->n_overrides; i++) picks = picks || spec->override[i].entry.read == KVL_READ_PAGES;
    return picks;
}

static const char *learner(const struct kvl_layer_spec *entry)
{
    for (int side = 0; side < KVL_SIDES; side++) {
        const struct kvl_codec *codec = (const struct kvl_codec *)entry->codec[side].plugin;
        if (KVL_CODEC_HAS(codec, learn) && entry->table.values[side] == NULL) return codec->head.name;
    }
    return NULL;
}

const char *kvl_spec_learner(const struct kvl_spec *spec)
{
    const char *name = learner(&spec->base);
    for (size_t i = 0; i < spec->n_overrides && name == NULL; i++) name = learner(&spec->override[i].entry);
    return name;
}

uint32_t kvl_key_channel(enum kvl_key_order order, uint32_t rope_dim, uint32_t c)
{
    if (order == KVL_KORDER_GGUF || c >= rope_dim) return c;
    return c < rope_dim / 2 ? 2 * c : 2 * (c - rope_dim / 2) + 1;
}
