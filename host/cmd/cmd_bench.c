/* kvlab bench: prefill and decode speed of cache strategies, with the memory they take and, on request, every kernel's share. */
#include "bench.h"
#include "calibration.h"
#include "cmd.h"
#include "log.h"
#include "mem.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum format { FORMAT_MD, FORMAT_CSV, FORMAT_JSON };

struct args {
    const char *model, *n_prompt, *n_gen, *depth, *device, *output;
    struct kvl_list kv;
    int64_t repetitions, warmup, ubatch, sequences, seed;
    int format;
    bool exact, allow_long, kernels, synthetic, no_run_file, json;
};

#define AT(member) offsetof(struct args, member)

/* clang-format off */
static const struct kvl_opt options[] = {
    KVL_OPTION_MODEL(struct args),
    {.name = "n-prompt", .letter = 'p', .type = KVL_OPT_TEXT, .offset = AT(n_prompt), .metavar = "N,...",
     .help = "tokens of a prefill, 0 = no prefill", .fallback = "512"},
    {.name = "n-gen", .letter = 'n', .type = KVL_OPT_TEXT, .offset = AT(n_gen), .metavar = "N,...",
     .help = "tokens of a decode, 0 = no decode", .fallback = "128"},
    {.name = "depth", .letter = 'd', .type = KVL_OPT_TEXT, .offset = AT(depth), .metavar = "N,...",
     .help = "tokens in the cache before", .fallback = "0"},
    {.name = "kv", .type = KVL_OPT_LIST, .offset = AT(kv), .metavar = "SPEC",
     .help = "cache strategy, may be given several times (default: f16)"},
    {.name = "repetitions", .letter = 'r', .type = KVL_OPT_INT, .offset = AT(repetitions), .metavar = "N",
     .help = "samples of every test", .fallback = "5", .min = 1, .max = 1e6},
    {.name = "warmup", .type = KVL_OPT_INT, .offset = AT(warmup), .metavar = "N",
     .help = "repetitions before them that do not count (the first one builds kernels)", .fallback = "1", .min = 0, .max = 1e6},
    {.name = "ubatch", .type = KVL_OPT_INT, .offset = AT(ubatch), .metavar = "N",
     .help = "prompt tokens appended at once", .fallback = "512", .min = 1, .max = 1 << 20},
    {.name = "sequences", .type = KVL_OPT_INT, .offset = AT(sequences), .metavar = "N",
     .help = "sequences of equal length that are prefilled and decoded in step, each with a cache of its own; rates count all their tokens",
     .fallback = "1", .min = 1, .max = 1024},
    {.name = "seed", .type = KVL_OPT_INT, .offset = AT(seed), .metavar = "N",
     .help = "seed of the random tokens", .fallback = "0", .min = 0, .max = 9e15},
    {.name = "synthetic", .type = KVL_OPT_FLAG, .offset = AT(synthetic),
     .help = "reach a depth with random keys and values instead of a prefill (for long caches)"},
    {.name = "format", .type = KVL_OPT_CHOICE, .offset = AT(format),
     .help = "of the table on stdout", .fallback = "md", .choices = "md|csv|json"},
    {.name = "kernels", .type = KVL_OPT_FLAG, .offset = AT(kernels),
     .help = "time every kernel, and what lies between them (slower)"},
    KVL_OPTION_EXACT(struct args),
    {.name = "allow-long", .type = KVL_OPT_FLAG, .offset = AT(allow_long), .help = "allow positions beyond the trained context"},
    KVL_OPTION_DEVICE(struct args),
    KVL_OPTION_OUTPUT(struct args),
    {.name = "no-run-file", .type = KVL_OPT_FLAG, .offset = AT(no_run_file), .help = "keep no run file"},
    {.name = "json", .type = KVL_OPT_FLAG, .offset = AT(json), .help = "the same as --format json"},
};
/* clang-format on */

/* ---- the tests: every length at every depth ---- */

enum { MOST_NUMBERS = sizeof(((struct kvl_numbers_given *)0)->value) / sizeof(double), MOST_TESTS = 2 * MOST_NUMBERS * MOST_NUMBERS, MOST_TOKENS = 1 << 20 };

struct run {
    const struct args *args;
    struct kvl_rig rig;
    struct kvl_bench_test test[MOST_TESTS];
    size_t n_tests;
    int kv_width; /* of the table's first column */
    cJSON *array; /* FORMAT_JSON */
    enum format format;
};

