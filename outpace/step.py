"""One step of generalized speculative decoding, in five verbs.

    PLAN    a policy gives every sequence a drafter and a budget
    DRAFT   the drafters guess token trees
    SCORE   the target scores pending tokens and trees of the whole batch in one pass
    JUDGE   the verifier keeps a path of each tree and adds one token
    COMMIT  caches, sequences, drafters and policy advance past what was emitted

Plain decoding is the empty draft, and a chain is a tree of width one. A batch is the only case. A
prompt is a pass whose tokens are already decided. There is no second path through this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outpace.clock import StepClock
from outpace.coins import Stream
from outpace.errors import LogitsError, OutpaceError, RequestError
from outpace.machine import Machine, StepSequence, draft, foresee
from outpace.policies.base import Evidence, PolicyRow
from outpace.sampling import laws_of_batch
from outpace.types import NOTHING, Draft, Feed, Load, Outcome, Plan, RowRecord, Scored, StepRecord, Verdict


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
    clock = StepClock(machine.target.clock, [one.clock for one in machine.drafters.values()])
    plans, views, made_B = _plan(machine, rows, clock)
    clock.lap("plan")
    uncached_B = [
        machine.drafters[plan.drafter].num_uncached(row.members[plan.drafter].state, row.tokens)
        if plan.budget.max_nodes
        else 0
        for row, plan in zip(rows, plans, strict=True)
    ]
    drafts = draft(machine, rows, plans, made_B)
    clock.lap("draft")
    parts = [
        _Part(row, Feed.tree(row.slot, row.tokens[-1], one), len(row.tokens) - 1, plan, one, view, n)
        for row, plan, one, view, n in zip(rows, plans, drafts, views, uncached_B, strict=True)
    ]
    return _pass(machine, parts, _score(machine, parts), clock)


def prefill(
    machine: Machine, rows: Sequence[StepSequence], ends: Sequence[int] | None = None
) -> list[Outcome]:
    """Feed every row the next chunk of its prompt; a row whose prompt ends emits one token.

    Args:
        rows: sequences whose tokens are all given; the cache holds a prefix of each.
        ends: how many tokens of each row are then committed; None: ``machine.chunk`` more. A row
            that is read up to its pending token only emits nothing, and goes on with ``step``.

    Returns:
        One outcome per row, ``forced``; ``emitted`` is empty while the prompt goes on.
    """
    clock = StepClock(machine.target.clock, [one.clock for one in machine.drafters.values()])
    parts = []
    for i, row in enumerate(rows):
        start = machine.cache.length(row.slot)
        end = start + machine.chunk if ends is None else ends[i]
        chunk = row.tokens[start:end]
        last = (len(chunk) - 1,) if start + len(chunk) == len(row.tokens) else ()
        feed = Feed.chain(row.slot, chunk, want=None if row.read_prompt else last)
        parts.append(_Part(row, feed, start, ends=bool(last)))
    scored = _score(machine, parts)
    for i, part in enumerate(parts):
        if part.row.read_prompt:
            part.row.read_prompt(part.start, scored.of(i).logits_TV)
    return _pass(machine, parts, scored.last([part.ends for part in parts]), clock)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one sequence has in a pass: its pending token and a draft, or tokens that are decided."""

    row: StepSequence
    feed: Feed
    start: int
    """Position of the first token fed."""
    plan: Plan = field(default_factory=lambda: Plan("none", NOTHING))
    draft: Draft = field(default_factory=Draft)
    view: PolicyRow | None = None
    """What the policy saw; None for decided tokens."""
    num_uncached: int = 0
    ends: bool = True
    """Whether a token follows; not while a prompt goes on."""

    def outcome(self, scored: Scored, verdict: Verdict) -> Outcome:
        """Cut the verdict, and say which tokens enter the cache."""
        verdict = self.row.cut(verdict) if self.ends else verdict
        if self.view is None:
            fed = self.feed.token_J
            return Outcome(self.draft, scored, verdict, fed, tuple(range(len(fed))), self.start, forced=True)
        # The last emitted token becomes the pending one, so its own row is not kept.
        kept = (0, *[node + 1 for node in verdict.kept[: len(verdict.emitted) - 1]])
        fed = (self.row.tokens[-1], *verdict.emitted[:-1])
        return Outcome(self.draft, scored, verdict, fed, kept, self.start, drafter=self.plan.drafter)


def _score(machine: Machine, parts: Sequence[_Part]) -> Scored:
    taps = machine.taps([part.row for part in parts])
    return machine.target.score([part.feed for part in parts], machine.cache, taps=taps)


def _pass(machine: Machine, parts: Sequence[_Part], scored: Scored, clock: StepClock) -> list[Outcome]:
    """JUDGE and COMMIT, for drafts and for tokens that are decided."""
    clock.lap("score")
    verdicts = _judge(machine, parts, scored)
    clock.lap("judge")
    outcomes = _commit(machine, parts, scored, verdicts)
    _observe(machine, parts, outcomes)
    _learn(machine, parts, outcomes)
    clock.lap("commit")
    _report(machine, parts, outcomes, clock)
    return list(outcomes.values())


