/* kvlab plugins: the plug-ins and presets of this build as a table, JSON or Markdown; with a name, its options and method card. */
#include "cmd.h"
#include "mem.h"
#include "presets.h"
#include "registry.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

enum { TABLE_HEAD_DIM = 64 };

struct args {
    bool json, md;
};

/* ---- what a row says ---- */

enum { NAME, KIND, BITS, ROLES, ROPE, MOVABLE, CALIBRATION, SUMMARY, N_COLUMNS };
static const char *const column_title[N_COLUMNS] = {"name", "kind",    "bits/element (d 64)", "roles",
                                                    "rope", "movable", "calibration",         "summary"};

struct row {
    char cell[N_COLUMNS][128];
};

static void append_word(char cell[128], bool is_set, const char *word)
{
    const size_t n = strlen(cell);
    if (is_set) snprintf(cell + n, 128 - n, "%s%s", n ? " " : "", word);
}

/* Bits of one element with its share of scales and index, default options. */
static kvl_status bits_per_element(const struct kvl_plugin_head *plugin, double *out)
{
    const struct kvl_codec *codec = (const struct kvl_codec *)plugin;
    const uint32_t n = 1024, role = codec->roles & KVL_ROLE_K   ? KVL_ROLE_K
                                    : codec->roles & KVL_ROLE_V ? KVL_ROLE_V
                                                                : KVL_ROLE_JOINT;
    struct kvl_instance instance;
    struct kvl_codec_bytes bytes;
    kvl_status status = kvl_instance_new(plugin, NULL, &instance);
    if (status != KVL_OK) return status;
    status = kvl_codec_bytes(&instance, role, TABLE_HEAD_DIM, n, &bytes);
    if (status == KVL_OK) *out = 8.0 * (double)(bytes.payload + bytes.scale + bytes.index) / n / TABLE_HEAD_DIM;
    kvl_instance_free(&instance);
    return status;
}

static void fill_roles(uint32_t roles, struct row *out)
{
    append_word(out->cell[ROLES], roles & KVL_ROLE_K, "K");
    append_word(out->cell[ROLES], roles & KVL_ROLE_V, "V");
    append_word(out->cell[ROLES], roles & KVL_ROLE_JOINT, "joint");
}

static kvl_status fill_projection(const struct kvl_plugin_head *plugin, struct row *out)
{
    fill_roles(((const struct kvl_projection *)plugin)->roles, out);
    snprintf(out->cell[ROPE], sizeof *out->cell, "post pre");
    snprintf(out->cell[CALIBRATION], sizeof *out->cell, "needed");
    return KVL_OK;
}

static kvl_status fill_codec(const struct kvl_plugin_head *plugin, struct row *out)
{
    const struct kvl_codec *codec = (const struct kvl_codec *)plugin;
    double bits = 0;
    const kvl_status status = bits_per_element(plugin, &bits);
    snprintf(out->cell[BITS], sizeof *out->cell, "%.4g", bits);
    fill_roles(codec->roles, out);
    append_word(out->cell[ROPE], codec->rope_stages & KVL_ROPE_POST, "post");
    append_word(out->cell[ROPE], codec->rope_stages & KVL_ROPE_PRE, "pre");
    snprintf(out->cell[MOVABLE], sizeof *out->cell, "%s", codec->flags & KVL_CODEC_MOVABLE ? "yes" : "no");
    snprintf(out->cell[CALIBRATION], sizeof *out->cell, "%s",
             codec->flags & KVL_CODEC_NEEDS_TABLE ? "needed" : KVL_CODEC_HAS(codec, learn) ? "by prompt" : "no");
    return status;
}

static kvl_status make_row(const struct kvl_plugin_head *plugin, struct row *out)
{
    *out = (struct row){0};
    snprintf(out->cell[NAME], sizeof *out->cell, "%s", plugin->name);
    snprintf(out->cell[KIND], sizeof *out->cell, "%s", kvl_plugin_kind_name(plugin->kind));
    snprintf(out->cell[SUMMARY], sizeof *out->cell, "%s", plugin->summary);
    switch (plugin->kind) {
    case KVL_KIND_CODEC: return fill_codec(plugin, out);
    case KVL_KIND_PROJECTION: return fill_projection(plugin, out);
    default: return KVL_OK;
    }
}

/* ---- tables ---- */

