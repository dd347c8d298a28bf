/* The last moments of a draining server's connections: they close after the peer has closed, not before.
 *
 * gRPC ends a connection that was told to go away as soon as its last call has ended, in both directions at once. What
 * the peer sends after that, a ping or a larger window, is answered by its own kernel with an error (or by ours with a
 * reset, which also throws away what has not left yet), and a gRPC client that gets one forgets what it has not read:
 * the end of the answer. gRPC has no hook there, but one way out, shutdown(2). This file stands in front of it: while a
 * server drains, a connection of its port is only ended for sending, and a copy of the descriptor is kept, read and
 * thrown away, until the peer closes. Everybody else's shutdown is what it always was.
 *
 * gRPC's poller goes on to see the copy and tells a descriptor that it has given up; such late events are part of its
 * game. shutdown runs on any thread, under the lock with the list of servers and their descriptors; the rest on the
 * loop. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>
#include "common/rpc/internal.h"

#define MAX_KEPT     1024 /* connections of a server; more are ended as gRPC does it */
#define LOOK_MS      5
#define READ_BYTES   16384
#define READ_AT_MOST 64 /* reads of a connection at a time */

struct dmk_rpc__linger {
    struct dmk_list node; /* in lingers */
    struct dmk_timer *timer;
    uint16_t port; /* 0: the server listens on a path */
    unsigned n_fds;
    int fds[MAX_KEPT];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct dmk_list lingers = {&lingers, &lingers};
static atomic_uint n_lingers; /* 0: shutdown need not take the lock */

/* Whether fd is a connection that the server has accepted: it has the listener's own address. */
static bool is_of(const struct dmk_rpc__linger *l, int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un path;
    } addr = {0};
    socklen_t len = sizeof(addr);

    if (getsockname(fd, &addr.any, &len) < 0) {
        return false;
    }
    switch (addr.any.sa_family) {
    case AF_INET:
        return l->port != 0 && ntohs(addr.v4.sin_port) == l->port;
    case AF_INET6:
        return l->port != 0 && ntohs(addr.v6.sin6_port) == l->port;
    case AF_UNIX: /* the side that dialled has no name */
        return l->port == 0 && len > offsetof(struct sockaddr_un, sun_path);
    default:
        return false;
    }
}

static bool keep(int fd)
{
    bool kept = false;

    (void)pthread_mutex_lock(&lock);
    for (struct dmk_list *at = lingers.next; at != &lingers && !kept; at = at->next) {
        struct dmk_rpc__linger *l = dmk_container_of(at, struct dmk_rpc__linger, node);

        if (l->n_fds < MAX_KEPT && is_of(l, fd)) {
            const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

            if (copy >= 0) {
                l->fds[l->n_fds++] = copy;
                kept = true;
            }
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return kept;
}

__attribute__((visibility("default"))) int shutdown(int fd, int how)
{
    if (how == SHUT_RDWR && atomic_load(&n_lingers) > 0 && keep(fd)) {
        how = SHUT_WR;
    }
    return (int)syscall(SYS_shutdown, fd, how);
}

/* Reads what has come. False: the peer has closed. */
static bool is_open(int fd)
{
    uint8_t nothing[READ_BYTES];

    for (int i = 0; i < READ_AT_MOST; i++) {
        const ssize_t n = recv(fd, nothing, sizeof(nothing), MSG_DONTWAIT);

        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            return false;
        }
        if (n < 0) {
            break;
        }
    }
    return true;
}

static void on_look(void *ud)
{
    struct dmk_rpc__linger *l = ud;

    (void)pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < l->n_fds;) {
        if (is_open(l->fds[i])) {
            i++;
        } else {
            (void)close(l->fds[i]);
            l->fds[i] = l->fds[--l->n_fds];
        }
    }
    (void)pthread_mutex_unlock(&lock);
}

struct dmk_rpc__linger *dmk_rpc__linger_new(struct dmk_loop *loop, uint16_t port)
{
    struct dmk_rpc__linger *l = calloc(1, sizeof(*l));

    dmk_assert(l);
    l->port = port;
    l->timer = dmk_timer_new(loop, on_look, l);
    dmk_assert(l->timer);
    dmk_timer_start(l->timer, LOOK_MS, LOOK_MS);
    (void)pthread_mutex_lock(&lock);
    dmk_list_push_back(&lingers, &l->node);
    (void)pthread_mutex_unlock(&lock);
    atomic_fetch_add(&n_lingers, 1);
    return l;
}

unsigned dmk_rpc__linger_count(struct dmk_rpc__linger *l, unsigned *ret_n_unread)
{
    unsigned n, n_unread = 0;

    (void)pthread_mutex_lock(&lock);
    n = l->n_fds;
    for (unsigned i = 0; i < n; i++) {
        int bytes = 0;

        n_unread += ioctl(l->fds[i], SIOCOUTQ, &bytes) == 0 && bytes > 0;
    }
    (void)pthread_mutex_unlock(&lock);
    *ret_n_unread = n_unread;
    return n;
}

void dmk_rpc__linger_free(struct dmk_rpc__linger **lp)
{
    struct dmk_rpc__linger *l = *lp;

    if (!l) {
        return;
    }
    *lp = NULL;
    atomic_fetch_sub(&n_lingers, 1);
    (void)pthread_mutex_lock(&lock);
    dmk_list_remove(&l->node);
    (void)pthread_mutex_unlock(&lock); /* from here on nobody else has it */
    for (unsigned i = 0; i < l->n_fds; i++) {
        (void)close(l->fds[i]);
    }
    dmk_timer_free(&l->timer);
    free(l);
}
