"""What runs say when they are compared unit by unit: ratios, intervals, loops, acceptance.

Every comparison is paired: a run and the plain run of the same unit in the same round. Resampling
uses a fixed seed, so the same runs give the same intervals.

Shape letters: U units, P prompts, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.bench.records import VERBS, Run
from outpace.engine.results import Counters
from outpace.errors import RequestError

LONGEST_PERIOD = 32
"""Tokens of the longest period that counts as a loop."""
LOOPS = 0.2
"""A text of which a larger share loops is left out where loops are left out."""
FEWEST = 5
"""Prompts below which an interval over prompts is not given: it would promise too much."""
_SHORTEST, _STALLED, _NOISE = 0.05, 0.1, 0.03  # seconds; shares of decoding and of a speed-up
_DRAWS = 4000
_LEVEL = (2.5, 97.5)  # percentiles: a 95 % interval

Key = tuple[int, int]
"""Which run of a contender: (unit, round)."""
Interval = tuple[float, float]
Rate = Callable[[Run], float]


def decode_rate(run: Run) -> float:
    """Tokens per second of decoding; what prefill yields and takes is left out."""
    return run.decode_tokens / run.decode_seconds if run.decode_seconds > 0 else math.nan


def end_to_end_rate(run: Run) -> float:
    """All new tokens per second of everything."""
    return sum(map(len, run.tokens)) / run.seconds if run.seconds > 0 else math.nan


def full_rate(run: Run) -> float:
    """Tokens per second of decoding while no sequence of a batch had ended."""
    return run.full_tokens / run.full_seconds if run.full_seconds > 0 else math.nan


def paired_ratios(
    runs: Mapping[Key, Run], plain: Mapping[Key, Run], rate: Rate = decode_rate
) -> list[list[float]]:
    """Speed over plain speed, per unit (in order of units) and round.

    As ``unit_ratios``, without the units' numbers.
    """
    return list(unit_ratios(runs, plain, rate).values())


def unit_ratios(
    runs: Mapping[Key, Run], plain: Mapping[Key, Run], rate: Rate = decode_rate
) -> dict[int, list[float]]:
    """Speed over plain speed: unit, in order -> a ratio per round.

    Args:
        plain: of plain decoding; the same units in the same rounds, or more.

    Raises:
        RequestError: a run without a plain one of the same unit and round.
    """
    ratios: dict[int, list[float]] = {}
    for key in sorted(runs):
        if key not in plain:
            raise RequestError(
                f"unit {key[0]} has no plain run in round {key[1]}; only paired runs are compared"
            )
        ratio = rate(runs[key]) / rate(plain[key])
        if math.isfinite(ratio):
            ratios.setdefault(key[0], []).append(ratio)
    return ratios


def stalled(run: Run) -> bool:
    """Whether something else had the machine for a good part of a run's decoding."""
    return run.stalled_seconds > max(_SHORTEST, _STALLED * run.decode_seconds)


def impossible(ratio: float, emitted: float | None) -> bool:
    """Whether a speed-up is larger than the tokens per pass allow, beyond the noise of timing."""
    return emitted is not None and ratio > emitted * (1 + _NOISE)


def disturbed(run: Run, plain: Run) -> bool:
    """Whether a run cannot be compared with the plain one: it stalled, or the plain one must have.

    Runs too short to tell from noise are taken as they are.
    """
    if stalled(run):
        return True
    told = min(run.decode_seconds, plain.decode_seconds) > _SHORTEST
    return told and impossible(decode_rate(run) / decode_rate(plain), run.mean_emitted)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return float(np.mean(values)) if len(values) else None


def median(values: Sequence[float]) -> float | None:
    """Median; None of nothing."""
    return float(np.median(values)) if len(values) else None


def prompt_interval(values: Sequence[float], prompts: Sequence[int]) -> Interval | None:
    """95 % bootstrap interval of the mean over units: what other prompts of the kind may give.

    Prompts are resampled, each with all of its units: answers to one prompt are alike, so more
    of them say little about other prompts.

    Returns:
        Percentiles of the means; None for fewer than `FEWEST` prompts, which say too little about how
        prompts differ.
    """
    _, prompt_U = np.unique(np.asarray(prompts), return_inverse=True)
    count_P = np.bincount(prompt_U)
    if len(count_P) < FEWEST:
        return None
    sum_P = np.bincount(prompt_U, np.asarray(values))
    coins = np.random.default_rng(0)
    drawn = coins.choice(len(count_P), (_DRAWS, len(count_P)))
    return _percentiles(sum_P[drawn].sum(1) / count_P[drawn].sum(1))


