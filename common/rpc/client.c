/* Channels: one connection to one target each, made again by gRPC with bounded pauses. Owner: the loop. */
#include "common/rpc/internal.h"
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <stdlib.h>

#define RECONNECT_MIN_MS 100
#define RECONNECT_MAX_MS 2000

struct dmk_rpc_channel {
    struct dmk_list node; /* in rpc.channels */
    struct dmk_rpc *rpc;
    grpc_channel *channel;
    struct dmk_list streams;
};

struct dmk_rpc_channel *dmk_rpc__channel_of(struct dmk_list *node)
{
    return dmk_container_of(node, struct dmk_rpc_channel, node);
}

/* Takes creds. name: of the other side's certificate, or NULL. */
static struct dmk_rpc_channel *new_channel(struct dmk_rpc *rpc, const char *target,
                                           grpc_channel_credentials *creds, const char *name)
{
    const struct {
        const char *key;
        int value;
    } rows[] = {
        {"grpc.use_local_subchannel_pool", 1},
        {"grpc.initial_reconnect_backoff_ms", RECONNECT_MIN_MS},
        {"grpc.min_reconnect_backoff_ms",
         RECONNECT_MAX_MS}, /* also how long one attempt may take */
        {"grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS},
        {"grpc.enable_retries", 0},
        {"grpc.enable_http_proxy", 0}, /* workers are never behind one */
        {"grpc.service_config_disable_resolution", 1},
    };
    struct dmk_rpc_channel *channel = calloc(1, sizeof(*channel));
    grpc_arg args[DMK_RPC__MAX_ARGS];
    size_t n = dmk_rpc__args(rpc, DMK_RPC_MAX_MESSAGE_BYTES, args);

    dmk_assert(channel);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        dmk_assert(n < DMK_RPC__MAX_ARGS);
        args[n++] = (grpc_arg){.type = GRPC_ARG_INTEGER,
                               .key = (char *)(uintptr_t)rows[i].key,
                               .value.integer = rows[i].value};
    }
    if (name) {
        dmk_assert(n < DMK_RPC__MAX_ARGS);
        args[n++] = (grpc_arg){.type = GRPC_ARG_STRING,
                               .key = (char *)(uintptr_t)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
                               .value.string = (char *)(uintptr_t)name};
    }
    channel->rpc = rpc;
    dmk_list_init(&channel->streams);
    channel->channel = grpc_channel_create(target, creds, &(grpc_channel_args){n, args});
    grpc_channel_credentials_release(creds);
    dmk_assert(channel->channel); /* a target that makes no sense gives one whose calls fail */
    dmk_list_push_back(&rpc->channels, &channel->node);
    return channel;
}

struct dmk_rpc_channel *dmk_rpc_channel_new(struct dmk_rpc *rpc, const char *target)
{
    return new_channel(rpc, target, grpc_insecure_credentials_create(), NULL);
}

int dmk_rpc_channel_new_tls(struct dmk_rpc *rpc, const char *target, const struct dmk_rpc_tls *tls,
                            struct dmk_rpc_channel **ret, struct dmk_error *reterr)
{
    grpc_channel_credentials *creds;
    const int rc = dmk_rpc__tls_channel(tls, &creds, reterr);

    if (rc == 0) {
        *ret = new_channel(rpc, target, creds, tls->name && tls->name[0] ? tls->name : NULL);
    }
    return rc;
}

void dmk_rpc_channel_free(struct dmk_rpc_channel **channelp)
{
    struct dmk_rpc_channel *channel = *channelp;

    if (!channel) {
        return;
    }
    *channelp = NULL;
    dmk_list_remove(&channel->node);
    while (!dmk_list_empty(&channel->streams)) {
        dmk_rpc__stream_drop(dmk_container_of(channel->streams.next, struct dmk_rpc_stream, node),
                             DMK_RPC_CANCELLED, "the channel is shutting down");
    }
    grpc_channel_destroy(channel->channel); /* lives on in calls that have not come back */
    free(channel);
}

struct dmk_rpc_stream *dmk_rpc_call(struct dmk_rpc_channel *channel, const char *path,
                                    uint32_t deadline_ms,
                                    const struct dmk_rpc_stream_events *events)
{
    const gpr_timespec deadline =
        deadline_ms ? gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                   gpr_time_from_millis(deadline_ms, GPR_TIMESPAN))
                    : gpr_inf_future(GPR_CLOCK_MONOTONIC);
    const grpc_slice method = grpc_slice_from_copied_string(path);
    grpc_call *call = grpc_channel_create_call(channel->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                               channel->rpc->cq, method, NULL, deadline, NULL);
    struct dmk_rpc_stream *s;

    grpc_slice_unref(method);
    dmk_assert(call);
    dmk_assert(events->on_message);
    dmk_assert(events->on_closed);
    s = dmk_rpc__stream_new(channel->rpc, call, DMK_RPC_MAX_QUEUE_BYTES);
    s->events = *events;
    dmk_list_push_back(&channel->streams, &s->node);
    dmk_rpc__stream_open_client(s);
    return s;
}
