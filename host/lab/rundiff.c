#include "rundiff.h"
#include "mem.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- values of a tree ---- */

static double number_of(const cJSON *item)
{
    if (cJSON_IsNumber(item)) return item->valuedouble;
    return cJSON_IsRaw(item) ? strtod(item->valuestring, NULL) : (double)NAN;
}

static const cJSON *attribute(const cJSON *run, const char *group, const char *name)
{
    return cJSON_GetObjectItem(group[0] ? cJSON_GetObjectItem(run, group) : run, name);
}

const char *kvl_run_text(const cJSON *run, const char *group, const char *name)
{
    const cJSON *item = attribute(run, group, name);
    return cJSON_IsString(item) || cJSON_IsRaw(item) ? item->valuestring : NULL;
}

double kvl_run_number(const cJSON *run, const char *group, const char *name) { return number_of(attribute(run, group, name)); }

/* The values of a column, NULL if there is no such column. */
static const cJSON *column(const cJSON *run, const char *group, const char *name)
{
    const cJSON *data = cJSON_GetObjectItem(cJSON_GetObjectItem(run, group), "data");
    return cJSON_GetObjectItem(cJSON_GetObjectItem(data, name), "values");
}

double kvl_run_tokens_per_s(const cJSON *run, const char *phase)
{
    const cJSON *phases = column(run, "/steps", "phase"), *tokens = column(run, "/steps", "tokens"),
                *duration = column(run, "/steps", "duration_ns");
    if (!phases || !tokens || !duration || !phases->child) return NAN;
    if (phase == NULL) phase = phases->child->valuestring;
    double n = 0.0, ns = 0.0;
    for (const cJSON *p = phases->child, *t = tokens->child, *d = duration->child; p && t && d; p = p->next, t = t->next, d = d->next) {
        if (!cJSON_IsString(p) || strcmp(p->valuestring, phase) != 0) continue;
        n += number_of(t);
        ns += number_of(d);
    }
    return ns > 0.0 ? n * 1e9 / ns : (double)NAN;
}

/* ---- configuration ---- */

/* Differ whenever the rest does, or say where and not what. */
static bool is_provenance(const char *name)
{
    static const char *const names[] = {"cl_source_sha256", "kv_given", "base_given"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

static const char *value_text(const cJSON *item, char number[32])
{
    if (cJSON_IsString(item) || cJSON_IsRaw(item)) return item->valuestring;
    if (!cJSON_IsNumber(item)) return NULL;
    snprintf(number, 32, "%.17g", item->valuedouble);
    return number;
}

static kvl_status add_setting(struct kvl_diff *diff, const char *name, const char *a, const char *b)
{
    kvl_status status = KVL_OK;
    if (a && b && strcmp(a, b) == 0) return KVL_OK;
    KVL_TRY(kvl_realloc(&diff->setting, diff->n_settings + 1, sizeof *diff->setting));
    struct kvl_diff_setting *setting = &diff->setting[diff->n_settings++];
    *setting = (struct kvl_diff_setting){0};
    KVL_TRY(kvl_strdup(&setting->name, name));
    if (a) KVL_TRY(kvl_strdup(&setting->a, a));
    if (b) KVL_TRY(kvl_strdup(&setting->b, b));
done:
    return status;
}

static kvl_status diff_config(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    kvl_status status = KVL_OK;
    const cJSON *in_a = cJSON_GetObjectItem(a, "/config"), *in_b = cJSON_GetObjectItem(b, "/config"), *item;
    char left[32], right[32];
    cJSON_ArrayForEach(item, in_a)
    {
        if (!is_provenance(item->string) && !cJSON_IsObject(item))
            KVL_TRY(add_setting(out, item->string, value_text(item, left), value_text(cJSON_GetObjectItem(in_b, item->string), right)));
    }
    cJSON_ArrayForEach(item, in_b)
    {
        if (!is_provenance(item->string) && !cJSON_IsObject(item) && !cJSON_GetObjectItem(in_a, item->string))
            KVL_TRY(add_setting(out, item->string, NULL, value_text(item, right)));
    }
    static const char *const from_root[] = {"git", "host"};
    for (size_t i = 0; i < sizeof from_root / sizeof *from_root; i++)
        KVL_TRY(add_setting(out, from_root[i], kvl_run_text(a, "", from_root[i]), kvl_run_text(b, "", from_root[i])));
done:
    return status;
}

kvl_status kvl_run_strategy(const cJSON *run, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const cJSON *item;
    char number[32];
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(run, "/config"))
    {
        const char *text = value_text(item, number);
        if (text && !is_provenance(item->string) && strcmp(item->string, "device") != 0)
            KVL_TRY(kvl_text_printf(out, "%s=%s\n", item->string, text));
    }
done:
    return status;
}

/* ---- numbers ---- */

static kvl_status add_number(struct kvl_diff_numbers *list, const struct kvl_diff_number *number)
{
    const kvl_status status = kvl_realloc(&list->item, list->n + 1, sizeof *list->item);
    if (status == KVL_OK) list->item[list->n++] = *number;
    return status;
}

static struct kvl_diff_number named(const char *name, const char *unit, double a, double b)
{
    struct kvl_diff_number out = {.a = a, .b = b};
    snprintf(out.name, sizeof out.name, "%s", name);
    snprintf(out.unit, sizeof out.unit, "%s", unit);
    return out;
}

static kvl_status diff_bytes(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    static const char *const names[] = {"bytes_per_token", "payload_bytes", "scale_bytes", "index_bytes", "table_bytes",
                                        "slack_bytes",     "resident_bytes", "peak_bytes",  "token_read_bytes", "scratch_bytes"};
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct kvl_diff_number number =
            named(names[i], "byte", kvl_run_number(a, "/memory", names[i]), kvl_run_number(b, "/memory", names[i]));
        if (!isnan(number.a) || !isnan(number.b)) KVL_TRY(add_number(&out->bytes, &number));
    }
done:
    return status;
}

