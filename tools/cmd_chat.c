/* damask chat: reads lines of JSON from standard input, writes one line for each to standard output. */
#include "tools/damask.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/conf/conf.h"
#include "tools/chat/chat_json.h"

#define MAX_DEPTH 200

struct options {
    char *vocab;
    char *format;
};

static const struct dmk_conf_option table[] = {
    {"vocab", DMK_CONF_STR, NULL, 0, 0, NULL,
     "o200k_base.tiktoken, a tokenizer.json, or a folder with one of them",
     offsetof(struct options, vocab)},
    {"format", DMK_CONF_STR, "harmony", 0, 0, NULL, "chat format: harmony or plain",
     offsetof(struct options, format)},
};

static const struct dmk_conf_program program = {
    .name = "damask chat",
    .summary =
        "conversations to token ids (render), token ids to messages (parse); lines of JSON as "
        "tools/chat/chat_json.h describes them",
    .usage = "render|parse",
    .options = table,
    .n_options = sizeof(table) / sizeof(table[0]),
};

struct session {
    const struct dmk_format *format;
    struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
    bool parses;
};

static int render_line(struct session *s, const json_t *line, json_t **ret_result,
                       struct dmk_error *reterr)
{
    struct dmk_ids ids;
    int r;

    dmk_ids_init(&ids, 0);
    if (json_object_get(line, "harmony")) {
        r = dmk_chat_render_harmony(line, s->vocab, s->scratch, &ids, reterr);
    } else {
        r = dmk_chat_render_conversation(line, s->format, s->vocab, s->scratch, &ids, reterr);
    }
    if (r == 0) {
        json_t *array = json_array();

        for (size_t i = 0; i < ids.len; i++) {
            json_array_append_new(array, json_integer(ids.data[i]));
        }
        *ret_result = json_pack("{s:o}", "ids", array);
    }
    dmk_ids_fini(&ids);
    return r;
}

/* Answers one line; what is wrong with it is its answer. */
static int answer(struct session *s, struct dmk_str text)
{
    struct dmk_error error = {0};
    json_t *line = NULL, *result = NULL;
    int r = dmk_json_parse(text, "the line", MAX_DEPTH, &line, &error);

    if (r == 0) {
        r = s->parses ? dmk_chat_parse_ids(line, s->format, s->vocab, &result, &error)
                      : render_line(s, line, &result, &error);
    }
    if (r < 0) {
        result = json_pack("{s:s}", "error", error.text);
    }
    json_decref(line);
    char *out = json_dumps(result, JSON_COMPACT);

    json_decref(result);
    if (!out) {
        return -DMK_ENOMEM;
    }
    (void)puts(out);
    (void)fflush(stdout);
    free(out);
    return 0;
}

static int answer_all(struct session *s)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    int r = 0;

    while (r == 0 && (len = getline(&line, &cap, stdin)) > 0) {
        r = answer(s, (struct dmk_str){line, (size_t)len - (line[len - 1] == '\n')});
    }
    free(line);
    return r;
}

static int run(const struct options *options, const char *action, struct dmk_error *reterr)
{
    struct session s = {.format = dmk_format_find(options->format),
                        .parses = strcmp(action, "parse") == 0};

    if (!s.parses && strcmp(action, "render") != 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "say render or parse, not \"%s\"", action);
    }
    if (!s.format) {
        return dmk_error_set(reterr, -DMK_EINVAL, "there is no chat format \"%s\"",
                             options->format);
    }
    int r = dmk_vocab_open(options->vocab, &s.vocab, reterr);

    if (r < 0) {
        return r;
    }
    s.scratch = dmk_bpe_scratch_new();
    r = s.scratch ? answer_all(&s) : -DMK_ENOMEM;
    dmk_bpe_scratch_free(&s.scratch);
    dmk_vocab_close(&s.vocab);
    return r < 0 ? dmk_error_set(reterr, r, "%s", dmk_status_message(r)) : 0;
}

int dmk_cmd_chat(int argc, char **argv)
{
    struct options options = {0};
    struct dmk_error error = {0};
    int n_args = 0;
    int r = dmk_conf_load(&program, argc, argv, &options, &n_args, &error);

    if (r == 0) {
        r = run(&options, n_args == 1 ? argv[1] : "", &error);
    }
    if (r < 0) {
        (void)fprintf(stderr, "damask chat: %s\n", error.text);
    }
    dmk_conf_free(&program, &options);
    return r < 0 ? 1 : 0;
}
