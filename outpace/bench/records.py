"""What a paired benchmark passes around: units of work, contenders, and what a run yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from outpace.engine.results import Counters

Kind = Literal["drafter", "peer"]

STALL = 4.0
"""Times the median step of a run beyond which a step's time is the machine's."""

VERBS = ("plan", "draft_host", "draft_pass", "score_host", "score_pass", "judge", "commit", "other")
"""Keys of ``verb_shares``; together they are the whole of a run's decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How every contender of a benchmark has to answer."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = True
    reproducible: bool = False
    """Sampled text is the same with any drafter: position-keyed coins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One prompt, as token ids, with the seed of its sampling."""

    id: str
    group: str
    ids: tuple[int, ...]
    seed: int = 0
    reference: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one contender made of one unit: a batch of cases of one group, often just one."""

    tokens: tuple[tuple[int, ...], ...]
    """New tokens of every case, in order."""
    seconds: float
    """From the call to the last token of the last case."""
    prefill_seconds: float
    """Of steps that read prompts alone; the rest is decoding. Of a peer: until all cases have a token."""
    counters: tuple[Counters, ...] = ()
    """Per case; empty for a peer that does not tell."""
    verb_seconds: Mapping[str, float] = field(default_factory=dict)
    """Decoding by VERBS, ``other`` left out; empty for a peer."""
    draft_levels: int = 0
    """Passes of the drafters' models while drafting."""
    stalled_seconds: float = 0.0
    """Of decoding, beyond STALL times the median step: something else had the machine. 0 for a peer."""
    peak_memory_bytes: int | None = None
    full_tokens: int = 0
    """Of decoding, until the first case of a batch ended; 0 for a peer."""
    full_seconds: float = 0.0
    """Likewise."""

    @property
    def decode_tokens(self) -> int:
        """Tokens that decoding yielded: all but the first of every case."""
        return sum(len(tokens) - 1 for tokens in self.tokens)

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds

    @property
    def mean_emitted(self) -> float | None:
        """Tokens per pass of the target; None for a peer that does not tell."""
        passes = sum(one.passes for one in self.counters)
        return sum(one.new_tokens - 1 for one in self.counters) / passes if passes else None


class Contender(Protocol):
    """Something that answers units, against others that answer the same ones."""

    name: str
    """A normalised method spec, or a peer's name."""
    kind: Kind
    about: Mapping[str, Any]
    """What a report must say about it: dtype, quantization, versions, whether it is synthetic."""

    def run(self, unit: tuple[Case, ...], settings: Settings) -> Run:
        """Answer a unit, timed.

        Raises:
            OutpaceError: it cannot serve these settings.
        """

    def close(self) -> None:
        """Free what it holds; child processes end."""
