/* uniform: every layer and head keeps the same number of tokens. */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_budget_uniform_card_md[];

static const struct kvl_option options[] = {KVL_AMOUNT_OPTIONS};

const struct kvl_budget kvl_budget_uniform = {
    .head = KVL_SCORE_HEAD(KVL_KIND_BUDGET, "uniform", "the same for every layer and head", "none", options, struct kvl_amount,
                           kvl_text_compress_budget_uniform_card_md),
};
