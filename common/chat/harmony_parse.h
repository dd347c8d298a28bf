/* The streaming parser of the "harmony" format; see format.h for what each function promises. Private to
 * the format. */
#pragma once

#include "common/chat/format.h"

struct dmk_parser *dmk_harmony_parser_new(const struct dmk_parser_conf *conf);
void dmk_harmony_parser_push(struct dmk_parser *parser, uint32_t id);
void dmk_harmony_parser_end(struct dmk_parser *parser, bool cut,
                            struct dmk_parse_result *ret_result);
void dmk_harmony_parser_free(struct dmk_parser **parser);