/* ---- quality: chunk by chunk ---- */

/* Chunks can be paired if they hold the same tokens. */
static bool can_pair(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    static const char *const names[] = {"text_sha256", "tokenizer_sha256", "n_ctx"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *left = kvl_run_text(a, "/config", names[i]), *right = kvl_run_text(b, "/config", names[i]);
        if (left && right && strcmp(left, right) == 0) continue;
        snprintf(out->not_paired, sizeof out->not_paired, "chunks hold different tokens: %s is %.64s and %.64s", names[i],
                 left ? left : "not stated", right ? right : "not stated");
        return false;
    }
    if (column(a, "/quality", "chunk") && column(b, "/quality", "chunk")) return true;
    snprintf(out->not_paired, sizeof out->not_paired, "a run without chunks");
    return false;
}

/* The value of `name` in the row of chunk `chunk`. Chunks are in order, so `at` moves on from call to call. */
static double value_at(const cJSON **chunk_at, const cJSON **value_at_, double chunk)
{
    while (*chunk_at && *value_at_ && number_of(*chunk_at) < chunk) {
        *chunk_at = (*chunk_at)->next;
        *value_at_ = (*value_at_)->next;
    }
    return *chunk_at && *value_at_ && number_of(*chunk_at) == chunk ? number_of(*value_at_) : (double)NAN;
}

/* Of a window some tokens are scored, by a protocol not as many as by another: their means are of different tokens. */
static bool score_alike(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    const cJSON *in_a = column(a, "/quality", "n"), *in_b = column(b, "/quality", "n");
    if (!in_a || !in_b) return true;
    const cJSON *chunk_b = column(b, "/quality", "chunk")->child, *n_b = in_b->child;
    const cJSON *chunk_a = column(a, "/quality", "chunk")->child, *n_a = in_a->child;
    for (; chunk_a && n_a; chunk_a = chunk_a->next, n_a = n_a->next) {
        const double chunk = number_of(chunk_a), x = number_of(n_a), y = value_at(&chunk_b, &n_b, chunk);
        if (isnan(y) || x == y) continue;
        snprintf(out->not_paired, sizeof out->not_paired, "of chunk %.0f A scores %.0f tokens and B %.0f: give both the same protocol, context and score", chunk, x, y);
        return false;
    }
    return true;
}

static kvl_status diff_column(const cJSON *a, const cJSON *b, const char *name, const char *unit, struct kvl_diff *out)
{
    const cJSON *in_a = column(a, "/quality", name), *in_b = column(b, "/quality", name);
    if (!in_a || !in_b) return KVL_OK;
    struct kvl_moments left = {0}, right = {0}, difference = {0};
    double largest = 0.0;
    const cJSON *chunk_b = column(b, "/quality", "chunk")->child, *value_b = in_b->child;
    const cJSON *chunk_a = column(a, "/quality", "chunk")->child, *value_a = in_a->child;
    for (; chunk_a && value_a; chunk_a = chunk_a->next, value_a = value_a->next) {
        const double x = number_of(value_a), y = value_at(&chunk_b, &value_b, number_of(chunk_a));
        if (isnan(x) || isnan(y)) continue;
        kvl_moments_add(&left, x);
        kvl_moments_add(&right, y);
        kvl_moments_add(&difference, y - x);
        if (fabs(y - x) > largest) largest = fabs(y - x);
    }
    if (difference.n == 0) {
        snprintf(out->not_paired, sizeof out->not_paired, "the runs have no chunk in common");
        return KVL_OK;
    }
    struct kvl_diff_number number = named(name, unit, left.mean, right.mean);
    number.tested = true;
    number.difference = kvl_t_interval(&difference);
    number.verdict = kvl_verdict_of(&number.difference);
    if (difference.n < KVL_ENOUGH_CHUNKS) number.difference.low = number.difference.high = NAN; /* so few say nothing of the spread */
    number.largest = largest;
    return add_number(&out->quality, &number);
}

static void diff_logits(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    const cJSON *in_a = column(a, "/logits", "logit"), *in_b = column(b, "/logits", "logit");
    if (!in_a || !in_b || kvl_run_number(a, "/logits", "chunk") != kvl_run_number(b, "/logits", "chunk")) return;
    const cJSON *x = in_a->child, *y = in_b->child;
    for (; x && y; x = x->next, y = y->next, out->n_logits++) {
        const double difference = fabs(number_of(y) - number_of(x));
        if (!(difference <= out->largest_logit)) out->largest_logit = difference;
    }
}

