"""The tokenizer against tiktoken's o200k_harmony, through `damask tokenize --frames`.

Texts are seeded: every code point of every plane in and out of company, words of the splitter's alphabet,
bytes that are no UTF-8, long runs of one character, and the vocabulary's own tokens.
"""

import hashlib
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

import pytest
import tiktoken

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
VOCAB = ROOT / ".deps" / "vocab"
DAMASK = BUILD / "tools" / "damask"
SEED = 20261129

SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def run(*args, stdin=b"", ok=True):
    done = subprocess.run([DAMASK, "tokenize", *args], input=stdin, capture_output=True, timeout=120)
    if ok:
        assert done.returncode == 0, done.stderr.decode()
    return done


def frames(items, *args, vocab=VOCAB):
    """Sends all items, bytes or lists of ids, and returns the answers of the other kind."""
    decode = "--decode" in args
    sent = b"".join(
        struct.pack(f"<I{len(i)}I", len(i), *i) if decode else struct.pack("<I", len(i)) + i for i in items
    )
    data = run("--vocab", vocab, "--frames", *args, stdin=sent).stdout
    answers, pos = [], 0
    while pos < len(data):
        (n,) = struct.unpack_from("<I", data, pos)
        pos += 4
        if decode:
            answers.append(data[pos : pos + n])
            pos += n
        else:
            answers.append(list(struct.unpack_from(f"<{n}I", data, pos)))
            pos += 4 * n
    assert pos == len(data) and len(answers) == len(items)
    return answers


@pytest.fixture(scope="module")
def harmony():
    os.environ["TIKTOKEN_CACHE_DIR"] = str(VOCAB)
    return tiktoken.get_encoding("o200k_harmony")


def compare(texts, harmony):
    """texts: bytes; what is no UTF-8 counts as its repair. Also decodes back."""
    ours = frames(texts)
    repaired = [t.decode("utf-8", "replace") for t in texts]
    for text, got in zip(repaired, ours):
        want = harmony.encode_ordinary(text)
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got + [None], want + [None])) if a != b)
            pytest.fail(f"seed {SEED}: {text[:200]!r} differs at token {at}: {got[at:at+5]} is not {want[at:at+5]}")
    back = frames(ours, "--decode")
    assert back == [t.encode() for t in repaired]


def all_code_points():
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def test_every_code_point_in_order(harmony):
    chars = all_code_points()
    compare(["".join(chars[i : i + 64]).encode() for i in range(0, len(chars), 64)], harmony)


