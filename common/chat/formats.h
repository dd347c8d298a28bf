/* The formats that exist; read by the registry only. A new format adds its line here and in registry.c. */
#pragma once

#include "common/chat/format.h"

extern const struct dmk_format dmk_format_harmony; /* harmony.c */
extern const struct dmk_format dmk_format_plain;   /* plain.c */
