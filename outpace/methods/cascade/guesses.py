"""A draft of a cascade while it is made, and what a sequence keeps from one to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.coins import Coins, Stream
from outpace.drafters.ahead import CoinsAhead, WarpAhead, goes_on
from outpace.machine import Member
from outpace.methods.cascade.ahead import Soft
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import NOTHING, ROOT, Budget, Draft, Drawn, Group, Law, Outcome, Verdict
from outpace.verifiers.base import Verifier

if TYPE_CHECKING:
    from outpace.methods.cascade.choice import Belief

BELOW = "below"
"""What an inner step calls its drafter."""


@dataclass(slots=True, eq=False)
class Reading:
    """Where a lookup stands in one sequence."""

    state: Any
    read: int
    """Committed tokens that it knows."""
    mark: Any = None
    ahead: list[int] = field(default_factory=list)
    """Guesses that it has read since the mark."""
    judged: list[tuple[int, Draft, Verdict]] = field(default_factory=list)
    """Its drafts in the present proposal that a level judged: pending position, draft, verdict."""


@dataclass(slots=True, eq=False)
class State:
    slots: list[int]
    """Of each language model's cache."""
    reading: Reading | None
    """None without a lookup."""
    draft: Draft | None = None
    """The last proposal."""
    belief: Belief | None = None
    """What the levels are worth here, where the text decides which of them draft."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The memo of a draft that levels made together."""

    level_N: tuple[int, ...]
    """Level of every node of its chain, from 1; 0: the lookup."""
    prob_N: tuple[float, ...] = ()
    """What that level gave every node, and 1 for the lookup; of use at temperature 0."""


class Guesses:
    """A draft under construction: a chain, and what could have come in place of its first token.

    Implements ``outpace.machine.StepSequence``, so that inner steps can build it.

    Args:
        row: what was asked; its coins are the outer ones.
        leaders: candidates wanted for the first token.
        lenient: whether levels review leniently.
    """

    number = 0
    failed = False
    policy_state: Any = None
    read_prompt: Any = None

    def __init__(self, row: DraftRow[State], most: int, leaders: int = 1, *, lenient: bool = False) -> None:
        self.row, self.most, self.leaders, self.lenient = row, most, leaders, lenient
        self.tokens = list(row.tokens)
        self.laws: list[Law | None] = []
        """One per guess; None: it was chosen."""
        self.origin: list[int] = []
        """The level that made each guess."""
        self.rivals: list[int] = []
        """The other leaders, in the order in which they were drawn."""
        self.stopped = False
        self.probs: list[float] = []
        self.warp: Warp = WarpAhead(row.warp, row.drawn is Drawn.CHOSEN)
        self.greedy = self.warp.greedy
        """Whether every level gives its likeliest token, or what it takes for one."""
        if self.greedy and lenient:
            self.warp = Soft(row.warp)
        self.members: Mapping[str, Member] = {}
        self.slot = self._level = 0
        self._context = 1 << 30

    @property
    def count(self) -> int:
        return len(self.laws)

    @property
    def guessed(self) -> list[int]:
        return self.tokens[len(self.row.tokens) :]

    @property
    def coupled(self) -> bool:
        """Whether it is drawn with coins that the target shares."""
        return self.row.drawn is Drawn.COUPLED and not self.greedy

    def enter(self, level: int, context: int, verifier: Verifier) -> None:
        """Be a row of a level's machine from now on."""
        self._level, self._context = level, context
        self.slot = self.row.state.slots[level - 1]
        self.verifier = verifier
        self.members = {BELOW: Member(self.row.state, Budget(1 << 16, 1 << 16), verifier)}

    def wants(self, total: int) -> bool:
        """Whether the present level may add to it, up to so many guesses."""
        fits = len(self.tokens) < self._context
        return fits and not self.stopped and self.count < min(total, self.most)

    def append(self, token: int, law: Law | None, level: int = 0, prob: float = 1.0) -> None:
        """Add a guess of a level; 0: of the lookup."""
        self.tokens.append(token)
        self.warp.advance((token,))
        self.laws.append(law)
        self.origin.append(level)
        self.probs.append(prob)

    def coins(self, stream: Stream) -> Coins:
        return CoinsAhead(self.row.coins, self._level, self.count, stream)

    def room(self) -> Budget:
        """The last token of the draft is never drafted by the level below."""
        depth = min(self.most - self.count - 1, self._context - len(self.tokens))
        return Budget(1 << 16, depth) if depth > 0 else NOTHING

    def cut(self, verdict: Verdict) -> Verdict:
        """A length fixed before anything was drawn, so what is left has its distribution."""
        return verdict.cut(self.most - self.count)

    def fail(self, error: Exception) -> None:
        raise error

    def extend(self, outcome: Outcome) -> None:
        """Take what a level emitted, with its true distributions."""
        verdict = outcome.verdict
        assert verdict.laws is not None
        if self.count == 0 and self.leaders > 1:
            self._find_rivals(outcome, verdict.laws[0])
        laws = [None] * len(verdict.emitted) if self.greedy else verdict.laws
        rows = (0, *(node + 1 for node in verdict.kept))
        for token, law, true, row in zip(verdict.emitted, laws, verdict.laws, rows, strict=False):
            if self.stopped:
                return
            soft = self.greedy and self.lenient
            self.append(token, law, self._level, true.prob(token) if soft else 1.0)
            rule, logits_V = self.row.budget.stop, outcome.scored.logits_TV[row]
            self.stopped = not goes_on(rule, self.count, token, true, logits_V, self.greedy)

    def _find_rivals(self, outcome: Outcome, law: Law) -> None:
        first, wanted = outcome.verdict.emitted[0], self.leaders - 1
        if self.greedy:
            (ranked,), _ = self.warp.ranking(outcome.scored.logits_TV[:1], [()], self.leaders)
            self.rivals = [token for token in ranked if token != first][:wanted]
        elif self.row.drawn is Drawn.COUPLED:
            self.rivals = self.row.coins.race(law, 1, self.leaders)[1:]
        else:
            rest: Law | None = law
            for i in range(1, self.leaders):
                if self.row.drawn is Drawn.DISTINCT:
                    rest = law.without([first, *self.rivals])
                if rest is None:
                    break
                self.rivals.append(self.row.coins.choose(rest, ROOT, i))

    def draft(self) -> Draft:
        """The chain, then the rivals below the pending token."""
        tokens = self.guessed
        laws: list[Law] = []
        groups: list[Group] = []
        parents = list(range(ROOT, len(tokens) - 1))
        at = {tokens[0]: 0} if tokens else {}
        for node, law in enumerate(self.laws):
            nodes = [node]
            for token in self.rivals if node == 0 else ():
                if token not in at:
                    at[token] = len(tokens)
                    tokens.append(token)
                    parents.append(ROOT)
                nodes.append(at[token])
            drawn = Drawn.CHOSEN if law is None else self.row.drawn
            groups.append(Group(node - 1, drawn, tuple(nodes), None if law is None else len(laws)))
            if law is not None:
                laws.append(law)
        memo = Origin(tuple(self.origin), tuple(self.probs))
        return Draft(tuple(tokens), tuple(parents), tuple(groups), tuple(laws), memo=memo)
