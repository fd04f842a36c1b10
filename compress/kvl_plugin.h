/* kvl_plugin.h: the one header a KV strategy includes.
 *
 * A plug-in is const data: a head that is checked before any of its code runs, an option table that the host parses, and
 * function pointers, where NULL means the default. It links no symbol of the host.
 * A plug-in built as .so exports   const struct kvl_plugin_head *const kvl_plugins[]   (NULL-terminated).
 * Built-in ones are listed in builtin.def.
 *
 * Letters: T tokens, D head_dim, P tokens a page, G query heads a kv head. Floats are IEEE binary32.
 * Structs only ever grow at their end; struct_size says how much of one a plug-in knows. */
#ifndef KVL_PLUGIN_H
#define KVL_PLUGIN_H
#include <stddef.h>
#include <stdint.h>

#define KVL_PLUGIN_MAGIC 0x4c564b31u
#define KVL_ABI_MAJOR 1
#define KVL_ABI_MINOR 2

enum kvl_plugin_kind { KVL_KIND_CODEC = 1, KVL_KIND_SCORE = 2, KVL_KIND_BUDGET = 3, KVL_KIND_PROJECTION = 4 /* since ABI 1.2 */ };

/* ---- options: parsed, range-checked and printed by the host from this table ---- */

enum kvl_option_type {
    KVL_OPTION_INT = 1,    /* int32_t at offset */
    KVL_OPTION_FLOAT = 2,  /* double */
    KVL_OPTION_CHOICE = 3, /* int32_t: index in `choices` */
    KVL_OPTION_SCORE = 4,  /* of a score that wraps another: name(options) of that one; stores nothing */
    KVL_OPTION_NUMBERS = 5, /* struct kvl_numbers, none by default: "1:2.5:0", where 3*4 stands for 3:3:3:3. Since ABI 1.2 */
    KVL_OPTION_CODEC = 6    /* of a projection: name(options) of the codec that stores what it leaves; stores nothing. Since ABI 1.2 */
};

enum { KVL_MOST_NUMBERS = 256 };
struct kvl_numbers {
    uint32_t n, reserved;
    double value[KVL_MOST_NUMBERS];
};

struct kvl_option {
    const char *name, *help;
    uint32_t type, offset; /* offset in the private struct */
    double fallback, min, max; /* a fallback that is not among min .. max says that the option was not given */
    const char *choices;   /* "asym|sym" for CHOICE */
};

/* ---- the head ---- */

struct kvl_host {          /* services of the host; struct_size grows with them */
    uint32_t struct_size, reserved;
    void (*error)(const char *text); /* why a function returned non-zero */
};

struct kvl_plugin_head {
    uint32_t magic;                 /* KVL_PLUGIN_MAGIC */
    uint16_t abi_major, abi_minor;
    uint32_t struct_size;           /* sizeof the whole plug-in struct */
    uint32_t kind;
    const char *name, *summary, *citation;
    uint32_t byte_version;          /* changes whenever stored bytes change */
    uint32_t n_options;
    const struct kvl_option *options;
    uint32_t private_size, reserved; /* bytes of the options struct; the host allocates it zeroed */
    const char *device_source;      /* OpenCL C body, contract in cl/contract.cl */
    const char *card;               /* method card, Markdown */
    int (*init)(void *priv, const struct kvl_host *host); /* after options are set; 0 = ok. May be NULL */
    void (*fini)(void *priv);       /* called exactly once, also after a failed init. May be NULL */
};

/* ---- codec: how a page block of K or of V is represented ---- */

