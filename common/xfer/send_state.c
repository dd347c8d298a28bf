/* The table of P's side; see send_state.h. Pure: no state, no clock, no allocation.
 *
 * A row: in `state`, on `event`, when the guards under `care` read `want`, go to `next` and do
 * `actions`. The first row that matches decides, so a row below holds for "otherwise". */
#include "common/xfer/send_state.h"
#include <stddef.h>

#define STATE(s)   DMK_SEND_##s
#define EVENT(e)   DMK_SEND_EV_##e
#define IF(g)      DMK_SEND_IF_##g
#define DO(a)      DMK_SEND_DO_##a
#define NOTHING    0
#define ANY        0, 0
#define ALL_OF(g)  (g), (g)
#define NONE_OF(g) (g), 0

struct row {
    enum dmk_send_event event;
    enum dmk_send_state state;
    uint32_t care, want;
    enum dmk_send_state next;
    uint32_t actions;
};

/* clang-format off */
static const struct row table[] = {
    {EVENT(PREFILL), STATE(NONE), ANY, STATE(QUEUED), NOTHING},

    {EVENT(SCHEDULED), STATE(QUEUED), ALL_OF(IF(D_EQUAL)), STATE(CLAIM_SENT), DO(CLAIM)},
    {EVENT(SCHEDULED), STATE(QUEUED), ANY,                 STATE(NONE),       DO(TELL_FAILED) | DO(TELL_DONE)},

    {EVENT(YES), STATE(NONE),       ANY, STATE(NONE),       NOTHING},
    {EVENT(YES), STATE(CLAIM_SENT), ANY, STATE(RUNNING),    DO(TELL_CLAIMED)},
    {EVENT(YES), STATE(RUNNING),    ANY, STATE(RUNNING),    NOTHING},
    {EVENT(YES), STATE(FAILING),    ANY, STATE(FAILING),    NOTHING},
    {EVENT(YES), STATE(TERM_OK),    ANY, STATE(TERM_OK),    NOTHING},
    {EVENT(YES), STATE(TERM_FAIL),  ANY, STATE(TERM_FAIL),  NOTHING},

    {EVENT(NO), STATE(NONE),       ANY, STATE(NONE),      NOTHING},
    {EVENT(NO), STATE(CLAIM_SENT), ANY, STATE(NONE),      DO(TELL_FAILED) | DO(TELL_DONE)},
    {EVENT(NO), STATE(RUNNING),    ANY, STATE(RUNNING),   NOTHING},
    {EVENT(NO), STATE(FAILING),    ANY, STATE(FAILING),   NOTHING},
    {EVENT(NO), STATE(TERM_OK),    ANY, STATE(TERM_OK),   NOTHING},
    {EVENT(NO), STATE(TERM_FAIL),  ANY, STATE(TERM_FAIL), NOTHING},

    /* After a complete flush a cancel changes nothing: D's state decides. */
    {EVENT(CANCEL), STATE(QUEUED),     ANY, STATE(NONE),      DO(TELL_DONE)},
    {EVENT(CANCEL), STATE(CLAIM_SENT), ANY, STATE(FAILING),   DO(RETIRE)},
    {EVENT(CANCEL), STATE(RUNNING),    ANY, STATE(FAILING),   DO(RETIRE)},
    {EVENT(CANCEL), STATE(FAILING),    ANY, STATE(FAILING),   NOTHING},
    {EVENT(CANCEL), STATE(TERM_OK),    ANY, STATE(TERM_OK),   NOTHING},
    {EVENT(CANCEL), STATE(TERM_FAIL),  ANY, STATE(TERM_FAIL), NOTHING},

    {EVENT(DEADLINE), STATE(QUEUED),     ANY, STATE(NONE),    DO(TELL_FAILED) | DO(TELL_DONE)},
    {EVENT(DEADLINE), STATE(CLAIM_SENT), ANY, STATE(FAILING), DO(RETIRE) | DO(TELL_FAILED)},
    {EVENT(DEADLINE), STATE(RUNNING),    ANY, STATE(FAILING), DO(RETIRE) | DO(TELL_FAILED)},
    {EVENT(DEADLINE), STATE(FAILING),    ANY, STATE(FAILING), DO(CLOSE_EP)},

    {EVENT(EP_GONE), STATE(CLAIM_SENT), ANY, STATE(FAILING),   DO(RETIRE) | DO(TELL_FAILED)},
    {EVENT(EP_GONE), STATE(RUNNING),    ANY, STATE(FAILING),   DO(RETIRE) | DO(TELL_FAILED)},
    {EVENT(EP_GONE), STATE(FAILING),    ANY, STATE(FAILING),   NOTHING},
    {EVENT(EP_GONE), STATE(TERM_OK),    ANY, STATE(TERM_OK),   NOTHING}, /* RESEND opens a new one */
    {EVENT(EP_GONE), STATE(TERM_FAIL),  ANY, STATE(TERM_FAIL), NOTHING},

    {EVENT(FLUSHED), STATE(RUNNING), ANY, STATE(TERM_OK), DO(TERMINAL_OK)},
    {EVENT(FLUSHED), STATE(FAILING), ANY, STATE(FAILING), NOTHING},

    {EVENT(RETIRED), STATE(FAILING), ALL_OF(IF(EP)), STATE(TERM_FAIL), DO(TERMINAL_FAIL)},
    {EVENT(RETIRED), STATE(FAILING), ANY,            STATE(TERM_FAIL), DO(TERMINAL_FAIL) | DO(CLOSED_WORD)},

    {EVENT(ANSWER), STATE(NONE),      ANY, STATE(NONE), NOTHING},
    {EVENT(ANSWER), STATE(TERM_OK),   ANY, STATE(NONE), DO(TELL_DONE)},
    {EVENT(ANSWER), STATE(TERM_FAIL), ANY, STATE(NONE), DO(TELL_DONE)},

    {EVENT(RESEND), STATE(TERM_OK),   ANY, STATE(TERM_OK),   DO(TERMINAL_OK)},
    {EVENT(RESEND), STATE(TERM_FAIL), ANY, STATE(TERM_FAIL), DO(TERMINAL_FAIL)},

    /* A D that hangs, or a network that swallows everything, breaks no endpoint: the time alone counts. D
     * answers any terminal that it hears, so an endpoint that may still be there is of no use. */
    {EVENT(GIVE_UP), STATE(TERM_OK),   ANY, STATE(NONE), DO(CLOSE_EP) | DO(TELL_DONE)},
    {EVENT(GIVE_UP), STATE(TERM_FAIL), ANY, STATE(NONE), DO(CLOSE_EP) | DO(TELL_DONE)},

    /* A job that exists speaks by its terminal; only of one that does not exist is nothing to come. */
    {EVENT(QUIET_ASK), STATE(NONE),       ALL_OF(IF(OWN)), STATE(NONE),       DO(CLOSED_WORD)},
    {EVENT(QUIET_ASK), STATE(NONE),       ANY,             STATE(NONE),       NOTHING},
    {EVENT(QUIET_ASK), STATE(QUEUED),     ANY,             STATE(QUEUED),     NOTHING},
    {EVENT(QUIET_ASK), STATE(CLAIM_SENT), ANY,             STATE(CLAIM_SENT), NOTHING},
    {EVENT(QUIET_ASK), STATE(RUNNING),    ANY,             STATE(RUNNING),    NOTHING},
    {EVENT(QUIET_ASK), STATE(FAILING),    ANY,             STATE(FAILING),    NOTHING},
    {EVENT(QUIET_ASK), STATE(TERM_OK),    ANY,             STATE(TERM_OK),    NOTHING},
    {EVENT(QUIET_ASK), STATE(TERM_FAIL),  ANY,             STATE(TERM_FAIL),  NOTHING},
};
/* clang-format on */

struct dmk_send_result dmk_send_step(enum dmk_send_state state, enum dmk_send_event event,
                                     uint32_t guards)
{
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        const struct row *row = &table[i];

        if (row->event == event && row->state == state && (guards & row->care) == row->want) {
            return (struct dmk_send_result){row->next, row->actions, true};
        }
    }
    return (struct dmk_send_result){state, 0, false};
}

const char *dmk_send_state_name(enum dmk_send_state state)
{
    static const char *const names[DMK_SEND_N_STATES] = {
        "none", "queued", "claim-sent", "running", "failing", "terminal-ok", "terminal-fail"};

    return (unsigned)state < DMK_SEND_N_STATES ? names[state] : "?";
}
