/* Mapping and checking of one .safetensors file; see safetensors.h. */
#include "common/model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/json/json.h"

#define MAX_HEADER_BYTES 100000000u /* the format's own limit */
#define MAX_DEPTH        4u
#define MAX_PATH_BYTES   4096u

struct dmk_safetensors {
    char *path;
    uint8_t *map;
    size_t map_bytes;
    struct dmk_bytes data;
    json_t *header; /* owns the names */
    struct dmk_tensor *tensors;
    size_t n_tensors;
};

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[DMK_N_DTYPES] = {
    [DMK_DTYPE_BOOL] = {"BOOL", 1},       [DMK_DTYPE_U8] = {"U8", 1},
    [DMK_DTYPE_I8] = {"I8", 1},           [DMK_DTYPE_F8_E4M3] = {"F8_E4M3", 1},
    [DMK_DTYPE_F8_E5M2] = {"F8_E5M2", 1}, [DMK_DTYPE_F8_E8M0] = {"F8_E8M0", 1},
    [DMK_DTYPE_U16] = {"U16", 2},         [DMK_DTYPE_I16] = {"I16", 2},
    [DMK_DTYPE_F16] = {"F16", 2},         [DMK_DTYPE_BF16] = {"BF16", 2},
    [DMK_DTYPE_U32] = {"U32", 4},         [DMK_DTYPE_I32] = {"I32", 4},
    [DMK_DTYPE_F32] = {"F32", 4},         [DMK_DTYPE_U64] = {"U64", 8},
    [DMK_DTYPE_I64] = {"I64", 8},         [DMK_DTYPE_F64] = {"F64", 8},
};

const char *dmk_dtype_name(enum dmk_dtype dtype)
{
    dmk_assert(dtype < DMK_N_DTYPES);
    return dtypes[dtype].name;
}

uint32_t dmk_dtype_bytes(enum dmk_dtype dtype)
{
    dmk_assert(dtype < DMK_N_DTYPES);
    return dtypes[dtype].bytes;
}

static int read_dtype(const json_t *entry, const char *where, struct dmk_tensor *tensor,
                      struct dmk_error *reterr)
{
    struct dmk_str word = {0};
    const int r = dmk_json_get_str(entry, where, "dtype", DMK_JSON_REQUIRED, &word, reterr);

    if (r < 0) {
        return r;
    }
    for (uint32_t i = 0; i < DMK_N_DTYPES; i++) {
        if (dmk_str_is(word, dtypes[i].name)) {
            tensor->dtype = (enum dmk_dtype)i;
            return 0;
        }
    }
    return dmk_error_set(reterr, -DMK_ENOTSUP, "%s: dtype \"%.40s\" is not known", where,
                         word.data);
}

/* The shape, and the number of bytes that it asks for. */
static int read_shape(const json_t *entry, const char *where, struct dmk_tensor *tensor,
                      uint64_t *ret_bytes, struct dmk_error *reterr)
{
    uint64_t bytes = dtypes[tensor->dtype].bytes;
    bool overflow = false, empty = false;
    json_t *shape = NULL;
    size_t rank;
    const int r = dmk_json_get_array(entry, where, "shape", DMK_JSON_REQUIRED, &shape, reterr);

    if (r < 0) {
        return r;
    }
    rank = json_array_size(shape);
    if (rank > DMK_TENSOR_MAX_RANK) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "%s: shape has %zu dimensions, more than %d",
                             where, rank, DMK_TENSOR_MAX_RANK);
    }
    for (size_t i = 0; i < rank; i++) {
        const json_t *dim = json_array_get(shape, i);
        char shown[DMK_JSON_SHOW_BYTES];

        if (!json_is_integer(dim) || json_integer_value(dim) < 0) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "%s: dimension %zu of the shape must be a count, not %s", where, i,
                                 dmk_json_show(dim, shown));
        }
        tensor->dims[i] = (uint64_t)json_integer_value(dim);
        empty = empty || tensor->dims[i] == 0;
        overflow = __builtin_mul_overflow(bytes, tensor->dims[i], &bytes) || overflow;
    }
    if (overflow && !empty) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: the shape overflows 64 bits", where);
    }
    tensor->rank = (uint32_t)rank;
    *ret_bytes = empty ? 0 : bytes;
    return 0;
}

