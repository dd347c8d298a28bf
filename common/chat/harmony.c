/* The "harmony" format: a conversation becomes a list of Harmony messages, the list becomes ids.
 *
 *   conversation                     Harmony messages
 *   (settings)                       system: identity, date, effort, channels
 *   first system/developer, tools,   developer: instructions, functions, response format
 *     response format
 *   later system/developer           developer: instructions
 *   user                             user
 *   assistant                        analysis (reasoning), commentary (text before calls), calls; or
 *                                    analysis, final
 *   tool                             functions.NAME to=assistant, commentary
 *
 * Views and small strings live in an arena for the time of the call. Any thread that brings its scratch. */
#include "common/chat/harmony.h"

#include <stdio.h>
#include <stdlib.h>
#include "common/chat/arena.h"
#include "common/chat/formats.h"
#include "common/chat/harmony_parse.h"
#include "common/chat/harmony_turn.h"

#define IDENTITY         "You are ChatGPT, a large language model trained by OpenAI."
#define KNOWLEDGE_CUTOFF "2024-06"
#define FUNCTIONS        "functions"
#define CONSTRAINED_JSON "<|constrain|>json"
#define DEFAULT_FORMAT   "response"
#define MAX_ARENA_BYTES  ((size_t)256 << 20)
#define DATE_BYTES       40
#define SECONDS_PER_DAY  86400

/* The list that grows while the conversation is walked. */
struct list {
    struct dmk_arena arena;
    struct dmk_harmony_message *messages;
    size_t n, cap;
    const struct dmk_format_options *options;
};

static const struct dmk_str nothing = {NULL, 0};

/* A message with one part; a sink when memory is out (the arena says so at the end). */
static struct dmk_harmony_message *add_message(struct list *list, enum dmk_role role,
                                               const char *channel, struct dmk_str body)
{
    static _Thread_local struct dmk_harmony_message sink;
    struct dmk_harmony_message *array =
        dmk_arena_grow(&list->arena, list->messages, list->n, &list->cap, sizeof(*array));
    struct dmk_str *part = dmk_arena_alloc(&list->arena, sizeof(*part));

    if (!array || !part) {
        return &sink;
    }
    list->messages = array;
    *part = body;
    array[list->n] =
        (struct dmk_harmony_message){.role = role,
                                     .channel = channel ? dmk_str_from(channel) : nothing,
                                     .parts = part,
                                     .n_parts = 1};
    return &array[list->n++];
}

/* YYYY-MM-DD of a time in UTC, by the days-from-civil algorithm (H. Hinnant), without the time zone that
 * libc might apply. The year stands in 0..9999. */
static void format_date(int64_t unix_s, char ret_text[DATE_BYTES])
{
    const int64_t days = unix_s / SECONDS_PER_DAY + 719468; /* since 0000-03-01 */
    const int64_t era = days / 146097;
    const unsigned day_of_era = (unsigned)(days - era * 146097);
    const unsigned year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    const unsigned day_of_year =
        day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    const unsigned month_from_march = (5 * day_of_year + 2) / 153;
    const unsigned day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    const unsigned month = month_from_march < 10 ? month_from_march + 3 : month_from_march - 9;
    const int64_t year = (int64_t)year_of_era + era * 400 + (month <= 2);

    snprintf(ret_text, DATE_BYTES, "%04u-%02u-%02u", (unsigned)(year % 10000), month, day);
}

static int add_system(struct list *list, const struct dmk_conv_view *conv, bool has_functions,
                      struct dmk_buf *body, struct dmk_error *reterr)
{
    static const char *const efforts[] = {
        [DMK_EFFORT_LOW] = "low", [DMK_EFFORT_MEDIUM] = "medium", [DMK_EFFORT_HIGH] = "high"};
    const struct dmk_str channels[] = {dmk_str_from("analysis"), dmk_str_from("commentary"),
                                       dmk_str_from("final")};
    char date[DATE_BYTES];
    struct dmk_harmony_system sys = {
        .identity = dmk_str_from(IDENTITY),
        .cutoff = dmk_str_from(KNOWLEDGE_CUTOFF),
        .effort = dmk_str_from(efforts[conv->effort]),
        .channels = channels,
        .n_channels = 3,
        .channel_required = true,
        .has_functions = has_functions,
    };

