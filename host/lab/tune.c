/* The search: what to try, and what is the best. */
#include "tune.h"
#include "gguf.h"
#include "log.h"
#include "stats.h"
#include "tune_problem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_PAIRS = KVL_TUNE_PAIRS, MOST_PARTS = 4 };
static const uint64_t least_sample_ns = 20000000; /* a timing lasts at least this long, of so many runs */

struct kvl_tune_shape kvl_tune_shape_of(const struct kvl_model *model)
{
    enum { TOKENS = 512, DEPTH = 4096 };
    if (model == NULL) {
        for (size_t i = 0; i < kvl_n_quant_types; i++)
            if (strcmp(kvl_quant_types[i].name, "Q4_1") == 0)
                return (struct kvl_tune_shape){&kvl_quant_types[i], 576, 1536, 9, 3, 64, TOKENS, DEPTH};
    }
    const struct kvl_dims *d = &model->dims;
    const struct kvl_gguf_tensor *gate = kvl_gguf_tensor_find(model->gguf, "blk.0.ffn_gate.weight");
    return (struct kvl_tune_shape){kvl_quant_type(gate->type), d->n_embd, d->n_ff, d->n_head, d->n_kv_head, d->head_dim, TOKENS, DEPTH};
}

static const struct kvl_tune_problem *problem_of(const char *kernel)
{
    for (size_t i = 0; i < kvl_n_tune_problems; i++)
        if (strcmp(kvl_tune_problems[i].kernel, kernel) == 0) return &kvl_tune_problems[i];
    return NULL;
}

const struct kvl_tune_kernel *kvl_tune_nth(size_t i)
{
    return i < kvl_n_tune_problems ? kvl_tune_kernel_find(kvl_tune_problems[i].kernel) : NULL;
}

struct search {
    struct kvl_device *device;
    const struct kvl_tune_kernel *kernel;
    const struct kvl_tune_problem *problem;
    const struct kvl_tune_options *options;
    kvl_tune_fn fn;
    void *context;
    void *self, *yardstick;       /* what runs with the defaults */
    uint64_t runs[MOST_PARTS];    /* of a timing */
    struct kvl_tune_result *best; /* so far */
};

kvl_status kvl_tune_poll(void) { return kvl_interrupted() ? kvl_fail(KVL_E_INTERRUPTED, "interrupted") : KVL_OK; }

/* ---- timing ---- */

static kvl_status time_runs(struct search *s, void *made, size_t part, uint64_t runs, uint64_t *ns)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_device_finish(s->device));
    const uint64_t start = kvl_now_ns();
    for (uint64_t i = 0; i < runs; i++) KVL_TRY(s->problem->run(s->self, made, part));
    KVL_TRY(kvl_device_finish(s->device));
    *ns = kvl_now_ns() - start;
    KVL_TRY(kvl_tune_poll());
done:
    return status;
}

/* Runs of a timing: by the yardstick, once it is warm. */
static kvl_status calibrate(struct search *s)
{
    kvl_status status = KVL_OK;
    for (size_t part = 0; part < s->problem->n_parts; part++) {
        uint64_t ns;
        KVL_TRY(time_runs(s, s->yardstick, part, 1, &ns));
        for (s->runs[part] = 1;; s->runs[part] *= 2) {
            KVL_TRY(time_runs(s, s->yardstick, part, s->runs[part], &ns));
            if (ns >= least_sample_ns) break;
        }
    }
done:
    return status;
}

struct timing {
    double ratio, quartile, metric;
};

/* Over pairs of timings of one part: the candidate's time to that of the yardstick, median and upper quartile, and its metric. Who goes
 * first changes from pair to pair. A candidate that is far behind at first is not timed again. */
static kvl_status time_part(struct search *s, void *made, size_t part, uint32_t pairs, struct timing *out)
{
    const float hopeless = 3.0f;
    kvl_status status = KVL_OK;
    float ratios[2 * MOST_PAIRS], metrics[2 * MOST_PAIRS];
    uint64_t ns[2]; /* yardstick, candidate */
    size_t n = 0;
    KVL_TRY(time_runs(s, made, part, 1, &ns[1])); /* warm-up */
    while (n < pairs) {
        for (size_t i = 0; i < 2; i++) {
            const size_t who = (i + n) % 2;
            KVL_TRY(time_runs(s, who == 0 ? s->yardstick : made, part, s->runs[part], &ns[who]));
        }
        ratios[n] = (float)((double)ns[1] / (double)ns[0]);
        metrics[n] = (float)(s->problem->work(s->self, part) * (double)s->runs[part] / ((double)ns[1] * 1e-9));
        if (ratios[n++] > hopeless) break;
    }
    out->ratio = kvl_quantile(ratios, n, 0.5);
    out->quartile = kvl_quantile(ratios, n, 0.75);
    out->metric = kvl_quantile(metrics, n, 0.5);
done:
    return status;
}

/* Geometric means over the parts. */
static kvl_status time_all(struct search *s, void *made, uint32_t pairs, struct kvl_tune_step *step)
{
    kvl_status status = KVL_OK;
    const double n = (double)s->problem->n_parts;
    struct timing logs = {0};
    for (size_t part = 0; part < s->problem->n_parts; part++) {
        struct timing timing;
        KVL_TRY(time_part(s, made, part, pairs, &timing));
        logs.ratio += log(timing.ratio);
        logs.quartile += log(timing.quartile);
        logs.metric += log(timing.metric);
    }
    step->ratio = exp(logs.ratio / n);
    step->quartile = exp(logs.quartile / n);
    step->metric = exp(logs.metric / n);
done:
    return status;
}

/* ---- candidates ---- */

