"""Answering one prompt: aloud, quietly, or plainly and speculatively in turns."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outpace.cli import show

if TYPE_CHECKING:
    from outpace.bench.records import Run as Measured
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
    """Speed-up of every pair of runs that counts, as they came."""
    disturbed: int = 0
    """Pairs that do not count: something else used the machine meanwhile."""

    @property
    def speedup(self) -> float | None:
        """Ratio of decode tokens per second; None where every pair was disturbed."""
        if not self.ratios:
            return None
        return _ratio(self.fast.tokens_per_second, self.plain.tokens_per_second)

    @property
    def end_to_end(self) -> float | None:
        """Ratio of new tokens per second of everything, the prompt included."""
        if not self.ratios:
            return None
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
            "disturbed_pairs": self.disturbed,
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
        alternates, so that drift of the machine hits both alike. A pair is repeated where a run
        stalled, or gained more than its tokens per pass allow, and does not count.
        """
        from outpace.bench.stats import disturbed, stalled

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
        pairs: list[tuple[_Timed, _Timed]] = []
        every: list[Result] = []
        lost = 0
        if not quiet:
            show.hint(f"timing {REPEATS} runs each")  # no spinner: it would take part in the race
        for turn in range(2 * REPEATS):
            first = timed.timed("none" if turn % 2 else None)
            second = timed.timed(None if turn % 2 else "none")
            plain, fast = (first, second) if turn % 2 else (second, first)
            every += [plain.result, fast.result]
            if stalled(plain.run) or disturbed(fast.run, plain.run):
                lost += 1
            else:
                pairs.append((plain, fast))
            if len(pairs) == REPEATS:
                break
        same = {result.tokens for result in every}
        promised = (resolved.temperature == 0 or keyed) and fast.result.lossless
        told = pairs or [(plain, fast)]
        return Sides(
            _middle([plain.result for plain, _ in told]),
            _middle([fast.result for _, fast in told]),
            len(same) == 1 if promised else None,
            tuple(_ratio(f.result.tokens_per_second, p.result.tokens_per_second) for p, f in pairs),
            lost,
        )

    def timed(self, drafter: str | None) -> _Timed:
        """Answer it, and note what the machine did meanwhile."""
        from outpace.bench.ours import Watch
        from outpace.bench.records import Run as Measured

        watch = Watch()
        with self.engine.listening(watch):
            (result,) = self.quiet(drafter)
        return _Timed(
            result,
            Measured(
                tokens=(result.tokens,),
                seconds=result.seconds,
                prefill_seconds=result.prefill_seconds,
                counters=(result.counters,),
                stalled_seconds=watch.stalled(),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Timed:
    """An answer, and the same as a run of a benchmark."""

    result: Result
    run: Measured


def _warm(run: Run, drafter: str | None) -> None:
    limit = min(_WARM_UP, run.params.max_new_tokens)
    short = replace(run.params, max_new_tokens=limit, min_tokens=min(limit, run.params.min_tokens))
    replace(run, params=short).quiet(drafter)


def _middle(results: list[Result]) -> Result:
    """The run of median speed; of an even number, the slower of the two in the middle."""
    return sorted(results, key=lambda result: result.tokens_per_second)[(len(results) - 1) // 2]


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