def test_every_code_point_in_company(harmony):
    """Each one between characters of every class that the splitter knows, so that its class shows."""
    chars = all_code_points()
    step = 40
    texts = []
    for i in range(0, len(chars), step):
        texts.append("".join(f" a{c}B{c}1{c}\u4e2d{c}'s{c}!{c}\n{c} {c}" for c in chars[i : i + step]).encode())
    # The planes without letters are many and alike: a part of them is enough.
    rng = random.Random(SEED)
    letters = [t for t in texts[: 0x34000 // step]]
    compare(letters + rng.sample(texts[0x34000 // step :], 1500), harmony)


def test_random_text(harmony):
    rng = random.Random(SEED)
    chars = all_code_points()
    alphabet = list("aAbBzZ'sStTreEvVmMlLdD0129 \t\r\n/.,!-_\"\x00\x1f\x7f") + [
        "\u017f", "\u2019", "\u00a0", "\u0085", "\u2028", "\u3000", "\u200b", "\ufeff", "\u0301", "\u0903",
        "\u01c5", "\u02b0", "\u4e2d", "\u3042", "\uac00", "\u0660", "\u2167", "\u00b2", "\u20ac", "\u212a",
        "\U0001f600", "\U0001f1fa", "\u200d", "\U0001d400", "\ue000", "\U000f0000", "\u0378", "\u00df", "\u0130",
    ]
    words = ["Hello", "world", "don't", "I'LL", "HTTPServer", "straße", "Привет", "你好", "こんにちは", "return",
             "<|start|>", "<|endoftext|>", "    ", "\r\n", "//", "naïve", "안녕하세요", "العربية", "हिन्दी", "ไทย"]
    texts = []
    for _ in range(20000):
        kind = rng.random()
        n = rng.randrange(1, 40)
        if kind < 0.6:
            text = "".join(rng.choice(alphabet) for _ in range(n))
        elif kind < 0.8:
            text = "".join(rng.choice(words) + rng.choice(["", " ", "'s ", "\n"]) for _ in range(n))
        elif kind < 0.9:
            text = "".join(chr(rng.randrange(0x3000)) for _ in range(n))
        else:
            text = "".join(rng.choice(chars) for _ in range(n))
        texts.append(text.encode())
    compare(texts, harmony)


def test_invalid_utf8(harmony):
    rng = random.Random(SEED + 1)
    texts = [bytes([b]) for b in range(256)] + [bytes([a, b]) for a in range(0xC0, 0x100) for b in range(0x70, 0x100)]
    pieces = [b"a", b" word", b"\xe4\xbd\xa0", b"\xf0\x9f\x92\x96", b"\xc3\xa9", b"\n"]
    for _ in range(5000):
        data = bytearray(b"".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12))))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            if rng.random() < 0.5:
                data[at:at] = bytes([rng.randrange(256)])
            else:
                del data[at : at + 1]
        texts.append(bytes(data))
    texts += [rng.randbytes(rng.randrange(1, 60)) for _ in range(3000)]
    compare(texts, harmony)


def test_long_runs(harmony):
    """Pieces longer than the array algorithm takes, and repeated units of several characters."""
    rng = random.Random(SEED + 2)
    texts = []
    for unit in ["a", "A", "aA", "x", "0", " ", "\n", "\r\n", "\t", "-", "=", "^", "/", "'s", "中", "あ", "é", "e\u0301",
                 "😀", "\u200b", "ab", "the", "The", "Lu中", "!?", "\u00a0", "\x00"]:
        for n in [1, 2, 3, 7, 31, 62, 63, 64, 65, 126, 127, 128, 129, 130, 200, 1000, 20000]:
            texts.append((unit * n).encode())
            texts.append((" " + unit * n + "\n").encode())
    for n in [100, 127, 128, 129, 300, 5000, 50000]:
        for letters in ["ab", "etaoinshrdlu", "ABCDEFghijklmnop", "的一是不了人我在有他这为之大来以个中上们", "!@#$%^&*", " \t"]:
            texts.append("".join(rng.choice(letters) for _ in range(n)).encode())
    compare(texts, harmony)


def test_tokens_of_the_vocabulary(harmony):
    """Every token's bytes decode alike; and where they are text, they encode as tiktoken does."""
    ids = list(range(201088))
    ours = frames([[i] for i in ids], "--decode")
    assert ours == [harmony.decode_single_token_bytes(i) for i in ids[:200018]] + [b"<|reserved_200018|>"] + [
        harmony.decode_single_token_bytes(i) for i in ids[200019:]
    ]
    texts = []
    for data in ours[:199998]:
        try:
            data.decode("utf-8")
            texts.append(data)
        except UnicodeDecodeError:
            pass
    assert len(texts) == 199998 - 1562
    compare(texts[::3], harmony)


def test_specials(harmony):
    rng = random.Random(SEED + 3)
    names = sorted(harmony.special_tokens_set)
    parts = names[:12] + ["<|", "|>", "<|start", "<", "|", "start|>", "<|reserved_200002|>", "<|reserved_201088|>", " ",
                          "a", "  ", "\n", "中"]
    texts = ["".join(rng.choice(parts) for _ in range(rng.randrange(1, 12))) for _ in range(4000)] + names
    ours = frames([t.encode() for t in texts], "--specials")
    for text, got in zip(texts, ours):
        assert got == harmony.encode(text, allowed_special="all"), text
    for text, got in zip(texts, frames([t.encode() for t in texts])):
        assert got == harmony.encode_ordinary(text), text
        assert max(got) < 199998


def byte_alphabet():
    """GPT-2's printable characters for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 256
    for b in range(256):
        if b in printable:
            table[b] = chr(b)
        else:
            table[b] = chr(extra)
            extra += 1
    return table


@pytest.fixture(scope="module")
def hf_file(harmony):
    """A tokenizer.json as a dict, as a checkpoint has it but for the merges: ranks say the same."""
    table = byte_alphabet()
    vocab = {"".join(table[b] for b in harmony.decode_single_token_bytes(i)): i for i in range(199998)}
    added = [
        {"id": i, "content": c, "special": True}
        for c, i in sorted(harmony._special_tokens.items(), key=lambda x: x[1])
        if i <= 200018 and c != "<|reserved_200018|>"
    ]
    return {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": []}}


def test_huggingface_file(hf_file, harmony, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(hf_file))
    texts = [b"hello world", "I'LL 你好, 123456".encode(), b"\xff\x00"]
    assert frames(texts, vocab=path) == frames(texts, vocab=tmp_path) == frames(texts)


def test_merges_of_a_huggingface_file(hf_file, tmp_path):
    """Every way to cut a token into two tokens, in any order; a list with one of them gone is a damaged file."""
    vocab = hf_file["model"]["vocab"]
    merges = [[t[:i], t[i:]] for t in vocab for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab]
    assert len(merges) == 446189  # as many as the published file has
    random.Random(SEED).shuffle(merges)
    other = [[merges[0][1], merges[0][0]], *merges[1:]]
    path = tmp_path / "tokenizer.json"
    for name, listed, sentence in [
        ("pairs", merges, None),
        ("lines", [" ".join(m) for m in merges], None),
        ("one gone", merges[1:], "model.merges has 446188 entries"),
        ("one twice", [*merges[1:], merges[1]], "model.merges has 446189 entries of check sum"),
        ("one turned round", other, "model.merges has 446189 entries of check sum"),
        ("no pair", [*merges[1:], "hello"], "entry 446188 of model.merges is not two tokens"),
    ]:
        document = {**hf_file, "model": {**hf_file["model"], "merges": listed}}
        path.write_text(json.dumps(document))
        if sentence is None:
            assert frames([b"hello world"], vocab=path) == frames([b"hello world"])
            continue
        done = run("--vocab", path, ok=False)
        assert done.returncode == 1, name
        assert sentence in done.stderr.decode() and str(path) in done.stderr.decode(), (name, done.stderr)


def test_faulty_files(hf_file, tmp_path):
    """A vocabulary that is not o200k_base is refused with a sentence that names the place."""
    good = (VOCAB / "o200k_base.tiktoken").read_bytes()
    assert hashlib.sha256(good).hexdigest() == SHA256
    lines = good.splitlines(keepends=True)
    swapped = lines[:]
    swapped[1000] = lines[1001].split()[0] + b" 1000\n"
    swapped[1001] = lines[1000].split()[0] + b" 1001\n"
    cases = {
        "empty": (b"", "has 0 bytes"),
        "cut": (b"".join(lines[:5000]), "holds 5000 tokens, o200k_base has 199998"),
        "cut line": (good[:-3], "line 199998"),
        "no rank": (good.replace(b" 77\n", b"\n"), "line 78: 'bg==' is not base64"),
        "bad base64": (good.replace(b"bg== 77\n", b"a*== 77\n"), "line 78"),
        "other order": (b"".join(lines[:10] + lines[11:]), "line 11"),
        "other token": (b"".join(swapped), "is not the o200k_base vocabulary: the SHA-256 of its tokens is"),
        "one too many": (good + b"AAAA 199998\n", "line 199999"),
        "text": (b"no vocabulary at all\n", "line 1"),
        "json": (b'{"model": {"type": "WordPiece", "vocab": {}}}', "model.type is 'WordPiece'"),
        "no json": (b'{"model": ', "line 1"),
    }
    for name, change in {
        "missing": lambda d: d["model"]["vocab"].pop("hello"),
        "twice": lambda d: d["model"]["vocab"].update({"hello": 5}),
        "beyond": lambda d: d["model"]["vocab"].update({"hello": 250000}),
        "foreign": lambda d: d["added_tokens"].append({"id": 200006, "content": "<|stop|>"}),
    }.items():
        document = json.loads(json.dumps(hf_file))
        change(document)
        sentence = {
            "missing": "no token has the id 24912",
            "twice": "has the id 5, which is not a free one",
            "beyond": "'hello' has the id 250000",
            "foreign": "'<|stop|>' of id 200006 is not one of o200k_harmony",
        }[name]
        cases["hf " + name] = (json.dumps(document).encode(), sentence)
    for name, (data, sentence) in cases.items():
        path = tmp_path / "vocab"
        path.write_bytes(data)
        done = run("--vocab", path, ok=False)
        assert done.returncode == 1, name
        assert sentence in done.stderr.decode() and str(path) in done.stderr.decode(), (name, done.stderr)


def test_text_modes():
    assert run("--vocab", VOCAB, stdin=b"hello world").stdout == b"24912 2375\n"
    assert run("--vocab", VOCAB, "--json", stdin=b"hello world").stdout == b"[24912,2375]\n"
    assert run("--vocab", VOCAB, "--decode", stdin=b"[24912, 2375]").stdout == b"hello world"
    done = run("--vocab", VOCAB, "--decode", "--json", stdin=b"9552 1 198 200006")
    assert json.loads(done.stdout) == ' \ufffd"\n<|start|>'
    assert run("--vocab", VOCAB).stdout == b"\n"
    for bad in [b"201088", b"99999999999999999999"]:
        done = run("--vocab", VOCAB, "--decode", stdin=bad, ok=False)
        assert done.returncode == 1 and b"outside the vocabulary" in done.stderr
    done = run("--vocab", VOCAB, "--frames", stdin=b"\x05\x00\x00\x00ab", ok=False)
    assert done.returncode == 1 and b"ended inside a frame" in done.stderr
    done = run("--vocab", VOCAB, "--frames", stdin=b"\xff\xff\xff\xff", ok=False)
    assert done.returncode == 1 and b"67108864 are allowed" in done.stderr


def test_class_table_is_tiktokens():
    """The committed table of character classes is what the pinned tiktoken's engine says."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "gen_unicode.py", "--check"], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
