/* The header reader: marks cut the header into parts (author, channel, type), each part into words, each
 * word is tried against what may stand there. Never fails. No state between calls. */
#include "common/chat/harmony_header.h"

#include "common/text/unicode.h"
#include "common/text/utf8.h"

enum part { PART_AUTHOR, PART_CHANNEL, PART_TYPE };

/* The part that is being read. */
struct reader {
    struct dmk_harmony_header *header;
    bool assistant, closed;
    enum part part;
    struct dmk_str text; /* of the part */
    size_t at;           /* behind the last word taken */
    unsigned n_left;     /* words that were left over, in all parts so far */
    bool last_left_ok;   /* the last one could be the beginning of something */
};

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Bytes of the white space of Unicode at text[at], or 0: models write U+202F and the like where a blank belongs. */
static size_t space_at(struct dmk_str text, size_t at)
{
    const uint8_t *p = (const uint8_t *)text.data + at;
    const size_t left = text.len - at, n = dmk_utf8_valid_prefix(p, left < 4 ? left : 4);
    uint32_t code;
    unsigned len;

    if (n == 0) {
        return 0;
    }
    len = dmk_utf8_decode(p, n, &code);
    return dmk_unicode_class(code) & (DMK_CLASS_SPACE | DMK_CLASS_NEWLINE) ? len : 0;
}

static bool starts_with(struct dmk_str text, const char *prefix)
{
    const size_t len = strlen(prefix);

    return text.len >= len && memcmp(text.data, prefix, len) == 0;
}

static bool is_prefix_of(struct dmk_str text, const char *whole)
{
    return text.len <= strlen(whole) && memcmp(text.data, whole, text.len) == 0;
}

static struct dmk_str skip(struct dmk_str text, size_t n)
{
    return (struct dmk_str){text.data + n, text.len - n};
}

/* The next word of the part; false at its end. */
static bool next_word(struct reader *r, struct dmk_str *ret_word)
{
    size_t from = r->at, to, n;

    while (from < r->text.len && (n = space_at(r->text, from)) > 0) {
        r->header->noise |= n > 1;
        from += n;
    }
    to = from;
    while (to < r->text.len && space_at(r->text, to) == 0) {
        to++;
    }
    if (to == from) {
        return false;
    }
    r->at = to;
    *ret_word = (struct dmk_str){r->text.data + from, to - from};
    return true;
}

static bool peek_word(const struct reader *r, struct dmk_str *ret_word)
{
    struct reader ahead = *r;

    return next_word(&ahead, ret_word);
}

static enum dmk_harmony_channel channel_of(struct dmk_str word)
{
    if (dmk_str_is(word, "analysis")) {
        return DMK_CHANNEL_ANALYSIS;
    }
    if (dmk_str_is(word, "commentary")) {
        return DMK_CHANNEL_COMMENTARY;
    }
    return dmk_str_is(word, "final") ? DMK_CHANNEL_FINAL : DMK_CHANNEL_UNKNOWN;
}

static bool is_other_role(struct dmk_str word)
{
    static const char *const roles[] = {"user", "system", "developer", "tool"};

    for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++) {
        const size_t len = strlen(roles[i]);

        if (starts_with(word, roles[i]) && (word.len == len || word.data[len] == ':')) {
            return true;
        }
    }
    return false;
}

static bool read_type(struct dmk_str word, enum dmk_call_type *ret_type)
{
    static const enum dmk_call_type types[] = {DMK_CALL_JSON, DMK_CALL_CODE, DMK_CALL_TEXT};

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (dmk_str_equal(word, dmk_call_type_word(types[i]))) {
            *ret_type = types[i];
            return true;
        }
    }
    return false;
}

/* Letters, digits, '_', '-', '.': what names and types are made of. */
static bool is_name(struct dmk_str word)
{
    for (size_t i = 0; i < word.len; i++) {
        const char c = word.data[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '_' || c == '-' || c == '.')) {
            return false;
        }
    }
    return true;
}

/* Where what is left over goes. */
static struct dmk_buf *leftovers(struct reader *r)
{
    return r->header->channel > DMK_CHANNEL_UNKNOWN && r->part != PART_AUTHOR ? &r->header->rest
                                                                              : &r->header->prose;
}

