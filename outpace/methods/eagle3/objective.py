"""EAGLE-3: one layer that reads fused features and its own output, unrolled over depth.

    g_t = fc(features of row t);  input of depth 1: norm(emb(x_{t+1})), norm(g_t);  stream: g_t
    input of depth j: norm(emb(x_{t+j})), norm(a_t), a_t the stream it left at depth j - 1
    logits = head(norm(a_t)), over the draft vocabulary

Training-time test: all depths run on all learning rows at once. At depth j a row sees the keys of
depth 1 up to its own, and its own keys of depths 2 to j. All others are masked with -inf.

The layer starts as one of the target's. Queries, keys and values read the feature as that layer
reads its stream. They read the embedding through a small copy of the same weights.

Paper: Li et al. 2025, arXiv:2503.01840. Parameter names are those of the speculators format.

Shape letters: B sequences, T tokens, A learning rows, R rows, N distributions, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.speculators import default_layers
from outpace.drafters.trained import decoder_to_json, lender
from outpace.errors import ModelError
from outpace.files import expanded
from outpace.law import VocabMap
from outpace.methods.eagle3.net import CONFIDENCE
from outpace.methods.eagle3.probe import read as read_probe
from outpace.methods.eagle3.training_net import Eagle3Net, freeze, take
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.ahead import AheadTraining
from outpace.train.align import EAGLE, Aligned, next_tokens, places
from outpace.train.batches import Batch, noisy
from outpace.train.confidence import confidence_loss, judging_laws
from outpace.train.losses import depth_weights
from outpace.train.networks import Embed, KeyValue, Turns, plain_shape
from outpace.train.objective import DEPTHS, LAST, Objective, Step, write_drafter
from outpace.train.ranks import Ranks, judge_ranks
from outpace.train.temper import Tempering


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(AheadTraining):
    steps: int = 3
    """Depths that training unrolls."""
    refused: float = 1.0
    """Weight of rows behind a token that the head would not have guessed, where drafts begin in use."""
    noise: float = 0.0
    """Largest noise on the features while training, in their root mean squares."""
    confidence: float = 0.0
    """Weight of a head that tells how likely a guess is kept, for ``policy=specdecpp``; 0: no such head."""
    layer: int | None = None
    """The layer of the target to start from; the last by default."""
    start: str = "last"
    """What the fused feature starts as: ``last`` of the features, or their ``mean``."""
    taps: str | None = None
    """Layers after which features are taken, as ``2,15,27``; 2, L / 2 and L - 3 by default."""
    two_stage: str | None = None
    """File of ``tools/probe_layers.py``: layers and their mix as a weak probe chose them, which stay as they
    are (exploratory)."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(steps=self.steps)
        if self.refused <= 0 or self.noise < 0:
            raise ValueError(
                f"refused must be above 0 and noise at least 0, got {self.refused} and {self.noise}"
            )
        if self.confidence < 0 or (self.confidence and self.loss == "ce"):
            raise ValueError(
                f"confidence must be at least 0, and needs a loss that reads distributions, got "
                f"{self.confidence} with {self.loss}"
            )
        if self.two_stage and self.taps:
            raise ValueError("two_stage brings its layers; leave taps out")
        if self.start not in ("last", "mean"):
            raise ValueError(f"start must be last or mean, got {self.start!r}")


