/* Fuzz target of the messages between a prefill and a decode worker: any bytes on the transfer's endpoint.
 *
 * Input: one byte, then a message. With the byte's lowest bit the envelope (magic, version, checksum) is made
 * right first. Checked: it is refused, or it encodes to the same bytes and every field is one that has a
 * meaning. */
#include "common/base/assert.h"
#include "common/base/hash.h"
#include "common/xfer/message.h"
#include "tests/fuzz/fuzz.h"

#define CHECKSUM_SEED 0x6d657373616765ull

static void repair(uint8_t *data, size_t len)
{
    static const uint8_t head[6] = {'D', 'M', 'K', 'M', 1, 0};
    uint64_t sum;

    if (len < 16) {
        return;
    }
    memcpy(data, head, sizeof(head));
    sum = dmk_hash64(data, len - 8, CHECKSUM_SEED);
    for (size_t i = 0; i < 8; i++) {
        data[len - 8 + i] = (uint8_t)(sum >> (8 * i));
    }
}

static void check_fields(const struct dmk_message *m)
{
    switch (m->type) {
    case DMK_MESSAGE_CLAIM:
        dmk_assert(m->watch_len <= DMK_XFER_WATCH_MAX);
        return;
    case DMK_MESSAGE_REPLY:
        dmk_assert(m->reply <= DMK_REPLY_DRAINING && dmk_message_reply_text(m->reply)[0]);
        return;
    case DMK_MESSAGE_TERMINAL:
        return;
    case DMK_MESSAGE_ANSWER:
        dmk_assert(m->answer >= DMK_ANSWER_ACCEPTED && m->answer <= DMK_ANSWER_FAILED);
        return;
    }
    dmk_unreachable("a message of no known type was accepted");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t in[DMK_MESSAGE_MAX_BYTES + 1], out[DMK_MESSAGE_MAX_BYTES];
    struct dmk_message message;

    if (size < 1 || size > sizeof(in)) {
        return 0;
    }
    memcpy(in, data + 1, size - 1);
    if (data[0] & 1) {
        repair(in, size - 1);
    }
    if (dmk_message_decode((struct dmk_bytes){in, size - 1}, &message) < 0) {
        return 0;
    }
    check_fields(&message);
    dmk_assert(dmk_message_encode(&message, out) == size - 1);
    dmk_assert(memcmp(in, out, size - 1) == 0);
    return 0;
}