static kvl_status list_tests(struct run *run)
{
    kvl_status status = KVL_OK;
    struct kvl_numbers_given prompt = {0}, gen = {0}, depth = {0};
    KVL_TRY(kvl_opt_numbers("-p", run->args->n_prompt, 0, MOST_TOKENS, true, &prompt));
    KVL_TRY(kvl_opt_numbers("-n", run->args->n_gen, 0, MOST_TOKENS, true, &gen));
    KVL_TRY(kvl_opt_numbers("-d", run->args->depth, 0, MOST_TOKENS, true, &depth));
    for (size_t d = 0; d < depth.n; d++) {
        for (size_t i = 0; i < prompt.n; i++)
            if (prompt.value[i] != 0)
                run->test[run->n_tests++] = (struct kvl_bench_test){.n_prompt = (uint32_t)prompt.value[i], .depth = (uint32_t)depth.value[d]};
        for (size_t i = 0; i < gen.n; i++)
            if (gen.value[i] != 0) run->test[run->n_tests++] = (struct kvl_bench_test){.n_gen = (uint32_t)gen.value[i], .depth = (uint32_t)depth.value[d]};
    }
    if (run->n_tests == 0) status = kvl_fail(KVL_E_USAGE, "-p 0 and -n 0 leave nothing to time: give one of them a length");
done:
    return status;
}

/* ---- the table ---- */

struct strategy { /* what is printed of one --kv */
    const struct run *run;
    const struct kvl_spec *spec;
    struct kvl_text resolved;
    struct kvl_record *record;
    uint32_t n_ctx, ubatch;
};

static void print_md_head(const struct run *run)
{
    printf("| %-*s | %-14s | %10s | %8s | %11s | %12s | %8s |\n", run->kv_width, "kv", "test", "tokens/s", "sd", "bytes/token",
           "resident MiB", "read MiB");
    printf("| ");
    for (int i = 0; i < run->kv_width; i++) putchar('-');
    puts(" | -------------- | ---------: | -------: | ----------: | -----------: | -------: |");
}

static void print_sd(const struct kvl_bench_result *r, int width)
{
    if (isnan(r->sd))
        printf("%*s", width, "-");
    else
        printf("%*.2f", width, r->sd);
}

static void print_md_row(const struct strategy *s, const struct kvl_bench_result *r)
{
    printf("| %-*s | %-14s | %10.2f | ", s->run->kv_width, kvl_spec_given(s->spec), r->name, r->tokens_per_s);
    print_sd(r, 8);
    printf(" | %11llu | %12.2f | %8.2f |\n", (unsigned long long)r->bytes.bytes_per_token, (double)r->bytes.resident / 1048576.0,
           (double)r->bytes.token_read / 1048576.0);
}

static void print_csv_head(void)
{
    puts("kv,kv_resolved,test,n_prompt,n_gen,depth,sequences,ubatch,n_ctx,exact,repetitions,tokens_per_s,sd,bytes_per_token,payload_bytes,"
         "resident_bytes,peak_bytes,token_read_bytes,device,model");
}

/* RFC 4180. */
static void print_quoted(const char *text, char after)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"') putchar('"');
        putchar(*text);
    }
    putchar('"');
    putchar(after);
}

static void print_csv_row(const struct strategy *s, const struct kvl_bench_result *r)
{
    print_quoted(kvl_spec_given(s->spec), ',');
    print_quoted(s->resolved.data, ',');
    printf("%s,%u,%u,%u,%u,%u,%u,%d,%zu,%.6g,", r->name, r->test.n_prompt, r->test.n_gen, r->test.depth, (unsigned)s->run->args->sequences, s->ubatch, s->n_ctx,
           s->run->args->exact, r->n_samples, r->tokens_per_s);
    if (!isnan(r->sd)) printf("%.6g", r->sd);
    printf(",%llu,%llu,%llu,%llu,%llu,", (unsigned long long)r->bytes.bytes_per_token, (unsigned long long)r->bytes.payload,
           (unsigned long long)r->bytes.resident, (unsigned long long)r->bytes.peak, (unsigned long long)r->bytes.token_read);
    print_quoted(kvl_device_caps(s->run->rig.device)->name, ',');
    print_quoted(s->run->rig.model->name, '\n');
}

/* ---- JSON ---- */

