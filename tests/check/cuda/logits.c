/* check_logits: writes the logits of a checkpoint for given ids, fp32 [n][vocab], for comparisons with other programs.
 *
 *   check_logits MODEL_DIR BACKEND CHUNK OUT_FILE < ids
 *
 * BACKEND is one of the engine's, or cuda-fp8: cuda with FP8 experts, or cuda-dense8 or
 * cpu-dense8: with dense weights in FP8. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/clock.h"
#include "common/model/engine.h"

#define MAX_IDS 8192

/* When weights were half loaded: a device's are read first, and then sent. */
static uint64_t half_ns, half_bytes;

static void on_progress(void *ud, uint64_t done, uint64_t total)
{
    (void)ud;
    if (half_ns == 0 && done >= total / 2) {
        half_ns = dmk_clock_ns();
        half_bytes = done;
    }
}

int main(int argc, char **argv)
{
    static uint32_t ids[MAX_IDS], pages[MAX_IDS / 64 + 1];
    uint32_t n = 0, chunk;
    struct dmk_engine *engine;
    struct dmk_error error = {0};
    if (argc != 5 || (chunk = (uint32_t)strtoul(argv[3], NULL, 10)) == 0) {
        fprintf(stderr, "usage: check_logits MODEL_DIR BACKEND CHUNK OUT_FILE < ids\n");
        return 2;
    }
    while (n < MAX_IDS && scanf("%u", &ids[n]) == 1) {
        n++;
    }
    for (uint32_t i = 0; i < sizeof(pages) / sizeof(pages[0]); i++) {
        pages[i] = i;
    }
    const bool fp8 = strcmp(argv[2], "cuda-fp8") == 0, host = strcmp(argv[2], "cpu-dense8") == 0;
    const bool dense = host || strcmp(argv[2], "cuda-dense8") == 0;
    const struct dmk_engine_conf conf = {.model_dir = argv[1],
                                         .backend = host           ? "cpu"
                                                    : fp8 || dense ? "cuda"
                                                                   : argv[2],
                                         .fp8_experts = fp8,
                                         .fp8_dense = dense,
                                         .layout = {1, 1},
                                         .n_full_pages = n / 64 + 2,
                                         .n_window_pages = 3,
                                         .max_step_tokens = chunk,
                                         .max_step_seqs = 1,
                                         .max_logit_rows = chunk,
                                         .on_progress = on_progress};
    const uint64_t start = dmk_clock_ns();
    if (dmk_engine_open(&conf, &engine, &error) != 0) {
        fprintf(stderr, "check_logits: %s\n", error.text);
        return 1;
    }
    fprintf(stderr, "check_logits: %.2f GB read in %.2f s, open after %.2f s\n",
            (double)half_bytes / 1e9, (double)(half_ns - start) / 1e9,
            (double)(dmk_clock_ns() - start) / 1e9);
    const size_t vocab = dmk_engine_shape(engine)->vocab;
    float *logits = malloc(chunk * vocab * sizeof(float));
    FILE *out = fopen(argv[4], "wb");
    int status = logits && out ? 0 : -1;
    for (uint32_t pos = 0; pos < n && status == 0; pos += chunk) {
        struct dmk_step_seq seq = {.ids = ids + pos,
                                   .n_tokens = n - pos < chunk ? n - pos : chunk,
                                   .pos = pos,
                                   .full_pages = pages,
                                   .ring = {0, 1, 2},
                                   .n_ring = 3,
                                   .logits = DMK_LOGITS_ALL};
        status = dmk_engine_step(engine,
                                 &(struct dmk_step){.seqs = &seq, .n_seqs = 1, .logits = logits});
        if (status == 0 &&
            fwrite(logits, vocab * sizeof(float), seq.n_tokens, out) != seq.n_tokens) {
            status = -1;
        }
    }
    if (out && fclose(out) != 0) {
        status = -1;
    }
    free(logits);
    dmk_engine_close(&engine);
    return status != 0;
}
