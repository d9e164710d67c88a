"""Hydra: residual heads, each trained to guess one token further, told which tokens lie between.

    row t      h_t, the target's last hidden state, and the embeddings of tokens t + 1 ... t + k
    head k     guesses token t + 1 + k:  x = M [h, embeddings], then x <- x + silu(A x + b), a few
               times; logits = the target's unembedding of x

In training the tokens between are those of the text (teacher forcing). A guess is kept only if all
before it were right, so these are the rows that count. Otherwise all is as for `medusa`: its
alignment, losses, measurement and tree. M starts as the identity on h, so every head starts with
the target's distribution of the token before. A ``loop.lr`` of some 1e-3 does well.

Paper: Ankner et al. 2024, arXiv:2402.05109, with the target's distributions as labels (their Hydra++ does
the same). Their attention layer in front of the heads is the option ``prefix``; it starts as the
target's last layer, made small.

Shape letters: B sequences, A learning rows, H hidden size, I inputs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.last_state import unit
from outpace.drafters.trained import read_embedding
from outpace.law import VocabMap
from outpace.methods.medusa.objective import HeadsNet, Medusa, MedusaTraining
from outpace.models.decoder import Decoder
from outpace.train.align import Aligned, places
from outpace.train.batches import Batch
from outpace.train.networks import Turns, take_layer
from outpace.train.objective import LAST

SMALL = 0.05
"""Scale of what the prefix layer adds at the start, when the heads know h alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraTraining(MedusaTraining):
    layers: int = 2
    """Blocks of a head behind the matrix that mixes its inputs."""
    prefix: bool = False
    """Put a layer along the text in front of the heads (Hydra++)."""


class Hydra(Medusa):
    """Heads that read the hidden state and the tokens before their guess, in training."""

    Config = HydraTraining
    method: ClassVar[str] = "hydra"
    conditioned: ClassVar[bool] = True

    def __init__(
        self, config: MedusaTraining, target: Decoder, vocab: VocabMap | None, net: HeadsNet
    ) -> None:
        super().__init__(config, target, vocab, net)
        self._embed_VH = read_embedding(target)
        if net.prefix is not None and net.shape.prefix is not None:
            self._turns = Turns(net.shape.prefix.ropes[0], target.device)
            take_layer(net.prefix, target, target.num_layers - 1, SMALL)

    def hidden(self, batch: Batch, aligned: Aligned) -> Tensor:
        """The hidden states, or what the prefix layer makes of them."""
        layer = self.module.prefix
        if layer is None:
            return super().hidden(batch, aligned)
        state_BTH, rows = batch.feature[LAST].float(), aligned.place_BA
        longest = state_BTH.shape[1]
        text = layer.self_attn.keys(layer.input_layernorm(state_BTH), self._turns.at(places(batch), longest))
        x_BAH = aligned.rows(state_BTH)
        query = layer.self_attn.queries(layer.input_layernorm(x_BAH), self._turns.at(rows, longest))
        return layer.after(x_BAH, layer.self_attn(query, text, [], rows))

    def inputs(self, hidden_BAH: Tensor, aligned: Aligned) -> list[Tensor]:
        """What the heads read, [B, A, I] each: each one token more than the head before."""
        inputs: list[Tensor] = []
        for ahead in range(1, self.config.heads + 1):
            # The scale of embeddings does not matter: they come in with a length of their own.
            embed_BAH = unit(F.embedding(aligned.token(ahead), self._embed_VH))
            before = inputs[-1] if inputs else hidden_BAH
            inputs.append(torch.cat([before, embed_BAH], -1))
        return inputs
