/* Architectures: one row each. A row says which tensors a model file must and may hold, how its dimensions are read, and what a block does
 * that tensors do not show. The forward pass applies the biases and norms that a file has; a file with a tensor that its row does not list
 * is refused: it would compute something else. */
#ifndef KVL_ARCH_H
#define KVL_ARCH_H
#include "linear.h"
#include "model.h"

/* Dimension of a tensor by what it stands for. */
enum kvl_extent { KVL_ONE, KVL_EMBD, KVL_FF, KVL_VOCAB, KVL_QUERY_ROWS, KVL_KV_ROWS, KVL_HEAD, KVL_ROPE_PAIRS,
                  KVL_Q_RANK, KVL_KV_RANK, KVL_LATENT_ROW, KVL_MLA_QUERY_ROWS, KVL_MLA_UP_ROWS, KVL_CONTENT, KVL_VALUE, KVL_VALUE_ROWS, KVL_HEADS,
                  KVL_N_EXTENTS };

struct kvl_arch_tensor {
    const char *name;            /* of a layer: what follows "blk.N." */
    enum kvl_extent row, n_rows; /* dim[0] and dim[1] */
    bool in_layer, optional;
    enum kvl_extent n_matrices;  /* dim[2] */
};

struct kvl_arch_tensors {
    const struct kvl_arch_tensor *tensor;
    size_t n;
};
enum { KVL_ARCH_SETS = 3 };

struct kvl_arch {
    const char *name; /* general.architecture, prefix of its keys */
    struct kvl_arch_tensors set[KVL_ARCH_SETS]; /* unused ones are empty */
    /* Everything in dims but tied_output, from the keys "<name>.*" and the token embedding. */
    kvl_status (*read_dims)(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims);
    enum kvl_gate gate;    /* of the feed-forward */
    bool halves;           /* the file's RoPE pairs are channels i and i + rope_dim / 2 of a head, not neighbours */
    bool scales_embedding; /* embeddings are multiplied by sqrt(n_embd) */
    bool slides;           /* may have attention.sliding_window; then all layers slide, but every full_every-th if that is not 0 */
    uint32_t full_every;
    bool shares;           /* may have kvlab.attention.kv_source: layers that read the keys and values of another have no matrices for them */
    float slide_rope_base; /* of layers that slide; 0: that of all */
};

/* NULL if unknown. */
const struct kvl_arch *kvl_arch_find(struct kvl_gguf_str name);
extern const struct kvl_arch kvl_archs[];
extern const size_t kvl_n_archs;

/* "<arch>.<suffix>" */
struct kvl_arch_key {
    char text[96];
};
struct kvl_arch_key kvl_arch_key(const struct kvl_arch *arch, const char *suffix);

#endif
