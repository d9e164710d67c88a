"""Trees of guesses, all of their levels in one call of compiled code: see trees.h.

`outpace.models.levels` does the same for chains. Here a level has as many rows as nodes were opened, and
a rule opens them: that of `outpace.tree.dynamic`; where others guessed before, that of
`outpace.methods.hybrid.union`.

Shape letters: B sequences, N nodes, L levels, G nodes below which something was drawn, D columns of logits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outpace.kernels.compiled import library
from outpace.models.attention import Span
from outpace.models.fused import UNIT_ROWS, tell
from outpace.models.levels import Level, Start
from outpace.models.operations import NONE
from outpace.models.room import Piece


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beginning:
    """Guesses that a tree has before the first level, P of them: parents before children."""

    token_P: Sequence[int]
    parent_P: Sequence[int]
    own_P: Sequence[float]
    """Chance of each to be kept, given that its parent is."""
    said_P: array[float]
    """Chance that the levels gave to it; written where they got to."""
    weight: tuple[float, float, float]
    """A constant, and what log odds of the two chances of a guess count."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draws:
    """How guesses are drawn."""

    races: bool
    """Siblings are drawn together, by a race; else slot by slot, without replacement."""
    temperature: float
    """Of the softmax that they are drawn from."""
    truncation: tuple[int, float, float]
    """Of it: top-k, top-p and min-p."""
    truncates: Callable[[int], bool]
    """Whether that leaves less than all of so many columns."""
    key: int
    """What the keys of coins, or positions of races, are mixed into (`outpace.coins`)."""
    position: int
    """Of the pending token."""
    sibling: float
    """A race has another sibling if the chance that all before it are refused is above."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rule:
    """By what one tree grows."""

    nodes: int
    levels: int
    beam: int
    """Most nodes of a level that are expanded."""
    fan: int
    """Most children of a node."""
    pays: bool
    """Whether nodes and levels are weighed against their prices."""
    least: float
    """A guess counts if the chance to reach and keep it is above."""
    row_N: array[float]
    """Price of each node, up to those of a level that is behind the last one."""
    level_L: array[float]
    """Price of each level."""
    temper_L: array[float]
    """What the logits of each level are divided by first."""
    begins: Beginning | None = None
    draws: Draws | None = None
    """None: guesses are chosen."""

    @property
    def planted(self) -> int:
        """Guesses to begin with."""
        return 0 if self.begins is None else len(self.begins.token_P)

    @property
    def most(self) -> int:
        """Candidates that there can be."""
        return self.fan * (1 + self.seats) + self.planted

    @property
    def seats(self) -> int:
        """Most rows behind those of the first level."""
        return (self.levels - 1) * self.beam

    @property
    def laws(self) -> int:
        """Distributions that there can be."""
        return 0 if self.draws is None else max(1, min(1 + self.seats, self.nodes - self.planted))


@dataclass(frozen=True)
class Branching:
    """What is asked for: a tree per sequence."""

    rule_B: Sequence[Rule]

    @cached_property
    def levels(self) -> int:
        return max(rule.levels for rule in self.rule_B)

    @cached_property
    def seats(self) -> int:
        """Most rows of a slot behind those of the first level."""
        return max(rule.seats for rule in self.rule_B)

    @cached_property
    def rows(self) -> int:
        """Most rows of a level."""
        return max(len(self.rule_B), sum(rule.beam for rule in self.rule_B))

    def run(self, level: Level, start: Start, id_D: Tensor | None, width: int) -> Trees:
        return run_trees(level, start, self, id_D, width)


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """The nodes that are worth their rows, and all that were drawn, in the order in which they were found."""

    levels: int
    """Passes that it took; 0 where some node has no distribution to draw from, and nothing else holds."""
    token_BN: Sequence[array[int]]
    parent_BN: Sequence[array[int]]
    tail_B3R: Sequence[Sequence[Sequence[int]]]
    """Of the rows behind those of the first level: nodes, or -1 where they do not stay; tokens; and the rows
    of the tail that they hang from."""
    group_BG: Sequence[Sequence[int]]
    """Nodes below which something was drawn, in the order in which that was done."""
    law_BG: Sequence[Sequence[tuple[Tensor, Tensor | None]]]
    """The distribution below each, and its tokens; None: those of the columns."""


class _Tree(ctypes.Structure):
    """``Tree`` of trees.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "nodes depth beam fan pays".split()),
        ("least", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in "row level temper".split()),
        ("planted", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("own", "said")),
        *((name, ctypes.c_double) for name in ("bias", "text", "head")),
        ("draws", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("temperature", "sibling")),
        ("key", ctypes.c_uint64),
        ("position", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("truncated", "top_k")),
        *((name, ctypes.c_double) for name in ("top_p", "min_p")),
        *((name, ctypes.c_void_p) for name in ("law", "support", "width", "group")),
        ("groups", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in "lead offset".split()),
        *((name, ctypes.c_void_p) for name in "value token parent seat out best open seated".split()),
        *((name, ctypes.c_int64) for name in "count ranked opens seats".split()),
    ]


