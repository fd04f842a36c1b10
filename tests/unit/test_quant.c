/* Weight formats against the answers of the gguf Python package, bit for bit: both compute in f32, one rounding a step. */
#include "../../data/golden/quant_answers.h"
#include "mem.h"
#include "quant.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

static const size_t n_answers = sizeof quant_answers / sizeof quant_answers[0];

static const struct kvl_quant_type *type_named(const char *name)
{
    for (size_t i = 0; i < kvl_n_quant_types; i++)
        if (strcmp(kvl_quant_types[i].name, name) == 0) return &kvl_quant_types[i];
    return NULL;
}

/* misalignment: of the input, in bytes. */
static void check_answer(const struct quant_answer *answer, size_t misalignment)
{
    const struct kvl_quant_type *type = type_named(answer->name);
    assert_non_null(type);
    assert_int_equal(answer->n_blocks * type->bytes, answer->n_bytes);
    assert_int_equal(answer->n_blocks * type->block, answer->n_values);
    uint8_t *in;
    float *out;
    assert_int_equal(kvl_alloc(&in, answer->n_bytes + misalignment, 1), KVL_OK);
    assert_int_equal(kvl_alloc(&out, answer->n_values, sizeof *out), KVL_OK);
    memcpy(in + misalignment, answer->in, answer->n_bytes);
    type->dequantize(in + misalignment, answer->n_blocks, out);
    for (size_t i = 0; i < answer->n_values; i++) {
        uint32_t bits;
        memcpy(&bits, &out[i], sizeof bits);
        if (bits != answer->out[i]) fail_msg("%s: value %zu is %08x, wanted %08x", answer->name, i, bits, answer->out[i]);
    }
    kvl_free(&in);
    kvl_free(&out);
}

static void answers_are_bit_exact(void **state)
{
    for (size_t i = 0; i < n_answers; i++) check_answer(&quant_answers[i], 0);
}

static void input_may_lie_anywhere(void **state)
{
    for (size_t i = 0; i < n_answers; i++)
        for (size_t misalignment = 1; misalignment < 4; misalignment++) check_answer(&quant_answers[i], misalignment);
}

static void every_type_has_an_answer(void **state)
{
    assert_int_equal(n_answers, kvl_n_quant_types);
    for (size_t i = 0; i < kvl_n_quant_types; i++) {
        const struct kvl_quant_type *type = &kvl_quant_types[i];
        assert_ptr_equal(kvl_quant_type(type->gguf_type), type);
        assert_ptr_equal(type_named(quant_answers[i].name), type);
    }
    assert_null(kvl_quant_type(9));
    assert_null(kvl_quant_type(UINT32_MAX));
}

static void device_source_is_named_after_the_type(void **state)
{
    for (size_t i = 0; i < kvl_n_quant_types; i++) {
        char wanted[64] = "cl/weight/";
        size_t n = strlen(wanted);
        for (const char *c = kvl_quant_types[i].name; *c != '\0'; c++) wanted[n++] = (char)(*c >= 'A' && *c <= 'Z' ? *c + 32 : *c);
        memcpy(wanted + n, ".cl", 4);
        assert_string_equal(kvl_quant_types[i].device_source, wanted);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_bit_exact),
        cmocka_unit_test(input_may_lie_anywhere),
        cmocka_unit_test(every_type_has_an_answer),
        cmocka_unit_test(device_source_is_named_after_the_type),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
