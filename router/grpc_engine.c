/* vllm.grpc.engine.VllmEngine besides Generate: what a gateway asks before it sends requests and while they run. The
 * cluster looks like one engine: sums over the decode workers, which hold the sequences. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/rpc/nul.h"
#include "proto/vllm_engine.pb-c.h"
#include "router/grpc_front.h"
#include "router/tokenizer_zip.h"

#define PIECE_BYTES   65536u
#define MAX_ZIP_BYTES (64u << 20)

/* Sums over the decode workers that are up. */
struct load {
    uint32_t running, waiting, pages, free_pages, sequences;
    uint64_t tokens_waiting;
    uint32_t page_tokens;
};

static struct load sum_load(const struct dmk_grpc_front *f)
{
    struct dmk_worker *const *workers = dmk_fleet_workers(f->router->fleet);
    struct load sum = {.page_tokens = 64};

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *w = workers[i];

        if (!w || !w->up || !w->has_load) {
            continue;
        }
        sum.tokens_waiting += w->load.tokens_waiting;
        if (w->role == DMK_WORKER_DECODE) {
            sum.running += w->load.n_running;
            sum.waiting += w->load.n_waiting;
            sum.pages += w->load.full_pages_total;
            sum.free_pages += w->load.full_pages_free;
            sum.page_tokens = w->page_tokens;
        }
    }
    return sum;
}

static void health_check(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                         struct dmk_bytes message)
{
    Vllm__Grpc__Engine__HealthCheckResponse m = VLLM__GRPC__ENGINE__HEALTH_CHECK_RESPONSE__INIT;
    static char ok[] = "ok", draining[] = "draining", not_ready[] = "no worker is up";

    (void)message;
    m.healthy = dmk_router_is_ready(f->router);
    m.message = m.healthy ? ok : f->router->draining ? draining : not_ready;
    dmk_grpc_answer(stream, &m.base);
}

static void abort_requests(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                           struct dmk_bytes message)
{
    const Vllm__Grpc__Engine__AbortResponse answer = VLLM__GRPC__ENGINE__ABORT_RESPONSE__INIT;
    Vllm__Grpc__Engine__AbortRequest *m =
        dmk_rpc_nul_field(&vllm__grpc__engine__abort_request__descriptor, message)
            ? NULL /* half an id may be another's */
            : vllm__grpc__engine__abort_request__unpack(NULL, message.len, message.data);

    if (!m) {
        dmk_grpc_refuse_as(f, stream, 400, "the request can not be read");
        return;
    }
    for (size_t i = 0; i < m->n_request_ids; i++) {
        dmk_grpc_front_abort(f, m->request_ids[i]);
    }
    vllm__grpc__engine__abort_request__free_unpacked(m, NULL);
    dmk_grpc_answer(stream, &answer.base); /* ids that are not there have ended already */
}

static void get_model_info(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                           struct dmk_bytes message)
{
    static char type[] = "gpt_oss", architecture[] = "GptOssForCausalLM", none[] = "";
    static int32_t ends[] = {DMK_TOKEN_RETURN, DMK_TOKEN_END_OF_TEXT, DMK_TOKEN_CALL};
    Vllm__Grpc__Engine__GetModelInfoResponse m = VLLM__GRPC__ENGINE__GET_MODEL_INFO_RESPONSE__INIT;
    char *architectures[] = {architecture};

    (void)message;
    /* A name and no path: the tokenizer is had by GetTokenizer, and the weights are the workers' own. */
    m.model_path = f->router->conf->model_name;
    m.served_model_name = f->router->conf->model_name;
    m.tokenizer_path = none;
    m.is_generation = true;
    m.max_context_length = dmk_router_context(f->router);
    m.max_req_input_len = m.max_context_length > 0 ? (int32_t)m.max_context_length - 1 : 0;
    m.vocab_size = DMK_VOCAB_SIZE;
    m.model_type = type;
    m.architectures = architectures;
    m.n_architectures = 1;
    m.eos_token_ids = ends;
    m.n_eos_token_ids = sizeof(ends) / sizeof(ends[0]);
    m.pad_token_id = DMK_TOKEN_END_OF_TEXT;
    m.bos_token_id = DMK_TOKEN_START_OF_TEXT;
    dmk_grpc_answer(stream, &m.base);
}