class _Trees(ctypes.Structure):
    """``Trees`` of trees.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("program", "first")),
        *((name, ctypes.c_int64) for name in "passes trees counts lent given bytes".split()),
        *((name, ctypes.c_void_p) for name in "gathered gave logits".split()),
        *((name, ctypes.c_int64) for name in "width stride tall".split()),
        *((name, ctypes.c_void_p) for name in "window look position id column spare tree".split()),
    ]


def run_trees(level: Level, start: Start, asked: Branching, id_D: Tensor | None, width: int) -> Trees:
    """Grow trees below pending tokens, whose rows the first level has.

    Args:
        id_D: tokens of the columns of logits; None: their places.
        width: how many columns there are.
    """
    code, call, rules, cache = library(), level.call, asked.rule_B, start.cache
    assert code is not None and level.first is not None
    assert id_D is None or id_D.is_contiguous()
    spans: list[Span] = []
    lead_B: list[int] = []
    last = first = 0
    for slot, row, rule, offset in zip(start.slot_B, start.row_B, rules, start.offset_B, strict=True):
        base, lead = cache.length(slot), row - cache.length(slot)
        lead_B.append(lead)
        last = max(last, offset + row + rule.levels - 2)
        room = [0] * rule.seats
        parents, depths = [*range(-1, lead - 1), *room], [*range(lead), *room]
        spans.append(Span(slot, first, range(row, row + rule.beam), base, parents, depths, False))
        first += rule.beam
    head, out = level.address[level.head] or 0, level.address[level.out] or 0
    for view in level.views:
        view.look(cache, spans, head, out, levels=asked.levels)
    position = array("q", bytes(8 * asked.rows))
    tell(call, level.heads, cache, level.views, level.turns, position, last)
    memory = [_memory(rule) for rule in rules]
    trees = (_Tree * len(rules))(*map(_tree, rules, lead_B, start.offset_B, memory))
    own_B = [_plant(*one) for one in zip(trees, rules, memory, strict=True)]
    laws = [_Laws(one, rule, width) for one, rule in zip(trees, rules, strict=True)]
    spare = Piece(width if any(rule.laws for rule in rules) else 0)
    ids, window = array("q", position), array("q", [one or 0 for one in level.windows])
    each = level.bytes // asked.rows
    gathered = Piece(level.bytes // 4)
    whole = _Trees(
        program=ctypes.addressof(call),
        first=ctypes.addressof(level.first),
        passes=len(level.views),
        trees=len(rules),
        counts=level.counts,
        lent=level.lent,
        given=level.given,
        bytes=each,
        gathered=gathered.address,
        gave=None if level.lent == NONE else level.address[level.lent],
        logits=level.logits,
        width=width,
        stride=level.columns,
        tall=max(1, UNIT_ROWS // level.heads.group),
        window=window.buffer_info()[0],
        look=level.views[0].looks.buffer_info()[0],
        position=position.buffer_info()[0],
        id=ids.buffer_info()[0],
        column=None if id_D is None else id_D.data_ptr(),
        spare=spare.address,
        tree=ctypes.addressof(trees),
    )
    levels = code.outpace_trees(ctypes.byref(whole))
    del own_B  # what trees read and wrote
    found = [_found(*one) for one in zip(trees, rules, memory, laws, strict=True)]
    return Trees(levels, *zip(*found, strict=True))


class _Laws:
    """Distributions that a tree is drawn from, in memory that they keep."""

    def __init__(self, one: _Tree, rule: Rule, width: int) -> None:
        """Tell the tree where they are written."""
        draws, count = rule.draws, rule.laws
        self._id_GD: Tensor | None = None
        if draws is None:
            return
        self._prob_GD = torch.empty(count, width)
        one.law, one.draws, one.key = self._prob_GD.data_ptr(), 1 + draws.races, draws.key
        one.temperature, one.sibling, one.position = draws.temperature, draws.sibling, draws.position
        if draws.truncates(width):
            self._id_GD, self._widths = torch.empty(count, width, dtype=torch.int64), array("q", [0] * count)
            one.support, one.width, one.truncated = self._id_GD.data_ptr(), self._widths.buffer_info()[0], 1
            one.top_k, one.top_p, one.min_p = draws.truncation

    def law(self, row: int) -> tuple[Tensor, Tensor | None]:
        """One of them, and its tokens, which are those of the columns if there is none."""
        if self._id_GD is None:
            return self._prob_GD[row], None
        width = self._widths[row]
        return self._prob_GD[row, :width].clone(), self._id_GD[row, :width].clone()


def _memory(rule: Rule) -> tuple[array[int], array[float]]:
    """Room for candidates: tokens, parents, seats, places, then lists of nodes, and groups; and values."""
    lists = rule.nodes + rule.beam + 3 * rule.seats + 2 * rule.laws
    return array("q", bytes(8 * (4 * rule.most + lists))), array("d", bytes(8 * rule.most))


def _plant(one: _Tree, rule: Rule, memory: tuple[array[int], array[float]]) -> array[float] | None:
    """Put guesses into a tree; gives their chances, which must outlive the call."""
    begins = rule.begins
    if begins is None:
        return None
    count, numbers, own_P = len(begins.token_P), memory[0], array("d", begins.own_P)
    numbers[:count] = array("q", begins.token_P)
    numbers[rule.most : rule.most + count] = array("q", begins.parent_P)
    one.planted, one.own, one.said = count, own_P.buffer_info()[0], begins.said_P.buffer_info()[0]
    one.bias, one.text, one.head = begins.weight
    return own_P


def _found(
    one: _Tree, rule: Rule, memory: tuple[array[int], array[float]], laws: _Laws
) -> tuple[array[int], array[int], list[array[int]], array[int], list[tuple[Tensor, Tensor | None]]]:
    """Tokens and parents of the nodes that stay, the rows of the tail, and what was drawn from."""
    numbers, most, seats = memory[0], rule.most, rule.seats
    at = 4 * most + rule.nodes + rule.beam
    tail = [numbers[first : first + one.seats] for first in (at, at + seats, at + 2 * seats)]
    pairs = numbers[at + 3 * seats : at + 3 * seats + 2 * one.groups]
    drawn = [laws.law(row) for row in pairs[1::2]]
    return numbers[: one.count], numbers[most : most + one.count], tail, pairs[::2], drawn


def _tree(rule: Rule, lead: int, offset: int, memory: tuple[array[int], array[float]]) -> _Tree:
    at, most = memory[0].buffer_info()[0], 8 * rule.most
    return _Tree(
        nodes=rule.nodes,
        depth=rule.levels,
        beam=rule.beam,
        fan=rule.fan,
        pays=rule.pays,
        least=rule.least,
        row=rule.row_N.buffer_info()[0],
        level=rule.level_L.buffer_info()[0],
        temper=rule.temper_L.buffer_info()[0],
        lead=lead,
        offset=offset,
        value=memory[1].buffer_info()[0],
        token=at,
        parent=at + most,
        seat=at + 2 * most,
        out=at + 3 * most,
        best=at + 4 * most,
        open=at + 4 * most + 8 * rule.nodes,
        seated=at + 4 * most + 8 * (rule.nodes + rule.beam),
        group=at + 4 * most + 8 * (rule.nodes + rule.beam + 3 * rule.seats),
    )
