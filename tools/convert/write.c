/* Making one file of a converted folder: header, tensors, zeros between them; see internal.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"
#include "tools/convert/internal.h"

#define FLUSH_BYTES ((uint64_t)16 << 20) /* so that the disk works while we do */

/* One file on its way out. Its bytes pass the checksum in order. */
struct writer {
    struct convert_run *run;
    const struct dmk_cut_file *file;
    const struct dmk_rank_weights *weights; /* of the rank that the file's tensors are cut for */
    int fd;
    struct dmk_hasher *hasher;
    uint64_t at;
    uint64_t flushed; /* the disk has been told to write up to here */
    uint8_t *piece;   /* [CONVERT_PIECE] */
    uint8_t *codes;   /* FP8: of 128 rows */
    float *scales;    /* FP8: of the tensor that comes next */
    struct convert_done *done;
    char name[80]; /* with .part */
    struct dmk_error *reterr;
};

int convert_write_failed(const struct convert_run *run, const char *name, int err,
                         struct dmk_error *reterr)
{
    if (err == ENOSPC || err == EDQUOT) {
        return dmk_error_set(
            reterr, -DMK_EFULL,
            "%s/%s: no room is left on the disk; make some and run the same command again, it "
            "goes on where it stopped",
            run->conf->dst, name);
    }
    return dmk_error_set(reterr, -DMK_EIO, "%s/%s: can not be written: %s", run->conf->dst, name,
                         strerror(err));
}

