/* Checks of single fields, shared by the two directions. Each returns 0 or a code with a sentence that
 * names the field. */
#pragma once

#include "common/rpc/msg.h"

/* No longer than max and without control characters. */
int dmk_msg__text(const char *text, size_t max, const char *what, struct dmk_error *reterr);
int dmk_msg__count(size_t n, size_t max, const char *what, struct dmk_error *reterr);
/* vocab_size 0: not known, nothing is compared. */
int dmk_msg__ids(const uint32_t *ids, size_t n, uint32_t vocab_size, const char *what,
                 struct dmk_error *reterr);
int dmk_msg__range(double v, double min, double max, const char *what, struct dmk_error *reterr);
int dmk_msg__id(const Damask__V1__RequestId *id, const char *what, struct dmk_error *reterr);
