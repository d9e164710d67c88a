"""Rows in the shapes that a server's passes have: each must be what it is alone, to the last bit.

    steps    1 to max_batch sequences, plain, with chains and with trees of guesses; their texts
             end on both sides of the edges of a page
    prompts  read in pieces around a page, a chunk and all the chunks of a pass, alone, beside
             another prompt, and behind a page that was copied

Every row is compared with the same row in a pass of its own. If all are equal, an answer of the
server is the answer that its request would get alone, whoever else is served.

Shape letters: V vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.cache.base import PAGE, KVCache, shared_prefix
from outpace.models.base import TAPS, TREE, Target
from outpace.types import Feed

_TAP = "hidden.-1"
_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
"""Rows of one sequence, and sequences of a batch: on both sides of what kernels like."""
_GUESSES = (0, 1, 3, 4, 7, 15, 2)
_TREE = (-1, -1, 0, 0, 1, 2)
"""Parents of a tree's guesses; 0, 2 and 5 follow the text, the others leave it."""
_ON_TEXT = {0: 1, 2: 2, 5: 3}

Ids = tuple[int, ...]
_Outputs = tuple[Tensor | None, Tensor | None]  # logits [V], features [H]


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What the shapes of a server's passes follow from."""

    chunk: int
    """Prompt tokens that are read between two steps."""
    max_batch: int
    chunks: int = 4
    """Chunks in one pass while nobody decodes."""
    page: int = PAGE


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that is not what it is alone."""

    shape: str
    sequence: int
    """Which sequence of the pass."""
    position: int
    """Of the row's token in its text."""
    gap: float
    """Largest difference of a logit; where logits are equal, of a feature."""


@dataclass(slots=True)
class RowTally:
    """How many rows were compared, and how many differed."""

    passes: int = 0
    rows: int = 0
    different: int = 0
    first: RowDifference | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeReport:
    """Whether rows are independent in the shapes of a server."""

    serving: Serving
    steps: RowTally
    prompts: RowTally

    @property
    def broken(self) -> list[str]:
        """What does not hold, a line each."""
        lines = []
        for name, tally in (("steps", self.steps), ("prompts", self.prompts)):
            if tally.first is not None:
                one = tally.first
                lines.append(
                    f"shapes: {tally.different} of {tally.rows} rows of {name} are not what they "
                    f"are alone; first: {one.shape}, sequence {one.sequence}, position "
                    f"{one.position}, off by {one.gap:.3g}"
                )
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.serving),
            "steps": dataclasses.asdict(self.steps),
            "prompts": dataclasses.asdict(self.prompts),
        }


def check_shapes(
    target: Target, serving: Serving, tick: Callable[[str, int], None] = lambda part, done: None
) -> ShapeReport:
    """Compare rows of passes as a server runs them with rows that run alone.

    Args:
        tick: told what is under way, and how many of ``parts_of`` are done since the last call.

    Cost: a pass over one row for every token of two texts (some 800 with the usual chunk), and
    the passes that are checked.
    """
    check = _Check(target, serving)
    with torch.inference_mode():
        for size, pattern in _batches(target, serving):
            tick("steps", 0)
            if pattern == "rows":
                check.chains(size)
            else:
                check.step(size, pattern)
            tick("steps", 1)
        for size, way in _readings(target, serving):
            tick("prompts", 0)
            check.read(size, way)
            tick("prompts", 1)
    return ShapeReport(serving=serving, steps=check.steps, prompts=check.prompts)


def parts_of(target: Target, serving: Serving) -> int:
    """How many parts ``check_shapes`` has."""
    return len(_batches(target, serving)) + len(_readings(target, serving))


def _batches(target: Target, serving: Serving) -> list[tuple[int, str]]:
    """Sequences of a step, and how they guess; ``rows``: one at a time, with so many rows."""
    sizes = sorted({*(n for n in _SIZES if n <= serving.max_batch), serving.max_batch})
    ways = ["plain", "chains", *(["trees"] if TREE in target.can else [])]
    return [*product(sizes, ways), *((n, "rows") for n in _SIZES)]


