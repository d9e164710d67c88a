"""Views of keys and values: which committed rows of its slot a feed sees.

    committed    0 1 2 3 4 5 6 7 8 9 ... | tail: pending, guesses
    seen         ^ ^       ^       ^ ^ ^   ^^^^^^^^^^^^^^^^^^^^^^
                 sinks  chosen    window    each row its own ancestors

A view belongs to the feed that carries it and to nothing else: the next feed without one sees all.
A list per layer, or per layer and head of keys, names the rows seen before the window. Compiled code
reads them where they are (attend.h, choose.h), or keeps a copy for as long as the list stays. What is
here in torch is its oracle. Layers with a sliding window see that window, with or without a view.

Rows may be chosen in the pass itself, by the queries of its first row, in one of two ways. Runs of
neighbouring rows are chosen by their mean score (chunks of TriForce, arXiv:2404.11912). Or query heads vote
softly on their best rows, and a choice stays while queries point the same way (after TokenSelect,
arXiv:2411.02886).

Drafters may read keys and values too, layer by layer (`KeyValues`). A reader sees what is committed.

Shape letters: L layers, K key-value heads, G query heads of each, D width of a head, X = K * G * D, N
listed rows, R rows of a feed, C rows that may be chosen, W rows seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.errors import ModelError
from outpace.models.rope import Rotation

if TYPE_CHECKING:
    from outpace.cache.base import KVCache
    from outpace.models.attention import Attention, HeadShape, Span

VOTE, MEAN = range(2)
"""How rows are chosen, as in choose.h, for each head of keys: by a softmax of each run's largest score, or by
the mean score."""
_ALWAYS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a view shows."""

    sinks: int
    """First rows of the text, always seen."""
    window: int
    """Last rows of the text, always seen."""
    count: int = 0
    """Rows chosen between the two; 0 chooses none."""
    kind: int = VOTE
    run: int = 1
    """Neighbouring rows that are chosen together; divides ``sinks`` and ``count``."""
    read: int = 0
    """Coordinates of a key that choosing reads, those where queries are largest; even, 0 for all."""
    least: float = _ALWAYS
    """Cosine of the queries, from which on a layer keeps its choice; above 1 it never does."""
    copies: bool = False
    """Keep chosen keys and values side by side, until others are chosen. Keys lie coordinate by
    coordinate: a token that is read alone costs a cache line per coordinate."""

    def __post_init__(self) -> None:
        if self.read % 2:
            raise ValueError(f"read must be even, got {self.read}")
        if self.sinks % self.run or self.count % self.run:
            raise ValueError(f"sinks {self.sinks} and count {self.count} must be multiples of {self.run}")

    @property
    def listed(self) -> int:
        return self.sinks + self.count

    def start(self, base: int) -> int:
        """First row of the window of a text of ``base`` tokens, at a border of runs."""
        return max(0, base - self.window) // self.run * self.run

    def narrows(self, base: int) -> bool:
        """Whether a text of ``base`` tokens has rows that are not seen."""
        return self.start(base) > self.listed


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """What the rows of one feed see of the committed text."""

    rule: Rule
    row_LKN: Tensor
    """int32, rising; a dimension of size 1 serves all layers, or all heads."""
    choice: Choice | None = None
    """The pass chooses anew what follows the sinks in ``row_LKN``."""
    copies: Choice | None = None
    """Who keeps what was chosen side by side, for compiled code."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyValues:
    """Keys and values of the committed rows of a slot in one layer, as the cache holds them.

    Valid until the next pass or commit. Values are a view; so are keys, but where they lie in tiles.
    Numbers of a key that rotate together are neighbours, as `outpace.models.blocks.paired` lays queries out.
    """

    key_KDC: Tensor
    """Rotated by the rows' positions."""
    value_KCD: Tensor

    def __len__(self) -> int:
        return self.value_KCD.shape[1]

    @property
    def row_CY(self) -> Tensor:
        """One row per token: all keys, then all values; a copy."""
        parts = self.key_KDC.permute(2, 0, 1), self.value_KCD.transpose(0, 1)
        return torch.cat([part.flatten(1) for part in parts], 1)


