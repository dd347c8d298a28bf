/* damask convert: the options of the converter, and what it tells. */
#include "tools/damask.h"

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/clock.h"
#include "common/conf/conf.h"
#include "tools/convert/convert.h"
#include "tools/progress.h"

#define MAX_LISTED 20u /* inexact matrices that are printed; the manifest has all */

struct options {
    uint32_t tp, dp, ep;
    uint32_t experts, dense;
    uint32_t jobs;
    bool force, verify, quiet;
};

static const char *const formats[] = {"mxfp4", "fp8", NULL};
static const char *const dense_formats[] = {"bf16", NULL};

#define AT(f) offsetof(struct options, f)

static const struct dmk_conf_option table[] = {
    {"tp", DMK_CONF_U32, "1", 0, 64, NULL,
     "ranks that share a sequence's attention heads, as the worker's --tp: 1, 2, 4 or 8", AT(tp)},
    {"dp", DMK_CONF_U32, "0", 0, 64, NULL,
     "groups of tp ranks, as a decode worker's --dp; 0: ep / tp, or 1. Experts are cut by tp x dp",
     AT(dp)},
    {"ep", DMK_CONF_U32, "0", 0, 64, NULL,
     "instead of dp: number of ranks that experts are spread over, tp x dp", AT(ep)},
    {"experts", DMK_CONF_ENUM, "mxfp4", 0, 0, formats,
     "mxfp4 as published (decode; half the bytes), or fp8: E4M3 with a power of two as scale for "
     "each 128 x 128 "
     "(prefill), which holds MXFP4 exactly where the scales of a block lie within 14 octaves; "
     "other blocks are "
     "counted and listed",
     AT(experts)},
    {"dense", DMK_CONF_ENUM, "bf16", 0, 0, dense_formats, "everything but the experts", AT(dense)},
    {"jobs", DMK_CONF_U32, "0", 0, 64, NULL,
     "files that are made at a time, each by a thread; 0: one a core, 8 at most. Memory stays "
     "below 64 MiB and "
     "16 MiB a job whatever the size of the checkpoint",
     AT(jobs)},
    {"verify", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "read everything back from the disk before the manifest is written; of a folder that is "
     "complete, verify it",
     AT(verify)},
    {"force", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "start anew where DST holds another conversion, finished or not", AT(force)},
    {"quiet", DMK_CONF_BOOL, "false", 0, 0, NULL, "no progress on stderr", AT(quiet)},
};

static const struct dmk_conf_program program = {
    .name = "damask convert",
    .summary = "cut a checkpoint into aligned files for the ranks of a worker, with checksums. SRC "
               "is a checkpoint "
               "as downloaded (Hugging Face files, one file, or original/); DST becomes a folder "
               "for a worker's "
               "--model. A run that was stopped, by a crash too, goes on when it is called again",
    .usage = "SRC DST",
    .options = table,
    .n_options = sizeof(table) / sizeof(table[0]),
};

struct watch {
    struct dmk_progress progress;
    bool quiet;
};

static void show_progress(void *ud, const char *what, uint64_t done, uint64_t total,
                          uint64_t skipped)
{
    struct watch *w = ud;

    if (!w->progress.what || strcmp(w->progress.what, what) != 0) {
        dmk_progress_end(&w->progress);
        dmk_progress_begin(&w->progress, what, w->quiet);
    }
    w->progress.skipped = skipped;
    dmk_progress_show(&w->progress, done, total);
}

static void print_exactness(const struct dmk_convert_report *r)
{
    uint64_t n = 0;
    double largest = 0;

    for (uint32_t i = 0; i < r->n_inexact; i++) {
        n += r->inexact[i].n_blocks;
        largest = r->inexact[i].largest_error > largest ? r->inexact[i].largest_error : largest;
    }
    if (n == 0) {
        (void)printf("fp8: all %llu blocks hold their MXFP4 values exactly\n",
                     (unsigned long long)r->n_blocks);
        return;
    }
    (void)printf("fp8: %llu of %llu blocks spread over more than 14 octaves and are not exact; "
                 "largest error %.3g\n",
                 (unsigned long long)n, (unsigned long long)r->n_blocks, largest);
    for (uint32_t i = 0; i < r->n_inexact && i < MAX_LISTED; i++) {
        const struct dmk_inexact *e = &r->inexact[i];

        (void)printf("  layer %u, expert %u, %s: %llu blocks, largest error %.3g\n", e->layer,
                     e->expert, e->gate_up ? "gate_up_proj" : "down_proj",
                     (unsigned long long)e->n_blocks, e->largest_error);
    }
    if (r->n_inexact > MAX_LISTED) {
        (void)printf("  and %u more matrices; " DMK_MANIFEST_NAME " lists all\n",
                     r->n_inexact - MAX_LISTED);
    }
}

