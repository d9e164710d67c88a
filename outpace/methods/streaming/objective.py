"""Streams in training: low-rank weights beside the target's upper layers, the target frozen.

    row t        the target's own row, which gives token t + 1
    stream k     position t + k, from layer m on; guesses token t + 1 + k

Streams see the target's own keys and values of the text up to t. Those of ``streaming`` also see the
streams before them; those of ``coral`` do not, and have one layer. What is added to the target's weights
starts as zero, so a stream starts as its node's own row.

Papers: Speculative Streaming, arXiv:2402.11131; COrAL, arXiv:2410.09675 (its forward objective; its
backward targets repair tokens that were read wrongly, and a draft is verified instead).

Shape letters: B sequences, G places with streams, K streams, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import lender
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.streaming.files import projections
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.objective import LAST, write_drafter
from outpace.train.rider_net import RiderNet
from outpace.train.rider_objective import UNIT, RiderObjective, RiderTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingTraining(RiderTraining):
    POSITIVE = ("layers", "streams", "rank", "places", "exit")
    layers: int | None = None
    """Upper layers that streams run through; by default an eighth of them."""
    streams: int = 3
    """Tokens that are guessed besides the next one."""
    exit: int | None = None
    """Layers below the early exit by which trees are pruned; by default a fifth of the target's."""
    rank: int = 16
    """Of the weights that streams have of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoralTraining(StreamingTraining):
    """Options of ``outpace train coral``: those of ``streaming``, with one layer and a higher rank."""

    layers: int | None = 1
    rank: int = 64


class LowRank(nn.Module):
    """A projection that stays as it is, and what is added to it."""

    def __init__(self, whole: nn.Linear, rank: int, coins: torch.Generator) -> None:
        super().__init__()
        self.whole = [whole]  # frozen, and no part of what is trained
        outputs, inputs = whole.weight.shape
        device = whole.weight.device
        self.a = nn.Parameter(torch.randn(rank, inputs, generator=coins).to(device) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.whole[0](x)) + F.linear(F.linear(x, self.a), self.b)


class StreamsNet(nn.Module):
    """All that is trained."""

    start_KH: Tensor

    def __init__(self, config: StreamingTraining, net: RiderNet) -> None:
        super().__init__()
        hidden, device = net.config.hidden_size, net.target.device
        coins = torch.Generator().manual_seed(config.seed)
        self.register_buffer("start_KH", torch.zeros(config.streams, hidden, device=device))
        self.moved_KH = nn.Parameter(torch.zeros(config.streams, hidden, device=device))
        self.exit_norm = nn.Parameter(net.norm.weight.detach().clone().float())
        self.exit_linear = nn.Parameter(torch.zeros(hidden, hidden, device=device))
        self._eps, self._offset = net.config.norm_eps, net.config.norm_offset
        self.enter = nn.Parameter(torch.zeros(hidden, hidden, device=device))
        self.low = nn.ModuleDict()
        for i, layer in net.layers.items():
            for name in projections(net.config, i):
                *way, last = name.removeprefix(f"model.layers.{i}.").split(".")
                owner = layer.get_submodule(".".join(way))
                low = LowRank(owner.get_submodule(last), config.rank, coins)  # type: ignore[arg-type]
                self.low[name.replace(".", "/")] = low
                setattr(owner, last, low)

    def forward(self, x_BGH: Tensor) -> Tensor:
        """What enters, [B, G, K, H], of the states of some places."""
        start_BGH = x_BGH + F.linear(x_BGH, self.enter)
        return start_BGH[:, :, None] + self.streams()

    def streams(self) -> Tensor:
        return self.start_KH + UNIT * self.moved_KH

    def exits(self, x_BGH: Tensor) -> Tensor:
        """What the head reads behind the early exit, [B, G, H]."""
        n_BGH = F.rms_norm(x_BGH, self.exit_norm.shape, self.exit_norm + self._offset, self._eps)
        return n_BGH + F.linear(n_BGH, self.exit_linear)

    def stored(self) -> dict[str, Tensor]:
        """Its weights by the names that files have; streams as they start, and ``save`` moves them."""
        named: dict[str, Tensor] = {"streams": self.start_KH, "enter": self.enter}
        named |= {"exit.norm": self.exit_norm, "exit.linear": self.exit_linear}
        for name, low in self.low.items():
            at = name.replace("/", ".")
            named |= {f"{at}.a": cast(LowRank, low).a, f"{at}.b": cast(LowRank, low).b}
        return named


class Streaming(RiderObjective):
    Config = StreamingTraining
    method: ClassVar[str] = "streaming"
    chained: ClassVar[bool] = True
    first = EAGLE
    module: StreamsNet

    def __init__(
        self, config: StreamingTraining, target: Decoder, vocab: VocabMap | None, net: RiderNet
    ) -> None:
        super().__init__(config, target, vocab, net, StreamsNet(config, net), config.streams)
        self.layer, self.exit = (int(one.removeprefix("hidden.")) for one in self.reads(config, target)[:2])

    @classmethod
    def taps(cls, config: StreamingTraining, target: Target) -> tuple[str, ...]:
        layers = cls.layers(config, target)
        return RiderNet.wanted(layers, cls.reads(config, target))

    @classmethod
    def layers(cls, config: StreamingTraining, target: Target) -> range:
        """The upper layers that streams run through.

        Raises:
            ModelError: the target has not so many above its first.
        """
        count = max(1, target.num_layers // 8) if config.layers is None else config.layers
        if count >= target.num_layers:
            most = target.num_layers - 1
            raise ModelError(f"{cls.method}: layers={count}, but {target.name} has {most} above its first")
        return range(target.num_layers - count, target.num_layers)

    @classmethod
    def reads(cls, config: StreamingTraining, target: Target) -> tuple[str, str, str]:
        """Features at which streams enter, behind the early exit, and of the target's distributions."""
        layer = cls.layers(config, target)[0]
        early = max(1, target.num_layers // 5) if config.exit is None else config.exit
        return f"hidden.{layer}", f"hidden.{min(layer, early)}", LAST

    @classmethod
    def build(cls, config: StreamingTraining, target: Target, vocab: VocabMap | None) -> Streaming:
        lent = lender(target, cls.method, LAYERS, TAPS, HEAD, EMBEDDINGS)
        return cls(config, lent, vocab, RiderNet(lent, cls.layers(config, target)))

    def guesses(self, batch: Batch, aligned: Aligned) -> tuple[list[Tensor], Tensor]:
        """Of the streams, and behind the early exit."""
        enters, early, last = self.reads(self.config, self.target)
        text, found = self.net.read(batch, tuple(dict.fromkeys((enters, early, last))))
        entering_BGKH = self.module(aligned.rows(found[enters]).float())
        y_BGEKH = self.net(entering_BGKH[:, :, None], aligned.place_BA, text, alone=not self.chained)
        early_BGH = self.module.exits(aligned.rows(found[early]).float())
        return [*y_BGEKH[:, :, 0].unbind(2), early_BGH], found[last]

    def named(self) -> Mapping[str, Tensor]:
        return self.module.stored()

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        said = {
            **self.about(self.method, []),
            "layer": self.layer,
            "rank": self.config.rank,
            "exit": self.exit,
            "acceptance": self.ranks.acceptance(),
        }
        tensors = {**self.named(), "streams": self.module.streams().detach()}
        write_drafter(folder, said, tensors, self.vocab, provenance)


class Coral(Streaming):
    """Blocks of the last layer in training."""

    Config = CoralTraining
    method: ClassVar[str] = "coral"
    chained: ClassVar[bool] = False
