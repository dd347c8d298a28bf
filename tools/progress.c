/* See progress.h. */
#include "tools/progress.h"

#include <stdio.h>
#include <unistd.h>
#include "common/base/clock.h"

#define TTY_EVERY_NS 100000000ull
#define LOG_EVERY_NS 5000000000ull

void dmk_progress_begin(struct dmk_progress *p, const char *what, bool quiet)
{
    *p = (struct dmk_progress){.what = what, .quiet = quiet, .tty = isatty(STDERR_FILENO) != 0};
    p->start_ns = p->last_ns = dmk_clock_ns();
}

void dmk_progress_text(const struct dmk_progress *p, uint64_t done, uint64_t total, uint64_t now_ns,
                       char ret_text[128])
{
    const double seconds = (double)(now_ns - p->start_ns) / 1e9;
    const double worked = done > p->skipped ? (double)(done - p->skipped) : 0;
    const double speed = seconds > 0 ? worked / seconds : 0;
    const double left = speed > 0 && total > done ? (double)(total - done) / speed : 0;
    const unsigned long s = left < 360000 ? (unsigned long)(left + 0.5) : 359999;

    (void)snprintf(ret_text, 128, "%s %5.1f%%  %.2f of %.2f GB  %.0f MB/s  %lu:%02lu left", p->what,
                   total ? 100.0 * (double)done / (double)total : 100.0, (double)done / 1e9,
                   (double)total / 1e9, speed / 1e6, s / 60, s % 60);
}

void dmk_progress_show(struct dmk_progress *p, uint64_t done, uint64_t total)
{
    const uint64_t now = dmk_clock_ns();
    char text[128];

    if (p->quiet || now - p->last_ns < (p->tty ? TTY_EVERY_NS : LOG_EVERY_NS)) {
        return;
    }
    p->last_ns = now;
    dmk_progress_text(p, done, total, now, text);
    (void)fprintf(stderr, p->tty ? "\r%s\x1b[K" : "%s\n", text);
    p->open = p->tty;
}

void dmk_progress_end(struct dmk_progress *p)
{
    if (p->open) {
        (void)fprintf(stderr, "\n");
        p->open = false;
    }
}
