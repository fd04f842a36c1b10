/* streaming: the first tokens and the newest ones (StreamingLLM, Xiao et al. 2023). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_streaming_card_md[], kvl_text_compress_score_streaming_streaming_cl[];

struct streaming {
    int32_t sink;
};

static int streaming_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    const struct streaming *o = priv;
    const uint32_t n = in->n_token, sink = kvl_score_min((uint32_t)o->sink, n), dropped = n - kvl_score_min(in->target, n);
    kvl_score_fill(in, score, 0, n, 1.0f);
    kvl_score_fill(in, score, sink, kvl_score_min(sink + dropped, n), 0.0f);
    return 0;
}

/* The oldest token behind the first ones goes first. */
static int streaming_running(const void *priv, uint32_t target, struct kvl_score_running *out)
{
    const struct streaming *o = priv;
    out->source = KVL_RUN_POSITION;
    out->first = (uint32_t)o->sink;
    return 0;
}

static const struct kvl_option options[] = {
    {"sink", "first tokens, kept before the newest", KVL_OPTION_INT, offsetof(struct streaming, sink), 4, 0, INT32_MAX, NULL},
};

const struct kvl_score kvl_score_streaming = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "streaming", "the first tokens and the newest ones", "arXiv:2309.17453", options, struct streaming,
                           kvl_text_compress_score_streaming_card_md, .device_source = kvl_text_compress_score_streaming_streaming_cl),
    .ref = streaming_ref,
    .running = streaming_running,
};