static kvl_status make_rows(struct row **out, size_t *n)
{
    kvl_status status = KVL_OK;
    *n = kvl_registry_count();
    KVL_TRY(kvl_alloc(out, *n, sizeof **out));
    for (size_t i = 0; i < *n; i++) KVL_TRY(make_row(kvl_registry_at(i), &(*out)[i]));
done:
    return status;
}

static void print_row(const char *const cell[N_COLUMNS], const size_t width[N_COLUMNS])
{
    for (int c = 0; c < SUMMARY; c++) printf("%-*s  ", (int)width[c], cell[c]);
    printf("%s\n", cell[SUMMARY]);
}

static void print_table(const struct row *rows, size_t n)
{
    size_t width[N_COLUMNS];
    for (int c = 0; c < N_COLUMNS; c++) {
        width[c] = strlen(column_title[c]);
        for (size_t i = 0; i < n; i++)
            if (strlen(rows[i].cell[c]) > width[c]) width[c] = strlen(rows[i].cell[c]);
    }
    print_row(column_title, width);
    for (size_t i = 0; i < n; i++) {
        const char *cell[N_COLUMNS];
        for (int c = 0; c < N_COLUMNS; c++) cell[c] = rows[i].cell[c];
        print_row(cell, width);
    }
}

static void print_markdown(const struct row *rows, size_t n)
{
    for (int c = 0; c < N_COLUMNS; c++) printf("| %s ", column_title[c]);
    printf("|\n");
    for (int c = 0; c < N_COLUMNS; c++) printf("| --- ");
    printf("|\n");
    for (size_t i = 0; i < n; i++) {
        for (int c = 0; c < N_COLUMNS; c++) printf("| %s ", rows[i].cell[c]);
        printf("|\n");
    }
}

static kvl_status list_all(bool markdown)
{
    kvl_status status = KVL_OK;
    struct kvl_presets presets = {0};
    struct row *rows = NULL;
    size_t n;
    KVL_TRY(make_rows(&rows, &n));
    KVL_TRY(kvl_presets_load(&presets));
    if (markdown) {
        print_markdown(rows, n);
        goto done;
    }
    print_table(rows, n);
    printf("\npresets\n");
    for (unsigned i = 0; i < presets.n; i++) printf("%-16s  %s\n", presets.preset[i].name, presets.preset[i].kv);
done:
    kvl_presets_free(&presets);
    kvl_free(&rows);
    return status;
}

/* ---- one plug-in ---- */

static void print_legal(const struct kvl_option *o)
{
    if (o->type == KVL_OPTION_CHOICE)
        printf("%s", o->choices);
    else if (kvl_option_wraps(o))
        printf("a %s with its options", o->type == KVL_OPTION_CODEC ? "codec" : "score");
    else if (o->type == KVL_OPTION_NUMBERS)
        printf("numbers from %.10g to %.10g", o->min, o->max);
    else if (o->min < o->max)
        printf("%.10g to %.10g", o->min, o->max);
    else
        printf("any number");
}

/* Of a number. */
static bool has_fallback(const struct kvl_option *o) { return o->min >= o->max || (o->fallback >= o->min && o->fallback <= o->max); }

static void print_fallback(const struct kvl_option *o)
{
    size_t n;
    if (kvl_option_wraps(o) || o->type == KVL_OPTION_NUMBERS) {
        printf(o->type == KVL_OPTION_CODEC ? "f16" : "none");
        return;
    }
    if (o->type != KVL_OPTION_CHOICE) {
        printf(has_fallback(o) ? "%.10g" : "none", o->fallback);
        return;
    }
    const char *word = kvl_words_at(o->choices, (size_t)o->fallback, &n);
    printf("%.*s", (int)n, word);
}

static void print_plugin(const struct kvl_plugin_head *plugin)
{
    printf("%s (%s): %s\nciting: %s\n", plugin->name, kvl_plugin_kind_name(plugin->kind), plugin->summary,
           plugin->citation ? plugin->citation : "nothing");
    if (plugin->kind == KVL_KIND_CODEC) printf("byte version %u, ", plugin->byte_version);
    printf("plug-in ABI %u.%u\n", plugin->abi_major, plugin->abi_minor);
    printf(plugin->n_options > 0 ? "options:\n" : "no options\n");
    for (uint32_t i = 0; i < plugin->n_options; i++) {
        const struct kvl_option *o = &plugin->options[i];
        printf("  %-10s %s (", o->name, o->help);
        print_legal(o);
        printf("; default ");
        print_fallback(o);
        printf(")\n");
    }
    if (plugin->card != NULL) printf("\n%s", plugin->card);
}