/* dp and ep say the same in two ways. */
static int choose_layout(const struct options *o, struct dmk_layout *ret_layout,
                         struct dmk_error *reterr)
{
    struct dmk_layout layout = {o->tp, o->dp ? o->dp : 1};

    if (o->ep) {
        if (o->tp == 0 || o->ep % o->tp != 0 || (o->dp && o->tp * o->dp != o->ep)) {
            return dmk_error_set(reterr, -DMK_EINVAL, "ep is %u but must be tp x dp, with tp %u%s",
                                 o->ep, o->tp, o->dp ? " and the dp given" : "");
        }
        layout.dp = o->ep / o->tp;
    }
    *ret_layout = layout;
    return dmk_layout_check_ranks(layout, false, reterr);
}

static int convert(const struct options *o, const char *src, const char *dst,
                   struct dmk_error *reterr)
{
    struct watch watch = {.quiet = o->quiet};
    struct dmk_convert_conf conf = {
        .src = src,
        .dst = dst,
        .experts = o->experts == 1 ? DMK_EXPERTS_FP8 : DMK_EXPERTS_MXFP4,
        .n_jobs = o->jobs,
        .force = o->force,
        .verify = o->verify,
        .on_progress = show_progress,
        .ud = &watch,
    };
    const uint64_t start = dmk_clock_ns();
    struct dmk_convert_report report = {0};
    double seconds;
    int r = choose_layout(o, &conf.layout, reterr);

    if (r == 0) {
        r = dmk_convert(&conf, &report, reterr);
    }
    dmk_progress_end(&watch.progress);
    if (r < 0) {
        return r;
    }
    seconds = (double)(dmk_clock_ns() - start) / 1e9;
    if (report.was_complete) {
        (void)printf("%s: is complete already%s: %u files, %.2f GB\n", dst,
                     o->verify ? " and verified" : "", report.n_files,
                     (double)report.n_bytes / 1e9);
        return 0;
    }
    (void)printf("%s: tp %u, dp %u, %s experts: %u files, %.2f GB, of which %u were there; %.2f GB "
                 "in %.1f s, %.0f "
                 "MB/s%s\n",
                 dst, conf.layout.tp, conf.layout.dp, formats[o->experts], report.n_files,
                 (double)report.n_bytes / 1e9, report.n_kept, (double)report.n_written / 1e9,
                 seconds, (double)report.n_written / 1e6 / seconds, o->verify ? ", verified" : "");
    if (conf.experts == DMK_EXPERTS_FP8) {
        print_exactness(&report);
    }
    free(report.inexact);
    return 0;
}

int dmk_cmd_convert(int argc, char **argv)
{
    struct options o = {0};
    struct dmk_error err = {0};
    int n_args = 0;
    int r = dmk_conf_load(&program, argc, argv, &o, &n_args, &err);

    (void)signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is an error of write */
    if (r == 0 && n_args != 2) {
        r = dmk_error_set(&err, -DMK_EINVAL,
                          "takes a checkpoint's folder and the folder to be made, SRC DST, not %d "
                          "arguments",
                          n_args);
    }
    if (r == 0) {
        for (int i = 1; i <= 2; i++) {
            for (size_t n = strlen(argv[i]); n > 1 && argv[i][n - 1] == '/'; n--) {
                argv[i][n - 1] = '\0';
            }
        }
        r = convert(&o, argv[1], argv[2], &err);
    }
    dmk_conf_free(&program, &o);
    if (r < 0) {
        (void)fprintf(stderr, "damask convert: %s\n", err.text);
        return 1;
    }
    return 0;
}
