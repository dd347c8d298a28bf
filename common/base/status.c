/* Names, messages and radii of the status codes; all from the one table in status.h. */
#include "common/base/status.h"

struct row {
    const char *name;
    const char *message;
    enum dmk_radius radius;
};

#define ROW(code, value, radius, message) [value] = {#code, message, DMK_RADIUS_##radius},
static const struct row rows[] = {[0] = {"OK", "success", DMK_RADIUS_NONE}, DMK_STATUS_MAP(ROW)};
#undef ROW

static const struct row unknown = {"EUNKNOWN", "unknown status", DMK_RADIUS_DEVICE};

static const struct row *find(int status)
{
    const int code = status < 0 ? -status : status;
    const int n = (int)(sizeof(rows) / sizeof(rows[0]));

    return code < n && rows[code].name ? &rows[code] : &unknown;
}

const char *dmk_status_name(int status)
{
    return find(status)->name;
}

const char *dmk_status_message(int status)
{
    return find(status)->message;
}

enum dmk_radius dmk_status_radius(int status)
{
    return find(status)->radius;
}
