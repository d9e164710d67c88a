"""Answering one prompt: aloud, quietly, or plainly and speculatively in turns."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from outpace.cli import show

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result
    from outpace.params import SamplingParams

REPEATS = 3
"""Measured runs per side of a comparison."""
_WARM_UP = 8  # tokens


@dataclass(frozen=True, slots=True)
class Sides:
    """Plain and speculative decoding of one prompt, each the run of median speed."""

    plain: Result
    fast: Result
    same_tokens: bool | None
    """None where nobody promised it: sampled, and not ``reproducible``; or lossy."""
    ratios: tuple[float, ...]
    """Speed-up of every pair of runs, as they came."""

    @property
    def speedup(self) -> float:
        return _ratio(self.fast.tokens_per_second, self.plain.tokens_per_second)

    @property
    def end_to_end(self) -> float:
        """Ratio of new tokens per second of everything, the prompt included."""
        return _ratio(
            _ratio(len(self.fast.tokens), self.fast.seconds),
            _ratio(len(self.plain.tokens), self.plain.seconds),
        )

    def to_json(self) -> dict[str, Any]:
        """The speculative result, with ``baseline`` and how the two compare."""
        return {
            **self.fast.to_json(),
            "baseline": self.plain.to_json(),
            "speedup": self.speedup,
            "end_to_end_speedup": self.end_to_end,
            "pair_speedups": list(self.ratios),
            "repeats": len(self.ratios),
            "same_tokens": self.same_tokens,
        }


@dataclass(frozen=True, slots=True)
class Run:
    engine: Engine
    ids: tuple[int, ...]
    params: SamplingParams
    reproducible: bool | None
    """As for ``Engine.generate``."""

    def quiet(self, drafter: str | None = None) -> list[Result]:
        settings: dict[str, Any] = {"drafter": drafter, "reproducible": self.reproducible}
        answer = self.engine.generate(self.ids, self.params, **settings)
        return answer if isinstance(answer, list) else [answer]

    def aloud(self) -> list[Result]:
        """Answer it and print the text as it comes; answers after the first when it is done."""
        done: dict[int, Result] = {}
        chunks = self.engine.stream(self.ids, self.params, reproducible=self.reproducible)
        with _line_ends():
            for chunk in chunks:
                if chunk.index == 0 and chunk.text:
                    show.write(chunk.text)
                if chunk.result is not None:
                    done[chunk.index] = chunk.result
        for index in range(1, len(done)):
            show.write(f"\n--- {index + 1} of {len(done)} ---\n{done[index].text}\n")
        return [done[index] for index in range(len(done))]

    def compare(self, *, quiet: bool) -> Sides:
        """Answer it plainly and with the drafter, in turns.

        Both are warmed up first; the measured runs print nothing. Which of the two goes first
        alternates, so that drift of the machine hits both alike.
        """
        resolved = self.params.resolved(self.engine.target.defaults)
        # One seed for all runs, so that they can be told apart by speed alone.
        seed = secrets.randbits(48) if resolved.seed is None else resolved.seed
        method, asked = self.engine.method(self.engine.drafter), self.params.seed is not None
        keyed = method.keyed(self.reproducible, asked) or method.verifier.reproduces
        timed = replace(self, params=replace(self.params, seed=seed), reproducible=keyed)
        _warm(timed, "none")
        if quiet:
            _warm(timed, None)
        else:
            timed.aloud()
        plain: list[Result] = []
        fast: list[Result] = []
        if not quiet:
            show.hint(f"timing {REPEATS} runs each")  # no spinner: it would take part in the race
        for turn in range(REPEATS):
            for side in ("none", None) if turn % 2 else (None, "none"):
                (plain if side else fast).extend(timed.quiet(side))
        same = {result.tokens for result in (*plain, *fast)}
        promised = (resolved.temperature == 0 or keyed) and fast[0].lossless
        ratios = [_ratio(f.tokens_per_second, p.tokens_per_second) for f, p in zip(fast, plain, strict=True)]
        return Sides(_middle(plain), _middle(fast), len(same) == 1 if promised else None, tuple(ratios))


def _warm(run: Run, drafter: str | None) -> None:
    limit = min(_WARM_UP, run.params.max_new_tokens)
    short = replace(run.params, max_new_tokens=limit, min_tokens=min(limit, run.params.min_tokens))
    replace(run, params=short).quiet(drafter)


def _middle(results: list[Result]) -> Result:
    """The run of median speed (of an odd number)."""
    middle = median(result.tokens_per_second for result in results)
    return next(result for result in results if result.tokens_per_second == middle)


def _ratio(over: float, under: float) -> float:
    """Quotient; 1.0 where there is nothing to divide by."""
    return over / under if under > 0 else 1.0


@contextlib.contextmanager
def _line_ends() -> Iterator[None]:
    """Finish the line of a text, also when Ctrl-C stops it."""
    try:
        yield
    except KeyboardInterrupt:
        show.write("\n")
        raise
    else:
        show.write("\n")