static void get_server_info(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                            struct dmk_bytes message)
{
    static char type[] =
        "vllm-grpc"; /* the protocol that is spoken here, as gateways look for it */
    Vllm__Grpc__Engine__GetServerInfoResponse m =
        VLLM__GRPC__ENGINE__GET_SERVER_INFO_RESPONSE__INIT;

    (void)message;
    m.active_requests = dmk_requests_n_open(f->router->requests);
    m.is_paused = f->router->draining;
    m.last_receive_timestamp = f->received_unix_s;
    m.uptime_seconds = (double)(dmk_clock_unix_s() - f->router->started_unix_s);
    m.server_type = type;
    m.data_parallel_size = 1;
    m.block_size = (int32_t)sum_load(f).page_tokens;
    m.max_num_seqs = (int32_t)f->router->conf->max_requests;
    dmk_grpc_answer(stream, &m.base);
}

static void get_loads(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                      struct dmk_bytes message)
{
    static char version[] = "damask";
    const struct load sum = sum_load(f);
    const uint32_t used = sum.pages - sum.free_pages;
    const time_t now = (time_t)dmk_clock_unix_s();
    Vllm__Grpc__Engine__GetLoadsResponse m = VLLM__GRPC__ENGINE__GET_LOADS_RESPONSE__INIT;
    Vllm__Grpc__Engine__SchedulerLoad load = VLLM__GRPC__ENGINE__SCHEDULER_LOAD__INIT;
    Vllm__Grpc__Engine__SchedulerLoad *loads[] = {&load};
    char text[32];
    struct tm tm;

    (void)message;
    (void)gmtime_r(&now, &tm);
    (void)strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &tm);
    load.num_running_reqs = (int32_t)sum.running;
    load.num_waiting_reqs = (int32_t)sum.waiting;
    load.num_total_reqs = (int32_t)dmk_requests_n_open(f->router->requests);
    load.num_used_tokens = (int32_t)(used * sum.page_tokens);
    load.max_total_num_tokens = (int32_t)(sum.pages * sum.page_tokens);
    load.token_usage = sum.pages > 0 ? (double)used / sum.pages : 0;
    load.utilization = load.token_usage;
    load.max_running_requests = (int32_t)f->router->conf->max_requests;
    load.num_waiting_uncached_tokens = (int32_t)sum.tokens_waiting;
    m.timestamp = text;
    m.version = version;
    m.dp_rank_count = 1;
    m.loads = loads;
    m.n_loads = 1;
    dmk_grpc_answer(stream, &m.base);
}

/* ---- what is not had here, each with its sentence ---- */

static void no_embed(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                     struct dmk_bytes message)
{
    (void)message;
    dmk_grpc_refuse_as(f, stream, 501, "this model generates text and makes no embeddings");
}

static void no_flush(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                     struct dmk_bytes message)
{
    (void)message;
    dmk_grpc_refuse_as(f, stream, 501,
                       "cached prefixes are not dropped on request: give requests a cache_salt");
}

static void no_profile(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                       struct dmk_bytes message)
{
    (void)message;
    dmk_grpc_refuse_as(f, stream, 501, "profiles are taken at the workers, not by this service");
}

static void no_kv_events(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                         struct dmk_bytes message)
{
    (void)message;
    dmk_grpc_refuse_as(f, stream, 501,
                       "prefixes are looked up by this router, which tells nobody where they lie");
}

#define ENGINE "/vllm.grpc.engine.VllmEngine/"
const struct dmk_grpc_engine_method dmk_grpc_engine_methods[] = {
    {ENGINE "HealthCheck", health_check},    {ENGINE "Abort", abort_requests},
    {ENGINE "GetModelInfo", get_model_info}, {ENGINE "GetServerInfo", get_server_info},
    {ENGINE "GetLoads", get_loads},          {ENGINE "Embed", no_embed},
    {ENGINE "FlushCache", no_flush},         {ENGINE "StartProfile", no_profile},
    {ENGINE "StopProfile", no_profile},      {ENGINE "SubscribeKvEvents", no_kv_events},
};
const size_t dmk_n_grpc_engine_methods =
    sizeof(dmk_grpc_engine_methods) / sizeof(dmk_grpc_engine_methods[0]);

/* ---- the tokenizer ---- */

/* A call that waits for the archive. */
struct waiter {
    struct dmk_list node; /* in front.zip_waiters */
    struct dmk_grpc_front *front;
    struct dmk_rpc_stream *stream;
};

