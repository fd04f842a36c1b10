/* Reads the embedded presets with libcyaml. */
#include "presets.h"
#include "embedded.h"
#include "mem.h"
#include <cyaml/cyaml.h>
#include <string.h>

static const cyaml_schema_field_t preset_fields[] = {
    CYAML_FIELD_STRING_PTR("name", CYAML_FLAG_POINTER, struct kvl_preset, name, 1, 64),
    CYAML_FIELD_STRING_PTR("kv", CYAML_FLAG_POINTER, struct kvl_preset, kv, 1, CYAML_UNLIMITED),
    CYAML_FIELD_STRING_PTR("source", CYAML_FLAG_POINTER, struct kvl_preset, source, 1, CYAML_UNLIMITED),
    CYAML_FIELD_STRING_PTR("note", CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, struct kvl_preset, note, 1, CYAML_UNLIMITED),
    CYAML_FIELD_END,
};
static const cyaml_schema_value_t preset_schema = {CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, struct kvl_preset, preset_fields)};
static const cyaml_schema_value_t list_schema = {
    CYAML_VALUE_SEQUENCE(CYAML_FLAG_POINTER, struct kvl_preset, &preset_schema, 0, CYAML_UNLIMITED)};

static const cyaml_config_t yaml_config = {.mem_fn = kvl_mem_hook, .log_level = CYAML_LOG_ERROR};

kvl_status kvl_presets_load(struct kvl_presets *out)
{
    static const char path[] = "experiments/presets.yaml";
    const char *text = kvl_embedded_text(path);
    *out = (struct kvl_presets){0};
    if (text == NULL) return KVL_OK;
    cyaml_data_t *list = NULL;
    const cyaml_err_t error = cyaml_load_data((const uint8_t *)text, strlen(text), &yaml_config, &list_schema, &list, &out->n);
    if (error != CYAML_OK)
        return kvl_fail(error == CYAML_ERR_OOM ? KVL_E_MEMORY : KVL_E_FORMAT, "%s: %s", path, cyaml_strerror(error));
    out->preset = list;
    return KVL_OK;
}

void kvl_presets_free(struct kvl_presets *presets)
{
    cyaml_free(&yaml_config, &list_schema, presets->preset, presets->n);
    *presets = (struct kvl_presets){0};
}

const struct kvl_preset *kvl_presets_find(const struct kvl_presets *presets, const struct kvl_slice *name)
{
    for (unsigned i = 0; i < presets->n; i++)
        if (kvl_slice_is(name, presets->preset[i].name)) return &presets->preset[i];
    return NULL;
}
