"""Passes in a few fixed shapes, recorded once and replayed: CUDA graphs.

A pass of a small model is some 25 launches a layer, and on a GPU launching may well take longer
than computing. So the layers of a pass are recorded with every input in a buffer. Later passes of
the same shape fill the buffers and replay. Rows are filled up to a bucket, keys to another;
what a row sees is a mask in a buffer. The layers are those of `outpace.models.layers`; only
attention is written again, for a shape that does not depend on the text.

Rows that fill up write keys behind the tail of their slot, where nobody looks and the next pass
writes over them. They see storage row 0, so all that they compute is finite.

Shape letters: T = B * R rows filled up, B consecutive slots, R rows per slot, N keys, K key-value
heads, G query heads per key-value head, D width of a head, E = D / 2, X heads of all kinds,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.models.attention import HeadShape, Span
from outpace.models.passes import PassRows
from outpace.models.rope import Rotation

ROWS = (4, 8, 16, 32, 64)
"""Rows per slot; longer feeds run eagerly."""
_KEYS = 256
"""Fewest keys; then twice as many, and so on, up to what the cache has room for."""
_WASTE = 4
"""Most rows that are computed for each row that was asked for."""
_SHAPES = 64
"""Recorded shapes per cache; one more, and all are forgotten."""

Launch = Callable[[], None]
"""Launches kernels; looks at no value, and gives the same launches at every call."""
Record = Callable[[Launch], Launch]
"""Makes of a launch one that does the same on the same memory. It may run the first or not."""


class RunLayers(Protocol):
    """``Layers.run_layers``."""

    def __call__(
        self,
        x_TH: Tensor,
        layers: range,
        turn: Sequence[Tensor],
        attend: PaddedAttention,
        taps: frozenset[str],
        seen: dict[str, Tensor],
    ) -> None: ...


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory.

    Sharing is safe: no two of them run at once, and what one gives is copied before the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        # A pool takes no further graph once all of its graphs are gone, as when a cache grows. So one stays.
        self._number = torch.zeros(1, device=device)
        self._stays = self._captured(self._number.zero_)

    def __call__(self, launch: Launch) -> Launch:
        with torch.cuda.device(self._device):
            # Once without recording: libraries set themselves up at their first call.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                launch()
            torch.cuda.current_stream().wait_stream(side)
            return self._captured(launch).replay

    def _captured(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            launch()
        return graph


class StaticPasses:
    """The layers of a decoder, run in fixed shapes.

    Args:
        windows: the distinct sliding windows of its layers.
        record: makes a launch that can be repeated; a ``CudaRecorder``, or a stand-in.
    """

    def __init__(
        self,
        shape: HeadShape,
        windows: frozenset[int | None],
        turns: Sequence[Rotation],
        dtype: torch.dtype,
        record: Record,
    ) -> None:
        self._shape, self._windows, self._turns, self._dtype = shape, windows, turns, dtype
        self._record = record
        self._known: WeakKeyDictionary[DenseCache, tuple[Tensor, dict[object, _Recorded]]]
        self._known = WeakKeyDictionary()

    def fits(self, rows: PassRows) -> bool:
        """Whether a pass can run here: no riders, resume or view, short feeds, little to fill up."""
        if rows.riders or rows.resumed or not rows.ids or any(span.view for span in rows.spans):
            return False
        count, slots = _rows(rows.spans), _slots(rows.spans)
        return count > 0 and count * len(slots) <= max(ROWS[0], _WASTE * len(rows.ids))

    def run(
        self,
        rows: PassRows,
        cache: DenseCache,
        depth: int,
        taps: frozenset[str],
        x_TH: Tensor,
        run_layers: RunLayers,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the first layers of a pass that fits.

        Args:
            cache: holds their slots; grows by what is filled up.
            x_TH: the residual stream before the first layer, one row per row of the pass at
                least.

        Returns:
            The residual stream after the last of these layers and the taps, a row per row of
            the pass; copies.

        Cost: the first pass of a shape is run and recorded; later ones are replayed.
        """
        count, slots = _rows(rows.spans), _slots(rows.spans)
        stored, positions, place = _arrange(rows.spans, cache, slots, count)
        room, keys = cache.rows, _KEYS
        while keys < max(span.stored.stop for span in rows.spans):
            keys *= 2
        name = (slots, count, min(keys, room), depth, taps)
        store, known = self._known.get(cache, (None, {}))
        if store is not cache.key_store:
            known = {}  # recorded launches write to the memory that the cache had then
            self._known[cache] = cache.key_store, known
        one = known.get(name)
        fresh = one is None
        if one is None:
            if len(known) >= _SHAPES:
                known.clear()
            attend = PaddedAttention(
                cache, slots, count, min(keys, room), self._shape, self._windows, self._dtype
            )
            one = known[name] = _Recorded(x_TH.shape[1], attend)
        index = torch.tensor(place, device=x_TH.device)
        one.stream_TH.index_copy_(0, index, x_TH[: len(place)])
        turn = [rotation.at(positions) for rotation in self._turns]
        one.attend.fill(stored, rows.spans)
        one.fill(turn)
        if fresh:
            one.record(self._record, range(depth), taps, run_layers)
        one.replay()
        seen = {tap: value_TH.index_select(0, index) for tap, value_TH in one.seen.items()}
        return one.last_TH.index_select(0, index), seen


