/* Tool-call ids that remember how the model wrote the call's header.
 *
 * The model may put the recipient before or after the channel, with or without a constrain mark. History is
 * rendered again for every turn; to get the very tokens back that the model sampled (so that the cached
 * prefix holds) the id that a client gets, and sends back, carries the header's form. No state is kept
 * anywhere. An id is "call_" and 24 characters of a-z2-7: 64 bits that are a function of (seed, index), 16
 * bits of form, 40 check bits. Ids of other makers fail the check. Pure functions. */
#pragma once

#include "common/base/span.h"

#define DMK_CALL_ID_LEN   29
#define DMK_CALL_ID_BYTES (DMK_CALL_ID_LEN + 1)

enum dmk_call_channel { DMK_CALL_COMMENTARY, DMK_CALL_ANALYSIS, DMK_CALL_NO_CHANNEL };
enum dmk_call_type { DMK_CALL_NO_TYPE, DMK_CALL_JSON, DMK_CALL_CODE, DMK_CALL_TEXT };

/* HEADER := [" to=" R] [<|channel|> CH [" to=" R]] [[" "] <|constrain|> [" "] TYPE | " " TYPE] */
struct dmk_call_form {
    enum dmk_call_channel channel;
    enum dmk_call_type type;
    bool recipient_in_channel; /* after the channel's name, not before the channel */
    bool bare_name;            /* recipient without "functions." */
    bool constrain;            /* type stands after a constrain mark */
    bool space_before;         /* between what is before and the constrain mark */
    bool space_after;          /* between the constrain mark and the type */
};

/* The word of a type; "" for DMK_CALL_NO_TYPE. */
struct dmk_str dmk_call_type_word(enum dmk_call_type type);

void dmk_call_id_make(uint64_t seed, uint32_t index, const struct dmk_call_form *form,
                      char ret_id[DMK_CALL_ID_BYTES]);

/* False for an id that dmk_call_id_make did not make. */
bool dmk_call_id_read(struct dmk_str id, struct dmk_call_form *ret_form);
