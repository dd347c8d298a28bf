/* A line of JSON to a conversation, and on to ids. Cold code for a tool; one thread. */
#include "tools/chat/chat_json.h"

#define MAX_CONVERSATION_BYTES ((size_t)256 << 20)

static const char *const role_words[] = {"system", "developer", "user", "assistant", "tool"};
static const char *const effort_words[] = {"low", "medium", "high"};
static const char *const choice_words[] = {"auto", "none", "required", "named"};

/* The index of obj[key] among words; *ret keeps its value when the key is absent. */
static int get_word(const json_t *obj, const char *where, const char *key, const char *const *words,
                    size_t n_words, enum dmk_json_need need, unsigned *ret,
                    struct dmk_error *reterr)
{
    struct dmk_str word;
    const int r = dmk_json_get_str(obj, where, key, need, &word, reterr);

    for (size_t i = 0; r == 1 && i < n_words; i++) {
        if (dmk_str_is(word, words[i])) {
            *ret = (unsigned)i;
            return 0;
        }
    }
    if (r == 1) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: \"%s\" can not be \"%.*s\"", where, key,
                             (int)word.len, word.data);
    }
    return r;
}

static int read_call(const json_t *value, struct dmk_tool_call *call, struct dmk_error *reterr)
{
    int r = dmk_json_get_str(value, "tool_calls", "id", DMK_JSON_OPTIONAL, &call->id, reterr);

    r = r < 0
            ? r
            : dmk_json_get_str(value, "tool_calls", "name", DMK_JSON_REQUIRED, &call->name, reterr);
    r = r < 0 ? r
              : dmk_json_get_str(value, "tool_calls", "arguments", DMK_JSON_REQUIRED,
                                 &call->arguments, reterr);
    return r < 0 ? r : 0;
}

static int read_message(struct dmk_conv *conv, const json_t *value, struct dmk_error *reterr)
{
    unsigned role = 0;
    json_t *calls = NULL;
    int r = get_word(value, "messages", "role", role_words, 5, DMK_JSON_REQUIRED, &role, reterr);

    if (r < 0) {
        return r;
    }
    struct dmk_message *message = dmk_conv_add_message(conv, (enum dmk_role)role);

    if (!message) {
        return dmk_error_set(reterr, -DMK_EFULL, "the conversation is too large");
    }
    const struct {
        const char *key;
        struct dmk_str *ret;
    } texts[] = {{"name", &message->name},
                 {"content", &message->content},
                 {"reasoning", &message->reasoning},
                 {"tool_call_id", &message->call_id}};

    for (size_t i = 0; r >= 0 && i < sizeof(texts) / sizeof(texts[0]); i++) {
        r = dmk_json_get_str(value, "messages", texts[i].key, DMK_JSON_OPTIONAL, texts[i].ret,
                             reterr);
        message->has_content |= r == 1 && i == 1;
    }
    r = r < 0 ? r
              : dmk_json_get_array(value, "messages", "tool_calls", DMK_JSON_OPTIONAL, &calls,
                                   reterr);
    for (size_t i = 0; r >= 0 && i < json_array_size(calls); i++) {
        struct dmk_tool_call *call = dmk_conv_add_call(conv, message);

        r = call ? read_call(json_array_get(calls, i), call, reterr)
                 : dmk_error_set(reterr, -DMK_EFULL, "the conversation is too large");
    }
    return r < 0 ? r : 0;
}

static int read_tool(const json_t *value, const char *where, struct dmk_tool *tool,
                     struct dmk_error *reterr)
{
    json_t *parameters = json_object_get(value, "parameters");
    int r = dmk_json_get_str(value, where, "name", DMK_JSON_REQUIRED, &tool->name, reterr);

    r = r < 0 ? r
              : dmk_json_get_str(value, where, "description", DMK_JSON_OPTIONAL, &tool->description,
                                 reterr);
    tool->parameters = json_is_null(parameters) ? NULL : parameters;
    return r < 0 ? r : 0;
}

int dmk_chat_read_tools(const json_t *array, const char *where, struct dmk_arena *arena,
                        const struct dmk_tool **ret_tools, size_t *ret_n, struct dmk_error *reterr)
{
    const size_t n = json_array_size(array);
    struct dmk_tool *tools = dmk_arena_alloc(arena, (n + 1) * sizeof(*tools));
    int r = 0;

    if (!tools) {
        return dmk_error_set(reterr, -DMK_EFULL, "%s: too many", where);
    }
    for (size_t i = 0; r == 0 && i < n; i++) {
        r = read_tool(json_array_get(array, i), where, &tools[i], reterr);
    }
    if (r == 0) {
        *ret_tools = tools;
        *ret_n = n;
    }
    return r;
}

