"""Batches of stored sequences with their features, the same ones whenever they are asked for.

Which sequences stand in batch ``index`` of an epoch depends on the store, the settings and the
seed alone. So training goes on after a break from two numbers: epoch and index.

Shape letters: B sequences of a batch, T longest of them in tokens, H hidden size.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import RequestError
from outpace.train.repeats import near_duplicates
from outpace.train.tokens import TokenSequence, TokenStore

Split = Literal["train", "held_out"]

_WINDOW = 32  # batches' worth of sequences that are sorted by length together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Some sequences, padded to the longest, with the target's features of their tokens."""

    token_BT: Tensor
    """int64; 0 behind the end of a sequence."""
    length_B: Tensor
    """int64, real tokens of each sequence."""
    answer_BT: Tensor
    """bool: the target generated this token (or it is text to learn), so predicting it counts."""
    feature: Mapping[str, Tensor] = field(default_factory=dict)
    """Tap -> bfloat16 [B, T, H]: row t was computed when token t was fed, so the target's distribution of
    token t + 1 is ``head(feature["hidden.-1"][:, t])``. 0 behind the end. Empty if no tap is
    wanted."""

    @property
    def tokens(self) -> int:
        return int(self.length_B.sum())


class Features(Protocol):
    """Where batches get features; `outpace.train.features.FeatureStore` is one."""

    def padded(self, part: Sequence[TokenSequence], token_BT: Tensor) -> Mapping[str, Tensor]:
        """Features of sequences, or of their beginnings, as a batch carries them.

        Args:
            token_BT: their tokens, padded to the longest.
        """


def padded(found: Sequence[Mapping[str, Tensor]], taps: Sequence[str], length: int) -> dict[str, Tensor]:
    """Features of B texts as a batch carries them: tap -> [B, length, H], 0 behind each end."""
    return {
        tap: torch.stack([F.pad(one[tap], (0, 0, 0, length - len(one[tap]))) for one in found])
        for tap in taps
    }


