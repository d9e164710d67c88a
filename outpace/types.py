"""The records that travel between the five verbs of a step. Standard library and torch only.

Trees live on the host as tuples of ints: they are small, and reading them never waits for a
device. Distributions and features are tensors and stay where the pass left them.

Shape letters: N drafted nodes, J = N + 1 scored rows (the pending token first), V vocabulary,
H hidden size, R riders, T rows of a whole batch.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor

from outpace.curve import CostCurve as CostCurve
from outpace.curve import KnownDrafter as KnownDrafter
from outpace.curve import Price as Price
from outpace.law import Law as Law
from outpace.law import VocabMap as VocabMap
from outpace.records import Choice as Choice
from outpace.records import Load as Load
from outpace.records import RowRecord as RowRecord
from outpace.records import StepRecord as StepRecord
from outpace.records import depths as depths

ROOT = -1
"""The parent of the first guesses: the pending token, which is committed but not yet scored."""


class Drawn(enum.Enum):
    """How the siblings of a group were picked. Correct verification depends on it."""

    __hash__ = object.__hash__  # that of enum is Python

    CHOSEN = "chosen"
    """By any rule that does not read the target's coins: lookup, top-k, beam."""
    IID = "iid"
    """Sampled from q; a token may be drawn more than once."""
    DISTINCT = "distinct"
    """Sampled from q without replacement, in draw order."""
    GREEDY_PLUS_ONE = "greedy_plus_one"
    """All but the last are q's most probable tokens; the last is sampled from the rest of q."""
    HUB = "hub"
    """Two: one sampled from q, then q's most probable token; if it was that one, another from the rest."""
    COUPLED = "coupled"
    """From q with the target's own position-keyed coins; only the verifier `coupled` takes it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings that were picked together, in draw order."""

    parent: int
    """The node they hang from, or ROOT."""
    drawn: Drawn
    nodes: tuple[int, ...]
    """Draw -> node. A repeated IID draw names the same node again."""
    law: int | None = None
    """Row of ``Draft.laws`` that they were drawn from; None iff CHOSEN."""


