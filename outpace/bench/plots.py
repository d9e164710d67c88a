"""Pictures of a report: speed-ups, acceptance by depth, shares of the verbs, cost of a pass.

Colours are those of Okabe and Ito (Color Universal Design, 2008), which people tell apart whatever
their colour vision; markers differ too. Needs matplotlib, the extra ``plots``.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from outpace.bench.records import VERBS
from outpace.files import replaced

Report = Mapping[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
MARKERS = "osD^vP*X"
_VERB_COLOURS = dict(
    zip(
        VERBS,
        ("#CC79A7", "#F0E442", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#BBBBBB"),
        strict=True,
    )
)
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    # Text stays text, and equal reports give equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "outpace",
}
_LABEL = 34  # characters of a line of a label
_FEWEST = 20  # drafts of a depth whose acceptance says something
_SHOWN = 0.05  # smallest share that has room for its number
ALL = "all"


def draw(report: Report, out: Path, *, note: Callable[[str], object] | None = None) -> list[Path]:
    """Draw what a report has data for, each picture as PNG and as SVG.

    ``speedup``: decode speed-up over `none` by method and category, with 95 % intervals.
    ``acceptance``: share of drafted tokens accepted, by depth.
    ``verbs``: time shares of the five verbs, stacked.
    ``passes``: cost of a pass by rows, if the report has ``passes``.
    That is what ``outpace bench passes --json`` prints.

    Args:
        report: see `outpace.bench.report`; only the keys that a picture needs are read.
        out: a folder; it is made if need be.
        note: told in one line if there is no matplotlib; None writes to standard error.

    Returns:
        The files written, none without matplotlib.
    """
    pictures = {"speedup": _speedup, "acceptance": _acceptance, "verbs": _verbs, "passes": _passes}
    return paint({name: partial(one, report=report) for name, one in pictures.items()}, out, note=note)


def paint(
    pictures: Mapping[str, Callable[[Any], bool]], out: Path, *, note: Callable[[str], object] | None = None
) -> list[Path]:
    """Write pictures as PNG and as SVG, in one style.

    Args:
        pictures: name of the files -> draws on an empty figure; False if there is nothing to show.
        out: a folder; it is made if need be.

    Returns:
        The files written, none without matplotlib.
    """
    try:
        matplotlib, figures = map(import_module, ("matplotlib", "matplotlib.figure"))
    except ImportError:
        line = "no plots: matplotlib is not installed; try pip install 'outpace[plots]'"
        print(line, file=sys.stderr) if note is None else note(line)
        return []
    written: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        for name, picture in pictures.items():
            figure = figures.Figure(layout="constrained")
            if not picture(figure):
                continue
            out.mkdir(parents=True, exist_ok=True)
            for suffix in ("png", "svg"):
                path = out / f"{name}.{suffix}"
                plain = {"Date": None} if suffix == "svg" else {}
                with replaced(path) as fresh:
                    figure.savefig(fresh, format=suffix, dpi=160, bbox_inches="tight", metadata=plain)
                written.append(path)
    return written


def _speedup(figure: Any, report: Report) -> bool:
    """Dots with intervals: a block per category, a line per method; 1.0 is plain decoding."""
    rows = [row for row in report.get("rows", ()) if row["method"] != "none"]
    rows = [row for row in rows if row.get("speedup") is not None]
    if not rows:
        return False
    groups = list(dict.fromkeys(name for row in rows for name in row.get("groups", {})))
    blocks = [ALL, *groups]
    step = 0.8 / len(rows)
    figure.set_size_inches(8, 1.6 + len(blocks) * max(0.42, 0.17 * len(rows) + 0.1))
    axes = figure.add_subplot()
    noise = (report.get("noise_floor") or {}).get("speedup_interval")
    if noise:
        axes.axvspan(*noise, color="#000000", alpha=0.08, lw=0, label="none against none")
    axes.axvline(1.0, color="#000000", lw=1.2, ls="--", label="none = 1.0")
    for index, row in enumerate(rows):
        points = [
            (block, cell)
            for block, name in enumerate(blocks)
            if (cell := row if name == ALL else row.get("groups", {}).get(name))
            and cell.get("speedup") is not None
        ]
        x = [cell["speedup"] for _, cell in points]
        y = [block - 0.4 + (index + 0.5) * step for block, _ in points]
        reach = [cell.get("speedup_interval") or [v, v] for (_, cell), v in zip(points, x, strict=True)]
        errors = [
            [max(0.0, v - low) for v, (low, _) in zip(x, reach, strict=True)],
            [max(0.0, high - v) for v, (_, high) in zip(x, reach, strict=True)],
        ]
        colour = COLOURS[index % len(COLOURS)]
        axes.errorbar(
            x,
            y,
            xerr=errors,
            fmt=_marker(index),
            ms=6,
            lw=1.4,
            capsize=2,
            color=colour,
            mfc="white" if row.get("kind") == "peer" else colour,
            mew=1.4,
            label=_name(row),
        )
    for border in range(1, len(blocks)):
        axes.axhline(border - 0.5, color="#BBBBBB", lw=1.2 if border == 1 else 0.5)
    axes.set_yticks(range(len(blocks)), [_text(name) for name in blocks])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(blocks) - 0.5, -0.5)
    axes.margins(x=0.06)
    axes.set_xlabel(
        "decode tokens per second over none (mean of paired ratios; 95 % interval from 5 prompts on)"
    )
    axes.set_title(_about(report, "Speed-up"), loc="left")
    _legend(figure, axes, "upper" if len(blocks) > 1 else "lower")
    return True


def _acceptance(figure: Any, report: Report) -> bool:
    """A line per method over the depth of the guess."""
    rows = [
        row
        for row in report.get("rows", ())
        if any(one is not None for one in row.get("acceptance_by_depth") or ())
    ]
    if not rows:
        return False
    figure.set_size_inches(7.5, 4.6)
    axes = figure.add_subplot()
    deepest, drawn_few = 1, False
    for index, row in enumerate(rows):
        shares = [(d, s) for d, s in enumerate(row["acceptance_by_depth"], 1) if s is not None]
        deepest = max(deepest, len(row["acceptance_by_depth"]))
        colour = COLOURS[index % len(COLOURS)]
        counts = row.get("drafted_by_depth") or []
        sure = [one for one in shares if one[0] > len(counts) or counts[one[0] - 1] >= _FEWEST]
        few = shares[max(0, len(sure) - 1) :]
        look = {"marker": _marker(index), "ms": 5.5, "lw": 1.6, "color": colour, "clip_on": False}
        mfc = "white" if row.get("kind") == "peer" else colour
        axes.plot(*(zip(*sure, strict=True) if sure else ((), ())), mfc=mfc, label=_name(row), **look)
        if len(sure) < len(shares):
            drawn_few = True
            axes.plot(*zip(*few, strict=True), **look | {"marker": "", "ls": ":", "lw": 1.0})
    axes.set_xlim(0.7, deepest + 0.3)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, deepest + 1, 1 + deepest // 16))
    said = f"; dotted: fewer than {_FEWEST} drafts" if drawn_few else ""
    axes.set_xlabel(f"depth of the guess (1 follows the pending token){said}")
    axes.set_ylabel("accepted share of drafts that deep")
    axes.set_title(_about(report, "Acceptance by depth"), loc="left")
    _legend(figure, axes)
    return True


def _verbs(figure: Any, report: Report) -> bool:
    """A bar per method, cut into the verbs."""
    rows = [row for row in report.get("rows", ()) if row.get("verb_shares")]
    if not rows:
        return False
    figure.set_size_inches(9, 1.7 + 0.5 * len(rows))
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for verb in VERBS:
        shares = [max(0.0, row["verb_shares"].get(verb) or 0.0) for row in rows]
        axes.barh(
            range(len(rows)),
            shares,
            0.66,
            left,
            color=_VERB_COLOURS[verb],
            label=verb,
            edgecolor="white",
            lw=0.8,
        )
        dark = verb in ("score_pass", "judge", "commit")
        for at, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= _SHOWN:
                axes.text(
                    start + share / 2,
                    at,
                    f"{100 * share:.0f}",
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                    size=9,
                )
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_xlabel("% of the time of decoding")
    axes.set_title(_about(report, "Where the time goes"), loc="left")
    _legend(figure, axes)
    return True


def _passes(figure: Any, report: Report) -> bool:
    """Cost of a pass by rows, a line per context length, over the floor of reading the weights."""
    cost = report.get("passes")
    if not isinstance(cost, Mapping) or not cost.get("rows") or not cost.get("pass_seconds"):
        return False
    figure.set_size_inches(7.5, 4.6)
    axes = figure.add_subplot()
    for index, (context, seconds) in enumerate(zip(cost["contexts"], cost["pass_seconds"], strict=True)):
        axes.plot(
            cost["rows"],
            [1e3 * one for one in seconds],
            marker=_marker(index),
            ms=5.5,
            lw=1.6,
            color=COLOURS[index % len(COLOURS)],
            label=f"context {context}",
        )
        if cost.get("roofline"):
            guess = cost["roofline"]["fitted"]["pass_seconds"][index]
            axes.plot(
                cost["rows"],
                [1e3 * one for one in guess],
                ls=":",
                lw=1.2,
                color=COLOURS[index % len(COLOURS)],
                label=None if index else "fitted roofline",
            )
    if cost.get("floor_seconds"):
        axes.axhline(
            1e3 * cost["floor_seconds"], color="#000000", lw=1.2, ls="--", label="floor: reading the weights"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(cost["rows"], [str(count) for count in cost["rows"]])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a pass")
    axes.set_ylabel("milliseconds")
    axes.set_title(_about(report, "Cost of a pass"), loc="left")
    _legend(figure, axes)
    return True


def budgets(figure: Any, profile: Report) -> bool:
    """Expected speed-up by how deep drafts may go, a line per drafter; hollow: as measured.

    Args:
        figure: an empty one.
        profile: what ``outpace tune`` learned, as plain data.
    """
    rows = [row for row in profile["drafters"] if row["expected_D"]]
    if not rows:
        return False
    figure.set_size_inches(7.5, 5)
    axes = figure.add_subplot()
    axes.axhline(1.0, color="#000000", lw=1.2, ls="--", label="none = 1.0")
    for index, row in enumerate(rows):
        colour, speedups = COLOURS[index % len(COLOURS)], row["expected_D"]
        depths = range(1, len(speedups) + 1)
        axes.plot(
            depths, speedups, lw=1.6, color=colour, marker=_marker(index), ms=4, label=_text(row["spec"])
        )
        axes.plot(
            depths[-1:],
            [row["speedup"]],
            ls="",
            color=colour,
            marker=_marker(index),
            ms=9,
            mfc="white",
            mew=1.4,
        )
    deepest = max(len(row["expected_D"]) for row in rows)
    axes.set_xticks(range(1, deepest + 1, 1 + deepest // 16))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("longest draft: levels, which are tokens of a chain (hollow: as measured)")
    axes.set_ylabel("expected speed-up of decoding")
    axes.set_title(_about({"provenance": profile}, "Speed-up by draft budget"), loc="left")
    _legend(figure, axes)
    return True


def load(figure: Any, report: Report) -> bool:
    """Tokens per second, and time to the first one, by load; a line per drafter.

    Args:
        figure: an empty one.
    """
    key = "rate" if any(row["rate"] is not None for row in report["loads"]) else "concurrency"
    rows = [row for row in report["loads"] if row["new_tokens"]]
    if not rows:
        return False
    figure.set_size_inches(9.5, 4.6)
    left, right = figure.subplots(1, 2)
    at = sorted({row[key] for row in rows})
    for index, name in enumerate(dict.fromkeys(row["drafter"] for row in rows)):
        mine = [row for row in rows if row["drafter"] == name]
        look = {"color": COLOURS[index % len(COLOURS)], "marker": _marker(index), "ms": 5.5}
        places = [at.index(row[key]) for row in mine]
        left.plot(places, [row["tokens_per_second"] for row in mine], lw=1.6, label=_text(name), **look)
        for part, style in (("p50", "-"), ("p95", ":")):
            delays = [1e3 * row[f"first_token_seconds_{part}"] for row in mine]
            right.plot(places, delays, lw=1.6, ls=style, **look)
    for axes, what in ((left, "tokens per second"), (right, "ms to first token: p50, dotted p95")):
        axes.set_xticks(range(len(at)), [f"{value:g}" for value in at])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("clients" if key == "concurrency" else "requests per second")
        axes.set_ylabel(what)
    left.set_title(_about(report, "Load"), loc="left")
    _legend(figure, left)
    return True


def _legend(figure: Any, axes: Any, side: str = "lower") -> None:
    """Outside of the axes, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    widest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), int(12 * figure.get_figwidth() / (widest + 7))))
    figure.legend(handles, labels, loc=f"outside {side} center", ncols=columns)


