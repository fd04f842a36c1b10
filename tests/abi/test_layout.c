/* The plug-in ABI, major 1, as bytes: offsets and sizes that plug-ins already built rely on. A row may be added, never changed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "kvl_plugin.h"

struct frozen {
    const char *what;
    size_t found, wanted;
};
#define AT(type, member, wanted)                                                                                                   \
    {                                                                                                                              \
#type "." #member, offsetof(struct type, member), wanted                                                                   \
    }
#define SIZE(type, wanted)                                                                                                         \
    {                                                                                                                              \
        "sizeof " #type, sizeof(struct type), wanted                                                                               \
    }

static const struct frozen layout[] = {
    AT(kvl_option, name, 0),
    AT(kvl_option, help, 8),
    AT(kvl_option, type, 16),
    AT(kvl_option, offset, 20),
    AT(kvl_option, fallback, 24),
    AT(kvl_option, min, 32),
    AT(kvl_option, max, 40),
    AT(kvl_option, choices, 48),
    SIZE(kvl_option, 56),

    AT(kvl_host, struct_size, 0),
    AT(kvl_host, error, 8),

    AT(kvl_plugin_head, magic, 0),
    AT(kvl_plugin_head, abi_major, 4),
    AT(kvl_plugin_head, abi_minor, 6),
    AT(kvl_plugin_head, struct_size, 8),
    AT(kvl_plugin_head, kind, 12),
    AT(kvl_plugin_head, name, 16),
    AT(kvl_plugin_head, summary, 24),
    AT(kvl_plugin_head, citation, 32),
    AT(kvl_plugin_head, byte_version, 40),
    AT(kvl_plugin_head, n_options, 44),
    AT(kvl_plugin_head, options, 48),
    AT(kvl_plugin_head, private_size, 56),
    AT(kvl_plugin_head, device_source, 64),
    AT(kvl_plugin_head, card, 72),
    AT(kvl_plugin_head, init, 80),
    AT(kvl_plugin_head, fini, 88),
    SIZE(kvl_plugin_head, 96),

    AT(kvl_codec_dims, struct_size, 0),
    AT(kvl_codec_dims, role, 4),
    AT(kvl_codec_dims, head_dim, 8),
    AT(kvl_codec_dims, page_tokens, 12),

    AT(kvl_codec_shape, struct_size, 0),
    AT(kvl_codec_shape, group, 4),
    AT(kvl_codec_shape, unit, 8),
    AT(kvl_codec_shape, tail_min, 12),
    AT(kvl_codec_shape, page_multiple, 16),
    AT(kvl_codec_shape, alignment, 20),
    AT(kvl_codec_shape, block_bytes, 24),
    AT(kvl_codec_shape, stream_bytes, 32),
    AT(kvl_codec_shape, table_floats, 40),
    AT(kvl_codec_shape, aux_floats, 44),
    AT(kvl_codec_shape, learn_queries, 48), /* from here on: ABI 1.2 */
    AT(kvl_codec_shape, reserved, 52),

    AT(kvl_codec_bytes, payload, 0),
    AT(kvl_codec_bytes, scale, 8),
    AT(kvl_codec_bytes, index, 16),
    SIZE(kvl_codec_bytes, 24),

    AT(kvl_known_answer, options, 0),
    AT(kvl_known_answer, role, 8),
    AT(kvl_known_answer, head_dim, 12),
    AT(kvl_known_answer, n, 16),
    AT(kvl_known_answer, x, 24),
    AT(kvl_known_answer, decoded, 32),
    AT(kvl_known_answer, tolerance, 40),
    SIZE(kvl_known_answer, 48),

    AT(kvl_codec, head, 0),
    AT(kvl_codec, roles, 96),
    AT(kvl_codec, rope_stages, 100),
    AT(kvl_codec, flags, 104),
    AT(kvl_codec, shape, 112),
    AT(kvl_codec, bytes, 120),
    AT(kvl_codec, ref_encode, 128),
    AT(kvl_codec, ref_decode, 136),
    AT(kvl_codec, defines, 144),
    AT(kvl_codec, known_answers, 152),
    AT(kvl_codec, n_known_answers, 160),
    AT(kvl_codec, reserved2, 164),
    AT(kvl_codec, calibrate, 168), /* from here on: ABI 1.1 */
    AT(kvl_codec, known_tables, 176),
    AT(kvl_codec, learn, 184), /* from here on: ABI 1.2 */

    AT(kvl_prompt_rows, struct_size, 0),
    AT(kvl_prompt_rows, n_row, 4),
    AT(kvl_prompt_rows, n_head, 8),
    AT(kvl_prompt_rows, n_query, 12),
    AT(kvl_prompt_rows, x, 16),
    AT(kvl_prompt_rows, q, 24),

    AT(kvl_calibration, struct_size, 0),
    AT(kvl_calibration, context, 8),
    AT(kvl_calibration, put, 16),

    AT(kvl_score_needs, struct_size, 0),
    AT(kvl_score_needs, what, 4),
    AT(kvl_score_needs, queries, 8),
    AT(kvl_score_needs, first_query, 12),
    AT(kvl_score_needs, normals, 16),
    AT(kvl_score_needs, repeat_tokens, 24), /* from here on: ABI 1.2 */
    AT(kvl_score_needs, repeat_lead, 28),
    AT(kvl_score_needs, repeat_first, 32),
    AT(kvl_score_needs, repeat_later, 40),
    AT(kvl_score_needs, repeat_tail, 48),
    AT(kvl_score_needs, recent_queries, 56),

    AT(kvl_numbers, n, 0),
    AT(kvl_numbers, value, 8),
    SIZE(kvl_numbers, 2056),

    AT(kvl_witness, n, 0),
    AT(kvl_witness, first, 4),
    AT(kvl_witness, end, 8),
    AT(kvl_witness, q, 16),
    AT(kvl_witness, k, 24),
    SIZE(kvl_witness, 32),

    AT(kvl_score_input, struct_size, 0),
    AT(kvl_score_input, layer, 4),
    AT(kvl_score_input, n_layer, 8),
    AT(kvl_score_input, n_token, 12),
    AT(kvl_score_input, n_head, 16),
    AT(kvl_score_input, n_kv_head, 20),
    AT(kvl_score_input, head_dim, 24),
    AT(kvl_score_input, n_embd, 28),
    AT(kvl_score_input, rope_dim, 32),
    AT(kvl_score_input, n_query, 36),
    AT(kvl_score_input, target, 40),
    AT(kvl_score_input, fraction, 48),
    AT(kvl_score_input, k, 56),
    AT(kvl_score_input, k_pre, 64),
    AT(kvl_score_input, v, 72),
    AT(kvl_score_input, q, 80),
    AT(kvl_score_input, q_mean, 88),
    AT(kvl_score_input, q_cov, 96),
    AT(kvl_score_input, column_sum, 104),
    AT(kvl_score_input, w_o, 112),
    AT(kvl_score_input, normal, 120),
    AT(kvl_score_input, rope_freq, 128),
    AT(kvl_score_input, witness, 136), /* from here on: ABI 1.2 */
    AT(kvl_score_input, n_witness, 144),
    AT(kvl_score_input, position, 152),
    AT(kvl_score_input, n_seen, 160),
    AT(kvl_score_input, next, 164),

    AT(kvl_score, needs, 96),
    AT(kvl_score, ref, 104),
    AT(kvl_score, wrap, 112),
    AT(kvl_score, running, 120), /* from here on: ABI 1.2 */
    AT(kvl_score_running, struct_size, 0),
    AT(kvl_score_running, source, 4),
    AT(kvl_score_running, is_shared, 8),
    AT(kvl_score_running, first, 12),
    AT(kvl_score_running, newest, 16),
    AT(kvl_score_running, parameter, 20),
    AT(kvl_score_running, by_ref, 24),

    AT(kvl_amount, kept, 0),
    AT(kvl_amount, removed, 8),
    AT(kvl_amount, tokens, 16),
    AT(kvl_amount, bytes, 24),
    SIZE(kvl_amount, 32),

    AT(kvl_budget_input, struct_size, 0),
    AT(kvl_budget_input, layer, 4),
    AT(kvl_budget_input, n_layer, 8),
    AT(kvl_budget_input, n_token, 12),
    AT(kvl_budget_input, n_kv_head, 16),
    AT(kvl_budget_input, target, 20),
    AT(kvl_budget_input, fraction, 24),

    AT(kvl_budget, layer_target, 96),
    AT(kvl_budget, split, 104),

    AT(kvl_projection_dims, struct_size, 0), /* all of projections: ABI 1.2 */
    AT(kvl_projection_dims, role, 4),
    AT(kvl_projection_dims, head_dim, 8),
    AT(kvl_projection_dims, rank, 12),
    SIZE(kvl_projection_dims, 16),
    AT(kvl_projection_shape, struct_size, 0),
    AT(kvl_projection_shape, heads, 4),
    AT(kvl_projection_shape, rank, 8),
    AT(kvl_projection_shape, rebuilt, 12),
    AT(kvl_projection_shape, table_floats, 16),
    AT(kvl_projection_shape, layers, 20),
    AT(kvl_projection, roles, 96),
    AT(kvl_projection, shape, 104),
    AT(kvl_projection, matrices, 112),
    AT(kvl_projection, calibrate, 120),
    AT(kvl_projection, ranks, 128),
    AT(kvl_projection_tables, n_layer, 4),
    AT(kvl_projection_tables, n_stream, 8),
    AT(kvl_projection_tables, table_floats, 12),
    AT(kvl_projection_tables, values, 16),
};

