/* The one list of chat formats, and the names of repairs. Immutable; any thread. */
#include "common/chat/format.h"

#include "common/base/assert.h"
#include "common/chat/formats.h"

static const struct dmk_format *const formats[] = {&dmk_format_harmony, &dmk_format_plain};

const struct dmk_format *dmk_format_find(const char *name)
{
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
        if (strcmp(formats[i]->name, name) == 0) {
            return formats[i];
        }
    }
    return NULL;
}

const char *dmk_repair_name(enum dmk_repair repair)
{
#define DMK_REPAIR_NAME(code, name) [DMK_REPAIR_##code] = (name),
    static const char *const names[DMK_N_REPAIRS] = {DMK_REPAIR_MAP(DMK_REPAIR_NAME)};
#undef DMK_REPAIR_NAME

    dmk_assert(repair < DMK_N_REPAIRS);
    return names[repair];
}
