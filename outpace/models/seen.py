"""Which rows of a pass attend, where only some of its results are wanted."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.cache.dense import DenseCache
from outpace.models.attention import Span
from outpace.models.passes import PassRows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seen:
    """Which rows of a pass attend, and to what."""

    cache: DenseCache
    """Keys and values; room for all rows is reserved."""
    spans: Sequence[Span]
    """All rows of the pass, in order: their keys and values are stored."""
    positions: array[int]
    """Of all rows."""
    attending: Sequence[Span]
    """Those whose results are wanted."""

    @classmethod
    def of(cls, rows: PassRows, cache: DenseCache, offsets: Sequence[int]) -> Seen:
        """What the rows wanted of a pass see, as in a decoder.

        Args:
            cache: the one that they were made with.
            offsets: per feed, the position of the first row of its slot.
        """
        spans, wanted, positions = rows.spans, rows.wanted, array("q")
        for span, offset in zip(spans, offsets, strict=True):
            positions.extend([offset + position for position in span.positions])
        attending: Sequence[Span] = spans
        if len(wanted) < len(positions):
            attending = []
            for row in wanted:
                span = spans[bisect_right(spans, row, key=lambda span: span.start) - 1]
                at, form = row - span.start, (span.base, span.parents, span.depths, span.chain, span.view)
                attending.append(Span(span.slot, row, span.stored[at : at + 1], *form))
        return cls(cache=cache, spans=spans, positions=positions, attending=attending)