def _plan(
    machine: Machine, rows: Sequence[StepSequence], clock: StepClock
) -> tuple[list[Plan], list[PolicyRow], list[dict[str, Draft]]]:
    """Have the policy plan; what drafters made for that is at hand afterwards."""
    load = Load(len(rows), max([len(row.tokens) for row in rows], default=0))
    room_B = [row.room() for row in rows]
    wanted_B = [machine.policy.wants_previews(row.policy_state, load) for row in rows]
    made_B = foresee(machine, rows, room_B, wanted_B)
    clock.previewed()
    views = [
        PolicyRow(
            row.policy_state,
            {name: machine.granted(name, row) for name in row.members},
            room,
            row.coins(Stream.POLICY),
            {
                name: machine.drafters[name].promise(row.members[name].state, one)
                for name, one in made.items()
            },
        )
        for row, room, made in zip(rows, room_B, made_B, strict=True)
    ]
    plans = machine.policy.plan(views, load)
    for view, plan in zip(views, plans, strict=True):
        asked, limit = plan.budget, view.limit
        within = asked.max_nodes <= limit.max_nodes and asked.max_depth <= limit.max_depth
        if not within or (asked.max_nodes and plan.drafter not in view.drafters):
            raise OutpaceError(
                f"policy {type(machine.policy).__name__} broke its contract: it planned {asked} of "
                f"{plan.drafter} where {limit} of {', '.join(view.drafters)} was the limit"
            )
    return plans, views, made_B


def _judge(machine: Machine, parts: Sequence[_Part], scored: Scored) -> dict[int, Verdict]:
    """Judge every draft; a row whose draft cannot be judged fails, and has no verdict."""
    judged = [i for i, part in enumerate(parts) if part.ends]
    warps = [parts[i].row.warp for i in judged]
    laws = laws_of_batch(scored, warps, [parts[i].draft for i in judged])
    verdicts = {i: Verdict((), ()) for i in range(len(parts)) if i not in judged}
    ends = {name: rule for name, one in machine.drafters.items() if (rule := one.traits.doubts)}
    for i, law in zip(judged, laws, strict=True):
        row, draft = parts[i].row, parts[i].draft
        member = row.members.get(parts[i].plan.drafter)
        verifier = row.verifier if member is None else member.verifier
        try:
            coins, want_laws = row.coins(Stream.JUDGE), machine.want_laws
            verdicts[i] = law.defined(verifier.judge(draft, law, coins, want_laws=want_laws))
            if ends and parts[i].view:
                told = [ends[one](scored.of(i), verdicts[i].kept) for one in row.members if one in ends]
                verdicts[i] = replace(verdicts[i], doubted=min(told, default=None))
        except Exception as error:
            if isinstance(error, LogitsError | RequestError):
                error = type(error)(f"sequence {row.number}, pass {machine.steps}: {error}")
            machine.cache.drop(row.slot)
            row.fail(error)
    return verdicts


def _commit(
    machine: Machine, parts: Sequence[_Part], scored: Scored, verdicts: Mapping[int, Verdict]
) -> dict[int, Outcome]:
    """Commit row by row, each wholly before the next.

    A row that fails on the way ends, and no other notices: what belongs to the others is touched
    in their own turn alone.

    Returns:
        Part -> outcome, without those that failed.
    """
    outcomes: dict[int, Outcome] = {}
    for i, part in enumerate(parts):
        if part.row.failed:
            continue
        try:
            one = part.outcome(scored.of(i), verdicts[i])
            machine.cache.keep(part.row.slot, one.row_F)
            part.row.extend(one)
        except Exception as error:
            machine.cache.drop(part.row.slot)
            part.row.fail(error)
        else:
            outcomes[i] = one
    return outcomes


def _observe(machine: Machine, parts: Sequence[_Part], outcomes: Mapping[int, Outcome]) -> None:
    """Tell every drafter once what was committed."""
    watching: dict[str, list[int]] = {}
    for i in outcomes:
        for name in parts[i].row.members:
            watching.setdefault(name, []).append(i)
    for name, indices in watching.items():
        states = [parts[i].row.members[name].state for i in indices]
        machine.drafters[name].observe(states, [outcomes[i] for i in indices])


def _learn(machine: Machine, parts: Sequence[_Part], outcomes: Mapping[int, Outcome]) -> None:
    """Tell the policy what became of its plans."""
    had = {i: view for i in outcomes if (view := parts[i].view) is not None}
    if had:
        machine.policy.learn([*had.values()], [_evidence(outcomes[i]) for i in had])


def _evidence(outcome: Outcome) -> Evidence:
    draft, verdict = outcome.draft, outcome.verdict
    return Evidence(outcome.drafter, len(draft), draft.levels, len(verdict.kept), verdict.censored)


def _report(
    machine: Machine, parts: Sequence[_Part], outcomes: Mapping[int, Outcome], clock: StepClock
) -> None:
    """Hand listeners the step as numbers."""
    machine.steps += 1
    if not machine.listeners:
        return
    records = []
    for i, outcome in outcomes.items():
        part, seen, emitted = parts[i], _evidence(outcome), outcome.verdict.emitted
        counts = seen.drafted, seen.accepted, emitted, seen.depth, seen.censored
        records.append(RowRecord(part.row.number, seen.drafter, *counts, part.plan.choice, part.num_uncached))
    passed = sum(len(p.feed.token_J) if p.view is None else p.draft.num_rows for p in parts)
    spent = clock.seconds, passed, clock.passes, clock.draft_levels
    prompt, context = all(p.view is None for p in parts), max([len(p.row.tokens) for p in parts])
    record = StepRecord(machine.steps - 1, tuple(records), *spent, prompt, context, clock.preview)
    for listener in machine.listeners:
        listener(record)
