"""Many requests at once over one engine: a queue, a batch that never waits, and a thread for it.

    service = Service(engine, drafters=("auto", "prompt_lookup"))
    ticket = service.submit(service.request("Once", max_new_tokens=32), listen=print)
    ...
    ticket.cancel()
    service.close()

Requests enter from any thread and are answered first come, first served. What they say is heard on
the service's thread, between two passes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outpace.config import MethodSpec, names_folder
from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.engine.requests import GenerationRequest, check, params_of
from outpace.errors import QueueFull, RequestError, ServiceClosed
from outpace.models.base import Target
from outpace.models.prompts import Prompt
from outpace.params import SamplingParams
from outpace.serving.batch import Answer, Batch, Ticket
from outpace.serving.events import Failed, Listener, ServiceStats
from outpace.serving.learning import SHARE, Learner, Learning
from outpace.serving.memory import Memory
from outpace.serving.openmp import let_go

NONE = "none"
TAIL = 64
"""Rows that a pass may add to a slot, at least."""


def usual_chunk(target: Target) -> int:
    """Prompt tokens between two steps: 512, but 128 on a CPU, where a larger pass takes no less per token."""
    return 128 if target.device.type == "cpu" else 512


class Service:
    """Serves requests on a thread of its own until it is closed.

    While it is open the engine belongs to it: generate nothing beside it.

    Args:
        engine: loaded; its own drafter is not used.
        drafters: method specs that requests may name, loaded now. The first one serves requests
            that name none; ``none`` may always be named.
        max_batch: most answers at a time.
        max_queue: most answers waiting while no slot is free; one more is refused.
        chunk: prompt tokens read between two plain steps of the others, more beside drafts (see
            ``Scheduler``); None: ``usual_chunk``.
        pages: most pages of 64 tokens that the target's cache may take, slots and stored text
            together. None: a share of the memory that is free now. See ``outpace.serving.memory``.
        stored_pages: most of them kept for prompts that begin alike; None: some 512 MB, 0: none.
        learner: learns from the passes of one of ``drafters``; closed with the service.
        learn_share: of the time of passes, what it may take; idle time comes on top.
        share_across_keys: treat all requests as if they were of one key.

    Raises:
        OutpaceError: a drafter that cannot be loaded, or a number out of range.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        drafters: Sequence[str] = ("auto",),
        max_batch: int = 32,
        max_queue: int = 256,
        chunk: int | None = None,
        pages: int | None = None,
        stored_pages: int | None = None,
        learner: Learner | None = None,
        learn_share: float = SHARE,
        share_across_keys: bool = False,
    ) -> None:
        on_cpu = engine.target.device.type == "cpu"
        chunk = usual_chunk(engine.target) if chunk is None else chunk
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue), ("chunk", chunk)):
            if value < 1:
                raise RequestError(f"{name} must be at least 1, got {value}")
        self.engine, self.max_batch, self.max_queue = engine, max_batch, max_queue
        specs = [str(MethodSpec.parse(spec)) for spec in drafters] or [NONE]
        self.drafters = tuple(dict.fromkeys([*specs, NONE]))
        """Method specs that requests may name, normalised, the default first."""
        self._methods = {spec: engine.method(spec) for spec in self.drafters}
        self.share_across_keys = share_across_keys
        """Whether all requests are treated as of one key."""
        self._learning: Learning | None = None
        tail = max(m.budget_of(one).max_nodes for m in self._methods.values() for one in m.members.values())
        self._memory = Memory(
            engine.cache,
            max_batch,
            pages=pages,
            stored=stored_pages,
            tail=max(TAIL, tail),
            device=engine.target.device,
            source_of=engine.target.source_of,
        )
        if learner is not None:
            self._learning = Learning(learner, self._methods, learn_share)
        self._batch = Batch(engine, self._methods, self._memory, chunk)
        self._wake = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._closing: str | None = None
        self._broken: Exception | None = None
        self._stats = self._batch.stats(max_batch)
        if on_cpu:
            let_go()
        self._thread = threading.Thread(target=self._work, name="outpace-service", daemon=True)
        self._thread.start()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        drafter: str | None = None,
        draft_tokens: int | None = None,
        reproducible: bool | None = None,
        reference: str | Sequence[int] | None = None,
        **settings: Any,
    ) -> GenerationRequest:
        """Encode and check a request, on the caller's thread; ``submit`` takes what it gives.

        Args:
            prompt: as for ``Engine.generate``, a single one.
            params: sampling settings, or ``settings`` in their place; ``n`` is the answers wanted.
            chat: wrap a text prompt in the model's chat template.
            drafter: one of ``drafters``; None takes the first.
            draft_tokens: most guesses per pass; 0 drafts nothing.

        Raises:
            RequestError: what ``submit`` would refuse.
        """
        (own,) = params_of(params, settings, 1)
        request = self.engine.request(prompt, own, chat=chat, reference=reference)
        request = replace(request, drafter=drafter, draft_tokens=draft_tokens, reproducible=reproducible)
        self._check(request)
        return request

    def submit(self, request: GenerationRequest, listen: Listener, *, key: str = "") -> Ticket:
        """Queue a request; returns at once.

        Args:
            request: from ``request``, or made by hand. ``params.n`` answers are made, the
                first with its seed; they are numbered from 0.
            listen: called with the events of all its answers. If it raises, the request is
                cancelled and it is not called again.
            key: whose request it is; nothing is shared between different keys, unless the service
                was made with ``share_across_keys``.

        Raises:
            QueueFull: too many answers wait already.
            ServiceClosed: the service ends, or has broken.
            RequestError: a request that can never be served.
        """
        method = self._check(request)
        ones = list(replace(request, key="" if self.share_across_keys else key).answers())
        with self._wake:
            if self._broken is not None:
                raise ServiceClosed("the service has broken down; start it anew")
            if self._closing is not None:
                raise ServiceClosed("the service is closing; it takes no more requests")
            free = self.max_batch - len(self._batch.running)
            if len(self._waiting) + len(ones) > self.max_queue + free:
                raise QueueFull(
                    f"{len(self._waiting)} answers are waiting, and {len(ones)} more are too many "
                    f"(max_queue={self.max_queue}); try again later"
                )
            ticket = Ticket(self._nudge)
            for one in ones:
                self._waiting.append(Answer(one, listen, ticket, method))
            self._wake.notify()
        return ticket

    def _check(self, request: GenerationRequest) -> Method:
        """Refuse what cannot be served; give the method that will serve it."""
        spec = self.drafters[0] if request.drafter is None else request.drafter
        # A path from outside is not even looked at.
        name = "" if names_folder(spec) else str(MethodSpec.parse(spec))
        if name not in self._methods:
            raise RequestError(f"drafter {spec!r} was not started; choose from {', '.join(self.drafters)}")
        if request.draft_tokens is not None and request.draft_tokens < 0:
            raise RequestError(f"draft_tokens must be at least 0, got {request.draft_tokens}")
        if request.prompt_logprobs is not None and self.engine.target.encodes:
            name = self.engine.target.name
            raise RequestError(f"{name} is an encoder-decoder: tokens of a prompt have no probabilities")
        params = request.params
        if params is not params.resolved(self.engine.target.defaults):
            raise RequestError("the request's params are not resolved; make it with request()")
        check(request.prompt, params, self.engine.target, self.engine.eos_ids)
        self.engine.verifier(self._methods[name], request.reproducible, params)
        self._memory.check(min(len(request.prompt) + params.max_new_tokens, self.engine.target.max_positions))
        return self._methods[name]

    def lossless(self, request: GenerationRequest) -> bool:
        """Whether its answers will have the distribution of the model.

        Raises:
            RequestError: it cannot be served.
        """
        method = self._check(request)
        verifier = self.engine.verifier(method, request.reproducible, request.params)
        return method.lossless(verifier)

    @property
    def lossy(self) -> tuple[str, ...]:
        """Of ``drafters``, those whose own verifiers change the distribution of the answers."""
        return tuple(spec for spec, method in self._methods.items() if not method.lossless(method.verifier))

    @property
    def longest(self) -> int:
        """Tokens of the longest text, prompt and answer, that can be served."""
        held, most = self._memory.longest, self.engine.target.max_positions
        return most if held is None else min(held, most)

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests: ``close`` was called, or it has broken."""
        return self._closing is not None

    @property
    def broken(self) -> Exception | None:
        """The defect of ours that ended it; None as long as there was none."""
        return self._broken

    def stats(self) -> ServiceStats:
        """How it stands, as of the last pass."""
        with self._wake:
            stats = replace(self._stats, waiting=len(self._waiting))
        return stats if self._learning is None else self._learning.stats(stats)

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests, and end.

        Args:
            drain: answer what was asked for already; otherwise it is cancelled.
            timeout: seconds to drain; what is left then is cancelled.

        Returns:
            Whether everything was answered. The engine is free then, all memory given back. False
            at once where a listener calls it.
        """
        with self._wake:
            self._closing = self._closing or "drain"
            if not drain:
                self._closing = "drop"
            self._wake.notify()
        if threading.current_thread() is self._thread:  # a listener; it cannot wait for itself
            return False
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._wake:
                self._closing = "drop"
                self._wake.notify()
            self._thread.join()
        return self._closing == "drain"

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _nudge(self) -> None:
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                self._batch.drop_cancelled()
                self._admit()
                if self._batch.running:
                    self._batch.advance()
                with self._wake:
                    self._waiting.extendleft(self._batch.victims)
                    self._batch.victims.clear()
                    self._stats = self._batch.stats(self.max_batch)
                self._batch.tell()
                if self._learning is not None:
                    self._learning.after_pass()
        except Exception as error:  # a defect of ours; nobody shall wait for ever
            with self._wake:
                self._closing, self._broken = "broken", error
                lost = [*self._batch.lost(), *self._waiting]
                self._waiting.clear()
                self._stats = replace(self._stats, running=0)
            self._batch.tell()
            for answer in lost:
                answer.tell(Failed(index=answer.request.index, error=error))
            raise
        finally:
            if self._learning is not None:
                self._learning.close()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False if there never will be."""
        idle = False
        with self._wake:
            while not (self._waiting or self._batch.running):
                if self._closing:
                    return False
                if not idle:
                    self._memory.trim()
                    self._memory.check_integrity([])
                idle = True
                if not (self._learn() or self._waiting or self._closing):
                    self._wake.wait()
            if self._closing == "drop":
                for answer in (*self._waiting, *self._batch.running.values()):
                    answer.ticket.cancelled = True
        return True

    def _learn(self) -> bool:
        """Learn a little while nobody waits, with the lock free; False if there is nothing to."""
        if self._learning is None:
            return False
        self._wake.release()
        try:
            return self._learning.idle()
        finally:
            self._wake.acquire()

    def _admit(self) -> None:
        """Let in those that wait, first come, first served; cancelled ones end."""
        with self._wake:
            gone = [answer for answer in self._waiting if answer.ticket.cancelled]
            for answer in gone:
                self._waiting.remove(answer)
        for answer in gone:
            self._batch.drop(answer)
        while len(self._batch.running) < self.max_batch:
            with self._wake:
                if not self._waiting:
                    return
                answer = self._waiting[0]
            if not self._batch.enter(answer):
                return
            with self._wake:  # only now: ``submit`` counts it at any time
                self._waiting.popleft()
