"""docs/CONFIG.md says what the programs' option tables say."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))


def test_page_is_up_to_date():
    r = subprocess.run([sys.executable, ROOT / "tools" / "config_doc.py", BUILD, "--check"],
                       stdout=subprocess.PIPE, text=True)
    assert r.returncode == 0, r.stdout
