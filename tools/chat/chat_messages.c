/* A line of JSON to Harmony messages, and on to ids: the form in which openai-harmony writes its own
 * conversations, so that the two renderers can be compared on it. Cold code for a tool; one thread. */
#include "tools/chat/chat_json.h"

#include <stdlib.h>

#define MAX_ARENA_BYTES ((size_t)256 << 20)

struct reader {
    struct dmk_arena arena;
    bool library_text;
    bool recipient_in_channel; /* and every content type with its mark */
    bool has_functions;        /* some developer message declares functions */
    struct dmk_error *reterr;
};

static struct dmk_str text_member(const json_t *obj, const char *key)
{
    const json_t *value = json_object_get(obj, key);

    return json_is_string(value)
               ? (struct dmk_str){json_string_value(value), json_string_length(value)}
               : (struct dmk_str){NULL, 0};
}

static int compare_namespaces(const void *a, const void *b)
{
    const struct dmk_harmony_namespace *x = a, *y = b;
    const size_t n = x->name.len < y->name.len ? x->name.len : y->name.len;
    const int c = memcmp(x->name.data, y->name.data, n);

    return c ? c : (x->name.len > y->name.len) - (x->name.len < y->name.len);
}

static int read_namespaces(struct reader *r, json_t *tools,
                           const struct dmk_harmony_namespace **ret, size_t *ret_n)
{
    const size_t n = json_object_size(tools);
    struct dmk_harmony_namespace *list = dmk_arena_alloc(&r->arena, (n + 1) * sizeof(*list));
    size_t i = 0;

    if (!list) {
        return dmk_error_set(r->reterr, -DMK_EFULL, "the conversation is too large");
    }
    for (void *at = json_object_iter(tools); at; at = json_object_iter_next(tools, at), i++) {
        const json_t *value = json_object_iter_value(at);

        list[i].name = text_member(value, "name");
        list[i].description = text_member(value, "description");
        if (!list[i].name.data) {
            return dmk_error_set(r->reterr, -DMK_EINVAL, "a namespace needs a \"name\"");
        }
        const int status =
            dmk_chat_read_tools(json_object_get(value, "tools"), list[i].name.data, &r->arena,
                                &list[i].tools, &list[i].n_tools, r->reterr);

        if (status < 0) {
            return status;
        }
    }
    qsort(list, n, sizeof(*list), compare_namespaces);
    *ret = list;
    *ret_n = n;
    return 0;
}

static int read_channels(struct reader *r, const json_t *config, struct dmk_harmony_system *sys)
{
    const json_t *names = json_object_get(config, "valid_channels");
    const size_t n = json_array_size(names);
    struct dmk_str *channels = dmk_arena_alloc(&r->arena, (n + 1) * sizeof(*channels));

    if (!channels) {
        return dmk_error_set(r->reterr, -DMK_EFULL, "the conversation is too large");
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *name = json_array_get(names, i);

        channels[i] = (struct dmk_str){json_string_value(name), json_string_length(name)};
    }
    sys->channels = channels;
    sys->n_channels = n;
    sys->channel_required = json_is_true(json_object_get(config, "channel_required"));
    return 0;
}

static int write_system(struct reader *r, const json_t *part, struct dmk_buf *out)
{
    const struct dmk_str effort = text_member(part, "reasoning_effort");
    struct dmk_harmony_system sys = {.identity = text_member(part, "model_identity"),
                                     .cutoff = text_member(part, "knowledge_cutoff"),
                                     .date = text_member(part, "conversation_start_date"),
                                     .has_functions = r->has_functions};
    char lower[16];
    int status = read_channels(r, json_object_get(part, "channel_config"), &sys);

    if (effort.data && effort.len < sizeof(lower)) {
        for (size_t i = 0; i < effort.len; i++) {
            lower[i] = (char)(effort.data[i] | 0x20);
        }
        sys.effort = (struct dmk_str){lower, effort.len};
    }
    status = status < 0 ? status
                        : read_namespaces(r, json_object_get(part, "tools"), &sys.namespaces,
                                          &sys.n_namespaces);
    return status < 0 ? status : dmk_harmony_system_text(&sys, r->library_text, out, r->reterr);
}

static int write_developer(struct reader *r, const json_t *part, struct dmk_buf *out)
{
    struct dmk_harmony_developer dev = {.instructions = text_member(part, "instructions")};
    const int status =
        read_namespaces(r, json_object_get(part, "tools"), &dev.namespaces, &dev.n_namespaces);

    return status < 0 ? status : dmk_harmony_developer_text(&dev, r->library_text, out, r->reterr);
}

/* One item of the content; what is written for it lives in the arena. */
static int read_part(struct reader *r, const json_t *part, struct dmk_str *ret)
{
    const struct dmk_str type = text_member(part, "type");
    struct dmk_buf out;
    int status;

    if (dmk_str_is(type, "text")) {
        *ret = text_member(part, "text");
        return 0;
    }
    dmk_buf_init(&out, 0);
    if (dmk_str_is(type, "system_content")) {
        status = write_system(r, part, &out);
    } else if (dmk_str_is(type, "developer_content")) {
        status = write_developer(r, part, &out);
    } else {
        status = dmk_error_set(r->reterr, -DMK_EINVAL, "content of type \"%.*s\" is unknown",
                               (int)type.len, type.data ? type.data : "");
    }
    if (status == 0) {
        *ret = dmk_arena_concat(&r->arena, dmk_buf_str(&out), (struct dmk_str){"", 0});
    }
    dmk_buf_fini(&out);
    return status;
}

