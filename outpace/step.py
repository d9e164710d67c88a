"""One step of generalized speculative decoding, in five verbs.

    PLAN    a policy gives every sequence a drafter and a budget
    DRAFT   the drafters guess token trees
    SCORE   the target scores pending tokens and trees of the whole batch in one pass
    JUDGE   the verifier keeps a path of each tree and adds one token
    COMMIT  caches, sequences, drafters and policy advance past what was emitted

Plain decoding is the empty draft; a chain is a tree of width one; a batch is the only case; a
prompt is a pass whose tokens are already decided. There is no second path through this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from outpace.cache.base import KVCache, Lease
from outpace.clock import StepClock
from outpace.coins import Coins, Stream
from outpace.drafters.base import Drafter
from outpace.errors import LogitsError, OutpaceError, RequestError
from outpace.models.base import TREE, Target
from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.sampling import Warp, laws_of_batch
from outpace.tree.growth import DraftRow
from outpace.tree.mask import is_chain
from outpace.types import (
    NOTHING,
    Budget,
    Draft,
    Drawn,
    Feed,
    Load,
    Outcome,
    Plan,
    RowRecord,
    Scored,
    StepRecord,
    Verdict,
)
from outpace.verifiers.base import Verifier


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
    states: Mapping[str, Any]
    """Drafter spec -> this sequence's state; the drafters that may be picked."""
    budgets: Mapping[str, Budget]
    """Drafter spec -> the budget that it asks for, preferred drafter first."""
    verifiers: Mapping[str, Verifier]
    """Drafter spec -> verifier of its drafts; ``"none"`` is always among them."""
    policy_state: Any

    def coins(self, stream: Stream) -> Coins:
        """Coins for the present pending token."""
        ...

    def room(self) -> Budget:
        """What this sequence has room for: context, tokens still wanted, the request's limits."""
        ...

    def cut(self, verdict: Verdict) -> Verdict:
        """Shorten a verdict at the first stop: end of sequence, stop string, length."""
        ...

    def extend(self, outcome: Outcome) -> None:
        """Append what was emitted, which ``cut`` has passed."""
        ...

    def fail(self, error: Exception) -> None:
        """End here, since its own part of a step broke; or raise, and end the whole step."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it ended so."""
        ...


@dataclass(slots=True, eq=False)
class Machine:
    """Everything a step runs on. One per batch; the rows carry what differs by sequence."""

    target: Target
    cache: KVCache
    drafters: Mapping[str, Drafter[Any]]
    """Method spec -> drafter."""
    policy: Policy
    want_laws: bool = False
    """Whether verdicts carry the laws of the emitted tokens; a cascade hands them up."""
    chunk: int = 256
    """Prompt tokens per pass beside sequences that decode; see ``outpace.engine.scheduler``."""
    listeners: Sequence[Callable[[StepRecord], None]] = ()
    steps: int = field(default=0, init=False)

    def tapped(self, rows: Sequence[StepSequence]) -> frozenset[str]:
        """Drafters of these rows that read features."""
        names = {name for row in rows for name in row.states}
        return frozenset(name for name in names if self.drafters[name].traits.taps)

    def taps(self, rows: Sequence[StepSequence]) -> frozenset[str]:
        """Features that some drafter of these rows reads."""
        return frozenset().union(*(self.drafters[name].traits.taps for name in self.tapped(rows)))


