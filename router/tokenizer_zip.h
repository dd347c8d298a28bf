/* The tokenizer as an archive, for gateways that render prompts by themselves: a ZIP of tokenizer.json,
 * tokenizer_config.json and config.json. Pure; takes about a second, so that it belongs on a pool thread. */
#pragma once

#include "common/base/buf.h"
#include "common/text/tokenizer.h"

/* sha256: of the archive, in hex. -DMK_ENOMEM. */
int dmk_tokenizer_zip(const struct dmk_vocab *vocab, uint32_t max_context, struct dmk_buf *out,
                      char ret_sha256[65]);