@dataclass(frozen=True, slots=True, eq=False)
class Riders:
    """Rows computed in the same pass that nobody else sees and nobody verifies.

    Each sees the cache, the path of its node and its own chain, at position = depth. Their
    keys and values are never kept.
    """

    node_R: tuple[int, ...]
    """The node whose path a rider sees; ROOT for the pending token."""
    after_R: tuple[int, ...]
    """The rider before it in its chain, or -1 if it follows its node directly."""
    token_R: tuple[int, ...] | None = None
    """Ids (a lookahead window), or None when embeddings are given."""
    embed_RH: Tensor | None = None
    """Embeddings (trained prompt tokens), or None when ids are given."""
    layer: int = 0
    """Where they enter. Above 0 they come with ``enter``, and with neither ids nor embeddings."""
    enter: Callable[[Tensor], Tensor] | None = None
    """Makes of the states [R, H] of the riders' nodes before ``layer`` those that the riders enter with."""
    ahead_R: tuple[int, ...] | None = None
    """Positions of riders behind that of their node; None: one more for every rider of a chain."""
    through: Any = None
    """A target like the one that runs the pass, whose weights the riders run through from ``layer`` on;
    None: those of the target."""
    logits: bool = True
    """Whether their logits are wanted besides their last hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class Resume:
    """Work that drafting already did below a layer, handed to verification.

    The rows listed enter the pass at ``layer``; their keys and values below it are in their
    slots. Rows not listed run the first layers in the same call, then join.
    """

    layer: int
    row_K: tuple[int, ...]
    """Covered rows; 0 is the pending token."""
    hidden_KH: Tensor
    """Residual stream of those rows on entry to ``layer``."""


class Rooted:
    """A forest of guesses, by the ways down to its nodes."""

    __slots__ = ()
    token_N: Sequence[int]
    parent_N: Sequence[int]

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the first guess down to ``node``; empty for ROOT."""
        up = []
        while node != ROOT:
            up.append(node)
            node = self.parent_N[node]
        return tuple(reversed(up))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Tokens along ``path(node)``."""
        return tuple(self.token_N[i] for i in self.path(node))


@dataclass(frozen=True, eq=False)
class Draft(Rooted):
    """A forest of guesses that hangs from the pending token. May be empty."""

    token_N: tuple[int, ...] = ()
    parent_N: tuple[int, ...] = ()
    """ROOT or an earlier node; siblings of one parent carry distinct tokens."""
    groups: tuple[Group, ...] = ()
    """In the order in which a parent's groups are tried; every node is in at least one."""
    laws: tuple[Law, ...] = ()
    """The distributions really drawn from. One row may serve many parents."""
    riders: Riders | None = None
    resume: Resume | None = None
    view: Any = None
    """What verification sees (``Feed.view``): of drafters that are not lossless alone."""
    memo: Any = None
    """Opaque to all but the drafter; comes back in the outcome."""

    def __post_init__(self) -> None:
        if len(self.token_N) != len(self.parent_N):
            raise ValueError(f"{len(self.token_N)} tokens but {len(self.parent_N)} parents")
        if len(set(zip(self.parent_N, self.token_N, strict=True))) != len(self.token_N):
            raise ValueError(f"siblings repeat a token: {self.token_N} under {self.parent_N}")
        if self.groups is chosen_groups(self.parent_N):
            return
        if self.groups and (self.parent_N, self.groups) == chain(len(self), self.groups[0].drawn):
            return
        seen: set[int] = set()
        for group in self.groups:
            if (group.law is None) != (group.drawn is Drawn.CHOSEN):
                verb = "must" if group.law is None else "must not"
                raise ValueError(f"a group drawn {group.drawn.value!r} {verb} name its distribution")
            if any(self.parent_N[node] != group.parent for node in group.nodes):
                raise ValueError(f"group of {group.parent} holds another's child: {group.nodes}")
            seen.update(group.nodes)
        if len(seen) != len(self.token_N):
            raise ValueError(f"{len(self.token_N)} nodes but groups name {len(seen)} of them")

    def __len__(self) -> int:
        return len(self.token_N)

    @classmethod
    def chosen(cls, tokens: Sequence[int], parents: Sequence[int] | None = None, memo: Any = None) -> Draft:
        """A deterministic draft: one CHOSEN group per parent, children in node order.

        Args:
            parents: ROOT or an earlier node each; None makes a chain.
        """
        parent_N = tuple(range(-1, len(tokens) - 1) if parents is None else parents)
        return cls(tuple(tokens), parent_N, chosen_groups(parent_N), memo=memo)

    @property
    def num_rows(self) -> int:
        """Rows of a pass: the pending token, the guesses, and their riders."""
        return 1 + len(self) + (0 if self.riders is None else len(self.riders.node_R))

    @property
    def depth_N(self) -> tuple[int, ...]:
        """Depth of each node; a child of the pending token has depth 1."""
        return depths(self.parent_N)

    @cached_property
    def levels(self) -> int:
        return max(self.depth_N, default=0)

    def path_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Nodes that carry the first of some tokens, root first."""
        child = {branch: node for node, branch in enumerate(zip(self.parent_N, self.token_N, strict=True))}
        path = [ROOT]
        for token in tokens:
            if (node := child.get((path[-1], token))) is None:
                break
            path.append(node)
        return tuple(path[1:])

    @cached_property
    def groups_of(self) -> Mapping[int, tuple[Group, ...]]:
        """Parent -> its groups, in the order they are tried."""
        table: dict[int, list[Group]] = {}
        for group in self.groups:
            table.setdefault(group.parent, []).append(group)
        return {parent: tuple(groups) for parent, groups in table.items()}


@lru_cache(256)
def chain(count: int, drawn: Drawn) -> tuple[tuple[int, ...], tuple[Group, ...]]:
    """Parents and groups of a chain of so many guesses: the same objects every time."""
    laws = [None] * count if drawn is Drawn.CHOSEN else range(count)
    return tuple(range(-1, count - 1)), tuple(Group(i - 1, drawn, (i,), law) for i, law in enumerate(laws))


@lru_cache(1024)
def chosen_groups(parent_N: tuple[int, ...]) -> tuple[Group, ...]:
    """CHOSEN groups of a tree, one per parent, children in node order: the same object every time."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parent_N):
        if not ROOT <= parent < node:
            raise ValueError(f"parents must come before children, got {parent_N}")
        children.setdefault(parent, []).append(node)
    return tuple(Group(parent, Drawn.CHOSEN, tuple(nodes)) for parent, nodes in children.items())


