/* Reading all of the weights once, by several threads: into the page cache and this process's tables, under the
 * checksums of a manifest, and with an eye on MXFP4 scales that stand for no number.
 *
 * Files with a checksum are read from front to back, each by one thread; of others any thread takes the next
 * piece, since they may be few and large. Then the scales, which are in memory by now. The caller watches. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "common/base/hash.h"
#include "common/model/checkpoint.h"
#include "common/model/cut_weights.h"
#include "common/model/weights_internal.h"
#include "kernels/pack.h"

#define MAX_THREADS 16u
#define PIECE_BYTES ((size_t)16 << 20)
#define WATCH_NS    50000000

struct read_file {
    const char *path;
    struct dmk_bytes bytes;
    const struct dmk_manifest_file *want; /* its checksum, or NULL */
};

/* [experts][rows][groups] of scales. */
struct read_scales {
    const struct read_file *file;
    const char *tensor;
    const uint8_t *data;
    uint64_t n, rows, groups, first_expert;
};

struct reader {
    struct read_file *files;
    size_t n_files;
    size_t *first_piece; /* [n_files + 1] */
    struct read_scales *scales;
    size_t n_scales;
    atomic_size_t next_piece, next_scales;
    atomic_ullong done_bytes;
    atomic_uint n_running;
    uint64_t total;
    pthread_mutex_t lock;
    struct dmk_scale_top top; /* under lock, as the next two */
    int status;
    struct dmk_error error;
};

static void fail(struct reader *r, int status, const struct dmk_error *error)
{
    (void)pthread_mutex_lock(&r->lock);
    if (r->status == 0) {
        r->status = status;
        r->error = *error;
    }
    (void)pthread_mutex_unlock(&r->lock);
}

static bool has_failed(struct reader *r)
{
    bool failed;

    (void)pthread_mutex_lock(&r->lock);
    failed = r->status != 0;
    (void)pthread_mutex_unlock(&r->lock);
    return failed;
}

/* Brings a piece of a file's mapping in; where the kernel can not do it at once, page by page. A page that can not be
 * had would end the process when it is touched. */
static int fault_in(const struct read_file *f, size_t at, size_t len, struct dmk_error *reterr)
{
    const uint8_t *data = f->bytes.data + at;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)data / page * page;
    volatile uint8_t sink;

#ifdef MADV_POPULATE_READ
    if (madvise((void *)begin, (uintptr_t)data + len - begin, MADV_POPULATE_READ) == 0) {
        return 0;
    }
    if (errno == EFAULT || errno == EHWPOISON) {
        return dmk_error_set(reterr, -DMK_EIO,
                             "%s: can not be read between bytes %zu and %zu (cut off meanwhile, or "
                             "a fault of the disk)",
                             f->path, at, at + len);
    }
#else
    (void)begin;
#endif
    for (size_t i = 0; i < len; i += page) {
        sink = data[i];
    }
    (void)sink;
    return 0;
}

static int check_sum(struct reader *r, const struct read_file *f, struct dmk_error *reterr)
{
    struct dmk_hasher *hasher = dmk_hasher_new();
    struct dmk_id128 is;
    char has[33], wants[33];
    int status = 0;

    if (!hasher) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to read it", f->path);
    }
    for (size_t at = 0; at < f->bytes.len && status == 0; at += PIECE_BYTES) {
        const size_t n = f->bytes.len - at < PIECE_BYTES ? f->bytes.len - at : PIECE_BYTES;

        status = fault_in(f, at, n, reterr);
        if (status == 0) {
            dmk_hasher_add(hasher, f->bytes.data + at, n);
            atomic_fetch_add(&r->done_bytes, n);
        }
    }
    is = dmk_hasher_end(hasher);
    dmk_hasher_free(hasher);
    if (status < 0) {
        return status;
    }
    if (dmk_id128_equal(is, f->want->checksum)) {
        return 0;
    }
    dmk_id128_format(is, has);
    dmk_id128_format(f->want->checksum, wants);
    return dmk_error_set(reterr, -DMK_EFORMAT,
                         "%s: its contents have checksum %s but the manifest says %s: the file is "
                         "damaged, convert the "
                         "checkpoint again",
                         f->path, has, wants);
}