static void layout_is_frozen(void **state)
{
    if (sizeof(void *) != 8) skip();
    for (size_t i = 0; i < sizeof layout / sizeof *layout; i++)
        if (layout[i].found != layout[i].wanted) fail_msg("%s is %zu, was %zu", layout[i].what, layout[i].found, layout[i].wanted);
}

static void numbers_are_frozen(void **state)
{
    assert_int_equal(KVL_PLUGIN_MAGIC, 0x4c564b31);
    assert_int_equal(KVL_ABI_MAJOR, 1);
    assert_int_equal(KVL_KIND_CODEC | KVL_KIND_SCORE << 4 | KVL_KIND_BUDGET << 8, 0x321);
    assert_int_equal(KVL_OPTION_INT | KVL_OPTION_FLOAT << 4 | KVL_OPTION_CHOICE << 8 | KVL_OPTION_SCORE << 12, 0x4321);
    assert_int_equal(KVL_NEED_K | KVL_NEED_V << 8 | KVL_NEED_QUERIES << 16, 0x40201);
    assert_int_equal(KVL_NEED_QUERY_STATS | KVL_NEED_COLUMN_SUMS | KVL_NEED_OUTPUT | KVL_NEED_NORMALS, 0x78);
    assert_int_equal(KVL_NEED_FOLLOWING | KVL_NEED_REPETITION, 0x180);
    assert_int_equal(KVL_OPTION_NUMBERS, 5);
    assert_int_equal(KVL_KIND_PROJECTION, 4);
    assert_int_equal(KVL_OPTION_CODEC, 6);
    assert_int_equal(KVL_ROLE_K | KVL_ROLE_V << 4 | KVL_ROLE_JOINT << 8, 0x421);
    assert_int_equal(KVL_ROPE_POST | KVL_ROPE_PRE << 4, 0x21);
    assert_int_equal(KVL_CODEC_MOVABLE | KVL_CODEC_NEEDS_TABLE << 4 | KVL_CODEC_HAS_SCORES << 8 | KVL_CODEC_HAS_ACCUMULATE << 12,
                     0x8421);
    assert_int_equal(KVL_CODEC_NO_ROTATION | KVL_CODEC_HAS_COLUMNS, 48);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(layout_is_frozen), cmocka_unit_test(numbers_are_frozen)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
