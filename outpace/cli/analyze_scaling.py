"""``outpace analyze scaling``: the loss of sizes and token counts that were not trained, and which pays."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import show
from outpace.cli.options import AS_JSON, numbers, option, writes_folder
from outpace.cli.predict import machine_of
from outpace.errors import RequestError

if TYPE_CHECKING:
    from outpace.analysis.scaling import Fitted

_plan = partial(option, panel="Planner")
_NUMBERS = (("floor", "E"), ("by_weights", "A"), ("by_tokens", "B"), ("power", "2h"), ("a", "a"), ("b", "b"))

EXAMPLES = """
Examples:

  outpace analyze scaling runs.csv --at 411e6,32e9 --out report

  outpace analyze scaling drafters.json --plan smollm2-135m --device cpu-here --tokens 1e6,1e7,1e8
"""


def scaling(
    points: Annotated[
        Path,
        typer.Argument(
            metavar="POINTS", help="CSV or JSON with weights, tokens and loss of models that were trained."
        ),
    ],
    *,
    at: list[str] | None = option(
        None, "Predict the loss of so many weights and tokens. Repeatable.", metavar="N,D", shown="nothing"
    ),
    samples: int = option(400, "Bootstrap samples for the intervals.", least=20),
    target: str | None = _plan(
        None,
        "Plan a drafter for this model; points then have acceptance and shape.",
        "--plan",
        metavar="M",
        shown="no plan",
    ),
    device: str = _plan("cpu-here", "Where it shall run, as for outpace predict.", metavar="D"),
    tokens: str | None = _plan(
        None, "Tokens to plan with.", metavar="N,N,...", shown="of the points, and 10 and 100 times the most"
    ),
    context: int = _plan(512, "Tokens in the cache.", least=0),
    batch: int = _plan(1, "Sequences.", least=1),
    threads: int | None = option(None, "CPU threads of cpu-here.", shown="all cores", least=1),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write scaling.json and a plot into this folder.", "-o"),
) -> None:
    """Fit the over-training scaling law to models that were trained, and say how sure it is.

    Loss = E + A / weights^2h + B / tokens^2h. Every point is predicted once by a law fitted without it.
    """
    from outpace.analysis import scaling as laws

    asked = [_pair(text) for text in at or ()]
    counts = None
    if tokens:
        what, example = "numbers above 0", "1e6,1e7"
        counts = [*numbers("--tokens", tokens, what, example, float, lambda one: 0 < one < 1e18)]
    known = laws.read_points(points)
    found = laws.fitted(known, samples)
    report = report_of(found, asked)
    if target is not None:
        settings = {"context": context, "batch": batch}
        report["plan"] = _planned(found, target, device, counts, threads, settings)
    pictures = {"scaling": partial(_picture, found=found, report=report)}
    show.finish(report, as_json, lambda: show_report(report), out, "scaling", pictures)


def _pair(text: str) -> tuple[float, float]:
    try:
        weights, tokens = (float(part) for part in text.split(","))
        if weights > 0 and tokens > 0:
            return weights, tokens
    except ValueError:
        pass
    raise RequestError(f"--at {text!r:.80} is no pair of weights and tokens; give for example 411e6,32e9")


def report_of(found: Fitted, asked: list[tuple[float, float]]) -> dict[str, Any]:
    """The fit as plain data; docs/json.md says what the keys mean."""
    numbers = found.law.to_json()
    return {
        "law": {
            name: {"value": value, "interval": list(found.number_interval(name))}
            for name, value in numbers.items()
        },
        "left_out_error": found.error,
        "points": [
            {
                "weights": p.weights,
                "tokens": p.tokens,
                "tokens_per_weight": p.per_weight,
                "train_flops": p.flops,
                "loss": p.loss,
                "fitted_loss": found.law.loss(p.weights, p.tokens),
                "left_out_loss": other,
            }
            for p, other in zip(found.points, found.left_out, strict=True)
        ],
        "predictions": [
            {
                "weights": weights,
                "tokens": tokens,
                "loss": found.law.loss(weights, tokens),
                "interval": list(found.loss_interval(weights, tokens)),
            }
            for weights, tokens in asked
        ],
        "plan": None,
    }


def _planned(
    found: Fitted,
    target: str,
    device: str,
    counts: list[float] | None,
    threads: int | None,
    settings: dict[str, int],
) -> dict[str, Any]:
    from outpace.analysis.planner import Candidate, plan, shapes
    from outpace.analysis.prediction.model import CPU, ROUNDED, shaped
    from outpace.analysis.scaling import bridge

    sizes = shapes(found.points)
    if not sizes:
        raise RequestError(
            "no point has the shape of its drafter, which --plan needs to know what a level costs"
        )
    across = bridge(found.points)
    shape, machine, kind, host = machine_of(target, device, threads)
    rounded = ROUNDED if kind == CPU else None
    candidates = [
        Candidate(weights=weights, shape=shaped(f"{weights:g} weights", one, kind=kind, quantize=rounded))
        for weights, one in sizes.items()
    ]
    seen = sorted({point.tokens for point in found.points})
    planned = counts or [*seen, 10 * seen[-1], 100 * seen[-1]]
    choices = plan(found, across, candidates, planned, shape, machine, **settings, host=host)
    return {
        "model": shape.name,
        "device": machine.name,
        **settings,
        "bridge": asdict(across),
        "choices": [asdict(one) for one in choices],
    }


def show_report(report: dict[str, Any]) -> None:
    """Print for people."""
    law = report["law"]
    show.write(
        "loss = E + A / weights^2h + B / tokens^2h = E + (a M^h + b / M^h) / C^h, M tokens per weight\n"
    )
    show.table(
        ("number", "value", "95 % of the bootstrap"),
        [
            (sign, f"{law[name]['value']:.4g}", "{:.4g} to {:.4g}".format(*law[name]["interval"]))
            for name, sign in _NUMBERS
        ],
        numbers=("value",),
    )
    columns = {
        "weights": "{0[weights]:.3g}",
        "tokens": "{0[tokens]:.3g}",
        "tokens per weight": "{0[tokens_per_weight]:.3g}",
        "loss": "{0[loss]:.3f}",
        "fitted": "{0[fitted_loss]:.3f}",
        "left out": "{0[left_out_loss]:.3f}",
        "off by": "{1:+.1%}",
    }
    show.listed([(p, p["left_out_loss"] / p["loss"] - 1) for p in report["points"]], columns)
    show.write(f"points left out are off by {report['left_out_error']:.1%} on average\n")
    for one in report["predictions"]:
        low, high = one["interval"]
        show.write(
            f"{one['weights']:.3g} weights, {one['tokens']:.3g} tokens: loss {one['loss']:.3f} "
            f"({low:.3f} to {high:.3f})\n"
        )
    if report["plan"] is not None:
        _show_plan(report["plan"])


def _show_plan(plan: dict[str, Any]) -> None:
    bridge = plan["bridge"]
    show.write(
        f"\ndrafters for {plan['model']} on {plan['device']}, context {plan['context']}, batch "
        f"{plan['batch']}; acceptance = 1 - {bridge['k']:.3f} loss^{bridge['v']:.3f}\n"
    )
    columns = {
        "weights": "{0[weights]:.3g}",
        "tokens": "{0[tokens]:.3g}",
        "loss": "{0[loss]:.2f} ({0[loss_interval][0]:.2f} to {0[loss_interval][1]:.2f})",
        "acceptance": "{0[acceptance][0]:.2f}",
        "cost of a level": "{0[cost]:.3f}",
        "guesses": "{0[guesses]}",
        "emitted": "{0[emitted]:.2f}",
        "speed-up": "{0[speedup]:.2f} ({0[speedup_interval][0]:.2f} to {0[speedup_interval][1]:.2f})",
    }
    show.listed([(one,) for one in plan["choices"]], columns)
    best = plan["choices"][0]
    show.write(
        f"most: {best['weights']:.3g} weights on {best['tokens']:.3g} tokens, {best['speedup']:.2f} x "
        f"with chains of {best['guesses']}\n"
        if best["guesses"]
        else "no size gains here\n"
    )


def _picture(figure: Any, found: Fitted, report: dict[str, Any]) -> bool:
    """Loss against tokens, a line per size with the interval of the bootstrap; and the plan."""
    import numpy as np

    from outpace.bench.plots import COLOURS, MARKERS

    plan = report["plan"]
    figure.set_size_inches(11 if plan else 7.5, 4.8)
    left, *right = np.atleast_1d(figure.subplots(1, 2 if plan else 1))
    sizes = sorted({p.weights for p in found.points})
    seen = [p.tokens for p in found.points] + [one["tokens"] for one in report["predictions"]]
    tokens = np.geomspace(min(seen) / 1.5, max(seen) * 4, 40)
    for index, weights in enumerate(sizes):
        colour = COLOURS[index % len(COLOURS)]
        mine = [p for p in found.points if p.weights == weights]
        left.plot(tokens, [found.law.loss(weights, d) for d in tokens], color=colour, lw=1.4)
        bands = [found.loss_interval(weights, d) for d in tokens]
        left.fill_between(
            tokens, [a for a, _ in bands], [b for _, b in bands], color=colour, alpha=0.15, lw=0
        )
        left.plot(
            [p.tokens for p in mine],
            [p.loss for p in mine],
            ls="",
            marker=MARKERS[index % len(MARKERS)],
            color=colour,
            label=f"{weights:.3g} weights",
        )
    for one in report["predictions"]:
        low, high = one["interval"]
        reach = [[one["loss"] - low], [high - one["loss"]]]
        left.errorbar(
            [one["tokens"]],
            [one["loss"]],
            reach,
            fmt="*",
            ms=11,
            color="#000000",
            capsize=3,
            label=f"{one['weights']:.3g} weights, predicted",
        )
    left.set_xscale("log")
    left.set_xlabel("tokens of training")
    left.set_ylabel("loss (bands: 95 % of the bootstrap)")
    left.set_title(
        f"Left out, points are off by {report['left_out_error']:.1%}", loc="left", fontsize="medium"
    )
    for axes in right:
        _speedups(axes, plan)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return True


def _speedups(axes: Any, plan: dict[str, Any]) -> None:
    from outpace.bench.plots import COLOURS, MARKERS

    sizes = sorted({one["weights"] for one in plan["choices"]})
    for index, weights in enumerate(sizes):
        mine = sorted((c for c in plan["choices"] if c["weights"] == weights), key=lambda c: c["tokens"])
        bands = [one["speedup_interval"] for one in mine]
        reach = [
            [max(0.0, one["speedup"] - low) for one, (low, _) in zip(mine, bands, strict=True)],
            [max(0.0, high - one["speedup"]) for one, (_, high) in zip(mine, bands, strict=True)],
        ]
        axes.errorbar(
            [one["tokens"] for one in mine],
            [one["speedup"] for one in mine],
            reach,
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            capsize=2,
        )
    axes.axhline(1.0, color="#000000", lw=1.2, ls="--")
    axes.set_xscale("log")
    axes.set_xlabel("tokens of training")
    axes.set_ylabel("speed-up of the best chain (prediction)")
    axes.set_title(f"{plan['model']}, {plan['device']}", loc="left", fontsize="medium")
