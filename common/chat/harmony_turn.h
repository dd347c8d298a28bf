/* What the model may write behind "<|start|>assistant", as an automaton. Private to the format.
 *
 *   turn    := { analysis | preamble } ( answer | call { call } )
 *   analysis:= <|channel|>analysis<|message|> text <|end|><|start|>assistant
 *   preamble:= <|channel|>commentary<|message|> text <|end|><|start|>assistant
 *   answer  := <|channel|>final [[" "]<|constrain|>json]<|message|> ANSWER <|return|>
 *   call    := header <|message|> ARGUMENTS ( <|call|> | <|end|><|start|>assistant, if another call follows )
 *   header  := <|channel|>CH to=functions.NAME [TYPE] | " to=functions.NAME"<|channel|>CH [TYPE]
 *   CH      := commentary | analysis       TYPE := [" "]<|constrain|>json | " json" | " code"
 *
 * Text is any text: only ANSWER and ARGUMENTS are constrained, and that the turn ends as it should. Where the
 * answer is free text, a preamble may end the turn too. Where it is bound to a rule, a preamble leads to a call
 * only: it is content as the answer is, and the two together would not follow the rule. */
#pragma once

#include "common/chat/format.h"

void dmk_harmony_turn(struct dmk_build *build, uint32_t root, const struct dmk_turn *turn);
