"""Which row learns which token: the shifts between features, inputs and labels, in one place.

Row t of a feature was computed when token t was fed. The target's distribution at row t is its
distribution of token t + 1. Everything else follows from how far *ahead* of its row a token is:

    draft model     row t reads token t                          and guesses token t + 1
    EAGLE, depth 1  row t reads feature t and token t + 1        and guesses token t + 2
    EAGLE, depth j  row t reads its own output and token t + j   and guesses token t + j + 1

The distribution of the token that is k ahead of row t is the target's distribution at row t + k - 1. A row
of an EAGLE drafter has position t + j - 1 at depth j. That is the feature's own position in the target,
one more for every guess. Rotary attention sees differences alone, so a convention that adds 1 to all of
them reads the same checkpoints.

A token teaches if it belongs to an answer; which rows learn is decided by the first guess.

Shape letters: B sequences, T tokens of the longest, A most learning rows of a sequence, N distributions,
H hidden size.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from outpace.train.batches import Batch

DRAFT_MODEL, EAGLE = 1, 2
"""How far ahead of its row the first guess is."""


class Aligned:
    """The learning rows of a batch, and what stands ahead of them.

    Args:
        ahead: of the first guess, ``DRAFT_MODEL`` or ``EAGLE``.
    """

    def __init__(self, batch: Batch, ahead: int) -> None:
        self._token_BT = batch.token_BT
        inside_BT = places(batch) < batch.length_B[:, None]
        self._teaches_BT = batch.answer_BT & inside_BT
        learns_BT = _shifted(self._teaches_BT, ahead)
        most = max(1, int(learns_BT.sum(1).max()))
        # A stable sort brings the rows that learn to the front, in order.
        order_BT = (~learns_BT).to(torch.int8).argsort(dim=1, stable=True)
        self.real_BA = learns_BT.gather(1, order_BT)[:, :most]
        """bool: False where a sequence has fewer learning rows than the longest."""
        self.place_BA = order_BT[:, :most].where(self.real_BA, 0)
        """int64: the row's index in its sequence; 0 where not real."""
        has_law_BT = _shifted(self._teaches_BT, 1)
        self.law_N = has_law_BT.flatten().nonzero().squeeze(1)
        """int64: rows of the flattened [B * T] whose distributions teach."""
        number_BT = has_law_BT.flatten().cumsum(0).view_as(has_law_BT) - 1
        self._law_BT = number_BT.where(has_law_BT, 0)

    def token(self, ahead: int) -> Tensor:
        """The tokens so far ahead, int64 [B, A]; 0 behind the end."""
        return self._at(self._token_BT, ahead)

    def teaches(self, ahead: int) -> Tensor:
        """Whether the row is real and the token so far ahead is of an answer, bool [B, A]."""
        return self._at(self._teaches_BT, ahead) & self.real_BA

    def law(self, ahead: int) -> Tensor:
        """Number, in ``law_N``, of the distribution of the token so far ahead; right where it teaches."""
        return self._at(self._law_BT, ahead - 1)

    def rows(self, x_BTH: Tensor) -> Tensor:
        """The features of the learning rows themselves, [B, A, H]."""
        return rows_at(x_BTH, self.place_BA)

    def only(self, pick_BG: Tensor) -> Aligned:
        """Some of the learning rows, by their indices."""
        some = copy(self)
        some.real_BA, some.place_BA = self.real_BA.gather(1, pick_BG), self.place_BA.gather(1, pick_BG)
        return some

    def laws_of(self, x_BTH: Tensor) -> Tensor:
        """The features from which the distributions are computed, [N, H]."""
        return x_BTH.flatten(0, 1).index_select(0, self.law_N)

    def follows(self, count: int) -> Tensor:
        """Whether the learning row ``count`` further on is the one ``count`` places further on.

        bool [B, A - count]; False between two answers and where the rows end.
        """
        size = self.place_BA.shape[1] - count
        if size <= 0:
            return torch.zeros(len(self.place_BA), 0, dtype=torch.bool, device=self.place_BA.device)
        near_BA, far_BA = self.place_BA[:, :size], self.place_BA[:, count:]
        return (far_BA == near_BA + count) & self.real_BA[:, count:]

    def _at(self, x_BT: Tensor, ahead: int) -> Tensor:
        return _shifted(x_BT, ahead).gather(1, self.place_BA)


def rows_at(x_BTH: Tensor, place_BA: Tensor) -> Tensor:
    """Features at some places of every sequence, [B, A, H]."""
    return x_BTH.gather(1, place_BA[..., None].expand(-1, -1, x_BTH.shape[-1]))


def places(batch: Batch) -> Tensor:
    """0, 1, ... for every sequence, int64 [1, T]."""
    return torch.arange(batch.token_BT.shape[1], device=batch.token_BT.device)[None]


def next_tokens(batch: Batch) -> Tensor:
    """The token after each row, int64 [B, T]: what an EAGLE row reads at depth 1."""
    return _shifted(batch.token_BT, 1)


def moved(batch: Batch, device: torch.device) -> Batch:
    if batch.token_BT.device == device:
        return batch
    return replace(
        batch,
        token_BT=batch.token_BT.to(device),
        length_B=batch.length_B.to(device),
        answer_BT=batch.answer_BT.to(device),
        feature={name: one.to(device) for name, one in batch.feature.items()},
    )


def _shifted(x_BT: Tensor, ahead: int) -> Tensor:
    """What stands ``ahead`` further on in the same sequence; zeros come in at the end."""
    out_BT = torch.zeros_like(x_BT)
    if ahead < x_BT.shape[1]:
        out_BT[:, : x_BT.shape[1] - ahead] = x_BT[:, ahead:]
    return out_BT
