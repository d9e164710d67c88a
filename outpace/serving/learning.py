"""Learning beside serving: who watches the passes, when there is time, and when drafters change.

    Watched    a drafter in the place of the one that learns: lets it draft, shows every outcome to
               the learner, and moves sequences to a new version between two passes
    Learning   gives the learner idle time, and a bounded share of the time of passes

The step knows nothing of it: a drafter is shown every verified pass anyway (``observe``), and that
is what a learner learns from. Learning happens on the service's thread, in units of milliseconds.
A thread of its own would need workers of its own, beside which passes take twice as long
(`outpace.serving.openmp`). It would also have to be kept from changing weights within a step.

What a learner does is its own matter; the registry lists learners. If one fails, learning ends, and
serving goes on with the drafters that there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from outpace import registry
from outpace.clock import PassClock
from outpace.config import MethodSpec
from outpace.drafters.base import Drafter, Request
from outpace.drafters.wrapping import WrappingDrafter
from outpace.engine.method import Method, SingleMethod
from outpace.errors import RequestError
from outpace.models.base import Target
from outpace.serving.events import ServiceStats
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome

LOG = logging.getLogger("outpace.learning")
SHARE = 0.02
"""Of the time of passes, what learning takes unless said otherwise."""
IDLE_SECONDS = 0.02
"""How long to learn at a time while nobody waits; a request that comes then waits so long, or for
a unit of work."""
RETRY = 60.0
"""Seconds that learning pauses after a version could not be written."""
PATIENCE = 5.0
"""Seconds after idle time in which passes are left alone. Who is being answered notices a unit of
work between two tokens, and more idle time will come."""


class Text(Protocol):
    @property
    def branch(self) -> str:
        """Texts of one branch have one drafter."""

    @property
    def drafter(self) -> Drafter[Any] | None:
        """The branch's drafter; None: the one that learning started from."""


class Version(Protocol):
    """A drafter that is to take the place of a branch's present one."""

    @property
    def branch(self) -> str: ...

    @property
    def drafter(self) -> Drafter[Any] | None: ...


