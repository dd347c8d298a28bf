/* Streamed requests; see client.h. Understands what is needed of HTTP/1.1: a status line, chunks or the end of
 * the connection, lines of server-sent events. */
#include "bench/load/client.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES 65536

int client_open(struct client *c, const struct sockaddr_in *to, struct client_record *record,
                struct dmk_str request)
{
    const int one = 1;
    void (*on_text)(void *, char, uint64_t) = c->on_text;
    void *ud = c->ud;

    *c = (struct client){.record = record, .on_text = on_text, .ud = ud};
    dmk_buf_init(&c->out, 0);
    dmk_buf_init(&c->line, 1 << 20);
    dmk_buf_append_str(&c->out, request);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) {
        client_fail(c, strerror(errno));
        return -1;
    }
    (void)setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if (connect(c->fd, (const struct sockaddr *)to, sizeof(*to)) < 0 && errno != EINPROGRESS) {
        client_fail(c, strerror(errno));
        return -1;
    }
    return 0;
}

void client_fail(struct client *c, const char *why)
{
    if (!c->record->error[0]) {
        (void)snprintf(c->record->error, sizeof(c->record->error), "%s", why);
    }
    c->state = CLIENT_DONE;
}

void client_close(struct client *c, uint64_t now_ns)
{
    if (c->fd >= 0) {
        (void)close(c->fd);
    }
    c->fd = -1;
    c->record->end_ns = now_ns;
    c->record->ok = c->done && !c->failed && c->record->status == 200;
    if (!c->record->ok && !c->record->error[0]) {
        (void)snprintf(c->record->error, sizeof(c->record->error),
                       "the stream ended early, status %u", c->record->status);
    }
    dmk_buf_fini(&c->out);
    dmk_buf_fini(&c->line);
}

static const char *find(struct dmk_str text, const char *what)
{
    return memmem(text.data, text.len, what, strlen(what));
}

static uint32_t number_after(struct dmk_str text, const char *key)
{
    const char *at = find(text, key);

    return at ? (uint32_t)strtoul(at + strlen(key), NULL, 10) : 0;
}

/* The first byte of a piece of text in an event, 0 when it has none. */
static char text_of(struct dmk_str event)
{
    static const char *const keys[] = {"\"content\":\"", "\"text\":\"", "\"reasoning\":\""};

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const char *at = find(event, keys[i]);

        if (at && at[strlen(keys[i])] != '"') {
            return at[strlen(keys[i])];
        }
    }
    return 0;
}

static void take_event(struct client *c, struct dmk_str event, uint64_t now_ns)
{
    struct client_record *r = c->record;
    char first;

    if (event.len >= 6 && memcmp(event.data, "[DONE]", 6) == 0) {
        c->done = true;
        return;
    }
    first = text_of(event);
    if (first) {
        r->n_events++;
        r->first_ns = r->first_ns ? r->first_ns : now_ns;
        r->last_ns = now_ns;
        if (c->on_text) {
            c->on_text(c->ud, first, now_ns);
        }
        return;
    }
    if (find(event, "\"error\":{")) {
        const char *at = find(event, "\"message\":\"");

        c->failed = true;
        (void)snprintf(r->error, sizeof(r->error), "%.*s", at ? 100 : 0, at ? at + 11 : "");
    } else if (find(event, "\"completion_tokens\":")) {
        r->n_out = number_after(event, "\"completion_tokens\":");
        r->n_in = number_after(event, "\"prompt_tokens\":");
    }
}

static void take_line(struct client *c, struct dmk_str line, uint64_t now_ns)
{
    if (line.len > 0 && line.data[line.len - 1] == '\r') {
        line.len--;
    }
    if (c->head_lines >= 0) {
        if (c->head_lines++ == 0) {
            c->record->status = number_after(line, "HTTP/1.1 ");
        } else if (line.len == 0) {
            c->head_lines = -1;
        } else if (line.len >= 18 && strncasecmp(line.data, "transfer-encoding:", 18) == 0) {
            c->chunked = true;
        }
        return;
    }
    if (line.len > 6 && memcmp(line.data, "data: ", 6) == 0) {
        take_event(c, (struct dmk_str){line.data + 6, line.len - 6}, now_ns);
    } else if (c->record->status != 200 && line.len > 0) {
        const char *at = find(line, "\"message\":\"");

        client_fail(c, at ? at + 11 : "an error without a sentence");
    }
}

