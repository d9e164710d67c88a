"""``outpace tune``: what drafters are worth here, measured once, for policies to start from."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import AS_JSON, AutoOptions, at_least, option, writes_file
from outpace.config import MethodSpec, split_specs
from outpace.errors import OutpaceError, RequestError

if TYPE_CHECKING:
    from outpace.analysis.cost import CostCurve
    from outpace.analysis.profile import Learned, Profile
    from outpace.engine.engine import Engine

_who = partial(option, panel="Methods")
_what = partial(option, panel="Prompts")
SHORTEST = 8
"""Fewest new tokens that tell anything; of `outpace.analysis.profile`, without its imports."""
_SHOWN = 4  # drafters with a line of their own
_ROWS = (1, 4, 8, 16)
_CONTEXT = 256

EXAMPLES = """
Examples:

  outpace tune

  outpace tune --model ./big --drafters "suffix,draft_model[model=./small]" --workload mine.jsonl

  outpace generate --drafter auto --explain "Explain how a refrigerator works."
"""


def tune(
    *,
    model: AutoOptions,
    drafters: str = _who(
        "all",
        "Method specs with commas between them, or all: every drafter that this model "
        "can run without settings.",
        "-d",
        metavar="SPECS",
    ),
    workload: str = _what(
        "builtin", "Prompts like yours: builtin, or a file as for outpace bench.", "-w", metavar="NAME|FILE"
    ),
    limit: int = _what(1, "Prompts per category, at most.", least=1),
    max_new_tokens: int = _what(64, "Tokens of every answer."),
    out: Path | None = writes_file(
        None,
        "Write the profile here as well, with the plot beside it.",
        "-o",
        shown="only where policies look for it",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Measure passes and drafters on this machine, so that auto begins with what is known.

    Passes are measured if that was not done before. Then every drafter answers the prompts.

    What was learned is kept per model, dtype, threads, machine and version.
    """
    at_least(SHORTEST, "--max-new-tokens", max_new_tokens, "too few tell nothing")
    named = None if drafters == "all" else check_names(split_specs(drafters))
    if out is not None and out.suffix in (".png", ".svg"):
        raise RequestError(f"--out {out}: give a file such as profile.json; plots lie beside it")

    from outpace.bench.formats import read_workload

    prompts = read_workload(workload)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)  # what cannot be written is said at once
    engine = model.load(drafter="none")

    from outpace.analysis.profile import Asked, available, measure, save
    from outpace.bench.cases import make_cases

    left_out: dict[str, str] = {}
    if named is None:
        with show.busy("loading drafters"):
            named, left_out = available(engine)
    specs = [engine.method(spec).spec for spec in named]
    asked = make_cases(engine, prompts, limit=limit, max_new_tokens=max_new_tokens, seeds=[0])
    for line in asked.notes:
        show.note(f"outpace: {line}")
    curve, fresh = passes(engine)
    cases = [Asked(ids=case.ids, reference=case.reference) for case in asked.cases]
    with show.progress(len(cases) * (1 + len(specs)), "answers") as tick:
        profile = measure(
            engine,
            cases,
            specs,
            curve,
            max_new_tokens=max_new_tokens,
            workload=workload,
            left_out=left_out,
            tick=tick,
        )
    unkept: list[str] = []
    kept = save(engine.target, profile, unkept.append)
    for line in unkept:
        show.note(line)
    plots = plot(profile, kept if out is None else out)
    found = asdict(profile)
    about = {
        "passes_measured_now": fresh,
        "profile": None if unkept else str(kept),
        "plots": [str(path) for path in plots],
    }
    text = "".join(f"{line}\n" for line in lines(profile, curve, fresh))
    with show.then_write(out, lambda file: show.save(file, json.dumps(found, indent=1) + "\n")):
        show.finish({**found, **about}, as_json, lambda: show.write(text))
    if not as_json:
        written = [str(path) for path in (kept, *([] if out is None else [out]), *plots)]
        where = "what they had: the profile is not kept" if unkept else ", ".join(written)
        show.write(f"policies start from   {where}\n")
    if unkept and out is None:
        raise typer.Exit(2)


