"""How often each verifier keeps a draft at one position, beside the most that any could.

For drafts that are verified on their own level the chance is a function of p, q and the number of
draws. It is exact here, but for three and more draws without replacement, where what is left of
q depends on what was drawn. There it is the mean over sampled paths of refusals, each weighed
exactly.

``measure`` takes p and q from a model and a drafter, at every position of texts that the model
generates plainly. There p is the target's distribution, and q the one that the drafter would have drawn from.

Shape letters: V vocabulary, S support of q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.analysis.bound import Floats, as_floats, bounds, greedy_plus_one, ranking
from outpace.coins import Coins, KeyedCoins, Stream
from outpace.config import MethodSpec
from outpace.engine.engine import Engine
from outpace.errors import RequestError, UnknownNameError
from outpace.params import NEUTRAL, SamplingParams
from outpace.types import ROOT, Draft, Drawn, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.k_seq import discount
from outpace.verifiers.typical import Typical, TypicalConfig

Curve = Callable[[Floats, Floats, int, "Coins | None", int], list[float]]
"""(p, q, most, coins, paths) -> acceptance for 1, 2, ... drafts; no entry beyond what it takes."""


def acceptance(
    p_V: Tensor, q_V: Tensor, k: int, rule: str, *, coins: Coins | None = None, paths: int = 16
) -> float:
    """The probability that one of k drafts of a position is kept.

    Args:
        q_V: draft distribution, dense, over the same ids.
        k: drafts, drawn as the verifier asks for them (see RULES).
        coins: needed by ``tree`` and ``traversal`` from three draws on.

    Raises:
        UnknownNameError: a verifier without a curve.
        ValueError: more drafts than the verifier takes at a position, or coins missing.
    """
    curve = acceptances(p_V, q_V, k, rule, coins=coins, paths=paths)
    if len(curve) < k:
        takes = "1 draft" if len(curve) == 1 else f"{len(curve)} drafts"
        raise ValueError(f"{rule} takes {takes} per position, got k={k}")
    return curve[-1]


def acceptances(
    p_V: Tensor, q_V: Tensor, most: int, rule: str, *, coins: Coins | None = None, paths: int = 16
) -> list[float]:
    """``acceptance`` for 1, 2, ... ``most`` drafts; no entry beyond what a verifier takes."""
    if rule not in RULES:
        raise UnknownNameError("verifier with a known acceptance", rule, RULES)
    if most < 1:
        raise ValueError(f"acceptance is of at least 1 draft, got {most}")
    return RULES[rule][1](as_floats(p_V), as_floats(q_V), most, coins, paths)


def _chosen(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    """The target's token is among q's best."""
    mass = np.cumsum(p[ranking(q, most)])
    return [float(mass[min(k, len(mass)) - 1]) for k in range(1, most + 1)]


def _typical(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    """One of q's best is plausible: certain or impossible."""
    least = Typical(TypicalConfig()).threshold(Law(torch.from_numpy(p)))
    plausible = np.maximum.accumulate(p[ranking(q, most)] > least)
    return [float(plausible[min(k, len(plausible)) - 1]) for k in range(1, most + 1)]


