"""A draft model in training while it serves: learning, judging, and its weights to and fro.

One network serves all branches: their weights take turns in it.

Shape letters: R judged tokens, K entries of a distribution, D draft vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.trained import CONFIG, decoder_from_json, lender, read_config, read_tensors, vocab_map
from outpace.methods.draft_model.files import EMBED, HEAD
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.draft_model.online.data import Lesson, OnlineConfig, Piece, accepted, top_kl
from outpace.methods.draft_model.training_net import DraftNet
from outpace.models.base import Target
from outpace.models.load import fast_dtype
from outpace.train import checkpoint
from outpace.train.align import DRAFT_MODEL, Aligned
from outpace.train.objective import draft_ids


@dataclass(slots=True)
class Score:
    """Judged tokens and how many of them were accepted, piece by piece."""

    accepted: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.accepted) / max(1, sum(self.rows))

    def over(self, other: Score) -> tuple[float, float]:
        """How much more is accepted than under another drafter, and the standard error of that."""
        count = np.array(self.rows, float)
        more = np.array(self.accepted) - np.array(other.accepted)
        gain = float(more.sum() / max(1.0, count.sum()))
        error = float(np.sqrt(((more - gain * count) ** 2).sum()) / max(1.0, count.sum()))
        return gain, error


class Desk:
    """The network, its optimizer, and the weights that are in it at present.

    Args:
        base: drafter folder that gives the shape.

    Raises:
        ModelError: a drafter of another target or method, or damaged files.
    """

    def __init__(self, base: Path, target: Target, config: OnlineConfig) -> None:
        self.objective = read_objective(base, target)
        self.device = target.device
        self._config = config
        self._parameters = list(self.objective.module.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self._bf16 = fast_dtype(self.device) is torch.bfloat16

    def seat(self, folder: Path, training: Mapping[str, Tensor] | None) -> None:
        """Put in what is to be trained: a training under way, or else a drafter folder's weights.

        Raises:
            ModelError: a folder that cannot be read.
        """
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        if training is None:
            self.put(read_tensors(folder))
        else:
            checkpoint.restore(self.objective.module, self._optimizer, dict(training), folder)

    def training(self) -> dict[str, Tensor]:
        """A copy of weights and moments, for ``seat``."""
        tensors = checkpoint.training_tensors(self.objective.module, self._optimizer)
        return {name: one.detach().clone() for name, one in tensors.items()}

    def stored(self) -> dict[str, Tensor]:
        """The weights as a drafter folder would hold them; a copy."""
        return {name: one.detach().to(torch.bfloat16) for name, one in self.objective.module.stored().items()}

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights in, by the names of a drafter folder."""
        for name, parameter in self.objective.module.stored().items():
            parameter.copy_(weights[name])

    def learn(self, pieces: Sequence[Piece]) -> int:
        """Add the gradient of the sum of ``top_kl`` over judged tokens; gives their number."""
        if not pieces:
            return 0
        lesson = Lesson.of(pieces, self.device)
        with torch.enable_grad(), self._autocast():
            z_RD = self._logits(lesson)
            id_RK = draft_ids(lesson.id_RK, self.objective.vocab)
            torch.autograd.backward([top_kl(z_RD, id_RK, lesson.p_RK).sum()])
        return len(z_RD)

    def update(self, rows: int) -> bool:
        """One step of the optimizer over so many judged tokens.

        Returns:
            False if the gradient is not finite; nothing has changed then.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(max(1, rows))
        length = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip)
        finite = bool(length.isfinite())
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return finite

    def judge(self, weights: Mapping[str, Tensor], pieces: Sequence[Piece]) -> Generator[None, None, Score]:
        """Put weights in and score them, a unit of pieces per turn."""
        self.put(weights)
        score, waiting = Score(), list(pieces)
        while waiting:
            longest = len(waiting[0].ids)
            count = 1
            while count < len(waiting):
                longest = max(longest, len(waiting[count].ids))
                if (count + 1) * longest > self._config.unit_tokens:
                    break
                count += 1
            part, waiting = waiting[:count], waiting[count:]
            lesson = Lesson.of(part, self.device)
            with torch.no_grad(), self._autocast():
                z_RD = self._logits(lesson)
            id_RK = draft_ids(lesson.id_RK, self.objective.vocab)
            taken_R = accepted(z_RD, id_RK, lesson.p_RK, lesson.greedy_R).double().cpu()
            taken_B = torch.zeros(len(part), dtype=torch.float64)
            score.accepted += taken_B.index_add(0, lesson.piece_R.cpu(), taken_R).tolist()
            score.rows += [piece.rows for piece in part]
            yield None
        return score

    def _logits(self, lesson: Lesson) -> Tensor:
        """Draft logits of the judged tokens, float32 [R, D]."""
        aligned = Aligned(lesson.batch, DRAFT_MODEL)
        hidden_BAW = self.objective.hidden(lesson.batch, aligned)
        z_RD: Tensor = hidden_BAW[aligned.real_BA] @ self.objective.head().T
        return z_RD.float()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16)


def read_objective(folder: Path, target: Target) -> DraftModelObjective:
    """A draft model in training, with the weights of a drafter folder.

    Raises:
        ModelError: a drafter of another target or method, or damaged files.
    """
    lent = lender(target, "draft_model")
    said, tensors = read_config(folder, target, "draft_model"), read_tensors(folder)
    vocab = vocab_map(tensors, target.vocab_size)
    shape = decoder_from_json(said.get("decoder", {}), folder / CONFIG)
    head = len(tensors[HEAD]) if HEAD in tensors else None
    net = DraftNet(shape, target.device, embed=EMBED in tensors, head=head).to(target.device)
    made = DraftModelObjective(DraftModelTraining(), lent, vocab, net)
    with torch.no_grad():
        for name, parameter in net.stored().items():
            parameter.copy_(tensors[name])
    return made