class _Recorded:
    """One shape: its buffers, and the launch that reads them."""

    def __init__(self, width: int, attend: PaddedAttention) -> None:
        rows = len(attend.head_TXD)
        self.attend = attend
        self.stream_TH = attend.head_TXD.new_zeros(rows, width)
        """Input; rows that fill up hold anything finite."""
        self.turn: list[Tensor] = []
        """Per rotary table complex [T, 1, E], input."""
        self.last_TH = self.stream_TH
        self.seen: dict[str, Tensor] = {}
        self.replay: Launch

    def fill(self, turn: Sequence[Tensor]) -> None:
        """Hand over the factors of the rows."""
        if not self.turn:
            self.turn = [torch.zeros_like(one) for one in turn]
        for mine, given in zip(self.turn, turn, strict=True):
            mine.copy_(given)

    def record(self, record: Record, layers: range, taps: frozenset[str], run_layers: RunLayers) -> None:
        """Make ``replay``, whose results are ``last_TH`` and ``seen``, written anew each time."""

        def launch() -> None:
            self.last_TH, self.seen = self.stream_TH.clone(), {}
            self.attend.begin()
            run_layers(self.last_TH, layers, self.turn, self.attend, taps, self.seen)

        self.replay = record(launch)


class PaddedAttention:
    """Attention of B * R rows over N keys of each slot: a shape that the text does not change.

    The same as ``Attention`` up to rounding. ``fill`` says what is where before every launch.
    """

    def __init__(
        self,
        cache: DenseCache,
        slots: range,
        rows: int,
        keys: int,
        shape: HeadShape,
        windows: frozenset[int | None],
        dtype: torch.dtype,
    ) -> None:
        self._shape, self._slots, self._keys = shape, slots, keys
        store, self._dims = cache.key_store, (len(slots), rows, shape.kv, shape.group, shape.width)
        self.head_TXD = store.new_zeros(len(slots) * rows, shape.queries + 2 * shape.kv, shape.width)
        """float32 queries, keys and values of the layer at hand; the decoder fills them in."""
        turning = self.head_TXD[:, : shape.queries + shape.kv]
        self.turned_TXE = torch.view_as_complex(turning.view(*turning.shape[:2], -1, 2))
        self._out_BRKGD = torch.zeros(self._dims, dtype=dtype, device=store.device)
        keys_, values_ = cache.by_row
        self._places = list(zip(keys_.unbind(0), values_.unbind(0), strict=True))
        slot_T = torch.tensor([slot for slot in slots for _ in range(rows)])
        self._slot_T = slot_T.to(store.device)
        self._row_T = torch.zeros_like(self._slot_T)
        """Where each row writes; input."""
        masks = (len(slots), 1, rows, 1, keys)
        self._seen = {window: torch.zeros(masks, dtype=torch.bool, device=store.device) for window in windows}
        """Per window what each row sees; input."""
        self._read = list(zip(cache.keys(slots, range(keys)), cache.values(slots, range(keys)), strict=True))
        self._mask: dict[int | None, Tensor] = {}

    def fill(self, stored: Sequence[int], spans: Sequence[Span]) -> None:
        """Say where rows write and what they see.

        Args:
            stored: storage row of each of the T rows in its slot.
            spans: the rows that were asked for.
        """
        count = self._dims[1]
        self._row_T.copy_(torch.tensor(stored))
        for window, seen in self._seen.items():
            made = torch.zeros(len(self._slots), count, self._keys, dtype=torch.bool)
            made[:, :, 0] = True
            for span in spans:
                made[span.slot - self._slots.start, : len(span.stored)] = _seen(span, self._keys, window)
            seen.copy_(made[:, None, :, None])

    def begin(self) -> None:
        for window, seen in self._seen.items():
            zeros = self.head_TXD.new_zeros(seen.shape)
            self._mask[window] = zeros.masked_fill_(seen.logical_not(), -torch.inf)

    def __call__(self, layer: int, window: int | None) -> Tensor:
        """Store keys and values, attend; see ``Attention``."""
        shape, (slots, rows, kv, group, width) = self._shape, self._dims
        new_TXD = self.head_TXD[:, shape.queries :]
        for place, new_TKD in zip(self._places[layer], (new_TXD[:, :kv], new_TXD[:, kv:]), strict=True):
            place.index_put_((self._slot_T, self._row_T), new_TKD)
        keys, values = self._read[layer]
        query = self.head_TXD[:, : shape.queries].reshape(self._dims).permute(0, 2, 1, 3, 4)
        query = query.reshape(slots * kv, rows * group, width) * shape.scale
        weight = torch.bmm(query, keys)
        if shape.softcap is not None:
            weight = torch.tanh(weight / shape.softcap) * shape.softcap
        weight.view(slots, kv, rows, group, -1).add_(self._mask[window])
        result = torch.bmm(weight.softmax(-1), values)
        self._out_BRKGD.copy_(result.view(slots, kv, rows, group, width).permute(0, 2, 1, 3, 4))
        return self._out_BRKGD.view(slots * rows, -1)


