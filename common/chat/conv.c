/* The conversation: an arena, three growing arrays in it, and references to JSON values. The arrays double
 * inside the arena, so at most half of it is left behind. Which call a tool message answers is found here
 * too, with a hash table over the calls' ids, since clients may send many of both. One thread at a time. */
#include "common/chat/conv.h"

#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/hash.h"
#include "common/chat/arena.h"
#include "common/json/json.h"

struct dmk_conv {
    struct dmk_conv_view view;
    struct dmk_arena arena;
    struct dmk_message *messages;
    struct dmk_tool *tools;
    size_t cap_messages, cap_tools;
    size_t cap_calls; /* of the newest message */
};

struct dmk_conv *dmk_conv_new(size_t max_bytes)
{
    struct dmk_conv *conv = calloc(1, sizeof(*conv));

    if (conv) {
        dmk_arena_init(&conv->arena, max_bytes);
        conv->view.effort = DMK_EFFORT_MEDIUM;
        conv->view.date_unix_s = -1;
    }
    return conv;
}

void dmk_conv_free(struct dmk_conv **conv)
{
    if (!*conv) {
        return;
    }
    for (size_t i = 0; i < (*conv)->view.n_tools; i++) {
        json_decref((*conv)->tools[i].parameters);
    }
    json_decref((*conv)->view.response_schema);
    dmk_arena_fini(&(*conv)->arena);
    free(*conv);
    *conv = NULL;
}

struct dmk_conv_view *dmk_conv_edit(struct dmk_conv *conv)
{
    return &conv->view;
}

const struct dmk_conv_view *dmk_conv_view(const struct dmk_conv *conv)
{
    return &conv->view;
}

bool dmk_conv_failed(const struct dmk_conv *conv)
{
    return conv->arena.failed;
}

struct dmk_str dmk_conv_copy(struct dmk_conv *conv, struct dmk_str text)
{
    return dmk_arena_concat(&conv->arena, text, (struct dmk_str){"", 0});
}

struct dmk_message *dmk_conv_add_message(struct dmk_conv *conv, enum dmk_role role)
{
    struct dmk_message *array = dmk_arena_grow(&conv->arena, conv->messages, conv->view.n_messages,
                                               &conv->cap_messages, sizeof(*array));

    if (!array) {
        return NULL;
    }
    struct dmk_message *message = &array[conv->view.n_messages++];

    conv->messages = array;
    conv->view.messages = array;
    conv->cap_calls = 0;
    message->role = role;
    return message;
}

struct dmk_tool_call *dmk_conv_add_call(struct dmk_conv *conv, struct dmk_message *message)
{
    dmk_assert(conv->view.n_messages > 0 && message == &conv->messages[conv->view.n_messages - 1]);
    struct dmk_tool_call *array = dmk_arena_grow(&conv->arena, message->calls, message->n_calls,
                                                 &conv->cap_calls, sizeof(*array));

    if (!array) {
        return NULL;
    }
    message->calls = array;
    return &array[message->n_calls++];
}

struct dmk_tool *dmk_conv_add_tool(struct dmk_conv *conv)
{
    struct dmk_tool *array = dmk_arena_grow(&conv->arena, conv->tools, conv->view.n_tools,
                                            &conv->cap_tools, sizeof(*array));

    if (!array) {
        return NULL;
    }
    conv->tools = array;
    conv->view.tools = array;
    return &array[conv->view.n_tools++];
}

int dmk_conv_allow_tools(struct dmk_conv *conv, const struct dmk_str *names, size_t n,
                         size_t *ret_name)
{
    for (size_t t = 0; t < conv->view.n_tools; t++) {
        conv->tools[t].withheld = true;
    }
    for (size_t i = 0; i < n; i++) {
        bool found = false;

        for (size_t t = 0; t < conv->view.n_tools; t++) {
            if (dmk_str_equal(conv->tools[t].name, names[i])) {
                conv->tools[t].withheld = false;
                found = true;
            }
        }
        if (!found) {
            *ret_name = i;
            return -DMK_ENOENT;
        }
    }
    return 0;
}

/* ---- which call a tool message answers ---- */

/* Open addressing; a slot holds the newest call with that id. mask + 1 slots, at most half of them used. */
struct call_table {
    const struct dmk_tool_call **slots;
    size_t mask;
};

static const struct dmk_tool_call **find_slot(const struct call_table *table, struct dmk_str id)
{
    size_t at = (size_t)dmk_hash64(id.data, id.len, 0) & table->mask;

    while (table->slots[at] && !dmk_str_equal(table->slots[at]->id, id)) {
        at = (at + 1) & table->mask;
    }
    return &table->slots[at];
}

static int open_table(const struct dmk_conv_view *view, struct call_table *ret_table)
{
    size_t n_calls = 0, n_slots = 16;

    for (size_t i = 0; i < view->n_messages; i++) {
        n_calls += view->messages[i].n_calls;
    }
    while (n_slots < 2 * n_calls) {
        n_slots *= 2;
    }
    const struct dmk_tool_call **slots = calloc(n_slots, sizeof(const struct dmk_tool_call *));

    if (!slots) {
        return -DMK_ENOMEM;
    }
    *ret_table = (struct call_table){slots, n_slots - 1};
    return 0;
}

int dmk_conv_answered_names(const struct dmk_conv_view *view, struct dmk_str *names,
                            size_t *ret_message)
{
    struct call_table table;
    int r = open_table(view, &table);

    if (r < 0) {
        return r;
    }
    for (size_t i = 0; i < view->n_messages && r == 0; i++) {
        const struct dmk_message *message = &view->messages[i];

        for (size_t j = 0; j < message->n_calls; j++) {
            *find_slot(&table, message->calls[j].id) = &message->calls[j];
        }
        if (message->role != DMK_ROLE_TOOL) {
            continue;
        }
        const struct dmk_tool_call *call =
            message->call_id.len ? *find_slot(&table, message->call_id) : NULL;
        const struct dmk_str name = call ? call->name : message->name;

        if (name.len == 0) {
            *ret_message = i;
            r = -DMK_ENOENT;
        } else if (names) {
            names[i] = name;
        }
    }
    free(table.slots);
    return r;
}