def step(machine: Machine, rows: Sequence[StepSequence]) -> list[Outcome]:
    """Advance every row by one pass of the target.

    Args:
        machine: target, cache, drafters, policy; the rows bring their verifiers.
        rows: sequences whose prompts are committed but for the pending token.

    Returns:
        One outcome per row, without those that failed. Its ``scored`` is valid until the next pass.

    Raises:
        Exception: before COMMIT no row has changed, and the step may be run again. If ``observe``,
            ``learn`` or a listener raises, all rows are committed.

    Effects: appends at least one token to every row; ``cache.length == len(row.tokens) - 1``
    holds before and after. A row whose own part breaks, from its verdict to its commit, fails alone.
    """
    clock = _clock(machine)
    plans, views = _plan(machine, rows)
    clock.lap("plan")
    num_uncached_B = [
        _num_uncached(machine, row, plan.drafter) if plan.budget.max_nodes else 0
        for row, plan in zip(rows, plans, strict=True)
    ]
    drafts = _draft(machine, rows, plans)
    clock.lap("draft")
    scored = machine.target.score(
        [Feed.tree(r.slot, r.tokens[-1], d) for r, d in zip(rows, drafts, strict=True)],
        machine.cache,
        taps=machine.taps(rows),
    )
    clock.lap("score")
    verdicts = _judge(machine, rows, plans, drafts, scored, machine.want_laws)
    clock.lap("judge")

    def outcome(i: int) -> Outcome:
        row, plan, draft = rows[i], plans[i], drafts[i]
        verdict = row.cut(verdicts[i])
        # The last emitted token becomes the pending one, so its own row is not kept.
        kept = (0, *(node + 1 for node in verdict.kept[: len(verdict.emitted) - 1]))
        fed = (row.tokens[-1], *verdict.emitted[:-1])
        return Outcome(draft, scored.of(i), verdict, fed, kept, len(row.tokens) - 1, drafter=plan.drafter)

    outcomes = _commit(machine, rows, outcome)
    machine.policy.learn([views[i] for i in outcomes], [_evidence(one) for one in outcomes.values()])
    clock.lap("commit")
    _tell(machine, rows, outcomes, clock, plans, num_uncached_B)
    return list(outcomes.values())


def prefill(
    machine: Machine, rows: Sequence[StepSequence], ends: Sequence[int] | None = None
) -> list[Outcome]:
    """Feed every row the next chunk of its prompt; a row whose prompt ends emits one token.

    Args:
        machine: as for ``step``.
        rows: sequences whose tokens are all given; the cache holds a prefix of each.
        ends: how many tokens of each row are then committed; None: ``machine.chunk`` more. A row
            that is read up to its pending token only emits nothing, and goes on with ``step``.

    Returns:
        One outcome per row, ``forced``; ``emitted`` is empty while the prompt goes on.
    """
    clock = _clock(machine)
    held = [machine.cache.length(row.slot) for row in rows]
    upto = [n + machine.chunk for n in held] if ends is None else ends
    chunks = [tuple(r.tokens[n:end]) for r, n, end in zip(rows, held, upto, strict=True)]
    whole = [n + len(c) == len(r.tokens) for r, n, c in zip(rows, held, chunks, strict=True)]
    feeds = [
        Feed.chain(row.slot, chunk, want=None if row.read_prompt else (len(chunk) - 1,) if end else ())
        for row, chunk, end in zip(rows, chunks, whole, strict=True)
    ]
    scored = machine.target.score(feeds, machine.cache, taps=machine.taps(rows))
    clock.lap("score")
    for i, row in enumerate(rows):
        if row.read_prompt:
            row.read_prompt(held[i], scored.of(i).logits_TV)
    scored = scored.last(whole)
    ending = [i for i, end in enumerate(whole) if end]
    plan, draft = Plan("none", NOTHING), Draft()
    last = Scored(scored.logits_TV, tuple(range(len(ending) + 1)))  # one row per ending prompt
    judged = _judge(
        machine, [rows[i] for i in ending], [plan] * len(ending), [draft] * len(ending), last, False
    )
    verdicts = {ending[i]: verdict for i, verdict in judged.items()}
    clock.lap("judge")

    def outcome(i: int) -> Outcome:
        verdict = rows[i].cut(verdicts[i]) if i in verdicts else Verdict((), ())
        kept = tuple(range(len(chunks[i])))
        return Outcome(draft, scored.of(i), verdict, chunks[i], kept, held[i], forced=True)

    outcomes = _commit(machine, rows, outcome)
    clock.lap("commit")
    _tell(machine, rows, outcomes, clock)
    return list(outcomes.values())


