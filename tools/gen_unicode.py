#!/usr/bin/env python3
"""Writes common/text/unicode_tables.c: the class of every code point, as the tokenizer's splitter needs it.

The classes are asked of tiktoken itself, so the table has the Unicode version of the regex engine that the
pinned tiktoken is built with: an encoding whose pattern is one class drops all text that the class does not
match, hence the bytes that come back are the members of the class. All 1,112,064 code points are asked.

usage: gen_unicode.py [--check] [FILE]     (--check: compare with FILE instead of writing it)
"""
import argparse
import pathlib
import sys

import tiktoken

PINNED = "0.14.0"
BLOCK = 128
LINE = 96

# Number, name and pattern of each class. The number is what unicode.h calls DMK_CLASS_*.
CLASSES = [
    (0, "other", None),
    (1, "upper and title case", r"[\p{Lu}\p{Lt}]"),
    (2, "lower case", r"\p{Ll}"),
    (3, "letters without case", r"[\p{Lm}\p{Lo}]"),
    (4, "marks", r"\p{M}"),
    (5, "numbers", r"\p{N}"),
    (6, "white space but CR and LF", r"[^\S\r\n]"),
    (7, "CR and LF", r"[\r\n]"),
]


def members(pattern, text):
    """The code points of text that pattern, one class, matches."""
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding(name="probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return bytes(encoding.encode_ordinary(text)).decode("utf-8")


def classify():
    text = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF)
    classes = bytearray(0x110000)
    seen = 0
    for number, _, pattern in CLASSES:
        if pattern is None:
            continue
        for char in members(pattern, text):
            if classes[ord(char)]:
                sys.exit(f"U+{ord(char):04X} is in two classes")
            classes[ord(char)] = number
            seen += 1
    # The pattern's own complement must be what is left over.
    other = members(r"[^\s\p{L}\p{N}\p{M}]", text)
    if len(other) + seen != len(text) or any(classes[ord(c)] for c in other):
        sys.exit("the classes do not cover every code point exactly once")
    return classes


def render(classes):
    blocks, index = [], []
    numbers = {}
    for start in range(0, 0x110000, BLOCK):
        block = bytes(classes[start : start + BLOCK])
        if block not in numbers:
            numbers[block] = len(blocks)
            blocks.append(block)
        index.append(numbers[block])
    if len(blocks) > 256:
        sys.exit(f"{len(blocks)} different blocks do not fit an 8-bit index")
    digits = b"".join(blocks).translate(bytes(0x30 + i for i in range(8)) + bytes(248)).decode()
    out = [
        "/* Character classes of every code point; made by tools/gen_unicode.py, not by hand.",
        " *",
        f" * Asked of tiktoken {PINNED}, whose regex engine carries the Unicode version that counts here.",
        " * Two stages: dmk_unicode_index[code >> 7] is a block, a block is 128 classes, written as digits:",
    ]
    for number, name, _ in CLASSES:
        count = classes.count(number) - (0x800 if number == 0 else 0)
        out.append(f" *   {number}  {name} ({count} code points)")
    out[-1] += " */"
    out += ['#include "common/text/unicode.h"', "", "/* clang-format off */", f"const uint8_t dmk_unicode_index[{len(index)}] = {{"]
    line = "   "
    for value in index:
        word = f" {value},"
        if len(line) + len(word) > 100:
            out.append(line)
            line = "   "
        line += word
    out += [line, "};", "", f"const char dmk_unicode_blocks[{len(digits)} + 1] ="]
    for start in range(0, len(digits), LINE):
        out.append(f'"{digits[start : start + LINE]}"')
    out[-1] += ";"
    out += ["/* clang-format on */", ""]
    return "\n".join(out)


def main():
    default = pathlib.Path(__file__).resolve().parent.parent / "common/text/unicode_tables.c"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=default)
    args = parser.parse_args()
    if tiktoken.__version__ != PINNED:
        sys.exit(f"tiktoken {tiktoken.__version__} is installed, the table belongs to {PINNED}")
    text = render(classify())
    if args.check:
        if args.file.read_text() != text:
            sys.exit(f"{args.file} is not what tiktoken {PINNED} gives; run tools/gen_unicode.py")
    else:
        args.file.write_text(text)


if __name__ == "__main__":
    main()
