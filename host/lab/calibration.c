#include "calibration.h"
#include "cache.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "runfile_hdf5.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char format_name[] = "kvlab calibration table", side_group[KVL_SIDES] = {'k', 'v'};
enum { FORMAT_VERSION = 1, MAX_ARRAYS = 16, NAME_BYTES = 32, TEXT_BYTES = 1024, MAX_FLOATS = 1 << 28 };

/* One side's tables with the names of their parts. */
struct arrays {
    uint32_t n_layer, n_stream;           /* layers, or groups of them that share records; streams of each */
    uint32_t n_arrays, n;                 /* n: floats a stream, the sum of length */
    char name[MAX_ARRAYS][NAME_BYTES];
    uint32_t length[MAX_ARRAYS];
    float *values;                        /* [n_layer][streams][n] */
};

static const struct kvl_codec *codec_of(const struct kvl_layer_spec *entry, int side)
{
    return (const struct kvl_codec *)entry->codec[side].plugin;
}

/* NULL: the codec is given rows as they are. */
static const struct kvl_projection *projection_of(const struct kvl_layer_spec *entry, int side)
{
    return (const struct kvl_projection *)entry->projection[side].plugin;
}

static bool calibrates(const struct kvl_layer_spec *entry, int side)
{
    return projection_of(entry, side) != NULL || codec_of(entry, side)->flags & KVL_CODEC_NEEDS_TABLE;
}

/* What a side's table was made for: a codec with all its options; of a projection the name, because its table serves all of them. */
static kvl_status learner_text(const struct kvl_layer_spec *entry, int side, struct kvl_text *out)
{
    const struct kvl_projection *projection = projection_of(entry, side);
    return projection != NULL ? kvl_text_printf(out, "%s", projection->head.name) : kvl_instance_print(&entry->codec[side], true, out);
}

/* ---- rows ---- */

/* Records of all windows, [L][side][H][n_tokens][D]. */
struct rows {
    struct kvl_cache_dims dims;
    uint32_t sink;
    uint64_t n_tokens;
    float *values;
};

static float *stream_rows(const struct rows *rows, uint32_t l, int side, uint32_t h)
{
    return rows->values + ((((size_t)l * KVL_SIDES + side) * rows->dims.n_kv_head + h) * rows->n_tokens) * rows->dims.head_dim;
}

/* A cache that keeps records as they are. */
static kvl_status exact_spec(const struct kvl_layer_spec *entry, struct kvl_spec **out)
{
    struct kvl_text text = {0};
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_spec_form(entry, &text));
    KVL_TRY(kvl_text_printf(&text, " kv=f32 sink=%u", entry->sink));
    KVL_TRY(kvl_spec_parse(text.data, out));
done:
    kvl_text_free(&text);
    return status;
}

/* Copies what the session's cache holds behind the sinks of one window. */
static kvl_status take_window(struct kvl_session *session, uint32_t n_ctx, uint64_t window, float *buffer, struct rows *rows)
{
    kvl_status status = KVL_OK;
    const uint32_t taken = n_ctx - rows->sink, d = rows->dims.head_dim;
    for (uint32_t l = 0; l < rows->dims.n_layer; l++)
        for (int s = 0; s < KVL_SIDES; s++) {
            KVL_TRY(kvl_cache_read_rows(kvl_session_cache(session), l, s, rows->sink, taken, buffer));
            for (uint32_t h = 0; h < rows->dims.n_kv_head; h++)
                memcpy(stream_rows(rows, l, s, h) + window * taken * d, buffer + (size_t)h * taken * d, (size_t)taken * d * sizeof *buffer);
        }
done:
    return status;
}

