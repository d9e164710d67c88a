"""What a cascade should gain: expected tokens and cost per pass of the target.

A step emits X tokens from a draft of k tokens, each accepted with probability a given that those
before it are. X has the generating function

    phi(x) = E[x^X] = 1 + (x - 1) (1 - (a x)^(k + 1)) / (1 - a x),      P(X > j) = a^j, j <= k

and from it follows all that can be written in closed form, with costs c in passes of the target:

    plain        E = (1 - a^(g+1)) / (1 - a)                             cost 1 + g c
    vertical     E = (1 - a phi(a)^n) / (1 - a), phi of (a', k)          cost 1 + n c1 + n k c2
    horizontal   E = 1 + sum_i prod_(j <= i) a_j                         cost 1 + sum_i c_i

A real cascade counts tokens and not steps, and acceptance changes along a draft. A pass over many rows
costs more than one over a single row. `predict` therefore computes the exact distributions of the
numbers of tokens, level by level from the bottom up. It takes measured costs and survival curves:
``S[j]`` is the probability that the first j tokens of a level's part are accepted.

Paper: Chen et al. 2023, Cascade Speculative Drafting, arXiv:2312.11462, theorems 4.2 to 4.5. The
letters alpha and c are as there; the renewal distribution of the token counts is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Counts = tuple[int, ...]
"""Tokens of a draft by level, from the strongest."""


def phi(a: float, k: int, x: float) -> float:
    """Generating function of the tokens emitted by one step that checks k guesses."""
    ratio = a * x
    powers = k + 1 if ratio == 1 else (1 - ratio ** (k + 1)) / (1 - ratio)
    return 1 + (x - 1) * powers


def emitted(a: float, g: int) -> float:
    """Tokens per pass of the target that checks g guesses."""
    return g + 1 if a == 1 else (1 - a ** (g + 1)) / (1 - a)


def plain(a: float, g: int, c: float) -> float:
    """Speed-up of a drafter that makes g guesses, each for c passes of the target."""
    return emitted(a, g) / (1 + g * c)


def vertical(a: float, inner: float, n: int, k: int, c1: float, c2: float) -> float:
    """Speed-up of n steps of a drafter that is itself drafted for.

    Args:
        a: acceptance of the drafter's tokens by the target, below 1.
        inner: acceptance of the lower drafter's tokens by the drafter.
        n: steps of the drafter per pass of the target.
        k: tokens of the lower drafter per step.
        c1: cost of a step of the drafter, in passes of the target.
        c2: of a token of the lower drafter.
    """
    tokens = (1 - a * phi(inner, k, a) ** n) / (1 - a)
    return tokens / (1 + n * c1 + n * k * c2)


def horizontal(accepted: Sequence[float], costs: Sequence[float]) -> float:
    """Speed-up of a draft whose i-th token is accepted with ``accepted[i]`` at ``costs[i]``."""
    tokens, reached = 1.0, 1.0
    for a in accepted:
        reached *= a
        tokens += reached
    return tokens / (1 + sum(costs))


def curve(a: float, length: int) -> tuple[float, ...]:
    """Survival of tokens that are accepted independently: S[j] = a^j for j = 0 to ``length``."""
    return tuple(a**j for j in range(length + 1))


def at(survival: Sequence[float], j: int) -> float:
    """S[j]; beyond what is known the last ratio goes on."""
    if j < len(survival):
        return survival[j]
    last, before = survival[-1], survival[-2] if len(survival) > 1 else 1.0
    ratio = last / before if before > 0 else 0.0
    return last * float(ratio ** (j - len(survival) + 1))


def renewal(steps: Mapping[int, float], start: int, quota: int) -> tuple[dict[int, float], float]:
    """Steps of random size are made until ``quota`` is reached.

    Args:
        steps: size -> probability; sizes from 1.

    Returns:
        Law of where they end, and the expected number of steps.
    """
    ends: dict[int, float] = defaultdict(float)
    open_, made = {start: 1.0}, 0.0
    while open_:
        place = min(open_)
        weight = open_.pop(place)
        if place >= quota:
            ends[place] += weight
            continue
        made += weight
        for size, share in steps.items():
            open_[place + size] = open_.get(place + size, 0.0) + weight * share
    return dict(ends), made


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A target and the levels below it, as numbers. Reviewer 0 is the target, r is level r."""

    survival: Mapping[tuple[int, int], Sequence[float]]
    """(reviewer, level) -> S of that level's part of a draft, S[0] = 1. A lookup's counts its
    silence as refusal."""
    models: int
    """Levels that are language models; one more is a lookup if ``lookup``."""
    lookup: bool
    seconds: Sequence[Callable[[float], float]]
    """Reviewer -> seconds of its pass by rows, host work of its step included."""
    drafted: Mapping[int, Sequence[float]]
    """Reviewer -> D[j], the share of the lookup's drafts for it with at least j tokens."""
    lookup_seconds: float = 0.0
    """Of one answer of the lookup."""

    @property
    def levels(self) -> int:
        return self.models + self.lookup