enum { KVL_ROLE_K = 1, KVL_ROLE_V = 2, KVL_ROLE_JOINT = 4 };
enum { KVL_ROPE_POST = 1, KVL_ROPE_PRE = 2 };
enum {
    KVL_CODEC_MOVABLE = 1,     /* device body has move(): one token to another slot */
    KVL_CODEC_NEEDS_TABLE = 2, /* shape() asks for a calibration table and calibrate() makes one */
    KVL_CODEC_HAS_SCORES = 4,  /* device body has prepare(), scores() (K) */
    KVL_CODEC_HAS_ACCUMULATE = 8, /* device body has accumulate() (V) */
    KVL_CODEC_HAS_COLUMNS = 32, /* device body has columns() (K) */
    KVL_CODEC_NO_ROTATION = 16 /* tells channels apart by what they hold: refused with rot= */
};

struct kvl_codec_dims {
    uint32_t struct_size, role, head_dim;
    uint32_t page_tokens;     /* P; 0 in the call of shape() that asks for a proposal */
};

struct kvl_codec_shape {      /* the host sets struct_size and zeroes the rest */
    uint32_t struct_size;
    uint32_t group;           /* tokens that share parameters; 1 = per token */
    uint32_t unit;            /* tokens sealed at once, a multiple of group */
    uint32_t tail_min;        /* newest tokens that always stay in full precision */
    uint32_t page_multiple;   /* P must be a multiple of this (at least group) */
    uint32_t alignment;       /* of a block's address */
    uint64_t block_bytes;     /* one block of P tokens (0 when P is 0) */
    uint64_t stream_bytes;    /* must be 0: what belongs to a whole stream is its table */
    uint32_t table_floats;    /* floats of a stream's table, from calibrate() or learn(); 0 = none */
    uint32_t aux_floats;      /* floats that prepare() derives from one query row */
    /* ---- since ABI 1.2 ---- */
    uint32_t learn_queries;   /* newest queries of a prompt that learn() reads */
    uint32_t reserved;
};

struct kvl_codec_bytes {      /* by class; slack is what the host finds missing to the block */
    uint64_t payload, scale, index;
};

struct kvl_known_answer {     /* run on every device by `kvlab check`; decoded must be met within `tolerance` (absolute) */
    const char *options;      /* "" or "group=32,sym" as in a spec */
    uint32_t role, head_dim, n, reserved;
    const float *x;           /* [n][D] */
    const float *decoded;     /* [n][D] */
    float tolerance;
};

typedef void (*kvl_define_fn)(void *context, const char *name, int64_t value); /* becomes -D KVL_OPT_<name>=<value> for this body */

/* Takes what calibrate() found. */
struct kvl_calibration {      /* struct_size grows with it */
    uint32_t struct_size, reserved;
    void *context;
    /* The next n floats of a stream's table, under a name for the file. Non-zero: stop and return it. */
    int (*put)(void *context, const char *name, uint32_t n, const float *values);
};

/* A prompt at whose end one stream is encoded for the first time. Keys and queries are as attention saw them, channels in the order of the
 * record. */
struct kvl_prompt_rows {
    uint32_t struct_size;
    uint32_t n_row, n_head, n_query; /* n_head: query heads that read this stream */
    const float *x;           /* [n_row][D] rows of this side that stay */
    const float *q;           /* [n_head][n_query][D] the newest queries, the last token's at the end; fewer than asked for if the prompt is shorter */
};

struct kvl_codec {
    struct kvl_plugin_head head;
    uint32_t roles, rope_stages, flags, reserved;
    /* Fills the shape for dims. Non-zero (with host->error) if options and dims do not fit. */
    int (*shape)(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out);
    /* Exact bytes, by class, of n sealed tokens that start at slot 0 of a page. */
    int (*bytes)(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out);
    /* The specification. block: P tokens; x [n][D] are tokens t0 .. t0+n-1 of it. table: of the stream, NULL if the codec has none. */
    int (*ref_encode)(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                      uint8_t *block);
    int (*ref_decode)(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x);
    void (*defines)(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context);
    const struct kvl_known_answer *known_answers;
    uint32_t n_known_answers, reserved2;
    /* ---- since ABI 1.1 ---- */
    /* Fills one stream's table (shape's table_floats) from n of its rows x [n][D], as encode() would be given them: before or after RoPE as the
     * user stores them, sinks left out. Names, sizes and their order depend on priv and dims alone. */
    int (*calibrate)(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, const float *x, const struct kvl_calibration *out);
    const float *const *known_tables; /* [n_known_answers]: table of each known answer; NULL = none has one */
    /* ---- since ABI 1.2 ---- */
    /* Fills one stream's table at the end of a prompt, before the stream's first row is encoded; rows that come later are encoded with it too.
     * Such a codec stores keys after RoPE and sets KVL_CODEC_NO_ROTATION, not KVL_CODEC_NEEDS_TABLE. */
    int (*learn)(const void *priv, const struct kvl_codec_dims *dims, const struct kvl_prompt_rows *in, float *table);
};

