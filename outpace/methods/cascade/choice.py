"""Which levels draft at a step, and how far: what the text offers decides.

    text offers a long match      the lookup alone; the models rest
    text offers a short one       tokens of a model, then the lookup
    nobody is often right         no draft

Of all arrangements the one with the best rate is taken, tokens per pass of the target over one row:

    rate = (1 + sum of the chances that guesses are reached and kept) / cost

The chances of a lookup come with its draft (`outpace.drafters.worth`). Those of a model are learned
from verdicts on the same sequence. So is what the lookup adds behind a model. A pass of a model
costs its share of the target's weights, at least what a level is assumed to cost.

Everything is decided before a guess is drawn, from committed text and past verdicts alone. So a
guess has the distribution of its level, whatever was chosen.

Paper: Chen et al. 2023, Cascade Speculative Drafting, arXiv:2312.11462: its horizontal cascade puts
the level that is likeliest to be right first. Choosing that level step by step is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from outpace.curve import assumed
from outpace.drafters.worth import Chances, judged, promise
from outpace.methods.cascade.guesses import Origin
from outpace.types import Draft, Outcome

MODEL_TOKENS = (0, 1, 2, 3, 4, 6, 8)
"""How many tokens of a model are tried."""
TAIL = 8
"""Most tokens of the lookup behind a model."""
PRIOR, WEIGHT = 0.6, 4.0
"""What a model's acceptance is taken for at first, and how many guesses that counts for."""
SILENT = 0.4
"""The same of a guess of a lookup that names no chances."""
FORGET = 0.97
"""What an observation weighs after the next one."""
LEAST_SHARE = 0.1
"""Of a pass of the target: what a pass of a model costs at least, host work included."""
DEAR = 0.2
"""From this share on a lookup drafts for the model, too."""


@dataclass(slots=True)
class Mean:
    """A running mean of what was observed, and how far to believe it."""

    value: float
    weight: float = WEIGHT

    def learn(self, seen: float) -> None:
        self.weight = 1 + FORGET * self.weight
        self.value += (seen - self.value) / self.weight


@dataclass(slots=True)
class Belief:
    """What one sequence has shown of the levels."""

    kept: dict[int, Mean] = field(default_factory=dict)
    """Level -> share of its guesses that the target kept, of those it reached; 0: the lookup without
    chances of its own."""
    tail: Mean = field(default_factory=lambda: Mean(0.5))
    """Tokens that the lookup added behind a model, where its part was reached."""
    size: Mean = field(default_factory=lambda: Mean(2.0))
    """Tokens that it drafted there."""

    def chance(self, level: int) -> float:
        known = self.kept.get(level)
        return known.value if known is not None else (PRIOR if level else SILENT)

    def learn(self, outcome: Outcome) -> None:
        """Take in a verdict on a draft of this cascade."""
        memo = outcome.draft.memo
        if not isinstance(memo, Origin):
            if not isinstance(memo, Chances):
                for _, right in judged(outcome):
                    self._mean(0).learn(right)
            return
        made = memo.level_N
        behind = made.index(0) if 0 in made[1:] else len(made)
        for node, right in judged(outcome):
            if node < len(made) and made[node]:
                self._mean(made[node]).learn(right)
        verdict = outcome.verdict
        if len(verdict.kept) >= behind and not verdict.censored:
            self.tail.learn(len(verdict.kept) - behind)
        self.size.learn(len(made) - behind)

    def _mean(self, level: int) -> Mean:
        return self.kept.setdefault(level, Mean(PRIOR if level else SILENT))


def offered(draft: Draft, belief: Belief) -> list[float]:
    """For every guess of a lookup, the chance that it is reached and kept."""
    if isinstance(draft.memo, Chances):
        return promise(draft)
    return [belief.chance(0) ** depth for depth in draft.depth_N]


def choose(
    draft: Draft, belief: Belief, shares: Sequence[float], lookup: bool, most: int
) -> tuple[int, ...] | None:
    """Pick the arrangement with the best rate.

    Args:
        draft: what the lookup would say now.
        shares: of every model, strongest first.
        lookup: whether there is one.
        most: longest draft.

    Returns:
        Tokens of every model, then of the lookup behind them; None: the lookup alone.
    """
    chances = offered(draft, belief)
    alone = (1 + sum(chances)) / assumed(1 + len(chances)) if chances else 0.0
    best, best_rate = (0,) * (len(shares) + 1), 1.0
    for counts in arrangements(len(shares), most):
        tokens, reached, cost = 1.0, 1.0, 0.0
        for level, (count, share) in enumerate(zip(counts, shares, strict=True), 1):
            chance = belief.chance(level)
            for _ in range(count):
                reached *= chance
                tokens += reached
            cost += count * share
        rows, tail = 1 + sum(counts), 0
        if lookup and rows <= most:
            tail = min(TAIL, most + 1 - rows)
            tokens += reached * belief.tail.value
            rows += min(tail, round(belief.size.value))
        rate = tokens / (cost + assumed(rows))
        if rate > best_rate:
            best, best_rate = (*counts, tail), rate
    return None if alone >= best_rate else best


@lru_cache(maxsize=64)
def arrangements(models: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of tokens of every model, some above 0, as many as fit."""
    sizes = [size for size in MODEL_TOKENS if size <= most]
    return tuple(counts for counts in product(sizes, repeat=models) if 0 < sum(counts) <= most)
