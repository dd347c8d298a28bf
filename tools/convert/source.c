/* The checkpoint that is converted, read with pread by the addresses of its tensors; see internal.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/model/checkpoint.h"
#include "common/model/cut_weights.h"
#include "tools/convert/internal.h"

static int compare_spans(const void *a, const void *b)
{
    const struct convert_span *x = a, *y = b;

    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static int open_span(struct convert_source *source, const struct dmk_safetensors *file,
                     struct dmk_error *reterr)
{
    struct convert_span *span = &source->spans[source->n_spans];
    const struct dmk_bytes data = dmk_safetensors_data(file);
    struct stat st;

    span->path = dmk_safetensors_path(file);
    span->fd = open(span->path, O_RDONLY | O_CLOEXEC);
    if (span->fd < 0) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be opened: %s", span->path,
                             strerror(errno));
    }
    source->n_spans++;
    if (fstat(span->fd, &st) < 0 || (uint64_t)st.st_size != dmk_safetensors_bytes(file).len) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: has changed while it was opened", span->path);
    }
    (void)posix_fadvise(span->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    span->begin = data.data;
    span->n_bytes = data.len;
    span->start = (uint64_t)st.st_size - data.len;
    span->changed[0] = st.st_mtim.tv_sec;
    span->changed[1] = st.st_mtim.tv_nsec;
    const int64_t facts[] = {st.st_size, span->changed[0], span->changed[1]};
    const char *name = strrchr(span->path, '/') + 1; /* the folder may be spelt in many ways */
    source->stamp = dmk_hash128(source->stamp, name, strlen(name));
    source->stamp = dmk_hash128(source->stamp, facts, sizeof(facts));
    return 0;
}

static int open_spans(struct convert_source *source, struct dmk_error *reterr)
{
    const struct dmk_checkpoint *ckpt = source->weights->checkpoint;
    const size_t n = dmk_checkpoint_n_files(ckpt);

    source->spans = calloc(n, sizeof(source->spans[0]));
    if (!source->spans) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a table of %zu files", n);
    }
    for (size_t i = 0; i < n; i++) {
        const int r = open_span(source, dmk_checkpoint_file(ckpt, i), reterr);

        if (r < 0) {
            return r;
        }
    }
    qsort(source->spans, source->n_spans, sizeof(source->spans[0]), compare_spans);
    return 0;
}

int convert_source_check(const struct convert_source *source, struct dmk_error *reterr)
{
    for (size_t i = 0; i < source->n_spans; i++) {
        const struct convert_span *span = &source->spans[i];
        struct stat st;

        if (fstat(span->fd, &st) < 0 || (uint64_t)st.st_size != span->start + span->n_bytes ||
            st.st_mtim.tv_sec != span->changed[0] || st.st_mtim.tv_nsec != span->changed[1]) {
            return dmk_error_set(reterr, -DMK_EIO,
                                 "%s: has changed while it was converted; start anew with --force "
                                 "when nobody writes to it",
                                 span->path);
        }
    }
    return 0;
}

static int read_sample(const void *ud, const void *address, uint64_t n_bytes, void *dst)
{
    return convert_source_read(ud, address, n_bytes, dst, NULL);
}

static int open_ranks(struct convert_source *source, struct dmk_layout layout,
                      struct dmk_error *reterr)
{
    const uint32_t n = layout.tp * layout.dp;

    source->ranks = calloc(n, sizeof(source->ranks[0]));
    if (!source->ranks) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %u ranks", n);
    }
    while (source->n_ranks < n) {
        const int r = dmk_weights_of_rank(source->weights, layout, source->n_ranks,
                                          &source->ranks[source->n_ranks], reterr);

        if (r < 0) {
            return r;
        }
        source->n_ranks++;
    }
    return 0;
}

static int open_all(struct convert_source *source, const char *dir, struct dmk_layout layout,
                    struct dmk_error *reterr)
{
    const struct dmk_weights_conf conf = {.dir = dir, .raw = true};
    int r = dmk_weights_open(&conf, &source->weights, reterr);

    if (r < 0) {
        return r;
    }
    if (source->weights->cut) {
        return dmk_error_set(
            reterr, -DMK_EINVAL,
            "%s: was converted already; name the checkpoint that it was made from, %.200s", dir,
            source->weights->cut->manifest.source);
    }
    if (source->weights->expert_format == DMK_EXPERTS_BF16) {
        return dmk_error_set(
            reterr, -DMK_ENOTSUP,
            "%s: its experts are BF16, and only MXFP4 ones are converted (BF16 would have to "
            "be rounded): take the checkpoint as it was published",
            dir);
    }
    if ((r = dmk_layout_check(&source->weights->shape, layout, false, reterr)) < 0 ||
        (r = open_spans(source, reterr)) < 0 || (r = open_ranks(source, layout, reterr)) < 0) {
        return r;
    }
    r = dmk_weights_model_id(source->weights, read_sample, source, &source->model_id);
    return r < 0 ? dmk_error_set(reterr, r, "%s: can not be read", dir) : 0;
}

int convert_source_open(const char *dir, struct dmk_layout layout,
                        struct convert_source *ret_source, struct dmk_error *reterr)
{
    struct convert_source source = {0};
    const int r = open_all(&source, dir, layout, reterr);

    if (r < 0) {
        convert_source_close(&source);
        return r;
    }
    *ret_source = source;
    return 0;
}

void convert_source_close(struct convert_source *source)
{
    for (size_t i = 0; i < source->n_spans; i++) {
        (void)close(source->spans[i].fd);
    }
    for (uint32_t i = 0; i < source->n_ranks; i++) {
        dmk_weights_rank_release(&source->ranks[i]);
    }
    free(source->ranks);
    free(source->spans);
    if (source->weights) {
        dmk_weights_close(&source->weights);
    }
    *source = (struct convert_source){0};
}

static const struct convert_span *find_span(const struct convert_source *source, const uint8_t *at,
                                            uint64_t n_bytes)
{
    size_t lo = 0, hi = source->n_spans;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;

        if (source->spans[mid].begin <= at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    dmk_assert(lo > 0);
    dmk_assert((uint64_t)(at - source->spans[lo - 1].begin) + n_bytes <=
               source->spans[lo - 1].n_bytes);
    return &source->spans[lo - 1];
}

int convert_source_read(const struct convert_source *source, const void *address, uint64_t n_bytes,
                        void *dst, struct dmk_error *reterr)
{
    const struct convert_span *span;
    uint64_t done = 0, start;

    if (n_bytes == 0) {
        return 0;
    }
    span = find_span(source, address, n_bytes);
    start = span->start + (uint64_t)((const uint8_t *)address - span->begin);
    while (done < n_bytes) {
        const ssize_t n =
            pread(span->fd, (char *)dst + done, n_bytes - done, (off_t)(start + done));

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return dmk_error_set(reterr, -DMK_EIO, "%s: can not be read at byte %" PRIu64 ": %s",
                                 span->path, start + done,
                                 n < 0 ? strerror(errno) : "the file ends there");
        }
        done += (uint64_t)n;
    }
    return 0;
}
