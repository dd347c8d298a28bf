/* Every cell of P's table under every combination of guards, against the rules written a second time as
 * plain conditions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "common/xfer/send_state.h"

#define IF(g) ((guards & DMK_SEND_IF_##g) != 0)
#define DO(a) DMK_SEND_DO_##a
#define ENDED (DO(TELL_FAILED) | DO(TELL_DONE))

static struct dmk_send_result to(enum dmk_send_state next, uint32_t actions)
{
    return (struct dmk_send_result){next, actions, true};
}

static struct dmk_send_result empty(enum dmk_send_state state)
{
    return (struct dmk_send_result){state, 0, false};
}

static struct dmk_send_result expect(enum dmk_send_state s, enum dmk_send_event e, uint32_t guards)
{
    const bool none = s == DMK_SEND_NONE, queued = s == DMK_SEND_QUEUED;
    const bool sent = s == DMK_SEND_CLAIM_SENT, running = s == DMK_SEND_RUNNING;
    const bool failing = s == DMK_SEND_FAILING, ok = s == DMK_SEND_TERM_OK;
    const bool term = ok || s == DMK_SEND_TERM_FAIL;

    switch (e) {
    case DMK_SEND_EV_PREFILL:
        return none ? to(DMK_SEND_QUEUED, 0) : empty(s);
    case DMK_SEND_EV_SCHEDULED:
        return !queued       ? empty(s)
               : IF(D_EQUAL) ? to(DMK_SEND_CLAIM_SENT, DO(CLAIM))
                             : to(DMK_SEND_NONE, ENDED);
    case DMK_SEND_EV_YES:
        return queued ? empty(s) : sent ? to(DMK_SEND_RUNNING, DO(TELL_CLAIMED)) : to(s, 0);
    case DMK_SEND_EV_NO:
        return queued ? empty(s) : sent ? to(DMK_SEND_NONE, ENDED) : to(s, 0);
    case DMK_SEND_EV_CANCEL:
        return none              ? empty(s)
               : queued          ? to(DMK_SEND_NONE, DO(TELL_DONE))
               : sent || running ? to(DMK_SEND_FAILING, DO(RETIRE))
                                 : to(s, 0);
    case DMK_SEND_EV_DEADLINE:
        return queued            ? to(DMK_SEND_NONE, ENDED)
               : sent || running ? to(DMK_SEND_FAILING, DO(RETIRE) | DO(TELL_FAILED))
               : failing         ? to(s, DO(CLOSE_EP))
                                 : empty(s);
    case DMK_SEND_EV_EP_GONE:
        return sent || running   ? to(DMK_SEND_FAILING, DO(RETIRE) | DO(TELL_FAILED))
               : failing || term ? to(s, 0)
                                 : empty(s);
    case DMK_SEND_EV_FLUSHED:
        return running ? to(DMK_SEND_TERM_OK, DO(TERMINAL_OK)) : failing ? to(s, 0) : empty(s);
    case DMK_SEND_EV_RETIRED:
        return failing ? to(DMK_SEND_TERM_FAIL, DO(TERMINAL_FAIL) | (IF(EP) ? 0 : DO(CLOSED_WORD)))
                       : empty(s);
    case DMK_SEND_EV_ANSWER:
        return none ? to(s, 0) : term ? to(DMK_SEND_NONE, DO(TELL_DONE)) : empty(s);
    case DMK_SEND_EV_RESEND:
        return term ? to(s, ok ? DO(TERMINAL_OK) : DO(TERMINAL_FAIL)) : empty(s);
    case DMK_SEND_EV_GIVE_UP:
        return term ? to(DMK_SEND_NONE, DO(CLOSE_EP) | DO(TELL_DONE)) : empty(s);
    case DMK_SEND_EV_QUIET_ASK:
        return to(s, none && IF(OWN) ? DO(CLOSED_WORD) : 0);
    default:
        return empty(s);
    }
}

static void test_every_cell(void **state)
{
    (void)state;
    for (int s = 0; s < DMK_SEND_N_STATES; s++) {
        for (int e = 0; e < DMK_SEND_N_EVENTS; e++) {
            for (uint32_t guards = 0; guards <= DMK_SEND_ALL_GUARDS; guards++) {
                const struct dmk_send_result want =
                    expect((enum dmk_send_state)s, (enum dmk_send_event)e, guards);
                const struct dmk_send_result got =
                    dmk_send_step((enum dmk_send_state)s, (enum dmk_send_event)e, guards);

                if (got.next != want.next || got.actions != want.actions ||
                    got.listed != want.listed) {
                    fail_msg("state %s event %d guards 0x%x: to %d doing 0x%x (%d), expected %d "
                             "0x%x (%d)",
                             dmk_send_state_name((enum dmk_send_state)s), e, guards, got.next,
                             got.actions, got.listed, want.next, want.actions, want.listed);
                }
            }
        }
    }
}

/* From the claim on no way leads to NONE but a no, an answer or giving up a terminal; and done is told
 * exactly when a job that exists ends. */
static void test_properties(void **state)
{
    (void)state;
    for (int s = 0; s < DMK_SEND_N_STATES; s++) {
        for (int e = 0; e < DMK_SEND_N_EVENTS; e++) {
            for (uint32_t guards = 0; guards <= DMK_SEND_ALL_GUARDS; guards++) {
                const struct dmk_send_result r =
                    dmk_send_step((enum dmk_send_state)s, (enum dmk_send_event)e, guards);
                const bool ends = s != DMK_SEND_NONE && r.next == DMK_SEND_NONE;

                assert_int_equal(ends, (r.actions & DO(TELL_DONE)) != 0);
                assert_true(!ends || s == DMK_SEND_QUEUED ||
                            (s == DMK_SEND_CLAIM_SENT && e == DMK_SEND_EV_NO) ||
                            s == DMK_SEND_TERM_OK || s == DMK_SEND_TERM_FAIL);
                assert_true(!(r.actions & DO(CLAIM)) || s == DMK_SEND_QUEUED);
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
