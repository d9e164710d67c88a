"""A trained exit: a norm, and perhaps one matrix, between a layer and the target's own head.

    h after layer e  ->  n = norm(h)  ->  n + n W  ->  rows of the target's head

The file has ``norm.weight`` [H] as the target stores its norms, and may have ``linear.weight``
[H, H] and ``d2t`` (see `outpace.drafters.trained`); its config.json names the ``layer``. The
head's rows are the target's: a slice, never a copy of their own.

Shape letters: T rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outpace.drafters.trained import CONFIG, lender, read_config, read_tensors, vocab_map
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.blocks import Norm
from outpace.models.packed import Linear


class ExitHead:
    """Reads an exit from its folder.

    Args:
        folder: of the exit.
        target: lends its head.

    Raises:
        ModelError: corrupt, made for another target, or of shapes that do not fit.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        config, tensors = read_config(folder, target, "early_exit"), read_tensors(folder)
        self._target = lender(target, "early_exit")
        layer = config.get("layer")
        if not isinstance(layer, int) or not 0 < layer < target.num_layers:
            raise ModelError(
                f"{folder / CONFIG}: layer is {layer!r}, need 1 to {target.num_layers - 1}"
            )
        self.layer: int = layer
        """e: layers that run before it."""
        size = target.hidden_size
        shapes = {name: list(one.shape) for name, one in tensors.items() if name != "d2t"}
        wanted = {"norm.weight": [size], "linear.weight": [size, size]}
        if "norm.weight" not in shapes or any(wanted.get(n) != s for n, s in shapes.items()):
            raise ModelError(f"{folder} holds tensors of shapes {shapes}, an exit has {wanted}")
        self._norm = Norm(tensors["norm.weight"].to(target.device), self._target.config)
        self._linear = None
        if "linear.weight" in tensors:
            self._linear = Linear(tensors["linear.weight"].to(target.device, target.dtype))
        self._vocab = vocab_map(tensors, target.vocab_size)
        self.id_D = None if self._vocab is None else self._vocab.to_target_D.to(target.device)
        """Target ids of the columns; None: they are the ids."""

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, D] of the residual stream after the layer. Rows do not feel each other."""
        normed_TH = self._norm(hidden_TH)
        if self._linear is not None:
            normed_TH = normed_TH + self._linear(normed_TH.to(self._target.dtype)).float()
        return self._target.head(normed_TH.to(self._target.dtype), self._vocab)
