/* Hashing and ids; the only home of <xxhash.h>. */
#include "common/base/hash.h"
#include "common/base/assert.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#define XXH_STATIC_LINKING_ONLY /* the streaming state on the stack */
#include <xxhash.h>

struct dmk_id128 dmk_hash128(struct dmk_id128 parent, const void *data, size_t len)
{
    XXH3_state_t state;
    XXH128_hash_t h;

    (void)XXH3_128bits_reset(&state); /* fails for NULL only, as do the next two */
    (void)XXH3_128bits_update(&state, &parent, sizeof(parent));
    (void)XXH3_128bits_update(&state, data, len);
    h = XXH3_128bits_digest(&state);
    return (struct dmk_id128){h.low64, h.high64};
}

struct dmk_id128 dmk_checksum128(const void *data, size_t len)
{
    const XXH128_hash_t h = XXH3_128bits(data, len);

    return (struct dmk_id128){h.low64, h.high64};
}

/* The library's state, which it aligns itself. */
struct dmk_hasher {
    XXH3_state_t *state;
};

struct dmk_hasher *dmk_hasher_new(void)
{
    struct dmk_hasher *hasher = malloc(sizeof(*hasher));

    if (hasher && !(hasher->state = XXH3_createState())) {
        free(hasher);
        return NULL;
    }
    if (hasher) {
        (void)XXH3_128bits_reset(hasher->state);
    }
    return hasher;
}

void dmk_hasher_free(struct dmk_hasher *hasher)
{
    if (hasher) {
        (void)XXH3_freeState(hasher->state);
        free(hasher);
    }
}

void dmk_hasher_add(struct dmk_hasher *hasher, const void *data, size_t len)
{
    (void)XXH3_128bits_update(hasher->state, data, len);
}

struct dmk_id128 dmk_hasher_end(struct dmk_hasher *hasher)
{
    const XXH128_hash_t h = XXH3_128bits_digest(hasher->state);

    (void)XXH3_128bits_reset(hasher->state);
    return (struct dmk_id128){h.low64, h.high64};
}

uint64_t dmk_hash64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

struct dmk_id128 dmk_id128_random(void)
{
    struct dmk_id128 id;

    dmk_assert(getrandom(&id, sizeof(id), 0) == (ssize_t)sizeof(id));
    return id;
}

uint64_t dmk_random_u64(void)
{
    return dmk_id128_random().lo;
}

void dmk_id128_format(struct dmk_id128 id, char ret_text[33])
{
    (void)snprintf(ret_text, 33, "%016llx%016llx", (unsigned long long)id.hi,
                   (unsigned long long)id.lo);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return -1;
}

bool dmk_id128_parse(const char *text, size_t len, struct dmk_id128 *ret_id)
{
    uint64_t word[2] = {0, 0};

    if (len != 32) {
        return false;
    }
    for (int i = 0; i < 32; i++) {
        const int d = hex_digit(text[i]);

        if (d < 0) {
            return false;
        }
        word[i / 16] = word[i / 16] << 4 | (uint64_t)d;
    }
    *ret_id = (struct dmk_id128){.hi = word[0], .lo = word[1]};
    return true;
}