static kvl_status kernels_json(const struct strategy *s, const struct kvl_bench_result *r, cJSON *object)
{
    kvl_status status = KVL_OK;
    struct kvl_profile *p = kvl_record_profile(s->record);
    const struct kvl_phase_times *phase = kvl_profile_phase(p, r->name);
    if (!phase) return KVL_OK;
    const struct kvl_fact times[] = {
        {"wall_ns", (double)phase->wall_ns}, {"span_ns", (double)phase->span_ns}, {"busy_ns", (double)phase->busy_ns}};
    KVL_TRY(kvl_json_facts(object, times, sizeof times / sizeof *times));
    cJSON *array = cJSON_AddArrayToObject(object, "kernels");
    for (size_t i = 0; i < p->n_kernels; i++) {
        struct kvl_kernel_times *k = &p->kernel[i];
        if (&p->phase[k->phase] != phase) continue;
        struct kvl_kernel_summary sum;
        kvl_kernel_summarize(p, k, &sum);
        const struct kvl_fact facts[] = {{"calls", (double)k->n}, {"ns_median", sum.ns_median}, {"ns_sum", sum.ns_sum},
                                         {"gbps", sum.gbps},      {"gflops", sum.gflops},       {"peak_share", sum.peak_share}};
        cJSON *row = cJSON_CreateObject();
        if (!row || !cJSON_AddItemToArray(array, row) || !cJSON_AddStringToObject(row, "name", k->kernel))
            return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
        KVL_TRY(kvl_json_facts(row, facts, sizeof facts / sizeof *facts));
    }
done:
    return status;
}

static kvl_status add_json_row(const struct strategy *s, const struct kvl_bench_result *r)
{
    kvl_status status = KVL_OK;
    const size_t n_bytes = 5;
    const struct kvl_fact facts[] = {
        {"bytes_per_token", (double)r->bytes.bytes_per_token},
        {"payload_bytes", (double)r->bytes.payload},
        {"resident_bytes", (double)r->bytes.resident},
        {"peak_bytes", (double)r->bytes.peak},
        {"token_read_bytes", (double)r->bytes.token_read},
        {"n_prompt", r->test.n_prompt},
        {"n_gen", r->test.n_gen},
        {"depth", r->test.depth},
        {"sequences", (double)s->run->args->sequences},
        {"n_ctx", s->n_ctx},
        {"tokens_per_s", r->tokens_per_s},
        {"sd", r->sd},
    };
    cJSON *object = cJSON_CreateObject();
    if (!object || !cJSON_AddItemToArray(s->run->array, object) || !cJSON_AddStringToObject(object, "test", r->name))
        return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    KVL_TRY(kvl_record_json(s->record, object));
    for (size_t i = 0; i < n_bytes; i++) cJSON_DeleteItemFromObject(object, facts[i].name); /* the run's; here are the test's */
    KVL_TRY(kvl_json_facts(object, facts, sizeof facts / sizeof *facts));
    cJSON *samples = cJSON_AddArrayToObject(object, "samples_ns");
    for (size_t i = 0; i < r->n_samples; i++) {
        cJSON *number = cJSON_CreateNumber((double)r->sample_ns[i]);
        if (!number || !cJSON_AddItemToArray(samples, number)) return kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
    }
    KVL_TRY(kernels_json(s, r, object));
done:
    return status;
}

static kvl_status show_result(const struct strategy *s, const struct kvl_bench_result *r)
{
    if (s->run->format == FORMAT_JSON) return add_json_row(s, r);
    if (s->run->format == FORMAT_CSV)
        print_csv_row(s, r);
    else
        print_md_row(s, r);
    fflush(stdout); /* a row is there as soon as it is known */
    return KVL_OK;
}

/* ---- kernels ---- */

static int by_time(const void *a, const void *b)
{
    double sum[2] = {0.0, 0.0};
    const struct kvl_kernel_times *k[2] = {*(struct kvl_kernel_times *const *)a, *(struct kvl_kernel_times *const *)b};
    for (int i = 0; i < 2; i++)
        for (size_t j = 0; j < k[i]->n; j++) sum[i] += k[i]->ns[j];
    return (sum[0] < sum[1]) - (sum[0] > sum[1]);
}

static void print_share(double value, double share)
{
    if (value > 0.0)
        printf(" %8.1f | %6.1f %% |", value, 100.0 * share);
    else
        printf(" %8s | %8s |", "-", "-");
}

