/* What the files of the constraint compiler share. Private to router/constraint*.c. */
#pragma once

#include "common/schema/schema.h"
#include "router/constraint.h"

#define DMK_CONSTRAINT_MAX_JSON  ((size_t)256 << 10)
#define DMK_CONSTRAINT_MAX_DEPTH 64

/* A compilation under way. Rule 0 of the build, the root, is what the answer is. */
struct dmk_compiler {
    struct dmk_build *build;
    struct dmk_schemas *schemas;
    uint32_t root;
    struct dmk_error error;
};

int dmk_constraint__open(struct dmk_compiler *compiler, struct dmk_api_error *reterr);
/* Writes the automaton when rc is 0; else tells the compiler's error. Frees it. */
int dmk_constraint__close(struct dmk_compiler *compiler, int rc, const char *param,
                          struct dmk_buf *out, struct dmk_api_error *reterr);
