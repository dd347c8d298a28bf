/* Prints the hash (hi lo) of one block of 64 ids: block_hash NUMERICS ID... For tests in Python. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/blocks.h"

int main(int argc, char **argv)
{
    const struct dmk_bytes no_salt = {NULL, 0};
    uint32_t ids[DMK_BLOCK_TOKENS];
    struct dmk_id128 hash;

    if (argc != 2 + DMK_BLOCK_TOKENS) {
        return 2;
    }
    for (int i = 0; i < DMK_BLOCK_TOKENS; i++) {
        ids[i] = (uint32_t)strtoul(argv[2 + i], NULL, 10);
    }
    hash = dmk_block_next(dmk_block_root(argv[1], no_salt), ids);
    printf("%llu %llu\n", (unsigned long long)hash.hi, (unsigned long long)hash.lo);
    return 0;
}
