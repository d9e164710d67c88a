"""The constants of `auto` and of its cost model: all that a decision depends on, with unit and reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What `auto` does not measure. ``outpace analyze policy --ablate --constants`` weighs each of them."""

    hope: float = 0.6
    """Probability that a level is kept of which nothing is known. High enough to be tried once."""
    doubt: float = 12.0
    """Guesses that a stated chance counts as before what was kept overrules it. Fewer: one refusal turns a
    drafter off, and of several sequences those are picked that had luck."""
    text: float = 40.0
    """Guesses of one sequence that count. A text may change its kind; fewer are noise."""
    pool: float = 400.0
    """Guesses of all sequences that count, for each kind of guess."""
    explore: float = 0.01
    """Share of the time that trials of idle drafters may lose. It bounds what `auto` loses to `none`."""
    remember: float = 0.97
    """What is left of a step's weight after the next step, in costs and in the mean throughput."""
    part: float = 0.2
    """Seconds of a row, and of a draft level, in passes over one row, before one was seen."""
    stall: float = 2.0
    """A step that takes so many times what was expected counts as that, unless the next does too."""
    first: int = 4
    """Guesses of a first draft, while the cost of rows is unknown, and sequences of a batch for each; after
    that twice what was tried."""
    most: int = 64
    """Guesses of one sequence, at most."""
    quiet: int = 4
    """A sequence without drafts is left out of at most 2 to this power steps, fewer in small batches."""
    renew: int = 8
    """Steps for which prices hold; fewer at the start. Finding prices takes longer than using them."""


TUNING = Tuning()
