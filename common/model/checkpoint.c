/* Finding and opening the files of a checkpoint; see checkpoint.h. */
#include "common/model/checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include "common/base/assert.h"
#include "common/json/json.h"

#define INDEX_NAME      "model.safetensors.index.json"
#define SINGLE_NAME     "model.safetensors"
#define ORIGINAL_NAME   "original"
#define MAX_INDEX_BYTES 16000000u
#define MAX_FILES       1024u
#define MAX_PATH_BYTES  4096u

struct dmk_checkpoint {
    char *dir;
    char *source;
    struct dmk_safetensors **files; /* [n_files], by path */
    size_t n_files;
    struct dmk_checkpoint_entry *entries; /* [n_entries], by name */
    size_t n_entries;
};

static int join_path(const char *dir, const char *name, char ret_path[MAX_PATH_BYTES],
                     struct dmk_error *reterr)
{
    const int n = snprintf(ret_path, MAX_PATH_BYTES, "%s/%s", dir, name);

    if (n < 0 || (unsigned)n >= MAX_PATH_BYTES) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%.200s...: the path is too long", dir);
    }
    return 0;
}

/* 1 when dir/name is there, 0 when it is not. */
static int has_file(const char *dir, const char *name, struct dmk_error *reterr)
{
    char path[MAX_PATH_BYTES];
    struct stat st;
    const int r = join_path(dir, name, path, reterr);

    if (r < 0) {
        return r;
    }
    if (stat(path, &st) == 0) {
        return 1;
    }
    if (errno == ENOENT || errno == ENOTDIR) {
        return 0;
    }
    return dmk_error_set(reterr, -DMK_EIO, "%s: can not be looked at: %s", path, strerror(errno));
}

/* Sets dir and source; *ret_is_index says what source is. 1 when found, 0 when not. */
static int try_folder(struct dmk_checkpoint *ckpt, const char *dir, bool *ret_is_index,
                      struct dmk_error *reterr)
{
    char path[MAX_PATH_BYTES];
    const char *name = INDEX_NAME;
    int r = has_file(dir, name, reterr);

    if (r == 0) {
        name = SINGLE_NAME;
        r = has_file(dir, name, reterr);
    }
    if (r <= 0) {
        return r;
    }
    r = join_path(dir, name, path, reterr);
    if (r < 0) {
        return r;
    }
    ckpt->dir = strdup(dir);
    ckpt->source = strdup(path);
    if (!ckpt->dir || !ckpt->source) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to open it", path);
    }
    *ret_is_index = strcmp(name, INDEX_NAME) == 0;
    return 1;
}

static int locate(struct dmk_checkpoint *ckpt, const char *dir, bool *ret_is_index,
                  struct dmk_error *reterr)
{
    char original[MAX_PATH_BYTES];
    struct stat st;
    int r;

    if (stat(dir, &st) < 0) {
        return dmk_error_set(reterr, errno == ENOENT ? -DMK_ENOENT : -DMK_EIO,
                             "%s: can not be opened: %s", dir, strerror(errno));
    }
    if (!S_ISDIR(st.st_mode)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: not a folder; name the checkpoint's folder",
                             dir);
    }
    r = try_folder(ckpt, dir, ret_is_index, reterr);
    if (r == 0) {
        r = join_path(dir, ORIGINAL_NAME, original, reterr);
        if (r < 0) {
            return r;
        }
        r = try_folder(ckpt, original, ret_is_index, reterr);
    }
    if (r == 0) {
        return dmk_error_set(reterr, -DMK_ENOENT,
                             "%s: holds no checkpoint: neither " INDEX_NAME " nor " SINGLE_NAME
                             ", there or in " ORIGINAL_NAME "/",
                             dir);
    }
    return r;
}

/* Opens dir/name unless it is open already. */
static int open_file(struct dmk_checkpoint *ckpt, const char *name, size_t *ret_index,
                     struct dmk_error *reterr)
{
    char path[MAX_PATH_BYTES];
    int r = join_path(ckpt->dir, name, path, reterr);

