/* Host names of workers: looked up on the pool, again and again; a name stands for all its
 * addresses.
 *
 * An address that vanished from a name is not dialled any more; a stream that is open goes on until
 * it ends. A look-up that fails changes nothing. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include "common/base/log.h"
#include "router/fleet_internal.h"

struct dmk_fleet_name {
    struct dmk_fleet_name *next;
    struct dmk_fleet *fleet; /* NULL: the fleet went while a look-up ran */
    enum dmk_worker_role role;
    char host[256];
    char port[8];
    bool running; /* the look-up's fields below belong to the pool */
    size_t n_found;
    char found[DMK_FLEET_MAX_WORKERS][64];
    int rc; /* of getaddrinfo */
    size_t n_last;
    char last[DMK_FLEET_MAX_WORKERS][64]; /* what the last good look-up found */
};

static void look_up(void *ud)
{
    struct dmk_fleet_name *name = ud;
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;

    name->n_found = 0;
    name->rc = getaddrinfo(name->host, name->port, &hints, &list);
    if (name->rc != 0) {
        return;
    }
    for (const struct addrinfo *a = list; a && name->n_found < DMK_FLEET_MAX_WORKERS;
         a = a->ai_next) {
        char ip[INET6_ADDRSTRLEN];

        if (getnameinfo(a->ai_addr, a->ai_addrlen, ip, sizeof(ip), NULL, 0, NI_NUMERICHOST) == 0) {
            (void)snprintf(name->found[name->n_found++], sizeof(name->found[0]),
                           a->ai_family == AF_INET6 ? "[%s]:%s" : "%s:%s", ip, name->port);
        }
    }
    freeaddrinfo(list);
}

static bool holds(char list[][64], size_t n, const char *address)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i], address) == 0) {
            return true;
        }
    }
    return false;
}

/* Another entry of the lists may have found the same address. */
static bool is_wanted(const struct dmk_fleet *fleet, const struct dmk_worker *w)
{
    for (struct dmk_fleet_name *n = fleet->names; n; n = n->next) {
        if (n->role == w->role && holds(n->last, n->n_last, w->address)) {
            return true;
        }
    }
    return false;
}

static void looked_up(void *ud)
{
    struct dmk_fleet_name *name = ud;
    struct dmk_fleet *fleet = name->fleet;

    name->running = false;
    if (!fleet) {
        free(name);
        return;
    }
    if (name->rc != 0) {
        dmk_log_warn("host name %s of workers can not be looked up: %s", name->host,
                     gai_strerror(name->rc));
        return;
    }
    name->n_last = name->n_found;
    memcpy(name->last, name->found, sizeof(name->last));
    for (size_t i = 0; i < name->n_last; i++) {
        struct dmk_worker *w;

        if (dmk_fleet__worker_add(fleet, name->role, name->last[i], name->host, &w) < 0) {
            dmk_log_warn("worker %s of %s is left out: at most %d workers", name->last[i],
                         name->host, DMK_FLEET_MAX_WORKERS);
        }
    }
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        struct dmk_worker *w = fleet->workers[i];

        if (w && w->named && !w->removed && !is_wanted(fleet, w)) {
            dmk_fleet__worker_remove(w);
        }
    }
}

static void resolve_all(void *ud)
{
    struct dmk_fleet *fleet = ud;

    for (struct dmk_fleet_name *n = fleet->names; n; n = n->next) {
        if (!n->running) {
            n->running = dmk_loop_work(fleet->conf.loop, look_up, looked_up, n) == 0;
        }
    }
}

static bool is_ip(const char *host)
{
    unsigned char bytes[16];

    return inet_pton(AF_INET, host, bytes) == 1 || inet_pton(AF_INET6, host, bytes) == 1;
}

int dmk_fleet__names_add(struct dmk_fleet *fleet, enum dmk_worker_role role, const char *entry,
                         struct dmk_error *reterr)
{
    const char *colon = strrchr(entry, ':');
    struct dmk_fleet_name *name;
    struct dmk_worker *w;
    char host[256];
    size_t len;

    if (strncmp(entry, "unix:", 5) == 0) {
        return dmk_fleet__worker_add(fleet, role, entry, NULL, &w);
    }
    len = colon ? (size_t)(colon - entry) : 0;
    if (len == 0 || len >= sizeof(host) || strlen(colon + 1) == 0 || strlen(colon + 1) > 5 ||
        strspn(colon + 1, "0123456789") != strlen(colon + 1)) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "worker address \"%s\" must be host:port or unix:/path", entry);
    }
    memcpy(host, entry, len);
    host[len] = '\0';
    if (is_ip(host) || host[0] == '[') {
        const int rc = dmk_fleet__worker_add(fleet, role, entry, NULL, &w);

        return rc < 0 ? dmk_error_set(reterr, rc, "worker %s: at most %d workers", entry,
                                      DMK_FLEET_MAX_WORKERS)
                      : 0;
    }
    name = calloc(1, sizeof(*name));
    if (!name) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for worker name %s", entry);
    }
    name->fleet = fleet;
    name->role = role;
    memcpy(name->host, host, len + 1);
    (void)snprintf(name->port, sizeof(name->port), "%s", colon + 1);
    name->next = fleet->names;
    fleet->names = name;
    return 0;
}

int dmk_fleet__names_start(struct dmk_fleet *fleet)
{
    if (!fleet->names) {
        return 0;
    }
    fleet->resolve_timer = dmk_timer_new(fleet->conf.loop, resolve_all, fleet);
    if (!fleet->resolve_timer) {
        return -DMK_ENOMEM;
    }
    dmk_timer_start(fleet->resolve_timer, 0, fleet->conf.resolve_ms);
    return 0;
}

void dmk_fleet__names_free(struct dmk_fleet *fleet)
{
    struct dmk_fleet_name *next;

    dmk_timer_free(&fleet->resolve_timer);
    for (struct dmk_fleet_name *n = fleet->names; n; n = next) {
        next = n->next;
        if (n->running) {
            n->fleet = NULL; /* the look-up's end frees it */
        } else {
            free(n);
        }
    }
    fleet->names = NULL;
}
