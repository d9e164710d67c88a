"""Exits and their classifier in training: the target is frozen, and labels are what it says itself.

    exits        as for `s2d`, at every token of the data, prompts as well
    EXIT         the exit's likeliest token is the target's
    CONTINUE     it is not, and that of a deeper exit is
    STOP         neither; behind all layers: the target's likeliest token is not the one that follows

The last label needs text that the target did not write: tokens of prompts, such as code in them. Exits
change while they learn, and labels with them; no gradient of the classifier reaches them.

Paper: SEC, arXiv:2401.09964, trains heads of their own first, then labels, then the classifier. Its labels
compare with the text, and say EXIT at layers above one that is right even if they are wrong themselves.

Shape letters: X exits, S = X + 1 places, B sequences, T tokens, R rows that are labelled, H hidden size,
I = H + 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.methods.s2d.files import SEC
from outpace.methods.s2d.objective import ExitsNet, S2d, S2dTraining
from outpace.methods.s2d.sec_drafter import CONTINUE, EXIT, STOP, scores, unsure
from outpace.train.align import places
from outpace.train.batches import Batch
from outpace.train.objective import LAST, Step, guesses

_LABELLED = 256
"""Most rows of a batch that the classifier learns from: each needs the whole head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecTraining(S2dTraining):
    """Options of ``outpace train sec``: those of ``s2d``."""


class SecNet(ExitsNet):
    def __init__(self, norm_H: Tensor, exits: int, eps: float, offset: float) -> None:
        super().__init__(norm_H, exits, eps, offset)
        self.classes = nn.Parameter(torch.zeros(exits + 1, 3, len(norm_H) + 2, device=norm_H.device))
        with torch.no_grad():
            self.classes[:-1, EXIT, -1] = 1.0
            # Behind all layers a token is at first as doubtful as the target says, and nothing is deeper.
            self.classes[-1, STOP, -2], self.classes[-1, CONTINUE, -1] = 1.0, -20.0

    def normed(self, exit_: int, x_RH: Tensor) -> Tensor:
        """What the classifier reads at an exit, without gradients."""
        weight_H = self.norms[exit_].detach() + self._offset
        return F.rms_norm(x_RH.float(), weight_H.shape, weight_H, self._eps)


class Sec(S2d):
    Config = SecTraining
    method: ClassVar[str] = SEC
    Net: ClassVar[type[ExitsNet]] = SecNet
    module: SecNet

    def loss(self, batch: Batch) -> Step:
        """That of all exits, and the mean cross entropy of the classifier at its places."""
        whole = replace(batch, answer_BT=torch.ones_like(batch.answer_BT))
        step = super().loss(whole)
        return replace(step, loss=step.loss + self.class_loss(batch))

    def class_loss(self, batch: Batch) -> Tensor:
        states, unsure_R, label_SR, known_SR = self.labels(batch)
        losses = []
        for place, (n_RH, label_R, known_R) in enumerate(zip(states, label_SR, known_SR, strict=True)):
            if bool(known_R.any()):
                last = unsure_R if place == len(self.layers) else None
                score_R3 = scores(self.module.classes[place], n_RH, last)
                losses.append(F.cross_entropy(score_R3[known_R], label_R[known_R]))
        return torch.stack(losses).mean()

    @torch.no_grad()
    def labels(self, batch: Batch) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """What the classifier reads at some rows, what it should say, and whether that is known.

        Returns:
            float32 [R, H] for every place, float32 [R] for the last one, int64 [S, R] and bool [S, R].
        """
        rows_R = _some(batch)
        last_RH = batch.feature[LAST].flatten(0, 1)[rows_R].float()
        logits_RV = self.target.head(last_RH)
        truth_R = logits_RV.argmax(-1)
        right, states = [], []
        for i, layer in enumerate(self.layers):
            x_RH = batch.feature[f"hidden.{layer}"].flatten(0, 1)[rows_R]
            y_RH = self.module(i, x_RH[None])[0]
            guess_R, _ = guesses(y_RH, self._head_DH, self.vocab, None, rows_R)
            right.append(guess_R == truth_R)
            states.append(self.module.normed(i, x_RH))
        labels, deeper_R = list[Tensor](), torch.zeros_like(right[0])
        for right_R in reversed(right):
            label_R = torch.where(deeper_R, CONTINUE, STOP)
            labels.insert(0, label_R.where(~right_R, EXIT))
            deeper_R = deeper_R | right_R
        follows_R = batch.token_BT.flatten()[rows_R + 1]
        labels.append(torch.where(follows_R == truth_R, EXIT, STOP))
        known_SR = torch.ones(len(labels), len(rows_R), dtype=torch.bool, device=rows_R.device)
        known_SR[-1] = ~batch.answer_BT.flatten()[rows_R + 1]
        return [*states, last_RH], unsure(logits_RV), torch.stack(labels), known_SR


def _some(batch: Batch) -> Tensor:
    """Rows of the flattened batch that have a next token, int64; evenly some of them if they are many."""
    inside_BT = places(batch) + 1 < batch.length_B[:, None]
    rows_R = inside_BT.flatten().nonzero().squeeze(1)
    return rows_R[:: -(-len(rows_R) // _LABELLED)] if len(rows_R) else rows_R
