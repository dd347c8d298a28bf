/* Reads the vocabulary out of a Hugging Face tokenizer.json. Cold code.
 *
 * Of the file only model.vocab and added_tokens are used: the splitter is our own, and the merge list follows from
 * the ranks. A list that the file has is summed up here, so that a damaged one does not go unnoticed. Token texts there are bytes written in GPT-2's alphabet of printable characters.
 * Whether the tokens are the right ones is for the hash to say; that the special tokens have Harmony's ids
 * is checked here. */
#include "common/text/vocab.h"
#include "common/json/json.h"
#include "common/text/utf8.h"
#include <stdlib.h>
#include <string.h>

#define JSON_DEPTH   16   /* a real file has 6 */
#define ALPHABET_END 324u /* code points below it stand for bytes */

/* Byte of each code point of the alphabet, or -1. Printable Latin-1 characters stand for themselves, the
 * other 68 bytes, in order, for U+0100 on. */
static void fill_alphabet(int16_t byte_of[ALPHABET_END])
{
    uint32_t next = 256;

    for (uint32_t i = 0; i < ALPHABET_END; i++) {
        byte_of[i] = -1;
    }
    for (int byte = 0; byte < 256; byte++) {
        const bool printable =
            (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;

        byte_of[printable ? (uint32_t)byte : next++] = (int16_t)byte;
    }
}

/* Number of bytes, or -1 for text outside the alphabet or longer than a token can be. */
static int decode_token(const int16_t byte_of[ALPHABET_END], const char *text, size_t len,
                        uint8_t out[DMK_RANK_BYTES_MAX])
{
    const uint8_t *p = (const uint8_t *)text;
    size_t pos = 0, n = 0;

    while (pos < len) {
        uint32_t code;

        pos += dmk_utf8_decode(p + pos, len - pos, &code); /* the parser takes valid UTF-8 only */
        if (code >= ALPHABET_END || byte_of[code] < 0 || n == DMK_RANK_BYTES_MAX) {
            return -1;
        }
        out[n++] = (uint8_t)byte_of[code];
    }
    return (int)n;
}

/* Whether text is how the special token id is spelled. */
static bool is_special(const struct dmk_vocab *vocab, json_int_t id, const char *text, size_t len)
{
    size_t n;

    return id >= DMK_TOKEN_FIRST_SPECIAL && id < DMK_VOCAB_SIZE &&
           dmk_special_match(vocab, (struct dmk_str){text, len}, &n) == (uint32_t)id && n == len;
}

/* Puts each token's text where its id says. text: [DMK_RANKS], all NULL. */
static int sort_tokens(const struct dmk_vocab *vocab, const char *path, json_t *tokens,
                       const char **text, size_t *text_len, struct dmk_error *reterr)
{
    const char *key;
    size_t key_len;
    json_t *value;

    json_object_keylen_foreach(tokens, key, key_len, value)
    {
        const json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;

        if (is_special(vocab, id, key, key_len)) {
            continue;
        }
        if (id < 0 || id >= (json_int_t)DMK_RANKS || text[id]) {
            return dmk_error_set(
                reterr, -DMK_EFORMAT,
                "%s: the token '%.40s' has the id %lld, which is not a free one below %u", path,
                key, (long long)id, DMK_RANKS);
        }
        text[id] = key;
        text_len[id] = key_len;
    }
    return 0;
}

static int add_tokens(struct dmk_vocab *vocab, const char *path, json_t *tokens, const char **text,
                      size_t *text_len, struct dmk_error *reterr)
{
    int16_t byte_of[ALPHABET_END];
    uint8_t bytes[DMK_RANK_BYTES_MAX];
    int r = sort_tokens(vocab, path, tokens, text, text_len, reterr);

    if (r < 0) {
        return r;
    }
    fill_alphabet(byte_of);
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        int n;

        if (!text[id]) {
            return dmk_error_set(reterr, -DMK_EFORMAT, "%s: no token has the id %u", path, id);
        }
        n = decode_token(byte_of, text[id], text_len[id], bytes);
        r = n < 0 ? -DMK_EFORMAT : dmk_vocab_add(vocab, bytes, (size_t)n);
        if (r == -DMK_ENOMEM) {
            return dmk_error_set(reterr, r, "no memory for the tokens of %s", path);
        }
        if (r < 0) {
            return dmk_error_set(reterr, r,
                                 "%s: the token '%.40s' of id %u is not 1 to %u bytes in the "
                                 "byte alphabet",
                                 path, text[id], id, DMK_RANK_BYTES_MAX);
        }
    }
    return 0;
}