@dataclass(frozen=True, slots=True)
class Signals:
    """What a stop rule may read about open branches. It never sees a token not yet drawn.

    Tensors are [F], on the host: one entry per open branch of one sequence's draft.
    """

    depth_F: Tensor
    """int64 depth of the last drawn node."""
    q_F: Tensor
    """float32, probability that the drafter gave to the last drawn token."""
    reach_F: Tensor | None = None
    """float32, the drafter's estimate of the chance that all nodes above the last drawn one are
    accepted. Of a drafter that foresees: that the branch is, and a guess drawn next. None where it was not
    asked (``Budget.estimate``) or makes none."""


class StopRule(Protocol):
    """Decides which branches grow on. Pure; called once per level and sequence."""

    def more(self, signals: Signals) -> Tensor:
        """True (bool [F]) where the branch may get children."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which tree to grow; ``outpace.tree.shapes`` makes and reads it.

    ``parent_N`` is a template in node order (siblings in draw order); None is a chain, as long
    as the budget allows. A template is cut, never stretched, by a smaller budget.
    """

    parent_N: tuple[int, ...] | None = None
    beam: int = 0
    """Most nodes expanded per level of a tree that grows where the drafter's own probabilities say
    it pays (``outpace.tree.dynamic``); 0: trees have a template."""
    least: float = 0.0
    """A place of such a tree is filled if verification gets there more often than ``least / max_nodes``."""
    siblings: tuple[int, ...] = ()
    """Of a chain with siblings: tokens of a level, by tenths of the drafter's highest probability there."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of one draft of one sequence."""

    max_nodes: int
    max_depth: int
    max_rows: int = 1 << 30
    """Nodes and riders together."""
    shape: Shape = Shape()
    stop: StopRule | None = None
    """Cutting at a length fixed before drawing, or after a token that is kept, is safe.
    Dropping a token because of what it turned out to be is not: it biases the output."""
    estimate: bool = False
    """Whether the drafter is asked how likely its guesses are accepted: ``Signals.reach_F``."""
    price: Price | None = None
    """What levels and rows of a dynamic tree cost; None: as assumed, with the drafter's own levels."""


