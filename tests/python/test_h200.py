"""The table of measurements on one H200: its columns and what was added to them, its plot, and the numbers that
docs/PERF.md shows of it."""

import csv
import importlib.util
import pathlib
import re
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
COLUMNS = ("date commit machine driver model format phase tp ep dp batch context median_ms p10_ms p90_ms roofline_ms "
           "rival rival_ms").split()
FORMATS = ("mxfp4", "fp8", "mxfp4-dense8", "fp8-dense8")  # of the experts, and dense products in FP8
KEY = ("model", "format", "phase", "tp", "dp", "batch", "context")


@pytest.fixture
def h200(tmp_path):
    """bench/h200.py, working on a copy of the results."""
    spec = importlib.util.spec_from_file_location("h200", ROOT / "bench" / "h200.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HERE = tmp_path
    for name in ("h200.csv", "rivals.csv"):
        shutil.copy(RESULTS / name, tmp_path)
    return module


def rows_of(path):
    with open(path) as f:
        reader = csv.DictReader(f)
        rows = list(reader)
        assert reader.fieldnames == COLUMNS
    return rows


def newest(rows):
    return {tuple(r[k] for k in KEY): r for r in rows}


def run(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["h200.py", *map(str, argv)])
    module.main()


def test_table_is_whole(h200):
    rows = rows_of(RESULTS / "h200.csv")
    with open(RESULTS / "rivals.csv") as f:
        rivals = list(csv.DictReader(f))
    assert {(r["model"], r["phase"]) for r in rows} == {(m, p) for m in h200.MODELS for p in ("decode", "prefill")}
    for r in rows:
        sizes = [int(r[k]) for k in ("batch", "context", "tp", "dp")]
        assert int(r["ep"]) == sizes[2] * sizes[3] and r["format"] in FORMATS and len(r["commit"]) >= 7, r
        assert r["roofline_ms"] == f'{h200.roofline_ms(r["model"], r["format"], r["phase"], *sizes):.3f}', r
        rival = h200.find_rival(rivals, r)
        assert (r["rival"], r["rival_ms"]) == ((f'{rival["engine"]} {rival["moe_backend"]}', rival["median_ms"])
                                               if rival else ("", "")), r
        if r["median_ms"] != h200.NO_ROOM:
            assert float(r["p10_ms"]) <= float(r["median_ms"]) <= float(r["p90_ms"]), r
            assert float(r["median_ms"]) > float(r["roofline_ms"]), r


def test_plot_is_of_the_table(h200, monkeypatch):
    run(h200, monkeypatch)
    assert (h200.HERE / "h200.csv").read_text() == (RESULTS / "h200.csv").read_text()
    assert (h200.HERE / "h200-decode.svg").read_text() == (RESULTS / "h200-decode.svg").read_text()


def test_a_case_without_room_is_a_row_and_no_point(h200, monkeypatch, tmp_path):
    raw = tmp_path / "raw.csv"
    raw.write_text("2030-01-01,abcdef0,H200,1,gpt-oss-120b,mxfp4,decode,1,1,1,64,8192,does not fit,,\n"
                   "2030-01-01,abcdef0,H200,1,gpt-oss-20b,mxfp4,decode,1,1,1,1,8192,1.5,1.4,1.6\n")
    before = (RESULTS / "h200-decode.svg").read_text()
    run(h200, monkeypatch, raw)
    table = newest(rows_of(h200.HERE / "h200.csv"))
    none = table["gpt-oss-120b", "mxfp4", "decode", "1", "1", "64", "8192"]
    assert none["median_ms"] == "does not fit" and float(none["roofline_ms"]) > 18
    measured = table["gpt-oss-20b", "mxfp4", "decode", "1", "1", "1", "8192"]
    assert (measured["median_ms"], measured["rival"]) == ("1.5", "vllm-0.25.1 triton")
    after = (h200.HERE / "h200-decode.svg").read_text()
    assert after.count("<circle") == before.count("<circle") - 2  # ours and its rival's


def numbers(cell):
    """The first number of a cell, or None; text in brackets is the spread."""
    found = re.match(r"\s*\*{0,2}(\d+(?:\.\d+)?)", cell)
    return float(found.group(1)) if found else None


def check_row(cells, names, pick, table, n_seen):
    for name, cell in zip(names, cells):
        value = numbers(cell)
        if value is None:
            assert cell.strip() == "-" or cell.strip() == pick(table, name) == "does not fit", cell
            continue
        want = float(pick(table, name))
        digits = len(cell.strip().split(" ")[0].partition(".")[2])
        assert abs(want - value) <= 0.5001 * 10 ** -digits, (cell, want)
        n_seen[0] += 1


def test_numbers_of_the_page_are_those_of_the_table():
    table = newest(rows_of(RESULTS / "h200.csv"))
    text = (ROOT / "docs" / "PERF.md").read_text()
    n_seen = [0]
    for title, phase in (("**Decode, ms a step**", "decode"), ("**Prefill, ms a prompt**", "prefill")):
        lines = text[text.index(title):].split("\n\n")[1].strip().splitlines()
        head = [c.strip() for c in lines[0].strip("|").split("|")]
        shown = None
        for line in lines[2:]:
            name, *cells = line.strip("|").split("|")
            name = name.strip()
            column = {"roofline": "roofline_ms", "rival": "rival_ms"}.get(name, "median_ms")
            if column == "median_ms":
                shown = name.split(", ")
            model, *what = shown
            def pick(t, size):
                sizes = (size, what[-1].split()[-1]) if phase == "decode" else ("1", size)
                form = what[0] if phase == "prefill" or len(what) > 1 else "mxfp4"
                return t[("gpt-oss-" + model, form, phase, "1", "1", *sizes)][column]
            check_row(cells, head[1:], pick, table, n_seen)
    assert n_seen[0] > 60


def test_numbers_of_ranks_are_those_of_the_table():
    table = newest(rows_of(RESULTS / "h200.csv"))
    text = (ROOT / "docs" / "PERF.md").read_text()
    lines = text[text.index("**What ranks cost.**"):].split("\n\n")[1].strip().splitlines()
    head = [int(c.split()[-1]) for c in lines[0].strip("|").split("|")[1:]]
    rows = {"tp 2": ("2", "1", "median_ms"), "roofline of a rank": ("2", "1", "roofline_ms"),
            "rival, tp 2": ("2", "1", "rival_ms"), "dp 2": ("1", "2", "median_ms")}
    n_seen = [0]
    for line in lines[2:]:
        name, *cells = line.strip("|").split("|")
        if name.strip() in rows:
            tp, dp, column = rows[name.strip()]

            def pick(t, size):
                what = ("mxfp4", "decode", tp, dp, str(size), "8192") if size < 1024 else \
                    ("fp8", "prefill", tp, dp, "1", str(size))
                return t[("gpt-oss-120b", *what)][column]
            check_row(cells, head, pick, table, n_seen)
    assert n_seen[0] == 22


def test_numbers_beside_the_rival_are_those_of_one_call():
    table = newest(rows_of(RESULTS / "h200.csv"))
    with open(RESULTS / "rivals.csv") as f:
        rivals = {(r["model"], r["phase"], int(r["batch"]), int(r["context"])): float(r["median_ms"])
                  for r in csv.DictReader(f) if r["date"] == "2026-11-30"}
    text = (ROOT / "docs" / "PERF.md").read_text()
    lines = text[text.index("**Beside the rival in one call.**"):].split("\n\n")[1].strip().splitlines()
    head = [int(c.split()[-1]) for c in lines[0].strip("|").split("|")[1:]]
    n_seen = [0]
    for line in lines[2:]:
        name, *cells = line.strip("|").split("|")
        model = "gpt-oss-" + name.strip().split(",")[0] if "damask" in name else model

        def pick(_, size):
            case = ("decode", size, 8192) if size < 1024 else ("prefill", 1, size)
            form = "mxfp4" if size < 1024 else "fp8"
            ours = float(table[(model, form, case[0], "1", "1", str(case[1]), str(case[2]))]["median_ms"])
            theirs = rivals.get((model, *case), 0.0)
            return ours if "damask" in name else theirs if name.strip() == "vLLM" else theirs / ours
        check_row(cells, head, pick, table, n_seen)
    assert n_seen[0] == 46