def _plan(machine: Machine, rows: Sequence[StepSequence]) -> tuple[list[Plan], list[PolicyRow]]:
    load = Load(len(rows), _context(rows))
    least_B = [machine.policy.asks(row.policy_state, load) for row in rows]
    views = [
        PolicyRow(
            row.policy_state,
            row.budgets,
            row.room(),
            row.coins(Stream.POLICY),
            preview,
            {} if least is None else {one: _num_uncached(machine, row, one) for one in row.states},
        )
        for row, preview, least in zip(rows, _previews(machine, rows, least_B), least_B, strict=True)
    ]
    plans = machine.policy.plan(views, load)
    for view, plan in zip(views, plans, strict=True):
        asked, limit = plan.budget, view.limit
        if asked.max_nodes > limit.max_nodes or asked.max_depth > limit.max_depth:
            raise OutpaceError(
                f"policy {type(machine.policy).__name__} broke its contract: it "
                f"planned {asked} where {limit} was the limit"
            )
    return plans, views


def _draft(machine: Machine, rows: Sequence[StepSequence], plans: Sequence[Plan]) -> list[Draft]:
    """Ask each drafter once, for all rows that are planned for it."""
    drafts = [Draft()] * len(rows)
    asked: dict[str, list[int]] = {}
    tapped = machine.tapped(rows)
    for i, plan in enumerate(plans):
        if plan.budget.max_nodes > 0 and plan.budget.max_depth > 0:
            asked.setdefault(plan.drafter, []).append(i)
    for name, indices in asked.items():
        wanted = [_draft_row(machine, rows[i], name, plans[i].budget, tapped) for i in indices]
        try:
            answers = machine.drafters[name].propose(wanted)
        except LogitsError as error:
            raise LogitsError(f"drafter {name}, pass {machine.steps}: {error}") from error
        for i, row, draft in zip(indices, wanted, answers, strict=True):
            _check(draft, row, name)
            if draft.resume is None:
                machine.cache.drop(rows[i].slot)  # what the drafter tried there
            drafts[i] = draft
    return drafts


def _check(draft: Draft, row: DraftRow[Any], name: str) -> None:
    """Raise OutpaceError, naming the drafter, unless a draft is what was asked for."""
    most = row.budget
    nodes, rows, depth = len(draft), _rows_of(draft) - 1, max(draft.depth_N, default=0)
    wrong = None
    if nodes > most.max_nodes or depth > most.max_depth or rows > most.max_rows:
        wrong = (
            f"{nodes} nodes, {depth} levels and {rows} rows, where {most.max_nodes}, "
            f"{most.max_depth} and {most.max_rows} were granted"
        )
    elif row.chain and not is_chain(draft.parent_N):
        wrong = "several branches, where chains alone can be checked"
    if wrong is not None:
        raise OutpaceError(f"drafter {name!r} broke its contract: a draft of {wrong}")


def _draft_row(
    machine: Machine, row: StepSequence, name: str, budget: Budget, tapped: frozenset[str]
) -> DraftRow[Any]:
    # What another drafter reads is computed from the bottom up, so nothing may be resumed.
    lent = tapped <= {name}
    return DraftRow(
        row.states[name],
        row.tokens,
        budget,
        row.coins(Stream.DRAFT),
        row.warp,
        Drawn.CHOSEN if row.warp.greedy else row.verifiers[name].draws,
        Lease(machine.cache, row.slot) if lent else None,
        chain=row.verifiers[name].chains_only or TREE not in machine.target.can,
    )


def _previews(
    machine: Machine, rows: Sequence[StepSequence], least_B: Sequence[float | None]
) -> list[dict[str, Sequence[float]]]:
    """What every drafter would propose to every row, of those that can tell."""
    previews: list[dict[str, Sequence[float]]] = [{} for _ in rows]
    able: dict[str, list[int]] = {}
    tapped = machine.tapped(rows)
    for i, (row, least) in enumerate(zip(rows, least_B, strict=True)):
        for name in () if least is None else row.states:
            if machine.drafters[name].traits.previews:
                able.setdefault(name, []).append(i)
    for name, indices in able.items():
        budgets = [within(rows[i].budgets[name], rows[i].room(), least_B[i] or 0.0) for i in indices]
        pairs = zip(indices, budgets, strict=True)
        asked = [_draft_row(machine, rows[i], name, budget, tapped) for i, budget in pairs]
        answers = machine.drafters[name].preview(asked)
        for i, answer in zip(indices, answers, strict=True):
            previews[i][name] = answer
    return previews


