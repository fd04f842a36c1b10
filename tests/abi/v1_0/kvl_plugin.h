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
#define KVL_ABI_MINOR 0

enum kvl_plugin_kind { KVL_KIND_CODEC = 1, KVL_KIND_SCORE = 2, KVL_KIND_BUDGET = 3 };

/* ---- options: parsed, range-checked and printed by the host from this table ---- */

enum kvl_option_type {
    KVL_OPTION_INT = 1,    /* int32_t at offset */
    KVL_OPTION_FLOAT = 2,  /* double */
    KVL_OPTION_CHOICE = 3  /* int32_t: index in `choices` */
};

struct kvl_option {
    const char *name, *help;
    uint32_t type, offset; /* offset in the private struct */
    double fallback, min, max;
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
    KVL_CODEC_NEEDS_TABLE = 2, /* needs a calibration table */
    KVL_CODEC_HAS_SCORES = 4,  /* device body has prepare(), scores() (K) */
    KVL_CODEC_HAS_ACCUMULATE = 8 /* device body has accumulate() (V) */
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
    uint64_t stream_bytes;    /* parts of the whole stream, outside pages */
    uint32_t table_floats;    /* floats of calibration table a stream; 0 = none */
    uint32_t aux_floats;      /* floats that prepare() derives from one query row */
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

struct kvl_codec {
    struct kvl_plugin_head head;
    uint32_t roles, rope_stages, flags, reserved;
    /* Fills the shape for dims. Non-zero (with host->error) if options and dims do not fit. */
    int (*shape)(const void *priv, const struct kvl_codec_dims *dims, struct kvl_codec_shape *out);
    /* Exact bytes, by class, of n sealed tokens that start at slot 0 of a page. */
    int (*bytes)(const void *priv, const struct kvl_codec_dims *dims, uint64_t n, struct kvl_codec_bytes *out);
    /* The specification. block: P tokens; x [n][D] are tokens t0 .. t0+n-1 of it. table may be NULL. */
    int (*ref_encode)(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n, const float *x,
                      uint8_t *block);
    int (*ref_decode)(const void *priv, const struct kvl_codec_dims *dims, const float *table, uint32_t t0, uint32_t n,
                      const uint8_t *block, float *x);
    void (*defines)(const void *priv, const struct kvl_codec_dims *dims, kvl_define_fn define, void *context);
    const struct kvl_known_answer *known_answers;
    uint32_t n_known_answers, reserved2;
};

#endif
