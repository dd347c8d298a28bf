/* A program whose rows stand in several tables, as one with a single table. */
#include "common/conf/internal.h"
#include <stdlib.h>
#include "common/base/assert.h"

static void change(struct dmk_conf_option *options, size_t n, const struct dmk_conf_change *c)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(options[i].name, c->name) == 0) {
            options[i].def = c->def;
            options[i].help = c->help ? c->help : options[i].help;
            return;
        }
    }
    dmk_unreachable("a change of an option that no part has");
}

struct dmk_conf_program dmk_conf__join(const struct dmk_conf_program *program)
{
    struct dmk_conf_program joined = *program;
    struct dmk_conf_option *all;
    size_t n = 0;

    if (!program->parts) {
        return joined;
    }
    for (size_t i = 0; program->parts[i]; i++) {
        n += program->parts[i]->n_options;
    }
    all = calloc(n + 1, sizeof(*all));
    dmk_assert(all && !program->options);
    n = 0;
    for (size_t i = 0; program->parts[i]; i++) {
        const struct dmk_conf_part *part = program->parts[i];

        for (size_t k = 0; k < part->n_options; k++) {
            all[n] = part->options[k];
            all[n++].offset += part->offset;
        }
    }
    for (size_t i = 0; i < program->n_changes; i++) {
        change(all, n, &program->changes[i]);
    }
    joined.options = all;
    joined.n_options = n;
    return joined;
}

void dmk_conf__join_free(struct dmk_conf_program *joined)
{
    if (joined->parts) {
        free((void *)(uintptr_t)joined->options);
    }
    joined->options = NULL;
}
