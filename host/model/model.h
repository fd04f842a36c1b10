/* A model on disk: GGUF + tokenizer + architecture, no device needed. */
#ifndef KVL_MODEL_H
#define KVL_MODEL_H
#include "gguf.h"
#include "status.h"
#include "tokenizer.h"

/* Dimensions; letters as in README: L layers, H kv heads, G query heads a kv head, D head_dim. */
struct kvl_dims {
    uint32_t n_layer, n_embd, n_head, n_kv_head, head_dim, n_ff, n_vocab, n_ctx_train, rope_dim;
    uint32_t window, full_every; /* layers slide over `window` tokens (0: none does) unless their number, from 1, is a multiple of full_every */
    float rms_eps, rope_base, slide_rope_base; /* slide_rope_base: of layers that slide */
    float query_gain;            /* of the queries' norm, so that scores are divided by sqrt(head_dim) */
    bool tied_output;
    const uint32_t *kv_source;   /* NULL, or [n_layer]: the layer whose keys and values a layer reads, itself or that of the layer below; the model's */
    /* Latent attention (mla.h); kv_rank 0: none. n_kv_head is 1 and head_dim kv_rank + rope_dim, what the cache holds; expanded: n_head heads of
     * content_dim + rope_dim. */
    struct kvl_mla_dims {
        uint32_t q_rank, kv_rank, content_dim, value_dim; /* q_rank 0: queries are projected at once */
        bool expanded;
    } mla;
};

struct kvl_arch; /* table entry of an architecture */

struct kvl_model {
    struct kvl_gguf *gguf;
    struct kvl_tokenizer *tokenizer;
    struct kvl_dims dims;
    const struct kvl_arch *arch;
    float *rope_freq;       /* [rope_dim / 2] radians a position, scaling keys applied; owned */
    float *slide_rope_freq; /* the same of layers that slide, to which scaling keys do not apply; NULL: as all others; owned */
    uint32_t *kv_source;    /* what dims has of it; owned */
    char name[128], sha256[65];
};

/* Opens and checks everything (tensor shapes against the dimensions). An unknown architecture: one line listing the known ones. */
kvl_status kvl_model_open(const char *path, struct kvl_model **out);
void kvl_model_close(struct kvl_model **model);
/* Whether a layer has keys and values of its own. */
bool kvl_layer_makes_kv(const struct kvl_dims *dims, uint32_t layer);
/* From now on latent attention is computed and cached in full keys and values: to compare with. KVL_E_UNSUPPORTED for other models. */
kvl_status kvl_model_expand(struct kvl_model *model);

#endif
