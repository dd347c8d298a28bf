/* Bytes of server-sent events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "router/sse.h"

static void check(struct dmk_buf *out, const char *want)
{
    assert_int_equal(out->len, strlen(want));
    assert_string_equal(out->data, want);
    dmk_buf_reset(out);
}

static void test_bytes(void **state)
{
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    dmk_sse_event(&out, NULL, dmk_str_from("{\"a\":1}"));
    check(&out, "data: {\"a\":1}\n\n");
    dmk_sse_event(&out, "response.created", dmk_str_from("{}"));
    check(&out, "event: response.created\ndata: {}\n\n");
    dmk_sse_event(&out, NULL, dmk_str_from("one\ntwo\r\nthree\rfour"));
    check(&out, "data: one\ndata: two\ndata: three\ndata: four\n\n");
    dmk_sse_event(&out, NULL, dmk_str_from(""));
    check(&out, "data: \n\n");
    dmk_sse_comment(&out, dmk_str_from("keep\nalive"));
    check(&out, ": keep alive\n\n");
    dmk_sse_done(&out);
    check(&out, "data: [DONE]\n\n");
    dmk_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
