"""Falcon: an LSTM and one layer learn to guess k tokens per pass, over several passes.

    row r      the block of rows r - k + 1 ... r guesses tokens r + 2 ... r + 1 + k
    pass 2     its k outputs, with the text's tokens, are the next block; and so on

All learning rows end a block of their own: keys are the same wherever blocks begin, so only queries are
made k times. Labels are the target's distributions; the features that outputs stand for are learned
beside them (``regression``, SmoothL1).

Coupled sequential glancing distillation: a first look, without gradients, counts on how many rows the
target's token is missed. A share of so many rows (``glance``) is then shown what it has to give. That is
its feature and its token, together, in runs along the text. What such a row is asked for is in front of
it, so it teaches nothing itself; it helps the rows that see it. The paper lets the share fall from 0.4 to
0 over the training. Here it is one number, so that a step depends on its batch alone.

All weights are drawn from a seed. A copy of the target's last layer reads another stream than an LSTM's. It
answers with activations so large that first steps of Adam are leaps.

Paper: Gao et al. 2024 (Falcon), arXiv:2412.12639. Reconstructed: the share of glances, and how weights are
drawn.

Shape letters: B sequences, T tokens, A learning rows, k rows of a block, H hidden size, S numbers of an LSTM
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import decoder_to_json, lender
from outpace.law import VocabMap
from outpace.methods.falcon import recurrence
from outpace.methods.falcon.files import METHOD
from outpace.methods.falcon.net import LSTM_LAYERS, lstm_step
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.families import DecoderConfig
from outpace.train.ahead import AheadTraining, LayerObjective
from outpace.train.align import EAGLE, Aligned, next_tokens, places, rows_at
from outpace.train.batches import Batch, seed_of
from outpace.train.networks import KeyValue, Layer, plain_shape
from outpace.train.objective import LAST, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconTraining(AheadTraining):
    block: int = 2
    """k: tokens guessed per pass."""
    passes: int = 2
    """Passes that training unrolls; k times as many depths can be drafted."""
    regression: float = 10.0
    """Weight of the features' loss beside that of the distributions."""
    glance: float = 0.2
    """Rows shown their answer, as a share of the rows that miss it; 0 leaves the first look out."""
    spread: float = 0.02
    """Standard deviation of the layer's first weights."""
    seed: int = 0
    """Of the first weights."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(block=self.block, passes=self.passes)
        if min(self.regression, self.spread) < 0 or not 0 <= self.glance <= 1:
            raise ValueError(
                "regression and spread must be at least 0 and glance in [0, 1], "
                f"got {self.regression}, {self.spread}, {self.glance}"
            )


class FalconNet(nn.Module):
    """What is trained; names are those of `outpace.methods.falcon.net`."""

    def __init__(self, config: DecoderConfig, spread: float, seed: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        wide = [3 * hidden, *[2 * hidden] * (LSTM_LAYERS - 1)]
        gates = [nn.Linear(one, 4 * hidden) for one in wide]
        self.lstm = nn.ModuleList(gates)
        self.layer = Layer(config)
        self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        coins = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in gates:
                drawn = torch.rand(one.weight.shape, generator=coins) * 2 - 1
                one.weight.copy_(drawn * hidden**-0.5)
                one.bias.zero_()
                one.bias[hidden : 2 * hidden] = 1.0  # it begins with a memory
            for weight in self.layer.parameters():
                if weight.dim() == 2:
                    weight.copy_(spread * torch.randn(weight.shape, generator=coins))

    def product(self, number: int, u: Tensor) -> Tensor:
        out: Tensor = self.lstm[number](u)
        return out.float()

    def along(self, x_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """The LSTM along texts: what it gives [B, T, H], and its state behind every token [B, T, S]."""
        device, states = x_BTI.device.type, list[Tensor]()
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        out = x_BTI
        for one in cast(list[nn.Linear], list(self.lstm)):
            reads = out.shape[-1]
            enter = F.linear(out, one.weight[:, :reads], one.bias).float()
            out, c = recurrence.along(enter, one.weight[:, reads:].to(dtype))
            states += [out, c]
        return out, torch.cat(states, -1)


class Falcon(LayerObjective):
    """The network in training."""

    Config = FalconTraining
    module: FalconNet

    @classmethod
    def build(cls, config: FalconTraining, target: Target, vocab: VocabMap | None) -> Falcon:
        lent = lender(target, METHOD, TAPS, HEAD)
        shape = plain_shape(lent.config, 1, -1)
        net = FalconNet(shape, config.spread, config.seed).to(lent.device)
        return cls(config, lent, vocab, net, shape, config.block * config.passes)

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        return self._unroll(batch, aligned, next_tokens(batch), batch.feature[LAST].float(), None)

    def _unroll(
        self, batch: Batch, aligned: Aligned, token_BT: Tensor, given_BTH: Tensor, passes: int | None
    ) -> list[Tensor]:
        """All depths, from the tokens and features that the rows of the text read."""
        net, attn, size = self.module, self.module.layer.self_attn, self.config.block
        longest = token_BT.shape[1] + size * self.config.passes + 1
        x_BTH, lstm_BTS = net.along(torch.cat([self.embed(token_BT), given_BTH], -1))
        text = attn.keys(x_BTH, self.turns.at(places(batch), longest))
        place_BA, out, own = aligned.place_BA, list[Tensor](), list[KeyValue]()
        # Rows that end no whole block read the first row instead; they are few, and drafts skip them.
        blocks = [(place_BA - size + 1 + i).clamp_min(0) for i in range(size)]
        rows = [rows_at(x_BTH, block_BA) for block_BA in blocks]
        turns = [self.turns.at(block_BA, longest) for block_BA in blocks]
        lstm = rows_at(lstm_BTS, place_BA)
        for number in range(self.config.passes if passes is None else passes):
            if number:
                first = (number - 1) * size
                rows = []
                for i in range(size):
                    ahead = first + i + EAGLE
                    step = torch.cat([self.embed(aligned.token(ahead)), out[first + i]], -1)
                    x, lstm = lstm_step(net.product, step, lstm)
                    rows.append(x)
                turns = [self.turns.at(place_BA + first + i + 1, longest) for i in range(size)]
                own += [attn.keys(x, turn) for x, turn in zip(rows, turns, strict=True)]
            for x, turn in zip(rows, turns, strict=True):
                mixed = attn(attn.queries(x, turn), text, own, place_BA)
                out.append(net.layer.after(x, mixed))
        return out

    def loss(self, batch: Batch) -> Step:
        """The loss of the distributions and of the features, behind a first look if asked for."""
        aligned = Aligned(batch, EAGLE)
        self.ranks.clear()
        token_BT, given_BTH = next_tokens(batch), batch.feature[LAST].float()
        if self.config.glance:
            shown_BT = self._shown(batch, aligned, token_BT, given_BTH)
            size = self.config.block
            token_BT = torch.where(shown_BT, _ahead(token_BT, size), token_BT)
            given_BTH = torch.where(shown_BT[..., None], _ahead(given_BTH, size), given_BTH)
            aligned = _Glanced(batch, shown_BT, size)
        states = self._unroll(batch, aligned, token_BT, given_BTH, None)
        step = self.learn(states, batch, aligned, EAGLE, self._head_DH, self._weights)
        if not self.config.regression:
            return step
        counted = max(1, int(aligned.teaches(EAGLE).sum()))
        regression = self.config.regression * self.regression(batch, aligned, states) / counted
        return Step(step.loss + regression, step.tokens)

    @torch.no_grad()
    def _shown(self, batch: Batch, aligned: Aligned, token_BT: Tensor, given_BTH: Tensor) -> Tensor:
        """Rows of the text that are shown their answer, bool [B, T], in runs of a block."""
        size = self.config.block
        last = self._unroll(batch, aligned, token_BT, given_BTH, 1)[-1]
        ahead = EAGLE + size - 1
        known_BA = aligned.teaches(ahead)
        logits = last[known_BA].to(self._head_DH.dtype) @ self._head_DH.T
        guess = logits.argmax(-1)
        if self.vocab is not None:
            guess = self.vocab.to_target_D.to(guess.device)[guess]
        missed = int((guess != aligned.token(ahead)[known_BA]).sum())
        shown_BT = torch.zeros_like(token_BT, dtype=torch.bool)
        count = round(self.config.glance * missed / size)
        places_N2 = (known_BA & (aligned.place_BA % size == 0)).nonzero()
        if count < 1 or not len(places_N2):
            return shown_BT
        coins = torch.Generator().manual_seed(seed_of(batch))
        order = torch.randperm(len(places_N2), generator=coins)[:count].to(places_N2.device)
        b, a = places_N2[order].unbind(1)
        for i in range(size):
            row = aligned.place_BA[b, a] + i
            inside = row + size < batch.length_B[b]
            shown_BT[b[inside], row[inside]] = True
        return shown_BT

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        kept = {
            "block": self.config.block,
            "passes": self.config.passes,
            "decoder": decoder_to_json(self.shape),
        }
        self.save_tree(folder, {**self.about(METHOD, [LAST]), **kept}, provenance)


class _Glanced(Aligned):
    """Learning rows, without those guesses whose row was shown the answer."""

    def __init__(self, batch: Batch, shown_BT: Tensor, block: int) -> None:
        super().__init__(batch, EAGLE)
        self._shown_BT, self._block = shown_BT, block

    def teaches(self, ahead: int) -> Tensor:
        """The same, of depths of the first block alone: later blocks read the network's own outputs."""
        teaches_BA = super().teaches(ahead)
        row = ahead - EAGLE - (self._block - 1)
        if row > 0:
            return teaches_BA
        place_BA = (self.place_BA + row).clamp_min(0)
        return teaches_BA & ~self._shown_BT.gather(1, place_BA)


def _ahead(x: Tensor, count: int) -> Tensor:
    """What stands so many rows further on; the last ones see themselves."""
    return torch.cat([x[:, count:], x[:, -min(count, x.shape[1]) :]], 1)[:, : x.shape[1]]
