#include "runrecord.h"
#include "cache.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "mla.h"
#include "plan.h"
#include "select.h"
#include "stats.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct kvl_record {
    struct kvl_record_config config;
    struct kvl_runfile *file;   /* NULL: --no-run-file */
    struct kvl_text spec, base; /* resolved */
    struct kvl_text tables;     /* sha256 of the calibration tables in use */
    struct kvl_cache_bytes bytes;
    struct kvl_profile profile;
    uint64_t start_ns;
    int steps, table, kernels, evictions, positions, gone; /* table numbers */
    uint64_t n_evictions, n_kept;               /* evictions, and kept positions in their table */
    uint64_t n_gone, n_gone_logged;             /* tokens that went while others were decoded; rows of them */
    struct kvl_moments mass_lost, output_error; /* over evictions, layers and heads */
    uint64_t rescored, rescore_ns;              /* steps behind which scores were found anew, and what that took */
};

/* ---- tables ---- */

static const struct kvl_column step_columns[] = {
    {"t_ns", "ns", "wall time since the start of the run, at the end of the step", KVL_COL_U64},
    {"duration_ns", "ns", "wall time of the step", KVL_COL_U64},
    {"phase", "1", "what the step did", KVL_COL_TEXT, KVL_PHASE_BYTES - 1},
    {"tokens", "1", "tokens forward-passed in the step", KVL_COL_U64},
    {"kept", "1", "tokens in the cache after the step", KVL_COL_U64},
    {"resident_bytes", "byte", "cache memory after the step, all classes but scratch", KVL_COL_U64},
    {"read_bytes", "byte", "bytes of the cache that attention read in the step", KVL_COL_U64},
    {"launches", "1", "kernels the session enqueued in the step", KVL_COL_U64},
};
static const struct kvl_column kernel_columns[] = {
    {"phase", "1", "phase of the steps that launched it", KVL_COL_TEXT, KVL_PHASE_BYTES - 1},
    {"name", "1", "kernel", KVL_COL_TEXT, 64},
    {"calls", "1", "launches", KVL_COL_U64},
    {"ns_min", "ns", "shortest launch", KVL_COL_F64},
    {"ns_median", "ns", "median launch", KVL_COL_F64},
    {"ns_max", "ns", "longest launch", KVL_COL_F64},
    {"ns_sum", "ns", "all launches", KVL_COL_F64},
    {"bytes", "byte", "bytes worked through by all launches, 0 if not stated", KVL_COL_U64},
    {"flops", "1", "operations of all launches, 0 if not stated", KVL_COL_U64},
    {"gbps", "GB s-1", "bytes / ns_sum", KVL_COL_F64},
    {"gflops", "ns-1", "operations / ns_sum", KVL_COL_F64},
    {"peak_share", "1", "share of the measured peak that limits it: read bandwidth or multiply-add rate", KVL_COL_F64},
};
/* Where tokens are evicted: a row an eviction, layer and head; and their positions, one head behind the other. */
static const struct kvl_column eviction_columns[] = {
    {"eviction", "1", "number of the eviction, from 0", KVL_COL_U64},
    {"position", "1", "tokens seen when it happened", KVL_COL_U64},
    {"layer", "1", "layer", KVL_COL_U64},
    {"head", "1", "kv head", KVL_COL_U64},
    {"source", "1", "what the score read: exact = full precision, at the end of a prompt; append = a token's exact key and value when it was "
                    "stored; position = nothing but the token's position; used = the probabilities that attention used; decoded = stored keys", KVL_COL_TEXT, 8},
    {"target", "1", "the layer's budget: tokens a head on average", KVL_COL_U64},
    {"kept", "1", "tokens that the head keeps", KVL_COL_U64},
    {"first", "1", "row of evictions/positions where its positions begin", KVL_COL_U64},
    {"mass_lost", "1", "mean share of the following tokens' attention that would have gone to evicted tokens", KVL_COL_F64},
    {"output_error", "1", "relative change of the attention's output for the following tokens", KVL_COL_F64},
};
enum { LOSS_COLUMNS = 2 };
static const struct kvl_column position_columns[] = {{"position", "1", "position of a kept token", KVL_COL_U64}};
/* Tokens that went while others were decoded: a row each, until there are MOST_GONE. */
static const struct kvl_column gone_columns[] = {
    {"eviction", "1", "number of the eviction whose rows in /evictions say what heads were left with in the end", KVL_COL_U64},
    {"seen", "1", "tokens seen when it went", KVL_COL_U64},
    {"layer", "1", "layer", KVL_COL_U64},
    {"head", "1", "kv head", KVL_COL_U64},
    {"position", "1", "position of the token that went", KVL_COL_U64},
    {"mass", "1", "share of the newest query's attention that went to it, mean over the kv head's query heads; NaN: the score reads no attention", KVL_COL_F64},
};
enum { MOST_GONE = 1 << 18 };
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* ---- before the first step ---- */