    if (conv->date_unix_s >= 0) {
        format_date(conv->date_unix_s, date);
        sys.date = dmk_str_from(date);
    }
    const int r = dmk_harmony_system_text(&sys, list->options->library_schema_text, body, reterr);

    add_message(list, DMK_ROLE_SYSTEM, NULL, dmk_buf_str(body));
    return r;
}

/* Nothing is added when there is nothing to say. */
static int add_developer(struct list *list, const struct dmk_conv_view *conv,
                         struct dmk_str instructions, bool has_functions, struct dmk_buf *body,
                         struct dmk_error *reterr)
{
    const struct dmk_harmony_namespace functions = {
        .name = dmk_str_from(FUNCTIONS), .tools = conv->tools, .n_tools = conv->n_tools};
    const struct dmk_harmony_developer dev = {
        .instructions = instructions.len ? instructions : nothing,
        .namespaces = &functions,
        .n_namespaces = has_functions ? 1 : 0,
        .format_name = conv->response_format_name.len ? conv->response_format_name
                                                      : dmk_str_from(DEFAULT_FORMAT),
        .format_description = conv->response_format_description,
        .format_schema = conv->response_schema,
    };
    const int r =
        dmk_harmony_developer_text(&dev, list->options->library_schema_text, body, reterr);

    if (r == 0 && body->len) {
        add_message(list, DMK_ROLE_DEVELOPER, NULL, dmk_buf_str(body));
    }
    return r;
}

static struct dmk_str concat(struct list *list, const char *prefix, struct dmk_str text)
{
    return dmk_arena_concat(&list->arena, dmk_str_from(prefix), text);
}

/* A call that we handed out gets the header that the model wrote; others the library's, or by option the
 * one that the model writes most. followed: another call of the same output comes next. */
static void add_call(struct list *list, const struct dmk_tool_call *call, bool followed)
{
    struct dmk_call_form form = {.type = DMK_CALL_JSON,
                                 .constrain = true,
                                 .space_before = true,
                                 .recipient_in_channel = list->options->recipient_in_channel};
    const bool ours = dmk_call_id_read(call->id, &form);
    static const char *const channels[] = {[DMK_CALL_COMMENTARY] = "commentary",
                                           [DMK_CALL_ANALYSIS] = "analysis",
                                           [DMK_CALL_NO_CHANNEL] = NULL};
    struct dmk_harmony_message *message =
        add_message(list, DMK_ROLE_ASSISTANT, channels[form.channel], call->arguments);

    message->recipient = form.bare_name ? call->name : concat(list, FUNCTIONS ".", call->name);
    message->recipient_in_channel = form.recipient_in_channel;
    message->type_unspaced = !form.space_before;
    message->ends_open = ours && followed;
    if (form.constrain) {
        message->content_type = concat(list, form.space_after ? "<|constrain|> " : "<|constrain|>",
                                       dmk_call_type_word(form.type));
    } else if (form.type != DMK_CALL_NO_TYPE) {
        message->content_type = dmk_call_type_word(form.type);
    }
}

static void add_assistant(struct list *list, const struct dmk_message *message)
{
    struct dmk_call_form form;

    if (message->reasoning.len) {
        add_message(list, DMK_ROLE_ASSISTANT, "analysis", message->reasoning);
    }
    if (message->n_calls == 0) {
        if (message->has_content) {
            add_message(list, DMK_ROLE_ASSISTANT, "final", message->content);
        }
        return;
    }
    if (message->content.len) {
        add_message(list, DMK_ROLE_ASSISTANT, "commentary", message->content);
    }
    for (size_t i = 0; i < message->n_calls; i++) {
        const bool followed =
            i + 1 < message->n_calls && dmk_call_id_read(message->calls[i + 1].id, &form);

        add_call(list, &message->calls[i], followed);
    }
}

static void add_tool_result(struct list *list, const struct dmk_message *message,
                            struct dmk_str name)
{
    struct dmk_harmony_message *reply =
        add_message(list, DMK_ROLE_TOOL, "commentary", message->content);

    reply->name = concat(list, FUNCTIONS ".", name);
    reply->recipient = dmk_str_from("assistant");
    reply->recipient_in_channel = list->options->recipient_in_channel;
}