NOTHING = Budget(max_nodes=0, max_depth=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's decision for one sequence and one step."""

    drafter: str
    """Method spec of the drafter to ask; ``"none"`` asks nobody."""
    budget: Budget
    choice: Choice | None = None
    """Of a policy that weighs drafters against each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """One sequence's part of a pass: the tokens to append to its cache slot, uncommitted.

    Rows that a slot holds beyond its committed length form its *tail*, in the order in which
    they were fed. ``KVCache.keep`` commits a path of the tail and drops the rest.
    """

    slot: int
    token_J: tuple[int, ...]
    parent_J: tuple[int, ...]
    """Tail index of each row's parent, earlier than the row; -1: it follows the committed text."""
    want: tuple[int, ...] | None = None
    """Rows (indices into this feed) whose logits are wanted; None means all."""
    riders: Riders | None = None
    """Their nodes count from ROOT = row 0 of the slot's tail."""
    resume: Resume | None = None
    view: Any = None
    """Which committed rows its rows see (``outpace.models.views``, needs VIEWS); None: all."""

    @classmethod
    def chain(cls, slot: int, tokens: Sequence[int], want: tuple[int, ...] | None = None) -> Feed:
        """Tokens that follow each other."""
        return cls(slot, tuple(tokens), tuple(range(-1, len(tokens) - 1)), want)

    @classmethod
    def tree(cls, slot: int, pending: int, draft: Draft) -> Feed:
        """The pending token and a draft below it; the tail holds only what ``resume`` covers."""
        tokens, parents = (pending, *draft.token_N), (-1, *[parent + 1 for parent in draft.parent_N])
        return cls(slot, tokens, parents, riders=draft.riders, resume=draft.resume, view=draft.view)

    @property
    def wanted(self) -> int:
        """How many rows of logits this feed asks for."""
        return len(self.token_J) if self.want is None else len(self.want)


class Features(Mapping[str, Tensor]):
    """Features of the same rows by name, which can be cut together."""

    @abstractmethod
    def between(self, first: int, stop: int) -> Features:
        """Some rows of all of them, as views."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What a pass returns for its feeds. Valid until the end of COMMIT: copy what you keep."""

    logits_TV: Tensor
    """Wanted rows of all feeds, feed by feed."""
    start_B: tuple[int, ...]
    """First row of each feed in ``logits_TV``, then the total."""
    taps: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> features [rows, H] of all rows fed, feed by feed."""
    lasting: bool = field(default=False, kw_only=True)
    """Whether features stay as they are for whoever keeps them."""
    tap_start_B: tuple[int, ...] = (0,)
    rider_hidden_RH: Tensor | None = None
    rider_logits_RV: Tensor | None = None
    rider_start_B: tuple[int, ...] = (0,)
    best: tuple[Sequence[int], Sequence[float]] | None = None
    """Index and value of the largest logit of every row, as `outpace.rows.best_rows` has them, if known."""

    def of(self, index: int) -> Scored:
        """The part of one feed, as views; of the only one all of it."""
        if len(self.start_B) == 2:
            return self
        lo, hi = self.start_B[index], self.start_B[index + 1]
        taps, tap_start, rider_start = self.taps, self.tap_start_B[:1], self.rider_start_B[:1]
        if self.taps:
            a, b = self.tap_start_B[index], self.tap_start_B[index + 1]
            taps = taps.between(a, b) if isinstance(taps, Features) else {n: x[a:b] for n, x in taps.items()}
            tap_start = (0, b - a)
        riders: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.rider_hidden_RH is not None:
            a, b = self.rider_start_B[index], self.rider_start_B[index + 1]
            logits = self.rider_logits_RV
            riders = (self.rider_hidden_RH[a:b], None if logits is None else logits[a:b])
            rider_start = (0, b - a)
        part = self.logits_TV[lo:hi]
        return Scored(part, (0, hi - lo), taps, tap_start, *riders, rider_start, lasting=self.lasting)

    def last(self, ending: Sequence[bool]) -> Scored:
        """With the last row alone of every feed that ends, and no other logits."""
        kept = [stop - 1 for stop, end in zip(self.start_B[1:], ending, strict=True) if end]
        if len(kept) == self.start_B[-1]:
            return self
        starts = (0, *accumulate(map(int, ending)))
        return replace(self, logits_TV=self.logits_TV[kept], start_B=starts, best=None)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What the target decided about one draft."""

    kept: tuple[int, ...]
    """Node indices of the accepted path, root first."""
    emitted: tuple[int, ...]
    """The kept tokens, then the one that the target added itself."""
    laws: tuple[Law, ...] | None = None
    """True distributions of the emitted tokens, where the caller asked for them."""
    censored: bool = False
    """A stop cut the emitted tokens short: then ``len(emitted) == len(kept)``, otherwise one
    more. What would have followed is unknown, so acceptance is not learned from the cut."""
    doubted: int | None = None
    """Place of an emitted token that a drafter doubts (``Traits.doubts``): the text ends there."""

    def cut(self, length: int) -> Verdict:
        """The same verdict after at most ``length`` emitted tokens (at least one)."""
        if length >= len(self.emitted):
            return self
        laws = None if self.laws is None else self.laws[:length]
        return Verdict(self.kept[:length], self.emitted[:length], laws, censored=True)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Everything that COMMIT tells a drafter or a listener about one sequence."""

    draft: Draft
    scored: Scored
    verdict: Verdict
    fed: tuple[int, ...]
    """Tokens that entered the cache for good, in order."""
    row_F: tuple[int, ...]
    """Rows of the pass that hold the fed tokens; features of ``fed[i]`` are in row ``row_F[i]``."""
    start: int
    """Position of the first fed token in its sequence."""
    forced: bool = False
    """The fed tokens were given (a prompt), not judged. ``verdict.emitted`` then holds the first
    new token if the prompt is complete, else nothing."""
    drafter: str = "none"
    """Who proposed the draft."""

    @property
    def appended(self) -> tuple[int, ...]:
        """Tokens that the text gained, for drafters that follow it by ids: a part of a prompt too."""
        return (*self.fed, *self.verdict.emitted) if self.forced else self.verdict.emitted
