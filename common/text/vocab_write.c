/* tokenizer.json in the form of Hugging Face's tokenizers, made from a rank file.
 *
 * Token texts are bytes in GPT-2's alphabet of printable characters. The merge list has every pair of
 * tokens that make a token, by the rank of what they make: the list that merges as the ranks do. */
#include "common/text/tokenizer.h"
#include "common/text/vocab.h"

/* The pattern of o200k_base as a JSON string. */
#define LETTERS_UP  "\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}"
#define LETTERS_LOW "\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}"
#define PREFIX      "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?"
#define SUFFIX      "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
static const char split_pattern[] = PREFIX
    "[" LETTERS_UP "]*[" LETTERS_LOW "]+" SUFFIX "|" PREFIX "[" LETTERS_UP "]+[" LETTERS_LOW
    "]*" SUFFIX "|\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n/]*|\\\\s*[\\\\r\\\\n]+|"
    "\\\\s+(?!\\\\S)|\\\\s+";

static const struct {
    uint32_t id;
    const char *text;
} specials[] = {
    {199998, "<|startoftext|>"},
    {199999, "<|endoftext|>"},
    {200000, "<|reserved_200000|>"},
    {200001, "<|reserved_200001|>"},
    {200002, "<|return|>"},
    {200003, "<|constrain|>"},
    {200004, "<|reserved_200004|>"},
    {200005, "<|channel|>"},
    {200006, "<|start|>"},
    {200007, "<|end|>"},
    {200008, "<|message|>"},
    {200009, "<|reserved_200009|>"},
    {200010, "<|reserved_200010|>"},
    {200011, "<|reserved_200011|>"},
    {200012, "<|call|>"},
    {200013, "<|reserved_200013|>"},
    {200014, "<|reserved_200014|>"},
    {200015, "<|reserved_200015|>"},
    {200016, "<|reserved_200016|>"},
    {200017, "<|reserved_200017|>"},
    {200018, "<|endofprompt|>"},
};

/* Bytes in GPT-2's alphabet, inside a JSON string. */
static void put_text(struct dmk_buf *out, const uint8_t *data, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        const uint32_t byte = data[i];
        uint32_t code = byte;

        if (byte < 33) {
            code = 256 + byte;
        } else if (byte >= 127 && byte < 161) {
            code = 256 + 33 + byte - 127;
        } else if (byte == 173) {
            code = 256 + 33 + 34;
        }
        if (code == '"' || code == '\\') {
            dmk_buf_putc(out, '\\');
        }
        if (code < 128) {
            dmk_buf_putc(out, (char)code);
        } else {
            dmk_buf_putc(out, (char)(0xc0 | code >> 6));
            dmk_buf_putc(out, (char)(0x80 | (code & 63)));
        }
    }
}

static void put_head(struct dmk_buf *out)
{
    dmk_buf_puts(out,
                 "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[");
    for (size_t i = 0; i < sizeof(specials) / sizeof(specials[0]); i++) {
        dmk_buf_printf(out,
                       "%s{\"id\":%u,\"content\":\"%s\",\"single_word\":false,\"lstrip\":false,"
                       "\"rstrip\":false,\"normalized\":false,\"special\":true}",
                       i ? "," : "", specials[i].id, specials[i].text);
    }
    dmk_buf_puts(
        out, "],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
             "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"");
    dmk_buf_puts(out, split_pattern);
    dmk_buf_puts(
        out,
        "\"},\"behavior\":\"Removed\",\"invert\":true},{\"type\":\"ByteLevel\","
        "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}]},"
        "\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,"
        "\"trim_offsets\":true,\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,"
        "\"unk_token\":null,\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,"
        "\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":true,\"vocab\":{");
}

/* A merge for every way to cut the token into two tokens. */
static void put_merges(const struct dmk_vocab *vocab, uint32_t id, bool *first, struct dmk_buf *out)
{
    const struct dmk_bytes b = dmk_token_bytes(vocab, id);

    for (size_t cut = 1; cut < b.len; cut++) {
        if (!dmk_vocab_is_cut(vocab, b, cut)) {
            continue;
        }
        dmk_buf_puts(out, *first ? "[\"" : ",[\"");
        put_text(out, b.data, cut);
        dmk_buf_puts(out, "\",\"");
        put_text(out, b.data + cut, b.len - cut);
        dmk_buf_puts(out, "\"]");
        *first = false;
    }
}

void dmk_vocab_write_hf(const struct dmk_vocab *vocab, struct dmk_buf *out)
{
    bool first = true;

    put_head(out);
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes b = dmk_token_bytes(vocab, id);

        dmk_buf_puts(out, id ? ",\"" : "\"");
        put_text(out, b.data, b.len);
        dmk_buf_printf(out, "\":%u", id);
    }
    dmk_buf_puts(out, "},\"merges\":[");
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        put_merges(vocab, id, &first, out);
    }
    dmk_buf_puts(out, "]}}\n");
}
