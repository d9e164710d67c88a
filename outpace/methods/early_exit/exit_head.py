"""A trained exit: what stands between an early layer and the target's own head.

    norm     h after layer e  ->  n = norm(h)  ->  n + n W  ->  rows of the target's head
    layer    h after layer e  ->  norm(block(h))            ->  rows of the target's head

The file of the first kind has ``norm.weight`` [H] as the target stores its norms, and may have
``linear.weight`` [H, H]. That of the second, which ``outpace train early_exit`` makes, has a layer of the
target's shape besides (`outpace.methods.early_exit.adapter`). The layer has attention over the text, and
its keys are kept in step as those of any adapter (`outpace.methods.early_exit.adapter_rows`). Either may
have ``d2t`` (see `outpace.drafters.trained`); config.json names the ``layer`` e. The head's rows are the
target's: a slice, never a copy of their own.

Paper: EESD, arXiv:2406.03853 (the second kind; its N is e).

Shape letters: T rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.trained import lender, read_config, read_tensors, rounding, vocab_map
from outpace.errors import ModelError
from outpace.methods.early_exit.adapter_rows import (
    AdapterRows,
    AdapterState,
    exit_layer,
    made_adapter,
    weight_shapes,
)
from outpace.methods.early_exit.exits import Belief
from outpace.methods.early_exit.thresholds import BetaMixture, Said
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.packed import Linear
from outpace.models.rowwise import Norm
from outpace.tree.growth import Branch
from outpace.types import Feed


@dataclass(slots=True, eq=False)
class ExitState(AdapterState):
    """What one sequence has learned, its draft, and its rows behind a trained layer."""

    slot: int = -1
    """In the cache of a trained layer; -1 if the exit has none."""
    beliefs: list[Belief] = field(default_factory=list)
    """Per exit."""
    exit: int = 0
    """Which of the exits made the draft."""
    mixtures: list[BetaMixture] = field(default_factory=list)
    """Per exit: how its confidence tells right guesses from wrong ones."""
    said: dict[int, Said] = field(default_factory=dict)
    """Node, as growth calls it -> what the exit guesses after it."""
    judged: list[tuple[int, Said]] = field(default_factory=list)
    """Row of verification, and what the exit guessed there, for the draft that was proposed."""


class ExitHead:
    """Reads an exit from its folder, and runs it.

    Raises:
        ModelError: corrupt, made for another target, or of shapes that do not fit.
    """

    def __init__(self, folder: Path, target: Target, quantize: str | None = None) -> None:
        config, tensors = read_config(folder, target, "early_exit"), read_tensors(folder)
        self._target = lender(target, "early_exit")
        self.layer = exit_layer(folder, config, target)
        """e: layers of the target that run before it."""
        self.rows: AdapterRows | None = None
        """Of the trained layer, if there is one."""
        if "decoder" in config:
            adapter = made_adapter(folder, config, tensors, target, mlp=True, quantize=quantize)
            self.rows = AdapterRows(adapter, f"hidden.{self.layer}", target.clock)
        else:
            self._read_norm(folder, tensors, rounding(quantize, target))
        self.vocab = vocab_map(tensors, target.vocab_size)
        self.id_D = None if self.vocab is None else self.vocab.to_target_D.to(target.device)
        """Target ids of the columns; None: they are the ids."""

    def _read_norm(self, folder: Path, tensors: Mapping[str, Tensor], quantize: str | None) -> None:
        target, size, found = self._target, self._target.hidden_size, weight_shapes(tensors)
        wanted = {"norm.weight": (size,), "linear.weight": (size, size)}
        if "norm.weight" not in found or any(wanted.get(n) != s for n, s in found.items()):
            raise ModelError(f"{folder} holds tensors of shapes {found}, an exit has {wanted}")
        self._norm = Norm(tensors["norm.weight"].to(target.device), target.config)
        self._linear: Linear | None = None
        if "linear.weight" in tensors:
            form = Form(target.dtype, target.device, quantize=quantize)
            self._linear = form.linear(tensors["linear.weight"])

    def logits(self, branches: Sequence[Branch[Any]], fed: Sequence[Feed], hidden_TH: Tensor) -> Tensor:
        """Logits [T, D] of nodes, as growth gives them.

        Args:
            fed: what the target was fed for them, in the slots lent.
            hidden_TH: its residual stream after layer e.
        """
        clock = self._target.clock
        with clock:
            if self.rows is None:
                normed_TH = self._norm(hidden_TH)
                if self._linear is not None:
                    more_TH = self._linear(normed_TH.to(self._target.dtype)).float()
                    normed_TH = normed_TH + more_TH
                y_TH = normed_TH.to(self._target.dtype)
            else:
                y_TH = self.rows.run(branches, fed, hidden_TH)
            with torch.no_grad():
                logits_TD = self._target.head(y_TH, self.vocab)
        clock.count -= 1  # the layers below and this are one pass of the drafter
        return logits_TD
