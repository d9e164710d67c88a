"""One request on its way: committed tokens, cache slot, drafter states, counters.

It implements ``outpace.machine.StepSequence``; the step reads and advances it, nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.coins import KeyedCoins, Stream
from outpace.engine.requests import GenerationRequest
from outpace.engine.results import Chunk, Counters, DrafterCounts, Result
from outpace.machine import Member
from outpace.sampling import TokenLogprobs, Warp, logprobs
from outpace.stops import StopChecker
from outpace.types import NOTHING, Budget, Outcome, Verdict
from outpace.verifiers.base import Verifier


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a sequence is to be drafted for and verified."""

    drafter: str
    """Normalised method spec, the preferred drafter."""
    members: Mapping[str, Member]
    verifier: Verifier
    policy_state: Any = None
    lossless: bool = True


class ActiveSequence:
    """One sequence. Not thread-safe; owned by the batch that runs it.

    Args:
        number: for records; unique within the engine.
        stops: tells where the text ends; also yields printable text.
    """

    def __init__(
        self,
        *,
        number: int,
        request: GenerationRequest,
        warp: Warp,
        stops: StopChecker,
        coins: int,
        slot: int,
        setup: Setup,
        max_positions: int,
    ) -> None:
        self.number = number
        self.request = request
        self.index, self.params = request.index, request.params
        self.tokens = list(request.prompt)
        self.prompt_tokens = len(request.prompt)
        self.warp = warp
        self.stops = stops
        self._coins = coins
        self.slot = slot
        self.setup = setup
        self.all_members = setup.members
        self.members = setup.members
        """Of these, the ones that follow the passes at present."""
        self.verifier = setup.verifier
        self.policy_state = setup.policy_state
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        """What broke its text; the sequence is then finished."""
        self.behind = False
        """Whether its slot has lost text that was read already."""
        self.asked: float | None = None
        """When it was asked for, by ``time.perf_counter``; None: when it was made."""
        self.chunks: list[Chunk] = []
        """Not yet taken by a reader."""
        self.watch: Callable[[Outcome], Any] | None = None
        """Looks at every pass that emits something, while it is there."""
        self.read_prompt: Callable[[int, Tensor], None] | None = None
        self._max_positions = max_positions
        self._most = 1 << 20 if request.draft_tokens is None else request.draft_tokens
        self._logprobs: list[TokenLogprobs] = []
        self._passes = self._drafted = self._accepted = self._forced = 0
        self._by_drafter: dict[str, tuple[list[int], list[int]]] = {}
        """Drafts, guesses and those accepted; passes that kept a token at each depth."""
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._began = time.perf_counter()
        self._first = self._last = self._began

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def reading(self) -> bool:
        """Whether text must be read before it can go on: its prompt, or what its slot has lost."""
        return self.behind or self.new_tokens == 0

    @property
    def goal(self) -> int:
        """Tokens that its slot must hold to go on: all of a prompt, later all but the pending one."""
        return len(self.tokens) - (self.new_tokens > 0)

    def coins(self, stream: Stream) -> KeyedCoins:
        return KeyedCoins(self._coins, len(self.tokens) - 1, stream)

    def room(self) -> Budget:
        """Depth that the context and ``max_new_tokens`` leave: the last token is never drafted."""
        left = self.params.max_new_tokens - self.new_tokens
        depth = min(self._max_positions - len(self.tokens) - 1, left - 1, self._most)
        return Budget(max_nodes=self._most, max_depth=depth) if depth > 0 else NOTHING

    def cut(self, verdict: Verdict) -> Verdict:
        """Shorten a verdict at the first stop, and note why the text ends there."""
        left = self._max_positions - len(self.tokens)
        length, self.finish_reason = self.stops.cut(verdict.emitted[:left], verdict.doubted)
        if self.finish_reason is None and length == left:
            self.stops.close("length")
            self.finish_reason = self.stops.reason
        return verdict.cut(length)

    def fail(self, error: Exception) -> None:
        self.error, self.finish_reason = error, "error"

    @property
    def failed(self) -> bool:
        return self.error is not None

    def cancel(self) -> None:
        """End here, since nobody wants the rest."""
        self.finish_reason = "cancelled"

    def extend(self, outcome: Outcome) -> None:
        """Append what was emitted; count it; make it readable."""
        verdict = outcome.verdict
        if not verdict.emitted:
            return
        found: list[TokenLogprobs] = []
        if self.params.logprobs is not None:
            # Token i was judged at the row of the token before it.
            rows = (0, *(node + 1 for node in verdict.kept))[: len(verdict.emitted)]
            found = logprobs(outcome.scored.logits_TV[list(rows)], verdict.emitted, self.params.logprobs)
            self._logprobs += found
        self.tokens.extend(verdict.emitted)
        if self.warp.ruled:
            kept = range(len(verdict.kept))
            self._forced += sum(self.warp.certain(verdict.emitted[:i]) is not None for i in kept)
        self.warp.advance(verdict.emitted)
        now = time.perf_counter()
        if outcome.forced:
            self._first = now
        else:
            self._count(outcome)
        self._last = now
        text = self.stops.take()
        result = self.result() if self.finished else None
        seen = None if self.watch is None else self.watch(outcome)
        guessed = len(verdict.kept)
        self.chunks.append(Chunk(self.index, text, verdict.emitted, guessed, result, tuple(found), seen))

    def _count(self, outcome: Outcome) -> None:
        verdict, draft = outcome.verdict, outcome.draft
        kept = len(verdict.kept)
        self._passes += 1
        self._drafted += len(draft)
        self._accepted += kept
        if len(draft):
            counts, accepted_at = self._by_drafter.setdefault(outcome.drafter, ([0, 0, 0], []))
            counts[:] = counts[0] + 1, counts[1] + len(draft), counts[2] + kept
            _reach(accepted_at, kept)
        # What a stop cut off is neither accepted nor refused.
        _reach(self._drafted_at, kept if verdict.censored else draft.levels)
        _reach(self._accepted_at, kept)

    def result(self) -> Result:
        """The answer so far; final once ``finished``."""
        return Result(
            text=self.stops.text,
            tokens=tuple(self.tokens[self.prompt_tokens :]),
            finish_reason=self.finish_reason or "length",
            prompt_tokens=self.prompt_tokens,
            counters=Counters(
                new_tokens=self.new_tokens,
                passes=self._passes,
                drafted=self._drafted,
                accepted=self._accepted,
                forced=self._forced,
                drafted_at=tuple(self._drafted_at),
                accepted_at=tuple(self._accepted_at),
            ),
            seconds=self._last - self._began,
            prefill_seconds=self._first - self._began,
            drafter=self.setup.drafter,
            seed=self.request.seed,
            lossless=self.setup.lossless,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            queue_seconds=0.0 if self.asked is None else self._began - self.asked,
            cached_tokens=self.request.num_cached,
            by_drafter={
                name: DrafterCounts(drafts=one, drafted=drafted, accepted=accepted, accepted_at=tuple(at))
                for name, ((one, drafted, accepted), at) in self._by_drafter.items()
            },
        )


def _reach(at: list[int], depth: int) -> None:
    """Count a pass that reached so deep."""
    at.extend([0] * (depth - len(at)))
    at[:depth] = [count + 1 for count in at[:depth]]