static void print_phase(struct kvl_profile *p, size_t index, struct kvl_kernel_times **kernel, size_t n)
{
    const struct kvl_phase_times *t = &p->phase[index];
    const double wall = (double)t->wall_ns, span = (double)t->span_ns, busy = (double)t->busy_ns;
    printf("\n%s: %.2f ms a repetition: in kernels %.1f %%, between them %.1f %%, host alone (before a token's first, after its last) %.1f %%\n\n",
           t->name, wall * 1e-6 / (double)t->steps, 100.0 * busy / wall, 100.0 * (span - busy) / wall, 100.0 * (wall - span) / wall);
    puts("| kernel                   |    calls | median us |   sum ms | of sum   |     GB/s | of peak  |  GFLOP/s | of peak  |");
    puts("| ------------------------ | -------: | --------: | -------: | -------: | -------: | -------: | -------: | -------: |");
    for (size_t i = 0; i < n; i++) {
        struct kvl_kernel_summary s;
        if (kernel[i]->phase != index) continue;
        kvl_kernel_summarize(p, kernel[i], &s);
        printf("| %-24s | %8zu | %9.1f | %8.1f | %6.1f %% |", kernel[i]->kernel, kernel[i]->n, s.ns_median * 1e-3, s.ns_sum * 1e-6,
               100.0 * s.ns_sum / busy);
        print_share(s.gbps, s.read_share);
        print_share(s.gflops, s.fma_share);
        putchar('\n');
    }
}

static kvl_status print_kernels(struct kvl_profile *p)
{
    struct kvl_kernel_times **order = NULL;
    const kvl_status status = kvl_alloc(&order, p->n_kernels, sizeof *order);
    if (status != KVL_OK) return status;
    for (size_t i = 0; i < p->n_kernels; i++) order[i] = &p->kernel[i];
    qsort(order, p->n_kernels, sizeof *order, by_time);
    printf("\nmeasured peaks: read %.1f GB/s, multiply-add %.1f GFLOP/s, launch %.1f us\n", p->peaks.read_gbps, p->peaks.fma_gflops,
           p->peaks.launch_us);
    for (size_t i = 0; i < p->n_phases; i++) print_phase(p, i, order, p->n_kernels);
    putchar('\n');
    kvl_free(&order);
    return KVL_OK;
}

/* ---- running ---- */

/* -o of the index-th of n strategies: each has a run file of its own, x.h5 becomes x-1.h5, x-2.h5 ... */
static kvl_status output_path(const char *output, size_t index, size_t n, struct kvl_text *path)
{
    if (!output) return KVL_OK;
    if (n == 1) return kvl_text_printf(path, "%s", output);
    const size_t size = strlen(output), stem = size > 3 && strcmp(output + size - 3, ".h5") == 0 ? size - 3 : size;
    return kvl_text_printf(path, "%.*s-%zu%s", (int)stem, output, index + 1, output + stem);
}

static kvl_status open_record(struct strategy *s, const char *path)
{
    const struct args *args = s->run->args;
    const struct kvl_fact settings[] = {
        {"repetitions", (double)args->repetitions, true},
        {"warmup", (double)args->warmup, true},
        {"sequences", (double)args->sequences, true},
        {"seed", (double)args->seed, true},
        {"kernels", args->kernels, true},
        {"synthetic", args->synthetic, true},
    };
    const struct kvl_record_config config = {
        .command = "bench",
        .output = path,
        .no_file = args->no_run_file,
        .profile = args->kernels,
        .device = s->run->rig.device,
        .model = s->run->rig.model,
        .spec = s->spec,
        .protocol = KVL_P2_WRITE_THEN_READ,
        .ubatch = s->ubatch,
        .n_ctx = s->n_ctx,
        .n_sequence = (uint32_t)args->sequences,
        .exact = args->exact,
        .settings = settings,
        .n_settings = sizeof settings / sizeof *settings,
        .table = &kvl_bench_table,
    };
    return kvl_record_open(&config, &s->record);
}

static kvl_status run_tests(struct strategy *s, struct kvl_bench *bench)
{
    kvl_status status = KVL_OK;
    struct kvl_bench_result result = {0};
    for (size_t i = 0; i < s->run->n_tests; i++) {
        KVL_TRY(kvl_bench_run(bench, i, s->record, &result));
        KVL_TRY(show_result(s, &result));
        kvl_free(&result.sample_ns);
    }
    KVL_TRY(kvl_record_peaks(s->record));
    if (s->run->args->kernels && s->run->format == FORMAT_MD) KVL_TRY(print_kernels(kvl_record_profile(s->record)));
done:
    kvl_free(&result.sample_ns);
    return status;
}

