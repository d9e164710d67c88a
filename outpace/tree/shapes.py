"""Tree templates: who hangs from whom, decided before anything is drawn.

chain      2x1        [-1,-1,0,0]

*-o-o-o    *-o-o      *-o-o
            +o-o       | +o
                       +o
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from outpace.errors import SpecError, shown
from outpace.files import expanded, parse_json
from outpace.types import ROOT, Budget, Shape, depths

CHAIN = Shape()
BEAM, LEAST = 8, 0.5
"""Of dynamic trees, see ``Shape``. A sibling that is drawn needs that share of a node."""
LEVELS = 8
"""Deepest dynamic tree where nobody says otherwise."""
CAPE, GUESSES = Shape(beam=1, siblings=(8, 8, 8, 6, 6, 6, 4, 4, 2, 2)), 4
"""A chain with siblings where the drafter is unsure, and its levels. Source: CaPE, arXiv:2402.02082."""
MAX_NODES = 1024
"""Templates larger than this are refused: no pass pays for them."""
_CAPE = re.compile(r"cape(:(?P<levels>[1-9]\d{0,2}))?")
_DYNAMIC = re.compile(r"dynamic(:(?P<beam>\d+)(:(?P<least>\d+(\.\d+)?))?)?")


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
    if len(parents) > MAX_NODES:
        raise SpecError(f"tree table: {len(parents)} nodes, more than {MAX_NODES}")
    for node, parent in enumerate(parents):
        if type(parent) is not int or not ROOT <= parent < node:
            raise SpecError(f"tree table: node {node} has parent {shown(parent)}, need an earlier node")
    return Shape(tuple(parents))


def parse_shape(text: str) -> Shape:
    """Read a shape as users write it.

        chain, 4x2x1          one guess per level; so many children per level
        [-1,-1,0,0,1]         a table of parents; FILE.json: one that ``outpace analyze shape`` wrote
        dynamic, dynamic:W    grown where it pays; with at most W nodes expanded per level
        dynamic:W:L           a guess gets a row if the drafter gives it L / ``tree_size`` or more to be
                              reached; 0 fills the tree
        cape, cape:D          a chain of 4 guesses, or of D, with siblings where the drafter is unsure

    Raises:
        SpecError: anything else, or a file without a table.
    """
    text = text.strip()
    if text.endswith(".json"):
        return read_shape(expanded(text))
    if text == "chain":
        return CHAIN
    if _CAPE.fullmatch(text):
        return CAPE
    grown = _DYNAMIC.fullmatch(text)
    if grown and (beam := int(grown["beam"] or BEAM)):
        return Shape(beam=beam, least=float(grown["least"] or LEAST))
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
        f"unknown tree {text!r}; use chain, dynamic, cape, children per level such as 4x2x1, "
        "a table of parents such as [-1,-1,0], or a file that ends in .json"
    )


def read_shape(file: Path) -> Shape:
    """Read a template from a JSON file: an object with ``parents``, or a list of them.

    Raises:
        SpecError: a file that is missing, unreadable, or holds no such table.
    """
    write = "write one with outpace analyze shape --out FILE.json"
    try:
        found = parse_json(file.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read tree file {file}: {error.strerror}; {write}") from None
    except ValueError:  # no UTF-8, or no JSON
        raise SpecError(f"tree file {file} is not JSON; {write}") from None
    parents = found.get("parents") if isinstance(found, dict) else found
    if not isinstance(parents, list) or any(type(parent) is not int for parent in parents):
        raise SpecError(f"tree file {file} holds no list of whole numbers 'parents'; {write}")
    try:
        return table(parents)
    except SpecError as error:
        raise SpecError(f"tree file {file}: {error}") from None


def children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Parent -> its children in draw order."""
    out: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        out.setdefault(parent, []).append(node)
    return out


def depth(parents: Sequence[int]) -> int:
    return max(depths(tuple(parents)), default=0)


def budget(tree: str | None, tree_size: int | None, default_nodes: int) -> Budget:
    """The budget that a method spec asks for.

    Args:
        tree: as ``parse_shape`` reads it; None is a chain.
        tree_size: most nodes; None: the whole template, or ``default_nodes`` for a chain.

    Raises:
        SpecError: a size below 0 or above MAX_NODES, or an unknown shape.
    """
    if tree_size is not None and not 0 <= tree_size <= MAX_NODES:
        raise SpecError(f"tree_size must be between 0 and {MAX_NODES}, got {tree_size}")
    shape = CHAIN if tree is None else parse_shape(tree)
    if tree is not None and (cape := _CAPE.fullmatch(tree.strip())):
        levels = int(cape["levels"] or GUESSES)
        size = min(MAX_NODES, levels * max(shape.siblings)) if tree_size is None else tree_size
        return Budget(max_nodes=size, max_depth=min(size, levels), shape=shape)
    if shape.beam:
        size = max(default_nodes, BEAM) if tree_size is None else tree_size
        return Budget(max_nodes=size, max_depth=min(size, LEVELS), shape=shape)
    if shape.parent_N is None:
        size = default_nodes if tree_size is None else tree_size
        return Budget(max_nodes=size, max_depth=size)
    size = len(shape.parent_N) if tree_size is None else min(tree_size, len(shape.parent_N))
    cut = shape.parent_N[:size]
    if tree is not None and tree.strip().endswith(".json"):
        shape = Shape(cut)  # in a file the likeliest nodes come first
    return Budget(size, depth(cut), shape=shape)
