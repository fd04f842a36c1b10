/* layers: each layer's share of the budget, given as a list. */
#include "kvl_plugin_score.h"
#include <stdio.h>

extern const char kvl_text_compress_budget_layers_card_md[];

struct layers {
    struct kvl_amount amount;
    struct kvl_numbers share;
    const struct kvl_host *host;
};

static int layers_init(void *priv, const struct kvl_host *host)
{
    struct layers *o = priv;
    double sum = 0.0;
    o->host = host;
    for (uint32_t l = 0; l < o->share.n; l++) sum += o->share.value[l];
    if (sum > 0.0) return 0;
    host->error("budget=layers wants share=A:B:C..., a number a layer, not all of them 0 (16*14 stands for 14 layers of 16)");
    return -1;
}

/* The mean over the layers is the budget; the last digit of a sum of shares must not cost a token. */
static int layers_target(const void *priv, const struct kvl_budget_input *in, uint32_t *target)
{
    const struct layers *o = priv;
    double sum = 0.0;
    if (o->share.n != in->n_layer) {
        char text[128];
        snprintf(text, sizeof text, "budget=layers(share=...) has %u numbers, the model %u layers", o->share.n, in->n_layer);
        o->host->error(text);
        return -1;
    }
    for (uint32_t l = 0; l < o->share.n; l++) sum += o->share.value[l];
    const double wanted = in->n_token * in->fraction * o->share.value[in->layer] * in->n_layer / sum;
    *target = (uint32_t)fmin(in->n_token, floor(wanted + 1e-9 * in->n_token));
    return 0;
}

static const struct kvl_option options[] = {
    KVL_AMOUNT_OPTIONS,
    {"share", "of each layer, in proportion: A:B:C..., or 16*14 for 14 layers of 16", KVL_OPTION_NUMBERS, offsetof(struct layers, share), 0, 0, 1e9, NULL},
};

const struct kvl_budget kvl_budget_layers = {
    .head = {.magic = KVL_PLUGIN_MAGIC, .abi_major = KVL_ABI_MAJOR, .abi_minor = KVL_ABI_MINOR, .struct_size = sizeof(struct kvl_budget),
             .kind = KVL_KIND_BUDGET, .name = "layers", .summary = "each layer its share, from a list", .citation = "none",
             .n_options = sizeof options / sizeof *options, .options = options, .private_size = sizeof(struct layers),
             .card = kvl_text_compress_budget_layers_card_md, .init = layers_init},
    .layer_target = layers_target,
};
