"""An acceptance head, which foresees the guesses of a draft model that the target keeps.

    X    an answer of the target                    p, q   its distributions along X, and the draft model's
    Y_t  drawn from q(. | X before t)               a_t    min(1, p(Y_t) / q(Y_t)), its acceptance
    Z_t  X_t with chance ``mix``, else Y_t          g_t    last state of the draft model, fed with Z

The head learns a_t from g_t wherever Z_t is Y_t. So it meets what drafting meets, drafted tokens
behind drafted tokens, while labels are those of the answer. Labels are soft: a_t is the chance
with which verification keeps Y_t, and not whether it did. ``label=overlap`` takes its mean over
all tokens that might have been drawn there, sum min(p, q).

    loss = sum w (1 - a) (-log(1 - s)) + a (-log s)  over  sum w (1 - a) + a

s is the estimate and w the ``weight`` of refusals. The draft model is frozen; Y and Z are drawn
anew in every step. What training reports as acceptance is the held-out score of the estimates. It
is 1 less the same sums, with s^2 and (1 - s)^2 in the place of the logarithms.

Paper: Huang et al. 2024 (SpecDec++), arXiv:2405.19715 (blocks are D, mix is r).

Shape letters: B sequences, T tokens, N distributions, R learning rows, C rows of a chunk, W width of the
draft model, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import about
from outpace.law import VocabMap
from outpace.methods.draft_model.acceptance_head import METHOD, HeadShape
from outpace.methods.draft_model.drafter import DraftModelConfig, load_model
from outpace.methods.draft_model.on_policy import features
from outpace.models.base import HEAD, TAPS, Target
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import CHUNK
from outpace.train.objective import LAST, Objective, Step, write_drafter

STATE, LABEL = "draft.hidden.-1", "draft.accepted"
"""Features of a batch that was drawn: g of every row, and a of every row that learns, else -1."""
LABELS = ("token", "overlap")


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceTraining:
    draft: str | None = None
    """The draft model, as in ``draft_model[model=...]``; the one trained for the target by
    default."""
    draft_layers: int | None = None
    """Use only its first so many layers."""
    blocks: int = 3
    """Residual blocks of the head."""
    tied: bool = True
    """Whether they share their weights."""
    weight: float = 6.0
    """What a refusal counts in the loss, beside an acceptance."""
    mix: float = 0.15
    """Share of the tokens that stay the target's own."""
    label: str = "token"
    """``token``: acceptance of the token drawn; ``overlap``: its mean over what might be drawn."""
    temperature: float = 1.0
    """Of guesses and of judging; 0: both take their likeliest token."""
    seed: int = 0
    """Of the tokens drawn for measuring."""

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"label must be one of {', '.join(LABELS)}, got {self.label!r}")
        if self.blocks < 0 or self.weight <= 0 or self.temperature < 0 or not 0 <= self.mix < 1:
            raise ValueError(
                "blocks and temperature must be at least 0, weight above 0, mix in [0, 1), got "
                f"{self.blocks}, {self.temperature}, {self.weight}, {self.mix}"
            )


class HeadNet(nn.Module):
    """What is trained; names and arithmetic are those of `AcceptanceHead`. Starts at one half."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(shape.stored))
        self.out = nn.Linear(shape.width, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_RW: Tensor) -> Tensor:
        for i in range(self.shape.blocks):
            block = self.blocks[0 if self.shape.tied else i]
            x_RW = x_RW + F.silu(block(x_RW).float())
        odds_R1: Tensor = self.out(x_RW)
        return odds_R1.squeeze(-1).float()


def weighted_loss(odds_R: Tensor, a_R: Tensor, weight: float) -> Tensor:
    """The loss of the module's text, a scalar."""
    no_R, yes_R = weight * (1 - a_R), a_R
    loss = -(no_R * F.logsigmoid(-odds_R) + yes_R * F.logsigmoid(odds_R)).sum()
    return loss / (no_R + yes_R).sum().clamp_min(1e-9)


def law(z_CD: Tensor, temperature: float) -> Tensor:
    """What is drawn from at a temperature, float32; at 0 the likeliest token is certain."""
    if temperature == 0:
        return F.one_hot(z_CD.argmax(-1), z_CD.shape[-1]).float()
    return (z_CD.float() / temperature).softmax(-1)


