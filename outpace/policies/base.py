"""The contract of a policy: numbers in, budgets out. It never sees a token or a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from outpace.coins import Coins
from outpace.policies.costs import Costs
from outpace.types import Budget, Load, Plan


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One sequence, as its policy sees it."""

    state: Any
    """From ``Policy.begin``."""
    drafters: Mapping[str, Budget]
    """Method specs that may be picked for this sequence, preferred first, each with the budget
    that its spec asks for; never empty."""
    limit: Budget
    """What the sequence has room for: no plan may ask for more."""
    coins: Coins
    """Stream POLICY."""
    previews: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Drafter -> what it would propose now, see ``Drafter.promise``; without those that cannot tell.
    Filled for ``plan`` alone, if the policy ``reads_previews``."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one step taught about one sequence."""

    drafter: str
    drafted: int
    depth: int
    """Of the draft."""
    accepted: int
    censored: bool
    """A stop cut the text: acceptance beyond ``accepted`` is unknown."""


class Policy(ABC):
    """Picks drafter and budget for every sequence of a step."""

    Config: ClassVar[type]
    """Frozen keyword-only dataclass; its fields are the keys of ``policy=NAME[...]``."""
    deterministic: ClassVar[bool] = True
    """Whether plans follow from the sequence's own past alone. Those that read costs depend on
    clocks and neighbours. Then the same seed promises the same text only under a verifier that
    makes the text independent of drafts. The engine takes that one for seeded requests."""
    reads_previews: ClassVar[bool] = False
    """Whether drafters are asked for previews before ``plan``."""
    reads_estimates: ClassVar[bool] = False
    """Whether it is of use only with a drafter that ``estimates``; others are then refused."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.costs = Costs()
        """What passes and drafts cost. The engine puts its own in and keeps it up to date."""

    def begin(self, key: str = "", greedy: bool = True, ruled: bool = False) -> Any:
        """State of a new sequence; None where the policy keeps none.

        Args:
            key: whose it is. What sequences of a key teach serves those of the same key alone.
            greedy: whether its temperature is 0.
            ruled: whether rules of the request say what may follow, so that it tells little of other texts.
        """
        return None

    def wants_previews(self, state: Any, load: Load) -> bool:
        """Whether a sequence is to have previews in this step."""
        return self.reads_previews

    @abstractmethod
    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        """One plan per row, within its limit. One call per step for the whole batch."""

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        """Update the states in ``rows``. Called once per step, after COMMIT."""
        return

    def learned(self) -> Any:
        """What it knows beyond single sequences, as plain data; None if it keeps nothing."""
        return None

    def recall(self, learned: Any) -> None:
        """Begin with what ``learned`` gave in another process; what is broken is ignored."""
        return


def within(budget: Budget, limit: Budget) -> Budget:
    """The budget, cut to what a sequence has room for."""
    fits = budget.max_nodes <= limit.max_nodes and budget.max_depth <= limit.max_depth
    if fits and budget.max_rows <= limit.max_rows:
        return budget
    nodes, depth = min(budget.max_nodes, limit.max_nodes), min(budget.max_depth, limit.max_depth)
    return replace(budget, max_nodes=nodes, max_depth=depth, max_rows=min(budget.max_rows, limit.max_rows))