kvl_status kvl_command_line(struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    char *arguments = NULL;
    size_t size = 0;
    KVL_TRY(kvl_file_read("/proc/self/cmdline", &arguments, &size));
    for (size_t at = 0; at < size; at += strlen(arguments + at) + 1) {
        const char *word = arguments + at;
        if (at > 0) KVL_TRY(kvl_text_append(out, " ", 1));
        const bool plain = *word != '\0' &&
                           strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=@%+") == strlen(word);
        if (plain) {
            KVL_TRY(kvl_text_printf(out, "%s", word));
            continue;
        }
        KVL_TRY(kvl_text_append(out, "'", 1));
        for (const char *c = word; *c; c++) KVL_TRY(*c == '\'' ? kvl_text_append(out, "'\\''", 4) : kvl_text_append(out, c, 1));
        KVL_TRY(kvl_text_append(out, "'", 1));
    }
done:
    kvl_free(&arguments);
    return status;
}

struct entry { /* one attribute of /config: a text, or a whole number */
    const char *name, *text;
    int64_t number;
};
enum { CONFIG_ENTRIES = 13 };

static size_t config_entries(const struct kvl_record *r, struct entry entry[CONFIG_ENTRIES])
{
    const struct kvl_record_config *c = &r->config;
    size_t n = 0;
    entry[n++] = (struct entry){"command", c->command};
    entry[n++] = (struct entry){"kv", r->spec.data};
    if (c->base) entry[n++] = (struct entry){"base", r->base.data};
    entry[n++] = (struct entry){"device", kvl_device_caps(c->device)->name};
    entry[n++] = (struct entry){"model", c->model->name};
    entry[n++] = (struct entry){"model_sha256", c->model->sha256};
    entry[n++] = (struct entry){"tokenizer_sha256", kvl_tokenizer_sha256(c->model->tokenizer)};
    if (c->text_sha256) entry[n++] = (struct entry){"text_sha256", c->text_sha256};
    if (r->tables.size) entry[n++] = (struct entry){"tables_sha256", r->tables.data};
    entry[n++] = (struct entry){"protocol", kvl_protocol_name[c->protocol]};
    entry[n++] = (struct entry){"ubatch", NULL, c->ubatch};
    entry[n++] = (struct entry){"n_ctx", NULL, c->n_ctx};
    entry[n++] = (struct entry){"exact", NULL, c->exact};
    return n;
}

static kvl_status config_hash(const struct kvl_record *r, char hex[65])
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    struct entry entry[CONFIG_ENTRIES];
    const size_t n = config_entries(r, entry);
    for (size_t i = 0; i < n; i++)
        KVL_TRY(entry[i].text ? kvl_text_printf(&text, "%s=%s\n", entry[i].name, entry[i].text)
                              : kvl_text_printf(&text, "%s=%lld\n", entry[i].name, (long long)entry[i].number));
    for (size_t i = 0; i < r->config.n_settings; i++)
        KVL_TRY(kvl_text_printf(&text, "%s=%.17g\n", r->config.settings[i].name, r->config.settings[i].value));
    for (size_t i = 0; i < r->config.n_words; i++) KVL_TRY(kvl_text_printf(&text, "%s=%s\n", r->config.words[i].name, r->config.words[i].text));
    KVL_TRY(kvl_sha256(text.data, text.size, hex));
done:
    kvl_text_free(&text);
    return status;
}

static kvl_status default_path(const char *command, const char *hash, struct kvl_text *out)
{
    const time_t now = time(NULL);
    struct tm utc;
    char stamp[32];
    gmtime_r(&now, &utc);
    strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &utc);
    const kvl_status status = kvl_text_printf(out, "runs/%s-%s-%.8s.h5", command, stamp, hash);
    if (status == KVL_OK)
        for (char *c = out->data; *c; c++)
            if (*c == ' ') *c = '-';
    return status;
}

static kvl_status put_facts(struct kvl_runfile *f, const char *group, const struct kvl_fact *facts, size_t n)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < n; i++) {
        if (isnan(facts[i].value)) continue;
        KVL_TRY(facts[i].is_count ? kvl_runfile_integer(f, group, facts[i].name, (int64_t)facts[i].value)
                                  : kvl_runfile_number(f, group, facts[i].name, facts[i].value));
    }
done:
    return status;
}

static kvl_status put_config(struct kvl_record *r, const char *hash)
{
    kvl_status status = KVL_OK;
    struct entry entry[CONFIG_ENTRIES];
    const size_t n = config_entries(r, entry);
    KVL_TRY(kvl_runfile_text(r->file, "/", "config_hash", hash));
    for (size_t i = 0; i < n; i++)
        KVL_TRY(entry[i].text ? kvl_runfile_text(r->file, "/config", entry[i].name, entry[i].text)
                              : kvl_runfile_integer(r->file, "/config", entry[i].name, entry[i].number));
    KVL_TRY(kvl_runfile_text(r->file, "/config", "kv_given", kvl_spec_given(r->config.spec)));
    if (r->config.base) KVL_TRY(kvl_runfile_text(r->file, "/config", "base_given", kvl_spec_given(r->config.base)));
    KVL_TRY(put_facts(r->file, "/config", r->config.settings, r->config.n_settings));
    for (size_t i = 0; i < r->config.n_words; i++) KVL_TRY(kvl_runfile_text(r->file, "/config", r->config.words[i].name, r->config.words[i].text));
done:
    return status;
}

