"""The versions of a learned drafter on disk: whole or not there, whenever the process dies.

    FOLDER/lock                      one server at a time learns here
    FOLDER/BRANCH/manifest.json      versions, which one drafts, what they were made from
    FOLDER/BRANCH/v000003/           a drafter folder

A version is written first and named in the manifest afterwards, which is replaced in one step. So a
folder that no manifest names is what was left of a process that died, and is removed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outpace.drafters.trained import CONFIG, WEIGHTS
from outpace.errors import ModelError, shown
from outpace.files import parse_json, write_whole
from outpace.models.fields import brief
from outpace.models.lock import remove_parts

FORMAT = 1
MANIFEST = "manifest.json"
BASE = 0
"""The number of the drafter that learning started from, which lies elsewhere."""

Entry = dict[str, Any]
"""One version: number, parent, sha256, rolled_back, and what was measured."""


class Versions:
    """The versions of one branch.

    Args:
        about: plain data that must be what the manifest says: whose drafter it is.
        kept: newest versions that stay, at least 1; the one that drafts and its parent do too.

    Raises:
        ModelError: a manifest that cannot be read, or is of something else; says what to delete.
    """

    def __init__(self, folder: Path, about: Mapping[str, str], kept: int = 3) -> None:
        self.folder, self.about, self.kept = folder, dict(about), kept
        self.entries: dict[int, Entry] = {}
        self.current = BASE
        """The version that drafts."""
        self._next = BASE + 1
        if (folder / MANIFEST).is_file():
            self._read()
        self._tidy()

    def _read(self) -> None:
        path = self.folder / MANIFEST
        try:
            said = parse_json(path.read_bytes())
            if said["format"] != FORMAT or said["about"] != self.about:
                raise ValueError(f"it is about {said['about']}, not {self.about}")
            self.entries = {entry["number"]: entry for entry in map(_entry, said["versions"])}
            self.current, self._next = _number(said["current"]), _number(said["next"])
            if self._next <= max(self.entries, default=BASE):
                raise ValueError(f"the next version, {self._next}, is there already")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path} cannot be used: {brief(error)}; delete {self.folder} to learn anew"
            ) from error
        while self.current != BASE and not self._intact(self.current):
            entry = self.entries.pop(self.current, {"parent": BASE})
            self.current = int(entry["parent"])

    def _intact(self, number: int) -> bool:
        folder, entry = self.path(number), self.entries.get(number)
        if entry is None or not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
            return False
        return bool(entry["sha256"] == digest_of(folder / WEIGHTS))

    def path(self, number: int) -> Path:
        return self.folder / f"v{number:06d}"

    @property
    def parent(self) -> int:
        """The version that drafted before the current one."""
        return int(self.entries[self.current]["parent"]) if self.current != BASE else BASE

    def add(self, save: Callable[[Path], None], note: Mapping[str, Any]) -> int:
        """Write a version that drafts from now on.

        Args:
            note: plain data to keep with it.

        Returns:
            Its number. After an error, or if the process dies, all is as before.

        Raises:
            OSError: it cannot be written.
        """
        number = self._next
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = self.path(number)
        try:
            save(folder)
            entry = {
                "number": number,
                "parent": self.current,
                "rolled_back": False,
                "sha256": digest_of(folder / WEIGHTS),
                **note,
            }
            self._commit({**self.entries, number: entry}, number, number + 1)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._prune()
        return number

    def back(self) -> int:
        """Let the parent of the current version draft again; returns its number."""
        entry = {**self.entries[self.current], "rolled_back": True}
        self._commit({**self.entries, self.current: entry}, self.parent, self._next)
        return self.current

    def _commit(self, entries: Mapping[int, Entry], current: int, following: int) -> None:
        said = {
            "format": FORMAT,
            "about": self.about,
            "current": current,
            "next": following,
            "versions": [entries[number] for number in sorted(entries)],
        }
        write_whole(self.folder / MANIFEST, json.dumps(said, indent=1) + "\n")
        self.entries, self.current, self._next = dict(entries), current, following

    def _prune(self) -> None:
        """Drop old versions; what still may draft stays."""
        needed = {self.current, self.parent, *sorted(self.entries)[-self.kept :]}
        stay = {
            # Where a parent has gone, the way back leads to the beginning.
            n: entry if entry["parent"] in needed else {**entry, "parent": BASE}
            for n, entry in self.entries.items()
            if n in needed
        }
        if len(stay) < len(self.entries):
            self._commit(stay, self.current, self._next)
            self._tidy()

    def _tidy(self) -> None:
        if not self.folder.is_dir():
            return
        known = {self.path(number).name for number in self.entries}
        for folder in self.folder.glob("v[0-9]*"):
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)
        remove_parts(self.folder)


def _entry(said: Any) -> Entry:
    """A version as the manifest has it; ValueError, KeyError or TypeError if it is something else."""
    entry = dict(said)
    number, parent = _number(entry["number"]), _number(entry["parent"])
    if not BASE <= parent < number or not isinstance(entry["sha256"], str):
        raise ValueError(f"version {number} cannot come from {parent}")
    return entry


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{shown(value)} is no version")
    return value


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
