"""Fast verifiers against their oracles: the same coins must give the same verdicts.

Both read the same float32 distributions, but the oracle computes in float64. A coin that lies within
rounding distance (about 1e-7) of a threshold may thus decide otherwise. With the fixed seeds used
here none does; with others one in a million would.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from outpace.analysis.oracles import ORACLES
from outpace.analysis.tables import LOSSY, RIGHT, Context, NodeLaws, Sapling, World
from outpace.coins import KeyedCoins, Stream
from outpace.types import ROOT, Drawn, Law
from outpace.verifiers.base import Verifier

Edit = Callable[[Law], Law]


@dataclass(frozen=True, slots=True)
class OracleReport:
    """How often a fast verifier decided as its oracle."""

    cases: int
    agreed: int


def _dense(law: Law) -> Law:
    return Law(law.prob_S.float())


def _wide(law: Law) -> Law:
    return law


def _top(law: Law, k: int) -> Law:
    at = law.prob_S.topk(min(k, len(law.prob_S))).indices.sort(descending=True).values
    return Law((law.prob_S[at] / law.prob_S[at].sum()).float(), at)


def _few(law: Law) -> Law:
    return _top(law, 20)


def _many(law: Law) -> Law:
    return _top(law, 200)


def _greedy(law: Law) -> Law:
    return _top(law, 1)


def _reduced(law: Law) -> Law:
    """Over the first half of the ids, stored without ids."""
    half_S = law.prob_S[: (len(law.prob_S) + 1) // 2]
    return Law((half_S / half_S.sum()).float())


class Likely(World):
    """A world whose drafters know something of the target, so that drafts get accepted."""

    def _law(self, which: int, context: Context, edit: Edit) -> Law:
        if (which, context) not in self._known:
            law_V = torch.zeros(self.vocab, dtype=torch.float64)
            for part, weight in ((0, 1.0 if which == 0 else 0.7), (which, 0.3 * (which > 0))):
                rng = np.random.default_rng((self.seed, part, len(context), *context))
                law_V += weight * torch.from_numpy(rng.dirichlet(np.full(self.vocab, 0.05)) + 1e-9)
            self._known[which, context] = edit(Law(law_V / law_V.sum()))
        return self._known[which, context]


REGIMES: tuple[tuple[int, Edit, Edit, bool], ...] = (
    *product(
        (5, 300, 2000),
        (_dense, _wide, _few, _many, _greedy),
        (_dense, _few, _many, _greedy, _reduced),
        (False,),
    ),
    (300, _dense, _dense, True),
    (300, _few, _few, True),
)
"""(vocabulary, form of p, form of q, whether q equals p)."""


def _grow(s: Sapling, rng: np.random.Generator, verifier: Verifier) -> None:
    """Hang random groups below random nodes; a chain gets one draw per node."""
    kinds = sorted(verifier.takes, key=lambda drawn: drawn.value)
    chain = verifier.chains_only
    nodes = [ROOT]
    drawn_below: set[int] = set()
    for _ in range(int(rng.integers(0, 13))):
        parent = nodes[-1] if chain else nodes[int(rng.integers(len(nodes)))]
        drawn = kinds[int(rng.integers(len(kinds)))]
        if drawn is not Drawn.CHOSEN and verifier.one_law:
            drawn = Drawn.CHOSEN if parent in drawn_below else drawn
            drawn_below.add(parent)
        count = 1 if chain else int(rng.integers(1, 6))
        drafter = int(rng.integers(1, 3))
        if drawn is Drawn.CHOSEN:
            fresh = s.top(parent, count, drafter)
        else:
            fresh = s.sample(parent, drawn, count, drafter)
        nodes += [node for node in dict.fromkeys(fresh) if node not in nodes]


def check_oracle(
    seed: int = 0, cases: int = 154, names: Sequence[str] | None = None
) -> dict[str, OracleReport]:
    """Compare verdicts on random trees, in every regime of distributions.

    Args:
        names: of verifiers with an oracle; None: all of them, lossy ones too.

    Returns:
        Verifier name -> report. ``agreed == cases`` unless a verifier is wrong.

    Cost: a few milliseconds per case.
    """
    verifiers = {**RIGHT, **LOSSY}
    return {
        name: _compare(name, verifiers[name], seed, cases) for name in (verifiers if names is None else names)
    }


def _compare(name: str, verifier: Verifier, seed: int, cases: int) -> OracleReport:
    agreed = 0
    for case in range(cases):
        vocab, p_edit, q_edit, same = REGIMES[case % len(REGIMES)]
        world = Likely(seed * cases + case, vocab, p_edit, q_edit, same)
        sapling = Sapling(world, KeyedCoins(seed, case, Stream.DRAFT))
        _grow(sapling, np.random.default_rng((seed, case)), verifier)
        draft = sapling.done()
        laws, judge = NodeLaws(world, draft), KeyedCoins(seed, case, Stream.JUDGE)
        fast = verifier.judge(draft, laws, judge, want_laws=True)
        slow = ORACLES[name](draft, laws, judge, vocab)
        agreed += (fast.kept, fast.emitted) == (slow.kept, slow.emitted)
    return OracleReport(cases, agreed)