@dataclass(frozen=True, slots=True)
class Prediction:
    speedup: float
    """Over plain decoding."""
    emitted: float
    """Tokens per pass of the target."""
    seconds: float
    """Per pass of the target, all drafting included."""
    steps: tuple[float, ...]
    """Passes of each model per pass of the target, those of levels inside of levels not counted."""


def predict(ladder: Ladder, k: Sequence[Sequence[int]]) -> Prediction:
    """Expected speed-up of a cascade, by exact distributions of its token counts.

    Args:
        k: as `outpace.methods.cascade.drafter` has it, in tokens.
    """
    laws: dict[int, dict[int, float]] = {}
    costs: dict[int, float] = {}
    made: tuple[float, ...] = ()
    for reviewer in range(ladder.models, -1, -1):
        row = k[reviewer] if reviewer < len(k) else ()
        drafts, spent, made = _drafts(ladder, reviewer, row, laws, costs)
        law: dict[int, float] = defaultdict(float)
        rows = 1.0
        for counts, weight in drafts.items():
            reach = _reached(ladder, reviewer, counts)
            for j, (now, then) in enumerate(zip(reach, (*reach[1:], 0.0), strict=True)):
                law[j + 1] += weight * (now - then)
            rows += weight * sum(counts[: ladder.models - reviewer])
            if ladder.lookup:
                shown = ladder.drafted.get(reviewer, (1.0,))
                rows += weight * sum(at(shown, j) for j in range(1, counts[-1] + 1))
        laws[reviewer] = dict(law)
        costs[reviewer] = ladder.seconds[reviewer](rows) + spent
    mean = sum(size * share for size, share in laws[0].items())
    alone = ladder.seconds[0](1.0)
    return Prediction(mean * alone / costs[0], mean, costs[0], made[: ladder.models])


def _drafts(
    ladder: Ladder,
    reviewer: int,
    row: Sequence[int],
    laws: Mapping[int, Mapping[int, float]],
    costs: Mapping[int, float],
) -> tuple[dict[Counts, float], float, tuple[float, ...]]:
    """Law of a draft's make-up, its cost in seconds, and the steps that each level makes."""
    drafts: dict[Counts, float] = {(): 1.0}
    spent, total, made = 0.0, 0, []
    below = range(reviewer + 1, ladder.levels + 1)
    for level in below:
        quota = row[level - reviewer - 1] if level - reviewer - 1 < len(row) else 0
        total += quota
        longer: dict[Counts, float] = defaultdict(float)
        steps = 0.0
        for counts, weight in drafts.items():
            have = sum(counts)
            if quota == 0 or have >= total:
                then = (*counts, 0)
                longer[then] += weight
            elif level > ladder.models:
                then = (*counts, total - have)
                longer[then] += weight
                spent += weight * ladder.lookup_seconds
            else:
                ends, calls = renewal(laws[level], have, total)
                for end, share in ends.items():
                    then = (*counts, end - have)
                    longer[then] += weight * share
                steps += weight * calls
        if level <= ladder.models:
            spent += steps * costs[level]
            made.append(steps)
        drafts = dict(longer)
    return drafts, spent, tuple(made)


def _reached(ladder: Ladder, reviewer: int, counts: Counts) -> list[float]:
    """Probability that the first j tokens of a draft are accepted, j from 0."""
    reach = [1.0]
    for offset, length in enumerate(counts):
        survival = ladder.survival.get((reviewer, reviewer + 1 + offset), (1.0, 0.0))
        base = reach[-1]
        reach += [base * at(survival, j) for j in range(1, length + 1)]
    return reach


MODEL_TOKENS = (0, 1, 2, 3, 4, 5, 6, 8)
LOOKUP_TOKENS = (0, 2, 4, 6, 10, 16)
"""Entries of K that are tried."""


