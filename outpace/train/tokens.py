"""Sequences of token ids on disk: prompts with the answers that the target gave to them.

A store is a folder. `manifest.json` says what is in it and names its shards, with digests of them and
of itself. A shard that the manifest does not name does not count. Both are written beside their place
and then renamed. So a process may be killed at any time. It loses what it had not yet appended, never
what it had.

Shape letters: S sequences, T tokens of all of them, N = S + 1.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from outpace.errors import ModelError, OutpaceError, RequestError, shown
from outpace.files import write_whole
from outpace.train.manifest import SHARD, read_manifest

VERSION = 2
"""Of the layout; stores of another are refused."""
FEATURES = "features"
"""Folder in that of a store, of what was computed from its sequences."""
HELD_OUT_SHARE = 0.03
"""Of the prompts, kept from training to measure with."""
_FORM = {
    "target": {"name": str, "digest": str, "vocab_size": int},
    "about": {"plans?": [{"plan": dict, "sources?": [dict]}]},
    "counts": {},
    "shards": [{"file": SHARD, "sequences": int, "sha256": str}],
}
"""What the manifest has to hold."""
GIVEN = -1.0
"""Temperature of a sequence that nobody generated: a text to learn as it stands."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenSequence:
    number: int
    """Unique in its store; says which prompt and which coins it came from."""
    ids: NDArray[np.int32]
    """Prompt, then answer."""
    prompt: int
    """Tokens of the prompt; 0: all of it is text to learn."""
    temperature: float
    """The answer was sampled at; 0 is greedy, GIVEN is not sampled at all."""

    def beginning(self, length: int) -> TokenSequence:
        return replace(self, ids=self.ids[:length])