class Readable(Protocol):
    """A target that can KV_READ."""

    def read(self, cache: KVCache, slot: int, layer: int) -> KeyValues:
        """Keys and values of the committed rows of a slot; what a draft feeds is not among them."""


def read(cache: KVCache, slot: int, layer: int) -> KeyValues:
    """What a dense cache holds of a slot.

    Raises:
        ModelError: no such layer, or another kind of cache.
    """
    if not isinstance(cache, DenseCache) or not 0 <= layer < cache.layers:
        raise ModelError(f"layer {layer} cannot be read in a {type(cache).__name__}")
    value_store, length = cache.value_store, cache.length(slot)
    if not length and slot >= value_store.shape[1]:  # memory comes with the first row
        none = value_store.new_zeros(value_store.shape[2], 0, value_store.shape[4])
        return KeyValues(none.transpose(1, 2), none)
    return KeyValues(cache.first_keys(layer, slot, length), value_store[layer, slot, :, :length])


class Choice:
    """Rows chosen for one sequence, and the queries that chose them.

    Args:
        layers: of the cache.
        rotation: of the layers that see all of the text.
    """

    def __init__(self, rule: Rule, layers: int, shape: HeadShape, rotation: Rotation) -> None:
        self.rule, self.rotation = rule, rotation
        self._lists = (layers, shape.kv) if rule.count else (1, 1)
        with torch.inference_mode(False):
            self.query_LX = torch.zeros(layers, shape.queries * shape.width)
            self.anew_L = torch.zeros(layers, dtype=torch.int64)
            """Whether the last pass that chose did so in that layer."""
        self._room: list[Tensor] = []
        self.base = -1
        """Committed tokens when it chose last; -1: never."""

    @cached_property
    def row_LKN(self) -> Tensor:
        """As in `KVView`; made for the first view, when the text is longer than the list."""
        with torch.inference_mode(False):
            return torch.arange(self.rule.listed, dtype=torch.int32).repeat(*self._lists, 1)

    def view(self, base: int, choose: bool = False) -> KVView | None:
        """What a feed sees.

        Args:
            base: committed tokens of its slot.
            choose: whether its pass chooses anew; it does where the rows chosen do not fit the text.

        Returns:
            None where the rule leaves nothing out.
        """
        if not self.rule.narrows(base):
            return None
        if self.rule.count == 0:
            return KVView(self.rule, self.row_LKN)
        if self.base < 0 or base < self.base:
            choose = True
            self.query_LX.zero_()
        if choose:
            self.base = base
        return KVView(self.rule, self.row_LKN, self if choose else None, self if self.rule.copies else None)

    def room(self, values: Tensor) -> list[Tensor]:
        """Memory for listed keys and values in blocks of 128, and for which blocks it holds.

        Args:
            values: of the cache, [L, slots, K, rows, D].
        """
        if not self._room:
            layers, _, heads, _, width = values.shape
            count = layers * heads * -(-self.rule.listed // 128)
            with torch.inference_mode(False):
                self._room = [values.new_empty(count, 2, 128 * width), torch.zeros(count, dtype=torch.int32)]
        return self._room

    def forget(self) -> None:
        """Choose anew at the next view."""
        self.base = -1


class _Group(Protocol):
    def attend(self, layer: int, window: int | None) -> None: ...


class NarrowGroup:
    """The rows of one span through its view, by torch: slow and obvious.

    Args:
        rest: does the layers with a sliding window.
    """

    def __init__(self, whole: Attention, cache: DenseCache, span: Span, rest: list[_Group]) -> None:
        self._whole, self._cache, self._span, self._rest = whole, cache, span, rest

    def attend(self, layer: int, window: int | None) -> None:
        if window is not None:
            for group in self._rest:
                group.attend(layer, window)
            return
        span, shape, view = self._span, self._whole.shape, self._span.view
        assert view is not None
        keys_KDC, values_KCD = (
            store[layer, span.slot].float() for store in (self._cache.key_store, self._cache.value_store)
        )
        rows = slice(span.start, span.start + len(span.stored))
        query_RKGD = self._whole.query_TKGD[rows] * shape.scale
        if view.choice is not None:
            choose(view.choice, layer, span, shape, self._whole.query_TKGD[span.start], keys_KDC)
        row_LKN = view.row_LKN.expand(self._cache.layers, shape.kv, -1)
        ways = [_way(span, row) for row in span.stored]
        own = range(view.rule.start(span.base), span.base)
        for head in range(shape.kv):
            seen = [*row_LKN[layer, head].tolist(), *own]
            for i, way in enumerate(ways):
                row_W = torch.tensor([*seen, *way], device=keys_KDC.device)
                score_GW = query_RKGD[i, head] @ keys_KDC[head][:, row_W]
                if shape.softcap is not None:
                    score_GW = shape.softcap * torch.tanh(score_GW / shape.softcap)
                mixed_GD = score_GW.softmax(-1) @ values_KCD[head][row_W]
                self._whole.out_TKGD[span.start + i, head] = mixed_GD.to(self._whole.out_TKGD.dtype)


def _way(span: Span, row: int) -> list[int]:
    """Storage rows of a tail row and its ancestors."""
    at = row - span.base
    way: list[int] = []
    if span.chain:
        return list(range(span.base, row + 1))
    while at >= 0:
        way.append(span.base + at)
        at = span.parents[at]
    return way[::-1]


def choose(
    choice: Choice, layer: int, span: Span, shape: HeadShape, query_KGD: Tensor, keys_KDC: Tensor
) -> None:
    """Choose rows of a layer by a rotated query, as choose.h does."""
    rule, turn_E = choice.rule, choice.rotation.at([span.positions[0]])[0, 0]
    halves = torch.view_as_complex(query_KGD.reshape(*query_KGD.shape[:2], -1, 2).contiguous())
    back_X = torch.view_as_real(halves * turn_E.conj()).flatten().cpu()
    known_X = choice.query_LX[layer]
    alike = torch.cosine_similarity(back_X, known_X, 0) if bool(known_X.any()) else torch.tensor(-2.0)
    choice.anew_L[layer] = int(alike < rule.least)
    if not choice.anew_L[layer]:
        return
    known_X.copy_(back_X)
    low, high = rule.sinks, rule.start(span.base)
    if 0 < rule.read < shape.width:
        size_KD = query_KGD.abs().sum(1)
        query_KGD = query_KGD * (size_KD >= size_KD.topk(rule.read).values[:, -1:])[:, None]
    score_KGC = shape.scale * query_KGD @ keys_KDC[:, :, low:high]
    score_KGCR = score_KGC.view(*score_KGC.shape[:2], -1, rule.run)
    peak_KGC = score_KGCR.amax(-1)
    vote_KC = score_KGCR.sum((1, 3)) if rule.kind == MEAN else peak_KGC.softmax(-1).sum(1)
    best_KC = vote_KC.topk(rule.count // rule.run).indices.sort().values
    row_KN = low + (best_KC[..., None] * rule.run + torch.arange(rule.run, device=best_KC.device)).flatten(1)
    choice.row_LKN[layer, :, rule.sinks :] = row_KN.to("cpu", torch.int32)


def fits(view: KVView, base: int) -> None:
    """Raise ModelError for a view that was not made for a text of ``base`` tokens."""
    made = -1 if view.choice is None else view.choice.base
    if made > base or not view.rule.narrows(base):
        raise ModelError(f"a view of {view.rule} does not fit {base} committed tokens; ask for another")
