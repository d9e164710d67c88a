"""Features of a pass by name: ``hidden.L``, ``hidden.-1``, ``attn_in.L`` and ``attn_out.L``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from outpace.errors import ModelError

_TAPS = ("hidden", "attn_in", "attn_out")


def check_taps(who: str, taps: Iterable[str], layers: range, attends: Sequence[bool]) -> None:
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
