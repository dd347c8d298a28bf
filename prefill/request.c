/* Requests come and are taken back: what may become a job, and the cancels of routers. What is refused is
 * answered before submit returns, and leaves nothing behind. On the loop. */
#include "prefill/internal.h"

#include <string.h>

static void refuse(struct dmk_prefill_core *core, const struct dmk_prefill_request *request,
                   enum dmk_failure code, const char *text, uint32_t retry_after_ms)
{
    const struct dmk_prefill_event event = {
        .kind = DMK_PREFILL_FAILED,
        .router = request->router,
        .id = request->id,
        .failed = {.code = code, .text = text, .retry_after_ms = retry_after_ms},
    };

    core->load.n_failed++;
    core->conf.on_event(core->conf.ud, &event);
}

static struct dmk_prefill_job *free_slot(struct dmk_prefill_core *core)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state == DMK_PREFILL_FREE) {
            return &core->jobs[i];
        }
    }
    return NULL;
}

/* What the ticket says must be what the request says; the sender checks the rest at the claim. */
static int check_ticket(const struct dmk_prefill_core *core, uint32_t n,
                        const struct dmk_ticket *ticket, struct dmk_error *reterr)
{
    if (ticket->n_tokens != n) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "the ticket is for %u tokens, the prompt has %u to compute",
                             ticket->n_tokens, n);
    }
    if (ticket->have > n || ticket->have % DMK_PAGE_TOKENS != 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the ticket says that %u of %u tokens are there",
                             ticket->have, n);
    }
    if (!dmk_id128_equal(ticket->model_id, core->conf.engine.model_id)) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH,
            "the decode worker serves another model: load the same checkpoint in both pools");
    }
    return 0;
}

static bool is_of(const struct dmk_prefill_job *job, uint32_t router, struct dmk_request_id id)
{
    return job->state != DMK_PREFILL_FREE && job->router == router &&
           dmk_request_id_equal(job->id, id);
}

static bool is_known(const struct dmk_prefill_core *core, const struct dmk_prefill_request *request)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (is_of(&core->jobs[i], request->router, request->id)) {
            return true;
        }
    }
    return false;
}

/* Two jobs with one ticket would take each other's replies, and the one that is refused would tell D that
 * nothing writes any more while the other one does. */
static bool is_ticket_used(const struct dmk_prefill_core *core, struct dmk_id128 cookie)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE &&
            dmk_id128_equal(core->jobs[i].ticket.cookie, cookie)) {
            return true;
        }
    }
    return false;
}

void dmk_prefill_submit(struct dmk_prefill_core *core, const struct dmk_prefill_request *request,
                        uint64_t now_ns)
{
    struct dmk_prefill_job *job = free_slot(core);
    struct dmk_error err;
    int rc;

    core->now_ns = now_ns;
    if (is_known(core, request)) {
        return; /* sent twice: the first one's events answer it */
    }
    if (core->draining) {
        refuse(core, request, DMK_FAILURE_DRAINING, "this worker is draining", 0);
        return;
    }
    if (request->n_prompt < 2 || request->n_prompt - 1 > core->conf.max_context) {
        (void)dmk_error_set(&err, -DMK_EINVAL,
                            "prompts of 2 to %u tokens are taken here, this one has %u",
                            core->conf.max_context + 1, request->n_prompt);
        refuse(core, request, DMK_FAILURE_INVALID, err.text, 0);
        return;
    }
    if (!job) {
        refuse(core, request, DMK_FAILURE_FULL, "the queue is full", 1000);
        return;
    }
    rc = dmk_ticket_decode(request->ticket, &job->ticket, &err);
    if (rc == 0) {
        rc = check_ticket(core, request->n_prompt - 1, &job->ticket, &err);
    }
    if (rc == 0 && is_ticket_used(core, job->ticket.cookie)) {
        rc = dmk_error_set(&err, -DMK_EINVAL, "another prompt has come with the same ticket");
    }
    if (rc < 0) {
        refuse(core, request, rc == -DMK_EMISMATCH ? DMK_FAILURE_MISMATCH : DMK_FAILURE_INVALID,
               err.text, 0);
        return;
    }
    job->order = ++core->next_order;
    job->due_ns = (int64_t)now_ns + request->shift_ns;
    job->router = request->router;
    job->id = request->id;
    job->mute = job->with_tx = job->released = job->staged = false;
    job->n = request->n_prompt - 1;
    memcpy(job->prompt, request->prompt, job->n * sizeof(*job->prompt));
    job->pos = job->n_cached = 0;
    job->pushed_blocks = job->ticket.have / DMK_PAGE_TOKENS;
    job->root = dmk_block_root(core->conf.engine.numerics, request->salt);
    job->queued_ns = now_ns;
    job->claim_ns = job->started_ns = job->computed_ns = 0;
    job->state = DMK_PREFILL_QUEUED;
}

void dmk_prefill_cancel(struct dmk_prefill_core *core, uint32_t router, struct dmk_request_id id)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (is_of(&core->jobs[i], router, id)) {
            core->jobs[i].mute = true;
            dmk_prefill__abandon(core, &core->jobs[i]);
        }
    }
}

void dmk_prefill_router_gone(struct dmk_prefill_core *core, uint32_t router)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE && core->jobs[i].router == router) {
            core->jobs[i].mute = true;
            dmk_prefill__abandon(core, &core->jobs[i]);
        }
    }
}
