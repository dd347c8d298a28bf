/* The table of dialects. */
#include "router/api.h"

#include "common/base/assert.h"

const struct dmk_dialect *const dmk_dialects[] = {
    &dmk_dialect_chat,       &dmk_dialect_completions,
    &dmk_dialect_responses,  &dmk_dialect_tokenize,
    &dmk_dialect_detokenize, &dmk_dialect_grpc,
    &dmk_dialect_engine,     NULL,
};

const struct dmk_dialect *dmk_dialect_find(bool http, struct dmk_str path)
{
    for (size_t i = 0; dmk_dialects[i]; i++) {
        if (dmk_dialects[i]->http == http && dmk_str_is(path, dmk_dialects[i]->path)) {
            return dmk_dialects[i];
        }
    }
    return NULL;
}

const char *dmk_finish_name(enum dmk_finish finish)
{
    switch (finish) {
    case DMK_FINISH_STOP:
        return "stop";
    case DMK_FINISH_LENGTH:
        return "length";
    case DMK_FINISH_TOOL_CALLS:
        return "tool_calls";
    }
    dmk_unreachable("finish reason");
}
