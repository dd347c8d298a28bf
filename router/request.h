/* Requests: from a body to the last byte of its answer. One owner: the loop.
 *
 *      start
 *        |  parse, render, encode: on the pool
 *        v
 *    RENDERING --bad body---------------------------------------------> fail
 *        |
 *        v
 *     WAITING <------------- retry: once; or no room: until the deadline --------+
 *        |  tokens in flight, a decode worker with room        deadline -> fail  |
 *        v                                                                       |
 *    RESERVING --- no answer in time, refused, D gone ---------------------------+
 *        |  reserved                                                             |
 *        v                                                                       |
 *    PREFILLING -- P or D failed, gone or silent too long -----------------------+
 *        |  first token
 *        v
 *     DECODING --- D failed, gone or silent ---> fail: an error as the last frame
 *        |  all choices finished, or cut by a stop string
 *        v
 *       done
 *
 * The client may leave in any state: both workers are told to cancel. A retry first cancels the old
 * attempt at both workers; every event carries (request, attempt) and those of older attempts are
 * dropped. After the first token there is no retry. */
#pragma once

#include "common/loop/loop.h"
#include "router/api.h"
#include "router/conf.h"
#include "router/fleet.h"
#include "router/stats.h"

struct dmk_requests; /* all of them */
struct dmk_request;

/* Where an answer goes. begin comes first, once the body is understood; then frames and flushes;
 * then exactly one of done, fail and release, after which nothing comes any more. */
struct dmk_front {
    void (*begin)(void *ud, bool stream);
    void (*frame)(void *ud, const char *event, struct dmk_bytes payload);
    void (*flush)(void *ud); /* send what was framed */
    void (*idle)(void *ud);  /* a stream has been silent: show a sign of life */
    void (*done)(void *ud, struct dmk_str timeline);
    void (*fail)(void *ud, const struct dmk_api_error *error, struct dmk_str timeline);
    void (*release)(void *ud); /* after dmk_request_abandon, when the body is not read any more */
};

struct dmk_request_conf {
    const struct dmk_dialect *dialect;
    struct dmk_bytes body;   /* stays until done, fail or release */
    const char *request_id;  /* x-request-id, or NULL: made up */
    const char *traceparent; /* or NULL */
    const struct dmk_front *front;
    void *ud;
};

struct dmk_requests_conf {
    struct dmk_loop *loop;
    const struct dmk_router_conf *conf;
    const struct dmk_vocab *vocab;
    struct dmk_id128 vocabulary; /* hash of the bytes that decode workers get (common/grammar) */
    struct dmk_stats *stats;
};

int dmk_requests_new(const struct dmk_requests_conf *conf, struct dmk_requests **ret,
                     struct dmk_error *reterr);
/* Every request must have ended. */
void dmk_requests_free(struct dmk_requests **requests);
/* The callbacks by which the fleet tells about workers; then the fleet itself. */
struct dmk_fleet_events dmk_requests_fleet_events(struct dmk_requests *requests);
void dmk_requests_set_fleet(struct dmk_requests *requests, struct dmk_fleet *fleet);
uint32_t dmk_requests_n_open(const struct dmk_requests *requests);
/* From then on dmk_request_start refuses. */
void dmk_requests_drain(struct dmk_requests *requests);
/* Fails whatever still runs; what is on the pool fails when it comes back. */
void dmk_requests_abort_all(struct dmk_requests *requests);

/* 0, or negative with an error to be told to the client; then the front is not called. */
int dmk_request_start(struct dmk_requests *requests, const struct dmk_request_conf *conf,
                      struct dmk_request **ret, struct dmk_api_error *reterr);
/* The client has left. */
void dmk_request_abandon(struct dmk_request *request);
/* As echoed to the client and written in every log line. */
const char *dmk_request_id(const struct dmk_request *request);

/* True for 1 to 128 of letters, digits and ._:- */
bool dmk_request_id_is_valid(struct dmk_str text);
/* Refuses a client's id of more than 128 characters or with control characters. One that is only not valid
 * passes: the request gets an id of ours. */
int dmk_request_id_check(struct dmk_str text, struct dmk_api_error *reterr);
bool dmk_traceparent_is_valid(struct dmk_str text);