def _single(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    return [float(np.minimum(p, q).sum())]


def _coupled(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    """Both races are won by x with probability 1 / sum over y of max(p_y / p_x, q_y / q_x)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / q, np.inf)
    order = np.argsort(ratio)
    p, q = p[order], q[order]
    more_p = np.cumsum(p[::-1])[::-1]
    less_q = np.concatenate(([0.0], np.cumsum(q)[:-1]))
    both = (p > 0) & (q > 0)
    return [float((1 / (more_p[both] / p[both] + less_q[both] / q[both])).sum())]


def _k_seq(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    p_V, q_V = torch.from_numpy(p), torch.from_numpy(q)
    return [1 - (1 - discount(p_V, q_V, k)[1]) ** k for k in range(1, most + 1)]


def _replaced(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    """Recursive rejection with replacement: the residuals do not depend on the draws."""
    out, refused = [], 1.0
    for _ in range(most):
        left = np.maximum(p - q, 0)
        mass = float(left.sum())
        refused *= mass
        out.append(1 - refused)
        if mass > 0:
            p = left / mass
    return out


def _greedy(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    return [greedy_plus_one(p, q, k) for k in range(1, most + 1)]


def _hub(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    """Two drafts at most; their pair is `greedy_plus_one`'s but for the order."""
    return [greedy_plus_one(p, q, k) for k in range(1, min(most, 2) + 1)]


def _distinct(p: Floats, q: Floats, most: int, coins: Coins | None, paths: int) -> list[float]:
    left, gone = np.maximum(p - q, 0), np.maximum(q - p, 0)
    mass = float(left.sum())
    out = [1 - mass]
    if mass == 0 or most == 1:
        return out + [1.0] * (most - 1)
    rest = left / mass
    out.append(1 - float(gone @ (1 - _second(rest, q))))
    if most > 2:
        if coins is None:
            raise ValueError("three and more draws without replacement are sampled; give coins")
        refused = np.mean([_path(rest, gone, q, most, coins, i) for i in range(paths)], axis=0)
        out += [1 - mass * float(r) for r in refused]
    return out


def _second(rest: Floats, q: Floats) -> Floats:
    """For every first token: the chance that the second is kept, given that the first was not.

    It is the sum over y of min(rest(y), c q(y)) at c = 1 / (1 - q(x)); a refused x has no rest.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, rest / q, np.inf)
        scale = 1 / (1 - q)
    order = np.argsort(ratio)
    below = np.concatenate(([0.0], np.cumsum(rest[order])))
    above = np.concatenate((np.cumsum(q[order][::-1])[::-1], [0.0]))
    at = np.searchsorted(ratio[order], scale, side="left")
    share: Floats = below[at] + np.where(above[at] > 0, scale, 0) * above[at]
    return np.minimum(share, 1.0)


def _path(rest: Floats, gone: Floats, q: Floats, most: int, coins: Coins, number: int) -> list[float]:
    """Follow one sequence of refused tokens after the first refusal.

    Args:
        rest: what the first refusal left of p.
        gone: weights of the token refused first.

    Returns:
        For 3, 4, ... draws, the chance that all after the first are refused.
    """
    out: list[float] = []
    refused = 1.0
    left = q
    for draw in range(1, most):
        x = coins.choose(Law(torch.from_numpy(gone / gone.sum())), number, draw)
        left = left.copy()
        left[x] = 0
        if left.sum() > 0:  # otherwise q has no more to draw, and nothing else is kept
            now = left / left.sum()
            kept = np.minimum(rest, now)
            gone, rest = now - kept, rest - kept
            mass = float(rest.sum())
            refused *= mass
            rest = rest / mass if mass > 0 else rest
        if draw > 1:
            out.append(refused)
        if refused == 0 or gone.sum() == 0 or left.sum() == 0:
            return out + [refused] * (most - 2 - len(out))
    return out


RULES: Mapping[str, tuple[Drawn, Curve]] = MappingProxyType(
    {
        "match": (Drawn.CHOSEN, _chosen),
        "typical": (Drawn.CHOSEN, _typical),
        "chain": (Drawn.IID, _single),
        "block": (Drawn.IID, _single),
        "tree[replacement=true]": (Drawn.IID, _replaced),
        "k_seq": (Drawn.IID, _k_seq),
        "tree": (Drawn.DISTINCT, _distinct),
        "traversal": (Drawn.DISTINCT, _distinct),
        "greedy_plus_one": (Drawn.GREEDY_PLUS_ONE, _greedy),
        "spechub": (Drawn.HUB, _hub),
        "coupled": (Drawn.COUPLED, _coupled),
    }
)
"""Verifier -> how its drafts are drawn, and its curve. `typical` is lossy, so no bound holds it."""


def rules_of(drawn: Drawn) -> Sequence[str]:
    """Verifiers of one kind of drafts, in table order."""
    return [name for name, (kind, _) in RULES.items() if kind is drawn]


# On a model -----------------------------------------------------------------------------------

BOUNDED = (Drawn.CHOSEN, Drawn.IID, Drawn.DISTINCT, Drawn.GREEDY_PLUS_ONE, Drawn.HUB)
MOST = 8
"""Drafts per position up to which curves are drawn."""
_PATHS = 4
"""Per position; the mean over positions needs no more."""


@dataclass(slots=True)
class Acceptance:
    """Means over positions, for 1, 2, ... MOST drafts."""

    model: str
    drafter: str
    """Normalised method spec."""
    temperature: float
    positions: int = 0
    bounds: dict[Drawn, list[float]] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Verifier -> acceptance; no entry beyond the drafts that it takes per position."""

    def add(self, p_V: Tensor, q_V: Tensor, coins: Coins) -> None:
        self.positions += 1
        for drawn in BOUNDED:
            self._mean(self.bounds.setdefault(drawn, []), bounds(p_V, q_V, MOST, drawn))
        for rule in RULES:
            curve = acceptances(p_V, q_V, MOST, rule, coins=coins, paths=_PATHS)
            self._mean(self.curves.setdefault(rule, []), curve)

    def _mean(self, so_far: list[float], more: list[float]) -> None:
        """Change a list of means by one position's values."""
        if not so_far:
            so_far += [0.0] * len(more)
        for i, value in enumerate(more):
            so_far[i] += (value - so_far[i]) / self.positions

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "drafter": self.drafter,
            "temperature": self.temperature,
            "positions": self.positions,
            "drafts": {
                drawn.value: {
                    "bound": self.bounds.get(drawn),
                    "verifiers": {rule: self.curves[rule] for rule in rules_of(drawn)},
                }
                for drawn in (*BOUNDED, Drawn.COUPLED)
            },
        }


class Watcher(Verifier):
    """Reads the distributions at the pending token, and keeps nothing: the text is the plain one."""

    name = "watcher"
    takes = frozenset(Drawn)
    draws = Drawn.IID

    def __init__(self, seen: Callable[[Law, Law], None]) -> None:
        self._seen = seen

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        p = laws.law(ROOT)
        for group in draft.groups_of.get(ROOT, ()):
            if group.law is not None:
                self._seen(p, draft.laws[group.law])
                break
        return Verdict((), (coins.choose(p, ROOT, -1),), (p,) if want_laws else None)


def measure(
    engine: Engine,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    tick: Callable[[str, int], None] = lambda part, prompts: None,
) -> Acceptance:
    """Generate text and compare, at every position, what each verifier would have kept.

    Args:
        drafter: method spec; ``tree``, ``tree_size``, ``verifier`` and ``policy`` do not matter.
        max_new_tokens: per prompt; all but the first and the last are positions.
        temperature: of p and q, above 0. Nothing is truncated or penalized.
        tick: told the drafter and how many prompts were finished since the last call.

    Raises:
        RequestError: temperature 0, or a drafter that does not say what it draws from.

    Cost: per position a pass of both models, and about 60 ms at 49152 tokens.
    """
    if not temperature > 0:
        raise RequestError(
            f"at temperature {temperature:g} every distribution is one-hot and all verifiers agree; "
            "give a temperature above 0"
        )
    own, _ = MethodSpec.parse(drafter).split()
    spec = MethodSpec(MethodSpec.parse(drafter).name, tuple(sorted(own.items())))
    single = MethodSpec(spec.name, tuple(sorted([*spec.options, ("tree_size", "1")])))
    size = engine.target.vocab_size
    report = Acceptance(engine.target.name, str(spec), temperature)

    def seen(p: Law, q: Law) -> None:
        coins = KeyedCoins(0, report.positions, Stream.POLICY)
        report.add(p.dense(size), q.dense(size), coins)

    method = engine.method(str(single))
    usual, method.verifier = method.verifier, Watcher(seen)
    try:
        for seed, prompt in enumerate(prompts):
            tick(str(spec), 0)
            params = SamplingParams(
                **NEUTRAL | {"temperature": temperature}, max_new_tokens=max_new_tokens, seed=seed
            )
            engine.generate(list(prompt), params, drafter=str(single), reproducible=False)
            if report.positions == 0 and max_new_tokens > 2:
                raise RequestError(
                    f"drafter {spec} says of no guess what it was drawn from; name one that "
                    "samples, such as draft_model[model=...]"
                )
            tick(str(spec), 1)
    finally:
        method.verifier = usual
    return report