static kvl_status run_windows(struct kvl_session *session, const struct kvl_rig *rig, const struct kvl_eval_text *text,
                              const struct kvl_eval_config *c, struct rows *rows)
{
    kvl_status status = KVL_OK;
    struct kvl_progress progress = {0};
    const struct kvl_tokenizer *tokenizer = rig->model->tokenizer;
    int32_t *window = NULL;
    float *buffer = NULL;
    KVL_TRY(kvl_alloc(&window, c->n_ctx, sizeof *window));
    KVL_TRY(kvl_alloc(&buffer, (size_t)rows->dims.n_kv_head * c->n_ctx * rows->dims.head_dim, sizeof *buffer));
    kvl_progress_start(&progress, "calibrate", "windows", c->chunks);
    for (uint64_t i = 0; i < c->chunks; i++) {
        if (kvl_interrupted()) KVL_TRY(kvl_fail(KVL_E_INTERRUPTED, "interrupted: no table was written"));
        memcpy(window, text->tokens + (c->first_chunk + i) * c->n_ctx, c->n_ctx * sizeof *window);
        if (kvl_tokenizer_adds_bos(tokenizer)) window[0] = kvl_tokenizer_bos(tokenizer);
        KVL_TRY(kvl_session_reset(session));
        KVL_TRY(kvl_session_forward(session, window, c->n_ctx, 0));
        KVL_TRY(take_window(session, c->n_ctx, i, buffer, rows));
        kvl_progress_update(&progress, i + 1);
    }
done:
    kvl_progress_end(&progress);
    kvl_free(&window);
    kvl_free(&buffer);
    return status;
}

static kvl_status collect(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_layer_spec *entry,
                          const struct kvl_eval_config *c, struct rows *rows)
{
    kvl_status status = KVL_OK;
    const struct kvl_dims *d = &rig->model->dims;
    struct kvl_spec *spec = NULL;
    struct kvl_session *session = NULL;
    if (entry->sink >= c->n_ctx) return kvl_fail(KVL_E_USAGE, "sink=%u leaves nothing of a window of %u tokens: use a larger -c", entry->sink, c->n_ctx);
    *rows = (struct rows){.dims = {d->n_layer, d->n_head, d->n_kv_head, d->head_dim},
                          .sink = entry->sink,
                          .n_tokens = c->chunks * (c->n_ctx - entry->sink)};
    KVL_TRY(exact_spec(entry, &spec));
    KVL_TRY(kvl_alloc(&rows->values, (size_t)KVL_SIDES * d->n_layer * d->n_kv_head * d->head_dim, rows->n_tokens * sizeof(float)));
    const struct kvl_session_config config = {
        .spec = spec, .n_ctx = c->n_ctx, .ubatch = c->ubatch, .protocol = KVL_P2_WRITE_THEN_READ, .exact = true};
    KVL_TRY(kvl_session_new(rig->weights, &config, &session));
    KVL_TRY(run_windows(session, rig, text, c, rows));
done:
    kvl_session_free(&session);
    kvl_spec_free(&spec);
    return status;
}

/* ---- a codec's calibrate() ---- */

/* One stream's turn. */
struct taker {
    struct arrays *arrays;
    const char *plugin;
    uint64_t stream;
    uint32_t next, at;   /* array and float that come next */
    kvl_status status;
};

static kvl_status take(struct taker *t, const char *name, uint32_t n, const float *values)
{
    struct arrays *a = t->arrays;
    if (t->next == MAX_ARRAYS || strlen(name) >= NAME_BYTES || n > a->n - t->at)
        return kvl_fail(KVL_E_VERIFY, "%s: array %s of %u floats does not fit the %u floats that its shape() asks for", t->plugin, name, n, a->n);
    if (t->stream == 0) {
        snprintf(a->name[t->next], NAME_BYTES, "%s", name);
        a->length[t->next] = n;
        a->n_arrays = t->next + 1;
    } else if (t->next >= a->n_arrays || strcmp(a->name[t->next], name) != 0 || a->length[t->next] != n) {
        return kvl_fail(KVL_E_VERIFY, "%s: array %s of %u floats is not what it gave for the first stream", t->plugin, name, n);
    }
    memcpy(a->values + t->stream * a->n + t->at, values, n * sizeof *values);
    t->next++;
    t->at += n;
    return KVL_OK;
}

static int put(void *context, const char *name, uint32_t n, const float *values)
{
    struct taker *t = context;
    if (t->status == KVL_OK) t->status = take(t, name, n, values);
    return t->status != KVL_OK;
}

/* Row t of a stream of layer, or group, `group`: what its heads have of token t, one after the other, layer by layer. */
static void gather_rows(const struct rows *rows, uint32_t group, int side, uint32_t stream, const struct kvl_stream_record *record, float *x)
{
    const size_t d = rows->dims.head_dim;
    const uint32_t heads = record->heads, parts = record->layers * heads;
    for (uint32_t i = 0; i < parts; i++) {
        const float *head = stream_rows(rows, group * record->layers + i / heads, side, stream * heads + i % heads);
        for (uint64_t t = 0; t < rows->n_tokens; t++) memcpy(x + (t * parts + i) * d, head + t * d, d * sizeof *x);
    }
}

