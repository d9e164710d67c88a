"""The state machine of `ppd`: which tree, and how many riders below each of its nodes.

A step that begins with d guesses is in state d. It drafts a tree of at most d levels and hangs
riders below the pending token and below guesses. The riders of the node at which verification ends
are the guesses of the next step:

    state 2     pending - a - b      rows    pending, a, b, c and seven riders
       riders      3      2   2      ends    at the pending token  -> state 3
                        - c          ends    at a                  -> state 2
                          0          ends    at c                  -> state 0: riders alone

Every row costs time. What a choice is worth in the long run is a matter of three numbers. They are
tokens that the step emits, seconds that its pass takes, and ``value`` of the state that it leaves.
Where ``rate`` is tokens per second in the long run,

    best over trees and riders of    emitted - rate * seconds(rows) + mean of value[next state]

Choices and values are improved in turns until they agree (Howard's policy iteration). The authors
search all sizes of trees for one number of rows and take the number that pays best. Here, each
state has the number of rows that pays for it.

Paper: Chen et al. 2024 (PPD), arXiv:2405.18628.

Shape letters: N nodes of a tree, K guesses (riders of a chain), B ranks, S states (K + 1),
R numbers of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from outpace.drafters.static_tree import likeliest
from outpace.models.base import Target
from outpace.models.measured import dtype_name
from outpace.types import CostCurve, Feed

MOST_ROWS = 64
"""Most rows of a pass that are considered."""
_ENDS = 0.01
"""Share of steps after which a text ends; the next one begins without guesses."""
_ROUNDS = 20
_TIMED = (1, 2, 4, 8, 16, 32, MOST_ROWS)
_CONTEXT, _REPEAT, _SECONDS = 128, 9, 1.0

Rates = tuple[tuple[float, ...], ...]
"""By depth and rank, how often that guess is the target's token, where all before it were."""


def reaches(parent_N: Sequence[int], rate_KB: Rates) -> list[float]:
    """The chance that verification reaches the pending token, and each node; N + 1 numbers."""
    reach, depth, born = [1.0], [0], dict.fromkeys(range(-1, len(parent_N)), 0)
    for parent in parent_N:
        level, rank = depth[parent + 1], born[parent]
        born[parent] += 1
        known = level < len(rate_KB) and rank < len(rate_KB[level])
        reach.append(reach[parent + 1] * (rate_KB[level][rank] if known else 0.0))
        depth.append(level + 1)
    return reach


def ends(parent_N: Sequence[int], reach: Sequence[float]) -> list[float]:
    """The chance that verification ends at the pending token, and at each node."""
    out = list(reach)
    for parent, one in zip(parent_N, reach[1:], strict=True):
        out[parent + 1] -= one
    return [max(0.0, one) for one in out]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMachine:
    """What to draft in every state, and where to hang riders. ``solve`` makes one."""

    rate_KB: Rates
    chains: int
    """Rows that a rider takes: E of an ensemble."""
    seconds_R: tuple[float, ...]
    """Of a pass over 1, 2, ... rows; there are no larger ones."""
    rate: float
    """Tokens per second in the long run, in the unit of ``seconds_R``."""
    value_S: tuple[float, ...]
    """Tokens that beginning a step with so many guesses is worth, beside beginning with none."""
    tree_S: tuple[tuple[int, ...], ...] = ()
    """State -> parents of its tree, likeliest nodes first."""

    def riders(self, parent_N: tuple[int, ...], most: int = 1 << 30) -> tuple[int, ...]:
        """Riders below the pending token, and below each node of any tree, N + 1 numbers.

        Args:
            most: riders in all, each counted once however many rows it takes.
        """
        room = (len(self.seconds_R) - len(parent_N) - 1) // self.chains
        if len(parent_N) > max(map(len, self.tree_S), default=0):
            room = max(room, len(self.rate_KB))  # a tree that the user wants larger
        return self.allot(parent_N, min(most, room))[1]

    def allot(self, parent_N: Sequence[int], most: int) -> tuple[float, tuple[int, ...]]:
        """``riders``, and what the step is worth with them, its own tokens included."""
        reach = reaches(parent_N, self.rate_KB)
        end = ends(parent_N, reach)
        gain_K = [b - a for a, b in zip(self.value_S, self.value_S[1:], strict=False)]
        # A rider comes after those before it in its chain, so it is taken for no more than they.
        order = sorted(
            (-one * worth, k, place)
            for k, worth in enumerate(accumulate(gain_K, min))
            for place, one in enumerate(end)
        )
        rows, worth = len(parent_N) + 1, sum(reach)
        best, count = worth - self.rate * self._seconds(rows), 0
        for number, (_, k, place) in enumerate(order[: max(0, most)], start=1):
            worth += end[place] * gain_K[k]
            rows += self.chains
            value = worth - self.rate * self._seconds(rows)
            if value > best:
                best, count = value, number
        out = [0] * (len(parent_N) + 1)
        for _, _, place in order[:count]:
            out[place] += 1
        return best, tuple(out)

    def _seconds(self, rows: int) -> float:
        return self.seconds_R[min(rows, len(self.seconds_R)) - 1]


