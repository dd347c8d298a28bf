/* The descriptions of all .proto files of this folder and of what they import: a serialised
 * google.protobuf.FileDescriptorSet, made by the build. */
#pragma once

#include <stddef.h>

extern const unsigned char dmk_proto_descriptors[];
extern const size_t dmk_proto_descriptors_size;