class Acceptance(Objective):
    """A head in training, beside a draft model that is not."""

    Config = AcceptanceTraining
    module: HeadNet
    on_policy_share = 1.0

    def __init__(
        self, config: AcceptanceTraining, target: Target, draft: Target, id_D: Tensor | None, net: HeadNet
    ) -> None:
        self.config, self.target, self.draft, self.module = config, target, draft, net
        self._id_D = id_D

    @classmethod
    def taps(cls, config: AcceptanceTraining, target: Target) -> tuple[str, ...]:
        return (LAST,)

    @classmethod
    def build(cls, config: AcceptanceTraining, target: Target, vocab: VocabMap | None) -> Acceptance:
        """Begin; the vocabulary is the draft model's, whatever ``vocab`` says."""
        target.require(frozenset({TAPS, HEAD}), METHOD)
        chosen = DraftModelConfig(model=config.draft, layers=config.draft_layers)
        draft, id_D = load_model(chosen, target)
        draft.require(frozenset({TAPS, HEAD}), f"{METHOD}, of its draft model,")
        shape = HeadShape(width=draft.hidden_size, blocks=config.blocks, tied=config.tied)
        return cls(config, target, draft, id_D, HeadNet(shape).to(target.device))

    @classmethod
    def spec(cls, config: AcceptanceTraining, folder: Path | None) -> str:
        own = {"model": config.draft, "layers": config.draft_layers, "acceptance": folder}
        said = [f"{key}={value}" for key, value in own.items() if value is not None]
        return f"draft_model[{' '.join([*said, 'policy=specdecpp', 'tree_size=20'])}]"

    @torch.no_grad()
    def on_policy(self, batch: Batch, seed: int) -> Batch:
        """Draw Y and Z. Cost: two passes of the draft model over the batch, and two heads."""
        coins = torch.Generator(device=batch.token_BT.device).manual_seed(seed)
        aligned, lengths = Aligned(batch, DRAFT_MODEL), batch.length_B.tolist()
        with torch.autocast(batch.token_BT.device.type, enabled=False):
            along = features(self.draft, batch.token_BT, lengths, (LAST,))[LAST]
            token_N, a_N = self._drawn(aligned.laws_of(along), aligned.laws_of(batch.feature[LAST]), coins)
            place_N = aligned.law_N + 1
            drawn_N = torch.rand(len(a_N), generator=coins, device=a_N.device) >= self.config.mix
            token_BT = batch.token_BT.clone()
            token_BT.view(-1)[place_N[drawn_N]] = token_N[drawn_N]
            state_BTW = features(self.draft, token_BT, lengths, (LAST,))[LAST]
        label_BT = torch.full_like(token_BT, -1, dtype=torch.float32)
        label_BT.view(-1)[place_N[drawn_N]] = a_N[drawn_N]
        fresh = {STATE: state_BTW, LABEL: label_BT[..., None]}
        return replace(batch, token_BT=token_BT, feature=fresh)

    def _drawn(self, draft_NW: Tensor, last_NH: Tensor, coins: torch.Generator) -> tuple[Tensor, Tensor]:
        """Target ids of tokens drawn from q, and what their labels are, both [N]."""
        tokens, labels, heat = [], [], self.config.temperature
        for lo in range(0, len(draft_NW), CHUNK):
            z_CD = self.draft.head(draft_NW[lo : lo + CHUNK])[:, : self.target.vocab_size]
            q_CD, p_CV = law(z_CD, heat), law(self.target.head(last_NH[lo : lo + CHUNK]), heat)
            pick_C1 = torch.multinomial(q_CD, 1, generator=coins)
            token_C1 = pick_C1 if self._id_D is None else self._id_D[pick_C1]
            if self.config.label == "overlap":
                p_CD = p_CV[:, : q_CD.shape[1]] if self._id_D is None else p_CV[:, self._id_D]
                labels.append(torch.minimum(p_CD, q_CD).sum(-1))
            else:
                ratio_C1 = p_CV.gather(1, token_C1) / q_CD.gather(1, pick_C1)
                labels.append(ratio_C1.clamp_max(1).squeeze(1))
            tokens.append(token_C1.squeeze(1))
        none = draft_NW.new_zeros(0)
        return (torch.cat(tokens), torch.cat(labels)) if tokens else (none.long(), none.float())

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """States [R, W] and labels [R] of the learning rows; drawn here if they are not yet."""
        if LABEL not in batch.feature:
            batch = self.on_policy(batch, self.config.seed)
        label_BT = batch.feature[LABEL].squeeze(-1)
        return batch.feature[STATE][label_BT >= 0].float(), label_BT[label_BT >= 0]

    def loss(self, batch: Batch) -> Step:
        state_RW, a_R = self.rows(batch)
        return Step(weighted_loss(self.module(state_RW), a_R, self.config.weight), len(a_R))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        """The score of the module's text, as the acceptance at depth 1; of rows by weight."""
        state_RW, a_R = self.rows(batch)
        s_R, no_R = self.module(state_RW).sigmoid(), self.config.weight * (1 - a_R)
        right = (no_R * (1 - s_R * s_R) + a_R * (1 - (1 - s_R) ** 2)).sum()
        return Step(torch.zeros(()), len(a_R), right[None], (no_R + a_R).sum()[None])

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        target, draft, shape = self.target, self.draft, self.module.shape
        config = {
            "method": METHOD,
            **about(target),
            "taps": [],
            "draft": draft.name,
            "draft_digest": draft.digest,
            "blocks": shape.blocks,
            "tied": shape.tied,
            "weight": self.config.weight,
        }
        write_drafter(folder, config, self.named(), None, provenance)
