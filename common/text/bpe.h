/* Byte-pair merging of one piece, and the scratch of a thread. Internal to common/text.
 *
 * Rule: among adjacent pairs whose concatenation is a token, merge the one of the lowest rank, the
 * leftmost among equals; until there is none. Two algorithms with identical output follow it: an array
 * scan for short pieces and a heap for long ones. */
#pragma once

#include "common/text/vocab.h"

#define DMK_BPE_LINEAR_MAX 128 /* bytes; longer pieces take the heap */

/* What merging starts from. The result is the same; characters are fewer, but the piece must be valid
 * UTF-8. */
enum dmk_bpe_start { DMK_BPE_BYTES, DMK_BPE_CHARS };

void dmk_bpe_linear(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                    struct dmk_bytes piece, enum dmk_bpe_start start, struct dmk_ids *ids);
void dmk_bpe_heap(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                  struct dmk_bytes piece, enum dmk_bpe_start start, struct dmk_ids *ids);

/* Chooses between them; pieces that are a token, or were met lately, take a short cut. piece is valid
 * UTF-8. */
void dmk_bpe_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                    struct dmk_bytes piece, struct dmk_ids *ids);

/* Readies the scratch for this vocabulary: what is cached of another one is dropped. Comes first. */
void dmk_bpe_scratch_begin(struct dmk_bpe_scratch *scratch, const struct dmk_vocab *vocab);

/* Where encode.c repairs invalid text. */
struct dmk_buf *dmk_bpe_scratch_text(struct dmk_bpe_scratch *scratch);
/* Gives back what a giant piece or text made grow. */
void dmk_bpe_scratch_trim(struct dmk_bpe_scratch *scratch);
