/* Memory of the weight loader: owned copies, turning BF16 experts around.
 *
 * BF16 re-exports store the experts as [E][in][out]; everybody else here wants [E][out][in]. The
 * copy is made once at load by a few threads, one matrix of one expert at a time. */
#include "common/model/weights_internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_THREADS 16
#define TURN_TILE   64u /* a tile of both sides stays in the first-level cache */

struct dmk_weights_block {
    struct dmk_weights_block *next;
    uint64_t map_bytes;
};

#define BLOCK_HEADER 64u /* keeps what follows aligned to a cache line */

void *dmk_weights_own(struct dmk_weights *w, uint64_t n_bytes)
{
    const uint64_t map_bytes = n_bytes + BLOCK_HEADER;
    struct dmk_weights_block *block;

    if (map_bytes < n_bytes) {
        return NULL;
    }
    block = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
        return NULL;
    }
    block->next = w->owned;
    block->map_bytes = map_bytes;
    w->owned = block;
    return (char *)block + BLOCK_HEADER;
}

uint64_t dmk_weights_bytes(const struct dmk_weights *w)
{
    uint64_t bytes = w->total_bytes;

    for (const struct dmk_weights_block *b = w->owned; b; b = b->next) {
        bytes += b->map_bytes;
    }
    return bytes;
}

void dmk_weights_disown(struct dmk_weights *w)
{
    while (w->owned) {
        struct dmk_weights_block *block = w->owned;

        w->owned = block->next;
        (void)munmap(block, block->map_bytes);
    }
}

/* One expert matrix to be turned: src [rows][cols] to dst [cols][rows]. */
struct turn_job {
    const uint16_t *src;
    uint16_t *dst;
    uint32_t rows, cols;
};

static void turn_matrix(const void *jobs, uint32_t i)
{
    const struct turn_job *job = (const struct turn_job *)jobs + i;

    for (uint32_t r0 = 0; r0 < job->rows; r0 += TURN_TILE) {
        const uint32_t r1 = r0 + TURN_TILE < job->rows ? r0 + TURN_TILE : job->rows;

        for (uint32_t c0 = 0; c0 < job->cols; c0 += TURN_TILE) {
            const uint32_t c1 = c0 + TURN_TILE < job->cols ? c0 + TURN_TILE : job->cols;

            for (uint32_t c = c0; c < c1; c++) {
                for (uint32_t r = r0; r < r1; r++) {
                    job->dst[(uint64_t)c * job->rows + r] = job->src[(uint64_t)r * job->cols + c];
                }
            }
        }
    }
}

/* Work that is handed out item by item. */
struct work {
    void (*fn)(const void *jobs, uint32_t i);
    const void *jobs;
    uint32_t n_jobs;
    atomic_uint next;
};

static void *run_work(void *arg)
{
    struct work *work = arg;
    uint32_t i;

    while ((i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed)) < work->n_jobs) {
        work->fn(work->jobs, i);
    }
    return NULL;
}

/* The caller works too, so a thread that can not be had costs time only. */
void dmk_weights_parallel(void (*fn)(const void *jobs, uint32_t i), const void *jobs,
                          uint32_t n_jobs)
{
    struct work work = {.fn = fn, .jobs = jobs, .n_jobs = n_jobs};
    pthread_t threads[MAX_THREADS];
    long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int n = 0;

    while (n + 1 < n_cpus && n < MAX_THREADS &&
           pthread_create(&threads[n], NULL, run_work, &work) == 0) {
        n++;
    }
    (void)run_work(&work);
    while (n > 0) {
        (void)pthread_join(threads[--n], NULL);
    }
}

/* Gives the matrix its own memory and lists one job an expert. */
static int plan_turn(struct dmk_weights *w, struct dmk_expert_matrix *m, uint32_t rows,
                     uint32_t cols, struct turn_job *jobs)
{
    const uint64_t n = (uint64_t)rows * cols;
    const uint16_t *src = (const uint16_t *)(const void *)m->blocks;
    uint16_t *dst = dmk_weights_own(w, n * w->shape.n_experts * sizeof(uint16_t));

    if (!dst) {
        return -DMK_ENOMEM;
    }
    for (uint32_t e = 0; e < w->shape.n_experts; e++) {
        jobs[e] = (struct turn_job){src + n * e, dst + n * e, rows, cols};
    }
    m->blocks = (const uint8_t *)dst;
    return 0;
}

int dmk_weights_turn_experts(struct dmk_weights *w, struct dmk_error *reterr)
{
    const struct dmk_shape *s = &w->shape;
    const uint32_t n_jobs = 2 * s->n_layers * s->n_experts;
    struct turn_job *jobs = calloc(n_jobs, sizeof(jobs[0]));
    int r = jobs ? 0 : -DMK_ENOMEM;

    for (uint32_t i = 0; i < s->n_layers && r == 0; i++) {
        struct turn_job *at = jobs + (size_t)2 * i * s->n_experts;

        r = plan_turn(w, &w->layers[i].gate_up, s->hidden, 2 * s->intermediate, at);
        if (r == 0) {
            r = plan_turn(w, &w->layers[i].down, s->intermediate, s->hidden, at + s->n_experts);
        }
    }
    if (r < 0) {
        free(jobs);
        return dmk_error_set(reterr, r, "no memory to turn the BF16 experts of %u layers around",
                             s->n_layers);
    }
    dmk_weights_parallel(turn_matrix, jobs, n_jobs);
    free(jobs);
    return 0;
}
