"""Writes docs/CONFIG.md from the programs' own option tables.

    tools/config_doc.py BUILD            write
    tools/config_doc.py BUILD --check    compare; status 1 when the page is out of date
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "CONFIG.md"
PROGRAMS = ("router", "prefill", "decode")
HEAD = """# Configuration

Each program has one table of options. They come from a YAML file (`--config FILE`, lines of `name: value`),
from the environment and from the command line (`--name value` or `--name=value`); the later wins. Unknown
names and values out of bounds are refused at the start, with the name and the bound. Sizes take k, M, G, Ki,
Mi and Gi, times want one of ms, s, m and h; a yes/no option reads `--name`, `--no-name` or `--name=false`; a list is
separated by commas or given several times. `--dump-config` prints what is in effect as such a file.

This page is written by `tools/config_doc.py`; a test compares.

"""


def text(build):
    parts = [subprocess.run([pathlib.Path(build) / p / f"damask-{p}", "--document"], check=True,
                            stdout=subprocess.PIPE, text=True).stdout for p in PROGRAMS]
    return HEAD + "\n".join(parts)


def main(argv):
    build = argv[1]
    if "--check" in argv[2:]:
        if not PAGE.exists() or PAGE.read_text() != text(build):
            print(f"{PAGE.relative_to(ROOT)} is out of date: run tools/config_doc.py {build}")
            return 1
        return 0
    PAGE.write_text(text(build))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