/* The making of the archive, on the pool; it outlives a front that goes. */
struct job {
    struct dmk_grpc_front *front;
    const struct dmk_vocab *vocab;
    uint32_t max_context;
    struct dmk_buf zip;
    char sha256[65];
    int rc;
};

static void make_zip(void *ud)
{
    struct job *job = ud;

    job->rc = dmk_tokenizer_zip(job->vocab, job->max_context, &job->zip, job->sha256);
}

static void send_zip(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream)
{
    if (f->zip_state == DMK_ZIP_FAILED) {
        dmk_grpc_refuse_as(f, stream, 500, "no memory for the tokenizer's archive");
        return;
    }
    for (size_t at = 0; at < f->zip.len; at += PIECE_BYTES) {
        Smg__Grpc__Common__GetTokenizerChunk m = SMG__GRPC__COMMON__GET_TOKENIZER_CHUNK__INIT;
        const size_t left = f->zip.len - at;
        uint8_t bytes[PIECE_BYTES + 128];
        size_t n;

        m.data.data = (uint8_t *)f->zip.data + at;
        m.data.len = left < PIECE_BYTES ? left : PIECE_BYTES;
        if (left <= PIECE_BYTES) {
            m.sha256 = (char *)(uintptr_t)f->zip_sha256;
        }
        n = smg__grpc__common__get_tokenizer_chunk__pack(&m, bytes);
        dmk_assert(n <= sizeof(bytes));
        (void)dmk_rpc_send(stream, (struct dmk_bytes){bytes, n}); /* ends with the stream */
    }
    dmk_rpc_finish(stream, DMK_RPC_OK, "");
}

static void zip_made(void *ud)
{
    struct job *job = ud;
    struct dmk_grpc_front *f = job->front;

    if (f) {
        f->zip_job = NULL;
        f->zip_state = job->rc == 0 ? DMK_ZIP_READY : DMK_ZIP_FAILED;
        f->zip = job->zip;
        job->zip = (struct dmk_buf){0};
        memcpy(f->zip_sha256, job->sha256, sizeof(f->zip_sha256));
        while (!dmk_list_empty(&f->zip_waiters)) {
            struct waiter *w = dmk_container_of(f->zip_waiters.next, struct waiter, node);

            dmk_list_remove(&w->node);
            send_zip(f, w->stream);
        }
    }
    dmk_buf_fini(&job->zip);
    free(job);
}

static int start_job(struct dmk_grpc_front *f)
{
    struct job *job = calloc(1, sizeof(*job));
    int rc;

    dmk_assert(job);
    job->front = f;
    job->vocab = f->router->vocab;
    job->max_context = dmk_router_context(f->router);
    dmk_buf_init(&job->zip, MAX_ZIP_BYTES);
    rc = dmk_loop_work(f->router->loop, make_zip, zip_made, job);
    if (rc < 0) {
        free(job);
        return rc;
    }
    f->zip_job = job;
    f->zip_state = DMK_ZIP_RUNS;
    return 0;
}

static void tokenizer_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct waiter *w = ud;
    struct dmk_grpc_front *f = w->front;

    (void)message; /* it has no fields */
    if (!dmk_list_empty(&w->node)) {
        return; /* asked twice */
    }
    if (f->zip_state == DMK_ZIP_NONE && start_job(f) < 0) {
        dmk_grpc_refuse_as(f, stream, 429, "too much work waits here");
    } else if (f->zip_state == DMK_ZIP_RUNS) {
        dmk_list_push_back(&f->zip_waiters, &w->node);
    } else {
        send_zip(f, stream);
    }
}

static void tokenizer_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                             const char *text)
{
    struct waiter *w = ud;

    (void)stream;
    (void)code;
    (void)text;
    dmk_list_remove(&w->node);
    free(w);
}

void dmk_grpc_engine_open_tokenizer(void *ud, struct dmk_rpc_stream *stream,
                                    struct dmk_rpc_stream_events *ret_events)
{
    struct waiter *w = calloc(1, sizeof(*w));

    dmk_assert(w);
    w->front = ud;
    w->stream = stream;
    dmk_list_init(&w->node);
    *ret_events = (struct dmk_rpc_stream_events){
        .on_message = tokenizer_message, .on_closed = tokenizer_closed, .ud = w};
}

void dmk_grpc_engine_fini(struct dmk_grpc_front *f)
{
    if (f->zip_job) {
        ((struct job *)f->zip_job)->front = NULL;
    }
    dmk_buf_fini(&f->zip);
}