/* x: the stream's rows. */
static kvl_status calibrate_stream(const struct kvl_layer_spec *entry, int side, const struct rows *rows, const float *x, uint64_t stream,
                                   struct arrays *arrays)
{
    const struct kvl_projection *projection = projection_of(entry, side);
    const struct kvl_codec *codec = codec_of(entry, side);
    const uint32_t role = side == KVL_SIDE_K ? KVL_ROLE_K : KVL_ROLE_V;
    struct taker taker = {.arrays = arrays, .plugin = projection != NULL ? projection->head.name : codec->head.name, .stream = stream};
    const struct kvl_calibration out = {.struct_size = sizeof out, .context = &taker, .put = put};
    const struct kvl_projection_dims of_rows = {sizeof of_rows, role, rows->dims.head_dim, 0};
    const struct kvl_codec_dims of_records = {sizeof of_records, role, rows->dims.head_dim, 0};
    const int failed = projection != NULL ? projection->calibrate(entry->projection[side].priv, &of_rows, rows->n_tokens, x, &out)
                                          : codec->calibrate(entry->codec[side].priv, &of_records, rows->n_tokens, x, &out);
    if (taker.status != KVL_OK) return taker.status;
    if (failed) return kvl_fail(KVL_E_USAGE, "%s: cannot calibrate on these %llu tokens", taker.plugin, (unsigned long long)rows->n_tokens);
    if (taker.at != arrays->n)
        return kvl_fail(KVL_E_VERIFY, "%s: calibrate() gave %u floats, its shape() asks for %u", taker.plugin, taker.at, arrays->n);
    return KVL_OK;
}

/* layer: the plan's first, as which all are. */
static kvl_status calibrate_side(const struct kvl_layer_spec *entry, int side, const struct kvl_layer_plan *layer, const struct rows *rows, struct arrays *arrays)
{
    kvl_status status = KVL_OK;
    const struct kvl_stream_record record = layer->side[side].record;
    float *x = NULL;
    arrays->n = layer->side[side].projection != NULL ? record.table_floats : layer->side[side].shape.table_floats;
    arrays->n_layer = rows->dims.n_layer / record.layers;
    arrays->n_stream = layer->n_stream;
    KVL_TRY(kvl_alloc(&arrays->values, (size_t)arrays->n_layer * arrays->n_stream, arrays->n * sizeof(float)));
    KVL_TRY(kvl_alloc(&x, rows->n_tokens, (size_t)record.layers * record.heads * rows->dims.head_dim * sizeof *x));
    for (uint32_t l = 0; l < arrays->n_layer; l++)
        for (uint32_t h = 0; h < arrays->n_stream; h++) {
            if (kvl_interrupted()) KVL_TRY(kvl_fail(KVL_E_INTERRUPTED, "interrupted: no table was written"));
            gather_rows(rows, l, side, h, &record, x);
            KVL_TRY(calibrate_stream(entry, side, rows, x, (uint64_t)l * arrays->n_stream + h, arrays));
        }
done:
    kvl_free(&x);
    return status;
}

/* ---- the file ---- */

static kvl_status write_array(const char *path, hid_t group, const struct arrays *a, uint32_t i, uint32_t at)
{
    kvl_status status = KVL_OK;
    const hsize_t shape[3] = {a->n_layer, a->n_stream, a->length[i]};
    const size_t n_streams = (size_t)a->n_layer * a->n_stream;
    hid_t space = H5I_INVALID_HID, dataset = H5I_INVALID_HID, creation = H5I_INVALID_HID;
    float *values = NULL;
    KVL_TRY(kvl_alloc(&values, n_streams * a->length[i], sizeof *values));
    KVL_H5(path, creation = H5Pcreate(H5P_DATASET_CREATE), "describe %s", a->name[i]);
    KVL_H5(path, H5Pset_obj_track_times(creation, 0), "describe %s", a->name[i]); /* the same table has the same bytes */
    for (size_t s = 0; s < n_streams; s++)
        memcpy(values + s * a->length[i], a->values + s * a->n + at, a->length[i] * sizeof *values);
    KVL_H5(path, space = H5Screate_simple(3, shape, NULL), "describe %s", a->name[i]);
    KVL_H5(path, dataset = H5Dcreate2(group, a->name[i], H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT), "create %s", a->name[i]);
    KVL_H5(path, H5Dwrite(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), "write %s", a->name[i]);
done:
    kvl_h5_close(&dataset);
    kvl_h5_close(&space);
    kvl_h5_close(&creation);
    kvl_free(&values);
    return status;
}

