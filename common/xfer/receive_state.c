/* The table of D's side; see receive_state.h. Pure: no state, no clock, no allocation.
 *
 * A row: in `state`, on `event`, when the guards under `care` read `want`, go to `next` and do
 * `actions`. The first row that matches decides, so a row below holds for "otherwise". */
#include "common/xfer/receive_state.h"
#include <stddef.h>

#define STATE(s)   DMK_RECEIVE_##s
#define EVENT(e)   DMK_RECEIVE_EV_##e
#define IF(g)      DMK_RECEIVE_IF_##g
#define DO(a)      DMK_RECEIVE_DO_##a
#define CLAIM_OK   (IF(D_EQUAL) | IF(P_CURRENT) | IF(WATCHED) | IF(UNDER_BOUND))
#define NOTHING    0
#define ANY        0, 0
#define ALL_OF(g)  (g), (g)
#define NONE_OF(g) (g), 0

struct row {
    enum dmk_receive_event event;
    enum dmk_receive_state state;
    uint32_t care, want;
    enum dmk_receive_state next;
    uint32_t actions;
};

/* clang-format off */
static const struct row table[] = {
    {EVENT(RESERVE), STATE(FORGOTTEN), ALL_OF(IF(ROOM)), STATE(UNCLAIMED), NOTHING},
    {EVENT(RESERVE), STATE(FORGOTTEN), ANY,              STATE(FORGOTTEN), NOTHING},

    /* Once: a second claim, whoever sends it, is refused. */
    {EVENT(CLAIM), STATE(FORGOTTEN), ANY,              STATE(FORGOTTEN), DO(NO)},
    {EVENT(CLAIM), STATE(UNCLAIMED), ALL_OF(CLAIM_OK), STATE(CLAIMED),   DO(BIND) | DO(YES) | DO(TELL_CLAIMED)},
    {EVENT(CLAIM), STATE(UNCLAIMED), ANY,              STATE(UNCLAIMED), DO(NO)},
    {EVENT(CLAIM), STATE(CLAIMED),   ANY,              STATE(CLAIMED),   DO(NO)},
    {EVENT(CLAIM), STATE(DRAINING),  ANY,              STATE(DRAINING),  DO(NO)},
    {EVENT(CLAIM), STATE(READY),     ANY,              STATE(READY),     DO(NO)},

    /* An older P is not heard; one that means an older D hears STALE. P flushed before terminal(ok), so
     * it is a proof of quiet wherever it came in, also when the bytes are wrong. */
    {EVENT(TERMINAL_OK), STATE(FORGOTTEN), NONE_OF(IF(P_CURRENT)),      STATE(FORGOTTEN), NOTHING},
    {EVENT(TERMINAL_OK), STATE(FORGOTTEN), ANY,                         STATE(FORGOTTEN), DO(STALE)},
    {EVENT(TERMINAL_OK), STATE(UNCLAIMED), NONE_OF(IF(P_CURRENT)),      STATE(UNCLAIMED), NOTHING},
    {EVENT(TERMINAL_OK), STATE(UNCLAIMED), ANY,                         STATE(UNCLAIMED), DO(FAILED)},
    {EVENT(TERMINAL_OK), STATE(CLAIMED),   NONE_OF(IF(P_CURRENT)),      STATE(CLAIMED),   NOTHING},
    {EVENT(TERMINAL_OK), STATE(CLAIMED),   ALL_OF(IF(BYTES_EQUAL)),     STATE(READY),     DO(ACCEPTED) | DO(TELL_READY)},
    {EVENT(TERMINAL_OK), STATE(CLAIMED),   ANY,                         STATE(FORGOTTEN), DO(FAILED) | DO(TELL_FAILED) | DO(FREE)},
    {EVENT(TERMINAL_OK), STATE(DRAINING),  NONE_OF(IF(P_CURRENT)),      STATE(DRAINING),  NOTHING},
    {EVENT(TERMINAL_OK), STATE(DRAINING),  ANY,                         STATE(FORGOTTEN), DO(FAILED) | DO(FREE)},
    {EVENT(TERMINAL_OK), STATE(READY),     NONE_OF(IF(P_CURRENT)),      STATE(READY),     NOTHING},
    {EVENT(TERMINAL_OK), STATE(READY),     ANY,                         STATE(READY),     DO(ALREADY)},

    /* On the emulated lane a put may still wait in our receive buffer when the word came by another way:
     * close the claim's endpoint, and let EP_GONE free. */
    {EVENT(TERMINAL_FAIL), STATE(FORGOTTEN), NONE_OF(IF(P_CURRENT)),        STATE(FORGOTTEN), NOTHING},
    {EVENT(TERMINAL_FAIL), STATE(FORGOTTEN), ANY,                           STATE(FORGOTTEN), DO(STALE)},
    {EVENT(TERMINAL_FAIL), STATE(UNCLAIMED), NONE_OF(IF(P_CURRENT)),        STATE(UNCLAIMED), NOTHING},
    {EVENT(TERMINAL_FAIL), STATE(UNCLAIMED), ANY,                           STATE(FORGOTTEN), DO(FAILED) | DO(TELL_FAILED) | DO(FREE)},
    {EVENT(TERMINAL_FAIL), STATE(CLAIMED),   NONE_OF(IF(P_CURRENT)),        STATE(CLAIMED),   NOTHING},
    {EVENT(TERMINAL_FAIL), STATE(CLAIMED),   NONE_OF(IF(DIRECT) | IF(ON_EP)), STATE(DRAINING), DO(FAILED) | DO(CLOSE_EP) | DO(TELL_FAILED)},
    {EVENT(TERMINAL_FAIL), STATE(CLAIMED),   ANY,                           STATE(FORGOTTEN), DO(FAILED) | DO(TELL_FAILED) | DO(FREE)},
    {EVENT(TERMINAL_FAIL), STATE(DRAINING),  NONE_OF(IF(P_CURRENT)),        STATE(DRAINING),  NOTHING},
    {EVENT(TERMINAL_FAIL), STATE(DRAINING),  NONE_OF(IF(DIRECT) | IF(ON_EP)), STATE(DRAINING), DO(FAILED) | DO(CLOSE_EP)},
    {EVENT(TERMINAL_FAIL), STATE(DRAINING),  ANY,                           STATE(FORGOTTEN), DO(FAILED) | DO(FREE)},
    {EVENT(TERMINAL_FAIL), STATE(READY),     NONE_OF(IF(P_CURRENT)),        STATE(READY),     NOTHING},
    {EVENT(TERMINAL_FAIL), STATE(READY),     ANY,                           STATE(READY),     DO(ALREADY)},

    {EVENT(CLOSED_WORD), STATE(FORGOTTEN), ANY,                 STATE(FORGOTTEN), NOTHING},
    {EVENT(CLOSED_WORD), STATE(UNCLAIMED), ANY,                 STATE(FORGOTTEN), DO(TELL_FAILED) | DO(FREE)},
    {EVENT(CLOSED_WORD), STATE(CLAIMED),   NONE_OF(IF(DIRECT)), STATE(DRAINING),  DO(CLOSE_EP) | DO(TELL_FAILED)},
    {EVENT(CLOSED_WORD), STATE(CLAIMED),   ANY,                 STATE(FORGOTTEN), DO(TELL_FAILED) | DO(FREE)},
    {EVENT(CLOSED_WORD), STATE(DRAINING),  NONE_OF(IF(DIRECT)), STATE(DRAINING),  DO(CLOSE_EP)},
    {EVENT(CLOSED_WORD), STATE(DRAINING),  ANY,                 STATE(FORGOTTEN), DO(FREE)},
    {EVENT(CLOSED_WORD), STATE(READY),     ANY,                 STATE(READY),     NOTHING},

    /* In READY the pages belong to the sequence already, and its owner frees them. */
    {EVENT(CANCEL), STATE(UNCLAIMED), ANY, STATE(FORGOTTEN), DO(FREE)},
    {EVENT(CANCEL), STATE(CLAIMED),   ANY, STATE(DRAINING),  NOTHING},
    {EVENT(CANCEL), STATE(READY),     ANY, STATE(FORGOTTEN), NOTHING},

    {EVENT(EXPIRY),   STATE(UNCLAIMED), ANY, STATE(FORGOTTEN), DO(TELL_FAILED) | DO(FREE)},
    {EVENT(DEADLINE), STATE(CLAIMED),   ANY, STATE(DRAINING),  DO(TELL_FAILED)},

    {EVENT(EP_GONE), STATE(CLAIMED),  ALL_OF(IF(DIRECT)), STATE(DRAINING),  DO(ASK) | DO(TELL_FAILED)},
    {EVENT(EP_GONE), STATE(CLAIMED),  ANY,                STATE(FORGOTTEN), DO(TELL_FAILED) | DO(FREE)},
    {EVENT(EP_GONE), STATE(DRAINING), ALL_OF(IF(DIRECT)), STATE(DRAINING),  DO(ASK)},
    {EVENT(EP_GONE), STATE(DRAINING), ANY,                STATE(FORGOTTEN), DO(FREE)},

    /* On the emulated lane the end of the process proves nothing about our own receive buffer. */
    {EVENT(PROCESS_GONE), STATE(CLAIMED),  ALL_OF(IF(DIRECT)), STATE(FORGOTTEN), DO(TELL_FAILED) | DO(FREE)},
    {EVENT(PROCESS_GONE), STATE(DRAINING), ALL_OF(IF(DIRECT)), STATE(FORGOTTEN), DO(FREE)},

    /* Other transfers share the endpoint, so a P that answers keeps it. */
    {EVENT(TIMER), STATE(DRAINING), ALL_OF(IF(LATE)), STATE(DRAINING), DO(CLOSE_EP) | DO(ASK)},
    {EVENT(TIMER), STATE(DRAINING), ANY,              STATE(DRAINING), DO(ASK)},

    {EVENT(NEWER_P), STATE(CLAIMED),  ANY, STATE(CLAIMED),  NOTHING},
    {EVENT(NEWER_P), STATE(DRAINING), ANY, STATE(DRAINING), NOTHING},

    {EVENT(FINISH), STATE(READY), ANY, STATE(FORGOTTEN), NOTHING},
};
/* clang-format on */

struct dmk_receive_result dmk_receive_step(enum dmk_receive_state state,
                                           enum dmk_receive_event event, uint32_t guards)
{
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        const struct row *row = &table[i];

        if (row->event == event && row->state == state && (guards & row->care) == row->want) {
            return (struct dmk_receive_result){row->next, row->actions, true};
        }
    }
    return (struct dmk_receive_result){state, 0, false};
}

const char *dmk_receive_state_name(enum dmk_receive_state state)
{
    static const char *const names[DMK_RECEIVE_N_STATES] = {"forgotten", "unclaimed", "claimed",
                                                            "draining", "ready"};

    return (unsigned)state < DMK_RECEIVE_N_STATES ? names[state] : "?";
}
