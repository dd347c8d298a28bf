/* damask tinymodel: the options of the checkpoint writer. */
#include "tools/damask.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "common/base/clock.h"
#include "common/conf/conf.h"
#include "tools/progress.h"
#include "tools/tinymodel/tinymodel.h"

struct options {
    char *out;
    uint32_t preset;
    uint32_t layers, hidden, intermediate, experts, heads, kv_heads, vocab_size;
    uint32_t expert_format;
    uint64_t seed;
    uint32_t shards, threads;
    bool force;
    char *vocab;
};

static const char *const presets[] = {"tiny", "gpt-oss-20b", "gpt-oss-120b", NULL};
static const char *const formats[] = {
    [DMK_EXPERTS_MXFP4] = "mxfp4", [DMK_EXPERTS_BF16] = "bf16", NULL};

#define AT(f) offsetof(struct options, f)

static const struct dmk_conf_option table[] = {
    {"out", DMK_CONF_STR, NULL, 0, 0, NULL, "folder to be made", AT(out)},
    {"preset", DMK_CONF_ENUM, "tiny", 0, 0, presets,
     "dimensions to start from; tiny: 4 layers, hidden and intermediate 256, 32 experts, 16 heads",
     AT(preset)},
    {"layers", DMK_CONF_U32, "0", 0, 512, NULL,
     "number of layers; this and the next six: 0 = the preset's", AT(layers)},
    {"hidden", DMK_CONF_U32, "0", 0, 65536, NULL, "hidden size, a multiple of 32", AT(hidden)},
    {"intermediate", DMK_CONF_U32, "0", 0, 65536, NULL,
     "intermediate size of an expert, a multiple of 32", AT(intermediate)},
    {"experts", DMK_CONF_U32, "0", 0, 1024, NULL, "experts a layer, a multiple of 8", AT(experts)},
    {"heads", DMK_CONF_U32, "0", 0, 512, NULL, "query heads of 64, a multiple of the KV heads",
     AT(heads)},
    {"kv-heads", DMK_CONF_U32, "0", 0, 512, NULL, "KV heads; 8 is what damask serves",
     AT(kv_heads)},
    {"vocab-size", DMK_CONF_U32, "0", 0, 16777216, NULL,
     "rows of the embeddings; 201088 goes with the real vocabulary", AT(vocab_size)},
    {"expert-format", DMK_CONF_ENUM, "mxfp4", 0, 0, formats,
     "mxfp4 as published, or bf16 with the same values as re-exports have it", AT(expert_format)},
    {"seed", DMK_CONF_U64, "1", 0, 0, NULL, "seed of all weights", AT(seed)},
    {"shards", DMK_CONF_U32, "0", 0, 1000, NULL,
     "number of data files; 0 = by size, at least 2; 1 = one file without an index", AT(shards)},
    {"threads", DMK_CONF_U32, "0", 0, 64, NULL,
     "threads that fill and write, with 4 MiB each whatever the size; 0 = one a core", AT(threads)},
    {"vocab", DMK_CONF_STR, "", 0, 0, NULL,
     "o200k_base.tiktoken, to write a tokenizer.json from; empty = none is written", AT(vocab)},
    {"force", DMK_CONF_BOOL, "false", 0, 0, NULL, "replace a checkpoint that is there", AT(force)},
};

static const struct dmk_conf_program program = {
    .name = "damask tinymodel",
    .summary = "write a gpt-oss checkpoint with seeded weights in the Hugging Face layout",
    .usage = "",
    .options = table,
    .n_options = sizeof(table) / sizeof(table[0]),
};

static int choose_shape(const struct options *o, struct dmk_shape *ret_shape,
                        struct dmk_error *reterr)
{
    struct dmk_shape s;
    const int r = dmk_shape_preset(o->preset ? presets[o->preset] : "gpt-oss-20b", &s, reterr);

    if (r < 0) {
        return r;
    }
    if (o->preset == 0) {
        s.n_layers = 4;
        s.hidden = 256;
        s.intermediate = 256;
        s.n_heads = 16;
    }
    s.n_layers = o->layers ? o->layers : s.n_layers;
    s.hidden = o->hidden ? o->hidden : s.hidden;
    s.intermediate = o->intermediate ? o->intermediate : s.intermediate;
    s.n_experts = o->experts ? o->experts : s.n_experts;
    s.n_heads = o->heads ? o->heads : s.n_heads;
    s.n_kv_heads = o->kv_heads ? o->kv_heads : s.n_kv_heads;
    s.vocab = o->vocab_size ? o->vocab_size : s.vocab;
    if (s.vocab <= 200012) {
        s.eos_ids[0] = s.vocab - 1;
        s.eos_ids[1] = s.vocab - 2;
        s.n_eos = 2;
    }
    *ret_shape = s;
    return 0;
}

static void show_progress(void *ud, uint64_t done, uint64_t total)
{
    dmk_progress_show(ud, done, total);
}

static int write_model(const struct options *o, struct dmk_error *reterr)
{
    struct dmk_tinymodel_conf conf = {
        .out = o->out,
        .expert_format = (enum dmk_expert_format)o->expert_format,
        .seed = o->seed,
        .n_shards = o->shards,
        .n_threads = o->threads,
        .force = o->force,
        .vocab = o->vocab[0] ? o->vocab : NULL,
    };
    struct dmk_progress progress;
    const uint64_t start = dmk_clock_ns();
    uint64_t bytes = 0;
    double seconds;
    int r;

    for (size_t n = strlen(o->out); n > 1 && o->out[n - 1] == '/'; n--) {
        o->out[n - 1] = '\0';
    }
    dmk_progress_begin(&progress, "writing", false);
    conf.on_progress = show_progress;
    conf.ud = &progress;
    r = choose_shape(o, &conf.shape, reterr);
    if (r == 0) {
        r = dmk_tinymodel_write(&conf, &bytes, reterr);
    }
    dmk_progress_end(&progress);
    if (r < 0) {
        return r;
    }
    seconds = (double)(dmk_clock_ns() - start) / 1e9;
    (void)printf("%s: %u layers, hidden %u, %u experts, %s, seed %llu: %.2f GB in %.1f s\n", o->out,
                 conf.shape.n_layers, conf.shape.hidden, conf.shape.n_experts,
                 formats[conf.expert_format], (unsigned long long)conf.seed, (double)bytes / 1e9,
                 seconds);
    return 0;
}

int dmk_cmd_tinymodel(int argc, char **argv)
{
    struct options o = {0};
    struct dmk_error err = {0};
    int r = dmk_conf_load(&program, argc, argv, &o, NULL, &err);

    if (r == 0) {
        r = write_model(&o, &err);
    }
    dmk_conf_free(&program, &o);
    if (r < 0) {
        (void)fprintf(stderr, "damask tinymodel: %s\n", err.text);
        return 1;
    }
    return 0;
}
