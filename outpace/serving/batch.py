"""The batch of a service: answers enter, run, lose their memory and get it back, end.

It belongs to one thread. An error in one answer (its listener, its drafter, its sampling) ends that answer
alone. After an error in a pass the sequences go on one by one, and whichever fails alone is at fault. An
error behind a complete answer goes to the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from outpace.cache.base import PAGE, shared_prefix
from outpace.drafters.base import Drafter
from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.engine.requests import GenerationRequest
from outpace.engine.results import Counters, DrafterCounts, Result
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import ActiveSequence
from outpace.errors import OutpaceError
from outpace.machine import Machine
from outpace.serving.events import Done, Event, Failed, Listener, ServiceStats, Tokens
from outpace.serving.memory import Memory
from outpace.serving.per_request_policy import Own, PerRequestPolicy
from outpace.serving.preemption import restart, resume, suspend
from outpace.serving.prompt_scores import PromptScores
from outpace.serving.trace import described

LOG = logging.getLogger("outpace.serving")


class Ticket:
    """A request under way. Safe to use from any thread."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self.cancelled = False
        """Nobody wants the rest. Set from any thread."""
        self.deaf = False
        """Its listener has failed, and is not called again."""
        self._nudge = nudge

    def cancel(self) -> None:
        """Drop what is not answered yet: it leaves before the next pass, and its memory is free.

        Each answer that had not ended still gets its Done, with ``finish_reason`` cancelled.
        Harmless if all have ended.
        """
        self.cancelled = True
        self._nudge()


class Answer:
    """One answer, from the queue to its end."""

    def __init__(self, request: GenerationRequest, listen: Listener, ticket: Ticket, method: Method) -> None:
        self.request, self.listen, self.ticket, self.method = request, listen, ticket, method
        self.asked = time.perf_counter()
        self.row: ActiveSequence | None = None
        """Its sequence, once it has run."""
        self.scores: PromptScores | None = None
        """Of its prompt, if they are wanted."""

    @property
    def tokens(self) -> list[int]:
        """What its slot must hold before it can go on, but for the last token of a prompt."""
        return list(self.request.prompt[:-1]) if self.row is None else self.row.tokens[:-1]

    @property
    def exact(self) -> bool:
        """Whether the keys of its text are those of the whole text, for others to go on from."""
        return all(one.drafter.traits.lossless for one in self.method.members.values())

    def tell(self, event: Event) -> None:
        """Call its listener, unless that has failed."""
        if self.ticket.deaf:
            return
        try:
            self.listen(event)
        except Exception:
            self.ticket.deaf = self.ticket.cancelled = True


