"""Features of stored sequences: what the target computed at every token of them.

A pass of the target computes them when a batch first needs them. Where training reads all of them, they are
computed before the first step. They stay on disk in bfloat16 while they have room there, in shards of about
64 MB. The rest is computed again whenever it is needed. Answers to one prompt that are asked for together
share its rows:

    features/<taps>/features-00000.safetensors    one [rows, H] tensor per tap
    features/<taps>/manifest.json                 which sequence begins at which row of which shard

Shape letters: T rows of a sequence or of a shard, H hidden size.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from outpace.errors import ModelError, OutpaceError, shorten
from outpace.files import parse_json, write_whole
from outpace.models.base import Target
from outpace.train.batches import padded
from outpace.train.capture import KV, alike, compute, needed, passes, width_of
from outpace.train.manifest import SHARD, read_manifest
from outpace.train.progress import Reporter, Say
from outpace.train.text_net import TextNet
from outpace.train.tokens import FEATURES, TokenSequence

VERSION = 2
_FORM = {
    "target": {"name": str, "digest": str},
    "taps": [str],
    "hidden_size": int,
    "shards": [{"file": SHARD, "bytes": int, "sequences": [[int]]}],
}
"""What the manifest has to hold."""
SHARD_BYTES = 64 << 20
_SPARE = 1 << 30  # bytes of the disk that features leave free
_FEW = 64  # texts computed together, in order


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the features of a sequence lie."""

    file: str
    start: int
    """First row of its own."""
    length: int
    """Rows of its own."""
    of: int
    """Number of the sequence whose first rows are also those of this one ..."""
    shared: int
    """... and how many they are."""
    checksums: tuple[int, ...]
    """CRC-32 of its own rows, per tap."""

    @property
    def whole(self) -> int:
        return self.shared + self.length