/* tuning_<kernel>: the setting in use, and where it comes from. Exact runs use the defaults of tunables that reorder sums. */
static kvl_status put_tuning(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    const struct kvl_tuning *tuning = kvl_device_tuning(r->config.device);
    size_t n;
    const struct kvl_tune_kernel *kernel = kvl_tune_kernels(&n);
    struct kvl_text text = {0};
    for (size_t i = 0; i < n; i++) {
        char name[32];
        text.size = 0;
        snprintf(name, sizeof name, "tuning_%s", kernel[i].name);
        KVL_TRY(kvl_setting_print(&kernel[i], &tuning->setting[i], &text));
        KVL_TRY(kvl_text_printf(&text, " (%s)", tuning->source[i]));
        KVL_TRY(kvl_runfile_text(r->file, "/device", name, text.data));
    }
done:
    kvl_text_free(&text);
    return status;
}

static kvl_status put_device(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    const struct kvl_caps *c = kvl_device_caps(r->config.device);
    const struct {
        const char *name, *value;
    } texts[] = {
        {"platform", c->platform},
        {"name", c->name},
        {"vendor", c->vendor},
        {"driver", c->driver},
        {"version", c->version},
        {"c_version", c->c_version},
        {"type", c->type == KVL_DEVICE_CPU   ? "cpu"
                 : c->type == KVL_DEVICE_GPU ? "gpu"
                                             : "other"},
    };
    const struct kvl_fact facts[] = {
        {"compute_units", c->compute_units, true},
        {"max_work_group", c->max_work_group, true},
        {"clock_mhz", c->clock_mhz, true},
        {"global_bytes", (double)c->global_bytes, true},
        {"max_alloc_bytes", (double)c->max_alloc_bytes, true},
        {"local_bytes", (double)c->local_bytes, true},
        {"constant_bytes", (double)c->constant_bytes, true},
        {"local_is_dedicated", c->local_is_dedicated, true},
        {"fp16", c->fp16, true},
        {"fp64", c->fp64, true},
        {"subgroups", c->subgroups, true},
        {"int_dot", c->int_dot, true},
        {"unified_memory", c->unified_memory, true},
    };
    for (size_t i = 0; i < COUNT(texts); i++) KVL_TRY(kvl_runfile_text(r->file, "/device", texts[i].name, texts[i].value));
    KVL_TRY(put_facts(r->file, "/device", facts, COUNT(facts)));
    KVL_TRY(put_tuning(r));
done:
    return status;
}

static kvl_status create_file(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    struct kvl_text path = {0}, command = {0};
    char hash[65];
    KVL_TRY(config_hash(r, hash));
    KVL_TRY(r->config.output ? kvl_text_printf(&path, "%s", r->config.output) : default_path(r->config.command, hash, &path));
    KVL_TRY(kvl_command_line(&command));
    KVL_TRY(kvl_runfile_create(path.data, command.data, &r->file));
    KVL_TRY(put_config(r, hash));
    KVL_TRY(put_device(r));
    KVL_TRY(kvl_runfile_table(r->file, "/steps", step_columns, COUNT(step_columns), &r->steps));
    const struct kvl_record_table *table = r->config.table;
    if (table) KVL_TRY(kvl_runfile_table(r->file, table->group, table->columns, table->n_columns, &r->table));
    if (kvl_spec_evicts(r->config.spec)) {
        const size_t n = COUNT(eviction_columns) - (r->config.measures_loss ? 0 : LOSS_COLUMNS);
        KVL_TRY(kvl_runfile_table(r->file, "/evictions", eviction_columns, n, &r->evictions));
        KVL_TRY(kvl_runfile_table(r->file, "/evictions/positions", position_columns, COUNT(position_columns), &r->positions));
        KVL_TRY(kvl_runfile_table(r->file, "/evictions/gone", gone_columns, COUNT(gone_columns), &r->gone));
    }
    if (r->config.profile) KVL_TRY(kvl_runfile_table(r->file, "/kernels", kernel_columns, COUNT(kernel_columns), &r->kernels));
    KVL_TRY(kvl_runfile_start(r->file));
done:
    kvl_text_free(&path);
    kvl_text_free(&command);
    return status;
}

static void free_record(struct kvl_record **record)
{
    struct kvl_record *r = *record;
    if (!r) return;
    kvl_profile_free(&r->profile);
    kvl_text_free(&r->spec);
    kvl_text_free(&r->tables);
    kvl_text_free(&r->base);
    kvl_free(record);
}

kvl_status kvl_record_peaks(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    struct kvl_peaks now, *best = &r->profile.peaks;
    if (!r->config.profile) return KVL_OK;
    kvl_profile_on(r->config.device, false);
    KVL_TRY(kvl_device_measure(r->config.device, &now));
    best->read_gbps = fmax(best->read_gbps, now.read_gbps);
    best->copy_gbps = fmax(best->copy_gbps, now.copy_gbps);
    best->fma_gflops = fmax(best->fma_gflops, now.fma_gflops);
    best->launch_us = best->launch_us > 0.0 ? fmin(best->launch_us, now.launch_us) : now.launch_us;
done:
    kvl_profile_on(r->config.device, true);
    return status;
}

