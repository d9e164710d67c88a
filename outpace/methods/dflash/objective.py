"""Block drafters: a block of rows learns to guess the next tokens at once, from features.

    anchor t     context rows 0 to t are seen; token t + 1 is pending
    guess i      is token t + 2 + i, i = 0 ... A - 1

Anchors are drawn at random, a share of the learning rows of a text, and all their blocks are learned
in one go. A block sees the context up to its anchor, and itself. Guess i counts decay^i, by being
learned in that share of the blocks alone. Rows that are not learned cost neither the MLP nor the head.
With ``dpace`` all are learned, and weighed by what the block guesses now. The network is
`training_net`; only it is trained, and the unembedding is the target's.

Held-out rows also give what the static tree is made of. That is how often the i-th likeliest token
of a row was the target's, where those of the rows before were among their likeliest. A confidence
head learns the chance that a draw from q is kept, sum min(p, q), of a share of the distributions.

Papers: DFlash, arXiv:2602.06036 (anchors; its weights exp(-i / 4) are a decay of 0.78); PARD,
arXiv:2504.18583 (later rows learned more rarely); D-PACE, arXiv:2605.18810. Labels
are the target's distributions, not its text.

Shape letters: B sequences, T tokens, M anchors of a sequence, A guesses of a block, R guesses that learn,
C those of them from which confidence is learned, N distributions, H hidden size, I its width with a Markov
head's, F width of all features, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from outpace.drafters.last_state import unit
from outpace.drafters.speculators import default_layers
from outpace.drafters.trained import decoder_to_json, head_rows, lender, read_embedding
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.dflash.files import write_shape
from outpace.methods.dflash.net import CONFIDENCE, BlockShape
from outpace.methods.dflash.training_net import BlockNet, take
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.train.ahead import AheadTraining
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch, noisy, seed_of
from outpace.train.confidence import confidence_loss, judging_laws
from outpace.train.losses import TINY, confidences, head_loss, pace_weights
from outpace.train.networks import plain_shape
from outpace.train.objective import LAST, Objective, Step, draft_ids, target_laws
from outpace.train.ranks import Ranks, judge_ranks, write_tree
from outpace.train.temper import Tempering
from outpace.train.vocab import always_kept

ROWS = ("masks", "seeds")


@dataclass(frozen=True, kw_only=True, slots=True)
class DflashTraining(AheadTraining):
    rows: str = "masks"
    """What a block is made of: ``masks``, as the method's authors have it, or ``seeds``. Those are the last
    context row and a vector of each row's own, and suit one layer."""
    slots: int = 8
    """Rows of a block. The first one of masks guesses nothing; that of seeds guesses the next token."""
    layers: int = 2
    """Layers of the network."""
    anchors: float = 0.5
    """Share of the rows of an answer from which a block is learned, drawn anew for every batch."""
    decay: float = 0.78
    """Weight of a row relative to the one before."""
    dpace: float | None = None
    """Smoothing of confidence, above 0 and up to 1, for the weights of D-PACE. A row then counts by what it
    brings to the block's expected length now. The paper has 0.5. None: rows count by ``decay``."""
    taps: str | None = None
    """Layers after which features are taken, as ``2,15,27,-1``; -1, the last, is behind the final
    norm, and no other program can say it. By default 2, L / 2, L - 3, and of seeds -1."""
    noise: float = 0.0
    """Largest noise on the features while training, in their root mean squares."""
    mask: int | None = None
    """The token that masks. By default the last that texts hardly hold: one outside the draft vocabulary that
    neither ends a text nor marks a chat."""
    confidence: float = 0.0
    """Weight of the loss of a head that tells how likely a guess is kept, for ``specdecpp``; 0: none."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        if self.rows not in ROWS:
            raise ValueError(f"rows must be {' or '.join(ROWS)}, got {self.rows!r}")
        if self.slots < 1 + (self.rows == "masks") or self.layers < 1:
            least = 1 + (self.rows == "masks")
            raise ValueError(
                f"slots must be at least {least} and layers at least 1, got {self.slots} and {self.layers}"
            )
        if not 0 < self.anchors <= 1 or self.noise < 0:
            raise ValueError(
                f"anchors must be in (0, 1] and noise at least 0, got {self.anchors} and {self.noise}"
            )
        if self.dpace is not None and not 0 < self.dpace <= 1:
            raise ValueError(f"dpace must be in (0, 1], got {self.dpace}")
        if self.confidence < 0:
            raise ValueError(f"confidence must be at least 0, got {self.confidence}")


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
    method: ClassVar[str] = "dflash"
    fresh = (f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias")
    module: BlockNet

    def __init__(
        self, config: Any, target: Decoder, vocab: VocabMap | None, net: BlockNet, shape: BlockShape
    ) -> None:
        self.config, self.target, self.vocab, self.module = config, target, vocab, net
        self.shape = shape
        self._head_DH = head_rows(target, vocab)
        self._embed_VH = read_embedding(target)
        self.ranks, self.temper = Ranks(shape.guesses), Tempering()

    @classmethod
    def taps(cls, config: DflashTraining, target: Target) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*_fused(config, target), LAST]))

    @classmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> DflashObjective:
        lent, taps, count = lender(target, cls.method, TAPS, HEAD), _fused(config, target), config.layers
        if count > lent.num_layers:
            raise ModelError(f"{cls.method}: layers={count}, but {lent.name} has {lent.num_layers}")
        masks = config.rows == "masks"
        mask = _hardly_used(lent, vocab) if config.mask is None else config.mask
        if not 0 <= mask < lent.vocab_size:
            raise ModelError(f"{cls.method}: mask={mask}, but {lent.name} has {lent.vocab_size} tokens")
        decoder = plain_shape(lent.config, count, -1)
        shape = BlockShape(
            decoder=replace(decoder, qk_norm=masks),
            taps=taps,
            slots=config.slots,
            mask=mask if masks else None,
            from_anchor=not masks,
            draft_vocab=lent.vocab_size if vocab is None else len(vocab.to_target_D),
            confident=config.confidence > 0,
        )
        shape = cls.shaped(shape, config)
        net = BlockNet(shape, lent.device, lent.embed([mask])[0].float()).to(lent.device)
        streams = [number for number, tap in enumerate(taps) if tap != LAST]
        take(net, lent, streams[-1] if streams else 0)
        return cls(config, lent, vocab, net, shape)

    @classmethod
    def shaped(cls, shape: BlockShape, config: Any) -> BlockShape:
        """What this method's network has besides."""
        return shape

    def outputs(self, batch: Batch, aligned: Aligned, keep_BMA: Tensor) -> Tensor:
        """What the network leaves at the guesses kept, float32 [R, H]."""
        masks, pending_BM = self.shape.mask is not None, aligned.token(EAGLE - 1)
        parts = [batch.feature[tap] for tap in self.shape.taps]
        feature_BTF = torch.cat([one.float() if masks else unit(one) for one in parts], -1)
        embed_BMH = self._embed_VH[pending_BM].float() * float(self.target.config.embed_scale)
        embed_BMH = embed_BMH if masks else unit(embed_BMH)
        return cast(Tensor, self.module(feature_BTF, embed_BMH, aligned.place_BA, keep_BMA))

    def joint(self, y_RH: Tensor, above_R: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, [R, I], and the head [D, I].

        Args:
            above_R: draft ids of the tokens before the guesses, -1 where there is none.
        """
        return y_RH, self._head_DH

    def drawn(self, batch: Batch) -> tuple[Aligned, Tensor]:
        """The anchors of a batch, and which guesses of their blocks learn, bool [B, M, A]."""
        config, coins = self.config, torch.Generator().manual_seed(seed_of(batch))
        aligned, keep = Anchored(batch, config.anchors, coins), []
        decay = config.decay if config.dpace is None else 1.0
        for i in range(self.shape.guesses):
            known_BM = aligned.teaches(EAGLE + i) & (self._labels(aligned, i) >= 0)
            coin_BM = torch.rand(known_BM.shape, generator=coins).to(known_BM.device)
            keep.append(known_BM & (coin_BM < decay**i))
        return aligned, torch.stack(keep, -1)

    def paced(self, aligned: Aligned, keep_BMA: Tensor, q_R: Tensor) -> Tensor:
        """Weights of D-PACE for the guesses kept, [R]; all together weigh what ``decay`` would leave of them.

        Args:
            q_R: probabilities of the text's tokens.
        """
        config, rows = self.config, range(self.shape.guesses)
        real_BMA = torch.stack([aligned.teaches(EAGLE + i) for i in rows], -1)
        q_BMA = torch.zeros(keep_BMA.shape, device=q_R.device).masked_scatter(keep_BMA, q_R)
        weight_R = pace_weights(q_BMA, config.dpace, real_BMA)[keep_BMA]
        usual = float(sum(config.decay**i * int(keep_BMA[..., i].sum()) for i in rows))
        return weight_R * (usual / weight_R.sum().clamp_min(TINY))

    def _labels(self, aligned: Aligned, guess: int) -> Tensor:
        """Draft ids of the tokens to be guessed; of guess -1, the pending ones."""
        return draft_ids(aligned.token(EAGLE + guess), self.vocab)

    def loss(self, batch: Batch) -> Step:
        config, rows = self.config, range(self.shape.guesses)
        self.ranks.clear()
        self.temper.clear()
        aligned, keep_BMA = self.drawn(batch)
        p_ND, whole_CD, row_R = None, None, None
        if config.loss != "ce" or self.shape.confident:
            row_BMA = torch.stack([aligned.law(EAGLE + i) for i in rows], -1)
            used_N, row_R = torch.unique(row_BMA[keep_BMA], return_inverse=True)
            last_NH = aligned.laws_of(batch.feature[LAST])[used_N]
            p_ND = target_laws(self.target, self.vocab, last_NH, config.temperature)
            if self.shape.confident:
                whole_CD = judging_laws(self.target, self.vocab, last_NH, config.temperature)
        label_BMA = torch.stack([self._labels(aligned, i) for i in (-1, *rows)], -1)
        tokens = max(1, int(keep_BMA[..., 0].sum()))
        given = noisy(batch, self.shape.taps, config.noise if self.module.training else 0.0)
        y_RH, above_R = self.outputs(given, aligned, keep_BMA), label_BMA[..., :-1][keep_BMA]
        label_R = label_BMA[..., 1:][keep_BMA]
        joint_RI, head_DI = self.joint(y_RH, above_R)
        weight_R = None
        if config.dpace is not None:
            weight_R = self.paced(aligned, keep_BMA, confidences(joint_RI, head_DI, label_R))
        loss = head_loss(
            joint_RI, head_DI, config.loss, p_ND=p_ND, row_R=row_R, label_R=label_R, weight_R=weight_R
        )
        if whole_CD is not None and row_R is not None:
            proj = self.module.confidence_head["proj"]
            judged = confidence_loss(proj, joint_RI, head_DI, whole_CD, row_R, weight_R)
            loss = loss + config.confidence * judged
        return Step(loss / tokens, tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        aligned, rows = Aligned(batch, EAGLE), self.shape.guesses
        every_BMA = aligned.real_BA.new_ones(*aligned.real_BA.shape, rows)
        above_BMA = torch.stack([self._labels(aligned, i - 1) for i in range(rows)], -1)
        joint_RI, head_DI = self.joint(self.outputs(batch, aligned, every_BMA), above_BMA.flatten())
        y_BMAI = joint_RI.view(*every_BMA.shape, -1)
        return judge_ranks(self.ranks, y_BMAI.unbind(2), batch, aligned, self, head_DI, self.temper)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = {
            **self.about(self.method, self.shape.taps),
            **write_shape(self.shape),
            "decoder": decoder_to_json(self.shape.decoder),
            "temper": self.temper.found(),
        }
        write_tree(folder, config, self, self.ranks, provenance)


def _hardly_used(target: Target, vocab: VocabMap | None) -> int:
    """The token that masks where none is named; behind one that texts hold, guesses are worse."""
    kept = always_kept(target)
    drafted_V = [False] * target.vocab_size if vocab is None else (vocab.feed_V >= 0).tolist()
    free = (one for one in range(target.vocab_size - 1, -1, -1) if one not in kept and not drafted_V[one])
    return next(free, target.vocab_size - 1)


def _fused(config: DflashTraining, target: Target) -> tuple[str, ...]:
    """Features that stand side by side; in shallow targets one may serve twice.

    Raises:
        ModelError: layers that the target does not have.
    """
    last = target.num_layers
    if config.taps is None:
        streams = tuple(f"hidden.{one}" for one in default_layers(target))
        return streams if config.rows == "masks" else (*streams, LAST)
    layers = config.taps.split(",")
    if not all(word == "-1" or (word.isdecimal() and int(word) <= last) for word in layers):
        raise ModelError(f"dflash: taps={config.taps!r}, but {target.name} has layers 0 to {last}, and -1")
    return tuple(f"hidden.{word}" for word in layers)
