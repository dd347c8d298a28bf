/* The mock engine; see engine.h. Two layers (one of each kind) and one KV head for each group. */
#include "tools/mock/engine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/base/status.h"

#define VOCAB    201088u
#define WINDOW   128u
#define MAX_ROWS 16384u
#define LOG_MAX  (1u << 20) /* steps that a log holds; later ones are not logged */

/* Ids of o200k_harmony. */
#define ID_RETURN    200002u
#define ID_CHANNEL   200005u
#define ID_START     200006u
#define ID_MESSAGE   200008u
#define ID_FINAL     17196u  /* "final" */
#define ID_ASSISTANT 173781u /* "assistant" */
#define ID_DIGIT_0   15u     /* "0"; the other digits follow */

/* Common English words with a blank in front. */
static const uint16_t words[] = {
    290,  328,  326,  316,  306,  261,  382,  484,  395,  480,  472,  673,  483,  413,  656,  402,
    625,  501,  495,  553,  503,  1232, 591,  540,  1118, 889,  679,  448,  1458, 1023, 481,  1504,
    1043, 1001, 722,  581,  665,  1335, 853,  1354, 1339, 538,  945,  1261, 738,  1481, 1218, 813,
    860,  1058, 1665, 2006, 2163, 873,  4435, 8773, 2615, 2320, 2375, 3474, 2608, 3502, 6760, 3566,
};
#define N_WORDS (sizeof(words) / sizeof(words[0]))

struct dmk_mock_engine {
    struct dmk_mock_conf conf;
    struct dmk_shape shape;
    struct dmk_kv_mem mem[DMK_PORT_MAX_RANKS];
    uint64_t rows[MAX_ROWS]; /* what each row of the last step picks from */
    uint64_t n_logged;
    uint64_t *log; /* [LOG_MAX] or NULL */
};

static uint8_t *allocate(uint64_t bytes)
{
    uint8_t *p = malloc(bytes);

    if (p) {
        memset(p, 0xee, bytes); /* never a hash by chance */
    }
    return p;
}

static int open_log(struct dmk_mock_engine *e, const char *path, struct dmk_error *reterr)
{
    const size_t bytes = LOG_MAX * sizeof(*e->log);
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    void *p = MAP_FAILED;

    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0) {
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (p == MAP_FAILED) {
        (void)dmk_error_set(reterr, -DMK_EIO, "the step log \"%s\" can not be made: %s", path,
                            strerror(errno));
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    if (p == MAP_FAILED) {
        return -DMK_EIO;
    }
    e->log = p;
    return 0;
}

int dmk_mock_engine_new(const struct dmk_mock_conf *conf, struct dmk_mock_engine **ret,
                        struct dmk_error *reterr)
{
    struct dmk_mock_engine *e = calloc(1, sizeof(*e));
    int r = e ? 0 : dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the mock engine");

    if (!e) {
        return r;
    }
    e->conf = *conf;
    e->shape = (struct dmk_shape){.n_layers = 2,
                                  .hidden = 64,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .vocab = VOCAB,
                                  .window = WINDOW,
                                  .max_positions = 131072,
                                  .eos_ids = {ID_RETURN, 199999, 200012},
                                  .n_eos = 3};
    for (uint32_t g = 0; g < conf->dp; g++) {
        struct dmk_kv_mem *m = &e->mem[g];

        m->layout = (struct dmk_kv_layout){.n_full_layers = 1,
                                           .n_window_layers = 1,
                                           .n_kv_heads = 1,
                                           .n_local_heads = 1,
                                           .page_bytes = conf->page_bytes,
                                           .n_full_pages = conf->n_full_pages,
                                           .n_window_pages = conf->n_window_pages};
        m->full = allocate(dmk_kv_full_bytes(&m->layout));
        m->window = allocate(dmk_kv_window_bytes(&m->layout));
        if (!m->full || !m->window) {
            r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %u pages of %u bytes",
                              conf->n_full_pages + conf->n_window_pages, conf->page_bytes);
            break;
        }
    }
    if (r == 0 && conf->step_log[0]) {
        r = open_log(e, conf->step_log, reterr);
    }
    if (r < 0) {
        dmk_mock_engine_free(&e);
        return r;
    }
    *ret = e;
    return 0;
}

