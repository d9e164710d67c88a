"""Features of a pass by name: ``hidden.L``, ``hidden.-1``, ``attn_in.L`` and ``attn_out.L``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.models.room import Strip
from outpace.types import Features

_TAPS = ("hidden", "attn_in", "attn_out")


@lru_cache(256)
def check_taps(who: str, taps: frozenset[str], layers: range, attends: tuple[bool, ...]) -> None:
    """Refuse names that a pass over some layers cannot give.

    Args:
        layers: that all rows of the pass run.
        attends: whether the attention of each layer of the model runs.
    """
    for name in taps:
        kind, _, number = name.partition(".")
        layer = int(number) if number.removeprefix("-").isdecimal() else -2
        last = layers.stop if kind == "hidden" else layers.stop - 1
        if kind not in _TAPS or not (layers.start <= layer <= last or name == "hidden.-1"):
            raise ModelError(
                f"{who} has no tap {name!r} in a pass over layers {layers.start} to "
                f"{layers.stop - 1}; taps are hidden.L, hidden.-1, attn_in.L and attn_out.L"
            )
        if kind != "hidden" and not attends[layer]:
            raise ModelError(f"{who} has no tap {name!r}: it leaves this attention out")


def spread(x_RH: Tensor, index: Tensor, count: int) -> Tensor:
    """Features of some rows of a pass where those of all rows have their places; zeros elsewhere."""
    out_TH = x_RH.new_zeros(count, x_RH.shape[1])
    out_TH[index] = x_RH[: len(index)]
    return out_TH


def tap(taps: frozenset[str], seen: dict[str, Tensor], name: str, rows: Tensor) -> None:
    """Keep a copy of rows that somebody asked for."""
    if name in taps:
        seen[name] = rows.clone()


class SideBySide(Features):
    """Features of the same rows side by side in memory; each by name is a view of it.

    Args:
        names: of features of equal width, in their order.
    """

    def __init__(self, names: tuple[str, ...], strip: Strip) -> None:
        self.names, self.strip = names, strip

    def between(self, first: int, stop: int) -> SideBySide:
        """Some rows of all features, of the same memory; no tensor is made for that."""
        return SideBySide(self.names, self.strip.between(first, stop))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        width = self.strip.width // len(self.names)
        return self.strip.part(self.names.index(name) * width, width)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


Rows = slice | list[int] | None
"""Rows of features: the first ones, those of a list, or all."""


def cut(taps: Mapping[str, Tensor], rows: Rows) -> Mapping[str, Tensor]:
    """Some rows of all features; of the same memory unless they are those of a list."""
    if rows is None:
        return taps
    if not isinstance(taps, SideBySide):
        return {name: x[rows] for name, x in taps.items()}
    if isinstance(rows, slice):
        return taps.between(0, rows.stop)
    return SideBySide(taps.names, Strip.joined([(taps.strip, rows)]))


def joined(parts: Sequence[tuple[Mapping[str, Tensor], Rows]], names: Iterable[str]) -> Mapping[str, Tensor]:
    """Some rows of the features of several passes, one after another."""
    if len(parts) == 1:
        return cut(*parts[0])
    beside = [(taps, at) for taps, at in parts if isinstance(taps, SideBySide)]
    if len(beside) == len(parts) and len({taps.names for taps, _ in beside}) == 1:
        rows = [(taps.strip, _listed(taps, at)) for taps, at in beside]
        return SideBySide(beside[0][0].names, Strip.joined(rows))
    shown = [cut(*part) for part in parts]
    return {name: torch.cat([one[name] for one in shown]) for name in names}


def _listed(taps: SideBySide, rows: Rows) -> Sequence[int]:
    if isinstance(rows, list):
        return rows
    return range(taps.strip.rows if rows is None else rows.stop)


def beside(taps: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Features of these names [T, F] in their order: as they are if they lie so, else a copy."""
    if isinstance(taps, SideBySide) and taps.names == names:
        return taps.strip.tensor
    return torch.cat([taps[name] for name in names], -1)


def side_by_side(taps: Mapping[str, Tensor], rows: Rows, names: Sequence[str]) -> Strip | None:
    """Rows of features (None: all) where they lie side by side in this order; None elsewhere."""
    if not isinstance(taps, SideBySide) or taps.names != names:
        return None
    found = cut(taps, rows)
    assert isinstance(found, SideBySide)
    return found.strip
