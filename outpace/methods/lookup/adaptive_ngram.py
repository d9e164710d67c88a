"""Adaptive n-grams: the commonest successor of the longest known context, as far as it is trusted.

    contexts   "of the" -> city 3, king 1      "the" -> city 3, cat 5, king 1
    draft      ... of the [city]               order 3; "the" alone would have said "cat"

A model of the n-grams of one sequence, counted from the prompt and from every token since. A
draft asks the longest context first and backs off to shorter ones, token by token, each guess
becoming context for the next. Two things adapt, in ``observe`` alone:

- Every order keeps score of its guesses. A text in which pairs mislead soon leaves them out. One
  in which they hold does not wait for longer matches.
- The length of drafts doubles after one that used it up and was kept whole. After a miss it falls
  back to just over what was kept.

Beside prompt lookup, which copies on from one place, this follows the majority at every token.
That is better where the same phrase went on in several ways.

Cost: O(max_order) dictionary operations per token and per drafted token; about 300 bytes per
order and token of the sequence.
Paper: Ou et al. 2024, adaptive n-gram parallel decoding (ANPD), arXiv:2404.08698.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from outpace.drafters.base import Request, Traits
from outpace.drafters.rowwise import RowwiseDrafter
from outpace.drafters.worth import grow, judged
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import ROOT, Draft, Outcome

Gram = tuple[int, ...]

PRIOR = 3.0
"""Guesses that the first assumption about an order is worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveNgramConfig:
    max_order: int = 6
    """Longest n-gram counted, in tokens: a context and its successor."""
    min_length: int = 4
    """Draft length that misses never shrink below; a pass checks so many for nearly nothing."""

    def __post_init__(self) -> None:
        if not 2 <= self.max_order <= 16:
            raise ValueError(f"max_order must be between 2 and 16, got {self.max_order}")
        if self.min_length < 1:
            raise ValueError(f"min_length must be at least 1, got {self.min_length}")


@dataclass(frozen=True, slots=True)
class _Memo:
    owner: AdaptiveNgram
    """Whose guesses they are: another one counts other orders."""
    order_N: tuple[int, ...]
    """The order that proposed each node."""
    cut: bool
    """Whether it ended because its length was used up."""


@dataclass(slots=True, eq=False)
class _State:
    """The counts of one sequence, and how well they served."""

    tokens: list[int]
    length: int
    """Tokens that the next draft may have."""
    right: list[float]
    """Order -> guesses that were kept, with what is assumed at first."""
    made: list[float]
    """Order -> guesses that were reached, likewise."""
    count: dict[Gram, int] = field(default_factory=dict)
    best: dict[Gram, int] = field(default_factory=dict)
    """Context -> its commonest successor, the newest of equals."""

    def read(self, tokens: Iterable[int], max_order: int) -> None:
        for token in tokens:
            self.tokens.append(token)
            for order in range(1, min(max_order, len(self.tokens)) + 1):
                gram = tuple(self.tokens[-order:])
                count = self.count[gram] = self.count.get(gram, 0) + 1
                if order > 1:
                    context = gram[:-1]
                    known = self.best.get(context)
                    rival = None if known is None else (*context, known)
                    if rival is None or count >= self.count[rival]:
                        self.best[context] = token

    def chance(self, order: int, gram: Gram) -> float:
        """Chance of a guess: the order's record, times the share of its context's successors."""
        # The context's newest occurrence has no successor yet; it is counted all the same.
        share = self.count[gram] / max(self.count[gram], self.count[gram[:-1]] - 1)
        return share * self.right[order] / self.made[order]


class AdaptiveNgram(RowwiseDrafter[_State]):
    """Follows the commonest successor, from the longest context that has one."""

    Config = AdaptiveNgramConfig
    traits = Traits(default_nodes=20)

    def __init__(self, config: AdaptiveNgramConfig) -> None:
        self.config = config

    @classmethod
    def load(cls, config: AdaptiveNgramConfig, target: Target) -> AdaptiveNgram:
        return cls(config)

    def begin(self, request: Request) -> _State:
        """The text that is held already; the rest of the prompt arrives through ``observe``."""
        orders = range(self.config.max_order + 1)
        state = _State(
            tokens=[],
            length=2 * self.config.min_length,
            right=[PRIOR * _assumed(order) for order in orders],
            made=[PRIOR for _ in orders],
        )
        state.read(request.prompt[: request.num_cached], self.config.max_order)
        return state

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Count the new text; keep score of the orders; set the length of the next draft."""
        for state, outcome in zip(states, outcomes, strict=True):
            memo = outcome.draft.memo
            if isinstance(memo, _Memo) and memo.owner is self:
                self._learn(state, outcome, memo)
            state.read(outcome.appended, self.config.max_order)

    def propose_one(self, row: DraftRow[_State]) -> Draft:
        """A chain; in a template the siblings come from shorter contexts. CHOSEN."""
        state, most = row.state, self.config.max_order - 1
        order_of: dict[tuple[Gram, int], int] = {}

        def after(context: Gram) -> list[tuple[int, float, Gram]]:
            found: dict[int, tuple[float, int]] = {}
            for size in range(len(context), 0, -1):
                tail = context[-size:]
                token = state.best.get(tail)
                if token is not None and token not in found:
                    found[token] = state.chance(size + 1, (*tail, token)), size + 1
            out = []
            for token, (chance, order) in found.items():
                order_of[context, token] = order
                out.append((token, chance, (*context, token)[-most:]))
            # By chance, so that an order with a bad record stands back for a shorter one.
            return sorted(out, key=lambda item: -item[1])

        depth = min(row.budget.max_depth, state.length)
        start = tuple(state.tokens[-most:])
        draft = grow(after, start, replace(row.budget, max_depth=depth))
        contexts = {ROOT: start}
        orders = []
        for node, (token, parent) in enumerate(zip(draft.token_N, draft.parent_N, strict=True)):
            contexts[node] = (*contexts[parent], token)[-most:]
            orders.append(order_of[contexts[parent], token])
        longest = draft.levels
        return replace(draft, memo=_Memo(self, tuple(orders), longest == state.length))

    def _learn(self, state: _State, outcome: Outcome, memo: _Memo) -> None:
        draft, verdict = outcome.draft, outcome.verdict
        for node, right in judged(outcome):
            state.made[memo.order_N[node]] += 1
            state.right[memo.order_N[node]] += right
        if verdict.censored or not draft.token_N:
            return
        kept = len(verdict.kept)
        if kept == draft.levels:
            if memo.cut:
                state.length *= 2
        else:
            state.length = max(self.config.min_length, kept + 1)


def _assumed(order: int) -> float:
    """Share of an order's guesses that are kept, before there is any evidence."""
    match = max(1, order - 1)
    return match / (match + 2.5)
