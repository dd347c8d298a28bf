"""Grammars in EBNF beside others: random ones without recursion against RE2's regular expressions (Python's own may
take time that is exponential in the text), some of the usual kind against llguidance. What is sampled from the masks is
accepted by the other side, and both agree on texts near it."""

import json
import os
import pathlib
import random
import re
import subprocess

import llguidance
import llguidance.gbnf_to_lark
import pytest
import re2

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
SEED = int(os.environ.get("DAMASK_SEED", random.SystemRandom().randrange(1 << 32)))
N_GRAMMARS = 200


@pytest.fixture(scope="module")
def ask():
    popen = subprocess.Popen([BUILD / "tests" / "unit" / "schema" / "schema_tool"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)

    def one(**fields):
        popen.stdin.write(json.dumps(fields) + "\n")
        popen.stdin.flush()
        return json.loads(popen.stdout.readline())

    yield one
    popen.stdin.close()
    popen.wait(10)


def near(r, texts):
    """Texts with a character more, less or changed."""
    out = []
    for text in texts:
        at = r.randrange(len(text) + 1)
        out += [text[:at] + text[at + 1:], text[:at] + r.choice("ab,(1 é") + text[at:], text * 2, text[:at]]
    return [text for text in out if "\0" not in text]  # the tool's texts end there


def make(r, names, depth):
    """(EBNF, regular expression) of an expression that may name the rules in names."""
    kind = r.choice(["text", "class", "name", "group", "seq", "or"] if depth else ["text", "class", "name"])
    if kind == "name" and names:
        name = r.choice(list(names))
        return name, f"(?:{names[name]})"
    if kind in ("text", "name"):
        text = "".join(r.choice("ab,(é\\") for _ in range(r.randrange(3)))
        return json.dumps(text, ensure_ascii=r.random() < 0.5), re.escape(text)
    if kind == "class":
        inner = r.choice(["a-c", "ab", "^ab", "1-9,", "é(", "^a-z"])
        return f"[{inner}]", f"[{inner}]"
    if kind == "group":
        one, other = make(r, names, depth - 1)
        times = r.choice(["", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}"])
        return f"({one}){times}", f"(?:{other}){times}"
    parts = [make(r, names, depth - 1) for _ in range(r.randrange(2, 4))]
    if kind == "seq":
        return " ".join(f"({p[0]})" if "|" in p[0] else p[0] for p in parts), "".join(f"(?:{p[1]})" for p in parts)
    return " | ".join(p[0] for p in parts), "|".join(p[1] for p in parts)


def test_random_grammars(ask):
    r = random.Random(SEED)
    print("seed", SEED)
    compiled = 0
    for k in range(N_GRAMMARS):
        names, lines = {}, []
        for i in range(r.randrange(4)):
            one, other = make(r, names, 2)
            lines.append(f"rule{i} ::= {one}")
            names[f"rule{i}"] = other
        one, other = make(r, names, 3)
        lines.append(f"root ::= {one}")
        r.shuffle(lines)
        grammar, pattern = "\n".join(lines), re2.compile(other)
        first = ask(grammar=grammar, samples=4, seed=k, texts=[])
        if "error" in first:  # only where nothing but the empty text is left, or that and nothing
            assert "too large" in first["error"] or "met" in first["error"] or "needs" in first["error"], (grammar, first)
            continue
        compiled += 1
        texts = near(r, first["samples"]) + near(r, ["", "a", "ab"])
        told = ask(grammar=grammar, samples=0, seed=0, texts=texts)["fits"]
        for text in first["samples"]:
            assert pattern.fullmatch(text), (grammar, text)
        for text, fits in zip(texts, told):
            if text:  # an answer has a character at least
                assert fits == bool(pattern.fullmatch(text)), (grammar, text, fits)
    assert compiled > N_GRAMMARS // 2


USUAL = [
    r'''root ::= object
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
value ::= object | array | string | number | ("true" | "false" | "null") ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}''',
    'root ::= "SELECT " column ("," " "? column)* " FROM " [a-z]+ (" WHERE " column " = " [0-9]+)?\ncolumn ::= [a-z_]+ | "*"',
    'root ::= move (" " move){1,5}\nmove ::= [NBKQR]? [a-h] [1-8] [+#]? | "O-O" "-O"?',
    'root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= "(" expr ")" | "-"? [0-9]{1,3} | [a-z]',
    'root ::= item+\nitem ::= "- " [^\\r\\n]+ "\\n"',
]
MORE = [["{}", '{"a": [1, -2.5e1, null]}', '{"a" : 1}', "[]", '{"é\\u00e9":""}'], ["SELECT a,b FROM t", "SELECT * FROM t WHERE a = 12"],
        ["e4 Nf3", "O-O e4 O-O-O", "e9 e4"], ["1+2*(3-a)", "--1", "((1))", "(1"], ["- a\n- b\n", "- \n", "-a\n"]]


@pytest.mark.parametrize("k", range(len(USUAL)))
def test_llguidance_agrees(ask, k):
    tokens = llguidance.LLTokenizer("byte")
    lark = llguidance.LLMatcher.grammar_from_lark(llguidance.gbnf_to_lark.gbnf_to_lark(USUAL[k]))

    def fits(text):
        matcher = llguidance.LLMatcher(tokens, lark)
        assert not matcher.get_error(), matcher.get_error()
        data = list(text.encode())
        return matcher.validate_tokens(data) == len(data) and (matcher.consume_tokens(data) or True) and matcher.is_accepting()

    r = random.Random(SEED)
    print("seed", SEED)
    first = ask(grammar=USUAL[k], samples=20, seed=SEED % 1000, texts=[])
    assert "error" not in first, first
    assert first["samples"]
    texts = [t for t in first["samples"] if "\0" not in t] + MORE[k] + near(r, first["samples"] + MORE[k])
    told = ask(grammar=USUAL[k], samples=0, seed=0, texts=texts)["fits"]
    assert any(told) and not all(told)
    for text, fit in zip(texts, told):
        assert fit == fits(text), (text, fit)
