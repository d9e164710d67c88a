"""What a request returns, with the counters of docs/json.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from outpace.sampling import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What speculation did for one sequence. The token that prefill yields is in ``new_tokens`` alone."""

    new_tokens: int = 0
    passes: int = 0
    """Target passes after the prompt."""
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    """Of the accepted, those that a grammar or a budget of thinking left no choice about."""
    drafted_at: tuple[int, ...] = ()
    """Passes whose draft reached depth 1, 2, ...; not counted beyond a stop."""
    accepted_at: tuple[int, ...] = ()
    """Passes that kept a token at depth 1, 2, ..."""

    @property
    def mean_emitted(self) -> float:
        """Tokens emitted per pass; 1.0 is plain decoding."""
        return (self.new_tokens - 1) / self.passes if self.passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0.0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCounts:
    """What one drafter did, for one sequence or for many. They add up."""

    drafts: int = 0
    """Drafts that were not empty."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """Drafts of which a token was kept at depth 1, 2, ..."""

    def __add__(self, other: DrafterCounts) -> DrafterCounts:
        """Both together."""
        at = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        return DrafterCounts(
            drafts=self.drafts + other.drafts,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            accepted_at=tuple(a + b for a, b in at),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One answer."""

    text: str
    tokens: tuple[int, ...]
    """New tokens only, the stop token included."""
    finish_reason: str
    """``stop``, ``length`` or, if allowed, ``low_confidence``; of a service also ``cancelled``."""
    prompt_tokens: int
    counters: Counters
    seconds: float
    """From when its sequence was opened, behind the queue, to its last token."""
    prefill_seconds: float
    """To its first token."""
    drafter: str
    """Normalised method spec."""
    seed: int
    """Give it again, with the same settings, for the same text where one is promised."""
    lossless: bool = True
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = field(default=(), repr=False)
    """One per token of the prompt, None for the first, if a service was asked for them."""
    queue_seconds: float = 0.0
    """From being asked for to the start that ``seconds`` counts from."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were stored already."""
    by_drafter: Mapping[str, DrafterCounts] = field(default_factory=dict)
    """Method spec -> counts, of drafters that drafted something."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding: what follows the first token."""
        decode = self.seconds - self.prefill_seconds
        return (len(self.tokens) - 1) / decode if decode > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the keys of docs/json.md."""
        c = self.counters
        out: dict[str, Any] = {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": c.new_tokens,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "tokens_per_second": self.tokens_per_second,
            "drafter": self.drafter,
            "passes": c.passes,
            "drafted": c.drafted,
            "accepted": c.accepted,
            "forced": c.forced,
            "mean_emitted": c.mean_emitted,
            "acceptance_rate": c.acceptance_rate,
            "drafted_at": list(c.drafted_at),
            "accepted_at": list(c.accepted_at),
            "seed": self.seed,
            "lossless": self.lossless,
        }
        if self.logprobs is not None:
            out["logprobs"] = [
                {"token": lp.token, "logprob": lp.logprob, "top": [list(t) for t in lp.top]}
                for lp in self.logprobs
            ]
        return out


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer."""

    index: int
    """Which answer of the request."""
    text: str
    """Newly printable text; may be empty while a character or a stop string is incomplete."""
    tokens: tuple[int, ...]
    accepted: int
    """How many of the tokens, from the first on, a drafter had guessed."""
    result: Result | None = None
    """The whole answer, with the last chunk."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if they were asked for."""
    seen: Any = None
    """What the sequence's ``watch`` made of the pass."""
