/* Responses: input items to messages. Pure, on a pool thread.
 *
 * An assistant's turn comes as several items: reasoning, text, function calls. They are gathered into one
 * message as long as their order is the one in which a message is rendered; an item that would stand before
 * what the message has already begins the next one. */
#include <stdio.h>
#include "router/api_responses.h"
#include "router/fields.h"

#define AT_BYTES 48

struct walk {
    struct dmk_conv_in *in;
    struct dmk_message *turn; /* the newest message, if it is the assistant's; else NULL */
};

/* NULL: the conversation is full. */
static struct dmk_message *add_message(struct walk *w, enum dmk_role role)
{
    struct dmk_message *m = dmk_conv_add_message(w->in->conv, role);

    w->turn = role == DMK_ROLE_ASSISTANT ? m : NULL;
    return m;
}

static int read_message(struct walk *w, const json_t *item, const char *at)
{
    static const char *const words[] = {"user", "assistant", "system", "developer"};
    static const enum dmk_role roles[] = {DMK_ROLE_USER, DMK_ROLE_ASSISTANT, DMK_ROLE_SYSTEM,
                                          DMK_ROLE_DEVELOPER};
    const size_t n_roles = sizeof(roles) / sizeof(roles[0]);
    const json_t *role = json_object_get(item, "role");
    const json_t *content = dmk_field_get(item, "content");
    struct dmk_message *m = w->turn;
    char param[AT_BYTES + 16];
    size_t k = 0;

    while (k < n_roles &&
           !(json_is_string(role) && strcmp(json_string_value(role), words[k]) == 0)) {
        k++;
    }
    if (k == n_roles) {
        (void)snprintf(param, sizeof(param), "%s.role", at);
        return dmk_api_bad(w->in->err, param,
                           "%s must be \"user\", \"assistant\", \"system\" or \"developer\"",
                           param);
    }
    (void)snprintf(param, sizeof(param), "%s.content", at);
    if (!content) {
        return dmk_api_bad(w->in->err, param, "%s is missing", param);
    }
    if (roles[k] != DMK_ROLE_ASSISTANT || !m || m->has_content || m->n_calls > 0) {
        m = add_message(w, roles[k]);
    }
    if (!m) {
        return dmk_conv_in_too_big(w->in);
    }
    m->has_content = true;
    return dmk_conv_in_text(w->in, content, param, &m->content);
}

/* The texts of a reasoning item, joined by newlines, behind what the message has. */
static int add_reasoning(struct walk *w, struct dmk_message *m, const json_t *content,
                         const char *at)
{
    struct dmk_buf joined;
    char param[AT_BYTES + 32];
    int rc = 0;

    dmk_buf_init(&joined, w->in->limits->max_conv_bytes);
    dmk_buf_append_str(&joined, m->reasoning);
    for (size_t i = 0; i < json_array_size(content) && rc == 0; i++) {
        const json_t *part = json_array_get(content, i);
        const json_t *type = json_object_get(part, "type");
        const json_t *text = json_object_get(part, "text");

        if (!json_is_string(type) || strcmp(json_string_value(type), "reasoning_text") != 0 ||
            !json_is_string(text)) {
            (void)snprintf(param, sizeof(param), "%s.content[%zu]", at, i);
            rc = dmk_api_bad(w->in->err, param,
                             "%s must be a part {\"type\": \"reasoning_text\", \"text\": \"...\"}",
                             param);
        } else if (json_string_length(text) > 0) {
            dmk_buf_puts(&joined, joined.len > 0 ? "\n" : "");
            dmk_buf_append_str(&joined, dmk_field_text(text));
        }
    }
    if (rc == 0) {
        m->reasoning = dmk_conv_copy(w->in->conv, dmk_buf_str(&joined));
        rc = joined.failed || dmk_conv_failed(w->in->conv) ? dmk_conv_in_too_big(w->in) : 0;
    }
    dmk_buf_fini(&joined);
    return rc;
}

/* Summaries are not what the model wrote and say nothing to it. Reasoning that only another server can read is
 * an error: to leave it out would change the answer. */
