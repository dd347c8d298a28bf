/* The canary; see engine_canary.h. */
#include "common/worker/engine_canary.h"

#include <math.h>
#include <stdlib.h>
#include "common/base/status.h"

#define MAX_TOKENS 16

static int run_step(const struct dmk_engine_port *port, const struct dmk_step_seq *seq,
                    float *logits, struct dmk_error *reterr)
{
    const struct dmk_step step = {.seqs = seq, .n_seqs = 1, .logits = logits};
    const int ret = port->step(port->engine, &step);

    if (ret < 0) {
        return dmk_error_set(reterr, ret, "the engine failed its first step of %u tokens: %s",
                             seq->n_tokens, dmk_status_message(ret));
    }
    return 0;
}

static int check_token(const struct dmk_engine_port *port, const uint32_t *ids, uint32_t n_ids,
                       const float *logits, struct dmk_error *reterr)
{
    const struct dmk_engine_pick pick = {.ids = ids, .n_prompt = n_ids, .n_ids = n_ids};

    if (port->pick) {
        return port->pick(port->engine, &pick) < port->shape->vocab
                   ? 0
                   : dmk_error_set(reterr, -DMK_EFORMAT, "the engine picks a token that is none");
    }
    for (uint32_t i = 0; i < port->shape->vocab; i++) {
        if (!isfinite(logits[i])) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "the model's first logits are not finite (token %u): are its "
                                 "weights whole?",
                                 i);
        }
    }
    return 0;
}

static int run_group(const struct dmk_engine_port *port, uint32_t group, bool decode, uint32_t n,
                     float *logits, struct dmk_error *reterr)
{
    uint32_t ids[MAX_TOKENS], page = 0;
    struct dmk_step_seq seq = {.ids = ids,
                               .n_tokens = decode ? n - 1 : n,
                               .full_pages = &page,
                               .ring = {0, 1, 2},
                               .n_ring = 3,
                               .logits = DMK_LOGITS_NONE,
                               .dp = group};
    int ret;

    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (i + 1) % port->shape->vocab;
    }
    ret = seq.n_tokens > 0 ? run_step(port, &seq, NULL, reterr) : 0;
    if (ret < 0 || !decode) {
        return ret;
    }
    seq.ids = ids + n - 1;
    seq.pos = n - 1;
    seq.n_tokens = 1;
    seq.logits = DMK_LOGITS_LAST;
    ret = run_step(port, &seq, logits, reterr);
    return ret < 0 ? ret : check_token(port, ids, n, logits, reterr);
}

int dmk_engine_canary(const struct dmk_engine_port *port, bool decode, uint32_t max_step_tokens,
                      struct dmk_error *reterr)
{
    const uint32_t n = max_step_tokens < MAX_TOKENS ? max_step_tokens : MAX_TOKENS;
    const uint32_t n_groups = port->layout.dp > 0 ? port->layout.dp : 1;
    float *logits = NULL;
    int ret = 0;

    if (decode && !port->pick) {
        logits = malloc(port->shape->vocab * sizeof(*logits));
        if (!logits) {
            return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for a row of logits");
        }
    }
    for (uint32_t g = 0; g < n_groups && ret == 0; g++) {
        ret = run_group(port, g, decode, n, logits, reterr);
    }
    free(logits);
    return ret;
}
