/* damask tokenize: text on stdin to ids on stdout, or back. For people, scripts and tests.
 *
 * Frames (--frames) are for programs that have many texts: each is a 32-bit little-endian length and as many
 * bytes of text, answered by a 32-bit count and as many 32-bit ids, in order; with --decode the other way
 * round. The end of stdin at a frame's border ends the run. */
#include "tools/damask.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "common/conf/conf.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"

#define TEXT_BYTES_MAX ((size_t)64 << 20)
#define READ_BYTES     65536

struct options {
    char *vocab;
    bool decode, json, frames, specials;
};

#define AT(f) offsetof(struct options, f)

static const struct dmk_conf_option table[] = {
    {"vocab", DMK_CONF_STR, NULL, 0, 0, NULL,
     "o200k_base.tiktoken, a tokenizer.json, or the folder of either", AT(vocab)},
    {"decode", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "read ids (decimal numbers; anything else separates them) and write their text", AT(decode)},
    {"json", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "write an array of ids; with --decode a string, in which invalid UTF-8 is U+FFFD", AT(json)},
    {"specials", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "spellings such as <|start|> in the text become special tokens", AT(specials)},
    {"frames", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "many texts: 32-bit little-endian length and bytes in, count and 32-bit ids out", AT(frames)},
};

static const struct dmk_conf_program program = {
    .name = "damask tokenize",
    .summary = "turn text on stdin into token ids of o200k_harmony, or ids into text",
    .usage = "",
    .options = table,
    .n_options = sizeof(table) / sizeof(table[0]),
};

struct job {
    const struct options *options;
    struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
    struct dmk_buf in, out;
    struct dmk_ids ids;
};

/* Reads until want bytes are in buf, or to the end of stdin. */
static int read_input(struct dmk_buf *buf, size_t want, struct dmk_error *reterr)
{
    char chunk[READ_BYTES];

    while (buf->len < want) {
        const size_t room = want - buf->len;
        const ssize_t n = read(STDIN_FILENO, chunk, room < sizeof(chunk) ? room : sizeof(chunk));

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return dmk_error_set(reterr, -DMK_EIO, "can not read stdin: %s", strerror(errno));
        }
        if (n == 0) {
            break;
        }
        dmk_buf_append(buf, chunk, (size_t)n);
        if (buf->failed) {
            return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %zu bytes of input", want);
        }
    }
    return 0;
}

static int write_output(struct dmk_buf *out, struct dmk_error *reterr)
{
    if (out->failed || fwrite(out->data ? out->data : "", 1, out->len, stdout) != out->len ||
        fflush(stdout) != 0) {
        return dmk_error_set(reterr, -DMK_EIO, "can not write %zu bytes to stdout", out->len);
    }
    dmk_buf_reset(out);
    return 0;
}

static int encode(struct job *job, struct dmk_error *reterr)
{
    const struct dmk_str text = dmk_buf_str(&job->in);

    job->ids.len = 0;
    if (job->options->specials) {
        dmk_encode_with_specials(job->vocab, job->scratch, text, &job->ids);
    } else {
        dmk_encode(job->vocab, job->scratch, text, &job->ids);
    }
    return job->ids.failed ? dmk_error_set(reterr, -DMK_EFULL,
                                           "a text of %zu bytes has more tokens than fit", text.len)
                           : 0;
}

static int decode(struct job *job, struct dmk_buf *out, struct dmk_error *reterr)
{
    for (size_t i = 0; i < job->ids.len; i++) {
        const int r = dmk_decode(job->vocab, &job->ids.data[i], 1, out);

        if (r == -DMK_EINVAL) {
            return dmk_error_set(reterr, r, "id %u is outside the vocabulary, which ends at %u",
                                 job->ids.data[i], DMK_VOCAB_SIZE - 1);
        }
        if (r < 0) {
            return dmk_error_set(reterr, r, "the text of %zu ids is too long", job->ids.len);
        }
    }
    return 0;
}

/* Decimal numbers out of text; digits that make no id are refused by decode. */
static int parse_ids(struct job *job, struct dmk_error *reterr)
{
    const struct dmk_str text = dmk_buf_str(&job->in);

    for (size_t i = 0; i < text.len;) {
        uint64_t id = 0;
        size_t n = 0;

        while (i + n < text.len && text.data[i + n] >= '0' && text.data[i + n] <= '9') {
            id = id < UINT32_MAX ? id * 10 + (uint64_t)(text.data[i + n] - '0') : id;
            n++;
        }
        if (n > 0) {
            dmk_ids_push(&job->ids, id < UINT32_MAX ? (uint32_t)id : UINT32_MAX);
        }
        i += n ? n : 1;
    }
    return job->ids.failed ? dmk_error_set(reterr, -DMK_EFULL, "more ids than fit") : 0;
}

/* text, valid UTF-8, as a JSON string. */
static void append_json(struct dmk_buf *out, struct dmk_str text)
{
    dmk_buf_putc(out, '"');
    for (size_t i = 0; i < text.len; i++) {
        const char c = text.data[i];

        if (c == '"' || c == '\\') {
            dmk_buf_putc(out, '\\');
            dmk_buf_putc(out, c);
        } else if ((unsigned char)c < 0x20) {
            dmk_buf_printf(out, "\\u%04x", (unsigned)c);
        } else {
            dmk_buf_putc(out, c);
        }
    }
    dmk_buf_puts(out, "\"\n");
}

