/* Opening a converted folder; see cut_weights.h. */
#include "common/model/cut_weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "common/model/config.h"

#define MAX_PATH_BYTES 4096u

static bool has_file(const char *dir, const char *name)
{
    char path[MAX_PATH_BYTES];
    struct stat st;

    (void)snprintf(path, sizeof(path), "%.4000s/%s", dir, name);
    return stat(path, &st) == 0;
}

int dmk_cut_weights_here(const char *dir, struct dmk_error *reterr)
{
    if (has_file(dir, DMK_MANIFEST_NAME)) {
        return 1;
    }
    if (!has_file(dir, DMK_MANIFEST_JOURNAL)) {
        return 0;
    }
    return dmk_error_set(
        reterr, -DMK_ENOENT,
        "%s: a conversion into it has not ended: run the same `damask convert` again, it goes on "
        "where it stopped",
        dir);
}

int dmk_cut_weights_check(const struct dmk_cut_weights *cut, struct dmk_layout layout,
                          struct dmk_error *reterr)
{
    const struct dmk_layout has = cut->plan.layout;

    if (has.tp == layout.tp && has.dp == layout.dp) {
        return 0;
    }
    return dmk_error_set(reterr, -DMK_EMISMATCH,
                         "%.150s: was converted for tp %u, dp %u but the worker has tp %u, dp %u: "
                         "run `damask convert "
                         "%.150s NEW --tp %u --dp %u --experts %s` and use NEW",
                         cut->dir, has.tp, has.dp, layout.tp, layout.dp, cut->manifest.source,
                         layout.tp, layout.dp, dmk_cut_format_name(cut->plan.experts));
}

/* The tensor as the file has it; the header has been checked against the file's size already. */
static int find_tensor(const struct dmk_safetensors *file, const struct dmk_cut_tensor *want,
                       uint64_t data_start, const uint8_t **ret_data, struct dmk_error *reterr)
{
    const struct dmk_bytes data = dmk_safetensors_data(file);

    for (size_t i = 0; i < dmk_safetensors_count(file); i++) {
        const struct dmk_tensor *t = dmk_safetensors_at(file, i);

        if (strcmp(t->name, want->name) != 0) {
            continue;
        }
        if (t->dtype != want->dtype || t->rank != want->rank ||
            memcmp(t->dims, want->dims, t->rank * sizeof(t->dims[0])) != 0 ||
            (uint64_t)(t->data - data.data) + data_start != want->offset) {
            return dmk_error_set(
                reterr, -DMK_EMISMATCH,
                "%s: tensor \"%.80s\": dtype, shape or place is not that of the manifest",
                dmk_safetensors_path(file), want->name);
        }
        *ret_data = t->data;
        return 0;
    }
    return dmk_error_set(reterr, -DMK_EMISMATCH, "%s: tensor \"%.80s\" is missing",
                         dmk_safetensors_path(file), want->name);
}

/* Into every rank that the file serves. */
static int bind_tensor(struct dmk_weights *w, const struct dmk_cut_file *f,
                       const struct dmk_safetensors *file, const struct dmk_cut_tensor *t,
                       struct dmk_error *reterr)
{
    struct dmk_cut_weights *cut = w->cut;
    const uint8_t *data = NULL;
    const int r = find_tensor(file, t, f->data_start, &data, reterr);

    if (r < 0) {
        return r;
    }
    for (uint32_t i = 0; i < cut->plan.layout.tp * cut->plan.layout.dp; i++) {
        struct dmk_rank_weights *rank = &cut->ranks[i];

        if (!dmk_cut_serves(&cut->plan, f, i)) {
            continue;
        }
        memcpy((t->layer == DMK_CUT_GLOBAL ? (char *)rank : (char *)&rank->layers[t->layer]) +
                   t->place,
               &data, sizeof(data));
        if (t->axis == 1) {
            rank->layers[t->layer].o_stride = t->dims[1];
        }
    }
    w->total_bytes += t->n_bytes;
    return 0;
}

