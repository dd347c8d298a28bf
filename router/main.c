/* damask-router: wiring only. Builds the objects, runs the loop, tears down in reverse.
 *
 * SIGTERM and SIGINT: readiness goes off at once, no new requests are taken, running ones have the drain limit to end
 * and to be read, then the loop stops. A second signal stops at once. SIGHUP reads certificates again. */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/grammar/trie.h"
#include "common/http/http.h"
#include "router/openapi.h"
#include "router/router.h"

/* How long connections may take to close once nothing waits for a client, and answers to leave that wait when the
 * drain limit is over. */
#define FLUSH_LIMIT_NS DMK_NS_PER_S

struct program {
    struct dmk_router_conf conf;
    struct dmk_router router;
    struct dmk_stats stats;
    struct dmk_rpc *rpc;
    struct dmk_http_server *http, *admin;
    struct dmk_http_front http_front, admin_front;
    struct dmk_grpc_front *grpc;
    struct dmk_signal *signals[2], *hup;
    struct dmk_timer *timer; /* watches readiness; then the drain limit */
    bool was_ready;
    bool aborted;
    uint64_t settle_deadline_ns, drain_deadline_ns, flush_deadline_ns;
    bool refusing; /* new requests: the settling is over */
    char router_id[33];
};

/* Answers that are made, but which their clients have not read. */
static uint32_t n_unread(const struct program *p)
{
    return dmk_http_server_n_answering(p->http) + (p->grpc ? dmk_grpc_front_n_calls(p->grpc) : 0);
}

static bool is_all_closed(const struct program *p)
{
    return dmk_http_server_n_connections(p->http) == 0 &&
           (!p->grpc || dmk_grpc_front_is_drained(p->grpc));
}

/* While draining: every 10 ms. At first new requests are still taken, for the settling time. The HTTP port stays
 * open until the last request has ended, so that who comes late is told so (503) and probes are answered; each
 * answer ends its connection, so that the next try goes where a new connection goes. gRPC has a word for that,
 * and its port closes. What clients have not read when the last request has ended may wait for them as long as
 * the drain limit; at last connections go. */
static void check_drain(struct program *p)
{
    const uint64_t now = dmk_loop_now_ns(p->router.loop);

    if (now < p->settle_deadline_ns && now < p->drain_deadline_ns) {
        p->flush_deadline_ns = now + FLUSH_LIMIT_NS;
        return;
    }
    if (!p->refusing) {
        p->refusing = true;
        dmk_requests_drain(p->router.requests);
        if (p->grpc) {
            dmk_grpc_front_drain(p->grpc);
        }
    }
    if (dmk_requests_n_open(p->router.requests) > 0) {
        if (now >= p->drain_deadline_ns && !p->aborted) {
            p->aborted = true;
            dmk_log_warn("the drain limit is over: %u requests are ended",
                         dmk_requests_n_open(p->router.requests));
            dmk_requests_abort_all(p->router.requests);
        }
        p->flush_deadline_ns = now + FLUSH_LIMIT_NS;
        return;
    }
    dmk_http_server_drain(p->http);
    if (now < p->drain_deadline_ns && n_unread(p) > 0) {
        p->flush_deadline_ns = now + FLUSH_LIMIT_NS;
        return;
    }
    if (is_all_closed(p)) {
        dmk_loop_stop(p->router.loop);
    } else if (now >= p->flush_deadline_ns) {
        if (n_unread(p) > 0) {
            dmk_log_warn("answers cut off that their clients have not read: %u", n_unread(p));
        }
        dmk_loop_stop(p->router.loop);
    }
}

static void on_timer(void *ud)
{
    struct program *p = ud;
    const bool ready = dmk_router_is_ready(&p->router);

    if (p->router.draining) {
        check_drain(p);
        return;
    }
    if (ready != p->was_ready) {
        p->was_ready = ready;
        dmk_log_info("%s", ready ? "ready" : "not ready");
        if (p->grpc) {
            dmk_grpc_front_set_serving(p->grpc, ready);
        }
    }
}

static void on_signal(void *ud)
{
    struct program *p = ud;
    const uint64_t now = dmk_loop_now_ns(p->router.loop);

    if (p->router.draining) {
        dmk_log_warn("second signal: running requests are ended");
        p->drain_deadline_ns = now;
        return;
    }
    dmk_log_info("draining: %u requests are open, limit %llu ms",
                 dmk_requests_n_open(p->router.requests),
                 (unsigned long long)p->conf.drain_limit_ms);
    p->router.draining = true;
    p->drain_deadline_ns = now + p->conf.drain_limit_ms * DMK_NS_PER_MS;
    p->settle_deadline_ns = now + p->conf.drain_settle_ms * DMK_NS_PER_MS;
    p->flush_deadline_ns = now + FLUSH_LIMIT_NS;
    if (p->grpc) {
        dmk_grpc_front_set_serving(p->grpc, false);
    }
    check_drain(p);
    dmk_timer_start(p->timer, 10, 10);
}

