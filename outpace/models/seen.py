"""Which rows of a pass attend, where only some of its results are wanted."""

from __future__ import annotations

from array import array
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
    wanted: array[int] | None
    """Rows whose results are wanted, ascending; None: all."""

    @classmethod
    def of(cls, rows: PassRows, cache: DenseCache, offsets: Sequence[int]) -> Seen:
        """What the rows wanted of a pass see, as in a decoder.

        Args:
            cache: the one that they were made with.
            offsets: per feed, the position of the first row of its slot.
        """
        positions = array("q")
        for span, offset in zip(rows.spans, offsets, strict=True):
            positions.extend([offset + position for position in span.positions])
        wanted = array("q", rows.wanted) if len(rows.wanted) < len(positions) else None
        return cls(cache=cache, spans=rows.spans, positions=positions, wanted=wanted)
