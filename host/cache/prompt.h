/* A prompt on its way through the layers, one at a time: the layer at work attends in full precision; its scores then say what stays, and only
 * that is encoded. Cache bytes at any time: one layer's rows in full precision, and the compressed rest. */
#ifndef KVL_PROMPT_H
#define KVL_PROMPT_H
#include "cache.h"
#include "select.h"

struct kvl_prompt;

/* What scores need to know of the model. */
struct kvl_prompt_model {
    uint32_t n_embd, rope_dim;
    const float *rope_freq; /* [rope_dim / 2], borrowed */
};

/* For prompts of n_token tokens into `cache`, whose plan evicts, and witnesses of at most n_witness. Both outlive it. */
kvl_status kvl_prompt_new(struct kvl_device *device, struct kvl_cache *cache, uint32_t n_token, uint32_t n_witness, const struct kvl_prompt_model *model,
                          struct kvl_prompt **out);
void kvl_prompt_free(struct kvl_prompt **prompt);
/* Is shown each layer's evidence when it is complete: all queries and keys, whatever scores want. Borrowed. */
struct kvl_prompt_observer {
    kvl_status (*layer)(void *context, const struct kvl_score_input *in);
    void *context;
};
void kvl_prompt_observe(struct kvl_prompt *prompt, const struct kvl_prompt_observer *observer);

/* Whether layer l's scores want the attention's output matrix. */
bool kvl_prompt_needs_output(const struct kvl_prompt *prompt, uint32_t l);

/* Starts layer l; then its tokens in pieces of at most the cache's ubatch: RoPE, append, attend, as kvl_cache_step does. out NULL: store
 * only. Blocks where scores want queries. */
kvl_status kvl_prompt_layer(struct kvl_prompt *prompt, uint32_t l);
kvl_status kvl_prompt_step(struct kvl_prompt *prompt, uint32_t n, struct kvl_buffer *stage, struct kvl_buffer *rotary, struct kvl_buffer *out);

/* After the prompt's last piece: the next n tokens given to kvl_prompt_step are a witness of the prompt's tokens first .. end - 1, for scores that
 * want `kind`, KVL_NEED_FOLLOWING or KVL_NEED_REPETITION. measure: kvl_prompt_compress is to say what these tokens lose. Then its end. */
kvl_status kvl_prompt_witness(struct kvl_prompt *prompt, uint32_t kind, uint32_t n, uint32_t first, uint32_t end, bool measure);
kvl_status kvl_prompt_witness_end(struct kvl_prompt *prompt);

/* The layer's last piece is through: scores, selects and hands what stays to the cache. The stage is overwritten. w_o: [E][Hq * D] or NULL.
 * Blocks where the layer has scores. selection: what stayed; free with kvl_selection_free. */
kvl_status kvl_prompt_compress(struct kvl_prompt *prompt, const float *w_o, struct kvl_buffer *stage, struct kvl_buffer *rotary,
                               struct kvl_selection *selection);

#endif
