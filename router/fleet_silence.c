/* Workers that hang: their streams stand, and nothing comes of them. Loop only; see fleet.h.
 *
 * A process that is stopped, a loop that waits for a lock or a driver, a device that does not come back: the
 * connection's own pings may be answered all the same, or fail only after a while. A worker promises a load report
 * now and then; one that is late with it by far, or says itself that a step takes too long, gets new work only when
 * there is no other. Nothing ends by this: requests have deadlines of their own, and a word takes it back. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/fleet_internal.h"

#define LOOK_MS      500
#define LATE_REPORTS 3 /* that must be missing, whatever the option says */

static uint64_t patience_ns(const struct dmk_worker *w)
{
    const uint64_t late_ms = (uint64_t)w->load_at_least_ms * LATE_REPORTS;
    const uint64_t conf_ms = w->fleet->conf.silence_ms;

    return (late_ms > conf_ms ? late_ms : conf_ms) * DMK_NS_PER_MS;
}

static bool is_silent(const struct dmk_worker *w, uint64_t now_ns)
{
    return w->load_at_least_ms > 0 && now_ns - w->heard_ns > patience_ns(w);
}

static void set_hangs(struct dmk_worker *w, bool hangs, const char *why)
{
    if (!w->up || w->hangs == hangs) {
        return;
    }
    w->hangs = hangs;
    dmk_log_warn("worker=%s (%s) %s", w->id, dmk_fleet__role_name(w->role), why);
    dmk_fleet__count(w->fleet);
}

void dmk_fleet__heard(struct dmk_worker *w)
{
    w->heard_ns = dmk_loop_now_ns(w->fleet->conf.loop);
    if (w->load.stuck) {
        set_hangs(w, true,
                  "says that its engine is stuck: it gets work only when there is no other");
    } else {
        set_hangs(w, false, "is heard of again");
    }
}

static void look(void *ud)
{
    struct dmk_fleet *fleet = ud;
    const uint64_t now = dmk_loop_now_ns(fleet->conf.loop);
    const bool was_away = now - fleet->looked_ns > 2 * LOOK_MS * DMK_NS_PER_MS;

    fleet->looked_ns = now;
    if (was_away) {
        return; /* the silence was this process's own: what was said meanwhile has yet to be read */
    }
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        struct dmk_worker *w = fleet->workers[i];

        if (w && w->up && is_silent(w, now)) {
            set_hangs(w, true, "is silent: it gets work only when there is no other");
        }
    }
}

int dmk_fleet__silence_start(struct dmk_fleet *fleet)
{
    fleet->silence_timer = dmk_timer_new(fleet->conf.loop, look, fleet);
    if (!fleet->silence_timer) {
        return -DMK_ENOMEM;
    }
    dmk_timer_start(fleet->silence_timer, LOOK_MS, LOOK_MS);
    return 0;
}