class FeatureStore:
    """Features of the sequences of one token store, computed at first use.

    Files are read with plain reads, not mapped: mapped pages would count as this process's memory
    until the system is short of it.
    """

    def __init__(
        self, target: Target, tokens: Path, taps: Sequence[str], room: int, net: TextNet | None = None
    ) -> None:
        """Open what is there; nothing is computed yet.

        Args:
            target: the model that generated the answers.
            tokens: folder of the token store; features lie beside its shards.
            taps: names, see ``Target.score``. Where another method kept more taps, those are used.
            room: bytes of disk that they may have in all; the disk keeps 1 GiB free. 0 keeps none.
            net: computes what batches want anew, whatever is kept: on a GPU that is sooner than to read it.

        Raises:
            ModelError: the target gives no taps, or the folder holds those of another target.
            OutpaceError: its manifest is damaged.
        """
        target.require(needed(taps), "training on features")
        self.target, self.room, self.wanted = target, room, tuple(taps)
        self._net = None if any(tap.startswith(KV) for tap in taps) else net
        self.folder = folder_for(tokens, taps)
        self._manifest = _read_manifest(self.folder, target) or {
            "version": VERSION,
            "target": {"name": target.name, "digest": target.digest},
            "taps": sorted(taps),
            "hidden_size": target.hidden_size,
            "shards": [],
        }
        self.taps: tuple[str, ...] = tuple(self._manifest["taps"])
        self._places: dict[int, _Place] = {}
        for shard in self._manifest["shards"]:
            self._learn(shard)
        self._waiting: dict[int, tuple[list[int], dict[str, Tensor]]] = {}  # for their shard to fill
        self._begins: dict[str, dict[str, int]] = {}
        self._checked: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        return sum(shard["bytes"] for shard in self._manifest["shards"])

    def of(self, part: Sequence[TokenSequence]) -> list[Mapping[str, Tensor]]:
        """Features of sequences, or of their beginnings: tap -> bfloat16 [T, H] each.

        Raises:
            ModelError: features that are not finite.
            OutpaceError: a shard is missing or damaged, named.
            OSError: the disk is full; what was kept before stays.

        Cost: a read for each that is kept; for the others one pass per ``ROWS`` tokens.
        """
        fresh = self.ensure(part)
        out: list[Mapping[str, Tensor]] = []
        for one in part:
            found = fresh.get(one.number) or self._waiting.get(one.number, ((), None))[1]
            length = len(one.ids)
            out.append(
                {
                    tap: self._read(one.number, length, tap) if found is None else found[tap][:length]
                    for tap in self.wanted
                }
            )
        return out

    def padded(self, part: Sequence[TokenSequence], token_BT: Tensor) -> Mapping[str, Tensor]:
        """Features of sequences as a batch carries them: tap -> bfloat16 [B, T, H], 0 behind each end.

        Args:
            token_BT: their tokens, padded to the longest.
        """
        if self._net is None:
            return padded(self.of(part), self.wanted, token_BT.shape[1])
        return self._net.features(token_BT, torch.tensor([len(one.ids) for one in part]), self.wanted)

    def ensure(self, part: Sequence[TokenSequence]) -> Mapping[int, Mapping[str, Tensor]]:
        """Compute what is missing, and keep it where there is room; gives what was computed, by number.

        Raises:
            ModelError: features that are not finite.
        """
        missing = [one for one in part if not self._has(one)]
        computed = compute(self.target, [one.ids.tolist() for one in missing], self.taps)
        fresh = {one.number: found for one, found in zip(missing, computed, strict=True)}
        # What is on disk for a shorter part of a sequence stays so.
        self._keep([one for one in missing if one.number not in self._places], fresh)
        return fresh

    def fill(self, texts: Sequence[TokenSequence], say: Say) -> None:
        """Compute what is missing of texts in their order, and keep it, as far as there is room.

        In that order, texts that begin alike follow each other.

        Raises:
            ModelError: features that are not finite.
        """
        reporter = Reporter("features", "texts", say)
        missing = [one for one in texts if not self._has(one)]
        try:
            for first in range(0, len(missing), _FEW):
                if not self._fits:
                    return
                self.ensure(missing[first : first + _FEW])
                reporter.late(first + _FEW, len(missing))
        except KeyboardInterrupt:
            self.flush()
            raise
        if missing:
            reporter.now(len(missing), len(missing))

    @property
    def _fits(self) -> bool:
        return self._net is None and self.nbytes + 2 * SHARD_BYTES <= self.room

    def _has(self, one: TokenSequence) -> bool:
        if (waiting := self._waiting.get(one.number)) is not None:
            return len(waiting[0]) >= len(one.ids)
        place = self._places.get(one.number)
        return place is not None and place.whole >= len(one.ids)

    def _keep(self, part: Sequence[TokenSequence], fresh: Mapping[int, dict[str, Tensor]]) -> None:
        if not self._fits:
            return
        for one in part:
            self._waiting[one.number] = one.ids.tolist(), fresh[one.number]
        if sum(_nbytes(found) for _, found in self._waiting.values()) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits for its shard to fill, if the disk has room."""
        held, self._waiting = self._waiting, {}
        numbers, likes = [*held], alike([ids for ids, _ in held.values()])
        own = [
            {tap: found[tap][shared:] for tap in self.taps}
            for (_, found), (_, shared) in zip(held.values(), likes, strict=True)
        ]
        size = sum(_nbytes(found) for found in own)
        there = next(path for path in (self.folder, *self.folder.resolve().parents) if path.exists())
        if not held or shutil.disk_usage(there).free < size + _SPARE:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"features-{len(self._manifest['shards']):05d}.safetensors"
        sequences, start = [], 0
        for number, found, (of, shared) in zip(numbers, own, likes, strict=True):
            sums = [zlib.crc32(_raw(found[tap])) for tap in self.taps]
            length = len(found[self.taps[0]])
            sequences.append([number, start, length, numbers[of], shared, *sums])
            start += length
        data = save({tap: torch.cat([found[tap] for found in own]) for tap in self.taps})
        write_whole(self.folder / name, data)
        shard = {"file": name, "bytes": len(data), "sequences": sequences}
        self._manifest["shards"].append(shard)
        write_whole(self.folder / "manifest.json", json.dumps(self._manifest, sort_keys=True))
        self._learn(shard)

    def _read(self, number: int, length: int, tap: str) -> Tensor:
        """The first rows of a sequence on disk."""
        place = self._places[number]
        if length <= place.shared:
            return self._own(place.of, length, tap)
        own_TH = self._own(number, length - place.shared, tap)
        return torch.cat([self._own(place.of, place.shared, tap), own_TH]) if place.shared else own_TH

    def _own(self, number: int, length: int, tap: str) -> Tensor:
        """The first of the rows that a sequence shares with none before it."""
        place = self._places[number]
        width = width_of(self.target, tap)
        row = 2 * width
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
        return torch.frombuffer(data, dtype=torch.bfloat16).view(rows, width)[:length]

    def _learn(self, shard: Mapping[str, Any]) -> None:
        for number, start, length, of, shared, *sums in shard["sequences"]:
            self._places[number] = _Place(shard["file"], start, length, of, shared, tuple(sums))

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
    for manifest in sorted((tokens / FEATURES).glob("*/manifest.json")):
        if set(taps) <= set(_taps_of(manifest.parent.name)):
            return manifest.parent
    return tokens / FEATURES / _name_of(taps)


def _name_of(taps: Sequence[str]) -> str:
    """A folder's name: the taps, layers of keys and values in runs, since names of files are short."""
    layers = sorted(int(tap.removeprefix(KV)) for tap in taps if tap.startswith(KV))
    firsts = [i for i in layers if i - 1 not in layers]
    lasts = [i for i in layers if i + 1 not in layers]
    runs = [f"{KV}{a}" + f"-{b}" * (a < b) for a, b in zip(firsts, lasts, strict=True)]
    return "+".join([*sorted(passes(taps)), *runs])


