"""``outpace methods``: what can draft, verify and plan, straight from the registry."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import option


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Try: outpace methods --json")(methods)


def methods(
    as_json: Annotated[bool, option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List drafters, verifiers and policies."""
    rows = registry.rows()
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
