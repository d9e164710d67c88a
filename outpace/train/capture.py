"""Features of stored sequences on disk: what the target computed at every token of them.

One pass of the target per sequence, prompts and answers alike, with the layers' outputs that a
drafter reads. They are kept in bfloat16, in shards of about 64 MB beside the tokens:

    features/<taps>/features-00000.safetensors    one [rows, H] tensor per tap
    features/<taps>/manifest.json                 which sequence begins at which row of which shard

Shape letters: T rows of a sequence or of a shard, H hidden size.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from outpace.errors import ModelError, OutpaceError, RequestError, shorten
from outpace.files import parse_json, write_whole
from outpace.models.base import TAPS, Target
from outpace.train.manifest import SHARD, read_manifest
from outpace.train.progress import Say, Tick
from outpace.train.tokens import TokenSequence, TokenStore
from outpace.types import Feed

VERSION = 1
_FORM = {
    "target": {"name": str, "digest": str},
    "taps": [str],
    "hidden_size": int,
    "shards": [{"file": SHARD, "bytes": int, "sequences": [[int]]}],
}
"""What the manifest has to hold."""
SHARD_BYTES = 64 << 20
ROWS = 1024
"""Tokens of a pass, about."""
_SAY_EVERY = 10.0  # seconds
_SPARE = 1.05  # of the disk: headers, the manifest, other files that grow meanwhile


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the features of a sequence lie."""

    file: str
    start: int
    """First row."""
    length: int
    checksums: tuple[int, ...]
    """CRC-32 per tap."""


