"""A trained drafter in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace import registry
from outpace.drafters.trained import method_of
from outpace.errors import ModelError, RequestError
from outpace.models.base import Target


def export(source: Path, form: str, out: Path, target: Target, verifier: str | None = None) -> list[Path]:
    """Write a drafter folder in another program's format.

    Args:
        source: drafter folder; for some formats files of other programs, too.
        form: a format of the method's exporter.
        out: folder to write to; files of the same names are replaced.
        verifier: how the other program calls the target, a hub id as a rule; None: its name here.

    Returns:
        The files written.

    Raises:
        UnknownNameError: nobody exports the method.
        ModelError: an unknown format, a drafter of another kind, or a shape that the format
            cannot say.
    """
    if out.resolve() == source.resolve():
        raise ModelError(f"{out} is the drafter itself; write the export to another folder")
    files: list[Path] = exporter(method_of(source), form).export(source, form, out, target, verifier)
    return files


def exporter(method: str | None, form: str | None) -> Any:
    """Give the exporter of a method; for files that name none, the one that writes the format.

    Raises:
        UnknownNameError: nobody exports it.
        RequestError: no format is given; it names those of the method.
        ModelError: not in this format.
    """
    known = [one.name for one in registry.entries("exporter")]
    if method not in (None, *known) and method in [one.name for one in registry.entries("objective")]:
        raise ModelError(
            f"no format of another program can say a drafter of {method}; those of {', '.join(known)} can"
        )
    names = known if method is None else [method]
    able = [registry.load("exporter", name) for name in names]
    formats = list(dict.fromkeys(form for one in able for form in one.FORMATS))
    if form is None:
        raise RequestError(f"no --format for {method or 'a drafter'}; give {' or '.join(formats)}")
    found = next((one for one in able if form in one.FORMATS), None)
    if found is None:
        raise ModelError(
            f"{method or 'a drafter'} cannot be written as {form!r}; known: {', '.join(formats)}"
        )
    return found
