/* The small files of a synthetic checkpoint: headers, index, config, generation config. */
#include "tools/tinymodel/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void tm_text_header(const struct tm_plan *plan, uint32_t file, struct dmk_buf *out)
{
    dmk_buf_puts(out, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (uint32_t i = 0; i < plan->n_tensors; i++) {
        const struct tm_tensor *t = &plan->tensors[i];

        if (t->file != file) {
            continue;
        }
        dmk_buf_printf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name,
                       t->is_bf16 ? "BF16" : "U8");
        for (uint32_t d = 0; d < t->rank; d++) {
            dmk_buf_printf(out, "%s%llu", d ? "," : "", (unsigned long long)t->dims[d]);
        }
        dmk_buf_printf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->offset,
                       t->offset + t->n_bytes);
    }
    dmk_buf_putc(out, '}');
    while (out->len % 8 != 0) {
        dmk_buf_putc(out, ' ');
    }
}

void tm_text_index(const struct tm_plan *plan, struct dmk_buf *out)
{
    char name[48];

    dmk_buf_printf(out, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
                   (unsigned long long)plan->total_bytes);
    for (uint32_t i = 0; i < plan->n_tensors; i++) {
        tm_file_name(plan, plan->tensors[i].file, name);
        dmk_buf_printf(out, "%s\n    \"%s\": \"%s\"", i ? "," : "", plan->tensors[i].name, name);
    }
    dmk_buf_puts(out, "\n  }\n}\n");
}

static void put_layer_types(const struct dmk_shape *s, struct dmk_buf *out)
{
    dmk_buf_puts(out, "  \"layer_types\": [");
    for (uint32_t i = 0; i < s->n_layers; i++) {
        dmk_buf_printf(out, "%s\n    \"%s\"", i ? "," : "",
                       dmk_shape_layer_is_full(i) ? "full_attention" : "sliding_attention");
    }
    dmk_buf_puts(out, "\n  ],\n");
}

/* Ids that a smaller vocabulary does not have give way to its last ones. */
static uint32_t clip_id(const struct dmk_shape *s, uint32_t id, uint32_t from_end)
{
    return id < s->vocab ? id : s->vocab - from_end;
}

/* Readers that are strict about types want 7.0 where a number is no count. */
static void put_real(const char *key, double v, const char *end, struct dmk_buf *out)
{
    char text[40];

    (void)snprintf(text, sizeof(text), "%.9g", v);
    dmk_buf_printf(out, "\"%s\": %s%s%s", key, text, strpbrk(text, ".en") ? "" : ".0", end);
}

void tm_text_config(const struct tm_plan *plan, struct dmk_buf *out)
{
    const struct dmk_shape *s = &plan->conf->shape;

    dmk_buf_puts(out, "{\n  \"architectures\": [\n    \"GptOssForCausalLM\"\n  ],\n"
                      "  \"attention_bias\": true,\n  \"attention_dropout\": 0.0,\n");
    dmk_buf_printf(out, "  \"eos_token_id\": %u,\n  \"experts_per_token\": %u,\n",
                   clip_id(s, 200002, 1), s->experts_per_token);
    dmk_buf_printf(out,
                   "  \"head_dim\": %d,\n  \"hidden_act\": \"silu\",\n  \"hidden_size\": %u,\n",
                   DMK_HEAD_DIM, s->hidden);
    dmk_buf_printf(out, "  \"initial_context_length\": %u,\n  \"initializer_range\": 0.02,\n",
                   s->rope_original_positions);
    dmk_buf_printf(out, "  \"intermediate_size\": %u,\n", s->intermediate);
    put_layer_types(s, out);
    dmk_buf_printf(out, "  \"max_position_embeddings\": %u,\n  \"model_type\": \"gpt_oss\",\n",
                   s->max_positions);
    dmk_buf_printf(out, "  \"num_attention_heads\": %u,\n  \"num_experts_per_tok\": %u,\n",
                   s->n_heads, s->experts_per_token);
    dmk_buf_printf(out, "  \"num_hidden_layers\": %u,\n  \"num_key_value_heads\": %u,\n",
                   s->n_layers, s->n_kv_heads);
    dmk_buf_printf(out, "  \"num_local_experts\": %u,\n  \"output_router_logits\": false,\n",
                   s->n_experts);
    dmk_buf_printf(out, "  \"pad_token_id\": %u,\n", clip_id(s, 199999, 2));
    if (plan->conf->expert_format == DMK_EXPERTS_MXFP4) {
        dmk_buf_puts(out,
                     "  \"quantization_config\": {\n    \"modules_to_not_convert\": [\n"
                     "      \"model.layers.*.self_attn\",\n      \"model.layers.*.mlp.router\",\n"
                     "      \"model.embed_tokens\",\n      \"lm_head\"\n    ],\n"
                     "    \"quant_method\": \"mxfp4\"\n  },\n");
    }
    dmk_buf_printf(out, "  \"rms_norm_eps\": %.9g,\n  \"rope_scaling\": {\n", (double)s->norm_eps);
    dmk_buf_puts(out, "    ");
    put_real("beta_fast", s->rope_beta_fast, ",\n    ", out);
    put_real("beta_slow", s->rope_beta_slow, ",\n    ", out);
    put_real("factor", s->rope_factor, ",\n", out);
    dmk_buf_printf(out,
                   "    \"original_max_position_embeddings\": %u,\n    \"rope_type\": \"yarn\",\n"
                   "    \"truncate\": false\n  },\n",
                   s->rope_original_positions);
    dmk_buf_printf(out, "  \"rope_theta\": %.17g,\n  \"router_aux_loss_coef\": 0.9,\n",
                   s->rope_theta);
    dmk_buf_printf(out, "  \"sliding_window\": %u,\n  ", s->window);
    put_real("swiglu_limit", (double)s->swiglu_limit, ",\n", out);
    dmk_buf_printf(out,
                   "  \"tie_word_embeddings\": false,\n  \"use_cache\": true,\n"
                   "  \"vocab_size\": %u\n}\n",
                   s->vocab);
}

void tm_text_generation(const struct tm_plan *plan, struct dmk_buf *out)
{
    const struct dmk_shape *s = &plan->conf->shape;

    dmk_buf_printf(out, "{\n  \"bos_token_id\": %u,\n  \"do_sample\": true,\n",
                   clip_id(s, 199998, 3));
    if (s->vocab > 200012) {
        dmk_buf_puts(out, "  \"eos_token_id\": [\n    200002,\n    199999,\n    200012\n  ],\n");
    } else {
        dmk_buf_printf(out, "  \"eos_token_id\": [\n    %u,\n    %u\n  ],\n", s->vocab - 1,
                       s->vocab - 2);
    }
    dmk_buf_printf(out, "  \"pad_token_id\": %u\n}\n", clip_id(s, 199999, 2));
}
