"""A pass in one call of compiled code, for CPUs.

`Layers.run_layers` calls a dozen operations per layer, each of which wakes the threads, waits for
the last one and comes back to Python. Here the operations of a pass are listed once and run by
``pass.c`` together. Python says per pass only which rows there are and what they see. Whatever this
does not know is left to torch, which is the oracle of the tests. Numbers between two operations are
float32 whatever the weights are, so results differ from those of torch by rounding. A process uses
one of the two for all passes of a model.

A list depends on the layers that run and on the features wanted. Buffers belong to a pass while it
runs; passes one after another use the same ones.

Shape letters: T rows of a pass, H hidden size, V vocabulary, X heads of all kinds, D their width,
F width of an MLP.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.kernels.compiled import LANES, library
from outpace.models.attention import HeadShape, Span
from outpace.models.blocks import Block, Ends
from outpace.models.branching import Branching, Trees, run_trees
from outpace.models.buffers import ATTENDED, HEADS, LAST, LOGITS, STREAM, TAP, Buffers
from outpace.models.families import DecoderConfig
from outpace.models.fused import fits, tell
from outpace.models.levels import Found, Level, Picks, Start, run_levels
from outpace.models.listing import Listed, Lister
from outpace.models.operations import NONE, Call
from outpace.models.passes import PassRows
from outpace.models.room import Room
from outpace.models.rope import Rotation
from outpace.models.taps import SideBySide, spread


class Results(NamedTuple):
    """What a pass gives, all of it memory of its own but for the logits."""

    taps: Mapping[str, Tensor]
    """Of all rows."""
    last_TH: Tensor | None
    """Normed, of the rows picked; None may be had where no riders are."""
    logits_TV: Tensor
    best: tuple[list[int], list[float]] | None
    """Index and value of the largest of each row of logits."""


class _Way(NamedTuple):
    """What the operations of a pass read besides buffers."""

    cache: DenseCache
    taps: frozenset[str]
    picked: array[int]
    ids: array[int]


class Programs:
    """The passes of a decoder as lists of operations.

    Args:
        blocks: its layers, all of which have compiled products; see ``runs``.
        ends: what is before and after them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        blocks: Sequence[Block],
        ends: Ends,
        turns: Sequence[Rotation],
        shape: HeadShape,
    ) -> None:
        self._config, self._blocks, self._ends = config, blocks, ends
        self._turns, self._shape = turns, shape
        self._windows = list({block.window: None for block in blocks})
        self._known: dict[object, Listed] = {}
        self._free: list[Buffers] = []
        self._room = Room()
        self._vectors = ends.embed.vectors
        code = library()
        assert code is not None
        self._run = code.outpace_run

    @staticmethod
    def runs(config: DecoderConfig, blocks: Sequence[Block], ends: Ends, shape: HeadShape) -> bool:
        embed = ends.embed
        return (
            fits(shape, embed.dtype, embed.device)
            and config.hidden_size % LANES == 0
            and all(one.product is not None for block in blocks for one in (block.qkv, block.out))
            and all(block.mlp.in_one_call for block in blocks)
            and ends.head.product is not None
        )

    def run(
        self,
        rows: PassRows,
        cache: DenseCache,
        depth: int,
        taps: frozenset[str],
        embed: Callable[[Sequence[int]], Tensor],
        headed: int,
    ) -> Results:
        """Run a pass.

        Args:
            rows: of the pass; room for them is reserved in the cache.
            taps: names of features wanted, of all rows.
            embed: gives float32 vectors of ids.
            headed: how many of the rows picked have logits: the first ones.
        """
        logits_TV = self._room.rows(headed, self._ends.head.outputs)
        if not (rows.riders or rows.levels):
            return self._whole(rows, cache, depth, taps, embed, logits_TV, headed)
        # What is found of these is ordinary also where inference mode is on, as features are.
        with torch.inference_mode(False), torch.no_grad():
            return self._whole(rows, cache, depth, taps, embed, logits_TV, headed)

    def _whole(
        self,
        rows: PassRows,
        cache: DenseCache,
        depth: int,
        taps: frozenset[str],
        embed: Callable[[Sequence[int]], Tensor],
        logits_TV: Tensor,
        headed: int,
    ) -> Results:
        way = _Way(cache, taps, array("q", [*rows.wanted, *rows.riders]), array("q", rows.ids))
        counts = len(rows.ids), len(way.picked), headed
        buffers = self._taken(counts[0])
        buffers.lend(LOGITS, logits_TV)
        found = buffers.found(counts[2])
        whole = not rows.embeds and not rows.levels
        known = self._vectors.outputs if whole and self._vectors is not None else 0
        embedded = 0 <= min(rows.ids) <= max(rows.ids) < known
        if not embedded:
            stream_TH = buffers.lent[STREAM][: counts[0]]
            stream_TH.copy_(embed(rows.ids))
            for start, embed_RH in rows.embeds:
                stream_TH[start : start + len(embed_RH)] = embed_RH
        if rows.levels:
            seen = self._joining(buffers, rows, depth, counts, way)
        else:
            listed = self._list(range(depth), embedded, True, taps)
            seen = self._some(buffers, listed, rows.spans, counts, way)
        last_TH = buffers.lent[LAST][: counts[1]].clone() if rows.riders else None
        self._free.append(buffers)
        best = list(map(int, found[: 2 * headed : 2])), found[1 : 2 * headed : 2].tolist()
        return Results(seen, last_TH, logits_TV, best)

    def _joining(
        self, buffers: Buffers, rows: PassRows, depth: int, counts: tuple[int, int, int], way: _Way
    ) -> Mapping[str, Tensor]:
        """Run a pass whose rows do not all begin at the first layer; gives its features."""
        seen: dict[str, Tensor] = {}
        stream_TH = buffers.lent[STREAM]
        whole_TH = stream_TH[: counts[0]]
        borders = [0, *rows.levels, depth]
        for begin, end in pairwise(borders):
            rows.join(begin, whole_TH)
            spans, running = rows.running(begin)
            if not spans:
                continue
            few = len(running) < counts[0]
            index = torch.tensor(running)
            if few:
                buffers.lend(STREAM, whole_TH[index])
            listed = self._list(range(begin, end), False, False, way.taps)
            found = self._some(buffers, listed, spans, (len(running), 0, 0), way)
            if few:
                whole_TH[index] = buffers.lent[STREAM]
                buffers.lend(STREAM, stream_TH)
            seen |= {name: spread(one, index, counts[0]) if few else one for name, one in found.items()}
        for other, layer, spans, running in rows.apart():
            own_TH = whole_TH[running]
            other.run_rows(own_TH, range(layer, depth), spans, way.cache)
            whole_TH[running] = own_TH
        if f"hidden.{depth}" in way.taps:
            seen[f"hidden.{depth}"] = whole_TH.clone()
        last = self._some(buffers, self._list(range(depth, depth), False, True, way.taps), [], counts, way)
        return {**seen, **last}

    @property
    def embeds(self) -> bool:
        """Whether compiled code embeds ids."""
        return self._vectors is not None and self._vectors.product is not None

    def descend(self, start: Start, picks: Picks, id_D: Tensor | None, width: int) -> Found:
        """Run passes level by level; see ``run_levels``."""
        buffers, rows = self._at_hand(len(start.slot_B)), len(start.slot_B)
        found = run_levels(
            self._level(buffers, rows), start, picks, id_D, min(width, self._ends.head.outputs)
        )
        self._free.append(buffers)
        return found

    def spread(self, fed: PassRows, start: Start, asked: Branching, id_D: Tensor | None, width: int) -> Trees:
        """Run a pass, and levels of trees below its rows that are wanted; see ``run_trees``."""
        buffers, spans = self._at_hand(max(asked.rows, len(fed.ids))), fed.spans
        level, positions = self._level(buffers, asked.rows), array("q")
        picked, ids = array("q", fed.wanted), array("q", fed.ids)
        listed = self._list(range(len(self._blocks)), True, True, frozenset())
        level.first = _call(buffers, listed, (len(ids), len(picked), len(picked)), picked)
        level.first.ids = ids.buffer_info()[0]
        for view in buffers.views:
            view.look(start.cache, spans, buffers.address[HEADS] or 0, buffers.address[ATTENDED] or 0)
        for span in spans:
            positions.extend(span.positions)
        tell(level.first, self._shape, start.cache, buffers.views, self._turns, positions, max(positions))
        found = run_trees(level, start, asked, id_D, min(width, self._ends.head.outputs))
        self._free.append(buffers)
        return found

    def knows(self, ids: Iterable[int]) -> bool:
        """Whether compiled code embeds these."""
        known = 0 if self._vectors is None else self._vectors.outputs
        return all(0 <= one < known for one in ids)

    def _at_hand(self, rows: int) -> Buffers:
        """Memory for levels over at most so many rows."""
        buffers = self._taken(rows)
        buffers.lend(LOGITS, self._room.rows(rows, self._ends.head.outputs))
        buffers.found(rows)
        return buffers

    def _level(self, buffers: Buffers, rows: int) -> Level:
        """A pass over so many rows that is run again and again."""
        listed = self._list(range(len(self._blocks)), True, True, frozenset())
        picked, counts = array("q", range(rows)), array("q", [rows] * 3)
        call = Call(
            op=ctypes.addressof(listed.ops),
            ops=len(listed.ops),
            buffer=ctypes.addressof(buffers.address),
            rows=counts.buffer_info()[0],
            picked=picked.buffer_info()[0],
            threads=torch.get_num_threads(),
        )
        return Level(
            call=call,
            address=buffers.address,
            lent=NONE,
            given=NONE,
            bytes=0,
            counts=len(counts),
            head=HEADS,
            out=ATTENDED,
            logits=buffers.lent[LOGITS].data_ptr(),
            columns=self._ends.head.outputs,
            heads=self._shape,
            views=buffers.below,
            windows=self._windows,
            turns=self._turns,
            held=(picked, counts),
        )

    def _taken(self, rows: int) -> Buffers:
        """Memory for a pass; one in another thread meanwhile has its own."""
        buffers = self._free.pop() if self._free else Buffers(self._config, self._shape, self._windows)
        if rows > buffers.most:
            each = [((b.qkv, 1), (b.out, 1), *b.mlp.operands()) for b in self._blocks]
            buffers.fit(rows, [*chain.from_iterable(each), (self._ends.head, 1)])
        return buffers

    def through(self, x_TH: Tensor, layers: range, spans: list[Span], cache: DenseCache) -> None:
        """Run rows through some layers, in place."""
        buffers = self._taken(len(x_TH))
        stream_TH = buffers.lent[STREAM]
        buffers.lend(STREAM, x_TH)
        way = _Way(cache, frozenset(), array("q"), array("q"))
        self._some(buffers, self._list(layers, False, False, way.taps), spans, (len(x_TH), 0, 0), way)
        buffers.lend(STREAM, stream_TH)
        self._free.append(buffers)

    def _some(
        self, buffers: Buffers, listed: Listed, spans: Sequence[Span], counts: tuple[int, int, int], way: _Way
    ) -> Mapping[str, Tensor]:
        """Run the operations of a list on rows of the stream; gives features."""
        seen: Mapping[str, Tensor] = {}
        if listed.taps:
            each, width = self._config.hidden_size, self._config.hidden_size * len(listed.taps)
            strip = buffers.lasting.strip(counts[0], width)
            seen = SideBySide(listed.taps, strip)
            for i in range(len(listed.taps)):
                buffers.address[TAP + i] = strip.address + 4 * i * each
        call = _call(buffers, listed, counts, way.picked)
        call.ids = way.ids.buffer_info()[0]
        if spans:
            shape, cache = self._shape, way.cache
            head, out = buffers.address[HEADS], buffers.address[ATTENDED]
            assert head is not None and out is not None
            for view in buffers.views:
                view.look(cache, spans, head, out)
            positions = array("q")
            for span in spans:
                positions.extend(span.positions)
            tell(call, shape, cache, buffers.views, self._turns, positions, max(positions))
        self._run(ctypes.byref(call))
        return seen

    def _list(self, layers: range, begins: bool, ends: bool, taps: frozenset[str]) -> Listed:
        """The operations of some layers, of the embedding before and of what follows them."""
        name = (layers.start, layers.stop, begins, ends, taps)
        known = self._known.get(name)
        if known is None:
            lister = Lister(self._config, self._shape, self._windows, taps)
            first, last = (self._ends if one else None for one in (begins, ends))
            known = self._known[name] = lister.list(self._blocks, layers, first, last)
        return known


def _call(buffers: Buffers, listed: Listed, counts: tuple[int, int, int], picked: array[int]) -> Call:
    """All of a call but what its rows are; it refers to these."""
    call = buffers.call(listed.ops, counts)
    call.picked, call.threads = picked.buffer_info()[0], torch.get_num_threads()
    return call