class Learner(Protocol):
    """Learns from verified passes. Everything is called on one thread."""

    Config: ClassVar[type]
    """Frozen keyword-only dataclass of settings, all with defaults. A learner that keeps apart texts
    of several topics has the setting ``topics``, their largest number per key."""

    @classmethod
    def open(cls, target: Target, spec: str, config: Any, folder: Path | None = None) -> Learner:
        """Begin to learn for the drafter of a method spec.

        Args:
            folder: where versions are kept; None: in the user's data folder.

        Raises:
            ModelError: a drafter that cannot learn, damaged files, or a folder in use.
        """

    @property
    def spec(self) -> str:
        """Method spec of the drafter that learns."""

    @property
    def folder(self) -> Path: ...

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""

    def begin(self, key: str, prompt: Sequence[int]) -> Any:
        """A sequence begins; gives a ``Text``."""

    def observe(self, texts: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        """One pass of these sequences was committed. Outcomes are valid during the call."""

    def end(self, text: Any) -> None: ...

    def step(self, budget_s: float) -> Version | None:
        """Learn for so many seconds, or for one unit of work; maybe give a new version."""

    def counts(self) -> Mapping[str, float]:
        """Figures by name; `outpace.server.metrics` has those that a server reports."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _State:
    request: Request
    tokens: list[int]
    """Committed."""
    num_cached: int
    """Tokens that no pass will show again."""
    text: Text | None
    """None where the learner has failed."""
    drafter: Drafter[Any]
    inner: Any
    """The drafter's own state."""
    out: Draft | None = None
    """A proposal that was not observed yet, or is being made."""


class Watched(WrappingDrafter[_State]):
    """A drafter under observation, whose weights change between steps.

    Args:
        base: what learning started from; serves texts whose branch has learned nothing.
    """

    def __init__(self, base: Drafter[Any], learner: Learner) -> None:
        self.base, self.learner = base, learner
        self.traits = replace(base.traits, deterministic=False)
        super().__init__([base])
        self.broken: Exception | None = None
        """What the learner failed at; it is then left alone."""
        self._living: set[_State] = set()

    @classmethod
    def load(cls, config: Any, target: Target) -> Watched:
        """Made by ``Learning`` alone."""
        raise NotImplementedError("a service makes it")

    @cached_property
    def clock(self) -> PassClock:
        """Of all versions so far, see ``_Timed``."""
        return PassClock()

    def inner(self, state: _State) -> list[tuple[Drafter[Any], Any]]:
        """The version that drafts for the text."""
        return [(state.drafter, state.inner)]

    def begin(self, request: Request) -> _State:
        """Ask the learner who drafts for this text."""
        text: Text | None = None
        if self.broken is None:
            try:
                text = self.learner.begin(request.key, request.prompt)
            except Exception as error:
                self.fail(error)
        drafter = self.base if text is None else text.drafter or self.base
        inner = drafter.begin(request)
        state = _State(request, list(request.prompt), request.num_cached, text, drafter, inner)
        self._living.add(state)
        return state

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """Let every version draft for its sequences."""
        drafts = [Draft()] * len(rows)
        for row in rows:
            row.state.out = drafts[0]  # under way, from now until it is observed
        for drafter, indices in self.by_drafter([row.state for row in rows]):
            with _Timed(self, drafter):
                own = drafter.propose([_inner(rows[i]) for i in indices])
            for i, draft in zip(indices, own, strict=True):
                drafts[i] = rows[i].state.out = draft
        return drafts

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Pass it on to the versions, and to the learner."""
        for drafter, indices in self.by_drafter(states):
            with _Timed(self, drafter):
                drafter.observe([states[i].inner for i in indices], [outcomes[i] for i in indices])
        self.follow()
        for state, outcome in zip(states, outcomes, strict=True):
            emitted = outcome.verdict.emitted
            state.tokens.extend(emitted)
            state.num_cached = len(state.tokens) if emitted else outcome.start + len(outcome.fed)
            state.out = None
        seen = [(s.text, o) for s, o in zip(states, outcomes, strict=True) if s.text is not None]
        if seen and self.broken is None:
            try:
                self.learner.observe([text for text, _ in seen], [one for _, one in seen])
            except Exception as error:
                self.fail(error)

    def adopt(self, version: Version) -> bool:
        """Let a version draft for all sequences of its branch, those under way included.

        Returns:
            False, with nothing done, while a step is under way: a proposal was not observed yet.

        Cost: the version reads the texts under way, by portions between the next passes if it is a
        language model.
        """
        if any(state.out is not None for state in self._living):
            return False
        drafter = version.drafter or self.base
        begun: list[tuple[_State, Any]] = []
        try:
            for state in self._living:
                if state.text is not None and state.text.branch == version.branch:
                    request = replace(state.request, prompt=tuple(state.tokens), num_cached=state.num_cached)
                    begun.append((state, drafter.begin(request)))
        except Exception:  # all stay where they were
            for _, inner in begun:
                drafter.end(inner)
            raise
        for state, inner in begun:
            state.drafter.end(state.inner)
            state.drafter, state.inner = drafter, inner
        return True

    def mark(self, state: _State) -> Any:
        """What learns stands by itself; nobody reads on trial with it."""
        raise NotImplementedError("a drafter that learns is no part of another")

    def end(self, state: _State) -> None:
        """Pass it on, to the learner too."""
        self._living.discard(state)
        super().end(state)
        if state.text is not None and self.broken is None:
            try:
                self.learner.end(state.text)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        self.broken = error
        LOG.error("learning has stopped; serving goes on: %s", error, exc_info=error)


def _inner(row: DraftRow[_State]) -> DraftRow[Any]:
    return replace(row, state=row.state.inner)


class _Timed:
    """Adds what a version's clock counts to that of the drafter in whose place it stands."""

    def __init__(self, whole: Watched, part: Drafter[Any]) -> None:
        self._whole, self._part = whole.clock, part.clock

    def __enter__(self) -> None:
        self._seconds, self._count = self._part.seconds, self._part.count

    def __exit__(self, *_: object) -> None:
        self._whole.seconds += self._part.seconds - self._seconds
        self._whole.count += self._part.count - self._count


class Learning:
    """Gives a learner its time.

    While a service learns, ``method.drafter`` of the method that learns is a ``Watched``.

    Args:
        learner: is closed by ``close``.
        share: of the time of passes, what learning may take; idle time comes on top.

    Raises:
        RequestError: a share that is none, or a policy that needs weights that stay.
    """

    def __init__(
        self,
        learner: Learner,
        methods: Mapping[str, Method],
        share: float = SHARE,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 <= share < 1:
            raise RequestError(f"the share of learning must be in [0, 1), got {share}")
        self.learner, self.share, self._now = learner, share, now
        self._method = members(methods)[learner.spec]
        if self._method.policy.reads_estimates:
            raise RequestError(
                f"{learner.spec}: its policy reads estimates made for weights that do not change; "
                "leave it out, or serve without --learn"
            )
        self._base = self._method.drafter
        self.watched = Watched(self._base, learner)
        self._method.drafter = self.watched
        self._pending: list[Version] = []
        self._saved = 0.0
        """Seconds that learning may take; below 0 after a unit that took longer."""
        self._then, self._idled = now(), float("-inf")
        self._paused = float("-inf")
        """Until then learning waits for room on the disk."""
        self._figures = learner.counts()

    def after_pass(self) -> None:
        """Between two passes: change drafters, then learn if the share allows it."""
        self._adopt()
        now = self._now()
        self._saved = min(self.share, self._saved + self.share * (now - self._then))
        if self._saved > 0 and now > self._idled + PATIENCE and self._busy:
            self._step(0.0)
            self._saved -= self._now() - now
        self._then = self._now()
        self._figures = self.learner.counts()

    def idle(self) -> bool:
        """While there is nothing else to do: learn a little; False if there is nothing to learn."""
        self._adopt()
        if self._busy:
            self._step(IDLE_SECONDS)
            self._idled = self._now()
        self._then = self._now()
        self._figures = self.learner.counts()
        return self._busy or bool(self._pending)

    def close(self) -> None:
        """Learn no more; the method is as it was before. Its sequences have ended."""
        self._method.drafter = self._base
        self.learner.close()

    def stats(self, stats: ServiceStats) -> LearningStats:
        """A snapshot of a service with the learner's figures, as of the last pass. Any thread."""
        plain = {field.name: getattr(stats, field.name) for field in fields(ServiceStats)}
        broken = float(self.watched.broken is not None or self._now() < self._paused)
        return LearningStats(**plain, learned={**self._figures, "broken": broken})

    @property
    def _busy(self) -> bool:
        return self.watched.broken is None and self._now() >= self._paused and self.learner.busy

    def _step(self, budget_s: float) -> None:
        try:
            version = self.learner.step(budget_s)
        except OSError as error:  # nothing has changed, and there may be room again later
            self._paused = self._now() + RETRY
            LOG.error("learning pauses for %g seconds; serving goes on: %s", RETRY, error)
            return
        except Exception as error:
            self.watched.fail(error)
            return
        if version is not None:
            self._pending.append(version)
            self._adopt()

    def _adopt(self) -> None:
        try:
            while self._pending and self.watched.adopt(self._pending[0]):
                self._pending.pop(0)
        except Exception as error:
            self._pending.clear()
            self.watched.fail(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningStats(ServiceStats):
    """A snapshot of a service that learns."""

    learned: Mapping[str, float]
    """The learner's figures by name; ``broken`` is 1 if it has failed, or waits for room on the disk."""


def learning_spec(methods: Mapping[str, Method]) -> str:
    """The method spec that learns, of those of a service or of what they pick from.

    Raises:
        RequestError: none does.
    """
    able = [entry.name for entry in registry.entries("learner")]
    found = [name for name in members(methods) if MethodSpec.parse(name).name in able]
    if not found:
        names = " or ".join(able)
        raise RequestError(
            f"--learn is for {names}, and {', '.join(methods)} do not learn; add --drafter {names}"
        )
    return found[0]


def members(methods: Mapping[str, Method]) -> dict[str, SingleMethod]:
    """Method spec -> method, of all that may be picked."""
    return {name: one for method in methods.values() for name, one in method.members.items()}