static kvl_status write_side(const char *path, hid_t file, const struct kvl_layer_spec *entry, int side, const struct arrays *a)
{
    kvl_status status = KVL_OK;
    const char name[2] = {side_group[side], '\0'};
    const struct kvl_plugin_head *plugin = projection_of(entry, side) != NULL ? &projection_of(entry, side)->head : &codec_of(entry, side)->head;
    struct kvl_text learner = {0}, order = {0};
    hid_t group = H5I_INVALID_HID;
    KVL_H5(path, group = H5Gcreate2(file, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), "create group %s", name);
    KVL_TRY(learner_text(entry, side, &learner));
    KVL_TRY(kvl_h5_set_text(path, group, "codec", learner.data, 0));
    KVL_TRY(kvl_h5_set_number(path, group, "byte_version", H5T_NATIVE_UINT32, &plugin->byte_version));
    for (uint32_t i = 0, at = 0; i < a->n_arrays; at += a->length[i++]) {
        KVL_TRY(kvl_text_printf(&order, "%s%s", i ? " " : "", a->name[i]));
        KVL_TRY(write_array(path, group, a, i, at));
    }
    KVL_TRY(kvl_h5_set_text(path, group, "arrays", order.data, 0));
done:
    kvl_h5_close(&group);
    kvl_text_free(&order);
    kvl_text_free(&learner);
    return status;
}

static kvl_status write_table(const char *path, const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_layer_spec *entry,
                              const struct rows *rows, const struct arrays arrays[KVL_SIDES])
{
    kvl_status status = KVL_OK;
    const uint32_t version = FORMAT_VERSION;
    struct kvl_text form = {0};
    hid_t file = H5I_INVALID_HID;
    kvl_h5_quiet();
    KVL_H5(path, file = H5Fcreate(path, H5F_ACC_EXCL, H5P_DEFAULT, H5P_DEFAULT), "create");
    KVL_TRY(kvl_spec_form(entry, &form));
    KVL_TRY(kvl_h5_set_text(path, file, "format", format_name, 0));
    KVL_TRY(kvl_h5_set_number(path, file, "version", H5T_NATIVE_UINT32, &version));
    KVL_TRY(kvl_h5_set_text(path, file, "model", rig->model->name, 0));
    KVL_TRY(kvl_h5_set_text(path, file, "model_sha256", rig->model->sha256, 0));
    KVL_TRY(kvl_h5_set_text(path, file, "text_sha256", text->sha256, 0));
    KVL_TRY(kvl_h5_set_text(path, file, "form", form.data, 0));
    KVL_TRY(kvl_h5_set_number(path, file, "n_tokens", H5T_NATIVE_UINT64, &rows->n_tokens));
    KVL_TRY(kvl_h5_set_number(path, file, "sink", H5T_NATIVE_UINT32, &rows->sink));
    for (int s = 0; s < KVL_SIDES; s++)
        if (calibrates(entry, s)) KVL_TRY(write_side(path, file, entry, s, &arrays[s]));
    KVL_H5(path, H5Fflush(file, H5F_SCOPE_GLOBAL), "write");
done:
    kvl_h5_close(&file);
    kvl_text_free(&form);
    return status;
}

/* The cache that the table is for, of windows: what it refuses makes no table. */
static kvl_status plan_cache(const struct kvl_rig *rig, const struct kvl_spec *spec, const struct kvl_eval_config *c, struct kvl_cache_plan *out)
{
    const struct kvl_dims *dims = &rig->model->dims;
    const struct kvl_session_config session = {.spec = spec, .n_ctx = c->n_ctx, .ubatch = c->ubatch, .protocol = KVL_P2_WRITE_THEN_READ};
    const struct kvl_cache_limits limits = kvl_cache_limits_of(rig->device);
    const kvl_status status = kvl_spec_check_dims(spec, dims->n_layer, dims->head_dim);
    return status == KVL_OK ? kvl_session_cache_plan(dims, &session, &limits, out) : status;
}

