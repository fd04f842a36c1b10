/* The byte planner: what a cache will reserve, to the byte, before anything is allocated. The cache allocates from the plan, so that
 * reserved = plan = ledger = sum of CL_MEM_SIZE.
 *
 * A stream is what shares records: one kv head of a layer, or several that a projection takes together, in one layer or several. Each side (K, V) has sink rows and
 * tail rows in full precision and a body of pages. */
#ifndef KVL_PLAN_H
#define KVL_PLAN_H
#include "device.h"
#include "spec.h"
#include "status.h"
#include "tuning.h"

/* What a query may read: README of this room, "Read rule". */
enum kvl_protocol { KVL_P1_FAKE_QUANT, KVL_P2_WRITE_THEN_READ, KVL_P3_PREFILL_EXACT, KVL_P4_STREAMING, KVL_PROTOCOLS };
extern const char *const kvl_protocol_name[KVL_PROTOCOLS]; /* "p1" ... */

/* L layers, H kv heads, G = n_head / n_kv_head, D head_dim. */
struct kvl_cache_dims {
    uint32_t n_layer, n_head, n_kv_head, head_dim;
    uint32_t window, full_every; /* layers slide by themselves over `window` tokens (0: none does) unless their number, from 1, is a multiple of
                                  * full_every */
    uint32_t joint_value_dim; /* not 0: a token has one row of head_dim for key and value; the value is its first so many channels, and RoPE turns
                               * the others */
    float scale;              /* that scores are multiplied with; 0: 1 / sqrt(head_dim) */
    uint32_t n_sequence;      /* 0 (in a plan: 1) or 1: one. More: so many sequences of equal length are one with all their heads, those of the first sequence first;
                               * n_head and n_kv_head count all, and a token has a stage row of each sequence, one after the other */
    const uint32_t *kv_source; /* NULL, or [L]: the layer whose keys and values layer l reads: itself, or that of the layer below; borrowed */
};
/* Tokens that layer l's queries see by the model's own rule, 0 = all. */
uint32_t kvl_own_window(const struct kvl_cache_dims *dims, uint32_t l);
/* The layer whose streams layer l reads, and whether there is one behind it that reads them too. */
uint32_t kvl_kv_source(const struct kvl_cache_dims *dims, uint32_t l);
bool kvl_kv_read_on(const struct kvl_cache_dims *dims, uint32_t l);

struct kvl_cache_config {
    const struct kvl_spec *spec; /* borrowed */
    uint32_t n_ctx;              /* positions reserved for */
    uint32_t ubatch;             /* most tokens appended at once */
    enum kvl_protocol protocol;
    bool exact;                  /* exact rows in f32, one split */
    bool reads_stage; /* the caller wants the stage's rows turned after a step: attention does not turn them on its way */
};

/* What the planner must know of a device. */
struct kvl_cache_limits {
    uint64_t max_alloc_bytes;
    uint32_t compute_units;
    const struct kvl_tuning *tuning; /* NULL = built-in; read while a plan is made */
};
struct kvl_cache_limits kvl_cache_limits_of(const struct kvl_device *device);

struct kvl_side_plan {
    const struct kvl_codec *codec;
    const void *priv;
    struct kvl_codec_dims dims;      /* head_dim: channels of the record; page_tokens = P */
    struct kvl_codec_shape shape;
    uint64_t page_bytes, alignment;  /* block, padded to its alignment, at least 16 */
    uint64_t token_bytes;            /* payload + scale of one sealed token of one head */
    uint32_t slots;                  /* pages a stream */
    uint32_t pool;                   /* pages of all streams of the layer, where heads share its budget out while tokens are decoded: a stream's slots get
                                        some of these as its count asks for them; 0: each slot has a page of its own */
    uint64_t pool_at;                /* of the first of them in pool_address */
    uint32_t tail;                   /* newest tokens that stay exact */
    uint32_t ring;                   /* exact rows beside the sinks: the tail, and what a unit has open */
    uint64_t table_offset;           /* of the calibration tables [streams][shape.table_floats] in the tables, floats */
    const float *table;              /* values of the codec's or the projection's, borrowed from the spec; NULL if they are not loaded, there are none,
                                        or a prompt makes them */
    const struct kvl_instance *projection; /* borrowed from the spec; NULL: records are rows */
    struct kvl_stream_record record;
    uint64_t projection_offset;      /* of its matrices [streams][2][heads * D * rank] in the tables, floats; of a layer that shares records the layer's part */
    uint32_t rot_d, rot_m;           /* channels that are rotated, and of them the size of the dense factor: rotation.h; m 0 = none */
    uint64_t rotation_offset;        /* of its matrices in the tables, floats; equal rotations share them */
    uint64_t exact_row_bytes;        /* one exact row of a stream: a record, or where layers share these the layer's own rows */
};

