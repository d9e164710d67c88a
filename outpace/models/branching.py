"""Trees of guesses, all of their levels in one call of compiled code: see trees.h.

`outpace.models.levels` does the same for chains. Here a level has as many rows as nodes were opened. The
rule that opens them is that of `outpace.tree.dynamic`; where others guessed before, that of
`outpace.methods.hybrid.union`.

Shape letters: B sequences, N nodes, L levels, G nodes below which something was drawn, D columns of logits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.compiled import library
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


class Rule(NamedTuple):
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
    def addresses(self) -> tuple[int, int, int]:
        """Of the prices of nodes and of levels, and of what logits are divided by."""
        of = self.row_N, self.level_L, self.temper_L
        return of[0].buffer_info()[0], of[1].buffer_info()[0], of[2].buffer_info()[0]

    @property
    def laws(self) -> int:
        """Distributions that there can be."""
        return 0 if self.draws is None else max(1, min(1 + self.seats, self.nodes - self.planted))


class Branching:
    """What is asked for: a tree per sequence."""

    def __init__(self, rule_B: Sequence[Rule]) -> None:
        self.rule_B = rule_B
        self.levels = max([rule.levels for rule in rule_B])
        self.seats = max([rule.seats for rule in rule_B])
        """Most rows of a slot behind those of the first level."""
        self.rows = max(len(rule_B), sum([rule.beam for rule in rule_B]))
        """Most rows of a level."""

    def run(self, level: Level, start: Start, id_D: Tensor | None, width: int) -> Trees:
        return run_trees(level, start, self, id_D, width)


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """The nodes that are worth their rows, and all that were drawn, in the order in which they were found."""

    levels: int
    """Passes that it took; 0 where some node has no distribution to draw from, and nothing else holds."""
    token_BN: Sequence[array[int]]
    parent_BN: Sequence[array[int]]
    tail_B3R: Sequence[Sequence[Sequence[int]]] = ()
    """Three lists about the rows behind those of the first level, where these may be kept. They hold nodes,
    or -1 where a row does not stay; tokens; and the rows of the tail that they hang from."""
    group_BG: Sequence[Sequence[int]] = ()
    """Nodes below which something was drawn, in the order in which that was done; none if all are chosen."""
    law_BG: Sequence[Sequence[tuple[Tensor, Tensor | None]]] = ()
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


_NO_IDS: Tensor | None = None
_LISTS = 11
"""Of candidates: tokens, parents, seats, places, the best, the open ones, of rows three, of groups two."""


class _Ground:
    """Memory that one tree grows in, for so many candidates; lists of them are no longer."""

    def __init__(self, one: _Tree, most: int) -> None:
        """Tell the tree where it is."""
        self.most, self.number, self.own_P = most, array("q", bytes(8 * _LISTS * most)), array("d")
        self._value = array("d", bytes(8 * most))
        at, one.value = self.number.buffer_info()[0], self._value.buffer_info()[0]
        lists = "token parent seat out best open seated".split()
        for i, name in enumerate(lists):
            setattr(one, name, at + 8 * most * i)
        one.group = at + 8 * most * (_LISTS - 2)

    def begin(self, one: _Tree, rule: Rule, lead: int, offset: int) -> None:
        """Put the guesses into it that a tree begins with, and say by what it grows."""
        begins = rule.begins
        one.nodes, one.depth, one.beam, one.fan = rule.nodes, rule.levels, rule.beam, rule.fan
        one.pays, one.least, one.lead, one.offset = rule.pays, rule.least, lead, offset
        one.row, one.level, one.temper = rule.addresses
        one.planted = rule.planted
        if begins is not None:
            count, number, own_P = rule.planted, self.number, array("d", begins.own_P)
            number[:count] = array("q", begins.token_P)
            number[self.most : self.most + count] = array("q", begins.parent_P)
            one.own, one.said = own_P.buffer_info()[0], begins.said_P.buffer_info()[0]
            one.bias, one.text, one.head = begins.weight
            self.own_P = own_P
        one.draws = 0

    def found(self, one: _Tree) -> tuple[array[int], array[int]]:
        """Tokens and parents of the nodes that stay."""
        return self.number[: one.count], self.number[self.most : self.most + one.count]

    def tail(self, one: _Tree, rule: Rule) -> Sequence[Sequence[int]]:
        """See ``Trees``."""
        starts = [6 * self.most + part * rule.seats for part in range(3)]
        return [self.number[start : start + one.seats] for start in starts]

    def groups(self, one: _Tree) -> array[int]:
        """Nodes below which something was drawn, each with the row of its distribution."""
        at = (_LISTS - 2) * self.most
        return self.number[at : at + 2 * one.groups]


class _Memory:
    """What so many trees read, write and tell, in levels of so many rows."""

    def __init__(self, level: Level, rows: int, trees: int, most: int) -> None:
        self.most, self.id_D = most, _NO_IDS
        self.tree = (_Tree * trees)()
        self.grounds = [_Ground(one, most) for one in self.tree]
        self.position, self.ids = (array("q", bytes(8 * rows)) for _ in range(2))
        self._window = array("q", [one or 0 for one in level.windows])
        self._gathered, self._spare = Piece(level.bytes // 4), Piece(level.columns)
        self.whole = _Trees(
            program=ctypes.addressof(level.call),
            passes=len(level.views),
            trees=trees,
            counts=level.counts,
            lent=level.lent,
            given=level.given,
            bytes=level.bytes // rows,
            gathered=self._gathered.address,
            stride=level.columns,
            tall=UNIT_ROWS // level.heads.group,
            window=self._window.buffer_info()[0],
            position=self.position.buffer_info()[0],
            id=self.ids.buffer_info()[0],
            spare=self._spare.address,
            tree=ctypes.addressof(self.tree),
        )


def run_trees(level: Level, start: Start, asked: Branching, id_D: Tensor | None, width: int) -> Trees:
    """Grow trees below pending tokens, whose rows the first level has.

    Args:
        id_D: tokens of the columns of logits; None: their places.
        width: how many columns there are.
    """
    code, call, rules, cache = library(), level.call, asked.rule_B, start.cache
    assert code is not None and level.first is not None
    most = max([rule.most for rule in rules])
    memory: _Memory | None = level.memory.get(len(rules))
    if memory is None or memory.most < most:
        memory = level.memory[len(rules)] = _Memory(level, asked.rows, len(rules), most)
    trees, whole = memory.tree, memory.whole
    head, out = level.address[level.head] or 0, level.address[level.out] or 0
    beam_B, seats_B = [rule.beam for rule in rules], [rule.seats for rule in rules]
    for view in level.views:
        view.branch(cache, start.slot_B, start.row_B, head, out, beam_B, seats_B)
    last, laws = 0, []
    for i, rule in enumerate(rules):
        row, offset = start.row_B[i], start.offset_B[i]
        memory.grounds[i].begin(trees[i], rule, row - cache.length(start.slot_B[i]), offset)
        laws.append(None if rule.draws is None else _Laws(trees[i], rule, width))
        last = max(last, offset + row + rule.levels - 2)
    tell(call, level.heads, cache, level.views, level.turns, memory.position, last)
    whole.width, whole.first, whole.logits = width, ctypes.addressof(level.first), level.logits
    whole.gave = None if level.lent == NONE else level.address[level.lent]
    whole.look = level.views[0].looks.buffer_info()[0]
    if memory.id_D is not id_D:
        assert id_D is None or id_D.is_contiguous()
        memory.id_D, whole.column = id_D, None if id_D is None else id_D.data_ptr()
    levels = code.outpace_trees(ctypes.byref(whole))
    grown = [*zip(memory.grounds, trees, strict=True)]
    tokens, parents = zip(*[ground.found(one) for ground, one in grown], strict=True)
    tails: list[Sequence[Sequence[int]]] = []
    if level.lent == NONE:  # rows that are made from outputs are not kept
        tails = [ground.tail(one, rule) for (ground, one), rule in zip(grown, rules, strict=True)]
    if not any(laws):
        return Trees(levels, tokens, parents, tails)
    group_BG = [ground.groups(one) for ground, one in grown]
    law_BG = [
        [] if own is None else [own.law(row) for row in pairs[1::2]]
        for own, pairs in zip(laws, group_BG, strict=True)
    ]
    return Trees(levels, tokens, parents, tails, [pairs[::2] for pairs in group_BG], law_BG)


class _Laws:
    """Distributions that a tree is drawn from, in memory that they keep."""

    def __init__(self, one: _Tree, rule: Rule, width: int) -> None:
        """Tell the tree where they are written."""
        draws, count = rule.draws, rule.laws
        assert draws is not None
        self._prob_GD, self._id_GD = torch.empty(count, width), _NO_IDS
        one.draws, one.key, one.position = 1 + draws.races, draws.key, draws.position
        one.law, one.temperature, one.sibling = self._prob_GD.data_ptr(), draws.temperature, draws.sibling
        one.truncated = 0
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
