/* Harmony's own messages: what stands between a conversation and its token ids.
 *
 * harmony.c turns a conversation into a list of these, harmony_render.c turns the list into ids,
 * harmony_text.c and harmony_tools.c write the bodies of system and developer messages. Views only; the
 * caller owns all text. Text becomes ids by ordinary encoding, piece by piece, and control tokens are
 * inserted as ids: that keeps spellings of special tokens in client text from becoming control tokens.
 * Any thread. */
#pragma once

#include "common/base/buf.h"
#include "common/chat/call_id.h"
#include "common/chat/conv.h"
#include "common/text/tokenizer.h"

/* An absent text has data == NULL, an empty one has not. */
static inline bool dmk_harmony_has(struct dmk_str text)
{
    return text.data != NULL;
}

struct dmk_harmony_namespace {
    struct dmk_str name;
    struct dmk_str description; /* may be absent */
    const struct dmk_tool *tools;
    size_t n_tools;
};

struct dmk_harmony_system {
    struct dmk_str identity, cutoff, date, effort; /* each may be absent */
    const struct dmk_str *channels;
    size_t n_channels;
    bool channel_required;
    bool has_functions; /* the conversation's developer message declares functions */
    const struct dmk_harmony_namespace *namespaces; /* built-in tools, in order of their names */
    size_t n_namespaces;
};

struct dmk_harmony_developer {
    struct dmk_str instructions;                    /* may be absent */
    const struct dmk_harmony_namespace *namespaces; /* in order of their names */
    size_t n_namespaces;
    struct dmk_str format_name, format_description; /* with format_schema */
    const struct json_t *format_schema;             /* NULL: none */
};

/* Append the message's body. library_text: descriptions of several lines as openai-harmony 0.0.8 prints
 * them, where only the first line is a comment. -DMK_EINVAL when a schema is nested too deep. */
int dmk_harmony_system_text(const struct dmk_harmony_system *sys, bool library_text,
                            struct dmk_buf *out, struct dmk_error *reterr);
int dmk_harmony_developer_text(const struct dmk_harmony_developer *dev, bool library_text,
                               struct dmk_buf *out, struct dmk_error *reterr);
int dmk_harmony_tools_text(const struct dmk_harmony_namespace *namespaces, size_t n_namespaces,
                           bool library_text, struct dmk_buf *out, struct dmk_error *reterr);

struct dmk_harmony_message {
    enum dmk_role role;
    struct dmk_str name; /* tool: the whole author; others: may be absent, stands behind a ':' */
    struct dmk_str recipient; /* may be absent; "all" is not written, but makes a call's end */
    struct dmk_str channel;   /* may be absent */
    struct dmk_str
        content_type; /* may be absent; may begin with the spelling of the constrain mark */
    const struct dmk_str *parts; /* the body: each part is encoded on its own */
    size_t n_parts;
    bool recipient_in_channel; /* behind the channel's name instead of before the channel */
    bool type_unspaced;        /* no space before the constrain mark */
    bool ends_open;            /* a call that ends as other messages do: another call followed it */
};

enum dmk_harmony_drop {
    DMK_HARMONY_KEEP,         /* all messages */
    DMK_HARMONY_DROP_LIBRARY, /* openai-harmony: if the last assistant message is final, analysis before
                                 the first final */
    DMK_HARMONY_DROP_OLD,     /* analysis without recipient before the last assistant final */
};

void dmk_harmony_render_message(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                                const struct dmk_harmony_message *message, struct dmk_ids *ids);
void dmk_harmony_render_messages(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                                 const struct dmk_harmony_message *messages, size_t n,
                                 enum dmk_harmony_drop drop, struct dmk_ids *ids);

/* The ids after which the model writes its turn. */
void dmk_harmony_render_turn(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                             struct dmk_ids *ids);