static int read_reasoning(struct walk *w, const json_t *item, const char *at)
{
    const json_t *content = dmk_field_get(item, "content");
    struct dmk_message *m = w->turn;
    char param[AT_BYTES + 24];

    if (content && !json_is_array(content)) {
        (void)snprintf(param, sizeof(param), "%s.content", at);
        return dmk_api_bad(w->in->err, param, "%s must be a list of reasoning_text parts", param);
    }
    if (json_array_size(content) == 0) {
        (void)snprintf(param, sizeof(param), "%s.encrypted_content", at);
        return dmk_field_get(item, "encrypted_content")
                   ? dmk_api_bad(w->in->err, param,
                                 "%s can not be read by this server; it takes reasoning as content",
                                 param)
                   : 0;
    }
    if (!m || m->has_content || m->n_calls > 0) {
        m = add_message(w, DMK_ROLE_ASSISTANT);
    }
    if (!m) {
        return dmk_conv_in_too_big(w->in);
    }
    return add_reasoning(w, m, content, at);
}

static int read_call(struct walk *w, const json_t *item, const char *at)
{
    struct dmk_message *m = w->turn;
    char prefix[AT_BYTES + 2];

    if (!m) {
        m = add_message(w, DMK_ROLE_ASSISTANT);
    }
    if (!m) {
        return dmk_conv_in_too_big(w->in);
    }
    (void)snprintf(prefix, sizeof(prefix), "%s.", at);
    return dmk_conv_in_call(w->in, m, item, prefix, "call_id", item, prefix);
}

static int read_output(struct walk *w, const json_t *item, const char *at)
{
    const json_t *output = dmk_field_get(item, "output");
    struct dmk_message *m = add_message(w, DMK_ROLE_TOOL);
    char param[AT_BYTES + 16];
    int rc;

    if (!m) {
        return dmk_conv_in_too_big(w->in);
    }
    (void)snprintf(param, sizeof(param), "%s.output", at);
    if (!output) {
        return dmk_api_bad(w->in->err, param, "%s is missing", param);
    }
    m->has_content = true;
    rc = dmk_conv_in_text(w->in, output, param, &m->content);
    (void)snprintf(param, sizeof(param), "%s.call_id", at);
    return rc < 0 ? rc : dmk_conv_in_answer(w->in, m, dmk_field_get(item, "call_id"), param);
}

static int read_item(struct walk *w, const json_t *item, const char *at)
{
    static const struct {
        const char *type;
        int (*read)(struct walk *w, const json_t *item, const char *at);
    } kinds[] = {
        {"message", read_message},
        {"reasoning", read_reasoning},
        {"function_call", read_call},
        {"function_call_output", read_output},
    };
    const json_t *type = dmk_field_get(item, "type");
    char param[AT_BYTES + 16];
    char quoted[68];

    if (!json_is_object(item)) {
        return dmk_api_bad(w->in->err, at, "%s must be an item: an object", at);
    }
    if (!type && json_object_get(item, "role")) {
        return read_message(w, item, at);
    }
    for (size_t i = 0; json_is_string(type) && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(json_string_value(type), kinds[i].type) == 0) {
            return kinds[i].read(w, item, at);
        }
    }
    (void)snprintf(param, sizeof(param), "%s.type", at);
    if (!json_is_string(type)) {
        return dmk_api_bad(w->in->err, param, "%s must be the type of the item", param);
    }
    return dmk_api_bad_code(w->in->err, "unsupported_value", param,
                            "%s is \"%s\"; this server takes message, reasoning, function_call and "
                            "function_call_output",
                            param, dmk_api_quote(dmk_field_text(type), quoted));
}

int dmk_api_responses_read_input(struct dmk_conv_in *in, const json_t *input)
{
    struct walk w = {.in = in};
    struct dmk_message *m;
    char at[AT_BYTES];
    int rc;

    if (json_is_string(input)) {
        m = add_message(&w, DMK_ROLE_USER);
        if (!m) {
            return dmk_conv_in_too_big(in);
        }
        m->has_content = true;
        return dmk_conv_in_copy(in, input, &m->content);
    }
    if (!json_is_array(input) || json_array_size(input) == 0) {
        return dmk_api_bad(in->err, "input", "input must be a text or a list of at least one item");
    }
    if (json_array_size(input) > in->limits->max_messages) {
        return dmk_api_bad(in->err, "input", "input must have at most %u items, not %zu",
                           in->limits->max_messages, json_array_size(input));
    }
    for (size_t i = 0; i < json_array_size(input); i++) {
        (void)snprintf(at, sizeof(at), "input[%zu]", i);
        rc = read_item(&w, json_array_get(input, i), at);
        if (rc < 0) {
            return rc;
        }
    }
    if (dmk_conv_view(in->conv)->n_messages == 0) {
        return dmk_api_bad(in->err, "input", "input must hold something besides empty reasoning");
    }
    return 0;
}
