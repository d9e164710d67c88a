"""Hydra: heads on the target's last hidden state that read the guesses before their own.

    head 1     h, emb(pending)                        guesses x(n+1)
    head 2     h, emb(pending), emb(x(n+1))           guesses x(n+2)
    head 3     h, emb(pending), emb(x(n+1)), ...      guesses x(n+3)

So the law below a node depends on the whole path to it, and a level costs one pass of its head
over the open nodes, all sequences together; nothing of the target is computed again. There is no
cache: the hidden state is the only context. A draft is a static tree whose shape was measured
after training; ``tree=`` sets another, ``tree=dynamic`` grows where the heads are sure.

More of a draft is kept than of `medusa`'s, for as many small passes as it is deep. `eagle3`, which
attends to the whole text, keeps more still and costs more per level.

Paper: Ankner et al. 2024, arXiv:2402.05109. Theirs copies the unembedding for every head; here
all share the target's. The attention layer in front of the heads (Hydra++) is left out.

Shape letters: B sequences, F nodes of a frontier, H hidden size, I inputs of a head, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.drafters.last_state import LastState, unit
from outpace.methods.medusa.heads import Heads, ResidualDrafter, read_heads
from outpace.models.base import Target
from outpace.tree.growth import Branch
from outpace.types import ROOT

METHOD = "hydra"


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraConfig:
    """Settings of the drafter."""

    model: str | None = None
    """Folder of the heads; without it, the ones trained for the target."""
    quantize: str | None = "int8"
    """Round their weights to int8 or int4, where compiled code multiplies them; none keeps them."""


class Hydra(ResidualDrafter):
    """Drafts with heads that read the hidden state and the tokens before their guess."""

    Config = HydraConfig

    def __init__(self, heads: Heads, target: Target, quantize: str | None = None) -> None:
        super().__init__(heads, target, quantize)
        self._hidden_BH = torch.empty(0)

    @classmethod
    def load(cls, config: HydraConfig, target: Target) -> Hydra:
        """Read the heads and borrow the target's embedding and unembedding.

        Raises:
            ModelError: no heads, corrupt ones, or ones that were made for another target.
        """
        heads = read_heads(METHOD, config.model, target, conditioned=True)
        return cls(heads, target, config.quantize)

    def expand(self, branches: Sequence[Branch[LastState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the head of this level over all nodes."""
        if branches[0].nodes == (ROOT,):
            self._hidden_BH = self.hidden(branches)
        row_F = [b.state.row for b in branches for _ in b.nodes]
        read_F = [[b.tokens[-1], *b.path_tokens(node)] for b in branches for node in b.nodes]
        with self.clock, torch.no_grad():
            return self.logits(self._hidden_BH[row_F], read_F), self.id_D

    def logits(self, hidden_FH: Tensor, read_F: Sequence[Sequence[int]]) -> Tensor:
        """What follows, float32 [F, D].

        Args:
            hidden_FH: of the sequences that the nodes belong to.
            read_F: the pending token and the guesses down to each node; their number says
                which head.
        """
        x_FH = torch.empty(hidden_FH.shape, dtype=torch.float32, device=hidden_FH.device)
        # A grown tree opens one level at a time; whoever else asks may mix them.
        for count in sorted({len(read) for read in read_F}):
            rows = [row for row, read in enumerate(read_F) if len(read) == count]
            ids = [token for row in rows for token in read_F[row]]
            embed_FH = unit(self.target.embed(ids)).view(len(rows), -1)
            u_FI = torch.cat([hidden_FH[rows].float(), embed_FH], -1)
            x_FH[rows] = self.nets[count - 1](u_FI)[:, 0]
        return self.target.head(x_FH, self.heads.vocab)
