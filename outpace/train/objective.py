"""What every trained method says about itself: what it reads, learns, is judged by, and leaves.

Shape letters: B sequences, T tokens, R rows, A learning rows of a sequence, N distributions, H hidden size,
V vocabulary, D draft vocabulary, J depths.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outpace.drafters.trained import CONFIG, PROVENANCE, WEIGHTS, about
from outpace.files import replaced, write_whole
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import check, chunks, head_loss, weighted

LAST = "hidden.-1"
"""The tap from which the target's distributions are computed."""
DEPTHS = 5
"""Depths by which held-out acceptance is reported."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one batch gave. Sums, so that batches and processes add up."""

    loss: Tensor
    """Scalar, mean over ``tokens``; with gradients if the batch was trained on."""
    tokens: int
    """Rows that counted."""
    accepted_by_depth: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[J] rows whose guess at this depth, and at all before, was the target's argmax."""
    counted_by_depth: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[J] rows whose guesses at all earlier depths were; accepted / counted is the acceptance."""
    overlap_by_depth: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[J] sum of alpha = sum min(p, q) over the rows counted; empty if the distributions are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTraining:
    """Options of all that learn the target's distributions."""

    loss: str = "kl"
    """One of the losses of `outpace.train.losses`: ce, kl, rkl, jsd, tv, lk, lk_mix."""
    temperature: float = 1.0
    """Divides the target's logits before they become labels."""

    def __post_init__(self) -> None:
        check(self.loss)
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")


class Tally(ABC):
    """Counts of an objective besides acceptance, which its ``save`` writes."""

    @abstractmethod
    def gather(self, sum: Callable[[Tensor], Tensor]) -> None:
        """Put the sums over all processes in the place of this one's counts.

        Args:
            sum: gives sums of vectors; shorter ones count as if zeros followed.
        """