/* One entry of model.merges: ["left","right"], or "left right" in files of older tools. */
static int add_merge(struct dmk_vocab *vocab, const int16_t byte_of[ALPHABET_END], json_t *entry)
{
    uint8_t left[DMK_RANK_BYTES_MAX], right[DMK_RANK_BYTES_MAX];
    const char *a, *b;
    size_t a_len, b_len;

    if (json_is_array(entry) && json_array_size(entry) == 2) {
        json_t *first = json_array_get(entry, 0), *second = json_array_get(entry, 1);

        a = json_string_value(first), a_len = json_string_length(first);
        b = json_string_value(second), b_len = json_string_length(second);
    } else {
        const char *blank;

        a = json_string_value(entry);
        blank = a ? strchr(a, ' ') : NULL; /* a blank in a token is spelled U+0120 */
        b = blank ? blank + 1 : NULL;
        a_len = blank ? (size_t)(blank - a) : 0;
        b_len = blank ? json_string_length(entry) - a_len - 1 : 0;
    }
    const int n_left = a ? decode_token(byte_of, a, a_len, left) : -1;
    const int n_right = b ? decode_token(byte_of, b, b_len, right) : -1;
    if (n_left <= 0 || n_right <= 0) {
        return -DMK_EFORMAT;
    }
    vocab->merges.n++;
    vocab->merges.sum += dmk_merge_hash((struct dmk_bytes){left, (size_t)n_left},
                                        (struct dmk_bytes){right, (size_t)n_right});
    return 0;
}

static int add_merges(struct dmk_vocab *vocab, const char *path, json_t *merges,
                      struct dmk_error *reterr)
{
    int16_t byte_of[ALPHABET_END];
    json_t *entry;
    size_t i;

    fill_alphabet(byte_of);
    json_array_foreach(merges, i, entry)
    {
        if (add_merge(vocab, byte_of, entry) < 0) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "%s: entry %zu of model.merges is not two tokens", path, i);
        }
    }
    return 0;
}

static int check_added(const struct dmk_vocab *vocab, const char *path, json_t *added,
                       struct dmk_error *reterr)
{
    json_t *item;
    size_t i;

    json_array_foreach(added, i, item)
    {
        json_t *content = json_object_get(item, "content");
        json_t *id = json_object_get(item, "id");

        if (!json_is_string(content) || !json_is_integer(id) ||
            !is_special(vocab, json_integer_value(id), json_string_value(content),
                        json_string_length(content))) {
            return dmk_error_set(
                reterr, -DMK_EMISMATCH,
                "%s: the added token '%.40s' of id %lld is not one of o200k_harmony", path,
                json_is_string(content) ? json_string_value(content) : "",
                json_is_integer(id) ? (long long)json_integer_value(id) : -1);
        }
    }
    return 0;
}

int dmk_vocab_read_hf(struct dmk_vocab *vocab, const char *path, struct dmk_bytes data,
                      struct dmk_error *reterr)
{
    json_t *root = NULL, *model, *tokens;
    const char **text = calloc(DMK_RANKS, sizeof(*text));
    size_t *text_len = calloc(DMK_RANKS, sizeof(*text_len));
    const char *type;
    int r;

    if (!text || !text_len) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the tokens of %s", path);
        goto out;
    }
    r = dmk_json_parse((struct dmk_str){(const char *)data.data, data.len}, path, JSON_DEPTH, &root,
                       reterr);
    if (r < 0) {
        goto out;
    }
    model = json_object_get(root, "model");
    tokens = json_object_get(model, "vocab");
    type = json_string_value(json_object_get(model, "type"));
    if (!type || strcmp(type, "BPE") != 0 || !json_is_object(tokens)) {
        r = dmk_error_set(
            reterr, -DMK_EFORMAT,
            "%s is no tokenizer.json of a byte-pair vocabulary: model.type is '%s' and "
            "model.vocab is %s",
            path, type ? type : "missing", tokens ? "present" : "missing");
        goto out;
    }
    r = add_tokens(vocab, path, tokens, text, text_len, reterr);
    if (r == 0) {
        r = add_merges(vocab, path, json_object_get(model, "merges"), reterr);
    }
    if (r == 0) {
        r = check_added(vocab, path, json_object_get(root, "added_tokens"), reterr);
    }
out:
    free(text);
    free(text_len);
    json_decref(root);
    return r;
}