/* A word that means nothing. In an open header it begins the body, which lasts to the part's end. */
static void leave(struct reader *r, struct dmk_str word)
{
    struct dmk_buf *out = leftovers(r);

    r->header->noise = true;
    r->n_left++;
    if (r->part == PART_AUTHOR && r->assistant) {
        r->last_left_ok = is_prefix_of(word, "to=") || is_prefix_of(word, "assistant");
    } else {
        r->last_left_ok = is_name(word);
    }
    if (r->closed) {
        if (out->len) {
            dmk_buf_putc(out, ' ');
        }
        dmk_buf_append_str(out, word);
        return;
    }
    dmk_buf_append(out, word.data, (size_t)(r->text.data + r->text.len - word.data));
    while (next_word(r, &word)) {
        r->n_left++;
    }
}

static void take_recipient(struct reader *r, struct dmk_str name)
{
    const char *cut = memchr(name.data, '<', name.len);

    if (cut) {
        name.len = (size_t)(cut - name.data);
    }
    if (r->header->recipient.len || !name.len) {
        r->header->noise = true;
        return;
    }
    r->header->recipient = name;
    r->header->form.recipient_in_channel = r->part != PART_AUTHOR;
}

/* An open header whose author is known and that has said nothing yet: words are text, not header. */
static bool begins_text(const struct reader *r)
{
    return !r->closed && r->part == PART_AUTHOR && !r->header->recipient.len;
}

/* A word that may stand in any part. */
static void read_word(struct reader *r, struct dmk_str word)
{
    enum dmk_call_type type;
    struct dmk_str name;

    if (starts_with(word, "to=")) {
        name = skip(word, 3);
        if (name.len == 0) {
            r->header->noise = true;
            next_word(r, &name);
        }
        take_recipient(r, name);
    } else if (begins_text(r)) {
        leave(r, word);
    } else if (starts_with(word, "functions.") && !r->header->recipient.len) {
        r->header->noise = true;
        take_recipient(r, word);
    } else if (read_type(word, &type)) {
        /* Said twice, or beside an author who addresses nobody. */
        r->header->noise |= r->header->form.type != DMK_CALL_NO_TYPE ||
                            (r->part == PART_AUTHOR && !r->header->recipient.len);
        r->header->form.type = type;
    } else {
        leave(r, word);
    }
}

/* The word "assistant", said any number of times, taken off the front; in an open header only when nothing
 * is glued to it, since it may be text. */
static struct dmk_str strip_role(struct reader *r, struct dmk_str word)
{
    struct dmk_str left = word;

    while (starts_with(left, "assistant")) {
        left = skip(left, strlen("assistant"));
    }
    if (left.len == word.len || (left.len && !r->closed)) {
        return word;
    }
    r->header->noise |= r->assistant || word.len - left.len > strlen("assistant");
    r->assistant = true;
    return left;
}

static void read_author_part(struct reader *r)
{
    struct dmk_str word, next;

    while (next_word(r, &word)) {
        word = strip_role(r, word);
        if (word.len == 0) {
            continue;
        }
        if (r->closed && channel_of(word) != DMK_CHANNEL_UNKNOWN) {
            r->header->channel = channel_of(word);
            r->header->noise = true;
            r->assistant = true;
            continue;
        }
        const bool alone = !peek_word(r, &next) || starts_with(next, "to=");

        if (!r->assistant && (is_other_role(word) || starts_with(word, "functions.") ||
                              (r->closed && alone && !starts_with(word, "to=")))) {
            r->header->foreign = true;
            r->assistant = true;
            continue;
        }
        read_word(r, word);
    }
}

static void read_channel_part(struct reader *r)
{
    struct dmk_str word, next;

    if (!next_word(r, &word)) {
        r->header->noise = true;
        return;
    }
    r->header->noise |= is_space(r->text.data[0]);
    const char *cut = memchr(word.data, '<', word.len);
    const struct dmk_str name = {word.data, cut ? (size_t)(cut - word.data) : word.len};
    const enum dmk_harmony_channel channel = channel_of(name);
    const bool has_recipient = peek_word(r, &next) && starts_with(next, "to=");

    r->header->noise |= cut || r->header->channel != DMK_CHANNEL_NONE;
    if (channel != DMK_CHANNEL_UNKNOWN || r->header->channel == DMK_CHANNEL_NONE) {
        r->header->channel = channel;
    }
    if (channel == DMK_CHANNEL_UNKNOWN && !has_recipient && (!r->closed || peek_word(r, &next))) {
        leave(r, word);
    }
    while (next_word(r, &word)) {
        read_word(r, word);
    }
}

