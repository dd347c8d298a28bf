/* Walks a message in wire form; see nul.h. Depth is bounded by a stack of its own. */
#include "common/rpc/nul.h"

#include <string.h>

#define MAX_DEPTH 32 /* messages within messages; protobuf-c's own types here nest 4 deep */

/* Messages being read, the innermost last; each ends where its length said. */
struct walk {
    const uint8_t *at;
    struct {
        const ProtobufCMessageDescriptor *message;
        const uint8_t *end;
    } open[MAX_DEPTH];
    unsigned n;
};

static bool read_varint(struct walk *w, uint64_t *ret)
{
    const uint8_t *end = w->open[w->n - 1].end;
    uint64_t v = 0;

    for (unsigned shift = 0; w->at < end && shift < 64; shift += 7) {
        const uint8_t byte = *w->at++;

        v |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *ret = v;
            return true;
        }
    }
    return false;
}

static bool skip(struct walk *w, uint64_t n)
{
    if (n > (uint64_t)(w->open[w->n - 1].end - w->at)) {
        return false;
    }
    w->at += n;
    return true;
}

/* A field with a length. False when the bytes end before it or it lies too deep. */
static bool enter(struct walk *w, const ProtobufCFieldDescriptor *field, const char **ret_name)
{
    const uint8_t *text;
    uint64_t n;

    if (!read_varint(w, &n) || n > (uint64_t)(w->open[w->n - 1].end - w->at)) {
        return false;
    }
    text = w->at;
    if (field && field->type == PROTOBUF_C_TYPE_MESSAGE) {
        if (w->n == MAX_DEPTH) {
            return false;
        }
        w->open[w->n].message = field->descriptor;
        w->open[w->n++].end = text + n;
        return true;
    }
    if (field && field->type == PROTOBUF_C_TYPE_STRING && n > 0 && memchr(text, 0, n)) {
        *ret_name = field->name;
    }
    w->at += n;
    return true;
}

const char *dmk_rpc_nul_field(const ProtobufCMessageDescriptor *message, struct dmk_bytes bytes)
{
    struct walk w = {.at = bytes.data, .n = 1};
    const char *name = NULL;
    bool ok = bytes.len > 0;

    w.open[0].message = message;
    w.open[0].end = bytes.len > 0 ? bytes.data + bytes.len : bytes.data;
    while (ok && !name) {
        uint64_t tag;

        while (w.n > 0 && w.at == w.open[w.n - 1].end) {
            w.n--;
        }
        if (w.n == 0 || !read_varint(&w, &tag)) {
            break;
        }
        switch (tag & 7) {
        case 0:
            ok = read_varint(&w, &tag);
            break;
        case 1:
            ok = skip(&w, 8);
            break;
        case 2:
            ok = enter(&w,
                       tag >> 3 <= UINT32_MAX ? protobuf_c_message_descriptor_get_field(
                                                    w.open[w.n - 1].message, (unsigned)(tag >> 3))
                                              : NULL,
                       &name);
            break;
        case 5:
            ok = skip(&w, 4);
            break;
        default:
            ok = false;
        }
    }
    return name;
}