def _about(report: Report, what: str) -> str:
    """Title: what is shown, and of which model, how it was run."""
    p = report.get("provenance") or report.get("passes") or {}
    threads, count = p.get("threads"), p.get("prompts")
    told = p["config"] if isinstance(p.get("config"), Mapping) else p
    parts = [
        str(part)
        for part in (
            p.get("model"),
            p.get("dtype"),
            p.get("gpu"),
            threads and f"{threads} thread{'s' if threads != 1 else ''}",
            count and f"n = {count} prompts of {told.get('workload', 'a workload')}",
            told.get("temperature") is not None and f"temperature {told['temperature']:g}",
        )
        if part
    ]
    return _text(f"{what}: {', '.join(parts)}" if parts else what, 80)


def _name(row: Mapping[str, Any]) -> str:
    """A method as a label; what must be known about it stands beside it."""
    extra = [word for word in ("reproducible", "synthetic") if row.get(word)]
    extra += ["lossy"] * (not row.get("lossless", True)) + ["peer"] * (row.get("kind") == "peer")
    return _text(f"{row['method']} ({', '.join(extra)})" if extra else row["method"])


def _text(text: str, width: int = _LABEL) -> str:
    """Break long lines, paths at their slashes, and let a dollar sign be one."""
    lines = textwrap.wrap(text.replace("/", "/ "), width)
    return "\n".join(line.replace("/ ", "/") for line in lines).replace("$", r"\$")


def _marker(index: int) -> str:
    """Another marker for every method, and for the same colour when colours come again."""
    return MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
