/* Intrusive doubly linked list; the head is a node of its own. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct dmk_list {
    struct dmk_list *next, *prev;
};

static inline void dmk_list_init(struct dmk_list *head)
{
    head->next = head->prev = head;
}

static inline bool dmk_list_empty(const struct dmk_list *head)
{
    return head->next == head;
}

static inline void dmk_list_push_back(struct dmk_list *head, struct dmk_list *node)
{
    node->prev = head->prev;
    node->next = head;
    head->prev->next = node;
    head->prev = node;
}

/* Safe to call twice: a removed node points at itself. */
static inline void dmk_list_remove(struct dmk_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    node->next = node->prev = node;
}

/* Takes the first node off; the list is not empty. */
static inline struct dmk_list *dmk_list_pop(struct dmk_list *head)
{
    struct dmk_list *node = head->next;

    head->next = node->next;
    node->next->prev = head;
    node->next = node->prev = node;
    return node;
}

/* Moves all nodes of one list to the end of another. */
static inline void dmk_list_take_all(struct dmk_list *to, struct dmk_list *from)
{
    if (!dmk_list_empty(from)) {
        from->next->prev = to->prev;
        from->prev->next = to;
        to->prev->next = from->next;
        to->prev = from->prev;
        dmk_list_init(from);
    }
}

#define dmk_container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))