kvl_status kvl_record_open(const struct kvl_record_config *config, struct kvl_record **out)
{
    kvl_status status = KVL_OK;
    struct kvl_record *r = NULL;
    KVL_TRY(kvl_alloc(&r, 1, sizeof *r));
    r->config = *config;
    KVL_TRY(kvl_spec_resolved(config->spec, &r->spec));
    KVL_TRY(kvl_spec_tables_sha256(config->spec, &r->tables));
    if (config->base) KVL_TRY(kvl_spec_tables_sha256(config->base, &r->tables));
    if (config->base) KVL_TRY(kvl_spec_resolved(config->base, &r->base));
    KVL_TRY(kvl_record_peaks(r));
    if (!config->no_file) KVL_TRY(create_file(r));
    kvl_profile_on(config->device, config->profile);
    r->start_ns = kvl_now_ns();
    *out = r;
    r = NULL;
done:
    if (r && r->file) kvl_runfile_close(&r->file, "failed");
    free_record(&r);
    return status;
}

/* ---- steps ---- */

/* Takes the launch times since the last call, so that the device need not keep the events of a whole run. */
static kvl_status collect_kernel_times(struct kvl_record *r, const char *phase, uint64_t duration_ns)
{
    kvl_status status = KVL_OK;
    struct kvl_sample *sample = NULL;
    size_t n = 0;
    if (!r->config.profile) return KVL_OK;
    KVL_TRY(kvl_profile_take(r->config.device, &sample, &n));
    KVL_TRY(kvl_profile_add(&r->profile, phase, duration_ns, sample, n));
done:
    kvl_free(&sample);
    return status;
}

kvl_status kvl_record_step(struct kvl_record *r, struct kvl_session *session, const char *phase, uint64_t n_tokens,
                           uint64_t duration_ns, const struct kvl_counters *before)
{
    kvl_status status = KVL_OK;
    KVL_TRY(collect_kernel_times(r, phase, duration_ns));
    struct kvl_counters now;
    struct kvl_cache_bytes bytes;
    kvl_session_counters(session, &now);
    const struct kvl_counters none = {0}, *from = before ? before : &none;
    r->rescored += now.rescored - from->rescored;
    r->rescore_ns += now.rescore_ns - from->rescore_ns;
    if (!r->file) return KVL_OK;
    KVL_TRY(kvl_session_bytes(session, &bytes));
    const union kvl_cell cells[COUNT(step_columns)] = {
        {.u64 = kvl_now_ns() - r->start_ns},
        {.u64 = duration_ns},
        {.text = phase},
        {.u64 = n_tokens},
        {.u64 = kvl_cache_held(kvl_session_cache(session))},
        {.u64 = bytes.resident},
        {.u64 = now.kv_bytes_read - from->kv_bytes_read},
        {.u64 = now.launches - from->launches},
    };
    KVL_TRY(kvl_runfile_row(r->file, r->steps, cells));
done:
    return status;
}

/* A head's row, and the positions of its n tokens. */
struct held {
    const char *source;
    uint64_t seen, layer, head, target, n;
    const uint32_t *position;
    double mass_lost, output_error;
};

static kvl_status put_held(struct kvl_record *r, const struct held *held)
{
    kvl_status status = KVL_OK;
    const union kvl_cell cells[COUNT(eviction_columns)] = {
        {.u64 = r->n_evictions}, {.u64 = held->seen},   {.u64 = held->layer}, {.u64 = held->head},      {.text = held->source},
        {.u64 = held->target},   {.u64 = held->n},      {.u64 = r->n_kept},   {.f64 = held->mass_lost}, {.f64 = held->output_error},
    };
    if (!isnan(held->mass_lost)) {
        kvl_moments_add(&r->mass_lost, held->mass_lost);
        kvl_moments_add(&r->output_error, held->output_error);
    }
    if (!r->file) return KVL_OK;
    KVL_TRY(kvl_runfile_row(r->file, r->evictions, cells));
    for (uint64_t i = 0; i < held->n; i++, r->n_kept++)
        KVL_TRY(kvl_runfile_row(r->file, r->positions, &(union kvl_cell){.u64 = held->position[i]}));
done:
    return status;
}

kvl_status kvl_record_eviction(struct kvl_record *r, struct kvl_session *session)
{
    kvl_status status = KVL_OK;
    if (!kvl_spec_evicts(r->config.spec)) return KVL_OK;
    for (uint32_t l = 0; l < r->config.model->dims.n_layer; l++) {
        const struct kvl_selection *kept = kvl_session_kept(session, l);
        for (uint32_t h = 0; kept != NULL && h < kept->n_kv_head; h++) {
            const struct held held = {"exact", kept->n_token, l, h, kept->target, kept->offset[h + 1] - kept->offset[h], kept->token + kept->offset[h],
                                      kept->mass_lost ? kept->mass_lost[h] : NAN, kept->output_error ? kept->output_error[h] : NAN};
            KVL_TRY(put_held(r, &held));
        }
    }
    r->n_evictions++;
done:
    return status;
}