def solve(
    rate_KB: Rates, seconds_R: Sequence[float], *, chains: int = 1, most_nodes: int = MOST_ROWS
) -> StateMachine:
    """The trees and riders that emit most tokens per second.

    Args:
        rate_KB: K is the most riders of a chain; ranks come in falling order.
        seconds_R: of a pass over 1, 2, ... rows, in any unit; its length is the most rows. Where
            all cost the same, the most tokens per pass are wanted.

    Cost: some 50 ms for 3 riders and 64 rows.
    """
    states = range(len(rate_KB) + 1)
    most_rows = len(seconds_R)
    room = min(most_nodes, most_rows - 1)
    whole = [likeliest(rate_KB[:state], room) for state in states]
    reached = accumulate(accumulate((row[0] for row in rate_KB), lambda a, b: a * b), initial=0.0)
    machine = StateMachine(
        rate_KB=rate_KB,
        chains=chains,
        seconds_R=tuple(seconds_R),
        rate=1.0 / seconds_R[0],
        value_S=tuple(reached),
    )
    chosen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for _ in range(_ROUNDS):
        before, chosen = chosen, []
        for state in states:
            trees = (whole[state][:size] for size in range(len(whole[state]) + 1))
            made = [(t, *machine.allot(t, (most_rows - len(t) - 1) // chains)) for t in trees]
            tree, _, riders = max(made, key=lambda one: one[1])
            chosen.append((tree, riders))
        if chosen == before:
            break
        rate, value_S = evaluate(chosen, rate_KB, seconds_R, chains)
        machine = StateMachine(
            rate_KB=rate_KB,
            chains=chains,
            seconds_R=tuple(seconds_R),
            rate=rate,
            value_S=value_S,
            tree_S=tuple(tree for tree, _ in chosen),
        )
    return machine


def evaluate(
    chosen: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    rate_KB: Rates,
    seconds_R: Sequence[float],
    chains: int,
) -> tuple[float, tuple[float, ...]]:
    """Tokens per second of a choice of (tree, riders) for every state, and values of states."""
    size = len(chosen)
    # value[s] = emitted - rate * seconds + sum next[s, t] value[t], with value[0] = 0: the rate
    # takes the place of that unknown.
    known, right = np.zeros((size, size)), np.zeros(size)
    for state, (tree, riders) in enumerate(chosen):
        reach = reaches(tree, rate_KB)
        rows = 1 + len(tree) + chains * sum(riders)
        follow = np.zeros(size)
        for one, count in zip(ends(tree, reach), riders, strict=True):
            follow[count] += (1 - _ENDS) * one
        known[state] = -follow
        known[state, state] += 1.0
        known[state, 0] = seconds_R[rows - 1]
        right[state] = sum(reach)
    rate, *values = np.linalg.solve(known, right).tolist()
    return rate, (0.0, *values)


def pass_seconds(target: Target, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of passes over 1, 2, ... rows of one sequence, from a few that are timed here.

    Args:
        clock: seconds.

    Cost: about a second, or two rounds of seven passes where these take longer.
    """
    length = min(_CONTEXT, target.max_positions - MOST_ROWS - 1)
    cache = target.new_cache(_CONTEXT + MOST_ROWS)
    slot = cache.open()
    tokens = tuple((37 * i + 11) % target.vocab_size for i in range(_CONTEXT))
    if length > 0:
        target.score([Feed.chain(slot, tokens[:length], want=())], cache)
        cache.keep(slot, range(length))

    def timed(rows: int) -> float:
        began = clock()
        scored = target.score([Feed.chain(slot, tokens[:rows])], cache)
        float(scored.logits_TV[0, 0])  # waits for a device that works on its own
        cache.drop(slot)
        return clock() - began

    begun = clock()
    rounds: list[list[float]] = []
    while len(rounds) < 2 or (len(rounds) < _REPEAT and clock() - begun < _SECONDS):
        rounds.append([timed(rows) for rows in _TIMED])
    # The least of each: whatever else the machine does only adds to it.
    found = [min(each) for each in zip(*rounds[1:], strict=True)]
    curve = CostCurve(
        model=target.name,
        dtype=dtype_name(target.dtype),
        threads=torch.get_num_threads(),
        device=str(target.device),
        rows_R=_TIMED,
        context_C=(max(0, length),),
        seconds_CR=(tuple(accumulate(found, max)),),
    )
    return [curve.seconds(rows, max(0, length)) for rows in range(1, MOST_ROWS + 1)]