static void print_preset(const struct kvl_preset *preset)
{
    printf("%s (preset): %s\nsource: %s\n", preset->name, preset->kv, preset->source);
    if (preset->note != NULL) printf("note: %s\n", preset->note);
}

static bool is_wanted(const char *wanted, const char *name) { return wanted == NULL || strcmp(wanted, name) == 0; }

static kvl_status show_one(const char *name)
{
    kvl_status status = KVL_OK;
    struct kvl_presets presets = {0};
    size_t shown = 0;
    KVL_TRY(kvl_presets_load(&presets));
    for (size_t i = 0; i < kvl_registry_count(); i++) {
        if (!is_wanted(name, kvl_registry_at(i)->name)) continue;
        print_plugin(kvl_registry_at(i));
        shown++;
    }
    for (unsigned i = 0; i < presets.n; i++) {
        if (!is_wanted(name, presets.preset[i].name)) continue;
        print_preset(&presets.preset[i]);
        shown++;
    }
done:
    kvl_presets_free(&presets);
    return status;
}

/* ---- JSON ---- */

static cJSON *option_json(const struct kvl_option *o)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "name", o->name);
    cJSON_AddStringToObject(object, "help", o->help);
    if (kvl_option_wraps(o)) return object;
    if (o->type != KVL_OPTION_CHOICE) {
        cJSON_AddNumberToObject(object, "min", o->min);
        cJSON_AddNumberToObject(object, "max", o->max);
        if (o->type != KVL_OPTION_NUMBERS && has_fallback(o)) cJSON_AddNumberToObject(object, "default", o->fallback);
        return object;
    }
    size_t n;
    const char *text;
    cJSON *choices = cJSON_AddArrayToObject(object, "choices");
    for (size_t i = 0; (text = kvl_words_at(o->choices, i, &n)) != NULL; i++) {
        char word[64];
        snprintf(word, sizeof word, "%.*s", (int)n, text);
        cJSON_AddItemToArray(choices, cJSON_CreateString(word));
        if (i == (size_t)o->fallback) cJSON_AddStringToObject(object, "default", word);
    }
    return object;
}

static kvl_status codec_json(const struct kvl_plugin_head *plugin, cJSON *object)
{
    const struct kvl_codec *codec = (const struct kvl_codec *)plugin;
    struct row row = {0};
    double bits = 0;
    kvl_status status = fill_codec(plugin, &row);
    if (status == KVL_OK) status = bits_per_element(plugin, &bits);
    cJSON_AddNumberToObject(object, "byte_version", plugin->byte_version);
    cJSON_AddNumberToObject(object, "bits_per_element", bits);
    cJSON_AddStringToObject(object, "roles", row.cell[ROLES]);
    cJSON_AddStringToObject(object, "rope", row.cell[ROPE]);
    cJSON_AddBoolToObject(object, "movable", codec->flags & KVL_CODEC_MOVABLE);
    cJSON_AddBoolToObject(object, "needs_calibration", codec->flags & KVL_CODEC_NEEDS_TABLE);
    cJSON_AddBoolToObject(object, "learns_from_prompt", KVL_CODEC_HAS(codec, learn));
    return status;
}

static kvl_status plugin_json(const struct kvl_plugin_head *plugin, cJSON *list)
{
    kvl_status status = KVL_OK;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToArray(list, object);
    cJSON_AddStringToObject(object, "name", plugin->name);
    cJSON_AddStringToObject(object, "kind", kvl_plugin_kind_name(plugin->kind));
    cJSON_AddStringToObject(object, "summary", plugin->summary);
    cJSON_AddStringToObject(object, "citation", plugin->citation ? plugin->citation : "");
    if (plugin->kind == KVL_KIND_CODEC) status = codec_json(plugin, object);
    cJSON *options = cJSON_AddArrayToObject(object, "options");
    for (uint32_t i = 0; i < plugin->n_options; i++) cJSON_AddItemToArray(options, option_json(&plugin->options[i]));
    return status;
}

