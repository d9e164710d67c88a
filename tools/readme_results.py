"""Writes the results of README.md from the report of one run of `outpace bench`.

outpace bench --drafters none,auto,suffix,prompt_lookup,eagle3 --peers hf,llamacpp --out report
python tools/readme_results.py report/report.json
python tools/readme_results.py report/report.json --print    print the block, change nothing
python tools/readme_results.py report other/report.json      a column more: the same in another dtype

The block stands between two comments. What `auto` gains is also in the first lines of the page.
The rest stays as it is.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN = "<!-- results: written by tools/readme_results.py -->"
END = "<!-- end of results -->"
HEADLINE = re.compile(r"[\d.]+ x as fast on average: [\d.]+ x on \w+, [\d.]+ x on \w+?(?=s\b)")
PRIVATE = ("--out", "-o", "--peer-python")
"""Options that name folders."""


def render(report: dict[str, Any], *beside: dict[str, Any]) -> str:
    """The block: what was measured, a row per method, and the commands; a column for each run ``beside``."""
    said, floor = report["provenance"], report["noise_floor"]
    others = [row for row in report["rows"] if row["method"] != "none"]
    if not others:
        raise ValueError("the report has no method besides none")
    processor = said["gpu"] or said["cpu"] or said["device"]
    threads = "" if said["gpu"] else f", {said['threads']} threads"
    low, high = floor["speedup_interval"] or (floor["speedup"],) * 2
    note = (said.get("note") or f"in {said['dtype']}").splitlines()[0]
    head = (
        f"{said['model']} on {processor}{threads}; {note}.\n"
        f"{said['prompts']} prompts, {said['config']['max_new_tokens']} new tokens, temperature "
        f"{said['config']['temperature']:g}, {said['date'][:10]}.\n"
        f"Plain decoding against itself gave {floor['speedup']:.3f}, between {low:.3f} and {high:.3f}.\n"
    )
    if report["partial"]:
        head += "The run was stopped early.\n"
    names = ["", "speed-up", *(f"in {one['provenance']['dtype']}" for one in beside)]
    names += ["mean emitted", "least and most of the categories"]
    table = [f"| {' | '.join(names)} |".replace("|  |", "| |"), "|---" * len(names) + "|"]
    table += [_line(row, beside) for row in sorted(others, key=lambda row: -(row["speedup"] or 0))]
    commands = [command(one["provenance"]["command"]) for one in (report, *beside)]
    return "\n".join([BEGIN, "", head, *table, "", "```text", *commands, "```", "", END])


def command(typed: str) -> str:
    """The command without the folders of whoever ran it."""
    words = iter(shlex.split(typed))
    return shlex.join(word for word in words if word not in PRIVATE or not next(words))


def _ends(row: dict[str, Any]) -> list[tuple[float, str]]:
    """The categories with the least and with the largest speed-up; none where none was measured."""
    found = [(one["speedup"], name) for name, one in row["groups"].items() if one["speedup"] is not None]
    return [min(found), max(found)] if found else []


def _line(row: dict[str, Any], beside: Sequence[dict[str, Any]]) -> str:
    span = ", ".join(f"{speedup:.2f} ({name})" for speedup, name in _ends(row))
    emitted = "" if row["mean_emitted"] is None else f"{row['mean_emitted']:.2f}"
    same = [next((one for one in run["rows"] if one["method"] == row["method"]), None) for run in beside]
    speeds = [f"{one['speedup']:.2f} x" if one and one["speedup"] is not None else "" for one in (row, *same)]
    return f"| `{row['method']}` | {' | '.join(speeds)} | {emitted} | {span} |"


def replaced(page: str, report: dict[str, Any], *beside: dict[str, Any]) -> str:
    """The page with the block in its place, and with what `auto` gains in its first lines."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r} once each")
    before, rest = page.split(BEGIN)
    for row in report["rows"]:
        if row["method"] == "auto":
            (least, worst), (most, best) = _ends(row)
            mean = f"{row['speedup']:.2f} x as fast on average"
            before = HEADLINE.sub(f"{mean}: {least:.2f} x on {worst}, {most:.2f} x on {best}", before)
    return before + render(report, *beside) + rest.split(END)[1]


def main(arguments: list[str]) -> int:
    """Fill the block of the README, or print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, nargs="+", help="report.json, or the folder that holds it")
    parser.add_argument("--print", action="store_true", dest="show", help="print the block, change nothing")
    options = parser.parse_args(arguments)
    try:
        files = [path / "report.json" if path.is_dir() else path for path in options.report]
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        page = replaced(README.read_text(encoding="utf-8"), *reports)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {', '.join(map(str, options.report))}: {error}", file=sys.stderr)
        return 1
    if options.show:
        print(render(*reports))
    else:
        README.write_text(page, encoding="utf-8")
        print("wrote README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
