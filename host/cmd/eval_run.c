#include "eval_run.h"
#include "calibration.h"
#include "layer_errors.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* clang-format off */
const struct kvl_opt eval_options[EVAL_KLD_OPTIONS] = {
    EVAL_OPTIONS_CACHE,
    {.name = "ctx", .letter = 'c', .type = KVL_OPT_INT, .offset = EVAL_AT(n_ctx), .metavar = "N",
     .help = "tokens a window; the second half of each is scored", .fallback = "512", .min = KVL_EVAL_MIN_CTX, .max = 1 << 24},
    EVAL_OPTIONS_CHUNKS,
    {.name = "protocol", .type = KVL_OPT_CHOICE, .offset = EVAL_AT(protocol),
     .help = "what a query reads encoded: p1 everything, p2 what was sealed when its ubatch was written, p3 = compress-then-score "
             "a context that was compressed after it had been read, p4 what was sealed when its token was written",
     .fallback = "p1", .choices = "p1|p2|p3|p4|compress-then-score"},
    EVAL_OPTION_CONTEXT("p3: tokens that are prefilled, then compressed"),
    {.name = "score", .type = KVL_OPT_INT, .offset = EVAL_AT(score), .metavar = "M",
     .help = "p3: tokens that follow and are scored; a window has N + M", .fallback = "256", .min = 2, .max = 1 << 24},
    EVAL_OPTION_LOSS,
    {.name = "logits", .type = KVL_OPT_INT, .offset = EVAL_AT(logits), .metavar = "N",
     .help = "keep the logits of the first N scored tokens in the run file; log diff compares them", .fallback = "0", .min = 0, .max = 16},
    {.name = "layer-errors", .type = KVL_OPT_FLAG, .offset = EVAL_AT(layer_errors),
     .help = "how far encoding and decoding moves each layer's and head's keys and values of the last window, into the run file; report draws it"},
    EVAL_OPTIONS_RUN,
    EVAL_OPTION_BASE,
    {.name = "base-logits", .type = KVL_OPT_TEXT, .offset = EVAL_AT(base_logits), .metavar = "FOLDER",
     .help = "keep the base's logits there (4 bytes a scored token and entry of the vocabulary), read those that are there: further runs take half the time"},
};
/* clang-format on */

static kvl_status record_layer_errors(struct kvl_record *record, const struct kvl_eval *eval)
{
    static const char *const name[KVL_SIDES][2] = {{"key_error", "relative error of decoded keys, of the codec alone"},
                                                   {"value_error", "relative error of decoded values, of the codec alone"}};
    kvl_status status = KVL_OK;
    struct kvl_layer_errors errors = {0};
    KVL_TRY(kvl_layer_errors_measure(eval, eval->layout.context ? eval->layout.context : eval->layout.n_ctx, &errors));
    for (int side = 0; side < KVL_SIDES; side++)
        KVL_TRY(kvl_record_layer_map(record, name[side][0], name[side][1], errors.n_layer, errors.n_stream, errors.error[side]));
done:
    kvl_layer_errors_free(&errors);
    return status;
}

static kvl_status run_recorded(const struct eval_args *args, const struct eval_kind *kind, struct kvl_eval *eval)
{
    const struct kvl_eval_config *c = &eval->config;
    const struct kvl_fact windows[] = {{"first_chunk", (double)c->first_chunk, true}, {"chunks", (double)c->chunks, true}};
    const struct kvl_record_config config = {
        .command = kind->command,
        .output = args->output,
        .no_file = args->no_run_file,
        .profile = args->profile,
        .device = eval->rig->device,
        .model = eval->rig->model,
        .spec = c->spec,
        .base = c->base,
        .protocol = c->protocol,
        .ubatch = c->ubatch,
        .n_ctx = c->n_ctx,
        .exact = c->exact,
        .measures_loss = c->measure_loss,
        .text_sha256 = eval->text->sha256,
        .settings = kind->settings ? kind->settings : windows,
        .n_settings = kind->settings ? kind->n_settings : sizeof windows / sizeof *windows,
        .words = kind->words,
        .n_words = kind->n_words,
        .table = c->protocol == KVL_P3_PREFILL_EXACT && kind->binned_table ? kind->binned_table : kind->table,
    };
    struct kvl_record *record = NULL;
    kvl_status status = kvl_record_open(&config, &record);
    if (status != KVL_OK) return status;
    status = kind->measure(args, eval, record);
    if (status == KVL_OK && args->layer_errors) status = record_layer_errors(record, eval);
    return kvl_record_close(&record, status);
}

struct kvl_eval_config eval_windows(const struct eval_args *args)
{
    const bool compresses = args->protocol >= KVL_PROTOCOLS || args->protocol == KVL_P3_PREFILL_EXACT;
    return (struct kvl_eval_config){
        .n_ctx = (uint32_t)(compresses ? args->context + args->score : args->n_ctx),
        .context = (uint32_t)args->context,
        .first_chunk = (uint64_t)args->first_chunk,
        .chunks = (uint64_t)args->chunks,
        .protocol = compresses ? KVL_P3_PREFILL_EXACT : (enum kvl_protocol)args->protocol,
    };
}

