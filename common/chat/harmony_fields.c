/* Joining and holding back; see the header. Texts carry their separator in front of them, so that sending
 * it is a matter of where the view begins. */
#include "common/chat/harmony_fields.h"

#define MAX_HELD_BYTES ((size_t)4 << 20)

void dmk_harmony_fields_init(struct dmk_harmony_fields *fields, dmk_event_fn on_event, void *ud)
{
    *fields = (struct dmk_harmony_fields){.on_event = on_event, .ud = ud};
    dmk_buf_init(&fields->held_all, 0);
    dmk_buf_init(&fields->held_reasoning, 0);
    dmk_buf_init(&fields->held_unknown, 0);
}

void dmk_harmony_fields_fini(struct dmk_harmony_fields *fields)
{
    dmk_buf_fini(&fields->held_all);
    dmk_buf_fini(&fields->held_reasoning);
    dmk_buf_fini(&fields->held_unknown);
}

static void send(struct dmk_harmony_fields *fields, bool is_content, bool begins,
                 struct dmk_str text)
{
    bool *sent = is_content ? &fields->sent_content : &fields->sent_reasoning;
    const bool joins = begins && *sent;
    const struct dmk_event event = {
        .kind = is_content ? DMK_EVENT_CONTENT : DMK_EVENT_REASONING,
        .text = {text.data - joins, text.len + joins},
        .token_index = fields->token_index,
    };

    *sent = true;
    fields->on_event(fields->ud, &event);
}

static void hold(struct dmk_buf *buf, bool begins, struct dmk_str text)
{
    if (buf->len == 0 || begins) {
        dmk_buf_putc(buf, '\n');
    }
    dmk_buf_append_str(buf, text);
}

static void send_held(struct dmk_harmony_fields *fields, bool is_content, struct dmk_buf *buf)
{
    if (buf->len > 1) {
        send(fields, is_content, true, (struct dmk_str){buf->data + 1, buf->len - 1});
    }
}

void dmk_harmony_fields_decide(struct dmk_harmony_fields *fields, bool is_content)
{
    if (!fields->held) {
        return;
    }
    fields->held = false;
    fields->n_reasoning_tokens += fields->n_held_reasoning;
    if (is_content) {
        send_held(fields, false, &fields->held_reasoning);
        send_held(fields, true, &fields->held_unknown);
    } else {
        fields->n_reasoning_tokens += fields->n_held_unknown;
        send_held(fields, false, &fields->held_all);
    }
    fields->n_held_reasoning = fields->n_held_unknown = 0;
    dmk_buf_reset(&fields->held_all);
    dmk_buf_reset(&fields->held_reasoning);
    dmk_buf_reset(&fields->held_unknown);
}

void dmk_harmony_fields_add(struct dmk_harmony_fields *fields, enum dmk_harmony_field field,
                            bool begins, struct dmk_str text)
{
    if (field == DMK_FIELD_CONTENT) {
        dmk_harmony_fields_decide(fields, false);
        send(fields, true, begins, text);
        return;
    }
    if (field == DMK_FIELD_REASONING && !fields->held) {
        send(fields, false, begins, text);
        return;
    }
    fields->held = true;
    hold(&fields->held_all, begins, text);
    hold(field == DMK_FIELD_HELD ? &fields->held_unknown : &fields->held_reasoning, begins, text);
    if (fields->held_all.len > MAX_HELD_BYTES || fields->held_all.failed) {
        dmk_harmony_fields_decide(fields, false);
    }
}

void dmk_harmony_fields_count(struct dmk_harmony_fields *fields, enum dmk_harmony_field field,
                              uint32_t n_tokens)
{
    if (field == DMK_FIELD_HELD) {
        fields->n_held_unknown += n_tokens;
    } else if (field == DMK_FIELD_REASONING) {
        *(fields->held ? &fields->n_held_reasoning : &fields->n_reasoning_tokens) += n_tokens;
    }
}