static int read_offsets(const json_t *entry, const char *where, uint64_t want, uint64_t available,
                        uint64_t *ret_begin, struct dmk_error *reterr)
{
    uint64_t range[2];
    json_t *offsets = NULL;
    const int r =
        dmk_json_get_array(entry, where, "data_offsets", DMK_JSON_REQUIRED, &offsets, reterr);

    if (r < 0) {
        return r;
    }
    if (json_array_size(offsets) != 2) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: data_offsets must be [begin, end], not %zu values", where,
                             json_array_size(offsets));
    }
    for (size_t i = 0; i < 2; i++) {
        const json_t *v = json_array_get(offsets, i);
        char shown[DMK_JSON_SHOW_BYTES];

        if (!json_is_integer(v) || json_integer_value(v) < 0) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "%s: data_offsets must hold two byte counts, not %s", where,
                                 dmk_json_show(v, shown));
        }
        range[i] = (uint64_t)json_integer_value(v);
    }
    if (range[0] > range[1]) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: data_offsets begin at %llu, after their end %llu", where,
                             (unsigned long long)range[0], (unsigned long long)range[1]);
    }
    if (range[1] > available) {
        return dmk_error_set(
            reterr, -DMK_EFORMAT,
            "%s: data_offsets end at %llu but the file holds %llu bytes of data (cut off?)", where,
            (unsigned long long)range[1], (unsigned long long)available);
    }
    if (range[1] - range[0] != want) {
        return dmk_error_set(
            reterr, -DMK_EFORMAT, "%s: data_offsets cover %llu bytes but shape and dtype need %llu",
            where, (unsigned long long)(range[1] - range[0]), (unsigned long long)want);
    }
    *ret_begin = range[0];
    return 0;
}

static int read_tensor(struct dmk_safetensors *file, const char *name, const json_t *entry,
                       struct dmk_error *reterr)
{
    struct dmk_tensor *tensor = &file->tensors[file->n_tensors];
    char where[MAX_PATH_BYTES];
    uint64_t want = 0, begin = 0;
    int r;

    (void)snprintf(where, sizeof(where), "%.300s: tensor \"%.80s\"", file->path, name);
    if (name[0] == '\0') {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: the name is empty", where);
    }
    if (!json_is_object(entry)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: the entry must be an object", where);
    }
    tensor->name = name;
    if ((r = read_dtype(entry, where, tensor, reterr)) < 0 ||
        (r = read_shape(entry, where, tensor, &want, reterr)) < 0 ||
        (r = read_offsets(entry, where, want, file->data.len, &begin, reterr)) < 0) {
        return r;
    }
    tensor->data = file->data.data + begin;
    tensor->n_bytes = want;
    file->n_tensors++;
    return 0;
}

static int check_metadata(const struct dmk_safetensors *file, json_t *metadata,
                          struct dmk_error *reterr)
{
    const char *key;
    json_t *value;

    if (!json_is_object(metadata)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: __metadata__ must be an object",
                             file->path);
    }
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value)) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "%s: __metadata__ entry \"%.80s\" must be a string", file->path,
                                 key);
        }
    }
    return 0;
}

static int compare_begin(const void *a, const void *b)
{
    const struct dmk_tensor *x = a, *y = b;

    if (x->data != y->data) {
        return x->data < y->data ? -1 : 1;
    }
    return x->n_bytes == y->n_bytes ? strcmp(x->name, y->name) : x->n_bytes < y->n_bytes ? -1 : 1;
}

/* The data must be the tensors one after the other and nothing else. */
static int check_packing(struct dmk_safetensors *file, struct dmk_error *reterr)
{
    const char *prev = "the header";
    uint64_t end = 0;

    if (file->n_tensors > 0) {
        qsort(file->tensors, file->n_tensors, sizeof(file->tensors[0]), compare_begin);
    }
    for (size_t i = 0; i < file->n_tensors; i++) {
        const struct dmk_tensor *t = &file->tensors[i];
        const uint64_t begin = (uint64_t)(t->data - file->data.data);

        if (begin < end) {
            return dmk_error_set(
                reterr, -DMK_EFORMAT,
                "%s: tensor \"%.80s\": its data begin at %llu and overlap tensor \"%.80s\", "
                "which ends at %llu",
                file->path, t->name, (unsigned long long)begin, prev, (unsigned long long)end);
        }
        if (begin > end) {
            return dmk_error_set(
                reterr, -DMK_EFORMAT,
                "%s: tensor \"%.80s\": its data begin at %llu but bytes from %llu belong to "
                "no tensor",
                file->path, t->name, (unsigned long long)begin, (unsigned long long)end);
        }
        end = begin + t->n_bytes;
        prev = t->name;
    }
    if (end != file->data.len) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: the tensors end at %llu but the file holds %llu bytes of data",
                             file->path, (unsigned long long)end,
                             (unsigned long long)file->data.len);
    }
    return 0;
}

