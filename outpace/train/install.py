"""A drafter folder takes its place whole: who looks finds the old drafter or the new one."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from outpace.drafters.trained import CONFIG, PROVENANCE, WEIGHTS
from outpace.errors import RequestError
from outpace.files import check_writable, replaced

PARTS = {CONFIG, WEIGHTS, PROVENANCE, "tree.json"}
"""Files of drafter folders; one that holds anything else is not replaced."""


def check_destination(out: Path) -> None:
    """Refuse a place where more than an older drafter would be lost; for before the work begins.

    Raises:
        RequestError: a file, a mount, or a folder with something that is no part of a drafter.
    """
    where = f"cannot put a drafter at {out}"
    way = "name another folder, one that is not there yet, with --out"
    if out.resolve().is_mount():
        raise RequestError(f"{where}: it is a mount, which cannot be replaced; {way}")
    if out.is_dir():
        # What a killed process left unfinished is no loss.
        names = [one.name for one in out.iterdir() if not one.name.endswith(".part")]
        strange = sorted(set(names) - PARTS)
        if strange:
            raise RequestError(f"{where}: it holds {strange[0]}, which would be lost; {way}")
    elif out.exists():
        raise RequestError(f"{where}: it is a file; {way}")
    try:
        check_writable(out.resolve().parent)
    except OSError as error:
        raise RequestError(f"{where}: {error.strerror}; {way}") from error


def install_folder(source: Path, out: Path) -> None:
    """Copy a drafter folder to its place, on the disk in full before it has its name there.

    Between the old folder's leaving and the new one's coming there is an instant without either. A
    process that dies there leaves both beside, hidden, and the next call tidies up. ``source`` is
    left as it is, so that whoever dies can do it again.

    Args:
        out: its parents are made; what was there before is gone afterwards.

    Raises:
        OSError: it cannot be written; what was there before is there again.
    """
    out = out.resolve()  # a link stays one
    fresh, old = (out.with_name(f".{out.name}.{end}") for end in ("part", "old"))
    _tidy(fresh, old, out)
    try:
        for file in sorted(source.iterdir()):
            with replaced(fresh / file.name) as part:
                shutil.copyfile(file, part)
        with contextlib.suppress(FileNotFoundError):
            out.rename(old)
        fresh.rename(out)
    finally:
        _tidy(fresh, old, out)


def _tidy(fresh: Path, old: Path, out: Path) -> None:
    if old.exists() and not out.exists():
        old.rename(out)
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