int convert_write_all(int fd, const void *data, size_t n_bytes)
{
    size_t done = 0;

    while (done < n_bytes) {
        const ssize_t n = write(fd, (const char *)data + done, n_bytes - done);

        if (n < 0 && errno != EINTR) {
            return errno;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int put(struct writer *w, const void *data, uint64_t n_bytes)
{
    const int err = convert_write_all(w->fd, data, n_bytes);

    if (err) {
        return convert_write_failed(w->run, w->name, err, w->reterr);
    }
    dmk_hasher_add(w->hasher, data, n_bytes);
    w->at += n_bytes;
    atomic_fetch_add(&w->run->done_bytes, n_bytes);
    if (w->at - w->flushed >= FLUSH_BYTES) {
        (void)sync_file_range(w->fd, (off_t)w->flushed, (off_t)(w->at - w->flushed),
                              SYNC_FILE_RANGE_WRITE);
        w->flushed = w->at;
    }
    return 0;
}

static int put_zeros_to(struct writer *w, uint64_t offset)
{
    static const uint8_t zeros[DMK_CUT_ALIGN];

    dmk_assert(offset >= w->at && offset - w->at < DMK_CUT_ALIGN);
    return put(w, zeros, offset - w->at);
}

/* ---- scales ---- */

static bool is_scales(const struct dmk_cut_tensor *t)
{
    const size_t len = strlen(t->name);

    return len > 7 && strcmp(t->name + len - 7, "_scales") == 0;
}

/* 255 is no number, and above the limit the device's product has no multiplier. */
static int check_scales(struct writer *w, const struct dmk_cut_tensor *t, const uint8_t *scales,
                        uint64_t first, uint64_t n, uint64_t rows, uint64_t cols)
{
    const uint32_t limit = t->dtype == DMK_DTYPE_U8 ? DMK_MXPACK_MAX_SCALE : 254;
    const uint64_t groups = cols / DMK_MXFP4_BLOCK;
    uint8_t most = 0;

    for (uint64_t i = 0; i < n; i++) {
        most = scales[i] > most ? scales[i] : most;
    }
    if (most <= limit) {
        return 0;
    }
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t row = (first + i) / groups;

        if (scales[i] > limit) {
            char name[sizeof(t->name) + 8]; /* the checkpoint's, where codes of FP8 are made */

            (void)snprintf(name, sizeof(name), "%s%s", t->name, is_scales(t) ? "" : "_scales");
            return dmk_scale_refused(w->run->conf->src, name, t->begin + row / rows, row % rows,
                                     scales[i], w->reterr);
        }
    }
    return 0;
}

/* ---- tensors as they are ---- */

static int copy_flat(struct writer *w, const struct dmk_cut_tensor *t, const uint8_t *src)
{
    for (uint64_t at = 0; at < t->n_bytes; at += CONVERT_PIECE) {
        const uint64_t n = t->n_bytes - at < CONVERT_PIECE ? t->n_bytes - at : CONVERT_PIECE;
        int r = convert_source_read(w->run->source, src + at, n, w->piece, w->reterr);

        if (r == 0 && is_scales(t)) {
            r = check_scales(w, t, w->piece, at, n, t->dims[1], t->dims[2] * DMK_MXFP4_BLOCK);
        }
        if (r < 0 || (r = put(w, w->piece, n)) < 0) {
            return r;
        }
    }
    return 0;
}

/* Columns of a matrix, row after row. */
static int copy_columns(struct writer *w, const struct dmk_cut_tensor *t, const uint8_t *src)
{
    const uint64_t row_bytes = t->dims[1] * dmk_dtype_bytes(t->dtype);
    const uint64_t stride = t->of * dmk_dtype_bytes(t->dtype);
    uint64_t filled = 0;
    int r = 0;

    dmk_assert(row_bytes <= CONVERT_PIECE);
    for (uint64_t row = 0; row < t->dims[0] && r == 0; row++) {
        r = convert_source_read(w->run->source, src + row * stride, row_bytes, w->piece + filled,
                                w->reterr);
        filled += row_bytes;
        if (r == 0 && (filled + row_bytes > CONVERT_PIECE || row + 1 == t->dims[0])) {
            r = put(w, w->piece, filled);
            filled = 0;
        }
    }
    return r;
}

/* ---- MXFP4 made FP8 ---- */

struct strip {
    const uint8_t *blocks, *scales; /* of MXFP4 */
    uint32_t rows, cols;
};

/* The largest difference that FP8 makes in a strip of at most 128 rows. */
static double largest_error(const struct strip *s, const uint8_t *codes, const float *scales)
{
    double most = 0;

    for (uint64_t i = 0; i < (uint64_t)s->rows * s->cols; i++) {
        const uint8_t byte = s->blocks[i / 2];
        const double is = dmk_e2m1_to_f32(i % 2 ? byte >> 4 : byte & 15) *
                          (double)dmk_ue8m0_to_f32(s->scales[i / DMK_MXFP4_BLOCK]);
        const double becomes =
            dmk_e4m3_to_f32(codes[i]) * (double)scales[i % s->cols / DMK_FP8_BLOCK];
        const double error = fabs(is - becomes);

        most = error > most ? error : most;
    }
    return most;
}

static int note_inexact(struct writer *w, const struct dmk_cut_tensor *t, uint32_t expert,
                        bool gate_up, uint64_t n_blocks, double error)
{
    struct convert_done *d = w->done;
    struct dmk_inexact *last = d->n_inexact ? &d->inexact[d->n_inexact - 1] : NULL;
    struct dmk_inexact *more;

    if (last && last->expert == expert && last->gate_up == gate_up) {
        last->n_blocks += n_blocks;
        last->largest_error = error > last->largest_error ? error : last->largest_error;
        return 0;
    }
    more = realloc(d->inexact, (d->n_inexact + 1) * sizeof(*more));
    if (!more) {
        return dmk_error_set(w->reterr, -DMK_ENOMEM,
                             "no memory to note that a matrix is not exact");
    }
    more[d->n_inexact++] = (struct dmk_inexact){t->layer, expert, gate_up, n_blocks, error};
    d->inexact = more;
    return 0;
}

/* Rows [row, row + strip.rows) of a local expert's matrix. */
static int make_strip(struct writer *w, const struct dmk_cut_tensor *t,
                      const struct dmk_expert_matrix *m, uint32_t expert, uint32_t row,
                      struct strip s, float *scales)
{
    const uint64_t first = ((uint64_t)expert * t->dims[1] + row) * s.cols; /* element */
    const uint64_t n = (uint64_t)s.rows * s.cols;
    uint8_t *blocks = w->piece, *from_scales = w->piece + n / 2;
    size_t n_inexact;
    int r;

    if ((r = convert_source_read(w->run->source, m->blocks + first / 2, n / 2, blocks, w->reterr)) <
            0 ||
        (r = convert_source_read(w->run->source, m->scales + first / DMK_MXFP4_BLOCK,
                                 n / DMK_MXFP4_BLOCK, from_scales, w->reterr)) < 0 ||
        (r = check_scales(w, t, from_scales, first / DMK_MXFP4_BLOCK, n / DMK_MXFP4_BLOCK,
                          t->dims[1], s.cols)) < 0) {
        return r;
    }
    s.blocks = blocks;
    s.scales = from_scales;
    n_inexact = dmk_mxfp4_to_fp8(blocks, from_scales, s.rows, s.cols, w->codes, scales);
    if (n_inexact > 0) {
        const bool gate_up = t->place == offsetof(struct dmk_layer_weights, gate_up.blocks);

        r = note_inexact(w, t, (uint32_t)t->begin + expert, gate_up, n_inexact,
                         largest_error(&s, w->codes, scales));
        if (r < 0) {
            return r;
        }
    }
    return put(w, w->codes, n);
}

/* [experts][rows][cols] of codes; their scales wait for the next tensor. */
static int make_fp8(struct writer *w, const struct dmk_cut_tensor *t,
                    const struct dmk_expert_matrix *m)
{
    const uint32_t rows = (uint32_t)t->dims[1], cols = (uint32_t)t->dims[2];
    const uint32_t across = (cols + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK;
    float *scales = w->scales;

    for (uint32_t e = 0; e < t->dims[0]; e++) {
        for (uint32_t row = 0; row < rows; row += DMK_FP8_BLOCK) {
            const struct strip s = {.rows = rows - row < DMK_FP8_BLOCK ? rows - row : DMK_FP8_BLOCK,
                                    .cols = cols};
            const int r = make_strip(w, t, m, e, row, s, scales);

            if (r < 0) {
                return r;
            }
            scales += across;
        }
    }
    return 0;
}

static int put_tensor(struct writer *w, const struct dmk_cut_tensor *t)
{
    const void *base =
        t->layer == DMK_CUT_GLOBAL ? (const void *)w->weights : &w->weights->layers[t->layer];
    const uint8_t *src;
    int r = put_zeros_to(w, t->offset);

    if (r < 0) {
        return r;
    }
    if (t->dtype == DMK_DTYPE_F8_E4M3) {
        const bool gate_up = t->place == offsetof(struct dmk_layer_weights, gate_up.blocks);
        const struct dmk_layer_weights *layer = &w->weights->layers[t->layer];

        return make_fp8(w, t, gate_up ? &layer->gate_up : &layer->down);
    }
    if (t->dtype == DMK_DTYPE_F32) {
        return put(w, w->scales, t->n_bytes);
    }
    memcpy(&src, (const char *)base + t->place, sizeof(src));
    return t->axis == 1 ? copy_columns(w, t, src) : copy_flat(w, t, src);
}

static int put_header(struct writer *w)
{
    struct dmk_buf text;
    int r;

    dmk_buf_init(&text, 0);
    dmk_cut_header(w->run->cut, w->file, &text);
    r = text.failed
            ? dmk_error_set(w->reterr, -DMK_ENOMEM, "no memory for the header of %s", w->file->name)
            : put(w, text.data, text.len);
    dmk_buf_fini(&text);
    return r;
}

/* Rows of 128 at most are made at once; the piece has room for theirs as MXFP4. */
static int alloc_buffers(struct writer *w)
{
    const struct dmk_cut *cut = w->run->cut;
    uint64_t piece = CONVERT_PIECE, codes = 0, scales = 0;

    for (uint32_t i = w->file->first; i < w->file->first + w->file->n_tensors; i++) {
        const struct dmk_cut_tensor *t = &cut->tensors[i];

        if (t->dtype == DMK_DTYPE_F8_E4M3) {
            const uint64_t strip = DMK_FP8_BLOCK * t->dims[2];

            codes = strip > codes ? strip : codes;
            piece = strip > piece ? strip : piece;
        } else if (t->dtype == DMK_DTYPE_F32) {
            scales = t->n_bytes > scales ? t->n_bytes : scales;
        }
    }
    w->hasher = dmk_hasher_new();
    w->piece = malloc(piece);
    w->codes = codes ? malloc(codes) : NULL;
    w->scales = scales ? malloc(scales) : NULL;
    return w->hasher && w->piece && (!codes || w->codes) && (!scales || w->scales)
               ? 0
               : dmk_error_set(w->reterr, -DMK_ENOMEM, "no memory to write %s: %" PRIu64 " bytes",
                               w->file->name, piece + codes + scales);
}

static int fill_file(struct writer *w)
{
    int r = put_header(w);

    for (uint32_t i = 0; i < w->file->n_tensors && r == 0; i++) {
        if (atomic_load(&w->run->failure) != 0) {
            return -DMK_ECANCELLED; /* another thread has told why */
        }
        r = put_tensor(w, &w->run->cut->tensors[w->file->first + i]);
    }
    if (r == 0 && fsync(w->fd) < 0) {
        r = convert_write_failed(w->run, w->name, errno, w->reterr);
    }
    return r;
}

int convert_write_file(struct convert_run *run, const struct dmk_cut_file *file,
                       struct convert_done *ret_done, struct dmk_error *reterr)
{
    struct convert_done done = {0};
    const uint32_t rank = file->kind == DMK_CUT_SHARED ? 0 : file->index;
    struct writer w = {.run = run,
                       .file = file,
                       .weights = &run->source->ranks[rank],
                       .done = &done,
                       .fd = -1,
                       .reterr = reterr};
    int r = alloc_buffers(&w);

    (void)snprintf(w.name, sizeof(w.name), "%s.part", file->name);
    if (r == 0) {
        w.fd = openat(run->dir_fd, w.name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (w.fd < 0) {
            r = convert_write_failed(run, w.name, errno, reterr);
        }
    }
    /* Room is taken at once where the file system can, so that a full disk shows early. */
    if (r == 0 && fallocate(w.fd, 0, 0, (off_t)file->n_bytes) < 0 &&
        (errno == ENOSPC || errno == EDQUOT)) {
        r = convert_write_failed(run, w.name, errno, reterr);
    }
    if (r == 0) {
        r = fill_file(&w);
    }
    if (r == 0) {
        dmk_assert(w.at == file->n_bytes);
        done.n_bytes = w.at;
        done.checksum = dmk_hasher_end(w.hasher);
        *ret_done = done;
    } else {
        free(done.inexact);
    }
    if (w.fd >= 0) {
        (void)close(w.fd);
    }
    if (r < 0) {
        (void)unlinkat(run->dir_fd, w.name, 0);
    }
    dmk_hasher_free(w.hasher);
    free(w.piece);
    free(w.codes);
    free(w.scales);
    return r;
}

/* Whether the file has the bytes that the checksum is over. Those that were read are counted when it has. */
static bool holds(struct convert_run *run, int fd, const struct convert_done *done,
                  struct dmk_hasher *hasher, uint8_t *piece)
{
    uint64_t at = 0;
    struct stat st;

    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != done->n_bytes) {
        return false;
    }
    if (run->verifying) { /* what the disk has, not what the cache has */
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    }
    while (at < done->n_bytes) {
        const ssize_t n = pread(fd, piece, CONVERT_PIECE, (off_t)at);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        dmk_hasher_add(hasher, piece, (size_t)n);
        atomic_fetch_add(&run->done_bytes, (uint64_t)n);
        at += (uint64_t)n;
    }
    if (at == done->n_bytes && dmk_id128_equal(dmk_hasher_end(hasher), done->checksum)) {
        return true;
    }
    atomic_fetch_sub(&run->done_bytes, at);
    return false;
}

int convert_check_file(struct convert_run *run, const char *name, const struct convert_done *done,
                       struct dmk_error *reterr)
{
    const int fd = openat(run->dir_fd, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct dmk_hasher *hasher = dmk_hasher_new();
    uint8_t *piece = malloc(CONVERT_PIECE);
    int r;

    if (!hasher || !piece) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory to read %s", name);
    } else {
        r = fd >= 0 && holds(run, fd, done, hasher, piece);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    dmk_hasher_free(hasher);
    free(piece);
    return r;
}
