/* A session: weights on a device + one KV cache + the forward pass over it. */
#ifndef KVL_SESSION_H
#define KVL_SESSION_H
#include "device.h"
#include "model.h"
#include "plan.h"
#include "spec.h"
#include "status.h"

/* Weights on a device; shared by any number of sessions, which must be freed first. */
struct kvl_weights;
kvl_status kvl_weights_load(const struct kvl_model *model, struct kvl_device *device, struct kvl_weights **out);
void kvl_weights_free(struct kvl_weights **weights);
/* Bytes that kvl_weights_load would take, from the file alone. */
uint64_t kvl_weights_bytes(const struct kvl_model *model);

struct kvl_session_config {
    const struct kvl_spec *spec; /* borrowed: outlives the session */
    uint32_t n_ctx;              /* positions the cache is reserved for */
    uint32_t ubatch;             /* tokens appended at once (u); 1 under P4 */
    enum kvl_protocol protocol;
    bool exact;                  /* f32 activations and accumulation, exact segments in f32 */
    uint32_t max_logits;         /* most logits rows of one forward call; 0 = 1 */
    bool allow_long;             /* positions beyond the trained context */
    const struct kvl_prompt_observer *observer; /* NULL, or who is shown the prompt's queries and keys (host/cache/prompt.h); borrowed */
    uint32_t n_sequence;         /* sequences of equal length in step, 0 = 1 (bench): a token is then one of each, [n][n_sequence], and so are logits */
    bool measure_loss;           /* what evictions cost the tokens of kvl_session_following: struct kvl_selection's last members */
};

struct kvl_session;
kvl_status kvl_session_new(struct kvl_weights *weights, const struct kvl_session_config *config, struct kvl_session **out);
void kvl_session_free(struct kvl_session **session);
kvl_status kvl_session_reset(struct kvl_session *session); /* empties the cache: position 0 again */
/* Forgets the tokens from `position` on; KVL_SKIP where the cache cannot (window, tail). */
kvl_status kvl_session_rewind(struct kvl_session *session, uint32_t position);
/* Appends n tokens whose keys and values are random (normal, the same for a seed) instead of computed: a cheap long cache for timings. */
kvl_status kvl_session_fill(struct kvl_session *session, uint32_t n, uint64_t seed);
uint32_t kvl_session_position(const struct kvl_session *session); /* tokens seen */

/* Runs n tokens at the next positions, in pieces of at most ubatch. Enqueues; does not wait.
 * Where the cache evicts (keep=, P3), the first call's tokens are the prompt: they pass through one layer after the other, attend to each other
 * in full precision, and are compressed; the call then waits for each layer.
 * tokens: [n], with sequences in step [n][n_sequence].
 * n_logits: logits are computed for the last n_logits of the n tokens (0 .. n) into a device buffer, rows [n_logits][n_vocab] f32,
 * which stays valid until the next call.
 * Ctrl-C ends this call and kvl_session_fill before the next piece with KVL_E_INTERRUPTED and no message: the caller knows what is lost. */
kvl_status kvl_session_forward(struct kvl_session *session, const int32_t *tokens, uint32_t n, uint32_t n_logits);
/* The same with logits for the n_logits tokens from the first_logit-th on. */
kvl_status kvl_session_forward_at(struct kvl_session *session, const int32_t *tokens, uint32_t n, uint32_t first_logit, uint32_t n_logits);
/* Says which n tokens are going to follow the prompt, which the next forward call brings: for scores that read them and for measure_loss.
 * Borrowed until then. */
void kvl_session_following(struct kvl_session *session, const int32_t *tokens, uint32_t n);
/* cos and sin of position * frequency, found in double: *out [positions][pairs][2]. freq [pairs]. Free with kvl_free. */
kvl_status kvl_rope_angles(const float *freq, uint32_t pairs, uint32_t positions, float **out);
struct kvl_buffer *kvl_session_logits(const struct kvl_session *session); /* row stride n_vocab floats */
/* Blocks: copies row i of the last call's logits, [n_vocab]. */
kvl_status kvl_session_read_logits(struct kvl_session *session, uint32_t row, float *logits);

/* What the last eviction left of layer l; NULL before one. Valid until the next prompt or reset. */
struct kvl_selection;
const struct kvl_selection *kvl_session_kept(const struct kvl_session *session, uint32_t l);

/* Counters of the core since new or reset. */
struct kvl_counters {
    uint64_t tokens;            /* forward-passed */
    uint64_t kv_computed;       /* tokens whose key and value were computed (a layer's worth counted once) */
    uint64_t kv_tokens_read;    /* sum over queries of the tokens read (a layer's worth counted once) */
    uint64_t kv_bytes_read;     /* all layers: bytes of sealed and exact rows that attention had to read, once a kv head and query tile row */
    uint64_t flops;             /* matrix products and attention, 2 a multiply-add */
    uint64_t launches;
    uint64_t rescored, rescore_ns; /* steps behind which the host said which tokens go, and what that took */
};
void kvl_session_counters(const struct kvl_session *session, struct kvl_counters *out);

/* Memory of this session's cache, exact. */
struct kvl_cache_bytes {
    uint64_t bytes_per_token;   /* payload + scale of one more sealed token (of one sequence) over all streams */
    uint64_t payload, scale, index, table, slack, scratch; /* reserved by class: sums to the session's buffers */
    uint64_t resident;          /* all but scratch */
    uint64_t peak;              /* of the cache classes since new or reset */
    uint64_t token_read;        /* that attention of the newest token (of every sequence) read: of its rows, and of bounds of pages among which it chose */
};
kvl_status kvl_session_bytes(struct kvl_session *session, struct kvl_cache_bytes *out);

/* What a session would reserve besides the weights, without a device: its cache's plan, and the scratch of the forward pass (0: none).
 * tuning: of the device; NULL = built-in. */
enum { KVL_SESSION_SCRATCH = 16 };
void kvl_session_scratch(const struct kvl_dims *dims, const struct kvl_session_config *config, const struct kvl_tuning *tuning,
                         uint64_t bytes[KVL_SESSION_SCRATCH]);
kvl_status kvl_session_cache_plan(const struct kvl_dims *dims, const struct kvl_session_config *config, const struct kvl_cache_limits *limits,
                                  struct kvl_cache_plan *out);

struct kvl_cache *kvl_session_cache(const struct kvl_session *session);

#endif
