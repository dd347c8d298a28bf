/* Formats of strings, as expressions over the string's characters. Days fit their month; 29 February stands in
 * leap years only; there are no leap seconds. */
#include "common/schema/schema_impl.h"

#include <string.h>

#define LEAP_YEAR "(?:\\d\\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
#define DATE                                                                                       \
    "(?:(?:000[1-9]|00[1-9]\\d|0[1-9]\\d\\d|[1-9]\\d{3})-"                                         \
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"          \
    "02-(?:0[1-9]|1\\d|2[0-8]))|" LEAP_YEAR "-02-29)"
#define TIME                                                                                       \
    "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
#define OCTET "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define LABEL "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
#define HOST  LABEL "(?:\\." LABEL "){0,7}"
#define HEX4  "[0-9a-fA-F]{1,4}"

const char *dmk_schema__format(const char *name)
{
    static const struct {
        const char *name, *pattern;
    } formats[] = {
        {"date", "^" DATE "$"},
        {"time", "^" TIME "$"},
        {"date-time", "^" DATE "T" TIME "$"},
        {"duration",
         "^P(?:\\d{1,9}W|(?:\\d{1,9}Y(?:\\d{1,9}M(?:\\d{1,9}D)?)?|\\d{1,9}M(?:\\d{1,9}D)?|"
         "\\d{1,9}D)(?:T(?:\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|"
         "\\d{1,9}S))?|T(?:\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|"
         "\\d{1,9}S))$"},
        {"uuid", "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"},
        {"ipv4", "^" OCTET "\\." OCTET "\\." OCTET "\\." OCTET "$"},
        {"ipv6", "^(?:" HEX4 ":){7}" HEX4 "$"},
        {"hostname", "^" HOST "$"},
        {"email", "^[A-Za-z0-9_%+-]{1,32}(?:\\.[A-Za-z0-9_%+-]{1,32}){0,3}@" LABEL "(?:\\." LABEL
                  "){0,3}\\.[A-Za-z]{2,24}$"},
    };

    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
        if (strcmp(name, formats[i].name) == 0) {
            return formats[i].pattern;
        }
    }
    return NULL;
}