class FeatureStore:
    """Features of the sequences of one store, read row by row from disk.

    Files are read with plain reads, not mapped: mapped pages would count as this process's memory
    until the system is short of it.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Use ``open`` or ``capture``."""
        self.folder = folder
        self._manifest = manifest
        self.taps: tuple[str, ...] = tuple(manifest["taps"])
        self.hidden_size: int = manifest["hidden_size"]
        self._places: dict[int, _Place] = {}
        for shard in manifest["shards"]:
            self._learn(shard)
        self._begins: dict[str, dict[str, int]] = {}
        self._checked: set[tuple[int, str]] = set()

    @classmethod
    def open(cls, folder: Path) -> FeatureStore:
        """Read what a folder holds.

        Raises:
            RequestError: there is nothing.
            OutpaceError: its manifest is damaged.
        """
        path = folder / "manifest.json"
        remedy = f"delete {folder}, and its features are captured anew"
        try:
            manifest = read_manifest(path, VERSION, _FORM, remedy)
        except FileNotFoundError:
            raise RequestError(f"{folder} holds no features; capture them first") from None
        each = 3 + len(manifest["taps"])
        if any(len(one) != each for shard in manifest["shards"] for one in shard["sequences"]):
            raise OutpaceError(f"{path} is corrupt (a sequence has not {each} numbers); {remedy}")
        return cls(folder, manifest)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def check(self, target: Target) -> None:
        """Raise ModelError unless the features are of this target."""
        mine = self._manifest["target"]
        if mine["digest"] != target.digest or self.hidden_size != target.hidden_size:
            raise ModelError(
                f"{self.folder} holds features of {mine['name']} ({mine['digest'][:12]}, width "
                f"{self.hidden_size}), not of {target.name} ({target.digest[:12]}, width "
                f"{target.hidden_size}); delete it or give another folder"
            )

    def read(self, number: int, length: int, tap: str) -> Tensor:
        """Features bfloat16 [length, H] of the first tokens of the sequence so numbered.

        Raises:
            RequestError: no such tap, or no such sequence.
            OutpaceError: the shard is missing or damaged, named.
        """
        place = self._places.get(number)
        if place is None or tap not in self.taps or length > place.length:
            raise RequestError(
                f"{self.folder} has no {length} rows of {tap} for sequence {number}; capture "
                "features of all tokens"
            )
        row = 2 * self.hidden_size
        key = number, tap
        # All of a sequence is read once, to compare its checksum; later as much as is asked for.
        rows = length if key in self._checked else place.length
        path = self.folder / place.file
        try:
            with path.open("rb", buffering=0) as file:
                begin, size = self._begin(place.file, tap) + place.start * row, path.stat().st_size
                data = bytearray(rows * row if begin + place.length * row <= size else 0)
                file.seek(min(begin, size))
                read = file.readinto(data) if data else None
        except FileNotFoundError:
            raise _corrupt(path, "it is missing") from None
        wrong = read != len(data)
        if key not in self._checked:
            wrong = wrong or zlib.crc32(data) != place.checksums[self.taps.index(tap)]
        if wrong:
            raise _corrupt(path, "its checksum is not the manifest's")
        self._checked.add(key)
        return torch.frombuffer(data, dtype=torch.bfloat16).view(rows, self.hidden_size)[:length]

    def add(self, part: Sequence[tuple[int, Mapping[str, Tensor]]]) -> None:
        """Write one shard of (number, tap -> bfloat16 [T, H]); it stays once this returns."""
        name = f"features-{len(self._manifest['shards']):05d}.safetensors"
        sequences, start = [], 0
        for number, feature in part:
            sums = [zlib.crc32(_raw(feature[tap])) for tap in self.taps]
            length = len(feature[self.taps[0]])
            sequences.append([number, start, length, *sums])
            start += length
        data = save({tap: torch.cat([feature[tap] for _, feature in part]) for tap in self.taps})
        write_whole(self.folder / name, data)
        shard = {"file": name, "bytes": len(data), "sequences": sequences}
        self._manifest["shards"].append(shard)
        self._write_manifest()
        self._learn(shard)

    def _write_manifest(self) -> None:
        text = json.dumps(self._manifest, sort_keys=True)
        write_whole(self.folder / "manifest.json", text)

    def _learn(self, shard: Mapping[str, Any]) -> None:
        for number, start, length, *sums in shard["sequences"]:
            self._places[number] = _Place(shard["file"], start, length, tuple(sums))

    def _begin(self, name: str, tap: str) -> int:
        """Where a tap begins in a shard, bytes."""
        if name not in self._begins:
            path = self.folder / name
            size = next(s["bytes"] for s in self._manifest["shards"] if s["file"] == name)
            try:
                if path.stat().st_size != size:
                    raise ValueError(f"it has {path.stat().st_size} bytes instead of {size}")
                with path.open("rb") as file:
                    head = int.from_bytes(file.read(8), "little")
                    header = parse_json(file.read(min(head, size)))
                begins = {tap: 8 + head + header[tap]["data_offsets"][0] for tap in self.taps}
                if not all(type(one) is int and 0 <= one <= size for one in begins.values()):
                    raise ValueError("a tensor begins outside of it")
                self._begins[name] = begins
            except FileNotFoundError:
                raise _corrupt(path, "it is missing") from None
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise _corrupt(path, shorten(str(error), 200)) from None
        return self._begins[name][tap]


def folder_for(tokens: Path, taps: Sequence[str]) -> Path:
    """Where the features so named of a token store lie, perhaps among others."""
    for manifest in sorted((tokens / "features").glob("*/manifest.json")):
        if set(taps) <= set(manifest.parent.name.split("+")):
            return manifest.parent
    return tokens / "features" / "+".join(sorted(taps))


def check_disk(folder: Path, needed: int) -> None:
    """Raise RequestError unless so many bytes fit, before any is written."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed * _SPARE > free:
        raise RequestError(
            f"{folder} needs {size_text(needed)} of disk and {size_text(free)} are free; give "
            "--work on a larger disk, or fewer --tokens"
        )


def size_text(size: float) -> str:
    """``4.1 GB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"