def _rows(spans: Sequence[Span]) -> int:
    """Rows per slot, a bucket; 0 if none is large enough."""
    longest = max(len(span.stored) for span in spans)
    return next((bucket for bucket in ROWS if bucket >= longest), 0)


def _slots(spans: Sequence[Span]) -> range:
    """Slots of a pass, and those between them."""
    fed = [span.slot for span in spans]
    return range(min(fed), max(fed) + 1)


def _arrange(
    spans: Sequence[Span], cache: DenseCache, slots: range, count: int
) -> tuple[list[int], list[int], list[int]]:
    """Give storage row and position of each of the T rows, and where those asked for stand."""
    stored: list[int] = []
    positions: list[int] = []
    place: dict[int, range] = {}
    fed = {span.slot: span for span in spans}
    for slot in slots:
        span = fed.get(slot)
        mine = span.stored if span is not None else range(0)
        try:
            filling = cache.scratch(slot, count - len(mine))
        except KeyError:  # a closed slot
            filling = range(count)
        if span is not None:
            place[span.start] = range(len(stored), len(stored) + len(mine))
            positions += span.positions
        stored += [*mine, *filling]
        positions += [0] * (len(stored) - len(positions))
    return stored, positions, [row for start in sorted(place) for row in place[start]]


def _seen(span: Span, keys: int, window: int | None) -> Tensor:
    """Give bool [R, N]: the committed text and the ancestors of each row, within the window."""
    seen = torch.zeros(len(span.stored), keys, dtype=torch.bool)
    seen[:, : span.base] = True
    for i, row in enumerate(span.stored):
        at = row - span.base
        while at >= 0:
            seen[i, span.base + at] = True
            at = span.parents[at]
    if window is not None:
        position_N = torch.arange(keys)
        tail = span.base + torch.tensor(span.depths)
        position_N[span.base : span.base + len(tail)] = tail
        seen &= position_N > torch.tensor(span.positions)[:, None] - window
    return seen