void dmk_mock_engine_free(struct dmk_mock_engine **engine)
{
    struct dmk_mock_engine *e = *engine;

    if (!e) {
        return;
    }
    for (uint32_t g = 0; g < DMK_PORT_MAX_RANKS; g++) {
        free(e->mem[g].full);
        free(e->mem[g].window);
    }
    if (e->log) {
        (void)munmap(e->log, LOG_MAX * sizeof(*e->log));
    }
    free(e);
    *engine = NULL;
}

/* ---------------------------------------------------------------- pages */

static uint8_t *full_slot(const struct dmk_mock_engine *e, const struct dmk_step_seq *s,
                          uint32_t pos)
{
    const struct dmk_kv_mem *m = &e->mem[s->dp];
    const uint32_t page = s->full_pages[pos / DMK_PAGE_TOKENS];

    dmk_assert(page < m->layout.n_full_pages);
    return (uint8_t *)m->full + (uint64_t)page * e->conf.page_bytes +
           pos % DMK_PAGE_TOKENS * sizeof(uint64_t);
}

static uint8_t *window_slot(const struct dmk_mock_engine *e, const struct dmk_step_seq *s,
                            uint32_t pos)
{
    const struct dmk_kv_mem *m = &e->mem[s->dp];
    const uint32_t page = s->ring[pos / DMK_PAGE_TOKENS % s->n_ring];

    dmk_assert(page < m->layout.n_window_pages);
    return (uint8_t *)m->window + (uint64_t)page * e->conf.page_bytes +
           pos % DMK_PAGE_TOKENS * sizeof(uint64_t);
}

static uint64_t load(const uint8_t *slot)
{
    uint64_t word;

    memcpy(&word, slot, sizeof(word));
    return word;
}

static void copy_page(const struct dmk_mock_engine *e, const struct dmk_page_copy *c)
{
    uint8_t *base = c->window ? e->mem[c->dp].window : e->mem[c->dp].full;

    memcpy(base + (uint64_t)c->dst * e->conf.page_bytes,
           base + (uint64_t)c->src * e->conf.page_bytes, e->conf.page_bytes);
}

/* Stores the hashes of the new tokens; the result is the last one mixed with two older ones. */
static uint64_t run_sequence(const struct dmk_mock_engine *e, const struct dmk_step_seq *s)
{
    const uint32_t n_all = s->pos + s->n_tokens, last = n_all - 1;
    const uint32_t back = (s->n_ring - 1) * DMK_PAGE_TOKENS;
    const uint32_t block = last / DMK_PAGE_TOKENS * DMK_PAGE_TOKENS;
    const uint32_t kept = block > back ? block - back : 0; /* first that the ring still holds */
    const uint32_t seen = last >= WINDOW ? last - (WINDOW - 1) : 0;
    uint64_t h = s->pos > 0 ? load(full_slot(e, s, s->pos - 1)) : 0;

    dmk_assert(s->n_tokens > 0 && n_all > 0 && n_all > seen && s->n_ring > 0);
    for (uint32_t i = 0; i < s->n_tokens; i++) {
        h = dmk_rng_mix(h ^ s->ids[i]);
        memcpy(full_slot(e, s, s->pos + i), &h, sizeof(h));
        if (s->pos + i >= kept) {
            memcpy(window_slot(e, s, s->pos + i), &h, sizeof(h));
        }
    }
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): asserted above, lost on the analyser */
    h ^= dmk_rng_mix(load(full_slot(e, s, (uint32_t)(h % n_all))));
    return dmk_rng_mix(h ^ load(window_slot(e, s, seen + (uint32_t)((h >> 32) % (n_all - seen)))));
}

/* ---------------------------------------------------------------- steps */

static void sleep_until(uint64_t ns)
{
    const struct timespec ts = {.tv_sec = (time_t)(ns / DMK_NS_PER_S),
                                .tv_nsec = (long)(ns % DMK_NS_PER_S)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) {
    }
}

