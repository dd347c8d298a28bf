/* Writing an automaton; see write.h. */
#include "common/grammar/write.h"

static void put_u16(struct dmk_buf *out, uint32_t v)
{
    dmk_buf_putc(out, (char)(v & 255));
    dmk_buf_putc(out, (char)(v >> 8 & 255));
}

static void put_u32(struct dmk_buf *out, uint32_t v)
{
    put_u16(out, v & 0xffff);
    put_u16(out, v >> 16);
}

static void put_u64(struct dmk_buf *out, uint64_t v)
{
    put_u32(out, (uint32_t)v);
    put_u32(out, (uint32_t)(v >> 32));
}

static void put_head(const struct dmk_grammar_rule *rules, uint32_t n_rules, struct dmk_buf *out)
{
    uint32_t n_states = 0, n_edges = 0, n_calls = 0, n_ids = 0;

    for (uint32_t i = 0; i < n_rules; i++) {
        n_states += rules[i].n_states;
        for (uint32_t s = 0; s < rules[i].n_states; s++) {
            n_edges += rules[i].states[s].n_edges;
            n_calls += rules[i].states[s].n_calls;
            n_ids += rules[i].states[s].n_ids;
        }
    }
    dmk_buf_append(out, "DMKG", 4);
    put_u16(out, DMK_GRAMMAR_VERSION);
    put_u16(out, 0);
    put_u64(out, 0);
    put_u64(out, 0);
    put_u32(out, n_rules);
    put_u32(out, n_states);
    put_u32(out, n_edges);
    put_u32(out, n_calls);
    put_u32(out, n_ids);
}

static void put_edges(const struct dmk_grammar_state *s, struct dmk_buf *out)
{
    for (uint32_t i = 0; i < s->n_edges; i++) {
        dmk_buf_putc(out, (char)s->edges[i].first);
        dmk_buf_putc(out, (char)s->edges[i].last);
        put_u16(out, s->edges[i].target);
    }
}

static void put_calls(const struct dmk_grammar_state *s, struct dmk_buf *out)
{
    for (uint32_t i = 0; i < s->n_calls; i++) {
        put_u16(out, s->calls[i].rule);
        put_u16(out, s->calls[i].ret);
    }
}

static void put_ids(const struct dmk_grammar_state *s, struct dmk_buf *out)
{
    for (uint32_t i = 0; i < s->n_ids; i++) {
        put_u32(out, s->ids[i].id);
        put_u16(out, s->ids[i].target);
        put_u16(out, 0);
    }
}

static void put_states(const struct dmk_grammar_state *s, struct dmk_buf *out)
{
    dmk_buf_putc(out, (char)s->flags);
    dmk_buf_putc(out, (char)s->n_ids);
    put_u16(out, s->n_calls);
    put_u16(out, s->n_edges);
}

int dmk_grammar_write(const struct dmk_grammar_rule *rules, uint32_t n_rules, struct dmk_buf *out)
{
    static void (*const tables[])(const struct dmk_grammar_state *s, struct dmk_buf *out) = {
        put_states, put_edges, put_calls, put_ids};

    put_head(rules, n_rules, out);
    for (uint32_t i = 0; i < n_rules; i++) {
        put_u32(out, rules[i].n_states);
        put_u32(out, rules[i].min);
        put_u32(out, rules[i].max);
    }
    for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++) {
        for (uint32_t i = 0; i < n_rules; i++) {
            for (uint32_t s = 0; s < rules[i].n_states; s++) {
                tables[t](&rules[i].states[s], out);
            }
        }
    }
    put_u64(out, dmk_hash64(out->data, out->len, 0));
    return out->failed || out->len > DMK_GRAMMAR_MAX_BYTES ? -DMK_EFULL : 0;
}

void dmk_grammar_stamp(struct dmk_buf *blob, struct dmk_id128 vocab)
{
    const uint64_t words[2] = {vocab.lo, vocab.hi};
    const size_t end = blob->len - 8;
    uint64_t sum;

    for (unsigned i = 0; i < 16; i++) {
        blob->data[DMK_GRAMMAR_VOCAB_AT + i] = (char)(words[i / 8] >> (i % 8 * 8));
    }
    sum = dmk_hash64(blob->data, end, 0);
    for (unsigned i = 0; i < 8; i++) {
        blob->data[end + i] = (char)(sum >> (i * 8));
    }
}
