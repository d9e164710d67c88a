"""Levels of drafts that are chains, one after another in one call of compiled code: see levels.h.

Between two levels of a draft Python would read logits, pick a token, and tell the next pass where its
rows stand. After a pass nothing of that is near the processor, and it takes longer than a level of a
small network. Here it is said once for all levels: a row of a chain sees all rows before it, and stands
one place further.

Shape letters: B sequences, one row of each per level; L levels, D columns of logits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.kernels.compiled import library
from outpace.models.attention import HeadShape
from outpace.models.fused import View, tell
from outpace.models.operations import Call
from outpace.models.rope import Rotation


class Start(NamedTuple):
    """The rows of the first level; of the second, where the first one is a pass of its own."""

    cache: DenseCache
    """Keys and values; room for the rows of all levels is reserved."""
    slot_B: Sequence[int]
    row_B: Sequence[int]
    """Storage rows."""
    position_B: Sequence[int]
    id_B: Sequence[int]
    """None where the level before picks them."""
    offset_B: Sequence[int]
    """Positions of the first rows of the slots."""


class Ran(Protocol):
    """What levels gave."""

    @property
    def levels(self) -> int:
        """How many were run."""


Answer = TypeVar("Answer", bound=Ran, covariant=True)


class Asked(Protocol[Answer]):
    """What levels are run for."""

    @property
    def levels(self) -> int: ...
    @property
    def rows(self) -> int:
        """Most rows of a level."""

    @property
    def seats(self) -> int:
        """Most rows of a slot behind those of the first level."""

    def run(self, level: Level, start: Start, id_D: Tensor | None, width: int) -> Answer:
        """Run levels, with tokens and the number of columns of logits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Picks:
    """How a token is picked from each row of logits."""

    levels: int
    temperature_B: Sequence[float]
    """0: the likeliest token; above: a draw from the softmax at this temperature."""
    coin_LB: Sequence[float] = ()
    """Of draws, level by level."""
    key_LB: Sequence[int] | None = None
    """Draws are races with these keys, and there are no coins."""

    @property
    def rows(self) -> int:
        """Of a level."""
        return len(self.temperature_B)

    @property
    def seats(self) -> int:
        """Rows of a slot that it takes."""
        return self.levels

    def run(self, level: Level, start: Start, id_D: Tensor | None, width: int) -> Found:
        """See ``run_levels``."""
        return run_levels(level, start, self, id_D, width)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The tokens of as many levels as have one for every sequence."""

    levels: int
    token_LB: Sequence[int] = ()
    """Level by level, as their probabilities."""
    prob_LB: Sequence[float] = ()
    law_LBD: Tensor | None = None
    """The distributions of those that were drawn; None: nothing was drawn."""


@dataclass(kw_only=True, slots=True, eq=False)
class Level:
    """A pass over one row per sequence, which is run again and again."""

    call: Call
    """All but the ids, and what rows see."""
    address: ctypes.Array[ctypes.c_void_p]
    """Of every buffer; a call changes them."""
    lent: int
    given: int
    """What a level gives in one buffer, the next one finds in the other; ``NONE``: nothing."""
    bytes: int
    """Of what it gives; levels follow each other in memory."""
    counts: int
    """Of rows, that the call has."""
    head: int
    out: int
    """Buffers of queries, keys and values, and of what attention gives."""
    logits: int
    """Address."""
    columns: int
    """Numbers of a row of logits."""
    heads: HeadShape
    views: list[View]
    """One per window, as its operations number them."""
    windows: Sequence[int | None]
    turns: Sequence[Rotation]
    """Rotary tables, likewise."""
    first: Call | None = None
    """Of the first level, which gives what the second one finds; None: the same."""
    memory: dict[Hashable, Any] = field(default_factory=dict)
    """What those who run it keep for the next time."""
    held: Any = ()
    """What the call reads."""


class _Levels(ctypes.Structure):
    """``Levels`` of levels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("program", "first")),
        *((name, ctypes.c_int64) for name in "passes rows levels lent given bytes".split()),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in "width stride races".split()),
        *(
            (name, ctypes.c_void_p)
            for name in "window look position column temperature coin key found prob law".split()
        ),
    ]


_NO_IDS: Tensor | None = None


class _Memory:
    """What a run of so many levels over so many rows reads and writes, and tells."""

    def __init__(self, level: Level, rows: int, levels: int) -> None:
        size = rows * levels
        self.position, self.ids, self.found = (array("q", bytes(8 * n)) for n in (rows, rows, size))
        self.temperature, self.coin = array("d", bytes(8 * rows)), array("d", bytes(8 * size))
        self.prob, self.key = array("f", bytes(4 * size)), array("Q", bytes(8 * size))
        self.window, self.id_D = array("q", [one or 0 for one in level.windows]), _NO_IDS
        names = "position window temperature coin key found prob".split()
        self.whole = _Levels(
            program=ctypes.addressof(level.call),
            passes=len(level.views),
            rows=rows,
            levels=levels,
            lent=level.lent,
            given=level.given,
            bytes=level.bytes,
            stride=level.columns,
            **{name: getattr(self, name).buffer_info()[0] for name in names},
        )


def run_levels(level: Level, start: Start, picks: Picks, id_D: Tensor | None, width: int) -> Found:
    """Run levels, as many as have a token for every sequence.

    Args:
        id_D: tokens of the columns of logits; None: their places.
        width: how many columns count, from the first one on.
    """
    code, call, rows, levels = library(), level.call, len(start.slot_B), picks.levels
    assert code is not None
    memory: _Memory | None = level.memory.get((rows, levels))
    if memory is None:
        memory = level.memory[rows, levels] = _Memory(level, rows, levels)
    whole, position = memory.whole, memory.position
    position[:] = array("q", start.position_B)
    head, out = level.address[level.head] or 0, level.address[level.out] or 0
    for view in level.views:
        view.follow(start.cache, start.slot_B, start.row_B, head, out, levels)
    tell(call, level.heads, start.cache, level.views, level.turns, position, max(position) + levels)
    if start.id_B:
        memory.ids[:] = array("q", start.id_B)
    drawn, law_LBD = any(picks.temperature_B), None
    memory.temperature[:] = array("d", picks.temperature_B)
    if drawn:
        law_LBD = torch.empty(levels, rows, width)
        if picks.key_LB is None:
            memory.coin[:] = array("d", picks.coin_LB)
        else:
            memory.key[:] = array("Q", picks.key_LB)
    whole.first = None if level.first is None else ctypes.addressof(level.first)
    whole.logits, whole.width, whole.races = level.logits, width, picks.key_LB is not None
    whole.look = level.views[0].looks.buffer_info()[0]
    if memory.id_D is not id_D:
        assert id_D is None or id_D.is_contiguous()
        memory.id_D, whole.column = id_D, None if id_D is None else id_D.data_ptr()
    whole.law = None if law_LBD is None else law_LBD.data_ptr()
    call.ids = memory.ids.buffer_info()[0]
    done = code.outpace_levels(ctypes.byref(whole))
    return Found(done, memory.found.tolist(), memory.prob.tolist(), law_LBD)
