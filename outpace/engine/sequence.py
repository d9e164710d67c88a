"""One request on its way: committed tokens, cache slot, drafter states, counters.

It implements ``outpace.step.Row``; the step reads and advances it, nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.coins import KeyedCoins, Stream
from outpace.engine.results import Chunk, Counters, Result
from outpace.params import SamplingParams
from outpace.sampling import TokenLogprobs, Warp, logprobs
from outpace.stops import StopChecker
from outpace.types import NOTHING, Budget, Outcome, Verdict
from outpace.verifiers.base import Verifier


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a sequence is to be drafted for and verified."""

    drafter: str
    """Normalised method spec, the preferred drafter."""
    states: Mapping[str, Any]
    budgets: Mapping[str, Budget]
    verifiers: Mapping[str, Verifier]
    policy_state: Any = None
    lossless: bool = True


class Sequence:
    """One sequence. Not thread-safe; owned by the batch that runs it.

    Args:
        number: for records; unique within the engine.
        index: which answer of its request.
        prompt: ids, at least one.
        params: resolved, see ``SamplingParams.resolved``.
        warp: over this prompt.
        stops: tells where the text ends; also yields printable text.
        seed: of all its coins.
        slot: of the target's cache.
        setup: drafters, budgets, verifiers.
        max_positions: context length of the target.
    """

    def __init__(
        self,
        *,
        number: int,
        prompt: tuple[int, ...],
        params: SamplingParams,
        warp: Warp,
        stops: StopChecker,
        seed: int,
        slot: int,
        setup: Setup,
        max_positions: int,
        index: int = 0,
    ) -> None:
        self.number = number
        self.index = index
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.params = params
        self.warp = warp
        self.stops = stops
        self.seed = seed
        self.slot = slot
        self.setup = setup
        self.states = setup.states
        self.budgets = setup.budgets
        self.verifiers = setup.verifiers
        self.policy_state = setup.policy_state
        self.finish_reason: str | None = None
        self.chunks: list[Chunk] = []
        """Not yet taken by a reader."""
        self._max_positions = max_positions
        self._text = ""
        self._logprobs: list[TokenLogprobs] = []
        self._passes = self._drafted = self._accepted = 0
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._began = time.perf_counter()
        self._first = self._last = self._began

    @property
    def finished(self) -> bool:
        """Whether the last token is emitted."""
        return self.finish_reason is not None

    @property
    def new_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.prompt_tokens

    def coins(self, stream: Stream) -> KeyedCoins:
        """Coins for the present pending token."""
        return KeyedCoins(self.seed, len(self.tokens) - 1, stream)

    def room(self) -> Budget:
        """Depth that the context and ``max_new_tokens`` leave: the last token is never drafted."""
        depth = min(
            self._max_positions - len(self.tokens),
            self.params.max_new_tokens - self.new_tokens - 1,
        )
        return Budget(max_nodes=1 << 20, max_depth=depth) if depth > 0 else NOTHING

    def cut(self, verdict: Verdict) -> Verdict:
        """Shorten a verdict at the first stop, and note why the text ends there."""
        left = self._max_positions - len(self.tokens)
        length, self.finish_reason = self.stops.cut(verdict.emitted[:left])
        if self.finish_reason is None and length == left:
            self.stops.close("length")
            self.finish_reason = self.stops.reason
        return verdict.cut(length)

    def extend(self, outcome: Outcome) -> None:
        """Append what was emitted; count it; make it readable."""
        verdict = outcome.verdict
        if not verdict.emitted:
            return
        if self.params.logprobs is not None:
            # Token i was judged at the row of the token before it.
            rows = (0, *(node + 1 for node in verdict.kept))[: len(verdict.emitted)]
            self._logprobs += logprobs(
                outcome.scored.logits_TV[list(rows)], verdict.emitted, self.params.logprobs
            )
        self.tokens.extend(verdict.emitted)
        self.warp.advance(verdict.emitted)
        now = time.perf_counter()
        if outcome.forced:
            self._first = now
        else:
            self._count(outcome)
        self._last = now
        text = self.stops.take()
        self._text += text
        result = self.result() if self.finished else None
        self.chunks.append(
            Chunk(self.index, text, verdict.emitted, len(verdict.kept), result)
        )

    def _count(self, outcome: Outcome) -> None:
        verdict, draft = outcome.verdict, outcome.draft
        kept = len(verdict.kept)
        self._passes += 1
        self._drafted += len(draft)
        self._accepted += kept
        # What a stop cut off is neither accepted nor refused.
        reach = kept if verdict.censored else max(draft.depth_N, default=0)
        for depths, count in ((self._drafted_at, reach), (self._accepted_at, kept)):
            depths.extend([0] * (count - len(depths)))
            for depth in range(count):
                depths[depth] += 1

    def result(self) -> Result:
        """The answer so far; final once ``finished``."""
        return Result(
            text=self._text,
            tokens=tuple(self.tokens[self.prompt_tokens :]),
            finish_reason=self.finish_reason or "length",
            prompt_tokens=self.prompt_tokens,
            counters=Counters(
                new_tokens=self.new_tokens,
                passes=self._passes,
                drafted=self._drafted,
                accepted=self._accepted,
                drafted_at=tuple(self._drafted_at),
                accepted_at=tuple(self._accepted_at),
            ),
            seconds=self._last - self._began,
            prefill_seconds=self._first - self._began,
            drafter=self.setup.drafter,
            seed=self.seed,
            lossless=self.setup.lossless,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
        )
