"""Find sub-layers to leave out: by Bayesian optimisation, or by how little they change.

    search    a Gaussian process over sets predicts how often the rest agrees with the target; the set
              that may promise most is tried next
    cosine    sub-layers that turn the residual stream least go first; no trials

Every set leaves out the same share of the weights of the layers, or a little more. So all cost the
same, and the one that agrees most is the best.

Papers: Draft & Verify, arXiv:2309.08168, and SWIFT, arXiv:2410.06916 (a Gaussian process with upper
confidence bounds; there of measured time, or of a fixed number left out). Draft on the Fly,
arXiv:2410.01028 (cosines; there attentions alone).

Shape letters: S sets tried, C candidates, N sub-layers that may go.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outpace.methods.layer_skip.skip_sets import Found, SkipSet, Trial, choices, union

_SCALE, _NOISE, _BOLD = 0.3, 0.05, 1.0
"""Of the process: how far agreements differ, and how far a measured one is off (about 60 tokens).
Then how many standard deviations above its mean a set is believed to be good."""
_REACH = 12.0
"""Sub-layers in which two sets must differ to tell little about each other."""
_NEAR = 48
"""Candidates near the best set, per trial."""


class Process:
    """A Gaussian process over sets, with a linear part.

    k(x, y) = scale^2 (x.y / N + exp(-|x - y|_1 / reach)) / 2. Every sub-layer has a worth of its own,
    and sets that are nearly the same are worth nearly the same.
    """

    def __init__(self, x_SN: Tensor, y_S: Tensor) -> None:
        self._x_SN, self._mean = x_SN, y_S.mean()
        noise_SS = torch.eye(len(x_SN), dtype=torch.float64) * _NOISE**2
        self._root_SS = torch.linalg.cholesky(self._kernel(x_SN, x_SN) + noise_SS)
        self._weight_S1 = torch.cholesky_solve((y_S - self._mean)[:, None], self._root_SS)

    @staticmethod
    def _kernel(x_SN: Tensor, y_CN: Tensor) -> Tensor:
        apart_SC = torch.cdist(x_SN, y_CN, p=1.0)
        linear_SC = x_SN @ y_CN.T / x_SN.shape[1]
        return _SCALE**2 * (linear_SC + (-apart_SC / _REACH).exp()) / 2

    def predict(self, x_CN: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each candidate, float64 [C]."""
        kernel_SC = self._kernel(self._x_SN, x_CN)
        mean_C = self._mean + (kernel_SC.T @ self._weight_S1)[:, 0]
        own_C = _SCALE**2 * (x_CN.sum(1) / x_CN.shape[1] + 1) / 2
        known_SC = torch.linalg.solve_triangular(self._root_SS, kernel_SC, upper=False)
        return mean_C, (own_C - known_SC.square().sum(0)).clamp_min(0).sqrt()


class Search:
    """Picks sets to try.

    Args:
        trial: judges sets.
        share: of the weights of all layers, to leave out.
    """

    def __init__(self, trial: Trial, share: float) -> None:
        self.trial = trial
        self.parts = choices(trial.target.num_layers)
        self._saved = [1 - trial.cost(part) for part in self.parts]
        body = sum(self._saved) * trial.target.num_layers / max(1, trial.target.num_layers - 2)
        self._least = min(share * body, sum(self._saved)) - 1e-9
        turned = [max(1e-6, 1 - trial.likeness(part)) for part in self.parts]
        self._order = sorted(range(len(self.parts)), key=lambda i: turned[i] / self._saved[i])
        self._coins = random.Random(0)

    def set_of(self, chosen: Sequence[int]) -> SkipSet:
        return union(self.parts[i] for i in chosen)

    def cosine(self) -> Found:
        """Those that turn the stream least for what they save. Cost: one pass, to say how good it is."""
        return self._found({(one := self._filled([], self._order)): self._score(one)})

    def bayes(self, trials: int) -> Found:
        """Try sets, one pass each; the same text gives the same set."""
        first = self._filled([], self._order)
        tried = {first: self._score(first)}
        while len(tried) < trials and (one := self._next(tried)) is not None:
            tried[one] = self._score(one)
        return self._found(tried)

    def _score(self, chosen: tuple[int, ...]) -> float:
        return self.trial.agreement(self.set_of(chosen))

    def _found(self, tried: dict[tuple[int, ...], float]) -> Found:
        best = max(tried, key=tried.__getitem__)
        skip = self.set_of(best)
        return Found(skip, tried[best], self.trial.cost(skip), len(tried))

    def _filled(self, chosen: Iterable[int], more: Iterable[int]) -> tuple[int, ...]:
        """A set with the first of some others, as many as make up the share."""
        kept, saved = list(chosen), sum(self._saved[i] for i in chosen)
        for i in more:
            if saved >= self._least:
                break
            if i not in kept:
                kept.append(i)
                saved += self._saved[i]
        return tuple(sorted(kept))

    def _next(self, tried: dict[tuple[int, ...], float]) -> tuple[int, ...] | None:
        """The candidate that is best if the process is as wrong as it may be; None: none is left."""
        best = max(tried, key=tried.__getitem__)
        near = sorted({self._changed(best) for _ in range(_NEAR)} - tried.keys())
        if not near:
            return None
        x_SN = torch.stack([self._row(one) for one in tried])
        process = Process(x_SN, torch.tensor(list(tried.values()), dtype=torch.float64))
        mean_C, spread_C = process.predict(torch.stack([self._row(one) for one in near]))
        return near[int((mean_C + _BOLD * spread_C).argmax())]

    def _changed(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """A set that keeps most of another one, and makes up the share by others, drawn by chance."""
        gone = set(self._coins.sample(chosen, min(self._coins.randint(1, 4), len(chosen))))
        others = [i for i in range(len(self.parts)) if i not in chosen]
        return self._filled([i for i in chosen if i not in gone], self._coins.sample(others, len(others)))

    def _row(self, chosen: Sequence[int]) -> Tensor:
        x_N = torch.zeros(len(self.parts), dtype=torch.float64)
        x_N[list(chosen)] = 1.0
        return x_N
