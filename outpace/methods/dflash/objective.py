"""Dflash: a block of rows that learns to guess the next S tokens at once, from features.

    anchor t     context rows 0 to t are seen; token t + 1 is pending
    row i        guesses token t + 2 + i, i = 0 ... S - 1

Anchors are drawn at random, a share of the learning rows of a text, and all their blocks are
learned in one go: a block sees the context up to its anchor and itself. Row i counts decay^i, by
being learned in that share of the blocks alone: rows that are not learned cost neither the MLP
nor the head. The network is `dflash_net`; only it is trained, and the unembedding is the target's.

Held-out rows also give what the static tree is made of: how often the i-th likeliest token of
a row was the target's, where those of the rows before were among their likeliest.

Papers: DFlash, arXiv:2602.06036 (anchors; its weights exp(-i / 4) are a decay of 0.78); PARD,
arXiv:2504.18583 (later rows learned more rarely). Labels are the target's distributions.

Shape letters: B sequences, T tokens, A anchors of a sequence, S rows of a block, R rows, N distributions,
H hidden size, F width of all features, D draft vocabulary.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outpace.drafters.static_tree import LARGEST, likeliest
from outpace.drafters.trained import decoder_to_json, head_rows, lender, read_embedding
from outpace.errors import ModelError
from outpace.files import write_whole
from outpace.law import VocabMap
from outpace.methods.dflash.files import METHOD
from outpace.methods.dflash.net import unit
from outpace.methods.dflash.training_net import BlockNet, take
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, head_loss
from outpace.train.networks import plain_shape
from outpace.train.objective import LAST, Objective, Step, draft_ids, target_laws, write_drafter
from outpace.train.ranks import Ranks, judge_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class DflashTraining:
    slots: int = 4
    """Tokens guessed at a time."""
    layers: int = 1
    """Layers of the network."""
    anchors: float = 0.5
    """Share of the rows of an answer from which a block is learned, drawn anew for every batch."""
    decay: float = 0.7
    """Weight of a row relative to the one before."""
    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""
    taps: str | None = None
    """Layers after which features are taken, as ``2,15,27,-1``; -1, the last, is behind the final
    norm. By default 2, L / 2, L - 3 and -1."""

    def __post_init__(self) -> None:
        check(self.loss)
        if self.slots < 1 or self.layers < 1:
            raise ValueError(f"slots and layers must be at least 1, got {self.slots} and {self.layers}")
        if not (0 < self.anchors <= 1 and 0 < self.decay <= 1 and self.temperature > 0):
            raise ValueError(
                "anchors and decay must be in (0, 1] and temperature above 0, got "
                f"{self.anchors}, {self.decay} and {self.temperature}"
            )


class Anchored(Aligned):
    """A batch of which only a share of the learning rows, the anchors, are used; at least one."""

    def __init__(self, batch: Batch, share: float, coins: torch.Generator) -> None:
        super().__init__(batch, EAGLE)
        coin_BA = torch.rand(self.real_BA.shape, generator=coins).to(self.real_BA.device)
        coin_BA = coin_BA.where(self.real_BA, 2.0)
        chosen_BA = self.real_BA & ((coin_BA < share) | (coin_BA == coin_BA.min()))
        most = max(1, int(chosen_BA.sum(1).max()))
        order_BA = (~chosen_BA).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        self.real_BA = chosen_BA.gather(1, order_BA)
        self.place_BA = self.place_BA.gather(1, order_BA).where(self.real_BA, 0)


class DflashObjective(Objective):
    Config = DflashTraining
    module: BlockNet

    def __init__(
        self,
        config: DflashTraining,
        target: Decoder,
        vocab: VocabMap | None,
        net: BlockNet,
        shape: DecoderConfig,
    ) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.shape, self._fused = shape, _fused(config, target)
        self._head_DH = head_rows(target, vocab)
        self._embed_VH = read_embedding(target)
        self.ranks = Ranks(config.slots)

    @classmethod
    def taps(cls, config: DflashTraining, target: Target) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*_fused(config, target), LAST]))

    @classmethod
    def build(cls, config: DflashTraining, target: Target, vocab: VocabMap | None) -> DflashObjective:
        target.require(frozenset({TAPS, HEAD}), METHOD)
        lent, taps, count = lender(target, METHOD), _fused(config, target), config.layers
        if count > lent.num_layers:
            raise ModelError(f"dflash: layers={count}, but {lent.name} has {lent.num_layers}")
        shape = plain_shape(lent.config, count, -1)
        net = BlockNet(shape, len(taps), config.slots, lent.device).to(lent.device)
        streams = [number for number, tap in enumerate(taps) if tap != LAST]
        take(net, lent, len(taps), streams[-1] if streams else 0)
        return cls(config, lent, vocab, net, shape)

    def outputs(self, batch: Batch, aligned: Aligned, keep_BAS: Tensor) -> Tensor:
        """What the unembedding reads at the rows kept, float32 [R, H]."""
        feature_BTF = torch.cat([unit(batch.feature[tap]) for tap in self._fused], -1)
        embed_BAH = unit(self._embed_VH[aligned.token(EAGLE - 1)])
        return cast(Tensor, self.module(feature_BTF, embed_BAH, aligned.place_BA, keep_BAS))

    def drawn(self, batch: Batch) -> tuple[Aligned, Tensor]:
        """The anchors of a batch, and which rows of their blocks learn, bool [B, A, S].

        The coins are a function of the batch alone, so that a training that goes on after a break
        draws what it would have drawn.
        """
        config = self.config
        seed = zlib.crc32(batch.token_BT.cpu().numpy().tobytes())
        coins = torch.Generator().manual_seed(seed)
        aligned, keep = Anchored(batch, config.anchors, coins), []
        for i in range(config.slots):
            known_BA = aligned.teaches(EAGLE + i) & (self._labels(aligned, i) >= 0)
            coin_BA = torch.rand(known_BA.shape, generator=coins).to(known_BA.device)
            keep.append(known_BA & (coin_BA < config.decay**i))
        return aligned, torch.stack(keep, -1)

    def _labels(self, aligned: Aligned, slot: int) -> Tensor:
        return draft_ids(aligned.token(EAGLE + slot), self.vocab)

    def loss(self, batch: Batch) -> Step:
        config, slots = self.config, range(self.config.slots)
        self.ranks.clear()
        aligned, keep_BAS = self.drawn(batch)
        p_ND, row_R = None, None
        if config.loss != "ce":
            row_BAS = torch.stack([aligned.law(EAGLE + i) for i in slots], -1)
            used_N, row_R = torch.unique(row_BAS[keep_BAS], return_inverse=True)
            last_NH = aligned.laws_of(batch.feature[LAST])[used_N]
            p_ND = target_laws(self.target, self.vocab, last_NH, config.temperature)
        label_BAS = torch.stack([self._labels(aligned, i) for i in slots], -1)
        tokens = max(1, int(keep_BAS[..., 0].sum()))
        loss = head_loss(
            self.outputs(batch, aligned, keep_BAS),
            self._head_DH,
            config.loss,
            p_ND=p_ND,
            row_R=row_R,
            label_R=label_BAS[keep_BAS],
        )
        return Step(loss / tokens, tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned, slots = Aligned(batch, EAGLE), self.config.slots
        every_BAS = aligned.real_BA.new_ones(*aligned.real_BA.shape, slots)
        y_BASH = self.outputs(batch, aligned, every_BAS).view(*every_BAS.shape, -1)
        return judge_ranks(self.ranks, y_BASH.unbind(2), batch, aligned, self, self._head_DH)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the drafter folder, and in it the calibrated tree alone, as ``tree.json``."""
        rates = self.ranks.acceptance()
        parents = list(likeliest(rates, LARGEST))
        config = {
            **self.about(METHOD, self._fused),
            "slots": self.config.slots,
            "decoder": decoder_to_json(self.shape),
            "acceptance": rates,
            "tree": parents,
        }
        write_drafter(folder, config, self.named(), self.vocab, provenance)
        if parents:
            write_whole(folder / "tree.json", json.dumps({"parents": parents}) + "\n")


def _fused(config: DflashTraining, target: Target) -> tuple[str, ...]:
    """Features that stand side by side; in shallow targets one may serve twice.

    Raises:
        ModelError: layers that the target does not have.
    """
    last = target.num_layers
    if config.taps is None:
        return *(f"hidden.{one}" for one in (min(2, last), last // 2, max(last - 3, 1))), LAST
    layers = config.taps.split(",")
    if not all(word == "-1" or (word.isdecimal() and int(word) <= last) for word in layers):
        raise ModelError(f"dflash: taps={config.taps!r}, but {target.name} has layers 0 to {last}, and -1")
    return tuple(f"hidden.{word}" for word in layers)
