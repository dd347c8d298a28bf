/* What a UCX node is opened with: transports, addresses, quiet logs; see ucx_impl.h. */
#include "common/xfer/ucx_impl.h"
#include "common/base/log.h"
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#define asm __asm__ /* its inline functions are written for GNU C */
#include <ucs/debug/log_def.h>

/* Of libucs, in no header that is installed. */
extern void ucs_debug_disable_signals(void);

/* Device memory that has no direct way bounces through the host, which cuda_copy does.
 * shm: wire-up and the connection that reports the peer's death need tcp; pages go by cma, which copies in
 * the writer's own calls. No transport of shared memory takes the PEER error mode. */
static const struct ucx_transport transports[] = {
    {"tcp", "tcp,self", "tcp,cuda_copy,self", UCP_ERR_HANDLING_MODE_PEER, DMK_LANE_EMULATED},
    /* The writer can not copy into a device's memory from outside: its owner would, by messages that may come after the
     * writer's end, and whose answer to a writer that is gone ends the process. */
    {"shm", "posix,sysv,cma,tcp,self", NULL, UCP_ERR_HANDLING_MODE_NONE, DMK_LANE_DIRECT},
    {"cuda", "cuda_ipc,cuda_copy,tcp,self", "cuda_ipc,cuda_copy,tcp,self",
     UCP_ERR_HANDLING_MODE_PEER, DMK_LANE_DIRECT},
};

int ucx_status(ucs_status_t status)
{
    switch (status) {
    case UCS_OK:
        return 0;
    case UCS_ERR_NO_MEMORY:
        return -DMK_ENOMEM;
    case UCS_ERR_CANCELED:
        return -DMK_ECANCELLED;
    case UCS_ERR_INVALID_PARAM:
        return -DMK_EINVAL;
    case UCS_ERR_UNSUPPORTED:
        return -DMK_ENOTSUP;
    default:
        return -DMK_EPEER;
    }
}

const struct ucx_transport *ucx_transport_find(const char *name)
{
    for (size_t i = 0; i < sizeof(transports) / sizeof(transports[0]); i++) {
        if (name && strcmp(transports[i].name, name) == 0) {
            return &transports[i];
        }
    }
    return NULL;
}

static struct sockaddr_in *as_in4(struct sockaddr_storage *a)
{
    return (struct sockaddr_in *)a;
}

static struct sockaddr_in6 *as_in6(struct sockaddr_storage *a)
{
    return (struct sockaddr_in6 *)a;
}

size_t ucx_sockaddr_len(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* "host[:port]" or "[v6][:port]" into its parts; a bare v6 address has no port. */
static int split_bind(const char *bind, char ret_host[64], uint16_t *ret_port)
{
    const bool bracket = bind[0] == '[';
    const char *end = bracket ? strchr(bind, ']') : strchr(bind, ':');
    const char *host = bind + bracket;
    unsigned long port = 0;
    char *rest = NULL;

    if ((bracket && !end) || (!bracket && end && strchr(end + 1, ':'))) {
        if (bracket) {
            return -DMK_EINVAL;
        }
        end = NULL;
    }
    if ((end ? (size_t)(end - host) : strlen(host)) >= 64) {
        return -DMK_EINVAL;
    }
    (void)snprintf(ret_host, 64, "%.*s", end ? (int)(end - host) : 63, host);
    if (end && bracket) {
        end++;
    }
    if (end && *end == ':') {
        port = strtoul(end + 1, &rest, 10);
        if (rest == end + 1 || *rest || port > 65535) {
            return -DMK_EINVAL;
        }
    } else if (end && *end) {
        return -DMK_EINVAL;
    }
    *ret_port = (uint16_t)port;
    return 0;
}

static bool is_same_host(const struct sockaddr *a, const struct sockaddr_storage *b)
{
    if (!a || a->sa_family != b->ss_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        return ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    }
    return memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)b)->sin6_addr, sizeof(struct in6_addr)) == 0;
}

/* The interface that has the address, or the first address of the interface of that name. */
static bool match_interface(const char *host, struct sockaddr_storage *inout_address,
                            char ret_device[64])
{
    const bool by_name = inout_address->ss_family == AF_UNSPEC;
    struct ifaddrs *all = NULL;
    bool found = false;

    if (getifaddrs(&all) < 0) {
        return false;
    }
    for (const struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
        if (!i->ifa_addr) {
            continue;
        }
        if (by_name) {
            found = i->ifa_addr->sa_family == AF_INET && strcmp(i->ifa_name, host) == 0;
        } else {
            found = is_same_host(i->ifa_addr, inout_address);
        }
        if (found) {
            (void)snprintf(ret_device, 64, "%s", i->ifa_name);
        }
        if (found && by_name) {
            memcpy(inout_address, i->ifa_addr, sizeof(struct sockaddr_in));
        }
    }
    freeifaddrs(all);
    return found;
}

