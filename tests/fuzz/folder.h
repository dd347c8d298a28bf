/* A scratch folder for targets that read files by name. One folder a process, removed at its exit. */
#pragma once

#include "common/base/span.h"

/* Its path; made at the first call. */
const char *fuzz_folder(void);
/* Writes or replaces a file in it. */
void fuzz_folder_put(const char *name, struct dmk_bytes content);
/* Removes a file from it, if it is there. */
void fuzz_folder_drop(const char *name);
