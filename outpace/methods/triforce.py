"""Two levels: a cheap drafter speculates for the target over chosen chunks, which speculates for all of it.

    inner     a lookup, a model or a head guesses a few tokens
    middle    the target, seeing chosen chunks of its keys and values, judges them and adds one; again,
              until the draft is long enough
    outer     the target, seeing all, judges the draft

The middle level emits tokens by a lossless rule. So each has exactly the distribution of the target
through the view, and that is what the draft records. (The released code draws anew from that
distribution after a refusal, not from what the refusal leaves of it. So it records one that it did
not draw from.)

Chunks are chosen per head of keys by the mean score of the query heads that share it. The first
tokens and the last are always seen, so prompts may have any length and answers push no chunk out.

A draft is a chain. It pays for long texts, where the middle level is much cheaper than the target.

Paper: TriForce, arXiv:2404.11912; sampling from the inner level as in arXiv:2312.11462.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace import registry
from outpace.clock import Clocks, PassClock
from outpace.coins import Stream
from outpace.drafters.ahead import CoinsAhead, WarpAhead, goes_on
from outpace.drafters.base import Drafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.viewing import Seeing, seeing
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.models.base import VIEWS, Target
from outpace.models.views import MEAN, KVView, Rule
from outpace.sampling import laws_of_batch
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import CHAIN, budget
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Group, Law, Outcome, Scored, Verdict
from outpace.verifiers.base import Verifier

_LEVEL = 1
"""Names the coins of the inner and the middle level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TriforceConfig:
    draft: str = "suffix"
    """The inner drafter."""
    guesses: int = 3
    """Most tokens that it guesses for one pass of the middle level."""
    budget: int = 512
    """Tokens that the middle level sees: the first, the last and the chunks chosen."""
    chunk: int = 32
    """Tokens of a chunk; 32 fill a cache line with keys in bfloat16. The first chunk is always seen."""
    window: int = 128
    """Last tokens, always seen."""
    every: int = 8
    """Drafts from one choice of chunks to the next."""
    fall: float = 0.5
    """Choose anew when a smaller share of the last guesses was kept."""

    def __post_init__(self) -> None:
        if min(self.guesses, self.chunk, self.window, self.every, self.rule.count) < 1:
            raise ValueError(
                "guesses, chunk, window and every must be 1 or more, and budget have room for two chunks "
                f"and the window, got budget={self.budget} chunk={self.chunk} window={self.window}"
            )
        if not 0 <= self.fall <= 1:
            raise ValueError(f"fall must be in [0, 1], got {self.fall}")

    @property
    def rule(self) -> Rule:
        chunk = max(1, self.chunk)
        count = (self.budget - self.window - chunk) // chunk * chunk
        return Rule(sinks=chunk, window=self.window, count=count, kind=MEAN, run=chunk)


@dataclass(slots=True, eq=False)
class State:
    inner: Any
    seeing: Seeing
    draft: Draft | None = None


