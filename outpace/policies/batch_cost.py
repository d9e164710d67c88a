"""What a pass brings and costs, while it is settled sequence by sequence who drafts what in it.

    rate = sequences * geometric mean of the tokens that each is expected to emit / seconds

For one sequence, or for several alike, these are the tokens of the pass per second. Where they are
not alike, every sequence's own speed counts the same: one that copies twenty tokens at a time does
not make the others wait for its rows, nor their guesses worthless. (By the sum, it would run ahead,
and leave a small batch of slow sequences behind.)

Sequences share a pass, and the levels of a drafter, so the price of a draft depends on what the
others take. A row costs what the pass costs more with it: in a batch none is free.

Shape letters: C cuts of an option, from the shortest.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outpace.policies.costs import Costs
from outpace.types import Load

NONE = "none"
SPREAD = 16
"""Steps on which the reading of what a drafter has missed is laid, where it is to be used for
longer: all of it at once would forbid what pays soon after."""


@dataclass(slots=True)
class Share:
    """A sequence's part of a pass."""

    drafter: str = NONE
    kept: float = 0.0
    nodes: float = 0.0
    """Expected: a tree that finds nothing likely stays smaller than it may be."""
    levels: float = 0.0
    """Of drafting, expected as well; 1 if nothing tells levels apart."""
    late: float = 0.0
    """Seconds for reading what its drafter has missed, once."""


@dataclass(slots=True)
class Option:
    """A drafter that may be asked, by how far it is let go."""

    drafter: str
    kept_C: Sequence[float]
    """Tokens expected to be kept."""
    nodes_C: Sequence[float]
    levels_C: Sequence[float]
    asked_C: Sequence[tuple[int, int]]
    """Nodes and depth that it is granted."""
    promised_C: Sequence[float] | None = None
    """Tokens that it promises itself, if it gave a preview."""
    tree: bool = False
    """Whether its levels may have several nodes, and fewer than granted."""
    late: float = 0.0
    """Seconds for reading what the drafter has missed of the sequence."""

    @property
    def previewed(self) -> bool:
        """Whether it says what it would propose."""
        return self.promised_C is not None

    def share(self, cut: int) -> Share:
        """The part of a pass that it would take."""
        return Share(self.drafter, self.kept_C[cut], self.nodes_C[cut], self.levels_C[cut], self.late)


def described(name: str, preview: Sequence[float], depth: int, scale: float) -> Option | None:
    """What a drafter offers that tells what it would propose; None if that is nothing.

    Args:
        name: the drafter.
        preview: chance that each further guess is kept, as it says.
        depth: that it may be granted.
        scale: what its word has been worth lately.
    """
    if not preview:
        return None
    total, promised, kept_C, promised_C = 0.0, 0.0, [], []
    for chance in preview:
        promised += chance
        total += min(1.0, chance * scale)
        promised_C.append(promised)
        kept_C.append(total)
    sizes_C = range(1, len(preview) + 1)
    asked_C = [(nodes, depth) for nodes in sizes_C]
    return Option(name, kept_C, sizes_C, (1.0,) * len(preview), asked_C, promised_C=promised_C)


def at_once(late: float) -> float:
    """What late reading takes beyond the part that rates are charged with."""
    return late * (1.0 - 1.0 / SPREAD)


