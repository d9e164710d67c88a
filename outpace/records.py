"""What policies and listeners receive of a step: plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy may know about the batch as a whole."""

    batch: int
    """Sequences in this step."""
    context: int
    """Longest text among them, tokens: the pending one counts, and of a prompt also what is not read yet."""
    beside: int = 0
    """Rows of the pass that belong to sequences under other policies."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a policy planned what it planned, for listeners to show."""

    reason: str
    """``best``: it gains most. ``probe``: to learn what an idle drafter is worth now. ``pause``: the
    sequence is not looked at in this step, because drafting did not pay for it lately."""
    rates: Mapping[str, float]
    """The drafter picked, and ``"none"`` -> tokens per second that the whole batch is expected to emit
    with it."""


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One sequence in one step, as numbers."""

    sequence: int
    drafter: str
    drafted: int
    accepted: int
    emitted: tuple[int, ...]
    depth: int
    """Depth of the draft; with ``accepted`` it tells where acceptance stopped."""
    censored: bool
    choice: Choice | None = None
    """Why this drafter was asked, if its policy says."""
    num_uncached: int = 0
    """Committed tokens that the drafter read first, see ``Drafter.num_uncached``."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for listeners: traces, benchmarks, metrics, training."""

    index: int
    rows: tuple[RowRecord, ...]
    seconds: Mapping[str, float]
    """Verb -> wall-clock seconds: plan, draft, score, judge, commit."""
    passed_rows: int
    """Rows of the target's pass, all sequences together."""
    pass_seconds: Mapping[str, float] = field(default_factory=dict)
    """Verb -> seconds of it spent inside passes: of the drafters' models in draft and commit, of
    the target in score."""
    draft_levels: int = 0
    """Passes of drafters' models in the verb draft."""
    prompt: bool = False
    """Whether the step fed prompts."""
    context: int = 0
    """Longest text among the sequences, tokens; see ``Load``."""
    preview_seconds: float = 0.0
    """Seconds of plan in which lookups made the drafts that the policy is shown."""


@lru_cache(1024)
def depths(parent_N: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each node of a forest; a child of the root, -1, has depth 1."""
    depth: list[int] = []
    for parent in parent_N:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return tuple(depth)