struct kvl_layer_plan {
    struct kvl_side_plan side[KVL_SIDES]; /* of a joint row only the first is there */
    uint32_t n_stream;               /* H, or less where a projection takes heads together; 0 of a layer that reads another's, of which nothing else
                                        is planned */
    uint32_t leader;                 /* whose pages this layer reads: itself, or the first of the layers that share records; of the others no side has slots */
    uint32_t sink, window;           /* exact rows of a side: sink + ring */
    bool slides;                     /* by itself: the spec's sink, window, keep and budget are not for this layer */
    uint32_t rank;                   /* number among the layers that the spec's budget is for */
    enum kvl_rope_stage rope;
    enum kvl_key_order korder;
    enum kvl_rotation rot;
    uint64_t rot_seed;
    uint64_t exact_offset;           /* of this layer in the exact buffer */
    uint64_t table_offset;           /* of this layer in the page table, entries: K [streams][slots], V the same, shift [streams] if it evicts, spin
                                        [streams] if it evicts while decoding */
    enum kvl_positions pos;
    const struct kvl_score *score;   /* where tokens go while others are decoded: their score and what it said of itself; else NULL and {0} */
    struct kvl_score_running running;
    bool by_host;                    /* the host says which tokens go (rescore.h); what `running` says of the device is to keep numbers up to date */
    uint32_t recent;                 /* newest queries that it wants for that */
    uint64_t recent_offset;          /* of these in `recent`: floats */
    uint32_t cells;                  /* places of a head's sequence that have a position and a number; 0 = nothing goes while decoding */
    uint64_t index_offset, raw_offset; /* of them in the token index, of its queries' scores in `raw`: numbers */
    struct kvl_page_reading pages;   /* of a layer whose queries may have to choose: size is that of its pages; tokens 0: they never do */
    uint32_t most_pages;             /* whole pages of a stream's body at most */
    uint64_t bounds_offset;          /* of its pages' bounds, bytes */
    uint64_t gone_offset;            /* of its heads' tokens in `gone`: entries */
    uint32_t kept;                   /* of an evicting cache: tokens a head keeps on average of a prompt of n_ctx tokens */
    uint64_t token_bytes, token_scale_bytes; /* one more sealed token, all heads, both sides: payload + scale; scale alone */
};

/* How attention is cut up: values of cl/attend.tune. */
struct kvl_attend_shape {
    uint32_t block, rows, splits, group;
};

enum { KVL_MAX_SLABS = 16 };

/* A token that went while others were decoded. */
struct kvl_gone {
    uint32_t seen, position; /* tokens seen when it went; where it stood */
    float mass;              /* share of the newest query's attention that went to it, mean over the query heads of its kv head; NaN: its score reads none */
};

