/* Writing JSON; see json_out.h. */
#include "router/json_out.h"

#include <math.h>
#include "common/text/utf8.h"

void dmk_out_str(struct dmk_buf *out, struct dmk_str text)
{
    static const char hex[] = "0123456789abcdef";
    size_t from = 0;

    dmk_buf_putc(out, '"');
    for (size_t i = 0; i < text.len; i++) {
        const unsigned char c = (unsigned char)text.data[i];
        char esc[7] = {'\\', 0};

        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) {
            continue;
        }
        dmk_buf_append(out, text.data + from, i - from);
        from = i + 1;
        switch (c) {
        case '"':
        case '\\':
            esc[1] = (char)c;
            break;
        case '\n':
            esc[1] = 'n';
            break;
        case '\r':
            esc[1] = 'r';
            break;
        case '\t':
            esc[1] = 't';
            break;
        default:
            esc[1] = 'u';
            esc[2] = esc[3] = '0';
            esc[4] = hex[c >> 4];
            esc[5] = hex[c & 15];
            break;
        }
        dmk_buf_puts(out, esc);
    }
    dmk_buf_append(out, text.data + from, text.len - from);
    dmk_buf_putc(out, '"');
}

void dmk_out_lossy(struct dmk_buf *out, struct dmk_bytes bytes)
{
    struct dmk_buf text;

    if (dmk_utf8_valid_prefix(bytes.data, bytes.len) == bytes.len) {
        dmk_out_str(out, (struct dmk_str){(const char *)bytes.data, bytes.len});
        return;
    }
    dmk_buf_init(&text, 0);
    dmk_utf8_append_lossy(&text, bytes);
    dmk_out_str(out, dmk_buf_str(&text));
    out->failed = out->failed || text.failed;
    dmk_buf_fini(&text);
}

void dmk_out_logprob(struct dmk_buf *out, float logprob)
{
    dmk_buf_printf(out, "%.6g", isfinite(logprob) ? (double)logprob : -9999.0);
}

static void write_bytes(struct dmk_buf *out, struct dmk_bytes bytes)
{
    dmk_buf_putc(out, '[');
    for (size_t i = 0; i < bytes.len; i++) {
        dmk_buf_printf(out, i ? ",%u" : "%u", bytes.data[i]);
    }
    dmk_buf_putc(out, ']');
}

static void write_token(struct dmk_buf *out, struct dmk_bytes bytes, float logprob)
{
    dmk_buf_puts(out, "{\"token\":");
    dmk_out_lossy(out, bytes);
    dmk_buf_puts(out, ",\"logprob\":");
    dmk_out_logprob(out, logprob);
    dmk_buf_puts(out, ",\"bytes\":");
    write_bytes(out, bytes);
}

void dmk_out_tokens(struct dmk_buf *out, const struct dmk_lp *lps, size_t n, bool comma)
{
    for (size_t i = 0; i < n; i++) {
        if (comma || i > 0) {
            dmk_buf_putc(out, ',');
        }
        write_token(out, lps[i].bytes, lps[i].logprob);
        dmk_buf_puts(out, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < lps[i].n_top; k++) {
            if (k > 0) {
                dmk_buf_putc(out, ',');
            }
            write_token(out, lps[i].top[k].bytes, lps[i].top[k].logprob);
            dmk_buf_putc(out, '}');
        }
        dmk_buf_puts(out, "]}");
    }
}

void dmk_out_usage(struct dmk_buf *out, const struct dmk_usage *usage)
{
    dmk_buf_printf(out,
                   "{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u,"
                   "\"prompt_tokens_details\":{\"cached_tokens\":%u},"
                   "\"completion_tokens_details\":{\"reasoning_tokens\":%u}}",
                   usage->n_prompt, usage->n_output, usage->n_prompt + usage->n_output,
                   usage->n_cached, usage->n_reasoning);
}