kvl_status kvl_calibrate(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_calibrate_config *config,
                         struct kvl_calibrate_result *out)
{
    kvl_status status = KVL_OK;
    struct kvl_eval_config windows = {.n_ctx = config->n_ctx, .ubatch = config->ubatch, .first_chunk = config->first_chunk, .chunks = config->chunks};
    const struct kvl_layer_spec *entry = kvl_spec_layer(config->spec, 0);
    struct arrays arrays[KVL_SIDES] = {{0}};
    struct kvl_cache_plan plan = {0};
    struct rows rows = {0};
    struct kvl_text part = {0};
    if (!kvl_spec_uniform(config->spec))
        return kvl_fail(KVL_E_USAGE, "--for: a table serves one setting: calibrate each range of layers by itself and give each its table=FILE");
    if (!calibrates(entry, KVL_SIDE_K) && !calibrates(entry, KVL_SIDE_V))
        return kvl_fail(KVL_E_USAGE, "--for: neither %s nor %s needs a table (kvlab plugins lists what does)", entry->codec[KVL_SIDE_K].plugin->name,
                        entry->codec[KVL_SIDE_V].plugin->name);
    if (access(config->output, F_OK) == 0) return kvl_fail(KVL_E_USAGE, "%s: exists already; choose another name with -o, or remove it", config->output);
    KVL_TRY(kvl_eval_check(rig, text, &windows));
    KVL_TRY(plan_cache(rig, config->spec, &windows, &plan));
    if (rig->model->dims.mla.kv_rank != 0)
        KVL_TRY(kvl_fail(KVL_E_UNSUPPORTED, "--for: %s stores latents already, of which no codec learns yet", rig->model->name));
    KVL_TRY(collect(rig, text, entry, &windows, &rows));
    *out = (struct kvl_calibrate_result){.n_tokens = rows.n_tokens};
    for (int s = 0; s < KVL_SIDES; s++) {
        if (calibrates(entry, s)) KVL_TRY(calibrate_side(entry, s, &plan.layer[0], &rows, &arrays[s]));
        out->n[s] = arrays[s].n;
    }
    KVL_TRY(kvl_text_printf(&part, "%s" KVL_PART, config->output));
    status = write_table(part.data, rig, text, entry, &rows, arrays);
    if (status == KVL_OK) status = kvl_file_publish(part.data, config->output);
    if (status != KVL_OK) unlink(part.data);
    if (status == KVL_OK) KVL_TRY(kvl_sha256_file(config->output, out->sha256));
done:
    for (int s = 0; s < KVL_SIDES; s++) kvl_free(&arrays[s].values);
    kvl_free(&rows.values);
    kvl_cache_plan_free(&plan);
    kvl_text_free(&part);
    return status;
}

/* ---- reading ---- */

/* An attribute must say what the spec says. */
static kvl_status expect_text(const char *path, hid_t object, const char *name, const char *wanted)
{
    char found[TEXT_BYTES];
    const kvl_status status = kvl_h5_get_text(path, object, name, found, sizeof found);
    if (status != KVL_OK || strcmp(found, wanted) == 0) return status;
    return kvl_fail(KVL_E_USAGE, "%s was made for %s %s, the spec says %s: make another table with kvlab calibrate, or change the spec", path, name, found,
                    wanted);
}

