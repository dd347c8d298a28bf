/* The archive of the tokenizer; see tokenizer_zip.h. ZIP as PKWARE's APPNOTE has it, deflated by zlib. */
#include "router/tokenizer_zip.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <zlib.h>

#define MAX_BYTES (96u << 20)
#define N_ENTRIES 3

/* A member of the archive. */
struct entry {
    const char *name;
    uint32_t crc, packed, size, offset;
};

static void put_u16(struct dmk_buf *out, uint32_t v)
{
    const uint8_t bytes[2] = {(uint8_t)v, (uint8_t)(v >> 8)};

    dmk_buf_append(out, bytes, 2);
}

static void put_u32(struct dmk_buf *out, uint32_t v)
{
    put_u16(out, v & 0xffff);
    put_u16(out, v >> 16);
}

/* What the local header and the directory say alike: version 2.0, deflate, no time. */
static void put_facts(struct dmk_buf *out, const struct entry *e)
{
    put_u16(out, 20);
    put_u16(out, 0);
    put_u16(out, 8);
    put_u16(out, 0);
    put_u16(out, 33); /* 1980-01-01: the archive depends on its content alone */
    put_u32(out, e->crc);
    put_u32(out, e->packed);
    put_u32(out, e->size);
    put_u16(out, (uint32_t)strlen(e->name));
    put_u16(out, 0);
}

/* Appends text, deflated without a header. */
static int pack(struct dmk_str text, struct dmk_buf *out, struct entry *e)
{
    z_stream z = {0};
    uint8_t *room;
    size_t cap;
    int rc;

    if (deflateInit2(&z, Z_BEST_SPEED, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY) != Z_OK) {
        return -DMK_ENOMEM;
    }
    cap = deflateBound(&z, text.len);
    room = malloc(cap);
    z.next_in = (Bytef *)(uintptr_t)text.data;
    z.avail_in = (uInt)text.len;
    z.next_out = room;
    z.avail_out = (uInt)cap;
    rc = room && deflate(&z, Z_FINISH) == Z_STREAM_END ? 0 : -DMK_ENOMEM;
    if (rc == 0) {
        e->size = (uint32_t)text.len;
        e->packed = (uint32_t)z.total_out;
        e->crc = (uint32_t)crc32(0, (const Bytef *)text.data, (uInt)text.len);
        dmk_buf_append(out, room, z.total_out);
    }
    (void)deflateEnd(&z);
    free(room);
    return rc;
}

static int add_entry(struct entry *e, struct dmk_str text, struct dmk_buf *out)
{
    struct dmk_buf packed;
    int rc;

    dmk_buf_init(&packed, MAX_BYTES);
    rc = pack(text, &packed, e);
    e->offset = (uint32_t)out->len;
    put_u32(out, 0x04034b50);
    put_facts(out, e);
    dmk_buf_puts(out, e->name);
    dmk_buf_append_str(out, dmk_buf_str(&packed));
    dmk_buf_fini(&packed);
    return rc;
}

static void put_directory(const struct entry *entries, struct dmk_buf *out)
{
    const uint32_t start = (uint32_t)out->len;
    uint32_t size;

    for (int i = 0; i < N_ENTRIES; i++) {
        put_u32(out, 0x02014b50);
        put_u16(out, 20);
        put_facts(out, &entries[i]);
        put_u16(out, 0);
        put_u16(out, 0);
        put_u16(out, 0);
        put_u32(out, 0);
        put_u32(out, entries[i].offset);
        dmk_buf_puts(out, entries[i].name);
    }
    size = (uint32_t)out->len - start;
    put_u32(out, 0x06054b50);
    put_u32(out, 0);
    put_u16(out, N_ENTRIES);
    put_u16(out, N_ENTRIES);
    put_u32(out, size);
    put_u32(out, start);
    put_u16(out, 0);
}

static void put_tokenizer_config(struct dmk_buf *out, uint32_t max_context)
{
    dmk_buf_printf(
        out,
        "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"bos_token\":\"<|startoftext|>\","
        "\"eos_token\":\"<|return|>\",\"pad_token\":\"<|endoftext|>\","
        "\"clean_up_tokenization_spaces\":false,\"model_max_length\":%u,"
        "\"model_input_names\":[\"input_ids\",\"attention_mask\"]}\n",
        max_context);
}

static void put_config(struct dmk_buf *out, uint32_t max_context)
{
    dmk_buf_printf(out,
                   "{\"architectures\":[\"GptOssForCausalLM\"],\"model_type\":\"gpt_oss\","
                   "\"bos_token_id\":%u,\"eos_token_id\":[%u,%u,%u],\"pad_token_id\":%u,"
                   "\"max_position_embeddings\":%u,\"vocab_size\":%u}\n",
                   DMK_TOKEN_START_OF_TEXT, DMK_TOKEN_RETURN, DMK_TOKEN_END_OF_TEXT, DMK_TOKEN_CALL,
                   DMK_TOKEN_END_OF_TEXT, max_context, DMK_VOCAB_SIZE);
}

static bool put_hash(const struct dmk_buf *archive, char ret[65])
{
    unsigned char digest[32];
    unsigned int n = 0;

    if (EVP_Digest(archive->data, archive->len, digest, &n, EVP_sha256(), NULL) != 1) {
        return false;
    }
    for (unsigned int i = 0; i < n; i++) {
        (void)snprintf(ret + 2 * i, 3, "%02x", digest[i]);
    }
    return true;
}

int dmk_tokenizer_zip(const struct dmk_vocab *vocab, uint32_t max_context, struct dmk_buf *out,
                      char ret_sha256[65])
{
    struct entry entries[N_ENTRIES] = {
        {.name = "tokenizer.json"}, {.name = "tokenizer_config.json"}, {.name = "config.json"}};
    struct dmk_buf text;
    int rc = 0;

    dmk_buf_init(&text, MAX_BYTES);
    for (int i = 0; i < N_ENTRIES && rc == 0; i++) {
        dmk_buf_reset(&text);
        if (i == 0) {
            dmk_vocab_write_hf(vocab, &text);
        } else if (i == 1) {
            put_tokenizer_config(&text, max_context);
        } else {
            put_config(&text, max_context);
        }
        rc = text.failed ? -DMK_ENOMEM : add_entry(&entries[i], dmk_buf_str(&text), out);
    }
    dmk_buf_fini(&text);
    if (rc == 0) {
        put_directory(entries, out);
        rc = out->failed || !put_hash(out, ret_sha256) ? -DMK_ENOMEM : 0;
    }
    return rc;
}
