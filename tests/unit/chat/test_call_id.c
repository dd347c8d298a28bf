/* Tool-call ids: the form comes back, other makers' ids and damaged ones do not pass for ours. */
#include "tests/unit/chat/chat_test.h"
#include "common/chat/call_id.h"

/* Each of the forms there are, numbered. */
static struct dmk_call_form form_of(unsigned n)
{
    return (struct dmk_call_form){.channel = (enum dmk_call_channel)(n % 3),
                                  .type = (enum dmk_call_type)(n / 3 % 4),
                                  .recipient_in_channel = n / 12 % 2,
                                  .bare_name = n / 24 % 2,
                                  .constrain = n / 48 % 2,
                                  .space_before = n / 96 % 2,
                                  .space_after = n / 192 % 2};
}

static bool same_form(const struct dmk_call_form *a, const struct dmk_call_form *b)
{
    return a->channel == b->channel && a->type == b->type &&
           a->recipient_in_channel == b->recipient_in_channel && a->bare_name == b->bare_name &&
           a->constrain == b->constrain && a->space_before == b->space_before &&
           a->space_after == b->space_after;
}

static void test_every_form_comes_back(void **state)
{
    char id[DMK_CALL_ID_BYTES], again[DMK_CALL_ID_BYTES];

    (void)state;
    for (unsigned n = 0; n < 384; n++) {
        const struct dmk_call_form form = form_of(n);
        struct dmk_call_form read;

        dmk_call_id_make(n * 977, n % 7, &form, id);
        dmk_call_id_make(n * 977, n % 7, &form, again);
        assert_string_equal(id, again);
        assert_int_equal(strlen(id), DMK_CALL_ID_LEN);
        assert_int_equal(strncmp(id, "call_", 5), 0);
        assert_int_equal(strspn(id + 5, "abcdefghijklmnopqrstuvwxyz234567"), 24);
        assert_true(dmk_call_id_read(dmk_str_from(id), &read));
        assert_true(same_form(&form, &read));
    }
}

static void test_ids_differ(void **state)
{
    const struct dmk_call_form form = {0};
    char ids[4][DMK_CALL_ID_BYTES];

    (void)state;
    dmk_call_id_make(1, 0, &form, ids[0]);
    dmk_call_id_make(1, 1, &form, ids[1]);
    dmk_call_id_make(2, 0, &form, ids[2]);
    dmk_call_id_make(0, 1, &form, ids[3]);
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(ids[i], ids[j]);
        }
    }
}

/* A changed character never passes unnoticed: all of them, all changes. */
static void test_damaged(void **state)
{
    const struct dmk_call_form form = form_of(100);
    char id[DMK_CALL_ID_BYTES];
    struct dmk_call_form read;

    (void)state;
    dmk_call_id_make(42, 3, &form, id);
    for (unsigned at = 0; at < DMK_CALL_ID_LEN; at++) {
        const char was = id[at];

        for (int c = 0; c < 256; c++) {
            id[at] = (char)c;
            assert_int_equal(dmk_call_id_read((struct dmk_str){id, DMK_CALL_ID_LEN}, &read),
                             (char)c == was);
        }
        id[at] = was;
    }
    assert_false(dmk_call_id_read((struct dmk_str){id, DMK_CALL_ID_LEN - 1}, &read));
    assert_false(dmk_call_id_read((struct dmk_str){id, 0}, &read));
}

static void test_foreign(void **state)
{
    static const char *const ids[] = {"c1",
                                      "",
                                      "call_AbCdEfGhIjKlMnOpQrStUvWx",
                                      "call_abcdefghijklmnopqrstuvwx",
                                      "chatcmpl-tool-0123456789abcdef",
                                      "call_aaaaaaaaaaaaaaaaaaaaaaaa",
                                      "toolu_01abcdefghijklmnopqrst"};
    struct random r = {.seed = 20250628};
    struct dmk_call_form read;

    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        assert_false(dmk_call_id_read(dmk_str_from(ids[i]), &read));
    }
    (void)state;
    print_message("seed %llu\n", (unsigned long long)r.seed);
    for (int i = 0; i < 20000; i++) {
        char id[DMK_CALL_ID_BYTES] = "call_";

        for (int j = 5; j < DMK_CALL_ID_LEN; j++) {
            id[j] = "abcdefghijklmnopqrstuvwxyz234567"[random_below(&r, 32)];
        }
        assert_false(dmk_call_id_read(dmk_str_from(id), &read));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_form_comes_back),
        cmocka_unit_test(test_ids_differ),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_foreign),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
