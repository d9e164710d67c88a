"""By what to divide a drafter's logits, level by level, so that its probabilities are those of being kept.

At temperature 0 a guess is kept or not. A drafter that learned the target's distributions speaks of
temperature 1, and along a chain it is mostly too sure or too modest. Of every depth, from the first on,
those held-out rows count whose guesses before were right, as in use. The temperature taken is the one with
the least Brier score of the likeliest tokens; a token outside the draft vocabulary is none of them.

Source: sequential temperature scaling, DSpark, arXiv:2607.05147; there by the calibration error.

Shape letters: R rows, K likeliest tokens, G temperatures tried, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.train.losses import chunks
from outpace.train.objective import Tally

TRIED = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
LIKELIEST = 4
"""Tokens of a row whose probabilities are compared: a tree seldom has more children of a node."""
LEAST = 40
"""Rows without which a depth has the temperature of the one before."""
MOST = 256
"""Rows of a batch and depth that are read: each costs a row of the head and a few sweeps over it."""


class Tempering(Tally):
    """Brier scores by depth and temperature, since the weights last changed."""

    def __init__(self) -> None:
        self._score_G: list[Tensor] = []
        self._rows: list[int] = []

    def clear(self) -> None:
        self._score_G, self._rows = [], []

    @torch.no_grad()
    def add(self, depth: int, hidden_RH: Tensor, head_DH: Tensor, label_R: Tensor) -> None:
        """Take in rows of a depth, from 0.

        Args:
            label_R: draft ids of the target's likeliest tokens, -1 outside the draft vocabulary.
        """
        while len(self._rows) <= depth:
            self._score_G.append(torch.zeros(len(TRIED), dtype=torch.float64))
            self._rows.append(0)
        hidden_RH, label_R = hidden_RH[:MOST], label_R[:MOST]
        for some in chunks(hidden_RH):
            z_RD = (hidden_RH[some].to(head_DH.dtype) @ head_DH.T).float()
            best = z_RD.topk(min(LIKELIEST, z_RD.shape[1]))
            right_RK = best.indices == label_R[some, None]
            for g, temper in enumerate(TRIED):
                whole_R1 = (z_RD / temper).logsumexp(-1, keepdim=True)
                apart_RK = (best.values / temper - whole_R1).exp() - right_RK.float()
                self._score_G[depth][g] += float(apart_RK.square().sum())
        self._rows[depth] += len(hidden_RH)

    def gather(self, sum: Callable[[Tensor], Tensor]) -> None:
        score = torch.cat([torch.zeros(0, dtype=torch.float64), *self._score_G])
        self._score_G = list(sum(score).view(-1, len(TRIED)))
        self._rows = [int(one) for one in sum(torch.tensor(self._rows, dtype=torch.float64))]

    def found(self) -> list[float]:
        """A temperature for every depth that was seen often enough; empty if none was."""
        out: list[float] = []
        for score_G, rows in zip(self._score_G, self._rows, strict=True):
            if rows < LEAST:
                break
            out.append(TRIED[int(score_G.argmin())])
        return out
