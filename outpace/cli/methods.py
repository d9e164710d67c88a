"""``outpace methods``: what can draft, verify and plan, straight from the registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import ModelOptions, option

if TYPE_CHECKING:
    from outpace.models.base import Target


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Try: outpace methods --json")(methods)


def methods(
    model: Annotated[
        str | None,
        option("--model", "-m", metavar="M",
               help="List the drafters that are there for this model, with their speed-ups."),
    ] = None,
    as_json: Annotated[bool, option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List drafters, verifiers and policies."""
    rows = registry.rows()
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
            [(row.name, row.family, row.summary, row.paper or "", _remarks(row))
             for row in of_kind],
        )


def _for_model(target: Target, as_json: bool) -> None:
    """List drafters for one model."""
    found = [available(row, target) for row in registry.rows("drafter")]
    if as_json:
        show.write_json(found)
        return
    show.write(f"Drafters for {target.name}: --drafter NAME\n")
    show.table(
        ("name", "for this model", "speed-up", "mean emitted", "measured"),
        [(one["name"], one["status"], *_figures(one["measured"])) for one in found],
    )
    show.write("Speed-ups of trained drafters are those measured when they were made; "
               "outpace bench measures them here.\n")


def available(row: registry.Row, target: Target) -> dict[str, Any]:
    """Whether a drafter can be used with a model as it is, and how fast it was found to be."""
    from outpace.drafters.trained import candidates, shipped_folder
    from outpace.train.kit import read_measured
    from outpace.train.objectives import OBJECTIVES

    folder: Path | None = next(iter(candidates(row.name, target)), None) if row.trained else None
    if not row.trained:
        status = "ready"
    elif folder is None:
        status = "not trained" if row.name in OBJECTIVES else "needs a file of its own"
    else:
        status = "shipped" if folder.is_relative_to(shipped_folder()) else "trained here"
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
    where = f"{measured.get('threads')} threads, {measured.get('dtype')}, {measured.get('cpu')}"
    return f"{measured['speedup']:.2f}", f"{measured['mean_emitted']:.2f}", where


def describe(row: registry.Row) -> dict[str, Any]:
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


def _remarks(row: registry.Row) -> str:
    """What sets a method apart from most."""
    remarks = [] if row.lossless else ["lossy"]
    if row.trained:
        remarks.append("needs weights of its own")
    return ", ".join(remarks)
