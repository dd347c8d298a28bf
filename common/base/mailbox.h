/* Messages from any thread to one owner.
 *
 * An intrusive multi-producer, single-consumer stack: push from any thread, take everything at once
 * on the owner's thread in the order of pushing. push says whether the box was empty, so the pusher
 * wakes the owner only then. No locks, no allocation. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct dmk_mail {
    struct dmk_mail *next;
};

struct dmk_mailbox {
    _Atomic(struct dmk_mail *) head;
};

bool dmk_mailbox_push(struct dmk_mailbox *box, struct dmk_mail *mail);

/* The messages, oldest first, linked by next; NULL when there are none. */
struct dmk_mail *dmk_mailbox_take(struct dmk_mailbox *box);