class TokenStore:
    """Sequences in the order of their numbers, all in memory (4 bytes a token)."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Use ``create`` or ``open``."""
        self.folder = folder
        self._manifest = manifest
        self._load()

    @classmethod
    def create(
        cls, folder: Path, *, target: str, digest: str, vocab_size: int, about: Mapping[str, Any]
    ) -> TokenStore:
        """Make an empty store, or open the one that is there if it is of the same target.

        Args:
            target: name of the model that answers.
            about: whatever else the manifest should tell: command, sources, sampling settings.

        Raises:
            ModelError: the folder holds sequences of another target.
            OutpaceError: it holds a damaged store.
        """
        if (folder / "manifest.json").is_file():
            store = cls.open(folder)
            store.check(target, digest)
            return store
        folder.mkdir(parents=True, exist_ok=True)
        # Of sequences that are gone; those to come will have their numbers.
        shutil.rmtree(folder / FEATURES, ignore_errors=True)
        manifest = {
            "version": VERSION,
            "target": {"name": target, "digest": digest, "vocab_size": vocab_size},
            "about": dict(about),
            "counts": {},
            "shards": [],
        }
        store = cls(folder, manifest)
        store._write_manifest()
        return store

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Read a store.

        Raises:
            RequestError: no store there.
            OutpaceError: a file of it is missing or damaged, named.
        """
        path = folder / "manifest.json"
        try:
            manifest = read_manifest(path, VERSION, _FORM, f"delete {folder} and generate anew")
        except FileNotFoundError:
            raise RequestError(
                f"{folder} holds no manifest.json; give a folder of generated tokens"
            ) from None
        said = manifest.pop("sha256", None)  # stores of earlier releases have none
        if said not in (None, _digest(_as_text(manifest).encode())):
            raise OutpaceError(
                f"{path} is corrupt (its sha256 is not its content's); delete {folder} and generate anew"
            )
        for count in manifest["counts"].values():
            if type(count) is not int:
                raise OutpaceError(
                    f"{path} is corrupt (counts holds {shown(count)}); delete {folder} and generate anew"
                )
        return cls(folder, manifest)

    def check(self, target: str, digest: str) -> None:
        """Raise ModelError unless the sequences are of this target."""
        mine = self._manifest["target"]
        if mine["digest"] != digest:
            raise ModelError(
                f"{self.folder} holds answers of {mine['name']} ({mine['digest'][:12]}), not of "
                f"{target} ({digest[:12]}); give another folder"
            )

    def append(self, sequences: Sequence[TokenSequence], about: Mapping[str, Any]) -> None:
        """Write one shard; once this returns it will not be lost.

        Args:
            sequences: with numbers that the store does not have yet.
            about: entries of the manifest's ``counts`` to add to, such as tokens that were cut.

        Raises:
            OSError: the disk is full; the store is as before.
            OutpaceError: a number is there already; nothing is written.
        """
        if not sequences:
            return
        numbers = [one.number for one in sequences]
        if len(set(numbers)) < len(numbers) or np.isin(numbers, self.number_S).any():
            raise OutpaceError(f"{self.folder} would hold a sequence twice: {sorted(numbers)[:9]}")
        name = f"tokens-{len(self._manifest['shards']):05d}.safetensors"
        ends = np.cumsum([0, *(len(one.ids) for one in sequences)])
        data = save(
            {
                "token_T": torch.from_numpy(np.concatenate([one.ids for one in sequences])),
                "start_N": torch.from_numpy(ends),
                "prompt_S": torch.tensor([one.prompt for one in sequences], dtype=torch.int32),
                "number_S": torch.tensor(numbers),
                "temperature_S": torch.tensor([one.temperature for one in sequences]),
            }
        )
        write_whole(self.folder / name, data)
        answer = int(ends[-1]) - sum(one.prompt for one in sequences)
        counts = self._manifest["counts"]
        for key, more in (
            ("sequences", len(sequences)),
            ("tokens", int(ends[-1])),
            ("answer_tokens", answer),
            *about.items(),
        ):
            counts[key] = counts.get(key, 0) + more
        self._manifest["shards"].append({"file": name, "sequences": len(sequences), "sha256": _digest(data)})
        self._write_manifest()
        self._load(since=len(self._manifest["shards"]) - 1)

    def note(self, **about: Any) -> None:
        """Change entries of the manifest's ``about``."""
        self._manifest["about"].update(about)
        self._write_manifest()

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What `manifest.json` holds; not to be changed."""
        return self._manifest

    @property
    def digest(self) -> str:
        """Of the contents: what a drafter's provenance names."""
        shards = ",".join(shard["sha256"] for shard in self._manifest["shards"])
        return hashlib.sha256(shards.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.number_S)

    def __getitem__(self, index: int) -> TokenSequence:
        start = self._start_S[index]
        return TokenSequence(
            number=int(self.number_S[index]),
            ids=self._token_T[start : start + self.length_S[index]],
            prompt=int(self.prompt_S[index]),
            temperature=float(self.temperature_S[index]),
        )

    def __iter__(self) -> Iterator[TokenSequence]:
        return (self[index] for index in range(len(self)))

    @property
    def answer_tokens(self) -> int:
        """Tokens that were generated, or are text to learn."""
        return int((self.length_S - self.prompt_S).sum())

    def _load(self, since: int = 0) -> None:
        """Read shards, and put all sequences in the order of their numbers."""
        if since == 0:
            self._token_T: NDArray[np.int32] = np.empty(0, np.int32)
            self._start_S: NDArray[np.int64] = np.empty(0, np.int64)
            self.length_S: NDArray[np.int64] = np.empty(0, np.int64)
            """Tokens of every sequence, prompt included."""
            self.prompt_S: NDArray[np.int64] = np.empty(0, np.int64)
            self.number_S: NDArray[np.int64] = np.empty(0, np.int64)
            self.temperature_S: NDArray[np.float32] = np.empty(0, np.float32)
            self.held_out_S: NDArray[np.bool_] = np.empty(0, np.bool_)
            """Which sequences are kept from training."""
        read = [self._read(shard) for shard in self._manifest["shards"][since:]]
        if not read:
            return
        sizes = [len(self._token_T), *(len(one["token_T"]) for one in read)]
        offsets = np.cumsum(sizes)[:-1]
        start_S = [one["start_N"][:-1] + at for one, at in zip(read, offsets, strict=True)]
        held = [_held_out(one) for one in read]
        self._token_T = np.concatenate([self._token_T, *(one["token_T"] for one in read)])
        number_S = np.concatenate([self.number_S, *(one["number_S"] for one in read)])
        order = np.argsort(number_S, kind="stable")
        self.number_S = number_S[order]

        def sorted_(old: NDArray[Any], new: Iterable[NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate([old, *new])[order]

        self._start_S = sorted_(self._start_S, start_S)
        self.length_S = sorted_(self.length_S, (np.diff(one["start_N"]) for one in read))
        self.prompt_S = sorted_(self.prompt_S, (one["prompt_S"] for one in read))
        self.temperature_S = sorted_(self.temperature_S, (one["temperature_S"] for one in read))
        self.held_out_S = sorted_(self.held_out_S, held)

    def _read(self, shard: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        path = self.folder / shard["file"]
        try:
            data = path.read_bytes()
            if _digest(data) != shard["sha256"]:
                raise ValueError("its digest is not the manifest's")
            return {name: tensor.numpy() for name, tensor in load(data).items()}
        except (OSError, ValueError, SafetensorError) as error:
            why = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
            raise OutpaceError(
                f"token shard {path} is corrupt: {why}; delete {self.folder} and generate anew, "
                "or bring the file back"
            ) from None

    def _write_manifest(self) -> None:
        own = _digest(_as_text(self._manifest).encode())
        write_whole(self.folder / "manifest.json", _as_text({**self._manifest, "sha256": own}))


def held_out(ids: Sequence[int] | NDArray[np.int32]) -> bool:
    """Whether a prompt with these tokens is kept from training: by its hash, so for good."""
    data = np.asarray(ids, dtype="<i4").tobytes()
    first = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return first < HELD_OUT_SHARE * 2**64


def _held_out(shard: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Per sequence; of a text without a prompt the whole text is hashed."""
    start_N, token_T = shard["start_N"], shard["token_T"]
    flags = [
        held_out(token_T[a : a + prompt] if prompt else token_T[a:b])
        for a, b, prompt in zip(start_N[:-1], start_N[1:], shard["prompt_S"], strict=True)
    ]
    return np.array(flags, dtype=np.bool_)


def _as_text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1, sort_keys=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