    if (r < 0) {
        return r;
    }
    for (size_t i = ckpt->n_files;
         i-- > 0;) { /* an index names the same file many times in a row */
        if (strcmp(dmk_safetensors_path(ckpt->files[i]), path) == 0) {
            *ret_index = i;
            return 0;
        }
    }
    if (ckpt->n_files == MAX_FILES) {
        return dmk_error_set(reterr, -DMK_EFULL, "%s: names more than %u files", ckpt->source,
                             MAX_FILES);
    }
    r = dmk_safetensors_open(path, &ckpt->files[ckpt->n_files], reterr);
    if (r == -DMK_ENOENT) {
        return dmk_error_set(reterr, r, "%s: names file \"%.100s\", which is not in the folder",
                             ckpt->source, name);
    }
    if (r < 0) {
        return r;
    }
    *ret_index = ckpt->n_files++;
    return 0;
}

static bool is_plain_name(const json_t *value)
{
    const char *name = json_string_value(value);

    return name && name[0] != '\0' && !strchr(name, '/') && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

/* Opens every file of the weight map. */
static int open_mapped_files(struct dmk_checkpoint *ckpt, json_t *map, struct dmk_error *reterr)
{
    const char *name;
    json_t *value;
    size_t file;

    if (json_object_size(map) == 0) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: weight_map is empty", ckpt->source);
    }
    json_object_foreach(map, name, value)
    {
        char shown[DMK_JSON_SHOW_BYTES];
        int r;

        if (!is_plain_name(value)) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "%s: tensor \"%.80s\" must map to the name of a file in the "
                                 "folder, not %s",
                                 ckpt->source, name, dmk_json_show(value, shown));
        }
        r = open_file(ckpt, json_string_value(value), &file, reterr);
        if (r < 0) {
            return r;
        }
    }
    return 0;
}

static int compare_entries(const void *a, const void *b)
{
    const struct dmk_checkpoint_entry *x = a, *y = b;

    return strcmp(x->tensor->name, y->tensor->name);
}

/* One sorted table of all tensors of all files; a name may stand in one file only. */
static int collect(struct dmk_checkpoint *ckpt, struct dmk_error *reterr)
{
    size_t n = 0;

    for (size_t i = 0; i < ckpt->n_files; i++) {
        n += dmk_safetensors_count(ckpt->files[i]);
    }
    ckpt->entries = calloc(n ? n : 1, sizeof(ckpt->entries[0]));
    if (!ckpt->entries) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for %zu tensors", ckpt->source, n);
    }
    for (size_t i = 0; i < ckpt->n_files; i++) {
        for (size_t j = 0; j < dmk_safetensors_count(ckpt->files[i]); j++) {
            struct dmk_checkpoint_entry *e = &ckpt->entries[ckpt->n_entries++];

            e->tensor = dmk_safetensors_at(ckpt->files[i], j);
            e->path = dmk_safetensors_path(ckpt->files[i]);
        }
    }
    if (n > 0) {
        qsort(ckpt->entries, n, sizeof(ckpt->entries[0]), compare_entries);
    }
    for (size_t i = 1; i < n; i++) {
        if (compare_entries(&ckpt->entries[i - 1], &ckpt->entries[i]) == 0) {
            return dmk_error_set(reterr, -DMK_EFORMAT, "%s: tensor \"%.80s\": stands in %s as well",
                                 ckpt->entries[i].path, ckpt->entries[i].tensor->name,
                                 ckpt->entries[i - 1].path);
        }
    }
    return 0;
}

/* Index and files must tell the same: each tensor where the map says, none that it does not name.
 */
static int check_map(const struct dmk_checkpoint *ckpt, json_t *map, struct dmk_error *reterr)
{
    const char *name;
    json_t *value;

    json_object_foreach(map, name, value)
    {
        const struct dmk_checkpoint_entry *e = dmk_checkpoint_find(ckpt, name, NULL);
        const char *file = json_string_value(value);

        if (!e) {
            return dmk_error_set(reterr, -DMK_EMISMATCH,
                                 "%s: tensor \"%.80s\" is said to be in %.100s but is not",
                                 ckpt->source, name, file);
        }
        if (strcmp(strrchr(e->path, '/') + 1, file) != 0) {
            return dmk_error_set(reterr, -DMK_EMISMATCH,
                                 "%s: tensor \"%.80s\" is said to be in %.100s but is in %s",
                                 ckpt->source, name, file, e->path);
        }
    }
    for (size_t i = 0; i < ckpt->n_entries; i++) {
        if (!json_object_get(map, ckpt->entries[i].tensor->name)) {
            return dmk_error_set(
                reterr, -DMK_EMISMATCH, "%s: tensor \"%.80s\" of %s is not in the weight_map",
                ckpt->source, ckpt->entries[i].tensor->name, ckpt->entries[i].path);
        }
    }
    return 0;
}