/* Bytes of the head or the body: whole lines are taken, the rest waits in line. Returns how many were used:
 * all, or up to the end of the head. */
static size_t take_text(struct client *c, const char *data, size_t n, uint64_t now_ns)
{
    size_t at = 0;

    while (at < n) {
        const char *end = memchr(data + at, '\n', n - at);
        const bool in_head = c->head_lines >= 0;

        if (!end) {
            dmk_buf_append(&c->line, data + at, n - at);
            return n;
        }
        if (c->line.len > 0) {
            dmk_buf_append(&c->line, data + at, (size_t)(end - data) - at);
            take_line(c, dmk_buf_str(&c->line), now_ns);
            dmk_buf_reset(&c->line);
        } else {
            take_line(c, (struct dmk_str){data + at, (size_t)(end - data) - at}, now_ns);
        }
        at = (size_t)(end - data) + 1;
        if (in_head && c->head_lines < 0) {
            return at;
        }
    }
    return at;
}

static void take_bytes(struct client *c, const char *data, size_t n, uint64_t now_ns)
{
    size_t at = 0;

    while (at < n && c->state != CLIENT_DONE) {
        if (c->head_lines >= 0 || !c->chunked) {
            at += take_text(c, data + at, n - at, now_ns);
        } else if (c->chunk_state == 1) {
            const size_t part = n - at < c->chunk_left ? n - at : (size_t)c->chunk_left;

            (void)take_text(c, data + at, part, now_ns);
            at += part;
            c->chunk_left -= part;
            c->chunk_state = c->chunk_left == 0 ? 2 : 1;
        } else {
            const char byte = data[at++];

            if (c->chunk_state == 2) { /* the line end after data */
                c->chunk_state = byte == '\n' ? 0 : 2;
            } else if (byte == '\n') {
                if (c->chunk_left == 0) {
                    c->state = CLIENT_DONE; /* the last chunk */
                }
                c->chunk_state = 1;
            } else if (byte != '\r') {
                c->chunk_left = c->chunk_left * 16 + (uint64_t)(byte <= '9'   ? byte - '0'
                                                                : byte <= 'F' ? byte - 'A' + 10
                                                                              : byte - 'a' + 10);
            }
        }
    }
}

static bool send_some(struct client *c)
{
    while (c->n_sent < c->out.len) {
        const ssize_t n =
            send(c->fd, c->out.data + c->n_sent, c->out.len - c->n_sent, MSG_NOSIGNAL);

        if (n < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                client_fail(c, strerror(errno));
            }
            return false;
        }
        c->n_sent += (size_t)n;
    }
    return true;
}

bool client_step(struct client *c, bool may_write, uint64_t now_ns)
{
    static char data[READ_BYTES]; /* one thread */

    if (may_write && c->state <= CLIENT_SENDING) {
        c->state = CLIENT_SENDING;
        if (send_some(c)) {
            c->state = CLIENT_READING;
        }
    }
    while (c->state == CLIENT_READING) {
        const ssize_t n = recv(c->fd, data, sizeof(data), 0);

        if (n < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                client_fail(c, strerror(errno));
            }
            break;
        }
        if (n == 0) {
            take_line(c, dmk_buf_str(&c->line), now_ns); /* a body may end without a line's end */
            c->state = CLIENT_DONE;
            break;
        }
        c->record->n_reads++;
        take_bytes(c, data, (size_t)n,
                   now_ns); /* until nothing is left: the poller tells of changes only */
    }
    return c->state == CLIENT_DONE;
}