class Objective(ABC):
    """A method in training. Its weights are float32; `save` writes what drafts."""

    Config: ClassVar[type]
    """Frozen keyword-only dataclass: the options of ``outpace train METHOD``."""
    module: nn.Module
    """All that is trained."""
    fresh: ClassVar[Sequence[str]] = ()
    """Tensors that a drafter to start from may lack: they start as usual."""
    done: float = 0.0
    """Share of the training that is behind; the loop says so before every step."""
    config: Any
    target: Any
    vocab: VocabMap | None

    @classmethod
    @abstractmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        """Features wanted in batches."""

    @classmethod
    @abstractmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> Objective:
        """A drafter before its first step, taken from the target or drawn from a seed.

        Args:
            target: lends weights and computes distributions; is never changed.
            vocab: the draft vocabulary; None is the target's whole.

        Raises:
            ModelError: the target cannot lend what is needed, or shapes do not fit.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Step:
        """What to descend on. The batch is on the target's device."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Step:
        """Held-out acceptance by depth at temperature 0, and alpha. Call under no_grad."""

    @abstractmethod
    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the drafter folder, or replace its files, each in one step.

        Args:
            provenance: what made it, as plain data.
        """

    def gather(self, sum: Callable[[Tensor], Tensor]) -> None:
        """Add up what ``evaluate`` counted in every process, for ``save``.

        Args:
            sum: gives the sums of vectors over processes; all call it equally often.
        """
        for one in vars(self).values():
            if isinstance(one, Tally):
                one.gather(sum)

    def named(self) -> Mapping[str, Tensor]:
        """What is trained, by the names under which ``save`` writes it; parts are views."""
        return self.module.state_dict()

    def learn(
        self,
        states: Sequence[Tensor],
        batch: Batch,
        aligned: Aligned,
        ahead: int | Sequence[int],
        head_DH: Tensor,
        weight_J: Sequence[float] = (1.0,),
        refused: float = 1.0,
    ) -> Step:
        """The loss that ``config.loss`` names, of guesses one deeper each.

        Args:
            states: what the head reads at the learning rows, [B, A, H] for every depth.
            ahead: how many tokens ahead the first of them guesses, or each of them.
            refused: weight of the rows whose drafts would begin behind a refused guess.
        """
        places = range(ahead, ahead + len(states)) if isinstance(ahead, int) else ahead
        begins_BA = None if refused == 1.0 else self._behind_refused(states[0], aligned, places[0], head_DH)
        labels = [draft_ids(aligned.token(place), self.vocab) for place in places]
        keeps = [aligned.teaches(place) & (label >= 0) for place, label in zip(places, labels, strict=True)]
        rows = [aligned.law(place)[keep_BA] for place, keep_BA in zip(places, keeps, strict=True)]
        p_ND, whole_CD, losses, counts = None, None, [], []
        if self.config.loss != "ce":
            used_N, row_R = torch.unique(torch.cat(rows), return_inverse=True)
            rows = list(torch.split(row_R, [len(one) for one in rows]))
            last_NH = aligned.laws_of(batch.feature[LAST])[used_N]
            p_ND = target_laws(self.target, self.vocab, last_NH, self.config.temperature)
            whole_CD = self.beside_laws(last_NH)
        for state_BAH, label_BA, keep_BA, row_R in zip(states, labels, keeps, rows, strict=True):
            weight_R = None if begins_BA is None else torch.where(begins_BA[keep_BA], refused, 1.0)
            losses.append(
                head_loss(
                    state_BAH[keep_BA],
                    head_DH,
                    self.config.loss,
                    p_ND=p_ND,
                    row_R=row_R,
                    label_R=label_BA[keep_BA],
                    weight_R=weight_R,
                )
                + self.beside(state_BAH[keep_BA], head_DH, whole_CD, row_R)
            )
            counts.append(len(row_R) if weight_R is None else float(weight_R.sum()))
        tokens = max(1, counts[0])
        return Step(weighted(losses, weight_J) / tokens, round(tokens))

    def beside(
        self, state_RH: Tensor, head_DH: Tensor, whole_CD: Tensor | None, row_R: Tensor
    ) -> Tensor | float:
        """A loss beside that of the guesses of a depth, summed over its rows.

        Args:
            whole_CD: from ``beside_laws``.
        """
        return 0.0

    def beside_laws(self, last_NH: Tensor) -> Tensor | None:
        """What ``beside`` needs of the target's distributions at some rows."""
        return None

    @torch.no_grad()
    def _behind_refused(self, state_BAH: Tensor, aligned: Aligned, ahead: int, head_DH: Tensor) -> Tensor:
        """Rows whose pending token the row before would not have guessed, bool [B, A].

        In use a draft begins behind the token that replaced a refused guess, which surprises the drafter.
        """
        guess_R, _ = guesses(state_BAH.flatten(0, 1), head_DH, self.vocab, None, aligned.place_BA.flatten())
        wrong_BA = guess_R.view(aligned.place_BA.shape) != aligned.token(ahead)
        begins_BA = torch.zeros_like(wrong_BA)
        if wrong_BA.shape[1] > 1:
            begins_BA[:, 1:] = wrong_BA[:, :-1] & aligned.follows(1)
        return begins_BA

    def about(self, method: str, taps: Sequence[str]) -> dict[str, Any]:
        """What the config of every drafter folder begins with."""
        target = self.target
        return {
            "method": method,
            **about(target),
            "draft_vocab_size": target.vocab_size if self.vocab is None else len(self.vocab.to_target_D),
            "taps": list(taps),
        }

    @classmethod
    def spec(cls, config: Any, folder: Path | None) -> str | None:
        """The method spec that drafts with what lies in a folder (None: in its usual place).

        None where that is the drafter of the method's own name, as for most.
        """
        return None

    def on_policy(self, batch: Batch, seed: int) -> Batch:
        """The batch with answers that the drafter wrote itself; as it is for most methods.

        The loop calls this before ``loss`` for the share of batches that ``on_policy_share``
        asks for.
        """
        return batch

    @property
    def on_policy_share(self) -> float:
        """Share of batches to be passed through ``on_policy``."""
        return 0.0


@torch.no_grad()
def target_laws(target: Target, vocab: VocabMap | None, last_NH: Tensor, temperature: float = 1.0) -> Tensor:
    """The target's distributions over the draft vocabulary, normalised there; float32 [N, D].

    Cost: N rows of the head, over the draft vocabulary only.
    """
    parts = [target.head(last_NH[some], vocab).div_(temperature).softmax(-1) for some in chunks(last_NH)]
    return torch.cat(parts)


