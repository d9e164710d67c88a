"""Medusa: heads on the target's last hidden state guess several tokens ahead, all at once.

Head k guesses the token k places after the pending one, from the hidden state that gave the
pending one. It reads neither that token nor the guesses before. So its law is one per depth, the
same below every node of that level. All levels of a draft cost one pass of the heads. A draft is a
static tree whose shape was measured after training; ``tree=`` sets another.

Guesses pass for little but fit each other less with every level, since no head knows what the one
before it chose; `hydra` reads that. Pays where a pass over a few dozen rows costs little more than
one over a single row.

Blockwise parallel decoding (Stern et al. 2018, arXiv:1811.03115) is the plain case. The argmax of
every head makes one chain, kept as far as it equals the target's own choice:
``medusa[tree=chain verifier=match]``.

Paper: Cai et al. 2024 (Medusa-1), arXiv:2401.10774. Theirs copies the unembedding for every head
and trains it; here all heads share the target's. Typical acceptance is a verifier, `typical`.

Shape letters: B sequences, K heads, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outpace.drafters.base import ONE_PASS
from outpace.drafters.blocks import BlockDrafter
from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import LastState
from outpace.methods.medusa.heads import Heads, ResidualDrafter, read_heads
from outpace.models.base import Target
from outpace.tree.growth import Branch

METHOD = "medusa"


class Medusa(BlockDrafter[LastState], ResidualDrafter):
    """Drafts with heads that read the hidden state alone."""

    Config = TrainedConfig
    traits = replace(ResidualDrafter.traits, level_D=ONE_PASS)

    def __init__(self, heads: Heads, target: Target, quantize: str | None = None) -> None:
        ResidualDrafter.__init__(self, heads, target, quantize)
        self.block = heads.shape.heads

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Medusa:
        """Read the heads and borrow the target's unembedding."""
        heads = read_heads(METHOD, config.model, target, conditioned=False)
        return cls(heads, target, config.quantize)

    def blocks(self, branches: Sequence[Branch[LastState]]) -> Tensor:
        """All heads for all sequences, [B, K, D]."""
        with self.clock, torch.no_grad():
            return self.logits(self.hidden(branches))

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """What every head says after hidden states, float32 [B, K, D]."""
        x_BKH = self.nets[0](hidden_BH)
        logits_TD = self.target.head(x_BKH.flatten(0, 1), self.heads.vocab)
        return logits_TD.view(*x_BKH.shape[:2], -1)
