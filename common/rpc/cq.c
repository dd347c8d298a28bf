/* gRPC for this process: its completion queue, the one thread that drains it, and the way of completed
 * ops back to the loop. The thread touches ops only between gRPC's completion and the mailbox; everything
 * else here belongs to the loop, also ops that come back while it starts one. */
#include "common/rpc/internal.h"
#include <errno.h>
#include <grpc/support/log.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "common/base/clock.h"
#include "common/base/log.h"

#define FREE_LIMIT_NS (5 * DMK_NS_PER_S)

/* libgrpc is not built with ThreadSanitizer, which therefore can not see that gRPC orders the start of a
 * batch before its completion. These two say so. */
#if defined(__SANITIZE_THREAD__)
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
#else
static void __tsan_acquire(void *addr)
{
    (void)addr;
}
static void __tsan_release(void *addr)
{
    (void)addr;
}
#endif

void dmk_rpc__release(struct dmk_rpc__op *op)
{
    __tsan_release(op);
}

/* An op that has come back already, for the loop's next turn. */
static void put_ready(struct dmk_rpc *rpc, struct dmk_rpc__op *op)
{
    op->mail.next = NULL;
    *rpc->ready_last = &op->mail;
    rpc->ready_last = &op->mail.next;
    dmk_loop_defer(rpc->loop, &rpc->run_ready);
}

/* Many a batch is complete when gRPC has taken it: a message that lay there, bytes that the socket took. gRPC gives
 * one of them to the thread that starts it, so that neither its thread nor the loop has to be woken. */
void dmk_rpc__start(struct dmk_rpc *rpc, grpc_call *call, const grpc_op *ops, size_t n,
                    struct dmk_rpc__op *op)
{
    void *tag = NULL;
    int ok = 0;

    dmk_rpc__release(op);
    grpc_completion_queue_thread_local_cache_init(rpc->cq);
    dmk_assert(grpc_call_start_batch(call, ops, n, op, NULL) == GRPC_CALL_OK);
    if (grpc_completion_queue_thread_local_cache_flush(rpc->cq, &tag, &ok)) {
        struct dmk_rpc__op *done = tag; /* maybe another one */

        __tsan_acquire(done);
        done->ok = ok != 0;
        put_ready(rpc, done);
    }
}