def _readings(target: Target, serving: Serving) -> list[tuple[int, str]]:
    """Prompt tokens of a pass, and what is beside or before them."""
    page, chunk, most = serving.page, serving.chunk, serving.chunk * serving.chunks
    sizes = {page - 1, page, page + 1, chunk // 2, chunk - 1, chunk, most - 1, most}
    sizes = {n for n in sizes if 0 < n <= min(most, _longest(target, serving))}
    ways = ["alone", "beside another"]
    if target.new_cache().copies:
        ways.append("behind a copied page")
    return list(product(sorted(sizes), ways))


def _longest(target: Target, serving: Serving) -> int:
    """Tokens of the long text: all the chunks of a pass and the row behind them."""
    return min(serving.chunk * serving.chunks + 1, target.max_positions)


class _Alone:
    """Rows in passes of their own.

    Args:
        texts: whose rows are read at once.
        near: logits are kept of rows within so many tokens.
    """

    def __init__(self, target: Target, texts: Sequence[Ids], near: int) -> None:
        self._target, self._near, self._rows = target, near, dict[Ids, _Outputs]()
        self._cache = target.new_cache()
        self._slots = {text: self._cache.open() for text in texts}
        for text, slot in self._slots.items():
            self._read(slot, text)

    def row(self, ids: Ids) -> _Outputs:
        """What the last of these tokens gives."""
        if ids not in self._rows:
            slot = self._cache.open()
            held = max(shared_prefix(ids, text) for text in self._slots)
            self.copy(ids[:held], self._cache, slot, piece=1)
            self._read(slot, ids)
            self._cache.close(slot)
        return self._rows[ids]

    def copy(self, ids: Ids, cache: KVCache, slot: int, piece: int = PAGE) -> None:
        """Put the beginning of a text into an empty slot, with the keys that it has here. Where
        they cannot be copied it is read, alone, in pieces.
        """
        if cache.copies and ids:
            own = next(slot for text, slot in self._slots.items() if text[: len(ids)] == ids)
            cache.restore(slot, ids, [self._cache.copy(own, 0, len(ids))])
            return
        for start in range(0, len(ids), piece):
            part = ids[start : start + piece]
            self._target.score([Feed.chain(slot, part, want=())], cache)
            cache.keep(slot, range(len(part)))

    def _read(self, slot: int, ids: Ids) -> None:
        for end in range(self._cache.length(slot) + 1, len(ids) + 1):
            want = (0,) if end <= self._near else ()
            feed = Feed.chain(slot, ids[end - 1 : end], want=want)
            self._rows[ids[:end]] = _rows(self._target, [feed], self._cache)[0][0]
            self._cache.keep(slot, [0])


def _rows(target: Target, feeds: Sequence[Feed], cache: KVCache) -> list[list[_Outputs]]:
    """Run a pass; per feed its rows, with the logits that were wanted."""
    tapped = TAPS in target.can
    if not tapped:  # then logits must tell
        feeds = [dataclasses.replace(feed, want=None) for feed in feeds]
    scored = target.score(feeds, cache, taps=frozenset({_TAP}) if tapped else frozenset())
    out = []
    for i, feed in enumerate(feeds):
        part, count = scored.of(i), len(feed.token_J)
        want = range(count) if feed.want is None else feed.want
        logits = dict(zip(want, part.logits_TV.clone(), strict=True))
        hidden = part.taps[_TAP].clone() if tapped else [None] * count
        out.append([(logits.get(n), hidden[n]) for n in range(count)])
    return out


class _Check:
    """The texts, their rows alone, and what was found."""

    def __init__(self, target: Target, serving: Serving) -> None:
        self.target, self.serving = target, serving
        page = serving.page
        edges = (4, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1)
        room = target.max_positions - max(_SIZES)
        self.contexts = [n for n in edges if 0 < n <= room] or [1]
        near = max(self.contexts) + max(_SIZES)
        draw = np.random.default_rng(0).integers
        lengths = (max(near, _longest(target, serving)), near)
        self.texts: list[Ids] = [tuple(draw(0, target.vocab_size, n).tolist()) for n in lengths]
        self.alone = _Alone(target, self.texts, near)
        self.steps, self.prompts = RowTally(), RowTally()
        self._batch, self._turn = target.new_cache(), 0
        self._slots: list[tuple[int, Ids, int]] = []
        """Slot, text, committed tokens of it."""
        for i in range(max(serving.max_batch, 2 * len(self.contexts))):
            text, held = self.texts[i % 2], self.contexts[i % len(self.contexts)]
            self._slots.append((self._batch.open(), text, held))
            self.alone.copy(text[:held], self._batch, self._slots[-1][0])

    def step(self, size: int, pattern: str) -> None:
        """Check one step of some sequences, other ones every time."""
        self._turn += 1
        first = self._turn % (len(self._slots) - size + 1)
        rows = []
        for i, (slot, text, held) in enumerate(self._slots[first : first + size]):
            if pattern == "trees" and i % 3 != 1:
                rows.append(_branching(slot, text, held, self.target.vocab_size))
            else:
                more = 0 if pattern == "plain" else _GUESSES[i % len(_GUESSES)]
                rows.append(_chain(slot, text, held, more))
        self._step(f"{size} sequences, {pattern}", rows)

    def chains(self, size: int) -> None:
        """Check steps of single sequences with so many rows, at every edge."""
        for slot, text, held in self._slots[: 2 * len(self.contexts)]:
            self._step(f"{size} rows", [_chain(slot, text, held, size - 1)])

    def _step(self, shape: str, rows: Sequence[tuple[Feed, list[Ids]]]) -> None:
        found = _rows(self.target, [feed for feed, _ in rows], self._batch)
        for feed, _ in rows:
            self._batch.drop(feed.slot)
        self._compare(self.steps, shape, found, [paths for _, paths in rows])

    def read(self, size: int, way: str) -> None:
        """Check the reading of a prompt, piece by piece."""
        most, cache = self.serving.chunk * self.serving.chunks, self.target.new_cache()
        texts = self.texts if way == "beside another" else self.texts[:1]
        slots = [cache.open() for _ in texts]
        if way == "behind a copied page":
            self.alone.copy(texts[0][: self.serving.page], cache, slots[0])
        for cuts in _pieces(texts, [cache.length(slot) for slot in slots], size, most):
            feeds, paths = [], []
            for slot, text, piece in zip(slots, texts, cuts, strict=True):
                if piece:
                    ends = piece.stop == len(text)
                    want = (len(piece) - 1,) if ends else ()
                    feeds.append(Feed.chain(slot, text[piece.start : piece.stop], want=want))
                    paths.append([text[: n + 1] for n in piece])
            found = _rows(self.target, feeds, cache)
            for feed in feeds:
                cache.keep(feed.slot, range(len(feed.token_J)))
            self._compare(self.prompts, f"chunks of {size}, {way}", found, paths)

    def _compare(
        self, tally: RowTally, shape: str, found: list[list[_Outputs]], paths: list[list[Ids]]
    ) -> None:
        tally.passes += 1
        for number, (rows, ids) in enumerate(zip(found, paths, strict=True)):
            for row, path in zip(rows, ids, strict=True):
                tally.rows += 1
                gap = _gap(row, self.alone.row(path))
                if gap is not None:
                    tally.different += 1
                    tally.first = tally.first or RowDifference(shape, number, len(path) - 1, gap)


def _chain(slot: int, text: Ids, held: int, more: int) -> tuple[Feed, list[Ids]]:
    """The token behind the first ``held`` and ``more`` guesses, and the text to each row."""
    feed = Feed.chain(slot, text[held : held + 1 + more])
    return feed, [text[: held + 1 + n] for n in range(1 + more)]


def _branching(slot: int, text: Ids, held: int, vocab: int) -> tuple[Feed, list[Ids]]:
    """The same with a tree of guesses."""
    paths = [text[: held + 1]]
    for node, parent in enumerate(_TREE):
        after = text[held + _ON_TEXT[node]] if node in _ON_TEXT else None
        before = paths[parent + 1]
        if after is None:
            after = (text[len(before)] + 1 + node) % vocab
        paths.append((*before, after))
    tokens = tuple(path[-1] for path in paths)
    return Feed(slot, tokens, (-1, *(parent + 1 for parent in _TREE))), paths


def _pieces(texts: Sequence[Ids], held: Sequence[int], size: int, most: int) -> Iterator[list[range]]:
    """Per pass the positions of each text that it reads: at most ``size``, together ``most``."""
    at = list(held)
    while any(n < len(text) for n, text in zip(at, texts, strict=True)):
        left, cuts = most, []
        for i, text in enumerate(texts):
            count = min(size, left, len(text) - at[i])
            cuts.append(range(at[i], at[i] + count))
            at[i] += count
            left -= count
        yield cuts


def _gap(row: _Outputs, alone: _Outputs) -> float | None:
    """Largest difference of two rows, NaN where one has a NaN alone; None: they are equal."""
    gap = None
    for mine, theirs in zip(row, alone, strict=True):
        if mine is not None and theirs is not None and not torch.equal(mine, theirs):
            gap = gap if gap is not None else float((mine.double() - theirs.double()).abs().max())
    return gap