static int read_content(struct reader *r, const json_t *content,
                        struct dmk_harmony_message *message)
{
    const size_t n = json_is_array(content) ? json_array_size(content) : 1;
    struct dmk_str *parts = dmk_arena_alloc(&r->arena, (n + 1) * sizeof(*parts));
    int status = parts ? 0 : -DMK_EFULL;

    if (json_is_string(content) && parts) {
        parts[0] = (struct dmk_str){json_string_value(content), json_string_length(content)};
    }
    for (size_t i = 0; status == 0 && json_is_array(content) && i < n; i++) {
        status = read_part(r, json_array_get(content, i), &parts[i]);
    }
    message->parts = parts;
    message->n_parts = n;
    return status;
}

/* Headers as oss-harmony 0.0.11 writes them. */
static void move_recipient(struct reader *r, struct dmk_harmony_message *message)
{
    static const char mark[] = "<|constrain|>";
    const struct dmk_str type = message->content_type;
    const size_t mark_len = sizeof(mark) - 1;

    message->recipient_in_channel =
        dmk_harmony_has(message->channel) && dmk_str_is(message->channel, "commentary");
    if (dmk_harmony_has(type) && (type.len < mark_len || memcmp(type.data, mark, mark_len) != 0)) {
        message->content_type = dmk_arena_concat(&r->arena, dmk_str_from(mark), type);
    }
}

static int read_message(struct reader *r, const json_t *value, struct dmk_harmony_message *message)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    const struct dmk_str role = text_member(value, "role");
    unsigned i = 0;

    while (i < 5 && !dmk_str_is(role, roles[i])) {
        i++;
    }
    *message = (struct dmk_harmony_message){.role = (enum dmk_role)i,
                                            .name = text_member(value, "name"),
                                            .recipient = text_member(value, "recipient"),
                                            .channel = text_member(value, "channel"),
                                            .content_type = text_member(value, "content_type")};
    if (i == 5 || (message->role == DMK_ROLE_TOOL && !message->name.data)) {
        return dmk_error_set(r->reterr, -DMK_EINVAL,
                             "a message has no known role, or is a tool's without a \"name\"");
    }
    if (r->recipient_in_channel) {
        move_recipient(r, message);
    }
    return read_content(r, json_object_get(value, "content"), message);
}

static bool declares_functions(const json_t *messages)
{
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *content = json_object_get(json_array_get(messages, i), "content");

        for (size_t j = 0; j < json_array_size(content); j++) {
            const json_t *part = json_array_get(content, j);
            const json_t *functions = json_object_get(json_object_get(part, "tools"), "functions");

            if (dmk_str_is(text_member(part, "type"), "developer_content") &&
                json_array_size(json_object_get(functions, "tools"))) {
                return true;
            }
        }
    }
    return false;
}

static int get_drop(const json_t *line, enum dmk_harmony_drop *ret, struct dmk_error *reterr)
{
    const struct dmk_str word = text_member(line, "drop");

    if (!word.data || dmk_str_is(word, "keep")) {
        *ret = DMK_HARMONY_KEEP;
    } else if (dmk_str_is(word, "library")) {
        *ret = DMK_HARMONY_DROP_LIBRARY;
    } else if (dmk_str_is(word, "old")) {
        *ret = DMK_HARMONY_DROP_OLD;
    } else {
        return dmk_error_set(reterr, -DMK_EINVAL, "\"drop\" can not be \"%.*s\"", (int)word.len,
                             word.data);
    }
    return 0;
}

int dmk_chat_render_harmony(const json_t *line, const struct dmk_vocab *vocab,
                            struct dmk_bpe_scratch *scratch, struct dmk_ids *ids,
                            struct dmk_error *reterr)
{
    const json_t *array = json_object_get(line, "harmony");
    const size_t n = json_array_size(array);
    struct reader reader = {
        .reterr = reterr,
        .has_functions = declares_functions(array),
        .library_text = json_is_true(json_object_get(line, "library_schema_text")),
        .recipient_in_channel = json_is_true(json_object_get(line, "recipient_in_channel"))};
    enum dmk_harmony_drop drop = DMK_HARMONY_KEEP;
    struct dmk_harmony_message *messages;

    dmk_arena_init(&reader.arena, MAX_ARENA_BYTES);
    messages = dmk_arena_alloc(&reader.arena, (n + 1) * sizeof(*messages));
    int status = messages ? get_drop(line, &drop, reterr)
                          : dmk_error_set(reterr, -DMK_EFULL, "the conversation is too large");

    for (size_t i = 0; status == 0 && i < n; i++) {
        status = read_message(&reader, json_array_get(array, i), &messages[i]);
    }
    if (status == 0) {
        dmk_harmony_render_messages(vocab, scratch, messages, n, drop, ids);
        if (json_is_true(json_object_get(line, "turn"))) {
            dmk_harmony_render_turn(vocab, scratch, ids);
        }
    }
    dmk_arena_fini(&reader.arena);
    return status;
}
