/* damask-prefill: options, then the worker's shell with the prefill role. */
#include <stdio.h>
#include "prefill/serve.h"

int main(int argc, char **argv)
{
    struct dmk_prefill_options options = {0};
    struct dmk_error err = {0};
    const int r = dmk_prefill_options_load(argc, argv, &options, &err);
    int status = 0;

    if (r < 0) {
        (void)fprintf(stderr, "damask-prefill: %s\n", err.text);
        status = 2;
    } else if (r == 0) {
        status = dmk_prefill_serve(&options, NULL);
    }
    dmk_prefill_options_free(&options);
    return status;
}
