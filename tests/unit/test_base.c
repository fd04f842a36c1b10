/* Small helpers of the base room: the median, and the guess behind "did you mean". */
#include "median.h"
#include "text.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

static void median_sorts(void **state)
{
    double odd[] = {5, 1, 3}, even[] = {4, 1, 2, 8}, one[] = {7};
    assert_true(kvl_median(odd, 3) == 3 && odd[0] == 1 && odd[2] == 5);
    assert_true(kvl_median(even, 4) == 3 && even[0] == 1 && even[3] == 8);
    assert_true(kvl_median(one, 1) == 7);
}

static void closest_name_shares_most_of_the_word(void **state)
{
    static const char *const names[] = {"f16", "int8", "plan", "bench", "kv"};
    static const struct {
        const char *word, *closest;
    } cases[] = {
        {"f1", NULL},      {"x", NULL},        {"f61", "f16"},       {"f15", "f16"}, {"int", "int8"},
        {"plna", "plan"},    {"plam", "plan"},   {"bnech", "bench"},  {"abcde", NULL}, {"int8888", NULL},
        {"benches", "bench"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *found = kvl_closest(cases[i].word, names, sizeof names / sizeof *names);
        if (cases[i].closest == NULL && found != NULL) fail_msg("%s: guessed %s", cases[i].word, found);
        if (cases[i].closest != NULL) assert_string_equal(found ? found : "nothing", cases[i].closest);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(median_sorts),
        cmocka_unit_test(closest_name_shares_most_of_the_word),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
