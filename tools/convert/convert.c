/* A conversion from end to end; see convert.h. The caller's thread plans, watches and reports; the others take
 * file after file. */
#include "tools/convert/convert.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/base/file.h"
#include "common/model/checkpoint.h"
#include "tools/convert/internal.h"

#define MAX_JOBS        64u
#define DEFAULT_JOBS    8u
#define MAX_SMALL_BYTES (128u << 20)

uint64_t dmk_convert_memory(uint32_t n_jobs)
{
    return (64ull + 16ull * n_jobs) << 20;
}

static int check_space(const struct convert_run *run, struct dmk_error *reterr)
{
    uint64_t need = 0, available;
    struct statvfs fs;

    for (uint32_t i = 0; i < run->cut->n_files; i++) {
        need += run->done[i].noted ? 0 : run->cut->files[i].n_bytes;
    }
    if (fstatvfs(run->dir_fd, &fs) < 0) {
        return 0; /* writing will tell */
    }
    available = (uint64_t)fs.f_bavail * fs.f_frsize;
    return available >= need
               ? 0
               : dmk_error_set(reterr, -DMK_EFULL, "%s: %.2f GB are needed but %.2f GB are free",
                               run->conf->dst, (double)need / 1e9, (double)available / 1e9);
}

/* ---- the threads ---- */

static void fail(struct convert_run *run, int status, const struct dmk_error *error)
{
    int none = 0;

    if (!atomic_flag_test_and_set(&run->error_taken)) {
        run->error = *error;
    }
    (void)atomic_compare_exchange_strong(&run->failure, &none, status);
}

static int do_file(struct convert_run *run, uint32_t i, struct dmk_error *reterr)
{
    const struct dmk_cut_file *file = &run->cut->files[i];
    struct convert_done *d = &run->done[i];
    int r;

    if (d->noted) {
        r = convert_check_file(run, file->name, d, reterr);
        if (r > 0) {
            atomic_fetch_add(&run->skipped_bytes, d->n_bytes);
            atomic_fetch_add(&run->n_kept, 1);
            return 0;
        }
        free(d->inexact);
        *d = (struct convert_done){0};
        if (r < 0) {
            return r;
        }
    }
    if ((r = convert_write_file(run, file, d, reterr)) < 0 ||
        (r = convert_take_name(run, file->name, reterr)) < 0) {
        return r;
    }
    return convert_journal_add(run, i, reterr);
}

static int verify_file(struct convert_run *run, uint32_t i, struct dmk_error *reterr)
{
    const char *name = run->cut->files[i].name;
    const int r = convert_check_file(run, name, &run->done[i], reterr);

    return r != 0
               ? r
               : dmk_error_set(
                     reterr, -DMK_EFORMAT,
                     "%s/%s: does not have the size and checksum that were written (damaged); run "
                     "with --force to make it again",
                     run->conf->dst, name);
}

static void *run_files(void *arg)
{
    struct convert_run *run = arg;
    struct dmk_error error = {0};
    uint32_t i;

    while (atomic_load(&run->failure) == 0 &&
           (i = atomic_fetch_add(&run->next_file, 1)) < run->cut->n_files) {
        const int r = run->verifying ? verify_file(run, i, &error) : do_file(run, i, &error);

        if (r < 0 && r != -DMK_ECANCELLED) {
            fail(run, r, &error);
        }
    }
    return NULL;
}

static uint32_t count_jobs(const struct dmk_convert_conf *conf)
{
    const long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n = conf->n_jobs;

    if (n == 0) {
        n = n_cpus > 0 && n_cpus < (long)DEFAULT_JOBS ? (uint32_t)n_cpus : DEFAULT_JOBS;
    }
    return n < MAX_JOBS ? n : MAX_JOBS;
}

