"""Sources that a script of tools/ writes are what it writes."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_wgmma_wrappers_are_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "tools" / "gen_wgmma.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
