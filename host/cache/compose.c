#include "compose.h"
#include <stdio.h>
#include <string.h>

enum { PAGES_EACH = 16 }; /* pages that a work-item scores where it is a group of its own */

struct kvl_compose_target kvl_compose_target_of(const struct kvl_caps *caps)
{
    return (struct kvl_compose_target){.grouped = caps->float_width == 1, .vectors = caps->float_width > 1};
}

uint32_t kvl_compose_group(const struct kvl_cache_plan *plan, struct kvl_compose_target target)
{
    return target.grouped ? plan->shape.group : 1;
}

size_t kvl_compose_page_items(uint32_t pages, size_t group)
{
    const size_t each = group == 1 ? PAGES_EACH : group;
    return (pages + each - 1) / each * group;
}

/* Tokens of an attention block: what divides the pages of both sides. */
static uint32_t block_of(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer)
{
    uint32_t block = plan->shape.block;
    for (int s = 0; s < kvl_sides(&plan->dims); s++) block = kvl_common_tokens(block, layer->side[s].dims.page_tokens);
    return block;
}

/* Where one work-item owns a tile, its block is the page, and no other tile or split can read the slot: a window's ring overwrites what a block before
 * it still has. A dense rotation of the row is too much for one work-item. */
bool kvl_compose_appends(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, uint32_t tile, struct kvl_compose_target target)
{
    bool appends = !target.grouped && tile == 1 && !plan->evicts && !plan->config.reads_stage && layer->window == 0 && kvl_sides(&plan->dims) == KVL_SIDES && !kvl_layer_projects(layer);
    for (int s = 0; s < kvl_sides(&plan->dims); s++) {
        const struct kvl_side_plan *side = &layer->side[s];
        appends = appends && side->rot_m == 0 && side->tail == 0 && side->shape.unit == 1 && side->dims.page_tokens == block_of(plan, layer);
    }
    return appends;
}

struct define_context {
    struct kvl_text *text;
    kvl_status status;
};

static void emit_define(void *context, const char *name, int64_t value)
{
    struct define_context *c = context;
    if (c->status == KVL_OK) c->status = kvl_text_printf(c->text, "#define KVL_OPT_%s %lld\n", name, (long long)value);
}

/* Undefines what a side's defines() defined, so that the next body starts clean. */
static void emit_undef(void *context, const char *name, int64_t value)
{
    struct define_context *c = context;
    (void)value;
    if (c->status == KVL_OK) c->status = kvl_text_printf(c->text, "#undef KVL_OPT_%s\n", name);
}

static kvl_status append_body(struct kvl_text *text, const struct kvl_side_plan *side, const char *role, bool is_k)
{
    kvl_status status = KVL_OK;
    const struct kvl_codec *codec = side->codec;
    struct define_context context = {.text = text};
    KVL_TRY(kvl_text_printf(text, "#define KVL_FN(name) kvl_%s_##name\n#define KVL_IS_K %d\n#define KVL_D %u\n#define KVL_P %u\n", role, is_k,
                            side->dims.head_dim, side->dims.page_tokens));
    if (codec->defines != NULL) codec->defines(side->priv, &side->dims, emit_define, &context);
    KVL_TRY(context.status);
    KVL_TRY(kvl_text_printf(text, "#line 1 \"codec %s as %s\"\n%s\n", codec->head.name, role, codec->head.device_source));
    if (codec->defines != NULL) codec->defines(side->priv, &side->dims, emit_undef, &context);
    KVL_TRY(context.status);
    KVL_TRY(kvl_text_printf(text, "#undef KVL_FN\n#undef KVL_IS_K\n#undef KVL_D\n#undef KVL_P\n"));
done:
    return status;
}

