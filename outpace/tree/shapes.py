"""Tree templates: who hangs from whom, decided before anything is drawn.

    chain            widths 2,2,1           table -1,-1,0,0,1
    o-o-o-o          o-o-o                  o-o
                     | +-o-o                | +-o
                     +-o-o ...              +-o
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.errors import SpecError
from outpace.types import ROOT, Shape

CHAIN = Shape()
MAX_NODES = 1024
"""Templates larger than this are refused: no pass pays for them."""


def widths(counts: Sequence[int]) -> Shape:
    """Every node at level d gets ``counts[d]`` children; nodes are numbered level by level."""
    parents: list[int] = []
    level = [ROOT]
    for count in counts:
        start = len(parents)
        if start + count * len(level) > MAX_NODES:
            raise SpecError(f"tree {','.join(map(str, counts))} has over {MAX_NODES} nodes")
        parents.extend(parent for parent in level for _ in range(count))
        level = list(range(start, len(parents)))
    return Shape(tuple(parents))


def table(parents: Sequence[int]) -> Shape:
    """A template given by its parents, each ROOT or an earlier node."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise SpecError(f"tree table: node {node} has parent {parent}, need an earlier node")
    return Shape(tuple(parents))


def parse_shape(text: str) -> Shape:
    """Read a shape as users write it.

    ``chain``; ``4x2x1`` (children per level); ``[-1,-1,0,0,1]`` (a table of parents).

    Raises:
        SpecError: anything else.
    """
    text = text.strip()
    if text == "chain":
        return CHAIN
    try:
        if text.startswith("[") and text.endswith("]"):
            return table([int(part) for part in text[1:-1].split(",")])
        counts = [int(part) for part in text.split("x")]
        if counts and all(count >= 1 for count in counts):
            return widths(counts)
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
    raise SpecError(
        f"unknown tree {text!r}; use chain, children per level such as 4x2x1, "
        "or a table of parents such as [-1,-1,0]"
    )


def children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Parent -> its children in draw order."""
    out: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        out.setdefault(parent, []).append(node)
    return out
