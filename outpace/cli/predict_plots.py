"""Pictures of a prediction: the roofline with its operators, time by rows, speed-up by length of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outpace.analysis.prediction.calibration import FREE
from outpace.bench.plots import COLOURS, MARKERS
from outpace.cli.predict import speeds

Report = Mapping[str, Any]
_NAMED = 0.03
"""Least share of a pass of an operator that is named in the picture."""


def roofline(figure: Any, report: Report) -> bool:
    """Operators of reading and decoding below what the device allows, by FLOPs per byte."""
    record, dtype = report["device"]["record"], report["dtype"]
    peak, bandwidth = record["peak"][dtype], record["bandwidth"]
    figure.set_size_inches(8, 5)
    axes = figure.add_subplot()
    phases = {"decode": report["decode"], "prefill": report["prefill"]}
    found = [
        (one["flops"] / one["bytes"], one["flops"] / one["seconds"])
        for phase in phases.values()
        for one in phase["operators"]
        if one["flops"] and one["bytes"]
    ]
    at = [x for x, _ in found]
    if max(peak, bandwidth) < FREE:  # else the roof has no ridge
        at.append(peak / bandwidth)
    low, high = min(at) / 2, max(at) * 2
    x = np.geomspace(low, high, 200)
    together = "product" in record["overlaps"]
    roof = np.minimum(x * bandwidth, peak) if together else 1 / (1 / peak + 1 / (x * bandwidth))
    axes.plot(x, roof / 1e9, color="#000000", lw=1.4, label=speeds(peak, bandwidth))
    labelled: list[tuple[str, tuple[float, float], int]] = []
    for index, (name, phase) in enumerate(phases.items()):
        shown = [one for one in phase["operators"] if one["flops"] and one["bytes"]]
        at = [(one["flops"] / one["bytes"], one["flops"] / one["seconds"] / 1e9) for one in shown]
        shares = [one["seconds"] / phase["seconds"] for one in shown]
        axes.scatter(
            [x for x, _ in at],
            [y for _, y in at],
            s=[20 + 500 * share for share in shares],
            color=COLOURS[index],
            marker=MARKERS[index],
            alpha=0.75,
            label=f"{name}: area is its share of the time",
        )
        named = [
            (one["operator"], spot) for one, spot, s in zip(shown, at, shares, strict=True) if s >= _NAMED
        ]
        labelled += [(names, spot, index) for names, spot in _together(named)]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.06, y=0.2)
    axes.set_xlabel("FLOPs per byte moved")
    axes.set_ylabel("GFLOP per second")
    axes.set_title(_title(report, "Roofline"), loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, markerscale=0.6)
    figure.draw_without_rendering()  # now the spots have places
    _label(figure, axes, labelled)
    return True


def _label(figure: Any, axes: Any, labelled: Sequence[tuple[str, tuple[float, float], int]]) -> None:
    """Write names beside their spots: of decoding to the right, of prefill to the left, none over another."""
    placed: list[Any] = []
    for names, spot, index in sorted(labelled, key=lambda one: -one[1][1]):
        x, y, side = (-12, -24, "right") if index else (12, -16, "left")
        text = axes.annotate(
            names,
            spot,
            (x, y),
            textcoords="offset points",
            fontsize=8,
            va="top",
            ha=side,
            color=COLOURS[index],
        )
        for _ in range(len(labelled)):
            box = text.get_window_extent()
            over = [one for one in placed if one.overlaps(box)]
            if not over:
                break
            y -= 72 * (box.y1 - min(one.y0 for one in over)) / figure.dpi + 2
            text.set_position((x, y))
        placed.append(box)


def _together(named: Sequence[tuple[str, tuple[float, float]]]) -> list[tuple[str, tuple[float, float]]]:
    """Labels of neighbours as one, a line each."""
    found: list[tuple[list[str], tuple[float, float]]] = []
    for name, (x, y) in named:
        for names, (left, low) in found:
            if abs(np.log(x / left)) < 0.6 and abs(np.log(y / low)) < 0.3:
                names.append(name)
                break
        else:
            found.append(([name], (x, y)))
    return [("\n".join(names), spot) for names, spot in found]


def by_rows(figure: Any, report: Report) -> bool:
    """Time of a pass against the rows that it verifies, a line per batch."""
    rows = report["verify"]["rows"]
    figure.set_size_inches(7.5, 4.6)
    axes = figure.add_subplot()
    for index, one in enumerate(report["batches"]):
        axes.plot(
            rows,
            [1e3 * spent for spent in one["pass_seconds"]],
            marker=MARKERS[index],
            color=COLOURS[index],
            lw=1.6,
            ms=5.5,
            label=f"batch {one['batch']}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.minorticks_off()
    # Powers of ten alone would leave an axis of one decade with a single number.
    axes.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"rows of every sequence, {report['verify']['context']} tokens of context")
    axes.set_ylabel("milliseconds of a pass")
    axes.set_title(_title(report, "Cost of a pass"), loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return True


def speedup(figure: Any, report: Report) -> bool:
    """Speed-up by the guesses of a chain; the best tree is a point."""
    drafter = report["drafter"]
    if drafter is None:
        return False
    figure.set_size_inches(7.5, 4.6)
    axes = figure.add_subplot()
    chains = drafter["chains"]
    axes.axhline(1.0, color="#000000", lw=1.2, ls="--", label="plain = 1.0")
    axes.plot(
        [one["guesses"] for one in chains],
        [one["speedup"] for one in chains],
        marker="o",
        color=COLOURS[0],
        label="chain",
    )
    for index, (key, name) in enumerate((("best_tree", "best tree"), ("tree", "tree asked for")), start=1):
        one = drafter[key]
        if one is not None and one["guesses"]:
            axes.plot(
                [one["guesses"]],
                [one["speedup"]],
                ls="",
                ms=9,
                marker=MARKERS[index],
                color=COLOURS[index],
                label=f"{name}: {one['guesses']} guesses, {one['levels']} levels",
            )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("guesses of a step")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title(_title(report, "Predicted speed-up"), loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return True


def _title(report: Report, what: str) -> str:
    return f"{what}: {report['model']}, {report['form']},\n{report['device']['name']} (prediction)"
