/* Every cell of D's table under every combination of guards, against the rules written a second time as
 * plain conditions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "common/xfer/receive_state.h"

#define IF(g)  ((guards & DMK_RECEIVE_IF_##g) != 0)
#define DO(a)  DMK_RECEIVE_DO_##a
#define FORGET DMK_RECEIVE_FORGOTTEN

static struct dmk_receive_result to(enum dmk_receive_state next, uint32_t actions)
{
    return (struct dmk_receive_result){next, actions, true};
}

static struct dmk_receive_result empty(enum dmk_receive_state state)
{
    return (struct dmk_receive_result){state, 0, false};
}

static struct dmk_receive_result expect_claim(enum dmk_receive_state s, uint32_t guards)
{
    if (s == DMK_RECEIVE_UNCLAIMED && IF(D_EQUAL) && IF(P_CURRENT) && IF(WATCHED) &&
        IF(UNDER_BOUND)) {
        return to(DMK_RECEIVE_CLAIMED, DO(BIND) | DO(YES) | DO(TELL_CLAIMED));
    }
    return to(s, DO(NO));
}

static struct dmk_receive_result expect_terminal(enum dmk_receive_state s, bool ok, uint32_t guards)
{
    const bool must_close = !ok && !IF(DIRECT) && !IF(ON_EP);

    if (!IF(P_CURRENT)) {
        return to(s, 0);
    }
    switch (s) {
    case DMK_RECEIVE_FORGOTTEN:
        return to(s, DO(STALE));
    case DMK_RECEIVE_UNCLAIMED:
        return ok ? to(s, DO(FAILED)) : to(FORGET, DO(FAILED) | DO(TELL_FAILED) | DO(FREE));
    case DMK_RECEIVE_CLAIMED:
        if (ok && IF(BYTES_EQUAL)) {
            return to(DMK_RECEIVE_READY, DO(ACCEPTED) | DO(TELL_READY));
        }
        return must_close ? to(DMK_RECEIVE_DRAINING, DO(FAILED) | DO(CLOSE_EP) | DO(TELL_FAILED))
                          : to(FORGET, DO(FAILED) | DO(TELL_FAILED) | DO(FREE));
    case DMK_RECEIVE_DRAINING:
        return must_close ? to(s, DO(FAILED) | DO(CLOSE_EP)) : to(FORGET, DO(FAILED) | DO(FREE));
    default:
        return to(s, DO(ALREADY));
    }
}

static struct dmk_receive_result expect_closed_word(enum dmk_receive_state s, uint32_t guards)
{
    switch (s) {
    case DMK_RECEIVE_UNCLAIMED:
        return to(FORGET, DO(TELL_FAILED) | DO(FREE));
    case DMK_RECEIVE_CLAIMED:
        return IF(DIRECT) ? to(FORGET, DO(TELL_FAILED) | DO(FREE))
                          : to(DMK_RECEIVE_DRAINING, DO(CLOSE_EP) | DO(TELL_FAILED));
    case DMK_RECEIVE_DRAINING:
        return IF(DIRECT) ? to(FORGET, DO(FREE)) : to(s, DO(CLOSE_EP));
    default:
        return to(s, 0);
    }
}

static struct dmk_receive_result expect(enum dmk_receive_state s, enum dmk_receive_event e,
                                        uint32_t guards)
{
    const bool claimed = s == DMK_RECEIVE_CLAIMED, draining = s == DMK_RECEIVE_DRAINING;
    const bool unclaimed = s == DMK_RECEIVE_UNCLAIMED, ready = s == DMK_RECEIVE_READY;

    switch (e) {
    case DMK_RECEIVE_EV_RESERVE:
        return s == FORGET ? to(IF(ROOM) ? DMK_RECEIVE_UNCLAIMED : FORGET, 0) : empty(s);
    case DMK_RECEIVE_EV_CLAIM:
        return expect_claim(s, guards);
    case DMK_RECEIVE_EV_TERMINAL_OK:
        return expect_terminal(s, true, guards);
    case DMK_RECEIVE_EV_TERMINAL_FAIL:
        return expect_terminal(s, false, guards);
    case DMK_RECEIVE_EV_CLOSED_WORD:
        return expect_closed_word(s, guards);
    case DMK_RECEIVE_EV_CANCEL:
        return unclaimed ? to(FORGET, DO(FREE))
               : claimed ? to(DMK_RECEIVE_DRAINING, 0)
               : ready   ? to(FORGET, 0)
                         : empty(s);
    case DMK_RECEIVE_EV_EXPIRY:
        return unclaimed ? to(FORGET, DO(TELL_FAILED) | DO(FREE)) : empty(s);
    case DMK_RECEIVE_EV_DEADLINE:
        return claimed ? to(DMK_RECEIVE_DRAINING, DO(TELL_FAILED)) : empty(s);
    case DMK_RECEIVE_EV_EP_GONE:
        if (!claimed && !draining) {
            return empty(s);
        }
        return IF(DIRECT) ? to(DMK_RECEIVE_DRAINING, DO(ASK) | (claimed ? DO(TELL_FAILED) : 0))
                          : to(FORGET, DO(FREE) | (claimed ? DO(TELL_FAILED) : 0));
    case DMK_RECEIVE_EV_PROCESS_GONE:
        return IF(DIRECT) && (claimed || draining)
                   ? to(FORGET, DO(FREE) | (claimed ? DO(TELL_FAILED) : 0))
                   : empty(s);
    case DMK_RECEIVE_EV_TIMER:
        return draining ? to(s, DO(ASK) | (IF(LATE) ? DO(CLOSE_EP) : 0)) : empty(s);
    case DMK_RECEIVE_EV_NEWER_P:
        return claimed || draining ? to(s, 0) : empty(s);
    case DMK_RECEIVE_EV_FINISH:
        return ready ? to(FORGET, 0) : empty(s);
    default:
        return empty(s);
    }
}

static void test_every_cell(void **state)
{
    (void)state;
    for (int s = 0; s < DMK_RECEIVE_N_STATES; s++) {
        for (int e = 0; e < DMK_RECEIVE_N_EVENTS; e++) {
            for (uint32_t guards = 0; guards <= DMK_RECEIVE_ALL_GUARDS; guards++) {
                const struct dmk_receive_result want =
                    expect((enum dmk_receive_state)s, (enum dmk_receive_event)e, guards);
                const struct dmk_receive_result got =
                    dmk_receive_step((enum dmk_receive_state)s, (enum dmk_receive_event)e, guards);

                if (got.next != want.next || got.actions != want.actions ||
                    got.listed != want.listed) {
                    fail_msg("state %s event %d guards 0x%x: to %d doing 0x%x (%d), expected %d "
                             "0x%x (%d)",
                             dmk_receive_state_name((enum dmk_receive_state)s), e, guards, got.next,
                             got.actions, got.listed, want.next, want.actions, want.listed);
                }
            }
        }
    }
}

/* Whatever the cell: pages are freed at most where the ticket is forgotten, and a claimed ticket on the
 * direct lane is never freed by an endpoint's end, a deadline or a cancel. */