/* ---- score: what each cached token of each kv head is worth; the higher, the more worth keeping ---- */

enum {                        /* what a score wants of the layer; the rest of its input is NULL */
    KVL_NEED_K = 1,           /* keys as attention sees them, and keys before RoPE */
    KVL_NEED_V = 2,
    KVL_NEED_QUERIES = 4,     /* the newest queries, as attention sees them */
    KVL_NEED_QUERY_STATS = 8, /* mean and covariance of the queries before RoPE */
    KVL_NEED_COLUMN_SUMS = 16, /* of the attention probabilities: what each token got from all queries */
    KVL_NEED_OUTPUT = 32,     /* the attention's output matrix */
    KVL_NEED_NORMALS = 64,    /* random numbers */
    /* ---- since ABI 1.2: witnesses ---- */
    KVL_NEED_FOLLOWING = 128, /* one, of the tokens that are going to follow the prompt; refused where the run does not know them */
    KVL_NEED_REPETITION = 256 /* some, in which the model is made to repeat the prompt part by part */
};

struct kvl_score_needs {      /* the host sets struct_size and zeroes the rest */
    uint32_t struct_size, what;
    uint32_t queries;         /* of QUERIES: how many; all there are if more are asked for */
    uint32_t first_query;     /* of QUERY_STATS: the first query that counts */
    uint32_t normals;         /* of NORMALS: numbers a channel of a kv head */
    uint32_t reserved;
    /* ---- since ABI 1.2: of REPETITION. A witness is a request, its tail and the tokens of its part ---- */
    uint32_t repeat_tokens;   /* tokens of the prompt a part; the last one may be shorter */
    uint32_t repeat_lead;     /* later requests end with this many tokens, those before the part */
    const char *repeat_first, *repeat_later, *repeat_tail; /* texts, not NULL: the first request, later ones before their lead, the tail */
    uint32_t recent_queries;  /* of QUERY_STATS, while tokens are decoded: of so many newest queries */
    uint32_t reserved2;
};

/* Tokens that pass through the layer after the prompt, see all of it and each other, and leave nothing in the cache. Since ABI 1.2. */
struct kvl_witness {
    uint32_t n;               /* the i-th stands at position T + i */
    uint32_t first, end;      /* it is about the prompt's tokens first .. end - 1 */
    uint32_t reserved;
    const float *q, *k;       /* [Hq][n][D], [H][n][D] as attention sees them */
};

/* T tokens, L layers, Hq query heads, H kv heads (query head h reads kv head h / (Hq / H)), D channels, E model width. Keys and queries have
 * RoPE pairs in adjacent channels. At the end of a prompt these are its tokens, and t stands at position t. While tokens are decoded these are those that
 * heads still have, by age, rows as the cache gives them back; where heads have different numbers of tokens there is a call for each, with H = 1. */