def _num_uncached(machine: Machine, row: StepSequence, name: str) -> int:
    return machine.drafters[name].num_uncached(row.states[name], row.tokens)


def _judge(
    machine: Machine,
    rows: Sequence[StepSequence],
    plans: Sequence[Plan],
    drafts: Sequence[Draft],
    scored: Scored,
    want_laws: bool,
) -> dict[int, Verdict]:
    """Judge every draft; a row whose draft cannot be judged fails, and has no verdict."""
    laws = laws_of_batch(scored, [row.warp for row in rows], drafts)
    verdicts = {}
    for i, (row, plan, draft, law) in enumerate(zip(rows, plans, drafts, laws, strict=True)):
        verifier = row.verifiers[plan.drafter]
        try:
            verdicts[i] = verifier.judge(draft, law, row.coins(Stream.JUDGE), want_laws=want_laws)
        except Exception as error:
            if isinstance(error, LogitsError | RequestError):
                error = type(error)(f"sequence {row.number}, pass {machine.steps}: {error}")
            machine.cache.drop(row.slot)
            row.fail(error)
    return verdicts


def _commit(
    machine: Machine, rows: Sequence[StepSequence], outcome: Callable[[int], Outcome]
) -> dict[int, Outcome]:
    """Commit row by row, each wholly before the next, and then tell the drafters.

    A row that fails on the way ends, and no other notices: what belongs to the others is touched
    in their own turn alone.

    Args:
        machine: as of the step.
        rows: all of the step; those that have failed are left out.
        outcome: cuts the verdict of a row; this and all after it is part of the row's commit.

    Returns:
        Row -> outcome, without those that failed.
    """
    outcomes: dict[int, Outcome] = {}
    for i, row in enumerate(rows):
        if row.failed:
            continue
        try:
            one = outcome(i)
            machine.cache.keep(row.slot, one.row_F)
            row.extend(one)
        except Exception as error:
            machine.cache.drop(row.slot)
            row.fail(error)
        else:
            outcomes[i] = one
    watching: dict[str, list[int]] = {}
    for i in outcomes:
        for name in rows[i].states:
            watching.setdefault(name, []).append(i)
    for name, indices in watching.items():
        machine.drafters[name].observe(
            [rows[i].states[name] for i in indices], [outcomes[i] for i in indices]
        )
    return outcomes


def _clock(machine: Machine) -> StepClock:
    return StepClock(machine.target.clock, [one.clock for one in machine.drafters.values()])


def _context(rows: Sequence[StepSequence]) -> int:
    return max((len(row.tokens) for row in rows), default=0)


def _evidence(outcome: Outcome) -> Evidence:
    return Evidence(
        outcome.drafter,
        len(outcome.draft),
        max(outcome.draft.depth_N, default=0),
        len(outcome.verdict.kept),
        outcome.verdict.censored,
    )


def _tell(
    machine: Machine,
    rows: Sequence[StepSequence],
    outcomes: Mapping[int, Outcome],
    clock: StepClock,
    plans: Sequence[Plan] = (),
    num_uncached_B: Sequence[int] = (),
) -> None:
    """Hand listeners the step as numbers."""
    machine.steps += 1
    if not machine.listeners:
        return
    records = []
    for i, outcome in outcomes.items():
        e = _evidence(outcome)
        records.append(
            RowRecord(
                rows[i].number,
                e.drafter,
                e.drafted,
                e.accepted,
                outcome.verdict.emitted,
                e.depth,
                e.censored,
                plans[i].choice if plans else None,
                num_uncached_B[i] if num_uncached_B else 0,
            )
        )
    passed = sum(len(o.row_F) if o.forced else _rows_of(o.draft) for o in outcomes.values())
    record = StepRecord(
        machine.steps - 1,
        tuple(records),
        clock.seconds,
        passed,
        clock.passes,
        clock.draft_levels,
        prompt=all(outcome.forced for outcome in outcomes.values()),
        context=_context(rows),
    )
    for listener in machine.listeners:
        listener(record)


def _rows_of(draft: Draft) -> int:
    """Rows of a pass: the pending token, the guesses, and their riders."""
    return 1 + len(draft) + (0 if draft.riders is None else len(draft.riders.node_R))
