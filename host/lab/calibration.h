/* Calibration tables: what a codec or a projection learns from a text before it is used (kvl_plugin.h, calibrate()), made, written, read and checked.
 *
 * The file is HDF5. Root attributes: format "kvlab calibration table", version 1, model, model_sha256, text_sha256, form (what the codec was
 * given of a row: "rope=pre rot=none korder=gguf"), n_tokens, sink. Groups k and v, one for each side that learns: attributes codec (its text with all
 * options; of a projection, whose table serves all of them, the name), byte_version and arrays (the order of the datasets in a stream's table); a
 * float32 dataset [layer][stream][n] for each array. A stream is a kv head, or those that a projection takes together. */
#ifndef KVL_CALIBRATION_H
#define KVL_CALIBRATION_H
#include "eval.h"

struct kvl_calibrate_config {
    const struct kvl_spec *spec;   /* what the table is for: one setting for all layers */
    uint32_t n_ctx, ubatch;
    uint64_t first_chunk, chunks;  /* windows of n_ctx tokens; chunks 0 = all from first_chunk on */
    const char *output;
};
struct kvl_calibrate_result {
    uint64_t n_tokens;             /* of each stream, without sinks */
    uint32_t n[KVL_SIDES];         /* floats a stream */
    char sha256[65];               /* of the file */
};

/* Runs the text's windows with an exact cache, gives every stream's rows to its codec, and writes the table. The rows of all windows are held
 * in memory: 2 x layers x kv heads x head_dim floats a token. */
kvl_status kvl_calibrate(const struct kvl_rig *rig, const struct kvl_eval_text *text, const struct kvl_calibrate_config *config,
                         struct kvl_calibrate_result *out);

/* A table for an entry of a spec: refuses one that was made for other codecs, options or form. For kvl_spec_load_tables. */
kvl_status kvl_table_read(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out);

/* kvl_spec_parse, and the tables that the spec names. */
kvl_status kvl_spec_open(const char *text, struct kvl_spec **out);

#endif
