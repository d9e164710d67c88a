"""``outpace analyze cascade``: which K, and what it should gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import AS_JSON, TrainedOptions, WorkloadOptions, option, writes_folder
from outpace.errors import RequestError

EXAMPLES = """
Examples:

  outpace analyze cascade --levels "draft_model[model=M]+max_gram" --measure

  outpace analyze cascade -m ./big -l "draft_model[model=./mid]+draft_model[model=./small]+suffix"

  outpace analyze cascade -l draft_model+max_gram --k 5,10/10 --k 3/4 --measure --out report

  outpace analyze cascade -l draft_model+max_gram --cost 1=0.15 --lenience 3 --measure

  outpace analyze cascade --theory --alpha 0.6,0.3 --cost 0.1,0.01
"""
_PLACES = 5


def plan(
    context: typer.Context,
    *,
    model: TrainedOptions,
    texts: WorkloadOptions,
    levels: str | None = option(
        None,
        "Drafters, strongest first, joined by +: draft_model[model=M]+max_gram.",
        "-l",
        metavar="SPECS",
        shown="needed, but for --theory",
    ),
    k: list[str] | None = option(
        None,
        "Another K to predict, such as 5,10/10; may be given several times.",
        metavar="K",
        shown="the best ones",
    ),
    measure: bool = option(
        False, "Run every configuration beside plain decoding, on prompts that it was not fitted on."
    ),
    lenience: float | None = option(
        None, "How lenient inner levels are; 1 is strict.", metavar="L", shown="the best of a few"
    ),
    cost: list[str] | None = option(
        None,
        "Price a model by hand: LEVEL=SHARE of a pass of the target, as in draft=0.15 or 2=0.03. With "
        "--theory, the cost of every level: 0.1,0.01.",
        metavar="COST",
        shown="measured",
    ),
    theory: bool = option(False, "Closed form without a model, from --alpha and --cost."),
    alpha: str | None = option(
        None, "Acceptance of every level by its reviewer, for --theory: 0.6,0.3.", metavar="SHARES"
    ),
    max_new_tokens: int = option(64, "Tokens per answer.", least=8),
    temperature: float = option(0.0, "Of all distributions.", "-t", metavar="T"),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write METHOD.json into this folder.", "-o"),
) -> None:
    """Measure how far every level's guesses are kept, and name the K that should gain most.

    Times passes of all models here, so let nothing else run.
    """
    method = str(context.info_name)
    planner = registry.load("planner", method)
    if theory:
        show_theory(planner, alpha, cost or [], as_json)
        return
    if levels is None:
        raise RequestError("--levels is needed; only --theory does without")
    from outpace.drafters.parts import split_parts

    parts = split_parts(levels, f"drafter {method!r}")
    costs = dict(_cost(text, [part.name for part in parts]) for text in cost or ())
    wanted = [f"{method}[levels={levels} k={text}]" for text in k or ()]
    prompts = texts.read()
    leniences = planner.LENIENCES if lenience is None else (lenience,)
    for spec in (*(f"{method}[levels={levels} lenience={one:g}]" for one in leniences), *wanted):
        planner.check_levels(spec)
    engine = model.load(drafter="none")
    for spec in wanted:
        engine.method(spec)
    ids = texts.pick(engine, prompts, max_new_tokens)
    # Every other prompt is kept for judging; a single one has to do for both.
    fitted, held_out = (ids[::2], ids[1::2]) if measure and len(ids) > 1 else (ids, ids)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    with show.progress(len(fitted) * len(leniences), "prompts") as tick:
        found = planner.measure(engine, levels, fitted, **settings, lenience=leniences[0], tick=tick)
        more = [
            planner.measure(engine, levels, fitted, **settings, lenience=one, base=found, tick=tick)
            for one in leniences[1:]
        ]
    tried = [one.priced(costs) if costs else one for one in (found, *more)]
    found = tried[0]
    rows = [
        *_best_rows(planner, tried),
        *(_given_row(planner, tried, planner.read_k(text)) for text in k or ()),
    ]
    specs = [planner.spec_of(levels, planner.read_k(row["k"]), row["lenience"]) for row in rows]
    if measure:
        once = list(dict.fromkeys(specs))
        with show.progress(len(held_out), "prompts") as tick:
            gains = planner.speedup(engine, once, held_out, **settings, tick=tick)
        shares = [seconds(1.0) for seconds in found.ladder.seconds[1:]] if costs else None
        _add_measured(rows, [gains[once.index(spec)] for spec in specs], shares)
    best = max(range(len(rows)), key=lambda i: rows[i]["predicted"])
    report = {
        **planner.as_json(found),
        "workload": texts.workload,
        "prompts": len(ids),
        "held_out": len(held_out) if measure else 0,
        **settings,
        "leniences": list(leniences),
        "costs": {str(parts[level - 1]): share for level, share in costs.items()},
        "configurations": rows,
        "best": specs[best],
        "undecided": _undecided(rows, rows[best]),
    }
    show.finish(report, as_json, lambda: show_report(method, found, report, measure), out, method)


def _best_rows(planner: Any, tried: Sequence[Any]) -> list[dict[str, Any]]:
    """The best K of every arrangement, with the lenience that promises most.

    Args:
        tried: what was found with each lenience, the strict one first.
    """
    rows = []
    promised = [one.predicted() for one in tried]
    for kind in promised[0]:
        # Where no inner level reviews, the strict probe alone saw what will be drafted.
        usable = [i for i in range(len(tried)) if i == 0 or not _strict(promised[i][kind][0])]
        at = max(usable, key=lambda i: (promised[i][kind][1].speedup, -i))
        rows.append(_row(planner, kind, tried[at], *promised[at][kind]))
    return rows


def _given_row(planner: Any, tried: Sequence[Any], k: list[list[int]]) -> dict[str, Any]:
    """A K that the user asks for, with the lenience that promises most."""
    fit = tried[:1] if _strict(k) else tried
    one = max(fit, key=lambda one: one.predict(k).speedup)
    return _row(planner, "given", one, k, one.predict(k))


def _add_measured(rows: list[dict[str, Any]], gains: Sequence[Any], shares: list[float] | None) -> None:
    """Add to every configuration what it brought.

    Args:
        shares: the cost of every level where the user prices some; None: as it was timed.
    """
    for row, real in zip(rows, gains, strict=True):
        row["measured"] = real.speedup if shares is None else real.standard(shares)
        row["measured_emitted"], row["measured_seconds"] = real.emitted, real.seconds
        row["error"] = row["predicted"] / row["measured"] - 1


def _undecided(rows: list[dict[str, Any]], best: dict[str, Any]) -> list[str]:
    """Configurations that are as good as the best one, within the errors."""
    least = best["predicted"] * (1 - (best["spread"] or 0))
    return [
        row["kind"]
        for row in rows
        if row is not best and row["predicted"] * (1 + (row["spread"] or 0)) > least
    ]


def _strict(k: list[list[int]]) -> bool:
    """Whether no inner level reviews anything, so that lenience has no meaning."""
    return not any(any(row) for row in k[1:])


def _row(planner: Any, kind: str, found: Any, k: list[list[int]], promise: Any) -> dict[str, Any]:
    """One configuration of the report."""
    return {
        "kind": kind,
        "k": planner.text_of(k),
        "lenience": 1.0 if _strict(k) else found.lenience,
        "spread": found.spread(k),
        **_numbers(promise),
    }


def _cost(text: str, parts: Sequence[str]) -> tuple[int, float]:
    """Level, from 1, and its cost."""
    name, _, share = text.partition("=")
    names = {"draft": 1, **{str(i): i for i in range(1, len(parts) + 1)}}
    names |= {part: i for i, part in reversed(list(enumerate(parts, 1)))}
    try:
        value = float(share)
    except ValueError:
        value = -1.0
    if name not in names or not 0 <= value < float("inf"):
        raise RequestError(
            f"--cost is LEVEL=SHARE with a level of {', '.join(names)} and a share from 0, got {text!r:.80}"
        )
    return names[name], value


def _shares(text: str | None, what: str) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",")]
    except ValueError:
        given = f"must be numbers such as 0.6,0.3, got {text!r:.80}" if text else "is needed, such as 0.6,0.3"
        raise RequestError(f"{what} {given}") from None


def show_theory(planner: Any, alpha: str | None, cost: list[str], as_json: bool) -> None:
    """The best of every arrangement of one or two levels, in closed form."""
    accepted, costs = _shares(alpha, "--alpha"), _shares(",".join(cost), "--cost")
    try:
        rows = planner.closed(accepted, costs)
        limit = planner.break_even(accepted, costs) if len(accepted) == 2 else None
    except ValueError as error:
        raise RequestError(str(error)) from error
    if as_json:
        show.write_json({"rows": [asdict(row) for row in rows], "break_even": limit})
        return
    show.table(
        ("arrangement", "k", "emitted", "speed-up"),
        [(row.kind, row.k, f"{row.emitted:.2f}", f"{row.speedup:.2f}") for row in rows],
        numbers=("emitted", "speed-up"),
    )
    show.write("\nk counts steps of level 1. The lower level's acceptance is the same for both reviewers.\n")
    if limit is not None:
        show.write(f"Level 1 pays up to a cost of {limit:.3f} passes of the target.\n")


def _numbers(promise: Any) -> dict[str, Any]:
    return {
        "predicted": promise.speedup,
        "emitted": promise.emitted,
        "seconds": promise.seconds / promise.emitted,
        "steps": list(promise.steps),
    }


def show_report(method: str, found: Any, report: dict[str, Any], measured: bool) -> None:
    show.write(
        f"{found.names[0]}, levels {found.levels}, temperature {report['temperature']:g}, "
        f"{show.count(report['prompts'], 'text')}\n\n"
    )
    show.write("Share of guesses kept, by place in the level's part of a draft\n")
    places = tuple(str(place) for place in range(1, _PLACES + 1))
    table = []
    for one in report["acceptance"]:
        kept = [1.0, *one["kept"]]
        shares = [f"{now / before:.2f}" if before else "" for before, now in pairwise(kept)][:_PLACES]
        table.append(
            (one["level"], one["reviewer"], str(one["drafts"]), *shares, *[""] * (_PLACES - len(shares)))
        )
    show.table(("level", "for", "drafts", *places), table, numbers=("drafts", *places))
    show.write("\nMilliseconds of a step, by rows\n")
    counts = ("1", "4", "8", "16")
    show.table(
        ("model", *counts),
        [(one["model"], *(f"{one[n]:.2f}" for n in counts)) for one in report["milliseconds"]],
        numbers=counts,
    )
    held_out = f", measured on {show.count(report['held_out'], 'other text')}" if measured else ""
    prices = " and ".join(f"{level} at {share:g}" for level, share in report["costs"].items())
    priced = f", with {prices} of a pass of the target" if prices else ""
    show.write(f"\nSpeed-up over plain decoding{priced}{held_out}\n")
    names = {"emitted": "emitted"}
    if measured:
        names["really emitted"] = "measured_emitted"
    if not report["costs"]:
        names["ms a token"] = "seconds"
        if measured:
            names["really ms"] = "measured_seconds"
    names |= {"predicted": "predicted", "+-": "spread"}
    if measured:
        names |= {"measured": "measured", "error": "error"}
    show.table(
        (method, "k", "lenience", *names),
        [
            (
                row["kind"],
                row["k"],
                f"{row['lenience']:g}",
                *(_figure(name, row[name]) for name in names.values()),
            )
            for row in report["configurations"]
        ],
        numbers=("lenience", *names),
    )
    show.write(f"\nbest: {report['best']}\n")
    if report["undecided"]:
        show.write(
            f"Within the errors (+-) as good: {', '.join(report['undecided'])}. "
            "More texts (--limit) make the errors smaller.\n"
        )


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "?"
    if name == "spread":
        return f"{value:.0%}"
    if name.endswith("seconds"):
        return f"{1e3 * value:.2f}"
    return f"{value:+.0%}" if name == "error" else f"{value:.2f}"