static void test_properties(void **state)
{
    (void)state;
    for (int s = 0; s < DMK_RECEIVE_N_STATES; s++) {
        for (int e = 0; e < DMK_RECEIVE_N_EVENTS; e++) {
            for (uint32_t guards = 0; guards <= DMK_RECEIVE_ALL_GUARDS; guards++) {
                const struct dmk_receive_result r =
                    dmk_receive_step((enum dmk_receive_state)s, (enum dmk_receive_event)e, guards);
                const bool frees = (r.actions & DO(FREE)) != 0;

                assert_true(!frees || r.next == FORGET);
                assert_true(!(r.actions & DO(YES)) || r.next == DMK_RECEIVE_CLAIMED);
                assert_true(!(r.actions & DO(ACCEPTED)) || r.next == DMK_RECEIVE_READY);
                assert_true(r.next != DMK_RECEIVE_READY || s == DMK_RECEIVE_READY ||
                            (s == DMK_RECEIVE_CLAIMED && e == DMK_RECEIVE_EV_TERMINAL_OK));
                if ((s == DMK_RECEIVE_CLAIMED || s == DMK_RECEIVE_DRAINING) &&
                    (e == DMK_RECEIVE_EV_CANCEL || e == DMK_RECEIVE_EV_DEADLINE ||
                     e == DMK_RECEIVE_EV_TIMER || e == DMK_RECEIVE_EV_NEWER_P ||
                     (e == DMK_RECEIVE_EV_EP_GONE && IF(DIRECT)))) {
                    assert_false(frees);
                }
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_cell),
        cmocka_unit_test(test_properties),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