/* Builds, checks and times. What goes wrong with a candidate is its rejection, and no error. */
static kvl_status measure(struct search *s, const struct kvl_setting *setting, bool first, uint32_t pairs, struct kvl_tune_step *step)
{
    kvl_status status = KVL_OK;
    void *made = NULL;
    kvl_device_tune(s->device, s->kernel, setting, "kvlab tune");
    KVL_TRY(kvl_setting_check(s->kernel, setting, kvl_device_caps(s->device)));
    KVL_TRY(s->problem->make(s->self, &made));
    KVL_TRY(kvl_tune_poll());
    KVL_TRY(s->problem->check(s->self, made, first, !first && !kvl_setting_reorders(s->kernel, setting)));
    KVL_TRY(time_all(s, made, pairs, step));
done:
    s->problem->drop(&made);
    return status;
}

static bool is_faster(const struct kvl_tune_step *step, double ratio)
{
    return step->ratio < ratio * (1.0 - KVL_TUNE_MARGIN) && step->quartile < ratio;
}

/* One candidate; takes it if it is enough faster than the best. */
static kvl_status try_setting(struct search *s, const struct kvl_setting *setting)
{
    char reason[256] = "";
    struct kvl_tune_step step = {.kernel = s->kernel, .setting = setting, .rejected = reason};
    const bool first = s->best->n_tried++ == 0;
    const kvl_status status = measure(s, setting, first, s->options->pairs, &step);
    if (status != KVL_OK) {
        if (first || status == KVL_E_INTERRUPTED || status == KVL_E_MEMORY) return status;
        snprintf(reason, sizeof reason, "%.*s", (int)strcspn(kvl_error_text(), "\n"), kvl_error_text());
        kvl_error_clear();
        step.ratio = 0.0;
        s->best->n_rejected++;
    }
    if (first && s->problem->make_yardstick == s->problem->make) step.ratio = step.quartile = 1.0; /* it was timed beside itself */
    step.taken = status == KVL_OK && (first || is_faster(&step, s->best->ratio));
    if (first) {
        s->best->default_ratio = step.ratio;
        s->best->default_metric = step.metric;
    }
    if (step.taken) {
        s->best->setting = *setting;
        s->best->ratio = step.ratio;
        s->best->metric = step.metric;
    }
    s->fn(s->context, &step);
    return KVL_OK;
}

static bool may_go_on(const struct search *s) { return s->best->n_tried < s->options->limit; }

/* The kernel's own beginnings. */
static kvl_status try_attempts(struct search *s)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < s->kernel->n_attempts && may_go_on(s); i++) {
        struct kvl_setting setting;
        KVL_TRY(kvl_setting_parse(s->kernel, s->kernel->attempt[i], &setting));
        KVL_TRY(try_setting(s, &setting));
    }
done:
    return status;
}

/* One tunable at a time: each legal value beside the best setting so far. */
static kvl_status try_neighbours(struct search *s)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < s->kernel->n_tunables; i++) {
        const struct kvl_setting around = s->best->setting;
        for (size_t choice = 0; choice < s->kernel->tunable[i].n_values && may_go_on(s); choice++) {
            struct kvl_setting setting = around;
            if (around.choice[i] == choice) continue;
            setting.choice[i] = (uint8_t)choice;
            if (kvl_setting_check(s->kernel, &setting, kvl_device_caps(s->device)) == KVL_OK)
                KVL_TRY(try_setting(s, &setting));
            else kvl_error_clear();
        }
    }
done:
    return status;
}

/* Times the best once more beside the defaults: a lucky timing must not become an entry. */
static kvl_status confirm(struct search *s)
{
    kvl_status status = KVL_OK;
    const struct kvl_setting defaults = {0};
    struct kvl_tune_step again = {0};
    if (memcmp(&s->best->setting, &defaults, sizeof defaults) == 0) return KVL_OK;
    KVL_TRY(measure(s, &s->best->setting, false, 2 * s->options->pairs, &again));
    s->best->ratio = again.ratio;
    s->best->metric = again.metric;
    if (is_faster(&again, s->best->default_ratio)) return KVL_OK;
    s->best->setting = defaults;
    s->best->ratio = s->best->default_ratio;
    s->best->metric = s->best->default_metric;
done:
    return status;
}

kvl_status kvl_tune_run(struct kvl_device *device, const struct kvl_tune_kernel *kernel, const struct kvl_tune_shape *shape,
                        const struct kvl_tune_options *options, kvl_tune_fn fn, void *context, struct kvl_tune_result *out)
{
    kvl_status status = KVL_OK;
    const struct kvl_tuning before = *kvl_device_tuning(device);
    const struct kvl_setting defaults = {0};
    *out = (struct kvl_tune_result){0};
    struct search s = {.device = device,
                       .kernel = kernel,
                       .problem = problem_of(kernel->name),
                       .options = options,
                       .fn = fn,
                       .context = context,
                       .best = out};
    kvl_device_tune(device, kernel, &defaults, "kvlab tune");
    KVL_TRY(s.problem->open(device, shape, &s.self));
    KVL_TRY(s.problem->make_yardstick(s.self, &s.yardstick));
    KVL_TRY(calibrate(&s));
    KVL_TRY(try_setting(&s, &defaults));
    KVL_TRY(try_attempts(&s));
    KVL_TRY(try_neighbours(&s));
    KVL_TRY(confirm(&s));
done:
    s.problem->drop(&s.yardstick);
    s.problem->close(&s.self);
    kvl_device_restore(device, &before);
    if (status == KVL_OK) kvl_device_tune(device, kernel, &out->setting, "kvlab tune");
    return status;
}
