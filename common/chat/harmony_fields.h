/* The two texts that a client gets of a model's output: reasoning and content.
 *
 * Messages of one kind are joined with one newline; empty ones add nothing. Text of which it is not known
 * yet what it is (a message on no channel or an unknown one) is held back: it is reasoning as soon as
 * content or a call follows, content when the output stops with neither. Reasoning that comes behind held
 * text is held too, so that the order stands. At the bound of what may be held it becomes reasoning.
 * Private to the format. */
#pragma once

#include "common/base/buf.h"
#include "common/chat/event.h"

enum dmk_harmony_field { DMK_FIELD_HELD, DMK_FIELD_REASONING, DMK_FIELD_CONTENT };

struct dmk_harmony_fields {
    dmk_event_fn on_event;
    void *ud;
    uint32_t token_index; /* for the events; set by the owner */
    bool held;            /* something is held back */
    bool sent_reasoning, sent_content;
    uint32_t n_reasoning_tokens;
    uint32_t n_held_reasoning, n_held_unknown; /* tokens that are reasoning, or may be */
    struct dmk_buf
        held_all; /* what reasoning is if the held text is reasoning; each of the three */
    struct dmk_buf
        held_reasoning; /* what it is if not                             begins with a newline */
    struct dmk_buf held_unknown; /* and what content is then */
};

void dmk_harmony_fields_init(struct dmk_harmony_fields *fields, dmk_event_fn on_event, void *ud);
void dmk_harmony_fields_fini(struct dmk_harmony_fields *fields);

/* text is not empty and stands behind a newline (text.data[-1]), which is sent when it must be. begins: the
 * first text of its message. */
void dmk_harmony_fields_add(struct dmk_harmony_fields *fields, enum dmk_harmony_field field,
                            bool begins, struct dmk_str text);

/* A message of n_tokens ended. */
void dmk_harmony_fields_count(struct dmk_harmony_fields *fields, enum dmk_harmony_field field,
                              uint32_t n_tokens);

/* Decides what the held text was, and sends it. */
void dmk_harmony_fields_decide(struct dmk_harmony_fields *fields, bool is_content);