static void *drain_queue(void *arg)
{
    struct dmk_rpc *rpc = arg;

    for (;;) {
        const grpc_event ev =
            grpc_completion_queue_next(rpc->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        struct dmk_rpc__op *op = ev.tag;

        if (ev.type == GRPC_QUEUE_SHUTDOWN) {
            return NULL;
        }
        __tsan_acquire(op);
        op->ok = ev.success != 0;
        if (dmk_mailbox_push(&rpc->box, &op->mail)) {
            (void)eventfd_write(rpc->event_fd, 1); /* can not fail: the counter is far from full */
        }
    }
}

static void run_list(struct dmk_mail *mail)
{
    while (mail) {
        struct dmk_rpc__op *op = dmk_container_of(mail, struct dmk_rpc__op, mail);

        mail = mail->next; /* fn may use the op again or free it */
        op->fn(op->obj, op->ok);
    }
}

/* Those that are ready now; what they make ready waits for the next turn. */
static void run_ready(void *ud)
{
    struct dmk_rpc *rpc = ud;
    struct dmk_mail *mail = rpc->ready_first;

    rpc->ready_first = NULL;
    rpc->ready_last = &rpc->ready_first;
    run_list(mail);
}

static void on_event(void *ud)
{
    struct dmk_rpc *rpc = ud;
    eventfd_t count;

    (void)eventfd_read(rpc->event_fd, &count); /* empty when a wait in dmk_rpc_free took it */
    run_list(dmk_mailbox_take(&rpc->box));
}

/* gRPC's own lines go where ours go, but low: whoever owns a failure says it by the status it gets. */
static void on_log(gpr_log_func_args *args)
{
    dmk_log_debug("grpc: %s", args->message);
}

int dmk_rpc_new(struct dmk_loop *loop, struct dmk_rpc **ret, struct dmk_error *reterr)
{
    struct dmk_rpc *rpc = calloc(1, sizeof(*rpc));

    dmk_assert(rpc);
    rpc->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (rpc->event_fd < 0) {
        free(rpc);
        return dmk_error_set(reterr, -DMK_EIO, "no event descriptor for gRPC: %m");
    }
    rpc->loop = loop;
    rpc->keepalive_ms = 10000;
    rpc->keepalive_timeout_ms = 5000;
    rpc->ready_last = &rpc->ready_first;
    dmk_defer_init(&rpc->run_ready, run_ready, rpc);
    dmk_list_init(&rpc->servers);
    dmk_list_init(&rpc->channels);
    gpr_set_log_function(on_log);
    grpc_init();
    rpc->cq = grpc_completion_queue_create_for_next(NULL);
    if (pthread_create(&rpc->thread, NULL, drain_queue, rpc) != 0) {
        grpc_completion_queue_shutdown(rpc->cq);
        grpc_completion_queue_destroy(rpc->cq);
        grpc_shutdown();
        (void)close(rpc->event_fd);
        free(rpc);
        return dmk_error_set(reterr, -DMK_EIO, "no thread for gRPC: %m");
    }
    rpc->poll = dmk_poll_new(loop, rpc->event_fd, on_event, rpc);
    *ret = rpc;
    return 0;
}

void dmk_rpc_set_keepalive(struct dmk_rpc *rpc, uint32_t every_ms, uint32_t timeout_ms)
{
    dmk_assert(every_ms > 0);
    dmk_assert(timeout_ms > 0);
    rpc->keepalive_ms = every_ms;
    rpc->keepalive_timeout_ms = timeout_ms;
}

/* Runs ops until gRPC knows no object any more. The loop does not run meanwhile. */
static bool wait_for_objects(struct dmk_rpc *rpc)
{
    const uint64_t limit = dmk_clock_ns() + FREE_LIMIT_NS;

    while (rpc->n_objects > 0) {
        struct pollfd fd = {.fd = rpc->event_fd, .events = POLLIN};

        if (dmk_clock_ns() > limit) {
            return false;
        }
        if (rpc->ready_first) {
            run_ready(rpc);
            continue;
        }
        (void)poll(&fd, 1, 100); /* a signal or the time only means another look */
        on_event(rpc);
    }
    return true;
}

static void free_servers_and_channels(struct dmk_rpc *rpc)
{
    while (!dmk_list_empty(&rpc->servers)) {
        struct dmk_rpc_server *server = dmk_rpc__server_of(rpc->servers.next);

        dmk_rpc_server_free(&server);
    }
    while (!dmk_list_empty(&rpc->channels)) {
        struct dmk_rpc_channel *channel = dmk_rpc__channel_of(rpc->channels.next);

        dmk_rpc_channel_free(&channel);
    }
}

void dmk_rpc_free(struct dmk_rpc **rpcp)
{
    struct dmk_rpc *rpc = *rpcp;

    if (!rpc) {
        return;
    }
    *rpcp = NULL;
    free_servers_and_channels(rpc);
    if (!wait_for_objects(rpc)) {
        /* Memory that gRPC may still write must stay; the process is about to end anyway. */
        dmk_log_warn("gRPC did not give back %u objects in time, left as they are", rpc->n_objects);
        dmk_defer_cancel(&rpc->run_ready);
        dmk_poll_free(&rpc->poll);
        return;
    }
    grpc_completion_queue_shutdown(rpc->cq);
    (void)pthread_join(rpc->thread, NULL);
    grpc_completion_queue_destroy(rpc->cq);
    grpc_shutdown();
    dmk_defer_cancel(&rpc->run_ready);
    dmk_poll_free(&rpc->poll);
    (void)close(rpc->event_fd);
    free(rpc);
}
