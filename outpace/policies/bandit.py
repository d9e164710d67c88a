"""Thompson sampling over drafters and depths: believe one of the plausible acceptance rates.

Every drafter has a Beta(a, b) posterior of its acceptance, per sequence. Kept levels are successes, the
first one refused is the one failure; what lay behind it was never tried. Every step draws a rate for each
drafter, and takes the drafter and the depth that would emit most per second if these were true. Drafting
nothing is an arm whose tokens are known. While it wins, the policy looks at the others less and less often.

Old evidence fades, so that posteriors follow the text. The coins are the sequence's own.

Source: EESD's Beta-TS, arXiv:2406.03853; costs in place of its coin per token are our own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.coins import Coins
from outpace.policies.arms import pick
from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.policies.tuning import TUNING
from outpace.types import NOTHING, Budget, Load, Plan

_BITS = 32
_LONGEST = 5  # a pause lasts at most 2 to this power steps


@dataclass(frozen=True, kw_only=True, slots=True)
class BanditConfig:
    """Settings of the policy."""

    forget: float = 0.96
    """What is left of the evidence after each draft; 1 never forgets."""
    prior: float | None = None
    """Acceptance believed in at the start, with the weight of two observations; none: what
    `outpace tune` measured here, else a constant."""

    def __post_init__(self) -> None:
        if not 0.0 < self.forget <= 1.0:
            raise ValueError(f"forget must be in (0, 1], got {self.forget}")
        if self.prior is not None and not 0.0 < self.prior < 1.0:
            raise ValueError(f"prior must be in (0, 1), got {self.prior}")


@dataclass(slots=True)
class Posterior:
    """Evidence about one drafter, of one sequence."""

    kept: float = 0.0
    refused: float = 0.0


@dataclass(slots=True)
class _State:
    posteriors: dict[str, Posterior] = field(default_factory=dict)
    pause: int = 0
    """Steps until the next draw."""
    won: int = 0
    """How often in a row drafting nothing has won."""


class Bandit(Policy):
    """The drafter and depth that a draw from what is believed of them says."""

    Config = BanditConfig
    config: BanditConfig
    deterministic = False

    def begin(self, key: str = "", greedy: bool = True, ruled: bool = False) -> _State:
        """No evidence."""
        return _State()

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """Cost: some microseconds per sequence, drafter and depth."""
        return [self._one(row, load) for row in rows]

    def _one(self, row: PolicyRow, load: Load) -> Plan:
        state: _State = row.state
        if state.pause:
            state.pause -= 1
            return Plan("none", NOTHING)
        thetas = {
            name: draw(state.posteriors.setdefault(name, Posterior()), self._prior(name), row.coins, place)
            for place, name in enumerate(row.drafters)
        }
        found = pick(self, thetas, row.drafters, load)
        if found is None:
            state.won = min(state.won + 1, _LONGEST)
            state.pause = (1 << state.won) - 1
            return Plan("none", NOTHING)
        state.won = 0
        name, nodes, depth = found
        own = row.drafters[name]
        return Plan(
            name, within(Budget(nodes, depth, own.max_rows, shape=own.shape, stop=own.stop), row.limit)
        )

    def _prior(self, drafter: str) -> float:
        """Acceptance believed in before anything is seen of a sequence."""
        if self.config.prior is not None:
            return self.config.prior
        kept_D, tried_D = self.costs.kept(drafter)
        return (sum(kept_D) + 2.0 * TUNING.hope) / (sum(tried_D) + 2.0)

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Update the posteriors; an empty draft teaches nothing."""
        for row, seen in zip(rows, evidence, strict=True):
            if seen.depth == 0:
                continue
            one: Posterior = row.state.posteriors.setdefault(seen.drafter, Posterior())
            one.kept = one.kept * self.config.forget + seen.accepted
            refused = seen.accepted < seen.depth and not seen.censored
            one.refused = one.refused * self.config.forget + refused


def draw(state: Posterior, prior: float, coins: Coins, place: int = 0) -> float:
    """An acceptance rate from the posterior; the same coins draw the same one."""
    number = sum(coins.flip(0.5, _BITS * place + bit) << bit for bit in range(_BITS))
    generator = random.Random(number)
    return generator.betavariate(state.kept + 2.0 * prior, state.refused + 2.0 * (1.0 - prior))