static int open_index(struct dmk_checkpoint *ckpt, struct dmk_error *reterr)
{
    json_t *root = NULL, *map = NULL;
    int r = dmk_json_load(ckpt->source, MAX_INDEX_BYTES, 8, &root, reterr);

    if (r < 0) {
        return r;
    }
    if ((r = dmk_json_get_object(root, ckpt->source, "weight_map", DMK_JSON_REQUIRED, &map,
                                 reterr)) >= 0 &&
        (r = open_mapped_files(ckpt, map, reterr)) == 0 && (r = collect(ckpt, reterr)) == 0) {
        r = check_map(ckpt, map, reterr);
    }
    json_decref(root);
    return r;
}

static int open_all(struct dmk_checkpoint *ckpt, const char *dir, struct dmk_error *reterr)
{
    bool is_index = false;
    size_t file;
    int r = locate(ckpt, dir, &is_index, reterr);

    if (r < 0) {
        return r;
    }
    if (is_index) {
        return open_index(ckpt, reterr);
    }
    r = open_file(ckpt, SINGLE_NAME, &file, reterr);
    return r < 0 ? r : collect(ckpt, reterr);
}

int dmk_checkpoint_open(const char *dir, struct dmk_checkpoint **ret, struct dmk_error *reterr)
{
    struct dmk_checkpoint *ckpt = calloc(1, sizeof(*ckpt));
    int r;

    if (!ckpt || !(ckpt->files = calloc(MAX_FILES, sizeof(struct dmk_safetensors *)))) {
        free(ckpt);
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to open it", dir);
    }
    r = open_all(ckpt, dir, reterr);
    if (r < 0) {
        dmk_checkpoint_close(&ckpt);
        return r;
    }
    *ret = ckpt;
    return 0;
}

void dmk_checkpoint_close(struct dmk_checkpoint **checkpoint)
{
    struct dmk_checkpoint *c = *checkpoint;

    if (!c) {
        return;
    }
    for (size_t i = 0; i < c->n_files; i++) {
        dmk_safetensors_close(&c->files[i]);
    }
    free(c->files);
    free(c->entries);
    free(c->dir);
    free(c->source);
    free(c);
    *checkpoint = NULL;
}

const char *dmk_checkpoint_dir(const struct dmk_checkpoint *checkpoint)
{
    return checkpoint->dir;
}

const char *dmk_checkpoint_source(const struct dmk_checkpoint *checkpoint)
{
    return checkpoint->source;
}

size_t dmk_checkpoint_count(const struct dmk_checkpoint *checkpoint)
{
    return checkpoint->n_entries;
}

const struct dmk_checkpoint_entry *dmk_checkpoint_at(const struct dmk_checkpoint *checkpoint,
                                                     size_t index)
{
    dmk_assert(index < checkpoint->n_entries);
    return &checkpoint->entries[index];
}

const struct dmk_checkpoint_entry *dmk_checkpoint_find(const struct dmk_checkpoint *checkpoint,
                                                       const char *name, size_t *ret_index)
{
    size_t lo = 0, hi = checkpoint->n_entries;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        const int c = strcmp(name, checkpoint->entries[mid].tensor->name);

        if (c == 0) {
            if (ret_index) {
                *ret_index = mid;
            }
            return &checkpoint->entries[mid];
        }
        if (c < 0) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    return NULL;
}

size_t dmk_checkpoint_n_files(const struct dmk_checkpoint *checkpoint)
{
    return checkpoint->n_files;
}

const struct dmk_safetensors *dmk_checkpoint_file(const struct dmk_checkpoint *checkpoint,
                                                  size_t index)
{
    dmk_assert(index < checkpoint->n_files);
    return checkpoint->files[index];
}