class Chain:
    """A draft under construction.

    Args:
        row: what was asked, with a lease.
        view: of its first pass.
    """

    def __init__(self, row: DraftRow[State], view: KVView, verifier: Verifier) -> None:
        assert row.lease is not None
        self.row, self.view, self.verifier, self.lease = row, view, verifier, row.lease
        self.most = min(row.budget.max_nodes, row.budget.max_depth)
        self.tokens, self.start = list(row.tokens), len(row.tokens)
        self.laws: list[Law | None] = []
        """The distribution that each token was drawn from; None: it was chosen."""
        self.warp = WarpAhead(row.warp, row.drawn is Drawn.CHOSEN)
        self.stopped = False

    @property
    def count(self) -> int:
        return len(self.laws)

    def asked(self, own: Budget) -> DraftRow[Any]:
        """What the inner drafter is asked."""
        size = min(own.max_depth, self.most - self.count - 1)
        most = size if self.row.chain else own.max_nodes
        drawn = Drawn.CHOSEN if self.warp.greedy else self.verifier.draws
        return DraftRow(
            self.row.state.inner,
            self.tokens,
            replace(own, max_nodes=most, max_depth=size, shape=CHAIN if self.row.chain else own.shape),
            self.coins(Stream.DRAFT),
            self.warp,
            drawn,
            chain=self.row.chain,
        )

    def coins(self, stream: Stream) -> CoinsAhead:
        return CoinsAhead(self.row.coins, _LEVEL, self.count, stream)

    def feed(self, draft: Draft) -> Feed:
        """The pending token and the guesses, behind the rows of the draft so far."""
        first = self.count
        parents = (first - 1, *(parent + 1 + first for parent in draft.parent_N))
        return Feed(self.lease.slot, (self.tokens[-1], *draft.token_N), parents, view=self.view)

    def take(self, draft: Draft, scored: Scored, verdict: Verdict) -> Outcome:
        """Add what the middle level emitted; leave its rows alone in the tail."""
        verdict = verdict.cut(self.most - self.count)
        kept = (0, *(node + 1 for node in verdict.kept[: len(verdict.emitted) - 1]))
        fed, start = (self.tokens[-1], *verdict.emitted[:-1]), len(self.tokens) - 1
        first = self.count
        self.lease.cache.prune(self.lease.slot, [*range(first), *(first + row for row in kept)])
        self.view = replace(self.view, choice=None)
        assert verdict.laws is not None
        for token, law, row in zip(verdict.emitted, verdict.laws, kept, strict=True):
            self.tokens.append(token)
            self.warp.advance((token,))
            self.laws.append(None if self.warp.greedy else law)
            rule, greedy = self.row.budget.stop, self.warp.greedy
            self.stopped |= not goes_on(rule, self.count, token, law, scored.logits_TV[row], greedy)
        return Outcome(draft, scored, verdict, fed, kept, start)

    @property
    def done(self) -> bool:
        return self.stopped or self.count >= self.most

    def draft(self) -> Draft:
        laws = tuple(law for law in self.laws if law is not None)
        groups = []
        for node in range(self.count):
            drawn = Drawn.CHOSEN if self.laws[node] is None else self.row.drawn
            groups.append(Group(node - 1, drawn, (node,), None if self.laws[node] is None else node))
        return Draft(
            tuple(self.tokens[self.start :]), tuple(range(ROOT, self.count - 1)), tuple(groups), laws
        )


