/* Architectures: one row each. A row says which tensors a model file must and may hold and how its dimensions are read; the forward
 * pass asks it for nothing else. A file with a tensor that its row does not list is refused: it would compute something else. */
#ifndef KVL_ARCH_H
#define KVL_ARCH_H
#include "model.h"

/* Dimension of a tensor by what it stands for. */
enum kvl_extent { KVL_ONE, KVL_EMBD, KVL_FF, KVL_VOCAB, KVL_QUERY_ROWS, KVL_KV_ROWS, KVL_ROPE_PAIRS,
                  KVL_Q_RANK, KVL_KV_RANK, KVL_LATENT_ROW, KVL_MLA_QUERY_ROWS, KVL_MLA_UP_ROWS, KVL_CONTENT, KVL_VALUE, KVL_VALUE_ROWS, KVL_HEADS,
                  KVL_N_EXTENTS };

struct kvl_arch_tensor {
    const char *name;            /* of a layer: what follows "blk.N." */
    enum kvl_extent row, n_rows; /* dim[0] and dim[1] */
    bool in_layer, optional;
    enum kvl_extent n_matrices;  /* dim[2] */
};

struct kvl_arch {
    const char *name; /* general.architecture, prefix of its keys */
    const struct kvl_arch_tensor *tensors;
    size_t n_tensors;
    /* Everything in dims but tied_output, from the keys "<name>.*" and the token embedding. */
    kvl_status (*read_dims)(const struct kvl_arch *arch, const struct kvl_gguf *gguf, struct kvl_dims *dims);
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