class Eagle3(Objective):
    Config = Eagle3Config
    fresh = CONFIDENCE
    module: Eagle3Net

    def __init__(
        self,
        config: Eagle3Config,
        target: Decoder,
        vocab: VocabMap | None,
        net: Eagle3Net,
        shape: DecoderConfig,
    ) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.shape = shape
        self._embed, self._turns = Embed(target), Turns(shape.ropes[0], target.device)
        self._fused = [f"hidden.{layer}" for layer in _tap_layers(config, target)]
        self._weights = depth_weights(config.steps, config.decay)
        self.ranks, self.temper = Ranks(max(DEPTHS, config.steps)), Tempering()

    @classmethod
    def taps(cls, config: Eagle3Config, target: Target) -> tuple[str, ...]:
        fused = [f"hidden.{layer}" for layer in _tap_layers(config, target)]
        return tuple(dict.fromkeys([*fused, LAST]))

    @classmethod
    def build(cls, config: Eagle3Config, target: Target, vocab: VocabMap | None) -> Eagle3:
        lent = lender(target, "eagle3", TAPS, HEAD)
        layer = lent.num_layers - 1 if config.layer is None else config.layer
        if not 0 <= layer < lent.num_layers:
            raise ModelError(f"eagle3: layer={layer}, but {lent.name} has {lent.num_layers}")
        shape = plain_shape(lent.config, 1, layer)
        taps = _tap_layers(config, target)
        rows = lent.vocab_size if vocab is None else len(vocab.to_target_D)
        net = Eagle3Net(shape, len(taps), rows, bool(config.two_stage), config.confidence > 0).to(lent.device)
        take(net, lent, layer, config.start, len(taps), vocab)
        if config.two_stage:
            freeze(net, read_probe(expanded(config.two_stage), target)[1])
        return cls(config, lent, vocab, net, shape)

    def unroll(self, batch: Batch, aligned: Aligned, depths: int) -> list[Tensor]:
        """Normed outputs [B, A, H] of the learning rows at depths 1 to ``depths``."""
        net, layer, place_BA = self.module, self.module.layer, aligned.place_BA
        longest = batch.token_BT.shape[1] + depths
        stream_BTH = net.fuse([batch.feature[tap] for tap in self._fused])
        u_BTI = net.inputs(self._embed(next_tokens(batch)), stream_BTH)
        text = layer.self_attn.keys(u_BTI, self._turns.at(places(batch), longest))
        stream, u_BAI = aligned.rows(stream_BTH), aligned.rows(u_BTI)
        own: list[KeyValue] = []
        out = []
        for depth in range(1, depths + 1):
            turn = self._turns.at(place_BA + depth - 1, longest)
            if depth > 1:
                u_BAI = net.inputs(self._embed(aligned.token(depth)), stream)
                own.append(layer.self_attn.keys(u_BAI, turn))
            query = layer.self_attn.queries(u_BAI, turn)
            stream = layer.after(stream, layer.self_attn(query, text, own, place_BA))
            out.append(net.norm(stream))
        return out

    def loss(self, batch: Batch) -> Step:
        self.ranks.clear()
        self.temper.clear()
        config, aligned = self.config, Aligned(batch, EAGLE)
        noise = config.noise if self.module.training else 0.0
        states = self.unroll(noisy(batch, self._fused, noise), aligned, config.steps)
        head_DH = self.module.lm_head.weight
        return self.learn(states, batch, aligned, EAGLE, head_DH, self._weights, config.refused)

    def beside(
        self, state_RH: Tensor, head_DH: Tensor, whole_CD: Tensor | None, row_R: Tensor
    ) -> Tensor | float:
        if whole_CD is None:
            return 0.0
        weight = self.config.confidence
        return confidence_loss(self.module.confidence, state_RH, head_DH, whole_CD, row_R).mul(weight)

    def beside_laws(self, last_NH: Tensor) -> Tensor | None:
        if not self.config.confidence:
            return None
        return judging_laws(self.target, self.vocab, last_NH, self.config.temperature)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        states = self.unroll(batch, aligned, max(DEPTHS, self.config.steps))
        head_DH = self.module.lm_head.weight
        return judge_ranks(self.ranks, states, batch, aligned, self, head_DH, self.temper)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = {
            **self.about("eagle3", self._fused),
            "decoder": decoder_to_json(self.shape),
            **({"each_norm": True} if self.module.fc_norm else {}),
            **({"confident": True} if self.config.confidence else {}),
            "temper": self.temper.found(),
        }
        write_drafter(folder, config, self.named(), self.vocab, provenance)


def _tap_layers(config: Eagle3Config, target: Target) -> tuple[int, ...]:
    """Layers after which features are taken; in shallow targets one may serve twice."""
    last = target.num_layers
    if config.two_stage:
        return read_probe(expanded(config.two_stage), target)[0]
    if config.taps is None:
        return default_layers(target)
    words = config.taps.split(",")
    layers = tuple(int(word) if word.isdecimal() else -1 for word in words)
    if not all(0 <= layer <= last for layer in layers):
        raise ModelError(f"eagle3: taps={config.taps!r}, but {target.name} has 0 to {last}")
    return layers
