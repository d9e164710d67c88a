"""Dspark: a block whose guesses know the guess before them, and how likely they are kept.

    logits_k = U_k + W2 W1[x_(k-1)]        x_(k-1): the token above, x_0 the pending one
    c_k = sigmoid(w [h_k; W1[x_(k-1)]])    chance that a guess at depth k is kept if its parent is

U_k and h_k are those of the block's row, computed once; the rest costs one small product per node. So a
node's children follow from its own token, in trees too, and q is the corrected law.

c_k reads the tokens above a draw and not the draw itself, so a policy may close a branch before it
draws (``foresee``). What is drawn stays in the draft: whether x_k is checked never waits for c_(k+1),
which knows x_k.

Paper: DSpark, arXiv:2607.05147, with a head over the draft vocabulary alone.

Shape letters: F nodes of a frontier, R rank, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outpace.drafters.features import Followed
from outpace.drafters.trained import rounding
from outpace.methods.dflash.drafter import Dflash
from outpace.methods.dflash.files import BlockFile
from outpace.methods.dflash.net import W2
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.tree.growth import Branch
from outpace.types import ROOT


class Dspark(Dflash):
    """Corrects every row of a block by the token above it, and tells how likely a guess is kept."""

    method: ClassVar[str] = "dspark"

    def __init__(self, file: BlockFile, target: Target, quantize: str | None = None) -> None:
        super().__init__(file, target, quantize)
        form = Form(target.dtype, target.device, quantize=rounding(quantize, target))
        self._after_VR = file.after(target.vocab_size).to(target.device, target.dtype)
        self._bias = form.linear(file.tensors[W2])

    def expand(self, branches: Sequence[Branch[Followed]]) -> tuple[Tensor, Tensor | None]:
        logits_FD, id_D = super().expand(branches)
        with self.clock, torch.no_grad():
            return logits_FD.float() + self._bias(self._above(branches)).float(), id_D

    def known(self, branches: Sequence[Branch[Followed]]) -> Tensor:
        return torch.cat([super().known(branches), self._above(branches)], -1)

    def _above(self, branches: Sequence[Branch[Followed]]) -> Tensor:
        """What follows from the tokens of the nodes, [F, R]."""
        ids = [b.tokens[-1] if node == ROOT else b.token_N[node] for b in branches for node in b.nodes]
        return self._after_VR[ids]