struct kvl_cache_plan {
    struct kvl_cache_dims dims;
    struct kvl_cache_config config;
    struct kvl_cache_limits limits;
    struct kvl_attend_shape shape;
    struct kvl_layer_plan *layer;    /* [L], owned */
    bool evicts_decoding;            /* some layer */
    uint64_t index_bytes, raw_bytes; /* token index (class index); the newest query's scores (scratch) */
    uint32_t gone_room;              /* of tokens that go while decoding, so many are remembered of each head, the first ones */
    uint64_t gone_bytes;             /* scratch */
    uint64_t recent_bytes;           /* newest queries, as the model made them (class index) */
    uint64_t bounds_bytes, picks_bytes; /* least and largest of each channel of pages' keys (class index); a step's scores of pages, and which it reads
                                         * (scratch) */
    bool one_by_one;                 /* tokens behind the prompt are taken in alone: some layer evicts while decoding, chooses what it reads, or shares records */
    bool evicts;                     /* a prompt passes through one layer at a time and is compressed there (tokens leave it, codecs learn from it, or
                                        layers share records), or its tokens are to read what those behind it do not */
    uint64_t n_pages;
    uint32_t n_slabs;                /* that a kernel is given */
    uint64_t slab_bytes[KVL_MAX_SLABS];
    uint64_t *page_address;          /* [table entries]: slab << 56 | byte offset; owned */
    uint64_t n_entries;
    uint64_t *pool_address;          /* [n_pool] pages of layers that have a pool, slab and offset as above; owned */
    uint64_t n_pool;
    uint64_t n_table_floats;         /* rotations and calibration; class table */
    uint64_t exact_bytes, table_bytes, partial_bytes, status_bytes; /* table: the page table; partial and status are scratch */
    uint64_t record_bytes, sum_bytes; /* scratch of projected layers: a ubatch's query rows and records; attention's sums before they become outputs */
    uint64_t join_bytes;             /* scratch of layers that share records: a prompt's, while layer after layer adds its part */
    uint64_t bytes_per_token;        /* of one sequence */
    uint32_t n_budgeted;             /* layers that the spec's budget is for: all but those that slide by themselves */
    uint64_t budgeted_token_bytes;   /* bytes_per_token of these layers */
    uint32_t n_position;             /* positions by which RoPE tells a query's keys apart, at most: n_ctx unless pos=compact bounds them */
    uint64_t resident_bytes, scratch_bytes; /* sums of the above */
    uint64_t prompt_bytes;           /* of an evicting cache: a layer's rows in full precision, while a prompt of n_ctx tokens is compressed */
};

/* Positions that RoPE may be asked for: n_ctx, and those of a second pass behind a prompt that scores want (KVL_NEED_REPETITION). */
uint32_t kvl_rope_positions(const struct kvl_spec *spec, uint32_t n_layer, uint32_t n_ctx);

/* KVL_E_USAGE with the fix if codec and dims do not fit, KVL_E_DEVICE_MEM if more than KVL_MAX_SLABS slabs would be needed.
 * Of a cache that begins with a prompt (keep=, read=pages, a codec that learns, or P3) resident_bytes is a bound. */
kvl_status kvl_cache_plan_make(const struct kvl_cache_dims *dims, const struct kvl_cache_config *config, const struct kvl_cache_limits *limits,
                               struct kvl_cache_plan *out);
void kvl_cache_plan_free(struct kvl_cache_plan *plan);

/* Tokens the cache really takes at once: config.ubatch, less under P1 with a window (where the result does not depend on it). */
uint32_t kvl_cache_ubatch(const struct kvl_cache_config *config);

/* Whether a layer's pages come when a prompt's counts are known: of caches that evict, but not while decoding, which bounds them beforehand. */
bool kvl_pages_by_layer(const struct kvl_cache_plan *plan);

/* Tokens a layer is to keep of `n_token` seen, the first n_prompt of which were the prompt; UINT32_MAX: none goes at this step. */
kvl_status kvl_decode_target(const struct kvl_cache_plan *plan, uint32_t layer, uint32_t n_token, uint32_t n_prompt, uint32_t *target);

/* Tokens that come between two evictions of a layer, at most the context. */
uint32_t kvl_decode_step(const struct kvl_cache_plan *plan, uint32_t layer);
/* Class index: what says where things are, and what choosing tokens or pages has to remember. */
uint64_t kvl_plan_index_bytes(const struct kvl_cache_plan *plan);

