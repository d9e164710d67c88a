"""Several answers to each prompt, for the price of reading it once.

    read   [prompt]                    one sequence reads
    fork   [prompt] -> [prompt] ...    the others get copies of its keys and values
    decode [prompt, answer 1]  [prompt, answer 2]  ...

A token that is read costs what a token that is written does, and prompts are longer than answers. So
reading would take most of the time. A copied prompt gives each answer the distribution that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outpace.engine.engine import Engine
from outpace.engine.requests import GenerationRequest
from outpace.engine.results import Result
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import ActiveSequence
from outpace.machine import Machine
from outpace.params import SamplingParams

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Answers to one prompt, one for each of the settings."""

    ids: tuple[int, ...]
    params: Sequence[SamplingParams]
    first: int
    """Number of the first answer; the others follow."""


@dataclass(slots=True, eq=False)
class _Group:
    """Answers to one prompt."""

    slot: int
    """Where the prompt was read; the others look at it there, so it stays until they end."""
    left: int
    """Answers that have not ended."""
    waiting: list[tuple[int, GenerationRequest]]
    """Those that begin as soon as the prompt is read."""


def answer_each(engine: Engine, wanted: Iterator[Wanted], batch: int) -> Iterator[tuple[int, Result]]:
    """Answer prompts plainly, about ``batch`` answers at a time.

    Args:
        wanted: taken one by one, as soon as there is room for one answer more.

    Yields:
        Number and result of each answer, in the order in which they end.

    Raises:
        RequestError: at a prompt that does not fit; answers under way are lost.
    """
    crowd = _Crowd(engine)
    more = True
    try:
        while True:
            while more and crowd.count < batch:
                if (one := next(wanted, None)) is None:
                    more = False
                    break
                crowd.begin(one)
            if not crowd.count:
                return
            yield from crowd.advance()
    finally:
        crowd.close()


class _Crowd:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._method = engine, engine.method(PLAIN)
        members, watchers = self._method.members, self._method.watchers
        self._scheduler = Scheduler(
            Machine(
                engine.target,
                engine.cache,
                {name: one.drafter for name, one in members.items()},
                self._method.policy,
                listeners=(*engine.listeners, *watchers),
            )
        )
        self._running: dict[ActiveSequence, tuple[int, _Group]] = {}
        self._groups: set[_Group] = set()

    @property
    def count(self) -> int:
        """Answers under way, and those that wait for their prompt."""
        return sum(one.left for one in self._groups)

    def begin(self, wanted: Wanted) -> None:
        """Let one answer read the prompt, and the others wait for it."""
        asked = [self._engine.request(wanted.ids, params) for params in wanted.params]
        numbered = list(enumerate(asked, wanted.first))
        group = _Group(self._engine.cache.open(), len(asked), numbered[1:])
        self._groups.add(group)
        self._join(*numbered[0], group.slot, group)

    def advance(self) -> Iterator[tuple[int, Result]]:
        """Run one pass; give the answers that ended in it."""
        for row in self._scheduler.advance():
            if row.error is not None:
                raise row.error
            number, group = self._running[row]
            while group.waiting and not row.reading:
                self._join(*group.waiting.pop(0), self._fork(row), group)
            row.chunks.clear()
            if row.finished:
                del self._running[row]
                self._leave(row, group)
                yield number, row.result()

    def close(self) -> None:
        """Give back slots and states of what is under way."""
        for row, (_, group) in self._running.items():
            self._leave(row, group)
        for group in self._groups:
            self._engine.cache.close(group.slot)

    def _fork(self, row: ActiveSequence) -> int:
        """A slot that holds a prompt but for its last token, which each answer reads for itself."""
        cache, length = self._engine.cache, row.prompt_tokens - 1
        return cache.fork(row.slot, length) if cache.copies and length else cache.open()

    def _join(self, number: int, request: GenerationRequest, slot: int, group: _Group) -> None:
        verifier = self._engine.verifier(self._method, None, request.params)
        try:
            row = self._engine.start_sequence(request, slot, self._method, verifier)
        except BaseException:
            if slot != group.slot:
                self._engine.cache.close(slot)
            raise
        self._running[row] = number, group
        self._scheduler.join(row)

    def _leave(self, row: ActiveSequence, group: _Group) -> None:
        self._engine.release(row, self._method, keep_slot=row.slot == group.slot)
        group.left -= 1
        if not group.left:
            self._engine.cache.close(group.slot)
            self._groups.remove(group)
