/* The token sequences that pass through the layers behind a prompt because scores, or the run, want to know how they look back at it. */
#ifndef KVL_MODEL_WITNESS_H
#define KVL_MODEL_WITNESS_H
#include "spec.h"
#include "tokenizer.h"

struct kvl_witness_tokens {
    uint32_t kind;        /* KVL_NEED_FOLLOWING or KVL_NEED_REPETITION */
    bool measure;         /* the eviction's loss is measured on it */
    int32_t *token;       /* [n]; NULL if the prompt's tokens are not known */
    uint32_t n;
    uint32_t first, end;  /* the part of the prompt that it is about */
};

struct kvl_witness_list {
    struct kvl_witness_tokens *item; /* a measured one is the last */
    uint32_t n, longest;             /* items; tokens of the longest */
    uint64_t tokens;                 /* of all of them */
};

/* Those of a prompt of n tokens. prompt NULL: its tokens are not known. following: the tokens behind it, n_following 0 if not known: a score
 * that wants them is then refused. measure: the following tokens are one in any case. */
kvl_status kvl_witness_list_make(const struct kvl_spec *spec, uint32_t n_layer, const struct kvl_tokenizer *tokenizer, const int32_t *prompt, uint32_t n,
                                 const int32_t *following, uint32_t n_following, bool measure, struct kvl_witness_list *out);
void kvl_witness_list_free(struct kvl_witness_list *list);

#endif