static int by_position(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Which tokens a head has lost while decoding, and when. */
static kvl_status put_gone(struct kvl_record *r, struct kvl_session *session, uint32_t l, uint32_t h, struct kvl_gone *gone)
{
    kvl_status status = KVL_OK;
    uint32_t n;
    KVL_TRY(kvl_cache_gone(kvl_session_cache(session), l, h, gone, &n));
    r->n_gone += n;
    const uint32_t room = kvl_cache_plan(kvl_session_cache(session))->gone_room;
    for (uint32_t i = 0; i < n && i < room && r->n_gone_logged < MOST_GONE; i++, r->n_gone_logged++) {
        const union kvl_cell cells[COUNT(gone_columns)] = {{.u64 = r->n_evictions}, {.u64 = gone[i].seen}, {.u64 = l}, {.u64 = h}, {.u64 = gone[i].position}, {.f64 = gone[i].mass}};
        KVL_TRY(kvl_runfile_row(r->file, r->gone, cells));
    }
done:
    return status;
}

static kvl_status put_running_layer(struct kvl_record *r, struct kvl_session *session, uint32_t l, uint32_t *position, struct kvl_gone *gone)
{
    static const char *const source[] = {[0] = "decoded", [KVL_RUN_STORED] = "append", [KVL_RUN_SUM] = "used", [KVL_RUN_NEWEST] = "used",
                                         [KVL_RUN_POSITION] = "position", [KVL_RUN_KEYS] = "decoded"};
    kvl_status status = KVL_OK;
    struct kvl_cache *cache = kvl_session_cache(session);
    const struct kvl_layer_plan *layer = &kvl_cache_plan(cache)->layer[l];
    for (uint32_t h = 0; layer->cells != 0 && h < r->config.model->dims.n_kv_head; h++) {
        const uint32_t n = kvl_cache_places(cache, l, h);
        KVL_TRY(kvl_cache_positions(cache, l, h, position));
        qsort(position, n, sizeof *position, by_position);
        const struct held held = {source[layer->running.source], kvl_session_position(session), l, h, layer->kept, n, position, NAN, NAN};
        KVL_TRY(put_held(r, &held));
        KVL_TRY(put_gone(r, session, l, h, gone));
    }
done:
    return status;
}

kvl_status kvl_record_running(struct kvl_record *r, struct kvl_session *session)
{
    kvl_status status = KVL_OK;
    const struct kvl_cache_plan *plan = kvl_cache_plan(kvl_session_cache(session));
    uint32_t *position = NULL, most = 0;
    struct kvl_gone *gone = NULL;
    if (!r->file || !plan->evicts_decoding) return KVL_OK;
    for (uint32_t l = 0; l < plan->dims.n_layer; l++)
        for (uint32_t h = 0; h < plan->dims.n_kv_head; h++) {
            const uint32_t n = kvl_cache_places(kvl_session_cache(session), l, h);
            most = n > most ? n : most;
        }
    KVL_TRY(kvl_alloc(&position, most, sizeof *position));
    KVL_TRY(kvl_alloc(&gone, plan->gone_room, sizeof *gone));
    for (uint32_t l = 0; l < plan->dims.n_layer; l++) KVL_TRY(put_running_layer(r, session, l, position, gone));
    r->n_evictions++;
done:
    kvl_free(&position);
    kvl_free(&gone);
    return status;
}

kvl_status kvl_record_row(struct kvl_record *r, const union kvl_cell *cells)
{
    return r->file ? kvl_runfile_row(r->file, r->table, cells) : KVL_OK;
}

kvl_status kvl_record_logits(struct kvl_record *r, uint64_t chunk, uint32_t n, uint32_t n_vocab, const float *logits)
{
    kvl_status status = KVL_OK;
    const uint64_t dims[] = {n, n_vocab};
    static const char *const dim_names[] = {"scored_token", "vocabulary"};
    if (r->file == NULL) return KVL_OK;
    KVL_TRY(kvl_runfile_integer(r->file, "/logits", "chunk", (int64_t)chunk));
    KVL_TRY(kvl_runfile_array(r->file, "/logits/logit", "1", "logits that predict the first scored tokens of the window", KVL_COL_F32, 2, dims, dim_names, logits));
done:
    return status;
}

kvl_status kvl_record_layer_map(struct kvl_record *r, const char *name, const char *long_name, uint32_t n_layer, uint32_t n_stream, const double *values)
{
    kvl_status status = KVL_OK;
    const uint64_t dims[] = {n_layer, n_stream};
    const char *const dim_names[] = {"layer", n_stream == r->config.model->dims.n_kv_head ? "head" : "stream"};
    struct kvl_text path = {0};
    size_t n = 0;
    for (size_t i = 0; i < (size_t)n_layer * n_stream; i++) n += !isnan(values[i]);
    if (r->file == NULL || n == 0) return KVL_OK;
    KVL_TRY(kvl_text_printf(&path, "/layers/%s", name));
    KVL_TRY(kvl_runfile_array(r->file, path.data, "1", long_name, KVL_COL_F64, 2, dims, dim_names, values));
done:
    kvl_text_free(&path);
    return status;
}

kvl_status kvl_record_summary(struct kvl_record *r, const struct kvl_fact *facts, size_t n)
{
    return r->file ? put_facts(r->file, "/quality", facts, n) : KVL_OK;
}

/* ---- memory ---- */

struct layer_bytes {
    uint64_t *bytes; /* [class][layer] */
    uint32_t n_layer;
};

static bool add_entry(void *context, const char *owner, int layer, const uint64_t bytes[KVL_MEM_CLASSES])
{
    const struct layer_bytes *sum = context;
    for (int c = 0; c < KVL_MEM_CLASSES; c++)
        if (layer >= 0 && (uint32_t)layer < sum->n_layer) sum->bytes[(size_t)c * sum->n_layer + (uint32_t)layer] += bytes[c];
    return true;
}

static kvl_status put_layer_bytes(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    struct layer_bytes sum = {.n_layer = r->config.model->dims.n_layer};
    const uint64_t dims[] = {KVL_MEM_CLASSES, sum.n_layer};
    static const char *const dim_names[] = {"memory_class", "layer"};
    KVL_TRY(kvl_alloc(&sum.bytes, (size_t)KVL_MEM_CLASSES * sum.n_layer, sizeof *sum.bytes));
    kvl_ledger_walk(r->config.device, add_entry, &sum);
    KVL_TRY(kvl_runfile_array(r->file, "/memory/layer_bytes", "byte",
                              "device memory that belongs to a layer, by class (order: classes)", KVL_COL_U64, 2, dims, dim_names,
                              sum.bytes));
done:
    kvl_free(&sum.bytes);
    return status;
}

/* What the last eviction left: counts and where a head's positions begin [layer][head], and all positions. */
static kvl_status put_kept(struct kvl_record *r, struct kvl_session *session)
{
    kvl_status status = KVL_OK;
    const uint64_t layers = r->config.model->dims.n_layer, heads = r->config.model->dims.n_kv_head;
    const uint64_t dims[] = {layers, heads};
    static const char *const dim_names[] = {"layer", "head"}, *const kept_names[] = {"kept"};
    uint64_t *count = NULL, *first = NULL, *position = NULL, n = 0;
    if (kvl_session_kept(session, 0) == NULL) return KVL_OK;
    KVL_TRY(kvl_alloc(&count, layers * heads, sizeof *count));
    KVL_TRY(kvl_alloc(&first, layers * heads, sizeof *first));
    for (uint64_t l = 0; l < layers; l++) {
        const struct kvl_selection *kept = kvl_session_kept(session, (uint32_t)l);
        for (uint64_t h = 0; h < heads; h++) {
            first[l * heads + h] = n;
            n += count[l * heads + h] = kept->offset[h + 1] - kept->offset[h];
        }
    }
    KVL_TRY(kvl_alloc(&position, n, sizeof *position));
    for (uint64_t l = 0; l < layers; l++)
        for (uint64_t h = 0; h < heads; h++) {
            const struct kvl_selection *kept = kvl_session_kept(session, (uint32_t)l);
            for (uint64_t i = 0; i < count[l * heads + h]; i++) position[first[l * heads + h] + i] = kept->token[kept->offset[h] + i];
        }
    KVL_TRY(kvl_runfile_array(r->file, "/layers/budget", "1", "tokens a head kept at the last eviction", KVL_COL_U64, 2, dims, dim_names, count));
    KVL_TRY(kvl_runfile_array(r->file, "/layers/kept_first", "1", "where a head's kept positions begin", KVL_COL_U64, 2, dims, dim_names, first));
    KVL_TRY(kvl_runfile_array(r->file, "/layers/kept_position", "1", "positions kept at the last eviction", KVL_COL_U64, 1, &n, kept_names, position));
done:
    kvl_free(&count);
    kvl_free(&first);
    kvl_free(&position);
    return status;
}

static kvl_status put_ledger(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    struct kvl_ledger ledger;
    struct kvl_text classes = {0};
    kvl_ledger_read(r->config.device, &ledger);
    for (int c = 0; c < KVL_MEM_CLASSES; c++) {
        char name[64];
        snprintf(name, sizeof name, "ledger_%s_bytes", kvl_mem_class_name[c]);
        KVL_TRY(kvl_runfile_integer(r->file, "/memory", name, (int64_t)ledger.bytes[c]));
        KVL_TRY(kvl_text_printf(&classes, "%s%s", c ? " " : "", kvl_mem_class_name[c]));
    }
    KVL_TRY(kvl_runfile_integer(r->file, "/memory", "ledger_total_bytes", (int64_t)ledger.total));
    KVL_TRY(kvl_runfile_integer(r->file, "/memory", "ledger_peak_bytes", (int64_t)ledger.peak));
    KVL_TRY(kvl_runfile_text(r->file, "/memory", "classes", classes.data));
done:
    kvl_text_free(&classes);
    return status;
}

/* What the planner says without a device's help; equals what the session reserved. */
static kvl_status put_plan(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    const struct kvl_record_config *c = &r->config;
    const struct kvl_dims *d = &c->model->dims;
    const struct kvl_session_config session = {
        .spec = c->spec, .n_ctx = c->n_ctx, .ubatch = c->ubatch, .protocol = c->protocol, .exact = c->exact, .n_sequence = c->n_sequence};
    const struct kvl_cache_limits limits = kvl_cache_limits_of(c->device);
    struct kvl_cache_plan plan = {0};
    KVL_TRY(kvl_session_cache_plan(d, &session, &limits, &plan));
    const struct kvl_fact facts[] = {{"plan_bytes_per_token", (double)plan.bytes_per_token, true},
                                     {"plan_resident_bytes", (double)plan.resident_bytes, true},
                                     {"plan_cache_scratch_bytes", (double)plan.scratch_bytes, true}};
    KVL_TRY(put_facts(r->file, "/memory", facts, COUNT(facts)));
done:
    kvl_cache_plan_free(&plan);
    return status;
}

/* The cache of the session in numbers; the first five are the common keys of --json. */
enum { COMMON_BYTES = 5, CACHE_FACTS = 10 };
static void cache_facts(const struct kvl_cache_bytes *b, struct kvl_fact facts[CACHE_FACTS])
{
    const struct kvl_fact all[CACHE_FACTS] = {
        {"bytes_per_token", (double)b->bytes_per_token, true},
        {"payload_bytes", (double)b->payload, true},
        {"resident_bytes", (double)b->resident, true},
        {"peak_bytes", (double)b->peak, true},
        {"token_read_bytes", (double)b->token_read, true},
        {"scale_bytes", (double)b->scale, true},
        {"index_bytes", (double)b->index, true},
        {"table_bytes", (double)b->table, true},
        {"slack_bytes", (double)b->slack, true},
        {"scratch_bytes", (double)b->scratch, true},
    };
    memcpy(facts, all, sizeof all);
}

/* Means of what evictions cost, if that was measured; their number. */
enum { LOSS_FACTS = 2 };
static size_t loss_facts(const struct kvl_record *r, struct kvl_fact facts[LOSS_FACTS])
{
    facts[0] = (struct kvl_fact){"mass_lost", r->mass_lost.mean};
    facts[1] = (struct kvl_fact){"output_error", r->output_error.mean};
    return r->mass_lost.n > 0 ? LOSS_FACTS : 0;
}

/* Steps behind which the host said which tokens go, and what that took. */
enum { RESCORE_FACTS = 2 };
static size_t rescore_facts(const struct kvl_record *r, struct kvl_fact facts[RESCORE_FACTS])
{
    facts[0] = (struct kvl_fact){"rescored", (double)r->rescored, true};
    facts[1] = (struct kvl_fact){"rescore_ns", (double)r->rescore_ns, true};
    return r->rescored > 0 ? RESCORE_FACTS : 0;
}

kvl_status kvl_record_memory(struct kvl_record *r, struct kvl_session *session)
{
    kvl_status status = KVL_OK;
    struct kvl_fact facts[CACHE_FACTS];
    struct kvl_cache_counts counts;
    struct kvl_fact losses[LOSS_FACTS];
    KVL_TRY(kvl_session_bytes(session, &r->bytes));
    KVL_TRY(kvl_cache_counts(kvl_session_cache(session), &counts));
    if (counts.nonfinite)
        kvl_warn("%u keys or values were not finite when they were encoded: the results cannot be trusted", counts.nonfinite);
    if (counts.overflow) kvl_info("%u outliers found their room taken and were stored as other elements", counts.overflow);
    if (!r->file) return KVL_OK;
    KVL_TRY(kvl_runfile_integer(r->file, "/quality", "nonfinite_inputs", counts.nonfinite));
    KVL_TRY(kvl_runfile_integer(r->file, "/quality", "outlier_overflow", counts.overflow));
    KVL_TRY(put_facts(r->file, "/quality", losses, loss_facts(r, losses)));
    const struct kvl_fact evictions[] = {{"gone", (double)r->n_gone, true}, {"gone_logged", (double)r->n_gone_logged, true}};
    struct kvl_fact rescores[RESCORE_FACTS];
    if (kvl_spec_evicts(r->config.spec)) KVL_TRY(put_facts(r->file, "/evictions", evictions, COUNT(evictions)));
    KVL_TRY(put_facts(r->file, "/evictions", rescores, rescore_facts(r, rescores)));
    cache_facts(&r->bytes, facts);
    KVL_TRY(put_facts(r->file, "/memory", facts, CACHE_FACTS));
    KVL_TRY(put_plan(r));
    KVL_TRY(put_ledger(r));
    KVL_TRY(put_layer_bytes(r));
    KVL_TRY(put_kept(r, session));
done:
    return status;
}

/* ---- the end ---- */

static kvl_status put_kernel(struct kvl_record *r, struct kvl_kernel_times *k)
{
    struct kvl_kernel_summary sum;
    kvl_kernel_summarize(&r->profile, k, &sum);
    const union kvl_cell cells[COUNT(kernel_columns)] = {
        {.text = r->profile.phase[k->phase].name},
        {.text = k->kernel},
        {.u64 = k->n},
        {.f64 = sum.ns_min},
        {.f64 = sum.ns_median},
        {.f64 = sum.ns_max},
        {.f64 = sum.ns_sum},
        {.u64 = k->work.bytes},
        {.u64 = k->work.flops},
        {.f64 = sum.gbps},
        {.f64 = sum.gflops},
        {.f64 = sum.peak_share},
    };
    return kvl_runfile_row(r->file, r->kernels, cells);
}

static kvl_status put_peaks(struct kvl_record *r)
{
    const struct kvl_peaks *p = &r->profile.peaks;
    const struct kvl_fact facts[] = {
        {"read_gbps", p->read_gbps}, {"copy_gbps", p->copy_gbps}, {"fma_gflops", p->fma_gflops}, {"launch_us", p->launch_us}};
    return r->config.profile ? put_facts(r->file, "/device", facts, COUNT(facts)) : KVL_OK;
}

static kvl_status finish_file(struct kvl_record *r)
{
    kvl_status status = KVL_OK;
    char source[65];
    KVL_TRY(put_peaks(r));
    for (size_t i = 0; i < r->profile.n_kernels; i++) KVL_TRY(put_kernel(r, &r->profile.kernel[i]));
    KVL_TRY(kvl_device_source_sha256(r->config.device, source));
    KVL_TRY(kvl_runfile_text(r->file, "/config", "cl_source_sha256", source));
    KVL_TRY(kvl_runfile_commit(r->file));
done:
    return status;
}

static const char *status_text(kvl_status status)
{
    return status == KVL_OK ? "complete" : status == KVL_E_INTERRUPTED ? "interrupted" : "failed";
}

kvl_status kvl_record_close(struct kvl_record **record, kvl_status status)
{
    struct kvl_record *r = *record;
    if (!r) return status;
    kvl_profile_on(r->config.device, false);
    if (r->file) {
        const kvl_status finished = finish_file(r);
        if (status == KVL_OK) status = finished;
        struct kvl_text path = {0};
        const kvl_status named = kvl_text_printf(&path, "%s%s", kvl_runfile_path(r->file), status == KVL_OK ? "" : ".part");
        const kvl_status closed = kvl_runfile_close(&r->file, status_text(status));
        if (status == KVL_OK) status = closed;
        if (named == KVL_OK)
            kvl_info("run file: %s%s%s%s", path.data, status == KVL_OK ? "" : " (", status == KVL_OK ? "" : status_text(status),
                     status == KVL_OK ? "" : ")");
        kvl_text_free(&path);
    }
    free_record(record);
    return status;
}

/* ---- for people and for scripts ---- */

struct kvl_profile *kvl_record_profile(struct kvl_record *r) { return &r->profile; }

kvl_status kvl_json_facts(cJSON *object, const struct kvl_fact *facts, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const bool defined = !isnan(facts[i].value);
        if (!(defined ? cJSON_AddNumberToObject(object, facts[i].name, facts[i].value)
                      : cJSON_AddNullToObject(object, facts[i].name)))
            return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    }
    return KVL_OK;
}

