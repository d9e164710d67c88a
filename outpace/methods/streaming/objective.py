"""Streams in training: low-rank weights beside the target's upper layers, the target frozen.

    row t        the target's own row, which gives token t + 1
    stream k     position t + k, from layer m on; guesses token t + 1 + k

Streams see the target's own keys and values of the text up to t. Those of ``streaming`` also see the
streams before them; those of ``coral`` do not, and have one layer. In every step some places of every
text carry streams. What is added to the target's weights starts as zero, so a stream starts as its node's
own row.

Papers: Speculative Streaming, arXiv:2402.11131; COrAL, arXiv:2410.09675 (its forward objective; its
backward targets repair tokens that were read wrongly, and a draft is verified instead).

Shape letters: B sequences, G places with streams, K streams, N distributions, H hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import head_rows, lender
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.streaming.files import projections
from outpace.models.base import EMBEDDINGS, HEAD, LAYERS, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.align import DRAFT_MODEL, EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, depth_weights, head_loss, weighted
from outpace.train.objective import LAST, Objective, Step, draft_ids, target_laws, whole_laws, write_drafter
from outpace.train.ranks import RankedChain, Ranks, ranked
from outpace.train.rider_net import RiderNet

UNIT = 50.0
"""Distance of streams from their start, in what is trained: Adam's steps are so much longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingTraining:
    layers: int | None = None
    """Upper layers that streams run through; by default an eighth of them."""
    streams: int = 3
    """Tokens that are guessed besides the next one."""
    exit: int | None = None
    """Layers below the early exit by which trees are pruned; by default a fifth of the target's."""
    rank: int = 16
    """Of the weights that streams have of their own."""
    places: int = 64
    """Places of a text that carry streams in a step; memory and time grow with them."""
    decay: float = 0.8
    """Weight of a stream relative to the one before."""
    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""
    seed: int = 0
    """Of the low-rank weights at the start."""

    def __post_init__(self) -> None:
        check(self.loss)
        for name in ("layers", "streams", "rank", "places", "exit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.decay <= 1 or self.temperature <= 0:
            raise ValueError(
                f"decay must be in (0, 1] and temperature above 0, got {self.decay} and {self.temperature}"
            )


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


class Streaming(Objective):
    Config = StreamingTraining
    method: ClassVar[str] = "streaming"
    chained: ClassVar[bool] = True
    module: StreamsNet

    def __init__(
        self, config: StreamingTraining, target: Decoder, vocab: VocabMap | None, net: RiderNet
    ) -> None:
        self.config, self.target, self.vocab, self.net = config, target, vocab, net
        self.module = StreamsNet(config, net)
        self.layer = min(net.layers)
        self.exit = min(self.layer, max(1, target.num_layers // 5) if config.exit is None else config.exit)
        self._head_DH = head_rows(target, vocab)
        self._weights = depth_weights(config.streams, config.decay)
        self.ranks = Ranks(config.streams)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return ()  # the texts are read again in every step

    @classmethod
    def build(cls, config: StreamingTraining, target: Target, vocab: VocabMap | None) -> Streaming:
        target.require(frozenset({LAYERS, TAPS, HEAD, EMBEDDINGS}), cls.method)
        lent = lender(target, cls.method)
        most = lent.num_layers - 1
        layers = max(1, lent.num_layers // 8) if config.layers is None else config.layers
        if layers > most:
            raise ModelError(f"{cls.method}: layers={layers}, but {lent.name} has {most} above its first")
        return cls(config, lent, vocab, RiderNet(lent, range(most + 1 - layers, most + 1)))

    def chosen(self, aligned: Aligned) -> Tensor:
        """Learning rows that carry streams, indices [B, G]; the same for the same batch."""
        real_BA = aligned.real_BA
        coins = torch.Generator().manual_seed(int(aligned.token(EAGLE).sum()))
        turn_BA = torch.rand(real_BA.shape, generator=coins).to(real_BA.device)
        order_BA = turn_BA.masked_fill(~real_BA, 2.0).argsort(1)
        return order_BA[:, : self.config.places].sort(1).values

    def states(self, batch: Batch, aligned: Aligned, pick_BG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the head reads at the chosen places, [B, G, K, H], and behind the early exit there,
        [B, G, H]; and the feature ``hidden.-1``.
        """
        name, early = f"hidden.{self.layer}", f"hidden.{self.exit}"
        text, found = self.net.read(batch, (*{name, early}, LAST))
        place_BG = aligned.place_BA.gather(1, pick_BG)
        index_BGH = place_BG[..., None].expand(-1, -1, found[name].shape[-1])
        entering_BGKH = self.module(found[name].gather(1, index_BGH))
        y_BGEKH = self.net(entering_BGKH[:, :, None], place_BG, text, alone=not self.chained)
        early_BGH = self.module.exits(found[early].gather(1, index_BGH))
        return y_BGEKH[:, :, 0], early_BGH, found[LAST]

    def loss(self, batch: Batch) -> Step:
        aligned, config = Aligned(batch, EAGLE), self.config
        self.ranks.clear()
        pick_BG = self.chosen(aligned)
        y_BGKH, early_BGH, last_BTH = self.states(batch, aligned, pick_BG)
        guessed = [*y_BGKH.unbind(2), early_BGH]
        labels, keeps, laws = [], [], []
        for ahead in (*range(EAGLE, EAGLE + config.streams), DRAFT_MODEL):
            label_BG = draft_ids(aligned.token(ahead), self.vocab).gather(1, pick_BG)
            keep_BG = aligned.teaches(ahead).gather(1, pick_BG) & (label_BG >= 0)
            labels.append(label_BG[keep_BG])
            laws.append(aligned.law(ahead).gather(1, pick_BG)[keep_BG])
            keeps.append(keep_BG)
        p_ND, rows = None, laws
        if config.loss != "ce":
            used_N, row = torch.unique(torch.cat(laws), return_inverse=True)
            rows = list(torch.split(row, [len(one) for one in laws]))
            last_NH = aligned.laws_of(last_BTH)[used_N]
            p_ND = target_laws(self.target, self.vocab, last_NH, config.temperature)
        losses = [
            head_loss(
                guessed[k][keep_BG], self._head_DH, config.loss, p_ND=p_ND, row_R=rows[k], label_R=labels[k]
            )
            for k, keep_BG in enumerate(keeps)
        ]
        tokens = max(1, len(labels[0]))
        return Step((weighted(losses[:-1], self._weights) + losses[-1]) / tokens, tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned = Aligned(batch, EAGLE)
        pick_BG = self.chosen(aligned)
        y_BGKH, _, last_BTH = self.states(batch, aligned, pick_BG)
        p_ND, truth_N = whole_laws(self.target, self.vocab, aligned.laws_of(last_BTH))
        real_BG = aligned.real_BA.gather(1, pick_BG)
        chain = RankedChain(self.ranks, real_BG)
        for k in range(self.config.streams):
            row_BG, known_BG, token_BG = (
                one(EAGLE + k).gather(1, pick_BG) for one in (aligned.law, aligned.teaches, aligned.token)
            )
            truth_BG = truth_N[row_BG]
            rank_R, alpha_R = ranked(
                y_BGKH[:, :, k].flatten(0, 1),
                self._head_DH,
                self.vocab,
                truth_BG.flatten(),
                p_ND,
                row_BG.flatten(),
            )
            chain.add(known_BG, token_BG == truth_BG, rank_R, alpha_R)
        return chain.step(int(real_BG.sum()))

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
