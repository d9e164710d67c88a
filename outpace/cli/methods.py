"""``outpace methods``: what can draft, verify and plan, straight from the registry."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import ModelOptions, option
from outpace.cli.settings import lacks, natural_shape, plan_keys, settings_of
from outpace.config import MethodSpec
from outpace.errors import RequestError, UnknownNameError

if TYPE_CHECKING:
    from outpace.models.base import Target

EXAMPLES = "Try: outpace methods prompt_lookup"


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="The method whose settings to show; all are listed without.",
        ),
    ] = None,
    *,
    model: str | None = option(
        None, "List the drafters that are there for this model, with their speed-ups.", "-m", metavar="M"
    ),
    as_json: bool = option(False, "Print a JSON list.", "--json"),
) -> None:
    """List drafters, verifiers and policies, or show the settings of one."""
    for line in registry.broken():
        show.note(line)
    if name is not None and model is not None:
        raise RequestError(f"give NAME or --model, got {name} and {model}; --model lists drafters")
    if name is not None:
        _one(MethodSpec.parse(name).name, as_json)
        return
    rows = registry.entries()
    if model is not None:
        _for_model(ModelOptions(model=model).load(drafter="none").target, as_json)
        return
    if as_json:
        show.write_json([describe(row) for row in rows])
        return
    for kind, title in (
        ("drafter", "Drafters guess the next tokens: --drafter NAME or NAME[key=value ...]"),
        ("verifier", "Verifiers decide what is kept: --drafter 'NAME[verifier=...]'"),
        ("policy", "Policies say how much to draft: --drafter 'NAME[policy=...]'"),
    ):
        of_kind = [row for row in rows if row.kind == kind]
        show.write(f"{title}\n")
        show.table(
            ("name", "family", "what it does", "source", ""),
            [(row.name, row.family, row.summary, row.paper or "", _remarks(row)) for row in of_kind],
        )


def _one(name: str, as_json: bool) -> None:
    """Show all methods of a name: there may be a drafter and a policy."""
    rows = registry.entries()
    found = [row for row in rows if row.name == name]
    if not found:
        raise UnknownNameError("method", name, [row.name for row in rows])
    classes = [registry.load(row.kind, name) for row in found]
    if as_json:
        show.write_json(
            [
                {**describe(row), "settings": [asdict(one) for one in settings_of(cls.Config)]}
                for row, cls in zip(found, classes, strict=True)
            ]
        )
        return
    for row, cls in zip(found, classes, strict=True):
        shape = natural_shape(cls) if row.kind == "drafter" else ""
        parts = (f"{row.summary.rstrip('.')}.", shape, f"After {row.paper}." if row.paper else "")
        show.write(f"{row.kind} {name}: {' '.join(part for part in parts if part)}\n")
        settings = settings_of(cls.Config)
        if settings:
            show.table(
                ("setting", "type", "default", "meaning"),
                [
                    (one.name, one.kind, "required" if one.default is None else one.default, one.meaning)
                    for one in settings
                ],
            )
        else:
            show.write("It has no settings of its own.\n")
        if row.kind == "drafter":
            show.write(f"Besides, it takes {', '.join(plan_keys(cls))}.\n")


def _for_model(target: Target, as_json: bool) -> None:
    found = [available(row, target) for row in registry.entries("drafter")]
    if as_json:
        show.write_json(found)
        return
    show.write(f"Drafters for {target.name}: --drafter NAME\n")
    show.table(
        ("name", "for this model", "speed-up", "mean emitted", "measured"),
        [(one["name"], one["status"], *_figures(one["measured"])) for one in found],
    )
    show.write(
        "Speed-ups of trained drafters are those measured when they were made; "
        "outpace bench measures them here.\n"
    )


def available(row: registry.MethodEntry, target: Target) -> dict[str, Any]:
    """Whether a drafter can be used with a model as it is, and how fast it was found to be."""
    from outpace.drafters.trained import candidates, read_measured, shipped_folder

    owner = row.borrows or row.name
    folder: Path | None = next(iter(candidates(owner, target)), None) if row.trained else None
    if not row.trained or (folder is not None and row.borrows):
        status, folder = "ready", None
    elif folder is not None:
        status = "shipped" if folder.is_relative_to(shipped_folder()) else "trained here"
    elif row.name in {one.name for one in registry.entries("objective")}:
        status = "not trained"
    else:
        status = f"needs {lacks(row)}"
    return {
        "name": row.name,
        "status": status,
        "folder": None if folder is None else str(folder),
        "measured": None if folder is None else read_measured(folder),
    }


def _figures(measured: Any) -> tuple[str, str, str]:
    """Speed-up, mean emitted, and where that was measured."""
    if measured is None or measured.get("speedup") is None:
        return "", "", ""
    threads = show.count(measured.get("threads") or 0, "thread")
    where = f"{threads}, {measured.get('dtype')}, {measured.get('cpu')}"
    return f"{measured['speedup']:.2f}", f"{measured['mean_emitted']:.2f}", where


def describe(row: registry.MethodEntry) -> dict[str, Any]:
    """A row of the registry as plain values."""
    return {
        "name": row.name,
        "kind": row.kind,
        "family": row.family,
        "summary": row.summary,
        "paper": row.paper,
        "lossless": row.lossless,
        "trained": row.trained,
    }


def _remarks(row: registry.MethodEntry) -> str:
    """What sets a method apart from most."""
    remarks = [] if row.lossless else ["lossy"]
    if row.trained:
        remarks.append(f"needs {lacks(row)}")
    return ", ".join(remarks)