/* kvl_page(): a table entry's address in one of the slabs. */
static kvl_status append_slabs(struct kvl_text *text, uint32_t n_slabs)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_text_printf(text, "#line 1 \"slabs\"\n#define KVL_SLAB_PARAMS global uchar *slab0"));
    for (uint32_t i = 1; i < n_slabs; i++) KVL_TRY(kvl_text_printf(text, ", global uchar *slab%u", i));
    KVL_TRY(kvl_text_printf(text, "\n#define KVL_SLAB_ARGS slab0"));
    for (uint32_t i = 1; i < n_slabs; i++) KVL_TRY(kvl_text_printf(text, ", slab%u", i));
    KVL_TRY(kvl_text_printf(text, "\nglobal uchar *kvl_page(KVL_SLAB_PARAMS, ulong entry)\n{\n    const uint slab = (uint)(entry >> 56);\n"
                                  "    global uchar *base = slab0;\n"));
    for (uint32_t i = 1; i < n_slabs; i++) KVL_TRY(kvl_text_printf(text, "    if (slab == %u) base = slab%u;\n", i, i));
    KVL_TRY(kvl_text_printf(text, "    return base + (entry & 0xffffffffffffffUL);\n}\n"));
done:
    return status;
}

static kvl_status append_sizes(struct kvl_text *text, const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, uint32_t tile,
                               struct kvl_compose_target target)
{
    const bool joint = kvl_sides(&plan->dims) == 1, pre = layer->rope == KVL_STORE_PRE_ROPE;
    const struct kvl_side_plan *k = &layer->side[KVL_SIDE_K], *v = joint ? k : &layer->side[KVL_SIDE_V];
    const uint32_t g = kvl_stream_queries(plan, layer), dv = joint ? plan->dims.joint_value_dim : v->record.channels;
    const uint32_t dq = kvl_query_dim(plan, layer), da = kvl_sum_dim(plan, layer);
    const uint32_t block = block_of(plan, layer);
    const uint32_t group = kvl_compose_group(plan, target);
    const bool vectors = target.vectors && block % 16 == 0 && plan->dims.head_dim % 16 == 0 && k->record.channels % 16 == 0 && dv % 16 == 0;
    const struct {
        const char *name;
        uint32_t value;
    } sizes[] = {
        {"HD", plan->dims.head_dim}, {"DK", k->record.channels}, {"DV", dv}, {"DQ", dq}, {"DA", da}, {"JOINT", joint},
        {"H", layer->n_stream}, {"SEQUENCES", plan->dims.n_sequence}, {"HEADS", k->record.heads}, {"LAYERS", k->record.layers}, {"G", g}, {"TILE", tile}, {"NQ", g * tile},
        {"B", block}, {"SLICE", vectors ? block : 1}, {"WG", group}, {"VECTORS", vectors}, {"EXACT_HALF", !plan->config.exact},
        {"K_P", k->dims.page_tokens}, {"V_P", v->dims.page_tokens}, {"K_TABLE", k->shape.table_floats}, {"V_TABLE", v->shape.table_floats},
        {"K_AUX", k->shape.aux_floats},
        {"RAGGED", plan->evicts}, {"COMPACT", plan->evicts && layer->pos == KVL_POS_COMPACT},
        {"EVICTS", layer->cells != 0}, {"RUN", layer->running.source}, {"SHARED", layer->running.is_shared},
        {"RANKED", layer->cells != 0 && layer->pos == KVL_POS_COMPACT}, {"SLIDES", !plan->evicts && layer->pos == KVL_POS_COMPACT},
        {"K_TAIL", plan->evicts ? k->tail : 0}, {"K_UNIT", plan->evicts ? k->shape.unit : 1},
        {"V_TAIL", plan->evicts ? v->tail : 0}, {"V_UNIT", plan->evicts ? v->shape.unit : 1},
        {"K_HAS_SCORES", (k->codec->flags & KVL_CODEC_HAS_SCORES) != 0 && !pre && !k->record.rebuilt}, /* such keys are restored first */
        {"K_HAS_COLUMNS", (k->codec->flags & KVL_CODEC_HAS_COLUMNS) != 0},
        {"V_HAS_ACCUMULATE", (v->codec->flags & KVL_CODEC_HAS_ACCUMULATE) != 0 && !joint && !v->record.rebuilt},
        {"ROPE_PRE", pre}, {"ROPE_FIRST", plan->dims.joint_value_dim}, {"ORDER_HALVES", layer->korder == KVL_KORDER_HF},
        {"K_ROT_M", k->rot_m}, {"K_ROT_D", k->rot_d}, {"V_ROT_M", v->rot_m}, {"V_ROT_D", v->rot_d},
        {"K_RANK", k->projection != NULL ? k->record.channels : 0}, {"V_RANK", v->projection != NULL ? v->record.channels : 0},
        {"K_REBUILT", k->projection != NULL && k->record.rebuilt}, {"V_REBUILT", v->projection != NULL && v->record.rebuilt},
        {"APPENDS", kvl_compose_appends(plan, layer, tile, target)},
        {"PICKS", layer->pages.tokens != 0}, {"PAGE", (uint32_t)layer->pages.size}, {"BOUND_SUM", layer->pages.gqa == KVL_BOUND_SUM},
        {"PAGES_EACH", group == 1 ? PAGES_EACH : 1},
    };
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        KVL_TRY(kvl_text_printf(text, "#define KVL_%s %u\n", sizes[i].name, sizes[i].value));
    KVL_TRY(kvl_text_printf(text, "#define KVL_QS %s\n", group == 1 ? "private" : "local"));
done:
    return status;
}

