/* damask mock where the cluster is not built. */
#include <stdio.h>
#include "tools/damask.h"

int dmk_cmd_mock(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    (void)fprintf(stderr, "damask mock: this build has no cluster (meson -Dcluster=true)\n");
    return 2;
}
