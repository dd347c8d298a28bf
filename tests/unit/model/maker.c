/* See maker.h. Failures here are failures of the test machine and abort. */
#include "tests/unit/model/maker.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/base/buf.h"
#include "common/base/rng.h"

void mk_folder(char ret_dir[64])
{
    (void)snprintf(ret_dir, 64, "/tmp/damask-test-XXXXXX");
    dmk_assert(mkdtemp(ret_dir) != NULL);
}

void mk_subfolder(const char *dir, const char *name)
{
    char path[512];

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    dmk_assert(mkdir(path, 0700) == 0);
}

/* The folder and one level of folders in it: deeper is never made. */
static void remove_files(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    dmk_assert(d != NULL);
    while ((e = readdir(d))) {
        char path[512];

        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        (void)snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        (void)unlink(path);
    }
    closedir(d);
}

void mk_remove(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    dmk_assert(d != NULL);
    while ((e = readdir(d))) {
        char path[512];

        if (e->d_type == DT_DIR && e->d_name[0] != '.') {
            (void)snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
            remove_files(path);
            (void)rmdir(path);
        }
    }
    closedir(d);
    remove_files(dir);
    (void)rmdir(dir);
}

void mk_file(const char *dir, const char *name, const void *data, size_t len)
{
    char path[512];
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "wb");
    dmk_assert(f != NULL);
    dmk_assert(fwrite(data, 1, len, f) == len);
    dmk_assert(fclose(f) == 0);
}

void mk_text(const char *dir, const char *name, const char *text)
{
    mk_file(dir, name, text, strlen(text));
}

static void put_length(struct dmk_buf *buf, uint64_t len)
{
    for (int i = 0; i < 8; i++) {
        dmk_buf_putc(buf, (char)(len >> (8 * i)));
    }
}

void mk_safetensors(const char *dir, const char *name, const char *header, size_t n_data)
{
    struct dmk_buf buf;

    dmk_buf_init(&buf, 0);
    put_length(&buf, strlen(header));
    dmk_buf_puts(&buf, header);
    for (size_t i = 0; i < n_data; i++) {
        dmk_buf_putc(&buf, (char)(i * 7 + 1));
    }
    dmk_assert(!buf.failed);
    mk_file(dir, name, buf.data, buf.len);
    dmk_buf_fini(&buf);
}

/* Adds a tensor with memory of its size; dims end at the first 0. */
static struct mk_tensor *add(struct mk_checkpoint *c, const char *name, const char *dtype,
                             const uint64_t dims[4])
{
    struct mk_tensor *t = &c->tensors[c->n_tensors];

    dmk_assert(c->n_tensors < 64);
    *t = (struct mk_tensor){.dtype = dtype, .file = (uint32_t)(c->n_tensors % 3)};
    (void)snprintf(t->name, sizeof(t->name), "%s", name);
    t->n_bytes = dtype[0] == 'B' ? 2 : 1;
    while (t->rank < 4 && dims[t->rank]) {
        t->dims[t->rank] = dims[t->rank];
        t->n_bytes *= dims[t->rank++];
    }
    t->data = calloc(1, t->n_bytes);
    dmk_assert(t->data != NULL);
    c->n_tensors++;
    return t;
}

/* Bytes by place: layer and a number for the place within it. Small exponents keep BF16 finite. */
static void fill(uint8_t *data, size_t n_bytes, uint32_t layer, uint32_t place, bool bf16)
{
    for (size_t i = 0; i < n_bytes; i++) {
        const uint64_t v = dmk_rng_u64(1, (uint64_t)layer << 8 | place, i);

        data[i] = (uint8_t)v;
        if (bf16 && (i & 1)) {
            data[i] = (uint8_t)(0x3c | (v & 0x83));
        }
    }
}

static void add_filled(struct mk_checkpoint *c, uint32_t layer, uint32_t place, const char *name,
                       const char *dtype, uint64_t d0, uint64_t d1)
{
    struct mk_tensor *t = add(c, name, dtype, (const uint64_t[4]){d0, d1});

    fill(t->data, t->n_bytes, layer, place, dtype[0] == 'B');
}