static void read_piece(struct reader *r, size_t piece)
{
    struct dmk_error error = {0};
    const struct read_file *f;
    size_t lo = 0, hi = r->n_files, at, n;
    int status;

    while (hi - lo > 1) { /* the file of the piece */
        const size_t mid = lo + (hi - lo) / 2;

        if (r->first_piece[mid] <= piece) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    f = &r->files[lo];
    if (f->want) {
        status = check_sum(r, f, &error);
    } else {
        at = (piece - r->first_piece[lo]) * PIECE_BYTES;
        n = f->bytes.len - at < PIECE_BYTES ? f->bytes.len - at : PIECE_BYTES;
        status = fault_in(f, at, n, &error);
        atomic_fetch_add(&r->done_bytes, status == 0 ? n : 0);
    }
    if (status < 0) {
        fail(r, status, &error);
    }
}

static uint8_t largest(const uint8_t *data, uint64_t n)
{
    uint8_t most = 0;

    for (uint64_t i = 0; i < n; i++) {
        most = data[i] > most ? data[i] : most;
    }
    return most;
}

/* Another thread may still be at the piece that they lie in, so they are brought in here too, which costs nothing where
 * they are. */
static void look_at_scales(struct reader *r, const struct read_scales *s)
{
    struct dmk_error error = {0};
    struct dmk_scale_top top;
    const int status =
        s->n ? fault_in(s->file, (size_t)(s->data - s->file->bytes.data), s->n, &error) : 0;

    if (status < 0) {
        fail(r, status, &error);
        return;
    }
    const uint8_t most = largest(s->data, s->n);
    const uint8_t *at = s->n ? memchr(s->data, most, s->n) : NULL;

    if (!at) {
        return;
    }
    const uint64_t row = (uint64_t)(at - s->data) / s->groups;

    top = (struct dmk_scale_top){most, s->file->path, s->tensor, s->first_expert + row / s->rows,
                                 row % s->rows};
    if (most == 255) {
        fail(r, dmk_scale_refused(s->file->path, s->tensor, top.expert, top.row, most, &error),
             &error);
        return;
    }
    (void)pthread_mutex_lock(&r->lock);
    if (!r->top.tensor || most > r->top.scale) {
        r->top = top;
    }
    (void)pthread_mutex_unlock(&r->lock);
}

static void *run_reader(void *arg)
{
    struct reader *r = arg;
    size_t i;

    while (!has_failed(r) &&
           (i = atomic_fetch_add(&r->next_piece, 1)) < r->first_piece[r->n_files]) {
        read_piece(r, i);
    }
    while (!has_failed(r) && (i = atomic_fetch_add(&r->next_scales, 1)) < r->n_scales) {
        look_at_scales(r, &r->scales[i]);
    }
    atomic_fetch_sub(&r->n_running, 1);
    return NULL;
}

/* A thread that can not be had costs time only, as long as there is one. */
static int run_threads(struct reader *r, const struct dmk_weights_conf *conf,
                       struct dmk_error *reterr)
{
    const long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    const uint32_t want = n_cpus < 1                   ? 1
                          : n_cpus > (long)MAX_THREADS ? MAX_THREADS
                                                       : (uint32_t)n_cpus;
    pthread_t threads[MAX_THREADS];
    uint32_t n = 0;

    atomic_store(&r->n_running, want);
    while (n < want && pthread_create(&threads[n], NULL, run_reader, r) == 0) {
        n++;
    }
    if (n == 0) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no thread could be started to read the weights");
    }
    atomic_fetch_sub(&r->n_running, want - n);
    while (atomic_load(&r->n_running) > 0) {
        (void)nanosleep(&(struct timespec){.tv_nsec = WATCH_NS}, NULL);
        if (conf->on_progress) {
            conf->on_progress(conf->ud, atomic_load(&r->done_bytes), r->total);
        }
    }
    while (n > 0) {
        (void)pthread_join(threads[--n], NULL);
    }
    if (r->status >= 0 && conf->on_progress) {
        conf->on_progress(conf->ud, atomic_load(&r->done_bytes), r->total); /* the end too */
    }
    if (r->status < 0 && reterr) {
        *reterr = r->error;
    }
    return r->status;
}

