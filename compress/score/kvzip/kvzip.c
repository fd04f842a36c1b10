/* kvzip: what the model looks at when it is asked to repeat the prompt (Kim et al. 2025). */
#include "kvl_plugin_score.h"

extern const char kvl_text_compress_score_kvzip_card_md[];

struct kvzip {
    int32_t chunk, lead, sink;
};

static void kvzip_needs(const void *priv, struct kvl_score_needs *out)
{
    const struct kvzip *o = priv;
    out->what = KVL_NEED_K | KVL_NEED_REPETITION;
    out->repeat_tokens = (uint32_t)o->chunk;
    out->repeat_lead = (uint32_t)o->lead;
    out->repeat_first = "\n\nRepeat the previous context exactly.";
    out->repeat_later = "\n\nRepeat the part of the previous context exactly, starting with";
    out->repeat_tail = "\n";
}

/* The largest probability that any query of a witness, of any head of the group, gives to the tokens of its part. */
static int score_part(const struct kvzip *o, const struct kvl_score_input *in, const struct kvl_witness *w, float *score)
{
    const uint32_t group = in->n_head / in->n_kv_head, n = w->end - w->first, sinks = kvl_score_min((uint32_t)o->sink, w->first);
    double *p = calloc((size_t)sinks + n + w->n, sizeof *p);
    if (p == NULL) return -1;
    for (uint32_t h = 0; h < in->n_head; h++) {
        float *row = score + (size_t)(h / group) * in->n_token + w->first;
        if (h % group == 0) memset(row, 0, n * sizeof *row);
        for (uint32_t i = 0; i < w->n; i++) {
            kvl_score_witness(in, w, h, i, w->first, w->end, sinks, p);
            for (uint32_t t = 0; t < n; t++) row[t] = fmaxf(row[t], (float)p[t]);
        }
    }
    free(p);
    return 0;
}

static int kvzip_ref(const void *priv, const struct kvl_score_input *in, float *score)
{
    for (uint32_t i = 0; i < in->n_witness; i++)
        if (score_part(priv, in, &in->witness[i], score) != 0) return -1;
    return 0;
}

static const struct kvl_option options[] = {
    {"chunk", "tokens repeated at once", KVL_OPTION_INT, offsetof(struct kvzip, chunk), 2048, 1, 1 << 24, NULL},
    {"lead", "tokens before a later chunk that its request quotes", KVL_OPTION_INT, offsetof(struct kvzip, lead), 8, 0, 1 << 16, NULL},
    {"sink", "first tokens that are attended to beside a later chunk", KVL_OPTION_INT, offsetof(struct kvzip, sink), 4, 0, 1 << 16, NULL},
};

const struct kvl_score kvl_score_kvzip = {
    .head = KVL_SCORE_HEAD(KVL_KIND_SCORE, "kvzip", "largest attention while the model repeats the prompt", "arXiv:2505.23416", options, struct kvzip,
                           kvl_text_compress_score_kvzip_card_md),
    .needs = kvzip_needs,
    .ref = kvzip_ref,
};