class Batch:
    """Answers that run together.

    Args:
        engine: whose cache and target they run on.
        chunk: prompt tokens read between two plain steps of the others.
    """

    def __init__(self, engine: Engine, methods: Mapping[str, Method], memory: Memory, chunk: int) -> None:
        self.engine, self.memory = engine, memory
        self.running: dict[ActiveSequence, Answer] = {}
        """In the order in which they entered."""
        self.victims: list[Answer] = []
        """Lost their slots to others, and are not queued again yet; latest first."""
        members: dict[str, Drafter[object]] = {
            name: one.drafter for m in methods.values() for name, one in m.members.items()
        }
        watchers = dict.fromkeys(watch for m in methods.values() for watch in m.watchers)
        self._scheduler = Scheduler(
            Machine(
                engine.target,
                engine.cache,
                members,
                PerRequestPolicy(),
                chunk=chunk,
                listeners=(*engine.listeners, *watchers),
            )
        )
        self._events: list[tuple[Answer, Event]] = []
        self._drafters: dict[str, DrafterCounts] = {}
        self._finished: dict[str, int] = {}
        self._prompt = self._cached = self._new = self._passes = self._preempted = 0

    def enter(self, answer: Answer) -> bool:
        """Let an answer take part; False if it must wait for memory, or for another's prompt."""
        if self._soon(answer):
            return False
        try:
            stored = answer.request.prompt_logprobs is None  # keys that are copied come without logits
            slot = self.memory.enter(answer.tokens, answer.request.key, list(self.running), stored=stored)
        except Exception as error:  # no memory for this one
            self.drop(answer, error)
            return True
        if slot is None:
            return False
        try:
            if answer.row is None:
                answer.row = self._begin(answer, slot)
            else:
                resume(answer.row, answer.method, self.engine.cache, slot)
        except Exception as error:
            self.engine.cache.close(slot)
            self.drop(answer, error)
            return True
        self.running[answer.row] = answer
        self._scheduler.join(answer.row)
        return True

    def _begin(self, answer: Answer, slot: int) -> ActiveSequence:
        request, method = answer.request, answer.method
        verifier = self.engine.verifier(method, request.reproducible, request.params)
        row = self.engine.start_sequence(request, slot, method, verifier)
        row.policy_state = Own(method.policy, row.policy_state)
        row.asked = answer.asked
        row.watch = described if request.traced else None
        if request.prompt_logprobs is not None:
            answer.scores = PromptScores(request.prompt, request.prompt_logprobs)
            row.read_prompt = answer.scores.read
        return row

    def _soon(self, answer: Answer) -> bool:
        """Whether reading must come first: a chunk is left already, or a part of this text is about to
        be read, to be copied then.
        """
        reading = [row for row in self.running if row.reading]
        if self._scheduler.busy_reading:
            return True
        ids, key, store = answer.tokens, answer.request.key, self.memory.store
        if not reading or not store.most or answer.request.prompt_logprobs is not None:
            return False
        source_of = self.engine.target.source_of
        source, ours = source_of(ids), [row for row in reading if row.request.key == key]
        alike = (row for row in ours if source_of(row.tokens) == source)
        same = max((shared_prefix(row.tokens, ids) for row in alike), default=0)
        return same // PAGE * PAGE > store.known(key, ids)

    def drop_cancelled(self) -> None:
        for row, answer in list(self.running.items()):
            if answer.ticket.cancelled:
                row.cancel()
                self._scheduler.leave(row)
                self._deliver(row)

    def drop(self, answer: Answer, error: Exception | None = None) -> None:
        """End an answer that has no slot, cancelled or failed."""
        row, request = answer.row, answer.request
        if row is not None:
            self._release(row, answer, keep_slot=True)
        self._count_end("cancelled" if error is None else "error")
        if error is not None:
            self._say(answer, Failed(index=request.index, error=error))
            return
        if row is not None:
            row.cancel()
            result = row.result()
        else:
            result = Result(
                text="",
                tokens=(),
                finish_reason="cancelled",
                prompt_tokens=len(request.prompt),
                counters=Counters(),
                seconds=0.0,
                prefill_seconds=0.0,
                seed=request.seed,
                drafter=answer.method.spec,
                queue_seconds=time.perf_counter() - answer.asked,
            )
        self._say(answer, Done(index=request.index, result=result))

    def lost(self) -> list[Answer]:
        """All that have begun and not ended, for the case that nothing goes on."""
        return [*self.running.values(), *self.victims]

    def advance(self) -> None:
        """Run one pass, after which ``victims`` are to be queued anew."""
        while not self._fits():
            row = max(self.running, key=lambda one: self.running[one].asked)
            answer = self.running.pop(row)
            self._scheduler.leave(row)
            suspend(row, self.engine.cache)
            self._preempted += 1
            self.victims.append(answer)
        if not self.running:
            return
        before = {row: self._place(row) for row in self.running}
        self._passes += 1
        try:
            part = self._scheduler.advance()
        except Exception as error:
            if not isinstance(error, OutpaceError):  # a defect, though most answers go on as if nothing was
                LOG.error("a pass over %d answers failed; each goes on alone", len(before), exc_info=error)
            part = self._one_by_one(before)
        for row in part:
            if row.error is None and row.new_tokens <= 1:
                self._store(row)
            self._deliver(row)

    def _fits(self) -> bool:
        """Whether the next pass has room. Where no memory can be had, fewer must do; a single one fails."""
        try:
            return self.memory.settle(list(self.running))
        except Exception as error:
            if len(self.running) > 1:
                LOG.warning("no memory for %d answers, so one waits: %s", len(self.running), error)
                return False
            for row in list(self.running):
                self._scheduler.leave(row)
                row.fail(error)
                self._deliver(row)
            return True

    def _store(self, row: ActiveSequence) -> None:
        """Keep its text for others; if that fails, it fails for this row alone."""
        try:
            self.memory.save(row)
        except Exception as error:
            if row in self._scheduler.active:
                self._scheduler.leave(row)
            row.fail(error)

    def _place(self, row: ActiveSequence) -> tuple[int, int]:
        return self.engine.cache.length(row.slot), len(row.tokens)

    def _one_by_one(self, before: Mapping[ActiveSequence, tuple[int, int]]) -> list[ActiveSequence]:
        """A pass broke: find out whose fault it was, and let the others go on."""
        for row, place in before.items():
            self.engine.cache.drop(row.slot)
            if self._place(row) != place and not row.finished:
                # Committed already, so its drafters may have missed it.
                try:
                    restart(row, self.running[row].method, self.engine.cache)
                except Exception as error:
                    row.fail(error)
        for row in [row for row in before if not row.finished]:
            try:
                self._scheduler.advance_one(row)
            except Exception as error:
                self.engine.cache.drop(row.slot)
                row.chunks.clear()
                row.fail(error)
        self._scheduler.active = [row for row in self._scheduler.active if not row.finished]
        return list(before)

    def _deliver(self, row: ActiveSequence) -> None:
        """Note what became readable, and end what is finished."""
        answer = self.running[row]
        for chunk in row.chunks:
            self._new += len(chunk.tokens)
            self._say(
                answer,
                Tokens(
                    index=chunk.index,
                    ids=chunk.tokens,
                    text=chunk.text,
                    accepted=chunk.accepted,
                    logprobs=chunk.logprobs,
                    seen=chunk.seen,
                ),
            )
        row.chunks.clear()
        if not row.finished:
            return
        del self.running[row]
        if row.error is None and answer.exact:
            self._store(row)
        self._release(row, answer)
        self._count_end(row.finish_reason or "")
        result = row.result()
        if answer.scores is not None:
            result = replace(result, prompt_logprobs=tuple(answer.scores.found))
        self._prompt += result.prompt_tokens
        self._cached += result.cached_tokens
        for name, counts in result.by_drafter.items():
            self._drafters[name] = self._drafters.get(name, DrafterCounts()) + counts
        if row.error is not None:
            self._say(answer, Failed(index=row.index, error=row.error))
        else:
            self._say(answer, Done(index=row.index, result=result))

    def _release(self, row: ActiveSequence, answer: Answer, keep_slot: bool = False) -> None:
        try:
            self.engine.release(row, answer.method, keep_slot)
        except Exception as error:
            LOG.error("drafter %s failed after its last guess", answer.method.spec, exc_info=error)

    def _say(self, answer: Answer, event: Event) -> None:
        self._events.append((answer, event))

    def tell(self) -> None:
        """Call the listeners with what has happened since the last call."""
        events, self._events = self._events, []
        for answer, event in events:
            answer.tell(event)

    def _count_end(self, reason: str) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def stats(self, slots: int) -> ServiceStats:
        pages = self.memory.counts(list(self.running))
        return ServiceStats(
            running=len(self.running),
            slots=slots,
            pages=pages.limit,
            pages_used=pages.used,
            pages_stored=pages.stored,
            pages_free=pages.free,
            passes=self._passes,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            new_tokens=self._new,
            finished=dict(self._finished),
            preempted=self._preempted,
            drafters=dict(self._drafters),
        )
