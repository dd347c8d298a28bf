/* The numerics id: the name of all that the bits of a page depend on besides model and tokens. One function makes it of
 * formats, for an engine's own pages and for those that others compute for it. */
#include "common/model/engine_internal.h"

#include <stdio.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/model/cut.h"

struct formats {
    enum dmk_expert_format experts; /* in memory */
    bool fp8_dense;
};

static bool is_host(const char *backend)
{
    return strcmp(backend, "cuda") != 0;
}

/* Formats of the experts' weights and of what they are multiplied by. */
static const char *name_experts(enum dmk_expert_format experts, bool host)
{
    switch (experts) {
    case DMK_EXPERTS_FP8:
        return host ? "fp8-bf16" : "fp8-fp8";
    case DMK_EXPERTS_MXFP4:
        return "mxfp4-bf16";
    case DMK_EXPERTS_BF16:
        return "bf16-bf16";
    }
    dmk_unreachable("a format of experts without a name");
}

static void name(struct formats f, const char *backend, char ret[DMK_ENGINE_NUMERICS_MAX])
{
    /* The reference set on the host is told apart by its options, not by its bits. */
    const bool host = is_host(backend);
    (void)snprintf(ret, DMK_ENGINE_NUMERICS_MAX, "%s%s-k1-%s", name_experts(f.experts, host),
                   f.fp8_dense ? "-dense8" : "", host ? "cpu" : "cuda");
}

static struct formats own_formats(const struct dmk_engine_conf *conf,
                                  enum dmk_expert_format checkpoint)
{
    const bool make_fp8 = conf->fp8_experts && checkpoint == DMK_EXPERTS_MXFP4;
    return (struct formats){make_fp8 ? DMK_EXPERTS_FP8 : checkpoint, conf->fp8_dense};
}

int dmk_engine_dense_check(const struct dmk_shape *shape, const char *backend,
                           struct dmk_error *reterr)
{
    const uint32_t n_query_heads = shape->n_heads / shape->n_kv_heads;
    if (!is_host(backend) && n_query_heads * DMK_HEAD_DIM % DMK_FP8_BLOCK != 0) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "dense weights in FP8 on backend '%s' need an even number of query "
                             "heads for a KV head, not %u",
                             backend, n_query_heads);
    }
    return 0;
}

/* Formats of the engines that compute this one's prompts. Of one model there are MXFP4 and the FP8 that is made of it,
 * or BF16. */
static int find_prompt_formats(const struct dmk_engine_conf *conf,
                               enum dmk_expert_format checkpoint, const struct dmk_shape *shape,
                               struct formats *ret, struct dmk_error *reterr)
{
    static const enum dmk_expert_format formats[] = {[DMK_PROMPT_EXPERTS_MXFP4] = DMK_EXPERTS_MXFP4,
                                                     [DMK_PROMPT_EXPERTS_FP8] = DMK_EXPERTS_FP8,
                                                     [DMK_PROMPT_EXPERTS_BF16] = DMK_EXPERTS_BF16};
    struct formats f = own_formats(conf, checkpoint);
    if (conf->prompt_experts != DMK_PROMPT_EXPERTS_SAME) {
        f.experts = formats[conf->prompt_experts];
    }
    if ((f.experts == DMK_EXPERTS_BF16) != (checkpoint == DMK_EXPERTS_BF16)) {
        return dmk_error_set(
            reterr, -DMK_EINVAL,
            "prompt-experts is %s, but this checkpoint's experts are %s: no prefill "
            "worker of this model has others",
            dmk_cut_format_name(f.experts), dmk_cut_format_name(checkpoint));
    }
    if (conf->prompt_dense != DMK_PROMPT_DENSE_SAME) {
        f.fp8_dense = conf->prompt_dense == DMK_PROMPT_DENSE_FP8;
    }
    const int status = f.fp8_dense ? dmk_engine_dense_check(shape, conf->backend, reterr) : 0;
    if (status != 0) {
        return status;
    }
    *ret = f;
    return 0;
}

int dmk_engine_name_numerics(struct dmk_engine *engine, struct dmk_error *reterr)
{
    const struct dmk_engine_conf *conf = &engine->conf;
    const enum dmk_expert_format checkpoint = engine->weights->expert_format;
    struct formats prompts = {0};
    const int status = find_prompt_formats(conf, checkpoint, &engine->shape, &prompts, reterr);
    if (status != 0) {
        return status;
    }
    name(own_formats(conf, checkpoint), conf->backend, engine->numerics);
    name(prompts, conf->backend, engine->prompt_numerics);
    return 0;
}

const char *dmk_engine_numerics(const struct dmk_engine *engine)
{
    return engine->numerics;
}

const char *dmk_engine_prompt_numerics(const struct dmk_engine *engine)
{
    return engine->prompt_numerics;
}