static bool is_cancelled(const struct dmk_step *step)
{
    return step->cancel && atomic_load(step->cancel);
}

static int run_step(void *engine, const struct dmk_step *step)
{
    struct dmk_mock_engine *e = engine;
    const uint64_t start = dmk_clock_ns();
    double us = e->conf.step_us;
    uint32_t n_rows = 0;

    for (uint32_t i = 0; i < step->n_copies; i++) {
        copy_page(e, &step->copies[i]);
    }
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct dmk_step_seq *s = &step->seqs[i];
        const uint64_t h = run_sequence(e, s);
        const uint32_t n = s->logits == DMK_LOGITS_NONE   ? 0
                           : s->logits == DMK_LOGITS_LAST ? 1
                                                          : s->n_tokens;

        for (uint32_t k = 0; k < n && n_rows < MAX_ROWS; k++) {
            e->rows[n_rows++] = h;
        }
        us += n > 0 ? e->conf.sequence_us + (s->n_tokens - 1) * e->conf.prompt_token_us
                    : s->n_tokens * e->conf.prompt_token_us;
    }
    for (uint32_t layer = 0; layer < e->shape.n_layers; layer++) {
        if (is_cancelled(step)) {
            return -DMK_ECANCELLED;
        }
        if (us > 0) {
            sleep_until(start + (uint64_t)(us * 1000 * (layer + 1) / e->shape.n_layers));
        }
        if (step->on_layer) {
            step->on_layer(step->ud, layer);
        }
    }
    if (n_rows > 0 && e->log && e->n_logged + 1 < LOG_MAX) {
        __atomic_store_n(&e->log[++e->n_logged], dmk_clock_ns(), __ATOMIC_RELEASE);
    }
    return 0;
}

/* The next id that is allowed, around the end of the vocabulary. */
static uint32_t next_allowed(const struct dmk_mock_engine *e, const uint64_t *allowed, uint32_t id)
{
    for (uint32_t i = 0; i < e->shape.vocab; i++) {
        const uint32_t at = (id + i) % e->shape.vocab;

        if (allowed[at / 64] >> (at % 64) & 1) {
            return at;
        }
    }
    return id;
}

static uint32_t pick_freely(const struct dmk_mock_engine *e, const struct dmk_engine_pick *p)
{
    const uint64_t h = e->rows[p->row % MAX_ROWS];
    const uint32_t last = p->ids[p->n_ids - 1];
    const uint32_t before = p->n_ids > 1 ? p->ids[p->n_ids - 2] : 0;

    /* A conversation's answer is one message in the final channel. */
    if (last == ID_ASSISTANT && before == ID_START) {
        return ID_CHANNEL;
    }
    if (last == ID_CHANNEL) {
        return ID_FINAL;
    }
    if (last == ID_FINAL && before == ID_CHANNEL) {
        return ID_MESSAGE;
    }
    if (e->log) {
        return ID_DIGIT_0 + (uint32_t)(e->n_logged % 10);
    }
    if (p->may_end && e->conf.mean_tokens > 0 && (h >> 16) % e->conf.mean_tokens == 0) {
        return ID_RETURN;
    }
    return words[h % N_WORDS];
}

static uint32_t pick(void *engine, const struct dmk_engine_pick *p)
{
    const struct dmk_mock_engine *e = engine;
    const uint32_t id = pick_freely(e, p);

    return p->allowed ? next_allowed(e, p->allowed, id) : id;
}

struct dmk_engine_port dmk_mock_engine_port(struct dmk_mock_engine *e)
{
    struct dmk_engine_port port = {
        .shape = &e->shape,
        .layout = {.tp = 1, .dp = e->conf.dp},
        .numerics = e->conf.numerics,
        .prompt_numerics = e->conf.prompt_numerics,
        .model_id = {0x6d6f636b, 1},
        .n_ranks = e->conf.dp,
        .step = run_step,
        .pick = pick,
        .engine = e,
    };

    for (uint32_t g = 0; g < e->conf.dp; g++) {
        port.kv[g] = &e->mem[g];
    }
    return port;
}