def _taps_of(name: str) -> Iterator[str]:
    """The taps that a folder's name tells."""
    for part in name.split("+"):
        first, dash, last = part.removeprefix(KV).partition("-")
        if part.startswith(KV) and dash and first.isdecimal() and last.isdecimal():
            yield from (f"{KV}{i}" for i in range(int(first), int(last) + 1))
        else:
            yield part


def size_text(size: float) -> str:
    """``4.1 GB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"


def _read_manifest(folder: Path, target: Target) -> dict[str, Any] | None:
    path, remedy = folder / "manifest.json", f"delete {folder}, and its features are computed anew"
    try:
        manifest = read_manifest(path, VERSION, _FORM, remedy)
    except FileNotFoundError:
        return None
    each = 5 + len(manifest["taps"])
    if any(len(one) != each for shard in manifest["shards"] for one in shard["sequences"]):
        raise OutpaceError(f"{path} is corrupt (a sequence has not {each} numbers); {remedy}")
    for shard in manifest["shards"]:
        whole: dict[int, int] = {}  # rows of those that share none
        for number, _, length, of, shared, *_ in shard["sequences"]:
            if not (0 <= shared <= whole.get(of, 0) and length > 0):
                raise OutpaceError(f"{path} is corrupt (sequence {number} follows {of}); {remedy}")
            if not shared:
                whole[number] = length
    mine, width = manifest["target"], manifest["hidden_size"]
    if (mine["digest"], width) != (target.digest, target.hidden_size):
        raise ModelError(
            f"{folder} holds features of {mine['name']} ({mine['digest'][:12]}, width {width}), not of "
            f"{target.name} ({target.digest[:12]}, width {target.hidden_size}); "
            "delete it or give another folder"
        )
    return manifest


def _nbytes(found: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in found.values())


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _corrupt(path: Path, why: str) -> OutpaceError:
    return OutpaceError(
        f"feature shard {path} is corrupt: {why}; delete the folder {path.parent}, and its "
        "features are computed anew"
    )