/* One array into its place of every stream. The first array sets the numbers of layers and heads. */
static kvl_status read_array(const char *path, hid_t group, const char *name, int side, struct kvl_table *table)
{
    kvl_status status = KVL_OK;
    hsize_t shape[3] = {0};
    hid_t dataset = H5I_INVALID_HID, space = H5I_INVALID_HID;
    float *values = NULL, *wider = NULL;
    const uint32_t before = table->n[side];
    KVL_H5(path, dataset = H5Dopen2(group, name, H5P_DEFAULT), "open array %s", name);
    KVL_H5(path, space = H5Dget_space(dataset), "read the shape of array %s", name);
    if (H5Sget_simple_extent_ndims(space) != 3 || H5Sget_simple_extent_dims(space, shape, NULL) != 3 || shape[0] == 0 || shape[1] == 0 ||
        shape[2] == 0 || shape[0] > MAX_FLOATS || shape[1] > MAX_FLOATS / shape[0] || shape[2] > MAX_FLOATS / (shape[0] * shape[1]) - before)
        KVL_TRY(kvl_fail(KVL_E_FORMAT, "%s: array %s is not [layer][stream][n], or too large", path, name));
    if (table->n_layer == 0) {
        table->n_layer = (uint32_t)shape[0];
        table->n_stream = (uint32_t)shape[1];
    }
    if (shape[0] != table->n_layer || shape[1] != table->n_stream)
        KVL_TRY(kvl_fail(KVL_E_FORMAT, "%s: array %s has other layers or heads than the first", path, name));
    const size_t n_streams = (size_t)shape[0] * shape[1], n = shape[2], all = before + n;
    KVL_TRY(kvl_alloc(&values, n_streams * n, sizeof *values));
    KVL_TRY(kvl_alloc(&wider, n_streams * all, sizeof *wider));
    KVL_H5(path, H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), "read array %s", name);
    for (size_t i = 0; i < n_streams * n; i++)
        if (!isfinite(values[i])) KVL_TRY(kvl_fail(KVL_E_FORMAT, "%s: array %s has a number that is not finite", path, name));
    for (size_t s = 0; s < n_streams; s++) {
        if (before) memcpy(wider + s * all, table->values[side] + s * before, before * sizeof *wider);
        memcpy(wider + s * all + before, values + s * n, n * sizeof *wider);
    }
    kvl_free(&table->values[side]);
    table->values[side] = wider;
    table->n[side] = (uint32_t)all;
    wider = NULL;
done:
    kvl_free(&values);
    kvl_free(&wider);
    kvl_h5_close(&space);
    kvl_h5_close(&dataset);
    return status;
}

static kvl_status read_side(const char *path, hid_t file, const struct kvl_layer_spec *entry, int side, struct kvl_table *table)
{
    kvl_status status = KVL_OK;
    const char group_name[2] = {side_group[side], '\0'};
    struct kvl_text learner = {0};
    char names[TEXT_BYTES];
    hid_t group = H5I_INVALID_HID;
    KVL_TRY(learner_text(entry, side, &learner));
    if (H5Lexists(file, group_name, H5P_DEFAULT) <= 0)
        KVL_TRY(kvl_fail(KVL_E_USAGE, "%s has no table for %s=%s: calibrate with a --for that has it", path, group_name, learner.data));
    KVL_H5(path, group = H5Gopen2(file, group_name, H5P_DEFAULT), "open group %s", group_name);
    KVL_TRY(expect_text(path, group, "codec", learner.data));
    KVL_TRY(kvl_h5_get_text(path, group, "arrays", names, sizeof names));
    for (char *next = names, *name; (name = strsep(&next, " ")) != NULL;) KVL_TRY(read_array(path, group, name, side, table));
done:
    kvl_h5_close(&group);
    kvl_text_free(&learner);
    return status;
}

kvl_status kvl_table_read(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out)
{
    kvl_status status = KVL_OK;
    const char *path = entry->table_path;
    struct kvl_table table = {0};
    struct kvl_text form = {0};
    hid_t file = H5I_INVALID_HID;
    kvl_h5_quiet();
    KVL_TRY(kvl_sha256_file(path, table.sha256));
    KVL_H5(path, file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), "open as a calibration table");
    KVL_TRY(expect_text(path, file, "format", format_name));
    KVL_TRY(kvl_spec_form(entry, &form));
    KVL_TRY(expect_text(path, file, "form", form.data));
    for (int s = 0; s < KVL_SIDES; s++)
        if (calibrates(entry, s)) KVL_TRY(read_side(path, file, entry, s, &table));
    *out = table;
    table = (struct kvl_table){0};
done:
    kvl_h5_close(&file);
    kvl_text_free(&form);
    kvl_table_free(&table);
    return status;
}

kvl_status kvl_spec_open(const char *text, struct kvl_spec **out)
{
    kvl_status status = kvl_spec_parse(text, out);
    if (status == KVL_OK) status = kvl_spec_load_tables(*out, kvl_table_read, NULL);
    if (status != KVL_OK) kvl_spec_free(out);
    return status;
}