class BatchCost:
    """A pass under construction: all sequences but the one that is being settled.

    Args:
        costs: of passes and drafts.
        load: of the step.
        shares: what every sequence takes, or took a step ago.
    """

    def __init__(self, costs: Costs, load: Load, shares: Iterable[Share]) -> None:
        self._costs, self._load = costs, load
        self.shares: list[Share] = []
        """What every sequence takes; changes in ``put``."""
        # Sums over all of them, so that one is left out, or changed, without reading the others.
        self._logs = self._nodes = self._late = 0.0
        self._levels: dict[str, list[float]] = {}  # drafter -> of its users, the deepest last
        for share in shares:
            self.shares.append(share)
            self._add(share)
        self.batch = max(load.batch, len(self.shares))
        self._each = 1.0 / self.batch
        self._own = len(self.shares)
        still, self._weighing, self._more = costs.around(self._own)
        self._other = still + self._weighing
        self._passed: dict[int, float] = {}  # rows -> seconds; the same few are asked for often
        self._prices: dict[tuple[str, int], tuple[float, float]] = {}  # likewise
        self._users: dict[str, int] = {}
        self._deepest: dict[str, float] = {}

    def passed(self, rows: float) -> float:
        """Seconds of a pass over so many rows, on average."""
        low = int(rows)
        more = rows - low
        found = self._of(low)
        return found if more <= 0.0 else found + more * (self._of(low + 1) - found)

    def _of(self, rows: int) -> float:
        found = self._passed.get(rows)
        if found is None:
            found = self._costs.passed(rows, self._load.context, self.batch)
            self._passed[rows] = found
        return found

    def _price(self, drafter: str, users: int) -> tuple[float, float]:
        found = self._prices.get((drafter, users))
        if found is None:
            call, level = self._costs.price(drafter, users)
            found = self._prices[drafter, users] = call + self._more, level
        return found

    def put(self, index: int, share: Share) -> None:
        """Change what a sequence takes; ``leave_out`` comes next."""
        before, self.shares[index] = self.shares[index], share
        if before is share:
            return
        if before.levels:
            self._logs -= math.log1p(before.kept)
            self._nodes -= before.nodes
            self._late -= before.late
            self._levels[before.drafter].remove(before.levels)
        self._add(share)

    def _add(self, share: Share) -> None:
        if share.levels:
            self._logs += math.log1p(share.kept)
            self._nodes += share.nodes
            self._late += share.late
            bisect.insort(self._levels.setdefault(share.drafter, []), share.levels)

    def leave_out(self, index: int) -> None:
        """Look at the pass without this sequence; -1 leaves out none."""
        gone = self.shares[index] if index >= 0 and self.shares[index].levels else Share()
        self._draft = self._other + (self._late - gone.late) / SPREAD
        self._rows = self._own + self._load.beside + max(0.0, self._nodes - gone.nodes)
        self._users, self._deepest = {}, {}
        for name, levels in self._levels.items():
            mine = name == gone.drafter
            users = len(levels) - mine
            if users:
                # Only where the deepest one is left out is it the next that counts.
                deepest = levels[-2] if mine and levels[-1] == gone.levels else levels[-1]
                self._users[name], self._deepest[name] = users, deepest
                self._draft += users * self._price(name, 1)[0]
                self._draft += self._price(name, users)[1] * deepest
        logs = self._logs - math.log1p(gone.kept)
        self._mean = self.batch * math.exp(logs * self._each)

    def _joined(self, name: str) -> tuple[float, float, float]:
        """What a further user of a drafter adds: at once, per level; and what others paid."""
        users = self._users.get(name, 0)
        call, level = self._price(name, users + 1)
        paid = self._deepest.get(name, 0.0)
        if paid:
            call -= self._price(name, users)[1] * paid
        return call, level, paid

    def alike(self, options: Sequence[Option], margin: float) -> Share | None:
        """The part that a sequence would take of a drafter that nobody uses, if all were like it.

        A level is paid for once, so it may pay for all together and for none alone. None: it does
        not, by less than the margin.
        """
        own, beside = self._own, self._load.beside
        best = (1.0 + margin) * self.batch / self.plain()
        found = None
        for option in options:
            call, level = self._price(option.drafter, own)
            for cut in range(len(option.kept_C) if level > 0.0 else 0):
                share = option.share(cut)
                seconds = self.passed(own * (1 + share.nodes) + beside) + self._other
                seconds += own * (call + option.late / SPREAD) + level * share.levels
                rate = self.batch * math.pow(1.0 + share.kept, own * self._each) / seconds
                if rate > best:
                    best, found = rate, share
        return found

    def plain(self) -> float:
        """Seconds of the step, if nothing is drafted."""
        return self.passed(self._own + self._load.beside) + self._other

    def slower(self) -> float:
        """Seconds of the step as it was settled, over those of one where nothing is weighed."""
        self.leave_out(-1)
        taken = self._draft + self.passed(self._rows) + at_once(self._late)
        return taken / (self.plain() - self._weighing)

    def total(self) -> float:
        """The rate, when no sequence is left out."""
        return self._mean / (self._draft + self.passed(self._rows))

    def seconds(self, share: Share) -> float:
        """Of the step, if the sequence takes this part."""
        spent = self._draft
        if share.levels:
            call, level, paid = self._joined(share.drafter)
            spent += call + level * max(paid, share.levels) + share.late / SPREAD
        return spent + self.passed(self._rows + share.nodes)

    def rate(self, share: Share) -> float:
        """The rate of the batch, if the sequence takes this part."""
        return self._mean * math.pow(1.0 + share.kept, self._each) / self.seconds(share)

    def best(self, option: Option, deepest: float = float("inf")) -> tuple[float, int]:
        """The rate of an option, and how far it is best let go; within so many levels."""
        call, level, paid = self._joined(option.drafter)
        before, rows = self._draft + call + option.late / SPREAD, self._rows
        mean, each = self._mean, self._each
        found, at = 0.0, 0
        for cut, (more, nodes, levels) in enumerate(
            zip(option.kept_C, option.nodes_C, option.levels_C, strict=True)
        ):
            if cut and levels > deepest:
                continue
            spent = before + level * (levels if levels > paid else paid)
            rate = mean * math.pow(1.0 + more, each) / (spent + self.passed(rows + nodes))
            if rate > found:
                found, at = rate, cut
        return found, at