struct kvl_score_input {
    uint32_t struct_size;
    uint32_t layer, n_layer, n_token, n_head, n_kv_head, head_dim, n_embd, rope_dim;
    uint32_t n_query;         /* the queries are those of tokens T - n_query .. T - 1 */
    uint32_t target;          /* tokens the layer's budget leaves a kv head on average */
    uint32_t reserved;
    double fraction;          /* the budget as a share of T, before it was made a whole number */
    const float *k, *k_pre;   /* [H][T][D] with and before RoPE */
    const float *v;           /* [H][T][D] */
    const float *q;           /* [Hq][n_query][D] */
    const float *q_mean, *q_cov; /* [Hq][D], [Hq][D][D], divided by their number */
    const float *column_sum;  /* [Hq][T] */
    const float *w_o;         /* [E][Hq * D] */
    const float *normal;      /* [H][D][normals], standard normal */
    const float *rope_freq;   /* [rope_dim / 2] radians a position */
    /* ---- since ABI 1.2 ---- */
    const struct kvl_witness *witness; /* [n_witness] */
    uint32_t n_witness, reserved2;
    const uint32_t *position; /* [H][T] where tokens stand in the text; NULL: t at t */
    uint32_t n_seen;          /* tokens of the text so far, gone ones included */
    uint32_t next;            /* position by which RoPE turns the next query: n_seen, or T with pos=compact */
};

/* While tokens are decoded, each cached token has a number, and the one with the smallest goes first, of equal ones the newest. */
enum {
    KVL_RUN_STORED = 1, /* found once, when the token is stored, of its exact key and value: kvl_score_stored() of the device source */
    KVL_RUN_SUM = 2,    /* attention it got from all queries since it came, summed over the query heads of its kv head */
    KVL_RUN_NEWEST = 3, /* attention it gets from the newest query */
    KVL_RUN_POSITION = 4, /* found once, of its position: kvl_score_position() of the device source */
    KVL_RUN_KEYS = 5     /* found anew at each eviction, of all keys k that the head has, as attention reads them: m = the sum of kvl_score_weight(k) k, then
                          * kvl_score_key(k, m) of the device source; ref() of these keys must say the same */
};

struct kvl_score_running { /* the host sets struct_size and zeroes the rest */
    uint32_t struct_size, source;
    uint32_t is_shared;   /* of attention: summed over all heads, so that all keep the same tokens */
    uint32_t first, newest; /* so many first and newest tokens stay */
    uint32_t parameter;   /* handed to kvl_score_position() */
    uint32_t by_ref;      /* of SUM: tokens go by what ref() makes of the sums */
};

struct kvl_score {
    struct kvl_plugin_head head;
    /* What ref() reads. NULL: nothing, the score depends on positions alone. */
    void (*needs)(const void *priv, struct kvl_score_needs *out);
    /* The specification: score [H][T]. Non-zero (with host->error) if it cannot. */
    int (*ref)(const void *priv, const struct kvl_score_input *in, float *score);
    /* A wrapper has this instead of ref: it finds another score (option of=) in `score` and changes it. target [H]: tokens each head is going to
     * keep; a wrapper that keeps whole chunks changes it too. Tokens with FLT_MAX are protected. */
    int (*wrap)(const void *priv, const struct kvl_score_input *in, float *score, uint32_t *target);
    /* ---- since ABI 1.2 ---- */
    /* How the score goes on while tokens are decoded, for a layer that keeps `target` tokens. Non-zero: it cannot with these options. NULL: ref() is called
     * anew at each eviction, by the host; a score that reads sums of attention needs this. */
    int (*running)(const void *priv, uint32_t target, struct kvl_score_running *out);
};

/* ---- budget: how many tokens each layer, then each head keeps ---- */

/* Starts the private struct of every budget; exactly one of them is given, the others are negative. */
struct kvl_amount {
    double kept, removed;     /* share of the tokens: max(1, int(kept T)), max(1, int(T (1 - removed))) */
    double tokens;            /* all tokens attended afterwards, a head */
    double bytes;             /* payload and scales of the whole cache at most */
};
#define KVL_AMOUNT_OPTIONS                                                                                                          \
    {"kept", "share of the tokens to keep", KVL_OPTION_FLOAT, offsetof(struct kvl_amount, kept), -1, 0, 1, NULL},                   \
    {"removed", "share of the tokens to remove", KVL_OPTION_FLOAT, offsetof(struct kvl_amount, removed), -1, 0, 1, NULL},           \
    {"tokens", "tokens a head keeps", KVL_OPTION_FLOAT, offsetof(struct kvl_amount, tokens), -1, 0, 4294967295.0, NULL},            \
    {"bytes", "payload and scales of the whole cache at most", KVL_OPTION_FLOAT, offsetof(struct kvl_amount, bytes), -1, 0, 1e18, NULL}

