/* The release in push pairs with the acquire in take: what was written before push is seen after take. */
#include "common/base/mailbox.h"

bool dmk_mailbox_push(struct dmk_mailbox *box, struct dmk_mail *mail)
{
    struct dmk_mail *head = atomic_load_explicit(&box->head, memory_order_relaxed);

    do {
        mail->next = head;
    } while (!atomic_compare_exchange_weak_explicit(&box->head, &head, mail, memory_order_release,
                                                    memory_order_relaxed));
    return head == NULL;
}

struct dmk_mail *dmk_mailbox_take(struct dmk_mailbox *box)
{
    struct dmk_mail *mail = atomic_exchange_explicit(&box->head, NULL, memory_order_acquire);
    struct dmk_mail *oldest = NULL;

    while (mail) {
        struct dmk_mail *next = mail->next;

        mail->next = oldest;
        oldest = mail;
        mail = next;
    }
    return oldest;
}