/* All files once, written or verified; the caller watches. */
static int run_threads(struct convert_run *run, bool verifying, struct dmk_error *reterr)
{
    const struct dmk_convert_conf *conf = run->conf;
    const uint32_t want = count_jobs(conf);
    pthread_t threads[MAX_JOBS];
    uint32_t n = 0;

    run->verifying = verifying;
    atomic_store(&run->next_file, 0);
    atomic_store(&run->done_bytes, 0);
    atomic_store(&run->skipped_bytes, 0);
    while (n < want && pthread_create(&threads[n], NULL, run_files, run) == 0) {
        n++;
    }
    if (n == 0) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no thread could be started");
    }
    while (atomic_load(&run->failure) == 0 && atomic_load(&run->done_bytes) < run->cut->n_bytes &&
           atomic_load(&run->next_file) < run->cut->n_files + n) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        if (conf->on_progress) {
            conf->on_progress(conf->ud, verifying ? "verifying" : "converting",
                              atomic_load(&run->done_bytes), run->cut->n_bytes,
                              atomic_load(&run->skipped_bytes));
        }
    }
    while (n > 0) {
        (void)pthread_join(threads[--n], NULL);
    }
    if (atomic_load(&run->failure) != 0) {
        if (reterr) {
            *reterr = run->error;
        }
        return atomic_load(&run->failure);
    }
    return 0;
}

/* ---- the end ---- */

/* From the folder of the tensors, or the one around it (`original/` has the vocabulary outside). */
static int copy_small(struct convert_run *run, struct dmk_manifest *m, struct dmk_error *reterr)
{
    const char *dirs[] = {dmk_checkpoint_dir(run->source->weights->checkpoint), run->conf->src};
    struct dmk_buf text;
    int r = 0;

    dmk_buf_init(&text, MAX_SMALL_BYTES);
    for (size_t i = 0; i < CONVERT_N_SMALL && r == 0; i++) {
        for (size_t d = 0; d < 2; d++) {
            struct dmk_manifest_file *f = &m->copied[m->n_copied];
            char path[4096];
            struct stat st;

            (void)snprintf(path, sizeof(path), "%.4000s/%s", dirs[d], convert_small_files[i]);
            if (stat(path, &st) < 0) {
                continue;
            }
            dmk_buf_reset(&text);
            if ((r = dmk_file_read(path, convert_small_files[i], MAX_SMALL_BYTES, &text, NULL,
                                   reterr)) < 0 ||
                (r = convert_put_file(run, convert_small_files[i], dmk_buf_str(&text), reterr)) <
                    0) {
                break;
            }
            (void)snprintf(f->name, sizeof(f->name), "%s", convert_small_files[i]);
            f->n_bytes = text.len;
            f->checksum = dmk_checksum128(text.data, text.len);
            m->n_copied++;
            break;
        }
    }
    dmk_buf_fini(&text);
    return r;
}

static uint64_t count_fp8_blocks(const struct dmk_cut *cut)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < cut->n_tensors; i++) {
        n += cut->tensors[i].dtype == DMK_DTYPE_F32 ? cut->tensors[i].n_bytes / sizeof(float) : 0;
    }
    return n;
}

static int compare_inexact(const void *a, const void *b)
{
    const struct dmk_inexact *x = a, *y = b;

    if (x->layer != y->layer) {
        return x->layer < y->layer ? -1 : 1;
    }
    if (x->expert != y->expert) {
        return x->expert < y->expert ? -1 : 1;
    }
    return (int)y->gate_up - (int)x->gate_up;
}

static int collect_inexact(const struct convert_run *run, struct dmk_manifest *m,
                           struct dmk_error *reterr)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < run->cut->n_files; i++) {
        n += run->done[i].n_inexact;
    }
    m->inexact = calloc(n ? n : 1, sizeof(m->inexact[0]));
    if (!m->inexact) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a list of %u matrices", n);
    }
    for (uint32_t i = 0; i < run->cut->n_files; i++) {
        for (uint32_t k = 0; k < run->done[i].n_inexact; k++) {
            m->inexact[m->n_inexact++] = run->done[i].inexact[k];
        }
    }
    qsort(m->inexact, n, sizeof(m->inexact[0]), compare_inexact);
    m->n_blocks = count_fp8_blocks(run->cut);
    return 0;
}