static void preset_json(const struct kvl_preset *preset, cJSON *list)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToArray(list, object);
    cJSON_AddStringToObject(object, "name", preset->name);
    cJSON_AddStringToObject(object, "kv", preset->kv);
    cJSON_AddStringToObject(object, "source", preset->source);
    cJSON_AddStringToObject(object, "note", preset->note ? preset->note : "");
}

/* name NULL: all. */
static kvl_status print_json(const char *name)
{
    kvl_status status = KVL_OK;
    struct kvl_presets presets = {0};
    char *text = NULL;
    cJSON *root = cJSON_CreateObject(), *plugins = cJSON_AddArrayToObject(root, "plugins"),
          *list = cJSON_AddArrayToObject(root, "presets");
    KVL_TRY(kvl_presets_load(&presets));
    for (size_t i = 0; i < kvl_registry_count(); i++)
        if (is_wanted(name, kvl_registry_at(i)->name)) KVL_TRY(plugin_json(kvl_registry_at(i), plugins));
    for (unsigned i = 0; i < presets.n; i++)
        if (is_wanted(name, presets.preset[i].name)) preset_json(&presets.preset[i], list);
    text = cJSON_Print(root);
    if (text == NULL)
        status = kvl_fail(KVL_E_MEMORY, "out of host memory for the JSON text");
    else
        puts(text);
done:
    cJSON_free(text);
    cJSON_Delete(root);
    kvl_presets_free(&presets);
    return status;
}

/* ---- the command ---- */

/* KVL_E_USAGE unless a plug-in or preset has this name. */
static kvl_status check_name(const char *name)
{
    kvl_status status = KVL_OK;
    struct kvl_presets presets = {0};
    struct kvl_text names = {0};
    const struct kvl_slice wanted = kvl_slice_of("plugins", name);
    KVL_TRY(kvl_presets_load(&presets));
    for (size_t i = 0; i < kvl_registry_count(); i++)
        KVL_TRY(kvl_text_printf(&names, "%s%s", i ? "|" : "", kvl_registry_at(i)->name));
    for (unsigned i = 0; i < presets.n; i++) KVL_TRY(kvl_text_printf(&names, "|%s", presets.preset[i].name));
    if (kvl_words_find(names.data, &wanted) < 0) status = kvl_fail_unknown(&wanted, "plug-in or preset", names.data);
done:
    kvl_text_free(&names);
    kvl_presets_free(&presets);
    return status;
}

static kvl_status run(void *arguments, size_t n_words, char *const *words)
{
    const struct args *args = arguments;
    const char *name = n_words > 0 ? words[0] : NULL;
    if (n_words > 1) return kvl_fail(KVL_E_USAGE, "plugins: one NAME at most, %zu given", n_words);
    const kvl_status status = name ? check_name(name) : KVL_OK;
    if (status != KVL_OK) return status;
    if (args->json) return print_json(name);
    return name && !args->md ? show_one(name) : list_all(args->md);
}

static const struct kvl_opt options[] = {
    KVL_OPTION_JSON(struct args),
    {.name = "md",
     .type = KVL_OPT_FLAG,
     .offset = offsetof(struct args, md),
     .help = "print the table as Markdown (for compress/README.md)"},
};

const struct kvl_command kvl_cmd_plugins = {
    .name = "plugins",
    .summary = "list the strategies of this build, or show one's options and method card",
    .words = "[NAME]",
    .details = "What --kv takes: words with spaces between them, quoted in a shell. A preset; or a codec for keys and values; or key=value:\n\n"
               "  k= v= kv=           codecs                              rope=post|pre         keys stored after or before RoPE\n"
               "  sink=N              first tokens, exact                 tail=N ktail= vtail=  newest tokens, exact\n"
               "  window=W            sliding window behind the sinks     rot=none|hadamard|random(seed=N)\n"
               "  keep=SCORE          which tokens stay                   budget=BUDGET         how many\n"
               "  when=prefill|every:N|full                               pos=keep|compact      positions of what stays\n"
               "  read=all|pages(..)  what a query reads                  table=FILE            of kvlab calibrate\n"
               "  korder=gguf|hf      order of a key's channels           @a-b key=...          overrides for layers a to b\n\n"
               "    --kv int4        --kv \"k=int8 v=int4 sink=4 tail=64\"        --kv \"keep=snapkv budget=uniform(kept=0.5)\"\n\n"
               "Bits per element include scales and zero points, at head dimension 64 and default options.\n"
               "Example: kvlab plugins int4",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run,
};
