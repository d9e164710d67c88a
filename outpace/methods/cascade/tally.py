"""Count, level by level, how far the drafts for a reviewer are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from outpace.coins import Coins
from outpace.methods.cascade.drafter import Cascade
from outpace.methods.cascade.guesses import Origin
from outpace.types import ROOT, Draft, Verdict
from outpace.verifiers.base import TargetLaws, Verifier

Note: TypeAlias = Callable[[Draft, Verdict], None]

_DOUBT = 4.0
"""Guesses that must reach a place to count as much as the place before it."""


@dataclass(slots=True)
class Part:
    """How one level's part of the drafts for one reviewer was kept, by place from 1."""

    asked: list[int] = field(default_factory=lambda: [0])
    """Drafts whose place was reached, and for which the level was to have a guess."""
    kept: list[int] = field(default_factory=lambda: [0])
    drafts: int = 0
    long: list[int] = field(default_factory=lambda: [0])
    """Drafts with a guess there, reached or not."""

    def less(self, other: Part) -> Part:
        """What was counted since it was like this other one."""

        def rest(mine: list[int], its: list[int]) -> list[int]:
            return [n - (its[i] if i < len(its) else 0) for i, n in enumerate(mine)]

        return Part(
            rest(self.asked, other.asked),
            rest(self.kept, other.kept),
            self.drafts - other.drafts,
            rest(self.long, other.long),
        )

    def add(self, size: int, length: int, kept: int | None) -> None:
        """Count a draft.

        Args:
            kept: of them; None if what stood before them was not kept whole.
        """
        for table in (self.asked, self.kept, self.long):
            table.extend([0] * (size + 1 - len(table)))
        self.drafts += 1
        for place in range(1, length + 1):
            self.long[place] += 1
        if kept is not None:
            for place in range(1, min(size, kept + 1) + 1):
                self.asked[place] += 1
                self.kept[place] += place <= kept

    @property
    def survival(self) -> tuple[float, ...]:
        """S[j], as far as any draft came."""
        out = [1.0]
        for asked, kept in zip(self.asked[1:], self.kept[1:], strict=True):
            if asked == 0:
                break
            out.append(out[-1] * kept / asked)
        return tuple(out) if len(out) > 1 else (1.0, 0.0)

    @property
    def expected(self) -> tuple[float, ...]:
        """S[j] for predictions: a share that few drafts show is drawn to that of the place before.

        A K is picked for the largest of many estimates. So one share of 3 in 3 would decide, and
        go on for ever behind the last place that was seen.
        """
        out, before = [1.0], (sum(self.kept) + 1) / (sum(self.asked) + 2)
        for asked, kept in zip(self.asked[1:], self.kept[1:], strict=True):
            before = (kept + _DOUBT * before) / (asked + _DOUBT)
            out.append(out[-1] * before)
        return tuple(out) if len(out) > 1 else (1.0, 0.0)

    @property
    def drafted(self) -> tuple[float, ...]:
        return (1.0, *(n / max(1, self.drafts) for n in self.long[1:]))


class Tally(Verifier):
    """Another verifier, and a note of what it decided."""

    def __init__(self, real: Verifier, note: Note) -> None:
        self._real, self._note = real, note
        self.draws = real.draws

    def check(self, draft: Draft) -> None:
        self._real.check(draft)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self._real.lossless

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        verdict = self._real.judge(draft, laws, coins, want_laws=want_laws)
        self._note(draft, verdict)
        return verdict


def note_parts(
    parts: dict[tuple[int, int], Part], reviewer: int, k: Sequence[Sequence[int]], probe: Cascade
) -> Note:
    """Count one reviewer's verdicts, level by level."""
    lowest = len(probe.models) + 1
    totals = [sum(k[reviewer][: i + 1]) for i in range(len(k[reviewer]))]

    def note(draft: Draft, verdict: Verdict) -> None:
        if not len(draft) and not (probe.lookup and reviewer == lowest - 1):
            return
        chain = _chain(draft)
        memo = draft.memo
        made = memo.level_N if isinstance(memo, Origin) else (0,) * len(chain)
        kept = len(verdict.kept)
        before = 0
        for offset, total in enumerate(totals):
            level = reviewer + 1 + offset
            name = 0 if probe.lookup is not None and level == lowest else level
            length = sum(who == name for who in made)
            size = max(total - before, length) if name == 0 else length
            if size:
                got = min(length, kept - before) if kept >= before else None
                parts[reviewer, level].add(size, length, got)
            before += length

    return note


def _chain(draft: Draft) -> list[int]:
    nodes, node = [], ROOT
    while (groups := draft.groups_of.get(node)) is not None:
        node = groups[0].nodes[0]
        nodes.append(node)
    return nodes


Parts: TypeAlias = Mapping[tuple[int, int], Part]


@dataclass(frozen=True, slots=True)
class Counts:
    """What reviewers said in a probe: of every level, of the lookup at the target, of levels alone."""

    parts: Parts
    tails: Parts
    lone: Parts

    def less(self, before: Counts, after: Counts) -> Counts:
        """Without what one text added."""

        def less(whole: Parts, before: Parts, after: Parts) -> Parts:
            return {
                key: part.less(after.get(key, Part()).less(before.get(key, Part())))
                for key, part in whole.items()
            }

        return Counts(
            less(self.parts, before.parts, after.parts),
            less(self.tails, before.tails, after.tails),
            less(self.lone, before.lone, after.lone),
        )

    def joined(
        self, lookup: int, base: tuple[Parts, Mapping[int, Part]] | None
    ) -> tuple[Parts, Mapping[int, Part]]:
        """Parts of all levels, and drafts of levels alone; of ``base`` where no inner review touches them."""
        if base is None:
            return {**self.parts, **self.tails}, {number: part for (_, number), part in self.lone.items()}
        behind = {pair: part for pair, part in base[0].items() if pair == (0, lookup)}
        return {**self.parts, **behind}, base[1]


@contextmanager
def noted(notes: Mapping[Any, Note]) -> Iterator[None]:
    """Note the verdicts of methods and levels; put their own verifiers back at the end."""
    usual = {one: one.verifier for one in notes}
    for one, note in notes.items():
        one.verifier = Tally(one.verifier, note)
    try:
        yield
    finally:
        for one, verifier in usual.items():
            one.verifier = verifier
