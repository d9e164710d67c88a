"""``outpace doctor``: say why a drafter gains little."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import show
from outpace.cli.drafting import known
from outpace.cli.options import AS_JSON, ModelOptions, WorkloadOptions, option, writes_folder

if TYPE_CHECKING:
    from outpace.analysis.doctor.findings import Diagnosis
    from outpace.engine.engine import Engine

EXAMPLES = """
Examples:

  outpace doctor --drafter eagle3

  outpace doctor -m ./big -d "draft_model[model=./small]" --limit 24 --out report
"""


def doctor(
    *,
    model: ModelOptions,
    texts: WorkloadOptions,
    drafter: str = option(..., "The drafter to look at.", "-d", metavar="SPEC"),
    max_new_tokens: int = option(24, "Tokens per answer.", least=8),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write doctor.json and a plot into this folder.", "-o"),
) -> None:
    """Find out why a drafter gains little: the drafter, the pair, or the machine.

    One thing after the other is changed, and first guesses are compared at the same positions.
    """
    drafter = known(drafter)
    prompts = texts.read()
    engine = model.load(drafter="none")
    engine.target.drafter_anyway = True  # to look at it, not to use it

    from outpace.analysis.doctor.diagnose import STAGES, diagnose

    def exact() -> Engine:
        from dataclasses import replace

        found = replace(model, dtype="float32").load(drafter="none")
        found.target.drafter_anyway = True
        return found

    ids = texts.pick(engine, prompts, max_new_tokens)
    with show.progress(STAGES, "stages") as tick:
        found = diagnose(
            engine, drafter, ids, prompts[0].messages, max_new_tokens=max_new_tokens, exact=exact, tick=tick
        )
    report = {**found.to_json(), "workload": texts.workload, "prompts": len(ids)}
    pictures = {"doctor": partial(_picture, found=found)}
    show.finish(report, as_json, lambda: show_report(found), out, "doctor", pictures)


def show_report(found: Diagnosis) -> None:
    """Print for people."""
    show.write(f"{found.model}, drafter {found.drafter}\n\n")
    if found.acceptance:
        depths = tuple(str(depth) for depth in range(1, len(found.acceptance) + 1))
        show.write("Acceptance by depth, given that all before was right\n")
        rows = [
            ("here", *(f"{share:.2f}" for share in found.acceptance)),
            ("positions", *map(str, found.counted)),
        ]
        if found.reached:
            said = [f"{share:.2f}" for share in found.reached[: len(depths)]]
            rows.insert(1, ("in training", *said, *[""] * (len(depths) - len(said))))
        show.table(("", *depths), rows, numbers=depths)
    if found.trials:
        show.write("First guess, with one thing changed\n")
        table = [
            (one.change, f"{one.share:.2f}", f"{one.gain:+.2f}")
            for one in sorted(found.trials, key=lambda one: -one.gain)
        ]
        show.table(("change", "right", "gain"), table, numbers=("right", "gain"))
    facts = [
        (f"right first guesses behind {context} tokens", f"{kept / count:.2f}")
        for context, kept, count in found.contexts
        if count
    ]
    if found.coverage is not None:
        facts.append(("the target's tokens that it can guess", f"{found.coverage:.2f}"))
    if found.level_cost is not None:
        facts.append(("cost of a level, in passes", f"{found.level_cost:.2f}"))
    if found.predicted is not None:
        facts.append(("speed-up of the best chain, predicted", f"{found.predicted:.2f} x"))
    if facts:
        show.table(("", "value"), facts, numbers=("value",))
    for line in found.notes:
        show.write(f"note: {line}\n")
    for one in found.findings:
        show.write(f"\n{one.name}: {one.what}\n  evidence: {one.evidence}\n  do: {one.do}\n")
    if not found.findings:
        show.write("Nothing wrong.\n")


def _picture(figure: Any, found: Diagnosis) -> bool:
    """Draw acceptance by depth, and what every change did."""
    if not found.acceptance:
        return False
    figure.set_size_inches(10, max(3.6, 1.4 + 0.28 * len(found.trials)))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3)) if found.trials else (figure.subplots(), None)
    depths = range(1, len(found.acceptance) + 1)
    left.plot(depths, found.acceptance, "o-", label="here")
    if found.reached:
        reached = found.reached[: len(depths)]
        left.plot(range(1, len(reached) + 1), reached, "s--", color="0.4", mfc="none", label="in training")
    left.set(xlabel="depth of the guess", ylabel="acceptance, given all before", ylim=(0, 1))
    left.set_xticks(depths)
    left.legend()
    if right is not None:
        trials = sorted(found.trials, key=lambda one: one.gain)
        usual = trials[0].share - trials[0].gain
        right.barh(range(len(trials)), [one.share for one in trials], color="#56B4E9")
        right.axvline(usual, color="black", ls="--", lw=1.2, label="as it is")
        right.set_yticks(range(len(trials)), [one.change for one in trials], fontsize="small")
        right.set_xlabel("share of right first guesses, with one thing changed")
        right.legend(loc="lower right")
    wrong = ", ".join(found.names) or "nothing wrong"
    figure.suptitle(f"{found.model}, {found.drafter}: {wrong}", fontsize="medium")
    return True