def best_k(
    ladder: Ladder, allowed: Callable[[int, int], bool] = lambda reviewer, level: True
) -> tuple[list[list[int]], Prediction]:
    """The K that promises most, of those whose draft begins with the first level.

    Args:
        allowed: (reviewer, level) -> whether that entry may be above 0.

    Cost: rows are improved one by one, each over all its values with the others fixed, until
    nothing changes; some hundred predictions for two levels.
    """
    k = [[0] * (ladder.levels - row) for row in range(ladder.models + 1)]
    k[0][0] = 1
    best = predict(ladder, k)
    changed = True
    while changed:
        changed = False
        for row in range(len(k)):
            tried = [
                (MODEL_TOKENS if level <= ladder.models else LOOKUP_TOKENS) if allowed(row, level) else (0,)
                for level in range(row + 1, ladder.levels + 1)
            ]
            for values in product(*tried):
                if row == 0 and not values[0]:
                    continue  # what follows the first level was only seen behind it
                new = [*k[:row], list(values), *k[row + 1 :]]
                found = predict(ladder, new)
                if found.speedup > best.speedup * (1 + 1e-9):
                    k, best, changed = new, found, True
    return k, best


def best_alone(ladder: Ladder, level: int) -> tuple[list[list[int]], Prediction]:
    """The K that promises most where one level drafts and the others do not.

    Args:
        level: from 1.
    """
    sizes = MODEL_TOKENS if level <= ladder.models else LOOKUP_TOKENS
    tried = [[[0] * (level - 1) + [size]] for size in sizes if size]
    return max(((k, predict(ladder, k)) for k in tried), key=lambda one: one[1].speedup)


@dataclass(frozen=True, slots=True)
class Closed:
    """One arrangement of levels, in closed form."""

    kind: str
    k: str
    """As in a cascade's spec, counted in steps."""
    emitted: float
    speedup: float


def closed(alpha: Sequence[float], cost: Sequence[float], most: int = 30) -> list[Closed]:
    """The best of every arrangement of one or two levels, without a model.

    Args:
        alpha: acceptance of each level's tokens by whoever reviews them, below 1; strongest first.
        cost: of a pass of each level, or of a token of a lookup, in passes of the target.
        most: longest part of a draft that is tried.

    Raises:
        ValueError: not one or two levels, or numbers out of range.
    """
    if len(alpha) != len(cost) or not 1 <= len(alpha) <= 2:
        raise ValueError(f"need one or two levels, a cost each, got {len(alpha)} and {len(cost)}")
    if not all(0 <= a < 1 for a in alpha) or not all(c >= 0 for c in cost):
        raise ValueError("acceptance must be from 0 to below 1, and costs from 0")
    found = []
    for level, (a, c) in enumerate(zip(alpha, cost, strict=True), 1):
        g = max(range(1, most + 1), key=lambda g: plain(a, g, c))
        found.append(
            Closed(f"level {level} alone", "0," * (level - 1) + str(g), emitted(a, g), plain(a, g, c))
        )
    if len(alpha) == 2:
        (a, b), (c1, c2) = alpha, cost
        sizes = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1)]
        n, g = max(sizes, key=lambda one: vertical(a, b, one[0], one[1], c1, c2))
        tokens = (1 - a * phi(b, g, a) ** n) / (1 - a)
        found.append(Closed("vertical", f"{n}/{g}", tokens, vertical(a, b, n, g, c1, c2)))

        def chain(one: tuple[int, int]) -> float:
            return horizontal([a] * one[0] + [b] * one[1], [c1] * one[0] + [c2] * one[1])

        g1, g2 = max(sizes, key=chain)
        spent = 1 + g1 * c1 + g2 * c2
        found.append(Closed("horizontal", f"{g1},{g2}", chain((g1, g2)) * spent, chain((g1, g2))))
    return found


def break_even(alpha: Sequence[float], cost: Sequence[float]) -> float:
    """Largest cost of the first of two levels with which it joins the best arrangement; 0: never."""
    low, high = 0.0, 1.0

    def pays(first: float) -> bool:
        rows = closed(alpha, (first, cost[1]))
        best = max(row.speedup for row in rows)
        return best > rows[1].speedup * (1 + 1e-9)

    if pays(high):
        return high
    for _ in range(20 if pays(1e-9) else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