/* What a score has to say on the device, of those that have. */
static const char *score_body(const struct kvl_layer_plan *layer, const char *kernels)
{
    return strcmp(kernels, "evict.cl") == 0 && layer->score->head.device_source != NULL ? layer->score->head.device_source : "";
}

kvl_status kvl_compose(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, const char *kernels, uint32_t tile,
                       struct kvl_compose_target target, struct kvl_composition *out)
{
    kvl_status status = KVL_OK;
    *out = (struct kvl_composition){0};
    KVL_TRY(append_sizes(&out->sizes, plan, layer, tile, target));
    KVL_TRY(append_slabs(&out->bodies, plan->n_slabs));
    KVL_TRY(append_body(&out->bodies, &layer->side[KVL_SIDE_K], "k", true));
    if (kvl_sides(&plan->dims) == KVL_SIDES) KVL_TRY(append_body(&out->bodies, &layer->side[KVL_SIDE_V], "v", false));
    const struct kvl_source parts[KVL_COMPOSITION_PARTS] = {
        {"sizes", out->sizes.data},
        {"platform.cl", kvl_source_text("platform.cl")},
        {"contract.cl", kvl_source_text("contract.cl")},
        {"bodies", out->bodies.data},
        {"cache_view.cl", kvl_source_text("cache_view.cl")},
        {"record.cl", kvl_source_text("record.cl")},
        {"append.cl", kvl_source_text("append.cl")},
        {"score", score_body(layer, kernels)},
        {kernels, kvl_source_text(kernels)},
    };
    memcpy(out->parts, parts, sizeof parts);
done:
    if (status != KVL_OK) kvl_composition_free(out);
    return status;
}

void kvl_composition_free(struct kvl_composition *composition)
{
    kvl_text_free(&composition->sizes);
    kvl_text_free(&composition->bodies);
}

kvl_status kvl_compose_program(struct kvl_device *device, const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer,
                               const char *kernels, uint32_t tile, struct kvl_program **out)
{
    struct kvl_composition composition;
    kvl_status status = kvl_compose(plan, layer, kernels, tile, kvl_compose_target_of(kvl_device_caps(device)), &composition);
    if (status == KVL_OK) status = kvl_program_get(device, composition.parts, KVL_COMPOSITION_PARTS, "", out);
    kvl_composition_free(&composition);
    return status;
}
