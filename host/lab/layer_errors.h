/* What encoding and decoding changes in each layer's and head's keys and values: the codecs alone, on the exact rows of a text, without what the layers
 * before have changed. */
#ifndef KVL_LAYER_ERRORS_H
#define KVL_LAYER_ERRORS_H
#include "eval.h"

struct kvl_layer_errors {
    uint32_t n_layer, n_stream;
    double *error[KVL_SIDES]; /* [layer][stream] ||decoded - x|| / ||x|| over tokens and channels; NaN where the layer has no stream or no row of that side, and where a prompt makes
                                 the codec's table */
};

/* Runs the first n tokens of eval->window (as many as a sliding layer holds, if one does) through an exact cache, then each layer's rows through the reference of what
 * eval's strategy makes of them; sinks, which stay exact, are left out. Free with kvl_layer_errors_free, also after a failure. Blocks. */
kvl_status kvl_layer_errors_measure(const struct kvl_eval *eval, uint32_t n, struct kvl_layer_errors *out);
void kvl_layer_errors_free(struct kvl_layer_errors *errors);

#endif
