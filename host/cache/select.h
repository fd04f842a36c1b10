/* Which tokens of a layer stay: layer target -> base score -> head split -> wrappers -> the best of each head. */
#ifndef KVL_SELECT_H
#define KVL_SELECT_H
#include "spec.h"
#include "status.h"

/* Tokens a head that an amount leaves of n_token: *target is the whole number (kept: max(1, int(F T)), removed: max(1, int(T (1 - R))), both in
 * double; never more than T), *fraction the same share before it was made one. token_bytes: payload and scales of one token over all
 * streams. KVL_E_USAGE unless exactly one of its members is given. */
kvl_status kvl_amount_resolve(const struct kvl_amount *amount, uint32_t n_token, uint64_t token_bytes, uint32_t *target, double *fraction);

/* The k best of n scores into kept, ascending; equal ones by position, NaN last. kept has room for min(k, n), which is returned; room for n. */
struct kvl_ranked {
    float score;
    uint32_t at;
};
uint32_t kvl_select_top(const float *score, uint32_t n, uint32_t k, struct kvl_ranked *room, uint32_t *kept);

/* Tokens kept of a layer: those of head h are token[offset[h]] .. token[offset[h + 1] - 1], ascending. */
struct kvl_selection {
    uint32_t n_token, n_kv_head;
    uint32_t target;   /* of the layer: tokens a head on average */
    uint32_t *offset;  /* [H + 1] */
    uint32_t *token;
    float *score;      /* [H][T] the base score, before heads were split and wrappers applied; NULL: everything is kept */
    float *mass_lost, *output_error; /* [H], of kvl_eviction_loss; NULL unless the run asked for them */
};
void kvl_selection_free(struct kvl_selection *selection);

/* The newest n of all tokens, of every head; the score's fields of in are not read. */
kvl_status kvl_select_newest(const struct kvl_score_input *in, uint32_t n, struct kvl_selection *out);

/* Whether a score goes on by itself while tokens are decoded (ABI 1.2). */
bool kvl_score_runs(const struct kvl_score *score);

/* What a layer that evicts while tokens are decoded does on the device for it: *out {0} where nothing goes on. KVL_E_UNSUPPORTED (no message) if the score
 * cannot go on with its options. */
kvl_status kvl_keep_running(const struct kvl_layer_spec *spec, uint32_t target, struct kvl_score_running *out);
/* Whether the host says which tokens go (rescore.h), and not a number that goes on. */
bool kvl_keep_by_host(const struct kvl_layer_spec *spec);
/* Whether heads share a layer's budget out. */
bool kvl_keep_splits(const struct kvl_layer_spec *spec);
/* Newest queries that the host wants to see. */
uint32_t kvl_keep_recent(const struct kvl_layer_spec *spec);

/* What the scores of a layer's keep= want together; reads nothing where there is none. */
void kvl_keep_needs(const struct kvl_layer_spec *spec, struct kvl_score_needs *out);

/* Tokens that a repetition of a part of n_token tokens has at most: a token is a byte or more. 0 where none is wanted. */
uint32_t kvl_repetition_bound(const struct kvl_score_needs *needs, uint32_t n_token);

/* in: everything but target and fraction, which are set here. */
kvl_status kvl_select_layer(const struct kvl_layer_spec *spec, struct kvl_score_input *in, uint64_t token_bytes, struct kvl_selection *out);

/* Tokens that the heads of a layer have while others are decoded, by age, and what scores read of them. Where heads may have different numbers of tokens there is an
 * input for each, else one of all. */
struct kvl_held {
    struct kvl_score_input *in; /* [n_in]; target and fraction are set here */
    uint32_t n_in, n_kv_head, stride; /* stride: tokens of the head that has most */
    const uint32_t *count;      /* [H] */
    const bool *stays;          /* [H][stride] tokens that cannot go: sinks, the exact tail */
    const float *number;        /* [H][stride] of base scores that go on by themselves; NULL: ref() of each input says them */
};
/* number [H][stride]: those with the smallest go first, of equal ones the newest; target [H]: tokens each head keeps, those that cannot go among them, of
 * layer_target a head on average. A wrapper does not give a head more than its share. */
kvl_status kvl_select_held(const struct kvl_layer_spec *spec, const struct kvl_held *held, uint32_t layer_target, float *number, uint32_t *target);

/* The layer's target alone: what is known before there are scores. */
kvl_status kvl_layer_target(const struct kvl_layer_spec *spec, uint32_t layer, uint32_t n_layer, uint32_t n_token, uint32_t n_kv_head,
                            uint64_t token_bytes, uint32_t *target);

#endif
