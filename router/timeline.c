/* The times of one request. Pure. */
#include "router/timeline.h"

static void put(struct dmk_buf *out, const char *name, uint64_t from_ns, uint64_t to_ns)
{
    if (from_ns != 0 && to_ns >= from_ns) {
        dmk_buf_printf(out, "%s%s=%.3f", out->len ? " " : "", name,
                       (double)(to_ns - from_ns) / 1e6);
    }
}

void dmk_timeline_text(const struct dmk_timeline *t, struct dmk_buf *out)
{
    struct dmk_buf line;

    dmk_buf_init(&line, 4096);
    put(&line, "tokenise_ms", t->received_ns, t->rendered_ns);
    put(&line, "queue_ms", t->rendered_ns, t->dispatched_ns);
    put(&line, "reserve_ms", t->dispatched_ns, t->reserved_ns);
    if (t->p_compute_us > 0) {
        dmk_buf_printf(&line, " prefill_queue_ms=%.3f prefill_compute_ms=%.3f",
                       (double)t->p_queue_us / 1e3, (double)t->p_compute_us / 1e3);
    }
    put(&line, "prefill_ms", t->reserved_ns, t->prefilled_ns);
    if (t->d_prefill_us > 0) {
        dmk_buf_printf(&line, " local_prefill_ms=%.3f", (double)t->d_prefill_us / 1e3);
    }
    if (t->transfer_bytes > 0) {
        dmk_buf_printf(&line, " transfer_bytes=%llu", (unsigned long long)t->transfer_bytes);
        if (t->transfer_us > 0) {
            dmk_buf_printf(&line, " transfer_ms=%.3f transfer_gb_s=%.3f",
                           (double)t->transfer_us / 1e3,
                           (double)t->transfer_bytes / (double)t->transfer_us / 1e3);
        }
    }
    put(&line, "first_token_ms", t->received_ns, t->first_ns);
    put(&line, "decode_ms", t->first_ns, t->end_ns);
    put(&line, "total_ms", t->received_ns, t->end_ns);
    dmk_buf_printf(&line, "%sattempts=%u", line.len ? " " : "", t->attempts);
    dmk_buf_append_str(out, dmk_buf_str(&line));
    out->failed = out->failed || line.failed;
    dmk_buf_fini(&line);
}
