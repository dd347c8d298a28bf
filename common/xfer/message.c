/* Messages between P and D; see message.h. Pure functions, no allocation.
 *
 * Form: magic u32, version u16, type u16, the common fields, the type's fields, XXH3-64 of all
 * before. */
#include "common/xfer/message.h"
#include "common/base/assert.h"
#include "common/xfer/wire.h"

#define MAGIC         0x4d4b4d44u /* "DMKM" */
#define VERSION       1
#define CHECKSUM_SEED 0x6d657373616765ull

/* Messages are short and go out in callbacks: into the caller's bytes, without a growing buffer. */
struct out {
    uint8_t *at;
};

static void put_uint(struct out *out, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        *out->at++ = (uint8_t)(value >> (8 * i));
    }
}

size_t dmk_message_encode(const struct dmk_message *m, uint8_t *ret_bytes)
{
    struct out out = {ret_bytes};

    put_uint(&out, MAGIC, 4);
    put_uint(&out, VERSION, 2);
    put_uint(&out, m->type, 2);
    put_uint(&out, m->from_incarnation, 8);
    put_uint(&out, m->to_incarnation, 8);
    put_uint(&out, m->worker, 8);
    put_uint(&out, m->cookie.lo, 8);
    put_uint(&out, m->cookie.hi, 8);
    put_uint(&out, m->generation, 8);
    switch (m->type) {
    case DMK_MESSAGE_CLAIM:
        dmk_assert(m->watch_len <= DMK_XFER_WATCH_MAX);
        put_uint(&out, m->watch_len, 2);
        memcpy(out.at, m->watch, m->watch_len);
        out.at += m->watch_len;
        break;
    case DMK_MESSAGE_REPLY:
        put_uint(&out, m->reply, 2);
        break;
    case DMK_MESSAGE_TERMINAL:
        put_uint(&out, m->ok, 2);
        put_uint(&out, m->bytes, 8);
        break;
    case DMK_MESSAGE_ANSWER:
        put_uint(&out, m->answer, 2);
        break;
    }
    put_uint(&out, dmk_hash64(ret_bytes, (size_t)(out.at - ret_bytes), CHECKSUM_SEED), 8);
    return (size_t)(out.at - ret_bytes);
}

static void read_fields(struct dmk_wire_in *in, struct dmk_message *m)
{
    uint64_t ok;

    m->from_incarnation = dmk_wire_get_u64(in);
    m->to_incarnation = dmk_wire_get_u64(in);
    m->worker = dmk_wire_get_u64(in);
    m->cookie = dmk_wire_get_id128(in);
    m->generation = dmk_wire_get_u64(in);
    switch (m->type) {
    case DMK_MESSAGE_CLAIM:
        m->watch_len = dmk_wire_get_blob(in, m->watch, sizeof(m->watch));
        break;
    case DMK_MESSAGE_REPLY:
        m->reply = (enum dmk_message_reply)dmk_wire_get_u16(in);
        in->failed |= m->reply > DMK_REPLY_DRAINING;
        break;
    case DMK_MESSAGE_TERMINAL:
        ok = dmk_wire_get_u16(in);
        in->failed |= ok > 1;
        m->ok = ok == 1;
        m->bytes = dmk_wire_get_u64(in);
        break;
    case DMK_MESSAGE_ANSWER:
        m->answer = (enum dmk_message_answer)dmk_wire_get_u16(in);
        in->failed |= m->answer < DMK_ANSWER_ACCEPTED || m->answer > DMK_ANSWER_FAILED;
        break;
    default:
        in->failed = true;
        break;
    }
}

int dmk_message_decode(struct dmk_bytes bytes, struct dmk_message *ret_message)
{
    struct dmk_wire_in in = {.rest = bytes}, tail;
    struct dmk_message m = {0};
    uint32_t magic;
    uint16_t version;

    if (bytes.len < 16 || bytes.len > DMK_MESSAGE_MAX_BYTES) {
        return -DMK_EFORMAT;
    }
    tail = (struct dmk_wire_in){.rest = {bytes.data + bytes.len - 8, 8}};
    in.rest.len -= 8;
    magic = dmk_wire_get_u32(&in);
    version = dmk_wire_get_u16(&in);
    m.type = (enum dmk_message_type)dmk_wire_get_u16(&in);
    if (magic != MAGIC || version != VERSION ||
        dmk_wire_get_u64(&tail) != dmk_hash64(bytes.data, bytes.len - 8, CHECKSUM_SEED)) {
        return -DMK_EFORMAT;
    }
    read_fields(&in, &m);
    if (in.failed || in.rest.len != 0) {
        return -DMK_EFORMAT;
    }
    *ret_message = m;
    return 0;
}

const char *dmk_message_reply_text(enum dmk_message_reply reply)
{
    switch (reply) {
    case DMK_REPLY_YES:
        return "the decode worker has accepted the claim";
    case DMK_REPLY_UNKNOWN:
        return "the decode worker does not know the ticket (expired or cancelled)";
    case DMK_REPLY_CLAIMED:
        return "the ticket was claimed before";
    case DMK_REPLY_INCARNATION:
        return "the ticket or this worker is of an older start";
    case DMK_REPLY_WATCH:
        return "the decode worker cannot watch this process (not on one host, or the process "
               "namespace is not shared)";
    case DMK_REPLY_DRAINING:
        return "too many pages of the decode worker still wait for earlier transfers of this "
               "worker";
    }
    return "the decode worker has refused the claim";
}
