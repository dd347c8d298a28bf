/* Reads the header of a message that a model wrote: everything between its start and its message mark.
 *
 *   HEADER := [" to=" R] [<|channel|> CH [" to=" R]] [[" "] <|constrain|> TYPE | " " TYPE]
 *
 * Models break this grammar in many ways (marks twice, words that mean nothing, names glued to marks); the
 * reader takes what it can use and says what is left. A header is closed when its message mark came. An
 * open one ended without: then the first word that can not be header begins the body. Private to the
 * format. */
#pragma once

#include "common/base/buf.h"
#include "common/chat/call_id.h"
#include "common/text/tokenizer.h"

enum dmk_harmony_channel {
    DMK_CHANNEL_NONE,
    DMK_CHANNEL_UNKNOWN,
    DMK_CHANNEL_ANALYSIS,
    DMK_CHANNEL_COMMENTARY,
    DMK_CHANNEL_FINAL,
};

struct dmk_harmony_header {
    enum dmk_harmony_channel channel;
    struct dmk_str recipient; /* without "to="; empty when there is none; raw bytes, in text */
    struct dmk_call_form form;
    bool foreign;         /* the author is not the assistant */
    bool no_author;       /* nothing says who the author is */
    bool noise;           /* something in it means nothing */
    bool partial;         /* open: what is left may be the beginning of a longer header */
    struct dmk_buf prose; /* what is left before a known channel */
    struct dmk_buf rest;  /* what is left behind it; closed: words with one space between */
    struct dmk_buf text;  /* the header's bytes without marks */
};

void dmk_harmony_header_init(struct dmk_harmony_header *header);
void dmk_harmony_header_fini(struct dmk_harmony_header *header);

/* assistant: the author is known already, so the first word need not be a role. ids hold ordinary tokens
 * and the channel and constrain marks, nothing else. */
void dmk_harmony_header_read(struct dmk_harmony_header *header, const struct dmk_vocab *vocab,
                             const uint32_t *ids, size_t n, bool assistant, bool closed);
