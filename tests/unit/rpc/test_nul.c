/* NUL in the texts of a message: found wherever it stands, and nowhere else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "common/base/rng.h"
#include "common/rpc/nul.h"
#include "proto/damask_frontend.pb-c.h"

static const char *find(const void *data, size_t len)
{
    /* Exactly as long, so that a sanitizer sees a step too far. */
    uint8_t *copy = malloc(len > 0 ? len : 1);
    const char *name;

    assert_non_null(copy);
    memcpy(copy, data, len);
    name = dmk_rpc_nul_field(&damask__v1__chat_request__descriptor,
                             (struct dmk_bytes){.data = copy, .len = len});
    free(copy);
    return name;
}

static size_t pack(char mark, uint8_t out[512])
{
    Damask__V1__ChatRequest m = DAMASK__V1__CHAT_REQUEST__INIT;
    Damask__V1__ChatMessage message = DAMASK__V1__CHAT_MESSAGE__INIT, *messages[] = {&message};
    char model[] = "model", content[] = "con?tent", stop[] = "st?op", *stops[] = {stop};

    *strchr(content, '?') = mark == 'c' ? '\1' : 'x';
    *strchr(stop, '?') = mark == 's' ? '\1' : 'x';
    model[1] = mark == 'm' ? '\1' : 'x';
    m.model = model;
    message.content = content;
    m.messages = messages;
    m.n_messages = 1;
    m.stop = stops;
    m.n_stop = 1;
    assert_true(damask__v1__chat_request__get_packed_size(&m) < 512);

    const size_t n = damask__v1__chat_request__pack(&m, out);

    /* The mark becomes the NUL that no C string can hold. */
    for (size_t i = 0; mark && i < n; i++) {
        if (out[i] == 1 && i > 0 && out[i - 1] >= 'a' && out[i - 1] <= 'z') {
            out[i] = 0;
        }
    }
    return n;
}

static void test_places(void **state)
{
    static const struct {
        char mark;
        const char *name;
    } places[] = {{'m', "model"}, {'c', "content"}, {'s', "stop"}};
    uint8_t wire[512];
    size_t n = pack(0, wire);

    (void)state;
    assert_null(find(wire, n));
    assert_null(find(wire, 0));
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        const char *name;

        n = pack(places[i].mark, wire);
        name = find(wire, n);
        assert_non_null(name);
        assert_string_equal(name, places[i].name);
    }
}

/* Fields of other numbers and types hold what they like; so do bytes. */
static void test_unknown(void **state)
{
    static const uint8_t unknown[] = {0xfa, 0x7f, 3, 0, 0, 0};                /* field 2047 */
    static const uint8_t numbers[] = {0x80, 0x7d, 0, 0x85, 0x7d, 0, 0, 0, 0}; /* varint, fixed32 */
    static const uint8_t far[] = {0xfa, 0xff, 0xff, 0xff, 0xff,
                                  0xff, 0x7f, 1,    0}; /* beyond 32 bits */

    (void)state;
    assert_null(find(unknown, sizeof(unknown)));
    assert_null(find(numbers, sizeof(numbers)));
    assert_null(find(far, sizeof(far)));
}

/* Any bytes end the walk inside the bytes. */
static void test_noise(void **state)
{
    const uint64_t seed = (uint64_t)time(NULL);
    uint64_t counter = 0;
    uint8_t wire[512];

    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    for (unsigned round = 0; round < 20000; round++) {
        size_t n = pack("\0mcs"[round % 4], wire);

        for (unsigned k = 0; k < 1 + round % 5; k++) {
            const uint64_t r = dmk_rng_u64(seed, 0, counter++);

            wire[r % n] = (uint8_t)(r >> 32);
        }
        n -= dmk_rng_u64(seed, 0, counter++) % n;
        (void)find(wire, n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_unknown),
        cmocka_unit_test(test_noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