@torch.no_grad()
def whole_laws(
    target: Target, vocab: VocabMap | None, last_NH: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The part of the target's distributions that lies in the draft vocabulary, and the likeliest tokens.

    Returns:
        float32 [N, D], which need not sum to 1, and int64 target ids [N].
    """
    laws, ids = [], []
    for some in chunks(last_NH):
        p_CV = target.head(last_NH[some]).div_(temperature).softmax(-1)
        ids.append(p_CV.argmax(-1))
        laws.append(p_CV if vocab is None else p_CV[:, vocab.to_target_D.to(p_CV.device)])
    return torch.cat(laws), torch.cat(ids)


@torch.no_grad()
def guesses(
    hidden_RH: Tensor, head_DH: Tensor, vocab: VocabMap | None, p_ND: Tensor | None, row_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The drafter's likeliest tokens, int64 target ids [R], and alpha [R], 0 without ``p_ND``."""
    picked, overlaps = [], []
    for some in chunks(hidden_RH):
        z_CD = (hidden_RH[some] @ head_DH.T).float()
        picked.append(z_CD.argmax(-1))
        if p_ND is not None:
            overlaps.append(torch.minimum(z_CD.softmax(-1), p_ND[row_R[some]]).sum(-1))
        else:
            overlaps.append(torch.zeros(len(z_CD), device=z_CD.device))
    token_R = torch.cat(picked)
    if vocab is not None:
        token_R = vocab.to_target_D.to(token_R.device)[token_R]
    return token_R, torch.cat(overlaps)


@torch.no_grad()
def judge_rows(
    batch: Batch, target: Target, vocab: VocabMap | None, hidden_BAH: Tensor, head_DH: Tensor
) -> Step:
    """Held-out acceptance of a drafter whose row reads a token and guesses the next one.

    Args:
        hidden_BAH: what the head reads at the learning rows of ``Aligned(batch, DRAFT_MODEL)``.
    """
    aligned = Aligned(batch, DRAFT_MODEL)
    p_ND, truth_N = laws_for(batch, aligned, target, vocab)
    row_BA, text_BA = aligned.law(DRAFT_MODEL), aligned.token(DRAFT_MODEL)
    truth_BA = text_BA if truth_N is None else truth_N[row_BA]
    guess_R, alpha_R = guesses(hidden_BAH.flatten(0, 1), head_DH, vocab, p_ND, row_BA.flatten())
    right_BA, alpha_BA = guess_R.view_as(truth_BA) == truth_BA, alpha_R.view_as(truth_BA)
    chain, size = Chain(aligned.real_BA), right_BA.shape[1]
    # Row a guessed the text at depth 1; the row after it is the same chain at depth 2.
    for i in range(min(DEPTHS, size)):
        chain.narrow(size - i)
        chain.add(aligned.follows(i), right_BA[:, i:], (text_BA == truth_BA)[:, i:], alpha_BA[:, i:])
    for _ in range(size, DEPTHS):
        chain.narrow(0)
        chain.add(right_BA[:, :0], right_BA[:, :0], right_BA[:, :0], alpha_BA[:, :0])
    tokens = int(aligned.real_BA.sum())
    return chain.step(torch.zeros(()), tokens, with_overlap=truth_N is not None)


def draft_ids(token: Tensor, vocab: VocabMap | None) -> Tensor:
    """Draft ids of target ids, -1 where the draft vocabulary lacks them; any shape."""
    return token if vocab is None else vocab.feed_V.to(token.device)[token]


class Chain:
    """Counts, depth by depth, how far chains drafted at temperature 0 would have been right."""

    def __init__(self, alive: Tensor) -> None:
        self._alive = alive
        self._accepted: list[Tensor] = []
        self._counted: list[Tensor] = []
        self._overlap: list[Tensor] = []

    @property
    def alive(self) -> Tensor:
        """Rows whose guesses so far were right; as wide as what is added next."""
        return self._alive

    def add(self, known: Tensor, right: Tensor, follows: Tensor, overlap: Tensor) -> None:
        """One depth further; all tensors are of one shape.

        Args:
            known: whether what is right is known here.
            right: the guess is the target's likeliest token.
            follows: the text goes on with that token, so that the next depth is the same text.
        """
        counted = self._alive & known
        self._counted.append(counted.sum())
        self._accepted.append((counted & right).sum())
        self._overlap.append((overlap * counted).sum())
        self._alive = counted & right & follows

    def narrow(self, size: int) -> None:
        """Keep the first columns: later rows have no text so far ahead."""
        self._alive = self._alive[:, :size]

    def step(self, loss: Tensor, tokens: int, with_overlap: bool) -> Step:
        overlap = torch.stack(self._overlap).float() if with_overlap else torch.zeros(0)
        accepted, counted = torch.stack(self._accepted), torch.stack(self._counted)
        return Step(loss, tokens, accepted.float(), counted.float(), overlap)


def laws_for(
    batch: Batch, aligned: Aligned, target: Target, vocab: VocabMap | None
) -> tuple[Tensor | None, Tensor | None]:
    """``whole_laws`` of a batch, or (None, None) if it came without features."""
    if LAST not in batch.feature:
        return None, None
    return whole_laws(target, vocab, aligned.laws_of(batch.feature[LAST]))


def write_drafter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vocab: VocabMap | None,
    provenance: Mapping[str, Any],
) -> None:
    """Write a drafter folder, or replace its files, each in one step; weights as bfloat16.

    A reduced vocabulary adds ``d2t`` (offsets, int64 [D]) and ``t2d`` (bool [V]).
    """
    stored = {name: one.detach().to("cpu", torch.bfloat16).contiguous() for name, one in tensors.items()}
    if vocab is not None:
        to_target_D = vocab.to_target_D.cpu()
        stored["d2t"] = to_target_D - torch.arange(len(to_target_D))
        stored["t2d"] = (vocab.feed_V >= 0).cpu()
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / WEIGHTS) as fresh:
        save_file(stored, fresh, metadata={"format": "pt"})
    # The config comes last: a folder without one is no drafter yet.
    for name, content in ((PROVENANCE, provenance), (CONFIG, config)):
        write_whole(folder / name, json.dumps(dict(content), indent=1) + "\n")
