"""How a head learns whether a draw from a drafter's distribution is kept.

Shape letters: R rows, C those that teach, I their width, D draft vocabulary, N distributions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from outpace.train.objective import guesses

SHARE = 4
"""One row of so many teaches, since the head has few weights and each row costs one of the unembedding."""


def confidence_loss(
    head: Callable[[Tensor], Tensor], state_RI: Tensor, unembed_DI: Tensor, p_ND: Tensor, row_R: Tensor
) -> Tensor:
    """Cross-entropy to the chance that a draw is kept, 1 - |p - q|_1 / 2, as a sum over all rows.

    Guesses learn nothing from it.

    Args:
        head: gives a logit [C, 1] for states [C, I].
        state_RI: what q is computed from, by ``unembed_DI``.
        p_ND: the target's distributions.
        row_R: which of them belongs to each row.
    """
    some_CI = state_RI[::SHARE].detach()
    kept_C = guesses(some_CI, unembed_DI, None, p_ND, row_R[::SHARE])[1]
    said_C = head(some_CI).squeeze(-1).float()
    return SHARE * F.binary_cross_entropy_with_logits(said_C, kept_C.clamp(0, 1), reduction="sum")
