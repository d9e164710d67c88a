"""``outpace analyze``: what p and q of a model and a drafter allow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outpace import registry
from outpace.cli import (
    analyze_cascade,
    analyze_policy,
    analyze_scaling,
    analyze_tokenizers,
    analyze_tree,
    show,
)
from outpace.cli.drafting import known
from outpace.cli.options import (
    AS_JSON,
    UNDRAFTED,
    TrainedOptions,
    WorkloadOptions,
    add,
    at_least,
    epilog,
    option,
    writes_folder,
)

if TYPE_CHECKING:
    from outpace.analysis.acceptance import Acceptance

_NAMES = {
    "chosen": "q's best",
    "iid": "with replacement",
    "distinct": "without replacement",
    "greedy_plus_one": "greedy and one",
    "hub": "one and the hub",
    "coupled": "coupled",
}

_EXAMPLES = """
Examples:

  outpace analyze acceptance --drafter "draft_model[model=smollm2-135m layers=15]"

  outpace analyze tree "Name three colours." --steps 3
"""
_ACCEPTANCE = """
Examples:

  outpace analyze acceptance --drafter "draft_model[model=smollm2-135m layers=15]" --limit 4

  outpace analyze acceptance -m ./big -d "draft_model[model=./small]" -t 0.7 --out report
"""


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        name="analyze",
        help="Look into a model and a drafter: what could be accepted, and what is.",
        epilog=epilog(_EXAMPLES),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    add(group, acceptance, _ACCEPTANCE)
    add(group, analyze_tree.tree, analyze_tree.TREE)
    add(group, analyze_tree.shape, analyze_tree.SHAPE)
    for entry in registry.entries("planner"):  # such as that of cascades
        add(group, analyze_cascade.plan, analyze_cascade.EXAMPLES, entry.name)
    add(group, analyze_policy.policy, analyze_policy.EXAMPLES)
    add(group, analyze_tokenizers.tokenizers, analyze_tokenizers.EXAMPLES)
    add(group, analyze_scaling.scaling, analyze_scaling.EXAMPLES)
    app.add_typer(group)


def acceptance(
    *,
    model: TrainedOptions,
    texts: WorkloadOptions,
    drafter: str = option(
        ..., "Who guesses; one that samples, such as draft_model[model=M].", "-d", metavar="SPEC"
    ),
    max_new_tokens: int = option(16, "Longest answer, tokens."),
    temperature: float = option(1.0, "Of both distributions, above 0.", "-t", metavar="T"),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write acceptance.json and a plot into this folder.", "-o"),
) -> None:
    """Compare what verifiers keep at one position with the most that any could.

    The model answers prompts plainly. At every position p and q are compared for 1 to 8 drafts.
    Rules for three drafts and more without replacement are sampled, so they may seem to exceed the bound.
    """
    at_least(3, "--max-new-tokens", max_new_tokens, UNDRAFTED)
    drafter = known(drafter)
    prompts = texts.read()
    engine = model.load(drafter="none")

    from outpace.analysis.acceptance import measure

    cases = texts.pick(engine, prompts, max_new_tokens)
    with show.progress(len(cases), "prompts") as tick:
        report = measure(
            engine, drafter, cases, max_new_tokens=max_new_tokens, temperature=temperature, tick=tick
        )
    found = {**report.to_json(), "workload": texts.workload, "prompts": len(cases)}
    pictures = {"acceptance": partial(_picture, found=found)}
    show.finish(found, as_json, lambda: show_report(report, len(cases)), out, "acceptance", pictures)


def show_report(report: Acceptance, prompts: int) -> None:
    found = report.to_json()
    show.write(
        f"{report.model}, drafter {report.drafter}, temperature {report.temperature:g}: mean over "
        f"{show.count(report.positions, 'position')} of {show.count(prompts, 'text')}\n\n"
    )
    rows = []
    most = 0
    for drawn, part in found["drafts"].items():
        curves = {"at most": part["bound"]} if part["bound"] is not None else {}
        curves |= {
            f"{name} (lossy)" if name == "typical" else name: curve
            for name, curve in part["verifiers"].items()
        }
        for name, curve in curves.items():
            most = max(most, len(curve))
            rows.append((_NAMES[drawn], name, *(f"{value:.3f}" for value in curve)))
    numbers = tuple(str(k + 1) for k in range(most))
    table = [row + ("",) * (2 + most - len(row)) for row in rows]
    show.write("Probability that one of k drafts of a position is kept\n")
    show.table(("drafts", "verifier", *numbers), table, numbers=numbers)


def _picture(figure: Any, found: dict[str, Any]) -> bool:
    """Draw the curves, a square per way of drawing drafts."""
    figure.set_size_inches(13, 6.5)
    figure.suptitle(
        f"{found['model']}, {found['drafter']}, temperature {found['temperature']:g}, "
        f"{show.count(found['positions'], 'position')}",
        fontsize="medium",
    )
    parts = {name: part for name, part in found["drafts"].items() if part["bound"]}
    grid = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes in grid[len(parts) :]:
        axes.set_visible(False)
    for axes, (drawn, part) in zip(grid, parts.items(), strict=False):
        steps = range(1, len(part["bound"]) + 1)
        axes.plot(steps, part["bound"], "--", color="0.4", label="at most")
        for index, (name, curve) in enumerate(part["verifiers"].items()):
            lossy = " (lossy)" if name == "typical" else ""
            # Later ones are thinner and smaller, so that equal curves all show.
            look = {"lw": max(1.0, 4.0 - index), "ms": max(3.0, 9.0 - 2 * index), "mfc": "none"}
            axes.plot(steps[: len(curve)], curve, marker="osD^v*"[index % 6], label=name + lossy, **look)
        axes.set_title(_NAMES[drawn], fontsize="medium")
        axes.set_xticks(steps)
        axes.legend(fontsize="small")
    for axes in grid[2 : len(parts)]:
        axes.set_xlabel("drafts")
        axes.tick_params(labelbottom=True)
    for axes in grid[::3]:
        axes.set_ylabel("acceptance")
    return True
