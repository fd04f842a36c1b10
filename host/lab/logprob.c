#include "logprob.h"
#include "mem.h"
#include <assert.h>
#include <stdio.h>

struct kvl_logprob {
    struct kvl_device *device;
    struct kvl_kernel *score_kernel, *kld_kernel;
    struct kvl_buffer *targets, *score[2], *kld; /* [max_rows] each */
    struct kvl_logprob_shape shape;
    uint32_t n_vocab, max_rows;
};

static struct kvl_logprob_shape default_shape(const struct kvl_caps *caps)
{
    if (caps->type == KVL_DEVICE_CPU) return (struct kvl_logprob_shape){.work_group = 1, .lanes = 16};
    const uint32_t limit = caps->max_work_group < 256 ? caps->max_work_group : 256;
    uint32_t group = 1;
    while (group * 2 <= limit) group *= 2;
    return (struct kvl_logprob_shape){.work_group = group, .lanes = 4};
}

kvl_status kvl_logprob_new(struct kvl_device *device, uint32_t n_vocab, uint32_t max_rows, const struct kvl_logprob_shape *shape,
                           struct kvl_logprob **out)
{
    kvl_status status = KVL_OK;
    struct kvl_logprob *l = NULL;
    KVL_TRY(kvl_alloc(&l, 1, sizeof *l));
    l->device = device;
    l->n_vocab = n_vocab;
    l->max_rows = max_rows;
    l->shape = shape ? *shape : default_shape(kvl_device_caps(device));

    const struct kvl_source source = {"logprob.cl", kvl_source_text("logprob.cl")};
    char options[64];
    snprintf(options, sizeof options, "-DKVL_WG=%u -DKVL_LANES=%u", l->shape.work_group, l->shape.lanes);
    struct kvl_program *program = NULL;
    KVL_TRY(kvl_program_get(device, &source, 1, options, &program));
    KVL_TRY(kvl_kernel_get(program, "logprob_score", &l->score_kernel));
    KVL_TRY(kvl_kernel_get(program, "logprob_kld", &l->kld_kernel));

    const uint64_t rows = max_rows;
    KVL_TRY(kvl_buffer_new(device, "logprob targets", -1, KVL_MEM_SCRATCH, rows * sizeof(int32_t), true, &l->targets));
    for (int i = 0; i < 2; i++)
        KVL_TRY(
            kvl_buffer_new(device, "logprob scores", -1, KVL_MEM_SCRATCH, rows * sizeof(struct kvl_row_score), true, &l->score[i]));
    KVL_TRY(kvl_buffer_new(device, "logprob kld", -1, KVL_MEM_SCRATCH, rows * sizeof(float), true, &l->kld));
    *out = l;
    l = NULL;
done:
    kvl_logprob_free(&l);
    return status;
}

void kvl_logprob_free(struct kvl_logprob **logprob)
{
    struct kvl_logprob *l = *logprob;
    if (!l) return;
    kvl_buffer_free(&l->targets);
    kvl_buffer_free(&l->score[0]);
    kvl_buffer_free(&l->score[1]);
    kvl_buffer_free(&l->kld);
    kvl_free(logprob);
}

static kvl_status put_targets(struct kvl_logprob *l, const int32_t *targets, uint32_t n)
{
    assert(n > 0 && n <= l->max_rows);
    for (uint32_t i = 0; i < n; i++) {
        if (targets[i] < 0 || (uint32_t)targets[i] >= l->n_vocab)
            return kvl_fail(KVL_E_FORMAT, "token id %d of row %u is outside the model's vocabulary of %u", targets[i], i,
                            l->n_vocab);
    }
    return kvl_buffer_write(l->targets, 0, (uint64_t)n * sizeof *targets, targets);
}

static kvl_status launch_score(struct kvl_logprob *l, struct kvl_buffer *logits, uint32_t n, struct kvl_buffer *score)
{
    const size_t global[3] = {(size_t)n * l->shape.work_group, 1, 1}, local[3] = {l->shape.work_group, 1, 1};
    const uint64_t elements = (uint64_t)n * l->n_vocab;
    const struct kvl_work work = {.bytes = 2 * elements * sizeof(float)};
    return KVL_LAUNCH(l->device, l->score_kernel, global, local, work, KVL_BUF(logits), KVL_BUF(l->targets), KVL_U32(l->n_vocab),
                      KVL_BUF(score));
}

static kvl_status launch_kld(struct kvl_logprob *l, struct kvl_buffer *base, struct kvl_buffer *other, uint32_t n)
{
    const size_t global[3] = {(size_t)n * l->shape.work_group, 1, 1}, local[3] = {l->shape.work_group, 1, 1};
    const uint64_t elements = (uint64_t)n * l->n_vocab;
    const struct kvl_work work = {.bytes = 2 * elements * sizeof(float)};
    return KVL_LAUNCH(l->device, l->kld_kernel, global, local, work, KVL_BUF(base), KVL_BUF(other), KVL_BUF(l->score[0]),
                      KVL_BUF(l->score[1]), KVL_U32(l->n_vocab), KVL_BUF(l->kld));
}

static kvl_status get_scores(struct kvl_buffer *score, uint32_t n, struct kvl_row_score *scores)
{
    return kvl_buffer_read(score, 0, (uint64_t)n * sizeof *scores, scores);
}

static kvl_status check_scores(const struct kvl_logprob *l, const struct kvl_row_score *scores, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (scores[i].n_bad > 0)
            return kvl_fail(
                KVL_E_VERIFY,
                "logits row %u of %u: %u of %u values are infinite or NaN; try --exact, another --kv or another --device "
                "to find where they come from",
                i, n, scores[i].n_bad, l->n_vocab);
    }
    return KVL_OK;
}

kvl_status kvl_logprob_score(struct kvl_logprob *l, struct kvl_buffer *logits, const int32_t *targets, uint32_t n,
                             struct kvl_row_score *scores)
{
    kvl_status status = KVL_OK;
    KVL_TRY(put_targets(l, targets, n));
    KVL_TRY(launch_score(l, logits, n, l->score[0]));
    KVL_TRY(get_scores(l->score[0], n, scores));
    KVL_TRY(check_scores(l, scores, n));
done:
    return status;
}

kvl_status kvl_logprob_compare(struct kvl_logprob *l, struct kvl_buffer *base, struct kvl_buffer *other, const int32_t *targets,
                               uint32_t n, struct kvl_row_score *base_scores, struct kvl_row_score *other_scores, float *kld)
{
    kvl_status status = KVL_OK;
    KVL_TRY(put_targets(l, targets, n));
    KVL_TRY(launch_score(l, base, n, l->score[0]));
    KVL_TRY(launch_score(l, other, n, l->score[1]));
    KVL_TRY(launch_kld(l, base, other, n));
    KVL_TRY(kvl_buffer_read(l->kld, 0, (uint64_t)n * sizeof *kld, kld));
    KVL_TRY(get_scores(l->score[0], n, base_scores));
    KVL_TRY(get_scores(l->score[1], n, other_scores));
    KVL_TRY(check_scores(l, base_scores, n));
    KVL_TRY(check_scores(l, other_scores, n));
done:
    return status;
}
