"""The network of block drafters in training: context as keys and values, blocks of rows as queries.

Arithmetic and parameter names are those of `outpace.methods.dflash.net`, which says what
the rows are. Many blocks of a text are learned at once. Each sees the context up to its own anchor
and the rows of its own block. It sees neither later context nor other blocks.

Shape letters: B sequences, T tokens, M blocks of a sequence, S rows of a block, R rows that learn,
H hidden size, F width of all features; of heads, K key heads, G query heads of each, D their width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from outpace.methods.dflash.net import BlockShape
from outpace.models.decoder import Decoder
from outpace.train.networks import KeyValue, Layer, Norm, Turn, Turns, norm_weight, take_layer

SMALL = 0.05
"""Scale of what a layer adds at the start: in the target it adds to a stream of length 20."""
DOUBT = 0.5
"""Scale of the last norm at the start, which is sure of wrong tokens."""


def unseen(place_BM: Tensor, tokens: int) -> Tensor:
    """Context rows that a block may not see, bool [B, M, T]: those behind its anchor."""
    return torch.arange(tokens, device=place_BM.device) > place_BM[..., None]


class BlockLayer(Layer):
    """One layer over the rows of blocks."""

    def mix(
        self, u_BMSH: Tensor, turn: Turn, text: KeyValue, unseen_BMT: Tensor, later_SS: Tensor | None
    ) -> Tensor:
        """What the rows of blocks mix, heads side by side, [B, M, S, .].

        Args:
            later_SS: bool, rows of its block that a row may not see; None: it sees all.
        """
        own, (batch, blocks, slots) = self.self_attn, u_BMSH.shape[:3]
        u_BYH = u_BMSH.flatten(1, 2)
        q_BKGYD = own.queries(u_BYH, turn)
        k_BKYD, v_BKYD = own.keys(u_BYH, turn)
        kv = q_BKGYD.shape[1]
        score = (q_BKGYD.flatten(2, 3) @ text[0].transpose(2, 3)).float()
        score = score.view(batch, kv, -1, blocks, slots, text[0].shape[2])
        score.masked_fill_(unseen_BMT[:, None, None, :, None], -torch.inf)
        q = q_BKGYD.reshape(batch, kv, -1, blocks, slots, q_BKGYD.shape[-1])
        k, v = (one.reshape(batch, kv, 1, *q.shape[3:]) for one in (k_BKYD, v_BKYD))
        beside = (q @ k.transpose(-1, -2)).float()
        if later_SS is not None:
            beside.masked_fill_(later_SS, -torch.inf)
        share = torch.cat([score, beside], -1).softmax(-1).to(q.dtype)
        seen, beside = share[..., :-slots], share[..., -slots:]
        mixed: Tensor = (seen.flatten(2, 4) @ text[1]).view(q.shape) + beside @ v
        return mixed.permute(0, 3, 4, 1, 2, 5).flatten(3)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream behind the layer, of any rows."""
        return self.after(x, self.self_attn.o_proj(mixed))


