/* What the answers of all dialects share: the frame in the making, and what each choice has said so far.
 *
 * A dialect's reply begins with a dmk_answer and adds what only its form needs. The choices of an answer are
 * those that were sampled; those that are shown may be fewer (best_of), in an order of their own. One owner:
 * the loop. */
#pragma once

#include "router/api.h"

struct dmk_said_call {
    struct dmk_buf id, name, arguments;
};

struct dmk_said {
    bool begun; /* something of it has gone out */
    bool has_content;
    enum dmk_finish finish;
    struct dmk_buf content, reasoning;
    struct dmk_said_call *calls; /* [n_calls] */
    uint32_t n_calls, cap_calls;
};

struct dmk_answer {
    struct dmk_reply_conf conf; /* its strings are not kept */
    struct dmk_buf head;        /* of each chunk or body, up to and with "choices":[ */
    struct dmk_buf out;         /* the frame being written */
    bool failed;                /* memory was out: the next frame says so */
    struct dmk_said *choices;   /* [conf.n] */
    uint32_t *shown;            /* [n_shown]: choices in the order in which they are told */
    uint32_t n_shown;
};

/* prefix: of the id ("chatcmpl-"), NULL where frames have no such head. object: the value of "object". -DMK_ENOMEM, and nothing to undo. */
int dmk_answer_init(struct dmk_answer *answer, const struct dmk_reply_conf *conf,
                    const char *prefix, const char *object);
void dmk_answer_fini(struct dmk_answer *answer);

/* The dialect's `rank`: the first n of order are shown. The reply must begin with its dmk_answer. */
void dmk_answer_rank(void *reply, const uint32_t *order, uint32_t n);

/* Keeps what an event says. */
void dmk_answer_keep(struct dmk_answer *answer, uint32_t choice, const struct dmk_event *event);

/* Hands `out` to the sink and empties it; an error in its place when memory was out. */
void dmk_answer_send(struct dmk_answer *answer, const char *event);

/* A chunk with one choice: opens it behind its index; closes it with its finish reason (NULL: null) and
 * sends it. */
void dmk_answer_open(struct dmk_answer *answer, uint32_t choice);
void dmk_answer_close(struct dmk_answer *answer, const char *finish);

/* The end: the chunk with the usage, or the whole body, in which write(answer, choice) puts what stands
 * between a choice's index and its finish reason (",..."). */
void dmk_answer_end(struct dmk_answer *answer, const struct dmk_usage *usage,
                    void (*write)(struct dmk_answer *answer, uint32_t choice));
