/* The texts that xcheck compiles: what the cache and the model would build on a GPU. */
#include "compose.h"
#include "file.h"
#include "linear.h"
#include "mem.h"
#include "registry.h"
#include "xcheck.h"
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* No optional capability: the text that runs everywhere. */
static const struct kvl_caps gpu = {.type = KVL_DEVICE_GPU, .max_work_group = 256, .float_width = 1};

/* Shapes of SmolLM2-135M and of Llama-3-8B. */
static const struct kvl_cache_dims shapes[] = {
    {.n_layer = 2, .n_head = 9, .n_kv_head = 3, .head_dim = 64},
    {.n_layer = 2, .n_head = 32, .n_kv_head = 8, .head_dim = 128},
};

/* Compositions that no codec shows alone. */
static const struct {
    const char *spec, *name, *extra; /* extra: a file that goes with this composition alone, or NULL */
} mixes[] = {
    {"f16", "f16", "gather.cl"}, /* the rows of a prompt that is compressed */
    {"int4 keep=knorm budget=ada(kept=0.5) pos=compact", "int4+evict"},
    {"int4 keep=knorm budget=uniform(tokens=64) when=full", "int4+when", "evict.cl"},
    {"int4 read=pages(tokens=64)", "int4+pages", "pages.cl"},
    {"k=int8 v=int4", "int8+int4"},
    {"int4 rot=hadamard", "int4+hadamard"},
    {"int4 rope=pre korder=hf", "int4+pre-rope"},
    {"latent(rank=32,of=int4) rot=hadamard", "int4+latent"},
    {"latent(rank=32,layers=2,of=int4) rot=hadamard", "int4+shared"},
};

/* Programs that are always the same. Files and options as their callers pass them on a GPU. */
enum { MOST_FILES = 3 };
static const struct other {
    const char *file[MOST_FILES], *options; /* the last file gives the name */
} others[] = {
    {{"platform.cl", "rms.cl", "norm.cl"}, "-DKVL_W_LANES=1 -DKVL_ITEMS=256"},
    {{"logprob.cl"}, "-DKVL_WG=256 -DKVL_LANES=4"},
    {{"measure.cl"}, "-DKVL_WIDTH=4 -DKVL_CHAINS=12 -DKVL_FMA=1"},
};

struct list {
    struct kvl_xcheck_program *program;
    size_t n, room;
};

/* "-DA=1 -DB=2" as lines of text. */
static kvl_status append_defines(const char *options, struct kvl_text *text)
{
    kvl_status status = KVL_OK;
    while (*(options += strspn(options, " ")) != '\0') {
        const int length = (int)strcspn(options, " "), name = (int)strcspn(options, "=");
        KVL_TRY(kvl_text_printf(text, "#define %.*s %.*s\n", name - 2, options + 2, length - name - 1, options + name + 1));
        options += length;
    }
done:
    return status;
}

/* Of what a GPU's compiler takes of the text: macros applied, branches of processors and comments left out, no spaces. So a change that is for processors alone,
 * or of a comment, does not make rows of the table old. The C compiler of this machine does it (cc, clang's macros and OpenCL's version defined). */
static kvl_status digest_of(const struct kvl_text *text, char hex[65])
{
    kvl_status status = KVL_OK;
    struct kvl_text taken = {0};
    char command[128], line[4096], word[sizeof line];
    FILE *cc = NULL, *file = tmpfile(); /* it has no name, so nothing is left of it */
    if (file == NULL || fwrite(text->data, 1, text->size, file) != text->size || fflush(file) != 0)
        KVL_TRY(kvl_fail(KVL_E_IO, "cannot write a temporary file: %s", strerror(errno)));
    snprintf(command, sizeof command, "cc -E -P -undef -x c -D__OPENCL_VERSION__=120 -D__clang__ - </dev/fd/%d", fileno(file));
    if ((cc = popen(command, "r")) == NULL) KVL_TRY(kvl_fail(KVL_E_IO, "cannot start cc: %s", strerror(errno)));
    while (fgets(line, sizeof line, cc) != NULL) {
        size_t n = 0;
        for (const char *c = line; *c; c++)
            if (!isspace((unsigned char)*c)) word[n++] = *c;
        KVL_TRY(kvl_text_append(&taken, word, n));
    }
    const int result = pclose(cc);
    cc = NULL;
    if (result != 0 || taken.size == 0) KVL_TRY(kvl_fail(KVL_E_VERIFY, "cc -E refused the text (or there is no cc in $PATH)"));
    KVL_TRY(kvl_sha256(taken.data, taken.size, hex));
done:
    if (cc) pclose(cc);
    if (file) fclose(file);
    kvl_text_free(&taken);
    return status;
}

/* Programs with equal texts are taken once. */
static kvl_status add(struct list *list, const char *name, const char *options, const struct kvl_source *parts, size_t n_parts)
{
    kvl_status status = KVL_OK;
    struct kvl_text text = {0};
    struct kvl_xcheck_program program = {0};
    char digest[65];
    KVL_TRY(append_defines(options, &text));
    KVL_TRY(kvl_program_text(&gpu, parts, n_parts, &text));
    KVL_TRY(digest_of(&text, digest));
    snprintf(program.name, sizeof program.name, "%s", name);
    snprintf(program.digest, sizeof program.digest, "%.16s", digest);
    for (size_t i = 0; i < list->n; i++)
        if (strcmp(list->program[i].digest, program.digest) == 0) goto done;
    if (list->n == list->room) {
        KVL_TRY(kvl_realloc(&list->program, list->room + 64, sizeof program));
        list->room += 64;
    }
    program.text = text.data; /* moved */
    text = (struct kvl_text){0};
    list->program[list->n++] = program;
done:
    kvl_text_free(&text);
    return status;
}