def check_names(specs: list[str]) -> list[str]:
    """Refuse what cannot be measured, before a model is loaded.

    Raises:
        SpecError, UnknownNameError: a spec that cannot be read, or a drafter that nobody has.
        RequestError: none is left, or one that chooses among others.
    """
    names = [MethodSpec.parse(spec) for spec in specs]
    for one in names:
        registry.entry("drafter", one.name)
        if one.name == "auto":
            raise RequestError("auto starts from the profile and has none; name its members")
    found = [str(one) for one in names if one.name != "none"]
    if not found:
        raise RequestError("--drafters names nobody who drafts; name some, or all")
    return found


def passes(engine: Engine) -> tuple[CostCurve, bool]:
    """The cost curve of the target here, and whether it was measured now."""
    from outpace.analysis.cost import REPEAT, curve_for

    known = curve_for(engine.target, measure_if_missing=False, note=show.note)
    if known is not None:
        return known, False
    with show.progress(REPEAT + 1, "rounds") as tick:
        curve = curve_for(engine.target, measure_if_missing=True, progress=tick)
    if curve is None:  # cannot be: it was to be measured
        raise OutpaceError(f"passes of {engine.target.name} could not be measured")
    return curve, True


def lines(profile: Profile, curve: CostCurve, fresh: bool) -> list[str]:
    """What was learned, in at most nine lines."""
    best, others = profile.drafters[:_SHOWN], profile.drafters[_SHOWN:]
    costs = ", ".join(f"{curve.ratio(rows, _CONTEXT):.2f} x for {rows}" for rows in _ROWS[1:])
    out = [
        f"{profile.model}, {profile.dtype}, {profile.device}, "
        f"{show.count(profile.threads, 'thread')}; {show.count(profile.prompts, 'prompt')} of "
        f"{profile.workload}, {profile.max_new_tokens} new tokens, greedy",
        f"a pass                {1e3 * curve.seconds(1, _CONTEXT):.2f} ms for 1 row, {costs} "
        f"(context {_CONTEXT}; measured {'now' if fresh else 'before'})",
        f"plain decoding        {profile.plain_tokens_per_second:.1f} tokens/s; passes took "
        f"{profile.pass_factor:.2f} x what was measured of them alone",
        *(f"{one.spec:<21} {_learned(one)}" for one in best),
    ]
    if others:
        out.append("further               " + ", ".join(f"{one.spec} {one.speedup:.2f} x" for one in others))
    if profile.left_out:
        why = "not there for this model"
        if any("something else" in reason for reason in profile.left_out.values()):
            why = "not there for this model, or disturbed by something else on the machine"
        out.append(f"not measured          {', '.join(profile.left_out)}: {why}")
    return out


def _learned(one: Learned) -> str:
    by_depth = [
        f"{kept / tried:.0%}" for kept, tried in zip(one.known.kept_D[:4], one.known.tried_D, strict=False)
    ]
    price = 1e3 * (one.known.level or one.known.call)
    depth, speedup = one.best
    cut = f"best cut at {show.count(depth, 'level')}, {speedup:.2f} x" if depth else "best left out"
    if one.disturbed:
        cut += f"; {show.count(one.disturbed, 'disturbed answer')} left out"
    return (
        f"{one.speedup:.2f} x, mean emitted {one.mean_emitted:.2f}, kept by depth "
        f"{' '.join(by_depth)}, {price:.2f} ms per {'level' if one.known.level else 'draft'}; {cut}"
    )


def plot(profile: Profile, beside: Path) -> list[Path]:
    """Draw speed-up against draft budget beside a file; without matplotlib a note says so."""
    from outpace.bench.plots import budgets, paint

    report: dict[str, Any] = asdict(profile)
    try:
        return paint({beside.stem: lambda figure: budgets(figure, report)}, beside.parent, note=show.note)
    except OSError as error:
        show.note(f"no plots beside {beside}: {error.strerror}")
        return []