static bool is_scales(const char *name)
{
    const size_t len = strlen(name);

    return len >= 6 && strcmp(name + len - 6, "scales") == 0;
}

static void add_file(struct reader *r, const struct dmk_safetensors *file,
                     const struct dmk_manifest_file *want, uint64_t first_expert)
{
    const struct dmk_bytes bytes = dmk_safetensors_bytes(file);
    const size_t n_pieces = want ? 1 : (bytes.len + PIECE_BYTES - 1) / PIECE_BYTES;

    r->files[r->n_files] = (struct read_file){dmk_safetensors_path(file), bytes, want};
    r->first_piece[r->n_files + 1] = r->first_piece[r->n_files] + n_pieces;
    r->n_files++;
    r->total += bytes.len;
    for (size_t i = 0; i < dmk_safetensors_count(file); i++) {
        const struct dmk_tensor *t = dmk_safetensors_at(file, i);

        if (is_scales(t->name) && t->rank == 3 && t->dims[1] && t->dims[2]) {
            r->scales[r->n_scales++] = (struct read_scales){&r->files[r->n_files - 1],
                                                            t->name,
                                                            t->data,
                                                            t->n_bytes,
                                                            t->dims[1],
                                                            t->dims[2],
                                                            first_expert};
        }
    }
}

static size_t count_tensors(const struct dmk_safetensors *file)
{
    return dmk_safetensors_count(file);
}

/* Without the head where the caller has no use for it. */
static bool is_wanted(const struct dmk_cut_file *f, const struct dmk_weights_conf *conf)
{
    return f->kind != DMK_CUT_HEAD || !conf->no_head;
}

static int list_files(struct reader *r, const struct dmk_weights *w,
                      const struct dmk_weights_conf *conf)
{
    const struct dmk_checkpoint *ckpt = w->checkpoint;
    const struct dmk_cut_weights *cut = w->cut;
    const size_t n = cut ? cut->plan.n_files : dmk_checkpoint_n_files(ckpt);
    size_t n_tensors = 0;

    for (size_t i = 0; i < n; i++) {
        n_tensors += count_tensors(cut ? cut->files[i] : dmk_checkpoint_file(ckpt, i));
    }
    r->files = calloc(n + 1, sizeof(r->files[0]));
    r->first_piece = calloc(n + 1, sizeof(r->first_piece[0]));
    r->scales = calloc(n_tensors + 1, sizeof(r->scales[0]));
    if (!r->files || !r->first_piece || !r->scales) {
        return -DMK_ENOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        if (!cut) {
            add_file(r, dmk_checkpoint_file(ckpt, i), NULL, 0);
        } else if (is_wanted(&cut->plan.files[i], conf)) {
            const struct dmk_cut_file *f = &cut->plan.files[i];

            add_file(r, cut->files[i], conf->no_verify ? NULL : &cut->manifest.files[i],
                     f->kind == DMK_CUT_EXPERTS ? cut->plan.tensors[f->first].begin : 0);
        }
    }
    return 0;
}

int dmk_weights_prefault(struct dmk_weights *w, const struct dmk_weights_conf *conf,
                         struct dmk_error *reterr)
{
    struct reader r = {.lock = PTHREAD_MUTEX_INITIALIZER};
    int status = list_files(&r, w, conf);

    if (status < 0) {
        (void)dmk_error_set(reterr, status, "%s: no memory to read its weights", conf->dir);
    } else {
        status = run_threads(&r, conf, reterr);
        w->top_scale = r.top;
    }
    free(r.files);
    free(r.first_piece);
    free(r.scales);
    return status;
}

int dmk_scale_refused(const char *path, const char *tensor, uint64_t expert, uint64_t row,
                      unsigned scale, struct dmk_error *reterr)
{
    const char *why =
        scale == 255 ? "stands for no number" : "is above what the device's MXFP4 product can hold";

    return dmk_error_set(
        reterr, -DMK_EFORMAT,
        "%.250s: tensor \"%.80s\": expert %llu, row %llu has the scale %u, which %s (%u at most)",
        path, tensor, (unsigned long long)expert, (unsigned long long)row, scale, why,
        scale == 255 ? 254 : DMK_MXPACK_MAX_SCALE);
}