static void add_rest(struct list *list, const struct dmk_conv_view *conv, size_t first,
                     const struct dmk_str *names)
{
    for (size_t i = first; i < conv->n_messages; i++) {
        const struct dmk_message *message = &conv->messages[i];

        switch (message->role) {
        case DMK_ROLE_SYSTEM:
        case DMK_ROLE_DEVELOPER:
            if (message->content.len) {
                add_message(list, DMK_ROLE_DEVELOPER, NULL,
                            concat(list, "# Instructions\n\n", message->content));
            }
            break;
        case DMK_ROLE_USER:
            add_message(list, DMK_ROLE_USER, NULL, message->content)->name =
                message->name.len ? message->name : nothing;
            break;
        case DMK_ROLE_ASSISTANT:
            add_assistant(list, message);
            break;
        case DMK_ROLE_TOOL:
            add_tool_result(list, message, names[i]);
            break;
        }
    }
}

static int build_list(struct list *list, const struct dmk_conv_view *conv, struct dmk_buf *system,
                      struct dmk_buf *developer, struct dmk_error *reterr)
{
    const bool has_functions = conv->n_tools > 0 && conv->tool_choice != DMK_TOOLS_NONE;
    const bool has_instructions =
        conv->n_messages > 0 && conv->messages[0].role <= DMK_ROLE_DEVELOPER;
    const struct dmk_str instructions = has_instructions ? conv->messages[0].content : nothing;
    struct dmk_str *names = dmk_arena_alloc(&list->arena, (conv->n_messages + 1) * sizeof(*names));
    size_t bad = 0;

    if (!names) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory while rendering a conversation");
    }
    int r = dmk_conv_answered_names(conv, names, &bad);

    if (r == -DMK_ENOENT) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "message %zu answers the tool call \"%.*s\", which no earlier message "
                             "made",
                             bad, (int)conv->messages[bad].call_id.len,
                             conv->messages[bad].call_id.data);
    }
    r = r < 0 ? r : add_system(list, conv, has_functions, system, reterr);
    r = r < 0 ? r : add_developer(list, conv, instructions, has_functions, developer, reterr);
    if (r < 0) {
        return r;
    }
    add_rest(list, conv, has_instructions ? 1 : 0, names);
    return 0;
}

static int render(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                  const struct dmk_conv_view *conv, const struct dmk_format_options *options,
                  struct dmk_ids *ids, struct dmk_error *reterr)
{
    static const struct dmk_format_options defaults;
    struct list list = {.options = options ? options : &defaults};
    struct dmk_buf system, developer;

    dmk_arena_init(&list.arena, MAX_ARENA_BYTES);
    dmk_buf_init(&system, 0);
    dmk_buf_init(&developer, 0);
    int r = build_list(&list, conv, &system, &developer, reterr);

    if (r == 0 && (list.arena.failed || system.failed || developer.failed)) {
        r = dmk_error_set(reterr, -DMK_EFULL, "the conversation is too large to render");
    }
    if (r == 0) {
        dmk_harmony_render_messages(
            vocab, scratch, list.messages, list.n,
            list.options->library_drop_rule ? DMK_HARMONY_DROP_LIBRARY : DMK_HARMONY_DROP_OLD, ids);
        dmk_harmony_render_turn(vocab, scratch, ids);
        if (ids->failed) {
            r = dmk_error_set(reterr, -DMK_EFULL,
                              "the conversation has more tokens than fit into one prompt");
        }
    }
    dmk_buf_fini(&system);
    dmk_buf_fini(&developer);
    dmk_arena_fini(&list.arena);
    return r;
}

static const uint32_t stop_ids[] = {DMK_TOKEN_RETURN, DMK_TOKEN_CALL, DMK_TOKEN_END_OF_TEXT};

const struct dmk_format dmk_format_harmony = {
    .name = "harmony",
    .render = render,
    .turn = dmk_harmony_turn,
    .stop_ids = stop_ids,
    .n_stop_ids = sizeof(stop_ids) / sizeof(stop_ids[0]),
    .parser_new = dmk_harmony_parser_new,
    .parser_push = dmk_harmony_parser_push,
    .parser_end = dmk_harmony_parser_end,
    .parser_free = dmk_harmony_parser_free,
};
