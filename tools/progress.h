/* The progress of something long on stderr: one line that is written over on a terminal, else a line every few
 * seconds. One thread calls. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dmk_progress {
    const char *what; /* "converting" */
    bool tty, quiet;
    bool open; /* a line on the terminal waits for its end */
    uint64_t start_ns, last_ns;
    uint64_t skipped; /* bytes of done that took no work: they count for no speed */
};

void dmk_progress_begin(struct dmk_progress *p, const char *what, bool quiet);
/* Any number of times; most calls do nothing. */
void dmk_progress_show(struct dmk_progress *p, uint64_t done, uint64_t total);
/* Ends the line, if one is open. */
void dmk_progress_end(struct dmk_progress *p);

/* The text of such a line: "converting  37.2%  4.81 of 12.93 GB  412 MB/s  0:20 left". */
void dmk_progress_text(const struct dmk_progress *p, uint64_t done, uint64_t total, uint64_t now_ns,
                       char ret_text[128]);