static void read_type_part(struct reader *r)
{
    struct dmk_str word;
    size_t n = 0;

    r->header->noise |= r->header->form.constrain || r->header->form.type != DMK_CALL_NO_TYPE;
    r->header->form.constrain = true;
    r->header->form.space_after = r->text.len && is_space(r->text.data[0]);
    if (!next_word(r, &word)) {
        return;
    }
    while (n < word.len && is_name((struct dmk_str){word.data + n, 1})) {
        n++;
    }
    if (starts_with(word, "to=")) {
        n = 0;
    }
    if (!read_type((struct dmk_str){word.data, n}, &r->header->form.type)) {
        r->header->noise = true;
        n = r->closed ? n : 0;
    }
    if (n < word.len) {
        read_word(r, skip(word, n));
    }
    while (next_word(r, &word)) {
        read_word(r, word);
    }
}

/* Reads text[from..] as the part that the last mark began. */
static void read_part(struct reader *r, size_t from)
{
    const struct dmk_str text = dmk_buf_str(&r->header->text);

    r->text = skip(text, from);
    r->at = 0;
    switch (r->part) {
    case PART_AUTHOR:
        read_author_part(r);
        break;
    case PART_CHANNEL:
        read_channel_part(r);
        break;
    case PART_TYPE:
        read_type_part(r);
        break;
    }
}

void dmk_harmony_header_init(struct dmk_harmony_header *header)
{
    *header = (struct dmk_harmony_header){0};
    dmk_buf_init(&header->prose, 0);
    dmk_buf_init(&header->rest, 0);
    dmk_buf_init(&header->text, 0);
}

void dmk_harmony_header_fini(struct dmk_harmony_header *header)
{
    dmk_buf_fini(&header->prose);
    dmk_buf_fini(&header->rest);
    dmk_buf_fini(&header->text);
}

static void reset(struct dmk_harmony_header *header)
{
    dmk_buf_reset(&header->prose);
    dmk_buf_reset(&header->rest);
    dmk_buf_reset(&header->text);
    header->channel = DMK_CHANNEL_NONE;
    header->recipient = (struct dmk_str){"", 0};
    header->form = (struct dmk_call_form){0};
    header->foreign = header->no_author = header->noise = header->partial = false;
}

/* Views into text must stay good while it grows: room for all of it is made first. */
static void reserve(struct dmk_harmony_header *header, const struct dmk_vocab *vocab,
                    const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct dmk_bytes bytes = dmk_token_bytes(vocab, ids[i]);

        dmk_buf_append(&header->text, bytes.data, bytes.len);
    }
    dmk_buf_reset(&header->text);
}

void dmk_harmony_header_read(struct dmk_harmony_header *header, const struct dmk_vocab *vocab,
                             const uint32_t *ids, size_t n, bool assistant, bool closed)
{
    struct reader r = {.header = header, .assistant = assistant, .closed = closed};
    size_t from = 0;

    reset(header);
    reserve(header, vocab, ids, n);
    for (size_t i = 0; i < n; i++) {
        const struct dmk_bytes bytes = dmk_token_bytes(vocab, ids[i]);

        if (ids[i] != DMK_TOKEN_CHANNEL && ids[i] != DMK_TOKEN_CONSTRAIN) {
            dmk_buf_append(&header->text, bytes.data, bytes.len);
            continue;
        }
        const struct dmk_str text = dmk_buf_str(&header->text);

        read_part(&r, from);
        if (ids[i] == DMK_TOKEN_CONSTRAIN && !header->form.constrain) {
            header->form.space_before = text.len > from && is_space(text.data[text.len - 1]);
        }
        header->noise |= ids[i] == DMK_TOKEN_CHANNEL && r.part == PART_TYPE;
        r.part = ids[i] == DMK_TOKEN_CHANNEL ? PART_CHANNEL : PART_TYPE;
        from = header->text.len;
    }
    read_part(&r, from);
    header->no_author = !r.assistant;
    if (!closed) {
        header->partial = r.n_left == 0 || (r.n_left == 1 && r.last_left_ok && r.text.len);
    }
    if (header->channel == DMK_CHANNEL_NONE) {
        header->form.channel = DMK_CALL_NO_CHANNEL;
    } else if (header->channel == DMK_CHANNEL_ANALYSIS) {
        header->form.channel = DMK_CALL_ANALYSIS;
    }
    header->form.bare_name = !starts_with(header->recipient, "functions.");
    /* The type behind the constrain mark may have been said in words before it. */
    if (header->form.constrain && header->form.type == DMK_CALL_NO_TYPE) {
        header->form.space_after = false;
    }
}
