"""Small networks as lists of operations, each run in one call of compiled code: those of drafters.

A level of a drafter is a dozen operations on a few rows. Called one by one they take longer than
what they compute, and each of them wakes and awaits the threads. Whoever has such a network lists
its operations in a `Plan`, from rows to rows, and then runs all of them at once. Where ``ready``
says no, torch has to do the same; that is also the oracle of the tests.

Numbers are float32 between operations, whatever the weights are. What a row gets depends on that
row and on what it sees, bit for bit.

Shape letters: T rows of a pass, R rows wanted.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.kernels.compiled import LANES, library
from outpace.models import operations as kinds
from outpace.models.attention import HeadShape
from outpace.models.blocks import Block
from outpace.models.fused import View, fits, tell
from outpace.models.levels import Answer, Asked, Level, Start
from outpace.models.operations import NONE, Call, Op
from outpace.models.packed import Linear
from outpace.models.passes import PassRows
from outpace.models.room import Lasting, Piece, Strip
from outpace.models.rope import Rotation
from outpace.models.rowwise import KINDS, Norm
from outpace.models.seen import Seen

ALL, WANTED = 0, 1
"""Counts of rows: all of a pass, and those behind ``Plan.pick``."""
_OPERANDS = 0
"""The buffer that products have for themselves."""
_KEPT = 1 << 22
"""Most numbers of memory that are kept from one run to the next."""
_LAYOUTS = 256
_NOTHING = Piece(0)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that an operation reads or writes."""

    buffer: int
    width: int
    stride: int
    """Numbers from row to row."""
    count: int
    """Which of the counts of rows."""

    @property
    def apart(self) -> int:
        return 0 if self.stride == self.width else self.stride


@dataclass(slots=True, eq=False)
class _Ready:
    """A call that runs over so many rows, and what is kept for it."""

    counts: tuple[int, ...]
    size: int
    """Numbers of memory in all."""
    places: Sequence[tuple[int, int]]
    """Buffers, and where in memory they begin."""
    address: ctypes.Array[ctypes.c_void_p]
    rows_C: ctypes.Array[ctypes.c_int64]
    call: Call
    logits: int = 0
    """Where those of levels are, which nobody gets."""
    base: int = 0
    """Where the memory is that ``address`` tells of."""
    memory: Piece = _NOTHING
    view: View | None = None
    level: Level | None = None
    out: Piece = _NOTHING  # what levels give first
    held: object = ()
    """What else the call reads."""


