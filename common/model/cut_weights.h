/* The weights of a converted folder: its files mapped, their tensors bound to the ranks they were cut for. */
#pragma once

#include "common/model/manifest.h"

struct dmk_cut_weights {
    char *dir;
    struct dmk_manifest manifest;
    struct dmk_cut plan;
    struct dmk_safetensors **files; /* [plan.n_files] */
    struct dmk_rank_weights *ranks; /* [tp * dp] */
};

/* 1 when dir is a converted folder, 0 when not; negative with a sentence when a conversion into it has not ended. */
int dmk_cut_weights_here(const char *dir, struct dmk_error *reterr);

/* Fills w. Checks manifest, sizes, headers and every tensor's place; contents are for dmk_weights_prefault. */
int dmk_cut_weights_open(const char *dir, struct dmk_weights *w, struct dmk_error *reterr);
void dmk_cut_weights_close(struct dmk_weights *w);

/* Refuses another layout than the folder's, with the command that makes one for it. */
int dmk_cut_weights_check(const struct dmk_cut_weights *cut, struct dmk_layout layout,
                          struct dmk_error *reterr);
