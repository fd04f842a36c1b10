/* The words of --kv: parsed, checked and resolved. Grammar and keys: README of this room. */
#ifndef KVL_SPEC_H
#define KVL_SPEC_H
#include "registry.h"
#include "status.h"
#include "text.h"
#include <stdbool.h>
#include <stdint.h>

enum kvl_side { KVL_SIDE_K, KVL_SIDE_V, KVL_SIDES };
enum kvl_rope_stage { KVL_STORE_POST_ROPE, KVL_STORE_PRE_ROPE };
enum kvl_rotation { KVL_ROT_NONE, KVL_ROT_HADAMARD, KVL_ROT_RANDOM };
enum kvl_key_order { KVL_KORDER_GGUF, KVL_KORDER_HF };
/* Where channel c of a key's record lies in a row of neighbouring pairs. */
uint32_t kvl_key_channel(enum kvl_key_order order, uint32_t rope_dim, uint32_t c);
enum kvl_positions { KVL_POS_KEEP, KVL_POS_COMPACT };
enum kvl_scope { KVL_SCOPE_FULL_LAYERS, KVL_SCOPE_ALL_LAYERS };
enum kvl_when { KVL_WHEN_PREFILL, KVL_WHEN_EVERY, KVL_WHEN_FULL };
enum kvl_reading { KVL_READ_ALL, KVL_READ_PAGES };
enum kvl_page_bound { KVL_BOUND_MAX, KVL_BOUND_SUM };
enum { KVL_MAX_KEEP = 4 };

/* What the query of a token behind the prompt reads of what the cache holds, with KVL_READ_PAGES: pages whose keys it may score highest. */
struct kvl_page_reading {
    int32_t tokens;           /* tokens that it reads at most: sinks, the newest ones, and whole pages */
    int32_t size;             /* tokens of a page, at least: a codec that encodes groups of them may ask for more */
    enum kvl_page_bound gqa;  /* how the query heads that share a page agree */
    int32_t dense;            /* the first so many layers read all */
};

/* A calibration table: what codecs or projections of one model learned from a text, for each stream: a kv head, or those that a projection takes
 * together, in one layer or several. */
struct kvl_table {
    uint32_t n_layer, n_stream; /* layers, or groups of them; streams of each */
    uint32_t n[KVL_SIDES];     /* floats a stream */
    float *values[KVL_SIDES];  /* [L][streams][n]; NULL where the file has none */
    char sha256[65];           /* of the file */
};
void kvl_table_free(struct kvl_table *table);

/* What one layer's cache does. Instances are owned by the spec. */
struct kvl_layer_spec {
    struct kvl_instance codec[KVL_SIDES];
    struct kvl_instance projection[KVL_SIDES]; /* in front of the codec; unset without one */
    enum kvl_rope_stage rope;
    enum kvl_rotation rot;
    uint64_t rot_seed;
    enum kvl_key_order korder;
    uint32_t sink;             /* first tokens in full precision */
    int64_t tail[KVL_SIDES];   /* newest tokens in full precision; -1 = the codec's own minimum */
    uint32_t window;           /* 0 = none */
    enum kvl_scope all_layers; /* KVL_SCOPE_ALL_LAYERS: sink and window are for layers, too, that slide by themselves */
    struct kvl_instance keep[KVL_MAX_KEEP]; /* the base score, then its wrappers from the inside out */
    uint32_t n_keep;           /* 0: every token stays */
    struct kvl_instance budget; /* unset without keep */
    enum kvl_when when;        /* at the end of the prompt; then after every `every` tokens, or when there are more than the budget */
    uint32_t every;
    enum kvl_positions pos;
    enum kvl_reading read;
    struct kvl_page_reading pages;
    char *table_path;          /* table=FILE; NULL = none */
    struct kvl_table table;    /* empty until kvl_spec_load_tables */
};

struct kvl_spec; /* base entry + overrides (@a-b) */

/* "" and NULL mean the default (f16). Unknown words are refused with a caret under the character, the legal words and the closest one. */
kvl_status kvl_spec_parse(const char *text, struct kvl_spec **out);
void kvl_spec_free(struct kvl_spec **spec);

/* The entry of layer `layer` (0-based). Never NULL. */
const struct kvl_layer_spec *kvl_spec_layer(const struct kvl_spec *spec, uint32_t layer);
/* What a side's codec is given of a token, for each of its streams. */
struct kvl_stream_record {
    uint32_t heads, layers;    /* kv heads that share it, each of so many neighbouring layers */
    uint32_t channels;         /* of the record */
    bool rebuilt;              /* rows are made from it one by one when they are read */
    uint32_t table_floats;     /* of the projection, a stream */
};
/* Of a projection whose ranks are its table's: without the table, the most that they can be. */
kvl_status kvl_spec_stream_record(const struct kvl_layer_spec *entry, enum kvl_side side, uint32_t layer, uint32_t head_dim,
                                  struct kvl_stream_record *out);
/* Whether a projection stands in front of a codec. */
bool kvl_spec_projects(const struct kvl_layer_spec *entry);
/* Whether any layer slides; whether any evicts; whether all count positions inside the cache, so that its plan may bound them. */
bool kvl_spec_windowed(const struct kvl_spec *spec);
bool kvl_spec_evicts(const struct kvl_spec *spec);
bool kvl_spec_compact(const struct kvl_spec *spec);
/* Whether the queries of any layer choose pages. */
bool kvl_spec_picks(const struct kvl_spec *spec);
/* Of the codecs that learn their table from each prompt, the name of one that is not given a table; NULL if there is none. */
const char *kvl_spec_learner(const struct kvl_spec *spec);
/* KVL_E_USAGE if an override names a layer >= n_layers. */
kvl_status kvl_spec_check_layers(const struct kvl_spec *spec, uint32_t n_layers);
/* The above, and every codec fits head_dim, and no tail is shorter than its codec needs; the message says the fix. */
kvl_status kvl_spec_check_dims(const struct kvl_spec *spec, uint32_t n_layers, uint32_t head_dim);

/* Calls load for each entry with a table=FILE and keeps what it gives. The cache refuses a codec that needs a table and has none. */
typedef kvl_status (*kvl_table_loader)(void *context, const struct kvl_layer_spec *entry, struct kvl_table *out);
kvl_status kvl_spec_load_tables(struct kvl_spec *spec, kvl_table_loader load, void *context);
/* Digests of the tables, a space between; appends. */
kvl_status kvl_spec_tables_sha256(const struct kvl_spec *spec, struct kvl_text *out);
/* The words that say what a codec, or the projection in front of it, is given of a row: "rope=post rot=none korder=gguf" (a rotation comes behind
 * a projection); appends. */
kvl_status kvl_spec_form(const struct kvl_layer_spec *entry, struct kvl_text *out);
/* Whether all layers do the same. */
bool kvl_spec_uniform(const struct kvl_spec *spec);

const char *kvl_spec_given(const struct kvl_spec *spec); /* as the user wrote it */
/* Canonical text: every key, every option; parsing it gives the same spec. */
kvl_status kvl_spec_resolved(const struct kvl_spec *spec, struct kvl_text *out);

#endif
