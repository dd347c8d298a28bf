/* Little-endian fields in byte buffers: what tickets and messages are written with.
 *
 * Writing appends to a dmk_buf, which remembers failure. Reading goes through a cursor that
 * remembers the first overrun: read freely, look at `failed` once. */
#pragma once

#include "common/base/buf.h"
#include "common/base/hash.h"

static inline void dmk_wire_put_uint(struct dmk_buf *out, uint64_t value, size_t bytes)
{
    uint8_t raw[8];

    for (size_t i = 0; i < bytes; i++) {
        raw[i] = (uint8_t)(value >> (8 * i));
    }
    dmk_buf_append(out, raw, bytes);
}

static inline void dmk_wire_put_u16(struct dmk_buf *out, uint16_t value)
{
    dmk_wire_put_uint(out, value, 2);
}

static inline void dmk_wire_put_u32(struct dmk_buf *out, uint32_t value)
{
    dmk_wire_put_uint(out, value, 4);
}

static inline void dmk_wire_put_u64(struct dmk_buf *out, uint64_t value)
{
    dmk_wire_put_uint(out, value, 8);
}

static inline void dmk_wire_put_id128(struct dmk_buf *out, struct dmk_id128 id)
{
    dmk_wire_put_u64(out, id.lo);
    dmk_wire_put_u64(out, id.hi);
}

/* A 16-bit length and the bytes. */
static inline void dmk_wire_put_blob(struct dmk_buf *out, const void *data, size_t len)
{
    dmk_wire_put_u16(out, (uint16_t)len);
    dmk_buf_append(out, data, len);
}

struct dmk_wire_in {
    struct dmk_bytes rest;
    bool failed;
};

static inline uint64_t dmk_wire_get_uint(struct dmk_wire_in *in, size_t bytes)
{
    uint64_t value = 0;

    if (in->failed || in->rest.len < bytes) {
        in->failed = true;
        return 0;
    }
    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)in->rest.data[i] << (8 * i);
    }
    in->rest.data += bytes;
    in->rest.len -= bytes;
    return value;
}

static inline uint16_t dmk_wire_get_u16(struct dmk_wire_in *in)
{
    return (uint16_t)dmk_wire_get_uint(in, 2);
}

static inline uint32_t dmk_wire_get_u32(struct dmk_wire_in *in)
{
    return (uint32_t)dmk_wire_get_uint(in, 4);
}

static inline uint64_t dmk_wire_get_u64(struct dmk_wire_in *in)
{
    return dmk_wire_get_uint(in, 8);
}

static inline struct dmk_id128 dmk_wire_get_id128(struct dmk_wire_in *in)
{
    struct dmk_id128 id;

    id.lo = dmk_wire_get_u64(in);
    id.hi = dmk_wire_get_u64(in);
    return id;
}

/* A blob of at most max bytes into ret_data. */
static inline size_t dmk_wire_get_blob(struct dmk_wire_in *in, void *ret_data, size_t max)
{
    const size_t len = dmk_wire_get_u16(in);

    if (in->failed || len > max || len > in->rest.len) {
        in->failed = true;
        return 0;
    }
    if (len > 0) {
        memcpy(ret_data, in->rest.data, len);
    }
    in->rest.data += len;
    in->rest.len -= len;
    return len;
}
