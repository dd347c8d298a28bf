/* What happens when an assertion fails: one line on stderr, then abort for the core dump. */
#include "common/base/assert.h"
#include <stdio.h>
#include <stdlib.h>

void dmk_assert_fail(const char *file, int line, const char *what)
{
    (void)fprintf(stderr, "damask: assertion failed at %s:%d: %s\n", file, line, what);
    abort();
}