class Batches:
    """Epochs of batches over one split of a store."""

    def __init__(
        self,
        store: TokenStore,
        tokens_per_batch: int,
        seed: int = 0,
        *,
        split: Split = "train",
        features: Features | None = None,
        taps: Sequence[str] = (),
        max_length: int = 2048,
        rank: int = 0,
        world: int = 1,
        per_step: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """Choose what to iterate over.

        Args:
            tokens_per_batch: most tokens of a batch, padding included.
            seed: of the order; the held-out split always comes in the same order.
            features: where ``taps`` are read; None if there are none.
            taps: names of the features that batches carry.
            rank: of this process, from 0.
            world: processes that share the batches of an epoch; each gets every world-th.
            per_step: batches of a step, in all processes together; None: one of each. An epoch has whole
                steps, and an epoch of the held-out split has them all.
            most_tokens: read no more batches of an epoch than it takes to hold so many; None: all.

        Raises:
            RequestError: no sequence in the split, a size below 1, steps that processes cannot share, or taps
                without features.
        """
        for name, value in (
            ("tokens_per_batch", tokens_per_batch),
            ("max_length", max_length),
            ("world", world),
        ):
            if value < 1:
                raise RequestError(f"{name} must be at least 1, got {value}")
        if not 0 <= rank < world:
            raise RequestError(f"rank must be in 0 to {world - 1}, got {rank}")
        per_step = world if per_step is None else per_step
        if per_step < 1 or per_step % world:
            raise RequestError(
                f"loop.batches must be a multiple of the {world} processes that share them, got {per_step}"
            )
        if taps and features is None:
            raise RequestError(f"taps {', '.join(taps)} are wanted, but there is nothing to compute them")
        learned = split == "train"
        limit = min(max_length, tokens_per_batch)
        self._length_S = np.minimum(store.length_S, limit)
        of_split_S = ~(store.held_out_S | near_duplicates(store)) if learned else store.held_out_S
        # Where a text is cut before its answer, it would cost as much as others and teach nothing.
        self._rows = np.flatnonzero(of_split_S & (self._length_S > store.prompt_S))
        if len(self._rows) == 0:
            raise RequestError(
                f"{store.folder} holds no {'training' if learned else 'held-out'} prompt whose answer begins "
                f"before token {limit}; give more prompts, or more --tokens"
            )
        self.store, self.tokens_per_batch, self.split = store, tokens_per_batch, split
        self.seed, self.taps, self.features = seed, tuple(taps), features
        self.rank, self.world, self.share, self._most = rank, world, per_step // world, most_tokens
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def count(self, epoch: int) -> int:
        """Batches of an epoch for this process: ``share`` for every step, and the same for every rank.

        Of the held-out split those that are left over count too, and one process may have fewer.
        """
        total = len(self._plan(self._folded(epoch)))
        if self.split == "held_out":
            return len(range(self.rank, total, self.world))
        return max(1, total // (self.share * self.world)) * self.share

    def at(self, epoch: int, index: int) -> Batch:
        """One batch, read from disk.

        Raises:
            IndexError: ``index`` is not below ``count(epoch)``.
        """
        if not 0 <= index < self.count(epoch):
            raise IndexError(f"epoch {epoch} has {self.count(epoch)} batches, got {index}")
        plan = self._plan(self._folded(epoch))
        return self._read(plan[(index * self.world + self.rank) % len(plan)])

    def since(self, epoch: int = 0, index: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """(epoch, index, batch) from there on, without end; to go on after it, add 1 to index."""
        while True:
            if index >= self.count(epoch):
                epoch, index = epoch + 1, 0
            yield epoch, index, self.at(epoch, index)
            index += 1

    def __iter__(self) -> Iterator[Batch]:
        return (self.at(0, index) for index in range(self.count(0)))

    @property
    def tokens(self) -> int:
        return int(self._length_S[self._rows].sum())

    @property
    def texts(self) -> list[TokenSequence]:
        """What an epoch reads, in the order of the store."""
        return [self.store[row].beginning(int(self._length_S[row])) for row in self._rows.tolist()]

    def _folded(self, epoch: int) -> int:
        return 0 if self.split == "held_out" else epoch

    def _make_plan(self, epoch: int) -> list[tuple[int, ...]]:
        """Sequences of every batch: alike in length, in an order that length does not tell."""
        coins = np.random.default_rng(_entropy(self.seed if self.split == "train" else 0, epoch))
        order = coins.permutation(self._rows)
        mean = max(1.0, float(self._length_S[self._rows].mean()))
        window = max(1, int(_WINDOW * self.tokens_per_batch / mean))
        batches: list[tuple[int, ...]] = []
        for first in range(0, len(order), window):
            part = order[first : first + window]
            part = part[np.argsort(self._length_S[part], kind="stable")]
            open_: list[int] = []
            for row in part.tolist():
                if open_ and (len(open_) + 1) * self._length_S[row] > self.tokens_per_batch:
                    batches.append(tuple(open_))
                    open_ = []
                open_.append(row)
            batches.append(tuple(open_))
        plan = [batches[i] for i in coins.permutation(len(batches)).tolist()]
        if self._most is None:
            return plan
        read = np.cumsum([int(self._length_S[list(rows)].sum()) for rows in plan])
        return plan[: int(np.searchsorted(read, self._most)) + 1]

    def _read(self, rows: tuple[int, ...]) -> Batch:
        lengths = [int(self._length_S[row]) for row in rows]
        longest = max(lengths)
        token_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
        answer_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
        part = [self.store[row].beginning(length) for row, length in zip(rows, lengths, strict=True)]
        for i, one in enumerate(part):
            token_BT[i, : len(one.ids)] = torch.from_numpy(one.ids.astype(np.int64))
            answer_BT[i, one.prompt : len(one.ids)] = True
        feature: Mapping[str, Tensor] = {}
        if self.features is not None and self.taps:
            feature = self.features.padded(part, token_BT)
        return Batch(token_BT=token_BT, length_B=torch.tensor(lengths), answer_BT=answer_BT, feature=feature)


def _entropy(seed: int, epoch: int) -> int:
    digest = hashlib.sha256(f"batches {seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:16], "big")


def seed_of(batch: Batch) -> int:
    """A number made of the batch alone, so that a training draws the same after a break."""
    return zlib.crc32(batch.token_BT.cpu().numpy().tobytes())


def noisy(batch: Batch, taps: Sequence[str], amount: float) -> Batch:
    """The batch with uniform noise on some features, so that a drafter trusts them less.

    Args:
        amount: largest noise, in root mean squares of the feature's rows; 0 leaves the batch as it is.

    Source: Li et al. 2024 (EAGLE), arXiv:2401.15077, which adds up to 0.2 at a scale of the features' own.
    """
    if not amount:
        return batch
    coins = torch.Generator().manual_seed(seed_of(batch))
    feature = dict(batch.feature)
    for tap in dict.fromkeys(taps):
        x_BTH = feature[tap].float()
        noise_BTH = (2 * torch.rand(x_BTH.shape, generator=coins) - 1).to(x_BTH.device)
        size_BT1 = x_BTH.square().mean(-1, keepdim=True).sqrt()
        feature[tap] = (x_BTH + amount * size_BT1 * noise_BTH).to(batch.feature[tap].dtype)
    return replace(batch, feature=feature)