class BlockNet(nn.Module):
    """All that is trained.

    Args:
        shape: of the network.
        mask_H: vector of the mask token; None where rows are seeds.
    """

    def __init__(self, shape: BlockShape, device: torch.device, mask_H: Tensor | None = None) -> None:
        super().__init__()
        config, hidden, rank = shape.decoder, shape.decoder.hidden_size, shape.rank
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * hidden, hidden, bias=False)
        if shape.mask is None:
            self.token = nn.Linear(hidden, hidden, bias=False)
            self.slots = nn.Embedding(shape.slots, hidden)
        else:
            self.hidden_norm = Norm(hidden, config)
            self.register_buffer("mask_H", mask_H, persistent=False)
        if rank:
            self.markov_head = MarkovHead(shape.known, rank, shape.draft_vocab)
        if shape.confident:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})
            for one in self.confidence_head.parameters():  # until it learns, it is as sure as not
                nn.init.zeros_(one)
        self.layers = nn.ModuleList(BlockLayer(config, i) for i in range(config.num_layers))
        self.norm = Norm(hidden, config)
        self._turns = Turns(config.ropes[0], device)

    def forward(self, feature_BTF: Tensor, embed_BMH: Tensor, place_BM: Tensor, keep_BMA: Tensor) -> Tensor:
        """What the unembedding reads, float32 [R, H].

        Args:
            feature_BTF: features of all rows of the texts, as `feature` gives them.
            embed_BMH: of the tokens behind the anchors, as `pending` gives them.
            place_BM: the anchors: last context row that a block sees.
            keep_BMA: bool, guesses whose outputs are wanted; they come in this order.

        Cost: the MLP of the last layer runs over the rows wanted alone.
        """
        shape, slots = self.shape, self.shape.slots
        context_BTH = self.fc(feature_BTF).float()
        tokens = context_BTH.shape[1]
        if shape.mask is None:
            index = place_BM[..., None].expand(-1, -1, context_BTH.shape[-1])
            seed_BMH = context_BTH.gather(1, index) + self.token(embed_BMH).float()
            x = seed_BMH[:, :, None] + self.slots.weight
        else:
            context_BTH = self.hidden_norm(context_BTH)
            masks = cast(Tensor, self.mask_H).expand(*embed_BMH.shape[:2], slots - 1, -1)
            x = torch.cat([embed_BMH[:, :, None], masks], 2)
        position_BMS = place_BM[..., None] + 1 + torch.arange(slots, device=place_BM.device)
        turn = self._turns.at(position_BMS.flatten(1), tokens + slots + 1)
        row_T = torch.arange(tokens, device=place_BM.device)[None]
        along, hidden_BMT = self._turns.at(row_T, tokens), unseen(place_BM, tokens)
        later_SS = None
        if shape.causal:
            later_SS = torch.ones(slots, slots, dtype=torch.bool, device=x.device).triu(1)
        for number, module in enumerate(self.layers):
            layer = cast(BlockLayer, module)
            read_BTH = layer.input_layernorm(context_BTH) if shape.mask is None else context_BTH
            text = layer.self_attn.keys(read_BTH, along)
            mixed = layer.mix(layer.input_layernorm(x), turn, text, hidden_BMT, later_SS)
            if number + 1 == len(self.layers):
                x, mixed = (one[:, :, slots - shape.guesses :][keep_BMA] for one in (x, mixed))
            x = layer.finish(x, mixed)
        return cast(Tensor, self.norm(x))


class MarkovHead(nn.Module):
    """What follows from the token above, as a product of low rank; it adds nothing at the start."""

    def __init__(self, known: int, rank: int, columns: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(known, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)
        with torch.no_grad():
            coins = torch.Generator().manual_seed(0)
            self.markov_w1.weight.copy_(torch.randn(known, rank, generator=coins))
            self.markov_w2.weight.zero_()

    def above(self, id_R: Tensor) -> Tensor:
        """Vectors [R, rank] of draft ids; zeros for -1."""
        vector_RI = cast(Tensor, self.markov_w1(id_R.clamp_min(0)))
        return vector_RI * (id_R >= 0)[:, None]


@torch.no_grad()
def take(net: BlockNet, target: Decoder, base: int) -> None:
    """Start from the last layers of the target: of the block's network nothing is drawn at random.

    Args:
        net: overwritten.
        base: which of the features the context starts as.
    """
    hidden, first = target.hidden_size, target.num_layers - len(net.layers)

    def read(name: str) -> Tensor:
        return target.checkpoint.tensor(name, torch.float32).to(target.device)

    taps, masks = len(net.shape.taps), net.shape.mask is not None
    parts = [torch.eye(hidden) * (tap == base) for tap in range(taps)]
    net.fc.weight.copy_(torch.cat(parts, 1))
    if masks:
        net.hidden_norm.weight.copy_(norm_weight(target, f"model.layers.{first}.input_layernorm"))
    else:
        net.token.weight.copy_(torch.eye(hidden) * 0.5)
        net.slots.weight.zero_()
    for number, module in enumerate(net.layers):
        # Rows that are masks start as next to nothing: all they guess by is what layers add.
        take_layer(cast(BlockLayer, module), target, first + number, 1.0 if masks else SMALL)
    net.norm.weight.copy_(norm_weight(target, "model.norm") * DOUBT)