static int map_file(struct dmk_safetensors *file, struct dmk_error *reterr)
{
    struct stat st;
    void *map;
    int r = 0;
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* of a pipe: do not wait */

    if (fd < 0) {
        return dmk_error_set(reterr, errno == ENOENT ? -DMK_ENOENT : -DMK_EIO,
                             "%s: can not be opened: %s", file->path, strerror(errno));
    }
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        r = dmk_error_set(reterr, -DMK_EFORMAT, "%s: not a regular file", file->path);
    } else if (st.st_size < 8) {
        r = dmk_error_set(reterr, -DMK_EFORMAT,
                          "%s: %lld bytes are too few for a safetensors file (cut off?)",
                          file->path, (long long)st.st_size);
    } else {
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            r = dmk_error_set(reterr, -DMK_EIO, "%s: can not be mapped: %s", file->path,
                              strerror(errno));
        } else {
            file->map = map;
            file->map_bytes = (size_t)st.st_size;
        }
    }
    close(fd);
    return r;
}

/* Bounds of the header, then its JSON. */
static int parse_header(struct dmk_safetensors *file, struct dmk_error *reterr)
{
    char name[MAX_PATH_BYTES];
    uint64_t len = 0;
    int r;

    dmk_assert(file->map && file->map_bytes >= 8); /* by map_file */
    for (int i = 7; i >= 0; i--) {
        len = len << 8 | file->map[i];
    }
    if (len > MAX_HEADER_BYTES) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: the header claims %llu bytes, more than the format's limit of %u "
                             "(not a safetensors file?)",
                             file->path, (unsigned long long)len, MAX_HEADER_BYTES);
    }
    if (len > file->map_bytes - 8) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: the header claims %llu bytes but only %zu follow (cut off?)",
                             file->path, (unsigned long long)len, file->map_bytes - 8);
    }
    if (len == 0 || file->map[8] != '{') {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: the header must begin with '{'",
                             file->path);
    }
    (void)snprintf(name, sizeof(name), "%s: header", file->path);
    r = dmk_json_parse((struct dmk_str){(const char *)file->map + 8, (size_t)len}, name, MAX_DEPTH,
                       &file->header, reterr);
    if (r < 0) {
        return r;
    }
    file->data.data = file->map + 8 + len;
    file->data.len = file->map_bytes - 8 - (size_t)len;
    return 0;
}

static int read_header(struct dmk_safetensors *file, struct dmk_error *reterr)
{
    const char *name;
    json_t *entry;
    size_t n;
    int r = parse_header(file, reterr);

    if (r < 0) {
        return r;
    }
    n = json_object_size(file->header);
    file->tensors = calloc(n ? n : 1, sizeof(file->tensors[0]));
    if (!file->tensors) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for %zu tensors", file->path, n);
    }
    json_object_foreach(file->header, name, entry)
    {
        r = strcmp(name, "__metadata__") == 0 ? check_metadata(file, entry, reterr)
                                              : read_tensor(file, name, entry, reterr);
        if (r < 0) {
            return r;
        }
    }
    return check_packing(file, reterr);
}

int dmk_safetensors_open(const char *path, struct dmk_safetensors **ret, struct dmk_error *reterr)
{
    struct dmk_safetensors *file = calloc(1, sizeof(*file));
    int r;

    if (!file || !(file->path = strdup(path))) {
        free(file);
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to open it", path);
    }
    if ((r = map_file(file, reterr)) < 0 || (r = read_header(file, reterr)) < 0) {
        dmk_safetensors_close(&file);
        return r;
    }
    *ret = file;
    return 0;
}

void dmk_safetensors_close(struct dmk_safetensors **file)
{
    struct dmk_safetensors *f = *file;

    if (!f) {
        return;
    }
    if (f->map) {
        (void)munmap(f->map, f->map_bytes);
    }
    json_decref(f->header);
    free(f->tensors);
    free(f->path);
    free(f);
    *file = NULL;
}

const char *dmk_safetensors_path(const struct dmk_safetensors *file)
{
    return file->path;
}

size_t dmk_safetensors_count(const struct dmk_safetensors *file)
{
    return file->n_tensors;
}

const struct dmk_tensor *dmk_safetensors_at(const struct dmk_safetensors *file, size_t index)
{
    dmk_assert(index < file->n_tensors);
    return &file->tensors[index];
}

struct dmk_bytes dmk_safetensors_data(const struct dmk_safetensors *file)
{
    return file->data;
}

struct dmk_bytes dmk_safetensors_bytes(const struct dmk_safetensors *file)
{
    return (struct dmk_bytes){file->map, file->map_bytes};
}