/* Certificates and keys are looked at by themselves; who has just written them need not wait. gRPC asks for its
 * own at the next handshake anyway. */
static void on_hup(void *ud)
{
    struct program *p = ud;

    dmk_log_info("SIGHUP: certificates are read again");
    dmk_http_server_reload(p->http);
    if (p->admin) {
        dmk_http_server_reload(p->admin);
    }
}

static int start_http(struct program *p, struct dmk_error *reterr)
{
    struct dmk_http_conf conf = {
        .host = p->conf.http_host,
        .port = (uint16_t)p->conf.http_port,
        .max_connections = p->conf.max_connections,
        .max_header_bytes = p->conf.max_header_bytes,
        .max_body_bytes = p->conf.max_body_bytes,
        .max_write_bytes = p->conf.max_write_bytes,
        .idle_timeout_ms = (uint32_t)p->conf.idle_timeout_ms,
        .request_timeout_ms = (uint32_t)p->conf.read_timeout_ms,
        .tls_cert = p->conf.tls_cert,
        .tls_key = p->conf.tls_key,
        .tls_client_ca = p->conf.tls_client_ca,
        .allow = "GET, HEAD, POST, OPTIONS",
        .origins = (const char *const *)p->conf.allowed_origins.items,
        .n_origins = p->conf.allowed_origins.n,
        .takes_id = dmk_request_id_is_valid,
        .on_request = dmk_http_front_on_request,
        .on_error = dmk_http_front_on_error,
        .ud = &p->http_front,
    };
    int rc;

    p->http_front = (struct dmk_http_front){
        &p->router, DMK_HTTP_API | (p->conf.admin_port == 0 ? DMK_HTTP_ADMIN : 0u)};
    rc = dmk_http_server_new(p->router.loop, &conf, &p->http, reterr);
    if (rc < 0 || p->conf.admin_port == 0) {
        return rc;
    }
    p->admin_front = (struct dmk_http_front){&p->router, DMK_HTTP_ADMIN};
    conf.host = p->conf.admin_host;
    conf.port = (uint16_t)p->conf.admin_port;
    conf.max_connections = 64;
    if (!p->conf.admin_tls) {
        conf.tls_cert = conf.tls_key = NULL;
    }
    conf.tls_client_ca = NULL;
    conf.max_body_bytes = 65536;
    conf.n_origins = 0;
    conf.ud = &p->admin_front;
    return dmk_http_server_new(p->router.loop, &conf, &p->admin, reterr);
}

static int start_fleet(struct program *p, struct dmk_error *reterr)
{
    const struct dmk_rpc_tls tls = {.cert = p->conf.worker_tls_cert,
                                    .key = p->conf.worker_tls_key,
                                    .ca = p->conf.worker_tls_ca,
                                    .name = p->conf.worker_tls_name};
    const struct dmk_fleet_conf conf = {
        .loop = p->router.loop,
        .rpc = p->rpc,
        .prefill = &p->conf.prefill,
        .decode = &p->conf.decode,
        .router_id = p->router_id,
        .incarnation = dmk_random_u64(),
        .index_blocks = p->conf.index_blocks,
        .resolve_ms = p->conf.resolve_ms,
        .tls = p->conf.worker_tls_ca[0] ? &tls : NULL,
        .hello_timeout_ms = p->conf.hello_timeout_ms,
        .silence_ms = p->conf.worker_silence_ms,
        .vocabulary = dmk_buf_bytes(&p->router.vocabulary),
        .stats = &p->stats,
        .events = dmk_requests_fleet_events(p->router.requests),
    };
    const int rc = dmk_fleet_new(&conf, &p->router.fleet, reterr);

    if (rc == 0) {
        dmk_requests_set_fleet(p->router.requests, p->router.fleet);
    }
    return rc;
}

/* Ordinary tokens have bytes; control tokens are ids and nothing else. */
static struct dmk_bytes token_bytes(void *ud, uint32_t id)
{
    return dmk_token_is_special(id) ? (struct dmk_bytes){0} : dmk_token_bytes(ud, id);
}

static int write_vocabulary(struct program *p, struct dmk_error *reterr)
{
    dmk_buf_init(&p->router.vocabulary, DMK_TRIE_MAX_BYTES);
    if (dmk_trie_write(DMK_VOCAB_SIZE, token_bytes, p->router.vocab, &p->router.vocabulary) < 0) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the vocabulary's bytes");
    }
    return 0;
}

