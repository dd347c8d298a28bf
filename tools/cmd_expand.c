/* damask expand: from a compact checkpoint to one in the Hugging Face layout. */
#include "tools/damask.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "common/base/clock.h"
#include "common/conf/conf.h"
#include "tools/tinymodel/expand.h"

struct options {
    char *from, *out, *vocab;
    uint32_t threads;
    bool force;
};

#define AT(f) offsetof(struct options, f)

static const struct dmk_conf_option table[] = {
    {"from", DMK_CONF_STR, NULL, 0, 0, NULL, "folder with model.json and model.bin", AT(from)},
    {"out", DMK_CONF_STR, NULL, 0, 0, NULL, "folder to be made", AT(out)},
    {"threads", DMK_CONF_U32, "0", 0, 64, NULL, "threads that fill and write; 0 = one a core",
     AT(threads)},
    {"vocab", DMK_CONF_STR, "", 0, 0, NULL,
     "o200k_base.tiktoken, to write a tokenizer.json from; empty = none is written", AT(vocab)},
    {"force", DMK_CONF_BOOL, "false", 0, 0, NULL, "replace a checkpoint that is there", AT(force)},
};

static const struct dmk_conf_program program = {
    .name = "damask expand",
    .summary = "write the checkpoint in the Hugging Face layout that a compact one stands for",
    .usage = "",
    .options = table,
    .n_options = sizeof(table) / sizeof(table[0]),
};

static int expand(const struct options *o, struct dmk_error *reterr)
{
    struct dmk_tinymodel_conf conf = {
        .out = o->out,
        .n_shards = 1,
        .n_threads = o->threads,
        .force = o->force,
        .vocab = o->vocab[0] ? o->vocab : NULL,
    };
    const uint64_t start = dmk_clock_ns();
    struct dmk_compact compact;
    uint64_t bytes = 0;
    int r;

    for (size_t n = strlen(o->out); n > 1 && o->out[n - 1] == '/'; n--) {
        o->out[n - 1] = '\0';
    }
    r = dmk_compact_open(o->from, &compact, reterr);
    if (r < 0) {
        return r;
    }
    r = dmk_compact_expand(&compact, &conf, &bytes, reterr);
    if (r == 0) {
        (void)printf("%s: %u layers, hidden %u, %u experts: %.2f GB of %.1f MB in %.1f s\n", o->out,
                     compact.shape.n_layers, compact.shape.hidden, compact.shape.n_experts,
                     (double)bytes / 1e9, (double)compact.n_bytes / 1e6,
                     (double)(dmk_clock_ns() - start) / 1e9);
    }
    dmk_compact_close(&compact);
    return r;
}

int dmk_cmd_expand(int argc, char **argv)
{
    struct options o = {0};
    struct dmk_error err = {0};
    int r = dmk_conf_load(&program, argc, argv, &o, NULL, &err);

    if (r == 0) {
        r = expand(&o, &err);
    }
    dmk_conf_free(&program, &o);
    if (r < 0) {
        (void)fprintf(stderr, "damask expand: %s\n", err.text);
        return 1;
    }
    return 0;
}