class Plan:
    """A list of operations under construction, and then to be run.

    Args:
        heads: of its attention, if it has any.
        rotation: rotary table of queries and keys.
    """

    def __init__(self, heads: HeadShape | None = None, rotation: Rotation | None = None) -> None:
        self.ready = library() is not None
        """Whether compiled code does all that was listed so far."""
        self._heads, self._rotation = heads, rotation
        self._window: int | None = None
        self._ops: list[Op] = []
        self._listed: ctypes.Array[Op] | None = None
        self._held: list[object] = []
        self._own: list[tuple[int, int, int]] = []
        """Buffer, width and count of what is kept between operations."""
        self._views: list[tuple[int, Rows, int, int]] = []
        """Buffer, the rows that it is part of, its first column, and which count of rows it leaves
        out."""
        self._lent: list[Rows] = []
        self._given: list[Rows] = []
        self._buffers = _OPERANDS + 1
        self._attended: tuple[Rows, Rows] | None = None
        self._ids = 0
        """How many ids have vectors."""
        self._known: dict[tuple[int, ...], _Ready] = {}
        self._kept = _NOTHING
        self._view: View | None = None
        self._lasting: Lasting | None = None

    # ---- rows ----

    def lent(self, width: int, count: int = ALL) -> Rows:
        """Rows that whoever runs it brings, in the order of these calls; nothing writes to them."""
        rows = self._named(width, count)
        self._lent.append(rows)
        return rows

    def fresh(self, width: int, count: int = ALL) -> Rows:
        """Rows to be written column by column."""
        rows = self._named(width, count)
        self._own.append((rows.buffer, width, count))
        return rows

    def give(self, rows: Rows) -> None:
        """Hand these rows out, in the order of these calls."""
        assert rows.stride == rows.width, "columns cannot be given"
        self._own.remove((rows.buffer, rows.width, rows.count))
        self._given.append(rows)

    def columns(self, rows: Rows, first: int, width: int) -> Rows:
        return self._part(rows, replace(rows, width=width), first, NONE)

    def behind(self, rows: Rows, left_out: int, count: int) -> Rows:
        """The last rows of some.

        Args:
            left_out: which count of rows stands before.
            count: which count of rows is left.
        """
        return self._part(rows, replace(rows, count=count), 0, left_out)

    def _part(self, whole: Rows, like: Rows, first: int, left_out: int) -> Rows:
        part = replace(like, buffer=self._buffers)
        self._buffers += 1
        self._views.append((part.buffer, whole, first, left_out))
        return part

    def _named(self, width: int, count: int) -> Rows:
        self._buffers += 1
        return Rows(self._buffers - 1, width, width, count)

    # ---- operations ----

    def norm(self, norm: Norm, x: Rows, to: Rows | None = None, add: Rows | None = None) -> Rows:
        """Norm rows, to which ``add`` is added before, in place."""
        assert add is None or x not in self._lent
        self._held.append(norm)
        out = to or self.fresh(x.width, x.count)
        more, weight = NONE if add is None else add.buffer, norm.weight_H.data_ptr()
        self._op(kinds.NORM, x, out, more=more, weight=weight, floor=norm.least, scale=norm.scale)
        return out

    def product(self, linear: Linear, x: Rows, to: Rows | None = None, left_out: int = 0) -> Rows:
        out = to or self.fresh(linear.outputs - left_out, x.count)
        if linear.product is None:
            self.ready = False
            return out
        self._held += [linear, parts := linear.product.behind(left_out)]
        part = ctypes.addressof(parts)
        self._op(kinds.PRODUCT, x, out, more=_OPERANDS, parts=len(parts), part=part)
        return out

    def embed(self, vectors: Linear, scale: float) -> Rows:
        """Vectors of the ids of all rows, which are outputs of a matrix."""
        self._held.append(vectors)
        out = self.fresh(vectors.inputs)
        assert vectors.product is not None
        self._ids = vectors.outputs
        part = ctypes.addressof(vectors.product.matrices)
        self._op(kinds.EMBED, out, out, part=part, floor=scale)
        return out

    def copy(self, x: Rows, to: Rows | None = None) -> Rows:
        out = to or self.fresh(x.width, x.count)
        self._op(kinds.COPY, x, out)
        return out

    def pick(self, x: Rows) -> Rows:
        """The rows that are wanted: a copy."""
        out = self.fresh(x.width, WANTED)
        self._op(kinds.PICK, x, out)
        return out

    def gate(self, activation: str, x: Rows) -> Rows:
        """The activation of the first half of rows, times the second."""
        out = self.fresh(x.width // 2, x.count)
        self._op(kinds.GATE, x, out, index=KINDS[activation])
        return out

    def add(self, x: Rows, to: Rows) -> None:
        assert x.stride == x.width and to not in self._lent
        self._op(kinds.ADD, to, to, more=x.buffer, scale=1.0)

    def bend(self, x: Rows, to: Rows) -> None:
        """Add the SiLU of rows to others, in place."""
        assert to not in self._lent
        self._op(kinds.BEND, x, to)

    def attend(self, x: Rows, each: Norm | None = None, window: int | None = None, layer: int = 0) -> Rows:
        """Norm and rotate queries and keys, store keys and values, attend.

        Args:
            x: queries, keys and values; numbers that rotate together are neighbours. Layers of one
                plan share these rows, and those of the result.
            each: norm of all query and key heads.
            window: the same for all layers of a plan.
        """
        heads = self._heads
        assert heads is not None
        self.ready &= fits(heads, torch.float32, torch.device("cpu"))
        self._window = window
        weight, least, wide = None, 0.0, 0
        if each is not None:
            self._held.append(each)
            weight, least, wide = each.weight_H.data_ptr(), each.least, each.wide
        self._op(kinds.TURN, x, replace(x, width=heads.width), weight=weight, floor=least, more=wide)
        out = self._attended[1] if self._attended else self.fresh(heads.queries * heads.width, x.count)
        assert self._attended in (None, (x, out)), "all layers of a plan have the same rows"
        self._attended = x, out
        self._op(kinds.ATTEND, x, out, layer=layer)
        return out

    def layer(self, block: Block, activation: str, x: Rows, reads: Rows) -> Rows:
        """A layer of a decoder on the stream ``x``, whose attention reads ``reads``; behind the
        attention only the rows that are wanted.
        """
        mixed = self.attend(self.product(block.qkv, reads), block.qk_norm, block.window)
        x, mlp = self.pick(x), block.dense
        normed = self.norm(block.mlp_norm, x, add=self.product(block.out, self.pick(mixed)))
        self.add(self.product(mlp.down, self.gate(activation, self.product(mlp.gate_up, normed))), x)
        return x

    def _op(self, kind: int, x: Rows, to: Rows, **fields: object) -> None:
        whole = kind in (kinds.PRODUCT, kinds.COPY, kinds.PICK)  # of any width
        self.ready &= whole or (x.width % LANES == 0 and to.width % LANES == 0)
        strides = {"from_stride": x.apart, "to_stride": to.apart}
        if kind == kinds.TURN:
            strides = {}
        self._ops.append(
            Op(kind=kind, rows=to.count, from_=x.buffer, to=to.buffer, width=to.width, **strides, **fields)
        )

    # ---- running ----

    def run(
        self,
        counts: Sequence[int],
        lent: Sequence[Tensor],
        picked: Sequence[int] = (),
        seen: Seen | None = None,
        ids: Sequence[int] = (),
    ) -> list[Tensor]:
        """Run all operations.

        Args:
            counts: how many rows there are of each count.
            lent: [rows, width] as planned; read as float32.
            seen: what the rows of an attention see.
            ids: of the rows that are embedded.

        Returns:
            What was given, each in memory of its own.
        """
        code = library()
        assert code is not None and self.ready
        lasting, self._lasting = self._lasting or Lasting(), None
        given = [lasting.strip(counts[rows.count], rows.width) for rows in self._given]
        self._lasting = lasting
        ready = self._prepared(tuple(counts), lent, [one.address for one in given], picked, seen, ids)
        code.outpace_run(ctypes.byref(ready.call))
        self._keep(ready)
        return [one.tensor for one in given]

    def _prepared(
        self,
        counts: tuple[int, ...],
        lent: Sequence[Tensor | Strip],
        given: Sequence[int],
        picked: Sequence[int],
        seen: Seen | None,
        ids: Sequence[int],
    ) -> _Ready:
        """A run that is only to be called, and then to be kept; arguments as of ``run``, and addresses
        of what is given.
        """
        floats = [Strip.of(one) for one in lent]
        for rows, one in zip(self._lent, floats, strict=True):
            assert (one.rows, one.width) == (counts[rows.count], rows.width), (one.rows, one.width, rows)
        ready, told, chosen = self._taken(counts), array("q", ids), array("q", picked)
        self._lend(ready, [*[one.address for one in floats], *given])
        self._check(ids)
        call, view = ready.call, ready.view
        call.ids, call.picked = told.buffer_info()[0], chosen.buffer_info()[0]
        call.threads = torch.get_num_threads()
        if seen is not None:
            heads, rotation = self._heads, self._rotation
            assert self._attended is not None and view is not None and heads and rotation
            head, out = (ready.address[rows.buffer] or 0 for rows in self._attended)
            view.look(seen.cache, seen.spans, head, out, seen.wanted)
            tell(call, heads, seen.cache, [view], [rotation], seen.positions, max(seen.positions))
        ready.held = floats, told, chosen, seen
        return ready

    def run_levels(
        self,
        start: Start,
        asked: Asked[Answer],
        given_TF: Tensor | Strip,
        id_D: Tensor | None,
        first: tuple[Plan, PassRows, Seen] | None = None,
    ) -> tuple[Answer, Strip]:
        """Run levels, each on what rows of the one before gave.

        Args:
            given_TF: what the first level is lent. What it gives first is lent to the next one, and what it
                gives last are logits.
            id_D: tokens of the columns of logits; None: their places.
            first: the plan of the first level, where it is another, and its rows.

        Returns:
            What was found, and what was given first, level by level: valid until the next call.
        """
        rows, given, begins, brought = asked.rows, self._given[0], None, Strip.of(given_TF)
        ready, count = self._taken((rows, rows)), asked.levels * rows
        self._check(start.id_B)
        if ready.out.size < count * given.width:
            ready.out = Piece(count * given.width)
        source, out = brought.address, ready.out.address
        if first is not None:
            plan, fed, seen = first
            places, counts = [out, ready.logits], (len(fed.ids), len(fed.wanted))
            begins = plan._prepared(counts, [brought], places, fed.wanted, seen, fed.ids)
            source, out = out, out + 4 * rows * given.width
        self._lend(ready, [source, out, ready.logits])
        level = ready.level = ready.level or self._level(ready, rows)
        assert ready.view is not None
        level.views[0], level.logits = ready.view, ready.logits
        level.first = None if begins is None else begins.call
        level.call.picked, level.call.threads = level.held.buffer_info()[0], torch.get_num_threads()
        found = asked.run(level, start, id_D, level.columns)
        self._keep(ready)
        if first is not None and begins is not None:
            first[0]._keep(begins)
        return found, Strip(ready.out.tensor, 0, ready.out.address, count, given.width)

    def _level(self, ready: _Ready, rows: int) -> Level:
        """What runs of levels over so many rows have in common."""
        lent, (given, logits), view = self._lent[0], self._given, ready.view
        assert self._attended is not None and self._heads is not None and self._rotation is not None
        assert not any(whole in (lent, given) for _, whole, _, _ in self._views) and view is not None
        return Level(
            call=ready.call,
            address=ready.address,
            lent=lent.buffer,
            given=given.buffer,
            bytes=4 * rows * given.width,
            counts=len(ready.counts),
            head=self._attended[0].buffer,
            out=self._attended[1].buffer,
            logits=ready.logits,
            columns=logits.width,
            heads=self._heads,
            views=[view],
            windows=[self._window],
            turns=[self._rotation],
            held=array("q", range(rows)),
        )

    def _lend(self, ready: _Ready, places: Sequence[int]) -> None:
        """Note where rows are that others bring, and then those that they get."""
        at = ready.address
        for rows, place in zip((*self._lent, *self._given), places, strict=True):
            at[rows.buffer] = place
        for buffer, whole, column, left_out in self._views:
            skipped = 0 if left_out == NONE else ready.counts[left_out]
            at[buffer] = (at[whole.buffer] or 0) + 4 * (column + skipped * whole.stride)

    def _check(self, ids: Sequence[int]) -> None:
        if self._ids and ids and not 0 <= min(ids) <= max(ids) < self._ids:
            raise IndexError(f"ids are 0 to {self._ids - 1}, got {min(ids)} to {max(ids)}")

    def _taken(self, counts: tuple[int, ...]) -> _Ready:
        """What is kept for a run over so many rows: one in another thread meanwhile finds nothing."""
        ready = self._known.pop(counts, None) or self._made(counts)
        memory, self._kept = self._kept, _NOTHING
        ready.memory = memory if memory.size >= ready.size else Piece(ready.size)
        base = ready.memory.address
        if base != ready.base:
            for buffer, start in ready.places:
                ready.address[buffer] = base + 4 * start
            ready.base, ready.logits = base, base + 4 * ready.places[-1][1]
        view, self._view = self._view, None
        if self._heads is not None:
            ready.view = view or View(self._heads, self._window)
        return ready

    def _keep(self, ready: _Ready) -> None:
        """Take back what a run had."""
        self._kept = ready.memory if ready.memory.size <= _KEPT else self._kept
        self._view, ready.view, ready.memory, ready.held = ready.view, None, _NOTHING, ()
        if len(self._known) >= _LAYOUTS:
            self._known.clear()
        self._known[ready.counts] = ready

    def _made(self, counts: tuple[int, ...]) -> _Ready:
        """Say where the buffers begin, and make a call that refers to them."""
        code = library()
        assert code is not None
        if self._listed is None:
            self._listed = (Op * len(self._ops))(*self._ops)
        room = 0
        for op in self._ops:
            if op.kind == kinds.PRODUCT:
                room = max(room, code.outpace_room(op.part, op.parts, counts[op.rows]))
        places, size = [(_OPERANDS, 0)], -(-room // (4 * LANES)) * LANES
        for buffer, width, count in self._own:
            places.append((buffer, size))
            size += -(-counts[count] * width // LANES) * LANES
        if self._given:
            last = self._given[-1]
            places.append((last.buffer, size))
            size += -(-counts[last.count] * last.width // LANES) * LANES
        address, rows_C = (ctypes.c_void_p * self._buffers)(), (ctypes.c_int64 * len(counts))(*counts)
        call = Call(
            op=ctypes.addressof(self._listed),
            ops=len(self._listed),
            buffer=ctypes.addressof(address),
            rows=ctypes.addressof(rows_C),
        )
        return _Ready(counts, size, places, address, rows_C, call)
