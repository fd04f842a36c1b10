/* Reads the table of published models: a header line that names the columns, then a line a model. */
#include "public_models.h"
#include "embedded.h"
#include "mem.h"
#include "text.h"
#include <stdio.h>
#include <string.h>
#include <strings.h>

static const char table_path[] = "data/public_models.csv";

enum cell_type { TEXT, U32, U64, BOOL };
struct column {
    const char *name;
    enum cell_type type;
    size_t offset, size; /* size: of a text */
};

#define FIELD(name_, type_, member) {name_, type_, offsetof(struct kvl_public_model, member), sizeof(((struct kvl_public_model *)0)->member)}
static const struct column columns[] = {
    FIELD("name", TEXT, name),
    FIELD("layers", U32, dims.n_layer),
    FIELD("embd", U32, dims.n_embd),
    FIELD("heads", U32, dims.n_head),
    FIELD("kv_heads", U32, dims.n_kv_head),
    FIELD("head_dim", U32, dims.head_dim),
    FIELD("ff", U32, dims.n_ff),
    FIELD("vocab", U32, dims.n_vocab),
    FIELD("ctx", U32, dims.n_ctx_train),
    FIELD("tied", BOOL, dims.tied_output),
    FIELD("ffn_matrices", U32, ffn_matrices),
    FIELD("joint", U32, joint),
    FIELD("window", U32, dims.window),
    FIELD("full_every", U32, dims.full_every),
    FIELD("params", U64, params),
    FIELD("active_params", U64, active_params),
    FIELD("source", TEXT, source),
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static bool set_cell(const struct column *column, const char *text, struct kvl_public_model *model)
{
    char *place = (char *)model + column->offset;
    int64_t number = 0;
    if (column->type == TEXT) return snprintf(place, column->size, "%s", text) < (int)column->size;
    if (!kvl_parse_i64(text, &number) || number < 0 || (column->type == U32 && number > UINT32_MAX)) return false;
    if (column->type == U32) *(uint32_t *)place = (uint32_t)number;
    if (column->type == U64) *(uint64_t *)place = (uint64_t)number;
    if (column->type == BOOL) *(bool *)place = number != 0;
    return true;
}

/* line is cut into its cells. */
static kvl_status parse_row(char *line, struct kvl_public_model *model)
{
    char *rest = line;
    for (size_t i = 0; i < N_COLUMNS; i++) {
        const char *cell = strsep(&rest, ",");
        if (cell == NULL || !set_cell(&columns[i], cell, model))
            return kvl_fail(KVL_E_FORMAT, "%s, row \"%s\": column %s: wanted %s, found \"%s\"", table_path, line, columns[i].name,
                            columns[i].type == TEXT ? "a short text" : "a number", cell ? cell : "the end of the line");
    }
    model->dims.rope_dim = model->joint ? 64 : model->dims.head_dim;
    return KVL_OK;
}

static kvl_status check_header(char *line)
{
    char *rest = line;
    for (size_t i = 0; i < N_COLUMNS; i++) {
        const char *cell = strsep(&rest, ",");
        if (cell == NULL || strcmp(cell, columns[i].name) != 0)
            return kvl_fail(KVL_E_FORMAT, "%s, line 1: wanted column %s, found %s", table_path, columns[i].name, cell ? cell : "the end");
    }
    return KVL_OK;
}

kvl_status kvl_public_models_load(struct kvl_public_models *out)
{
    kvl_status status = KVL_OK;
    char *text = NULL;
    *out = (struct kvl_public_models){0};
    KVL_TRY(kvl_strdup(&text, kvl_embedded_text(table_path)));
    char *rest = text;
    KVL_TRY(check_header(strsep(&rest, "\n")));
    for (char *line; (line = strsep(&rest, "\n")) != NULL && line[0] != '\0';) {
        KVL_TRY(kvl_realloc(&out->model, out->n + 1, sizeof *out->model));
        out->model[out->n] = (struct kvl_public_model){0};
        KVL_TRY(parse_row(line, &out->model[out->n]));
        out->n++;
    }
done:
    kvl_free(&text);
    if (status != KVL_OK) kvl_public_models_free(out);
    return status;
}

void kvl_public_models_free(struct kvl_public_models *models)
{
    kvl_free(&models->model);
    *models = (struct kvl_public_models){0};
}

const struct kvl_public_model *kvl_public_models_find(const struct kvl_public_models *models, const char *name)
{
    for (size_t i = 0; i < models->n; i++)
        if (strcasecmp(models->model[i].name, name) == 0 || strcasecmp(models->model[i].source, name) == 0) return &models->model[i];
    return NULL;
}

uint64_t kvl_public_params(const struct kvl_public_model *model)
{
    const struct kvl_dims *d = &model->dims;
    if (model->params != 0) return model->params;
    const uint64_t embd = d->n_embd,
                   heads = 2ull * (d->n_head + d->n_kv_head) * d->head_dim; /* rows of q, k, v and columns of the output */
    const uint64_t layer = embd * (heads + (uint64_t)model->ffn_matrices * d->n_ff);
    return d->n_layer * layer + embd * d->n_vocab * (d->tied_output ? 1 : 2);
}

uint64_t kvl_public_active_params(const struct kvl_public_model *model)
{
    return model->active_params != 0 ? model->active_params : kvl_public_params(model);
}

/* ---- what the model asks of a spec ---- */

static kvl_status check_joint(const struct kvl_public_model *model, const struct kvl_spec *spec)
{
    kvl_status status = KVL_OK;
    struct kvl_text side[KVL_SIDES] = {{0}};
    for (uint32_t l = 0; l < model->dims.n_layer && status == KVL_OK; l++) {
        const struct kvl_layer_spec *layer = kvl_spec_layer(spec, l);
        for (int s = 0; s < KVL_SIDES; s++) {
            side[s].size = 0;
            KVL_TRY(kvl_instance_print(&layer->codec[s], true, &side[s]));
        }
        if (strcmp(side[0].data, side[1].data) != 0 || layer->tail[0] != layer->tail[1])
            status = kvl_fail(KVL_E_USAGE, "%s keeps one record of %u channels for keys and values: give kv= and tail=, not one side's",
                              model->name, model->dims.head_dim);
    }
done:
    for (int s = 0; s < KVL_SIDES; s++) kvl_text_free(&side[s]);
    return status;
}

kvl_status kvl_public_spec(const struct kvl_public_model *model, const char *kv, struct kvl_spec **out)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_spec_parse(kv, out));
    if (model->joint) KVL_TRY(check_joint(model, *out));
done:
    if (status != KVL_OK) kvl_spec_free(out);
    return status;
}