kvl_status eval_run(const struct eval_args *args, const struct eval_kind *kind, const struct kvl_eval_config *windows)
{
    kvl_status status = KVL_OK;
    struct kvl_rig rig = {0};
    struct kvl_eval_text text = {0};
    struct kvl_spec *spec = NULL, *base = NULL;
    struct kvl_eval *eval = NULL;
    if (args->layer_errors && args->no_run_file) return kvl_fail(KVL_E_USAGE, "--layer-errors goes into the run file: leave --no-run-file out");
    KVL_TRY(kvl_spec_open(args->kv, &spec));
    if (args->base) KVL_TRY(kvl_spec_open(args->base, &base));
    KVL_TRY(kvl_rig_open(args->model, args->device, &rig));
    KVL_TRY(kvl_eval_text_read(rig.model, args->file, &text));
    struct kvl_eval_config config = *windows;
    config.spec = spec;
    config.base = base;
    config.ubatch = (uint32_t)args->ubatch;
    config.measure_loss = args->loss;
    config.base_logits = args->base_logits;
    config.keep_logits = (uint32_t)args->logits;
    config.exact = args->exact;
    config.allow_long = args->allow_long;
    KVL_TRY(kvl_eval_open(&rig, &text, &config, &eval));
    KVL_TRY(run_recorded(args, kind, eval));
done:
    kvl_eval_close(&eval);
    kvl_eval_text_free(&text);
    kvl_rig_close(&rig);
    kvl_spec_free(&base);
    kvl_spec_free(&spec);
    return status;
}

/* ---- printing ---- */

void eval_print_windows(const struct kvl_record *record, const struct kvl_eval *eval, const struct kvl_eval_ppl *result)
{
    kvl_record_print(record);
    printf("windows   %llu of %u tokens from number %llu on, %u scored in each: %llu tokens\n",
           (unsigned long long)result->n_chunks, eval->config.n_ctx, (unsigned long long)eval->config.first_chunk, eval->layout.n_scored,
           (unsigned long long)result->n_tokens);
}

void eval_print_bins(const struct kvl_eval_ppl *r)
{
    for (int i = 0; i < KVL_EVAL_BINS; i++) {
        if (isnan(r->bin.nll[i])) continue;
        printf("nll       %.6f", r->bin.nll[i]);
        if (!isnan(r->bin.kld[i])) printf(", kld %.6f, same top1 %.3f %%,", r->bin.kld[i], 100.0 * r->bin.same_top1[i]);
        printf(" of tokens %u to %u after the compression\n", kvl_eval_bins[i].from, kvl_eval_bins[i].to);
    }
}

/* Errors over windows are the ones to trust: tokens of a window are not independent. Few windows cannot give one. */
void eval_print_errors(const char *label, double value, double se, double se_chunk, uint64_t n_chunks, int digits)
{
    const uint64_t enough = 16;
    printf("%-9s %.*f", label, digits, value);
    if (!isnan(se)) printf(" +/- %.*f (tokens)", digits, se);
    if (!isnan(se_chunk)) printf("%s +/- %.*f (windows)", isnan(se) ? "" : ",", digits, se_chunk);
    puts(n_chunks < enough ? ", exploratory: under 16 windows" : "");
}

kvl_status eval_json_row(cJSON *array, const struct kvl_fact *facts, size_t n)
{
    cJSON *object = cJSON_CreateObject();
    if (!object || !cJSON_AddItemToArray(array, object)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    return kvl_json_facts(object, facts, n);
}

static kvl_status add_chunk(cJSON *array, const struct kvl_eval_chunk *chunk, bool with_base)
{
    const struct kvl_fact facts[] = {
        {"chunk", (double)chunk->chunk}, {"nll", chunk->nll}, {"n", chunk->n},
        {"nll_base", chunk->nll_base},   {"kld", chunk->kld}, {"same_top1", chunk->same_top1},
    };
    struct kvl_fact all[6 + KVL_EVAL_BIN_FACTS];
    const size_t n = with_base ? 6 : 3;
    memcpy(all, facts, n * sizeof *all);
    return eval_json_row(array, all, n + kvl_eval_bin_facts(&chunk->bin, all + n));
}

kvl_status eval_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts, cJSON **out)
{
    *out = cJSON_CreateObject();
    const kvl_status status = kvl_record_json(record, *out);
    return status == KVL_OK ? kvl_json_facts(*out, facts, n_facts) : status;
}

kvl_status eval_print_json(const struct kvl_record *record, const struct kvl_fact *facts, size_t n_facts,
                           const struct kvl_eval_ppl *result, bool with_base)
{
    kvl_status status = KVL_OK;
    cJSON *object = NULL;
    KVL_TRY(eval_json(record, facts, n_facts, &object));
    cJSON *chunks = cJSON_AddArrayToObject(object, "chunks");
    for (uint64_t i = 0; i < result->n_chunks; i++) KVL_TRY(add_chunk(chunks, &result->chunk[i], with_base));
    KVL_TRY(kvl_json_print(object));
done:
    cJSON_Delete(object);
    return status;
}
