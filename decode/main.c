/* damask-decode: options, then the worker's shell with the decode role. */
#include <stdio.h>
#include "decode/serve.h"

int main(int argc, char **argv)
{
    struct dmk_decode_options options = {0};
    struct dmk_error err = {0};
    uint32_t below = 0;
    const int r = dmk_decode_options_load(argc, argv, &options, &below, &err);
    int status = 0;

    if (r < 0) {
        (void)fprintf(stderr, "damask-decode: %s\n", err.text);
        status = 2;
    } else if (r == 0) {
        status = dmk_decode_serve(&options, below, NULL);
    }
    dmk_decode_options_free(&options);
    return status;
}
