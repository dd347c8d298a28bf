"""Speed of the tokenizer beside tiktoken's, one thread each, on English, code and Chinese.

English is the documentation under /usr/share, code the C headers under /usr/include, Chinese the translated
messages under /usr/share/locale (lines that are mostly Chinese). "mixed" is a hard case for every cache: Chinese
words of the vocabulary drawn at random (by Zipf's law), so that hardly any phrase comes twice. Both sides encode the same chunks of about
16 KiB; their rounds alternate, and their token counts must agree.

usage: bench/tokenizer.py BUILD [--rounds N] [--megabytes M]
"""

import argparse
import gettext
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCAB = ROOT / ".deps" / "vocab"
CHUNK = 16384
SEED = 20261129


def gather(folder, suffixes, size):
    """Text files of a folder, in the order of their names, up to size bytes."""
    data = bytearray()
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if len(data) >= size:
            break
        if path.suffix in suffixes and path.is_file() and not path.is_symlink():
            try:
                text = path.read_bytes()
                text.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            data += text[: size // 20]  # no file is more than a twentieth
    return bytes(data[:size].rsplit(b"\n", 1)[0] + b"\n")


def messages(size):
    """Lines of the Chinese message catalogues that are at least six tenths Chinese."""
    lines = {}
    for path in sorted(pathlib.Path("/usr/share/locale").glob("zh_*/LC_MESSAGES/*.mo")):
        try:
            with path.open("rb") as file:
                catalog = gettext.GNUTranslations(file)._catalog
        except (OSError, UnicodeDecodeError, ValueError):
            continue
        for text in catalog.values():
            for line in text.split("\n"):
                if sum("\u4e00" <= c <= "\u9fff" for c in line) >= 0.6 * max(len(line), 4):
                    lines[line] = None
    return ("\n".join(lines) + "\n").encode()[:size].rsplit(b"\n", 1)[0] + b"\n"


def mixed(encoding, size):
    rng = random.Random(SEED)
    words = []  # of one or two characters, as most are
    for i in range(199998):
        try:
            text = encoding.decode_single_token_bytes(i).decode("utf-8")
        except UnicodeDecodeError:
            continue
        if 0 < len(text) <= 2 and all("\u4e00" <= c <= "\u9fff" for c in text):
            words.append(text)
    weights = [1.0 / (rank + 3) for rank in range(len(words))]
    drawn = iter(rng.choices(words, weights, k=size // 4))
    out, used = [], 0
    while used < size:
        for _ in range(rng.randrange(2, 6)):  # sentences of a paragraph
            for _ in range(rng.randrange(1, 4)):
                out.append("".join(next(drawn) for _ in range(rng.randrange(3, 9))))
                out.append("，")
            out[-1] = rng.choice("。。。！？；")
        out.append("\n")
        used = sum(map(len, out)) * 3 if used == 0 or len(out) % 64 == 0 else used + 90
    return "".join(out).encode()[:size].rsplit(b"\n", 1)[0] + b"\n"


def chunks(data):
    pos = 0
    while pos < len(data):
        end = len(data) if len(data) - pos <= CHUNK else data.rfind(b"\n", pos, pos + CHUNK) + 1
        if end <= pos:
            end = data.find(b"\n", pos + CHUNK) + 1 or len(data)
        yield data[pos:end].decode("utf-8")
        pos = end


def machine():
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; commit {commit.stdout.strip()}"


def show(speeds):
    return f"{statistics.median(speeds):7.1f} ({min(speeds):.1f} to {max(speeds):.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=8.0)
    args = parser.parse_args()
    os.environ["TIKTOKEN_CACHE_DIR"] = str(VOCAB)
    import tiktoken

    start = time.monotonic()
    encoding = tiktoken.get_encoding("o200k_harmony")
    opened = time.monotonic() - start
    size = int(args.megabytes * 1e6)
    texts = {
        "English": gather("/usr/share/doc", {"", ".txt", ".md", ".html", ".rst"}, size),
        "code": gather("/usr/include", {".h"}, size),
        "Chinese": messages(size),
        "mixed": mixed(encoding, size),
    }
    ours, theirs, counts, own_open = {}, {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: pathlib.Path(folder) / name for name in texts}
        for name, data in texts.items():
            paths[name].write_bytes(data)
        for _ in range(args.rounds):
            done = subprocess.run([args.build / "bench/bench_tokenizer", VOCAB, "1", *paths.values()],
                                  capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            lines = done.stdout.splitlines()
            own_open.append(float(lines[0].split()[1]))
            for name, line in zip(texts, lines[1:]):
                _, _, n, *speeds = line.split()
                ours.setdefault(name, []).extend(map(float, speeds))
                counts[name] = int(n)
            for name, data in texts.items():
                parts = list(chunks(data))
                start = time.thread_time()
                n = sum(len(encoding.encode_ordinary(p)) for p in parts)
                theirs.setdefault(name, []).append(len(data) / 1e6 / (time.thread_time() - start))
                if n != counts[name]:
                    sys.exit(f"{name}: tiktoken gives {n} tokens, damask {counts[name]}")
    print(machine())
    print(f"bench/tokenizer.py {args.build} --rounds {args.rounds} --megabytes {args.megabytes}")
    print(f"opening the vocabulary: damask {statistics.median(own_open):.3f} s, tiktoken {opened:.3f} s")
    print("MB per second of one thread's CPU time, median (lowest to highest); tokens agree")
    print(f"{'text':8} {'MB':>5} {'bytes/token':>11}  {'damask':>24}  {'tiktoken ' + tiktoken.__version__:>24}")
    for name, data in texts.items():
        print(f"{name:8} {len(data) / 1e6:5.1f} {len(data) / counts[name]:11.2f}  {show(ours[name]):>24}  {show(theirs[name]):>24}")


if __name__ == "__main__":
    main()
