"""A report as tables, the same ones on a terminal and in ``report.md``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.bench.records import VERBS
from outpace.bench.report import Report
from outpace.bench.stats import LOOPS, half_width
from outpace.files import write_whole

Figures = dict[str, Any]
"""What a report says of one method."""
_DEPTHS = 10
"""Most columns of acceptance by depth: what a terminal holds. The JSON has all."""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    """All but the first hold numbers."""
    rows: tuple[tuple[str, ...], ...]


def tables(report: Report) -> list[Table]:
    """Everything that a report says about methods."""
    rows: list[Figures] = report["rows"]
    out = [_main(rows), _groups(rows), _drafts(rows), _shares(rows), _costs(rows), _depths(rows)]
    if any(row["repeats"] > 1 for row in rows):
        out.append(_repeats(rows))
    out.append(_keyed(rows))
    out.append(_disturbed(rows))
    return [table for table in out if table.rows]


def heading(report: Report) -> str:
    p = report["provenance"]
    c = p["config"]
    threads, prompts = (f"{p[key]} {key[:-1]}{'s' * (p[key] != 1)}" for key in ("threads", "prompts"))
    return (
        f"{p['model']}, {p['dtype']}, {p['gpu'] or p['cpu']}, {threads}: "
        f"{prompts} of {c['workload']}, {c['max_new_tokens']} new tokens, "
        f"temperature {c['temperature']:g}, batch {c['batch']}{', first answers' * bool(c.get('fresh'))}"
    )


def noise_line(report: Report) -> str:
    noise = report["noise_floor"]
    return (
        f"noise floor: none against none {number(noise['speedup'], 3)} x "
        f"{interval(noise['speedup_interval'], 3)}, single units off by up to "
        f"{share(noise['largest_deviation'])}"
    )


def _listed(
    title: str, rows: Sequence[Figures], columns: Sequence[tuple[str, Callable[[Figures], str]]]
) -> Table:
    """A line per method, from headings and what is told below each."""
    lines = tuple((label(row), *(tell(row) for _, tell in columns)) for row in rows)
    return Table(title, ("method", *(name for name, _ in columns)), lines)


def _main(rows: Sequence[Figures]) -> Table:
    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("decode tok/s", lambda row: number(row["decode_tokens_per_second"], 1)),
        ("speed-up", lambda row: number(row["speedup"])),
        ("95 % interval", lambda row: interval(row["speedup_interval"])),
        ("without loops", lambda row: number(_kept(row, "speedup"))),
        ("95 % interval", lambda row: interval(_kept(row, "speedup_interval"))),
        ("end to end", lambda row: number(row["end_to_end_speedup"])),
        ("mean emitted", lambda row: number(row["mean_emitted"])),
        ("acceptance", lambda row: share(row["acceptance_rate"])),
        ("equal to none", lambda row: share(row["equal_to_none"])),
    ]
    if any(row["full_batch_speedup"] is not None for row in rows):
        columns.insert(5, ("batch full", lambda row: number(row["full_batch_speedup"])))
    title = "Speed-up over none: ratio of decode tokens per second, unit by unit, then the mean"
    return _listed(title, rows, columns)


def _groups(rows: Sequence[Figures]) -> Table:
    """Speed-ups by category, with and without loops."""
    names = list(rows[0]["groups"])
    plain = rows[0]["groups"]
    counts = ("sequences", *(f"{plain[n]['sequences']} / {_kept(plain[n], 'sequences') or 0}" for n in names))
    cells = _by_category(
        [row for row in rows if row["method"] != "none"],
        names,
        lambda cell: f"{number(cell['speedup'])} / {number(_kept(cell, 'speedup'))}",
    )
    return Table(
        f"Speed-up by category: all sequences / without those whose plain text loops (> {LOOPS:g})",
        ("method", *names),
        (counts, *cells) if cells else (),
    )


def _drafts(rows: Sequence[Figures]) -> Table:
    """What a pass emits, and how often there was a guess, by category."""
    names = list(rows[0]["groups"])
    cells = _by_category(
        [row for row in rows if row["drafted"]],
        names,
        lambda cell: f"{number(cell['mean_emitted'])} / {share(cell.get('drafted_share'), 0)}",
    )
    return Table(
        "Mean emitted by category / share of the passes that checked a guess",
        ("method", *names),
        tuple(cells),
    )


def _by_category(
    rows: Sequence[Figures], names: Sequence[str], tell: Callable[[Figures], str]
) -> list[tuple[str, ...]]:
    """A line per method: its label, and what is told of each category that it took part in."""
    return [
        (label(row), *(tell(row["groups"][n]) if n in row["groups"] else "" for n in names)) for row in rows
    ]


def _shares(rows: Sequence[Figures]) -> Table:
    told = [row for row in rows if row["verb_shares"] is not None]
    return Table(
        "Where decoding spends its time",
        ("method", *VERBS),
        tuple((label(row), *(f"{row['verb_shares'][verb]:.1%}" for verb in VERBS)) for row in told),
    )


def _costs(rows: Sequence[Figures]) -> Table:
    def memory(row: Figures) -> str:
        peak = row["peak_memory_bytes"]
        return number(None if peak is None else peak / 1e6, 0)

    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("tok/s with prefill", lambda row: number(row["tokens_per_second"], 1)),
        ("prefill s", lambda row: number(row["prefill_seconds"], 3)),
        ("passes", lambda row: number(row["passes"], 0)),
        ("drafted", lambda row: number(row["drafted"], 0)),
        ("draft levels", lambda row: number(row["draft_levels"], 0)),
        ("peak memory MB", memory),
        ("looping", lambda row: share(row["looping"])),
    ]
    return _listed("Work", rows, columns)


def _depths(rows: Sequence[Figures]) -> Table:
    deep = [row for row in rows if row["acceptance_by_depth"]]
    most = min(_DEPTHS, max((len(row["acceptance_by_depth"]) for row in deep), default=0))
    return Table(
        "Acceptance by depth, the first of them: of the passes whose draft reached it",
        ("method", *(str(depth + 1) for depth in range(most))),
        tuple(
            (
                label(row),
                *(f"{a:.2f}" for a in row["acceptance_by_depth"][:most]),
                *[""] * (most - len(row["acceptance_by_depth"])),
            )
            for row in deep
        ),
    )


def _repeats(rows: Sequence[Figures]) -> Table:
    """Every cell with its rounds, so that floors can be judged."""
    out = []
    for row in rows:
        if row["method"] == "none":
            continue
        for name, cell in (("all", row), *row["groups"].items()):
            width = half_width(cell["repeat_interval"])
            out.append(
                (
                    label(row),
                    name,
                    number(cell["speedup"], 3),
                    "" if cell["repeat_interval"] is None else f"{width:.3f}",
                    number(_kept(cell, "speedup"), 3),
                    str(cell["repeats"]),
                    " ".join(f"{value:.3f}" for value in cell["repeat_speedups"]),
                )
            )
    return Table(
        "Repeats: the interval is that of measuring these very prompts again",
        ("method", "category", "speed-up", "half-width", "without loops", "rounds", "each round"),
        tuple(out),
    )


def _disturbed(rows: Sequence[Figures]) -> Table:
    told = [(label(row), row["disturbed"]) for row in rows if row.get("disturbed")]
    return Table(
        "Beside a process that takes a core: decode tokens per second over those without it",
        ("method", "median", "least"),
        tuple((name, number(cell["ratio"]), number(cell["least"])) for name, cell in told),
    )


def _keyed(rows: Sequence[Figures]) -> Table:
    """What it costs that the text of a seed is the same with any drafter."""
    free = {row["method"]: row for row in rows if not row["reproducible"]}
    pairs = [
        (free[row["method"]], row)
        for row in rows
        if row["reproducible"] and row["method"] in free and row["drafted"]
    ]
    return Table(
        "Price of reproducible text: independent samples / the same text with any drafter",
        ("method", "acceptance", "mean emitted", "speed-up", "mean emitted, ratio"),
        tuple(
            (
                one["method"],
                f"{share(one['acceptance_rate'])} / {share(other['acceptance_rate'])}",
                f"{number(one['mean_emitted'])} / {number(other['mean_emitted'])}",
                f"{number(one['speedup'])} / {number(other['speedup'])}",
                number(other["mean_emitted"] / one["mean_emitted"], 3),
            )
            for one, other in pairs
        ),
    )


def pairs(a: Report, b: Report) -> list[tuple[str, tuple[Figures | None, Figures | None]]]:
    """Label of every method -> its row in either report; None where it took no part."""
    one, other = ({label(row): row for row in report["rows"]} for report in (a, b))
    return [(name, (one.get(name), other.get(name))) for name in {**one, **other}]


def side_by_side(a: Report, b: Report) -> list[Table]:
    """Two comparable reports, method by method; speed-ups each over the plain runs of its own."""
    both = dict(pairs(a, b))

    def pair(rows: Sequence[Figures | None], key: str, digits: int = 2) -> tuple[str, str]:
        one, other = (number(None if row is None else row[key], digits) for row in rows)
        return one, other

    main = Table(
        "A and B",
        (
            "method",
            "decode tok/s A",
            "B",
            "speed-up A",
            "B",
            "95 % interval A",
            "B",
            "end to end A",
            "B",
            "mean emitted A",
            "B",
        ),
        tuple(
            (
                name,
                *pair(rows, "decode_tokens_per_second", 1),
                *pair(rows, "speedup"),
                *(interval(None if row is None else row["speedup_interval"]) for row in rows),
                *pair(rows, "end_to_end_speedup"),
                *pair(rows, "mean_emitted"),
            )
            for name, rows in both.items()
        ),
    )
    groups = list(dict.fromkeys(name for r in (a, b) for name in r["rows"][0]["groups"]))
    cells = []
    for name, rows in both.items():
        if name.split()[0] != "none":
            cells.append(
                (
                    name,
                    *(
                        " | ".join(
                            number(None if row is None else row["groups"].get(g, {}).get("speedup"))
                            for row in rows
                        )
                        for g in groups
                    ),
                )
            )
    by_group = Table("Speed-up by category: A | B", ("method", *groups), tuple(cells))
    return [table for table in (main, by_group) if table.rows]


def markdown(report: Report) -> str:
    """The report as a page: what to mind, the tables, then how to get them again."""
    lead = [heading(report), "", f"- {noise_line(report)}"]
    lead += [f"- {note}" for note in report["notes"]]
    about = {f"about {label(row)}": row["about"] for row in report["rows"]}
    return page("Benchmark", lead, tables(report), {**report["provenance"], **about})


def write(report: Report, text: str, folder: Path) -> list[Path]:
    """Write ``report.json`` and ``report.md`` to a folder, which is made if need be.

    Returns:
        The files. Each is complete or not there at all.
    """
    files = {"report.json": json.dumps(report, indent=1, allow_nan=False) + "\n", "report.md": text}
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def page(title: str, lead: Sequence[str], tables: Sequence[Table], provenance: Mapping[str, Any]) -> str:
    """A report as Markdown.

    Args:
        lead: lines above the tables.
        provenance: with ``command``, and whatever else is needed to measure it again.
    """
    lines = [f"# {title}", "", *lead]
    for table in tables:
        lines += ["", f"## {table.title}", "", _line(table.columns)]
        lines.append(_line(["---", *["---:"] * (len(table.columns) - 1)]))
        lines += [_line(row) for row in table.rows]
    lines += ["", "## Again", "", f"    {provenance['command']}", "", "| | |", "|---|---|"]
    lines += [
        _line((key, value if isinstance(value, str) else json.dumps(value)))
        for key, value in provenance.items()
        if key != "command"
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def label(row: Figures) -> str:
    """A method's name, with what sets its row apart."""
    marks = [
        mark
        for mark, holds in (
            ("peer", row["kind"] == "peer"),
            ("reproducible", row["reproducible"]),
            ("synthetic", row["synthetic"]),
            ("lossy", not row.get("lossless", True)),
        )
        if holds
    ]
    return f"{row['method']} ({', '.join(marks)})" if marks else str(row["method"])


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def interval(value: Sequence[float] | None, digits: int = 2) -> str:
    return "-" if value is None else f"[{value[0]:.{digits}f}, {value[1]:.{digits}f}]"


def _kept(cell: Figures, key: str) -> Any:
    """A figure of the sequences that do not loop; None if all of them do."""
    return None if cell["without_loops"] is None else cell["without_loops"][key]