static int open_file(struct dmk_weights *w, uint32_t at, struct dmk_error *reterr)
{
    struct dmk_cut_weights *cut = w->cut;
    const struct dmk_cut_file *f = &cut->plan.files[at];
    char path[MAX_PATH_BYTES];
    struct stat st;
    int r;

    (void)snprintf(path, sizeof(path), "%.4000s/%s", cut->dir, f->name);
    if (stat(path, &st) == 0 && (uint64_t)st.st_size != f->n_bytes) {
        return dmk_error_set(
            reterr, -DMK_EFORMAT,
            "%s: has %lld bytes but the manifest says %llu (cut off, or of another conversion?)",
            path, (long long)st.st_size, (unsigned long long)f->n_bytes);
    }
    if ((r = dmk_safetensors_open(path, &cut->files[at], reterr)) < 0) {
        return r;
    }
    for (uint32_t i = f->first; i < f->first + f->n_tensors && r == 0; i++) {
        r = bind_tensor(w, f, cut->files[at], &cut->plan.tensors[i], reterr);
    }
    return r;
}

static int alloc_tables(struct dmk_weights *w, struct dmk_error *reterr)
{
    struct dmk_cut_weights *cut = w->cut;
    const uint32_t n_ranks = cut->plan.layout.tp * cut->plan.layout.dp;
    bool ok;

    cut->files = calloc(cut->plan.n_files, sizeof(struct dmk_safetensors *));
    cut->ranks = calloc(n_ranks, sizeof(cut->ranks[0]));
    ok = cut->files && cut->ranks;
    for (uint32_t i = 0; ok && i < n_ranks; i++) {
        cut->ranks[i].layers = calloc(w->shape.n_layers, sizeof(struct dmk_layer_weights));
        ok = cut->ranks[i].layers != NULL;
    }
    return ok ? 0 : dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for its tables", cut->dir);
}

static int open_all(struct dmk_weights *w, struct dmk_error *reterr)
{
    struct dmk_cut_weights *cut = w->cut;
    struct dmk_config config = {0};
    char path[MAX_PATH_BYTES];
    int r;

    if ((r = dmk_manifest_load(cut->dir, &cut->manifest, reterr)) < 0 ||
        (r = dmk_manifest_check_copied(&cut->manifest, cut->dir, false, reterr)) < 0 ||
        (r = dmk_config_load(cut->dir, NULL, &config, reterr)) < 0) {
        return r;
    }
    w->shape = config.shape;
    w->expert_format = cut->manifest.experts;
    (void)snprintf(path, sizeof(path), "%.4000s/" DMK_MANIFEST_NAME, cut->dir);
    if ((r = dmk_layout_check(&w->shape, cut->manifest.layout, false, reterr)) < 0 ||
        (r = dmk_cut_plan(&w->shape, cut->manifest.layout, cut->manifest.experts, &cut->plan,
                          reterr)) < 0 ||
        (r = dmk_manifest_check(&cut->manifest, &cut->plan, path, reterr)) < 0 ||
        (r = alloc_tables(w, reterr)) < 0) {
        return r;
    }
    for (uint32_t i = 0; i < cut->plan.n_files && r == 0; i++) {
        r = open_file(w, i, reterr);
    }
    w->embedding = cut->ranks[0].embedding;
    w->final_norm = cut->ranks[0].final_norm;
    return r;
}

int dmk_cut_weights_open(const char *dir, struct dmk_weights *w, struct dmk_error *reterr)
{
    w->cut = calloc(1, sizeof(*w->cut));
    if (!w->cut || !(w->cut->dir = strdup(dir))) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to open it", dir);
    }
    return open_all(w, reterr);
}

void dmk_cut_weights_close(struct dmk_weights *w)
{
    struct dmk_cut_weights *cut = w->cut;

    if (!cut) {
        return;
    }
    for (uint32_t i = 0; cut->files && i < cut->plan.n_files; i++) {
        dmk_safetensors_close(&cut->files[i]);
    }
    for (uint32_t i = 0; cut->ranks && i < cut->plan.layout.tp * cut->plan.layout.dp; i++) {
        free(cut->ranks[i].layers);
    }
    free(cut->files);
    free(cut->ranks);
    free(cut->dir);
    dmk_cut_free(&cut->plan);
    dmk_manifest_free(&cut->manifest);
    free(cut);
    w->cut = NULL;
}
