/* Dimensions of published models, which need not be at hand: data/public_models.csv, carried by the program. */
#ifndef KVL_PUBLIC_MODELS_H
#define KVL_PUBLIC_MODELS_H
#include "model.h"
#include "spec.h"

struct kvl_public_model {
    char name[32], source[64]; /* source: the repository whose config.json the dimensions are from */
    struct kvl_dims dims;
    uint32_t ffn_matrices;          /* of a layer: 3 with a gate, else 2 */
    uint32_t joint;                 /* 1: one record a token and layer (MLA), which is head_dim wide; values are read from keys */
    uint64_t params, active_params; /* as published; 0 = by the dimensions. active: read for one token (mixture of experts) */
};

struct kvl_public_models {
    struct kvl_public_model *model; /* [n], owned */
    size_t n;
};
/* In the order of the file. */
kvl_status kvl_public_models_load(struct kvl_public_models *out);
void kvl_public_models_free(struct kvl_public_models *models);
/* By its name or its source, in any case of letters; NULL if there is none. */
const struct kvl_public_model *kvl_public_models_find(const struct kvl_public_models *models, const char *name);

/* All parameters, and those read for one token. */
uint64_t kvl_public_params(const struct kvl_public_model *model);
uint64_t kvl_public_active_params(const struct kvl_public_model *model);

/* KVL_E_USAGE if the model keeps one joint record and `kv` treats keys and values differently. */
kvl_status kvl_public_spec(const struct kvl_public_model *model, const char *kv, struct kvl_spec **out);

#endif