static uint16_t bf16_of_code(uint8_t code, uint8_t scale)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float v = values[code & 7];
    uint32_t bits;

    for (int s = scale; s < 127; s++) {
        v *= 0.5f;
    }
    if (code & 8) {
        v = -v;
    }
    memcpy(&bits, &v, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/* One expert matrix of [E][rows][cols] in the kind's form. */
static void add_experts(struct mk_checkpoint *c, uint32_t layer, uint32_t place,
                        const char *blocks_name, const char *scales_name, const char *bf16_name,
                        uint64_t rows, uint64_t cols)
{
    const uint64_t groups = cols / 32;
    const size_t n = MK_E * rows * groups;
    uint8_t *blocks = calloc(n, 16), *scales = calloc(n, 1);
    struct mk_tensor *t;

    dmk_assert(blocks && scales);
    fill(blocks, n * 16, layer, place, false);
    for (size_t i = 0; i < n; i++) {
        scales[i] = (uint8_t)(118 + dmk_rng_u64(2, (uint64_t)layer << 8 | place, i) % 5);
    }
    if (bf16_name) {
        t = add(c, bf16_name, "BF16", (const uint64_t[4]){MK_E, cols, rows});
        for (uint64_t e = 0; e < MK_E; e++) {
            for (uint64_t r = 0; r < rows; r++) {
                for (uint64_t k = 0; k < cols; k++) {
                    const uint64_t g = (e * rows + r) * groups + k / 32;
                    const uint8_t byte = blocks[g * 16 + k % 32 / 2];
                    const uint16_t v = bf16_of_code(k & 1 ? byte >> 4 : byte & 15, scales[g]);

                    memcpy(t->data + 2 * ((e * cols + k) * rows + r), &v, 2);
                }
            }
        }
    } else {
        t = add(c, blocks_name, "U8", (const uint64_t[4]){MK_E, rows, groups, 16});
        memcpy(t->data, blocks, n * 16);
        t = add(c, scales_name, "U8", (const uint64_t[4]){MK_E, rows, groups});
        memcpy(t->data, scales, n);
    }
    free(blocks);
    free(scales);
}

static void add_hf_layer(struct mk_checkpoint *c, uint32_t l, bool bf16)
{
    char n[3][96];
#define NAME(i, s) ((void)snprintf(n[i], sizeof(n[i]), "model.layers.%u.%s", l, s), n[i])
    add_filled(c, l, 0, NAME(0, "input_layernorm.weight"), "BF16", MK_H, 0);
    add_filled(c, l, 1, NAME(0, "self_attn.q_proj.weight"), "BF16", MK_Q, MK_H);
    add_filled(c, l, 2, NAME(0, "self_attn.k_proj.weight"), "BF16", MK_KV, MK_H);
    add_filled(c, l, 3, NAME(0, "self_attn.v_proj.weight"), "BF16", MK_KV, MK_H);
    add_filled(c, l, 4, NAME(0, "self_attn.q_proj.bias"), "BF16", MK_Q, 0);
    add_filled(c, l, 5, NAME(0, "self_attn.k_proj.bias"), "BF16", MK_KV, 0);
    add_filled(c, l, 6, NAME(0, "self_attn.v_proj.bias"), "BF16", MK_KV, 0);
    add_filled(c, l, 7, NAME(0, "self_attn.o_proj.weight"), "BF16", MK_H, MK_Q);
    add_filled(c, l, 8, NAME(0, "self_attn.o_proj.bias"), "BF16", MK_H, 0);
    add_filled(c, l, 9, NAME(0, "self_attn.sinks"), "BF16", MK_HEADS, 0);
    add_filled(c, l, 10, NAME(0, "post_attention_layernorm.weight"), "BF16", MK_H, 0);
    add_filled(c, l, 11, NAME(0, "mlp.router.weight"), "BF16", MK_E, MK_H);
    add_filled(c, l, 12, NAME(0, "mlp.router.bias"), "BF16", MK_E, 0);
    add_filled(c, l, 13, NAME(0, "mlp.experts.gate_up_proj_bias"), "BF16", MK_E, 2 * MK_I);
    add_filled(c, l, 14, NAME(0, "mlp.experts.down_proj_bias"), "BF16", MK_E, MK_H);
    add_experts(c, l, 15, NAME(0, "mlp.experts.gate_up_proj_blocks"),
                NAME(1, "mlp.experts.gate_up_proj_scales"),
                bf16 ? NAME(2, "mlp.experts.gate_up_proj") : NULL, 2 * MK_I, MK_H);
    add_experts(c, l, 16, NAME(0, "mlp.experts.down_proj_blocks"),
                NAME(1, "mlp.experts.down_proj_scales"),
                bf16 ? NAME(2, "mlp.experts.down_proj") : NULL, MK_H, MK_I);
#undef NAME
}

/* q, k and v of the other layout, one after the other. */
static void add_joined(struct mk_checkpoint *c, uint32_t l, const char *name, uint32_t place,
                       uint64_t cols)
{
    const uint64_t width = cols ? cols : 1;
    struct mk_tensor *t = add(c, name, "BF16", (const uint64_t[4]){MK_Q + 2 * MK_KV, cols});

    fill(t->data, MK_Q * width * 2, l, place, true);
    fill(t->data + MK_Q * width * 2, MK_KV * width * 2, l, place + 1, true);
    fill(t->data + (MK_Q + MK_KV) * width * 2, MK_KV * width * 2, l, place + 2, true);
}

static void add_original_layer(struct mk_checkpoint *c, uint32_t l)
{
    char n[2][96];
#define NAME(i, s) ((void)snprintf(n[i], sizeof(n[i]), "block.%u.%s", l, s), n[i])
    add_filled(c, l, 0, NAME(0, "attn.norm.scale"), "BF16", MK_H, 0);
    add_joined(c, l, NAME(0, "attn.qkv.weight"), 1, MK_H);
    add_joined(c, l, NAME(0, "attn.qkv.bias"), 4, 0);
    add_filled(c, l, 7, NAME(0, "attn.out.weight"), "BF16", MK_H, MK_Q);
    add_filled(c, l, 8, NAME(0, "attn.out.bias"), "BF16", MK_H, 0);
    add_filled(c, l, 9, NAME(0, "attn.sinks"), "BF16", MK_HEADS, 0);
    add_filled(c, l, 10, NAME(0, "mlp.norm.scale"), "BF16", MK_H, 0);
    add_filled(c, l, 11, NAME(0, "mlp.gate.weight"), "BF16", MK_E, MK_H);
    add_filled(c, l, 12, NAME(0, "mlp.gate.bias"), "BF16", MK_E, 0);
    add_filled(c, l, 13, NAME(0, "mlp.mlp1_bias"), "BF16", MK_E, 2 * MK_I);
    add_filled(c, l, 14, NAME(0, "mlp.mlp2_bias"), "BF16", MK_E, MK_H);
    add_experts(c, l, 15, NAME(0, "mlp.mlp1_weight.blocks"), NAME(1, "mlp.mlp1_weight.scales"),
                NULL, 2 * MK_I, MK_H);
    add_experts(c, l, 16, NAME(0, "mlp.mlp2_weight.blocks"), NAME(1, "mlp.mlp2_weight.scales"),
                NULL, MK_H, MK_I);
#undef NAME
}

void mk_checkpoint_make(struct mk_checkpoint *c, enum mk_kind kind)
{
    const bool original = kind == MK_ORIGINAL;

    c->n_tensors = 0;
    add_filled(c, 255, 0, original ? "embedding.weight" : "model.embed_tokens.weight", "BF16", MK_V,
               MK_H);
    for (uint32_t l = 0; l < MK_LAYERS; l++) {
        if (original) {
            add_original_layer(c, l);
        } else {
            add_hf_layer(c, l, kind == MK_HF_BF16);
        }
    }
    add_filled(c, 255, 1, original ? "norm.scale" : "model.norm.weight", "BF16", MK_H, 0);
    add_filled(c, 255, 2, original ? "unembedding.weight" : "lm_head.weight", "BF16", MK_V, MK_H);
}

void mk_checkpoint_free(struct mk_checkpoint *c)
{
    for (size_t i = 0; i < c->n_tensors; i++) {
        free(c->tensors[i].data);
    }
    c->n_tensors = 0;
}

struct mk_tensor *mk_checkpoint_find(struct mk_checkpoint *c, const char *name)
{
    for (size_t i = 0; i < c->n_tensors; i++) {
        if (strcmp(c->tensors[i].name, name) == 0) {
            return &c->tensors[i];
        }
    }
    dmk_unreachable("no such tensor");
}

void mk_checkpoint_drop(struct mk_checkpoint *c, const char *name)
{
    struct mk_tensor *t = mk_checkpoint_find(c, name);

    free(t->data);
    *t = c->tensors[--c->n_tensors];
}

static void write_shard(const struct mk_checkpoint *c, const char *dir, const char *name,
                        uint32_t file, bool all, bool pad)
{
    struct dmk_buf header, buf;
    size_t at = 0;

    dmk_buf_init(&header, 0);
    dmk_buf_init(&buf, 0);
    dmk_buf_puts(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < c->n_tensors; i++) {
        const struct mk_tensor *t = &c->tensors[i];

        if (!all && t->file != file) {
            continue;
        }
        dmk_buf_printf(&header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (uint32_t d = 0; d < t->rank; d++) {
            dmk_buf_printf(&header, "%s%llu", d ? "," : "", (unsigned long long)t->dims[d]);
        }
        dmk_buf_printf(&header, "],\"data_offsets\":[%zu,%zu]}", at, at + t->n_bytes);
        at += t->n_bytes;
    }
    dmk_buf_putc(&header, '}');
    while (header.len % 8 != (pad ? 1 : 0)) {
        dmk_buf_putc(&header, ' ');
    }
    put_length(&buf, header.len);
    dmk_buf_append(&buf, header.data, header.len);
    for (size_t i = 0; i < c->n_tensors; i++) {
        if (all || c->tensors[i].file == file) {
            dmk_buf_append(&buf, c->tensors[i].data, c->tensors[i].n_bytes);
        }
    }
    dmk_assert(!buf.failed && !header.failed);
    mk_file(dir, name, buf.data, buf.len);
    dmk_buf_fini(&header);
    dmk_buf_fini(&buf);
}

void mk_checkpoint_write(const struct mk_checkpoint *c, const char *dir, uint32_t n_files, bool pad)
{
    struct dmk_buf index;
    char name[64];

    if (n_files == 1) {
        write_shard(c, dir, "model.safetensors", 0, true, pad);
        return;
    }
    dmk_assert(n_files == 3);
    for (uint32_t f = 0; f < n_files; f++) {
        (void)snprintf(name, sizeof(name), "model-%05u-of-00002.safetensors", f);
        write_shard(c, dir, name, f, false, pad);
    }
    dmk_buf_init(&index, 0);
    dmk_buf_puts(&index, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (size_t i = 0; i < c->n_tensors; i++) {
        dmk_buf_printf(&index, "%s\"%s\":\"model-%05u-of-00002.safetensors\"", i ? "," : "",
                       c->tensors[i].name, c->tensors[i].file);
    }
    dmk_buf_puts(&index, "}}");
    dmk_assert(!index.failed);
    mk_file(dir, "model.safetensors.index.json", index.data, index.len);
    dmk_buf_fini(&index);
}

#define HF_HEAD                                                                                    \
    "{\"model_type\":\"gpt_oss\",\"num_hidden_layers\":2,\"hidden_size\":64,"                      \
    "\"intermediate_size\":32,\"num_attention_heads\":8,\"num_key_value_heads\":8,\"head_dim\":"   \
    "64,"                                                                                          \
    "\"num_local_experts\":8,\"num_experts_per_tok\":4,\"vocab_size\":16,\"sliding_window\":128,"  \
    "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"rope_theta\":150000,"             \
    "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,\"beta_slow\":1." \
    "0,"                                                                                           \
    "\"original_max_position_embeddings\":4096,\"truncate\":false},\"eos_token_id\":[3,5]"

const char *mk_config(enum mk_kind kind)
{
    switch (kind) {
    case MK_HF:
        return HF_HEAD ",\"quantization_config\":{\"quant_method\":\"mxfp4\"}}";
    case MK_HF_BF16:
        return HF_HEAD "}";
    case MK_ORIGINAL:
        break;
    }
    return "{\"num_hidden_layers\":2,\"num_experts\":8,\"experts_per_token\":4,\"vocab_size\":16,"
           "\"hidden_size\":64,\"intermediate_size\":32,\"swiglu_limit\":7.0,\"head_dim\":64,"
           "\"num_attention_heads\":8,\"num_key_value_heads\":8,\"sliding_window\":128,"
           "\"initial_context_length\":4096,\"rope_theta\":150000,\"rope_scaling_factor\":32.0,"
           "\"rope_ntk_alpha\":1,\"rope_ntk_beta\":32}";
}