static int finish(struct convert_run *run, struct dmk_manifest *m, struct dmk_error *reterr)
{
    const struct dmk_cut *cut = run->cut;
    struct dmk_buf text;
    int r;

    m->files = calloc(cut->n_files, sizeof(m->files[0]));
    m->copied = calloc(CONVERT_N_SMALL, sizeof(m->copied[0]));
    if (!m->files || !m->copied) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the manifest of %u files",
                             cut->n_files);
    }
    m->n_files = cut->n_files;
    for (uint32_t i = 0; i < cut->n_files; i++) {
        memcpy(m->files[i].name, cut->files[i].name, sizeof(m->files[i].name));
        m->files[i].n_bytes = run->done[i].n_bytes;
        m->files[i].checksum = run->done[i].checksum;
    }
    m->source = realpath(run->conf->src, NULL);
    m->source = m->source ? m->source : strdup(run->conf->src); /* it may have been moved */
    m->model_id = run->source->model_id;
    m->layout = cut->layout;
    m->experts = cut->experts;
    if ((r = copy_small(run, m, reterr)) < 0 || (r = collect_inexact(run, m, reterr)) < 0) {
        return r;
    }
    dmk_buf_init(&text, 0);
    r = dmk_manifest_write(m, cut, &text, reterr);
    if (r == 0) {
        r = convert_put_file(run, DMK_MANIFEST_NAME, dmk_buf_str(&text), reterr);
    }
    dmk_buf_fini(&text);
    if (r == 0) {
        (void)unlinkat(run->dir_fd, DMK_MANIFEST_JOURNAL, 0);
        (void)convert_folder_tidy(run, NULL);
    }
    return r;
}

/* ---- what is there already ---- */

static int check_sizes(const struct convert_run *run, struct dmk_error *reterr)
{
    for (uint32_t i = 0; i < run->cut->n_files; i++) {
        const struct dmk_cut_file *f = &run->cut->files[i];
        struct stat st;

        if (fstatat(run->dir_fd, f->name, &st, 0) < 0) {
            return dmk_error_set(reterr, -DMK_ENOENT,
                                 "%s/%s: is missing; run with --force to make it again",
                                 run->conf->dst, f->name);
        }
        if ((uint64_t)st.st_size != f->n_bytes) {
            return dmk_error_set(
                reterr, -DMK_EFORMAT,
                "%s/%s: has %lld bytes instead of %llu; run with --force to make it again",
                run->conf->dst, f->name, (long long)st.st_size, (unsigned long long)f->n_bytes);
        }
    }
    return 0;
}

/* The folder has a manifest: 0 when it is what this call would make. */
static int check_complete(struct convert_run *run, struct dmk_manifest *m, struct dmk_error *reterr)
{
    const struct dmk_cut *cut = run->cut;
    int r = dmk_manifest_load(run->conf->dst, m, reterr);

    if (r < 0) {
        return dmk_error_prefix(reterr, "--force makes the folder anew");
    }
    if (!dmk_id128_equal(m->model_id, run->source->model_id) || m->experts != cut->experts ||
        m->layout.tp != cut->layout.tp || m->layout.dp != cut->layout.dp) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH,
            "%s: holds a conversion of %.200s for tp %u, dp %u with %s experts, not this one; name "
            "another folder, or --force replaces it",
            run->conf->dst, m->source, m->layout.tp, m->layout.dp, dmk_cut_format_name(m->experts));
    }
    if ((r = dmk_manifest_check(m, cut, run->conf->dst, reterr)) < 0 ||
        (r = check_sizes(run, reterr)) < 0) {
        return r;
    }
    if (dmk_manifest_check_copied(m, run->conf->dst, run->conf->verify, reterr) < 0) {
        return dmk_error_prefix(reterr, "--force makes the folder anew");
    }
    for (uint32_t i = 0; i < cut->n_files; i++) {
        run->done[i] = (struct convert_done){
            .noted = true, .n_bytes = m->files[i].n_bytes, .checksum = m->files[i].checksum};
    }
    return run->conf->verify ? run_threads(run, true, reterr) : 0;
}

