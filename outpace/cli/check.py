"""``outpace check``: is the text really the model's own? Four levels, this model, this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outpace.cli import show
from outpace.cli.audit import AuditOptions
from outpace.cli.drafting import read_specs
from outpace.cli.options import AS_JSON, AutoOptions, option, writes_folder
from outpace.errors import OutpaceError, UnknownNameError

if TYPE_CHECKING:
    from outpace.analysis.lossless import Report, Tally
    from outpace.analysis.shapes import RowTally, ShapeReport
    from outpace.models.base import Target

EXAMPLES = """
Examples:

  outpace check

  outpace check --dtype float32 --prompts 40 --max-new-tokens 128

  outpace check -m ./big --drafters "prompt_lookup,draft_model[model=./small]"

  outpace check --shapes serve --drafters none --prompts 1

  outpace check --audit refusals --drafters suffix -t 0.8 --samples 4
"""

SHAPES = ("serve",)
"""Whose shapes of passes can be checked."""
PROMPTS = 8
_BATCH = 32  # as outpace serve has it


def check(
    *,
    model: AutoOptions,
    drafters: str = option(
        "all",
        "Method specs with commas between them, or all: every lossless drafter that "
        "needs no setting, and the model drafting for itself. Chains and trees.",
        "-d",
        metavar="SPECS",
    ),
    prompts: int | None = option(
        None, "Prompts to answer, at most.", shown="8 built-in ones; all of an audit", least=1
    ),
    max_new_tokens: int = option(64, "Longest answer, tokens.", least=1),
    shapes: str | None = option(
        None,
        "serve: every row of a pass as a server runs it (batches, guesses, edges of "
        "pages and of prompt chunks) must be bit for bit what it is alone.",
        metavar="NAME",
        shown="not checked",
    ),
    audit: AuditOptions,
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "With --audit: write audit.json and a plot here.", "-o"),
) -> None:
    """Check that output is lossless: distributions, code, tokens, hardware.

    Every drafter answers built-in prompts, alone and in batches of 4, as chains and as trees.

    Every token is compared with plain decoding. Exit code 1 if a promise is broken.
    """
    named = None if drafters == "all" else read_specs("--drafters", drafters)
    if shapes is not None and shapes not in SHAPES:
        raise UnknownNameError("shapes", shapes, SHAPES)
    audit.check(out)
    if audit.audit is not None:
        if audit.run(model, named, prompts, max_new_tokens, as_json, out):
            raise typer.Exit(1)
        return
    engine = model.load(drafter="none")

    from outpace.analysis.check import Case, sequences_of, standard_specs, with_trees
    from outpace.analysis.check import check as run
    from outpace.bench.cases import fitting
    from outpace.bench.workloads import builtin
    from outpace.models.prompts import evenly

    target = engine.target
    specs = []
    for spec in standard_specs(target, model.model) if named is None else with_trees(named, target):
        try:
            engine.method(spec)  # a drafter that cannot be loaded is said before hours of work
        except OutpaceError as error:
            if named is not None:
                raise
            show.note(f"{spec} is left out: {error}")
        else:
            specs.append(spec)
    usable = evenly(fitting(engine, builtin(), max_new_tokens), prompts or PROMPTS)
    cases = [Case(prompt.id, ids) for prompt, ids in usable]
    with show.progress(sequences_of(len(cases), len(specs)), "answers") as tick:
        report = run(engine, cases, specs, max_new_tokens=max_new_tokens, tick=tick, done=_tell)
    if shapes is not None:
        report = replace(report, shapes=_shapes(target))
    show.finish(report.to_json(), as_json, lambda: show_report(report))
    if report.broken:
        raise typer.Exit(1)


def _shapes(target: Target) -> ShapeReport:
    """Compare rows in the shapes of a server with its usual settings."""
    from outpace.analysis.shapes import Serving, check_shapes, parts_of
    from outpace.serving.service import usual_chunk

    serving = Serving(chunk=usual_chunk(target), max_batch=_BATCH)
    with show.progress(parts_of(target, serving), "shapes") as tick:
        return check_shapes(target, serving, tick)


def _tell(spec: str, tally: Tally) -> None:
    """What is known already, for those who cannot wait for the end."""
    show.note(f"{spec}: {tally.equal} of {tally.sequences} answers equal plain decoding")


def show_report(report: Report) -> None:
    show.write(
        f"{report.model}, {report.dtype}, {report.device}: {show.count(report.prompts, 'prompt')} x "
        f"{show.count(report.max_new_tokens, 'token')}, alone and in batches of 4\n\n"
    )
    show.write("1 distributions  what is emitted has that of the target (enumerated)\n")
    columns = {
        "verifier": "{0}",
        "largest error": "{1.error:.1e}",
        "cases": "{1.cases}",
        "growth rules": "{1.growth_rules}",
        "planted bugs caught": "{1.planted_bugs_caught} of {1.planted_bugs}",
    }
    show.listed(report.laws.items(), columns, texts=("verifier",))
    show.write("2 code           fast verifiers decide as their oracles do\n")
    columns = {"verifier": "{0}", "cases": "{1.cases}", "agreed": "{1.agreed}"}
    show.listed(report.oracles.items(), columns, texts=("verifier",))
    show.write(f"3 tokens         greedy text equals plain decoding ({report.promise})\n")
    columns = {
        "drafter": "{0}",
        "sequences": "{1.sequences}",
        "equal": "{1.equal}",
        "drafted": "{1.drafted}",
        "accepted": "{1.accepted}",
        "first difference": "{2}",
    }
    rows = [(name, tally, _first(tally)) for name, tally in report.tallies.items()]
    show.listed(rows, columns, texts=("drafter", "first difference"))
    found = report.hardware()
    gap = found["largest_gap"]
    show.write(
        f"4 hardware       {found['different']} of {found['sequences']} sequences differ "
        f"({found['share']:.1%})"
        + ("" if gap is None else f"; logit gap at the first difference: at most {gap:.3g}")
        + "\n\n"
    )
    if report.shapes is not None:
        _show_shapes(report.shapes)
    for spec in report.idle:
        show.write(f"shows nothing: {spec} had no guess accepted; try more prompts\n")
    for line in report.broken:
        show.write(f"BROKEN  {line}\n")
    if not report.broken:
        show.write("All promises are kept.\n")


def _show_shapes(shapes: ShapeReport) -> None:
    own = shapes.serving
    show.write(
        f"5 shapes         rows are what they are alone: batches of up to {own.max_batch}, pages "
        f"of {own.page}, chunks of {own.chunk}\n"
    )
    show.table(
        ("passes that", "passes", "rows", "different", "first"),
        [_shape("decode", shapes.steps), _shape("read prompts", shapes.prompts)],
        numbers=("passes", "rows", "different"),
    )


def _shape(name: str, tally: RowTally) -> tuple[str, ...]:
    first = "" if tally.first is None else f"{tally.first.shape}, off by {tally.first.gap:.3g}"
    return (name, str(tally.passes), str(tally.rows), str(tally.different), first)


def _first(tally: Tally) -> str:
    """Where a drafter's text first left the plain one."""
    if not tally.differences:
        return ""
    first = tally.differences[0]
    gap = "" if first.gap is None else f", logit gap {abs(first.gap):.3g}"
    return f"prompt {first.prompt}, token {first.position}, batch of {first.batch}{gap}"