/* Most work-groups attention splits a decode step into, and partial rows it may leave. */
uint32_t kvl_attend_groups(const struct kvl_cache_plan *plan);
/* 2, or 1 where key and value are one row. */
int kvl_sides(const struct kvl_cache_dims *dims);
/* Whether records are made from the layer's rows by a projection, in a buffer of their own. */
bool kvl_layer_projects(const struct kvl_layer_plan *layer);
/* Whether it shares records with its neighbours: the body is theirs in common, sinks and tail hold each layer's own rows. */
bool kvl_layer_shares(const struct kvl_layer_plan *layer);
/* Query heads that read a stream. */
uint32_t kvl_stream_queries(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer);
/* Channels of a query row, and of a sum of values, as attention has them: those of a record, or of a head where rows are rebuilt; of an output row. */
uint32_t kvl_query_dim(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer);
uint32_t kvl_sum_dim(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer);
uint32_t kvl_output_dim(const struct kvl_cache_dims *dims);
/* Floats of a token in the stage, and in the buffer of query rows and records. */
uint32_t kvl_stage_row(const struct kvl_cache_dims *dims);
uint32_t kvl_records_row(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer);
/* Floats of a token's records that layers share: of all streams, keys' and values'. */
uint32_t kvl_joined_row(const struct kvl_layer_plan *layer);
/* Tokens of a prefill tile. */
uint32_t kvl_prefill_tile(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer);

/* Tokens of a side that are sealed once `end` tokens are there and `sealed` were (sinks included in all three). */
uint32_t kvl_sealed_after(const struct kvl_cache_plan *plan, const struct kvl_side_plan *side, uint32_t sealed, uint32_t end);
/* Of `body` sealed body tokens, those that the pages of a stream still hold: a window's ring forgets the oldest. */
uint64_t kvl_side_held(const struct kvl_side_plan *side, uint64_t body);

/* Calibration table of the codec for stream h; NULL if there is none. */
const float *kvl_side_table(const struct kvl_side_plan *side, uint32_t h);
/* Matrices of the projection of stream h, [layers * heads * D][rank]. The side has one, and its table. */
kvl_status kvl_side_matrices(const struct kvl_cache_dims *dims, const struct kvl_side_plan *side, uint32_t h, float *down, float *up);

/* The same without a history: sealed once `end` tokens are there, by a protocol that reads what has been sealed. */
uint32_t kvl_sealed_end(const struct kvl_layer_plan *layer, const struct kvl_side_plan *side, uint32_t end);
/* What a query reads of a head's sequence, with itself `end` tokens long, in a layer that chooses pages: `whole` pages are there before it, encoded on both
 * sides, and it reads `read` of them, all if that is no more tokens than the layer's. In front of and behind them it reads everything. */
struct kvl_page_count {
    uint32_t whole, read;
};
struct kvl_page_count kvl_pages_read(const struct kvl_layer_plan *layer, uint32_t end);
/* The longest run of tokens that both pages of a and pages of b tokens are made of. */
uint32_t kvl_common_tokens(uint32_t a, uint32_t b);
/* Bytes of the bounds of one page of a stream. */
uint64_t kvl_page_bound_bytes(const struct kvl_layer_plan *layer);
/* How far reading lags behind sealing: the read rule. */
uint32_t kvl_read_lag(const struct kvl_cache_plan *plan, const struct kvl_side_plan *side);
/* What one query reads of a head's sequence, with itself `end` tokens long, of which `sealed` of each side are sealed: the tokens it sees, and the bytes
 * of their rows, encoded or in full precision; `choosing`, of the pages it chooses and of all bounds. */
struct kvl_query_reads {
    uint64_t tokens, bytes;
};
struct kvl_query_reads kvl_query_reads(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, const uint32_t sealed[KVL_SIDES], bool choosing,
                                       uint32_t end);
/* Whether a layer has rows in full precision beside the sinks; whether it has any. */
bool kvl_keeps_tail(const struct kvl_layer_plan *layer);
bool kvl_keeps_exact(const struct kvl_layer_plan *layer);
/* Rows of a side that a stream holds in full precision: sinks, and the newest tokens. */
uint32_t kvl_exact_rows_held(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, int side, uint32_t sealed, uint32_t position);

/* Bytes of a side's `tokens` body tokens of one stream, by class (payload, scale, index). */
kvl_status kvl_side_bytes(const struct kvl_side_plan *side, uint64_t tokens, struct kvl_codec_bytes *out);

#endif
