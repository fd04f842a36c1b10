/* Tokens that go while others are decoded, where the host says which: scores that no number goes on for, budgets that heads share out, wrappers. At the steps at which
 * tokens are due (when=every:N, when=full) it does what is done at the end of a prompt, of the tokens that heads still have: reads their rows as the cache gives them
 * back, has scores, split and wrappers say what each is worth, and leaves it to the device to let the worst go (cl/evict.cl). Blocks. */
#ifndef KVL_RESCORE_H
#define KVL_RESCORE_H
#include "cache.h"
#include "prompt.h"
#include "reference.h"

/* Whether some tokens of layer l go by what the host says, behind the newest token that the cache has taken in. */
bool kvl_rescore_due(const struct kvl_cache *cache, uint32_t l);
/* Behind advance(). rope: of positions up to the newest. w_o: as for kvl_prompt_compress. */
kvl_status kvl_rescore_layer(struct kvl_cache *cache, uint32_t l, const struct kvl_prompt_model *model, struct kvl_rope rope, const float *w_o);

/* What the heads of a layer have, by age. */
struct kvl_held_layer {
    uint32_t seen, stride;           /* tokens of the text so far; of the head that has most */
    const uint32_t *count, *position; /* [H], [H][stride] */
    const bool *stays;               /* [H][stride] what cannot go */
    const float *k, *v;              /* [H][stride][D]: keys as attention sees them */
    const float *number;             /* [H][stride] those that go on */
    const float *q;                  /* [n_query][H*G][D] of the newest tokens, as the model made them */
    uint32_t n_query;
    const float *w_o;
};
/* number [H][stride], target [H]: as kvl_select_held. For kvl_rescore_layer and for its specification, kvl_reference_evict. */
kvl_status kvl_rescore_numbers(const struct kvl_cache_plan *plan, uint32_t l, const struct kvl_held_layer *held, const struct kvl_prompt_model *model, struct kvl_rope rope,
                               uint32_t layer_target, float *number, uint32_t *target);

#endif