int ucx_bind_resolve(const char *bind, struct sockaddr_storage *ret_address, char ret_device[64],
                     struct dmk_error *reterr)
{
    const char *text = bind ? bind : "127.0.0.1";
    struct sockaddr_storage a = {0};
    char host[64];
    uint16_t port;

    if (split_bind(text, host, &port) < 0) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "page transport address \"%s\" is not address[:port] or "
                             "interface[:port]",
                             text);
    }
    if (inet_pton(AF_INET, host, &as_in4(&a)->sin_addr) == 1) {
        a.ss_family = AF_INET;
    } else if (inet_pton(AF_INET6, host, &as_in6(&a)->sin6_addr) == 1) {
        a.ss_family = AF_INET6;
    }
    if (!match_interface(host, &a, ret_device)) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "page transport address \"%s\": this machine has no interface of that "
                             "name or address (a wildcard cannot be handed to peers)",
                             text);
    }
    if (a.ss_family == AF_INET6) {
        as_in6(&a)->sin6_port = htons(port);
    } else {
        as_in4(&a)->sin_port = htons(port);
    }
    *ret_address = a;
    return 0;
}

/* Family 4 or 6, port and address, as on the network. */
int ucx_address_pack(const struct sockaddr_storage *address, uint8_t *ret_blob, size_t *ret_len)
{
    struct sockaddr_storage a = *address;

    if (a.ss_family == AF_INET6) {
        ret_blob[0] = 6;
        memcpy(ret_blob + 1, &as_in6(&a)->sin6_port, 2);
        memcpy(ret_blob + 3, &as_in6(&a)->sin6_addr, 16);
        *ret_len = 19;
    } else {
        ret_blob[0] = 4;
        memcpy(ret_blob + 1, &as_in4(&a)->sin_port, 2);
        memcpy(ret_blob + 3, &as_in4(&a)->sin_addr, 4);
        *ret_len = 7;
    }
    return 0;
}

int ucx_address_unpack(struct dmk_bytes blob, struct sockaddr_storage *ret_address)
{
    struct sockaddr_storage a = {0};

    if (blob.len == 19 && blob.data[0] == 6) {
        a.ss_family = AF_INET6;
        memcpy(&as_in6(&a)->sin6_port, blob.data + 1, 2);
        memcpy(&as_in6(&a)->sin6_addr, blob.data + 3, 16);
    } else if (blob.len == 7 && blob.data[0] == 4) {
        a.ss_family = AF_INET;
        memcpy(&as_in4(&a)->sin_port, blob.data + 1, 2);
        memcpy(&as_in4(&a)->sin_addr, blob.data + 3, 4);
    } else {
        return -DMK_EFORMAT;
    }
    *ret_address = a;
    return 0;
}

void ucx_info(const struct dmk_xfer *x, struct dmk_xfer_info *ret)
{
    const struct ucx_node *node = ucx_node_of(x);
    struct sockaddr_storage a = node->address;
    const bool v6 = a.ss_family == AF_INET6;
    char host[INET6_ADDRSTRLEN] = "?";

    (void)inet_ntop(a.ss_family,
                    v6 ? (const void *)&as_in6(&a)->sin6_addr : (const void *)&as_in4(&a)->sin_addr,
                    host, sizeof(host));
    (void)snprintf(ret->transport, sizeof(ret->transport), "%s", node->transport->name);
    (void)snprintf(ret->device, sizeof(ret->device), "%s", node->device);
    (void)snprintf(ret->address, sizeof(ret->address), v6 ? "[%s]:%u" : "%s:%u", host,
                   ntohs(v6 ? as_in6(&a)->sin6_port : as_in4(&a)->sin_port));
}

int ucx_check_devices(const struct ucx_node *node, struct dmk_error *reterr)
{
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};

    if (strcmp(node->transport->name, "cuda") != 0 && node->mem_kind != DMK_MEM_KIND_CUDA) {
        return 0;
    }
    if (ucp_context_query(node->context, &attr) != UCS_OK ||
        !(attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA))) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "page transport \"%s\": UCX finds no CUDA device, driver or module "
                             "here, so it can not move pages in device memory",
                             node->transport->name);
    }
    return 0;
}

__attribute__((format(printf, 6, 0))) static ucs_log_func_rc_t
log_line(const char *file, unsigned line, const char *function, ucs_log_level_t level,
         const ucs_log_component_config_t *component, const char *format, va_list ap)
{
    char text[512];

    (void)function;
    (void)component;
    if (level <= UCS_LOG_LEVEL_WARN && dmk_log_enabled(DMK_LOG_DEBUG)) {
        (void)vsnprintf(text, sizeof(text), format, ap);
        dmk_log_debug("ucx: %s (%s:%u)", text, file, line);
    }
    return UCS_LOG_FUNC_RC_STOP;
}

void ucx_quieten(void)
{
    static bool done;

    if (!done) {
        done = true;
        ucs_debug_disable_signals();
        ucs_log_push_handler(log_line);
    }
}
