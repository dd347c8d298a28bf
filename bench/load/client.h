/* One streamed request over its own connection, without waiting: the caller's poller says when the socket can
 * be read or written. */
#pragma once

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include "common/base/buf.h"

enum client_state { CLIENT_CONNECTING, CLIENT_SENDING, CLIENT_READING, CLIENT_DONE };

struct client_record {
    uint64_t due_ns, start_ns, first_ns, last_ns, end_ns; /* CLOCK_MONOTONIC; first: of text */
    uint32_t n_in, n_out;                                 /* tokens; n_out as the server counts */
    uint32_t n_asked;                                     /* answer tokens asked for */
    uint32_t n_events, n_reads;
    uint32_t status; /* of HTTP; 0: none came */
    bool ok;
    char error[120];
};

struct client {
    int fd;
    enum client_state state;
    struct client_record *record;
    struct dmk_buf out;
    size_t n_sent;
    struct dmk_buf line; /* of what came: an unfinished line */
    int head_lines;      /* of the response's head; -1: it is over */
    bool chunked;
    uint64_t chunk_left; /* bytes of the chunk that are still due */
    int chunk_state;     /* 0 size line, 1 data, 2 end of data, 3 last */
    bool done, failed;   /* [DONE], an error event */
    /* Each event with text: its first byte, and when it was read. May be NULL. */
    void (*on_text)(void *ud, char first, uint64_t now_ns);
    void *ud;
};

/* body is the whole HTTP request. */
int client_open(struct client *c, const struct sockaddr_in *to, struct client_record *record,
                struct dmk_str request);
/* Goes on as far as it can. True when it is done; then client_close. */
bool client_step(struct client *c, bool may_write, uint64_t now_ns);
void client_close(struct client *c, uint64_t now_ns);
/* Why it is over, when it is not ok. */
void client_fail(struct client *c, const char *why);
