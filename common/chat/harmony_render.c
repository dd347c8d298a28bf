/* Harmony messages to token ids. Which old analysis is left out is decided here, on the list; nothing else
 * looks at more than one message. Any thread that brings its scratch. */
#include "common/chat/harmony.h"

#define CONSTRAIN_SPELLING "<|constrain|>"

static const char *const role_words[] = {[DMK_ROLE_SYSTEM] = "system",
                                         [DMK_ROLE_DEVELOPER] = "developer",
                                         [DMK_ROLE_USER] = "user",
                                         [DMK_ROLE_ASSISTANT] = "assistant",
                                         [DMK_ROLE_TOOL] = "tool"};

/* What one rendering writes with. */
struct pen {
    const struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
    struct dmk_ids *ids;
};

static void write_text(struct pen *pen, struct dmk_str text)
{
    if (text.len) {
        dmk_encode(pen->vocab, pen->scratch, text, pen->ids);
    }
}

/* prefix and text are one piece for the encoder. */
static void write_prefixed(struct pen *pen, const char *prefix, struct dmk_str text)
{
    struct dmk_buf joined;

    dmk_buf_init(&joined, 0);
    dmk_buf_puts(&joined, prefix);
    dmk_buf_append_str(&joined, text);
    write_text(pen, dmk_buf_str(&joined));
    pen->ids->failed |= joined.failed;
    dmk_buf_fini(&joined);
}

static void write_author(struct pen *pen, const struct dmk_harmony_message *message)
{
    if (message->role == DMK_ROLE_TOOL) {
        write_text(pen, message->name);
        return;
    }
    write_text(pen, dmk_str_from(role_words[message->role]));
    if (dmk_harmony_has(message->name)) {
        write_prefixed(pen, ":", message->name);
    }
}

static void write_recipient(struct pen *pen, const struct dmk_harmony_message *message)
{
    if (dmk_harmony_has(message->recipient) && !dmk_str_is(message->recipient, "all")) {
        write_prefixed(pen, " to=", message->recipient);
    }
}

static void write_content_type(struct pen *pen, const struct dmk_harmony_message *message)
{
    const size_t mark_len = sizeof(CONSTRAIN_SPELLING) - 1;
    const struct dmk_str type = message->content_type;

    if (!dmk_harmony_has(type)) {
        return;
    }
    if (type.len < mark_len || memcmp(type.data, CONSTRAIN_SPELLING, mark_len) != 0) {
        write_prefixed(pen, " ", type);
        return;
    }
    if (!message->type_unspaced) {
        write_text(pen, dmk_str_from(" "));
    }
    dmk_ids_push(pen->ids, DMK_TOKEN_CONSTRAIN);
    write_text(pen, (struct dmk_str){type.data + mark_len, type.len - mark_len});
}

void dmk_harmony_render_message(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                                const struct dmk_harmony_message *message, struct dmk_ids *ids)
{
    struct pen pen = {vocab, scratch, ids};
    const bool is_call = message->role == DMK_ROLE_ASSISTANT && dmk_harmony_has(message->recipient);
    const bool late = message->recipient_in_channel && dmk_harmony_has(message->channel);

    dmk_ids_push(ids, DMK_TOKEN_START);
    write_author(&pen, message);
    if (!late) {
        write_recipient(&pen, message);
    }
    if (dmk_harmony_has(message->channel)) {
        dmk_ids_push(ids, DMK_TOKEN_CHANNEL);
        write_text(&pen, message->channel);
    }
    if (late) {
        write_recipient(&pen, message);
    }
    write_content_type(&pen, message);
    dmk_ids_push(ids, DMK_TOKEN_MESSAGE);
    for (size_t i = 0; i < message->n_parts; i++) {
        write_text(&pen, message->parts[i]);
    }
    dmk_ids_push(ids, is_call && !message->ends_open ? DMK_TOKEN_CALL : DMK_TOKEN_END);
}

static bool on_channel(const struct dmk_harmony_message *message, const char *channel)
{
    return dmk_harmony_has(message->channel) && dmk_str_is(message->channel, channel);
}

/* Analysis before the returned index is left out. */
static size_t find_drop_end(const struct dmk_harmony_message *messages, size_t n,
                            enum dmk_harmony_drop drop)
{
    size_t first_final = n, last_final = n, last_assistant = n;

    for (size_t i = 0; i < n; i++) {
        const bool is_assistant = messages[i].role == DMK_ROLE_ASSISTANT;

        if (on_channel(&messages[i], "final")) {
            first_final = first_final < n ? first_final : i;
            last_final = is_assistant ? i : last_final;
        }
        last_assistant = is_assistant ? i : last_assistant;
    }
    if (drop == DMK_HARMONY_DROP_OLD && last_final < n) {
        return last_final;
    }
    if (drop == DMK_HARMONY_DROP_LIBRARY && last_assistant < n &&
        on_channel(&messages[last_assistant], "final")) {
        return first_final;
    }
    return 0;
}

void dmk_harmony_render_messages(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                                 const struct dmk_harmony_message *messages, size_t n,
                                 enum dmk_harmony_drop drop, struct dmk_ids *ids)
{
    const size_t drop_end = find_drop_end(messages, n, drop);

    for (size_t i = 0; i < n; i++) {
        const bool is_plain = !dmk_harmony_has(messages[i].recipient);

        if (i < drop_end && on_channel(&messages[i], "analysis") &&
            (is_plain || drop == DMK_HARMONY_DROP_LIBRARY)) {
            continue;
        }
        dmk_harmony_render_message(vocab, scratch, &messages[i], ids);
    }
}

void dmk_harmony_render_turn(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                             struct dmk_ids *ids)
{
    dmk_ids_push(ids, DMK_TOKEN_START);
    dmk_encode(vocab, scratch, dmk_str_from(role_words[DMK_ROLE_ASSISTANT]), ids);
}
