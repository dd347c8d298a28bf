/* The bytes of a vocabulary's tokens, as a tree that masks are computed on.
 *
 * A worker knows no text. The router that compiles constraints sends it the bytes of all tokens once, in the
 * form below; the hash of that form names the vocabulary in every constraint. Ids without bytes are trigger
 * ids: they can be named by an automaton, and are never made of bytes.
 *
 *   "DMKV"  u16 version  u16 0  u32 ids (the vocabulary's size)  u32 tokens
 *   tokens x { u8 shared  u8 more  u8 bytes[more]  u32 id }   in ascending order of their bytes; shared: bytes
 *                                                             at the front that are those of the token before
 *
 * Immutable once read; any thread. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/base/hash.h"
#include "common/base/span.h"

#define DMK_TRIE_VERSION   1
#define DMK_TRIE_MAX_IDS   (1u << 20)
#define DMK_TRIE_MAX_BYTES (8u << 20) /* of the form above */
#define DMK_TRIE_MAX_TOKEN 128u       /* bytes */

struct dmk_trie;

/* Writes the form. bytes_of gives a token's bytes, which stay while this runs; empty for trigger ids.
 * -DMK_EINVAL when two tokens have the same bytes or one has too many, -DMK_ENOMEM. */
int dmk_trie_write(uint32_t n_ids, struct dmk_bytes (*bytes_of)(void *ud, uint32_t id), void *ud,
                   struct dmk_buf *out);

/* Checks and reads it. Every single byte must be a token, so that whatever a constraint allows can be
 * written. */
int dmk_trie_read(struct dmk_bytes blob, struct dmk_trie **ret, struct dmk_error *reterr);
void dmk_trie_free(struct dmk_trie **trie);

struct dmk_id128 dmk_trie_hash(const struct dmk_trie *trie);
uint32_t dmk_trie_n_ids(const struct dmk_trie *trie);
/* Empty for trigger ids and ids outside. */
struct dmk_bytes dmk_trie_token(const struct dmk_trie *trie, uint32_t id);
