/* Hashing (XXH3 of the xxhash library; not cryptographic) and 128-bit ids. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dmk_id128 {
    uint64_t lo, hi;
};

static inline bool dmk_id128_equal(struct dmk_id128 a, struct dmk_id128 b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

static inline bool dmk_id128_is_zero(struct dmk_id128 a)
{
    return a.lo == 0 && a.hi == 0;
}

/* parent chains blocks: the hash of a block covers all blocks before it. */
struct dmk_id128 dmk_hash128(struct dmk_id128 parent, const void *data, size_t len);

/* XXH3-128 as others compute it (`xxhsum -H2`). */
struct dmk_id128 dmk_checksum128(const void *data, size_t len);

/* The same of bytes that come in pieces; one thread at a time. */
struct dmk_hasher;
struct dmk_hasher *dmk_hasher_new(void); /* NULL: no memory */
void dmk_hasher_free(struct dmk_hasher *hasher);
void dmk_hasher_add(struct dmk_hasher *hasher, const void *data, size_t len);
/* Of all that was added since the last end. */
struct dmk_id128 dmk_hasher_end(struct dmk_hasher *hasher);

uint64_t dmk_hash64(const void *data, size_t len, uint64_t seed);

/* From the kernel's random source; aborts when there is none. */
struct dmk_id128 dmk_id128_random(void);
uint64_t dmk_random_u64(void);

/* 32 hex digits and NUL. */
void dmk_id128_format(struct dmk_id128 id, char ret_text[33]);
bool dmk_id128_parse(const char *text, size_t len, struct dmk_id128 *ret_id);