kvl_status kvl_record_json(const struct kvl_record *r, cJSON *object)
{
    kvl_status status = KVL_OK;
    const struct {
        const char *name, *value;
    } texts[] = {
        {"kv", r->spec.data},
        {"base", r->base.data}, /* NULL: no such key */
        {"device", kvl_device_caps(r->config.device)->name},
        {"model", r->config.model->name},
        {"protocol", kvl_protocol_name[r->config.protocol]},
    };
    struct kvl_fact facts[1 + CACHE_FACTS] = {{"ubatch", r->config.ubatch, true}}, losses[LOSS_FACTS], rescores[RESCORE_FACTS];
    cache_facts(&r->bytes, facts + 1);
    for (size_t i = 0; i < COUNT(texts); i++)
        if (texts[i].value && !cJSON_AddStringToObject(object, texts[i].name, texts[i].value))
            return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    if (!(r->file ? cJSON_AddStringToObject(object, "run_file", kvl_runfile_path(r->file))
                  : cJSON_AddNullToObject(object, "run_file")))
        return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    KVL_TRY(kvl_json_facts(object, facts, 1 + COMMON_BYTES));
    KVL_TRY(kvl_json_facts(object, losses, loss_facts(r, losses)));
    KVL_TRY(kvl_json_facts(object, rescores, rescore_facts(r, rescores)));
done:
    return status;
}