def repeat_interval(values: Sequence[Sequence[float]]) -> Interval | None:
    """95 % interval of the same mean for these very prompts: what measuring again may give.

    The units stay. The deviations of their rounds from the units' means are pooled and resampled. They are
    first widened by sqrt(R / (R - 1)) for the R rounds that the mean was taken from. The interval shrinks
    with every round, which the interval over units does not.

    Args:
        values: per unit, one ratio per round.

    Returns:
        None where no unit was measured twice.
    """
    again = [np.asarray(rounds) for rounds in values if len(rounds) > 1]
    if not again:
        return None
    pooled = np.concatenate([(r - r.mean()) * math.sqrt(len(r) / (len(r) - 1)) for r in again])
    coins = np.random.default_rng(0)
    noise = np.zeros(_DRAWS)
    for rounds in values:
        noise += coins.choice(pooled, (_DRAWS, len(rounds))).mean(1)
    middle = float(np.mean([np.mean(rounds) for rounds in values]))
    return _percentiles(middle + noise / len(values))


def half_width(interval: Interval | None) -> float:
    """Half of an interval's length; infinite if there is none."""
    return math.inf if interval is None else (interval[1] - interval[0]) / 2


def _percentiles(values: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(values, _LEVEL)
    return float(low), float(high)


def looping_tokens(tokens: Sequence[int]) -> int:
    """How many tokens continue a period of at most 32 tokens that was repeated 3 times already.

    Token t does if, for some p <= 32, more than 2 p tokens in a row up to t equal the one p
    places before. Three rounds of p tokens hold 2 p such tokens.

    Cost: O(32 len(tokens)), vectorised.
    """
    token_N = np.asarray(tokens, dtype=np.int64)
    loops_N = np.zeros(len(token_N), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, len(token_N) - 1) + 1):
        same = token_N[period:] == token_N[:-period]
        place = np.arange(len(same))
        broken = np.maximum.accumulate(np.where(same, -1, place))  # newest place that differs
        loops_N[period:] |= place - broken > 2 * period
    return int(loops_N.sum())


def looping(texts: Iterable[Sequence[int]]) -> float:
    """Share of the tokens of some texts that loop; 0.0 of nothing."""
    loops = total = 0
    for tokens in texts:
        loops += looping_tokens(tokens)
        total += len(tokens)
    return loops / total if total else 0.0


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text is left out where loops are left out."""
    return looping((tokens,)) > LOOPS


def past_end(texts: Iterable[Sequence[int]], end_ids: Collection[int]) -> float:
    """Share of the tokens of some texts that follow an end of sequence; 0.0 of nothing."""
    past = total = 0
    for tokens in texts:
        end = next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens) - 1)
        past += len(tokens) - 1 - end
        total += len(tokens)
    return past / total if total else 0.0


def add_up(counters: Iterable[Counters]) -> Counters:
    """Sum of counters. ``new_tokens`` less one per sequence is what the passes emitted, so the
    sum keeps one too many for the whole, as a single sequence does.
    """
    new, passes, drafted, accepted = 1, 0, 0, 0
    depths: tuple[list[int], list[int]] = [], []
    for one in counters:
        new += one.new_tokens - 1
        passes += one.passes
        drafted += one.drafted
        accepted += one.accepted
        for sums, counts in zip(depths, (one.drafted_at, one.accepted_at), strict=True):
            sums.extend([0] * (len(counts) - len(sums)))
            for depth, count in enumerate(counts):
                sums[depth] += count
    return Counters(
        new_tokens=new,
        passes=passes,
        drafted=drafted,
        accepted=accepted,
        drafted_at=tuple(depths[0]),
        accepted_at=tuple(depths[1]),
    )


def drafted_share(counters: Counters) -> float:
    """Share of the passes that checked a guess; 0.0 of no pass."""
    return counters.drafted_at[0] / counters.passes if counters.drafted_at else 0.0


def acceptance_by_depth(counters: Counters) -> list[float]:
    """For depth 1, 2, ...: of the passes whose draft reached it, the share that kept a token."""
    kept = (*counters.accepted_at, *[0] * len(counters.drafted_at))
    return [k / n if n else 0.0 for n, k in zip(counters.drafted_at, kept, strict=False)]


def verb_shares(runs: Iterable[Run]) -> dict[str, float] | None:
    """Shares of decoding by VERBS, ``other`` being the rest; None if no run tells.

    A run that never decoded (one token per case) takes no part.
    """
    seconds, told = 0.0, False
    verbs = dict.fromkeys(VERBS, 0.0)
    for run in runs:
        told = told or bool(run.verb_seconds)
        seconds += run.decode_seconds
        for verb, spent in run.verb_seconds.items():
            verbs[verb] += spent
    if not told or seconds <= 0:
        return None
    shares = {verb: spent / seconds for verb, spent in verbs.items()}
    shares["other"] = 1.0 - sum(share for verb, share in shares.items() if verb != "other")
    return shares
