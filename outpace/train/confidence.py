"""How a head learns whether a draw from a drafter's distribution is kept.

Shape letters: R rows, T those that teach, I their width, N distributions, C those of them that teach, D draft
vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.train.objective import guesses, whole_laws

SHARE = 4
"""One distribution of so many teaches, since the head has few weights and each costs a row of a whole
unembedding."""


def judging_laws(target: Target, vocab: VocabMap | None, last_NH: Tensor, temperature: float) -> Tensor:
    """What a draw is judged by, of the distributions that teach: p over the draft vocabulary, float32 [C, D].

    It is not normed there: what the target holds outside of it refuses draws.
    """
    return whole_laws(target, vocab, last_NH[::SHARE], temperature)[0]


def confidence_loss(
    head: Callable[[Tensor], Tensor],
    state_RI: Tensor,
    unembed_DI: Tensor,
    p_CD: Tensor,
    row_R: Tensor,
    weight_R: Tensor | None = None,
) -> Tensor:
    """Cross-entropy to the chance that a draw is kept, sum min(p, q), as a sum over all rows.

    Guesses learn nothing from it.

    Args:
        head: gives a logit [T, 1] for states [T, I].
        state_RI: what q is computed from, by ``unembed_DI``.
        p_CD: from ``judging_laws``.
        row_R: which of all N distributions belongs to each row.
        weight_R: how much each row counts; None: all alike.
    """
    teaches_R = row_R % SHARE == 0
    some_TI = state_RI[teaches_R].detach()
    kept_T = guesses(some_TI, unembed_DI, None, p_CD, row_R[teaches_R] // SHARE)[1]
    said_T = head(some_TI).squeeze(-1).float()
    weight_T = None if weight_R is None else weight_R[teaches_R]
    return SHARE * F.binary_cross_entropy_with_logits(said_T, kept_T.clamp(0, 1), weight_T, reduction="sum")