kvl_status kvl_json_print(const cJSON *object)
{
    char *text = cJSON_Print(object);
    if (!text) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    puts(text);
    cJSON_free(text);
    return KVL_OK;
}

void kvl_record_print(const struct kvl_record *r)
{
    const double mib = 1.0 / 1048576.0;
    printf("model     %s\n", r->config.model->name);
    printf("device    %s\n", kvl_device_caps(r->config.device)->name);
    printf("kv        %s\n", r->spec.data);
    if (r->base.data) printf("base      %s\n", r->base.data);
    printf("protocol  %s, ubatch %u%s\n", kvl_protocol_name[r->config.protocol], r->config.ubatch,
           r->config.exact ? ", exact" : "");
    printf("cache     %llu bytes a token; payload %.3f MiB, resident %.3f MiB, peak %.3f MiB", (unsigned long long)r->bytes.bytes_per_token,
           (double)r->bytes.payload * mib, (double)r->bytes.resident * mib, (double)r->bytes.peak * mib);
    if (r->bytes.token_read > 0) printf("; the newest token read %.3f MiB", (double)r->bytes.token_read * mib); /* none: all was a prompt, read as it came */
    putchar('\n');
    if (r->mass_lost.n > 0)
        printf("evictions %.4f of the scored tokens' attention went to evicted tokens; its output changes by %.4f\n", r->mass_lost.mean, r->output_error.mean);
    if (r->rescored > 0) printf("evictions by scores found anew behind %llu tokens, %.1f ms each\n", (unsigned long long)r->rescored, (double)r->rescore_ns / (double)r->rescored * 1e-6);
}
