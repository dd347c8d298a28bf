/* The part of a request that runs on the pool: body to conversation to token ids.
 *
 * The loop does not look at the request's ask before this has come back. */
#include <stdio.h>
#include "common/grammar/automaton.h"
#include "router/constraint.h"
#include "router/request_internal.h"

static bool knows_model(const struct dmk_router_conf *conf, const char *model)
{
    if (strcmp(model, conf->model_name) == 0) {
        return true;
    }
    for (size_t i = 0; i < conf->model_aliases.n; i++) {
        if (strcmp(model, conf->model_aliases.items[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* Rendering stopped at the most tokens that are kept, which may be more than the context. */
static int refuse_length(struct dmk_request *r)
{
    const char *param = r->ask.conv ? "messages" : "prompt";
    const size_t max = r->ask.prompt.max_len;

    if (r->limits.max_context == 0 || r->limits.max_context > max) {
        return dmk_api_bad_code(&r->render_error, "context_length_exceeded", param,
                                "the prompt has more than %zu tokens", max);
    }
    return dmk_api_bad_code(
        &r->render_error, "context_length_exceeded", param,
        "this model's maximum context length is %u tokens; the prompt alone has "
        "more than %zu",
        r->limits.max_context, max);
}

static int render(struct dmk_request *r, struct dmk_bpe_scratch *scratch)
{
    const struct dmk_router_conf *conf = r->all->conf.conf;
    const struct dmk_format_options options = {
        .recipient_in_channel = conf->recipient_in_channel,
        .library_schema_text = conf->library_schema_text,
        .library_drop_rule = conf->library_drop_rule,
    };
    const struct dmk_vocab *vocab = r->all->conf.vocab;
    struct dmk_ask *ask = &r->ask;
    struct dmk_error error = {0};

    if (ask->conv) {
        int rc;

        dmk_conv_edit(ask->conv)->single_call = !ask->parallel_calls;
        rc = ask->constraint.len > 0 /* the dialect has made one */
                 ? 0
                 : dmk_constraint_from_conv(dmk_conv_view(ask->conv), &ask->constraint,
                                            &r->render_error);
        if (rc < 0) {
            return rc;
        }
        rc = r->format->render(vocab, scratch, dmk_conv_view(ask->conv), &options, &ask->prompt,
                               &error);

        if (rc < 0 && !ask->prompt.failed) {
            return dmk_api_bad(&r->render_error, "messages", "%s", error.text);
        }
    } else if (ask->text.len > 0) {
        dmk_encode(vocab, scratch, dmk_buf_str(&ask->text), &ask->prompt);
    }
    for (size_t i = 0; i < ask->n_more; i++) {
        struct dmk_ask_prompt *more = &ask->more[i];

        dmk_encode(vocab, scratch, dmk_buf_str(&more->text), &more->ids);
        ask->prompt.failed = ask->prompt.failed || more->ids.failed;
    }
    if (ask->constraint.len > 0) {
        dmk_grammar_stamp(&ask->constraint, r->all->conf.vocabulary);
    }
    return ask->prompt.failed ? refuse_length(r) : 0;
}

void dmk_request__render(void *ud)
{
    struct dmk_request *r = ud;
    struct dmk_bpe_scratch *scratch;

    r->render_rc = r->dialect->parse(r->body, &r->limits, &r->ask, &r->render_error);
    if (r->render_rc < 0) {
        return;
    }
    if (r->ask.model[0] && !knows_model(r->all->conf.conf, r->ask.model)) {
        char quoted[68];

        r->render_rc = dmk_api_fail(&r->render_error, 404, "model_not_found",
                                    "the model \"%s\" does not exist here",
                                    dmk_api_quote(dmk_str_from(r->ask.model), quoted));
        (void)snprintf(r->render_error.param, sizeof(r->render_error.param), "model");
        return;
    }
    r->format = dmk_format_find(r->ask.conv ? "harmony" : "plain");
    scratch = dmk_scratches_take(&r->all->scratches);
    if (!scratch || !r->format) {
        r->render_rc = dmk_api_fail(&r->render_error, 500, "internal_error",
                                    "the prompt could not be rendered");
    } else {
        r->render_rc = render(r, scratch);
    }
    if (r->render_rc == 0 && r->dialect->local) {
        r->dialect->local(r->all->conf.vocab, &r->limits, &r->ask, &r->local);
    }
    dmk_scratches_give(&r->all->scratches, scratch);
}