class Triforce(WrappingDrafter[State]):
    """Drafts with the target over chosen chunks, for which a drafter speculates.

    Args:
        inner: any drafter that needs no slot lent.
    """

    Config = TriforceConfig
    traits = Traits(default_nodes=3, needs=frozenset({VIEWS}), samples=True, uses_target_cache=True)

    def __init__(self, config: TriforceConfig, inner: Drafter[Any], target: Target) -> None:
        self.config, self.target, self.rule = config, target, config.rule
        least = self.rule.listed + self.rule.window + self.rule.run
        self.traits = replace(self.traits, least_context=least)
        super().__init__([inner])
        self.verifier: Verifier = registry.make("verifier", "tree")
        self.coupled: Verifier = registry.make("verifier", "coupled")
        own = inner.traits
        nodes = config.guesses if own.default_tree is None else own.default_nodes
        shape = CHAIN if own.default_tree is None else budget(own.default_tree, nodes, nodes).shape
        self.own = Budget(nodes, config.guesses, shape=shape)
        """What the inner drafter may propose at a time."""

    @classmethod
    def load(cls, config: TriforceConfig, target: Target) -> Triforce:
        """Load the inner drafter.

        Raises:
            SpecError: one that cannot be read, or that drafts in the target's own slots.
            ModelError: as the inner drafter raises it.
        """
        (spec, *more) = split_parts(config.draft, "drafter 'triforce'")
        inner = load_part(spec, target)
        taken_back = not inner.traits.taps or type(inner).rewind is not Drafter.rewind
        if more or inner.traits.uses_target_cache or not taken_back:
            raise SpecError(
                f"drafter 'triforce': draft={config.draft} cannot draft for a draft; name one drafter with "
                "rows of its own, such as suffix, draft_model[model=M] or eagle3"
            )
        return cls(config, inner, target)

    def inner(self, state: State) -> Sequence[tuple[Drafter[Any], Any]]:
        return [(self.drafters[0], state.inner)]

    @property
    def clock(self) -> PassClock:
        return Clocks([self.drafters[0].clock, self.target.clock])

    def begin(self, request: Request) -> State:
        views = seeing(self.target, self.rule, self.config.every, self.config.fall)
        return State(self.drafters[0].begin(request), views)

    def propose(self, rows: Sequence[DraftRow[State]]) -> list[Draft]:
        """A chain each; empty without a lease, and while the chunks would be all of the text."""
        chains: dict[int, Chain] = {}
        for i, row in enumerate(rows):
            base = len(row.tokens) - 1
            if row.lease is None or not row.budget.max_nodes or not self.rule.narrows(base):
                continue
            view = row.state.seeing.look(base)
            if view is not None:
                row.lease.cache.drop(row.lease.slot)
                coupled = row.drawn is Drawn.COUPLED and not row.warp.greedy
                chains[i] = Chain(row, view, self.coupled if coupled else self.verifier)
        marks = {i: self.drafters[0].mark(chain.row.state.inner) for i, chain in chains.items()}
        active = list(chains.values())
        while active:
            self._round(active)
            active = [chain for chain in active if not chain.done]
        for i, chain in chains.items():  # what it read may not be kept
            chain.row.state.inner = self.drafters[0].rewind(chain.row.state.inner, marks[i])
        drafts = [chains[i].draft() if i in chains else Draft() for i in range(len(rows))]
        for row, draft in zip(rows, drafts, strict=True):
            row.state.draft = draft
        return drafts

    def _round(self, chains: Sequence[Chain]) -> None:
        """One pass of the middle level for all chains."""
        inner = self.drafters[0]
        drafts = [Draft()] * len(chains)
        asking = [i for i, chain in enumerate(chains) if chain.most - chain.count > 1]
        if asking:
            asked = [chains[i].asked(self.own) for i in asking]
            for i, row, draft in zip(asking, asked, inner.propose(asked), strict=True):
                if fault := row.fault(draft):
                    raise SpecError(f"drafter {self.config.draft!r} broke its contract: a draft of {fault}")
                drafts[i] = replace(draft, riders=None)
        feeds = [chain.feed(draft) for chain, draft in zip(chains, drafts, strict=True)]
        scored = self.target.score(feeds, chains[0].lease.cache, taps=inner.traits.taps)
        laws = laws_of_batch(scored, [chain.warp for chain in chains], drafts)
        told = []
        for i, (chain, draft) in enumerate(zip(chains, drafts, strict=True)):
            verdict = chain.verifier.judge(draft, laws[i], chain.coins(Stream.JUDGE), want_laws=True)
            told.append(chain.take(draft, scored.of(i), verdict))
        inner.observe([chain.row.state.inner for chain in chains], told)

    def observe(self, states: Sequence[State], outcomes: Sequence[Outcome]) -> None:
        """Tell the inner drafter what was committed, and note how much of the own drafts was kept."""
        for state, outcome in zip(states, outcomes, strict=True):
            if state.draft is not None and state.draft is outcome.draft and not outcome.verdict.censored:
                state.seeing.learn(len(outcome.verdict.kept), len(outcome.draft))
            state.draft = None
        self.drafters[0].observe([state.inner for state in states], outcomes)
        self.follow()

    def mark(self, state: State) -> Any:
        return self.drafters[0].mark(state.inner), state.seeing.age, state.seeing.kept

    def rewind(self, state: State, mark: Any) -> State:
        inner, state.seeing.age, state.seeing.kept = mark
        state.inner = self.drafters[0].rewind(state.inner, inner)
        state.seeing.choice.forget()
        state.draft = None
        return state