def capture(
    target: Target,
    store: TokenStore,
    taps: Sequence[str],
    *,
    rows: int = ROWS,
    shard_bytes: int = SHARD_BYTES,
    say: Say = print,
) -> FeatureStore:
    """Make sure that the features of all sequences are on disk.

    Args:
        target: the model that generated the answers.
        store: sequences; their features go to a folder beside them.
        taps: names, see ``Target.score``.
        rows: tokens of a pass, about.
        shard_bytes: size of a shard, about: what a killed process loses.
        say: receives progress.

    Raises:
        ModelError: no such taps, or another target.
        RequestError: the disk is too small.

    Cost: one pass per ``rows`` tokens that have no features yet.
    """
    store.check(target.name, target.digest)
    target.require(frozenset({TAPS}), "capturing features")
    folder = folder_for(store.folder, taps)
    if (folder / "manifest.json").is_file():
        features = FeatureStore.open(folder)
        features.check(target)
    else:
        features = FeatureStore(
            folder,
            {
                "version": VERSION,
                "target": {"name": target.name, "digest": target.digest},
                "taps": sorted(taps),
                "hidden_size": target.hidden_size,
                "shards": [],
            },
        )
    taps = features.taps  # more than are wanted, where another method wanted more
    missing = [one for one in store if one.number not in features]
    total = sum(len(one.ids) for one in missing)
    per_token = len(taps) * target.hidden_size * 2
    check_disk(folder, total * per_token)
    folder.mkdir(parents=True, exist_ok=True)
    held: list[tuple[int, Mapping[str, Tensor]]] = []
    size = done = 0
    began = told = time.perf_counter()
    for part in _passes(missing, rows):
        for one, feature in zip(part, _score(target, part, taps, rows), strict=True):
            held.append((one.number, feature))
            done += len(one.ids)
            size += len(one.ids) * per_token
        if size >= shard_bytes:
            features.add(held)
            held, size = [], 0
        now = time.perf_counter()
        if now - told > _SAY_EVERY:
            told = now
            say(Tick("capturing", done, total, "tokens", done / (now - began)))
    if held:
        features.add(held)
    return features


def _passes(sequences: Sequence[TokenSequence], rows: int) -> Iterator[list[TokenSequence]]:
    """Sequences that share a pass, in order; a longer one has passes of its own."""
    part: list[TokenSequence] = []
    for one in sequences:
        if part and sum(len(other.ids) for other in part) + len(one.ids) > rows:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _score(
    target: Target, part: Sequence[TokenSequence], taps: Sequence[str], rows: int
) -> list[dict[str, Tensor]]:
    """Features of the sequences of a pass, or of the passes of one long sequence."""
    cache = target.new_cache(capacity=max(len(one.ids) for one in part))
    slots = [cache.open() for _ in part]
    pieces: list[dict[str, list[Tensor]]] = [{tap: [] for tap in taps} for _ in part]
    for start in range(0, max(len(one.ids) for one in part), rows):
        feeds = [
            Feed.chain(slot, one.ids[start : start + rows].tolist(), want=())
            for slot, one in zip(slots, part, strict=True)
        ]
        scored = target.score(feeds, cache, taps=frozenset(taps))
        for i, (feed, piece) in enumerate(zip(feeds, pieces, strict=True)):
            cache.keep(feed.slot, range(len(feed.token_J)))
            for tap in taps:
                rows_TH = scored.of(i).taps[tap].to("cpu", torch.bfloat16, copy=True)
                if not bool(torch.isfinite(rows_TH).all()):
                    raise ModelError(
                        f"{target.name} gave features {tap} that are not finite for sequence "
                        f"{part[i].number}; load it in float32"
                    )
                piece[tap].append(rows_TH)
    return [{tap: torch.cat(found) for tap, found in piece.items()} for piece in pieces]


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _corrupt(path: Path, why: str) -> OutpaceError:
    return OutpaceError(
        f"feature shard {path} is corrupt: {why}; delete the folder {path.parent}, and its "
        "features are captured anew"
    )
