"""What a step runs on, and how its drafters are asked: each once for all rows.

Drafters that can tell what their drafts promise are asked before the policy plans, all others after it.
What was made before is used where the plan wants it, whole or cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from outpace.cache.base import KVCache, Lease
from outpace.coins import Coins, Stream
from outpace.drafters.base import Drafter
from outpace.errors import LogitsError, OutpaceError
from outpace.models.base import TREE, Target
from outpace.policies.base import Policy, within
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import NOTHING, Budget, Draft, Drawn, Outcome, Plan, StepRecord, Verdict
from outpace.verifiers.base import Verifier


@dataclass(slots=True, eq=False)
class Member:
    """A drafter that may be picked for one sequence."""

    state: Any
    """The drafter's, for this sequence."""
    budget: Budget
    """How far it may draft here; see ``Method.budget_of``."""
    verifier: Verifier
    """Judges its drafts."""


class StepSequence(Protocol):
    """What a step needs of one sequence; `outpace.engine.sequence` and cascades implement it."""

    number: int
    """For records."""
    read_prompt: Callable[[int, Tensor], None] | None
    """Called with the logits of the prompt's tokens from a place on; None: nobody wants them."""
    tokens: list[int]
    """Committed ids; the last one is pending."""
    slot: int
    warp: Warp
    members: Mapping[str, Member]
    """Drafter spec -> member; the preferred drafter first."""
    verifier: Verifier
    """Judges where no member drafted."""
    policy_state: Any

    def coins(self, stream: Stream) -> Coins:
        """Coins for the present pending token."""

    def room(self) -> Budget:
        """What this sequence has room for: context, tokens still wanted, the request's limits."""

    def cut(self, verdict: Verdict) -> Verdict:
        """Shorten a verdict at the first stop: end of sequence, stop string, length."""

    def extend(self, outcome: Outcome) -> None:
        """Append what was emitted, which ``cut`` has passed."""

    def fail(self, error: Exception) -> None:
        """End here, since its own part of a step broke; or raise, and end the whole step."""

    @property
    def failed(self) -> bool:
        """Whether it ended so."""


@dataclass(slots=True, eq=False)
class Machine:
    """Everything a step runs on. One per batch; the rows carry what differs by sequence."""

    target: Target
    cache: KVCache
    drafters: Mapping[str, Drafter[Any]]
    """Method spec -> drafter."""
    policy: Policy
    want_laws: bool = False
    """Whether verdicts carry the distributions of the emitted tokens; a cascade hands them up."""
    chunk: int = 256
    """Prompt tokens per pass beside sequences that decode; see ``outpace.engine.scheduler``."""
    listeners: Sequence[Callable[[StepRecord], None]] = ()
    steps: int = field(default=0, init=False)

    def granted(self, name: str, row: StepSequence) -> Budget:
        least = self.drafters[name].traits.least_context
        return row.members[name].budget if len(row.tokens) > least else NOTHING

    def tapped(self, rows: Sequence[StepSequence]) -> frozenset[str]:
        """Drafters of these rows that read features."""
        return frozenset(name for row in rows for name in row.members if self.drafters[name].traits.taps)

    def taps(self, rows: Sequence[StepSequence]) -> frozenset[str]:
        """Features that some drafter of these rows reads."""
        return frozenset().union(*(self.drafters[name].traits.taps for name in self.tapped(rows)))


def foresee(
    machine: Machine, rows: Sequence[StepSequence], room_B: Sequence[Budget], wanted_B: Sequence[bool]
) -> list[dict[str, Draft]]:
    """Drafts of all drafters that can tell what they promise, for rows that want to know.

    Args:
        room_B: what each row has room for.
        wanted_B: which rows want to know.
    """
    made_B: list[dict[str, Draft]] = [{} for _ in rows]
    asked: dict[str, dict[int, Budget]] = {}
    for i, (row, room, wanted) in enumerate(zip(rows, room_B, wanted_B, strict=True)):
        for name, member in row.members.items() if wanted else ():
            if machine.drafters[name].traits.previews:
                asked.setdefault(name, {})[i] = within(member.budget, room)
    for name, budgets in asked.items():
        for i, one in _propose(machine, rows, name, budgets).items():
            made_B[i][name] = one
    return made_B


def draft(
    machine: Machine,
    rows: Sequence[StepSequence],
    plans: Sequence[Plan],
    made_B: Sequence[Mapping[str, Draft]],
) -> list[Draft]:
    """The drafts that were planned: of what ``foresee`` made, else each drafter is asked once."""
    drafts: dict[int, Draft] = {}
    asked: dict[str, dict[int, Budget]] = {}
    for i, plan in enumerate(plans):
        name, budget = plan.drafter, plan.budget
        if budget.max_nodes <= 0 or budget.max_depth <= 0:
            continue
        made = made_B[i].get(name)
        cut = None if made is None else machine.drafters[name].cut(rows[i].members[name].state, made, budget)
        if cut is None:
            asked.setdefault(name, {})[i] = budget
        else:
            drafts[i] = cut
    for name, budgets in asked.items():
        drafts |= _propose(machine, rows, name, budgets)
    return [drafts[i] if i in drafts else Draft() for i in range(len(rows))]


def _propose(
    machine: Machine, rows: Sequence[StepSequence], name: str, budgets: Mapping[int, Budget]
) -> dict[int, Draft]:
    """Ask a drafter for some rows, and check what it gives."""
    drafter, tapped = machine.drafters[name], machine.tapped(rows)
    wanted = [_draft_row(machine, rows[i], name, budget, tapped) for i, budget in budgets.items()]
    try:
        drafts = dict(zip(budgets, drafter.propose(wanted), strict=True))
    except LogitsError as error:
        raise LogitsError(f"drafter {name}, pass {machine.steps}: {error}") from error
    for (i, one), row in zip(drafts.items(), wanted, strict=True):
        if fault := row.fault(one):
            raise OutpaceError(f"drafter {name!r} broke its contract: a draft of {fault}")
        if one.view is not None and drafter.traits.lossless:
            raise OutpaceError(f"drafter {name!r} broke its contract: a view for verification")
        if one.resume is None:
            machine.cache.drop(rows[i].slot)  # what the drafter tried there
    return drafts


def _draft_row(
    machine: Machine, row: StepSequence, name: str, budget: Budget, tapped: frozenset[str]
) -> DraftRow[Any]:
    member = row.members[name]
    # What another drafter reads is computed from the bottom up, so nothing may be resumed.
    lease = Lease(machine.cache, row.slot, resumes=tapped <= {name})
    return DraftRow(
        member.state,
        row.tokens,
        budget,
        row.coins(Stream.DRAFT),
        row.warp,
        Drawn.CHOSEN if row.warp.greedy else member.verifier.draws,
        lease,
        chain=member.verifier.chains_only or TREE not in machine.target.can,
    )