static int run_text(struct job *job, struct dmk_error *reterr)
{
    struct dmk_buf text, valid;
    int r = read_input(&job->in, TEXT_BYTES_MAX + 1, reterr);

    if (r < 0) {
        return r;
    }
    if (job->in.len > TEXT_BYTES_MAX) {
        return dmk_error_set(reterr, -DMK_EFULL, "more than %zu bytes of input; use --frames",
                             TEXT_BYTES_MAX);
    }
    if (!job->options->decode) {
        r = encode(job, reterr);
        dmk_buf_puts(&job->out, job->options->json ? "[" : "");
        for (size_t i = 0; r == 0 && i < job->ids.len; i++) {
            dmk_buf_printf(&job->out, "%s%u",
                           i == 0               ? ""
                           : job->options->json ? ","
                                                : " ",
                           job->ids.data[i]);
        }
        dmk_buf_puts(&job->out, job->options->json ? "]\n" : "\n");
        return r < 0 ? r : write_output(&job->out, reterr);
    }
    r = parse_ids(job, reterr);
    if (r < 0) {
        return r;
    }
    if (!job->options->json) {
        r = decode(job, &job->out, reterr);
        return r < 0 ? r : write_output(&job->out, reterr);
    }
    dmk_buf_init(&text, 0);
    dmk_buf_init(&valid, 0);
    r = decode(job, &text, reterr);
    dmk_utf8_append_lossy(&valid, dmk_buf_bytes(&text));
    append_json(&job->out, dmk_buf_str(&valid));
    job->out.failed |= valid.failed;
    dmk_buf_fini(&text);
    dmk_buf_fini(&valid);
    return r < 0 ? r : write_output(&job->out, reterr);
}

static void append_u32(struct dmk_buf *out, uint32_t value)
{
    const uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                              (uint8_t)(value >> 24)};

    dmk_buf_append(out, bytes, 4);
}

static uint32_t read_u32(const char *data)
{
    const uint8_t *p = (const uint8_t *)data;

    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* The answer to the frame in job->in. */
static int answer_frame(struct job *job, struct dmk_error *reterr)
{
    int r;

    if (!job->options->decode) {
        r = encode(job, reterr);
        append_u32(&job->out, (uint32_t)job->ids.len);
        for (size_t i = 0; i < job->ids.len; i++) {
            append_u32(&job->out, job->ids.data[i]);
        }
    } else {
        struct dmk_buf text;

        job->ids.len = 0;
        for (size_t i = 0; i < job->in.len; i += 4) {
            dmk_ids_push(&job->ids, read_u32(job->in.data + i));
        }
        dmk_buf_init(&text, 0);
        r = decode(job, &text, reterr);
        append_u32(&job->out, (uint32_t)text.len);
        dmk_buf_append(&job->out, text.data, text.len);
        dmk_buf_fini(&text);
    }
    return r < 0 ? r : write_output(&job->out, reterr);
}

static int run_frames(struct job *job, struct dmk_error *reterr)
{
    for (;;) {
        size_t want;
        int r;

        dmk_buf_reset(&job->in);
        r = read_input(&job->in, 4, reterr);
        if (r < 0 || job->in.len == 0) {
            return r;
        }
        want = job->in.len < 4 ? 4 : read_u32(job->in.data) * (job->options->decode ? 4ull : 1ull);
        if (want > TEXT_BYTES_MAX) {
            return dmk_error_set(reterr, -DMK_EFULL, "a frame of %zu bytes, %zu are allowed", want,
                                 TEXT_BYTES_MAX);
        }
        if (job->in.len == 4) {
            dmk_buf_reset(&job->in);
            r = read_input(&job->in, want, reterr);
        }
        if (r == 0 && job->in.len < want) {
            r = dmk_error_set(reterr, -DMK_EFORMAT, "stdin ended inside a frame");
        }
        r = r < 0 ? r : answer_frame(job, reterr);
        if (r < 0) {
            return r;
        }
    }
}

static int run(const struct options *o, struct dmk_error *reterr)
{
    struct job job = {.options = o};
    int r = dmk_vocab_open(o->vocab, &job.vocab, reterr);

    if (r < 0) {
        return r;
    }
    job.scratch = dmk_bpe_scratch_new();
    dmk_buf_init(&job.in, TEXT_BYTES_MAX + READ_BYTES);
    dmk_buf_init(&job.out, SIZE_MAX / 4);
    dmk_ids_init(&job.ids, TEXT_BYTES_MAX);
    if (!job.scratch) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the tokenizer's scratch");
    } else {
        r = o->frames ? run_frames(&job, reterr) : run_text(&job, reterr);
    }
    dmk_ids_fini(&job.ids);
    dmk_buf_fini(&job.in);
    dmk_buf_fini(&job.out);
    dmk_bpe_scratch_free(&job.scratch);
    dmk_vocab_close(&job.vocab);
    return r;
}

int dmk_cmd_tokenize(int argc, char **argv)
{
    struct options o = {0};
    struct dmk_error err = {0};
    int r = dmk_conf_load(&program, argc, argv, &o, NULL, &err);

    if (r == 0) {
        r = run(&o, &err);
    }
    dmk_conf_free(&program, &o);
    if (r < 0) {
        (void)fprintf(stderr, "damask tokenize: %s\n", err.text);
        return 1;
    }
    return 0;
}
