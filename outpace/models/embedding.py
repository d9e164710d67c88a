"""The vectors of token ids, in memory or read from a checkpoint.

Shape letters: T rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.models.families import DecoderConfig
from outpace.models.packed import Linear
from outpace.models.weights import Checkpoint


class Embedding:
    """The vectors of token ids.

    On a CPU a tied matrix is in memory once already, laid out for the head, which cannot be read
    by rows. Then the rows of a pass are read from the checkpoint, some 50 us for a few of them.

    Args:
        keep: whether the matrix is kept in memory.
        rounding: rounds rows [T, H] as the head is, if it is tied to one that is rounded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        keep: bool,
        rounding: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        name = "model.embed_tokens.weight"
        self.dtype, self.device = dtype, device
        self.matrix_VH = checkpoint.tensor(name, dtype).to(device) if keep else None
        self._rows = None if keep else checkpoint.rows(name, dtype)
        self._rounding = rounding
        self.vectors: Linear | None = None
        """For compiled code: a matrix whose outputs are the vectors, to the bit, if there is one."""

    def factor(self, config: DecoderConfig) -> float:
        """What a model multiplies the vectors by, rounded as they are."""
        return float(torch.tensor(config.embed_scale, dtype=self.dtype))

    def __call__(self, ids: Sequence[int]) -> Tensor:
        if self._rows is not None:
            found_TH = self._rows(ids).to(self.device)
        else:
            assert self.matrix_VH is not None
            found_TH = self.matrix_VH[torch.tensor(ids, dtype=torch.int64).to(self.device)]
        return found_TH if self._rounding is None else self._rounding(found_TH)
