/* Texts of protobuf messages that protobuf-c can not show whole.
 *
 * A protobuf string may hold NUL. protobuf-c hands strings out without their length, so that such a text would be
 * taken for its beginning: a message of which the rest is missing, or a name that is another one. Whoever reads messages
 * of strangers asks here first and refuses them. A pure function; any thread. */
#pragma once

#include <protobuf-c/protobuf-c.h>
#include "common/base/span.h"

/* Name of the first string field, at any depth, that holds a NUL; NULL when there is none. Bytes that are no such
 * message have none: unpacking refuses them. */
const char *dmk_rpc_nul_field(const ProtobufCMessageDescriptor *message, struct dmk_bytes bytes);