static kvl_status diff_quality(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    kvl_status status = KVL_OK;
    if (!can_pair(a, b, out) || !score_alike(a, b, out)) return KVL_OK;
    KVL_TRY(diff_column(a, b, "nll", "nat", out));
    KVL_TRY(diff_column(a, b, "kld", "nat", out));
    KVL_TRY(diff_column(a, b, "same_top1", "1", out));
    diff_logits(a, b, out);
done:
    return status;
}

/* ---- speed ---- */

/* Welch's t-interval of the difference of two means (Biometrika 34, 1947): the samples of two runs are not paired. */
static void test_means(struct kvl_diff_number *number, double sd_a, double n_a, double sd_b, double n_b)
{
    const double enough = 3.0, va = sd_a * sd_a / n_a, vb = sd_b * sd_b / n_b, v = va + vb;
    struct kvl_interval *d = &number->difference;
    number->tested = true;
    *d = (struct kvl_interval){.n = (uint64_t)fmin(n_a, n_b), .mean = number->b - number->a, .low = NAN, .high = NAN};
    number->verdict = KVL_EXPLORATORY;
    if (!(fmin(n_a, n_b) >= enough) || !(v > 0.0)) return;
    const double df = v * v / (va * va / (n_a - 1.0) + vb * vb / (n_b - 1.0));
    const double half = kvl_student_t_quantile(0.975, df) * sqrt(v);
    d->low = d->mean - half;
    d->high = d->mean + half;
    number->verdict = d->high < 0.0 ? KVL_LOWER : d->low > 0.0 ? KVL_HIGHER : KVL_NOT_RESOLVED;
}

static const cJSON *cell(const cJSON *run, const char *group, const char *name, int row)
{
    return cJSON_GetArrayItem(column(run, group, name), row);
}

static kvl_status diff_bench(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    kvl_status status = KVL_OK;
    const cJSON *tests_a = column(a, "/bench", "test"), *tests_b = column(b, "/bench", "test");
    for (int i = 0; i < cJSON_GetArraySize(tests_a); i++)
        for (int k = 0; k < cJSON_GetArraySize(tests_b); k++) {
            const char *name = cell(a, "/bench", "test", i)->valuestring, *other = cell(b, "/bench", "test", k)->valuestring;
            if (!name || !other || strcmp(name, other) != 0) continue;
            struct kvl_diff_number number = named(name, "tokens/s", number_of(cell(a, "/bench", "tokens_per_s", i)),
                                                  number_of(cell(b, "/bench", "tokens_per_s", k)));
            test_means(&number, number_of(cell(a, "/bench", "sd", i)), number_of(cell(a, "/bench", "repetitions", i)),
                       number_of(cell(b, "/bench", "sd", k)), number_of(cell(b, "/bench", "repetitions", k)));
            KVL_TRY(add_number(&out->speed, &number));
        }
done:
    return status;
}

static kvl_status diff_steps(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    kvl_status status = KVL_OK;
    const char *before = "";
    const cJSON *phase;
    if (column(a, "/bench", "test")) return KVL_OK; /* its steps are its tests' samples */
    cJSON_ArrayForEach(phase, column(a, "/steps", "phase"))
    {
        if (!cJSON_IsString(phase) || strcmp(phase->valuestring, before) == 0) continue;
        before = phase->valuestring;
        bool seen = false;
        for (size_t i = 0; i < out->speed.n && !seen; i++) seen = strcmp(out->speed.item[i].name, before) == 0;
        const struct kvl_diff_number number =
            named(before, "tokens/s", kvl_run_tokens_per_s(a, before), kvl_run_tokens_per_s(b, before));
        if (!seen && !isnan(number.b)) KVL_TRY(add_number(&out->speed, &number));
    }
done:
    return status;
}

/* ---- all ---- */

kvl_status kvl_runs_diff(const cJSON *a, const cJSON *b, struct kvl_diff *out)
{
    kvl_status status = KVL_OK;
    *out = (struct kvl_diff){.largest_logit = NAN};
    KVL_TRY(diff_config(a, b, out));
    KVL_TRY(diff_bytes(a, b, out));
    KVL_TRY(diff_quality(a, b, out));
    KVL_TRY(diff_bench(a, b, out));
    KVL_TRY(diff_steps(a, b, out));
done:
    if (status != KVL_OK) kvl_diff_free(out);
    return status;
}

void kvl_diff_free(struct kvl_diff *diff)
{
    for (size_t i = 0; i < diff->n_settings; i++) {
        kvl_free(&diff->setting[i].name);
        kvl_free(&diff->setting[i].a);
        kvl_free(&diff->setting[i].b);
    }
    kvl_free(&diff->setting);
    kvl_free(&diff->bytes.item);
    kvl_free(&diff->quality.item);
    kvl_free(&diff->speed.item);
    *diff = (struct kvl_diff){0};
}
