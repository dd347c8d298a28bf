/* Writing JSON: what the dialects' answers share. Pure. */
#pragma once

#include "router/api.h"

/* A string literal with its quotes. text must be UTF-8; control characters are escaped. */
void dmk_out_str(struct dmk_buf *out, struct dmk_str text);
/* The same from any bytes: invalid parts become U+FFFD. */
void dmk_out_lossy(struct dmk_buf *out, struct dmk_bytes bytes);
/* A number with six digits; what is not finite becomes a very low one, since JSON has none such. */
void dmk_out_logprob(struct dmk_buf *out, float logprob);
/* Entries {"token","logprob","bytes","top_logprobs":[...]} with commas between; comma: one before the first
 * too. */
void dmk_out_tokens(struct dmk_buf *out, const struct dmk_lp *lps, size_t n, bool comma);
/* {"prompt_tokens":...} with its details. */
void dmk_out_usage(struct dmk_buf *out, const struct dmk_usage *usage);