/* A table of its own for each strategy if kernel times stand between them. */
static void print_head(const struct strategy *s, bool first)
{
    const struct run *run = s->run;
    const struct args *args = run->args;
    if (run->format == FORMAT_CSV && first) print_csv_head();
    if (run->format != FORMAT_MD || !(first || args->kernels)) return;
    if (first)
        printf("%s on %s%s; cache for %u positions, ubatch %u, %lld repetitions\n\n", run->rig.model->name,
               kvl_device_caps(run->rig.device)->name, args->exact ? ", exact" : "", s->n_ctx, s->ubatch,
               (long long)args->repetitions);
    print_md_head(run);
}

static kvl_status run_strategy(struct run *run, const struct kvl_spec *spec, bool first, const char *path)
{
    kvl_status status = KVL_OK;
    const struct args *args = run->args;
    struct kvl_bench *bench = NULL;
    struct strategy s = {.run = run, .spec = spec};
    const struct kvl_bench_config config = {
        .spec = spec,
        .test = run->test,
        .n_tests = run->n_tests,
        .ubatch = (uint32_t)args->ubatch,
        .n_sequence = (uint32_t)args->sequences,
        .repetitions = (uint32_t)args->repetitions,
        .warmup = (uint32_t)args->warmup,
        .seed = (uint64_t)args->seed,
        .synthetic = args->synthetic,
        .exact = args->exact,
        .allow_long = args->allow_long,
        .kernels = args->kernels,
    };
    s.n_ctx = kvl_bench_n_ctx(&config);
    s.ubatch = config.ubatch < s.n_ctx ? config.ubatch : s.n_ctx;
    KVL_TRY(kvl_spec_resolved(spec, &s.resolved));
    KVL_TRY(kvl_bench_open(&run->rig, &config, &bench));
    KVL_TRY(open_record(&s, path));
    print_head(&s, first);
    KVL_TRY(run_tests(&s, bench));
done:
    status = kvl_record_close(&s.record, status);
    kvl_bench_close(&bench);
    kvl_text_free(&s.resolved);
    return status;
}

static kvl_status run_all(struct run *run, struct kvl_spec *const *spec, size_t n)
{
    kvl_status status = KVL_OK;
    struct kvl_text path = {0};
    for (size_t i = 0; i < n; i++) {
        kvl_text_free(&path);
        KVL_TRY(output_path(run->args->output, i, n, &path));
        KVL_TRY(run_strategy(run, spec[i], i == 0, path.data));
    }
    if (run->array) KVL_TRY(kvl_json_print(run->array));
done:
    kvl_text_free(&path);
    return status;
}

static kvl_status run_bench(void *arguments, size_t n_words, char *const *words)
{
    kvl_status status = KVL_OK;
    struct args *args = arguments;
    struct kvl_spec *spec[sizeof args->kv.item / sizeof *args->kv.item] = {0};
    struct run *run = NULL;
    KVL_TRY(kvl_alloc(&run, 1, sizeof *run));
    run->args = args;
    run->format = args->json ? FORMAT_JSON : (enum format)args->format;
    if (args->kv.n == 0) args->kv.item[args->kv.n++] = "f16";
    KVL_TRY(list_tests(run));
    for (size_t i = 0; i < args->kv.n; i++) {
        KVL_TRY(kvl_spec_open(args->kv.item[i], &spec[i]));
        const int width = (int)strlen(args->kv.item[i]);
        if (width > run->kv_width) run->kv_width = width;
    }
    if (run->format == FORMAT_JSON && !(run->array = cJSON_CreateArray())) {
        status = kvl_fail(KVL_E_MEMORY, "no memory for the JSON result");
        goto done;
    }
    KVL_TRY(kvl_rig_open(args->model, args->device, &run->rig));
    KVL_TRY(run_all(run, spec, args->kv.n));
done:
    if (run) {
        kvl_rig_close(&run->rig);
        cJSON_Delete(run->array);
    }
    kvl_free(&run);
    for (size_t i = 0; i < args->kv.n; i++) kvl_spec_free(&spec[i]);
    return status;
}

const struct kvl_command kvl_cmd_bench = {
    .name = "bench",
    .summary = "speed of prefill and decode, memory, kernel times",
    .details =
        "Lists are combined: every length at every depth for every --kv. Tests are named pp512 (prefill of 512 tokens) and tg128\n"
        "(decode of 128), @d4096 behind 4096 tokens of context. A decode waits for every token, as sampling would.\n"
        "Every --kv has a run file of its own; with several of them -o x.h5 gives x-1.h5, x-2.h5 ... in their order.\n"
        "\n"
        "  kvlab bench -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -p 512 -n 128 -d 0,4096 --kv f16 --kv int4",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .args_size = sizeof(struct args),
    .run = run_bench,
};