static kvl_status add_cache_program(struct list *list, const struct kvl_cache_plan *plan, const char *codecs, const char *file,
                                    uint32_t tile)
{
    kvl_status status = KVL_OK;
    struct kvl_composition composition = {0};
    char name[96];
    snprintf(name, sizeof name, "%s %s d%u x%u", file, codecs, plan->dims.head_dim, tile);
    KVL_TRY(kvl_compose(plan, plan->layer, file, tile, kvl_compose_target_of(&gpu), &composition));
    KVL_TRY(add(list, name, "", composition.parts, KVL_COMPOSITION_PARTS));
done:
    kvl_composition_free(&composition);
    return status;
}

static kvl_status add_cache_programs(struct list *list, const char *spec_text, const char *codecs, const char *extra,
                                     const struct kvl_cache_dims *dims)
{
    kvl_status status = KVL_OK;
    struct kvl_spec *spec = NULL;
    struct kvl_cache_plan plan = {0};
    const struct kvl_cache_limits limits = {.max_alloc_bytes = 1ull << 30, .compute_units = 32};
    KVL_TRY(kvl_spec_parse(spec_text, &spec));
    const struct kvl_cache_config config = {.spec = spec, .n_ctx = 1024, .ubatch = 512, .protocol = KVL_P2_WRITE_THEN_READ};
    KVL_TRY(kvl_cache_plan_make(dims, &config, &limits, &plan));
    KVL_TRY(add_cache_program(list, &plan, codecs, "store.cl", 1));
    if (extra != NULL) KVL_TRY(add_cache_program(list, &plan, codecs, extra, 1));
    KVL_TRY(add_cache_program(list, &plan, codecs, "attend.cl", 1));
    KVL_TRY(add_cache_program(list, &plan, codecs, "attend.cl", kvl_prefill_tile(&plan, plan.layer)));
done:
    kvl_cache_plan_free(&plan);
    kvl_spec_free(&spec);
    return status;
}

static kvl_status add_codec(struct list *list, const struct kvl_codec *codec, const struct kvl_cache_dims *dims)
{
    char spec[128];
    const char *k = codec->roles & KVL_ROLE_K ? codec->head.name : "f16", *v = codec->roles & KVL_ROLE_V ? codec->head.name : "f16";
    snprintf(spec, sizeof spec, "k=%s v=%s", k, v);
    return add_cache_programs(list, spec, codec->head.name, NULL, dims);
}

static kvl_status add_linear(struct list *list, const struct kvl_quant_type *type)
{
    kvl_status status;
    struct kvl_linear_program program;
    for (size_t i = 0; (status = kvl_linear_program(NULL, type, i, &program)) == KVL_OK; i++) {
        char name[96];
        snprintf(name, sizeof name, "%s %s %s", program.parts[KVL_LINEAR_PARTS - 1].name, type->name, program.variant);
        if (!program.vectors_only) status = add(list, name, program.options.data, program.parts, KVL_LINEAR_PARTS);
        kvl_text_free(&program.options);
        if (status != KVL_OK) break;
    }
    return status == KVL_SKIP ? KVL_OK : status;
}

static kvl_status add_other(struct list *list, const struct other *other)
{
    char name[96];
    size_t n = 0;
    struct kvl_source parts[MOST_FILES];
    for (; n < MOST_FILES && other->file[n] != NULL; n++)
        parts[n] = (struct kvl_source){other->file[n], kvl_source_text(other->file[n])};
    snprintf(name, sizeof name, "%s %s", parts[n - 1].name, other->options);
    return add(list, name, other->options, parts, n);
}

kvl_status kvl_xcheck_programs(struct kvl_xcheck_program **out, size_t *n)
{
    kvl_status status = KVL_OK;
    struct list list = {0};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (size_t i = 0; i < kvl_registry_count(); i++) {
            const struct kvl_plugin_head *plugin = kvl_registry_at(i);
            const struct kvl_codec *codec = (const struct kvl_codec *)plugin;
            if (plugin->kind == KVL_KIND_CODEC && codec->roles & (KVL_ROLE_K | KVL_ROLE_V))
                KVL_TRY(add_codec(&list, codec, shapes + s));
        }
        for (size_t i = 0; i < sizeof mixes / sizeof *mixes; i++)
            KVL_TRY(add_cache_programs(&list, mixes[i].spec, mixes[i].name, mixes[i].extra, shapes + s));
    }
    for (size_t i = 0; i < kvl_n_quant_types; i++) KVL_TRY(add_linear(&list, kvl_quant_types + i));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) KVL_TRY(add_other(&list, others + i));
    *out = list.program;
    *n = list.n;
    list = (struct list){0};
done:
    kvl_xcheck_programs_free(&list.program, list.n);
    return status;
}

void kvl_xcheck_programs_free(struct kvl_xcheck_program **programs, size_t n)
{
    for (size_t i = 0; *programs != NULL && i < n; i++) kvl_free(&(*programs)[i].text);
    kvl_free(programs);
}