static int read_conv_tools(struct dmk_conv *conv, const json_t *line, struct dmk_error *reterr)
{
    json_t *tools = NULL;
    int r = dmk_json_get_array(line, "line", "tools", DMK_JSON_OPTIONAL, &tools, reterr);

    for (size_t i = 0; r >= 0 && i < json_array_size(tools); i++) {
        struct dmk_tool *tool = dmk_conv_add_tool(conv);

        if (!tool) {
            return dmk_error_set(reterr, -DMK_EFULL, "the conversation is too large");
        }
        r = read_tool(json_array_get(tools, i), "tools", tool, reterr);
        json_incref(tool->parameters);
    }
    return r < 0 ? r : 0;
}

static int read_response_format(struct dmk_conv_view *view, const json_t *line,
                                struct dmk_error *reterr)
{
    json_t *format = NULL;
    int r =
        dmk_json_get_object(line, "line", "response_format", DMK_JSON_OPTIONAL, &format, reterr);

    if (r <= 0) {
        return r;
    }
    r = dmk_json_get_str(format, "response_format", "name", DMK_JSON_OPTIONAL,
                         &view->response_format_name, reterr);
    r = r < 0 ? r
              : dmk_json_get_str(format, "response_format", "description", DMK_JSON_OPTIONAL,
                                 &view->response_format_description, reterr);
    view->response_schema = json_incref(json_object_get(format, "schema"));
    return r < 0 ? r : 0;
}

static int read_settings(struct dmk_conv_view *view, const json_t *line, struct dmk_error *reterr)
{
    unsigned effort = view->effort, choice = view->tool_choice;
    uint64_t date = 0;
    int r = get_word(line, "line", "effort", effort_words, 3, DMK_JSON_OPTIONAL, &effort, reterr);

    r = r < 0 ? r
              : get_word(line, "line", "tool_choice", choice_words, 4, DMK_JSON_OPTIONAL, &choice,
                         reterr);
    r = r < 0 ? r
              : dmk_json_get_u64(line, "line", "date_unix_s", DMK_JSON_OPTIONAL, 0, INT64_MAX,
                                 &date, reterr);
    if (r < 0) {
        return r;
    }
    view->date_unix_s = r == 1 ? (int64_t)date : -1;
    view->effort = (enum dmk_effort)effort;
    view->tool_choice = (enum dmk_tool_choice)choice;
    return read_response_format(view, line, reterr);
}

static int read_options(const json_t *line, struct dmk_format_options *options,
                        struct dmk_error *reterr)
{
    int r = dmk_json_get_bool(line, "line", "recipient_in_channel", DMK_JSON_OPTIONAL,
                              &options->recipient_in_channel, reterr);

    r = r < 0 ? r
              : dmk_json_get_bool(line, "line", "library_schema_text", DMK_JSON_OPTIONAL,
                                  &options->library_schema_text, reterr);
    r = r < 0 ? r
              : dmk_json_get_bool(line, "line", "library_drop_rule", DMK_JSON_OPTIONAL,
                                  &options->library_drop_rule, reterr);
    return r < 0 ? r : 0;
}

int dmk_chat_render_conversation(const json_t *line, const struct dmk_format *format,
                                 const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                                 struct dmk_ids *ids, struct dmk_error *reterr)
{
    struct dmk_format_options options = {0};
    struct dmk_conv *conv = dmk_conv_new(MAX_CONVERSATION_BYTES);
    json_t *messages = NULL;

    if (!conv) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory");
    }
    int r = dmk_json_get_array(line, "line", "messages", DMK_JSON_REQUIRED, &messages, reterr);

    for (size_t i = 0; r >= 0 && i < json_array_size(messages); i++) {
        r = read_message(conv, json_array_get(messages, i), reterr);
    }
    r = r < 0 ? r : read_conv_tools(conv, line, reterr);
    r = r < 0 ? r : read_settings(dmk_conv_edit(conv), line, reterr);
    r = r < 0 ? r : read_options(line, &options, reterr);
    r = r < 0 ? r : format->render(vocab, scratch, dmk_conv_view(conv), &options, ids, reterr);
    dmk_conv_free(&conv);
    return r;
}
