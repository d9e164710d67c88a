"""``outpace analyze policy``: how much policies lose against the best choice in hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import show
from outpace.cli.options import AS_JSON, AutoOptions, WorkloadOptions, option, writes_folder
from outpace.config import split_specs
from outpace.errors import RequestError

if TYPE_CHECKING:
    from outpace.analysis.ablation import Worth
    from outpace.analysis.judge import Judged

EXAMPLES = """
Examples:

  outpace analyze policy --texts texts.gz

  outpace analyze policy --texts texts.gz --policies "auto,goodput,bandit,two_lines" --out report

  outpace analyze policy --texts texts.gz --ablate --orders 4

  outpace analyze policy --texts texts.gz --measure --only "cpu, 1"
"""


def policy(
    *,
    model: AutoOptions,
    texts: WorkloadOptions,
    file: Path = option(
        ..., "Recorded answers; they are recorded if there is no such file.", "--texts", metavar="FILE"
    ),
    policies: str = option(
        "auto,goodput,bandit,two_lines", "Policies, with commas between them.", metavar="SPECS"
    ),
    drafters: str | None = option(
        None, "Drafters to record, with commas between them.", metavar="SPECS", shown="those of auto"
    ),
    max_new_tokens: int = option(96, "Tokens per answer.", least=16),
    temperature: float = option(0.0, "Of the answers to record.", "-t", metavar="T"),
    ablate: bool = option(False, "Say what each part of auto is worth: `auto` without it, in all scenarios."),
    constants: bool = option(False, "With --ablate: each constant of auto halved and doubled instead."),
    orders: int = option(1, "Orders of the requests, whose mean counts; one is noisy.", least=1),
    only: str = option("", "Scenarios whose names hold this.", metavar="PART", shown="all"),
    measure: bool = option(False, "Answer the prompts again, and compare replay with measured speed."),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write policy.json and a plot here.", "-o"),
) -> None:
    """Replay policies against recorded answers on machines of several kinds.

    Prints what each reaches of the best fixed rule in hindsight; above 1 it beats all fixed rules.
    """
    names = split_specs(policies)
    if not names:
        raise RequestError("--policies names none; give for example auto,goodput")
    prompts = texts.read()

    if constants and not ablate:
        raise RequestError("--constants says which parts --ablate leaves out; give both")

    from outpace.analysis import ablation, judge, recording

    judged = ablation.variants(constants) if ablate else judge.named(names)
    for fresh in judged.values():  # a wrong one is said before a long recording
        fresh()

    asked, found, unwritten = [], [], None
    if not file.exists():
        show.check_file(file)
    if measure or not file.exists():
        from outpace.bench.cases import fitting
        from outpace.models.prompts import evenly

        engine = model.load(drafter="none")
        asked = [
            (prompt.id, prompt.category, ids)
            for prompt, ids in evenly(fitting(engine, prompts, max_new_tokens), texts.limit)
        ]
    if not file.exists():
        specs = split_specs(drafters or "") or list(engine.method("auto").serving(ruled=False))
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        with show.progress(len(asked), "prompts") as tick:
            found = recording.record(engine, asked, specs, **settings, tick=tick)
        try:
            recording.write(file, found)
        except OSError as error:  # said after the report, which needs no file
            unwritten = error
    found = found or recording.read(file)
    if not (where := judge.chosen(found, only)):
        raise RequestError(
            f"--only {only!r:.80} is part of no scenario's name; give a part such as cpu or gpu"
        )
    ids = {name: tokens for name, _, tokens in asked}
    same = [text for text in found if text.name in ids]
    if measure and not same:
        raise RequestError("no prompt of the workload was recorded; give the --workload and --limit of then")
    with show.progress(len(where), "scenarios") as tick:
        rows = judge.judge(found, judged, where, orders, tick)
    parts = ablation.worth(rows) if ablate else []
    report: dict[str, Any] = {"texts": len(found), "scenarios": [row.to_json() for row in rows]}
    if ablate:
        names = [ablation.WHOLE]
        report["parts"] = [part.to_json() for part in parts]
    if measure:
        report["reality"] = {
            name: judge.reality(engine, [ids[text.name] for text in same], same, name) for name in names
        }

    def say() -> None:
        show_report(rows, names, report)
        if parts:
            show_parts(parts)

    pictures = {"policy": partial(_picture, rows=rows, names=names)}
    show.finish(report, as_json, say, out, "policy", pictures)
    if unwritten is not None:
        raise unwritten


def show_report(rows: Sequence[Judged], names: Sequence[str], report: dict[str, Any]) -> None:
    """Print for people."""
    show.write("Tokens per second over those of the best fixed rule in hindsight\n")
    table = [
        (
            row.scenario,
            row.best,
            f"{row.best_rate / row.plain_rate:.2f}",
            *(f"{1.0 - row.regret(name):.3f}" for name in names),
        )
        for row in rows
    ]
    if rows:
        each = {name: [1.0 - row.regret(name) for row in rows] for name in names}
        table.append(("mean", "", "", *(f"{sum(each[name]) / len(rows):.3f}" for name in names)))
        table.append(("least", "", "", *(f"{min(each[name]):.3f}" for name in names)))
        over = {name: min(row.rates[name] / row.plain_rate for row in rows) for name in names}
        table.append(("least over none", "", "", *(f"{over[name]:.3f}" for name in names)))
    show.table(("scenario", "best rule", "over none", *names), table, numbers=("over none", *names))
    for name, one in report.get("reality", {}).items():
        off = one["predicted"] / one["measured"] - 1.0
        show.write(
            f"{name}: {one['predicted']:.1f} tokens/s predicted, {one['measured']:.1f} measured, {off:+.1%}\n"
        )


def show_parts(parts: Sequence[Worth]) -> None:
    """Print what is lost without each part of `auto`."""
    show.write("\nShare of the best fixed rule that is lost; below 0 it is better so\n")
    table = [(one.part, f"{one.mean:+.3f}", f"{one.most:+.3f}", one.where) for one in parts]
    show.table(("left out", "mean", "most", "in"), table, numbers=("mean", "most"))


def _picture(figure: Any, rows: Sequence[Judged], names: Sequence[str]) -> bool:
    """Draw what every policy reaches, a row per scenario."""
    if not rows:
        return False
    figure.set_size_inches(8, 1.5 + 0.25 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    for index, name in enumerate(names):
        axes.plot(
            [1.0 - row.regret(name) for row in rows], places, "osD^v*"[index % 6], label=name, mfc="none"
        )
    axes.plot([row.plain_rate / row.best_rate for row in rows], places, "|", color="0.4", label="none")
    axes.axvline(1.0, color="0.4", lw=1)
    axes.set_yticks(places, [row.scenario for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second over those of the best fixed rule in hindsight")
    axes.legend(fontsize="small")
    return True