/* ---- all of it ---- */

static struct dmk_id128 stamp_of(const struct convert_run *run)
{
    const uint32_t facts[] = {DMK_MANIFEST_VERSION, run->cut->layout.tp, run->cut->layout.dp,
                              (uint32_t)run->cut->experts};
    const struct dmk_id128 id =
        dmk_hash128(run->source->stamp, &run->source->model_id, sizeof(run->source->model_id));

    return dmk_hash128(id, facts, sizeof(facts));
}

static int convert(struct convert_run *run, struct dmk_manifest *m,
                   struct dmk_convert_report *report, struct dmk_error *reterr)
{
    const bool force = run->conf->force;
    int r;

    if ((r = convert_folder_open(run, reterr)) < 0 || (r = convert_folder_check(run, reterr)) < 0) {
        return r;
    }
    report->n_files = run->cut->n_files;
    report->n_bytes = run->cut->n_bytes;
    if (!force && convert_folder_has(run, DMK_MANIFEST_NAME)) {
        report->was_complete = true;
        return check_complete(run, m, reterr);
    }
    /* Nothing in the folder is touched before it is known that nobody else writes there. */
    if ((r = convert_journal_open(run, reterr)) < 0 ||
        (force && (r = convert_folder_empty(run, reterr)) < 0) ||
        (r = convert_journal_read(run, stamp_of(run), reterr)) < 0 ||
        (r = convert_folder_tidy(run, reterr)) < 0 || (r = check_space(run, reterr)) < 0 ||
        (r = run_threads(run, false, reterr)) < 0) {
        return r;
    }
    report->n_kept = atomic_load(&run->n_kept);
    report->n_written = run->cut->n_bytes - atomic_load(&run->skipped_bytes);
    if (run->conf->verify && (r = run_threads(run, true, reterr)) < 0) {
        return r;
    }
    if ((r = convert_source_check(run->source, reterr)) < 0 || (r = finish(run, m, reterr)) < 0) {
        return r;
    }
    report->n_blocks = m->n_blocks;
    report->inexact = m->inexact;
    report->n_inexact = m->n_inexact;
    m->inexact = NULL;
    return 0;
}

static void close_run(struct convert_run *run)
{
    for (uint32_t i = 0; run->done && i < run->cut->n_files; i++) {
        free(run->done[i].inexact);
    }
    free(run->done);
    if (run->journal_fd >= 0) {
        (void)close(run->journal_fd);
    }
    if (run->dir_fd >= 0) {
        (void)close(run->dir_fd);
    }
}

int dmk_convert(const struct dmk_convert_conf *conf, struct dmk_convert_report *ret_report,
                struct dmk_error *reterr)
{
    struct dmk_convert_report report = {0};
    struct convert_source source = {0};
    struct dmk_cut cut = {0};
    struct dmk_manifest manifest = {0};
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct convert_run run = {.conf = conf,
                              .source = &source,
                              .cut = &cut,
                              .dir_fd = -1,
                              .journal_fd = -1,
                              .error_taken = ATOMIC_FLAG_INIT,
                              .journal_lock = &lock};
    int r = dmk_layout_check_ranks(conf->layout, false, reterr);

    if (r < 0 || (r = convert_source_open(conf->src, conf->layout, &source, reterr)) < 0) {
        return r;
    }
    r = dmk_cut_plan(&source.weights->shape, conf->layout, conf->experts, &cut, reterr);
    if (r == 0) {
        run.done = calloc(cut.n_files, sizeof(run.done[0]));
        r = run.done ? convert(&run, &manifest, &report, reterr)
                     : dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a table of %u files",
                                     cut.n_files);
        close_run(&run);
    }
    dmk_manifest_free(&manifest);
    dmk_cut_free(&cut);
    convert_source_close(&source);
    if (r == 0) {
        *ret_report = report;
    }
    return r;
}
