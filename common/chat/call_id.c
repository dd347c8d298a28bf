/* Packs a header's form and a nonce into the 120 bits of 24 base-32 characters, with a check. The form is
 * masked with bits of the nonce only so that ids do not look alike. Pure functions. */
#include "common/chat/call_id.h"

#include "common/base/rng.h"

#define PREFIX       "call_"
#define PREFIX_LEN   5
#define N_CHARS      24
#define CHECK_SEED   0x64616d61736b3031ull
#define CHECK_MASK   0xffffffffffull /* 40 bits */
#define NONCE_STREAM 0x63616c6cull

static const char alphabet[33] = "abcdefghijklmnopqrstuvwxyz234567";

struct dmk_str dmk_call_type_word(enum dmk_call_type type)
{
    static const char *const words[] = {"", "json", "code", "text"};

    return dmk_str_from(words[type]);
}

static uint16_t pack_form(const struct dmk_call_form *form)
{
    return (uint16_t)((unsigned)form->channel | (unsigned)form->type << 2 |
                      (unsigned)form->recipient_in_channel << 4 | (unsigned)form->bare_name << 5 |
                      (unsigned)form->constrain << 6 | (unsigned)form->space_before << 7 |
                      (unsigned)form->space_after << 8);
}

static bool unpack_form(uint16_t bits, struct dmk_call_form *ret_form)
{
    const struct dmk_call_form form = {
        .channel = (enum dmk_call_channel)(bits & 3),
        .type = (enum dmk_call_type)(bits >> 2 & 3),
        .recipient_in_channel = bits >> 4 & 1,
        .bare_name = bits >> 5 & 1,
        .constrain = bits >> 6 & 1,
        .space_before = bits >> 7 & 1,
        .space_after = bits >> 8 & 1,
    };

    if (bits >> 9 || form.channel > DMK_CALL_NO_CHANNEL) {
        return false;
    }
    *ret_form = form;
    return true;
}

static uint16_t mask_of(uint64_t nonce)
{
    return (uint16_t)(dmk_rng_mix(nonce) & 0xffff);
}

static uint64_t check_of(uint64_t nonce, uint16_t form)
{
    return dmk_rng_u64(CHECK_SEED, nonce, form) & CHECK_MASK;
}

void dmk_call_id_make(uint64_t seed, uint32_t index, const struct dmk_call_form *form,
                      char ret_id[DMK_CALL_ID_BYTES])
{
    const uint64_t nonce = dmk_rng_u64(seed, NONCE_STREAM, index);
    const uint16_t bits = pack_form(form);
    const uint64_t low = (uint64_t)(uint16_t)(bits ^ mask_of(nonce)) << 40 | check_of(nonce, bits);

    /* 120 bits, high first: nonce, masked form, check. low holds the last 56. */
    memcpy(ret_id, PREFIX, PREFIX_LEN);
    for (unsigned i = 0; i < N_CHARS; i++) {
        unsigned digit = 0;

        for (unsigned b = 0; b < 5; b++) {
            const unsigned at = i * 5 + b;
            const unsigned bit =
                at < 64 ? (unsigned)(nonce >> (63 - at) & 1) : (unsigned)(low >> (119 - at) & 1);

            digit = digit << 1 | bit;
        }
        ret_id[PREFIX_LEN + i] = alphabet[digit];
    }
    ret_id[DMK_CALL_ID_LEN] = '\0';
}

bool dmk_call_id_read(struct dmk_str id, struct dmk_call_form *ret_form)
{
    uint64_t nonce = 0, low = 0;

    if (id.len != DMK_CALL_ID_LEN || memcmp(id.data, PREFIX, PREFIX_LEN) != 0) {
        return false;
    }
    for (unsigned i = 0; i < N_CHARS; i++) {
        const char c = id.data[PREFIX_LEN + i];
        unsigned digit;

        if (c >= 'a' && c <= 'z') {
            digit = (unsigned)(c - 'a');
        } else if (c >= '2' && c <= '7') {
            digit = (unsigned)(c - '2') + 26;
        } else {
            return false;
        }
        for (unsigned b = 0; b < 5; b++) {
            const uint64_t bit = digit >> (4 - b) & 1;

            if (i * 5 + b < 64) {
                nonce = nonce << 1 | bit;
            } else {
                low = low << 1 | bit;
            }
        }
    }
    const uint16_t bits = (uint16_t)((uint16_t)(low >> 40) ^ mask_of(nonce));

    return (low & CHECK_MASK) == check_of(nonce, bits) && unpack_form(bits, ret_form);
}
