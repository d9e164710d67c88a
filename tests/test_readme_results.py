"""The results of the README come from a report."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("readme_results", ROOT / "tools" / "readme_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(method, speedup, **groups):
    return {
        "method": method,
        "speedup": speedup,
        "mean_emitted": None if method == "hf" else 2.0,
        "groups": {name: {"speedup": value} for name, value in groups.items()},
    }


REPORT = {
    "rows": [row("none", 1.0), row("hf", 0.5, chat=0.4), row("auto", 2.5, chat=1.5, edit=5.25, code=None)],
    "noise_floor": {"speedup": 1.01, "speedup_interval": [0.99, 1.03]},
    "partial": False,
    "provenance": {
        "model": "m",
        "dtype": "bfloat16",
        "cpu": "C",
        "gpu": None,
        "device": "cpu",
        "threads": 2,
        "note": "weights as stored",
        "config": {"max_new_tokens": 64, "temperature": 0.0},
        "prompts": 64,
        "date": "2026-11-22T10:00",
        "command": "outpace bench --out report",
    },
}


def test_rows_are_ordered_and_span_their_categories(tool):
    block = tool.render(REPORT)
    assert "| `auto` | 2.50 x | 2.00 | 1.50 (chat), 5.25 (edit) |\n| `hf` | 0.50 x |  |" in block
    assert "m on C, 2 threads; weights as stored.\n64 prompts, 64 new tokens, temperature 0" in block
    assert "```text\noutpace bench\n```" in block and "`none`" not in block, "no folder is told"


def test_a_run_beside_is_a_column_more(tool):
    other = {**REPORT, "rows": [row("none", 1.0), row("auto", 3.0)]}
    block = tool.render(REPORT, other)
    assert "| | speed-up | in bfloat16 | mean emitted |" in block and "\n|---|---|---|---|---|\n" in block
    assert "| `auto` | 2.50 x | 3.00 x | 2.00 |" in block and "| `hf` | 0.50 x |  |  |" in block
    assert "outpace bench\noutpace bench\n```" in block


def test_the_block_goes_into_its_place_twice(tool):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    once = tool.replaced(page, REPORT)
    assert once != page and "2.50 x as fast on average: 1.50 x on chat, 5.25 x on edits" in once
    assert tool.replaced(once, REPORT) == once


def test_the_first_lines_say_what_the_table_says():
    head, table = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- results", 1)
    row = re.search(r"`auto` \| ([\d.]+) x \|.*?\| ([\d.]+) \((\w+)\), ([\d.]+) \((\w+)\)", table)
    assert row is not None
    mean, least, worst, most, best = row.groups()
    assert f"{mean} x as fast on average: {least} x on {worst}, {most} x on {best}s" in " ".join(head.split())


def test_a_page_without_a_place_is_refused(tool):
    with pytest.raises(ValueError, match="once each"):
        tool.replaced("page", REPORT)