static int start(struct program *p, struct dmk_error *reterr)
{
    static const int numbers[2] = {SIGTERM, SIGINT};
    struct dmk_requests_conf requests = {.conf = &p->conf, .stats = &p->stats};
    int rc;

    json_object_seed(0); /* before other threads parse */
    dmk_id128_format(dmk_id128_random(), p->router_id);
    p->router = (struct dmk_router){
        .conf = &p->conf, .stats = &p->stats, .started_unix_s = dmk_clock_unix_s()};
    if ((rc = dmk_keys_new(&p->conf.api_keys, p->conf.api_keys_file, &p->router.api_keys, reterr)) <
            0 ||
        (rc = dmk_keys_new(&p->conf.admin_keys, p->conf.admin_keys_file, &p->router.admin_keys,
                           reterr)) < 0) {
        return rc;
    }
    if ((rc = dmk_stats_init(&p->stats, p->conf.model_name)) < 0) {
        return dmk_error_set(reterr, rc, "no memory for metrics");
    }
    if ((rc = dmk_vocab_open(p->conf.vocab, &p->router.vocab, reterr)) < 0 ||
        (rc = dmk_openapi_build(&p->conf, &p->router.openapi, reterr)) < 0 ||
        (rc = dmk_loop_new(&p->router.loop, reterr)) < 0) {
        return rc;
    }
    requests.loop = p->router.loop;
    if ((rc = write_vocabulary(p, reterr)) < 0) {
        return rc;
    }
    requests.vocab = p->router.vocab;
    requests.vocabulary =
        dmk_hash128((struct dmk_id128){0}, p->router.vocabulary.data, p->router.vocabulary.len);
    if ((rc = dmk_requests_new(&requests, &p->router.requests, reterr)) < 0 ||
        (rc = dmk_rpc_new(p->router.loop, &p->rpc, reterr)) < 0 ||
        (rc = start_fleet(p, reterr)) < 0 || (rc = start_http(p, reterr)) < 0 ||
        (p->conf.grpc_listen[0] &&
         (rc = dmk_grpc_front_new(&p->router, p->rpc, &p->grpc, reterr)) < 0)) {
        return rc;
    }
    for (int i = 0; i < 2; i++) {
        p->signals[i] = dmk_signal_new(p->router.loop, numbers[i], on_signal, p);
    }
    p->hup = dmk_signal_new(p->router.loop, SIGHUP, on_hup, p);
    p->timer = dmk_timer_new(p->router.loop, on_timer, p);
    if (!p->timer || !p->hup || !p->signals[0] || !p->signals[1]) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for signals and timers");
    }
    dmk_timer_start(p->timer, 20, 100);
    dmk_log_info("router %s serves model \"%s\" on http%s://%s:%u%s%s", p->router_id,
                 p->conf.model_name, p->conf.tls_cert[0] ? "s" : "", p->conf.http_host,
                 dmk_http_server_port(p->http), p->grpc ? " and grpc://" : "",
                 p->grpc ? p->conf.grpc_listen : "");
    return 0;
}

static void stop(struct program *p)
{
    for (int i = 0; i < 2; i++) {
        if (p->signals[i]) {
            dmk_signal_free(&p->signals[i]);
        }
    }
    if (p->hup) {
        dmk_signal_free(&p->hup);
    }
    if (p->timer) {
        dmk_timer_free(&p->timer);
    }
    dmk_grpc_front_free(&p->grpc);
    if (p->admin) {
        dmk_http_server_free(&p->admin);
    }
    if (p->http) {
        dmk_http_server_free(&p->http);
    }
    dmk_fleet_free(&p->router.fleet);
    if (p->rpc) {
        dmk_rpc_free(&p->rpc);
    }
    dmk_requests_free(&p->router.requests);
    if (p->router.loop) {
        dmk_loop_free(&p->router.loop);
    }
    if (p->router.vocab) {
        dmk_vocab_close(&p->router.vocab);
    }
    dmk_buf_fini(&p->router.openapi);
    dmk_buf_fini(&p->router.vocabulary);
    dmk_stats_fini(&p->stats);
    dmk_keys_free(&p->router.api_keys);
    dmk_keys_free(&p->router.admin_keys);
    dmk_conf_free(&dmk_router_program, &p->conf);
}

int main(int argc, char **argv)
{
    static struct program p;
    struct dmk_error error = {0};
    int rc = dmk_conf_load(&dmk_router_program, argc, argv, &p.conf, NULL, &error);

    if (rc != 0) {
        if (rc < 0) {
            (void)fprintf(stderr, "damask-router: %s\n", error.text);
        }
        return rc < 0 ? 2 : 0;
    }
    dmk_log_init("damask-router", (enum dmk_log_level)p.conf.log_level, p.conf.log_json);
    rc = start(&p, &error);
    if (rc < 0) {
        dmk_log_error("%s", error.text);
    } else {
        dmk_loop_run(p.router.loop);
        dmk_log_info("stopped");
    }
    stop(&p);
    return rc < 0 ? 1 : 0;
}
