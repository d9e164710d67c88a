"""What passes showed, until there is time to look: copies of logits, which become distributions later.

A distribution costs a sweep over a row of logits, a quarter of a millisecond for 49152 tokens. A pass has
several such rows, and a copy costs a tenth. So a pass leaves copies here, and they are read when nobody
waits. What waits is bounded, logits and ends of texts: beyond that the oldest is read at once.

Shape letters: R judged tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from outpace.methods.draft_model.online.data import Text, top_laws

MOST = 256
"""Judged tokens that wait at most, and passes and ends of texts: 25 MB for the vocabulary above in
bfloat16."""
READ = 64
"""Judged tokens that are read together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shown:
    logits_RV: Tensor | None
    places: Sequence[tuple[Text, int]]
    """Of every row its text, and the index of the token there."""
    ended: Text | None = None
    """A text of which no more comes."""


class Inbox:
    """Keeps the order in which things came.

    Args:
        dtype: of the model; logits are as exact in it as they were computed.
        collect: is told of every text that has got distributions, and whether it has ended.
    """

    def __init__(self, top: int, dtype: torch.dtype, collect: Callable[[Text, bool], None]) -> None:
        self._top, self._dtype, self._collect = top, dtype, collect
        self._shown: deque[_Shown] = deque()
        self._rows = 0

    def __bool__(self) -> bool:
        return bool(self._shown)

    def put(self, rows_V: Sequence[Tensor], places: Sequence[tuple[Text, int]]) -> None:
        """Copy the logits of some tokens, each with its text and its index there."""
        self._add(_Shown(torch.stack(list(rows_V)).to(self._dtype), places))

    def end(self, text: Text) -> None:
        """Note that no more comes of a text."""
        self._add(_Shown(None, (), text))

    def _add(self, one: _Shown) -> None:
        self._shown.append(one)
        self._rows += len(one.places)
        while self._rows > MOST or len(self._shown) > MOST:
            self.read()

    def read(self) -> None:
        """Turn the oldest logits into distributions. Cost: a sweep over ``READ`` rows, one host sync."""
        taken: list[_Shown] = []
        while self._shown and sum(len(one.places) for one in taken) < READ:
            taken.append(self._shown.popleft())
        logits = [one.logits_RV for one in taken if one.logits_RV is not None]
        laws = zip(*top_laws(torch.cat(logits), self._top), strict=True) if logits else iter(())
        for one in taken:
            own = islice(laws, len(one.places))
            for (text, place), (id_K, p_K) in zip(one.places, own, strict=True):
                text.marks.add(place, id_K, p_K)
                self._collect(text, False)
            if one.ended is not None:
                self._collect(one.ended, True)
            self._rows -= len(one.places)

    def clear(self) -> None:
        self._shown.clear()
        self._rows = 0
