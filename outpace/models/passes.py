"""What a pass is made of before any weight is touched: its rows.

Shape letters: T rows of a pass, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.errors import ModelError
from outpace.models.attention import Span
from outpace.models.views import fits
from outpace.types import Feed, Riders


class PassRows:
    """The rows of a pass, feed by feed: those fed, then the riders of that feed.

    Making it appends the rows to the tails of their slots.

    Args:
        feeds: at most one per slot.

    Raises:
        ModelError: a resume that does not fit the tail of its slot, or riders without either
            ids or embeddings.
    """

    def __init__(self, feeds: Sequence[Feed], cache: DenseCache, depth: int) -> None:
        known = [0 if feed.resume is None else _covered(feed, cache, depth) for feed in feeds]
        for feed in feeds:
            if feed.riders:
                _check_riders(feed, depth)
        self.spans: list[Span] = []
        self.ids: list[int] = []
        self.wanted: list[int] = []
        self.riders: list[int] = []
        self.embeds: list[tuple[int, Tensor]] = []
        """First row, and riders that enter as embeddings."""
        self.resumed: list[tuple[int, int, Tensor]] = []
        """First row, layer, and the residual stream with which the rows enter it."""
        self._known: list[int] = []
        self._ridden: list[Riders | None] = []
        starts, tap_starts, rider_starts = [0], [0], [0]
        for feed, covered in zip(feeds, known, strict=True):
            state = cache.slot(feed.slot)
            first = len(state.tail_ids) - covered
            cache.append(feed.slot, feed.token_J[covered:], feed.parent_J[covered:])
            start, count = len(self.ids), len(feed.token_J)
            want = range(count) if feed.want is None else feed.want
            self.wanted += [start + row for row in want]
            self.ids += feed.token_J
            starts.append(len(self.wanted))
            tap_starts.append(len(self.ids) - len(self.riders))
            parents, depths = list(state.tail_parents), list(state.tail_depths)
            if feed.riders is not None:
                _ride(feed.riders, parents, depths)
                riders = len(feed.riders.node_R)
                cache.scratch(feed.slot, riders)
                self.riders += range(start + count, start + count + riders)
                self.ids += feed.riders.token_R or [0] * riders
                if feed.riders.embed_RH is not None:
                    self.embeds.append((start + count, feed.riders.embed_RH))
                count += riders
            if feed.resume is not None:
                self.resumed.append((start, feed.resume.layer, feed.resume.hidden_KH))
            base = len(state.ids)
            stored = range(base + first, base + first + count)
            chain = depths == [*range(len(depths))] and parents == [*range(-1, len(depths) - 1)]
            if feed.view is not None:
                fits(feed.view, base)
            self.spans.append(Span(feed.slot, start, stored, base, parents, depths, chain, feed.view))
            self._known.append(covered)
            self._ridden.append(feed.riders)
            rider_starts.append(len(self.riders))
        self.start_B, self.tap_start_B, self.rider_start_B = map(tuple, (starts, tap_starts, rider_starts))
        ridden = [riders for riders in self._ridden if riders]
        self.rider_logits = any([riders.logits for riders in ridden])
        entering = {riders.layer for riders in ridden if riders.layer}
        self.levels = sorted({layer for _, layer, _ in self.resumed} | entering)
        """Layers at which rows join."""

    def running(self, layer: int) -> tuple[list[Span], list[int]]:
        """Spans that run from ``layer`` on, numbered anew, and their rows in the whole pass."""
        late = {start: at for start, at, _ in self.resumed}
        spans: list[Span] = []
        rows: list[int] = []
        for span, covered, riders in zip(self.spans, self._known, self._ridden, strict=True):
            skip = covered if late.get(span.start, 0) > layer else 0
            stop = len(span.stored)
            if riders is not None and (riders.layer > layer or riders.through is not None):
                stop -= len(riders.node_R)
            if stop > skip:
                spans.append(replace(span, start=len(rows), stored=span.stored[skip:stop]))
                rows += range(span.start + skip, span.start + stop)
        return spans, rows

    def join(self, layer: int, stream_TH: Tensor) -> None:
        """Put the rows that enter at ``layer`` into the residual stream of the pass."""
        for start, at, hidden_KH in self.resumed:
            if at == layer:
                stream_TH[start : start + len(hidden_KH)] = hidden_KH
        for span, riders in zip(self.spans, self._ridden, strict=True):
            if riders is not None and riders.enter is not None and riders.layer == layer:
                first = span.start + len(span.stored) - len(riders.node_R)
                node_R = [span.start + node + 1 for node in riders.node_R]
                stream_TH[first : first + len(node_R)] = riders.enter(stream_TH[node_R])

    def apart(self) -> list[tuple[Any, int, list[Span], list[int]]]:
        """Riders with weights of their own: the target, the first layer, their spans and their rows."""
        found: dict[tuple[int, int], tuple[Any, int, list[Span], list[int]]] = {}
        for span, riders in zip(self.spans, self._ridden, strict=True):
            if riders is None or riders.through is None:
                continue
            key = id(riders.through), riders.layer
            _, _, spans, rows = found.setdefault(key, (riders.through, riders.layer, [], []))
            first = len(span.stored) - len(riders.node_R)
            spans.append(replace(span, start=len(rows), stored=span.stored[first:]))
            rows += range(span.start + first, span.start + len(span.stored))
        return list(found.values())

    def without_riders(self, x_TH: Tensor) -> Tensor:
        """The rows fed, of features of all rows of the pass."""
        if not self.riders:
            return x_TH if x_TH.shape[0] == len(self.ids) else x_TH[: len(self.ids)]
        riders = set(self.riders)
        fed = [row for row in range(len(self.ids)) if row not in riders]
        return x_TH[torch.tensor(fed, device=x_TH.device)]


def _covered(feed: Feed, cache: DenseCache, depth: int) -> int:
    """Rows of a feed that an earlier pass ran up to the layer at which they resume."""
    assert feed.resume is not None
    layer, rows = feed.resume.layer, feed.resume.row_K
    state, count = cache.slot(feed.slot), len(rows)
    held = (tuple(state.tail_ids), tuple(state.tail_parents))
    if rows != tuple(range(count)) or held != (feed.token_J[:count], feed.parent_J[:count]):
        raise ModelError(
            f"a resume must cover the first rows of its feed, and the tail of slot {feed.slot} "
            f"must hold these and no others; it covers rows {list(rows)}, the tail holds tokens "
            f"{state.tail_ids}"
        )
    if not 0 < layer < depth:
        raise ModelError(f"cannot resume at layer {layer} in a pass over {depth} layers")
    return count


def _check_riders(feed: Feed, depth: int) -> None:
    riders = feed.riders
    assert riders is not None
    if [riders.token_R, riders.embed_RH, riders.enter].count(None) != 2:
        raise ModelError("riders need ids, embeddings or a way to enter, and no two of these")
    if (riders.layer > 0) != (riders.enter is not None) or not 0 <= riders.layer < depth:
        raise ModelError(f"riders cannot enter at layer {riders.layer} of {depth} in this way")
    if riders.layer and feed.resume is not None and feed.resume.layer > riders.layer:
        raise ModelError(
            f"riders enter at layer {riders.layer}, where rows that resume at {feed.resume.layer} are gone"
        )


def _ride(riders: Riders, parents: list[int], depths: list[int]) -> None:
    """Append riders to copies of a tail's parents and depths."""
    first = len(parents)
    for node, after in zip(riders.node_R, riders.after_R, strict=True):
        parents.append(node + 1 if after < 0 else first + after)
        depths.append(depths[parents[-1]] + 1)
    for i, ahead in enumerate(riders.ahead_R or ()):
        depths[first + i] = depths[riders.node_R[i] + 1] + ahead
