/* What P and D say to each other on a transfer's endpoint: claim, its reply, terminal, its answer.
 *
 * Every message carries both incarnations and the ticket's cookie. Wire form: versioned,
 * little-endian, with a checksum; decode checks every field. docs/WIRE.md lists the bytes. */
#pragma once

#include "common/base/buf.h"
#include "common/xfer/xfer.h"

enum dmk_message_type {
    DMK_MESSAGE_CLAIM = 1,    /* P to D */
    DMK_MESSAGE_REPLY = 2,    /* D to P */
    DMK_MESSAGE_TERMINAL = 3, /* P to D */
    DMK_MESSAGE_ANSWER = 4,   /* D to P */
};

enum dmk_message_reply {
    DMK_REPLY_YES = 0,
    DMK_REPLY_UNKNOWN = 1,     /* no such ticket: expired, cancelled, or never ours */
    DMK_REPLY_CLAIMED = 2,     /* by somebody already */
    DMK_REPLY_INCARNATION = 3, /* one of the two is older than what D knows */
    DMK_REPLY_WATCH = 4,       /* D cannot watch P's process, which this lane needs */
    DMK_REPLY_DRAINING = 5,    /* too many pages wait for this P */
};

enum dmk_message_answer {
    DMK_ANSWER_ACCEPTED = 1,
    DMK_ANSWER_ALREADY = 2,
    DMK_ANSWER_STALE = 3,
    DMK_ANSWER_FAILED = 4,
};

struct dmk_message {
    enum dmk_message_type type;
    uint64_t from_incarnation, to_incarnation;
    uint64_t worker; /* hash of the sender's worker id: the same over restarts; 0 = unnamed */
    struct dmk_id128 cookie;
    uint64_t generation;
    /* CLAIM */
    uint8_t watch[DMK_XFER_WATCH_MAX];
    size_t watch_len;
    /* REPLY */
    enum dmk_message_reply reply;
    /* TERMINAL */
    bool ok;
    uint64_t bytes; /* put and flushed */
    /* ANSWER */
    enum dmk_message_answer answer;
};

#define DMK_MESSAGE_MAX_BYTES 256

/* Writes at most DMK_MESSAGE_MAX_BYTES; returns the length. */
size_t dmk_message_encode(const struct dmk_message *message, uint8_t *ret_bytes);
/* -DMK_EFORMAT for anything that is not a whole, undamaged message of this version. */
int dmk_message_decode(struct dmk_bytes bytes, struct dmk_message *ret_message);

/* The sentence for a person, e.g. "the decode worker cannot watch this process". */
const char *dmk_message_reply_text(enum dmk_message_reply reply);
