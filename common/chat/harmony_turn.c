/* The automaton of a turn, node by node; see harmony_turn.h. */
#include "common/chat/harmony_turn.h"

#include "common/text/tokenizer.h"

/* Nodes that several parts lead to. */
struct nodes {
    struct dmk_build *b;
    const struct dmk_turn *turn;
    uint32_t out;        /* the turn has ended */
    uint32_t start;      /* behind "<|start|>assistant": anything may come */
    uint32_t call_start; /* there too, where only a call may come */
};

/* Joins two nodes by a text. */
static void join_text(struct dmk_build *b, uint32_t from, const char *text, uint32_t to)
{
    const struct dmk_piece p = dmk_piece_text(b, dmk_str_from(text));

    dmk_build_skip(b, from, p.in);
    dmk_build_skip(b, p.out, to);
}

static uint32_t behind_text(struct dmk_build *b, uint32_t from, const char *text)
{
    const uint32_t node = dmk_build_node(b);

    join_text(b, from, text, node);
    return node;
}

static uint32_t behind_id(struct dmk_build *b, uint32_t from, uint32_t id)
{
    const uint32_t node = dmk_build_node(b);

    dmk_build_id(b, from, id, node);
    return node;
}

/* The body of a free message: stays where it is. */
static uint32_t free_text(struct dmk_build *b, uint32_t header)
{
    const uint32_t body = behind_id(b, header, DMK_TOKEN_MESSAGE);

    dmk_build_bytes(b, body, 0, 255, body);
    return body;
}

/* Another message follows. */
static void join_next(struct dmk_build *b, uint32_t from, uint32_t start)
{
    const uint32_t end = behind_id(b, from, DMK_TOKEN_END);

    join_text(b, behind_id(b, end, DMK_TOKEN_START), "assistant", start);
}

/* [" "]<|constrain|>json, or nothing. */
static void join_type(struct dmk_build *b, uint32_t from, uint32_t to)
{
    const uint32_t space = dmk_build_node(b), mark = dmk_build_node(b);

    dmk_build_skip(b, from, to);
    dmk_build_bytes(b, from, ' ', ' ', space);
    dmk_build_id(b, from, DMK_TOKEN_CONSTRAIN, mark);
    dmk_build_id(b, space, DMK_TOKEN_CONSTRAIN, mark);
    join_text(b, mark, "json", to);
}

/* Everything behind a call's header without type. */
static void build_call(struct nodes *n, const struct dmk_turn_call *call, uint32_t header)
{
    struct dmk_build *b = n->b;
    const uint32_t typed = dmk_build_node(b), end = dmk_build_node(b);

    join_type(b, header, typed);
    join_text(b, header, " json", typed);
    join_text(b, header, " code", typed);
    dmk_build_call(b, behind_id(b, typed, DMK_TOKEN_MESSAGE), call->rule, end);
    dmk_build_id(b, end, DMK_TOKEN_CALL, n->out);
    if (!n->turn->single_call) {
        join_next(b, end, n->call_start);
    }
}

/* Where a message that is no answer may begin: its start, and behind the names of the channels a call may go on. */
struct opening {
    uint32_t start, analysis, commentary;
};

/* The calls' headers, from all openings. */
static void build_calls(struct nodes *n, const struct opening *openings, size_t n_openings)
{
    struct dmk_build *b = n->b;
    const uint32_t early = dmk_build_node(b), late = dmk_build_node(b);

    for (size_t i = 0; i < n_openings; i++) {
        join_text(b, openings[i].start, " to=functions.", early);
        join_text(b, openings[i].analysis, " to=functions.", late);
        join_text(b, openings[i].commentary, " to=functions.", late);
    }
    for (size_t i = 0; i < n->turn->n_calls; i++) {
        const struct dmk_turn_call *call = &n->turn->calls[i];
        const uint32_t header = dmk_build_node(b);
        const struct dmk_piece first = dmk_piece_text(b, call->name);
        const struct dmk_piece second = dmk_piece_text(b, call->name);
        uint32_t channel;

        dmk_build_skip(b, late, first.in);
        dmk_build_skip(b, first.out, header);
        dmk_build_skip(b, early, second.in);
        channel = behind_id(b, second.out, DMK_TOKEN_CHANNEL);
        join_text(b, channel, "commentary", header);
        join_text(b, channel, "analysis", header);
        build_call(n, call, header);
    }
}

static void build_answer(struct nodes *n, uint32_t channel)
{
    struct dmk_build *b = n->b;
    const uint32_t header = behind_text(b, channel, "final"), typed = dmk_build_node(b);
    uint32_t end;

    if (n->turn->answer == DMK_TURN_TEXT) {
        dmk_build_skip(b, header, typed);
        end = free_text(b, typed);
    } else {
        join_type(b, header, typed);
        end = dmk_build_node(b);
        dmk_build_call(b, behind_id(b, typed, DMK_TOKEN_MESSAGE), n->turn->answer, end);
    }
    dmk_build_id(b, end, DMK_TOKEN_RETURN, n->out);
}

/* The channels behind a start; free analysis leads back to it. */
static struct opening open_channels(struct dmk_build *b, uint32_t start, uint32_t channel)
{
    const struct opening o = {.start = start,
                              .analysis = behind_text(b, channel, "analysis"),
                              .commentary = behind_text(b, channel, "commentary")};

    join_next(b, free_text(b, o.analysis), start);
    return o;
}

void dmk_harmony_turn(struct dmk_build *b, uint32_t root, const struct dmk_turn *turn)
{
    struct nodes n = {.b = b, .turn = turn};
    const bool answer_is_bound = turn->may_answer && turn->answer != DMK_TURN_TEXT;
    struct opening openings[3];
    uint32_t channel;

    dmk_build_begin(b, root);
    n.start = dmk_build_node(b);
    n.call_start = dmk_build_node(b);
    n.out = dmk_build_node(b);
    channel = behind_id(b, n.start, DMK_TOKEN_CHANNEL);
    openings[0] = openings[1] = open_channels(b, n.start, channel);
    if (answer_is_bound && turn->n_calls > 0) { /* what a preamble leads to */
        const uint32_t start = dmk_build_node(b);

        openings[1] = open_channels(b, start, behind_id(b, start, DMK_TOKEN_CHANNEL));
    }
    if (!answer_is_bound || turn->n_calls > 0) {
        const uint32_t text = free_text(b, openings[1].commentary);

        join_next(b, text, openings[1].start);
        if (answer_is_bound) {
            join_next(b, free_text(b, openings[0].commentary), openings[1].start);
        } else if (turn->may_answer) {
            dmk_build_id(b, text, DMK_TOKEN_RETURN, n.out);
        }
    }
    if (turn->may_answer) {
        build_answer(&n, channel);
    }
    if (turn->n_calls > 0) {
        channel = behind_id(b, n.call_start, DMK_TOKEN_CHANNEL);
        openings[2] = (struct opening){.start = n.call_start,
                                       .analysis = behind_text(b, channel, "analysis"),
                                       .commentary = behind_text(b, channel, "commentary")};
        build_calls(&n, openings, 3);
    }
    dmk_build_end(b, dmk_piece_nodes(b, n.start, n.out, n.start), 0, DMK_BUILD_NO_MAX);
}