struct kvl_budget_input {
    uint32_t struct_size;
    uint32_t layer, n_layer, n_token, n_kv_head;
    uint32_t target;          /* tokens a head, when all layers keep the same */
    double fraction;          /* the same as a share of T, before it was made a whole number */
};

struct kvl_budget {
    struct kvl_plugin_head head;
    /* Tokens a head of layer in->layer keeps on average. NULL: in->target. */
    int (*layer_target)(const void *priv, const struct kvl_budget_input *in, uint32_t *target);
    /* Shares n_kv_head times the target out among the heads: target [H] holds the average and gets each head's own. score [H][T]; tokens a head
     * must keep get FLT_MAX. NULL: the same for every head. */
    int (*split)(const void *priv, const struct kvl_budget_input *in, float *score, uint32_t *target);
};

/* ---- projection (since ABI 1.2): a linear map in front of a codec, which then has fewer channels to store ---- */

/* The keys, or the values, that `heads` kv heads have of a token in each of `layers` layers, one layer and head after the other, are one row x of
 * W = layers * heads * D numbers. A codec encodes its
 * record z [R], z_r = sum_i x_i down[i][r]; what is read is y_i = sum_r up[i][r] z_r. Keys undergo RoPE before the projection, or after it when
 * they are read, as the user stores them. */
struct kvl_projection_dims {
    uint32_t struct_size, role, head_dim;
    uint32_t rank;            /* of the layer that matrices() is for; 0 in other calls */
};

struct kvl_projection_shape { /* the host sets struct_size and zeroes the rest */
    uint32_t struct_size;
    uint32_t heads;           /* that share a record; the model's kv heads are a multiple of it */
    uint32_t rank;            /* R, a multiple of 8; 0: ranks() says that of each layer */
    uint32_t rebuilt;         /* 1: each y is made when it is read; 0: queries and attention's output are multiplied with up instead, where they can be */
    uint32_t table_floats;    /* floats of calibration table for each record; that and the name say whether a table fits */
    uint32_t layers;          /* neighbouring layers that share a record; the model's are a multiple of it. 0: 1. Above 1 each y is made when it is read */
};

/* What a side has learned, all layers; where they share records n_layer counts groups of them, also in what ranks() says. */
struct kvl_projection_tables {
    uint32_t struct_size, n_layer, n_stream, table_floats;
    const float *values;      /* [n_layer][n_stream][table_floats] */
};

struct kvl_projection {
    struct kvl_plugin_head head; /* its option of type KVL_OPTION_CODEC names the codec; no device_source */
    uint32_t roles, reserved;
    /* Non-zero (with host->error) if options and dims do not fit. */
    int (*shape)(const void *priv, const struct kvl_projection_dims *dims, struct kvl_projection_shape *out);
    /* down and up [W][R] from a table. */
    int (*matrices)(const void *priv, const struct kvl_projection_dims *dims, const float *table, float *down, float *up);
    /* Fills a table from n rows x [n][W], keys before or after RoPE as the user stores them, sinks left out. */
    int (*calibrate)(const void *priv, const struct kvl_projection_dims *dims, uint64_t n, const float *x, const struct kvl_calibration *out);
    /* R of each layer, multiples of 8. NULL: shape() always has it. */
    int (*ranks)(const void *priv, const struct kvl_projection_dims *dims, const struct kvl_projection_tables *in, uint32_t *rank);
};

#endif
