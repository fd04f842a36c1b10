#include "witness.h"
#include "mem.h"
#include "select.h"
#include <string.h>

static kvl_status add(struct kvl_witness_list *list, const struct kvl_witness_tokens *item)
{
    const kvl_status status = kvl_realloc(&list->item, list->n + 1u, sizeof *list->item);
    if (status != KVL_OK) return status;
    list->item[list->n++] = *item;
    list->tokens += item->n;
    if (item->n > list->longest) list->longest = item->n;
    return KVL_OK;
}

static kvl_status add_following(const int32_t *following, uint32_t n, uint32_t n_prompt, bool measure, struct kvl_witness_list *list)
{
    struct kvl_witness_tokens item = {.kind = KVL_NEED_FOLLOWING, .measure = measure, .n = n, .end = n_prompt};
    kvl_status status = kvl_alloc(&item.token, n, sizeof *item.token);
    if (status != KVL_OK) return status;
    memcpy(item.token, following, n * sizeof *following);
    status = add(list, &item);
    if (status != KVL_OK) kvl_free(&item.token);
    return status;
}

/* Request, lead, tail, and the tokens first .. end - 1. */
static kvl_status repetition(const struct kvl_score_needs *needs, const struct kvl_tokenizer *tokenizer, const int32_t *prompt, uint32_t first,
                             uint32_t end, struct kvl_witness_tokens *out)
{
    kvl_status status = KVL_OK;
    const char *request = first == 0 ? needs->repeat_first : needs->repeat_later;
    int32_t *ids = NULL, *tail = NULL;
    size_t n_ids = 0, n_tail = 0;
    const uint32_t lead = first < needs->repeat_lead ? first : needs->repeat_lead, part = end - first;
    *out = (struct kvl_witness_tokens){.kind = KVL_NEED_REPETITION, .first = first, .end = end};
    KVL_TRY(kvl_tokenizer_encode(tokenizer, request, strlen(request), false, &ids, &n_ids));
    KVL_TRY(kvl_tokenizer_encode(tokenizer, needs->repeat_tail, strlen(needs->repeat_tail), false, &tail, &n_tail));
    out->n = (uint32_t)(n_ids + lead + n_tail + part);
    if (prompt == NULL) goto done;
    KVL_TRY(kvl_alloc(&out->token, out->n, sizeof *out->token));
    memcpy(out->token, ids, n_ids * sizeof *ids);
    memcpy(out->token + n_ids, prompt + first - lead, lead * sizeof *prompt);
    memcpy(out->token + n_ids + lead, tail, n_tail * sizeof *tail);
    memcpy(out->token + n_ids + lead + n_tail, prompt + first, part * sizeof *prompt);
done:
    kvl_free(&ids);
    kvl_free(&tail);
    return status;
}

static kvl_status add_repetitions(const struct kvl_score_needs *needs, const struct kvl_tokenizer *tokenizer, const int32_t *prompt, uint32_t n,
                                  struct kvl_witness_list *list)
{
    for (uint32_t first = 0; first < n;) {
        const uint32_t end = n - first < needs->repeat_tokens ? n : first + needs->repeat_tokens;
        struct kvl_witness_tokens item;
        kvl_status status = repetition(needs, tokenizer, prompt, first, end, &item);
        if (status == KVL_OK) status = add(list, &item);
        if (status != KVL_OK) {
            kvl_free(&item.token);
            return status;
        }
        first = end;
    }
    return KVL_OK;
}

static bool same_repetition(const struct kvl_score_needs *a, const struct kvl_score_needs *b)
{
    return a->repeat_tokens == b->repeat_tokens && a->repeat_lead == b->repeat_lead && strcmp(a->repeat_first, b->repeat_first) == 0 &&
           strcmp(a->repeat_later, b->repeat_later) == 0 && strcmp(a->repeat_tail, b->repeat_tail) == 0;
}

/* What the layers want together, and the base score of one that wants the following tokens. Repetitions are the same for all layers. */
static kvl_status merge_needs(const struct kvl_spec *spec, uint32_t n_layer, struct kvl_score_needs *out, const char **reader)
{
    *out = (struct kvl_score_needs){0};
    for (uint32_t l = 0; l < n_layer; l++) {
        struct kvl_score_needs one;
        kvl_keep_needs(kvl_spec_layer(spec, l), &one);
        if (one.what & out->what & KVL_NEED_REPETITION && !same_repetition(&one, out))
            return kvl_fail(KVL_E_UNSUPPORTED, "--kv: layer %u wants the prompt repeated in another way than a layer before it: use one setting", l);
        if (one.what & KVL_NEED_FOLLOWING) *reader = kvl_spec_layer(spec, l)->keep[0].plugin->name;
        const uint32_t what = out->what | one.what;
        if (one.what & KVL_NEED_REPETITION) *out = one;
        out->what = what;
    }
    return KVL_OK;
}

kvl_status kvl_witness_list_make(const struct kvl_spec *spec, uint32_t n_layer, const struct kvl_tokenizer *tokenizer, const int32_t *prompt, uint32_t n,
                                 const int32_t *following, uint32_t n_following, bool measure, struct kvl_witness_list *out)
{
    kvl_status status = KVL_OK;
    struct kvl_witness_list list = {0};
    struct kvl_score_needs needs;
    const char *reader = NULL;
    KVL_TRY(merge_needs(spec, n_layer, &needs, &reader));
    if (reader != NULL && n_following == 0)
        return kvl_fail(KVL_E_USAGE, "--kv: keep=%s reads the tokens that follow the prompt, and this run does not know them: "
                                     "use eval with --protocol compress-then-score", reader);
    if (needs.what & KVL_NEED_REPETITION) KVL_TRY(add_repetitions(&needs, tokenizer, prompt, n, &list));
    if (reader != NULL || (measure && n_following > 0)) KVL_TRY(add_following(following, n_following, n, measure, &list));
    *out = list;
    list = (struct kvl_witness_list){0};
done:
    kvl_witness_list_free(&list);
    return status;
}

void kvl_witness_list_free(struct kvl_witness_list *list)
{
    for (uint32_t i = 0; i < list->n; i++) kvl_free(&list->item[i].token);
    kvl_free(&list->item);
    *list = (struct kvl_witness_list){0};
}
